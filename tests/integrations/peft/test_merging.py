"""Adapters merged into an FP8 base and taken out again, several of them, and none."""

import pytest
import torch

import float8lab
from float8lab.tensor import Float8Tensor
from tests.integrations.peft.models import (
    RECIPES,
    TOKENS,
    base_layers,
    codes,
    convert,
    llama,
    mlp,
    peft,
    with_lora,
)
from tests.nn.models import gemms_of
from tests.same_bytes import assert_same_bytes

pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"  # PEFT asks by an old name
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def requantized(weight, value):
    """``value`` as a weight is stored."""
    spec = weight.spec
    return float8lab.quantize(value, spec.fp8_dtype, block=spec.block, scale_rule=spec.scale_rule)


def largest_error(weight):
    """Of each element: half a unit in the last place of e4m3, under the scale of its block."""
    value = weight.qdata.float()
    exponent = torch.where(value == 0, -6, torch.frexp(value)[1] - 1).clamp(min=-6)
    ones = weight.replace(qdata=torch.ones_like(value).to(weight.qdata.dtype))
    return ones.dequantize() * torch.ldexp(torch.ones_like(value), exponent - 4)


@each_recipe
@pytest.mark.parametrize("safe", [False, True])
def test_a_merge_rounds_once(device, recipe, safe):
    model = with_lora(convert(mlp().to(device), recipe), use_rslora=True)
    layers = base_layers(model)
    tuned = {name: model.get_submodule(name) for name in layers}
    before = {name: layer.weight.dequantize() for name, layer in layers.items()}
    deltas = {name: layer.get_delta_weight("default") for name, layer in tuned.items()}
    x = torch.randn(64, 64, device=device)
    y = model.eval()(x)
    with float8lab.fallback("silent" if safe else "error"):  # isfinite looks at the values
        model.merge_adapter(safe_merge=safe)
    for name, layer in layers.items():
        assert_same_bytes(
            layer.weight, requantized(layer.weight, before[name] + deltas[name]), amax=False
        )
        assert not layer.weight.requires_grad
        assert layer.weight.qdata.nbytes == layer.weight.numel()
    with float8lab.count_gemms() as counts:
        merged = model(x)
    assert counts.fp8 == 2
    assert counts.high_precision == 1  # the head, and no adapter
    # The adapters' part, which was in high precision, is now in FP8 with the rest.
    assert 0 < (merged - y).norm() < 0.1 * y.norm()


@each_recipe
def test_an_unmerge_leaves_two_roundings(recipe):
    model = with_lora(convert(mlp(), recipe))
    layers = base_layers(model)
    before = {name: layer.weight.dequantize() for name, layer in layers.items()}
    model.merge_adapter()
    merged = {n: layer.weight.detach().clone() for n, layer in layers.items()}
    model.unmerge_adapter()
    for name, layer in layers.items():
        delta = model.get_submodule(name).get_delta_weight("default")
        assert_same_bytes(
            layer.weight, requantized(layer.weight, merged[name].dequantize() - delta), amax=False
        )
        error = (layer.weight.dequantize() - before[name]).abs()
        bound = largest_error(merged[name]) + largest_error(layer.weight)
        assert error.max() > 0  # not exact
        assert (error <= bound * (1 + 1e-5)).all()
        assert error.norm() < 0.06 * before[name].norm()


def test_a_small_adapter_is_rounded_away():
    """Measured of the change that a merge makes: 39 % of an adapter of 1 % of the base's norm, and
    100 % of one of 10 %. The base is on the grid of e4m3, and rounding mostly stays there. Not so
    of the weights that it was quantized from."""
    survives = []
    for share in (0.01, 0.1):
        model = with_lora(convert(mlp(), RECIPES["block"]))
        (name, layer), *_ = base_layers(model).items()
        tuned, before = model.get_submodule(name), layer.weight.dequantize()
        delta = tuned.get_delta_weight("default").detach()
        tuned.scale_layer(float(share * before.norm() / delta.norm()))
        delta = tuned.get_delta_weight("default").detach()
        model.merge_adapter()
        change = layer.weight.dequantize() - before
        survives.append(float((change * delta).sum() / delta.square().sum()))
    high = mlp().up.weight.detach()
    delta *= 0.1  # the first one again
    change = (requantized(layer.weight, w).dequantize() for w in (high + delta, high))
    change = next(change) - next(change)
    assert survives[0] < 0.5
    # Its rounding errors are 2.6 times the adapter, and independent of it: 3.8 % here.
    assert abs(float((change * delta).sum() / delta.square().sum()) - 1) < 4 * 0.038
    assert abs(survives[1] - 1) < 0.02


def test_a_base_in_high_precision_merges_as_ever():
    model, high = (with_lora(convert(mlp(), r, freeze=False)) for r in (RECIPES["block"], None))
    for tuned in (model, high):
        tuned.merge_adapter()
    for name, layer in base_layers(model).items():
        assert isinstance(layer, float8lab.Linear)
        assert torch.equal(layer.weight, base_layers(high)[name].weight)
    merged = model.unload()
    assert [type(m) for m in merged.children()][:2] == [float8lab.Linear] * 2
    x = torch.randn(8, 64)
    assert gemms_of(merged, x)[0] == 2


