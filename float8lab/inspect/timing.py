"""Measure the time that a call takes on a GPU, and on the CPU that drives the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

__all__ = ["CudaTimer", "Timer", "Times", "sleep_rate"]

_WARM_UP = 3
_SAMPLES = 15
_FLUSH_BYTES = 256 << 20
"""Bytes that are overwritten to flush the L2 cache: more than any L2 cache holds."""


class Times(NamedTuple):
    """Seconds that a call, or a training step, takes."""

    gpu: float
    cpu: float


Timer = Callable[[Callable[[], object]], Times]
"""A function that runs the function it is given, and returns the GPU seconds and the CPU seconds of
one call, each as if the other processor took no time."""


class CudaTimer:
    """Times calls on a CUDA device.

    GPU time is measured between two events, from a cold L2, behind a backlog that gives the CPU
    time to queue the whole call. CPU time is measured until the call returns, with nothing to wait
    for. Both are medians. A call of more launches than the GPU's queue holds (1024) waits for the
    GPU: then both times are the longer of the two, as is the time of a step of training.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        with torch.cuda.device(device):
            self._scratch = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
            self._cycles_per_second = sleep_rate()

    def __call__(self, fn: Callable[[], object]) -> Times:
        with torch.cuda.device(self.device):
            for _ in range(_WARM_UP):
                fn()
            cpu = statistics.median(_enqueue_seconds(fn) for _ in range(_SAMPLES))
            # The backlog lasts twice the CPU time, plus 0.2 ms for the flush and other overhead.
            backlog = int(self._cycles_per_second * (2 * cpu + 2e-4))
            return Times(statistics.median(self._gpu(fn, backlog) for _ in range(_SAMPLES)), cpu)

    def _gpu(self, fn: Callable[[], object], backlog: int) -> float:
        torch.cuda._sleep(backlog)
        self._scratch.zero_()
        return _seconds_between_events(fn)


def _enqueue_seconds(fn: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    fn()
    taken = time.perf_counter() - began
    torch.cuda.synchronize()
    return taken


def sleep_rate() -> float:
    """Measure how many cycles ``torch.cuda._sleep`` waits in a second."""
    cycles = 10_000_000
    torch.cuda._sleep(1)
    return cycles / _seconds_between_events(lambda: torch.cuda._sleep(cycles))


def _seconds_between_events(fn: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end)
