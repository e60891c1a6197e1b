"""watch: what is recorded is true, of every layer, once; and nothing happens where it is off."""

import contextlib
import functools
import importlib
import io
import itertools
import json
import math
import sys

import pytest
import torch
import torch.optim.optimizer as optimizers
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import float8lab
from float8lab import recipes
from float8lab.formats import E4M3, E5M2, scale_shape
from float8lab.inspect import watch
from float8lab.inspect.watch import measure
from float8lab.inspect.watch.records import Log, Record, Step
from float8lab.recipes.region import PROCESS
from tests.nn.models import DELAYED
from tests.nn.models import UNDELAYED as RECIPES
from tests.recorder import Ops, never_waiting

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
ALL = RECIPES | {"delayed": DELAYED}


def make(recipe=None, *, device="cpu"):
    model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 20)).to(device)
    float8lab.convert_to_float8(model, recipe)
    return model


def train(model, x, steps=1, w=None, optimizer=None):
    for _ in range(steps):
        loss = model(x).square().mean()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        if w is not None:
            w.step(loss)


def by_operand(w, step=0):
    return {(r.layer, r.operand): r for r in w.log.records if r.step == step}


def test_numbers_by_hand():
    # One scale, 448 / 448 = 1. e4m3's smallest number is 2^-9; half of it and less becomes 0.
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False))
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([448.0, 1.0625, 0.0009, -0.002])
    with watch(model) as w:
        model(x)
    found = by_operand(w)["(model)", "x"]
    signal = 448.0**2 + 1.0625**2 + 0.0009**2 + 0.002**2
    noise = 0.0625**2 + 0.0009**2 + (0.002 - 2**-9) ** 2  # 1.0625 lies between: even is 1
    assert found.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)
    assert found == Record(
        step=0,
        layer="(model)",
        operand="x",
        amax=448.0,
        scale_min=1.0,
        scale_max=1.0,
        saturated=1 / 16,
        flushed=1 / 16,
        subnormal=1 / 16,
        nan=0,
        inf=0,
        sqnr=found.sqnr,
        staleness=None,
        elements=16,
        exponents={8: 1, 0: 1, -9: 1},
        fp8_dtype="e4m3",
    )
    assert w.log.steps == [Step(0, None, {"(model)": {"fprop": 1}})]


@pytest.mark.parametrize("recompute", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("asks", [False, True], ids=["not asked for", "asked for"])
def test_attention_in_fp8(asks, recompute):
    attention = float8lab.DotProductAttention(4, 16, attention_dropout=0.0)
    recipe = recipes.DelayedScaling(fp8_dpa=asks)
    q, k, v = (torch.randn(5, 2, 4, 16, requires_grad=True) for _ in range(3))
    model = nn.ModuleDict({"core": attention, "proj": float8lab.Linear(64, 8, device="cpu")})
    with watch(model) as w:
        for _ in range(2):
            with float8lab.autocast(recipe=recipe):
                call = functools.partial(attention, attn_mask_type="no_mask")
                y = float8lab.checkpoint(call, q, k, v) if recompute else call(q, k, v)
                model["proj"](y).sum().backward()
            w.step()
    found = by_operand(w, step=1)
    assert w.log.layers == (["core", "proj"] if asks else ["proj"])
    assert [key for key in found if key[0] == "core"] == [("core", o) for o in "qkv" if asks]
    for name, x in zip("qkv", (q, k, v), strict=True):
        if asks:
            record = found["core", name]
            assert record.amax == x.abs().max()
            assert record.elements == x.numel()
            assert record.scale_max == 2.0 ** math.ceil(math.log2(record.amax / 448))
            assert record.staleness == pytest.approx(
                math.log2(record.amax / 448 / record.scale_max)
            )
            assert record.sqnr > 25
    assert w.log.steps[1].gemms == {"proj": {"fprop": 1, "dgrad": 1, "wgrad": 1}}


def test_values_that_are_not_finite():
    model = nn.Linear(16, 16, bias=False)
    float8lab.convert_to_float8(model, recipes.Float8RowwiseScaling())
    x = torch.ones(4, 16)
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    x[1, 0] = 3.0
    dy = torch.ones(4, 16)
    dy[2, :2] = torch.tensor([torch.inf, torch.nan])
    with watch(model) as w:
        model(x).backward(dy)
    found = by_operand(w)["(model)", "x"]
    assert (found.nan, found.inf, found.amax) == (1, 2, 3.0)
    # Rows of ones and of 3 have their largest at the limit; beside infinities the scale is 1.
    assert found.saturated == (1 + 16 + 16) / 64
    found = by_operand(w)["(model)", "dy"]
    assert (found.nan, found.inf, found.amax) == (1, 1, 1.0)
    assert found.saturated == 14 * 4 / 64  # for dw each column has a scale


def test_exact_and_empty_operands():
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False))
    with watch(model) as w:
        model(torch.zeros(0, 16)).sum().backward()
    assert [r.operand for r in w.log.records] == ["w"]
    with watch(model) as w:
        model(torch.ones(3, 16))
    assert by_operand(w)["(model)", "x"].sqnr is None


