"""convert_to_float8: which layers it converts, what survives, and the conversion report."""

import copy
import io
import pickle
import types
import warnings

import expecttest
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import float8lab
from float8lab import recipes
from float8lab.nn.convert import report as reports
from float8lab.nn.convert import swap, walk
from float8lab.tensor import Float8Tensor
from tests.nn.models import gemms_of, report_of, states

BLOCK = recipes.Float8BlockScaling()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn = nn.Linear(width, width)
        self.attn2 = nn.Linear(width, width)


class Model(nn.Module):
    """Two blocks and a tied embedding."""

    def __init__(self, width=16, vocabulary=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block.attn2(torch.relu(block.attn(x)))
        return self.lm_head(x)


TOKENS = torch.arange(12).view(2, 6)


def converted_names(report):
    return [layer.name for layer in report.converted]


def warns_that_nothing_converts(reason=""):
    """Expects the warning of a conversion that converts nothing, with this reason."""
    return pytest.warns(
        UserWarning, match=rf"^convert_to_float8 (converted none|found no).*{reason}"
    )


def test_modules_parameters_and_optimizers_stay_the_same_objects():
    model = Model()
    parameters = dict(model.named_parameters())
    layers = dict(model.named_modules())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keys = list(model.state_dict())
    float8lab.convert_to_float8(model)
    assert dict(model.named_modules()) == layers  # the same objects
    assert all(p is parameters[n] for n, p in model.named_parameters())
    assert model.lm_head.weight is model.embed.weight
    assert list(model.state_dict()) == keys
    before = model.blocks[0].attn.weight.detach().clone()
    model(TOKENS).sum().backward()
    optimizer.step()
    assert not torch.equal(model.blocks[0].attn.weight, before)


def test_state_dicts_load_strictly_into_and_from_converted_models():
    plain, model = Model(), Model()
    float8lab.convert_to_float8(model, recipes.DelayedScaling())
    model(TOKENS).sum().backward()
    model.load_state_dict(plain.state_dict(), strict=True)
    plain.load_state_dict(model.state_dict(), strict=True)


def test_fp8_runs_by_default_and_obeys_autocast():
    model = Model()
    reference = copy.deepcopy(model)
    float8lab.convert_to_float8(model)
    assert gemms_of(model, TOKENS) == (5, 0)
    with float8lab.autocast(enabled=False):
        assert torch.equal(model(TOKENS), reference(TOKENS))


def test_conversion_walks_the_model_once_and_classifies_each_module_once(monkeypatch):
    model = Model()
    walks, classified = [], []
    named_modules, experts_class = nn.Module.named_modules, walk.experts_class

    def count_walks(module, *args, **kwargs):
        walks.extend([module] if module is model else [])
        return named_modules(module, *args, **kwargs)

    def count_modules(module):
        classified.append(module)
        return experts_class(module)

    monkeypatch.setattr(nn.Module, "named_modules", count_walks)
    monkeypatch.setattr(walk, "experts_class", count_modules)
    float8lab.convert_to_float8(model, recipes.DelayedScaling(), freeze_weights=True)
    assert len(walks) == 1
    assert len(classified) == len(set(classified))
    assert not any(isinstance(module, nn.Linear) for module in classified)  # their class is known


def test_a_second_conversion_changes_nothing_but_the_recipe():
    model = Model()
    first = report_of(model)
    layer = model.lm_head
    assert str(first) == str(report_of(model))
    assert model.lm_head is layer
    float8lab.convert_to_float8(model, BLOCK)
    assert model.lm_head._fp8.recipe == BLOCK


def test_to_high_precision_restores_the_model():
    model = Model()
    reference = copy.deepcopy(model)
    float8lab.convert_to_float8(model, recipes.DelayedScaling())
    model(TOKENS)
    assert float8lab.to_high_precision(model) is model
    assert type(model.lm_head) is nn.Linear
    assert vars(model.lm_head).keys() == vars(reference.lm_head).keys()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(model(TOKENS), reference(TOKENS))
    float8lab.convert_to_float8(model)
    assert isinstance(model.lm_head, float8lab.Linear)


def test_to_high_precision_keeps_a_hook_of_accelerate():
    """Such a hook replaces ``forward``, and calls the bound forward that it has kept."""
    layer = float8lab.convert_to_float8(nn.Linear(32, 16))
    layer._old_forward = layer.forward
    layer.forward = lambda x: layer._old_forward(2 * x)
    float8lab.to_high_precision(layer)
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), nn.functional.linear(2 * x, layer.weight, layer.bias))


