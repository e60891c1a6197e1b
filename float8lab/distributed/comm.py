"""Communication between tensor-parallel ranks for the GEMMs of a layer; one GPU has none.

M tokens, N out features, K in features, R ranks; ``y = x @ weight.T``.

Note: the terms used here.

- *shard*: the part of an *unsharded* tensor that a rank has along a dimension, by a ``ShardMap``.
- *column parallel*: the weight is a shard of its rows, ``[N / R, K]``; y and dy are shards of their
  columns. *Row parallel*: weight and x are shards of their columns; each rank's GEMM is a *partial
  sum*.
- *sequence parallel*: x of a column parallel layer and y of a row parallel layer are shards of the
  *tokens*, the first dimension: tokens are *gathered* where they enter such a pair of layers, and
  sums are *scattered* where they leave it. Otherwise all ranks have all tokens.
- *tokens*, as a variable: the ``ShardMap`` of a tensor's tokens, known while the tensor exists.
- *comm*: the communication of a call. ``ONE_GPU`` sends nothing, ``Sharded`` sends between ranks.

FP8 data is sent as uint8, along with scales. A shared amax is the largest over ranks. If blocks of
tokens cross shards, an operand is gathered in high precision before its cast; if blocks of features
do, the layer runs in high precision. Gloo, NCCL, eager mode and graphs support all collectives.
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
from float8lab.ops.declare import is_traced, planned
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

    If a rank skips a layer, its collectives meet those of another layer on other ranks, which may
    have the same shapes. So ranks compare the order from time to time.
    """

    EVERY = 256
    """Number of calls after which ranks compare the order."""
    of_groups: ClassVar[WeakKeyDictionary[dist.ProcessGroup, CallOrder]] = WeakKeyDictionary()
    """The call order of each existing process group."""

    def __init__(self) -> None:
        self._layers = self._calls = self._order = 0

    def record_call(self, layer: TensorParallel) -> None:
        """Record a call of a layer; the number of a layer is set at its first call.

        Raises:
            RuntimeError: on all ranks, if they have called different layers.
        """
        if not layer.call_number:
            self._layers += 1
            layer.call_number.append(self._layers)
        self._calls += 1
        self._order = hash((self._order, layer.call_number[0]))
        if self._calls % self.EVERY:
            return
        # No shard's sizes begin with -1, in case another rank is waiting for sizes of shards.
        orders = layer.exchange_numbers(-1, self._layers, self._order).tolist()
        if any(order != orders[0] for order in orders):
            raise RuntimeError(
                "tensor-parallel ranks must run the same layers in the same order; got others on "
                f"some of the {layer.size} ranks within the last {self.EVERY} calls. Find what "
                "makes a rank leave a layer out, or call one more, and go on from a checkpoint "
                "before."
            )


