"""Gradients that sequence parallelism makes partial: of parameters that all ranks have alike.

Each rank has a part of the sequence, so what it computes for such a parameter, of a norm or a bias
that is added to tokens, is a part of the gradient.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8lab.arguments import check_group, check_module
from float8lab.distributed.fsdp.weight import local_of
from float8lab.distributed.ranks import rank_and_size

__all__ = ["mark_sequence_parallel", "reduce_sequence_parallel_gradients"]

_NAMES = "_partial_gradients"
"""Attribute of a module: the names of such parameters. Their own marks are lost where they are
replaced, by FSDP2, ``copy.deepcopy`` or on the way from the meta device."""


def mark_sequence_parallel(module: nn.Module, sequence_parallel: bool, *names: str) -> None:
    """Set the attribute by which trainers know a module's parameters with partial gradients."""
    if sequence_parallel:
        setattr(module, _NAMES, (*getattr(module, _NAMES, ()), *names))
    for name in names:
        parameter = getattr(module, name, None)
        if parameter is not None:
            parameter.sequence_parallel = sequence_parallel


def reduce_sequence_parallel_gradients(model: nn.Module, group: Any = None) -> None:
    """Sum the gradients of parameters that sequence parallelism made partial, over the ranks.

    These are the parameters with ``parameter.sequence_parallel``, by which modules of this library
    mark them, and by which Megatron's trainer, which sums them itself, knows them. Call this after
    the last backward of a step, and before gradients are clipped. One all-reduce for each dtype
    carries all of them. All ranks of the group call it, and have gradients of the same parameters.

    Args:
        model: ``grad``, and ``main_grad`` where there is one, are summed in place. Those that are
            DTensors, of FSDP2, are summed shard by shard.
        group: the tensor-parallel group; None is that of the modules of the model, or the default
            group if none of them has one.

    Raises:
        TypeError: an argument of another type.
        ValueError: ``group`` is None, and the modules have several.

    >>> norm = float8lab.LayerNorm(4, sequence_parallel=True, device="cpu")
    >>> norm(torch.ones(2, 4)).sum().backward()
    >>> float8lab.distributed.reduce_sequence_parallel_gradients(norm)  # one rank: nothing to do
    """
    check_module("model", model)
    check_group("group", group)
    if group is None:
        group = _group_of(model)
    if rank_and_size(group)[1] == 1:
        return
    batches: dict[Any, list[Tensor]] = defaultdict(list)
    for parameter in _marked(model):
        for grad in (parameter.grad, getattr(parameter, "main_grad", None)):
            if grad is not None:
                local = local_of(grad)
                batches[local.dtype, local.device].append(local.detach())
    for gradients in batches.values():
        flat = torch.cat([grad.reshape(-1) for grad in gradients])
        dist.all_reduce(flat, group=group)
        for grad, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            grad.copy_(part.view(grad.shape))


def _marked(model: nn.Module) -> list[nn.Parameter]:
    found = {
        id(parameter): parameter
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
        and (name in getattr(module, _NAMES, ()) or getattr(parameter, "sequence_parallel", False))
    }
    return list(found.values())


def _group_of(model: nn.Module) -> Any:
    """The tensor-parallel group that the modules of a model have; None if they have none."""
    groups = {id(g): g for m in model.modules() if (g := getattr(m, "tp_group", None)) is not None}
    if len(groups) > 1:
        raise ValueError(
            f"group must be given for a model whose modules have several tensor-parallel groups; "
            f"got None, and {len(groups)} groups. Call this for each group's part of the model."
        )
    return next(iter(groups.values()), None)
