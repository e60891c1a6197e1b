"""Show a report on a checkpoint as one HTML page, in the style of a training run's page."""

from __future__ import annotations

from html import escape

from float8lab.arguments import printable
from float8lab.inspect.checkpoint.report import CheckpointReport
from float8lab.inspect.html import page_of, sections

__all__ = ["page"]

PICTURES = 1000
"""Most quantized tensors in the chart, which shows the first in the order of the report."""


def page(report: CheckpointReport) -> str:
    """Return a page that lists all tensors of the report; its names and notes are escaped."""
    title, *lines = report.summary().splitlines()
    weights = {
        printable(row.name): row.measured.stats.histogram("exponent")
        for row in report.rows
        if row.measured.stats is not None
    }
    chosen = dict(list(weights.items())[:PICTURES])
    count = "all" if len(chosen) == len(weights) else f"the first {PICTURES} of {len(weights)}"
    texts = {
        "facts": "<br>".join(map(escape, lines)),
        "count": f"{count} quantized tensors",
        "tables": sections(report.tables(None)),
    }
    data = {
        "names": list(chosen),
        "exponents": [histogram.values.tolist() for histogram in chosen.values()],
        "counts": [[h.zero, *h.counts.tolist()] for h in chosen.values()],
    }
    return page_of("checkpoint", title, texts, data)
