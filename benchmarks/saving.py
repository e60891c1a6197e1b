"""Measure what a recipe's ``save`` costs and frees in a converted Llama-3-8B layer.

    python -m benchmarks.saving [--eager] [--recipe current ...] [--seconds 0.5] [--rounds 4]

This needs a CUDA GPU. The layer is compiled, unless ``--eager`` is given. ``held`` and ``peak`` are
those of ``benchmarks.memory``. The steps of all candidates, forward and backward, take turns.
``x fp8`` is the time relative to ``save="fp8"``, and ``dB`` is the SQNR of the output and the input
gradient against those of bfloat16.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.memory import FLOOR_DB, HELD, PEAK, compile_layers, measure
from benchmarks.models import LLAMA, LayerSize, converted, plain_layer
from benchmarks.recipes import RECIPES

__all__ = ["candidates", "compare", "main"]

SAVES = ("fp8", "recompute")


def candidates(layer: nn.Module, names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the bfloat16 layer, and the layer converted for each recipe and ``save``."""
    yield "bfloat16", copy.deepcopy(layer)
    for name in names:
        for save in SAVES:
            yield f"{name}, {save}", converted(layer, replace(RECIPES[name](), save=save))


def compare(
    size: LayerSize,
    names: Sequence[str],
    device: torch.device,
    *,
    seconds: float,
    rounds: int,
    compiled: bool = True,
) -> Iterator[str]:
    """Iterate over lines for each candidate: memory, closeness and the time of a step."""
    layer = plain_layer(size, device, 0)
    data = size.input(device, torch.Generator(device).manual_seed(0))
    _, right = measure(copy.deepcopy(layer), data)
    gate = common.Gate(right, FLOOR_DB)
    steps: dict[str, Callable[[], object]] = {}
    lines: dict[str, str] = {}
    for name, module in candidates(layer, names):
        if compiled:
            compile_layers(module)
        values, results = measure(module, data)
        db = gate.measure(results)
        if refusal := gate.refusal(db):
            yield f"{name:24} {refusal}"
            continue
        memory = "  ".join(f"{values.get(key, float('nan')):6.3f}" for key in (HELD, PEAK))
        lines[name] = f"{memory}  {' / '.join(f'{value:.1f}' for value in db.values()):>12}"
        steps[name] = _step_of(module, data)
    timed = common.time_sustained(steps, seconds=seconds, rounds=rounds)
    times = {name: each.timing.median for name, each in timed.items()}
    for name, line in lines.items():
        fp8 = times.get(f"{name.partition(',')[0]}, fp8", float("nan"))
        yield f"{name:24} {line}  {times[name]:8.3f} ms  {times[name] / fp8:.3f}"


def _step_of(module: nn.Module, data: tuple[Tensor, Tensor]) -> Callable[[], object]:
    x, dy = data[0].detach().requires_grad_(), data[1]

    def step() -> None:
        x.grad = None
        for parameter in module.parameters():
            parameter.grad = None
        module(x).backward(dy)

    return step


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all candidates and print the lines."""
    parser = argparse.ArgumentParser(prog="benchmarks.saving", description=__doc__)
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="default: three")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(argv)
    common.require_cuda("benchmarks.saving")
    common.forbid_eager_fallback()
    for key, value in common.header().items():
        print(f"{key}: {value}")
    print(f"{'candidate':24} {'held':>6}  {'peak GB':>7}  {'y / dX dB':>11}  {'step':>11}  x fp8")
    names = options.recipe or ["delayed", "current", "block"]
    device = torch.device("cuda")
    how = {"seconds": options.seconds, "rounds": options.rounds, "compiled": not options.eager}
    for line in compare(LLAMA, names, device, **how):
        print(line, flush=True)


if __name__ == "__main__":
    main()
