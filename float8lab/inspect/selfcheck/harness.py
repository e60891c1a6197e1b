"""Run checks: their cases, comparisons and results, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import FP8_DTYPES
from float8lab.inspect.environment import why_casts_are_missing

__all__ = [
    "BF16",
    "CHECKS",
    "FP16",
    "FP32",
    "Cases",
    "Check",
    "Report",
    "Row",
    "checks",
    "selfcheck",
]

_SHOWN = 8
"""Failures of one row that are written out."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Row:
    """The result of one check, or of those of its cases that run in one way."""

    group: str
    name: str
    """The op."""
    against: str
    """The reference that it is compared with."""
    status: str
    """``"passed"``, ``"emulated"`` (right, but not in FP8), ``"unsupported"`` or ``"failed"``."""
    cases: int
    worst: float | None
    """The largest error as a fraction of its bound; None where all is compared bit for bit."""
    reason: str
    """Why it is emulated or unsupported."""
    failures: list[str] = field(default_factory=list)
    """Each case that failed, and how."""


@dataclass(frozen=True)
class Report:
    """The result of ``selfcheck``; ``print`` it for a table."""

    device: str
    rows: list[Row]
    seconds: dict[str, float]
    """How long each check took."""
    verbose: bool = False

    @property
    def passed(self) -> bool:
        """Whether nothing failed; an op that this device lacks is no failure."""
        return not any(row.status == "failed" for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Return the same as dicts, lists, numbers and strings."""
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
    """The comparisons of one check on one device, and the data that they are made on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tallies: dict[str, _Tally] = {}
        """Results by the reason why cases are emulated, which is empty for those that are not."""
        self.case = ""
        self._tally: _Tally | None = None
        self._generator = torch.Generator("cpu").manual_seed(0)  # the caller's stays as it is

    def begin(self, case: str, emulated: str = "") -> None:
        """Start a case, to which the comparisons that follow belong."""
        self.case = case
        self._tally = self.tallies.setdefault(emulated, _Tally())
        self._tally.cases += 1

    def fail(self, message: str) -> None:
        """Record what is wrong in this case."""
        tally = self._tally or self.tallies.setdefault("", _Tally())
        tally.failures.append(f"{self.case}: {message}" if self.case else message)

    def same(self, got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor]) -> None:
        """Compare bits and strides; 0 is equal to -0 outside FP8, and every NaN to every other."""
        got = [got] if isinstance(got, Tensor) else got
        want = [want] if isinstance(want, Tensor) else want
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            problem = _difference(one, other)
            if problem:
                self.fail(f"output {number}: {problem}" if len(got) > 1 else problem)
                return

    def within(self, got: Tensor, exact: Tensor, bound: Tensor | float) -> None:
        """Check that ``got`` is within ``bound`` of ``exact``, float64; NaN and inf must agree."""
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
        """Uniform numbers from 0 to 1, float32, on the CPU."""
        return torch.rand(shape, generator=self._generator, dtype=FP32, device="cpu")

    def bytes(self, *shape: int) -> Tensor:
        """Random uint8 numbers on the CPU."""
        return torch.randint(256, shape, generator=self._generator, dtype=torch.uint8, device="cpu")

    def matrix(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """A matrix on the CPU, with columns of many magnitudes and a row and a column of zeros."""
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
    """One check: the ops that it calls, and the reference that it compares them with."""

    group: str
    name: str
    ops: tuple[str, ...]
    """Names in ``float8lab.ops`` that it calls and compares."""
    against: str
    run: Callable[[Cases], None]


CHECKS: list[Check] = []
"""All checks, in the order of the report."""

_LONG = ("scaled_mm", "cast_many", "cast_of", "quantize_of", "quantize_pair", "scaled_bmm",
         "value_of", "cast")  # fmt: skip
"""Checks with the most kernels."""


def checks(
    group: str, against: str, *names: str, name: str | None = None
) -> Callable[[Callable[[Cases], None]], Callable[[Cases], None]]:
    """Make a check of a function, which compares these ops and is named after them or ``name``."""

    def add(run: Callable[[Cases], None]) -> Callable[[Cases], None]:
        title = name or ", ".join(one.removesuffix("_op") for one in names)
        CHECKS.append(Check(group, title, names, against, run))
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
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    shown = f"{device} ({name})" if name else str(device)
    programs = min(_MOST_PROGRAMS, os.cpu_count() or 1)
    if device.type == "cuda" and programs > 1:
        found = _run_in_programs(device, programs)
    else:
        found = run_checks(device, [check.name for check in CHECKS])
    rows = [row for check in CHECKS for row in found[check.name][0]]
    return Report(shown, rows, {name: found[name][1] for name in found}, verbose)


def run_checks(device: torch.device, names: Sequence[str]) -> dict[str, tuple[list[Row], float]]:
    """Run some of the checks; return by name their rows, and how many seconds each took."""
    found = {}
    on_device: AbstractContextManager[Any] = (
        torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are small: threads wait for each other, up to 10 times
    try:
        with on_device, torch.no_grad(), torch.autocast(device.type, enabled=False):
            for check in CHECKS:
                if check.name in names:
                    start = time.perf_counter()
                    rows = _rows_of(check, device)
                    found[check.name] = rows, round(time.perf_counter() - start, 3)
    finally:
        torch.set_num_threads(threads)
    return found


_MOST_PROGRAMS = 8
_CODE = """
import json, sys
paths, device, *names = json.loads(sys.argv[1])
sys.path[:] = paths
import dataclasses, torch
from float8lab.inspect.selfcheck.harness import run_checks
for name in names:
    rows, seconds = run_checks(torch.device(device), [name])[name]
    print(json.dumps([name, [dataclasses.asdict(row) for row in rows], seconds]))
"""


def _run_in_programs(device: torch.device, programs: int) -> dict[str, tuple[list[Row], float]]:
    """Run all checks in several programs at once, since nearly all of their time compiles kernels.

    Threads would not do, since Triton compiles under Python's lock, and a pool of processes would
    run the caller's script again.
    """
    # The longest first: each program takes every so many.
    names = sorted((check.name for check in CHECKS), key=lambda name: name not in _LONG)
    shares = [names[i::programs] for i in range(programs)]
    at = device
    if device.type == "cuda" and device.index is None:
        at = torch.device("cuda", torch.cuda.current_device())

    def run(share: Sequence[str]) -> dict[str, tuple[list[Row], float]]:
        told = json.dumps([sys.path, str(at), *share])
        command = [sys.executable, "-c", _CODE, told]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = {}
        for line in done.stdout.splitlines():
            if line.startswith("["):
                name, rows, seconds = json.loads(line)
                found[name] = [Row(**row) for row in rows], seconds
        last = " ".join(done.stderr.split()[-60:])
        for name in share:
            if name not in found:  # it died, as of a signal
                problem = f"the program that ran it ended with status {done.returncode}: {last}"
                check = next(check for check in CHECKS if check.name == name)
                row = Row(check.group, name, check.against, "failed", 0, None, "", [problem])
                found[name] = [row], 0.0
        return found

    with ThreadPoolExecutor(programs) as pool:
        return {name: one for found in pool.map(run, shares) for name, one in found.items()}


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
