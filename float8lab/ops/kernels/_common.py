"""What every kernel file shares: scales from amaxes, the saturating cast, tiles with masked edges.

M rows, K columns of the input; ROWS, COLUMNS the same after padding to the alignment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = [
    "FLOAT32_MAX",
    "abs_bits",
    "block_amax",
    "block_index",
    "encode_from_scale",
    "load_tile",
    "on_device_of_first",
    "pow2_floor",
    "pow2_reciprocal",
    "record_amax",
    "saturate",
    "scale_from_amax",
    "scale_tile",
    "store_column_sum",
    "store_tile",
    "store_transposed",
]

FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


def on_device_of_first(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Run a launcher on the GPU of its first argument: triton launches on the current one."""

    @functools.wraps(launcher)
    def call(x: Tensor, *args: Any) -> Any:
        if not x.is_cuda or x.device.index == torch.cuda.current_device():
            return launcher(x, *args)
        with torch.cuda.device(x.device):
            return launcher(x, *args)

    return call


@triton.jit
def abs_bits(x):
    """Bit pattern of abs(x) for float32 x: ordered as the values are, and NaN above inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def pow2_floor(x):
    """Positive float32 x rounded down to a power of two: its mantissa dropped."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def pow2_reciprocal(x):
    """1 / x of a power of two from 2**-126 to 2**127, exactly, without a division."""
    bits = 0x7F000000 - x.to(tl.int32, bitcast=True)
    return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def encode_from_scale(scale):
    encode = tl.div_rn(1.0, scale)
    return tl.where(encode > FLOAT32_MAX, FLOAT32_MAX, encode)


@triton.jit
def scale_from_amax(amax, eps, LIMIT: tl.constexpr, RULE: tl.constexpr):
    """Decode scales and their encode factors, as ``reference`` makes them one from the other.

    Divisions are the costly part, since every thread of a tile repeats those of its rows and
    columns: powers of two are inverted through their exponents.
    """
    raised = tl.where(amax < eps, eps, amax)  # NaN survives, as in torch.clamp
    usable = (raised > 0) & (raised < float("inf"))
    if RULE == "e8m0":
        bits = tl.div_rn(raised, LIMIT).to(tl.int32, bitcast=True)
        exponent = tl.maximum((bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32), 1)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        encode = pow2_reciprocal(scale)
    else:
        encode = tl.div_rn(LIMIT, raised)
        encode = tl.where(encode > FLOAT32_MAX, FLOAT32_MAX, encode)
        if RULE == "pow2":
            encode = pow2_floor(encode)
            scale = pow2_reciprocal(encode)
        else:
            scale = tl.div_rn(1.0, encode)
            encode = encode_from_scale(scale)
    return tl.where(usable, scale, 1.0), tl.where(usable, encode, 1.0)


@triton.jit
def saturate(x, dtype: tl.constexpr):
    """Cast float32 to FP8: beyond the largest finite value, inf included, becomes that value.

    The instruction does the clamping: cvt to e4m3x2 and e5m2x2 exists only with .satfinite, and
    NaN stays NaN (PTX ISA, "cvt"). Clamping first would cost four instructions an element, and as
    a NaN-propagating minimum and maximum it makes the compiler get transposed one-byte stores
    wrong (https://github.com/triton-lang/triton/issues/11111).
    """
    return x.to(dtype)


@triton.jit
def load_tile(x_ptr, rows, columns, M, K, stride_m, stride_k):
    """Tile at int64 ``rows`` and ``columns``; 0 outside [M, K]."""
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    offsets = rows[:, None] * stride_m + columns[None, :] * stride_k
    return tl.load(x_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS):
    """Store a tile of a contiguous [ROWS, COLUMNS] matrix."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(q_ptr + rows[:, None] * COLUMNS + columns[None, :], q, mask=mask)


@triton.jit
def store_transposed(q_ptr, q, rows, columns, ROWS, COLUMNS):
    """Store the same tile into the contiguous [COLUMNS, ROWS] transpose, coalesced along rows."""
    mask = (columns < COLUMNS)[:, None] & (rows < ROWS)[None, :]
    tl.store(q_ptr + columns[:, None] * ROWS + rows[None, :], tl.trans(q), mask=mask)


@triton.jit
def store_column_sum(sum_ptr, x, tile_m, columns, K):
    """Column sums of one tile into row ``tile_m`` of a contiguous [row tiles, K] matrix."""
    tl.store(sum_ptr + tile_m * K + columns, tl.sum(x, 0), mask=columns < K)


@triton.jit
def record_amax(slot_ptr, bits):
    """Raise a float32 slot to the largest of a tile's bit patterns."""
    # The slot only grows, so a stale value costs an atomic too many and nothing else. NO_DATA is
    # negative as an integer too, and NaN lies above every amax.
    slot = slot_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    largest_bits = tl.max(tl.max(bits, 1), 0)
    tl.atomic_max(slot, largest_bits, mask=largest_bits > tl.load(slot), sem="relaxed")


@triton.jit
def block_amax(bits, BM: tl.constexpr, BK: tl.constexpr):
    """Largest bit pattern of each BM x BK block of a tile, as float32 [tile / BM, tile / BK]."""
    TILE_M: tl.constexpr = bits.shape[0]
    TILE_K: tl.constexpr = bits.shape[1]
    blocks = tl.reshape(bits, [TILE_M // BM, BM, TILE_K // BK, BK])
    return tl.max(tl.max(blocks, 3), 1).to(tl.float32, bitcast=True)


@triton.jit
def scale_tile(tile, factor, BM: tl.constexpr, BK: tl.constexpr):
    """A tile with every BM x BK block multiplied by its element of ``factor``."""
    TILE_M: tl.constexpr = tile.shape[0]
    TILE_K: tl.constexpr = tile.shape[1]
    blocks = tl.reshape(tile, [TILE_M // BM, BM, TILE_K // BK, BK])
    return tl.reshape(blocks * factor[:, None, :, None], [TILE_M, TILE_K])


@triton.jit
def block_index(start, indices, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Which block each index of a tile falls in: one number if the tile cannot straddle blocks.

    SIZE 0 stands for a block that spans the whole dimension.
    """
    if SIZE == 0:
        index = tl.zeros([1], tl.int64)
    elif SIZE % TILE == 0:
        index = tl.zeros([1], tl.int64) + start // SIZE
    else:
        index = indices // SIZE
    return index
