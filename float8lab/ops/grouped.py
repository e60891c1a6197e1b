"""Casts and products of a mixture of experts.  M tokens, E experts, K in, N out features.

``y = x @ w[e].T`` for the rows of each expert e, and its gradients: a GEMM of one whole is
``ops/gemm.py``. ``reference/grouped.py`` specifies these ops, and why a transpose has its groups
where it has them. The ends of the groups are read on the device alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.formats import SCALE_RULES, scale_shape
from float8lab.ops import reference
from float8lab.ops.cast import Prologue, empty_scale
from float8lab.ops.declare import declare
from float8lab.ops.reference import round_up

__all__ = [
    "Groups",
    "Offsets",
    "cast_groups_op",
    "grouped_mm_op",
    "groups_of_rows",
    "outputs_of_groups",
    "plan_groups_op",
]


def outputs_of_groups(of: Any) -> tuple[Tensor | None, ...]:
    """Room for the results of ``cast_groups``, whose arguments are the attributes of ``of``."""
    x, block = of.inputs[0], tuple(of.block)
    *batch, M, K = x.shape if of.offs is None else reference.prologue_shape(of.prologue, of.inputs)
    columns = round_up(K, reference.ALIGN)
    rows, across = round_up(M, reference.ALIGN), round_up(M, reference.ALIGN)
    if of.offs is not None:
        rows, across = M, reference.padded_rows(M, of.offs.shape[0])
    finds = of.rule in SCALE_RULES

    def scales(oriented: tuple[int, int], turned: bool) -> Tensor:
        if of.offs is None or block == (-1, -1) or (turned and block == (1, -1)):
            lead = of.offs.shape if batch == [] else batch
            shape = (*lead, *scale_shape(oriented, block))
            return x.new_empty(shape, dtype=torch.float32)
        return empty_scale(x, oriented, block)

    q = scale = amax = q_t = scale_t = total = None
    if of.straight:
        q = x.new_empty((*batch, rows, columns), dtype=of.fp8_dtype)
        scale = scales((rows, columns), False) if finds else None
    if of.transposed:
        q_t = x.new_empty((*batch, columns, across), dtype=of.fp8_dtype)
        scale_t = scales((columns, across), True) if finds else None
    if finds and block == (-1, -1) and of.given is None:
        lead = batch if of.offs is None else of.offs.shape
        amax = x.new_empty((*lead, 1, 1), dtype=torch.float32)
    if of.column_sum:
        total = x.new_empty((of.offs.shape[0], K), dtype=torch.float32)
    return q, scale, amax, q_t, scale_t, total


cast_groups_op = declare(
    reference.cast_groups,
    cuda="grouped_cast:cast_groups",
    outputs=outputs_of_groups,
    mutates=("slot",),
    any_strides=True,
)


def _flops(
    a: Sequence[int], scale: Any, _: Any, b: Sequence[int], __: Any, ___: Any, ____: Any,
    offs: Sequence[int], *args: Any, **kwargs: Any,
) -> int:  # fmt: skip
    """A contraction in FP8 counts without the room between the groups, to within one span."""
    contraction = a[1]
    if len(b) == 2 and scale is not None:
        room = (offs[0] + 1) * (reference.SPAN - 1)
        contraction = max(contraction - room, contraction // reference.SPAN)
    return 2 * a[0] * contraction * b[-2]


grouped_mm_op = declare(
    reference.grouped_mm,
    cuda="grouped_gemm:grouped_mm",
    outputs=lambda of: of.a.new_empty(
        (of.a.shape[0], of.b.shape[1])
        if of.b.ndim == 3
        else (of.offs.shape[0], of.a.shape[0], of.b.shape[0]),
        dtype=of.out_dtype,
    ),
    flops=_flops,
)


def _plan_outputs(of: Any) -> Tensor:
    E = of.offs.shape[0]
    tiles = reference.padded_rows(of.rows, E) // reference.SPAN
    plan: Tensor = of.offs.new_empty((E + 1 + tiles, 4), dtype=torch.int32)
    return plan


# An op of its own, for the products of a layer, and those of its gradients, share a plan.
plan_groups_op = declare(
    reference.plan_groups,
    name="grouped_mm.plan",
    cuda="grouped_cast:plan_groups",
    outputs=_plan_outputs,
)


_NO_DATA = (False, False, False, None, None)
"""Neither orientation, nor sums: a cast that finds amaxes and scales alone."""


class Offsets(NamedTuple):
    """Where the rows of groups end, and the plan of their products."""

    offs: Tensor
    """``[E]``."""
    plan: Tensor | None

    @staticmethod
    def of(offs: Tensor, rows: int) -> Offsets:
        """The ends of groups of a matrix of so many rows, with their plan."""
        return Offsets(offs, plan_groups_op(offs, rows))


def groups_of_rows(rows: int, offs: Tensor) -> Tensor:
    """The group of each of so many rows, ``[rows]``; the last group for those of none."""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, row, right=True).clamp_(max=offs.shape[0] - 1)


class Groups(NamedTuple):
    """A matrix, or a prologue that computes it, whose rows are in groups; or a batch."""

    prologue: str
    inputs: Sequence[Tensor]
    dtype: torch.dtype
    offs: Tensor | None
    """Ends of the groups, ``[E]``; None for a batch, ``[E, N, K]``."""
    plan: Tensor | None = None
    """The plan of the groups' products, where several share it."""

    @staticmethod
    def of(x: Tensor | Prologue, offsets: Offsets) -> Groups:
        """The groups of a matrix that is there or not computed yet."""
        return Groups(*(("", (x,), x.dtype) if isinstance(x, Tensor) else x[:3]), *offsets)

    def value(self) -> Tensor:
        """The matrix, with what it has in rows that belong to nobody."""
        x = self.inputs[0]
        return Prologue(*self[:3]).value() if self.prologue else x

    def owned(self) -> Tensor:
        """The matrix, with zeros in rows that belong to nobody."""
        x = self.value()
        assert self.offs is not None, "not a batch"
        inside = torch.arange(x.shape[0], device=x.device)[:, None] < self.offs[-1:]
        return torch.where(inside, x, 0.0)

    def amax(self) -> Tensor:
        """The largest absolute value of each group or matrix, ``[E, 1, 1]``; 0 without rows."""
        how = (torch.float8_e4m3fn, (-1, -1), "fp32", 0.0)
        amax: Tensor = cast_groups_op(*self[:4], *how, *_NO_DATA, self.plan)[2]
        return amax

    def has_rows(self) -> Tensor:
        """Whether each group has any row, ``[E]``."""
        assert self.offs is not None, "not a batch"
        return torch.diff(self.offs, prepend=self.offs.new_zeros(1)) > 0
