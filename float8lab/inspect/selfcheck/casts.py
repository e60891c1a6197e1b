"""Checks of casts: quantize, cast, transpose and dequantize, in one orientation and both."""

from __future__ import annotations

from typing import Any

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
    REFERENCE,
    format_of,
    given,
    granularity,
    laid_out,
    matrices,
    name_of,
    quantize_cases,
    special,
    with_infinities,
)
from float8lab.inspect.selfcheck.harness import BF16, FP16, FP32, Cases, checks
from float8lab.ops import reference

__all__ = ["compare_sums", "values_of"]

_cast: Any = reference.cast  # called as the op is, with arguments in tuples


@checks("casts", REFERENCE, "amax_op")
def _check_amax(cases: Cases) -> None:
    for block in ((-1, -1), (1, -1), (1, 128)):
        for number, name, x, _ in matrices(cases):
            cases.begin(f"{name} {granularity(block)}")
            there, x_cpu = laid_out(x, number, cases.device)
            cases.same(ops.amax_op(*given(there), block), reference.amax(x_cpu, block))
        for name, x in special():
            cases.begin(f"{name} {granularity(block)}")
            cases.same(ops.amax_op(*given(x.to(cases.device)), block), reference.amax(x, block))


@checks("casts", REFERENCE, "cast_op", name="quantize")
def _check_quantize(cases: Cases) -> None:
    for there, x_cpu, options in quantize_cases(cases):
        fp8_dtype, block, rule, eps, align = options
        got = ops.cast_op(*given(there), *options, True, False, False)
        cases.same(got[:3], reference.quantize(x_cpu, fp8_dtype, block, rule, eps, align))
        if block == (-1, -1):
            amax = 2 * reference.amax(x_cpu, block)
            got = ops.cast_op(*given(there), *options, True, False, False, amax.to(there.device))
            want = reference.quantize(x_cpu, fp8_dtype, block, rule, eps, align, amax)
            cases.same(got[:2], want[:2])


@checks("casts", f"{REFERENCE}; column sums: float64", "cast_op", name="quantize_pair")
def _check_quantize_pair(cases: Cases) -> None:
    for there, x_cpu, options in quantize_cases(cases):
        summed = bool((x_cpu.double().abs().sum(0) < FLOAT32_MAX).all())
        q, scale, _, *transposed, sums = ops.cast_op(*given(there), *options, True, True, summed)
        want = _cast(*given(x_cpu), *options, True, True, False)
        cases.same((q, scale, *transposed), (*want[:2], *want[3:5]))
        if summed:
            compare_sums(cases, sums, x_cpu)


def compare_sums(cases: Cases, got: Tensor, x: Tensor) -> None:
    """Compare sums of M terms; in float32 a term goes through at most M roundings, in any order."""
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
    for dtype in (FP16, BF16):  # every value of 16 bits, and so every halfway case
        x = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
        x = x.view(256, 256)
        for fp8_dtype in FP8_DTYPES:
            for factor in (1.0, 0.37, 2.0**-7):
                cases.begin(f"every {name_of(dtype)} to {format_of(fp8_dtype)} factor {factor:g}")
                factor_cpu = torch.tensor([factor], dtype=FP32, device="cpu")
                matrix, factor_there = given(x.to(cases.device)), factor_cpu.to(cases.device)
                for rule, value in (
                    ("encode", x.float() * factor_cpu),
                    ("decode", x.float() / factor_cpu),
                ):
                    options = (fp8_dtype, (-1, -1), rule, 0.0, 1, True, False, False)
                    got = ops.cast_op(*matrix, *options, factor_there)
                    cases.same(got[0], _nearest(value, x, fp8_dtype))


def _check_special_values(cases: Cases) -> None:
    for fp8_dtype in FP8_DTYPES:
        for name, x in special():
            for factor in (1.0, 0.0, 2.0**-149, 2.0**-127, torch.inf, torch.nan, 3e38):
                cases.begin(f"{name} to {format_of(fp8_dtype)} factor {factor:g}")
                factor_cpu = torch.tensor([factor], dtype=FP32, device="cpu")
                matrix, factor_there = given(x.to(cases.device)), factor_cpu.to(cases.device)
                for rule in ("encode", "decode"):
                    options = (fp8_dtype, (-1, -1), rule, 0.0, 1, True, False, False)
                    got = ops.cast_op(*matrix, *options, factor_there)
                    want = _cast(*given(x), *options, factor_cpu)
                    cases.same(got[0], want[0])


