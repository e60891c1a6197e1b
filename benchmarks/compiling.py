"""Measure the CPU time of the first compiled step of linear layers, plain and converted.

    python -m benchmarks.compiling [--blocks 12] [--backend aot_eager] [--recipes current,delayed]

Each block has three layers. The model is compiled as a whole, and block by block; then the blocks
share one graph. The time is that of the first forward and backward, less one eager step before it.
It is the CPU time of this process, so backends that compile in other processes need less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common
from benchmarks.recipes import RECIPES
from float8lab.recipes import Recipe

__all__ = ["main", "measure"]

_FEATURES = 64


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(_FEATURES, _FEATURES) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(torch.relu(y))
        return x + y


def measure(blocks: int, recipe: Recipe | None, backend: str, *, by_block: bool) -> float:
    """Measure the seconds of CPU time that the first compiled step takes; None is plain layers."""
    torch._dynamo.reset()
    model = nn.Sequential(*(_Block() for _ in range(blocks)))
    if recipe is not None:
        float8lab.convert_to_float8(model, recipe)
    x = torch.randn(32, _FEATURES)
    model(x).sum().backward()
    for module in model if by_block else [model]:
        module.compile(backend=backend, fullgraph=True)
    start = time.process_time()
    model(x).sum().backward()
    return time.process_time() - start


def main(argv: Sequence[str]) -> int:
    """Print a markdown table with a row for plain layers and for each recipe."""
    parser = common.new_parser(__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--backend", default="aot_eager", help="as in torch.compile")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="comma-separated")
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    choices: dict[str, Recipe | None] = {"plain": None}
    choices |= {name: RECIPES[name]() for name in options.recipes.split(",")}
    rows = []
    for name, recipe in choices.items():
        measure(1, recipe, options.backend, by_block=False)  # imports what it needs
        seconds = [
            measure(options.blocks, recipe, options.backend, by_block=by_block)
            for by_block in (False, True)
        ]
        rows.append([name, *(f"{x:.1f}" for x in seconds)])
    facts = common.header(options.commit)
    print(common.describe_header(facts), flush=True)
    print(f"\n{common.table(['layers', 'whole model, s', 'block by block, s'], rows)}")
    common.append_json(options.json, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
