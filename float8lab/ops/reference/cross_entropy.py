"""Cross entropy of logits whose vocabulary is sharded.  M tokens, V local logits.

Statistics of each row are computed from the local logits, and the caller combines them over the
shards; the gradient then needs the local logits and some numbers of each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab.ops.declare import declare
from float8lab.ops.reference.prologue import widen

__all__ = [
    "cross_entropy_backward", "cross_entropy_backward_op", "cross_entropy_statistics",
    "cross_entropy_statistics_op", "empty_statistics",
]  # fmt: skip


def cross_entropy_statistics(logits: Tensor, target: Tensor) -> Tensor:
    """Reduce each row to the statistics that the loss needs.

    Args:
        logits: ``[M, V]``, any float.
        target: ``[M]`` integers: the column of a row's target; it is local if from 0 to V - 1.

    Returns:
        ``[4, M]``, float32, or float64 for float64: the largest logit of each row, the sum of
        ``exp(logit - largest)``, the target's logit (0 if it is not local), and the sum of the
        logits. A row without a logit above -inf has sum 0.
    """
    x, V = widen(logits), logits.shape[1]
    largest = x.amax(1) if V else x.new_full(x.shape[:1], -torch.inf)
    exp_sum = (x - torch.where(largest == -torch.inf, 0.0, largest)[:, None]).exp().sum(1)
    is_local = (target >= 0) & (target < V)
    target_logit = torch.zeros_like(exp_sum)
    if V:
        column = torch.where(is_local, target, 0).long()
        target_logit = torch.where(is_local, x.gather(1, column[:, None]).squeeze(1), 0.0)
    return torch.stack([largest, exp_sum, target_logit, x.sum(1)])


def cross_entropy_backward(logits: Tensor, target: Tensor, factors: Tensor) -> Tensor:
    """Compute the gradient of the logits, ``[M, V]`` in their dtype.

    Args:
        factors: ``[4, M]``, float32, or float64 for float64: the logarithm of the sum of the
            exponentials of a row's logits over all shards; a factor of the softmax; numbers that
            are subtracted at the target, and everywhere. With factor 0, the softmax counts as 0.
    """
    x, V = widen(logits), logits.shape[1]
    log_sum, factor, at_target, everywhere = (factor_row[:, None] for factor_row in factors)
    softmax = torch.where(factor == 0, 0.0, factor * (x - log_sum).exp())
    is_target = torch.arange(V, device=x.device) == target[:, None]
    return (softmax - torch.where(is_target, at_target, 0.0) - everywhere).to(logits.dtype)


def empty_statistics(logits: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return logits.new_empty((4, logits.shape[0]), dtype=wide)


cross_entropy_statistics_op = declare(
    cross_entropy_statistics,
    cuda="cross_entropy:cross_entropy_statistics",
    outputs=lambda of: empty_statistics(of.logits),
)
cross_entropy_backward_op = declare(
    cross_entropy_backward,
    cuda="cross_entropy:cross_entropy_backward",
    outputs=lambda of: of.logits.new_empty(of.logits.shape),
)
