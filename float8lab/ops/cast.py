"""Cast matrices to FP8 and back; transpose them.  M rows, K columns.

``reference/cast.py`` specifies these ops, and ``reference/prologue.py`` the prologues that a cast
computes without writing them. Callers must have checked the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.formats import HOPPER, SCALE_RULES, scale_shape, scales_by_column
from float8lab.ops import reference
from float8lab.ops.declare import capability_of, declare
from float8lab.ops.reference import round_up

__all__ = [
    "Prologue", "amax_op", "cast_many_op", "cast_op", "cast_outputs", "empty_scale", "groups_of",
    "is_cast_at_once", "transpose_op", "value_of_op",
]  # fmt: skip


def is_cast_at_once(x: Tensor) -> bool:
    """Whether a GPU finds the amaxes of a matrix, and casts it, in a single launch."""
    # Values of four bytes leave too few registers; several launches cast large matrices faster.
    on_hopper = HOPPER.includes(capability_of(x.device))
    return on_hopper and x.element_size() == 2 and x.numel() <= 2**25  # may be symbolic


def empty_scale(x: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """Allocate the scales of a quantized matrix or batch of ``shape``, on the device of ``x``.
    Scales of 1xB blocks of a matrix are stored by column, as cuBLASLt reads them; all other scales
    are stored by row."""
    *batch, M, K = shape
    rows, columns = scale_shape((M, K), tuple(block))
    if scales_by_column(block) and not batch:
        return x.new_empty((columns, rows), dtype=torch.float32).t()
    return x.new_empty((*batch, rows, columns), dtype=torch.float32)


def groups_of(args: Any) -> tuple[int, ...]:
    """Return ``(E,)`` for a cast of E groups or of a batch of E matrices, ``()`` for a matrix."""
    return tuple(args.inputs[0].shape[:-2] if args.offs is None else args.offs.shape)


def _allocate_scale(args: Any, shape: tuple[int, int], by_group: bool) -> Tensor | None:
    """Allocate the scales of one orientation, of each group if ``by_group``; None if given."""
    if args.rule not in SCALE_RULES:
        return None
    batch = groups_of(args) if by_group else ()
    return empty_scale(args.inputs[0], (*batch, *shape), args.block)


def _allocate_amax(args: Any, shape: tuple[int, int]) -> Tensor | None:
    """Allocate the amaxes that a cast returns, for scales of ``shape``."""
    x, groups, block = args.inputs[0], groups_of(args), tuple(args.block)
    if args.rule not in SCALE_RULES or not reference.has_amax(args.prologue, block, args.given):
        return None
    if groups:
        return x.new_empty((*groups, 1, 1), dtype=torch.float32) if block == (-1, -1) else None
    return empty_scale(x, shape, block) if args.rowwise != args.columnwise else None


def cast_outputs(args: Any) -> tuple[Tensor | None, ...]:
    """Allocate the results of ``cast``, whose arguments are the attributes of ``args``."""
    x, groups, block = args.inputs[0], groups_of(args), tuple(args.block)
    *batch, M, K = reference.prologue_shape(args.prologue, args.inputs)
    align = reference.ALIGN if groups else args.align
    rows, columns = round_up(M, align), round_up(K, align)
    padded = rows
    if args.offs is not None:
        rows, padded = M, reference.padded_rows(M, groups[0])
    by_group = bool(groups) and (args.offs is None or block == (-1, -1))
    q = scale = q_t = scale_t = None
    if args.rowwise:
        q = x.new_empty((*batch, rows, columns), dtype=args.fp8_dtype)
        scale = _allocate_scale(args, (rows, columns), by_group)
    if args.columnwise:
        q_t = x.new_empty((*batch, columns, padded), dtype=args.fp8_dtype)
        by_group = by_group or (bool(groups) and block == (1, -1))
        scale_t = _allocate_scale(args, (columns, padded), by_group)
    amax = _allocate_amax(args, (rows, columns) if args.rowwise else (columns, padded))
    sums = x.new_empty((*groups, K), dtype=torch.float32) if args.dbias else None
    return reference.CastResults(q, scale, amax, q_t, scale_t, sums)


cast_op = declare(
    reference.cast, cuda="cast:cast", outputs=cast_outputs, mutates=("slot",), any_strides=True
)
# This is a separate op, not a cast without operands: selective checkpointing identifies calls by op
# and order, and a recomputation does not repeat the first amaxes of delayed scaling.
amax_op = declare(
    reference.amax_of,
    name="cast.amax",
    cuda="cast:amax_of",
    outputs=lambda args: args.inputs[0].new_empty(
        scale_shape(reference.prologue_shape(args.prologue, args.inputs), tuple(args.block)),
        dtype=torch.float32,
    ),
    any_strides=True,
)
# The op writes to its arguments, and its caller must increase their version counters.
cast_many_op = declare(
    reference.cast_many_,
    name="cast.many_",
    cuda="cast_many:cast_many_",
    outputs=lambda args: None,
    mutates=("q", "scale", "amax"),
)


def _shard_value(args: Any) -> Any:
    """Shard an activation by rows, and by columns unless it is gated."""
    name = args.prologue.removesuffix("_backward")
    if name in reference.ACTIVATIONS:
        for dim in range(args.inputs[0].ndim - reference.ACTIVATIONS[name][1]):
            yield (dim,), {"inputs": dim}


value_of_op = declare(
    reference.value_of,
    cuda="prologue:value_of",
    outputs=lambda args: args.inputs[0].new_empty(
        reference.prologue_shape(args.prologue, args.inputs), dtype=args.dtype
    ),
    sharding=_shard_value,
)


def _transpose_outputs(args: Any) -> Tensor:
    if args.q.ndim == 3:
        E, M, K = args.q.shape
        return args.q.new_empty((K, E, M)).transpose(0, 1)
    return args.q.new_empty([round_up(size, args.align) for size in args.q.shape[::-1]])


transpose_op = declare(reference.transpose, cuda="dequantize:transpose", outputs=_transpose_outputs)


class Prologue(NamedTuple):
    """A matrix that has not been computed yet: the name of a prologue, and its inputs."""

    prologue: str
    inputs: Sequence[Tensor]
    dtype: torch.dtype
    """The dtype to which the values are rounded."""
    known_amax: Tensor | None = None
    """``[1, 1]``, if it has been computed already."""

    def value(self) -> Tensor:
        """Compute the matrix."""
        return value_of_op(self.prologue, self.inputs, self.dtype)

    def amax(self) -> Tensor:
        """Return the largest absolute value, ``[1, 1]`` float32."""
        return amax_op(*self[:3]) if self.known_amax is None else self.known_amax
