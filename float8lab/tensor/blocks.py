"""Quantize tensors of any number of dimensions in blocks, and find the blocks of their views.

Functions take plain tensors and shapes and return fresh ones; none of them uses Float8Tensor.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from float8lab.formats import FLOAT32_MAX, Spec, scales_by_column
from float8lab.ops import as_matrix, cast_many_op, factors_from_amax, round_to_fp8, value_of_op
from float8lab.ops.reference.blocks import block_amax, expand_scale, in_blocks
from float8lab.recipes.delayed import QuantParams
from float8lab.tensor.operands import quantize

__all__ = [
    "block_amax", "block_of_view", "by_block", "dequantize_blocks", "expand_scale",
    "quantize_blocks", "quantize_blocks_", "refine_scale", "requantize_blocks",
    "stores_scales_by_column", "with_block",
]  # fmt: skip


def refine_scale(scale: Tensor, length: int, old: int, new: int, dim: int) -> Tensor:
    """Return the scales of a tensor along ``dim`` after cutting its ``old`` blocks to ``new``.

    ``length`` is the size of ``dim``. ``new`` divides ``old``, unless ``old`` spans the dimension.
    """
    if old == new:
        return scale
    count = -(-length // new)
    if old == -1 or old >= length:
        sizes = list(scale.shape)
        sizes[dim] = count
        return scale.expand(sizes)
    return scale.repeat_interleave(old // new, dim).narrow(dim, 0, count)


def by_block(x: Tensor, block: Sequence[int], reduce: Callable[..., Tensor], fill: float) -> Tensor:
    """Compute ``reduce(x, dim=...)`` of each block; blocks cut by an edge are padded with fill."""
    return reduce(in_blocks(x, block, fill), dim=list(range(1, 2 * x.ndim, 2)))


def _matrix_block(spec: Spec, ndim: int) -> tuple[int, int] | None:
    """Return the block of a tensor's [rows, last dimension] form, if that form has the same blocks.

    Return None if blocks span several dimensions and the tensor is neither a matrix nor scaled per
    tensor.
    """
    if spec.per_tensor:
        return (-1, -1)
    block = (1,) * (2 - ndim) + spec.block
    if len(block) == 2 or all(size == 1 for size in block[:-1]):
        return (block[-2], block[-1])
    return None


def stores_scales_by_column(spec: Spec) -> bool:
    """Whether ``quantize_blocks`` stores the scales of ``spec`` column by column."""
    block = _matrix_block(spec, len(spec.block))
    return block is not None and scales_by_column(block)


def quantize_blocks(
    x: Tensor, spec: Spec, *, scale: Tensor | None = None, amax_epsilon: float = 0.0,
    known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return FP8 data, scales and amaxes of a tensor of any number of dimensions.

    Args:
        x: any shape; ``spec`` has one block size for each dimension. Float64 is rounded to float32,
            and saturates where that overflows.
        scale: decode scales by which ``x`` is divided, broadcastable to one per block; None:
            compute them from ``x``.
        amax_epsilon: smaller amaxes are raised to this value before scales are computed.
        known_amax: amaxes to use instead of those of ``x``, one per block of a matrix or a batch.
    """
    shape, scales = tuple(x.shape), spec.scale_shape(tuple(x.shape))
    if scale is not None:
        scale = scale.to(device=x.device, dtype=torch.float32).expand(scales)
    block = _matrix_block(spec, x.ndim)
    if block is None and _is_batch(x, spec):
        return _by_matrix(x, spec, scale, amax_epsilon, known_amax)
    if block is None:
        return _by_arithmetic(x, spec, scale, amax_epsilon)
    matrix, matrix_spec, params = as_matrix(x), with_block(spec, block), None
    if scale is not None:
        params = QuantParams.of_scale(as_matrix(scale), spec)
        qdata = quantize(matrix, matrix_spec, None, params, align=1).rowwise.data
        amax, scale = scale * spec.largest(), scale.clone()
    else:
        if known_amax is not None:
            params = QuantParams.of_amax(as_matrix(known_amax), spec.scale_rule)
        cast = quantize(matrix, matrix_spec, None, params, amax_epsilon, align=1, keep_amaxes=True)
        (qdata, scale), amaxes = cast.rowwise, cast.requant
        # With a tensor scale, the cast returns the tensor's amax, not those of blocks.
        amax = block_amax(x, spec.block) if spec.tensor_scale or amaxes is None else amaxes
    return qdata.reshape(shape), scale.reshape(scales), amax.reshape(scales)


@functools.lru_cache(maxsize=1024)
def with_block(spec: Spec, block: tuple[int, ...]) -> Spec:
    """Return a spec with another block."""
    return spec if spec.block == block else replace(spec, block=block)


def _is_batch(x: Tensor, spec: Spec) -> bool:
    """Whether a tensor without a matrix form can be quantized in slices of its first dimension."""
    return x.ndim > 2 and spec.block[0] == 1 and x.shape[0] > 0


