"""Print tables, progress and errors to a terminal, with rich if it is installed and else plainly.

Output to a file or a pipe is plain text, in which nothing is cut off and nothing is folded.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from float8lab.arguments import printable
from float8lab.inspect.text import Grid, rich_table

__all__ = ["add_output_options", "count", "fail", "present", "program_name", "progress_bar", "show"]

_FOLDED = {"tensor": 30, "why": 24, "A -> B": 16, "format": 10, "dtype": 10}
"""Columns whose cells may be folded, with the least width in characters that is left to each."""


def program_name() -> str:
    """The program as it was called: the console command, or ``python -m float8lab``."""
    return "float8lab" if Path(sys.argv[0]).stem == "float8lab" else "python -m float8lab"


def show(summary: str, grids: Sequence[Grid]) -> None:
    """Print a summary and tables to standard output."""
    rich = _rich() if sys.stdout.isatty() else None
    if rich is None:
        print("\n\n".join([summary, *map(str, grids)]))
        return
    console = rich.console.Console(highlight=False)
    console.print(rich.text.Text(summary))
    for grid in grids:
        columns = _fitting(grid, console.width)
        longest = [max((len(row[i]) for row in grid.rows), default=0) for i in range(len(columns))]
        table = rich_table(
            [cells[: len(columns)] for cells in grid.rows],
            # Rich folds the widest columns first; those that are short enough stay whole.
            {
                name: {"no_wrap": size <= _FOLDED.get(name, math.inf)}
                for name, size in zip(columns, longest, strict=True)
            },
            styles=["red" if alarming else "" for alarming in grid.alarming],
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        console.print()
        console.print(rich.text.Text(grid.title, style="bold"))
        console.print(table, end="")
        if grid.note:
            console.print(grid.note)
        if len(columns) < len(grid.columns):
            left = ", ".join(grid.columns[len(columns) :])
            console.print(f"(in a wider terminal also {left})", style="dim")


def _fitting(grid: Grid, width: int) -> Sequence[str]:
    """The first columns, as many as fit beside each other."""
    taken = 0
    for i, name in enumerate(grid.columns):
        natural = max(len(name), *(len(row[i]) for row in grid.rows))
        taken += min(natural, _FOLDED.get(name, natural)) + 2
        if taken > width and i > 1:
            return grid.columns[:i]
    return grid.columns


@runtime_checkable
class Presentable(Protocol):
    """A result that a command prints."""

    def to_json(self) -> dict[str, object]: ...

    def summary(self) -> str: ...

    def tables(self, limit: int | None) -> list[Grid]: ...


def count(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is none, which a command prints as a wrong option.

    >>> count("3")
    3
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on; got {text!r}")
    return int(text)


_Report = TypeVar("_Report", bound=Presentable)


def add_output_options(command: argparse.ArgumentParser, limit: int) -> None:
    """Add the options of how ``present`` prints."""
    rows = command.add_mutually_exclusive_group()
    text = f"rows of each table (default: {limit})"
    rows.add_argument("--limit", metavar="N", type=count, default=limit, help=text)
    rows.add_argument("--all", action="store_true", help="all rows")
    command.add_argument("--json", action="store_true", help="for programs; has all rows")


def present(
    options: argparse.Namespace,
    make: Callable[[], _Report],
    is_bad: Callable[[_Report], bool] = lambda report: False,
) -> int:
    """Make and print a command's result: JSON with all rows, or text with some of each table.

    Returns the exit status: 1 of a result that ``is_bad``, else 0; or 2, after a one-line message,
    if a file cannot be read or written.
    """
    program = f"{program_name()} {options.command}"
    try:
        report = make()
    except ValueError as error:  # a CheckpointError, or a wrong argument
        return fail(program, error)
    except OSError as error:
        return fail(program, f"{error.filename}: {error.strerror}" if error.filename else error)
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show(report.summary(), report.tables(None if options.all else options.limit))
    return int(is_bad(report))


@contextmanager
def progress_bar(title: str) -> Iterator[Any]:
    """Show a bar on standard error while the block runs, if standard error is a terminal.
    The block is given a function of the bytes done, the bytes in all and a name; None if standard
    error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    rich = _rich()
    if rich is None:
        try:
            yield _Counter(title)
        finally:
            print("\r\033[K", end="", file=sys.stderr)
        return
    progress = rich.progress
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    console = rich.console.Console(stderr=True)
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, size, name: bar.update(task, completed=done, total=size)


class _Counter:
    """Percent done, written over itself."""

    def __init__(self, title: str) -> None:
        self.what, self.shown = title, -1

    def __call__(self, done: int, size: int, name: str) -> None:
        percent = 100 * done // max(size, 1)
        if percent != self.shown:
            self.shown = percent
            print(f"\r{self.what} {percent:3d}%", end="", file=sys.stderr, flush=True)


def fail(program: str, message: object) -> int:
    """Print an error as one line to standard error. Returns the exit status, 2."""
    with suppress(OSError):  # no stream is left to tell of it
        print(f"{program}: error: {printable(' '.join(str(message).split()))}", file=sys.stderr)
    return 2


def _rich() -> Any:
    """The parts of rich that are used here; None if it is not installed."""
    try:
        import rich.console
        import rich.progress
        import rich.text
    except ModuleNotFoundError:
        return None
    return rich
