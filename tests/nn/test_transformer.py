"""TransformerLayer: the effect of every parameter, compositions as oracle, names, training."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab import recipes
from float8lab.nn import RotaryPositionEmbedding, TransformerLayer
from tests.nn import models
from tests.nn.models import report_of
from tests.pairwise import with_slow

HIDDEN, FFN, H, B, S, SE = 32, 48, 4, 2, 6, 5


def build(**kwargs):
    kwargs = {
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "attn_input_format": "bshd",
        "device": "cpu", "init_method": nn.init.xavier_normal_,
        "output_layer_init_method": nn.init.xavier_normal_, **kwargs,
    }  # fmt: skip
    layer = TransformerLayer(HIDDEN, FFN, H, **kwargs)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if name.endswith("bias") or "norm" in name:
                p.add_(torch.randn_like(p) * 0.2)
    return layer


def norm(x, weight, bias, *, eps=1e-5, rms=False):
    if rms:
        return F.rms_norm(x, (HIDDEN,), weight, eps)
    return F.layer_norm(x, (HIDDEN,), weight, bias, eps)


def attention(p, prefix, x, source, mask, heads=H):
    """Multi-head attention of the plain composition; ``mask`` is True where masked out."""
    names = ("query", "key", "value")
    prefixes = [prefix] * 3
    if source is not x:
        prefixes = [
            prefix.replace("layernorm_qkv", "layernorm_query"),
            *["inter_attention.key_value"] * 2,
        ]
    q, k, v = (
        F.linear(inp, p[f"{w}.{n}_weight"], p.get(f"{w}.{n}_bias"))
        .unflatten(-1, (-1, HIDDEN // heads)).transpose(1, 2)
        for inp, w, n in zip((x, source, source), prefixes, names, strict=True)
    )  # fmt: skip
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.transpose(2, 3)) * (HIDDEN // heads) ** -0.5
    y = scores.masked_fill(mask, -torch.inf).softmax(-1) @ v
    proj = prefix.split(".")[0] + ".proj"
    return F.linear(y.transpose(1, 2).flatten(2), p[f"{proj}.weight"], p.get(f"{proj}.bias"))


CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)


def float64_layer(layer, x, encoder=None, *, mask=CAUSAL, rms=False, act="gelu"):
    """The layer in float64, composed of torch's functions."""
    p = {n: v.double() for n, v in layer.named_parameters()}
    x = x.double()
    post, parallel = layer.apply_residual_connection_post_layernorm, layer.parallel_attention_mlp

    def normed(name, t):
        return norm(t, p[f"{name}weight"], p.get(f"{name}bias"), rms=rms)

    def mlp(t):
        h = F.linear(t, p["layernorm_mlp.fc1_weight"], p.get("layernorm_mlp.fc1_bias"))
        if act == "swiglu":
            gate, up = h.chunk(2, -1)
            h = F.silu(gate) * up
        else:
            h = F.gelu(h, approximate="tanh") if act == "gelu" else F.relu(h)
        return F.linear(h, p["layernorm_mlp.fc2_weight"], p.get("layernorm_mlp.fc2_bias"))

    first = x
    prefix = "self_attention.qkv"
    if not layer.output_layernorm:
        prefix = "self_attention.layernorm_qkv"
        first = normed(f"{prefix}.layer_norm_", x)
    attended = attention(p, prefix, first, first, mask)
    if parallel:
        return x + attended + mlp(normed("layernorm_mlp.layer_norm_", x))
    x = (first if post and not layer.output_layernorm else x) + attended
    if encoder is not None:
        second = normed("inter_attention.layernorm_query.layer_norm_", x)
        no_mask = torch.zeros(S, SE, dtype=torch.bool)
        attended = attention(p, "inter_attention.layernorm_qkv", second, encoder.double(), no_mask)
        x = (second if post else x) + attended
    third = normed("layernorm_mlp.layer_norm_", x)
    x = (third if post else x) + mlp(third)
    return normed("layernorm.", x) if layer.output_layernorm else x


