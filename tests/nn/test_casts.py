"""Layers with the same input share its cast, and nothing else changes."""

import gc

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.formats import Float8Spec
from float8lab.nn import gemm
from float8lab.nn.casts import SHARED_CAST
from float8lab.recipes.recipe import GemmPlan, LinearPlan
from float8lab.recipes.region import in_backward
from tests.nn.models import UNDELAYED as RECIPES

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@pytest.fixture
def casts(monkeypatch):
    """The inputs of linear layers that are cast, one entry a cast."""
    cast_by = gemm.quantize
    made = []

    def watch(x, *args, **kwargs):
        if not (isinstance(x, nn.Parameter) or in_backward()):
            made.append(tuple(x.shape))
        return cast_by(x, *args, **kwargs)

    monkeypatch.setattr(gemm, "quantize", watch)
    monkeypatch.setattr(gemm, "_planned_fprop", gemm._fprop)  # a plan does not come to casts
    return made


def layers(recipe, device="cpu", count=3):
    torch.manual_seed(0)
    found = [nn.Linear(64, 48, device=device) for _ in range(count)]
    for layer in found:
        float8lab.convert_to_float8(layer, recipe)
    return found


def activation(device="cpu"):
    leaf = torch.randn(5, 7, 64, device=device, requires_grad=True)
    return leaf, leaf * 2


def run(found, x, leaf):
    inputs = x if isinstance(x, list) else [x] * len(found)
    sum(layer(x).square().sum() for layer, x in zip(found, inputs, strict=True)).backward()
    return [leaf.grad, *(p.grad for layer in found for p in layer.parameters())]


@each_recipe
def test_one_cast_serves_all_layers_with_the_same_input(recipe, casts, device):
    leaf, x = activation(device)
    shared = run(layers(recipe, device), x, leaf)
    assert casts == [(35, 64)]
    other = leaf.detach().clone().requires_grad_()
    alone = run(layers(recipe, device), [other * 2 for _ in range(3)], other)
    assert len(casts) == 4
    assert all(map(torch.equal, shared, alone))


def test_an_input_that_has_changed_is_cast_again(casts):
    first, second = layers(RECIPES["current"], count=2)
    _, x = activation()
    first(x)
    with torch.no_grad():
        x.mul_(3)
    y = second(x)
    assert len(casts) == 2
    assert torch.equal(y, second(x.detach().clone().requires_grad_() * 1))


def test_a_result_in_the_same_tensor_is_another(casts):
    (layer,) = layers(RECIPES["current"], count=1)
    buffer = torch.empty(4, 64)

    class Replay(torch.autograd.Function):
        """Writes its output where it was, as a CUDA graph does."""

        @staticmethod
        def forward(ctx, x):
            buffer.data.copy_(x)
            return buffer

        @staticmethod
        def backward(ctx, dy):
            return dy

    for step in range(2):
        leaf = torch.full((4, 64), step + 1.0, requires_grad=True)
        x = Replay.apply(leaf)
        assert x is buffer
        y = layer(x)
    assert len(casts) == 2
    assert torch.equal(y, layer(leaf * 1))


@pytest.mark.parametrize("why", ["delayed: a scale a layer", "a leaf", "other recipes"])
def test_what_is_cast_for_each_layer(why, casts):
    leaf, x = activation()
    found = layers(recipes.DelayedScaling() if "delayed" in why else RECIPES["current"])
    if why == "other recipes":
        float8lab.convert_to_float8(found[1], RECIPES["rowwise"])
    for layer in found:
        layer(leaf if why == "a leaf" else x)
    assert len(casts) == 3


def test_a_cast_goes_with_its_input():
    (layer,) = layers(RECIPES["current"], count=1)
    _, x = activation()
    layer(x)
    assert SHARED_CAST.last is not None
    del x
    gc.collect()
    assert SHARED_CAST.last is None


@pytest.mark.gpu
def test_another_stream_casts_anew(casts):
    first, second = layers(RECIPES["current"], "cuda", count=2)
    _, x = activation("cuda")
    first(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        second(x)
    torch.cuda.synchronize()
    assert len(casts) == 2


@pytest.mark.usefixtures("uncollected")
@pytest.mark.gpu
def test_a_cuda_graph_holds_its_casts(casts):
    first, second = layers(RECIPES["current"], "cuda", count=2)
    _, x = activation("cuda")
    for _ in range(2):
        first(x), second(x)
    del casts[:]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        first(x), second(x)
    assert len(casts) == 2


def test_an_operand_may_be_cast_unlike_its_transpose():
    """A recipe has a cast for each operand of each GEMM; none of ours makes use of it yet."""
    row, whole = Float8Spec(block=(1, -1)), Float8Spec()
    plan = LinearPlan(
        GemmPlan(row, row, True), GemmPlan(row, whole, False), GemmPlan(whole, whole, False),
        row, row, row, delayed=False, epsilon="0.0",
    )  # fmt: skip
    recipe = recipes.Float8RowwiseScaling(amax_epsilon=1e-6)  # a value that nobody else has
    object.__setattr__(recipe, "linear", plan)
    torch.manual_seed(0)
    x, w, dy = torch.randn(32, 48), torch.randn(16, 48), torch.randn(32, 16)

    def rounded(t, spec):
        return float8lab.quantize(t, spec.fp8_dtype, block=spec.block).dequantize()

    layer = float8lab.convert_to_float8(nn.Linear(48, 16, bias=False), recipe)
    layer.weight.data.copy_(w)
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    for got, left, right in (
        (y, rounded(x, row), rounded(w, row)),
        (leaf.grad, rounded(dy, row), rounded(w.t(), whole)),
        (layer.weight.grad, rounded(dy.t(), whole), rounded(x.t(), whole)),
    ):
        wanted = left.double() @ right.double().t()
        size = left.abs().double() @ right.abs().double().t()
        bound = 64 * torch.finfo(torch.float32).eps * size
        assert ((got - wanted).abs() <= bound).all()
