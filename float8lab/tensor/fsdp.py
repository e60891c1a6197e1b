"""All-gather of FP8 weights under FSDP2: what is sent, and how ranks agree on the scales.

FSDP2 cuts a weight ``[N, K]`` into one *shard* of consecutive rows per rank, all of equal size but
the last ones, which may be shorter or empty and are padded for the all-gather. It asks a shard
with the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` what to send and what to make
of what arrived. Here that is one byte an element and nothing else: the FP8 data, cast with scales
that every rank already has. They come from the amax of each block over the *whole* weight, so the
gathered bytes are those that one process would have cast.

*When amaxes are reduced.* The weights that were first gathered in one stretch form a *batch*. A
weight's first gather reduces its amaxes alone; from then on one all-reduce serves the batch. It is
due at a gather in forward when that weight was already gathered in a forward since the last
reduction, when one of the batch was gathered in a backward since then, or when the weight's version
changed. A gather in backward uses the scales of the forward. So a training step has one reduction,
with no call for the user to make, however the weights were changed: torch's version counters alone
would not do, fused optimizers do not raise them. And ranks stay in lock step, because the rule
looks only at what FSDP2 itself needs to be the same on all ranks, the sequence of all-gathers, and
at operations on the whole sharded weight. A weight that is not gathered in a step, or that does not
exist any more on some rank, keeps its place in the batch.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.formats import Float8Spec
from float8lab.ops import amax_op, cast_op, factors_from_amax
from float8lab.recipes.region import in_backward
from float8lab.tensor.blocks import block_amax, dequantize_blocks, expand_scale
from float8lab.tensor.float8_tensor import Float8Tensor

__all__ = [
    "Gathered",
    "MasterGather",
    "Place",
    "StoredGather",
    "WeightGather",
    "reduce_blocks",
    "settle",
    "unsharded_weight",
]


class Gathered(NamedTuple):
    """Metadata that the pre-all-gather hook hands to the post-all-gather hook."""

    spec: Float8Spec
    scale: Tensor
    amax: Tensor
    shape: tuple[int, int]


class Place(NamedTuple):
    """Where a shard lies in its weight."""

    shape: tuple[int, int]
    """Shape of the whole weight, ``[N, K]``."""
    start: int
    """First row of the shard in the weight."""
    padded_rows: int
    """Rows that each rank sends, padding included."""

    @staticmethod
    def of(mesh: Any, outer_size: torch.Size) -> Place:
        """The place of this rank's shard, by the rule of ``torch.chunk``."""
        N, K = outer_size
        chunk = -(-N // mesh.size())
        return Place((N, K), min(N, chunk * mesh.get_local_rank()), chunk)


class WeightGather:
    """One sharded weight that is gathered in FP8; knows its scales between reductions.

    Args:
        spec: FP8 format, blocks and scale rule of the gathered weight.
    """

    def __init__(self, spec: Float8Spec) -> None:
        self.spec = spec
        self.scale: Tensor | None = None  # of every block of the weight; None: never reduced
        self.factor: Tensor | None = None  # likewise, what ``cast`` wants
        self.amax: Tensor | None = None
        self.gathered = False  # in a forward since the last reduction
        self.version: Any = None
        self.batch: _Batch | None = None
        self.index = 0  # in the batch
        self.place: Place | None = None

    # Methods that each kind of shard defines.

    def current_shard(self) -> Tensor | None:
        """The shard as it is now, or None if it does not exist any more."""
        raise NotImplementedError

    def current_version(self) -> Any:
        """A value that changes with every change of the weight by an op on the whole of it."""
        raise NotImplementedError

    def shard_amax(self, shard: Tensor, block: tuple[int, ...]) -> Tensor:
        """Amaxes of the blocks of some rows of the shard."""
        raise NotImplementedError

    def scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """Decode scales of blocks with these amaxes, and the factors that ``cast`` takes."""
        raise NotImplementedError

    def cast(self, rows: Tensor, factor: Tensor) -> Tensor:
        """FP8 data of some rows of the shard."""
        raise NotImplementedError

    @property
    def rule(self) -> Any:
        """A value that is equal for weights whose ``scales`` is the same function."""
        raise NotImplementedError

    # Methods that all kinds share.

    def segments(self, rows: int) -> list[tuple[slice, slice]]:
        """Runs of rows of the shard that lie on the weight's blocks, each with its block rows.

        A shard that starts inside a block has two: the rest of that block, and what follows.
        """
        assert self.place is not None, "set by gather"
        size = self.spec.block[0]
        if rows == 0:
            return []
        if size == -1:
            return [(slice(0, rows), slice(0, 1))]
        start = self.place.start
        head = min(rows, -start % size)
        runs = [(0, head), (head, rows)] if 0 < head < rows else [(0, rows)]
        return [
            (slice(low, high), slice((start + low) // size, -(-(start + high) // size)))
            for low, high in runs
        ]

    def gather(self, shard: Tensor, mesh: Any, outer_size: torch.Size) -> tuple[Tensor, Gathered]:
        """Return the bytes that this rank sends, uint8 ``[padded rows, K]``, and their metadata."""
        self.place = Place.of(mesh, outer_size)
        backward = in_backward()
        if self.batch is None:
            self.batch = _Batch.join(self, mesh.get_group())
            reduce_blocks([self], shard.device, mesh)
        elif not backward and (self.gathered or self.batch.is_new_pass(self)):
            self.batch.reduce(shard.device, mesh)
        if backward:
            self.batch.saw_backward = True
        else:
            self.gathered = True
            self.batch.latest = max(self.batch.latest, self.index)
        assert self.scale is not None, "reduced above"
        assert self.factor is not None, "reduced above"
        assert self.amax is not None, "reduced above"
        gathered = Gathered(self.spec, self.scale, self.amax, self.place.shape)
        parts = [
            self.cast(shard[rows], self.factor[blocks]).view(torch.uint8)
            for rows, blocks in self.segments(shard.shape[0])
        ]
        missing = self.place.padded_rows - shard.shape[0]
        if missing or not parts:
            padding = torch.zeros(
                (missing, self.place.shape[1]), dtype=torch.uint8, device=shard.device
            )
            parts.append(padding)
        return (parts[0] if len(parts) == 1 else torch.cat(parts)), gathered


class MasterGather(WeightGather):
    """A shard in high precision, cast for the all-gather.

    Args:
        spec: FP8 format, blocks and scale rule of the gathered weight.
        amax_epsilon: amaxes are raised to at least this.
        headroom: the scales are multiplied by this (``2 ** margin`` of a delayed recipe).
    """

    def __init__(self, spec: Float8Spec, *, amax_epsilon: float = 0.0, headroom: float = 1.0):
        super().__init__(spec)
        self.amax_epsilon = amax_epsilon
        self.headroom = headroom
        # The local tensor of the sharded parameter; it knows the parameter as ``owner``. A weak
        # reference to the parameter itself would forbid torch.utils.swap_tensors on it.
        self.shard: weakref.ref[Any] | None = None

    def current_shard(self) -> Tensor | None:
        shard = self.shard() if self.shard is not None else None
        return None if shard is None else shard.as_subclass(Tensor)

    def current_version(self) -> Any:
        shard = self.shard() if self.shard is not None else None
        return None if shard is None or shard.owner.is_inference() else shard.owner._version

    def shard_amax(self, shard: Tensor, block: tuple[int, ...]) -> Tensor:
        return amax_op("", (shard,), shard.dtype, block)

    @property
    def rule(self) -> Any:
        return self.spec.fp8_dtype, self.spec.scale_rule, self.amax_epsilon, self.headroom

    def scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        spec = self.spec
        scale, encode = factors_from_amax(amax, spec.fp8_dtype, spec.scale_rule, self.amax_epsilon)
        if self.headroom == 1.0:
            return scale, encode
        return scale * self.headroom, encode / self.headroom

    def cast(self, rows: Tensor, factor: Tensor) -> Tensor:
        return _cast(rows, self.spec, "encode", factor)


class StoredGather(WeightGather):
    """A shard that is stored in FP8.

    Its blocks have scales already; those of a block that several ranks hold parts of, such as the
    one block of a weight scaled as a whole, can differ after the ranks wrote to their parts. So the
    scales are reduced: the block gets the largest, and bytes with another scale are cast again.

    Args:
        spec: FP8 format, blocks and scale rule of the gathered weight.
    """

    def __init__(self, spec: Float8Spec) -> None:
        super().__init__(spec)
        self.shard: weakref.ref[Float8Tensor] | None = None

    def current_shard(self) -> Tensor | None:
        return self.shard() if self.shard is not None else None

    def current_version(self) -> Any:
        shard = self.shard() if self.shard is not None else None
        return None if shard is None or shard.qdata.is_inference() else shard.qdata._version

    def shard_amax(self, shard: Tensor, block: tuple[int, ...]) -> Tensor:
        assert isinstance(shard, Float8Tensor), "current_shard is"
        scale = expand_scale(shard.scale, shard.spec.block, shard.shape)
        scale = scale.expand(shard.shape[0], scale.shape[1]).contiguous()
        columns = -1 if scale.shape[1] == 1 else 1
        if columns == 1 and block[1] > 1:
            return block_amax(scale, block)
        return block_amax(scale, (block[0], columns))

    @property
    def rule(self) -> Any:
        return "stored"

    def scales(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        return amax, amax

    def cast(self, rows: Tensor, factor: Tensor) -> Tensor:
        assert isinstance(rows, Float8Tensor), "current_shard is"
        if self.spec.block[0] == 1 and rows.spec == self.spec:
            return rows.qdata  # no block is shared
        values = dequantize_blocks(rows.qdata, rows.scale, rows.spec, torch.float32)
        return _cast(values, self.spec, "decode", factor)


def _cast(x: Tensor, spec: Float8Spec, rule: str, factor: Tensor) -> Tensor:
    q, *_ = cast_op(
        "", (x,), x.dtype, spec.fp8_dtype, spec.block, rule, 0.0, 1, True, False, False, factor
    )
    return q


class _Batch:
    """Weights whose amaxes are reduced together, in the order of their first gather."""

    def __init__(self) -> None:
        self.members: list[WeightGather] = []
        self.saw_backward = False  # a member was gathered in backward since the last reduction
        self.latest = -1  # index of the last member that was gathered in a forward since then

    def is_new_pass(self, member: WeightGather) -> bool:
        """Whether the weights may have changed since the last reduction.

        Versions alone do not tell: foreach and fused optimizers leave those of DTensors as they
        are. A pass over the model gathers in the order of the first one, so a member that comes
        after a later one opens a new pass.
        """
        return (
            self.saw_backward
            or member.index < self.latest
            or member.version != member.current_version()
        )

    @staticmethod
    def join(member: WeightGather, group: Any) -> _Batch:
        batch = _FILLING.get(group)
        if batch is None:
            batch = _FILLING[group] = _Batch()
        member.index = len(batch.members)
        batch.members.append(member)
        return batch

    def reduce(self, device: torch.device, mesh: Any) -> None:
        """Compute the scales of all members from their weights as they are now."""
        group = mesh.get_group()
        if _FILLING.get(group) is self:
            del _FILLING[group]  # complete: what is gathered for the first time later is another's
        self.saw_backward, self.latest = False, -1
        reduce_blocks(self.members, device, mesh)


# The batch that a process group's next new weight joins.  Ranks of a group fill it in one order.
_FILLING: weakref.WeakKeyDictionary[Any, _Batch] = weakref.WeakKeyDictionary()


def reduce_blocks(members: list[WeightGather], device: torch.device, mesh: Any) -> None:
    """Give the weights scales from the amaxes of their blocks over all ranks: one all-reduce."""
    shapes = []
    for member in members:
        assert member.place is not None, "a member was gathered before"
        shapes.append(member.spec.scale_shape(member.place.shape))
    counts = [rows * columns for rows, columns in shapes]
    with torch.inference_mode(False), torch.no_grad():
        amax = torch.zeros(sum(counts), dtype=torch.float32, device=device)
        views = [part.view(shape) for part, shape in zip(amax.split(counts), shapes, strict=True)]
        targets, values = [], []
        for member, view in zip(members, views, strict=True):
            shard = member.current_shard()
            if shard is not None:
                shard = shard.detach().to(device, non_blocking=True)
                for rows, blocks in member.segments(shard.shape[0]):
                    targets.append(view[blocks])
                    values.append(member.shard_amax(shard[rows], member.spec.block))
        if targets:
            torch._foreach_copy_(targets, values)
        if mesh.size() > 1:
            # A maximum over ranks need not keep NaN; inf gives the same scale.
            amax.nan_to_num_(nan=torch.inf, posinf=torch.inf)
            dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=mesh.get_group())
        by_rule = {member.rule: member for member in members}
        made = {
            rule: [factor.split(counts) for factor in member.scales(amax)]
            for rule, member in by_rule.items()
        }
    for index, (member, shape) in enumerate(zip(members, shapes, strict=True)):
        member.amax = views[index]
        member.scale, member.factor = (one[index].view(shape) for one in made[member.rule])
        member.version = member.current_version()
        member.gathered = False


def unsharded_weight(
    outputs: tuple[Tensor, ...], gathered: Gathered, dtype: torch.dtype, out: Any
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Make a Float8Tensor of the gathered bytes, or renew the scales of ``out``, which views them.

    Returns:
        The Float8Tensor and the tensors that FSDP2 may free besides its own buffers (none: those
        hold the data, and the scales are small); None if ``out`` was given.
    """
    spec, scale, amax, (N, _) = gathered
    if scale.is_cuda:
        # Allocated on FSDP2's copy-in stream, read here on the stream of the forward.
        for tensor in (scale, amax):
            tensor.record_stream(torch.cuda.current_stream(scale.device))
    if out is None:
        qdata = outputs[0][:N].view(spec.fp8_dtype)
        return Float8Tensor(qdata, scale.clone(), amax.clone(), spec, dtype), ()
    # Autograd may have saved the scale; like the data it is the same again whenever it is read.
    normal = tuple(t for t in (out.scale, out.amax) if not t.is_inference())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(normal):
        out.scale.copy_(scale)
        out.amax.copy_(amax)
    return None


def _pre_all_gather(
    self: Float8Tensor,
    mesh: Any,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: torch.nn.Module,
    mp_policy: Any,
) -> tuple[tuple[Tensor], Gathered]:
    """Return the bytes that FSDP2 sends for a shard stored in FP8, and their metadata."""
    if self._window is not None:
        settle(self)
    how: StoredGather | None = getattr(self, "_gather", None)
    if how is None:
        # Shards have smaller blocks than the weight where their edges cut its blocks.
        spec = getattr(module, "_stored_specs", {}).get(tuple(outer_size), self.spec)
        self._gather = how = StoredGather(spec)  # type: ignore[attr-defined]
        how.shard = weakref.ref(self)
    data, gathered = how.gather(self, mesh, outer_size)
    return (data,), gathered


def _post_all_gather(
    self: Float8Tensor,
    all_gather_outputs: tuple[Tensor, ...],
    metadata: Gathered,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the gathered weight that the module computes with."""
    return unsharded_weight(all_gather_outputs, metadata, param_dtype, out)


def settle(x: Float8Tensor) -> None:
    """Give a view scales of its own; its base is FSDP2's padded copy, which nobody reads."""
    x._refresh()
    x.scale, x.amax = x.scale.clone(), x.amax.clone()
    x._window = None


Float8Tensor.fsdp_pre_all_gather = _pre_all_gather  # type: ignore[attr-defined]
Float8Tensor.fsdp_post_all_gather = _post_all_gather  # type: ignore[attr-defined]
