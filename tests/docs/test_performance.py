"""docs/performance.md and its plots show the tables of RESULTS.md."""

import xml.etree.ElementTree as ElementTree

from docs import make_performance

TEXT = """
## First

<!-- begin benchmarks.linear -->

- GPU: one
- torch: 2.11
- commit: abc

up: 1 x 2

| implementation | x bf16 | GPU ms |
| :------------- | -----: | -----: |
| bfloat16       |   1.00 |  2 (1) |
| delayed        |   1.50 |      - |

## Second

### By hand

| run | loss |
| :-- | ---: |
| one |  0.7 |
"""


def test_tables_are_parsed_from_a_page():
    linear, second = make_performance.tables(TEXT)
    assert (linear.section, linear.caption, linear.facts["commit"]) == (
        "linear", "up: 1 x 2", "abc",
    )  # fmt: skip
    assert linear.rows[1] == {"implementation": "delayed", "x bf16": "1.50", "GPU ms": "-"}
    assert (second.section, second.facts, second.rows) == (
        "By hand",
        {},
        [{"run": "one", "loss": "0.7"}],
    )


def test_page_and_plots_are_generated_from_the_results():
    for path, text in make_performance.make().items():
        assert path.read_text() == text, "run python -m docs.make_performance"


def test_claims_repeat_sustained_measurements():
    """The speed-ups of float8lab in README.md's comparison are in the tables of the benchmarks."""
    tables_of_results = make_performance.tables(make_performance.RESULTS.read_text())
    claims = [table for table in tables_of_results if table.section == make_performance.PEERS]
    ratio = make_performance.RATIOS[0]
    columns = (ratio, "x bf16 in the same mode")  # steps of a small model do not reach full power
    benchmark_rows = [
        row for table in tables_of_results if table not in claims for row in table.rows
    ]
    measured = {row.get(column) for row in benchmark_rows for column in columns}
    claimed = {
        row[ratio]
        for table in claims
        if "H200" in table.caption and ratio in table.rows[0]
        for row in table.rows
        if row["implementation"].startswith("float8lab")
    }
    assert len(claimed) >= 8
    assert claimed <= measured


def test_plots_draw_each_row_to_scale():
    for chart in make_performance.CHARTS:
        groups = chart.groups(make_performance.tables(make_performance.RESULTS.read_text()))
        root = ElementTree.fromstring(make_performance.draw(chart, groups))
        bars = root.findall("{http://www.w3.org/2000/svg}rect")
        values = [float(row[chart.value]) for group in groups for row in group.rows]
        assert len(bars) == len(values)
        scale = max(float(bar.get("width")) for bar in bars) / max(values)
        for bar, value in zip(bars, values, strict=True):
            assert abs(float(bar.get("width")) - scale * value) < 0.1
