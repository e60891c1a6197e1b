"""The Transformers example trains, and compares its runs."""

import re
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    import finetune_llama


def test_example_trains_and_prints_the_savings(capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune_llama.main(["--steps", "6", "--batch", "1", "--recipe", "delayed"]) == 0
    output = capsys.readouterr().out
    assert "14 of 15 linear layers in FP8" in output
    bf16, fp8 = (float(loss) for loss in re.findall(r"(?:bf16|FP8) (\d\.\d+)", output))
    assert abs(bf16 - fp8) < 0.1 * bf16
    assert max(bf16, fp8) < 5.3  # the loss at the start is 5.55
    (row,) = (line for line in output.splitlines() if line.startswith("saved for backward"))
    bytes_bf16, bytes_fp8 = map(float, re.findall(r"([\d.]+) kB", row))
    assert bytes_fp8 < 0.9 * bytes_bf16
    assert "emulated" in output


@pytest.mark.filterwarnings("ignore")  # advice of the tokenizer
def test_example_starts_from_a_saved_model_and_saves_another(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=384, **{**finetune_llama.PRESETS["tiny"], "num_hidden_layers": 1}
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "in")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "in")
    arguments = ["--model", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert finetune_llama.main([*arguments, "--steps", "1"]) == 0
    before, after = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("in", "out")
    )
    for (name, p), (_, q) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert not p.equal(q), name
