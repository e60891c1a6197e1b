"""LayerNorm and RMSNorm as autograd functions and as sources of casts.  M tokens, K features."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.ops import Prologue, norm_backward_op, norm_op
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = ["NormKind", "backward_of_norm", "normalize", "source_of_norm"]


class NormKind(NamedTuple):
    """The kind of a norm, LayerNorm or RMSNorm, with its options."""

    center: bool
    """Whether this is LayerNorm, which subtracts the mean and adds a bias; RMSNorm if False."""
    eps: float
    zero_centered: bool
    """Whether the norm multiplies by ``1 + weight``."""

    def gamma(self, weight: Tensor) -> Tensor:
        """Return the factor of the normalized values, ``weight`` or ``1 + weight``."""
        if not self.zero_centered:
            return weight
        return weight.to(torch.promote_types(weight.dtype, torch.float32)) + 1.0


def normalize(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind, dtype: torch.dtype
) -> Tensor:
    """Compute the norm over the last dimension, in ``dtype``, and save x for backward.

    Args:
        x: ``[..., K]``.
        weight: ``[K]``.
        bias: ``[K]`` for LayerNorm, None for RMSNorm.
    """
    return _Norm.run(x, weight, bias, kind, dtype)


class _Norm(Float8Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind, dtype: torch.dtype
    ) -> Tensor:
        y: Tensor
        y, mean, rstd, _ = norm_op(x, kind.gamma(weight), bias, kind.eps, kind.center, dtype)
        ctx.save_for_backward(x, weight, mean if kind.center else None, rstd)
        ctx.kind, ctx.bias_dtype = kind, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        return *backward_of_norm(dy, x, weight, mean, rstd, ctx.kind, ctx.bias_dtype), None, None


def backward_of_norm(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, kind: NormKind,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Compute the gradients of x, weight and bias in the dtypes of these tensors."""
    gamma = kind.gamma(weight) if kind.zero_centered else weight
    dx, dweight, dbias = norm_backward_op(dy, x, gamma, mean, rstd, kind.center, x.dtype)
    return dx, dweight.to(weight.dtype), None if bias_dtype is None else dbias.to(bias_dtype)


def source_of_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: NormKind, dtype: torch.dtype,
    stats: tuple[Tensor | None, Tensor] | None = None, *, want_amax: bool = False,
) -> tuple[Prologue, tuple[Tensor | None, Tensor]]:  # fmt: skip
    """Return the norm of a matrix as a prologue of a cast, and its statistics, mean and rstd.

    Statistics that are not given are computed, and with ``want_amax`` the prologue's amax as well.
    """
    gamma = kind.gamma(weight) if kind.zero_centered else weight
    amax = None
    if stats is None:
        _, mean, rstd, amax = norm_op(
            x, gamma, bias, kind.eps, kind.center, dtype, None, (), False, want_amax
        )
        stats = mean if kind.center else None, rstd  # under a mode RMSNorm has an empty mean
    mean, rstd = stats
    name, inputs = "rms_norm", [x, rstd, gamma]
    if bias is not None and mean is not None:
        name, inputs = "layer_norm", [*inputs, mean, bias]
    return Prologue(name, inputs, dtype, amax if want_amax else None), stats
