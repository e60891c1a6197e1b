"""LayerNorm and RMSNorm over the last dimension; ``reference/norm.py`` specifies them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops.declare import declare

__all__ = ["empty_stats", "norm_backward_op", "norm_op"]


def empty_stats(x: Tensor, scale: Tensor | None, center: bool) -> tuple[Tensor | None, Tensor]:
    """Room for the mean and the rstd of every row of ``[..., K]``."""
    wide = torch.promote_types((x if scale is None else scale).dtype, torch.float32)
    rstd = x.new_empty(x.shape[:-1], dtype=wide)
    return torch.empty_like(rstd) if center else None, rstd


def _norm_outputs(of: Any) -> tuple[Tensor | None, ...]:
    y = of.x.new_empty(of.x.shape, dtype=of.dtype) if of.write else None
    amax = of.x.new_empty((1, 1), dtype=torch.float32) if of.want_amax else None
    return y, *empty_stats(of.x, of.scale, of.center), amax


def _norm_backward_outputs(of: Any) -> tuple[Tensor | None, ...]:
    like = of.x if of.scale is None else of.scale
    dweight = like.new_empty(of.x.shape[-1], dtype=torch.promote_types(like.dtype, torch.float32))
    dbias = torch.empty_like(dweight) if of.center else None
    return of.x.new_empty(of.x.shape, dtype=of.dtype), dweight, dbias


def _norm_shards(of: Any) -> Any:
    for dim in range(of.x.ndim - 1 if of.scale is None else 0):
        yield (dim, dim, dim, "max"), {"x": dim}


def _norm_backward_shards(of: Any) -> Any:
    for dim in range(of.x.ndim - 1 if of.scale is None else 0):
        yield (dim, "sum", "sum"), dict.fromkeys(("dy", "x", "mean", "rstd"), dim)


norm_op = declare(reference.norm, cuda="norm:norm", outputs=_norm_outputs, sharding=_norm_shards)
norm_backward_op = declare(
    reference.norm_backward,
    cuda="norm:norm_backward",
    outputs=_norm_backward_outputs,
    sharding=_norm_backward_shards,
)
