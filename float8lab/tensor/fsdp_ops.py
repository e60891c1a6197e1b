"""Handlers of ops that FSDP2 applies to Float8Tensors."""

from __future__ import annotations

from typing import Any

import torch

from float8lab.tensor.dispatch import implements, run_fallback
from float8lab.tensor.float8_tensor import Float8Tensor

__all__: list[str] = []

aten = torch.ops.aten


@implements(aten.as_strided.default)
def _as_strided(
    op: Any, x: Float8Tensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Any:
    same = tuple(size) == tuple(x.shape) and tuple(stride) == x.stride()
    if same and storage_offset in (None, x.storage_offset()):
        return x.map(aten.alias.default)
    return run_fallback(Float8Tensor, op, (x, size, stride, storage_offset), {})
