"""Operands, which casts give and GEMMs take: FP8 data and scales.  M rows, K columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from float8lab.formats import Float8Spec

__all__ = ["BlockOperand", "Operand", "Orientations", "Quantized"]


class Orientations(NamedTuple):
    """How a matrix is cast, by its rows and by its columns; None where that is not wanted."""

    rowwise: Float8Spec | None
    columnwise: Float8Spec | None


class Operand(NamedTuple):
    """A matrix in FP8 that a GEMM contracts along its rows."""

    data: Tensor
    """Padded so that each dimension is a multiple of ``ALIGN``."""
    scale: Tensor
    """The decode scales."""


class BlockOperand(NamedTuple):
    """An operand with its block, as the GEMM ops take it: ``[rows, K]``, or a batch of these."""

    data: Tensor
    scale: Tensor
    block: Sequence[int]


class Quantized(NamedTuple):
    """The results of a cast; None stands for each that was not asked for."""

    rowwise: Any = None
    """The ``Operand`` of the matrix, ``[M, K]``."""
    columnwise: Any = None
    """The ``Operand`` of the transpose, ``[K, M]``."""
    requant: Tensor | None = None
    """What requantizes the matrix bit for bit, beside the scale: the encode factor or the amax."""
    dbias: Tensor | None = None
    """The column sums, of all rows or of those of each group, float32."""
