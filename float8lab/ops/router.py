"""Which experts get a token, and how much of each; ``reference/router.py`` specifies these ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8lab.ops.declare import declare
from float8lab.ops.reference import router as reference
from float8lab.ops.reference.router import SCORE_FUNCTIONS

__all__ = ["SCORE_FUNCTIONS", "route_backward_op", "route_op", "route_outputs"]


def route_outputs(of: Any) -> tuple[Tensor, Tensor]:
    dtype = of.logits.dtype
    if of.dense:
        dtype = torch.promote_types(dtype, torch.float32)
    routing_map = of.logits.new_empty(of.logits.shape, dtype=torch.bool)
    return of.logits.new_empty(of.logits.shape, dtype=dtype), routing_map


route_op = declare(
    reference.route,
    cuda="router:route",
    outputs=route_outputs,
    sharding=lambda of: [((0, 0), {"logits": 0})],
)
route_backward_op = declare(
    reference.route_backward,
    cuda="router:route_backward",
    outputs=lambda of: of.logits.new_empty(of.logits.shape),
    sharding=lambda of: [((0,), dict.fromkeys(("dprobs", "logits", "routing_map"), 0))],
)
