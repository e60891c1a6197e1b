"""A linear layer's GEMMs are found out once and then repeated, with the bytes of the first time."""

import gc

import pytest
import torch
from torch import Tensor, nn

import float8lab
from float8lab import recipes
from float8lab.nn.gemm import Keep, SavePolicy, _decide, save_policy
from tests.nn.composition import RECIPES

SHAPES = {"32": (32, 128, 128), "odd": (33, 72, 40), "one": (1, 48, 64), "K2048": (64, 2048, 256)}


WITH_KERNELS = {name: recipe for name, recipe in RECIPES.items() if name != "nvfp4"}
"""Casts to 4 bits are the reference's on every device, whose functions no plan repeats."""


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
    torch.testing.assert_close(repeated, wanted, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_the_steps_of_a_linear_layer_are_a_plan(recipe, monkeypatch):
    """After three calls with and without gradients none comes to the functions that decide."""
    layer = float8lab.Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        _steps(layer, [x], recipe)
    gemm = pytest.importorskip("float8lab.ops.kernels.gemm")
    seen = []
    monkeypatch.setattr(gemm, "may_multiply", lambda *args, **kwargs: seen.append(1))
    _steps(layer, [x], recipe)
    assert not seen


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_a_plan_gives_memory_back_as_its_functions_do(recipe, monkeypatch):
    """The cast for dgrad and the turned weight are gone before the weight's gradient is there."""
    launching = pytest.importorskip("float8lab.ops.kernels._launch")
    M, K, N = 2048, 2048, 2048
    layer = float8lab.Linear(K, N, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)

    def peak() -> int:
        # In this thread: autograd's own may still hold gradients when ``before`` is measured.
        with torch.autograd.set_multithreading_enabled(False):
            _steps(layer, [x] * 2, recipe)
            # What an earlier test left in reference cycles would be given back while this measures.
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            _steps(layer, [x], recipe)
            return torch.cuda.max_memory_allocated() - before

    repeated = peak()
    monkeypatch.setattr(launching, "ENABLED", False)
    assert repeated - peak() < M * N, "not so much more as an operand in FP8 takes"


def _modules(kind: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    """A module, its arguments beside the input, and how many linear layers it has."""
    torch.manual_seed(1)
    if kind == "Linear":
        return float8lab.Linear(64, 48, bias=False, device="cpu"), (), 1
    if kind == "LayerNormLinear":
        return float8lab.LayerNormLinear(64, 48, bias=False, device="cpu"), (), 1
    if kind == "LayerNormMLP":
        mlp = float8lab.LayerNormMLP(64, 48, bias=False, activation="swiglu", device="cpu")
        return mlp, (), 2
    if kind.startswith("GroupedLinear"):
        whole = kind.endswith("whole")
        layer = float8lab.GroupedLinear(
            2, 64, 48, bias=False, device="cpu", single_grouped_weight=whole
        )
        return layer, (torch.tensor([20, 12]),), 1
    experts = float8lab.ExpertMLP(2, 64, 48, device="cpu")
    index = torch.arange(32)[:, None] % 2
    return experts, (torch.rand(32, 1), index), 2


@pytest.mark.parametrize("recipe", [RECIPES["delayed"], RECIPES["block"]], ids=str)
@pytest.mark.parametrize(
    "kind",
    ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "GroupedLinear, whole", "Mlp"],
)
def test_a_backward_multiplies_for_the_gradients_that_it_is_for(kind, recipe):
    """``torch.autograd.grad`` of inputs or of parameters, and pipelines, ask for a part of them."""
    module, others, layers = _modules(kind)
    x, parameters = torch.randn(32, 64, requires_grad=True), list(module.parameters())
    with float8lab.autocast(recipe=recipe), float8lab.count_gemms() as forward:
        y = module(x * 1.0, *others)
    products = forward.fp8 + forward.high_precision
    dy = torch.randn_like(y)

    def gradients(of: list[Tensor]) -> tuple[tuple[Tensor, ...], float]:
        """With the number of products, of which the forward has one a layer."""
        with float8lab.count_gemms() as counts:
            found = torch.autograd.grad(y, of, dy, retain_graph=True)
        return found, (counts.fp8 + counts.high_precision) * layers / products

    every, of_all = gradients([x, *parameters])
    of_x, for_x = gradients([x])
    of_weights, for_weights = gradients(parameters[-1:] if layers > 1 else parameters)
    assert of_all == 2 * layers
    assert for_x == layers  # dgrads alone
    # The last layer's wgrad alone; a norm's parameters need its output's gradient.
    assert for_weights == (2 if kind == "LayerNormLinear" else 1)
    wanted = [every[0], *every[len(every) - len(of_weights) :]]
    torch.testing.assert_close((*of_x, *of_weights), wanted, rtol=0, atol=0)


def test_a_backward_for_the_input_leaves_main_grad_alone():
    layer = float8lab.Linear(64, 48, bias=False, fuse_wgrad_accumulation=True, device="cpu")
    layer.weight.main_grad = torch.zeros(48, 64)
    x = torch.randn(32, 64, requires_grad=True)
    with float8lab.autocast(recipe=RECIPES["block"]):
        y = layer(x * 1.0)
    torch.autograd.grad(y.sum(), [x], retain_graph=True)
    assert not layer.weight.main_grad.any()
    y.sum().backward()
    once = layer.weight.main_grad.clone()
    assert once.any()
    torch.autograd.grad(layer(x).sum(), [x])
    assert torch.equal(layer.weight.main_grad, once)


PLANS = {name: recipe.linear for name, recipe in RECIPES.items()}
HIGH = PLANS["current"]._replace(fprop=None, dgrad=None, wgrad=None)
BOTH, DX, DW, NONE = (True, True), (True, False), (False, True), (False, False)


@pytest.mark.parametrize(
    ("plan", "needs", "options", "x", "w", "weight"),
    [
        ("current", BOTH, "", "FP8_DATA", "FP8_DATA", False),
        ("current", DX, "", "NOTHING", "FP8_DATA", False),
        ("current", DW, "", "FP8_DATA", "NOTHING", False),
        ("current", NONE, "", "NOTHING", "NOTHING", False),
        ("current", BOTH, "requantizes_weight", "FP8_DATA", "REQUANTIZE", True),
        ("current", BOTH, "requantizes_x", "REQUANTIZE", "FP8_DATA", False),
        ("current", DX, "requantizes_x", "NOTHING", "FP8_DATA", False),
        ("current", BOTH, "requantizes_x keeps_gathered", "GATHERED", "FP8_DATA", False),
        ("block", BOTH, "requantizes_x", "HIGH_PRECISION", "FP8_DATA", False),
        ("high", BOTH, "requantizes_x", "HIGH_PRECISION", "NOTHING", True),
        ("current", BOTH, "is_prologue", "REQUANTIZE", "FP8_DATA", False),
        ("current", DX, "is_prologue", "NOTHING", "FP8_DATA", False),
        ("current", DX, "is_prologue recomputes", "REQUANTIZE", "FP8_DATA", False),
        ("current", NONE, "is_prologue recomputes", "REQUANTIZE", "FP8_DATA", False),
        ("current", BOTH, "keeps_gathered", "GATHERED", "FP8_DATA", False),
        ("current", DX, "keeps_gathered", "NOTHING", "FP8_DATA", False),
        ("delayed", BOTH, "is_prologue requantizes_weight", "REQUANTIZE", "REQUANTIZE", True),
        ("block", BOTH, "", "FP8_DATA", "FP8_DATA", False),
        ("block", BOTH, "is_prologue", "NOTHING", "FP8_DATA", False),
        ("block", BOTH, "gathers_before_cast", "HIGH_PRECISION", "FP8_DATA", False),
        ("block", DX, "gathers_before_cast", "NOTHING", "FP8_DATA", False),
        ("rowwise", BOTH, "", "FP8_DATA", "NOTHING", True),
        ("rowwise", BOTH, "requantizes_weight", "FP8_DATA", "NOTHING", True),
        ("mx", BOTH, "", "FP8_DATA", "NOTHING", True),
        ("high", BOTH, "", "HIGH_PRECISION", "NOTHING", True),
        ("high", DX, "", "NOTHING", "NOTHING", True),
        ("high", DW, "", "HIGH_PRECISION", "NOTHING", False),
        ("high", NONE, "is_prologue recomputes", "NOTHING", "NOTHING", True),
    ],
)
def test_save_policy(plan, needs, options, x, w, weight):
    """Which form of each operand is saved: by the plan, the gradients and who computes x."""
    options = dict.fromkeys(options.split(), True)
    policy = save_policy({**PLANS, "high": HIGH}[plan], needs, **{"is_prologue": False, **options})
    assert policy == SavePolicy(Keep[x], Keep[w], weight)


@pytest.mark.parametrize("is_prologue", [False, True])
@pytest.mark.parametrize("keeps_gathered", [False, True])
def test_fprop_keeps_what_it_gathers_for_wgrad(is_prologue, keeps_gathered):
    """Where copies overlap with the GEMM, fprop gives up what it gathered unless it is told."""
    flags = False, is_prologue, False, False, keeps_gathered, False
    _, casts, _ = _decide(RECIPES["current"], BOTH, *flags)
    assert casts.keeps_gathered is keeps_gathered
