"""Print what every subject measures: rows, columns, targets, JSON, RESULTS.md and plots.

A subject yields one ``Row`` for each candidate. A refused row holds no time, so that none can be
printed. Each row is printed on stderr and written to ``--json`` as soon as it is measured. A table
follows when its case is complete, so that an interrupted run loses little.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.floor import Floor
from benchmarks.recipes import RECIPES

__all__ = [
    "Column",
    "Row",
    "Setting",
    "Subject",
    "Target",
    "finish",
    "main",
    "read_json",
    "render",
    "replace_section",
    "tell",
]


@dataclass(frozen=True)
class Target:
    """A bound on one of ``QUANTITIES``, or on one of a row's ``values``."""

    quantity: str
    relation: str
    """``<=`` or ``>=``."""
    bound: float

    def describe(self, value: float | None) -> str:
        """Format the bound, and whether the value meets it.

        >>> Target("x floor", "<=", 1.04).describe(1.1)
        'x floor <= 1.04 missed'
        """
        text = f"{self.quantity} {self.relation} {self.bound:g}"
        if value is None:
            return text
        kept = value <= self.bound if self.relation == "<=" else value >= self.bound
        return f"{text} {'met' if kept else 'missed'}"


@dataclass(frozen=True)
class Row:
    """The measurements of one candidate on one case, or why there are none."""

    case: str
    """The table to which the row belongs."""
    name: str
    """The name of the candidate."""
    refusal: str | None = None
    """The reason why there are no numbers; None if there are numbers."""
    sqnr_db: dict[str, float] = field(default_factory=dict)
    ms: tuple[float, ...] = ()
    """The samples of the time."""
    wall_ms: tuple[float, ...] = ()
    floor_ms: float | None = None
    flops: float | None = None
    bytes: float | None = None
    """The bytes that have to be moved."""
    fp8: bool = False
    """Whether the percentage is of the FP8 GEMM's ceiling, else of the bfloat16 GEMM's."""
    baseline: bool = False
    """Whether the other rows of the case are compared with this row."""
    values: dict[str, float] = field(default_factory=dict)
    """Further values of the subject, by the titles of its columns."""
    targets: tuple[Target, ...] = ()

    def __post_init__(self) -> None:
        if self.refusal is not None and (self.ms or self.wall_ms or self.values):
            raise ValueError("refusal must be None for a row with numbers. Leave the numbers out.")

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Row:
        """Make a row from the record that ``asdict`` made of it."""
        targets = tuple(Target(**target) for target in record["targets"])
        lists = {name: tuple(record[name]) for name in ("ms", "wall_ms")}
        return cls(**{**record, **lists, "targets": targets})

    @property
    def median(self) -> float | None:
        """The median of the time, in milliseconds."""
        return common.Timing(self.ms).median if self.ms else None


def _rate(row: Row, amount: float | None) -> float | None:
    """Return the rate of an amount in 10**12 units a second."""
    return amount / row.median / 1e9 if row.median and amount else None


def _speed_up(row: Row, base: Row | None) -> float | None:
    return base.median / row.median if row.median and base and base.median else None


def _times_floor(row: Row, base: Row | None) -> float | None:
    return row.median / row.floor_ms if row.median and row.floor_ms else None


def _sustained_speed_up(row: Row, base: Row | None) -> float | None:
    own, other = row.values.get("sustained ms"), base and base.values.get("sustained ms")
    return other / own if own and other else None


QUANTITIES: dict[str, Callable[[Row, Row | None], float | None]] = {
    "x bf16": _speed_up,
    "x bf16, sustained": _sustained_speed_up,
    "x floor": _times_floor,
    "TFLOP/s": lambda row, base: _rate(row, row.flops),
    "TB/s": lambda row, base: _rate(row, row.bytes),
}
"""Quantities that are computed from a row and the baseline of its case, by name."""


def quantity(name: str, row: Row, base: Row | None) -> float | None:
    """Return one of ``QUANTITIES`` or of the row's own values."""
    if name in QUANTITIES:
        return QUANTITIES[name](row, base)
    return row.values.get(name)


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    digits: int = 2
    cell: Callable[[Row, Row | None], str | None] | None = None
    """Formats the cell; None shows ``quantity(title)``."""
    always: bool = False
    """Whether the column is shown for refused rows, too."""

    def text(self, row: Row, base: Row | None) -> str:
        """Return the text of a row's cell; ``-`` if the cell is empty."""
        if self.cell is not None:
            return self.cell(row, base) or "-"
        value = quantity(self.title, row, base)
        return "-" if value is None else f"{value:.{self.digits}f}"


