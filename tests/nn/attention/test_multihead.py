"""MultiheadAttention: the effect of every parameter, against a plain float64 composition."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab import recipes
from float8lab.nn import MultiheadAttention, RotaryPositionEmbedding, apply_rotary_pos_emb
from tests.nn.attention import oracle

HIDDEN, H, G, D, B, S, SE = 32, 4, 2, 8, 2, 5, 7
CONFIGS = {
    "split": {},
    "fused": {"fuse_qkv_params": True},
    "fused-concatenated": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
}
each_config = pytest.mark.parametrize("config", CONFIGS)


def build(**kwargs):
    kwargs = {
        "num_gqa_groups": G, "attention_dropout": 0.0, "qkv_format": "bshd", "device": "cpu",
        "init_method": nn.init.xavier_normal_, "output_layer_init_method": nn.init.xavier_normal_,
        **kwargs,
    }  # fmt: skip
    module = MultiheadAttention(HIDDEN, H, **kwargs)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name.endswith("bias") or "layer_norm" in name:
                p.add_(torch.randn_like(p) * 0.3)
    return module


def parameters(module):
    """The weights and biases of q, k, v, proj and the norm in float64, for ``float64_layer``."""
    p = {n: v.detach().double() for n, v in module.named_parameters()}
    d = module.kv_channels
    groups, heads = module.num_gqa_groups, module.num_attention_heads
    tensors = {}
    for kind in ("weight", "bias"):
        get = lambda name, kind=kind: p.get(f"{name}{kind}")  # noqa: E731
        if module.attention_type == "self":
            prefix = "layernorm_qkv." if module.input_layernorm else "qkv."
            if not module.fuse_qkv_params:
                parts = [get(f"{prefix}{n}_") for n in ("query", "key", "value")]
            elif get(prefix) is None:
                parts = [None] * 3
            elif module.qkv_weight_interleaved:
                fused = get(prefix).unflatten(0, (groups, heads // groups + 2, d))
                parts = [x.flatten(0, 2) for x in fused.split([heads // groups, 1, 1], 1)]
            else:
                parts = get(prefix).split([heads * d, groups * d, groups * d])
        else:
            prefix = "layernorm_query." if module.input_layernorm else "query_layer."
            query = get(prefix if module.fuse_qkv_params else f"{prefix}query_")
            if not module.fuse_qkv_params:
                key_value = [get(f"key_value.{n}_") for n in ("key", "value")]
            elif get("key_value.") is None:
                key_value = [None] * 2
            elif module.qkv_weight_interleaved:
                fused = get("key_value.").unflatten(0, (groups, 2, d))
                key_value = [x.flatten(0, 1) for x in fused.unbind(1)]
            else:
                key_value = get("key_value.").chunk(2)
            parts = [query, *key_value]
        tensors[kind] = [*parts, get("proj.")]
        tensors[f"norm_{kind}"] = p.get(f"{prefix}layer_norm_{kind}")
    return tensors


def float64_layer(module, x, encoder=None, *, visible, eps=1e-5, angles=None):
    """The layer in float64; returns its output, the bias of proj, and the norm's output."""
    w = parameters(module)
    x = x.double()
    normed = x
    if module.input_layernorm:
        gamma = w["norm_weight"]
        norm = module.layernorm_qkv if encoder is None else module.layernorm_query
        gamma = gamma + 1 if norm.zero_centered_gamma else gamma
        if w["norm_bias"] is None:
            normed = F.rms_norm(x, (HIDDEN,), gamma, eps)
        else:
            normed = F.layer_norm(x, (HIDDEN,), gamma, w["norm_bias"], eps)
    source = normed if encoder is None else encoder.double()
    q, k, v = (
        F.linear(inp, weight, bias).unflatten(-1, (-1, module.kv_channels))
        for inp, weight, bias in zip((normed, source, source), w["weight"], w["bias"], strict=False)
    )
    p = {n: v.detach().double() for n, v in module.named_parameters()}
    if module.qk_norm_before_rope:
        q, k = qk_norm(p, q, "q"), qk_norm(p, k, "k")
    if angles is not None:
        q, k = (
            apply_rotary_pos_emb(t, a.double(), "bshd", interleaved=module.rotary_pos_interleaved)
            for t, a in zip((q, k), angles, strict=True)
        )
    if not module.qk_norm_before_rope:
        q, k = qk_norm(p, q, "q"), qk_norm(p, k, "k")
    context = oracle.attend(q, k, v, visible, sinks=p.get("core_attention.softmax_offset"))
    y = F.linear(context, w["weight"][3], None if module.return_bias else w["bias"][3])
    return y, w["bias"][3], normed


