"""Send tokens to the ranks that hold their experts, and back.

T tokens of this rank, E experts of all ranks, R rows that this rank's experts get, H features. The
experts belong to the ranks of a group in order, equally many on each: sharded along their
dimension, as ``fully_shard`` or a DTensor with ``Shard(0)`` does with weights ``[E, ...]``.

A single rank with all tokens would compute the same bytes: rows reach an expert in the order of the
ranks and their tokens, FP8 casts have a scale for each row or part of a row, and a token's rows are
added up in the order of the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.arguments import check_group, check_instance, check_shape
from float8lab.distributed.ranks import exchanged, rank_and_size
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import Float8Spec
from float8lab.tensor import Float8Tensor, permute
from float8lab.tensor.blocks import quantize_blocks
from float8lab.tensor.differentiation import GradientMap
from float8lab.tensor.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

__all__ = [
    "DispatchHandle", "held_experts", "local_experts", "moe_combine", "moe_dispatch",
    "shares_experts",
]  # fmt: skip


Parameter = TypeVar("Parameter", Tensor, Tensor | None)


def shares_experts(placements: Sequence[Placement]) -> bool:
    """Whether a DTensor with these placements gives each rank of a 1-d mesh some experts."""
    return len(placements) == 1 and bool(placements[0].is_shard(0))


def local_experts(parameter: Parameter) -> Parameter:
    """Return this rank's experts of a parameter ``[E, ...]``; differentiable."""
    if not is_dtensor(parameter):
        return parameter
    if not shares_experts(parameter.placements):
        raise NotImplementedError(
            "experts' parameters must be placed as (Shard(0),), some experts on each rank, where "
            f"they are DTensors; got {parameter.placements}. Place them so, or use plain tensors."
        )
    return parameter.to_local()


def held_experts(parameter: Tensor | None) -> range | None:
    """Return this rank's experts of a parameter ``[E, ...]``; None: all, or it is unknown."""
    if not is_dtensor(parameter) or not shares_experts(parameter.placements):
        return None
    experts, mesh = parameter.shape[0], parameter.device_mesh
    shards = ShardMap.of(experts, mesh.size(), mesh.get_local_rank())
    return range(shards.start, shards.start + shards.length)


@dataclass(frozen=True)
class DispatchHandle:
    """The routes of the rows that ``moe_dispatch`` sent and got, for ``moe_combine``."""

    row_map: Tensor
    """The row of each local token and expert, ordered by expert."""
    order: Tensor | None
    """Row map from arrival order (by rank) to the order of experts; None if they are the same."""
    sent: tuple[int, ...]
    """The number of rows sent to each rank."""
    received: tuple[int, ...]
    """The number of rows that come from each rank."""
    group: dist.ProcessGroup | None
    gradient: Float8Spec | None


class Dispatched(NamedTuple):
    """The tokens that ``moe_dispatch`` returns on this rank, ordered by expert."""

    rows: Tensor
    probs: Tensor
    counts: Tensor
    handle: DispatchHandle


