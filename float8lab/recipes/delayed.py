"""Delayed-scaling state: amax history and scale of every tensor that a module casts.

A *slot* is the state of one cast tensor, or of one expert's part of it: an amax accumulator, an
encode factor and the scale that is 1 over it, a history column. Casts multiply by the encode
factor, which the scale does not tell exactly unless it is a power of two; a scale that comes from
elsewhere has 1 over it. A module's slots for one recipe are a ``DelayedSlots``; the slots of many
modules lie side by side in a ``ScalePack``, so that one launch advances them all (``reduction.py``
makes ranks agree). Each ``DelayedSlots`` starts in a pack of its own; the first region in which
several packs are used merges them.

A rank that holds some of a module's experts has the slots of all of them, so that columns mean the
same on every rank; those of experts elsewhere record nothing here. An expert has its first scale
from its own first rows, in whatever step they come. Until all have one, casts look for amaxes.

Casts never read ``ScalePack.factors`` themselves but a copy, which all slots' casts share from one
update to the next: what backward or a recomputation saved stays what the forward used. Where a CUDA
graph records them, each cast makes its own copy in the graph, since a replay updates them unseen; a
pack that was recorded keeps its tensors, and is not merged any more. In a compiled graph a cast
reads the factors where they are kept, and its result has a copy that no other cast has: a compiler
may write there once the graph has read it for the last time. One launch copies those of all casts.

What an exception interrupts is forgotten. A region tells its packs so. They hear nothing of a
backward pass that was interrupted: its graph task, which owns the callback for its end, is then
freed without having called it.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

from float8lab import ops
from float8lab.arguments import has_data
from float8lab.formats import Spec
from float8lab.ops import NO_DATA, Groups, Prologue
from float8lab.ops.grouped import amax_of_batch
from float8lab.recipes.recipe import DelayedScaling
from float8lab.recipes.recording import NO_BACKWARD

__all__ = [
    "RECORDED", "Answer", "DelayedSlots", "Factors", "QuantParams", "ScalePack", "merge_packs",
    "own_amax",
]  # fmt: skip

_TENSORS = ("history", "amax", "factors", "previous", "seeded", "steps", "fp8_max", "forward")

_ROWS = ("scale", "encode")
"""The rows of ``factors``."""


class Factors(NamedTuple):
    """The factors that decode and encode a tensor: each ``[1]``; of experts, ``[E, 1, 1]``."""

    scale: Tensor
    encode: Tensor

    @staticmethod
    def of(pair: Tensor) -> Factors:
        """The two of a tensor ``[2]``, or ``[2, width]``."""
        if pair.ndim == 1:
            return Factors(pair.narrow(0, 0, 1), pair.narrow(0, 1, 1))
        return Factors(*pair.view(2, -1, 1, 1).unbind())


class QuantParams(NamedTuple):
    """The parameters of a cast: factors that it is given, or amaxes that it makes scales of."""

    factors: Factors
    """What ``encode`` holds depends on the rule, and ``scale`` is what the operand gets."""
    amax_slot: Tensor | None = None
    """Where the amax is recorded under delayed scaling; None: it is not."""
    rule: str | None = None
    """The rule of the cast op. ``"encode"``: it multiplies by the encode factors; ``"decode"``: it
    divides by scales; a scale rule: it makes scales of the amaxes of blocks. None: it makes them of
    the matrix's amax, if blocks share that."""

    @staticmethod
    def of_amax(amax: Tensor, rule: str | None = None) -> QuantParams:
        """The amax of a matrix; or, with the scale rule of a spec, the amaxes of its blocks."""
        return QuantParams(Factors(None, amax), None, rule)  # type: ignore[arg-type]

    @staticmethod
    def of_scale(scale: Tensor, spec: Spec) -> QuantParams:
        """The decode scales of a spec's blocks, where nothing knows their encode factors."""
        return QuantParams(Factors(scale, scale), None, spec.rule_of("decode"))


