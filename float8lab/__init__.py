"""FP8 training and inference for PyTorch, in pure Python.

>>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
>>> report = float8lab.convert_to_float8(model)
>>> model(torch.ones(2, 64)).shape
torch.Size([2, 64])
"""

from float8lab import distributed, nn, optim, recipes
from float8lab.distributed import CudaRNGStatesTracker, get_cpu_offload_context
from float8lab.distributed.recompute import checkpoint
from float8lab.integrations import onnx_export
from float8lab.nn import Linear, convert_to_float8, count_gemms, to_high_precision
from float8lab.recipes import (
    autocast,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)
from float8lab.tensor import Float8Tensor, fallback, quantize

__version__ = "0.1.0"

__all__ = [
    "CudaRNGStatesTracker",
    "Float8Tensor",
    "Linear",
    "autocast",
    "checkpoint",
    "convert_to_float8",
    "count_gemms",
    "distributed",
    "fallback",
    "fp8_autocast",
    "fp8_model_init",
    "get_cpu_offload_context",
    "nn",
    "onnx_export",
    "optim",
    "quantize",
    "quantized_model_init",
    "recipes",
    "to_high_precision",
]
