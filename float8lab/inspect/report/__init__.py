"""Write a watched run as one HTML file with its styles, scripts, chart library and data."""

from __future__ import annotations

from html import escape
from pathlib import Path

from float8lab.arguments import check_instance, check_path
from float8lab.checkpoints.replacing import write_text
from float8lab.inspect.html import page_of, sections
from float8lab.inspect.report.data import embed, losses
from float8lab.inspect.watch.findings import diagnose
from float8lab.inspect.watch.records import Log
from float8lab.inspect.watch.runs import check_names_of_runs, compare

__all__ = ["report"]


def report(
    log: Log,
    path: str | Path,
    *,
    title: str = "FP8 training report",
    baseline: Log | None = None,
    names: tuple[str, str] | None = None,
) -> Path:
    """Write the log of a training run as one HTML file.

    The page begins with the verdict of ``diagnose``. It shows heat maps of underflow, saturation,
    SQNR and more by layer and step, the layers that lose most, each layer's curves and histograms,
    the loss, the recipe and the conversion report. The file needs no network and no other file; it
    holds a copy of plotly (4.8 MB), which draws the charts. The page of a long run leaves out data,
    and then says so: see ``docs/report.md``.

    Args:
        log: a log by ``float8lab.inspect.watch``. The page of an empty log says that it is empty.
        path: the file to write, whose folders are made; an old page there is replaced at the end.
        title: title of the page.
        baseline: the log of another run, for example in bfloat16: the page shows both losses, and
            ``compare(baseline, log)``.
        names: names of the baseline and of this run; None takes their recipes.

    Returns:
        ``path``.

    Raises:
        FileExistsError: ``path`` is a file other than a page.
        ModuleNotFoundError: plotly, of the extra ``report``, is not installed.
    """
    check_instance("log", log, Log, "the log of a watch")
    check_path("path", path)
    check_instance("title", title, str, "a string")
    check_instance("baseline", baseline, Log, "the log of a watch", optional=True)
    check_names_of_runs(names)
    (meta, columns), comparison = embed(log), ""
    if baseline is not None:
        runs = compare(baseline, log, names=names)
        named = dict(zip(("name", "log"), runs.names, strict=True))
        meta["baseline"] = {**named, "loss": losses(baseline)}
        facts, tables = escape(runs.summary()).replace("\n", "<br>"), runs.tables(None)[-1:]
        comparison = f"<section><h2>Two runs</h2>{facts}</section>{sections(tables)}"
    facts_of_run = (map(escape, fact) for fact in log.about.items())
    texts = {
        "recipe": escape(log.recipe or "not recorded"),
        "verdict": escape(diagnose(log).summary()).replace("\n", "<br>"),
        "about": "".join("<div><dt>{}</dt><dd>{}</dd></div>".format(*f) for f in facts_of_run),
        "comparison": comparison,
        "conversion": escape(log.conversion or "not recorded"),
    }
    html = page_of("report", title, texts, meta, columns)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, html)
    return path