def close(actual, expected):
    """Whether the error is at most 32 roundings of the largest value.

    Terms of about 1 may cancel, so an error of 1e-5 is always allowed. The number of float32
    roundings and the order of sums differ between CPUs.
    """
    error = (actual.double() - expected).abs().max().item()
    return error <= max(1e-5, 32 * 2.0**-24 * expected.abs().max().item())


VARIANTS = {
    "default": {},
    "post-norm residual": {"apply_residual_connection_post_layernorm": True},
    "output norm": {"output_layernorm": True},
    "output norm, post-norm residual": {
        "output_layernorm": True, "apply_residual_connection_post_layernorm": True
    },
    "parallel": {"parallel_attention_mlp": True},
    "no bias": {"bias": False},
    "no bias, parallel": {"bias": False, "parallel_attention_mlp": True},
    "decoder": {"layer_type": "decoder"},
    "decoder, post-norm residual": {
        "layer_type": "decoder", "apply_residual_connection_post_layernorm": True
    },
    "llama": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False,
              "num_gqa_groups": 2},
    "relu": {"activation": "relu"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_output_and_every_gradient_equal_the_float64_composition(variant):
    kwargs = VARIANTS[variant]
    layer = build(**kwargs)
    x, dy = torch.randn(B, S, HIDDEN), torch.randn(B, S, HIDDEN)
    encoder = torch.randn(B, SE, HIDDEN) if layer.layer_type == "decoder" else None
    twin = copy.deepcopy(layer).double()
    options = {
        "rms": kwargs.get("normalization") == "RMSNorm",
        "act": kwargs.get("activation", "gelu"),
    }
    results = []
    for module, exact in ((layer, False), (twin, True)):
        dtype = torch.float64 if exact else torch.float32
        leaves = [t.to(dtype).requires_grad_() for t in (x, encoder) if t is not None]
        y = float64_layer(module, *leaves, **options) if exact else module(
            leaves[0], encoder_output=leaves[1] if encoder is not None else None
        )  # fmt: skip
        tensors = [*leaves, *module.parameters()]
        results.append([y, *torch.autograd.grad(y, tensors, dy.to(dtype))])
    names = ["y", "dx", *(["dencoder"] if encoder is not None else [])]
    names += [n for n, _ in layer.named_parameters()]
    for label, actual, expected in zip(names, *results, strict=True):
        assert close(actual, expected), label


def test_mask_window_and_cross_attention_arguments_take_effect():
    x, encoder = torch.randn(B, S, HIDDEN), torch.randn(B, SE, HIDDEN)
    layer = build()
    i, j = torch.arange(S)[:, None], torch.arange(S)
    assert close(layer(x, self_attn_mask_type="no_mask"), float64_layer(layer, x, mask=i < -1))
    assert close(layer(x, window_size=(2, 0)), float64_layer(layer, x, mask=(j > i) | (j < i - 2)))
    assert close(build(window_size=(2, 0))(x), float64_layer(build(window_size=(2, 0)), x)) is False
    fixed = build(self_attn_mask_type="no_mask", window_size=(1, 1))
    assert close(fixed(x), float64_layer(fixed, x, mask=(i - j).abs() > 1))
    mask = torch.rand(B, 1, S, S) < 0.5
    mask[..., 0] = False
    assert close(
        layer(x, mask, self_attn_mask_type="arbitrary"), float64_layer(layer, x, mask=mask)
    )
    decoder = build(layer_type="decoder")
    full = decoder(x, encoder_output=encoder)
    padding = (torch.zeros(B, 1, 1, S).bool(), (torch.arange(SE) >= 3).expand(B, 1, 1, SE))
    padded = decoder(
        x, encoder_output=encoder, enc_dec_attn_mask=padding, enc_dec_attn_mask_type="padding"
    )
    assert torch.allclose(padded, decoder(x, encoder_output=encoder[:, :3]), atol=1e-6)
    assert not torch.allclose(padded, full)
    diagonal = build(
        layer_type="decoder", enc_dec_attn_mask_type="causal", enc_dec_window_size=(0, 0)
    )
    changed = encoder.clone()
    changed[:, 1:] += 1
    a, b = diagonal(x, encoder_output=encoder), diagonal(x, encoder_output=changed)
    assert torch.equal(a[:, 0], b[:, 0])  # query 0 sees only key 0
    assert not torch.allclose(a[:, 1], b[:, 1])
    windowed = decoder(
        x, encoder_output=encoder, enc_dec_attn_mask_type="causal", enc_dec_window_size=(0, 0)
    )
    assert not torch.allclose(windowed, full)


def test_rotary_embeddings_biases_and_checkpointing_reach_the_attention():
    x = torch.randn(B, S, HIDDEN)
    layer = build()
    rope = RotaryPositionEmbedding(HIDDEN // H, device="cpu")(S)
    y = layer(x)
    for call in (
        {"rotary_pos_emb": rope},
        {"rotary_pos_emb": (rope, rope)},
        {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(H)},
        {
            "core_attention_bias_type": "post_scale_bias",
            "core_attention_bias": torch.randn(1, H, S, S),
        },
    ):
        assert not torch.allclose(layer(x, **call), y)
    assert torch.equal(layer(x, checkpoint_core_attention=True, fast_zero_fill=False), y)


@pytest.mark.parametrize("attn_input_format", ["sbhd", "thd"])
def test_sbhd_and_thd_inputs_equal_bshd(attn_input_format):
    bshd = build(self_attn_mask_type="padding_causal").double()
    layer = build(self_attn_mask_type="padding_causal", attn_input_format=attn_input_format)
    layer.double().load_state_dict(bshd.state_dict())
    x, lengths = torch.randn(B, S, HIDDEN, dtype=torch.float64), [4, 6]
    call = {
        "cu_seqlens_q": torch.tensor([0, 4, 10], dtype=torch.int32), "max_seqlen_q": S,
        "rotary_pos_emb": RotaryPositionEmbedding(HIDDEN // H, device="cpu")(S),
    }  # fmt: skip
    expected = bshd(x, **call)
    if attn_input_format == "sbhd":
        y = layer(x.transpose(0, 1), **call).transpose(0, 1)
    else:
        y = layer(torch.cat([x[b, :n] for b, n in enumerate(lengths)]), **call)
        expected = torch.cat([expected[b, :n] for b, n in enumerate(lengths)])
    assert torch.allclose(y, expected, rtol=0, atol=1e-12)


def test_cross_attention_in_thd_equals_separate_sequences():
    layer = build(
        layer_type="decoder", attn_input_format="thd", self_attn_mask_type="padding_causal",
        enc_dec_attn_mask_type="padding",
    )  # fmt: skip
    bshd = build(layer_type="decoder")
    bshd.load_state_dict(layer.state_dict())
    x, encoder = torch.randn(7, HIDDEN), torch.randn(8, HIDDEN)
    y = layer(
        x, encoder_output=encoder, cu_seqlens_q=torch.tensor([0, 4, 7]),
        cu_seqlens_kv=torch.tensor([0, 3, 8]), max_seqlen_q=4, max_seqlen_kv=5,
    )  # fmt: skip
    for query_range, key_range in (((0, 4), (0, 3)), ((4, 7), (3, 8))):
        expected = bshd(
            x[None, slice(*query_range)], encoder_output=encoder[None, slice(*key_range)]
        )
        assert torch.allclose(y[slice(*query_range)], expected[0], atol=1e-5)


@pytest.mark.parametrize("attn_input_format", ["sbhd", "bshd"])
def test_drop_path_drops_entire_samples(attn_input_format):
    layer = build(drop_path_rate=0.5, attn_input_format=attn_input_format, layer_type="encoder")
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.self_attention.proj.bias.fill_(1.0)
        layer.layernorm_mlp.fc2_bias.fill_(10.0)
    batch = 400
    shape = (S, batch, HIDDEN) if attn_input_format == "sbhd" else (batch, S, HIDDEN)
    y = layer(torch.zeros(shape))
    y = y if attn_input_format == "bshd" else y.transpose(0, 1)
    per_sample = y[:, 0, 0]
    assert torch.equal(y, per_sample.view(batch, 1, 1).expand_as(y))
    values, counts = per_sample.unique(return_counts=True)
    assert values.tolist() == [0.0, 2.0, 20.0, 22.0]  # each block gives 0 or its doubled output
    assert (counts - batch / 4).abs().max() < 50
    assert torch.equal(layer.eval()(torch.zeros(shape)).unique(), torch.tensor([11.0]))


@pytest.mark.parametrize(
    "kind", [{}, {"output_layernorm": True}, {"parallel_attention_mlp": True}], ids=str
)
@pytest.mark.parametrize("recipe", [None, recipes.Float8CurrentScaling()], ids=["high", "fp8"])
def test_the_residual_stream_has_the_dtype_of_torch_autocast(kind, recipe):
    """As in Transformer Engine, the stream has torch's autocast dtype.

    Gradients have the dtype of their tensors.
    """
    layer = float8lab.TransformerLayer(32, 64, 4, device="cpu", **kind).eval()
    x = torch.randn(5, 2, 32, requires_grad=True)
    in_fp8 = float8lab.autocast(enabled=recipe is not None, recipe=recipe)
    with torch.autocast("cpu", torch.bfloat16), in_fp8:
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert x.grad.dtype == torch.float32
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}
    assert layer(x).dtype == torch.float32


def test_hidden_dropout_acts_before_each_residual():
    layer = build(hidden_dropout=0.25)
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.self_attention.proj.bias.fill_(3.0)
        layer.layernorm_mlp.fc2_bias.fill_(30.0)
    x = torch.zeros(B, 100, HIDDEN)
    values, counts = layer(x).unique(return_counts=True)
    assert values.tolist() == [0.0, 4.0, 40.0, 44.0]
    share = counts / x.numel()
    assert torch.allclose(share, torch.tensor([1, 3, 3, 9]) / 16, atol=0.02)
    assert torch.equal(layer.eval()(x), torch.full_like(x, 33.0))


def test_attention_dropout_is_passed_to_the_core_attention():
    layer = build(attention_dropout=0.5)
    x = torch.randn(B, S, HIDDEN)
    assert layer.self_attention.core_attention.attention_dropout == 0.5
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


def test_parameter_names_are_those_of_transformer_engine():
    names = {n for n, _ in build(layer_type="decoder", bias=False).named_parameters()}
    assert names == {
        "self_attention.layernorm_qkv.layer_norm_weight",
        "self_attention.layernorm_qkv.layer_norm_bias", "self_attention.layernorm_qkv.query_weight",
        "self_attention.layernorm_qkv.key_weight", "self_attention.layernorm_qkv.value_weight",
        "self_attention.proj.weight", "inter_attention.layernorm_query.layer_norm_weight",
        "inter_attention.layernorm_query.layer_norm_bias",
        "inter_attention.layernorm_query.query_weight", "inter_attention.key_value.key_weight",
        "inter_attention.key_value.value_weight", "inter_attention.proj.weight",
        "layernorm_mlp.layer_norm_weight", "layernorm_mlp.layer_norm_bias",
        "layernorm_mlp.fc1_weight", "layernorm_mlp.fc2_weight",
    }  # fmt: skip
    fused = {n for n, _ in build(fuse_qkv_params=True, output_layernorm=True).named_parameters()}
    assert {"self_attention.qkv.weight", "self_attention.qkv.bias", "layernorm.weight"} <= fused
    state = {**build().state_dict(), "self_attention.core_attention._extra_state": None}
    build().load_state_dict(state, strict=True)


def test_constructor_arguments_reach_the_submodules():
    layer = build(
        zero_centered_gamma=True, layernorm_epsilon=1e-3, layer_number=7, kv_channels=12,
        sequence_parallel=True, set_parallel_mode=True, seq_length=S, micro_batch_size=B,
        tp_group=None, tp_size=1, softmax_scale=0.3, rotary_pos_interleaved=True,
        params_dtype=torch.bfloat16, fuse_qkv_params=True, fuse_wgrad_accumulation=True,
        output_layernorm=True, fp8_activation_input=True,
    )  # fmt: skip
    core = layer.self_attention.core_attention
    assert (core.layer_number, core.softmax_scale, core.qk_channels) == (7, 0.3, 12)
    assert layer.self_attention.rotary_pos_interleaved
    assert layer.self_attention.qkv_weight_interleaved
    assert layer.layernorm.eps == layer.layernorm_mlp.eps == 1e-3
    assert layer.layernorm.zero_centered_gamma
    assert layer.layernorm_mlp.zero_centered_gamma
    assert layer.self_attention.qkv.fuse_wgrad_accumulation
    assert layer.layernorm_mlp.fuse_wgrad_accumulation
    assert layer.layernorm_mlp.fp8_activation_input
    assert all(p.dtype == torch.bfloat16 for p in layer.parameters())
    assert layer.layernorm.weight.sequence_parallel
    layer.set_tensor_parallel_group(None)
    layer.set_context_parallel_group(None, [0], None)
    assert layer(torch.randn(B, S, HIDDEN).bfloat16()).dtype == torch.bfloat16
    concatenated = build(fuse_qkv_params=True, qkv_weight_interleaved=False)
    assert not concatenated.self_attention.qkv_weight_interleaved


def test_wrong_arguments_are_refused():
    cases = [
        ({"layer_type": "both"}, ValueError, "layer_type must be"),
        ({"attn_input_format": "bsh"}, ValueError, "attn_input_format must be one of"),
        ({"hidden_dropout": 1.1}, ValueError, "hidden_dropout must be a finite number"),
        ({"drop_path_rate": -0.1}, ValueError, "drop_path_rate must be a finite number"),
        ({"tp_size": 3, "set_parallel_mode": True}, ValueError, "num_gqa_groups must be a multi"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, ValueError, "parallel_att"),
        ({"drop_path_rate": 0.1, "attn_input_format": "thd"}, NotImplementedError, "drop_path"),
        ({"activation": "tanh"}, ValueError, "activation"),
        ({"normalization": "BatchNorm"}, ValueError, "normalization must be"),
    ]
    for kwargs, error, message in cases:
        with pytest.raises(error, match=message):
            TransformerLayer(HIDDEN, FFN, H, device="cpu", **kwargs)
    x = torch.randn(B, S, HIDDEN)
    with pytest.raises(ValueError, match="encoder_output must be None in an encoder layer"):
        build()(x, encoder_output=x)


# test_attention_modules.py compares FP8 with float64, and test_modules.py covers training.
RECIPES = {
    **models.RECIPES,
    "delayed-dpa": recipes.DelayedScaling(fp8_dpa=True),
    "current-dpa": recipes.Float8CurrentScaling(fp8_dpa=True),
}
each_recipe = pytest.mark.parametrize("name", RECIPES)


def step(layer, x, dy, recipe, **kwargs):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(leaf, **kwargs)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in layer.parameters())]


