"""Handlers of views: the result shares the FP8 data and, where blocks allow, the scales.

A view that shows only part of a block shares the block with elements outside; ``window.Window``
says how writes to such a view stay correct. A view that cuts through blocks gets smaller blocks
with copied scales. No view changes a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from float8lab.tensor.blocks import block_of_view, refine_scale
from float8lab.tensor.dispatch import ANY_VIEW, implements
from float8lab.tensor.float8_tensor import Float8Tensor
from float8lab.tensor.window import Step, Window

__all__ = ["cut", "order_of", "view_of"]

aten = torch.ops.aten


def view_of(
    x: Float8Tensor, tensors: tuple[Tensor, Tensor, Tensor], block: tuple[int, ...], step: Step, *,
    partial: bool = False, copied: bool = False,
) -> Float8Tensor:  # fmt: skip
    """Make the view of ``x`` from these data, scales and amaxes, with the given block.

    Args:
        step: the op that makes the view, its arguments after the first, its keyword arguments.
        partial: whether a block of the view has elements outside the view.
        copied: whether the scales are a copy.
    """
    result = x._make(*tensors, replace(x.spec, block=block), x.dtype)
    if x._window is not None or partial or copied:
        # The base is an alias of ``x``: later changes of the object ``x`` do not affect the view.
        window = x._window or Window(base=x.map(lambda t: t))
        result._window = window if window.base is None else window.then(step, copied=copied)
    torch._functionalize_unsafe_set(result, x)  # so autograd and compilers see a shared storage
    return result


def cut(x: Float8Tensor, block: tuple[int, ...]) -> Float8Tensor:
    """Return the same data in smaller blocks; the scales are copies."""
    scale, amax = x.scale, x.amax
    for dim, sizes in enumerate(zip(x.shape, x.spec.block, block, strict=True)):
        scale, amax = (refine_scale(t, *sizes, dim) for t in (scale, amax))
    return x._make(x.qdata, scale, amax, replace(x.spec, block=block), x.dtype)


def _apply(x: Float8Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return function(x.qdata), function(x.scale), function(x.amax)


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(op: OpOverload, x: Float8Tensor) -> Float8Tensor:
    return view_of(x, _apply(x, op), x.spec.block, Step(op, (), {}))


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _reorder(op: OpOverload, x: Float8Tensor, *dims: int | Sequence[int]) -> Float8Tensor:
    block = tuple(x.spec.block[d] for d in order_of(x.ndim, *dims))
    return view_of(x, _apply(x, lambda t: op(t, *dims)), block, Step(op, dims, {}))


def order_of(ndim: int, *dims: int | Sequence[int]) -> list[int]:
    """Return the order that the arguments ``dims`` of t, transpose or permute describe."""
    order = list(range(ndim))
    exchanged = [d for d in dims if isinstance(d, int)]
    for permutation in (d for d in dims if not isinstance(d, int)):
        return [order[d] for d in permutation]
    first, second = exchanged or ((0, 1) if ndim == 2 else (0, 0))
    if ndim:
        order[first], order[second] = order[second], order[first]
    return order


@implements(aten.view.default, aten._unsafe_view.default)
def _view(op: OpOverload, x: Float8Tensor, size: Sequence[int]) -> Float8Tensor:
    q = aten.view.default(x.qdata, size)
    shape = tuple(q.shape)
    step = Step(aten.view.default, (size,), {})
    if x.spec.per_tensor:
        scale_size = (1,) * len(shape)
        tensors = (q, x.scale.view(scale_size), x.amax.view(scale_size))
        return view_of(x, tensors, (-1,) * len(shape), step)
    if shape == tuple(x.shape):
        return view_of(x, (q, x.scale, x.amax), x.spec.block, step)
    if q.numel() == 0:
        spec = x.spec.expand(len(shape))
        scale = x.scale.new_ones(spec.scale_shape(shape))
        return view_of(x, (q, scale, torch.zeros_like(scale)), spec.block, step)
    block, needed = block_of_view(tuple(x.shape), shape, x.spec.block)
    source = x if needed == x.spec.block else cut(x, needed)
    scales = replace(x.spec, block=block).scale_shape(shape)
    scale, scale_copied = _reshape(source.scale, scales)
    amax, amax_copied = _reshape(source.amax, scales)
    copied = source is not x or scale_copied or amax_copied
    return view_of(x, (q, scale, amax), block, step, partial=source is not x, copied=copied)


def _reshape(t: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, bool]:
    """Reshape a tensor, and return whether its strides required a copy."""
    try:
        return t.view(shape), False
    except (RuntimeError, ValueError):  # RuntimeError from tensors, ValueError from fake tensors
        return t.reshape(shape), True


@implements(aten.unsqueeze.default)
def _unsqueeze(op: OpOverload, x: Float8Tensor, dim: int) -> Float8Tensor:
    block = list(x.spec.block)
    block.insert(dim % (x.ndim + 1), -1 if x.spec.per_tensor else 1)
    return view_of(x, _apply(x, lambda t: op(t, dim)), tuple(block), Step(op, (dim,), {}))


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(op: OpOverload, x: Float8Tensor, *dims: int | Sequence[int]) -> Float8Tensor:
    op(x.qdata, *dims)  # raises if there is no such dimension
    groups = [range(x.ndim)] if not dims else [(d,) if isinstance(d, int) else d for d in dims]
    removed = sorted({d % x.ndim for ds in groups for d in ds if x.ndim and x.shape[d] == 1})
    block = tuple(b for d, b in enumerate(x.spec.block) if d not in removed)
    # The scales have size 1 in other dimensions too, so the dimensions to remove are named.
    return view_of(x, _apply(x, lambda t: aten.squeeze.dims(t, removed)), block, Step(op, dims, {}))


@implements(aten.expand.default)
def _expand(
    op: OpOverload, x: Float8Tensor, size: Sequence[int], *, implicit: bool = False
) -> Float8Tensor:
    q = op(x.qdata, size, implicit=implicit)
    spec = x.spec.expand(q.ndim)
    scales = spec.scale_shape(tuple(q.shape))
    tensors = (q, x.scale.expand(scales), x.amax.expand(scales))
    return view_of(x, tensors, spec.block, Step(op, (size,), {}), partial=q.shape != x.shape)


@implements(aten.slice.Tensor)
def _slice(
    op: OpOverload, x: Float8Tensor, dim: int = 0, start: int | None = None, end: int | None = None,
    step: int = 1,
) -> Float8Tensor:  # fmt: skip
    q = op(x.qdata, dim, start, end, step)
    dim %= x.ndim
    size, block, count = x.shape[dim], x.spec.block[dim], q.shape[dim]
    record = Step(op, (dim, start, end, step), {})
    if block == -1:
        return view_of(x, (q, x.scale, x.amax), x.spec.block, record, partial=count != size)
    if block == 1:
        scale, amax = (op(t, dim, start, end, step) for t in (x.scale, x.amax))
        return view_of(x, (q, scale, amax), x.spec.block, record)
    if not count:
        scale, amax = (t.narrow(dim, 0, 0) for t in (x.scale, x.amax))
        return view_of(x, (q, scale, amax), x.spec.block, record, partial=step > 1)
    first = 0 if start is None else max(start + size if start < 0 else start, 0)
    return _slice_of_blocks(x, q, record, dim, first, step)


def _slice_of_blocks(
    x: Float8Tensor, q: Tensor, record: Step, dim: int, first: int, step: int
) -> Float8Tensor:
    """Slice a dimension whose blocks hold several elements, but not all of the dimension."""
    count, last = q.shape[dim], first + (q.shape[dim] - 1) * step
    source, block = x, x.spec.block[dim]
    if first // block != last // block and (step > 1 or first % block):
        block = math.gcd(first, block) if step == 1 else 1
        source = cut(x, (*x.spec.block[:dim], block, *x.spec.block[dim + 1 :]))
    blocks = slice(first // block, last // block + 1, 1 if block > 1 else step)
    scale, amax = (
        aten.slice.Tensor(t, dim, blocks.start, blocks.stop, blocks.step)
        for t in (source.scale, source.amax)
    )
    owns_blocks = step == 1 and first % block == 0
    owns_blocks = owns_blocks and (count % block == 0 or last + 1 == x.shape[dim])
    return view_of(
        x, (q, scale, amax), source.spec.block, record, partial=not owns_blocks,
        copied=source is not x,
    )  # fmt: skip


@implements(aten.select.int)
def _select(op: OpOverload, x: Float8Tensor, dim: int, index: int) -> Float8Tensor:
    q = op(x.qdata, dim, index)
    dim %= x.ndim
    n, b = x.shape[dim], x.spec.block[dim]
    block_index = (index + n if index < 0 else index) // (n if b == -1 else b)
    block = x.spec.block[:dim] + x.spec.block[dim + 1 :]
    tensors = (q, op(x.scale, dim, block_index), op(x.amax, dim, block_index))
    return view_of(x, tensors, block, Step(op, (dim, index), {}), partial=b != 1 and n != 1)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(
    op: OpOverload, x: Float8Tensor, sizes: int | Sequence[int], dim: int = 0
) -> list[Float8Tensor]:
    bounds = pairwise((0, *accumulate(q.shape[dim] for q in op(x.qdata, sizes, dim))))
    return [_slice(aten.slice.Tensor, x, dim, start, stop, 1) for start, stop in bounds]


@implements(aten.unbind.int)
def _unbind(op: OpOverload, x: Float8Tensor, dim: int = 0) -> list[Float8Tensor]:
    return [_select(aten.select.int, x, dim, i) for i in range(x.shape[dim])]


@implements(aten.as_strided.default)
def _as_strided(
    op: OpOverload, x: Float8Tensor, size: Sequence[int], stride: Sequence[int],
    storage_offset: int | None = None,
) -> Float8Tensor:  # fmt: skip
    """Find the slices and permutation that the strides describe, to find the scales of the view."""
    size, stride = tuple(size), tuple(stride)
    offset = 0 if storage_offset is None else storage_offset - int(x.storage_offset())
    if offset == 0 and (size, stride) == (tuple(x.shape), x.stride()):
        return _alias(aten.alias.default, x)
    if (box := _box(x, size, stride, offset)) is not None:
        for d, (start, length) in enumerate(zip(box.starts, box.lengths, strict=True)):
            x = _slice(aten.slice.Tensor, x, d, start, start + length)
        order = [*box.order, *(d for d in range(x.ndim) if d not in box.order)]
        x = _reorder(aten.permute.default, x, order)
        return _view(aten.view.default, x, size)
    contiguous = tuple(math.prod(max(n, 1) for n in size[d + 1 :]) for d in range(len(size)))
    end = offset + math.prod(size)
    if x.is_contiguous() and stride == contiguous and offset >= 0 and end <= x.numel():
        x = _view(aten.view.default, x, [x.numel()])
        return _view(aten.view.default, _slice(aten.slice.Tensor, x, 0, offset, end), size)
    if x.is_contiguous() and x.storage_offset() == 0:
        return _any_view(op, x, size, stride, offset)
    raise NotImplementedError(
        f"as_strided must mean slices and a permutation of a Float8Tensor; got size {size}, "
        f"stride {stride}, offset {storage_offset} for one of size {tuple(x.shape)}, stride "
        f"{x.stride()}, offset {x.storage_offset()}. Use slices and permute, or dequantize() first."
    )


class _Box(NamedTuple):
    """A slice of each dimension of a tensor, and the order of the dimensions longer than 1."""

    starts: list[int]
    lengths: list[int]
    order: list[int]


def _box(x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> _Box | None:
    """Return the box of ``x`` that has this geometry; None if there is none."""
    dims = [d for d in range(x.ndim) if x.shape[d] > 1]
    starts, lengths = [0] * x.ndim, [1] * x.ndim
    for d in sorted(dims, key=x.stride, reverse=True):
        if x.stride(d):
            starts[d], offset = divmod(offset, x.stride(d))
    order: list[int] = []
    for length, step in zip(size, stride, strict=True):
        if length == 1:
            continue
        fits = [d for d in dims if x.stride(d) == step]
        if not fits or fits[0] in order:
            return None
        order.append(fits[0])
        lengths[fits[0]] = length
    boxes = zip(starts, lengths, x.shape, strict=True)
    is_inside = all(start >= 0 and start + length <= n for start, length, n in boxes)
    return _Box(starts, lengths, order) if offset == 0 and is_inside else None


@implements(ANY_VIEW)
def _any_view(op: OpOverload, x: Float8Tensor, *args: object, **kwargs: object) -> Float8Tensor:
    """Make a view without a handler of its own: with one scale per element, any view works."""
    changes_dtype = any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
    if changes_dtype or op is aten.view_as_complex.default:
        raise NotImplementedError(
            f"{op} must not look at FP8 data as another dtype: it would ignore the scales. Call "
            ".dequantize() first, or take .qdata and .scale."
        )
    q = op(x.qdata.view(torch.uint8), *args, **kwargs).view(x.qdata.dtype)
    elements = cut(x, (1,) * x.ndim)
    scale, amax = (op(t.contiguous(), *args, **kwargs) for t in (elements.scale, elements.amax))
    step = Step(op, args, kwargs)
    return view_of(x, (q, scale, amax), (1,) * q.ndim, step, partial=True, copied=True)
