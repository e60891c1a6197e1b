"""DTensors, told from other tensors without importing their class.

That import would double the time that ``import float8lab`` takes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["is_dtensor", "local_of", "with_local"]


def is_dtensor(x: Any) -> bool:
    """Whether a tensor is a DTensor."""
    return hasattr(x, "_local_tensor") and hasattr(x, "placements")


def local_of(x: Any) -> Any:
    """A DTensor's shard on this rank; any other tensor itself."""
    return getattr(x, "_local_tensor", x)


def with_local(x: Any, local: Tensor) -> Any:
    """``local``, as a DTensor of the shape and placements of ``x`` if that is one."""
    if not is_dtensor(x):
        return local
    return type(x).from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