def _describe_db(row: Row, base: Row | None) -> str:
    return " / ".join(f"{db:.1f}" for db in row.sqnr_db.values())


def _describe_targets(row: Row, base: Row | None) -> str:
    return "; ".join(t.describe(quantity(t.quantity, row, base)) for t in row.targets)


NAME = Column("implementation", cell=lambda row, base: row.name, always=True)
TIME = Column(
    "GPU ms (quartiles)",
    cell=lambda row, base: common.Timing(row.ms).describe() if row.ms else None,
)
WALL = Column(
    "wall ms",
    cell=lambda row, base: f"{common.Timing(row.wall_ms).median:.3f}" if row.wall_ms else None,
)
FLOOR = Column("floor ms", cell=lambda row, base: f"{row.floor_ms:.3f}" if row.floor_ms else None)
TIMES_FLOOR = Column("x floor", 3)
SPEED_UP = Column("x bf16")
SUSTAINED = (
    Column("sustained ms", 3), Column("x bf16, sustained"), Column("MHz", 0), Column("W", 0)
)  # fmt: skip
"""Columns of ``--sustained``: consecutive steps as in training, candidates in turns."""
TRAINING = (TIME, WALL, FLOOR, TIMES_FLOOR, SPEED_UP, *SUSTAINED)
"""The columns of a training step's times."""
FLOPS = Column("TFLOP/s", 0)
CEILING = Column("% of ceiling", 0)
TARGET = Column("target", cell=_describe_targets)


def decibels(*names: str) -> Column:
    """Make the column of the SQNR of these outputs."""
    return Column(f"{' / '.join(names)} (dB)", cell=_describe_db, always=True)


def tabulate(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Format a markdown table of one case."""
    base = next((row for row in rows if row.baseline and row.refusal is None), None)
    lines = []
    for row in rows:
        cells = [column.text(row, base) for column in columns]
        if row.refusal is not None:
            hidden = [i for i, column in enumerate(columns) if not column.always]
            for index in hidden:
                cells[index] = "-"
            cells[hidden[0]] = row.refusal
        lines.append(cells)
    # Columns in which all cells are empty are left out.
    used = [i for i in range(len(columns)) if any(line[i] not in ("-", "") for line in lines)]
    titles = [columns[i].title for i in used]
    return common.table(titles, [[line[i] for i in used] for line in lines])


class Setting:
    """The device on which a subject measures, and how it measures.

    Args:
        device: the device to measure.
        time: returns the ``Timing`` of a function's work on the device.
        wall: returns the wall ``Timing`` of a function for its caller.
        floor: the rates of the machine.
        recipes: names of ``RECIPES``.
        compile: measure compiled candidates, too.
        seed: the seed of the inputs.
        sustained: returns by name the ``Sustained`` times of several steps; None measures none.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        time: Callable[[Callable[[], object]], common.Timing],
        wall: Callable[[Callable[[], object]], common.Timing],
        floor: Floor,
        recipes: Sequence[str],
        compile: bool = False,
        seed: int = 0,
        sustained: Callable[[Mapping[str, Callable[[], object]]], Any] | None = None,
    ) -> None:
        self.device, self.time, self.wall, self.floor = device, time, wall, floor
        self.sustained = sustained
        self.names: Sequence[str] = ()
        """Substrings of the names of candidates to measure besides the baseline; all if empty."""
        self.recipes, self.compile, self.seed = tuple(recipes), compile, seed

    def measures(self, name: str) -> bool:
        """Whether a candidate of this name is to be measured."""
        return not self.names or any(wanted in name for wanted in self.names)

    @property
    def modes(self) -> tuple[str, ...]:
        """Return the modes in which our candidates run."""
        return ("eager", "compile") if self.compile else ("eager",)

    def generator(self) -> torch.Generator:
        """Return a new generator that starts from the seed."""
        return torch.Generator(self.device).manual_seed(self.seed)

    def row(self, case: str, name: str, **measured: Any) -> Row:
        """Make a row, with its percentages of the rates that this machine reaches."""
        row = Row(case, name, **measured)
        if row.refusal is not None:
            return row
        values = dict(row.values)
        if rate := _rate(row, row.flops):
            values["% of ceiling"] = 100 * rate / self.floor.ceiling(fp8=row.fp8)
        if rate := _rate(row, row.bytes):
            values["% of copy"] = 100 * rate / self.floor.copy_rate
        return Row(**{**_fields(row), "values": values})

    def attempt(self, case: str, name: str, measure: Callable[[], Row]) -> Row:
        """Return the row of ``measure``, or a row with its error; free its memory afterwards."""
        try:
            return measure()
        except Exception as error:  # one candidate's failure must not cost the others' numbers
            first = (str(error).strip().splitlines() or [""])[0][:160]
            return Row(case, name, refusal=f"failed: {type(error).__name__}: {first}")
        finally:
            free()


