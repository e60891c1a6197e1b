"""The autograd functions of a norm, a linear layer and an MLP as one.  M tokens, K features.

The input of each GEMM is a ``Source``: a norm or an activation that is computed while it is cast
and never written. Saved for backward are the input of the norm with its statistics and the input
of the activation, both of which their derivatives need; the casts that wgrad needs are made again
from these, and those that dgrad needs from the weights, under the forward's scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8lab.formats import E4M3
from float8lab.nn.linear_function import output_dtype
from float8lab.nn.norm_function import NormKind, backward_of_norm, source_of_norm
from float8lab.nn.operands import (
    Operand,
    cast_again,
    cast_gradient,
    cast_repeatable,
    cast_weight,
    cast_weight_again,
    cast_weight_repeatable,
    dgrad,
    fprop,
    lives_on,
    observe_cast,
    same_when_transposed,
    wgrad,
)
from float8lab.nn.precision import Call, X
from float8lab.ops import Source, as_matrix, dequantize_op, quantize_op
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = ["MlpCall", "NormLinearCall", "norm_linear", "norm_mlp"]


class NormLinearCall(NamedTuple):
    """How one call of a norm and a linear layer runs."""

    norm: NormKind
    linear: Call
    return_norm: bool
    """Return the norm's output as well."""


class MlpCall(NamedTuple):
    """How one call of a norm and an MLP runs."""

    norm: NormKind
    activation: str
    fc1: Call
    fc2: Call
    return_norm: bool
    """Return the norm's output as well."""
    checkpoint: bool
    """Compute the activation's input again in backward, in place of saving it."""
    fp8_input: bool
    """Save the activation's input in FP8; has no effect with ``checkpoint``."""


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    how: NormLinearCall,
) -> tuple[Tensor, Tensor | None]:
    """``norm(x) @ weight.T + bias`` with FP8 GEMMs, and ``norm(x)`` if asked.

    Args:
        x: ``[..., K]``.
        norm_weight: ``[K]``.
        norm_bias: ``[K]`` for LayerNorm, None for RMSNorm.
        weight: ``[N, K]``, ordinary or a Float8Tensor.
        bias: ``[N]`` or None.
        how: what and in which precision.

    Returns:
        ``[..., N]`` and ``[..., K]`` or None, in the dtype of torch.autocast if that is active,
        else of ``x``.
    """
    result = _NormLinear.run(x, norm_weight, norm_bias, weight, bias, how)
    return result if how.return_norm else (result, None)


def norm_mlp(
    x: Tensor,
    norm_parameters: tuple[Tensor, Tensor | None],
    fc1: tuple[Tensor, Tensor | None],
    fc2: tuple[Tensor, Tensor | None],
    how: MlpCall,
) -> tuple[Tensor, Tensor | None]:
    """``activation(norm(x) @ w1.T + b1) @ w2.T + b2`` with FP8 GEMMs, and ``norm(x)`` if asked.

    Args:
        x: ``[..., K]``.
        norm_parameters: weight ``[K]``, and bias ``[K]`` for LayerNorm.
        fc1: weight ``[F, K]``, or ``[2 F, K]`` if the activation gates, and bias or None.
        fc2: weight ``[K, F]`` and bias or None.
        how: what and in which precision.

    Returns:
        Two ``[..., K]``, the second None if not asked for, in the dtype of torch.autocast if that
        is active, else of ``x``.
    """
    result = _NormMlp.run(x, *norm_parameters, *fc1, *fc2, how)
    return result if how.return_norm else (result, None)


# One GEMM and what belongs to it, forward and backward.


class _Saved(NamedTuple):
    """What the backward of a GEMM on a source needs, but for the source."""

    x_scale: Tensor | None  # by these two to cast the source again, if per tensor
    x_factor: Tensor | None
    weight: Tensor | None
    w_q: Tensor | None  # unless the weight is a parameter, of which it can be made again
    w_scale: Tensor | None
    w_factor: Tensor | None  # in case it is made again


