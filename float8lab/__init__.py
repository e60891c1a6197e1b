"""FP8 training and inference for PyTorch, in pure Python.

>>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
>>> model = float8lab.convert_to_float8(model)
>>> model(torch.ones(2, 64)).shape
torch.Size([2, 64])
"""

import importlib
from typing import TYPE_CHECKING, Any

from float8lab import distributed, inspect, integrations, nn, optim, recipes, router
from float8lab.distributed import (
    CudaRNGStatesTracker,
    backward_on_this_core,
    get_cpu_offload_context,
    moe_combine,
    moe_dispatch,
    parallel_cross_entropy,
)
from float8lab.distributed.recompute import checkpoint
from float8lab.integrations import onnx_export
from float8lab.nn import (
    DotProductAttention,
    ExpertMLP,
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    InferenceParams,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
    conversion_report,
    convert_to_float8,
    count_gemms,
    graphed,
    make_graphed_callables,
    to_high_precision,
)
from float8lab.ops import compute_intensive_ops
from float8lab.ops.declare import announce as _announce
from float8lab.recipes import autocast, fp8_autocast, fp8_model_init, quantized_model_init
from float8lab.tensor import (
    Float4Tensor,
    Float8Tensor,
    fallback,
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
    quantize,
)

if TYPE_CHECKING:
    from float8lab.inspect.selfcheck import selfcheck

__version__ = "0.1.0"

__all__ = [
    "CudaRNGStatesTracker", "DotProductAttention", "ExpertMLP", "Float4Tensor", "Float8Tensor",
    "Fp8Padding", "Fp8Unpadding", "GroupedLinear", "InferenceParams", "LayerNorm",
    "LayerNormLinear", "LayerNormMLP", "Linear", "MultiheadAttention", "RMSNorm",
    "RotaryPositionEmbedding", "TransformerLayer",
    "apply_rotary_pos_emb", "autocast", "backward_on_this_core", "checkpoint",
    "compute_intensive_ops", "conversion_report", "convert_to_float8", "count_gemms",
    "distributed", "fallback", "fp8_autocast", "fp8_model_init", "get_cpu_offload_context",
    "graphed", "inspect", "integrations", "make_graphed_callables", "moe_combine", "moe_dispatch",
    "moe_permute", "moe_permute_and_pad_with_probs", "moe_permute_with_probs",
    "moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe_unpermute", "nn",
    "onnx_export", "optim", "parallel_cross_entropy", "quantize", "quantized_model_init",
    "recipes", "router", "selfcheck", "to_high_precision",
]  # fmt: skip

_announce()  # after all ops are declared, some of them outside float8lab.ops

_LAZY = {"selfcheck": "float8lab.inspect.selfcheck"}
"""Names that few programs use, each with the module that its first use loads."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
