"""The comparison of ways to save activations, with a small layer on a CPU, not compiled."""

import re

import pytest
import torch

from benchmarks import saving
from benchmarks.models import LayerSize


def test_every_way_to_save_is_compared_with_fp8():
    size = LayerSize(D=64, H=4, G=2, F=96, batch=1, sequence=32)
    options = {"seconds": 0.01, "rounds": 1, "compiled": False}
    lines = [*saving.compare(size, ["current"], torch.device("cpu"), **options)]
    names = [line[:24].strip() for line in lines]
    assert names == ["bfloat16", "current, fp8", "current, recompute"]
    assert all(re.search(r" ms  (nan|[0-9.]+)$", line) for line in lines)
    assert lines[1].endswith(" 1.000")
    assert lines[0].endswith(" nan")


def test_a_wrong_layer_is_refused(monkeypatch):
    def wrong_candidates(layer, names):
        torch.nn.init.zeros_(layer.down.weight)
        yield "wrong", layer

    monkeypatch.setattr(saving, "compile_layers", lambda module: None)
    monkeypatch.setattr(saving, "candidates", wrong_candidates)
    size = LayerSize(D=64, H=4, G=2, F=96, batch=1, sequence=32)
    (line,) = saving.compare(size, [], torch.device("cpu"), seconds=0.01, rounds=1)
    assert "wrong: " in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures there")
def test_saving_needs_a_gpu():
    with pytest.raises(SystemExit):
        saving.main([])
