"""The example's files are read back to the bit, here and by Transformers."""

import json
import warnings

import pytest
import torch

pytest.importorskip("safetensors", reason="needs the extra 'inspect'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers warns of, of its own parts
    pytest.importorskip("transformers", minversion="5.0", reason="needs the extra 'transformers'")
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    import export_vllm
    import transformers

pytestmark = pytest.mark.filterwarnings("default")
SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
}  # fmt: skip
# Before 5.23 it reads the scales of compressed-tensors as bfloat16: every FP8 weight differs.
RECENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
EQUAL = {
    "compressed-tensors": "12 of 12 equal" if RECENT else "5 of 12 equal",
    "block-fp8": "12 of 12 equal",
}
MATRICES = 128 * (128 + 64 + 64 + 128 + 3 * 256)


def run(tmp_path, monkeypatch, *args):
    monkeypatch.setitem(export_vllm.SIZES, "tiny", SMALL)
    monkeypatch.setattr(export_vllm, "LENGTH", 16)
    return export_vllm.main(["--batch", "2", "--steps", "2", "--out", str(tmp_path), *args])


def test_both_formats_are_read_back(tmp_path, monkeypatch, capsys):
    pytest.importorskip("compressed_tensors", reason="Transformers reads its format with it")
    reads = run(tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    assert printed.count("its logits are those of the model in memory") == 2
    assert f"vllm serve {tmp_path / 'compressed-tensors'}" in printed
    assert "time a forward pass" in printed
    assert "FP8 / bf16" in printed
    bf16 = reads["bf16"].cost.sizes
    for name, method in (("compressed-tensors", "compressed-tensors"), ("block-fp8", "fp8")):
        assert reads[name].note == EQUAL[name]
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == method
        assert config["dtype"] == "bfloat16"
        # A byte less for each element, and few for the scales, of blocks or names in the file.
        for what in ("on disk", "weights"):
            assert 0.95 * MATRICES < bf16[what] - reads[name].cost.sizes[what] <= MATRICES
        assert torch.equal(reads[name].logits, reads["block-fp8"].logits)


def test_rows_are_written_in_the_one_format_that_holds_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export_vllm.importlib.util, "find_spec", lambda name: None)
    reads = run(tmp_path, monkeypatch, "--recipe", "row", "--steps", "0")
    assert list(reads) == ["bf16", "compressed-tensors"]
    assert reads["compressed-tensors"].note == "not tried: needs compressed-tensors"
    assert "trained for" not in capsys.readouterr().out


@pytest.mark.gpu
def test_example_on_a_gpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("compressed_tensors", reason="Transformers reads its format with it")
    reads = run(tmp_path, monkeypatch, "--device", "cuda")
    assert "its logits are those of the model in memory" in capsys.readouterr().out
    assert {name: read.note for name, read in reads.items()} == {"bf16": "", **EQUAL}
