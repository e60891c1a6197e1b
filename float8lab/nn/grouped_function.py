"""The linear layers of all experts of an MoE layer as one autograd function.

M tokens, E experts, N out features, K in features. ``y = x @ w[e].T`` for the rows of each expert
e; the rows are in the order of the experts, and ``offs``, ``[E]``, are their offsets. ``gemm.py``
decides what is cast, saved and recomputed. The weights of the experts are cast separately: under a
recipe with one scale per tensor, each has its own scale.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from float8lab.nn.expert_parameters import is_memory_of_parameter
from float8lab.nn.gemm import Saved, backward, forward, output_dtype
from float8lab.nn.precision import Call, Precision, call_under
from float8lab.ops import Groups, Offsets
from float8lab.recipes.recipe import Float8CurrentScaling
from float8lab.recipes.region import STATE
from float8lab.tensor import differentiation

__all__ = ["GroupedFunction", "calibrate_experts"]

_CALL_IN_HIGH_PRECISION = call_under(Float8CurrentScaling(override_linear_precision=(True,) * 3))


class GroupedFunction(differentiation.Float8Function):
    """Compute ``x @ weight[e].T + bias[e]`` for the rows of each expert, by ``run``.

    Args:
        x: ``[M, K]``.
        weight: ``[E, N, K]``, ordinary or a Float8Tensor.
        bias: ``[E, N]`` or None.
        offs: offsets of the experts' rows, ``[E]``, int32 or int64; later rows give zeros.
        call: how to cast, from ``Precision.begin``; None is high precision.
        save_memory: save little for backward: share the cast of x with another layer if it has made
            one, and requantize weights rather than save their FP8 data.
        count: how many of ``parameters`` are the experts' weights; the others are their biases.
        parameters: if ``weight`` or ``bias`` is a view of the memory of one parameter for each
            expert, these parameters, which then get the gradients.

    Returns:
        ``[M, N]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, call: Call | None,
        save_memory: bool = False, count: int = 0, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        offsets = Offsets(offs, None) if call is None else Offsets.of(offs, x.shape[0])
        call = call or _CALL_IN_HIGH_PRECISION
        ctx.counts = count, len(parameters) - count
        y, saved = forward(
            x, weight, bias, call, needs=_join_needs(ctx.needs_input_grad, ctx.counts)[:2],
            dtype=output_dtype(x), offsets=offsets,
            save_memory=save_memory and is_memory_of_parameter(weight),
            inp=x if save_memory else None,
        )  # fmt: skip
        ctx.save_for_backward(*offsets, *saved)
        ctx.call = call
        ctx.shape = x.shape[0], *weight.shape[1:]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # The saved view of their memory has the version counter of the first parameter only.
        ctx.weights = parameters[:count] if any(tensor is weight for tensor in saved) else ()
        ctx.versions = [*map(differentiation.version_of, ctx.weights)]
        return y

    @staticmethod
    @differentiation.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wants, (offs, plan, *saved) = differentiation.wanted_gradients(ctx), ctx.saved_tensors
        needs = _join_needs(wants, ctx.counts)
        weights, biases = ctx.counts
        last = len(wants) - biases
        if [*map(differentiation.version_of, ctx.weights)] != ctx.versions:
            raise RuntimeError(
                "weights must stay as they are from forward to backward; got one that has been "
                "modified by an inplace operation. Call backward before the optimizer's step."
            )
        dx, *expert_grads = backward(
            dy, None, Saved._make(saved), ctx.call,
            needs=needs, shape=ctx.shape, dtypes=ctx.dtypes, offsets=Offsets(offs, plan),
            has_gradient=wants[last - weights : last],
        )  # fmt: skip
        single: list[Tensor | None] = []
        for gradient, count in zip(expert_grads, ctx.counts, strict=True):
            single += [None] * count if gradient is None else gradient.unbind()[:count]
        return dx, *expert_grads, None, None, None, None, *single


def _join_needs(needs: tuple[bool, ...], counts: tuple[int, int]) -> tuple[bool, bool, bool]:
    """Return whether the input, any expert's weight, and any expert's bias need gradients."""
    weights, biases = counts
    expert_needs = needs[len(needs) - weights - biases :]
    dx, dw, db = needs[:3]
    return dx, dw or any(expert_needs[:weights]), db or any(expert_needs[weights:])


def calibrate_experts(
    precision: Precision, x: Tensor, weight: Tensor, offs: Tensor, held: range | None
) -> None:
    """Record amaxes of a grouped GEMM in high precision, if an autocast asks for calibration."""
    if STATE.autocast.calibrating:
        groups = Groups.of(x.detach(), Offsets(offs, None))
        precision.calibrate(groups, weight.detach(), experts=held)
