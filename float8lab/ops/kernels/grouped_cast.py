"""Cast a matrix whose rows are in groups, or a batch of matrices, on the GPU.

M rows and K columns are cast, in E groups or matrices; ROWS, COLUMNS are the sizes after padding,
and ACROSS is the number of columns of a transpose. A program casts a tile of 128 rows, and no tile
has rows of two groups: a plan, made on the device, says which rows a tile has. In a transpose, tile
i has the columns from 128 i on: the layout of ``ops/reference/grouped.py``. The tiles of padding
rows come last. They read nothing and write zeros, but nothing to a transpose: no GEMM reads it.

Tiles are read by words, as ``prologue.load_words`` says.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import SCALE_RULES, largest
from float8lab.ops import reference
from float8lab.ops.cast import empty_scale
from float8lab.ops.kernels import _common
from float8lab.ops.kernels import prologue as prologues
from float8lab.ops.kernels._common import nan_for_infinity, saturate, scale_from_amax, widen
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.cast_hopper import cast_tiles, has_tiles
from float8lab.ops.kernels.prologue import _amax_kernel as find_amax
from float8lab.ops.kernels.prologue import load, load_bits, load_words, tile_of_program
from float8lab.ops.kernels.scaling import make_scales
from float8lab.ops.reference import ALIGN, SPAN, padded_rows, prologue_shape, round_up

_TILE = _common.Tile(rows=128, columns=128, warps=8)
"""The tile of casts in blocks: it holds complete blocks."""
_TILE_OF_GRADIENT = _common.Tile(rows=128, columns=32, warps=4)
"""A gradient is computed from two or three tiles: larger ones would take all registers."""
_AMAX_TILE = _common.Tile(rows=32, columns=256, warps=8)
"""The tile is wide (its rows have 512 bytes): a program reads its tiles one after another."""
_COLUMNS_OF_SUMS = 128
"""Columns that one program sums."""


@launched
def _plan_kernel(
    offs_ptr,  # [E] offsets of groups, int32 or int64
    plan_ptr,  # [E + 1 + tiles, 4] int32
    M, E,
    COUNT: tl.constexpr,
):  # fmt: skip
    """Write the plan that ``reference.plan_groups`` describes: a program writes one of its rows."""
    # Group E has the rows after the last offset. A tile after all rows has only zeros.
    index = tl.program_id(0)
    groups = tl.arange(0, COUNT)
    stops = tl.load(offs_ptr + groups, mask=groups < E, other=M).to(tl.int32)
    starts = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups <= E), other=0).to(tl.int32)
    starts = tl.where(groups <= E, starts, M)
    tiles_of_group = (tl.maximum(stops - starts, 0) + 127) // 128
    plan_ptr += 4 * index
    if index > E:
        tile = index - E - 1
        last = tl.cumsum(tiles_of_group, 0)
        is_past = last <= tile
        first = tl.max(tl.where(is_past, last, 0), 0)
        is_group = (groups == tl.sum(is_past.to(tl.int32), 0)) & (groups <= E)
        tl.store(plan_ptr, tl.sum(tl.where(is_group, groups, 0), 0))
        tl.store(plan_ptr + 1, tl.sum(tl.where(is_group, starts + (tile - first) * 128, 0), 0))
        tl.store(plan_ptr + 2, tl.sum(tl.where(is_group, stops, 0), 0))
    else:
        tiles = tl.sum(tl.where(groups == index, tiles_of_group, 0), 0)
        tiles_before = tl.sum(tl.where((groups < index) | (index == E), tiles_of_group, 0), 0)
        is_ahead = (tiles_of_group > tiles) | ((tiles_of_group == tiles) & (groups < index))
        rank = tl.sum(((groups < E) & is_ahead).to(tl.int32), 0)
        plan_ptr += 4 * (tl.where(index == E, E, rank) - index)
        tl.store(plan_ptr, tiles_before)
        tl.store(plan_ptr + 1, tiles)
        tl.store(plan_ptr + 2, tl.where(index == E, 0, index))
    tl.store(plan_ptr + 3, 0)


@replayed
def plan_groups(offs: Tensor, rows: int) -> Tensor:
    E = offs.shape[0]
    plan = offs.new_empty((E + 1 + padded_rows(rows, E) // SPAN, 4), dtype=torch.int32)
    _plan_kernel[(plan.shape[0],)](offs, plan, rows, E, COUNT=_common.next_power_of_2(E + 1))
    return plan


@triton.jit
def _rows_of_slice(plan_ptr, index, SLICES: tl.constexpr):
    """Return group, first row and end row of a slice; each tile of a plan has SLICES of them."""
    entry_ptr = plan_ptr + 4 * (index // SLICES)
    row = tl.load(entry_ptr + 1) + index % SLICES * (128 // SLICES)
    return tl.load(entry_ptr), row.to(tl.int64), tl.load(entry_ptr + 2)


@triton.jit
def _rows_of_tile(tile_m, plan_ptr, M, E, ROWS, TILE_M: tl.constexpr):
    """Return a tile's group or matrix, first row, and the limits of rows to read and to write."""
    if E is None:  # one matrix
        group, row, end, limit = 0, tile_m * TILE_M, M, ROWS
    elif plan_ptr is None:
        tiles = tl.cdiv(ROWS, TILE_M)
        group = tile_m // tiles
        row = (tile_m % tiles) * TILE_M
        end = tl.zeros([], tl.int64) + M
        limit = tl.zeros([], tl.int64) + ROWS
    else:
        group, row, limit = _rows_of_slice(plan_ptr + 4 * (E + 1), tile_m, 1)
        end = tl.where(group < E, limit, row)
        group = group.to(tl.int64)
    return group, row, end, limit


