"""Check every op on this machine, each against something else that says what it must give.

Bytes and scales are compared bit for bit with the reference on the CPU, and casts also with the
definition of the formats. What adds up in another order, or has an exponential, is compared with
float64 within a bound derived next to the check. On a CPU the ops *are* the reference: there a
comparison with it shows only that the op runs and gives the same again; the formats, norms,
products and attention are then what is compared with something else.

M rows, N rows of the other operand of a product, K columns or contraction.

Sources: FP8 formats, arXiv:2209.05433; probabilistic bounds of rounding errors, Higham and Mary,
SIAM J. Sci. Comput. 41(5), 2019 (by Hoeffding's inequality).
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
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
    Float8Spec,
    largest,
    scale_shape,
)
from float8lab.inspect.environment import (
    why_attention_is_emulated,
    why_casts_are_missing,
    why_gemm_is_emulated,
)
from float8lab.ops import reference
from float8lab.ops.reference import rotary
from float8lab.ops.reference.attention import P_SCALE

__all__ = ["CHECKS", "Check", "Report", "Row", "selfcheck"]

_SHOWN = 8
"""Failures of one row that are written out."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Row:
    """What came of one check, or of those of its cases that run in one way."""

    group: str
    name: str
    """The op."""
    against: str
    """What it is compared with."""
    status: str
    """``"passed"``, ``"emulated"`` (right, but not in FP8), ``"unsupported"`` or ``"failed"``."""
    cases: int
    worst: float | None
    """The largest error as a part of its bound; None where all is compared bit for bit."""
    reason: str
    """Why it is emulated or unsupported."""
    failures: list[str] = field(default_factory=list)
    """Each case that failed, and how."""