class Composition(nn.Module):
    """The layer, composed of separate norms, linear layers and attention."""

    def __init__(self, layer):
        super().__init__()
        rms = layer.layernorm_mlp.normalization == "RMSNorm"
        make_norm = float8lab.RMSNorm if rms else float8lab.LayerNorm
        attention, mlp = layer.self_attention, layer.layernorm_mlp
        self.norm1, self.norm2 = make_norm(HIDDEN, device="cpu"), make_norm(HIDDEN, device="cpu")
        self.qkv = concatenated_linear(
            *(
                [getattr(attention.layernorm_qkv, f"{n}_{kind}") for n in ("query", "key", "value")]
                for kind in ("weight", "bias")
            )
        )
        self.core = copy.deepcopy(attention.core_attention)
        self.proj = concatenated_linear([attention.proj.weight], [attention.proj.bias])
        self.fc1 = concatenated_linear([mlp.fc1_weight], [mlp.fc1_bias])
        self.fc2 = concatenated_linear([mlp.fc2_weight], [mlp.fc2_bias])
        self.activation, self.parallel = mlp.activation, layer.parallel_attention_mlp
        self.groups = attention.num_gqa_groups
        with torch.no_grad():
            for norm, source in ((self.norm1, attention.layernorm_qkv), (self.norm2, mlp)):
                norm.weight.copy_(source.layer_norm_weight)
                if not rms:
                    norm.bias.copy_(source.layer_norm_bias)

    def mlp(self, x):
        h = self.fc1(x)
        if self.activation == "swiglu":
            gate, up = h.chunk(2, -1)
            return self.fc2(F.silu(gate) * up)
        return self.fc2(F.gelu(h, approximate="tanh"))

    def forward(self, x):
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, HIDDEN // H))
        attended = self.proj(self.core(*heads.split([H, self.groups, self.groups], -2)))
        if self.parallel:
            return x + (attended + self.mlp(self.norm2(x)))
        x = x + attended
        return x + self.mlp(self.norm2(x))


