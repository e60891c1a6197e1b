"""Measure memory of a Llama-3-8B layer and a stack of 8, and if 200 steps need more than 20.

    python -m benchmarks.memory [--compile] [--batch 4] [--sequence 4096]

This needs a CUDA GPU. ``held`` is how many more bytes the CUDA allocator has between forward and
backward than before the forward, output included. ``peak`` is the maximum of this until the end of
backward; gradients of parameters exist before and do not count. ``saved`` counts the distinct
storages that autograd saves, without parameters; ``weights`` counts the parameters.

Candidates are plain ``torch.nn`` in bfloat16, eager and compiled, the same model converted, and
``TransformerLayer`` in bfloat16, with FP8 compute and with weights stored in FP8; ``--compile``
adds compiled ones. Each starts from the same weights, and its output and input gradient, without
the residual stream, must match the plain layer's.

``growth`` is how many more bytes the allocator has after 200 steps of a small layer than after 20,
and how much higher its peak was in between.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import common, report
from benchmarks.layer import add_sizes
from benchmarks.linear import saved_bytes, storages
from benchmarks.models import (
    LLAMA,
    InContext,
    LayerSize,
    converted,
    our_context,
    our_layer,
    plain_layer,
)
from benchmarks.recipes import RECIPES
from benchmarks.report import Column, Row, Setting, Subject, Target
from float8lab.recipes import Recipe

__all__ = ["SUBJECT", "Variant", "growth_rows", "main", "measure", "rows", "stack_rows"]

FLOOR_DB = 15.0
"""The least SQNR of output and input gradient without the residual stream: four GEMMs in a row of
25 to 28 dB each, and a margin for e5m2 gradients."""
STACK_FLOOR_DB = 10.0
"""The least SQNR through eight layers; a wrong layer leaves less than 6 dB."""
GB = 1e9
HELD, PEAK, SAVED, WEIGHTS = "held GB", "peak GB", "saved GB", "weights GB"
GROWTH, PEAK_GROWTH = "growth MB", "growth of peak MB"
SMALL = LayerSize(D=1024, H=8, G=2, F=4096, batch=1, sequence=1024)


class Variant(NamedTuple):
    """A layer made from the plain one."""

    name: str
    make: Callable[[nn.Module], nn.Module]
    compiled: bool = False
    baseline: bool = False
    targets: tuple[Target, ...] = ()


def plain(layer: nn.Module) -> nn.Module:
    """Return a copy of the plain layer."""
    return copy.deepcopy(layer)


def variants(setting: Setting, size: LayerSize) -> Iterator[Variant]:
    """Iterate over the baselines, and ours by recipe."""
    yield Variant("plain bfloat16, eager", plain, baseline=True)
    yield Variant("plain bfloat16, compile", plain, compiled=True)
    yield Variant("TransformerLayer, bfloat16", partial(our_layer, size=size))
    for name in setting.recipes:
        ours: Any = partial(our_layer, size=size, recipe=RECIPES[name]())
        half = partial(ours, fp8_activation_input=True)
        stored = partial(ours, stored=True)
        held_target = partial(Target, f"{HELD}, of plain", "<=")
        yield Variant(f"TransformerLayer, {name}", ours, targets=(held_target(0.70),))
        yield Variant(f"{name}, fp8_activation_input", half, targets=(held_target(0.53),))
        yield Variant(f"{name}, FP8 weights", stored)
        yield from compiled_variants(setting, name, ours, stored)
        convert_plain: Any = partial(converted, recipe=RECIPES[name]())
        yield Variant(f"plain, converted, {name}", convert_plain)
        if "compile" in setting.modes:
            yield Variant(f"plain, converted, {name}, compile", convert_plain, compiled=True)


def compiled_variants(
    setting: Setting, name: str, ours: Callable[..., nn.Module], stored: Callable[..., nn.Module]
) -> Iterator[Variant]:
    """Iterate over a recipe's variants under ``torch.compile``, if that was asked for."""
    if "compile" in setting.modes:
        yield Variant(f"TransformerLayer, {name}, compile", ours, compiled=True)
        yield Variant(f"{name}, FP8 weights, compile", stored, compiled=True)


