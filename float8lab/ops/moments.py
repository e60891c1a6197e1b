"""Optimizer moments in FP8: quantize them between steps, and dequantize them for the next step."""

from __future__ import annotations

from float8lab.ops.declare import called_by_ops
from float8lab.ops.reference import moments

__all__ = ["dequantize_moment", "quantize_moment_"]

quantize_moment_ = called_by_ops(moments.quantize_moment_, cuda="moments:quantize_moment_")
dequantize_moment = called_by_ops(moments.dequantize_moment, cuda="moments:dequantize_moment")
