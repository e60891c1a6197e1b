"""Moments of an optimizer in FP8: how they are stored between two steps, and read for the next."""

from __future__ import annotations

from float8lab.ops import reference
from float8lab.ops.declare import called_by_ops
from float8lab.ops.reference import MOMENT_BLOCK, round_stochastically

__all__ = ["MOMENT_BLOCK", "dequantize_moment", "quantize_moment_", "round_stochastically"]

quantize_moment_ = called_by_ops(reference.quantize_moment_, cuda="moments:quantize_moment_")
dequantize_moment = called_by_ops(reference.dequantize_moment, cuda="moments:dequantize_moment")
