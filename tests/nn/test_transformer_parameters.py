"""Parameters of the attention modules have Transformer Engine's names, order and defaults."""

import functools
import inspect

import pytest

import float8lab

REQUIRED = inspect.Parameter.empty

# The parameters in Transformer Engine's documented order; its later additions come after these.
CONSTRUCTORS = {
    "DotProductAttention": {
        "num_attention_heads": REQUIRED, "kv_channels": REQUIRED, "num_gqa_groups": None,
        "attention_dropout": 0.0, "attn_mask_type": "causal", "window_size": None,
        "attention_type": "self", "layer_number": None, "qkv_format": "sbhd",
        "sequence_parallel": False, "tp_size": 1, "tp_group": None, "cp_group": None,
        "cp_global_ranks": None, "cp_stream": None, "get_rng_state_tracker": None,
        "softmax_scale": None,
    },
    "MultiheadAttention": {
        "hidden_size": REQUIRED, "num_attention_heads": REQUIRED, "kv_channels": None,
        "attention_dropout": 0.1, "layernorm_epsilon": 1e-5, "init_method": None,
        "output_layer_init_method": None, "layer_number": None, "attn_mask_type": "causal",
        "window_size": None, "num_gqa_groups": None, "return_layernorm_output": False,
        "input_layernorm": False, "attention_type": "self", "zero_centered_gamma": False,
        "normalization": "LayerNorm", "qkv_weight_interleaved": True, "bias": True, "device": None,
        "qkv_format": "sbhd", "set_parallel_mode": False, "sequence_parallel": False,
        "tp_group": None, "tp_size": 1, "fuse_wgrad_accumulation": False, "params_dtype": None,
        "return_bias": False, "fuse_qkv_params": False, "get_rng_state_tracker": None,
    },
    "TransformerLayer": {
        "hidden_size": REQUIRED, "ffn_hidden_size": REQUIRED, "num_attention_heads": REQUIRED,
        "num_gqa_groups": None, "layernorm_epsilon": 1e-5, "hidden_dropout": 0.1,
        "attention_dropout": 0.1, "init_method": None, "output_layer_init_method": None,
        "apply_residual_connection_post_layernorm": False, "layer_number": None,
        "output_layernorm": False, "parallel_attention_mlp": False, "layer_type": "encoder",
        "kv_channels": None, "self_attn_mask_type": "causal", "window_size": None,
        "zero_centered_gamma": False, "normalization": "LayerNorm", "qkv_weight_interleaved": True,
        "bias": True, "activation": "gelu", "device": None, "attn_input_format": "sbhd",
        "set_parallel_mode": False, "sequence_parallel": False, "tp_group": None, "tp_size": 1,
        "fuse_wgrad_accumulation": False, "params_dtype": None, "seq_length": None,
        "micro_batch_size": None, "drop_path_rate": 0.0, "fuse_qkv_params": False,
        "get_rng_state_tracker": None,
    },
    "InferenceParams": {"max_batch_size": REQUIRED, "max_sequence_length": REQUIRED},
}  # fmt: skip

CALLS = {
    "DotProductAttention": [
        "query_layer", "key_layer", "value_layer", "attention_mask", "qkv_format", "cu_seqlens_q",
        "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "attn_mask_type", "window_size",
        "checkpoint_core_attention", "core_attention_bias_type", "core_attention_bias",
        "alibi_slopes", "fast_zero_fill", "inference_params",
    ],
    "MultiheadAttention": [
        "hidden_states", "attention_mask", "encoder_output", "attn_mask_type", "window_size",
        "is_first_microbatch", "checkpoint_core_attention", "inference_params", "rotary_pos_emb",
        "core_attention_bias_type", "core_attention_bias", "alibi_slopes", "fast_zero_fill",
    ],
    "TransformerLayer": [
        "hidden_states", "attention_mask", "self_attn_mask_type", "window_size", "encoder_output",
        "enc_dec_attn_mask", "is_first_microbatch", "checkpoint_core_attention",
        "inference_params", "rotary_pos_emb", "core_attention_bias_type", "core_attention_bias",
        "alibi_slopes", "fast_zero_fill",
    ],
}  # fmt: skip

CALL_DEFAULTS = {
    "checkpoint_core_attention": False,
    "core_attention_bias_type": "no_bias",
    "fast_zero_fill": True,
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_have_the_parameters_of_transformer_engine(name):
    parameters = inspect.signature(getattr(float8lab, name)).parameters
    expected = CONSTRUCTORS[name]
    assert {n: parameters[n].default for n in expected} == expected
    required = [n for n, default in expected.items() if default is REQUIRED]
    assert list(parameters)[: len(required)] == required


@pytest.mark.parametrize("name", CALLS)
def test_forward_has_the_parameters_of_transformer_engine(name):
    parameters = inspect.signature(getattr(float8lab, name).forward).parameters
    assert list(parameters)[1 : len(CALLS[name]) + 1] == CALLS[name]
    additional = [p for n, p in parameters.items() if n not in ("self", *CALLS[name])]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in additional)
    for argument in CALLS[name]:
        default = parameters[argument].default
        if default is not REQUIRED:
            assert default == CALL_DEFAULTS.get(argument)


@pytest.mark.parametrize("name", CALLS)
def test_setters_of_parallel_groups_have_the_names_of_transformer_engine(name):
    cls = getattr(float8lab, name)
    for method, first in (
        ("set_context_parallel_group", "cp_group"), ("set_tensor_parallel_group", "tp_group")
    ):  # fmt: skip
        if hasattr(cls, method):
            assert list(inspect.signature(getattr(cls, method)).parameters)[1] == first
    assert hasattr(cls, "set_context_parallel_group")


@pytest.mark.parametrize("name", ["Linear", "GroupedLinear", "LayerNormLinear", "LayerNormMLP"])
def test_overlap_arguments_are_accepted_or_refused_by_name(name):
    sizes = (2, 16, 16) if name == "GroupedLinear" else (16, 16)
    make = functools.partial(getattr(float8lab, name), *sizes, device="cpu")
    assert make(ub_overlap_ag=True, ub_overlap_rs=False, ub_name="qkv").overlap is None
    assert make(symmetric_ar_type="two_shot", save_original_input=True).overlap is None
    assert make(delay_wgrad_compute=False).overlap is None
    with pytest.raises(NotImplementedError, match=r"^delay_wgrad_compute must be False; got True"):
        make(delay_wgrad_compute=True)
    assert make(ub_overlap_ag=False, ub_overlap_rs=False).overlap is False
    with pytest.raises(TypeError, match=f"^{name}'s arguments must be known ones; got ub_overlap"):
        make(ub_overlap=True)
    with pytest.raises(TypeError, match=r"^ub_bulk_wgrad must be"):
        make(ub_bulk_wgrad="yes")
    with pytest.raises(TypeError, match=r"^ub_name must be"):
        make(ub_name=1)


def test_overlap_arguments_reach_all_submodules():
    make = functools.partial(float8lab.TransformerLayer, 32, 64, 4, device="cpu")
    parts = [m for m in make(ub_tp_comm_overlap=False).modules() if hasattr(m, "overlap")]
    assert all(
        m.overlap is False for m in parts if not isinstance(m, float8lab.DotProductAttention)
    )
    assert all(m.overlap is None for m in make().modules() if hasattr(m, "overlap"))
