"""Cast matrices on the GPU.

M and K are the rows and columns of the matrix that is cast, which a prologue may compute; ROWS and
COLUMNS are the same after padding to the alignment. Every kernel gives the bytes of
``ops/reference``. Kernels that write the transpose read their tile by words, as ``load_words``
says, so ROWS must be divisible by 4; ``cast_hopper.py`` has the kernel for blocks of two-byte
values. Where no kernel writes both orientations, each orientation is cast separately.

Sizes and strides are run-time arguments: a new token count recompiles nothing, except that triton
specialises once on whether an integer is 1 or divisible by 16, which is what allows wide accesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import SCALE_RULES, largest
from float8lab.ops import reference
from float8lab.ops.cast import empty_scale
from float8lab.ops.kernels import _common
from float8lab.ops.kernels import prologue as prologues
from float8lab.ops.kernels._common import nan_for_infinity, scale_from_amax, widen
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.cast_hopper import cast_tiles, has_tiles
from float8lab.ops.kernels.dequantize import transpose
from float8lab.ops.kernels.grouped_cast import _amax_rows_kernel as find_amaxes_of_rows
from float8lab.ops.kernels.grouped_cast import cast_groups
from float8lab.ops.kernels.prologue import Matrix, load, load_words, tile_of_program
from float8lab.ops.kernels.prologue import _amax_kernel as find_amax
from float8lab.ops.kernels.scaling import make_scales
from float8lab.ops.reference import prologue_shape, round_up

_LARGE_BLOCKS = _common.Tile(rows=128, columns=128, warps=16)
"""The tile for blocks that are taller than the usual tile: a tile must hold complete blocks."""
_FLAT = _common.Tile(rows=1, columns=4096, warps=8)
_COLUMN_MAJOR = _common.Tile(rows=64, columns=64, warps=4)
_AMAX = _common.Tile(rows=128, columns=64, warps=4)
_AMAX_OF_FLOAT32 = _common.Tile(rows=64, columns=64, warps=4)

_PARTIALS = _common.next_power_of_2(prologues.AMAX_PROGRAMS)
_AMAX_OF_PROLOGUE, _PROLOGUE_PROGRAMS = _common.Tile(rows=32, columns=128, warps=8), 32 * 132
"""The tile, and the most programs, of the kernel that takes the amax of a prologue's values."""
_ROW_CHUNK = 8192
"""A row of up to this many columns stays in registers between its amax and its cast."""

_Options = tuple[torch.dtype, tuple[int, ...], str, float, int]
"""The FP8 format, block, rule, epsilon and alignment."""


def _partial_amax(matrix: Matrix) -> Tensor:
    """Return up to ``_PARTIALS`` partial amaxes of a matrix, or the amax of a prologue, [1, 1]."""
    prologue, inputs, dtype = matrix
    shape: Sequence[int] = prologue_shape(prologue, inputs)
    if prologue:
        tile = _AMAX_OF_PROLOGUE
        amax = inputs[0].new_zeros((1, 1), dtype=torch.float32)
        programs = min(_common.grid_of(shape, tile)[0], _PROLOGUE_PROGRAMS)
    else:
        x = inputs[0]
        x = x.t() if x.stride(0) < x.stride(1) else x
        tile = _common.TILE
        if x.is_contiguous():
            x, tile = x.view(1, -1), _FLAT
        inputs, shape = [x], x.shape
        programs = min(_common.grid_of(shape, tile)[0], prologues.AMAX_PROGRAMS)
        amax = x.new_empty(programs, dtype=torch.float32)
    tensors, constants = prologues.arguments_of(prologue, inputs, dtype, tile)
    find_amax[(programs,)](*tensors, amax, *shape, None, PARTIAL=not prologue, **constants)
    return amax


