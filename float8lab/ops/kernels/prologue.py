"""Prologues in kernels: a matrix itself, a norm, an activation, or the gradient of one.

M rows, K columns of what is loaded; COLUMNS the same after padding to the alignment. Kernels that
cast call ``load`` instead of ``tl.load``. The values are those of ``ops/reference/prologue.py``;
only the last bits of a sigmoid may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._common import INTERPRETED, abs_bits, store_tile
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.dequantize import dequantize
from float8lab.ops.reference import ACTIVATIONS, as_matrix, prologue_shape

# Registers limit the tile of a gated activation's gradient, which is computed from three tiles.
_TILE_OF_PROLOGUE = _common.Tile(rows=64, columns=128, warps=8)
_TILE_OF_GATED_GRADIENT = _common.Tile(rows=32, columns=128, warps=8)
WORDS_OF_MATRIX = _common.Tile(rows=128, columns=64, warps=4)
"""A column of this tile is 128 bytes of the transpose, a cache line."""
_WORDS_OF_PROLOGUE = _common.Tile(rows=128, columns=64, warps=8)
_WORDS_OF_GATED_GRADIENT = _common.Tile(rows=64, columns=64, warps=4)
AMAX_PROGRAMS = 6 * 132
"""The most partial amaxes: six programs per multiprocessor of an H200, all resident."""


Matrix = tuple[str, Sequence[Tensor], torch.dtype]
"""A prologue, its inputs and the dtype of its values."""
Options = tuple[torch.dtype, tuple[int, ...], str, float]
"""The FP8 format, block, rule and epsilon of a cast."""


class Values(NamedTuple):
    """Which values ``load`` computes in a kernel, as constants."""

    function: str
    """``""``, ``"permute"``, ``"multiply"``, a norm, or the function of an activation."""
    gated: bool
    backward: bool
    halves: bool
    """No tile straddles the halves of a gated activation's gradient."""
    dtype: tl.dtype
    """The dtype of the values, or of the matrix itself if there is no prologue."""


RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def _sigmoid(x):
    """Use the instruction for reciprocals (error 1 ulp); a division takes a dozen instructions."""
    y = tl.exp(-x) + 1.0
    if INTERPRETED:
        y = tl.div_rn(1.0, y)
    else:
        y = tl.inline_asm_elementwise(
            RECIPROCAL, "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


@triton.jit
def _inner(x, FUNCTION: tl.constexpr):
    """Compute ``g(x)`` for those functions that are ``x * sigmoid(g(x))``."""
    if FUNCTION == "gelu":
        x = x * (x * x * 0.044715 + 1.0) * 1.5957691216057308
    elif FUNCTION == "qgelu":
        x = x * 1.702
    return x


@triton.jit
def apply_activation(x, FUNCTION: tl.constexpr):
    if FUNCTION == "relu" or FUNCTION == "srelu":
        y = tl.where(x <= 0, 0.0, x)
        if FUNCTION == "srelu":
            y = y * y
    elif FUNCTION == "sigmoid":
        y = _sigmoid(x)
    else:
        y = x * _sigmoid(_inner(x, FUNCTION))
    return y


@triton.jit
def derivative_of_activation(x, FUNCTION: tl.constexpr):
    if FUNCTION == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif FUNCTION == "srelu":
        y = tl.where(x <= 0, 0.0, x + x)
    elif FUNCTION == "sigmoid":
        s = _sigmoid(x)
        y = s * (1.0 - s)
    else:
        s = _sigmoid(_inner(x, FUNCTION))
        y = x * (s * (1.0 - s))
        if FUNCTION == "gelu":
            y = y * ((x * x * 0.134145 + 1.0) * 1.5957691216057308)
        elif FUNCTION == "qgelu":
            y = y * 1.702
        y = s + y
    return y


@triton.jit
def tile_of_program(
    COLUMNS, VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
    FROM_END: tl.constexpr = False, HALVES: tl.constexpr = False,
):  # fmt: skip
    """Return row and column of this program's tile, in tiles; with HALVES in the first half."""
    # FROM_END: the cache still holds the end of a matrix that another kernel has just read. The two
    # halves of a gated activation's gradient are computed from the same inputs: their tiles
    # alternate, so that the second read finds the inputs in the cache.
    tiles_k = tl.cdiv(COLUMNS // 2 if HALVES else COLUMNS, TILE_K)
    tile = tl.program_id(0)
    if FROM_END:
        tile = tl.num_programs(0) - 1 - tile
    tile_m = (tile // tiles_k).to(tl.int64)
    tile_k = (tile % tiles_k).to(tl.int64)
    if VALUES.backward and VALUES.gated and not HALVES:
        half = (tiles_k + 1) // 2
        tile_k = (tile_k % 2) * half + tile_k // 2
    return tile_m, tile_k


@triton.jit
def _load(ptr, rows, columns, mask, stride_m, stride_k):
    offsets = rows[:, None] * stride_m + columns[None, :] * stride_k
    return tl.load(ptr + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_clamped(
    h_ptr, dy_ptr, stride_hm, stride_bm, stride_bk, rows, columns, mask, BACKWARD: tl.constexpr
):  # fmt: skip
    """Compute GPT-OSS's activation of pairs, or its gradient; a pair is read as one word."""
    VALUE: tl.constexpr = h_ptr.dtype.element_ty
    BITS: tl.constexpr = VALUE.primitive_bitwidth
    INTEGER: tl.constexpr = tl.int16 if BITS == 16 else tl.int32
    WORD: tl.constexpr = tl.int32 if BITS == 16 else tl.int64
    pair = columns // 2 if BACKWARD else columns
    offsets = rows[:, None] * (stride_hm // 2) + pair[None, :]
    words = tl.load(h_ptr.to(tl.pointer_type(WORD), bitcast=True) + offsets, mask=mask, other=0)
    a = words.to(INTEGER).to(VALUE, bitcast=True).to(tl.float32)
    b = (words >> BITS).to(INTEGER).to(VALUE, bitcast=True).to(tl.float32)
    least = tl.where(a > 7.0, 7.0, a)
    factor = tl.where(b > 7.0, 7.0, tl.where(b < -7.0, -7.0, b)) + 1.0
    if BACKWARD:
        y = _load(dy_ptr, rows, pair, mask, stride_bm, stride_bk)
        s = _sigmoid(least * 1.702)
        da = y * factor * (s + least * (s * (1.0 - s)) * 1.702)
        da = tl.where(a > 7.0, 0.0, da)
        db = tl.where((b > 7.0) | (b < -7.0), 0.0, y * (least * s))
        y = tl.where((columns % 2 == 0)[None, :], da, db)
    else:
        y = apply_activation(least, "qgelu") * factor
    return y


@triton.jit
def load_halves(
    inputs,  # as in ``load``: h [M, 2 HALF] and dy [M, HALF]
    rows, columns, M, HALF, VALUES: tl.constexpr,
):  # fmt: skip
    """Compute a gated activation's gradient in ``columns`` of its first and of its second half.

    This reads each of the three inputs once. If each half were computed separately, two inputs
    would be read twice.
    """
    FUNCTION: tl.constexpr = VALUES.function
    h_ptr, dy_ptr, _, _, _, stride_hm, stride_hk, stride_bm, stride_bk = inputs
    mask = (rows < M)[:, None] & (columns < HALF)[None, :]
    a = _load(h_ptr, rows, columns, mask, stride_hm, stride_hk)
    b = _load(h_ptr, rows, columns + HALF, mask, stride_hm, stride_hk)
    y = _load(dy_ptr, rows, columns, mask, stride_bm, stride_bk)
    da = y * b * derivative_of_activation(a, FUNCTION)
    return da.to(VALUES.dtype), (y * apply_activation(a, FUNCTION)).to(VALUES.dtype)


@triton.jit
def load(
    inputs,  # pointers and strides, as ``arguments_of`` gives them
    rows, columns, tile_k, M, K, VALUES: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Load or compute rows and columns of a tile in its dtype, 0 outside [M, K]; int64 indices."""
    # a: x or h, [M, K], or [M, 2 K] where gated and not backward; x, [T, K], to permute
    # b: rstd, [M] fp32; dy, [M, K], or [M, K / 2] where gated; token, [M] int32; or a factor
    # c, d, e: weight, [K]; mean, [M] fp32; bias, [K]
    FUNCTION: tl.constexpr = VALUES.function
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk = inputs
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    if FUNCTION == "" or FUNCTION == "permute":
        if FUNCTION == "permute":
            rows = tl.load(b_ptr + rows, mask=rows < M, other=-1).to(tl.int64)
            mask = mask & (rows >= 0)[:, None]
        offsets = rows[:, None] * stride_am + columns[None, :] * stride_ak
        y = tl.load(a_ptr + offsets, mask=mask, other=0.0)
    elif FUNCTION == "multiply":
        y = _load(a_ptr, rows, columns, mask, stride_am, stride_ak)
        y = y * _load(b_ptr, rows, columns, mask, stride_bm, stride_bk)
    elif FUNCTION == "layer_norm" or FUNCTION == "rms_norm":
        y = _load(a_ptr, rows, columns, mask, stride_am, stride_ak)
        if FUNCTION == "layer_norm":
            y = y - tl.load(d_ptr + rows, mask=rows < M, other=0.0)[:, None]
        rstd = tl.load(b_ptr + rows, mask=rows < M, other=0.0)
        weight = tl.load(c_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
        y = y * rstd[:, None] * weight[None, :]
        if FUNCTION == "layer_norm":
            bias = tl.load(e_ptr + columns, mask=columns < K, other=0.0).to(tl.float32)
            y = y + bias[None, :]
    elif FUNCTION == "clamped":
        y = _load_clamped(
            a_ptr, b_ptr, stride_am, stride_bm, stride_bk, rows, columns, mask, VALUES.backward
        )
    elif not VALUES.backward:
        y = apply_activation(_load(a_ptr, rows, columns, mask, stride_am, stride_ak), FUNCTION)
        if VALUES.gated:
            y = y * _load(a_ptr, rows, columns + K, mask, stride_am, stride_ak)
    elif not VALUES.gated:
        a = _load(a_ptr, rows, columns, mask, stride_am, stride_ak)
        y = _load(b_ptr, rows, columns, mask, stride_bm, stride_bk)
        y = y * derivative_of_activation(a, FUNCTION)
    elif VALUES.halves:
        half = K // 2
        if tile_k * TILE_K < half:
            y, _ = load_halves(inputs, rows, columns, M, half, VALUES)
        else:
            _, y = load_halves(inputs, rows, columns - half, M, half, VALUES)
    else:
        half = K // 2
        second = columns >= half
        first = tl.where(second, columns - half, columns)
        a = _load(a_ptr, rows, first, mask, stride_am, stride_ak)
        b = _load(a_ptr, rows, first + half, mask, stride_am, stride_ak)
        y = _load(b_ptr, rows, first, mask, stride_bm, stride_bk)
        da = y * b * derivative_of_activation(a, FUNCTION)
        y = tl.where(second[None, :], y * apply_activation(a, FUNCTION), da)
    if FUNCTION != "":
        y = tl.where(mask, y, 0.0).to(VALUES.dtype)  # a function of 0 may not be 0
    return y


@triton.jit
def load_bits(
    inputs, rows, columns, tile_k, M, K,
    VALUES: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return the ``abs_bits`` of a tile, or the larger bits of the two tiles of both halves."""
    if VALUES.halves:
        y, z = load_halves(inputs, rows, columns, M, K // 2, VALUES)
        bits = tl.maximum(abs_bits(y.to(tl.float32)), abs_bits(z.to(tl.float32)))
    else:
        y = load(inputs, rows, columns, tile_k, M, K, VALUES, TILE_K)
        bits = abs_bits(y.to(tl.float32))
    return bits


@triton.jit
def load_words(
    inputs, row, tile_k, M, K,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return the columns of a tile that begins at ``row``, and the tile as four smaller tiles: its
    rows 0, 4, 8 ..., its rows 1, 5, 9 ..., and so on.

    Four values at the same place of the four tiles are neighbours in a column. In FP8 they are the
    bytes of one word of the transpose, so that kernels transpose words, not bytes. With halves,
    there are two such tiles, in the same columns of the first and of the second half.
    """
    rows = row + 4 * tl.arange(0, TILE_M // 4)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    first = ()
    second = ()
    for i in tl.static_range(4):
        if VALUES.halves:
            y, z = load_halves(inputs, rows + i, columns, M, K // 2, VALUES)
            second += (z,)  # type: ignore[assignment]
        else:
            y = load(inputs, rows + i, columns, tile_k, M, K, VALUES, TILE_K)
        first += (y,)  # type: ignore[assignment]
    return columns, (first, second)


def arguments_of(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, tile: _common.Tile
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return pointers and strides, and constants, for ``load``, which reads no None pointer."""
    first = inputs[0]
    function, gated = ACTIVATIONS.get(prologue.removesuffix("_backward"), (prologue, False))
    backward = prologue.endswith("_backward")
    is_split = backward and gated and function != "clamped"
    if function == "clamped":  # each pair of neighbours in a row is read as one word
        has_words = first.stride(1) == 1 and first.stride(0) % 2 == 0
        if not has_words or first.data_ptr() % (2 * first.element_size()):
            first = first.clone(memory_format=torch.contiguous_format)
    # Inputs: x, rstd, weight, mean, bias (all but x dense vectors); x and token; or h and dy.
    second = inputs[1] if len(inputs) > 1 else None
    vectors = [v.contiguous() for v in inputs[2:]]
    strides = second.stride() if second is not None and second.ndim == 2 else (1, 1)
    constants = {
        "VALUES": Values(
            function, gated, backward, is_split and first.shape[1] // 2 % tile.columns == 0,
            _common.TRITON_DTYPES[dtype if prologue else first.dtype],
        ),
        **tile.constants, "enable_fp_fusion": False,
    }  # fmt: skip
    pointers = (first, second, *vectors, *[None] * (3 - len(vectors)))
    return (*pointers, *first.stride(), *strides), constants


def width_of_tiles(columns: int, constants: dict[str, Any]) -> int:
    """Return how many columns tiles cover: half of them if a program has a tile of each half."""
    return columns // 2 if constants["VALUES"].halves else columns


def tile_for(prologue: str, *, words: bool = False) -> _common.Tile:
    """Return the tile of a program, which casts one orientation or reads by words."""
    backward = prologue.endswith("_backward")
    if backward and ACTIVATIONS[prologue.removesuffix("_backward")][1]:  # it reads three tiles
        return _WORDS_OF_GATED_GRADIENT if words else _TILE_OF_GATED_GRADIENT
    if words:
        return _WORDS_OF_PROLOGUE if prologue else WORDS_OF_MATRIX
    return _TILE_OF_PROLOGUE if prologue else _common.TILE


def has_kernel(prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether a kernel can do this; the reference takes float64, one column, or no elements."""
    # The ptxas of CUDA 12.8, in triton 3.6, crashes for a matrix of one column.
    *rows, columns = prologue_shape(prologue, inputs)
    wide = torch.float64 in (dtype, *(tensor.dtype for tensor in inputs))
    return 0 not in rows and columns > 1 and not wide


@launched
def _amax_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    amax_ptr,  # fp32: [programs], the amax of all tiles that each visits; or [1], 0 at first
    M, K,
    stride_ae,  # of a batch, with amaxes [E, programs of a matrix]; None: one matrix
    PARTIAL: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    if stride_ae is not None:
        a_ptr += tl.program_id(1).to(tl.int64) * stride_ae
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    width = K // 2 if VALUES.halves else K
    tiles = tl.cdiv(M, TILE_M) * tl.cdiv(width, TILE_K)
    bits = tl.zeros([TILE_M, TILE_K], tl.int32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _, tile_k, rows, columns = _common.tile_indices(width, TILE_M, TILE_K, tile)
        tile_bits = load_bits(inputs, rows, columns, tile_k, M, K, VALUES, TILE_K)
        bits = tl.maximum(bits, tile_bits)
    if PARTIAL:
        amax = tl.max(tl.max(bits, 1), 0).to(tl.float32, bitcast=True)
        if stride_ae is not None:
            amax_ptr += tl.program_id(1) * tl.num_programs(0)
        tl.store(amax_ptr + tl.program_id(0), amax)
    else:
        _common.record_amax(amax_ptr, bits)


@launched
def _value_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    y_ptr,  # [M, K] VALUES.dtype
    M, K,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(K, VALUES, TILE_M, TILE_K)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    y = load(inputs, rows, columns, tile_k, M, K, VALUES, TILE_K)
    store_tile(y_ptr, y, rows, columns, M, K)


@replayed
def value_of(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, block: Sequence[int] = (),
    event: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if prologue == "dequantize":
        return dequantize(inputs[0], inputs[1], block, dtype)
    if not has_kernel(prologue, inputs, dtype):
        return reference.value_of(prologue, inputs, dtype)
    y = inputs[0].new_empty(prologue_shape(prologue, inputs), dtype=dtype)
    if inputs[0].ndim != 2:  # inputs of an activation
        inputs = [as_matrix(x) for x in inputs]
    shape, tile = prologue_shape(prologue, inputs), tile_for(prologue)
    tensors, constants = arguments_of(prologue, inputs, dtype, tile)
    _value_kernel[_common.grid_of(shape, tile)](*tensors, y, *shape, **constants)
    return y
