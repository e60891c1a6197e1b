"""LayerNorm and RMSNorm, forward and backward.  K features.

Statistics and all arithmetic are float32, whatever the inputs are (float64 for float64), and
results are rounded once. ``x`` and ``dy`` are ``[..., K]``, the statistics ``[...]``. The two norms
differ in ``center``: LayerNorm subtracts the mean and has a bias, RMSNorm does neither. For a
zero-centered gamma, the caller passes ``1 + gamma`` as ``weight``. With a ``scale``, ``x`` is a
matrix of FP8 data, with a scale for each ``block``, which stands for values in ``dtype``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.ops.declare import declare
from float8lab.ops.reference.blocks import as_matrix, block_amax
from float8lab.ops.reference.prologue import apply_norm, dequantize, widen

__all__ = [
    "NormResults", "empty_stats", "norm", "norm_backward", "norm_backward_op", "norm_op",
]  # fmt: skip


class NormResults(NamedTuple):
    """The norm; the mean and the reciprocal standard deviation of each row; an amax."""

    y: Tensor | None
    mean: Tensor | None
    rstd: Tensor
    amax: Tensor | None


def _mean(x: Tensor) -> Tensor:
    """Return the mean of each row, or 0 if there are no features."""
    return x.sum(1) / max(x.shape[1], 1)


def norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool, dtype: torch.dtype,
    scale: Tensor | None = None, block: Sequence[int] = (), write: bool = True,
    want_amax: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Return the norm of each row in ``dtype`` (if ``write``), its mean (if ``center``), its rstd.

    Also return the amax ``[1, 1]`` of the norm in ``dtype`` (if ``want_amax``). Others are None.
    """
    if scale is not None:
        x = dequantize(x, scale, block, dtype)
    shape, x = x.shape, as_matrix(x)
    wide = widen(x)
    mean = _mean(wide) if center else None
    centered = wide if mean is None else wide - mean[:, None]
    rstd = (_mean(centered.square()) + eps).sqrt().reciprocal()
    y = y_amax = None
    if write or want_amax:
        y = apply_norm(x, rstd, weight, mean, bias).to(dtype)
        y_amax = block_amax(y, (-1, -1)) if want_amax else None
        # Not a view: an in-place op on a view of an autograd function's output is refused.
        y = torch.ops.aten._unsafe_view.default(y.contiguous(), shape) if write else None
    mean = None if mean is None else mean.view(shape[:-1])
    return NormResults(y, mean, rstd.view(shape[:-1]), y_amax)


def norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor, center: bool,
    dtype: torch.dtype, scale: Tensor | None = None, block: Sequence[int] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return gradients of x (in ``dtype``), of weight and of bias (None unless ``center``)."""
    if scale is not None:
        x = dequantize(x, scale, block, dtype)
    shape, rstd = x.shape, rstd.reshape(-1)
    mean = mean.reshape(-1) if mean is not None and center else None
    if x.ndim != 2:
        dy, x = as_matrix(dy), as_matrix(x)
    wide, g = widen(x), widen(dy)
    xhat = (wide if mean is None else wide - mean[:, None]) * rstd[:, None]
    dweight = (g * xhat).sum(0)
    dbias = g.sum(0) if center else None
    g = g * weight.to(g.dtype)
    dx = g - xhat * _mean(g * xhat)[:, None]
    if center:
        dx = dx - _mean(g)[:, None]
    return (dx * rstd[:, None]).to(dtype).contiguous().view(shape), dweight, dbias


def empty_stats(x: Tensor, scale: Tensor | None, center: bool) -> tuple[Tensor | None, Tensor]:
    """Allocate the mean and the rstd of every row of ``[..., K]``."""
    wide = torch.promote_types((x if scale is None else scale).dtype, torch.float32)
    rstd = x.new_empty(x.shape[:-1], dtype=wide)
    return torch.empty_like(rstd) if center else None, rstd


def _norm_outputs(of: Any) -> tuple[Tensor | None, ...]:
    y = of.x.new_empty(of.x.shape, dtype=of.dtype) if of.write else None
    amax = of.x.new_empty((1, 1), dtype=torch.float32) if of.want_amax else None
    return y, *empty_stats(of.x, of.scale, of.center), amax


def _norm_backward_outputs(of: Any) -> tuple[Tensor | None, ...]:
    like = of.x if of.scale is None else of.scale
    dweight = like.new_empty(of.x.shape[-1], dtype=torch.promote_types(like.dtype, torch.float32))
    dbias = torch.empty_like(dweight) if of.center else None
    return of.x.new_empty(of.x.shape, dtype=of.dtype), dweight, dbias


def _norm_shards(of: Any) -> Any:
    for dim in range(of.x.ndim - 1 if of.scale is None else 0):
        yield (dim, dim, dim, "max"), {"x": dim}


def _norm_backward_shards(of: Any) -> Any:
    for dim in range(of.x.ndim - 1 if of.scale is None else 0):
        yield (dim, "sum", "sum"), dict.fromkeys(("dy", "x", "mean", "rstd"), dim)


norm_op = declare(norm, cuda="norm:norm", outputs=_norm_outputs, sharding=_norm_shards)
norm_backward_op = declare(
    norm_backward, cuda="norm:norm_backward", outputs=_norm_backward_outputs,
    sharding=_norm_backward_shards,
)  # fmt: skip
