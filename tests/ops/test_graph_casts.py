"""Casts in compiled graphs: what is kept for backward, and which of them are one op."""

import copy
import re
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code

import float8lab
from float8lab.ops import graph_casts
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


def compiled(model, recipe, x):
    """Output and gradients, the storages that autograd saves, and the code of both graphs."""
    torch._dynamo.reset()
    float8lab.convert_to_float8(model, recipe)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def note(tensor):
        storage = tensor.untyped_storage().data_ptr()
        if storage not in parameters:
            saved[storage] = tensor.dtype, tensor.numel()
        return tensor

    def run():
        x.grad = None
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = function(x)
        y.float().square().sum().backward()
        return y

    with fresh_cache():
        function = torch.compile(model, fullgraph=True)
        y, codes = run_and_get_code(run)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())], saved, codes


def in_fp8(saved):
    return [n for dtype, n in saved.values() if dtype.itemsize == 1 and n >= M * K]


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mx"])
def test_an_input_is_cast_again_from_what_backward_has_anyway(name, device):
    """No FP8 data are saved; without a choice by size they are. The gradients are the same."""
    torch.manual_seed(0)
    model = Mlp().to(device, torch.bfloat16)
    x = torch.randn(M, K).to(device, torch.bfloat16).requires_grad_()
    results, saved, codes = zip(
        *(
            compiled(copy.deepcopy(model), replace(RECIPES[name], save=save), x)
            for save in ("recompute", "auto", "fp8")
        ),
        strict=True,
    )
    assert in_fp8(saved[0]) == []
    inputs = 3 if name == "delayed" else 2  # each layer scales the input that two share
    assert len(in_fp8(saved[1])) == len(in_fp8(saved[2])) == inputs
    of_large = [sum(count for _, count in each.values() if count >= M * K) for each in saved]
    assert of_large[0] < of_large[1] == of_large[2], "nothing is saved in its place"
    exact = [i for i, (n, _) in enumerate(model.named_parameters()) if n[:2] in ("ga", "do")]
    for other in results[1:]:
        # The casts have the same bytes. What Inductor fuses otherwise has other roundings.
        assert all(torch.equal(results[0][i + 2], other[i + 2]) for i in exact)
        for a, b in zip(results[0], other, strict=True):
            assert (a - b).float().norm() <= 0.03 * b.float().norm()
    backward = codes[0][1]
    assert len(re.findall(r"= cast_pure_\w+\(.*False, True", backward)) >= 2


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block"])
def test_an_input_that_is_not_computed_is_cast_once_both_ways(name, device):
    """One op with one read, also where ``save`` asks for less: FP8 data are the least to keep."""
    torch.manual_seed(0)
    model = nn.Linear(K, N).to(device, torch.bfloat16)
    x = torch.randn(M, K).to(device, torch.bfloat16).requires_grad_()
    eager = float8lab.convert_to_float8(copy.deepcopy(model), RECIPES[name])
    y = eager(x)
    y.float().square().sum().backward()
    expected = [y.detach(), x.grad, *(p.grad for p in eager.parameters())]
    recipe = replace(RECIPES[name], save="recompute")
    results, saved, (forward, backward) = compiled(model, recipe, x)
    assert len(in_fp8(saved)) == 1
    casts = [line for line in forward.splitlines() if re.search(r"= cast_\w+\(", line)]
    assert ["True, True" in line for line in casts] == [True, False], "of x, and of the weight"
    assert len(re.findall(r"= cast_\w+\(", backward)) == 2, "of dy, and of the weight"
    for a, b in zip(results, expected, strict=True):
        assert torch.equal(a, b)


def test_an_inductor_with_other_names_casts_as_the_graph_says():
    graph_casts._at_casts(lambda match: None)(ModuleType("torch._inductor.fx_passes.joint_graph"))
