"""Communication between tensor-parallel ranks for the GEMMs of a layer; one GPU has none.

M tokens, N out features, K in features, R ranks; ``y = x @ weight.T``.

Note: the nouns of this room.

- *shard*: what a rank has of an *unsharded* tensor, along one dimension, by a ``ShardMap``.
- *column parallel*: the weight is a shard of its rows, ``[N / R, K]``; so are y and its gradient,
  of their columns. *Row parallel*: the weight is a shard of its columns, and so is x; the GEMM of
  each rank is a *partial sum*.
- *sequence parallel*: x of a column parallel layer and y of a row parallel one are shards of the
  *tokens*, the first dimension: they are *gathered* where they enter such a pair of layers, and
  their sums are *scattered* where they leave it. Without it they are the same on all ranks.
- *tokens* of a tensor, as a variable: their ``ShardMap``, known as long as the tensor lives.
- *comm*: what a call sends. ``ONE_GPU`` sends nothing, ``Sharded`` what the ranks lack.

What travels is bytes: FP8 data as uint8, and scales. An amax that ranks share is the largest over
them. Where blocks of tokens cross shards, an operand is gathered in high precision before its cast;
where blocks of features do, the layer runs in high precision. The collectives are such as gloo,
NCCL, eager mode and compiled graphs all take.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.utils.weak import WeakTensorKeyDictionary

from float8lab.arguments import check_group, check_module
from float8lab.distributed.overlap import gather_mm, is_worth_it, mm_scatter, sees_others
from float8lab.distributed.ranks import all_gathered, all_reduced, rank_and_size, reduce_scattered
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import Float8Spec, scales_by_column
from float8lab.ops import Offsets, as_matrix, scaled_mm_op
from float8lab.ops.declare import planned
from float8lab.ops.grouped import amaxes_of_blocks
from float8lab.ops.operand import Operand
from float8lab.ops.reference import ALIGN
from float8lab.recipes.recipe import GemmPlan, LinearPlan
from float8lab.recipes.reduction import amax_over_ranks, channel
from float8lab.tensor.differentiation import GradientMap
from float8lab.tensor.dtensor import local_of

__all__ = [
    "ONE_GPU", "CallOrder", "Gemm", "GemmTask", "NoGroup", "OneGpu", "Sharded", "SharedScales",
    "TensorParallel", "TokenShard", "inherit_tokens", "mark_sequence_parallel", "misfit",
    "reduce_sequence_parallel_gradients", "shared_amaxes",
]  # fmt: skip


class CallOrder:
    """The order in which this rank has called the layers that the ranks of a group share.

    A rank that leaves a layer out meets the next one's collectives, which only shapes could tell
    from its own. So ranks compare the order from time to time.
    """

    EVERY = 256
    """After so many calls ranks compare it."""
    of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, CallOrder]] = WeakKeyDictionary()
    """The call order of each process group that is alive."""

    def __init__(self) -> None:
        self._layers = self._calls = self._order = 0

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> CallOrder:
        """The call order of a group."""
        return cls.of_groups.setdefault(group, cls())

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
        orders = layer.told(-1, self._layers, self._order).tolist()
        if any(order != orders[0] for order in orders):
            raise RuntimeError(
                "tensor-parallel ranks must run the same layers in the same order; got others on "
                f"some of the {layer.size} ranks within the last {self.EVERY} calls. Find what "
                "makes a rank leave a layer out, or call one more, and go on from a checkpoint "
                "before."
            )


@dataclass(frozen=True)
class TensorParallel:
    """How the ranks of a group share the GEMMs of a layer."""

    group: dist.ProcessGroup
    """The process group."""
    mode: str
    """``"column"`` or ``"row"``: of what the weight is a shard; ``"heads"`` of attention, whose
    operands are shards of their heads."""
    sequence_parallel: bool = False
    """Whether the tokens outside a pair of layers are shards."""
    keep_gathered: bool = False
    """Keep what was gathered with one scale, in place of gathering it for wgrad, too."""
    overlap: bool | None = None
    """Whether GEMMs run beside communication; None: where that was measured to pay."""
    casts_only: bool = False
    """Ranks share scales and nothing else: the caller sends tokens, and adds sums up."""
    partial: bool = False
    """Leave sums over ranks to the caller: what leaves is this rank's part of a sum."""
    features: tuple[ShardMap, ...] = field(default=(), compare=False)
    """The shards of the features that ranks share: several where the weight consists of several
    matrices behind each other; none where they are unknown."""
    scale_groups: tuple[dist.ProcessGroup, ...] = ()
    """Further groups, of context parallelism, whose ranks share the scales as well."""
    name: str = ""
    """The group's name for functional collectives. ``__post_init__`` sets this and the following.
    """
    size: int = 0
    rank: int = 0
    place: list[int] = field(default_factory=list, compare=False, repr=False)
    """The layer's place among those of the group, once it has been called."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.group.group_name)
        object.__setattr__(self, "size", dist.get_world_size(self.group))
        object.__setattr__(self, "rank", dist.get_rank(self.group))

    def __deepcopy__(self, memo: object) -> TensorParallel:
        return self  # a group has no copies

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return NoGroup, (self.size,)  # nor is it another process's

    def sharded_dim(self, index: int) -> int | None:
        """The dimension along which x, the weight or dy (0, 1, 2) is a shard; None: it is none."""
        if self.mode == "heads":
            return 1
        tokens = 0 if self.sequence_parallel else None
        return ((tokens, 0, 1) if self.mode == "column" else (1, 1, tokens))[index]

    @property
    def gathers(self) -> bool:
        """Whether the tokens that enter, and their gradients, are shards."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def scatters(self) -> bool:
        """Whether the tokens that leave are shards."""
        return self.sequence_parallel and self.mode == "row"

    # The tokens of a call.

    def tokens_of(self, x: Tensor) -> ShardMap | None:
        """The tokens of a call's input, ``[..., K]``; None without sequence parallelism.

        A rank knows the size of its own shard alone. Ranks tell each other their sizes, through
        memory of the CPU, once for each tensor that comes from outside; the tokens of what layers
        make of it are known (``remember_tokens``). Whether tokens are known is the same on all
        ranks, which run the same program; a size may change on one and not on another. A compiled
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
        inner = math.prod(middle)
        if self.mode == "row":
            return ShardMap.of(lead, self.size, self.rank, inner=inner)
        if torch.compiler.is_compiling():
            return ShardMap(lead * self.size, lead, self.size, self.rank, inner)
        group, tokens = _Known.tokens.get(x) or ("", None)
        if tokens is None or group != self.name or tokens.rows_per_outer != lead * inner:
            tokens = self._agree_on_tokens(lead, inner, x.shape[-1])
            self.remember_tokens(x, tokens)
        return tokens

    def remember_tokens(self, x: Tensor, tokens: ShardMap | None) -> None:
        """Keep the tokens of the shard ``x``, for layers that get it as their input."""
        if tokens is not None and not torch.compiler.is_compiling():
            _Known.tokens[x] = self.name, tokens

    def _agree_on_tokens(self, lead: int, inner: int, features: int) -> ShardMap:
        leads, *other_sizes = self.told(lead, inner, features).t().tolist()
        tokens = ShardMap.of(sum(leads), self.size, self.rank, inner=inner)
        if leads != tokens.lengths or any(len(set(sizes)) > 1 for sizes in other_sizes):
            raise ValueError(
                "inp must be a shard of one tensor on each tensor-parallel rank, by the rule of "
                f"torch.chunk along its first dimension, under sequence_parallel; got first "
                f"dimensions {leads}, rows for each {other_sizes[0]} and features "
                f"{other_sizes[1]}. Split the {tokens.size} into {tokens.lengths}."
            )
        return tokens

    def output_shape(
        self, shape: Sequence[int], tokens: ShardMap | None, features: int
    ) -> tuple[int, ...]:
        """The shape of a layer's output from that of its input."""
        if tokens is None:
            return (*shape[:-1], features)
        lead = tokens.size if self.mode == "column" else tokens.length
        return (lead, *shape[1:-1], features)

    # Collectives.

    def told(self, *numbers: int) -> Tensor:
        """The numbers that all ranks tell each other, a row for each, through memory of the CPU."""
        host = channel(self.group).host_group(self.group).group_name
        return all_gathered(torch.tensor([numbers], device="cpu"), self.size, host)

    def amax(self, amax: Tensor) -> Tensor:
        """The maximum over ranks of amaxes, infinite where one of them is NaN."""
        for group in (self.group, *self.scale_groups):
            amax = amax_over_ranks(amax, group)
        return amax

    def sum(self, partial: Tensor) -> Tensor:
        """The sum over ranks, on each of them."""
        return all_reduced(partial, "sum", self.name)

    def scatter(self, partial: Tensor, tokens: ShardMap) -> Tensor:
        """This rank's rows of the sum over ranks: ``[M, ...]`` to its shard."""
        size, outer = tokens.chunk * tokens.inner, tokens.outer
        padded = size * self.size
        if partial.shape[0] != padded * outer:
            by_outer = partial.unflatten(0, (outer, tokens.size * tokens.inner))
            partial = F.pad(by_outer, (0, 0, 0, padded - by_outer.shape[1])).flatten(0, 1)
        if outer > 1:
            partial = partial.unflatten(0, (outer, self.size, size)).transpose(0, 1).flatten(0, 2)
        shard = reduce_scattered(partial, self.size, self.name)
        if (count := tokens.rows_per_outer) == size:
            return shard
        return shard.unflatten(0, (outer, size))[:, :count].flatten(0, 1)

    def gather(self, shard: Tensor, tokens: ShardMap, dim: int = 0) -> Tensor:
        """The unsharded matrix of a shard of its rows, or columns."""
        size, length, outer = tokens.chunk * tokens.inner, tokens.size * tokens.inner, tokens.outer
        raw = shard.view(torch.uint8) if shard.element_size() == 1 else shard
        if outer > 1:
            count = tokens.rows_per_outer
            raw = raw.narrow(dim, 0, outer * count).unflatten(dim, (outer, count))
            dim += 1
        if raw.shape[dim] > size:
            raw = raw.narrow(dim, 0, size)
        elif raw.shape[dim] < size:
            raw = F.pad(raw, (0, 0) * (raw.ndim - 1 - dim) + (0, size - raw.shape[dim]))
        gathered = all_gathered(raw, self.size, self.name)
        if dim:
            gathered = _side_by_side(gathered.unflatten(0, (self.size, -1)), dim)
        if gathered.shape[dim] != length:
            gathered = gathered.narrow(dim, 0, length)
        if outer > 1:
            gathered = gathered.flatten(dim - 1, dim)
        return gathered.view(shard.dtype) if raw.dtype != shard.dtype else gathered

    def gather_operand(
        self, operand: Operand, block: Sequence[int], tokens: ShardMap, dim: int
    ) -> Operand:
        """The unsharded operand, padded; ``dim`` of it are tokens, no block of which crosses."""
        (q, scale), size = operand, block[dim]
        data, padding = self.gather(q, tokens, dim), -tokens.unsharded_rows % ALIGN
        if padding:
            data = F.pad(data.view(torch.uint8), _after(padding, dim)).view(q.dtype)
        if size == -1:  # all ranks know the scales of all
            return Operand(data.contiguous(), scale)
        scale = self.gather(scale, tokens.blocks(size), dim)
        if missing := -(-data.shape[dim] // size) - scale.shape[dim]:
            scale = F.pad(scale, _after(missing, dim), value=1.0)
        if scales_by_column(block):
            scale = scale.t().contiguous().t()
        return Operand(data.contiguous(), scale)

    # Differentiable, for layers in high precision.

    def gather_features(self, x: Tensor, *, gather: bool) -> Tensor:
        """All features of a tensor of which a rank has some; or its own of all; differentiable.
        The gradient of all is the same on all ranks, as what they compute of all is."""
        size = x.shape[-1] * (self.size if gather else 1)
        features = ShardMap.of(size, self.size, self.rank)

        def gather_all(x: Tensor) -> Tensor:
            return self.gather(as_matrix(x), features, 1).view(*x.shape[:-1], size)

        def take_own(x: Tensor) -> Tensor:
            return features.shard(x, -1).contiguous()

        return GradientMap.run(x, *((gather_all, take_own) if gather else (take_own, gather_all)))

    def enter(self, x: Tensor, tokens: ShardMap | None) -> Tensor:
        """A layer's input as its GEMM takes it, differentiable."""
        return x if self.mode == "row" else self.gather_tokens(x, tokens)

    def gather_tokens(self, x: Tensor, tokens: ShardMap | None) -> Tensor:
        """All tokens of a tensor of which each rank has some, differentiable."""
        return self._move_tokens(x, tokens, _gathered, _reduced)

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, tokens: ShardMap | None) -> Tensor:
        """A layer in high precision, differentiable, of an input that has entered."""
        if self.mode == "column":
            return F.linear(x, w, bias)
        y = self._move_tokens(F.linear(x, w), tokens, _reduced, _gathered)
        return y if bias is None else y + bias

    def _move_tokens(
        self, x: Tensor, tokens: ShardMap | None, move: Callable[..., Tensor],
        move_back: Callable[..., Tensor],
    ) -> Tensor:  # fmt: skip
        """Move tokens into a layer or out of it; their gradients are moved back."""
        shape = x.shape

        def forward(x: Tensor) -> Tensor:
            if move is _gathered and tokens is None:
                return x.view_as(x)
            y = move(self, tokens, as_matrix(x), backward=False)
            return y.view(self.output_shape(shape, tokens, shape[-1]))

        def backward(dy: Tensor) -> Tensor:
            return move_back(self, tokens, as_matrix(dy), backward=True).reshape(shape)

        return GradientMap.run(x, forward, backward)


