"""Moments of an optimizer as FP8 data and scales, rounded stochastically.  M rows, K columns."""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab.formats import E8M0

__all__ = ["BLOCK", "LIMITS", "dequantize_moment", "quantize_moment_", "round_stochastically"]

BLOCK = 128
"""How many columns a block has."""
LIMITS = (127, 255)
"""The largest stored root: of a moment, in 7 bits beside its sign, and of a moment of squares."""


def quantize_moment_(x: Tensor, data: Tensor, scale: Tensor, step: int, is_square: bool) -> None:
    """Quantize a matrix into bytes ``[M, K]`` and e8m0 scales ``[M, K / 128]``, both uint8.

    A byte holds the sign and the root, an integer, of a scaled float32 value; for a moment of
    squares, it holds the fourth root. ``step``, below 2**24, seeds the rounding. Nonzero values
    stay nonzero. A block with a value that is not finite, or a negative square, becomes NaN.
    """
    # torch's float32 root is not always rounded to nearest on a CPU; a detour by float64 is.
    x, limit = x.double().sqrt().float() if is_square else x, LIMITS[is_square]
    size = max(1, min(BLOCK, x.shape[1]))
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
    amax = blocks.abs().amax(2, keepdim=True)
    # The scale is the least power of four that fits: the next lower power would double the roots.
    below = torch.full_like(amax, limit**2).view(torch.int32) - amax.view(torch.int32)
    exponent = torch.where(amax.isfinite(), (127 - 2 * (below >> 24)).clamp(min=1), 255)
    scaled = blocks.abs() * (254 - exponent).byte().view(E8M0).float()
    # Interpolating by squares makes the value, not its root, right on average.
    root = scaled.double().sqrt().float().floor()
    roots = root + (scaled - root * root) / (2 * root + 1)
    # In floats from limit + 1 to twice that, the bits of the root precede those of the fraction.
    dropped = 23 - limit.bit_length()
    column = torch.arange(size, dtype=torch.int32, device=x.device)
    rounded = round_stochastically(roots + (limit + 1), dropped, step, column)
    stored = (rounded.view(torch.int32) >> dropped) & limit
    stored = torch.maximum(stored, (blocks != 0).int()) | (blocks.signbit() * (255 - limit))
    data.copy_(stored.flatten(1)[:, : x.shape[1]])
    scale.copy_(exponent.flatten(1))


def dequantize_moment(data: Tensor, scale: Tensor, is_square: bool) -> Tensor:
    """Return the values that ``quantize_moment_`` stored, float32 in the shape of ``data``."""
    length = data.shape[-1]
    scales = scale.view(E8M0).float().repeat_interleave(min(BLOCK, length), -1)
    roots = (data & LIMITS[is_square]).float()
    values = roots * roots * scales[..., :length]
    return values * values if is_square else torch.where(data < 0x80, values, -values)


def round_stochastically(x: Tensor, dropped: int, step: int, place: Tensor | int = 0) -> Tensor:
    """Round float32 numbers at random, up or down: the expectation over steps is ``x``.

    The last ``dropped`` bits of the mantissa become 0; 16 leave a bfloat16 number. With another
    ``place``, int32, equal values are rounded in another way.

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
    return torch.where(x.isfinite(), ((bits + random) & -(1 << dropped)).view(torch.float32), x)
