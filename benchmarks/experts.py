"""Time an MoE layer, from routing to the weighted sums, in bfloat16 and for each recipe.

    python -m benchmarks.experts [--sustained] [--model qwen3-moe] [--recipe block] [--own-bf16]

This needs a CUDA GPU. Each case is forward and backward of a router and of the chosen experts: by
torch's ops and its grouped GEMM, as in Transformers, and by ``ExpertMLP``. The router is the same
in all. With ``--sustained`` each recipe takes turns with bfloat16 only, and has its own table,
which is printed before the kernels of the next recipe are compiled. ``saved`` is the memory that
autograd saves until backward.

T tokens, E experts, K experts of a token, H features, F features between.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8lab
from benchmarks import common, report
from benchmarks.linear import saved_bytes
from benchmarks.models import Candidate, Trial
from benchmarks.recipes import RECIPES
from benchmarks.report import Column, Row, Setting, Subject, Target
from float8lab.recipes import Recipe

__all__ = ["MODELS", "SUBJECT", "Layer", "main", "rows", "saved_share"]

FLOOR_DB = 20.0
"""The least SQNR in dB, as for one linear layer: see ``benchmarks/linear.py``."""
SAVED = "saved, x bf16"


@dataclass(frozen=True)
class Layer:
    """The sizes of a layer of experts."""

    T: int
    E: int
    K: int
    H: int
    F: int

    @property
    def flops(self) -> float:
        """Return the FLOPs of a training step."""
        return 18.0 * self.T * self.K * self.H * self.F


MODELS = {
    "qwen3-moe": Layer(32768, 128, 8, 2048, 768),
    "mixtral": Layer(8192, 8, 2, 4096, 14336),
}


class _Mixture(nn.Module):
    """A router and the experts that it chooses; subclasses override how these ``run``."""

    def __init__(self, shape: Layer, router: Tensor, fc1: Tensor, fc2: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Parameter(router.clone())
        self.fc1, self.fc2 = nn.Parameter(fc1.clone()), nn.Parameter(fc2.clone())

    def forward(self, x: Tensor) -> Tensor:
        best = F.linear(x, self.router).float().topk(self.shape.K)
        return self.run(x, best.indices, best.values.softmax(-1).to(x.dtype))

    def run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run the experts as Transformers' ``grouped_mm`` does."""
        T, K = index.shape
        expert, order = index.flatten().sort(stable=True)
        offs = torch.searchsorted(
            expert, torch.arange(self.shape.E, device=x.device), right=True
        ).int()
        h = self.multiply(x[order // K], self.fc1, offs)
        gate, up = h.chunk(2, -1)
        y = self.multiply(F.silu(gate) * up, self.fc2, offs) * weights.flatten()[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(T * K, device=x.device)
        return y[back].view(T, K, -1).sum(1)

    def multiply(self, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        """Apply the weight of each expert to the expert's rows."""
        return torch._grouped_mm(x, weight.mT, offs=offs)


class _Ours(_Mixture):
    def __init__(self, shape: Layer, *weights: Tensor, recipe: Recipe | None) -> None:
        super().__init__(shape, *weights)
        self.experts = float8lab.ExpertMLP(
            shape.E, shape.H, shape.F, device=self.fc1.device, params_dtype=self.fc1.dtype
        )
        self.experts.fc1_weight, self.experts.fc2_weight = self.fc1, self.fc2
        self.recipe = recipe

    def run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        with float8lab.autocast(self.recipe is not None, recipe=self.recipe):
            y: Tensor = self.experts(x, weights, index)
        return y


class _Reference(_Mixture):
    """Experts whose GEMMs run in float32."""

    def multiply(self, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        parts = zip(x.tensor_split(offs[:-1].tolist()), weight, strict=True)
        return torch.cat([part.float() @ one.float().t() for part, one in parts]).to(x.dtype)


def saved_share(shape: Layer, recipe: Recipe | None) -> float:
    """Return the bytes that autograd saves for ``ExpertMLP``, relative to torch's ops.

    The layers have full size on the meta device, where bytes are counted without computing. The
    layer's tokens and what the router saves count in both, parameters count in neither.
    """
    new = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    sizes = (shape.E, shape.H), (shape.E, 2 * shape.F, shape.H), (shape.E, shape.H, shape.F)
    weights, x = [new(*size) for size in sizes], new(shape.T, shape.H)
    ours = _Ours(shape, *weights, recipe=recipe)
    return saved_bytes(ours, x) / saved_bytes(_Mixture(shape, *weights), x)


def _extra(shape: Layer, module: nn.Module, x: Tensor) -> dict[str, float]:
    return {SAVED: saved_share(shape, module.recipe)} if isinstance(module, _Ours) else {}


def rows(setting: Setting, name: str, shape: Layer, *, own_bf16: bool = False) -> Iterator[Row]:
    """Measure all candidates on one layer; with ``own_bf16`` also ``ExpertMLP`` in bfloat16."""
    torch.manual_seed(setting.seed)
    new = partial(torch.randn, device=setting.device, dtype=torch.bfloat16)
    x, dy = new(shape.T, shape.H), new(shape.T, shape.H)
    weights = (
        new(shape.E, shape.H) * shape.H**-0.5,
        new(shape.E, 2 * shape.F, shape.H) * shape.H**-0.5,
        new(shape.E, shape.H, shape.F) * shape.F**-0.5,
    )
    exact, given = _Reference(shape, *weights), x.clone().requires_grad_()
    y = exact(given)
    y.backward(dy)
    results = {"y": y, "dX": given.grad, "dW1": exact.fc1.grad, "dW2": exact.fc2.grad}
    gate = common.Gate({key: value.detach() for key, value in results.items()}, FLOOR_DB)
    del exact, given, y, results
    sizes = f"{name}: {shape.T} tokens, {shape.K} of {shape.E} experts, {shape.H} -> {shape.F}"
    names = {"dW1": "fc1", "dW2": "fc2"}
    made = [
        Candidate(
            "bfloat16, torch._grouped_mm", partial(_Mixture, shape, *weights), names,
            baseline=True, has_floor=False,
        ),
    ]  # fmt: skip
    if own_bf16:
        made.append(
            Candidate(
                "bfloat16, ExpertMLP", partial(_Ours, shape, *weights, recipe=None), names,
                has_floor=False,
            )
        )  # fmt: skip
    ours = {}
    for recipe in setting.recipes:
        value = RECIPES[recipe]()
        ours[recipe] = Candidate(
            f"{recipe}, eager", partial(_Ours, shape, *weights, recipe=value), names,
            recipe=value, fp8=True, has_floor=False,
        )  # fmt: skip
    least = (Target("x bf16", ">=", 1.2),) if name == "qwen3-moe" else ()
    targets = {one.name: (*least, Target(SAVED, "<=", 0.60)) for one in ours.values()}
    tables = {sizes: [*ours.values()]}
    if setting.sustained is not None:
        tables = {f"{sizes}, {recipe}": [one] for recipe, one in ours.items()}
    for case, candidates in tables.items():
        extra = partial(_extra, shape)
        trial = Trial(case, (x, dy), gate, shape.flops, lambda recipe: None, extra=extra)
        yield from trial.rows(setting, [*made, *candidates], targets)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--own-bf16", action="store_true", help="ExpertMLP in bfloat16, too")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    for name in options.model or MODELS:
        yield from rows(setting, name, MODELS[name], own_bf16=options.own_bf16)


SUBJECT = Subject(
    "experts",
    "Layer of experts: forward and backward",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dW1", "dW2"),
        report.TIME,
        report.WALL,
        report.SPEED_UP,
        report.FLOPS,
        Column(SAVED),
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
