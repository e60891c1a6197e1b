"""Run checks on several processes: gloo on the CPU, NCCL on GPUs, from the same code.

A test file holds checks, functions of a ``Ranks`` whose names start with ``check_``, and a test
of each, which ``each_check`` makes. The test sends the name of the check to the ranks of the
session's pool, which run it once, whichever worker of pytest-xdist the test is on.
"""

import contextlib
import gc
import importlib
import itertools
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab import recipes

PRELOAD = [
    "tests.distributed.ranks", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch._dynamo", "torch._inductor.compile_fx",
]  # fmt: skip
"""Modules that the fork server imports once for all ranks, which takes some 7 s of CPU time."""

RECIPES: list[recipes.Recipe] = [
    recipes.Float8CurrentScaling(), recipes.Float8RowwiseScaling(), recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
]  # fmt: skip
"""One recipe for each granularity of a stored weight."""


@dataclass
class Ranks:
    """One process, or rank, of a distributed job."""

    rank: int
    world: int
    device: torch.device
    tmp_path: Path

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A device mesh over all ranks, one-dimensional by default."""
        return init_device_mesh(self.device.type, shape or (self.world,), mesh_dim_names=names)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def assert_same(self, value: Tensor) -> None:
        """Assert that a tensor has the same bytes on all ranks."""
        values = self.gather(value.detach().cpu())
        assert all(torch.equal(other, values[0]) for other in values), values


class Collectives(TorchDispatchMode):
    """Record the collectives that run inside: (name, dtype, elements of this rank's input)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            name = func.name().split("::")[1].strip("_")
            # all_gather and reduce_scatter take (output, input, ...). Other collectives, and the
            # functional ones, take the input first.
            value = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
            while not isinstance(value, Tensor):
                value = value[0]
            self.seen.append((name, value.dtype, value.numel()))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[tuple[torch.dtype, int]]:
        """Return dtype and size of the collectives whose name contains ``name``."""
        return [(dtype, size) for called, dtype, size in self.seen if name in called]


_SLOW_CHECKS: set[Any] = set()
_CPU_WORLDS: dict[Any, int] = {}


def slow_check(check: Any) -> Any:
    """Mark a check ``slow`` because a quick check proves the same on a smaller scale."""
    _SLOW_CHECKS.add(check)
    return check


def on_ranks(number: int) -> Callable[[Any], Any]:
    """Set on how many ranks a CPU runs a check, in place of the number of ``each_check``."""

    def mark(check: Any) -> Any:
        _CPU_WORLDS[check] = number
        return check

    return mark


def each_check(module: str, *worlds: int, cpu: int = 0) -> Callable[..., None]:
    """Make a test that runs each check of a test file.

    Args:
        module: ``__name__`` of the file.
        worlds: the numbers of processes on which all checks run. On GPUs, each process has one.
        cpu: the number of processes of the quick tests on a CPU, where several processes share a
            core. The default is the smallest of ``worlds`` above 1. Tests on 1 process are quick,
            too. Tests on more processes are ``slow``. Smaller numbers above 1 are left out, since
            no check does more with fewer processes.
    """
    default_cpu_world = cpu or min(world for world in worlds if world > 1)
    cases = []
    for device, world in itertools.product(("cpu", "cuda"), sorted(worlds)):
        for name, check in vars(sys.modules[module]).items():
            if not name.startswith("check_"):
                continue
            cpu_world = _CPU_WORLDS.get(check, default_cpu_world)
            marks = [pytest.mark.multi_gpu] * (device == "cuda")
            marks += [pytest.mark.slow] * (
                check in _SLOW_CHECKS or (device == "cpu" and world > cpu_world)
            )
            if device == "cuda" or world == 1 or world >= cpu_world:
                label = f"{device}-{world}-{name}"
                cases.append(pytest.param((device, world), name, id=label, marks=marks))

    @pytest.mark.parametrize(("outcome", "name"), cases, indirect=["outcome"])
    def test(outcome: Callable[[str], None], name: str) -> None:
        outcome(name)

    return test


def fork_server_context() -> BaseContext:
    """Return a context whose processes are forks of one with slow imports and without CUDA."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _set_up(rank: int, world: int, device_type: str, store: str) -> torch.device:
    gc.freeze()  # what the fork server has imported stays
    gc.set_threshold(20_000, 20, 50)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    warnings.filterwarnings("ignore", message="Deterministic behavior was enabled with either")
    warnings.filterwarnings("ignore", message=".*defaults to a non-deterministic algorithm")
    # The same filters as in pyproject.toml.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current")
    warnings.filterwarnings("ignore", message="`torch.jit.* is deprecated")
    warnings.filterwarnings("ignore", message="<class 'torch.autograd.function.Function'> should")
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank,
        world_size=world, timeout=timedelta(seconds=60),
        device_id=device if device_type == "cuda" else None,
    )  # fmt: skip
    return device


def _serve(rank: int, world: int, device_type: str, store: str, connection: Connection) -> None:
    """Run the checks whose names arrive, until no more arrive or a check fails."""
    try:
        device = _set_up(rank, world, device_type, store)
        while job := _receive_job(connection):
            module, name, folder = job
            torch.manual_seed(0)
            check = getattr(importlib.import_module(module), name)
            check(Ranks(rank, world, device, folder))
            dist.barrier()
            connection.send("passed")
        dist.destroy_process_group()
    except BaseException:
        connection.send(traceback.format_exc())
        _receive_job(connection)  # if this rank ended, the collectives of other ranks would fail


def _receive_job(connection: Connection) -> tuple[str, str, Path] | None:
    """Return the next job, or None if the session has ended."""
    try:
        return connection.recv()
    except EOFError:
        return None


class RankPool:
    """The ranks of a session, which run one check after another.

    The ranks serve one test file. Another file gets new ranks, so that nothing that a check leaves
    in its processes reaches the checks of other files. New ranks also start after a failure, since
    a group is of no use when one of its ranks has died, hangs or waits elsewhere.

    Args:
        patience: seconds after which a check that has not ended has failed.
    """

    def __init__(self, patience: float = 600) -> None:
        self.patience = patience
        self._serves: tuple[str, int, str] | None = None  # device type, world, module
        self._ranks: dict[Connection, Any] = {}

    def run(self, device_type: str, world: int, module: str, name: str, folder: Path) -> str:
        """Return the outcome of a check: "passed", or a report of each rank on which it failed."""
        if self._serves != (device_type, world, module):
            self.close()
            self._start(device_type, world, str(folder.with_name(f"{folder.name}-store")))
            self._serves = (device_type, world, module)
        self._send((module, name, folder))
        failures = self._failures()
        if failures:
            self._end(patience=0)
        return "\n".join(failures) or "passed"

    def close(self) -> None:
        """Let the ranks end, and wait for them."""
        self._send(None)
        self._end(patience=10)

    def _send(self, job: tuple[str, str, Path] | None) -> None:
        for connection in self._ranks:
            with contextlib.suppress(OSError):  # the rank has ended; _failures reports it
                connection.send(job)

    def _start(self, device_type: str, world: int, store: str) -> None:
        context = (
            multiprocessing.get_context("spawn") if device_type == "cuda" else fork_server_context()
        )
        for rank in range(world):
            parent_end, child_end = context.Pipe()
            arguments = (rank, world, device_type, store, child_end)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            child_end.close()  # so that a rank that dies ends the connection
            self._ranks[parent_end] = process

    def _failures(self) -> list[str]:
        """Return the reports of failures; 1 s after the first failure, wait for no more reports."""
        failures, waiting = [], {connection: i for i, connection in enumerate(self._ranks)}
        deadline = time.monotonic() + self.patience
        while waiting and (ready := wait([*waiting], max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    report = connection.recv()
                except EOFError:
                    process = self._ranks[connection]
                    process.join()
                    report = f"rank {rank} ended with exit status {process.exitcode}"
                if report != "passed":
                    failures.append(report)
                    deadline = min(deadline, time.monotonic() + 1)
        return failures or [f"rank {rank} has not ended" for rank in waiting.values()]

    def _end(self, *, patience: float) -> None:
        deadline = time.monotonic() + patience
        for process in self._ranks.values():
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for connection in self._ranks:
            connection.close()
        self._ranks, self._serves = {}, None
