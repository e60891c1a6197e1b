"""Routers of MoE layers choose the experts of each token and their probabilities.

T tokens, E experts. Names, arguments and meaning are those of Transformer Engine. Scores are
computed in float32; routers stay in high precision.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab import arguments
from float8lab.ops import SCORE_FUNCTIONS, route_backward_op, route_op
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = [
    "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function",
]  # fmt: skip


class _Routing(NamedTuple):
    """The arguments of ``ops/reference/router.py`` that are not tensors."""

    topk: int
    score_function: str
    pre_softmax: bool = False
    num_groups: int = 1
    group_topk: int = 0
    scaling: float = 1.0
    dense: bool = False


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    expert_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose each token's experts by their scores, and return their probabilities.

    Args:
        logits: ``[..., E]``, float32, bfloat16, float16 or float64.
        topk: the number of experts of a token.
        use_pre_softmax: apply softmax over all experts rather than over the chosen ones.
        num_groups: with ``group_topk``, the number of groups into which the experts are divided.
        group_topk: choose experts from this number of groups, those whose ``topk // group_topk``
            best experts have the largest sum of scores. None or 0 chooses from all experts.
        scaling_factor: factor of the probabilities; None is 1.
        score_function: ``"softmax"``; or ``"sigmoid"`` or ``"sqrtsoftplus"``, divided by their sum
            over the chosen experts if ``topk`` is above 1.
        expert_bias: ``[E]``, added to the scores for choosing experts, but not to probabilities; it
            gets no gradient. It must be None with softmax.

    Returns:
        Probabilities of the shape and dtype of ``logits``, 0 where an expert is not chosen; and the
        routing map, ``[T, E]`` bool.

    Raises:
        ValueError: sizes do not match, the score function is unknown, or a bias with softmax.

    >>> probs, routing_map = float8lab.router.fused_topk_with_score_function(
    ...     torch.tensor([[0.0, 1.0, 1.0]]), 2
    ... )
    >>> probs, routing_map
    (tensor([[0.0000, 0.5000, 0.5000]]), tensor([[False,  True,  True]]))
    """
    experts = _check_logits(logits, topk, score_function)
    arguments.check_flags(use_pre_softmax=use_pre_softmax)
    groups = arguments.check_size("num_groups", num_groups, optional=True) or 1
    best = arguments.check_size("group_topk", group_topk, optional=True) or 0
    scaling = 1.0 if scaling_factor is None else scaling_factor
    scaling = arguments.check_number("scaling_factor", scaling)
    if experts % groups:
        raise ValueError(
            f"num_groups must divide the {experts} experts of logits; got {groups}. Choose another."
        )
    if best > min(groups, topk) or (best and best * (experts // groups) < topk):
        raise ValueError(
            f"group_topk must be at most num_groups and topk, and leave topk experts to choose "
            f"from; got {best} of num_groups {groups} for topk {topk}. Choose another."
        )
    if expert_bias is not None:
        arguments.check_tensor("expert_bias", expert_bias)
        if score_function == "softmax":
            raise ValueError(
                f"expert_bias must be None with score_function='softmax'; got "
                f"{arguments.shown(expert_bias)}. Use 'sigmoid' or 'sqrtsoftplus'."
            )
        if expert_bias.shape != (experts,) or expert_bias.dtype not in arguments.PARAMETER_DTYPES:
            raise ValueError(
                f"expert_bias must have one floating-point number for each of the {experts} "
                f"experts of logits; got {arguments.shown(expert_bias)}. Reshape or convert it."
            )
        expert_bias = expert_bias.detach()
    routing = _Routing(topk, score_function, bool(use_pre_softmax), groups, best, scaling)
    probs, routing_map = _Route.run(logits.reshape(-1, experts), expert_bias, routing)
    return probs.view(logits.shape), routing_map


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    """Compute the scores of all experts and the best experts, for the auxiliary loss.

    Args:
        score_function: ``"softmax"``; or ``"sigmoid"`` or ``"sqrtsoftplus"``, divided by their sum.

    Returns:
        The routing map, ``[T, E]`` bool; and the scores, of the shape of ``logits``, float32.

    Raises:
        ValueError: ``topk`` exceeds the number of experts, or the score function is unknown.

    >>> logits = torch.tensor([[0.0, 1.0, 1.0]])
    >>> routing_map, scores = float8lab.router.fused_compute_score_for_moe_aux_loss(
    ...     logits, 1, "softmax"
    ... )
    >>> torch.equal(scores, logits.softmax(-1)), routing_map
    (True, tensor([[False,  True, False]]))
    """
    experts = _check_logits(logits, topk, score_function)
    routing = _Routing(topk, score_function, dense=True)
    scores, routing_map = _Route.run(logits.reshape(-1, experts), None, routing)
    return routing_map, scores.view(logits.shape)


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int | Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    """Compute the loss that balances the load of the experts, a scalar in the dtype of ``probs``.

    It is ``coeff * num_experts / (topk * total_num_tokens ** 2)`` times the sum over all experts of
    the expert's number of tokens times the sum of its probabilities, computed in float32.

    Args:
        probs: ``[T, E]``, any float: the scores of all experts.
        tokens_per_expert: ``[E]``, any dtype.
        total_num_tokens: the number of tokens of all ranks for which the loss is computed; or a
            one-element tensor on the device, which a CUDA graph reads in each replay.
        coeff: the weight of the loss.

    Raises:
        ValueError: sizes do not match.

    >>> probs, counts = torch.full((4, 2), 0.5), torch.tensor([2, 2])
    >>> float8lab.router.fused_moe_aux_loss(probs, counts, 4, 2, 1, 0.01)
    tensor(0.0100)
    """
    arguments.check_floating("probs", probs, "Convert it.")
    arguments.check_tensor("tokens_per_expert", tokens_per_expert)
    if tokens_per_expert.is_complex():
        raise TypeError(
            f"tokens_per_expert must hold numbers; got {arguments.shown(tokens_per_expert)}. Pass "
            "counts."
        )
    arguments.check_shape("tokens_per_expert", tokens_per_expert, (None,))
    advice = "Give it a column for each expert of tokens_per_expert."
    arguments.check_shape("probs", probs, (None, len(tokens_per_expert)), advice)
    for name, size in (("num_experts", num_experts), ("topk", topk)):
        arguments.check_size(name, size, minimum=1)
    sum_dtype = torch.promote_types(probs.dtype, torch.float32)
    if isinstance(total_num_tokens, Tensor) and total_num_tokens.numel() == 1:
        total_num_tokens = total_num_tokens.reshape(()).to(sum_dtype)
    else:
        arguments.check_size("total_num_tokens", total_num_tokens, minimum=1)
    arguments.check_number("coeff", coeff)
    weight = tokens_per_expert.to(sum_dtype) * (coeff * num_experts / (topk * total_num_tokens**2))
    return (probs.sum(0, dtype=sum_dtype) * weight).sum().to(probs.dtype)


def _check_logits(logits: Tensor, topk: int, score_function: str) -> int:
    """Check the logits and options, and return the number of experts."""
    arguments.check_floating("logits", logits, "Convert it.")
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(
            f"logits must have experts as their last dimension; got shape {tuple(logits.shape)}. "
            "Reshape them."
        )
    experts = int(logits.shape[-1])
    if arguments.check_size("topk", topk, minimum=1) > experts:
        raise ValueError(
            f"topk must be at most the {experts} experts of logits; got {topk}. Choose fewer."
        )
    arguments.check_choice("score_function", score_function, SCORE_FUNCTIONS)
    return experts


class _Route(Float8Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, expert_bias: Tensor | None, routing: _Routing
    ) -> tuple[Tensor, Tensor]:
        probs, routing_map = route_op(logits, expert_bias, *routing)
        ctx.save_for_backward(logits, routing_map)
        ctx.mark_non_differentiable(routing_map)
        ctx.routing = routing
        return probs, routing_map

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprobs: Tensor, _: None) -> tuple[Tensor, None, None]:
        topk, score_function, pre_softmax, _, _, scaling, dense = ctx.routing
        options = topk, score_function, pre_softmax, scaling, dense
        return route_backward_op(dprobs, *ctx.saved_tensors, *options), None, None
