"""Quantize on the GPU what is computed tile by tile and never written.

M rows, K columns of the source; ROWS, COLUMNS the same after padding to the alignment. The kernels
are those of ``quantize.py`` with ``_load_source`` in the place of a load, and write one orientation
or both. Tiles are transposed before they are cast, in 2 or 4 bytes an element; where the compiler
would undo that, a second kernel transposes the bytes (``_one_pass``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    encode_from_scale,
    grid_of,
    on_device_of_first,
    record_amax,
    saturate,
    scale_from_amax,
    scale_tile,
    store_column_sum,
    store_tile,
)
from float8lab.ops.kernels.activation import apply_activation, derivative_of_activation
from float8lab.ops.kernels.norm import triton_dtype
from float8lab.ops.kernels.pair import transpose
from float8lab.ops.quantize import empty_scale
from float8lab.ops.reference import ACTIVATIONS, round_up, source_shape

__all__ = ["amax_of", "cast_of", "cast_pair_of", "quantize_of", "quantize_pair_of", "value_of"]

# Registers decide: a gradient of a gated activation reads three tiles.
_ONE = Tile(rows=64, columns=128, warps=8)
_ONE_OF_THREE = Tile(rows=32, columns=128, warps=8)
_BOTH = Tile(rows=64, columns=64, warps=8)
_LARGE_BLOCKS = Tile(rows=128, columns=128, warps=16)
_TALL_OF_THREE = Tile(rows=128, columns=32, warps=8)

_AMAX_PROGRAMS = 512


# Tiles of a source.


@triton.jit
def _tile(
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
def _load_source(
    a_ptr,  # x or h: [M, K], or [M, 2 K] where GATED and not BACKWARD
    b_ptr,  # rstd: [M] fp32; dy: [M, K], or [M, K / 2] where GATED
    c_ptr,  # weight: [K]
    d_ptr,  # mean: [M] fp32
    e_ptr,  # bias: [K]
    stride_am,
    stride_ak,
    stride_bm,
    stride_bk,
    tile_m,
    tile_k,
    M,
    K,
    FUNCTION: tl.constexpr,  # "layer_norm", "rms_norm" or the function of an activation
    GATED: tl.constexpr,
    BACKWARD: tl.constexpr,
    HALVES: tl.constexpr,  # no tile straddles the halves of a gated activation's gradient
    DTYPE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """A tile of the source in DTYPE, 0 outside [M, K]; its rows and columns."""
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
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
    return y.to(DTYPE), rows, columns


def _arguments(
    kind: str, inputs: Sequence[Tensor], dtype: torch.dtype, tile: Tile
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pointers and strides, and constants, of ``_load_source``."""
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


def _of_three(kind: str) -> bool:
    return kind.endswith("_backward") and ACTIVATIONS[kind.removesuffix("_backward")][1]


def _one_tile(kind: str) -> Tile:
    return _ONE_OF_THREE if _of_three(kind) else _ONE


def _on_device_of_source(launcher: Any) -> Any:
    """Run a launcher on the GPU of the source."""

    @on_device_of_first
    def call(_: Tensor, *args: Any) -> Any:
        return launcher(*args)

    return lambda kind, inputs, *args: call(inputs[0], kind, inputs, *args)