def test_to_high_precision_dequantizes_stored_weights():
    with float8lab.fp8_model_init():
        model = nn.Sequential(*(float8lab.Linear(16, 16, device="cpu") for _ in range(2)))
    model[1].weight, value = model[0].weight, model[0].weight.dequantize()
    float8lab.to_high_precision(model)
    assert type(model[0]) is nn.Linear
    assert model[1].weight is model[0].weight
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, value)


def test_hooks_and_attributes_survive_conversion():
    layer = nn.Linear(16, 16)
    calls = []
    layer.register_forward_hook(lambda m, a, out: calls.append("forward"))
    layer.register_full_backward_hook(lambda m, gi, go: calls.append("backward"))
    layer.note = "mine"
    float8lab.convert_to_float8(layer)
    x = torch.randn(2, 16, requires_grad=True)
    (
        layer(x) - layer.forward(input=x)
    ).sum().backward()  # ``input`` is torch's name of the argument
    assert calls == ["forward", "backward"]
    assert layer.note == "mine"
    assert isinstance(layer, float8lab.Linear)  # a model may itself be a linear layer


class Halve(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_parametrizations_survive_conversion_and_can_be_removed():
    layer = nn.Linear(16, 16, bias=False)
    parametrize.register_parametrization(layer, "weight", Halve())
    float8lab.convert_to_float8(layer)
    x = torch.randn(4, 16)
    expected = nn.functional.linear(x, layer.weight)
    with float8lab.count_gemms() as counts:
        y = layer(x)
    assert counts.fp8 == 1
    assert (y - expected).norm() < 0.06 * expected.norm()
    y.sum().backward()
    assert layer.parametrizations.weight.original.grad is not None
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is float8lab.Linear
    float8lab.to_high_precision(layer)
    assert type(layer) is nn.Linear


def test_a_converted_layer_can_be_parametrized():
    layer = float8lab.convert_to_float8(nn.Linear(16, 16))
    weight_norm(layer)
    assert gemms_of(layer, torch.randn(4, 16)) == (1, 0)
    float8lab.to_high_precision(layer)
    assert not isinstance(layer, float8lab.Linear)
    assert parametrize.is_parametrized(layer)


class WithoutForward(nn.Linear):
    def reset_parameters(self):
        nn.init.ones_(self.weight)

    def extra_repr(self):
        return "mine"


def test_the_repr_shows_the_recipe_and_stored_weights():
    recipe = recipes.Float8CurrentScaling(amax_epsilon=1e-6)
    model = nn.Sequential(nn.Linear(64, 64), WithoutForward(64, 64), nn.Linear(64, 64))
    float8lab.convert_to_float8(model, recipe, overrides={"0": recipes.Float8CurrentScaling()})
    float8lab.convert_to_float8(model[2], BLOCK, freeze_weights=True)
    assert [repr(layer) for layer in model] == [
        "Linear(in_features=64, out_features=64, bias=True, recipe=Float8CurrentScaling())",
        "WithoutForward(mine, recipe=Float8CurrentScaling(amax_epsilon=1e-06))",
        "Linear(in_features=64, out_features=64, bias=True, recipe=Float8BlockScaling(), "
        "weight=e4m3 128x128)",
    ]
    float8lab.convert_to_float8(model, overrides={"0": None})
    assert repr(model[0]).endswith("bias=True, recipe=None)")
    float8lab.to_high_precision(model)
    assert repr(model[2]) == "Linear(in_features=64, out_features=64, bias=True)"


def test_the_repr_of_fused_modules_shows_the_recipe_and_stored_weights():
    """Before a conversion they follow autocast, and their repr has no recipe."""
    modules = (
        float8lab.LayerNormLinear(16, 16, device="cpu"),
        float8lab.LayerNormMLP(16, 16, device="cpu"),
        float8lab.GroupedLinear(2, 16, 16, device="cpu"),
        float8lab.ExpertMLP(2, 16, 16, device="cpu"),
    )
    for module in modules:
        assert "recipe" not in repr(module)
        float8lab.convert_to_float8(module, BLOCK, freeze_weights=True)
        recipe_text = repr(module).partition(", recipe=")[2]
        assert recipe_text.startswith("Float8BlockScaling(), weight=e4m3 "), recipe_text
        assert recipe_text.endswith("128x128)"), recipe_text
    # A weight that another module shares is not stored in FP8.
    shared = float8lab.LayerNormMLP(16, 16, device="cpu")
    model = nn.ModuleList([shared, nn.Embedding(16, 16)])
    model[1].weight = shared.fc1_weight
    float8lab.convert_to_float8(model, BLOCK, freeze_weights=True)
    assert repr(shared).endswith(", recipe=Float8BlockScaling(), fc2_weight=e4m3 128x128)")


class WithForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def test_subclasses_without_a_forward_are_converted_and_keep_their_methods():
    layer = float8lab.convert_to_float8(WithoutForward(8, 8, bias=False))
    assert isinstance(layer, WithoutForward)
    assert isinstance(layer, float8lab.Linear)
    assert gemms_of(layer, torch.randn(2, 8)) == (1, 0)
    layer.reset_parameters()
    assert torch.equal(layer.weight, torch.ones(8, 8))
    float8lab.to_high_precision(layer)
    assert type(layer) is WithoutForward


def test_subclasses_with_a_forward_are_skipped_unless_named():
    model = nn.Sequential(WithForward(8, 8), nn.Linear(8, 8))
    report = report_of(model)
    assert converted_names(report) == ["1"]
    assert type(model[0]) is WithForward
    assert report.skipped[0].note == (
        "WithForward has a forward of its own; name it in overrides to convert"
    )
    report = report_of(model, overrides={"0": recipes.Float8CurrentScaling()})
    assert converted_names(report) == ["0", "1"]


def test_a_layer_whose_forward_was_replaced_is_skipped():
    layer = nn.Linear(8, 8)
    layer.forward = lambda x: x
    with warns_that_nothing_converts("of 1: forward was replaced on the layer itself"):
        report = report_of(layer)
    assert report.skipped[0].note == "forward was replaced on the layer itself"


class Experts(nn.Module):
    """Stacked weights of experts, and parameters that only look like matrices."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 7, 16))
        self.table = nn.Parameter(torch.randn(7, 16))
        self.up = nn.Parameter(torch.randn(4, 32, 16))
        self.down = nn.Parameter(torch.randn(4, 16, 32))


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16))


def test_modules_with_gemms_of_their_own_parameters_are_reported_as_skipped():
    model = nn.ModuleDict(
        {
            "experts": Experts(), "router": Router(), "lstm": nn.LSTM(16, 16),
            "bilinear": nn.Bilinear(4, 5, 6), "conv": nn.Conv1d(4, 5, 3),
            "pointwise": nn.Conv2d(4, 5, 1), "norm": nn.LayerNorm([3, 4]),
            "embed": nn.Embedding(5, 6),
        }
    )  # fmt: skip
    with warns_that_nothing_converts():
        report = report_of(model)
    assert {layer.name: (layer.shape, layer.note) for layer in report.skipped} == {
        "experts": ((4, 32, 16), "no linear layer: Experts multiplies by its up, down itself"),
        "router": ((4, 16), "a router, which stays in high precision"),
        "lstm": (
            (64, 16),
            "no linear layer: LSTM multiplies by its weight_ih_l0, weight_hh_l0 itself",
        ),
        "bilinear": ((6, 4, 5), "no linear layer: Bilinear multiplies by its weight itself"),
        "pointwise": ((5, 4), "no linear layer: Conv2d multiplies by its weight itself"),
    }
    assert not report.converted
    assert "4 x 32 x 16" in str(report)
    with pytest.raises(ValueError, match=r"(?s)experts: no linear layer.*lstm"):
        float8lab.convert_to_float8(model, strict=True)
    names = [layer.name for layer in report.skipped]
    with warns_that_nothing_converts("excluded by"):
        float8lab.convert_to_float8(model, exclude=names, strict=True)


def test_lazy_and_float64_layers_are_skipped_with_the_reason():
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8))
    model[2].register_parameter("weight", None)
    with warns_that_nothing_converts():
        report = report_of(model, "auto")
    assert [layer.note for layer in report.skipped] == [
        "not initialised yet; run one batch first",
        "its weight is torch.float64",
        "its weight is None",
    ]


class Scaled(nn.Linear):
    """A subclass with its own constructor, attribute and method."""

    def __init__(self, width, *, factor):
        super().__init__(width, width)
        self.factor = factor

    def weight_norm(self):
        return self.factor * self.weight.norm()


class WithSubclasses(Model):
    class Inner(nn.Linear):
        """A class that pickle finds by its qualified name."""

    def __init__(self):
        super().__init__()
        self.blocks[0].attn = Scaled(16, factor=0.5)
        self.blocks[1].attn = self.Inner(16, 16)


@pytest.mark.parametrize("kind", [Model, WithSubclasses], ids=["linear", "subclasses"])
@pytest.mark.parametrize("duplicate", ["deepcopy", "pickle", "torch.save"])
def test_a_converted_model_can_be_copied(duplicate, kind, monkeypatch):
    model = float8lab.convert_to_float8(kind(), recipes.DelayedScaling())
    for _ in range(2):
        model(TOKENS).sum().backward()
    if duplicate == "deepcopy":
        twin = copy.deepcopy(model)
    elif duplicate == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        monkeypatch.setattr(swap, "_CLASSES", {nn.Linear: float8lab.Linear})  # as in a new process
        twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    if kind is WithSubclasses:
        layer = twin.blocks[0].attn
        assert isinstance(layer, (Scaled, float8lab.Linear))
        assert torch.equal(layer.weight_norm(), model.blocks[0].attn.weight_norm())
        high = float8lab.to_high_precision(copy.deepcopy(twin)).blocks
        assert [type(high[0].attn), type(high[1].attn)] == [Scaled, WithSubclasses.Inner]
    model.zero_grad()
    twin.zero_grad()
    for _ in range(2):
        assert torch.equal(model(TOKENS), twin(TOKENS))
        assert states(model) == states(twin)  # the scales advance in the same way
    twin(TOKENS)
    assert states(model) != states(twin)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("attn", {"blocks.0.attn", "blocks.1.attn"}),
        ("blocks.1", {"blocks.1.attn", "blocks.1.attn2"}),
        ("blocks.0.attn", {"blocks.0.attn"}),
        ("at", set()),
        ("head", set()),
        ("*head", {"lm_head"}),
        ("blocks.*", {"blocks.0.attn", "blocks.0.attn2", "blocks.1.attn", "blocks.1.attn2"}),
        ("*.attn?", {"blocks.0.attn2", "blocks.1.attn2"}),
        ("*.0.attn", {"blocks.0.attn"}),
    ],
)
def test_exclude_matches_components_of_names_or_globs(pattern, expected):
    report = report_of(Model(), exclude=[pattern])
    assert {layer.name for layer in report.skipped} == expected
    assert report.unmatched == (() if expected else (pattern,))


@pytest.mark.parametrize("option", ["exclude", "overrides"])
@pytest.mark.parametrize("pattern", ["first", "second", "second.0", "*.1.0"])
def test_a_shared_layer_is_matched_by_each_of_its_names(pattern, option):
    model = nn.ModuleDict({"first": nn.Sequential(nn.Linear(8, 8)), "last": nn.Linear(8, 8)})
    model["second"] = model["first"]
    model["more"] = nn.ModuleList([nn.Identity(), model["first"]])
    report = report_of(model, strict=True, **{option: {pattern: None}})
    assert [layer.name for layer in report.skipped] == ["first.0"]
    assert converted_names(report) == ["last"]


class Sealed(nn.Linear):
    def __init_subclass__(cls):
        raise TypeError("Sealed has no subclasses")


class Frozen(nn.Linear):
    def __setattr__(self, name, value):
        if name.startswith(("_fp8", "__")):
            raise AttributeError(f"Frozen has no {name}")
        super().__setattr__(name, value)


def test_a_layer_that_refuses_to_have_subclasses_leaves_the_model_unchanged():
    model = nn.Sequential(nn.Linear(8, 8), Sealed(8, 8))
    attributes = [set(vars(layer)) for layer in model]
    with pytest.raises(TypeError, match="Sealed has no subclasses"):
        float8lab.convert_to_float8(model)
    assert [type(layer) for layer in model] == [nn.Linear, Sealed]
    assert [set(vars(layer)) for layer in model] == attributes


def test_a_layer_that_refuses_attributes_is_converted_and_restored():
    model = nn.Sequential(Frozen(8, 8))
    assert converted_names(report_of(model, strict=True)) == ["0"]
    assert gemms_of(model, torch.ones(2, 8)) == (1, 0)
    assert type(float8lab.to_high_precision(model)[0]) is Frozen


def test_filter_fn_is_called_with_layer_and_name():
    model = Model()
    calls = []

    def without_attn2(layer, name):
        calls.append((name, layer.out_features))
        return "attn2" not in name

    report = report_of(model, filter_fn=without_attn2)
    assert converted_names(report) == ["blocks.0.attn", "blocks.1.attn", "lm_head"]
    assert ("lm_head", 32) in calls


def test_overrides_take_precedence_over_recipe_and_autocast():
    model = Model()
    overrides = {"blocks": BLOCK, "blocks.1": None, "lm_head": recipes.Float8RowwiseScaling()}
    report = report_of(model, overrides=overrides)
    notes = {layer.name: layer.note for layer in report.layers}
    assert notes["blocks.0.attn"] == "Float8BlockScaling()"
    assert notes["blocks.1.attn"] == "high precision by overrides"
    assert notes["lm_head"] == "Float8RowwiseScaling()"
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=recipes.DelayedScaling()):
        model(TOKENS)
    assert counts.fp8_by_module == {"blocks.0.attn": 1, "blocks.0.attn2": 1, "lm_head": 1}
    assert counts.high_precision_by_module == {"blocks.1.attn": 1, "blocks.1.attn2": 1}
    assert not model.blocks[
        0
    ].attn._fp8.slots  # no delayed state: the layer used the recipe of overrides


def test_overrides_with_none_turn_fp8_off_in_converted_layers():
    norm_linear = float8lab.LayerNormLinear(16, 16, device="cpu")
    model = nn.Sequential(norm_linear, nn.Linear(16, 16), nn.Linear(16, 16))
    float8lab.convert_to_float8(model)
    assert converted_names(report_of(model, overrides={"0": None, "1": None})) == ["2"]
    for recipe in (None, recipes.DelayedScaling()):
        with float8lab.autocast(recipe=recipe), float8lab.count_gemms() as counts:
            model(torch.randn(4, 16))
        assert counts.fp8_by_module == {"2": 1}
        assert counts.high_precision_by_module == {"0": 1, "1": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": "current"}, 'recipe must be one of float8lab.recipes, or "auto"; got \'cur'),
        ({"recipe": recipes.Auto}, 'recipe must be one of float8lab.recipes, or "auto"; got type'),
        ({"overrides": {"lm_head": 1}}, r"overrides\['lm_head'\] must be one of"),
    ],
)
def test_a_value_that_is_not_a_recipe_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        float8lab.convert_to_float8(Model(), **arguments)


def decoder_layer(width, mlp, device="meta"):
    """The linear layers of a Llama decoder layer with four query heads for each key."""
    shapes = {
        "q": (width, width), "k": (width // 4, width), "v": (width // 4, width),
        "o": (width, width), "gate": (mlp, width), "up": (mlp, width), "down": (width, mlp),
    }  # fmt: skip
    return nn.ModuleDict(
        {name: nn.Linear(K, N, bias=False, device=device) for name, (N, K) in shapes.items()}
    )


def test_auto_leaves_a_small_model_unchanged():
    model = Model()
    reference = copy.deepcopy(model)
    with warns_that_nothing_converts("of 4: bfloat16 is faster: 12 us"):
        float8lab.convert_to_float8(model, "auto", strict=True)
    assert converted_names(float8lab.conversion_report(model)) == []
    assert [type(m) for m in model.modules()] == [type(m) for m in reference.modules()]
    assert not model._forward_pre_hooks
    assert torch.equal(model(TOKENS), reference(TOKENS))


def test_auto_on_a_cpu_predicts_for_a_gpu_and_converts_a_large_layer():
    auto = recipes.Auto(mode="cuda_graph", candidates=(BLOCK,))
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 16))
    assert converted_names(report_of(model, auto)) == ["0"]
    assert model[0]._fp8.recipe == BLOCK
    assert not model[0]._fp8.pinned
    with float8lab.count_gemms() as counts:
        model(torch.randn(4, 2048)).sum().backward()
    assert counts.fp8_by_module == {"0": 2}  # the input needs no gradient
    float8lab.convert_to_float8(model, recipes.Auto(mode="cuda_graph"))
    assert model[0]._fp8.recipe == recipes.Auto().candidates[-1]  # delayed; each call is a region
    model(torch.randn(4, 2048))
    (slots,) = model[0]._fp8.slots.values()
    assert slots.tensors()["steps"].tolist() == [1, 1, 0]


def test_auto_depends_on_the_number_of_tokens():
    few, many = decoder_layer(4096, 14336), decoder_layer(4096, 14336)
    with warns_that_nothing_converts("bfloat16 is faster"):
        float8lab.convert_to_float8(few, recipes.Auto(tokens=32))
    assert converted_names(float8lab.conversion_report(few)) == []
    report = report_of(many, "auto")
    assert len(converted_names(report)) == 7
    assert str(report) == str(report_of(many, recipes.Auto(tokens=16384)))


def test_auto_decides_for_fused_modules():
    def make(D, F):
        norm = {"normalization": "RMSNorm", "bias": False, "device": "meta"}
        return nn.Sequential(
            float8lab.LayerNormLinear(D, F, **norm),
            float8lab.LayerNormMLP(F, 2 * F, activation="swiglu", **norm),
            float8lab.Linear(F, D, device="meta"),
        )

    small, large = make(256, 256), make(4096, 4096)
    with warns_that_nothing_converts("bfloat16 is"):
        float8lab.convert_to_float8(small, "auto")
    assert converted_names(float8lab.conversion_report(small)) == []
    report = report_of(large, "auto")
    assert converted_names(report) == ["0", "1", "2"]
    # The MLP's two GEMMs have 4 and 2 times as many operations as the GEMM of the first layer.
    first, mlp = (float(layer.note.split(": ")[1].split(" ms")[0]) for layer in report.layers[:2])
    assert 5.5 * first < mlp < 6.5 * first


def test_auto_includes_the_casts_of_all_experts():
    def report(experts, tokens, *candidates):
        model = nn.Sequential(experts)
        auto = recipes.Auto(tokens=tokens, mode="cuda_graph", candidates=candidates)
        return report_of(model, auto)

    rowwise = recipes.Float8RowwiseScaling()
    small = float8lab.ExpertMLP(128, 2048, 768, device="meta")
    with warns_that_nothing_converts("bfloat16 is faster: .*, Float8RowwiseScaling .* ms casts"):
        report(small, 8 * 32768, rowwise)
    block_report = report(small, 8 * 32768, rowwise, BLOCK)
    assert block_report.layers[0].note.startswith("Float8BlockScaling(): ")
    small.config = types.SimpleNamespace(num_experts_per_tok=8)
    assert report(small, 32768, BLOCK).layers[0].note == block_report.layers[0].note
    wide = float8lab.GroupedLinear(8, 7168, 2048, bias=False, device="meta")
    assert converted_names(report(wide, 32768, rowwise)) == ["0"]


def test_auto_turns_fp8_off_where_bfloat16_is_faster():
    model = nn.Sequential(nn.Linear(16, 16), float8lab.LayerNormLinear(16, 16, device="cpu"))
    float8lab.convert_to_float8(model)
    with warns_that_nothing_converts("bfloat16 is faster"):
        report = report_of(model, "auto")
    assert converted_names(report) == []
    assert gemms_of(model, torch.randn(4, 16)) == (0, 2)


def test_auto_may_be_an_override_of_single_layers():
    model = decoder_layer(4096, 14336)
    report = report_of(model, overrides={"k": "auto", "v": recipes.Auto(tokens=32), "q": None})
    notes = {layer.name: layer.note for layer in report.layers}
    assert notes["q"] == "high precision by overrides"
    assert notes["o"] == "Float8CurrentScaling()"
    assert notes["k"].startswith("bfloat16: DelayedScaling saves")  # one layer hides no CPU time
    assert notes["v"].startswith("bfloat16 is faster")
    assert [note.split(",")[1] for note in report.notes] == [" 16384 tokens", " 32 tokens"]


def test_auto_converts_nothing_without_fp8_gemms_on_the_device(monkeypatch):
    monkeypatch.setattr(reports, "may_multiply", lambda *blocks, **dtypes: False)
    with warns_that_nothing_converts("of 7: bfloat16: no recipe has FP8 GEMMs on its device"):
        model = float8lab.convert_to_float8(decoder_layer(4096, 14336), "auto")
    report = float8lab.conversion_report(model)
    assert converted_names(report) == []
    assert {layer.note for layer in report.layers} == {
        "bfloat16: no recipe has FP8 GEMMs on its device"
    }


FREEZE_RECIPES = [
    recipes.Float8CurrentScaling(), recipes.DelayedScaling(), recipes.Float8RowwiseScaling(), BLOCK,
    recipes.MXFP8BlockScaling(),
]  # fmt: skip


@pytest.mark.parametrize("recipe", FREEZE_RECIPES, ids=str)
def test_frozen_weights_are_the_casts_of_the_forward(recipe):
    model = nn.Sequential(nn.Linear(96, 160), nn.Linear(160, 33, bias=False))
    float8lab.convert_to_float8(model, recipe)
    x = torch.randn(5, 96)
    expected = model.eval()(x)
    bias = model[0].bias
    float8lab.convert_to_float8(model, recipe, freeze_weights=True, strict=True)
    for layer in model:
        assert layer.weight.spec == recipe.linear.w
        assert layer.weight.qdata.nbytes == layer.weight.numel()
        assert not layer.weight.requires_grad
    assert model[0].bias is bias
    assert bias.requires_grad
    with float8lab.count_gemms() as counts:
        assert torch.equal(model(x), expected)
    assert counts.fp8 == (0 if "MX" in str(recipe) else 2)
    before = [layer.weight for layer in model]
    float8lab.convert_to_float8(model, recipe, freeze_weights=True)
    assert all(layer.weight is weight for layer, weight in zip(model, before, strict=True))


def test_weights_of_fused_modules_and_split_parameters_are_frozen():
    model = nn.ModuleDict(
        {
            "mlp": float8lab.LayerNormMLP(32, 64, device="cpu"),
            "qkv": float8lab.Linear(32, 96, parameters_split=["q", "k", "v"], device="cpu"),
        }
    )
    float8lab.convert_to_float8(model, freeze_weights=True)
    stored = {name for name, p in model.named_parameters() if isinstance(p, Float8Tensor)}
    assert stored == {
        *("mlp.fc1_weight", "mlp.fc2_weight", "qkv.q_weight", "qkv.k_weight", "qkv.v_weight")
    }
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == stored


def test_shared_weights_are_frozen_once_or_stay_in_high_precision():
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)), nn.Embedding(32, 32))
    model[1].weight, model[2].weight = model[0].weight, model[4].weight
    weight = model[2].weight
    weight_norm(model[3])
    with pytest.warns(FutureWarning, match="weight_norm` is deprecated"):
        model.append(nn.utils.weight_norm(nn.Linear(32, 32)))
    report = report_of(model, freeze_weights=True)
    assert isinstance(model[0].weight, Float8Tensor)
    assert model[1].weight is model[0].weight
    assert model[2].weight is model[4].weight is weight
    assert weight.requires_grad
    assert report.notes == (
        "2: weight not stored in FP8: another module has it, too",
        "3: weight not stored in FP8: it is parametrized",
        "5: weight not stored in FP8: it is no parameter of the layer",
    )
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model[5].parameters())
    with pytest.raises(ValueError, match="2: weight not stored in FP8: another module has it"):
        float8lab.convert_to_float8(model, freeze_weights=True, strict=True)
    float8lab.convert_to_float8(model, exclude=["2", "3", "5"], freeze_weights=True, strict=True)


def test_low_rank_adapters_are_skipped_unless_named():
    def build():
        adapter = {"lora_A": nn.Linear(32, 4), "lora_B": nn.Linear(4, 32)}
        return nn.ModuleDict({"base": nn.Linear(32, 32), **adapter})

    model = build()
    report = report_of(model, strict=True)
    assert converted_names(report) == ["base"]
    assert {layer.note.split(",")[0] for layer in report.skipped} == {"low rank"}
    assert type(model["lora_A"]) is type(model["lora_B"]) is nn.Linear
    report = report_of(build(), overrides={"lora_A": BLOCK})
    assert converted_names(report) == ["base", "lora_A"]


def test_strict_raises_for_skipped_layers_and_leaves_the_model_unchanged():
    model = nn.Sequential(WithForward(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"0: WithForward has a forward") as error:
        float8lab.convert_to_float8(model, exclude=["nothing"], strict=True)
    assert "no layer is called 'nothing'" in str(error.value)
    assert type(model[1]) is nn.Linear
    assert converted_names(report_of(model, exclude=["0"], strict=True)) == ["1"]


def test_a_conversion_that_converts_nothing_warns_once():
    """It names the commonest reason and the caller's line; a model with FP8 attention converts."""
    model = nn.Sequential(nn.Linear(8, 8), WithForward(8, 8), WithForward(8, 8))
    reason = "WithForward has a forward of its own; name it in overrides to convert"
    with warnings.catch_warnings(record=True) as warnings_caught:
        warnings.simplefilter("always")
        float8lab.convert_to_float8(model, exclude=["0"])
        float8lab.convert_to_float8(model)
        float8lab.convert_to_float8(
            float8lab.DotProductAttention(2, 16), recipes.DelayedScaling(fp8_dpa=True)
        )
    assert [(w.category, w.filename, str(w.message)) for w in warnings_caught] == [
        (
            UserWarning,
            __file__,
            "convert_to_float8 converted none of the 3 linear layers of a Sequential; the "
            f"commonest reason, of 2: {reason}. conversion_report(model) has the reason of each.",
        )
    ]


def test_strict_raises_without_a_layer_to_convert():
    for model in (nn.Sequential(nn.ReLU(), nn.LayerNorm(8)), nn.Embedding(4, 8)):
        with warns_that_nothing_converts(rf"linear layer in a {type(model).__name__}\.$"):
            float8lab.convert_to_float8(model)
        with pytest.raises(ValueError, match=f"a {type(model).__name__} without a linear layer"):
            float8lab.convert_to_float8(model, strict=True)
    attention = float8lab.DotProductAttention(2, 16)
    float8lab.convert_to_float8(attention, recipes.DelayedScaling(fp8_dpa=True), strict=True)


class TestReports(expecttest.TestCase):
    def test_text_of_a_conversion_report(self):
        model = Model()
        report = report_of(
            model, recipes.MXFP8BlockScaling(), exclude=["lm_head", "lm_heads"],
            overrides={"blocks.1.attn": None, "blocks.0.attn2": BLOCK},
        )  # fmt: skip
        self.assertExpectedInline(
            str(report),
            """\
layer           out x in                                         share
blocks.0.attn   16 x 16   FP8      MXFP8BlockScaling()          17.0 %
blocks.0.attn2  16 x 16   FP8      Float8BlockScaling()         17.0 %
blocks.1.attn   16 x 16   skipped  high precision by overrides  17.0 %
blocks.1.attn2  16 x 16   FP8      MXFP8BlockScaling()          17.0 %
lm_head         32 x 16   skipped  excluded by 'lm_head'        32.0 %
3 of 5 linear layers in FP8, 51.0 % of 1,600 parameters
no layer is called 'lm_heads'
MXFP8BlockScaling(): cpu has no FP8 GEMM for fprop, dgrad, wgrad; they run in high precision""",
        )

    def test_text_of_an_auto_report(self):
        model = decoder_layer(4096, 14336)
        report = report_of(
            model,
            recipes.Auto(tokens=2048, candidates=(BLOCK, recipes.DelayedScaling())),
            overrides={"o": BLOCK},
        )
        self.assertExpectedInline(
            str(report),
            """\
layer  out x in                                                                           share
q      4096 x 4096   FP8      DelayedScaling(): 199 us (46 us casts), bfloat16 282 us     7.7 %
k      1024 x 4096   skipped  bfloat16: DelayedScaling saves 6 us GPU, costs 382 us CPU   1.9 %
v      1024 x 4096   skipped  bfloat16: DelayedScaling saves 6 us GPU, costs 382 us CPU   1.9 %
o      4096 x 4096   FP8      Float8BlockScaling()                                        7.7 %
gate   14336 x 4096  FP8      DelayedScaling(): 619 us (111 us casts), bfloat16 957 us   26.9 %
up     14336 x 4096  FP8      DelayedScaling(): 619 us (111 us casts), bfloat16 957 us   26.9 %
down   4096 x 14336  FP8      DelayedScaling(): 619 us (111 us casts), bfloat16 957 us   26.9 %
5 of 7 linear layers in FP8, 96.2 % of 218,103,808 parameters
predicted on Hopper, 2048 tokens, eager: 2.22 ms GPU, 2.09 ms CPU; bfloat16 3.31 ms, 0.56 ms""",
        )

    def test_text_of_an_auto_report_of_a_small_gpt(self):
        model = decoder_layer(512, 1536)
        with warns_that_nothing_converts(
            "of 3: bfloat16 is as fast: 113 us, DelayedScaling 111 us"
        ):
            report = report_of(model, "auto")
        self.assertExpectedInline(
            str(report),
            """\
layer  out x in                                                                                share
q      512 x 512   skipped  bfloat16 is faster: 45 us, DelayedScaling 58 us (29 us casts)      8.7 %
k      128 x 512   skipped  bfloat16 is faster: 26 us, DelayedScaling 44 us (22 us casts)      2.2 %
v      128 x 512   skipped  bfloat16 is faster: 26 us, DelayedScaling 44 us (22 us casts)      2.2 %
o      512 x 512   skipped  bfloat16 is faster: 45 us, DelayedScaling 58 us (29 us casts)      8.7 %
gate   1536 x 512  skipped  bfloat16 is as fast: 113 us, DelayedScaling 111 us (47 us casts)  26.1 %
up     1536 x 512  skipped  bfloat16 is as fast: 113 us, DelayedScaling 111 us (47 us casts)  26.1 %
down   512 x 1536  skipped  bfloat16 is as fast: 113 us, DelayedScaling 111 us (47 us casts)  26.1 %
0 of 7 linear layers in FP8, 0.0 % of 3,014,656 parameters
predicted on Hopper, 16384 tokens, eager: 0.48 ms GPU, 0.65 ms CPU; bfloat16 0.48 ms, 0.65 ms""",
        )

    def test_text_of_gemm_counts(self):
        model = float8lab.convert_to_float8(Model(), exclude=["lm_head"])
        with float8lab.count_gemms() as counts:
            model(TOKENS).sum().backward()
        self.assertExpectedInline(
            str(counts),
            """\
module             FP8  high precision
blocks.0.attn        3               0
blocks.0.attn2       3               0
blocks.1.attn        3               0
blocks.1.attn2       3               0
lm_head              0               3
total               12               3""",
        )


def test_reset_parameters_of_converted_layers_equals_torch():
    """Frameworks call reset_parameters after building a model on the meta device."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False)).to("meta")
    float8lab.convert_to_float8(model)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in model:
        layer.reset_parameters()
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8, bias=False))
    torch.testing.assert_close([*model.parameters()], [*expected.parameters()], rtol=0, atol=0)