@launched
def _amax_groups_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    plan_ptr,  # [E + 1 + tiles, 4] int32, from ``plan_groups``
    amax_ptr,  # [programs, E] fp32
    K, E,
    COUNT: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Write each group's amax over the tiles of a program: 0 for groups without such a tile.

    A program reads neighbouring tiles, in the order of the groups, so it reduces its registers only
    where the next group begins. Even of many groups, most programs meet only one or two.
    """
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    program, programs = tl.program_id(0), tl.num_programs(0)
    SLICES: tl.constexpr = 128 // TILE_M
    tiles_k = tl.cdiv(K // 2 if VALUES.halves else K, TILE_K)
    tiles = SLICES * tiles_k * (tl.load(plan_ptr + 4 * E) - tl.load(plan_ptr + 4 * E + 1))
    plan_ptr += 4 * (E + 1)
    index = tl.arange(0, COUNT)
    amax_ptr += program * E + index
    bits = tl.zeros([TILE_M, TILE_K], tl.int32)
    current = 0
    written = 0  # groups whose amax is stored
    tiles_of_program = tl.cdiv(tiles, programs)
    first = program * tiles_of_program
    stop = tl.minimum(first + tiles_of_program, tiles)
    last = tl.maximum(stop - 1, 0)
    group, row, end = _rows_of_slice(plan_ptr, tl.minimum(first, last) // tiles_k, SLICES)
    for tile in range(first, stop):
        if group != current:
            amax = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
            mask = (index >= written) & (index <= current)
            tl.store(amax_ptr, tl.where(index == current, amax, 0.0), mask=mask)
            bits = tl.zeros([TILE_M, TILE_K], tl.int32)
            written = current + 1
            current = group
        tile_k = (tile % tiles_k).to(tl.int64)
        tile_bits = load_bits(
            inputs, row + tl.arange(0, TILE_M), tile_k * TILE_K + tl.arange(0, TILE_K), tile_k,
            end, K, VALUES, TILE_K,
        )  # fmt: skip
        # The plan's entry for the next tile arrives together with the values of this tile.
        group, row, end = _rows_of_slice(plan_ptr, tl.minimum(tile + 1, last) // tiles_k, SLICES)
        bits = tl.maximum(bits, tile_bits)
    amax = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
    mask = (index >= written) & (index < E)
    tl.store(amax_ptr, tl.where(index == current, amax, 0.0), mask=mask)


@launched
def _factors_kernel(
    partial_ptr,  # [matrices, count] fp32 with these strides, or one for all
    amax_ptr, scale_ptr, scale_t_ptr, encode_ptr,  # [matrices] fp32
    count, stride, stride_partial, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Write amax, scale and encode factor of a matrix or group, from its partial amaxes."""
    matrix = tl.program_id(0)
    index = tl.arange(0, PARTIALS)
    partial = tl.load(
        partial_ptr + matrix * stride + index * stride_partial, mask=index < count, other=0.0
    )
    amax = tl.max(_common.abs_bits(partial), 0).to(tl.float32, bitcast=True)
    scale, encode = scale_from_amax(amax, tl.cast(eps, tl.float32), LIMIT, RULE)
    tl.store(amax_ptr + matrix, amax)
    tl.store(scale_ptr + matrix, scale)
    tl.store(scale_t_ptr + matrix, scale)
    tl.store(encode_ptr + matrix, encode)


