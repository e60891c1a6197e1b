"""Float8Tensor, its dispatch table and the handlers entered in it."""

from float8lab.tensor import compute, copies, indexing, matmul, views
from float8lab.tensor.dispatch import fallback
from float8lab.tensor.float8_tensor import Float8Tensor, quantize

__all__ = [
    "Float8Tensor",
    "compute",
    "copies",
    "fallback",
    "indexing",
    "matmul",
    "quantize",
    "views",
]
