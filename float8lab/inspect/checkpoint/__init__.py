"""Checkpoints with FP8 weights of any origin: their content, and the difference of two.

``float8lab.checkpoints`` reads the tensors; ``measure`` looks at each of them; ``report``, ``page``
and ``difference`` show the result.
"""

from float8lab.checkpoints.item import Finding
from float8lab.checkpoints.source import CheckpointError
from float8lab.inspect.checkpoint.difference import CheckpointDiff, DiffRow, diff
from float8lab.inspect.checkpoint.page import page
from float8lab.inspect.checkpoint.report import CheckpointReport, CheckpointRow, checkpoint

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
