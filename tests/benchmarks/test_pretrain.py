"""Pretraining a tiny model on a CPU: resumed runs, their folders and their tables."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import pretrain
from benchmarks.pretrain import CHECKPOINT, LOG, Log, Text, main
from float8lab.nn import ScalingState

_load_text = pretrain.load_text  # tests replace it
SCHEDULE = ["--schedule", "7", "--log-every", "2", "--validate-every", "4"]
TINY = ["--tiny", "--no-compile", "--batch", "2", "--learning-rate", "0.01", *SCHEDULE]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch, request):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    sizes = {"context": 16, "n_layer": 1, "n_head": 2, "n_group": 1, "dim": 32, "ffn": 48}
    monkeypatch.setitem(pretrain.PRESETS, "tiny", replace(pretrain.PRESETS["tiny"], **sizes))
    text = torch.arange(4000).square() % 251
    made_up_text = Text(text[:3000], text[3000:], "digest")
    monkeypatch.setattr(pretrain, "load_text", lambda **options: made_up_text)


def log_lines(folder):
    return [json.loads(line) for line in (folder / LOG).read_text().splitlines()]


def loss_curve(folder):
    return [(line["step"], line["loss"], line.get("validation_loss")) for line in log_lines(folder)]


def checkpoint_tensors(folder):
    """All tensors of a checkpoint file, by their place in it."""
    state = torch.load(folder / CHECKPOINT)
    tensors = {**state["model"], **state["scaling"]}
    for index, entry in state["optimizer"]["state"].items():
        tensors |= {f"{index}.{name}": value for name, value in entry.items()}
    return tensors


def make_run(recipe):
    common_options = {
        "preset": "tiny",
        "compile": False,
        "log_every": 1,
        "validate_every": 1,
        "text": "",
    }
    setup = pretrain.Setup(
        recipe=recipe, batch=2, schedule=7, learning_rate=0.01, seed=0, **common_options
    )
    return pretrain.Run(setup, pretrain.load_text(), torch.device("cpu"))


@pytest.mark.parametrize("recipe", ["bfloat16", "delayed", "current"])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(recipe, tmp_path, capsys):
    argv = [*TINY, "--recipe", recipe, "--commit", "abc"]
    main([*argv, "--out", str(tmp_path / "straight")])
    # The first ends within a logging interval.
    for steps in (["--steps", "3"], ["--steps", "2"], []):
        main([*argv, *steps, "--out", str(tmp_path / "resumed")])
    assert f"{recipe} is at step 5 of 7" in capsys.readouterr().out
    uninterrupted, resumed = loss_curve(tmp_path / "straight"), loss_curve(tmp_path / "resumed")
    assert uninterrupted == resumed
    assert [(step, validation_loss is not None) for step, _, validation_loss in resumed] == [
        (2, False), (4, True), (6, False), (7, True),
    ]  # fmt: skip
    assert resumed[-1][2] < resumed[1][2]
    expected, resumed_tensors = (
        checkpoint_tensors(tmp_path / "straight"),
        checkpoint_tensors(tmp_path / "resumed"),
    )
    assert expected.keys() == resumed_tensors.keys()
    assert all(torch.equal(value, resumed_tensors[name]) for name, value in expected.items())
    assert any(name.endswith("/history") for name in resumed_tensors) == (recipe == "delayed")
    assert resumed_tensors["0.master"].dtype == torch.float32
    assert resumed_tensors["tokens.weight"].dtype == torch.bfloat16
    last = log_lines(tmp_path / "resumed")[-1]
    assert (last["tokens"], last["commit"], last["peak_gb"]) == (7 * 32, "abc", None)
    seconds = [line["seconds"] for line in log_lines(tmp_path / "resumed")]
    assert seconds == sorted(seconds)
    # Only the first interval of each call compiles. The last of these calls has two intervals.
    assert [line["is_warm"] for line in log_lines(tmp_path / "resumed")] == [
        False,
        False,
        False,
        True,
    ]


def test_validation_does_not_change_delayed_scaling():
    run = make_run("delayed")
    run.train_step()
    before = ScalingState(run.model).state_dict()
    assert run.validate() == run.validate()
    after = ScalingState(run.model).state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert any(name.endswith("/history") for name in before)


def test_recipes_train_on_the_same_batches(tmp_path):
    for recipe in ("bfloat16", "current"):
        main([*TINY, "--recipe", recipe, "--out", str(tmp_path / recipe)])
    (_, bfloat16_loss, _), (_, fp8_loss, _) = (
        loss_curve(tmp_path / name)[0] for name in ("bfloat16", "current")
    )
    assert bfloat16_loss != fp8_loss
    assert fp8_loss == pytest.approx(bfloat16_loss, rel=0.01)


def test_log_lines_after_the_checkpoint_file_are_dropped(tmp_path):
    main([*TINY, "--steps", "4", "--out", str(tmp_path)])
    losses = loss_curve(tmp_path)
    # A line of a run that died before its next checkpoint file.
    with (tmp_path / LOG).open("a") as log:
        log.write(json.dumps({"step": 6, "loss": 1.0}) + "\n")
    main([*TINY, "--minutes", "0", "--out", str(tmp_path)])
    assert loss_curve(tmp_path) == losses
    main([*TINY, "--out", str(tmp_path)])
    assert [step for step, *_ in loss_curve(tmp_path)] == [2, 4, 6, 7]


def test_checkpoint_files_are_written_as_often_as_asked(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(pretrain.Run, "save", lambda self, path: saved.append(self.step))
    main([*TINY, "--checkpoint-minutes", "0", "--out", str(tmp_path / "often")])
    assert saved == [2, 4, 6, 7, 7]
    saved.clear()
    main([*TINY, "--out", str(tmp_path / "once")])
    assert saved == [7]
    saved.clear()
    main([*TINY, "--no-checkpoint", "--out", str(tmp_path / "never")])
    assert saved == []


def test_folders_of_other_runs_are_refused(tmp_path):
    main([*TINY, "--no-checkpoint", "--out", str(tmp_path)])
    assert {path.name for path in tmp_path.iterdir()} == {LOG, "run.json"}
    with pytest.raises(SystemExit, match="has only a log"):
        main([*TINY, "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"recipe is 'bfloat16' in .* and 'current' here"):
        main([*TINY, "--recipe", "current", "--out", str(tmp_path)])


def test_each_block_is_compiled_unless_no_compile_is_given(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(nn.Module, "compile", lambda self: compiled.append(type(self).__name__))
    argv = [word for word in TINY if word != "--no-compile"]
    main([*argv, "--steps", "0", "--out", str(tmp_path / "compiled")])
    assert compiled == ["Block"]
    main([*TINY, "--steps", "0", "--out", str(tmp_path / "eager")])
    assert len(compiled) == 1


@pytest.mark.gpu
def test_a_run_on_a_gpu_trains_and_resumes(tmp_path):
    for _ in range(2):
        main([*TINY, "--recipe", "delayed", "--steps", "4", "--out", str(tmp_path)])
    assert [step for step, *_ in loss_curve(tmp_path)] == [2, 4, 6, 7]
    assert loss_curve(tmp_path)[-1][2] < loss_curve(tmp_path)[1][2]
    assert all(line["peak_gb"] > 0 for line in log_lines(tmp_path))


def test_pretrain_needs_a_gpu(tmp_path):
    with pytest.raises(SystemExit, match=r"needs a CUDA GPU of 80 GB.*--tiny"):
        main(["--out", str(tmp_path)])


def test_validation_steps_must_be_logged_steps(capsys):
    with pytest.raises(SystemExit):
        main(["--out", "x", "--validate-every", "15"])
    assert "must be a multiple of --log-every, 10; got 15" in capsys.readouterr().err


def test_the_model_has_a_billion_parameters():
    with torch.device("meta"):
        model = pretrain.Llama(pretrain.PRESETS["1b"])
    assert sum(p.numel() for p in model.parameters()) == 1_007_224_832


def make_log(name, recipe, losses, rates, device="H100", validated=2, **options):
    """A log with a line every ten steps; the first interval compiles."""
    lines_by_step = {}
    for index, (loss, rate) in enumerate(zip(losses, rates, strict=True)):
        step = 10 * (index + 1)
        line = {"step": step, "tokens": step * 1000, "seconds": 6.0 * (index + 1), "loss": loss}
        line |= {"tokens_per_second": rate, "is_warm": index > 0, "peak_gb": 8.0 + index}
        if (index + 1) % validated == 0:
            line["validation_loss"] = 2 * loss
        lines_by_step[step] = line | {"device": device, "commit": "abc", "torch": "2"}
    return Log(name, {"recipe": recipe, "batch": 8} | options, lines_by_step)


BASE = make_log("a", "bfloat16", [4.0, 3.0, 2.0, 1.0], [1.0, 100.0, 110.0, 90.0])
FP8 = make_log("b", "current", [4.0, 3.0, 2.2, 1.1, 0.5], [1.0, 140.0, 150.0, 160.0, 150.0])


def cells(table, line):
    return [cell.strip() for cell in table.splitlines()[line].split("|")[1:-1]]


def test_tables_compare_runs_at_the_same_steps(monkeypatch):
    monkeypatch.setattr(pretrain, "SMOOTHED", 20)
    text = pretrain.tabulate([BASE, FP8])
    runs, training, validation = (part for part in text.split("\n\n") if part.startswith("|"))
    assert cells(runs, 2) == [
        "a", "bfloat16", "40", "0.0", "0.4", "100", "1.00", "11.0", "H100", "abc",
    ]  # fmt: skip
    assert cells(runs, 3)[5:8] == ["150", "1.50", "12.0"]
    assert cells(training, 2) == ["20", "3.5000", "3.5000 (+0.00 %)"]
    assert cells(training, 3) == ["40", "1.5000", "1.6500 (+10.00 %)"]
    assert cells(validation, 3) == ["40", "2.0000", "2.2000 (+10.00 %)"]
    assert len(validation.splitlines()) == 4
    assert "(gap to a)" in text


def test_times_of_another_gpu_and_of_a_diverged_run_are_not_compared():
    other_gpu = make_log("c", "block", [4.0, 3.0], [1.0, 100.0], device="H200")
    diverged = make_log("d", "block", [4.0, float("nan")], [1.0, 100.0])
    runs = pretrain.tabulate([BASE, other_gpu, diverged])
    assert cells(runs, 3)[5:7] == ["100", "-"]
    assert cells(runs, 4)[5:7] == ["nan", "nan"]


def test_tables_of_long_runs_have_few_rows():
    long_log = make_log("a", "bfloat16", [2.0] * 100, [1.0] * 100, validated=1)
    steps = pretrain.shown_steps([long_log])
    assert len(steps) == pretrain.MOST_STEPS
    assert (steps[-1], steps) == (1000, sorted(set(steps)))
    with pytest.raises(SystemExit, match="none"):
        pretrain.shown_steps([long_log, Log("b", long_log.setup, {5: {}})])


def test_table_reads_folders_and_draws_curves(tmp_path, capsys):
    folders = [tmp_path / recipe for recipe in ("current", "bfloat16")]
    for folder in folders:
        main([*TINY, "--no-checkpoint", "--recipe", folder.name, "--out", str(folder)])
    image = tmp_path / "curves.png"
    capsys.readouterr()
    main(["--plot", str(image), "--table", *map(str, folders)])
    assert image.stat().st_size > 10_000
    output = capsys.readouterr().out
    assert [cells(output, 2)[0], cells(output, 3)[0]] == ["bfloat16", "current"]
    other_batch = [*TINY, "--no-checkpoint", "--batch", "3", "--out", str(tmp_path / "other")]
    main(other_batch)
    with pytest.raises(SystemExit, match=r"batch is 3 in .*other and 2 in"):
        main(["--table", str(folders[1]), str(tmp_path / "other")])


def test_further_folders_are_appended_to_the_text(tmp_path, monkeypatch):
    library, second_library = tmp_path / "library", tmp_path / "further"
    for folder in (library, second_library):
        folder.mkdir()
        (folder / "module.py").write_text(f"# {folder.name}\n" + "=" * 10 * 16384)
    module_names = _load_text.__globals__
    monkeypatch.setattr(module_names["sysconfig"], "get_path", lambda name: str(library))
    monkeypatch.setitem(module_names, "manual", list)
    train_text = bytes(_load_text(code=True, folders=[second_library]).train.tolist())
    assert train_text.index(b"# library") < train_text.index(b"# further")
    assert b"# further" not in bytes(_load_text(code=True).train.tolist())
