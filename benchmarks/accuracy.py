"""How far a linear layer's output and gradients are from float64, for each recipe.

    python -m benchmarks.accuracy

Needs no GPU: the quantized bytes are the same everywhere. Each layer gets bfloat16 tensors and is
compared with the same tensors multiplied in float64; ``bfloat16`` is ``torch.nn.Linear``, whose
results are rounded to bfloat16 like all the others. Higher is better; 6 dB are a factor of 2.
M tokens, K input features, N output features.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common
from benchmarks.recipes import RECIPES
from float8lab import recipes

__all__ = ["DATA", "RECIPES", "linear_reference", "linear_results", "main", "make_problem"]

WARM_UP_STEPS = 2
"""Steps before the one that is measured, for delayed scaling to have a history."""


@dataclass(frozen=True)
class Problem:
    """One training step of a linear layer without bias."""

    x: Tensor
    w: Tensor
    dy: Tensor


def _normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def gaussian(M: int, K: int, N: int, generator: torch.Generator) -> Problem:
    """All values normal: the easy case."""
    x = _normal(M, K, generator=generator)
    w = _normal(N, K, generator=generator) * K**-0.5
    return Problem(x, w, _normal(M, N, generator=generator))


def outliers(M: int, K: int, N: int, generator: torch.Generator) -> Problem:
    """One input feature in 64 is fifty times larger, and tokens' gradients differ in size.

    Large features are what activations of trained transformers have (arXiv:2208.07339); the sizes
    of the gradients are log-normal, over a few powers of ten.
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
    """Inputs of a kind in ``DATA``, rounded to ``dtype``."""
    generator = torch.Generator(device).manual_seed(seed)
    problem = DATA[data](M, K, N, generator)
    return Problem(*(t.to(dtype) for t in (problem.x, problem.w, problem.dy)))


def linear_reference(problem: Problem, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Output and gradients, multiplied in ``dtype``."""
    x, w, dy = (t.to(dtype) for t in (problem.x, problem.w, problem.dy))
    return {"y": x @ w.t(), "dX": dy @ w, "dW": dy.t() @ x}


def make_linear(problem: Problem) -> nn.Linear:
    """The plain layer with the problem's weights."""
    N, K = problem.w.shape
    layer = nn.Linear(K, N, bias=False, device=problem.w.device, dtype=problem.w.dtype)
    with torch.no_grad():
        layer.weight.copy_(problem.w)
    return layer


def convert(layer: nn.Linear, recipe: recipes.Recipe) -> nn.Module:
    """A converted copy; an error if it would not run in FP8."""
    converted = copy.deepcopy(layer)
    float8lab.convert_to_float8(converted, recipe, strict=True)
    return converted


def linear_results(layer: nn.Module, problem: Problem, *, steps: int = 1) -> dict[str, Tensor]:
    """Output and gradients of the last of ``steps`` equal training steps."""
    for _ in range(steps):
        x = problem.x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        y.backward(problem.dy)
    grads = {"dX": x.grad, "dW": next(layer.parameters()).grad}
    return {"y": y.detach()} | {name: g for name, g in grads.items() if g is not None}


def measure(problem: Problem) -> dict[str, dict[str, float]]:
    """SQNR in dB of each output, by name of the recipe."""
    gate = common.Gate(linear_reference(problem), floor_db=0.0)
    plain = make_linear(problem)
    layers = {str(problem.x.dtype).removeprefix("torch."): plain} | {
        name: convert(plain, recipe()) for name, recipe in RECIPES.items()
    }
    return {
        name: gate.measure(linear_results(layer, problem, steps=WARM_UP_STEPS + 1))
        for name, layer in layers.items()
    }


def format_rows(measured: Mapping[str, Mapping[str, float]]) -> str:
    """A table of the SQNRs in dB."""
    rows = [[name, *(f"{db:.1f}" for db in values.values())] for name, values in measured.items()]
    return common.table(["recipe", "y (dB)", "dX (dB)", "dW (dB)"], rows)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print and return one record for each kind of data."""
    parser = common.new_parser(__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument(
        "--shape", type=int, nargs=3, default=(1024, 1024, 768), metavar=("M", "K", "N")
    )
    args = parser.parse_args(argv)
    facts = common.header()
    print(common.describe_header(facts))
    records = []
    for data in DATA:
        problem = make_problem(
            data, *args.shape, seed=args.seed, dtype=getattr(torch, args.dtype), device=args.device
        )
        measured = measure(problem)
        M, K, N = args.shape
        print(f"\n{data}, {M} x {K} -> {N}, {args.dtype}\n\n{format_rows(measured)}", flush=True)
        records.append({"data": data, "shape": list(args.shape), "sqnr_db": measured})
    common.append_json(args.json, facts, records)
    return records


if __name__ == "__main__":
    main()
