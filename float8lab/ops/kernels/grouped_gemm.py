"""The GEMMs of MoE experts on Hopper's tensor cores.  E groups, or experts.

``hopper_gemm.py`` computes ``y = a @ b.T`` with a plan of the tiles. Either each group of a's rows
has its own b, and y is ``[M, N]``; or each group of the contraction has its own y: ``[E, M, N]``.
Operands in other formats, and other GPUs, use torch._grouped_mm in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from float8lab.formats import HOPPER
from float8lab.ops import reference
from float8lab.ops.declare import capability_of
from float8lab.ops.grouped import groups_of_rows
from float8lab.ops.kernels import hopper_gemm
from float8lab.ops.kernels._common import ceil_div
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels.dequantize import dequantize
from float8lab.ops.kernels.grouped_cast import plan_groups
from float8lab.ops.reference import ALIGN, SPAN


def mode_of(
    a: Tensor, a_block: tuple[int, ...], b: Tensor, b_block: tuple[int, ...],
    out_dtype: torch.dtype, fast_accum: bool,
) -> str | None:  # fmt: skip
    """Return the mode of the kernel that multiplies these operands, or None."""
    if not HOPPER.includes(capability_of(a.device)):
        return None
    if a.dtype == b.dtype == torch.float8_e5m2 or a.shape[-1] % ALIGN or b.shape[-2] % ALIGN:
        return None
    if any(x.data_ptr() % 16 for x in (a, b)) or out_dtype == torch.float64:
        return None
    if a_block[1] == b_block[1] == -1:
        # A float32 output of 64 x 256 would leave no shared memory for the operands.
        return "fast" if fast_accum and out_dtype.itemsize == 2 else "precise"
    if a_block == (1, 128) and b_block in ((128, 128), (1, 128)):
        return "rows" if b_block == (1, 128) else ("block" if b.ndim == 3 else None)
    return None


def grouped_mm(
    a: Tensor, a_scale: Tensor | None, a_block: Sequence[int], b: Tensor, b_scale: Tensor | None,
    b_block: Sequence[int], bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    offs: Tensor, plan: Tensor | None,
) -> Tensor:  # fmt: skip
    """Do ``scaled_mm`` for groups."""
    if 0 in a.shape or 0 in b.shape or not offs.shape[0] or a_scale is None or b_scale is None:
        return _in_high_precision(a, b, bias, offs, out_dtype)
    mode = mode_of(a, tuple(a_block), b, tuple(b_block), out_dtype, fast_accum)
    if mode is None:
        return _dequantized(
            a, a_scale, tuple(a_block), b, b_scale, tuple(b_block), bias, offs, out_dtype
        )
    return multiply_groups(mode, a, a_scale, b, b_scale, bias, offs, out_dtype, plan)


def multiply_groups(
    mode: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    offs: Tensor, out_dtype: torch.dtype, plan: Tensor | None = None,
    config: hopper_gemm.Config | None = None,
) -> Tensor:  # fmt: skip
    """Multiply operands for which there is a mode; ``config`` replaces that of the table."""
    contracts, E, (M, K), N = b.ndim == 2, offs.shape[0], a.shape, b.shape[-2]
    a = a if a.is_contiguous() else a.contiguous()
    b_rows = b_columns = 0
    if not contracts:
        transposed = b.transpose(0, 1)
        if transposed.is_contiguous() and K % hopper_gemm.STEP.value == 0 and not b.is_contiguous():
            b, b_columns = transposed.reshape(N, E * K), K
        else:
            b, b_rows = b.reshape(E * N, K), N
    elif not b.is_contiguous():
        b = b.contiguous()
    if mode in ("block", "rows") and a_scale.shape[0] > 1 and a_scale.stride(0) != 1:
        a_scale = a_scale.t().contiguous().t()
    plan = plan_groups(offs, 0 if contracts else M) if plan is None else plan
    y = a.new_empty((E, M, N) if contracts else (M, N), dtype=out_dtype)
    return hopper_gemm.multiply_tiles(
        mode, a, a_scale, b, b_scale, bias, y,
        groups=(hopper_gemm.GROUPED_SUMS if contracts else hopper_gemm.GROUPED_ROWS).value,
        plan=plan, E=E, b_offset=(b_rows, b_columns), config=config,
    )  # fmt: skip


def _in_high_precision(
    a: Tensor, b: Tensor, bias: Tensor | None, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Multiply operands without scales, or return zeros where there is nothing to multiply."""
    E, M, N = offs.shape[0], a.shape[0], b.shape[-2]
    if bias is None and 0 in (E, M, N, a.shape[1]):
        return a.new_zeros((M, N) if b.ndim == 3 else (E, M, N), dtype=out_dtype)
    is_native = a.dtype == out_dtype == torch.bfloat16 and capability_of(a.device) >= (9, 0)
    if not is_native or not all(x.numel() and _has_torch_strides(x) for x in (a, b)):
        high_precision = (a.to(out_dtype), None, (), b.to(out_dtype), None, ())
        return reference.scaled_mm(*high_precision, bias, out_dtype, False, offs)
    y = torch._grouped_mm(a, b.mT, offs=offs.to(torch.int32), out_dtype=out_dtype)
    if bias is not None:
        y += bias[groups_of_rows(a.shape[0], offs)]
    return zero_padding_rows(y, offs)


