"""The Lightning example trains, and compares what it trained."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Lightning and its dependencies are deprecated for
    pytest.importorskip("lightning")
    import train_lightning


@pytest.mark.filterwarnings("ignore")
def test_prints_what_was_saved(capsys: pytest.CaptureFixture[str]):
    assert train_lightning.main(["--steps", "3", "--batch", "1", "--recipe", "delayed"]) == 0
    counted, _, bf16, fp8, saved = capsys.readouterr().out.splitlines()[-5:]
    assert counted.startswith("16 of 17 linear layers in FP8")
    losses = [float(line.split()[1]) for line in (bf16, fp8)]
    assert abs(losses[0] - losses[1]) < 0.1 * losses[0]
    assert saved.startswith("FP8 saved ")
    assert saved.endswith(" % of ms a step")
