"""Casts and matrix products of groups.  M rows, K columns, E groups, N rows of each weight.

A matrix whose rows are in groups has the tokens of one expert after those of the one before;
``offs``, ``[E]``, are the ends of the groups. Rows beyond the last end belong to nobody: they are
taken for zeros, whatever they hold. A batch of matrices, ``[E, N, K]``, are the experts' weights,
each of which is cast alone; ``offs`` is None then.

A matrix in groups is cast to rows where they are, ``[M, K]``, whose columns are padded to a
multiple of ``ALIGN``. Its transpose is what the weight gradient contracts over the tokens of each
group. There each group starts at a multiple of ``SPAN`` columns, zeros follow it, and so does a
group of zeros for the rows that belong to nobody. So a block of up to 128 tokens never has two
experts' tokens, the contraction of a group is a whole number of the tensor cores' steps without any
mask, and the copy engine reads whole boxes. What it costs: ``padded_rows`` is known without the
ends, on the host, so it allows every group 127 columns too many. Starts at multiples of 16 would
need a mask on both operands in the last step of each group, since 0 times NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.formats import SCALE_RULES, shares_matrix_amax
from float8lab.ops.reference.cast import ALIGN, factors_from_amax, quantize, round_up
from float8lab.ops.reference.gemm import scaled_mm
from float8lab.ops.reference.prologue import value_of

__all__ = ["SPAN", "cast_groups", "grouped_mm", "padded_rows", "plan_groups"]

SPAN = 128
"""Where groups start in a transpose: at multiples of the longest block."""


def padded_rows(rows: int, groups: int) -> int:
    """Columns of the transpose of so many rows: enough for any sizes of the groups.

    No more groups than rows are not empty, and one is that of the rows that belong to nobody.

    >>> padded_rows(1000, 3), padded_rows(2, 100)
    (1408, 256)
    """
    return (rows + torch.sym_min(groups + 1, rows) * (SPAN - 1)) // SPAN * SPAN


def _bounds(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """Start and end of each group, and its start in a transpose."""
    start = place = 0
    for end in offs.tolist():
        yield start, end, place
        place += round_up(end - start, SPAN)
        start = end


def plan_groups(offs: Tensor, rows: int | torch.SymInt) -> Tensor:
    """Which tile of ``SPAN`` rows has which rows of which group: what the kernels look up.

    Args:
        offs: ends of the groups, ``[E]``, int32 or int64.
        rows: of the matrix; those beyond the last end are group E.

    Returns:
        ``[E + 1 + padded_rows // SPAN, 4]`` int32: of each group, from the largest on, its first
        tile, how many it has and which group it is; how many tiles there are, and how many group E
        has; then of each tile its group, its first row and the group's end. All else is 0.
    """
    starts, ends = [0, *offs.tolist()], [*offs.tolist(), int(rows)]
    groups: list[list[int]] = []
    tiles: list[list[int]] = []
    for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
        groups.append([len(tiles), -(-max(end - start, 0) // SPAN), group, 0])
        tiles += [[group, row, end, 0] for row in range(start, end, SPAN)]
    *groups, (_, beyond, _, _) = groups
    groups.sort(key=lambda group: -group[1])
    unused = padded_rows(int(rows), len(offs)) // SPAN - len(tiles)
    plan = [*groups, [len(tiles), beyond, 0, 0], *tiles, *[[0] * 4] * unused]
    return torch.tensor(plan, dtype=torch.int32).to(offs.device)


def cast_groups(
    prologue: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    offs: Tensor | None,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float = 0.0,
    straight: bool = True,
    transposed: bool = False,
    column_sum: bool = False,
    given: Tensor | None = None,
    slot: Tensor | None = None,
    plan: Tensor | None = None,
) -> tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]:
    """Cast a matrix whose rows are in groups, or each matrix of a batch, as ``cast`` does.

    Every group has the bytes of casting its rows alone: with ``(-1, -1)`` each group has a scale of
    its own, as each matrix of a batch has.

    Args:
        prologue: how the matrix is computed, of ``cast``; ``""`` for a batch.
        inputs: from which tensors; one of 3 dimensions is a batch.
        dtype: the values of a prologue are rounded to it.
        offs: ends of the groups, ``[E]``, int32 or int64, none below the one before; None for a
            batch.
        fp8_dtype: of the result.
        block: ``(-1, -1)``, or a row or a part of it of up to 128 columns, a power of two; for a
            batch ``(128, 128)``, too.
        rule: one of ``SCALE_RULES``, or for the whole ``"encode"``: by the factor ``given``.
        eps: the least amax that a scale is found from.
        straight: the rows are wanted.
        transposed: the transpose is wanted.
        column_sum: the sums over the rows of each group are wanted; not of a batch.
        given: the factor of each group or matrix, or one for all of them; where scales are found
            for the whole, the amaxes in the place of factors, if they are known.
        slot: one element for each group or matrix, raised to its amax, unless it has no row.
        plan: that of ``plan_groups`` for these groups, where it is made anyway. It changes nothing.

    Returns:
        As ``cast``. Of groups: data ``[M, K]``; scales ``[E, 1, 1]``, ``[M, 1]`` or
        ``[M, blocks]``; the amaxes ``[E, 1, 1]`` if they were found for the whole; the transpose
        ``[K, padded_rows(M, E)]``, of which what is behind the last group may hold anything; its
        scales ``[E, 1, 1]``, ``[E, K, 1]`` or ``[K, blocks]``; sums ``[E, K]``. Of a batch:
        ``[E, ...]`` of each. K and N are padded to ``ALIGN``.
    """
    how = (fp8_dtype, tuple(block), rule, eps)
    if offs is None:
        return _cast_batch(inputs[0], how, straight, transposed, given, slot)
    x = value_of(prologue, inputs, dtype) if prologue else inputs[0]
    bounds = list(_bounds(offs))
    (M, K), used = x.shape, bounds[-1][1] if bounds else 0
    x = F.pad(x[:used], (0, -K % ALIGN, 0, M - used))
    if slot is not None:
        _record_amaxes(x, bounds, slot)
    padded = None
    if transposed:
        padded = x.new_zeros(padded_rows(M, len(bounds)), x.shape[1])
        for start, end, place in bounds:
            padded[place : place + end - start] = x[start:end]
    amax: Tensor | None = None
    if how[1] == (-1, -1):
        q, scale, amax = _cast_groups_per_tensor(x, bounds, how, given)
        q_t, scale_t = None, None if scale is None else scale.clone()
        if padded is not None:
            places = [(place, place + end - start, place) for start, end, place in bounds]
            known = amax if amax is not None else given
            q_t = _cast_groups_per_tensor(padded, places, how, known)[0].t().contiguous()
    elif shares_matrix_amax(how[1], rule):
        q, scale = _cast_blocks_of_groups(x, [b[:2] for b in bounds], how, given)
        q_t = scale_t = None
        if padded is not None:
            spans = [(place, place + round_up(end - start, SPAN)) for start, end, place in bounds]
            q_t, scale_t = _cast_blocks_of_groups(padded, spans, how, given, transposed=True)
    else:
        q, scale, _ = quantize(x, *how)
        q_t = scale_t = None
        if padded is not None and how[1] == (1, -1):
            q_t, scale_t = _cast_rows_of_groups(padded, bounds, how)
        elif padded is not None:
            q_t, scale_t, _ = quantize(padded.t(), *how)
    total = None
    if column_sum:
        total = x.new_zeros((len(bounds), K), dtype=torch.float32)
        for index, (start, end, _) in enumerate(bounds):
            total[index] = x[start:end, :K].float().sum(0)
    return (
        q if straight else None, scale if straight else None, amax,
        q_t, scale_t if transposed else None, total,
    )  # fmt: skip


_How = tuple[torch.dtype, tuple[int, ...], str, float]
"""The FP8 format, block, rule and epsilon."""


def _record_amaxes(x: Tensor, bounds: Sequence[tuple[int, int, int]], slot: Tensor) -> None:
    """Raise each group's element of ``slot`` to its amax; those of groups without rows stay."""
    for index, (start, end, _) in enumerate(bounds):
        if end > start and x.shape[1]:
            amax = x[start:end].abs().max().float()
            of_group = slot.view(-1)[index]
            of_group.copy_(torch.maximum(of_group, amax))


def _cast_groups_per_tensor(
    x: Tensor, bounds: Sequence[tuple[int, int, int]], how: _How, given: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data of all groups, and the scale and the amax of each where they are found; zeros beyond."""
    fp8_dtype, block, rule, eps = how
    E = len(bounds)
    q = torch.zeros(x.shape, dtype=torch.uint8, device=x.device).view(fp8_dtype)
    scale = amax = None
    if rule in SCALE_RULES:
        known = given
        if known is None:
            known = amax = x.new_zeros((E, 1, 1), dtype=torch.float32)
            for index, (start, end, _) in enumerate(bounds):
                if end > start and x.shape[1]:
                    amax[index] = x[start:end].abs().max().float()
        scale, _ = factors_from_amax(known.reshape(-1, 1, 1).expand(E, 1, 1), fp8_dtype, rule, eps)
        given = known
    assert given is not None, "given by a rule that finds none"
    for index, (start, end, _) in enumerate(bounds):
        factor = given.reshape(-1)[index if given.numel() > 1 else 0]
        q[start:end] = quantize(x[start:end], fp8_dtype, block, rule, eps, given=factor)[0]
    return q, scale, amax


def _cast_one(
    x: Tensor, how: _How, given: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Data and scales of one orientation that needs no padding; its amax, found for the whole."""
    fp8_dtype, block, rule, eps = how
    given = given if shares_matrix_amax(block, rule) else None
    q, scale, found = quantize(x, fp8_dtype, block, rule, eps, given=given)
    return q, scale, found if block == (-1, -1) and given is None else None


def _cast_blocks_of_groups(
    x: Tensor,
    bounds: Sequence[tuple[int, int]],
    how: _How,
    given: Tensor | None,
    *,
    transposed: bool = False,
) -> tuple[Tensor, Tensor]:
    """Data and scales of groups, in blocks that depend on the amax of their group; zeros beyond."""
    fp8_dtype, block, rule, eps = how
    rows = x.t() if transposed else x
    q, scale, _ = quantize(torch.zeros_like(rows), fp8_dtype, block, rule, eps)
    for index, (start, end) in enumerate(bounds):
        if end == start:
            continue
        amax = None if given is None else given.reshape(-1)[index if given.numel() > 1 else 0]
        part = quantize(x[start:end].t() if transposed else x[start:end], *how, given=amax)
        if transposed:
            first = start // block[1]
            q[:, start:end], scale[:, first : first + part[1].shape[1]] = part[:2]
        else:
            q[start:end], scale[start:end] = part[:2]
    return q, scale


def _cast_rows_of_groups(
    padded: Tensor, bounds: Sequence[tuple[int, int, int]], how: _How
) -> tuple[Tensor, Tensor]:
    """The transpose in rows, each with a scale in every group."""
    q = torch.zeros(padded.shape[::-1], dtype=torch.uint8, device=padded.device).view(how[0])
    scale = padded.new_ones((len(bounds), padded.shape[1], 1), dtype=torch.float32)
    for index, (start, end, place) in enumerate(bounds):
        part = padded[place : place + end - start].t()
        q[:, place : place + end - start], scale[index], _ = quantize(part, *how)
    return q, scale


def _cast_batch(
    x: Tensor,
    how: _How,
    straight: bool,
    transposed: bool,
    given: Tensor | None,
    slot: Tensor | None,
) -> Any:
    E, N, K = x.shape
    if slot is not None and x.numel():
        slot.copy_(torch.maximum(slot, x.abs().amax((1, 2)).float().view_as(slot)))
    matrices = F.pad(x, (0, -K % ALIGN, 0, -N % ALIGN)).unbind() or [x.new_zeros(N, K)]
    known = [None] * len(matrices) if given is None else given.reshape(len(matrices), -1).unbind()

    def cast(turned: bool) -> list[Tensor | None]:
        pairs = zip(matrices, known, strict=True)
        found = [_cast_one(one.t() if turned else one, how, of) for one, of in pairs]
        parts: Any = zip(*found, strict=True)
        return [torch.stack(of)[:E] if of[0] is not None else None for of in parts]

    q, scale, amax = cast(False) if straight or not transposed else (None, None, None)
    q_t, scale_t, amax_t = cast(True) if transposed else (None, None, None)
    q, scale = (q, scale) if straight else (None, None)
    return q, scale, amax_t if amax is None else amax, q_t, scale_t, None


def grouped_mm(
    a: Tensor,
    a_scale: Tensor | None,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor | None,
    b_block: Sequence[int],
    bias: Tensor | None,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    plan: Tensor | None = None,
) -> Tensor:
    """The products of groups, ``a @ b.T``, accumulated in float32.

    With a batch ``b``, ``[E, N, K]``, the rows of ``a``, ``[M, K]``, are in groups, each of which
    is multiplied by its own matrix, and ``bias``, ``[E, N]``, added: ``[M, N]``, with zeros in the
    rows beyond the last group. With two matrices, ``[N, L]`` and ``[K, L]``, it is the contraction
    that is in groups: ``[E, N, K]``.

    Operands in FP8 are as ``cast_groups`` gives them, so a contraction has its groups at multiples
    of ``SPAN``; one scale may also serve all groups of a matrix. Operands without scales are in
    high precision, and there groups follow each other.

    ``plan`` is that of ``plan_groups`` for the rows in groups, or those that a transpose had, where
    several products share it. It changes nothing.
    """
    if b.ndim == 3:
        return _multiply_rows(
            a, a_scale, a_block, b, b_scale, b_block, bias, offs, out_dtype, fast_accum
        )
    out = a.new_zeros((len(offs), a.shape[0], b.shape[0]), dtype=out_dtype)
    for index, (start, end, place) in enumerate(_bounds(offs)):
        if end == start:
            continue
        if a_scale is None or b_scale is None:
            with torch.autocast(a.device.type, enabled=False):
                out[index] = (a[:, start:end] @ b[:, start:end].mT).to(out_dtype)
            continue
        columns = slice(place, place + round_up(end - start, SPAN))
        left = a[:, columns], _scales_of_group(a_scale, a_block, index, columns), a_block
        right = b[:, columns], _scales_of_group(b_scale, b_block, index, columns), b_block
        out[index] = scaled_mm(*left, *right, None, out_dtype, fast_accum)
    return out


def _scales_of_group(scale: Tensor, block: Sequence[int], index: int, columns: slice) -> Tensor:
    """The scales of a group's columns of a transpose."""
    if block[1] != -1:
        return scale[:, columns.start // block[1] : -(-columns.stop // block[1])]
    return scale[index] if scale.ndim == 3 else scale


def _multiply_rows(
    a: Tensor,
    a_scale: Tensor | None,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor | None,
    b_block: Sequence[int],
    bias: Tensor | None,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    out = a.new_zeros((a.shape[0], b.shape[1]), dtype=out_dtype)
    for index, (start, end, _) in enumerate(_bounds(offs)):
        if end == start:
            continue
        added = None if bias is None else bias[index]
        if a_scale is None or b_scale is None:
            with torch.autocast(a.device.type, enabled=False):
                out[start:end] = F.linear(a[start:end], b[index], added).to(out_dtype)
            continue
        own = a_scale[index] if a_scale.ndim == 3 else a_scale
        own = own if own.numel() == 1 else own[start:end]
        left, right = (a[start:end], own, a_block), (b[index], b_scale[index], b_block)
        out[start:end] = scaled_mm(*left, *right, added, out_dtype, fast_accum)
    return out
