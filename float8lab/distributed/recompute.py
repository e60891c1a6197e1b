"""checkpoint: recompute a part of the model in backward instead of saving its activations."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from float8lab.arguments import check_callables, check_flags, check_group, check_instance
from float8lab.distributed.random import CudaRNGStatesTracker
from float8lab.distributed.ranks import all_gathered, rank_and_size
from float8lab.distributed.shard_map import ShardMap
from float8lab.recipes.recording import CHECKPOINTS, Recording
from float8lab.recipes.region import STATE, Autocast

__all__ = ["checkpoint"]


_Result = TypeVar("_Result")


def checkpoint(
    function: Callable[..., _Result],
    *args: object,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None = None,
    tp_group: dist.ProcessGroup | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> _Result:
    """Return ``function(*args, **kwargs)``; its activations are recomputed in backward.

    This is ``torch.utils.checkpoint`` for FP8: the recomputation runs every module as the forward
    did, with the same recipe and the same scales, whatever ``autocast`` is active by then and
    however far delayed scaling has advanced; it records no forward amaxes a second time. Random
    numbers of torch's default generators and of the tracker repeat. ``function`` must do the same
    in each call.

    Args:
        function: a module or any other callable. Reentrant, it returns a tensor or a tuple.
        args: tensors, None and anything else. A tuple, list or dict with a tensor that requires
            gradients is rebuilt for ``function``; other containers are passed on unchanged.
        distribute_saved_activations: shard the first tensor argument over the ranks of
            ``tp_group`` until backward; an all-gather restores it. The tensor must be the same on
            all ranks, so this excludes sequence parallelism, where each rank has other tokens. It
            has no effect in a group of one rank or with ``use_reentrant=False``.
        get_rng_state_tracker: returns the ``CudaRNGStatesTracker`` that ``function`` forks.
        tp_group: the group for ``distribute_saved_activations``; None is the default group.
        use_reentrant: use torch's reentrant variant. It needs an argument that requires gradients:
            if none does, the output requires none, and parameters get none. False has no such
            limit, and stops recomputing when backward has all it needs. Both give the same compiled
            graph.
        kwargs: keyword arguments of ``function``.

    Raises:
        TypeError: ``function`` or ``get_rng_state_tracker`` cannot be called.

    >>> layer = float8lab.Linear(32, 32, device="cpu")
    >>> x = torch.ones(4, 32, requires_grad=True)
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     y = float8lab.checkpoint(layer, x)
    >>> y.sum().backward()
    """
    check_instance("function", function, Callable, "callable")
    check_callables((), get_rng_state_tracker=get_rng_state_tracker)
    check_flags(
        distribute_saved_activations=distribute_saved_activations, use_reentrant=use_reentrant
    )
    check_group("tp_group", tp_group)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)  # autograd saves nothing
    if torch.compiler.is_compiling() and get_rng_state_tracker is None:
        # The graph holds the forward and the recomputation, so there is nothing to record.
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)
    shards = distribute_saved_activations and use_reentrant and rank_and_size(tp_group)[1] > 1
    return _checkpoint_in_eager(
        function, args, kwargs, get_rng_state_tracker, use_reentrant, tp_group, shards=shards
    )


@torch._disable_dynamo
def _checkpoint_in_eager(
    function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object],
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None, use_reentrant: bool,
    group: dist.ProcessGroup | None, *, shards: bool,
) -> Any:  # fmt: skip
    # Arguments are flattened, as reentrant checkpoints ignore tensors in containers and keywords.
    trees = [tree_flatten(x, is_leaf=_has_no_gradient) for x in (*args, *kwargs.values())]
    run = _Run(function, [spec for _, spec in trees], tuple(kwargs), get_rng_state_tracker)
    values = [value for leaves, _ in trees for value in leaves]
    tensor = next((v for v in values if isinstance(v, Tensor)), None)
    with _sharded_over(group, tensor) if shards and type(tensor) is Tensor else nullcontext():
        return torch_checkpoint.checkpoint(run, *values, use_reentrant=use_reentrant)


def _sharded_over(group: dist.ProcessGroup | None, x: Tensor) -> saved_tensors_hooks:
    """Return hooks by which each rank of a group keeps a shard of autograd's saved ``x``."""
    rank, ranks = rank_and_size(group)
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    sharded = weakref.ref(x)  # weak, since autograd keeps both functions and must not keep x

    def pack(saved: Tensor) -> Tensor | Callable[[], Tensor]:
        if saved is not sharded():
            return saved
        flat = saved.detach().reshape(-1)
        shards = ShardMap.of(flat.numel(), ranks, rank)
        local, padding = shards.shard(flat, 0), shards.chunk - shards.length
        local = F.pad(local, (0, padding)) if padding else local.clone()
        return partial(gather, local.view(torch.uint8), saved.shape, saved.dtype)

    def gather(local: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return all_gathered(local, ranks, name).view(dtype)[: shape.numel()].view(shape)

    def unpack(saved: Tensor | Callable[[], Tensor]) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved()

    return saved_tensors_hooks(pack, unpack)


def _has_no_gradient(x: object) -> bool:
    return not any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves(x))


