"""Quantize, cast and dequantize matrices on the GPU, in one orientation.

M rows, K columns of the input; ROWS, COLUMNS the same after padding to the alignment. Every kernel
gives the bytes of ``ops/reference``. Every program handles one tile of the input.

Sizes and strides are run-time arguments: a new token count recompiles nothing, except that triton
specialises once on whether an integer is 1 or divisible by 16, which is what allows wide accesses.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    block_amax,
    block_index,
    broadcast_scale,
    ceil_div,
    grid_of,
    load_tile,
    next_power_of_2,
    record_amax,
    saturate,
    scale_from_amax,
    scale_tile,
    store_tile,
)
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import round_up

__all__ = [
    "PARTIALS",
    "TILE",
    "amax",
    "block_tile",
    "cast_one",
    "dequantize",
    "divides_a_tile",
    "empty_output",
    "partial_amax",
    "quantize",
    "row_tile",
    "scale_of_tensor",
    "write_blocks",
    "write_cast",
    "write_rows",
]


# At most 64 elements a thread, and few enough registers that several programs share a
# multiprocessor: one loads while another stores. A tile of blocks holds whole blocks.
TILE = Tile(rows=64, columns=128, warps=4)
_LARGE_BLOCKS = Tile(rows=128, columns=128, warps=16)
_FLAT = Tile(rows=1, columns=4096, warps=8)
_COLUMN_MAJOR = Tile(rows=64, columns=64, warps=4)

_AMAX_PROGRAMS = 6 * 132
"""Partial amaxes of a tensor: six programs per multiprocessor of an H200, all resident."""
PARTIALS = next_power_of_2(_AMAX_PROGRAMS)

_ROW_CHUNK = 8192
"""A row up to this long stays in registers between its amax and its cast."""


def empty_output(x: Tensor, fp8_dtype: torch.dtype, align: int) -> Tensor:
    shape = (round_up(x.shape[0], align), round_up(x.shape[1], align))
    return x.new_empty(shape, dtype=fp8_dtype)


# Per tensor: amax.


@launched
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


def partial_amax(x: Tensor) -> Tensor:
    """The amax of a matrix that is not empty, as at most ``PARTIALS`` partial ones."""
    if x.stride(0) < x.stride(1):
        x = x.t()
    if x.is_contiguous():
        x, tile = x.view(1, -1), _FLAT
    else:
        tile = TILE
    (tiles,) = grid_of(x.shape, tile)
    partial = x.new_empty(min(tiles, _AMAX_PROGRAMS), dtype=torch.float32)
    _amax_kernel[(partial.numel(),)](
        x, partial, *x.shape, *x.stride(), TILE_M=tile.rows, TILE_K=tile.columns,
        num_warps=tile.warps,
    )  # fmt: skip
    return partial


def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """``reference.amax``; only the per-tensor one has a kernel: no hot path asks for others."""
    if x.numel() == 0 or any(size != -1 for size in block):
        return reference.amax(x, block)
    return partial_amax(x).amax().view(1, 1)


# Per tensor: quantize from the partial amaxes.


@triton.jit
def scale_of_tensor(
    partial_ptr, programs, eps, LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr
):
    """Decode scale, encode factor and amax of a tensor from its partial amaxes."""
    index = tl.arange(0, PARTIALS)
    partial = tl.load(partial_ptr + index, mask=index < programs, other=0.0)
    amax = tl.max(abs_bits(partial), 0).to(tl.float32, bitcast=True)
    scale, encode = scale_from_amax(amax, tl.cast(eps, tl.float32), LIMIT, RULE)
    return scale, encode, amax


@launched
def _quantize_tensor_kernel(
    x_ptr,  # [M, K] any float
    partial_ptr,  # [programs] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    scale_ptr,  # [1] fp32
    amax_ptr,  # [1] fp32
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
    PARTIALS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    # From the end: of what the amax has read, the last part is in the cache.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    rows = (tile // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    columns = (tile % tiles_k).to(tl.int64) * TILE_K + tl.arange(0, TILE_K)
    x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)
    scale, encode, amax = scale_of_tensor(partial_ptr, programs, eps, LIMIT, RULE, PARTIALS)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr, scale)
        tl.store(amax_ptr, amax)
    store_tile(q_ptr, saturate(x * encode, q_ptr.dtype.element_ty), rows, columns, ROWS, COLUMNS)


def _quantize_tensor(
    x: Tensor,
    fp8_dtype: torch.dtype,
    rule: str,
    eps: float,
    align: int,
    known_amax: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    tile = TILE
    partial = partial_amax(x) if known_amax is None else known_amax
    q = empty_output(x, fp8_dtype, align)
    scale = x.new_empty((1, 1), dtype=torch.float32)
    tensor_amax = torch.empty_like(scale)
    _quantize_tensor_kernel[grid_of(q.shape, tile)](
        x,
        partial,
        q,
        scale,
        tensor_amax,
        *x.shape,
        *q.shape,
        *x.stride(),
        partial.numel(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        PARTIALS=PARTIALS,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, tensor_amax


# Per row.


@triton.jit
def write_rows(
    x_ptr,  # [M, K] any float
    q_ptr,  # [ROWS, COLUMNS] fp8
    scale_ptr,  # [ROWS] fp32
    amax_ptr,  # [ROWS] fp32
    tile,
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
    """Quantize the rows of tile number ``tile``."""
    rows = tile.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
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


@launched
def _quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    M,
    K,
    ROWS,
    COLUMNS,
    stride_xm,
    stride_xk,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    SINGLE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    write_rows(
        x_ptr, q_ptr, scale_ptr, amax_ptr, tl.program_id(0), M, K, ROWS, COLUMNS,
        stride_xm, stride_xk, eps, LIMIT, RULE, SINGLE, TILE_M, TILE_K,
    )  # fmt: skip


def row_tile(x: Tensor, columns: int) -> Tile:
    if x.stride(0) < x.stride(1):
        return _COLUMN_MAJOR
    chunk = min(next_power_of_2(columns), _ROW_CHUNK)
    rows = max(1, min(64, 4096 // chunk))
    return Tile(rows=rows, columns=chunk, warps=8 if rows * chunk > 4096 else 4)


def _quantize_rows(
    x: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    q = empty_output(x, fp8_dtype, align)
    tile = row_tile(x, q.shape[1])
    scale = x.new_empty((q.shape[0], 1), dtype=torch.float32)
    row_amax = torch.empty_like(scale)
    _quantize_rows_kernel[(ceil_div(q.shape[0], tile.rows),)](
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


# Blocks that divide a tile.


@triton.jit
def write_blocks(
    x_ptr,  # [M, K] any float
    q_ptr,  # [ROWS, COLUMNS] fp8
    scale_ptr,  # [ceil ROWS / BM, ceil COLUMNS / BK] fp32
    amax_ptr,  # shape and strides of scale
    tile,
    M,
    K,
    ROWS,
    COLUMNS,
    stride_xm,
    stride_xk,
    stride_sm,
    stride_sk,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Quantize the blocks of tile number ``tile``."""
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tile // tiles_k).to(tl.int64)
    tile_k = (tile % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)

    amaxes = block_amax(abs_bits(x), BM, BK)
    scale, encode = scale_from_amax(amaxes, tl.cast(eps, tl.float32), LIMIT, RULE)
    q = saturate(scale_tile(x, encode, BM, BK), q_ptr.dtype.element_ty)
    store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    m = tile_m * (TILE_M // BM) + tl.arange(0, TILE_M // BM)
    k = tile_k * (TILE_K // BK) + tl.arange(0, TILE_K // BK)
    offsets = m[:, None] * stride_sm + k[None, :] * stride_sk
    mask = (m * BM < ROWS)[:, None] & (k * BK < COLUMNS)[None, :]
    tl.store(scale_ptr + offsets, scale, mask=mask)
    tl.store(amax_ptr + offsets, amaxes, mask=mask)


@launched
def _quantize_blocks_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    amax_ptr,
    M,
    K,
    ROWS,
    COLUMNS,
    stride_xm,
    stride_xk,
    stride_sm,
    stride_sk,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    write_blocks(
        x_ptr, q_ptr, scale_ptr, amax_ptr, tl.program_id(0), M, K, ROWS, COLUMNS,
        stride_xm, stride_xk, stride_sm, stride_sk, eps, LIMIT, RULE, BM, BK, TILE_M, TILE_K,
    )  # fmt: skip


def block_tile(block: Sequence[int]) -> Tile:
    return _LARGE_BLOCKS if block[0] > TILE.rows else TILE


def divides_a_tile(block: Sequence[int]) -> bool:
    return all(0 < size <= 128 and size & (size - 1) == 0 for size in block)


def _quantize_blocks(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
) -> tuple[Tensor, Tensor, Tensor]:
    tile = block_tile(block)
    q = empty_output(x, fp8_dtype, align)
    scale = empty_scale(x, q.shape, block)
    amaxes = torch.empty_like(scale)
    _quantize_blocks_kernel[grid_of(q.shape, tile)](
        x,
        q,
        scale,
        amaxes,
        *x.shape,
        *q.shape,
        *x.stride(),
        *scale.stride(),
        eps,
        LIMIT=largest(fp8_dtype),
        RULE=rule,
        BM=block[0],
        BK=block[1],
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q, scale, amaxes


# The op: which kernels for which block. A block that is neither -1 nor a power of two up to 128
# (nobody's recipe) takes the reference, which is plain PyTorch and runs on the GPU as it is; so
# does a matrix of one column, for which ptxas crashes (CUDA 12.8's, in triton 3.6).


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = tuple(block)
    if x.numel() == 0 or x.shape[1] == 1:
        return reference.quantize(x, fp8_dtype, block, rule, eps, align, known_amax)
    if shape == (-1, -1):
        return _quantize_tensor(x, fp8_dtype, rule, eps, align, known_amax)
    if shape == (1, -1):
        return _quantize_rows(x, fp8_dtype, rule, eps, align)
    if divides_a_tile(shape):
        return _quantize_blocks(x, fp8_dtype, block, rule, eps, align)
    return reference.quantize(x, fp8_dtype, block, rule, eps, align)


# Given factors.


@triton.jit
def write_cast(
    x_ptr,  # [M, K] any float
    factor_ptr,  # one per block of BM x BK, or broadcast, fp32
    slot_ptr,  # [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    tile,
    M,
    K,
    ROWS,
    COLUMNS,
    factor_rows,
    factor_columns,
    stride_xm,
    stride_xk,
    stride_fm,
    stride_fk,
    BM: tl.constexpr,  # 0 is the whole dimension
    BK: tl.constexpr,
    DIVIDE: tl.constexpr,  # factors are decode scales
    HAS_SLOT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Cast tile number ``tile`` by given factors."""
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tile // tiles_k).to(tl.int64)
    tile_k = (tile % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    x = load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)

    m = block_index(tile_m * TILE_M, rows, BM, TILE_M)
    k = block_index(tile_k * TILE_K, columns, BK, TILE_K)
    mask = (m < factor_rows)[:, None] & (k < factor_columns)[None, :]
    offsets = m[:, None] * stride_fm + k[None, :] * stride_fk
    factor = tl.load(factor_ptr + offsets, mask=mask, other=1.0)

    if HAS_SLOT:
        record_amax(slot_ptr, abs_bits(x))

    y = tl.div_rn(x, factor) if DIVIDE else x * factor
    store_tile(q_ptr, saturate(y, q_ptr.dtype.element_ty), rows, columns, ROWS, COLUMNS)


@launched(do_not_specialize_on_alignment=["slot_ptr"])  # or each place in a pack has a kernel
def _cast_kernel(
    x_ptr,
    factor_ptr,
    slot_ptr,
    q_ptr,
    M,
    K,
    ROWS,
    COLUMNS,
    factor_rows,
    factor_columns,
    stride_xm,
    stride_xk,
    stride_fm,
    stride_fk,
    BM: tl.constexpr,
    BK: tl.constexpr,
    DIVIDE: tl.constexpr,
    HAS_SLOT: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    write_cast(
        x_ptr, factor_ptr, slot_ptr, q_ptr, tl.program_id(0), M, K, ROWS, COLUMNS,
        factor_rows, factor_columns, stride_xm, stride_xk, stride_fm, stride_fk,
        BM, BK, DIVIDE, HAS_SLOT, TILE_M, TILE_K,
    )  # fmt: skip


def cast_one(
    x: Tensor,
    factor: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    align: int,
    divide: bool = False,
) -> Tensor:
    tile = TILE
    if x.numel() == 0 or x.shape[1] == 1:
        rule = "decode" if divide else "encode"
        one = (True, False, False, factor, amax_slot)
        q, *_ = reference.cast("", [x], x.dtype, fp8_dtype, block, rule, 0.0, align, *one)
        assert q is not None, "asked for"
        return q
    q = empty_output(x, fp8_dtype, align)
    factor, block = broadcast_scale(factor, block)
    _cast_kernel[grid_of(q.shape, tile)](
        x,
        factor,
        factor if amax_slot is None else amax_slot,
        q,
        *x.shape,
        *q.shape,
        *factor.shape,
        *x.stride(),
        *factor.stride(),
        BM=block[0],
        BK=block[1],
        DIVIDE=divide,
        HAS_SLOT=amax_slot is not None,
        TILE_M=tile.rows,
        TILE_K=tile.columns,
        num_warps=tile.warps,
    )
    return q


@launched
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


@replayed
def dequantize(
    q: Tensor,
    scale: Tensor,
    block: Sequence[int],
    dtype: torch.dtype,
    event: Tensor | None = None,
) -> Tensor:
    tile = TILE
    y = q.new_empty(q.shape, dtype=dtype)
    if q.numel() == 0:
        return y
    scale, block = broadcast_scale(scale, block)
    _dequantize_kernel[grid_of(q.shape, tile)](
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
