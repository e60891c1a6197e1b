"""Delayed-scaling state.  S slots, H history length."""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab.ops.declare import declare
from float8lab.ops.reference.blocks import encode_from_amax

__all__ = ["NO_DATA", "update_scales_", "update_scales_op"]

NO_DATA = -1.0
"""The value of an amax slot in which nothing was recorded since the last update."""


def update_scales_(
    history: Tensor, amax: Tensor, factors: Tensor, steps: Tensor, fp8_max: Tensor, margin: int,
    interval: int, most_recent: bool, power_of_2: bool,
) -> Tensor:  # fmt: skip
    """Advance the delayed-scaling state of S slots, in place.

    A slot whose ``amax`` is ``NO_DATA`` or not finite stays as it is. For any other slot, its
    history ([H, S], newest first) takes in the amax and drops the oldest, and ``steps`` goes up. On
    every ``interval``-th step its ``factors`` ([2, S]) become ``1 / encode``, the decode scale, and
    ``encode = fp8_max / amax / 2 ** margin`` for the newest or the largest amax of its history; the
    quotient can be rounded down to a power of two. If that amax is 0, the factors stay. In the end
    every ``amax`` is ``NO_DATA``.

    Returns a copy of all factors, ``[S, 2, 4]``: each factor four times, so that the first copy is
    at a multiple of 16 bytes, where cuBLASLt wants a scale.
    """
    has_data = (amax >= 0) & (amax < torch.inf)
    history.copy_(torch.where(has_data, torch.cat((amax[None], history[:-1])), history))
    steps.add_(has_data)
    amax_of_history = history[0] if most_recent else history.amax(0)
    encode = encode_from_amax(amax_of_history, fp8_max, power_of_2=power_of_2) * 2.0**-margin
    due = has_data & (amax_of_history > 0) & ((steps - 1) % interval == 0)
    factors.copy_(torch.where(due, torch.stack((1.0 / encode, encode)), factors))
    amax.fill_(NO_DATA)
    return factors.t().unsqueeze(2).repeat(1, 1, 4)


update_scales_op = declare(
    update_scales_,
    cuda="scaling:update_scales_",
    outputs=lambda of: of.factors.new_empty((of.factors.shape[1], 2, 4)),
    mutates=("history", "amax", "factors", "steps"),
)
