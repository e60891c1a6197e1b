"""The base class of tensors stored in FP8 or in 4 bits, with their memory and copying."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from float8lab.arguments import has_data
from float8lab.tensor.dispatch import announce_address

if TYPE_CHECKING:
    import numpy as np

__all__ = ["StoredTensor"]


class StoredTensor(Tensor):
    """Base of tensors whose values are stored in the inner tensors of ``__tensor_flatten__``."""

    _fields: ClassVar[tuple[str, ...]]
    """The attributes that the class sets; other attributes belong to the object (a Parameter)."""
    _format: ClassVar[tuple[str, str]]
    """The name of the storage format, and the function that saves in this format."""
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

    def data_ptr(self) -> int:
        """Return the address of a dequantized copy that lives as long as this object; 0 if empty.

        It is for code that reads a tensor's memory as ``dtype``, such as safetensors. Each call
        updates the copy; writes to the copy are lost.
        """
        if not has_data(getattr(self, self._fields[0])):
            return super().data_ptr()
        announce_address(self.dtype, *self._format)
        with torch.no_grad():
            if self._readable is None:
                self._readable = torch.empty_like(self, memory_format=torch.preserve_format)
            return self._readable.copy_(self.dequantize()).data_ptr()

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """Return a numpy array of the values; it is a copy, so ``force=True`` is required.

        Raises:
            TypeError: ``force`` is not set.
        """
        if not force:
            raise TypeError(
                f"numpy() must share memory, which values in {self._format[0]} cannot with a numpy "
                "array. Call .dequantize().numpy(), or .numpy(force=True) for a copy."
            )
        return self.detach().dequantize().numpy(force=True)

    def __array__(self, dtype: np.dtype | None = None) -> np.ndarray:
        """Copy the values for numpy and matplotlib, in float32 if numpy lacks this dtype."""
        x = self.dequantize()
        array = (x.float() if x.dtype == torch.bfloat16 else x).numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    def tolist(self) -> list:
        """Return the values as nested lists of Python numbers."""
        return self.detach().dequantize().tolist()

    def __dlpack__(self, *args: object, **kwargs: object) -> object:
        raise BufferError(
            "DLPack shares memory, which must hold numbers of the tensor's dtype; got values in "
            f"{self._format[0]}. Export .dequantize(), or .{self._fields[0]} and .scale."
        )

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
