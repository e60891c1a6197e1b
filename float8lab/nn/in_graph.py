"""Casts under delayed scaling in a compiled graph.  M rows, K columns.

Eager mode looks up the scale of a cast and the slot for its amax in Python. A graph cannot hold
them, for a module may get other slots, at other addresses, while the graph stays the same. So a
cast in a graph is one op, which gets the module's ``handle`` and does the lookup at run time. A
compiler merges two ops with the same arguments, though the second may record in another region, or
be recomputed where the first is not. So the casts of a graph are numbered.

A cast of x or w that runs in backward belongs to a recomputation, by activation checkpointing. It
records nothing and casts with the scale that the module's last forward used.

The op that closes a region must come after the casts of its forward, so it reads their factors. It
could read the module's output instead, but then the partitioner would save values computed from
the output for backward, such as the output in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._guards import TracingContext

from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import Spec
from float8lab.ops import Groups, Prologue
from float8lab.ops.cast import cast_outputs, groups_of
from float8lab.ops.declare import DirectCall, declare, planned
from float8lab.ops.operand import Operand, Quantized
from float8lab.recipes.delayed import Factors, QuantParams, SlotFactors
from float8lab.recipes.recipe import recipe_numbered
from float8lab.recipes.reduction import group_named
from float8lab.recipes.region import come_after_op, static_tensor
from float8lab.tensor.operands import Matrix, quantize

__all__ = ["CallInGraph", "cast_in_graph", "new_handle"]


class _Handles:
    """The existing handles, which are tensors that stand for objects."""

    owners: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    """The objects that the handles stand for, by the address of the handle."""


def new_handle(owner: Any, device: torch.device) -> Tensor:
    """Return a tensor that stands for ``owner`` as long as both are alive."""
    handle = static_tensor(device)
    _Handles.owners[handle.data_ptr()] = owner
    return handle


class CallInGraph(NamedTuple):
    """A ``Call`` with its options, as tensors, numbers and names that a compiled graph can hold."""

    handle: Tensor | None
    """Under delayed scaling the tensor that stands for the module's ``Precision``."""
    recipe: int
    """The number of the recipe."""
    group: str
    """The name of the process group that reduces amaxes; empty without a group."""
    record: bool
    """Whether amaxes are recorded."""
    clock: Tensor | None
    """``PROCESS.clock``, under delayed scaling."""
    in_forward: Sequence[bool]
    """Whether forward casts each of the layer's tensors."""
    first_expert: int
    """The first of the module's experts that this rank has."""
    is_region: bool
    casts_for_backward: bool
    weight_is_alive: bool
    first_microbatch: bool | None
    fused_weights: tuple[tuple[Tensor, dict[str, object]], ...]
    """The weights whose gradients go into their ``main_grad``, with this and other attributes."""
    tokens: ShardMap | None
    parallel: tuple[object, ...] | None
    """The ``settings`` of the layer's ``TensorParallel``."""


def cast_in_graph(
    x: Matrix, index: int, call: CallInGraph, rowwise: Spec | None, columnwise: Spec | None,
    dbias: bool, align: int,
) -> Quantized:  # fmt: skip
    """Cast a layer's tensor in a graph; its specs have one scale and the same format."""
    spec = rowwise or columnwise
    assert spec is not None, "one of the two"
    matrix = ("", [x], x.dtype) if isinstance(x, Tensor) else x[:3]
    q, factors, q_t, column_sums = _cast_op(
        *matrix, *call[:3], index, call.record, _next_number(), spec.fp8_dtype, align,
        rowwise is not None, columnwise is not None, dbias,
        *(x[3:] if isinstance(x, Groups) else (None, None)), call.first_expert,
    )  # fmt: skip
    if call.record and call.in_forward[index]:
        come_after_op(call.clock, factors)  # so that the region is closed after this cast
    scale, encode = factors[:, 0], factors[:, 4]
    if isinstance(x, Groups) or (isinstance(x, Tensor) and x.ndim == 3):
        scale, encode = scale.view(-1, 1, 1), encode.view(-1, 1, 1)
    by_rows, by_columns = rowwise and Operand(q, scale), columnwise and Operand(q_t, scale)
    return Quantized(by_rows, by_columns, encode, column_sums if dbias else None)


