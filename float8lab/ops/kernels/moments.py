"""Moments of an optimizer on the GPU, as ``reference.quantize_moment_`` defines them.

M rows, K columns of a moment. A program has whole blocks of 128 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import E4M3, largest
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.reference import moments

_TILE = _common.Tile(rows=16, columns=moments.BLOCK, warps=4)
_NORMAL, _SMALLEST = tl.constexpr(moments.NORMAL), tl.constexpr(moments.SMALLEST)
_DROPPED = tl.constexpr(0xFFFFF)
"""The bits of a mantissa that e4m3 does not have."""


@triton.jit
def _round_stochastically(x, seed, place):
    bits = x.to(tl.int32, bitcast=True)
    random = (bits + seed + place * 0x632BE5AB) * 0x21F0AAAD
    random = (random ^ (random >> 15)) * 0x735A2D97
    random = (random ^ (random >> 15)) * 0x2C1B3C6D
    rounded = ((bits + ((random >> 12) & _DROPPED)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(_common.abs_bits(x) < 0x7F800000, rounded, x)


@triton.jit
def _place_of_tile(K, TILE_M: tl.constexpr, TILE_K: tl.constexpr):
    """Rows and columns of a program, and its block in a row."""
    tiles_k = tl.cdiv(K, TILE_K)
    tile_k = tl.program_id(0) % tiles_k
    rows = (tl.program_id(0) // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    return rows, tile_k * TILE_K + tl.arange(0, TILE_K), tile_k


@launched
def _quantize_moment_kernel(
    x_ptr,  # [M, K] fp32
    data_ptr,  # [M, K] uint8
    scale_ptr,  # [M, tiles of K] uint8
    M, K, stride_xm, stride_xk,
    step,  # float32, whose value is no part of what a launch is remembered by
    SQUARE: tl.constexpr, LIMIT: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    rows, columns, tile_k = _place_of_tile(K, TILE_M, TILE_K)
    x = _common.load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk)
    if SQUARE:
        root = tl.sqrt_rn(tl.abs(x))
        x = tl.where(x < 0, -root, root)
    amax = tl.max(_common.abs_bits(x), 1).to(tl.float32, bitcast=True)
    scale, encode = _common.scale_from_amax(amax, 0.0, LIMIT, "e8m0")
    x = _common.nan_for_infinity(x, tl.float8e4nv)
    scaled = x * encode[:, None]
    shift = tl.where(tl.abs(scaled) < _NORMAL, _NORMAL, 0.0)
    shift = tl.where(scaled < 0, -shift, shift)
    place = tl.arange(0, TILE_K)[None, :]
    seed = (tl.cast(step, tl.float32).to(tl.int32) * -0x61C88647 + 0x3C6EF372) & 0x7FFFFFFF
    rounded = _round_stochastically(scaled + shift, seed, place) - shift
    smallest = tl.where(x > 0, _SMALLEST, tl.where(x < 0, -_SMALLEST, 0.0))
    rounded = tl.where(rounded == 0, smallest, rounded)
    q = _common.saturate(rounded, rounded, tl.float8e4nv).to(tl.uint8, bitcast=True)
    _common.store_tile(data_ptr, q, rows, columns, M, K)
    exponent = (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8)
    tl.store(scale_ptr + rows * tl.cdiv(K, TILE_K) + tile_k, exponent, mask=rows < M)


@_common.on_device_of_first
def quantize_moment_(x: Tensor, data: Tensor, scale: Tensor, step: int, is_square: bool) -> None:
    if x.numel() == 0:
        return
    _quantize_moment_kernel[_common.grid_of(x.shape, _TILE)](
        x, data, scale, *x.shape, *x.stride(), float(step),
        SQUARE=is_square, LIMIT=largest(E4M3), TILE_M=_TILE.rows, TILE_K=_TILE.columns,
        num_warps=_TILE.warps, enable_fp_fusion=False,
    )  # fmt: skip


@launched
def _dequantize_moment_kernel(
    data_ptr,  # [M, K] uint8
    scale_ptr,  # [M, tiles of K] uint8
    y_ptr,  # [M, K] fp32
    M, K,
    SQUARE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    rows, columns, tile_k = _place_of_tile(K, TILE_M, TILE_K)
    q = _common.load_tile(data_ptr, rows, columns, M, K, K, 1).to(tl.float8e4nv, bitcast=True)
    exponent = tl.load(scale_ptr + rows * tl.cdiv(K, TILE_K) + tile_k, mask=rows < M, other=0)
    bits = exponent.to(tl.int32) << 23
    # The bits of 2**-127, and of NaN.
    bits = tl.where(exponent == 0, 0x400000, tl.where(exponent == 255, 0x7FC00000, bits))
    y = q.to(tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
    if SQUARE:
        y = y * tl.abs(y)
    _common.store_tile(y_ptr, y, rows, columns, M, K)


@_common.on_device_of_first
def dequantize_moment(data: Tensor, scale: Tensor, is_square: bool) -> Tensor:
    y = data.new_empty(data.shape, dtype=torch.float32)
    if data.numel() > 0:
        shape = y.view(-1, y.shape[-1]).shape
        _dequantize_moment_kernel[_common.grid_of(shape, _TILE)](
            data, scale, y, *shape, SQUARE=is_square, TILE_M=_TILE.rows, TILE_K=_TILE.columns,
            num_warps=_TILE.warps,
        )  # fmt: skip
    return y
