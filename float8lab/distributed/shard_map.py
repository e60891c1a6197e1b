"""Compute which part of an unsharded dimension each rank has.

FSDP2, tensor parallelism, sequence parallelism, DTensor and checkpoints shard by the rule of
``torch.chunk``: each rank has ``ceil(size / ranks)``, but the last ranks have fewer, or none.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["ShardMap"]


class ShardMap(NamedTuple):
    """A dimension of an unsharded tensor, and the shard of it that a rank has.

    A tensor ``[outer, size, inner, features]`` is a matrix of ``outer * size * inner`` rows. If
    ``size`` is sharded, a rank has ``length * inner`` rows for each outer index.

    >>> shards = ShardMap.of(10, ranks=4, rank=3)
    >>> shards.start, shards.length, shards.lengths
    (9, 1, [3, 3, 3, 1])
    """

    size: int
    """The size of the unsharded dimension."""
    chunk: int
    """The number of indices of each rank, except the last ones."""
    ranks: int
    rank: int
    inner: int = 1
    """The number of rows for each index."""
    outer: int = 1
    """The product of the dimensions before it; a rank has rows for each outer index."""

    @staticmethod
    def of(size: int, ranks: int, rank: int, *, inner: int = 1, outer: int = 1) -> ShardMap:
        """Return the shard that a rank has by the rule of ``torch.chunk``."""
        return ShardMap(size, -(-size // ranks), ranks, rank, inner, outer)

    @property
    def start(self) -> int:
        """The first index of this rank."""
        return min(self.size, self.chunk * self.rank)

    @property
    def length(self) -> int:
        """The number of indices of this rank."""
        return min(self.chunk, self.size - self.start)

    @property
    def lengths(self) -> list[int]:
        """The number of indices of each rank."""
        return [self._replace(rank=rank).length for rank in range(self.ranks)]

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of indices."""
        return self.chunk * self.ranks == self.size

    @property
    def unsharded_rows(self) -> int:
        """The number of rows of the unsharded tensor."""
        return self.size * self.inner * self.outer

    @property
    def rows_per_outer(self) -> int:
        """The number of rows of this rank for each outer index."""
        return self.length * self.inner

    def block_crosses_shards(self, block: int) -> bool:
        """Whether a block of ``block`` rows, counted from the first row, can have rows of two ranks
        or outer indices.

        The block of all rows, -1, must not be passed: every rank has rows of it.
        """
        if self.outer > 1 and self.size * self.inner % block:
            return True
        return self.chunk < self.size and self.chunk * self.inner % block != 0

    def blocks(self, block: int) -> ShardMap:
        """Return the map that counts blocks instead of rows, if no block crosses shards."""
        count, chunk = -(-self.size * self.inner // block), -(-self.chunk * self.inner // block)
        return ShardMap(count, chunk, self.ranks, self.rank, 1, self.outer)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """Return a view of this rank's shard of an unsharded tensor."""
        return x.narrow(dim, self.start, self.length)
