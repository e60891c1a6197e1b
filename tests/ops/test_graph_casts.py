"""Casts in compiled graphs: what is kept for backward, and which of them are one op."""

import copy
import functools
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes import post_grad

import float8lab
from float8lab.ops import graph_casts
from float8lab.ops.declare import OPS
from tests.nn.composition import RECIPES

M, K, N = 64, 96, 160


class Mlp(nn.Module):
    """Gated; the inputs of its layers are a norm's, shared by two, and a product's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.gate, self.up = nn.Linear(K, N), nn.Linear(K, N)
        self.down = nn.Linear(N, K)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def run(function, model, x):
    """Output and gradients, and dtype and size of the tensors that autograd saves."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage().data_ptr()
        if storage not in parameters:
            saved[storage] = tensor.dtype, tensor.numel()
        return tensor

    model.zero_grad()
    x.grad = None
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = function(x)
    y.float().square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}, [*saved.values()]


def in_graphs(model, recipe, x):
    """The same of the graphs that Inductor would write code for, and the casts in these."""
    torch._dynamo.reset()
    float8lab.convert_to_float8(model, recipe)
    graphs = []

    def take(graph_module, inputs, **kwargs):
        post_grad.remove_noop_ops(graph_module.graph)
        post_grad.pass_patterns[0].apply(graph_module.graph)
        graph_module.recompile()
        graphs.append(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    backend = functools.partial(compile_fx, inner_compile=take)
    results = run(torch.compile(model, backend=backend, fullgraph=True), model, x)
    return *results, [[*filter(None, map(orientations, graph.nodes))] for graph in graphs]


def orientations(node):
    """Whether a cast gives the rowwise, and the columnwise operand; None of another node."""
    if not str(node.target).startswith(("float8lab.cast.pure", "float8lab.cast.delayed")):
        return None
    defaults = OPS.declared[node.target].arguments
    arguments = {**defaults, **dict(zip(defaults, node.args, strict=False))}
    return arguments["rowwise"], arguments["columnwise"]


def in_fp8(saved):
    return [n for dtype, n in saved if dtype.itemsize == 1 and n >= M * K]


def check_that_gradients_stay(results, others):
    """Exactly where the casts alone decide. What is fused otherwise has other roundings."""
    for name, result in results.items():
        if name[:4] in ("y", "gate", "down"):
            assert torch.equal(result, others[name]), name
        difference = (result - others[name]).float().norm()
        assert difference <= 0.03 * others[name].float().norm(), name


def data(device="cpu"):
    torch.manual_seed(0)
    model = Mlp().to(device, torch.bfloat16)
    return model, torch.randn(M, K).to(device, torch.bfloat16).requires_grad_()


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mx"])
def test_an_input_is_cast_in_backward_from_what_it_has_anyway(name):
    """No FP8 data are saved, and nothing in their place."""
    model, x = data()
    made = {
        save: in_graphs(copy.deepcopy(model), replace(RECIPES[name], save=save), x)
        for save in ("recompute", "auto", "fp8")
    }
    results, saved, (forward, backward) = made["recompute"]
    inputs = 3 if name == "delayed" else 2  # there each layer scales the input that two share
    assert in_fp8(saved) == []
    assert (True, True) not in forward
    of_inputs, of_weights = inputs, 3
    assert backward.count((False, True)) == of_inputs + of_weights
    for save in ("auto", "fp8"):  # these inputs are not large
        others, all_saved, (forward, backward) = made[save]
        assert len(in_fp8(all_saved)) == forward.count((True, True)) == inputs
        assert backward.count((False, True)) == of_weights
        large = [sum(n for _, n in each if n >= M * K) for each in (saved, all_saved)]
        assert large[0] == large[1] - sum(in_fp8(all_saved))
        assert all(torch.equal(results[key], others[key]) for key in results)


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_an_input_that_is_not_computed_is_cast_once_both_ways(name):
    """One op with one read, also where ``save`` asks for less: FP8 data are the least to keep."""
    _, x = data()
    model = nn.Linear(K, N).bfloat16()
    eager = float8lab.convert_to_float8(copy.deepcopy(model), RECIPES[name])
    expected, _ = run(eager, eager, x)
    made = in_graphs(model, replace(RECIPES[name], save="recompute"), x)
    results, saved, (forward, backward) = made
    assert len(in_fp8(saved)) == 1
    assert forward == [(True, True), (True, False)], "of x, and of the weight"
    assert len(backward) == 2, "of dy, and of the weight"
    assert all(torch.equal(results[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_with_the_code_of_inductor(name, device):
    model, x = data(device)
    made = {}
    for save in ("recompute", "fp8"):
        torch._dynamo.reset()
        twin = float8lab.convert_to_float8(copy.deepcopy(model), replace(RECIPES[name], save=save))
        made[save] = run(torch.compile(twin, fullgraph=True), twin, x)
    assert in_fp8(made["recompute"][1]) == []
    assert in_fp8(made["fp8"][1])
    check_that_gradients_stay(made["recompute"][0], made["fp8"][0])


def test_an_inductor_with_other_names_casts_as_the_graph_says():
    graph_casts._at_casts(lambda match: None)(ModuleType("torch._inductor.fx_passes.joint_graph"))
