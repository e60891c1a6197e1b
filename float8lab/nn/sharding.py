"""Parameters of tensor-parallel modules: which part of the whole each rank has.

The whole is the parameter that one rank alone would have. A checkpoint of Transformer Engine or of
Megatron has a file for each tensor-parallel rank, with the same parts under the same names, so each
rank loads its own by ``load_state_dict``; the functions here go from there to any number of ranks.
A DTensor says itself which part it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.arguments import check_instance, check_module
from float8lab.nn.parallel import Shard, TensorParallelGroup
from float8lab.tensor import Float8Tensor

__all__ = ["shard_state_dict", "shards_of", "whole_state_dict"]


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """Which part of the whole each parameter is, by qualified name; replicas are left out."""
    return {name: shard for name, shard in _layouts(model).items() if shard.ranks > 1}


def _layouts(model: nn.Module) -> dict[str, Shard]:
    """The same, and of modules with a parallel mode and one rank, how several would share them."""
    found: dict[str, Shard] = {}
    for path, module in model.named_modules():
        if not isinstance(module, TensorParallelGroup):
            continue
        for state, (mode, pieces) in module._parallel_modes().items():
            prefix = state.removeprefix("_fp8").removeprefix("_")
            own = [n for n, p in module._parameters.items() if p is not None]  # type: ignore[attr-defined]
            own = [n for n in own if n.startswith(prefix) and not n.startswith("layer_norm")]
            alone = sum("weight" in name for name in own) == 1
            for name in own:
                dim = _dimension(name, mode)
                if dim is None:
                    continue
                cut = pieces if alone else ()
                shard = module._shard(dim, cut)
                if shard is None and module.tp_size > 1:
                    raise RuntimeError(
                        f"model must have tensor-parallel groups; {path or 'it'} has none. Call "
                        "set_tensor_parallel_group(group)."
                    )
                shard = shard or Shard(dim, pieces=cut or (1,))
                found[f"{path}.{name}" if path else name] = shard
    return found


def _dimension(name: str, mode: str) -> int | None:
    """The dimension of a parameter, from its end, that ranks share."""
    if "weight" in name:
        return -2 if mode == "column" else -1
    return -1 if mode == "column" else None


def shard_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Take this rank's part of a state dict, of one rank or of any number of them.

    Args:
        model: whose tensor-parallel modules have their groups. On one rank, too, they have their
            parallel modes: ``set_parallel_mode``, or ``parallel_mode``.
        state_dict: of the same model on one rank, or one that ``whole_state_dict`` made; or a list
            of those that the ranks of another group had, in their order. Names that are not in the
            model stay as they are; they and parameters that all ranks have are the first rank's.
            Parameters of ``parallelize_module`` are DTensors, in the model as in the state dicts.

    Returns:
        What ``model.load_state_dict`` takes; parts are views of the whole where they can be. A
        tensor that is stored in FP8 keeps its bytes, with the scales of the blocks it lies in.

    Raises:
        TypeError: an argument of another type.
        RuntimeError: a module has no group yet.
        ValueError: state dicts of ranks that do not fit together; or a part of a tensor stored in
            FP8 that would need a new scale, since its blocks are not those of the whole.
        NotImplementedError: a parameter that ranks share is sharded further (FSDP2); DCP does that.

    >>> layer = float8lab.Linear(8, 4, parallel_mode="column", device="cpu")  # one rank: all of it
    >>> state = float8lab.nn.shard_state_dict(layer, layer.state_dict())
    >>> state["weight"].shape
    torch.Size([4, 8])
    >>> parts = [{"weight": torch.zeros(2, 8), "bias": torch.zeros(2)} for rank in range(2)]
    >>> float8lab.nn.shard_state_dict(layer, parts)["weight"].shape
    torch.Size([4, 8])
    """
    check_module("model", model)
    given: Any = state_dict
    if isinstance(given, Sequence) and given:
        for rank, state in enumerate(given):
            check_instance(f"state_dict[{rank}]", state, Mapping, "a mapping from names to tensors")
    else:
        what = "a mapping from names to tensors, or a list of the ranks' own"
        check_instance("state_dict", given, Mapping, what)
    states = [given] if isinstance(given, Mapping) else list(given)
    layouts, result = _layouts(model), dict(states[0])
    spread = [name for name, value in result.items() if _is_dtensor(value)]
    for name in spread:
        result[name] = _of_dtensors(name, _checked(name, states))
    if len(states) > 1 and not layouts and not spread:
        raise ValueError(
            f"model must have parallel modes to join the state dicts of {len(states)} ranks; it "
            "has none. Make it with set_parallel_mode=True, or parallel_mode."
        )
    for name, shard in layouts.items():
        if name in result and name not in spread:
            result[name] = _of_rank(name, shard, _checked(name, states))
    for name, own in model.state_dict().items():
        if _is_dtensor(own) and name in result:
            result[name] = _as_dtensor(name, own, result[name])
    return result


