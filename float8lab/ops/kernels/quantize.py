"""Quantize, cast, transpose and dequantize matrices on the GPU.

M rows, K columns of the input; ROWS, COLUMNS the same after padding to the alignment. Every kernel
gives the bytes of ``ops/reference``. Every program handles one tile: it reads a tile of the
input once and writes it in one or in both orientations.

Sizes and strides are run-time arguments: a new token count recompiles nothing, except that triton
specialises once on whether an integer is 1 or divisible by 16, which is what allows wide accesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops import reference
from float8lab.ops.kernels._common import (
    abs_bits,
    block_amax,
    block_index,
    encode_from_scale,
    load_tile,
    on_device_of_first,
    record_amax,
    saturate,
    scale_from_amax,
    scale_tile,
    store_column_sum,
    store_tile,
    store_transposed,
)
from float8lab.ops.quantize import empty_scale
from float8lab.ops.reference import round_up

__all__ = ["amax", "cast", "cast_pair", "dequantize", "quantize", "quantize_pair", "transpose"]


@dataclass(frozen=True)
class Tile:
    """Shape of the tile of one program, and its warps."""

    rows: int
    columns: int
    warps: int


# At most 64 elements a thread, and few enough registers that several programs share a
# multiprocessor: one loads while another stores. A tile of blocks holds whole blocks.
_ONE = Tile(rows=64, columns=128, warps=4)
_BOTH = Tile(rows=64, columns=64, warps=4)
_LARGE_BLOCKS = Tile(rows=128, columns=128, warps=16)
_FLAT = Tile(rows=1, columns=8192, warps=8)
_COLUMN_MAJOR = Tile(rows=64, columns=64, warps=4)

_AMAX_PROGRAMS = 512
"""Partial amaxes of a tensor: about four programs per multiprocessor of an H200, all resident."""

_ROW_CHUNK = 8192
"""A row up to this long stays in registers between its amax and its cast."""


def _grid(shape: Sequence[int], tile: Tile) -> tuple[int]:
    return (triton.cdiv(shape[0], tile.rows) * triton.cdiv(shape[1], tile.columns),)


def _output(x: Tensor, fp8_dtype: torch.dtype, align: int) -> Tensor:
    shape = (round_up(x.shape[0], align), round_up(x.shape[1], align))
    return x.new_empty(shape, dtype=fp8_dtype)


def _column_sums(x: Tensor, tile: Tile, wanted: bool) -> Tensor:
    """Room for one row of partial column sums per row of tiles."""
    rows = triton.cdiv(x.shape[0], tile.rows) if wanted else 0
    return x.new_empty((rows, x.shape[1] if wanted else 0), dtype=torch.float32)


def _total(sums: Tensor) -> Tensor:
    return sums.sum(0) if sums.numel() else sums.view(-1)


# Per tensor: amax.


@triton.jit
def _amax_kernel(
    x_ptr,  # [M, K] any float
    partial_ptr,  # [programs] fp32: the amax of every tile that a program visited
    M,
    K,
    stride_xm,
    stride_xk,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    program = tl.program_id(0)
    tiles_k = tl.cdiv(K, TILE_K)
    tiles = tl.cdiv(M, TILE_M) * tiles_k
    bits = tl.zeros([TILE_M, TILE_K], tl.int32)
    for tile in range(program, tiles, tl.num_programs(0)):
        rows = (tile // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
        columns = (tile % tiles_k).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
        x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)
        bits = tl.maximum(bits, abs_bits(x))
    largest_bits = tl.max(tl.max(bits, 1), 0)
    tl.store(partial_ptr + program, largest_bits.to(tl.float32, bitcast=True))


def _partial_amax(x: Tensor) -> Tensor:
    """The amax of a matrix that is not empty, as at most ``_AMAX_PROGRAMS`` partial ones."""
    if x.stride(0) < x.stride(1):
        x = x.t()
    if x.is_contiguous():
        x, tile = x.view(1, -1), _FLAT
    else:
        tile = _ONE
    (tiles,) = _grid(x.shape, tile)
    partial = x.new_empty(min(tiles, _AMAX_PROGRAMS), dtype=torch.float32)
    _amax_kernel[(partial.numel(),)](
        x, partial, *x.shape, *x.stride(), tile.rows, tile.columns, num_warps=tile.warps
    )
    return partial


@on_device_of_first
def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """``reference.amax``; only the per-tensor one has a kernel: no hot path asks for others."""
    if x.numel() == 0 or any(size != -1 for size in block):
        return reference.amax(x, block)
    return _partial_amax(x).amax().view(1, 1)


# Per tensor: quantize from the partial amaxes.


@triton.jit
def _quantize_tensor_kernel(
    x_ptr,  # [M, K] any float
    partial_ptr,  # [programs] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [1] fp32
    other_ptr,  # [1] fp32: the scale of the transpose if PAIR, else the amax
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
    RULE: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)

    index = tl.arange(0, PROGRAMS)
    partial = tl.load(partial_ptr + index, mask=index < programs, other=0.0)
    tensor_amax = tl.max(abs_bits(partial), 0).to(tl.float32, bitcast=True)
    scale, encode = scale_from_amax(tensor_amax, tl.cast(eps, tl.float32), LIMIT, RULE)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
        if PAIR:
            tl.store(other_ptr, scale)
        else:
            tl.store(other_ptr, tensor_amax)

    q = saturate(x * encode, q_ptr.dtype.element_ty)
    store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    if PAIR:
        store_transposed(q_t_ptr, q, rows, columns, ROWS, COLUMNS)
    if COLUMN_SUM:
        store_column_sum(sum_ptr, x, tile_m, columns, K)


def _quantize_tensor(
    x: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    tile = _ONE
    partial = _partial_amax(x)
    q = _output(x, fp8_dtype, align)
    scale = x.new_empty((1, 1), dtype=torch.float32)
    tensor_amax = torch.empty_like(scale)
    _quantize_tensor_kernel[_grid(q.shape, tile)](
        x,
        partial,
        q,
        q,
        scale,
        tensor_amax,
        scale,
        *x.shape,
        *q.shape,
        *x.stride(),
        partial.numel(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        PAIR=False,
        COLUMN_SUM=False,
        PROGRAMS=_AMAX_PROGRAMS,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, tensor_amax


def _quantize_tensor_pair(
    x: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float, align: int, column_sum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tile = _BOTH
    partial = _partial_amax(x)
    q = _output(x, fp8_dtype, align)
    q_t = q.new_empty((q.shape[1], q.shape[0]))
    scale = x.new_empty((1, 1), dtype=torch.float32)
    scale_t = torch.empty_like(scale)
    sums = _column_sums(x, tile, column_sum)
    _quantize_tensor_kernel[_grid(q.shape, tile)](
        x,
        partial,
        q,
        q_t,
        scale,
        scale_t,
        sums,
        *x.shape,
        *q.shape,
        *x.stride(),
        partial.numel(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        PAIR=True,
        COLUMN_SUM=column_sum,
        PROGRAMS=_AMAX_PROGRAMS,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, q_t, scale_t, _total(sums)


# Per row.


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [M, K] any float
    q_ptr,  # [ROWS, COLUMNS] fp8
    scale_ptr,  # [ROWS] fp32
    amax_ptr,  # [ROWS] fp32
    M,
    K,
    ROWS,
    COLUMNS,
    stride_xm,
    stride_xk,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    SINGLE: tl.constexpr,  # a tile holds whole rows
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    chunk = tl.arange(0, TILE_K).to(tl.int64)
    x = load_tile(x_ptr, rows, chunk, M, K, stride_xm, stride_xk).to(tl.float32)
    bits = abs_bits(x)
    if not SINGLE:
        for start in range(TILE_K, K, TILE_K):
            x = load_tile(x_ptr, rows, start + chunk, M, K, stride_xm, stride_xk).to(tl.float32)
            bits = tl.maximum(bits, abs_bits(x))
    row_amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    scale, encode = scale_from_amax(row_amax, tl.cast(eps, tl.float32), LIMIT, RULE)
    tl.store(scale_ptr + rows, scale, mask=rows < ROWS)
    tl.store(amax_ptr + rows, row_amax, mask=rows < ROWS)

    if SINGLE:
        q = saturate(x * encode[:, None], q_ptr.dtype.element_ty)
        store_tile(q_ptr, q, rows, chunk, ROWS, COLUMNS)
    else:
        for start in range(0, COLUMNS, TILE_K):
            x = load_tile(x_ptr, rows, start + chunk, M, K, stride_xm, stride_xk).to(tl.float32)
            q = saturate(x * encode[:, None], q_ptr.dtype.element_ty)
            store_tile(q_ptr, q, rows, start + chunk, ROWS, COLUMNS)


def _row_tile(x: Tensor, columns: int) -> Tile:
    if x.stride(0) < x.stride(1):
        return _COLUMN_MAJOR
    chunk = min(triton.next_power_of_2(columns), _ROW_CHUNK)
    rows = max(1, min(64, 4096 // chunk))
    return Tile(rows=rows, columns=chunk, warps=8 if rows * chunk > 4096 else 4)


def _quantize_rows(
    x: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    q = _output(x, fp8_dtype, align)
    tile = _row_tile(x, q.shape[1])
    scale = x.new_empty((q.shape[0], 1), dtype=torch.float32)
    row_amax = torch.empty_like(scale)
    _quantize_rows_kernel[(triton.cdiv(q.shape[0], tile.rows),)](
        x,
        q,
        scale,
        row_amax,
        *x.shape,
        *q.shape,
        *x.stride(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        SINGLE=q.shape[1] <= tile.columns,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, row_amax


@triton.jit
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


@triton.jit
def _quantize_rows_columns_kernel(
    x_ptr,  # [M, K] any float
    amax_ptr,  # [ROWS + COLUMNS] int32 bit patterns
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [ROWS] fp32
    scale_t_ptr,  # [COLUMNS] fp32
    sum_ptr,  # [row tiles, K] fp32
    M,
    K,
    ROWS,
    COLUMNS,
    stride_xm,
    stride_xk,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)

    row_bits = tl.load(amax_ptr + rows, mask=rows < ROWS, other=0)
    row_amax = row_bits.to(tl.float32, bitcast=True)
    column_bits = tl.load(amax_ptr + ROWS + columns, mask=columns < COLUMNS, other=0)
    column_amax = column_bits.to(tl.float32, bitcast=True)
    eps = tl.cast(eps, tl.float32)
    scale, encode = scale_from_amax(row_amax, eps, LIMIT, RULE)
    scale_t, encode_t = scale_from_amax(column_amax, eps, LIMIT, RULE)
    if tile_k == 0:
        tl.store(scale_ptr + rows, scale, mask=rows < ROWS)
    if tile_m == 0:
        tl.store(scale_t_ptr + columns, scale_t, mask=columns < COLUMNS)

    q = saturate(x * encode[:, None], q_ptr.dtype.element_ty)
    store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    q = saturate(x * encode_t[None, :], q_ptr.dtype.element_ty)
    store_transposed(q_t_ptr, q, rows, columns, ROWS, COLUMNS)
    if COLUMN_SUM:
        store_column_sum(sum_ptr, x, tile_m, columns, K)


def _quantize_rows_pair(
    x: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float, align: int, column_sum: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tile = _BOTH
    q = _output(x, fp8_dtype, align)
    rows, columns = q.shape
    amaxes = x.new_zeros(rows + columns, dtype=torch.int32)
    _amax_rows_columns_kernel[_grid(x.shape, tile)](
        x,
        amaxes,
        *x.shape,
        rows,
        *x.stride(),
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    q_t = q.new_empty((columns, rows))
    scale = x.new_empty((rows, 1), dtype=torch.float32)
    scale_t = x.new_empty((columns, 1), dtype=torch.float32)
    sums = _column_sums(x, tile, column_sum)
    _quantize_rows_columns_kernel[_grid(q.shape, tile)](
        x,
        amaxes,
        q,
        q_t,
        scale,
        scale_t,
        sums,
        *x.shape,
        rows,
        columns,
        *x.stride(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        COLUMN_SUM=column_sum,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, q_t, scale_t, _total(sums)


# Blocks that divide a tile.


@triton.jit
def _quantize_blocks_kernel(
    x_ptr,  # [M, K] any float
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [ceil ROWS / BM, ceil COLUMNS / BK] fp32
    scale_t_ptr,  # [ceil COLUMNS / BM, ceil ROWS / BK] fp32
    amax_ptr,  # shape and strides of scale, if not PAIR
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
    BM: tl.constexpr,
    BK: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    tile = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk)
    eps = tl.cast(eps, tl.float32)

    x = tile.to(tl.float32)
    amaxes = block_amax(abs_bits(x), BM, BK)
    scale, encode = scale_from_amax(amaxes, eps, LIMIT, RULE)
    q = saturate(scale_tile(x, encode, BM, BK), q_ptr.dtype.element_ty)
    store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    m = tile_m * (TILE_M // BM) + tl.arange(0, TILE_M // BM)
    k = tile_k * (TILE_K // BK) + tl.arange(0, TILE_K // BK)
    offsets = m[:, None] * stride_sm + k[None, :] * stride_sk
    mask = (m * BM < ROWS)[:, None] & (k * BK < COLUMNS)[None, :]
    tl.store(scale_ptr + offsets, scale, mask=mask)
    if not PAIR:
        tl.store(amax_ptr + offsets, amaxes, mask=mask)

    if PAIR:
        # The same with rows and columns exchanged.
        x = tl.trans(tile).to(tl.float32)
        scale, encode = scale_from_amax(block_amax(abs_bits(x), BM, BK), eps, LIMIT, RULE)
        q = saturate(scale_tile(x, encode, BM, BK), q_ptr.dtype.element_ty)
        store_tile(q_t_ptr, q, columns, rows, COLUMNS, ROWS)
        k = tile_k * (TILE_K // BM) + tl.arange(0, TILE_K // BM)
        m = tile_m * (TILE_M // BK) + tl.arange(0, TILE_M // BK)
        offsets = k[:, None] * stride_tk + m[None, :] * stride_tm
        mask = (k * BM < COLUMNS)[:, None] & (m * BK < ROWS)[None, :]
        tl.store(scale_t_ptr + offsets, scale, mask=mask)
    if COLUMN_SUM:
        store_column_sum(sum_ptr, tile.to(tl.float32), tile_m, columns, K)


def _divides_a_tile(block: Sequence[int]) -> bool:
    return all(0 < size <= 128 and size & (size - 1) == 0 for size in block)


def _quantize_blocks(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tile = _LARGE_BLOCKS if block[0] > _ONE.rows else _ONE
    q = _output(x, fp8_dtype, align)
    scale = empty_scale(x, q.shape, block)
    amaxes = torch.empty_like(scale)
    _quantize_blocks_kernel[_grid(q.shape, tile)](
        x,
        q,
        q,
        scale,
        scale,
        amaxes,
        scale,
        *x.shape,
        *q.shape,
        *x.stride(),
        *scale.stride(),
        *scale.stride(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        BM=block[0],
        BK=block[1],
        PAIR=False,
        COLUMN_SUM=False,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, amaxes


def _quantize_blocks_pair(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tile = _LARGE_BLOCKS if max(block) > _BOTH.rows else _BOTH
    q = _output(x, fp8_dtype, align)
    q_t = q.new_empty((q.shape[1], q.shape[0]))
    scale = empty_scale(x, q.shape, block)
    scale_t = empty_scale(x, q_t.shape, block)
    sums = _column_sums(x, tile, column_sum)
    _quantize_blocks_kernel[_grid(q.shape, tile)](
        x,
        q,
        q_t,
        scale,
        scale_t,
        scale,
        sums,
        *x.shape,
        *q.shape,
        *x.stride(),
        *scale.stride(),
        *scale_t.stride(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        BM=block[0],
        BK=block[1],
        PAIR=True,
        COLUMN_SUM=column_sum,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, q_t, scale_t, _total(sums)


# The two ops: which kernels for which block. A block that is neither -1 nor a power of two up to
# 128 (nobody's recipe) takes the reference, which is plain PyTorch and runs on the GPU as it is; so
# does a matrix of one column, for which ptxas crashes (CUDA 12.8's, in triton 3.6).


def _one_pass(x: Tensor) -> bool:
    """Whether one kernel may write both orientations of the same bytes.

    Triton 3.6 permutes the bytes of a tile that is transposed after the cast if the tile was
    loaded four elements a thread, as float32 is. Such input takes a second kernel.
    """
    return x.element_size() == 2


@on_device_of_first
def quantize(
    x: Tensor, fp8_dtype: torch.dtype, block: Sequence[int], rule: str, eps: float, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    shape = tuple(block)
    if x.numel() == 0 or x.shape[1] == 1:
        return reference.quantize(x, fp8_dtype, block, rule, eps, align)
    if shape == (-1, -1):
        return _quantize_tensor(x, fp8_dtype, rule, eps, align)
    if shape == (1, -1):
        return _quantize_rows(x, fp8_dtype, rule, eps, align)
    if _divides_a_tile(shape):
        return _quantize_blocks(x, fp8_dtype, block, rule, eps, align)
    return reference.quantize(x, fp8_dtype, block, rule, eps, align)


@on_device_of_first
def quantize_pair(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = tuple(block)
    if x.numel() == 0 or x.shape[1] == 1:
        return reference.quantize_pair(x, fp8_dtype, block, rule, eps, align, column_sum)
    if shape[0] == shape[1] and (shape[0] != -1 or not _one_pass(x)):
        q, scale, _ = quantize(x, fp8_dtype, block, rule, eps, align)
        scale_t = scale.t().clone(memory_format=torch.contiguous_format)
        return q, scale, transpose(q, 1), scale_t, reference.sum_of_rows(x, column_sum)
    if shape == (-1, -1):
        return _quantize_tensor_pair(x, fp8_dtype, rule, eps, align, column_sum)
    if shape == (1, -1):
        return _quantize_rows_pair(x, fp8_dtype, rule, eps, align, column_sum)
    if _divides_a_tile(shape):
        return _quantize_blocks_pair(x, fp8_dtype, block, rule, eps, align, column_sum)
    return reference.quantize_pair(x, fp8_dtype, block, rule, eps, align, column_sum)


# Given scales.


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])  # or each place in a pack has a kernel
def _cast_kernel(
    x_ptr,  # [M, K] any float
    scale_ptr,  # one per block of BM x BK, or broadcast, fp32
    slot_ptr,  # [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    sum_ptr,  # [row tiles, K] fp32
    M,
    K,
    ROWS,
    COLUMNS,
    scale_rows,
    scale_columns,
    stride_xm,
    stride_xk,
    stride_sm,
    stride_sk,
    BM: tl.constexpr,  # 0 is the whole dimension
    BK: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    PAIR: tl.constexpr,
    COLUMN_SUM: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)

    m = block_index(tile_m * TILE_M, rows, BM, TILE_M)
    k = block_index(tile_k * TILE_K, columns, BK, TILE_K)
    mask = (m < scale_rows)[:, None] & (k < scale_columns)[None, :]
    offsets = m[:, None] * stride_sm + k[None, :] * stride_sk
    scale = tl.load(scale_ptr + offsets, mask=mask, other=1.0)

    if HAS_SLOT:
        record_amax(slot_ptr, abs_bits(x))

    q = saturate(x * encode_from_scale(scale), q_ptr.dtype.element_ty)
    store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    if PAIR:
        store_transposed(q_t_ptr, q, rows, columns, ROWS, COLUMNS)
    if COLUMN_SUM:
        store_column_sum(sum_ptr, x, tile_m, columns, K)


@on_device_of_first
def cast(
    x: Tensor,
    scale: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    align: int,
) -> Tensor:
    tile = _ONE
    if x.numel() == 0 or x.shape[1] == 1:
        return reference.cast(x, scale, amax_slot, fp8_dtype, block, align)
    q = _output(x, fp8_dtype, align)
    scale, block = _broadcast(scale, block)
    _cast_kernel[_grid(q.shape, tile)](
        x,
        scale,
        scale if amax_slot is None else amax_slot,
        q,
        q,
        scale,
        *x.shape,
        *q.shape,
        *scale.shape,
        *x.stride(),
        *scale.stride(),
        BM=block[0],
        BK=block[1],
        HAS_SLOT=amax_slot is not None,
        PAIR=False,
        COLUMN_SUM=False,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q


@on_device_of_first
def cast_pair(
    x: Tensor,
    scale: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0 or x.shape[1] == 1:
        return reference.cast_pair(x, scale, amax_slot, fp8_dtype, align, column_sum)
    if not _one_pass(x):
        q = cast(x, scale, amax_slot, fp8_dtype, (-1, -1), align)
        return q, transpose(q, 1), reference.sum_of_rows(x, column_sum)
    tile = _BOTH
    q = _output(x, fp8_dtype, align)
    q_t = q.new_empty((q.shape[1], q.shape[0]))
    sums = _column_sums(x, tile, column_sum)
    scale, block = _broadcast(scale, (-1, -1))
    _cast_kernel[_grid(q.shape, tile)](
        x,
        scale,
        scale if amax_slot is None else amax_slot,
        q,
        q_t,
        sums,
        *x.shape,
        *q.shape,
        *scale.shape,
        *x.stride(),
        *scale.stride(),
        BM=block[0],
        BK=block[1],
        HAS_SLOT=amax_slot is not None,
        PAIR=True,
        COLUMN_SUM=column_sum,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, q_t, _total(sums)


def _broadcast(scale: Tensor, block: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """A matrix of scales and its block sizes, 0 where one scale serves the whole dimension."""
    if scale.numel() == 1:
        return scale.view(1, 1), (0, 0)
    rows, columns = (
        0 if scale.shape[dim] == 1 or block[dim] == -1 else block[dim] for dim in (0, 1)
    )
    return scale, (rows, columns)


@triton.jit
def _dequantize_kernel(
    q_ptr,  # [M, K] fp8
    scale_ptr,  # one per block of BM x BK, or broadcast, fp32
    y_ptr,  # [M, K] any float
    M,
    K,
    scale_rows,
    scale_columns,
    stride_qm,
    stride_qk,
    stride_sm,
    stride_sk,
    BM: tl.constexpr,  # 0 is the whole dimension
    BK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles_k = tl.cdiv(K, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    q = tl.load(q_ptr + rows[:, None] * stride_qm + columns[None, :] * stride_qk, mask=mask)

    m = block_index(tile_m * TILE_M, rows, BM, TILE_M)
    k = block_index(tile_k * TILE_K, columns, BK, TILE_K)
    mask = (m < scale_rows)[:, None] & (k < scale_columns)[None, :]
    offsets = m[:, None] * stride_sm + k[None, :] * stride_sk
    scale = tl.load(scale_ptr + offsets, mask=mask, other=1.0)
    y = (q.to(tl.float32) * scale).to(y_ptr.dtype.element_ty)
    store_tile(y_ptr, y, rows, columns, M, K)


@on_device_of_first
def dequantize(q: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    tile = _ONE
    y = q.new_empty(q.shape, dtype=dtype)
    if q.numel() == 0:
        return y
    scale, block = _broadcast(scale, block)
    _dequantize_kernel[_grid(q.shape, tile)](
        q,
        scale,
        y,
        *q.shape,
        *scale.shape,
        *q.stride(),
        *scale.stride(),
        BM=block[0],
        BK=block[1],
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return y


# One-byte transpose.


@triton.jit
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


@on_device_of_first
def transpose(q: Tensor, align: int) -> Tensor:
    tile = _BOTH
    rows, columns = round_up(q.shape[0], align), round_up(q.shape[1], align)
    q_t = q.new_empty((columns, rows))
    if q.numel() == 0:
        return q_t
    _transpose_kernel[_grid((rows, columns), tile)](
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
