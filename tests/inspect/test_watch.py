"""Tests of ``watch``: it records each layer once and correctly, and adds nothing when inactive."""

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
RECIPES_WITH_DELAYED = RECIPES | {"delayed": DELAYED}


def converted_model(recipe=None, *, device="cpu"):
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


def records_of_step(w, step=0):
    return {(r.layer, r.operand): r for r in w.log.records if r.step == step}


def test_statistics_match_a_computation_by_hand():
    # The scale is 448 / 448 = 1. e4m3's smallest number is 2^-9; half of it and less becomes 0.
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False))
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([448.0, 1.0625, 0.0009, -0.002])
    with watch(model) as w:
        model(x)
    record = records_of_step(w)["(model)", "x"]
    signal = 448.0**2 + 1.0625**2 + 0.0009**2 + 0.002**2
    noise = 0.0625**2 + 0.0009**2 + (0.002 - 2**-9) ** 2  # 1.0625 is a tie; the even neighbour is 1
    assert record.sqnr == pytest.approx(10 * math.log10(signal / noise), abs=1e-5)
    assert record == Record(
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
        sqnr=record.sqnr,
        staleness=None,
        elements=16,
        exponents={8: 1, 0: 1, -9: 1},
        fp8_dtype="e4m3",
    )
    assert w.log.steps == [Step(0, None, {"(model)": {"fprop": 1}})]


@pytest.mark.parametrize("recompute", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("fp8_dpa", [False, True], ids=["high precision", "fp8_dpa"])
def test_fp8_attention_records_q_k_and_v(fp8_dpa, recompute):
    attention = float8lab.DotProductAttention(4, 16, attention_dropout=0.0)
    recipe = recipes.DelayedScaling(fp8_dpa=fp8_dpa)
    q, k, v = (torch.randn(5, 2, 4, 16, requires_grad=True) for _ in range(3))
    model = nn.ModuleDict({"core": attention, "proj": float8lab.Linear(64, 8, device="cpu")})
    with watch(model) as w:
        for _ in range(2):
            with float8lab.autocast(recipe=recipe):
                call = functools.partial(attention, attn_mask_type="no_mask")
                y = float8lab.checkpoint(call, q, k, v) if recompute else call(q, k, v)
                model["proj"](y).sum().backward()
            w.step()
    records = records_of_step(w, step=1)
    assert w.log.layers == (["core", "proj"] if fp8_dpa else ["proj"])
    assert [key for key in records if key[0] == "core"] == [("core", o) for o in "qkv" if fp8_dpa]
    for name, x in zip("qkv", (q, k, v), strict=True):
        if fp8_dpa:
            record = records["core", name]
            assert record.amax == x.abs().max()
            assert record.elements == x.numel()
            assert record.scale_max == 2.0 ** math.ceil(math.log2(record.amax / 448))
            assert record.staleness == pytest.approx(
                math.log2(record.amax / 448 / record.scale_max)
            )
            assert record.sqnr > 25
    assert w.log.steps[1].gemms == {"proj": {"fprop": 1, "dgrad": 1, "wgrad": 1}}


def test_nonfinite_values_are_counted_and_excluded_from_the_amax():
    model = nn.Linear(16, 16, bias=False)
    float8lab.convert_to_float8(model, recipes.Float8RowwiseScaling())
    x = torch.ones(4, 16)
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    x[1, 0] = 3.0
    dy = torch.ones(4, 16)
    dy[2, :2] = torch.tensor([torch.inf, torch.nan])
    with watch(model) as w:
        model(x).backward(dy)
    record = records_of_step(w)["(model)", "x"]
    assert (record.nan, record.inf, record.amax) == (1, 2, 3.0)
    # The amax of the rows of ones and of 3 is at the limit. Beside infinities the scale is 1.
    assert record.saturated == (1 + 16 + 16) / 64
    record = records_of_step(w)["(model)", "dy"]
    assert (record.nan, record.inf, record.amax) == (1, 1, 1.0)
    assert record.saturated == 14 * 4 / 64  # for dw each column has a scale


def test_empty_operands_have_no_record_and_exact_casts_no_sqnr():
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False))
    with watch(model) as w:
        model(torch.zeros(0, 16)).sum().backward()
    assert [r.operand for r in w.log.records] == ["w"]
    with watch(model) as w:
        model(torch.ones(3, 16))
    assert records_of_step(w)["(model)", "x"].sqnr is None


