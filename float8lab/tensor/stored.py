"""The base class of tensors stored in FP8 or in 4 bits, with their memory and copying."""

from __future__ import annotations

import copy
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

__all__ = ["StoredTensor"]


class StoredTensor(Tensor):
    """Base of tensors whose values are stored in the inner tensors of ``__tensor_flatten__``."""

    _fields: ClassVar[tuple[str, ...]]
    """The attributes that the class sets; other attributes belong to the object (a Parameter)."""
    _readable: Tensor | None = None
    """The dequantized copy whose address ``data_ptr`` returned."""

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        raise NotImplementedError

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return torch's record of a storage without memory: 0 bytes at a unique address."""
        # safetensors compares both to find tensors that share memory. A tensor that shares its
        # quantized data with another tensor is written as a separate copy.
        storage = super().untyped_storage()
        record = vars(storage)
        if "size" not in record:
            record["size"] = storage.nbytes  # torch treats storages of size 0 as freed
            record["nbytes"] = int
        record["data_ptr"] = id(self).__int__
        return storage

    def share_memory_(self) -> Self:
        """Move the inner tensors to shared memory."""
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether the inner tensors are in shared memory."""
        return getattr(self, self.__tensor_flatten__()[0][0]).is_shared()

    def _extra(self) -> dict[str, object]:
        """Return the attributes of this object that its class does not set."""
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
