"""advise: modelled times are those of recipes.auto; measured ones add up to the step's."""

import json

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import float8lab
from float8lab import inspect, recipes
from float8lab.inspect.advice import advise_by
from float8lab.inspect.timing import Times
from float8lab.nn.count import GEMM_OPS
from float8lab.nn.precision import precisions_below
from float8lab.recipes.cost import estimate
from float8lab.recipes.region import advance_scales
from tests.inspect.models import Noted, snapshot

CURRENT = recipes.Float8CurrentScaling()
each_recipe = pytest.mark.parametrize(
    "recipe",
    [
        recipes.DelayedScaling(),
        CURRENT,
        recipes.Float8RowwiseScaling(),
        recipes.Float8BlockScaling(),
        recipes.Float8CurrentScaling(override_linear_precision=(False, False, True)),
    ],
    ids=str,
)


class Layer(nn.Module):
    """A decoder layer of a Llama."""

    def __init__(self, D: int = 64, F: int = 160, H: int = 4, **how) -> None:
        super().__init__()
        self.H = H
        self.norm1, self.norm2 = nn.RMSNorm(D, **how), nn.RMSNorm(D, **how)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False, **how) for _ in range(4))
        self.gate, self.up = (nn.Linear(D, F, bias=False, **how) for _ in range(2))
        self.down = nn.Linear(F, D, bias=False, **how)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.H, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Costs(TorchDispatchMode):
    """A machine on which every op takes a time of its own, and times add up."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu = self.cpu = 0.0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        given = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        self.gpu += 1e-6 + 1e-9 * sum(t.numel() for t in given) * (3 if op in GEMM_OPS else 1)
        self.cpu += 5e-6
        return result


def fake_timer(fn) -> Times:
    fn()
    with Costs() as costs:
        fn()
    return Times(costs.gpu, costs.cpu)


def loss_of(model, x):
    return model(x).square().mean()


def step(model, x) -> Times:
    return fake_timer(lambda: torch.autograd.grad(loss_of(model, x), list(model.parameters())))


def advised(model, x, recipe=CURRENT, *, timer=fake_timer, mode="eager"):
    return advise_by(timer, model, x, recipe, loss_of, None, (), mode)


@each_recipe
def test_measured_layers_add_up_to_the_step(recipe):
    model = nn.Sequential(Layer(), Layer(), nn.Linear(64, 48))
    x = torch.randn(2, 24, 64)
    found = advised(model, x, recipe)
    assert found.measured
    assert found.step["high precision"] == pytest.approx(max(step(model, x)), rel=1e-6)
    float8lab.convert_to_float8(model, recipe)
    taken = max(step(model, x))
    # Of the layers each updates its delayed scales where it is measured alone.
    updates = 0.0
    for precision in precisions_below(model):
        for slots in precision.slots.values():
            updates += max(fake_timer(lambda pack=slots.pack: advance_scales([pack])))
    assert taken * (1 - 1e-6) <= found.step["FP8"] <= taken * (1 + 1e-6) + updates


def test_a_cast_that_layers_share_counts_once():
    model, x = Layer(), torch.randn(2, 24, 64)
    found = {layer.name: layer for layer in advised(model, x).layers}
    assert found["q"].quantize > found["k"].quantize == found["v"].quantize > 0
    assert found["gate"].cpu > found["up"].cpu
    assert found["q"].gemm == found["k"].gemm
    delayed = {layer.name: layer for layer in advised(model, x, recipes.DelayedScaling()).layers}
    assert delayed["q"].quantize == delayed["k"].quantize


def test_each_kind_of_layer_is_measured_once():
    timed = []

    def timer(fn):
        timed.append(fn)
        return fake_timer(fn)

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    advised(model, torch.randn(8, 64), timer=timer)
    # A step in both precisions; and, of the first layer, which computes no dx, and of the others:
    # both precisions at two sizes, and the GEMMs.
    assert len(timed) == 2 + 2 * 5


def test_fused_modules_and_repeated_layers():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = float8lab.LayerNormMLP(64, 128, activation="swiglu", device="cpu")
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(self.mlp(self.linear(x)))

    model, x = Twice(), torch.randn(32, 64)
    found = advised(model, x)
    assert {layer.name: layer.calls for layer in found.layers} == {"mlp": 1, "linear": 2}
    float8lab.convert_to_float8(model)
    assert found.step["FP8"] == pytest.approx(max(step(model, x)), rel=1e-6)


def test_break_even_of_measured_times_is_where_two_lines_meet():
    # GPU us: high precision 20 + M, FP8 84.25 + M / 2: equal at 128.5 tokens.
    class Products(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.fp8, self.high = [], []

        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            result = op(*args, **(kwargs or {}))
            if op in GEMM_OPS:
                fp8 = op.namespace == "float8lab"
                (self.fp8 if fp8 else self.high).append(result.shape)
            return result

    def timer(fn):
        with Products() as products:
            fn()
        found = products.fp8 or products.high
        layers, tokens = len(found) // 2, found[0][0]  # fprop and wgrad: x needs no gradient
        us = 84.25 + tokens / 2 if products.fp8 else 20 + tokens
        return Times(1e-6 * us * layers, 0.0)

    model = nn.Sequential(nn.Linear(16, 16))
    (layer,) = advised(model, torch.randn(256, 16), timer=timer).layers
    assert (layer.high_gpu, layer.quantize + layer.gemm) == pytest.approx((276e-6, 212.25e-6))
    assert layer.break_even == 129


def test_graphs_take_no_cpu_time():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)
    found = advised(model, x, mode="cuda_graph")
    assert all(layer.high_cpu == layer.cpu == 0 for layer in found.layers)
    assert found.step["high precision"] == pytest.approx(step(model, x).gpu, rel=1e-6)


@each_recipe
@pytest.mark.parametrize("mode", ["eager", "compile", "cuda_graph"])
def test_modelled_times_are_those_of_auto(recipe, mode):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256))
        x = torch.empty(4, 256, 512)
    found = inspect.advise(model, x, recipe, mode=mode)
    assert not found.measured
    total = {None: [0.0, 0.0], recipe: [0.0, 0.0]}
    for layer, (N, K) in zip(found.layers, [(1024, 512), (256, 1024)], strict=True):
        assert (layer.M, layer.N, layer.K) == (1024, N, K)
        parts = estimate(recipe, 1024, N, K, mode=mode)
        assert (layer.quantize, layer.gemm, layer.cpu) == parts
        high = estimate(None, 1024, N, K, mode=mode)
        assert (layer.high_gpu, layer.high_cpu) == (high.gpu, high.cpu)
        for choice in total:
            times = estimate(choice, 1024, N, K, mode=mode)
            total[choice] = [total[choice][0] + times.gpu, total[choice][1] + times.cpu]
    assert found.step["high precision"] == pytest.approx(max(total[None]))
    assert found.step["FP8"] == pytest.approx(max(total[recipe]))
    assert found.step["advised"] <= found.step["high precision"]


@pytest.mark.parametrize("mode", ["eager", "cuda_graph"])
def test_break_even_is_where_fp8_begins_to_win(mode):
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(4096, 4096, bias=False)), torch.empty(16, 4096)
    (layer,) = inspect.advise(model, x, mode=mode).layers

    def wins(M):
        times = (estimate(r, M, 4096, 4096, mode=mode) for r in (None, CURRENT))
        high, fp8 = (max(t.gpu, t.cpu) for t in times)
        return fp8 <= high

    assert wins(layer.break_even)
    assert not wins(layer.break_even - 1)
    with torch.device("meta"):
        small = nn.Sequential(nn.Linear(64, 64))
        x = torch.empty(16, 64)
    assert inspect.advise(small, x, mode=mode).layers[0].break_even is None


def test_overrides_leave_what_does_not_pay_in_high_precision():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), nn.Sequential(nn.Linear(8192, 32)))
        x = torch.empty(16384, 8192)
    found = inspect.advise(model, x)
    assert found.overrides == {"1.0": None}
    report = float8lab.conversion_report(
        float8lab.convert_to_float8(model, overrides=found.overrides)
    )
    assert [layer.converted for layer in report.layers] == [True, False]


def test_memory_saved_is_the_difference_of_two_reports():
    model, x = nn.Sequential(Layer(), nn.Linear(64, 48)), torch.randn(2, 24, 64)
    found = inspect.advise(model, x)

    def kept(report):
        return sum(row.activations for row in report.layers if row.name != "(output)")

    before = kept(inspect.memory_report(model, x))
    saved = {layer.name: layer.saved for layer in found.layers}
    high = {row.name: row.activations for row in inspect.memory_report(model, x).layers}
    float8lab.convert_to_float8(model)
    fp8 = {row.name: row.activations for row in inspect.memory_report(model, x).layers}
    assert found.saved == before - kept(inspect.memory_report(model, x))
    assert saved == {name: high.get(name, 0) - fp8.get(name, 0) for name in saved}


@pytest.mark.parametrize("timer", [None, fake_timer], ids=["modelled", "measured"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(timer, fails):
    model, x = Noted(fails=fails), torch.randn(16, 32)
    float8lab.convert_to_float8(model, recipes.DelayedScaling(amax_history_len=4))
    if not fails:
        loss_of(model, x).backward()
    before = snapshot(model)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            advised(model, x, timer=timer)
    else:
        advised(model, x, recipes.DelayedScaling(), timer=timer)
    assert snapshot(model) == before


def test_what_it_refuses():
    model, x = nn.Linear(16, 16), torch.randn(8, 16)
    with pytest.raises(ValueError, match="mode must be one of 'eager'"):
        inspect.advise(model, x, mode="fast")
    with pytest.raises(ValueError, match="Of others no speed is known"):
        inspect.advise(model, x, recipes.MXFP8BlockScaling())


def test_report_as_text_and_json():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 32, bias=False))
        x = torch.empty(16384, 8192, dtype=torch.bfloat16)
    found = inspect.advise(model.bfloat16(), x)
    assert_expected_inline(
        str(found),
        """\
1 of 2 layers pay; 268.4 MB less kept from forward to backward
linear layers of a step, predicted: high precision 8.859 ms, FP8 5.451 ms, advised 5.286 ms
Float8CurrentScaling(), modelled for an H200, from rates measured there

Layers
  layer      M     K     N  high ms    CPU  FP8 quantize   GEMM    CPU     x  pays from  MB less
  0      16384  8192  8192    8.658  0.093         0.527  4.558  1.163  1.70       2183    134.2
  1      16384  8192    32    0.201  0.093         0.228  0.138  1.163  0.17      never    134.2""",
    )
    data = json.loads(found.to_json())
    assert data["overrides"] == {"1": "None"}
    assert data["layers"][0]["N"] == 8192
