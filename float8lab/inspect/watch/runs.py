"""Compare two watched runs: their losses, and each operand of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, cast, overload

from torch import Tensor

from float8lab.arguments import check_instance, check_names, shown
from float8lab.inspect import statistics
from float8lab.inspect.text import Grid, Printed, finite
from float8lab.inspect.watch.records import Log, Record, evenly_chosen

__all__ = ["OperandOfRuns", "Quality", "RunComparison", "check_names_of_runs", "compare"]


class Quality(NamedTuple):
    """The quality of an operand over all watched steps of a run."""

    sqnr: float | None
    """The lowest SQNR in dB; None if no record has one."""
    flushed: float
    """The largest share of elements that became zero."""
    saturated: float
    """The largest share of elements at the largest code."""
    nonfinite: int
    """The number of NaNs and infinities."""


class OperandOfRuns(NamedTuple):
    """An operand's quality in both runs; a run without this operand has None."""

    layer: str
    operand: str
    a: Quality | None
    b: Quality | None

    @property
    def sqnr_gain(self) -> float:
        """How much higher the SQNR of b is, in dB; 0 if one run has no SQNR."""
        sqnrs = [q.sqnr for q in (self.a, self.b) if q is not None and q.sqnr is not None]
        return sqnrs[1] - sqnrs[0] if len(sqnrs) == 2 else 0.0


@dataclass(frozen=True, repr=False)
class RunComparison(Printed):
    """The comparison of two runs, a and b; ``print`` it for tables."""

    names: tuple[str, str]
    losses: tuple[tuple[int, float, float], ...]
    """Step, loss of a and loss of b, for the steps that have a loss in both runs."""
    operands: tuple[OperandOfRuns, ...]
    """The operands, those whose SQNR differs most first."""

    @property
    def gap(self) -> float | None:
        """The mean loss of b over that of a, minus 1, over the last tenth of the common steps."""
        last = self.losses[-max(1, round(len(self.losses) / 10)) :]
        base = sum(a for _, a, _ in last)
        return sum(b for _, _, b in last) / base - 1 if last and base else None

    def summary(self) -> str:
        """Return the runs, the gap of their losses, and how many operands are better or worse."""
        a, b = self.names
        losses = "no step has a loss in both"
        if (gap := self.gap) is not None:
            losses = (
                f"over the last tenth of {len(self.losses)} common steps the loss of b is "
                f"{100 * gap:+.2f} % of a's"
            )
        common = [o for o in self.operands if o.a is not None and o.b is not None]
        better, worse = (sum(sign * o.sqnr_gain > 1 for o in common) for sign in (1, -1))
        operands = (
            f"{len(common)} operands in both: SQNR of b is more than 1 dB higher in {better}, "
            f"lower in {worse}; {len(self.operands) - len(common)} in one alone"
        )
        return f"a: {a}\nb: {b}\n{losses}\n{operands}"

    def tables(self, limit: int | None = 20) -> list[Grid]:
        """Return a table of losses at evenly spaced steps, and a table of operands."""
        chosen = evenly_chosen(self.losses, 10)
        losses = [(str(s), f"{a:.4f}", f"{b:.4f}", _percent(a, b)) for s, a, b in chosen]
        shown: Iterable[tuple[str, Callable[[Quality], str]]] = (
            ("SQNR", lambda q: "" if q.sqnr is None else f"{q.sqnr:.1f}"),
            ("flush%", lambda q: f"{100 * q.flushed:.3g}"),
            ("NaN, inf", lambda q: str(q.nonfinite or "")),
        )
        rows = [
            (o.layer, o.operand, *(text(q) if q else "-" for _, text in shown for q in o[2:]))
            for o in self.operands
        ]
        columns = ["layer", "operand", *(f"{name} {run}" for name, _ in shown for run in "ab")]
        grids = [
            Grid("Loss", ("step", "a", "b", "b to a"), losses),
            Grid("Operands, the largest difference of SQNR first", columns, rows).first(limit),
        ]
        return [grid for grid in grids if grid.rows]

    def to_json(self) -> dict[str, object]:
        """Return the comparison for ``json.dumps``, with None for numbers that are not finite."""
        operands = [
            {**o._asdict(), "a": o.a and o.a._asdict(), "b": o.b and o.b._asdict()}
            for o in self.operands
        ]
        losses = [{"step": s, "a": a, "b": b} for s, a, b in self.losses]
        named = dict(zip("ab", self.names, strict=True))
        return finite({"runs": named, "gap": self.gap, "losses": losses, "operands": operands})


def check_names_of_runs(names: object) -> None:
    """Check that ``names`` are the names of two runs, or None."""
    if names is not None and len(check_names("names", names)) != 2:
        raise ValueError(f"names must be those of both runs; got {shown(names)}. Give two strings.")


@overload
def compare(x: Tensor, original: Tensor, *, local: bool = ...) -> statistics.Comparison: ...
@overload
def compare(x: Log, original: Log, *, names: tuple[str, str] | None = ...) -> RunComparison: ...
def compare(
    x: Tensor | Log,
    original: Tensor | Log,
    *,
    local: bool = False,
    names: tuple[str, str] | None = None,
) -> statistics.Comparison | RunComparison:
    """Measure the error of an FP8 tensor against its original, or compare two watched runs.

    Runs are compared step by step and operand by operand: for example bfloat16 with FP8, one recipe
    with another, or a run before and after a change. Layers are matched by name. A run without FP8
    has only losses: ``Log(steps=[Step(0, loss=2.5), ...])``.

    Args:
        x: a Float8Tensor; or the log of the first run, "a", by ``float8lab.inspect.watch``.
        original: the tensor that was quantized to x; or the log of the second run, "b".
        local: for tensors, as in ``stats``, which also says what errors are raised.
        names: names of the two runs; None takes their recipes.

    >>> x = torch.tensor([1.0, 1.03125])
    >>> float8lab.inspect.compare(float8lab.quantize(x, scale=1.0), x).max_error
    0.03125
    """
    check_names_of_runs(names)
    if not isinstance(x, Log):
        return statistics.compare(x, cast(Tensor, original), local=local)
    check_instance("original", original, Log, "the log of a watch, as x is")
    a, b = x, cast(Log, original)
    losses = [{step.step: step.loss for step in log.steps} for log in (a, b)]
    common = [
        (step, loss, loss_of_b)
        for step, loss in losses[0].items()
        if loss is not None and (loss_of_b := losses[1].get(step)) is not None
    ]
    qualities = [_qualities(log.records) for log in (a, b)]
    operands = [
        OperandOfRuns(*key, *(quality.get(key) for quality in qualities))
        for key in dict.fromkeys([*qualities[0], *qualities[1]])
    ]
    operands.sort(key=lambda operand: -abs(operand.sqnr_gain))
    default = (a.recipe or "high precision", b.recipe or "high precision")
    return RunComparison(names or default, tuple(common), tuple(operands))


def _qualities(records: Iterable[Record]) -> dict[tuple[str, str], Quality]:
    """Compute the quality of each operand, by layer and operand."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.layer, record.operand), []).append(record)
    return {
        key: Quality(
            min((r.sqnr for r in group if r.sqnr is not None), default=None),
            max(r.flushed for r in group),
            max(r.saturated for r in group),
            sum(r.nan + r.inf for r in group),
        )
        for key, group in groups.items()
    }


def _percent(a: float, b: float) -> str:
    return f"{100 * (b / a - 1):+.2f} %" if a and math.isfinite(a) else ""
