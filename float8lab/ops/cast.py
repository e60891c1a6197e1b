"""Cast matrices to FP8, and back; transpose them.  M rows, K columns.

``reference/cast.py`` specifies these ops, and ``reference/prologue.py`` what can be cast without
being written first. They are for callers that have checked their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.formats import SCALE_RULES, scale_shape, scales_by_column
from float8lab.ops import reference
from float8lab.ops.declare import declare
from float8lab.ops.reference import round_up

__all__ = [
    "Prologue", "amax_op", "cast_many_op", "cast_op", "cast_outputs", "empty_scale", "groups_of",
    "transpose_op", "value_of_op",
]  # fmt: skip


def empty_scale(x: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """Room for the scales of a quantized matrix or batch of ``shape``, on the device of ``x``.
    Those of 1xB blocks of a matrix are stored column by column, as cuBLASLt reads them; all others
    by row."""
    *batch, M, K = shape
    rows, columns = scale_shape((M, K), tuple(block))
    if scales_by_column(block) and not batch:
        return x.new_empty((columns, rows), dtype=torch.float32).t()
    return x.new_empty((*batch, rows, columns), dtype=torch.float32)


def groups_of(of: Any) -> tuple[int, ...]:
    """``(E,)`` where E groups or the matrices of a batch are cast, ``()`` for a matrix."""
    return tuple(of.inputs[0].shape[:-2] if of.offs is None else of.offs.shape)


def _empty_scale_of(of: Any, shape: tuple[int, int], by_group: bool) -> Tensor | None:
    """Room for the scales of one orientation, of each group ``by_group``; None if given."""
    if of.rule not in SCALE_RULES:
        return None
    batch = groups_of(of) if by_group else ()
    return empty_scale(of.inputs[0], (*batch, *shape), of.block)


def _empty_amax_of(of: Any, shape: tuple[int, int]) -> Tensor | None:
    """Room for the amaxes that a cast returns, for scales of ``shape``."""
    x, groups, block = of.inputs[0], groups_of(of), tuple(of.block)
    if of.rule not in SCALE_RULES or not reference.has_amax(of.prologue, block, of.given):
        return None
    if groups:
        return x.new_empty((*groups, 1, 1), dtype=torch.float32) if block == (-1, -1) else None
    return empty_scale(x, shape, block) if of.rowwise != of.columnwise else None


def cast_outputs(of: Any) -> tuple[Tensor | None, ...]:
    """Room for the results of ``cast``, whose arguments are the attributes of ``of``."""
    x, groups, block = of.inputs[0], groups_of(of), tuple(of.block)
    *batch, M, K = reference.prologue_shape(of.prologue, of.inputs)
    align = reference.ALIGN if groups else of.align
    rows, columns = round_up(M, align), round_up(K, align)
    padded = rows
    if of.offs is not None:
        rows, padded = M, reference.padded_rows(M, groups[0])
    by_group = bool(groups) and (of.offs is None or block == (-1, -1))
    q = scale = q_t = scale_t = None
    if of.rowwise:
        q = x.new_empty((*batch, rows, columns), dtype=of.fp8_dtype)
        scale = _empty_scale_of(of, (rows, columns), by_group)
    if of.columnwise:
        q_t = x.new_empty((*batch, columns, padded), dtype=of.fp8_dtype)
        by_group = by_group or (bool(groups) and block == (1, -1))
        scale_t = _empty_scale_of(of, (columns, padded), by_group)
    amax = _empty_amax_of(of, (rows, columns) if of.rowwise else (columns, padded))
    sums = x.new_empty((*groups, K), dtype=torch.float32) if of.dbias else None
    return reference.CastResults(q, scale, amax, q_t, scale_t, sums)


cast_op = declare(
    reference.cast, cuda="cast:cast", outputs=cast_outputs, mutates=("slot",), any_strides=True
)
# An op of its own, not a cast that wants nothing else: selective checkpointing knows calls by op
# and order, and a recomputation does not find the amaxes that delayed scaling began with.
amax_op = declare(
    reference.amax_of,
    name="cast.amax",
    cuda="cast:amax_of",
    outputs=lambda of: of.inputs[0].new_empty(
        scale_shape(reference.prologue_shape(of.prologue, of.inputs), tuple(of.block)),
        dtype=torch.float32,
    ),
    any_strides=True,
)
# It writes to its arguments, and leaves the version counters of these to the caller.
cast_many_op = declare(
    reference.cast_many_,
    name="cast.many_",
    cuda="cast_many:cast_many_",
    outputs=lambda of: None,
    mutates=("q", "scale", "amax"),
)


def _shards_of_value(of: Any) -> Any:
    """An activation is one of rows, and of columns unless it gates."""
    name = of.prologue.removesuffix("_backward")
    if name in reference.ACTIVATIONS:
        for dim in range(of.inputs[0].ndim - reference.ACTIVATIONS[name][1]):
            yield (dim,), {"inputs": dim}


value_of_op = declare(
    reference.value_of,
    cuda="prologue:value_of",
    outputs=lambda of: of.inputs[0].new_empty(
        reference.prologue_shape(of.prologue, of.inputs), dtype=of.dtype
    ),
    sharding=_shards_of_value,
)


def _transpose_outputs(of: Any) -> Tensor:
    if of.q.ndim == 3:
        E, M, K = of.q.shape
        return of.q.new_empty((K, E, M)).transpose(0, 1)
    return of.q.new_empty([round_up(size, of.align) for size in of.q.shape[::-1]])


transpose_op = declare(reference.transpose, cuda="dequantize:transpose", outputs=_transpose_outputs)


class Prologue(NamedTuple):
    """A matrix that has not been computed yet: a prologue and its inputs."""

    prologue: str
    inputs: Sequence[Tensor]
    dtype: torch.dtype
    """The dtype that the values are rounded to."""
    known_amax: Tensor | None = None
    """``[1, 1]``, where something has computed it already."""

    def value(self) -> Tensor:
        """The matrix."""
        return value_of_op(self.prologue, self.inputs, self.dtype)

    def amax(self) -> Tensor:
        """The largest absolute value, ``[1, 1]`` float32."""
        return amax_op(*self[:3]) if self.known_amax is None else self.known_amax
