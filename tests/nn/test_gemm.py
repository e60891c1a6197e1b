"""A linear layer's GEMMs are found out once and then repeated, with the bytes of the first time."""

import pytest
import torch
from torch import Tensor, nn

import float8lab
from float8lab import recipes
from tests.nn.composition import RECIPES

SHAPES = {"32": (32, 128, 128), "odd": (33, 72, 40), "one": (1, 48, 64), "K2048": (64, 2048, 256)}


def _steps(module: nn.Module, inputs: list[Tensor], recipe: recipes.Recipe) -> list[Tensor]:
    """Outputs and gradients of steps under growing inputs, so that a stale scale would show."""
    found = []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        with float8lab.autocast(recipe=recipe):
            y = module(leaf)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()])
        found += [y.detach(), *grads]
    with torch.no_grad(), float8lab.autocast(recipe=recipe):
        found.append(module(inputs[0]))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Linear", "stored", "LayerNormMLP", "LayerNormLinear"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_repeated_call_gives_the_bytes_of_the_first(recipe, shape, kind, monkeypatch):
    launching = pytest.importorskip("float8lab.ops.kernels._launch")
    M, K, N = shape
    inputs = [torch.randn(M, K, device="cuda", dtype=torch.bfloat16) * 2**i for i in range(5)]

    def made() -> nn.Module:
        torch.manual_seed(1)
        bfloat16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
        if kind == "LayerNormMLP":
            return float8lab.LayerNormMLP(K, N, activation="swiglu", **bfloat16)
        if kind == "LayerNormLinear":
            return float8lab.LayerNormLinear(K, N, **bfloat16)
        with float8lab.fp8_model_init(enabled=kind == "stored", recipe=recipe):
            return float8lab.Linear(K, N, **bfloat16)

    repeated = _steps(made(), inputs, recipe)
    monkeypatch.setattr(launching, "ENABLED", False)
    wanted = _steps(made(), inputs, recipe)
    for one, other in zip(repeated, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_steps_of_a_linear_layer_are_a_plan(recipe, monkeypatch):
    """After three steps a call does not come to the functions that say what to do."""
    layer = float8lab.Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    _steps(layer, [x] * 3, recipe)
    gemm = pytest.importorskip("float8lab.ops.kernels.gemm")
    seen = []
    monkeypatch.setattr(gemm, "may_multiply", lambda *args, **kwargs: seen.append(1))
    _steps(layer, [x], recipe)
    assert not seen


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_plan_gives_memory_back_as_its_functions_do(recipe, monkeypatch):
    """The cast for dgrad and the turned weight are gone before the weight's gradient is there."""
    launching = pytest.importorskip("float8lab.ops.kernels._launch")
    M, K, N = 2048, 2048, 2048
    layer = float8lab.Linear(K, N, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)

    def peak() -> int:
        _steps(layer, [x] * 2, recipe)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        _steps(layer, [x], recipe)
        return torch.cuda.max_memory_allocated() - before

    repeated = peak()
    monkeypatch.setattr(launching, "ENABLED", False)
    assert repeated - peak() < M * N, "not so much more as an operand in FP8 takes"
