"""Handlers of LayerNorm and RMSNorm, which read FP8 data and scales.  M rows, K features.

The rows may be FP8 of any blocks, or ordinary where only weight or bias is FP8; those two vectors
are dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.ops import norm_backward_op, norm_op
from float8lab.tensor.differentiation import Float8Function, once_differentiable
from float8lab.tensor.dispatch import implements, implements_whole
from float8lab.tensor.float8_tensor import Float8Tensor

__all__: list[str] = []

aten = torch.ops.aten


def _plain(x: Any) -> Any:
    return x._decode() if isinstance(x, Float8Tensor) else x


def _rows(x: Tensor, shape: Sequence[int]) -> Any:
    """``x`` as [M, K], where a norm over the last dimensions, ``shape``, is a norm of each row."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        x = _plain(x)
    leading = x.shape[: x.ndim - len(shape)]
    return x.reshape(math.prod(leading), math.prod(shape))


def _vector(x: Tensor | None, K: int, like: Tensor, default: float) -> Tensor:
    if x is None:
        return torch.full((K,), default, dtype=like.dtype, device=like.device)
    vector: Tensor = _plain(x).reshape(K)
    return vector


def _forward(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm, mean and rstd of each row in the shapes that torch's norms give them."""
    rows = _rows(x, shape)
    K = rows.shape[1]
    vectors = _vector(weight, K, x, 1.0), _vector(bias, K, x, 0.0) if center else None
    how = (*vectors, eps, center, x.dtype)
    if isinstance(rows, Float8Tensor):
        y, mean, rstd, _ = norm_op(rows.qdata, *how, rows.scale, rows.spec.block)
    else:
        y, mean, rstd, _ = norm_op(rows, *how)
    one_each = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    mean = mean.view(one_each) if center else rstd.new_empty(0)
    return y.view(x.shape), mean, rstd.view(one_each)


def _backward(
    dy: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor | None,
    rstd: Tensor,
    weight: Tensor | None,
    *,
    bias: Tensor | None = None,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias that are needed; ``mean`` is None for RMSNorm."""
    rows, center = _rows(x, shape), mean is not None
    M, K = rows.shape
    stats = None if mean is None else mean.reshape(M), rstd.reshape(M)
    how = (_vector(weight, K, x, 1.0), *stats, center, x.dtype)
    dy = _plain(dy).reshape(M, K)
    if isinstance(rows, Float8Tensor):
        quantized = rows.scale, rows.spec.block
        dx, dweight, dbias = norm_backward_op(dy, rows.qdata, *how, *quantized)
    else:
        dx, dweight, dbias = norm_backward_op(dy, rows, *how)
    gradients = (dx, x), (dweight, weight), (dbias, bias)
    return tuple(
        gradient.view(of.shape).to(of.dtype) if need and of is not None else None
        for (gradient, of), need in zip(gradients, needs, strict=False)
    )


@implements(aten.native_layer_norm.default)
def _layer_norm(
    op: Any, x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(x, shape, weight, bias, eps, center=True)


@implements(aten.native_layer_norm_backward.default)
def _layer_norm_backward(op: Any, *args: Any) -> tuple[Tensor | None, ...]:
    *others, bias, needs = args
    return _backward(*others, bias=bias, needs=needs)


def _rms_eps(x: Tensor, eps: float | None) -> float:
    """The epsilon that torch takes for None, that of the dtype of the arithmetic."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps


# A GPU has kernels for these two, so torch does not split them there.


@implements(aten._fused_rms_norm.default)
def _fused_rms_norm(
    op: Any, x: Tensor, shape: Sequence[int], weight: Any, eps: float | None
) -> tuple[Tensor, Tensor]:
    y, _, rstd = _forward(x, shape, weight, None, _rms_eps(x, eps), center=False)
    return y, rstd


@implements(aten._fused_rms_norm_backward.default)
def _fused_rms_norm_backward(
    op: Any,
    dy: Tensor,
    x: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Any,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    return _backward(dy, x, shape, None, rstd, weight, needs=needs)


@implements_whole(
    F.rms_norm,
    torch.rms_norm,
    aten.rms_norm.default,
    autocast=lambda device: torch.float32 if device == "cuda" else None,
)
def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    x, shape = input, normalized_shape
    if list(x.shape[x.ndim - len(shape) :]) != list(shape) or not x.is_floating_point():
        return NotImplemented  # torch has a message for each
    if weight is not None and list(weight.shape) != list(shape):
        return NotImplemented
    return _RMSNorm.run(x, shape, weight, _rms_eps(x, eps))


class _RMSNorm(Float8Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float
    ) -> Tensor:
        y, _, rstd = _forward(x, shape, weight, None, eps, center=False)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
        dx, dweight = _backward(dy, x, ctx.shape, None, rstd, weight, needs=needs)
        return dx, None, dweight, None