_CLEARED_SIZE = 1024
"""How many elements a program clears at a time."""


def zero_padding_rows(y: Tensor, offs: Tensor) -> Tensor:
    """Write zeros to ``y`` where no group has a result: torch does not write there."""
    matrix = y if y.ndim == 2 else y.view(y.shape[0], -1)
    _clear_kernel[(matrix.shape[0], min(ceil_div(matrix.shape[1], _CLEARED_SIZE), 64))](
        offs, matrix, matrix.shape[1], offs.shape[0], ROWS=y.ndim == 2, SIZE=_CLEARED_SIZE
    )
    return y


@launched
def _clear_kernel(
    offs_ptr,  # [E]
    y_ptr,  # [M, N], or [E, N K]
    N, E,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Clear the rows after the last offset, or the results of groups without rows."""
    row = tl.program_id(0)
    if ROWS:
        is_unused = row >= tl.load(offs_ptr + E - 1)
    else:
        start = tl.load(offs_ptr + row - 1, mask=row > 0, other=0)
        is_unused = tl.load(offs_ptr + row) <= start
    if is_unused:
        y_ptr += row.to(tl.int64) * N
        for first in range(tl.program_id(1) * SIZE, N, tl.num_programs(1) * SIZE):
            columns = first + tl.arange(0, SIZE)
            tl.store(y_ptr + columns, tl.zeros([SIZE], y_ptr.dtype.element_ty), mask=columns < N)


def _has_torch_strides(x: Tensor) -> bool:
    """Whether torch._grouped_mm takes an operand: a dense dimension, other strides of 16 bytes."""
    strides = sorted(x.stride()[-2:])
    aligned = all(stride % 8 == 0 for stride in (*strides[1:], *x.stride()[:-2]))
    return strides[0] == 1 and aligned and x.data_ptr() % 16 == 0


def _dequantized(
    a: Tensor, a_scale: Tensor, a_block: tuple[int, ...], b: Tensor, b_scale: Tensor,
    b_block: tuple[int, ...], bias: Tensor | None, offs: Tensor, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Multiply in bfloat16 if y is, else in float32 by the reference, which waits for offsets."""
    if out_dtype != torch.bfloat16 or (b.ndim == 2 and -1 in (a_block[1], b_block[1])):
        return reference.scaled_mm(
            a, a_scale, a_block, b, b_scale, b_block, bias, out_dtype, False, offs
        )
    if a_scale.ndim == 3:  # one for each group: repeat it for the group's rows
        a_scale, a_block = a_scale.view(-1, 1)[groups_of_rows(a.shape[0], offs)], (1, -1)
    left = dequantize(a, a_scale, a_block, out_dtype)
    if b.ndim == 3:
        E, N, K = b.shape
        rows_of_block = N if b_block[0] == -1 else b_block[0]
        scale = b_scale.repeat_interleave(rows_of_block, 1)[:, :N].reshape(E * N, -1)
        right = dequantize(b.reshape(E * N, K), scale, (1, b_block[1]), out_dtype).view(E, N, K)
        return _in_high_precision(left, right, bias, offs, out_dtype)
    right = dequantize(b, b_scale, b_block, out_dtype)
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    spans = ((sizes + (SPAN - 1)) // SPAN * SPAN).cumsum(0).to(offs.dtype)
    return _in_high_precision(left, right, None, spans, out_dtype)