def _copied(factors: Tensor) -> Tensor:
    """A copy of ``[2, S]`` as columns 0 and 4 of ``[S, 8]``: cuBLASLt wants scales so aligned."""
    return factors.view(2, -1).t().unsqueeze(2).repeat(1, 1, 4).view(-1, 8)


class ScalePack:
    """The packed state of S slots of one recipe, reduction group and device."""

    history: Tensor  # [H, S] float32, newest first
    amax: Tensor  # [S] float32, NO_DATA where nothing was recorded since the last update
    factors: Tensor  # [2, S] float32: decode scales, and the encode factors they are 1 over
    previous: Tensor  # [2, S] float32, before the last update, if ``keeps_previous``
    seeded: Tensor  # [S] bool, the scale was made from a tensor's own amax
    steps: Tensor  # [S] int32, updates that saw data; 0 means the scale was never set
    fp8_max: Tensor  # [S] float32, largest value of the slot's format
    forward: Tensor  # [S] bool, forward tensors (x, w), not gradients

    def __init__(
        self, recipe: DelayedScaling, group: Any, tensors: dict[str, Tensor], parallel: Any
    ) -> None:
        self.recipe = recipe
        self.group = group
        self.parallel = parallel  # a TensorParallel, if its ranks have shards of what is cast
        for name in _TENSORS:
            setattr(self, name, tensors[name])
        self.members: list[weakref.ref[DelayedSlots]] = []
        self.widths: dict[int, int] = {}  # the number of slots of each tensor, by its first slot
        with torch.inference_mode(False):  # training uses these views, too
            self.amaxes: Sequence[Tensor] = self.amax.unbind()
            self.scale, self.encode = self.factors.unbind()
        self.advanced = False  # since the last forward of a compiled graph
        self.keeps_previous = False  # casts in compiled graphs may recompute with it
        # Slots that were given a first scale since the last update.
        self.first_scales: list[tuple[weakref.ref[DelayedSlots], int]] = []
        self._backward: weakref.ref[object] | None = None  # recorded here and has not ended
        self._copy: Tensor | None = None  # [S, 8], of ``factors`` as they are now
        self._live: Any = None  # views of it, of shape [1], scales and encodes
        self._recorded = False
        # Encode factors, these or the ``previous`` ones, and amaxes of slots that graphs cast by.
        self.views: dict[tuple[int, range | None, bool], tuple[Tensor, Tensor]] = {}
        # Copies of both that no cast of a graph has been given yet, by their tensor's first slot.
        self._unused: list[dict[int, Tensor]] = [{}, {}]

    def live(self) -> Sequence[Any] | None:
        """The decode scale and the encode factor of each slot in turn, unchanged by later updates.

        Slots in a row of one tensor have both of all of them in the first's place, and None in the
        others': each view takes its time. The result is None where a CUDA graph records, for there
        each cast makes a copy of its own.
        """
        if self.is_recorded():
            return None
        if self._live is None:
            with _disable_current_modes():
                if (copy := self._copy) is None:
                    with torch.inference_mode(False):  # training's casts get views of it, too
                        copy = self._copy = _copied(self.factors)
                if len(self.widths) == copy.shape[0]:
                    self._live = copy.view(-1, 4).narrow(1, 0, 1).unbind()
                else:
                    widths, self._live = self.widths.values(), []
                    sizes = [n for w in widths for n in ((1, 1) if w == 1 else (2 * w,))]
                    for factors in copy.view(-1, 4).select(1, 0).split(sizes):
                        self._live += factors, *[None] * (factors.shape[0] - 1)
        return self._live

    def is_recorded(self) -> bool:
        """Whether a CUDA graph holds, or is recording, these addresses; it is remembered."""
        if not self._recorded and self.factors.is_cuda:
            self._recorded = torch.cuda.is_current_stream_capturing()
        return self._recorded

    def slots(self) -> list[DelayedSlots]:
        """The modules' parts of the pack that still exist, in order."""
        return [m for ref in self.members if (m := ref()) and m.pack is self]

    def copy_factors(
        self, slots: int | slice, start: int, *, previous: bool, shares_launch: bool
    ) -> Tensor:
        """Copy slots in a row as ``_copied`` does, for one cast of a compiled graph alone.

        ``start`` is the first slot of their tensor; ``previous``: as before the last update. If it
        ``shares_launch``, one launch copies the factors of all tensors. In a CUDA graph it must
        not, for the copies for other casts would outlive the graph, in its memory.
        """
        source, unused = (self.factors, self.previous)[previous], self._unused[previous]
        if (rows := unused.pop(start, None) if shares_launch else None) is None:
            # Where few tensors are cast many times, most of a copy is left. Gradients are a third.
            if not shares_launch or 4 * len(unused) > 3 * len(self.widths):
                return _copied(source[:, slots])
            with torch.inference_mode(False):  # training's casts get some, too
                # "Unsafe": each tensor counts the versions of its own rows.
                tensors = _copied(source).unsafe_split_with_sizes([*self.widths.values()])
            self._unused[previous] = unused = dict(zip(self.widths, tensors, strict=True))
            rows = unused.pop(start)
        return rows if isinstance(slots, int) else rows[slots.start - start : slots.stop - start]

    def set_factors(self, slots: slice, factors: Tensor, seeded: Tensor | bool = True) -> None:
        """Give slots in a row factors, ``[2, slots]``, from outside their history.

        They then have a scale, or those of them do that ``seeded`` names.
        """
        self.factors[:, slots].copy_(factors)
        self.seeded[slots].bitwise_or_(seeded)
        self.forget_live()

    def has_scale(self) -> Tensor:
        """[S] bool: slots with a scale that means something."""
        return self.seeded | (self.steps > 0)

    def forget_live(self) -> None:
        """Forget the copy of ``factors``: they were written from outside."""
        self._copy = self._live = None
        self._unused = [{}, {}]

    @_disable_current_modes()  # of selective checkpointing: no recomputation advances scales
    def update(self) -> None:
        """Advance every slot that recorded an amax since the last update."""
        recipe = self.recipe
        self.forget_interrupted_backward()
        self.first_scales.clear()
        if self.keeps_previous:
            self.previous.copy_(self.factors)
        self.advanced = True
        self.forget_live()
        by_callables = callable(recipe.amax_compute_algo) or recipe.scaling_factor_compute_algo
        if by_callables:
            seen = (self.amax >= 0) & (self.amax < torch.inf)
            due, old = seen & (self.steps % recipe.interval == 0), self.factors.clone()
        state = self.history, self.amax, self.factors, self.steps, self.fp8_max
        takes_newest = recipe.amax_compute_algo == "most_recent"
        options = recipe.margin, recipe.interval, takes_newest, recipe.power_of_2_scale
        copies = ops.update_scales_op(*state, *options)
        # Casts of compiled graphs copy the factors themselves. A copy that outlives an update in
        # such a graph would lie in the memory of a CUDA graph, where torch allows outputs alone.
        self._copy = None if by_callables or self.keeps_previous else copies
        if by_callables:
            self._choose(due, old)

    def _choose(self, due: Tensor, old: Tensor) -> None:
        """Give the slots that are due factors by the user's functions, after ``update_scales_``.

        The others, and those for which the functions give nothing usable, keep their ``old`` ones.
        """
        recipe, algo = self.recipe, self.recipe.amax_compute_algo
        if callable(algo):
            chosen = algo(self.history)
        else:
            chosen = self.history[0] if algo == "most_recent" else self.history.amax(0)
        if recipe.scaling_factor_compute_algo is not None:
            encode = recipe.scaling_factor_compute_algo(chosen, old[1], self.fp8_max, recipe)
        else:
            encode = ops.encode_from_amax(chosen, self.fp8_max, power_of_2=recipe.power_of_2_scale)
            encode = encode * 2.0**-recipe.margin
        usable = due & (chosen > 0) & (chosen < torch.inf) & (encode > 0) & (encode < torch.inf)
        self.factors.copy_(torch.where(usable, torch.stack((1.0 / encode, encode)), old))

    def forget(self, *, gradients: bool) -> None:
        """Forget what gradients, or forward tensors, recorded since the last update."""
        self.amax.masked_fill_(~self.forward if gradients else self.forward, NO_DATA)
        first_scales, self.first_scales = self.first_scales, []
        columns: list[int] = []
        for reference, index in first_scales:
            slots = reference()
            if slots is None or slots.pack is not self:
                continue
            if slots.forward[index] == gradients:
                self.first_scales.append((reference, index))
                continue
            slots.seeded[index] = False
            slots._asked.pop(index, None)
            columns += slots.columns_of(index)
        if columns:
            self.seeded[columns] = False
            # Other ranks' amaxes may have made a scale before, which was kept.
            was_updated, factors = self.steps[columns] > 0, self.factors[:, columns]
            self.factors[:, columns] = torch.where(was_updated, factors, 1.0)
            self.forget_live()

    def watch_backward(self) -> None:
        """Keep what the gradients of the backward pass on this thread record only if it succeeds.

        A pass inside it, of a reentrant checkpoint, is a part of it.
        """
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            return
        if self._backward is not None:
            if self._backward() is not None:
                return
            self.forget_interrupted_backward()

        # Called at the end of the pass; freed with its graph task, also if that raised.
        def ended() -> None:
            self._backward = None  # what gradients recorded stays

        self._backward = weakref.ref(ended)
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def forget_interrupted_backward(self) -> None:
        """Forget what gradients recorded if their backward pass was interrupted."""
        if self._backward is None:
            return
        if self._backward() is not None and torch._C._current_graph_task_id() != NO_BACKWARD:
            return  # it runs
        self._backward = None
        self.forget(gradients=True)


