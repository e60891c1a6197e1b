"""Activations and their derivatives inside kernels, as ``ops/reference/activation.py`` has them.

Only the exponential may differ from the reference, in its last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["apply_activation", "derivative_of_activation"]


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, tl.exp(-x) + 1.0)


@triton.jit
def _inner(x, FUNCTION: tl.constexpr):
    """``g(x)`` of the functions that are ``x * sigmoid(g(x))``."""
    if FUNCTION == "gelu":
        x = x * (x * x * 0.044715 + 1.0) * 1.5957691216057308
    elif FUNCTION == "qgelu":
        x = x * 1.702
    return x


@triton.jit
def _slope(x, FUNCTION: tl.constexpr):
    """``g'(x)`` of the same."""
    slope = 1.702
    if FUNCTION == "gelu":
        slope = (x * x * 0.134145 + 1.0) * 1.5957691216057308
    return slope


@triton.jit
def apply_activation(x, FUNCTION: tl.constexpr):
    if FUNCTION == "relu" or FUNCTION == "srelu":
        y = tl.where(x <= 0, 0.0, x)
        if FUNCTION == "srelu":
            y = y * y
    elif FUNCTION == "sigmoid":
        y = _sigmoid(x)
    else:
        y = x * _sigmoid(_inner(x, FUNCTION))
    return y


@triton.jit
def derivative_of_activation(x, FUNCTION: tl.constexpr):
    if FUNCTION == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif FUNCTION == "srelu":
        y = tl.where(x <= 0, 0.0, x + x)
    elif FUNCTION == "sigmoid":
        s = _sigmoid(x)
        y = s * (1.0 - s)
    else:
        s = _sigmoid(_inner(x, FUNCTION))
        y = x * (s * (1.0 - s))
        if FUNCTION == "gelu" or FUNCTION == "qgelu":
            y = y * _slope(x, FUNCTION)
        y = s + y
    return y
