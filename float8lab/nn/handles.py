"""Tensors that stand for Python objects in compiled graphs, which hold no objects.

The address of such a tensor, its handle, is what counts. An op of a graph is given the handle and
finds the object when the graph runs.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import Tensor

from float8lab.recipes.region import static_tensor

__all__ = ["new_handle", "owner_of"]


class _Handles:
    """The handles that exist."""

    owners: ClassVar[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
    """The objects that they stand for, by the address of the handle."""


def new_handle(owner: Any, device: torch.device) -> Tensor:
    """A tensor that stands for ``owner`` as long as both live."""
    handle = static_tensor(device)
    _Handles.owners[handle.data_ptr()] = owner
    return handle


def owner_of(handle: Tensor) -> Any:
    """The object that a handle stands for."""
    return _Handles.owners[handle.data_ptr()]
