"""Check casts: quantize, cast, transpose and dequantize, in one and in both orientations."""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import (
    E4M3,
    E5M2,
    FLOAT32_MAX,
    FP8_DTYPES,
    HIGH_PRECISION_DTYPES,
    largest,
    scale_shape,
)
from float8lab.inspect.selfcheck.grid import (
    LAYOUTS,
    RECIPES,
    format_of,
    given,
    granularity,
    matrices,
    name_of,
    quantize_cases,
    special,
    with_infinities,
)
from float8lab.inspect.selfcheck.harness import BF16, FP16, FP32, REFERENCE, Cases, checks
from float8lab.ops import reference

__all__ = ["compare_sums", "values_of"]

_ROWWISE = (True, False, False)
"""Arguments of a cast that makes only rowwise FP8 data: no transpose, no column sums."""


@checks("casts", REFERENCE, "amax_op")
def _check_amax(cases: Cases) -> None:
    for block in ((-1, -1), (1, -1), (1, 128)):
        named = [(name, x) for _, name, x, _ in matrices(cases)]
        for name, x in (*named, *special()):
            cases.begin(f"{name} {granularity(block)}")
            cases.agree("amax_op", *given(x), block)


@checks("casts", REFERENCE, "cast_op", name="quantize")
def _check_quantize(cases: Cases) -> None:
    for x, options in quantize_cases(cases):
        cases.agree("cast_op", *given(x), *options, *_ROWWISE)
        if options[1] == (-1, -1):
            amax = 2 * reference.block_amax(x, (-1, -1))
            cases.agree("cast_op", *given(x), *options, *_ROWWISE, amax)


@checks("casts", f"{REFERENCE}; column sums: float64", "cast_op", name="quantize_pair")
def _check_quantize_pair(cases: Cases) -> None:
    for x, options in quantize_cases(cases):
        summed = bool((x.double().abs().sum(0) < FLOAT32_MAX).all())
        *_, sums = cases.agree("cast_op", *given(x), *options, True, True, summed, but=5)
        if summed:
            compare_sums(cases, sums, x)


def compare_sums(cases: Cases, got: Tensor, x: Tensor) -> None:
    """Compare sums of M terms: in any order, float32 rounds each term at most M times."""
    wide = x.double()
    bound = wide.abs().sum(0) * (2.0**-24 * max(x.shape[0], 1))
    cases.within(got, wide.sum(0), bound)


_TABLE = "the definition of the formats and " + REFERENCE


@checks("casts", _TABLE, "cast_op")
def _check_cast(cases: Cases) -> None:
    _check_every_value(cases)
    _check_special_values(cases)
    _check_blocks_and_slots(cases)


def _check_every_value(cases: Cases) -> None:
    for dtype in (FP16, BF16):  # all 16-bit values contain all halfway cases
        x = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
        x = x.view(256, 256)
        for fp8_dtype in FP8_DTYPES:
            for factor in (1.0, 0.37, 2.0**-7):
                cases.begin(f"every {name_of(dtype)} to {format_of(fp8_dtype)} factor {factor:g}")
                factors = _scalar(factor)
                values = {"encode": x.float() * factors, "decode": x.float() / factors}
                for rule, value in values.items():
                    options = (fp8_dtype, (-1, -1), rule, 0.0, 1, *_ROWWISE)
                    got = ops.cast_op(*cases.on_device((*given(x), *options, factors)))
                    cases.same(got[0], _nearest(value, x, fp8_dtype))


def _scalar(value: float) -> Tensor:
    return torch.tensor([value], dtype=FP32, device="cpu")


def _check_special_values(cases: Cases) -> None:
    for fp8_dtype in FP8_DTYPES:
        for name, x in special():
            for factor in (1.0, 0.0, 2.0**-149, 2.0**-127, torch.inf, torch.nan, 3e38):
                cases.begin(f"{name} to {format_of(fp8_dtype)} factor {factor:g}")
                for rule in ("encode", "decode"):
                    options = (fp8_dtype, (-1, -1), rule, 0.0, 1, *_ROWWISE)
                    cases.agree("cast_op", *given(x), *options, _scalar(factor))


def _check_blocks_and_slots(cases: Cases) -> None:
    for index, (block, rule, _) in enumerate(RECIPES.values()):
        for number, name, x, align in matrices(cases, index, infinities=True):
            fp8_dtype = FP8_DTYPES[number % 2]
            cases.begin(f"{name} {format_of(fp8_dtype)} {granularity(block)} {rule}")
            shape = tuple(reference.round_up(size, align) for size in x.shape)
            factors = cases.uniform(*scale_shape(shape, block)) + 0.1
            factor_rule = "decode" if number % 3 == 1 else "encode"
            options = (fp8_dtype, block, factor_rule, 0.0, align, *_ROWWISE, factors, None, None)
            cases.agree("cast_op", *given(x), *options)
            for start in (ops.NO_DATA, 0.5, 1e6) if block == (-1, -1) else ():
                cases.agree("cast_op", *given(x), *options, _scalar(start))


