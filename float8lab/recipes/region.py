"""Regions of delayed scaling, and the settings in force: ``STATE`` per thread, ``PROCESS`` shared.

``STATE`` holds the settings of the thread that reads it, as ``torch.autocast`` is kept per thread:
one thread's region does not affect another. Autograd runs backward on threads of its own, so
backward reads the ``Call`` that the forward captured; it finds settings in ``STATE`` only if a
recomputation entered them on its thread. All threads share ``PROCESS``.

A *region* is the span between the entry and the exit of the outermost enabled (or calibrating)
autocast, or one call of a model converted with a delayed recipe; delayed scaling advances when the
region is closed.

*In a compiled graph* there is no Python to close a region. The region is entered and left while the
graph is traced, and puts a closing op into the graph. At run time the ops that cast under delayed
scaling (``nn/in_graph.py``) enter their packs in ``STATE.in_graph``, or in the region around the
compiled function if there is one, and the closing op closes the region. A compiler keeps and orders
ops by the tensors they write, so the closing op claims to write ``PROCESS.clock``, as does an op
after each recording cast of the forward, which takes the factors of that cast.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from float8lab.ops import NO_DATA
from float8lab.ops.declare import declare, is_traced
from float8lab.recipes import reduction
from float8lab.recipes.delayed import RECORDED, ScalePack, merge_packs
from float8lab.recipes.recipe import DelayedScaling, Recipe
from float8lab.recipes.recording import CHECKPOINTS, NO_BACKWARD, has_ended

__all__ = [
    "DEFAULT_RECIPE", "PROCESS", "STATE", "Autocast", "ModelInit", "Region",
    "advance_in_graph", "advance_scales", "capturing", "come_after_op", "current_backward",
    "in_backward", "inside", "saved_tensors_hooks", "set_clock", "static_tensor",
]  # fmt: skip

DEFAULT_RECIPE = DelayedScaling()
"""The recipe of an ``autocast`` that is not given a recipe."""


@dataclass(slots=True)
class ModelInit:
    """The settings of an ``fp8_model_init`` block."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


@dataclass(slots=True, eq=False)
class Autocast:
    """The settings that autocast regions have put in force on a thread.

    The object is replaced, never written. It is no NamedTuple, since torch 2.11 leaves an empty
    NamedTuple behind after a graph has set it.
    """

    enabled: bool | None = None  # None: no autocast is active
    recipe: Recipe | None = None  # None: the autocast was not given a recipe
    calibrating: bool = False
    group: ProcessGroup | None = None  # reduces amaxes
    backward: int = NO_BACKWARD  # the backward pass in which the innermost autocast was entered


class _State(threading.local):
    """The values of one thread; each thread begins with those set in ``__init__``."""

    def __init__(self) -> None:
        self.autocast = Autocast()
        self.region: Region | None = None  # delayed scaling advances when it closes
        self.init: ModelInit | None = None
        self.in_graph: Region | None = None  # opened by the casts of a compiled graph

    def enclosing_region(self) -> Region | None:
        """Return ``region``, or discard it if the model's call that opened it was interrupted."""
        region = self.region
        frame = None if region is None or torch.compiler.is_compiling() else region.frame
        if region is not None and frame is not None and has_ended(frame):
            region.discard()
            self.region = None
        return self.region


class _Process:
    """The few values that all threads share."""

    __slots__ = ("clock", "observer")

    def __init__(self) -> None:
        self.clock: Tensor | None = None  # a dummy that orders the ops of compiled graphs
        # Observes casts and GEMMs on all threads, since backward has its own; see inspect/watch.
        self.observer: Any = None


STATE = _State()
PROCESS = _Process()


