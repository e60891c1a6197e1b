"""Optimize casts in graphs that Inductor compiles: cast in forward or backward, and merge casts.

A layer in a graph casts its input rowwise in forward and columnwise in backward. The partitioner,
which splits the graph in two, chooses the cheapest tensors to save between them. It may save the
columnwise operand: then both casts are in forward, where they become one op with one read. Or it
saves tensors from which it recomputes the input, if backward needs these tensors anyway.

It never recomputes an input that is taken by an op that it cannot fuse. So a copy, which it can
fuse, is inserted between the input and the cast; Inductor removes it once the graph is split.

Small weights of one shape are cast as a batch, since separate launches would take the CPU longer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node, map_arg

from float8lab.ops.declare import OPS, overload_named
from float8lab.ops.reference import ALIGN

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match
    from torch.fx.node import Argument

__all__: list[str] = []

_Q, _SCALE, _AMAX, _Q_T, _SCALE_T = range(5)
_FACTORS_BY_SLOTS, _Q_T_BY_SLOTS = 1, 2
"""Indices of the results of a cast, and of the results of a cast by slots."""

_SMALL = 2**20
"""The most elements of a weight that is cast in a batch."""


def _arguments(cast: Node) -> dict[str, Any]:
    """Return the arguments of a cast by name."""
    defaults = OPS.declared[cast.target].arguments
    return {**defaults, **dict(zip(defaults, cast.args, strict=False)), **cast.kwargs}


def _is_columnwise(cast: Node) -> bool:
    """Whether a cast makes only the columnwise operand of a matrix."""
    arguments = _arguments(cast)
    excluded = (arguments[name] for name in ("rowwise", "prologue", "dbias", "offs"))
    return arguments["columnwise"] and not any(excluded)


def _copy_input(match: Match, *_: object, **__: object) -> None:
    """Give a columnwise cast a copy of its input."""
    cast = match.output_node()
    x, clone = _arguments(cast)["inputs"][0], torch.ops.aten.clone.default
    if _is_columnwise(cast) and x.op != "placeholder" and x.target is not clone:
        copy = cast.graph.call_function(clone, (x,))
        copy.meta = {**x.meta, "val": x.meta["val"].clone()}
        cast.args = (cast.args[0], [copy], *cast.args[2:])


def _merge_orientations(match: Match, *_: object, **__: object) -> None:
    """Make the cast of a matrix's rowwise operand return the columnwise operand, too."""
    columnwise_cast = match.output_node()
    if not _is_columnwise(columnwise_cast):
        return
    for cast in _arguments(columnwise_cast)["inputs"][0].users:
        if cast < columnwise_cast and _is_rowwise_of(cast, columnwise_cast):
            arguments = {**_arguments(cast), "columnwise": True}
            with cast.graph.inserting_before(cast):
                pair = _insert(cast.graph, cast.target, *arguments.values())
            pair.meta = {**cast.meta, **pair.meta}
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


