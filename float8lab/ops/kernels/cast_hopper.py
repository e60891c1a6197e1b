"""Cast a matrix or a prologue in both orientations, in blocks of one row, from shared memory.

M rows, K columns; ROWS, COLUMNS the same after padding to the alignment. A program keeps its tile
of 128 x 128 values of two bytes in shared memory and reads it by rows for the matrix and by columns
for the transpose. So a thread holds few values at a time, many threads share a multiprocessor, and
amaxes are mostly reduced within a warp. This needs layouts of our choice, hence Gluon. A register
holds a pair of neighbours in a row; one instruction, new in Hopper, takes the maxima of both. On
older GPUs, and for float32, each orientation is cast separately.

Where the rows are in groups, a plan says which rows a tile has; no tile has rows of two groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from float8lab.formats import largest
from float8lab.ops.cast import empty_scale
from float8lab.ops.declare import capability_of
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels.prologue import Matrix, Options, arguments_of, load, tile_of_program
from float8lab.ops.reference import prologue_shape

_TILE = _common.Tile(rows=128, columns=128, warps=8)
ROWS_OF_PROLOGUE = gl.constexpr(32)
"""Rows computed at a time: the inputs of a single value take up to three registers."""
_REGISTERS = 80
"""Most registers of a thread, so that three programs of 256 threads share a multiprocessor."""


# Functions of pairs: an int32 holds two values, the first in its lower half.


@gluon.jit
def _first(pairs, DTYPE: gl.constexpr):
    if gl.bfloat16 == DTYPE:
        value = (pairs << 16).to(gl.float32, bitcast=True)
    else:
        value = (pairs & 0xFFFF).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return value


@gluon.jit
def _second(pairs, DTYPE: gl.constexpr):
    if gl.bfloat16 == DTYPE:
        value = (pairs & -65536).to(gl.float32, bitcast=True)
    else:
        value = (pairs >> 16).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return value


@gluon.jit
def _max_of_pairs(a, b):
    """Take the maxima of first values and of second values, by bit pattern: NaN is above inf."""
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _paired(first, second):
    halves = [first.to(gl.int16, bitcast=True), second.to(gl.int16, bitcast=True)]
    return gl.inline_asm_elementwise(
        "mov.b32 $0, {$1, $2};", "=r,h,h", halves, dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _nan_for_infinity(pairs, DTYPE: gl.constexpr, fp8: gl.constexpr):
    """Apply ``nan_for_infinity`` to both values of each pair."""
    if gl.float8e4nv == fp8:
        CODE: gl.constexpr = _common.NAN_FOR_BF16 if gl.bfloat16 == DTYPE else _common.NAN_FOR_FP16
        pairs = gl.inline_asm_elementwise(
            CODE, "=r,r", [pairs], dtype=gl.int32, is_pure=True, pack=1
        )
    return pairs


@gluon.jit
def _words(x, encode, fp8: gl.constexpr):
    """Pack the FP8 data of every four neighbours in a column: [rows / 4, columns] int32."""
    ROWS: gl.constexpr = x.shape[0] * x.shape[1]
    COLUMNS: gl.constexpr = x.shape[2]
    y = gl.reshape(x * encode[:, None, :], [ROWS // 4, 2, 2, COLUMNS])
    even, odd = gl.split(gl.permute(y, [0, 3, 1, 2]))
    y0, y2 = gl.split(even)
    y1, y3 = gl.split(odd)
    return _common.pack(y0, y1, y2, y3, y0, y1, y2, y3, fp8)


# Layouts. By rows, 16 lanes hold a row; by columns, one thread holds 32 rows of a pair.


@gluon.constexpr_function
def _layout_of_scales(across):
    """Layout of scales [128, across]: one thread has each, in the warp that holds its row."""
    rows, lanes = [[16, 0], [32, 0], [64, 0]], []
    block_bits = across.bit_length() - 1
    for _ in range(4 - block_bits):
        lanes.append(rows.pop(0) if rows else [0, 0])
    for bit in range(block_bits):
        lanes.append([0, 1 << bit])
    return gl.DistributedLinearLayout(
        rows, [*lanes, [1, 0]], [[2, 0], [4, 0], [8, 0]], [], [128, across]
    )


@gluon.jit
def _write_rows(
    pairs, row, tile_k, rows_left, columns_left, q_ptr, scale_ptr, COLUMNS, stride_sm, stride_sk,
    eps, LIMIT: gl.constexpr, RULE: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Cast and write the matrix. ``pairs``: [128, 64] by rows."""
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = 128 // BLOCK
    SCALES: gl.constexpr = _layout_of_scales(ACROSS)
    BY_BLOCK: gl.constexpr = gl.BlockedLayout(
        [1, 1, 4], [2, ACROSS, 16 // ACROSS], [WARPS, 1, 1], [2, 1, 0]
    )
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    pairs = gl.reshape(pairs, [128, ACROSS, BLOCK // 2])
    amaxes = gl.convert_layout(gl.reduce(pairs & 0x7FFF7FFF, 2, _max_of_pairs), SCALES)
    amaxes = _first(gl.maximum(amaxes & 0xFFFF, amaxes >> 16), DTYPE)
    scale, encode = _common.scale_from_amax(amaxes, eps, LIMIT, RULE)
    rows = gl.arange(0, 128, gl.SliceLayout(1, SCALES))[:, None]
    k = gl.arange(0, ACROSS, gl.SliceLayout(0, SCALES))[None, :]
    inside = (rows < rows_left) & (k * BLOCK < columns_left)
    scale_ptr += row * stride_sm + tile_k * ACROSS * stride_sk
    gl.store(scale_ptr + rows * stride_sm + k * stride_sk, scale, mask=inside)

    encode = gl.convert_layout(encode, gl.SliceLayout(2, BY_BLOCK))[:, :, None]
    pairs = gl.convert_layout(pairs, BY_BLOCK, assert_trivial=True)
    fp8: gl.constexpr = q_ptr.dtype.element_ty
    pairs = _nan_for_infinity(pairs, DTYPE, fp8)
    encoded = gl.join(_first(pairs, DTYPE) * encode, _second(pairs, DTYPE) * encode)
    y = gl.reshape(encoded, [128, 128])
    q = _common.saturate(y, y, fp8)
    q = gl.convert_layout(q, BY_ROW, assert_trivial=True)
    rows = gl.arange(0, 128, gl.SliceLayout(1, BY_ROW))
    columns = gl.arange(0, 128, gl.SliceLayout(0, BY_ROW))
    # The mask counts eights: the compiler sees that either 8 bytes or none are stored.
    inside = (rows < rows_left)[:, None] & (columns // 8 < columns_left // 8)[None, :]
    q_ptr += row * COLUMNS + tile_k * 128
    gl.store(q_ptr + rows.to(gl.int64)[:, None] * COLUMNS + columns[None, :], q, mask=inside)


@gluon.jit
def _write_columns(
    pairs, tile_m, tile_k, rows_left, columns_left, q_t_ptr, scale_t_ptr, ROWS, stride_tk,
    stride_tm, eps,
    LIMIT: gl.constexpr, RULE: gl.constexpr, BLOCK: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    """Cast and write the transpose. ``pairs``: [128, 64] by columns."""
    DOWN: gl.constexpr = 128 // BLOCK
    fp8: gl.constexpr = q_t_ptr.dtype.element_ty
    pairs = gl.reshape(pairs, [DOWN, BLOCK, 64])
    amaxes = gl.reduce(pairs & 0x7FFF7FFF, 1, _max_of_pairs)
    scale0, encode0 = _common.scale_from_amax(_first(amaxes, DTYPE), eps, LIMIT, RULE)
    scale1, encode1 = _common.scale_from_amax(_second(amaxes, DTYPE), eps, LIMIT, RULE)
    SCALES: gl.constexpr = amaxes.type.layout
    columns = 2 * gl.arange(0, 64, gl.SliceLayout(0, SCALES))[None, :]
    m = gl.arange(0, DOWN, gl.SliceLayout(1, SCALES))[:, None]
    inside = (columns < columns_left) & (m * BLOCK < rows_left)
    scale_t_ptr += tile_k * 128 * stride_tk + tile_m * DOWN * stride_tm
    scales = scale_t_ptr + columns * stride_tk + m * stride_tm
    gl.store(scales, scale0, mask=inside)
    gl.store(scales + stride_tk, scale1, mask=inside)

    pairs = _nan_for_infinity(pairs, DTYPE, fp8)
    words0 = _words(_first(pairs, DTYPE), encode0, fp8)
    words1 = _words(_second(pairs, DTYPE), encode1, fp8)
    words = gl.join(words0, words1)  # [32, 64, 2]
    words = gl.reshape(gl.permute(words, [1, 2, 0]), [128, 32])
    # Words go through shared memory, so that lanes store neighbours. 32 lanes write to a column of
    # 16 bytes in every second row of 128 bytes: the swizzle distributes them over the banks.
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 2, 8, [1, 0])
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    words = gl.allocate_shared_memory(gl.int32, [128, 32], swizzled, words).load(BY_ROW)
    rows = gl.arange(0, 128, gl.SliceLayout(1, BY_ROW))
    columns = gl.arange(0, 32, gl.SliceLayout(0, BY_ROW))
    inside = (rows < columns_left)[:, None] & (columns // 4 < rows_left // 16)[None, :]
    q_t_ptr = q_t_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    q_t_ptr += tile_k * 128 * (ROWS // 4) + tile_m * 32
    offsets = rows.to(gl.int64)[:, None] * (ROWS // 4) + columns[None, :]
    gl.store(q_t_ptr + offsets, words, mask=inside)


@gluon.jit
def _sum_of_columns(pairs, sum_ptr, tile_m, tile_k, K, DTYPE: gl.constexpr):
    """Write partial column sums, in float32. ``pairs``: [128, 64] by columns."""
    sum0, sum1 = gl.sum(_first(pairs, DTYPE), 0), gl.sum(_second(pairs, DTYPE), 0)
    columns = 2 * gl.arange(0, 64, sum0.type.layout)
    columns_left = (K - tile_k * 128).to(gl.int32)
    sum_ptr += tile_m * K + tile_k * 128
    gl.store(sum_ptr + columns, sum0, mask=columns < columns_left)
    gl.store(sum_ptr + columns + 1, sum1, mask=columns + 1 < columns_left)


@launched(language=gluon)
def _quantize_blocks_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    q_ptr,  # None or [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [ROWS, ceil COLUMNS / BLOCK] fp32
    scale_t_ptr,  # [COLUMNS, ceil ROWS / BLOCK] fp32
    sum_ptr,  # None or [row tiles, K] fp32
    plan_ptr,  # [E + 1 + row tiles, 4] int32, where the rows are in groups
    M, K, ROWS, COLUMNS, E, eps, stride_sm, stride_sk, stride_tk, stride_tm,
    LIMIT: gl.constexpr, RULE: gl.constexpr, BLOCK: gl.constexpr,
    VALUES: gl.constexpr, TILE_M: gl.constexpr, TILE_K: gl.constexpr,
):  # fmt: skip
    gl.static_assert(TILE_M == 128 and TILE_K == 128)
    WARPS: gl.constexpr = gl.num_warps()
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    BY_VALUE: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    BY_COLUMN: gl.constexpr = gl.BlockedLayout([256 // WARPS, 1], [1, 32], [WARPS // 2, 2], [0, 1])
    tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K)
    if plan_ptr is None:
        row, last = tile_m * 128, M
        rows_left = gl.minimum(ROWS - row, 128).to(gl.int32)
        rows_left_t = rows_left
    else:
        entry_ptr = plan_ptr + 4 * (E + 1 + tile_m)
        row, last = gl.load(entry_ptr + 1).to(gl.int64), gl.load(entry_ptr + 2).to(gl.int64)
        rows_left = gl.minimum(last - row, 128).to(gl.int32)
        # Padding rows are written as zeros, but not into the transpose.
        is_owned = (gl.load(entry_ptr) < E) & (tile_m < gl.load(plan_ptr + 4 * E))
        last = gl.where(is_owned, last, row)
        rows_left_t = gl.where(is_owned, 128, 0)
    columns_left = gl.minimum(COLUMNS - tile_k * 128, 128).to(gl.int32)
    eps = gl.cast(eps, gl.float32)
    tile = gl.allocate_shared_memory(gl.int32, [128, 64], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if VALUES.function == "":
        rows = gl.arange(0, 128, gl.SliceLayout(1, BY_ROW))
        columns = gl.arange(0, 64, gl.SliceLayout(0, BY_ROW))
        a_ptr = a_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        a_ptr += row * (stride_am // 2) + tile_k * 64
        offsets = rows.to(gl.int64)[:, None] * (stride_am // 2) + columns[None, :]
        inside = (rows < (last - row).to(gl.int32))[:, None]
        inside &= (columns // 4 < (K // 8 - tile_k * 16).to(gl.int32))[None, :]
        pairs = gl.load(a_ptr + offsets, mask=inside, other=0)
        tile.store(pairs)
    else:
        inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
        columns = tile_k * 128 + gl.arange(0, 128, gl.SliceLayout(0, BY_VALUE))
        for first in gl.static_range(0, 128, ROWS_OF_PROLOGUE):
            rows = row + first + gl.arange(0, ROWS_OF_PROLOGUE, gl.SliceLayout(1, BY_VALUE))
            y = load(inputs, rows, columns, tile_k, last, K, VALUES, TILE_K)
            y0, y1 = gl.split(gl.reshape(y, [ROWS_OF_PROLOGUE, 64, 2]))
            pairs = gl.convert_layout(_paired(y0, y1), BY_ROW, assert_trivial=True)
            tile.slice(first, ROWS_OF_PROLOGUE).store(pairs)
        if q_ptr is not None:
            pairs = tile.load(BY_ROW)
    if q_ptr is not None:
        _write_rows(
            pairs, row, tile_k, rows_left, columns_left, q_ptr, scale_ptr, COLUMNS, stride_sm,
            stride_sk, eps, LIMIT, RULE, BLOCK, VALUES.dtype,
        )  # fmt: skip
    if sum_ptr is not None:
        _sum_of_columns(tile.load(BY_COLUMN), sum_ptr, tile_m, tile_k, K, VALUES.dtype)
    _write_columns(
        tile.load(BY_COLUMN), tile_m, tile_k, rows_left_t, columns_left, q_t_ptr, scale_t_ptr, ROWS,
        stride_tk, stride_tm, eps, LIMIT, RULE, BLOCK, VALUES.dtype,
    )  # fmt: skip


def has_tiles(matrix: Matrix, block: Sequence[int], align: int) -> bool:
    """Whether this kernel can cast a matrix or a prologue on the device of its inputs."""
    prologue, (x, *_), dtype = matrix
    if not prologue:  # its rows are read in steps of 16 bytes
        dtype = x.dtype
        if x.stride(1) != 1 or x.stride(0) % 8 or x.shape[1] % 8 or x.data_ptr() % 16:
            return False
    return (
        block[0] == 1
        and block[1] in (8, 16, 32, 64, 128)
        and align % 16 == 0
        and dtype in (torch.bfloat16, torch.float16)
        and x.is_cuda
        and capability_of(x.device) >= (9, 0)
    )


def cast_tiles(
    matrix: Matrix, options: Options, sizes: tuple[int, int, int], *, rowwise: bool,
    column_sum: bool, plan: Tensor | None = None, groups: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the op's results, with partial column sums, where ``has_tiles``.

    Args:
        options: the FP8 format, a block of one row, the rule and the epsilon.
        sizes: rows and columns of the result, and columns of the transpose.
        rowwise: cast both orientations, and not the transpose alone.
        plan: from ``plan_groups``, where the rows are in groups.
        groups: the number of groups.
    """
    (prologue, inputs, _), (fp8_dtype, block, rule, eps) = matrix, options
    first, (M, K), (rows, columns, across) = inputs[0], prologue_shape(prologue, inputs), sizes
    q = scale = sums = None
    if rowwise:
        q = first.new_empty((rows, columns), dtype=fp8_dtype)
        scale = empty_scale(first, (rows, columns), block)
    q_t = first.new_empty((columns, across), dtype=fp8_dtype)
    scale_t = empty_scale(first, (columns, across), block)
    if column_sum:
        sums = _common.empty_column_sums(first, (across, K), _TILE)
    tensors, constants = arguments_of(*matrix, _TILE)
    _quantize_blocks_kernel[_common.grid_of((across, columns), _TILE)](
        *tensors, q, q_t, scale, scale_t, sums, plan, M, K, across, columns, groups, eps,
        *((1, 1) if scale is None else scale.stride()), *scale_t.stride(),
        LIMIT=largest(fp8_dtype), RULE=rule, BLOCK=block[1], maxnreg=_REGISTERS, **constants,
    )  # fmt: skip
    return q, scale, None, q_t, scale_t, sums
