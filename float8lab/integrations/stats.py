"""The callback that watches a trainer's run, all but the hooks of each trainer.

``import float8lab`` does not load this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from torch import Tensor, nn

from float8lab.arguments import check_size
from float8lab.inspect.watch.tracking import Destination, track
from float8lab.inspect.watch.watching import Layers, watch

__all__ = ["StatsCallback"]


class StatsCallback:
    """Watch the FP8 layers of the model that a trainer trains, and track their statistics.

    It is called ``Float8StatsCallback``: ``float8lab.integrations.transformers`` has it for
    Transformers' Trainer, ``float8lab.integrations.lightning`` for the package ``lightning``, and
    ``float8lab.integrations.pytorch_lightning`` for ``pytorch_lightning``. The model must have FP8
    layers when training starts. Of several ranks the first one tracks what it casts.

    Args:
        every: watch one step of every so many; the steps between cost nothing.
        to: as in ``float8lab.inspect.track``. None is where the trainer reports to: Lightning's
            loggers, and of Transformers' ``report_to`` TensorBoard (as the run ``float8`` in
            ``output_dir/runs``), W&B and MLflow.
        layers: as in ``float8lab.inspect.watch``.
        jsonl: likewise.
        masters: likewise.
        warn: likewise.

    Attributes:
        watch: the watch of the last training; None before.
    """

    def __init__(
        self, every: int = 100, to: Destination | None = None, *, layers: Layers | None = None,
        jsonl: str | PathLike[str] | None = None, masters: Mapping[Tensor, Tensor] | None = None,
        warn: bool = False,
    ) -> None:  # fmt: skip
        self.interval, self.to = check_size("every", every, minimum=1), to
        self.options: dict[str, Any] = {
            "layers": layers, "jsonl": jsonl, "masters": masters, "warn": warn,
        }  # fmt: skip
        self.watch: watch | None = None

    def begin(
        self, model: nn.Module, start: int, destinations: Sequence[Destination] | None
    ) -> None:
        """Watch from step ``start`` on, and track to ``to`` or else to these; None: not at all."""
        self.end()  # of a training that was interrupted
        self.watch = watch(model, every=self.interval, start=start, **self.options)
        if destinations is not None:
            for destination in destinations if self.to is None else [self.to]:
                track(self.watch.log, destination, every=self.interval)
        self.watch.__enter__()

    def end(self) -> None:
        """End the watch, if it is active."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)

    def on_train_end(self, *args: object, **kwargs: object) -> None:
        """End the watch; every trainer calls this hook so."""
        self.end()
