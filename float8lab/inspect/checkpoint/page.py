"""A report on a checkpoint as one HTML page: inline CSS and SVG, nothing loaded from anywhere."""

from __future__ import annotations

from html import escape

from float8lab.arguments import printable
from float8lab.inspect.checkpoint.report import CheckpointReport
from float8lab.inspect.html import exponent_bars, page_of
from float8lab.tables import html_table

__all__ = ["page"]

PICTURES = 100
"""Quantized tensors with a histogram: the first ones, as the report sorts them."""

_STYLE = """\
body { font-family: sans-serif; margin: 2em; color: #222; background: #fff }
table { border-collapse: collapse; margin: 0 0 1.5em }
th, td { padding: 2px 10px; text-align: left; vertical-align: baseline }
tr { border-bottom: 1px solid #ddd }
td:first-child { font-family: monospace; overflow-wrap: anywhere }
.wrong td:last-child { color: #b00020; font-weight: bold }
figure { display: inline-block; width: 260px; margin: 0 24px 16px 0; vertical-align: top }
figcaption { font-family: monospace; font-size: 12px; overflow-wrap: anywhere }
"""


def page(report: CheckpointReport) -> str:
    """The page, all of whose tensors are listed; what it shows of names and notes is escaped."""
    title, *lines = report.summary().splitlines()
    sections = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lines)]
    for grid in report.tables(None):
        table = html_table(grid.columns, grid.rows, grid.alarming)
        sections.append(f"<h2>{escape(grid.title)}</h2>\n{table}")
    pictures = []
    weights = [row for row in report.rows if row.measured.stats is not None]
    for row in weights[:PICTURES]:
        assert row.measured.stats is not None
        drawn = exponent_bars(row.measured.stats.histogram("exponent"))
        name = escape(printable(row.name))
        caption = f"<figcaption>{name}<br>{escape(row.format_name)}</figcaption>"
        pictures.append(f"<figure>{drawn}{caption}</figure>")
    if pictures:
        count = f"the first {PICTURES} of {len(weights)}" if len(weights) > PICTURES else "all"
        sections += [f"<h2>Codes by exponent, {count} of the quantized</h2>", *pictures]
    return page_of(title, "".join(sections), css=_STYLE)
