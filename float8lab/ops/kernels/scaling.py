"""Delayed-scaling update: one program per slot.  S slots, H history."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import NO_DATA

_SCALES = 256
"""Scales that one program of ``_scales_kernel`` makes."""


@triton.jit
def write_scales(
    amax_ptr,  # [ROWS + COLUMNS] int32 bit patterns; encode factors replace them
    scale_ptr, scale_t_ptr,  # [ROWS] and [COLUMNS] fp32
    index, ROWS, COLUMNS, eps, LIMIT: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Make the scales and encode factors of some rows and columns from their amaxes."""
    bits = tl.load(amax_ptr + index, mask=index < ROWS + COLUMNS, other=0)
    eps = tl.cast(eps, tl.float32)
    scale, encode = _common.scale_from_amax(bits.to(tl.float32, bitcast=True), eps, LIMIT, RULE)
    tl.store(amax_ptr + index, encode.to(tl.int32, bitcast=True), mask=index < ROWS + COLUMNS)
    tl.store(scale_ptr + index, scale, mask=index < ROWS)
    column = index - ROWS
    tl.store(scale_t_ptr + column, scale, mask=(column >= 0) & (column < COLUMNS))


@launched
def _scales_kernel(
    amax_ptr, scale_ptr, scale_t_ptr, ROWS, COLUMNS, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    write_scales(amax_ptr, scale_ptr, scale_t_ptr, index, ROWS, COLUMNS, eps, LIMIT, RULE)


def make_scales(
    amaxes: Tensor, scale: Tensor, scale_t: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float
) -> None:
    """Write the scales of rows and of columns; encode factors replace the ``amaxes`` of both."""
    rows, count = scale.numel(), amaxes.numel()
    _scales_kernel[(_common.ceil_div(count, _SCALES),)](
        amaxes, scale, scale_t, rows, count - rows, eps,
        LIMIT=largest(fp8_dtype), RULE=rule, SIZE=_SCALES,
    )  # fmt: skip


@launched
def _update_scales_kernel(
    history_ptr,  # [H, S] fp32, newest first
    amax_ptr,  # [S] fp32
    factors_ptr,  # [2, S] fp32: decode scales, encode factors
    steps_ptr,  # [S] int
    fp8_max_ptr,  # [S] fp32
    copy_ptr,  # [S, 2, 4] fp32
    H, stride_hh, stride_hs, stride_amax, stride_factor, stride_slot, stride_steps, stride_fp8_max,
    factor,  # 2 ** -margin
    interval,
    EMPTY: tl.constexpr,  # NO_DATA
    MOST_RECENT: tl.constexpr, POWER_OF_2: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    amax = tl.load(amax_ptr + slot * stride_amax)
    has_data = (amax >= 0) & (amax < float("inf"))

    index = tl.arange(0, BLOCK_H).to(tl.int64)
    column_ptr = history_ptr + slot * stride_hs
    old_column = tl.load(column_ptr + index * stride_hh, mask=index < H, other=0.0)
    mask = (index > 0) & (index < H)
    shifted = tl.load(column_ptr + (index - 1) * stride_hh, mask=mask, other=0.0)
    column = tl.where(has_data, tl.where(index == 0, amax, shifted), old_column)
    tl.debug_barrier()  # every thread has read its part of the old column
    tl.store(column_ptr + index * stride_hh, column, mask=index < H)

    if MOST_RECENT:
        column = tl.where(index == 0, column, 0.0)
    amax_of_history = tl.max(_common.abs_bits(column), 0).to(tl.float32, bitcast=True)
    encode = tl.div_rn(tl.load(fp8_max_ptr + slot * stride_fp8_max), amax_of_history)
    encode = tl.where(encode > _common.FLOAT32_MAX, _common.FLOAT32_MAX, encode)
    if POWER_OF_2:  # clear the mantissa
        encode = (encode.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    encode = encode * tl.cast(factor, tl.float32)

    steps = tl.load(steps_ptr + slot * stride_steps)
    due = has_data & (amax_of_history > 0) & (steps % interval == 0)  # before this step
    scale_ptr = factors_ptr + slot * stride_slot
    encode_ptr = scale_ptr + stride_factor
    scale = tl.where(due, tl.div_rn(1.0, encode), tl.load(scale_ptr))
    encode = tl.where(due, encode, tl.load(encode_ptr))
    tl.store(scale_ptr, scale)
    tl.store(encode_ptr, encode)
    tl.store(copy_ptr + slot * 8 + tl.arange(0, 4), scale)
    tl.store(copy_ptr + slot * 8 + 4 + tl.arange(0, 4), encode)
    tl.store(steps_ptr + slot * stride_steps, steps + has_data.to(steps.dtype))
    tl.store(amax_ptr + slot * stride_amax, EMPTY)


@replayed
def update_scales_(
    history: Tensor, amax: Tensor, factors: Tensor, steps: Tensor, fp8_max: Tensor, margin: int,
    interval: int, most_recent: bool, power_of_2: bool,
) -> Tensor:  # fmt: skip
    """Do ``reference.update_scales_`` in one launch."""
    # A program holds its slot's whole history in registers, so rolling it in place cannot read what
    # it has written; 4096 entries are 32 registers a thread.
    length, slots = history.shape
    copy = factors.new_empty((slots, 2, 4))
    if not slots:
        return copy
    _update_scales_kernel[(slots,)](
        history, amax, factors, steps, fp8_max, copy, length, *history.stride(), amax.stride(0),
        *factors.stride(), steps.stride(0), fp8_max.stride(0), 2.0**-margin, interval,
        EMPTY=NO_DATA, MOST_RECENT=most_recent, POWER_OF_2=power_of_2,
        BLOCK_H=_common.next_power_of_2(length), num_warps=4,
    )  # fmt: skip
    return copy