@pytest.mark.parametrize("shape", [(32, 48), (5, 7, 48)], ids=["aligned", "odd"])
@each_recipe
def test_values_are_those_of_the_casts(recipe, shape):
    model = make(recipe)
    gradients = []
    model[2].register_full_backward_hook(lambda m, dx, dy: gradients.append(dy[0].clone()))
    x = torch.randn(shape)
    with watch(model) as w:
        train(model, x)
    plan = recipe.linear
    originals = {
        ("0", "x"): (x, plan.x),
        ("0", "w"): (model[0].weight.detach(), plan.w),
        ("2", "w"): (model[2].weight.detach(), plan.w),
        ("2", "dy"): (gradients[0], plan.dy),
    }
    found = by_operand(w)
    assert set(found) == {(layer, o) for layer in "02" for o in ("x", "w", "dy")}
    for key, (original, spec) in originals.items():
        matrix = original.reshape(-1, original.shape[-1])
        t = float8lab.quantize(matrix, spec.fp8_dtype, block=spec.block, scale_rule=spec.scale_rule)
        expected, record = t.stats(matrix), found[key]
        for name in ("amax", "scale_min", "scale_max", "saturated", "flushed", "subnormal"):
            assert getattr(record, name) == getattr(expected, name), (key, name)
        assert record.sqnr == pytest.approx(expected.sqnr, abs=1e-9)
        assert record.elements == matrix.numel()
        h = t.histogram("exponent")
        counts = dict(zip(h.values.tolist(), h.counts.tolist(), strict=True))
        assert record.exponents == {e: n for e, n in counts.items() if n}
        assert record.staleness is None