def moe_dispatch(
    inp: Tensor,
    probs: Tensor,
    routing_map: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    gradient: Float8Spec | None = None,
) -> Dispatched:
    """Send each token, and its probabilities, to the ranks of its experts.

    All ranks of the group must call it, even without tokens. The CPU waits for the GPU once, since
    the numbers of rows that ranks exchange are arguments of a collective.

    Args:
        inp: ``[T, H]``: plain, or a Float8Tensor, whose data and scales are sent. The result has a
            scale for each row or part of a row; a scale of the whole tensor is repeated.
        probs: ``[T, E]``, any float.
        routing_map: ``[T, E]`` of bools or integers, nonzero where an expert gets the token.
        group: the process group that shares the experts; None is the default group, or only this
            process if there is none.
        gradient: FP8 format in which gradients are sent, here and in ``moe_combine``; its blocks
            have one row. None sends gradients unchanged.

    Returns:
        - ``[R, H]``: the rows of this rank's experts, ordered by expert, plain or FP8 like ``inp``.
        - ``[R]``: the probabilities of the rows.
        - ``[E / ranks]`` int64: the number of rows of each expert on this rank.
        - the handle for ``moe_combine``.

    Raises:
        ValueError: shapes do not fit together, the ranks cannot share the experts equally, or the
            gradient format has blocks of several rows.

    >>> x, routing_map = torch.eye(2), torch.tensor([[True, True], [False, True]])
    >>> rows, probs, counts, handle = moe_dispatch(x, routing_map / 2, routing_map)
    >>> counts
    tensor([1, 2])
    >>> moe_combine(rows * probs[:, None], handle)
    tensor([[1.0000, 0.0000],
            [0.0000, 0.5000]])
    """
    check_group("group", group)
    check_instance("gradient", gradient, Float8Spec, "a Float8Spec", optional=True)
    if gradient is not None and (len(gradient.block) != 2 or gradient.block[0] != 1):
        raise ValueError(
            f"gradient must have blocks of one row; got {gradient.block}. Use (1, -1), (1, 128) or "
            "(1, 32)."
        )
    permute.check_tokens("inp", inp)
    permute.check_integers("routing_map", routing_map, 2)
    permute.check_probs("probs", probs, (inp.shape[0], routing_map.shape[1]))
    rank, size = rank_and_size(group)
    if routing_map.shape[0] != inp.shape[0] or rank < 0 or routing_map.shape[1] % size:
        raise ValueError(
            f"routing_map must have a row for each token of inp, and as columns a multiple of the "
            f"{size} ranks of group, this one among them; got shape {tuple(routing_map.shape)} on "
            f"rank {rank}. Share the experts equally, or choose another group."
        )
    counts = (routing_map != 0).sum(0).view(size, routing_map.shape[1] // size)
    arriving = counts if size == 1 else exchanged(counts, [1] * size, [1] * size, group)
    sent, received = map(tuple, torch.stack([counts, arriving]).sum(2).tolist())  # the only wait
    y, row_probs, row_map = permute.moe_permute_with_probs(inp, probs, routing_map, sum(sent))
    order = None
    if size > 1:
        y = _exchange(y, sent, received, group)
        row_probs = _exchange(row_probs[:, None], sent, received, group)
    y = _with_gradient(y, gradient) if gradient is not None else y
    if size > 1:
        chunks = torch.arange(arriving.numel(), device=arriving.device).view_as(arriving)
        order = permute.map_of_chunks(sum(received), arriving.flatten(), chunks.t().flatten())
        y, row_probs = permute.scatter_rows(y, order, sum(received), row_probs)
    handle = DispatchHandle(row_map, order, sent, received, group, gradient)
    return Dispatched(y, row_probs, arriving.sum(0), handle)


def moe_combine(out: Tensor, handle: DispatchHandle) -> Tensor:
    """Send the rows of this rank's experts back, and add up the rows of each token.

    All ranks of the group must call it. The experts multiply rows by their probabilities before, as
    this can be fused with an activation.

    Args:
        out: ``[R, H]``: one row for each that ``moe_dispatch`` returned, in the same order; H may
            differ. A Float8Tensor is dequantized.
        handle: the handle that ``moe_dispatch`` returned.

    Returns:
        ``[T, H]`` in the dtype of ``out``, summed in float32; 0 for a token without experts.

    Raises:
        ValueError: the number of rows is wrong.

    >>> routing_map = torch.ones(1, 3, dtype=torch.bool)
    >>> rows, _, _, handle = moe_dispatch(torch.ones(1, 2), routing_map / 3, routing_map)
    >>> moe_combine(rows, handle)
    tensor([[3., 3.]])
    """
    check_instance("handle", handle, DispatchHandle, "the handle of moe_dispatch")
    rows = sum(handle.received)
    advice = "Pass the rows that moe_dispatch gave, in the order in which they came."
    check_shape("out", out, (rows, None), advice)
    out = out.dequantize() if isinstance(out, Float8Tensor) else out
    out = out if handle.gradient is None else _with_gradient(out, None)
    if handle.order is not None:
        out = permute.gather_rows(out, handle.order)
        out = _exchange(out, handle.received, handle.sent, handle.group)
    x = permute.gather_rows(out, handle.row_map)
    return x if handle.gradient is None else _with_gradient(x, handle.gradient)


def _exchange(
    x: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Send rows to other ranks; their gradients, plain or in FP8, are sent back."""
    send = partial(exchanged, sent=sent, received=received, group=group)
    return GradientMap.run(x, send, partial(exchanged, sent=received, received=sent, group=group))


def _with_gradient(x: Tensor, spec: Float8Spec | None) -> Tensor:
    """Return the tensor; its gradient becomes FP8 by ``spec``, or a plain tensor for None."""

    def alias(x: Tensor) -> Tensor:
        return x.map(lambda t: t) if isinstance(x, Float8Tensor) else x.view_as(x)

    def store(grad: Tensor) -> Tensor:
        if isinstance(grad, Float8Tensor):
            return grad.dequantize()
        if spec is None:
            return grad
        return Float8Tensor._make(*quantize_blocks(grad, spec), spec, grad.dtype)

    return GradientMap.run(x, alias, store)
