"""onnx_export of norms, fused modules and attention: standard operators, the recipe's accuracy.

onnxruntime's output against the library's own in eager mode. In high precision they differ by
float32 sums in another order. In FP8 such a difference also moves values over a rounding boundary,
by one step of FP8 each; through several casts that leaves ``SEVERAL_DB``, above what FP8 itself
leaves to float64.
"""

import copy

import pytest
import torch
from torch import nn

import float8lab
from float8lab import recipes
from float8lab.nn.attention import RotaryPositionEmbedding
from tests.integrations.onnx_models import count, eager, export, in_context, onnx, run
from tests.nn import models
from tests.nn.composition import sqnr

# The exporter's own: deprecations inside torch, and versions of packages that it looks for.
pytestmark = pytest.mark.filterwarnings("ignore")

SAME_DB, SEVERAL_DB = 80.0, 40.0
HIDDEN, HEADS, S, B = 64, 4, 6, 2
RECIPES = {"high": None, **models.RECIPES}


def norm_linear(**kwargs):
    return float8lab.LayerNormLinear(HIDDEN, 96, device="cpu", **kwargs)


def mlp(**kwargs):
    return float8lab.LayerNormMLP(HIDDEN, 128, device="cpu", **kwargs)


def transformer(**kwargs):
    return float8lab.TransformerLayer(HIDDEN, 128, HEADS, device="cpu", **kwargs)


def attention(**kwargs):
    return float8lab.MultiheadAttention(HIDDEN, HEADS, device="cpu", **kwargs)


def check(model, inputs, recipe, path, *, casts, least=None, dynamic=False):
    """Export after a step that gives delayed recipes their scales; run, and compare."""
    least = least or (SEVERAL_DB if casts else SAME_DB)
    with in_context(recipe):
        model(*inputs)
    model.eval()
    proto = export(model, inputs, recipe, path, dynamic=dynamic)
    assert count(proto, "QuantizeLinear") == casts
    if dynamic:
        inputs = tuple(torch.randn(S + 3, B + 1, HIDDEN) for _ in inputs)
    got, wanted = run(path, inputs), eager(model, inputs, recipe)
    for y, expected in zip(got, wanted, strict=True):
        assert (y.dtype, y.shape) == (expected.dtype, expected.shape)
        assert sqnr(y, expected) > least
    return proto


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "model.onnx")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centered"])
@pytest.mark.parametrize("norm", [float8lab.LayerNorm, float8lab.RMSNorm])
def test_norms(norm, zero_centered, dtype, path):
    module = norm(HIDDEN, zero_centered_gamma=zero_centered, params_dtype=dtype, device="cpu")
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = (torch.randn(S, B, HIDDEN) * 3 + 1).to(dtype)
    # A value between two of float16 may be rounded to either, once in some 2**12 values.
    least = SAME_DB if dtype == torch.float32 else 60.0
    check(module, (x,), None, path, casts=0, least=least, dynamic=dtype == torch.float32)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("mlp", name) for name in RECIPES),
        *(("norm-linear", name) for name in ("high", "delayed", "rowwise")),
    ],
)
def test_fused_modules(kind, name, path):
    module = {
        "norm-linear": lambda: norm_linear(normalization="RMSNorm", return_layernorm_output=True),
        "mlp": lambda: mlp(activation="swiglu", return_bias=True, checkpoint=True),
    }[kind]()
    casts = {"norm-linear": 2, "mlp": 4}[kind] * (name != "high")
    if kind == "mlp":
        nn.init.normal_(module.fc2_bias)
    x = torch.randn(S, B, HIDDEN)
    check(module, (x,), RECIPES[name], path, casts=casts, dynamic=name == "current")


@pytest.mark.parametrize("activation", ["gelu", "srelu", "qgelu", "silu", "geglu", "reglu"])
def test_activations(activation, path):
    check(mlp(activation=activation), (torch.randn(S, B, HIDDEN),), None, path, casts=0)


@pytest.mark.parametrize("name", ["high", "delayed"])
@pytest.mark.parametrize("split", [None, ("a", "b")], ids=["", "split"])
def test_weights_stored_in_fp8(split, name, path):
    with float8lab.fp8_model_init(recipe=RECIPES[name]):
        module = norm_linear(parameters_split=split)
    casts = 0 if name == "high" else 1 + (split is not None)
    proto = check(module, (torch.randn(S, B, HIDDEN),), RECIPES[name], path, casts=casts)
    fp8 = [i for i in proto.graph.initializer if i.data_type == onnx.TensorProto.FLOAT8E4M3FN]
    assert sum(list(i.dims) in ([96, HIDDEN], [48, HIDDEN]) for i in fp8) == (2 if split else 1)


