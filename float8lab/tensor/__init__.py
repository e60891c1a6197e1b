"""Float8Tensor, its dispatch table and the handlers entered in it."""

from float8lab.tensor import (
    attention,
    collectives,
    compute,
    copies,
    indexing,
    matmul,
    norms,
    views,
)
from float8lab.tensor.dispatch import fallback
from float8lab.tensor.float4_tensor import Float4Tensor
from float8lab.tensor.float8_tensor import Float8Tensor, quantize

__all__ = [
    "Float4Tensor",
    "Float8Tensor",
    "attention",
    "collectives",
    "compute",
    "copies",
    "fallback",
    "indexing",
    "matmul",
    "norms",
    "quantize",
    "views",
]