@pytest.mark.parametrize("shape", [(32, 48), (5, 7, 48)], ids=["aligned", "odd"])
@each_recipe
def test_records_equal_the_statistics_of_the_casts(recipe, shape):
    model = converted_model(recipe)
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
    records = records_of_step(w)
    assert set(records) == {(layer, o) for layer in "02" for o in ("x", "w", "dy")}
    for key, (original, spec) in originals.items():
        matrix = original.reshape(-1, original.shape[-1])
        t = float8lab.quantize(matrix, spec.fp8_dtype, block=spec.block, scale_rule=spec.scale_rule)
        expected, record = t.stats(matrix), records[key]
        for name in ("amax", "scale_min", "scale_max", "saturated", "flushed", "subnormal"):
            assert getattr(record, name) == getattr(expected, name), (key, name)
        assert record.sqnr == pytest.approx(expected.sqnr, abs=1e-9)
        assert record.elements == matrix.numel()
        h = t.histogram("exponent")
        counts = dict(zip(h.values.tolist(), h.counts.tolist(), strict=True))
        assert record.exponents == {e: n for e, n in counts.items() if n}
        assert record.staleness is None


def test_staleness_compares_delayed_scales_with_the_amax():
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False), DELAYED)
    with watch(model) as w:
        for factor in (7.0, 28.0, 14.0):
            model(torch.full((16, 16), factor)).sum().backward()
            w.step()
    x = [records_of_step(w, step)["(model)", "x"] for step in range(3)]
    # 7 = 448 / 64 without rounding. The second step still has that scale; the third has that of 28.
    assert [r.scale_max for r in x] == [1 / 64, 1 / 64, 1 / 16]
    assert [r.staleness for r in x] == [0.0, 2.0, -1.0]
    assert [r.saturated for r in x] == [1.0, 1.0, 0.0]
    assert w.log.recipe == repr(DELAYED)


@pytest.mark.parametrize("recipe", RECIPES_WITH_DELAYED.values(), ids=RECIPES_WITH_DELAYED.keys())
def test_watch_changes_no_parameter_and_no_scaling_state(recipe):
    results = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = converted_model(recipe)
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


@pytest.mark.parametrize("recipe", RECIPES_WITH_DELAYED.values(), ids=RECIPES_WITH_DELAYED.keys())
@pytest.mark.parametrize(("build", "layers"), MODULES.values(), ids=MODULES.keys())
def test_every_module_records_its_layers_and_gemms(build, layers, recipe):
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


@pytest.mark.parametrize("recipe", RECIPES_WITH_DELAYED.values(), ids=RECIPES_WITH_DELAYED.keys())
def test_operands_computed_inside_a_cast_are_recorded(recipe):
    model = float8lab.LayerNormMLP(32, 48, device="cpu", activation="relu")
    x = torch.randn(16, 32)
    with watch(model) as w, float8lab.autocast(recipe=recipe):
        model(x).sum().backward()
    normed = F.layer_norm(x, (32,), model.layer_norm_weight, model.layer_norm_bias)
    records = records_of_step(w)
    assert records["fc1", "x"].amax == pytest.approx(normed.abs().max().item(), rel=1e-6)
    assert records["fc1", "x"].elements == 16 * 32
    hidden = F.linear(normed, model.fc1_weight, model.fc1_bias).relu()
    # fc1 itself runs in FP8.
    assert records["fc2", "x"].amax == pytest.approx(hidden.abs().max().item(), rel=0.1)
    assert records["fc2", "x"].sqnr > 20
    assert records["fc1", "dy"].elements == records["fc2", "x"].elements == 16 * 48
    assert records["fc2", "dy"].amax == 1.0
    # The gradient of the activation is not written to memory either.
    assert records["fc1", "dy"].sqnr > 20


