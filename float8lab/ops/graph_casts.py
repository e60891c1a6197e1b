"""Optimize casts in graphs that Inductor compiles: cast in forward or backward, and merge casts.

A layer in a graph casts its input rowwise in forward and columnwise in backward. The partitioner,
which splits the graph in two, chooses the cheapest tensors to save between them. It may save the
columnwise operand: then both casts are in forward, where they become one op with one read. Or it
saves tensors from which it recomputes the input, if backward needs these tensors anyway.

It never recomputes an input that is taken by an op that it cannot fuse. So a copy, which it can
fuse, is inserted between the input and the cast; Inductor removes it once the graph is split.
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
"""Indices of the results of a cast, and of the results of a cast by slots."""


def _arguments(cast: Node) -> dict[str, Any]:
    """Return the arguments of a cast by name."""
    defaults = OPS.declared[cast.target].arguments
    return {**defaults, **dict(zip(defaults, cast.args, strict=False)), **cast.kwargs}


def _is_columnwise(match: Match) -> bool:
    """Whether a cast makes only the columnwise operand of a matrix."""
    arguments = _arguments(match.output_node())
    excluded = (arguments[name] for name in ("rowwise", "prologue", "dbias", "offs"))
    return arguments["columnwise"] and not any(excluded)


def _copy_input(match: Match, *_: object, **__: object) -> None:
    """Give a cast a copy of its input."""
    cast = match.output_node()
    (x,) = _arguments(cast)["inputs"]
    if x.op != "placeholder" and x.target is not torch.ops.aten.clone.default:
        copy = cast.graph.call_function(torch.ops.aten.clone.default, (x,))
        copy.meta = {**x.meta, "val": x.meta["val"].clone()}
        cast.args = (cast.args[0], [copy], *cast.args[2:])


def _merge(match: Match, *_: object, **__: object) -> None:
    """Make the cast of a matrix's rowwise operand return the columnwise operand, too."""
    columnwise_cast = match.output_node()
    (x,) = _arguments(columnwise_cast)["inputs"]
    for cast in x.users:
        if cast < columnwise_cast and _is_rowwise_of(cast, columnwise_cast):
            pair = _with_columnwise(cast, columnwise_cast)
            index = _Q_T if pair.target is columnwise_cast.target else _Q_T_BY_SLOTS
            _replace(columnwise_cast, pair, {_Q_T: index})
            _replace(cast, pair, {})
            return


def _is_rowwise_of(cast: Node, columnwise_cast: Node) -> bool:
    """Whether ``cast`` makes only the rowwise operand of the same matrix with the same settings."""
    by_slots = cast.target is overload_named("cast.delayed")
    if not by_slots and cast.target is not columnwise_cast.target:
        return False
    rowwise, columnwise = _arguments(cast), _arguments(columnwise_cast)
    common = ["prologue", "inputs", "dtype", "fp8_dtype", "align"]
    common += [] if by_slots else ["block", "rule", "eps"]
    is_same = all(rowwise[name] == columnwise[name] for name in common)
    if (rowwise["rowwise"], rowwise["columnwise"], rowwise["offs"]) != (True, False, None):
        return False
    given = columnwise["given"]
    if by_slots:
        while isinstance(given, Node) and given.target is not operator.getitem:
            given = given.args[0]
        return is_same and isinstance(given, Node) and given.args == (cast, _FACTORS_BY_SLOTS)
    # Only a cast in one orientation returns an amax, so only ``columnwise_cast`` may use it.
    amax_users = [user for out in cast.users if out.args[1] == _AMAX for user in out.users]
    return is_same and amax_users == ([columnwise_cast] if given is not rowwise["given"] else [])


def _with_columnwise(cast: Node, columnwise_cast: Node) -> Node:
    """Insert a cast in place of ``cast`` that returns the columnwise operand, too."""
    arguments = {**_arguments(cast), "columnwise": True}
    with cast.graph.inserting_before(cast):
        pair = cast.graph.create_node("call_function", cast.target, tuple(arguments.values()))
    values, columnwise_values = [*cast.meta["val"]], columnwise_cast.meta["val"]
    if pair.target is columnwise_cast.target:
        # A cast in both orientations returns an empty amax, like an operand not asked for.
        values[_AMAX : _SCALE_T + 1] = [columnwise_values[i] for i in (_Q, _Q_T, _SCALE_T)]
    else:
        values[_Q_T_BY_SLOTS] = columnwise_values[_Q_T]
    pair.meta = {**cast.meta, "val": tuple(values)}
    return pair


def _replace(cast: Node, pair: Node, indices: dict[object, int]) -> None:
    """Replace the results of ``cast`` by those of ``pair``, and erase ``cast``."""
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
    """Return a function that makes a module's passes call ``handler`` for each columnwise cast."""

    def register(module: ModuleType) -> None:
        try:
            matcher = torch._inductor.pattern_matcher
            pattern = matcher.CallFunctionVarArgs(overload_named("cast.pure"))
            matcher.register_graph_pattern(
                pattern, extra_check=_is_columnwise, pass_dict=module.pass_patterns[0]
            )(handler)
        except (AttributeError, TypeError):  # these names are private
            return

    return register


tell_when_imported("torch._inductor.fx_passes.joint_graph", _at_casts(_copy_input))
tell_when_imported("torch._inductor.fx_passes.post_grad", _at_casts(_merge))
