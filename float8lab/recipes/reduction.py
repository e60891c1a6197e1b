"""Delayed scaling across ranks: one all-reduce for each process group and region.

The ranks of a process group need the same scales, so a region ends with a maximum over ranks of the
amaxes recorded in it. Ranks may have used different modules, or none, and in another order; what
they share is the sequence of regions. So an ``AmaxChannel``, one for each process group, keeps the
list of slots that travel, the *wire*, in an order on which the ranks have agreed:

- A module is known to all ranks by its ``key``, which is its name in the model that was converted,
  or else the number of FP8 modules created before it. Modules of one key, such as copies, are told
  from each other by the order in which they were first used.
- The first number on the wire says whether a rank has used a module that is not on it. If so, the
  ranks exchange keys at the end of the next region, and all append the same ones. That number
  is read one region later, when it has long arrived, so no rank waits for it.
- Such a module's amaxes stay in its slots until it is on the wire. The first region of a channel,
  and the first call of a converted model, exchange keys at once.
- A rank without a module that is on the wire sends ``NO_DATA`` for it; one that did not use its
  module in this region receives what the others saw in it.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar, NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.ops import NO_DATA
from float8lab.recipes.delayed import Answer, DelayedSlots, ScalePack

__all__ = [
    "AmaxChannel", "amax_over_ranks", "channel", "group_named", "has_ranks", "includes_shards",
    "name_of_group", "reducing_group",
]  # fmt: skip

_Key = tuple[Any, ...]


class _Transfer(NamedTuple):
    """A pack, and the places of its slots on the wire and in its own amaxes."""

    pack: ScalePack
    on_wire: Tensor | slice
    in_pack: Tensor | slice


class AmaxChannel:
    """The slots whose amaxes a process group reduces together.

    Attributes:
        filling: weights that FSDP2 gathers, and that will be reduced together; belongs to
            ``distributed/fsdp``.
        within: by the name of another group, whether it has all ranks of this one.
    """

    of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, AmaxChannel]] = WeakKeyDictionary()
    """The channel of each process group that is alive."""

    def __init__(self) -> None:
        self.filling: Any = None
        self.within: dict[str, bool] = {}
        self._wire: dict[_Key, int] = {}  # agreed: number of slots of each key, in order
        self._known: WeakValueDictionary[_Key, DelayedSlots] = WeakValueDictionary()
        self._keys: WeakKeyDictionary[DelayedSlots, _Key] = WeakKeyDictionary()
        self._used: Counter[_Key] = Counter()
        self._news: Answer | None = None  # whether a rank used a module that is not on the wire
        self._columns: tuple[object, ...] = ()  # of the slots that ``_transfers`` are for
        self._transfers: list[_Transfer] = []
        self._host: dist.ProcessGroup | None = None

    def host_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A process group of the same ranks that exchanges tensors of the CPU."""
        # It carries nothing else: a rank that waits here for another, which has gone on to its
        # data, gets an error at the group's timeout, and never data that it takes for something
        # else.
        if (host := self._host) is None:
            timeout = group._get_backend(group._device_types[0]).options._timeout
            ranks = dist.get_process_group_ranks(group)
            made = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
            host = self._host = cast("dist.ProcessGroup", made)
        return host

    def add(self, slots: DelayedSlots) -> None:
        """Take in the slots of a module that was used."""
        if slots in self._keys:
            return
        base = (slots.key, repr(slots.pack.recipe), sum(slots.widths))
        # Deleted ones count, too: garbage is collected at another time on each rank.
        self._used[base] += 1
        self._keys[slots] = key = (*base, self._used[base])
        self._known[key] = slots

    def waiting(self) -> list[DelayedSlots]:
        """Slots that are not on the wire yet."""
        return [slots for slots, key in self._keys.items() if key not in self._wire]

    @torch.inference_mode(False)  # what it keeps is not for inference alone
    def reduce(self, group: dist.ProcessGroup, *, agree: bool = False) -> list[ScalePack]:
        """Maximum over ranks of every amax on the wire; returns this rank's packs that got any.

        It is a collective, and exchanges keys first if there is news, or if it is to ``agree``.
        """
        if self._has_news() or agree:
            self._agree(group)
        # Modules that were deleted leave nothing to reduce, but their place.
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
        """Find where the slots of each pack of this rank are on the wire, if any have moved."""
        columns: list[tuple[DelayedSlots, int]] = []
        offset = 1
        for key, count in self._wire.items():
            if (slots := self._known.get(key)) is not None:
                columns.append((slots, offset))
            offset += count
        now = tuple((slots.pack, slots.start, offset) for slots, offset in columns)
        if self._columns == now:
            return
        places: dict[ScalePack, tuple[list[int], list[int]]] = {}
        for slots, offset in columns:
            on_wire, in_pack = places.setdefault(slots.pack, ([], []))
            width = sum(slots.widths)
            on_wire += range(offset, offset + width)
            in_pack += range(slots.start, slots.start + width)
        device = columns[0][0].pack.amax.device if columns else None
        self._columns = now
        self._transfers = [
            _Transfer(pack, _indices(on_wire, device), _indices(in_pack, pack.amax.device))
            for pack, (on_wire, in_pack) in places.items()
        ]

    def _has_news(self) -> bool:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # a CUDA graph cannot wait, and its replays could not agree on anything
        # No news yet: the channel's first region.
        return not self._wire if self._news is None else self._news.wait()

    def _agree(self, group: dist.ProcessGroup) -> None:
        local_keys = [self._keys[slots] for slots in self.waiting()]
        all_keys = [local_keys] * dist.get_world_size(group)
        dist.all_gather_object(all_keys, local_keys, group=group)
        for key in sorted({key for keys in all_keys for key in keys}):
            self._wire.setdefault(key, key[2])


