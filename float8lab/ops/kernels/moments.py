"""Moments of an optimizer on the GPU, as ``reference.quantize_moment_`` defines them.

M rows, K columns of a moment. A program has complete blocks of 128 columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.reference import moments

_TILE = _common.Tile(rows=16, columns=moments.BLOCK, warps=4)


@triton.jit
def _round_stochastically(x, DROPPED: tl.constexpr, seed, place):
    bits = x.to(tl.int32, bitcast=True)
    random = (bits + seed + place * 0x632BE5AB) * 0x21F0AAAD
    random = (random ^ (random >> 15)) * 0x735A2D97
    random = (random ^ (random >> 15)) * 0x2C1B3C6D
    random = (random >> (32 - DROPPED)) & ((1 << DROPPED) - 1)
    return (bits + random) & -(1 << DROPPED)


@launched
def _quantize_moment_kernel(
    x_ptr,  # [M, K] fp32
    data_ptr,  # [M, K] uint8
    scale_ptr,  # [M, tiles of K] uint8
    M, K, stride_xm, stride_xk,
    step,  # float32, whose value is not in the key of a remembered launch
    SQUARE: tl.constexpr, LIMIT: tl.constexpr, DROPPED: tl.constexpr,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    _, tile_k, rows, columns = _common.tile_indices(K, TILE_M, TILE_K)
    x = _common.load_tile(x_ptr, rows, columns, M, K, stride_xm, stride_xk)
    if SQUARE:
        x = tl.sqrt_rn(x)
    amax = tl.max(_common.abs_bits(x), 1)
    largest = tl.full(amax.shape, LIMIT * LIMIT, tl.float32).to(tl.int32, bitcast=True)
    exponent = tl.maximum(127 - 2 * ((largest - amax) >> 24), 1)
    encode = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    scaled = tl.abs(x) * encode[:, None]
    root = tl.sqrt_rn(scaled).to(tl.int32).to(tl.float32)
    roots = root + tl.div_rn(scaled - root * root, 2 * root + 1)
    place = tl.arange(0, TILE_K)[None, :]
    seed = (tl.cast(step, tl.float32).to(tl.int32) * -0x61C88647 + 0x3C6EF372) & 0x7FFFFFFF
    rounded = _round_stochastically(roots + (LIMIT + 1), DROPPED, seed, place)
    q = tl.maximum((rounded >> DROPPED) & LIMIT, (_common.abs_bits(x) != 0).to(tl.int32))
    q = q | ((x.to(tl.int32, bitcast=True) >> 24) & (255 - LIMIT))
    _common.store_tile(data_ptr, q.to(tl.uint8), rows, columns, M, K)
    exponent = tl.where(amax < 0x7F800000, exponent, 255)
    scale_ptrs = scale_ptr + rows * tl.cdiv(K, TILE_K) + tile_k
    tl.store(scale_ptrs, exponent.to(tl.uint8), mask=rows < M)


@_common.on_device_of_first
def quantize_moment_(x: Tensor, data: Tensor, scale: Tensor, step: int, is_square: bool) -> None:
    if x.numel() == 0:
        return
    limit = moments.LIMITS[is_square]
    _quantize_moment_kernel[_common.grid_of(x.shape, _TILE)](
        x, data, scale, *x.shape, *x.stride(), float(step),
        SQUARE=is_square, LIMIT=limit, DROPPED=23 - limit.bit_length(), **_TILE.constants,
        enable_fp_fusion=False,
    )  # fmt: skip


@launched
def _dequantize_moment_kernel(
    data_ptr,  # [M, K] uint8
    scale_ptr,  # [M, tiles of K] uint8
    y_ptr,  # [M, K] fp32
    M, K,
    SQUARE: tl.constexpr, LIMIT: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    _, tile_k, rows, columns = _common.tile_indices(K, TILE_M, TILE_K)
    q = _common.load_tile(data_ptr, rows, columns, M, K, K, 1).to(tl.int32)
    exponent = tl.load(scale_ptr + rows * tl.cdiv(K, TILE_K) + tile_k, mask=rows < M, other=0)
    bits = tl.where(exponent == 255, 0x7FC00000, exponent.to(tl.int32) << 23)
    root = (q & LIMIT).to(tl.float32)
    y = root * root * bits.to(tl.float32, bitcast=True)[:, None]
    if SQUARE:
        y = y * y
    y = (y.to(tl.int32, bitcast=True) | ((q & (255 - LIMIT)) << 24)).to(tl.float32, bitcast=True)
    _common.store_tile(y_ptr, y, rows, columns, M, K)


@_common.on_device_of_first
def dequantize_moment(data: Tensor, scale: Tensor, is_square: bool) -> Tensor:
    y = data.new_empty(data.shape, dtype=torch.float32)
    if data.numel() > 0:
        shape = y.view(-1, y.shape[-1]).shape
        _dequantize_moment_kernel[_common.grid_of(shape, _TILE)](
            data, scale, y, *shape, SQUARE=is_square, LIMIT=moments.LIMITS[is_square],
            **_TILE.constants,
        )  # fmt: skip
    return y