def concatenated_linear(weights, biases):
    weight = torch.cat([w.detach() for w in weights])
    layer = float8lab.Linear(weight.shape[1], len(weight), bias=biases[0] is not None, device="cpu")
    with torch.no_grad():
        layer.weight.copy_(weight)
        if biases[0] is not None:
            layer.bias.copy_(torch.cat([b.detach() for b in biases]))
    return layer


@each_recipe
@pytest.mark.parametrize("variant", ["default", "llama", "parallel"])
def test_fp8_equals_the_composition_of_modules(name, variant):
    """Other tests bound the errors of these modules; the second step uses delayed scales."""
    layer = build(**VARIANTS[variant])
    composed = Composition(layer)
    for _ in range(2):
        x, dy = torch.randn(B, S, HIDDEN), torch.randn(B, S, HIDDEN)
        y, dx, *_ = step(layer, x, dy, RECIPES[name])
        y2, dx2, *_ = step(composed, x, dy, RECIPES[name])
        attention, mlp = layer.self_attention, layer.layernorm_mlp
        parts = [getattr(attention.layernorm_qkv, f"{n}_weight") for n in ("query", "key", "value")]
        pairs = [
            (y, y2), (dx, dx2), (torch.cat([p.grad for p in parts]), composed.qkv.weight.grad),
            (attention.proj.weight.grad, composed.proj.weight.grad),
            (mlp.fc1_weight.grad, composed.fc1.weight.grad),
            (mlp.fc2_weight.grad, composed.fc2.weight.grad),
            (mlp.layer_norm_weight.grad, composed.norm2.weight.grad),
            (attention.layernorm_qkv.layer_norm_weight.grad, composed.norm1.weight.grad),
        ]  # fmt: skip
        for actual, expected in pairs:
            # Float32 sums in another order may flip a rounding to FP8: 1/16 of one of many values.
            assert (actual - expected).norm() <= 0.01 * expected.norm()
        assert not torch.equal(y, step(layer, x, dy, None)[0])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("name", "mask_type"),
    [
        pytest.param("current-dpa", "causal", marks=pytest.mark.slow),
        pytest.param("current", "window", marks=pytest.mark.slow),
        ("current", "padding_causal"),
    ],
)
def test_all_sequence_lengths_compile_at_most_twice(name, mask_type):
    layer, backend = build(num_gqa_groups=2), models.CountingBackend()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    rope = RotaryPositionEmbedding(HIDDEN // H, device="cpu")(256)
    for length in (70, 65, 128, 129):
        call = {"rotary_pos_emb": rope}
        if mask_type == "window":
            call["window_size"] = (16, 0)
        if mask_type == "padding_causal":
            call["self_attn_mask_type"] = mask_type
            lengths = torch.tensor([[length - 9], [length]])
            call["attention_mask"] = (torch.arange(length) >= lengths)[:, None, None]
        x = torch.randn(2, length, HIDDEN)
        with float8lab.autocast(recipe=RECIPES[name]), torch.no_grad():
            assert torch.equal(compiled(x, **call), layer(x, **call))
    assert backend.graphs <= 2


def test_weights_stored_in_fp8_train():
    with float8lab.fp8_model_init():
        layer = TransformerLayer(32, 64, 4, attn_input_format="bshd", device="cpu")
    stored = [n for n, p in layer.named_parameters() if isinstance(p, float8lab.Float8Tensor)]
    assert len(stored) == 6
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        layer(torch.randn(B, S, 32)).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@with_slow({"current-dpa"}, "delayed", "current", "block", "current-dpa")
def test_a_small_model_learns_in_fp8_and_in_high_precision(name):
    """The loss of next-token prediction of a fixed sequence falls below 1 in both precisions."""
    losses = {}
    for label, recipe in (("fp8", RECIPES[name]), ("high", None)):
        torch.manual_seed(0)
        embed = nn.Embedding(16, HIDDEN)
        layers = nn.ModuleList(build(layer_number=n) for n in (1, 2))
        head = float8lab.Linear(HIDDEN, 16, device="cpu")
        optimizer = torch.optim.Adam(
            [*embed.parameters(), *layers.parameters(), *head.parameters()], lr=3e-3
        )
        tokens = torch.randint(16, (4, 17))
        for _ in range(30):
            with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
                x = embed(tokens[:, :-1])
                for layer in layers:
                    x = layer(x)
                logits = head(x)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[label] = loss.item()
    assert losses["high"] < 1.0
    assert losses["fp8"] < 1.0


@pytest.mark.parametrize("name", ["delayed-dpa", "current-dpa"])
def test_a_converted_layer_runs_attention_in_fp8(name):
    layer = build()
    twin = copy.deepcopy(layer)
    report = report_of(layer, RECIPES[name])
    assert "1 of 1 attention modules in FP8" in str(report)
    for _ in range(2):
        x, dy = torch.randn(B, S, HIDDEN), torch.randn(B, S, HIDDEN)
        expected = step(twin, x, dy, RECIPES[name])
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        actual = [y, leaf.grad, *(p.grad for p in layer.parameters())]
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


def test_exclusions_and_overrides_apply_to_attention():
    recipe = RECIPES["current-dpa"]
    layers = nn.ModuleList(build() for _ in range(3))
    report = report_of(
        layers, recipe, exclude=["0.self_attention.core_attention"],
        overrides={"1.self_attention.core_attention": None}, strict=True,
    )  # fmt: skip
    assert report.notes == ("1 of 3 attention modules in FP8",)
    cores = [layer.self_attention.core_attention for layer in layers]
    assert [core._fp8.active_recipe() for core in cores] == [None, None, recipe]
    with float8lab.autocast(recipe=recipe):
        assert [core._fp8.active_recipe() for core in cores] == [recipe, None, recipe]
    assert report_of(nn.ModuleList([build()]), RECIPES["current"]).notes == ()


def test_a_conversion_reports_that_it_found_no_attention_for_fp8():
    report = report_of(nn.Sequential(nn.Linear(16, 16)), RECIPES["current-dpa"])
    assert "has no float8lab.DotProductAttention; attention stays in high" in str(report)


@pytest.mark.gpu
@each_recipe
def test_fp8_errors_on_a_gpu_are_those_of_the_cpu(name):
    layer = TransformerLayer(
        256, 512, 4, num_gqa_groups=2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu",
        attn_input_format="bshd", normalization="RMSNorm", activation="swiglu",
        init_method=nn.init.xavier_normal_, output_layer_init_method=nn.init.xavier_normal_,
    )  # fmt: skip
    x, dy = torch.randn(2, 2, 128, 256)
    twin = copy.deepcopy(layer).cuda()
    for _ in range(2):
        results = step(twin, x.cuda(), dy.cuda(), RECIPES[name]), step(layer, x, dy, RECIPES[name])
    high = step(layer, x, dy, None)
    names = ["y", "dx", *(label for label, _ in layer.named_parameters())]
    sizes = {label: exact.norm() for label, exact in zip(names, high, strict=True)}
    prefix = "self_attention.layernorm_qkv."
    # Softmax cancels a bias of the keys, so its gradient is 0; that of the queries sets the scale.
    sizes[f"{prefix}key_bias"] = sizes[f"{prefix}query_bias"]
    for label, gpu, cpu, exact in zip(names, *results, high, strict=True):
        # Sums in another order flip a few roundings to FP8, which change the inputs of the next
        # cast. After some casts the roundings differ, and only the sizes of the errors are equal:
        # under noise of 1e-3 in each GEMM, norms of 128 or more values differ by a factor of 1.25.
        bound = 1.5 * (cpu - exact).norm() + 1e-5 * sizes[label]
        assert (gpu.cpu() - exact).norm() <= bound, label
    assert (results[0][0].cpu() - high[0]).norm() >= 0.5 * (results[1][0] - high[0]).norm()
