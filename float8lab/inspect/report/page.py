"""The HTML file of a watched run: template, styles, script, chart library and data in one."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from float8lab.arguments import check_instance, check_path, needs
from float8lab.checkpoints.replacing import write_text
from float8lab.inspect.html import filled, page_of
from float8lab.inspect.report.data import embed
from float8lab.inspect.watch.findings import diagnose
from float8lab.inspect.watch.records import Log

__all__ = ["report"]


def report(log: Log, path: str | Path, *, title: str = "FP8 training report") -> Path:
    """Write the log of a training run as one HTML file.

    The page begins with the verdict of ``diagnose``. It shows heat maps of underflow, saturation,
    SQNR and more by layer and step, the layers that lose most, each layer's curves and histograms,
    the loss, the recipe and the conversion report. The file needs no network and no other file; its
    charts are drawn by plotly, of which it holds a copy (4.8 MB). A long run is thinned as the page
    then says: see ``docs/report.md``.

    Args:
        log: a log by ``float8lab.inspect.watch``. An empty one gives a page that says so.
        path: the file to write; its folders are made, a file there is replaced by a whole one.
        title: title of the page.

    Returns:
        ``path``.

    Raises:
        ModuleNotFoundError: plotly, of the extra ``report``, is not installed.
    """
    check_instance("log", log, Log, "the log of a watch")
    check_path("path", path)
    check_instance("title", title, str, "a string")
    with needs("report", "plotly", "report"):
        from plotly.offline import get_plotlyjs

    data = embed(log)
    replacements = {
        "title": escape(title),
        "recipe": escape(log.recipe or "not recorded"),
        "verdict": escape(diagnose(log).summary()).replace("\n", "<br>"),
        "about": "".join(
            f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
            for name, value in log.about.items()
        ),
        "conversion": escape(log.conversion or "not recorded"),
        "plotly": _inline(_unwrapped(get_plotlyjs())),
        "data": data.json(),
        "columns": "\n".join(
            f'<script type="text/plain" id="column-{escape(name)}">{text}</script>'
            for name, text in data.columns.items()
        ),
        "js": filled("report/page.js", {}),
    }
    head = '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
    css = filled("report/page.css", {})
    html = page_of(title, filled("report/body.html", replacements), css=css, head=head)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path


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
