"""Tests of the inspect functions on MoE layers."""

import pytest
import torch
from torch import Tensor, nn

import float8lab
from float8lab import inspect, recipes
from float8lab.inspect.advice import advise_by
from float8lab.inspect.timing import Times

T, E, K, D, W = 24, 4, 2, 64, 48


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(D, E)
        self.experts = float8lab.ExpertMLP(E, D, W, device="cpu")
        self.out = float8lab.GroupedLinear(2, D, D, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(K)
        y = self.experts(x, weights, index)
        return self.out(y, m_splits=[T // 3, T - T // 3])


def model_and_input() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(T, D, requires_grad=True)


def test_sensitivity_measures_experts():
    report = inspect.sensitivity(*model_and_input())
    experts = [row for row in report.rows if row.layer == "experts"]
    assert sorted(row.gemm for row in experts) == ["dgrad", "fprop", "wgrad"]
    assert all(row.measured and 0 < row.damage < 1 for row in experts)
    assert {row.layer for row in report.rows} == {"experts", "out"}


@pytest.mark.parametrize("measured", [False, True])
def test_advice_lists_the_gemm_sizes_of_experts(measured: bool):
    """Each layer is timed as the model calls it; M counts the tokens of all experts together."""
    calls = []

    def timer(run) -> Times:
        run()
        calls.append(run)
        return Times(1e-6 * len(calls), 1e-6)

    model, x = model_and_input()
    recipe = recipes.Float8BlockScaling()
    report = advise_by(timer if measured else None, model, x, recipe, None, None, (), "eager")
    layers = {layer.name: layer for layer in report.layers}
    assert (layers["experts"].M, layers["experts"].N, layers["experts"].K) == (T, 2 * W, D)
    assert (layers["out"].M, layers["out"].N, layers["out"].K) == (T, D, D)
    assert bool(calls) == measured


def test_watch_records_both_layers_of_experts():
    model, x = model_and_input()
    float8lab.convert_to_float8(model)
    with inspect.watch(model) as watched:
        model(x).sum().backward()
        watched.step()
    (step,) = watched.log.steps
    names = ["experts.fc1", "experts.fc2", "out"]
    assert step.gemms == {name: {"fprop": 1, "dgrad": 1, "wgrad": 1} for name in names}
    sizes = {(r.layer, r.operand): r.elements for r in watched.log.records}
    assert sizes["experts.fc1", "x"] == T * K * D
    assert sizes["experts.fc1", "w"] == E * 2 * W * D
    assert sizes["experts.fc2", "dy"] == T * K * D
