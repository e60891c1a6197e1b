"""Each subject on a CPU and tiny sizes: all but the speed of a GPU."""

import pytest

from benchmarks import gemm, linear, mlp, norm_linear
from benchmarks.models import LayerSize
from benchmarks.recipes import RECIPES
from benchmarks.shapes import LinearShape

TINY = LinearShape("tiny", 64, 48, 32)
LAYER = LayerSize(D=64, H=4, G=2, F=96, batch=2, sequence=32)
FLOORED = [name for name in RECIPES if name != "mx"]  # which has no FP8 GEMM


def check(subject, rows):
    """No row is refused, each has a time and a place in a table with all columns."""
    refused = {row.name: row.refusal for row in rows if row.refusal is not None}
    assert refused == {}
    for row in rows:
        assert row.median > 0
        assert all(db > 0 for db in row.sqnr_db.values())
    for case in dict.fromkeys(row.case for row in rows):
        members = [row for row in rows if row.case == case]
        table = report_table(subject, members).splitlines()
        assert len(table) == 2 + len(members)
        assert len({line.count("|") for line in table}) == 1


def report_table(subject, rows):
    from benchmarks import report

    return report.tabulate(subject.columns, rows)


def test_gemm(setting):
    rows = list(gemm.rows(setting, [TINY]))
    check(gemm.SUBJECT, rows)
    assert [row.case.split(":")[0] for row in rows[::6]] == [
        "tiny, fprop", "tiny, dgrad", "tiny, wgrad",
    ]  # fmt: skip
    assert {row.name for row in rows} >= {"bfloat16", "row, fast", "1x128 by 1x128"}
    assert all(row.flops == 2 * 64 * 48 * 32 for row in rows)


def test_linear(setting):
    rows = list(linear.rows(setting, [TINY]))
    check(linear.SUBJECT, rows)
    assert [row.name for row in rows if row.baseline] == ["bfloat16, eager"]
    for row in rows[1:6]:
        assert (row.floor_ms is not None) == (row.name.split(",")[0] in FLOORED)
        assert row.values["saved MB"] < rows[0].values["saved MB"]


def test_norm_linear(setting):
    rows = list(norm_linear.rows(setting, [TINY]))
    check(norm_linear.SUBJECT, rows)
    assert {f"LayerNormLinear, {name}, eager" for name in RECIPES} < {row.name for row in rows}


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_mlp(setting, activation):
    rows = list(mlp.rows(setting, [mlp.MlpSize(48, 96, 64, activation)]))
    check(mlp.SUBJECT, rows)
    assert {f"LayerNormMLP, {name}, eager" for name in RECIPES} < {row.name for row in rows}
