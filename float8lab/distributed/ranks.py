"""What a process has of a process group: its rank, the number of ranks, and the tensors of all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["all_gathered", "rank_and_size"]


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in a group, by default in the job, and the number of its processes.

    Without process groups these are 0 and 1.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gathered(x: Tensor, size: int, name: str) -> Tensor:
    """The tensors of all ranks, of one shape ``[n, ...]``, one behind the other: ``[R * n, ...]``.

    FP8 data travels as bytes, which every backend takes.

    Args:
        x: this rank's.
        size: R, of the group.
        name: by which functional collectives know the group.
    """
    ops = torch.ops._c10d_functional
    in_bytes = x.element_size() == 1 and x.dtype != torch.uint8
    raw = x.view(torch.uint8) if in_bytes else x
    whole: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(raw.contiguous(), size, name))
    return whole.view(x.dtype) if in_bytes else whole
