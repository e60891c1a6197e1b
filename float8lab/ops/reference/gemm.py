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
"""Data, scales unless it is in high precision, and the block that shares one."""


def scaled_mm(
    a: Tensor, a_scale: Tensor | None, a_block: Sequence[int], b: Tensor, b_scale: Tensor | None,
    b_block: Sequence[int], bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    offs: Tensor | None = None, plan: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``a @ b.T + bias`` of quantized ``a`` [M, K] and ``b`` [N, K], accumulated in float32.

    Or of each of a batch: ``a`` [B, M, K], ``b`` [B, N, K] of any strides, scales of each matrix,
    and no bias. ``fast_accum`` permits a GPU to accumulate with fewer bits; here it changes
    nothing. Operands without scales are in high precision.

    With offsets of groups, ``offs`` [E], and a batch ``b``, [E, N, K], the rows of ``a`` are in
    groups, each of which is multiplied by its own matrix, and ``bias``, [E, N], added: [M, N], with
    zeros in the padding rows. With two matrices, [M, L] and [N, L], the contraction is in groups:
    [E, M, N].

    Operands of groups in FP8 are as ``cast`` gives them, so a contraction has its groups at
    multiples of ``SPAN``; one scale may also serve all groups of a matrix. In high precision,
    groups follow each other. ``plan`` is that of ``plan_groups`` for the rows in groups, or those
    that a transpose had, where several GEMMs share it. It changes nothing.
    """
    if offs is None:
        return _mm((a, a_scale, a_block), (b, b_scale, b_block), bias, out_dtype)
    contracts, shape = b.ndim == 2, (a.shape[0], b.shape[-2])
    out = a.new_zeros((len(offs), *shape) if contracts else shape, dtype=out_dtype)
    for index, (start, end, place) in enumerate(bounds_of(offs)):
        if end == start:
            continue
        if contracts:
            columns = slice(start, end)
            if a_scale is not None:
                columns = slice(place, place + round_up(end - start, SPAN))
            left = a[:, columns], _scales_of_columns(a_scale, a_block, index, columns), a_block
            right = b[:, columns], _scales_of_columns(b_scale, b_block, index, columns), b_block
            out[index] = _mm(left, right, None, out_dtype)
        else:
            rows = slice(start, end)
            left = a[rows], _scales_of_rows(a_scale, index, rows), a_block
            right = b[index], None if b_scale is None else b_scale[index], b_block
            out[rows] = _mm(left, right, None if bias is None else bias[index], out_dtype)
    return out


def _mm(left: _Operand, right: _Operand, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``scaled_mm`` without groups."""
    (a, a_scale, a_block), (b, b_scale, b_block) = left, right
    if a_scale is None or b_scale is None:
        with torch.autocast(a.device.type, enabled=False):
            return F.linear(a, b, bias).to(out_dtype)
    if a_block[1] == -1 and b_block[1] == -1:
        with torch.autocast(a.device.type, enabled=False):
            out = a.float() @ b.float().mT
        if a_block[0] > 1 or b_block[0] > 1:
            a_scale = expand_scale(a_scale, a_block, (a.shape[-2], 1))
            b_scale = expand_scale(b_scale, b_block, (b.shape[-2], 1))
        # A lone scale has any shape.
        out = out * a_scale * (b_scale if b_scale.ndim < 2 else b_scale.mT)
    else:
        a = (a.float() * expand_scale(a_scale, a_block, a.shape)).contiguous()
        b = (b.float() * expand_scale(b_scale, b_block, b.shape)).contiguous()
        with torch.autocast(a.device.type, enabled=False):
            out = a @ b.mT
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def _scales_of_columns(
    scale: Tensor | None, block: Sequence[int], group: int, columns: slice
) -> Tensor | None:
    """The scales of a group's columns of a transpose."""
    if scale is None:
        return None
    if block[1] != -1:
        return scale[:, columns.start // block[1] : -(-columns.stop // block[1])]
    return scale[group] if scale.ndim == 3 else scale


def _scales_of_rows(scale: Tensor | None, group: int, rows: slice) -> Tensor | None:
    """The scales of a group's rows."""
    if scale is None:
        return None
    of_group = scale[group] if scale.ndim == 3 else scale
    return of_group if of_group.numel() == 1 else of_group[rows]


def scaled_mm_into(
    out: Tensor, a: Tensor, a_scale: Tensor, a_block: Sequence[int], b: Tensor, b_scale: Tensor,
    b_block: Sequence[int], bias: Tensor | None, fast_accum: bool,
) -> None:  # fmt: skip
    """``scaled_mm`` of matrices, written to the ``out`` [M, N] that is there."""
    out.copy_(scaled_mm(a, a_scale, a_block, b, b_scale, b_block, bias, out.dtype, fast_accum))
