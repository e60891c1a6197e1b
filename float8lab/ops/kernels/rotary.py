"""Rotary position embedding on the GPU.  A, B token dimensions, H heads, D head size, R rotated."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels._common import ceil_div, next_power_of_2
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import rotary as reference

_ELEMENTS = 4096
"""How many elements a program rotates: all features of some heads of a token."""


@launched
def _rotate_kernel(
    t_ptr,  # [A, B, H, D]
    cos_ptr,  # [A, B, 1, R] fp32
    sin_ptr,  # [A, B, 1, R] fp32
    out_ptr,  # [A, B, H, D] contiguous
    B, H, D, R, stride_ta, stride_tb, stride_th, stride_td, stride_ca, stride_cb,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr,  # at least R / 2
    COPIED: tl.constexpr,  # at least D - R, or 0
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    a, b = token // B, token % B
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    t_ptrs = t_ptr + a * stride_ta + b * stride_tb + heads * stride_th
    out_ptrs = out_ptr + (token * H + heads) * D

    pairs = tl.arange(0, PAIRS)
    if INTERLEAVED:
        first, second = 2 * pairs, 2 * pairs + 1
    else:
        first, second = pairs, R // 2 + pairs
    inside = pairs < R // 2
    offset = a * stride_ca + b * stride_cb
    cos1 = tl.load(cos_ptr + offset + first, mask=inside, other=0.0)[None, :]
    cos2 = tl.load(cos_ptr + offset + second, mask=inside, other=0.0)[None, :]
    sin1 = tl.load(sin_ptr + offset + first, mask=inside, other=0.0)[None, :]
    sin2 = tl.load(sin_ptr + offset + second, mask=inside, other=0.0)[None, :]
    mask = (heads < H) & inside[None, :]
    x1 = tl.load(t_ptrs + first[None, :] * stride_td, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(t_ptrs + second[None, :] * stride_td, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    tl.store(out_ptrs + first[None, :], y1.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out_ptrs + second[None, :], y2.to(out_ptr.dtype.element_ty), mask=mask)
    if COPIED:
        columns = R + tl.arange(0, COPIED)[None, :]
        mask = (heads < H) & (columns < D)
        copied = tl.load(t_ptrs + columns * stride_td, mask=mask)
        tl.store(out_ptrs + columns, copied, mask=mask)


@replayed
def rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    A, B, H, D = t.shape
    R = cos.shape[-1]
    if not t.numel() or t.element_size() > 4 or cos.stride() != sin.stride() or cos.stride(3) != 1:
        return reference.rotate(t, cos, sin, interleaved, back)
    out = t.new_empty(t.shape)
    heads = min(next_power_of_2(H), max(_ELEMENTS // next_power_of_2(D), 1))
    stride_a, stride_b = (0 if cos.shape[dim] == 1 else cos.stride(dim) for dim in (0, 1))
    _rotate_kernel[(A * B, ceil_div(H, heads))](
        t, cos, sin, out, B, H, D, R, *t.stride(), stride_a, stride_b,
        INTERLEAVED=interleaved, BACK=back, HEADS=heads, PAIRS=next_power_of_2(R // 2),
        COPIED=next_power_of_2(D - R) if D > R else 0, enable_fp_fusion=False,
    )  # fmt: skip
    return out