@replayed
def amax_of(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, block: Sequence[int] = (-1, -1)
) -> Tensor:
    """Return the amax of each block; the reference computes those that no hot path asks for."""
    matrix, block = (prologue, inputs, dtype), tuple(block)
    fits = prologues.has_kernel(*matrix)
    if fits and block in ((1, -1), (-1, 1)):
        shape, by_row = prologue_shape(prologue, inputs), block[0] == 1
        bits = inputs[0].new_zeros(shape[0] if by_row else shape[1], dtype=torch.int32)
        _amax_rows_columns(matrix, bits, 0, prologues.tile_for(prologue), by_row, not by_row)
        return bits.view(torch.float32).view((-1, 1) if by_row else (1, -1))
    if block != (-1, -1) or not fits:
        return reference.amax(prologues.value_of(*matrix) if prologue else inputs[0], block)
    partial = _partial_amax(matrix)
    return partial if prologue else partial.amax().view(1, 1)


def _amax_rows_columns(
    matrix: Matrix, amaxes: Tensor, rows: int, tile: _common.Tile, rowwise: bool, columnwise: bool
) -> None:
    """Raise ``amaxes`` to those of a matrix: bit patterns of its rows, then of its columns."""
    prologue, inputs, _ = matrix
    shape = prologue_shape(prologue, inputs)
    if not prologue:
        tile = _AMAX if inputs[0].element_size() == 2 else _AMAX_OF_FLOAT32
    tensors, constants = prologues.arguments_of(*matrix, tile)
    find_amaxes_of_rows[_common.grid_of(shape, tile)](
        *tensors, None, amaxes, *shape, None, 0, *shape, rows,
        ROWWISE=rowwise, COLUMNWISE=columnwise, **constants,
    )  # fmt: skip


