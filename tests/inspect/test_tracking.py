"""Tests of ``track``: statistics and alerts of a watched run arrive in experiment trackers."""

import importlib
import sys

import pytest
import torch

import float8lab
from float8lab.inspect import track, watch
from float8lab.inspect.watch.records import Log, Step
from tests.inspect.test_report import record

UNDERFLOW = "float8/layers.0.mlp.up/input/underflow"
KINDS = "float8/layers.0.mlp.up/input/alerts"


def example_log(steps: int = 4) -> Log:
    """A log of an operand that flushes 4 % more in each step, and over a tenth from step 2 on."""
    names = ["layers.0.mlp.up", "odd @ name"]
    records = [
        record(s, name, "x", flushed=0.04 * (s + 1), sqnr=None, scale_max=0.5)
        for s in range(steps)
        for name in names
    ]
    gemms = {names[0]: {"fprop": 1}, names[1]: {"fprop, high precision": 1}}
    return Log(layers=names, records=records, steps=[Step(0, gemms=gemms)])


def test_metrics_have_names_steps_and_alerts():
    sent = {}
    track(example_log(), lambda metrics, step: sent.update({step: metrics}), every=3)
    assert list(sent) == [0, 2, 3]  # statistics of 0 and 3; 2 has alerts
    assert sent[0][UNDERFLOW] == 0.04
    assert sent[0]["float8/layers.0.mlp.up/input/scale"] == 0.5
    assert sent[0]["float8/odd___name/fprop/alerts"] == 1
    assert not any(name.endswith("sqnr") for name in sent[0])
    assert (sent[0][KINDS], sent[0]["float8/alerts"]) == (0, 1)
    assert sent[2] == {KINDS: 1, "float8/odd___name/input/alerts": 1, "float8/alerts": 2}
    assert sent[3][UNDERFLOW] == pytest.approx(0.16)


def test_records_of_a_running_watch_are_sent_step_by_step():
    model = float8lab.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(32, 32)))
    sent = []
    with watch(model, every=2, start=10) as w:
        track(w.log, lambda metrics, step: sent.append((step, metrics)), every=1)
        for size in (1.0, 2.0, torch.nan):
            model(size * torch.ones(16, 32)).sum().backward()
            w.step()
    assert [step for step, _ in sent] == [10, 12]
    assert sent[0][1]["float8/0/input/amax"] == 1.0
    assert sent[1][1]["float8/0/input/nan"] == 16 * 32
    assert sent[1][1]["float8/alerts"] == len(w.alerts) > 0


@pytest.mark.parametrize("folder", ["runs", "elsewhere"])
def test_tensorboard_has_metrics_and_alert_texts(tmp_path, monkeypatch, folder):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    track(example_log(), "tensorboard" if folder == "runs" else tmp_path / folder, every=1)
    name = "tensorboard.backend.event_processing.event_accumulator"
    (event_file,) = (tmp_path / folder).rglob("events.*")
    events = importlib.import_module(name).EventAccumulator(str(event_file)).Reload()
    values = {event.step: event.value for event in events.Scalars(UNDERFLOW)}
    assert values == {s: pytest.approx(0.04 * (s + 1)) for s in range(4)}
    (text, *_) = events.Tensors("float8/alerts/text_summary")
    assert b"high precision" in text.tensor_proto.string_val[0]


def test_wandb_has_metrics_in_its_summary(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="heavy; pip install wandb")
    with pytest.raises(RuntimeError, match="active run"):
        track(example_log(), "wandb")
    with wandb.init(mode="offline", dir=tmp_path) as run:
        track(example_log(), "wandb", every=1)
        assert run.summary["float8/step"] == 3
        assert run.summary[UNDERFLOW] == pytest.approx(0.16)
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", ["file://{}/runs", "sqlite:///{}/runs.db"])
def test_mlflow_has_metrics_and_an_alerts_file(tmp_path, monkeypatch, store):
    mlflow = pytest.importorskip("mlflow", reason="heavy; pip install mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow's old file store, still in use
    mlflow.set_tracking_uri(store.format(tmp_path))
    with mlflow.start_run() as run:
        track(example_log(), "mlflow", every=1)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, UNDERFLOW)
    assert [(m.step, m.value) for m in history] == [(s, 0.04 * (s + 1)) for s in range(4)]
    alerts = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/float8/alerts.txt")
    assert "step 2: layers.0.mlp.up, x: underflow (12 %)" in alerts


def test_missing_and_unknown_trackers_raise(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="track needs wandb"):
        track(example_log(), "wandb")
    with pytest.raises(ValueError, match="to must be one of 'tensorboard', 'wandb' or 'mlflow'"):
        track(example_log(), "comet")