def _fields(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def free() -> None:
    """Free the memory and the compiled code of candidates that are no longer used."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Subject:
    """A subject of measurements, which has a section in RESULTS.md.

    Attributes:
        name: the name of its module.
        title: the title of its section in RESULTS.md.
        doc: the module's docstring.
        columns: the columns of its tables.
        rows: returns the rows, case by case, from a setting and the parsed options.
        add_options: adds the subject's options to the parser.
        recipes: the recipes that it measures by default.
        plotted: the title or quantity that its plot shows; None for the time.
    """

    name: str
    title: str
    doc: str | None
    columns: tuple[Column, ...]
    rows: Callable[[Setting, argparse.Namespace], Iterable[Row]]
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    recipes: tuple[str, ...] = ("delayed", "current", "rowwise", "block")
    plotted: str | None = None


def main(subject: Subject, argv: Sequence[str] | None = None) -> list[Row]:
    """Measure a subject on the GPU, print it, and write the files that the options name."""
    parser = common.new_parser((subject.doc or "").split("\n\n")[0])
    add_options(parser)
    subject.add_options(parser)
    options = parser.parse_args(argv)
    common.require_cuda(f"benchmarks.{subject.name}")
    common.forbid_eager_fallback()
    device = torch.device("cuda")
    floor = Floor(device, lambda fn: common.time_device(fn, warm_up=5, samples=options.samples))
    setting = Setting(
        device,
        time=floor.time,
        wall=lambda fn: common.time_wall(fn, warm_up=1, samples=3, calls=5),
        floor=floor,
        recipes=options.recipe or subject.recipes,
        compile=options.compile,
        seed=options.seed,
        sustained=common.time_sustained if options.sustained else None,
    )
    setting.names = options.candidate or ()
    facts = common.header(options.commit) | floor.describe()
    return measure(subject, setting, options, facts)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of all subjects that ``main`` runs."""
    parser.add_argument(
        "--recipe", action="append", choices=RECIPES, help="default: those with FP8 GEMMs, or all"
    )
    parser.add_argument("--compile", action="store_true", help="compiled candidates, too")
    parser.add_argument(
        "--candidate", action="append", metavar="NAME",
        help="of modules, measure those with this in their names, and the baseline",
    )  # fmt: skip
    parser.add_argument(
        "--sustained", action="store_true", help="steps of modules also for seconds, in turns"
    )
    parser.add_argument("--samples", type=int, default=12, help="of each time (default: 12)")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="save a plot there (matplotlib)")


def measure(
    subject: Subject, setting: Setting, options: argparse.Namespace, facts: Mapping[str, str]
) -> list[Row]:
    """Run a subject: report each row, print each case's table, write JSON and plot."""
    facts = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts}
    print(describe(facts), flush=True)

    def reported_rows() -> Iterator[Row]:
        for row in subject.rows(setting, options):
            print(f"{subject.name} | {row.case} | {row.name}: {_brief(row)}", file=sys.stderr)
            common.append_json(options.json, facts, [asdict(row)])
            yield row

    everything = []
    for case, rows in groupby(reported_rows(), key=lambda row: row.case):
        everything += list(rows)
        table = tabulate(subject.columns, [row for row in everything if row.case == case])
        print(f"\n{case}\n\n{table}", flush=True)
    if getattr(options, "plot", None) is not None:
        save_plot(subject, everything, options.plot / f"{subject.name}.png")
    return everything


