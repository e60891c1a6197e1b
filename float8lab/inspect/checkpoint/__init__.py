"""Checkpoints with FP8 weights of any origin: their content, and the difference of two.

``source`` has tensors that lie in files and are read box by box; ``safetensors_source``,
``torch_source`` and ``dcp_source`` make them, and ``opening`` chooses among these. ``layout`` finds
FP8 weights and their scales, ``measure`` reads them; ``report``, ``page`` and ``difference`` show
the result.
"""

from float8lab.inspect.checkpoint.difference import CheckpointDiff, DiffRow, diff
from float8lab.inspect.checkpoint.layout import Finding
from float8lab.inspect.checkpoint.page import page
from float8lab.inspect.checkpoint.report import CheckpointReport, CheckpointRow, checkpoint
from float8lab.inspect.checkpoint.source import CheckpointError

__all__ = [
    "CheckpointDiff",
    "CheckpointError",
    "CheckpointReport",
    "CheckpointRow",
    "DiffRow",
    "Finding",
    "checkpoint",
    "diff",
    "page",
]
