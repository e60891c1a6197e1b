"""Hopper's TMA, whose functions differ in name between versions of Triton, and the barriers of the
rings of buffers that it fills: a ring reuses its buffers, the first one after the last."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# The first name is that of Triton 3.9 and later, the second that of earlier versions.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def barriers(number: gl.constexpr, COUNT: gl.constexpr):
    """Make barriers, each of which waits for COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def wait_full(bars, use, pred=True):
    """Wait until the buffer of a use of the ring is full; uses count on, whatever the buffer."""
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.wait(bars.index(use % STAGES), (use // STAGES) & 1, pred=pred)


@gluon.jit
def wait_empty(bars, use):
    """Wait until the buffer of a use of the ring is empty, as every buffer is at first."""
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.wait(bars.index(use % STAGES), ((use // STAGES) & 1) ^ 1)


@gluon.jit
def arrive(bars, use, pred=True):
    """Tell those who wait for the buffer of a use that one more group of warps is done with it."""
    STAGES: gl.constexpr = bars.shape[0]
    mbarrier.arrive(bars.index(use % STAGES), count=1, pred=pred)
