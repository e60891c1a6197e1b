"""Context parallelism: ranks share the tokens of each sequence, and in attention its heads.

S tokens of a sequence, R ranks, H heads, D features of a head.

Outside attention a rank has ``S / R`` tokens of a sequence: of its 2 R chunks rank r has chunk r
and chunk 2 R - 1 - r, so that all ranks have as much of a causal mask. For attention the ranks
exchange tokens for heads. Each attends to the full sequence for ``H / R`` heads, which gives the
numbers of one rank alone, whatever the mask, and sends the results back to the tokens' ranks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.arguments import check_group, check_lengths, check_size, check_tensor, has_values
from float8lab.distributed.ranks import all_gathered, exchanged
from float8lab.tensor.differentiation import GradientMap

__all__ = ["ContextParallel", "join_sequence", "places_of", "positions", "shard_sequence"]


Value = TypeVar("Value")


@dataclass(frozen=True)
class ContextParallel:
    """How the ranks of a group share attention."""

    group: dist.ProcessGroup | None
    """The process group; None where the module has come from another process."""
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ContextParallel:
        """Over the ranks of a group."""
        return cls(group, dist.get_world_size(group), dist.get_rank(group))

    def __deepcopy__(self, memo: object) -> ContextParallel:
        return self  # a group has no copies

    def __reduce__(self) -> tuple[type[ContextParallel], tuple[None, int, int]]:
        return ContextParallel, (None, self.size, self.rank)  # nor is it another process's

    def check_heads(self, heads: int, groups: int) -> None:
        """Check that the ranks can share so many query heads, and key/value heads."""
        if self.group is None:
            raise RuntimeError(
                f"cp_group must be set on a module that was pickled with one of {self.size} ranks; "
                "got none. Call set_context_parallel_group."
            )
        if heads % self.size or (groups % self.size and self.size % groups):
            raise ValueError(
                f"cp_group must have ranks that share the module's heads, {heads} of queries and "
                f"{groups} of keys and values; got {self.size}. Use a number that divides both, or "
                "one that divides the first and is a multiple of the second."
            )

    def like_full(self, x: Tensor, dim: int) -> Tensor:
        """A tensor without values, of the shape that ``full_sequence`` gives."""
        shape = list(x.shape)
        shape[dim], shape[-2] = shape[dim] * self.size, max(1, shape[-2] // self.size)
        return x.new_empty(shape)

    def full_sequence(self, x: Tensor, dim: int, places: Tensor) -> Tensor:
        """``[..., S / R, ..., H, D]`` to ``[..., S, ..., H / R, D]``, differentiable.

        Heads that are too few for the ranks are repeated, one for each. ``dim`` is that of the
        tokens, ``places`` are from ``positions``.
        """
        if x.shape[-2] < self.size:
            x = x.repeat_interleave(self.size // x.shape[-2], -2)
        moves = (self._to_heads, self._to_tokens)
        return GradientMap.run(x, *(partial(move, dim=dim, places=places) for move in moves))

    def local_tokens(self, x: Tensor, dim: int, places: Tensor) -> Tensor:
        """The inverse of ``full_sequence``: what each rank computed of this rank's tokens."""
        moves = (self._to_tokens, self._to_heads)
        return GradientMap.run(x, *(partial(move, dim=dim, places=places) for move in moves))

    def _to_heads(self, x: Tensor, dim: int, places: Tensor) -> Tensor:
        """Exchange tokens for heads."""
        slices = x.movedim(dim, 0).unflatten(-2, (self.size, -1)).movedim(-3, 0)
        rows = self.exchange(slices).flatten(0, 1)
        return torch.empty_like(rows).index_copy_(0, places.flatten(), rows).movedim(0, dim)

    def _to_tokens(self, x: Tensor, dim: int, places: Tensor) -> Tensor:
        """Exchange heads for tokens."""
        rows = x.movedim(dim, 0).index_select(0, places.flatten())
        slices = self.exchange(rows.unflatten(0, places.shape))
        return slices.movedim(0, -3).flatten(-3, -2).movedim(0, dim)

    def exchange(self, slices: Tensor) -> Tensor:
        """``[R, ...]``: slice r goes to rank r, and from rank r comes slice r of the result."""
        counts = [1] * self.size
        return exchanged(slices, counts, counts, self.group)

    def local_heads(self, x: Value, dim: int) -> Value:
        """This rank's entries of a tensor that has one for each head; any other value itself."""
        if not isinstance(x, Tensor) or x.ndim < -dim or x.shape[dim] == 1:
            return x
        return cast("Value", x.chunk(self.size, dim)[self.rank])


