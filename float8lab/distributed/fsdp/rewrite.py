"""Overwrite weights that are stored in FP8 and sharded, as one process would the whole weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.distributed.fsdp.layout import shard_mesh
from float8lab.distributed.fsdp.shards import layout_of
from float8lab.distributed.fsdp.weight import ShardedWeight, WeightCast, set_scales
from float8lab.ops import cast_many_op

__all__ = ["requantize_shards_"]


def requantize_shards_(parameters: Sequence[Any], values: Sequence[Tensor]) -> None:
    """Overwrite sharded parameters stored in FP8 as one process would overwrite the whole ones.

    Blocks that several ranks hold parts of, such as the one block of a weight scaled as a whole,
    get the scale of the whole block: a collective, one all-reduce for each mesh.

    Args:
        parameters: DTensors of Float8Tensors, matrices sharded by rows as FSDP2 does; the same
            ones, in the same order, on all ranks.
        values: high-precision tensors, one for each parameter, of its local shape.
    """
    meshes: dict[Any, list[tuple[ShardedWeight, Any, Tensor]]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        layout = layout_of(parameter)
        weight = ShardedWeight(layout, WeightCast(layout.spec))
        each = meshes.setdefault(shard_mesh(parameter), [])
        each.append((weight, parameter._local_tensor, value))
    with torch.no_grad():
        for mesh, each in meshes.items():
            weights, _, plain = zip(*each, strict=True)
            set_scales(weights, plain, plain[0].device, mesh)
            _write(each)


def _write(each: Sequence[tuple[ShardedWeight, Any, Tensor]]) -> None:
    """Cast by the scales of the whole weights, one op for each kind of shard, and write them."""
    encodes: list[Tensor] = []
    factors: list[Tensor] = []
    written: list[Tensor] = []
    groups: dict[Any, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for weight, local, value in each:
        rows = weight.layout.block_rows(local.spec.block[0], local.device)
        encodes.append(weight.factor[rows])
        factors += [weight.scale[rows], weight.amax[rows]]
        written += [local.scale, local.amax]
        kind = (value.dtype, local.qdata.dtype, local.spec.block)
        groups.setdefault(kind, []).append((value, local.scale, local.qdata))
    # The encode factors go where the scales will be, since the op keeps its table of addresses for
    # memory that stays.
    torch._foreach_copy_(written[::2], encodes)
    for (*_, block), group in groups.items():
        values, scales, data = (list(tensors) for tensors in zip(*group, strict=True))
        # Each block of the shard lies in one block of the weight, and has its factor by now.
        cast_many_op(values, scales, data, block)
        torch.autograd.graph.increment_version(data)
    torch._foreach_copy_(written, factors)
