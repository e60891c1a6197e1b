"""A watched training run as one HTML file, for any browser and without a network."""

from float8lab.inspect.report.page import report

__all__ = ["report"]
