"""Functions of Hopper's TMA, whose names differ between versions of Triton."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

# The first name is that of Triton 3.9 and later, the second that of earlier versions.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
