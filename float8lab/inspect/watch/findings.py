"""Find what is wrong in a watched run's records, and sum it up in a verdict of one sentence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from float8lab.arguments import check_instance
from float8lab.inspect.text import Grid, Printed, shown
from float8lab.inspect.watch.records import Log, Record, Step

__all__ = ["Diagnosis", "Finding", "diagnose", "findings_of"]

CLIPPED, STALE, FLUSHED, LEAST_SQNR = 1e-2, -4.0, 0.1, 15.0
"""Limits: the share at the largest code if a scale is too small; log2 of amax over the amax of a
scale that is too large; the share that became zero; SQNR in dB (e5m2 by itself allows only 25)."""

_ADVICE = {
    "not finite": "find the op that made it: float8lab.inspect.find_nan(model, *inputs)",
    "saturation": "a longer amax_history_len with amax_compute_algo='max', a margin, or "
    "Float8CurrentScaling()",
    "stale scale": "a shorter amax_history_len, or Float8CurrentScaling()",
    "underflow": "scales of smaller parts: Float8RowwiseScaling() or Float8BlockScaling(); of "
    "gradients, Format.HYBRID",
    "noise": "Float8BlockScaling(), or this layer in high precision: overrides={name: None}",
    "high precision": "conversion_report(model) names what FP8 cannot take",
}
"""Advice for each kind of finding, the worst kind first."""
_KINDS = tuple(_ADVICE)


class Finding(NamedTuple):
    """One thing that is wrong with an operand of a layer, or with one of its GEMMs."""

    step: int
    layer: str
    operand: str
    """``"x"``, ``"w"``, ``"dy"``, ``"q"``, ``"k"`` or ``"v"``; or a GEMM, such as ``"wgrad"``."""
    kind: str
    """``"not finite"``, ``"saturation"``, ``"stale scale"``, ``"underflow"``, ``"noise"``, or
    ``"high precision"`` of a GEMM that runs in FP8 in other layers."""
    value: float
    """By ``kind``: the number of NaNs and infinities; a share of elements; log2 of amax over the
    amax that the scale was made for; SQNR in dB; or the number of GEMMs."""

    @property
    def advice(self) -> str:
        """Advice on what to do about this finding."""
        return _ADVICE[self.kind]

    def shown(self) -> str:
        """Return the value with its unit."""
        if self.kind in ("saturation", "underflow"):
            return f"{100 * self.value:.3g} %"
        if self.kind == "stale scale":
            return f"2^{-self.value:.1f} too large"
        return f"{self.value:.1f} dB" if self.kind == "noise" else f"{self.value:.0f}"

    def __str__(self) -> str:
        return f"{self.layer}, {self.operand}: {self.kind} ({self.shown()}). Try {self.advice}."


def findings_of(records: Iterable[Record], steps: Iterable[Step]) -> list[Finding]:
    """Return what is wrong with operands in these records, and with GEMMs in these steps."""
    findings = [finding for record in records for finding in _findings_of_record(record)]
    return findings + [finding for step in steps for finding in _findings_of_step(step)]


def _findings_of_record(record: Record) -> Iterator[Finding]:
    """Yield what is wrong with one operand in one step."""
    staleness = 0.0 if record.staleness is None else record.staleness
    sqnr = math.inf if record.sqnr is None else record.sqnr
    cases = (
        ("not finite", record.nan + record.inf > 0, record.nan + record.inf),
        ("saturation", staleness > 0 and record.saturated > CLIPPED, record.saturated),
        ("stale scale", staleness < STALE, staleness),
        ("underflow", record.flushed > FLUSHED, record.flushed),
        ("noise", sqnr < LEAST_SQNR, sqnr),
    )
    for kind, is_wrong, value in cases:
        if is_wrong:
            yield Finding(record.step, record.layer, record.operand, kind, float(value))


def _findings_of_step(step: Step) -> Iterator[Finding]:
    """Yield GEMMs that ran in high precision although other layers run that kind in FP8."""
    in_fp8 = {kind for kinds in step.gemms.values() for kind in kinds if ", " not in kind}
    for layer, kinds in step.gemms.items():
        for kind, count in kinds.items():
            gemm, _, precision = kind.partition(", ")
            if precision == "high precision" and gemm in in_fp8:
                yield Finding(step.step, layer, gemm, "high precision", float(count))


@dataclass(frozen=True, repr=False)
class Diagnosis(Printed):
    """The result of ``diagnose``; ``print`` it for the verdict and a table."""

    findings: tuple[Finding, ...]
    """The worst finding of each kind for each operand, the worst kinds first."""
    steps: int
    """The number of watched steps."""
    operands: int
    """The number of operands, counted by layer."""
    least_sqnr: float | None
    """The lowest SQNR of all records in dB; None if no record has one."""

    @property
    def is_healthy(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def summary(self) -> str:
        """Return the verdict in a sentence, and the three worst findings."""
        seen = f"{self.operands} operands in {self.steps} watched steps"
        if not self.operands:
            return "Nothing was watched: no layer cast anything to FP8."
        if self.is_healthy:
            sqnr = "" if self.least_sqnr is None else f", SQNR {self.least_sqnr:.1f} dB or more"
            return f"FP8 is healthy: {seen}, all finite, none clipped{sqnr}."
        kinds = Counter(finding.kind for finding in self.findings)
        named = ", ".join(f"{kind} in {count}" for kind, count in kinds.items())
        worst = "\n".join(f"  {finding}" for finding in self.findings[:3])
        return f"FP8 needs a look: of {seen}, {named}. The worst:\n{worst}"

    def tables(self, limit: int | None = 20) -> list[Grid]:
        """Return a table with a row for each finding."""
        rows = [(f.layer, f.operand, f.kind, f.shown(), str(f.step)) for f in self.findings]
        columns = ("layer", "operand", "finding", "value", "step")
        return shown([Grid("Findings, the worst first", columns, rows)], limit)

    def to_json(self) -> dict[str, object]:
        """Return the diagnosis as dicts, lists, strings and numbers."""
        findings = [{**f._asdict(), "advice": f.advice} for f in self.findings]
        return {
            "healthy": self.is_healthy, "verdict": self.summary(), "steps": self.steps,
            "operands": self.operands, "least_sqnr": self.least_sqnr, "findings": findings,
        }  # fmt: skip


def diagnose(log: Log) -> Diagnosis:
    """Say whether FP8 is healthy in a watched run, and if not, where and what to do.

    An operand is a finding if it had NaNs or infinities; if its scale was 16 times too large, or
    too small with more than 1 % of elements at the largest code; if more than 10 % became zero; or
    if its SQNR was below 15 dB. So is a GEMM in high precision whose kind ran in FP8 elsewhere.

    Args:
        log: a log by ``float8lab.inspect.watch``.

    >>> layer = float8lab.convert_to_float8(torch.nn.Linear(32, 32))
    >>> with float8lab.inspect.watch(layer) as w:
    ...     layer(torch.ones(16, 32)).sum().backward()
    >>> float8lab.inspect.diagnose(w.log).is_healthy
    True
    """
    check_instance("log", log, Log, "the log of a watch")
    sqnrs = [record.sqnr for record in log.records if record.sqnr is not None]
    worst: dict[tuple[str, str, str], Finding] = {}
    for finding in findings_of(log.records, log.steps):
        key = (finding.kind, finding.layer, finding.operand)
        worst[key] = max(worst.get(key, finding), finding, key=_badness)
    return Diagnosis(
        tuple(sorted(worst.values(), key=lambda f: (_KINDS.index(f.kind), -_badness(f)))),
        len({record.step for record in log.records}),
        len({(record.layer, record.operand) for record in log.records}), min(sqnrs, default=None),
    )  # fmt: skip


def _badness(finding: Finding) -> float:
    return -finding.value if finding.kind in ("noise", "stale scale") else finding.value
