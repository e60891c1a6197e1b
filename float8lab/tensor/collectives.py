"""Handlers of collectives on Float8Tensors: data and scales travel, nothing is quantized again.

FP8 data is sent as bytes, since gloo does not know the FP8 formats.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.tensor.dispatch import implements, run_fallback
from float8lab.tensor.float8_tensor import Float8Tensor
from float8lab.tensor.views import cut

if dist.is_available():
    import torch.distributed._functional_collectives  # defines ops that are handled below

__all__: list[str] = []

aten = torch.ops.aten
functional = torch.ops._c10d_functional


def _existing(namespace: Any, *names: str) -> list[Any]:
    """Overloads that this torch has: some builds have no collectives, some versions not all."""
    return [getattr(namespace, name).default for name in names if hasattr(namespace, name)]


@implements(*_existing(functional, "all_gather_into_tensor"))
def _all_gather(op: Any, x: Float8Tensor, size: int, group: Any) -> Any:
    """Rows of all ranks; shards without a common block keep a block, and a scale, each."""
    rows, block = x.shape[0] if x.ndim else 0, x.spec.block[0] if x.ndim else 0
    if rows == 0:
        return run_fallback(Float8Tensor, op, (x, size, group), {})
    if block > 1 and rows % block:
        x = cut(x, (math.gcd(rows, block), *x.spec.block[1:]))

    def gather(t: Tensor) -> Tensor:
        result: Tensor = functional.wait_tensor(op(t.contiguous(), size, group))
        return result

    spec = replace(x.spec, block=(rows, *x.spec.block[1:])) if block == -1 else x.spec
    qdata = gather(x.qdata.view(torch.uint8)).view(x.qdata.dtype)
    scale, amax = gather(x.scale), gather(x.amax)
    if x.spec.per_tensor and bool((scale == scale[:1]).all()):
        return Float8Tensor(qdata, scale[:1], amax.amax(0, keepdim=True), x.spec, x.dtype)
    return Float8Tensor(qdata, scale, amax, spec, x.dtype)


@implements(*_existing(functional, "wait_tensor", "_wrap_tensor_autograd"))
def _wait(op: Any, x: Float8Tensor) -> Float8Tensor:
    return x.map(lambda t: t)  # waited for where it was gathered


@implements(aten.constant_pad_nd.default)
def _pad(op: Any, x: Float8Tensor, pad: Any, value: Any = 0) -> Any:
    """Zeros after the end of the first dimension: how DTensor makes shards equally long."""
    *others, before, after = pad
    first_only = len(pad) == 2 * x.ndim and not any(others) and before == 0 and after >= 0
    if value != 0 or not first_only:
        return run_fallback(Float8Tensor, op, (x, pad, value), {})
    shape = (x.shape[0] + after, *x.shape[1:])
    missing = x.spec.scale_shape(shape)[0] - x.scale.shape[0]
    qdata = op(x.qdata.view(torch.uint8), pad, 0).view(x.qdata.dtype)
    tail = [*others, 0, missing]
    return x.replace(qdata=qdata, scale=op(x.scale, tail, 1.0), amax=op(x.amax, tail, 0.0))


@implements(*_existing(torch.ops.c10d, "broadcast_"))
def _broadcast(op: Any, tensors: list[Any], *args: Any) -> Any:
    """In place, bit for bit, into tensors of the same spec.

    The caller waits for the work that is returned, the last. Gloo runs several at a time, so the
    others are waited for here.
    """
    work = None
    for x in tensors:
        float8 = isinstance(x, Float8Tensor)
        for t in (x.qdata.view(torch.uint8), x.scale, x.amax) if float8 else (x,):
            if work is not None:
                work.wait()
            _, work = op([t], *args)
    return tensors, work
