"""Rotary position embedding; ``reference/rotary.py`` specifies it."""

from __future__ import annotations

from torch import Tensor

from float8lab.ops._register import register
from float8lab.ops.reference import rotary as reference

__all__ = ["rotate_op"]


def _fake_rotate(t: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, back: bool) -> Tensor:
    return t.new_empty(t.shape)


rotate_op = register(
    "rotate(Tensor t, Tensor cos, Tensor sin, bool interleaved, bool back) -> Tensor",
    cuda="rotary:rotate",
    reference=reference.rotate,
    fake=_fake_rotate,
)
