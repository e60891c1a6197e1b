"""Quantize, cast and transpose matrices on the GPU: both orientations from one read.

M rows, K columns of the input; ROWS, COLUMNS the same after padding to the alignment. A program
reads its tile as ``_rows.py`` says. So ROWS must be divisible by 4; where it is not, each
orientation has its own kernel. On Hopper, blocks of 2-byte values are ``pair_blocks.py``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops import reference
from float8lab.ops.cast import empty_scale
from float8lab.ops.kernels._common import (
    Tile,
    abs_bits,
    ceil_div,
    empty_column_sums,
    grid_of,
    load_tile,
    record_amax,
    scale_from_amax,
    store_column_sum,
    store_transposed,
    total_of,
)
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels._rows import (
    has_words,
    largest_bits,
    store_by_block,
    store_by_row,
    store_by_scale,
    sum_of_rows,
    takes_words,
)
from float8lab.ops.kernels.pair_blocks import quantize_blocks, takes_tiles
from float8lab.ops.kernels.quantize import (
    PARTIALS,
    cast_one,
    empty_output,
    partial_amax,
    quantize,
    scale_of_tensor,
)
from float8lab.ops.reference import round_up

__all__ = [
    "cast_pair",
    "quantize_pair",
    "scales_of_rows",
    "sum_of",
    "transpose",
    "transpose_scaled",
]

_TILE = Tile(rows=128, columns=64, warps=4)
"""A column of it is 128 bytes of the transpose, a cache line."""
_AMAX = Tile(rows=128, columns=64, warps=4)
_AMAX_OF_FLOAT32 = Tile(rows=64, columns=64, warps=4)
_BYTES = Tile(rows=64, columns=64, warps=4)
_REGISTERS = 168
"""Of a thread whose tile is 128 x 128: three programs of 128 threads share a multiprocessor."""
_SCALES = 256
"""Scales that one program makes."""


@triton.jit
def _load_rows(x_ptr, tile_m, columns, M, K, stride_m, stride_k, TILE_M: tl.constexpr):
    """Which words of a column a tile has; its rows 0, 4, 8 ..., its rows 1, 5, 9 ..., and so on."""
    words = tile_m * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    rows = 4 * words
    x0 = load_tile(x_ptr, rows, columns, M, K, stride_m, stride_k)
    x1 = load_tile(x_ptr, rows + 1, columns, M, K, stride_m, stride_k)
    x2 = load_tile(x_ptr, rows + 2, columns, M, K, stride_m, stride_k)
    x3 = load_tile(x_ptr, rows + 3, columns, M, K, stride_m, stride_k)
    return words, x0, x1, x2, x3


# One scale per tensor, or one per row and one per column.


@launched(do_not_specialize_on_alignment=["slot_ptr"])  # or each place in a pack has a kernel
def _cast_pair_kernel(
    x_ptr,  # [M, K] any float
    scale_ptr,  # [1] fp32 to be made
    scale_t_ptr,  # [1] fp32 to be made
    given_ptr,  # fp32: the encode factor [1], or those of rows and columns [ROWS + COLUMNS] if
    # PER_ROW, or the partial amaxes [programs] from which RULE makes scale and encode factor
    slot_ptr,  # [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    sum_ptr,  # [row tiles, K] fp32
    M,
    K,
    ROWS,
    COLUMNS,
    stride_xm,
    stride_xk,
    programs,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,  # "" where encode factors are given
    PER_ROW: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    PARTIALS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile = tl.program_id(0)
    if RULE != "":
        # From the end: of what the amax has read, the last part is in the cache.
        tile = tl.num_programs(0) - 1 - tile
    tile_m = (tile // tiles_k).to(tl.int64)
    columns = (tile % tiles_k).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    words, x0, x1, x2, x3 = _load_rows(x_ptr, tile_m, columns, M, K, stride_xm, stride_xk, TILE_M)
    if HAS_SLOT:
        record_amax(slot_ptr, largest_bits(x0, x1, x2, x3))
    if COLUMN_SUM:
        store_column_sum(sum_ptr, sum_of_rows(x0, x1, x2, x3), tile_m, columns, K)
    if PER_ROW:
        store_by_row(
            x0, x1, x2, x3, words, columns, given_ptr, q_ptr, q_t_ptr, ROWS, COLUMNS, True
        )  # fmt: skip
    else:
        if RULE == "":
            encode = tl.load(given_ptr)
        else:
            scale, encode, _ = scale_of_tensor(given_ptr, programs, eps, LIMIT, RULE, PARTIALS)
            if tl.program_id(0) == 0:
                tl.store(scale_ptr, scale)
                tl.store(scale_t_ptr, scale)
        store_by_scale(
            x0, x1, x2, x3, encode, words, columns, q_ptr, q_t_ptr, ROWS, COLUMNS, True
        )  # fmt: skip


def _cast_pair(
    x: Tensor,
    given: Tensor,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
    *,
    slot: Tensor | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    rule: str = "",
    eps: float = 0.0,
    per_row: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    q = empty_output(x, fp8_dtype, align)
    q_t = q.new_empty((q.shape[1], q.shape[0]))
    sums = empty_column_sums(x, x.shape, _TILE, column_sum)
    _cast_pair_kernel[grid_of(q.shape, _TILE)](
        x,
        *(scales or (given, given)),
        given,
        given if slot is None else slot,
        q,
        q_t,
        sums,
        *x.shape,
        *q.shape,
        *x.stride(),
        given.numel(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        PER_ROW=per_row,
        HAS_SLOT=slot is not None,
        COLUMN_SUM=column_sum,
        PARTIALS=PARTIALS,
        TILE_M=_TILE.rows,
        TILE_K=_TILE.columns,
        num_warps=_TILE.warps,
    )
    return q, q_t, total_of(sums)


@launched
def _amax_rows_columns_kernel(
    x_ptr,  # [M, K] any float
    amax_ptr,  # [ROWS + COLUMNS] int32 bit patterns, zero at first
    M,
    K,
    ROWS,
    stride_xm,
    stride_xk,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(K, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)
    bits = abs_bits(x)
    tl.atomic_max(amax_ptr + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
    tl.atomic_max(amax_ptr + ROWS + columns, tl.max(bits, 0), mask=columns < K, sem="relaxed")


@launched
def _scales_kernel(
    amax_ptr,  # [ROWS + COLUMNS] int32 bit patterns, which make room for encode factors
    scale_ptr,  # [ROWS] fp32
    scale_t_ptr,  # [COLUMNS] fp32
    ROWS,
    COLUMNS,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    SIZE: tl.constexpr,
):
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    bits = tl.load(amax_ptr + index, mask=index < ROWS + COLUMNS, other=0)
    eps = tl.cast(eps, tl.float32)
    scale, encode = scale_from_amax(bits.to(tl.float32, bitcast=True), eps, LIMIT, RULE)
    tl.store(amax_ptr + index, encode.to(tl.int32, bitcast=True), mask=index < ROWS + COLUMNS)
    tl.store(scale_ptr + index, scale, mask=index < ROWS)
    column = index - ROWS
    tl.store(scale_t_ptr + column, scale, mask=(column >= 0) & (column < COLUMNS))


def scales_of_rows(
    amaxes: Tensor, rows: int, fp8_dtype: torch.dtype, rule: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of rows and of columns, from the bit patterns of their amaxes in this order.

    And the encode factors of both, in the memory of the amaxes.
    """
    columns = amaxes.numel() - rows
    scale = amaxes.new_empty((rows, 1), dtype=torch.float32)
    scale_t = amaxes.new_empty((columns, 1), dtype=torch.float32)
    _scales_kernel[(ceil_div(rows + columns, _SCALES),)](
        amaxes, scale, scale_t, rows, columns, eps,
        LIMIT=largest(fp8_dtype), RULE=rule, SIZE=_SCALES,
    )  # fmt: skip
    return scale, scale_t, amaxes.view(torch.float32)


