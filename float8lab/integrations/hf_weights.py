"""Convert weights of Llama, GPT-2 and Megatron-LM models to those of ``TransformerLayer``s.

Entries of state dicts are renamed, concatenated and transposed, and nothing else is changed. The
package transformers is not needed. A key that belongs to no layer (embeddings, the last norm, the
head) keeps its name and value.

>>> state = {"model.embed_tokens.weight": torch.zeros(2, 4),
...          "model.layers.0.self_attn.o_proj.weight": torch.ones(4, 4)}
>>> sorted(float8lab.integrations.to_transformer_layers(state, "llama"))
['0.self_attention.proj.weight', 'model.embed_tokens.weight']
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8lab.arguments import check_choice, check_instance, check_state
from float8lab.nn.transformer import TransformerLayer

__all__ = ["STYLES", "from_transformer_layers", "to_transformer_layers", "transformer_layers"]


class _Rule(NamedTuple):
    """Parameters of another library's layer and ours that hold the same values, concatenated."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    transposed: bool = False


_QKV, _CORE = "self_attention.layernorm_qkv", "self_attention.core_attention"
_SPLIT = tuple(f"{_QKV}.{name}" for name in ("query", "key", "value"))


def _pair(theirs: str, ours: str, *, transposed: bool = False) -> tuple[_Rule, _Rule]:
    """Return the rules for a weight, which may be transposed, and for the bias beside it."""
    weight = _Rule((f"{theirs}weight",), (f"{ours}weight",), transposed)
    return weight, _Rule((f"{theirs}bias",), (f"{ours}bias",))


