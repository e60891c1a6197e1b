"""The autograd function of a linear layer in FP8.  M tokens, N out features, K in features.

Between the ops travel plain tensors, padded so that every dimension is a multiple of ``ALIGN``.
Saved for backward: x transposed in FP8, and the FP8 weight where its transpose has the same bytes
(one scale per tensor or square blocks), else the weight itself, which is alive anyway.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from float8lab.formats import Float8Spec
from float8lab.nn.precision import DY, Call, W, X
from float8lab.ops import (
    cast_op,
    cast_pair_op,
    quantize_op,
    quantize_pair_op,
    round_up,
    scaled_mm_op,
    transpose_op,
)
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.state import STATE
from float8lab.tensor import Float8Tensor

__all__ = ["linear"]

ALIGN = 16
"""Multiple that Hopper's FP8 GEMM wants of every dimension."""

_Operand = tuple[Tensor, Tensor]  # FP8 data and decode scales


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
    if STATE.onnx is not None:
        return STATE.onnx(x, weight, bias, call)
    result: Tensor = _Linear.apply(x, weight, bias, call)
    return result


def _cast(x: Tensor, spec: Float8Spec, index: int, call: Call) -> _Operand:
    """One orientation of x in FP8."""
    plan = call.plan
    if plan.delayed:
        scale, slot = call.scale(index, x)
        return cast_op(x, scale, slot, spec.fp8_dtype, spec.block, ALIGN), scale
    q, scale, _ = quantize_op(
        x, spec.fp8_dtype, spec.block, spec.scale_rule, plan.amax_epsilon, ALIGN
    )
    return q, scale


def _cast_pair(
    x: Tensor, spec: Float8Spec, index: int, call: Call, *, column_sum: bool = False
) -> tuple[_Operand, _Operand, Tensor]:
    """x and x transposed in FP8 from one read of x, and its column sums if asked."""
    plan = call.plan
    if plan.delayed:
        scale, slot = call.scale(index, x)
        q, q_t, total = cast_pair_op(x, scale, slot, spec.fp8_dtype, ALIGN, column_sum)
        return (q, scale), (q_t, scale), total
    q, scale, q_t, scale_t, total = quantize_pair_op(
        x, spec.fp8_dtype, spec.block, spec.scale_rule, plan.amax_epsilon, ALIGN, column_sum
    )
    return (q, scale), (q_t, scale_t), total


