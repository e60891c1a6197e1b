"""How ranks share a module: its arguments, its parameters, its state dict.

Note: this file uses the nouns of ``distributed/comm.py`` and these.

- *parallel mode*: which dimension of a weight is sharded: "column" shards rows, "row" columns;
- *pieces*: matrices in one weight, such as q, k and v, each of which is sharded separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from float8lab import arguments
from float8lab.distributed.comm import NoGroup, SharedScales, TensorParallel
from float8lab.distributed.context_parallel import (
    DUAL_CHUNK_SWAP,
    ContextParallel,
    CPAttentionLoadBalancingStrategy,
)
from float8lab.distributed.ranks import all_objects, tensors_of_ranks
from float8lab.distributed.shard_map import ShardMap
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import refine_scale
from float8lab.tensor.dtensor import is_dtensor, local_of, with_local

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = [
    "ContextParallelModule", "OverlapArguments", "ParameterShard", "TensorParallelModule",
    "ignore_extra_state", "mark_shard", "overlap_of", "parallel_size", "shard_state_dict",
    "shards_of", "share_of", "whole_state_dict",
]  # fmt: skip


def parallel_size(tp_size: int, tp_group: ProcessGroup | None, parallel_mode: str | None) -> int:
    """Return how many ranks share a layer's weight; 1 without a ``parallel_mode``."""
    arguments.check_choice("parallel_mode", parallel_mode, (None, "column", "row", "Column", "Row"))
    arguments.check_group("tp_group", tp_group)
    size = arguments.check_size("tp_size", tp_size, minimum=1)
    if tp_group is not None:
        ranks = torch.distributed.get_world_size(tp_group)
        if size not in (1, ranks):
            raise ValueError(
                f"tp_size must be the {ranks} ranks of tp_group; got {size}. Leave it out, or pass "
                "another group."
            )
        size = ranks
    return size if parallel_mode is not None else 1


def share_of(name: str, features: int, ranks: int) -> int:
    """Return the number of features that each rank has."""
    if features % ranks:
        raise ValueError(
            f"{name} must be a multiple of the {ranks} tensor-parallel ranks; got {features}. "
            "Choose another size, or fewer ranks."
        )
    return features // ranks


class OverlapArguments(TypedDict, total=False):
    """Transformer Engine's arguments for GEMMs that overlap with communication."""

    ub_tp_comm_overlap: bool | None
    ub_overlap_ag: bool | None
    ub_overlap_rs: bool | None
    ub_overlap_rs_dgrad: bool | None
    ub_bulk_dgrad: bool | None
    ub_bulk_wgrad: bool | None
    delay_wgrad_compute: bool | None
    save_original_input: bool | None
    ub_name: str | None
    symmetric_ar_type: str | None


def overlap_of(module: str, given: Mapping[str, object]) -> bool | None:
    """Return whether GEMMs overlap with communication, by Transformer Engine's arguments for that.

    It is None, to overlap where that was measured to pay, whatever arguments are True. It is False,
    never to overlap, if ``ub_tp_comm_overlap`` or both ``ub_overlap_ag`` and ``ub_overlap_rs`` are
    False. Other arguments have no effect; the group, not ``symmetric_ar_type``, chooses how to sum.

    >>> overlap_of("Linear", {"ub_overlap_ag": True, "ub_name": "qkv"})
    """
    for name, value in given.items():
        if name not in OverlapArguments.__annotations__:
            raise TypeError(
                f"{module}'s arguments must be known ones; got {name}. Leave it out, or correct it."
            )
        if name in ("ub_name", "symmetric_ar_type"):
            arguments.check_instance(name, value, str, "a name", optional=True)
        elif value is not None:
            arguments.check_flags(**{name: value})
        if name == "delay_wgrad_compute" and value:
            raise NotImplementedError(
                f"{name} must be False; got True. Leave it out: backward computes weight gradients."
            )
    names = ("ub_tp_comm_overlap", "ub_overlap_ag", "ub_overlap_rs")
    everything, gather, scatter = (given.get(name) for name in names)
    return False if everything is False or (gather is False and scatter is False) else None


