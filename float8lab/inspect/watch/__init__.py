"""Watching a model's FP8 operands while it trains.

``float8lab.inspect.watch`` is the function of that name; this package's modules are imported by
their own names, as in ``from float8lab.inspect.watch.records import Log``.
"""

from float8lab.inspect.watch.records import Log, Record, Step
from float8lab.inspect.watch.watching import watch

__all__ = ["Log", "Record", "Step", "watch"]
