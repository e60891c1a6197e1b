"""What is computed tile by tile and never written: a norm, an activation, or its gradient.

M rows, K columns of the source; ROWS, COLUMNS the same after padding to the alignment. Kernels take
``load_source`` in the place of a load: those here for its values and its amax, ``source_cast.py``
and ``source_quantize.py`` to cast them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops.kernels._common import (
    Tile,
    abs_bits,
    grid_of,
    record_amax,
    store_tile,
    triton_dtype,
)
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.activation import apply_activation, derivative_of_activation
from float8lab.ops.reference import ACTIVATIONS
from float8lab.ops.reference import prologue_shape as source_shape

__all__ = [
    "amax_of",
    "arguments_of",
    "has_kernel",
    "load_source",
    "load_source_rows",
    "reads_three_tiles",
    "tile_for",
    "tile_of_program",
    "value_of",
]

# Registers decide: a gradient of a gated activation reads three tiles.
_ONE = Tile(rows=64, columns=128, warps=8)
_ONE_OF_THREE = Tile(rows=32, columns=128, warps=8)
_BOTH = Tile(rows=128, columns=64, warps=8)
_BOTH_OF_THREE = Tile(rows=64, columns=64, warps=4)

_AMAX_PROGRAMS = 512


@triton.jit
def tile_of_program(
    COLUMNS, BACKWARD: tl.constexpr, GATED: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr
):
    """Row and column of this program's tile, counted in tiles.

    The two halves of a gated activation's gradient read the same inputs: their tiles alternate, so
    that the second read finds them in the cache.
    """
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    tile_m = (tl.program_id(0) // tiles_k).to(tl.int64)
    tile_k = (tl.program_id(0) % tiles_k).to(tl.int64)
    if BACKWARD and GATED:
        half = (tiles_k + 1) // 2
        tile_k = (tile_k % 2) * half + tile_k // 2
    return tile_m, tile_k


@triton.jit
def _load(ptr, rows, columns, mask, stride_m, stride_k):
    offsets = rows[:, None] * stride_m + columns[None, :] * stride_k
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_source(
    a_ptr,  # x or h: [M, K], or [M, 2 K] where GATED and not BACKWARD
    b_ptr,  # rstd: [M] fp32; dy: [M, K], or [M, K / 2] where GATED
    c_ptr,  # weight: [K]
    d_ptr,  # mean: [M] fp32
    e_ptr,  # bias: [K]
    stride_am,
    stride_ak,
    stride_bm,
    stride_bk,
    rows,
    columns,
    tile_k,
    M,
    K,
    FUNCTION: tl.constexpr,  # "layer_norm", "rms_norm" or the function of an activation
    GATED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HALVES: tl.constexpr,  # no tile straddles the halves of a gated activation's gradient
    DTYPE: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Some rows and all columns of a tile of the source in DTYPE, 0 outside [M, K]."""
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    if FUNCTION == "layer_norm" or FUNCTION == "rms_norm":
        y = _load(a_ptr, rows, columns, mask, stride_am, stride_ak)
        if FUNCTION == "layer_norm":
            y = y - tl.load(d_ptr + rows, mask=rows < M, other=0.0)[:, None]
        rstd = tl.load(b_ptr + rows, mask=rows < M, other=0.0)
        weight = tl.load(c_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        y = y * rstd[:, None] * weight[None, :]
        if FUNCTION == "layer_norm":
            bias = tl.load(e_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
            y = y + bias[None, :]
    elif not BACKWARD:
        y = apply_activation(_load(a_ptr, rows, columns, mask, stride_am, stride_ak), FUNCTION)
        if GATED:
            y = y * _load(a_ptr, rows, columns + K, mask, stride_am, stride_ak)
    elif not GATED:
        a = _load(a_ptr, rows, columns, mask, stride_am, stride_ak)
        y = _load(b_ptr, rows, columns, mask, stride_bm, stride_bk)
        y = y * derivative_of_activation(a, FUNCTION)
    elif HALVES:
        half = K // 2
        if tile_k * TILE_K < half:
            a = _load(a_ptr, rows, columns, mask, stride_am, stride_ak)
            b = _load(a_ptr, rows, columns + half, mask, stride_am, stride_ak)
            y = _load(b_ptr, rows, columns, mask, stride_bm, stride_bk)
            y = y * b * derivative_of_activation(a, FUNCTION)
        else:
            a = _load(a_ptr, rows, columns - half, mask, stride_am, stride_ak)
            y = _load(b_ptr, rows, columns - half, mask, stride_bm, stride_bk)
            y = y * apply_activation(a, FUNCTION)
    else:
        half = K // 2
        second = columns >= half
        first = tl.where(second, columns - half, columns)
        a = _load(a_ptr, rows, first, mask, stride_am, stride_ak)
        b = _load(a_ptr, rows, first + half, mask, stride_am, stride_ak)
        y = _load(b_ptr, rows, first, mask, stride_bm, stride_bk)
        of_a = y * b * derivative_of_activation(a, FUNCTION)
        y = tl.where(second[None, :], y * apply_activation(a, FUNCTION), of_a)
    y = tl.where(mask, y, 0.0)  # of what masked loads gave
    return y.to(DTYPE)


@triton.jit
def load_source_rows(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    tile_m, tile_k, M, K,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """A tile of the source as four, see ``_rows.py``; its words and columns."""
    words = tile_m * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    y0 = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        4 * words, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
    )  # fmt: skip
    y1 = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        4 * words + 1, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
    )  # fmt: skip
    y2 = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        4 * words + 2, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
    )  # fmt: skip
    y3 = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        4 * words + 3, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
    )  # fmt: skip
    return words, columns, y0, y1, y2, y3


