"""Quantize on the GPU what is computed tile by tile and never written, by scales from its values.

M rows, K columns of the source; ROWS, COLUMNS the same after padding to the alignment. The kernels
are those of ``quantize.py`` with ``load_source`` in the place of a load, and write one orientation
or both, as ``source_cast.py`` does; its cast is the one for a single scale. On Hopper, blocks of
2-byte values in both orientations are ``pair_blocks.py``'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops import reference
from float8lab.ops.cast import empty_scale
from float8lab.ops.kernels._common import (
    Tile,
    abs_bits,
    block_amax,
    saturate,
    scale_from_amax,
    scale_tile,
    store_column_sum,
    store_tile,
    total_of,
)
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._rows import store_by_block, sum_of_rows, takes_words
from float8lab.ops.kernels.pair import quantize_pair, scales_of_rows, transpose_scaled
from float8lab.ops.kernels.pair_blocks import has_tiles, quantize_blocks_of
from float8lab.ops.kernels.quantize import quantize
from float8lab.ops.kernels.source import (
    amax_of,
    arguments_of,
    has_kernel,
    load_source,
    load_source_rows,
    tile_for,
    tile_of_program,
    value_of,
)
from float8lab.ops.kernels.source_cast import Outputs, cast_source

__all__ = ["quantize_of", "quantize_pair_of"]

_LARGE_BLOCKS = Tile(rows=128, columns=128, warps=16)
_BLOCKS_BOTH = Tile(rows=128, columns=128, warps=8)
_BLOCKS_TRANSPOSED = Tile(rows=128, columns=64, warps=8)
"""For one orientation, and for both where blocks fit into it."""
_REGISTERS = 128
"""Of a thread, so that two programs of 256 threads share a multiprocessor."""
_REGISTERS_OF_SUMS = 168
"""With column sums, which would spill else."""


# Per row of the source, and per row of its transpose.


@launched
def _amax_rows_columns_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    amax_ptr,  # [ROWS + COLUMNS] int32 bit patterns, zero at first
    M, K, ROWS, COLUMNS,
    WRITE: tl.constexpr, TRANSPOSE: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    y = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        rows, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
    )  # fmt: skip
    bits = abs_bits(y.to(tl.float32))
    if WRITE:
        tl.atomic_max(amax_ptr + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
    if TRANSPOSE:
        tl.atomic_max(amax_ptr + ROWS + columns, tl.max(bits, 0), mask=columns < K, sem="relaxed")


# Blocks that divide a tile.


@launched
def _quantize_blocks_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [ceil ROWS / BM, ceil COLUMNS / BK] fp32
    scale_t_ptr,  # [ceil COLUMNS / BM, ceil ROWS / BK] fp32
    sum_ptr,  # [row tiles, K] fp32
    M, K, ROWS, COLUMNS, eps, stride_sm, stride_sk, stride_tk, stride_tm,
    LIMIT: tl.constexpr, RULE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    WRITE: tl.constexpr, TRANSPOSE: tl.constexpr, COLUMN_SUM: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    if TRANSPOSE:
        tl.static_assert(BM == 1)
        words, columns, y0, y1, y2, y3 = load_source_rows(
            a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
            tile_m, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
        )  # fmt: skip
        if COLUMN_SUM:
            store_column_sum(sum_ptr, sum_of_rows(y0, y1, y2, y3), tile_m, columns, K)
        store_by_block(
            y0, y1, y2, y3, words, columns, tile_m, tile_k, q_ptr, q_t_ptr, scale_ptr, scale_t_ptr,
            ROWS, COLUMNS, stride_sm, stride_sk, stride_tk, stride_tm, eps,
            LIMIT, RULE, BK, WRITE, TILE_M, TILE_K,
        )  # fmt: skip
    else:
        rows = tile_m * TILE_M + tl.arange(0, TILE_M)
        columns = tile_k * TILE_K + tl.arange(0, TILE_K)
        y = load_source(
            a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
            rows, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
        )  # fmt: skip
        y = y.to(tl.float32)
        if COLUMN_SUM:
            store_column_sum(sum_ptr, y, tile_m, columns, K)
        amaxes = block_amax(abs_bits(y), BM, BK)
        scale, encode = scale_from_amax(amaxes, tl.cast(eps, tl.float32), LIMIT, RULE)
        q = saturate(scale_tile(y, encode, BM, BK), q_ptr.dtype.element_ty)
        store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
        m = tile_m * (TILE_M // BM) + tl.arange(0, TILE_M // BM)
        k = tile_k * (TILE_K // BK) + tl.arange(0, TILE_K // BK)
        offsets = m[:, None] * stride_sm + k[None, :] * stride_sk
        mask = (m * BM < ROWS)[:, None] & (k * BK < COLUMNS)[None, :]
        tl.store(scale_ptr + offsets, scale, mask=mask)


# The two ops: which kernels for which block. For blocks of no recipe the values are written.


def _quantize(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    known_amax: Tensor | None,
    fp8_dtype: torch.dtype,
    block: tuple[int, ...],
    rule: str,
    eps: float,
    align: int,
    *,
    write: bool,
    transpose: bool,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Both orientations, sums of columns, and the amax if it was found."""
    first, found = inputs[0], None
    if transpose and has_tiles(first.device, dtype, block, align):
        outputs = quantize_blocks_of(
            kind, inputs, dtype, fp8_dtype, block, rule, eps, align,
            write=write, column_sum=column_sum,
        )  # fmt: skip
        return *outputs, found
    tile = tile_for(kind, both=transpose)
    registers = None
    if transpose and block[0] == 1 and block[1] > 0:
        tile = _BLOCKS_TRANSPOSED
        if write and block[1] > tile.columns:
            tile, registers = _BLOCKS_BOTH, _REGISTERS_OF_SUMS if column_sum else _REGISTERS
    elif block[0] > tile.rows:
        tile = _LARGE_BLOCKS
    out = Outputs(
        kind, inputs, fp8_dtype, align,
        write=write, transpose=transpose, column_sum=column_sum, tile=tile,
    )  # fmt: skip
    scale = empty_scale(first, (out.rows, out.columns), block)
    scale_t = empty_scale(first, (out.columns, out.rows), block)
    if block == (-1, -1):
        if known_amax is None:
            found = known_amax = amax_of(kind, inputs, dtype)
        cast_source(
            kind, inputs, dtype, known_amax, None, out, tile,
            scales=(scale, scale_t), rule=rule, eps=eps,
        )  # fmt: skip
        return out.q, scale, out.q_t, scale_t, total_of(out.sums), found
    tensors, constants = arguments_of(kind, inputs, dtype, tile)
    how = {"LIMIT": largest(fp8_dtype), "RULE": rule, **out.flags, **constants}
    if block == (1, -1):
        amaxes = first.new_zeros(out.rows + out.columns, dtype=torch.int32)
        _amax_rows_columns_kernel[out.grid](
            *tensors, amaxes, *out.sizes, WRITE=write, TRANSPOSE=transpose, **constants
        )
        scale, scale_t, encode = scales_of_rows(amaxes, out.rows, fp8_dtype, rule, eps)
        cast_source(kind, inputs, dtype, encode, None, out, tile, per_row=True)
    else:
        _quantize_blocks_kernel[out.grid](
            *tensors, out.q, out.q_t, scale, scale_t, out.sums, *out.sizes, eps,
            *scale.stride(), *scale_t.stride(), BM=block[0], BK=block[1],
            maxnreg=registers, **how,
        )  # fmt: skip
    return out.q, scale, out.q_t, scale_t, total_of(out.sums), found


