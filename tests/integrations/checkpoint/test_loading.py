"""``load_fp8`` is exact, loads into models of every kind, and never loads a part."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import float8lab
from float8lab import recipes
from float8lab.checkpoints.source import BOX, Place
from float8lab.inspect import CheckpointError
from float8lab.integrations import export, load_fp8
from float8lab.tensor import Float8Tensor
from tests.same_bytes import assert_same_bytes

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")


def mlp(dtype=torch.float32, bias=True):
    return nn.Sequential(nn.Linear(256, 200, bias=bias), nn.GELU(), nn.Linear(200, 280)).to(dtype)


RECIPES = [
    recipes.Float8CurrentScaling(), recipes.Float8RowwiseScaling(power_of_2_scale=True),
    recipes.Float8BlockScaling(), recipes.MXFP8BlockScaling(),
]  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("max_shard_size", [5_000_000_000, 1])
def test_fp8_weights_round_trip_bit_for_bit(tmp_path, recipe, max_shard_size):
    def build():
        with float8lab.fp8_model_init(recipe=recipe):
            return nn.Sequential(
                float8lab.Linear(300, 200, device="cpu", params_dtype=torch.bfloat16),
                float8lab.LayerNormMLP(200, 264, device="cpu", params_dtype=torch.bfloat16),
            )

    model, loaded = build(), build()
    export(model, tmp_path / "out", "float8lab", max_shard_size=max_shard_size)
    report = load_fp8(tmp_path / "out", loaded)
    assert sorted(report.fp8) == ["0.weight", "1.fc1_weight", "1.fc2_weight"]
    assert not report.dequantized
    for name, value in model.state_dict().items():
        loaded_value = loaded.state_dict()[name]
        if name in report.fp8:
            assert_same_bytes(value, loaded_value)
            assert not loaded.get_parameter(name).requires_grad
        else:
            assert torch.equal(value, loaded_value)
    export(loaded, tmp_path / "again", "float8lab", max_shard_size=max_shard_size)
    assert float8lab.inspect.diff(tmp_path / "out", tmp_path / "again").identical


CASES = [
    ("block-fp8", recipes.Float8BlockScaling()),
    ("compressed-tensors", recipes.Float8CurrentScaling()),
    ("compressed-tensors", recipes.Float8RowwiseScaling()),
    ("compressed-tensors", recipes.Float8BlockScaling()),
    ("float8lab", recipes.Float8RowwiseScaling()),
    ("float8lab", recipes.MXFP8BlockScaling()),
]


@pytest.mark.parametrize(("format", "recipe"), CASES, ids=str)
@pytest.mark.parametrize("kind", ["plain", "converted", "meta"])
def test_a_loaded_model_has_the_outputs_of_the_trained_one(tmp_path, device, format, recipe, kind):
    model = float8lab.convert_to_float8(mlp(torch.bfloat16).to(device), recipe)
    export(model, tmp_path / "out", format)
    with torch.device("meta" if kind == "meta" else device):
        loaded = mlp(torch.bfloat16)
    if kind == "converted":
        float8lab.convert_to_float8(loaded, recipe)
    with device:  # the device of parameters that were on the meta device
        load_fp8(tmp_path / "out", loaded)
    x = torch.randn(24, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    with float8lab.count_gemms() as expected:
        y = model(x)
    with float8lab.count_gemms() as counts:
        y2 = loaded(x2)
    assert torch.equal(y, y2)
    assert str(counts) == str(expected)
    stored = [p for p in loaded.parameters() if isinstance(p, Float8Tensor)]
    assert len(stored) == 2
    assert all(p.qdata.element_size() == 1 and not p.requires_grad for p in stored)
    y.sum().backward()
    y2.sum().backward()
    assert x2.grad is not None
    if recipe.linear.w.block in ((-1, -1), (128, 128)):  # else dgrad casts in another orientation
        assert torch.equal(x.grad, x2.grad)
    else:
        assert (x.grad - x2.grad).norm() < 0.05 * x.grad.norm()
    assert loaded[0].weight.grad is None
    assert torch.equal(loaded[2].bias.grad, model[2].bias.grad)


@pytest.mark.parametrize(("format", "recipe"), CASES, ids=str)
def test_dequantized_values_are_fp8_data_times_scales(tmp_path, format, recipe):
    model = mlp()
    spec = recipe.linear.w
    export(model, tmp_path / "out", format, recipe=recipe)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = mlp(dtype)
        report = load_fp8(tmp_path / "out", loaded, dequantize=True)
        assert report.dequantized == ("0.weight", "2.weight")
        assert type(loaded[0]) is nn.Linear
        for index in (0, 2):
            weight = model[index].weight.detach()
            q = float8lab.quantize(weight, block=spec.block, scale_rule=spec.scale_rule)
            assert torch.equal(loaded[index].weight.detach(), q.dequantize().to(dtype))
            assert loaded[index].weight.requires_grad


def test_block_values_match_a_computation_by_hand():
    data = torch.zeros(130, 256)
    data[0, 0], data[129, 255] = 2.0, -448.0
    state = {
        "weight": data.to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.tensor([[0.5, 1.0], [1.0, 0.25]]),
    }
    layer = nn.Linear(256, 130, bias=False)
    load_fp8(state, layer, dequantize=True)
    assert (layer.weight[0, 0], layer.weight[129, 255]) == (1.0, -112.0)
    assert layer.weight.count_nonzero() == 2
    x = torch.zeros(1, 256)
    x[0, 0] = 1.0
    load_fp8(state, layer)
    assert layer(x)[0, 0] == 1.0


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def tune(model, x, target, steps=30):
    """Train adapters of a frozen base; return the losses and the counts of GEMMs."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    torch.manual_seed(3)
    tuned = nn.Sequential(Lora(model[0]), model[1], Lora(model[2]))
    optimizer = torch.optim.Adam([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    with float8lab.count_gemms() as counts:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (tuned(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    return losses, counts


@pytest.mark.parametrize("format", ["block-fp8", "compressed-tensors"])
def test_a_checkpoint_is_a_frozen_base_for_adapters(tmp_path, format):
    export(mlp(), tmp_path / "out", format)
    model, dequantized = mlp(), mlp()
    load_fp8(tmp_path / "out", model)
    load_fp8(tmp_path / "out", dequantized, dequantize=True)
    before = {n: getattr(p, "qdata", p).clone() for n, p in model.named_parameters()}
    x, target = torch.randn(64, 256), torch.randn(64, 280)
    losses, counts = tune(model, x, target)
    expected, _ = tune(dequantized, x, target)
    # As well as adapters of the same base in high precision.
    assert losses[0] - losses[-1] > 0.9 * (expected[0] - expected[-1]) > 0.1
    # The forwards of both layers, and dx of the second. The input of the first needs no gradient.
    assert counts.fp8 == 3 * 30
    after = {n: getattr(p, "qdata", p) for n, p in model.named_parameters()}
    for name, value in before.items():
        assert torch.equal(value.view(torch.uint8), after[name].view(torch.uint8))
        assert model.get_parameter(name).grad is None


def test_static_activation_scales_are_used_and_kept(tmp_path):
    recipe = recipes.DelayedScaling()
    model = float8lab.convert_to_float8(nn.Sequential(nn.Linear(64, 32)), recipe)
    x = torch.randn(8, 64)
    for _ in range(2):
        model(x).sum().backward()
    export(model, tmp_path / "out", "compressed-tensors")
    loaded = nn.Sequential(nn.Linear(64, 32))
    load_fp8(tmp_path / "out", loaded)
    model.eval()
    loaded.eval()
    # The static scale saturates far beyond the calibrated range, and does not change.
    for factor in (1.0, 100.0, 1.0):
        assert torch.equal(model(x * factor), loaded(x * factor))


def test_static_scales_are_reported_unless_the_recipe_is_delayed():
    q = float8lab.quantize(torch.randn(32, 64), block=(1, -1))
    state = {"weight": q.qdata, "weight_scale": q.scale, "input_scale": torch.tensor([0.5])}
    report = load_fp8(state, nn.Linear(64, 32, bias=False))
    assert "input_scale: not used" in str(report)
    layer = nn.Linear(64, 32, bias=False)  # this recipe requantizes these weights per tensor
    float8lab.convert_to_float8(layer, recipes.DelayedScaling())
    report = load_fp8(state, layer)
    assert "not used" not in str(report)
    assert "requantizes these weights" in str(report)
    (tensors,) = (slots.tensors() for slots in layer._fp8.slots.values())
    assert torch.equal(tensors["scale"][:2], torch.stack([torch.tensor(0.5), q.scale.max()]))
    with pytest.raises(ValueError, match=r"other\.input_scale is not in the model"):
        load_fp8({**state, "other.input_scale": torch.tensor([0.5])}, layer)


def test_tied_weights_stay_one_parameter(tmp_path):
    def build():
        model = nn.ModuleDict({"a": nn.Linear(128, 128), "b": nn.Linear(128, 128)})
        model["b"].weight = model["a"].weight
        return model

    export(build(), tmp_path / "out")
    loaded = build()
    load_fp8(tmp_path / "out", loaded)
    assert loaded["a"].weight is loaded["b"].weight
    assert isinstance(loaded["a"].weight, Float8Tensor)


def test_a_weight_outside_linear_layers_is_dequantized():
    q = float8lab.quantize(torch.randn(16, 8), block=(1, -1))
    state = {"weight": q.qdata, "weight_scale": q.scale}
    embedding = nn.Embedding(16, 8)
    report = load_fp8(state, embedding)
    assert report.dequantized == ("weight",)
    assert "not a linear layer" in str(report)
    assert torch.equal(embedding.weight.detach(), q.dequantize())


def test_blocks_without_a_recipe_are_reported(tmp_path):
    q = float8lab.quantize(torch.randn(128, 128), block=(64, 64))
    layer = nn.Linear(128, 128, bias=False)
    report = load_fp8({"weight": q.qdata, "weight_scale": q.scale}, layer)
    assert "without a recipe" in str(report)
    with float8lab.fallback("silent"):
        y = layer(torch.eye(128))
    assert (y - q.dequantize().t()).abs().max() < 0.1


def test_layers_that_cannot_be_converted_are_reported_without_a_warning(tmp_path):
    """The loader's own filter skips the layer, so no warning says that nothing was converted."""
    layer = float8lab.convert_to_float8(nn.Linear(128, 128), recipes.Float8BlockScaling())
    export(nn.Sequential(layer), tmp_path / "out", "block-fp8")
    model = nn.Sequential(nn.Linear(128, 128))
    model[0].forward = lambda x: x
    report = load_fp8(tmp_path / "out", model)
    note = "0 runs without a recipe: forward was replaced on the layer itself"
    assert note in report.notes


def test_a_recipe_that_requantizes_is_kept_and_reported(tmp_path):
    model = nn.Sequential(nn.Linear(128, 128))
    export(model, tmp_path / "out")
    float8lab.convert_to_float8(model, recipes.Float8RowwiseScaling())
    assert "requantizes these weights" in str(load_fp8(tmp_path / "out", model))
    assert model[0]._fp8.recipe == recipes.Float8RowwiseScaling()


def test_high_precision_values_are_quantized_into_fp8_weights():
    with float8lab.fp8_model_init():
        layer = float8lab.Linear(16, 16, bias=False, device="cpu")
    value = torch.randn(16, 16)
    load_fp8({"weight": value}, layer)
    assert_same_bytes(layer.weight.detach(), float8lab.quantize(value))


def test_buffers_are_loaded_onto_a_meta_model(tmp_path):
    model = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
    model(torch.randn(4, 128))
    export(model, tmp_path / "out")
    loaded = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128)).to("meta")
    load_fp8(tmp_path / "out", loaded)
    assert loaded[1].num_batches_tracked == 1
    assert torch.equal(loaded[1].running_mean, model[1].running_mean)


def edited(state, **changes):
    result = dict(state)
    for name, value in changes.items():
        name = name.replace("__", ".")
        if value is None:
            del result[name]
        else:
            result[name] = value
    return result


def stored_state():
    torch.manual_seed(1)
    q = [float8lab.quantize(torch.randn(128, 128), block=(128, 128)) for _ in range(2)]
    state = {}
    for index, weight in enumerate(q):
        state[f"{index}.weight"] = weight.qdata
        state[f"{index}.weight_scale_inv"] = weight.scale
        state[f"{index}.bias"] = torch.randn(128)
    return state


NAN = torch.tensor([[float("nan")]])
UNFIT_STATES = {
    "missing": (edited(stored_state(), **{"1__bias": None}), ValueError, "1.bias is missing"),
    "missing weight": (
        edited(stored_state(), **{"1__weight": None, "1__weight_scale_inv": None}),
        ValueError, "1.weight is missing",
    ),
    "unexpected": (
        edited(stored_state(), extra=torch.ones(1)), ValueError, "extra is not in the model",
    ),
    "shape": (
        edited(stored_state(), **{"1__bias": torch.ones(64)}),
        ValueError, r"1.bias is \[64\] there and \[128\] in the model",
    ),
    "dtype": (
        edited(stored_state(), **{"1__bias": torch.ones(128, dtype=torch.int64)}),
        ValueError, "1.bias is int64 there and torch.float32 in the model",
    ),
    "scale missing": (
        edited(stored_state(), **{"1__weight_scale_inv": None}),
        CheckpointError, "1.weight: no scale in the checkpoint",
    ),
    "scale shape": (
        edited(stored_state(), **{"1__weight_scale_inv": torch.ones(3, 5)}),
        CheckpointError, "1.weight: scale of shape 3x5 fits no blocks of 128x128",
    ),
    "scale dtype": (
        edited(stored_state(), **{"1__weight_scale_inv": torch.ones(1, 1, dtype=torch.int64)}),
        CheckpointError, "1.weight_scale_inv is int64",
    ),
    "scale NaN": (
        edited(stored_state(), **{"1__weight_scale_inv": NAN}),
        CheckpointError, "1.weight: 1 scales NaN",
    ),
    "input scale": (
        edited(stored_state(), **{"1__input_scale": torch.zeros(1)}),
        CheckpointError, "1.input_scale is not one positive number",
    ),
    "empty": ({}, CheckpointError, "must hold tensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT_STATES)
@pytest.mark.parametrize("dequantize", [True, False])
def test_a_state_that_does_not_fit_raises_and_changes_nothing(case, dequantize):
    state, error, message = UNFIT_STATES[case]
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    with pytest.raises(error, match=message):
        load_fp8(state, model, dequantize=dequantize)
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert [type(m) for m in model] == [nn.Linear, nn.Linear]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_computed_buffers_are_ignored_and_not_strict_loads_the_rest():
    computed = {"0.rotary_emb.inv_freq": torch.ones(4)}
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    assert not load_fp8(stored_state() | computed, model).unexpected
    state = UNFIT_STATES["missing"][0] | computed | {"extra": torch.ones(1)}
    report = load_fp8(state, model, strict=False)
    assert (report.missing, report.unexpected) == (("1.bias",), ("extra",))
    assert len(report.fp8) == 2


def test_a_missing_path_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="must exist; it does not"):
        load_fp8(tmp_path / "none", nn.Linear(8, 8))


def test_large_weights_are_read_in_pieces(tmp_path, monkeypatch):
    model = nn.Linear(2048, 1536)
    export(model, tmp_path / "out")
    sizes = []

    def read(*arguments):
        value = original(*arguments)
        sizes.append(value.numel())
        return value

    original = Place.read
    monkeypatch.setattr(Place, "read", read)
    for dequantize in (False, True):
        load_fp8(tmp_path / "out", nn.Linear(2048, 1536), dequantize=dequantize)
    assert max(sizes) <= BOX
    assert sum(sizes) > 2 * 2048 * 1536


def test_sharded_models_are_refused(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(128, 128)
        export(model, tmp_path / "out")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match="must not be sharded; weight is a DTensor"):
            export(model, tmp_path / "again")
        with pytest.raises(ValueError, match="weight is sharded in the model"):
            load_fp8(tmp_path / "out", model)
    finally:
        dist.destroy_process_group()