@dataclass(frozen=True)
class Report:
    """What ``selfcheck`` found; ``print`` it for a table."""

    device: str
    rows: list[Row]
    seconds: dict[str, float]
    """How long each check took."""
    verbose: bool = False

    @property
    def passed(self) -> bool:
        """Whether nothing failed; what this device lacks is no failure."""
        return not any(row.status == "failed" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """The same as dicts, lists, numbers and strings."""
        return {
            "device": self.device,
            "passed": self.passed,
            "seconds": self.seconds,
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        counts = Counter(row.status for row in self.rows)
        verdict = "passed" if self.passed else "FAILED"
        seconds = sum(self.seconds.values())
        lines = [
            f"float8lab selfcheck on {self.device}: {verdict}, "
            f"{sum(row.cases for row in self.rows)} cases in {seconds:.1f} s",
            ", ".join(f"{counts[s]} {s}" for s in ("passed", "emulated", "unsupported", "failed")),
        ]
        width = max((len(row.name) for row in self.rows), default=0)
        group = None
        for row in self.rows:
            if row.group != group:
                group = row.group
                lines += ["", group]
            lines += self._lines_of(row, width)
        return "\n".join(lines)

    def _lines_of(self, row: Row, width: int) -> list[str]:
        error = "bit for bit" if row.worst is None else f"{row.worst:.2g} of the bound"
        line = f"  {row.status:<11}  {row.name:<{width}}  {row.cases:>4} cases  {error}"
        lines = [line]
        if row.reason:
            lines.append(f"{'':15}{row.reason}")
        if self.verbose or row.status == "failed":
            lines.append(f"{'':15}against {row.against}")
        shown = row.failures if self.verbose else row.failures[:_SHOWN]
        lines += [f"{'':15}- {failure}" for failure in shown]
        if len(shown) < len(row.failures):
            lines.append(f"{'':15}- and {len(row.failures) - len(shown)} more")
        return lines


@dataclass
class _Tally:
    cases: int = 0
    worst: float | None = None
    failures: list[str] = field(default_factory=list)


class Cases:
    """What one check compares on one device, and the data that it compares it on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tallies: dict[str, _Tally] = {}
        """By why the cases are emulated; empty: they are not."""
        self.case = ""
        self._tally: _Tally | None = None
        self._generator = torch.Generator("cpu").manual_seed(0)  # the caller's stays as it is

    def begin(self, case: str, emulated: str = "") -> None:
        """Start a case; what is compared next belongs to it."""
        self.case = case
        self._tally = self.tallies.setdefault(emulated, _Tally())
        self._tally.cases += 1

    def fail(self, message: str) -> None:
        """Say what is wrong in this case."""
        tally = self._tally or self.tallies.setdefault("", _Tally())
        tally.failures.append(f"{self.case}: {message}" if self.case else message)

    def same(self, got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor]) -> None:
        """Equal bits and strides; but 0 is -0 outside FP8, and every NaN is the same."""
        got = [got] if isinstance(got, Tensor) else got
        want = [want] if isinstance(want, Tensor) else want
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            problem = _difference(one, other)
            if problem:
                self.fail(f"output {number}: {problem}" if len(got) > 1 else problem)
                return

    def within(self, got: Tensor, exact: Tensor, bound: Tensor | float) -> None:
        """No further from ``exact``, float64, than ``bound``; NaN and inf where that has them."""
        assert self._tally is not None
        exact, got = exact.cpu(), got.detach().cpu().double()
        if got.shape != exact.shape:
            self.fail(f"shape {tuple(got.shape)}, not {tuple(exact.shape)}")
            return
        error = torch.where(got == exact, 0.0, (got - exact).abs())
        error = torch.where(got.isnan() & exact.isnan(), 0.0, error)
        limit = torch.as_tensor(bound, dtype=torch.float64, device="cpu").expand(exact.shape)
        ratio = torch.where(error == 0, 0.0, error / limit).nan_to_num(nan=torch.inf)
        worst = ratio.max().item() if ratio.numel() else 0.0
        self._tally.worst = max(worst, self._tally.worst or 0.0)
        if worst > 1:
            at = _first(ratio == worst)
            self.fail(
                f"{int((ratio > 1).sum())} of {ratio.numel()} elements off by more than the bound; "
                f"at {at} got {got[at].item():.9g}, exact is {exact[at].item():.9g}, "
                f"bound {limit[at].item():.3g}"
            )

    # Data: made on the CPU, so that every device sees the same.

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers, float32, on the CPU."""
        return torch.randn(shape, generator=self._generator, dtype=FP32, device="cpu")

    def uniform(self, *shape: int) -> Tensor:
        """Uniform numbers from 0 to 1, likewise."""
        return torch.rand(shape, generator=self._generator, dtype=FP32, device="cpu")

    def bytes(self, *shape: int) -> Tensor:
        """Random uint8, likewise."""
        return torch.randint(256, shape, generator=self._generator, dtype=torch.uint8, device="cpu")

    def matrix(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Columns of many magnitudes, and a row and a column of zeros, likewise."""
        x = self.normal(*shape)
        if x.numel() > 1:
            x *= torch.logspace(-3, 3, shape[1], dtype=FP32, device="cpu")
            x[shape[0] // 2], x[:, shape[1] // 2] = 0, 0
        return x.to(dtype)


def _difference(got: Tensor, want: Tensor) -> str:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    # Strides of a dimension of 1 mean nothing, those of an empty tensor neither.
    if got.stride() != want.stride() and 1 not in got.shape and got.numel():
        return f"strides {got.stride()}, not {want.stride()}"
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.dtype in FP8_DTYPES:
        equal = got.view(torch.uint8) == want.view(torch.uint8)
    else:
        equal = got == want
    equal |= got.float().isnan() & want.float().isnan()
    if bool(equal.all()):
        return ""
    at = _first(~equal)
    return (
        f"{int((~equal).sum())} of {equal.numel()} elements differ; "
        f"at {at} got {got.float()[at].item():.9g}, not {want.float()[at].item():.9g}"
    )


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


@dataclass(frozen=True)
class Check:
    """One check: of which ops, against what."""

    group: str
    name: str
    ops: tuple[str, ...]
    """Names in ``float8lab.ops`` that it calls and compares."""
    against: str
    run: Callable[[Cases], None]


CHECKS: list[Check] = []
"""All checks, in the order of the report."""


def _check(
    group: str, against: str, *names: str
) -> Callable[[Callable[[Cases], None]], Callable[[Cases], None]]:
    def add(run: Callable[[Cases], None]) -> Callable[[Cases], None]:
        name = ", ".join(one.removesuffix("_op") for one in names)
        CHECKS.append(Check(group, name, names, against, run))
        return run

    return add


def selfcheck(device: torch.device | str | None = None, verbose: bool = False) -> Report:
    """Check every op and GEMM path on this machine, in less than a minute.

    Args:
        device: ``"cpu"`` or a CUDA device; by default the current GPU, or the CPU without one.
        verbose: the printed report says what every op was compared with, and has all failures.

    Returns:
        A report: ``print`` it, ask ``.passed``, read ``.rows``. A failure is a row, no exception;
        what this device lacks is ``"unsupported"`` or ``"emulated"``, with the reason, no failure.

    Raises:
        RuntimeError: torch does not see the device.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"device must be one that torch sees; got {device}, and torch sees no CUDA GPU. "
            "Pass device='cpu', or see `python -m float8lab env`."
        )
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    on_device: AbstractContextManager[Any] = (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: threads wait for each other, up to 10 times
    try:
        with on_device, torch.no_grad(), torch.autocast(device.type, enabled=False):
            for check in CHECKS:
                start = time.perf_counter()
                rows += _rows_of(check, device)
                seconds[check.name] = round(time.perf_counter() - start, 3)
    finally:
        torch.set_num_threads(threads)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return Report(f"{device} ({name})" if name else str(device), rows, seconds, verbose)


def _rows_of(check: Check, device: torch.device) -> list[Row]:
    cases, lacking = Cases(device), ""
    try:
        check.run(cases)
    except Exception as error:  # of any kind: the other checks have something to say, too
        lacking = why_casts_are_missing(device)
        cases.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    rows = []
    for why, tally in cases.tallies.items():
        status = "failed" if tally.failures else "emulated" if why else "passed"
        if tally.failures and lacking:
            status, why = "unsupported", lacking
        rows.append(
            Row(
                check.group,
                check.name,
                check.against,
                status,
                tally.cases,
                tally.worst,
                why,
                tally.failures,
            )
        )
    return rows


# The grid. Every combination of dtype, format, block and divisibility by 16 is a kernel to compile
# on a GPU, a fifth of a second or more, so that they take turns where tests have them all.

_RECIPES: dict[str, tuple[tuple[int, int], str, float]] = {
    "per tensor": ((-1, -1), "fp32", 0.0),
    "per tensor pow2 eps": ((-1, -1), "pow2", 0.1),
    "per row": ((1, -1), "fp32", 0.0),
    "1x128": ((1, 128), "fp32", 0.0),
    "128x128": ((128, 128), "pow2", 0.0),
    "1x32 e8m0": ((1, 32), "e8m0", 0.0),
    "16x64": ((16, 64), "fp32", 0.0),
    "1x96": ((1, 96), "fp32", 0.0),
    "5 rows": ((5, -1), "pow2", 0.0),
}
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "misaligned": lambda x: torch.cat((x[:, :1], x), dim=1)[:, 1:],
}
_SHAPES = (
    ((272, 1040), BF16, "contiguous", 16),
    ((63, 130), FP32, "transposed", 1),
    ((63, 130), FP16, "every second", 16),
    ((63, 130), BF16, "misaligned", 16),
    ((1, 1), FP32, "contiguous", 1),
    ((0, 64), BF16, "contiguous", 16),
    ((33, 0), FP32, "contiguous", 1),
)
_SPECIAL = {
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "inf": [torch.inf, -torch.inf, 1.0, 500.0],
    "NaN": [torch.nan, -torch.nan, 1.0, 0.0],
    "subnormal": [2.0**-149, -(2.0**-140), 0.0, 2.0**-127],
    "small": [2.0**-120, 2.0**-126, 2.0**-121, -(2.0**-130)],
    "amax whose encode factor overflows": [2.0**-128, 2.0**-129, 2.0**-149, 0.0],
    "amax at the least e8m0": [448 * 2.0**-126, 448 * 2.0**-127, 1e-44, 0.0],
    "largest": [3.4028234663852886e38, -3.4e38, 1e38, 1.0],
    "edge of e4m3": [448.0, 464.0, 463.9, -479.0],
    "edge of e5m2": [57344.0, 61440.0, -61439.0, 65504.0],
    "halfway": [448.0, 1.0625, 1.1875, 17.0],
}


def _matrices(cases: Cases, turn: int | None = None) -> Iterator[tuple[int, str, Tensor, int]]:
    """Number in ``_SHAPES``, what it is called, the matrix on the CPU, the alignment asked for.

    All, or those of one turn: the first, one of those that take turns, and the empty ones.
    """
    for number, (shape, dtype, layout, align) in enumerate(_SHAPES):
        if turn is None or number in (0, 1 + turn % 4) or 0 in shape:
            name = f"{shape[0]}x{shape[1]} {_name(dtype)} {layout} align {align}"
            yield number, name, cases.matrix(shape, dtype), align


def _special() -> Iterator[tuple[str, Tensor]]:
    for name, values in _SPECIAL.items():
        yield name, torch.tensor(values, dtype=FP32, device="cpu").repeat(3, 40)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _format(fp8_dtype: torch.dtype) -> str:
    return "e4m3" if fp8_dtype == E4M3 else "e5m2"


def _laid_out(x: Tensor, number: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """``x`` in its layout of ``_SHAPES``, on the device and on the CPU."""
    layout = _LAYOUTS[_SHAPES[number][2]]
    return layout(x.to(device)), layout(x)


def _quantize_cases(
    cases: Cases,
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """Begin each case of the grid: the matrix there and on the CPU, and how to quantize it."""
    for turn, (recipe, how) in enumerate(_RECIPES.items()):
        for number, name, x, align in _matrices(cases, turn):
            fp8_dtype = FP8_DTYPES[(turn + number) % 2]
            cases.begin(f"{name} {_format(fp8_dtype)} {recipe}")
            yield *_laid_out(x, number, cases.device), (fp8_dtype, *how, align)
        for name, x in _special():
            cases.begin(f"{name} e4m3 {recipe}")
            yield x.to(cases.device), x, (E4M3, *how, 16)


_REFERENCE = "the reference on the CPU, bit for bit"


@_check("casts", _REFERENCE, "amax_op")
def _check_amax(cases: Cases) -> None:
    for block in ((-1, -1), (1, -1), (1, 128)):
        for number, name, x, _ in _matrices(cases):
            cases.begin(f"{name} {_granularity(block)}")
            there, here = _laid_out(x, number, cases.device)
            cases.same(ops.amax_op(there, block), reference.amax(here, block))
        for name, x in _special():
            cases.begin(f"{name} {_granularity(block)}")
            cases.same(ops.amax_op(x.to(cases.device), block), reference.amax(x, block))


@_check("casts", _REFERENCE, "quantize_op")
def _check_quantize(cases: Cases) -> None:
    for there, here, how in _quantize_cases(cases):
        cases.same(ops.quantize_op(there, *how), reference.quantize(here, *how))


@_check("casts", f"{_REFERENCE}; column sums: float64", "quantize_pair_op")
def _check_quantize_pair(cases: Cases) -> None:
    for there, here, how in _quantize_cases(cases):
        summed = bool((here.double().abs().sum(0) < FLOAT32_MAX).all())
        *got, sums = ops.quantize_pair_op(there, *how, summed)
        fp8_dtype, block, rule, eps, align = how
        want = reference.quantize_pair(here, fp8_dtype, block, rule, eps, align, False)
        cases.same(got, want[:4])
        _compare_sums(cases, sums, here if summed else here[:, :0])


def _compare_sums(cases: Cases, got: Tensor, x: Tensor) -> None:
    """M terms added up in float32 in any order: each goes through at most M roundings."""
    wide = x.double()
    bound = wide.abs().sum(0) * (2.0**-24 * max(x.shape[0], 1))
    cases.within(got, wide.sum(0), bound)


_TABLE = "the definition of the formats and " + _REFERENCE


@_check("casts", _TABLE, "cast_op", "cast_unrecorded_op")
def _check_cast(cases: Cases) -> None:
    for dtype in (FP16, BF16):  # every value of 16 bits, and so every halfway case
        x = torch.arange(2**16, dtype=torch.int32, device="cpu").to(torch.int16).view(dtype)
        x = x.view(256, 256)
        for fp8_dtype in FP8_DTYPES:
            for factor in (1.0, 0.37, 2.0**-7):
                cases.begin(f"every {_name(dtype)} to {_format(fp8_dtype)} scale {factor:g}")
                scale = torch.tensor([factor], dtype=FP32, device="cpu")
                got = ops.cast_op(
                    x.to(cases.device), scale.to(cases.device), None, fp8_dtype, (-1, -1), 1
                )
                cases.same(got, _nearest(x.float() * scale.reciprocal(), fp8_dtype))
    for fp8_dtype in FP8_DTYPES:
        for name, x in _special():
            for factor in (1.0, 0.0, 2.0**-149, 2.0**-127, torch.inf, torch.nan, 3e38):
                cases.begin(f"{name} to {_format(fp8_dtype)} scale {factor:g}")
                scale = torch.tensor([factor], dtype=FP32, device="cpu")
                arguments = (fp8_dtype, (-1, -1), 1)
                there, scale_there = x.to(cases.device), scale.to(cases.device)
                got = ops.cast_unrecorded_op(there, scale_there, *arguments)
                cases.same(got, reference.cast(x, scale, None, *arguments))
    for turn, (block, rule, _) in enumerate(_RECIPES.values()):
        for number, name, x, align in _matrices(cases, turn):
            fp8_dtype = FP8_DTYPES[number % 2]
            cases.begin(f"{name} {_format(fp8_dtype)} {_granularity(block)} {rule}")
            there, here = _laid_out(x, number, cases.device)
            shape = tuple(reference.round_up(size, align) for size in x.shape)
            scale = cases.uniform(*scale_shape(shape, block)) + 0.1
            for start in (None, ops.NO_DATA, 0.5, 1e6):
                if start is not None and block != (-1, -1):
                    break
                slots = _slots(start, cases.device)
                arguments = (fp8_dtype, block, align)
                got = ops.cast_op(there, scale.to(cases.device), slots[0], *arguments)
                cases.same(got, reference.cast(here, scale, slots[1], *arguments))
                if slots[0] is not None and slots[1] is not None:
                    cases.same(slots[0], slots[1])


def _slots(start: float | None, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Two amax slots, on the device and on the CPU."""
    if start is None:
        return None, None
    slot = torch.tensor([start], dtype=FP32, device="cpu")
    return slot.to(device, copy=True), slot


def _nearest(x: Tensor, fp8_dtype: torch.dtype) -> Tensor:
    """``x``, float32 on the CPU, clamped and rounded to nearest even, by search among the values.

    Of two neighbours the even one is that whose byte is even.
    """
    values = _values(fp8_dtype)[:128]
    values = values[values <= largest(fp8_dtype)]
    size = x.double().abs().nan_to_num(nan=0.0, posinf=FLOAT32_MAX).clamp(max=largest(fp8_dtype))
    above = torch.searchsorted(values, size.contiguous())
    below = (above - 1).clamp(min=0)
    to_above, to_below = values[above] - size, size - values[below]
    up = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    byte = torch.where(up, above, below) + 128 * x.signbit()
    byte = torch.where(x.isnan(), 127, byte)  # a NaN in both formats
    return byte.to(torch.uint8).view(fp8_dtype)


def _values(fp8_dtype: torch.dtype) -> Tensor:
    """What each of the 256 bytes stands for, float64, from the definition of the format."""
    mantissa, bias = (3, 7) if fp8_dtype == E4M3 else (2, 15)
    byte = torch.arange(128, dtype=torch.int64, device="cpu")
    exponent, fraction = byte >> mantissa, (byte & (2**mantissa - 1)).double() / 2**mantissa
    value = (fraction + (exponent > 0)) * 2.0 ** (exponent.clamp(min=1) - bias).double()
    if fp8_dtype == E4M3:
        value[127] = torch.nan
    else:
        value[124], value[125:] = torch.inf, torch.nan
    return torch.cat((value, -value))


@_check("casts", f"{_REFERENCE}; column sums: float64", "cast_pair_op")
def _check_cast_pair(cases: Cases) -> None:
    scale = torch.tensor([0.73], dtype=FP32, device="cpu")
    for start in (None, ops.NO_DATA, 0.5, 1e6, torch.nan):
        for number, name, x, align in _matrices(cases):
            fp8_dtype = FP8_DTYPES[number % 2]
            cases.begin(f"{name} {_format(fp8_dtype)} slot {start}")
            there, here = _laid_out(x, number, cases.device)
            slot, wanted = _slots(start, cases.device)
            arguments = (fp8_dtype, align)
            *got, sums = ops.cast_pair_op(there, scale.to(cases.device), slot, *arguments, True)
            cases.same(got, reference.cast_pair(here, scale, wanted, *arguments, False)[:2])
            _compare_sums(cases, sums, here)
            if slot is not None and wanted is not None:
                cases.same(slot, wanted)


_MANY_SHAPES = ((63, 1500), (128, 128), (0, 64), (272, 1040), (33, 0), (1, 1), (9, 1), (256, 512))


@_check("casts", _REFERENCE + ", of each matrix alone", "quantize_many_op", "cast_many_op")
def _check_many(cases: Cases) -> None:
    for number, (recipe, (block, rule, eps)) in enumerate(_RECIPES.items()):
        fp8_dtype, dtype = FP8_DTYPES[number % 2], HIGH_PRECISION_DTYPES[number % 3]
        here = [cases.matrix(shape, dtype) for shape in _MANY_SHAPES]
        there = [x.to(cases.device) for x in here]
        want = [reference.quantize(x, fp8_dtype, block, rule, eps, 1) for x in here]
        stored = [[torch.zeros_like(t, device=cases.device) for t in one] for one in want]
        q, scale, amax = ([one[i] for one in stored] for i in range(3))
        cases.begin(f"quantize {len(here)} of {_name(dtype)} {_format(fp8_dtype)} {recipe}")
        ops.quantize_many_op(there, q, scale, amax, block, rule, eps)
        for got_one, want_one in zip(stored, want, strict=True):
            cases.same(got_one, want_one)
        cases.begin(f"cast {len(here)} of {_name(dtype)} {_format(fp8_dtype)} {recipe}")
        again = [torch.zeros_like(t) for t in q]
        ops.cast_many_op(there, [one[1].to(cases.device) for one in want], again, block)
        cases.same(again, [one[0] for one in want])


@_check("casts", _REFERENCE, "transpose_op")
def _check_transpose(cases: Cases) -> None:
    for shape in ((1, 1), (0, 64), (33, 0), (63, 130), (272, 1040)):
        for layout, lay_out in _LAYOUTS.items():
            if layout == "misaligned" and not shape[1]:
                continue
            for align, fp8_dtype in ((1, E4M3), (16, E5M2)):
                cases.begin(f"{shape[0]}x{shape[1]} {layout} align {align} {_format(fp8_dtype)}")
                here = lay_out(cases.bytes(*shape))
                got = ops.transpose_op(lay_out(here.to(cases.device)).view(fp8_dtype), align)
                want = reference.transpose(here.view(fp8_dtype), align)
                cases.same(got.view(torch.uint8), want.view(torch.uint8))


@_check("casts", _TABLE, "dequantize_op")
def _check_dequantize(cases: Cases) -> None:
    one = torch.ones(1, 1, dtype=FP32, device=cases.device)
    every = torch.arange(256, dtype=torch.uint8, device="cpu").view(16, 16)
    for fp8_dtype in FP8_DTYPES:
        cases.begin(f"every {_format(fp8_dtype)}")
        got = ops.dequantize_op(every.view(fp8_dtype).to(cases.device), one, (-1, -1), FP32)
        cases.same(got, _values(fp8_dtype).view(16, 16).float())
        for turn, (recipe, (block, _, _)) in enumerate(_RECIPES.items()):
            dtype = HIGH_PRECISION_DTYPES[turn % 3]
            layout, lay_out = list(_LAYOUTS.items())[turn % 4]
            cases.begin(f"300x500 {_format(fp8_dtype)} {recipe} {_name(dtype)} {layout}")
            q = cases.bytes(300, 500)
            scale = cases.normal(*scale_shape((300, 500), block)).exp()
            there = lay_out(q.to(cases.device)).view(fp8_dtype)
            got = ops.dequantize_op(there, scale.to(cases.device), block, dtype)
            cases.same(got, reference.dequantize(q.view(fp8_dtype), scale, block, dtype))


def _granularity(block: Sequence[int]) -> str:
    return Float8Spec(block=tuple(block)).granularity


# Sources: casts of what is computed on the way.

_NORMS = ("layer_norm", "rms_norm")
_KINDS = (*_NORMS, *reference.ACTIVATIONS, *(f"{name}_backward" for name in reference.ACTIVATIONS))
_SOME_KINDS = (
    ("layer_norm", BF16),
    ("rms_norm", FP32),
    ("swiglu", BF16),
    ("gelu_backward", FP32),
    ("geglu_backward", BF16),
)
"""Every way in which the kernels load a source."""
_SOURCE_SHAPES = ((63, 130), (300, 512), (0, 64))


def _source(cases: Cases, kind: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """A source of about this shape; gradients of gated activations have an even width."""
    rows, columns = shape

    def matrix(width: int) -> Tensor:
        return (cases.normal(rows, width) * 3).to(dtype)

    if kind in _NORMS:
        more = [cases.normal(rows), cases.normal(columns)] if kind == "layer_norm" else []
        return [matrix(columns), cases.uniform(rows) + 0.5, cases.normal(columns), *more]
    name = kind.removesuffix("_backward")
    gated = reference.ACTIVATIONS[name][1]
    if kind == name:
        return [matrix(2 * columns if gated else columns)]
    half = (columns + 1) // 2
    return [matrix(2 * half), matrix(half)] if gated else [matrix(columns), matrix(columns)]


@_check(
    "sources",
    "the reference on the CPU: bit for bit, or where there is an exponential, float64",
    "value_of_op",
)
def _check_value_of(cases: Cases) -> None:
    """An exponential is off by 2**-22, ``ex2.approx`` of the PTX manual, and by the rounding of its
    argument of up to 2**7, 2**-17; the reciprocal by 2**-23; then there is one rounding."""
    for turn, kind in enumerate(_KINDS):
        function = reference.ACTIVATIONS.get(kind.removesuffix("_backward"), ("norm", False))[0]
        for shape in (_SOURCE_SHAPES[turn % 2], _SOURCE_SHAPES[2]):
            dtype = (BF16, FP32)[turn // 2 % 2]
            cases.begin(f"{kind} {shape[0]}x{shape[1]} {_name(dtype)}")
            inputs = _source(cases, kind, shape, dtype)
            got = ops.value_of_op(kind, _to(cases, inputs), dtype)
            if function in ("norm", "relu", "srelu"):
                cases.same(got, reference.value_of(kind, inputs, dtype))
                continue
            size = math.prod(max(_largest_of(one), 1.0) for one in inputs)
            exact = reference.value_of(kind, [one.double() for one in inputs], torch.float64)
            bound = exact.abs() * (torch.finfo(dtype).eps + 2.0**-16) + 2.0**-20 * size
            cases.within(got, exact, bound)


def _largest_of(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _to(cases: Cases, tensors: Iterable[Tensor]) -> list[Tensor]:
    return [one.to(cases.device) for one in tensors]


_COMPOSED = "the op of the written values, both on this device, bit for bit"


def _sources(
    cases: Cases,
) -> Iterator[tuple[str, list[Tensor], torch.dtype, Tensor, torch.dtype, int]]:
    """Begin each case: kind, inputs and values on the device, dtype, format and alignment."""
    for kind, dtype in _SOME_KINDS:
        for number, shape in enumerate(_SOURCE_SHAPES):
            fp8_dtype, align = FP8_DTYPES[number % 2], (1, 16)[number % 2]
            cases.begin(f"{kind} {shape[0]}x{shape[1]} {_name(dtype)} {_format(fp8_dtype)}")
            inputs = _to(cases, _source(cases, kind, shape, dtype))
            yield kind, inputs, dtype, ops.value_of_op(kind, inputs, dtype), fp8_dtype, align


@_check("sources", _COMPOSED, "amax_of_op")
def _check_amax_of(cases: Cases) -> None:
    for kind, inputs, dtype, value, _, _ in _sources(cases):
        cases.same(ops.amax_of_op(kind, inputs, dtype), ops.amax_op(value, (-1, -1)))


@_check("sources", _COMPOSED, "cast_of_op", "cast_of_unrecorded_op")
def _check_cast_of(cases: Cases) -> None:
    scale = torch.tensor([0.037], dtype=FP32, device=cases.device)
    for kind, inputs, dtype, value, fp8_dtype, align in _sources(cases):
        for transposed in (False, True):
            slot, wanted = (torch.full_like(scale, ops.NO_DATA) for _ in range(2))
            how = (kind, inputs, dtype, transposed, scale)
            got = ops.cast_of_op(*how, slot, fp8_dtype, align)
            oriented = value.t() if transposed else value
            want = ops.cast_op(oriented, scale, wanted, fp8_dtype, (-1, -1), align)
            cases.same((got, slot), (want, wanted))
            cases.same(ops.cast_of_unrecorded_op(*how, fp8_dtype, align), want)


@_check("sources", f"{_COMPOSED}; column sums: float64", "cast_pair_of_op")
def _check_cast_pair_of(cases: Cases) -> None:
    scale = torch.tensor([0.037], dtype=FP32, device=cases.device)
    for kind, inputs, dtype, value, fp8_dtype, align in _sources(cases):
        how = (scale, None, fp8_dtype, align, True)
        *got, sums = ops.cast_pair_of_op(kind, inputs, dtype, *how)
        cases.same(got, ops.cast_pair_op(value, *how)[:2])
        _compare_sums(cases, sums, value.cpu())


_SOURCE_RECIPES = ("per tensor", "per row", "1x128", "128x128", "1x32 e8m0")


@_check("sources", _COMPOSED, "quantize_of_op")
def _check_quantize_of(cases: Cases) -> None:
    for turn, (kind, inputs, dtype, value, fp8_dtype, align) in enumerate(_sources(cases)):
        recipe = _SOURCE_RECIPES[turn % len(_SOURCE_RECIPES)]
        how = (fp8_dtype, *_RECIPES[recipe], align)
        for transposed in (False, True):
            got = ops.quantize_of_op(kind, inputs, dtype, transposed, None, *how)
            cases.same(got, ops.quantize_op(value.t() if transposed else value, *how)[:2])
        if recipe == "per tensor":
            amax = ops.amax_of_op(kind, inputs, dtype)
            again = ops.quantize_of_op(kind, inputs, dtype, True, amax, *how)
            cases.same(again, got)


@_check("sources", f"{_COMPOSED}; column sums: float64", "quantize_pair_of_op")
def _check_quantize_pair_of(cases: Cases) -> None:
    for turn, (kind, inputs, dtype, value, fp8_dtype, align) in enumerate(_sources(cases)):
        recipe = _SOURCE_RECIPES[turn % len(_SOURCE_RECIPES)]
        how = (fp8_dtype, *_RECIPES[recipe], align)
        *got, sums = ops.quantize_pair_of_op(kind, inputs, dtype, *how, True)
        cases.same(got, ops.quantize_pair_op(value, *how, False)[:4])
        _compare_sums(cases, sums, value.cpu())


# Norms.

_NORM_SHAPES = ((70, 512), (5, 33), (3, 9001), (1, 1), (0, 8))
_EPS = 1e-5


def _norms(
    cases: Cases,
) -> Iterator[tuple[bool, torch.dtype, Tensor, Tensor, Tensor | None]]:
    """Begin each case: center, dtype, x (float32), weight and bias, all on the CPU."""
    for center in (True, False):
        for number, shape in enumerate(_NORM_SHAPES):
            dtype = HIGH_PRECISION_DTYPES[number % 3]
            cases.begin(f"{_NORMS[not center]} {shape[0]}x{shape[1]} {_name(dtype)}")
            x, weight = cases.normal(*shape) * 3 + 1, cases.normal(shape[1])
            yield center, dtype, x, weight, cases.normal(shape[1]) if center else None


@_check(
    "norms",
    "statistics: float64; given these, values and amax: bit for bit",
    "norm_op",
    "norm_stats_op",
)
def _check_norm(cases: Cases) -> None:
    for center, dtype, wide, weight, bias in _norms(cases):
        x = wide.to(dtype)
        x_there, weight_there, bias_there = _optional_to(cases, x, weight, bias)
        arguments = (x_there, weight_there, bias_there, _EPS, center, dtype)
        y, mean, rstd = ops.norm_op(*arguments)
        _compare_norm(cases, (y, mean, rstd), x, weight, bias)
        *stats, amax = ops.norm_stats_op(*arguments, True)
        cases.same(stats, (mean, rstd))
        cases.same(amax, ops.amax_op(y, (-1, -1)))


@_check(
    "norms",
    "statistics: float64 of the dequantized; given these, values: bit for bit",
    "fp8_norm_op",
)
def _check_fp8_norm(cases: Cases) -> None:
    for q, scale, block, dtype, weight, bias in _fp8_norms(cases):
        operands = _to(cases, (q, scale))
        _, weight_there, bias_there = _optional_to(cases, q, weight, bias)
        got = ops.fp8_norm_op(
            *operands, block, weight_there, bias_there, _EPS, bias is not None, dtype
        )
        value = reference.dequantize(q, scale, block, dtype)
        _compare_norm(cases, got, value, weight, bias)


def _fp8_norms(
    cases: Cases,
) -> Iterator[tuple[Tensor, Tensor, tuple[int, int], torch.dtype, Tensor, Tensor | None]]:
    blocks = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32))
    for number, (_, dtype, x, weight, bias) in enumerate(_norms(cases)):
        block = blocks[(number + number // 5) % 5]
        cases.case += f" {_granularity(block)}"
        q, scale, _ = reference.quantize(x, E4M3, block, "fp32", 0.0, 1)
        yield q, scale, block, dtype, weight, bias


def _optional_to(
    cases: Cases, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    there = None if bias is None else bias.to(cases.device)
    return x.to(cases.device), weight.to(cases.device), there


def _compare_norm(
    cases: Cases, got: Sequence[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None
) -> None:
    """Sums of K terms in float32 in the order of a tree: log2(K) + 1 roundings, less than 2**5; the
    variance is a sum of squares, each rounded thrice, and rstd half as far off as that."""
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


@_check("norms", "float64, given the statistics", "norm_backward_op")
def _check_norm_backward(cases: Cases) -> None:
    for center, dtype, wide, weight, bias in _norms(cases):
        x, dy = wide.to(dtype), cases.normal(*wide.shape).to(dtype)
        _, mean, rstd = reference.norm(x, weight, bias, _EPS, center, dtype)
        inputs = (dy, x, weight, mean, rstd)
        got = ops.norm_backward_op(*_to(cases, inputs), center)
        _compare_norm_backward(cases, got, inputs)


@_check("norms", "float64 of the dequantized, given the statistics", "fp8_norm_backward_op")
def _check_fp8_norm_backward(cases: Cases) -> None:
    for q, scale, block, dtype, weight, bias in _fp8_norms(cases):
        x, center = reference.dequantize(q, scale, block, dtype), bias is not None
        dy = cases.normal(*x.shape).to(dtype)
        _, mean, rstd = reference.norm(x, weight, bias, _EPS, center, dtype)
        there = _to(cases, (dy, q, scale, weight, mean, rstd))
        got = ops.fp8_norm_backward_op(*there[:3], block, *there[3:], center, dtype)
        _compare_norm_backward(cases, got, (dy, x, weight, mean, rstd))


def _compare_norm_backward(
    cases: Cases, got: Sequence[Tensor], inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
) -> None:
    """One rounding to the dtype, and of the terms of dx, which may cancel, 2**-16: their means are
    sums as in ``_compare_norm``. Sums over M rows go through at most M roundings of terms that are
    themselves rounded up to three times."""
    dx, dweight, dbias = got
    x = inputs[1]
    center = bool(inputs[3].numel()) or (dbias.numel() > 0)
    dy64, x64, weight64, mean64, rstd64 = (one.double() for one in inputs)
    want = reference.norm_backward(dy64, x64, weight64, mean64, rstd64, center)
    xhat = (x64 - (mean64[:, None] if center else 0)) * rstd64[:, None]
    terms = (dy64 * weight64).abs() * rstd64[:, None]
    along = terms.mean(1, keepdim=True) * (1 + xhat.abs()) ** 2
    bound = want[0].abs() * torch.finfo(x.dtype).eps + (terms + along) * 2.0**-16
    rows = max(x.shape[0], 1) * 2.0**-24
    cases.within(dx, want[0], bound)
    cases.within(dweight, want[1], (dy64 * xhat).abs().sum(0) * 8 * rows)
    if center:
        cases.within(dbias, want[2], dy64.abs().sum(0) * 2 * rows)


# Products.

_BLOCKS: tuple[tuple[int, int], ...] = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32))
_SURE = 7.0
"""Standard deviations, or what bounds them: a larger error has a probability of 2 exp(-7**2 / 2),
5e-11, by Hoeffding's inequality. It takes the place of the factor sqrt(K) of a certain bound."""

_GEMM_BOUND = (
    "dequantize and matmul in float64; bound: K float32 additions and, in FP8 or where bfloat16 "
    "emulates it, operands rounded to bfloat16"
)


class _Product:
    """``left @ right.mT`` in float64, and what its error is measured in."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.exact = left @ right.mT
        self.size = (left.square() @ right.square().mT).sqrt()
        """The root of the sum of the squared products: the error of a sum of terms that are each
        off at random is so large, and so are its partial sums where signs are random."""
        self.K = left.shape[-1]

    def within(
        self, cases: Cases, got: Tensor, bias: Tensor | None, out_dtype: torch.dtype, native: bool
    ) -> None:
        """Compare a result with the product, plus ``bias``, within what a right kernel may be off.

        A native product may be as far off as one of operands rounded to bfloat16, 2**-9 each: the
        products are exact, but Hopper adds 128 of them with about 13 bits, and then in float32. An
        emulated one in bfloat16 on a GPU has such operands, and partial sums in bfloat16.
        All others have float32 operands, or what ``float32_matmul_precision`` makes of these.
        """
        if got.dtype != out_dtype:
            cases.fail(f"output is {got.dtype}, not {out_dtype}")
        if native:
            operands = 2.0**-8
        elif out_dtype == BF16 and got.is_cuda:
            operands = 2.0**-8 + 2.0**-9
        else:
            bits = {"highest": 24, "high": 11, "medium": 9}[torch.get_float32_matmul_precision()]
            operands = 2 * 2.0**-bits
        additions = _SURE * 2.0**-24 * math.sqrt(max(self.K, 1))
        bound = self.size * (_SURE * (operands + additions))
        # Rounded once; on its way through a bias, which is rounded too, three times.
        rounding = torch.finfo(out_dtype).eps / 2
        exact = self.exact
        if bias is not None:
            bound = bound + rounding * (exact.abs() + bias.double().abs())
            exact = exact + bias.double()
        bound = bound * (1 + 2 * rounding) + rounding * exact.abs()
        smallest = torch.finfo(out_dtype).smallest_normal * torch.finfo(out_dtype).eps
        cases.within(got, exact, (bound + smallest).cpu())


class _Pair:
    """Two operands of a product, quantized on the CPU: as they are on the device."""

    def __init__(
        self,
        cases: Cases,
        left: Tensor,
        right: Tensor,
        blocks: tuple[tuple[int, int], tuple[int, int]],
        formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    ) -> None:
        self.cases, self.blocks = cases, blocks
        self.why = why_gemm_is_emulated(*blocks, cases.device, *formats)
        self.operands: list[tuple[Tensor, Tensor]] = []
        wide = []
        for x, block, fp8_dtype in zip((left, right), blocks, formats, strict=True):
            q, scale, _ = reference.quantize(x, fp8_dtype, block, "fp32", 0.0, 1)
            self.operands.append((q.to(cases.device), scale.to(cases.device)))  # strides stay
            wide.append(reference.dequantize(q, scale, block, torch.float64).to(cases.device))
        self.product = _Product(*wide)
        kinds = (
            f"{_format(one)} {_granularity(block)}"
            for one, block in zip(formats, blocks, strict=True)
        )
        self.name = f"{left.shape[0]}x{right.shape[0]}x{left.shape[1]} {' by '.join(kinds)}"

    def compare(
        self,
        out_dtype: torch.dtype,
        case: str = "",
        bias: Tensor | None = None,
        fast_accum: bool = False,
        arrange: Callable[[Tensor], Tensor] = lambda q: q,
    ) -> None:
        """Begin a case, multiply and compare."""
        more = (_name(out_dtype), "bias" * (bias is not None), "fast_accum" * fast_accum, case)
        self.cases.begin(" ".join(filter(None, (self.name, *more))), self.why)
        bias = None if bias is None else bias.to(self.cases.device)
        (a, a_scale), (b, b_scale) = self.operands
        a_block, b_block = self.blocks
        got = ops.scaled_mm_op(
            arrange(a), a_scale, a_block, arrange(b), b_scale, b_block, bias, out_dtype, fast_accum
        )
        self.product.within(self.cases, got, bias, out_dtype, not self.why)


@_check("products", _GEMM_BOUND, "scaled_mm_op")
def _check_scaled_mm(cases: Cases) -> None:
    for blocks in itertools.product(_BLOCKS, _BLOCKS):
        for formats in itertools.product(FP8_DTYPES, FP8_DTYPES):
            pair = _Pair(cases, cases.normal(37, 250), cases.normal(50, 250), blocks, formats)
            for out_dtype in HIGH_PRECISION_DTYPES:
                for bias in (None, cases.normal(50)):
                    pair.compare(out_dtype, bias=bias)
        for fp8_dtype in FP8_DTYPES:
            left, right = cases.normal(64, 512), cases.normal(48, 512)
            pair = _Pair(cases, left, right, blocks, (fp8_dtype, E4M3))
            for out_dtype in HIGH_PRECISION_DTYPES:
                pair.compare(out_dtype, fast_accum=True)
        for M, N, K in _PRODUCT_SHAPES:
            pair = _Pair(cases, cases.normal(M, K), cases.normal(N, K), blocks)
            pair.compare(BF16, bias=cases.normal(N))
            pair.compare(FP32)
        # 1001 blocks of many magnitudes, the largest first, in the middle and last: a scale that is
        # read from the wrong place cannot hide.
        size = torch.exp2(cases.normal(1001) * 2)
        size[[0, 500, 1000]] = 64.0
        left = cases.normal(3, 1001 * 128) * size.repeat_interleave(128)
        pair = _Pair(cases, left, cases.normal(5, 1001 * 128), blocks)
        for out_dtype in (BF16, FP32):
            pair.compare(out_dtype, "1001 blocks of 128")
        pair = _Pair(cases, cases.normal(33, 272), cases.normal(48, 272), blocks)
        for name, arrange in (("misaligned", _misaligned), ("strided", _strided)):
            pair.compare(BF16, name, arrange=arrange)
        for name, special in _special_rows(cases).items():
            pair = _Pair(cases, special, cases.normal(20, 256), blocks)
            for out_dtype in (BF16, FP32):
                pair.compare(out_dtype, name)


_PRODUCT_SHAPES = ((1, 1, 1), (1, 64, 16), (0, 32, 64), (32, 0, 64), (5, 6, 0), (130, 33, 1152))


def _misaligned(q: Tensor) -> Tensor:
    """The same values, a byte off any alignment."""
    room = torch.zeros(q.numel() + 1, dtype=torch.uint8, device=q.device)[1:].view(q.shape)
    return room.copy_(q.view(torch.uint8)).view(q.dtype)


def _strided(q: Tensor) -> Tensor:
    """The same values, as columns of a wider matrix."""
    room = torch.zeros(q.shape[0], q.shape[1] + 31, dtype=torch.uint8, device=q.device)
    room = room[:, 7 : 7 + q.shape[1]]
    return room.copy_(q.view(torch.uint8)).view(q.dtype)


def _special_rows(cases: Cases) -> dict[str, Tensor]:
    rows = {
        "zeros": torch.zeros(4, 256, dtype=FP32, device="cpu"),
        "tiny": cases.normal(4, 256) * 2.0**-100,
        "all at the largest": cases.normal(4, 256).sign() * 448,
        "NaN in a row": cases.normal(4, 256),
        "an amax of 0 among others": cases.normal(4, 256),
    }
    rows["NaN in a row"][1, 7] = torch.nan
    rows["an amax of 0 among others"][1:3, :128] = 0
    return rows


@_check("products", _GEMM_BOUND, "scaled_bmm_op")
def _check_scaled_bmm(cases: Cases) -> None:
    for blocks in itertools.product(_BLOCKS, _BLOCKS):
        kinds = " by ".join(map(_granularity, blocks))
        why = why_gemm_is_emulated(*blocks, cases.device)
        for B, M, N, K in ((3, 37, 48, 144), (2, 1, 1, 1), (1, 5, 7, 300), (2, 3, 0, 16)):
            operands, wide = [], []
            for rows, block in zip((M, N), blocks, strict=True):
                parts = [
                    reference.quantize(cases.normal(rows, K), E4M3, block, "fp32", 0.0, 1)
                    for _ in range(B)
                ]
                q, scale = (torch.stack([part[i] for part in parts]) for i in (0, 1))
                each = [reference.dequantize(*part[:2], block, torch.float64) for part in parts]
                operands.append((q.to(cases.device), scale.to(cases.device)))
                wide.append(torch.stack(each).to(cases.device))
            product = _Product(*wide)
            (a, a_scale), (b, b_scale) = operands
            by_column = b.view(torch.uint8).mT.contiguous().mT.view(b.dtype)
            for out_dtype in HIGH_PRECISION_DTYPES:
                for name, q in (("", b), (" by column", by_column)):
                    cases.begin(f"{B}x{M}x{N}x{K}{name} {kinds} {_name(out_dtype)}", why)
                    got = ops.scaled_bmm_op(a, a_scale, blocks[0], q, b_scale, blocks[1], out_dtype)
                    product.within(cases, got, None, out_dtype, not why)


# Attention.  B batch, H heads, G key/value heads, S sequence, D head size.

_ATTENTION_SHAPES = (
    (2, 4, 2, 5, 7, 8, 6),
    (1, 2, 2, 200, 333, 64, 64),
    (2, 4, 2, 128, 128, 128, 128),
    (1, 2, 1, 70, 130, 23, 9),
    (1, 2, 2, 1, 77, 128, 128),
)
_MASKS = ("", "causal", "allowed", "bias", "dropout")


@dataclass(frozen=True)
class _Attention:
    """One case, on the device; all in float64 that is exact."""

    tensors: list[Tensor]
    scales: list[Tensor]
    masks: tuple[Tensor | None, Tensor | None, Tensor | None]
    settings: tuple[bool, float, float]
    why: str

    def wide(self) -> list[Tensor]:
        """q, k and v in float64."""
        pairs = zip(self.tensors, self.scales, strict=True)
        return [_values(x.dtype).to(x.device)[x.view(torch.uint8).long()] * s for x, s in pairs]


def _attentions(cases: Cases) -> Iterator[_Attention]:
    for turn, (B, H, G, SQ, SK, D, DV) in enumerate(_ATTENTION_SHAPES):
        for mask in _MASKS if SQ < 100 else _MASKS[:2]:
            fp8_dtype = FP8_DTYPES[turn % 2]
            sizes = (B, H, SQ, D), (B, G, SK, D), (B, G, SK, DV)
            tensors, scales = [], []
            for size in sizes:
                x = cases.normal(*size)
                q, scale, _ = reference.quantize(
                    x.view(-1, size[-1]), fp8_dtype, (-1, -1), "fp32", 0.0, 1
                )
                tensors.append(q.view(size).to(cases.device))
                scales.append(scale.to(cases.device))
            allowed = cases.uniform(B, 1, SQ, SK) < 0.5
            allowed[..., 0] = True
            bias = cases.normal(1, H, SQ, SK) if mask == "bias" else None
            keep = cases.uniform(B, H, SQ, SK) < 0.7 if mask == "dropout" else None
            masks = (bias, allowed if mask == "allowed" else None, keep)
            on_device = [None if one is None else one.to(cases.device) for one in masks]
            why = why_attention_is_emulated(cases.device, D, DV)
            if not why and any(one is not None for one in masks):
                why = "the kernel has no mask but the causal one, no bias and no dropout"
            cases.begin(f"{B}x{H}({G})x{SQ}x{SK}x{D}x{DV} {_format(fp8_dtype)} {mask}", why)
            settings = (mask in ("causal", "dropout"), D**-0.5, 0.3 if mask == "dropout" else 0.0)
            yield _Attention(
                tensors, scales, (on_device[0], on_device[1], on_device[2]), settings, why
            )


def _exact_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, case: _Attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, probabilities and scores in float64."""
    causal, scale, dropout = case.settings
    _, allowed, keep = case.masks
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    if bias is not None:
        scores = scores + bias
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    if causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    p = scores.softmax(-1)
    kept = p if keep is None else p * keep / (1 - dropout)
    return kept @ v.repeat_interleave(groups, 1), p, scores


@_check(
    "attention",
    "float64; error of probabilities rounded to e4m3, and of scores",
    "fp8_attention_op",
)
def _check_attention(cases: Cases) -> None:
    """A probability is rounded by 1/16 of it or, where e4m3 is subnormal, by half of its least step
    2**-9 times ``P_SCALE``. The tensor cores keep about 13 bits of a sum: what that does to scores,
    they do to the logarithm of the probabilities; they add up the output with as many."""
    for number, case in enumerate(_attentions(cases)):
        dtype = HIGH_PRECISION_DTYPES[number % 3]
        q, k, v = case.wide()
        bias = None if case.masks[0] is None else case.masks[0].double()
        expected, p, scores = _exact_attention(q, k, v, bias, case)
        _, scale, dropout = case.settings
        out, lse = ops.fp8_attention_op(
            *case.tensors, *case.scales, *case.masks, *case.settings, dtype
        )
        groups = q.shape[1] // k.shape[1]
        size = q.abs() @ k.abs().repeat_interleave(groups, 1).mT * scale
        off = size.amax(-1) * (0.0 if case.why else 2.0**-12)
        # In float32: sums of up to 2**7 terms, and a logarithm.
        off = off + (size.amax(-1) + 2) * 2.0**-17
        cases.within(lse, scores.logsumexp(-1), off)
        added = 0.0 if case.why else 2.0**-9
        rounding = p * (1 / 16 + 2 * off.unsqueeze(-1) + added) + 2.0**-10 * P_SCALE
        bound = rounding / (1 - dropout) @ v.abs().repeat_interleave(groups, 1)
        cases.within(out, expected, bound + expected.abs() * torch.finfo(dtype).eps)


@_check("attention", "autograd in float64, in the norm", "fp8_attention_backward_op")
def _check_attention_backward(cases: Cases) -> None:
    """In float32 the terms, before they cancel, are off by their roundings and by what scores of
    2**-17 off (see above) do to probabilities: less than 2**-16 of them. The kernel also rounds
    operands, probabilities and the gradient of the scores to 8 bits, 2**-9 each of the result."""
    for case in _attentions(cases):
        bias = case.masks[0]
        with torch.enable_grad():
            q, k, v = leaves = [x.requires_grad_() for x in case.wide()]
            bias64 = None if bias is None else bias.double().requires_grad_()
            expected, _, scores = _exact_attention(q, k, v, bias64, case)
            dout = cases.normal(*expected.shape).to(cases.device)
            wanted = [*leaves, *([] if bias64 is None else [bias64])]
            exact = torch.autograd.grad(expected, wanted, dout.double())
        out, lse = expected.detach().float(), scores.detach().logsumexp(-1).float()
        got = ops.fp8_attention_backward_op(
            dout,
            *case.tensors,
            *case.scales,
            *case.masks,
            out,
            lse,
            *case.settings,
            bias is not None,
        )
        terms = _gradient_terms(case, expected.detach(), scores.detach(), dout.double())
        for one, want, term in zip(got, exact, terms, strict=False):
            one = one.sum(0, keepdim=True) if one.shape != want.shape else one
            bound = 2.0**-16 * term.norm() + (0.0 if case.why else 2.0**-7) * want.norm()
            off = (one.double() - want).norm()
            cases.within(off, torch.zeros_like(off), bound.cpu())


def _gradient_terms(
    case: _Attention, out: Tensor, scores: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and the bias, had every term the same sign."""
    q, k, v = (x.detach().abs() for x in case.wide())
    _, scale, dropout = case.settings
    keep, G, p = case.masks[2], k.shape[1], scores.softmax(-1)
    k, v = (x.repeat_interleave(q.shape[1] // G, 1) for x in (k, v))
    factor = 1.0 if keep is None else keep / (1 - dropout)
    dout = dout.abs()
    ds = p * (dout @ v.mT * factor + (out.abs() * dout).sum(-1, keepdim=True))
    dk, dv = (x.unflatten(1, (G, -1)).sum(2) for x in (ds.mT @ q * scale, (p * factor).mT @ dout))
    return ds @ k * scale, dk, dv, ds.sum(0, keepdim=True)


@_check("attention", _REFERENCE, "rotate_op")
def _check_rotate(cases: Cases) -> None:
    for number, (A, B, H, D, R) in enumerate(((5, 3, 7, 128, 128), (1, 33, 1, 80, 32))):
        for interleaved in (False, True):
            for back in (False, True):
                dtype = HIGH_PRECISION_DTYPES[(number + interleaved + back) % 3]
                t = cases.normal(A, B, H, D).to(dtype)
                for shape in ((A, B, 1, R), (1, B, 1, R), (A, 1, 1, R)):
                    cases.begin(f"{A}x{B}x{H}x{D} {_name(dtype)} {shape} {interleaved} {back}")
                    inputs = (t, cases.normal(*shape), cases.normal(*shape))
                    got = ops.rotate_op(*_to(cases, inputs), interleaved, back)
                    cases.same(got, rotary.rotate(*inputs, interleaved, back))


@_check("delayed scaling", _REFERENCE, "update_scales_op")
def _check_update_scales(cases: Cases) -> None:
    special = torch.tensor([ops.NO_DATA, 0.0, torch.inf, torch.nan, 1e-40], device="cpu")
    for length, margin, interval in ((1, 0, 1), (2, 2, 3), (16, -1, 1), (1000, 0, 3)):
        for most_recent in (False, True):
            for power_of_2 in (False, True):
                cases.begin(
                    f"history {length} margin {margin} interval {interval} "
                    f"{'newest' if most_recent else 'max'}{' pow2' * power_of_2}"
                )
                amax = torch.cat((special, cases.uniform(9)))
                slots = amax.numel()
                state: Any = [
                    cases.uniform(length, slots) * 3,
                    amax,
                    cases.uniform(slots),
                    torch.arange(slots, dtype=torch.int32, device="cpu"),
                    torch.tensor([448.0, 57344.0] * slots, dtype=FP32, device="cpu")[:slots],
                ]
                there = [one.to(cases.device, copy=True) for one in state]
                for _ in range(3):
                    how: Any = (margin, interval, most_recent, power_of_2)
                    ops.update_scales_op(*there, *how)
                    reference.update_scales_(*state, *how)
                    cases.same(there, state)
                    state[1].copy_(cases.uniform(slots))
                    there[1].copy_(state[1])
