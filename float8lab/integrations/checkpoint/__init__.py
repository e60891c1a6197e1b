"""Checkpoints with FP8 weights, for other libraries and from them.

``weights`` finds the bytes that a model's FP8 GEMMs use, ``exporting`` writes them, ``loading``
reads them into a model; ``transformer_engine`` reads the scales of another library's delayed
scaling, and ``megatron`` the checkpoints of its ranks. ``float8lab.checkpoints`` knows the files.
"""

from float8lab.integrations.checkpoint.exporting import ExportReport, export, export_stream
from float8lab.integrations.checkpoint.loading import LoadReport, load_fp8
from float8lab.integrations.checkpoint.megatron import MegatronCheckpoint, read_megatron
from float8lab.integrations.checkpoint.transformer_engine import ScalingReport, load_te_scaling

__all__ = [
    "ExportReport",
    "LoadReport",
    "MegatronCheckpoint",
    "ScalingReport",
    "export",
    "export_stream",
    "load_fp8",
    "load_te_scaling",
    "read_megatron",
]
