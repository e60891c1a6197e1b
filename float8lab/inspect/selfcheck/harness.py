"""Define checks: their cases, comparisons and results, and the report of all checks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import FP8_DTYPES
from float8lab.inspect.text import Printed

__all__ = ["BF16", "FP16", "FP32", "REFERENCE", "Cases", "Check", "Report", "Row", "checks"]

REFERENCE = "the reference on the CPU, bit for bit"
_OVERLOADS = {name: getattr(ops, name).overload for name in ops.__all__ if name.endswith("_op")}
"""The overloads that the dispatcher has; on CPU tensors they call the references."""

_SHOWN = 8
"""The number of a row's failures that the report shows."""

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Row:
    """The result of a check, or of those of its cases that are native or emulated alike."""

    group: str
    name: str
    """The ops that are checked."""
    against: str
    """The reference that the ops are compared with."""
    status: str
    """``"passed"``, ``"emulated"`` (correct, but not in FP8), ``"unsupported"`` or ``"failed"``."""
    cases: int
    worst: float | None
    """The largest error as a fraction of its bound; None if all is compared bit for bit."""
    reason: str
    """Why the cases are emulated or unsupported."""
    failures: list[str] = field(default_factory=list)
    """A description of each failure."""


@dataclass(frozen=True, repr=False)
class Report(Printed):
    """The result of ``selfcheck``; ``print`` it for a table."""

    device: str
    rows: list[Row]
    seconds: dict[str, float]
    """The seconds that each check took."""
    verbose: bool = False

    @property
    def passed(self) -> bool:
        """Whether no check failed; an op that this device lacks does not count as a failure."""
        return not any(row.status == "failed" for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """Return the report as dicts, lists, numbers and strings."""
        result = {name: getattr(self, name) for name in ("device", "passed", "seconds")}
        return result | {"rows": [asdict(row) for row in self.rows]}

    def summary(self) -> str:
        """Return the verdict, and one or more lines for each row."""
        counts = Counter(row.status for row in self.rows)
        verdict = "passed" if self.passed else "FAILED"
        lines = [
            f"float8lab selfcheck on {self.device}: {verdict}, "
            f"{sum(row.cases for row in self.rows)} cases in {sum(self.seconds.values()):.1f} s",
            ", ".join(f"{counts[s]} {s}" for s in ("passed", "emulated", "unsupported", "failed")),
        ]
        width = max((len(row.name) for row in self.rows), default=0)
        for group, rows in groupby(self.rows, key=lambda row: row.group):
            lines += ["", group, *(line for row in rows for line in self._lines_of(row, width))]
        return "\n".join(lines)

    def _lines_of(self, row: Row, width: int) -> list[str]:
        error = "bit for bit" if row.worst is None else f"{row.worst:.2g} of the bound"
        more = [row.reason] if row.reason else []
        if self.verbose or row.status == "failed":
            more.append(f"against {row.against}")
        shown = row.failures if self.verbose else row.failures[:_SHOWN]
        more += [f"- {failure}" for failure in shown]
        if len(shown) < len(row.failures):
            more.append(f"- and {len(row.failures) - len(shown)} more")
        line = f"  {row.status:<11}  {row.name:<{width}}  {row.cases:>4} cases  {error}"
        return [line, *(f"{'':15}{text}" for text in more)]


@dataclass
class _Tally:
    cases: int = 0
    worst: float | None = None
    failures: list[str] = field(default_factory=list)


class Cases:
    """The comparisons of one check on one device, and the data for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tallies: dict[str, _Tally] = {}
        """Results by the reason why cases are emulated; the reason is empty for native cases."""
        self.case = ""
        self._tally: _Tally | None = None
        self._generator = torch.Generator("cpu").manual_seed(0)  # the caller's is not used

    def begin(self, case: str, emulated: str = "") -> None:
        """Begin a case; the comparisons that follow belong to it."""
        self.case = case
        self._tally = self.tallies.setdefault(emulated, _Tally())
        self._tally.cases += 1

    def fail(self, message: str) -> None:
        """Record a failure of the current case."""
        tally = self._tally or self.tallies.setdefault("", _Tally())
        tally.failures.append(f"{self.case}: {message}" if self.case else message)

    def on_device(self, value: Any) -> Any:
        """Copy a tensor, or the tensors in a tuple or list, to the device in the same layout."""
        if isinstance(value, (tuple, list)):
            return type(value)(map(self.on_device, value))
        if not isinstance(value, Tensor):
            return value
        size = value.untyped_storage().nbytes() // value.element_size()
        memory = value.as_strided((size,), (1,), 0).to(self.device, copy=True)
        return memory.as_strided(value.shape, value.stride(), value.storage_offset())

    def both(self, name: str, *arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Call an op of ``float8lab.ops`` and its reference with these arguments from the CPU.

        Arguments that the op writes are compared in this method.

        Returns:
            The results on the device, and those of the reference.
        """
        device_arguments, overload = self.on_device(arguments), _OVERLOADS[name]
        got, want = _listed(getattr(ops, name)(*device_arguments)), _listed(overload(*arguments))
        assert len(got) == len(want), "as many results as the reference has"
        for result, expected, argument in zip(
            device_arguments, arguments, overload._schema.arguments, strict=False
        ):
            if argument.is_write and expected is not None:
                self.same(result, expected)
        return got, want

    def agree(self, name: str, *arguments: object, but: int | None = None) -> list[Tensor]:
        """Compare an op's results and written arguments with its reference; return the results.

        Args:
            name: the op's name in ``float8lab.ops``.
            arguments: the op's arguments on the CPU.
            but: the index of a result that is not compared.
        """
        got, want = self.both(name, *arguments)
        # A result that the op was not asked for is a vector without elements.
        compared = [i for i, expected in enumerate(want) if i != but and expected.shape != (0,)]
        self.same([got[i] for i in compared], [want[i] for i in compared])
        return got

    def same(self, got: Tensor | Sequence[Tensor], want: Tensor | Sequence[Tensor]) -> None:
        """Compare bits and strides; 0 equals -0 outside FP8, and any NaN equals any other NaN."""
        got, want = _listed(got), _listed(want)
        for number, (result, expected) in enumerate(zip(got, want, strict=True)):
            if problem := _difference(result, expected):
                self.fail(f"output {number}: {problem}" if len(got) > 1 else problem)
                return

    def within(self, got: Tensor, exact: Tensor, bound: Tensor | float) -> None:
        """Check that ``got`` is within ``bound`` of ``exact`` (float64); NaN and inf must agree."""
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
            index = _first(ratio == worst)
            self.fail(
                f"{int((ratio > 1).sum())} of {ratio.numel()} elements off by more than the bound; "
                f"at {index} got {got[index].item():.9g}, exact is {exact[index].item():.9g}, "
                f"bound {limit[index].item():.3g}"
            )

    # Data are made on the CPU, so that every device gets the same.

    def normal(self, *shape: int) -> Tensor:
        """Draw normal numbers in float32 on the CPU."""
        return torch.randn(shape, generator=self._generator, dtype=FP32, device="cpu")

    def uniform(self, *shape: int) -> Tensor:
        """Draw uniform numbers from 0 to 1 in float32 on the CPU."""
        return torch.rand(shape, generator=self._generator, dtype=FP32, device="cpu")

    def bytes(self, *shape: int) -> Tensor:
        """Draw random uint8 numbers on the CPU."""
        return torch.randint(256, shape, generator=self._generator, dtype=torch.uint8, device="cpu")

    def matrix(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Draw a CPU matrix with columns of many magnitudes, and a row and a column of zeros."""
        x = self.normal(*shape)
        if x.numel() > 1:
            x *= torch.logspace(-3, 3, shape[1], dtype=FP32, device="cpu")
            x[shape[0] // 2], x[:, shape[1] // 2] = 0, 0
        return x.to(dtype)


def _listed(results: Any) -> list[Any]:
    if results is None:
        return []
    return [results] if isinstance(results, Tensor) else list(results)


def _difference(got: Tensor, want: Tensor) -> str:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return f"{got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}"
    # Strides mean nothing in a dimension of size 1 and in an empty tensor.
    if got.stride() != want.stride() and 1 not in got.shape and got.numel():
        return f"strides {got.stride()}, not {want.stride()}"
    got, want = got.detach().cpu(), want.detach().cpu()
    is_fp8 = got.dtype in FP8_DTYPES
    equal = got.view(torch.uint8) == want.view(torch.uint8) if is_fp8 else got == want
    equal |= got.float().isnan() & want.float().isnan()
    if bool(equal.all()):
        return ""
    index = _first(~equal)
    return (
        f"{int((~equal).sum())} of {equal.numel()} elements differ; "
        f"at {index} got {got.float()[index].item():.9g}, not {want.float()[index].item():.9g}"
    )


def _first(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero()[0])


@dataclass(frozen=True)
class Check:
    """One check: the ops that it calls, and the reference that it compares them with."""

    group: str
    name: str
    ops: tuple[str, ...]
    """The names in ``float8lab.ops`` of the ops that it calls and compares."""
    against: str
    run: Callable[[Cases], None]


def checks(
    group: str, against: str, *names: str, name: str | None = None
) -> Callable[[Callable[[Cases], None]], Check]:
    """Make the decorated function a check of these ops, named after them or ``name``."""

    def make(run: Callable[[Cases], None]) -> Check:
        title = name or ", ".join(op_name.removesuffix("_op") for op_name in names)
        return Check(group, title, names, against, run)

    return make
