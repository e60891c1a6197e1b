"""Recorders of which ops run, whether they wait for the GPU, and which gradients hooks get."""

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
    """Records the ops that run inside, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(op)
        return op(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        """The names of the ops, such as ``"aten.mm.default"``."""
        return [str(op) for op in self.seen]


@contextmanager
def observing(observer: Observer) -> Iterator[Observer]:
    """Show ``observer`` the casts and GEMMs of FP8 modules inside."""
    PROCESS.observer = observer
    try:
        yield observer
    finally:
        PROCESS.observer = None


@contextmanager
def never_waiting() -> Iterator[None]:
    """Raise if code inside waits for the GPU."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_capture(run: Callable[[], Sequence[Tensor]]) -> None:
    """Assert that ``run`` never waits for the GPU, and that a CUDA graph repeats its results.

    A test that calls this takes the fixture ``uncollected``.
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
    """Return the kernels and memory operations that a call runs on the GPU."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == on_gpu]


def hooked_as_by_megatron(weights: list[Any], *, zero_out: bool) -> list[Any]:
    """Hook weights like Megatron's data parallelism; return a list that the hooks fill."""
    reached: list[Any] = []

    def hook_of(weight: Any) -> Any:
        def hook(*unused: Any) -> None:
            assert weight.grad.dtype == weight.dtype
            assert weight.grad_added_to_main_grad
            if zero_out:
                weight.main_grad.add_(weight.grad)
            weight.grad = None
            reached.append(weight)

        return hook

    for weight in weights:
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zero_out
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]
        weight.kept_node = node  # else the node is freed, and its hook with it
        node.register_hook(hook_of(weight))
    return reached
