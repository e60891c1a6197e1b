"""Time forward and backward of a norm and an MLP: ``LayerNormMLP`` by recipe, gated and not.

    python -m benchmarks.mlp [--compile] [--tokens 16384]

This needs a CUDA GPU. The hidden size is 4096, with 14336 features inside, SwiGLU and GELU. The
baseline is ``torch.nn`` in bfloat16; all are compared with float32. The floor has six GEMMs, and
the bytes of norm, activation and casts, each elementwise op fused with the cast that reads it.

M tokens, D hidden size, F features between the linear layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import float8lab
from benchmarks import report
from benchmarks.floor import Floor, cast_bytes
from benchmarks.models import (
    EPS,
    Candidate,
    InContext,
    PlainMlp,
    Trial,
    fused_candidates,
    our_context,
)
from benchmarks.peers import mlp_peers
from benchmarks.report import Row, Setting, Subject
from benchmarks.shapes import LinearShape
from float8lab.recipes import Recipe

__all__ = ["SUBJECT", "MlpSize", "candidates", "floor_ms", "main", "rows"]

FLOOR_DB = 15.0
"""The least SQNR: two GEMMs in a row of 25 to 28 dB, a gate, a margin for e5m2 gradients."""
PLAIN = {"dgamma": "norm.weight", "dW1": "fc1.weight", "dW2": "fc2.weight"}
OURS = {
    "dgamma": "module.layer_norm_weight",
    "dW1": "module.fc1_weight",
    "dW2": "module.fc2_weight",
}


class MlpSize(NamedTuple):
    """The sizes of an MLP and its input."""

    D: int
    F: int
    M: int
    activation: str

    def describe(self) -> str:
        """Return the name of this size in tables."""
        return f"{self.activation}, {self.M} tokens, {self.D} -> {self.F} -> {self.D}"

    @property
    def inner(self) -> int:
        """The number of output features of the first linear layer."""
        return 2 * self.F if self.activation == "swiglu" else self.F

    def linears(self) -> list[LinearShape]:
        """Return the two linear layers."""
        fc1 = LinearShape("fc1", self.M, self.D, self.inner)
        return [fc1, LinearShape("fc2", self.M, self.F, self.D)]


def floor_ms(floor: Floor, size: MlpSize, recipe: Recipe | None) -> float | None:
    """Return the floor in ms, from GEMMs and bytes."""
    linears = size.linears()
    gemms = floor.gemms_ms(linears, recipe)
    if gemms is None:
        return None
    hidden, mlp, inner = size.M * size.D, size.M * size.F, size.M * size.inner
    moved = 6.0 * hidden  # the norm's backward
    if recipe is None:
        # The norm; the activation; its backward reads its input and a gradient, writes a gradient.
        moved += 4.0 * hidden + 2.0 * (inner + mlp) + 2.0 * (2 * inner + mlp)
    else:
        weights = sum(shape.N * shape.K for shape in linears)
        moved += cast_bytes(recipe, 2 * hidden + weights)  # the norm's output, dy, the weights
        moved += cast_bytes(recipe, mlp, read=2.0 * inner / mlp)
        moved += cast_bytes(recipe, inner, read=2.0 * (inner + mlp) / inner)
    return gemms + floor.move_ms(moved)


def ours(plain: PlainMlp, recipe: Recipe | None = None) -> InContext:
    """Make a ``LayerNormMLP`` with the weights of the plain MLP."""
    D, F = plain.fc2.weight.shape
    layer = float8lab.LayerNormMLP(
        D, F, eps=EPS, bias=False, normalization="RMSNorm",
        activation="swiglu" if plain.gated else "gelu", params_dtype=torch.bfloat16,
        device=plain.fc2.weight.device,
    )  # fmt: skip
    weights: dict[str, Tensor] = {"layer_norm_weight": plain.norm.weight}
    weights |= {"fc1_weight": plain.fc1.weight, "fc2_weight": plain.fc2.weight}
    layer.load_state_dict(weights, strict=False)
    return InContext(layer, our_context(recipe))


def candidates(setting: Setting, plain: PlainMlp) -> Iterator[Candidate]:
    """Iterate over the baselines, ours by recipe, and other libraries."""
    yield from fused_candidates(setting, plain, ours, "LayerNormMLP", PLAIN, OURS)
    yield from mlp_peers(plain, setting.modes)


def rows(setting: Setting, sizes: Sequence[MlpSize]) -> Iterator[Row]:
    """Measure all candidates on every size."""
    for size in sizes:
        torch.manual_seed(setting.seed)
        with setting.device:
            plain = PlainMlp(size.D, size.F, size.activation).bfloat16()
        flops = sum(shape.flops() for shape in size.linears())
        floor = partial(floor_ms, setting.floor, size)
        shape = size.M, size.D, size.D
        trial = Trial.of_normal(
            setting, size.describe(), plain, shape, PLAIN, FLOOR_DB, flops, floor
        )
        yield from trial.rows(setting, candidates(setting, plain))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, metavar="M", default=16384)


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    sizes = [MlpSize(4096, 14336, options.tokens, name) for name in ("swiglu", "gelu")]
    return rows(setting, sizes)


SUBJECT = Subject(
    "mlp",
    "Norm and MLP: forward and backward",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dgamma", "dW1", "dW2"),
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