# Called with True, it returns autograd's current hooks for saved tensors, or None.
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    # An available CUDA may not be initialized yet; is_available() reads an environment variable.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_backward() -> int:
    """Return torch's number of the autograd backward pass that runs on this thread."""
    return NO_BACKWARD if is_traced() else torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether this thread runs an autograd backward pass or a recomputation for a backward pass.
    Activation checkpointing recomputes any module that is called at that time."""
    if torch.compiler.is_compiling() and is_traced():
        return False
    return CHECKPOINTS.replay is not None or torch._C._current_graph_task_id() != NO_BACKWARD


class Region:
    """The delayed-scaling packs that have recorded amaxes since the region began.

    The call of a model that opened the region, if one did, is given by the ``opener``, its hooks,
    and the ``frame`` that calls them; ``depth`` counts the model's calls of itself inside, and
    ``finished`` is whether the forward that ended last returned.
    """

    __slots__ = (
        "depth", "finished", "fp8_calls", "frame", "groups", "has_new_modules", "opener", "packs",
        "silent", "training",
    )  # fmt: skip

    def __init__(self, silent: bool | None = None) -> None:
        self.packs: dict[ScalePack, None] = {}
        self.has_new_modules = False  # every rank calls certain modules first in this region
        self.groups: dict[Any, None] = {}  # groups that reduce amaxes, whether or not used here
        self.fp8_calls = self.depth = 0
        self.opener: object = None
        self.frame: FrameType | None = None
        self.finished = False
        # A recomputation re-enters autocast regions of user code; these must not advance scales.
        self.silent = in_backward() if silent is None else silent
        self.training = torch.is_grad_enabled()

    def expect(
        self, recipe: Recipe | None, group: ProcessGroup | None, *, calibrating: bool
    ) -> None:
        """Reduce amaxes over ``group`` at the end, even if this rank records none until then.

        Without gradients, reduce only if this rank records amaxes: one rank may evaluate alone.
        """
        recipe = recipe or DEFAULT_RECIPE
        delayed = isinstance(recipe, DelayedScaling) and recipe.reduce_amax
        if delayed and (self.training or calibrating):
            self.groups[group] = None

    def close(self, *, in_op: bool = False) -> None:
        """Advance all scales, a launch per recipe, group and device; ``in_op``: a graph runs it."""
        if self.silent:
            return
        if torch.compiler.is_compiling() and is_traced() and not in_op:
            advance_in_graph(self.groups)
            return
        if RECORDED.packs and not capturing():
            # Casts replayed by a CUDA graph did not enter their packs. A pack without new amaxes
            # is left unchanged.
            self.packs.update(dict.fromkeys(RECORDED.packs))
        if self.packs or (self.groups and reduction.has_ranks()):
            advance_scales(self.packs, self.groups, agree=self.has_new_modules)

    def discard(self) -> None:
        """Forget the amaxes that the forward recorded, because the region was interrupted."""
        with torch._C._DisableFuncTorch():  # a functorch transform would refuse in-place writes
            for pack in self.packs:
                pack.forget(gradients=False)


@contextmanager
def inside(region: Region | None) -> Iterator[None]:
    """Assign the calls in the block to ``region``."""
    outer, STATE.region = STATE.region, region
    try:
        yield
    finally:
        STATE.region = outer


@torch.inference_mode(False)  # training uses the state, too
def advance_scales(
    packs: Iterable[ScalePack], groups: Iterable[Any] = (), *, agree: bool = False
) -> None:
    """Advance the slots of these packs, after reducing their amaxes over ranks.

    Args:
        packs: the packs in which this rank recorded amaxes.
        groups: process groups in whose reduction this rank takes part even if it has no pack for
            them.
        agree: every rank knows that some rank has new modules (see ``reduction.py``).
    """
    recorded = list(packs)
    due = dict.fromkeys(recorded if len(recorded) == 1 else merge_packs(recorded))
    for pack in due:
        if pack.parallel is not None and not reduction.includes_shards(pack):
            pack.amax.copy_(pack.parallel.amax(pack.amax))
    postponed = _reduce(due, groups, agree=agree) if reduction.has_ranks() else []
    for pack in due:
        pack.update()
    for amax, value in postponed:
        amax.copy_(value)


def _reduce(
    due: dict[ScalePack, None], groups: Iterable[Any], *, agree: bool
) -> list[tuple[Tensor, Tensor]]:
    """Reduce the amaxes of packs over ranks; add packs to ``due`` that got amaxes of other ranks.

    Return the amaxes that wait for a later reduction, each with its value.
    """
    reducing = [pack for pack in due if pack.recipe.reduce_amax]
    postponed: list[tuple[Tensor, Tensor]] = []
    for group_key in dict.fromkeys([*groups, *(pack.group for pack in reducing)]):
        if (group := reduction.reducing_group(group_key)) is None:
            continue
        channel = reduction.channel(group)
        for pack in reducing:
            if pack.group is group_key:
                for slots in pack.slots():
                    channel.add(slots)
        due.update(dict.fromkeys(channel.reduce(group, agree=agree)))
        for slots in channel.waiting():
            amax = slots.tensors()["amax"]
            postponed.append((amax, amax.clone()))
            amax.fill_(NO_DATA)
    return postponed


def set_clock(device: torch.device) -> None:
    """Create ``PROCESS.clock``; move it to a GPU as soon as a module is on one."""
    if (clock := PROCESS.clock) is None or (device.type == "cuda" and not clock.is_cuda):
        PROCESS.clock = static_tensor(device if device.type == "cuda" else torch.device("cpu"))


def static_tensor(device: torch.device) -> Tensor:
    """Return a byte that is identified by its address; CUDA graphs do not copy it."""
    # It is a real tensor even while a fake tensor mode is active.
    with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode(False):
        tensor = torch.zeros(1, dtype=torch.uint8, device=device)
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def advance_in_graph(groups: Iterable[Any]) -> None:
    """While a graph is traced, add the op that closes the region at this point of the graph."""
    if PROCESS.clock is not None:
        _advance_op(PROCESS.clock, [reduction.name_of_group(group) for group in groups])


def _advance(clock: Tensor, groups: Sequence[str]) -> Tensor:
    region, STATE.in_graph = STATE.in_graph or Region(), None
    region.groups.update(dict.fromkeys(map(reduction.group_named, groups)))
    region.close(in_op=True)  # a compiler may run the graph that it has just traced
    return clock.new_empty(0)


def _come_after(clock: Tensor, y: Tensor) -> Tensor:
    return clock.new_empty(0)


def _empty_output(arguments: Any) -> Tensor:
    """Return an output whose device tells the compiler that a CUDA graph can hold the op."""
    return arguments.clock.new_empty(0)


# Both ops claim to write the clock. Nothing reads it, or backward would have to save it.
come_after_op = declare(
    _come_after, name="come_after", outputs=_empty_output, mutates=("clock",), only_orders=True
)
_advance_op = declare(_advance, name="advance", outputs=_empty_output, mutates=("clock",))