def test_staleness_of_delayed_scales():
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False), DELAYED)
    with watch(model) as w:
        for factor in (7.0, 28.0, 14.0):
            model(torch.full((16, 16), factor)).sum().backward()
            w.step()
    x = [by_operand(w, step)["(model)", "x"] for step in range(3)]
    # 7 = 448 / 64 without rounding. The second step still has that scale, the third that of 28.
    assert [r.scale_max for r in x] == [1 / 64, 1 / 64, 1 / 16]
    assert [r.staleness for r in x] == [0.0, 2.0, -1.0]
    assert [r.saturated for r in x] == [1.0, 1.0, 0.0]
    assert w.log.recipe == repr(DELAYED)


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL.keys())
def test_watching_changes_no_number(recipe):
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = make(recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(33, 48)
        with watch(model) if watched else contextlib.nullcontext():
            train(model, x, 3, optimizer=optimizer)
        slots = [t for m in (model[0], model[2]) for s in m._fp8.slots.values()
                 for t in s.tensors().values()]  # fmt: skip
        results.append([*model.parameters(), *slots])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


MODULES = {
    "Linear": (lambda: float8lab.Linear(32, 48, device="cpu"), ["(model)"]),
    "LayerNormLinear": (lambda: float8lab.LayerNormLinear(32, 48, device="cpu"), ["(model)"]),
    "LayerNormMLP": (lambda: float8lab.LayerNormMLP(32, 48, device="cpu"), ["fc1", "fc2"]),
    "MultiheadAttention": (
        lambda: float8lab.MultiheadAttention(32, 2, device="cpu", attention_dropout=0.0),
        ["qkv", "proj"],
    ),
    "TransformerLayer": (
        lambda: float8lab.TransformerLayer(32, 48, 2, device="cpu"),
        [
            "self_attention.layernorm_qkv",
            "self_attention.proj",
            "layernorm_mlp.fc1",
            "layernorm_mlp.fc2",
        ],
    ),
}


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize(("build", "layers"), MODULES.values(), ids=MODULES.keys())
def test_every_module(build, layers, recipe):
    model = build()
    with watch(model) as w, float8lab.autocast(recipe=recipe):
        model(torch.randn(6, 4, 32, requires_grad=True)).sum().backward()
    assert w.log.layers == layers
    assert [(r.layer, r.operand) for r in w.log.records] == [
        (layer, operand) for layer in layers for operand in ("x", "w", "dy")
    ]
    assert all(r.amax > 0 and r.elements > 0 for r in w.log.records)
    high = ", high precision" if recipe == RECIPES["mx"] else ""
    counts = {f"{kind}{high}": 1 for kind in ("fprop", "dgrad", "wgrad")}
    assert w.log.steps[0].gemms == dict.fromkeys(layers, counts)


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL.keys())
def test_operands_that_are_never_written(recipe):
    model = float8lab.LayerNormMLP(32, 48, device="cpu", activation="relu")
    x = torch.randn(16, 32)
    with watch(model) as w, float8lab.autocast(recipe=recipe):
        model(x).sum().backward()
    normed = F.layer_norm(x, (32,), model.layer_norm_weight, model.layer_norm_bias)
    found = by_operand(w)
    assert found["fc1", "x"].amax == pytest.approx(normed.abs().max().item(), rel=1e-6)
    assert found["fc1", "x"].elements == 16 * 32
    hidden = F.linear(normed, model.fc1_weight, model.fc1_bias).relu()
    # fc1 itself runs in FP8.
    assert found["fc2", "x"].amax == pytest.approx(hidden.abs().max().item(), rel=0.1)
    assert found["fc2", "x"].sqnr > 20
    assert found["fc1", "dy"].elements == found["fc2", "x"].elements == 16 * 48
    assert found["fc2", "dy"].amax == 1.0
    assert found["fc1", "dy"].sqnr > 20  # of the gradient of the activation, never written either


def test_gemms_in_high_precision():
    for kept, gemms in (
        ((True, False, False), {"fprop, high precision": 1, "dgrad": 1, "wgrad": 1}),
        ((False, True, False), {"fprop": 1, "dgrad, high precision": 1, "wgrad": 1}),
        ((False, False, True), {"fprop": 1, "dgrad": 1, "wgrad, high precision": 1}),
    ):
        for recipe in (recipes.Float8CurrentScaling, recipes.Float8RowwiseScaling):
            model = nn.Sequential(nn.Linear(32, 32))
            float8lab.convert_to_float8(model, recipe(override_linear_precision=kept))
            with watch(model) as w:
                model(torch.randn(16, 32, requires_grad=True)).sum().backward()
            assert w.log.steps[0].gemms == {"0": gemms}
            # Each operand is still cast for one of the other two GEMMs.
            assert [r.operand for r in w.log.records] == ["x", "w", "dy"]


def test_layers_that_share_a_cast_have_a_record_each():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.q, self.k = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            return self.q(x) + self.k(x)

    model = float8lab.convert_to_float8(Model())
    with watch(model) as w:
        train(model, torch.randn(16, 32))
    found = by_operand(w)
    assert found["q", "x"].amax == found["k", "x"].amax
    assert len(found) == 9


