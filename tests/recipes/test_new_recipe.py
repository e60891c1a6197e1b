"""The example recipe of CONTRIBUTING.md is defined, and trains."""

import torch

import float8lab
from tests.contributing import example


def test_recipe_of_contributing_page_trains() -> None:
    recipe = example("How to add a recipe", "Float8NarrowScaling")()
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
        fp8_y = layer(x)
    assert not torch.equal(fp8_y, layer(x))
