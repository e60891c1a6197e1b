"""Tests of ``python -m float8lab scale``: output and exit statuses."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from float8lab import __main__ as command

ARGUMENTS = ["scale", "--model", "llama-3-8b", "--recipe", "current", "--recipe", "delayed"]


def run_scale(capsys, *arguments):
    status = command.main([*ARGUMENTS, *arguments])
    return status, capsys.readouterr()


def test_output_has_the_step_times_and_the_tables(capsys):
    status, (out, _) = run_scale(capsys, "--mesh", "tp=2", "--gpus", "8", "--limit", "1")
    assert status == 0
    assert re.match(
        r"llama-3-8b: 8.0 billion parameters, 32 layers; 8 sequences of 8192 tokens a step, "
        r"8 GPUs\n"
        r"mesh dp=4,tp=2: [\d.]+ ms a step by delayed scaling, 1\.\d\dx of bfloat16\n"
        r"fastest mesh of all for it: dp=\d\S*, [\d.]+ ms\n"
        r"fastest mesh for bfloat16: dp=\d\S*, [\d.]+ ms; so FP8 gains 1\.\d\dx\n"
        r"FP8 pays: .* tokens.*\.\n\n"
        r"bfloat16  #+.* ms\ncurrent   #+Q+.* ms\ndelayed   #+Q+.* ms\n# gemm, Q quantize, ",
        out,
    )
    titles = [line for line in out.splitlines()[10:] if line and not line.startswith((" ", "..."))]
    assert titles == [
        "On mesh dp=4,tp=2",
        "Fastest meshes (delayed)",
        "x of bfloat16 by tokens of a micro-batch on each rank",
        "x of bfloat16 by linear layer of a rank",
        "Published gains of FP8 on other machines and kernels, and predicted for the same work",
        "Assumed",
    ]


def test_json_has_the_steps_layouts_and_published_gains(capsys):
    status, (out, _) = run_scale(capsys, "--gpus", "16", "--json")
    content = json.loads(out)
    assert status == 0
    assert set(content["steps"]) == {"bfloat16", "current", "delayed"}
    assert content["searched"]
    assert content["layouts"][0]["mesh"] == content["mesh"]
    step = content["steps"][content["recipe"]]
    assert step["seconds"] == pytest.approx(sum(step["gpu"].values()))
    assert content["published"][0]["published"] == [1.36, 1.36]


def test_svg_is_well_formed(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    status, _ = run_scale(capsys, "--mesh", "dp=8", "--svg", str(tmp_path / "step.svg"))
    assert status == 0
    text = (tmp_path / "step.svg").read_text()
    ElementTree.fromstring(text)
    assert all(f"<!-- {name} -->" in text for name in ("bfloat16", "delayed", "gemm", "quantize"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mesh", "dp=3", "--gpus", "8"), "mesh must be of 8 GPUs; got 'dp=3', which is of 3."),
        (("--mesh", "dp=2", "--batch", "3"), "batch must be a multiple of dp times the micro-"),
        (("--mesh", "dp=8", "--shard", "3"), "shard must divide the data and context parallel"),
        (("--mesh", "tp=16"), "mesh tp must divide the key-value heads (8); got 16."),
        (("--gpus", "7", "--batch", "3"), "gpus must share 3 sequences of llama-3-8b; got 7."),
        (("--gpus", "8", "--micro-batch", "3"), "llama-3-8b in micro-batches of 3; got 8."),
        (("--svg", "missing/step.svg"), "missing"),
    ],
)
def test_impossible_predictions_are_an_error_in_one_line(
    capsys, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    status, (out, err) = run_scale(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("python -m float8lab scale: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("--tp-overlap", "2"), ("--tp-overlap", "x"), ("--gpus", "0")]
)
def test_wrong_arguments_exit_with_status_2(capsys, arguments):
    with pytest.raises(SystemExit) as exit_info:
        run_scale(capsys, *arguments)
    assert exit_info.value.code == 2
    assert "must be a" in capsys.readouterr().err