@launched
def _amax_rows_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    plan_ptr,  # from ``plan_groups``; None for a batch, or for one matrix, whose E is None
    amax_ptr,  # int32 bit patterns, zero at first: of all rows, then of the columns of each group
    M, K, E, stride_ae, ROWS, COLUMNS, ALL_ROWS,
    ROWWISE: tl.constexpr, COLUMNWISE: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K)
    group, row, end, _ = _rows_of_tile(tile_m, plan_ptr, M, E, ROWS, TILE_M)
    if row < end:
        first = row
        if plan_ptr is None and E is not None:
            a_ptr += group * stride_ae
            first += group * ROWS
        local = tl.arange(0, TILE_M)
        columns = tile_k * TILE_K + tl.arange(0, TILE_K)
        inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
        y = load(inputs, row + local, columns, tile_k, end, K, VALUES, TILE_K)
        bits = _common.abs_bits(y.to(tl.float32))
        if ROWWISE:
            mask = row + local < end
            tl.atomic_max(amax_ptr + first + local, tl.max(bits, 1), mask=mask, sem="relaxed")
        if COLUMNWISE:
            group_ptr = amax_ptr + ALL_ROWS + group * COLUMNS
            tl.atomic_max(group_ptr + columns, tl.max(bits, 0), mask=columns < K, sem="relaxed")


