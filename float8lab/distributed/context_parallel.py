"""Context parallelism: ranks share the tokens of each sequence, and in attention its heads.

S tokens of a sequence, R ranks, H heads, D features of a head.

Outside attention a rank has ``S / R`` tokens of a sequence, which a load balancing strategy
chooses. For attention there are two kinds of ranks, which may be combined:

- ranks that *exchange heads* exchange tokens for heads. Each attends to the full sequence for
  ``H / R`` heads, which gives the same numbers as a single rank, whatever the mask, and sends the
  results back to the ranks of the tokens;
- ranks that *share tokens* attend with the queries of their own tokens, for all heads, to the keys
  and values of all ranks, which are passed on or gathered (``nn/attention/ring.py``).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab import arguments
from float8lab.distributed.ranks import all_gathered, exchanged, rank_and_size, tensors_of_ranks
from float8lab.tensor.differentiation import GradientMap

__all__ = [
    "DUAL_CHUNK_SWAP", "ONE_RANK", "CPAttentionLoadBalancingStrategy", "ContextParallel",
    "TokenRanks", "get_batch_on_this_cp_rank", "join_sequence", "places_of", "positions",
    "shard_sequence",
]  # fmt: skip


Value = TypeVar("Value")


class CPAttentionLoadBalancingStrategy(str, enum.Enum):
    """Which tokens of a sequence a context-parallel rank has. The name of a member may be used."""

    DUAL_CHUNK_SWAP = "dual_chunk_swap"
    """Rank r has chunks r and 2 R - 1 - r of 2 R: all ranks have equal parts of a causal mask."""
    NO_LOAD_BALANCE = "no_load_balance"
    """Rank r has the r-th of R chunks; packed sequences (thd) are cut into chunks together."""


DUAL_CHUNK_SWAP = CPAttentionLoadBalancingStrategy.DUAL_CHUNK_SWAP


@dataclass(frozen=True)
class TokenRanks:
    """Ranks that share tokens, and the rank of this process among them."""

    size: int = 1
    rank: int = 0
    strategy: CPAttentionLoadBalancingStrategy = DUAL_CHUNK_SWAP
    group: dist.ProcessGroup | None = None
    """The process group; None if nothing is sent, or after a module came from another process."""

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, strategy: object) -> TokenRanks:
        """Return the ranks of a group; None is a single rank.

        ``strategy`` may be a name, or a member of any enumeration that has the name.
        """
        name = strategy.name if isinstance(strategy, enum.Enum) else strategy
        name = name.lower() if isinstance(name, str) else name
        choices = "dual_chunk_swap", "no_load_balance"
        arguments.check_choice("load_balancing_strategy", name, choices)
        member = CPAttentionLoadBalancingStrategy(name)
        if group is None or dist.get_world_size(group) <= 1:
            return cls(strategy=member)
        return cls(dist.get_world_size(group), dist.get_rank(group), member, group)

    @property
    def name(self) -> str:
        """The group's name for functional collectives."""
        return cast("dist.ProcessGroup", self.group).group_name

    def chunks_of(self, rank: int) -> list[int]:
        """Return the numbers of a rank's chunks, which all have the same length."""
        return [rank, 2 * self.size - 1 - rank] if self.strategy is DUAL_CHUNK_SWAP else [rank]

    def __deepcopy__(self, memo: object) -> TokenRanks:
        return self  # a group cannot be copied

    def __reduce__(self) -> tuple[type[TokenRanks], tuple[object, ...]]:
        return TokenRanks, (self.size, self.rank, self.strategy)  # without the group


ONE_RANK = TokenRanks()


