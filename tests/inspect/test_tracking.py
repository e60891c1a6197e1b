"""Statistics and alerts of a watched run where people look: names, steps, and real trackers."""

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


def log(steps: int = 4) -> Log:
    """An operand that loses more from step to step; more than a tenth from step 2 on."""
    names = ["layers.0.mlp.up", "odd @ name"]
    records = [
        record(s, name, "x", flushed=0.04 * (s + 1), sqnr=None, scale_max=0.5)
        for s in range(steps)
        for name in names
    ]
    gemms = {names[0]: {"fprop": 1}, names[1]: {"fprop, high precision": 1}}
    return Log(layers=names, records=records, steps=[Step(0, gemms=gemms)])


def test_names_steps_and_alerts():
    seen = {}
    track(log(), lambda metrics, step: seen.update({step: metrics}), every=3)
    assert list(seen) == [0, 2, 3]  # statistics of 0 and 3; 2 has alerts
    assert seen[0][UNDERFLOW] == 0.04
    assert seen[0]["float8/layers.0.mlp.up/input/scale"] == 0.5
    assert seen[0]["float8/odd___name/fprop/alerts"] == 1
    assert not any(name.endswith("sqnr") for name in seen[0])
    assert (seen[0][KINDS], seen[0]["float8/alerts"]) == (0, 1)
    assert seen[2] == {KINDS: 1, "float8/odd___name/input/alerts": 1, "float8/alerts": 2}
    assert seen[3][UNDERFLOW] == pytest.approx(0.16)


def test_what_a_watch_adds_is_sent_as_it_is_added():
    model = float8lab.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(32, 32)))
    seen = []
    with watch(model, every=2, start=10) as w:
        track(w.log, lambda metrics, step: seen.append((step, metrics)), every=1)
        for size in (1.0, 2.0, torch.nan):
            model(size * torch.ones(16, 32)).sum().backward()
            w.step()
    assert [step for step, _ in seen] == [10, 12]
    assert seen[0][1]["float8/0/input/amax"] == 1.0
    assert seen[1][1]["float8/0/input/nan"] == 16 * 32
    assert seen[1][1]["float8/alerts"] == len(w.alerts) > 0


@pytest.mark.parametrize("folder", ["runs", "elsewhere"])
def test_tensorboard(tmp_path, monkeypatch, folder):
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    track(log(), "tensorboard" if folder == "runs" else tmp_path / folder, every=1)
    name = "tensorboard.backend.event_processing.event_accumulator"
    (written,) = (tmp_path / folder).rglob("events.*")
    events = importlib.import_module(name).EventAccumulator(str(written)).Reload()
    values = {event.step: event.value for event in events.Scalars(UNDERFLOW)}
    assert values == {s: pytest.approx(0.04 * (s + 1)) for s in range(4)}
    (text, *_) = events.Tensors("float8/alerts/text_summary")
    assert b"high precision" in text.tensor_proto.string_val[0]


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="heavy; pip install wandb")
    with pytest.raises(RuntimeError, match="active run"):
        track(log(), "wandb")
    with wandb.init(mode="offline", dir=tmp_path) as run:
        track(log(), "wandb", every=1)
        assert run.summary["float8/step"] == 3
        assert run.summary[UNDERFLOW] == pytest.approx(0.16)
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("store", ["file://{}/runs", "sqlite:///{}/runs.db"])
def test_mlflow(tmp_path, monkeypatch, store):
    mlflow = pytest.importorskip("mlflow", reason="heavy; pip install mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a store of the past, still in use
    mlflow.set_tracking_uri(store.format(tmp_path))
    with mlflow.start_run() as run:
        track(log(), "mlflow", every=1)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, UNDERFLOW)
    assert [(m.step, m.value) for m in history] == [(s, 0.04 * (s + 1)) for s in range(4)]
    alerts = mlflow.artifacts.load_text(f"{run.info.artifact_uri}/float8/alerts.txt")
    assert "step 2: layers.0.mlp.up, x: underflow (12 %)" in alerts


def test_a_tracker_that_is_not_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match="track needs wandb"):
        track(log(), "wandb")
    with pytest.raises(ValueError, match="to must be one of 'tensorboard', 'wandb' or 'mlflow'"):
        track(log(), "comet")