def _forward(
    x: Source,
    written: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    *,
    needs: tuple[bool, bool],
    again: bool = False,
) -> tuple[Tensor, _Saved]:
    """``x @ weight.T + bias`` in the source's dtype.

    Args:
        x: what is multiplied.
        written: the values of x if they are written anyway.
        weight: of the layer.
        bias: of the layer.
        call: how to cast.
        needs: whether the gradient of x, and of the weight, is needed.
        again: keep what ``_forward_again`` needs, too.
    """
    plan, value = call.plan, x if written is None else written
    in_fp8 = [plan.dgrad] * needs[0] + [plan.fprop] * again  # the uses of the weight in backward
    keep_scale = plan.x.per_tensor and ((again and plan.fprop) or (needs[1] and plan.wgrad))
    keep_w_scale = any(in_fp8) and same_when_transposed(plan.w)

    x_q = x_factor = w_q = w_factor = None
    if plan.fprop or keep_scale:
        x_q, x_factor = cast_repeatable(value, plan.x, X, call)
        observe_cast(value, x_q, plan.x, X, call)
    if plan.fprop or keep_w_scale:
        w_q, w_factor = cast_weight_repeatable(weight, call)
    y = fprop(
        value, x_q if plan.fprop else None, weight, w_q, bias, call,
        features=weight.shape[0], dtype=x.dtype,
    )  # fmt: skip
    saved_x: tuple[Tensor | None, Tensor | None] = (None, None)
    if x_q is not None and keep_scale:
        saved_x = (x_q[1], x_factor)
    saved_w: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if w_q is not None and keep_w_scale:
        recast = isinstance(weight, nn.Parameter) and not lives_on(w_q, weight, call)
        saved_w = (None, w_q[1], w_factor) if recast else (*w_q, None)
    keep_w = bool(in_fp8) and (saved_w[0] is None or not all(in_fp8))
    return y, _Saved(*saved_x, weight if keep_w else None, *saved_w)


def _forward_again(
    x: Source, bias: Tensor | None, saved: _Saved, call: Call, features: int
) -> Tensor:
    """In backward, the bytes that ``_forward`` gave."""
    plan, weight = call.plan, _weight(saved)
    x_q = w_q = None
    if plan.fprop:
        x_q = cast_again(x, plan.x, saved.x_scale, saved.x_factor, call, transposed=False)
        w_q = _w_q(saved, call) or cast_weight(weight, call)
    return fprop(x, x_q, weight, w_q, bias, call, features=features, dtype=x.dtype)


def _weight(saved: _Saved) -> Tensor:
    weight = saved.w_q if saved.weight is None else saved.weight
    assert weight is not None, "kept for this"
    return weight


def _w_q(saved: _Saved, call: Call) -> Operand | None:
    if saved.w_scale is None:
        return None
    if saved.w_q is not None:
        return saved.w_q, saved.w_scale
    return cast_weight_again(_weight(saved), saved.w_scale, saved.w_factor, call)


class _Gradient:
    """Gradient of a GEMM's output, cast; what has been used can be forgotten."""

    __slots__ = ("high", "q", "q_t", "total")

    def __init__(self, dy: Tensor | Source, call: Call, *, needs: tuple[bool, bool, bool]) -> None:
        needs_dx, needs_dw, needs_db = needs
        if isinstance(dy, Source):
            plan = call.plan
            in_fp8 = (plan.dgrad or not needs_dx) and (plan.wgrad or not needs_dw)
            if not in_fp8 or not needs_dx or (needs_db and not needs_dw):
                dy = dy.value()  # something wants it written
        self.high = None if isinstance(dy, Source) else dy
        self.q, self.q_t, self.total = cast_gradient(
            dy, call, dx=needs_dx, dw=needs_dw, column_sum=needs_db
        )


