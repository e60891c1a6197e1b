"""Losses and bytes of FP8 moments, for a small model on a CPU."""

from dataclasses import replace

import pytest
import torch

from benchmarks import moments
from benchmarks.pretrain import Text


@pytest.fixture(autouse=True)
def _small_job(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = {"context": 16, "n_layer": 1, "n_head": 2, "dim": 64}
    monkeypatch.setitem(moments.PRESETS, "tiny", replace(moments.PRESETS["tiny"], **sizes))
    training = replace(moments.TRAINING["tiny"], validation_windows=4)
    monkeypatch.setitem(moments.TRAINING, "tiny", training)
    text = torch.arange(4000).square() % 251
    monkeypatch.setattr(moments, "load_text", lambda **options: Text(text[:3000], text[3000:], ""))


def cells(table):
    return [[x.strip() for x in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def test_bytes_of_each_combination_of_dtypes():
    rows = cells(moments.bytes_table(256))
    sums = {tuple(row[:3]): float(row[-1]) for row in rows}
    assert len(rows) == len(sums) == 14
    plain, fp8 = ("float32", "none", "float32"), ("float32", "none", "FP8")
    assert (sums[plain], sums[fp8]) == (12.0, 6.02)
    assert sums["bfloat16, rounded stochastically", "none", "FP8"] == 4.02
    assert sums["FP8", "bfloat16, rounded stochastically", "FP8"] == 5.02
    assert sums["FP8", "float32", "float32"] == 13.0


def test_every_variant_is_trained_for_every_seed(capsys):
    moments.main(["--tiny", "--steps", "5", "--batch-size", "2", "--seeds", "2", "--rounded"])
    output = capsys.readouterr().out
    rows = cells(output[output.index("| run") :])
    assert [row[:2] for row in rows] == [
        *([name, seed] for seed in "01" for name in moments.WAYS),
        *([name, "mean"] for name in moments.WAYS),
    ]
    assert rows[0][3].endswith("(+0.00 %)")
    assert rows[6][2:4] == ["+0.00 %", "+0.00 %"]
    assert float(rows[1][4]) < 3 < float(rows[0][4])


def test_moments_need_a_gpu():
    with pytest.raises(SystemExit):
        moments.main([])