@each_recipe
def test_weights_stored_in_fp8(recipe):
    with float8lab.fp8_model_init(recipe=recipe):
        model = float8lab.Linear(40, 24, device="cpu")
    with watch(model) as w, float8lab.autocast(recipe=recipe):
        model(torch.randn(16, 40)).sum().backward()
    found, expected = by_operand(w)["(model)", "w"], model.weight.stats()
    for name in ("scale_min", "scale_max", "saturated", "subnormal"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.amax == model.weight.dequantize().abs().max().item()
    assert (found.stored, found.sqnr, found.flushed, found.elements) == (True, None, 0.0, 960)
    other = recipes.Float8BlockScaling() if recipe.linear.w.per_tensor else RECIPES["current"]
    with (
        watch(model) as w,
        float8lab.autocast(recipe=other),
        pytest.warns(UserWarning, match="is stored as .* and cast to "),
    ):
        model(torch.randn(16, 40))
    found = by_operand(w)["(model)", "w"]
    assert not found.stored
    assert found.amax == model.weight.dequantize().abs().max().item()


@each_recipe
def test_weights_stored_in_fp8_are_compared_with_their_masters(recipe):
    with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = nn.Sequential(
            float8lab.Linear(40, 24, device="cpu"), float8lab.Linear(24, 40, device="cpu")
        )
    optimizer = float8lab.optim.MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    with watch(model, masters=optimizer.masters) as w:
        for step in range(2):
            masters = [optimizer.masters[layer.weight].clone() for layer in model]
            expected = [layer.weight.stats(m) for layer, m in zip(model, masters, strict=True)]
            with float8lab.autocast(recipe=recipe):
                model(torch.randn(16, 40)).square().mean().backward()
            optimizer.step()
            found = by_operand(w, step)
            for name, master, stats in zip("01", masters, expected, strict=True):
                record = found[name, "w"]
                assert record.stored
                assert record.amax == master.abs().max()
                assert record.scale_max == stats.scale_max  # of this step's weight
                assert record.sqnr == pytest.approx(stats.sqnr)
                assert 20 < record.sqnr < 40
    assert [s.step for s in w.log.steps] == [0, 1]


def test_casts_of_a_step_are_taken_together():
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False))
    batches = [torch.full((8, 16), 2.0), torch.full((24, 16), 3.0)]
    with watch(model) as w:
        for x in batches:
            model(x).sum().backward()
    found = by_operand(w)
    assert found["(model)", "x"].amax == 3.0
    assert found["(model)", "x"].elements == 32 * 16
    assert (found["(model)", "x"].scale_min, found["(model)", "x"].scale_max) == (
        pytest.approx(2 / 448),
        pytest.approx(3 / 448),
    )
    assert found["(model)", "w"].elements == 2 * 16 * 16
    assert w.log.steps[0].gemms == {"(model)": {"fprop": 2, "wgrad": 2}}


def test_weight_casts_that_are_kept_over_microbatches():
    model = float8lab.Linear(16, 16, device="cpu")
    with watch(model) as w:
        for first in (True, False):
            with float8lab.autocast(recipe=RECIPES["current"]):
                model(torch.ones(16, 16), is_first_microbatch=first).sum().backward()
    found = by_operand(w)["(model)", "w"]
    assert (found.elements, found.amax) == (512, model.weight.abs().max().item())


class Checkpointed(nn.Module):
    def __init__(self, inner, how):
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, x):
        if self.how == "library":
            return float8lab.checkpoint(self.inner, x)
        if self.how == "selective":
            return checkpoint(
                self.inner, x, use_reentrant=False, context_fn=lambda: contexts(save_mm)
            )
        return checkpoint(self.inner, x, use_reentrant=self.how == "reentrant")


def contexts(policy):
    return create_selective_checkpoint_contexts(policy)


def save_mm(ctx, op, *args, **kwargs):
    kept = ("scaled_mm", "aten.amax", "aten.bincount", "aten.mul", "aten.abs")
    keeps = any(name in str(op) for name in kept)
    return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant", "library", "selective"])
