"""Show the content of FP8 tensors, and the effect of FP8 on a model.

Nothing here changes a tensor or a model.

>>> t = float8lab.quantize(torch.tensor([[1.0, -448.0], [0.0, 3.0]]))
>>> float8lab.inspect.stats(t).saturated
0.25
"""

import importlib
from typing import TYPE_CHECKING, Any

from float8lab.checkpoints.source import CheckpointError
from float8lab.inspect.checkpoint.difference import CheckpointDiff, diff
from float8lab.inspect.checkpoint.report import CheckpointReport, checkpoint
from float8lab.inspect.html import html
from float8lab.inspect.nonfinite import NonFinite, find_nan
from float8lab.inspect.plot import plot
from float8lab.inspect.report import report
from float8lab.inspect.statistics import blocks, histogram, stats
from float8lab.inspect.text import bars, summary, table
from float8lab.inspect.watch import watch
from float8lab.inspect.watch.findings import Diagnosis, Finding, diagnose
from float8lab.inspect.watch.runs import RunComparison, compare
from float8lab.inspect.watch.tracking import track
from float8lab.tensor.statistics import BlockStats, Comparison, Histogram, TensorStats, health

if TYPE_CHECKING:
    from float8lab.inspect.advice import Advice, LayerAdvice, advise
    from float8lab.inspect.damage import Damage, Sensitivity, sensitivity
    from float8lab.inspect.memory import LayerMemory, MemoryReport, memory_report

__all__ = [
    "Advice", "BlockStats", "CheckpointDiff", "CheckpointError", "CheckpointReport", "Comparison",
    "Damage", "Diagnosis", "Finding", "Histogram", "LayerAdvice", "LayerMemory", "MemoryReport",
    "NonFinite", "RunComparison", "Sensitivity", "TensorStats", "advise", "bars", "blocks",
    "checkpoint", "compare", "diagnose", "diff", "find_nan", "health", "histogram", "html",
    "memory_report", "plot", "report", "sensitivity", "stats", "summary", "table", "track",
    "watch",
]  # fmt: skip

_LAZY = {
    "float8lab.inspect.advice": ("Advice", "LayerAdvice", "advise"),
    "float8lab.inspect.damage": ("Damage", "Sensitivity", "sensitivity"),
    "float8lab.inspect.memory": ("LayerMemory", "MemoryReport", "memory_report"),
}
"""Modules that few programs use: each is imported when one of its names is first used."""
_MODULES = {name: module for module, names in _LAZY.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
