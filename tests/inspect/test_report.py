"""Tests of the report's HTML file: it embeds the log and refers to nothing outside itself."""

import json
import math
import re
import sys
import zlib
from array import array
from base64 import b64decode
from html import unescape

import pytest

from benchmarks.browser import sample
from float8lab.inspect import report
from float8lab.inspect.html import _unwrapped
from float8lab.inspect.report import data as embedding
from float8lab.inspect.watch.records import Log, Record, Step

SCRIPT = re.compile(r"<script([^>]*)>(.*?)</script>", re.S)
HOSTILE = "</script><script>alert(1)</script><!-- <b>&amp;"


def record(step=0, layer="a", operand="x", **values):
    fields = dict.fromkeys(embedding.FIELDS, 0.0) | {"nan": 0, "inf": 0, "elements": 8}
    return Record(step=step, layer=layer, operand=operand, **(fields | values))


def scripts_by_id(page):
    """The text of each script element by its id."""
    texts = {}
    for attributes, text in SCRIPT.findall(page):
        name = re.search(r'id="([^"]*)"', attributes)
        texts[unescape(name[1]) if name else len(texts)] = text
    return texts


class Page:
    """The parts of the file as a browser reads them."""

    def __init__(self, log, path, **options):
        report(log, path, **options)
        self.text = path.read_text(encoding="utf-8")
        self.scripts = scripts_by_id(self.text)
        self.meta = json.loads(self.scripts["data"])

    def column(self, name):
        values = array("f", zlib.decompress(b64decode(self.scripts[f"column-{name}"])))
        if sys.byteorder == "big":
            values.byteswap()
        return values

    def field(self, record, name):
        cells = len(self.meta["cells"]["first"])
        row = self.meta["layers"].index(record.layer)
        cell = self.meta["cells"]["first"].index(record.step)
        return self.column(f"{record.operand}-{name}")[row * cells + cell]


@pytest.fixture(autouse=True)
def _needs_plotly():
    pytest.importorskip("plotly")


def float32(value):
    return array("f", [math.nan if value is None else value])[0]


def equal_or_both_nan(a, b):
    return a == b or (math.isnan(a) and math.isnan(b))


def test_embedded_fields_equal_the_records(tmp_path):
    log = sample(blocks=2, steps=20, every=3)
    page = Page(log, tmp_path / "report.html")
    assert page.meta["layers"] == log.layers
    assert page.meta["operands"] == ["x", "w", "dy"]
    assert page.meta["cells"]["first"] == page.meta["cells"]["last"] == list(range(0, 20, 3))
    columns = {
        (operand, name): page.column(f"{operand}-{name}")
        for operand in ("x", "w", "dy")
        for name in embedding.FIELDS
    }
    steps, filled = page.meta["cells"]["first"], 0
    for entry in log.records:
        index = log.layers.index(entry.layer) * len(steps) + steps.index(entry.step)
        for name in embedding.FIELDS:
            expected = float32(getattr(entry, name))
            assert equal_or_both_nan(columns[entry.operand, name][index], expected), (entry, name)
            filled += 1
    assert filled == sum(len(values) for values in columns.values())


def test_embedded_histograms_equal_the_records(tmp_path):
    log = sample(blocks=1, steps=12)
    page = Page(log, tmp_path / "report.html")
    histograms = page.meta["histograms"]
    assert histograms["steps"] == list(range(12))
    assert (histograms["low"], histograms["high"]) == (-16, 15)
    width = histograms["high"] - histograms["low"] + 1
    for entry in log.records:
        counts = page.column(f"{entry.operand}-exponents-{log.layers.index(entry.layer)}")
        start = histograms["steps"].index(entry.step) * width
        histogram = dict(
            zip(range(histograms["low"], histograms["high"] + 1), counts[start:], strict=False)
        )
        assert {e: int(n) for e, n in histogram.items() if n} == {
            e: n for e, n in entry.exponents.items() if n
        }


def test_absent_values_are_nan_and_nonfinite_values_are_kept(tmp_path):
    log = Log(
        layers=["a", "b"],
        records=[
            record(step=0, layer="a", amax=math.inf, inf=3, sqnr=None, staleness=None),
            record(step=5, layer="a", amax=math.nan, nan=2, sqnr=math.inf),
            record(step=5, layer="late", operand="other", sqnr=20.0),
        ],
        steps=[Step(0, loss=math.nan), Step(3), Step(5, loss=1.5)],
    )
    page = Page(log, tmp_path / "report.html")
    assert page.meta["layers"] == ["a", "b", "late"]
    assert page.meta["operands"] == ["x", "other"]
    assert page.meta["loss"] == {"steps": [0, 5], "values": [None, 1.5]}
    assert page.field(log.records[0], "amax") == math.inf
    assert math.isnan(page.field(log.records[1], "amax"))
    assert page.field(log.records[1], "sqnr") == math.inf
    assert math.isnan(page.field(log.records[0], "sqnr"))
    # A step without a record has no number of elements either.
    assert math.isnan(page.field(record(step=0, layer="b"), "elements"))
    assert math.isnan(page.field(record(step=0, layer="late", operand="other"), "elements"))
    assert page.meta["histograms"]["steps"] == []
    first, second = page.meta["summary"]
    assert first["nonfinite"] == [5, 2, 0]
    assert first["sqnr"] is None
    assert second["sqnr"] == [20.0, 20.0, 5]


def test_an_empty_log_has_a_page(tmp_path):
    page = Page(Log(), tmp_path / "new" / "report.html")
    assert page.meta["cells"]["first"] == []
    assert page.meta["summary"] == []


