"""Float4Tensor: a frozen weight that is stored in packed 4 bits and dequantized when it is used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import NotImplementedType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from float8lab.arguments import check_dtype, check_instance, check_tensor
from float8lab.formats import DEQUANTIZED_DTYPES, E4M3, Float4Spec, Spec
from float8lab.tensor import dispatch
from float8lab.tensor.blocks import expand_scale
from float8lab.tensor.stored import StoredTensor
from float8lab.tensor.views import order_of

__all__ = ["Float4Tensor", "decode_codes", "pack", "unpack"]

aten = torch.ops.aten

_CHUNK_SIZE = 1 << 24
"""Elements that are dequantized at a time, unless a row or an expert has more."""


def unpack(packed: Tensor) -> Tensor:
    """Unpack two elements from each byte into a byte each, the low half of the byte first.

    >>> unpack(torch.tensor([0x21, 0xF3], dtype=torch.uint8))
    tensor([ 1,  2,  3, 15], dtype=torch.uint8)
    """
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack(elements: Tensor, dim: int = -1) -> Tensor:
    """Pack two elements into each byte, the first in the low half; the inverse of ``unpack``.

    >>> pack(torch.tensor([1, 2, 3, 15], dtype=torch.uint8)).tolist() == [0x21, 0xF3]
    True
    """
    even, odd = elements.unflatten(dim, (-1, 2)).unbind(dim if dim < 0 else dim + 1)
    return even | odd << 4


def decode_codes(
    elements: Tensor, block: tuple[int, ...], scale: Tensor, tensor_scale: Tensor | None
) -> Tensor:
    """Return float32 values of e2m1 elements: ``e2m1 * scale`` (exact), times ``tensor_scale``.

    Args:
        elements: uint8, one element per byte.
        block: the block of ``elements``.
        scale: one scale per block, in its storage format.
        tensor_scale: float32 that broadcasts against ``elements``, or None.
    """
    # Read e2m1 as e4m3 with a sign, two exponent bits, one mantissa bit and a bias larger by 6.
    as_e4m3 = ((elements & 8) << 4 | (elements & 7) << 2).view(E4M3)
    values = (as_e4m3.float() * 64.0).mul_(expand_scale(scale.float(), block, elements.shape))
    return values if tensor_scale is None else values.mul_(tensor_scale)


class Float4Tensor(StoredTensor):
    """A tensor of ``dtype`` stored as e2m1 elements, two in a byte, and scales: NVFP4, MXFP4.

    It is a frozen weight, such as ``integrations.load_fp8`` makes from a checkpoint in 4 bits, for
    inference or as the base of adapters. Each op that reads it gets dequantized values for the
    duration of the op. Autograd saves the packed form, so gradients of other tensors are those of
    the dequantized weight. Views that do not cut the packed dimension (``t``, or one of several
    experts) are packed, too. The tensor cannot be written to.

    ``dtype``, ``element_size()`` and ``nbytes`` describe the high-precision tensor that it
    represents; it occupies the memory of its inner tensors.

    Attributes:
        packed: uint8, the tensor's shape with half the size along ``spec.packed_dim``.
        scale: the scale of each block, in ``spec.scale_dtype``.
        tensor_scale: float32, with size 1 or the tensor's size in each dimension (one per expert of
            a weight with several experts); None without a second level.
        spec: block shape and formats of the scales.

    >>> from float8lab.formats import MXFP4
    >>> elements = torch.full((1, 16), 0x21, dtype=torch.uint8)  # 0.5, 1.0, 0.5, ...
    >>> scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 2
    >>> w = float8lab.Float4Tensor(elements, scale, None, MXFP4, torch.bfloat16)
    >>> w.dequantize()[0, :4], w.shape
    (tensor([1., 2., 1., 2.], dtype=torch.bfloat16), torch.Size([1, 32]))
    """

    packed: Tensor
    scale: Tensor
    tensor_scale: Tensor | None
    spec: Spec
    _fields = ("packed", "scale", "tensor_scale", "spec", "_readable")
    _format = ("4 bits", "torch.save(model.state_dict(), path)")

    def __new__(
        cls, packed: Tensor, scale: Tensor, tensor_scale: Tensor | None, spec: Spec,
        dtype: torch.dtype,
    ) -> Float4Tensor:  # fmt: skip
        """Make a tensor from its fields."""
        check_instance("spec", spec, Spec, "a Float4Spec")
        if not spec.is_packed:
            raise ValueError(
                f"spec must be one of packed elements; got {spec.describe()}. Use Float4Spec."
            )
        check_dtype("dtype", dtype, DEQUANTIZED_DTYPES, optional=False)
        check_tensor("packed", packed)
        check_tensor("scale", scale)
        check_tensor("tensor_scale", tensor_scale, optional=True)
        dim = spec.packed_dim
        shape = tuple(n * 2 if d == dim else n for d, n in enumerate(packed.shape))
        strides = tuple(s if d == dim else s * 2 for d, s in enumerate(packed.stride()))
        x: Float4Tensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=packed.device, requires_grad=False
        )
        x.packed, x.scale, x.tensor_scale, x.spec = packed, scale, tensor_scale, spec
        x._check_parts()
        return x

    def _check_parts(self) -> None:
        """Raise unless the dtypes and shapes of the fields fit the spec."""
        packed, scale, tensor_scale, spec = self.packed, self.scale, self.tensor_scale, self.spec
        if packed.dtype != torch.uint8 or len(spec.block) != packed.ndim:
            raise ValueError(
                f"packed must be uint8 of {len(spec.block)} dimensions, as its block has; got "
                f"{packed.dtype} of shape {tuple(packed.shape)}."
            )
        scale_shape = spec.scale_shape(tuple(self.shape))
        if scale.dtype != spec.scale_dtype or tuple(scale.shape) != scale_shape:
            raise ValueError(
                f"scale must be {spec.scale_dtype} of shape {scale_shape}; got {scale.dtype} of "
                f"shape {tuple(scale.shape)}."
            )
        sizes = None if tensor_scale is None else tuple(tensor_scale.shape)
        fits = (sizes is not None) == spec.tensor_scale
        if fits and sizes is not None:
            pairs = zip(sizes, self.shape, strict=False)
            fits = len(sizes) == self.ndim and all(n in (1, size) for n, size in pairs)
        if not fits:
            requirement = "a tensor that broadcasts" if spec.tensor_scale else "None"
            raise ValueError(
                f"tensor_scale must be {requirement}, for {spec.describe()} of shape "
                f"{tuple(self.shape)}; got {'None' if sizes is None else f'shape {sizes}'}."
            )

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Spec, torch.dtype]]:
        names = ["packed", "scale", "tensor_scale"]
        return names[: 2 + self.spec.tensor_scale], (self.spec, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: object, outer_stride: object
    ) -> Float4Tensor:
        return cls(inner["packed"], inner["scale"], inner.get("tensor_scale"), *context)

    # No composite op has a handler, so torch need not call back for each op and attribute.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub omits the first argument
        cls, op: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(op) if args and isinstance(args[0], Float4Tensor) else None
        result: Any = NotImplemented
        if handler is not None and torch.is_inference_mode_enabled() and op.is_view:
            # Torch wants the view of a normal tensor to be a normal tensor in inference mode, too.
            with torch.inference_mode(args[0].is_inference()), torch.no_grad():
                result = handler(op, *args, **kwargs)
        elif handler is not None:
            result = handler(op, *args, **kwargs)
        if result is not NotImplemented:
            return result
        if op._schema.is_mutable and dispatch.written_tensors(cls, op, args, kwargs):
            raise NotImplementedError(
                f"{op} must not write to a Float4Tensor: it is a frozen weight, with no cast to 4 "
                "bits. Train adapters beside it, or load the checkpoint with dequantize=True."
            )
        return dispatch.run_fallback(cls, op, args, kwargs, quiet=True)

    def map(self, function: Callable[[Tensor], Tensor], **changes: Any) -> Float4Tensor:
        """Apply ``function`` to each inner tensor, with another ``block`` or ``dtype`` if given."""
        tensor_scale = None if self.tensor_scale is None else function(self.tensor_scale)
        block, dtype = changes.get("block", self.spec.block), changes.get("dtype", self.dtype)
        spec = self.spec if block == self.spec.block else replace(self.spec, block=block)
        return Float4Tensor(function(self.packed), function(self.scale), tensor_scale, spec, dtype)

    def dequantize(self) -> Tensor:
        """Return the values, rounded from float32 to the high-precision ``dtype``."""
        dim = self.spec.packed_dim
        if dim != self.ndim - 1:  # decode in memory order, as GEMMs want for transposed operands
            swapped = _permute(aten.transpose.int, self, dim, self.ndim - 1)
            return swapped.dequantize().transpose(dim, self.ndim - 1)
        shape, size = self.shape, max(math.prod(self.shape[1:]), 1)
        if self.ndim > 1 and shape[0] > (step := max(_CHUNK_SIZE // size, 1)):
            out = torch.empty(shape, dtype=self.dtype, device=self.device)
            for start in range(0, shape[0], step):
                rows = _take_along(aten.slice.Tensor, self, 0, start, start + step)
                out[start : start + step] = rows.dequantize()
            return out
        values = decode_codes(unpack(self.packed), self.spec.block, self.scale, self.tensor_scale)
        return values.to(self.dtype)

    _decode = dequantize  # as ``run_fallback`` calls it

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        scale = self.scale.view(torch.uint8)  # a dtype that every loader of pickles knows
        spec = (self.spec.block, self.spec.scale_dtype, self.spec.tensor_scale)
        return _rebuild, (self.packed, scale, self.tensor_scale, *spec, self.dtype)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # stub
        return (
            f"Float4Tensor(fp4={self.spec.describe()}, shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, device='{self.device}')"
        )


def _rebuild(
    packed: Tensor, scale: Tensor, tensor_scale: Tensor | None, *state: Any
) -> Float4Tensor:
    """Make a Float4Tensor from the state of ``__reduce_ex__``; pickles name this function."""
    block, scale_dtype, levels, dtype = state
    spec = Float4Spec(tuple(block), scale_dtype, levels)
    return Float4Tensor(packed, scale.view(scale_dtype), tensor_scale, spec, dtype)


torch.serialization.add_safe_globals([_rebuild])


# Ops with a packed result.

_Result = Float4Tensor | list[Any] | NotImplementedType


def _copy(op: OpOverload, x: Float4Tensor, source: Tensor, non_blocking: bool = False) -> _Result:
    if not isinstance(source, Float4Tensor) or (x.spec, x.shape) != (source.spec, source.shape):
        return NotImplemented
    for name in x.__tensor_flatten__()[0]:
        op(getattr(x, name), getattr(source, name), non_blocking)
    return x


def _to_copy(
    op: OpOverload, x: Float4Tensor, *, dtype: Any = None, memory_format: Any = None, **options: Any
) -> _Result:
    if dtype is not None and not dtype.is_floating_point:
        return NotImplemented
    return x.map(lambda t: op(t, **options), dtype=dtype or x.dtype)


def _permute(op: OpOverload, x: Float4Tensor, *dims: Any) -> Float4Tensor:
    order = order_of(x.ndim, *dims)
    return x.map(lambda t: t.permute(order), block=tuple(x.spec.block[d] for d in order))


def _select(op: OpOverload, x: Float4Tensor, dim: int, index: int) -> _Result:
    if x.spec.block[dim] != 1:
        return NotImplemented
    size, dim = x.shape[dim], dim % x.ndim
    block = x.spec.block[:dim] + x.spec.block[dim + 1 :]
    return x.map(lambda t: op(t, dim, index if t.shape[dim] == size else 0), block=block)


def _unbind(op: OpOverload, x: Float4Tensor, dim: int = 0) -> _Result:
    if x.spec.block[dim] != 1:
        return NotImplemented
    return [_select(aten.select.int, x, dim, index) for index in range(x.shape[dim])]


def _take_along(op: OpOverload, x: Float4Tensor, dim: int = 0, *args: object) -> Any:
    """Take a slice, or the given entries, of a dimension that is not packed."""
    if x.spec.block[dim] != 1:
        return NotImplemented
    size = x.shape[dim]

    def take(t: Tensor) -> Tensor:
        if t.shape[dim] != size:
            return t
        raw = t.view(torch.uint8) if t.dtype.itemsize == 1 else t  # FP8 has no index_select
        return op(raw, dim, *args).view(t.dtype)

    return x.map(take)


def _index(op: OpOverload, x: Float4Tensor, indices: Sequence[Tensor | None]) -> _Result:
    index = indices[0]
    if len(indices) > 1 or index is None or index.ndim != 1 or index.dtype == torch.bool:
        return NotImplemented
    return _take_along(aten.index_select.default, x, 0, index % x.shape[0])


_HANDLERS: dict[OpOverload, Callable[..., object]] = {
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.clone.default, aten._pin_memory.default),
        lambda op, x, *args, **kwargs: x.map(lambda t: op(t, *args, **kwargs)),
    ),
    **dict.fromkeys((aten.t.default, aten.transpose.int, aten.permute.default), _permute),
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.slice.Tensor: _take_along,
    aten.index_select.default: _take_along,
    aten.index.Tensor: _index,
}
