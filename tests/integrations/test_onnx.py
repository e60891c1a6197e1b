"""``onnx_export``: standard nodes that onnxruntime runs with the accuracy of the recipe.

The FP8 data in the graph equals the library's except at some rounding boundaries: ONNX divides by
the scale, the library multiplies by its inverse. Some one value in 2**20 then differs by one step
of FP8. This and another order of float32 sums leave an SQNR far above ``SAME_DB`` to the eager
output.
"""

import math

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.tensor.differentiation import is_exporting
from tests.integrations.onnx_models import count_nodes, eager_outputs, export, onnx, onnx_outputs
from tests.nn.composition import sqnr

# Warnings of the exporter: deprecations inside torch, and package versions that it looks for.
pytestmark = pytest.mark.filterwarnings("ignore")

SAME_DB = 80.0
RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max"),
    "margin": recipes.DelayedScaling(margin=2, power_of_2_scale=False),
    "current": recipes.Float8CurrentScaling(),
    "current-pow2": recipes.Float8CurrentScaling(power_of_2_scale=True, amax_epsilon=1e-3),
    "rowwise": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(),
    "block-pow2": recipes.Float8BlockScaling(power_of_2_scale=True),
    "mx": recipes.MXFP8BlockScaling(),
}
# SQNR of one layer against float64, as stated in docs/numerics.md.
STATED_DB = {name: 27.5 if name == "mx" else 28.0 for name in RECIPES}
DYNAMIC = torch.export.Dim.DYNAMIC


class Attention(nn.Module):
    """Linear layers between reshapes and transposes, as in attention."""

    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.proj(y.transpose(1, 2).flatten(2))


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "model.onnx")


def export_after_step(layer, x, recipe, path, *, opset=21):
    """Export a layer after a step, which sets the scales of delayed scaling."""
    with float8lab.autocast(recipe=recipe):
        layer(x)
    return export(layer.eval(), (x,), recipe, path, dynamic=True, opset=opset)


def onnx_and_eager_outputs(path, model, x, recipe):
    """The output of onnxruntime and that of the library in eager mode."""
    (y,), (expected,) = onnx_outputs(path, (x,)), eager_outputs(model, (x,), recipe)
    return y, expected


@pytest.mark.parametrize(
    ("name", "stored"),
    [(name, False) for name in RECIPES]
    + [(name, True) for name in ("delayed", "current", "rowwise", "block", "mx")],
)
def test_a_layer_of_every_recipe_has_its_eager_output(name, stored, path):
    recipe = RECIPES[name]
    with float8lab.fp8_model_init(enabled=stored, recipe=recipe):
        layer = float8lab.Linear(300, 200, device="cpu")
    nn.init.normal_(layer.bias)
    x = torch.randn(2, 5, 300)
    with float8lab.autocast(recipe=recipe):
        layer(2 * x)
    proto = export_after_step(layer, 2 * x, recipe, path)
    assert count_nodes(proto, "DequantizeLinear") == 2
    assert count_nodes(proto, "QuantizeLinear") == (1 if stored else 2)
    fp8 = [i for i in proto.graph.initializer if i.data_type == onnx.TensorProto.FLOAT8E4M3FN]
    assert ([200, 300] in [list(i.dims) for i in fp8]) == stored
    x = torch.randn(3, 7, 300)  # another shape than in the export
    y, expected = onnx_and_eager_outputs(path, layer, x, recipe)
    assert y.dtype == expected.dtype
    assert y.shape == expected.shape
    assert sqnr(y, expected) > SAME_DB
    plain = nn.Linear(300, 200).double()
    state = {k: v.dequantize() if stored and k == "weight" else v for k, v in
             layer.state_dict().items()}  # fmt: skip
    plain.load_state_dict(state)
    assert sqnr(y, plain(x.double())) > STATED_DB[name]


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_converted_model_has_its_eager_output(name, path):
    recipe = RECIPES[name]
    model = nn.Sequential(
        Attention(64), nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 24)
    )
    float8lab.convert_to_float8(model, recipe, overrides={"4": None})
    model(torch.randn(4, 6, 64))
    model.eval()
    with float8lab.onnx_export(enabled=True):
        x = torch.randn(2, 5, 64)
        program = torch.onnx.export(
            model, (x,), dynamo=True, opset_version=21, verbose=False,
            dynamic_shapes=({0: DYNAMIC, 1: DYNAMIC},),
        )  # fmt: skip
    program.save(path)
    proto = onnx.load(path)
    assert count_nodes(proto, "QuantizeLinear") == 2 * 3
    x = torch.randn(3, 9, 64)
    with torch.no_grad():
        # In each layer a value near a rounding boundary may be rounded the other way.
        assert sqnr(onnx_outputs(path, (x,))[0], model(x)) > 40


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise"])
def test_opset_19_is_enough_without_blocks(name, path):
    layer = float8lab.Linear(32, 48, device="cpu")
    x = torch.randn(6, 32)
    export_after_step(layer, x, RECIPES[name], path, opset=19)
    assert sqnr(*onnx_and_eager_outputs(path, layer, x, RECIPES[name])) > SAME_DB