class Core(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.core = float8lab.DotProductAttention(HEADS, HIDDEN // HEADS, **kwargs)

    def forward(self, q, k, v, mask=None):
        q, k, v = (x.unflatten(-1, (-1, HIDDEN // HEADS)) for x in (q, k, v))
        return self.core(q, k, v, mask)


@pytest.mark.parametrize("variant", ["causal", "window", "groups", "padding", "arbitrary"])
def test_attention(variant, path):
    mask_type = variant if variant in ("padding", "arbitrary") else "causal"
    window = (2, 0) if variant == "window" else None
    groups = 2 if variant == "groups" else HEADS
    model = Core(attn_mask_type=mask_type, window_size=window, num_gqa_groups=groups)
    widths = (HIDDEN, *(groups * HIDDEN // HEADS,) * 2)
    inputs = tuple(torch.randn(S, B, width) for width in widths)
    if variant == "padding":
        inputs += ((torch.arange(S) >= torch.tensor([[S - 2], [S]]))[:, None, None],)
    if variant == "arbitrary":
        inputs += ((torch.rand(B, 1, S, S) < 0.5) & ~torch.eye(S, dtype=torch.bool),)
    check(model, inputs, None, path, casts=0)


@pytest.mark.parametrize(
    ("name", "dynamic"), [("high", True), ("delayed", False), ("current", True)]
)
def test_multihead_attention(name, dynamic, path):
    module = attention(input_layernorm=True, num_gqa_groups=2, attn_mask_type="causal")
    x, casts = torch.randn(S, B, HIDDEN), 0 if name == "high" else 4
    check(module, (x,), RECIPES[name], path, casts=casts, dynamic=dynamic)


class Rotated(nn.Module):
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
def test_transformer_layer(name, path):
    module = transformer(activation="swiglu", normalization="RMSNorm")
    x, casts = torch.randn(S, B, HIDDEN), 0 if name == "high" else 8
    check(module, (x,), RECIPES[name], path, casts=casts)


def test_layers_with_rotary_positions_have_the_accuracy_of_fp8(path):
    recipe, x = RECIPES["current"], torch.randn(S, B, HIDDEN)
    model = Rotated()
    check(model, (x,), recipe, path, casts=16)
    exact = copy.deepcopy(model).double().eval()(x.double())
    noise = sqnr(eager(model, (x,), recipe)[0], exact)
    assert sqnr(run(path, (x,))[0], exact) > noise - 1.0


class Cached(nn.Module):
    """Attention with a key/value cache."""

    def __init__(self):
        super().__init__()
        self.attention = attention(layer_number=1, attn_mask_type="causal")
        self.cache = float8lab.InferenceParams(B, S)

    def forward(self, x):
        return self.attention(x, inference_params=self.cache)


def exports_fail(module, inputs, recipe, match):
    with (
        pytest.raises(Exception, match=match),
        float8lab.onnx_export(enabled=True),
        in_context(recipe),
    ):
        torch.onnx.export(module, inputs, dynamo=True, verbose=False)


def test_what_cannot_be_exported_says_so():
    x = torch.randn(S, B, HIDDEN)
    recipe = recipes.Float8CurrentScaling(fp8_dpa=True)
    exports_fail(Core().eval(), (x, x, x), recipe, "recipe must have fp8_dpa=False")
    packed = Core(qkv_format="thd", attn_mask_type="padding").eval()
    exports_fail(packed, (x[:, 0],) * 3, None, "qkv_format must be 'sbhd' or 'bshd' inside")
    exports_fail(Cached().eval(), (x,), None, "inference_params must be None inside")


def test_export_changes_no_state(path):
    recipe = RECIPES["delayed"]
    model = transformer(hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(S, B, HIDDEN)
    with in_context(recipe):
        model(x).sum().backward()
    model.zero_grad()
    twin = copy.deepcopy(model)
    export(model, (x,), recipe, path)  # in training mode, too
    assert models.states(model) == models.states(twin)
    for m in (model, twin):
        with in_context(recipe):
            m(3 * x).sum().backward()
    assert models.same_gradients(model, twin)
    assert models.states(model) == models.states(twin)


@pytest.mark.parametrize("name", RECIPES)
def test_grouped_linear(name, path):
    """Every expert applied to all rows, for a graph has no sizes of groups."""
    module = float8lab.GroupedLinear(3, HIDDEN, 96, device="cpu")
    for bias in (module.bias0, module.bias1, module.bias2):
        nn.init.normal_(bias)
    x, splits = torch.randn(20, HIDDEN), torch.tensor([7, 0, 9])
    # Under a scale per tensor, that of each expert's rows and of its weight.
    casts = {"high": 0, "delayed": 6, "current": 6}.get(name, 4)
    check(module, (x, splits), RECIPES[name], path, casts=casts, least=SAME_DB)
