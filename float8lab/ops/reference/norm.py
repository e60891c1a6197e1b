"""LayerNorm and RMSNorm, forward and backward.  M rows, K features.

Statistics and all arithmetic are float32, whatever the inputs are (float64 for float64), and
results are rounded once. The two norms differ in ``center``: LayerNorm subtracts the mean, RMSNorm
does not. A zero-centered gamma is the caller's: it passes ``1 + gamma`` as ``weight``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8lab.ops.reference.quantize import dequantize

__all__ = [
    "apply_norm",
    "fp8_norm",
    "fp8_norm_backward",
    "norm",
    "norm_backward",
    "norm_stats",
    "widen",
]


def widen(x: Tensor) -> Tensor:
    """``x`` in the dtype of the arithmetic: float32, or float64 if it is that."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def apply_norm(
    x: Tensor, rstd: Tensor, weight: Tensor, mean: Tensor | None, bias: Tensor | None
) -> Tensor:
    """``(x - mean) * rstd * weight + bias``, not rounded; without mean and bias for RMSNorm."""
    wide = widen(x)
    if mean is not None:
        wide = wide - mean[:, None]
    wide = wide * rstd[:, None] * weight.to(wide.dtype)
    return wide if bias is None else wide + bias.to(wide.dtype)


def _mean(x: Tensor) -> Tensor:
    """Of each row; 0 of no features."""
    return x.sum(1) / max(x.shape[1], 1)


def norm_stats(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool,
    dtype: torch.dtype,
    want_amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (empty unless ``center``) and 1 / standard deviation of each row.

    And, if wanted, the amax ``[1, 1]`` of what the norm gives in ``dtype``, else an empty tensor.
    """
    wide = widen(x)
    mean = _mean(wide) if center else wide.new_empty(0)
    centered = wide - mean[:, None] if center else wide
    rstd = (_mean(centered.square()) + eps).sqrt().reciprocal()
    if not want_amax:
        return mean, rstd, wide.new_empty(0, dtype=torch.float32)
    if x.numel() == 0:
        return mean, rstd, wide.new_zeros((1, 1), dtype=torch.float32)
    y = apply_norm(x, rstd, weight, mean if center else None, bias).to(dtype)
    return mean, rstd, y.abs().max().float().view(1, 1)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of each row in ``dtype``, its mean (empty unless ``center``) and its rstd."""
    mean, rstd, _ = norm_stats(x, weight, bias, eps, center, dtype, False)
    y = apply_norm(x, rstd, weight, mean if center else None, bias)
    return y.to(dtype).contiguous(), mean, rstd


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (in its dtype), of the weight and of the bias (empty unless ``center``)."""
    wide, g = widen(x), widen(dy)
    xhat = (wide - mean[:, None] if center else wide) * rstd[:, None]
    dweight = (g * xhat).sum(0)
    dbias = g.sum(0) if center else g.new_empty(0)
    g = g * weight.to(g.dtype)
    along = _mean(g * xhat)[:, None]
    dx = g - xhat * along
    if center:
        dx = dx - _mean(g)[:, None]
    return (dx * rstd[:, None]).to(x.dtype).contiguous(), dweight, dbias


def fp8_norm(
    q: Tensor,
    scale: Tensor,
    block: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """``norm`` of the values that FP8 data and its scales stand for in ``dtype``."""
    return norm(dequantize(q, scale, block, dtype), weight, bias, eps, center, dtype)


def fp8_norm_backward(
    dy: Tensor,
    q: Tensor,
    scale: Tensor,
    block: Sequence[int],
    weight: Tensor,
    mean: Tensor,
    rstd: Tensor,
    center: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """``norm_backward`` of such values."""
    x = dequantize(q, scale, block, dtype)
    return norm_backward(dy, x, weight, mean, rstd, center)
