"""Casts in compiled graphs: the tensors saved for backward, and casts that share one op."""

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
from tests.pairwise import with_slow

M, K, N = 64, 96, 160


class Mlp(nn.Module):
    """A gated MLP: two layers share the output of a norm, the third has a product as input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(K)
        self.gate, self.up = nn.Linear(K, N), nn.Linear(K, N)
        self.down = nn.Linear(N, K)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def run(function, model, x):
    """The output and gradients, and the dtypes and sizes of the tensors that autograd saves."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def record(tensor):
        storage = tensor.untyped_storage().data_ptr()
        if storage not in parameters:
            saved[storage] = tensor.dtype, tensor.numel()
        return tensor

    model.zero_grad()
    x.grad = None
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        y = function(x)
    y.float().square().sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}, [*saved.values()]


def run_in_graphs(model, recipe, x):
    """The results of ``run`` for the graphs that Inductor gets, and the casts in these graphs."""
    torch._dynamo.reset()
    float8lab.convert_to_float8(model, recipe)
    graphs = []

    def collect_graph(graph_module, inputs, **kwargs):
        post_grad.remove_noop_ops(graph_module.graph)
        post_grad.pass_patterns[0].apply(graph_module.graph)
        graph_module.recompile()
        graphs.append(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    backend = functools.partial(compile_fx, inner_compile=collect_graph)
    results = run(torch.compile(model, backend=backend, fullgraph=True), model, x)
    return *results, [[*filter(None, map(orientations, graph.nodes))] for graph in graphs]


def orientations(node):
    """Whether a cast returns the rowwise and the columnwise operand; None for other nodes."""
    if not str(node.target).startswith(("float8lab.cast.pure", "float8lab.cast.delayed")):
        return None
    defaults = OPS.declared[node.target].arguments
    arguments = {**defaults, **dict(zip(defaults, node.args, strict=False))}
    orientations = arguments["rowwise"], arguments["columnwise"]
    is_batch = node.args[1][0].meta["val"].ndim == 3
    return (*orientations, len(node.args[1][0].meta["val"])) if is_batch else orientations


def fp8_sizes(saved):
    return [n for dtype, n in saved if dtype.itemsize == 1 and n >= M * K]


def assert_gradients_agree(results, expected):
    """Asserts equal results where only casts matter, and close ones where fusion changes them."""
    for name, result in results.items():
        if name[:4] in ("y", "gate", "down"):
            assert torch.equal(result, expected[name]), name
        difference = (result - expected[name]).float().norm()
        assert difference <= 0.03 * expected[name].float().norm(), name


def data(device="cpu"):
    torch.manual_seed(0)
    model = Mlp().to(device, torch.bfloat16)
    return model, torch.randn(M, K).to(device, torch.bfloat16).requires_grad_()


@functools.cache
def run_of_mlp(name, save, most, device):
    """``run_in_graphs`` of the MLP, with weights of up to ``most`` elements cast in batches."""
    model, x = data(device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_casts, "_SMALL", most)
        return run_in_graphs(model, replace(RECIPES[name], save=save), x)


@with_slow({"delayed", "current", "block"}, "delayed", "current", "rowwise", "block", "mx")
def test_save_recompute_casts_inputs_in_backward_from_tensors_saved_anyway(name):
    """Nothing is saved: neither the FP8 data of the inputs nor other tensors in their place."""
    saves = ("auto", "fp8") if name == "current" else ("auto",)  # these inputs are not large
    results, saved, (forward, backward) = run_of_mlp(name, "recompute", 0, "cpu")
    inputs = 3 if name == "delayed" else 2  # under it, each layer has a scale for the shared input
    assert fp8_sizes(saved) == []
    assert (True, True) not in forward
    input_casts, weight_casts = inputs, 3
    assert backward.count((False, True)) == input_casts + weight_casts
    for save in saves:
        expected, all_saved, (forward, backward) = run_of_mlp(name, save, 0, "cpu")
        assert len(fp8_sizes(all_saved)) == forward.count((True, True)) == inputs
        assert backward.count((False, True)) == weight_casts
        large = [sum(n for _, n in tensors if n >= M * K) for tensors in (saved, all_saved)]
        assert large[0] == large[1] - sum(fp8_sizes(all_saved))
        assert all(torch.equal(results[key], expected[key]) for key in results)


@with_slow({"delayed", "current"}, "delayed", "current", "rowwise", "block")
def test_an_input_of_the_graph_is_cast_once_in_both_orientations(name):
    """One op reads the input once, even if ``save`` asks for less: FP8 data need least memory."""
    _, x = data()
    model = nn.Linear(K, N).bfloat16()
    eager = float8lab.convert_to_float8(copy.deepcopy(model), RECIPES[name])
    expected, _ = run(eager, eager, x)
    graph_run = run_in_graphs(model, replace(RECIPES[name], save="recompute"), x)
    results, saved, (forward, backward) = graph_run
    assert len(fp8_sizes(saved)) == 1
    assert forward == [(True, True), (True, False)], "of x, and of the weight"
    assert len(backward) == 2, "of dy, and of the weight"
    assert all(torch.equal(results[key], expected[key]) for key in expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_code_of_inductor_saves_no_fp8_data_under_save_recompute(name, device):
    model, x = data(device)
    runs = {}
    for save in ("recompute", "fp8"):
        torch._dynamo.reset()
        twin = float8lab.convert_to_float8(copy.deepcopy(model), replace(RECIPES[name], save=save))
        runs[save] = run(torch.compile(twin, fullgraph=True), twin, x)
    assert fp8_sizes(runs["recompute"][1]) == []
    assert fp8_sizes(runs["fp8"][1])
    assert_gradients_agree(runs["recompute"][0], runs["fp8"][0])


@with_slow({"delayed", "current", "block"}, "current", "rowwise", "block", "mx", "delayed")
def test_small_weights_of_the_same_shape_are_cast_as_a_batch(name, device):
    """The batch has the bytes of separate casts; casts that it cannot do stay as they are."""
    expected, saved, separate = run_of_mlp(name, "auto", 0, str(device))
    results, saved_with_batch, graphs = run_of_mlp(name, "auto", K * N, str(device))
    if name == "current":
        *_, unchanged = run_of_mlp(name, "auto", K * N - 1, str(device))
        assert unchanged == separate
    assert all(torch.equal(results[key], expected[key]) for key in expected)
    assert fp8_sizes(saved_with_batch) == fp8_sizes(saved)
    in_forward = name in ("current", "rowwise", "block")
    in_backward = in_forward or name == "delayed"  # whose factors are known there
    steps = zip(
        graphs, separate, ((True, False), (False, True)), (in_forward, in_backward), strict=True
    )
    for casts, alone, orientation, as_batch in steps:
        assert casts.count((*orientation, 2)) == as_batch, "gate and up"
        assert casts.count(orientation) == alone.count(orientation) - 2 * as_batch


def test_an_inductor_with_other_names_leaves_the_casts_of_graphs_unchanged():
    graph_casts._at_casts(lambda match: None)(ModuleType("torch._inductor.fx_passes.joint_graph"))
