"""A tile as four tiles, of every fourth row each: how kernels write both orientations at once.

The four values in one place of x0, x1, x2 and x3 are neighbours in a column, so in FP8 they are the
bytes of one word of the transpose: it is words that are transposed, not bytes. WORDS counts the
words of a tile's columns, ``words`` says which they are. WRITE: the matrix itself is wanted too.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels._common import (
    abs_bits,
    block_amax,
    pack,
    saturate,
    scale_from_amax,
    scale_tile,
    store_tile,
    store_words,
    widen,
)
from float8lab.ops.reference import round_up

__all__ = [
    "has_words",
    "largest_bits",
    "store_by_block",
    "store_by_row",
    "store_by_scale",
    "sum_of_rows",
    "takes_words",
]


def has_words(x: Tensor, align: int) -> bool:
    """Whether the columns of a matrix with the rows of ``x`` are whole words of FP8."""
    return round_up(x.shape[0], align) % 4 == 0


def takes_words(x: Tensor, block: Sequence[int], align: int) -> bool:
    """Whether one of the functions below writes it in such blocks."""
    by_block = block[0] == 1 and block[1] in (4, 8, 16, 32, 64, 128)
    return has_words(x, align) and (by_block or tuple(block) in ((-1, -1), (1, -1)))


@triton.jit
def largest_bits(x0, x1, x2, x3):
    """The largest of four bit patterns."""
    upper = tl.maximum(abs_bits(widen(x0)), abs_bits(widen(x1)))
    return tl.maximum(upper, tl.maximum(abs_bits(widen(x2)), abs_bits(widen(x3))))


@triton.jit
def sum_of_rows(x0, x1, x2, x3):
    """Sums of four neighbours in a column."""
    return (widen(x0) + widen(x1)) + (widen(x2) + widen(x3))


@triton.jit
def _pack_scaled(x0, x1, x2, x3, encode, dtype: tl.constexpr):
    return pack(
        widen(x0) * encode, widen(x1) * encode, widen(x2) * encode, widen(x3) * encode, dtype
    )


@triton.jit
def store_by_scale(
    x0, x1, x2, x3, encode, words, columns, q_ptr, q_t_ptr, ROWS, COLUMNS, WRITE: tl.constexpr
):
    """All in one scale, of the encode factor ``encode``."""
    dtype: tl.constexpr = q_t_ptr.dtype.element_ty
    packed = _pack_scaled(x0, x1, x2, x3, encode, dtype)
    if WRITE:
        for row in tl.static_range(4):
            q = saturate(widen((x0, x1, x2, x3)[row]) * encode, dtype)
            store_tile(q_ptr, q, 4 * words + row, columns, ROWS, COLUMNS)
    store_words(q_t_ptr, packed, words, columns, ROWS, COLUMNS)


@triton.jit
def store_by_row(
    x0,
    x1,
    x2,
    x3,
    words,
    columns,
    encode_ptr,  # [ROWS + COLUMNS] fp32: encode factors of rows, then of columns
    q_ptr,
    q_t_ptr,
    ROWS,
    COLUMNS,
    WRITE: tl.constexpr,
):
    """Every row, and every row of the transpose, in a scale of its own."""
    dtype: tl.constexpr = q_t_ptr.dtype.element_ty
    encode = tl.load(encode_ptr + ROWS + columns, mask=columns < COLUMNS, other=1.0)
    packed = _pack_scaled(x0, x1, x2, x3, encode[None, :], dtype)
    if WRITE:
        for row in tl.static_range(4):
            rows = 4 * words + row
            encode = tl.load(encode_ptr + rows, mask=rows < ROWS, other=1.0)
            q = saturate(widen((x0, x1, x2, x3)[row]) * encode[:, None], dtype)
            store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    store_words(q_t_ptr, packed, words, columns, ROWS, COLUMNS)


@triton.jit
def store_by_block(
    x0,
    x1,
    x2,
    x3,
    words,
    columns,
    tile_m,
    tile_k,
    q_ptr,
    q_t_ptr,
    scale_ptr,  # [ROWS, ceil COLUMNS / BLOCK] fp32
    scale_t_ptr,  # [COLUMNS, ceil ROWS / BLOCK] fp32
    ROWS,
    COLUMNS,
    stride_sm,
    stride_sk,
    stride_tk,
    stride_tm,
    eps,
    LIMIT: tl.constexpr,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    WRITE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Every 1 x BLOCK values, of the matrix and of the transpose, in a scale that they make.

    Every thread of a tile holds values of many blocks, so it would divide for each of them. In
    place of that the amaxes go where the scales will be, and from there back, one to a thread.
    """
    WORDS: tl.constexpr = TILE_M // 4
    ACROSS: tl.constexpr = TILE_K // BLOCK  # blocks side by side in a tile
    DOWN: tl.constexpr = TILE_M // BLOCK
    if WRITE:
        k = tile_k * ACROSS + tl.arange(0, ACROSS)
        for row in tl.static_range(4):
            rows = 4 * words + row
            amaxes = block_amax(abs_bits(widen((x0, x1, x2, x3)[row])), 1, BLOCK)
            mask = (rows < ROWS)[:, None] & (k * BLOCK < COLUMNS)[None, :]
            offsets = rows[:, None] * stride_sm + k[None, :] * stride_sk
            tl.store(scale_ptr + offsets, amaxes, mask=mask)
    m = tile_m * DOWN + tl.arange(0, DOWN)
    amaxes = block_amax(largest_bits(x0, x1, x2, x3), BLOCK // 4, 1)
    mask = (m * BLOCK < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    offsets = m[:, None] * stride_tm + columns[None, :] * stride_tk
    tl.store(scale_t_ptr + offsets, amaxes, mask=mask)
    tl.debug_barrier()

    eps = tl.cast(eps, tl.float32)
    index = tl.arange(0, TILE_K * DOWN)
    m, k = tile_m * DOWN + index // TILE_K, tile_k * TILE_K + index % TILE_K
    pointers = scale_t_ptr + k * stride_tk + m * stride_tm
    mask = (m * BLOCK < ROWS) & (k < COLUMNS)
    if WRITE:
        # As many blocks as in the transpose. Together they are one for each of 256 threads; of
        # fewer values than threads the compiler has every thread compute what it needs.
        index = tl.arange(0, TILE_M * ACROSS)
        m, k = tile_m * TILE_M + index // ACROSS, tile_k * ACROSS + index % ACROSS
        pointers = tl.join(scale_ptr + m * stride_sm + k * stride_sk, pointers)
        mask = tl.join((m < ROWS) & (k * BLOCK < COLUMNS), mask)
    amaxes = tl.load(pointers, mask=mask, other=0.0)
    scale, encode = scale_from_amax(amaxes, eps, LIMIT, RULE)
    tl.debug_barrier()
    tl.store(pointers, scale, mask=mask)

    dtype: tl.constexpr = q_t_ptr.dtype.element_ty
    if WRITE:
        encode_of_rows, encode = tl.split(encode)
        encode_of_rows = tl.reshape(encode_of_rows, [WORDS, 2, 2, ACROSS])
        even, odd = tl.split(tl.permute(encode_of_rows, [0, 3, 1, 2]))
        encode0, encode2 = tl.split(even)
        encode1, encode3 = tl.split(odd)
        for row in tl.static_range(4):
            factor = (encode0, encode1, encode2, encode3)[row]
            q = saturate(scale_tile(widen((x0, x1, x2, x3)[row]), factor, 1, BLOCK), dtype)
            store_tile(q_ptr, q, 4 * words + row, columns, ROWS, COLUMNS)
    factor = tl.reshape(encode, [DOWN, 1, TILE_K])
    factor = tl.reshape(tl.broadcast_to(factor, [DOWN, BLOCK // 4, TILE_K]), [WORDS, TILE_K])
    packed = _pack_scaled(x0, x1, x2, x3, factor, dtype)
    store_words(q_t_ptr, packed, words, columns, ROWS, COLUMNS)
