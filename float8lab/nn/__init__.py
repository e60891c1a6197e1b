"""Modules that run in FP8, and conversion of existing models."""

from float8lab.nn.attention import (
    DotProductAttention,
    InferenceParams,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from float8lab.nn.convert import convert_to_float8, to_high_precision
from float8lab.nn.convert.report import ConversionReport, conversion_report
from float8lab.nn.count import GemmCounts, count_gemms
from float8lab.nn.expert_mlp import ExpertMLP
from float8lab.nn.graphs import graphed, make_graphed_callables
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.layernorm_linear import LayerNormLinear
from float8lab.nn.layernorm_mlp import LayerNormMLP
from float8lab.nn.linear import Linear
from float8lab.nn.norm import LayerNorm, RMSNorm, convert_norms
from float8lab.nn.padding import Fp8Padding, Fp8Unpadding
from float8lab.nn.parallel import shard_state_dict, whole_state_dict
from float8lab.nn.scaling_state import ScalingState
from float8lab.nn.transformer import TransformerLayer

__all__ = [
    "ConversionReport", "DotProductAttention", "ExpertMLP", "Fp8Padding", "Fp8Unpadding",
    "GemmCounts", "GroupedLinear", "InferenceParams", "LayerNorm", "LayerNormLinear",
    "LayerNormMLP", "Linear", "MultiheadAttention", "RMSNorm", "RotaryPositionEmbedding",
    "ScalingState", "TransformerLayer",
    "apply_rotary_pos_emb", "conversion_report", "convert_norms", "convert_to_float8",
    "count_gemms", "graphed", "make_graphed_callables", "shard_state_dict", "to_high_precision",
    "whole_state_dict",
]  # fmt: skip
