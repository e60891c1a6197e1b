"""An MoE model trains for a few steps in high precision and in FP8."""

import email
import json
from dataclasses import replace
from pathlib import Path

import pytest
import text
import torch
import train_moe


def run_small_job(monkeypatch, *args):
    """Run a small job on one thread."""
    small = replace(train_moe.PRESETS["tiny"], context=32, dim=64, ffn=48)
    training = replace(train_moe.TRAINING["tiny"], validation_windows=32, validations=1)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(Path(email.__file__).parent))
    loaded, threads = text.load_text(), torch.get_num_threads()
    monkeypatch.setitem(train_moe.PRESETS, "tiny", small)
    monkeypatch.setitem(train_moe.TRAINING, "tiny", training)
    monkeypatch.setattr(train_moe, "load_text", lambda code=False: loaded)
    torch.set_num_threads(1)
    try:
        return train_moe.main(["--device", "cpu", *args])
    finally:
        torch.set_num_threads(threads)


def test_fp8_trains_to_the_loss_of_high_precision(tmp_path, capsys, monkeypatch):
    """The losses agree to 1 %, after a decrease of a third."""
    file = tmp_path / "numbers" / "run.json"
    results = run_small_job(monkeypatch, "--steps", "40", "--batch-size", "8", "--json", str(file))
    output = capsys.readouterr().out
    assert "6 of 9 linear layers in FP8" in output
    assert "a router, which stays in high precision" in output
    assert "fullest expert over the average" in output
    assert abs(results["gap_percent"]) <= 1
    baseline, fp8 = results["runs"]
    assert fp8["train_loss"] != baseline["train_loss"]
    assert fp8["validation_loss"][-1] < 0.7 * fp8["train_loss"][0]
    for loads in results["imbalance"].values():
        assert all(1 <= load < 4 for load in loads)
    assert json.loads(file.read_text()) == json.loads(json.dumps(results))


def test_the_large_preset_has_more_than_a_billion_parameters():
    sizes = train_moe.PRESETS["1b"]
    assert sizes.n_layer * sizes.experts * 3 * sizes.dim * sizes.ffn > 1e9


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        train_moe.main(["--device", "cuda"])
    assert "needs a CUDA GPU" in capsys.readouterr().err