def tell(
    subject: Subject, rows: Iterable[Row], options: argparse.Namespace, *, rank: int = 0
) -> bool:
    """Print the rows that ranks measured together and write JSON, on rank 0.

    All ranks iterate over the rows, since each takes part. Returns whether no row was refused.
    """
    facts: dict[str, str] = {}
    if rank == 0:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        facts = {"time": now, **common.header(options.commit)}
        print(describe(facts), flush=True)
    everything = []
    for case, members in groupby(rows, key=lambda row: row.case):
        everything += list(members)
        if rank == 0:
            found = [row for row in everything if row.case == case]
            common.append_json(options.json, facts, [asdict(row) for row in found])
            print(f"\n{case}\n\n{tabulate(subject.columns, found)}", flush=True)
    return all(row.refusal is None for row in everything)


def _brief(row: Row) -> str:
    if row.refusal is not None:
        return row.refusal
    times = [f"{row.median:.3f} ms"] if row.median else []
    return ", ".join([*times, *(f"{name} {value:.3g}" for name, value in row.values.items())])


def describe(facts: Mapping[str, str]) -> str:
    """Format the header without the time, which only histories need."""
    return common.describe_header({k: v for k, v in facts.items() if k != "time"})


def finish(rows: Sequence[Row]) -> None:
    """End the program, with exit status 1 if a row was refused."""
    sys.exit(any(row.refusal is not None for row in rows))


# Results


def read_json(path: Path) -> tuple[dict[str, str], list[Row]]:
    """Read the header and the rows of the last run in a file of JSON lines."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    facts = records[-1]["header"]
    rows = [row for r in records if r["header"] == facts for row in r["rows"]]
    return facts, [Row.from_json(row) for row in rows]


def render(subject: Subject, facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    """Format a subject's section of RESULTS.md without the heading."""
    parts = [describe(facts)]
    for case in dict.fromkeys(row.case for row in rows):
        table = tabulate(subject.columns, [row for row in rows if row.case == case])
        parts.append(f"{case}\n\n{table}")
    return "\n\n".join(parts)


def replace_section(text: str, name: str, title: str, body: str) -> str:
    """Replace the generated text of one subject in RESULTS.md, or add it at the end.

    Text outside the two comments that enclose the generated text is written by hand and stays.

    >>> text = replace_section("# Results\\n", "gemm", "GEMM", "old")
    >>> text = text.replace("end benchmarks.gemm -->", "end benchmarks.gemm -->\\nA remark.")
    >>> print(replace_section(text, "gemm", "GEMM", "new"))
    # Results
    <BLANKLINE>
    ## GEMM
    <BLANKLINE>
    <!-- begin benchmarks.gemm -->
    <BLANKLINE>
    new
    <BLANKLINE>
    <!-- end benchmarks.gemm -->
    A remark.
    <BLANKLINE>
    """
    begin, end = (f"<!-- {word} benchmarks.{name} -->" for word in ("begin", "end"))
    part = f"{begin}\n\n{body.strip()}\n\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n## {title}\n\n{part}\n"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"{begin} and {end} must stand in this order, once each. Correct the file."
        )
    return re.sub(
        f"{re.escape(begin)}.*{re.escape(end)}", lambda match: part, text, flags=re.DOTALL
    )


def save_plot(subject: Subject, rows: Sequence[Row], path: Path) -> None:
    """Plot bars of every candidate, case by case; a black line on each bar is its floor."""
    matplotlib = importlib.import_module("matplotlib")
    matplotlib.use("agg")
    plt = importlib.import_module("matplotlib.pyplot")
    name = subject.plotted

    def value(row: Row) -> float | None:
        if row.refusal is not None:
            return None
        return row.median if name is None else quantity(name, row, None)

    cases = {
        case: [row for row in rows if row.case == case and value(row) is not None]
        for case in dict.fromkeys(row.case for row in rows)
    }
    cases = {case: members for case, members in cases.items() if members}
    if not cases:
        return
    width = min(3, len(cases))
    height = math.ceil(len(cases) / width)
    tallest = max(map(len, cases.values()))
    size = (6 * width, height * (1 + 0.28 * tallest))
    figure, axes = plt.subplots(height, width, figsize=size, squeeze=False)
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for axis, (case, members) in zip(axes.flat, cases.items(), strict=False):
        for y, row in enumerate(reversed(members)):
            color = "tab:gray" if row.baseline else "tab:blue"
            axis.barh(y, value(row), color=color)
            if name is None and row.floor_ms:
                axis.plot([row.floor_ms] * 2, [y - 0.4, y + 0.4], color="black")
        axis.set_yticks(range(len(members)), [row.name for row in reversed(members)], fontsize=7)
        axis.set_title(case, fontsize=8)
        axis.set_xlabel("ms; black: floor" if name is None else name, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
