"""The callback that watches a trainer's run, without the hooks of a particular trainer.

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

    Users import it as ``Float8StatsCallback``: from ``float8lab.integrations.transformers`` for
    Transformers' Trainer, from ``float8lab.integrations.lightning`` for the package ``lightning``,
    and from ``float8lab.integrations.pytorch_lightning`` for ``pytorch_lightning``. The model must
    have FP8 layers when training starts. With several ranks, the first rank tracks its own casts.

    Args:
        every: the interval of the watched steps; the steps between them cost nothing.
        to: as in ``float8lab.inspect.track``. None tracks to where the trainer reports: Lightning's
            loggers, or what Transformers' ``report_to`` has of TensorBoard (as the run ``float8``
            in ``output_dir/runs``), W&B and MLflow.
        layers: as in ``float8lab.inspect.watch``.
        jsonl: as in ``float8lab.inspect.watch``.
        masters: as in ``float8lab.inspect.watch``.
        warn: as in ``float8lab.inspect.watch``.

    Attributes:
        watch: the watch of the last training; None before the first training.
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
        """Watch from ``start``; track to ``to``, else to these; not if ``destinations`` is None."""
        self.end()  # ends the watch of a training that was interrupted
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
        """End the watch; this hook has the same name in every trainer."""
        self.end()
