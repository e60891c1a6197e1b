"""The linear layers of all experts of a mixture as one autograd function.

M tokens, E experts, N out features, K in features. ``y = x @ w[e].T`` for the rows of each expert
e; the rows of an expert follow those of the expert before, and ``offs``, ``[E]``, are where they
end. What is cast, saved and computed again is in ``gemm.py``. A weight has one cast for each
expert: under a recipe of one scale per tensor, a scale for each.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.nn.casts import spec_of_experts
from float8lab.nn.gemm import Saved, backward, forward, output_dtype
from float8lab.nn.precision import Call, call_under
from float8lab.ops import Offsets
from float8lab.recipes.recipe import Float8CurrentScaling
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import (
    Float8Function,
    once_differentiable,
    version_of,
    wanted_gradients,
)

__all__ = [
    "GroupedFunction",
    "as_one",
    "in_first_rank",
    "into_buffer",
    "is_memory_of_parameter",
    "is_of",
]

_IN_HIGH_PRECISION = call_under(Float8CurrentScaling(override_linear_precision=(True, True, True)))


class GroupedFunction(Float8Function):
    """``x @ weight[e].T + bias[e]`` for the rows of each expert: ``run`` it.

    Args:
        x: ``[M, K]``.
        weight: ``[E, N, K]``, ordinary or a Float8Tensor.
        bias: ``[E, N]`` or None.
        offs: ends of the experts' rows, ``[E]``, int32 or int64; rows beyond the last give zeros.
        call: how to cast, from ``Precision.begin``; None is high precision.
        lean: hold little until backward: x as another layer has cast it, where one has, and no FP8
            data of a weight, which is cast again.
        count: how many of ``parts`` are the experts' weights; the others are their biases.
        parts: where ``weight`` or ``bias`` is the memory of parameters, one for each expert, these,
            which have the gradients then.

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
        lean: bool = False,
        count: int = 0,
        *parts: Tensor,
    ) -> Tensor:
        offsets = Offsets(offs, None) if call is None else Offsets.of(offs, x.shape[0])
        call = call or _IN_HIGH_PRECISION
        ctx.parts = count, len(parts) - count
        y, saved = forward(
            x, weight, bias, call, needs=_joined(ctx.needs_input_grad, ctx.parts)[:2],
            dtype=output_dtype(x), offsets=offsets,
            save_memory=lean and is_memory_of_parameter(weight), inp=x if lean else None,
        )  # fmt: skip
        ctx.save_for_backward(*offsets, *saved)
        ctx.call = call
        ctx.shape = x.shape[0], *weight.shape[1:]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # Their memory, which is saved, has the counter of writes of the first alone.
        ctx.weights = parts[:count] if any(one is weight for one in saved) else ()
        ctx.versions = [*map(version_of, ctx.weights)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        wanted, (offs, plan, *saved) = wanted_gradients(ctx), ctx.saved_tensors
        needs = _joined(wanted, ctx.parts)
        weights, biases = ctx.parts
        last = len(wanted) - biases
        if [*map(version_of, ctx.weights)] != ctx.versions:
            raise RuntimeError(
                "weights must stay as they are from forward to backward; got one that has been "
                "modified by an inplace operation. Call backward before the optimizer's step."
            )
        dx, *of_experts = backward(
            dy, None, Saved._make(saved), ctx.call,
            needs=needs, shape=ctx.shape, dtypes=ctx.dtypes, offsets=Offsets(offs, plan),
            wanted=wanted[last - weights : last],
        )  # fmt: skip
        parts: list[Tensor | None] = []
        for whole, count in zip(of_experts, ctx.parts, strict=True):
            parts += [None] * count if whole is None else whole.unbind()[:count]
        return dx, *of_experts, None, None, None, None, *parts


def _joined(needs: tuple[bool, ...], parts: tuple[int, int]) -> tuple[bool, bool, bool]:
    """Whether input, weights and biases need gradients, of which the last two may be in parts."""
    weights, biases = parts
    of_parts = needs[len(needs) - weights - biases :]
    dx, dw, db = needs[:3]
    return dx, dw or any(of_parts[:weights]), db or any(of_parts[weights:])


def is_memory_of_parameter(weight: Tensor) -> bool:
    """Whether a weight is a parameter or a view of one: alive until backward, in any case."""
    return isinstance(weight, nn.Parameter) or isinstance(weight._base, nn.Parameter)


def as_one(parts: Sequence[Tensor]) -> Tensor | None:
    """Parameters of one shape that follow each other in memory, as one tensor; else None."""
    first = parts[0]
    if isinstance(first, Float8Tensor):
        return _stored_as_one(first, parts)
    storage = first.untyped_storage().data_ptr()
    if not first.numel() or any(p.untyped_storage().data_ptr() != storage for p in parts):
        return None
    shape = len(parts), *first.shape
    # Not a view of any of them, whose version counter would be its own.
    whole = first.detach().as_strided(shape, (first.numel(), *first.stride()))
    return whole if is_of(parts, whole) else None


def _stored_as_one(first: Float8Tensor, parts: Sequence[Any]) -> Float8Tensor | None:
    """``as_one`` of weights that are stored in FP8."""
    if any(type(p) is not type(first) or p.spec != first.spec for p in parts):
        return None
    found: list[Any] = [as_one([*map(of, parts)]) for of in _STORED]
    if any(one is None for one in found):
        return None
    qdata, scale, amax = found
    return Float8Tensor(qdata, scale, amax, spec_of_experts(first.spec), first.dtype)


_STORED = tuple(map(operator.attrgetter, ("qdata", "scale", "amax")))


def is_of(parts: Sequence[Tensor], whole: Tensor) -> bool:
    """Whether parameters are the matrices of ``whole``, in turn."""
    if isinstance(whole, Float8Tensor):
        same = {*map(type, parts)} == {Float8Tensor}
        return same and all(is_of([*map(of, parts)], of(whole)) for of in _STORED[:2])
    begin, step = whole.data_ptr(), whole.stride(0) * whole.element_size()
    places = range(begin, begin + len(parts) * step, step)
    return [*map(Tensor.data_ptr, parts)] == [*places] and all(map(Tensor.is_contiguous, parts))


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


def in_first_rank(bias: Tensor, rank: int) -> Tensor:
    """A bias as it is in a rank's part of a sum: in the first one's alone. All get its gradient."""
    found: Tensor = _InFirstRank.run(bias, rank)
    return found


class _InFirstRank(Float8Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, rank: int) -> Tensor:
        return torch.zeros_like(bias) if rank else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, db: Tensor) -> tuple[Tensor, None]:
        return db, None
