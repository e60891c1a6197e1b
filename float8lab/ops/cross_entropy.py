"""Cross entropy over a sharded vocabulary; ``reference/cross_entropy.py`` specifies these ops."""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab.ops.declare import declare
from float8lab.ops.reference import cross_entropy as reference

__all__ = ["cross_entropy_backward_op", "cross_entropy_statistics_op", "empty_statistics"]


def empty_statistics(logits: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((4, logits.shape[0]), dtype=wide)


cross_entropy_statistics_op = declare(
    reference.cross_entropy_statistics,
    cuda="cross_entropy:cross_entropy_statistics",
    outputs=lambda of: empty_statistics(of.logits),
)
cross_entropy_backward_op = declare(
    reference.cross_entropy_backward,
    cuda="cross_entropy:cross_entropy_backward",
    outputs=lambda of: of.logits.new_empty(of.logits.shape),
)
