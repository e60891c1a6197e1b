"""Measure tokens a second in training steps of a stack of Llama-3-8B decoder layers.

    python -m benchmarks.model [--compile] [--layers 8] [--batch 1] [--sequence 8192]

This needs a CUDA GPU. A step is forward, backward and fused AdamW, all in bfloat16 except the FP8
GEMMs; the time is the wall time on the host. The baseline is plain bfloat16 with each layer
compiled. ``converted`` is the plain stack after ``convert_to_float8`` with a recipe or ``"auto"``;
``TransformerLayer`` is ours.

The task is to memorise random targets, on which Adam's first steps follow the sign of every
gradient. A row is refused if the first loss differs from the baseline's by more than 1 %, or if the
loss falls by less than 80 % of the baseline's descent. The floor is the layers' floor (see
``benchmarks.layer``) plus the time for the bytes of the optimizer's state.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import report
from benchmarks.fsdp import DESCENT, SAME, Layer
from benchmarks.layer import attention_ms, floor_ms
from benchmarks.memory import our_stack
from benchmarks.models import EPS, LLAMA, InContext, LayerSize, converted
from benchmarks.peers import te_stack, torchao_stack
from benchmarks.recipes import RECIPES
from benchmarks.report import Row, Setting, Subject
from float8lab.recipes import Auto, Recipe

__all__ = ["SUBJECT", "Stack", "main", "rows"]

STD = 0.02
LEARNING_RATE = 1e-4
BASELINE = "plain bfloat16, compile"
RATE = "tokens/s"
FIRST, LAST = "first loss", "last loss"


class Stack(NamedTuple):
    """A stack of layers by name, and how it is made and run."""

    name: str
    make: Callable[[], nn.Module]
    compiled: bool = False
    recipe: Recipe | None = None
    fp8: bool = False
    has_floor: bool = True


def plain_stack(size: LayerSize, layers: int, device: torch.device, seed: int) -> nn.Sequential:
    """Make decoder layers of ``torch.nn`` in bfloat16 with normal weights."""
    torch.manual_seed(seed)
    with device:
        stacked_layers = [Layer(size.D, size.H, size.G, size.F, nn.Linear) for _ in range(layers)]
    for layer in stacked_layers:
        layer.attention_norm.eps = layer.mlp_norm.eps = EPS
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=STD)
    return nn.Sequential(*stacked_layers).bfloat16()


def stacks(setting: Setting, plain: nn.Sequential, size: LayerSize) -> Iterator[Stack]:
    """Iterate over the stacks, the baseline first."""
    same = partial(copy.deepcopy, plain)
    yield Stack(BASELINE, same, compiled=True)
    yield Stack("plain bfloat16, eager", same)
    for mode in setting.modes:
        for name in setting.recipes:
            if name == "mx":  # Hopper has no FP8 GEMM for it, and it is slow
                continue
            recipe = RECIPES[name]()
            shared: dict[str, Any] = {"compiled": mode == "compile", "recipe": recipe, "fp8": True}
            yield Stack(
                f"converted, {name}, {mode}",
                partial(converted, plain, recipe, strict=True),
                **shared,
            )
            yield Stack(
                f"TransformerLayer, {name}, {mode}",
                partial(our_stack, plain, size, recipe),
                **shared,
            )
        auto = Auto(tokens=size.tokens, mode=mode)
        yield Stack(
            f"converted, auto, {mode}", partial(converted, plain, auto, strict=True),
            compiled=mode == "compile", fp8=True, has_floor=False,
        )  # fmt: skip
    for name, make, compiled in (
        *torchao_stack(plain, setting.modes),
        *te_stack(plain, size),
    ):
        yield Stack(name, make, compiled=compiled, fp8=True, has_floor=False)


def optimizer_bytes(plain: nn.Module) -> float:
    """Count the optimizer's bytes: it reads 4 tensors and writes all but the gradient, in bf16."""
    return 7 * 2.0 * sum(p.numel() for p in plain.parameters())


def measure(
    setting: Setting,
    case: str,
    stack: Stack,
    data: tuple[Tensor, Tensor],
    base: Row | None,
    *,
    floor: Callable[[Recipe | None], float | None],
    flops: float,
) -> Row:
    """Train a new stack, whose loss must fall as the baseline's loss does."""
    x, target = data
    model = stack.make()
    if stack.compiled:
        for layer in (model.module if isinstance(model, InContext) else model).children():
            layer.compile()
    fused = setting.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    losses: list[Tensor] = []

    def step() -> None:
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    step()
    timing = setting.wall(step)
    first, last = float(losses[0]), float(losses[-1])
    if base is not None and (refusal := wrong_loss(first, last, base.values)):
        return setting.row(case, stack.name, refusal=refusal)
    return setting.row(
        case,
        stack.name,
        ms=timing.samples,
        floor_ms=floor(stack.recipe) if stack.has_floor else None,
        flops=flops,
        fp8=stack.fp8,
        baseline=stack.name == BASELINE,
        values={
            RATE: x.shape[0] * x.shape[1] / timing.median * 1e3,
            FIRST: first,
            LAST: last,
        },
    )


def wrong_loss(first: float, last: float, base: dict[str, float]) -> str | None:
    """Return why these losses cannot be those of the baseline's model; None if they can."""
    if not abs(first - base[FIRST]) <= SAME * base[FIRST]:
        return f"wrong: first loss {first:.4f}, not {base[FIRST]:.4f}"
    if not first - last >= DESCENT * (base[FIRST] - base[LAST]):
        return f"wrong: loss fell to {last:.4f}, not {base[LAST]:.4f}"
    return None


def rows(setting: Setting, size: LayerSize, layers: int) -> Iterator[Row]:
    """Measure all stacks; without the baseline's loss to compare with, measure none."""
    plain = plain_stack(size, layers, setting.device, setting.seed)
    x, _ = size.input(setting.device, setting.generator())
    x = x.detach()
    target = torch.randn_like(x, dtype=torch.float32)
    case = f"{layers} layers, {size.describe()}"
    attention = attention_ms(setting, size)
    optimizer = setting.floor.move_ms(optimizer_bytes(plain))

    def floor(recipe: Recipe | None) -> float | None:
        layer = floor_ms(setting.floor, size, attention, recipe)
        return None if layer is None else layers * layer + optimizer

    base = None
    for stack in stacks(setting, plain, size):
        run = partial(
            measure, setting, case, stack, (x, target), base,
            floor=floor, flops=layers * size.flops(),
        )  # fmt: skip
        row = setting.attempt(case, stack.name, run)
        yield row
        if base is None:
            if row.refusal is not None:
                return
            base = row


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=8192)


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    size = LLAMA._replace(batch=options.batch, sequence=options.sequence)
    return rows(setting, size, options.layers)


SUBJECT = Subject(
    "model",
    "Training steps of 8 layers",
    __doc__,
    (
        report.NAME,
        report.Column("ms a step (quartiles)", cell=report.TIME.cell),
        report.Column(RATE, 0),
        report.FLOOR,
        report.TIMES_FLOOR,
        report.SPEED_UP,
        report.FLOPS,
        report.CEILING,
        report.Column(FIRST, 4),
        report.Column(LAST, 4),
    ),
    _rows,
    _options,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
