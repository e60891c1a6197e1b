"""A few steps of the main training example, and its text."""

import doctest
import json
import math
import re
import textwrap
from dataclasses import replace
from pathlib import Path

import gpt
import llama
import pytest
import text
import torch
import train_gpt

import float8lab
from float8lab.inspect.watch.records import Log, Step
from tests.processes import run_python

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
CONFIG = gpt.GPTConfig(context=16, n_layer=2, n_head=2, dim=32)
LLAMA = llama.LlamaConfig(context=16, n_layer=2, n_head=2, n_group=1, dim=32, ffn=48)
LAYERS = 4 * CONFIG.n_layer
SMALL = ["--device", "cpu", "--steps", "3", "--batch-size", "2"]
LOAD_TEXT = train_gpt.load_text


def short_text():
    source = "".join(text.sources(Path(json.__file__).parent)).encode()
    tokens = (torch.tensor([*half]) for half in text.split(source, chunk=1024))
    return text.Text(*tokens, digest="short")


@pytest.fixture(scope="module", autouse=True)
def _small_job():
    """Make the tiny preset smaller, with a short text and one thread."""
    short, threads = short_text(), torch.get_num_threads()
    training = replace(train_gpt.TRAINING["tiny"], validation_windows=4, validations=2)
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train_gpt.PRESETS, "tiny", CONFIG)
        patch.setitem(train_gpt.LLAMA_PRESETS, "tiny", LLAMA)
        patch.setitem(train_gpt.TRAINING, "tiny", training)
        patch.setattr(train_gpt, "load_text", lambda code=False: short)
        yield
    torch.set_num_threads(threads)


def run_job(out, *args):
    return train_gpt.main([*SMALL, "--out", str(out), *args])


def test_job_prints_and_writes_its_results(tmp_path, capsys):
    file = tmp_path / "numbers" / "run.json"
    results = run_job(tmp_path / "out", "--json", str(file))
    output = capsys.readouterr().out
    assert f"{LAYERS} of {LAYERS + 1} linear layers in FP8" in output
    assert "skipped  excluded by 'lm_head'" in output
    assert "GEMMs of one training step" in output
    assert "gap " in output
    table = output[output.index("time a step") :].splitlines()
    assert [line.split("  ")[0] for line in table[1:3]] == ["weights", "saved for backward"]
    assert "%" not in table[0]  # FP8 is emulated on a CPU, where its time means nothing
    assert "\n".join(table[3:5]) == train_gpt.ON_CPU
    assert re.fullmatch(r"The comparison took \d+ s\.", table[5])
    png = tmp_path / "out" / "train_gpt.png"
    assert f"curves: {png}" in output
    assert png.read_bytes().startswith(PNG_SIGNATURE)

    baseline, fp8 = results["runs"]
    for result in (baseline, fp8):
        assert len(result["train_loss"]) == 3
        assert result["validation_steps"] == [2, 3]
        assert all(0 < loss < 2 * math.log(256) for loss in result["validation_loss"])
        assert result["step_ms"] > 0
        assert result["seconds"] > 0
    assert fp8["sizes"]["weights"] == baseline["sizes"]["weights"]
    # One byte replaces two in the inputs of qkv and up, and of down (four times as wide). Weights
    # are not saved. The input of proj takes a byte more: in bfloat16 it is attention's output,
    # which is saved anyway.
    tokens, dim = 2 * CONFIG.context, CONFIG.dim
    bytes_of_casts = CONFIG.n_layer * (tokens * (1 + 1 + 4 - 1) * dim + 2 * 12 * dim * dim)
    scales = LAYERS * 3 * 4  # of x and of the weight, and the factor that casts the weight again
    saved_for_backward = [
        run_result["sizes"]["saved for backward"] for run_result in (baseline, fp8)
    ]
    assert saved_for_backward[0] - saved_for_backward[1] == bytes_of_casts - scales
    assert fp8["train_loss"] != baseline["train_loss"]
    assert abs(results["gap_percent"]) < 5
    assert results["gemms"]["fp8"] == 3 * LAYERS
    assert results["gemms"]["high_precision"] >= 3
    assert json.loads(file.read_text()) == json.loads(json.dumps(results))


