"""Tensor and sequence parallelism: operands have one rank's bytes, results its sums."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import float8lab
from float8lab.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)
from float8lab.recipes.region import PROCESS
from tests.distributed.ranks import Ranks, check_names, ranks_fixture

RECIPES: list[Recipe | None] = [
    Float8CurrentScaling(),
    DelayedScaling(),
    DelayedScaling(reduce_amax=False, amax_compute_algo="max", amax_history_len=2),
    Float8RowwiseScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    Float8RowwiseScaling(high_precision_wgrad=True),
    Float8CurrentScaling(override_linear_precision=(True, False, True)),
    None,
]


class Operands:
    """An observer that keeps the operands of each GEMM, by layer."""

    def __init__(self) -> None:
        self.gemms: list[tuple[str, Any, Any]] = []

    def saw_cast(self, *args: Any) -> None:
        pass

    def saw_gemm(self, kind: str, call: Any, a: Any, b: Any) -> None:
        """Keep the operands."""
        self.gemms.append((kind, a, b))

    def __enter__(self) -> Operands:
        PROCESS.observer = self
        return self

    def __exit__(self, *exception: Any) -> None:
        PROCESS.observer = None


def part_of(x: Tensor, dim: int, ranks: Ranks) -> Tensor:
    """This rank's shard, by the rule of torch.chunk, empty ones included."""
    chunk = -(-x.shape[dim] // ranks.world)
    start = min(x.shape[dim], chunk * ranks.rank)
    return x.narrow(dim, start, min(chunk, x.shape[dim] - start))


def assert_summed_alike(mine: Tensor, whole: Tensor, ranks: Ranks, what: Any) -> None:
    """Assert equality but for the order of sums: every partial sum is rounded once."""
    assert mine.shape == whole.shape, what
    if whole.numel():
        # Each of the partial sums, and each sum of two of them, is rounded to the output's dtype.
        bound = 2 * ranks.world * torch.finfo(whole.dtype).eps * whole.float().abs().max()
        assert (mine.float() - whole.float()).abs().max() <= bound, what


def values_of(operand: tuple[Tensor, Tensor], block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """FP8 bytes of an operand, and the scale of each."""
    q, scale = operand
    if scale.ndim == 2:
        for dim, size in enumerate(block):
            if size > 0:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, q.shape[dim])
    return q.view(torch.uint8), scale.expand(q.shape)


def assert_same_operands(
    mine: Operands, whole: Operands, recipe: Recipe, cut: Any, ranks: Ranks, what: Any
) -> None:
    """Assert that the bytes and scales are the parts that ``cut`` takes of one rank's."""
    assert [kind for kind, _, _ in mine.gemms] == [kind for kind, _, _ in whole.gemms]
    for (kind, *here), (_, *there) in zip(mine.gemms, whole.gemms, strict=True):
        gemm = recipe.linear.gemms()[kind]
        for side, operand, expected in zip(("left", "right"), here, there, strict=True):
            if operand is None:
                assert expected is None
                continue
            block = getattr(gemm, side).block
            for x, y in zip(values_of(operand, block), values_of(expected, block), strict=True):
                x, y = cut(kind, side, x, y)
                x = x[: y.shape[0], : y.shape[1]]
                assert torch.equal(x, y), (*what, kind, side)


def run(layer: Any, x: Tensor, dy: Tensor, recipe: Recipe | None) -> list[Tensor]:
    """Output and gradients of three steps."""
    results = []
    for step in range(1 if recipe is None or not recipe.linear.delayed else 3):
        inp = (x * (step + 1)).requires_grad_()
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(inp)
        y.backward(dy * (step + 1))
        results += [y.detach(), inp.grad, layer.weight.grad, layer.bias.grad]
        layer.zero_grad()
    return results


def check_linear(ranks: Ranks) -> None:
    N, K = 32 * ranks.world, 48 * ranks.world
    group, made = dist.group.WORLD, {"device": ranks.device, "params_dtype": torch.bfloat16}
    for recipe, mode, sequence_parallel in itertools.product(
        RECIPES, ("column", "row"), (False, True)
    ):
        for M in (7, 1, 0, 150):
            what = recipe, mode, sequence_parallel, M
            torch.manual_seed(M)
            whole = float8lab.Linear(K, N, **made)
            nn.init.normal_(whole.bias)
            x = torch.randn(M, 2, K).mul(torch.linspace(0.1, 3, M)[:, None, None])
            x, dy = x.bfloat16().to(ranks.device), torch.randn(M, 2, N).bfloat16().to(ranks.device)
            torch.manual_seed(M)
            layer = float8lab.Linear(
                K, N, tp_group=group, parallel_mode=mode, sequence_parallel=sequence_parallel,
                **made,
            )  # fmt: skip
            column, dim = mode == "column", int(mode == "row")
            assert torch.equal(layer.weight, part_of(whole.weight, dim, ranks)), what
            layer.bias.data.copy_(part_of(whole.bias, 0, ranks) if column else whole.bias)

            rows = 0 if sequence_parallel else None
            cuts = {"x": rows, "dy": 2, "y": 2, "dx": rows} if column else {
                "x": 2, "dy": rows, "y": rows, "dx": 2
            }  # fmt: skip

            def shard(name: str, value: Tensor, cuts: dict[str, Any] = cuts) -> Tensor:
                return value if cuts[name] is None else part_of(value, cuts[name], ranks)

            with Operands() as expected:
                wanted = run(whole, x, dy, recipe)
            with Operands() as seen:
                found = run(layer, shard("x", x), shard("dy", dy), recipe)
            for i in range(0, len(wanted), 4):
                y, dx, dw, db = wanted[i : i + 4]
                mine = list(found[i : i + 4])
                if sequence_parallel and not column:
                    dist.all_reduce(mine[3])
                parts = shard("y", y), shard("dx", dx), part_of(dw, dim, ranks)
                parts = (*parts, part_of(db, 0, ranks) if column else db)
                for name, one, other in zip(("y", "dx", "dw", "db"), mine, parts, strict=True):
                    assert_summed_alike(one, other, ranks, (*what, name))
            if recipe is None:
                continue
            sizes = {"M": 2 * M, "N": N, "K": K}
            sides = {"fprop": ("MK", "NK"), "dgrad": ("MN", "KN"), "wgrad": ("NM", "KM")}

            def cut(kind: str, side: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
                """What is the same of this rank's operand, and of one rank's."""
                for dim, name in enumerate(sides[kind][side == "right"]):  # noqa: B023
                    y = y.narrow(dim, 0, sizes[name])  # noqa: B023
                    if name == ("N" if column else "K"):  # noqa: B023
                        y = part_of(y, dim, ranks)
                        parallel, edge = layer._fp8.parallel, recipe.linear.edge  # noqa: B023
                        x = parallel.cropped(x, dim, y.shape[dim], edge)
                return x, y

            if M:
                assert_same_operands(seen, expected, recipe, cut, ranks, what)


outcome = ranks_fixture(__name__, 2, 4)


@pytest.mark.parametrize("name", check_names(__import__(__name__, fromlist=["_"])))
def test_on_several_ranks(outcome: Any, name: str) -> None:
    outcome(name)
