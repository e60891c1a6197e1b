"""Merging adapters into an FP8 base, unmerging them, and using several adapters or none."""

import pytest
import torch

import float8lab
from float8lab.tensor import Float8Tensor
from tests.integrations.peft.models import (
    RECIPES,
    TOKENS,
    base_layers,
    convert,
    llama,
    mlp,
    peft,
    weight_bytes,
    with_lora,
)
from tests.nn.models import gemms_of
from tests.same_bytes import assert_same_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"  # PEFT calls it by an old name
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def quantize_like(weight, value):
    """Quantize ``value`` as a weight is stored."""
    spec = weight.spec
    return float8lab.quantize(value, spec.fp8_dtype, block=spec.block, scale_rule=spec.scale_rule)


def largest_error(weight):
    """Per element half a unit in the last place of e4m3, with the scale of its block."""
    value = weight.qdata.float()
    exponent = torch.where(value == 0, -6, torch.frexp(value)[1] - 1).clamp(min=-6)
    ones = weight.replace(qdata=torch.ones_like(value).to(weight.qdata.dtype))
    return ones.dequantize() * torch.ldexp(torch.ones_like(value), exponent - 4)


@each_recipe
@pytest.mark.parametrize("safe_merge", [False, True])
def test_a_merge_requantizes_once(device, recipe, safe_merge):
    model = with_lora(convert(mlp().to(device), recipe), use_rslora=True)
    layers = base_layers(model)
    tuned = {name: model.get_submodule(name) for name in layers}
    before = {name: layer.weight.dequantize() for name, layer in layers.items()}
    deltas = {name: layer.get_delta_weight("default") for name, layer in tuned.items()}
    x = torch.randn(64, 64, device=device)
    y = model.eval()(x)
    with float8lab.fallback("silent" if safe_merge else "error"):  # isfinite reads the values
        model.merge_adapter(safe_merge=safe_merge)
    for name, layer in layers.items():
        assert_same_bytes(
            layer.weight, quantize_like(layer.weight, before[name] + deltas[name]), amax=False
        )
        assert not layer.weight.requires_grad
        assert layer.weight.qdata.nbytes == layer.weight.numel()
    with float8lab.count_gemms() as counts:
        merged = model(x)
    assert counts.fp8 == 2
    assert counts.high_precision == 1  # the head, and no adapter
    # The adapters' part, formerly in high precision, is now in FP8 with the base.
    assert 0 < (merged - y).norm() < 0.1 * y.norm()


@each_recipe
def test_an_unmerge_leaves_two_rounding_errors(recipe):
    model = with_lora(convert(mlp(), recipe))
    layers = base_layers(model)
    before = {name: layer.weight.dequantize() for name, layer in layers.items()}
    model.merge_adapter()
    merged = {n: layer.weight.detach().clone() for n, layer in layers.items()}
    model.unmerge_adapter()
    for name, layer in layers.items():
        delta = model.get_submodule(name).get_delta_weight("default")
        assert_same_bytes(
            layer.weight, quantize_like(layer.weight, merged[name].dequantize() - delta), amax=False
        )
        error = (layer.weight.dequantize() - before[name]).abs()
        bound = largest_error(merged[name]) + largest_error(layer.weight)
        assert error.max() > 0  # an unmerge is not exact
        assert (error <= bound * (1 + 1e-5)).all()
        assert error.norm() < 0.06 * before[name].norm()


def test_a_small_adapter_is_rounded_away():
    """Measures how much of an adapter survives a merge.

    39 % of an adapter of 1 % of the base's norm, and 100 % of one of 10 %. The base lies on the
    grid of e4m3, and rounding mostly keeps it there. The weights that it was quantized from have no
    such loss.
    """
    surviving_parts = []
    for relative_size in (0.01, 0.1):
        model = with_lora(convert(mlp(), RECIPES["block"]))
        (name, layer), *_ = base_layers(model).items()
        tuned, before = model.get_submodule(name), layer.weight.dequantize()
        delta = tuned.get_delta_weight("default").detach()
        tuned.scale_layer(float(relative_size * before.norm() / delta.norm()))
        delta = tuned.get_delta_weight("default").detach()
        model.merge_adapter()
        change = layer.weight.dequantize() - before
        surviving_parts.append(float((change * delta).sum() / delta.square().sum()))
    weight = mlp().up.weight.detach()
    delta *= 0.1  # the first adapter
    change = (quantize_like(layer.weight, w).dequantize() for w in (weight + delta, weight))
    change = next(change) - next(change)
    assert surviving_parts[0] < 0.5
    # Its rounding errors are 2.6 times the adapter, and independent of it: 3.8 % here.
    assert abs(float((change * delta).sum() / delta.square().sum()) - 1) < 4 * 0.038
    assert abs(surviving_parts[1] - 1) < 0.02


def test_a_high_precision_base_merges_exactly():
    model, high_precision = (
        with_lora(convert(mlp(), r, freeze=False)) for r in (RECIPES["block"], None)
    )
    for tuned in (model, high_precision):
        tuned.merge_adapter()
    for name, layer in base_layers(model).items():
        assert isinstance(layer, float8lab.Linear)
        assert torch.equal(layer.weight, base_layers(high_precision)[name].weight)
    merged = model.unload()
    assert [type(m) for m in merged.children()][:2] == [float8lab.Linear] * 2
    x = torch.randn(8, 64)
    assert gemms_of(merged, x)[0] == 2


