"""``advise``: modelled times equal those of ``recipes.auto``; measured times sum to the step's."""

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
from tests.inspect.models import StatefulModel, snapshot

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


class DecoderLayer(nn.Module):
    """A decoder layer of a Llama."""

    def __init__(self, D: int = 64, F: int = 160, H: int = 4, **options) -> None:
        super().__init__()
        self.H = H
        self.norm1, self.norm2 = nn.RMSNorm(D, **options), nn.RMSNorm(D, **options)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False, **options) for _ in range(4))
        self.gate, self.up = (nn.Linear(D, F, bias=False, **options) for _ in range(2))
        self.down = nn.Linear(F, D, bias=False, **options)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (self.H, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class OpCosts(TorchDispatchMode):
    """A machine on which each op takes a time given by its sizes, and the times of ops add up."""

    def __init__(self) -> None:
        super().__init__()
        self.gpu = self.cpu = 0.0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        self.gpu += 1e-6 + 1e-9 * sum(t.numel() for t in tensors) * (3 if op in GEMM_OPS else 1)
        self.cpu += 5e-6
        return result


def fake_timer(fn) -> Times:
    fn()
    with OpCosts() as costs:
        fn()
    return Times(costs.gpu, costs.cpu)


def loss_of(model, x):
    return model(x).square().mean()


def timed_step(model, x) -> Times:
    return fake_timer(lambda: torch.autograd.grad(loss_of(model, x), list(model.parameters())))


def advise_with_timer(model, x, recipe=CURRENT, *, timer=fake_timer, mode="eager"):
    return advise_by(timer, model, x, recipe, loss_of, None, (), mode)


@each_recipe
def test_measured_layers_add_up_to_the_step_time(recipe):
    model = nn.Sequential(DecoderLayer(), DecoderLayer(), nn.Linear(64, 48))
    x = torch.randn(2, 24, 64)
    advice = advise_with_timer(model, x, recipe)
    assert advice.measured
    assert advice.step["high precision"] == pytest.approx(max(timed_step(model, x)), rel=1e-6)
    float8lab.convert_to_float8(model, recipe)
    step_time = max(timed_step(model, x))
    # Each layer updates its delayed scales when it is measured alone.
    updates = 0.0
    for precision in precisions_below(model):
        for slots in precision.slots.values():
            updates += max(fake_timer(lambda pack=slots.pack: advance_scales([pack])))
    assert step_time * (1 - 1e-6) <= advice.step["FP8"] <= step_time * (1 + 1e-6) + updates


def test_a_cast_that_layers_share_counts_once():
    model, x = DecoderLayer(), torch.randn(2, 24, 64)
    layers = {layer.name: layer for layer in advise_with_timer(model, x).layers}
    assert layers["q"].quantize > layers["k"].quantize == layers["v"].quantize > 0
    assert layers["gate"].cpu > layers["up"].cpu
    assert layers["q"].gemm == layers["k"].gemm
    delayed = {
        layer.name: layer for layer in advise_with_timer(model, x, recipes.DelayedScaling()).layers
    }
    assert delayed["q"].quantize == delayed["k"].quantize


def test_each_kind_of_layer_is_measured_once():
    timed = []

    def timer(fn):
        timed.append(fn)
        return fake_timer(fn)

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    advise_with_timer(model, torch.randn(8, 64), timer=timer)
    # A step in both precisions. The first layer, which computes no dx, and the other layers each
    # take 5 timings: both precisions at two sizes, and the GEMMs.
    assert len(timed) == 2 + 2 * 5


def test_fused_modules_and_repeated_layers_add_up_to_the_step_time():
    class RepeatedLinear(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = float8lab.LayerNormMLP(64, 128, activation="swiglu", device="cpu")
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            return self.linear(self.mlp(self.linear(x)))

    model, x = RepeatedLinear(), torch.randn(32, 64)
    advice = advise_with_timer(model, x)
    assert {layer.name: layer.calls for layer in advice.layers} == {"mlp": 1, "linear": 2}
    float8lab.convert_to_float8(model)
    assert advice.step["FP8"] == pytest.approx(max(timed_step(model, x)), rel=1e-6)


def test_break_even_of_measured_times_is_where_their_lines_cross():
    # GPU us: 20 + M in high precision, 84.25 + M / 2 in FP8. They are equal at 128.5 tokens.
    class GemmShapes(TorchDispatchMode):
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
        with GemmShapes() as shapes_by_precision:
            fn()
        shapes = shapes_by_precision.fp8 or shapes_by_precision.high
        layers, tokens = len(shapes) // 2, shapes[0][0]  # fprop and wgrad; x needs no gradient
        us = 84.25 + tokens / 2 if shapes_by_precision.fp8 else 20 + tokens
        return Times(1e-6 * us * layers, 0.0)

    model = nn.Sequential(nn.Linear(16, 16))
    (layer,) = advise_with_timer(model, torch.randn(256, 16), timer=timer).layers
    assert (layer.high_gpu, layer.quantize + layer.gemm) == pytest.approx((276e-6, 212.25e-6))
    assert layer.break_even == 129


def test_cuda_graphs_take_no_cpu_time():
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.randn(8, 64)
    advice = advise_with_timer(model, x, mode="cuda_graph")
    assert all(layer.high_cpu == layer.cpu == 0 for layer in advice.layers)
    assert advice.step["high precision"] == pytest.approx(timed_step(model, x).gpu, rel=1e-6)


@each_recipe
@pytest.mark.parametrize("mode", ["eager", "compile", "cuda_graph"])
def test_modelled_times_equal_the_estimates_of_auto(recipe, mode):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 256))
        x = torch.empty(4, 256, 512)
    advice = inspect.advise(model, x, recipe, mode=mode)
    assert not advice.measured
    totals = {None: [0.0, 0.0], recipe: [0.0, 0.0]}
    for layer, (N, K) in zip(advice.layers, [(1024, 512), (256, 1024)], strict=True):
        assert (layer.M, layer.N, layer.K) == (1024, N, K)
        parts = estimate(recipe, 1024, N, K, mode=mode)
        assert (layer.quantize, layer.gemm, layer.cpu) == parts
        high = estimate(None, 1024, N, K, mode=mode)
        assert (layer.high_gpu, layer.high_cpu) == (high.gpu, high.cpu)
        for choice in totals:
            times = estimate(choice, 1024, N, K, mode=mode)
            totals[choice] = [totals[choice][0] + times.gpu, totals[choice][1] + times.cpu]
    assert advice.step["high precision"] == pytest.approx(max(totals[None]))
    assert advice.step["FP8"] == pytest.approx(max(totals[recipe]))
    assert advice.step["advised"] <= advice.step["high precision"]


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


