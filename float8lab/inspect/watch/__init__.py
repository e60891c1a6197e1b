"""Watching a model's FP8 operands while it trains."""

from float8lab.inspect.watch.records import Log, Record, Step

__all__ = ["Log", "Record", "Step"]