@each_recipe
def test_merge_and_unload_gives_an_fp8_or_a_high_precision_llama(tmp_path, recipe):
    model = with_lora(convert(llama(), recipe))
    unmerged = with_lora(convert(llama(), recipe))
    expected = model.eval()(TOKENS).logits
    merged = model.merge_and_unload().eval()
    assert not any("lora" in name for name, _ in merged.named_modules())
    with float8lab.count_gemms() as counts:
        y = merged(TOKENS).logits
    assert counts.fp8 == 14
    assert (y - expected).norm() < 0.1 * expected.norm()
    # To avoid one more rounding, return the base to high precision first.
    base = float8lab.to_high_precision(unmerged)
    exact = {
        name: layer.weight.detach() + base.get_submodule(name).get_delta_weight("default")
        for name, layer in base_layers(base).items()
    }
    merged_in_high_precision = base.merge_and_unload()
    for name, weight in exact.items():
        merged_weight = merged_in_high_precision.get_submodule(
            name.removeprefix("base_model.model.")
        ).weight
        assert not isinstance(merged_weight, Float8Tensor)
        assert torch.equal(merged_weight, weight)
    # Other programs read the merged bytes.
    float8lab.integrations.export(merged, tmp_path / "out", "float8lab")
    loaded = llama(5)
    float8lab.integrations.load_fp8(tmp_path / "out", loaded)
    weight = loaded.model.layers[1].mlp.down_proj.weight
    assert_same_bytes(weight, merged.model.layers[1].mlp.down_proj.weight, amax=False)


def test_a_nan_adapter_is_not_merged_safely():
    model = with_lora(convert(mlp(), RECIPES["block"]))
    (name, layer), *_ = base_layers(model).items()
    with torch.no_grad():
        model.get_submodule(name).lora_B["default"].weight[3, 1] = float("nan")
    before = weight_bytes(layer.weight)
    with float8lab.fallback("silent"), pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert all(torch.equal(a, b) for a, b in zip(weight_bytes(layer.weight), before, strict=True))


@pytest.mark.parametrize("safe_merge", [False, True])
def test_dora_merges_and_unmerges(safe_merge):
    high_precision = with_lora(mlp(), use_dora=True).eval()
    x = torch.randn(64, 64)
    expected = high_precision(x)
    with float8lab.fallback("silent"):
        model = with_lora(convert(mlp(), RECIPES["rowwise"]), use_dora=True).eval()
        before = model(x)
        requantized = {}
        for name, layer in base_layers(model).items():
            tuned = model.get_submodule(name)
            value = layer.weight.dequantize() + tuned.get_delta_weight("default")
            factor = tuned.lora_magnitude_vector["default"].weight / value.norm(dim=1)
            requantized[name] = quantize_like(layer.weight, factor[:, None] * value)
        model.merge_adapter(safe_merge=safe_merge)
        for name, layer in base_layers(model).items():
            assert_same_bytes(layer.weight, requantized[name], amax=False)
        merged = model(x)
        model.unmerge_adapter()
        after = model(x)
    for y in (before, merged, after):
        assert (y - expected).norm() < 0.1 * expected.norm()
    assert all(isinstance(m.weight, Float8Tensor) for m in base_layers(model).values())


@pytest.mark.parametrize("freeze", [True, False], ids=["FP8 weights", "converted"])
def test_adapters_can_be_switched_combined_and_disabled(freeze):
    recipe = RECIPES["current"]
    x = torch.randn(16, 64)
    base = convert(mlp(), recipe, freeze=freeze).eval()(x)
    model = with_lora(convert(mlp(), recipe, freeze=freeze)).eval()
    bytes_before = [weight_bytes(m.weight) for m in base_layers(model).values() if freeze]
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model.add_adapter("second", config)
    first = model(x)
    model.set_adapter("second")
    second = model(x)
    assert not torch.equal(first, second)
    with model.disable_adapter():
        assert torch.equal(model(x), base)
    assert torch.equal(model(x), second)
    model.add_weighted_adapter(["default", "second"], [0.5, 2.0], "both", combination_type="cat")
    model.set_adapter("both")
    combined = model(x)
    for layer in (model.get_submodule(name) for name in base_layers(model)):
        expected = 0.5 * layer.get_delta_weight("default") + 2 * layer.get_delta_weight("second")
        torch.testing.assert_close(layer.get_delta_weight("both"), expected)
    assert not torch.equal(combined, second)
    # Each row of a batch uses its own adapter.
    mixed = model(x[:3], adapter_names=["default", "__base__", "second"])
    assert mixed.shape == (3, 32)
    model.set_adapter("default")
    model.delete_adapter("both")
    assert torch.equal(model(x), first)
    assert torch.equal(model.unload()(x), base)
    for layer, expected_bytes in zip(base_layers(model).values(), bytes_before, strict=False):
        assert all(
            torch.equal(a, b)
            for a, b in zip(weight_bytes(layer.weight), expected_bytes, strict=True)
        )


def test_two_adapters_merge_in_sequence():
    model = with_lora(convert(mlp(), RECIPES["block"])).eval()
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model.add_adapter("second", config)
    layers = base_layers(model)
    expected = {}
    for name, layer in layers.items():
        weight, tuned = layer.weight.detach(), model.get_submodule(name)
        for adapter in ("default", "second"):
            weight = quantize_like(weight, weight.dequantize() + tuned.get_delta_weight(adapter))
        expected[name] = weight
    model.merge_adapter(["default", "second"])
    for name, layer in layers.items():
        assert_same_bytes(layer.weight, expected[name], amax=False)