def _quantize_rows_pair(
    x: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float, align: int, column_sum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows, columns = (round_up(size, align) for size in x.shape)
    amaxes = x.new_zeros(rows + columns, dtype=torch.int32)
    tile = _AMAX if x.element_size() == 2 else _AMAX_OF_FLOAT32
    _amax_rows_columns_kernel[grid_of(x.shape, tile)](
        x,
        amaxes,
        *x.shape,
        rows,
        *x.stride(),
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    scale, scale_t, encode = scales_of_rows(amaxes, rows, fp8_dtype, rule, eps)
    q, q_t, total = _cast_pair(x, encode, fp8_dtype, align, column_sum, per_row=True)
    return q, scale, q_t, scale_t, total


def _quantize_tensor_pair(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
    known_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    partial = partial_amax(x) if known_amax is None else known_amax
    scales = x.new_empty((1, 1), dtype=torch.float32), x.new_empty((1, 1), dtype=torch.float32)
    how = (fp8_dtype, align, column_sum)
    q, q_t, total = _cast_pair(x, partial, *how, scales=scales, rule=rule, eps=eps)
    return q, scales[0], q_t, scales[1], total


# Blocks of one row.


@launched
def _quantize_blocks_pair_kernel(
    x_ptr,  # [M, K] any float
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [ROWS, ceil COLUMNS / BLOCK] fp32
    scale_t_ptr,  # [COLUMNS, ceil ROWS / BLOCK] fp32
    sum_ptr,  # [row tiles, K] fp32
    M,
    K,
    ROWS,
    COLUMNS,
    stride_xm,
    stride_xk,
    stride_sm,
    stride_sk,
    stride_tk,
    stride_tm,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    words, x0, x1, x2, x3 = _load_rows(x_ptr, tile_m, columns, M, K, stride_xm, stride_xk, TILE_M)
    if COLUMN_SUM:
        store_column_sum(sum_ptr, sum_of_rows(x0, x1, x2, x3), tile_m, columns, K)
    store_by_block(
        x0, x1, x2, x3, words, columns, tile_m, tile_k, q_ptr, q_t_ptr, scale_ptr, scale_t_ptr,
        ROWS, COLUMNS, stride_sm, stride_sk, stride_tk, stride_tm, eps,
        LIMIT, RULE, BLOCK, True, TILE_M, TILE_K,
    )  # fmt: skip


def _quantize_blocks_pair(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tile = Tile(rows=128, columns=max(_TILE.columns, block[1]), warps=4)
    if x.element_size() == 4 or column_sum:
        tile = replace(tile, warps=8)  # or it spills registers
    q = empty_output(x, fp8_dtype, align)
    q_t = q.new_empty((q.shape[1], q.shape[0]))
    scale = empty_scale(x, q.shape, block)
    scale_t = empty_scale(x, q_t.shape, block)
    sums = empty_column_sums(x, x.shape, tile, column_sum)
    _quantize_blocks_pair_kernel[grid_of(q.shape, tile)](
        x,
        q,
        q_t,
        scale,
        scale_t,
        sums,
        *x.shape,
        *q.shape,
        *x.stride(),
        *scale.stride(),
        *scale_t.stride(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        BLOCK=block[1],
        COLUMN_SUM=column_sum,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
        maxnreg=_REGISTERS if tile.columns == 128 else None,
    )
    return q, scale, q_t, scale_t, total_of(sums)


# The ops. A matrix of one column takes the reference, for ptxas crashes (CUDA 12.8's, in triton
# 3.6).


def quantize_pair(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
    known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = tuple(block)
    how = (fp8_dtype, block, rule, eps, align)
    if x.numel() == 0 or x.shape[1] == 1:
        q, scale, _, q_t, scale_t, _ = reference.cast(
            "", [x], x.dtype, *how, True, True, False, known_amax
        )
        assert q is not None, "asked for"
        assert q_t is not None, "asked for"
        assert scale is not None, "the rule finds them"
        assert scale_t is not None, "the rule finds them"
        return q, scale, q_t, scale_t, sum_of(x, column_sum)
    if takes_tiles(x, shape, align):
        return quantize_blocks(x, fp8_dtype, shape, rule, eps, align, column_sum)
    if takes_words(x, shape, align):
        if shape == (-1, -1):
            return _quantize_tensor_pair(x, fp8_dtype, rule, eps, align, column_sum, known_amax)
        if shape == (1, -1):
            return _quantize_rows_pair(x, fp8_dtype, rule, eps, align, column_sum)
        return _quantize_blocks_pair(x, *how, column_sum)
    total = sum_of(x, column_sum)
    q, scale, _ = quantize(x, *how, known_amax)
    if shape[0] == shape[1]:
        return q, scale, *transpose_scaled(q, scale), total
    q_t, scale_t, _ = quantize(x.t(), *how)
    return q, scale, q_t, scale_t, total


def cast_pair(
    x: Tensor,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0 or x.shape[1] == 1:
        rest = ("encode", 0.0, align, True, True, False, encode, amax_slot)
        q, _, _, q_t, *_ = reference.cast("", [x], x.dtype, fp8_dtype, (-1, -1), *rest)
        assert q is not None, "asked for"
        assert q_t is not None, "asked for"
        return q, q_t, sum_of(x, column_sum)
    if not has_words(x, align):
        q = cast_one(x, encode, amax_slot, fp8_dtype, (-1, -1), align)
        return q, transpose(q, 1), sum_of(x, column_sum)
    return _cast_pair(x, encode, fp8_dtype, align, column_sum, slot=amax_slot)


# One-byte transpose.


@launched
def _transpose_kernel(
    q_ptr,  # [M, K] one byte
    q_t_ptr,  # [COLUMNS, ROWS] one byte
    M,
    K,
    ROWS,
    COLUMNS,
    stride_qm,
    stride_qk,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    offsets = rows[:, None] * stride_qm + columns[None, :] * stride_qk
    q = tl.load(q_ptr + offsets, mask=mask, other=0)
    store_transposed(q_t_ptr, q, rows, columns, ROWS, COLUMNS)


@replayed
def transpose(q: Tensor, align: int = 1, event: Tensor | None = None) -> Tensor:
    tile = _BYTES
    rows, columns = round_up(q.shape[0], align), round_up(q.shape[1], align)
    q_t = q.new_empty((columns, rows))
    if q.numel() == 0:
        return q_t
    _transpose_kernel[grid_of((rows, columns), tile)](
        q.view(torch.uint8),
        q_t.view(torch.uint8),
        *q.shape,
        rows,
        columns,
        *q.stride(),
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q_t


def sum_of(x: Tensor, wanted: bool) -> Tensor:
    """Sums over the rows, float32; empty if not wanted."""
    return x.float().sum(0) if wanted else x.new_empty(0, dtype=torch.float32)


def transpose_scaled(q: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 data in square blocks, or under one scale, transposed; and the scales."""
    return transpose(q, 1), scale.t().clone(memory_format=torch.contiguous_format)