def test_gemms_in_high_precision_are_counted_separately():
    for override, gemms in (
        ((True, False, False), {"fprop, high precision": 1, "dgrad": 1, "wgrad": 1}),
        ((False, True, False), {"fprop": 1, "dgrad, high precision": 1, "wgrad": 1}),
        ((False, False, True), {"fprop": 1, "dgrad": 1, "wgrad, high precision": 1}),
    ):
        for recipe in (recipes.Float8CurrentScaling, recipes.Float8RowwiseScaling):
            model = nn.Sequential(nn.Linear(32, 32))
            float8lab.convert_to_float8(model, recipe(override_linear_precision=override))
            with watch(model) as w:
                model(torch.randn(16, 32, requires_grad=True)).sum().backward()
            assert w.log.steps[0].gemms == {"0": gemms}
            # Each operand is still cast for at least one of the other two GEMMs.
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
    records = records_of_step(w)
    assert records["q", "x"].amax == records["k", "x"].amax
    assert len(records) == 9


@each_recipe
def test_records_of_fp8_weights(recipe):
    with float8lab.fp8_model_init(recipe=recipe):
        model = float8lab.Linear(40, 24, device="cpu")
    with watch(model) as w, float8lab.autocast(recipe=recipe):
        model(torch.randn(16, 40)).sum().backward()
    record, expected = records_of_step(w)["(model)", "w"], model.weight.stats()
    for name in ("scale_min", "scale_max", "saturated", "subnormal"):
        assert getattr(record, name) == getattr(expected, name)
    assert record.amax == model.weight.dequantize().abs().max().item()
    assert (record.stored, record.sqnr, record.flushed, record.elements) == (True, None, 0.0, 960)
    other = recipes.Float8BlockScaling() if recipe.linear.w.per_tensor else RECIPES["current"]
    with (
        watch(model) as w,
        float8lab.autocast(recipe=other),
        pytest.warns(UserWarning, match="is stored as .* and cast to "),
    ):
        model(torch.randn(16, 40))
    record = records_of_step(w)["(model)", "w"]
    assert not record.stored
    assert record.amax == model.weight.dequantize().abs().max().item()


@each_recipe
def test_fp8_weights_are_compared_with_their_masters(recipe):
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
            records = records_of_step(w, step)
            for name, master, stats in zip("01", masters, expected, strict=True):
                record = records[name, "w"]
                assert record.stored
                assert record.amax == master.abs().max()
                assert record.scale_max == stats.scale_max  # of the weight in this step
                assert record.sqnr == pytest.approx(stats.sqnr)
                assert 20 < record.sqnr < 40
    assert [s.step for s in w.log.steps] == [0, 1]


def test_casts_of_one_step_are_combined_into_one_record():
    model = float8lab.convert_to_float8(nn.Linear(16, 16, bias=False))
    batches = [torch.full((8, 16), 2.0), torch.full((24, 16), 3.0)]
    with watch(model) as w:
        for x in batches:
            model(x).sum().backward()
    records = records_of_step(w)
    assert records["(model)", "x"].amax == 3.0
    assert records["(model)", "x"].elements == 32 * 16
    assert (records["(model)", "x"].scale_min, records["(model)", "x"].scale_max) == (
        pytest.approx(2 / 448),
        pytest.approx(3 / 448),
    )
    assert records["(model)", "w"].elements == 2 * 16 * 16
    assert w.log.steps[0].gemms == {"(model)": {"fprop": 2, "wgrad": 2}}