@pytest.mark.parametrize("recipe", [DELAYED, RECIPES["rowwise"]], ids=["delayed", "rowwise"])
def test_recomputed_forwards_are_not_recorded(recipe, how):
    logs = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        inner = make(recipe)
        model = nn.Sequential(Checkpointed(inner, how) if checkpointed else inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 48, requires_grad=True)
        with watch(model) as w:
            train(model, x, 2, optimizer=optimizer)
        logs.append(w.log)
    plain, again = logs
    names = [record.layer.replace("inner.", "") for record in again.records]
    assert names == [record.layer for record in plain.records]
    values = [[vars(r) | {"layer": ""} for r in log.records] for log in logs]
    assert values[0] == values[1]
    assert [s.step for s in again.steps] == [0, 1]
    expected = {"fprop": 1, "dgrad": 1, "wgrad": 1}
    counts = again.steps[0].gemms["0.inner.0"]
    recomputed = counts.pop("fprop, recomputed", 0)
    assert counts == expected
    assert recomputed == 1


def test_recomputation_inside_a_module():
    model = float8lab.LayerNormMLP(32, 48, device="cpu", checkpoint=True)
    with watch(model) as w, float8lab.autocast(recipe=DELAYED):
        model(torch.randn(16, 32)).sum().backward()
    assert [(r.layer, r.operand) for r in w.log.records] == [
        (layer, operand) for layer in ("fc1", "fc2") for operand in ("x", "w", "dy")
    ]
    assert w.log.steps[0].gemms["fc1"]["fprop, recomputed"] == 1


def test_an_optimizers_steps_count_until_the_first_call():
    model = make()
    x = torch.randn(16, 48)
    optimizer, other = (
        torch.optim.SGD(parameters, lr=0.1)
        for parameters in (model.parameters(), [nn.Parameter(torch.ones(1))])
    )
    with watch(model) as w:
        for _ in range(2):
            for _ in range(3):  # gradient accumulation
                model(x).sum().backward()
            other.step()
            optimizer.step()
    assert [s.gemms["0"]["fprop"] for s in w.log.steps] == [3, 3]
    with watch(model) as w:
        for i in range(3):
            model(x).sum().backward()
            optimizer.step()
            w.step(float(i))
    assert [(s.step, s.loss, s.gemms["0"]["fprop"]) for s in w.log.steps] == [
        (i, float(i), 1) for i in range(3)
    ]
    with watch(model) as w:
        for i in range(3):
            model(x).sum().backward()
            w.step(i)  # before the optimizer
            optimizer.step()
    assert [(s.step, s.loss) for s in w.log.steps] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_every_and_the_losses_between():
    model = make()
    with watch(model, every=3) as w:
        for i in range(7):
            with Ops() as ops:
                loss = model(torch.randn(16, 48)).sum()
                loss.backward()
            assert not any("bincount" in op for op in ops.names)  # modes do not see it
            assert (PROCESS.observer is w) is (i % 3 == 0)
            w.step(loss)
    assert [s.step for s in w.log.steps] == list(range(7))
    assert all(s.loss is not None for s in w.log.steps)
    assert [s.step for s in w.log.steps if s.gemms] == [0, 3, 6]
    assert list(dict.fromkeys(r.step for r in w.log.records)) == [0, 3, 6]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, ["0", "2"]),
        ("0", ["0"]),
        (["2", "nothing"], ["2"]),
        ("*", ["0", "2"]),
        (lambda name: name == "2", ["2"]),
    ],
)
def test_layers(layers, expected):
    model = make()
    with watch(model, layers=layers) as w:
        train(model, torch.randn(16, 48))
    assert w.log.layers == expected == list(dict.fromkeys(r.layer for r in w.log.records))
    assert list(w.log.steps[0].gemms) == expected


def test_evaluation_is_left_out_of_training():
    model = make()
    with watch(model) as w:
        model.eval()
        with torch.no_grad():
            model(torch.randn(16, 48))
        model.train()
    assert w.log.records == []
    assert w.log.steps == []
    model.eval()
    with watch(model) as w, torch.no_grad():
        model(torch.randn(16, 48))
    assert [r.operand for r in w.log.records] == ["x", "w", "x", "w"]


