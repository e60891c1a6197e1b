"""What FP8 tensors hold: statistics, histograms, comparisons, pictures. Nothing here changes one.

>>> t = float8lab.quantize(torch.tensor([[1.0, -448.0], [0.0, 3.0]]))
>>> float8lab.inspect.stats(t).saturated
0.25
"""

from float8lab.inspect.checkpoint import (
    CheckpointDiff,
    CheckpointError,
    CheckpointReport,
    checkpoint,
    diff,
)
from float8lab.inspect.html import html
from float8lab.inspect.plot import plot
from float8lab.inspect.statistics import (
    BlockStats,
    Comparison,
    Histogram,
    TensorStats,
    blocks,
    compare,
    histogram,
    stats,
)
from float8lab.inspect.text import bars, health, summary, table

__all__ = [
    "BlockStats",
    "CheckpointDiff",
    "CheckpointError",
    "CheckpointReport",
    "Comparison",
    "Histogram",
    "TensorStats",
    "bars",
    "blocks",
    "checkpoint",
    "compare",
    "diff",
    "health",
    "histogram",
    "html",
    "plot",
    "stats",
    "summary",
    "table",
]