_LLAMA = (
    _Rule(("input_layernorm.weight",), (f"{_QKV}.layer_norm_weight",)),
    *_pair("self_attn.q_proj.", f"{_QKV}.query_"),
    *_pair("self_attn.k_proj.", f"{_QKV}.key_"),
    *_pair("self_attn.v_proj.", f"{_QKV}.value_"),
    *_pair("self_attn.o_proj.", "self_attention.proj."),
    _Rule(("post_attention_layernorm.weight",), ("layernorm_mlp.layer_norm_weight",)),
    *(
        _Rule((f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"), (f"layernorm_mlp.fc1_{kind}",))
        for kind in ("weight", "bias")
    ),
    *_pair("mlp.down_proj.", "layernorm_mlp.fc2_"),
)

_GPT2 = (
    *_pair("ln_1.", f"{_QKV}.layer_norm_"),
    *_pair("ln_2.", "layernorm_mlp.layer_norm_"),
    # GPT-2 stores the weights of its linear layers transposed.
    _Rule(("attn.c_attn.weight",), tuple(f"{n}_weight" for n in _SPLIT), True),
    _Rule(("attn.c_attn.bias",), tuple(f"{n}_bias" for n in _SPLIT)),
    *_pair("attn.c_proj.", "self_attention.proj.", transposed=True),
    *_pair("mlp.c_fc.", "layernorm_mlp.fc1_", transposed=True),
    *_pair("mlp.c_proj.", "layernorm_mlp.fc2_", transposed=True),
)

_MEGATRON = (
    *_pair("self_attention.linear_qkv.layer_norm_", f"{_QKV}.layer_norm_"),
    *_pair("input_layernorm.", f"{_QKV}.layer_norm_"),
    *_pair("mlp.linear_fc1.layer_norm_", "layernorm_mlp.layer_norm_"),
    *_pair("pre_mlp_layernorm.", "layernorm_mlp.layer_norm_"),
    *_pair("self_attention.linear_qkv.", f"{_QKV}."),
    *_pair("self_attention.linear_proj.", "self_attention.proj."),
    *_pair("self_attention.q_layernorm.", "self_attention.q_norm."),
    *_pair("self_attention.k_layernorm.", "self_attention.k_norm."),
    _Rule((f"{_CORE}.softmax_offset",), (f"{_CORE}.softmax_offset",)),
    *_pair("mlp.linear_fc1.", "layernorm_mlp.fc1_"),
    *_pair("mlp.linear_fc2.", "layernorm_mlp.fc2_"),
    *(
        _Rule((f"{theirs}._extra_state",), (f"{ours}._extra_state",))
        for theirs, ours in (
            ("self_attention.linear_qkv", _QKV),
            ("self_attention.linear_proj", "self_attention.proj"),
            (_CORE, _CORE),
            ("mlp.linear_fc1", "layernorm_mlp.fc1"),
            ("mlp.linear_fc2", "layernorm_mlp.fc2"),
        )
    ),
)


class _Style(NamedTuple):
    prefix: str
    """The prefix of a layer's keys, before the layer's number."""
    rules: tuple[_Rule, ...]
    ignored: tuple[str, ...]
    """Buffers that older versions saved and that newer versions compute."""


STYLES = {
    "llama": _Style("model.layers.", _LLAMA, ("self_attn.rotary_emb.inv_freq",)),
    "gpt2": _Style("transformer.h.", _GPT2, ("attn.bias", "attn.masked_bias")),
    "megatron": _Style("decoder.layers.", _MEGATRON, ()),
}
"""The known styles of parameter names: ``llama`` (also for Mistral, Qwen2 ...), ``gpt2``, and
``megatron`` for Megatron-LM, whose state may be one rank's or all tensor-parallel ranks'."""


def _opened(state: Mapping[str, Tensor], style: str, prefix: str | None) -> tuple[_Style, str]:
    """Check arguments; return the style and the prefix of a model's layers."""
    check_choice("style", style, STYLES)
    check_state("state", state)
    check_instance("prefix", prefix, str, "a string", optional=True)
    return STYLES[style], STYLES[style].prefix if prefix is None else prefix


def _by_layer(
    state: Mapping[str, Tensor], prefix: str
) -> tuple[dict[int, dict[str, Tensor]], dict[str, Tensor]]:
    """Return the parameters of each layer by local name, and those that belong to no layer."""
    layers: dict[int, dict[str, Tensor]] = {}
    outside: dict[str, Tensor] = {}
    pattern = re.compile(re.escape(prefix) + r"(\d+)\.(.+)")
    for key, value in state.items():
        if (match := pattern.fullmatch(key)) is None:
            outside[key] = value
        else:
            layers.setdefault(int(match[1]), {})[match[2]] = value
    return layers, outside


def _take(layer: dict[str, Tensor], rules: Iterable[_Rule], prefix: str) -> dict[str, Tensor]:
    """Take their parameters out of a layer, join and split them under our names."""
    taken: dict[str, Tensor] = {}
    for theirs, ours, transposed in rules:
        if theirs[0] in layer:
            joined = torch.cat([layer.pop(name) for name in theirs])
            joined = joined.t().contiguous() if transposed else joined
            # Ours have equal sizes, like the queries, keys and values of GPT-2.
            for name, chunk in zip(ours, joined.chunk(len(ours)), strict=True):
                taken[f"{prefix}.{name}"] = chunk.clone()
    return taken


def to_transformer_layers(
    state: Mapping[str, Tensor], style: str, *, prefix: str | None = None
) -> dict[str, Tensor]:
    """Convert the layers of a state dict to those of a list of ``TransformerLayer``.

    Args:
        state: the state dict of the model, or of a submodule that holds layers.
        style: a key of ``STYLES``.
        prefix: the prefix of the layers' keys before the number; None is the style's usual prefix.

    Returns:
        A state dict with ``"<number>.<parameter of TransformerLayer>"`` for each layer, and all
        other keys unchanged.

    Raises:
        ValueError: an unknown style, no layers, or a parameter of a layer that has no counterpart.
    """
    layout, prefix = _opened(state, style, prefix)
    layers, result = _by_layer(state, prefix)
    if not layers:
        raise ValueError(
            f"state must have keys of layers, {prefix}<number>.<name>; got "
            f"{sorted(state)[:3]} and so on. Give their prefix."
        )
    for number, layer in layers.items():
        result |= _take(layer, layout.rules, str(number))
        if left := [name for name in layer if name not in layout.ignored]:
            raise ValueError(
                f"state must hold only parameters that a {style} layer has; got {left} in layer "
                f"{number}. Another style may have them: {', '.join(STYLES)}."
            )
    return result


def from_transformer_layers(
    state: Mapping[str, Tensor], style: str, *, prefix: str | None = None
) -> dict[str, Tensor]:
    """Convert back what ``to_transformer_layers`` returns.

    Args:
        state: a state dict as ``to_transformer_layers`` returns it.
        style: a key of ``STYLES``.
        prefix: of the layers' keys in the result, before the number; None is the style's usual.
    """
    layout, prefix = _opened(state, style, prefix)
    layers, result = _by_layer(state, "")
    rules = [_Rule(rule.ours, rule.theirs, rule.transposed) for rule in layout.rules]
    for number, layer in layers.items():
        result |= _take(layer, rules, f"{prefix}{number}")
        if layer:
            raise ValueError(
                f"state must hold only parameters that a {style} layer has; got {sorted(layer)} "
                f"in layer {number}. A model of that style is built by transformer_layers."
            )
    return result


def transformer_layers(config: object, style: str, **overrides: object) -> nn.ModuleList:
    """Build the layers of a model; load its weights into them afterwards.

    The format is bshd, or sbhd for Megatron. Layers of a Llama need ``rotary_pos_emb``, the angles
    of ``RotaryPositionEmbedding(head size, rotary_base=config.rope_theta)``.

    Args:
        config: a Hugging Face configuration, the arguments that ``read_megatron`` returns, or
            anything with such attributes.
        style: a key of ``STYLES``.
        overrides: arguments of ``TransformerLayer`` that take precedence over the configuration.

    Raises:
        NotImplementedError: the configuration asks for an activation or attention that
            ``TransformerLayer`` does not have.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(n_embd=32, n_inner=None, n_head=4, n_layer=2, resid_pdrop=0.0,
    ...     attn_pdrop=0.0, layer_norm_epsilon=1e-5, activation_function="gelu_new")
    >>> len(float8lab.integrations.transformer_layers(config, "gpt2", device="cpu"))
    2
    """
    check_choice("style", style, STYLES)
    attribute, arguments_of = {
        "llama": ("num_hidden_layers", _llama_arguments),
        "megatron": ("num_layers", _megatron_arguments),
        "gpt2": ("n_layer", _gpt2_arguments),
    }[style]
    count = int(getattr(config, attribute))
    arguments: dict[str, Any] = {"attn_input_format": "bshd", **arguments_of(config), **overrides}
    return nn.ModuleList(TransformerLayer(layer_number=i + 1, **arguments) for i in range(count))


def _llama_arguments(config: Any) -> dict[str, object]:
    attention_bias = bool(getattr(config, "attention_bias", False))
    if attention_bias != bool(getattr(config, "mlp_bias", False)):
        raise NotImplementedError(
            f"config.mlp_bias must equal config.attention_bias; got {not attention_bias} and "
            f"{attention_bias}. TransformerLayer has all biases or none."
        )
    return {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_gqa_groups": getattr(config, "num_key_value_heads", None),
        "kv_channels": getattr(config, "head_dim", None),
        "layernorm_epsilon": config.rms_norm_eps,
        "hidden_dropout": 0.0,
        "attention_dropout": getattr(config, "attention_dropout", 0.0),
        "normalization": "RMSNorm",
        "activation": _require(config, "hidden_act", {"silu": "swiglu", "swish": "swiglu"}),
        "bias": attention_bias,
    }


def _gpt2_arguments(config: Any) -> dict[str, object]:
    activations = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise NotImplementedError(
            "config.scale_attn_by_inverse_layer_idx must be False; got True. Give each layer its "
            "own softmax_scale."
        )
    return {
        "hidden_size": config.n_embd,
        "ffn_hidden_size": config.n_inner or 4 * config.n_embd,
        "num_attention_heads": config.n_head,
        "layernorm_epsilon": config.layer_norm_epsilon,
        "hidden_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
        "activation": _require(config, "activation_function", activations),
        "softmax_scale": None if getattr(config, "scale_attn_weights", True) else 1.0,
    }


def _megatron_arguments(config: Any) -> dict[str, object]:
    """Return arguments of the layers for Megatron-LM's, where some defaults are left out."""

    def said(*names: str, default: object = None) -> object:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if value is not None), default)

    if said("multi_latent_attention", "qk_layernorm", default=False) or said("num_experts"):
        raise NotImplementedError(
            "config must have plain attention and no experts; got multi_latent_attention, "
            "qk_layernorm or num_experts. TransformerLayer has none of these."
        )
    activation = "swiglu" if said("swiglu", default=False) else "gelu"
    grouped = said("group_query_attention", default=False)
    return {
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": said("ffn_hidden_size", default=4 * config.hidden_size),
        "num_attention_heads": config.num_attention_heads,
        "num_gqa_groups": said("num_query_groups") if grouped else None,
        "kv_channels": said("kv_channels"),
        "layernorm_epsilon": said("norm_epsilon", "layernorm_epsilon", default=1e-5),
        "hidden_dropout": said("hidden_dropout", default=0.1),
        "attention_dropout": said("attention_dropout", default=0.1),
        "normalization": said("normalization", default="LayerNorm"),
        "zero_centered_gamma": said("apply_layernorm_1p", default=False),
        "activation": "srelu" if said("squared_relu", default=False) else activation,
        "bias": said("add_bias_linear", default=True),
        "fuse_qkv_params": True,
        "rotary_pos_interleaved": said("rotary_interleaved", default=False),
        "attn_input_format": "sbhd",
    }


def _require(config: object, field: str, activations: dict[str, str]) -> str:
    value = getattr(config, field)
    if value not in activations:
        raise NotImplementedError(
            f"config.{field} must be one of {', '.join(activations)}; got {value!r}. "
            "TransformerLayer has no such activation."
        )
    return activations[value]
