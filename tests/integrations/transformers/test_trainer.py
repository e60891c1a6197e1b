"""``Float8Callback`` in a real Trainer: conversion, report and checkpoints."""

import importlib
import inspect
import json
import runpy
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import float8lab
from float8lab import recipes
from float8lab.nn.precision import precisions_below

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecation warnings of its dependencies
    transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    pytest.importorskip("accelerate", reason="needs the extra 'transformers'")
    from float8lab.integrations.transformers import (
        SCALING_NAME,
        Float8Callback,
        Float8StatsCallback,
    )

from tests.integrations.transformers.models import build
from tests.integrations.transformers.training import DELAYED, losses, same_state, trainer


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: Any) -> Any:
    """A run of eight steps with delayed scaling, and the text that it printed."""
    folder = tmp_path_factory.mktemp("whole")
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "builtins.print", lambda *words, **_: printed.append(" ".join(map(str, words)))
        )
        runner = trainer(folder, 8, Float8Callback(DELAYED, exclude=["lm_head"]))
        with float8lab.count_gemms() as counts:
            runner.train()
    return runner, counts.fp8, printed


def test_a_run_trains_in_fp8_and_prints_one_report(finished_run: Any) -> None:
    runner, gemms, printed = finished_run
    assert gemms == 8 * 14 * 3  # seven layers in each of two blocks
    assert losses(runner)[-1] < 0.7 * losses(runner)[0]
    assert printed[0] == f"Float8Callback:\n{float8lab.conversion_report(runner.model)}"
    assert "14 of 15 linear layers in FP8" in printed[0]
    assert sum(line.startswith("Float8Callback") for line in printed) == 1


def test_a_run_resumes_bit_for_bit_with_its_scales(finished_run: Any, tmp_path: Path) -> None:
    runner, _, _ = finished_run
    half_way = Path(runner.args.output_dir) / "checkpoint-4"
    shutil.copytree(half_way, tmp_path / "checkpoint-4")
    model = build("llama")[0]
    with torch.no_grad():
        model.lm_head.weight.zero_()
    resumed = trainer(tmp_path, 8, Float8Callback(DELAYED, exclude=["lm_head"]), model)
    resumed.train(resume_from_checkpoint=True)
    assert losses(resumed) == losses(runner)
    assert same_state(resumed.model, runner.model)

    # Without the file of scales the run cannot resume bit for bit.
    (tmp_path / "checkpoint-4" / SCALING_NAME).unlink()
    without_scales = trainer(tmp_path, 8, Float8Callback(DELAYED, exclude=["lm_head"]))
    with pytest.raises(FileNotFoundError, match=SCALING_NAME):
        without_scales.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    state = tmp_path / "checkpoint-4" / "trainer_state.json"
    trainer_state = json.loads(state.read_text())
    del trainer_state["stateful_callbacks"]["float8lab"]
    state.write_text(json.dumps(trainer_state))
    without_scales.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses(without_scales)[:4] == losses(runner)[:4]
    assert not same_state(without_scales.model, runner.model)


def test_a_checkpoint_of_another_run_is_not_taken_for_one_of_this_run(
    finished_run: Any, tmp_path: Path
) -> None:
    runner, _, _ = finished_run
    half_way = str(Path(runner.args.output_dir) / "checkpoint-4")
    other_run = trainer(
        tmp_path, 4, Float8Callback(DELAYED, exclude=["lm_head"]), learning_rate=1e-3
    )
    other_run.train()  # this run has a checkpoint-4, too
    callback = Float8Callback(DELAYED, exclude=["lm_head"])
    with pytest.raises(FileNotFoundError, match=r"TrainingArguments\(resume_from_checkpoint="):
        trainer(tmp_path, 8, callback).train(resume_from_checkpoint=half_way)
    resumed = trainer(tmp_path, 8, callback, resume_from_checkpoint=half_way)
    resumed.train(resume_from_checkpoint=half_way)
    assert losses(resumed) == losses(runner)
    assert same_state(resumed.model, runner.model)


