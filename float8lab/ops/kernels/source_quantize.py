"""Quantize on the GPU what is computed tile by tile and never written, by scales from its values.

M rows, K columns of the source; ROWS, COLUMNS the same after padding to the alignment. The kernels
are those of ``quantize.py`` with ``load_source`` in the place of a load, and write one orientation
or both, as ``source_cast.py`` does; its cast is the one for a single scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops import reference
from float8lab.ops.kernels._common import (
    Tile,
    abs_bits,
    block_amax,
    saturate,
    scale_from_amax,
    scale_tile,
    store_column_sum,
    store_tile,
)
from float8lab.ops.kernels.pair import transpose
from float8lab.ops.kernels.source import (
    amax_of,
    arguments_of,
    has_kernel,
    load_source,
    on_device_of_source,
    reads_three_tiles,
    tile_for,
    tile_of_program,
)
from float8lab.ops.kernels.source_cast import BOTH, Outputs, cast_source, in_one_pass
from float8lab.ops.quantize import empty_scale

__all__ = ["quantize_of", "quantize_pair_of"]

_LARGE_BLOCKS = Tile(rows=128, columns=128, warps=16)
_TALL_OF_THREE = Tile(rows=128, columns=32, warps=8)


# Per row of the source, and per row of its transpose.


@triton.jit
def _amax_rows_columns_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    amax_ptr,  # [ROWS + COLUMNS] int32 bit patterns, zero at first
    M, K, ROWS, COLUMNS,
    WRITE: tl.constexpr, TRANSPOSE: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        tile_m, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
    )  # fmt: skip
    bits = abs_bits(y.to(tl.float32))
    if WRITE:
        tl.atomic_max(amax_ptr + rows, tl.max(bits, 1), mask=rows < M, sem="relaxed")
    if TRANSPOSE:
        tl.atomic_max(amax_ptr + ROWS + columns, tl.max(bits, 0), mask=columns < K, sem="relaxed")


@triton.jit
def _quantize_rows_columns_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    amax_ptr,  # [ROWS + COLUMNS] int32 bit patterns
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [ROWS] fp32
    scale_t_ptr,  # [COLUMNS] fp32
    sum_ptr,  # [row tiles, K] fp32
    M, K, ROWS, COLUMNS, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr,
    WRITE: tl.constexpr, TRANSPOSE: tl.constexpr, COLUMN_SUM: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        tile_m, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
    )  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    if COLUMN_SUM:
        store_column_sum(sum_ptr, y.to(tl.float32), tile_m, columns, K)
    if WRITE:
        bits = tl.load(amax_ptr + rows, mask=rows < ROWS, other=0)
        scale, encode = scale_from_amax(bits.to(tl.float32, bitcast=True), eps, LIMIT, RULE)
        if tile_k == 0:
            tl.store(scale_ptr + rows, scale, mask=rows < ROWS)
        q = saturate(y.to(tl.float32) * encode[:, None], q_ptr.dtype.element_ty)
        store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    if TRANSPOSE:
        bits = tl.load(amax_ptr + ROWS + columns, mask=columns < COLUMNS, other=0)
        scale, encode = scale_from_amax(bits.to(tl.float32, bitcast=True), eps, LIMIT, RULE)
        if tile_m == 0:
            tl.store(scale_t_ptr + columns, scale, mask=columns < COLUMNS)
        q = saturate(tl.trans(y).to(tl.float32) * encode[:, None], q_t_ptr.dtype.element_ty)
        store_tile(q_t_ptr, q, columns, rows, COLUMNS, ROWS)


# Blocks that divide a tile.


@triton.jit
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
    y, rows, columns = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        tile_m, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
    )  # fmt: skip
    eps = tl.cast(eps, tl.float32)
    if COLUMN_SUM:
        store_column_sum(sum_ptr, y.to(tl.float32), tile_m, columns, K)
    if WRITE:
        x = y.to(tl.float32)
        scale, encode = scale_from_amax(block_amax(abs_bits(x), BM, BK), eps, LIMIT, RULE)
        q = saturate(scale_tile(x, encode, BM, BK), q_ptr.dtype.element_ty)
        store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
        m = tile_m * (TILE_M // BM) + tl.arange(0, TILE_M // BM)
        k = tile_k * (TILE_K // BK) + tl.arange(0, TILE_K // BK)
        offsets = m[:, None] * stride_sm + k[None, :] * stride_sk
        mask = (m * BM < ROWS)[:, None] & (k * BK < COLUMNS)[None, :]
        tl.store(scale_ptr + offsets, scale, mask=mask)
    if TRANSPOSE:
        # The same with rows and columns exchanged.
        x = tl.trans(y).to(tl.float32)
        scale, encode = scale_from_amax(block_amax(abs_bits(x), BM, BK), eps, LIMIT, RULE)
        q = saturate(scale_tile(x, encode, BM, BK), q_t_ptr.dtype.element_ty)
        store_tile(q_t_ptr, q, columns, rows, COLUMNS, ROWS)
        k = tile_k * (TILE_K // BM) + tl.arange(0, TILE_K // BM)
        m = tile_m * (TILE_M // BK) + tl.arange(0, TILE_M // BK)
        offsets = k[:, None] * stride_tk + m[None, :] * stride_tm
        mask = (k * BM < COLUMNS)[:, None] & (m * BK < ROWS)[None, :]
        tl.store(scale_t_ptr + offsets, scale, mask=mask)


# The two ops: which kernels for which block. Blocks of no recipe take the reference.


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    first = inputs[0]
    tile = BOTH if transpose else tile_for(kind)
    if block[0] > tile.rows or (transpose and max(block) > tile.rows):
        tile = _LARGE_BLOCKS
        if reads_three_tiles(kind) and block[0] <= tile_for(kind).rows:
            # Both at once would spill registers: one launch each, that reads the inputs again.
            if write and transpose:
                both = (kind, inputs, dtype, known_amax, fp8_dtype, block, rule, eps, align)
                q, scale, _, _, total = _quantize(
                    *both, write=True, transpose=False, column_sum=column_sum
                )
                _, _, q_t, scale_t, _ = _quantize(
                    *both, write=False, transpose=True, column_sum=False
                )
                return q, scale, q_t, scale_t, total
            tile = _TALL_OF_THREE
    out = Outputs(
        kind, inputs, fp8_dtype, align,
        write=write, transpose=transpose, column_sum=column_sum, tile=tile,
    )  # fmt: skip
    scale = empty_scale(first, (out.rows, out.columns), block)
    scale_t = empty_scale(first, (out.columns, out.rows), block)
    if block == (-1, -1):
        amax = amax_of(kind, inputs, dtype) if known_amax is None else known_amax
        cast_source(
            kind, inputs, dtype, amax, None, out, tile,
            scales=(scale, scale_t), rule=rule, eps=eps,
        )  # fmt: skip
        return out.q, scale, out.q_t, scale_t, out.total()
    tensors, constants = arguments_of(kind, inputs, dtype, tile)
    how = {"LIMIT": largest(fp8_dtype), "RULE": rule, **out.flags, **constants}
    if block == (1, -1):
        amaxes = first.new_zeros(out.rows + out.columns, dtype=torch.int32)
        _amax_rows_columns_kernel[out.grid](
            *tensors, amaxes, *out.sizes, WRITE=write, TRANSPOSE=transpose, **constants
        )
        _quantize_rows_columns_kernel[out.grid](
            *tensors, amaxes, out.q, out.q_t, scale, scale_t, out.sums, *out.sizes, eps, **how
        )
    else:
        _quantize_blocks_kernel[out.grid](
            *tensors, out.q, out.q_t, scale, scale_t, out.sums, *out.sizes, eps,
            *scale.stride(), *scale_t.stride(), BM=block[0], BK=block[1], **how,
        )  # fmt: skip
    return out.q, scale, out.q_t, scale_t, out.total()


def _has_kernel_for(block: tuple[int, ...]) -> bool:
    by_tile = all(0 < size <= 128 and size & (size - 1) == 0 for size in block)
    return by_tile or block in ((-1, -1), (1, -1))


@on_device_of_source
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
) -> tuple[Tensor, Tensor]:
    if not has_kernel(kind, inputs, dtype) or not _has_kernel_for(tuple(block)):
        return reference.quantize_of(
            kind, inputs, dtype, transposed, known_amax, fp8_dtype, block, rule, eps, align
        )
    q, scale, q_t, scale_t, _ = _quantize(
        kind, inputs, dtype, known_amax, fp8_dtype, tuple(block), rule, eps, align,
        write=not transposed, transpose=transposed, column_sum=False,
    )  # fmt: skip
    return (q_t, scale_t) if transposed else (q, scale)


@on_device_of_source
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
    if not has_kernel(kind, inputs, dtype) or not _has_kernel_for(tuple(block)):
        return reference.quantize_pair_of(
            kind, inputs, dtype, fp8_dtype, block, rule, eps, align, column_sum
        )
    one_pass = in_one_pass(dtype, tuple(block))
    q, scale, q_t, scale_t, total = _quantize(
        kind, inputs, dtype, None, fp8_dtype, tuple(block), rule, eps, align,
        write=True, transpose=one_pass, column_sum=column_sum,
    )  # fmt: skip
    if not one_pass:
        q_t, scale_t = transpose(q, 1), scale.t().clone(memory_format=torch.contiguous_format)
    return q, scale, q_t, scale_t, total