def _nearest(value: Tensor, x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """Clamp a float32 CPU tensor, and find its nearest FP8 values, ties to even, by search."""
    # Of two neighbours, the even FP8 value has the even byte. Where ``x`` is infinite, the result
    # is infinite, too, or NaN if the format has no infinity.
    values = values_of(fp8_dtype)[:128]
    values = values[values <= largest(fp8_dtype)]
    size = value.double().abs().nan_to_num(nan=0.0, posinf=FLOAT32_MAX)
    size = size.clamp(max=largest(fp8_dtype)).contiguous()
    above = torch.searchsorted(values, size)
    below = (above - 1).clamp(min=0)
    to_above, to_below = values[above] - size, size - values[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    byte = torch.where(up, above, below)
    byte = torch.where(x.isinf(), 124 if fp8_dtype == E5M2 else 127, byte) + 128 * value.signbit()
    byte = torch.where(value.isnan(), 127, byte)  # a NaN in both formats
    return byte.to(torch.uint8).view(fp8_dtype)


def values_of(fp8_dtype: torch.dtype) -> Tensor:
    """Compute the float64 value of each of the 256 bytes from the definition of the format."""
    mantissa, bias = (3, 7) if fp8_dtype == E4M3 else (2, 15)
    byte = torch.arange(128, dtype=torch.int64, device="cpu")
    exponent, fraction = byte >> mantissa, (byte & (2**mantissa - 1)).double() / 2**mantissa
    value = (fraction + (exponent > 0)) * 2.0 ** (exponent.clamp(min=1) - bias).double()
    if fp8_dtype == E4M3:
        value[127] = torch.nan
    else:
        value[124], value[125:] = torch.inf, torch.nan
    return torch.cat((value, -value))


@checks("casts", f"{REFERENCE}; column sums: float64", "cast_op", name="cast_pair")
def _check_cast_pair(cases: Cases) -> None:
    for start in (None, ops.NO_DATA, 0.5, 1e6, torch.nan):
        for number, name, x, align in matrices(cases, infinities=True):
            fp8_dtype = FP8_DTYPES[number % 2]
            cases.begin(f"{name} {format_of(fp8_dtype)} slot {start}")
            options = (fp8_dtype, (-1, -1), "encode", 0.0, align, True, True, True, _scalar(0.73))
            slot = None if start is None else _scalar(start)
            got = cases.agree("cast_op", *given(x), *options, None, None, slot, but=5)
            compare_sums(cases, got[5], x)


_MANY_SHAPES = ((63, 1500), (128, 128), (0, 64), (272, 1040), (33, 0), (1, 1), (9, 1), (256, 512))


@checks("casts", REFERENCE, "cast_many_op")
def _check_many(cases: Cases) -> None:
    for number, (recipe, (block, rule, eps)) in enumerate(RECIPES.items()):
        fp8_dtype, dtype = FP8_DTYPES[number % 2], HIGH_PRECISION_DTYPES[number % 3]
        x = [cases.matrix(shape, dtype) for shape in _MANY_SHAPES]
        x = [with_infinities(matrix) if index % 2 else matrix for index, matrix in enumerate(x)]
        name = f"{len(x)} of {name_of(dtype)} {format_of(fp8_dtype)} {recipe}"
        results = [reference.quantize(matrix, fp8_dtype, block, rule, eps, 1) for matrix in x]
        q, scale, amax = ([torch.zeros_like(r[i]) for r in results] for i in range(3))
        cases.begin(f"quantize {name}")
        cases.agree("cast_many_op", x, q, block, rule, eps, scale, amax, [])
        cases.begin(f"cast {name}")
        factors = [reference.factors_from_amax(r[2], fp8_dtype, rule, eps)[1] for r in results]
        q = [torch.zeros_like(r[0]) for r in results]
        cases.agree("cast_many_op", x, q, block, "encode", 0.0, [], [], factors)


_TRANSPOSED = ((1, 1), (0, 64), (33, 0), (63, 130), (272, 1040))


@checks("casts", REFERENCE, "transpose_op")
def _check_transpose(cases: Cases) -> None:
    for shape in _TRANSPOSED:
        for layout, lay_out in LAYOUTS.items():
            if layout == "misaligned" and not shape[1]:
                continue
            for align, fp8_dtype in ((1, E4M3), (16, E5M2)):
                cases.begin(f"{shape[0]}x{shape[1]} {layout} align {align} {format_of(fp8_dtype)}")
                q = lay_out(cases.bytes(*shape)).view(fp8_dtype)
                event = None if align == 1 else torch.empty(0, device="cpu")
                got, want = cases.both("transpose_op", q, align, event)
                cases.same(got[0].view(torch.uint8), want[0].view(torch.uint8))


@checks("casts", _TABLE, "value_of_op", name="dequantize")
def _check_dequantize(cases: Cases) -> None:
    unit_scale = torch.ones(1, 1, dtype=FP32, device="cpu")
    all_bytes = torch.arange(256, dtype=torch.uint8, device="cpu").view(16, 16)
    for fp8_dtype in FP8_DTYPES:
        cases.begin(f"every {format_of(fp8_dtype)}")
        inputs = cases.on_device((all_bytes.view(fp8_dtype), unit_scale))
        got = ops.value_of_op("dequantize", inputs, FP32, (-1, -1))
        cases.same(got, values_of(fp8_dtype).view(16, 16).float())
        for index, (recipe, (block, _, _)) in enumerate(RECIPES.items()):
            dtype = HIGH_PRECISION_DTYPES[index % 3]
            layout, lay_out = list(LAYOUTS.items())[index % 4]
            cases.begin(f"300x500 {format_of(fp8_dtype)} {recipe} {name_of(dtype)} {layout}")
            q = lay_out(cases.bytes(300, 500)).view(fp8_dtype)
            scale = cases.normal(*scale_shape((300, 500), block)).exp()
            event = torch.empty(0, device="cpu") if index % 2 else None
            cases.agree("value_of_op", "dequantize", (q, scale), dtype, block, event)