def _of_rank(name: str, shard: Shard, parts: list[Any]) -> Any:
    """A rank's part of the parameter that the ranks of another group have in ``parts``."""
    if len(parts) > 1:
        parts = [_joined(name, shard._replace(ranks=len(parts)), parts)]
    whole = parts[0]
    return whole if shard.ranks == 1 else _cut(name, shard, whole)


def _is_dtensor(value: Any) -> bool:
    return hasattr(value, "_local_tensor")


def _layout_of(name: str, x: Any) -> tuple[int, int | None]:
    """How many ranks share a DTensor, and along which dimension; None: each has all of it."""
    alone = type(x._local_tensor) in (Tensor, nn.Parameter, Float8Tensor)
    if not alone or x.device_mesh.ndim > 1 or x.placements[0].is_partial():
        raise NotImplementedError(
            f"{name} must be on a mesh of one dimension, a shard or replicated, and not FSDP2's; "
            f"got {x.placements} of {x.device_mesh}. Use torch.distributed.checkpoint, which loads "
            "any mesh into any other."
        )
    (placement,) = x.placements
    return x.device_mesh.size(), placement.dim if placement.is_shard() else None


def _of_dtensors(name: str, parts: Sequence[Any]) -> Any:
    """The whole of a DTensor, whose parts the state dicts of all ranks of its mesh have."""
    ranks, dim = _layout_of(name, parts[0])
    if dim is None:
        return parts[0]._local_tensor
    if len(parts) != ranks:
        raise ValueError(
            f"state_dict must be those of all {ranks} ranks in a list; got {len(parts)} with a "
            f"part of {name}. Load the files of all ranks."
        )
    shard = Shard(dim - parts[0].ndim, 0, ranks)
    return _joined(name, shard, [part._local_tensor for part in parts])


def _as_dtensor(name: str, own: Any, whole: Any) -> Any:
    """This rank's part of a tensor, as a DTensor like ``own``."""
    ranks, dim = _layout_of(name, own)
    part = whole
    if dim is not None:
        part = _cut(name, Shard(dim - own.ndim, own.device_mesh.get_local_rank(), ranks), whole)
    return type(own).from_local(
        part.to(own.device), own.device_mesh, own.placements, run_check=False, shape=own.shape,
        stride=own.stride(),
    )  # fmt: skip


