"""Casts under delayed scaling in a compiled graph.  M rows, K columns.

Eager mode finds the scale of a cast, and the slot for its amax, in Python. A graph cannot hold
that: which slots a module has, and where they lie, changes while the graph stays. So there the cast
is one op, which is given the module's ``handle`` and does at run time what eager mode does. A
compiler makes one op of two with the same arguments, though the second may record in another
region, or be recomputed where the first is not. So the casts of a graph are numbered.

A cast of x or w that runs in backward belongs to a recomputation, by activation checkpointing. It
records nothing and casts under the scale that the module's last forward used.

A region ends after the casts of its forward: each of them tells so. The module's output could tell
it too, but an op that reads the output has the partitioner save what is computed of the output for
backward, such as the output in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from float8lab.nn.handles import owner_of
from float8lab.nn.precision import Call
from float8lab.ops import (
    Source,
    cast_of_op,
    cast_pair_of_op,
    register_stateful,
    round_up,
)
from float8lab.ops.quantize import cast_op, cast_pair_op
from float8lab.ops.source import source_shape
from float8lab.recipes.recipe import recipe_numbered
from float8lab.recipes.reduction import group_named
from float8lab.recipes.region import come_after_in_graph

__all__ = ["cast_in_graph", "cast_pair_in_graph", "leave_to_python"]


def cast_in_graph(x, index, call, fp8_dtype, straight, transposed, column_sum, align):
    if straight and transposed:
        q, q_t, scale, total = cast_pair_in_graph(x, index, call, fp8_dtype, align, column_sum)
        return q, scale, None, q_t, scale, total
    q, scale, encode = cast_one_in_graph(x.t() if transposed else x, index, call, fp8_dtype, align)
    return (
        (None, None, encode, q, scale, None) if transposed else (q, scale, encode, None, None, None)
    )


def cast_one_in_graph(
    x: Tensor | Source, index: int, call: Call, fp8_dtype: torch.dtype, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    """FP8 data of a matrix, or of one that is computed on the way; its scale and encode factor."""
    q, factors = _cast_op(*_described(x), *_identified(index, call), fp8_dtype, align)
    _end_after(factors, index, call)
    return q, factors[:1], factors[1:]


def cast_pair_in_graph(
    x: Tensor | Source,
    index: int,
    call: Call,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FP8 data of both orientations, their scale and the column sums."""
    q, q_t, scale, total = _cast_pair_op(
        *_described(x), *_identified(index, call), fp8_dtype, align, column_sum
    )
    _end_after(scale, index, call)
    return q, q_t, scale, total


def _end_after(scale: Tensor, index: int, call: Call) -> None:
    """Have the region end after the cast that gave ``scale``."""
    assert call.precision is not None, "set by Precision.begin"
    _, in_forward = call.precision.slot_layout(call.plan)
    if call.record and in_forward[index]:
        come_after_in_graph(scale)


_MATRIX = ""
"""The kind of a source that is a matrix."""


def _described(x: Tensor | Source) -> tuple[str, list[Tensor], torch.dtype]:
    return (x.kind, list(x.inputs), x.dtype) if isinstance(x, Source) else (_MATRIX, [x], x.dtype)


_casts: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
"""How many casts each graph has that is being traced."""


def _next_number() -> int:
    """Counts within a graph, so that equal graphs are equal to a compiler's cache, too."""
    graph = torch._guards.TracingContext.get()
    number = _casts[graph] = _casts.get(graph, 0) + 1
    return number


# As torch.compiler.assume_constant_result marks it, which would import the compiler here.
_next_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _identified(index: int, call: Call) -> tuple[Tensor, int, str, int, bool, int]:
    assert call.precision is not None, "set by Precision.begin"
    named = call.precision.handle, call.recipe.number, call.group_name
    return *named, index, call.record, _next_number()


def _source(kind: str, inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor | Source:
    return inputs[0] if kind == _MATRIX else Source(kind, list(inputs), dtype)


def _begin(handle: Tensor, recipe: int, group: str, index: int, record: bool, x: Any) -> Any:
    """Factors and slot for a cast."""
    found = recipe_numbered(recipe), group_named(group)
    return owner_of(handle).scale_in_graph(*found, index, record, x)


def _cast(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    handle: Tensor,
    recipe: int,
    group: str,
    index: int,
    record: bool,
    _number: int,
    fp8_dtype: torch.dtype,
    align: int,
) -> tuple[Tensor, Tensor]:
    factors, slot = _begin(handle, recipe, group, index, record, _source(kind, inputs, dtype))
    encode, both = factors.encode, factors.pair
    if kind == _MATRIX:
        return cast_op(inputs[0], encode, slot, fp8_dtype, (-1, -1), align), both
    return cast_of_op(kind, inputs, dtype, False, encode, slot, fp8_dtype, align), both


def _cast_pair(
    kind: str,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    handle: Tensor,
    recipe: int,
    group: str,
    index: int,
    record: bool,
    _number: int,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    factors, slot = _begin(handle, recipe, group, index, record, _source(kind, inputs, dtype))
    how = (factors.encode, slot, fp8_dtype, align, column_sum)
    if kind == _MATRIX:
        q, q_t, total = cast_pair_op(inputs[0], *how)
    else:
        q, q_t, total = cast_pair_of_op(kind, inputs, dtype, *how)
    return q, q_t, factors.scale, total


def _shape(kind: str, inputs: Sequence[Tensor]) -> tuple[int, int]:
    return tuple(inputs[0].shape) if kind == _MATRIX else source_shape(kind, inputs)  # type: ignore[return-value]


def _fake_cast(
    kind: str, inputs: Sequence[Tensor], dtype: torch.dtype, *rest: Any
) -> tuple[Tensor, Tensor]:
    fp8_dtype, align = rest[-2:]
    M, K = (round_up(size, align) for size in _shape(kind, inputs))
    x = inputs[0]
    return x.new_empty((M, K), dtype=fp8_dtype), x.new_empty(2, dtype=torch.float32)


def _fake_cast_pair(
    kind: str, inputs: Sequence[Tensor], dtype: torch.dtype, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, column_sum = rest
    q, factors = _fake_cast(kind, inputs, dtype, *rest[:-1])
    columns = _shape(kind, inputs)[1] if column_sum else 0
    total = q.new_empty(columns, dtype=torch.float32)
    return q, q.new_empty((q.shape[1], q.shape[0])), factors.new_empty(1), total


_SCHEMA = (
    "(str kind, Tensor[] inputs, ScalarType dtype, Tensor handle, int recipe,"
    " str group, int index, bool record, int number, ScalarType fp8_dtype, int align"
)

_cast_op = register_stateful(
    f"cast_in_graph{_SCHEMA}) -> (Tensor, Tensor)",
    implementation=_cast,
    fake=_fake_cast,
    any_strides=True,
)
_cast_pair_op = register_stateful(
    f"cast_pair_in_graph{_SCHEMA}, bool column_sum) -> (Tensor, Tensor, Tensor, Tensor)",
    implementation=_cast_pair,
    fake=_fake_cast_pair,
    any_strides=True,
)


def leave_to_python(function: Any) -> None:
    """Have Dynamo compile a function as part of its callers only, not on its own."""
    dynamo: Any = torch._C._dynamo.eval_frame
    skip, default = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(skip, default)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
