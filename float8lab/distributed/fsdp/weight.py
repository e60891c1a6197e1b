"""A weight that FSDP2 has sharded: the position of this rank's rows in it, and its scales.

*When amaxes are reduced.* Weights that are first gathered one after the other form a *batch*. The
first gather of a weight reduces only its amaxes; from then on one all-reduce serves the batch. A
gather in forward needs a reduction in three cases: that weight, or one after it in the batch, has
been gathered in a forward since the last reduction; one of the batch has been gathered in a
backward since then; the weight's version has changed. A gather in backward uses the scales of the
forward. So a training step has one reduction without any call by the user, however the weights were
changed: version counters would not suffice, as fused optimizers do not increase them. Ranks stay in
step, since the rule depends only on what FSDP2 needs to be equal on all ranks, the sequence of
all-gathers, and on operations on the unsharded weight. A weight that is not gathered in a step, or
no longer exists on some rank, keeps its position in the batch.
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

from float8lab.arguments import check_instance, check_shape
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import Float8Spec
from float8lab.ops import cast_many_op, factors_from_amax, round_up
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
"""Number of floats. A GEMM on a GPU copies scales that are not aligned to 16 bytes."""


def shard_mesh(parameter: DTensor, tp_dims: int = 0) -> DeviceMesh:
    """Return the ranks for which FSDP2 shards a parameter, with or without hybrid sharding.

    ``tp_dims``: the number of mesh dimensions of tensor parallelism; they come last.
    """
    mesh = parameter.device_mesh
    return mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1 - tp_dims]]


class RowShard(NamedTuple):
    """The rows of a weight ``[N, K]`` that are a rank's shard, and their blocks.

    For ``[E, N, K]``, weights of experts with blocks of one expert each, the rows are experts.
    Under tensor parallelism the weight is itself a shard, of rows or columns, of a larger weight.
    """

    spec: Float8Spec  # the format, blocks and scale rule of the unsharded weight
    shape: tuple[int, ...]  # the shape of the unsharded weight
    blocks: tuple[int, ...]  # the shape of the weight's scales
    numbers: int  # floats from these scales to the next weight's, so that all are aligned
    rows: ShardMap  # the shard of the weight's rows
    padding: int  # rows that are sent in addition, if the shards of other ranks have more
    segments: tuple[tuple[slice, slice], ...]
    """Segments of the shard's rows within the weight's blocks, each with its block rows.

    A shard that starts inside a block has two: the remainder of that block, and the other rows.
    """
    mesh: DeviceMesh  # the ranks that have shards
    group: ProcessGroup | None = None
    """The tensor-parallel ranks that hold shards of the same blocks."""

    @staticmethod
    def of(
        spec: Float8Spec, shape: Sequence[int], mesh: DeviceMesh, group: ProcessGroup | None = None
    ) -> RowShard:
        """Return the row shard of a weight that is cut for the ranks of ``mesh``."""
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
        """Return the weight's block rows in which the shard's blocks of ``size`` rows begin."""
        if size == -1:
            return slice(0, 1)
        start, count = self.rows.start, -(-self.rows.length // size)
        if size == self.spec.block[0] and start % size == 0:
            return slice(start // size, start // size + count)
        return (torch.arange(count, device=device) * size + start) // self.spec.block[0]


def row_shard_of(parameter: Tensor) -> RowShard:
    """Return the row shard of a sharded parameter that is stored in FP8."""
    local = cast(Float8Tensor, local_of(parameter))
    weight: ShardedWeight | None = getattr(local, "weight", None)
    if weight is not None:
        return weight.row_shard
    return RowShard.of(local.spec, parameter.shape, shard_mesh(cast("DTensor", parameter)))


_Rule = tuple[torch.dtype, str, float, float]
_Shards = Sequence[Tensor | None]


class WeightCast(NamedTuple):
    """The cast of a high-precision weight for the all-gather."""

    spec: Float8Spec
    amax_epsilon: float = 0.0
    """Smaller amaxes are raised to this value."""
    headroom: float = 1.0
    """The scales are multiplied by this (``2 ** margin`` of a delayed recipe)."""


class ShardedWeight:
    """A sharded weight from the view of one rank, whichever tensor holds the shard.

    Args:
        row_shard: the position of the shard in the weight.
        cast: the cast of the weight for the all-gather; None if it is stored in FP8. Then its
            blocks have scales already. Ranks that hold parts of the same block, such as the only
            block of a per-tensor weight, may have different scales for it after they have written
            to their parts. The block gets the largest scale, and bytes with others are requantized.
    """

    shard: weakref.ref[Tensor]  # the local tensor of the sharded parameter
    scale: Tensor  # decode scales of the unsharded weight, from the last reduction
    factor: Tensor  # the factors by which a cast with these scales multiplies or divides
    amax: Tensor  # the amaxes from which the scales were computed

    def __init__(self, row_shard: RowShard, cast: WeightCast | None = None) -> None:
        self.row_shard = row_shard
        # Weights with equal rules get scales from amaxes by the same function.
        spec = row_shard.spec
        self.rule: _Rule | None = None
        if cast is not None:
            self.rule = spec.fp8_dtype, spec.scale_rule, cast.amax_epsilon, cast.headroom
        self.version: int | None = None  # the shard's version at the last reduction
        self.batch: _Batch | None = None
        self.index = 0  # the position in the batch

    def prepare(self, shard: Tensor, mesh: DeviceMesh) -> None:
        """Set the scales for an all-gather that begins; reduce amaxes over ranks if necessary."""
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
                batch.channel.filling = None  # this batch is complete: later weights join another
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
        self.channel = channel  # ``channel.filling`` is this batch until it is complete
        self.members: list[ShardedWeight] = []
        self.latest = -1  # largest index gathered since the reduction; in backward: above all


def _version(shard: Any) -> int | None:
    """Return a number that changes with every op on the unsharded weight that changes it."""
    counted: Tensor = shard.qdata if isinstance(shard, Float8Tensor) else shard.owner
    return None if counted.is_inference() else counted._version


def _set_scales(
    weights: Sequence[ShardedWeight], shards: _Shards, device: torch.device, mesh: DeviceMesh
) -> None:
    """Set the scales of weights from their amaxes over all ranks, with one all-reduce.

    Args:
        weights: in the same order on all ranks.
        shards: this rank's rows of each weight; None for a weight that no longer exists.
    """
    scales: dict[_Rule | None, tuple[Tensor, Tensor]] = {}
    with torch.inference_mode(False), torch.no_grad():
        flat, amaxes = reduced_amaxes([w.row_shard for w in weights], shards, device, mesh)
        for weight, amax in zip(weights, amaxes, strict=True):
            weight.amax = amax
            # A tensor scale is computed only from the amaxes of this weight.
            if weight.rule is not None and weight.row_shard.spec.tensor_scale:
                weight.scale, weight.factor = factors_from_amax(amax, *weight.rule[:3])
                continue
            if weight.rule not in scales:
                scale, factor = flat, flat
                if weight.rule is not None:
                    headroom = weight.rule[3]
                    scale, factor = factors_from_amax(flat, *weight.rule[:3])
                    if headroom != 1.0:
                        scale, factor = scale * headroom, factor / headroom
                scales[weight.rule] = scale, factor
            place = amax.shape, amax.stride(), amax.storage_offset()  # these are equal in all three
            weight.scale, weight.factor = (x.as_strided(*place) for x in scales[weight.rule])


def reduced_amaxes(
    row_shards: Sequence[RowShard], shards: _Shards, device: torch.device, mesh: DeviceMesh
) -> tuple[Tensor, list[Tensor]]:
    """Return the amaxes of unsharded weights' blocks, flat and per weight, with one all-reduce.

    For a weight stored in FP8, the largest scale of a block on any rank takes the amax's place.
    """
    sizes = [row_shard.numbers for row_shard in row_shards]
    flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
    amaxes = [
        floats[: math.prod(row_shard.blocks)].view(row_shard.blocks)
        for floats, row_shard in zip(flat.split(sizes), row_shards, strict=True)
    ]
    targets, values = [], []
    plain: list[tuple[Tensor, Tensor]] = []  # a shard that has one amax, after its place in flat
    for amax, row_shard, shard in zip(amaxes, row_shards, shards, strict=True):
        if shard is None or not shard.numel():
            continue
        if shard.device != device:
            shard = shard.detach().to(device, non_blocking=True)
        if row_shard.spec.per_tensor and not isinstance(shard, Float8Tensor):
            plain.append((amax.view(()), shard))
        else:
            targets += [amax[blocks] for _, blocks in row_shard.segments]
            values += _shard_amaxes(shard, row_shard)
    if plain:  # a call for all of them takes the CPU less time than a call for each
        targets += [place for place, _ in plain]
        values += torch._foreach_norm([shard for _, shard in plain], math.inf)
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
    """Return the amaxes, or the largest scales, of the blocks of each segment of a shard."""
    block = row_shard.spec.block
    if isinstance(shard, Float8Tensor):
        is_one_segment = shard._window is None and len(row_shard.segments) == 1
        segments = [shard] if is_one_segment else [shard[rows] for rows, _ in row_shard.segments]
        return [_largest_scales(cast(Float8Tensor, segment), block) for segment in segments]
    return [amaxes_of_blocks(shard[rows], block) for rows, _ in row_shard.segments]


def _largest_scales(rows: Float8Tensor, block: tuple[int, ...]) -> Tensor:
    if block[0] == 1 and rows.spec.block == tuple(block):
        return rows.scale  # no ranks share a block
    scale = expand_scale(rows.scale, (rows.spec.block[0], 1), rows.shape)
    return block_amax(scale.expand(rows.shape[0], -1), (block[0], 1))


@torch.no_grad()
def cast_rows(rows: Tensor, factor: Tensor, spec: Float8Spec) -> Tensor:
    """Cast rows of a shard to FP8; if they are stored in FP8, ``factor`` is the new scales."""
    kind = "encode"
    if isinstance(rows, Float8Tensor):
        if not spec.rows_share_scales and rows.spec == spec:
            return rows.qdata  # no ranks share a block
        rows = dequantize_blocks(rows.qdata, rows.scale, rows.spec, torch.float32)
        kind = "decode"
    params = QuantParams(Factors(None, factor), None, spec.rule_of(kind))  # type: ignore[arg-type]
    if rows.ndim == 2:
        return quantize(rows, spec, None, params, align=1).rowwise.data
    (E, N, K), inner = rows.shape, replace(spec, block=spec.block[1:])  # weights of experts
    if inner.per_tensor:
        return quantize(rows, inner, None, params).rowwise.data[:, :N, :K].contiguous()
    matrices = matrices_of_blocks(rows, spec.block)
    factors = factor.reshape(len(matrices), -1, factor.shape[-1])
    data = [cast_rows(w, encode, inner) for w, encode in zip(matrices, factors, strict=True)]
    return torch.stack(data).view(E, N, K)


class _Write(NamedTuple):
    """A shard stored in FP8 that is to be overwritten."""

    weight: ShardedWeight
    local: Float8Tensor
    value: Tensor


def requantize_shards_(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrite sharded parameters stored in FP8 with the result for unsharded parameters.

    A block of which several ranks hold parts, such as the only block of a per-tensor weight, gets
    one scale, so this is a collective with one all-reduce per mesh.

    Args:
        parameters: DTensors of Float8Tensors, matrices sharded by rows as by FSDP2; the same
            parameters, in the same order, on all ranks.
        values: high-precision tensors, one for each parameter, with its local shape.

    Raises:
        TypeError: an argument has another type; nothing is written.
        ValueError: the numbers of values and parameters differ, or a value has another shape.
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
    """Cast with the scales of unsharded weights, with one op per kind of shard, and write."""
    scales, amaxes = [x.scale for _, x, _ in writes], [x.amax for _, x, _ in writes]
    rows = [(w, w.row_shard.block_rows(x.spec.block[0], x.device)) for w, x, _ in writes]
    groups: dict[tuple[torch.dtype, Float8Spec], list[tuple[Tensor, Tensor, Tensor]]] = {}
    for _, local, value in writes:
        groups.setdefault((value.dtype, local.spec), []).append((value, local.scale, local.qdata))
    # The encode factors are first written to the memory of the scales, since the op caches a table
    # of addresses of permanent memory.
    torch._foreach_copy_(scales, [weight.factor[blocks] for weight, blocks in rows])
    for (_, spec), group in groups.items():
        values, encodes, data = (list(tensors) for tensors in zip(*group, strict=True))
        # Each block of the shard is inside a block of the weight, whose factor it now has.
        cast_many_op(values, data, spec.block, spec.rule_of("encode"), 0.0, [], [], encodes)
        torch.autograd.graph.increment_version(data)
    new = [weight.scale[blocks] for weight, blocks in rows]
    new += [weight.amax[blocks] for weight, blocks in rows]
    torch._foreach_copy_(scales + amaxes, new)
