"""Handlers of LayerNorm and RMSNorm, which read FP8 data and scales.  M rows, K features.

The rows may be FP8 with any blocks, or plain if only weight or bias is FP8. Weight and bias are
dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.ops import norm_backward_op, norm_op
from float8lab.tensor.differentiation import AutogradContext, Float8Function, once_differentiable
from float8lab.tensor.dispatch import implements, implements_composite
from float8lab.tensor.float8_tensor import Float8Tensor, decoded

__all__: list[str] = []

aten = torch.ops.aten


def _rows(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``x`` as [M, K], so that a norm over the last dimensions ``shape`` is one of rows."""
    if x.dtype not in HIGH_PRECISION_DTYPES:
        x = decoded(x)
    return x.reshape(math.prod(x.shape[: x.ndim - len(shape)]), math.prod(shape))


def _fits(x: Tensor, shape: Sequence[int], *vectors: Tensor | None) -> bool:
    """Whether torch's norms take these sizes; if not, torch raises with its own message."""
    sizes = [x.shape[x.ndim - len(shape) :], *(v.shape for v in vectors if v is not None)]
    return len(shape) > 0 and all(list(size) == list(shape) for size in sizes)


def _vector(x: Tensor | None, K: int, like: Tensor, default: float) -> Tensor:
    if x is None:
        return torch.full((K,), default, dtype=like.dtype, device=like.device)
    return decoded(x).reshape(K)


def _forward(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, *,
    center: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the norm, and the mean and rstd of each row in the shapes that torch's norms use."""
    rows = _rows(x, shape)
    K = rows.shape[1]
    vectors = _vector(weight, K, x, 1.0), _vector(bias, K, x, 0.0) if center else None
    data, *scales = _data_and_scales(rows)
    y, mean, rstd, _ = norm_op(data, *vectors, eps, center, x.dtype, *scales)
    size = (*x.shape[: x.ndim - len(shape)], *(1 for _ in shape))
    mean = mean.view(size) if center else rstd.new_empty(0)
    return y.view(x.shape), mean, rstd.view(size)


def _data_and_scales(rows: Tensor) -> tuple[Tensor | tuple[int, ...], ...]:
    """Return rows as the ops take them: FP8 data, scales and block, or the tensor itself."""
    return (rows.qdata, rows.scale, rows.spec.block) if isinstance(rows, Float8Tensor) else (rows,)


@implements(aten.native_layer_norm_backward.default)
def _backward(  # noqa: PLR0913  # torch's arguments
    op: OpOverload | None, dy: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor | None,
    rstd: Tensor, weight: Tensor | None, bias: Tensor | None, needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute the needed gradients of x, weight and bias; ``mean`` is None for RMSNorm."""
    rows, center = _rows(x, shape), mean is not None
    M, K = rows.shape
    stats = None if mean is None else mean.reshape(M), rstd.reshape(M)
    data, *scales = _data_and_scales(rows)
    dy, gamma = decoded(dy).reshape(M, K), _vector(weight, K, x, 1.0)
    gradients = norm_backward_op(dy, data, gamma, *stats, center, x.dtype, *scales)
    return tuple(
        gradient.view(tensor.shape).to(tensor.dtype) if need and tensor is not None else None
        for gradient, tensor, need in zip(gradients, (x, weight, bias), needs, strict=False)
    )


@implements(aten.native_layer_norm.default)
def _layer_norm(
    op: OpOverload, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None,
    eps: float,
) -> object:  # fmt: skip
    if not _fits(x, shape, weight, bias):
        return NotImplemented
    return _forward(x, shape, weight, bias, eps, center=True)


def _rms_eps(x: Tensor, eps: float | None) -> float:
    """Return ``eps``, or torch's default: the machine epsilon of the arithmetic's dtype."""
    return torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if eps is None else eps


# On a GPU torch has kernels for these two ops, so it does not split them there.


@implements(aten._fused_rms_norm.default)
def _fused_rms_norm(
    op: OpOverload, x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    y, _, rstd = _forward(x, shape, weight, None, _rms_eps(x, eps), center=False)
    return y, rstd


@implements(aten._fused_rms_norm_backward.default)
def _fused_rms_norm_backward(
    op: OpOverload, dy: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor,
    weight: Tensor | None, needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    return _backward(op, dy, x, shape, None, rstd, weight, None, needs)


@implements_composite(
    F.rms_norm,
    torch.rms_norm,
    aten.rms_norm.default,
    autocast=lambda device: torch.float32 if device == "cuda" else None,
)
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
    eps: float | None = None,
) -> object:  # fmt: skip
    if not (_fits(input, normalized_shape, weight) and input.is_floating_point()):
        return NotImplemented
    return _RMSNorm.run(input, weight, normalized_shape, _rms_eps(input, eps))


class _RMSNorm(Float8Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, weight: Tensor | None, shape: Sequence[int], eps: float
    ) -> Tensor:
        y, _, rstd = _forward(x, shape, weight, None, eps, center=False)
        ctx.save_for_backward(x, weight, rstd)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        needs = ctx.needs_input_grad[:2]
        return *_backward(None, dy, x, ctx.shape, None, rstd, weight, None, needs), None, None