def _checked(name: str, states: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The parts of a parameter in the state dicts of all ranks."""
    lacking = [str(rank) for rank, state in enumerate(states) if name not in state]
    if lacking:
        raise ValueError(
            f"state_dict must have the same names on all ranks; got no {name} in "
            f"{', '.join(lacking)}. Pass the state dicts of one checkpoint."
        )
    parts = [state[name] for state in states]
    kinds = {(getattr(part, "spec", None), part.dtype, part.shape) for part in parts}
    if len(kinds) > 1:
        raise ValueError(
            f"state_dict must have parts of one kind and shape on all ranks; got {name} of "
            f"{', '.join(sorted(str(kind[1:]) for kind in kinds))}. Pass the state dicts of one "
            "checkpoint."
        )
    return parts


def whole_state_dict(model: nn.Module) -> dict[str, Any]:
    """Gather the state dict that the model has on one rank. All ranks call it, and all get it.

    Args:
        model: any; those parameters of modules with ``tp_group`` that ranks share must not be
            sharded further (FSDP2).

    Returns:
        The model's state dict with each parameter whole; one that is stored in FP8 has the bytes
        and scales of all ranks.

    Raises:
        TypeError: not a module.
        RuntimeError: a module has no group yet.
        NotImplementedError: a parameter that ranks share is sharded further.

    >>> layer = float8lab.Linear(8, 4, parallel_mode="column", device="cpu")
    >>> sorted(float8lab.nn.whole_state_dict(layer))
    ['bias', 'weight']
    """
    check_module("model", model)
    state, groups = dict(model.state_dict()), _groups(model)
    for name, shard in shards_of(model).items():
        part = state[name]
        if _is_dtensor(part):
            raise NotImplementedError(
                f"model must have plain tensors where ranks share parameters; got {name}, a "
                f"{type(part).__name__}. Save it by torch.distributed.checkpoint."
            )
        parts = _gathered(part, shard.ranks, groups[name.rpartition(".")[0]])
        state[name] = _joined(name, shard, parts)
    return {name: _full(name, x) if _is_dtensor(x) else x for name, x in state.items()}


def _full(name: str, x: Any) -> Any:
    """The whole of a DTensor; DTensor's own method would give one stored in FP8 other blocks."""
    if type(x._local_tensor) is not Float8Tensor:  # FSDP2's shards know how to be gathered
        return x.full_tensor()
    ranks, dim = _layout_of(name, x)
    if dim is None:
        return x._local_tensor
    parts: list[Any] = [None] * ranks  # of unequal sizes, perhaps
    group = x.device_mesh.get_group()
    torch.distributed.all_gather_object(parts, x._local_tensor.detach().cpu(), group)
    return _joined(name, Shard(dim - x.ndim, 0, ranks), parts).to(x.device)


def _gathered(part: Tensor, ranks: int, group: Any) -> list[Tensor]:
    """The parts of all ranks."""
    if isinstance(part, Float8Tensor):
        inner = [_gathered(x, ranks, group) for x in (part.qdata, part.scale, part.amax)]
        return [
            part.replace(qdata=qdata, scale=scale, amax=amax)
            for qdata, scale, amax in zip(*inner, strict=True)
        ]
    bits = part.detach().contiguous().view(torch.uint8)
    found = [torch.empty_like(bits) for _ in range(ranks)]
    torch.distributed.all_gather(found, bits, group=group)
    return [one.view(part.dtype) for one in found]


# Tensors that are stored in FP8: codes are cut and joined as those of any tensor; scales as if each
# of a few rows, or columns, had its own.


def _cut(name: str, shard: Shard, whole: Any) -> Any:
    """A rank's part of a tensor."""
    if not isinstance(whole, Float8Tensor):
        return shard.of(whole)
    unit = _unit(shard, whole, whole.shape[shard.dim])
    qdata = shard.of(whole.qdata)

    def cut(scale: Tensor) -> Tensor:
        spread = _spread(scale, shard.dim, whole.spec.block, whole.shape, unit)
        return _merged(name, shard.of(spread), shard.dim, whole.spec.block, qdata.shape, unit)

    return whole.replace(qdata=qdata, scale=cut(whole.scale), amax=cut(whole.amax))


def _joined(name: str, shard: Shard, parts: Sequence[Any]) -> Any:
    """The whole, from the parts of all ranks."""
    first = parts[0]
    if not isinstance(first, Float8Tensor):
        return shard.joined(parts)
    unit = _unit(shard, first, sum(part.shape[shard.dim] for part in parts))
    qdata = shard.joined([part.qdata for part in parts])

    def join(scales: Sequence[Tensor]) -> Tensor:
        spread = [
            _spread(scale, shard.dim, first.spec.block, part.shape, unit)
            for scale, part in zip(scales, parts, strict=True)
        ]
        return _merged(name, shard.joined(spread), shard.dim, first.spec.block, qdata.shape, unit)

    scale, amax = (join([getattr(part, name) for part in parts]) for name in ("scale", "amax"))
    return first.replace(qdata=qdata, scale=scale, amax=amax)


def _unit(shard: Shard, x: Float8Tensor, size: int) -> int:
    """The most rows that no boundary of a block, a piece or a rank's part of one goes through."""
    block = x.spec.block[shard.dim]
    pieces = shard.sizes(size)
    edges = [-(-piece // shard.ranks) for piece in pieces]
    return max(math.gcd(*edges, *pieces, *([] if block == -1 else [block])), 1)


def _spread(
    scale: Tensor, dim: int, block: Sequence[int], shape: Sequence[int], unit: int
) -> Tensor:
    """A scale for each ``unit`` of a dimension."""
    size = shape[dim]
    each = size if block[dim] == -1 else block[dim]
    return scale.repeat_interleave(each // unit, dim).narrow(dim, 0, size // unit)


def _merged(
    name: str, spread: Tensor, dim: int, block: Sequence[int], shape: Sequence[int], unit: int
) -> Tensor:
    """A scale for each block of a dimension, from those for each ``unit``."""
    size = shape[dim]
    step = (size if block[dim] == -1 else block[dim]) // unit
    index = torch.arange(0, spread.shape[dim], max(step, 1), device=spread.device)
    found = spread.index_select(dim, index)
    again = _spread(found, dim, block, shape, unit)
    if not torch.equal(again.view(torch.int32), spread.contiguous().view(torch.int32)):
        raise ValueError(
            f"{name} must have one scale for each block of {block[dim]} that a rank has; its "
            f"{size} of dimension {dim} do not begin where a block does, or ranks have other "
            "scales. Use a number of ranks that gives each whole blocks, or dequantize it first."
        )
    return found


def _groups(model: nn.Module) -> dict[str, Any]:
    modules = model.named_modules()
    return {name: m.tp_group for name, m in modules if isinstance(m, TensorParallelGroup)}