def _without_parameters(results: object) -> object:
    """Replace each parameter in the results, such as a returned bias, by an alias."""
    # Autograd would take a parameter for a result of the checkpoint, whose backward would then call
    # itself endlessly.
    if not any(isinstance(x, torch.nn.Parameter) for x in tree_leaves(results)):
        return results

    def alias(parameter: Tensor) -> Tensor:
        return parameter.view_as(parameter) if torch.is_grad_enabled() else parameter.detach()

    return tree_map_only(torch.nn.Parameter, alias, results)


@dataclass(eq=False)
class _Run:
    """A checkpointed function: the first call is the forward, later calls are recomputations."""

    function: Callable[..., Any]
    specs: list[TreeSpec]  # the structures of the arguments
    names: tuple[str, ...]  # the names of the last arguments, which are keyword arguments
    get_rng_state_tracker: Callable[[], CudaRNGStatesTracker] | None
    recording: Recording | None = None
    autocast: Autocast = field(default_factory=Autocast)
    rng_states: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, *values: object) -> object:
        leaves = iter(values)
        rebuilt = [tree_unflatten([*islice(leaves, s.num_leaves)], s) for s in self.specs]
        count = len(rebuilt) - len(self.names)
        args, kwargs = rebuilt[:count], dict(zip(self.names, rebuilt[count:], strict=True))
        is_first = self.recording is None
        return _without_parameters((self._forward if is_first else self._recompute)(args, kwargs))

    def _forward(self, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        self.recording = Recording()
        self.autocast = STATE.autocast
        if self.get_rng_state_tracker is not None:
            self.rng_states = self.get_rng_state_tracker().get_states()
        outer = CHECKPOINTS.recordings
        CHECKPOINTS.recordings = (*outer, self.recording)
        try:
            return self.function(*args, **kwargs)
        finally:
            CHECKPOINTS.recordings = outer

    def _recompute(self, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        recording = cast(Recording, self.recording)
        recording.follow(object())
        outer = STATE.autocast, CHECKPOINTS.recordings, CHECKPOINTS.replay
        tracker = None if self.get_rng_state_tracker is None else self.get_rng_state_tracker()
        rng_states = {} if tracker is None else tracker.get_states()
        # The settings of the forward apply, in the backward pass that is running now.
        STATE.autocast = replace(self.autocast, backward=outer[0].backward)
        CHECKPOINTS.recordings, CHECKPOINTS.replay = (), recording
        if tracker is not None:
            tracker.set_states(dict(self.rng_states))  # Megatron's tracker keeps the dict itself
        try:
            return self.function(*args, **kwargs)
        finally:
            STATE.autocast = outer[0]
            CHECKPOINTS.recordings, CHECKPOINTS.replay = outer[1:]
            if tracker is not None:
                tracker.set_states(rng_states)
