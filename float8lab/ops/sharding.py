"""Ops on DTensors: each rank runs the op on its shards, according to the op's declaration.

A declaration's ``sharding`` names, for one dimension of a device mesh, placements under which each
rank can compute its shard without other ranks. Under other placements, a rank needs the unsharded
tensors and computes the unsharded result. An op gathers no more than the cheapest choice needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["Placing", "Rule", "takes_dtensors"]

Placing = int | str | None
"""A placement: ``Shard`` of a dimension, ``Partial`` of a reduction, or None: ``Replicate``."""

Rule = Callable[[Any], Iterable[tuple[Sequence[Placing], Mapping[str, Placing]]]]
"""Maps arguments to placements of results, and of arguments by name (others are replicated)."""


def takes_dtensors(dtensor: Any, overload: Any, declared: Any, library: Any) -> None:
    """Make calls of a ``declared`` op with DTensors run on their shards.

    ``dtensor`` is the module ``torch.distributed.tensor``, which takes long to import.
    """

    def call(cls: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        defaults, mutates = declared.arguments, declared.mutates
        arguments = {**defaults, **dict(zip(defaults, args, strict=False)), **(kwargs or {})}
        if any(isinstance(arguments.get(name), Tensor) for name in mutates):
            raise NotImplementedError(
                f"{', '.join(mutates)} must be None where {op} gets a DTensor; got a tensor that "
                "it would write. Call it on local tensors."
            )
        with torch.no_grad():
            return _call(dtensor, overload, arguments, declared)

    torch.library.register_torch_dispatch(overload, dtensor.DTensor, call, lib=library)


def _call(dtensor: Any, op: Any, arguments: Mapping[str, Any], declared: Any) -> Any:
    leaves = ((name, x) for name, value in arguments.items() for x in tree_leaves(value))
    tensors = [(name, x) for name, x in leaves if isinstance(x, Tensor)]
    mesh = next(x.device_mesh for _, x in tensors if isinstance(x, dtensor.DTensor))
    unsharded = tree_map_only(Tensor, lambda x: torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device="meta"
    ), arguments)  # fmt: skip
    results = tree_leaves(declared.outputs(*unsharded.values()))
    choices: list[tuple[Sequence[Placing], Mapping[str, Placing]]] = [((None,) * len(results), {})]
    if declared.sharding is not None:
        choices += declared.sharding(SimpleNamespace(**unsharded))

    def placement(placing: Placing, x: Tensor) -> Any:
        # A result that was not asked for is empty and has one dimension, also as an argument.
        if placing is None or (type(placing) is int and placing >= x.ndim):
            return dtensor.Replicate()
        return (dtensor.Partial if isinstance(placing, str) else dtensor.Shard)(placing)

    def placements_of(x: Tensor) -> Sequence[Any]:
        if isinstance(x, dtensor.DTensor):
            return x.placements
        if isinstance(x, Parameter):
            raise ValueError(
                f"parameters must be DTensors where {op} gets a DTensor; got a plain one of "
                f"shape {tuple(x.shape)}. Parallelize its module, as with SequenceParallel."
            )
        return [dtensor.Replicate()] * mesh.ndim  # an ordinary tensor is the same on all ranks

    def bytes_moved(axis: int, choice: tuple[Any, Mapping[str, Placing]]) -> int:
        nbytes = 0
        for name, x in tensors:
            current, target = placements_of(x)[axis], placement(choice[1].get(name), x)
            if current != target and not current.is_replicate():
                nbytes += x.numel() * x.itemsize
        return nbytes

    axes = range(mesh.ndim)
    chosen = [min(choices, key=lambda choice: bytes_moved(axis, choice)) for axis in axes]

    def local(name: str, x: Any) -> Tensor:
        target = [placement(choice[1].get(name), x) for choice in chosen]
        if not isinstance(x, dtensor.DTensor):
            if all(shards.is_replicate() for shards in target):
                return x
            x = dtensor.DTensor.from_local(x, mesh, placements_of(x), run_check=False)
        if tuple(target) != tuple(x.placements):
            # Detached, since torch 2.11 cannot redistribute a parameter where autograd is disabled.
            x = x.detach().redistribute(mesh, target)
        return x.to_local()

    local_arguments = (tree_map_only(Tensor, partial(local, n), v) for n, v in arguments.items())
    shard_results = op(*local_arguments)
    wrapped = []
    for i, (result, shard) in enumerate(zip(results, tree_leaves(shard_results), strict=True)):
        placements = [placement(choice[0][i], shard) for choice in chosen]
        layout = {"shape": result.shape, "stride": result.stride(), "run_check": False}
        wrapped.append(dtensor.DTensor.from_local(shard, mesh, placements, **layout))
    return tuple(wrapped) if isinstance(shard_results, tuple) else wrapped[0]
