"""Where a rank's shard lies in its weight, and in the weight's blocks.  N rows, K columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.formats import Float8Spec

__all__ = ["Layout", "local_of", "shard_mesh"]


def local_of(x: Any) -> Any:
    """A DTensor's shard on this rank; any other tensor itself."""
    # This is an attribute of a DTensor; importing its class would double our own import time.
    return getattr(x, "_local_tensor", x)


def shard_mesh(parameter: Any) -> Any:
    """The ranks that FSDP2 cuts a parameter for, with or without hybrid sharding."""
    mesh = parameter.device_mesh
    return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]


class Layout(NamedTuple):
    """The rows of a weight that are a rank's shard, by the rule of ``torch.chunk``."""

    spec: Float8Spec
    """Format, blocks and scale rule of the whole weight."""
    shape: tuple[int, int]
    """Shape of the whole weight, ``[N, K]``."""
    blocks: tuple[int, ...]
    """Shape of its scales."""
    start: int
    """First row of the shard in the weight."""
    rows: int
    """Rows of the shard."""
    padding: int
    """Rows that it sends besides, because another rank has so many more."""
    runs: tuple[tuple[slice, slice], ...]
    """Runs of rows of the shard that lie on the weight's blocks, each with its block rows.

    A shard that starts inside a block has two: the rest of that block, and what follows.
    """

    @staticmethod
    def of(spec: Float8Spec, shape: Any, mesh: Any) -> Layout:
        """The layout of a weight that is cut for the ranks of ``mesh``."""
        N, K = shape
        chunk = -(-N // mesh.size())
        start = min(N, chunk * mesh.get_local_rank())
        rows = min(chunk, N - start)
        size = N if spec.block[0] == -1 else spec.block[0]
        head = min(rows, -start % size) if spec.block[0] > 0 else 0
        runs = tuple(
            (slice(low, high), slice((start + low) // size, -(-(start + high) // size)))
            for low, high in ((0, head), (head, rows))
            if low < high
        )
        return Layout(spec, (N, K), spec.scale_shape((N, K)), start, rows, chunk - rows, runs)

    def block_rows(self, size: int, device: torch.device) -> slice | Tensor:
        """The weight's block rows in which the shard's blocks, of ``size`` rows each, begin."""
        whole = self.spec.block[0]
        if size == -1:
            return slice(0, 1)
        count = -(-self.rows // size)
        if size == whole and self.start % size == 0:
            return slice(self.start // size, self.start // size + count)
        return (torch.arange(count, device=device) * size + self.start) // whole
