"""The LoRA example trains on both bases, and says what that takes."""

from __future__ import annotations

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what PEFT, Transformers and their dependencies deprecate
    pytest.importorskip("peft", reason="needs the extra 'peft'")
    import finetune_lora


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks Transformers by old names
def test_prints_what_was_saved(capsys: pytest.CaptureFixture[str]):
    assert finetune_lora.main(["--steps", "4", "--batch", "2", "--recipe", "block"]) == 0
    counted, heads, *lines, saved = capsys.readouterr().out.splitlines()
    assert counted.startswith("14 of 15 linear layers in FP8")
    assert heads.split() == ["bf16", "FP8"]
    table = {line[:18].strip(): [float(cell) for cell in line[18:].split()] for line in lines}
    high, fp8 = table["MB of base"]
    assert 0.55 < fp8 / high < 0.6  # 85 % of the parameters at one byte instead of two, and scales
    for same in ("MB of adapters", "MB of optimizer"):
        assert table[same][0] == table[same][1] > 0
    high, fp8 = table["loss"]
    assert abs(high - fp8) < 0.01 * high
    assert high != fp8
    assert saved.startswith("FP8 saved 42 % of MB of base")