def test_cached_weight_casts_are_recorded_in_each_microbatch():
    model = float8lab.Linear(16, 16, device="cpu")
    with watch(model) as w:
        for first in (True, False):
            with float8lab.autocast(recipe=RECIPES["current"]):
                model(torch.ones(16, 16), is_first_microbatch=first).sum().backward()
    record = records_of_step(w)["(model)", "w"]
    assert (record.elements, record.amax) == (512, model.weight.abs().max().item())


class Checkpointed(nn.Module):
    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind = inner, kind

    def forward(self, x):
        if self.kind == "library":
            return float8lab.checkpoint(self.inner, x)
        if self.kind == "selective":
            return checkpoint(
                self.inner, x, use_reentrant=False, context_fn=lambda: contexts(save_mm)
            )
        return checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")


def contexts(policy):
    return create_selective_checkpoint_contexts(policy)


def save_mm(ctx, op, *args, **kwargs):
    saved_ops = ("scaled_mm", "aten.amax", "aten.bincount", "aten.mul", "aten.abs")
    is_saved = any(name in str(op) for name in saved_ops)
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant", "library", "selective"])
@pytest.mark.parametrize("recipe", [DELAYED, RECIPES["rowwise"]], ids=["delayed", "rowwise"])
def test_recomputed_forwards_are_not_recorded(recipe, kind):
    logs = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        inner = converted_model(recipe)
        model = nn.Sequential(Checkpointed(inner, kind) if is_checkpointed else inner)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 48, requires_grad=True)
        with watch(model) as w:
            train(model, x, 2, optimizer=optimizer)
        logs.append(w.log)
    plain_log, checkpointed_log = logs
    names = [record.layer.replace("inner.", "") for record in checkpointed_log.records]
    assert names == [record.layer for record in plain_log.records]
    values = [[vars(r) | {"layer": ""} for r in finished_watch.records] for finished_watch in logs]
    assert values[0] == values[1]
    assert [s.step for s in checkpointed_log.steps] == [0, 1]
    expected = {"fprop": 1, "dgrad": 1, "wgrad": 1}
    counts = checkpointed_log.steps[0].gemms["0.inner.0"]
    recomputed = counts.pop("fprop, recomputed", 0)
    assert counts == expected
    assert recomputed == 1


def test_recompute_inside_a_module_is_not_recorded():
    model = float8lab.LayerNormMLP(32, 48, device="cpu", checkpoint=True)
    with watch(model) as w, float8lab.autocast(recipe=DELAYED):
        model(torch.randn(16, 32)).sum().backward()
    assert [(r.layer, r.operand) for r in w.log.records] == [
        (layer, operand) for layer in ("fc1", "fc2") for operand in ("x", "w", "dy")
    ]
    assert w.log.steps[0].gemms["fc1"]["fprop, recomputed"] == 1


def test_optimizer_steps_end_a_step_until_step_is_called():
    model = converted_model()
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
            w.step(i)  # before the optimizer's step
            optimizer.step()
    assert [(s.step, s.loss) for s in w.log.steps] == [(0, 0.0), (1, 1.0), (2, 2.0)]


def test_every_skips_records_but_keeps_all_losses():
    model = converted_model()
    with watch(model, every=3) as w:
        for i in range(7):
            with Ops() as ops:
                loss = model(torch.randn(16, 48)).sum()
                loss.backward()
            # Dispatch modes do not see the ops of the watch.
            assert not any("bincount" in op for op in ops.names)
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
def test_layers_selects_layers_by_name(layers, expected):
    model = converted_model()
    with watch(model, layers=layers) as w:
        train(model, torch.randn(16, 48))
    assert w.log.layers == expected == list(dict.fromkeys(r.layer for r in w.log.records))
    assert list(w.log.steps[0].gemms) == expected


def test_evaluation_is_recorded_only_if_the_watch_begins_in_evaluation():
    model = converted_model()
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


