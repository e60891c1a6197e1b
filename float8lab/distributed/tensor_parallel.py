"""Tensor and sequence parallelism: a GEMM of which every rank of a group has a part.

M tokens, N out features, K in features, R ranks; ``y = x @ weight.T``.

A *shard* is a rank's part of a *whole* tensor, along one dimension; the whole is what one rank
alone would have. *Column parallel*: the weight is a shard of its rows, ``[N / R, K]``; so are y and
its gradient, of their columns. *Row parallel*: the weight is a shard of its columns,
``[N, K / R]``, and so is x; each rank's product is a *partial* sum. With *sequence parallelism*
whatever lies outside such a pair of layers, x of the first and y of the second, is a shard of the
rows: it is gathered where it enters the pair and summed to shards where it leaves. Without, it is a
*replica*, the same on all ranks, and the sums are too.

Rows are shards by the rule of ``torch.chunk``, of the first dimension of the layer's input: all
ranks have ``ceil(size / R)``, but the last of them fewer, or none. Features divide by R, or, where
parameters are DTensors, are shards by the same rule.

What travels is bytes: FP8 data as uint8, and scales. All collectives are functional ones, so gloo
and NCCL, eager mode and compiled graphs take one path.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from float8lab.distributed.overlap import is_worth_it, sees_others
from float8lab.distributed.ranks import all_gathered
from float8lab.formats import Float8Spec
from float8lab.ops import amax_op, as_matrix
from float8lab.ops.reference import ALIGN, scales_by_column
from float8lab.recipes.reduction import channel
from float8lab.recipes.region import PROCESS
from float8lab.tensor.differentiation import Float8Function

__all__ = [
    "CallOrder",
    "NoGroup",
    "Rows",
    "SharedScales",
    "TensorParallel",
    "joined",
    "note",
    "noted",
    "same_rows",
    "shared_amaxes",
]


class Rows(NamedTuple):
    """The rows of a whole matrix, and how they are shared out."""

    lead: int
    """The first dimension of the tensor whose rows they are."""
    chunk: int
    """How much of it a rank has, unless it is among the last."""
    inner: int
    """Rows for each index of that dimension."""
    outer: int = 1
    """How often the dimension runs, where it is not the first: a rank has as many runs of rows."""

    @property
    def total(self) -> int:
        """How many there are on all ranks."""
        return self.lead * self.inner * self.outer

    def of(self, rank: int) -> tuple[int, int]:
        """The first row of a rank, and how many it has; of each run."""
        start = min(self.lead, self.chunk * rank)
        return start * self.inner, min(self.chunk, self.lead - start) * self.inner

    def are_cut(self, size: int) -> bool:
        """Whether a block of ``size`` rows lies on several ranks; -1 is all rows."""
        runs = self.outer > 1 and self.lead * self.inner % size != 0
        cut = runs or self.chunk * self.inner % size != 0
        return size == -1 or (self.chunk < self.lead and cut)


class CallOrder:
    """The order in which this rank has called the layers that the ranks of a group share.

    A rank that leaves a layer out meets the next one's collectives, which only shapes could tell
    from its own. So ranks compare the order from time to time.
    """

    EVERY = 256
    """After so many calls ranks compare it."""
    of_groups: ClassVar[weakref.WeakKeyDictionary[Any, CallOrder]] = weakref.WeakKeyDictionary()
    """That of each process group that is alive."""

    def __init__(self) -> None:
        self._layers = self._calls = self._order = 0

    @classmethod
    def of(cls, group: Any) -> CallOrder:
        """That of a group."""
        found = cls.of_groups.get(group)
        if found is None:
            found = cls.of_groups[group] = cls()
        return found

    def called(self, layer: TensorParallel) -> None:
        """Take in a call of a layer, whose place is that of its first call.

        Raises:
            RuntimeError: on all ranks, if they have run others.
        """
        if not layer.place:
            self._layers += 1
            layer.place.append(self._layers)
        self._calls += 1
        self._order = hash((self._order, layer.place[0]))
        if self._calls % self.EVERY:
            return
        # No sizes of shards begin with -1, should another rank be waiting for those.
        mine = torch.tensor([[-1, self._layers, self._order]])
        host = channel(layer.group).host_name(layer.group)
        every = all_gathered(mine, layer.size, host).tolist()
        if any(one != every[0] for one in every):
            raise RuntimeError(
                "tensor-parallel ranks must run the same layers in the same order; got others on "
                f"some of the {layer.size} ranks within the last {self.EVERY} calls. Find what "
                "makes a rank leave a layer out, or call one more, and go on from a checkpoint "
                "before."
            )


@dataclass(frozen=True)
class TensorParallel:
    """How the GEMMs of a layer are spread over the ranks of a group."""

    group: Any
    """The process group."""
    mode: str
    """``"column"`` or ``"row"``: of what the weight is a shard; ``"heads"`` of attention, whose
    operands are shards of their heads."""
    sequence_parallel: bool = False
    """Whether the rows outside a pair of layers are shards."""
    keep_gathered: bool = False
    """Keep what was gathered with one scale, in place of gathering it again for wgrad."""
    overlap: bool | None = None
    """Whether products run beside communication; None: where that was measured to pay."""
    casts_only: bool = False
    """Ranks share scales and nothing else: the caller sends tokens, and adds sums up."""
    pieces: tuple[int, ...] = ()
    """The sizes of what a shard consists of, where the weight is several behind each other."""
    partial: bool = False
    """Leave sums over ranks to the caller: what leaves is this rank's part of a sum."""
    features: int = 0
    """How many the whole has of which the weight is a shard; 0 where all shards are alike."""
    name: str = ""
    """By which functional collectives know the group. This and the following are found."""
    size: int = 0
    rank: int = 0
    place: list[int] = field(default_factory=list, compare=False, repr=False)
    """The layer's place among those of the group, once it has been called."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.group.group_name)
        object.__setattr__(self, "size", dist.get_world_size(self.group))
        object.__setattr__(self, "rank", dist.get_rank(self.group))

    def __deepcopy__(self, memo: Any) -> TensorParallel:
        return self  # a group has no copies

    def __reduce__(self) -> Any:
        return NoGroup, (self.size,)  # nor is it another process's

    def sharded(self, index: int) -> int | None:
        """The dimension along which x, the weight or dy (0, 1, 2) is a shard; None: it is none."""
        if self.mode == "heads":
            return 1
        rows = 0 if self.sequence_parallel else None
        return ((rows, 0, 1) if self.mode == "column" else (1, 1, rows))[index]

    def overlaps(
        self,
        rows: Rows | None,
        a: Tensor,
        b: Tensor,
        block: Sequence[int],
        *,
        arrives: bool,
    ) -> bool:
        """Whether the product of ``a``, of that ``block``, and ``b`` runs beside communication.

        ``arrives``: ``a`` is a shard of the rows, which is gathered; else the result is scattered.
        """
        # What pays is told by sizes, which have to be the same on all ranks.
        if self.overlap is False or rows is None or self.features:
            return False
        if not sees_others(self.group, a):
            return False
        here = rows.chunk * rows.inner
        fits = here * self.size == rows.total and here % ALIGN == 0
        fits = fits and a.shape[0] == (here if arrives else rows.total)
        sizes = rows.total, b.shape[0], a.shape[1]
        return fits and (self.overlap is True or is_worth_it(*sizes, block))

    @property
    def gathers(self) -> bool:
        """Whether the rows that enter, and the gradients of those, are shards."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def keeps(self) -> bool:
        """Whether rows gathered in forward are kept for wgrad, if it wants their codes."""
        return self.keep_gathered and self.gathers

    @property
    def scatters(self) -> bool:
        """Whether the rows that leave are shards."""
        return self.sequence_parallel and self.mode == "row"

    def rows_of(self, x: Tensor) -> Rows | None:
        """The rows of the whole input of a call, ``[..., K]``; None without sequence parallelism.

        Of an input that is a shard a rank knows but its own size. Ranks tell each other, through
        memory of the CPU, once for each tensor that comes from outside: what layers make of it has
        a note of its rows (``note_rows``). All ranks look for that, or none, as all run the same
        program; their sizes would not do, for one may change where another's does not. A compiled
        graph takes all shards to be as large as its own.

        Raises:
            RuntimeError: on all ranks, if some have run other layers.
            ValueError: on all ranks, if the shards do not fit together.
        """
        if not torch.compiler.is_compiling():
            CallOrder.of(self.group).called(self)
        if not self.sequence_parallel:
            return None
        if x.ndim < 2:
            raise ValueError(
                f"inp must have a first dimension that ranks share under sequence_parallel; got "
                f"shape {tuple(x.shape)}. Pass [tokens, ..., features]."
            )
        lead, *middle, _ = x.shape
        inner = 1
        for size in middle:
            inner *= size
        if self.mode == "row":
            return Rows(lead, -(-lead // self.size), inner)
        if torch.compiler.is_compiling():
            return Rows(lead * self.size, lead, inner)
        group, known = noted(x) or ("", None)
        if known is None or group != self.name or known.of(self.rank)[1] != lead * inner:
            known = self._agreed(lead, inner, x.shape[-1])
            self.note_rows(x, known)
        found: Rows = known
        return found

    def note_rows(self, x: Tensor, rows: Rows | None) -> None:
        """Note which rows of a whole the shard ``x`` has, for layers that get it as their input."""
        if rows is not None:
            note(x, (self.name, rows))

    def _agreed(self, lead: int, inner: int, features: int) -> Rows:
        mine = torch.tensor([[lead, inner, features]])
        host = channel(self.group).host_name(self.group)
        leads, *rest = all_gathered(mine, self.size, host).t().tolist()
        whole, chunk = sum(leads), -(-sum(leads) // self.size)
        expected = [min(chunk, max(0, whole - chunk * rank)) for rank in range(self.size)]
        if leads != expected or any(len(set(sizes)) > 1 for sizes in rest):
            raise ValueError(
                "inp must be a shard of one tensor on each tensor-parallel rank, by the rule of "
                f"torch.chunk along its first dimension, under sequence_parallel; got first "
                f"dimensions {leads}, rows for each {rest[0]} and features {rest[1]}. Split the "
                f"{whole} into {expected}."
            )
        return Rows(whole, chunk, inner)

    def shape_of_output(self, shape: Sequence[int], rows: Rows | None, features: int) -> Any:
        """The shape of a layer's output from that of its input."""
        if rows is None:
            return (*shape[:-1], features)
        if self.mode == "column":
            return (rows.lead, *shape[1:-1], features)
        start = min(rows.lead, rows.chunk * self.rank)
        return (min(rows.chunk, rows.lead - start), *shape[1:-1], features)

    # Features that lie on blocks of several ranks.

    def places(self, length: int) -> list[tuple[int, int]]:
        """Where in the whole the pieces of a shard of features begin, and how many they have."""
        if self.features:
            return [(min(self.features, self._chunk() * self.rank), length)]
        found, offset = [], 0
        for size in self.pieces or (length,):
            found.append((offset + self.rank * size, size))
            offset += size * self.size
        return found

    def are_cut(self, length: int, edge: int) -> bool:
        """Whether the shards' features begin or end inside blocks of ``edge``, on any rank."""
        sizes = (self._chunk(),) if self.features else self.pieces or (length,)
        return edge > 1 and any(size % edge != 0 for size in sizes)

    def whole_size(self, length: int) -> int:
        """How many features the whole has of which a shard has ``length``."""
        return self.features or length * self.size

    def _chunk(self) -> int:
        """How many features a rank has, unless it is among the last."""
        return -(-self.features // self.size)

    def spaced(self, x: Tensor, dim: int, edge: int) -> Tensor:
        """A shard of features with zeros where others of its blocks are, so that blocks fit."""
        length = x.shape[dim]
        if not self.are_cut(length, edge):
            return x
        parts = []
        sizes = self.pieces or (length,)
        for (start, size), part in zip(self.places(length), x.split(sizes, dim), strict=True):
            before = start % edge
            after = -(before + size) % edge
            parts.append(F.pad(part, (0, 0) * (x.ndim - 1 - dim) + (before, after)))
        return torch.cat(parts, dim)

    def spaced_size(self, length: int, edge: int) -> int:
        """How many features ``spaced`` gives."""
        if not self.are_cut(length, edge):
            return length
        return sum(-(-(start % edge + size) // edge) * edge for start, size in self.places(length))

    def cropped(self, y: Tensor, dim: int, length: int, edge: int) -> Tensor:
        """A shard of features without what ``spaced`` has put there."""
        if not self.are_cut(length, edge):
            return y
        parts, at = [], 0
        for start, size in self.places(length):
            parts.append(y.narrow(dim, at + start % edge, size))
            at += -(-(start % edge + size) // edge) * edge
        return torch.cat(parts, dim)

    def shared_amaxes(
        self, grid: Tensor, size: int, dim: int, places: Sequence[tuple[int, int]], total: int
    ) -> tuple[Tensor, Tensor]:
        """The amaxes of a shard's blocks over all ranks that have a part of them; of all blocks.

        Args:
            grid: of this rank's parts, ``[..., rows, columns]`` of blocks.
            size: of a block along ``dim``; -1 is the whole dimension.
            dim: the one of which a rank has a shard.
            places: where in the whole its pieces begin, and how many elements they have.
            total: elements of the whole.
        """
        if size == -1:
            whole = self.largest(grid)
            return whole, whole
        count, at, runs, parts = -(-total // size), 0, [], []
        for start, length in places:
            first, blocks = start // size, -(-(start % size + length) // size)
            pad = (first, count - first - blocks)
            part = grid.narrow(dim, at, blocks)
            parts.append(F.pad(part, (0, 0) * (grid.ndim - 1 - dim) + pad))
            runs.append((first, blocks))
            at += blocks
        # A rank's own pieces can share a block, too.
        whole = self.largest(parts[0] if len(parts) == 1 else torch.stack(parts).amax(0))
        mine = [whole.narrow(dim, first, blocks) for first, blocks in runs]
        return mine[0] if len(mine) == 1 else torch.cat(mine, dim), whole

    # Collectives.

    def largest(self, amax: Tensor) -> Tensor:
        """The maximum over ranks of amaxes, infinite where one of them is NaN."""
        ops = torch.ops._c10d_functional
        # A maximum over ranks need not keep NaN; to a scale infinity is the same.
        amax, name = amax.nan_to_num(nan=torch.inf, posinf=torch.inf), self.name
        on_cpu = amax.device.type == "cpu" and not torch.compiler.is_compiling()
        if on_cpu and amax.device not in self.group._device_types:  # a group of GPUs alone
            name = channel(self.group).host_name(self.group)
        found: Tensor = ops.wait_tensor(ops.all_reduce(amax, "max", name))
        return found

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over ranks, on each of them."""
        ops = torch.ops._c10d_functional
        found: Tensor = ops.wait_tensor(ops.all_reduce(partial.contiguous(), "sum", self.name))
        return found

    def scattered(self, partial: Tensor, rows: Rows) -> Tensor:
        """This rank's rows of the sum over ranks: ``[M, ...]`` to its shard."""
        ops, size = torch.ops._c10d_functional, rows.chunk * rows.inner
        whole, outer = size * self.size, rows.outer
        if partial.shape[0] != whole * outer:
            runs = partial.unflatten(0, (outer, rows.lead * rows.inner))
            partial = F.pad(runs, (0, 0, 0, whole - runs.shape[1])).flatten(0, 1)
        if outer > 1:
            partial = partial.unflatten(0, (outer, self.size, size)).transpose(0, 1).flatten(0, 2)
        found: Tensor = ops.wait_tensor(
            ops.reduce_scatter_tensor(partial.contiguous(), "sum", self.size, self.name)
        )
        count = rows.of(self.rank)[1]
        if count == size:
            return found
        return found.unflatten(0, (outer, size))[:, :count].flatten(0, 1)

    def gathered(self, shard: Tensor, rows: Rows, dim: int = 0) -> Tensor:
        """The whole of a matrix that is cut along its rows, or columns, as ``rows`` says."""
        size, run = rows.chunk * rows.inner, rows.lead * rows.inner
        raw = shard.view(torch.uint8) if shard.element_size() == 1 else shard
        if rows.outer > 1:
            count = rows.of(self.rank)[1]
            raw = raw.narrow(dim, 0, rows.outer * count).unflatten(dim, (rows.outer, count))
            dim += 1
        if raw.shape[dim] > size:
            raw = raw.narrow(dim, 0, size)
        elif raw.shape[dim] < size:
            raw = F.pad(raw, (0, 0) * (raw.ndim - 1 - dim) + (0, size - raw.shape[dim]))
        whole = all_gathered(raw, self.size, self.name)
        if dim:
            whole = joined(whole.unflatten(0, (self.size, -1)), dim)
        if whole.shape[dim] != run:
            whole = whole.narrow(dim, 0, run)
        if rows.outer > 1:
            whole = whole.flatten(dim - 1, dim)
        return whole.view(shard.dtype) if raw.dtype != shard.dtype else whole

    def gathered_operand(
        self, q: Tensor, scale: Tensor, block: Sequence[int], rows: Rows, dim: int
    ) -> tuple[Tensor, Tensor]:
        """FP8 data and scales of the whole operand, padded; ``dim`` of it are tokens."""
        whole, size, short = self.gathered(q, rows, dim), block[dim], -rows.total % ALIGN
        if short:
            whole = F.pad(whole.view(torch.uint8), _after(short, dim)).view(q.dtype)
        if size == -1:
            return whole.contiguous(), scale
        if not rows.are_cut(size):  # else all ranks know the scales of all
            run, mine = rows.lead * rows.inner, rows.chunk * rows.inner
            blocks = Rows(-(-run // size), -(-mine // size), 1, rows.outer)
            scale = self.gathered(scale, blocks, dim)
        short = -(-whole.shape[dim] // size) - scale.shape[dim]
        if short:
            scale = F.pad(scale, _after(short, dim), value=1.0)
        if scales_by_column(block):
            scale = scale.t().contiguous().t()
        return whole.contiguous(), scale

    # For GEMMs in high precision.

    def entered(self, x: Tensor, rows: Rows | None, *, backward: bool = False) -> Tensor:
        """The matrix that a GEMM takes, from the input; or, in backward, from dy."""
        here = self.scatters if backward else self.gathers
        if not here:
            return x
        assert rows is not None, "under sequence parallelism"
        return self.gathered(x, rows)

    def left(self, y: Tensor, rows: Rows | None, *, backward: bool = False) -> Tensor:
        """The output, from a GEMM's; or, in backward, dx."""
        if (self.mode == "row") == backward or self.partial:
            return y
        return self.summed(y) if rows is None else self.scattered(y, rows)

    def added(self, bias: Tensor | None) -> Tensor | None:
        """The bias as this rank's product has it: of partial sums one rank's does."""
        return None if self.mode == "row" and self.rank else bias

    def all_features(self, x: Tensor, *, gather: bool) -> Tensor:
        """All features of a tensor of which a rank has some; or those of a whole; differentiable.

        The gradient of all is the same on all ranks, as what they compute of all is.
        """
        found: Tensor = _Features.run(x, self, gather)
        return found

    def enter(self, x: Tensor, rows: Rows | None) -> Tensor:
        """``entered`` of a layer's input, differentiable."""
        return x if self.mode == "row" else self.gather(x, rows)

    def gather(self, x: Tensor, rows: Rows | None) -> Tensor:
        """All tokens of a tensor of which each rank has some, differentiable."""
        found: Tensor = _Moved.run(x, self, rows, True)
        return found

    def leave(self, y: Tensor, rows: Rows | None) -> Tensor:
        """``left`` of a layer's output, differentiable."""
        if self.mode == "column":
            return y
        found: Tensor = _Moved.run(y, self, rows, False)
        return found

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, rows: Rows | None) -> Tensor:
        """A layer in high precision, differentiable, of an input that has entered."""
        if self.mode == "column":
            return F.linear(x, weight, bias)
        y = self.leave(F.linear(x, weight), rows)
        return y if bias is None else y + bias


def noted(x: Tensor) -> Any:
    """The note of a tensor: which rows a shard has, or what FP8 data was gathered to."""
    return None if torch.compiler.is_compiling() else PROCESS.notes.get(x)


def note(x: Tensor, value: Any) -> None:
    """Note this of a tensor, for as long as it lives: several layers may have it as their input."""
    if value is not None and not torch.compiler.is_compiling():
        PROCESS.notes[x] = value


def same_rows(y: Tensor, *others: Tensor) -> Tensor:
    """``y``, which has the rows of the others and gets the note that one of them has."""
    for x in others:
        note(y, noted(x))
    return y


class NoGroup:
    """Stands for the ranks of a module that has yet to be given their group."""

    group = None

    def __init__(self, size: int) -> None:
        self.size = size

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"tp_group must be set before the first call of a module for {self.size} "
            "tensor-parallel ranks; got None. Call set_tensor_parallel_group(group)."
        )


@dataclass(frozen=True)
class SharedScales:
    """Finds the scales of a weight that is stored in FP8 and of which a rank has a shard."""

    parallel: TensorParallel
    dim: int
    """The dimension that ranks share, of the weight's matrix or of each expert's."""

    def check(self, name: str, shape: Sequence[int], spec: Float8Spec) -> None:
        """Raise unless each block that has a size lies on one rank."""
        size, ranks = spec.block[self.dim - 2], self.parallel.size
        if self.parallel.are_cut(shape[self.dim - 2], size):
            raise ValueError(
                f"{name} must give each of {ranks} ranks whole blocks of {size} to store them in "
                f"FP8; got {shape[self.dim - 2]} for each. Choose another size, another recipe, or "
                "weights in high precision."
            )

    def amaxes(self, value: Tensor, spec: Float8Spec) -> Tensor | None:
        """The amaxes over all ranks of a weight's blocks; None if each lies on one rank."""
        return shared_amaxes([(self, value, spec)])[0]


def shared_amaxes(
    weights: Sequence[tuple[SharedScales, Tensor, Float8Spec]],
) -> list[Tensor | None]:
    """The amaxes of each weight, ``SharedScales.amaxes``: one all-reduce for each group."""
    found: list[Tensor | None] = [None] * len(weights)
    groups: dict[TensorParallel, list[int]] = {}
    for i, (shard, value, spec) in enumerate(weights):
        if spec.block[shard.dim - 2] == -1:
            found[i] = _amaxes(value, spec.block)
            groups.setdefault(shard.parallel, []).append(i)
    for parallel, places in groups.items():
        local: Any = [found[i] for i in places]
        every = parallel.largest(torch.cat([amax.reshape(-1) for amax in local]))
        parts = every.split([amax.numel() for amax in local])
        for i, amax, part in zip(places, local, parts, strict=True):
            found[i] = part.view(amax.shape)
    return found


def _amaxes(value: Tensor, block: Sequence[int]) -> Tensor:
    """The amaxes of the blocks of a matrix, or of each of a batch of them."""
    if value.ndim == 2:
        return amax_op("", (value,), value.dtype, block)
    return torch.stack([_amaxes(matrix, block[1:]) for matrix in value])


def joined(parts: Tensor, dim: int) -> Tensor:
    """``[R, *shape]``, of each rank its part, side by side along a dimension of the parts."""
    dtype, nbytes = parts.dtype, parts.shape[-1] * parts.element_size()
    if nbytes and nbytes % 8 == 0 and not torch.compiler.is_compiling():
        parts = parts.view(torch.int64)  # bytes one by one take four times as long
    # Of one column, what is flat is a view.
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous().view(dtype)


def _after(count: int, dim: int) -> tuple[int, ...]:
    """``count`` more rows, or columns, behind those of a matrix, as ``F.pad`` takes it."""
    return (0, 0, 0, count) if dim == 0 else (0, count)


class _Moved(Float8Function):
    """One side of a layer moves rows; the gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel, rows: Any, enters: bool) -> Tensor:
        ctx.how = parallel, rows, enters
        ctx.shape = x.shape
        if not enters:
            y = parallel.left(as_matrix(x), rows)
        elif rows is None:
            return x.view_as(x)
        else:
            y = parallel.entered(as_matrix(x), rows)
        return y.view(parallel.shape_of_output(x.shape, rows, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        parallel, rows, enters = ctx.how
        move = parallel.left if enters else parallel.entered
        dx = move(as_matrix(dy), rows, backward=True)
        return dx.reshape(ctx.shape), None, None, None


class _Features(Float8Function):
    """Features of ranks are gathered, or taken from all; the gradient takes the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parallel: TensorParallel, gather: bool) -> Tensor:
        ctx.how = parallel, gather
        return _Features._move(x, parallel, gather)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        parallel, gather = ctx.how
        return _Features._move(dy, parallel, not gather), None, None

    @staticmethod
    def _move(x: Tensor, parallel: TensorParallel, gather: bool) -> Tensor:
        if not gather:
            return x.chunk(parallel.size, -1)[parallel.rank].contiguous()
        mine, size = x.shape[-1], x.shape[-1] * parallel.size
        return parallel.gathered(as_matrix(x), Rows(size, mine, 1), 1).view(*x.shape[:-1], size)
