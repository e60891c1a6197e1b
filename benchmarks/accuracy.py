"""Measure how far a linear layer's output and gradients are from float64, for each recipe.

    python -m benchmarks.accuracy

This needs no GPU: the quantized bytes are the same everywhere. Each layer gets bfloat16 tensors and
is compared with float64 GEMMs of the same tensors. ``bfloat16`` is ``torch.nn.Linear``, whose
results are rounded to bfloat16 like all the others. Higher is better; 6 dB are a factor of 2.
M tokens, K input features, N output features.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common, report
from benchmarks.floor import Floor
from benchmarks.recipes import RECIPES
from benchmarks.report import Row, Setting, Subject
from float8lab import recipes

__all__ = [
    "DATA",
    "SUBJECT",
    "convert",
    "linear_reference",
    "linear_results",
    "main",
    "make_linear",
    "make_problem",
    "rows",
]

WARM_UP_STEPS = 2
"""The number of steps before the measured one, so that delayed scaling has a history."""


@dataclass(frozen=True)
class Problem:
    """One training step of a linear layer without bias."""

    x: Tensor
    w: Tensor
    dy: Tensor


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def gaussian(M: int, K: int, N: int, generator: torch.Generator) -> Problem:
    """Draw all values from a normal distribution, which is the easy case."""
    x = _normal(M, K, generator=generator)
    w = _normal(N, K, generator=generator) * K**-0.5
    return Problem(x, w, _normal(M, N, generator=generator))


def outliers(M: int, K: int, N: int, generator: torch.Generator) -> Problem:
    """Make one input feature in 64 fifty times larger, and gradients of different sizes by token.

    Activations of trained transformers have such large features (arXiv:2208.07339). The sizes of
    the gradients are log-normal and cover a few powers of ten.
    """
    problem = gaussian(M, K, N, generator)
    feature = torch.ones(K, device=problem.x.device)
    feature[::64] = 50.0
    token = torch.exp(2 * _normal(M, 1, generator=generator))
    return Problem(problem.x * feature, problem.w, problem.dy * token)


DATA = {"gaussian": gaussian, "outliers": outliers}


def make_problem(
    data: str, M: int, K: int, N: int, *, seed: int, dtype: torch.dtype, device: str
) -> Problem:
    """Make inputs of a kind in ``DATA``, rounded to ``dtype``."""
    generator = torch.Generator(device).manual_seed(seed)
    problem = DATA[data](M, K, N, generator)
    return Problem(*(t.to(dtype) for t in (problem.x, problem.w, problem.dy)))


def linear_reference(problem: Problem, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Compute the output and the gradients by GEMMs in ``dtype``."""
    x, w, dy = (t.to(dtype) for t in (problem.x, problem.w, problem.dy))
    return {"y": x @ w.t(), "dX": dy @ w, "dW": dy.t() @ x}


def make_linear(problem: Problem) -> nn.Linear:
    """Make the plain layer with the problem's weights."""
    N, K = problem.w.shape
    layer = nn.Linear(K, N, bias=False, device=problem.w.device, dtype=problem.w.dtype)
    with torch.no_grad():
        layer.weight.copy_(problem.w)
    return layer


def convert(layer: nn.Linear, recipe: recipes.Recipe) -> nn.Module:
    """Return a converted copy of a layer; raise if the copy would not run in FP8."""
    converted = copy.deepcopy(layer)
    float8lab.convert_to_float8(converted, recipe, strict=True)
    return converted


def linear_results(layer: nn.Module, problem: Problem, *, steps: int = 1) -> dict[str, Tensor]:
    """Return the output and the gradients of the last of ``steps`` equal training steps."""
    for _ in range(steps):
        x = problem.x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        y.backward(problem.dy)
    grads = {"dX": x.grad, "dW": next(layer.parameters()).grad}
    return {"y": y.detach()} | {name: g for name, g in grads.items() if g is not None}


def measure(problem: Problem) -> dict[str, dict[str, float]]:
    """Measure the SQNR in dB of each output for each recipe, by the recipe's name."""
    gate = common.Gate(linear_reference(problem), floor_db=0.0)
    plain = make_linear(problem)
    layers = {str(problem.x.dtype).removeprefix("torch."): plain} | {
        name: convert(plain, recipe()) for name, recipe in RECIPES.items()
    }
    return {
        name: gate.measure(linear_results(layer, problem, steps=WARM_UP_STEPS + 1))
        for name, layer in layers.items()
    }


def rows(setting: Setting, shape: tuple[int, int, int], dtype: torch.dtype) -> Iterator[Row]:
    """Measure every recipe on every kind of data."""
    M, K, N = shape
    for data in DATA:
        problem = make_problem(
            data, M, K, N, seed=setting.seed, dtype=dtype, device=setting.device.type
        )
        case = f"{data}, {M} x {K} -> {N}, {str(dtype).removeprefix('torch.')}"
        for name, db in measure(problem).items():
            yield setting.row(case, name, sqnr_db=db)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(1024, 1024, 768), metavar=("M", "K", "N")
    )


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    return rows(setting, tuple(options.shape), getattr(torch, options.dtype))


SUBJECT = Subject(
    "accuracy",
    "Accuracy of a linear layer",
    __doc__,
    (report.NAME, report.decibels("y", "dX", "dW")),
    _rows,
    _options,
)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Measure all rows and print the table."""
    parser = common.new_parser(__doc__.split("\n\n")[0] if __doc__ else None)
    _options(parser)
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    floor = Floor(device, common.time_wall)  # nothing is timed
    setting = Setting(
        device, time=floor.time, wall=floor.time, floor=floor, recipes=list(RECIPES),
        seed=options.seed,
    )  # fmt: skip
    return report.measure(SUBJECT, setting, options, common.header(options.commit))


if __name__ == "__main__":
    report.finish(main())