def test_steps_before_an_error_are_kept(tmp_path):
    model, path = converted_model(), tmp_path / "log.jsonl"

    def run():
        with watch(model, jsonl=path) as w:
            train(model, torch.randn(16, 48), 2, w)
            model(torch.randn(16, 48))
            # A crash here would leave the same file.
            assert Log.from_jsonl(path) == w.log
            assert len(w.log.steps) == 2
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        run()
    assert PROCESS.observer is None
    assert [s.step for s in Log.from_jsonl(path).steps] == [0, 1, 2]


def test_invalid_arguments_raise():
    model = converted_model()
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
    module_hooks = [len(getattr(m, name)) for m in model.modules() for name in names]
    hooks = torch.nn.modules.module
    global_hooks = [
        len(hooks._global_forward_hooks),
        len(hooks._global_forward_pre_hooks),
        len(optimizers._global_optimizer_post_hooks),
    ]
    return module_hooks, global_hooks, [len(p._backward_hooks or ()) for p in model.parameters()]


@pytest.mark.parametrize("recipe", RECIPES_WITH_DELAYED.values(), ids=RECIPES_WITH_DELAYED.keys())
def test_no_op_and_no_hook_is_added_outside_watched_steps(recipe):
    model = nn.Sequential(
        converted_model(recipe), float8lab.LayerNormMLP(20, 32, device="cpu"), nn.Linear(20, 4)
    )
    x = torch.randn(16, 48)

    def run():
        with float8lab.autocast(recipe=recipe):
            model(x).sum().backward()

    run()  # creates slots and gradients

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
        unwatched_step = ops(Ops())
        w.step()
    assert w.log.records
    assert before == unwatched_step == ops(Ops())
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
def test_no_gpu_kernel_is_added_after_a_watch():
    model, x = converted_model(DELAYED, device="cuda"), torch.randn(32, 48, device="cuda")

    train(model, x, 2)
    before = kernels_of(train, model, x)
    with watch(model):
        train(model, x)
    assert kernels_of(train, model, x) == before


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES_WITH_DELAYED.values(), ids=RECIPES_WITH_DELAYED.keys())
def test_the_gpu_is_synchronized_once_a_step(recipe):
    model, x = converted_model(recipe, device="cuda"), torch.randn(32, 48, device="cuda")
    mlp = float8lab.LayerNormMLP(48, 64, device="cuda")
    model_with_mlp = nn.Sequential(mlp, model)

    def run():
        with float8lab.autocast(recipe=recipe):
            loss = model_with_mlp(x).square().mean()
        loss.backward()
        return loss

    run()
    with watch(model_with_mlp) as w:
        w.step(run())  # the first step may load kernels
        with never_waiting():
            loss = run()
        w.step(loss)
    assert len(w.log.records) == 2 * 12


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES_WITH_DELAYED.values(), ids=RECIPES_WITH_DELAYED.keys())
def test_a_gpu_and_a_cpu_record_the_same(recipe):
    logs = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model, x = converted_model(recipe), torch.randn(33, 48)
        with watch(model.to(device)) as w:
            train(model, x.to(device), 2)
        logs.append([r for r in w.log.records if r.layer == "0" and r.operand != "dy"])
    for a, b in zip(*logs, strict=True):
        for name in ("amax", "scale_max", "saturated", "flushed", "subnormal", "exponents"):
            assert getattr(a, name) == getattr(b, name), name
        assert a.sqnr == pytest.approx(b.sqnr, abs=1e-3)


class RecordingBackend:
    """A compile backend that records the ops of its graphs, forward and backward."""

    def __init__(self):
        self.forward, self.traced = [], []

    def __call__(self, graph, inputs):
        self.forward.append([str(node.target) for node in graph.graph.nodes])

        def record_graph(traced, inputs):
            self.traced.append([str(node.target) for node in traced.graph.nodes])
            return make_boxed_func(traced)

        return aot_autograd(fw_compiler=record_graph, bw_compiler=record_graph)(graph, inputs)


