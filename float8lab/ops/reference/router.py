"""Choose the experts of each token, and their probabilities.  T tokens, E experts.

Scores are softmax, sigmoid or sqrt(softplus) of the logits, in float32. Among equal scores, that of
the first expert counts as larger, and NaN counts as larger than any score.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from float8lab.ops.declare import declare
from float8lab.ops.reference.prologue import widen

__all__ = [
    "LEAST_SUM", "SCORE_FUNCTIONS", "route", "route_backward", "route_backward_op", "route_op",
    "route_outputs", "shares",
]  # fmt: skip

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
LEAST_SUM = 1e-20
"""This is added to a sum of scores before scores are divided by the sum."""


def _pointwise(z: Tensor, score_function: str) -> Tensor:
    return z.sigmoid() if score_function == "sigmoid" else F.softplus(z).sqrt()


def _are_best(ranked: Tensor, count: int) -> Tensor:
    """Return which scores are the largest ``count`` of each row, the first ones among equals."""
    places = ranked.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(ranked, dtype=torch.bool).scatter_(-1, places, True)


def shares(
    z: Tensor, chosen: Tensor, topk: int, score_function: str, pre_softmax: bool
) -> tuple[Tensor, Tensor]:
    """Return scores of all experts, and the divisor that makes them probabilities."""
    if score_function == "softmax":
        z = z if pre_softmax else z.masked_fill(~chosen, -torch.inf)
        return z.softmax(-1), z.new_ones(())
    scores = _pointwise(z, score_function)
    if topk == 1:
        return scores, z.new_ones(())
    return scores, torch.where(chosen, scores, 0).sum(-1, keepdim=True) + LEAST_SUM


def route(
    logits: Tensor, expert_bias: Tensor | None, topk: int, score_function: str, pre_softmax: bool,
    num_groups: int, group_topk: int, scaling: float, dense: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose the experts of each token by their scores.

    Args:
        logits: ``[T, E]``, any float.
        expert_bias: ``[E]``, any float, added to the scores by which experts are chosen, but to no
            probability.
        score_function: one of ``SCORE_FUNCTIONS``.
        pre_softmax: whether softmax is over all experts; else over those with the best logits.
        num_groups: with ``group_topk``, only experts of the best groups are chosen. A group has
            E / num_groups neighbours, ranked by the sum of its best ``topk // group_topk`` scores.
        group_topk: how many groups are chosen; 0 means all groups.
        dense: return the scores of all experts, divided by their sum, in place of probabilities;
            softmax is over all experts then.

    Returns:
        - ``[T, E]``: the scores of the chosen experts times ``scaling``, 0 elsewhere, in the dtype
          of ``logits``. If ``topk`` is above 1, scores other than softmax are divided by their sum
          over the chosen experts. With ``dense``, the result is in float32.
        - ``[T, E]`` bool: which experts are chosen.
    """
    z, softmax = widen(logits), score_function == "softmax"
    if softmax:
        ranked = z.softmax(-1) if pre_softmax or dense else z
    else:
        ranked = _pointwise(z, score_function)
    if expert_bias is not None:
        ranked = ranked + widen(expert_bias)
    if group_topk:
        groups = ranked.unflatten(1, (num_groups, -1))
        values = groups.sort(dim=-1, descending=True, stable=True).values[..., : topk // group_topk]
        inside = _are_best(functools.reduce(torch.add, values.unbind(-1)), group_topk)
        ranked = groups.masked_fill(~inside[..., None], -torch.inf).flatten(1)
    chosen = _are_best(ranked, topk)
    if dense:
        scores, score_sum = shares(z, torch.ones_like(chosen), 2, score_function, True)
        return scores / score_sum, chosen
    scores, score_sum = shares(z, chosen, topk, score_function, pre_softmax)
    return torch.where(chosen, scores / score_sum * scaling, 0).to(logits.dtype), chosen


def route_backward(
    dprobs: Tensor, logits: Tensor, routing_map: Tensor, topk: int, score_function: str,
    pre_softmax: bool, scaling: float, dense: bool,
) -> Tensor:  # fmt: skip
    """Compute the gradient of the logits, ``[T, E]`` in their dtype.

    Args:
        dprobs: ``[T, E]``, gradient of the probabilities, or with ``dense`` of the scores. Other
            arguments are those of ``route``, and the ``routing_map`` that it returned.
    """
    z = widen(logits)
    if dense:
        routing_map, topk, pre_softmax, scaling = torch.ones_like(routing_map), 2, True, 1.0
    scores, score_sum = shares(z, routing_map, topk, score_function, pre_softmax)
    grad = torch.where(routing_map, dprobs.to(z.dtype) * scaling, 0)
    if score_function == "softmax":
        return (scores * (grad - (scores * grad).sum(-1, keepdim=True))).to(logits.dtype)
    if topk > 1:
        grad = (grad - (scores / score_sum * grad).sum(-1, keepdim=True)) / score_sum
    slope = z.sigmoid()
    if score_function == "sigmoid":
        slope = slope * (-z).sigmoid()
    else:
        slope = torch.where(scores > 0, slope / (2 * scores), 0)
    return torch.where(routing_map, grad * slope, 0).to(logits.dtype)


def route_outputs(of: Any) -> tuple[Tensor, Tensor]:
    x = of.logits
    dtype = torch.promote_types(x.dtype, torch.float32) if of.dense else x.dtype
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape, dtype=torch.bool)


route_op = declare(
    route, cuda="router:route", outputs=route_outputs, sharding=lambda of: [((0, 0), {"logits": 0})]
)
route_backward_op = declare(
    route_backward,
    cuda="router:route_backward",
    outputs=lambda of: of.logits.new_empty(of.logits.shape),
    sharding=lambda of: [((0,), dict.fromkeys(("dprobs", "logits", "routing_map"), 0))],
)
