"""Inputs that eager layers do not save, because their producers save what gives them."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu

import float8lab
from float8lab.nn import gemm
from tests.nn.composition import RECIPES

T, D, N = 40, 64, 96


class RmsNorm(nn.Module):
    """As many models write it: the last op is a product with the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A decoder layer, every linear input of which has an origin."""

    def __init__(self, activation, norm=RmsNorm) -> None:
        super().__init__()
        self.norms, self.activation = nn.ModuleList([norm(), norm()]), activation
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(D, N), nn.Linear(D, N), nn.Linear(N, D)

    def forward(self, x):
        B, T, D = x.shape
        h = self.norms[0](x)
        q, k, v = (f(h).view(B, T, 4, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        h = self.norms[1](x)
        if self.activation == "swiglu":
            h = F.silu(self.gate(h)) * self.up(h)
        elif self.activation == "relu":
            h = self.gate(h).relu_()
        else:
            h = F.gelu(self.gate(h), approximate=self.activation)
        return x + self.down(h)


def nodes_of_layers(y):
    """Autograd's nodes of all linear layers behind ``y``."""
    nodes, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [following for following, _ in node.next_functions]
    return [node for node in nodes if node.name() == "LinearFunctionBackward"]


def saved_in_fp8(y):
    saved = [t for node in nodes_of_layers(y) for t in node.saved_tensors if t is not None]
    return [t for t in saved if t.dtype == torch.float8_e4m3fn]


def train(model, recipe, save, x):
    """Two steps; what is saved in FP8, the output and the gradients of the second."""
    model = float8lab.convert_to_float8(copy.deepcopy(model), replace(recipe, save=save))
    for _ in range(2):
        model.zero_grad()
        x.grad = None
        y = model(x)
        saved = saved_in_fp8(y)
        y.float().square().sum().backward()
    return saved, [y.detach(), x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


def data(*arguments, device="cpu"):
    torch.manual_seed(0)
    model = Block(*arguments).to(device, torch.bfloat16)
    return model, torch.randn(2, T, D).to(device, torch.bfloat16).requires_grad_()


@pytest.mark.parametrize(
    ("name", "activation"),
    [(name, "swiglu") for name in ("delayed", "current", "rowwise", "block", "mx")]
    + [("current", activation) for activation in ("relu", "none", "tanh")],
)
def test_gradients_are_those_of_saved_data(name, activation, device):
    model, x = data(activation, device=device)
    saved, results = train(model, RECIPES[name], "recompute", x)
    all_saved, expected = train(model, RECIPES[name], "fp8", x)
    assert saved == []
    assert len(all_saved) == (7 if activation == "swiglu" else 6)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0)
    small, _ = train(model, RECIPES[name], "auto", x)
    assert len(small) == len(all_saved)


@pytest.mark.parametrize(("name", "casts"), [("delayed", 7), ("current", 4), ("block", 4)])
def test_layers_with_one_input_cast_it_once(name, casts, monkeypatch):
    """Also where a backward asks for some of their gradients alone, and for all again."""
    made = []
    cast = gemm.replayed_quantize
    monkeypatch.setattr(gemm, "replayed_quantize", lambda *of: (made.append(of), cast(*of))[1])
    model, x = data("swiglu")
    recipe = replace(RECIPES[name], save="recompute")
    model = float8lab.convert_to_float8(model, recipe)
    model(x)
    y = model(x).float().square().sum()
    some = torch.autograd.grad(y, [model.k.weight, model.v.weight], retain_graph=True)
    for _ in range(2):
        made.clear()
        every = torch.autograd.grad(y, [*model.parameters()], retain_graph=True)
        assert len(made) == casts
    every = dict(zip(dict(model.named_parameters()), every, strict=True))
    assert torch.equal(some[0], every["k.weight"])
    assert torch.equal(some[1], every["v.weight"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
@pytest.mark.parametrize("width", [D, 4096])
def test_torch_norms_are_computed_as_they_were(name, width):
    """By the prologue of casts, whose arithmetic is that of torch's kernel."""
    model = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, N)).to("cuda", torch.bfloat16)
    nn.init.normal_(model[0].weight)
    x = torch.randn(300, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    saved, results = train(model, RECIPES[name], "recompute", x)
    _, expected = train(model, RECIPES[name], "fp8", x)
    assert saved == []
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=0, atol=0)


def product(a, b, change=None):
    """A converted layer, and its output of ``a * b`` that something changes before."""
    torch.manual_seed(0)
    layer = float8lab.convert_to_float8(
        nn.Linear(D, N, bias=False), replace(RECIPES["current"], save="recompute")
    )
    x = a * b
    if change is not None:
        change(x)
    return layer, layer(x), x


def factors():
    torch.manual_seed(1)
    a, b = (torch.randn(T, D, requires_grad=True) for _ in range(2))
    return a.sin(), b.sin()


@torch.no_grad()
def double(x):
    x.mul_(2)


def offload(a, b):
    with save_on_cpu():
        return product(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: product(a, b, double), offload, lambda a, b: product(a.detach(), b),
        lambda a, b: product(a, 2.0), lambda a, b: product(nn.Parameter(a.detach()), b),
    ],
    ids=["changed since", "hooks", "one factor saved", "scalar", "large parameter"],
)  # fmt: skip
def test_fp8_data_are_saved_where_the_origin_is_not_sure(make):
    layer, y, x = make(*factors())
    assert len(saved_in_fp8(y)) == 1
    (dw,) = torch.autograd.grad(y.sum(), layer.weight)
    again = layer(x.detach())
    assert torch.equal(dw, torch.autograd.grad(again.sum(), layer.weight)[0])


def test_what_was_freed_since_is_not_needed():
    """A backward through the producer alone, and a parameter that FSDP2 takes away."""
    a, _ = factors()
    weight = nn.Parameter(torch.randn(D))
    layer, y, x = product(a, weight)
    assert saved_in_fp8(y) == []
    x.sum().backward()  # frees the factors that the product has saved
    expected = layer(x.detach())
    weight.untyped_storage().resize_(0)
    (dw,) = torch.autograd.grad(y.sum(), layer.weight)
    assert torch.equal(dw, torch.autograd.grad(expected.sum(), layer.weight)[0])
    later = layer(x)
    assert len(saved_in_fp8(later)) == 1, "the product has nothing any more"


def test_a_changed_factor_is_an_error():
    a, b = factors()
    layer, y, _ = product(a, b)
    double(a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), layer.weight)
