"""Time the linear layers of MoE experts: torch's bfloat16 grouped GEMM and each recipe.

    python -m benchmarks.grouped [--sustained] [--shape 7168x2048] [--jagged] [--gemms]

This needs a CUDA GPU. Each case is forward and backward of ``GroupedLinear`` with one parameter for
all experts, casts included; the baseline is ``torch._grouped_mm`` with autograd. ``--jagged`` makes
group sizes proportional to random squares; ``--gemms`` times each of the three GEMMs alone, in each
mode and configuration of the kernel, for the table in ``hopper_gemm.py``.

M tokens, E experts, K input features, N output features.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common, report
from benchmarks.models import Candidate, Trial
from benchmarks.recipes import RECIPES
from benchmarks.report import Row, Setting, Subject, Target
from float8lab import ops
from float8lab.formats import E4M3
from float8lab.recipes import Recipe

__all__ = ["SHAPES", "SUBJECT", "Experts", "gemms", "main", "rows"]

FLOOR_DB = 20.0
"""The least SQNR in dB, as for one linear layer: see ``benchmarks/linear.py``."""


@dataclass(frozen=True)
class Experts:
    """A grouped linear layer: tokens of all experts, experts, input and output features."""

    M: int
    E: int
    K: int
    N: int
    jagged: bool = False

    def describe(self) -> str:
        kind = "jagged" if self.jagged else "balanced"
        return f"{self.M} tokens, {self.E} experts, {self.K} -> {self.N}, {kind}"

    def sizes(self, seed: int = 0) -> list[int]:
        """Return the number of tokens of each expert; if jagged, proportional to random squares."""
        if not self.jagged:
            return [self.M // self.E] * self.E
        generator = torch.Generator().manual_seed(seed)
        share = torch.rand(self.E, generator=generator, dtype=torch.float64).square()
        sizes = (share / share.sum() * self.M).long()
        sizes[0] += self.M - sizes.sum()
        return [int(size) for size in sizes]


SHAPES = (
    Experts(32768, 8, 7168, 2048),
    Experts(32768, 8, 4096, 14336),
    Experts(32768, 128, 2048, 768),
)

_TARGETS: dict[Experts, tuple[float, float, float]] = {
    SHAPES[0]: (1.55, 1.45, 1.40),
    SHAPES[1]: (1.75, 1.65, 1.55),
    SHAPES[2]: (1.25, 1.20, 1.15),
}
"""Targets by shape, for one scale per tensor, per row and per block."""


class _Torch(nn.Module):
    """The baseline: torch's grouped GEMM."""

    def __init__(self, weight: Tensor, offs: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.offs = offs

    def forward(self, x: Tensor) -> Tensor:
        return torch._grouped_mm(x, self.weight.mT, offs=self.offs)


class _Ours(nn.Module):
    def __init__(self, weight: Tensor, splits: Tensor, recipe: Recipe) -> None:
        super().__init__()
        E, N, K = weight.shape
        self.layer = float8lab.GroupedLinear(
            E, K, N, bias=False, single_grouped_weight=True, device=weight.device,
            params_dtype=weight.dtype,
        )  # fmt: skip
        with torch.no_grad():
            self.layer.weight.copy_(weight)
        self.splits, self.recipe = splits, recipe

    def forward(self, x: Tensor) -> Tensor:
        with float8lab.autocast(recipe=self.recipe):
            y: Tensor = self.layer(x, self.splits)
        return y


def _reference(x: Tensor, w: Tensor, dy: Tensor, sizes: Sequence[int]) -> dict[str, Tensor]:
    """Compute the output and the gradients in float32, expert by expert."""
    results: dict[str, list[Tensor]] = {"y": [], "dX": [], "dW": []}
    for part, one, grad in zip(x.split(sizes), w, dy.split(sizes), strict=True):
        wide = part.float(), one.float(), grad.float()
        results["y"].append((wide[0] @ wide[1].t()).bfloat16())
        results["dX"].append((wide[2] @ wide[1]).bfloat16())
        results["dW"].append((wide[2].t() @ wide[0]).bfloat16())
    return {
        name: torch.stack(parts) if name == "dW" else torch.cat(parts)
        for name, parts in results.items()
    }


def rows(setting: Setting, shapes: Sequence[Experts]) -> Iterator[Row]:
    """Measure all candidates on every shape."""
    for shape in shapes:
        M, E, K, N = shape.M, shape.E, shape.K, shape.N
        torch.manual_seed(setting.seed)
        new = partial(torch.randn, device=setting.device, dtype=torch.bfloat16)
        x, w, dy = new(M, K), new(E, N, K) * K**-0.5, new(M, N)
        sizes = shape.sizes(setting.seed)
        splits = torch.tensor(sizes, device=setting.device, dtype=torch.int32)
        offs = splits.cumsum(0, dtype=torch.int32)
        gate = common.Gate(_reference(x, w, dy, sizes), FLOOR_DB)
        trial = Trial(shape.describe(), (x, dy), gate, 6.0 * M * N * K, lambda recipe: None)
        names = {"dW": "weight"}
        found = [
            Candidate(
                "bfloat16, torch._grouped_mm", partial(_Torch, w, offs), names, baseline=True,
                has_floor=False,
            )
        ]  # fmt: skip
        for name in setting.recipes:
            recipe = RECIPES[name]()
            found.append(
                Candidate(
                    f"{name}, eager", partial(_Ours, w, splits, recipe),
                    {"dW": "layer.weight"}, recipe=recipe, fp8=True, has_floor=False,
                )
            )  # fmt: skip
        yield from trial.rows(setting, found, _targets(shape))


def _targets(shape: Experts) -> dict[str, tuple[Target, ...]]:
    if shape not in _TARGETS:
        return {}
    tensor, row, block = _TARGETS[shape]
    bounds = {"delayed": tensor, "current": tensor, "rowwise": row, "block": block}
    return {f"{name}, eager": (Target("x bf16", ">=", one),) for name, one in bounds.items()}


# The GEMMs alone.

_GEMMS: dict[str, tuple[tuple[int, int], tuple[int, int], bool]] = {
    "tensor, fast": ((-1, -1), (-1, -1), True),
    "tensor, precise": ((-1, -1), (-1, -1), False),
    "row, fast": ((1, -1), (1, -1), True),
    "row, precise": ((1, -1), (1, -1), False),
    "block": ((1, 128), (128, 128), False),
}
_CONFIGS = {
    "as it is": {},
    "band 8": {"band": 8},
    "band 32": {"band": 32},
    "fewer stages": {"stages": -1},
}
"""The changes that each variant makes to the configuration of a mode."""


def gemms(setting: Setting, shapes: Sequence[Experts], *, tune: bool = False) -> Iterator[Row]:
    """Time each GEMM in each mode; with ``tune``, with each configuration of the kernel."""
    for shape in shapes:
        M, E, K, N = shape.M, shape.E, shape.K, shape.N
        torch.manual_seed(setting.seed)
        new = partial(torch.randn, device=setting.device, dtype=torch.bfloat16)
        x, w, dy = new(M, K), new(E, N, K), new(M, N)
        offs = torch.tensor(shape.sizes(setting.seed), device=setting.device).cumsum(0).int()
        for name, (block, w_block, fast) in _GEMMS.items():
            both = ("fp32", 0.0, 16, True, True)
            how = (x.dtype, E4M3, block, *both, False, None, offs)
            x_q, dy_q = (ops.cast_op("", [rows], *how) for rows in (x, dy))
            w_q = ops.cast_op("", [w], x.dtype, E4M3, w_block, *both)
            for kind, a, b, blocks in (
                ("fprop", x_q[:2], w_q[:2], (block, w_block)),
                ("dgrad", dy_q[:2], w_q[3:5], (block, w_block)),
                ("wgrad", dy_q[3:5], x_q[3:5], (block, block)),
            ):
                operands: tuple[Any, ...] = (
                    *a,
                    blocks[0],
                    *b,
                    blocks[1],
                    None,
                    x.dtype,
                    fast,
                    offs,
                )
                for label, run in _ways(operands, tune=tune):
                    yield Row(
                        f"{kind}: {shape.describe()}", f"{name}{label}",
                        ms=setting.time(run).samples, flops=2.0 * M * N * K, fp8=True,
                    )  # fmt: skip
        for kind, a, b in (("fprop", x, w.mT), ("dgrad", dy, w), ("wgrad", dy.t(), x)):
            run = partial(torch._grouped_mm, a, b, offs=offs)
            yield Row(
                f"{kind}: {shape.describe()}", "bfloat16, torch._grouped_mm",
                ms=setting.time(run).samples, flops=2.0 * M * N * K, baseline=True,
            )  # fmt: skip


def _ways(operands: tuple[Any, ...], *, tune: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    if not tune:
        yield "", partial(ops.scaled_mm_op, *operands)
        return
    package = "float8lab.ops.kernels."  # its modules need a GPU
    kernels = importlib.import_module(f"{package}grouped_gemm")
    hopper = importlib.import_module(f"{package}hopper_gemm")
    a, a_scale, a_block, b, b_scale, b_block, bias, dtype, fast, offs = operands
    mode = kernels.mode_of(a, tuple(a_block), b, tuple(b_block), dtype, fast)
    base = hopper.CONFIGS[mode, dtype.itemsize]
    for label, change in _CONFIGS.items():
        stages = base.stages + change.get("stages", 0)
        config = base._replace(stages=stages, band=change.get("band", base.band))
        run = partial(
            kernels.multiply_groups,
            mode,
            a,
            a_scale,
            b,
            b_scale,
            bias,
            offs,
            dtype,
            config=config,
        )
        yield f" ({mode}, {label})", run


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", help="only that of these features, such as 7168x2048")
    parser.add_argument("--jagged", action="store_true", help="groups of random sizes")
    parser.add_argument("--gemms", action="store_true", help="the GEMMs alone")
    parser.add_argument("--tune", action="store_true", help="by configurations, with --gemms")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    shapes = [
        Experts(s.M, s.E, s.K, s.N, options.jagged)
        for s in SHAPES
        if options.shape in (None, f"{s.K}x{s.N}")
    ]
    if options.gemms:
        return gemms(setting, shapes, tune=options.tune)
    return rows(setting, shapes)


SUBJECT = Subject(
    "grouped",
    "Grouped linear layer: forward and backward",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dW"),
        report.TIME,
        report.WALL,
        report.SPEED_UP,
        report.FLOPS,
        report.TARGET,
        *report.SUSTAINED,
    ),
    _rows,
    _options,
    recipes=tuple(name for name in RECIPES if name != "mx"),
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
