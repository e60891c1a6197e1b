"""``export`` writes the bytes that forwards use, in each format, with a complete config."""

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.inspect import checkpoint, diff
from float8lab.integrations import export, load_fp8
from float8lab.nn.precision import W
from float8lab.tensor import Float8Tensor
from tests.recorder import observing

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")

FORMATS = {
    "block-fp8": [
        recipes.Float8BlockScaling(), recipes.Float8BlockScaling(power_of_2_scale=True),
        recipes.Float8CurrentScaling(), recipes.DelayedScaling(),
    ],
    "compressed-tensors": [
        recipes.Float8BlockScaling(),
        recipes.Float8RowwiseScaling(),
        recipes.Float8CurrentScaling(power_of_2_scale=True),
        recipes.DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo="max"),
    ],
    "float8lab": [
        recipes.Float8BlockScaling(), recipes.Float8RowwiseScaling(),
        recipes.DelayedScaling(power_of_2_scale=False), recipes.MXFP8BlockScaling(),
    ],
}  # fmt: skip
CASES = [(name, recipe) for name, format_recipes in FORMATS.items() for recipe in format_recipes]


class WeightCasts:
    """Keeps the data and scales of the weights that forwards cast."""

    def __init__(self):
        self.casts = []

    def saw_cast(self, x, operand, spec, index, call):
        if index == W:
            rows, columns = x.shape
            self.casts.append((operand[0][:rows, :columns].clone(), operand[1].clone(), spec))

    def saw_gemm(self, *_):
        pass


def weight_casts_of_a_forward(model, x, recipe=None):
    """Return the weight casts of a forward in evaluation mode, in the order of the modules."""
    context = nullcontext() if recipe is None else float8lab.autocast(recipe=recipe)
    with observing(WeightCasts()) as observer, context:
        model.eval()(x)
    return observer.casts


