"""Delayed-scaling state: amax history and scale of every tensor that a module casts.

A *slot* is the state of one cast tensor, or of one expert's part of it: an amax accumulator, a
decode scale with its encode factor, and a column of the history. Casts multiply by the encode
factor. The scale is 1 / encode factor, from which the factor can be restored exactly only if it is
a power of two; a scale loaded without its encode factor gets 1 / scale. A ``DelayedSlots`` holds
one module's slots for one recipe. A ``ScalePack`` stores the slots of many modules side by side, so
that one launch advances them all (``reduction.py`` makes the ranks agree). Each ``DelayedSlots``
starts in a pack of its own; the first region that uses several packs merges them.

A rank that holds some of a module's experts has slots for all of them, so that a column means the
same on every rank; the slots of experts on other ranks record nothing. An expert gets its first
scale from its first rows, in whatever step they come; until all have one, casts compute amaxes.

Casts never read ``ScalePack.factors`` itself. They share a copy that is replaced at each update, so
tensors saved for backward or a recomputation keep the forward's factors. In a CUDA graph each cast
copies the factors inside the graph, since replays update them unseen; a pack recorded by a graph
keeps its tensors and is no longer merged. In a compiled graph a cast reads ``factors`` directly and
its result holds a copy that no other cast uses, since a compiler may overwrite it after its last
use. One launch makes the copies for all casts.

Amaxes recorded before an exception are discarded. A region tells its packs about an exception. An
interrupted backward pass tells them nothing: torch frees its graph task, which owns the callback
for the end of the pass, without calling it.
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
from float8lab.arguments import check_shape, has_data
from float8lab.formats import Spec
from float8lab.ops import NO_DATA, Groups, Prologue
from float8lab.ops.grouped import amax_of_batch
from float8lab.recipes.recipe import DelayedScaling
from float8lab.recipes.recording import NO_BACKWARD

__all__ = [
    "RECORDED", "Answer", "DelayedSlots", "Factors", "QuantParams", "ScalePack", "SlotFactors",
    "merge_packs", "own_amax",
]  # fmt: skip

_TENSORS = ("history", "amax", "factors", "previous", "seeded", "steps", "fp8_max", "forward")

_ROWS = ("scale", "encode")
"""The names of the two rows of ``factors``."""


class Factors(NamedTuple):
    """The decode scale and encode factor of a tensor, each ``[1]``; for experts ``[E, 1, 1]``."""

    scale: Tensor
    encode: Tensor

    @staticmethod
    def of(pair: Tensor) -> Factors:
        """Split the factors of one tensor, ``[2]`` or ``[2, width]``."""
        if pair.ndim == 1:
            return Factors(pair.narrow(0, 0, 1), pair.narrow(0, 1, 1))
        return Factors(*pair.view(2, -1, 1, 1).unbind())


class QuantParams(NamedTuple):
    """The quantization parameters of a cast: its factors, or amaxes from which it computes them."""

    factors: Factors
    """``rule`` says what ``encode`` holds; the operand gets ``scale`` as its decode scale."""
    amax_slot: Tensor | None = None
    """The slot in which delayed scaling records the amax; None: it is not recorded."""
    rule: str | None = None
    """The rule of the cast op. ``"encode"``: multiply by the encode factors. ``"decode"``: divide
    by the scales. A scale rule: compute scales from the amaxes of blocks. None: compute scales
    from the amax of the matrix, if all its blocks depend on that."""

    @staticmethod
    def of_amax(amax: Tensor, rule: str | None = None) -> QuantParams:
        """Make parameters from a matrix's amax or, with a scale rule, from its blocks' amaxes."""
        return QuantParams(Factors(None, amax), None, rule)  # type: ignore[arg-type]

    @staticmethod
    def of_scale(scale: Tensor, spec: Spec) -> QuantParams:
        """Make parameters from decode scales of blocks, whose encode factors are unknown."""
        return QuantParams(Factors(scale, scale), None, spec.rule_of("decode"))


SlotFactors = tuple[Tensor, Tensor, Tensor | None]
"""Decode scale, encode factor and amax slot of a cast in a compiled graph."""


def _aligned_copy(factors: Tensor) -> Tensor:
    """Copy ``[2, S]`` to columns 0 and 4 of ``[S, 8]``: cuBLASLt wants 16-byte aligned scales."""
    return factors.view(2, -1).t().unsqueeze(2).repeat(1, 1, 4).view(-1, 8)


class ScalePack:
    """The packed state of S slots with the same recipe, reduction group and device."""

    history: Tensor  # [H, S] float32, newest first
    amax: Tensor  # [S] float32, NO_DATA where nothing was recorded since the last update
    factors: Tensor  # [2, S] float32: decode scales, and the encode factors (scale = 1 / encode)
    previous: Tensor  # [2, S] float32: ``factors`` before the last update, if ``keeps_previous``
    seeded: Tensor  # [S] bool: the scale was computed from a tensor's own amax
    steps: Tensor  # [S] int32, updates that saw data; 0 means the scale was never set
    fp8_max: Tensor  # [S] float32, largest value of the slot's format
    forward: Tensor  # [S] bool: True for forward tensors (x, w), False for gradients

    def __init__(
        self, recipe: DelayedScaling, group: Any, tensors: dict[str, Tensor], parallel: Any
    ) -> None:
        self.recipe = recipe
        self.group = group
        self.parallel = parallel  # a TensorParallel, if its ranks cast shards of the same tensor
        for name in _TENSORS:
            setattr(self, name, tensors[name])
        self.members: list[weakref.ref[DelayedSlots]] = []
        self.widths: dict[int, int] = {}  # the number of slots of each tensor, by its first slot
        with torch.inference_mode(False):  # training uses these views, too
            self.amaxes: Sequence[Tensor] = self.amax.unbind()
            self.scale, self.encode = self.factors.unbind()
        self.advanced = False  # whether scales advanced since a compiled graph's last forward
        self.keeps_previous = False  # casts in compiled graphs may recompute with ``previous``
        # Slots that were given a first scale since the last update.
        self.first_scales: list[tuple[weakref.ref[DelayedSlots], int]] = []
        self._backward: weakref.ref[object] | None = None  # a backward that records and still runs
        self._copy: Tensor | None = None  # [S, 8]: a copy of the current ``factors``
        self._live: Any = None  # views of ``_copy``, each [1]: scales and encode factors
        self._recorded = False
        # Unused copies of ``factors`` and of ``previous``, by the first slot of their tensor.
        self._unused: list[dict[int, Tensor]] = [{}, {}]

    def live(self) -> Sequence[Any] | None:
        """Return the decode scale and encode factor of each slot; later updates leave them as is.

        For a tensor with several slots, the first slot's entry holds the factors of all of them and
        the other entries are None, since making each view takes time. Return None where a CUDA
        graph is recorded, since each cast then makes its own copy.
        """
        if self.is_recorded():
            return None
        if self._live is None:
            with _disable_current_modes():
                if (copy := self._copy) is None:
                    with torch.inference_mode(False):  # casts of training get views of it, too
                        copy = self._copy = _aligned_copy(self.factors)
                if len(self.widths) == copy.shape[0]:
                    self._live = copy.view(-1, 4).narrow(1, 0, 1).unbind()
                else:
                    widths, self._live = self.widths.values(), []
                    sizes = [n for w in widths for n in ((1, 1) if w == 1 else (2 * w,))]
                    for factors in copy.view(-1, 4).select(1, 0).split(sizes):
                        self._live += factors, *[None] * (factors.shape[0] - 1)
        return self._live

    def is_recorded(self) -> bool:
        """Return whether a CUDA graph has recorded, or is recording, the addresses of this pack."""
        if not self._recorded and self.factors.is_cuda:
            self._recorded = torch.cuda.is_current_stream_capturing()
        return self._recorded

    def slots(self) -> list[DelayedSlots]:
        """Return the ``DelayedSlots`` that still exist in this pack, in order."""
        return [m for ref in self.members if (m := ref()) and m.pack is self]

    def copy_factors(
        self, slots: int | slice, start: int, *, previous: bool, shares_launch: bool
    ) -> Tensor:
        """Copy consecutive slots as ``_aligned_copy`` does, for a single cast in a compiled graph.

        ``start`` is the first slot of the tensor; ``previous`` copies the factors from before the
        last update. With ``shares_launch``, one launch copies the factors of all tensors. A CUDA
        graph must not share it: the copies for other casts would outlive the graph in its memory.
        """
        source, unused = (self.factors, self.previous)[previous], self._unused[previous]
        if (rows := unused.pop(start, None) if shares_launch else None) is None:
            # If few tensors are cast many times, most copies stay unused. A third are gradients.
            if not shares_launch or 4 * len(unused) > 3 * len(self.widths):
                return _aligned_copy(source[:, slots])
            with torch.inference_mode(False):  # casts of training get some, too
                # An "unsafe" split gives each tensor a version counter of its own.
                tensors = _aligned_copy(source).unsafe_split_with_sizes([*self.widths.values()])
            self._unused[previous] = unused = dict(zip(self.widths, tensors, strict=True))
            rows = unused.pop(start)
        return rows if isinstance(slots, int) else rows[slots.start - start : slots.stop - start]

    def has_scale(self) -> Tensor:
        """Return ``[S]`` bool: whether the slot has a scale that was computed or set."""
        return self.seeded | (self.steps > 0)

    def forget_live(self) -> None:
        """Drop the copy of ``factors``, after they were written from outside."""
        self._copy = self._live = None
        self._unused = [{}, {}]

    @_disable_current_modes()  # selective checkpointing's mode: no recomputation advances scales
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
            has_amax = (self.amax >= 0) & (self.amax < torch.inf)
            due, old = has_amax & (self.steps % recipe.interval == 0), self.factors.clone()
        state = self.history, self.amax, self.factors, self.steps, self.fp8_max
        takes_newest = recipe.amax_compute_algo == "most_recent"
        options = recipe.margin, recipe.interval, takes_newest, recipe.power_of_2_scale
        copies = ops.update_scales_op(*state, *options)
        # With ``keeps_previous``, casts in compiled graphs copy the factors themselves. A shared
        # copy would lie in the memory of a CUDA graph, where torch allows only outputs to stay.
        self._copy = None if by_callables or self.keeps_previous else copies
        if by_callables:
            self._choose(due, old)

    def _choose(self, due: Tensor, old: Tensor) -> None:
        """Compute the factors of due slots with the user's functions, after ``update_scales_op``.

        Other slots, and slots for which the functions return no usable value, keep ``old``.
        """
        self.factors.copy_(old)  # a function may raise
        recipe, algo = self.recipe, self.recipe.amax_compute_algo
        chosen = self.history[0] if algo == "most_recent" else self.history.amax(0)
        if callable(algo):
            chosen = self._call("amax_compute_algo", self.history)
        encode = ops.encode_from_amax(chosen, self.fp8_max, power_of_2=recipe.power_of_2_scale)
        encode = encode * 2.0**-recipe.margin
        if recipe.scaling_factor_compute_algo is not None:
            encode = self._call("scaling_factor_compute_algo", chosen, old[1], self.fp8_max, recipe)
        usable = due & (chosen > 0) & (chosen < torch.inf) & (encode > 0) & (encode < torch.inf)
        self.factors.copy_(torch.where(usable, torch.stack((1.0 / encode, encode)), old))

    def _call(self, name: str, *arguments: object) -> Tensor:
        """Call a function of the recipe, which must return a value for each slot."""
        values = getattr(self.recipe, name)(*arguments)
        check_shape(f"the result of {name}", values, self.steps.shape, "Return one for each slot.")
        return values.float()

    def forget(self, *, gradients: bool) -> None:
        """Forget what gradients (else forward tensors) recorded since the last update."""
        self.amax.masked_fill_(~self.forward if gradients else self.forward, NO_DATA)
        first_scales, self.first_scales = self.first_scales, []
        columns: list[int] = []
        for reference, index in first_scales:
            if (slots := reference()) is None or slots.pack is not self:
                continue
            if slots.forward[index] == gradients:
                self.first_scales.append((reference, index))
                continue
            slots.seeded[index] = False
            slots._asked.pop(index, None)
            columns += range(self.amax.shape[0])[slots.columns_of(index)]
        if columns:
            self.seeded[columns] = False
            # A slot may have had a scale before, made from the amaxes of other ranks.
            was_updated, factors = self.steps[columns] > 0, self.factors[:, columns]
            self.factors[:, columns] = torch.where(was_updated, factors, 1.0)
            self.forget_live()

    def watch_backward(self) -> None:
        """Keep what this thread's backward pass records for gradients only if the pass succeeds.

        A pass nested in it, by a reentrant checkpoint, counts as a part of it.
        """
        if torch._C._current_graph_task_id() == NO_BACKWARD:
            return
        if self._backward is not None:
            if self._backward() is not None:
                return
            self.forget_interrupted_backward()

        # Torch calls this at the end of the pass, and frees it with the graph task if that raises.
        def ended() -> None:
            self._backward = None  # the recorded gradient amaxes stay

        self._backward = weakref.ref(ended)
        torch.autograd.Variable._execution_engine.queue_callback(ended)

    def forget_interrupted_backward(self) -> None:
        """Forget what gradients recorded if their backward pass was interrupted."""
        if self._backward is None:
            return
        if self._backward() is not None and torch._C._current_graph_task_id() != NO_BACKWARD:
            return  # the pass is still running
        self._backward = None
        self.forget(gradients=True)


class _Recorded(threading.local):
    """The packs that were recorded by CUDA graphs of this thread's compiled graphs."""

    def __init__(self) -> None:
        # Torch replays such a CUDA graph on the thread that recorded it.
        self.packs: weakref.WeakSet[ScalePack] = weakref.WeakSet()


