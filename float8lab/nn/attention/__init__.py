"""Attention: masks, biases, backends, FP8, rotary embeddings, the key/value cache."""

from float8lab.nn.attention.backends import BACKENDS, Explanation
from float8lab.nn.attention.bias import alibi_slopes
from float8lab.nn.attention.dot_product import DotProductAttention
from float8lab.nn.attention.inference import InferenceParams
from float8lab.nn.attention.multihead import MultiheadAttention
from float8lab.nn.attention.rotary import RotaryPositionEmbedding, apply_rotary_pos_emb

__all__ = [
    "BACKENDS", "DotProductAttention", "Explanation", "InferenceParams", "MultiheadAttention",
    "RotaryPositionEmbedding", "alibi_slopes", "apply_rotary_pos_emb",
]  # fmt: skip