def test_what_was_seen_before_an_error_is_kept(tmp_path):
    model, path = make(), tmp_path / "log.jsonl"

    def run():
        with watch(model, jsonl=path) as w:
            train(model, torch.randn(16, 48), 2, w)
            model(torch.randn(16, 48))
            # As much as a crash would leave.
            assert Log.from_jsonl(path) == w.log
            assert len(w.log.steps) == 2
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        run()
    assert PROCESS.observer is None
    assert [s.step for s in Log.from_jsonl(path).steps] == [0, 1, 2]


def test_what_it_refuses():
    model = make()
    with pytest.raises(ValueError, match="every must be an integer of at least 1; got 0"):
        watch(model, every=0)
    with pytest.raises(ValueError, match="layers must mean a layer that can run in FP8"):
        watch(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="layers must mean a layer that can run in FP8; got 'no'"):
        watch(model, layers="no")
    with watch(model) as w:
        with pytest.raises(RuntimeError, match="watch must not be entered again"):
            w.__enter__()
        with pytest.raises(RuntimeError, match="watch must be the only one"):
            watch(model).__enter__()
        assert PROCESS.observer is w


def hooks_of(model):
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = [len(getattr(m, name)) for m in model.modules() for name in names]
    hooks = torch.nn.modules.module
    everywhere = [
        len(hooks._global_forward_hooks),
        len(hooks._global_forward_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
    ]
    return on_modules, everywhere, [len(p._backward_hooks or ()) for p in model.parameters()]


@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL.keys())
def test_nothing_runs_before_after_and_between(recipe):
    model = nn.Sequential(
        make(recipe), float8lab.LayerNormMLP(20, 32, device="cpu"), nn.Linear(20, 4)
    )
    x = torch.randn(16, 48)

    def run():
        with float8lab.autocast(recipe=recipe):
            model(x).sum().backward()

    run()  # makes slots, and gradients

    def ops(mode):
        with mode:
            run()
        return mode.names

    before, hooks = ops(Ops()), hooks_of(model)
    attributes = [set(vars(m)) for m in model.modules()]
    with watch(model, every=2) as w:
        assert hooks_of(model)[0] == hooks[0]
        run()
        w.step()
        between = ops(Ops())
        w.step()
    assert w.log.records
    assert before == between == ops(Ops())
    assert hooks_of(model) == hooks
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert PROCESS.observer is None


def kernels_of(call, *args):
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call(*args)
        torch.cuda.synchronize()
    return sorted(e.name for e in profile.events() if e.device_type.name == "CUDA")


