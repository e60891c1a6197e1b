"""A process in its group: its rank, how many ranks there are, and the tensors of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.tensor import Float8Tensor

__all__ = [
    "all_gathered", "all_objects", "all_reduced", "exchanged", "from_first_rank", "rank_and_size",
    "reduce_scattered", "tensors_of_ranks",
]  # fmt: skip


Value = TypeVar("Value")


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """This process's rank in a group, by default in the job, and the number of its processes.
    Without process groups these are 0 and 1."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gathered(x: Tensor, size: int, name: str) -> Tensor:
    """The tensors of all ranks, of one shape ``[n, ...]``, one behind the other: ``[R * n, ...]``.

    FP8 data travels as bytes, which every backend takes.

    Args:
        size: R, the number of ranks.
        name: the group's name for functional collectives.
    """
    ops = torch.ops._c10d_functional
    in_bytes = x.element_size() == 1 and x.dtype != torch.uint8
    raw = x.view(torch.uint8) if in_bytes else x
    gathered: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(raw.contiguous(), size, name))
    return gathered.view(x.dtype) if in_bytes else gathered


def all_reduced(x: Tensor, operation: str, name: str) -> Tensor:
    """The ``"sum"`` or ``"max"`` of the tensors of all ranks of the group of that name."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), operation, name))


def reduce_scattered(x: Tensor, size: int, name: str) -> Tensor:
    """This rank's rows of the sum over ``size`` ranks, R: ``[R * n, ...]`` to ``[n, ...]``."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(x.contiguous(), "sum", size, name))


def from_first_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values that the first rank of a group has, on all of them."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.broadcast(x.view(torch.uint8), 0, group.group_name)).view(x.dtype)


def tensors_of_ranks(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The tensors of all ranks, of one shape and dtype, bit for bit."""
    if isinstance(x, Float8Tensor):
        fields = [tensors_of_ranks(t, group) for t in (x.qdata, x.scale, x.amax)]
        return [x._make(q, s, a, x.spec, x.dtype) for q, s, a in zip(*fields, strict=True)]
    bits = x.detach().contiguous().view(torch.uint8)
    tensors = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(tensors, bits, group=group)
    return [tensor.view(x.dtype) for tensor in tensors]


def all_objects(value: Value, group: dist.ProcessGroup) -> list[Value]:
    """The value of each rank, which may be tensors of unequal sizes."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def exchanged(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Send rows to each rank and return the rows that come from each.

    Rows are sent as bytes, since gloo lacks some dtypes.

    Args:
        x: rows for each rank behind each other; a Float8Tensor with scales of rows, or plain.
        sent: how many rows go to each rank.
        received: how many rows come from each rank.
    """
    data = x if isinstance(x, Float8Tensor) else x.contiguous().view(torch.uint8)
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    ops, splits = torch.ops._c10d_functional, ([*received], [*sent])
    result: Tensor = ops.wait_tensor(ops.all_to_all_single(data, *splits, name))
    return result if isinstance(x, Float8Tensor) else result.view(x.dtype)
