"""Prologues: matrices that are computed while they are cast, and never written.  M rows, K columns.

- ``""``: no prologue, a matrix ``[M, K]`` itself;
- ``"layer_norm"``: from x [M, K], rstd [M], weight [K], mean [M], bias [K];
- ``"rms_norm"``: from x [M, K], rstd [M], weight [K];
- ``"permute"``: from x [T, K] and token [M] int32: each row is the row of x that ``token`` names,
  or zeros where ``token`` is negative;
- ``"multiply"``: from a [M, K] and b [M, K];
- ``"dequantize"``, which no cast has: from FP8 data [M, K] and their scales;
- an activation: from h [M, K], or [M, 2 K] if it gates;
- an activation and ``"_backward"``: from h [M, K], dy [M, K], or [M, K / 2] if it gates.

If an activation is written, not cast, its inputs may have any dimensions before the last.

All arithmetic is float32 (float64 for float64), rounded once at the end. Functions that involve an
exponential are written as ``x * sigmoid(g(x))``, as the kernels compute them; only the exponential
itself may differ between devices, in its last bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8lab.ops.reference.blocks import expand_scale

__all__ = ["ACTIVATIONS", "apply_norm", "dequantize", "prologue_shape", "value_of", "widen"]

ACTIVATIONS: dict[str, tuple[str, bool]] = {
    "gelu": ("gelu", False),
    "relu": ("relu", False),
    "squared_relu": ("srelu", False),
    "srelu": ("srelu", False),
    "qgelu": ("qgelu", False),
    "silu": ("silu", False),
    "geglu": ("gelu", True),
    "reglu": ("relu", True),
    "sreglu": ("srelu", True),
    "qgeglu": ("qgelu", True),
    "swiglu": ("silu", True),
    "glu": ("sigmoid", True),
    "clamped_swiglu_interleaved": ("clamped", True),
}
"""Function f of each activation, and whether it gates: ``f(a) * b`` of ``[a, b]``, else ``f(a)``.

``gelu`` is the tanh approximation, ``qgelu`` is ``a * sigmoid(1.702 a)``, ``srelu`` (also called
``squared_relu``) is ``relu(a) ** 2``. GPT-OSS's ``clamped_swiglu_interleaved`` takes pairs
``[a0, b0, a1, b1, ...]`` and gives ``qgelu(min(a, 7)) * (clamp(b, -7, 7) + 1)``.
"""

_LIMIT = 7.0

_CUBIC = 0.044715
_TWICE_ROOT_2_OVER_PI = 1.5957691216057308  # 0.5 * (1 + tanh(u)) is sigmoid(2 * u)


def _gate(function: str, x: Tensor) -> tuple[Tensor, Tensor | float]:
    """Compute ``sigmoid(g(x))`` and ``g'(x)`` of the functions that are ``x * sigmoid(g(x))``."""
    inner = x
    slope: Tensor | float = 1.0
    if function == "gelu":
        square = x * x
        inner = x * (square * _CUBIC + 1.0) * _TWICE_ROOT_2_OVER_PI
        slope = (square * (3 * _CUBIC) + 1.0) * _TWICE_ROOT_2_OVER_PI
    elif function == "qgelu":
        inner, slope = x * 1.702, 1.702
    return ((-inner).exp() + 1.0).reciprocal(), slope


def _apply(function: str, x: Tensor) -> Tensor:
    if function in ("relu", "srelu"):
        positive = torch.where(x <= 0, 0.0, x)  # NaN stays
        return positive if function == "relu" else positive * positive
    s, _ = _gate(function, x)
    return s if function == "sigmoid" else x * s


def _derivative(function: str, x: Tensor) -> Tensor:
    if function == "relu":
        return torch.where(x <= 0, 0.0, torch.ones_like(x))
    if function == "srelu":
        return torch.where(x <= 0, 0.0, x + x)
    s, slope = _gate(function, x)
    return s * (1.0 - s) if function == "sigmoid" else s + x * (s * (1.0 - s)) * slope


