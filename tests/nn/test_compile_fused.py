"""torch.compile of the fused and attention modules: no graph breaks, and results as in eager mode.

Outputs, gradients and, under delayed scaling, the state after every step equal those of eager mode
bit for bit. With Inductor, which orders float32 sums differently, they are close.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import recipes
from float8lab.nn.precision import precisions
from tests.nn.models import CountingBackend, states

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

HIDDEN, HEADS, S, B = 32, 2, 8, 2
DELAYED = {"amax_history_len": 3, "amax_compute_algo": "max"}
RECIPES = {
    "delayed": recipes.DelayedScaling(**DELAYED),
    "delayed-dpa": recipes.DelayedScaling(fp8_dpa=True, **DELAYED),
    "current": recipes.Float8CurrentScaling(),
}


class Attention(nn.Module):
    """Attention whose queries, keys and values come from one tensor."""

    def __init__(self):
        super().__init__()
        self.core = float8lab.DotProductAttention(HEADS, HIDDEN // HEADS)

    def forward(self, x):
        x = x.unflatten(-1, (HEADS, -1))
        return self.core(x, x.roll(1, 0), x * 2)


def mlp(**kwargs):
    return float8lab.LayerNormMLP(HIDDEN, 2 * HIDDEN, device="cpu", **kwargs)


MODULES = {
    "norm-linear": lambda: float8lab.LayerNormLinear(HIDDEN, HIDDEN, device="cpu"),
    "mlp": lambda: mlp(activation="swiglu", normalization="RMSNorm"),
    "mlp-checkpoint": lambda: mlp(checkpoint=True),
    "mlp-fp8-input": lambda: mlp(fp8_activation_input=True),
    "attention": Attention,
    "transformer": lambda: float8lab.TransformerLayer(
        HIDDEN, 2 * HIDDEN, HEADS, num_gqa_groups=1, hidden_dropout=0.0, attention_dropout=0.0,
        device="cpu",
    ),
}  # fmt: skip


class CalledTwice(nn.Module):
    """A linear layer and two calls of a module; the second call may be checkpointed."""

    def __init__(self, name, checkpoint_with=None):
        super().__init__()
        self.first = float8lab.Linear(HIDDEN, HIDDEN, device="cpu")
        self.inner = MODULES[name]()
        self.checkpoint_with = checkpoint_with

    def forward(self, x):
        x = self.first(x) + self.inner(x)
        if self.checkpoint_with == "torch":
            return checkpoint(self.inner, x, use_reentrant=False)
        if self.checkpoint_with == "float8lab":
            return float8lab.checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def steps(call, model, recipe, *, opens_regions=False):
    """The output, the gradients and the scaling state of each of four steps."""
    generator = torch.Generator().manual_seed(0)
    device = next(model.parameters()).device
    history = []
    for step in range(4):
        x, dy = torch.randn(2, S, B, HIDDEN, generator=generator).to(device)
        x = (x * (step + 1)).requires_grad_()
        model.zero_grad()
        with float8lab.autocast(enabled=not opens_regions, recipe=recipe):
            y = call(x)
        y.backward(dy)
        gradients = [p.grad.clone() for p in model.parameters()]
        history.append(([y.detach(), x.grad, *gradients], states(model)))
    return history


def check_same(actual, expected):
    for (actual_tensors, state), (expected_tensors, expected_state) in zip(
        actual, expected, strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(actual_tensors, expected_tensors, strict=True))
        assert state == expected_state


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        # A quick test below covers this module, with accumulated microbatches.
        pytest.param("norm-linear", "delayed", marks=pytest.mark.slow),
        pytest.param("mlp", "delayed", marks=pytest.mark.slow),  # the quick case has an FP8 input
        # A quick test below covers this module, with a second call that is checkpointed.
        pytest.param("mlp-checkpoint", "delayed", marks=pytest.mark.slow),
        ("mlp-fp8-input", "delayed"),
        ("attention", "delayed-dpa"),
        # A quick test in test_transformer.py covers FP8 attention under delayed scaling.
        pytest.param("transformer", "delayed-dpa", marks=pytest.mark.slow),
        ("mlp-fp8-input", "current"),
    ],
)
def test_compiled_steps_equal_eager(name, recipe, device):
    eager = CalledTwice(name).to(device)
    model = copy.deepcopy(eager)
    backend = CountingBackend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    actual = steps(compiled, model, RECIPES[recipe])
    check_same(actual, steps(eager, eager, RECIPES[recipe]))
    assert backend.graphs == 1
    state_changes = [state != before for (_, before), (_, state) in itertools.pairwise(actual)]
    assert all(state_changes) == any(state_changes) == recipe.startswith("delayed")


@pytest.mark.parametrize(
    ("name", "checkpoint_with"),
    [
        pytest.param(name, checkpoint_with, marks=[pytest.mark.slow] * (checkpoint_with != quick))
        for name, quick in (("mlp", None), ("mlp-checkpoint", "torch"), ("attention", "float8lab"))
        for checkpoint_with in ("torch", "float8lab")
    ],
)
def test_compiled_checkpoints_under_delayed_scaling_equal_eager(name, checkpoint_with):
    recipe = RECIPES["delayed-dpa"]
    eager = CalledTwice(name, checkpoint_with)
    model, plain = copy.deepcopy(eager), copy.deepcopy(eager)
    plain.checkpoint_with = None
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = steps(eager, eager, recipe)
    check_same(steps(compiled, model, recipe), expected)
    check_same(steps(plain, plain, recipe), expected)


def test_autocast_regions_inside_the_compiled_function_equal_eager():
    recipe = RECIPES["delayed"]
    eager = MODULES["mlp"]()
    model = copy.deepcopy(eager)

    def two_regions(module):
        def function(x):
            with float8lab.autocast(recipe=recipe):
                x = module(x)
            with float8lab.autocast(recipe=recipe):
                return module(x)

        return function

    compiled = torch.compile(two_regions(model), fullgraph=True, backend="aot_eager")
    expected = steps(two_regions(eager), eager, recipe, opens_regions=True)
    check_same(steps(compiled, model, recipe, opens_regions=True), expected)


def converted_mlp():
    layers = nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN)
    return float8lab.convert_to_float8(nn.Sequential(*layers), RECIPES["delayed"])


@pytest.mark.parametrize("make", [MODULES["norm-linear"], MODULES["mlp"], converted_mlp])
def test_accumulated_microbatches_outside_a_region_equal_eager(make):
    eager = make()
    for _, precision in precisions(eager):
        precision.recipe = RECIPES["delayed"]
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(2, S, B, HIDDEN, generator=generator)
        results = []
        for call in (compiled, eager):
            # Both forwards before both backwards: each backward has the scales of its forward.
            outputs = [call(part) for part in x]
            for y in outputs:
                y.square().sum().backward()
            results.append(outputs)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert states(model) == states(eager)
        assert states(model)


def test_calibration_under_compile_runs_in_eager_mode():
    eager = MODULES["mlp"]()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(S, B, HIDDEN)
    for call in (compiled, eager):
        with float8lab.autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
            call(x)
    assert states(model) == states(eager)
    assert states(model)
    check_same(steps(compiled, model, RECIPES["delayed"]), steps(eager, eager, RECIPES["delayed"]))


@pytest.mark.slow
def test_a_compiled_checkpointed_transformer_layer_equals_eager():
    recipe = RECIPES["delayed-dpa"]
    eager = CalledTwice("transformer", "torch")
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    check_same(steps(compiled, model, recipe), steps(eager, eager, recipe))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("name", ["norm-linear", "mlp", "mlp-checkpoint", "transformer"])
def test_inductor_nearly_equals_eager(name, recipe, device):
    eager = MODULES[name]().to(device)
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True)
    actual = steps(compiled, model, RECIPES[recipe])
    expected = steps(eager, eager, RECIPES[recipe])
    for (actual_tensors, _), (expected_tensors, _) in zip(actual, expected, strict=True):
        # The gradient of a key's bias, for example, is zero except for rounding. The tolerance for
        # such tensors follows from the largest of the other tensors.
        noise = 2.0**-20 * max(b.norm() for b in expected_tensors)
        for a, b in zip(actual_tensors, expected_tensors, strict=True):
            # A sum in another order may flip the rounding of a cast, and then the value moves by
            # one step of FP8, at most 2**-2 of the value. Few roundings flip, and nothing else may
            # differ.
            assert (a - b).norm() <= 2.0**-6 * b.norm() + noise
