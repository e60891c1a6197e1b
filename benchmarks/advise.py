"""Compare the steps that ``float8lab.inspect.advise`` predicts with measured steps.

    python -m benchmarks.advise [--layers 2]

The models are Llama decoder layers in bfloat16, in two sizes. ``advise`` gets the model in high
precision and a batch, and predicts the step, forward and backward, in high precision and in FP8.
Then the wall time of the step is measured, and once more after ``convert_to_float8``. ``off`` is
the prediction minus the measurement, in per cent of the measurement.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common, report
from benchmarks.layer import FLOOR_DB
from benchmarks.models import LayerSize, plain_layer
from benchmarks.recipes import RECIPES
from benchmarks.report import Column, Row, Setting, Subject, Target
from float8lab.recipes import Recipe

__all__ = ["SIZES", "SUBJECT", "main", "measure", "rows"]

SIZES = (
    LayerSize(D=2048, H=16, G=16, F=5632, batch=4, sequence=1024),
    LayerSize(D=4096, H=32, G=8, F=14336, batch=4, sequence=4096),
)
WARM_UP_STEPS = 5
"""The number of untimed steps first, which compile kernels and give delayed scales a history."""
MOST_OFF = "largest off %"
TARGET = Target(MOST_OFF, "<=", 15.0)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Compute a loss whose gradient costs next to nothing."""
    loss: Tensor = model(x).float().square().mean()
    return loss


def step_ms(setting: Setting, model: nn.Module, x: Tensor) -> float:
    """Measure the wall time of a step in ms, launches included."""

    def step() -> None:
        model.zero_grad()
        # In training the weights are new in each step, so no cast of them may be kept.
        torch.autograd.graph.increment_version(list(model.parameters()))
        loss_of(model, x).backward()

    for _ in range(WARM_UP_STEPS):
        step()
    return setting.wall(step).median


def measure(setting: Setting, model: nn.Module, x: Tensor, recipe: Recipe) -> dict[str, float]:
    """Return predicted and measured steps in both precisions; this leaves the model converted."""
    predicted = float8lab.inspect.advise(model, x, recipe, loss_fn=loss_of).step
    values: dict[str, float] = {}

    def compare(precision: str) -> None:
        measured = step_ms(setting, model, x)
        values[f"{precision} predicted ms"] = 1e3 * predicted[precision]
        values[f"{precision} measured ms"] = measured
        values[f"{precision} off %"] = 100 * (1e3 * predicted[precision] / measured - 1)

    compare("high precision")
    float8lab.convert_to_float8(model, recipe)
    compare("FP8")
    values[MOST_OFF] = max(abs(values[f"{name} off %"]) for name in ("high precision", "FP8"))
    return values


def size_rows(setting: Setting, size: LayerSize, layers: int) -> Iterator[Row]:
    """Measure a row for each recipe."""
    x = torch.randn(
        (size.batch, size.sequence, size.D), generator=setting.generator(), device=setting.device
    ).bfloat16()

    def stack() -> nn.Sequential:
        modules = (plain_layer(size, setting.device, setting.seed + i) for i in range(layers))
        return nn.Sequential(*modules)

    def branches(model: nn.Module) -> Tensor:
        """Return the output without the residual stream, which would hide a wrong layer."""
        with torch.no_grad():
            y: Tensor = model(x) - x
        return y

    def run(name: str) -> Callable[[], Row]:
        def measured() -> Row:
            model = stack()
            right = branches(model)
            values = measure(setting, model, x, RECIPES[name]())
            gate = common.Gate({"y": right}, FLOOR_DB)
            db = gate.measure({"y": branches(model)})
            if (refusal := gate.refusal(db)) is not None:
                return Row(case, name, sqnr_db=db, refusal=refusal)
            return Row(case, name, sqnr_db=db, values=values, targets=(TARGET,))

        return measured

    case = f"{layers} layers, {size.describe()}"
    for name in setting.recipes:
        yield setting.attempt(case, name, run(name))


def rows(
    setting: Setting, sizes: Sequence[LayerSize] = SIZES, layers: int | None = None
) -> Iterator[Row]:
    """Measure all recipes at all sizes; by default with 4 small layers and 2 large ones."""
    for size in sizes:
        yield from size_rows(setting, size, layers or (4 if size.D < 4096 else 2))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, help="default: 4 of width 2048, 2 of width 4096")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    return rows(setting, layers=options.layers)


SUBJECT = Subject(
    "advise",
    "Predictions of advise",
    __doc__,
    (
        report.NAME,
        report.decibels("y"),
        *(
            Column(f"{precision} {what}", digits)
            for precision in ("high precision", "FP8")
            for what, digits in (("predicted ms", 3), ("measured ms", 3), ("off %", 1))
        ),
        report.TARGET,
    ),
    _rows,
    _options,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
