"""Tensor- and context-parallel arguments of modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from float8lab.arguments import (
    check_choice,
    check_flags,
    check_group,
    check_instance,
    check_size,
)
from float8lab.distributed.context_parallel import ContextParallel
from float8lab.distributed.sequence_parallel import mark_sequence_parallel
from float8lab.distributed.tensor_parallel import NoGroup, SharedScales, TensorParallel
from float8lab.recipes.region import STATE

__all__ = [
    "ContextParallelGroup",
    "Shard",
    "TensorParallelGroup",
    "context_of",
    "heads_of_rank",
    "ignore_extra_state",
    "mark_shard",
    "of_first_rank",
    "overlap_of",
    "parallel_size",
    "share_of",
]


def parallel_size(tp_size: int, tp_group: Any, parallel_mode: str | None) -> int:
    """How many ranks share a layer's weight, by its arguments; 1 without a ``parallel_mode``.

    Raises:
        ValueError: the group has another size than ``tp_size``.
    """
    check_choice("parallel_mode", parallel_mode, (None, "column", "row", "Column", "Row"))
    check_group("tp_group", tp_group)
    size = check_size("tp_size", tp_size, minimum=1)
    if tp_group is not None:
        found = torch.distributed.get_world_size(tp_group)
        if size not in (1, found):
            raise ValueError(
                f"tp_size must be the {found} ranks of tp_group; got {size}. Leave it out, or pass "
                "another group."
            )
        size = found
    return size if parallel_mode is not None else 1


def share_of(name: str, features: int, ranks: int) -> int:
    """A rank's share of features.

    Raises:
        ValueError: they do not divide.
    """
    if features % ranks:
        raise ValueError(
            f"{name} must be a multiple of the {ranks} tensor-parallel ranks; got {features}. "
            "Choose another size, or fewer ranks."
        )
    return features // ranks


_UB_FLAGS = (
    "ub_tp_comm_overlap",
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_overlap_rs_dgrad",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
)
_UB_NAMES = ("ub_name", "symmetric_ar_type")
_NOT_HERE = ("delay_wgrad_compute", "save_original_input")


def overlap_of(module: str, arguments: Mapping[str, Any]) -> bool | None:
    """Whether products run beside communication, by Transformer Engine's arguments for that.

    None: where that was measured to pay, whatever arguments are True; False: never, where
    ``ub_tp_comm_overlap`` is False, or both ``ub_overlap_ag`` and ``ub_overlap_rs`` are. The others
    have no meaning of their own, ``symmetric_ar_type`` neither: the group chooses how it reduces.

    Raises:
        TypeError: an argument that is no such, as Python would say.
        NotImplementedError: ``delay_wgrad_compute`` or ``save_original_input`` is True.

    >>> overlap_of("Linear", {"ub_overlap_ag": True, "ub_name": "qkv"})
    """
    for name, value in arguments.items():
        if name not in (*_UB_FLAGS, *_UB_NAMES, *_NOT_HERE):
            raise TypeError(
                f"{module}'s arguments must be known ones; got {name}. Leave it out, or correct it."
            )
        if name in _UB_NAMES:
            check_instance(name, value, str, "a name", optional=True)
        elif value is not None:
            check_flags(**{name: value})
        if name in _NOT_HERE and value:
            raise NotImplementedError(
                f"{name} must be False; got True. Gradients of weights are computed in backward, "
                "and inputs are kept in FP8: leave it out."
            )
    whole, gather, scatter = (arguments.get(name) for name in _UB_FLAGS[:3])
    return False if whole is False or (gather is False and scatter is False) else None


_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


def context_of(cp_group: Any, cp_comm_type: str | None = "a2a") -> ContextParallel | None:
    """How attention is spread over context-parallel ranks; None for a single one."""
    check_choice("cp_comm_type", "a2a" if cp_comm_type is None else cp_comm_type, _COMM_TYPES)
    groups = cp_group if isinstance(cp_group, (list, tuple)) else [cp_group]
    for group in groups:
        check_group("cp_group", group)
    several = [g for g in groups if g is not None and torch.distributed.get_world_size(g) > 1]
    if len(several) > 1:
        raise NotImplementedError(
            f"cp_group must be one group; got {len(several)} of several ranks. Pass the group of "
            "all context-parallel ranks, which exchange tokens for heads at once."
        )
    return ContextParallel.of(several[0]) if several else None


def ignore_extra_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any
) -> None:
    """A hook of ``load_state_dict``: leave out the ``_extra_state`` that TransformerEngine saves.

    It is the state of its own delayed scaling; ``float8lab.nn.ScalingState`` holds ours.
    """
    for key in [k for k in state_dict if k.startswith(prefix)]:
        if key.rpartition(".")[2] == "_extra_state":
            del state_dict[key]


def mark_shard(parameter: Tensor, dim: int) -> None:
    """Mark a parameter as a shard along ``dim``, by the attributes that Megatron looks at.

    A parameter that is whole on every rank gets none of them: whoever looks takes that for False,
    and Megatron's ``set_tensor_model_parallel_attributes`` refuses a parameter that has one.
    """
    marked: Any = parameter
    marked.tensor_model_parallel, marked.partition_dim, marked.partition_stride = True, dim, 1


class Shard(NamedTuple):
    """Which part of a whole parameter a rank has."""

    dim: int = 0
    rank: int = 0
    ranks: int = 1
    pieces: tuple[int, ...] = (1,)
    """Pieces of the whole, along ``dim``, of each of which the rank has its part; their sizes are
    in this proportion."""

    def whole(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of what a parameter of ``shape`` is a part of."""
        dim = self.dim % len(shape)
        return tuple(n * self.ranks if i == dim else n for i, n in enumerate(shape))

    def of(self, whole: Tensor) -> Tensor:
        """The part of ``whole``."""
        sizes = self.sizes(whole.shape[self.dim])
        if len(sizes) == 1:  # by the rule of torch.chunk, which leaves out what is empty
            each = -(-sizes[0] // self.ranks)
            start = min(self.rank * each, sizes[0])
            return whole.narrow(self.dim, start, min(each, sizes[0] - start))
        parts = [piece.chunk(self.ranks, self.dim) for piece in whole.split(sizes, self.dim)]
        return torch.cat([part[self.rank] for part in parts], self.dim)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole, from the parts of all ranks in their order."""
        sizes = self.sizes(parts[0].shape[self.dim])
        if len(sizes) == 1:
            return torch.cat(list(parts), self.dim)
        pieces = zip(*(part.split(sizes, self.dim) for part in parts), strict=True)
        return torch.cat([torch.cat(piece, self.dim) for piece in pieces], self.dim)

    def sizes(self, size: int) -> list[int]:
        """The sizes of the pieces, of the whole or of a part."""
        return [size * piece // sum(self.pieces) for piece in self.pieces]


class _Handed:
    """Holds a process group for a module: a copy of the module has it, a pickled one has none."""

    def __init__(self, group: Any = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: Any) -> _Handed:
        return self

    def __reduce__(self) -> Any:
        return _Handed, ()


class TensorParallelGroup:
    """Base of modules with a tensor-parallel group."""

    tp_size = 1
    sequence_parallel = False
    overlap: bool | None = None
    _handed = _Handed()

    @property
    def tp_group(self) -> Any:
        """The process group of the ranks that share the weights, if it was given."""
        return self._handed.group

    @tp_group.setter
    def tp_group(self, group: Any) -> None:
        self._handed = _Handed(group)

    _casts_only = False
    """Whether the module leaves all that is sent to others, but for scales."""
    _joined: tuple[int, ...] = ()
    """The sizes of the shards that one weight consists of, where several tensors are one."""

    def _shard(self, dim: int, pieces: tuple[int, ...] = ()) -> Shard | None:
        """The part of a whole weight that this rank has, if there are several and it knows."""
        if self.tp_size == 1 or self.tp_group is None:
            return None
        rank = torch.distributed.get_rank(self.tp_group)
        return Shard(dim, rank, self.tp_size, pieces or (1,))

    def _sharing_of(self, name: str, dim: int) -> SharedScales | None:
        """How ranks share a weight that is to be stored in FP8, for the GEMM of that state."""
        parallel = getattr(self, name).parallel
        if parallel is None or STATE.init is None:
            return None
        if self.tp_group is None:
            raise ValueError(
                f"tp_group must be given where the weights of {self.tp_size} tensor-parallel ranks "
                "are stored in FP8, which share scales; got None. Pass the group to the module."
            )
        return SharedScales(parallel, dim)

    def _parallel_modes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Which part of each GEMM's weight a rank has, by the name of the GEMM's FP8 state.

        That is a mode, and the sizes of the shards that form it if there are several.
        """
        return {}

    def _mark_shards(self, prefixes: Sequence[str], dim: int) -> None:
        """Mark parameters for what sums gradients, or loads checkpoints, of several ranks."""
        module: Any = self
        for prefix in prefixes if self.tp_size > 1 else ():
            bias = getattr(self, f"{prefix}bias")
            mark_shard(getattr(self, f"{prefix}weight"), dim)
            if bias is not None and dim:
                mark_sequence_parallel(module, self.sequence_parallel, f"{prefix}bias")
            elif bias is not None:
                mark_shard(bias, 0)

    def set_tensor_parallel_group(self, tp_group: Any, *, keep_gathered: bool = False) -> None:
        """Set the process group of the ranks that share the module's weights; on all of them.

        Args:
            tp_group: the group.
            keep_gathered: under sequence parallelism and a recipe with one scale a tensor, keep the
                tokens of all ranks, in FP8, from forward to backward, which needs them again for
                the weight's gradient: as many times the memory as there are ranks, and one
                collective less. Else each rank keeps its own, and they are gathered again, as
                always where the transpose has scales of its own.

        Raises:
            TypeError: not a process group.
            ValueError: not of the ``tp_size`` ranks that the module was made for.
        """
        check_group("tp_group", tp_group)
        size = 1 if tp_group is None else torch.distributed.get_world_size(tp_group)
        modes = self._parallel_modes()
        if tp_group is not None and size != self.tp_size and modes:
            raise ValueError(
                f"tp_group must have the {self.tp_size} ranks that the module was made for; got "
                f"{size}. Pass that group, or make the module with tp_size={size}."
            )
        check_flags(keep_gathered=keep_gathered)
        self.tp_group = tp_group
        module: Any = self
        for child in module.children():
            if isinstance(child, TensorParallelGroup):
                child.set_tensor_parallel_group(tp_group, keep_gathered=keep_gathered)
        for name, (mode, pieces) in modes.items():
            parallel: Any = None
            if self.tp_size > 1 and tp_group is None:
                parallel = NoGroup(self.tp_size)
            elif self.tp_size > 1:
                parallel = TensorParallel(
                    tp_group,
                    mode,
                    self.sequence_parallel,
                    keep_gathered,
                    self.overlap,
                    casts_only=self._casts_only,
                    pieces=pieces,
                )
            getattr(self, name).spread(parallel)
            for parameter in module.parameters(recurse=False):
                stored = getattr(parameter, "_shared_scales", None)
                if stored is not None and stored.dim == int(mode == "row"):
                    parameter._shared_scales = SharedScales(parallel, stored.dim)


class ContextParallelGroup(TensorParallelGroup):
    """Base of modules with a context-parallel group as well."""

    context_parallel: ContextParallel | None = None
    """How tokens are shared over ranks; None on a single one."""

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str | None = "p2p",
    ) -> None:
        """Set the process group of the ranks that share each sequence's tokens; on all of them.

        Args:
            cp_group: the group; None is one rank.
            cp_global_ranks: no effect: the group knows its ranks.
            cp_stream: no effect: collectives run on streams of their own.
            cp_comm_type: ``p2p``, ``all_gather``, ``a2a`` or ``a2a+p2p``, which mean the same: the
                ranks exchange tokens for heads.

        Raises:
            NotImplementedError: several groups.
            TypeError: not a process group.
            ValueError: the ranks cannot share the heads, or ``cp_comm_type`` is another name.
        """
        kinds = (list, tuple, range)
        check_instance("cp_global_ranks", cp_global_ranks, kinds, "a list of ranks", optional=True)
        for rank in cp_global_ranks or ():
            check_size("cp_global_ranks", rank)
        context = context_of(cp_group, cp_comm_type)
        module: Any = self
        every = [m for m in module.modules() if isinstance(m, ContextParallelGroup)]
        for child in every:
            child._check_context(context)
        for child in every:
            child.context_parallel = context
            child._spread_context()

    def _check_context(self, context: ContextParallel | None) -> None:
        """Raise unless the ranks can share what this module attends for."""

    def _spread_context(self) -> None:
        """Have what the module casts know of the ranks."""


def heads_of_rank(heads: int, groups: int, ranks: int) -> tuple[int, int]:
    """How many query heads, and key/value heads, of attention each tensor-parallel rank has.

    A rank has whole groups: a key/value head with all its query heads. A head that several ranks
    had would be computed several times, and its gradient be partial on each; fewer groups than
    ranks are therefore refused.

    Raises:
        ValueError: the ranks cannot share the groups equally.

    >>> heads_of_rank(32, 8, 4)
    (8, 2)
    """
    if groups % ranks:
        raise ValueError(
            f"num_gqa_groups must be a multiple of the {ranks} tensor-parallel ranks; got "
            f"{groups}. Each key/value head is on one rank: use a smaller tp_size, or more groups."
        )
    return heads // ranks, groups // ranks


def of_first_rank(x: Tensor, group: Any) -> Tensor:
    """The values that the first rank of a group has, on all of them."""
    ops = torch.ops._c10d_functional
    bits = x.view(torch.uint8)
    found: Tensor = ops.wait_tensor(ops.broadcast(bits, 0, group.group_name))
    return found.view(x.dtype)