def _activate(name: str, h: Tensor) -> Tensor:
    """Apply an activation to ``h``, ``[M, F]`` or, if it gates, ``[M, 2 F]``; return ``[M, F]``."""
    function, gated = ACTIVATIONS[name]
    if not gated:
        return _apply(function, h)
    if function == "clamped":
        a, b = _clamped_pairs(h)
        return _apply("qgelu", a) * (b + 1.0)
    a, b = h.chunk(2, dim=-1)
    return _apply(function, a) * b


def _clamped_pairs(h: Tensor) -> tuple[Tensor, Tensor]:
    return h[..., ::2].clamp(max=_LIMIT), h[..., 1::2].clamp(-_LIMIT, _LIMIT)


def _activate_backward(name: str, h: Tensor, dy: Tensor) -> Tensor:
    """Compute the gradient of ``h``, in its shape, from ``dy``, that of the activation."""
    function, gated = ACTIVATIONS[name]
    if not gated:
        return dy * _derivative(function, h)
    if function == "clamped":
        a, b = _clamped_pairs(h)
        dh = torch.stack((dy * (b + 1.0) * _derivative("qgelu", a), dy * _apply("qgelu", a)), -1)
        is_clamped = h.abs() > _LIMIT
        is_clamped[..., ::2] = h[..., ::2] > _LIMIT
        return torch.where(is_clamped, 0.0, dh.view_as(h))
    a, b = h.chunk(2, dim=-1)
    return torch.cat((dy * b * _derivative(function, a), dy * _apply(function, a)), dim=-1)


def widen(x: Tensor) -> Tensor:
    """Convert ``x`` to the dtype of the arithmetic: float32, or float64 for float64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def apply_norm(
    x: Tensor, rstd: Tensor, weight: Tensor, mean: Tensor | None, bias: Tensor | None
) -> Tensor:
    """``(x - mean) * rstd * weight + bias``, not rounded; without mean and bias for RMSNorm."""
    wide = widen(x) if mean is None else widen(x) - mean[:, None]
    wide = wide * rstd[:, None] * weight.to(wide.dtype)
    return wide if bias is None else wide + bias.to(wide.dtype)


def prologue_shape(prologue: str, inputs: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the shape of a prologue's values: rows and columns."""
    *rows, columns = inputs[0].shape
    if prologue == "permute":
        return inputs[1].shape[0], columns
    _, gates = ACTIVATIONS.get(prologue, ("", False))
    return *rows, columns // 2 if gates else columns


def dequantize(q: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``q * scale``, multiplied in float32 and rounded once."""
    return (q.float() * expand_scale(scale, block, q.shape)).to(dtype).contiguous()


def value_of(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, block: Sequence[int] = (),
    event: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute the values of a prologue in high precision, contiguous.

    Args:
        prologue: one of those above, other than ``""``.
        dtype: the values are rounded to it once.
        block: of the scales that ``"dequantize"`` takes.
        event: a tensor of the backward, for graphs. A partitioner moves what needs only tensors of
            the forward into the forward, and keeps it until the backward; ``event`` prevents that.
    """
    if prologue == "dequantize":
        return dequantize(inputs[0], inputs[1], block, dtype)
    if prologue == "permute":
        x, token = inputs
        value = x.new_zeros((token.shape[0], x.shape[1]))
        is_filled = token >= 0
        value[is_filled] = x[token[is_filled].long()]
    elif prologue == "multiply":
        value = widen(inputs[0]) * widen(inputs[1])
    elif prologue.endswith("_norm"):
        x, rstd, weight, *statistics = inputs
        mean, bias = statistics or (None, None)
        value = apply_norm(x, rstd, weight, mean, bias)
    elif prologue.endswith("_backward"):
        h, dy = inputs
        value = _activate_backward(prologue.removesuffix("_backward"), widen(h), widen(dy))
    else:
        value = _activate(prologue, widen(inputs[0]))
    return value.to(dtype).contiguous()
