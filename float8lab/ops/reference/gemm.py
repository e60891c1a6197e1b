"""The FP8 GEMM.  M rows of a, N rows of b, K contraction, B batch.

GEMMs run without ``torch.autocast``: multiplied in its float16, FP8 data would overflow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8lab.ops.reference.cast import expand_scale

__all__ = ["scaled_mm", "scaled_mm_into"]


def scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """``a @ b.T + bias`` of quantized ``a`` [M, K] and ``b`` [N, K], accumulated in float32.

    Or of each of a batch: ``a`` [B, M, K], ``b`` [B, N, K] of any strides, scales of each matrix,
    and no bias. ``fast_accum`` permits a GPU to accumulate with fewer bits; here it changes
    nothing.
    """
    if a_block[1] == -1 and b_block[1] == -1:
        with torch.autocast(a.device.type, enabled=False):
            out = a.float() @ b.float().mT
        if a_block[0] > 1 or b_block[0] > 1:
            a_scale = expand_scale(a_scale, a_block, (a.shape[-2], 1))
            b_scale = expand_scale(b_scale, b_block, (b.shape[-2], 1))
        # A lone scale has any shape.
        out = out * a_scale * (b_scale if b_scale.ndim < 2 else b_scale.mT)
    else:
        left = (a.float() * expand_scale(a_scale, a_block, a.shape)).contiguous()
        right = (b.float() * expand_scale(b_scale, b_block, b.shape)).contiguous()
        with torch.autocast(a.device.type, enabled=False):
            out = left @ right.mT
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)


def scaled_mm_into(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    bias: Tensor | None,
    fast_accum: bool,
) -> None:
    """``scaled_mm`` of matrices, written to the ``out`` [M, N] that is there."""
    out.copy_(scaled_mm(a, a_scale, a_block, b, b_scale, b_block, bias, out.dtype, fast_accum))
