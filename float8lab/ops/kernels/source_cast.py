"""Cast on the GPU what is computed tile by tile and never written, by one scale for all of it.

M rows, K columns of the source; ROWS, COLUMNS the same after padding to the alignment. One kernel
writes one orientation or both. Tiles are transposed before they are cast, in 2 or 4 bytes an
element; where the compiler would undo that, a second kernel transposes the bytes (``in_one_pass``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops import reference
from float8lab.ops.kernels._common import (
    Tile,
    abs_bits,
    encode_from_scale,
    grid_of,
    record_amax,
    saturate,
    scale_from_amax,
    store_column_sum,
    store_tile,
)
from float8lab.ops.kernels.pair import transpose
from float8lab.ops.kernels.source import (
    arguments_of,
    has_kernel,
    load_source,
    on_device_of_source,
    tile_for,
    tile_of_program,
)
from float8lab.ops.reference import round_up, source_shape

__all__ = ["BOTH", "Outputs", "cast_of", "cast_pair_of", "cast_source", "in_one_pass"]

BOTH = Tile(rows=64, columns=64, warps=8)
"""For both orientations."""


def in_one_pass(dtype: torch.dtype, block: tuple[int, ...]) -> bool:
    """Whether one kernel may write both orientations.

    Under one scale the cast of the transpose has the values of the cast itself. The compiler then
    casts once and transposes bytes, unless the cast begins with a 2-byte value, and Triton 3.6
    permutes those bytes (as it does in ``quantize.py``). Square blocks are as there.
    """
    return block[0] != block[1] or (block == (-1, -1) and dtype.itemsize == 2)


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
    tile_m, tile_k = tile_of_program(COLUMNS, BACKWARD, GATED, TILE_M, TILE_K)
    y, rows, columns = load_source(
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
) -> None:
    """Cast by a given scale or, to return ``scales``, by a given amax."""
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
        HAS_SLOT=slot is not None,
        **out.flags,
        **constants,
    )


@on_device_of_source
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
    if not has_kernel(kind, inputs, dtype):
        return reference.cast_of(
            kind, inputs, dtype, transposed, scale, amax_slot, fp8_dtype, align
        )
    tile = BOTH if transposed else tile_for(kind)
    out = Outputs(
        kind, inputs, fp8_dtype, align,
        write=not transposed, transpose=transposed, column_sum=False, tile=tile,
    )  # fmt: skip
    cast_source(kind, inputs, dtype, scale, amax_slot, out, tile)
    return out.q_t if transposed else out.q


@on_device_of_source
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
    if not has_kernel(kind, inputs, dtype):
        return reference.cast_pair_of(
            kind, inputs, dtype, scale, amax_slot, fp8_dtype, align, column_sum
        )
    one_pass = in_one_pass(dtype, (-1, -1))
    tile = BOTH if one_pass else tile_for(kind)
    out = Outputs(
        kind, inputs, fp8_dtype, align,
        write=True, transpose=one_pass, column_sum=column_sum, tile=tile,
    )  # fmt: skip
    cast_source(kind, inputs, dtype, scale, amax_slot, out, tile)
    return out.q, out.q_t if one_pass else transpose(out.q, 1), out.total()
