"""Float8Tensor, its dispatch table and the handlers entered in it."""

from float8lab.tensor import attention, collectives, compute, copies, indexing, matmul, norms, views
from float8lab.tensor.dispatch import fallback
from float8lab.tensor.float4_tensor import Float4Tensor
from float8lab.tensor.float8_tensor import Float8Tensor, quantize
from float8lab.tensor.permute import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)

__all__ = [
    "Float4Tensor", "Float8Tensor", "attention", "collectives", "compute", "copies", "fallback",
    "indexing", "matmul", "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
    "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute", "norms",
    "quantize", "views",
]  # fmt: skip
