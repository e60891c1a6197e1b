"""Conversion of existing models: which layers, to what, and a report of what became of each."""

from float8lab.nn.convert.call_region import remove_region_hooks
from float8lab.nn.convert.conversion import convert_to_float8, to_high_precision
from float8lab.nn.convert.names import matches, unambiguous
from float8lab.nn.convert.report import ConversionReport, conversion_report

__all__ = [
    "ConversionReport", "conversion_report", "convert_to_float8", "matches", "remove_region_hooks",
    "to_high_precision", "unambiguous",
]  # fmt: skip
