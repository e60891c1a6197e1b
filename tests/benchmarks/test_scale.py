"""Predictions for many GPUs are compared with every row of RESULTS.md."""

import pytest

from benchmarks import scale
from docs.make_performance import RESULTS

TOLERANCE = 0.10
EXCEPTIONS = {
    ("16384 x 4096 -> 4096", "delayed, compile"),
    ("16384 x 4096 -> 14336", "block, eager"),
    ("4 x 4096 tokens, width 4096, MLP 14336", "TransformerLayer, block, eager"),
    ("1 layer, 4 x 4096 tokens, width 4096, MLP 14336", "plain, converted, mx, compile"),
    ("2 ranks, 8 layers, sequence 8192, eager", "FP8 compute + FP8 all-gather"),
    ("2 ranks, 8 layers, sequence 8192, eager", "FP8-stored weights, fp32 masters"),
    ("train_fsdp.py", "FP8: time a"),
}
"""Rows beyond the tolerance: short times, a peak, and rows that wait for the CPU.

The short time of a layer is 10.2 % above its prediction, that of the linear layer ``up`` 14 % above
it and above the compiled layer's; their sustained times are within. ``attention out`` is the
smallest linear layer, and as a graph its GPU takes 1.3 of 2.1 ms on the host of the table. Hopper
has no GEMM for MX, so its operands are dequantized there, which the peak's prediction does not
count. The GPUs of the FSDP2 rows wait for a slow host.
"""


@pytest.fixture(scope="module")
def rows():
    return list(scale.compared(RESULTS.read_text()))


def test_every_row_is_predicted_within_10_percent_or_has_a_reason(rows):
    beyond_tolerance = [
        (row.table, row.row, row.measured, row.predicted)
        for row in rows
        if abs(row.error) > TOLERANCE and (row.table.rpartition(": ")[2], row.row) not in EXCEPTIONS
    ]
    assert not beyond_tolerance
    without_reason = [
        (row.table, row.row) for row in rows if row.predicted is None and not row.why_not
    ]
    assert not without_reason, "benchmarks/scale.py must predict these rows, or say why not"


def test_every_predictable_section_has_predicted_rows(rows):
    sections = {row.table.partition(":")[0] for row in rows if row.predicted is not None}
    assert sections >= {*scale.ROWS, "fsdp", "memory", "train_fsdp.py"}


def test_main_prints_the_table(capsys):
    assert scale.main() == 0
    output = capsys.readouterr().out
    assert "converted, current, compile" in output
    assert "rows are not predicted: another library's\n" in output


def test_sustained_times_are_compared_with_sustained_predictions():
    table = """
## Transformer layer: forward and backward

<!-- begin benchmarks.layer -->

4 x 4096 tokens, width 4096, MLP 14336

| implementation                   | GPU ms (quartiles) | sustained ms |
| :------------------------------- | -----------------: | -----------: |
| TransformerLayer, delayed, eager |       21.9 (21-22) |         24.6 |
| torchao rowwise, compile         |       31.9 (31-32) |         33.0 |

## Jobs on a GPU
"""
    isolated, sustained, *unpredicted = scale.compared(table)
    assert isolated.predicted < sustained.predicted
    assert sustained.measured == 24.6
    assert [row.why_not for row in unpredicted] == [scale.OTHERS] * 2