class _Recorded(threading.local):
    """The packs that CUDA graphs of a thread's compiled graphs have recorded."""

    def __init__(self) -> None:
        # Torch replays such a CUDA graph on the thread that recorded it.
        self.packs: weakref.WeakSet[ScalePack] = weakref.WeakSet()


RECORDED = _Recorded()


_Made = TypeVar("_Made")


def _lasting(device: torch.device, make: Callable[[], _Made]) -> _Made:
    """Call ``make``, which allocates state that outlives what is going on.

    In inference mode it would be inference tensors, which training may not write or save. While
    ``torch.compile`` prepares a CUDA graph, whatever the thread allocates would belong to that
    graph, and be lost: hence a thread, and a stream, of the state's own.
    """
    with torch.inference_mode(False):
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return make()
        stream, state_stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)

        def make_on_stream() -> _Made:
            with torch.cuda.device(device), torch.cuda.stream(state_stream):
                return make()

        state_stream.wait_stream(stream)
        with ThreadPoolExecutor(1) as thread:
            made = thread.submit(make_on_stream).result()
        stream.wait_stream(state_stream)
        return made


def _copies(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copies of a pack's tensors on a device, as state of their own."""
    return _lasting(device, lambda: {k: t.to(device, copy=True) for k, t in tensors.items()})


class DelayedSlots:
    """The slots of one module under one recipe: consecutive columns of a pack.

    A tensor has one, or as many in a row as it has parts with a scale each: its width.
    """

    def __init__(
        self, recipe: DelayedScaling, group: ProcessGroup | None, *,
        fp8_dtypes: Sequence[torch.dtype], forward: Sequence[bool], device: torch.device,
        key: str = "", widths: Sequence[int] = (), parallel: Any = None,
    ) -> None:  # fmt: skip
        self.key = key  # names the module to other ranks
        self.fp8_dtypes, self.forward = tuple(fp8_dtypes), tuple(forward)
        self._lay_out(tuple(widths) or (1,) * len(fp8_dtypes))
        count = sum(self.widths)
        limits = self._by_column([torch.finfo(dtype).max for dtype in fp8_dtypes])
        # For each tensor: whether the host knows that all its slots have a scale.
        self.seeded = [False] * len(fp8_dtypes)
        self._asked: dict[int, Answer] = {}

        def new_tensors() -> dict[str, Tensor]:
            full = functools.partial(torch.full, dtype=torch.float32, device=device)
            return {
                "history": full((recipe.amax_history_len, count), 0.0),
                "amax": full((count,), NO_DATA),
                "factors": full((2, count), 1.0),
                "previous": full((2, count), 1.0),
                "seeded": torch.zeros(count, dtype=torch.bool, device=device),
                "steps": torch.zeros(count, dtype=torch.int32, device=device),
                "fp8_max": torch.tensor(limits, dtype=torch.float32, device=device),
                "forward": torch.tensor(self._by_column(forward), device=device),
            }

        self._adopt(ScalePack(recipe, group, _lasting(device, new_tensors), parallel), 0)

    def set_parallel(self, parallel: Any) -> None:
        """Have a pack of ``parallel``, a TensorParallel or None."""
        pack = self.pack
        if pack.parallel != parallel:
            tensors = _copies(self.tensors(), pack.factors.device)
            self._adopt(ScalePack(pack.recipe, pack.group, tensors, parallel), 0)

    def _adopt(self, pack: ScalePack, start: int) -> None:
        self.pack, self.start = pack, start
        for first, width in zip(self.column_starts, self.widths, strict=True):
            pack.widths[start + first] = width
        pack.members.append(weakref.ref(self))

    def _lay_out(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.column_starts = tuple(sum(widths[:index]) for index in range(len(widths)))

    def _by_column(self, values: Sequence[Any]) -> list[Any]:
        return [x for x, width in zip(values, self.widths, strict=True) for _ in range(width)]

    def columns_of(self, index: int, experts: range | None = None) -> range:
        """The columns of the pack that a tensor has, or those of some ``experts``' parts of it."""
        start = self.start + self.column_starts[index]
        columns = range(start, start + self.widths[index])
        return columns if experts is None else columns[experts.start : experts.stop]

    def _columns(self, index: int, experts: range | None) -> slice:
        """``columns_of`` as an index of the pack's tensors."""
        columns = self.columns_of(index, experts)
        return slice(columns.start, columns.stop)

    def _slot(self, index: int, experts: range | None) -> int | slice:
        """The same, of which a tensor without parts has one as a number."""
        if self.widths[index] == 1:
            return self.start + self.column_starts[index]
        return self._columns(index, experts)

    def is_seeded(self, index: int) -> bool:
        """Whether all slots of a tensor are known to have a scale; the host does not wait for it.

        Those of an expert without any rows so far have none.
        """
        if not self.seeded[index] and index in self._asked:
            answer = self._asked[index].get()
            if answer is not None:
                del self._asked[index]
                self.seeded[index] = answer
        return self.seeded[index]

    def tensors(self) -> dict[str, Tensor]:
        """This module's columns of the pack (views), and of the rows of ``factors``."""
        self.pack.forget_interrupted_backward()
        columns = slice(self.start, self.start + sum(self.widths))
        return {name: getattr(self.pack, name)[..., columns] for name in (*_TENSORS, *_ROWS)}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Take over values of ``tensors()``, in place; 1 over a scale without encode factor."""
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name].copy_(value)
        if "scale" in values and "encode" not in values:
            tensors["encode"].copy_(1.0 / tensors["scale"])
        self._keep_scales([bool(columns.all()) for columns in tensors["seeded"].split(self.widths)])

    def clear(self) -> None:
        """Forget all that was recorded, in place."""
        tensors = self.tensors()
        new = {"history": 0, "seeded": 0, "steps": 0, "factors": 1, "previous": 1, "amax": NO_DATA}
        for name, value in new.items():
            tensors[name].fill_(value)
        self._keep_scales([False] * len(self.seeded))

    def _set_first_scale(
        self, index: int, factors: Tensor, x: Tensor | Prologue | Groups, experts: range | None
    ) -> None:
        """Give a tensor's slots their first factors, or those of its experts that have rows."""
        pack, columns = self.pack, self._columns(index, experts)
        pack.first_scales.append((weakref.ref(self), index))
        if not isinstance(x, Groups):
            pack.set_factors(columns, factors.view(2, -1))
            self.seeded[index] = True
            return
        has_rows = x.has_rows()
        old = pack.factors[:, columns]
        pack.set_factors(columns, torch.where(has_rows, factors.view(2, -1), old), has_rows)
        is_captured = pack.factors.is_cuda and torch.cuda.is_current_stream_capturing()
        if index not in self._asked and not is_captured and has_data(has_rows):
            self._asked[index] = Answer(pack.has_scale()[columns].all())

    def _keep_scales(self, seeded: list[bool]) -> None:
        """Keep the scales that the slots have been given, whatever is interrupted."""
        self.seeded, self._asked = seeded, {}
        scales = self.pack.first_scales
        self.pack.first_scales = [(ref, i) for ref, i in scales if ref() is not self]
        self.pack.forget_live()

    def to(self, device: torch.device) -> None:
        """Move to another device, into a pack of its own; from the meta device the state is new."""
        pack = self.pack
        if pack.factors.device == device:
            return
        if pack.factors.is_meta:
            fresh = DelayedSlots(
                pack.recipe, pack.group, fp8_dtypes=self.fp8_dtypes, forward=self.forward,
                device=device, widths=self.widths,
            )  # fmt: skip
            self.seeded, tensors = fresh.seeded, fresh.tensors()
        else:
            tensors = _copies(self.tensors(), device)
        self._adopt(ScalePack(pack.recipe, pack.group, tensors, pack.parallel), 0)

    def __getstate__(self) -> dict[str, object]:
        tensors = {name: t.clone() for name, t in self.tensors().items() if name in _TENSORS}
        told = {name: getattr(self, name) for name in ("fp8_dtypes", "forward", "key")}
        told |= {"seeded": list(self.seeded), "widths": self.widths}
        return {"recipe": self.pack.recipe, **told, "tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("fp8_dtypes", "forward", "key", "seeded"):
            setattr(self, name, state[name])
        self._asked = {}
        tensors: dict[str, Tensor] = state["tensors"]
        widths = tuple(state.get("widths") or (1,) * len(self.seeded))
        if len({*widths}) > 1:  # of before each expert had scales of its own
            experts = max(widths)
            tensors = {name: _of_each_expert(t, experts) for name, t in tensors.items()}
            widths = (experts,) * len(widths)
        self._lay_out(widths)
        if tensors["factors"].is_inference():
            tensors = _copies(tensors, tensors["factors"].device)
        self._adopt(ScalePack(state["recipe"], None, tensors, None), 0)

    def __deepcopy__(self, memo: dict[int, object]) -> DelayedSlots:
        copy = DelayedSlots.__new__(DelayedSlots)
        copy.__setstate__(self.__getstate__())
        copy.pack.group, copy.pack.parallel = self.pack.group, self.pack.parallel
        memo[id(self)] = copy
        return copy

    def known_params(
        self, *, record: bool, experts: range | None = None
    ) -> list[QuantParams | None]:
        """``scale_for`` of the forward's tensors, where it needs no look at them; else None."""
        for index in [*self._asked]:
            self.is_seeded(index)
        live = self.pack.live()
        return [
            self._params(index, live, record, experts) if forward and seeded else None
            for index, (forward, seeded) in enumerate(zip(self.forward, self.seeded, strict=True))
        ]

    def _params(
        self, index: int, live: Sequence[Any] | None, record: bool, experts: range | None
    ) -> QuantParams:
        """The factors of slots that have a scale; ``live`` is the pack's."""
        pack, slot = self.pack, self._slot(index, experts)
        amaxes = None
        if record:  # taking a single one from the list takes the least time
            amaxes = pack.amaxes[slot] if isinstance(slot, int) else pack.amax[slot]
        if live is None:
            factors = Factors.of(pack.factors[:, slot].clone())
        elif isinstance(slot, slice):
            start = self.columns_of(index).start
            pairs = live[2 * start].view(-1, 2, 1, 1)
            factors = Factors(*pairs[slot.start - start : slot.stop - start].unbind(1))
        else:
            factors = Factors(live[2 * slot], live[2 * slot + 1])
        return QuantParams(factors, amaxes, "encode")

    def scale_for(
        self, index: int, x: Tensor | Prologue | Groups, *, record: bool,
        is_empty_everywhere: bool = True, experts: range | None = None,
    ) -> QuantParams:  # fmt: skip
        """Factors to cast ``x`` with, and the slot to record its amax in (None: do not record).

        ``is_empty_everywhere``: whether the unsharded tensor is empty, too, if ``x`` is; if it is
        not, the first scale is kept all the same. ``experts``: which of the module's experts ``x``
        has.
        """
        if record and not self.forward[index]:
            self.pack.watch_backward()
        if not self.is_seeded(index):
            first = self._first_params(index, x, record, is_empty_everywhere, experts)
            if first is not None:
                return first
        return self._params(index, self.pack.live(), record, experts)

    @_disable_current_modes()  # of selective checkpointing: no recomputation makes scales
    def _first_params(
        self, index: int, x: Tensor | Prologue | Groups, record: bool, is_empty_everywhere: bool,
        experts: range | None,
    ) -> QuantParams | None:  # fmt: skip
        """``scale_for`` without history: this tensor's own scale, which is kept if it may be.

        None if all slots have one now.
        """
        pack, slot = self.pack, self._slot(index, experts)
        values = x if isinstance(x, Tensor) else x.inputs[0]
        # A prologue, or groups, are computed for their values, unless they are empty.
        initial = self._own_factors(index, x if values.numel() else values)
        # Not if another rank has used this module before: then its amaxes have made a scale;
        # nor if a CUDA graph has.
        initial = torch.where(pack.has_scale()[slot], pack.factors[:, slot], initial)
        if record and (values.numel() or not is_empty_everywhere):
            self._set_first_scale(index, initial, x, experts)
        # Experts without rows so far have none to keep.
        if record and self.seeded[index]:
            return None
        return QuantParams(Factors.of(initial), pack.amax[slot] if record else None, "encode")

    def params_in_graph(
        self, index: int, x: Tensor | Prologue | Groups, *, record: bool, experts: range | None,
        recomputes: bool, shares_launch: bool,
    ) -> QuantParams:  # fmt: skip
        """``scale_for`` of a cast in a compiled graph: by the slots' encode factors themselves.

        In the scale's place are ``ScalePack.copy_factors``. What ``recomputes`` has the factors of
        the last forward, and amaxes for no update.
        """
        pack, slot = self.pack, self._slot(index, experts)
        start, previous = self.start + self.column_starts[index], recomputes and pack.advanced
        first = None
        if record and not (recomputes or self.forward[index]):
            pack.watch_backward()
        if not (recomputes or self.is_seeded(index)):
            first = self._first_params(index, x, record, True, experts)
        if first is not None:
            copied = _copied(torch.stack([factor.view(-1) for factor in first.factors]))
            return first._replace(factors=Factors(copied, first.factors.encode))
        key = start, experts, previous
        if key not in pack.views:
            with torch.inference_mode(False):  # training uses these views, too
                pair = (pack.previous if previous else pack.factors)[:, slot]
                pack.views[key] = Factors.of(pair).encode, pack.amax[slot]
        copied = pack.copy_factors(slot, start, previous=previous, shares_launch=shares_launch)
        encode, amaxes = pack.views[key]
        if recomputes:
            amaxes = torch.full_like(amaxes, NO_DATA)
        amax_slot = amaxes if record or recomputes else None
        return QuantParams(Factors(copied, encode), amax_slot, "encode")

    def observe(self, index: int, x: Tensor | Groups, experts: range | None = None) -> None:
        """Record the amax of ``x`` without casting it (calibration)."""
        if (x if isinstance(x, Tensor) else x.inputs[0]).numel() == 0:
            return
        if not self.is_seeded(index):
            self._first_params(index, x, True, True, experts)
        amax = own_amax(x).view(-1)
        if isinstance(x, Groups):
            amax = torch.where(x.has_rows(), amax, NO_DATA)
        slot = self.pack.amax[self._columns(index, experts)]
        slot.copy_(torch.maximum(slot, amax))

    def _own_factors(self, index: int, x: Tensor | Prologue | Groups) -> Tensor:
        """The first factors, of ``x`` itself; a collective if tensor-parallel ranks share it."""
        recipe = self.pack.recipe
        rule, amax = "pow2" if recipe.power_of_2_scale else "fp32", own_amax(x)
        if self.pack.parallel is not None:
            amax = self.pack.parallel.amax(amax)
        scale, encode = ops.factors_from_amax(amax, self.fp8_dtypes[index], rule)
        margin = 2.0**recipe.margin
        factors = torch.stack((scale.view(-1) * margin, encode.view(-1) / margin))
        return factors if self.widths[index] > 1 else factors.view(2)

    def fitted(self, value: Tensor) -> Tensor:
        """A value of ``tensors()`` as these slots have it.

        Before each expert had scales of its own, all had those of one input and one gradient.
        """
        experts = self.widths[0]
        return _of_each_expert(value, experts) if value.shape[-1:] == (experts + 2,) else value


def _of_each_expert(value: Tensor, experts: int) -> Tensor:
    """Repeat the columns of one input and of one gradient for each expert; weights have theirs."""
    x, w, dy = value.split((1, experts, 1), dim=-1)
    return torch.cat((x.expand_as(w), w, dy.expand_as(w)), dim=-1)


class Answer:
    """Whether a number of a device is other than 0, which the host reads once it has arrived."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._arrived: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))

    def wait(self) -> bool:
        """The answer, for which the host waits."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._value)

    def get(self) -> bool | None:
        """The answer; None if it has not arrived."""
        # A graph that is being captured allows no question about an event.
        is_capturing = self._arrived is not None and torch.cuda.is_current_stream_capturing()
        if self._arrived is not None and (is_capturing or not self._arrived.query()):
            return None
        return bool(self._value)


def own_amax(x: Tensor | Prologue | Groups) -> Tensor:
    """The amax of what this rank has of a tensor: of each matrix, if it is a batch."""
    if not isinstance(x, Tensor):
        return x.amax()
    return amax_of_batch(x) if x.ndim == 3 else ops.amax_op("", (x,), x.dtype)


def merge_packs(packs: Iterable[ScalePack]) -> list[ScalePack]:
    """Lay the slots of packs of one recipe, groups and device side by side, in one pack for each.

    A pack whose addresses a CUDA graph has recorded stays as it is.
    """
    batches: dict[tuple[object, ...], list[ScalePack]] = {}
    for pack in packs:
        alone = pack if pack.is_recorded() else None
        kind = (pack.recipe, pack.group, pack.parallel, pack.factors.device, alone)
        batches.setdefault(kind, []).append(pack)
    return [_merge(batch) if len(batch) > 1 else batch[0] for batch in batches.values()]


@_disable_current_modes()
def _merge(packs: Sequence[ScalePack]) -> ScalePack:
    members = [member for pack in packs for member in pack.slots()]
    columns = [member.tensors() for member in members]
    tensors = _lasting(
        packs[0].factors.device,
        lambda: {name: torch.cat([c[name] for c in columns], dim=-1) for name in _TENSORS},
    )
    merged = ScalePack(packs[0].recipe, packs[0].group, tensors, packs[0].parallel)
    merged.keeps_previous = any(pack.keeps_previous for pack in packs)
    start = 0
    for member in members:
        member._adopt(merged, start)
        start += sum(member.widths)
    return merged
