"""``onnx_export`` of norms, fused modules and attention, with the accuracy of the recipe.

The output of onnxruntime is compared with the library's in eager mode. In high precision the two
differ by the order of float32 sums. In FP8 such a difference also moves values over a rounding
boundary, by one step of FP8 each. Several casts then leave an SQNR of ``SEVERAL_DB``, which is
above that of FP8 against float64.
"""

import copy

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.nn.attention import RotaryPositionEmbedding
from tests.integrations.onnx_models import (
    autocast_with,
    count_nodes,
    eager_outputs,
    export,
    onnx,
    onnx_outputs,
)
from tests.nn import models
from tests.nn.composition import sqnr

# Warnings of the exporter: deprecations inside torch, and package versions that it looks for.
pytestmark = pytest.mark.filterwarnings("ignore")

SAME_DB, SEVERAL_DB = 80.0, 40.0
HIDDEN, HEADS, S, B = 64, 4, 6, 2
RECIPES = {"high": None, **models.RECIPES}


def layer_norm_linear(**kwargs):
    return float8lab.LayerNormLinear(HIDDEN, 96, device="cpu", **kwargs)


def mlp(**kwargs):
    return float8lab.LayerNormMLP(HIDDEN, 128, device="cpu", **kwargs)


def transformer(**kwargs):
    return float8lab.TransformerLayer(HIDDEN, 128, HEADS, device="cpu", **kwargs)


def attention(**kwargs):
    return float8lab.MultiheadAttention(HIDDEN, HEADS, device="cpu", **kwargs)


def assert_exported_equals_eager(
    model, inputs, recipe, path, *, casts, least_sqnr=None, dynamic=False
):
    """Export after a step, which sets the scales of delayed recipes; compare with eager mode."""
    least_sqnr = least_sqnr or (SEVERAL_DB if casts else SAME_DB)
    with autocast_with(recipe):
        model(*inputs)
    model.eval()
    proto = export(model, inputs, recipe, path, dynamic=dynamic)
    assert count_nodes(proto, "QuantizeLinear") == casts
    if dynamic:
        inputs = tuple(torch.randn(S + 3, B + 1, HIDDEN) for _ in inputs)
    outputs, expected_outputs = onnx_outputs(path, inputs), eager_outputs(model, inputs, recipe)
    for y, expected in zip(outputs, expected_outputs, strict=True):
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        assert sqnr(y, expected) > least_sqnr
    return proto


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "model.onnx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centered"])
@pytest.mark.parametrize("norm", [float8lab.LayerNorm, float8lab.RMSNorm])
def test_exported_norms_have_their_eager_output(norm, zero_centered, dtype, path):
    module = norm(HIDDEN, zero_centered_gamma=zero_centered, params_dtype=dtype, device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = (torch.randn(S, B, HIDDEN) * 3 + 1).to(dtype)
    # A value between two float16 values may be rounded to either, once in some 2**12 values.
    least_sqnr = SAME_DB if dtype == torch.float32 else 60.0
    assert_exported_equals_eager(
        module, (x,), None, path, casts=0, least_sqnr=least_sqnr, dynamic=dtype == torch.float32
    )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("mlp", name) for name in RECIPES),
        *(("norm-linear", name) for name in ("high", "delayed", "rowwise")),
    ],
)
def test_exported_fused_modules_have_their_eager_output(kind, name, path):
    module = {
        "norm-linear": lambda: layer_norm_linear(
            normalization="RMSNorm", return_layernorm_output=True
        ),
        "mlp": lambda: mlp(activation="swiglu", return_bias=True, checkpoint=True),
    }[kind]()
    casts = {"norm-linear": 2, "mlp": 4}[kind] * (name != "high")
    if kind == "mlp":
        nn.init.normal_(module.fc2_bias)
    x = torch.randn(S, B, HIDDEN)
    assert_exported_equals_eager(
        module, (x,), RECIPES[name], path, casts=casts, dynamic=name == "current"
    )


@pytest.mark.parametrize("activation", ["gelu", "srelu", "qgelu", "silu", "geglu", "reglu"])
def test_exported_activations_have_their_eager_output(activation, path):
    assert_exported_equals_eager(
        mlp(activation=activation), (torch.randn(S, B, HIDDEN),), None, path, casts=0
    )


@pytest.mark.parametrize("name", ["high", "delayed"])
@pytest.mark.parametrize("split", [None, ("a", "b")], ids=["", "split"])
def test_fp8_weights_are_exported_as_fp8(split, name, path):
    with float8lab.fp8_model_init(recipe=RECIPES[name]):
        module = layer_norm_linear(parameters_split=split)
    casts = 0 if name == "high" else 1 + (split is not None)
    proto = assert_exported_equals_eager(
        module, (torch.randn(S, B, HIDDEN),), RECIPES[name], path, casts=casts
    )
    fp8 = [i for i in proto.graph.initializer if i.data_type == onnx.TensorProto.FLOAT8E4M3FN]
    assert sum(list(i.dims) in ([96, HIDDEN], [48, HIDDEN]) for i in fp8) == (2 if split else 1)


