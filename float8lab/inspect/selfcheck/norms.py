"""Check norms of high-precision and of FP8 matrices, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, HIGH_PRECISION_DTYPES
from float8lab.inspect.selfcheck.grid import NORMS, granularity, name_of
from float8lab.inspect.selfcheck.harness import Cases, checks
from float8lab.ops import reference

__all__: list[str] = []

_SHAPES = ((70, 512), (5, 33), (3, 9001), (1, 1), (0, 8))
_BLOCKS = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32))
_EPS = 1e-5


@dataclass(frozen=True)
class _Norm:
    """The arguments of a norm of a matrix, which may be in FP8; all tensors are on the CPU."""

    stored: Tensor
    """The matrix that the op takes; FP8 data if it is in FP8."""
    more: tuple[object, ...]
    """The scale and the block of a matrix in FP8; empty for other matrices."""
    x: Tensor
    """The values of the matrix in high precision."""
    weight: Tensor
    bias: Tensor | None
    """None for RMSNorm, which does not center."""

    @property
    def options(self) -> tuple[bool, torch.dtype]:
        return self.bias is not None, self.x.dtype


def _norms(cases: Cases, *, fp8: bool) -> Iterator[_Norm]:
    """Begin each case and yield its norm."""
    for number in range(2 * len(_SHAPES)):
        center, shape = number < len(_SHAPES), _SHAPES[number % len(_SHAPES)]
        dtype = HIGH_PRECISION_DTYPES[number % len(_SHAPES) % 3]
        block = _BLOCKS[(number + number // 5) % 5]
        name = f"{NORMS[not center]} {shape[0]}x{shape[1]} {name_of(dtype)}"
        cases.begin(f"{name} {granularity(block)}" if fp8 else name)
        x, weight = cases.normal(*shape) * 3 + 1, cases.normal(shape[1])
        bias = cases.normal(shape[1]) if center else None
        if fp8:
            q, scale, _ = reference.quantize(x, E4M3, block, "fp32", 0.0, 1)
            value = reference.dequantize(q, scale, block, dtype)
            yield _Norm(q, (scale, block), value, weight, bias)
        else:
            yield _Norm(x.to(dtype), (), x.to(dtype), weight, bias)


_STATISTICS = "statistics: float64; given these, values and amax: bit for bit"
_FP8_STATISTICS = "statistics: float64 of the dequantized; given these, values: bit for bit"


@checks("norms", _STATISTICS, "norm_op")
def _check_norm(cases: Cases) -> None:
    for norm in _norms(cases, fp8=False):
        y, *statistics = _compare_norm(cases, norm)
        arguments = (norm.stored, norm.weight, norm.bias, _EPS, *norm.options)
        _, *repeated, amax = ops.norm_op(*cases.on_device(arguments), None, (), False, True)
        first = norm.bias is None  # RMSNorm has no mean to compare
        cases.same(repeated[first:], statistics[first:])
        cases.same(amax, reference.block_amax(y.cpu(), (-1, -1)))


@checks("norms", _FP8_STATISTICS, "norm_op", name="fp8_norm")
def _check_fp8_norm(cases: Cases) -> None:
    for norm in _norms(cases, fp8=True):
        _compare_norm(cases, norm)


def _compare_norm(cases: Cases, norm: _Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Compare statistics with float64, and values with the reference given these statistics."""
    # A float32 sum of K terms in the order of a tree rounds each term log2(K) + 1 times, which is
    # less than 2**5. The variance is a sum of squares, which are each rounded three times. The
    # relative error of rstd is half that of the variance.
    x, weight, bias = norm.x, norm.weight, norm.bias
    arguments = (norm.stored, weight, bias, _EPS, *norm.options, *norm.more)
    y, mean, rstd, _ = ops.norm_op(*cases.on_device(arguments))
    wide = x.double()
    exact_mean = wide.new_zeros(x.shape[0]) if bias is None else wide.mean(1)
    variance = (wide - exact_mean[:, None]).square().mean(1)
    exact_rstd = (variance + _EPS).rsqrt()
    cases.within(rstd, exact_rstd, exact_rstd * 2.0**-18)
    inputs = [x, rstd.cpu(), weight]
    if bias is not None:
        cases.within(mean, exact_mean, wide.abs().mean(1) * 2.0**-19)
        inputs += [mean.cpu(), bias]
    cases.same(y, reference.value_of(NORMS[bias is None], inputs, x.dtype))
    return y, mean, rstd


@checks("norms", "float64, given the statistics", "norm_backward_op")
def _check_norm_backward(cases: Cases) -> None:
    for norm in _norms(cases, fp8=False):
        _compare_norm_backward(cases, norm)


@checks(
    "norms",
    "float64 of the dequantized, given the statistics",
    "norm_backward_op",
    name="fp8_norm_backward",
)
def _check_fp8_norm_backward(cases: Cases) -> None:
    for norm in _norms(cases, fp8=True):
        _compare_norm_backward(cases, norm)


def _compare_norm_backward(cases: Cases, norm: _Norm) -> None:
    """Compare gradients with float64, within the rounding of their terms."""
    # A result is rounded once to the dtype. Terms of dx, which may cancel, have a relative error of
    # 2**-16, since their means are sums as in ``_compare_norm``. Sums over M rows round each term
    # at most M times, and the terms are themselves rounded up to three times.
    x, weight, bias = norm.x, norm.weight, norm.bias
    dy = cases.normal(*x.shape).to(x.dtype)
    _, mean, rstd, _ = reference.norm(x, weight, bias, _EPS, *norm.options)
    arguments = (dy, norm.stored, weight, mean, rstd, *norm.options, *norm.more)
    dx, dweight, dbias = ops.norm_backward_op(*cases.on_device(arguments))
    dy64, x64, weight64, mean64, rstd64 = (
        torch.zeros(1).double() if value is None else value.double()
        for value in (dy, x, weight, mean, rstd)
    )
    center = bias is not None
    want = reference.norm_backward(dy64, x64, weight64, mean64, rstd64, center, torch.float64)
    xhat = (x64 - mean64[:, None]) * rstd64[:, None]
    terms = (dy64 * weight64).abs() * rstd64[:, None]
    along = terms.mean(1, keepdim=True) * (1 + xhat.abs()) ** 2
    bound = want[0].abs() * torch.finfo(x.dtype).eps + (terms + along) * 2.0**-16
    rows = max(x.shape[0], 1) * 2.0**-24
    cases.within(dx, want[0], bound)
    cases.within(dweight, want[1], (dy64 * xhat).abs().sum(0) * 8 * rows)
    if want[2] is not None and center:
        cases.within(dbias, want[2], dy64.abs().sum(0) * 2 * rows)