def qk_norm(p, x, side):
    weight, bias = p.get(f"{side}_norm.weight"), p.get(f"{side}_norm.bias")
    if weight is None:
        return x
    if bias is None:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-6)


def causal(b, h, i, j):
    return j <= i


def everything(b, h, i, j):
    return True


def close(actual, expected):
    return torch.allclose(actual.double(), expected, atol=1e-5, rtol=1e-5)


@each_config
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("norm", [None, "LayerNorm", "RMSNorm"], ids=str)
def test_self_attention_equals_float64(config, bias, norm):
    kwargs = {} if norm is None else {"input_layernorm": True, "normalization": norm}
    module = build(bias=bias, **CONFIGS[config], **kwargs)
    x = torch.randn(B, S, HIDDEN)
    assert close(module(x), float64_layer(module, x, visible=causal)[0])
    assert any(n.endswith("bias") and "layer_norm" not in n for n, _ in
               module.named_parameters()) is bias  # fmt: skip


@each_config
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_cross_attention_equals_float64(config, norm):
    module = build(
        attention_type="cross", attn_mask_type="no_mask", input_layernorm=norm, **CONFIGS[config]
    )
    x, encoder = torch.randn(B, S, HIDDEN), torch.randn(B, SE, HIDDEN)
    y = module(x, encoder_output=encoder)
    assert close(y, float64_layer(module, x, encoder, visible=everything)[0])


def test_every_gradient_equals_float64():
    module = build(input_layernorm=True)
    x = torch.randn(B, S, HIDDEN, requires_grad=True)
    dy = torch.randn(B, S, HIDDEN)
    module(x).backward(dy)
    twin = copy.deepcopy(module).double()
    for backend in twin.modules():
        if hasattr(backend, "backends"):
            backend.backends = ("reference",)
    x64 = x.detach().double().requires_grad_()
    twin.zero_grad()
    twin(x64).backward(dy.double())
    assert close(twin(x64), float64_layer(module, x.detach(), visible=causal)[0])
    assert close(x.grad, x64.grad)
    for (name, p), q in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert close(p.grad, q.grad), name


def test_returned_bias_and_norm_output_equal_float64():
    x = torch.randn(B, S, HIDDEN)
    module = build(return_bias=True, input_layernorm=True, return_layernorm_output=True)
    y, bias, normed = module(x)
    expected, expected_bias, expected_normed = float64_layer(module, x, visible=causal)
    assert close(y, expected)
    assert close(bias, expected_bias)
    assert close(normed, expected_normed)
    cross = build(
        attention_type="cross", attn_mask_type="no_mask", input_layernorm=True,
        return_layernorm_output=True,
    )  # fmt: skip
    y, normed = cross(x, encoder_output=x)
    expected, _, expected_normed = float64_layer(cross, x, x, visible=everything)
    assert close(y, expected)
    assert close(normed, expected_normed)


def test_zero_centered_gamma_and_epsilon_of_the_norm_take_effect():
    x = torch.randn(B, S, HIDDEN)
    module = build(input_layernorm=True, zero_centered_gamma=True, layernorm_epsilon=0.5)
    assert close(module(x), float64_layer(module, x, visible=causal, eps=0.5)[0])
    fresh = MultiheadAttention(HIDDEN, H, input_layernorm=True, zero_centered_gamma=True,
                               device="cpu")  # fmt: skip
    assert torch.equal(fresh.layernorm_qkv.layer_norm_weight, torch.zeros(HIDDEN))


def test_kv_channels_and_groups_equal_float64():
    for kwargs in ({"kv_channels": 16}, {"num_gqa_groups": None}, {"num_gqa_groups": 1}):
        module = build(**kwargs)
        x = torch.randn(B, S, HIDDEN)
        assert close(module(x), float64_layer(module, x, visible=causal)[0])
    assert build(kv_channels=16).proj.weight.shape == (HIDDEN, 64)


