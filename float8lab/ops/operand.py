"""What casts give and GEMMs take: FP8 data with their scales.  M rows, K columns of a matrix."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from float8lab.formats import Float8Spec

__all__ = ["Operand", "Orientations", "Quantized"]


class Orientations(NamedTuple):
    """How a matrix is cast, by its rows and by its columns; None where that is not wanted."""

    rowwise: Float8Spec | None
    columnwise: Float8Spec | None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is cast."""
        return self.rowwise is None and self.columnwise is None

    @property
    def has_both(self) -> bool:
        """Whether the matrix is cast in both orientations."""
        return self.rowwise is not None and self.columnwise is not None


class Operand(NamedTuple):
    """A matrix in FP8 that a GEMM contracts along its rows."""

    data: Tensor
    """Padded so that each dimension is a multiple of ``ALIGN``."""
    scale: Tensor
    """The decode scales."""


class Quantized(NamedTuple):
    """What a cast gives; None is what was not asked for."""

    data: Tensor | None = None
    """``[M, K]`` in FP8."""
    scale: Tensor | None = None
    requant: Tensor | None = None
    """What requantizes the matrix bit for bit, beside the scale: the encode factor or the amax."""
    columnwise_data: Tensor | None = None
    """``[K, M]`` in FP8, of the transpose."""
    columnwise_scale: Tensor | None = None
    dbias: Tensor | None = None
    """The sums over the rows, or over those of each group, float32."""

    @property
    def rowwise(self) -> Any:
        """The operand of the matrix; None if that was not asked for."""
        return None if self.data is None else Operand(self.data, self.scale)  # type: ignore[arg-type]

    @property
    def columnwise(self) -> Any:
        """The operand of the transpose; None if that was not asked for."""
        if self.columnwise_data is None:
            return None
        return Operand(self.columnwise_data, self.columnwise_scale)  # type: ignore[arg-type]
