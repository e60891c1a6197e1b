"""Rotary position embedding; ``reference/rotary.py`` specifies it."""

from __future__ import annotations

from float8lab.ops.declare import declare
from float8lab.ops.reference import rotary as reference

__all__ = ["rotate_op"]

rotate_op = declare(
    reference.rotate, cuda="rotary:rotate", outputs=lambda of: of.t.new_empty(of.t.shape)
)
