"""Count and sum what a cast did to the values of a matrix, in one read.  M rows, K columns.

Each program writes its own row, so that no sum depends on the order in which programs finish.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched

_TILE = _common.Tile(rows=8, columns=128, warps=8)
_SUMS = 261
"""Counts of the 256 bytes and of three kinds of values, and two sums of squares."""
_MOST_PROGRAMS = 256


@launched
def _measure_cast_kernel(
    x_ptr,  # [M, K] any float
    q_ptr,  # [M, K] fp8
    scale_ptr,  # one per block of BM x BK, or broadcast, fp32
    row_ptr,  # [programs, SUMS + 3] fp64
    M, K, scale_rows, scale_columns,
    stride_xm, stride_xk, stride_qm, stride_qk, stride_sm, stride_sk,
    BM: tl.constexpr, BK: tl.constexpr,  # 0 is the whole dimension
    SUMS: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    WIDE: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    counts = tl.zeros([256], tl.int32)
    nonzero = tl.zeros([TILE_M, TILE_K], tl.int32)
    finite, infinite = nonzero, nonzero
    signal = tl.zeros([TILE_M, TILE_K], tl.float64)
    noise = signal
    amax = tl.zeros([TILE_M, TILE_K], WIDE)
    scale_min, scale_max, scale_nan = float("inf"), float("-inf"), 0.0
    outside = tl.zeros([], tl.int64)
    tiles = tl.cdiv(M, TILE_M) * tl.cdiv(K, TILE_K)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_k, rows, columns = _common.tile_indices(K, TILE_M, TILE_K, tile)
        x = _common.load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(WIDE)
        q = _common.load_tile(q_ptr, rows, columns, M, K, stride_qm, stride_qk)
        data = tl.reshape(q.to(tl.uint8, bitcast=True).to(tl.int32), [TILE_M * TILE_K])
        counts += tl.histogram(data, 256)
        inside = tl.minimum(M - tile_m * TILE_M, TILE_M) * tl.minimum(K - tile_k * TILE_K, TILE_K)
        outside += TILE_M * TILE_K - inside
        # Indices past the edge read the scale of the last block, which changes no extreme.
        m = _common.block_index(tile_m * TILE_M, rows, BM, TILE_M)
        k = _common.block_index(tile_k * TILE_K, columns, BK, TILE_K)
        m, k = tl.minimum(m, scale_rows - 1), tl.minimum(k, scale_columns - 1)
        scale = tl.load(scale_ptr + m[:, None] * stride_sm + k[None, :] * stride_sk)
        scale_min = tl.minimum(scale_min, tl.min(tl.min(scale, 1), 0))
        scale_max = tl.maximum(scale_max, tl.max(tl.max(scale, 1), 0))
        scale_nan += tl.sum(tl.sum(tl.where(scale == scale, 0.0, scale), 1), 0)

        size = tl.abs(x)
        is_finite = size < float("inf")
        nonzero += (x != 0).to(tl.int32)
        finite += (is_finite & (x != 0)).to(tl.int32)
        infinite += (size == float("inf")).to(tl.int32)
        size = tl.where(is_finite, size, 0.0)
        amax = tl.maximum(amax, size)
        error = q.to(tl.float32).to(WIDE) * scale - x
        error = tl.where(tl.abs(error) < float("inf"), error, 0.0)
        signal += size.to(tl.float64) * size.to(tl.float64)
        noise += error.to(tl.float64) * error.to(tl.float64)
    row_ptr += tl.program_id(0) * (SUMS + 3)
    # Triton 3.6 reorders the values of a histogram in another way than its mask. So the histogram
    # has no mask, and the zeros that fill up a tile are subtracted.
    byte = tl.arange(0, 256)
    tl.store(row_ptr + byte, counts - tl.where(byte == 0, outside, 0))
    sums = (nonzero, finite, infinite, signal, noise)
    for i in tl.static_range(5):
        tl.store(row_ptr + 256 + i, tl.sum(tl.sum(sums[i], 1), 0))
    tl.store(row_ptr + SUMS, tl.max(tl.max(amax, 1), 0))
    tl.store(row_ptr + SUMS + 1, scale_max + scale_nan)
    tl.store(row_ptr + SUMS + 2, scale_nan - scale_min)


@_common.on_device_of_first
def measure_cast(
    x: Tensor, q: Tensor, scale: Tensor, block: Sequence[int]
) -> tuple[Tensor, Tensor]:
    scale, block = _common.broadcast_scale(scale, block)
    programs = min(_common.grid_of(x.shape, _TILE)[0], _MOST_PROGRAMS)
    rows = x.new_empty((programs, _SUMS + 3), dtype=torch.float64)
    _measure_cast_kernel[(programs,)](
        x, q, scale, rows, *x.shape, *scale.shape, *x.stride(), *q.stride(), *scale.stride(),
        BM=block[0], BK=block[1], SUMS=_SUMS, **_TILE.constants, enable_fp_fusion=False,
    )  # fmt: skip
    return rows[:, :_SUMS].sum(0), rows[:, _SUMS:].amax(0)