def test_scale_mask_and_window_reach_the_attention():
    x = torch.randn(B, S, HIDDEN)
    module = build(attn_mask_type="no_mask", window_size=(1, 1))
    windowed = float64_layer(module, x, visible=lambda b, h, i, j: abs(i - j) <= 1)[0]
    assert close(module(x), windowed)
    causal_windowed = float64_layer(module, x, visible=lambda b, h, i, j: 0 <= i - j <= 2)[0]
    assert close(module(x, attn_mask_type="causal", window_size=(2, 0)), causal_windowed)
    mask = torch.arange(S) >= torch.tensor([[3], [S]])
    y = module(x, mask[:, None, None], attn_mask_type="padding", window_size=(-1, -1))
    visible = lambda b, h, i, j: max(i, j) < (3, S)[b]  # noqa: E731
    assert close(y, float64_layer(module, x, visible=visible)[0])
    assert build(softmax_scale=0.5).core_attention.softmax_scale == 0.5


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("pair", [False, True], ids=["shared-angles", "pair"])
def test_rotary_embeddings_equal_float64(pair, interleaved):
    module = build(rotary_pos_interleaved=interleaved)
    x = torch.randn(B, S, HIDDEN)
    rope = RotaryPositionEmbedding(D, interleaved=interleaved, device="cpu")
    angles = (rope(S), rope(S, offset=3)) if pair else (rope(S), rope(S))
    y = module(x, rotary_pos_emb=angles if pair else angles[0])
    assert close(y, float64_layer(module, x, visible=causal, angles=angles)[0])
    assert not close(module(x), y.double())


