"""The MLPs of all experts as one autograd function.  M rows, E experts, K features, F between.

``y = activation(x @ w1[e].T + b1[e]) @ w2[e].T + b2[e]`` for the rows of each expert e. The
activation is a ``Source``: it is computed while fc2's input is cast, and its gradient while fc1's
output gradient is, so that neither is ever written. Saved for backward are fc1's output, which the
derivative needs, and fc1's input in FP8, laid out for its weight gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.nn.gemm import output_dtype
from float8lab.nn.grouped_function import PARTS, Gradient, backward, forward
from float8lab.nn.precision import Call
from float8lab.ops import Source
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = ["Layer", "expert_mlp"]

Layer = tuple[Tensor, Tensor | None]
"""Weight ``[E, N, K]``, in any layout, and bias ``[E, N]`` or None."""


def expert_mlp(
    x: Tensor, offs: Tensor, fc1: Layer, fc2: Layer, activation: str, calls: tuple[Call, Call]
) -> Tensor:
    """``activation(x @ w1[e].T + b1[e]) @ w2[e].T + b2[e]`` for the rows of each expert.

    Args:
        x: ``[M, K]``.
        offs: ends of the experts' rows, ``[E]``; rows beyond the last give zeros.
        fc1: weight ``[E, F, K]``, or ``[E, 2 F, K]`` if the activation gates, and bias or None.
        fc2: weight ``[E, K, F]`` and bias or None.
        activation: one of ``ACTIVATIONS``.
        calls: how each layer's operands are cast.

    Returns:
        ``[M, K]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """
    y: Tensor = _ExpertMlp.run(x, *fc1, *fc2, offs, _MlpCall(activation, *calls))
    return y


class _MlpCall(NamedTuple):
    """How one call of the experts runs."""

    activation: str
    fc1: Call
    fc2: Call


class _ExpertMlp(Float8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
        offs: Tensor,
        how: _MlpCall,
    ) -> Tensor:
        dtype, needs = output_dtype(x), ctx.needs_input_grad
        needs_dh, needs_dw2 = any(needs[:3]), needs[3]
        h, saved1 = forward(x, fc1_weight, fc1_bias, offs, how.fc1, needs=needs[:2], dtype=dtype)
        y, saved2 = forward(
            Source(how.activation, [h], dtype), fc2_weight, fc2_bias, offs, how.fc2,
            needs=(needs_dh, needs_dw2), dtype=dtype,
        )  # fmt: skip
        ctx.save_for_backward(offs, h if needs_dh or needs_dw2 else None, *saved1, *saved2)
        ctx.how, ctx.dtype = how, dtype
        ctx.shapes = (x.shape[0], *fc1_weight.shape[1:]), (x.shape[0], *fc2_weight.shape[1:])
        ctx.dtypes = (
            (x.dtype, fc1_weight.dtype, None if fc1_bias is None else fc1_bias.dtype),
            (dtype, fc2_weight.dtype, None if fc2_bias is None else fc2_bias.dtype),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        offs, h, *rest = ctx.saved_tensors
        saved1, saved2 = rest[:PARTS], rest[PARTS:]
        how, needs = ctx.how, ctx.needs_input_grad
        wanted = (any(needs[:3]), needs[3], needs[4])
        gradient = Gradient(dy, offs, how.fc2, needs=wanted)
        da, dw2, db2 = backward(
            gradient, Source(how.activation, [] if h is None else [h], ctx.dtype), saved2, offs,
            how.fc2, needs=wanted, shape=ctx.shapes[1], dtypes=ctx.dtypes[1],
        )  # fmt: skip
        if da is None:
            return None, None, None, dw2, db2, None, None
        wanted = needs[:3]
        dh = Source(f"{how.activation}_backward", [h, da], ctx.dtype)
        gradient = Gradient(dh, offs, how.fc1, needs=wanted)
        # The largest tensors of the layer, of which the GEMMs need the cast alone.
        del h, da, dh, saved2, rest
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        dx, dw1, db1 = backward(
            gradient, None, saved1, offs, how.fc1,
            needs=wanted, shape=ctx.shapes[0], dtypes=ctx.dtypes[0],
        )  # fmt: skip
        return dx, dw1, db1, dw2, db2, None, None