def test_overrides_leave_layers_that_do_not_pay_in_high_precision():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192), nn.Sequential(nn.Linear(8192, 32)))
        x = torch.empty(16384, 8192)
    advice = inspect.advise(model, x)
    assert advice.overrides == {"1.0": None}
    report = float8lab.conversion_report(
        float8lab.convert_to_float8(model, overrides=advice.overrides)
    )
    assert [layer.converted for layer in report.layers] == [True, False]


def test_memory_saved_is_the_difference_of_two_memory_reports():
    model, x = nn.Sequential(DecoderLayer(), nn.Linear(64, 48)), torch.randn(2, 24, 64)
    advice = inspect.advise(model, x)

    def saved_bytes(report):
        return sum(row.activations for row in report.layers if row.name != "(output)")

    before = saved_bytes(inspect.memory_report(model, x))
    saved = {layer.name: layer.saved for layer in advice.layers}
    high = {row.name: row.activations for row in inspect.memory_report(model, x).layers}
    float8lab.convert_to_float8(model)
    fp8 = {row.name: row.activations for row in inspect.memory_report(model, x).layers}
    assert advice.saved == before - saved_bytes(inspect.memory_report(model, x))
    assert saved == {name: high.get(name, 0) - fp8.get(name, 0) for name in saved}


@pytest.mark.parametrize("timer", [None, fake_timer], ids=["modelled", "measured"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_unchanged(timer, fails):
    model, x = StatefulModel(fails=fails), torch.randn(16, 32)
    float8lab.convert_to_float8(model, recipes.DelayedScaling(amax_history_len=4))
    if not fails:
        loss_of(model, x).backward()
    before = snapshot(model)
    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            advise_with_timer(model, x, timer=timer)
    else:
        advise_with_timer(model, x, recipes.DelayedScaling(), timer=timer)
    assert snapshot(model) == before


def test_invalid_arguments_raise():
    model, x = nn.Linear(16, 16), torch.randn(8, 16)
    with pytest.raises(ValueError, match="mode must be one of 'eager'"):
        inspect.advise(model, x, mode="fast")
    with pytest.raises(ValueError, match="Of others no speed is known"):
        inspect.advise(model, x, recipes.MXFP8BlockScaling())


def test_a_small_loss_of_memory_has_no_sign():
    advice = inspect.advise(nn.Linear(16, 4), torch.randn(1, 16))
    assert advice.saved < 0
    assert "; 0.0 MB less kept" in advice.summary()
    assert str(advice).endswith(" 0.0")


def test_report_as_text_and_json():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 32, bias=False))
        x = torch.empty(16384, 8192, dtype=torch.bfloat16)
    advice = inspect.advise(model.bfloat16(), x)
    assert_expected_inline(
        str(advice),
        """\
1 of 2 layers pay; 268.4 MB less kept from forward to backward
linear layers of a step, predicted: high precision 8.859 ms, FP8 5.451 ms, advised 5.286 ms
Float8CurrentScaling(), modelled for an H200, from rates measured there

Layers
  layer      M     K     N  high ms    CPU  FP8 quantize   GEMM    CPU     x  pays from  MB less
  0      16384  8192  8192    8.658  0.093         0.527  4.558  0.325  1.70        595    134.2
  1      16384  8192    32    0.201  0.093         0.228  0.138  0.325  0.55      never    134.2""",
    )
    data = json.loads(advice.to_json())
    assert data["overrides"] == {"1": "None"}
    assert data["layers"][0]["N"] == 8192