RECORDED = _Recorded()


_T = TypeVar("_T")


def _allocate_state(device: torch.device, allocate: Callable[[], _T]) -> _T:
    """Call ``allocate``, which allocates state that outlives the current mode and graph.

    In inference mode the state would be inference tensors, which training may not write or save.
    While ``torch.compile`` prepares a CUDA graph, whatever this thread allocates belongs to that
    graph and is lost; so the call runs on a thread and a stream of its own.
    """
    with torch.inference_mode(False):
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return allocate()
        stream, state_stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)

        def allocate_on_stream() -> _T:
            with torch.cuda.device(device), torch.cuda.stream(state_stream):
                return allocate()

        state_stream.wait_stream(stream)
        with ThreadPoolExecutor(1) as thread:
            allocated = thread.submit(allocate_on_stream).result()
        stream.wait_stream(state_stream)
        return allocated


def _copy_tensors(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy a pack's tensors to a device, as independent state."""
    return _allocate_state(device, lambda: {k: t.to(device, copy=True) for k, t in tensors.items()})


class DelayedSlots:
    """The slots of one module under one recipe: consecutive columns of a pack.

    The *width* of a tensor is the number of its slots: one, or one for each expert.
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

        self._adopt(ScalePack(recipe, group, _allocate_state(device, new_tensors), parallel), 0)

    def set_parallel(self, parallel: Any) -> None:
        """Move to a new pack of ``parallel`` (a TensorParallel or None) if it has changed."""
        pack = self.pack
        if pack.parallel != parallel:
            tensors = _copy_tensors(self.tensors(), pack.factors.device)
            self._adopt(ScalePack(pack.recipe, pack.group, tensors, parallel), 0)

    def _adopt(self, pack: ScalePack, start: int) -> None:
        self.pack, self.start = pack, start
        # For casts in graphs, by tensor, experts, and whether with ``previous``: the slot, the
        # first slot of the tensor, and views of the encode factors and of the amaxes.
        self._views: dict[tuple[object, ...], tuple[int | slice, int, Tensor, Tensor]] = {}
        for first, width in zip(self.column_starts, self.widths, strict=True):
            pack.widths[start + first] = width
        pack.members.append(weakref.ref(self))

    def _lay_out(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.column_starts = tuple(sum(widths[:index]) for index in range(len(widths)))

    def _by_column(self, values: Sequence[Any]) -> list[Any]:
        return [x for x, width in zip(values, self.widths, strict=True) for _ in range(width)]

    def columns_of(self, index: int, experts: range | None = None) -> slice:
        """Return the pack's columns for a tensor, or for the given ``experts`` of it."""
        start = self.start + self.column_starts[index]
        columns = range(start, start + self.widths[index])
        columns = columns if experts is None else columns[experts.start : experts.stop]
        return slice(columns.start, columns.stop)

    def _slot(self, index: int, experts: range | None) -> int | slice:
        """Return ``columns_of`` as a number if the tensor has a single slot, else as a slice."""
        if self.widths[index] == 1:
            return self.start + self.column_starts[index]
        return self.columns_of(index, experts)

    def is_seeded(self, index: int) -> bool:
        """Return whether the host knows that all slots of a tensor have a scale; do not wait."""
        if not self.seeded[index] and index in self._asked:
            answer = self._asked[index].get()
            if answer is not None:
                del self._asked[index]
                self.seeded[index] = answer
        return self.seeded[index]

    def tensors(self) -> dict[str, Tensor]:
        """Return views of this module's columns in the pack, and of the two rows of ``factors``."""
        self.pack.forget_interrupted_backward()
        columns = slice(self.start, self.start + sum(self.widths))
        return {name: getattr(self.pack, name)[..., columns] for name in (*_TENSORS, *_ROWS)}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Copy values of ``tensors()`` in; a missing encode factor becomes 1 / scale."""
        tensors = self.tensors()
        for name, value in values.items():
            tensors[name].copy_(value)
        if "scale" in values and "encode" not in values:
            tensors["encode"].copy_(1.0 / tensors["scale"])
        self._keep_scales([bool(columns.all()) for columns in tensors["seeded"].split(self.widths)])

    def clear(self) -> None:
        """Reset the state in place to that of slots without any history."""
        tensors = self.tensors()
        new = {"history": 0, "seeded": 0, "steps": 0, "factors": 1, "previous": 1, "amax": NO_DATA}
        for name, value in new.items():
            tensors[name].fill_(value)
        self._keep_scales([False] * len(self.seeded))

    def _set_first_scale(
        self, index: int, factors: Tensor, x: Tensor | Prologue | Groups, experts: range | None
    ) -> None:
        """Set the first factors of a tensor's slots; for experts, of those that have rows."""
        pack, columns = self.pack, self.columns_of(index, experts)
        pack.first_scales.append((weakref.ref(self), index))
        old, new = pack.factors[:, columns], factors.view(2, -1)
        pack.forget_live()
        if not isinstance(x, Groups):
            old.copy_(new)
            pack.seeded[columns].fill_(True)
            self.seeded[index] = True
            return
        has_rows = x.has_rows()
        old.copy_(torch.where(has_rows, new, old))
        pack.seeded[columns].bitwise_or_(has_rows)
        is_captured = pack.factors.is_cuda and torch.cuda.is_current_stream_capturing()
        if index not in self._asked and not is_captured and has_data(has_rows):
            self._asked[index] = Answer(pack.has_scale()[columns].all())

    def _keep_scales(self, seeded: list[bool]) -> None:
        """Keep the scales just given to the slots, even if the region is interrupted."""
        self.seeded, self._asked = seeded, {}
        scales = self.pack.first_scales
        self.pack.first_scales = [(ref, i) for ref, i in scales if ref() is not self]
        self.pack.forget_live()

    def to(self, device: torch.device) -> None:
        """Move to a new pack on another device; coming from the meta device, reset the state."""
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
            tensors = _copy_tensors(self.tensors(), device)
        self._adopt(ScalePack(pack.recipe, pack.group, tensors, pack.parallel), 0)

    def __getstate__(self) -> dict[str, object]:
        tensors = {name: t.clone() for name, t in self.tensors().items() if name in _TENSORS}
        values = {name: getattr(self, name) for name in ("fp8_dtypes", "forward", "key", "widths")}
        values["seeded"] = list(self.seeded)
        self._pickled = tensors  # a process that starts opens their shared memory after this call
        return {"recipe": self.pack.recipe, **values, "tensors": tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name in ("fp8_dtypes", "forward", "key", "seeded"):
            setattr(self, name, state[name])
        self._asked = {}
        tensors: dict[str, Tensor] = state["tensors"]
        widths = tuple(state.get("widths") or (1,) * len(self.seeded))
        if len({*widths}) > 1:  # saved before each expert had scales of its own
            experts = max(widths)
            tensors = {name: _repeat_for_experts(t, experts) for name, t in tensors.items()}
            widths = (experts,) * len(widths)
        self._lay_out(widths)
        if tensors["factors"].is_inference():
            tensors = _copy_tensors(tensors, tensors["factors"].device)
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
        """Return ``scale_for`` of each forward tensor, or None where it must see the tensor."""
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
        """Return the parameters of slots that have a scale; ``live`` is ``ScalePack.live()``."""
        pack, slot = self.pack, self._slot(index, experts)
        amaxes = None
        if record:  # indexing the list is the fastest way to a single slot
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
        """Return the factors to cast ``x`` with, and its amax slot (None: do not record).

        ``is_empty_everywhere`` says whether an empty ``x`` is empty on all ranks; if it is not, the
        first scale is kept although ``x`` is empty. ``experts`` are the module's experts whose rows
        ``x`` holds.
        """
        if record and not self.forward[index]:
            self.pack.watch_backward()
        if not self.is_seeded(index):
            first = self._first_params(index, x, record, is_empty_everywhere, experts)
            if first is not None:
                return first
        return self._params(index, self.pack.live(), record, experts)

    @_disable_current_modes()  # selective checkpointing's mode: no recomputation makes scales
    def _first_params(
        self, index: int, x: Tensor | Prologue | Groups, record: bool, is_empty_everywhere: bool,
        experts: range | None,
    ) -> QuantParams | None:  # fmt: skip
        """Return ``scale_for`` of a tensor without history: its own scale, which may be kept.

        Return None if all its slots have a scale now.
        """
        pack, slot = self.pack, self._slot(index, experts)
        values = x if isinstance(x, Tensor) else x.inputs[0]
        # The values of a prologue, or of groups, are computed unless they are empty.
        initial = self._own_factors(index, x if values.numel() else values)
        # The slot may have a scale already: from the amaxes of another rank that used this module
        # before, or from a CUDA graph.
        initial = torch.where(pack.has_scale()[slot], pack.factors[:, slot], initial)
        if record and (values.numel() or not is_empty_everywhere):
            self._set_first_scale(index, initial, x, experts)
        # The slots of experts without rows so far have no scale to keep.
        if record and self.seeded[index]:
            return None
        return QuantParams(Factors.of(initial), pack.amax[slot] if record else None, "encode")

    def params_in_graph(
        self, index: int, x: Tensor | Prologue | Groups, *, record: bool, experts: range | None,
        recomputes: bool, shares_launch: bool,
    ) -> SlotFactors:  # fmt: skip
        """Return the factors and the slot of ``scale_for`` for a cast in a compiled graph.

        The scales are those of ``ScalePack.copy_factors``, and the encode factors are views. With
        ``recomputes``, the factors are those of the last forward, and the amaxes go to a tensor
        that no update reads.
        """
        pack = self.pack
        if record and not (recomputes or self.forward[index]):
            pack.watch_backward()
        if not (recomputes or self.seeded[index] or self.is_seeded(index)):
            first = self._first_params(index, x, record, True, experts)
            if first is not None:
                aligned = _aligned_copy(torch.stack([factor.view(-1) for factor in first.factors]))
                return aligned, first.factors.encode, first.amax_slot
        previous = recomputes and pack.advanced
        key = index, experts, previous
        if key not in self._views:
            slot = self._slot(index, experts)
            with torch.inference_mode(False):  # training uses these views, too
                encode = Factors.of((pack.previous if previous else pack.factors)[:, slot]).encode
                start = self.start + self.column_starts[index]
                self._views[key] = slot, start, encode, pack.amax[slot]
        slot, start, encode, amaxes = self._views[key]
        aligned = pack.copy_factors(slot, start, previous=previous, shares_launch=shares_launch)
        if recomputes:
            return aligned, encode, torch.full_like(amaxes, NO_DATA)
        return aligned, encode, amaxes if record else None

    def observe(self, index: int, x: Tensor | Groups, experts: range | None = None) -> None:
        """Record the amax of ``x`` without casting it (calibration)."""
        if (x if isinstance(x, Tensor) else x.inputs[0]).numel() == 0:
            return
        if not self.is_seeded(index):
            self._first_params(index, x, True, True, experts)
        amax = own_amax(x).view(-1)
        if isinstance(x, Groups):
            amax = torch.where(x.has_rows(), amax, NO_DATA)
        slot = self.pack.amax[self.columns_of(index, experts)]
        slot.copy_(torch.maximum(slot, amax))

    def _own_factors(self, index: int, x: Tensor | Prologue | Groups) -> Tensor:
        """Compute first factors from ``x``; a collective if tensor-parallel ranks share a scale."""
        recipe = self.pack.recipe
        rule, amax = "pow2" if recipe.power_of_2_scale else "fp32", own_amax(x)
        if self.pack.parallel is not None:
            amax = self.pack.parallel.amax(amax)
        scale, encode = ops.factors_from_amax(amax, self.fp8_dtypes[index], rule)
        margin = 2.0**recipe.margin
        factors = torch.stack((scale.view(-1) * margin, encode.view(-1) / margin))
        return factors if self.widths[index] > 1 else factors.view(2)

    def fitted(self, value: Tensor) -> Tensor:
        """Fit a saved value of ``tensors()`` to these slots.

        Formerly all experts shared the slot of one input and the slot of one gradient.
        """
        experts = self.widths[0]
        return _repeat_for_experts(value, experts) if value.shape[-1:] == (experts + 2,) else value


def _repeat_for_experts(value: Tensor, experts: int) -> Tensor:
    """Repeat the columns of the input and of the gradient for each expert, as weights have them."""
    x, w, dy = value.split((1, experts, 1), dim=-1)
    return torch.cat((x.expand_as(w), w, dy.expand_as(w)), dim=-1)


class Answer:
    """Whether a number on a device is nonzero; the host reads it once it has arrived."""

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._arrived: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty_like(value, device="cpu", pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(value.device))

    def wait(self) -> bool:
        """Wait for the answer and return it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return bool(self._value)

    def get(self) -> bool | None:
        """Return the answer, or None if it has not arrived."""
        # While a CUDA graph is captured, events may not be queried.
        is_capturing = self._arrived is not None and torch.cuda.is_current_stream_capturing()
        if self._arrived is not None and (is_capturing or not self._arrived.query()):
            return None
        return bool(self._value)


def own_amax(x: Tensor | Prologue | Groups) -> Tensor:
    """Return the amax of the local values of a tensor; for a batch, of each matrix."""
    if not isinstance(x, Tensor):
        return x.amax()
    return amax_of_batch(x) if x.ndim == 3 else ops.amax_op("", (x,), x.dtype)


def merge_packs(packs: Iterable[ScalePack]) -> list[ScalePack]:
    """Merge packs with the same recipe, group, TensorParallel and device into one pack each."""
    batches: dict[tuple[object, ...], list[ScalePack]] = {}
    for pack in packs:
        unmergeable = pack if pack.is_recorded() else None
        kind = (pack.recipe, pack.group, pack.parallel, pack.factors.device, unmergeable)
        batches.setdefault(kind, []).append(pack)
    return [_merge(batch) if len(batch) > 1 else batch[0] for batch in batches.values()]


@_disable_current_modes()
def _merge(packs: Sequence[ScalePack]) -> ScalePack:
    members = [member for pack in packs for member in pack.slots()]
    columns = [member.tensors() for member in members]
    tensors = _allocate_state(
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
