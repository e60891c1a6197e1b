"""Print tables, progress and errors to a terminal: with rich if it is installed, else as text.

Output to a file or a pipe is plain text, in which nothing is cut off or folded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from float8lab.arguments import printable
from float8lab.inspect.text import FOLDED, Grid

__all__ = ["add_output_options", "count", "fail", "present", "program_name", "progress_bar", "show"]


_STATUS = (
    r"(?<!\b0 )\b((?P<green>passed|native)|(?P<yellow>emulated|partly native|unsupported|missing)|"
    r"(?P<red>failed|FAILED))\b(?!:)"
)
"""Words that rich shows in the color of their group, except in "0 failed"."""


def program_name() -> str:
    """Return the program as it was called: the console command or ``python -m float8lab``."""
    return "float8lab" if Path(sys.argv[0]).stem == "float8lab" else "python -m float8lab"


def show(summary: str, grids: Sequence[Grid]) -> None:
    """Print a summary and tables to standard output."""
    if (rich := _rich() if sys.stdout.isatty() else None) is None:
        print("\n\n".join([summary, *map(str, grids)]))
        return
    console = rich.console.Console(highlight=False)
    text = rich.text.Text(summary)
    text.highlight_regex(_STATUS)
    console.print(text, soft_wrap=True)
    for grid in grids:
        columns = _fitting(grid, console.width)
        console.print()
        console.print(grid._replace(columns=columns, rows=[r[: len(columns)] for r in grid.rows]))
        if len(columns) < len(grid.columns):
            left = ", ".join(grid.columns[len(columns) :])
            console.print(f"(in a wider terminal also {left})", style="dim")


def _fitting(grid: Grid, width: int) -> Sequence[str]:
    """Return as many first columns as fit the width: rich would cut all of the columns short."""
    taken = 0
    for i, name in enumerate(grid.columns):
        taken += min(max(len(name), *(len(row[i]) for row in grid.rows)), FOLDED) + 2
        if taken > width and i > 1:
            return grid.columns[:i]
    return grid.columns


def count(text: str) -> int:
    """Return a whole number of at least 1 from its text.

    Raises:
        argparse.ArgumentTypeError: the text is no such number; a command prints this error.

    >>> count("3")
    3
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on; got {text!r}")
    return int(text)


def add_output_options(command: argparse.ArgumentParser, limit: int) -> None:
    """Let ``present`` run a command, and add the options that ``present`` reads."""
    rows = command.add_mutually_exclusive_group()
    text = f"rows of each table (default: {limit})"
    rows.add_argument("--limit", metavar="N", type=count, default=limit, help=text)
    rows.add_argument("--all", action="store_true", help="all rows")
    command.add_argument("--json", action="store_true", help="for programs; has all rows")
    command.set_defaults(run=present)


def present(options: argparse.Namespace) -> int:
    """Print the result of ``options.make(options)``, which has ``to_json``, ``summary`` and
    ``tables``: as JSON with all rows, or as text with some rows of each table.

    Returns the exit status: 1 if ``options.is_bad`` exists and ``options.is_bad(options, result)``
    is true, else 0; or 2, after a one-line message, if a file cannot be read or written.
    """
    program = f"{program_name()} {options.command}"
    try:
        report = options.make(options)
    except ValueError as error:  # this is a CheckpointError or a wrong argument
        return fail(program, error)
    except OSError as error:
        return fail(program, f"{error.filename}: {error.strerror}" if error.filename else error)
    if options.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        show(report.summary(), report.tables(None if options.all else options.limit))
    return 1 if "is_bad" in options and options.is_bad(options, report) else 0


@contextmanager
def progress_bar(title: str) -> Iterator[Any]:
    """Show a bar on standard error while the block runs, if that is a terminal and rich is there.
    Yields a function that takes the bytes done, the bytes in total and a name; None if no bar is
    shown."""
    if (rich := _rich() if sys.stderr.isatty() else None) is None:
        yield None
        return
    progress, console = rich.progress, rich.console.Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"), progress.BarColumn(),
        progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )  # fmt: skip
    with progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, size, name: bar.update(task, completed=done, total=size)


def fail(program: str, message: object) -> int:
    """Print an error as one line to standard error. Returns the exit status, 2."""
    with suppress(OSError):  # if standard error fails, no stream is left for a message
        print(f"{program}: error: {printable(' '.join(str(message).split()))}", file=sys.stderr)
    return 2


def _rich() -> Any:
    """Import the modules of rich that this file uses; return None if rich is not installed."""
    try:
        import rich.console
        import rich.progress
        import rich.text
    except ModuleNotFoundError:
        return None
    return rich
