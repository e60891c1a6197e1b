"""The linear layers of all experts of an MoE layer as one autograd function.

M tokens, E experts, N out features, K in features. ``y = x @ w[e].T`` for the rows of each expert
e; the rows of an expert follow those of the expert before, and ``offs``, ``[E]``, are their
offsets. What is cast, saved and recomputed is in ``gemm.py``. A weight has one cast for each
expert: under a recipe of one scale per tensor, a scale for each.
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

_IN_HIGH_PRECISION = call_under(Float8CurrentScaling(override_linear_precision=(True, True, True)))


class GroupedFunction(differentiation.Float8Function):
    """``x @ weight[e].T + bias[e]`` for the rows of each expert: ``run`` it.

    Args:
        x: ``[M, K]``.
        weight: ``[E, N, K]``, ordinary or a Float8Tensor.
        bias: ``[E, N]`` or None.
        offs: offsets of the experts' rows, ``[E]``, int32 or int64; later rows give zeros.
        call: how to cast, from ``Precision.begin``; None is high precision.
        save_memory: hold little until backward: x as another layer has cast it, where one has, and
            no FP8 data of a weight, which is requantized.
        count: how many of ``parameters`` are the experts' weights; the others are their biases.
        parameters: where ``weight`` or ``bias`` is the memory of parameters, one for each expert,
            these parameters, which have the gradients then.

    Returns:
        ``[M, N]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, offs: Tensor, call: Call | None,
        save_memory: bool = False, count: int = 0, *parameters: Tensor,
    ) -> Tensor:  # fmt: skip
        offsets = Offsets(offs, None) if call is None else Offsets.of(offs, x.shape[0])
        call = call or _IN_HIGH_PRECISION
        ctx.counts = count, len(parameters) - count
        y, saved = forward(
            x, weight, bias, call, needs=_joined(ctx.needs_input_grad, ctx.counts)[:2],
            dtype=output_dtype(x), offsets=offsets,
            save_memory=save_memory and is_memory_of_parameter(weight),
            inp=x if save_memory else None,
        )  # fmt: skip
        ctx.save_for_backward(*offsets, *saved)
        ctx.call = call
        ctx.shape = x.shape[0], *weight.shape[1:]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # Their memory, which is saved, has the counter of writes of the first alone.
        ctx.weights = parameters[:count] if any(tensor is weight for tensor in saved) else ()
        ctx.versions = [*map(differentiation.version_of, ctx.weights)]
        return y

    @staticmethod
    @differentiation.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wants, (offs, plan, *saved) = differentiation.wanted_gradients(ctx), ctx.saved_tensors
        needs = _joined(wants, ctx.counts)
        weights, biases = ctx.counts
        last = len(wants) - biases
        if [*map(differentiation.version_of, ctx.weights)] != ctx.versions:
            raise RuntimeError(
                "weights must stay as they are from forward to backward; got one that has been "
                "modified by an inplace operation. Call backward before the optimizer's step."
            )
        dx, *of_experts = backward(
            dy, None, Saved._make(saved), ctx.call,
            needs=needs, shape=ctx.shape, dtypes=ctx.dtypes, offsets=Offsets(offs, plan),
            has_gradient=wants[last - weights : last],
        )  # fmt: skip
        single: list[Tensor | None] = []
        for gradient, count in zip(of_experts, ctx.counts, strict=True):
            single += [None] * count if gradient is None else gradient.unbind()[:count]
        return dx, *of_experts, None, None, None, None, *single


def _joined(needs: tuple[bool, ...], counts: tuple[int, int]) -> tuple[bool, bool, bool]:
    """Whether input, weights and biases need gradients, the last two perhaps of single experts."""
    weights, biases = counts
    of_experts = needs[len(needs) - weights - biases :]
    dx, dw, db = needs[:3]
    return dx, dw or any(of_experts[:weights]), db or any(of_experts[weights:])


def calibrate_experts(
    precision: Precision, x: Tensor, weight: Tensor, offs: Tensor, held: range | None
) -> None:
    """Record amaxes of a grouped GEMM in high precision, if an autocast asks for calibration."""
    if STATE.autocast.calibrating:
        groups = Groups.of(x.detach(), Offsets(offs, None))
        precision.calibrate(groups, weight.detach(), experts=held)
