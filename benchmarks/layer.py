"""Time forward and backward of a Llama-3-8B decoder layer: ``torch.nn``, and ours by recipe.

    python -m benchmarks.layer [--compile] [--batch 4] [--sequence 4096]

This needs a CUDA GPU. The baseline is plain bfloat16 under ``torch.compile``. ``TransformerLayer``
is ours; ``converted`` is the plain layer after ``convert_to_float8``, also with ``"auto"``. All
have the same weights. Their output and input gradient, without the residual stream, must match the
plain layer's.

The floor contains the layer's GEMMs, torch's fastest bfloat16 attention, and the bytes of casts,
norms, rotary embedding, activation and residual sums, each as one pass fused with the cast that
reads it. The GEMMs write the gradients of the weights.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import common, report
from benchmarks.floor import Floor, cast_bytes
from benchmarks.models import (
    LLAMA,
    Candidate,
    LayerSize,
    Trial,
    converted,
    our_layer,
    plain_layer,
    training_results,
)
from benchmarks.peers import layer_peers
from benchmarks.recipes import RECIPES
from benchmarks.report import Row, Setting, Subject, Target
from float8lab.recipes import Auto, Recipe

__all__ = ["SUBJECT", "attention_ms", "candidates", "compare_auto", "floor_ms", "main", "rows"]

FLOOR_DB = 15.0
"""The least SQNR: four GEMMs in a row of 25 to 28 dB each, and a margin for e5m2 gradients."""
OF_BEST = "x best recipe"
TARGETS = {
    "converted, auto, eager": (Target(OF_BEST, ">=", 0.98),),
    "converted, auto, compile": (Target(OF_BEST, ">=", 0.98),),
    "TransformerLayer, delayed, eager": (Target("x bf16", ">=", 1.60),),
    "TransformerLayer, delayed, FP8 attention, eager": (Target("x bf16", ">=", 1.70),),
    "TransformerLayer, current, eager": (Target("x bf16", ">=", 1.55),),
    "TransformerLayer, block, eager": (Target("x bf16", ">=", 1.40),),
    "converted, current, eager": (Target("x bf16", ">=", 1.42),),
    "converted, current, compile": (Target("x bf16", ">=", 1.54),),
}
"""Targets against compiled bfloat16 or, for ``auto``, the fastest recipe in the same mode."""
CUDA_ATTENTION = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
"""Torch's fused attention kernels whose backward is not slow."""


def attention_ms(setting: Setting, size: LayerSize) -> float:
    """Time forward and backward of causal attention on the fastest bfloat16 backend of torch."""
    head = size.D // size.H
    shape = (size.batch, size.sequence, size.H, head)
    generator = setting.generator()

    def normal() -> Tensor:
        x = torch.randn(shape, generator=generator, device=setting.device)
        return x.bfloat16().transpose(1, 2).detach().requires_grad_()

    q, k, v = normal(), normal(), normal()
    dout = normal().detach()

    def step() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), dout)

    if setting.device.type != "cuda":
        return setting.time(step).median
    times = []
    for backend in CUDA_ATTENTION:
        # A backend that this build of torch does not have raises RuntimeError.
        with contextlib.suppress(RuntimeError), sdpa_kernel(backend):
            times.append(setting.time(step).median)
    return min(times)


def moved_bytes(size: LayerSize, recipe: Recipe | None) -> float:
    """Count the bytes that all but GEMMs and attention moves, in forward and backward."""
    M, D, MLP, KV = size.tokens, size.D, size.F, size.D // size.H * size.G
    width = {"hidden": M * D, "kv": M * KV, "mlp": M * MLP}
    residual = 4 * 6.0 * width["hidden"]  # two sums in each pass: read two, write one
    rotary = 2 * 4.0 * (width["hidden"] + width["kv"])  # q and k, in each pass
    norm_backward = 2 * 6.0 * width["hidden"]  # read the gradient and the input, write one
    if recipe is None:
        norms = 2 * 4.0 * width["hidden"]
        activation = (6.0 + 10.0) * width["mlp"]  # read 2, write 1; read 3, write 2
        return residual + rotary + norm_backward + norms + activation
    weights = sum(shape.N * shape.K for shape in size.linears())
    # The inputs of the linear layers are the outputs of two norms, attention and the activation.
    inputs = cast_bytes(recipe, 3 * width["hidden"])
    activation = cast_bytes(recipe, width["mlp"], read=4.0)
    # The gradients of the outputs of qkv, attention out and down; gate and up read three tensors.
    grads = cast_bytes(recipe, width["hidden"] + 2 * width["kv"] + 2 * width["hidden"])
    activation += cast_bytes(recipe, 2 * width["mlp"], read=3.0)
    return (
        residual
        + rotary
        + norm_backward
        + inputs
        + grads
        + activation
        + cast_bytes(recipe, weights)
    )


