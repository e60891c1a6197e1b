"""Activations and their derivatives inside kernels, as ``ops/reference/activation.py`` has them.

Only a sigmoid may differ from the reference, in its last bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from float8lab.ops.kernels._common import INTERPRETED

__all__ = ["apply_activation", "derivative_of_activation"]


RECIPROCAL = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def _sigmoid(x):
    """By the instruction for a reciprocal, with an error of 1 ulp; a division takes a dozen."""
    y = tl.exp(-x) + 1.0
    if INTERPRETED:
        y = tl.div_rn(1.0, y)
    else:
        y = tl.inline_asm_elementwise(
            RECIPROCAL, "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    return y


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
