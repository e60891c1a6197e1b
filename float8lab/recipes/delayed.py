"""Delayed-scaling state: amax history and scale of every tensor that a module casts.

A *slot* is the state of one cast tensor: an amax accumulator, a scale, a history column. A module's
slots for one recipe are a ``DelayedSlots``; the slots of many modules lie side by side in a
``ScalePack``, so that one launch advances them all (``reduction.py`` makes ranks agree). Each
``DelayedSlots`` starts in a pack of its own; the first region in which several packs are used
merges them.

Casts never read ``ScalePack.scale`` itself but a copy, which all slots' casts share from one update
to the next: what backward or a recomputation saved stays what the forward used. Where a CUDA graph
records them, each cast makes its own copy in the graph, since a replay updates ``scale`` unseen; a
pack that was recorded keeps its tensors, and is not merged any more.

What an exception interrupts is forgotten. A region tells its packs so. Nobody tells that a backward
pass was interrupted: its graph task, which owns a ``_Backward``, is then freed without having
called it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from float8lab.ops import NO_DATA, amax_op, encode_from_amax, scale_from_amax, update_scales_op
from float8lab.recipes.recipe import DelayedScaling

__all__ = ["DelayedSlots", "ScalePack", "merge_packs"]

_TENSORS = ("history", "amax", "scale", "previous", "seeded", "steps", "fp8_max", "forward")


class ScalePack:
    """The packed state of S slots of one recipe, reduction group and device."""

    __slots__ = (
        *_TENSORS,
        "recipe",
        "group",
        "members",
        "amaxes",
        "advanced",
        "keeps_previous",
        "sown",
        "_backward",
        "_copy",
        "_live",
        "_recorded",
        "__weakref__",
    )

    history: Tensor  # [H, S] float32, newest first
    amax: Tensor  # [S] float32, NO_DATA where nothing was recorded since the last update
    scale: Tensor  # [S] float32 decode scales
    previous: Tensor  # [S] float32, before the last update, if ``keeps_previous``
    seeded: Tensor  # [S] bool, the scale was made from a tensor's own amax
    steps: Tensor  # [S] int32, updates that saw data; 0 means the scale was never set
    fp8_max: Tensor  # [S] float32, largest value of the slot's format
    forward: Tensor  # [S] bool, forward tensors (x, w), not gradients

    def __init__(self, recipe: DelayedScaling, group: Any, tensors: dict[str, Tensor]) -> None:
        self.recipe = recipe
        self.group = group
        for name in _TENSORS:
            setattr(self, name, tensors[name])
        self.members: list[weakref.ref[DelayedSlots]] = []
        self.amaxes: Sequence[Tensor] = self.amax.unbind()
        self.advanced = False  # since the last forward of a compiled graph
        self.keeps_previous = False  # casts in compiled graphs may recompute with it
        # Slots that were given a first scale since the last update.
        self.sown: list[tuple[weakref.ref[DelayedSlots], int]] = []
        self._backward: weakref.ref[_Backward] | None = None  # recorded here and has not ended
        self._copy: Tensor | None = None  # [S, 4], of ``scale`` as it is now
        self._live: Sequence[Tensor] | None = None  # views of it, of shape [1]
        self._recorded = False

    def current(self, slot: int, *, shared: bool = True) -> Tensor:
        """The decode scale of a slot, of shape [1], unchanged by later updates.

        ``shared``: other casts may get the same tensor.
        """
        if not shared or self.is_recorded():
            return self.scale[slot].clone().view(1)
        if self._live is None:
            with torch.inference_mode(False):  # training's casts get the same tensors
                # Every fourth float: cuBLASLt wants scales at multiples of 16 bytes.
                copy = self._copy
                if copy is None:
                    copy = self.scale.unsqueeze(1).repeat(1, 4)
                self._live = copy.narrow(1, 0, 1).unbind()
        return self._live[slot]

    def is_recorded(self) -> bool:
        """Whether a CUDA graph holds, or is recording, the addresses of these tensors."""
        if not self._recorded and self.scale.is_cuda:
            self._recorded = torch.cuda.is_current_stream_capturing()
        return self._recorded

    def slots(self) -> list[DelayedSlots]:
        """The modules' parts of the pack that still exist, in order."""
        return [m for ref in self.members if (m := ref()) and m.pack is self]

    def set_scale(self, slot: int, scale: Tensor) -> None:
        """Give one slot a scale from outside its history."""
        self.scale[slot].copy_(scale.view(()))
        self.seeded[slot].fill_(True)
        self.forget_live()

    def has_scale(self) -> Tensor:
        """[S] bool: slots with a scale that means something."""
        return self.seeded | (self.steps > 0)

    def forget_live(self) -> None:
        """Look at ``scale`` again: it was written from outside."""
        self._copy = self._live = None

    def update(self) -> None:
        """Advance every slot that recorded an amax since the last update."""
        recipe = self.recipe
        self.settle()
        self.sown.clear()
        if self.keeps_previous:
            self.previous.copy_(self.scale)
        self.advanced = True
        self.forget_live()
        if callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo is not None:
            self._update_by_callables()
        else:
            self._copy = update_scales_op(
                self.history,
                self.amax,
                self.scale,
                self.steps,
                self.fp8_max,
                recipe.margin,
                recipe.interval,
                recipe.amax_compute_algo == "most_recent",
                recipe.power_of_2_scale,
            )

    def _update_by_callables(self) -> None:
        """``update_scales_`` with the user's functions in place of the two formulas."""
        recipe, algo = self.recipe, self.recipe.amax_compute_algo
        seen = (self.amax >= 0) & (self.amax < torch.inf)
        due = seen & (self.steps % recipe.interval == 0)
        old = self.scale.clone()
        update_scales_op(
            self.history,
            self.amax,
            self.scale,
            self.steps,
            self.fp8_max,
            recipe.margin,
            recipe.interval,
            algo == "most_recent",
            recipe.power_of_2_scale,
        )
        if callable(algo):
            chosen = algo(self.history)
        else:
            chosen = self.history[0] if algo == "most_recent" else self.history.amax(0)
        if recipe.scaling_factor_compute_algo is not None:
            encode = recipe.scaling_factor_compute_algo(chosen, 1.0 / old, self.fp8_max, recipe)
        else:
            encode = encode_from_amax(chosen, self.fp8_max, power_of_2=recipe.power_of_2_scale)
            encode = encode * 2.0**-recipe.margin
        usable = due & (chosen > 0) & (chosen < torch.inf) & (encode > 0) & (encode < torch.inf)
        self.scale.copy_(torch.where(usable, 1.0 / encode, old))

    def forget(self, *, gradients: bool) -> None:
        """Forget what gradients, or forward tensors, recorded since the last update."""
        self.amax.masked_fill_(~self.forward if gradients else self.forward, NO_DATA)
        sown, self.sown = self.sown, []
        columns = []
        for reference, index in sown:
            slots = reference()
            if slots is None or slots.pack is not self:
                continue
            if slots.forward[index] == gradients:
                self.sown.append((reference, index))
                continue
            slots.seeded[index] = False
            columns.append(slots.start + index)
        if columns:
            self.seeded[columns] = False
            # Other ranks' amaxes may have made a scale before, which was kept.
            self.scale[columns] = torch.where(self.steps[columns] > 0, self.scale[columns], 1.0)
            self.forget_live()

    def await_backward(self) -> None:
        """Keep what the gradients of the backward pass on this thread record only if it ends well.

        A pass inside it, of a reentrant checkpoint, is a part of it.
        """
        if self._backward is not None and self._backward() is not None:
            return
        if torch._C._current_graph_task_id() == _NO_TASK:
            return
        self.settle()
        backward = _Backward(self)
        self._backward = weakref.ref(backward)
        torch.autograd.Variable._execution_engine.queue_callback(backward)

    def end_backward(self) -> None:
        """Keep what gradients recorded: their backward pass has ended."""
        self._backward = None

    def settle(self) -> None:
        """Forget what gradients recorded if their backward pass was interrupted."""
        if self._backward is None:
            return
        if self._backward() is not None and torch._C._current_graph_task_id() != _NO_TASK:
            return  # it runs
        self._backward = None
        self.forget(gradients=True)


