"""Groups of rows, such as the tokens of MoE experts.  M tokens, E experts, K features.

``reference/grouped.py`` specifies their layout, and explains where a transpose has its groups. The
offsets of the groups are read only on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops.cast import Prologue, amax_op, cast_op
from float8lab.ops.declare import declare

__all__ = [
    "Groups", "Offsets", "amax_of_batch", "amaxes_of_blocks", "groups_of_rows",
    "matrices_of_blocks", "plan_groups_op",
]  # fmt: skip


def _plan_outputs(args: Any) -> Tensor:
    E = args.offs.shape[0]
    tiles = reference.padded_rows(args.rows, E) // reference.SPAN
    return args.offs.new_empty((E + 1 + tiles, 4), dtype=torch.int32)


# This is a separate op, since the GEMMs of a layer and those of its gradients share a plan.
plan_groups_op = declare(
    reference.plan_groups, name="cast.plan", cuda="grouped_cast:plan_groups", outputs=_plan_outputs
)


class Offsets(NamedTuple):
    """The offsets of the rows of groups, and the plan of their GEMMs."""

    offs: Tensor
    """``[E]``."""
    plan: Tensor | None

    @staticmethod
    def of(offs: Tensor, rows: int) -> Offsets:
        """Return the offsets for a matrix of ``rows`` rows, with the plan of its GEMMs."""
        return Offsets(offs, plan_groups_op(offs, rows))


def groups_of_rows(rows: int, offs: Tensor) -> Tensor:
    """Return the group of each row, ``[rows]``; padding rows belong to the last group."""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, row, right=True).clamp_(max=offs.shape[0] - 1)


def _amax(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, offs: Tensor | None = None,
    plan: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return cast_op(
        prologue, inputs, dtype, torch.float8_e4m3fn, (-1, -1), "fp32", 0.0, reference.ALIGN,
        False, False, False, None, offs, plan,
    )[2]  # fmt: skip


def amax_of_batch(x: Tensor) -> Tensor:
    """Return the largest absolute value of each matrix of a batch, ``[E, 1, 1]``."""
    return _amax("", (x,), x.dtype)


def amaxes_of_blocks(x: Tensor, block: Sequence[int]) -> Tensor:
    """Return the largest absolute value of each block of a matrix, or of a batch of matrices."""
    if x.ndim == 2:
        return amax_op("", (x,), x.dtype, block)
    if tuple(block) == (1, -1, -1):
        return amax_of_batch(x)
    amaxes = [amax_op("", (m,), m.dtype, block[1:]) for m in matrices_of_blocks(x, block)]
    return torch.stack(amaxes).view(x.shape[0], -1, amaxes[0].shape[1])


def matrices_of_blocks(x: Tensor, block: Sequence[int]) -> Sequence[Tensor]:
    """Split a batch ``[E, N, K]`` into as few matrices as possible that do not cut blocks."""
    E, N, K = x.shape
    return x.unbind() if N % block[1] else [x.reshape(E * N, K)]


class Groups(NamedTuple):
    """A matrix, or a prologue that computes it, whose rows form groups."""

    prologue: str
    inputs: Sequence[Tensor]
    dtype: torch.dtype
    offs: Tensor
    """The offsets of the groups, ``[E]``."""
    plan: Tensor | None = None
    """The plan of the groups' GEMMs, if several GEMMs share it."""

    @staticmethod
    def of(x: Tensor | Prologue, offsets: Offsets) -> Groups:
        """Make groups from a matrix, or from a prologue that is not computed yet."""
        return Groups(*(("", (x,), x.dtype) if isinstance(x, Tensor) else x[:3]), *offsets)

    def value(self) -> Tensor:
        """Return the matrix; its padding rows hold arbitrary values."""
        return Prologue(*self[:3]).value() if self.prologue else self.inputs[0]

    def owned(self) -> Tensor:
        """Return the matrix with zeros in its padding rows."""
        x = self.value()
        inside = torch.arange(x.shape[0], device=x.device)[:, None] < self.offs[-1:]
        return torch.where(inside, x, 0.0)

    def amax(self) -> Tensor:
        """Return the largest absolute value of each group, ``[E, 1, 1]``; 0 without rows."""
        return _amax(*self)

    def has_rows(self) -> Tensor:
        """Return whether each group has any row, ``[E]``."""
        return torch.diff(self.offs, prepend=self.offs.new_zeros(1)) > 0
