"""Other libraries and their checkpoint formats; none of them is imported before it is used."""

from float8lab.integrations.checkpoint import (
    ExportReport,
    LoadReport,
    ScalingReport,
    export,
    load_fp8,
    load_te_scaling,
)
from float8lab.integrations.hf_weights import (
    from_transformer_layers,
    to_transformer_layers,
    transformer_layers,
)
from float8lab.integrations.onnx import onnx_export

__all__ = [
    "ExportReport",
    "LoadReport",
    "ScalingReport",
    "export",
    "from_transformer_layers",
    "load_fp8",
    "load_te_scaling",
    "onnx_export",
    "to_transformer_layers",
    "transformer_layers",
]