@pytest.mark.parametrize("name", ["current", "block"])
def test_a_bfloat16_layer_and_a_high_precision_layer_are_exported(name, path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = float8lab.Linear(64, 48, device="cpu", params_dtype=torch.bfloat16)
            self.second = float8lab.Linear(48, 16, device="cpu")

        def forward(self, x):
            y = self.first(x.bfloat16()).float()
            with float8lab.autocast(enabled=False):
                return self.second(y)

    model = Model().eval()
    x = torch.randn(8, 64)
    proto = export(model, (x,), RECIPES[name], path, dynamic=True)
    assert count_nodes(proto, "QuantizeLinear") == 2
    # Sums in different orders may round to neighbouring bfloat16 values, 2**-8 apart, once in some
    # 2**14 values.
    assert sqnr(*onnx_and_eager_outputs(path, model, x, RECIPES[name])) > 60


def test_a_forward_gemm_in_high_precision_has_no_casts(path):
    recipe = recipes.Float8CurrentScaling(override_linear_precision=(True, False, False))
    layer = float8lab.Linear(32, 48, device="cpu").eval()
    x = torch.randn(6, 32)
    proto = export(layer, (x,), recipe, path, dynamic=True)
    assert count_nodes(proto, "QuantizeLinear") == 0
    assert (
        sqnr(onnx_outputs(path, (x,))[0], nn.functional.linear(x, layer.weight, layer.bias))
        > SAME_DB
    )


@pytest.mark.parametrize("name", ["delayed", "rowwise", "mx"])
def test_zeros_and_extreme_values_give_the_eager_output(name, path):
    layer = float8lab.Linear(64, 16, device="cpu", bias=False)
    x = torch.randn(8, 64)
    export_after_step(layer, x, RECIPES[name], path)
    scales = torch.tensor([0.0, 1.0, 448.0, 2.0**-10, 2.0**-140, 1e30, 2.0**100, 3.0])
    for values in (torch.zeros(8, 64), x.sign() * scales[:, None], 1000.0 * x):
        y, expected = onnx_and_eager_outputs(path, layer, values, RECIPES[name])
        assert torch.isfinite(y).all() == torch.isfinite(expected).all()
        if expected.any():
            assert sqnr(y, expected) > SAME_DB
        else:
            assert not y.any()


@pytest.mark.parametrize("name", ["delayed", "current", "rowwise", "block", "mx"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")], ids=str)
def test_nan_and_infinity_appear_in_the_output(name, value, path):
    recipe = RECIPES[name]
    layer = float8lab.Linear(64, 16, device="cpu", bias=False)
    x = torch.randn(8, 64)
    export_after_step(layer, x, recipe, path)
    x[3, 5] = value
    y, expected = onnx_and_eager_outputs(path, layer, x, recipe)
    assert not expected[3].isfinite().any()
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.isinf(), expected.isinf())
    # ONNX does not define whether a maximum propagates NaN
    if name != "current" or not math.isnan(value):
        finite = expected.isfinite()
        assert sqnr(y[finite], expected[finite]) > SAME_DB


def test_delayed_scaling_without_scales_is_an_error(path):
    layer = float8lab.Linear(32, 32, device="cpu")
    with pytest.raises(Exception, match="model must have the scales of its delayed recipe") as info:
        export(layer, (torch.randn(4, 32),), RECIPES["delayed"], path, dynamic=True)
    assert info.value is not None


def test_disabled_onnx_export_exports_high_precision():
    layer = float8lab.Linear(32, 32, device="cpu").eval()
    x = torch.randn(4, 32)
    with float8lab.onnx_export():
        program = torch.onnx.export(layer, (x,), dynamo=True, verbose=False)
    assert count_nodes(program.model_proto, "QuantizeLinear") == 0
    with float8lab.onnx_export(enabled=True):
        assert not torch.is_grad_enabled()
        with float8lab.onnx_export(enabled=False):
            assert not is_exporting()
    assert not is_exporting()
    assert torch.is_grad_enabled()