@pytest.mark.gpu
def test_no_kernel_runs_before_and_after_on_a_gpu():
    model, x = make(DELAYED, device="cuda"), torch.randn(32, 48, device="cuda")

    train(model, x, 2)
    before = kernels_of(train, model, x)
    with watch(model):
        train(model, x)
    assert kernels_of(train, model, x) == before


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL.keys())
def test_a_gpu_is_waited_for_once_a_step(recipe):
    model, x = make(recipe, device="cuda"), torch.randn(32, 48, device="cuda")
    mlp = float8lab.LayerNormMLP(48, 64, device="cuda")
    both = nn.Sequential(mlp, model)

    def run():
        with float8lab.autocast(recipe=recipe):
            loss = both(x).square().mean()
        loss.backward()
        return loss

    run()
    with watch(both) as w:
        w.step(run())  # loads what loads at its first use
        with never_waiting():
            loss = run()
        w.step(loss)
    assert len(w.log.records) == 2 * 12


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ALL.values(), ids=ALL.keys())
def test_a_gpu_records_what_a_cpu_does(recipe):
    logs = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, x = make(recipe), torch.randn(33, 48)
        with watch(model.to(device)) as w:
            train(model, x.to(device), 2)
        logs.append([r for r in w.log.records if r.layer == "0" and r.operand != "dy"])
    for a, b in zip(*logs, strict=True):
        for name in ("amax", "scale_max", "saturated", "flushed", "subnormal", "exponents"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.sqnr == pytest.approx(b.sqnr, abs=1e-3)


class Graphs:
    """A backend that keeps the ops of the graphs that it is given, forward and backward."""

    def __init__(self):
        self.forward, self.traced = [], []

    def __call__(self, graph, inputs):
        self.forward.append([str(node.target) for node in graph.graph.nodes])

        def keep(traced, inputs):
            self.traced.append([str(node.target) for node in traced.graph.nodes])
            return make_boxed_func(traced)

        return aot_autograd(fw_compiler=keep, bw_compiler=keep)(graph, inputs)


@pytest.mark.parametrize(
    ("recipe", "passed"),
    [
        pytest.param(DELAYED, "compiled", id="delayed-compiled"),
        pytest.param(RECIPES["block"], "in place", id="block-in-place"),
        pytest.param(DELAYED, "plain", id="delayed-plain", marks=pytest.mark.slow),
    ],
)
def test_compiled_models(recipe, passed):
    def fresh():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, graphs = make(recipe), Graphs()
        if passed == "in place":
            model.compile(backend=graphs, fullgraph=True)
            return model, model, graphs
        return model, torch.compile(model, backend=graphs, fullgraph=True), graphs

    x = torch.randn(16, 48)
    _, compiled, alone = fresh()
    train(compiled, x)
    model, compiled, graphs = fresh()
    train(compiled, x)
    assert graphs.forward  # before the watch
    with watch(compiled if passed == "compiled" else model, every=2) as w:
        train(compiled, x, 4, w)
    train(compiled, x)
    # Compiled once, and to the same ops as where nobody watches.
    assert (graphs.forward, graphs.traced) == (alone.forward, alone.traced)
    assert w.log.layers == ["0", "2"]
    assert [(r.step, r.layer, r.operand) for r in w.log.records] == [
        (step, layer, operand)
        for step in (0, 2)
        for layer in ("0", "2")
        for operand in ("x", "w", "dy")
    ]


def test_models_compiled_under_watch():
    torch._dynamo.reset()
    x, graphs, after = torch.randn(16, 48), Graphs(), Graphs()
    model = make(DELAYED)
    with watch(model, every=2) as w:
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        train(compiled, x, 4, w)
    train(compiled, x, 2)
    assert (len(graphs.forward), len(w.log.records)) == (1, 12)
    torch._dynamo.reset()
    train(torch.compile(make(DELAYED), backend=after, fullgraph=True), x)
    assert (after.forward, after.traced) == (graphs.forward, graphs.traced)


def test_watched_steps_keep_the_state_of_compiled_delayed_scaling():
    states = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make(DELAYED)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 48)
        with watch(model, every=2) if watched else contextlib.nullcontext():
            train(compiled, x, 5, optimizer=optimizer)
        (slots,) = model[0]._fp8.slots.values()
        states.append([*model.parameters(), *slots.tensors().values()])
    for i, (a, b) in enumerate(zip(*states, strict=True)):
        if i != len(states[0]) - 7:  # "previous": kept for recomputations in graphs
            assert torch.equal(a, b), i


def test_the_stance_of_the_user_comes_back():
    model = make()
    stances = importlib.import_module("torch._dynamo.eval_frame")
    with torch.compiler.set_stance("fail_on_recompile"):
        with watch(model):
            assert stances._stance.stance == "force_eager"
        assert stances._stance.stance == "fail_on_recompile"


@pytest.fixture
def log():
    model = make(DELAYED)
    with watch(model) as w:
        train(model, torch.randn(16, 48), 2, w)
    return w


def test_jsonl_has_everything(log, tmp_path):
    path = tmp_path / "log.jsonl"
    log.to_jsonl(path)
    assert Log.from_jsonl(path) == log.log
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict: no NaN
    bad = Log(records=[Record(0, "a", "x", 1.0, math.inf, math.inf, 0, 0, 0, 0, 0, None, None, 1)])
    bad.steps.append(Step(0, math.nan))
    bad.to_jsonl(path)
    again = Log.from_jsonl(path)
    assert again.records == bad.records
    assert math.isnan(again.steps[0].loss)


