"""HTML that loads nothing from anywhere: pages, and a Float8Tensor in a notebook by inline SVG."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files

import torch
from torch import Tensor

from float8lab.arguments import check_instance
from float8lab.tables import html_table
from float8lab.tensor import Float8Tensor
from float8lab.tensor.statistics import Histogram, blocks, stats

__all__ = ["exponent_bars", "filled", "heat_cells", "html", "page_of", "svg"]

MOST_CELLS = 32
"""Rows and columns of a heat map; more blocks than that share a cell, which shows the largest."""


@Float8Tensor._add_view
def html(x: Tensor, text: str = "") -> str:
    """A fragment of HTML: ``text``, statistics, histogram of exponents, heat map of scales.

    Args:
        x: as in ``stats``. For a DTensor, this rank's shard is shown.
        text: goes first, as it is spaced; escaped.
    """
    check_instance("text", text, str, "a string")
    statistics = stats(x, local=True)
    table = html_table((), statistics.rows())
    pictures = exponent_bars(statistics.histogram("exponent")) + _heat_map(blocks(x))
    first = f"<pre>{escape(text)}</pre>" if text else ""
    return f"<div>{first}<details><summary>statistics</summary>{table}</details>" + (
        f"<div style='display:flex;gap:24px;margin-top:8px'>{pictures}</div></div>"
    )


def filled(template: str, replacements: Mapping[str, str]) -> str:
    """A template of this folder with parts in the places of ``<!-- name -->``.

    What is put in is not searched for places to fill.
    """
    text = files("float8lab.inspect").joinpath(template).read_text(encoding="utf-8")
    return re.sub(r"<!-- (\w+) -->", lambda place: replacements[place[1]], text)


def page_of(title: str, body: str, *, css: str, head: str = "") -> str:
    """A whole page, which a browser lets load nothing; the title is escaped here."""
    replacements = {"title": escape(title), "body": body, "css": css, "head": head}
    return filled("page.html", replacements)


def heat_cells(scales: Tensor) -> Tensor:
    """log2 of scales as a matrix of at most ``MOST_CELLS`` rows and columns, the largest of each.

    Scales that have no logarithm (0, NaN) are NaN.
    """
    logs = scales.float().log2()
    logs = logs.masked_fill(~logs.isfinite(), -math.inf)
    rows, columns = (min(n, MOST_CELLS) for n in logs.shape)
    if logs.numel():
        logs = torch.nn.functional.adaptive_max_pool2d(logs[None, None], (rows, columns))[0, 0]
    return logs.masked_fill(logs == -math.inf, math.nan).cpu()


def svg(width: int, height: int, title: str, body: str) -> str:
    """A picture of SVG elements under a title."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height + 34}' "
        "font-family='sans-serif' font-size='10' fill='currentColor'>"
        f"<text x='0' y='10'>{escape(title)}</text><g transform='translate(0 16)'>{body}</g></svg>"
    )


def _power(exponent: str) -> str:
    """A power of two in SVG."""
    return f"2<tspan dy='-4' font-size='8'>{exponent.replace('-', '&#8722;')}</tspan>"


def exponent_bars(histogram: Histogram) -> str:
    """A histogram by exponent as SVG."""
    exponents, counts = histogram.values.tolist(), histogram.counts.tolist()
    most, step, height = max(counts) or 1, 10, 80
    elements = []
    for i, (exponent, count) in enumerate(zip(exponents, counts, strict=True)):
        tall = height * count / most
        elements.append(
            f"<rect x='{i * step}' y='{height - tall:.1f}' width='{step - 2}' height='{tall:.1f}' "
            f"fill='#3572a5'><title>2^{exponent}: {count}</title></rect>"
        )
    legend = f"<text x='0' y='{height + 14}'>{_power(str(exponents[0]))}</text>"
    legend += (
        f"<text x='{len(counts) * step}' y='{height + 14}' text-anchor='end'>"
        f"{_power(str(exponents[-1]))}</text>"
    )
    return svg(len(counts) * step, height, "codes by exponent", "".join(elements) + legend)


def _heat_map(scales: Tensor) -> str:
    cells = heat_cells(scales)
    if not cells.numel():
        return ""
    values = [v for v in cells.flatten().tolist() if not math.isnan(v)]
    low, top = (min(values), max(values)) if values else (0.0, 0.0)
    # Few rows or columns are stretched, or there would be little to see.
    tall, wide = (max(4, 128 // n) for n in cells.shape)
    elements = []
    for i, row in enumerate(cells.tolist()):
        for j, value in enumerate(row):
            share = 0.5 if top == low else (value - low) / (top - low)
            has_value = not math.isnan(value)
            # From dark blue to yellow.
            color = (
                f"hsl({240 - 180 * share:.0f},70%,{30 + 35 * share:.0f}%)" if has_value else "#888"
            )
            label = f"2^{value:.2f}" if has_value else "no logarithm"
            elements.append(
                f"<rect x='{j * wide}' y='{i * tall}' width='{wide}' height='{tall}' "
                f"fill='{color}'><title>{label}</title></rect>"
            )
    rows, columns = cells.shape
    legend = f"{_power(f'{low:.1f}')}<tspan dy='4'> (dark) to </tspan>{_power(f'{top:.1f}')}"
    words = f"<text x='0' y='{rows * tall + 14}'>{legend}</text>"
    title = f"scales {tuple(scales.shape)}"
    return svg(max(columns * wide, 110), rows * tall, title, "".join(elements) + words)