@each_recipe
def test_merge_and_unload_of_a_llama(tmp_path, recipe):
    model = with_lora(convert(llama(), recipe))
    twin = with_lora(convert(llama(), recipe))
    expected = model.eval()(TOKENS).logits
    merged = model.merge_and_unload().eval()
    assert not any("lora" in name for name, _ in merged.named_modules())
    with float8lab.count_gemms() as counts:
        y = merged(TOKENS).logits
    assert counts.fp8 == 14
    assert (y - expected).norm() < 0.1 * expected.norm()
    # Where one rounding more is too many: the base in high precision first.
    base = float8lab.to_high_precision(twin)
    exact = {
        name: layer.weight.detach() + base.get_submodule(name).get_delta_weight("default")
        for name, layer in base_layers(base).items()
    }
    plain = base.merge_and_unload()
    for name, weight in exact.items():
        found = plain.get_submodule(name.removeprefix("base_model.model.")).weight
        assert not isinstance(found, Float8Tensor)
        assert torch.equal(found, weight)
    # The merged bytes are those that others read.
    float8lab.integrations.export(merged, tmp_path / "out", "float8lab")
    again = llama(5)
    float8lab.integrations.load_fp8(tmp_path / "out", again)
    weight = again.model.layers[1].mlp.down_proj.weight
    assert_same_bytes(weight, merged.model.layers[1].mlp.down_proj.weight, amax=False)


def test_a_broken_adapter_is_not_merged():
    model = with_lora(convert(mlp(), RECIPES["block"]))
    (name, layer), *_ = base_layers(model).items()
    with torch.no_grad():
        model.get_submodule(name).lora_B["default"].weight[3, 1] = float("nan")
    before = codes(layer.weight)
    with float8lab.fallback("silent"), pytest.raises(ValueError, match="NaNs detected"):
        model.merge_adapter(safe_merge=True)
    assert all(torch.equal(a, b) for a, b in zip(codes(layer.weight), before, strict=True))


@pytest.mark.parametrize("safe", [False, True])
def test_dora_merges(safe):
    high = with_lora(mlp(), use_dora=True).eval()
    x = torch.randn(64, 64)
    expected = high(x)
    with float8lab.fallback("silent"):
        model = with_lora(convert(mlp(), RECIPES["rowwise"]), use_dora=True).eval()
        before = model(x)
        scaled = {}
        for name, layer in base_layers(model).items():
            tuned = model.get_submodule(name)
            value = layer.weight.dequantize() + tuned.get_delta_weight("default")
            factor = tuned.lora_magnitude_vector["default"].weight / value.norm(dim=1)
            scaled[name] = requantized(layer.weight, factor[:, None] * value)
        model.merge_adapter(safe_merge=safe)
        for name, layer in base_layers(model).items():
            assert_same_bytes(layer.weight, scaled[name], amax=False)
        merged = model(x)
        model.unmerge_adapter()
        after = model(x)
    for y in (before, merged, after):
        assert (y - expected).norm() < 0.1 * expected.norm()
    assert all(isinstance(m.weight, Float8Tensor) for m in base_layers(model).values())


@pytest.mark.parametrize("freeze", [True, False], ids=["stored", "converted"])
def test_several_adapters_and_none(freeze):
    recipe = RECIPES["current"]
    x = torch.randn(16, 64)
    base = convert(mlp(), recipe, freeze=freeze).eval()(x)
    model = with_lora(convert(mlp(), recipe, freeze=freeze)).eval()
    bytes_before = [codes(m.weight) for m in base_layers(model).values() if freeze]
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
    both = model(x)
    for layer in (model.get_submodule(name) for name in base_layers(model)):
        expected = 0.5 * layer.get_delta_weight("default") + 2 * layer.get_delta_weight("second")
        torch.testing.assert_close(layer.get_delta_weight("both"), expected)
    assert not torch.equal(both, second)
    # Each row of a batch by an adapter of its own.
    mixed = model(x[:3], adapter_names=["default", "__base__", "second"])
    assert mixed.shape == (3, 32)
    model.set_adapter("default")
    model.delete_adapter("both")
    assert torch.equal(model(x), first)
    assert torch.equal(model.unload()(x), base)
    for layer, bytes_of in zip(base_layers(model).values(), bytes_before, strict=False):
        assert all(torch.equal(a, b) for a, b in zip(codes(layer.weight), bytes_of, strict=True))


def test_two_adapters_merge_one_after_the_other():
    model = with_lora(convert(mlp(), RECIPES["block"])).eval()
    config = peft.LoraConfig(r=2, target_modules=["up", "down"], init_lora_weights=False)
    model.add_adapter("second", config)
    layers = base_layers(model)
    expected = {}
    for name, layer in layers.items():
        weight, tuned = layer.weight.detach(), model.get_submodule(name)
        for adapter in ("default", "second"):
            weight = requantized(weight, weight.dequantize() + tuned.get_delta_weight(adapter))
        expected[name] = weight
    model.merge_adapter(["default", "second"])
    for name, layer in layers.items():
        assert_same_bytes(layer.weight, expected[name], amax=False)
