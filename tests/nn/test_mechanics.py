"""FP8 layers in training loops: checkpointing, anomaly mode, hooks, shared weights, devices."""

import contextlib
import copy
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import float8lab
from tests.nn.models import each_recipe, same_gradients


def make_model(recipe):
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    float8lab.convert_to_float8(model, recipe)
    return model


def step(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss.detach()


SAVED_OPS = {
    "gemms": lambda name: name in ("float8lab::scaled_mm", "aten::addmm"),
    "casts": lambda name: name.startswith("float8lab") and "mm" not in name,
    # Such ops also compute the first scales in a forward, but not in a recompute.
    "torch's": lambda name: name.startswith("aten") and "mm" not in name,
}


class _ElementwiseOps(nn.Module):
    def forward(self, x):
        stacked = torch.stack((x, x.clone().square()))
        return torch.where(stacked > 0.5, stacked.sin(), stacked.cos()).square().sum(0)


@each_recipe
@pytest.mark.parametrize("is_saved", SAVED_OPS.values(), ids=SAVED_OPS)
def test_selective_checkpointing_changes_no_gradient_or_state(recipe, is_saved):
    def policy(ctx, op, *args, **kwargs):
        return Policy.MUST_SAVE if is_saved(op.name()) else Policy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model = nn.Sequential(make_model(recipe), _ElementwiseOps())
    selective = copy.deepcopy(model)
    for x in torch.randn(3, 8, 32):
        x.requires_grad_()
        step(model, x)
        y = checkpoint(selective, x, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
        assert same_gradients(model, selective)
    state, selective_state = (float8lab.nn.ScalingState(m).state_dict() for m in (model, selective))
    assert all(torch.equal(state[key], selective_state[key]) for key in state)


@each_recipe
def test_a_checkpoint_saves_the_same_tensors_with_and_without_a_dispatch_mode(recipe):
    """Its backward, which no mode sees, raises if the recompute saves other tensors."""
    model = nn.Sequential(float8lab.RMSNorm(32, device="cpu"), make_model(recipe))
    model.append(float8lab.LayerNormLinear(32, 32, normalization="RMSNorm", device="cpu"))
    counted, gradients = copy.deepcopy(model), []
    for layers, mode in ((model, contextlib.nullcontext()), (counted, float8lab.count_gemms())):
        x = torch.linspace(-1, 1, 256).view(8, 32).requires_grad_()
        with mode, float8lab.autocast(recipe=recipe):
            y = checkpoint(layers, x, use_reentrant=False)
        y.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    assert same_gradients(model, counted)


@each_recipe
def test_anomaly_mode_changes_no_gradient(recipe):
    model = make_model(recipe)
    watched = copy.deepcopy(model)
    x = torch.randn(8, 32)
    step(model, x)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        step(watched, x)
    assert same_gradients(model, watched)


@each_recipe
def test_a_weight_shared_by_two_layers_accumulates_both_gradients(recipe):
    first, second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    second.weight = first.weight
    model = float8lab.convert_to_float8(nn.Sequential(first, second), recipe)
    untied = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    for layer in untied:
        layer.load_state_dict(first.state_dict())
    float8lab.convert_to_float8(untied, recipe)
    x = torch.randn(8, 32)
    assert torch.equal(step(model, x), step(untied, x))
    assert torch.equal(first.weight.grad, untied[0].weight.grad + untied[1].weight.grad)


@each_recipe
def test_a_second_backward_through_a_retained_graph_doubles_the_gradient(recipe):
    model = make_model(recipe)
    loss = model(torch.randn(8, 32)).square().sum()
    loss.backward(retain_graph=True)
    first_gradient = model[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(
        model[0].weight.grad, 2 * first_gradient, rtol=0.2, atol=0.2 * first_gradient.abs().max()
    )
    if recipe.linear.delayed:
        model(torch.randn(8, 32))
        assert model[0]._fp8.slots[recipe, None].tensors()["steps"].tolist() == [2, 2, 1]


@each_recipe
def test_an_in_place_change_of_a_saved_weight_raises(recipe):
    model = make_model(recipe)
    loss = model(torch.randn(8, 32, requires_grad=True)).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_recipe
def test_hooks_of_modules_and_parameters_are_called(recipe):
    model = make_model(recipe)
    hook_calls = []
    model[0].register_forward_pre_hook(lambda m, a: hook_calls.append("pre"))
    model[0].register_full_backward_hook(lambda m, i, o: hook_calls.append("backward"))
    model[0].weight.register_hook(lambda g: hook_calls.append("weight"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: hook_calls.append("accumulated"))
    step(model, torch.randn(8, 32, requires_grad=True))
    assert hook_calls[0] == "pre"
    assert set(hook_calls) == {"pre", "backward", "weight", "accumulated"}


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(x).relu())


@each_recipe
def test_the_default_device_of_torch_changes_no_result(recipe):
    experts = nn.ModuleList(Expert() for _ in range(2))
    x, expected, actual = torch.randn(6, 16), [], []
    for results, device in ((expected, "cpu"), (actual, "meta")):
        with torch.device(device), float8lab.autocast(recipe=recipe):
            mlp = float8lab.ExpertMLP.from_experts(experts, ("up", "down"), "relu")
            y = mlp.run_rows(x.requires_grad_(), [2, 4])
            histogram = float8lab.inspect.histogram(float8lab.quantize(x.detach()))
        results += [y, *torch.autograd.grad(y.sum(), x), histogram.counts]
    assert all(map(torch.equal, actual, expected))
