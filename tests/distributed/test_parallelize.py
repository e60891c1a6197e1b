"""Tensor parallelism of plain models by torch's parallelize_module."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import float8lab
from float8lab.distributed.styles import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from float8lab.recipes import DelayedScaling, Float8CurrentScaling, Recipe
from float8lab.recipes.region import PROCESS
from float8lab.tensor.blocks import dequantize_blocks
from tests.distributed.ranks import RECIPES, Collectives, Ranks, check_names, ranks_fixture

WIDTH, HIDDEN = 64, 128
TOKENS_AS_SHARDS = Shard(1)
COLUMN = ("q", "k", "up", "gate")


class Block(nn.Module):
    """Layers in pairs that share an input, and others that sum over ranks.

    With weights and inputs that are small integers all sums are exact in any order, so that ranks
    must have the very numbers of one rank.
    """

    def __init__(self, recipe: Recipe | None) -> None:
        super().__init__()
        sizes = dict.fromkeys(("q", "k", "out"), (WIDTH, WIDTH))
        sizes |= dict.fromkeys(("up", "gate"), (WIDTH, HIDDEN)) | {"down": (HIDDEN, WIDTH)}
        generator = torch.Generator().manual_seed(1)
        for name, size in sizes.items():
            layer = nn.Linear(*size, bias=name != "k")
            for parameter in layer.parameters():
                parameter.data = integers(parameter.shape, generator)
            self.add_module(name, layer)
        if recipe is not None:
            float8lab.convert_to_float8(self, recipe)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.q(x).relu() + self.k(x))
        return x + self.down(self.gate(x).relu() + self.up(x))


def integers(shape: Any, generator: torch.Generator) -> Tensor:
    """Mostly -1, 0, 1, and a few larger ones: parts of a tensor differ in their amaxes."""
    values = torch.randint(-1, 2, tuple(shape), generator=generator).float()
    large = torch.rand(tuple(shape), generator=generator) < 2 / max(values.numel(), 1)
    return values + large * 9


def plan_of(kind: str) -> dict[str, Any]:
    """A plan of parallelize_module: with whole tokens, or shards gathered in one way or another."""
    if kind == "tensor":
        styles = {"out": RowwiseParallel(), "down": RowwiseParallel()}
        return styles | dict.fromkeys(COLUMN, ColwiseParallel())
    rows: Any = {"output_layouts": TOKENS_AS_SHARDS, "use_local_output": False}
    if kind == "sequence":
        columns, row = ColwiseParallel(input_layouts=TOKENS_AS_SHARDS), RowwiseParallel(**rows)
    else:
        columns, row = Float8ColwiseParallel(), Float8RowwiseParallel(**rows)
    return dict.fromkeys(COLUMN, columns) | {"out": row, "down": row}


class Operands:
    """Keeps what every GEMM multiplies: by the layer's name, the GEMM's and its place there."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, int], list[tuple[Tensor, Tensor, Any]]] = {}

    def saw_cast(self, *args: Any) -> None:
        pass

    def saw_gemm(self, kind: str, call: Any, *operands: Any) -> None:
        plan = getattr(call.plan, kind)
        for i, operand in enumerate(operands):
            if operand is not None:
                spec = (plan.left, plan.right)[i]
                key = call.precision.name, kind, i
                self.seen.setdefault(key, []).append((*(t.clone() for t in operand), spec))


@contextmanager
def operands_kept() -> Any:
    kept = PROCESS.observer = Operands()
    try:
        yield kept
    finally:
        PROCESS.observer = None


SHARDED = {
    "column": {("fprop", 1): 0, ("dgrad", 0): 1, ("dgrad", 1): 1, ("wgrad", 0): 0},
    "row": {("fprop", 0): 1, ("fprop", 1): 1, ("dgrad", 1): 0, ("wgrad", 1): 0},
}
"""The dimension along which a rank has a shard of an operand. Tokens are never shards there."""

TOKENS = {("fprop", 0): 0, ("dgrad", 0): 0, ("wgrad", 0): 1, ("wgrad", 1): 1}
"""The dimension of tokens."""