def _check_blocks_and_slots(cases: Cases) -> None:
    for index, (block, rule, _) in enumerate(RECIPES.values()):
        for number, name, x, align in matrices(cases, index):
            fp8_dtype = FP8_DTYPES[number % 2]
            cases.begin(f"{name} {format_of(fp8_dtype)} {granularity(block)} {rule}")
            x = with_infinities(x) if number % 2 else x
            there, x_cpu = laid_out(x, number, cases.device)
            shape = tuple(reference.round_up(size, align) for size in x.shape)
            factors = cases.uniform(*scale_shape(shape, block)) + 0.1
            for start in (None, ops.NO_DATA, 0.5, 1e6):
                if start is not None and block != (-1, -1):
                    break
                slots = _slots(start, cases.device)
                factor_rule = "decode" if number % 3 == 1 else "encode"
                options = (fp8_dtype, block, factor_rule, 0.0, align, True, False, False)
                got = ops.cast_op(
                    *given(there), *options, factors.to(cases.device), None, None, slots[0]
                )
                want = _cast(*given(x_cpu), *options, factors, slot=slots[1])
                cases.same(got[0], want[0])
                if slots[0] is not None and slots[1] is not None:
                    cases.same(slots[0], slots[1])


def _slots(start: float | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Two amax slots, on the device and on the CPU."""
    if start is None:
        return None, None
    slot = torch.tensor([start], dtype=FP32, device="cpu")
    return slot.to(device, copy=True), slot


def _nearest(value: Tensor, x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """``value``, float32 on the CPU, clamped and rounded to nearest even, by search.

    The even one of two neighbours is the one whose byte is even. Where ``x`` is infinite, so is
    the result, or NaN.
    """
    values = values_of(fp8_dtype)[:128]
    values = values[values <= largest(fp8_dtype)]
    size = (
        value.double().abs().nan_to_num(nan=0.0, posinf=FLOAT32_MAX).clamp(max=largest(fp8_dtype))
    )
    above = torch.searchsorted(values, size.contiguous())
    below = (above - 1).clamp(min=0)
    to_above, to_below = values[above] - size, size - values[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    byte = torch.where(up, above, below)
    byte = torch.where(x.isinf(), 124 if fp8_dtype == E5M2 else 127, byte) + 128 * value.signbit()
    byte = torch.where(value.isnan(), 127, byte)  # a NaN in both formats
    return byte.to(torch.uint8).view(fp8_dtype)


def values_of(fp8_dtype: torch.dtype) -> Tensor:
    """The value of each of the 256 bytes, float64, from the definition of the format."""
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
    encode = torch.tensor([0.73], dtype=FP32, device="cpu")
    for start in (None, ops.NO_DATA, 0.5, 1e6, torch.nan):
        for number, name, x, align in matrices(cases):
            fp8_dtype = FP8_DTYPES[number % 2]
            cases.begin(f"{name} {format_of(fp8_dtype)} slot {start}")
            x = with_infinities(x) if number % 2 else x
            there, x_cpu = laid_out(x, number, cases.device)
            slot, slot_cpu = _slots(start, cases.device)
            options = (fp8_dtype, (-1, -1), "encode", 0.0, align, True, True)
            last = encode.to(cases.device), None, None, slot
            got = ops.cast_op(*given(there), *options, True, *last)
            want = _cast(*given(x_cpu), *options, False, encode, slot=slot_cpu)
            cases.same((got[0], got[3]), (want[0], want[3]))
            compare_sums(cases, got[5], x_cpu)
            if slot is not None and slot_cpu is not None:
                cases.same(slot, slot_cpu)


_MANY_SHAPES = ((63, 1500), (128, 128), (0, 64), (272, 1040), (33, 0), (1, 1), (9, 1), (256, 512))


@checks("casts", REFERENCE + ", of each matrix alone", "cast_many_op")
def _check_many(cases: Cases) -> None:
    for number, (recipe, (block, rule, eps)) in enumerate(RECIPES.items()):
        fp8_dtype, dtype = FP8_DTYPES[number % 2], HIGH_PRECISION_DTYPES[number % 3]
        on_cpu = [cases.matrix(shape, dtype) for shape in _MANY_SHAPES]
        on_cpu = [with_infinities(x) if index % 2 else x for index, x in enumerate(on_cpu)]
        there = [x.to(cases.device) for x in on_cpu]
        want = [reference.quantize(x, fp8_dtype, block, rule, eps, 1) for x in on_cpu]
        stored = [[torch.zeros_like(t, device=cases.device) for t in expected] for expected in want]
        q, scale, amax = ([expected[i] for expected in stored] for i in range(3))
        cases.begin(f"quantize {len(on_cpu)} of {name_of(dtype)} {format_of(fp8_dtype)} {recipe}")
        ops.cast_many_op(there, q, block, rule, eps, scale, amax, [])
        for got_one, want_one in zip(stored, want, strict=True):
            cases.same(got_one, want_one)
        cases.begin(f"cast {len(on_cpu)} of {name_of(dtype)} {format_of(fp8_dtype)} {recipe}")
        outputs = [torch.zeros_like(t) for t in q]
        encodes = [
            reference.factors_from_amax(expected, fp8_dtype, rule, eps)[1].to(cases.device)
            for _, _, expected in want
        ]
        ops.cast_many_op(there, outputs, block, "encode", 0.0, [], [], encodes)
        cases.same(outputs, [expected[0] for expected in want])


_TRANSPOSED = ((1, 1), (0, 64), (33, 0), (63, 130), (272, 1040))


@checks("casts", REFERENCE, "transpose_op")
def _check_transpose(cases: Cases) -> None:
    for shape in _TRANSPOSED:
        for layout, lay_out in LAYOUTS.items():
            if layout == "misaligned" and not shape[1]:
                continue
            for align, fp8_dtype in ((1, E4M3), (16, E5M2)):
                cases.begin(f"{shape[0]}x{shape[1]} {layout} align {align} {format_of(fp8_dtype)}")
                x_cpu = lay_out(cases.bytes(*shape))
                there = lay_out(x_cpu.to(cases.device)).view(fp8_dtype)
                event = None if align == 1 else torch.empty(0, device=cases.device)
                got = ops.transpose_op(there, align, event)
                want = reference.transpose(x_cpu.view(fp8_dtype), align)
                cases.same(got.view(torch.uint8), want.view(torch.uint8))


@checks("casts", _TABLE, "value_of_op", name="dequantize")
def _check_dequantize(cases: Cases) -> None:
    unit_scale = torch.ones(1, 1, dtype=FP32, device=cases.device)
    all_bytes = torch.arange(256, dtype=torch.uint8, device="cpu").view(16, 16)
    for fp8_dtype in FP8_DTYPES:
        cases.begin(f"every {format_of(fp8_dtype)}")
        got = ops.value_of_op(
            "dequantize", (all_bytes.view(fp8_dtype).to(cases.device), unit_scale), FP32, (-1, -1)
        )
        cases.same(got, values_of(fp8_dtype).view(16, 16).float())
        for index, (recipe, (block, _, _)) in enumerate(RECIPES.items()):
            dtype = HIGH_PRECISION_DTYPES[index % 3]
            layout, lay_out = list(LAYOUTS.items())[index % 4]
            cases.begin(f"300x500 {format_of(fp8_dtype)} {recipe} {name_of(dtype)} {layout}")
            q = cases.bytes(300, 500)
            scale = cases.normal(*scale_shape((300, 500), block)).exp()
            there = lay_out(q.to(cases.device)).view(fp8_dtype)
            event = torch.empty(0, device=cases.device) if index % 2 else None
            got = ops.value_of_op(
                "dequantize", (there, scale.to(cases.device)), dtype, block, event
            )
            cases.same(got, reference.dequantize(q.view(fp8_dtype), scale, block, dtype))
