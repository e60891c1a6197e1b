"""Time forward and backward of an RMSNorm and a linear layer: ``LayerNormLinear`` by recipe.

    python -m benchmarks.norm_linear [--compile] [--model llama-8b]

This needs a CUDA GPU. The baseline is ``torch.nn.RMSNorm`` and ``torch.nn.Linear`` in bfloat16; all
are compared with both in float32. The floor has the three GEMMs, the norm fused with a cast in both
orientations, the casts of w and dy in both orientations, and the norm's backward, which reads its
input and a gradient and writes a gradient.

M tokens, K input features, N output features.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import torch

import float8lab
from benchmarks import report
from benchmarks.floor import Floor, cast_bytes
from benchmarks.models import (
    EPS,
    Candidate,
    InContext,
    PlainNormLinear,
    Trial,
    fused_candidates,
    our_context,
)
from benchmarks.peers import norm_linear_peers
from benchmarks.report import Row, Setting, Subject
from benchmarks.shapes import MODELS, LinearShape, select
from float8lab.recipes import Recipe

__all__ = ["SUBJECT", "candidates", "floor_ms", "main", "rows"]

FLOOR_DB = 20.0
"""The least SQNR in dB, as for a linear layer."""
PLAIN = {"dgamma": "norm.weight", "dW": "linear.weight"}
OURS = {"dgamma": "module.layer_norm_weight", "dW": "module.weight"}


def floor_ms(floor: Floor, shape: LinearShape, recipe: Recipe | None) -> float | None:
    """Return the floor in ms, from GEMMs and bytes."""
    gemms = floor.gemms_ms([shape], recipe)
    if gemms is None:
        return None
    M, K, N = shape.M, shape.K, shape.N
    norm = (4.0 if recipe is None else 0.0) * M * K + 6.0 * M * K
    return gemms + floor.move_ms(norm + cast_bytes(recipe, M * K + N * K + M * N))


def ours(plain: PlainNormLinear, recipe: Recipe | None = None) -> InContext:
    """Make a ``LayerNormLinear`` with the weights of the plain modules."""
    norm, linear = plain.norm, plain.linear
    layer = float8lab.LayerNormLinear(
        linear.in_features, linear.out_features, eps=EPS, bias=False, normalization="RMSNorm",
        params_dtype=torch.bfloat16, device=linear.weight.device,
    )  # fmt: skip
    layer.load_state_dict({"layer_norm_weight": norm.weight, "weight": linear.weight}, strict=False)
    return InContext(layer, our_context(recipe))


def candidates(setting: Setting, plain: PlainNormLinear) -> Iterator[Candidate]:
    """Iterate over the baselines, ours by recipe, and other libraries."""
    yield from fused_candidates(setting, plain, ours, "LayerNormLinear", PLAIN, OURS)
    yield from norm_linear_peers(plain, setting.modes)


def rows(setting: Setting, shapes: Sequence[LinearShape]) -> Iterator[Row]:
    """Measure all candidates on every shape."""
    for shape in shapes:
        torch.manual_seed(setting.seed)
        with setting.device:
            plain = PlainNormLinear(shape.K, shape.N).bfloat16()
        sizes, flops = (shape.M, shape.K, shape.N), shape.flops()
        floor = partial(floor_ms, setting.floor, shape)
        trial = Trial.of_normal(
            setting, shape.describe(), plain, sizes, PLAIN, FLOOR_DB, flops, floor
        )
        yield from trial.rows(setting, candidates(setting, plain))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-8b")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    # Norms precede the layers that read the residual stream: inputs of attention and MLP.
    names = ("up", "qkv")
    return rows(setting, [shape for shape in select(options.model) if shape.name in names])


SUBJECT = Subject(
    "norm_linear",
    "Norm and linear layer: forward and backward",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dgamma", "dW"),
        *report.TRAINING,
        report.FLOPS,
        report.CEILING,
    ),
    _rows,
    _options,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
