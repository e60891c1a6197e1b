"""HTML that loads nothing from anywhere: pages, and a Float8Tensor in a notebook."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping
from contextlib import suppress
from html import escape
from importlib.resources import files

from torch import Tensor

from float8lab.arguments import check_instance, needs
from float8lab.inspect.plot import plot
from float8lab.inspect.statistics import stats
from float8lab.inspect.text import Grid
from float8lab.tables import html_table
from float8lab.tensor import Float8Tensor

__all__ = ["filled", "html", "page_of", "sections"]


@Float8Tensor._add_view
def html(x: Tensor, text: str = "") -> str:
    """A fragment of HTML: ``text``, statistics, and the picture of ``plot`` or, without matplotlib,
    the histogram of exponents as text.

    Args:
        x: as in ``stats``. For a DTensor, this rank's shard is shown.
        text: goes first, as it is spaced; escaped.
    """
    check_instance("text", text, str, "a string")
    statistics = stats(x, local=True)
    table = html_table((), statistics.rows())
    picture = f"<pre>{statistics.histogram('exponent')}</pre>"
    with suppress(ModuleNotFoundError):
        png = b64encode(plot(x)._repr_png_()).decode("ascii")
        picture = f"<img style='max-width:100%' alt='' src='data:image/png;base64,{png}'/>"
    first = f"<pre>{escape(text)}</pre>" if text else ""
    return f"<div>{first}{picture}<details><summary>statistics</summary>{table}</details></div>"


def sections(grids: Iterable[Grid]) -> str:
    """Tables as sections of a page."""
    return "\n".join(
        f"<section><h2>{escape(grid.title)}</h2><div class='scroll long'>"
        f"{html_table(grid.columns, grid.rows, grid.alarming)}</div></section>"
        for grid in grids
    )


def filled(template: str, replacements: Mapping[str, str]) -> str:
    """A template of this folder with parts in the places of ``<!-- name -->``.

    What is put in is not searched for places to fill.
    """
    text = files("float8lab.inspect").joinpath(template).read_text(encoding="utf-8")
    return re.sub(r"<!-- (\w+) -->", lambda place: replacements[place[1]], text)


def page_of(
    title: str, body: str, script: str, data: Mapping[str, object],
    columns: Mapping[str, str] = {},
) -> str:  # fmt: skip
    """A whole page, which a browser lets load nothing, with plotly and what its script reads.

    Args:
        title: of the page; escaped here.
        body: HTML of the page.
        script: the file of this folder that draws, from ``data``; ``charts.js`` stands before it.
        data: small, for JSON.
        columns: texts that the script decodes on demand, by name.

    Raises:
        ModuleNotFoundError: plotly, of the extra ``report``, is not installed.
    """
    with needs("a page", "plotly", "report"):
        from plotly.offline import get_plotlyjs

    texts = (
        f'<script type="text/plain" id="column-{escape(name)}">{text}</script>'
        for name, text in columns.items()
    )
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    replacements = {
        "title": escape(title),
        "body": body,
        "css": filled("page.css", {}),
        "data": text.replace("<", "\\u003c"),  # which could end the element
        "columns": "\n".join(texts),
        "plotly": _inline(_unwrapped(get_plotlyjs())),
        "charts": filled("charts.js", {}),
        "js": filled(script, {}),
    }
    return filled("page.html", replacements)


def _unwrapped(plotly: str) -> str:
    """plotly.js without the function that makes it a module of either kind, its license kept."""
    # Chromium reads a function that is passed on twice, once to skip it: 0.5 s for all of plotly. A
    # script that is built in another way stays as it is.
    start, end = plotly.find('"use strict";var Plotly='), plotly.rfind("\nreturn Plotly;\n}));")
    opening = plotly[: max(start, 0)]
    if end < 0 or not opening.rstrip().endswith("() => {"):
        return plotly
    license, _, wrapper = opening.partition("*/")
    if "function(root, factory)" not in wrapper:
        return plotly
    return f"{license}*/\n{plotly[start:end]}\n"


def _inline(script: str) -> str:
    """A script that can stand in HTML and is all ASCII: Chromium starts such a plotly 0.5 s sooner.

    Characters that are not ASCII, or would end the script element, are all in string literals, and
    are escaped there.
    """
    script = script.replace("</script", "<\\/script")
    return re.sub(r"[\u0080-\uffff]", lambda match: f"\\u{ord(match[0]):04x}", script)
