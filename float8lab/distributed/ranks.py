"""The rank of a process in its group, the number of ranks, and collectives that return tensors."""

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

_OPS = torch.ops._c10d_functional


def rank_and_size(group: dist.ProcessGroup | None = None) -> tuple[int, int]:
    """Return this process's rank in a group (by default of all processes), and the group's size.
    Without torch.distributed these are 0 and 1."""
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def all_gathered(x: Tensor, size: int, name: str) -> Tensor:
    """Concatenate the tensors of all ranks, all ``[n, ...]``, to ``[R * n, ...]``.

    FP8 data is sent as bytes, which every backend supports.

    Args:
        size: R, the number of ranks.
        name: the group's name for functional collectives.
    """
    in_bytes = x.element_size() == 1 and x.dtype != torch.uint8
    raw = x.view(torch.uint8) if in_bytes else x
    gathered: Tensor = _OPS.wait_tensor(_OPS.all_gather_into_tensor(raw.contiguous(), size, name))
    return gathered.view(x.dtype) if in_bytes else gathered


def all_reduced(x: Tensor, operation: str, name: str) -> Tensor:
    """Return the ``"sum"`` or ``"max"`` of the tensors of all ranks of the group with this name."""
    return _OPS.wait_tensor(_OPS.all_reduce(x.contiguous(), operation, name))


def reduce_scattered(x: Tensor, size: int, name: str) -> Tensor:
    """Sum ``[R * n, ...]`` over ``size`` ranks, R, and return this rank's rows, ``[n, ...]``."""
    return _OPS.wait_tensor(_OPS.reduce_scatter_tensor(x.contiguous(), "sum", size, name))


def from_first_rank(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the first rank's values on all ranks of a group."""
    return _OPS.wait_tensor(_OPS.broadcast(x.view(torch.uint8), 0, group.group_name)).view(x.dtype)


def tensors_of_ranks(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """Return the tensors of all ranks, which have the same shape and dtype, bit for bit."""
    if isinstance(x, Float8Tensor):
        fields = [tensors_of_ranks(t, group) for t in (x.qdata, x.scale, x.amax)]
        return [x._make(q, s, a, x.spec, x.dtype) for q, s, a in zip(*fields, strict=True)]
    bits = x.detach().contiguous().flatten().view(torch.uint8)  # gloo lacks some dtypes
    gathered = all_gathered(bits, group.size(), group.group_name)
    return [*gathered.view(x.dtype).view(group.size(), *x.shape)]


def all_objects(value: Value, group: dist.ProcessGroup) -> list[Value]:
    """Return the values of all ranks, which may be tensors of different sizes."""
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def exchanged(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Send rows to each rank and return the rows that come from each rank.

    Rows are sent as bytes, since gloo lacks some dtypes.

    Args:
        x: the rows for all ranks, in order; plain, or a Float8Tensor with scales of rows.
        sent: the number of rows for each rank.
        received: the number of rows from each rank.
    """
    data = x
    if not isinstance(x, Float8Tensor):  # the last of [n, 1] may have any stride; bytes need 1
        data = x.contiguous().unsqueeze(-1).view(torch.uint8)
    name = (group or dist.distributed_c10d._get_default_group()).group_name
    splits = [*received], [*sent]
    result: Tensor = _OPS.wait_tensor(_OPS.all_to_all_single(data, *splits, name))
    return result if isinstance(x, Float8Tensor) else result.view(x.dtype).squeeze(-1)
