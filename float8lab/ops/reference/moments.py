"""Moments of an optimizer as FP8 data and scales, rounded stochastically.  M rows, K columns."""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab.formats import E4M3, E8M0
from float8lab.ops.reference.blocks import factors_from_amax, round_to_fp8

__all__ = ["BLOCK", "dequantize_moment", "quantize_moment_", "round_stochastically"]

BLOCK = 128
"""Columns of a block."""
NORMAL, SMALLEST = 2.0**-6, 2.0**-9
"""The smallest normal number of e4m3, and its smallest above 0."""


def quantize_moment_(x: Tensor, data: Tensor, scale: Tensor, step: int, is_square: bool) -> None:
    """Quantize a matrix into e4m3 data ``[M, K]`` and e8m0 scales ``[M, K / 128]``, both uint8.

    ``x`` is float32; a moment of squares is stored as its root. ``step``, below 2**24, seeds the
    rounding. What is not 0 does not become 0.
    """
    if is_square:
        x = x.abs().sqrt().copysign(x)
    size = max(1, min(BLOCK, x.shape[1]))
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    decode, encode = factors_from_amax(blocks.abs().amax(2, keepdim=True), E4M3, "e8m0")
    scaled = blocks * encode
    # Subnormals have the spacing of the smallest normals, to which they are moved and back.
    shift = torch.where(scaled.abs() < NORMAL, NORMAL, 0.0).copysign(scaled)
    column = torch.arange(size, dtype=torch.int32, device=x.device)
    rounded = round_stochastically(scaled + shift, 20, step, column) - shift
    rounded = torch.where(rounded == 0, blocks.sign() * SMALLEST, rounded)
    stored = round_to_fp8(rounded, blocks, E4M3).view(torch.uint8)
    data.copy_(stored.flatten(1)[:, : x.shape[1]])
    scale.copy_(decode.to(E8M0).view(torch.uint8).flatten(1))


def dequantize_moment(data: Tensor, scale: Tensor, is_square: bool) -> Tensor:
    """The values that ``quantize_moment_`` stored, in float32 and the shape of ``data``."""
    length = data.shape[-1]
    scales = scale.view(E8M0).float().repeat_interleave(min(BLOCK, length), -1)
    values = data.view(E4M3).float() * scales[..., :length]
    return values * values.abs() if is_square else values


def round_stochastically(x: Tensor, dropped: int, step: int, place: Tensor | int = 0) -> Tensor:
    """Round float32 numbers at random, up or down: the expectation over steps is ``x``.

    Of the mantissa ``dropped`` bits become 0; 16 leave a bfloat16 number. Equal values at another
    ``place``, int32, are rounded in another way.

    >>> x = torch.tensor([1.0 + 2**-8])
    >>> sorted({round_stochastically(x, 16, step).item() for step in range(8)})
    [1.0, 1.0078125]
    """
    bits = x.contiguous().view(torch.int32)
    random = bits + ((step * 0x9E3779B9 + 0x3C6EF372) & 0x7FFFFFFF) + place * 0x632BE5AB
    random *= 0x21F0AAAD
    for constant in (0x735A2D97, 0x2C1B3C6D):
        random ^= random >> 15
        random *= constant
    random = random >> (32 - dropped) & ((1 << dropped) - 1)
    rounded = ((bits + random) & -(1 << dropped)).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)
