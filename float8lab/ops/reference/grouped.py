"""Groups of rows: their layout, and their casts.  M rows, K columns, E groups, N rows of a weight.

A matrix whose rows are in groups has the tokens of each expert after those of the expert before;
``offs``, ``[E]``, are the offsets after the groups. Rows after the last offset are padding rows:
they count as zeros, whatever they hold. A batch of matrices, ``[E, N, K]``, holds the experts'
weights, each of which is cast separately; then ``offs`` is None.

A rowwise cast of groups leaves the rows in their places, ``[M, K]``, and pads the columns to a
multiple of ``ALIGN``. The weight gradient contracts the transpose over the tokens of each group. In
the transpose, each group starts at a multiple of ``SPAN`` columns and is followed by zeros; a group
of zeros for the padding rows comes last. So a block of up to 128 tokens never has tokens of two
experts, the contraction of a group is a whole number of the tensor cores' steps without any mask,
and TMA reads complete boxes. The cost: the host computes ``padded_rows`` without the offsets, so it
allows 127 additional columns for every group. If groups started at multiples of 16, the last step
of each would need a mask on both operands, since 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.formats import SCALE_RULES, shares_matrix_amax
from float8lab.ops.reference.blocks import ALIGN, CastResults, quantize, round_up

__all__ = ["SPAN", "bounds_of", "cast_batch", "cast_groups", "padded_rows", "plan_groups"]

SPAN = 128
"""Where groups start in a transpose: at multiples of the longest block."""


def padded_rows(rows: int, groups: int) -> int:
    """Return how many columns the transpose has: enough for any sizes of the groups.

    At most ``min(groups + 1, rows)`` groups have rows, since the padding rows are a group, too.

    >>> padded_rows(1000, 3), padded_rows(2, 100)
    (1408, 256)
    """
    return (rows + cast("int", torch.sym_min(groups + 1, rows)) * (SPAN - 1)) // SPAN * SPAN


def bounds_of(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield start and end of each group, and its start in a transpose."""
    start = start_t = 0
    for end in offs.tolist():
        yield start, end, start_t
        start_t += round_up(end - start, SPAN)
        start = end