def _indices(places: list[int], device: torch.device | None) -> Tensor | slice:
    """Elements of a vector: a slice, which needs no kernel, where they follow each other."""
    start = places[0]
    if places == list(range(start, start + len(places))):
        return slice(start, start + len(places))
    return torch.tensor(places, device=device)


def amax_over_ranks(amax: Tensor, group: dist.ProcessGroup, *, out: Tensor | None = None) -> Tensor:
    """The maximum of amaxes over the ranks of a group, infinite where one of them is NaN.
    Outside compiled graphs it is written to ``out``, if that is given."""
    # A maximum over ranks need not keep NaN; to a scale infinity is the same.
    amax = torch.nan_to_num(amax, nan=torch.inf, posinf=torch.inf, out=out)
    if torch.compiler.is_compiling():
        ops, name = torch.ops._c10d_functional, group.group_name
        return ops.wait_tensor(ops.all_reduce(amax, "max", name))
    if amax.device.type == "cpu" and amax.device not in group._device_types:  # of GPUs alone
        group = channel(group).host_group(group)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def channel(group: dist.ProcessGroup) -> AmaxChannel:
    """The channel of a process group."""
    return AmaxChannel.of_groups.setdefault(group, AmaxChannel())


def has_ranks() -> bool:
    """Whether there are process groups at all."""
    return dist.is_available() and dist.is_initialized()


def reducing_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The process group meant by ``group`` (None: the default one); None: it reduces nothing."""
    if not has_ranks():
        return None
    group = dist.group.WORLD if group is None else group
    no_member: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is None or group is no_member or dist.get_world_size(group) == 1:
        return None
    return group


def includes_shards(pack: ScalePack) -> bool:
    """Whether the reduction of a pack's amaxes takes in all its tensor-parallel ranks."""
    group = reducing_group(pack.group) if pack.recipe.reduce_amax else None
    if group is None or pack.parallel.scale_groups:
        return False
    name, shards, ranks_of = group.group_name, pack.parallel.group, dist.get_process_group_ranks
    within = channel(shards).within
    if name not in within:
        within[name] = {*ranks_of(shards)} <= {*ranks_of(group)}
    return within[name]


def name_of_group(group: dist.ProcessGroup | None) -> str:
    """By which a compiled graph, which holds no objects, knows a process group."""
    return "" if group is None else str(group.group_name)


def group_named(name: str) -> Any:
    """The process group of that name; None for ""."""
    return dist.distributed_c10d._resolve_process_group(name) if name else None  # type: ignore[arg-type]