@pytest.mark.parametrize("recipe", train_gpt.RECIPES)
def test_every_recipe_trains(recipe, tmp_path):
    results = run_job(tmp_path, "--recipe", recipe, "--steps", "1")
    assert results["recipe"]["name"] == recipe
    assert math.isfinite(results["runs"][1]["validation_loss"][-1])


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
def test_transformer_layers_train_in_fp8_with_attention(architecture, tmp_path, capsys):
    """In FP8, attention included, the losses are close to the plain run's from the first step."""
    results = run_job(
        tmp_path, "--architecture", architecture, "--layers", "transformer", "--fp8-attention"
    )
    assert "2 of 2 attention modules in FP8" in capsys.readouterr().out
    assert (results["architecture"], results["layers"]) == (architecture, "transformer")
    assert results["gemms"]["fp8"] == 3 * LAYERS
    baseline, fp8 = results["runs"]
    assert fp8["train_loss"][0] != baseline["train_loss"][0]
    assert fp8["train_loss"] == pytest.approx(baseline["train_loss"], rel=0.01)


def test_fp8_attention_needs_transformer_layers(capsys):
    with pytest.raises(SystemExit):
        train_gpt.main([*SMALL, "--fp8-attention"])
    assert "needs --layers transformer" in capsys.readouterr().err


