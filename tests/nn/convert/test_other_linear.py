"""Linear layers of other libraries, which convert to the classes registered for them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import float8lab
from float8lab import recipes
from float8lab.nn.convert.other_linear import OtherLinear, register_linear
from tests.distributed.ranks import RECIPES
from tests.nn.convert.test_conversion import Halve
from tests.nn.models import gemms_of, report_of


class Transposed(nn.Module):
    """A linear layer of another library, with a weight ``[in, out]``."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size_in, size_out))
        self.bias = nn.Parameter(torch.randn(size_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.t(), self.bias)


class Float8Transposed(OtherLinear, Transposed):
    original = Transposed

    @staticmethod
    def matrix(layer):
        return layer.weight.t()

    @staticmethod
    def from_matrix(matrix):
        return matrix.t()


class WithoutForward(Transposed):
    def extra_repr(self):
        return "mine"


class WithForward(Transposed):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OtherLinear, "loaders", dict(OtherLinear.loaders))
    register_linear(f"{__name__}.Transposed", lambda: Float8Transposed)


def twins() -> tuple[nn.Linear, Transposed]:
    """The same layer of torch and of the other library; its sizes are no multiples of 16."""
    layer = Transposed(13, 37)
    linear = nn.Linear(13, 37)
    with torch.no_grad():
        linear.weight.copy_(layer.weight.t())
        linear.bias.copy_(layer.bias)
    return linear, layer


@pytest.mark.parametrize("recipe", [*RECIPES, recipes.DelayedScaling()], ids=repr)
def test_a_converted_layer_equals_torchs_linear(recipe, device):
    linear, layer = (module.to(device) for module in twins())
    for module in (linear, layer):  # each call of the layer alone advances its scales
        float8lab.convert_to_float8(nn.Sequential(module), recipe)
    assert isinstance(layer, Transposed)
    gemms = (0, 3) if recipe == recipes.MXFP8BlockScaling() else (3, 0)  # MX is dequantized
    for step in range(3):  # delayed scales come from earlier steps
        x = torch.randn(2, 5, 13, device=device) * (1 + step)
        dy = torch.randn(2, 5, 37, device=device)
        results = []
        for module in (linear, layer):
            inp = x.clone().requires_grad_()
            module.zero_grad()
            with float8lab.count_gemms() as counts:
                y = module(inp)
                y.backward(dy)
            assert (counts.fp8, counts.high_precision) == gemms
            results.append((y, inp.grad, module.weight.grad, module.bias.grad))
        (y, dx, dw, db), (y2, dx2, dw2, db2) = results
        for actual, expected in ((y2, y), (dx2, dx), (dw2, dw.t()), (db2, db)):
            assert torch.equal(actual, expected)


def test_a_converted_layer_obeys_autocast_and_to_high_precision():
    _, layer = twins()
    before, x = copy.deepcopy(layer), torch.randn(4, 13)
    report = report_of(layer)
    assert report.layers[0].shape == (layer.out_features, layer.in_features) == (37, 13)
    assert not torch.equal(layer(x), before(x))
    with float8lab.autocast(enabled=False):
        assert torch.equal(layer(x), before(x))
    float8lab.to_high_precision(layer)
    assert type(layer) is Transposed
    assert vars(layer).keys() == vars(before).keys()
    assert torch.equal(layer(x), before(x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_converted_layer_can_be_copied_and_pickled(duplicate, monkeypatch):
    model = float8lab.convert_to_float8(nn.Sequential(Transposed(16, 16)), recipes.DelayedScaling())
    x = torch.randn(4, 16)
    for _ in range(2):
        model(x).sum().backward()
    monkeypatch.setattr("float8lab.nn.convert.swap._CLASSES", {nn.Linear: float8lab.Linear})
    twin = duplicate(model)  # as in a new process
    for _ in range(2):
        assert torch.equal(twin(x), model(x))
    assert type(float8lab.to_high_precision(twin)[0]) is Transposed


def test_a_converted_layer_moves_to_another_dtype():
    _, layer = twins()
    float8lab.convert_to_float8(layer, recipes.DelayedScaling())
    layer.bfloat16()
    assert layer(torch.ones(2, 13, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_a_weight_stored_in_fp8_runs_and_is_dequantized():
    _, layer = twins()
    float8lab.convert_to_float8(layer)
    x = torch.randn(4, 13)
    y = layer(x)
    layer.weight = nn.Parameter(float8lab.quantize(layer.weight.detach()), requires_grad=False)
    assert torch.equal(layer(x), y)
    stored = layer.weight.dequantize()
    with float8lab.autocast(enabled=False):
        assert torch.equal(layer(x), nn.functional.linear(x, stored.t(), layer.bias))
    float8lab.to_high_precision(layer)
    assert torch.equal(layer.weight, stored)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_frozen_weights_equal_those_of_torchs_linear(recipe):
    linear, layer = twins()
    for module in (linear, layer):
        float8lab.convert_to_float8(module, recipe, freeze_weights=True)
    assert isinstance(layer.weight, float8lab.Float8Tensor)
    assert layer.weight.shape == (13, 37)
    x, x2 = (torch.ones(4, 13).cumsum(1).requires_grad_() for _ in range(2))
    y, y2 = linear(x), layer(x2)
    assert torch.equal(y, y2)
    y.sum().backward()
    y2.sum().backward()
    assert torch.equal(x.grad, x2.grad)


def test_only_subclasses_without_a_forward_convert():
    model = nn.Sequential(WithoutForward(8, 8), WithForward(8, 8))
    report = report_of(model)
    assert [layer.name for layer in report.converted] == ["0"]
    assert isinstance(model[0], WithoutForward)
    assert "mine" in repr(model[0])
    assert report.skipped[0].note == (
        "WithForward has a forward of its own; name it in overrides to convert"
    )
    assert gemms_of(model, torch.randn(2, 8))[0] == 1
    assert type(float8lab.to_high_precision(model)[0]) is WithoutForward


def test_a_parametrized_layer_converts():
    layer = Transposed(16, 16)
    parametrize.register_parametrization(layer, "weight", Halve())
    report = report_of(layer)
    assert [row.name for row in report.layers] == [""]  # no row for the parametrization
    with float8lab.count_gemms() as counts:
        layer(torch.randn(4, 16)).sum().backward()
    assert counts.fp8 == 2  # no dx
    assert layer.parametrizations.weight.original.grad is not None


def test_a_converted_layer_compiles_without_graph_breaks():
    _, layer = twins()
    float8lab.convert_to_float8(layer)
    x = torch.randn(4, 13)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_auto_predicts_the_time_of_the_layer():
    big = nn.Sequential(nn.Linear(8192, 8192, device="meta"), Transposed(1, 1))
    big[1].weight = nn.Parameter(torch.empty(8192, 8192, device="meta"))
    big[1].bias = nn.Parameter(torch.empty(8192, device="meta"))
    report = report_of(big, "auto")
    assert [row.converted for row in report.layers] == [True, True]
    assert report.layers[0].note == report.layers[1].note
    assert report.layers[1].shape == (8192, 8192)


def test_sensitivity_and_advise_include_the_layer():
    """Both read the layer's sizes and leave it unchanged."""
    model = nn.Sequential(Transposed(16, 48), nn.Linear(48, 16))
    x = torch.randn(8, 16)
    (first, second) = float8lab.inspect.advise(model, x).layers
    assert (first.N, first.K) == (second.K, second.N) == (48, 16)
    rows = float8lab.inspect.sensitivity(model, x).rows
    assert 0 < max(row.damage for row in rows if row.layer == "0") < 0.2
    assert type(model[0]) is Transposed