def _scales_of_rows(
    matrix: Matrix, options: _Options, tile: _common.Tile, given: Tensor | None, *, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return scales of rows and columns, the encode factors of both, and the columns' amaxes.

    The amaxes are None unless only the columns are cast, of a matrix without a prologue. If the
    amaxes of the columns are ``given``, only the columns are cast.
    """
    first, (fp8_dtype, _, rule, eps, align) = matrix[1][0], options
    rows, columns = (round_up(size, align) for size in prologue_shape(*matrix[:2]))
    amaxes = first.new_zeros(rows + columns, dtype=torch.int32)
    if given is None:
        _amax_rows_columns(matrix, amaxes, rows, tile, rowwise, columnwise=True)
    else:
        amaxes[rows:].view(torch.float32).copy_(given.view(-1))
    only_columns = given is None and not rowwise and not matrix[0]
    amax = amaxes[rows:].view(torch.float32).clone().view(-1, 1) if only_columns else None
    scale, scale_t = (first.new_empty((n, 1), dtype=torch.float32) for n in (rows, columns))
    make_scales(amaxes, scale, scale_t, fp8_dtype, rule, eps)
    return scale, scale_t, amaxes.view(torch.float32), amax


# Kernels for one orientation, with given factors or with one that the kernel makes of the amax.


@triton.jit
def _encode_of_tensor(
    given_ptr,  # fp32: [programs] partial amaxes, or [1] the amax; the encode factor without RULE
    scale_ptr, scale_t_ptr, amax_ptr,  # [1] fp32 to be written by RULE, or None
    programs, eps, LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """The encode factor of a tensor; the first program writes the scale and the amax."""
    if PARTIALS == 1:
        amax = tl.load(given_ptr)
    else:
        index = tl.arange(0, PARTIALS)
        partial = tl.load(given_ptr + index, mask=index < programs, other=0.0)
        amax = tl.max(_common.abs_bits(partial), 0).to(tl.float32, bitcast=True)
    encode = amax
    if RULE != "":
        scale, encode = scale_from_amax(amax, tl.cast(eps, tl.float32), LIMIT, RULE)
        if tl.program_id(0) == 0:
            if scale_ptr is not None:
                tl.store(scale_ptr, scale)
            if scale_t_ptr is not None:
                tl.store(scale_t_ptr, scale)
            if amax_ptr is not None:
                tl.store(amax_ptr, amax)
    return encode


@triton.jit
def write_cast(
    x,  # [TILE_M, TILE_K] any float
    tile_m, tile_k, rows, columns,
    factor_ptr,  # one per block of BM x BK, or broadcast, fp32
    slot_ptr,  # None or [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    ROWS, COLUMNS, factor_rows, factor_columns, stride_fm, stride_fk,
    BM: tl.constexpr, BK: tl.constexpr,  # 0 is the whole dimension
    DIVIDE: tl.constexpr,  # factors are decode scales
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Cast a tile with given factors, and write it."""
    m = _common.block_index(tile_m * TILE_M, rows, BM, TILE_M)
    # Every thread loads the factor, even where a tensor has only one: with a single load for all
    # threads, casts of matrices took 3 to 6 % longer on an H200.
    if BK == 0 and BM > 0:
        factor = tl.load(factor_ptr + m * stride_fm, mask=m < factor_rows, other=1.0)[:, None]
    else:
        k = _common.block_index(tile_k * TILE_K, columns, BK, TILE_K)
        mask = (m < factor_rows)[:, None] & (k < factor_columns)[None, :]
        offsets = m[:, None] * stride_fm + k[None, :] * stride_fk
        factor = tl.load(factor_ptr + offsets, mask=mask, other=1.0)
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    # One instruction handles two 2-byte values, unless the slot's amax needs float32 anyway.
    wide = nan_for_infinity(x if slot_ptr is None else x.to(tl.float32), dtype).to(tl.float32)
    y = tl.div_rn(wide, factor) if DIVIDE else wide * factor
    _common.store_tile(q_ptr, _common.saturate(y, wide, dtype), rows, columns, ROWS, COLUMNS)
    if slot_ptr is not None:
        _common.record_amax(slot_ptr, _common.abs_bits(x.to(tl.float32)))


@launched(do_not_specialize_on_alignment=["slot_ptr"])  # one kernel for all slots of a pack
def _cast_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    given_ptr,  # fp32: factors, one per block of BM x BK; or partial amaxes [programs], for RULE
    slot_ptr,  # None or [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    scale_ptr, amax_ptr,  # [1] fp32, to be made by RULE
    M, K, ROWS, COLUMNS, programs, eps, factor_rows, factor_columns, stride_fm, stride_fk,
    LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, DIVIDE: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    from_end: tl.constexpr = VALUES.function == "" and RULE != ""
    tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K, from_end)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    amaxes = (given_ptr, scale_ptr, None, amax_ptr, programs, eps)
    encode = 1.0
    if VALUES.function != "" and RULE != "":  # fewer registers than after the loads
        encode = _encode_of_tensor(*amaxes, LIMIT, RULE, PARTIALS)
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    x = load(inputs, rows, columns, tile_k, M, K, VALUES, TILE_K)
    if RULE == "":
        write_cast(
            x, tile_m, tile_k, rows, columns, given_ptr, slot_ptr, q_ptr, ROWS, COLUMNS,
            factor_rows, factor_columns, stride_fm, stride_fk, BM, BK, DIVIDE, TILE_M, TILE_K,
        )  # fmt: skip
    else:
        if VALUES.function == "":
            encode = _encode_of_tensor(*amaxes, LIMIT, RULE, PARTIALS)
        x = nan_for_infinity(x, q_ptr.dtype.element_ty).to(tl.float32)
        q = _common.saturate(x * encode, x, q_ptr.dtype.element_ty)
        _common.store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)


