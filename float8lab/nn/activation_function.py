"""Activations in high precision as an autograd function.  M tokens, F features."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from float8lab.arguments import check_choice
from float8lab.ops import ACTIVATIONS, value_of_op
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = ["activate", "check_activation"]


def check_activation(activation: str) -> bool:
    """Whether an activation gates, that is, takes twice as many features as it gives."""
    check_choice("activation", activation, ACTIVATIONS)
    return ACTIVATIONS[activation][1]


def activate(h: Tensor, activation: str) -> Tensor:
    """Apply the activation to ``h`` over the last dimension, and save ``h`` for backward."""
    return _Activation.run(h, activation)


class _Activation(Float8Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(h)
        ctx.activation = activation
        return value_of_op(activation, [h], h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        return value_of_op(f"{ctx.activation}_backward", [h, dy], h.dtype), None
