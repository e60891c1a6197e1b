"""Watch a model's FP8 operands while it trains.

The attribute ``float8lab.inspect.watch`` is the class ``watch``, not this package. Import modules
of this package by name, as in ``from float8lab.inspect.watch.records import Log``.
"""

from float8lab.inspect.watch.records import Log, Record, Step
from float8lab.inspect.watch.watching import watch

__all__ = ["Log", "Record", "Step", "watch"]
