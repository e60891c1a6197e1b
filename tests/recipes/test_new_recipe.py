"""The recipe that CONTRIBUTING.md adds as an example is defined, and trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

import float8lab

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_recipe_of_the_page_trains() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## How to add a recipe", 1)[1]
    (block,) = re.findall(r"```python\n(.*?)```", section.split("\n## ", 1)[0], re.S)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block, str(PAGE), "exec", dont_inherit=True), names)
    recipe = names["Float8NarrowScaling"]()
    torch.manual_seed(0)
    layer, x, target = float8lab.Linear(96, 80), torch.randn(24, 96), torch.randn(24, 80)
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(8):
        with float8lab.autocast(recipe=recipe):
            loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    with torch.no_grad(), float8lab.autocast(recipe=recipe):
        low = layer(x)
    assert not torch.equal(low, layer(x))