@triton.jit
def _column_factors(
    bits, columns, start_t, limit, scale_t_ptr, COLUMNS, stride_tk, stride_tm, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, BLOCK: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return the encode factors of a tile's words; write a scale per BLOCK rows of a column."""
    DOWN: tl.constexpr = TILE_M // BLOCK
    scale, encode = scale_from_amax(_common.block_amax(bits, BLOCK // 4, 1), eps, LIMIT, RULE)
    m = start_t // BLOCK + tl.arange(0, DOWN)
    mask = (m * BLOCK < limit)[:, None] & (columns < COLUMNS)[None, :]
    offsets = columns[None, :] * stride_tk + m[:, None] * stride_tm
    tl.store(scale_t_ptr + offsets, scale, mask=mask)
    words = tl.broadcast_to(encode[:, None, :], [DOWN, BLOCK // 4, TILE_K])
    return tl.reshape(words, [TILE_M // 4, TILE_K])


@launched(do_not_specialize_on_alignment=["slot_ptr"])
def _cast_groups_kernel(  # noqa: PLR0915
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    plan_ptr,  # from ``plan_groups``; None for a batch
    given_ptr,  # fp32 encode factors: one, or one per group or matrix; PER_ROW: rows, then columns
    slot_ptr,  # None or fp32: one per group or matrix
    q_ptr,  # None or [ROWS, COLUMNS] fp8, or E of these
    q_t_ptr,  # None or [COLUMNS, ACROSS] fp8, or E of these
    scale_ptr, scale_t_ptr,  # fp32, of blocks
    sum_ptr,  # None or [row tiles, K] fp32
    M, K, E, stride_ae, ROWS, COLUMNS, ACROSS, ALL_ROWS, given_stride,
    stride_sm, stride_sk, stride_tk, stride_tm, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a block, 0 where factors are given
    SQUARE: tl.constexpr,  # 128 x 128
    PER_ROW: tl.constexpr, FROM_END: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    fp8: tl.constexpr = (q_ptr if q_t_ptr is None else q_t_ptr).dtype.element_ty
    tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K, FROM_END, VALUES.halves)
    group, row, end, limit = _rows_of_tile(tile_m, plan_ptr, M, E, ROWS, TILE_M)
    start_t, limit_t = tile_m * TILE_M, ACROSS
    if plan_ptr is not None:
        limit_t = tl.where(row < end, ACROSS, 0)
    else:
        a_ptr += group * stride_ae
        start_t = row
        if q_ptr is not None:
            q_ptr += group * ROWS * COLUMNS
        if q_t_ptr is not None:
            q_t_ptr += group * COLUMNS * ACROSS
        if BLOCK > 0:
            if q_ptr is not None and not SQUARE:
                scale_ptr += group * ROWS * stride_sm
            if q_t_ptr is not None and not SQUARE:
                scale_t_ptr += group * COLUMNS * stride_tk
    slot_bits = 0
    if slot_ptr is not None:  # read so early, it arrives with the tile
        amax = tl.load(slot_ptr + group, mask=row < end, other=float("inf"))
        slot_bits = amax.to(tl.int32, bitcast=True)
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    columns, halves = load_words(inputs, row, tile_k, end, K, VALUES, TILE_M, TILE_K)
    eps = tl.cast(eps, tl.float32)
    word = tl.arange(0, TILE_M // 4)
    for half in tl.static_range(2 if VALUES.halves else 1):
        x0, x1, x2, x3 = halves[half]
        if half == 1:
            columns += K // 2
            tile_k += K // 2 // TILE_K
        if slot_ptr is not None:
            _common.record_amax(slot_ptr + group, _common.largest_bits(x0, x1, x2, x3), slot_bits)
        if sum_ptr is not None:
            _common.store_column_sum(sum_ptr, x0, x1, x2, x3, tile_m, columns, K)

        encode = 1.0
        if SQUARE:
            bits = _common.largest_bits(x0, x1, x2, x3)
            amax = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
            scale, encode = scale_from_amax(amax, eps, LIMIT, RULE)
            m = group * tl.cdiv(ROWS, 128) + row // 128
            if q_ptr is not None:
                tl.store(scale_ptr + m * stride_sm + tile_k * stride_sk, scale)
            if q_t_ptr is not None:
                k = group * tl.cdiv(COLUMNS, 128) + tile_k
                tl.store(scale_t_ptr + k * stride_tk + row // 128 * stride_tm, scale)
        elif BLOCK == 0 and not PER_ROW:
            encode = tl.load(given_ptr + group * given_stride, mask=group < E, other=1.0)

        if BLOCK == 0 or SQUARE:
            # Widen once for both orientations: 2-byte values would take up to 15 % longer here.
            x0, x1 = nan_for_infinity(widen(x0), fp8), nan_for_infinity(widen(x1), fp8)
            x2, x3 = nan_for_infinity(widen(x2), fp8), nan_for_infinity(widen(x3), fp8)
        if q_ptr is not None:
            for i in tl.static_range(4):
                x, local = (x0, x1, x2, x3)[i], 4 * word + i
                if BLOCK > 0 and not SQUARE:
                    _common.write_blocks(
                        widen(x), tile_m, tile_k, row + local, columns, q_ptr, scale_ptr, None,
                        limit, COLUMNS, stride_sm, stride_sk, eps, LIMIT, RULE, 1, BLOCK,
                    )  # fmt: skip
                else:
                    if PER_ROW:
                        first = group * ROWS if plan_ptr is None else 0
                        row_factors = given_ptr + first + row + local
                        encode = tl.load(row_factors, mask=row + local < limit, other=1.0)[:, None]
                    q = saturate(x * encode, x, fp8)
                    _common.store_tile(q_ptr, q, row + local, columns, limit, COLUMNS)
        if q_t_ptr is not None:
            if BLOCK > 0 and not SQUARE:
                encode = _column_factors(
                    _common.largest_bits(x0, x1, x2, x3), columns, start_t, limit_t, scale_t_ptr,
                    COLUMNS, stride_tk, stride_tm, eps, LIMIT, RULE, BLOCK, TILE_M, TILE_K,
                )  # fmt: skip
                # Cast wide values, as for rows: 2-byte values take up to half more registers.
                x0, x1 = nan_for_infinity(widen(x0), fp8), nan_for_infinity(widen(x1), fp8)
                x2, x3 = nan_for_infinity(widen(x2), fp8), nan_for_infinity(widen(x3), fp8)
            elif PER_ROW:
                column_factors = given_ptr + ALL_ROWS + group * COLUMNS + columns
                mask = (columns < COLUMNS) & (group < E)
                encode = tl.load(column_factors, mask=mask, other=1.0)[None, :]
            packed = _common.pack_scaled(x0, x1, x2, x3, encode, fp8)
            words = start_t // 4 + word
            _common.store_words(q_t_ptr, packed, words, columns, ACROSS, COLUMNS, limit_t)


@launched
def _sum_groups_kernel(
    partial_ptr,  # [row tiles, K] fp32
    sum_ptr,  # [E, K] fp32
    offs_ptr, K,
    COUNT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add up the column sums of each group from those of its tiles."""
    group = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    index = tl.arange(0, COUNT)
    stops = tl.load(offs_ptr + index, mask=index <= group, other=0).to(tl.int32)
    inside = (index > 0) & (index <= group)
    starts = tl.load(offs_ptr + index - 1, mask=inside, other=0).to(tl.int32)
    tiles = (tl.maximum(stops - starts, 0) + 127) // 128
    last = tl.sum(tiles, 0)
    first = last - tl.sum(tl.where(index == group, tiles, 0), 0)
    column_sums = tl.zeros([COLUMNS], tl.float32)
    partial_ptr += first.to(tl.int64) * K
    for _ in range(first, last):
        column_sums += tl.load(partial_ptr + columns, mask=columns < K, other=0.0)
        partial_ptr += K
    tl.store(sum_ptr + group.to(tl.int64) * K + columns, column_sums, mask=columns < K)


def _has_kernel(
    matrix: prologues.Matrix, offs: Tensor | None, block: tuple[int, ...], rule: str
) -> bool:
    """Whether a kernel can cast this; the reference makes the host wait for the groups' offsets."""
    fits = prologues.has_kernel(*matrix) and (offs is None or offs.shape[0] > 0)
    width = block[1]
    is_row_block = block[0] == 1 and 4 <= width <= SPAN and width & (width - 1) == 0
    is_square = offs is None and block == (128, 128)
    has_scales = block == (1, -1) or is_row_block or is_square
    return fits and (block == (-1, -1) or (rule in SCALE_RULES and has_scales))


def _tile_of(prologue: str) -> _common.Tile:
    """Return the tile of a program that makes scales per row, per column or per group."""
    return _TILE_OF_GRADIENT if prologue.endswith("_backward") else prologues.WORDS_OF_MATRIX


def cast_groups(
    matrix: prologues.Matrix, offs: Tensor | None, plan: Tensor | None,
    options: prologues.Options, rowwise: bool, columnwise: bool, dbias: bool,
    given: Tensor | None, slot: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the results of ``cast`` for groups, or for a batch if ``offs`` is None."""
    (prologue, inputs, dtype), (fp8_dtype, block, rule, eps) = matrix, options
    first = inputs[0]
    if not _has_kernel(matrix, offs, block, rule):
        arguments: Any = (*options, ALIGN, rowwise, columnwise, dbias, given)
        return reference.cast(*matrix, *arguments, offs=offs, slot=slot)
    if offs is not None and plan is None:
        plan = plan_groups(offs, prologue_shape(prologue, inputs)[0])
    if offs is not None and columnwise and slot is None and has_tiles(matrix, block, ALIGN):
        return cast_tiles_of_groups(
            matrix, offs, options, rowwise=rowwise, column_sum=dbias, plan=plan
        )
    batch: tuple[int, ...] = ()
    stride, kernel_inputs = 0, inputs
    if offs is None:
        E, M, K = first.shape
        batch, stride = (E,), first.stride(0)
        # A replay can repeat ``view``; only a batch with gaps needs ``[0]``.
        kernel_inputs = [first.view(-1, K) if first.is_contiguous() else first[0]]
        rows = across = round_up(M, ALIGN)
        tiles = E * _common.ceil_div(rows, SPAN)
    else:
        (M, K), E = prologue_shape(prologue, inputs), offs.shape[0]
        rows, across = M, padded_rows(M, E)
        tiles = across // SPAN
    columns = round_up(K, ALIGN)
    matrix, layout = (prologue, kernel_inputs, dtype), (plan, M, K, E, stride)
    per_tensor, per_row = block == (-1, -1), block == (1, -1)
    has_blocks = not per_tensor and not per_row
    amax = scale = scale_t = q = q_t = sums = None
    # ``given`` may be a strided view of the factors of many tensors.
    given_stride = 0 if given is None or given.numel() == 1 else given.stride(0)
    if per_tensor and rule in SCALE_RULES:
        amaxes, scale, scale_t, factors = _factors(matrix, layout, options, given)
        amax = amaxes if given is None else None
        given, given_stride = factors, 1
        if not (rowwise or columnwise or dbias or slot is not None):
            return None, None, amax, None, None, None
    elif per_row:
        scale, scale_t, given = _scales_of_rows(
            matrix, layout, (*batch, rows, columns), options, rowwise=rowwise, columnwise=columnwise
        )
    if rowwise:
        q = first.new_empty((*batch, rows, columns), dtype=fp8_dtype)
        scale = empty_scale(first, (*batch, rows, columns), block) if has_blocks else scale
    if columnwise:
        q_t = first.new_empty((*batch, columns, across), dtype=fp8_dtype)
        scale_t = empty_scale(first, (*batch, columns, across), block) if has_blocks else scale_t
    if dbias:
        sums = first.new_empty((tiles, K), dtype=torch.float32)
    scales = [scale, scale_t] if has_blocks else [None, None]
    strides = [n for x in scales for n in ((1, 1) if x is None else x.stride()[-2:])]
    tile = _TILE if has_blocks else _tile_of(prologue)
    tensors, constants = prologues.arguments_of(*matrix, tile)
    tiles_k = _common.ceil_div(prologues.width_of_tiles(columns, constants), tile.columns)
    _cast_groups_kernel[(tiles * tiles_k,)](
        *tensors, plan, given, slot, q, q_t, *scales, sums, *layout[1:], rows, columns, across,
        rows * (E if batch else 1), given_stride, *strides, eps,
        LIMIT=largest(fp8_dtype), RULE=rule, BLOCK=block[1] if has_blocks else 0,
        SQUARE=block == (128, 128), PER_ROW=per_row,
        # The cache still holds the end of what the amax kernel has just read.
        FROM_END=rule in SCALE_RULES and not has_blocks and not prologue, **constants,
    )  # fmt: skip
    column_sums = None if sums is None else _sums_of_groups(sums, offs)
    return q, scale if rowwise else None, amax, q_t, scale_t if columnwise else None, column_sums


def _sums_of_groups(partial: Tensor, offs: Tensor | None) -> Tensor:
    """Return the column sums of each group, ``[E, K]``, from those of row tiles."""
    assert offs is not None, "a batch has none"
    E, K = offs.shape[0], partial.shape[1]
    column_sums = partial.new_empty((E, K))
    _sum_groups_kernel[(E, _common.ceil_div(K, _COLUMNS_OF_SUMS))](
        partial, column_sums, offs, K, COUNT=_common.next_power_of_2(E), COLUMNS=_COLUMNS_OF_SUMS
    )
    return column_sums


def cast_tiles_of_groups(
    matrix: prologues.Matrix, offs: Tensor, options: prologues.Options, *, rowwise: bool,
    column_sum: bool, plan: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """Cast groups in blocks of one row by ``cast_hopper``, which always writes the transpose."""
    (M, K), E = prologue_shape(*matrix[:2]), offs.shape[0]
    *results, sums = cast_tiles(
        matrix, options, (M, round_up(K, ALIGN), padded_rows(M, E)),
        rowwise=rowwise, column_sum=column_sum, plan=plan, groups=E,
    )  # fmt: skip
    return *results, None if sums is None else _sums_of_groups(sums, offs)


def _factors(
    matrix: prologues.Matrix, layout: tuple[Any, ...], options: prologues.Options,
    given: Tensor | None,
) -> list[Tensor]:  # fmt: skip
    """Return amax, scale (twice) and encode factor of each matrix; ``given`` are known amaxes."""
    (_, (first, *_), _), (plan, M, K, E, stride) = matrix, layout
    fp8_dtype, _, rule, eps = options
    if given is not None:
        count, partial, strides = 1, given, (int(given.numel() > 1), 0)
    else:
        tensors, constants = prologues.arguments_of(*matrix, _AMAX_TILE)
        rows = M if plan is None else padded_rows(M, E)
        (tiles,) = _common.grid_of((rows, prologues.width_of_tiles(K, constants)), _AMAX_TILE)
        count = min(tiles, _common.ceil_div(prologues.AMAX_PROGRAMS, E if plan is None else 1))
        partial = first.new_empty(E * count, dtype=torch.float32)
        strides = (count, 1) if plan is None else (1, E)
        if plan is None:
            find_amax[(count, E)](*tensors, partial, M, K, stride, PARTIAL=True, **constants)
        else:
            _amax_groups_kernel[(count,)](
                *tensors, plan, partial, K, E, COUNT=_common.next_power_of_2(E), **constants
            )
    results = [first.new_empty((E, 1, 1), dtype=torch.float32) for _ in range(4)]
    _factors_kernel[(E,)](
        partial, *results, count, *strides, eps,
        LIMIT=largest(fp8_dtype), RULE=rule, PARTIALS=_common.next_power_of_2(count),
    )  # fmt: skip
    return results


def _scales_of_rows(
    matrix: prologues.Matrix, layout: tuple[Any, ...], shape: tuple[int, ...],
    options: prologues.Options, *, rowwise: bool, columnwise: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return scales of all rows and of each group's columns, and the encode factors of both."""
    (_, (first, *_), _), (plan, M, _, E, _), (*batch, rows, columns) = matrix, layout, shape
    tiles = padded_rows(M, E) // SPAN if plan is not None else E * _common.ceil_div(rows, SPAN)
    all_rows = rows if plan is not None else E * rows
    amaxes = first.new_zeros(all_rows + E * columns, dtype=torch.int32)
    tile = _tile_of(matrix[0])
    tensors, constants = prologues.arguments_of(*matrix, tile)
    _amax_rows_kernel[(tiles * _common.ceil_div(columns, tile.columns),)](
        *tensors, plan, amaxes, *layout[1:], rows, columns, all_rows,
        ROWWISE=rowwise, COLUMNWISE=columnwise, **constants,
    )  # fmt: skip
    scale = first.new_empty((*batch, rows, 1), dtype=torch.float32)
    scale_t = first.new_empty((E, columns, 1), dtype=torch.float32)
    make_scales(amaxes, scale, scale_t, options[0], *options[2:])
    return scale, scale_t, amaxes.view(torch.float32)