class AttentionCore(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.core = float8lab.DotProductAttention(HEADS, HIDDEN // HEADS, **kwargs)

    def forward(self, q, k, v, mask=None):
        q, k, v = (x.unflatten(-1, (-1, HIDDEN // HEADS)) for x in (q, k, v))
        return self.core(q, k, v, mask)


@pytest.mark.parametrize("variant", ["causal", "window", "groups", "padding", "arbitrary"])
def test_exported_attention_has_its_eager_output(variant, path):
    mask_type = variant if variant in ("padding", "arbitrary") else "causal"
    window = (2, 0) if variant == "window" else None
    groups = 2 if variant == "groups" else HEADS
    model = AttentionCore(attn_mask_type=mask_type, window_size=window, num_gqa_groups=groups)
    widths = (HIDDEN, *(groups * HIDDEN // HEADS,) * 2)
    inputs = tuple(torch.randn(S, B, width) for width in widths)
    if variant == "padding":
        inputs += ((torch.arange(S) >= torch.tensor([[S - 2], [S]]))[:, None, None],)
    if variant == "arbitrary":
        inputs += ((torch.rand(B, 1, S, S) < 0.5) & ~torch.eye(S, dtype=torch.bool),)
    assert_exported_equals_eager(model, inputs, None, path, casts=0)


@pytest.mark.parametrize(
    ("name", "dynamic"), [("high", True), ("delayed", False), ("current", True)]
)
def test_exported_multihead_attention_has_its_eager_output(name, dynamic, path):
    module = attention(input_layernorm=True, num_gqa_groups=2, attn_mask_type="causal")
    x, casts = torch.randn(S, B, HIDDEN), 0 if name == "high" else 4
    assert_exported_equals_eager(module, (x,), RECIPES[name], path, casts=casts, dynamic=dynamic)


class RotaryLayers(nn.Module):
    """A stack of two transformer layers with rotary positions."""

    def __init__(self, **kwargs):
        super().__init__()
        self.layers = nn.ModuleList(transformer(**kwargs) for _ in range(2))
        self.rope = RotaryPositionEmbedding(HIDDEN // HEADS)

    def forward(self, x):
        angles = self.rope(S)
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=angles)
        return x


@pytest.mark.parametrize("name", ["high", "delayed", "block"])
def test_an_exported_transformer_layer_has_its_eager_output(name, path):
    module = transformer(activation="swiglu", normalization="RMSNorm")
    x, casts = torch.randn(S, B, HIDDEN), 0 if name == "high" else 8
    assert_exported_equals_eager(module, (x,), RECIPES[name], path, casts=casts)


def test_layers_with_rotary_positions_have_the_accuracy_of_fp8(path):
    recipe, x = RECIPES["current"], torch.randn(S, B, HIDDEN)
    model = RotaryLayers()
    assert_exported_equals_eager(model, (x,), recipe, path, casts=16)
    exact = copy.deepcopy(model).double().eval()(x.double())
    eager_sqnr = sqnr(eager_outputs(model, (x,), recipe)[0], exact)
    assert sqnr(onnx_outputs(path, (x,))[0], exact) > eager_sqnr - 1.0


class CachedAttention(nn.Module):
    """Attention with a key/value cache."""

    def __init__(self):
        super().__init__()
        self.attention = attention(layer_number=1, attn_mask_type="causal")
        self.cache = float8lab.InferenceParams(B, S)

    def forward(self, x):
        return self.attention(x, inference_params=self.cache)


def assert_export_fails(module, inputs, recipe, match):
    with (
        pytest.raises(Exception, match=match),
        float8lab.onnx_export(enabled=True),
        autocast_with(recipe),
    ):
        torch.onnx.export(module, inputs, dynamo=True, verbose=False)


def test_unsupported_modules_raise_on_export():
    x = torch.randn(S, B, HIDDEN)
    recipe = recipes.Float8CurrentScaling(fp8_dpa=True)
    assert_export_fails(AttentionCore().eval(), (x, x, x), recipe, "recipe must have fp8_dpa=False")
    packed = AttentionCore(qkv_format="thd", attn_mask_type="padding").eval()
    assert_export_fails(packed, (x[:, 0],) * 3, None, "qkv_format must be 'sbhd' or 'bshd' inside")
    assert_export_fails(
        CachedAttention().eval(), (x,), None, "inference_params must be None inside"
    )


def test_export_changes_no_state(path):
    recipe = RECIPES["delayed"]
    model = transformer(hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(S, B, HIDDEN)
    with autocast_with(recipe):
        model(x).sum().backward()
    model.zero_grad()
    reference = copy.deepcopy(model)
    export(model, (x,), recipe, path)  # in training mode, too
    assert models.states(model) == models.states(reference)
    for m in (model, reference):
        with autocast_with(recipe):
            m(3 * x).sum().backward()
    assert models.same_gradients(model, reference)
    assert models.states(model) == models.states(reference)


@pytest.mark.parametrize("name", RECIPES)
def test_an_exported_grouped_linear_has_its_eager_output(name, path):
    """The graph applies each expert to all rows, because it has no group sizes."""
    module = float8lab.GroupedLinear(3, HIDDEN, 96, device="cpu")
    for bias in (module.bias0, module.bias1, module.bias2):
        nn.init.normal_(bias)
    x, splits = torch.randn(20, HIDDEN), torch.tensor([7, 0, 9])
    # With a scale per tensor, the rows and the weight of each expert have their own scales.
    casts = {"high": 0, "delayed": 6, "current": 6}.get(name, 4)
    assert_exported_equals_eager(
        module, (x, splits), RECIPES[name], path, casts=casts, least_sqnr=SAME_DB
    )
