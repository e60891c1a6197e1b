"""The rank of this process and the number of processes; 0 and 1 without process groups."""

from __future__ import annotations

import torch.distributed as dist

__all__ = ["rank_and_size"]


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in a group, by default in the job, and the number of its processes."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)