def test_same_seed_gives_same_losses(tmp_path):
    first, second = (run_job(tmp_path, "--steps", "2")["runs"] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a["train_loss"] == b["train_loss"]
        assert a["validation_loss"] == b["validation_loss"]
    other_seed = run_job(tmp_path, "--steps", "2", "--seed", "1")["runs"]
    assert other_seed[0]["train_loss"] != first[0]["train_loss"]


@pytest.mark.parametrize(
    ("names", "converted"),
    [([], LAYERS), (["none"], LAYERS + 1), (["lm_head", "mlp"], LAYERS // 2)],
)
def test_exclude_replaces_the_default(names, converted):
    args = train_gpt.parse([word for name in names for word in ("--exclude", name)])
    model = float8lab.convert_to_float8(gpt.GPT(CONFIG), exclude=train_gpt.excluded(args))
    assert len(float8lab.conversion_report(model).converted) == converted


def test_runs_without_matplotlib_and_tqdm(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt, "Figure", None)
    monkeypatch.setattr(train_gpt, "tqdm", None)
    run_job(tmp_path)
    output = capsys.readouterr().out
    assert "no curves drawn" in output
    assert "FP8: step 3, validation loss" in output
    assert not (tmp_path / "train_gpt.png").exists()


class StepRecorder:
    """Replaces ``float8lab.inspect.watch``; logs the losses that it gets."""

    def __init__(self, model, every):
        self.log = Log(recipe="told", layers=[f"every {every}"])

    def __enter__(self):
        return self

    def __exit__(self, *exception_info):
        self.log.conversion = f"raised {exception_info[0]}"

    def step(self, loss):
        self.log.steps.append(Step(len(self.log.steps), loss=loss))


def test_report_shows_the_watched_fp8_run(tmp_path, capsys, monkeypatch):
    pytest.importorskip("plotly")
    monkeypatch.setattr(train_gpt, "WATCHED", 2)
    monkeypatch.setattr(float8lab.inspect, "watch", StepRecorder)
    file = tmp_path / "pages" / "report.html"
    results = run_job(tmp_path, "--steps", "4", "--report", str(file))
    assert f"report: {file}" in capsys.readouterr().out
    page = file.read_text()
    assert "raised None" in page
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    assert json.loads(data)["layers"] == ["every 2"]
    losses = json.loads(data)["loss"]
    assert losses == {"steps": [0, 1, 2, 3], "values": results["runs"][1]["train_loss"]}


def test_report_has_only_training_steps(tmp_path, monkeypatch):
    """The log has no step of the two validations of two batches each."""
    pytest.importorskip("plotly")
    logs = []
    monkeypatch.setattr(float8lab.inspect, "report", lambda log, path: logs.append(log) or path)
    run_job(tmp_path, "--steps", "2", "--report", str(tmp_path / "report.html"))
    (log,) = logs
    assert len(log.layers) == LAYERS
    assert "skipped  excluded by 'lm_head'" in log.conversion
    for step in (0, 1):
        gemms = next(s.gemms for s in log.steps if s.step == step)
        for layer in log.layers:
            assert gemms[layer] == {"fprop": 1, "dgrad": 1, "wgrad": 1}
            records = {r.operand: r for r in log.records if (r.step, r.layer) == (step, layer)}
            assert set(records) == {"x", "w", "dy"}
            width = CONFIG.dim * (4 if layer.endswith("down") else 1)
            assert records["x"].elements == 2 * CONFIG.context * width


def test_report_without_plotly_is_refused_before_training(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run_job(tmp_path, "--report", str(tmp_path / "report.html"))
    assert "--report needs plotly" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        train_gpt.main(["--device", "cuda"])
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_script_starts_as_a_program():
    assert "lm_head" in run_python(train_gpt.__file__, "--help")


def test_rate_rises_then_falls_and_validations_end_with_the_last_step():
    training = train_gpt.Training(
        steps=50, batch_size=1, learning_rate=1.0, validations=4, validation_windows=1
    )
    rates = [training.rate(step) for step in range(50)]
    assert rates.index(max(rates)) in (4, 5)
    assert max(rates) == 1.0
    assert rates[5:] == sorted(rates[5:], reverse=True)
    validated = [step for step in range(50) if training.validates_after(step)]
    assert len(validated) == 4
    assert validated[-1] == 49


def test_model_takes_dims_that_16_does_not_divide():
    model = gpt.GPT(gpt.GPTConfig(context=7, n_layer=1, n_head=3, dim=21, vocab_size=11))
    tokens = torch.randint(11, (2, 7))
    loss = model(tokens, tokens)
    loss.backward()
    assert model(tokens).shape == (2, 7, 11)
    assert 0 < loss.item() < 2 * math.log(11)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_config_refuses_heads_that_do_not_fit():
    with pytest.raises(ValueError, match="dim must be a multiple of n_head"):
        gpt.GPTConfig(context=8, n_layer=1, n_head=3, dim=16)


@pytest.mark.slow
def test_text_is_large_enough_and_source_code_is_larger():
    assert LOAD_TEXT is text.load_text
    prose, code = text.load_text(), text.load_text(code=True)
    assert len(prose.train) > 1_000_000
    assert 0.05 < len(prose.validation) / len(prose.train) < 0.2
    assert prose.train.dtype == torch.int64
    assert int(prose.train.max()) < 256
    assert len(code.train) > 4_000_000
    assert code.digest != prose.digest


@pytest.mark.parametrize("code", [False, True], ids=["docstrings", "code"])
def test_text_is_the_same_each_time(code, monkeypatch):
    folder = str(Path(json.__file__).parent)
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: folder)
    first, second = (text.load_text(code=code) for _ in range(2))
    assert first.digest == second.digest
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)


def test_split_loses_and_repeats_nothing():
    content = bytes(range(256)) * 5
    train, validation = text.split(content, chunk=100, every=4)
    assert len(train) + len(validation) == len(content)
    assert validation == content[300:400] + content[700:800] + content[1100:1200]


def test_docstring_examples_run():
    assert doctest.testmod(text) == (0, 1)


def test_docstrings_are_read_without_importing(tmp_path):
    source = '''
        """Of the module."""
        raise SystemExit("must not be imported")

        def later():
            "Of a function."

        class Earlier:
            """Of a class."""
        '''
    (tmp_path / "b.py").write_text(textwrap.dedent(source))
    (tmp_path / "a.py").write_text('"An invalid escape: \\d"\n')
    (tmp_path / "broken.py").write_text("def (")
    (tmp_path / "latin.py").write_bytes(b'"""\xe9"""')
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text('"""Skipped."""')
    assert text.docstrings(tmp_path) == [
        "An invalid escape: \\d", "Of the module.", "Of a function.", "Of a class.",
    ]  # fmt: skip
