"""Regions of delayed scaling, and what is in force: ``STATE`` of a thread, ``PROCESS`` of all.

``STATE`` is what is in force on the thread that reads it, as ``torch.autocast`` is kept per thread:
one thread's region changes nothing for another. Autograd runs backward on threads of its own, so
backward reads the ``Call`` that the forward captured; of ``STATE`` it sees only what was entered on
its own thread, by a recomputation. ``PROCESS`` is the little that all threads share.

A *region* is the span between the entry and the exit of the outermost enabled (or calibrating)
autocast, or one call of a model converted with a delayed recipe; delayed scaling advances when it
ends.

*In a compiled graph* there is no Python to do this. The region is entered and left while the graph
is traced, and leaves an op in it. At run time the ops that cast under delayed scaling
(``nn/in_graph.py``) enter their packs in ``STATE.in_graph``, or in the region around the compiled
function if there is one, and that op closes it. A compiler keeps and orders ops by the tensors they
write. So the op claims to write ``PROCESS.clock``, and so does another after each module, which
takes the module's output.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from float8lab.ops import NO_DATA
from float8lab.ops.declare import declare
from float8lab.recipes import reduction
from float8lab.recipes.delayed import RECORDED, ScalePack, merge_packs
from float8lab.recipes.recipe import DelayedScaling, Recipe
from float8lab.recipes.recording import CHECKPOINTS, NO_BACKWARD

__all__ = [
    "DEFAULT_RECIPE", "PROCESS", "STATE", "Autocast", "ModelInit", "Region",
    "advance_in_graph", "advance_scales", "capturing", "come_after_in_graph", "current_backward",
    "in_backward", "inside", "saved_tensors_hooks", "set_clock", "static_tensor",
]  # fmt: skip

DEFAULT_RECIPE = DelayedScaling()
"""The recipe of an ``autocast`` that is given none."""


@dataclass(slots=True)
class ModelInit:
    """The wishes of an ``fp8_model_init`` block."""

    recipe: Recipe
    preserve_high_precision_init_val: bool


@dataclass(slots=True, eq=False)
class Autocast:
    """The settings that autocast regions have put in force on a thread.

    They are replaced whole, never written. No NamedTuple: one that a graph leaves behind is empty
    with torch 2.11.
    """

    enabled: bool | None = None  # None: no autocast is active
    recipe: Recipe | None = None  # None: the autocast named none
    calibrating: bool = False
    group: ProcessGroup | None = None  # over which amaxes are reduced
    backward: int = NO_BACKWARD  # pass in which the innermost autocast was entered


class _State(threading.local):
    """A thread's values; every thread begins with those of ``__init__``."""

    def __init__(self) -> None:
        self.autocast = Autocast()
        self.region: Region | None = None  # at whose end delayed scaling advances
        self.init: ModelInit | None = None
        self.in_graph: Region | None = None  # opened by the casts of a compiled graph


class _Process:
    """The few values that all threads share."""

    __slots__ = ("clock", "observer")

    def __init__(self) -> None:
        self.clock: Tensor | None = None  # orders the ops of a compiled graph, holds nothing
        # Sees the casts and GEMMs of all threads, for backward has its own; see inspect/watch.
        self.observer: Any = None


STATE = _State()
PROCESS = _Process()


# Given True, autograd's hooks for tensors that are saved now, or None.
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def capturing() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    # Where it is available it may not have begun yet; asking that reads an environment variable.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def current_backward() -> int:
    """Torch's number of the autograd backward pass that runs on this thread."""
    return NO_BACKWARD if torch.compiler.is_compiling() else torch._C._current_graph_task_id()


def in_backward() -> bool:
    """Whether an autograd backward pass is running on this thread, or a recomputation for one.
    A module called there is being recomputed by activation checkpointing."""
    if torch.compiler.is_compiling():
        return False
    return CHECKPOINTS.replay is not None or torch._C._current_graph_task_id() != NO_BACKWARD


class Region:
    """The delayed-scaling packs that recorded amaxes since the region began."""

    __slots__ = ("fp8_calls", "groups", "has_new_modules", "packs", "silent", "training")

    def __init__(self, silent: bool | None = None) -> None:
        self.packs: dict[ScalePack, None] = {}
        self.has_new_modules = False  # this region is the first with certain modules, on every rank
        self.groups: dict[Any, None] = {}  # over which amaxes are reduced, used here or not
        self.fp8_calls = 0
        # Recomputation in backward re-enters user code, autocast included; nothing advances then.
        self.silent = in_backward() if silent is None else silent
        self.training = torch.is_grad_enabled()

    def expect(
        self, recipe: Recipe | None, group: ProcessGroup | None, *, calibrating: bool
    ) -> None:
        """Reduce amaxes over ``group`` at the end, whatever this rank does until then.

        Without gradients only if this rank records any: one rank may evaluate alone.
        """
        recipe = recipe or DEFAULT_RECIPE
        delayed = isinstance(recipe, DelayedScaling) and recipe.reduce_amax
        if delayed and (self.training or calibrating):
            self.groups[group] = None

    def close(self) -> None:
        """Advance all scales, one launch for each recipe, reduction group and device."""
        if self.silent:
            return
        if torch.compiler.is_compiling():
            advance_in_graph(self.groups)
            return
        if RECORDED.packs and not capturing():
            # Casts that a CUDA graph has replayed did not enter their packs. Without new amaxes a
            # pack stays as it is.
            self.packs.update(dict.fromkeys(RECORDED.packs))
        if self.packs or (self.groups and reduction.has_ranks()):
            advance_scales(self.packs, self.groups, agree=self.has_new_modules)

    def discard(self) -> None:
        """Forget what the forward recorded: the region did not finish."""
        with torch._C._DisableFuncTorch():  # a transform would refuse to write in place
            for pack in self.packs:
                pack.forget(gradients=False)