def _has_kernel_for(block: tuple[int, ...]) -> bool:
    by_tile = all(0 < size <= 128 and size & (size - 1) == 0 for size in block)
    return by_tile or block in ((-1, -1), (1, -1))


def quantize_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    known_amax: Tensor | None,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    how = (fp8_dtype, tuple(block), rule, eps, align)
    if not has_kernel(kind, inputs, dtype):
        value = reference.value_of(kind, inputs, dtype)
        q, scale, found = quantize(value.t() if transposed else value, *how, known_amax)
        return q, scale, found if reference.has_amax(kind, block, known_amax) else None
    words = takes_words(inputs[0], block, align)
    turned_apart = transposed and not words and block[0] != block[1]
    if turned_apart or not _has_kernel_for(tuple(block)):
        value = value_of(kind, inputs, dtype)
        q, scale, _ = quantize(value.t() if transposed else value, *how)
        return q, scale, None
    by_words = transposed and words
    q, scale, q_t, scale_t, _, amax = _quantize(
        kind, inputs, dtype, known_amax, *how,
        write=not by_words, transpose=by_words, column_sum=False,
    )  # fmt: skip
    if by_words:
        return q_t, scale_t, amax
    return (*transpose_scaled(q, scale), amax) if transposed else (q, scale, amax)


def quantize_pair_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if not has_kernel(kind, inputs, dtype):
        value = reference.value_of(kind, inputs, dtype)
        return quantize_pair(value, fp8_dtype, block, rule, eps, align, column_sum)
    how = (fp8_dtype, tuple(block), rule, eps, align)
    words = takes_words(inputs[0], block, align)
    if (not words and block[0] != block[1]) or not _has_kernel_for(tuple(block)):
        return quantize_pair(value_of(kind, inputs, dtype), *how, column_sum)
    q, scale, q_t, scale_t, total, _ = _quantize(
        kind, inputs, dtype, None, *how, write=True, transpose=words, column_sum=column_sum
    )
    if not words:
        q_t, scale_t = transpose_scaled(q, scale)
    return q, scale, q_t, scale_t, total
