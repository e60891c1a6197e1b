"""The Transformers example trains, and compares what it trained."""

import re
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its dependencies are deprecated for
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    import finetune_llama


def test_prints_what_was_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune_llama.main(["--steps", "6", "--batch", "1", "--recipe", "delayed"]) == 0
    printed = capsys.readouterr().out
    assert "14 of 15 linear layers in FP8" in printed
    bf16, fp8 = (float(loss) for loss in re.findall(r"(?:bf16|FP8) (\d\.\d+)", printed))
    assert abs(bf16 - fp8) < 0.1 * bf16
    assert max(bf16, fp8) < 5.3  # of 5.55 at the start
    (row,) = (line for line in printed.splitlines() if line.startswith("saved for backward"))
    bytes_bf16, bytes_fp8 = map(float, re.findall(r"([\d.]+) kB", row))
    assert bytes_fp8 < 0.9 * bytes_bf16
    assert "emulated" in printed


@pytest.mark.filterwarnings("ignore")  # advice of the tokenizer
def test_starts_from_a_model_and_saves_it(tmp_path: Path) -> None:
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