@pytest.mark.parametrize(
    ("recipe", "watched_model"),
    [
        pytest.param(DELAYED, "compiled", id="delayed-compiled"),
        pytest.param(RECIPES["block"], "in place", id="block-in-place"),
        pytest.param(DELAYED, "plain", id="delayed-plain", marks=pytest.mark.slow),
    ],
)
def test_a_watch_neither_recompiles_nor_changes_a_compiled_model(recipe, watched_model):
    def build_compiled():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, graphs = converted_model(recipe), RecordingBackend()
        if watched_model == "in place":
            model.compile(backend=graphs, fullgraph=True)
            return model, model, graphs
        return model, torch.compile(model, backend=graphs, fullgraph=True), graphs

    x = torch.randn(16, 48)
    _, compiled, reference = build_compiled()
    train(compiled, x)
    model, compiled, graphs = build_compiled()
    train(compiled, x)
    assert graphs.forward  # compiled before the watch
    with watch(compiled if watched_model == "compiled" else model, every=2) as w:
        train(compiled, x, 4, w)
    train(compiled, x)
    # The model is compiled once, and to the same ops as without a watch.
    assert (graphs.forward, graphs.traced) == (reference.forward, reference.traced)
    assert w.log.layers == ["0", "2"]
    assert [(r.step, r.layer, r.operand) for r in w.log.records] == [
        (step, layer, operand)
        for step in (0, 2)
        for layer in ("0", "2")
        for operand in ("x", "w", "dy")
    ]


def test_models_compiled_under_a_watch_have_the_same_graphs():
    torch._dynamo.reset()
    x, graphs, unwatched = torch.randn(16, 48), RecordingBackend(), RecordingBackend()
    model = converted_model(DELAYED)
    with watch(model, every=2) as w:
        compiled = torch.compile(model, backend=graphs, fullgraph=True)
        train(compiled, x, 4, w)
    train(compiled, x, 2)
    assert (len(graphs.forward), len(w.log.records)) == (1, 12)
    torch._dynamo.reset()
    train(torch.compile(converted_model(DELAYED), backend=unwatched, fullgraph=True), x)
    assert (unwatched.forward, unwatched.traced) == (graphs.forward, graphs.traced)


def test_watched_steps_keep_the_state_of_compiled_delayed_scaling():
    states = []
    for watched in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = converted_model(DELAYED)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(16, 48)
        with watch(model, every=2) if watched else contextlib.nullcontext():
            train(compiled, x, 5, optimizer=optimizer)
        (slots,) = model[0]._fp8.slots.values()
        states.append([*model.parameters(), *slots.tensors().values()])
    for i, (a, b) in enumerate(zip(*states, strict=True)):
        if i != len(states[0]) - 7:  # "previous" is kept for recomputation in graphs
            assert torch.equal(a, b), i


def test_the_compile_stance_of_the_user_is_restored():
    model = converted_model()
    stances = importlib.import_module("torch._dynamo.eval_frame")
    with torch.compiler.set_stance("fail_on_recompile"):
        with watch(model):
            assert stances._stance.stance == "force_eager"
        assert stances._stance.stance == "fail_on_recompile"


@pytest.fixture
def finished_watch():
    model = converted_model(DELAYED)
    with watch(model) as w:
        train(model, torch.randn(16, 48), 2, w)
    return w


def test_jsonl_round_trip_is_exact(finished_watch, tmp_path):
    path = tmp_path / "log.jsonl"
    finished_watch.to_jsonl(path)
    assert Log.from_jsonl(path) == finished_watch.log
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # strict JSON has no NaN
    bad = Log(records=[Record(0, "a", "x", 1.0, math.inf, math.inf, 0, 0, 0, 0, 0, None, None, 1)])
    bad.steps.append(Step(0, math.nan))
    bad.to_jsonl(path)
    checkpointed_log = Log.from_jsonl(path)
    assert checkpointed_log.records == bad.records
    assert math.isnan(checkpointed_log.steps[0].loss)