def _backward(
    dy: _Gradient,
    x: Source,
    saved: _Saved,
    call: Call,
    *,
    needs: tuple[bool, bool, bool],
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x in its dtype, of the weight and of the bias.

    Args:
        dy: gradient of the output; of no use afterwards.
        x: what was multiplied.
        saved: from ``_forward``.
        call: how to cast.
        needs: which gradients are needed.
        shape: M tokens, N out features, K in features.
        dtypes: of the weight's and of the bias's gradient.
    """
    needs_dx, needs_dw, needs_db = needs
    plan, (M, N, K) = call.plan, shape
    dx = dw = db = None
    if needs_dx:
        weight = _weight(saved) if dy.q is None else _w_q(saved, call) or _weight(saved)
        dx = dgrad(dy.high, dy.q, weight, call, shape=(M, K), dtype=x.dtype)
        del weight
    dy.q = None
    if needs_dw:
        x_t, value = None, None
        if dy.q_t is None:
            value = x.value()
        else:
            x_t = cast_again(x, plan.x, saved.x_scale, saved.x_factor, call, transposed=True)
        dw = wgrad(dy.high, dy.q_t, value, x_t, call, shape=(N, K), dtype=dtypes[0])
    if needs_db:
        total = dy.total
        if total is None:
            assert dy.high is not None, "written"
            total = dy.high.sum(0, dtype=torch.float32)
        db = total.to(dtypes[1])
    return dx, dw, db


def _release(ctx: Any) -> None:
    """Let go of what the forward has saved, unless the graph is retained.

    Autograd does it when backward has returned; the caller has taken out what it still needs.
    """
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()


def _wants_amax(call: Call, *, needs_dw: bool, return_norm: bool) -> bool:
    """Whether a cast will ask a norm for its amax."""
    plan = call.plan
    if return_norm or not plan.x.per_tensor or not (plan.fprop or (needs_dw and plan.wgrad)):
        return False
    # A compiled graph has no slots: its cast finds them when it runs.
    return not plan.delayed or (call.slots is not None and call.asks_for_values(X))


def _dtype(x: Tensor | None) -> torch.dtype | None:
    return None if x is None else x.dtype


class _NormLinear(Float8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        how: NormLinearCall,
    ) -> Any:
        N, K = weight.shape
        x2 = as_matrix(x)
        needs_dx, needs_dw = any(ctx.needs_input_grad[:3]), ctx.needs_input_grad[3]
        want_amax = _wants_amax(how.linear, needs_dw=needs_dw, return_norm=how.return_norm)
        source, stats = source_of_norm(
            x2, norm_weight, norm_bias, how.norm, output_dtype(x), want_amax=want_amax
        )
        normed = source.value() if how.return_norm else None
        y, saved = _forward(source, normed, weight, bias, how.linear, needs=(needs_dx, needs_dw))

        kept = (x2, norm_weight, norm_bias, *stats) if needs_dx or needs_dw else (None,) * 5
        ctx.save_for_backward(*kept, *saved)
        ctx.how, ctx.dtype = how, source.dtype
        ctx.meta = (x.shape, (x2.shape[0], N, K))
        ctx.dtypes = (_dtype(norm_bias), (weight.dtype, _dtype(bias)))
        # Not views: an in-place op on a view of an autograd function's output is refused.
        out = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], N))
        if normed is None:
            return out
        return out, torch.ops.aten._unsafe_view.default(normed, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dnorm: Tensor) -> tuple[Tensor | None, ...]:
        x2, norm_weight, norm_bias, mean, rstd, *saved = ctx.saved_tensors
        how: NormLinearCall = ctx.how
        x_shape, shape = ctx.meta
        norm_bias_dtype, dtypes = ctx.dtypes
        needs = ctx.needs_input_grad
        source = _no_source(dy)
        if x2 is not None:
            source, _ = source_of_norm(
                x2, norm_weight, norm_bias, how.norm, ctx.dtype, (mean, rstd)
            )
        wanted = (any(needs[:3]), needs[3], needs[4])
        gradient = _Gradient(dy.reshape(shape[:2]), how.linear, needs=wanted)
        dn, dw, db = _backward(
            gradient, source, _Saved(*saved), how.linear,
            needs=wanted, shape=shape, dtypes=dtypes,
        )  # fmt: skip
        if dn is None:
            return None, None, None, dw, db, None
        if dnorm:
            dn = dn + dnorm[0].reshape(dn.shape)
        dx, dgamma, dbeta = backward_of_norm(
            dn, x2, norm_weight, mean, rstd, how.norm, norm_bias_dtype
        )
        return dx.reshape(x_shape), dgamma, dbeta, dw, db, None


_BLOCK_OF_SAVED = (1, 128)


def _quantized(h: Tensor) -> tuple[Tensor, Tensor]:
    """An activation's input as it is kept in one byte an element; rounded to 4 significant bits."""
    q, scale, _ = quantize_op(h, E4M3, _BLOCK_OF_SAVED, "fp32", 0.0, 1)
    return q, scale


def _no_source(x: Tensor) -> Source:
    """Stands for the input of a GEMM where only the bias wants a gradient."""
    return Source("", [], x.dtype)


class _NormMlp(Float8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor | None,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
        how: MlpCall,
    ) -> Any:
        (N, K), F = fc1_weight.shape, fc2_weight.shape[1]
        x2 = as_matrix(x)
        dtype = output_dtype(x)
        needs = ctx.needs_input_grad
        needs_dn, needs_dw1 = any(needs[:3]), needs[3]
        needs_dh, needs_dw2 = any(needs[:5]), needs[5]
        again = how.checkpoint and (needs_dh or needs_dw2)

        want_amax = _wants_amax(how.fc1, needs_dw=needs_dw1 or again, return_norm=how.return_norm)
        source, stats = source_of_norm(
            x2, norm_weight, norm_bias, how.norm, dtype, want_amax=want_amax
        )
        normed = source.value() if how.return_norm else None
        h, saved1 = _forward(
            source, normed, fc1_weight, fc1_bias, how.fc1, needs=(needs_dn, needs_dw1), again=again
        )
        activated = Source(how.activation, [h], dtype)
        y, saved2 = _forward(
            activated, None, fc2_weight, fc2_bias, how.fc2, needs=(needs_dh, needs_dw2)
        )

        keep_x = needs_dn or needs_dw1 or again
        kept = (x2, norm_weight, norm_bias, *stats) if keep_x else (None,) * 5
        keep_h = (needs_dh or needs_dw2) and not again
        recomputed = fc1_bias if again else None
        saved_h: tuple[Tensor | None, Tensor | None] = (h if keep_h else None, None)
        if keep_h and how.fp8_input:
            saved_h = _quantized(h)
        ctx.save_for_backward(*kept, *saved1, *saved2, *saved_h, recomputed)
        ctx.how, ctx.dtype = how, dtype
        ctx.meta = (x.shape, (x2.shape[0], N, K), (x2.shape[0], K, F))
        ctx.dtypes = (
            _dtype(norm_bias),
            (fc1_weight.dtype, _dtype(fc1_bias)),
            (fc2_weight.dtype, _dtype(fc2_bias)),
        )
        out = torch.ops.aten._unsafe_view.default(y, x.shape)
        if normed is None:
            return out
        return out, torch.ops.aten._unsafe_view.default(normed, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dnorm: Tensor) -> tuple[Tensor | None, ...]:
        x2, norm_weight, norm_bias, mean, rstd, *rest, h, h_scale, fc1_bias = ctx.saved_tensors
        saved1, saved2 = _Saved(*rest[:6]), _Saved(*rest[6:])
        how: MlpCall = ctx.how
        x_shape, shape1, shape2 = ctx.meta
        norm_bias_dtype, dtypes1, dtypes2 = ctx.dtypes
        needs = ctx.needs_input_grad
        normed = _no_source(dy)
        if x2 is not None:
            normed, _ = source_of_norm(
                x2, norm_weight, norm_bias, how.norm, ctx.dtype, (mean, rstd)
            )
        if h_scale is not None:
            h = dequantize_op(h, h_scale, _BLOCK_OF_SAVED, ctx.dtype)
        elif h is None and x2 is not None and how.checkpoint:
            h = _forward_again(normed, fc1_bias, saved1, how.fc1, shape1[1])
        activated = _no_source(dy) if h is None else Source(how.activation, [h], ctx.dtype)
        wanted = (any(needs[:5]), needs[5], needs[6])
        gradient = _Gradient(dy.reshape(shape2[:2]), how.fc2, needs=wanted)
        da, dw2, db2 = _backward(
            gradient, activated, saved2, how.fc2, needs=wanted, shape=shape2, dtypes=dtypes2
        )
        if da is None:
            return (None,) * 5 + (dw2, db2, None)
        wanted = (any(needs[:3]), needs[3], needs[4])
        dh = Source(f"{how.activation}_backward", [h, da], ctx.dtype)
        gradient = _Gradient(dh, how.fc1, needs=wanted)
        # The largest tensors of a layer, of which the GEMMs need the cast alone.
        del h, da, dh, activated, saved2, rest
        _release(ctx)
        dn, dw1, db1 = _backward(
            gradient, normed, saved1, how.fc1, needs=wanted, shape=shape1, dtypes=dtypes1
        )
        if dn is None:
            return None, None, None, dw1, db1, dw2, db2, None
        if dnorm:
            dn = dn + dnorm[0].reshape(dn.shape)
        dx, dgamma, dbeta = backward_of_norm(
            dn, x2, norm_weight, mean, rstd, how.norm, norm_bias_dtype
        )
        return dx.reshape(x_shape), dgamma, dbeta, dw1, db1, dw2, db2, None