def assert_operands_of_one_rank(ranks: Ranks, here: Operands, alone: Operands, tokens: int) -> None:
    assert here.seen.keys() == alone.seen.keys()
    for (name, kind, i), found in here.seen.items():
        mode = "row" if name in ("out", "down") else "column"
        dim = SHARDED[mode].get((kind, i))
        for mine, whole in zip(found, alone.seen[name, kind, i], strict=True):
            along = TOKENS.get((kind, i))
            cut = None if along is None else (along, 0, tokens)
            expected = [dequantized(*one, cut) for one in (mine, whole)]
            if dim is not None:
                expected[1] = expected[1].chunk(ranks.world, dim)[ranks.rank]
            assert torch.equal(*expected), (name, kind, i)


def dequantized(q: Tensor, scale: Tensor, spec: Any, tokens: Any) -> Tensor:
    """Exact values, which tell the bytes; ``tokens``: along which dimension, and how many."""
    values = dequantize_blocks(q, scale.float(), spec, torch.float64)
    return values if tokens is None else values.narrow(*tokens)  # they are padded


def run(model: nn.Module, x: Any) -> list[Tensor]:
    """The output, and the gradients of the input and of parameters, whole."""
    model.zero_grad()
    inp = x.detach().clone().requires_grad_()
    y = model(inp)
    y.backward(y.detach().sign())
    gradients = [parameter.grad for parameter in model.parameters()]
    return [whole(t) for t in (y, inp.grad, *gradients)]


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def parallelized(mesh: Any, kind: str, recipe: Recipe, *, converted_first: bool = True) -> Any:
    model = Block(recipe if converted_first else None)
    parallelize_module(model, mesh, plan_of(kind))
    return model if converted_first else float8lab.convert_to_float8(model, recipe)


def inputs(mesh: Any, kind: str, *shape: int) -> tuple[Tensor, Any]:
    x = integers((*shape, WIDTH), torch.Generator().manual_seed(shape[1]))
    return x, x if kind == "tensor" else distribute_tensor(x, mesh, [TOKENS_AS_SHARDS])


def assert_as_alone(ranks: Ranks, model: Any, alone: Any, kind: str, *shapes: Any) -> None:
    for shape in shapes:
        x, mine = inputs(ranks.mesh(), kind, *shape)
        with operands_kept() as expected:
            results = run(alone, x)
        with operands_kept() as here:
            got = run(model, mine)
        assert_operands_of_one_rank(ranks, here, expected, shape[0] * shape[1])
        for one, other in zip(got, results, strict=True):
            assert torch.equal(one, other)


def check_operands_and_results(ranks: Ranks) -> None:
    for recipe in (Float8CurrentScaling(power_of_2_scale=True), DelayedScaling(power_of_2_scale=True)):
        for kind in ("tensor", "sequence", "float8"):
            for first in (True, False):
                model = parallelized(ranks.mesh(), kind, recipe, converted_first=first)
                shapes = ((2, 16), (3, 5), (1, 1))
                assert_as_alone(ranks, model, Block(recipe), kind, *shapes)


def check_fsdp_on_a_mesh_of_two_dimensions(ranks: Ranks) -> None:
    mesh = ranks.mesh(2, ranks.world // 2, names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    for recipe in (Float8CurrentScaling(power_of_2_scale=True),):
        for kind in ("tensor", "float8"):
            alone = Block(recipe)
            model = parallelized(tp, kind, recipe)
            fully_shard(model, mesh=dp)
            parts = [inputs(tp, kind, 2, 8 + 2 * i) for i in range(dp.size())]
            expected = [run(alone, x) for x, _ in parts]
            x, mine = parts[dp.get_local_rank()]
            with Collectives() as collectives:
                got = run(model, mine)
            for one, other in zip(got[:2], expected[dp.get_local_rank()], strict=False):
                assert torch.equal(one, other)
            for one, *others in zip(got[2:], *(e[2:] for e in expected), strict=True):
                assert torch.equal(one, sum(others) / len(others))
            print(collectives.seen)


outcome = ranks_fixture(__name__, 4)


@pytest.mark.parametrize("name", check_names(sys.modules[__name__]))
def test_ranks(outcome: Callable[[str], None], name: str):
    outcome(name)