def floor_ms(
    floor: Floor, size: LayerSize, attention: float, recipe: Recipe | None
) -> float | None:
    """Return the floor in ms, from GEMMs, attention and bytes."""
    gemms = floor.gemms_ms(size.linears(), recipe)
    if gemms is None:
        return None
    return gemms + attention + floor.move_ms(moved_bytes(size, recipe))


PLAIN = {"dWo": "o.weight", "dWdown": "down.weight"}
OURS = {
    "dWo": "module.self_attention.proj.weight",
    "dWdown": "module.layernorm_mlp.fc2_weight",
}
"""The names of the weights whose gradients are compared."""


def candidates(setting: Setting, plain: Any, size: LayerSize) -> Iterator[Candidate]:
    """Iterate over the baselines, ours by recipe, and other libraries."""
    same = partial(copy.deepcopy, plain)
    yield Candidate("plain bfloat16, eager", same, PLAIN)
    yield Candidate("plain bfloat16, compile", same, PLAIN, baseline=True, compiled=True)
    for mode in setting.modes:
        compiled = mode == "compile"
        ours = partial(our_layer, plain, size)
        yield Candidate(f"TransformerLayer, bfloat16, {mode}", ours, OURS, compiled=compiled)
        for name in setting.recipes:
            recipe = RECIPES[name]()
            shared: dict[str, Any] = {"recipe": recipe, "compiled": compiled, "fp8": True}
            own = partial(our_layer, plain, size, recipe)
            yield Candidate(f"TransformerLayer, {name}, {mode}", own, OURS, **shared)
            attending = partial(our_layer, plain, size, replace(recipe, fp8_dpa=True))
            yield Candidate(
                f"TransformerLayer, {name}, FP8 attention, {mode}", attending, OURS, **shared
            )
            yield Candidate(
                f"converted, {name}, {mode}",
                partial(converted, plain, recipe, strict=True),
                PLAIN,
                **shared,
            )
        auto = Auto(tokens=size.tokens, mode=mode)
        # Layers of ``auto`` may have different recipes, so it has no floor.
        yield Candidate(
            f"converted, auto, {mode}", partial(converted, plain, auto, strict=True), PLAIN,
            compiled=compiled, fp8=True, has_floor=False,
        )  # fmt: skip
    yield from layer_peers(plain, size, setting.modes, PLAIN, OURS)


def compare_auto(rows: Iterable[Row]) -> Iterator[Row]:
    """Add to the rows of ``auto`` how fast they are relative to the fastest recipe."""
    best: dict[str, float] = {}  # the least ms by mode
    for row in rows:
        *kind, mode = row.name.split(", ")
        if kind[:1] == ["converted"] and row.median is not None:
            if kind != ["converted", "auto"]:
                best[mode] = min(row.median, best.get(mode, row.median))
            elif mode in best:
                row = replace(row, values={**row.values, OF_BEST: best[mode] / row.median})
        yield row


def make_trial(
    setting: Setting, size: LayerSize, plain: Any, floor: Callable[[Recipe | None], float | None]
) -> Trial:
    """Make the trial of a plain layer's step, compared without the residual stream."""
    data = x, dy = size.input(setting.device, setting.generator())
    right = training_results(plain, x, dy, PLAIN, steps=1)
    less = (x.detach(), dy)
    right["y"], right["dX"] = right["y"] - less[0], right["dX"] - less[1]
    return Trial(size.describe(), data, common.Gate(right, FLOOR_DB), size.flops(), floor, less)


def rows(setting: Setting, size: LayerSize = LLAMA) -> Iterator[Row]:
    """Measure all candidates on one size."""
    plain = plain_layer(size, setting.device, setting.seed)
    floor = partial(floor_ms, setting.floor, size, attention_ms(setting, size))
    trial = make_trial(setting, size, plain, floor)
    all_candidates = candidates(setting, plain, size)
    yield from compare_auto(trial.rows(setting, all_candidates, TARGETS if size == LLAMA else {}))


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add options for the number of tokens of a layer."""
    parser.add_argument("--batch", type=int, default=LLAMA.batch)
    parser.add_argument("--sequence", type=int, default=LLAMA.sequence)


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    return rows(setting, LLAMA._replace(batch=options.batch, sequence=options.sequence))


SUBJECT = Subject(
    "layer",
    "Transformer layer: forward and backward",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dWo", "dWdown"),
        *report.TRAINING,
        report.Column(OF_BEST),
        report.FLOPS,
        report.CEILING,
        report.TARGET,
    ),
    _rows,
    add_sizes,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
