"""Quantize a matrix that is computed on the way and never written.  M rows, K columns.

Such a matrix is a ``Source``: a norm given its statistics, an activation, or the gradient of an
activation. Every op here is one of ``ops/quantize.py`` on a source in place of a tensor, and has
its bytes: the source's values are rounded to ``dtype`` before they are cast, as if they had been
written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops._register import register
from float8lab.ops.quantize import empty_scale
from float8lab.ops.reference import round_up, source_shape

__all__ = [
    "Source",
    "amax_of_op",
    "cast_of_op",
    "cast_of_unrecorded_op",
    "cast_pair_of_op",
    "quantize_of_op",
    "quantize_pair_of_op",
    "value_of_op",
]


class Source(NamedTuple):
    """A matrix that has not been computed yet."""

    kind: str
    """``"layer_norm"``, ``"rms_norm"``, an activation, or an activation and ``"_backward"``."""
    inputs: list[Tensor]
    """As ``ops/reference/source.py`` lists them."""
    dtype: torch.dtype
    """What the values are rounded to."""
    known_amax: Tensor | None = None
    """``[1, 1]``, where something has computed it already."""

    def value(self) -> Tensor:
        """The matrix."""
        value: Tensor = value_of_op(self.kind, self.inputs, self.dtype)
        return value

    def amax(self) -> Tensor:
        """Its largest absolute value, ``[1, 1]`` float32."""
        if self.known_amax is not None:
            return self.known_amax
        amax: Tensor = amax_of_op(self.kind, self.inputs, self.dtype)
        return amax


def _shape(
    kind: str, inputs: Sequence[Tensor], align: int, transposed: bool = False
) -> tuple[int, int]:
    rows, columns = (round_up(size, align) for size in source_shape(kind, inputs))
    return (columns, rows) if transposed else (rows, columns)


def _fake_value_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return inputs[0].new_empty(source_shape(kind, inputs), dtype=dtype)


def _fake_amax_of(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return inputs[0].new_empty((1, 1), dtype=torch.float32)


def _fake_cast_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
) -> Tensor:
    return inputs[0].new_empty(_shape(kind, inputs, align, transposed), dtype=fp8_dtype)


def _cast_of_unrecorded(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    encode: Tensor,
    fp8_dtype: torch.dtype,
    align: int,
) -> Tensor:
    q: Tensor = cast_of_op(kind, inputs, dtype, transposed, encode, None, fp8_dtype, align)
    return q


def _fake_cast_of_unrecorded(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    transposed: bool,
    encode: Tensor,
    fp8_dtype: torch.dtype,
    align: int,
) -> Tensor:
    return _fake_cast_of(kind, inputs, dtype, transposed, encode, None, fp8_dtype, align)


def _fake_cast_pair_of(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    q = inputs[0].new_empty(_shape(kind, inputs, align), dtype=fp8_dtype)
    return q, q.new_empty((q.shape[1], q.shape[0])), _fake_sum(kind, inputs, column_sum)


def _fake_sum(kind: str, inputs: Sequence[Tensor], wanted: bool) -> Tensor:
    columns = source_shape(kind, inputs)[1] if wanted else 0
    return inputs[0].new_empty(columns, dtype=torch.float32)


def _fake_quantize_of(
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
    shape = _shape(kind, inputs, align, transposed)
    found = known_amax is None and tuple(block) == (-1, -1)
    q = inputs[0].new_empty(shape, dtype=fp8_dtype)
    amax = q.new_empty((1, 1) if found else (0, 0), dtype=torch.float32)
    return q, empty_scale(q, shape, block), amax


def _fake_quantize_pair_of(
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
    shape = _shape(kind, inputs, align)
    q = inputs[0].new_empty(shape, dtype=fp8_dtype)
    scale, scale_t = (empty_scale(q, s, block) for s in (shape, shape[::-1]))
    q_t = q.new_empty(shape[::-1])
    return q, scale, q_t, scale_t, _fake_sum(kind, inputs, column_sum)


value_of_op = register(
    "value_of(str kind, Tensor[] inputs, ScalarType dtype) -> Tensor",
    cuda="source:value_of",
    reference=reference.value_of,
    fake=_fake_value_of,
)
amax_of_op = register(
    "amax_of(str kind, Tensor[] inputs, ScalarType dtype) -> Tensor",
    cuda="source:amax_of",
    reference=reference.amax_of,
    fake=_fake_amax_of,
)
cast_of_op = register(
    "cast_of(str kind, Tensor[] inputs, ScalarType dtype, bool transposed, Tensor encode,"
    " Tensor(a!)? amax_slot, ScalarType fp8_dtype, int align) -> Tensor",
    cuda="source_cast:cast_of",
    reference=reference.cast_of,
    fake=_fake_cast_of,
)
cast_of_unrecorded_op = register(  # for graphs, as ``cast_unrecorded_op`` is
    "cast_of_unrecorded(str kind, Tensor[] inputs, ScalarType dtype, bool transposed,"
    " Tensor encode, ScalarType fp8_dtype, int align) -> Tensor",
    cuda=_cast_of_unrecorded,
    reference=_cast_of_unrecorded,
    fake=_fake_cast_of_unrecorded,
)
cast_pair_of_op = register(
    "cast_pair_of(str kind, Tensor[] inputs, ScalarType dtype, Tensor encode,"
    " Tensor(a!)? amax_slot, ScalarType fp8_dtype, int align, bool column_sum)"
    " -> (Tensor, Tensor, Tensor)",
    cuda="source_cast:cast_pair_of",
    reference=reference.cast_pair_of,
    fake=_fake_cast_pair_of,
)
quantize_of_op = register(
    "quantize_of(str kind, Tensor[] inputs, ScalarType dtype, bool transposed,"
    " Tensor? known_amax, ScalarType fp8_dtype, int[] block, str rule, float eps, int align)"
    " -> (Tensor, Tensor, Tensor)",
    cuda="source_quantize:quantize_of",
    reference=reference.quantize_of,
    fake=_fake_quantize_of,
)
quantize_pair_of_op = register(
    "quantize_pair_of(str kind, Tensor[] inputs, ScalarType dtype, ScalarType fp8_dtype,"
    " int[] block, str rule, float eps, int align, bool column_sum)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cuda="source_quantize:quantize_pair_of",
    reference=reference.quantize_pair_of,
    fake=_fake_quantize_pair_of,
)
