"""LayerNorm and RMSNorm on the GPU.  M rows, K features.

The arithmetic is that of ``ops/reference/norm.py``, operation by operation; only the order of sums
differs. Multiply-adds are not fused, so that given statistics give the reference's bits. An input
in FP8 is decoded as it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import as_matrix
from float8lab.ops.reference.norm import empty_stats

_ROW_CHUNK = 8192
"""A row of up to this many columns stays in registers."""

_BACKWARD_PROGRAMS = 528
"""The most programs, and so partial sums over rows: four per multiprocessor of an H200."""


@triton.jit
def _load_row(ptr, columns, K, stride=1):
    return tl.load(ptr + columns * stride, mask=columns < K, other=0.0).to(tl.float32)


@triton.jit
def _squared_deviation(x, mean, columns, K, CENTER: tl.constexpr):
    if CENTER:
        x = tl.where((columns < K)[None, :], x - mean[:, None], 0.0)
    return tl.sum(x * x, 1)


@triton.jit
def _block_of(indices, size, SIZE: tl.constexpr):
    """Return the block of each index; an index past the edge gets the last block."""
    return tl.zeros([1], tl.int64) if SIZE == 0 else tl.minimum(indices, size - 1) // SIZE


@triton.jit
def _load_values(
    x_ptr, scale_ptr, M, K, stride_xm, stride_xk, stride_sm, stride_sk, rows, columns,
    BM: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load a tile of the input as float32; one with scales is dequantized to DTYPE first."""
    x = _common.load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk).to(tl.float32)
    if scale_ptr is not None:
        m, k = _block_of(rows, M, BM), _block_of(columns, K, BK)
        scale = tl.load(scale_ptr + m[:, None] * stride_sm + k[None, :] * stride_sk)
        x = (x * scale).to(DTYPE).to(tl.float32)
    return x


@launched
def _norm_kernel(
    x_ptr,  # [M, K] any float, or FP8 with scales
    scale_ptr,  # None, or one per block of BM x BK, or broadcast, fp32
    weight_ptr,  # [K] any float
    bias_ptr,  # None or [K] any float
    y_ptr,  # None or [M, K] DTYPE
    mean_ptr,  # None, or [M] fp32 if values are centered
    rstd_ptr,  # [M] fp32
    amax_ptr,  # None or [1] fp32, 0 at first
    M, K, stride_xm, stride_xk, stride_sm, stride_sk, eps,
    BM: tl.constexpr, BK: tl.constexpr,  # 0 is the whole dimension
    SINGLE: tl.constexpr,  # a tile holds complete rows
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    CENTER: tl.constexpr = mean_ptr is not None
    rows = tl.program_id(0).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    columns = tl.arange(0, TILE_K).to(tl.int64)
    size = tl.cast(K, tl.float32)
    matrix = (x_ptr, scale_ptr, M, K, stride_xm, stride_xk, stride_sm, stride_sk)
    x = _load_values(*matrix, rows, columns, BM, BK, DTYPE)

    mean = tl.zeros([TILE_M], tl.float32)
    if CENTER:
        row_sum = tl.sum(x, 1)
        if not SINGLE:
            for start in range(TILE_K, K, TILE_K):
                values = _load_values(*matrix, rows, start + columns, BM, BK, DTYPE)
                row_sum += tl.sum(values, 1)
        mean = tl.div_rn(row_sum, size)
        tl.store(mean_ptr + rows, mean, mask=rows < M)
    row_sum = _squared_deviation(x, mean, columns, K, CENTER)
    if not SINGLE:
        for start in range(TILE_K, K, TILE_K):
            values = _load_values(*matrix, rows, start + columns, BM, BK, DTYPE)
            row_sum += _squared_deviation(values, mean, start + columns, K, CENTER)
    variance = tl.div_rn(row_sum, size)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + tl.cast(eps, tl.float32)))
    tl.store(rstd_ptr + rows, rstd, mask=rows < M)

    if y_ptr is not None or amax_ptr is not None:
        bits = tl.zeros([TILE_M, TILE_K], tl.int32)
        for start in range(0, TILE_K if SINGLE else K, TILE_K):
            if not SINGLE:
                x = _load_values(*matrix, rows, start + columns, BM, BK, DTYPE)
            y = x - mean[:, None] if CENTER else x
            y = y * rstd[:, None] * _load_row(weight_ptr, start + columns, K)[None, :]
            if CENTER:
                y += _load_row(bias_ptr, start + columns, K)[None, :]
            y = y.to(DTYPE)
            mask = (rows < M)[:, None] & (start + columns < K)[None, :]
            if y_ptr is not None:
                tl.store(y_ptr + rows[:, None] * K + (start + columns)[None, :], y, mask=mask)
            if amax_ptr is not None:
                tile_bits = tl.where(mask, _common.abs_bits(y.to(tl.float32)), 0)
                bits = tl.maximum(bits, tile_bits)
        if amax_ptr is not None:
            _common.record_amax(amax_ptr, bits)


