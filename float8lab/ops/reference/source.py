"""Quantize a matrix that is computed on the way and never written: a *source*.  M rows, K columns.

A source is a kind and its inputs:

- ``"layer_norm"``: x [M, K], rstd [M], weight [K], mean [M], bias [K];
- ``"rms_norm"``: x [M, K], rstd [M], weight [K];
- an activation: h [M, K], or [M, 2 K] if it gates;
- an activation and ``"_backward"``: h [M, K], dy [M, K], or [M, K / 2] if it gates.

Its values are computed in float32 and rounded once to ``dtype``. Each op gives what its namesake in
``quantize.py`` gives for those values: a fused cast has the bytes of the cast of the composition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8lab.ops.reference.activation import (
    activate,
    activate_backward,
    is_gated,
)
from float8lab.ops.reference.norm import apply_norm, widen
from float8lab.ops.reference.quantize import (
    amax,
    cast,
    cast_pair,
    quantize,
    quantize_pair,
)

__all__ = [
    "amax_of",
    "cast_of",
    "cast_pair_of",
    "quantize_of",
    "quantize_pair_of",
    "source_shape",
    "value_of",
]


def source_shape(kind: str, inputs: Sequence[Tensor]) -> tuple[int, int]:
    """Rows and columns of a source."""
    rows, columns = inputs[0].shape
    gathers = not kind.endswith(("_norm", "_backward")) and is_gated(kind)
    return rows, columns // 2 if gathers else columns


def value_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The source's values, contiguous."""
    if kind.endswith("_norm"):
        x, rstd, weight, *rest = inputs
        mean, bias = rest or (None, None)
        value = apply_norm(x, rstd, weight, mean, bias)
    elif kind.endswith("_backward"):
        h, dy = inputs
        value = activate_backward(kind.removesuffix("_backward"), widen(h), widen(dy))
    else:
        value = activate(kind, widen(inputs[0]))
    return value.to(dtype).contiguous()


def amax_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Largest absolute value, float32 [1, 1]."""
    return amax(value_of(kind, inputs, dtype), (-1, -1))


def cast_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
) -> Tensor:
    """Per-tensor ``cast`` of the source, or of its transpose."""
    value = value_of(kind, inputs, dtype)
    value = value.t() if transposed else value
    return cast(value, encode, amax_slot, fp8_dtype, (-1, -1), align)


def cast_pair_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-tensor ``cast_pair`` of the source."""
    value = value_of(kind, inputs, dtype)
    return cast_pair(value, encode, amax_slot, fp8_dtype, align, column_sum)


def quantize_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    known_amax: Tensor | None,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``quantize`` of the source or of its transpose: FP8 data, scales and an amax.

    ``known_amax``, [1, 1], is that of the source, if it is known and the block is the whole. The
    amax is returned if the block is the whole and it was not known, else an empty tensor.
    """
    value = value_of(kind, inputs, dtype)
    value = value.t() if transposed else value
    q, scale, found = quantize(value, fp8_dtype, block, rule, eps, align, known_amax)
    wanted = known_amax is None and tuple(block) == (-1, -1)
    return q, scale, found if wanted else found.new_empty((0, 0))


def quantize_pair_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``quantize_pair`` of the source."""
    value = value_of(kind, inputs, dtype)
    return quantize_pair(value, fp8_dtype, block, rule, eps, align, column_sum)