@contextmanager
def inside(region: Region | None) -> Iterator[None]:
    """Have the calls in the block belong to ``region``."""
    outer, STATE.region = STATE.region, region
    try:
        yield
    finally:
        STATE.region = outer


@torch.inference_mode(False)  # the state is not for inference alone
def advance_scales(
    packs: Iterable[ScalePack], groups: Iterable[Any] = (), *, agree: bool = False
) -> None:
    """Advance the slots of these packs, by amaxes that are reduced over ranks first.

    Args:
        packs: in which this rank recorded amaxes.
        groups: process groups in whose reduction this rank takes part even without a pack of
            theirs.
        agree: every rank knows that some rank has new modules (see ``reduction.py``).
    """
    recorded = list(packs)
    due = dict.fromkeys(recorded if len(recorded) == 1 else merge_packs(recorded))
    for pack in due:
        if pack.parallel is not None and not reduction.includes_shards(pack):
            pack.amax.copy_(pack.parallel.amax(pack.amax))
    held = _reduce(due, groups, agree=agree) if reduction.has_ranks() else []
    for pack in due:
        pack.update()
    for amax, value in held:
        amax.copy_(value)


def _reduce(
    due: dict[ScalePack, None], groups: Iterable[Any], *, agree: bool
) -> list[tuple[Tensor, Tensor]]:
    """Reduce the amaxes of packs over ranks, and add the packs of which other ranks have some.

    Returns the amaxes that wait for a later reduction, each with its value.
    """
    reducing = [pack for pack in due if pack.recipe.reduce_amax]
    held: list[tuple[Tensor, Tensor]] = []
    for named in dict.fromkeys([*groups, *(pack.group for pack in reducing)]):
        if (group := reduction.reducing_group(named)) is None:
            continue
        channel = reduction.channel(group)
        for pack in reducing:
            if pack.group is named:
                for slots in pack.slots():
                    channel.add(slots)
        due.update(dict.fromkeys(channel.reduce(group, agree=agree)))
        for slots in channel.waiting():
            amax = slots.tensors()["amax"]
            held.append((amax, amax.clone()))
            amax.fill_(NO_DATA)
    return held


def set_clock(device: torch.device) -> None:
    """Have ``PROCESS.clock``, on a GPU as soon as there is a module on one."""
    clock = PROCESS.clock
    if clock is None or (device.type == "cuda" and not clock.is_cuda):
        PROCESS.clock = static_tensor(device if device.type == "cuda" else torch.device("cpu"))


def static_tensor(device: torch.device) -> Tensor:
    """One byte whose address says everything; CUDA graphs do not copy it."""
    # Not a fake tensor, whatever mode is active.
    with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode(False):
        tensor = torch.zeros(1, dtype=torch.uint8, device=device)
    tensor._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return tensor


def come_after_in_graph(y: Tensor) -> None:
    """Where a graph is traced: have the region end after ``y`` was computed."""
    if PROCESS.clock is not None:
        _come_after_op(PROCESS.clock, y)


def advance_in_graph(groups: Iterable[Any]) -> None:
    """Where a graph is traced: close the region when the graph gets here."""
    if PROCESS.clock is not None:
        _advance_op(PROCESS.clock, [reduction.name_of_group(group) for group in groups])


def _advance(clock: Tensor, groups: Sequence[str]) -> Tensor:
    region, STATE.in_graph = STATE.in_graph or Region(), None
    region.groups.update(dict.fromkeys(map(reduction.group_named, groups)))
    region.close()
    return clock.new_empty(0)


def _come_after(clock: Tensor, y: Tensor) -> Tensor:
    return clock.new_empty(0)


def _nothing(of: Any) -> Tensor:
    """An output, by whose device the compiler knows that a CUDA graph can hold the op."""
    return of.clock.new_empty(0)


# To the compiler both write the clock. Nothing reads it, or backward would have to save it.
_come_after_op = declare(
    _come_after, name="come_after", outputs=_nothing, mutates=("clock",), only_orders=True
)
_advance_op = declare(_advance, name="advance", outputs=_nothing, mutates=("clock",))