def arguments_of(
    kind: str, inputs: Sequence[Tensor], dtype: torch.dtype, tile: Tile
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pointers and strides, and constants, of ``load_source``."""
    first = inputs[0]
    backward = kind.endswith("_backward")
    function, gated = kind, False
    if not kind.endswith("_norm"):
        function, gated = ACTIVATIONS[kind.removesuffix("_backward")]
    second = inputs[1] if len(inputs) > 1 else first
    # x, rstd, weight, mean, bias: all but x are dense vectors; what is missing is never read.
    vectors = [v.contiguous() for v in inputs[2:]]
    pointers = [first, second, *vectors, *[first] * (3 - len(vectors))]
    strides = second.stride() if second.ndim == 2 else (1, 1)
    constants = {
        "FUNCTION": function,
        "GATED": gated,
        "BACKWARD": backward,
        "HALVES": first.shape[1] // 2 % tile.columns == 0,
        "DTYPE": triton_dtype(dtype),
        "TILE_M": tile.rows,
        "TILE_K": tile.columns,
        "num_warps": tile.warps,
        "enable_fp_fusion": False,
    }
    return (*pointers, *first.stride(), *strides), constants


def reads_three_tiles(kind: str) -> bool:
    """Whether it is the gradient of a gated activation."""
    return kind.endswith("_backward") and ACTIVATIONS[kind.removesuffix("_backward")][1]


def tile_for(kind: str, *, both: bool = False) -> Tile:
    """For one orientation, or for both."""
    if both:
        return _BOTH_OF_THREE if reads_three_tiles(kind) else _BOTH
    return _ONE_OF_THREE if reads_three_tiles(kind) else _ONE


def has_kernel(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Else the reference runs on the GPU as it is: float64, nothing to do, or a single column.

    For a matrix of one column ptxas crashes (CUDA 12.8's, in triton 3.6).
    """
    rows, columns = source_shape(kind, inputs)
    wide = torch.float64 in (dtype, *(one.dtype for one in inputs))
    return rows > 0 and columns > 1 and not wide


@launched
def _value_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    y_ptr,  # [M, K] DTYPE
    M, K,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(K, BACKWARD, GATED, TILE_M, TILE_K)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    y = load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        rows, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
    )  # fmt: skip
    store_tile(y_ptr, y, rows, columns, M, K)


@replayed
def value_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not has_kernel(kind, inputs, dtype):
        return reference.value_of(kind, inputs, dtype)
    shape = source_shape(kind, inputs)
    y = inputs[0].new_empty(shape, dtype=dtype)
    tile = tile_for(kind)
    tensors, constants = arguments_of(kind, inputs, dtype, tile)
    _value_kernel[grid_of(shape, tile)](*tensors, y, *shape, **constants)
    return y


@launched
def _amax_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    amax_ptr,  # [1] fp32, 0 at first
    M, K,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tiles_k = tl.cdiv(K, TILE_K)
    tiles = tl.cdiv(M, TILE_M) * tiles_k
    bits = tl.zeros([TILE_M, TILE_K], tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        rows = (tile // tiles_k).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
        tile_k = (tile % tiles_k).to(tl.int64)
        columns = tile_k * TILE_K + tl.arange(0, TILE_K)
        y = load_source(
            a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
            rows, columns, tile_k, M, K,
            FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
        )  # fmt: skip
        bits = tl.maximum(bits, abs_bits(y.to(tl.float32)))
    record_amax(amax_ptr, bits)


def amax_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not has_kernel(kind, inputs, dtype):
        return reference.amax(reference.value_of(kind, inputs, dtype), (-1, -1))
    shape = source_shape(kind, inputs)
    amax = inputs[0].new_zeros((1, 1), dtype=torch.float32)
    tile = tile_for(kind)
    tensors, constants = arguments_of(kind, inputs, dtype, tile)
    programs = min(grid_of(shape, tile)[0], _AMAX_PROGRAMS)
    _amax_kernel[(programs,)](*tensors, amax, *shape, **constants)
    return amax
