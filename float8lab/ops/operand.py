"""Operands, which casts return and GEMMs take: FP8 data and scales.  M rows, K columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from float8lab.formats import Float8Spec

__all__ = ["BlockOperand", "Operand", "Orientations", "Quantized"]


class Orientations(NamedTuple):
    """The specs of a matrix's rowwise and columnwise cast; None: no cast in this orientation."""

    rowwise: Float8Spec | None
    columnwise: Float8Spec | None


class Operand(NamedTuple):
    """A matrix in FP8 that a GEMM contracts along its rows."""

    data: Tensor
    """FP8 data, padded so that each dimension is a multiple of ``ALIGN``."""
    scale: Tensor
    """The decode scales."""


class BlockOperand(NamedTuple):
    """An operand with its block, as the GEMM ops take it: ``[rows, K]``, or a batch of matrices."""

    data: Tensor
    scale: Tensor
    block: Sequence[int]


class Quantized(NamedTuple):
    """The results of a cast; None for each that was not asked for."""

    rowwise: Any = None
    """The ``Operand`` of the matrix, ``[M, K]``."""
    columnwise: Any = None
    """The ``Operand`` of the transpose, ``[K, M]``."""
    requant: Tensor | None = None
    """With the scale it requantizes the matrix bit for bit: the encode factor or the amax."""
    dbias: Tensor | None = None
    """The column sums, of all rows or of the rows of each group, float32."""
