"""Broadcast a model whose weights are stored in FP8."""

from __future__ import annotations

import torch
import torch.distributed as dist

from float8lab.arguments import check_group, check_module, check_size
from float8lab.tensor import Float8Tensor

__all__ = ["broadcast_parameters"]


def broadcast_parameters(
    module: torch.nn.Module, src: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Give all ranks the parameters and buffers of one rank, bit for bit.

    ``DistributedDataParallel`` does so when it is constructed, but joins all parameters in a buffer
    of their high-precision dtype: FP8 weights are then equal on all ranks, but requantized.
    Call this function first, and pass ``init_sync=False``.

    Args:
        module: a model that is not sharded, with the same parameters on all ranks.
        src: the global rank whose values all ranks get.
    """
    check_module("module", module)
    check_size("src", src)
    check_group("group", group)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            value = tensor.detach()
            stored = [value]
            if isinstance(value, Float8Tensor):
                stored = [value.qdata.view(torch.uint8), value.scale, value.amax]
            for values in stored:
                buffer = values.contiguous()
                dist.broadcast(buffer, src, group)
                if buffer is not values:
                    values.copy_(buffer)
