"""Delayed-scaling update: amax history and factors of all slots at once.  S slots, H history."""

from __future__ import annotations

from float8lab.ops import reference
from float8lab.ops.declare import declare
from float8lab.ops.reference import NO_DATA

__all__ = ["NO_DATA", "update_scales_op"]

update_scales_op = declare(
    reference.update_scales_,
    cuda="scaling:update_scales_",
    outputs=lambda of: of.factors.new_empty((of.factors.shape[1], 2, 4)),
    mutates=("history", "amax", "factors", "steps"),
)
