"""track: send a watched run's statistics and alerts to an experiment tracker."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from float8lab.arguments import check_callables, check_choice, check_instance, check_size, needs
from float8lab.inspect.watch.findings import Finding, findings_of
from float8lab.inspect.watch.records import Log, Record, Step

__all__ = ["Destination", "TensorBoardWriter", "track"]

_OPERANDS = {
    "x": "input", "w": "weight", "dy": "gradient", "q": "queries", "k": "keys", "v": "values",
}  # fmt: skip
_SCALARS = {
    "underflow": "flushed", "saturation": "saturated", "subnormal": "subnormal", "sqnr": "sqnr",
    "amax": "amax", "scale": "scale_max", "staleness": "staleness", "nan": "nan", "inf": "inf",
}  # fmt: skip
"""The last part of each metric's name, and the field of a ``Record`` that is its value."""
_PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
_MOST_METRICS = 1000
"""The number of metrics that MLflow takes in one request."""

SendMetrics = Callable[[dict[str, float], int], object]
SendAlert = Callable[[str, int], object]


@runtime_checkable
class TensorBoardWriter(Protocol):
    """The methods of a ``SummaryWriter`` that ``track`` calls."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object: ...

    def add_text(self, tag: str, text: str, step: int, /) -> object: ...

    def flush(self) -> object: ...


Destination = str | Path | TensorBoardWriter | SendMetrics


def track(log: Log, to: Destination, *, every: int = 100) -> None:
    """Send the statistics of a watched run, and its alerts, to an experiment tracker.

    The content of the log is sent at once, and what a running ``watch`` adds is sent as it is
    added. A metric's name has the layer, the operand (``input``, ``weight``, ``gradient``;
    ``queries``, ``keys``, ``values``) and the quantity: ``float8/layers.0.mlp.up/input/underflow``.
    Characters that a tracker refuses become ``_``. ``float8/alerts`` counts the findings of a step,
    and ``float8/<layer>/<operand>/alerts`` those of an operand. New findings are also sent as text:
    as ``float8/alerts`` to TensorBoard and MLflow's artifacts, to W&B as alerts of the run.

    In a job of several ranks, call this function on the rank that logs.

    Args:
        log: ``watch(...).log``, or a log that was read from a file.
        to: ``"tensorboard"``, which writes to the folder ``runs``, the ``Path`` of another folder,
            or a ``SummaryWriter``; ``"wandb"`` or ``"mlflow"``, whose active run is used; or a
            function of the numbers by name, and of the step: ``to(metrics, step)``.
        every: send statistics at most once in this many steps; alerts of all steps are sent.

    Raises:
        ModuleNotFoundError: the tracker is not installed.
        RuntimeError: ``to`` is ``"wandb"`` and W&B has no active run.

    >>> layer = float8lab.convert_to_float8(torch.nn.Linear(32, 32))
    >>> seen = {}
    >>> with float8lab.inspect.watch(layer) as w:
    ...     float8lab.inspect.track(w.log, lambda metrics, step: seen.update(metrics))
    ...     layer(torch.ones(16, 32)).sum().backward()
    >>> seen["float8/model/input/amax"]
    1.0
    """
    check_instance("log", log, Log, "the log of a watch")
    check_size("every", every, minimum=1)
    tracker = _Tracker(*_destination(to), every)
    tracker(log.records, log.steps)
    log.followers.append(tracker)


@dataclass
class _Tracker:
    """A follower of a log, which sends the records and findings that it is called with."""

    send_metrics: SendMetrics
    send_alert: SendAlert
    interval: int
    due: int = 0
    """Statistics are sent next for the first step with at least this number."""
    sent: set[tuple[str, str, str]] = field(default_factory=set)
    """Layer, operand and kind of the findings that were sent as text."""

    def __call__(self, records: Sequence[Record], steps: Sequence[Step]) -> None:
        by_step: dict[int, tuple[list[Record], list[Finding]]] = {}
        for record in records:
            by_step.setdefault(record.step, ([], []))[0].append(record)
        for finding in findings_of(records, steps):
            by_step.setdefault(finding.step, ([], []))[1].append(finding)
        for step, (records_of_step, alerts) in sorted(by_step.items()):
            metrics: dict[str, float] = {}
            if step >= self.due and records_of_step:
                metrics, self.due = _statistics(records_of_step), step + self.interval
            for finding in alerts:
                name = _name(finding, "alerts")
                metrics[name] = metrics.get(name, 0) + 1
            if metrics:
                self.send_metrics({**metrics, "float8/alerts": len(alerts)}, step)
            for finding in alerts:
                if (key := (finding.layer, finding.operand, finding.kind)) not in self.sent:
                    self.sent.add(key)
                    self.send_alert(str(finding), step)


def _statistics(records: Sequence[Record]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for record in records:
        numbers = {name: getattr(record, attribute) for name, attribute in _SCALARS.items()}
        for name, value in {**numbers, "alerts": 0}.items():
            if value is not None and math.isfinite(value):
                metrics[_name(record, name)] = value
    return metrics


def _name(source: Record | Finding, quantity: str) -> str:
    words = source.layer.strip("()"), _OPERANDS.get(source.operand, source.operand), quantity
    return "/".join(["float8", *(re.sub(r"[^\w.-]", "_", word) for word in words)])


def _destination(to: Destination) -> tuple[SendMetrics, SendAlert]:
    if isinstance(to, TensorBoardWriter):
        return _tensorboard(to)
    if not isinstance(to, (str, Path, type(None))):
        check_callables(("metrics", "step"), to=to)
        return to, lambda text, step: None
    tracker = "tensorboard" if isinstance(to, Path) else to
    check_choice("to", tracker, _PACKAGES)
    with needs("track", tracker):
        package = importlib.import_module(_PACKAGES[tracker])
    if tracker == "tensorboard":
        return _tensorboard(package.SummaryWriter(str(to) if isinstance(to, Path) else None))
    return _wandb(package) if tracker == "wandb" else _mlflow(package)


def _tensorboard(writer: TensorBoardWriter) -> tuple[SendMetrics, SendAlert]:
    def send(metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return send, lambda text, step: writer.add_text("float8/alerts", text, step)


def _wandb(package: Any) -> tuple[SendMetrics, SendAlert]:
    if (run := package.run) is None:
        raise RuntimeError(
            "to must be 'wandb' in an active run; got none. Call wandb.init(...) before."
        )
    # Plot against the steps of the watch; other calls of log in the program may count otherwise.
    run.define_metric("float8/step")
    run.define_metric("float8/*", step_metric="float8/step")
    return (
        lambda metrics, step: run.log({**metrics, "float8/step": step}),
        lambda text, step: run.alert(title="float8lab", text=f"step {step}: {text}"),
    )


def _mlflow(package: Any) -> tuple[SendMetrics, SendAlert]:
    alerts: list[str] = []

    def send(metrics: dict[str, float], step: int) -> None:
        entries = list(metrics.items())
        for start in range(0, len(entries), _MOST_METRICS):
            package.log_metrics(dict(entries[start : start + _MOST_METRICS]), step=step)

    def alert(text: str, step: int) -> None:
        alerts.append(f"step {step}: {text}\n")
        package.log_text("".join(alerts), "float8/alerts.txt")

    return send, alert