def _has_kernel(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether a kernel can do this; the reference handles empty inputs and float64."""
    return bool(x.numel()) and torch.float64 not in (x.dtype, dtype)


@replayed
def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool, dtype: torch.dtype,
    scale: Tensor | None = None, block: Sequence[int] = (), write: bool = True,
    want_amax: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    if not _has_kernel(x, dtype):
        return reference.norm(x, weight, bias, eps, center, dtype, scale, block, write, want_amax)
    mean, rstd = empty_stats(x, scale, center)
    y = x.new_empty(x.shape, dtype=dtype) if write else None
    amax = x.new_zeros((1, 1), dtype=torch.float32) if want_amax else None
    x = as_matrix(x)
    M, K = x.shape
    scale, block = (None, (0, 0)) if scale is None else _common.broadcast_scale(scale, block)
    strides = (0, 0) if scale is None else scale.stride()
    chunk = min(_common.next_power_of_2(K), _ROW_CHUNK)
    rows = max(1, min(64, 4096 // chunk))
    _norm_kernel[(_common.ceil_div(M, rows),)](
        x, scale, weight.contiguous(), None if bias is None else bias.contiguous(), y, mean, rstd,
        amax, M, K, *x.stride(), *strides, eps, BM=block[0], BK=block[1],
        SINGLE=chunk >= K, DTYPE=_common.TRITON_DTYPES[dtype], TILE_M=rows, TILE_K=chunk,
        num_warps=8 if rows * chunk > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return y, mean, rstd, amax


@launched
def _norm_backward_kernel(
    dy_ptr,  # [M, K] any float
    x_ptr,  # [M, K] any float, or FP8 with scales
    scale_ptr,  # None, or one per block of BM x BK, or broadcast, fp32
    weight_ptr,  # [K] any float
    mean_ptr,  # None, or [M] fp32 if values were centered
    rstd_ptr,  # [M] fp32
    dx_ptr,  # [M, K] in the dtype of x, or the dtype that an FP8 x pretends to be
    dweight_ptr,  # [programs, K] fp32
    dbias_ptr,  # None or [programs, K] fp32
    M, K, stride_dym, stride_dyk, stride_xm, stride_xk, stride_sm, stride_sk,
    BM: tl.constexpr, BK: tl.constexpr,  # 0 is the whole dimension
    TILE_K: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, TILE_K).to(tl.int64)
    mask = columns < K
    size = tl.cast(K, tl.float32)
    weight = _load_row(weight_ptr, columns, K)
    dweight = tl.zeros([TILE_K], tl.float32)
    dbias = tl.zeros([TILE_K], tl.float32)
    for index in range(tl.program_id(0), M, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        x = _load_row(x_ptr + row * stride_xm, columns, K, stride_xk)
        if scale_ptr is not None:
            m, k = _block_of(row, M, BM), _block_of(columns, K, BK)
            x = x * tl.load(scale_ptr + m * stride_sm + k * stride_sk)
            x = x.to(dx_ptr.dtype.element_ty).to(tl.float32)
        g = _load_row(dy_ptr + row * stride_dym, columns, K, stride_dyk)
        rstd = tl.load(rstd_ptr + row)
        if mean_ptr is not None:
            x = tl.where(mask, x - tl.load(mean_ptr + row), 0.0)
            dbias += g
        xhat = x * rstd
        dweight += g * xhat
        g = g * weight
        projection = tl.div_rn(tl.sum(g * xhat, 0), size)
        dx = g - xhat * projection
        if mean_ptr is not None:
            dx = dx - tl.div_rn(tl.sum(g, 0), size)
        tl.store(dx_ptr + row * K + columns, (dx * rstd).to(dx_ptr.dtype.element_ty), mask=mask)
    partial = tl.program_id(0).to(tl.int64) * K + columns
    tl.store(dweight_ptr + partial, dweight, mask=mask)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + partial, dbias, mask=mask)


@replayed
def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, center: bool,
    dtype: torch.dtype, scale: Tensor | None = None, block: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    if not _has_kernel(x, dy.dtype) or x.shape[-1] > _ROW_CHUNK:
        return reference.norm_backward(dy, x, weight, mean, rstd, center, dtype, scale, block)
    dx = x.new_empty(x.shape, dtype=dtype)
    dy, x = as_matrix(dy), as_matrix(x)
    M, K = x.shape
    scale, block = (None, (0, 0)) if scale is None else _common.broadcast_scale(scale, block)
    strides = (0, 0) if scale is None else scale.stride()
    tile = _common.next_power_of_2(K)
    programs = min(M, _BACKWARD_PROGRAMS)
    dweight = x.new_empty((programs, K), dtype=torch.float32)
    dbias = torch.empty_like(dweight) if center else None
    _norm_backward_kernel[(programs,)](
        dy, x, scale, weight.contiguous(), mean if center else None, rstd, dx, dweight, dbias,
        M, K, *dy.stride(), *x.stride(), *strides, BM=block[0], BK=block[1], TILE_K=tile,
        num_warps=min(16, max(1, tile // 256)), enable_fp_fusion=False,
    )  # fmt: skip
    return dx, dweight.sum(0), None if dbias is None else dbias.sum(0)
