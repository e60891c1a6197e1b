"""The files of the vLLM export example are read back bit for bit, here and by Transformers."""

import json
import warnings

import pytest
import torch

pytest.importorskip("safetensors", reason="needs the extra 'inspect'")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # warnings of transformers about its own parts
    pytest.importorskip("transformers", minversion="5.0", reason="needs the extra 'transformers'")
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    import export_vllm
    import transformers

pytestmark = pytest.mark.filterwarnings("default")
SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64,
}  # fmt: skip
# Before 5.23 it reads the scales of compressed-tensors as bfloat16, so every FP8 weight differs.
RECENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
EQUAL = {
    "compressed-tensors": "12 of 12 equal" if RECENT else "5 of 12 equal",
    "block-fp8": "12 of 12 equal",
}
MATRICES = 128 * (128 + 64 + 64 + 128 + 3 * 256)


def run_example(tmp_path, monkeypatch, *args):
    monkeypatch.setitem(export_vllm.SIZES, "tiny", SMALL)
    monkeypatch.setattr(export_vllm, "LENGTH", 16)
    return export_vllm.main(["--batch", "2", "--steps", "2", "--out", str(tmp_path), *args])


def test_transformers_reads_both_formats(tmp_path, monkeypatch, capsys):
    pytest.importorskip("compressed_tensors", reason="Transformers reads its format with it")
    reads = run_example(tmp_path, monkeypatch)
    output = capsys.readouterr().out
    assert output.count("its logits are those of the model in memory") == 2
    assert f"vllm serve {tmp_path / 'compressed-tensors'}" in output
    assert "time a forward pass" in output
    assert "FP8 / bf16" in output
    bf16 = reads["bf16"].cost.sizes
    for name, method in (("compressed-tensors", "compressed-tensors"), ("block-fp8", "fp8")):
        assert reads[name].note == EQUAL[name]
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == method
        assert config["dtype"] == "bfloat16"
        # FP8 saves a byte per element, less a few for scales and for the blocks or names in the
        # file.
        for size_name in ("on disk", "weights"):
            assert 0.95 * MATRICES < bf16[size_name] - reads[name].cost.sizes[size_name] <= MATRICES
        assert torch.equal(reads[name].logits, reads["block-fp8"].logits)


def test_rowwise_scales_are_written_only_as_compressed_tensors(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export_vllm.importlib.util, "find_spec", lambda name: None)
    reads = run_example(tmp_path, monkeypatch, "--recipe", "row", "--steps", "0")
    assert list(reads) == ["bf16", "compressed-tensors"]
    assert reads["compressed-tensors"].note == "not tried: needs compressed-tensors"
    assert "trained for" not in capsys.readouterr().out


@pytest.mark.gpu
def test_example_runs_on_a_gpu(tmp_path, monkeypatch, capsys):
    pytest.importorskip("compressed_tensors", reason="Transformers reads its format with it")
    reads = run_example(tmp_path, monkeypatch, "--device", "cuda")
    assert "its logits are those of the model in memory" in capsys.readouterr().out
    assert {name: read.note for name, read in reads.items()} == {"bf16": "", **EQUAL}
