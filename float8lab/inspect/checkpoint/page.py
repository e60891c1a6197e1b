"""A report on a checkpoint as one HTML page, which looks as that of a training run does."""

from __future__ import annotations

from html import escape

from float8lab.arguments import printable
from float8lab.inspect.checkpoint.report import CheckpointReport
from float8lab.inspect.html import filled, page_of, sections

__all__ = ["page"]

PICTURES = 1000
"""Quantized tensors in the chart: the first ones, as the report sorts them."""


def page(report: CheckpointReport) -> str:
    """The page, all of whose tensors are listed; what it shows of names and notes is escaped."""
    title, *lines = report.summary().splitlines()
    weights = {
        printable(row.name): row.measured.stats.histogram("exponent")
        for row in report.rows
        if row.measured.stats is not None
    }
    chosen = dict(list(weights.items())[:PICTURES])
    count = "all" if len(chosen) == len(weights) else f"the first {PICTURES} of {len(weights)}"
    replacements = {
        "title": escape(title),
        "facts": "<br>".join(map(escape, lines)),
        "count": f"{count} quantized tensors",
        "tables": sections(report.tables(None)),
    }
    data = {
        "names": list(chosen),
        "exponents": [histogram.values.tolist() for histogram in chosen.values()],
        "counts": [[h.zero, *h.counts.tolist()] for h in chosen.values()],
    }
    return page_of(title, filled("checkpoint/body.html", replacements), "checkpoint/page.js", data)
