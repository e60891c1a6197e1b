"""Tests of the report in a real browser, with a mouse and a keyboard."""

import csv
import json
import math

import pytest

from benchmarks import browser
from float8lab.inspect import report
from float8lab.inspect.watch.records import Log, Record, Step
from tests.inspect.test_report import HOSTILE, record

pytestmark = pytest.mark.skipif(
    bool(browser.missing()), reason=browser.missing() or "there is a browser"
)

LOG = browser.sample(blocks=3, steps=40)


class ReportReader:
    """A reader of one report, who clicks and types."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, log, path, **options):
        report(log, path, **options)
        self.opened = path
        return browser.open_report(self.driver, path)

    def run(self, script, *args):
        return self.driver.execute_script(script, *args)

    def find(self, selector):
        return self.driver.find_element("css selector", selector)

    def texts(self, selector):
        return [e.text for e in self.driver.find_elements("css selector", selector)]

    def click(self, selector):
        self.run("arguments[0].scrollIntoView({block: 'center'})", self.find(selector))
        self.find(selector).click()
        self.settle()

    def settle(self):
        """Wait until the page has drawn the request; a search first waits for more letters."""
        self.driver.execute_async_script(
            "const done = arguments[0], main = document.querySelector('main');"
            "const drawn = () => requestAnimationFrame(() => setTimeout("
            " main.hasAttribute('aria-busy') ? drawn : done, 30));"
            "setTimeout(drawn, 200)"
        )

    def choose(self, group, value):
        self.click(f"#{group} label:has(input[value='{value}'])")

    def search(self, text):
        from selenium.webdriver.common.keys import Keys

        self.find("#search").send_keys(Keys.CONTROL, "a", Keys.NULL, Keys.BACKSPACE, text)
        self.settle()

    def click_map(self, row, cell, move_only=False):
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        self.run("document.getElementById('map').scrollIntoView({block: 'center'})")
        self.settle()
        x, y = self.run(
            "const map = document.getElementById('map'), box = map.getBoundingClientRect();"
            "const { xaxis, yaxis } = map._fullLayout, x = map.data[0].x[arguments[1]];"
            "return [box.left + xaxis._offset + xaxis.d2p(x),"
            " box.top + yaxis._offset + yaxis.d2p(arguments[0])]",
            row,
            cell,
        )
        actions = ActionBuilder(self.driver)
        actions.pointer_action.move_to_location(round(x), round(y))
        if not move_only:
            actions.pointer_action.click()
        actions.perform()
        self.settle()

    def facts(self):
        return dict(zip(self.texts("#facts dt"), self.texts("#facts dd"), strict=True))

    def title(self):
        return self.find("#drill-title").text

    def values(self, chart):
        """Return the y of each trace of a chart, or its z in a heat map."""
        return self.run(
            "return document.getElementById(arguments[0]).data.map(t => Array.from(t.z || t.y))",
            chart,
        )

    def messages_and_requests(self):
        """Return the messages of the console and the URLs requested from any network."""
        messages = [entry["message"] for entry in self.driver.get_log("browser")]
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                # "chrome" is the browser's own new tab, which is open before it gets a page.
                if not url.startswith((self.opened.parent.as_uri(), "data:", "blob:", "chrome")):
                    messages.append(url)
        return messages


@pytest.fixture(scope="module")
def driver():
    pytest.importorskip("plotly")
    with browser.browser() as webdriver:
        yield webdriver


@pytest.fixture
def reader(driver, tmp_path):
    """A reader with the sample open. The page must not complain in any test."""
    browser.resize(driver, 1280, 900)
    reader = ReportReader(driver)
    reader.open(LOG, tmp_path / "report.html")
    yield reader
    assert reader.messages_and_requests() == []


def record_of(step, layer, operand):
    (match,) = [r for r in LOG.records if (r.step, r.layer, r.operand) == (step, layer, operand)]
    return match


def test_the_page_opens_with_every_chart_drawn(reader):
    assert reader.driver.title == "FP8 training report"
    for chart in ("map", "sqnr", "shares", "scales", "bars", "exponents", "loss"):
        box = reader.find(f"#{chart} .main-svg").size
        assert box["width"] > 200, chart
        assert box["height"] > 100, chart
    cells = reader.values("map")[0]
    assert (len(cells), len(cells[0])) == (len(LOG.layers), 40)
    assert reader.texts("#rows tr td:first-child")[0]
    assert len(reader.texts("#rows tr")) == 10
    assert reader.values("loss")[0] == [step.loss for step in LOG.steps]
    assert "made up" in reader.find("pre").text
    assert reader.find(".recipe code").text == LOG.recipe
    assert reader.find("#notice").is_displayed() is False


def test_map_shows_the_worst_operand_or_the_chosen_one(reader):
    def expected_rows(operands):
        return [
            [
                max(
                    max(math.log10(record_of(s, layer, o).flushed), -6)
                    if record_of(s, layer, o).flushed
                    else -6
                    for o in operands
                )
                for s in range(40)
            ]
            for layer in LOG.layers[:2]
        ]

    for operand, operands in (("all", ("x", "w", "dy")), ("x", ("x",)), ("w", ("w",))):
        reader.choose("operands", operand)
        for row, expected in zip(reader.values("map")[0], expected_rows(operands), strict=False):
            assert row == pytest.approx(expected, rel=1e-5)


def test_details_of_a_clicked_cell_are_shown(reader):
    reader.choose("operands", "x")
    reader.choose("metrics", "saturated")
    reader.click_map(5, 17)
    entry = record_of(17, LOG.layers[5], "x")
    assert reader.title() == f"{LOG.layers[5]}, x, input, step 17"
    facts = reader.facts()
    assert facts["Amax"] == f"{entry.amax:.4g}"
    assert facts["SQNR"] == f"{entry.sqnr:.1f} dB"
    assert facts["Elements"] == "1,048,576"
    assert facts["GEMMs"] == "1 fprop, 1 dgrad, 1 wgrad"
    (bars,) = reader.values("bars")
    assert [n for n in bars if n] == [n for n in entry.exponents.values() if n]
    assert "step 17" in reader.find("#bars-title").text
    amax = reader.values("scales")[0]
    assert amax == pytest.approx(
        [record_of(s, LOG.layers[5], "x").amax for s in range(40)], rel=1e-6
    )
    assert reader.find("#layer").get_property("value") == "5"


def test_the_tip_names_the_cell_under_the_mouse(reader):
    reader.choose("metrics", "sqnr")
    reader.click_map(3, 30, move_only=True)
    lowest = min((record_of(30, LOG.layers[3], o).sqnr, o) for o in ("x", "w", "dy"))
    assert reader.find("#tip").is_displayed()
    tip = f"{LOG.layers[3]}\n{lowest[1]}, step 30: {lowest[0]:.1f} dB"
    assert reader.find("#tip").text == tip


def test_a_cell_of_all_operands_opens_the_worst(reader):
    reader.choose("metrics", "sqnr")
    reader.click_map(3, 30)
    worst = min(("x", "w", "dy"), key=lambda o: record_of(30, LOG.layers[3], o).sqnr)
    assert reader.find("#operand").get_property("value") == worst


@pytest.mark.parametrize(
    "metric",
    ["flushed", "saturated", "sqnr", "subnormal", "amax", "scale", "staleness", "nonfinite"],
)
def test_every_quantity_has_a_map(reader, metric):
    reader.choose("metrics", metric)
    label = reader.find(f"#metrics input[value={metric}] + span").text
    assert reader.find("#map-title").text == f"{label}: layers over steps"
    assert any(value is not None for row in reader.values("map")[0] for value in row)


def test_layers_are_filtered_by_name(reader):
    reader.search("mlp down")
    chosen = [layer for layer in LOG.layers if "mlp" in layer and "down" in layer]
    assert len(reader.values("map")[0]) == len(chosen) == 3
    assert set(reader.texts("#rows td:first-child")) == set(chosen)
    assert reader.find("#matches").text == f"3 of {len(LOG.layers)} layers"
    reader.click_map(1, 4)
    assert reader.title().startswith(chosen[1] + ",")
    reader.search("no such")
    assert 'No layer has "no such"' in reader.find("#map").text
    assert reader.texts("#rows tr") == ['No layer has "no such" in its name.']
    reader.search("")
    assert len(reader.values("map")[0]) == len(LOG.layers)


def test_the_table_sorts_and_its_rows_open_details(reader):
    highest = max(LOG.records, key=lambda r: r.flushed)
    assert reader.texts("#rows tr:first-child td")[:2] == [highest.layer, highest.operand]
    reader.choose("metrics", "sqnr")
    lowest = min((r for r in LOG.records if r.sqnr is not None), key=lambda r: r.sqnr)
    assert reader.texts("#rows tr:first-child td")[:2] == [lowest.layer, lowest.operand]
    reader.click("#rows tr:first-child button")
    assert reader.title().startswith(lowest.layer)
    assert reader.title().endswith(f"step {lowest.step}")

    reader.click("th[data-column=nonfinite] button")
    assert reader.find("th[aria-sort]").get_attribute("data-column") == "nonfinite"
    assert reader.texts("#rows tr:first-child td")[:2] == ["blocks.1.mlp.up", "dy"]
    reader.click("#more")
    assert len(reader.texts("#rows tr")) == 3 * len(LOG.layers)
    reader.choose("operands", "w")
    assert set(reader.texts("#rows td:nth-child(2)")) == {"w"}


@pytest.mark.parametrize(
    ("metric", "field"),
    [("subnormal", "subnormal"), ("amax", "amax"), ("scale", "scale_max"),
     ("staleness", "staleness")],
)  # fmt: skip
def test_the_table_sorts_by_every_quantity(reader, metric, field):
    finite = [r for r in LOG.records if math.isfinite(getattr(r, field) or math.nan)]
    highest = max(finite, key=lambda r: getattr(r, field))
    reader.choose("metrics", metric)
    assert reader.find("th[aria-sort]").get_attribute("data-column") == metric
    assert reader.texts("#rows tr:first-child td")[:2] == [highest.layer, highest.operand]
    headers = [text for text in reader.texts("#heads th") if text]
    assert len(headers) == len(reader.texts("#rows tr:first-child td"))
    reader.click("#rows tr:first-child button")
    assert reader.title().endswith(f"step {highest.step}")


def test_an_address_restores_the_selection(reader, tmp_path):
    reader.choose("metrics", "sqnr")
    reader.click_map(5, 17)
    address, title = reader.driver.current_url, reader.title()
    assert title.endswith("step 17")
    reader.driver.get("about:blank")
    reader.driver.get(address)
    reader.settle()
    assert reader.title() == title
    assert reader.find("#metrics input:checked").get_attribute("value") == "sqnr"
    reader.run("location.hash = '#layer=blocks.1.mlp.up&operand=w&step=3&quantity=amax'")
    reader.settle()
    assert reader.title() == "blocks.1.mlp.up, w, weight, step 3"
    reader.run("location.hash = '#layer=none&operand=z&step=x&quantity=toString'")
    reader.settle()
    assert reader.title() == "blocks.1.mlp.up, w, weight, step 3"


def test_numbers_are_saved_as_csv(reader, tmp_path):
    folder = {"behavior": "allow", "downloadPath": str(tmp_path)}
    reader.driver.execute_cdp_cmd("Browser.setDownloadBehavior", folder)
    reader.choose("operands", "x")
    reader.click_map(5, 17)
    for button, name in (("#save-table", "operands"), ("#save-layer", f"{LOG.layers[5]}.x")):
        reader.click(button)
        for _ in range(50):
            if (tmp_path / f"{name}.csv").exists():
                break
            reader.settle()
        rows = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
        if name == "operands":
            assert {row["layer"] for row in rows} == set(LOG.layers)
            assert {row["operand"] for row in rows} == {"x"}
        else:
            entry = record_of(17, LOG.layers[5], "x")
            assert float(rows[17]["amax"]) == pytest.approx(entry.amax, rel=1e-6)
            assert rows[17]["first step"] == "17"


def test_a_baseline_is_shown_on_the_same_page(reader, tmp_path):
    baseline = Log(steps=[Step(step.step, loss=2 * step.loss) for step in LOG.steps])
    reader.open(LOG, tmp_path / "two.html", baseline=baseline, names=("bfloat16", "FP8"))
    assert reader.values("loss") == [[s.loss for s in baseline.steps], [s.loss for s in LOG.steps]]
    assert "a: bfloat16" in reader.find("main").text
    assert "the loss of b is -50.00 % of a's" in reader.find("main").text


def test_keys_move_over_the_map(reader):
    from selenium.webdriver.common.keys import Keys

    reader.click_map(2, 10)
    layers = reader.find("#map")
    layers.send_keys(Keys.ARROW_DOWN, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    reader.settle()
    assert reader.title().startswith(LOG.layers[3])
    assert reader.title().endswith("step 12")
    layers.send_keys(Keys.HOME, Keys.PAGE_UP, Keys.ARROW_LEFT)
    reader.settle()
    assert reader.title().startswith(LOG.layers[0])
    assert reader.title().endswith("step 0")
    reader.find("#step").send_keys(Keys.ARROW_RIGHT)
    reader.settle()
    assert reader.title().endswith("step 1")


def test_nonfinite_values_are_shown(reader):
    nonfinite = next(r for r in LOG.records if r.nan)
    reader.choose("operands", "dy")
    reader.click_map(LOG.layers.index(nonfinite.layer), nonfinite.step)
    facts = reader.facts()
    assert facts["NaN, inf"] == f"{nonfinite.nan}, 0"
    assert facts["Amax"] == "\u2013"
    reader.choose("operands", "w")
    reader.click_map(LOG.layers.index("blocks.0.attention.qkv"), 3)
    assert reader.facts()["SQNR"] == "none"
    assert reader.facts()["Staleness"] == "none"


def test_colours_follow_the_color_scheme(reader):
    def colours(scheme):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        reader.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        reader.settle()
        page = reader.run("return getComputedStyle(document.body).backgroundColor")
        text = reader.run("return document.getElementById('loss')._fullLayout.font.color")
        ramp = reader.run("return document.getElementById('map').data[0].colorscale[0][1]")
        return page, text, ramp

    light, dark = colours("light"), colours("dark")
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert colours("light") == light


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_does_not_overflow_its_width(reader, width):
    browser.resize(reader.driver, width, 900)
    reader.settle()
    inner, scroll = reader.run(
        "const page = document.documentElement; return [page.clientWidth, page.scrollWidth]"
    )
    assert scroll <= inner
    for chart in ("map", "loss", "sqnr"):
        assert reader.find(f"#{chart} .main-svg").size["width"] <= width


def test_html_in_names_is_shown_as_text(reader, tmp_path):
    records = [record(step, HOSTILE, "x", flushed=0.1, exponents={0: 1, 1: 2}) for step in range(3)]
    log = Log(recipe=HOSTILE, about={HOSTILE: HOSTILE}, layers=[HOSTILE], records=records)
    reader.open(log, tmp_path / "hostile.html")
    assert reader.texts("#rows td:first-child") == [HOSTILE]
    assert reader.title().startswith(HOSTILE)
    assert reader.find(".recipe code").text == HOSTILE
    reader.click_map(0, 1, move_only=True)
    assert reader.find("#tip").text.startswith(HOSTILE)
    assert reader.driver.find_elements("css selector", "#map b, #map script") == []


def test_empty_one_step_and_partial_logs_have_a_page(reader, tmp_path):
    reader.open(Log(), tmp_path / "empty.html")
    assert "No step was watched" in reader.find("#map").text
    assert "No finite loss" in reader.find("#loss").text
    reader.open(Log(layers=["a"], records=[record()]), tmp_path / "one.html")
    assert reader.title() == "a, x, input, step 0"
    assert "No histogram" in reader.find("#bars").text
    reader.choose("metrics", "amax")  # zero has no logarithm
    assert "no value is a finite number" in reader.find("#map").text
    reader.choose("metrics", "flushed")
    assert reader.values("map")[0] == [[-6]]
    partial: list[Record] = [record(0, "a"), record(7, "b", "dy", exponents={3: 4})]
    reader.open(Log(records=partial), tmp_path / "partial.html")
    reader.click_map(1, 0)
    assert reader.facts() == {"Record": "none of this operand here"}
    reader.click_map(1, 1)
    assert "(the nearest kept)" not in reader.find("#bars-title").text


def test_a_large_report_opens_completely(reader, tmp_path):
    """``python -m benchmarks.report_page`` opens 1000 steps and measures the time."""
    reader.open(browser.sample(blocks=50, steps=300), tmp_path / "large.html")
    cells = reader.values("map")[0]
    assert (len(cells), len(cells[0])) == (200, 300)
    reader.search("blocks.49.mlp")
    assert len(reader.values("map")[0]) == 2
    reader.click_map(1, 150)
    assert reader.title() == "blocks.49.mlp.down, " + reader.title().split(", ", 1)[1]
    assert reader.title().endswith(", step 150")