def _gemm(
    a: _Operand,
    a_spec: Float8Spec,
    b: _Operand,
    b_spec: Float8Spec,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    out: Tensor = scaled_mm_op(*a, a_spec.block, *b, b_spec.block, bias, dtype, fast_accum)
    return out


def _compress(scale: Tensor, spec: Float8Spec) -> Tensor:
    """Scales as they are saved for backward: one byte each where that is exact."""
    return scale.to(torch.float8_e8m0fnu) if spec.scale_rule == "e8m0" else scale


def _crop(x: Tensor, rows: int, columns: int) -> Tensor:
    # A compiled graph always slices: asking whether it must would fix the number of tokens.
    if not torch.compiler.is_compiling() and x.shape == (rows, columns):
        return x
    return x[:rows, :columns]


def _pad_columns_of_bias(bias: Tensor | None, width: int) -> Tensor | None:
    if bias is None or bias.shape[0] == width:
        return bias
    return torch.nn.functional.pad(bias, (0, width - bias.shape[0]))


def _same_when_transposed(spec: Float8Spec) -> bool:
    return spec.block[0] == spec.block[1]


def _stored(weight: Tensor, spec: Float8Spec) -> _Operand | None:
    """The FP8 data of a weight that is stored as ``spec`` wants it."""
    if not isinstance(weight, Float8Tensor):
        return None
    if (weight.spec.block, weight.spec.fp8_dtype) != (spec.block, spec.fp8_dtype):
        return None
    q = weight.qdata
    rows, columns = (round_up(size, ALIGN) for size in q.shape)
    if q.shape != (rows, columns):
        pad = (0, columns - q.shape[1], 0, rows - q.shape[0])
        q = torch.nn.functional.pad(q.view(torch.uint8), pad).view(q.dtype)
        missing = [
            n - h for n, h in zip(spec.scale_shape(q.shape), weight.scale.shape, strict=True)
        ]
        pad = (0, missing[1], 0, missing[0])
        return q, torch.nn.functional.pad(weight.scale, pad, value=1.0)
    return q, weight.scale


def _plain(weight: Tensor) -> Tensor:
    return weight.dequantize() if isinstance(weight, Float8Tensor) else weight


def _cast_weight(weight: Tensor, call: Call) -> _Operand:
    """The weight in FP8: stored so, kept, or cast now; CPU offload hears which."""
    operand = _find_or_cast_weight(weight, call)
    if not torch.compiler.is_compiling() and STATE.weights is not None:
        kept = None if call.precision is None else call.precision.weight_cast
        lives_on = isinstance(weight, Float8Tensor) or (kept and kept.q is operand[0])
        STATE.weights[StorageWeakRef(operand[0].untyped_storage())] = bool(lives_on)
    return operand


def _find_or_cast_weight(weight: Tensor, call: Call) -> _Operand:
    """The weight in FP8, cast in every forward unless the caller says that it did not change.

    Nothing about a tensor tells that reliably: fused optimizers and ``weight.data`` leave the
    version counter alone. ``is_first_microbatch`` does: True casts and keeps, False reuses.
    """
    spec, precision, first = call.plan.w, call.precision, call.first_microbatch
    stored = _stored(weight, spec)
    if stored is not None:
        return stored
    weight = _plain(weight)
    if first is None or precision is None or torch.compiler.is_compiling():
        return _cast(weight, spec, W, call)
    kept = precision.weight_cast
    if not first and kept is not None and kept.fits(weight, call.recipe):
        call.used[W] = kept.scale
        return kept.q, kept.scale
    q, scale = _cast(weight, spec, W, call)
    precision.weight_cast = _WeightCast(
        weakref.ref(weight), _version(weight), call.recipe, q, scale
    )
    return q, scale


class _WeightCast(NamedTuple):
    """The cast that is kept from one microbatch to the next."""

    weight: weakref.ref[Tensor]
    version: int
    recipe: Recipe
    q: Tensor
    scale: Tensor

    def fits(self, weight: Tensor, recipe: Recipe) -> bool:
        same = self.weight() is weight and self.recipe == recipe
        return same and self.version == _version(weight)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _transposed_weight(saved: Tensor, scale: Tensor | None, call: Call) -> _Operand:
    """The weight's transpose in FP8, for dgrad."""
    spec = call.plan.w
    if scale is not None:
        # Square blocks: same bytes. A delayed scale is of shape [1], which t() leaves alone.
        return transpose_op(saved, 1), scale.t()
    return _cast(_plain(saved).t(), spec, W, call)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        plan = call.plan
        device_type = x.device.type
        dtype = x.dtype
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
        N, K = weight.shape
        x2 = x.reshape(-1, K)
        M = x2.shape[0]
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        keep_x_t = needs_dw and plan.wgrad
        keep_w = needs_dx and plan.dgrad and _same_when_transposed(plan.w)

        x_q = x_t = w_q = None
        if plan.fprop and keep_x_t:
            x_q, x_t, _ = _cast_pair(x2, plan.x, X, call)
        elif plan.fprop:
            x_q = _cast(x2, plan.x, X, call)
        elif keep_x_t:
            x_t = _cast(x2.t(), plan.x, X, call)
        if plan.fprop or keep_w:
            w_q = _cast_weight(weight, call)

        if x_q is not None and w_q is not None:
            padded = _pad_columns_of_bias(bias, w_q[0].shape[0])
            y = _gemm(x_q, plan.x, w_q, plan.w, padded, dtype, plan.fast_accum[0])
            y = _crop(y, M, N).contiguous()
        else:
            plain = None if bias is None else bias.to(dtype)
            y = torch.nn.functional.linear(x2.to(dtype), _plain(weight).to(dtype), plain)

        saved_x: tuple[Tensor | None, Tensor | None] = (None, None)
        if x_t is not None:
            saved_x = (x_t[0], _compress(x_t[1], plan.x))
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
        plan = call.plan
        x_shape, x_dtype, w_dtype, (M, N, K) = ctx.meta
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        fp8_dx, fp8_dw = needs_dx and plan.dgrad, needs_dw and plan.wgrad
        dy2 = dy.reshape(-1, N)

        dy_q = dy_t = total = None
        if fp8_dx and fp8_dw:
            dy_q, dy_t, total = _cast_pair(dy2, plan.dy, DY, call, column_sum=needs_db)
        elif fp8_dx:
            dy_q = _cast(dy2, plan.dy, DY, call)
        elif fp8_dw:
            dy_t = _cast(dy2.t(), plan.dy, DY, call)

        dx = dw = db = None
        if dy_q is not None:
            w_t = _transposed_weight(saved_w, w_scale, call)
            dx = _gemm(dy_q, plan.dy, w_t, plan.w, None, x_dtype, plan.fast_accum[1])
            dx = _crop(dx, M, K).reshape(x_shape)
        elif needs_dx:
            dx = (dy2 @ _plain(saved_w).to(dy.dtype)).to(x_dtype).reshape(x_shape)
        if needs_dw:
            fused = call.fused_weight
            dtype = w_dtype if fused is None else fused.main_grad.dtype
            if dy_t is not None:
                x_t = (saved_x, x_scale.float())
                dw = _gemm(dy_t, plan.dy, x_t, plan.x, None, dtype, plan.fast_accum[2])
                dw = _crop(dw, N, K)
            else:
                dw = (dy2.t() @ saved_x.to(dy.dtype)).to(dtype)
            if fused is not None:
                _accumulate(fused, dw, overwrite=call.first_microbatch is True)
                dw = None
        if needs_db:
            db = (dy2.sum(0, dtype=torch.float32) if total is None else total).to(ctx.bias_dtype)
        return dx, dw, db, None


def _accumulate(weight: Any, dw: Tensor, *, overwrite: bool) -> None:
    """Add (or, in a first microbatch, write) the gradient into ``weight.main_grad``."""
    if overwrite:
        weight.main_grad.copy_(dw)
    else:
        weight.main_grad.add_(dw)
    weight.grad_added_to_main_grad = True  # the mark that Megatron's optimizers look for
