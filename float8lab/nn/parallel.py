"""Tensor- and context-parallel arguments of modules: for now they must mean a single rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.arguments import check_choice, check_group, check_size

__all__ = [
    "ContextParallelGroup",
    "TensorParallelGroup",
    "check_context_group",
    "check_parallel_arguments",
]


def parallel_size(tp_size: int, tp_group: Any, parallel_mode: str | None) -> int:
    check_parallel_arguments(tp_size, tp_group, None)
    return 1


def check_parallel_arguments(tp_size: int, tp_group: Any, parallel_mode: str | None) -> None:
    """Raise unless the tensor-parallel arguments mean a single rank."""
    check_choice("parallel_mode", parallel_mode, (None, "column", "row", "Column", "Row"))
    check_group("tp_group", tp_group)
    name, size = "tp_size", check_size("tp_size", tp_size, minimum=1)
    if tp_group is not None:
        name, size = "tp_group", torch.distributed.get_world_size(tp_group)
    if size != 1:
        raise NotImplementedError(
            f"{name} must be {'1' if tp_group is None else 'None or of one rank'}; got {size}. "
            "Tensor parallelism is not available yet: use FSDP2 or data parallelism."
        )


def check_context_group(cp_group: Any) -> None:
    """Raise unless a context-parallel group means a single rank."""
    groups = cp_group if isinstance(cp_group, list) else [cp_group]
    for group in groups:
        check_group("cp_group", group)
    sizes = [1 if g is None else torch.distributed.get_world_size(g) for g in groups]
    if math.prod(sizes) != 1:
        raise NotImplementedError(
            f"cp_group must be None or of one rank; got {math.prod(sizes)} ranks. Context "
            "parallelism is not available yet: use FSDP2 or data parallelism."
        )


class TensorParallelGroup:
    """Base of modules with a tensor-parallel group."""

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Set the tensor-parallel group; only one of a single rank is supported."""
        check_parallel_arguments(1, tp_group, None)


class ContextParallelGroup(TensorParallelGroup):
    """Base of modules with a context-parallel group as well."""

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Sequence[int] | None = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Set the context-parallel group; only one of a single rank is supported."""
        check_context_group(cp_group)


def heads_of_rank(heads: int, groups: int, ranks: int) -> tuple[int, int]:
    """How many query heads, and key/value heads, of attention each tensor-parallel rank has.

    A rank has whole groups: a key/value head with all its query heads. A head that several ranks
    had would be computed several times, and its gradient be partial on each; fewer groups than
    ranks are therefore refused.

    Raises:
        ValueError: the ranks cannot share the groups equally.

    >>> heads_of_rank(32, 8, 4)
    (8, 2)
    """
    if groups % ranks:
        raise ValueError(
            f"num_gqa_groups must be a multiple of the {ranks} tensor-parallel ranks; got {groups}. "
            "Each key/value head is on one rank: use fewer ranks, or more groups."
        )
    return heads // ranks, groups // ranks


def of_first_rank(x: Tensor, group: Any) -> Tensor:
    """The values that the first rank of a group has, on all of them."""
    ops = torch.ops._c10d_functional
    bits = x.view(torch.uint8)
    found: Tensor = ops.wait_tensor(ops.broadcast(bits, 0, group.group_name))
    return found.view(x.dtype)