def plan_groups(offs: Tensor, rows: int | torch.SymInt) -> Tensor:
    """Make the plan that kernels look up: which rows of which group each tile of ``SPAN`` rows has.

    Args:
        offs: offsets of the groups, ``[E]``, int32 or int64.
        rows: the rows of the matrix; those after the last offset are group E.

    Returns:
        ``[E + 1 + padded_rows // SPAN, 4]`` int32. E entries of the groups, the largest first: its
        first tile, its number of tiles, its index. Then the number of all tiles, and of group E's.
        Then an entry of each tile: its group, its first row, the group's end. All else is 0.
    """
    starts, stops = [0, *offs.tolist()], [*offs.tolist(), int(rows)]
    groups: list[list[int]] = []
    tiles: list[list[int]] = []
    for group, (start, end) in enumerate(zip(starts, stops, strict=True)):
        groups.append([len(tiles), -(-max(end - start, 0) // SPAN), group, 0])
        tiles += [[group, row, end, 0] for row in range(start, end, SPAN)]
    *groups, (_, padding_tiles, _, _) = groups
    groups.sort(key=lambda group: -group[1])
    unused = padded_rows(int(rows), len(offs)) // SPAN - len(tiles)
    plan = [*groups, [len(tiles), padding_tiles, 0, 0], *tiles, *[[0] * 4] * unused]
    return torch.tensor(plan, dtype=torch.int32, device=offs.device)


_Options = tuple[torch.dtype, tuple[int, ...], str, float]
"""The FP8 format, block, rule and epsilon of a cast."""


def cast_groups(
    x: Tensor, offs: Tensor, options: _Options, rowwise: bool, columnwise: bool, dbias: bool,
    given: Tensor | None, slot: Tensor | None,
) -> CastResults:  # fmt: skip
    """Do ``cast`` for a matrix whose rows are in groups.

    Every group has the bytes of a cast of its rows alone: with ``(-1, -1)`` each group has a scale
    of its own.

    Returns:
        Data ``[M, K]``; scales ``[E, 1, 1]``, ``[M, 1]`` or ``[M, blocks]``; the amaxes
        ``[E, 1, 1]`` if each group has one scale; the transpose ``[K, padded_rows(M, E)]``, whose
        columns after the last group may hold anything; its scales ``[E, 1, 1]``, ``[E, K, 1]`` or
        ``[K, blocks]``; sums ``[E, K]``. K is padded to ``ALIGN``.
    """
    bounds = list(bounds_of(offs))
    (M, K), used = x.shape, bounds[-1][1] if bounds else 0
    x = F.pad(x[:used], (0, -K % ALIGN, 0, M - used))
    sums = x.new_zeros((len(bounds), K), dtype=torch.float32) if dbias else None
    for index, (start, end, _) in enumerate(bounds):
        rows = x[start:end]
        if slot is not None and rows.numel():
            group_slot = slot.view(-1)[index]
            group_slot.copy_(torch.maximum(group_slot, rows.abs().max().float()))
        if sums is not None:
            sums[index] = rows[:, :K].float().sum(0)
    q, scale, amax = _cast_each(x, [(start, end) for start, end, _ in bounds], options, given, 0)
    q_t = scale_t = None
    if columnwise:
        padded = x.new_zeros(x.shape[1], padded_rows(M, len(bounds)))
        for start, end, start_t in bounds:
            padded[:, start_t : start_t + end - start] = x[start:end].t()
        step = 1 if options[1][1] == -1 else SPAN  # a group's last block includes zeros
        spans = [(start_t, start_t + round_up(end - start, step)) for start, end, start_t in bounds]
        q_t, scale_t, _ = _cast_each(padded, spans, options, given, 1)
    return CastResults(q if rowwise else None, scale if rowwise else None, amax, q_t, scale_t, sums)


def _cast_each(
    x: Tensor, spans: Sequence[tuple[int, int]], options: _Options, given: Tensor | None, dim: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return data and scales of a matrix with groups along a dimension, each cast separately.

    Data outside of the groups are zeros. Where a block spans a group, scales are ``[E, ...]``. The
    amaxes are returned, too, if a group has a single scale that was made from its amax.
    """
    fp8_dtype, block, rule, _ = options
    given = given if shares_matrix_amax(block, rule) else None
    q = torch.zeros(x.shape, dtype=torch.uint8, device=x.device).view(fp8_dtype)
    spans_group, scale, amax = block[dim] == -1, None, None
    if not spans_group:
        scale = quantize(torch.zeros_like(x), *options)[1]
    elif rule in SCALE_RULES:
        shape = (len(spans), 1 if block[0] == -1 else x.shape[0], 1)
        scale, amax = (x.new_zeros(shape, dtype=torch.float32) for _ in range(2))
    for index, (start, end) in enumerate(spans):
        factor = None
        if given is not None:
            factor = given.reshape(-1)[index if given.numel() > 1 else 0]
        data, scales, amaxes = quantize(x.narrow(dim, start, end - start), *options, given=factor)
        q.narrow(dim, start, end - start).copy_(data)
        if scale is not None and amax is not None:
            scale[index], amax[index] = scales, amaxes
        elif scale is not None:
            scale.narrow(dim, start // block[dim], scales.shape[dim]).copy_(scales)
    return q, scale, amax if block == (-1, -1) and given is None else None


def cast_batch(
    x: Tensor, options: _Options, rowwise: bool, columnwise: bool, given: Tensor | None,
    slot: Tensor | None,
) -> CastResults:  # fmt: skip
    """Do ``cast`` for each matrix of a batch: results ``[E, ...]``, K and N padded to ``ALIGN``.

    With ``(-1, -1)`` each matrix has a scale of its own.
    """
    E, N, K = x.shape
    if slot is not None and x.numel():
        slot.copy_(torch.maximum(slot, x.abs().amax((1, 2)).float().view_as(slot)))
    matrices = F.pad(x, (0, -K % ALIGN, 0, -N % ALIGN)).unbind() or [x.new_zeros(N, K)]
    factors: Sequence[Tensor | None] = [None] * len(matrices)
    if given is not None and shares_matrix_amax(options[1], options[2]):
        factors = given.reshape(len(matrices), -1).unbind()

    def cast(transposed: bool) -> list[Tensor | None]:
        pairs = zip(matrices, factors, strict=True)
        casts = [quantize(w.t() if transposed else w, *options, given=f) for w, f in pairs]
        columns = zip(*casts, strict=True)
        return [torch.stack(results)[:E] if results[0] is not None else None for results in columns]

    q, scale, amax = cast(False) if rowwise or not columnwise else (None, None, None)
    q_t, scale_t, amax_t = cast(True) if columnwise else (None, None, None)
    q, scale = (q, scale) if rowwise else (None, None)
    amax = amax_t if amax is None else amax
    has_amax = options[1] == (-1, -1) and given is None
    return CastResults(q, scale, amax if has_amax else None, q_t, scale_t, None)
