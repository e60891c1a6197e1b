"""Which ops run, whether they wait for the GPU, and which gradients hooks get."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab.recipes.region import PROCESS

Observer = TypeVar("Observer")


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
def observing(observer: Observer) -> Iterator[Observer]:
    """``observer`` sees the casts and GEMMs of FP8 modules inside."""
    PROCESS.observer = observer
    try:
        yield observer
    finally:
        PROCESS.observer = None


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
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def launched(call: Callable[[], None]) -> list[str]:
    """The kernels and memory operations that a call runs on the GPU."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_gpu]


def hooked_as_by_megatron(weights: list[Any], *, zero_out: bool) -> list[Any]:
    """Hooks as of Megatron's data parallelism; returns where they note each gradient they got."""
    seen: list[Any] = []

    def hook_of(weight: Any) -> Any:
        def hook(*unused: Any) -> None:
            assert weight.grad.dtype == weight.dtype
            assert weight.grad_added_to_main_grad
            if zero_out:
                weight.main_grad.add_(weight.grad)
            weight.grad = None
            seen.append(weight)

        return hook

    for weight in weights:
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zero_out
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        weight.kept_node = node  # else its hook is forgotten with it
        node.register_hook(hook_of(weight))
    return seen
