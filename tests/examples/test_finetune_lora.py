"""The LoRA example trains on both bases and prints their sizes and times."""

import warnings

import pytest

with warnings.catch_warnings():
    # Deprecation warnings of PEFT, Transformers and their dependencies.
    warnings.simplefilter("ignore")
    pytest.importorskip("peft", reason="needs the extra 'peft'")
    import finetune_lora


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls Transformers by old names
def test_example_trains_on_both_bases_and_prints_the_savings(capsys: pytest.CaptureFixture[str]):
    assert finetune_lora.main(["--steps", "4", "--batch", "2", "--recipe", "block"]) == 0
    report_line, column_names, *rows, _, losses = capsys.readouterr().out.splitlines()
    assert report_line.startswith("14 of 15 linear layers in FP8")
    assert column_names.split() == ["bf16", "FP8", "FP8", "/", "bf16", "saved"]
    # The rows below the time.
    ratios = {row[:18].strip(): float(row.split()[-3]) for row in rows[1:]}
    # 85 % of the parameters at one byte instead of two, and scales
    assert 0.55 < ratios["base"] < 0.6
    assert ratios["adapters"] == ratios["optimizer"] == 1
    bf16, fp8 = (float(entry.split()[-1]) for entry in losses.split(","))
    assert abs(bf16 - fp8) < 0.01 * bf16
    assert bf16 != fp8
