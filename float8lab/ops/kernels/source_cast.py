"""Cast on the GPU what is computed tile by tile and never written, by factors that are known.

M rows, K columns of the source; ROWS, COLUMNS the same after padding to the alignment. One kernel
writes one orientation or both, the transpose as ``_rows.py`` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops import reference
from float8lab.ops.kernels._common import (
    Tile,
    abs_bits,
    empty_column_sums,
    grid_of,
    record_amax,
    saturate,
    scale_from_amax,
    store_column_sum,
    store_tile,
    total_of,
)
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._rows import (
    has_words,
    largest_bits,
    store_by_row,
    store_by_scale,
    sum_of_rows,
)
from float8lab.ops.kernels.pair import cast_pair, transpose
from float8lab.ops.kernels.quantize import cast_one
from float8lab.ops.kernels.source import (
    arguments_of,
    has_kernel,
    load_source,
    load_source_rows,
    tile_for,
    tile_of_program,
)
from float8lab.ops.reference import prologue_shape as source_shape
from float8lab.ops.reference import round_up

__all__ = ["Outputs", "cast_of", "cast_pair_of", "cast_source"]


@launched(do_not_specialize_on_alignment=["slot_ptr"])  # or each place in a pack has a kernel
def _cast_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    given_ptr,  # fp32: the encode factor [1], or those of rows and columns [ROWS + COLUMNS] if
    # PER_ROW, or the amax [1] that makes it and the scale
    slot_ptr,  # [1] fp32
    q_ptr,  # [ROWS, COLUMNS] fp8
    q_t_ptr,  # [COLUMNS, ROWS] fp8
    scale_ptr,  # [1] fp32 to be made
    scale_t_ptr,  # [1] fp32 to be made
    sum_ptr,  # [row tiles, K] fp32
    M, K, ROWS, COLUMNS, eps,
    FROM_AMAX: tl.constexpr, LIMIT: tl.constexpr, RULE: tl.constexpr, PER_ROW: tl.constexpr,
    HAS_SLOT: tl.constexpr, WRITE: tl.constexpr, TRANSPOSE: tl.constexpr, COLUMN_SUM: tl.constexpr,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, BACKWARD: tl.constexpr, HALVES: tl.constexpr,
    DTYPE: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k = tile_of_program(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    if FROM_AMAX:
        scale, encode = scale_from_amax(tl.load(given_ptr), tl.cast(eps, tl.float32), LIMIT, RULE)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
    elif not PER_ROW:
        encode = tl.load(given_ptr)
    if TRANSPOSE:
        words, columns, y0, y1, y2, y3 = load_source_rows(
            a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
            tile_m, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_M, TILE_K,
        )  # fmt: skip
        if HAS_SLOT:
            record_amax(slot_ptr, largest_bits(y0, y1, y2, y3))
        if COLUMN_SUM:
            store_column_sum(sum_ptr, sum_of_rows(y0, y1, y2, y3), tile_m, columns, K)
        if PER_ROW:
            store_by_row(
                y0, y1, y2, y3, words, columns, given_ptr, q_ptr, q_t_ptr, ROWS, COLUMNS, WRITE
            )
        else:
            store_by_scale(
                y0, y1, y2, y3, encode, words, columns, q_ptr, q_t_ptr, ROWS, COLUMNS, WRITE
            )  # fmt: skip
    else:
        rows = tile_m * TILE_M + tl.arange(0, TILE_M)
        columns = tile_k * TILE_K + tl.arange(0, TILE_K)
        y = load_source(
            a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
            rows, columns, tile_k, M, K, FUNCTION, GATED, BACKWARD, HALVES, DTYPE, TILE_K,
        )  # fmt: skip
        y = y.to(tl.float32)
        if HAS_SLOT:
            record_amax(slot_ptr, abs_bits(y))
        if COLUMN_SUM:
            store_column_sum(sum_ptr, y, tile_m, columns, K)
        if PER_ROW:
            encode = tl.load(given_ptr + rows, mask=rows < ROWS, other=1.0)[:, None]
        store_tile(
            q_ptr, saturate(y * encode, q_ptr.dtype.element_ty), rows, columns, ROWS, COLUMNS
        )


class Outputs:
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
        self.sums = empty_column_sums(first, self.shape, tile, column_sum)
        self.grid = grid_of((self.rows, self.columns), tile)
        self.flags = {"WRITE": write, "TRANSPOSE": transpose, "COLUMN_SUM": column_sum}

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (*self.shape, self.rows, self.columns)


def cast_source(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    given: Tensor,
    slot: Tensor | None,
    out: Outputs,
    tile: Tile,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    rule: str = "fp32",
    eps: float = 0.0,
    per_row: bool = False,
) -> None:
    """Cast by a given encode factor, or one for each row and column (``per_row``), or by an amax.

    From the amax are made ``scales``, too.
    """
    tensors, constants = arguments_of(kind, inputs, dtype, tile)
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
        PER_ROW=per_row,
        HAS_SLOT=slot is not None,
        **out.flags,
        **constants,
    )


def cast_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
) -> Tensor:
    if not has_kernel(kind, inputs, dtype):
        value = reference.value_of(kind, inputs, dtype)
        value = value.t() if transposed else value
        return cast_one(value, encode, amax_slot, fp8_dtype, (-1, -1), align)
    by_words = transposed and has_words(inputs[0], align)
    tile = tile_for(kind, both=by_words)
    out = Outputs(
        kind, inputs, fp8_dtype, align,
        write=not by_words, transpose=by_words, column_sum=False, tile=tile,
    )  # fmt: skip
    cast_source(kind, inputs, dtype, encode, amax_slot, out, tile)
    if by_words:
        return out.q_t
    return transpose(out.q, 1) if transposed else out.q


def cast_pair_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    if not has_kernel(kind, inputs, dtype):
        value = reference.value_of(kind, inputs, dtype)
        return cast_pair(value, encode, amax_slot, fp8_dtype, align, column_sum)
    one_pass = has_words(inputs[0], align)
    tile = tile_for(kind, both=one_pass)
    out = Outputs(
        kind, inputs, fp8_dtype, align,
        write=True, transpose=one_pass, column_sum=column_sum, tile=tile,
    )  # fmt: skip
    cast_source(kind, inputs, dtype, encode, amax_slot, out, tile)
    return out.q, out.q_t if one_pass else transpose(out.q, 1), total_of(out.sums)