@dataclass(frozen=True)
class ContextParallel:
    """The way in which context-parallel ranks share attention."""

    exchange_heads: TokenRanks
    share_tokens: TokenRanks
    """Rank p of these and a of A ``exchange_heads`` has the tokens of rank ``p * A + a`` of all."""
    gathers: bool = False
    """Whether ranks that share tokens gather keys and values, rather than pass them on."""
    grid: tuple[TokenRanks, ...] = ()
    """If ``exchange_heads`` are in two groups: those of the ranks p and a of rank ``p * A + a``."""

    @classmethod
    def of(
        cls, cp_group: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None,
        cp_comm_type: str | None, strategy: object,
    ) -> ContextParallel | None:  # fmt: skip
        """Make it for one group, or for two with "a2a+p2p"; return None for a single rank."""
        comm_type = "a2a" if cp_comm_type is None else cp_comm_type
        arguments.check_choice("cp_comm_type", comm_type, ("p2p", "all_gather", "a2a", "a2a+p2p"))
        groups = list(cp_group) if isinstance(cp_group, Sequence) else [cp_group]
        for group in groups:
            arguments.check_group("cp_group", group)
        needed = 2 if comm_type == "a2a+p2p" and groups != [None] else 1
        if len(groups) != needed:
            raise ValueError(
                f"cp_group must be {needed} groups for cp_comm_type={comm_type!r}; got "
                f"{len(groups)}. Pass [ranks that exchange heads, ranks that share tokens] for "
                "'a2a+p2p', and one group for the others."
            )
        ranks = [TokenRanks.of(group, strategy) for group in groups]
        ranks.append(replace(ranks[0], size=1, rank=0, group=None))
        if comm_type.startswith("a2a"):
            context = cls(ranks[0], ranks[1])
        else:
            context = cls(ranks[1], ranks[0], comm_type == "all_gather")
        return context if context.ranks.size > 1 else None

    @property
    def ranks(self) -> TokenRanks:
        """All ranks, and this process's rank among them."""
        heads, tokens = self.exchange_heads, self.share_tokens
        rank = tokens.rank * heads.size + heads.rank
        return TokenRanks(tokens.size * heads.size, rank, heads.strategy)

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """The process groups with several ranks."""
        groups = (ranks.group for ranks in (self.exchange_heads, self.share_tokens, *self.grid))
        return tuple(group for group in groups if group is not None)

    def with_whole_sequences(self) -> ContextParallel:
        """Return the same ranks for a call that needs full sequences: all exchange heads."""
        heads, tokens = self.exchange_heads, self.share_tokens
        if tokens.size == 1:
            return self
        if heads.size == 1:
            return ContextParallel(tokens, heads)
        return ContextParallel(self.ranks, ONE_RANK, grid=(tokens, heads))

    def check_heads(self, heads: int, groups: int) -> None:
        """Raise unless the ranks can share these numbers of query heads and key/value heads."""
        if not self.groups:
            raise RuntimeError(
                "cp_group must be set on a module that was pickled with one of "
                f"{self.ranks.size} ranks; got none. Call set_context_parallel_group."
            )
        size = self.exchange_heads.size
        if heads % size or (groups % size and size % groups):
            raise ValueError(
                f"cp_group must have ranks that share the module's heads, {heads} of queries and "
                f"{groups} of keys and values; got {size}. Use a number that divides both, or "
                "one that divides the first and is a multiple of the second. Plain or causal "
                "attention needs none with cp_comm_type 'p2p' or 'all_gather'."
            )

    def places(
        self, name: str, starts: Tensor | None, tokens: int, device: torch.device
    ) -> Tensor | None:
        """Return ``places_of`` for the ranks that exchange heads, or None if there are none."""
        _check_sequences(name, starts, tokens, self.ranks)
        if self.exchange_heads.size == 1:
            return None
        return places_of(name, starts, tokens, self.exchange_heads, device)

    def full_sequence(self, x: Tensor, dim: int, places: Tensor | None) -> Tensor:
        """Exchange ``[..., S / R, ..., H, D]`` for ``[..., S, ..., H / R, D]``; differentiable.

        If there are fewer heads than ranks, heads are repeated, one for each rank. ``dim`` is the
        dimension of tokens; R counts the ranks that exchange heads, S their tokens. Without
        ``places`` nothing is sent, and the result has other values.
        """
        size = self.exchange_heads.size
        if x.shape[-2] < size:
            x = x.repeat_interleave(size // x.shape[-2], -2)
        if places is None:
            return x.unflatten(-2, (size, -1)).movedim(-3, dim).flatten(dim, dim + 1)
        moves = (self._to_heads, self._to_tokens)
        return GradientMap.run(x, *(partial(move, dim=dim, places=places) for move in moves))

    def local_tokens(self, x: Tensor, dim: int, places: Tensor) -> Tensor:
        """Invert ``full_sequence``: return the results of all ranks for this rank's tokens."""
        moves = (self._to_tokens, self._to_heads)
        return GradientMap.run(x, *(partial(move, dim=dim, places=places) for move in moves))

    def _to_heads(self, x: Tensor, dim: int, places: Tensor) -> Tensor:
        """Exchange tokens for heads."""
        slices = x.movedim(dim, 0).unflatten(-2, (self.exchange_heads.size, -1)).movedim(-3, 0)
        rows = self.exchange(slices).flatten(0, 1)
        return torch.empty_like(rows).index_copy_(0, places.flatten(), rows).movedim(0, dim)

    def _to_tokens(self, x: Tensor, dim: int, places: Tensor) -> Tensor:
        """Exchange heads for tokens."""
        rows = x.movedim(dim, 0).index_select(0, places.flatten())
        slices = self.exchange(rows.unflatten(0, places.shape))
        return slices.movedim(0, -3).flatten(-3, -2).movedim(0, dim)

    def exchange(self, slices: Tensor) -> Tensor:
        """Send slice r of ``[R, ...]`` to rank r, and return the slices from all ranks."""
        grid = self.grid or (self.exchange_heads,)
        slices = slices.unflatten(0, [ranks.size for ranks in grid])
        for dim, ranks in enumerate(grid):
            counts = [1] * ranks.size
            slices = exchanged(slices.movedim(dim, 0), counts, counts, ranks.group).movedim(0, dim)
        return slices.flatten(0, len(grid) - 1)

    def all_heads(self, x: Tensor) -> Tensor:
        """Gather ``[H / R]`` entries of the ranks that exchange heads to ``[H]``; no gradient."""
        for ranks in reversed(self.grid or (self.exchange_heads,)):
            x = all_gathered(x.detach(), ranks.size, ranks.name)
        return x

    def local_heads(self, x: Value, dim: int) -> Value:
        """Return this rank's entries of a tensor with one per head; return other values as is."""
        if not isinstance(x, Tensor) or x.ndim < -dim or x.shape[dim] == 1:
            return x
        return cast("Value", x.chunk(self.exchange_heads.size, dim)[self.exchange_heads.rank])


def positions(starts: Tensor, tokens: int, ranks: TokenRanks) -> Tensor:
    """Return the positions of each rank's tokens in the full sequences, ``[R, tokens]`` int64.

    Args:
        starts: ``[B + 1]``, the starts of the sequences, and the end of the last one. Tokens behind
            that end are distributed like another sequence.
        tokens: the number of tokens of a rank.
        ranks: the R ranks.

    >>> positions(torch.tensor([0, 8]), 4, TokenRanks(2))
    tensor([[0, 1, 6, 7],
            [2, 3, 4, 5]])
    """
    size = ranks.size
    local = torch.arange(tokens, device=starts.device)
    rank = torch.arange(size, device=starts.device)[:, None]
    if ranks.strategy is not DUAL_CHUNK_SWAP:
        return rank * tokens + local
    bounds = torch.cat((starts.long(), starts.new_full((1,), tokens * size).long()))
    sequence = torch.searchsorted(bounds // size, local, right=True) - 1
    start = bounds[sequence]
    chunk = (bounds[sequence + 1] - start) // (2 * size)
    within = local - start // size
    is_second = within >= chunk
    chunk_index = torch.where(is_second, 2 * size - 1 - rank, rank)
    return start + chunk_index * chunk + within - is_second * chunk


def places_of(
    name: str, starts: Tensor | None, tokens: int, ranks: TokenRanks, device: torch.device
) -> Tensor:
    """Return ``positions``, after checking that the sequences have chunks for all ranks.

    ``name`` is the tensor that has the tokens, for errors; ``starts`` None means one sequence.
    """
    _check_sequences(name, starts, tokens, ranks)
    if starts is None:
        starts = torch.arange(2, device=device) * (tokens * ranks.size)
    return positions(starts, tokens, ranks)


def _check_sequences(name: str, starts: Tensor | None, tokens: int, ranks: TokenRanks) -> None:
    """Raise unless sequences have chunks for all ranks."""
    lengths, size = [tokens * ranks.size], ranks.size
    if starts is not None and arguments.has_values(starts):
        name, bounds = "cu_seqlens", [*starts.tolist(), tokens * size]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
    is_balanced = ranks.strategy is DUAL_CHUNK_SWAP
    if is_balanced and any(length < 0 or length % (2 * size) for length in lengths):
        raise ValueError(
            f"{name} must have sequences whose lengths are multiples of {2 * size}, two chunks for "
            f"each of the {size} context-parallel ranks; got {lengths}, of all ranks. Pad them."
        )


def get_batch_on_this_cp_rank(
    cu_seqlens_padded: Tensor | None,
    input_ids_padded: Tensor | None,
    labels_padded: Tensor | None,
    position_ids_padded: Tensor | None,
    cp_group: dist.ProcessGroup | None = None,
    qvk_format: str = "thd",
    load_balancing_strategy: CPAttentionLoadBalancingStrategy | str = DUAL_CHUNK_SWAP,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return this rank's tokens of a batch that all ranks have, like Transformer Engine's function.

    Args:
        cu_seqlens_padded: ``[B + 1]``, the starts of the sequences, for thd.
        input_ids_padded: ``[B, S]`` for bshd, ``[S, B]`` for sbhd, ``[T]`` or ``[1, T]`` for thd;
            None stays None.
        labels_padded: as ``input_ids_padded``.
        position_ids_padded: as ``input_ids_padded``, or without the batch.
        cp_group: the context-parallel ranks; None is the default group.
        qvk_format: thd, bshd or sbhd.
        load_balancing_strategy: the strategy of the layers.

    Returns:
        The three tensors with ``1 / R`` of the tokens.

    The errors are those of ``shard_sequence``.

    >>> ids = torch.arange(4)
    >>> float8lab.distributed.get_batch_on_this_cp_rank(torch.tensor([0, 4]), ids, None, ids)
    (tensor([0, 1, 2, 3]), None, tensor([0, 1, 2, 3]))
    """
    arguments.check_choice("qvk_format", qvk_format, ("thd", "bshd", "sbhd"))
    is_packed, starts = qvk_format == "thd", None
    if is_packed:
        starts = arguments.check_lengths("cu_seqlens_padded", cu_seqlens_padded, why="thd")
    group = dist.group.WORLD if cp_group is None and rank_and_size()[1] > 1 else cp_group

    def shard(name: str, x: Tensor | None) -> Tensor | None:
        arguments.check_tensor(name, x, optional=True)
        if x is None:
            return None
        has_batch = x.ndim > 1 and (x.shape[0] == 1 if is_packed else qvk_format == "bshd")
        return _shard_of(name, x, group, int(has_batch), starts, load_balancing_strategy)

    ids, labels = shard("input_ids_padded", input_ids_padded), shard("labels_padded", labels_padded)
    return ids, labels, shard("position_ids_padded", position_ids_padded)


def shard_sequence(
    x: Tensor, cp_group: dist.ProcessGroup | None, *, dim: int = 0,
    cu_seqlens: Tensor | None = None,
    load_balancing_strategy: CPAttentionLoadBalancingStrategy | str = DUAL_CHUNK_SWAP,
) -> Tensor:  # fmt: skip
    """Return this rank's entries of a tensor with one entry per token: labels, positions, ...

    Args:
        x: a tensor that is the same on all ranks.
        cp_group: the R context-parallel ranks; None is one rank.
        dim: the dimension of tokens; its size is a multiple of 2 R.
        cu_seqlens: ``[B + 1]`` cumulative lengths for packed sequences (thd), each of which is
            distributed separately. With unused tokens: the starts of the sequences.
        load_balancing_strategy: which tokens a rank has.

    Returns:
        ``x`` with ``1 / R`` of the tokens, in the order in which attention takes them.

    Raises:
        TypeError: not a tensor, or not a process group.
        ValueError: lengths are not multiples of 2 R.

    >>> float8lab.distributed.shard_sequence(torch.arange(4), None)
    tensor([0, 1, 2, 3])
    """
    return _shard_of("x", x, cp_group, dim, cu_seqlens, load_balancing_strategy)


def _shard_of(
    name: str, x: Tensor, group: dist.ProcessGroup | None, dim: int, starts: Tensor | None,
    strategy: CPAttentionLoadBalancingStrategy | str,
) -> Tensor:  # fmt: skip
    places = _checked_places(name, x, group, dim, starts, strategy, is_shard=False)
    return x if places is None else x.index_select(dim, places[dist.get_rank(group)])


def join_sequence(
    x: Tensor, cp_group: dist.ProcessGroup | None, *, dim: int = 0,
    cu_seqlens: Tensor | None = None,
    load_balancing_strategy: CPAttentionLoadBalancingStrategy | str = DUAL_CHUNK_SWAP,
) -> Tensor:  # fmt: skip
    """Join the tokens of all ranks, each of which must call this. It has no gradient.

    Args:
        x: this rank's tokens, as ``shard_sequence`` returns them.

    The other arguments and the errors are those of ``shard_sequence``.
    """
    layout = dim, cu_seqlens, load_balancing_strategy
    places = _checked_places("x", x, cp_group, *layout, is_shard=True)
    if places is None or cp_group is None:
        return x
    rows = torch.cat(tensors_of_ranks(x.movedim(dim, 0), cp_group))
    return torch.empty_like(rows).index_copy_(0, places.flatten(), rows).movedim(0, dim)


def _checked_places(
    name: str, x: Tensor, group: dist.ProcessGroup | None, dim: int, starts: Tensor | None,
    strategy: CPAttentionLoadBalancingStrategy | str, *, is_shard: bool,
) -> Tensor | None:  # fmt: skip
    arguments.check_tensor(name, x)
    arguments.check_group("cp_group", group)
    arguments.check_size("dim", dim, minimum=-x.ndim)
    ranks = TokenRanks.of(group, strategy)
    size, chunks = ranks.size, len(ranks.chunks_of(0))
    if dim >= x.ndim or (not is_shard and x.shape[dim] % (chunks * size) and size > 1):
        raise ValueError(
            f"{name} must have a multiple of {chunks * size} tokens along dim {dim}, {chunks} "
            f"chunks for each of the {size} context-parallel ranks; got shape {tuple(x.shape)}. "
            "Pad it."
        )
    if starts is not None:
        arguments.check_lengths("cu_seqlens", starts, why="packed sequences")
    if size == 1:
        return None
    return places_of(name, starts, x.shape[dim] // (1 if is_shard else size), ranks, x.device)
