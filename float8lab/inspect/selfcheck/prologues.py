"""Check casts that compute their values: norms, activations and gradients of activations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import FP8_DTYPES
from float8lab.inspect.selfcheck.casts import compare_sums
from float8lab.inspect.selfcheck.grid import (
    NORMS,
    RECIPES,
    QuantizeOptions,
    format_of,
    given,
    name_of,
    with_infinities,
)
from float8lab.inspect.selfcheck.harness import BF16, FP32, Cases, checks
from float8lab.ops import reference

__all__: list[str] = []

_KINDS = (*NORMS, *reference.ACTIVATIONS, *(f"{name}_backward" for name in reference.ACTIVATIONS))
_SOME_KINDS = (
    ("layer_norm", BF16),
    ("rms_norm", FP32),
    ("swiglu", BF16),
    ("gelu_backward", FP32),
    ("geglu_backward", BF16),
)
"""Kinds of prologues that together cover every way in which the kernels load one."""
_SHAPES = ((63, 130), (300, 512), (0, 64))
_RECIPES = ("per tensor", "per row", "1x128", "128x128", "1x32 e8m0")


def _inputs(cases: Cases, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Draw inputs of a prologue of about this shape; gated gradients have an even width."""
    rows, columns = shape

    def matrix(width: int) -> Tensor:
        return (cases.normal(rows, width) * 3).to(dtype)

    if kind in NORMS:
        more = [cases.normal(rows), cases.normal(columns)] if kind == "layer_norm" else []
        return [matrix(columns), cases.uniform(rows) + 0.5, cases.normal(columns), *more]
    name = kind.removesuffix("_backward")
    gated = reference.ACTIVATIONS[name][1]
    if kind == name:
        return [matrix(2 * columns if gated else columns)]
    half = (columns + 1) // 2
    return [matrix(2 * half), matrix(half)] if gated else [matrix(columns), matrix(columns)]


@checks(
    "prologues",
    "the reference on the CPU: bit for bit, or where there is an exponential, float64",
    "value_of_op",
)
def _check_value_of(cases: Cases) -> None:
    """Compare values with the reference, or with float64 where there is an exponential."""
    # Relative errors are 2**-22 for an exponential (``ex2.approx`` in the PTX manual), 2**-17 for
    # the rounding of its argument of up to 2**7, 2**-23 for a reciprocal, and a final rounding.
    for index, kind in enumerate(_KINDS):
        function = reference.ACTIVATIONS.get(kind.removesuffix("_backward"), ("norm", False))[0]
        for shape in (_SHAPES[index % 2], _SHAPES[2]):
            dtype = (BF16, FP32)[index // 2 % 2]
            cases.begin(f"{kind} {shape[0]}x{shape[1]} {name_of(dtype)}")
            inputs = _inputs(cases, kind, shape, dtype)
            if function in ("norm", "relu", "srelu"):
                cases.agree("value_of_op", kind, inputs, dtype)
                continue
            got = ops.value_of_op(kind, cases.on_device(inputs), dtype)
            size = math.prod(max([1.0, *x.abs().flatten().tolist()]) for x in inputs)
            exact = reference.value_of(kind, [tensor.double() for tensor in inputs], torch.float64)
            bound = exact.abs() * (torch.finfo(dtype).eps + 2.0**-16) + 2.0**-20 * size
            cases.within(got, exact, bound)


_COMPOSED = "the op of the written values, both on this device, bit for bit"


def _prologues(cases: Cases) -> Iterator[tuple[ops.Prologue, Tensor, QuantizeOptions]]:
    """Begin each case; yield a prologue, its values on the device, and how to quantize them."""
    for kind_number, (kind, dtype) in enumerate(_SOME_KINDS):
        for number, shape in enumerate(_SHAPES):
            fp8_dtype, align = FP8_DTYPES[number % 2], (1, 16)[number % 2]
            cases.begin(f"{kind} {shape[0]}x{shape[1]} {name_of(dtype)} {format_of(fp8_dtype)}")
            inputs = _inputs(cases, kind, shape, dtype)
            if number == 1:
                inputs[0] = with_infinities(inputs[0])
            prologue = ops.Prologue(kind, cases.on_device(inputs), dtype)
            recipe = RECIPES[_RECIPES[(kind_number * len(_SHAPES) + number) % len(_RECIPES)]]
            yield prologue, prologue.value(), (fp8_dtype, *recipe, align)


def _cast(x: ops.Prologue | Tensor, *options: object) -> Sequence[Tensor]:
    results: Sequence[Tensor] = ops.cast_op(*given(x), *options)
    return results


@checks("prologues", _COMPOSED, "amax_op", name="amax_of")
def _check_amax_of(cases: Cases) -> None:
    for prologue, value, _ in _prologues(cases):
        cases.same(ops.amax_op(*given(prologue), (-1, -1)), ops.amax_op(*given(value), (-1, -1)))


@checks("prologues", _COMPOSED, "cast_op", name="cast_of")
def _check_cast_of(cases: Cases) -> None:
    encode = torch.tensor([27.1], dtype=FP32, device=cases.device)
    for prologue, value, (fp8_dtype, *_, align) in _prologues(cases):
        options = (fp8_dtype, (-1, -1), "encode", 0.0, align)
        for index, transposed in ((0, False), (3, True)):
            oriented = (*options, not transposed, transposed, False, encode)
            slot, want_slot = (torch.full_like(encode, ops.NO_DATA) for _ in range(2))
            got = _cast(prologue, *oriented, None, None, slot)
            rowwise = (*options, True, False, False, encode, None, None, want_slot)
            want = _cast(value.t() if transposed else value, *rowwise)
            cases.same((got[index], slot), (want[0], want_slot))
            cases.same(_cast(prologue, *oriented)[index], want[0])


@checks("prologues", f"{_COMPOSED}; column sums: float64", "cast_op", name="cast_pair_of")
def _check_cast_pair_of(cases: Cases) -> None:
    encode = torch.tensor([27.1], dtype=FP32, device=cases.device)
    for prologue, value, (fp8_dtype, *_, align) in _prologues(cases):
        options = (fp8_dtype, (-1, -1), "encode", 0.0, align, True, True, True, encode)
        got, want = _cast(prologue, *options), _cast(value, *options)
        cases.same((got[0], got[3]), (want[0], want[3]))
        compare_sums(cases, got[5], value.cpu())


@checks("prologues", _COMPOSED, "cast_op", name="quantize_of")
def _check_quantize_of(cases: Cases) -> None:
    for prologue, value, options in _prologues(cases):
        rowwise = _cast(prologue, *options, True, False, False)
        cases.same(rowwise[:2], _cast(value, *options, True, False, False)[:2])
        columnwise = _cast(prologue, *options, False, True, False)
        cases.same(columnwise[3:5], _cast(value.t(), *options, True, False, False)[:2])
        if options[1] == (-1, -1):
            amax = ops.amax_op(*given(prologue), (-1, -1))
            cases.same(columnwise[2], amax)
            requantized = _cast(prologue, *options, False, True, False, amax)
            cases.same(requantized[3:5], columnwise[3:5])


@checks("prologues", f"{_COMPOSED}; column sums: float64", "cast_op", name="quantize_pair_of")
def _check_quantize_pair_of(cases: Cases) -> None:
    for prologue, value, options in _prologues(cases):
        q, scale, _, *transposed, sums = _cast(prologue, *options, True, True, True)
        want = _cast(value, *options, True, True, False)
        cases.same((q, scale, *transposed), (*want[:2], *want[3:5]))
        compare_sums(cases, sums, value.cpu())