def ignore_extra_state(
    module: nn.Module, state_dict: dict[str, object], prefix: str, *args: object
) -> None:
    """Drop the ``_extra_state`` of TransformerEngine; this is a hook of ``load_state_dict``.

    It holds that library's delayed scales; ours are in ``float8lab.nn.ScalingState``.
    """
    for key in [k for k in state_dict if k.startswith(prefix)]:
        if key.rpartition(".")[2] == "_extra_state":
            del state_dict[key]


def mark_shard(parameter: Tensor, dim: int) -> None:
    """Mark a parameter as a shard along ``dim``, by the attributes that Megatron reads.
    Unsharded parameters get no attributes: readers take a missing attribute for False, and
    Megatron's ``set_tensor_model_parallel_attributes`` refuses a parameter that has any."""
    parameter.__dict__.update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


class ParameterShard(NamedTuple):
    """The shard of a parameter that a rank has."""

    dim: int = 0
    rank: int = 0
    ranks: int = 1
    pieces: tuple[int, ...] = (1,)
    """The relative sizes of the pieces along ``dim``, each of which is sharded separately."""

    def unsharded_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the unsharded parameter whose shard has ``shape``."""
        dim = self.dim % len(shape)
        return tuple(n * self.ranks if i == dim else n for i, n in enumerate(shape))

    def shard(self, unsharded: Tensor, name: str = "") -> Tensor:
        """Return this rank's shard of the unsharded parameter, which errors call ``name``."""
        shards = [
            ShardMap.of(piece.shape[self.dim], self.ranks, self.rank).shard(piece, self.dim)
            for piece in unsharded.split(self.sizes(unsharded.shape[self.dim]), self.dim)
        ]
        shard = shards[0] if len(shards) == 1 else torch.cat(shards, self.dim)
        return _restore_blocks(unsharded, shard, name, self.dim)

    def unshard(self, shards: Sequence[Tensor], name: str = "") -> Tensor:
        """Return the unsharded parameter, given the shards of all ranks in order."""
        of_shards = (x.split(self.sizes(x.shape[self.dim]), self.dim) for x in shards)
        pieces = zip(*of_shards, strict=True)
        unsharded = torch.cat([local for piece in pieces for local in piece], self.dim)
        return _restore_blocks(shards[0], unsharded, name, self.dim)

    def sizes(self, size: int) -> list[int]:
        """Return the sizes of the pieces in a dimension of ``size``."""
        return [size * piece // sum(self.pieces) for piece in self.pieces]


class _GroupRef:
    """Holds a module's process group: a copied module shares it, a pickled one loses it."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, object]) -> _GroupRef:
        return self

    def __reduce__(self) -> tuple[type[_GroupRef], tuple[()]]:
        return _GroupRef, ()


class TensorParallelModule:
    """Base of modules with a tensor-parallel group."""

    tp_size = 1
    sequence_parallel = False
    overlap: bool | None = None
    _group_ref = _GroupRef()

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The process group of the ranks that share the weights, if it was given."""
        return self._group_ref.group

    @tp_group.setter
    def tp_group(self, group: ProcessGroup | None) -> None:
        self._group_ref = _GroupRef(group)

    _casts_only = False
    """Whether the module sends nothing but scales, and others communicate for it."""

    def _shard(self, dim: int, pieces: tuple[int, ...] = ()) -> ParameterShard | None:
        """Return this rank's shard of a weight; None on one rank, or if the group is not set."""
        if self.tp_size == 1 or self.tp_group is None:
            return None
        rank = torch.distributed.get_rank(self.tp_group)
        return ParameterShard(dim, rank, self.tp_size, pieces or (1,))

    def _parallel_modes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return how ranks share each GEMM's weight, by the name of the GEMM's FP8 state.
        The values are a mode and the number of sharded features on this rank: a single number, or
        a number for each of several matrices that form the weight."""
        return {}

    def set_tensor_parallel_group(
        self, tp_group: ProcessGroup | None, *, keep_gathered: bool = False
    ) -> None:
        """Set the process group of the ranks that share the module's weights. All ranks call it.

        Args:
            keep_gathered: under sequence parallelism and a recipe with one scale a tensor, keep the
                tokens of all ranks in FP8 from forward to backward, which needs them for the
                weight's gradient. This takes as many times the memory as there are ranks, and saves
                a collective. Otherwise, and always where the transpose has its own scales, each
                rank keeps its own tokens, and backward gathers them.

        Raises:
            TypeError: ``tp_group`` is not a process group.
            ValueError: the group does not have the ``tp_size`` ranks that the module was made for.
        """
        arguments.check_group("tp_group", tp_group)
        size = 1 if tp_group is None else torch.distributed.get_world_size(tp_group)
        modes = self._parallel_modes()
        if tp_group is not None and size != self.tp_size and modes:
            raise ValueError(
                f"tp_group must have the {self.tp_size} ranks that the module was made for; got "
                f"{size}. Pass that group, or make the module with tp_size={size}."
            )
        arguments.check_flags(keep_gathered=keep_gathered)
        self.tp_group = tp_group
        module = cast(nn.Module, self)
        for child in module.children():
            if isinstance(child, TensorParallelModule):
                child.set_tensor_parallel_group(tp_group, keep_gathered=keep_gathered)
        for name, (mode, sizes) in modes.items():
            parallel = self._make_parallel(mode, sizes, keep_gathered)
            getattr(self, name).set_parallel(parallel)
            if parallel is None:
                continue
            for parameter in module.parameters(recurse=False):
                stored = getattr(parameter, "_shared_scales", None)
                if stored is not None and stored.dim == int(mode == "row"):
                    parameter._shared_scales = SharedScales(parallel, stored.dim)  # type: ignore[attr-defined]

    def _make_parallel(
        self, mode: str, sizes: Sequence[int], keep_gathered: bool
    ) -> TensorParallel | NoGroup | None:
        """Return how ranks share a GEMM, of which this rank has ``sizes`` features; None on one."""
        group = self.tp_group
        if self.tp_size == 1:
            return None
        if group is None:
            return NoGroup(self.tp_size)
        rank = torch.distributed.get_rank(group)
        features = tuple(ShardMap.of(n * self.tp_size, self.tp_size, rank) for n in sizes)
        return TensorParallel(
            group, mode, self.sequence_parallel, keep_gathered, self.overlap,
            casts_only=self._casts_only, features=features,
        )  # fmt: skip


class ContextParallelModule(TensorParallelModule):
    """Base of modules with a context-parallel group as well."""

    context_parallel: ContextParallel | None = None
    """How ranks share the tokens; None on a single rank."""

    def set_context_parallel_group(
        self,
        cp_group: ProcessGroup | Sequence[ProcessGroup] | None,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: object = None,
        cp_comm_type: str | None = "p2p",
        load_balancing_strategy: CPAttentionLoadBalancingStrategy | str = DUAL_CHUNK_SWAP,
    ) -> None:
        """Set the process group of the ranks that share each sequence's tokens. All ranks call it.

        Args:
            cp_group: the group; None is one rank. For ``a2a+p2p``, a list of two groups: A ranks
                that exchange tokens for heads, and P ranks that pass keys and values around. Rank a
                of the first and p of the second group has the tokens of rank ``p * A + a`` of all.
            cp_global_ranks: no effect: the group knows its ranks.
            cp_stream: no effect: collectives run on their own streams.
            cp_comm_type: ``p2p``: keys and values go from rank to rank, while a rank attends to
                those it has; ``all_gather``: keys and values are gathered; ``a2a``, or None: ranks
                exchange tokens for heads, which gives the same bits as one rank; ``a2a+p2p``: the
                first group exchanges tokens for heads, and the second group does ``p2p``.
            load_balancing_strategy: which tokens a rank has, as ``shard_sequence`` gives them.

        Raises:
            TypeError: ``cp_group`` is not a process group.
            ValueError: ranks that exchange heads cannot share them, or a name is unknown.
        """
        name, kinds = "cp_global_ranks", (list, tuple, range)
        arguments.check_instance(name, cp_global_ranks, kinds, "a list of ranks", optional=True)
        for rank in cp_global_ranks or ():
            arguments.check_size(name, rank)
        context = ContextParallel.of(cp_group, cp_comm_type, load_balancing_strategy)
        module = cast(nn.Module, self)
        modules = [m for m in module.modules() if isinstance(m, ContextParallelModule)]
        for child in modules:
            child._check_context(context)
        for child in modules:
            child.context_parallel = context
            child._set_context()

    def _check_context(self, context: ContextParallel | None) -> None:
        """Raise unless the ranks can share this module's attention."""

    def _set_context(self) -> None:
        """Tell the module's casts about the ranks."""


# State dicts. An unsharded parameter is the parameter that a single rank would have. A checkpoint
# of Transformer Engine or Megatron has a file for each tensor-parallel rank, with the same shards
# under the same names, so each rank loads its own file by ``load_state_dict``. These functions
# convert such state dicts to any number of ranks. A DTensor itself says which shard it is.


def shards_of(model: nn.Module) -> dict[str, ParameterShard]:
    """Return which shard each parameter is, by qualified name; replicas are left out."""
    return {name: shard for name, shard in _parameter_shards(model).items() if shard.ranks > 1}


def _parameter_shards(model: nn.Module) -> dict[str, ParameterShard]:
    """Return ``shards_of``, and how several ranks would share modules with a parallel mode."""
    parameter_shards: dict[str, ParameterShard] = {}
    for path, module in model.named_modules():
        if not isinstance(module, TensorParallelModule):
            continue
        for name, dim, pieces in _sharded_parameters(module):
            if (shard := module._shard(dim, pieces)) is None and module.tp_size > 1:
                raise RuntimeError(
                    f"model must have tensor-parallel groups; {path or 'it'} has none. Call "
                    "set_tensor_parallel_group(group)."
                )
            shard = shard or ParameterShard(dim, pieces=pieces or (1,))
            parameter_shards[f"{path}.{name}" if path else name] = shard
    return parameter_shards


def _sharded_parameters(module: TensorParallelModule) -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Yield the sharded parameters: name, dimension from the end, sizes of a shard's pieces."""
    parameters = [name for name, p in module._parameters.items() if p is not None]  # type: ignore[attr-defined]
    for state, (mode, pieces) in module._parallel_modes().items():
        prefix = state.removeprefix("_fp8").removeprefix("_")
        names = [n for n in parameters if n.startswith(prefix) and not n.startswith("layer_norm")]
        sizes = pieces if sum("weight" in name for name in names) == 1 else ()
        for name in names:
            if "weight" in name:
                yield name, -2 if mode == "column" else -1, sizes
            elif mode == "column":
                yield name, -1, sizes
    if "softmax_offset" in parameters:  # attention has no weight, but a number for each head
        yield "softmax_offset", -1, ()


def shard_state_dict(
    model: nn.Module, state_dict: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """Take this rank's shards from the state dict of one rank or the state dicts of several ranks.

    Args:
        model: a model whose tensor-parallel modules have their groups and, on one rank as well,
            their parallel modes: ``set_parallel_mode``, or ``parallel_mode``.
        state_dict: the state dict of this model on one rank, or from ``whole_state_dict``; or a
            list of the state dicts of another group's ranks, in order. Names that are not in the
            model stay; their values, and parameters that all ranks have, come from the first rank.
            Parameters of ``parallelize_module`` are DTensors in the model and in the state dicts.

    Returns:
        A state dict for ``model.load_state_dict``; shards are views where possible. A tensor that
        is stored in FP8 keeps its bytes and the scales of the blocks that its shard lies in.

    Raises:
        RuntimeError: a module has no group yet.
        ValueError: the ranks' state dicts do not fit together; or a shard of a tensor stored in FP8
            would need a new scale, since its blocks are not those of the unsharded tensor.
        NotImplementedError: a shared parameter is sharded further (FSDP2); DCP can load that.

    >>> layer = float8lab.Linear(8, 4, parallel_mode="column", device="cpu")  # one rank: all of it
    >>> state = float8lab.nn.shard_state_dict(layer, layer.state_dict())
    >>> state["weight"].shape
    torch.Size([4, 8])
    >>> parts = [{"weight": torch.zeros(2, 8), "bias": torch.zeros(2)} for rank in range(2)]
    >>> float8lab.nn.shard_state_dict(layer, parts)["weight"].shape
    torch.Size([4, 8])
    """
    arguments.check_module("model", model)
    states = _check_state_dicts(state_dict)
    parameter_shards, result = _parameter_shards(model), dict(states[0])
    dtensors = [name for name, value in result.items() if is_dtensor(value)]
    for name in dtensors:
        result[name] = _unshard_dtensors(name, _shards_in(name, states))
    if len(states) > 1 and not parameter_shards and not dtensors:
        raise ValueError(
            f"model must have parallel modes to join the state dicts of {len(states)} ranks; it "
            "has none. Make it with set_parallel_mode=True, or parallel_mode."
        )
    for name, shard in parameter_shards.items():
        if name in result and name not in dtensors:
            result[name] = _shard_of_rank(name, shard, _shards_in(name, states))
    for name, local in model.state_dict().items():
        if is_dtensor(local) and name in result:
            result[name] = _as_dtensor(name, local, result[name])
    return result


def _check_state_dicts(
    states: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
) -> list[Mapping[str, Tensor]]:
    """Return the state dicts of one rank or several as a list, or raise."""
    noun = "a mapping from names to tensors"
    if isinstance(states, Sequence) and states:
        for rank, state in enumerate(states):
            arguments.check_instance(f"state_dict[{rank}]", state, Mapping, noun)
        return list(states)
    noun = f"{noun}, or a list of the ranks' own"
    arguments.check_instance("state_dict", states, Mapping, noun)
    return [cast("Mapping[str, Tensor]", states)]


def _shard_of_rank(name: str, shard: ParameterShard, shards: list[Tensor]) -> Tensor:
    """Return a rank's shard of a parameter, given the ``shards`` that another group's ranks had."""
    if len(shards) > 1:
        shards = [shard._replace(ranks=len(shards)).unshard(shards, name)]
    unsharded = shards[0]
    return unsharded if shard.ranks == 1 else shard.shard(unsharded, name)


def _shard_of_dtensor(name: str, x: Any) -> ParameterShard | None:
    """Return the first rank's shard of a DTensor; None if the DTensor is replicated."""
    is_local = type(local_of(x)) in (Tensor, nn.Parameter, Float8Tensor)
    if not is_local or x.device_mesh.ndim > 1 or x.placements[0].is_partial():
        raise NotImplementedError(
            f"{name} must be on a mesh of one dimension, a shard or replicated, and not FSDP2's; "
            f"got {x.placements} of {x.device_mesh}. Use torch.distributed.checkpoint, which loads "
            "any mesh into any other."
        )
    (placement,) = x.placements
    shares = placement.is_shard()
    return ParameterShard(placement.dim - x.ndim, 0, x.device_mesh.size()) if shares else None


def _unshard_dtensors(name: str, shards: Sequence[Tensor]) -> Tensor:
    """Return the unsharded tensor of a DTensor, given the DTensors of all its ranks."""
    if (shard := _shard_of_dtensor(name, shards[0])) is None:
        return local_of(shards[0])
    if len(shards) != shard.ranks:
        raise ValueError(
            f"state_dict must be those of all {shard.ranks} ranks in a list; got {len(shards)} "
            f"with a part of {name}. Load the files of all ranks."
        )
    return shard.unshard([local_of(local) for local in shards], name)


def _as_dtensor(name: str, local: DTensor, unsharded: Tensor) -> DTensor:
    """Return this rank's shard of a tensor, as a DTensor like ``local``."""
    if (shard := _shard_of_dtensor(name, local)) is not None:
        shard = shard._replace(rank=local.device_mesh.get_local_rank())
        unsharded = shard.shard(unsharded, name)
    return cast("DTensor", with_local(local, unsharded.to(local.device)))


def _shards_in(name: str, states: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """Return the shards of a parameter in the state dicts of all ranks, or raise."""
    if lacking := [str(rank) for rank, state in enumerate(states) if name not in state]:
        raise ValueError(
            f"state_dict must have the same names on all ranks; got no {name} in "
            f"{', '.join(lacking)}. Pass the state dicts of one checkpoint."
        )
    shards = [state[name] for state in states]
    kinds = {(getattr(local, "spec", None), local.dtype, local.shape) for local in shards}
    if len(kinds) > 1:
        raise ValueError(
            f"state_dict must have parts of one kind and shape on all ranks; got {name} of "
            f"{', '.join(sorted(str(kind[1:]) for kind in kinds))}. Pass the state dicts of one "
            "checkpoint."
        )
    return shards


def whole_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Gather the state dict that a single rank would have. All ranks call this and get the result.

    Args:
        model: any model. The parameters that ranks share in modules with ``tp_group`` must not be
            sharded further (FSDP2).

    Returns:
        The model's state dict with unsharded parameters; a parameter that is stored in FP8 has the
        bytes and scales of all ranks.

    Raises:
        TypeError: ``model`` is not a module.
        RuntimeError: a module has no group yet.
        NotImplementedError: a parameter that ranks share is sharded further.

    >>> layer = float8lab.Linear(8, 4, parallel_mode="column", device="cpu")
    >>> sorted(float8lab.nn.whole_state_dict(layer))
    ['bias', 'weight']
    """
    arguments.check_module("model", model)
    state = dict(model.state_dict())
    for name, shard in shards_of(model).items():
        local = state[name]
        if is_dtensor(local):
            raise NotImplementedError(
                f"model must have plain tensors where ranks share parameters; got {name}, a "
                f"{type(local).__name__}. Save it by torch.distributed.checkpoint."
            )
        module = cast("Any", model.get_submodule(name.rpartition(".")[0]))
        state[name] = shard.unshard(tensors_of_ranks(local, module.tp_group), name)
    return {name: _full(name, x) if is_dtensor(x) else x for name, x in state.items()}


def _full(name: str, x: DTensor) -> Tensor:
    """Return the unsharded tensor; DTensor's method would change a Float8Tensor's blocks."""
    if type(local_of(x)) is not Float8Tensor:  # DTensor's method serves FSDP2's shards
        return x.full_tensor()
    if (shard := _shard_of_dtensor(name, x)) is None:
        return local_of(x)
    shards = all_objects(local_of(x).detach().cpu(), x.device_mesh.get_group())
    return shard.unshard(shards, name).to(x.device)


# Tensors that are stored in FP8 are split and joined like any tensor. Where an edge goes through a
# block, this gives smaller blocks, which are merged to a block if they have the same scale.


def _restore_blocks(source: Tensor, x: Tensor, name: str, dim: int) -> Tensor:
    """Give a tensor that was split or joined along a dimension blocks of its source's size."""
    if not isinstance(x, Float8Tensor) or not isinstance(source, Float8Tensor):
        return x
    size, small_block, block = x.shape[dim], x.spec.block[dim], source.spec.block[dim]

    def merge(scale: Tensor) -> Tensor:
        step = 1 if small_block == block else (size if block == -1 else block) // small_block
        index = torch.arange(0, scale.shape[dim], max(step, 1), device=scale.device)
        merged = scale.index_select(dim, index)
        repeated = refine_scale(merged, size, block, small_block, dim).contiguous()
        if not torch.equal(repeated.view(torch.int32), scale.contiguous().view(torch.int32)):
            raise ValueError(
                f"{name} must have one scale for each block of {block} that a rank has; its "
                f"{size} of dimension {dim} do not begin where a block does, or ranks have other "
                "scales. Use a number of ranks that gives each whole blocks, or dequantize it "
                "first."
            )
        return merged

    return source.replace(qdata=x.qdata, scale=merge(x.scale), amax=merge(x.amax))
