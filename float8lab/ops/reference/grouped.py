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

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.formats import SCALE_RULES, shares_matrix_amax
from float8lab.ops.reference.blocks import ALIGN, CastResults, factors_from_amax, quantize, round_up

__all__ = ["SPAN", "bounds_of", "cast_batch", "cast_groups", "padded_rows", "plan_groups"]

SPAN = 128
"""Where groups start in a transpose: at multiples of the longest block."""


def padded_rows(rows: int, groups: int) -> int:
    """Columns of the transpose of so many rows: enough for any sizes of the groups.

    At most ``min(groups + 1, rows)`` groups have rows; the one more is that of the padding rows.

    >>> padded_rows(1000, 3), padded_rows(2, 100)
    (1408, 256)
    """
    return (rows + torch.sym_min(groups + 1, rows) * (SPAN - 1)) // SPAN * SPAN


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
    return torch.tensor(plan, dtype=torch.int32).to(offs.device)


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
    _, block, rule, _ = options
    bounds = list(bounds_of(offs))
    (M, K), used = x.shape, bounds[-1][1] if bounds else 0
    x = F.pad(x[:used], (0, -K % ALIGN, 0, M - used))
    if slot is not None:
        _record_amaxes(x, bounds, slot)
    padded = None
    if columnwise:
        padded = x.new_zeros(padded_rows(M, len(bounds)), x.shape[1])
        for start, end, place in bounds:
            padded[place : place + end - start] = x[start:end]
    amax: Tensor | None = None
    if block == (-1, -1):
        q, scale, amax = _cast_groups_per_tensor(x, bounds, options, given)
        q_t, scale_t = None, None if scale is None else scale.clone()
        if padded is not None:
            places = [(place, place + end - start, place) for start, end, place in bounds]
            amaxes = amax if amax is not None else given
            q_t = _cast_groups_per_tensor(padded, places, options, amaxes)[0].t().contiguous()
    elif shares_matrix_amax(block, rule):
        q, scale = _cast_blocks_of_groups(x, [b[:2] for b in bounds], options, given)
        q_t = scale_t = None
        if padded is not None:
            spans = [(place, place + round_up(end - start, SPAN)) for start, end, place in bounds]
            q_t, scale_t = _cast_blocks_of_groups(padded, spans, options, given, transposed=True)
    else:
        q, scale, _ = quantize(x, *options)
        q_t = scale_t = None
        if padded is not None and block == (1, -1):
            q_t, scale_t = _cast_rows_of_groups(padded, bounds, options)
        elif padded is not None:
            q_t, scale_t, _ = quantize(padded.t(), *options)
    sums = None
    if dbias:
        sums = x.new_zeros((len(bounds), K), dtype=torch.float32)
        for index, (start, end, _) in enumerate(bounds):
            sums[index] = x[start:end, :K].float().sum(0)
    return CastResults(
        q if rowwise else None, scale if rowwise else None, amax,
        q_t, scale_t if columnwise else None, sums,
    )  # fmt: skip


def _record_amaxes(x: Tensor, bounds: Sequence[tuple[int, int, int]], slot: Tensor) -> None:
    """Raise each group's element of ``slot`` to its amax; those of groups without rows stay."""
    for index, (start, end, _) in enumerate(bounds):
        if end > start and x.shape[1]:
            amax = x[start:end].abs().max().float()
            of_group = slot.view(-1)[index]
            of_group.copy_(torch.maximum(of_group, amax))


def _cast_groups_per_tensor(
    x: Tensor, bounds: Sequence[tuple[int, int, int]], options: _How, given: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data of all groups, and the scale and the amax of each where they are found; zeros beyond."""
    fp8_dtype, block, rule, eps = options
    E = len(bounds)
    q = torch.zeros(x.shape, dtype=torch.uint8, device=x.device).view(fp8_dtype)
    scale = amax = None
    if rule in SCALE_RULES:
        amaxes = given
        if amaxes is None:
            amaxes = amax = x.new_zeros((E, 1, 1), dtype=torch.float32)
            for index, (start, end, _) in enumerate(bounds):
                if end > start and x.shape[1]:
                    amax[index] = x[start:end].abs().max().float()
        scale, _ = factors_from_amax(amaxes.reshape(-1, 1, 1).expand(E, 1, 1), fp8_dtype, rule, eps)
        given = amaxes
    assert given is not None, "given by a rule that finds none"
    for index, (start, end, _) in enumerate(bounds):
        factor = given.reshape(-1)[index if given.numel() > 1 else 0]
        q[start:end] = quantize(x[start:end], fp8_dtype, block, rule, eps, given=factor)[0]
    return q, scale, amax


def _cast_one(
    x: Tensor, options: _How, given: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data and scales of one orientation that needs no padding; its amax, found for the whole."""
    fp8_dtype, block, rule, eps = options
    given = given if shares_matrix_amax(block, rule) else None
    q, scale, amaxes = quantize(x, fp8_dtype, block, rule, eps, given=given)
    return q, scale, amaxes if block == (-1, -1) and given is None else None


def _cast_blocks_of_groups(
    x: Tensor, bounds: Sequence[tuple[int, int]], options: _How, given: Tensor | None, *,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Data and scales of groups, in blocks that depend on the amax of their group; zeros beyond."""
    fp8_dtype, block, rule, eps = options
    rows = x.t() if transposed else x
    q, scale, _ = quantize(torch.zeros_like(rows), fp8_dtype, block, rule, eps)
    for index, (start, end) in enumerate(bounds):
        if end == start:
            continue
        amax = None if given is None else given.reshape(-1)[index if given.numel() > 1 else 0]
        results = quantize(x[start:end].t() if transposed else x[start:end], *options, given=amax)
        if transposed:
            first = start // block[1]
            q[:, start:end], scale[:, first : first + results[1].shape[1]] = results[:2]
        else:
            q[start:end], scale[start:end] = results[:2]
    return q, scale


def _cast_rows_of_groups(
    padded: Tensor, bounds: Sequence[tuple[int, int, int]], options: _How
) -> tuple[Tensor, Tensor]:
    """The transpose in rows, each with a scale in every group."""
    q = torch.zeros(padded.shape[::-1], dtype=torch.uint8, device=padded.device).view(options[0])
    scale = padded.new_ones((len(bounds), padded.shape[1], 1), dtype=torch.float32)
    for index, (start, end, place) in enumerate(bounds):
        columns = padded[place : place + end - start].t()
        q[:, place : place + end - start], scale[index], _ = quantize(columns, *options)
    return q, scale


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
    given_of_each = (
        [None] * len(matrices) if given is None else given.reshape(len(matrices), -1).unbind()
    )

    def cast(transposed: bool) -> list[Tensor | None]:
        pairs = zip(matrices, given_of_each, strict=True)
        casts = [_cast_one(w.t() if transposed else w, options, factor) for w, factor in pairs]
        columns = zip(*casts, strict=True)
        return [torch.stack(of)[:E] if of[0] is not None else None for of in columns]

    q, scale, amax = cast(False) if rowwise or not columnwise else (None, None, None)
    q_t, scale_t, amax_t = cast(True) if columnwise else (None, None, None)
    q, scale = (q, scale) if rowwise else (None, None)
    return CastResults(q, scale, amax_t if amax is None else amax, q_t, scale_t, None)
