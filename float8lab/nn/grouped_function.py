"""The linear layers of all experts of a mixture as one autograd function.

M tokens, E experts, N out features, K in features. ``y = x @ w[e].T`` for the rows of each expert
e; the rows of an expert follow those of the expert before, and ``offs``, ``[E]``, are where they
end. What is cast, saved and computed again is in ``gemm.py``. A weight has one cast for each
expert: under a recipe of one scale per tensor, a scale for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.nn.gemm import Gradient, backward, forward, output_dtype
from float8lab.nn.precision import Call
from float8lab.recipes.recipe import Float8CurrentScaling
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = ["GroupedFunction", "into_buffer", "stacked"]

_IN_HIGH_PRECISION = Call(
    Float8CurrentScaling(override_linear_precision=(True, True, True)), None, record=False
)


class GroupedFunction(Float8Function):
    """``x @ weight[e].T + bias[e]`` for the rows of each expert: ``run`` it.

    Args:
        x: ``[M, K]``.
        weight: ``[E, N, K]``, ordinary or a Float8Tensor.
        bias: ``[E, N]`` or None.
        offs: ends of the experts' rows, ``[E]``, int32 or int64; rows beyond the last give zeros.
        call: how to cast, from ``Precision.begin``; None is high precision.

    Returns:
        ``[M, N]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        call: Call | None,
    ) -> Tensor:
        call = call or _IN_HIGH_PRECISION
        y, saved = forward(
            x, weight, bias, call,
            needs=ctx.needs_input_grad[:2], dtype=output_dtype(x), offs=offs,
        )  # fmt: skip
        ctx.save_for_backward(offs, *saved)
        ctx.call = call
        ctx.shape = x.shape[0], *weight.shape[1:]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (offs, *saved) = ctx.needs_input_grad[:3], ctx.saved_tensors
        gradient = Gradient(dy, ctx.call, needs=needs, offs=offs)
        grads = backward(
            gradient, None, tuple(saved), ctx.call,
            needs=needs, shape=ctx.shape, dtypes=ctx.dtypes,
        )  # fmt: skip
        return *grads, None, None


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Parameters of one shape as one tensor, without a copy where they follow in memory."""
    first = weights[0]
    if torch.compiler.is_compiling() or isinstance(first, Float8Tensor):
        return torch.stack(list(weights))
    found: Tensor = _Stacked.run(*weights)
    return found


class _Stacked(Float8Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        first = weights[0]
        size = first.numel() * first.element_size()
        at = [weight.data_ptr() for weight in weights]
        storage = first.untyped_storage().data_ptr()
        if size and all(
            address == at[0] + index * size
            and weight.is_contiguous()
            and weight.untyped_storage().data_ptr() == storage
            for index, (address, weight) in enumerate(zip(at, weights, strict=True))
        ):
            shape = (len(weights), *first.shape)
            return first.detach().as_strided(shape, (first.numel(), *first.stride()))
        return torch.stack(weights)

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad) if dw is None else dw.unbind()


def into_buffer(x: Tensor, buffer: Tensor) -> Tensor:
    """``x``, whose gradient is written to a buffer, and given as that."""
    found: Tensor = _IntoBuffer.run(x, buffer)
    return found


class _IntoBuffer(Float8Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.buffer.copy_(dx), None