def test_jsonl_that_was_cut_or_is_none(log, tmp_path):
    path = tmp_path / "log.jsonl"
    log.to_jsonl(path)
    text = path.read_text()
    path.write_text(text[:-20])
    cut = Log.from_jsonl(path)
    assert (cut.records, cut.steps) == (log.log.records, log.log.steps[:1])
    path.write_text("what\n" + text)
    with pytest.raises(ValueError, match=r"path must be a log as to_jsonl writes it.*line 1"):
        Log.from_jsonl(path)


def test_jsonl_while_training(tmp_path):
    model, path = make(), tmp_path / "log.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    float8lab.convert_to_float8(model)
    with watch(model, every=2, jsonl=path) as w:
        for i in range(4):
            loss = model(torch.randn(16, 48)).sum()
            loss.backward()
            optimizer.step()
            w.step(loss)  # after the optimizer's has ended the first step
            assert Log.from_jsonl(path) == w.log
            assert w.log.steps[-1].loss == pytest.approx(loss.item())
            assert len(w.log.steps) == i + 1
    assert w.log.conversion == str(float8lab.conversion_report(model))
    assert w.log.about["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"


def test_table(log):
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=100, record=True, file=io.StringIO())
    console.print(log.table())
    text = console.export_text()
    assert "step 1, loss" in text
    assert "DelayedScaling" in text
    assert [row[0] for row in log.table().rows if "fprop" in row[-1]] == ["0", "2"]
    assert "fprop" in str(log.table())  # without rich
    x = by_operand(log, 1)["0", "x"]
    assert f"{x.staleness:+.2f}" in text
    assert f"{x.sqnr:.1f}" in text
    assert log.table(0).title.startswith("step 0")
    with pytest.raises(ValueError, match=r"step must be one that was watched, of \[0, 1\]; got 5"):
        log.table(5)


def test_to_pandas(log):
    pytest.importorskip("pandas")
    frame = log.to_pandas()
    assert len(frame) == len(log.log.records)
    x = frame[(frame.layer == "2") & (frame.operand == "dy") & (frame.step == 1)].iloc[0]
    assert x.amax == by_operand(log, 1)["2", "dy"].amax
    assert x.loss == log.log.steps[1].loss


SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-7, 3e4]


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 32), (128, 128), (5, 3)], ids=str)
def test_a_gpu_measures_in_few_launches_what_torch_does(block):
    shapes = (999, 1001), (33, 48), (4096, 512), (1, 7)  # odd, aligned, in many tiles, and small
    dtypes = torch.float64, torch.float32, torch.bfloat16, torch.float16
    for number, (shape, dtype) in enumerate(itertools.product(shapes, dtypes)):
        data = torch.randint(256, shape, dtype=torch.uint8, device="cuda")
        scale = torch.rand(scale_shape(shape, block), device="cuda")
        x = torch.randn(shape, device="cuda").mul_(50).to(dtype)
        x[0, : len(SPECIAL)] = torch.tensor(SPECIAL, dtype=dtype)
        if number % 3 == 0:
            x = x.t().contiguous().t()
        call = x, data.view((E4M3, E5M2)[number % 2]), scale, block
        expected = torch.cat(measure._numbers_by_torch(*call))
        first, second = (torch.cat(measure._numbers_of_cast(*call)) for _ in range(2))
        assert first.equal(second)
        squares = slice(259, 261)  # summed in another order
        torch.testing.assert_close(first[squares], expected[squares], rtol=1e-13, atol=0)
        first[squares] = expected[squares] = 0
        assert first.equal(expected)
    assert len(kernels_of(measure._numbers_of_cast, *call)) <= 5


def test_a_data_frame_without_pandas(log, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "pandas"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="to_pandas needs pandas"):
        log.to_pandas()


def test_a_step_outside_of_the_block_is_refused_and_begins_none():
    model = float8lab.convert_to_float8(nn.Linear(32, 32))
    found = watch(model)
    with found:
        model(torch.ones(2, 32))
    for refused in (found, watch(model)):
        with pytest.raises(RuntimeError, match=r"watch must be active for step\(\)"):
            refused.step()
    assert PROCESS.observer is None
    with found, pytest.raises(TypeError, match="loss must be None, a number or a tensor of one"):
        found.step("x")
