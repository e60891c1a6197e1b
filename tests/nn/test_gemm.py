"""A linear layer records a plan of its GEMMs and repeats it; the results have the same bytes."""

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
"""The recipes that plans repeat; casts to 4 bits run the reference, which no plan repeats."""


def _steps(module: nn.Module, inputs: list[Tensor], recipe: recipes.Recipe) -> list[Tensor]:
    """Outputs and gradients of a step for each input; growing inputs would reveal a stale scale."""
    results = []
    for x in inputs:
        leaf = x.clone().requires_grad_()
        with float8lab.autocast(recipe=recipe):
            y = module(leaf)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *module.parameters()])
        results += [y.detach(), *grads]
    with torch.no_grad(), float8lab.autocast(recipe=recipe):
        results.append(module(inputs[0]))
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Linear", "stored", "LayerNormMLP", "LayerNormLinear"])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_repeated_plan_gives_the_bytes_of_the_functions(recipe, shape, kind, monkeypatch):
    launching = pytest.importorskip("float8lab.ops.kernels._launch")
    M, K, N = shape
    inputs = [torch.randn(M, K, device="cuda", dtype=torch.bfloat16) * 2**i for i in range(5)]

    def build() -> nn.Module:
        torch.manual_seed(1)
        bfloat16 = {"params_dtype": torch.bfloat16, "device": "cuda"}
        if kind == "LayerNormMLP":
            return float8lab.LayerNormMLP(K, N, activation="swiglu", **bfloat16)
        if kind == "LayerNormLinear":
            return float8lab.LayerNormLinear(K, N, **bfloat16)
        with float8lab.fp8_model_init(enabled=kind == "stored", recipe=recipe):
            return float8lab.Linear(K, N, **bfloat16)

    repeated = _steps(build(), inputs, recipe)
    monkeypatch.setattr(launching, "ENABLED", False)
    expected = _steps(build(), inputs, recipe)
    torch.testing.assert_close(repeated, expected, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_steady_steps_of_a_linear_layer_repeat_a_plan(recipe, monkeypatch):
    """After three calls with and without gradients no call runs the functions that decide."""
    layer = float8lab.Linear(128, 128, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        _steps(layer, [x], recipe)
    gemm = pytest.importorskip("float8lab.ops.kernels.gemm")
    decisions = []
    monkeypatch.setattr(gemm, "may_multiply", lambda *args, **kwargs: decisions.append(1))
    _steps(layer, [x], recipe)
    assert not decisions


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", WITH_KERNELS.values(), ids=WITH_KERNELS)
def test_a_plan_has_no_higher_memory_peak_than_its_functions(recipe, monkeypatch):
    """The cast for dgrad and the transposed weight are freed before the weight gradient exists."""
    launching = pytest.importorskip("float8lab.ops.kernels._launch")
    M, K, N = 2048, 2048, 2048
    layer = float8lab.Linear(K, N, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(M, K, device="cuda", dtype=torch.bfloat16)

    def peak() -> int:
        # Backward runs on this thread: another thread of autograd might still hold gradients when
        # ``before`` is measured.
        with torch.autograd.set_multithreading_enabled(False):
            _steps(layer, [x] * 2, recipe)
            # Reference cycles of earlier tests must not be freed during the measurement.
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            _steps(layer, [x], recipe)
            return torch.cuda.max_memory_allocated() - before

    repeated = peak()
    monkeypatch.setattr(launching, "ENABLED", False)
    assert repeated - peak() < M * N, "not so much more as an operand in FP8 takes"


def _module_arguments_layers(kind: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    """A module, its arguments besides the input, and the number of its linear layers."""
    torch.manual_seed(1)
    if kind == "Linear":
        return float8lab.Linear(64, 48, bias=False, device="cpu"), (), 1
    if kind == "LayerNormLinear":
        return float8lab.LayerNormLinear(64, 48, bias=False, device="cpu"), (), 1
    if kind == "LayerNormMLP":
        mlp = float8lab.LayerNormMLP(64, 48, bias=False, activation="swiglu", device="cpu")
        return mlp, (), 2
    if kind.startswith("GroupedLinear"):
        single = kind.endswith("single weight")
        layer = float8lab.GroupedLinear(
            2, 64, 48, bias=False, device="cpu", single_grouped_weight=single
        )
        return layer, (torch.tensor([20, 12]),), 1
    experts = float8lab.ExpertMLP(2, 64, 48, device="cpu")
    index = torch.arange(32)[:, None] % 2
    return experts, (torch.rand(32, 1), index), 2


@pytest.mark.parametrize("recipe", [RECIPES["delayed"], RECIPES["block"]], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        "Linear",
        "LayerNormLinear",
        "LayerNormMLP",
        "GroupedLinear",
        "GroupedLinear, single weight",
        "ExpertMLP",
    ],
)
def test_backward_runs_only_the_gemms_of_the_requested_gradients(kind, recipe):
    """``torch.autograd.grad`` and pipelines ask for the gradients of inputs or parameters only."""
    module, arguments, layers = _module_arguments_layers(kind)
    x, parameters = torch.randn(32, 64, requires_grad=True), list(module.parameters())
    with float8lab.autocast(recipe=recipe), float8lab.count_gemms() as forward:
        y = module(x * 1.0, *arguments)
    forward_gemms = forward.fp8 + forward.high_precision
    dy = torch.randn_like(y)

    def gradients(tensors: list[Tensor]) -> tuple[tuple[Tensor, ...], float]:
        """The gradients and the number of GEMMs in units of a layer's forward GEMM."""
        with float8lab.count_gemms() as counts:
            gradients_found = torch.autograd.grad(y, tensors, dy, retain_graph=True)
        return gradients_found, (counts.fp8 + counts.high_precision) * layers / forward_gemms

    all_gradients, gemms_for_all = gradients([x, *parameters])
    x_gradient, gemms_for_x = gradients([x])
    weight_gradients, gemms_for_weights = gradients(parameters[-1:] if layers > 1 else parameters)
    assert gemms_for_all == 2 * layers
    assert gemms_for_x == layers  # only dgrads
    # Only the wgrad of the last layer; the parameters of a norm also need its output's gradient.
    assert gemms_for_weights == (2 if kind == "LayerNormLinear" else 1)
    expected = [all_gradients[0], *all_gradients[len(all_gradients) - len(weight_gradients) :]]
    torch.testing.assert_close((*x_gradient, *weight_gradients), expected, rtol=0, atol=0)


def test_backward_for_the_input_only_leaves_main_grad_unchanged():
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
def test_save_policy_chooses_the_saved_form_of_each_operand(plan, needs, options, x, w, weight):
    """The plan, the needed gradients and the source of x decide which form of x and w is saved."""
    options = dict.fromkeys(options.split(), True)
    policy = save_policy({**PLANS, "high": HIGH}[plan], needs, **{"is_prologue": False, **options})
    assert policy == SavePolicy(Keep[x], Keep[w], weight)


@pytest.mark.parametrize("is_prologue", [False, True])
@pytest.mark.parametrize("keeps_gathered", [False, True])
def test_fprop_keeps_the_gathered_input_for_wgrad_only_if_told(is_prologue, keeps_gathered):
    """Where copies overlap with the GEMM, fprop frees the gathered input unless told to keep it."""
    flags = False, is_prologue, False, False, keeps_gathered, False, False
    _, casts, _ = _decide(RECIPES["current"].number, BOTH, *flags)
    assert casts.keeps_gathered is keeps_gathered
