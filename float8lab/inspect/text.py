"""Show statistics as text: summaries, bars, and tables that rich can print in a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from textwrap import shorten
from typing import Any, NamedTuple

from torch import Tensor

from float8lab.arguments import check_instance, check_size, printable
from float8lab.inspect.statistics import stats
from float8lab.tables import aligned, html_table
from float8lab.tensor import Float8Tensor
from float8lab.tensor.statistics import Histogram

__all__ = [
    "FOLDED", "Grid", "Printed", "bars", "bytes_text", "finite", "shown", "summary", "table",
]  # fmt: skip

FOLDED = 24
"""Width in characters beyond which rich may fold the cells of a column."""


class Grid(NamedTuple):
    """Text in rows and columns, with a title."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    alarming: Sequence[bool] = ()
    """Whether each row is shown in red; empty if none is."""
    note: str = ""
    """A line below the table."""
    left: int | None = None
    """How many columns, from the first, are aligned to the left; None means all of them."""

    def first(self, limit: int | None) -> Grid:
        """Return the first rows with printable cells, and a note of how many rows are left out.

        All rows are kept if ``limit`` is None. Empty columns are dropped.
        """
        check_size("limit", limit, optional=True)
        used = [i for i in range(len(self.columns)) if any(row[i] for row in self.rows)]
        columns = [self.columns[i] for i in used]
        rows = [[printable(row[i]) for i in used] for row in self.rows[:limit]]
        left = len(self.rows) - len(rows)
        note = f"... and {left} more" if left else ""
        return self._replace(columns=columns, rows=rows, note=note)

    def __repr__(self) -> str:
        columns = len(self.columns) if self.left is None else self.left
        heads = [self.columns] if any(self.columns) else []
        lines = aligned([*heads, *self.rows], left=columns)
        return "\n".join([self.title, *(f"  {line}" for line in lines), *filter(None, [self.note])])

    def __rich__(self) -> object:
        """Return a table that rich prints, with long cells folded where the terminal is narrow."""
        from rich.box import SIMPLE, SIMPLE_HEAD
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        has_heads = any(self.columns)
        table = Table(
            show_header=has_heads, box=SIMPLE_HEAD if has_heads else SIMPLE, pad_edge=False,
            padding=(0, 1, 0, 0),
        )  # fmt: skip
        for i, name in enumerate(self.columns):
            longest = max((len(row[i]) for row in self.rows), default=0)
            table.add_column(name, overflow="fold", no_wrap=longest <= FOLDED)
            if self.left is not None and i >= self.left:
                table.columns[i].justify = "right"
        for i, cells in enumerate(self.rows):
            is_red = self.alarming and self.alarming[i]
            table.add_row(*map(Text, cells), style="red" if is_red else None)
        note = [Text(self.note)] if self.note else []
        return Group(Text(self.title, style="bold"), table, *note)

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        table = html_table(self.columns, self.rows, self.alarming)
        return f"<h4>{escape(self.title)}</h4>{table}<p>{self.note}</p>"


def shown(grids: Iterable[Grid], limit: int | None) -> list[Grid]:
    """Cut each table that has rows to its first ``limit`` rows by ``Grid.first``."""
    check_size("limit", limit, optional=True)
    return [grid.first(limit) for grid in grids if grid.rows]


def finite(value: Any, stand_in: Callable[[float], object] = lambda number: None) -> Any:
    """Replace NaN and infinities, which JSON does not have, by None or by ``stand_in(number)``."""
    if isinstance(value, dict):
        return {key: finite(element, stand_in) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(element, stand_in) for element in value]
    return stand_in(value) if isinstance(value, float) and not math.isfinite(value) else value


class Printed:
    """A result that prints as its summary and its tables, and whose repr is one line."""

    def summary(self) -> str:
        """Return the result in a few lines."""
        raise NotImplementedError

    def tables(self, limit: int | None = None) -> list[Grid]:
        """Return the result's tables, each cut to its first ``limit`` rows; None keeps all."""
        return []

    def __str__(self) -> str:
        return "\n\n".join([self.summary(), *map(str, self.tables())])

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {shorten(self.summary(), 160)}>"

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks show."""
        tables = "".join(grid._repr_html_() for grid in self.tables())
        return f"<pre>{escape(self.summary())}</pre>{tables}"


def bars(histogram: Histogram, width: int = 40) -> str:
    """Draw a histogram as lines of text, without the empty bins at either side.

    >>> print(float8lab.inspect.bars(float8lab.quantize(torch.ones(3)).histogram("exponent")))
    2^8 ######################################## 3
    """
    check_instance("histogram", histogram, Histogram, "a Histogram")
    check_size("width", width, minimum=1)
    rows = _trimmed(histogram)
    most = max((count for _, count in rows), default=0)
    labels = max((len(label) for label, _ in rows), default=0)
    lines = [
        (f"{label:>{labels}}", "#" * -(-count * width // most), str(count)) for label, count in rows
    ]
    return "\n".join(" ".join(filter(None, line)) for line in lines)


def summary(x: Tensor) -> str:
    """Return statistics and the histogram of exponents as text, which takes no extra package.

    For a DTensor, the text describes this rank's shard.
    """
    statistics = stats(x, local=True)
    drawn = bars(statistics.histogram("exponent"))
    return "\n".join(aligned(statistics.rows(), left=2)) + (f"\n\n{drawn}" if drawn else "")


@Float8Tensor._add_view
def table(x: Tensor) -> Grid:
    """Return a table of statistics with a histogram; ``rich.print`` shows it in color.

    The histogram is of exponents. For a DTensor, the table describes this rank's shard.
    """
    statistics = stats(x, local=True)
    rows, drawn = statistics.rows(), bars(statistics.histogram("exponent"))
    return Grid("Float8Tensor", ("", ""), rows, [name in ("nan", "inf") for name, _ in rows], drawn)


def _trimmed(histogram: Histogram) -> list[tuple[str, int]]:
    pairs = list(zip(histogram.values.tolist(), histogram.counts.tolist(), strict=True))
    if histogram.by == "code":
        return [(f"{value:g}", count) for value, count in pairs if count]
    rows = [(f"2^{value}", count) for value, count in pairs]
    used = [i for i, (_, count) in enumerate(rows) if count]
    zeros = [("0", histogram.zero)] if histogram.zero else []
    return zeros + (rows[used[0] : used[-1] + 1] if used else [])


def bytes_text(size: int) -> str:
    """Format a number of bytes in a decimal unit.

    >>> from float8lab.inspect.text import bytes_text
    >>> bytes_text(0), bytes_text(999), bytes_text(123_456), bytes_text(2_500_000_000)
    ('-', '999 B', '123.5 kB', '2.50 GB')
    """
    for unit, factor, digits in (("GB", 10**9, 2), ("MB", 10**6, 1), ("kB", 10**3, 1)):
        if size >= factor:
            return f"{size / factor:.{digits}f} {unit}"
    return f"{size} B" if size else "-"
