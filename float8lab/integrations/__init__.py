"""Other libraries and their checkpoint formats; none of them is imported before it is used."""

import importlib
from typing import TYPE_CHECKING

from float8lab.integrations.hf_weights import (
    from_transformer_layers,
    to_transformer_layers,
    transformer_layers,
)
from float8lab.integrations.onnx import onnx_export
from float8lab.nn.convert.other_linear import register_linear

if TYPE_CHECKING:
    from float8lab.integrations.checkpoint import (
        ExportReport,
        LoadReport,
        MegatronCheckpoint,
        ScalingReport,
        export,
        export_stream,
        load_fp8,
        load_te_scaling,
        read_megatron,
    )

__all__ = [
    "ExportReport",
    "LoadReport",
    "MegatronCheckpoint",
    "ScalingReport",
    "export",
    "export_stream",
    "from_transformer_layers",
    "load_fp8",
    "load_te_scaling",
    "onnx_export",
    "read_megatron",
    "to_transformer_layers",
    "transformer_layers",
]

_ADAPTERS = ("accelerate", "lightning", "pytorch_lightning", "torchtitan", "transformers")
"""Modules that import another library at their top, loaded on their first use."""

_CHECKPOINT = {*__all__} - {*globals()}
"""Names of ``checkpoint``, which few programs use: the first use of one loads it."""


register_linear(
    "transformers.pytorch_utils.Conv1D",
    lambda: importlib.import_module("float8lab.integrations.transformers").Float8Conv1D,
)


def __getattr__(name: str) -> object:
    if name in _ADAPTERS:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _CHECKPOINT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("float8lab.integrations.checkpoint")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ADAPTERS, *_CHECKPOINT})
