"""Scales of sharded weights, which come from amaxes over all ranks.

*When amaxes are reduced.* The weights that were first gathered in one stretch form a *batch*. A
weight's first gather reduces its amaxes alone; from then on one all-reduce serves the batch. It is
due at a gather in forward when that weight, or one after it in the batch, was already gathered in a
forward since the last reduction, when one of the batch was gathered in a backward since then, or
when the weight's version changed. A gather in backward uses the scales of the forward. So a
training step has one reduction, with no call for the user to make, however the weights were
changed: torch's version counters alone would not do, fused optimizers do not raise them. And ranks
stay in lock step, because the rule looks only at what FSDP2 itself needs to be the same on all
ranks, the sequence of all-gathers, and at operations on the whole sharded weight. A weight that is
not gathered in a step, or that does not exist any more on some rank, keeps its place in the batch.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.distributed.fsdp.layout import Layout
from float8lab.formats import Float8Spec
from float8lab.ops import amax_op, cast_op, factors_from_amax
from float8lab.recipes.reduction import AmaxChannel, channel
from float8lab.recipes.region import in_backward
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import block_amax, dequantize_blocks, expand_scale

__all__ = [
    "ShardedWeight",
    "WeightCast",
    "cast_stored",
    "reduced_amaxes",
    "set_scales",
]


class WeightCast(NamedTuple):
    """How a weight in high precision is cast for the all-gather."""

    spec: Float8Spec
    amax_epsilon: float = 0.0
    """Amaxes are raised to at least this."""
    headroom: float = 1.0
    """The scales are multiplied by this (``2 ** margin`` of a delayed recipe)."""


class ShardedWeight:
    """What a rank knows of a weight that FSDP2 has sharded, whichever tensor holds its shard.

    Args:
        layout: where the shard lies in the weight.
        cast: how the weight is cast for the all-gather; None: it is stored in FP8. Blocks of such
            a weight have scales already; those of a block that several ranks hold parts of, such as
            the one block of a weight scaled as a whole, can differ after the ranks wrote to their
            parts. So the block gets the largest, and bytes with another scale are cast again.
    """

    def __init__(self, layout: Layout, cast: WeightCast | None = None) -> None:
        self.layout = layout
        # Weights with equal rules get scales from amaxes by the same function.
        spec = layout.spec
        self.rule = None if cast is None else (spec.fp8_dtype, spec.scale_rule, *cast[1:])
        self.version: int | None = None  # of the shard, at the last reduction
        self.batch: _Batch | None = None
        self.index = 0  # in the batch

    shard: weakref.ref[Any]
    """FSDP2's local tensor."""
    scale: Tensor
    """Decode scales of the whole weight since the last reduction."""
    factor: Tensor
    """What a cast takes for these scales."""
    amax: Tensor
    """The amaxes from which they were made."""

    def prepare(self, shard: Any, mesh: Any) -> None:
        """Have the scales of an all-gather that begins, by a reduction over ranks if one is due.

        Args:
            shard: the tensor that FSDP2 asks.
            mesh: the ranks that have shards.
        """
        batch, backward = self.batch, in_backward()
        members, shards = [self], [shard]
        if batch is None:
            batch = self.batch = _Batch.filling(mesh.get_group())
            self.index = len(batch.members)
            batch.members.append(self)
        elif not backward and (self.index <= batch.latest or self.version != _version(shard)):
            if batch.channel.filling is batch:
                batch.channel.filling = None  # what is gathered for the first time now is another's
            batch.latest = -1
            members, shards = batch.members, [member.shard() for member in batch.members]
        else:
            members = []
        if members:
            set_scales(members, shards, shard.device, mesh)
            for member, one in zip(members, shards, strict=True):
                member.version = None if one is None else _version(one)
        batch.latest = sys.maxsize if backward else max(batch.latest, self.index)


