"""Delayed scaling across ranks: one all-reduce for each process group and region.

The ranks of a process group need the same scales, so at the end of a region the amaxes recorded in
it are reduced to their maximum over ranks. Ranks may have used different modules, or none, in a
different order; all they share is the sequence of regions. So an ``AmaxChannel``, one per process
group, keeps the list of slots to send, the *wire*, in an order on which the ranks have agreed:

- All ranks identify a module by its ``key``: its name in the converted model, or else the number of
  FP8 modules created before it. Modules with the same key, such as copies, are distinguished by the
  order in which they were first used.
- The first number on the wire says whether a rank has used a module that is not on the wire. If so,
  the ranks exchange keys at the end of the next region, and all append the same keys. That number
  is read one region later, when it has long arrived, so no rank waits for it.
- The amaxes of such a module stay in its slots until it is on the wire. The first region of a
  channel, and the first call of a converted model, exchange keys at once.
- A rank that lacks a module on the wire sends ``NO_DATA`` for it; a rank that did not use its
  module in this region receives the amaxes that other ranks recorded.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.ops import NO_DATA
from float8lab.ops.declare import is_traced
from float8lab.recipes.delayed import Answer, DelayedSlots, ScalePack

__all__ = [
    "AmaxChannel", "amax_over_ranks", "channel", "group_named", "has_ranks", "includes_shards",
    "name_of_group", "reducing_group",
]  # fmt: skip

_Key = tuple[Any, ...]


class _Transfer(NamedTuple):
    """A pack, and the positions of its slots on the wire and in its own amaxes."""

    pack: ScalePack
    on_wire: Tensor | slice
    in_pack: Tensor | slice


class AmaxChannel:
    """The slots whose amaxes a process group reduces together.

    Attributes:
        filling: weights that FSDP2 gathers and that will be reduced together; belongs to
            ``distributed/fsdp``.
        within: for the name of another group, whether that group has all ranks of this one.
    """

    of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, AmaxChannel]] = WeakKeyDictionary()
    """The channel of each existing process group."""

    def __init__(self) -> None:
        self.filling: Any = None
        self.within: dict[str, bool] = {}
        self._wire: dict[_Key, int] = {}  # the agreed number of slots of each key, in order
        self._slots: WeakValueDictionary[_Key, DelayedSlots] = WeakValueDictionary()
        self._keys: WeakKeyDictionary[DelayedSlots, _Key] = WeakKeyDictionary()
        self._used: Counter[_Key] = Counter()
        self._news: Answer | None = None  # whether a rank used a module that is not on the wire
        self._positions: tuple[object, ...] = ()  # the slots for which ``_transfers`` were planned
        self._transfers: list[_Transfer] = []
        self._host: dist.ProcessGroup | None = None

    def host_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return a gloo group of the same ranks, which exchanges CPU tensors."""
        # The group is used for nothing else. If a rank waits here for a rank that has gone on to
        # exchange data, the wait fails at the group's timeout; the rank never mistakes that data
        # for the numbers that it waits for.
        if (host := self._host) is None:
            timeout = group._get_backend(group._device_types[0]).options._timeout
            ranks = dist.get_process_group_ranks(group)
            gloo_group = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
            host = self._host = cast("dist.ProcessGroup", gloo_group)
        return host

    def add(self, slots: DelayedSlots) -> None:
        """Add the slots of a module that was used."""
        if slots in self._keys:
            return
        base = (slots.key, repr(slots.pack.recipe), sum(slots.widths))
        # Deleted modules count, too, since each rank collects garbage at a different time.
        self._used[base] += 1
        self._keys[slots] = key = (*base, self._used[base])
        self._slots[key] = slots

    def waiting(self) -> list[DelayedSlots]:
        """Return the slots that are not on the wire yet."""
        return [slots for slots, key in self._keys.items() if key not in self._wire]

    @torch.inference_mode(False)  # training uses the kept tensors, too
    def reduce(self, group: dist.ProcessGroup, *, agree: bool = False) -> list[ScalePack]:
        """Take the maximum over ranks of all amaxes on the wire; return the packs that got any.

        This is a collective. It exchanges keys first if there are new modules, or with ``agree``.
        """
        if self._has_news() or agree:
            self._agree(group)
        # A deleted module has nothing to reduce, but keeps its positions on the wire.
        self._plan_transfers()
        packs = [transfer.pack for transfer in self._transfers]
        device = packs[0].amax.device if packs else torch.device("cpu")
        if not packs and torch.cuda.is_available() and "nccl" in dist.get_backend(group):
            device = torch.device("cuda", torch.cuda.current_device())
        length = 1 + sum(self._wire.values())
        wire = torch.full((length,), NO_DATA, dtype=torch.float32, device=device)
        wire[:1].fill_(len(self.waiting()))
        for pack, on_wire, in_pack in self._transfers:
            pack.forget_interrupted_backward()
            wire[on_wire] = pack.amax[in_pack].to(device)
        wire = amax_over_ranks(wire, group)
        for pack, on_wire, in_pack in self._transfers:
            pack.amax[in_pack] = wire[on_wire].to(pack.amax.device)
        if not (wire.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._news = Answer(wire[:1])
        return packs

    def _plan_transfers(self) -> None:
        """Find the positions on the wire of each local pack's slots, if any slots have moved."""
        columns: list[tuple[DelayedSlots, int]] = []
        offset = 1
        for key, count in self._wire.items():
            if (slots := self._slots.get(key)) is not None:
                columns.append((slots, offset))
            offset += count
        positions = tuple((slots.pack, slots.start, offset) for slots, offset in columns)
        if self._positions == positions:
            return
        indices: dict[ScalePack, tuple[list[int], list[int]]] = {}
        for slots, offset in columns:
            on_wire, in_pack = indices.setdefault(slots.pack, ([], []))
            width = sum(slots.widths)
            on_wire += range(offset, offset + width)
            in_pack += range(slots.start, slots.start + width)
        device = columns[0][0].pack.amax.device if columns else None
        self._positions = positions
        self._transfers = [
            _Transfer(pack, _indices(on_wire, device), _indices(in_pack, pack.amax.device))
            for pack, (on_wire, in_pack) in indices.items()
        ]

    def _has_news(self) -> bool:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # a CUDA graph cannot wait, and its replays could not exchange keys
        # In the channel's first region no rank has sent that number yet.
        return not self._wire if self._news is None else self._news.wait()

    def _agree(self, group: dist.ProcessGroup) -> None:
        local_keys = [self._keys[slots] for slots in self.waiting()]
        all_keys = [local_keys] * dist.get_world_size(group)
        dist.all_gather_object(all_keys, local_keys, group=group)
        for key in sorted({key for keys in all_keys for key in keys}):
            self._wire.setdefault(key, key[2])


def _indices(positions: list[int], device: torch.device | None) -> Tensor | slice:
    """Index elements of a vector; by a slice, which needs no kernel, if they are consecutive."""
    start = positions[0]
    if positions == list(range(start, start + len(positions))):
        return slice(start, start + len(positions))
    return torch.tensor(positions, device=device)


def amax_over_ranks(amax: Tensor, group: dist.ProcessGroup, *, out: Tensor | None = None) -> Tensor:
    """Return the maximum of amaxes over the ranks of a group, infinite where one of them is NaN.
    Outside compiled graphs the result is written to ``out``, if given."""
    # A maximum over ranks need not keep NaN; infinity has the same effect on a scale.
    amax = torch.nan_to_num(amax, nan=torch.inf, posinf=torch.inf, out=out)
    if is_traced():
        ops, name = torch.ops._c10d_functional, group.group_name
        return ops.wait_tensor(ops.all_reduce(amax, "max", name))
    if amax.device.type == "cpu" and amax.device not in group._device_types:  # a group of GPUs only
        group = channel(group).host_group(group)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def channel(group: dist.ProcessGroup) -> AmaxChannel:
    """Return the channel of a process group."""
    return AmaxChannel.of_groups.setdefault(group, AmaxChannel())


def has_ranks() -> bool:
    """Whether torch.distributed is initialized."""
    return dist.is_available() and dist.is_initialized()


def reducing_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the process group meant by ``group`` (None: the default), or None if it is trivial."""
    if not has_ranks() or dist.get_world_size(group) <= 1:  # -1 where this rank is not a member
        return None
    return dist.group.WORLD if group is None else group


def includes_shards(pack: ScalePack) -> bool:
    """Whether the reduction of a pack's amaxes includes all its tensor-parallel ranks."""
    group = reducing_group(pack.group) if pack.recipe.reduce_amax else None
    if group is None or pack.parallel.scale_groups:
        return False
    name, shards, ranks_of = group.group_name, pack.parallel.group, dist.get_process_group_ranks
    within = channel(shards).within
    if name not in within:
        within[name] = {*ranks_of(shards)} <= {*ranks_of(group)}
    return within[name]


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """Return the name of a process group, by which a compiled graph refers to it."""
    return "" if group is None else str(group.group_name)


def group_named(name: str) -> Any:
    """Return the process group of that name; None for an empty name."""
    return dist.distributed_c10d._resolve_process_group(name) if name else None  # type: ignore[arg-type]
