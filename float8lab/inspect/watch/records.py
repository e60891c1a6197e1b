"""The log of a watched training run: plain data, which views and reports read.

The log holds no model and no tensor, so that another process can read it from a file.

Each line of its JSONL file is an object with one key: ``"log"``, ``"step"`` or ``"record"``. A
``"log"`` has the fields of a ``Log`` besides steps and records; the last such line counts. Numbers
that are not finite are the strings ``"nan"``, ``"inf"`` and ``"-inf"``, since JSON lacks them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from float8lab.arguments import check_path
from float8lab.checkpoints.replacing import replacing
from float8lab.inspect.text import finite

__all__ = ["Log", "Record", "Step", "evenly_chosen"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class Record:
    """One operand of one layer in one step. A share is a fraction of the elements."""

    step: int
    layer: str
    """The module's qualified name in the model."""
    operand: str
    """``"x"``, ``"w"`` or ``"dy"`` of a linear layer, ``"q"``, ``"k"`` or ``"v"`` of attention."""
    amax: float
    """Largest magnitude before the cast."""
    scale_min: float
    scale_max: float
    """Range of the decode scales; the two are equal if there is a single scale."""
    saturated: float
    """Share of elements at the largest finite code."""
    flushed: float
    """Share of nonzero elements that the cast made zero."""
    subnormal: float
    """Share of subnormal numbers."""
    nan: int
    inf: int
    """NaNs and infinities before the cast."""
    sqnr: float | None
    """Signal-to-quantization-noise ratio in dB, against the values before the cast; None if all are
    exact, or if none is finite."""
    staleness: float | None
    """log2 of amax over the amax that the scale was made for: above 0 the cast clipped. None if the
    scale was computed from the values themselves."""
    elements: int
    exponents: dict[int, int] = field(default_factory=dict)
    """The number of nonzero finite elements by their exponent, floor(log2(|code|))."""
    stored: bool = False
    """Whether the operand was a weight stored in FP8. The values before the cast are then those of
    its master or, without one, its dequantized values; ``nan`` and ``inf`` count FP8 elements."""
    fp8_dtype: str = ""
    """``"e4m3"`` or ``"e5m2"``."""


@dataclass(frozen=True)
class Step:
    """One training step."""

    step: int
    loss: float | None = None
    gemms: dict[str, dict[str, int]] = field(default_factory=dict)
    """The number of GEMMs that ran, by layer and then by kind, such as
    ``{"fprop": 1, "dgrad": 1, "wgrad": 1}``."""


@dataclass(repr=False)
class Log:
    """Everything that a watch recorded, in the order of the steps."""

    recipe: str = ""
    """The recipe as text."""
    conversion: str = ""
    """The ``conversion_report`` of the model as text; empty if the model was not converted."""
    about: dict[str, str] = field(default_factory=dict)
    """Versions, the device, the number of parameters and other facts for display."""
    layers: list[str] = field(default_factory=list)
    """The layers' names, in the model's order."""
    steps: list[Step] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    followers: list[Callable[[Sequence[Record], Sequence[Step]], object]] = field(
        default_factory=list, compare=False
    )
    """Functions that a running watch calls with the records and steps that it adds to the log."""

    def __repr__(self) -> str:
        return f"<Log of {len(self.steps)} steps, {len(self.records)} records, {self.recipe}>"

    def to_jsonl(self, path: str | PathLike[str]) -> None:
        """Write the whole log to a file; an existing file is replaced when all is written."""
        check_path("path", path)
        with replacing(Path(path)) as partial, partial.open("w", encoding="ascii") as file:
            file.writelines(self.lines())

    def lines(self, steps: int = 0, records: int = 0) -> Iterator[str]:
        """Yield the lines of a JSONL file, without the first ``steps`` and ``records``."""
        if self.records[records:] or not (steps or records):  # else the "log" line has not changed
            head = {"recipe": self.recipe, "conversion": self.conversion}
            yield _line("log", {**head, "about": self.about, "layers": self.layers})
        for record in self.records[records:]:
            yield _line("record", vars(record))
        for step in self.steps[steps:]:
            yield _line("step", vars(step))

    @classmethod
    def from_jsonl(cls, path: str | PathLike[str]) -> Log:
        """Read a log that ``to_jsonl`` or ``watch(..., jsonl=path)`` has written.

        A last line that is incomplete, since its process was killed, is ignored.

        Raises:
            ValueError: a line other than the last is not a line of a log.
        """
        log = cls()
        steps: dict[int, Step] = {}  # a step is written twice if its loss is known later
        lines = Path(path).read_text(encoding="ascii", errors="replace").split("\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                ((kind, value),) = json.loads(line).items()
                if kind == "log":
                    for name in ("recipe", "conversion", "about", "layers"):
                        setattr(log, name, value[name])
                elif kind == "record":
                    log.records.append(_record(value))
                else:
                    loss = value["loss"]
                    loss = None if loss is None else float(loss)
                    steps[value["step"]] = Step(value["step"], loss, value["gemms"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if number == len(lines):
                    break
                raise ValueError(
                    f"path must be a log as to_jsonl writes it; got {path} with a line {number} "
                    f"of {line[:40]!r}. Rewrite it, or remove that line."
                ) from error
        log.steps = [steps[number] for number in sorted(steps)]
        return log


def evenly_chosen(values: Sequence[_T], most: int) -> Sequence[_T]:
    """Choose at most ``most`` values at even distances, with the first and the last of them."""
    if len(values) <= most:
        return values
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


def _line(kind: str, value: dict[str, object]) -> str:
    return json.dumps({kind: finite(value, str)}, allow_nan=False) + "\n"


def _record(value: dict[str, Any]) -> Record:
    shares = ("saturated", "flushed", "subnormal")
    for name in ("amax", "scale_min", "scale_max", *shares, "sqnr", "staleness"):
        if value[name] is not None:
            value[name] = float(value[name])
    value["exponents"] = {int(k): n for k, n in value["exponents"].items()}
    return Record(**value)
