"""Recognize DTensors without importing their class.

The import would double the time that ``import float8lab`` takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard, TypeVar, overload

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "local_of", "with_local"]

Value = TypeVar("Value")


def is_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    return hasattr(x, "_local_tensor") and hasattr(x, "placements")


@overload
def local_of(x: Tensor) -> Tensor: ...
@overload
def local_of(x: Value) -> Value: ...
def local_of(x: object) -> object:
    """Return a DTensor's shard on this rank; return any other tensor itself."""
    return getattr(x, "_local_tensor", x)


def with_local(x: Tensor, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Wrap ``local`` as a DTensor with the placements of ``x``, if ``x`` is one; of ``shape``."""
    if not is_dtensor(x):
        return local
    like = x if shape is None else torch.empty(shape, device="meta")
    return type(x).from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