def misfit(features: Sequence[ShardMap], plan: LinearPlan) -> str | None:
    """Why a plan's blocks do not fit shards of features, and what would; None: they do."""
    block = plan.largest_block
    if block == 1 or not any(shards.block_crosses_shards(block) for shards in features):
        return None
    ranks, sizes = features[0].ranks, dict.fromkeys(shards.size for shards in features)
    step = block * ranks
    fitting = {max(1, size // step + more) * step for size in sizes for more in (0, 1)}
    return (
        f"its {' and '.join(map(str, sizes))} features on {ranks} tensor-parallel ranks cut blocks "
        f"of {block}; sizes that fit are multiples of {step}, such as "
        f"{' or '.join(map(str, sorted(fitting)))}"
    )


class _Known:
    """Facts about tensors, as long as these live: several layers may have one as their input."""

    tokens: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
    """The group's name and the ``ShardMap`` of a shard of tokens."""
    gathered: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
    """The unsharded operand of FP8 data of a shard."""


def inherit_tokens(y: Tensor, *inputs: Tensor) -> Tensor:
    """Return ``y``, whose tokens are those of the inputs, and known if those of one input are."""
    for x in inputs:
        tokens = None if torch.compiler.is_compiling() else _Known.tokens.get(x)
        if tokens is not None:
            _Known.tokens[y] = tokens
    return y


def _get_gathered(data: Tensor) -> Operand | None:
    """The unsharded operand of a shard's FP8 data, if a layer has gathered it."""
    return None if torch.compiler.is_compiling() else _Known.gathered.get(data)


def _set_gathered(data: Tensor, operand: Operand) -> None:
    if not torch.compiler.is_compiling():
        _Known.gathered[data] = operand


# The GEMMs of one call.


class GemmTask(NamedTuple):
    """One GEMM: the casts of its operands, and its output without padding."""

    plan: GemmPlan
    shape: tuple[int, int]
    """The rows are those of the left operand, or of all ranks."""
    dtype: torch.dtype
    offsets: Offsets | None = None
    """The offsets of experts' rows, whose GEMMs no ranks share."""
    after: Tensor | None = None
    """In a graph, and without offsets, a tensor that is computed before the GEMM begins."""


class Gemm(NamedTuple):
    """The output of a GEMM, and its left operand: as multiplied, if the caller keeps that."""

    y: Tensor
    left: Operand


def _mm(a: Operand, b: Operand, task: GemmTask, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias`` of two operands, for the rows of each expert if there are offsets."""
    gemm, shape, dtype, offsets, after = task
    if bias is not None and bias.shape[-1] != b.data.shape[-2]:
        bias = F.pad(bias, (0, b.data.shape[-2] - bias.shape[-1]))
    operands = *a, gemm.left.block, *b, gemm.right.block, bias
    groups = (None, after) if after is not None else offsets or ()
    y: Tensor = scaled_mm_op(*operands, dtype, gemm.fast_accum, *groups)
    # Without padding. A compiled graph always crops: asking whether it must would fix the number
    # of tokens.
    if torch.compiler.is_compiling() or y.shape[-2:] != shape:
        return y[..., : shape[0], : shape[1]]
    return y


def _mm_of_rank(a: Operand, b: Operand, task: GemmTask, bias: Tensor | None) -> Tensor:
    return _mm(a, b, task, bias).contiguous()


_planned_mm = planned(_mm_of_rank)


def _local_mm(a: Operand, b: Operand, task: GemmTask, bias: Tensor | None = None) -> Tensor:
    """This rank's GEMM, of gathered operands; on a GPU a plan, between what is sent."""
    assert task.offsets is None, "modules of experts send rows and sums themselves"
    return (_planned_mm if a.data.is_cuda else _mm_of_rank)(a, b, task, bias)


class TokenShard:
    """An operand of wgrad, ``[features, tokens]``, of which each rank has some tokens.

    It is gathered beside a GEMM where one runs that has time for it, else on demand.
    """

    __slots__ = ("block", "gathered", "operand", "parallel", "tokens")

    def __init__(
        self, parallel: TensorParallel, tokens: ShardMap, operand: Operand, block: Sequence[int]
    ) -> None:
        """Take this rank's shard."""
        self.parallel, self.tokens, self.operand, self.block = parallel, tokens, operand, block
        self.gathered = _get_gathered(operand.data)

    def gather(self) -> Operand:
        """The operand of all tokens."""
        if self.gathered is None:
            self.gathered = self.parallel.gather_operand(self.operand, self.block, self.tokens, 1)
            _set_gathered(self.operand.data, self.gathered)
        return self.gathered

    def tensors_to_send(self) -> list[Tensor]:
        """The tensors to gather: FP8 data, and scales unless all ranks have those of all."""
        q, scale = self.operand
        return [q.contiguous(), *[scale.t().contiguous()] * (self.block[1] != -1)]

    def set_gathered(self, data: Tensor, scales: Tensor | None) -> None:
        """Take ``[R, *shape]`` of that."""
        raw, scale = _side_by_side(data, 1), self.operand.scale
        if scales is not None and scales.numel():
            scale = scales.flatten(0, 1).t()
            scale = scale if scales_by_column(self.block) else scale.contiguous()
        self.gathered = Operand(raw, scale)
        _set_gathered(self.operand.data, self.gathered)


_Operand = TypeVar("_Operand", bound=Operand | None)


class OneGpu:
    """The communication of a call on one GPU: none."""

    parallel: TensorParallel | None = None
    tokens: ShardMap | None = None
    is_sharded = False

    gathers_x_first = False
    """Whether x is gathered in high precision, before its cast: blocks of tokens cross shards."""
    gathers_dy_first = False
    keeps_gathered = False
    """Whether the gathered x of fprop is kept, transposed, for wgrad."""
    transposes_gathered = False
    """Whether wgrad may take the transpose of the dy that dgrad gathers."""

    def gather(self, x: Tensor, *, backward: bool = False) -> Tensor:
        """The matrix that a GEMM in high precision takes: x, or in backward dy."""
        return x

    def reduce(self, y: Tensor, *, backward: bool = False) -> Tensor:
        """The output of the layer from its GEMM's; or, in backward, dx."""
        return y

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """The bias as this rank's GEMM adds it."""
        return bias

    def token_operand(
        self, operand: _Operand, block: Sequence[int], *, backward: bool
    ) -> _Operand | TokenShard:
        """An operand of wgrad, ``[features, tokens]``, or what gathers it: of x, or of dy."""
        return operand

    def output_shape(
        self, shape: Sequence[int], rows: int, features: int
    ) -> tuple[int, tuple[int, ...]]:
        """The rows of the GEMM's output without padding, and the shape of the layer's output.

        ``shape`` is that of the layer's input, a matrix of so many ``rows``.
        """
        return rows, (*shape[:-1], features)

    def mm(
        self, a: Operand, b: Operand, task: GemmTask, bias: Tensor | None = None, *,
        backward: bool = False, companion: TokenShard | None = None, keep: bool = False,
    ) -> Gemm:  # fmt: skip
        """fprop, ``a @ b.T + bias``, or dgrad: ``comm.reduce(mm(comm.gather(a), b))``.

        Args:
            a: x or dy in FP8, as this rank has it.
            b: the weight, or its transpose.
            bias: of this rank's features.
            backward: whether this is dgrad.
            companion: what may be gathered meanwhile.
            keep: whether the left operand is wanted, as multiplied.
        """
        return Gemm(_mm(a, b, task, bias), a)

    mm_of_gathered = staticmethod(_mm)
    """wgrad, ``a @ b.T`` of operands that are gathered."""


ONE_GPU = OneGpu()


class Sharded(OneGpu):
    """The communication of a call of a layer that ranks share."""

    is_sharded = True
    parallel: TensorParallel
    mm_of_gathered = staticmethod(_local_mm)

    def __init__(self, parallel: TensorParallel, tokens: ShardMap | None, plan: LinearPlan) -> None:
        """``tokens`` are the layer's, under sequence parallelism."""
        self.parallel, self.tokens = parallel, tokens
        crosses = tokens is not None and any(map(tokens.block_crosses_shards, plan.token_blocks))
        self.gathers_x_first = crosses and parallel.gathers
        self.gathers_dy_first = crosses and parallel.scatters
        self.transposes_gathered = parallel.scatters and plan.dy.block == (-1, -1)
        has_one_scale = plan.casts_x_once and plan.x.block == (-1, -1)
        self.keeps_gathered = parallel.keep_gathered and parallel.gathers and has_one_scale

    def _tokens_to_gather(self, *, backward: bool) -> ShardMap | None:
        """The tokens of x, or of dy, where it is a shard of them when it has been cast."""
        gathers = self.parallel.scatters if backward else self.parallel.gathers
        is_gathered = self.gathers_dy_first if backward else self.gathers_x_first
        return self.tokens if gathers and not is_gathered else None

    def gather(self, x: Tensor, *, backward: bool = False) -> Tensor:
        return _gathered(self.parallel, self.tokens, x, backward=backward)

    def reduce(self, y: Tensor, *, backward: bool = False) -> Tensor:
        return _reduced(self.parallel, self.tokens, y, backward=backward)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        # One rank adds it to its partial sum.
        return None if self.parallel.mode == "row" and self.parallel.rank else bias

    def token_operand(
        self, operand: _Operand, block: Sequence[int], *, backward: bool
    ) -> _Operand | TokenShard:
        tokens = self._tokens_to_gather(backward=backward)
        if operand is None or tokens is None:
            return operand
        return TokenShard(self.parallel, tokens, operand, block)

    def output_shape(
        self, shape: Sequence[int], rows: int, features: int
    ) -> tuple[int, tuple[int, ...]]:
        rows = rows if self.tokens is None else self.tokens.unsharded_rows
        return rows, self.parallel.output_shape(shape, self.tokens, features)

    def mm(
        self, a: Operand, b: Operand, task: GemmTask, bias: Tensor | None = None, *,
        backward: bool = False, companion: TokenShard | None = None, keep: bool = False,
    ) -> Gemm:  # fmt: skip
        tokens, bias = self.tokens, self.bias(bias)
        if tokens is not None:
            task = task._replace(shape=(tokens.unsharded_rows, task.shape[1]))
        to_gather = self._tokens_to_gather(backward=backward)
        left = a if to_gather is None else _get_gathered(a.data)
        if to_gather is not None and left is None:
            return self._gather_and_mm(a, b, task, bias, to_gather, companion, keep)
        left = a if left is None else left
        reduces = (self.parallel.mode == "row") != backward and not self.parallel.partial
        if tokens is None or not reduces or not self._overlaps(a, b, task.plan, tokens):
            y = _local_mm(left, b, task, bias)
            return Gemm(self.reduce(y, backward=backward), left)
        (y,) = self._overlapped(mm_scatter, a, b, task, bias, companion)
        return Gemm(y[: tokens.rows_per_outer, : task.shape[1]].contiguous(), a)

    def _gather_and_mm(
        self, a: Operand, b: Operand, task: GemmTask, bias: Tensor | None, tokens: ShardMap,
        companion: TokenShard | None, keep: bool,
    ) -> Gemm:  # fmt: skip
        """The GEMM of an operand of which this rank has some tokens."""
        if not self._overlaps(a, b, task.plan, tokens, arrives=True):
            left = self.parallel.gather_operand(a, task.plan.left.block, tokens, 0)
            y = _local_mm(left, b, task, bias)
        else:
            y, q, scale = self._overlapped(gather_mm, a, b, task, bias, companion, keep)
            y = y[: task.shape[0], : task.shape[1]].contiguous()
            if not keep:
                return Gemm(y, a)
            left = Operand(q, scale)
        _set_gathered(a.data, left)
        return Gemm(y, left)

    def _overlaps(
        self, a: Operand, b: Operand, gemm: GemmPlan, tokens: ShardMap, *, arrives: bool = False
    ) -> bool:
        """Whether a GEMM runs beside communication.

        ``arrives``: ``a`` is a shard of the rows, which is gathered; else the output is scattered.
        """
        # What pays is told by sizes, which have to be the same on all ranks.
        parallel = self.parallel
        may = parallel.overlap is not False and tokens.outer == 1
        may = may and all(map_.is_even for map_ in parallel.features)
        if not may or not sees_others(parallel.group, a.data):
            return False
        local = tokens.chunk * tokens.inner
        fits = tokens.is_even and local % ALIGN == 0
        fits = fits and a.data.shape[0] == (local if arrives else tokens.unsharded_rows)
        sizes = tokens.unsharded_rows, b.data.shape[0], a.data.shape[1]
        return fits and (parallel.overlap is True or is_worth_it(*sizes, gemm.left.block))

    def _overlapped(
        self, op: Callable[..., tuple[Tensor, ...]], a: Operand, b: Operand, task: GemmTask,
        bias: Tensor | None, companion: TokenShard | None, *keep: bool,
    ) -> Sequence[Tensor]:  # fmt: skip
        """The results of an op that overlaps, which also gathers ``companion``."""
        gemm, dtype = task.plan, task.dtype
        if bias is not None:
            bias = F.pad(bias, (0, b.data.shape[0] - bias.shape[0]))
        operands = [*a, *b, *([] if bias is None else [bias])]
        options = gemm.left.block, gemm.right.block, dtype, gemm.fast_accum, self.parallel.name
        extras = [] if companion is None else companion.tensors_to_send()
        *results, data, scales = op(operands, *options, extras, *keep)
        if companion is not None:
            companion.set_gathered(data, scales)
        return results


def _gathered(
    parallel: TensorParallel, tokens: ShardMap | None, x: Tensor, *, backward: bool
) -> Tensor:
    """The rows of all ranks where x, or in backward dy, is a shard of them."""
    gathers = parallel.scatters if backward else parallel.gathers
    return parallel.gather(x, tokens) if gathers and tokens is not None else x


def _reduced(
    parallel: TensorParallel, tokens: ShardMap | None, y: Tensor, *, backward: bool
) -> Tensor:
    """The sum over ranks where this rank's GEMM is a partial one; of that its tokens, or all."""
    if (parallel.mode == "row") == backward or parallel.partial:
        return y
    return parallel.sum(y) if tokens is None else parallel.scatter(y, tokens)


class NoGroup:
    """Stands for the ranks of a module that has yet to be given their group."""

    group = None

    def __init__(self, size: int) -> None:
        self.size = size

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            f"tp_group must be set before the first call of a module for {self.size} "
            "tensor-parallel ranks; got None. Call set_tensor_parallel_group(group)."
        )


@dataclass(frozen=True)
class SharedScales:
    """Finds the scales of a weight that is stored in FP8 and of which a rank has a shard."""

    parallel: TensorParallel | NoGroup
    dim: int
    """The dimension that ranks share, of the weight's matrix or of each expert's."""

    def check(self, name: str, shape: Sequence[int], spec: Float8Spec) -> None:
        """Raise if a block that has a size crosses shards."""
        block, ranks = spec.block[self.dim - 2], self.parallel.size
        if block > 1 and any(map_.block_crosses_shards(block) for map_ in self.parallel.features):
            raise ValueError(
                f"{name} must give each of {ranks} ranks whole blocks of {block} to store them in "
                f"FP8; got {shape[self.dim - 2]} for each. Choose another size, another recipe, or "
                "weights in high precision."
            )

    def amaxes(self, value: Tensor, spec: Float8Spec) -> Tensor | None:
        """The amaxes over all ranks of a weight's blocks; None unless ranks share an amax."""
        return shared_amaxes([(self, value, spec)])[0]


def shared_amaxes(
    weights: Sequence[tuple[SharedScales, Tensor, Float8Spec]],
) -> list[Tensor | None]:
    """The ``SharedScales.amaxes`` of each weight: one all-reduce for each ``TensorParallel``."""
    amaxes: dict[int, Tensor] = {}
    groups: dict[TensorParallel | NoGroup, dict[int, Tensor]] = {}
    for i, (shard, value, spec) in enumerate(weights):
        if spec.amax_block[shard.dim - 2] == -1:
            groups.setdefault(shard.parallel, {})[i] = amaxes_of_blocks(value, spec.amax_block)
    for parallel, local in groups.items():
        shared = parallel.amax(torch.cat([amax.reshape(-1) for amax in local.values()]))
        amaxes |= zip(local, _unflatten_dense_tensors(shared, list(local.values())), strict=True)
    return [amaxes.get(i) for i in range(len(weights))]


def _side_by_side(shards: Tensor, dim: int) -> Tensor:
    """``[R, *shape]``, of each rank its shard, side by side along a dimension of the shards."""
    dtype, nbytes = shards.dtype, shards.shape[-1] * shards.element_size()
    if nbytes and nbytes % 8 == 0 and not torch.compiler.is_compiling():
        shards = shards.view(torch.int64)  # bytes one by one take four times as long
    # Of one column, what is flat is a view.
    return shards.movedim(0, dim).flatten(dim, dim + 1).contiguous().view(dtype)


def _after(count: int, dim: int) -> tuple[int, ...]:
    """``count`` more rows, or columns, behind those of a matrix, as ``F.pad`` takes it."""
    return (0, 0, 0, count) if dim == 0 else (0, count)


# Gradients that sequence parallelism makes partial: of parameters that all ranks have alike. Each
# rank has some of the tokens, so what it computes for a norm, or for a bias that is added to
# tokens, is a part of the gradient.


_PARTIAL_GRADIENTS = "_partial_gradients"
"""Attribute of a module: the names of such parameters. Their own marks are lost where they are
replaced, by FSDP2, ``copy.deepcopy`` or on the way from the meta device."""


def mark_sequence_parallel(module: nn.Module, sequence_parallel: bool, *names: str) -> None:
    """Set the attribute by which trainers know a module's parameters with partial gradients."""
    if sequence_parallel:
        setattr(module, _PARTIAL_GRADIENTS, (*getattr(module, _PARTIAL_GRADIENTS, ()), *names))
    for name in names:
        if (parameter := getattr(module, name, None)) is not None:
            parameter.sequence_parallel = sequence_parallel


def reduce_sequence_parallel_gradients(
    model: nn.Module, group: dist.ProcessGroup | None = None
) -> None:
    """Sum the gradients of parameters that sequence parallelism made partial, over the ranks.

    These are the parameters with ``parameter.sequence_parallel``, by which modules of this library
    mark them, and by which Megatron's trainer, which sums them itself, knows them. Call this after
    the last backward of a step, and before gradients are clipped. One all-reduce for each dtype
    carries all of them. All ranks of the group call it, and have gradients of the same parameters.

    Args:
        model: ``grad``, and ``main_grad`` where there is one, are summed in place. Those that are
            DTensors, of FSDP2, are summed shard by shard.
        group: the tensor-parallel group; None is that of the modules of the model, or the default
            group if none of them has one.

    Raises:
        ValueError: ``group`` is None, and the modules have several.

    >>> norm = float8lab.LayerNorm(4, sequence_parallel=True, device="cpu")
    >>> norm(torch.ones(2, 4)).sum().backward()
    >>> float8lab.distributed.reduce_sequence_parallel_gradients(norm)  # one rank: nothing to do
    """
    check_module("model", model)
    check_group("group", group)
    modules = list(model.modules())
    if group is None:
        groups = {id(g): g for m in modules if (g := getattr(m, "tp_group", None)) is not None}
        if len(groups) > 1:
            raise ValueError(
                "group must be given for a model whose modules have several tensor-parallel "
                f"groups; got None, and {len(groups)} groups. Call this for each group's part of "
                "the model."
            )
        group = next(iter(groups.values()), None)
    if rank_and_size(group)[1] == 1:
        return
    marked = dict.fromkeys(
        parameter
        for module in modules
        for name, parameter in module.named_parameters(recurse=False)
        if name in getattr(module, _PARTIAL_GRADIENTS, ())
        or getattr(parameter, "sequence_parallel", False)
    )
    batches: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in marked:
        for grad in (parameter.grad, getattr(parameter, "main_grad", None)):
            if grad is not None:
                local = local_of(grad)
                batches[local.dtype, local.device].append(local.detach())
    for gradients in batches.values():
        flat = torch.cat([grad.reshape(-1) for grad in gradients])
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_(gradients, _unflatten_dense_tensors(flat, gradients))