def test_truncated_jsonl_is_read_and_other_files_are_refused(finished_watch, tmp_path):
    path = tmp_path / "log.jsonl"
    finished_watch.to_jsonl(path)
    text = path.read_text()
    path.write_text(text[:-20])
    truncated = Log.from_jsonl(path)
    assert (truncated.records, truncated.steps) == (
        finished_watch.log.records,
        finished_watch.log.steps[:1],
    )
    for start in (b"what\n", b"\x80\n"):
        path.write_bytes(start + text.encode())
        with pytest.raises(ValueError, match=r"path must be a log as to_jsonl writes it.*line 1"):
            Log.from_jsonl(path)


def test_jsonl_is_complete_after_each_step(tmp_path):
    model, path = converted_model(), tmp_path / "log.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    float8lab.convert_to_float8(model)
    with watch(model, every=2, jsonl=path) as w:
        for i in range(4):
            loss = model(torch.randn(16, 48)).sum()
            loss.backward()
            optimizer.step()
            w.step(loss)  # the optimizer's step has already ended the first step
            assert Log.from_jsonl(path) == w.log
            assert w.log.steps[-1].loss == pytest.approx(loss.item())
            assert len(w.log.steps) == i + 1
    assert w.log.conversion == str(float8lab.conversion_report(model))
    assert w.log.about["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"


def test_table_shows_the_last_step_with_and_without_rich(finished_watch):
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=100, record=True, file=io.StringIO())
    console.print(finished_watch.table())
    text = console.export_text()
    assert "step 1, loss" in text
    assert "DelayedScaling" in text
    assert [row[0] for row in finished_watch.table().rows if "fprop" in row[-1]] == ["0", "2"]
    assert "fprop" in str(finished_watch.table())  # without rich
    x = records_of_step(finished_watch, 1)["0", "x"]
    assert f"{x.staleness:+.2f}" in text
    assert f"{x.sqnr:.1f}" in text
    assert finished_watch.table(0).title.startswith("step 0")
    with pytest.raises(ValueError, match=r"step must be one that was watched, of \[0, 1\]; got 5"):
        finished_watch.table(5)


def test_to_pandas_has_a_row_for_each_record(finished_watch):
    pytest.importorskip("pandas")
    frame = finished_watch.to_pandas()
    assert len(frame) == len(finished_watch.log.records)
    x = frame[(frame.layer == "2") & (frame.operand == "dy") & (frame.step == 1)].iloc[0]
    assert x.amax == records_of_step(finished_watch, 1)["2", "dy"].amax
    assert x.loss == finished_watch.log.steps[1].loss


SPECIAL = [math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-7, 3e4]


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 32), (128, 128), (5, 3)], ids=str)
def test_gpu_kernels_measure_the_same_as_torch_in_five_launches(block):
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
        squares = slice(259, 261)  # sums in another order
        torch.testing.assert_close(first[squares], expected[squares], rtol=1e-13, atol=0)
        first[squares] = expected[squares] = 0
        assert first.equal(expected)
    assert len(kernels_of(measure._numbers_of_cast, *call)) <= 5


def test_to_pandas_without_pandas_raises(finished_watch, monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "pandas"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="to_pandas needs pandas"):
        finished_watch.to_pandas()


def test_step_outside_the_block_raises():
    model = float8lab.convert_to_float8(nn.Linear(32, 32))
    inactive = watch(model)
    with inactive:
        model(torch.ones(2, 32))
    for inactive_watch in (inactive, watch(model)):
        with pytest.raises(RuntimeError, match=r"watch must be active for step\(\)"):
            inactive_watch.step()
    assert PROCESS.observer is None
    with inactive, pytest.raises(TypeError, match="loss must be None, a number or a tensor of one"):
        inactive.step("x")