def _insert(graph: Graph, function: Any, *args: Argument) -> Node:
    """Insert a call of an op or function at the graph's place of insertion."""
    node = graph.call_function(function, args)
    node.meta["val"] = function(*map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _replace(cast: Node, pair: Node, indices: dict[object, int]) -> None:
    """Replace the results of ``cast`` by those of ``pair``, and erase ``cast``."""
    graph = cast.graph
    for result in [*cast.users]:
        if result.users:
            index = indices.get(result.args[1], result.args[1])
            with graph.inserting_after(pair):
                new_result = _insert(graph, operator.getitem, pair, index)
            result.replace_all_uses_with(new_result)
        graph.erase_node(result)
    graph.erase_node(cast)


def _merge_small_weights(match: Match, *_: object, **__: object) -> None:
    """Cast all small weights that are like this one by one op, before all other ops."""
    first = match.output_node()
    graph, kind = first.graph, _kind_of_batch(first)
    casts = graph.find_nodes(op="call_function", target=first.target) if kind else []
    casts = [cast for cast in casts if _kind_of_batch(cast) == kind]
    if len(casts) < 2:
        return
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        results = _cast_batch(casts, partial(_insert, graph))
        for number, cast in enumerate(casts):
            for result in [*cast.users]:
                value, batch = result.meta["val"], results[result.args[1]]
                place = value.shape, value.stride(), number * batch.meta["val"].stride(0)
                view = _insert(graph, torch.ops.aten.as_strided.default, batch, *place)
                result.replace_all_uses_with(view)
                graph.erase_node(result)
            graph.erase_node(cast)


def _kind_of_batch(cast: Node) -> dict[str, object] | None:
    """Return what the casts of a batch have in common; None for a cast that joins no batch."""
    arguments = _arguments(cast)
    x, given, block = arguments["inputs"][0], arguments["given"], tuple(arguments["block"])
    excluded = any(arguments[name] for name in ("prologue", "dbias", "offs"))
    if excluded or not _is_small_parameter(x) or (given is not None and given.op != x.op):
        return None
    returns_amax = any(result.args[1] == _AMAX and result.users for result in cast.users)
    if block not in ((-1, -1), (1, -1), (128, 128)) or (returns_amax and block != (-1, -1)):
        return None
    shape, device = x.meta["val"].shape, x.meta["val"].device
    return {**arguments, "inputs": (shape, device), "given": given is not None, "block": block}


def _is_small_parameter(x: Node) -> bool:
    """Whether a node is an input of forward: a matrix of few elements that needs no padding."""
    # Other inputs of a backward graph are saved tensors. All their casts together would add to the
    # peak of memory, which is where backward begins.
    if x.op != "placeholder" or not x.name.startswith(("primals", "arg")):
        return False
    shape = x.meta["val"].shape
    if len(shape) != 2 or any(type(size) is not int or size % ALIGN for size in shape):
        return False
    return 0 < shape.numel() <= _SMALL


def _cast_batch(casts: Sequence[Node], insert: Callable[..., Node]) -> list[Node]:
    """Insert a cast of all matrices as ``[E, N, K]``, and return its results, each ``[E, ...]``."""
    aten, E = torch.ops.aten, len(casts)

    def stacked(matrices: list[Node]) -> Node:
        rows = insert(aten.cat.default, matrices)
        return insert(aten.view.default, rows, (E, *matrices[0].meta["val"].shape))

    options = _arguments(casts[0])
    options["inputs"] = [stacked([_arguments(cast)["inputs"][0] for cast in casts])]
    if options["given"] is not None:
        options["given"] = stacked([_arguments(cast)["given"] for cast in casts])
    batch = insert(overload_named("cast.pure"), *options.values())
    results = [insert(operator.getitem, batch, index) for index in range(_SCALE_T + 1)]
    for index in (_SCALE, _SCALE_T):  # a GEMM copies scales that are not aligned to 16 bytes
        floats = results[index].meta["val"].numel() // E
        flat = insert(aten.view.default, results[index], (E, floats))
        results[index] = insert(aten.constant_pad_nd.default, flat, (0, -floats % 4))
    return results


def _at_casts(*handlers: Callable[..., None]) -> Callable[[ModuleType], None]:
    """Return a function that makes a module's passes call ``handlers`` for each cast."""

    def register(module: ModuleType) -> None:
        with suppress(AttributeError, TypeError):  # these names are private
            matcher = torch._inductor.pattern_matcher
            pattern = matcher.CallFunctionVarArgs(overload_named("cast.pure"))
            for handler in handlers:
                matcher.register_graph_pattern(pattern, pass_dict=module.pass_patterns[0])(handler)

    return register


OPS.untold["torch._inductor.fx_passes.joint_graph"] = _at_casts(_copy_input)
OPS.untold["torch._inductor.fx_passes.post_grad"] = _at_casts(
    _merge_orientations, _merge_small_weights
)
