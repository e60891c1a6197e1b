"""Run checks on several processes: gloo on the CPU, NCCL on GPUs, from the same code.

A test file holds checks, functions of a ``Ranks`` whose names start with ``check_``, and a fixture
made by ``ranks_fixture``: it starts the processes once for all checks of the file, and each test
asks for the outcome of one of them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)

__all__ = ["RECIPES", "Collectives", "Ranks", "check_names", "ranks_fixture"]

RECIPES: list[Recipe] = [
    Float8CurrentScaling(),
    Float8RowwiseScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
]
"""One for each granularity of a stored weight."""


@dataclass
class Ranks:
    """This process among those of a job."""

    rank: int
    world: int
    device: torch.device
    tmp_path: Path

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A device mesh over all ranks, one-dimensional by default."""
        return init_device_mesh(self.device.type, shape or (self.world,), mesh_dim_names=names)

    def gather(self, value: Any) -> list[Any]:
        """The value of each rank."""
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def assert_same(self, value: Tensor) -> None:
        """Assert that all ranks have the same bytes."""
        values = self.gather(value.detach().cpu())
        assert all(torch.equal(other, values[0]) for other in values), values


class Collectives(TorchDispatchMode):
    """Records the collectives that run inside: (name, dtype, elements of this rank's input)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            name = func.name().split("::")[1].strip("_")
            # all_gather and reduce_scatter take (output, input, ...), the others and functional
            # ones their input.
            value = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
            while not isinstance(value, Tensor):
                value = value[0]
            self.seen.append((name, value.dtype, value.numel()))
        return func(*args, **(kwargs or {}))

    def of(self, name: str) -> list[tuple[torch.dtype, int]]:
        """dtype and size of the collectives whose name contains ``name``."""
        return [(dtype, size) for seen, dtype, size in self.seen if name in seen]


def check_names(module: Any) -> list[str]:
    """The checks of a test file."""
    return [name for name in vars(module) if name.startswith("check_") and name != "check_names"]


def _start(rank: int, world: int, device_type: str, module: str, names: list[str], tmp: str):
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("error")
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
    warnings.filterwarnings("ignore", message="Deterministic behavior was enabled with either")
    warnings.filterwarnings("ignore", message=".*defaults to a non-deterministic algorithm")
    # These as in pyproject.toml.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current")
    warnings.filterwarnings("ignore", message="`torch.jit.* is deprecated")
    warnings.filterwarnings("ignore", message="<class 'torch.autograd.function.Function'> should")
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{tmp}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=device if device_type == "cuda" else None,
    )
    for name in names:
        folder = Path(tmp) / name
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        check = getattr(importlib.import_module(module), name)
        try:
            check(Ranks(rank, world, device, folder))
        except BaseException:
            (Path(tmp) / f"{name}.{rank}").write_text(traceback.format_exc())
            raise
        dist.barrier()
        (Path(tmp) / f"{name}.{rank}").write_text("passed")
    dist.destroy_process_group()


def _run(world: int, device_type: str, module: str, names: list[str], tmp: Path) -> dict[str, str]:
    """Outcome of each check: "passed", or the traceback of a rank on which it failed."""
    arguments = (world, device_type, module, names, str(tmp))
    # Forks of one process that has imported what is slow, and nothing of CUDA, start in no time.
    slow = [__name__, "torch.distributed.checkpoint", "torch.distributed.fsdp"]
    multiprocessing.set_forkserver_preload(slow)
    method = "spawn" if device_type == "cuda" else "forkserver"
    try:
        torch.multiprocessing.start_processes(_start, arguments, nprocs=world, start_method=method)
    except (
        torch.multiprocessing.ProcessRaisedException,
        torch.multiprocessing.ProcessExitedException,
    ) as error:
        ended = str(error).strip().splitlines()[-1]
    else:
        ended = ""
    outcomes = {}
    for name in names:
        files = [tmp / f"{name}.{rank}" for rank in range(world)]
        texts = [file.read_text() for file in files if file.exists()]
        failures = [text for text in texts if text != "passed"]
        complete = len(texts) == world and not failures
        outcomes[name] = "passed" if complete else "\n".join(failures) or f"not run: {ended}"
    return outcomes


def ranks_fixture(module: str, *worlds: int) -> Any:
    """A fixture ``outcome(name)`` that raises if the check failed on any rank.

    Args:
        module: ``__name__`` of the test file.
        worlds: numbers of processes to run all checks on. On the CPU, where several processes share
            a core, not on 2 if 4 are there: no check does more with 2.
    """
    parameters = [
        pytest.param((device, world), id=f"{device}-{world}", marks=marks)
        for device, marks in (("cpu", ()), ("cuda", pytest.mark.multi_gpu))
        for world in worlds
        if not (device == "cpu" and world == 2 and 4 in worlds)
    ]

    @pytest.fixture(scope="module", params=parameters)
    def outcome(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Callable[[str], None]:
        device, world = request.param
        if device == "cuda" and torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} CUDA GPUs; torch sees {torch.cuda.device_count()}")
        names = check_names(importlib.import_module(module))
        outcomes = _run(world, device, module, names, tmp_path_factory.mktemp("ranks"))

        def outcome(name: str) -> None:
            assert outcomes[name] == "passed", outcomes[name]

        return outcome

    return outcome
