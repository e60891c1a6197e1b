"""Layers with the same input share one cast of it; results stay the same."""

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
    """The shapes of the inputs of linear layers that are cast, with one entry for each cast."""
    original_quantize = gemm.quantize
    shapes = []

    def recording_quantize(x, *args, **kwargs):
        if not (isinstance(x, nn.Parameter) or in_backward()):
            shapes.append(tuple(x.shape))
        return original_quantize(x, *args, **kwargs)

    monkeypatch.setattr(gemm, "quantize", recording_quantize)
    monkeypatch.setattr(gemm, "_planned_fprop", gemm._fprop)  # a plan skips quantize
    return shapes


def layers(recipe, device="cpu", count=3):
    torch.manual_seed(0)
    linears = [nn.Linear(64, 48, device=device) for _ in range(count)]
    for layer in linears:
        float8lab.convert_to_float8(layer, recipe)
    return linears


def activation(device="cpu"):
    leaf = torch.randn(5, 7, 64, device=device, requires_grad=True)
    return leaf, leaf * 2


def run(linears, x, leaf):
    inputs = x if isinstance(x, list) else [x] * len(linears)
    sum(layer(x).square().sum() for layer, x in zip(linears, inputs, strict=True)).backward()
    return [leaf.grad, *(p.grad for layer in linears for p in layer.parameters())]


@each_recipe
def test_one_cast_serves_all_layers_with_the_same_input(recipe, casts, device):
    leaf, x = activation(device)
    shared = run(layers(recipe, device), x, leaf)
    assert casts == [(35, 64)]
    second_leaf = leaf.detach().clone().requires_grad_()
    separate = run(layers(recipe, device), [second_leaf * 2 for _ in range(3)], second_leaf)
    assert len(casts) == 4
    assert all(map(torch.equal, shared, separate))


def test_an_input_that_was_modified_in_place_is_cast_a_second_time(casts):
    first, second = layers(RECIPES["current"], count=2)
    _, x = activation()
    first(x)
    with torch.no_grad():
        x.mul_(3)
    y = second(x)
    assert len(casts) == 2
    assert torch.equal(y, second(x.detach().clone().requires_grad_() * 1))


def test_a_new_result_in_the_same_tensor_is_cast_a_second_time(casts):
    (layer,) = layers(RECIPES["current"], count=1)
    buffer = torch.empty(4, 64)

    class Replay(torch.autograd.Function):
        """Writes every output to the same memory, as a CUDA graph does."""

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


@pytest.mark.parametrize("reason", ["delayed: a scale for each layer", "a leaf", "other recipes"])
def test_an_input_that_cannot_be_shared_is_cast_for_each_layer(reason, casts):
    leaf, x = activation()
    linears = layers(recipes.DelayedScaling() if "delayed" in reason else RECIPES["current"])
    if reason == "other recipes":
        float8lab.convert_to_float8(linears[1], RECIPES["rowwise"])
    for layer in linears:
        layer(leaf if reason == "a leaf" else x)
    assert len(casts) == 3


def test_a_shared_cast_is_freed_with_its_input():
    (layer,) = layers(RECIPES["current"], count=1)
    _, x = activation()
    layer(x)
    assert SHARED_CAST.last is not None
    del x
    gc.collect()
    assert SHARED_CAST.last is None


@pytest.mark.gpu
def test_another_cuda_stream_casts_the_input_a_second_time(casts):
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
def test_a_captured_cuda_graph_contains_its_own_casts(casts):
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


def test_an_operand_and_its_transpose_may_have_different_casts():
    """A recipe has a cast for each operand of each GEMM; no recipe of the package needs it yet."""
    rowwise, tensorwise = Float8Spec(block=(1, -1)), Float8Spec()
    plan = LinearPlan(
        GemmPlan(rowwise, rowwise, True), GemmPlan(rowwise, tensorwise, False),
        GemmPlan(tensorwise, tensorwise, False), rowwise, rowwise, rowwise, delayed=False,
        epsilon=0.0,
    )  # fmt: skip
    recipe = recipes.Float8RowwiseScaling(amax_epsilon=1e-6)  # a value that no other recipe has
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
    for actual, left, right in (
        (y, rounded(x, rowwise), rounded(w, rowwise)),
        (leaf.grad, rounded(dy, rowwise), rounded(w.t(), tensorwise)),
        (layer.weight.grad, rounded(dy.t(), tensorwise), rounded(x.t(), tensorwise)),
    ):
        expected = left.double() @ right.double().t()
        magnitude = left.abs().double() @ right.abs().double().t()
        bound = 64 * torch.finfo(torch.float32).eps * magnitude
        assert ((actual - expected).abs() <= bound).all()
