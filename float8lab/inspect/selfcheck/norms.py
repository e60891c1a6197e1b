"""Checks of norms, forward and backward, of FP8 matrices too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import (
    E4M3,
    HIGH_PRECISION_DTYPES,
)
from float8lab.inspect.selfcheck.grid import NORMS, all_to, granularity, name_of
from float8lab.inspect.selfcheck.harness import Cases, checks
from float8lab.ops import reference

__all__: list[str] = []


_NORM_SHAPES = ((70, 512), (5, 33), (3, 9001), (1, 1), (0, 8))
_EPS = 1e-5


def _norms(
    cases: Cases,
) -> Iterator[tuple[bool, torch.dtype, Tensor, Tensor, Tensor | None]]:
    """Begin each case; yield center, dtype, x (float32), weight and bias, all on the CPU."""
    for center in (True, False):
        for number, shape in enumerate(_NORM_SHAPES):
            dtype = HIGH_PRECISION_DTYPES[number % 3]
            cases.begin(f"{NORMS[not center]} {shape[0]}x{shape[1]} {name_of(dtype)}")
            x, weight = cases.normal(*shape) * 3 + 1, cases.normal(shape[1])
            yield center, dtype, x, weight, cases.normal(shape[1]) if center else None


@checks(
    "norms",
    "statistics: float64; given these, values and amax: bit for bit",
    "norm_op",
)
def _check_norm(cases: Cases) -> None:
    for center, dtype, wide, weight, bias in _norms(cases):
        x = wide.to(dtype)
        arguments = (*all_to(cases, (x, weight, bias)), _EPS, center, dtype)
        y, mean, rstd, _ = ops.norm_op(*arguments)
        _compare_norm(cases, (y, mean, rstd), x, weight, bias)
        _, *stats, amax = ops.norm_op(*arguments, None, (), False, True)
        cases.same(stats[not center :], (mean, rstd)[not center :])
        cases.same(amax, reference.amax(y.cpu(), (-1, -1)))


@checks(
    "norms",
    "statistics: float64 of the dequantized; given these, values: bit for bit",
    "norm_op",
    name="fp8_norm",
)
def _check_fp8_norm(cases: Cases) -> None:
    for q, scale, block, dtype, weight, bias in _fp8_norms(cases):
        there = all_to(cases, (q, weight, bias))
        scale_there, center = scale.to(cases.device), bias is not None
        *got, _ = ops.norm_op(*there, _EPS, center, dtype, scale_there, block)
        value = reference.dequantize(q, scale, block, dtype)
        _compare_norm(cases, got, value, weight, bias)


def _fp8_norms(
    cases: Cases,
) -> Iterator[tuple[Tensor, Tensor, tuple[int, int], torch.dtype, Tensor, Tensor | None]]:
    blocks = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32))
    for number, (_, dtype, x, weight, bias) in enumerate(_norms(cases)):
        block = blocks[(number + number // 5) % 5]
        cases.case += f" {granularity(block)}"
        q, scale, _ = reference.quantize(x, E4M3, block, "fp32", 0.0, 1)
        yield q, scale, block, dtype, weight, bias


def _compare_norm(
    cases: Cases, got: Sequence[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """Compare statistics with float64, and values with the reference given these statistics.

    Sums of K terms in float32 in the order of a tree go through log2(K) + 1 roundings, less than
    2**5. The variance is a sum of squares, each rounded thrice, and rstd is half as far off as
    that.
    """
    y, mean, rstd = got
    center, wide = bias is not None, x.double()
    exact_mean = wide.mean(1) if center else wide.new_zeros(x.shape[0])
    variance = (wide - exact_mean[:, None]).square().mean(1)
    exact_rstd = (variance + _EPS).rsqrt()
    if center:
        cases.within(mean, exact_mean, wide.abs().mean(1) * 2.0**-19)
    cases.within(rstd, exact_rstd, exact_rstd * 2.0**-18)
    inputs = [x, rstd.cpu(), weight]
    kind = "layer_norm" if center else "rms_norm"
    if bias is not None:
        inputs += [mean.cpu(), bias]
    cases.same(y, reference.value_of(kind, inputs, x.dtype))


@checks("norms", "float64, given the statistics", "norm_backward_op")
def _check_norm_backward(cases: Cases) -> None:
    for center, dtype, wide, weight, bias in _norms(cases):
        x, dy = wide.to(dtype), cases.normal(*wide.shape).to(dtype)
        _, mean, rstd, _ = reference.norm(x, weight, bias, _EPS, center, dtype)
        inputs = (dy, x, weight, mean, rstd)
        got = ops.norm_backward_op(*all_to(cases, inputs), center, dtype)
        _compare_norm_backward(cases, got, inputs)


@checks(
    "norms",
    "float64 of the dequantized, given the statistics",
    "norm_backward_op",
    name="fp8_norm_backward",
)
def _check_fp8_norm_backward(cases: Cases) -> None:
    for q, scale, block, dtype, weight, bias in _fp8_norms(cases):
        x, center = reference.dequantize(q, scale, block, dtype), bias is not None
        dy = cases.normal(*x.shape).to(dtype)
        _, mean, rstd, _ = reference.norm(x, weight, bias, _EPS, center, dtype)
        there = all_to(cases, (dy, q, weight, mean, rstd))
        got = ops.norm_backward_op(*there, center, dtype, scale.to(cases.device), block)
        _compare_norm_backward(cases, got, (dy, x, weight, mean, rstd))


def _compare_norm_backward(
    cases: Cases,
    got: Sequence[Tensor],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor],
) -> None:
    """Compare gradients with float64, within the rounding of their terms.

    A result is rounded once to the dtype. The terms of dx, which may cancel, are off by 2**-16:
    their means are sums as in ``_compare_norm``. Sums over M rows go through at most M roundings of
    terms that are themselves rounded up to three times.
    """
    dx, dweight, dbias = got
    x = inputs[1]
    mean = inputs[3]
    dy64, x64, weight64, mean64, rstd64 = (
        torch.zeros(1).double() if value is None else value.double() for value in inputs
    )
    center = mean is not None
    want = reference.norm_backward(dy64, x64, weight64, mean64, rstd64, center, torch.float64)
    xhat = (x64 - mean64[:, None]) * rstd64[:, None]
    terms = (dy64 * weight64).abs() * rstd64[:, None]
    along = terms.mean(1, keepdim=True) * (1 + xhat.abs()) ** 2
    bound = want[0].abs() * torch.finfo(x.dtype).eps + (terms + along) * 2.0**-16
    rows = max(x.shape[0], 1) * 2.0**-24
    cases.within(dx, want[0], bound)
    cases.within(dweight, want[1], (dy64 * xhat).abs().sum(0) * 8 * rows)
    if center:
        assert want[2] is not None, "LayerNorm has a bias"
        cases.within(dbias, want[2], dy64.abs().sum(0) * 2 * rows)