def test_summary_has_the_mean_the_worst_value_and_its_step(tmp_path):
    log = Log(
        layers=["a"],
        records=[
            record(step=2, flushed=0.25, sqnr=30.0, staleness=-1.0),
            record(step=4, flushed=0.5, sqnr=20.0, staleness=None),
            record(step=6, flushed=0.0, sqnr=None, staleness=-2.0),
        ],
    )
    (row,) = Page(log, tmp_path / "report.html").meta["summary"]
    assert row["flushed"] == [0.25, 0.5, 4]
    assert row["sqnr"] == [25.0, 20.0, 4]
    assert row["staleness"] == [-1.5, -1.0, 2]
    assert row["nonfinite"] is None


def test_steps_of_a_long_run_share_cells_that_hold_the_worst_value(tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "MOST_CELLS", 4)
    monkeypatch.setattr(embedding, "MOST_COUNTS", 6)
    monkeypatch.setattr(embedding, "MOST_LOSSES", 3)
    statistics = [(0.1, 30.0), (0.4, 20.0), (0.2, None), (0.3, 25.0), (0.0, 28.0)]
    records = [
        record(step=10 * i, flushed=flushed, sqnr=sqnr, exponents={0: i + 1, 1: 1})
        for i, (flushed, sqnr) in enumerate(statistics)
    ]
    steps = [Step(step, loss=float(step)) for step in range(41)]
    page = Page(Log(layers=["a"], records=records, steps=steps), tmp_path / "report.html")
    assert page.meta["cells"] == {"first": [0, 20, 40], "last": [10, 30, 40]} | {
        "stride": 2,
        "steps": 5,
    }
    assert list(page.column("x-flushed")) == [float32(v) for v in (0.4, 0.3, 0.0)]
    assert list(page.column("x-sqnr")) == [20.0, 25.0, 28.0]
    assert page.meta["histograms"]["steps"] == [0, 20, 40]
    assert list(page.column("x-exponents-0")) == [1, 1, 3, 1, 5, 1]
    assert page.meta["loss"]["steps"] == [0, 20, 40]
    assert page.meta["summary"][0]["flushed"][1:] == [0.4, 10]  # of all steps, not of one per cell


def test_gemms_are_embedded_at_the_steps_where_they_change(tmp_path):
    runs = [{"fprop": 1, "wgrad": 1}, {"fprop": 1, "wgrad": 1}, {}, {"fprop": 1, "wgrad": 1}]
    log = Log(
        layers=["a", "b"],
        steps=[Step(i, gemms={"b": kinds, "unknown": {}}) for i, kinds in enumerate(runs)],
    )
    gemms = Page(log, tmp_path / "report.html").meta["gemms"]
    assert gemms["texts"] == ["1 fprop, 1 wgrad", "none"]
    assert gemms["changes"] == {"1": [[0, 0], [2, 1], [3, 0]]}


def test_texts_are_escaped(tmp_path):
    log = Log(
        recipe=HOSTILE + "recipe",
        conversion=HOSTILE + "conversion <!-- js -->",
        about={HOSTILE + "name": HOSTILE + "value"},
        layers=[HOSTILE],
        records=[record(layer=HOSTILE, operand='x"><img>', exponents={0: 1})],
    )
    page = Page(log, tmp_path / "report.html", title=HOSTILE + "title")
    assert page.meta["layers"] == [HOSTILE]
    assert page.field(log.records[0], "elements") == 8
    plain = SCRIPT.sub("", page.text)
    assert "alert(1)</" not in plain
    assert "<b>" not in plain
    assert "<img>" not in page.text
    for word in ("recipe", "conversion <!-- js -->", "name", "value", "title"):
        assert HOSTILE + word in unescape(plain)
    columns = len(embedding.FIELDS) + 1  # and a histogram
    assert len(page.scripts) == len(SCRIPT.findall(page.text)) == 3 + columns


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    page = Page(sample(blocks=1, steps=3), tmp_path / "report.html")
    assert page.scripts["plotly"].startswith("/**")
    # plotly mentions sites but requests none.
    own_text = page.text.replace(page.scripts["plotly"], "")
    assert not re.search(r"https?:|//\w+\.\w|url\(|@import", own_text)
    assert re.findall(r"\b(?:src|href)=\"([^\"]*)\"", own_text) == ["data:,"]
    # The browser also refuses every request.
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', own_text)
    assert policy[1].startswith("default-src 'none'; script-src 'unsafe-inline';")
    assert "connect-src" not in policy[1]


def test_file_size_is_bounded_by_the_size_of_the_data(tmp_path):
    small = report(Log(), tmp_path / "small.html").stat().st_size
    assert small < 6e6  # the chart library
    page = report(sample(blocks=5, steps=100), tmp_path / "page.html").stat().st_size
    records = 20 * 3 * 100
    assert page - small < 4 / 3 * 4 * records * (len(embedding.FIELDS) + 32) + 40_000


def test_without_plotly_the_error_names_the_extra(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    message = (
        'a page needs the extra "report": plotly; plotly is not installed. '
        'pip install ".[report]" in a checkout of float8lab.'
    )
    with pytest.raises(ModuleNotFoundError, match=f"^{re.escape(message)}$"):
        report(Log(), tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_plotly_is_unwrapped_with_its_license():
    script = pytest.importorskip("plotly.offline").get_plotlyjs()
    unwrapped = _unwrapped(script)
    assert "Licensed under the MIT license" in unwrapped[:200]
    assert unwrapped.split("*/\n", 1)[1].startswith('"use strict";var Plotly=')
    assert unwrapped.rstrip().endswith("window.Plotly = Plotly;")
    assert len(script) - 1000 < len(unwrapped) < len(script)
    assert _unwrapped("var Plotly = {};") == "var Plotly = {};"
