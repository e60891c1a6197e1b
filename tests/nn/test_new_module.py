"""The example module of CONTRIBUTING.md equals two linear layers bit for bit."""

import copy

import pytest
import torch

import float8lab
from float8lab import recipes
from tests.contributing import example


@pytest.mark.parametrize("recipe", [None, *recipes.ALL.values()], ids=["high", *recipes.ALL])
def test_the_example_module_equals_two_linear_layers(recipe: recipes.Recipe | None) -> None:
    module = example("How to add a module", "GatedLinear")(96, 80, device="cpu")
    assert list(module.state_dict()) == ["gate_weight", "up_weight"]
    layers = [float8lab.Linear(96, 80, bias=False, device="cpu") for _ in range(2)]
    for layer, parameter in zip(layers, module.parameters(), strict=True):
        layer.weight.data.copy_(parameter.data)
    copied = copy.deepcopy(module)
    weights = [layer.weight for layer in layers]
    x, dy = torch.randn(24, 96), torch.randn(24, 80)
    for _ in range(3):
        results = []
        for run, parameters in (
            (module, list(module.parameters())),
            (copied, list(copied.parameters())),
            (lambda x: torch.sigmoid(layers[0](x)) * layers[1](x), weights),
        ):
            leaf = x.clone().requires_grad_()
            with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
                y = run(leaf)
            results.append([y.detach(), *torch.autograd.grad(y, [leaf, *parameters], dy)])
        for tensor, *other_tensors in zip(*results, strict=True):
            assert all(torch.equal(tensor, other_tensor) for other_tensor in other_tensors)
        x = x * 1.5


def test_the_example_module_stores_and_trains_its_weights_in_fp8() -> None:
    recipe = recipes.Float8CurrentScaling()
    with float8lab.fp8_model_init(recipe=recipe):
        module = example("How to add a module", "GatedLinear")(96, 80, device="cpu")
    assert {type(p) for p in module.parameters()} == {float8lab.Float8Tensor}
    with float8lab.autocast(recipe=recipe):
        module(torch.randn(4, 96)).sum().backward()
    assert all(p.grad is not None for p in module.parameters())
