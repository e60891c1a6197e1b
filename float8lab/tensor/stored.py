"""The base of tensors that are stored in FP8 or in 4 bits: their memory, and their copies."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

__all__ = ["StoredTensor"]


class StoredTensor(Tensor):
    """Base of tensors that stand for the values of *parts*, those of ``__tensor_flatten__``."""

    _fields: ClassVar[tuple[str, ...]]
    """The attributes that the class sets; others are the object's, such as a Parameter's mark."""
    _readable: Tensor | None = None
    """The dequantized copy of which ``data_ptr`` gave the address."""

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        raise NotImplementedError

    def untyped_storage(self) -> torch.UntypedStorage:
        """Torch's record of a storage, which has no memory: 0 bytes at an address like no other."""
        # safetensors compares both to find tensors that share memory. A tensor that shares its
        # quantized data with another one is written as a copy of its own.
        storage = super().untyped_storage()
        record = vars(storage)
        if "size" not in record:
            record["size"] = storage.nbytes  # torch takes storages of size 0 for freed ones
            record["nbytes"] = int
        record["data_ptr"] = id(self).__int__
        return storage

    def share_memory_(self) -> Self:
        """Move the parts to shared memory."""
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the parts are in shared memory."""
        return getattr(self, self.__tensor_flatten__()[0][0]).is_shared()

    def _extra(self) -> dict[str, object]:
        """Attributes set on this object besides those that its class sets."""
        return {name: value for name, value in vars(self).items() if name not in self._fields}

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        if not self.is_leaf:
            raise RuntimeError(
                "deepcopy must get a leaf tensor; got one computed from others that require "
                "gradients. Call .detach() first."
            )
        copied = memo.get(id(self))
        if isinstance(copied, Tensor):
            return copied
        with torch.no_grad():
            x = self.detach().clone()
        x.requires_grad_(self.requires_grad)
        memo[id(self)] = x
        vars(x).update(copy.deepcopy(self._extra(), memo))
        if self.grad is not None:
            x.grad = copy.deepcopy(self.grad, memo)
        return x
