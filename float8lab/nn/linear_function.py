"""The autograd function of a linear layer in FP8.  M tokens, N out features, K in features.

Between the ops travel plain tensors, padded so that every dimension is a multiple of ``ALIGN``.
Saved for backward: x transposed in FP8, and the FP8 weight where its transpose has the same bytes
(one scale per tensor or square blocks), else the weight itself, which is alive anyway.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8lab.nn.operands import (
    cast_gradient,
    cast_weight,
    compress,
    dgrad,
    fprop,
    same_when_transposed,
    wgrad,
)
from float8lab.nn.precision import Call
from float8lab.nn.shared_cast import cast_input
from float8lab.ops import as_matrix
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = ["linear", "output_dtype"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """``x @ weight.T + bias`` with FP8 GEMMs, forward and backward.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, ordinary or a Float8Tensor.
        bias: ``[N]`` or None.
        call: how to cast, from ``Precision.begin``.

    Returns:
        ``[..., N]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """
    result: Tensor = _Linear.run(x, weight, bias, call)
    return result


def output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of torch.autocast if that is active, else of ``x``."""
    # torch.autocast does not know the meta device.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class _Linear(Float8Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        plan = call.plan
        dtype = output_dtype(x)
        N, K = weight.shape
        x2 = as_matrix(x)
        M = x2.shape[0]
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        keep_x_t = needs_dw and plan.wgrad
        keep_w = needs_dx and plan.dgrad and same_when_transposed(plan.w)

        x_q, x_t = cast_input(x, x2, call, straight=plan.fprop, transposed=keep_x_t)
        w_q = cast_weight(weight, call) if plan.fprop or keep_w else None
        y = fprop(x2, x_q, weight, w_q, bias, call, features=N, dtype=dtype)

        saved_x: tuple[Tensor | None, Tensor | None] = (None, None)
        if x_t is not None:
            saved_x = (x_t[0], compress(x_t[1], plan.x))
        elif needs_dw:
            saved_x = (x2, None)
        saved_w: tuple[Tensor | None, Tensor | None] = (None, None)
        if keep_w:
            saved_w = w_q  # type: ignore[assignment]  # set above whenever keep_w
        elif needs_dx:
            saved_w = (weight, None)
        ctx.save_for_backward(*saved_x, *saved_w)
        ctx.call = call
        ctx.meta = (x.shape, x.dtype, weight.dtype, (M, N, K))
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Not a view: FSDP2 hooks the output, and an in-place op on a view would lose the hook.
        out: Tensor = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], N))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        saved_x, x_scale, saved_w, w_scale = ctx.saved_tensors
        call: Call = ctx.call
        x_shape, x_dtype, w_dtype, (M, N, K) = ctx.meta
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy2 = dy.reshape(M, N)
        dy_q, dy_t, total = cast_gradient(dy2, call, dx=needs_dx, dw=needs_dw, column_sum=needs_db)

        dx = dw = db = None
        if needs_dx:
            kept = saved_w if w_scale is None else (saved_w, w_scale)
            dx = dgrad(dy2, dy_q, kept, call, shape=(M, K), dtype=x_dtype)
            dx = dx.reshape(x_shape)
        del dy_q  # its room may serve for dw
        if needs_dw:
            x_t = None if dy_t is None else (saved_x, x_scale.float())
            dw = wgrad(dy2, dy_t, saved_x, x_t, call, shape=(N, K), dtype=w_dtype)
        if needs_db:
            db = (dy2.sum(0, dtype=torch.float32) if total is None else total).to(ctx.bias_dtype)
        return dx, dw, db, None
