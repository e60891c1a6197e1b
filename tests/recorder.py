"""Which ops run, and whether they wait for the GPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Ops", "check_capture", "never_waiting"]


class Ops(TorchDispatchMode):
    """Records the ops that run inside, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op)
        return op(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """Such as ``"aten.mm.default"``."""
        return [str(op) for op in self.seen]


@contextmanager
def never_waiting() -> Iterator[None]:
    """What runs inside raises if it waits for the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_capture(run: Callable[[], Sequence[Tensor]]) -> None:
    """``run`` never waits for the GPU, and a CUDA graph of it gives its results again.

    A test of it takes the fixture ``uncollected``.
    """
    for _ in range(3):
        want = run()
    with never_waiting():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
