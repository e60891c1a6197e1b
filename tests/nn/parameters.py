"""Every parameter of the constructors of the norms and the fused modules, with its default."""

from typing import Any

REQUIRED = "required"

_NORM: dict[str, Any] = {
    "hidden_size": None,  # or normalized_shape
    "eps": 1e-5,
    "sequence_parallel": False,
    "params_dtype": None,
    "zero_centered_gamma": False,
    "device": None,
    "normalized_shape": None,
    "dtype": None,
}

_FUSED: dict[str, Any] = {
    "eps": 1e-5, "bias": True, "normalization": "LayerNorm", "init_method": None,
    "return_layernorm_output": False, "return_layernorm_output_gathered": False,
    "zero_centered_gamma": False, "device": None, "sequence_parallel": False, "tp_group": None,
    "tp_size": 1, "fuse_wgrad_accumulation": False, "return_bias": False, "params_dtype": None,
    "get_rng_state_tracker": None, "rng_tracker_name": None,
}  # fmt: skip

PARAMETERS: dict[str, dict[str, Any]] = {
    "LayerNorm": _NORM,
    "RMSNorm": _NORM,
    "LayerNormLinear": {
        "in_features": REQUIRED,
        "out_features": REQUIRED,
        "parameters_split": None,
        "parallel_mode": None,
        **_FUSED,
    },
    "LayerNormMLP": {
        "hidden_size": REQUIRED,
        "ffn_hidden_size": REQUIRED,
        "activation": "gelu",
        "output_layer_init_method": None,
        "set_parallel_mode": False,
        "seq_length": None,
        "micro_batch_size": None,
        "checkpoint": False,
        "fp8_activation_input": False,
        **_FUSED,
    },
}