class _Batch:
    """Weights whose amaxes are reduced together, in the order of their first gather."""

    def __init__(self, channel: AmaxChannel) -> None:
        self.channel = channel
        self.members: list[ShardedWeight] = []
        self.latest = -1  # index of the last one gathered since; in backward: beyond all indices

    @staticmethod
    def filling(group: Any) -> _Batch:
        """The batch that a process group's next new weight joins; all ranks fill it in one order."""
        here = channel(group)
        if here.filling is None:
            here.filling = _Batch(here)
        batch: _Batch = here.filling
        return batch


def _version(shard: Any) -> int | None:
    """A value that changes with every change of the weight by an op on the whole of it."""
    counted = shard.qdata if isinstance(shard, Float8Tensor) else shard.owner
    return None if counted.is_inference() else counted._version


def set_scales(
    weights: Sequence[ShardedWeight],
    shards: Sequence[Tensor | None],
    device: torch.device,
    mesh: Any,
) -> None:
    """Give weights the scales of their amaxes over all ranks: one all-reduce.

    Args:
        weights: in the same order on all ranks.
        shards: the rows of each that this rank has; None if they do not exist any more.
        device: where the scales are.
        mesh: the ranks that have shards.
    """
    made: dict[Any, list[tuple[Tensor, ...]]] = {}
    with torch.inference_mode(False), torch.no_grad():
        every, amaxes = reduced_amaxes([w.layout for w in weights], shards, device, mesh)
        counts = [amax.numel() for amax in amaxes]
        for i, (weight, amax) in enumerate(zip(weights, amaxes, strict=True)):
            if weight.rule not in made:
                scale, factor = every, every
                if weight.rule is not None:
                    *how, headroom = weight.rule
                    scale, factor = factors_from_amax(every, *how)
                    if headroom != 1.0:
                        scale, factor = scale * headroom, factor / headroom
                made[weight.rule] = [scale.split(counts), factor.split(counts)]
            weight.scale, weight.factor = (one[i].view(amax.shape) for one in made[weight.rule])
            weight.amax = amax


def reduced_amaxes(
    layouts: Sequence[Layout], shards: Sequence[Tensor | None], device: torch.device, mesh: Any
) -> tuple[Tensor, list[Tensor]]:
    """The amaxes of the blocks of whole weights, in a row and by weight: one all-reduce."""
    counts = [math.prod(layout.blocks) for layout in layouts]
    every = torch.zeros(sum(counts), dtype=torch.float32, device=device)
    parts = zip(every.split(counts), layouts, strict=True)
    amaxes = [part.view(layout.blocks) for part, layout in parts]
    targets, values = [], []
    for amax, layout, shard in zip(amaxes, layouts, shards, strict=True):
        if shard is None:
            continue
        if shard.device != device:
            shard = shard.detach().to(device, non_blocking=True)
        stored = isinstance(shard, Float8Tensor)
        whole = stored and shard._window is None and len(layout.runs) == 1
        for rows, blocks in layout.runs:
            part = shard if whole else shard[rows]
            block = layout.spec.block
            targets.append(amax[blocks])
            values.append(_largest_scales(part, block) if stored else amax_op(part, block))
    if targets:
        torch._foreach_copy_(targets, values)
    if mesh.size() > 1:
        # A maximum over ranks need not keep NaN; inf gives the same scale.
        every.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(every, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return every, amaxes


def _largest_scales(rows: Float8Tensor, block: tuple[int, ...]) -> Tensor:
    """The largest scale in each block of the weight, of some rows of a shard stored in FP8."""
    scale = expand_scale(rows.scale, (rows.spec.block[0], 1), rows.shape)
    return block_amax(scale.expand(rows.shape[0], -1), (block[0], 1))


def cast_stored(rows: Float8Tensor, factor: Tensor, spec: Float8Spec) -> Tensor:
    """FP8 data with the scales ``factor``, of some rows of a shard that is stored in FP8."""
    if spec.block[0] == 1 and rows.spec == spec:
        return rows.qdata  # no block is shared
    values = dequantize_blocks(rows.qdata, rows.scale, rows.spec, torch.float32)
    return cast_op(values, factor, None, spec.fp8_dtype, spec.block, 1, True)
