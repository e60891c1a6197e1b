"""Casts in the graphs that Inductor compiles: which are made in forward, and which as one.

A layer in a graph casts its input rowwise in forward and columnwise in backward. The partitioner,
which splits the graph in two, finds the cheapest tensors to keep between them. It may keep the
columnwise operand: then both casts are in forward, where they become one op with one read. Or it
keeps what the input is computed of, if backward needs that anyway, and recomputes the input.

Of itself it never does the latter where an op that it cannot fuse takes the input. So a copy, which
it can fuse, is put between the two; Inductor takes it away when the graph has been split.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from float8lab.ops.declare import OPS, overload_named, tell_when_imported

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match

__all__: list[str] = []

_Q, _SCALE, _AMAX, _Q_T, _SCALE_T = range(5)
_FACTORS_BY_SLOTS, _Q_T_BY_SLOTS = 1, 2
"""Indices of the results of a cast, and of those of one by slots."""


def _arguments(cast: Node) -> dict[str, Any]:
    """The arguments of a cast by name."""
    defaults = OPS.declared[cast.target].arguments
    return {**defaults, **dict(zip(defaults, cast.args, strict=False)), **cast.kwargs}


def _is_columnwise(match: Match) -> bool:
    """Whether a cast makes the columnwise operand of a matrix, and nothing else."""
    arguments = _arguments(match.output_node())
    excluded = (arguments[name] for name in ("rowwise", "prologue", "dbias", "offs"))
    return arguments["columnwise"] and not any(excluded)


def _copy_input(match: Match, *_: object, **__: object) -> None:
    """Have a cast take a copy of its input."""
    cast = match.output_node()
    (x,) = _arguments(cast)["inputs"]
    if x.op != "placeholder" and x.target is not torch.ops.aten.clone.default:
        copy = cast.graph.call_function(torch.ops.aten.clone.default, (x,))
        copy.meta = {**x.meta, "val": x.meta["val"].clone()}
        cast.args = (cast.args[0], [copy], *cast.args[2:])


def _merge(match: Match, *_: object, **__: object) -> None:
    """Have the cast of the rowwise operand of a matrix give the columnwise one, too."""
    by_columns = match.output_node()
    (x,) = _arguments(by_columns)["inputs"]
    for cast in x.users:
        if cast < by_columns and _is_rowwise_of(cast, by_columns):
            pair = _with_columnwise(cast, by_columns)
            index = _Q_T if pair.target is by_columns.target else _Q_T_BY_SLOTS
            _replace(by_columns, pair, {_Q_T: index})
            _replace(cast, pair, {})
            return


def _is_rowwise_of(cast: Node, by_columns: Node) -> bool:
    """Whether a cast makes only the rowwise operand of what another casts columnwise, alike."""
    by_slots = cast.target is overload_named("cast.delayed")
    if not by_slots and cast.target is not by_columns.target:
        return False
    rowwise, columnwise = _arguments(cast), _arguments(by_columns)
    common = ["prologue", "inputs", "dtype", "fp8_dtype", "align"]
    common += [] if by_slots else ["block", "rule", "eps"]
    is_alike = all(rowwise[name] == columnwise[name] for name in common)
    if (rowwise["rowwise"], rowwise["columnwise"], rowwise["offs"]) != (True, False, None):
        return False
    given = columnwise["given"]
    if by_slots:
        while isinstance(given, Node) and given.target is not operator.getitem:
            given = given.args[0]
        return is_alike and isinstance(given, Node) and given.args == (cast, _FACTORS_BY_SLOTS)
    # The amax that only one orientation gives must not be used by anything else.
    of_amax = [user for result in cast.users if result.args[1] == _AMAX for user in result.users]
    return is_alike and of_amax == ([by_columns] if given is not rowwise["given"] else [])


def _with_columnwise(cast: Node, by_columns: Node) -> Node:
    """The cast that gives the columnwise operand, too, in the place of ``cast``."""
    arguments = {**_arguments(cast), "columnwise": True}
    with cast.graph.inserting_before(cast):
        pair = cast.graph.create_node("call_function", cast.target, tuple(arguments.values()))
    values, of_columns = [*cast.meta["val"]], by_columns.meta["val"]
    if pair.target is by_columns.target:
        # Its amax is as empty as the rowwise operand of the columnwise cast.
        values[_AMAX : _SCALE_T + 1] = [of_columns[i] for i in (_Q, _Q_T, _SCALE_T)]
    else:
        values[_Q_T_BY_SLOTS] = of_columns[_Q_T]
    pair.meta = {**cast.meta, "val": tuple(values)}
    return pair


def _replace(cast: Node, pair: Node, indices: dict[object, int]) -> None:
    """Have the results of ``pair`` in the place of those of ``cast``, which goes."""
    graph = cast.graph
    for result in [*cast.users]:
        if result.users:
            index = indices.get(result.args[1], result.args[1])
            with graph.inserting_after(pair):
                new_result = graph.call_function(operator.getitem, (pair, index))
            new_result.meta = result.meta
            result.replace_all_uses_with(new_result)
        graph.erase_node(result)
    graph.erase_node(cast)


def _at_casts(handler: Callable[..., None]) -> Callable[[ModuleType], None]:
    """A function that has the passes of a module call ``handler`` for each columnwise cast."""

    def register(module: ModuleType) -> None:
        try:
            matcher = torch._inductor.pattern_matcher
            pattern = matcher.CallFunctionVarArgs(overload_named("cast.pure"))
            matcher.register_graph_pattern(
                pattern, extra_check=_is_columnwise, pass_dict=module.pass_patterns[0]
            )(handler)
        except (AttributeError, TypeError):  # they are private
            return

    return register


tell_when_imported("torch._inductor.fx_passes.joint_graph", _at_casts(_copy_input))
tell_when_imported("torch._inductor.fx_passes.post_grad", _at_casts(_merge))
