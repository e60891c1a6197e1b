"""Groups of rows: their layout, and their casts.  M rows, K columns, E groups, N rows of a weight.

A matrix whose rows are in groups has the tokens of one expert after those of the one before;
``offs``, ``[E]``, are the offsets behind the groups. Rows beyond the last offset are padding rows:
they are taken for zeros, whatever they hold. A batch of matrices, ``[E, N, K]``, are the experts'
weights, each of which is cast alone; ``offs`` is None then.

A matrix in groups is cast to rows where they are, ``[M, K]``, whose columns are padded to a
multiple of ``ALIGN``. Its transpose is what the weight gradient contracts over the tokens of each
group. There each group starts at a multiple of ``SPAN`` columns, zeros follow it, and so does a
group of zeros for the padding rows. So a block of up to 128 tokens never has two experts' tokens,
the contraction of a group is a whole number of the tensor cores' steps without any mask, and TMA
reads whole boxes. What it costs: ``padded_rows`` is known without the offsets, on the host, so it
allows every group 127 columns too many. Starts at multiples of 16 would need a mask on both
operands in the last step of each group, since 0 times NaN is NaN.
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
    """Columns of the transpose of so many rows: enough for any sizes of the groups.

    At most ``min(groups + 1, rows)`` groups have rows; the one more is that of the padding rows.

    >>> padded_rows(1000, 3), padded_rows(2, 100)
    (1408, 256)
    """
    return (rows + cast("int", torch.sym_min(groups + 1, rows)) * (SPAN - 1)) // SPAN * SPAN


def bounds_of(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """Start and end of each group, and its start in a transpose."""
    start = place = 0
    for end in offs.tolist():
        yield start, end, place
        place += round_up(end - start, SPAN)
        start = end


def plan_groups(offs: Tensor, rows: int | torch.SymInt) -> Tensor:
    """Which tile of ``SPAN`` rows has which rows of which group: what the kernels look up.

    Args:
        offs: offsets of the groups, ``[E]``, int32 or int64.
        rows: of the matrix; those beyond the last end are group E.

    Returns:
        ``[E + 1 + padded_rows // SPAN, 4]`` int32: of each group, from the largest on, its first
        tile, how many it has and which group it is; how many tiles there are, and how many group E
        has; then of each tile its group, its first row and the group's end. All else is 0.
    """
    starts, stops = [0, *offs.tolist()], [*offs.tolist(), int(rows)]
    groups: list[list[int]] = []
    tiles: list[list[int]] = []
    for group, (start, end) in enumerate(zip(starts, stops, strict=True)):
        groups.append([len(tiles), -(-max(end - start, 0) // SPAN), group, 0])
        tiles += [[group, row, end, 0] for row in range(start, end, SPAN)]
    *groups, (_, beyond, _, _) = groups
    groups.sort(key=lambda group: -group[1])
    unused = padded_rows(int(rows), len(offs)) // SPAN - len(tiles)
    plan = [*groups, [len(tiles), beyond, 0, 0], *tiles, *[[0] * 4] * unused]
    return torch.tensor(plan, dtype=torch.int32, device=offs.device)


_How = tuple[torch.dtype, tuple[int, ...], str, float]
"""The FP8 format, block, rule and epsilon."""


def cast_groups(
    x: Tensor, offs: Tensor, options: _How, rowwise: bool, columnwise: bool, dbias: bool,
    given: Tensor | None, slot: Tensor | None,
) -> CastResults:  # fmt: skip
    """``cast`` of a matrix whose rows are in groups.

    Every group has the bytes of casting its rows alone: with ``(-1, -1)`` each group has a scale of
    its own.

    Returns:
        Data ``[M, K]``; scales ``[E, 1, 1]``, ``[M, 1]`` or ``[M, blocks]``; the amaxes
        ``[E, 1, 1]`` if they were found for whole groups; the transpose ``[K, padded_rows(M, E)]``,
        whose columns behind the last group may hold anything; its scales ``[E, 1, 1]``,
        ``[E, K, 1]`` or ``[K, blocks]``; sums ``[E, K]``. K is padded to ``ALIGN``.
    """
    bounds = list(bounds_of(offs))
    (M, K), used = x.shape, bounds[-1][1] if bounds else 0
    x = F.pad(x[:used], (0, -K % ALIGN, 0, M - used))
    sums = x.new_zeros((len(bounds), K), dtype=torch.float32) if dbias else None
    for index, (start, end, _) in enumerate(bounds):
        rows = x[start:end]
        if slot is not None and rows.numel():
            of_group = slot.view(-1)[index]
            of_group.copy_(torch.maximum(of_group, rows.abs().max().float()))
        if sums is not None:
            sums[index] = rows[:, :K].float().sum(0)
    q, scale, amax = _cast_each(x, [(start, end) for start, end, _ in bounds], options, given, 0)
    q_t = scale_t = None
    if columnwise:
        padded = x.new_zeros(x.shape[1], padded_rows(M, len(bounds)))
        for start, end, place in bounds:
            padded[:, place : place + end - start] = x[start:end].t()
        step = 1 if options[1][1] == -1 else SPAN  # the last blocks of a group end in zeros
        spans = [(place, place + round_up(end - start, step)) for start, end, place in bounds]
        q_t, scale_t, _ = _cast_each(padded, spans, options, given, 1)
    return CastResults(q if rowwise else None, scale if rowwise else None, amax, q_t, scale_t, sums)


def _cast_each(
    x: Tensor, spans: Sequence[tuple[int, int]], options: _How, given: Tensor | None, dim: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data and scales of a matrix that has groups along a dimension, each cast alone.

    Beyond the groups are zeros. Where blocks span a group, the scales are of each, ``[E, ...]``;
    its amax is returned, too, where it was found for all of the group.
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
    x: Tensor, options: _How, rowwise: bool, columnwise: bool, given: Tensor | None,
    slot: Tensor | None,
) -> CastResults:  # fmt: skip
    """``cast`` of each matrix of a batch: ``[E, ...]`` of each result, K and N padded to ``ALIGN``.

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
        return [torch.stack(of)[:E] if of[0] is not None else None for of in columns]

    q, scale, amax = cast(False) if rowwise or not columnwise else (None, None, None)
    q_t, scale_t, amax_t = cast(True) if columnwise else (None, None, None)
    q, scale = (q, scale) if rowwise else (None, None)
    amax = amax_t if amax is None else amax
    has_amax = options[1] == (-1, -1) and given is None
    return CastResults(q, scale, amax if has_amax else None, q_t, scale_t, None)
