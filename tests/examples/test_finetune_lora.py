"""The LoRA example trains on both bases, and says what that takes."""

import warnings

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what PEFT, Transformers and their dependencies deprecate
    pytest.importorskip("peft", reason="needs the extra 'peft'")
    import finetune_lora


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT asks Transformers by old names
def test_prints_what_was_saved(capsys: pytest.CaptureFixture[str]):
    assert finetune_lora.main(["--steps", "4", "--batch", "2", "--recipe", "block"]) == 0
    counted, heads, *rows, _, losses = capsys.readouterr().out.splitlines()
    assert counted.startswith("14 of 15 linear layers in FP8")
    assert heads.split() == ["bf16", "FP8", "FP8", "/", "bf16", "saved"]
    ratios = {row[:18].strip(): float(row.split()[-3]) for row in rows[1:]}  # below the time
    assert 0.55 < ratios["base"] < 0.6  # 85 % of the parameters at one byte, not two, and scales
    assert ratios["adapters"] == ratios["optimizer"] == 1
    high, fp8 = (float(part.split()[-1]) for part in losses.split(","))
    assert abs(high - fp8) < 0.01 * high
    assert high != fp8
