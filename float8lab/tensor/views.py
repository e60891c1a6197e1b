"""Handlers of views: the result shares the FP8 data and, wherever blocks allow, the scales.

A view that shows only part of a block shares it with elements outside; ``window.Window`` says how
a write to it stays right. A view that cuts through blocks gets smaller ones, with copied scales.
No view changes a value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import Float8Spec
from float8lab.tensor.blocks import block_of_view, expand_scale, refine_scale
from float8lab.tensor.dispatch import ANY_VIEW, implements
from float8lab.tensor.float8_tensor import Float8Tensor
from float8lab.tensor.window import Step, Window

__all__ = ["cut", "view_of"]

aten = torch.ops.aten


def view_of(
    x: Float8Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    block: tuple[int, ...],
    step: Step,
    *,
    partial: bool = False,
    copied: bool = False,
) -> Float8Tensor:
    """The view of ``x`` made of these data, scales and amaxes.

    Args:
        x: the tensor that is viewed.
        tensors: data, scales, amaxes.
        block: the view's block.
        step: the op that makes the view, its arguments after the first, its keyword arguments.
        partial: whether a block of the view has elements outside it.
        copied: whether the scales are a copy.
    """
    result = x._make(*tensors, replace(x.spec, block=block), x.dtype)
    if x._window is not None or partial or copied:
        if x._window is not None and x._window.base is None:
            window = x._window
        else:
            # The base is an alias: later changes of what x's name refers to leave the view alone.
            window = x._window or Window(base=x.map(lambda t: t))
            window = window.then(step, copied=copied)
        result._window = window
    torch._functionalize_unsafe_set(result, x)  # autograd and compilers see one storage
    return result


def cut(x: Float8Tensor, block: tuple[int, ...]) -> Float8Tensor:
    """The same data in smaller blocks, whose scales are copies."""
    scale, amax = x.scale, x.amax
    for dim, (length, old, new) in enumerate(zip(x.shape, x.spec.block, block, strict=True)):
        scale = refine_scale(scale, length, old, new, dim)
        amax = refine_scale(amax, length, old, new, dim)
    return x._make(x.qdata, scale, amax, replace(x.spec, block=block), x.dtype)


def _each(x: Float8Tensor, function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return function(x.qdata), function(x.scale), function(x.amax)


@implements(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _alias(op: Any, x: Float8Tensor) -> Float8Tensor:
    return view_of(x, _each(x, op), x.spec.block, (op, (), {}))


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _reorder(op: Any, x: Float8Tensor, *dims: Any) -> Float8Tensor:
    order = list(range(x.ndim))
    if op is aten.permute.default:
        order = [order[d] for d in dims[0]]
    elif x.ndim:
        a, b = dims or ((0, 1) if x.ndim == 2 else (0, 0))
        order[a], order[b] = order[b], order[a]
    block = tuple(x.spec.block[d] for d in order)
    return view_of(x, _each(x, lambda t: op(t, *dims)), block, (op, dims, {}))


@implements(aten.view.default, aten._unsafe_view.default)
def _view(op: Any, x: Float8Tensor, size: Any) -> Float8Tensor:
    q = aten.view.default(x.qdata, size)
    shape = tuple(q.shape)
    step: Step = (aten.view.default, (size,), {})
    if x.spec.per_tensor:
        ones = (1,) * len(shape)
        tensors = (q, x.scale.view(ones), x.amax.view(ones))
        return view_of(x, tensors, (-1,) * len(shape), step)
    if shape == tuple(x.shape):
        return view_of(x, (q, x.scale, x.amax), x.spec.block, step)
    if q.numel() == 0:
        spec = Float8Spec(x.spec.fp8_dtype, x.spec.block, x.spec.scale_rule).expand(len(shape))
        scale = x.scale.new_ones(spec.scale_shape(shape))
        return view_of(x, (q, scale, torch.zeros_like(scale)), spec.block, step)
    block, needed = block_of_view(tuple(x.shape), shape, x.spec.block)
    parts = x if needed == x.spec.block else cut(x, needed)
    scales = replace(x.spec, block=block).scale_shape(shape)
    scale, scale_copied = _viewed(parts.scale, scales)
    amax, amax_copied = _viewed(parts.amax, scales)
    copied = parts is not x or scale_copied or amax_copied
    return view_of(x, (q, scale, amax), block, step, partial=parts is not x, copied=copied)


def _viewed(t: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, bool]:
    """A reshaped tensor, and whether its strides made that a copy."""
    try:
        return t.view(shape), False
    except (RuntimeError, ValueError):  # torch's tensors raise the one, its fake tensors the other
        return t.reshape(shape), True


@implements(aten.unsqueeze.default)
def _unsqueeze(op: Any, x: Float8Tensor, dim: int) -> Float8Tensor:
    block = list(x.spec.block)
    block.insert(dim % (x.ndim + 1), -1 if x.spec.per_tensor else 1)
    return view_of(x, _each(x, lambda t: op(t, dim)), tuple(block), (op, (dim,), {}))


@implements(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def _squeeze(op: Any, x: Float8Tensor, *dims: Any) -> Float8Tensor:
    named = range(x.ndim) if not dims else dims[0] if isinstance(dims[0], (list, tuple)) else dims
    gone = sorted({d % x.ndim for d in named if x.ndim and x.shape[d] == 1})
    block = tuple(b for d, b in enumerate(x.spec.block) if d not in gone)
    # By name: the scales have size 1 in other dimensions too.
    return view_of(x, _each(x, lambda t: aten.squeeze.dims(t, gone)), block, (op, dims, {}))


@implements(aten.expand.default)
def _expand(op: Any, x: Float8Tensor, size: Any, *, implicit: bool = False) -> Float8Tensor:
    q = op(x.qdata, size, implicit=implicit)
    lead = (-1 if x.spec.per_tensor else 1,) * (q.ndim - x.ndim)
    block = lead + x.spec.block
    scales = replace(x.spec, block=block).scale_shape(tuple(q.shape))
    tensors = (q, x.scale.expand(scales), x.amax.expand(scales))
    return view_of(x, tensors, block, (op, (size,), {}), partial=q.shape != x.shape)


@implements(aten.slice.Tensor)
def _slice(
    op: Any, x: Float8Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Float8Tensor:
    dim %= x.ndim
    n, b = x.shape[dim], x.spec.block[dim]
    q = op(x.qdata, dim, start, end, step)
    count = q.shape[dim]
    record: Step = (op, (dim, start, end, step), {})
    if b == -1:
        return view_of(x, (q, x.scale, x.amax), x.spec.block, record, partial=count != n)
    if b == 1:
        scales = [op(t, dim, start, end, step) for t in (x.scale, x.amax)]
        return view_of(x, (q, scales[0], scales[1]), x.spec.block, record)
    first = 0 if start is None else min(max(start + n if start < 0 else start, 0), n)
    last = first + (count - 1) * step
    source, copied = x, False
    if count and first // b != last // b and (step > 1 or first % b):
        b = math.gcd(first, b) if step == 1 else 1
        source = cut(x, (*x.spec.block[:dim], b, *x.spec.block[dim + 1 :]))
        copied = True
    if step == 1 or (count and first // b == last // b):
        blocks = (-(-(last + 1) // b) - first // b) if count else 0
        scales = [t.narrow(dim, first // b if count else 0, blocks) for t in _scales(source)]
    else:
        scales = [op(t, dim, start, end, step) for t in _scales(source)]
    whole = step == 1 and first % b == 0 and (count % b == 0 or first + count == n)
    tensors = (q, scales[0], scales[1])
    return view_of(x, tensors, source.spec.block, record, partial=not whole, copied=copied)


def _scales(x: Float8Tensor) -> tuple[Tensor, Tensor]:
    return x.scale, x.amax


@implements(aten.select.int)
def _select(op: Any, x: Float8Tensor, dim: int, index: int) -> Float8Tensor:
    q = op(x.qdata, dim, index)
    dim %= x.ndim
    n, b = x.shape[dim], x.spec.block[dim]
    at = (index + n if index < 0 else index) // (n if b == -1 else b)
    block = x.spec.block[:dim] + x.spec.block[dim + 1 :]
    tensors = (q, op(x.scale, dim, at), op(x.amax, dim, at))
    return view_of(x, tensors, block, (op, (dim, index), {}), partial=b != 1 and n != 1)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(op: Any, x: Float8Tensor, sizes: Any, dim: int = 0) -> list[Float8Tensor]:
    lengths = [part.shape[dim] for part in op(x.qdata, sizes, dim)]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    slice_op = aten.slice.Tensor
    return [
        _slice(slice_op, x, dim, s, s + n, 1) for s, n in zip(starts, lengths, strict=True)
    ]  # fmt: skip


@implements(aten.unbind.int)
def _unbind(op: Any, x: Float8Tensor, dim: int = 0) -> list[Float8Tensor]:
    return [_select(aten.select.int, x, dim, i) for i in range(x.shape[dim])]


@implements(aten.as_strided.default)
def _as_strided(
    op: Any, x: Float8Tensor, size: Any, stride: Any, storage_offset: Any = None
) -> Float8Tensor:
    """Find the slices and the permutation that strides mean, since strides tell no scales."""
    size, stride = tuple(size), tuple(stride)
    offset = 0 if storage_offset is None else storage_offset - x.storage_offset()
    if offset == 0 and (size, stride) == (tuple(x.shape), x.stride()):
        return _alias(aten.alias.default, x)
    box = _box(x, size, stride, offset)
    if box is not None:
        starts, lengths, order = box
        for d, start in enumerate(starts):
            length = lengths[d]
            x = _slice(aten.slice.Tensor, x, d, start, start + length)
        order += [d for d in range(x.ndim) if d not in order]
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


def _box(
    x: Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> tuple[list[int], list[int], list[int]] | None:
    """Starts and lengths in each dimension of ``x``, and their order; None if there is no box."""
    starts = [0] * x.ndim
    for d in sorted(range(x.ndim), key=x.stride, reverse=True):
        if x.shape[d] > 1 and x.stride(d):
            starts[d], offset = divmod(offset, x.stride(d))
    order: list[int] = []
    for n, step in zip(size, stride, strict=True):
        if n == 1:
            continue
        fits = [d for d in range(x.ndim) if x.shape[d] > 1 and x.stride(d) == step]
        if not fits or fits[0] in order:
            return None
        order.append(fits[0])
    lengths = [1] * x.ndim
    for d, n in zip(order, (n for n in size if n != 1), strict=True):
        lengths[d] = n
    inside = all(s >= 0 and s + n <= m for s, n, m in zip(starts, lengths, x.shape, strict=True))
    return (starts, lengths, order) if offset == 0 and inside else None


@implements(ANY_VIEW)
def _any_view(op: Any, x: Float8Tensor, *args: Any, **kwargs: Any) -> Float8Tensor:
    """A view without a handler of its own: each element gets a scale, so it fits any."""
    asks = any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values()))
    if asks or op is aten.view_as_complex.default:
        raise NotImplementedError(
            f"{op} must not look at FP8 data as another dtype: it would ignore the scales. Call "
            ".dequantize() first, or take .qdata and .scale."
        )
    q = op(x.qdata.view(torch.uint8), *args, **kwargs).view(x.qdata.dtype)
    full = [expand_scale(t, x.spec.block, x.shape).expand(x.shape) for t in _scales(x)]
    tensors = (
        q,
        op(full[0].contiguous(), *args, **kwargs),
        op(full[1].contiguous(), *args, **kwargs),
    )
    block = (1,) * q.ndim
    return view_of(x, tensors, block, (op, args, kwargs), partial=True, copied=True)
