"""The FP8 GEMM.  M rows of a, N rows of b, K contraction, B batch, E groups.

GEMMs run without ``torch.autocast``: multiplied in its float16, FP8 data would overflow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.ops.reference.blocks import expand_scale, round_up
from float8lab.ops.reference.grouped import SPAN, bounds_of

__all__ = ["scaled_mm", "scaled_mm_into"]

_Operand = tuple[Tensor, Tensor | None, Sequence[int]]
"""Data, scales (None in high precision), and the block that shares a scale."""


def scaled_mm(
    a: Tensor, a_scale: Tensor | None, a_block: Sequence[int], b: Tensor, b_scale: Tensor | None,
    b_block: Sequence[int], bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    offs: Tensor | None = None, plan: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``a @ b.T + bias`` of quantized ``a`` [M, K] and ``b`` [N, K], summed in float32.

    A batch has ``a`` [B, M, K] and ``b`` [B, N, K] of any strides, scales of each matrix, and no
    bias. ``fast_accum`` permits a GPU to accumulate with fewer bits; this reference ignores it.
    Operands without scales are in high precision.

    ``offs`` [E] are offsets of groups. With a batch ``b``, [E, N, K], the rows of ``a`` are in
    groups: each group is multiplied by its own matrix, and ``bias``, [E, N], is added. The result
    is [M, N], with zeros in the padding rows. With two matrices, [M, L] and [N, L], the contraction
    is in groups, and the result is [E, M, N].

    FP8 operands with groups have the layout of ``cast``, so a contraction has its groups at
    multiples of ``SPAN``; a single scale may also serve all groups of a matrix. In high precision,
    groups follow each other. ``plan`` is the result of ``plan_groups``, which GEMMs can share; it
    does not change the result.
    """
    if offs is None:
        return _mm((a, a_scale, a_block), (b, b_scale, b_block), bias, out_dtype)
    contracts, shape = b.ndim == 2, (a.shape[0], b.shape[-2])
    out = a.new_zeros((len(offs), *shape) if contracts else shape, dtype=out_dtype)
    for index, (start, end, start_t) in enumerate(bounds_of(offs)):
        if end == start:
            continue
        rows = columns = slice(start, end)
        if contracts:
            if a_scale is not None:
                columns = slice(start_t, start_t + round_up(end - start, SPAN))
            left = a[:, columns], _scales_of_columns(a_scale, a_block, index, columns), a_block
            right = b[:, columns], _scales_of_columns(b_scale, b_block, index, columns), b_block
            out[index] = _mm(left, right, None, out_dtype)
        else:
            left = a[rows], _scales_of_rows(a_scale, index, rows), a_block
            right = b[index], None if b_scale is None else b_scale[index], b_block
            out[rows] = _mm(left, right, None if bias is None else bias[index], out_dtype)
    return out


def _mm(left: _Operand, right: _Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Do ``scaled_mm`` without groups."""
    (a, a_scale, a_block), (b, b_scale, b_block) = left, right
    with torch.autocast(a.device.type, enabled=False):
        if a_scale is None or b_scale is None:
            return F.linear(a, b, bias).to(out_dtype)
        if a_block[1] == -1 and b_block[1] == -1:
            out = a.float() @ b.float().mT
            if a_block[0] > 1 or b_block[0] > 1:
                a_scale = expand_scale(a_scale, a_block, (a.shape[-2], 1))
                b_scale = expand_scale(b_scale, b_block, (b.shape[-2], 1))
            # A single scale may have any shape.
            out = out * a_scale * (b_scale if b_scale.ndim < 2 else b_scale.mT)
        else:
            a = (a.float() * expand_scale(a_scale, a_block, a.shape)).contiguous()
            b = (b.float() * expand_scale(b_scale, b_block, b.shape)).contiguous()
            out = a @ b.mT
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _scales_of_columns(
    scale: Tensor | None, block: Sequence[int], group: int, columns: slice
) -> Tensor | None:
    """Return the scales of a group's columns of a transpose."""
    if scale is None:
        return None
    if block[1] != -1:
        return scale[:, columns.start // block[1] : -(-columns.stop // block[1])]
    return scale[group] if scale.ndim == 3 else scale


def _scales_of_rows(scale: Tensor | None, group: int, rows: slice) -> Tensor | None:
    """Return the scales of a group's rows."""
    if scale is None:
        return None
    group_scale = scale[group] if scale.ndim == 3 else scale
    return group_scale if group_scale.numel() == 1 else group_scale[rows]


def scaled_mm_into(
    out: Tensor, a: Tensor, a_scale: Tensor, a_block: Sequence[int], b: Tensor, b_scale: Tensor,
    b_block: Sequence[int], bias: Tensor | None, fast_accum: bool,
) -> None:  # fmt: skip
    """Do ``scaled_mm`` for matrices, and write the result to the existing ``out`` [M, N]."""
    out.copy_(scaled_mm(a, a_scale, a_block, b, b_scale, b_block, bias, out.dtype, fast_accum))
