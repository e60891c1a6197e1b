"""What training loops do around a layer: accumulation, anomaly mode, hooks, shared weights."""

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


KEPT = {
    "products": lambda name: name in ("float8lab::scaled_mm", "aten::addmm"),
    "casts": lambda name: name.startswith("float8lab") and "mm" not in name,
    # A call makes first scales by such ops, too, which a recomputation does not.
    "torch's": lambda name: name.startswith("aten") and "mm" not in name,
}


class _Chosen(nn.Module):
    def forward(self, x):
        stacked = torch.stack((x, x.clone().square()))
        return torch.where(stacked > 0.5, stacked.sin(), stacked.cos()).square().sum(0)


@each_recipe
@pytest.mark.parametrize("is_kept", KEPT.values(), ids=KEPT)
def test_selective_checkpointing_changes_nothing(recipe, is_kept):
    def policy(ctx, op, *args, **kwargs):
        return Policy.MUST_SAVE if is_kept(op.name()) else Policy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    model = nn.Sequential(make_model(recipe), _Chosen())
    selective = copy.deepcopy(model)
    for x in torch.randn(3, 8, 32):
        x.requires_grad_()
        step(model, x)
        y = checkpoint(selective, x, use_reentrant=False, context_fn=contexts)
        y.square().sum().backward()
        assert same_gradients(model, selective)
    state, other = (float8lab.nn.ScalingState(m).state_dict() for m in (model, selective))
    assert all(torch.equal(state[key], other[key]) for key in state)


@each_recipe
def test_a_checkpoint_saves_the_same_whether_a_mode_sees_it(recipe):
    model = nn.Sequential(float8lab.RMSNorm(32, device="cpu"), make_model(recipe))
    model.append(float8lab.LayerNormLinear(32, 32, normalization="RMSNorm", device="cpu"))
    x = torch.randn(8, 32, requires_grad=True)
    with float8lab.count_gemms(), float8lab.autocast(recipe=recipe):
        y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None


@each_recipe
def test_anomaly_mode_changes_nothing(recipe):
    model = make_model(recipe)
    watched = copy.deepcopy(model)
    x = torch.randn(8, 32)
    step(model, x)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        step(watched, x)
    assert same_gradients(model, watched)


@each_recipe
def test_a_weight_shared_by_two_layers(recipe):
    first, second = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    second.weight = first.weight
    model = float8lab.convert_to_float8(nn.Sequential(first, second), recipe)
    apart = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    for layer in apart:
        layer.load_state_dict(first.state_dict())
    float8lab.convert_to_float8(apart, recipe)
    x = torch.randn(8, 32)
    assert torch.equal(step(model, x), step(apart, x))
    assert torch.equal(first.weight.grad, apart[0].weight.grad + apart[1].weight.grad)


@each_recipe
def test_backward_twice_through_a_kept_graph(recipe):
    model = make_model(recipe)
    loss = model(torch.randn(8, 32)).square().sum()
    loss.backward(retain_graph=True)
    once = model[0].weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(
        model[0].weight.grad, 2 * once, rtol=0.2, atol=0.2 * once.abs().max()
    )
    if recipe.linear.delayed:
        model(torch.randn(8, 32))
        assert model[0]._fp8.slots[recipe, None].tensors()["steps"].tolist() == [2, 2, 1]


@each_recipe
def test_an_in_place_change_of_a_saved_weight_is_an_error(recipe):
    model = make_model(recipe)
    loss = model(torch.randn(8, 32, requires_grad=True)).square().sum()
    with torch.no_grad():
        model[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_recipe
def test_hooks_on_tensors_modules_and_gradients(recipe):
    model = make_model(recipe)
    seen = []
    model[0].register_forward_pre_hook(lambda m, a: seen.append("pre"))
    model[0].register_full_backward_hook(lambda m, i, o: seen.append("backward"))
    model[0].weight.register_hook(lambda g: seen.append("weight"))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    step(model, torch.randn(8, 32, requires_grad=True))
    assert seen[0] == "pre"
    assert set(seen) == {"pre", "backward", "weight", "accumulated"}


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return self.down(self.up(x).relu())


@each_recipe
def test_another_default_device_changes_nothing(recipe):
    experts = nn.ModuleList(Expert() for _ in range(2))
    x, want, got = torch.randn(6, 16), [], []
    for results, device in ((want, "cpu"), (got, "meta")):
        with torch.device(device), float8lab.autocast(recipe=recipe):
            mlp = float8lab.ExpertMLP.from_experts(experts, ("up", "down"), "relu")
            y = mlp.run_rows(x.requires_grad_(), [2, 4])
            codes = float8lab.inspect.histogram(float8lab.quantize(x.detach()))
        results += [y, *torch.autograd.grad(y.sum(), x), codes.counts]
    assert all(map(torch.equal, got, want))
