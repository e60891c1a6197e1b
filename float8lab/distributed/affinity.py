"""Run autograd's thread for a GPU on the core of the thread that calls backward.

Autograd runs the backward of a GPU's ops on a separate thread. The two threads alternate, and the
operating system puts them on different cores: each Python object passed between them, and each
wake-up, crosses the chip. For ops that take microseconds this takes most of the time.
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

_warn_once = functools.cache(warnings.warn)


def backward_on_this_core(core: int | None = None) -> AbstractContextManager[None]:
    """Bind the calling thread, and autograd's thread for the current GPU, to one core.

    Use it for steps that take the CPU longer than the GPU. Only these two threads are bound, and
    both get their former affinity back on exit. Enter it around a step: threads and processes that
    the calling thread starts inside, such as a data loader's workers, inherit its core. Contexts
    nest; it is also a decorator. After the first, an entry costs a few microseconds.

    Without a GPU backward runs on the thread that calls it, and nothing is bound. On systems other
    than Linux nothing is bound, either, and a warning says so once.

    Args:
        core: number of a core that both threads may run on. With None, several ranks of
            torch.distributed choose among these cores by rank, so that ranks of a host have
            different cores; a single process uses the core of the calling thread.

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
    """Return the calling thread and the thread of its backward; none if they are the same."""
    if not torch.cuda.is_available():
        return []
    if not hasattr(os, "sched_setaffinity"):
        _warn_once("backward_on_this_core has no effect: this system cannot bind threads to cores.")
        return []
    calling = threading.get_native_id()
    backward = _backward_thread(os.getpid(), torch.cuda.current_device())
    return [calling, backward] if calling != backward else []


@functools.cache
def _backward_thread(process: int, device: int) -> int:
    """Return the number of autograd's thread for a device, which lives as long as the process."""
    threads: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(0, device=torch.device("cuda", device), requires_grad=True)
        y = x.clone()
        y.register_hook(lambda gradient: threads.append(threading.get_native_id()))
        torch.autograd.grad(y, x, torch.empty_like(y))
    return threads[0]


def _choose(allowed: set[int]) -> int | None:
    """Return one of the cores that the threads may run on; None if there is none."""
    rank, count = rank_and_size()
    if count > 1 and allowed:
        return sorted(allowed)[rank % len(allowed)]
    try:  # the core that the calling thread is on
        fields = Path("/proc/thread-self/stat").read_text().rpartition(")")[2].split()
        current = int(fields[36])  # "processor", 39th of proc(5); the first two are cut off
    except OSError:
        current = -1
    return current if current in allowed else min(allowed, default=None)
