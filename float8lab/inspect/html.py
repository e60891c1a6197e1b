"""Make self-contained HTML: whole pages, and a Float8Tensor in a notebook."""

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

__all__ = ["html", "page_of", "sections"]


@Float8Tensor._add_view
def html(x: Tensor, text: str = "") -> str:
    """Return a fragment of HTML: ``text``, statistics, and the picture that ``plot`` draws.
    Without matplotlib, the histogram of exponents as text takes the place of the picture.

    Args:
        x: as in ``stats``. For a DTensor, this rank's shard is shown.
        text: stands at the top, with its white space kept; it is escaped here.
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
    """Return the HTML of tables, each as a section of a page."""
    return "\n".join(
        f"<section><h2>{escape(grid.title)}</h2><div class='scroll long'>"
        f"{html_table(grid.columns, grid.rows, grid.alarming)}</div></section>"
        for grid in grids
    )


def _filled(template: str, replacements: Mapping[str, str]) -> str:
    """Return a template of this folder with each ``<!-- name -->`` replaced by that text.

    Inserted text is not searched for further ``<!-- name -->``.
    """
    text = files("float8lab.inspect").joinpath(template).read_text(encoding="utf-8")
    return re.sub(r"<!-- (\w+) -->", lambda match: replacements[match[1]], text)


def page_of(
    folder: str, title: str, texts: Mapping[str, str], data: Mapping[str, object],
    columns: Mapping[str, str] = {},
) -> str:  # fmt: skip
    """Return a whole page with plotly and all data; a browser does not let it load anything else.

    Args:
        folder: the folder here with the page's ``body.html``, and with ``page.js``, which draws
            ``data``; ``charts.js`` is loaded before it.
        title: title of the page; it is escaped here.
        texts: HTML for each ``<!-- name -->`` of the body, besides the title.
        data: small data, which is written as JSON.
        columns: texts by name, which the script decodes on demand.

    Raises:
        ModuleNotFoundError: plotly, of the extra ``report``, is not installed.
    """
    with needs("a page", "plotly", "report"):
        from plotly.offline import get_plotlyjs

    scripts = (
        f'<script type="text/plain" id="column-{escape(name)}">{text}</script>'
        for name, text in columns.items()
    )
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    replacements = {
        "title": escape(title),
        "body": _filled(f"{folder}/body.html", {"title": escape(title), **texts}),
        "css": _filled("page.css", {}),
        "data": text.replace("<", "\\u003c"),  # "<" could end the element
        "columns": "\n".join(scripts),
        "plotly": _inline(_unwrapped(get_plotlyjs())),
        "charts": _filled("charts.js", {}),
        "js": _filled(f"{folder}/page.js", {}),
    }
    return _filled("page.html", replacements)


def _unwrapped(plotly: str) -> str:
    """Remove the function around plotly.js that makes it a UMD module; keep its license."""
    # Chromium parses a function that is passed as an argument twice, first to skip it: 0.5 s for
    # all of plotly. A script that is built in another way is returned unchanged.
    start, end = plotly.find('"use strict";var Plotly='), plotly.rfind("\nreturn Plotly;\n}));")
    opening = plotly[: max(start, 0)]
    if end < 0 or not opening.rstrip().endswith("() => {"):
        return plotly
    license, _, wrapper = opening.partition("*/")
    if "function(root, factory)" not in wrapper:
        return plotly
    return f"{license}*/\n{plotly[start:end]}\n"


def _inline(script: str) -> str:
    """Escape a script for HTML, as pure ASCII: Chromium starts an ASCII plotly 0.5 s sooner.

    Characters that are not ASCII, or that would end the script element, occur only in string
    literals, where they can be escaped.
    """
    script = script.replace("</script", "<\\/script")
    return re.sub(r"[\u0080-\uffff]", lambda match: f"\\u{ord(match[0]):04x}", script)
