"""LayerNorm and RMSNorm of the rows of a matrix.  M rows, K features.

``center`` is LayerNorm's: it subtracts the mean and has a bias. RMSNorm does neither. ``fp8_norm``
and its backward read a matrix that is stored in FP8.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops._register import register

__all__ = ["fp8_norm_backward_op", "fp8_norm_op", "norm_backward_op", "norm_op", "norm_stats_op"]


def wide_dtype(x: Tensor) -> torch.dtype:
    """Of statistics and of the gradients of weight and bias."""
    return torch.promote_types(x.dtype, torch.float32)


def empty_stats(x: Tensor, rows: int, center: bool) -> tuple[Tensor, Tensor]:
    """Room for the mean and the rstd of every row."""
    rstd = x.new_empty(rows, dtype=wide_dtype(x))
    return rstd.new_empty(rows if center else 0), rstd


def _fake_norm_stats(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool,
    dtype: torch.dtype,
    want_amax: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (1, 1) if want_amax else (0,)
    return *empty_stats(x, x.shape[0], center), x.new_empty(shape, dtype=torch.float32)


def _fake_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, center: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=dtype), *empty_stats(x, x.shape[0], center)


def _fake_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, center: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dweight = x.new_empty(x.shape[1], dtype=wide_dtype(x))
    return x.new_empty(x.shape), dweight, dweight.new_empty(x.shape[1] if center else 0)


def _fake_fp8_norm(
    q: Tensor,
    scale: Tensor,
    block: Sequence[int],
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    center: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape, dtype=dtype), *empty_stats(scale, q.shape[0], center)


def _fake_fp8_norm_backward(
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
    dweight = scale.new_empty(q.shape[1])
    return q.new_empty(q.shape, dtype=dtype), dweight, scale.new_empty(q.shape[1] if center else 0)


norm_op = register(
    "norm(Tensor x, Tensor weight, Tensor? bias, float eps, bool center, ScalarType dtype)"
    " -> (Tensor, Tensor, Tensor)",
    cuda="norm:norm",
    reference=reference.norm,
    fake=_fake_norm,
)
norm_stats_op = register(
    "norm_stats(Tensor x, Tensor weight, Tensor? bias, float eps, bool center, ScalarType dtype,"
    " bool want_amax) -> (Tensor, Tensor, Tensor)",
    cuda="norm:norm_stats",
    reference=reference.norm_stats,
    fake=_fake_norm_stats,
)
norm_backward_op = register(
    "norm_backward(Tensor dy, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool center)"
    " -> (Tensor, Tensor, Tensor)",
    cuda="norm:norm_backward",
    reference=reference.norm_backward,
    fake=_fake_norm_backward,
)
fp8_norm_op = register(
    "fp8_norm(Tensor q, Tensor scale, int[] block, Tensor weight, Tensor? bias, float eps,"
    " bool center, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    cuda="norm:fp8_norm",
    reference=reference.fp8_norm,
    fake=_fake_fp8_norm,
)
fp8_norm_backward_op = register(
    "fp8_norm_backward(Tensor dy, Tensor q, Tensor scale, int[] block, Tensor weight, Tensor mean,"
    " Tensor rstd, bool center, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    cuda="norm:fp8_norm_backward",
    reference=reference.fp8_norm_backward,
    fake=_fake_fp8_norm_backward,
)
