"""Attention in FP8: the cast of q, k and v, and the autograd function.

A recipe with ``fp8_dpa`` (or ``fp8_mha``) asks for it. q, k, v are cast to the recipe's forward
format, each with one scale per tensor, delayed under ``DelayedScaling``, else from the tensor
itself by the recipe's scale rule, whatever blocks the recipe gives to linear layers. Backward is in
high precision; q, k, v in FP8, the output and one float32 per query are saved for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8lab import ops
from float8lab.nn.attention.backends import Problem, why_a_matrix
from float8lab.nn.casts import show_cast
from float8lab.nn.precision import Call, Precision
from float8lab.recipes.recipe import LinearPlan, Recipe
from float8lab.recipes.region import in_backward
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = [
    "AttentionPrecision",
    "K",
    "Q",
    "V",
    "asks_for_fp8_attention",
    "fp8_attention",
    "why_not_fp8",
]

Q, K, V = 0, 1, 2
"""Indices of the tensors that attention casts."""


class AttentionPrecision(Precision):
    """The FP8 state of one attention module."""

    def slot_formats(self, plan: LinearPlan) -> tuple[list[torch.dtype], list[bool]]:
        """Formats of q, k and v."""
        return [plan.x.fp8_dtype] * 3, [True] * 3

    def active_recipe(self) -> Recipe | None:
        """The recipe in force if it asks for FP8 attention."""
        recipe = super().active_recipe()
        return recipe if recipe is not None and asks_for_fp8_attention(recipe) else None

    def has_slots(self, recipe: Recipe) -> bool:
        """Whether a recipe has delayed scales of q, k and v."""
        return super().has_slots(recipe) and asks_for_fp8_attention(recipe)


def asks_for_fp8_attention(recipe: Recipe) -> bool:
    """Whether attention runs in FP8 under a recipe."""
    return recipe.fp8_dpa or recipe.fp8_mha


def why_not_fp8(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> str | None:
    """Why attention stays in high precision; None for a call that Hopper's kernel takes."""
    # The kernel's limits hold on a CPU, too. Any other call would have to hold the scores in
    # memory.
    if q.dtype == torch.float64:
        return "float64 stays in high precision"
    if problem.dropout:
        return "it has no dropout"
    if max(q.shape[3], v.shape[3]) > ops.LARGEST_HEAD:
        heads = f"{q.shape[3]}, {v.shape[3]}"
        return f"its heads are of up to {ops.LARGEST_HEAD}, and these are of {heads}"
    if not ops.has_fp8_attention(q.device):
        return "it needs a Hopper GPU (SM90)"
    return why_a_matrix(q.shape[2], k.shape[2], problem)


def fp8_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem, call: Call) -> Tensor:
    """Attention with FP8 GEMMs, for a call that ``why_not_fp8`` has no reason against."""
    causal = problem.mask.is_plain_causal(q.shape[2], k.shape[2])
    return _Attention.run(q, k, v, (causal, problem.scale), call)


def _cast(x: Tensor, index: int, call: Call) -> tuple[Tensor, Tensor]:
    laid_out, order = _as_in_memory(x)
    outer, middle, inner, size = laid_out.shape
    rows = laid_out.reshape(outer * middle, inner * size)
    spec = call.plan.x.with_one_scale()
    operand = call.scales.quantize(rows, index, spec, align=1).rowwise
    if call.watched and not in_backward():  # where it is a repetition, by activation checkpointing
        show_cast(rows, operand, spec, index, call)
    return operand.data.view(laid_out.shape).permute(order), operand.scale


_ORDERS = (((0, 2, 1, 3), (0, 2, 1, 3)), ((2, 0, 1, 3), (1, 2, 0, 3)))
"""Permutations of ``[B, H, S, D]`` to ``[B, S, H, D]`` and ``[S, B, H, D]``, and back."""


def _as_in_memory(x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """``x`` in its order in memory, if that is of a matrix, and the permutation back."""
    for order, back in _ORDERS:
        y = x.permute(order)
        stride = y.stride()
        if stride[3] == 1 and stride[2] == y.shape[3] and stride[0] == y.shape[1] * stride[1]:
            return y, back
    return x, (0, 1, 2, 3)


class _Attention(Float8Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: tuple[bool, float], call: Call
    ) -> Tensor:
        (q8, q_scale), (k8, k_scale), (v8, v_scale) = (
            _cast(x, index, call) for index, x in ((Q, q), (K, k), (V, v))
        )
        operands = (q8, k8, v8, q_scale, k_scale, v_scale)
        out, lse = ops.fp8_attention_op(*operands, *settings, q.dtype)
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(*operands, out, lse)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ops.fp8_attention_backward_op(dout, *ctx.saved_tensors, *ctx.settings)
        needs = ctx.needs_input_grad[:3]
        grads = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return (*grads, None, None)