class _Allocator:
    """Read the statistics of the CUDA allocator; all are 0 on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def now(self) -> int:
        """Return the bytes that are allocated when the GPU has finished."""
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def start_peak(self) -> None:
        """Reset the peak."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Return the most bytes allocated since ``start_peak``."""
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def measure(
    module: nn.Module, data: tuple[Tensor, Tensor]
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return the third step's bytes, output and input gradient, without the residual stream."""
    x, dy = data[0].detach().requires_grad_(), data[1]
    allocator = _Allocator(x.device)
    for _ in range(2):  # creates gradients, compiles kernels, gives delayed scales a history
        module(x).backward(dy)
        x.grad = None
    before = allocator.now()
    allocator.start_peak()
    y = module(x)
    held = allocator.now() - before
    y.backward(dy)
    peak = allocator.peak() - before
    assert x.grad is not None, "x requires a gradient"
    results = {"y": (y - x).detach(), "dX": x.grad - dy}
    del y
    values = {SAVED: saved_bytes(module, x) / GB}
    values[WEIGHTS] = sum(sum(storages(p).values()) for p in module.parameters()) / GB
    if allocator.cuda:
        values |= {HELD: held / GB, PEAK: peak / GB}
    return values, results


def compared(
    setting: Setting,
    case: str,
    made: Sequence[Variant],
    origin: nn.Module,
    data: tuple[Tensor, Tensor],
    floor_db: float,
) -> Iterator[Row]:
    """Measure variants whose results must match those of ``origin``."""
    _, right = measure(copy.deepcopy(origin), data)
    gate = common.Gate(right, floor_db)
    base: dict[str, float] = {}

    def run(variant: Variant) -> Row:
        module = variant.make(origin)
        if variant.compiled:
            compile_layers(module)
        values, results = measure(module, data)
        db = gate.measure(results)
        if refusal := gate.refusal(db):
            return setting.row(case, variant.name, sqnr_db=db, refusal=refusal)
        if variant.baseline:
            base.update(values)
        for name in (HELD, PEAK):
            if name in values and base.get(name):
                values[f"{name}, of plain"] = values[name] / base[name]
        return setting.row(
            case,
            variant.name,
            sqnr_db=db,
            values=values,
            baseline=variant.baseline,
            targets=variant.targets,
        )

    for variant in made:
        yield setting.attempt(case, variant.name, partial(run, variant))


def compile_layers(module: nn.Module) -> None:
    """Compile a layer, or each layer of a stack."""
    inner = module.module if isinstance(module, InContext) else module
    for layer in inner if isinstance(inner, nn.Sequential) else (module,):
        layer.compile()


def rows(setting: Setting, size: LayerSize = LLAMA) -> Iterator[Row]:
    """Measure all variants of one layer."""
    layer = plain_layer(size, setting.device, setting.seed)
    data = size.input(setting.device, setting.generator())
    case = f"1 layer, {size.describe()}"
    yield from compared(setting, case, list(variants(setting, size)), layer, data, FLOOR_DB)


def stack_rows(setting: Setting, size: LayerSize = LLAMA, layers: int = 8) -> Iterator[Row]:
    """Measure a stack, without the variants that are measured on one layer only."""
    stack = nn.Sequential(
        *(plain_layer(size, setting.device, setting.seed + index) for index in range(layers))
    )
    data = size.input(setting.device, setting.generator())
    case = f"{layers} layers, {size.describe()}"
    made = [
        Variant("plain bfloat16, eager", plain, baseline=True),
        Variant("plain bfloat16, compile", plain, compiled=True),
        Variant("TransformerLayer, bfloat16", partial(our_stack, size=size)),
    ]
    for name in setting.recipes:
        if name != "mx":  # Hopper does not run it in FP8
            ours: Any = partial(our_stack, size=size, recipe=RECIPES[name]())
            stored = partial(ours, stored=True)
            made.append(Variant(f"TransformerLayer, {name}", ours))
            made.append(Variant(f"{name}, FP8 weights", stored))
            made += compiled_variants(setting, name, ours, stored)
    yield from compared(setting, case, made, stack, data, STACK_FLOOR_DB)


def our_stack(
    plain: nn.Module, size: LayerSize, recipe: Recipe | None = None, *, stored: bool = False
) -> InContext:
    """Make a ``TransformerLayer`` for each plain layer, with one autocast around all."""
    made = []
    for layer in plain.children():
        ours = our_layer(layer, size, recipe, stored=stored)
        ours.context = nullcontext
        made.append(ours)
    return InContext(nn.Sequential(*made), our_context(recipe))


def growth_rows(
    setting: Setting, size: LayerSize = SMALL, steps: tuple[int, int] = (20, 200)
) -> Iterator[Row]:
    """Measure the memory that many steps leave allocated."""
    layer = plain_layer(size, setting.device, setting.seed)
    case = f"{steps[1]} steps against {steps[0]}, {size.describe()}"
    none = (Target(GROWTH, "<=", 0.0), Target(PEAK_GROWTH, "<=", 0.0))
    made = [Variant("TransformerLayer, bfloat16", partial(our_layer, size=size), targets=none)]
    for name in setting.recipes:
        ours: Any = partial(our_layer, size=size, recipe=RECIPES[name]())
        made.append(Variant(f"TransformerLayer, {name}", ours, targets=none))
        stored = partial(ours, stored=True)
        made.append(Variant(f"{name}, FP8 weights", stored, targets=none))
    data = size.input(setting.device, setting.generator())

    def run(variant: Variant) -> Row:
        values = growth(variant.make(layer), data, steps)
        return setting.row(case, variant.name, values=values, targets=variant.targets)

    for variant in made:
        yield setting.attempt(case, variant.name, partial(run, variant))


def growth(
    module: nn.Module, data: tuple[Tensor, Tensor], steps: tuple[int, int]
) -> dict[str, float]:
    """Return the MB after the last step, and at the peak, beyond those of ``steps[0]`` steps.

    The result is empty on a CPU, whose memory is not counted.
    """
    x, dy = data[0].detach().requires_grad_(), data[1]
    allocator = _Allocator(x.device)

    def train(count: int) -> tuple[int, int]:
        allocator.start_peak()
        for _ in range(count):
            module.zero_grad()
            x.grad = None
            torch.autograd.graph.increment_version(list(module.parameters()))
            module(x).backward(dy)
        return allocator.now(), allocator.peak()

    if not allocator.cuda:
        train(steps[1])
        return {}
    early, late = train(steps[0]), train(steps[1] - steps[0])
    return {GROWTH: (late[0] - early[0]) / 1e6, PEAK_GROWTH: (late[1] - early[1]) / 1e6}


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    size = LLAMA._replace(batch=options.batch, sequence=options.sequence)
    yield from rows(setting, size)
    yield from stack_rows(setting, size)
    yield from growth_rows(setting)


SUBJECT = Subject(
    "memory",
    "Memory of transformer layers",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX"),
        Column(HELD),
        Column(f"{HELD}, of plain"),
        Column(PEAK),
        Column(f"{PEAK}, of plain"),
        Column(SAVED),
        Column(WEIGHTS),
        Column(GROWTH, 3),
        Column(PEAK_GROWTH, 3),
        report.TARGET,
    ),
    _rows,
    add_sizes,
    plotted=PEAK,
    recipes=tuple(RECIPES),
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