def _by_matrix(
    x: Tensor, spec: Spec, scale: Tensor | None, amax_epsilon: float, known_amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    matrix_spec = replace(spec, block=spec.block[1:])
    scales_in, amaxes_in = (
        [None] * x.shape[0] if values is None else list(values.unbind())
        for values in (scale, known_amax)
    )
    stored = [
        quantize_blocks(m, matrix_spec, scale=s, amax_epsilon=amax_epsilon, known_amax=a)
        for m, s, a in zip(x.unbind(), scales_in, amaxes_in, strict=True)
    ]
    data, scales, amaxes = zip(*stored, strict=True)
    q = torch.stack([q.view(torch.uint8) for q in data])  # torch.autocast cannot stack FP8
    return q.view(spec.fp8_dtype), torch.stack(scales), torch.stack(amaxes)


def _by_arithmetic(
    x: Tensor, spec: Spec, scale: Tensor | None, amax_epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    if scale is None:
        amax = block_amax(x, spec.block)
        scale, encode = factors_from_amax(amax, spec.fp8_dtype, spec.scale_rule, amax_epsilon)
        value = x.float() * expand_scale(encode, spec.block, x.shape)
    else:
        amax, scale = scale * spec.largest(), scale.clone()
        value = x.float() / expand_scale(scale, spec.block, x.shape)
    return round_to_fp8(value, x, spec.fp8_dtype, spec.scale_rule), scale, amax


def requantize_blocks(x: Tensor, spec: Spec, scale: Tensor, amax: Tensor) -> Tensor:
    """Return FP8 data of ``x`` by the cast that gave these scales and amaxes, one per block."""
    # Where the scale matches its amax, ``x`` is multiplied by the encode factor of that amax.
    # Otherwise the scale was given, and ``x`` is divided by it. A scale that was computed with an
    # ``amax_epsilon`` above the amax is treated like a given one.
    if spec.tensor_scale:  # its encode factors follow from the scales
        encode = expand_scale((1.0 / scale).clamp(max=FLOAT32_MAX), spec.block, x.shape)
        return round_to_fp8(x.float() * encode, x, spec.fp8_dtype, spec.scale_rule)
    amax_scale, encode = factors_from_amax(amax, spec.fp8_dtype, spec.scale_rule)
    follows, encode, scale = (
        expand_scale(t, spec.block, x.shape) for t in (amax_scale == scale, encode, scale)
    )
    value = torch.where(follows, x.float() * encode, x.float() / scale)
    return round_to_fp8(value, x, spec.fp8_dtype, spec.scale_rule)


_Stored = tuple[Tensor, Tensor, Tensor]
"""FP8 data, scales and amaxes of a tensor."""
_Cast = tuple[Tensor, Spec, _Stored]
"""A high-precision tensor, the spec of its cast, and the tensors to which the cast is written."""
_Kind = tuple[torch.dtype, torch.device, torch.dtype, tuple[int, int], str]
"""The properties that all matrices quantized by one op share."""


def quantize_blocks_(casts: Sequence[_Cast]) -> None:
    """Write the results of ``quantize_blocks`` of many tensors into existing tensors.

    One op quantizes all tensors with the same dtype, format, block, scale rule and device. The
    version counters of the existing tensors are increased.
    """
    groups: dict[_Kind, list[list[Tensor]]] = defaultdict(list)
    copies: list[tuple[Tensor, Tensor]] = []
    for x, spec, stored in (matrix for cast in casts for matrix in _matrices(*cast)):
        if (block := _matrix_block(spec, x.ndim)) is None:
            copies += zip(stored, _by_arithmetic(x, spec, None, 0.0), strict=True)
            continue
        matrices = [as_matrix(tensor) for tensor in (x, *stored)]
        groups[x.dtype, x.device, spec.fp8_dtype, block, spec.scale_rule].append(matrices)
        pairs = zip(stored, matrices[1:], strict=True)
        copies += [(t, matrix) for t, matrix in pairs if matrix.data_ptr() != t.data_ptr()]
    for (*_, block, rule), group in groups.items():
        values, data, scales, amaxes = map(list, zip(*group, strict=True))
        cast_many_op(values, data, block, rule, 0.0, scales, amaxes, [])
    for tensor, matrix in copies:
        tensor.copy_(matrix.view(tensor.shape))
    # The op does not increase version counters; its caller does.
    torch.autograd.graph.increment_version([tensor for *_, stored in casts for tensor in stored])


def _matrices(value: Tensor, spec: Spec, stored: _Stored) -> Iterator[_Cast]:
    """Yield a tensor, or those slices of it that ``quantize_blocks`` quantizes one by one."""
    if _matrix_block(spec, value.ndim) is None and _is_batch(value, spec):
        matrix_spec = replace(spec, block=spec.block[1:])
        for x, q, scale, amax in zip(value, *stored, strict=True):
            yield from _matrices(x, matrix_spec, (q, scale, amax))
    else:
        yield value, spec, stored


def dequantize_blocks(
    q: Tensor, scale: Tensor, spec: Spec, dtype: torch.dtype, *, prior: Tensor | None = None
) -> Tensor:
    """Return ``q * scale``, multiplied in float32 and rounded once to ``dtype``; exact in float64.

    ``prior`` is a tensor that a compiled graph must compute before the op that dequantizes; outside
    a compiled graph it is ignored.
    """
    if dtype == torch.float64:
        return q.double() * expand_scale(scale, spec.block, q.shape)
    if q.ndim == 2:
        return value_of_op("dequantize", (q, scale), dtype, spec.block, prior)
    return (q.float() * expand_scale(scale, spec.block, q.shape)).to(dtype)


def block_of_view(
    old: Sequence[int], new: Sequence[int], block: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the block of a tensor's view, and the block to which the tensor must be cut for it.

    The second result is ``block`` itself if each block of the tensor is also a block of the view,
    and smaller if the view would cut a block.

    >>> block_of_view((6, 256), (2, 3, 256), (1, 128))
    ((1, 1, 128), (1, 128))
    >>> block_of_view((256, 256), (64, 4, 256), (128, 128))
    ((32, -1, 128), (128, 128))
    >>> block_of_view((256, 6), (128, 12), (1, -1))
    ((1, 6), (1, -1))
    """
    old, new, block = tuple(old), tuple(new), tuple(block)
    tail = 0  # number of unchanged trailing dimensions
    while tail < min(len(old), len(new)) and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    tail_block = block[len(block) - tail :]
    front, front_new = old[: len(old) - tail], new[: len(new) - tail]
    if all(b == 1 or n == 1 for b, n in zip(block, front, strict=False)):
        return (1,) * len(front_new) + tail_block, block
    head = 0  # number of unchanged leading dimensions
    while head < min(len(front), len(front_new)) and front[head] == front_new[head]:
        head += 1
    cut = list(block)
    middle: list[int] = [1] * (len(front_new) - head)
    for dims, dims_new in _pair_dims(front, front_new, head):
        sizes = [old[d] for d in dims]
        blocks = [old[d] if block[d] == -1 else min(block[d], old[d]) for d in dims]
        fitting, refined = _regroup(sizes, [new[d] for d in dims_new], blocks)
        for d, b, r in zip(dims, blocks, refined, strict=True):
            cut[d] = block[d] if r == b else r
        for d, b in zip(dims_new, fitting, strict=True):
            middle[d - head] = b
    return block[:head] + tuple(middle) + tail_block, tuple(cut)


def _pair_dims(
    old: Sequence[int], new: Sequence[int], start: int
) -> list[tuple[list[int], list[int]]]:
    """Pair dimensions of the two shapes that hold the same elements; skip dimensions of size 1."""
    old_dims = [d for d in range(start, len(old)) if old[d] != 1]
    new_dims = [d for d in range(start, len(new)) if new[d] != 1]
    groups = []
    while old_dims and new_dims:
        a, b = [old_dims.pop(0)], [new_dims.pop(0)]
        while excess := math.prod(old[d] for d in a) - math.prod(new[d] for d in b):
            dims, remaining = (a, old_dims) if excess < 0 else (b, new_dims)
            dims.append(remaining.pop(0))
        groups.append((a, b))
    return groups


def _regroup(
    old: Sequence[int], new: Sequence[int], blocks: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the blocks of the new dimensions, and of the old ones after cutting them to fit."""
    if len(old) == len(new) == 1:
        return list(blocks), list(blocks)
    run, refined = _run(old, blocks)
    fitting = _split(run, new)
    while fitting is None:  # halving keeps common powers of two, and a run of 1 always fits
        run = run // 2 if run % 2 == 0 else 1
        fitting, cut = _split(run, new), _split(run, old)
        refined = [n if r == -1 else r for n, r in zip(old, cut or old, strict=True)]
        if cut is None or any(b % r for b, r in zip(blocks, refined, strict=True)):
            fitting = None
    return fitting, refined


def _run(sizes: Sequence[int], blocks: Sequence[int]) -> tuple[int, list[int]]:
    """Return the run, the number of consecutive elements that share a scale, and the cut blocks.

    Elements share a scale if blocks span the trailing dimensions and have size 1 in all dimensions
    before the next one. A block that does not span that next dimension must also divide it, unless
    the dimension is the first.
    """
    d = len(sizes) - 1
    while d >= 0 and blocks[d] == sizes[d]:
        d -= 1
    if d < 0:
        return math.prod(sizes), list(sizes)
    refined = [1] * d + list(blocks[d:])
    if d and sizes[d] % blocks[d]:
        refined[d] = math.gcd(sizes[d], blocks[d])
    return refined[d] * math.prod(sizes[d + 1 :]), refined


def _split(run: int, sizes: Sequence[int]) -> list[int] | None:
    """Return blocks that consist of runs of ``run`` consecutive elements; None if impossible."""
    blocks = [1] * len(sizes)
    for d in range(len(sizes) - 1, -1, -1):
        if run == 1:
            break
        spans = run >= sizes[d]
        if d and (run % sizes[d] if spans else sizes[d] % run):
            return None
        blocks[d], run = (-1, run // sizes[d]) if spans else (run, 1)
    return blocks