def positions(starts: Tensor, tokens: int, size: int) -> Tensor:
    """The positions of each rank's tokens among those of all ranks, ``[R, tokens]`` int64.

    Args:
        starts: ``[B + 1]``, where the sequences start, and where the last one stops. The tokens
            behind it are shared out as another sequence.
        tokens: of a rank.
        size: R.

    >>> positions(torch.tensor([0, 8]), 4, 2)
    tensor([[0, 1, 6, 7],
            [2, 3, 4, 5]])
    """
    bounds = torch.cat((starts.long(), starts.new_full((1,), tokens * size).long()))
    local = torch.arange(tokens, device=starts.device)
    sequence = torch.searchsorted(bounds // size, local, right=True) - 1
    start = bounds[sequence]
    chunk = (bounds[sequence + 1] - start) // (2 * size)
    within = local - start // size
    is_second = within >= chunk
    rank = torch.arange(size, device=starts.device)[:, None]
    chunk_index = torch.where(is_second, 2 * size - 1 - rank, rank)
    return start + chunk_index * chunk + within - is_second * chunk


def places_of(
    name: str, starts: Tensor | None, tokens: int, size: int, device: torch.device
) -> Tensor:
    """``positions``, of sequences that have chunks for all ranks.

    ``name`` is that of the tensor that has the tokens; ``starts`` None is one sequence of all.
    """
    lengths: list[int] = []
    if starts is None:
        lengths, starts = [tokens * size], torch.arange(2, device=device) * (tokens * size)
    elif has_values(starts):
        name, bounds = "cu_seqlens", [*starts.tolist(), tokens * size]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if any(length < 0 or length % (2 * size) for length in lengths):
        raise ValueError(
            f"{name} must have sequences whose lengths are multiples of {2 * size}, two chunks for "
            f"each of the {size} context-parallel ranks; got {lengths}, of all ranks. Pad them."
        )
    return positions(starts, tokens, size)


def shard_sequence(
    x: Tensor, cp_group: dist.ProcessGroup | None, *, dim: int = 0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """This rank's entries of a tensor that has one for each token: labels, positions, ...

    Args:
        x: the same on all ranks.
        cp_group: the context-parallel ranks, R of them; None is one rank.
        dim: of the tokens; its size is a multiple of 2 R.
        cu_seqlens: ``[B + 1]`` cumulative lengths, for packed sequences (thd): each of them is
            shared out by itself. With unused tokens, where the sequences start.

    Returns:
        As ``x``, with ``1 / R`` of the tokens, in the order in which attention takes them.

    Raises:
        TypeError: not a tensor, or not a process group.
        ValueError: lengths that are no multiples of 2 R.

    >>> float8lab.distributed.shard_sequence(torch.arange(4), None)
    tensor([0, 1, 2, 3])
    """
    places = _checked_places(x, cp_group, dim, cu_seqlens, is_shard=False)
    return x if places is None else x.index_select(dim, places[dist.get_rank(cp_group)])


def join_sequence(
    x: Tensor, cp_group: dist.ProcessGroup | None, *, dim: int = 0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Join the tokens of all ranks, each of which calls this. Without gradients.

    Args:
        x: this rank's tokens, from ``shard_sequence``.

    The other arguments and the errors are those of ``shard_sequence``.
    """
    places = _checked_places(x, cp_group, dim, cu_seqlens, is_shard=True)
    if places is None or cp_group is None:
        return x
    rows = x.detach().movedim(dim, 0).contiguous()
    raw = rows.flatten().view(torch.uint8)  # gloo lacks some dtypes
    gathered = all_gathered(raw, places.shape[0], cp_group.group_name)
    gathered = gathered.view(rows.dtype).view(-1, *rows.shape[1:])
    return torch.empty_like(gathered).index_copy_(0, places.flatten(), gathered).movedim(0, dim)


def _checked_places(
    x: Tensor, group: dist.ProcessGroup | None, dim: int, starts: Tensor | None, *, is_shard: bool
) -> Tensor | None:
    check_tensor("x", x)
    check_group("cp_group", group)
    check_size("dim", dim, minimum=-x.ndim)
    size = 1 if group is None else dist.get_world_size(group)
    if dim >= x.ndim or (not is_shard and x.shape[dim] % (2 * size) and size > 1):
        raise ValueError(
            f"x must have a multiple of {2 * size} tokens along dim {dim}, two chunks for each of "
            f"the {size} context-parallel ranks; got shape {tuple(x.shape)}. Pad it."
        )
    if starts is not None:
        check_lengths("cu_seqlens", starts, why="packed sequences")
    if size == 1:
        return None
    tokens = x.shape[dim] // (1 if is_shard else size)
    return places_of("x", starts, tokens, size, x.device)