@dataclass(frozen=True)
class TensorParallel:
    """The way in which the ranks of a group share the GEMMs of a layer."""

    group: dist.ProcessGroup
    """The process group."""
    mode: str
    """``"column"`` or ``"row"``: the weight is a shard of its rows or columns. ``"heads"``: the
    operands of attention are shards of heads."""
    sequence_parallel: bool = False
    """Whether tokens are sharded outside a pair of layers."""
    keep_gathered: bool = False
    """Keep a gathered x that has one scale for wgrad, instead of gathering it twice."""
    overlap: bool | None = None
    """Whether GEMMs overlap with communication; None: where that was measured to be faster."""
    casts_only: bool = False
    """Ranks share only scales: the caller sends tokens and sums over ranks."""
    partial: bool = False
    """Leave sums over ranks to the caller: each rank returns its partial sum."""
    features: tuple[ShardMap, ...] = field(default=(), compare=False)
    """The shards of the features that ranks share: several if the weight is a concatenation of
    matrices, none if they are unknown."""
    scale_groups: tuple[dist.ProcessGroup, ...] = ()
    """Additional groups, of context parallelism, whose ranks share the scales, too."""
    name: str = ""
    """The group's name for functional collectives. ``__post_init__`` sets it, as it sets ``size``
    and ``rank``."""
    size: int = 0
    rank: int = 0
    call_number: list[int] = field(default_factory=list, compare=False, repr=False)
    """The number of the layer in its group's order of first calls, once it has been called."""
    settings: tuple[object, ...] = field(default=(), compare=False, repr=False)
    """The first arguments, with names in place of groups, which a compiled graph can hold."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.group.group_name)
        object.__setattr__(self, "size", dist.get_world_size(self.group))
        object.__setattr__(self, "rank", dist.get_rank(self.group))
        settings = (
            self.name, self.mode, self.sequence_parallel, self.keep_gathered, self.overlap,
            self.casts_only, self.partial, self.features,
            tuple(group.group_name for group in self.scale_groups),
        )  # fmt: skip
        object.__setattr__(self, "settings", settings)

    def __deepcopy__(self, memo: object) -> TensorParallel:
        return self  # a group cannot be copied

    def __reduce__(self) -> tuple[type, tuple[int]]:
        return NoGroup, (self.size,)  # another process does not have the group

    def sharded_dim(self, index: int) -> int | None:
        """Return the sharded dimension of x, the weight or dy (0, 1, 2), or None."""
        if self.mode == "heads":
            return 1
        tokens = 0 if self.sequence_parallel else None
        return ((tokens, 0, 1) if self.mode == "column" else (1, 1, tokens))[index]

    @property
    def gathers(self) -> bool:
        """Whether the tokens that enter the layer, and their gradients, are sharded."""
        return self.sequence_parallel and self.mode == "column"

    @property
    def scatters(self) -> bool:
        """Whether the tokens that leave the layer are sharded."""
        return self.sequence_parallel and self.mode == "row"

    # The tokens of a call.

    def tokens_of(self, x: Tensor) -> ShardMap | None:
        """Return the tokens of a call's input ``[..., K]``; None without sequence parallelism.

        A rank knows only the size of its own shard. Ranks exchange their sizes through CPU memory,
        once for each tensor that comes from outside; for tensors computed by layers the tokens are
        known (``remember_tokens``). All ranks run the same program, so tokens are known on all
        ranks or on none; but a size may change on one rank only. A compiled graph assumes that all
        shards are as large as its own.

        Raises:
            RuntimeError: on all ranks, if some have called different layers.
            ValueError: on all ranks, if the shards do not fit together.
        """
        if not is_traced():
            CallOrder.of_groups.setdefault(self.group, CallOrder()).record_call(self)
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
        if is_traced():
            return ShardMap(lead * self.size, lead, self.size, self.rank, inner)
        group, tokens = _TensorFacts.tokens.get(x) or ("", None)
        if tokens is None or group != self.name or tokens.rows_per_outer != lead * inner:
            tokens = self._agree_on_tokens(lead, inner, x.shape[-1])
            self.remember_tokens(x, tokens)
        return tokens

    def remember_tokens(self, x: Tensor, tokens: ShardMap | None) -> None:
        """Remember the tokens of the shard ``x`` for layers that get it as their input."""
        if tokens is not None and not is_traced():
            _TensorFacts.tokens[x] = self.name, tokens

    def _agree_on_tokens(self, lead: int, inner: int, features: int) -> ShardMap:
        leads, *other_sizes = self.exchange_numbers(lead, inner, features).t().tolist()
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
        """Return the shape of a layer's output, given that of its input."""
        if tokens is None:
            return (*shape[:-1], features)
        lead = tokens.size if self.mode == "column" else tokens.length
        return (lead, *shape[1:-1], features)

    # Collectives.

    def exchange_numbers(self, *numbers: int) -> Tensor:
        """Exchange numbers between all ranks through CPU memory; return a row for each rank."""
        host = channel(self.group).host_group(self.group).group_name
        return all_gathered(torch.tensor([numbers], device="cpu"), self.size, host)

    def amax(self, amax: Tensor) -> Tensor:
        """Return the maximum over ranks of amaxes, infinite where one of them is NaN."""
        for group in (self.group, *self.scale_groups):
            amax = amax_over_ranks(amax, group)
        return amax

    def sum(self, partial: Tensor) -> Tensor:
        """Sum a tensor over ranks, for all ranks."""
        return all_reduced(partial, "sum", self.name)

    def scatter(self, partial: Tensor, tokens: ShardMap) -> Tensor:
        """Sum ``[M, ...]`` over ranks and return this rank's rows of the sum."""
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
        """Gather an unsharded matrix from shards of its rows or columns."""
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
            gathered = _concatenate(gathered.unflatten(0, (self.size, -1)), dim)
        if gathered.shape[dim] != length:
            gathered = gathered.narrow(dim, 0, length)
        if outer > 1:
            gathered = gathered.flatten(dim - 1, dim)
        return gathered.view(shard.dtype) if raw.dtype != shard.dtype else gathered

    def gather_operand(
        self, operand: Operand, block: Sequence[int], tokens: ShardMap, dim: int
    ) -> Operand:
        """Gather an operand with padding; ``dim`` is the tokens', whose blocks cross no shards."""
        (q, scale), size = operand, block[dim]
        data, padding = self.gather(q, tokens, dim), -tokens.unsharded_rows % ALIGN
        if padding:
            data = F.pad(data.view(torch.uint8), _pad_end(padding, dim)).view(q.dtype)
        if size == -1:  # the scales span all tokens, so each rank has them
            return Operand(data.contiguous(), scale)
        scale = self.gather(scale, tokens.blocks(size), dim)
        if missing := -(-data.shape[dim] // size) - scale.shape[dim]:
            scale = F.pad(scale, _pad_end(missing, dim), value=1.0)
        if scales_by_column(block):
            scale = scale.t().contiguous().t()
        return Operand(data.contiguous(), scale)

    # Differentiable, for layers in high precision.

    def gather_features(self, x: Tensor, *, gather: bool) -> Tensor:
        """Gather the features of all ranks, or take this rank's shard of them; differentiable.
        The gradient of gathered features is assumed to be the same on all ranks."""
        size = x.shape[-1] * (self.size if gather else 1)
        features = ShardMap.of(size, self.size, self.rank)

        def gather_all(x: Tensor) -> Tensor:
            return self.gather(as_matrix(x), features, 1).view(*x.shape[:-1], size)

        def to_shard(x: Tensor) -> Tensor:
            return features.shard(x, -1).contiguous()

        return GradientMap.run(x, *((gather_all, to_shard) if gather else (to_shard, gather_all)))

    def gather_tokens(self, x: Tensor, tokens: ShardMap | None) -> Tensor:
        """Gather the tokens that enter a layer, as its GEMM takes them; differentiable."""
        if self.mode == "row":
            return x
        return self._move_tokens(x, tokens, _gather_input, _reduce_output)

    def linear(self, x: Tensor, w: Tensor, bias: Tensor | None, tokens: ShardMap | None) -> Tensor:
        """Run a layer in high precision on what ``gather_tokens`` returned; differentiable."""
        if self.mode == "column":
            return F.linear(x, w, bias)
        y = self._move_tokens(F.linear(x, w), tokens, _reduce_output, _gather_input)
        return y if bias is None else y + bias

    def _move_tokens(
        self, x: Tensor, tokens: ShardMap | None, move: Callable[..., Tensor],
        move_back: Callable[..., Tensor],
    ) -> Tensor:  # fmt: skip
        """Gather or reduce the tokens of a layer; their gradients are moved in reverse."""
        shape = x.shape

        def forward(x: Tensor) -> Tensor:
            y = move(self, tokens, as_matrix(x), backward=False)
            return y.view(self.output_shape(shape, tokens, shape[-1]))

        def backward(dy: Tensor) -> Tensor:
            return move_back(self, tokens, as_matrix(dy), backward=True).reshape(shape)

        return GradientMap.run(x, forward, backward)


def misfit(features: Sequence[ShardMap], plan: LinearPlan) -> str | None:
    """Say why a plan's blocks do not fit shards of features, and which sizes fit; None: they do."""
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


class _TensorFacts:
    """Facts about tensors, for as long as these exist; several layers may share an input."""

    tokens: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
    """The group's name and the ``ShardMap`` of a shard of tokens."""
    gathered: ClassVar[WeakTensorKeyDictionary] = WeakTensorKeyDictionary()
    """The unsharded operand that was gathered from a shard's FP8 data."""


def inherit_tokens(y: Tensor, *inputs: Tensor) -> Tensor:
    """Give ``y`` the tokens of its inputs, if those of any input are known, and return ``y``."""
    for x in inputs:
        tokens = None if is_traced() else _TensorFacts.tokens.get(x)
        if tokens is not None:
            _TensorFacts.tokens[y] = tokens
    return y


def _get_gathered(data: Tensor) -> Operand | None:
    """Return the unsharded operand of a shard's FP8 data, if a layer has gathered it."""
    return None if is_traced() else _TensorFacts.gathered.get(data)


def _set_gathered(data: Tensor, operand: Operand) -> None:
    if not is_traced():
        _TensorFacts.gathered[data] = operand


# The GEMMs of one call.


class GemmTask(NamedTuple):
    """The casts of a GEMM's operands, and the GEMM's output without padding."""

    plan: GemmPlan
    shape: tuple[int, int]
    """The sizes of the output; its rows are the left operand's, or those of all ranks."""
    dtype: torch.dtype
    offsets: Offsets | None = None
    """The offsets of experts' rows, which ranks do not share."""
    after: Tensor | None = None
    """In a graph without offsets, a tensor that is computed before the GEMM starts."""


class Gemm(NamedTuple):
    """The output of a GEMM, and its left operand, which is unsharded if the caller asked for it."""

    y: Tensor
    left: Operand


def _mm(a: Operand, b: Operand, task: GemmTask, bias: Tensor | None = None) -> Tensor:
    """Compute ``a @ b.T + bias`` of two operands, for each expert's rows if there are offsets."""
    gemm, shape, dtype, offsets, after = task
    if bias is not None and bias.shape[-1] != b.data.shape[-2]:
        bias = F.pad(bias, (0, b.data.shape[-2] - bias.shape[-1]))
    operands = *a, gemm.left.block, *b, gemm.right.block, bias
    groups = (None, after) if after is not None else offsets or ()
    y: Tensor = scaled_mm_op(*operands, dtype, gemm.fast_accum, *groups)
    # The padding is removed. A compiled graph always crops, since a condition would fix the number
    # of tokens.
    if torch.compiler.is_compiling() or y.shape[-2:] != shape:
        return y[..., : shape[0], : shape[1]]
    return y


def _mm_of_rank(a: Operand, b: Operand, task: GemmTask, bias: Tensor | None) -> Tensor:
    return _mm(a, b, task, bias).contiguous()


_planned_mm = planned(_mm_of_rank)


def _local_mm(a: Operand, b: Operand, task: GemmTask, bias: Tensor | None = None) -> Tensor:
    """Run this rank's GEMM of gathered operands; on a GPU as a plan, between collectives."""
    assert task.offsets is None, "modules of experts send rows and sums themselves"
    return (_planned_mm if a.data.is_cuda else _mm_of_rank)(a, b, task, bias)


class TokenShard:
    """An operand of wgrad, ``[features, tokens]``, of which each rank has some tokens.

    It is gathered during a GEMM that leaves time for it, otherwise on demand.
    """

    __slots__ = ("block", "gathered", "operand", "parallel", "tokens")

    def __init__(
        self, parallel: TensorParallel, tokens: ShardMap, operand: Operand, block: Sequence[int]
    ) -> None:
        """Store this rank's shard."""
        self.parallel, self.tokens, self.operand, self.block = parallel, tokens, operand, block
        self.gathered = _get_gathered(operand.data)

    def gather(self) -> Operand:
        """Return the operand with the tokens of all ranks."""
        if self.gathered is None:
            self.gathered = self.parallel.gather_operand(self.operand, self.block, self.tokens, 1)
            _set_gathered(self.operand.data, self.gathered)
        return self.gathered

    def tensors_to_send(self) -> list[Tensor]:
        """Return the tensors to gather: FP8 data, and scales unless they span all tokens."""
        q, scale = self.operand
        return [q.contiguous(), *[scale.t().contiguous()] * (self.block[1] != -1)]

    def set_gathered(self, data: Tensor, scales: Tensor | None) -> None:
        """Set the gathered operand from the ``[R, *shape]`` of the sent tensors."""
        raw, scale = _concatenate(data, 1), self.operand.scale
        if scales is not None and scales.numel():
            scale = scales.flatten(0, 1).t()
            scale = scale if scales_by_column(self.block) else scale.contiguous()
        self.gathered = Operand(raw, scale)
        _set_gathered(self.operand.data, self.gathered)


_Operand = TypeVar("_Operand", bound=Operand | None)


class OneGpu:
    """The communication of a call on one GPU, which sends nothing."""

    parallel: TensorParallel | None = None
    tokens: ShardMap | None = None
    is_sharded = False

    gathers_x_first = False
    """Whether x is gathered in high precision before its cast, as blocks of tokens cross shards."""
    gathers_dy_first = False
    keeps_gathered = False
    """Whether the gathered x of fprop is kept and transposed for wgrad."""
    transposes_gathered = False
    """Whether wgrad may transpose the dy that dgrad gathers."""

    def gather(self, x: Tensor, *, backward: bool = False) -> Tensor:
        """Return the matrix that a GEMM in high precision takes: x, or in backward dy."""
        return x

    def reduce(self, y: Tensor, *, backward: bool = False) -> Tensor:
        """Return the output of the layer, given its GEMM's output; in backward dx."""
        return y

    def bias(self, bias: Tensor | None) -> Tensor | None:
        """Return the bias that this rank's GEMM adds."""
        return bias

    def token_operand(
        self, operand: _Operand, block: Sequence[int], *, backward: bool
    ) -> _Operand | TokenShard:
        """Return an operand of wgrad, ``[features, tokens]`` of x or dy, or the shard to gather."""
        return operand

    def output_shape(
        self, shape: Sequence[int], rows: int, features: int
    ) -> tuple[int, tuple[int, ...]]:
        """Return the number of rows of the GEMM's output, and the shape of the layer's output.

        ``shape`` is that of the layer's input, which is a matrix of ``rows`` rows.
        """
        return rows, (*shape[:-1], features)

    def mm(
        self, a: Operand, b: Operand, task: GemmTask, bias: Tensor | None = None, *,
        backward: bool = False, companion: TokenShard | None = None, keep: bool = False,
    ) -> Gemm:  # fmt: skip
        """Compute fprop, ``a @ b.T + bias``, or dgrad: ``comm.reduce(mm(comm.gather(a), b))``.

        Args:
            a: the FP8 operand of x or dy on this rank.
            b: the operand of the weight, or of its transpose.
            bias: the bias of this rank's features.
            backward: whether this is dgrad.
            companion: an operand that may be gathered at the same time.
            keep: whether to return the left operand that was multiplied.
        """
        return Gemm(_mm(a, b, task, bias), a)

    mm_of_gathered = staticmethod(_mm)
    """Compute wgrad, ``a @ b.T`` of gathered operands."""


ONE_GPU = OneGpu()


class Sharded(OneGpu):
    """The communication of a call of a layer that ranks share."""

    is_sharded = True
    parallel: TensorParallel
    mm_of_gathered = staticmethod(_local_mm)

    def __init__(self, parallel: TensorParallel, tokens: ShardMap | None, plan: LinearPlan) -> None:
        """Decide what to gather; ``tokens`` are the layer's under sequence parallelism."""
        self.parallel, self.tokens = parallel, tokens
        crosses = tokens is not None and any(map(tokens.block_crosses_shards, plan.token_blocks))
        self.gathers_x_first = crosses and parallel.gathers
        self.gathers_dy_first = crosses and parallel.scatters
        self.transposes_gathered = parallel.scatters and plan.dy.block == (-1, -1)
        has_one_scale = plan.casts_x_once and plan.x.block == (-1, -1)
        self.keeps_gathered = parallel.keep_gathered and parallel.gathers and has_one_scale

    def _tokens_to_gather(self, *, backward: bool) -> ShardMap | None:
        """Return the tokens of x, or of dy, if its cast is a shard of tokens."""
        gathers = self.parallel.scatters if backward else self.parallel.gathers
        is_gathered = self.gathers_dy_first if backward else self.gathers_x_first
        return self.tokens if gathers and not is_gathered else None

    def gather(self, x: Tensor, *, backward: bool = False) -> Tensor:
        return _gather_input(self.parallel, self.tokens, x, backward=backward)

    def reduce(self, y: Tensor, *, backward: bool = False) -> Tensor:
        return _reduce_output(self.parallel, self.tokens, y, backward=backward)

    def bias(self, bias: Tensor | None) -> Tensor | None:
        # Only the first rank adds the bias to its partial sum.
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
        """Compute the GEMM of a left operand of which this rank has some tokens."""
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
        """Whether a GEMM overlaps with communication.

        ``arrives``: ``a`` is a shard of rows to be gathered; otherwise the output is scattered.
        """
        # The decision depends only on sizes that are the same on all ranks.
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
        """Run an op that overlaps a GEMM with communication, and gather ``companion`` with it."""
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


def _gather_input(
    parallel: TensorParallel, tokens: ShardMap | None, x: Tensor, *, backward: bool
) -> Tensor:
    """Gather the rows of all ranks if x, or in backward dy, is a shard of rows."""
    gathers = parallel.scatters if backward else parallel.gathers
    return parallel.gather(x, tokens) if gathers and tokens is not None else x


def _reduce_output(
    parallel: TensorParallel, tokens: ShardMap | None, y: Tensor, *, backward: bool
) -> Tensor:
    """Sum partial GEMMs over ranks, and return the sum or this rank's tokens of it."""
    if (parallel.mode == "row") == backward or parallel.partial:
        return y
    return parallel.sum(y) if tokens is None else parallel.scatter(y, tokens)


class NoGroup:
    """A placeholder for the ranks of a module that has not been given their group."""

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
    """Finds the scales of a weight that is stored in FP8 and sharded over ranks."""

    parallel: TensorParallel | NoGroup
    dim: int
    """The sharded dimension of the weight's matrix, or of each expert's matrix."""

    def check(self, name: str, shape: Sequence[int], spec: Float8Spec) -> None:
        """Raise if a block of limited size crosses shards."""
        block, ranks = spec.block[self.dim - 2], self.parallel.size
        if block > 1 and any(map_.block_crosses_shards(block) for map_ in self.parallel.features):
            raise ValueError(
                f"{name} must give each of {ranks} ranks whole blocks of {block} to store them in "
                f"FP8; got {shape[self.dim - 2]} for each. Choose another size, another recipe, or "
                "weights in high precision."
            )

    def amaxes(self, value: Tensor, spec: Float8Spec) -> Tensor | None:
        """Return the amaxes of a weight's blocks over all ranks; None unless ranks share one."""
        return shared_amaxes([(self, value, spec)])[0]


def shared_amaxes(
    weights: Sequence[tuple[SharedScales, Tensor, Float8Spec]],
) -> list[Tensor | None]:
    """Return ``SharedScales.amaxes`` of each weight, with one all-reduce per ``TensorParallel``."""
    amaxes: dict[int, Tensor] = {}
    groups: dict[TensorParallel | NoGroup, dict[int, Tensor]] = {}
    for i, (shard, value, spec) in enumerate(weights):
        if spec.amax_block[shard.dim - 2] == -1:
            groups.setdefault(shard.parallel, {})[i] = amaxes_of_blocks(value, spec.amax_block)
    for parallel, local in groups.items():
        shared = parallel.amax(torch.cat([amax.reshape(-1) for amax in local.values()]))
        amaxes |= zip(local, _unflatten_dense_tensors(shared, list(local.values())), strict=True)
    return [amaxes.get(i) for i in range(len(weights))]


def _concatenate(shards: Tensor, dim: int) -> Tensor:
    """Concatenate shards ``[R, *shape]`` of all ranks along a dimension of the shards."""
    dtype, nbytes = shards.dtype, shards.shape[-1] * shards.element_size()
    if nbytes and nbytes % 8 == 0 and not torch.compiler.is_compiling():
        shards = shards.view(torch.int64)  # copying single bytes takes four times as long
    # With a single column, ``flatten`` returns a view.
    return shards.movedim(0, dim).flatten(dim, dim + 1).contiguous().view(dtype)


def _pad_end(count: int, dim: int) -> tuple[int, ...]:
    """Return the argument of ``F.pad`` that appends ``count`` rows or columns to a matrix."""
    return (0, 0, 0, count) if dim == 0 else (0, count)


# Sequence parallelism makes some gradients of replicated parameters partial: each rank has some of
# the tokens, so the gradient that it computes for a norm, or for a bias added to tokens, is a part
# of the sum.


_PARTIAL_GRADIENTS = "_partial_gradients"
"""The attribute of a module that holds the names of such parameters. Marks on the parameters are
lost when FSDP2, ``copy.deepcopy`` or a move from the meta device replaces the parameters."""


def mark_sequence_parallel(module: nn.Module, sequence_parallel: bool, *names: str) -> None:
    """Set the attribute by which trainers recognize parameters with partial gradients."""
    if sequence_parallel:
        setattr(module, _PARTIAL_GRADIENTS, (*getattr(module, _PARTIAL_GRADIENTS, ()), *names))
    for name in names:
        if (parameter := getattr(module, name, None)) is not None:
            parameter.sequence_parallel = sequence_parallel


def reduce_sequence_parallel_gradients(
    model: nn.Module, group: dist.ProcessGroup | None = None
) -> None:
    """Sum the gradients that sequence parallelism made partial over the ranks.

    The parameters concerned have ``parameter.sequence_parallel``. Modules of this library set that
    mark, and Megatron's trainer, which sums these gradients itself, recognizes it. Call this after
    the last backward of a step and before clipping gradients. One all-reduce per dtype sends all
    gradients. All ranks of the group must call it, with gradients of the same parameters.

    Args:
        model: ``grad``, and ``main_grad`` if there is one, are summed in place. Gradients that are
            DTensors of FSDP2 are summed shard by shard.
        group: the tensor-parallel group; None is that of the modules of the model, or the default
            group if no module has one.

    Raises:
        ValueError: ``group`` is None, and the modules have several groups.

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
