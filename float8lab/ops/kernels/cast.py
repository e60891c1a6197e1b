"""Cast matrices on the GPU.

M and K are the rows and columns of the matrix that is cast, which a prologue may compute; ROWS and
COLUMNS are the same after padding to the alignment. Every kernel gives the bytes of
``ops/reference``. ``cast_words.py`` has the kernel that writes the transpose with a scale per
tensor or per row, and that casts small matrices in one launch; ``cast_hopper.py`` has the kernel
for blocks of two-byte values. Where no kernel writes both orientations, each is cast separately.

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
from float8lab.ops.kernels import cast_words as words
from float8lab.ops.kernels import prologue as prologues
from float8lab.ops.kernels._common import nan_for_infinity, scale_from_amax
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.cast_hopper import cast_tiles, has_tiles
from float8lab.ops.kernels.dequantize import transpose
from float8lab.ops.kernels.grouped_cast import cast_groups
from float8lab.ops.kernels.prologue import Matrix, load, tile_of_program
from float8lab.ops.kernels.scaling import make_scales
from float8lab.ops.reference import prologue_shape, round_up

_LARGE_BLOCKS = _common.Tile(rows=128, columns=128, warps=16)
"""The tile for blocks that are taller than the usual tile: a tile must hold complete blocks."""
_COLUMN_MAJOR = _common.Tile(rows=64, columns=64, warps=4)
_ROW_CHUNK = 8192
"""A row of up to this many columns stays in registers between its amax and its cast."""


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
        words.amax_rows_columns(matrix, bits, 0, prologues.tile_for(prologue), by_row, not by_row)
        return bits.view(torch.float32).view((-1, 1) if by_row else (1, -1))
    if block != (-1, -1) or not fits:
        return reference.block_amax(prologues.value_of(*matrix) if prologue else inputs[0], block)
    partial = words.partial_amax(matrix)
    return partial if prologue else partial.amax().view(1, 1)


# The kernel for one orientation with given factors.


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
    factor_ptr,  # fp32: one per block of BM x BK
    slot_ptr,  # None or [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    M, K, ROWS, COLUMNS, factor_rows, factor_columns, stride_fm, stride_fk,
    BM: tl.constexpr, BK: tl.constexpr, DIVIDE: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    columns = tile_k * TILE_K + tl.arange(0, TILE_K)
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    x = load(inputs, rows, columns, tile_k, M, K, VALUES, TILE_K)
    write_cast(
        x, tile_m, tile_k, rows, columns, factor_ptr, slot_ptr, q_ptr, ROWS, COLUMNS,
        factor_rows, factor_columns, stride_fm, stride_fk, BM, BK, DIVIDE, TILE_M, TILE_K,
    )  # fmt: skip


def _cast(
    matrix: Matrix, q: Tensor, given: Tensor, block: Sequence[int], rule: str,
    slot: Tensor | None = None,
) -> None:  # fmt: skip
    """Write ``q`` by given factors."""
    tile = prologues.tile_for(matrix[0])
    tensors, constants = prologues.arguments_of(*matrix, tile)
    given, block = _common.broadcast_scale(given, block)
    _cast_kernel[_common.grid_of(q.shape, tile)](
        *tensors, given, slot, q, *prologue_shape(*matrix[:2]), *q.shape, *given.shape,
        *given.stride(), BM=block[0], BK=block[1], DIVIDE=rule == "decode", **constants,
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
    matrix: Matrix, options: words.Options, given: Tensor | None = None, slot: Tensor | None = None
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
        _cast(matrix, q, given, block, rule, slot)
        return q, None, None
    amax = None
    if given is None and block == (-1, -1):
        amax = given = amax_of(*matrix)
    scale = empty_scale(first, q.shape, block)
    if given is not None:
        encode = torch.empty_like(scale)
        encode.copy_(given)
        make_scales(encode.view(torch.int32), scale, scale, fp8_dtype, rule, eps)
        _cast(matrix, q, encode, block, "encode")
        return q, scale, amax
    if block == (1, -1):
        return q, scale, _quantize_rows(matrix, q, scale, rule, eps)
    return q, scale, _quantize_blocks(matrix, q, scale, block, rule, eps)


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
    makes_one_scale = makes_scales and block == (-1, -1)
    uses_words = prologue or given is not None or block == (1, -1)
    if both_orientations or makes_one_scale or (columnwise and uses_words):
        if makes_scales and not has_block_amaxes and has_tiles(matrix, block, align):
            rows, columns = (round_up(size, align) for size in prologue_shape(prologue, inputs))
            *tiled, sums = cast_tiles(
                matrix, options[:4], (rows, columns, rows), rowwise=rowwise, column_sum=dbias
            )
            return *tiled, None if sums is None else sums.sum(0)
        is_per_tensor = block == (-1, -1) and rule != "decode"
        has_complete_words = round_up(prologue_shape(prologue, inputs)[0], align) % 4 == 0
        if has_complete_words and (is_per_tensor or (makes_scales and block == (1, -1))):
            outputs = {"rowwise": rowwise, "columnwise": columnwise, "column_sum": dbias}
            return words.cast_words(matrix, options, given, slot, **outputs)
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
