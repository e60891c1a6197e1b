"""The autograd functions of a norm, a linear layer and an MLP as one.  M tokens, K features.

The input of each GEMM is a ``Prologue``: a norm or an activation that is computed while it is cast
and never written. Saved for backward are the input of the norm with its statistics and the input
of the activation, both of which their derivatives need; the casts that wgrad needs are made again
from these, and those that dgrad needs from the weights, under the forward's scales.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.formats import E4M3
from float8lab.nn.gemm import (
    Gradient,
    Saved,
    backward,
    forward,
    output_dtype,
    recompute_forward,
    unpack,
)
from float8lab.nn.norm_function import NormKind, backward_of_norm, source_of_norm
from float8lab.nn.precision import Call, X
from float8lab.ops import Prologue, as_matrix, cast_op, dequantize_op
from float8lab.tensor.differentiation import (
    Float8Function,
    once_differentiable,
    wanted_gradients,
)

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


def _release(ctx: Any) -> None:
    """Let go of what the forward has saved, unless the graph is retained.

    Autograd does it when backward has returned; the caller has taken out what it still needs.
    """
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()


def _wants_amax(call: Call, *, needs_dw: bool, return_norm: bool) -> bool:
    """Whether a cast will ask a norm for its amax."""
    plan = call.plan
    if return_norm or plan.x.block != (-1, -1) or not (plan.fprop or (needs_dw and plan.wgrad)):
        return False
    return call.scales.uses_amax(X)


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
        y, saved = forward(
            source, weight, bias, how.linear,
            needs=(needs_dx, needs_dw), dtype=source.dtype, inp=normed,
        )  # fmt: skip

        kept = (x2, norm_weight, norm_bias, *stats) if needs_dx or needs_dw else (None,) * 5
        ctx.save_for_backward(*kept, *saved)
        ctx.how, ctx.dtype = how, source.dtype
        M, shape = how.linear.comm.output_shape(x.shape, x2.shape[0], N)
        ctx.meta = (x.shape, (M, N, K))
        ctx.dtypes = (
            None if norm_bias is None else norm_bias.dtype,
            (source.dtype, weight.dtype, None if bias is None else bias.dtype),
        )
        # Not views: an in-place op on a view of an autograd function's output is refused.
        out = torch.ops.aten._unsafe_view.default(y, shape)
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
        needs = wanted_gradients(ctx)
        of_norm = norm_weight, norm_bias, how.norm, ctx.dtype, (mean, rstd)
        source = _no_source(dy) if x2 is None else source_of_norm(x2, *of_norm)[0]
        wanted = (any(needs[:3]), needs[3], needs[4])
        dn, dw, db = backward(
            dy.reshape(shape[:2]), source, Saved._make(saved), how.linear,
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
    q, scale, *_ = cast_op("", (h,), h.dtype, E4M3, _BLOCK_OF_SAVED, "fp32")
    return q, scale


def _no_source(x: Tensor) -> Prologue:
    """Stands for the input of a GEMM where only the bias wants a gradient."""
    return Prologue("", [], x.dtype)


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
        h, saved1 = forward(
            source, fc1_weight, fc1_bias, how.fc1,
            needs=(needs_dn, needs_dw1), dtype=dtype, inp=normed, recomputes=again,
        )  # fmt: skip
        activated = Prologue(how.activation, [h], dtype)
        y, saved2 = forward(
            activated, fc2_weight, fc2_bias, how.fc2, needs=(needs_dh, needs_dw2), dtype=dtype
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
        M, _ = how.fc1.comm.output_shape(x.shape, x2.shape[0], N)
        ctx.meta = (x.shape, (M, N, K), (M, K, F))
        ctx.dtypes = (
            None if norm_bias is None else norm_bias.dtype,
            (dtype, fc1_weight.dtype, None if fc1_bias is None else fc1_bias.dtype),
            (dtype, fc2_weight.dtype, None if fc2_bias is None else fc2_bias.dtype),
        )
        out = torch.ops.aten._unsafe_view.default(y, x.shape)
        if normed is None:
            return out
        return out, torch.ops.aten._unsafe_view.default(normed, x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *dnorm: Tensor) -> tuple[Tensor | None, ...]:
        x2, norm_weight, norm_bias, mean, rstd, *rest, h, h_scale, fc1_bias = ctx.saved_tensors
        saved1, saved2 = unpack(rest)
        how: MlpCall = ctx.how
        x_shape, shape1, shape2 = ctx.meta
        norm_bias_dtype, dtypes1, dtypes2 = ctx.dtypes
        needs = wanted_gradients(ctx)
        of_norm = norm_weight, norm_bias, how.norm, ctx.dtype, (mean, rstd)
        normed = _no_source(dy) if x2 is None else source_of_norm(x2, *of_norm)[0]
        if h_scale is not None:
            h = dequantize_op(h, h_scale, _BLOCK_OF_SAVED, ctx.dtype)
        elif h is None and x2 is not None and how.checkpoint:
            h = recompute_forward(normed, fc1_bias, saved1, how.fc1, shape1[1])
        activated = _no_source(dy) if h is None else Prologue(how.activation, [h], ctx.dtype)
        wanted = (any(needs[:5]), needs[5], needs[6])
        dy = dy.reshape(shape2[:2]) if how.fc2.comm.tokens is None else as_matrix(dy)
        da, dw2, db2 = backward(
            dy, activated, saved2, how.fc2, needs=wanted, shape=shape2, dtypes=dtypes2
        )
        if da is None:
            return (None,) * 5 + (dw2, db2, None)
        wanted = (any(needs[:3]), needs[3], needs[4])
        dh = Prologue(f"{how.activation}_backward", [h, da], ctx.dtype)
        gradient = Gradient(dh, how.fc1, needs=wanted)
        # The largest tensors of a layer, of which the GEMMs need the cast alone.
        del h, da, dh, activated, saved2, rest
        _release(ctx)
        dn, dw1, db1 = backward(
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