_NO_TASK = -1
"""Torch's number of the graph task where no backward pass runs."""


class _Backward:
    """Called at the end of a backward pass; freed with its graph task, also if that raised."""

    __slots__ = ("__weakref__", "_pack")

    def __init__(self, pack: ScalePack) -> None:
        self._pack = pack

    def __call__(self) -> None:
        self._pack.end_backward()


@contextmanager
def _lasting(device: torch.device) -> Iterator[None]:
    """Allocate state that outlives what is going on.

    In inference mode it would be inference tensors, which training may not write or save. While
    ``torch.compile`` prepares a CUDA graph, what is allocated on the stream of that graph, then or
    when it is recorded, would belong to it.
    """
    with torch.inference_mode(False):
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            yield
            return
        here, apart = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        apart.wait_stream(here)
        with torch.cuda.stream(apart):
            yield
        here.wait_stream(apart)


class DelayedSlots:
    """The slots of one module under one recipe: consecutive columns of a pack."""

    __slots__ = ("__weakref__", "forward", "fp8_dtypes", "key", "pack", "seeded", "start")

    def __init__(
        self,
        recipe: DelayedScaling,
        group: Any,
        *,
        fp8_dtypes: Sequence[torch.dtype],
        forward: Sequence[bool],
        device: torch.device,
        key: str = "",
    ) -> None:
        self.key = key  # names the module to other ranks
        count = len(fp8_dtypes)
        limits = [torch.finfo(dtype).max for dtype in fp8_dtypes]
        self.fp8_dtypes, self.forward = tuple(fp8_dtypes), tuple(forward)
        # What is known of the pack's ``seeded`` without asking the device.
        self.seeded = [False] * count
        with _lasting(device):
            tensors = {
                "history": torch.zeros(
                    recipe.amax_history_len, count, dtype=torch.float32, device=device
                ),
                "amax": torch.full((count,), NO_DATA, dtype=torch.float32, device=device),
                "scale": torch.ones(count, dtype=torch.float32, device=device),
                "previous": torch.ones(count, dtype=torch.float32, device=device),
                "seeded": torch.zeros(count, dtype=torch.bool, device=device),
                "steps": torch.zeros(count, dtype=torch.int32, device=device),
                "fp8_max": torch.tensor(limits, dtype=torch.float32, device=device),
                "forward": torch.tensor(forward, device=device),
            }
            self._adopt(ScalePack(recipe, group, tensors), 0)

    def _adopt(self, pack: ScalePack, start: int) -> None:
        self.pack, self.start = pack, start
        pack.members.append(weakref.ref(self))

    def tensors(self) -> dict[str, Tensor]:
        """This module's columns of the pack (views)."""
        self.pack.settle()
        columns = slice(self.start, self.start + len(self.fp8_dtypes))
        return {name: getattr(self.pack, name)[..., columns] for name in _TENSORS}

    def _separate(self, tensors: dict[str, Tensor]) -> None:
        self._adopt(ScalePack(self.pack.recipe, self.pack.group, tensors), 0)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take over values of ``tensors()``, in place."""
        mine = self.tensors()
        for name, value in values.items():
            mine[name].copy_(value)
        self.seeded = mine["seeded"].tolist()
        self._reap()
        self.pack.forget_live()

    def clear(self) -> None:
        """Forget all that was recorded, in place."""
        mine = self.tensors()
        for name in ("history", "seeded", "steps"):
            mine[name].zero_()
        for name in ("scale", "previous"):
            mine[name].fill_(1.0)
        mine["amax"].fill_(NO_DATA)
        self.seeded = [False] * len(self.seeded)
        self._reap()
        self.pack.forget_live()

    def _sow(self, index: int, scale: Tensor) -> None:
        """Give a slot its first scale."""
        self.pack.set_scale(self.start + index, scale)
        self.pack.sown.append((weakref.ref(self), index))
        self.seeded[index] = True

    def _reap(self) -> None:
        """Keep the scales that the slots have, whatever is interrupted."""
        self.pack.sown = [sown for sown in self.pack.sown if sown[0]() is not self]

    def to(self, device: torch.device) -> None:
        """Move to another device, into a pack of its own."""
        if self.pack.scale.device != device:
            with _lasting(device):
                self._separate({k: t.to(device, copy=True) for k, t in self.tensors().items()})

    def __getstate__(self) -> dict[str, Any]:
        return {
            "recipe": self.pack.recipe,
            "fp8_dtypes": self.fp8_dtypes,
            "forward": self.forward,
            "key": self.key,
            "seeded": list(self.seeded),
            "tensors": {name: t.clone() for name, t in self.tensors().items()},
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.fp8_dtypes, self.forward = state["fp8_dtypes"], state["forward"]
        self.key = state["key"]
        self.seeded = state["seeded"]
        tensors = state["tensors"]
        with _lasting(tensors["scale"].device):
            if tensors["scale"].is_inference():
                tensors = {name: t.clone() for name, t in tensors.items()}
            self._adopt(ScalePack(state["recipe"], None, tensors), 0)

    def __deepcopy__(self, memo: dict[int, Any]) -> DelayedSlots:
        copy = DelayedSlots.__new__(DelayedSlots)
        copy.__setstate__(self.__getstate__())
        copy.pack.group = self.pack.group
        memo[id(self)] = copy
        return copy

    def scale_for(
        self, index: int, x: Tensor, *, record: bool, shared: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Scale to cast ``x`` with, and the slot to record its amax in (None: do not record)."""
        slot = self.start + index
        if record and not self.forward[index]:
            self.pack.await_backward()
        if not self.seeded[index]:
            # Without history there is no scale yet: this tensor's own is used, and kept if it may.
            scale = self._own_scale(index, x)
            # Not if another rank has used this module before: then its amaxes have made a scale;
            # nor if a CUDA graph has.
            pack = self.pack
            scale = torch.where(pack.has_scale()[slot], pack.scale[slot], scale.view(()))
            if not record:
                return scale.view(1), None
            if x.numel():
                self._sow(index, scale)
        pack = self.pack
        return pack.current(slot, shared=shared), pack.amaxes[slot] if record else None

    def scale_again(self, index: int) -> Tensor:
        """The scale, of shape [1], that ``scale_for`` gave for the last forward's tensor."""
        scale = self.pack.previous if self.pack.advanced else self.pack.scale
        return scale[self.start + index].clone().view(1)

    def observe(self, index: int, x: Tensor) -> None:
        """Record the amax of ``x`` without casting it (calibration)."""
        if x.numel() == 0:
            return
        if not self.seeded[index]:
            self._sow(index, self._own_scale(index, x))
        slot = self.pack.amaxes[self.start + index]
        slot.copy_(torch.maximum(slot, amax_op(x, (-1, -1)).view(())))

    def _own_scale(self, index: int, x: Tensor) -> Tensor:
        recipe = self.pack.recipe
        rule = "pow2" if recipe.power_of_2_scale else "fp32"
        scale = scale_from_amax(amax_op(x, (-1, -1)), self.fp8_dtypes[index], rule)
        return scale * 2.0**recipe.margin


def merge_packs(packs: Iterable[ScalePack]) -> list[ScalePack]:
    """Lay the slots of packs of one recipe, group and device side by side, in one pack for each.

    A pack whose addresses a CUDA graph has recorded stays as it is.
    """
    batches: dict[Any, list[ScalePack]] = {}
    for pack in packs:
        alone = pack if pack.is_recorded() else None
        batches.setdefault((pack.recipe, pack.group, pack.scale.device, alone), []).append(pack)
    return [_merge(batch) if len(batch) > 1 else batch[0] for batch in batches.values()]


def _merge(packs: Sequence[ScalePack]) -> ScalePack:
    members = [member for pack in packs for member in pack.slots()]
    columns = [member.tensors() for member in members]
    with _lasting(packs[0].scale.device):
        tensors = {name: torch.cat([c[name] for c in columns], dim=-1) for name in _TENSORS}
        merged = ScalePack(packs[0].recipe, packs[0].group, tensors)
    merged.keeps_previous = any(pack.keeps_previous for pack in packs)
    start = 0
    for member in members:
        member._adopt(merged, start)
        start += len(member.fp8_dtypes)
    return merged
