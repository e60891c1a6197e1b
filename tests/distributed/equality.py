"""Compare a step on several ranks with a step on one rank: a table of docs/many_gpus.md.

A *row* of the table is a parallelism, a *column* a recipe. A cell has one sign for the output, one
for the gradient of the input and one for the gradients of the parameters. Each row is asserted by a
check of the tests beside this file. A test of the page asserts that no row is left out.
"""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import float8lab
from float8lab import recipes
from tests.distributed.ranks import Ranks

PAGE = Path(__file__).resolve().parents[2] / "docs" / "many_gpus.md"

RECIPES: dict[str, recipes.Recipe] = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "row": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(),
    "MX": recipes.MXFP8BlockScaling(),
}
"""The columns of the table, in order."""

BITWISE, SUMS, DIFFERS = "=", "~", "x"


class Step(NamedTuple):
    """A rank's results of one step."""

    y: Tensor
    dx: Tensor
    gradients: list[Tensor]


def page_rows() -> dict[str, list[str]]:
    """Return the cells of each row of the page's table."""
    table = PAGE.read_text().split("<!-- equal over ranks -->")[1].split("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+?) \|(.*)\|$", table, re.M)[2:]
    return {name: [cell.strip(" `") for cell in cells.split("|")] for name, cells in rows}


def local_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """Return this rank's shard of the first dimension."""
    return x.chunk(ranks.world)[ranks.rank]


def summed(x: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    x = x.full_tensor() if isinstance(x, DTensor) else x.clone()
    dist.all_reduce(x)
    return x


def take_step(
    module: nn.Module, recipe: recipes.Recipe, x: Tensor, dy: Tensor, *, group: Any = None,
    call: Callable[..., Tensor] | None = None,
) -> Step:  # fmt: skip
    """Return the results of one step, or of the third step under delayed scaling.

    The third step has the scales of the second. A module that is newer than others takes part in
    the reduction of amaxes from the second step on.
    """
    result = None
    for step in range(3 if recipe.linear.delayed else 1):
        module.zero_grad()
        leaf = (x * (1 + step)).requires_grad_()
        with float8lab.autocast(recipe=recipe, amax_reduction_group=group):
            y = (call or module)(leaf)
        y.backward(dy)
        assert leaf.grad is not None
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        result = Step(y.detach(), leaf.grad, gradients)
    assert result is not None
    return result


def assert_row(
    ranks: Ranks, name: str, measure: Callable[[recipes.Recipe], tuple[Step, Step]]
) -> None:
    """Assert that the measured signs are those of a row of the page.

    For a recipe, ``measure`` returns a rank's results and the part of one rank's results that must
    equal them. This runs only on the CPU, whose GEMMs sum in one order for any number of rows: a
    GPU may take another kernel for fewer tokens. Other checks assert that operands on GPUs have the
    bytes of one rank. A sum over two ranks has only one order, so it may be equal where a sum over
    four ranks is not.
    """
    if ranks.device.type != "cpu":
        return
    cells = []
    for recipe in RECIPES.values():
        got, expected = measure(recipe)
        pairs = (
            [(got.y, expected.y)],
            [(got.dx, expected.dx)],
            [*zip(got[2], expected[2], strict=True)],
        )
        cells.append(" ".join(_sign(ranks, pair) for pair in pairs if pair))
    documented = page_rows().get(name, [])
    if ranks.world < 4:
        cells = [_replace_chance_equality(*pair) for pair in zip(cells, documented, strict=True)]
    assert cells == documented, f"| {name} | " + " | ".join(f"`{c}`" for c in cells)


def _replace_chance_equality(cell: str, documented: str) -> str:
    """Return the cell with the sign of sums where sums are bitwise equal by chance."""
    pairs = zip(cell.split(), documented.split(), strict=True)
    return " ".join(SUMS if (got, expected) == (BITWISE, SUMS) else got for got, expected in pairs)


def _sign(ranks: Ranks, pairs: Iterable[tuple[Tensor, Tensor]]) -> str:
    """Return how equal tensors are on the rank where they differ most."""
    signs = set(ranks.gather(max(_difference_level(ranks, *pair) for pair in pairs)))
    return (BITWISE, SUMS, DIFFERS)[max(signs)]


def _difference_level(ranks: Ranks, got: Tensor, expected: Tensor) -> int:
    assert got.shape == expected.shape, (got.shape, expected.shape)
    if torch.equal(got, expected):
        return 0
    # Each of R partial sums is rounded, and so is each sum of two of them.
    bound = 4 * ranks.world * torch.finfo(got.dtype).eps * expected.abs().max()
    return 1 if (got - expected).abs().max() <= bound else 2