def _has_kernel(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Else the reference runs on the GPU as it is: float64, nothing to do, or a single column.

    For a matrix of one column ptxas crashes (CUDA 12.8's, in triton 3.6).
    """
    rows, columns = source_shape(kind, inputs)
    wide = torch.float64 in (dtype, *(one.dtype for one in inputs))
    return rows > 0 and columns > 1 and not wide


def _one_pass(dtype: torch.dtype, block: tuple[int, ...]) -> bool:
    """Whether one kernel may write both orientations.

    Under one scale the cast of the transpose has the values of the cast itself. The compiler then
    casts once and transposes bytes, unless the cast begins with a 2-byte value, and Triton 3.6
    permutes those bytes (as it does in ``quantize.py``). Square blocks are as there.
    """
    return block[0] != block[1] or (block == (-1, -1) and dtype.itemsize == 2)


@triton.jit
def _value_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    y_ptr,  # [M, K] DTYPE
    M, K,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = _tile(K, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = _load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        tile_m, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
    )  # fmt: skip
    store_tile(y_ptr, y, rows, columns, M, K)


@_on_device_of_source
def value_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not _has_kernel(kind, inputs, dtype):
        return reference.value_of(kind, inputs, dtype)
    shape = source_shape(kind, inputs)
    y = inputs[0].new_empty(shape, dtype=dtype)
    tile = _one_tile(kind)
    tensors, constants = _arguments(kind, inputs, dtype, tile)
    _value_kernel[grid_of(shape, tile)](*tensors, y, *shape, **constants)
    return y


# Per tensor.


@triton.jit
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
        y, _, _ = _load_source(
            a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
            (tile // tiles_k).to(tl.int64), (tile % tiles_k).to(tl.int64), M, K,
            FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
        )  # fmt: skip
        bits = tl.maximum(bits, abs_bits(y.to(tl.float32)))
    record_amax(amax_ptr, bits)


@_on_device_of_source
def amax_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    if not _has_kernel(kind, inputs, dtype):
        return reference.amax_of(kind, inputs, dtype)
    shape = source_shape(kind, inputs)
    amax = inputs[0].new_zeros((1, 1), dtype=torch.float32)
    tile = _one_tile(kind)
    tensors, constants = _arguments(kind, inputs, dtype, tile)
    programs = min(grid_of(shape, tile)[0], _AMAX_PROGRAMS)
    _amax_kernel[(programs,)](*tensors, amax, *shape, **constants)
    return amax


@triton.jit(do_not_specialize_on_alignment=["slot_ptr"])  # or each place in a pack has a kernel
def _cast_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    given_ptr,  # [1] fp32: the scale, or the amax that makes it
    slot_ptr,  # [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [1] fp32
    scale_t_ptr,  # [1] fp32
    sum_ptr,  # [row tiles, K] fp32
    M, K, ROWS, COLUMNS, eps,
    FROM_AMAX: tl.constexpr, LIMIT: tl.constexpr, RULE: tl.constexpr, HAS_SLOT: tl.constexpr,
    WRITE: tl.constexpr, TRANSPOSE: tl.constexpr, COLUMN_SUM: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = _tile(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = _load_source(
        a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
        tile_m, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
    )  # fmt: skip
    given = tl.load(given_ptr)
    if FROM_AMAX:
        scale, encode = scale_from_amax(given, tl.cast(eps, tl.float32), LIMIT, RULE)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
    else:
        encode = encode_from_scale(given)
    if HAS_SLOT:
        record_amax(slot_ptr, abs_bits(y.to(tl.float32)))
    if COLUMN_SUM:
        store_column_sum(sum_ptr, y.to(tl.float32), tile_m, columns, K)
    if WRITE:
        q = saturate(y.to(tl.float32) * encode, q_ptr.dtype.element_ty)
        store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    if TRANSPOSE:
        q = saturate(tl.trans(y).to(tl.float32) * encode, q_t_ptr.dtype.element_ty)
        store_tile(q_t_ptr, q, columns, rows, COLUMNS, ROWS)


class _Outputs:
    """FP8 data in one orientation or both, and partial column sums."""

    def __init__(
        self,
        kind: str,
        inputs: Sequence[Tensor],
        fp8_dtype: torch.dtype,
        align: int,
        *,
        write: bool,
        transpose: bool,
        column_sum: bool,
        tile: Tile,
    ) -> None:
        first = inputs[0]
        self.shape = source_shape(kind, inputs)
        self.rows, self.columns = (round_up(size, align) for size in self.shape)
        q = first.new_empty((self.rows, self.columns) if write else (0,), dtype=fp8_dtype)
        shape = (self.columns, self.rows) if transpose else (0,)
        self.q, self.q_t = q, first.new_empty(shape, dtype=fp8_dtype)
        tiles = triton.cdiv(self.shape[0], tile.rows) if column_sum else 0
        size = (tiles, self.shape[1] if column_sum else 0)
        self.sums = first.new_empty(size, dtype=torch.float32)
        self.grid = grid_of((self.rows, self.columns), tile)
        self.flags = {"WRITE": write, "TRANSPOSE": transpose, "COLUMN_SUM": column_sum}

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (*self.shape, self.rows, self.columns)

    def total(self) -> Tensor:
        return self.sums.sum(0) if self.sums.numel() else self.sums.view(-1)


def _cast(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    given: Tensor,
    slot: Tensor | None,
    out: _Outputs,
    tile: Tile,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    rule: str = "fp32",
    eps: float = 0.0,
) -> None:
    """Cast by a given scale or, to return ``scales``, by a given amax."""
    tensors, constants = _arguments(kind, inputs, dtype, tile)
    _cast_kernel[out.grid](
        *tensors,
        given,
        given if slot is None else slot,
        out.q,
        out.q_t,
        *(scales or (given, given)),
        out.sums,
        *out.sizes,
        eps,
        FROM_AMAX=scales is not None,
        LIMIT=largest(out.q.dtype),
        RULE=rule,
        HAS_SLOT=slot is not None,
        **out.flags,
        **constants,
    )


@_on_device_of_source
def cast_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    scale: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
) -> Tensor:
    if not _has_kernel(kind, inputs, dtype):
        return reference.cast_of(
            kind, inputs, dtype, transposed, scale, amax_slot, fp8_dtype, align
        )
    tile = _BOTH if transposed else _one_tile(kind)
    out = _Outputs(
        kind, inputs, fp8_dtype, align,
        write=not transposed, transpose=transposed, column_sum=False, tile=tile,
    )  # fmt: skip
    _cast(kind, inputs, dtype, scale, amax_slot, out, tile)
    return out.q_t if transposed else out.q


@_on_device_of_source
def cast_pair_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    scale: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _has_kernel(kind, inputs, dtype):
        return reference.cast_pair_of(
            kind, inputs, dtype, scale, amax_slot, fp8_dtype, align, column_sum
        )
    one_pass = _one_pass(dtype, (-1, -1))
    tile = _BOTH if one_pass else _one_tile(kind)
    out = _Outputs(
        kind, inputs, fp8_dtype, align,
        write=True, transpose=one_pass, column_sum=column_sum, tile=tile,
    )  # fmt: skip
    _cast(kind, inputs, dtype, scale, amax_slot, out, tile)
    return out.q, out.q_t if one_pass else transpose(out.q, 1), out.total()


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
    tile_m, tile_k = _tile(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = _load_source(
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
    tile_m, tile_k = _tile(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = _load_source(
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
    tile_m, tile_k = _tile(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = _load_source(
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
    tile = _BOTH if transpose else _one_tile(kind)
    if block[0] > tile.rows or (transpose and max(block) > tile.rows):
        tile = _LARGE_BLOCKS
        if _of_three(kind) and block[0] <= _ONE_OF_THREE.rows:
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
    out = _Outputs(
        kind, inputs, fp8_dtype, align,
        write=write, transpose=transpose, column_sum=column_sum, tile=tile,
    )  # fmt: skip
    scale = empty_scale(first, (out.rows, out.columns), block)
    scale_t = empty_scale(first, (out.columns, out.rows), block)
    if block == (-1, -1):
        amax = amax_of(kind, inputs, dtype) if known_amax is None else known_amax
        _cast(
            kind, inputs, dtype, amax, None, out, tile,
            scales=(scale, scale_t), rule=rule, eps=eps,
        )  # fmt: skip
        return out.q, scale, out.q_t, scale_t, out.total()
    tensors, constants = _arguments(kind, inputs, dtype, tile)
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


@_on_device_of_source
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
    if not _has_kernel(kind, inputs, dtype) or not _has_kernel_for(tuple(block)):
        return reference.quantize_of(
            kind, inputs, dtype, transposed, known_amax, fp8_dtype, block, rule, eps, align
        )
    q, scale, q_t, scale_t, _ = _quantize(
        kind, inputs, dtype, known_amax, fp8_dtype, tuple(block), rule, eps, align,
        write=not transposed, transpose=transposed, column_sum=False,
    )  # fmt: skip
    return (q_t, scale_t) if transposed else (q, scale)


@_on_device_of_source
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
    if not _has_kernel(kind, inputs, dtype) or not _has_kernel_for(tuple(block)):
        return reference.quantize_pair_of(
            kind, inputs, dtype, fp8_dtype, block, rule, eps, align, column_sum
        )
    one_pass = _one_pass(dtype, tuple(block))
    q, scale, q_t, scale_t, total = _quantize(
        kind, inputs, dtype, None, fp8_dtype, tuple(block), rule, eps, align,
        write=True, transpose=one_pass, column_sum=column_sum,
    )  # fmt: skip
    if not one_pass:
        q_t, scale_t = transpose(q, 1), scale.t().clone(memory_format=torch.contiguous_format)
    return q, scale, q_t, scale_t, total
