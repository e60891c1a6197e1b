"""Conversion of Llama and GPT-2 weights, compared with plain torch layers and transformers."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from float8lab.integrations import (
    from_transformer_layers,
    to_transformer_layers,
    transformer_layers,
)
from float8lab.nn import RotaryPositionEmbedding, TransformerLayer
from tests.nn.models import GatedMLP

LLAMA = SimpleNamespace(
    hidden_size=32, intermediate_size=56, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=2, rms_norm_eps=1e-5, hidden_act="silu", attention_bias=False, mlp_bias=False,
    head_dim=8, rope_theta=10000.0,
)  # fmt: skip
GPT2 = SimpleNamespace(
    n_embd=32, n_inner=None, n_head=4, n_layer=2, resid_pdrop=0.0, attn_pdrop=0.0,
    layer_norm_epsilon=1e-5, activation_function="gelu_new",
)  # fmt: skip


def with_fields(config, **fields):
    return SimpleNamespace(**{**vars(config), **fields})


class LlamaAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head = c.head_dim
        bias = c.attention_bias
        for name, heads in (("q", c.num_attention_heads), ("k", c.num_key_value_heads),
                            ("v", c.num_key_value_heads)):  # fmt: skip
            setattr(self, f"{name}_proj", nn.Linear(c.hidden_size, heads * self.head, bias=bias))
        self.o_proj = nn.Linear(c.num_attention_heads * self.head, c.hidden_size, bias=bias)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        n = torch.arange(0, self.head, 2) / self.head
        angle = torch.outer(torch.arange(x.shape[1]).double(), 10000.0 ** -n.double())
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)

        def rotate(t):
            a, b = t.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (rotate(k), v))
        scores = rotate(q) @ k.transpose(2, 3) * self.head**-0.5
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = scores.masked_fill(future, -torch.inf).softmax(-1) @ v
        return self.o_proj(y.transpose(1, 2).flatten(2))


class LlamaLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.self_attn = LlamaAttention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is stored transposed."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(
            torch.empty(outputs)
        )  # fmt: skip

    def forward(self, x):
        return x @ self.weight + self.bias


class Gpt2Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        width = c.n_embd
        self.heads = c.n_head
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.c_attn, self.attn.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        self.mlp.c_fc, self.mlp.c_proj = Conv1D(width, 4 * width), Conv1D(4 * width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.c_proj(y.transpose(1, 2).flatten(2))
        h = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate="tanh")
        return x + self.mlp.c_proj(h)


def plain_model(style, config):
    """The layers with the parameter names of transformers, and their state; values are random."""
    layer_class, count = (LlamaLayer, 2) if style == "llama" else (Gpt2Layer, 2)
    layers = nn.ModuleList(layer_class(config) for _ in range(count))
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randn_like(p) * 0.2)
    prefix = "model.layers." if style == "llama" else "transformer.h."
    state = {f"{prefix}{key}": value for key, value in layers.state_dict().items()}
    return layers, {**state, "lm_head.weight": torch.randn(5, 32)}


def run_layers(layers, x, rope):
    for layer in layers:
        x = layer(x, rotary_pos_emb=rope)
    return x


CASES = {
    "llama": ("llama", LLAMA),
    "llama with biases": ("llama", with_fields(LLAMA, attention_bias=True, mlp_bias=True)),
    "llama of wide heads": ("llama", with_fields(LLAMA, head_dim=12, num_key_value_heads=1)),
    "gpt2": ("gpt2", GPT2),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_those_of_plain_layers(case):
    style, config = CASES[case]
    plain, state = plain_model(style, config)
    plain = plain.double()
    layers = transformer_layers(config, style, device="cpu", params_dtype=torch.float64)
    library_state = to_transformer_layers({k: v.double() for k, v in state.items()}, style)
    head = library_state.pop("lm_head.weight")
    assert torch.equal(head, state["lm_head.weight"].double())
    layers.load_state_dict(library_state, strict=True)
    x = torch.randn(2, 7, 32, dtype=torch.float64)
    dy = torch.randn_like(x)
    rope = RotaryPositionEmbedding(config.head_dim)(7) if style == "llama" else None
    y = run_layers(layers, x, rope)
    expected = x
    for layer in plain:
        expected = layer(expected)
    assert torch.allclose(y, expected, atol=1e-5)  # rotary angles are float32
    y.backward(dy)
    expected.backward(dy)
    grads = {f"{n}": p.grad for n, p in layers.named_parameters()}
    plain_grads = from_transformer_layers(grads, style, prefix="")
    for name, p in plain.named_parameters():
        assert torch.allclose(plain_grads[name], p.grad, atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("case", CASES)
def test_conversion_round_trip_is_exact(case):
    style, config = CASES[case]
    _, state = plain_model(style, config)
    library_state = to_transformer_layers(state, style)
    restored = from_transformer_layers(library_state, style)
    assert restored.keys() == state.keys()
    assert all(torch.equal(restored[key], state[key]) for key in state)
    prefixed = {key.replace("model.layers.", "blocks."): value for key, value in state.items()}
    prefixed = {key.replace("transformer.h.", "blocks."): v for key, v in prefixed.items()}
    from_prefixed = to_transformer_layers(prefixed, style, prefix="blocks.")
    assert all(torch.equal(from_prefixed[key], library_state[key]) for key in library_state)


def test_unknown_keys_and_configurations_are_refused():
    _, state = plain_model("llama", LLAMA)
    with pytest.raises(ValueError, match="style must be one of 'llama', 'gpt2' or 'megatron'; got"):
        to_transformer_layers(state, "bert")
    with pytest.raises(ValueError, match="state must have keys of layers"):
        to_transformer_layers(state, "gpt2")
    state["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    with pytest.raises(ValueError, match=r"self_attn\.q_norm\.weight"):
        to_transformer_layers(state, "llama")
    with pytest.raises(ValueError, match="state must hold only parameters that a gpt2 layer has"):
        from_transformer_layers({"0.self_attention.q_norm": torch.ones(1)}, "gpt2")
    for config, style in (
        (with_fields(LLAMA, hidden_act="gelu"), "llama"),
        (with_fields(LLAMA, mlp_bias=True), "llama"),
        (with_fields(GPT2, activation_function="tanh"), "gpt2"),
        (with_fields(GPT2, scale_attn_by_inverse_layer_idx=True), "gpt2"),
    ):
        with pytest.raises(NotImplementedError, match="config"):
            transformer_layers(config, style)


def test_qk_norms_and_sinks_are_mapped_to_megatron_and_back():
    layer = TransformerLayer(
        32, 48, 4, qk_norm_type="RMSNorm", softmax_type="learnable", fuse_qkv_params=True,
        device="cpu",
    )  # fmt: skip
    library_state = {f"0.{name}": value for name, value in layer.state_dict().items()}
    megatron_state = from_transformer_layers(library_state, "megatron")
    qk_parameters = {"q_layernorm.weight", "k_layernorm.weight", "core_attention.softmax_offset"}
    assert megatron_state.keys() > {
        f"decoder.layers.0.self_attention.{name}" for name in qk_parameters
    }
    assert to_transformer_layers(megatron_state, "megatron").keys() == library_state.keys()


def test_attention_bias_buffers_of_older_checkpoints_are_dropped():
    _, state = plain_model("gpt2", GPT2)
    with_buffer = {**state, "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    assert (
        to_transformer_layers(with_buffer, "gpt2").keys()
        == to_transformer_layers(state, "gpt2").keys()
    )


def test_layers_follow_the_configuration_and_overrides():
    config = with_fields(GPT2, scale_attn_weights=False, resid_pdrop=0.2)
    layers = transformer_layers(config, "gpt2", device="cpu", attn_input_format="sbhd")
    assert [layer.layer_number for layer in layers] == [1, 2]
    assert layers[0].self_attention.core_attention.softmax_scale == 1.0
    assert (layers[0].hidden_dropout, layers[0].attn_input_format) == (0.2, "sbhd")


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_outputs_equal_those_of_transformers_models(style):
    transformers = pytest.importorskip("transformers")
    if style == "llama":
        config = transformers.LlamaConfig(
            hidden_size=32, intermediate_size=56, num_attention_heads=4, num_key_value_heads=2,
            num_hidden_layers=2, vocab_size=50, rope_theta=500.0,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=50)
        model = transformers.GPT2LMHeadModel(config)
    model = model.double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    layers = transformer_layers(config, style, device="cpu", params_dtype=torch.float64).eval()
    state = to_transformer_layers(model.state_dict(), style)
    outer_names = {key for key in state if not key[0].isdigit()}
    layers.load_state_dict({k: v for k, v in state.items() if k not in outer_names}, strict=True)
    tokens = torch.randint(50, (2, 9))
    if style == "llama":
        rope = RotaryPositionEmbedding(8, rotary_base=500.0)(9)
        hidden = run_layers(layers, model.model.embed_tokens(tokens), rope)
        hidden = model.model.norm(hidden)
    else:
        positions = model.transformer.wpe(torch.arange(9))
        hidden = run_layers(layers, model.transformer.wte(tokens) + positions, None)
        hidden = model.transformer.ln_f(hidden)
    expected = model(tokens).logits
    assert torch.allclose(model.lm_head(hidden), expected, atol=1e-5)
    restored = from_transformer_layers(
        {**{k: state[k] for k in outer_names}, **layers.state_dict()}, style
    )
    assert all(torch.equal(restored[k], v) for k, v in model.state_dict().items())