def test_checkpoints_load_as_plain_models(finished_run: Any) -> None:
    runner, _, _ = finished_run
    half_way = Path(runner.args.output_dir) / "checkpoint-8"
    loaded = transformers.LlamaForCausalLM.from_pretrained(half_way)
    assert same_state(loaded, runner.model)
    assert not any(precisions_below(loaded))


def test_a_model_converted_beforehand_trains_the_same(tmp_path: Path) -> None:
    """``convert_to_float8`` before the Trainer; without delayed scaling no state is saved."""
    model = float8lab.convert_to_float8(build("llama")[0])
    report = str(float8lab.conversion_report(model))
    already_converted = trainer(tmp_path / "a", 4, Float8Callback(DELAYED), model)
    already_converted.train()
    assert str(float8lab.conversion_report(model)) == report  # the model already has FP8 layers
    by_callback = trainer(tmp_path / "b", 4, Float8Callback())
    by_callback.train()
    assert losses(already_converted) == losses(by_callback)
    assert not (tmp_path / "b" / "checkpoint-4" / SCALING_NAME).exists()


def test_the_callback_works_with_other_features_of_the_trainer(tmp_path: Path) -> None:
    """Gradient accumulation, activation checkpointing, bfloat16, and a callback added late."""
    runner = trainer(
        tmp_path, 4, transformers.TrainerCallback(), bf16=True, gradient_accumulation_steps=2,
        activation_checkpointing=True, save_total_limit=1, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    runner.add_callback(Float8Callback(DELAYED))
    runner.train()
    assert float8lab.conversion_report(runner.model).converted
    assert losses(runner)[-1] < losses(runner)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]
    assert (tmp_path / "checkpoint-4" / SCALING_NAME).exists()


def test_a_high_precision_checkpoint_resumes_in_fp8(tmp_path: Path, capsys: Any) -> None:
    trainer(tmp_path, 4, transformers.TrainerCallback()).train()
    runner = trainer(tmp_path, 6, Float8Callback(DELAYED))
    runner.train(resume_from_checkpoint=True)
    assert "the checkpoint has no scales" in capsys.readouterr().out


def test_the_callback_checks_and_keeps_its_arguments() -> None:
    block_fields = {"name": "Float8BlockScaling"}
    callback = Float8Callback(
        block_fields, overrides={"a": "DelayedScaling", "b": block_fields, "c": None}
    )
    block = recipes.Float8BlockScaling()
    assert callback.recipe == block
    assert callback.overrides == {"a": recipes.DelayedScaling(), "b": block, "c": None}
    with pytest.raises(TypeError, match="unexpected keyword argument 'excude'"):
        Float8Callback(excude=["lm_head"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^overrides\['a'\] must be"):
        Float8Callback(overrides={"a": 3})  # type: ignore[dict-item]
    for argument in ("recipe", "exclude", "overrides", "filter_fn", "strict"):
        with pytest.raises(TypeError, match=f"^{argument} must be"):
            Float8Callback(**{argument: 3})


def test_statistics_are_sent_to_the_trainers_tracker(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    stats = Float8StatsCallback(every=2, layers="*.mlp.*")
    for steps in (4, 8):  # the second run resumes
        runner = trainer(tmp_path, steps, Float8Callback(), report_to=["tensorboard"])
        runner.add_callback(stats)
        runner.train(resume_from_checkpoint=steps == 8)
    assert [step.step for step in stats.watch.log.steps] == [4, 6]
    name = "tensorboard.backend.event_processing.event_accumulator"
    events = importlib.import_module(name).EventAccumulator(str(tmp_path / "runs" / "float8"))
    scalars = events.Reload().Scalars("float8/model.layers.0.mlp.up_proj/weight/amax")
    assert [event.step for event in scalars] == [0, 2, 4, 6]


def test_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.pytorch_utils", None)
    with pytest.raises(ModuleNotFoundError, match='needs the extra "transformers"'):
        runpy.run_path(inspect.getfile(Float8Callback))


def test_the_callback_is_an_attribute_of_the_package() -> None:
    assert float8lab.integrations.transformers.Float8Callback is Float8Callback
    assert "transformers" in dir(float8lab.integrations)