def _cast(
    matrix: Matrix, q: Tensor, given: Tensor, block: Sequence[int], rule: str, eps: float,
    slot: Tensor | None = None, scale: Tensor | None = None, amax: Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``q``: ``given`` holds factors, or amaxes where ``scale`` is written, too."""
    tile, makes_scales = prologues.tile_for(matrix[0]), scale is not None
    tensors, constants = prologues.arguments_of(*matrix, tile)
    programs, sizes = given.numel(), (1, 1, 1, 1)
    if not makes_scales:
        given, block = _common.broadcast_scale(given, block)
        programs, sizes = 1, (*given.shape, *given.stride())
    _cast_kernel[_common.grid_of(q.shape, tile)](
        *tensors, given, slot, q, scale, amax,
        *prologue_shape(*matrix[:2]), *q.shape, programs, eps, *sizes,
        LIMIT=largest(q.dtype), RULE=rule if makes_scales else "",
        PARTIALS=1 if programs == 1 else _PARTIALS,
        BM=0 if makes_scales else block[0], BK=0 if makes_scales else block[1],
        DIVIDE=rule == "decode", **constants,
    )  # fmt: skip


# Kernels for one orientation with a scale per row.


@triton.jit
def write_rows(
    inputs,  # as ``load`` takes them
    q_ptr,  # [ROWS, COLUMNS] fp8
    scale_ptr, amax_ptr,  # [ROWS] fp32
    tile, M, K, ROWS, COLUMNS, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr,
    SINGLE: tl.constexpr,  # a tile holds complete rows
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Quantize the rows of tile number ``tile``."""
    rows = tile.to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    chunk = tl.arange(0, TILE_K).to(tl.int64)
    x = load(inputs, rows, chunk, 0, M, K, VALUES, TILE_K).to(tl.float32)
    bits = _common.abs_bits(x)
    if not SINGLE:
        for start in range(TILE_K, K, TILE_K):
            x = load(inputs, rows, start + chunk, 0, M, K, VALUES, TILE_K).to(tl.float32)
            bits = tl.maximum(bits, _common.abs_bits(x))
    row_amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    scale, encode = scale_from_amax(row_amax, tl.cast(eps, tl.float32), LIMIT, RULE)
    tl.store(scale_ptr + rows, scale, mask=rows < ROWS)
    tl.store(amax_ptr + rows, row_amax, mask=rows < ROWS)

    for start in range(0, TILE_K if SINGLE else COLUMNS, TILE_K):
        if not SINGLE:
            x = load(inputs, rows, start + chunk, 0, M, K, VALUES, TILE_K).to(tl.float32)
        y = nan_for_infinity(x, q_ptr.dtype.element_ty) * encode[:, None]
        q = _common.saturate(y, y, q_ptr.dtype.element_ty)
        _common.store_tile(q_ptr, q, rows, start + chunk, ROWS, COLUMNS)


# With M specialised to 1 the padding rows would be constants, which ptxas loses (CUDA 12.8).
@launched(do_not_specialize=["M"])
def _quantize_rows_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    q_ptr, scale_ptr, amax_ptr, M, K, ROWS, COLUMNS, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, SINGLE: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    write_rows(
        inputs, q_ptr, scale_ptr, amax_ptr, tl.program_id(0), M, K, ROWS, COLUMNS, eps,
        LIMIT, RULE, SINGLE, VALUES, TILE_M, TILE_K,
    )  # fmt: skip


def row_tile(x: Tensor, columns: int) -> _common.Tile:
    if x.stride(0) < x.stride(1):
        return _COLUMN_MAJOR
    chunk = min(_common.next_power_of_2(columns), _ROW_CHUNK)
    rows = max(1, min(64, 4096 // chunk))
    return _common.Tile(rows=rows, columns=chunk, warps=8 if rows * chunk > 4096 else 4)


def _quantize_rows(matrix: Matrix, q: Tensor, scale: Tensor, rule: str, eps: float) -> Tensor:
    """Quantize each row into ``q`` and ``scale``, and return the amaxes."""
    tile, amax = row_tile(matrix[1][0], q.shape[1]), torch.empty_like(scale)
    tensors, constants = prologues.arguments_of(*matrix, tile)
    constants["VALUES"] = constants["VALUES"]._replace(halves=False)  # a tile spans both halves
    _quantize_rows_kernel[(_common.ceil_div(q.shape[0], tile.rows),)](
        *tensors, q, scale, amax, *prologue_shape(*matrix[:2]), *q.shape, eps,
        LIMIT=largest(q.dtype), RULE=rule, SINGLE=q.shape[1] <= tile.columns, **constants,
    )  # fmt: skip
    return amax


# Kernels for one orientation in blocks that divide a tile.


@launched
def _quantize_blocks_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    q_ptr, scale_ptr, amax_ptr, M, K, ROWS, COLUMNS, stride_sm, stride_sk, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    x = load(inputs, rows, columns, tile_k, M, K, VALUES, TILE_K)
    _common.write_blocks(
        x.to(tl.float32), tile_m, tile_k, rows, columns, q_ptr, scale_ptr, amax_ptr, ROWS, COLUMNS,
        stride_sm, stride_sk, eps, LIMIT, RULE, BM, BK,
    )  # fmt: skip


def block_tile(block: Sequence[int], tile: _common.Tile = _common.TILE) -> _common.Tile:
    return _LARGE_BLOCKS if block[0] > tile.rows else tile


def divides_a_tile(block: Sequence[int]) -> bool:
    return all(0 < size <= 128 and size & (size - 1) == 0 for size in block)


def _quantize_blocks(
    matrix: Matrix, q: Tensor, scale: Tensor, block: Sequence[int], rule: str, eps: float
) -> Tensor | None:
    """Quantize blocks into ``q`` and ``scale``; return the amaxes unless there is a prologue."""
    tile = block_tile(block, prologues.tile_for(matrix[0]))
    amax = None if matrix[0] else torch.empty_like(scale)
    tensors, constants = prologues.arguments_of(*matrix, tile)
    _quantize_blocks_kernel[_common.grid_of(q.shape, tile)](
        *tensors, q, scale, amax, *prologue_shape(*matrix[:2]), *q.shape, *scale.stride(), eps,
        LIMIT=largest(q.dtype), RULE=rule, BM=block[0], BK=block[1], **constants,
    )  # fmt: skip
    return amax


def _cast_one_orientation(
    matrix: Matrix, options: _Options, given: Tensor | None = None, slot: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return FP8 data, scales and amaxes of one orientation of a matrix that is not empty.

    The reference, plain PyTorch that runs on the GPU, casts a matrix of one column and all blocks
    but the tensor, a row, and powers of two up to 128 (no recipe has others).
    """
    (prologue, inputs, _), (fp8_dtype, block, rule, eps, align) = matrix, options
    first, makes_scales = inputs[0], rule in SCALE_RULES
    M, K = prologue_shape(prologue, inputs)
    if K == 1 or (makes_scales and block not in ((-1, -1), (1, -1)) and not divides_a_tile(block)):
        x = prologues.value_of(*matrix) if prologue else first
        rowwise = (True, False, False, given)
        q, scale, amax, *_ = reference.cast("", [x], x.dtype, *options, *rowwise, slot=slot)
        assert q is not None, "asked for"
        return q, scale, amax
    q = first.new_empty((round_up(M, align), round_up(K, align)), dtype=fp8_dtype)
    if not makes_scales:
        assert given is not None, "the rule says so"
        _cast(matrix, q, given, block, rule, eps, slot)
        return q, None, None
    if given is not None and block != (-1, -1):
        scale, encode = (empty_scale(first, q.shape, block) for _ in range(2))
        encode.copy_(given)
        make_scales(encode.view(torch.int32), scale, scale, fp8_dtype, rule, eps)
        _cast(matrix, q, encode, block, "encode", eps)
        return q, scale, None
    scale = empty_scale(first, q.shape, block)
    if block == (-1, -1):
        partial = _partial_amax(matrix) if given is None else given
        amax = None if prologue or given is not None else torch.empty_like(scale)
        _cast(matrix, q, partial, block, rule, eps, scale=scale, amax=amax)
        return q, scale, partial if prologue and given is None else amax
    if block == (1, -1):
        return q, scale, _quantize_rows(matrix, q, scale, rule, eps)
    return q, scale, _quantize_blocks(matrix, q, scale, block, rule, eps)


# Kernels for both orientations or the transpose, with a scale per tensor or per row of each.


@triton.jit
def _write_words(
    x0, x1, x2, x3, encode, encode_ptr, words, columns, q_ptr, q_t_ptr, ROWS, COLUMNS,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    """Write a tile with one factor; if PER_ROW, with those of its rows and columns in memory."""
    dtype: tl.constexpr = q_t_ptr.dtype.element_ty
    if PER_ROW:
        encode = tl.load(encode_ptr + ROWS + columns, mask=columns < COLUMNS, other=1.0)[None, :]
    w0, w1 = widen(nan_for_infinity(x0, dtype)), widen(nan_for_infinity(x1, dtype))
    w2, w3 = widen(nan_for_infinity(x2, dtype)), widen(nan_for_infinity(x3, dtype))
    packed = _common.pack_scaled(w0, w1, w2, w3, encode, dtype)
    if q_ptr is not None:
        for row in tl.static_range(4):
            rows = 4 * words + row
            if PER_ROW:
                encode = tl.load(encode_ptr + rows, mask=rows < ROWS, other=1.0)[:, None]
            x = widen(nan_for_infinity((x0, x1, x2, x3)[row], dtype))
            q = _common.saturate(x * encode, x, dtype)
            _common.store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    _common.store_words(q_t_ptr, packed, words, columns, ROWS, COLUMNS, ROWS)


@launched(do_not_specialize_on_alignment=["slot_ptr"])
def _cast_words_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    given_ptr,  # fp32: the encode factor [1], or those of rows and columns [ROWS + COLUMNS] if
    # PER_ROW, or the partial amaxes [programs] from which RULE makes scale and encode factor
    slot_ptr,  # None or [1] fp32
    q_ptr,  # None or [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr, scale_t_ptr,  # [1] fp32, to be made by RULE
    sum_ptr,  # None or [row tiles, K] fp32
    M, K, ROWS, COLUMNS, programs, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr, PER_ROW: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    from_end: tl.constexpr = VALUES.function == "" and RULE != ""
    tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K, from_end, VALUES.halves)
    amaxes = (given_ptr, scale_ptr, scale_t_ptr, None, programs, eps)
    encode = 1.0
    if VALUES.function != "" and not PER_ROW:  # fewer registers than after the loads
        encode = _encode_of_tensor(*amaxes, LIMIT, RULE, PARTIALS)
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    columns, halves = load_words(inputs, tile_m * TILE_M, tile_k, M, K, VALUES, TILE_M, TILE_K)
    words = tile_m * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    if VALUES.function == "" and not PER_ROW:
        encode = _encode_of_tensor(*amaxes, LIMIT, RULE, PARTIALS)
    for half in tl.static_range(2 if VALUES.halves else 1):
        x0, x1, x2, x3 = halves[half]
        if half == 1:
            columns += K // 2
        # The amax is recorded after the stores, which need not wait for it then, or before them
        # where column sums leave too few registers for that.
        if slot_ptr is not None and sum_ptr is not None:
            _common.record_amax(slot_ptr, _common.largest_bits(x0, x1, x2, x3))
        if sum_ptr is not None:
            _common.store_column_sum(sum_ptr, x0, x1, x2, x3, tile_m, columns, K)
        _write_words(
            x0, x1, x2, x3, encode, given_ptr, words, columns, q_ptr, q_t_ptr, ROWS, COLUMNS,
            PER_ROW,
        )  # fmt: skip
        if slot_ptr is not None and sum_ptr is None:
            _common.record_amax(slot_ptr, _common.largest_bits(x0, x1, x2, x3))


def _cast_words(
    matrix: Matrix, options: _Options, given: Tensor | None, slot: Tensor | None, *,
    rowwise: bool, column_sum: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the op's results for a matrix whose padded columns consist of complete words."""
    (prologue, inputs, _), (fp8_dtype, block, rule, eps, align) = matrix, options
    first, shape = inputs[0], prologue_shape(prologue, inputs)
    tile, amax = prologues.tile_for(prologue, words=True), None
    rows, columns = (round_up(size, align) for size in shape)
    if rule not in SCALE_RULES:
        assert given is not None, "the rule says so"
        scale = scale_t = None
    elif block == (1, -1):
        scale, scale_t, given, amax = _scales_of_rows(matrix, options, tile, given, rowwise=rowwise)
    else:
        scale, scale_t = (first.new_empty((1, 1), dtype=torch.float32) for _ in range(2))
        if given is None:
            given = _partial_amax(matrix)
            amax = given if prologue and not rowwise else None
    q = first.new_empty((rows, columns), dtype=fp8_dtype) if rowwise else None
    q_t = first.new_empty((columns, rows), dtype=fp8_dtype)
    sums = _common.empty_column_sums(first, shape, tile) if column_sum else None
    tensors, constants = prologues.arguments_of(*matrix, tile)
    is_per_tensor = block == (-1, -1) and scale is not None
    _cast_words_kernel[_common.grid_of((rows, prologues.width_of_tiles(columns, constants)), tile)](
        *tensors, given, slot, q, q_t, *((scale, scale_t) if is_per_tensor else (None, None)), sums,
        *shape, rows, columns, given.numel(), eps,
        LIMIT=largest(fp8_dtype), RULE=rule if is_per_tensor else "",
        PARTIALS=1 if given.numel() == 1 else _PARTIALS, PER_ROW=block == (1, -1),
        **constants,
    )  # fmt: skip
    return q, scale if rowwise else None, amax, q_t, scale_t, None if sums is None else sums.sum(0)


@replayed
def cast(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, fp8_dtype: torch.dtype,
    block: Sequence[int], rule: str, eps: float = 0.0, align: int = 1, rowwise: bool = True,
    columnwise: bool = False, dbias: bool = False, given: Tensor | None = None,
    offs: Tensor | None = None, plan: Tensor | None = None, slot: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    if offs is not None or inputs[0].ndim == 3:
        return cast_groups(
            (prologue, inputs, dtype), offs, plan, (fp8_dtype, tuple(block), rule, eps),
            rowwise, columnwise, dbias, given, slot,
        )  # fmt: skip
    matrix, first, block = (prologue, inputs, dtype), inputs[0], tuple(block)
    makes_scales, both_orientations = rule in SCALE_RULES, rowwise and columnwise
    options = (fp8_dtype, block, rule, eps, align)
    if not prologues.has_kernel(prologue, inputs, dtype) or (makes_scales and slot is not None):
        arguments: Any = (*options, rowwise, columnwise, dbias, given)
        return reference.cast(*matrix, *arguments, slot=slot)
    has_block_amaxes = makes_scales and given is not None and block != (-1, -1)
    uses_words = prologue or given is not None or block == (1, -1)
    if both_orientations or (columnwise and uses_words):
        if makes_scales and not has_block_amaxes and has_tiles(matrix, block, align):
            rows, columns = (round_up(size, align) for size in prologue_shape(prologue, inputs))
            *tiled, sums = cast_tiles(
                matrix, options[:4], (rows, columns, rows), rowwise=rowwise, column_sum=dbias
            )
            return *tiled, None if sums is None else sums.sum(0)
        is_per_tensor = block == (-1, -1) and rule != "decode"
        has_complete_words = round_up(prologue_shape(prologue, inputs)[0], align) % 4 == 0
        if has_complete_words and (is_per_tensor or (makes_scales and block == (1, -1))):
            return _cast_words(matrix, options, given, slot, rowwise=rowwise, column_sum=dbias)
    # Cast each orientation separately, or transpose the FP8 data where both have the same bytes.
    transposes = both_orientations and (block[0] == block[1] or not makes_scales)
    if prologue and (dbias or (columnwise and not transposes)):
        first = prologues.value_of(*matrix)
        matrix = "", [first], dtype
    column_sums = first.sum(0, dtype=torch.float32) if dbias else None
    transposed = "", [first.t()], first.dtype
    q, scale, amax = _cast_one_orientation(matrix if rowwise else transposed, options, given, slot)
    if transposes:
        scale_t = None if scale is None else scale.t().clone(memory_format=torch.contiguous_format)
        return q, scale, None, transpose(q), scale_t, column_sums
    if both_orientations:
        return q, scale, None, *_cast_one_orientation(transposed, options)[:2], column_sums
    amax = amax if reference.has_amax(prologue, block, given) else None
    results = (q, scale, amax, None, None) if rowwise else (None, None, amax, q, scale)
    return *results, column_sums