@pytest.mark.parametrize("before_rope", [False, True], ids=["after-rope", "before-rope"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_qk_norms_and_sinks_equal_float64_and_have_gradients(kind, before_rope):
    names = {"qk_norm_type": kind, "qk_norm_before_rope": before_rope, "softmax_type": "learnable"}
    module = build(**names)
    new_names = {n for n, _ in module.named_parameters()} - {
        n for n, _ in build().named_parameters()
    }
    norms = {"q_norm.weight", "k_norm.weight"}
    norms |= {"q_norm.bias", "k_norm.bias"} if kind == "LayerNorm" else set()
    assert new_names == {*norms, "core_attention.softmax_offset"}
    assert module.core_attention.softmax_offset.shape == (H,)
    with torch.no_grad():
        for name in new_names:
            module.get_parameter(name).add_(torch.randn_like(module.get_parameter(name)))
    angles, x = RotaryPositionEmbedding(D, device="cpu")(S), torch.randn(B, S, HIDDEN)
    y = module(x, rotary_pos_emb=angles)
    assert close(y, float64_layer(module, x, visible=causal, angles=(angles, angles))[0])
    y.sum().backward()
    assert all(module.get_parameter(name).grad.any() for name in new_names)
    module.reset_parameters()
    assert not module.core_attention.softmax_offset.any()
    layer = float8lab.TransformerLayer(HIDDEN, HIDDEN, H, G, device="cpu", **names)
    layer.self_attention.load_state_dict(build(**names, input_layernorm=True).state_dict())


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_l2_normalization_and_its_gradient_equal_float64(size):
    module = build(qk_norm_type="L2Normalization", qk_norm_eps=1e-6)
    assert module.state_dict().keys() == build().state_dict().keys()
    x = (torch.randn(3, 2, 4, D) * size).requires_grad_()
    exact = x.detach().double().requires_grad_()
    expected = exact / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    dy = torch.randn(3, 2, 4, D)
    for y in module._normalized(x, x):
        assert close(y, expected)
        oracle.assert_close(
            oracle.gradients(y, [x], dy),
            torch.autograd.grad(expected, exact, dy.double(), retain_graph=True),
            torch.float32,
        )


def test_parameter_names_are_those_of_transformer_engine():
    names = lambda **kwargs: {n for n, _ in build(**kwargs).named_parameters()}  # noqa: E731
    split = {f"qkv.{n}_{kind}" for n in ("query", "key", "value") for kind in ("weight", "bias")}
    proj = {"proj.weight", "proj.bias"}
    norm = {"layer_norm_weight", "layer_norm_bias"}
    assert names() == split | proj
    assert names(fuse_qkv_params=True, bias=False) == {"qkv.weight", "proj.weight"}
    expected = {f"layernorm_qkv.{n.removeprefix('qkv.')}" for n in split}
    assert names(input_layernorm=True) == expected | {f"layernorm_qkv.{n}" for n in norm} | proj
    cross = {f"key_value.{n}_{kind}" for n in ("key", "value") for kind in ("weight", "bias")}
    query = {"query_layer.query_weight", "query_layer.query_bias"}
    assert names(attention_type="cross") == cross | query | proj


def test_state_dicts_of_transformer_engine_load():
    module = build(input_layernorm=True)
    extra = {"core_attention._extra_state": torch.zeros(3), "proj._extra_state": None}
    state = {**module.state_dict(), **extra}
    assert build(input_layernorm=True).load_state_dict(state, strict=True)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        module.load_state_dict({**state, "proj.extra": torch.zeros(1)})


def test_init_methods_dtype_and_device_take_effect():
    module = MultiheadAttention(
        16, 2, init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_, device="meta",
        params_dtype=torch.bfloat16,
    )  # fmt: skip
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in module.parameters())
    module = build(init_method=nn.init.ones_, output_layer_init_method=nn.init.zeros_)
    assert torch.equal(module.qkv.query_weight, torch.ones(H * D, HIDDEN))
    assert torch.equal(module.proj.weight, torch.zeros(HIDDEN, H * D))
    default = MultiheadAttention(256, 4, device="cpu")
    assert default.qkv.query_weight.std().item() == pytest.approx(0.023, rel=0.05)


RECIPES = {
    "delayed": recipes.DelayedScaling(fp8_dpa=True),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(fp8_mha=True),
}


@each_config
@pytest.mark.parametrize("name", RECIPES)
def test_fp8_equals_the_projections_and_attention_called_in_turn(config, name):
    """The module equals its fused projection, attention and output projection, called in turn."""
    module = build(input_layernorm=True, **CONFIGS[config])
    parts = copy.deepcopy(module)
    x, dy = torch.randn(B, S, HIDDEN), torch.randn(B, S, HIDDEN)
    for _ in range(2):  # the delayed scales of the second step come from the first
        results = []
        with float8lab.autocast(recipe=RECIPES[name]):
            y = module(x)
        with float8lab.autocast(recipe=RECIPES[name]):
            mixed = parts.layernorm_qkv(x)
            if parts.qkv_weight_interleaved:
                mixed = mixed.unflatten(-1, (G, H // G + 2, D))
                order = [[g, r] for g in range(G) for r in range(H // G)]
                heads = [mixed[..., g, r, :] for g, r in order]
                heads += [mixed[..., g, H // G + kind, :] for kind in (0, 1) for g in range(G)]
                mixed = torch.stack(heads, -2)
            else:
                mixed = mixed.unflatten(-1, (H + 2 * G, D))
            q, k, v = mixed[..., :H, :], mixed[..., H : H + G, :], mixed[..., H + G :, :]
            expected = parts.proj(parts.core_attention(q, k, v))
        for m, out in ((module, y), (parts, expected)):
            m.zero_grad()
            out.backward(dy)
            results.append([out, *(p.grad for p in m.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(y, module(x))


def test_is_first_microbatch_reaches_the_projections(monkeypatch):
    calls = []
    original = float8lab.nn.linear.Linear.forward

    def forward(self, inp, is_first_microbatch=None):
        calls.append(is_first_microbatch)
        return original(self, inp, is_first_microbatch)

    monkeypatch.setattr(float8lab.nn.linear.Linear, "forward", forward)
    module = build()
    module(torch.randn(B, S, HIDDEN), is_first_microbatch=False)
    assert calls == [False, False]


def test_wrong_arguments_are_refused():
    cases = [
        ({"num_attention_heads": 5}, ValueError, "num_attention_heads must divide"),
        ({"return_layernorm_output": True}, ValueError, "return_layernorm_output must be False"),
        ({"fuse_wgrad_accumulation": True}, ValueError, "fuse_wgrad_accumulation must be False"),
        (
            {"tp_size": 4, "set_parallel_mode": True, "num_gqa_groups": 2}, ValueError,
            "num_gqa_groups must be a multiple of the 4 tensor-parallel ranks; got 2",
        ),
        ({"qkv_format": "bhsd"}, ValueError, "qkv_format must be one of"),
    ]  # fmt: skip
    for kwargs, error, message in cases:
        with pytest.raises(error, match=message):
            MultiheadAttention(**{"hidden_size": 32, "num_attention_heads": 4, **kwargs})
    x = torch.randn(B, S, HIDDEN)
    with pytest.raises(ValueError, match="encoder_output must be None in self attention"):
        build()(x, encoder_output=x)
    cross = build(attention_type="cross")
    with pytest.raises(ValueError, match="encoder_output must be given"):
        cross(x)
    with pytest.raises(NotImplementedError, match="inference_params must be None in cross"):
        cross(x, encoder_output=x, inference_params=float8lab.InferenceParams(2, 8))


def test_parallel_arguments_have_no_effect_on_one_rank():
    module = build(sequence_parallel=True, set_parallel_mode=True, tp_size=1, tp_group=None,
                   layer_number=3)  # fmt: skip
    module.set_tensor_parallel_group(None)
    module.set_context_parallel_group(None, [0], None)
    x = torch.randn(B, S, HIDDEN)
    assert close(module(x), float64_layer(module, x, visible=causal)[0])
    assert module.core_attention.layer_number == 3
