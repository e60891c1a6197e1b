"""A weight that FSDP2 has sharded: where this rank's rows lie in it, and its scales.

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
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from float8lab.arguments import check_instance, check_shape, check_tensor
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import Float8Spec
from float8lab.ops import amax_op, cast_many_op, factors_from_amax, round_up
from float8lab.ops.grouped import amaxes_of_blocks, matrices_of_blocks
from float8lab.recipes.delayed import Factors, QuantParams
from float8lab.recipes.reduction import AmaxChannel, amax_over_ranks, channel
from float8lab.recipes.region import in_backward
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import block_amax, dequantize_blocks, expand_scale
from float8lab.tensor.dtensor import local_of
from float8lab.tensor.operands import quantize

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = [
    "RowShard", "ShardedWeight", "WeightCast", "cast_rows", "reduced_amaxes", "requantize_shards_",
    "row_shard_of", "shard_mesh",
]  # fmt: skip

_ALIGNED = 4
"""Floats. A GEMM on a GPU copies scales that do not begin at a multiple of 16 bytes."""


def shard_mesh(parameter: DTensor, tp_dims: int = 0) -> DeviceMesh:
    """The ranks that FSDP2 shards a parameter for, with or without hybrid sharding.

    ``tp_dims``: how many dimensions of the mesh are those of tensor parallelism; they come last.
    """
    mesh = parameter.device_mesh
    return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1 - tp_dims]]


class RowShard(NamedTuple):
    """The rows of a weight ``[N, K]`` that are a rank's shard, and their blocks.

    Of the weights of several experts, ``[E, N, K]`` in blocks of one expert each, they are experts.
    Under tensor parallelism the weight is itself a shard, of rows or columns, of a larger one.
    """

    spec: Float8Spec  # the format, blocks and scale rule of the unsharded weight
    shape: tuple[int, ...]  # the shape of the unsharded weight
    blocks: tuple[int, ...]  # the shape of the weight's scales
    numbers: int  # floats from these scales to the next weight's, so that all are aligned
    rows: ShardMap  # of the weight
    padding: int  # rows that the shard sends besides, where the shards of other ranks have more
    segments: tuple[tuple[slice, slice], ...]
    """Segments of the shard's rows within the weight's blocks, each with its block rows.

    A shard that starts inside a block has two: the rest of that block, and what follows.
    """
    mesh: DeviceMesh  # the ranks that have shards
    group: ProcessGroup | None = None
    """The ranks that hold shards of the same blocks by tensor parallelism."""

    @staticmethod
    def of(
        spec: Float8Spec, shape: Sequence[int], mesh: DeviceMesh, group: ProcessGroup | None = None
    ) -> RowShard:
        """The row shard of a weight that is cut for the ranks of ``mesh``."""
        N = shape[0]
        rows = ShardMap.of(N, mesh.size(), mesh.get_local_rank())
        start, length = rows.start, rows.length
        size = N if spec.block[0] == -1 else spec.block[0]
        head = 0 if spec.block[0] == -1 else min(length, -start % size)
        segments = tuple(
            (slice(begin, stop), slice((start + begin) // size, -(-(start + stop) // size)))
            for begin, stop in ((0, head), (head, length))
            if begin < stop
        )
        blocks = spec.scale_shape(tuple(shape))
        numbers = round_up(math.prod(blocks), _ALIGNED)
        padding = rows.chunk - length
        return RowShard(spec, tuple(shape), blocks, numbers, rows, padding, segments, mesh, group)

    def block_rows(self, size: int, device: torch.device) -> slice | Tensor:
        """The weight's block rows in which the shard's blocks, of ``size`` rows each, begin."""
        if size == -1:
            return slice(0, 1)
        start, count = self.rows.start, -(-self.rows.length // size)
        if size == self.spec.block[0] and start % size == 0:
            return slice(start // size, start // size + count)
        return (torch.arange(count, device=device) * size + start) // self.spec.block[0]


def row_shard_of(parameter: Tensor) -> RowShard:
    """The row shard of a sharded parameter that is stored in FP8."""
    local = cast(Float8Tensor, local_of(parameter))
    weight: ShardedWeight | None = getattr(local, "weight", None)
    if weight is not None:
        return weight.row_shard
    return RowShard.of(local.spec, parameter.shape, shard_mesh(cast("DTensor", parameter)))


_Rule = tuple[torch.dtype, str, float, float]
_Shards = Sequence[Tensor | None]


class WeightCast(NamedTuple):
    """How a weight in high precision is cast for the all-gather."""

    spec: Float8Spec
    amax_epsilon: float = 0.0
    """Amaxes are raised to at least this."""
    headroom: float = 1.0
    """The scales are multiplied by this (``2 ** margin`` of a delayed recipe)."""


class ShardedWeight:
    """A sharded weight, as one rank knows it, whichever tensor holds the shard.

    Args:
        row_shard: where the shard lies in the weight.
        cast: how the weight is cast for the all-gather; None: it is stored in FP8. Blocks of such
            a weight have scales already; those of a block that several ranks hold parts of, such as
            the one block of a weight scaled as a whole, can differ after the ranks wrote to their
            parts. So the block gets the largest, and bytes with another scale are requantized.
    """

    shard: weakref.ref[Tensor]  # the local tensor of the sharded parameter
    scale: Tensor  # decode scales of the unsharded weight, since the last reduction
    factor: Tensor  # the factors that a cast takes for these scales
    amax: Tensor  # the amaxes from which they were made

    def __init__(self, row_shard: RowShard, cast: WeightCast | None = None) -> None:
        self.row_shard = row_shard
        # Weights with equal rules get scales from amaxes by the same function.
        spec = row_shard.spec
        self.rule: _Rule | None = None
        if cast is not None:
            self.rule = spec.fp8_dtype, spec.scale_rule, cast.amax_epsilon, cast.headroom
        self.version: int | None = None  # the shard's, at the last reduction
        self.batch: _Batch | None = None
        self.index = 0  # in the batch

    def prepare(self, shard: Tensor, mesh: DeviceMesh) -> None:
        """Have the scales of an all-gather that begins, by a reduction over ranks if one is due."""
        batch, backward = self.batch, in_backward()
        members: list[ShardedWeight] = []
        shards: list[Tensor | None] = []
        if batch is None:
            ranks = channel(mesh.get_group())
            batch = self.batch = ranks.filling = ranks.filling or _Batch(ranks)
            self.index = len(batch.members)
            batch.members.append(self)
            members, shards = [self], [shard]
        elif not backward and (self.index <= batch.latest or self.version != _version(shard)):
            if batch.channel.filling is batch:
                batch.channel.filling = None  # complete: what comes later is another's
            batch.latest = -1
            members, shards = batch.members, [member.shard() for member in batch.members]
        if members:
            _set_scales(members, shards, shard.device, mesh)
            for member, member_shard in zip(members, shards, strict=True):
                member.version = None if member_shard is None else _version(member_shard)
        batch.latest = sys.maxsize if backward else max(batch.latest, self.index)


class _Batch:
    """Weights whose amaxes are reduced together, in the order of their first gather."""

    def __init__(self, channel: AmaxChannel) -> None:
        self.channel = channel  # where it is until it is complete
        self.members: list[ShardedWeight] = []
        self.latest = -1  # index of the last one gathered since; in backward: beyond all indices


def _version(shard: Any) -> int | None:
    """A value that changes with every change of the weight by an op on all of it."""
    counted: Tensor = shard.qdata if isinstance(shard, Float8Tensor) else shard.owner
    return None if counted.is_inference() else counted._version


def _set_scales(
    weights: Sequence[ShardedWeight], shards: _Shards, device: torch.device, mesh: DeviceMesh
) -> None:
    """Give weights the scales of their amaxes over all ranks: one all-reduce.

    Args:
        weights: in the same order on all ranks.
        shards: the rows of each that this rank has; None if they do not exist any more.
    """
    made: dict[_Rule | None, list[tuple[Tensor, ...]]] = {}
    with torch.inference_mode(False), torch.no_grad():
        flat, amaxes = reduced_amaxes([w.row_shard for w in weights], shards, device, mesh)
        sizes = [weight.row_shard.numbers for weight in weights]
        for i, (weight, amax) in enumerate(zip(weights, amaxes, strict=True)):
            weight.amax = amax
            # A scale of the whole tensor is made of the amaxes of this weight alone.
            if weight.rule is not None and weight.row_shard.spec.tensor_scale:
                weight.scale, weight.factor = factors_from_amax(amax, *weight.rule[:3])
                continue
            if weight.rule not in made:
                scale, factor = flat, flat
                if weight.rule is not None:
                    headroom = weight.rule[3]
                    scale, factor = factors_from_amax(flat, *weight.rule[:3])
                    if headroom != 1.0:
                        scale, factor = scale * headroom, factor / headroom
                made[weight.rule] = [scale.split(sizes), factor.split(sizes)]
            weight.scale, weight.factor = (
                floats[i][: amax.numel()].view(amax.shape) for floats in made[weight.rule]
            )


def reduced_amaxes(
    row_shards: Sequence[RowShard], shards: _Shards, device: torch.device, mesh: DeviceMesh
) -> tuple[Tensor, list[Tensor]]:
    """The amaxes of the blocks of unsharded weights, flat and of each weight: one all-reduce.

    The amax of a block that is stored in FP8 is the largest scale that a rank has for it.
    """
    sizes = [row_shard.numbers for row_shard in row_shards]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    amaxes = [
        floats[: math.prod(row_shard.blocks)].view(row_shard.blocks)
        for floats, row_shard in zip(flat.split(sizes), row_shards, strict=True)
    ]
    targets, values = [], []
    for amax, row_shard, shard in zip(amaxes, row_shards, shards, strict=True):
        if shard is not None:
            targets += [amax[blocks] for _, blocks in row_shard.segments]
            if shard.device != device:
                shard = shard.detach().to(device, non_blocking=True)
            values += _shard_amaxes(shard, row_shard)
    if targets:
        torch._foreach_copy_(targets, values)
    if mesh.size() > 1:
        amax_over_ranks(flat, mesh.get_group(), out=flat)
    groups: dict[ProcessGroup, list[Tensor]] = {}
    for amax, row_shard in zip(amaxes, row_shards, strict=True):
        if row_shard.group is not None:
            groups.setdefault(row_shard.group, []).append(amax)
    for group, local in groups.items():
        shared = amax_over_ranks(torch.cat([amax.flatten() for amax in local]), group)
        torch._foreach_copy_(local, _unflatten_dense_tensors(shared, local))
    return flat, amaxes


def _shard_amaxes(shard: Tensor, row_shard: RowShard) -> list[Tensor]:
    """The amaxes, or the largest scales, of the blocks of each segment of a shard."""
    block = row_shard.spec.block
    if isinstance(shard, Float8Tensor):
        is_one_segment = shard._window is None and len(row_shard.segments) == 1
        segments = [shard] if is_one_segment else [shard[rows] for rows, _ in row_shard.segments]
        return [_largest_scales(cast(Float8Tensor, segment), block) for segment in segments]
    if shard.ndim == 2:
        return [amax_op("", (shard[rows],), shard.dtype, block) for rows, _ in row_shard.segments]
    return [amaxes_of_blocks(shard[rows], block) for rows, _ in row_shard.segments]


def _largest_scales(rows: Float8Tensor, block: tuple[int, ...]) -> Tensor:
    if block[0] == 1 and rows.spec.block == tuple(block):
        return rows.scale  # no block is shared
    scale = expand_scale(rows.scale, (rows.spec.block[0], 1), rows.shape)
    return block_amax(scale.expand(rows.shape[0], -1), (block[0], 1))


@torch.no_grad()
def cast_rows(rows: Tensor, factor: Tensor, spec: Float8Spec) -> Tensor:
    """FP8 data of some rows of a shard; ``factor`` is their scales if they are stored in FP8."""
    given = "encode"
    if isinstance(rows, Float8Tensor):
        if not spec.rows_share_scales and rows.spec == spec:
            return rows.qdata  # no block is shared
        rows = dequantize_blocks(rows.qdata, rows.scale, rows.spec, torch.float32)
        given = "decode"
    params = QuantParams(Factors(None, factor), None, spec.rule_of(given))  # type: ignore[arg-type]
    if rows.ndim == 2:
        return quantize(rows, spec, None, params, align=1).rowwise.data
    (E, N, K), inner = rows.shape, replace(spec, block=spec.block[1:])  # of experts' weights
    if inner.per_tensor:
        return quantize(rows, inner, None, params).rowwise.data[:, :N, :K].contiguous()
    matrices = matrices_of_blocks(rows, spec.block)
    factors = factor.reshape(len(matrices), -1, factor.shape[-1])
    data = [cast_rows(w, encode, inner) for w, encode in zip(matrices, factors, strict=True)]
    return torch.stack(data).view(E, N, K)


class _Write(NamedTuple):
    """A shard stored in FP8 that is overwritten."""

    weight: ShardedWeight
    local: Float8Tensor
    value: Tensor


def requantize_shards_(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrite sharded parameters stored in FP8 as one process would overwrite unsharded ones.

    Blocks that several ranks hold parts of, such as the one block of a weight with one scale,
    get one scale: a collective, one all-reduce for each mesh.

    Args:
        parameters: DTensors of Float8Tensors, matrices sharded by rows as FSDP2 does; the same
            ones, in the same order, on all ranks.
        values: high-precision tensors, one for each parameter, of its local shape.

    Raises:
        TypeError: something else is given; nothing is written.
        ValueError: not as many values as parameters, or one of another shape.
    """
    for name, given in (("parameters", parameters), ("values", values)):
        check_instance(name, given, (list, tuple), "a list of tensors")
    if len(values) != len(parameters):
        raise ValueError(
            f"values must be as many as parameters, {len(parameters)}; got {len(values)}. Pass one "
            "for each."
        )
    meshes: dict[DeviceMesh, list[_Write]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        local = cast(Float8Tensor, getattr(parameter, "_local_tensor", None))
        check_instance("parameters", local, Float8Tensor, "DTensors of Float8Tensors")
        check_tensor("values", value)
        check_shape("values", value, local.shape, "Pass this rank's rows.")
        row_shard = row_shard_of(parameter)
        weight = ShardedWeight(row_shard, WeightCast(row_shard.spec))
        meshes.setdefault(row_shard.mesh, []).append(_Write(weight, local, value))
    with torch.no_grad():
        for mesh, writes in meshes.items():
            plain = [write.value for write in writes]
            _set_scales([write.weight for write in writes], plain, plain[0].device, mesh)
            _write(writes)


def _write(writes: Sequence[_Write]) -> None:
    """Cast by the scales of unsharded weights, one op for each kind of shard, and write them."""
    scales, amaxes = [x.scale for _, x, _ in writes], [x.amax for _, x, _ in writes]
    rows = [(w, w.row_shard.block_rows(x.spec.block[0], x.device)) for w, x, _ in writes]
    groups: dict[tuple[torch.dtype, Float8Spec], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for _, local, value in writes:
        groups.setdefault((value.dtype, local.spec), []).append((value, local.scale, local.qdata))
    # The encode factors go where the scales will be, since the op keeps its table of addresses for
    # memory that stays.
    torch._foreach_copy_(scales, [weight.factor[blocks] for weight, blocks in rows])
    for (_, spec), group in groups.items():
        values, encodes, data = (list(tensors) for tensors in zip(*group, strict=True))
        # Each block of the shard lies in one block of the weight, and has its factor by now.
        cast_many_op(values, data, spec.block, spec.rule_of("encode"), 0.0, [], [], encodes)
        torch.autograd.graph.increment_version(data)
    new = [weight.scale[blocks] for weight, blocks in rows]
    new += [weight.amax[blocks] for weight, blocks in rows]
    torch._foreach_copy_(scales + amaxes, new)
