"""Eager layers do not save an input that they can recompute from tensors its producer saves."""

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
    """An RMSNorm as many models write it: the last op multiplies with the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """A decoder layer in which the input of every linear layer can be recomputed."""

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
    """The autograd nodes of all linear layers that ``y`` depends on."""
    nodes, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            waiting += [next_node for next_node, _ in node.next_functions]
    return [node for node in nodes if node.name() == "LinearFunctionBackward"]


def saved_in_fp8(y):
    saved = [t for node in nodes_of_layers(y) for t in node.saved_tensors if t is not None]
    return [t for t in saved if t.dtype == torch.float8_e4m3fn]


def train(model, recipe, save, x):
    """Two steps; returns the FP8 tensors that the second saves, its output and its gradients."""
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
def test_recomputed_inputs_give_the_gradients_of_saved_inputs(name, activation, device):
    model, x = data(activation, device=device)
    saved, results = train(model, RECIPES[name], "recompute", x)
    saved_as_fp8, expected = train(model, RECIPES[name], "fp8", x)
    assert saved == []
    assert len(saved_as_fp8) == (7 if activation == "swiglu" else 6)
    for result, expected_result in zip(results, expected, strict=True):
        torch.testing.assert_close(result, expected_result, rtol=0, atol=0)
    saved_by_auto, _ = train(model, RECIPES[name], "auto", x)
    assert len(saved_by_auto) == len(saved_as_fp8)


@pytest.mark.parametrize(("name", "casts"), [("delayed", 7), ("current", 4), ("block", 4)])
def test_layers_with_the_same_input_recompute_its_cast_once(name, casts, monkeypatch):
    """This holds also if a backward asks for some gradients only, and others ask for all."""
    calls = []
    cast = gemm.replayed_quantize
    monkeypatch.setattr(gemm, "replayed_quantize", lambda *a: (calls.append(a), cast(*a))[1])
    model, x = data("swiglu")
    recipe = replace(RECIPES[name], save="recompute")
    model = float8lab.convert_to_float8(model, recipe)
    model(x)
    y = model(x).float().square().sum()
    k_and_v_gradients = torch.autograd.grad(y, [model.k.weight, model.v.weight], retain_graph=True)
    for _ in range(2):
        calls.clear()
        gradients = torch.autograd.grad(y, [*model.parameters()], retain_graph=True)
        assert len(calls) == casts
    gradients = dict(zip(dict(model.named_parameters()), gradients, strict=True))
    assert torch.equal(k_and_v_gradients[0], gradients["k.weight"])
    assert torch.equal(k_and_v_gradients[1], gradients["v.weight"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
@pytest.mark.parametrize("width", [D, 4096])
def test_recomputed_torch_norms_have_the_bytes_of_the_forward(name, width):
    """The prologue of a cast recomputes the norm with the arithmetic of torch's kernel."""
    model = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, N)).to("cuda", torch.bfloat16)
    nn.init.normal_(model[0].weight)
    x = torch.randn(300, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    saved, results = train(model, RECIPES[name], "recompute", x)
    _, expected = train(model, RECIPES[name], "fp8", x)
    assert saved == []
    for result, expected_result in zip(results, expected, strict=True):
        torch.testing.assert_close(result, expected_result, rtol=0, atol=0)


def run_layer(a, b, change=None):
    """A converted layer, its output, and its input ``a * b``, which ``change`` may modify first."""
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
        return run_layer(a, b)


@pytest.mark.parametrize(
    "make",
    [
        lambda a, b: run_layer(a, b, double), offload, lambda a, b: run_layer(a.detach(), b),
        lambda a, b: run_layer(a, 2.0), lambda a, b: run_layer(nn.Parameter(a.detach()), b),
    ],
    ids=["input changed", "hooks", "one factor saved", "scalar", "large parameter"],
)  # fmt: skip
def test_fp8_data_is_saved_if_the_input_cannot_be_recomputed(make):
    layer, y, x = make(*factors())
    assert len(saved_in_fp8(y)) == 1
    (dw,) = torch.autograd.grad(y.sum(), layer.weight)
    repeated = layer(x.detach())
    assert torch.equal(dw, torch.autograd.grad(repeated.sum(), layer.weight)[0])


def test_backward_needs_no_tensors_that_the_producer_freed():
    """A backward through the producer frees its tensors, and FSDP2 frees a parameter."""
    a, _ = factors()
    weight = nn.Parameter(torch.randn(D))
    layer, y, x = run_layer(a, weight)
    assert saved_in_fp8(y) == []
    x.sum().backward()  # frees the factors that the product has saved
    expected = layer(x.detach())
    weight.untyped_storage().resize_(0)
    (dw,) = torch.autograd.grad(y.sum(), layer.weight)
    assert torch.equal(dw, torch.autograd.grad(expected.sum(), layer.weight)[0])
    repeated = layer(x)
    assert len(saved_in_fp8(repeated)) == 1, "the product has nothing any more"


def test_a_factor_modified_in_place_raises_in_backward():
    a, b = factors()
    layer, y, _ = run_layer(a, b)
    double(a)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), layer.weight)
