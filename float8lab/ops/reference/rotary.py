"""Rotary position embedding in plain PyTorch.  D head size, R rotated part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8lab.ops.declare import declare

__all__ = ["rotate", "rotate_op"]


def rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    """Rotate pairs of features by angles.

    Args:
        t: ``[A, B, H, D]``.
        cos: cosines of the angles, float32 ``[A, B, 1, R]``, where A or B may be 1; R is even.
        sin: sines of the angles.
        interleaved: pairs are neighbours, ``(0, 1), (2, 3) ...``, not halves,
            ``(0, R / 2), (1, R / 2 + 1) ...``.
        back: apply the transposed map, as for gradients; if both features of a pair have the same
            angle, it rotates the other way.

    Returns:
        A contiguous tensor like ``t``, rotated in float32. Features from R on are copied.
    """
    R = cos.shape[-1]
    rotated, copied = t[..., :R].float(), t[..., R:]
    if back:
        rotated = rotated * cos - _rotate_quarter(rotated * sin, interleaved)
    else:
        rotated = rotated * cos + _rotate_quarter(rotated, interleaved) * sin
    rotated = rotated.to(t.dtype)
    return torch.cat((rotated, copied), dim=-1) if copied.shape[-1] else rotated.contiguous()


def _rotate_quarter(x: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _shards(of: Any) -> Any:
    for dim in range(3):
        angles = dim if of.cos.shape[dim] > 1 else None
        yield (dim,), {"t": dim, "cos": angles, "sin": angles}


rotate_op = declare(
    rotate, cuda="rotary:rotate", outputs=lambda of: of.t.new_empty(of.t.shape), sharding=_shards
)