class _Casts:
    """The number of casts so far in each graph that is being traced."""

    counts: ClassVar[weakref.WeakKeyDictionary[object, int]] = weakref.WeakKeyDictionary()


def _next_number() -> int:
    """Number a cast within its graph, so that equal graphs are equal to a compiler's cache."""
    if (graph := TracingContext.try_get()) is None:
        return 0  # a backend that compiles nothing runs the graph
    number = _Casts.counts[graph] = _Casts.counts.get(graph, 0) + 1
    return number


class _Results(NamedTuple):
    """FP8 data, decode and encode factors, transposed FP8 data, and column sums."""

    q: Tensor | None
    factors: Tensor | None
    q_t: Tensor | None
    dbias: Tensor | None


def _cast(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, handle: Tensor, recipe: int,
    group: str, index: int, record: bool, number: int, fp8_dtype: torch.dtype, align: int, *,
    rowwise: bool, columnwise: bool, dbias: bool, offs: Tensor | None, plan: Tensor | None,
    first_expert: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    return _run(*_look(
        prologue, inputs, dtype, handle, recipe, group, index, record, number, fp8_dtype, align,
        rowwise, columnwise, dbias, offs, plan, first_expert,
    ))  # fmt: skip


_Options = tuple[torch.dtype, int, bool, bool, bool]
"""The arguments of the op from ``fp8_dtype`` to ``dbias``."""


def _look(*args: Any, in_cuda_graph: bool = True) -> tuple[Matrix, SlotFactors, _Options]:
    """Look up the state that the op reads and writes; return arguments of ``_cast_by_slots``."""
    prologue, inputs, dtype, handle, recipe, group, index, record = args[:8]
    offs, plan, first_expert = args[14:]
    x, experts = Prologue(prologue, inputs, dtype) if prologue else inputs[0], None
    if offs is not None:
        x, experts = Groups(prologue, inputs, dtype, offs, plan), offs.shape[0]
    elif inputs[0].ndim == 3:
        experts = inputs[0].shape[0]
    numbers = None if experts is None else range(first_expert, first_expert + experts)
    factors = _Handles.owners[handle.data_ptr()].params_in_graph(
        recipe_numbered(recipe), group_named(group), index, record, x, numbers,
        shares_launch=not in_cuda_graph,
    )  # fmt: skip
    return x, factors, args[9:14]  # named tuples would take 0.2 us each


def _run(x: Matrix, factors: SlotFactors, options: _Options) -> _Results:
    """Call ``_cast_by_slots``, on a GPU as a recorded list of launches."""
    return (_planned_cast if factors[0].is_cuda else _cast_by_slots)(x, factors, options)


def _cast_by_slots(x: Matrix, factors: SlotFactors, options: _Options) -> _Results:
    """Cast with the slots' factors, and return a copy of them, for the next update changes them."""
    (scale, encode, amax_slot), (fp8_dtype, align, rowwise, columnwise, dbias) = factors, options
    spec, params = Spec(fp8_dtype), QuantParams(Factors(scale, encode), amax_slot, "encode")
    by_rows, by_columns = spec if rowwise else None, spec if columnwise else None
    result = quantize(x, by_rows, by_columns, params, dbias=dbias, align=align)
    q, q_t = result.rowwise, result.columnwise
    return _Results(q and q.data, scale, q_t and q_t.data, result.dbias)


_planned_cast = planned(_cast_by_slots)


def _outputs(args: SimpleNamespace) -> _Results:
    args.block, args.rule = (-1, -1), "encode"
    q, _, _, q_t, _, column_sums = cast_outputs(args)
    factors = args.inputs[0].new_empty((*(groups_of(args) or (1,)), 8), dtype=torch.float32)
    return _Results(q, factors, q_t, column_sums)


_cast_op = declare(
    _cast, name="cast.delayed", outputs=_outputs, any_strides=True,
    direct=DirectCall(_look, _run, _planned_cast.launcher),
)  # fmt: skip
