"""Conversion of existing models to FP8, and a report on each of their layers."""

from float8lab.nn.convert.conversion import convert_to_float8, to_high_precision
from float8lab.nn.convert.names import matches
from float8lab.nn.convert.report import ConversionReport, conversion_report

__all__ = [
    "ConversionReport", "conversion_report", "convert_to_float8", "matches", "to_high_precision",
]  # fmt: skip
