"""Autograd's thread for a GPU on the core of the thread that calls backward.

Autograd runs the backward of a GPU's ops on a thread of its own. The two threads alternate, and
the operating system puts them on different cores: every Python object that goes from one to the
other, and every wake-up, crosses the chip. For ops that take microseconds that is most of the time.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from float8lab.arguments import check_size
from float8lab.distributed.ranks import rank_and_size

__all__ = ["backward_on_this_core"]


def backward_on_this_core(core: int | None = None) -> AbstractContextManager[None]:
    """Keep the calling thread, and autograd's thread for the current GPU, on one core.

    For steps that take the CPU longer than the GPU. Only these two threads are bound, and both get
    back on exit what they were bound to. Enter it around a step: threads and processes that the
    calling thread starts inside, such as a data loader's workers, inherit its core. Contexts nest;
    it also is a decorator. After the first, an entry costs a few microseconds.

    Without a GPU backward runs on the thread that calls it, and nothing is bound; nor on systems
    other than Linux, which is said once.

    Args:
        core: number of a core that both threads may run on. None is, among several ranks of
            torch.distributed, one of these cores by rank, so that ranks of a host have different
            ones; in a single process the core that the calling thread is on.

    Raises:
        ValueError: the threads may not run on that core.

    >>> layer = torch.nn.Linear(4, 4)
    >>> with float8lab.backward_on_this_core():
    ...     layer(torch.ones(2, 4)).sum().backward()
    """
    check_size("core", core, optional=True)
    return _on_one_core(core)


@contextmanager
def _on_one_core(core: int | None) -> Iterator[None]:
    masks = {thread: os.sched_getaffinity(thread) for thread in _threads()}
    with ExitStack() as stack:
        if masks:
            allowed = set.intersection(*masks.values())
            if core is not None and core not in allowed:
                raise ValueError(
                    f"core must be one that the calling thread and autograd's may run on; got "
                    f"{core}. Choose one of {sorted(allowed)}."
                )
            chosen = _choose(allowed) if core is None else core
            for thread, mask in masks.items():
                if chosen is not None:
                    stack.callback(os.sched_setaffinity, thread, mask)
                    os.sched_setaffinity(thread, {chosen})
        yield


def _threads() -> list[int]:
    """The calling thread and the one that its backward runs on; none if they are the same."""
    if not torch.cuda.is_available():
        return []
    if not hasattr(os, "sched_setaffinity"):
        _say_that_there_is_no_affinity()
        return []
    calling = threading.get_native_id()
    backward = _backward_thread(os.getpid(), torch.cuda.current_device())
    return [calling, backward] if calling != backward else []


@functools.cache
def _say_that_there_is_no_affinity() -> None:
    warnings.warn(
        "backward_on_this_core has no effect: this system cannot bind threads to cores.",
        stacklevel=2,
    )


@functools.cache
def _backward_thread(process: int, device: int) -> int:
    """Number of autograd's thread for a device, which lives as long as the process."""
    threads: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(0, device=torch.device("cuda", device), requires_grad=True)
        y = x.clone()
        y.register_hook(lambda gradient: threads.append(threading.get_native_id()))
        torch.autograd.grad(y, x, torch.empty_like(y))
    return threads[0]


def _choose(allowed: set[int]) -> int | None:
    """One of the cores that the threads may run on, if there is one."""
    rank, count = rank_and_size()
    if count > 1 and allowed:
        return sorted(allowed)[rank % len(allowed)]
    try:  # the core that the calling thread is on
        fields = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
        current = int(fields[36])  # "processor", 39th of proc(5); the first two are cut off
    except OSError:
        current = -1
    return current if current in allowed else min(allowed, default=None)
