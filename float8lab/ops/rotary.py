"""Rotary position embedding; ``reference/rotary.py`` specifies it."""

from __future__ import annotations

from typing import Any

from float8lab.ops.declare import declare
from float8lab.ops.reference import rotary as reference

__all__ = ["rotate_op"]


def _shards(of: Any) -> Any:
    for dim in range(3):
        angles = dim if of.cos.shape[dim] > 1 else None
        yield (dim,), {"t": dim, "cos": angles, "sin": angles}


rotate_op = declare(
    reference.rotate,
    cuda="rotary:rotate",
    outputs=lambda of: of.t.new_empty(of.t.shape),
    sharding=_shards,
)