def train(model, x, recipe=None, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for step in range(steps):
        optimizer.zero_grad()
        with nullcontext() if recipe is None else float8lab.autocast(recipe=recipe):
            loss = model(x * (step + 1)).square().mean()
        loss.backward()
        optimizer.step()


def read_safetensors(path):
    state = {}
    for file in sorted(path.glob("*.safetensors")):
        state |= safetensors.load_file(file)
    return state


def equal_bytes(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def expand(scale, spec, shape):
    for dim in (0, 1):
        size = shape[dim] if spec.block[dim] == -1 else spec.block[dim]
        scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale


def data_and_scales(state, name, format, spec, shape):
    """Return the FP8 data of a weight in a file, and a scale for each element."""
    if format == "float8lab":
        return state[f"{name}.qdata"], expand(state[f"{name}.scale"], spec, shape)
    if format == "block-fp8":
        block = float8lab.formats.Float8Spec(block=(128, 128))
        return state[name], expand(state[f"{name}_scale_inv"], block, shape)
    scale = state[f"{name}_scale"]
    return state[name], expand(scale.view(1, 1) if scale.ndim == 1 else scale, spec, shape)


def mlp(dtype=torch.float32):
    # 200 and 280 give blocks that the edge cuts, and padding of the operands
    return nn.Sequential(nn.Linear(256, 200), nn.GELU(), nn.Linear(200, 280, bias=False)).to(dtype)


@pytest.mark.parametrize(("format", "recipe"), CASES, ids=str)
@pytest.mark.parametrize("converted", [True, False])
def test_exported_weights_are_those_that_a_forward_casts(
    tmp_path, device, format, recipe, converted
):
    if converted:
        model = float8lab.convert_to_float8(mlp().to(device), recipe)
        autocast_recipe = None
    else:
        model = nn.Sequential(
            float8lab.Linear(256, 200, device=device),
            nn.GELU(),
            float8lab.Linear(200, 280, device=device),
        )
        autocast_recipe = recipe
    x = torch.randn(32, 256, device=device)
    train(model, x, autocast_recipe)
    with torch.no_grad():
        model[2].weight.mul_(8)  # delayed scales do not see this change yet
    export(model, tmp_path / "out", format, recipe=autocast_recipe)
    state = read_safetensors(tmp_path / "out")
    casts = weight_casts_of_a_forward(model, x, autocast_recipe)
    assert len(casts) == 2
    for index, (data, scale, spec) in zip((0, 2), casts, strict=True):
        data, scale = data.cpu(), scale.cpu()
        shape = tuple(data.shape)
        written, scales = data_and_scales(state, f"{index}.weight", format, spec, shape)
        assert equal_bytes(written, data)
        blocks = spec.scale_shape(shape)
        scale = scale.view(1, 1) if scale.numel() == 1 else scale[: blocks[0], : blocks[1]]
        assert torch.equal(scales, expand(scale, spec, shape))
    # A delayed recipe does not use the scale that the weight itself would give.
    own_cast = float8lab.quantize(
        model[2].weight.detach().cpu(), block=spec.block, scale_rule=spec.scale_rule
    )
    assert recipe.linear.delayed != torch.equal(
        scales, expand(own_cast.scale, spec, own_cast.shape)
    )


def test_exported_values_match_a_computation_by_hand(tmp_path):
    layer = nn.Linear(256, 128, bias=False)
    with torch.no_grad():
        layer.weight.zero_()
        layer.weight[0, 0], layer.weight[1, 1], layer.weight[0, 128] = 448.0, 3.1, -2.0
    export(layer, tmp_path / "out", "block-fp8")
    state = read_safetensors(tmp_path / "out")
    # 3.1 lies between 3.0 and 3.25. At a scale of 2 / 448, 2 is the largest FP8 value.
    assert torch.equal(state["weight_scale_inv"], torch.tensor([[1.0, 2.0 / 448.0]]))
    data = state["weight"].float()
    assert (data[0, 0], data[1, 1], data[0, 128]) == (448.0, 3.0, -448.0)
    assert data.count_nonzero() == 3


def test_fp8_weights_are_written_unchanged(tmp_path):
    with float8lab.fp8_model_init(recipe=recipes.Float8BlockScaling()):
        model = float8lab.Linear(300, 200, device="cpu", params_dtype=torch.bfloat16)
    weight = model.weight.detach()
    for format, scale in (
        ("block-fp8", "weight_scale_inv"),
        ("compressed-tensors", "weight_scale"),
    ):
        export(model, tmp_path / format, format)
        state = read_safetensors(tmp_path / format)
        assert equal_bytes(state["weight"], weight.qdata)
        assert torch.equal(state[scale], weight.scale)
        assert torch.equal(state["bias"], model.bias)
    export(model, tmp_path / "float8lab", "float8lab")
    state = read_safetensors(tmp_path / "float8lab")
    assert equal_bytes(state["weight.qdata"], weight.qdata)
    assert torch.equal(state["weight.amax"], weight.amax)


def test_only_layers_that_run_in_fp8_are_written_in_fp8(tmp_path):
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    override = {
        "1": None,
        "2": recipes.Float8BlockScaling(override_linear_precision=(True, False, False)),
    }
    float8lab.convert_to_float8(
        model, recipes.Float8BlockScaling(), exclude=["3"], overrides=override
    )
    report = export(model, tmp_path / "out")
    assert list(report.fp8) == ["0.weight"]
    assert report.high_precision == ("1", "2", "3")
    state = read_safetensors(tmp_path / "out")
    assert [state[f"{i}.weight"].dtype for i in range(4)] == [torch.float8_e4m3fn] + [
        torch.float32
    ] * 3
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["1", "2", "3"]


def test_stacked_experts_are_named_in_the_config(tmp_path):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(16, 4)
            self.experts = nn.Module()
            self.experts.up = nn.Parameter(torch.randn(4, 32, 16))

    report = export(Experts(), tmp_path / "out")
    assert report.high_precision == ("experts",)
    assert read_safetensors(tmp_path / "out")["experts.up"].dtype == torch.float32
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == ["experts"]


def test_a_weight_shared_with_an_embedding_stays_in_high_precision(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(128, 128)
            self.up = nn.Linear(128, 128)
            self.head = nn.Linear(128, 128, bias=False)
            self.head.weight = self.embed.weight

    report = export(Tied(), tmp_path / "out")
    assert list(report.fp8) == ["up.weight"]
    state = read_safetensors(tmp_path / "out")
    assert state["embed.weight"].dtype == torch.float32
    assert "head.weight" not in state  # one tensor has one name


def test_exclude_leaves_out_the_head_by_default(tmp_path):
    model = nn.ModuleDict({"up": nn.Linear(128, 128), "lm_head": nn.Linear(128, 128)})
    assert list(export(model, tmp_path / "a").fp8) == ["up.weight"]
    assert len(export(model, tmp_path / "b", exclude=()).fp8) == 2
    assert list(export(model, tmp_path / "c", exclude="up").fp8) == ["lm_head.weight"]


@pytest.mark.parametrize("split", [("query", "key", "value"), {"query": 256, "kv": 128}])
@pytest.mark.parametrize(
    "recipe",
    [recipes.DelayedScaling(), recipes.Float8BlockScaling(), recipes.Float8RowwiseScaling()],
)
def test_split_parameters_are_cast_as_one_weight(tmp_path, split, recipe):
    model = float8lab.LayerNormLinear(128, 384, parameters_split=split, device="cpu")
    x = torch.randn(16, 128)
    train(model, x, recipe)
    export(model, tmp_path / "out", "float8lab", recipe=recipe)
    state = read_safetensors(tmp_path / "out")
    ((data, scale, spec),) = weight_casts_of_a_forward(model, x, recipe)
    names = [name for name in state if name.endswith(".qdata")]
    order = [f"{name.removesuffix('_')}_weight" for name in split]
    assert sorted(names) == sorted(f"{name}.qdata" for name in order)
    assert equal_bytes(torch.cat([state[f"{n}.qdata"].view(torch.uint8) for n in order]), data)
    scales = [state[f"{n}.scale"] for n in order]
    if spec.per_tensor:
        assert all(torch.equal(s.view(1), scale.view(1)) for s in scales)
    else:
        assert torch.equal(torch.cat(scales), scale)


def test_split_parameters_that_blocks_would_cross_are_refused(tmp_path):
    model = float8lab.Linear(128, 192, parameters_split=("a", "b"), device="cpu")
    with pytest.raises(ValueError, match=r"multiple of 128 rows.*\[96, 96\]"):
        export(model, tmp_path / "out", recipe=recipes.Float8BlockScaling())


def test_a_transformer_layer_keeps_its_parameter_names(tmp_path):
    layer = float8lab.TransformerLayer(
        128, 256, 4, device="cpu", hidden_dropout=0.0, attention_dropout=0.0, activation="swiglu"
    )
    float8lab.convert_to_float8(layer, recipes.Float8CurrentScaling())
    report = export(layer, tmp_path / "out", "float8lab")
    assert sorted(report.fp8) == [
        "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight",
        "self_attention.layernorm_qkv.key_weight", "self_attention.layernorm_qkv.query_weight",
        "self_attention.layernorm_qkv.value_weight", "self_attention.proj.weight",
    ]  # fmt: skip
    plain = {name for name in layer.state_dict() if name not in report.fp8}
    parts = {f"{name}.{part}" for name in report.fp8 for part in ("qdata", "scale", "amax")}
    assert set(read_safetensors(tmp_path / "out")) == plain | parts


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        factors = {"q": 1.0, "k": 3.0, "v": 0.5, "o": 9.0, "gate": 2.0, "up": 5.0}
        for name, factor in factors.items():
            setattr(self, f"{name}_proj", nn.Linear(64, 64, bias=False))
            with torch.no_grad():
                getattr(self, f"{name}_proj").weight.mul_(factor)


def test_share_scales_gives_siblings_the_largest_scale(tmp_path):
    model = nn.ModuleDict({"a": Attention(), "b": Attention()})
    siblings = [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")]  # as readers fuse them
    recipe = recipes.Float8CurrentScaling()
    export(model, tmp_path / "out", "compressed-tensors", recipe=recipe, share_scales=siblings)
    state = read_safetensors(tmp_path / "out")
    for name in "ab":
        scales = [state[f"{name}.{n}_proj.weight_scale"] for n in (*"qkvo", "gate", "up")]
        weights = [getattr(model[name], f"{n}_proj").weight for n in "qkvo"]
        largest = torch.stack([w.abs().max() for w in weights[:3]]).max() / 448
        assert torch.equal(scales[0], scales[1])
        assert torch.equal(scales[0], scales[2])
        assert torch.allclose(scales[0], largest, rtol=1e-6)
        assert torch.equal(scales[4], scales[5])
        assert len({float(scale) for scale in scales}) == 3
        expected = float8lab.quantize(weights[0].detach(), scale=scales[0])
        assert equal_bytes(state[f"{name}.q_proj.weight"], expected.qdata)
    assert not torch.equal(state["a.q_proj.weight_scale"], state["b.q_proj.weight_scale"])


def test_siblings_that_cannot_share_a_scale_are_refused(tmp_path):
    siblings = [("q_proj", "k_proj")]
    with pytest.raises(ValueError, match="one scale for each weight"):
        export(Attention(), tmp_path / "out", share_scales=siblings)
    with float8lab.fp8_model_init():
        stored = nn.ModuleDict({f"{n}_proj": float8lab.Linear(64, 64, device="cpu") for n in "qk"})
    with pytest.raises(ValueError, match="stored bytes are not changed"):
        export(stored, tmp_path / "out", "float8lab", share_scales=siblings)
    with pytest.raises(TypeError, match="share_scales must be a list of lists of names"):
        export(Attention(), tmp_path / "out", share_scales=("q_proj", "k_proj"))
    assert not (tmp_path / "out").exists()


def test_input_scales_are_written_after_calibration(tmp_path):
    layer = float8lab.Linear(64, 64, device="cpu", bias=False)
    recipe = recipes.DelayedScaling()
    x = torch.full((4, 64), 0.5)
    export(layer, tmp_path / "before", "compressed-tensors", recipe=recipe)
    assert "input_scale" not in read_safetensors(tmp_path / "before")
    with torch.no_grad(), float8lab.autocast(enabled=False, calibrating=True, recipe=recipe):
        layer(x)
    export(layer, tmp_path / "after", "compressed-tensors", recipe=recipe)
    # 448 / 0.5 = 896, rounded down to a power of two.
    assert torch.equal(read_safetensors(tmp_path / "after")["input_scale"], torch.tensor([1 / 512]))
    for name, dynamic in (("before", True), ("after", False)):
        config = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        (group,) = config["config_groups"].values()
        assert group["input_activations"]["dynamic"] is dynamic
        assert group["input_activations"]["strategy"] == "tensor"


@pytest.mark.parametrize(
    ("recipe", "bits", "size"),
    [
        (recipes.Float8BlockScaling(), 8, 128),
        (recipes.MXFP8BlockScaling(), 8, 32),
        (recipes.NVFP4BlockScaling(), 4, 16),
    ],
)
def test_the_config_has_the_activations_of_the_recipe_for_loaded_weights(
    tmp_path, recipe, bits, size
):
    export(nn.Sequential(nn.Linear(64, 32)), tmp_path / "rows", "compressed-tensors")
    model = nn.Sequential(nn.Linear(64, 32))
    float8lab.convert_to_float8(model, recipe)
    load_fp8(tmp_path / "rows", model)
    export(model, tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    inputs = config["config_groups"]["group_0"]["input_activations"]
    assert (inputs["strategy"], inputs["num_bits"], inputs["group_size"]) == ("group", bits, size)


def test_config_is_the_models_config_and_its_quantization(tmp_path):
    model = mlp(torch.bfloat16)
    model.config = SimpleNamespace(to_dict=lambda: {"model_type": "x", "dtype": torch.bfloat16})
    export(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config == {
        "model_type": "x",
        "dtype": "bfloat16",
        "architectures": ["Sequential"],
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [128, 128], "modules_to_not_convert": [],
        },
    }  # fmt: skip
    model.config = {"architectures": ["Mine"]}
    export(model, tmp_path / "b", "compressed-tensors")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (config["architectures"], config["dtype"]) == (["Mine"], "bfloat16")
    groups = config["quantization_config"]["config_groups"]
    assert list(groups) == ["group_0"]
    assert groups["group_0"]["targets"] == ["Linear"]


def test_each_recipe_of_the_layers_is_a_config_group(tmp_path):
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(3)))
    overrides = {"1": recipes.Float8BlockScaling()}
    float8lab.convert_to_float8(model, recipes.Float8RowwiseScaling(), overrides=overrides)
    export(model, tmp_path / "out", "compressed-tensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    strategies = {
        tuple(g["targets"]): (g["weights"]["strategy"], g["input_activations"]["strategy"])
        for g in config["config_groups"].values()
    }
    assert strategies == {("0", "2"): ("channel", "token"), ("1",): ("block", "group")}


def test_diff_with_the_model_finds_only_the_rounding(tmp_path):
    model = mlp(torch.bfloat16)
    export(model, tmp_path / "out")
    difference = diff(tmp_path / "out", model.state_dict())
    status = {row.name: row.status for row in difference.rows}
    assert status == {"0.weight": "differs", "2.weight": "differs", "0.bias": "same"}
    assert all(row.sqnr > 30 for row in difference.rows)
    assert not any(row.findings for row in checkpoint(tmp_path / "out").rows)


def test_sizes_that_transformers_misreads_are_noted(tmp_path):
    assert "200" not in str(export(nn.Linear(256, 128), tmp_path / "a"))
    report = export(nn.Linear(256, 200), tmp_path / "b")
    assert "no multiple of 128" in str(report)


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        (nn.Linear(8, 8), {"format": "gguf"}, "format must be one of 'block-fp8', 'compressed"),
        (nn.LayerNorm(8), {}, "must have a linear layer"),
        (nn.Linear(8, 8), {"exclude": ["*"]}, "none that is not excluded"),
        (nn.Linear(8, 8), {"max_shard_size": 0}, "must be an integer of at least 1"),
        (nn.Linear(8, 8), {"recipe": recipes.Float8RowwiseScaling()},
         "must be e4m3 by 128x128, tensor; weight is cast to e4m3 row fp32"),
        (nn.Linear(8, 8), {"format": "compressed-tensors", "recipe": recipes.MXFP8BlockScaling()},
         "choose format='float8lab', or give another recipe"),
        (nn.Linear(8, 8, device="meta"), {}, "is on the meta device"),
        (nn.ParameterList([float8lab.quantize(torch.ones(4, 4)), nn.Linear(8, 8).weight]), {},
         "must have a linear layer"),
    ],
)  # fmt: skip
def test_errors_are_raised_before_anything_is_written(tmp_path, model, arguments, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        export(model, tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stored", [False, True])
def test_nonfinite_weights_are_counted_in_a_warning(tmp_path, stored):
    model = mlp()
    with torch.no_grad():
        model[0].weight[3, :5] = torch.nan
        model[0].bias[1] = -torch.inf
        model[2].weight[0, 0] = torch.inf
    expected = {"0.weight": 5, "0.bias": 1, "2.weight": 1}
    if stored:
        for layer in (model[0], model[2]):
            weight = float8lab.quantize(layer.weight.detach(), block=(128, 128))
            layer.weight = nn.Parameter(weight, requires_grad=False)
            assert isinstance(layer.weight, Float8Tensor)
    message = f"{sum(expected.values())} elements are NaN or infinite: 5 in 0.weight, 1 in 0.bias"
    with pytest.warns(UserWarning, match=message):
        report = export(model, tmp_path / "out", "float8lab")
    assert report.nonfinite == expected
    assert message in str(report)
    assert message not in str(export(mlp(), tmp_path / "finite", "float8lab"))


def test_fp8_weights_outside_linear_layers_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(8, 8))
    model[1].weight = nn.Parameter(float8lab.quantize(torch.ones(8, 8)), requires_grad=False)
    with pytest.raises(ValueError, match="must be weights of linear layers"):
        export(model, tmp_path / "out", "float8lab")


def test_export_changes_no_weight_and_no_scale(tmp_path):
    model = float8lab.convert_to_float8(mlp(), recipes.DelayedScaling())
    x = torch.randn(8, 256)
    train(model, x)
    before = {k: v.clone() for k, v in float8lab.nn.ScalingState(model).state_dict().items()}
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    export(model, tmp_path / "out")
    after = float8lab.nn.ScalingState(model).state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(torch.equal(weights[k], v) for k, v in model.state_dict().items())
    assert not any(isinstance(p, Float8Tensor) for p in model.parameters())
