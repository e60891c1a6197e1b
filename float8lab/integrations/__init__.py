"""Adapters for other libraries and checkpoint formats; a library is imported only when used."""

import importlib
from typing import TYPE_CHECKING

from float8lab.integrations.experts import EXPERTS
from float8lab.integrations.hf_weights import (
    from_transformer_layers,
    to_transformer_layers,
    transformer_layers,
)
from float8lab.integrations.onnx import onnx_export
from float8lab.nn.convert.other_experts import register_experts
from float8lab.nn.convert.other_linear import register_linear

if TYPE_CHECKING:
    from float8lab.integrations.checkpoint.exporting import ExportReport, export, export_stream
    from float8lab.integrations.checkpoint.loading import LoadReport, load_fp8
    from float8lab.integrations.checkpoint.megatron import MegatronCheckpoint, read_megatron
    from float8lab.integrations.checkpoint.transformer_engine import ScalingReport, load_te_scaling

__all__ = [
    "ExportReport", "LoadReport", "MegatronCheckpoint", "ScalingReport", "export", "export_stream",
    "from_transformer_layers", "load_fp8", "load_te_scaling", "onnx_export", "read_megatron",
    "to_transformer_layers", "transformer_layers",
]  # fmt: skip

_ADAPTERS = ("accelerate", "lightning", "pytorch_lightning", "torchtitan", "transformers")
"""Modules that import another library at their top; each is loaded on its first use."""

_CHECKPOINT = {
    "exporting": ("ExportReport", "export", "export_stream"),
    "loading": ("LoadReport", "load_fp8"),
    "megatron": ("MegatronCheckpoint", "read_megatron"),
    "transformer_engine": ("ScalingReport", "load_te_scaling"),
}
"""Modules of ``checkpoint`` that few programs use; the first use of a name loads its module."""
_LAZY = {name: module for module, names in _CHECKPOINT.items() for name in names}


register_experts(*EXPERTS)
register_linear(
    "transformers.pytorch_utils.Conv1D",
    lambda: importlib.import_module("float8lab.integrations.transformers").Float8Conv1D,
)


def __getattr__(name: str) -> object:
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.checkpoint.{_LAZY[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS, *_LAZY})
