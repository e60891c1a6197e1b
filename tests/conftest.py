"""What every test runs under: seed 0, NaN in unwritten memory, no GPU tests without a GPU."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # else where they are used: with workers, this process has no use for them
    import torch

    from tests.distributed.ranks import RankPool

# No test is about the speed of Inductor's loops on a CPU: headers compiled in advance, and programs
# that ask which vector instructions there are, take 6 of the 8 s in which it compiles one.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")


@functools.cache
def gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        type=int,
        help="draw so many cases in each test that generates them, or all there are; few without",
    )


def pytest_configure(config: pytest.Config) -> None:
    works = hasattr(config, "workerinput")  # in a worker of pytest-xdist
    if config.getoption("numprocesses", None) and not works:
        return
    import torch

    # Deterministic mode fills torch.empty with NaN, so an output nobody wrote fails its test. The
    # mode also warns about ops without a deterministic kernel; pyproject.toml ignores that.
    torch.use_deterministic_algorithms(True, warn_only=True)
    if works:  # the workers share the cores, and so do the processes that tests start
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not read files of GPU tests where there is no GPU, unless a file is named."""
    return True if collection_path.name.endswith("_gpu.py") and not gpus() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs more GPUs than torch sees; to skip thousands of tests takes a while."""

    def needed(item: pytest.Item) -> int:
        if item.get_closest_marker("multi_gpu"):
            return 2
        return 1 if item.get_closest_marker("gpu") else 0

    left_out = [item for item in items if needed(item) > gpus()]
    if len(left_out) < len(items):
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if needed(item) <= gpus()]
        return
    for item in left_out:  # nothing else was asked for: say why it does not run
        skip = pytest.mark.skip(reason=f"needs {needed(item)} CUDA GPUs; torch sees {gpus()}")
        item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    # What there is before a file stays, as tests and modules do: a full collection, which many
    # tests ask for, need not look at it.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would note its caller for every backend that may come up: some 5 ms
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_warning_about_idle_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    # That an autocast region held no FP8 module is said once a process: here, by its own tests.
    monkeypatch.setattr("float8lab.autocast._warns_of_idle_regions", False)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The processes on which the checks of ``tests/distributed/ranks.py`` run."""
    from tests.distributed.ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def outcome(
    request: pytest.FixtureRequest, rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], None]:
    """Runs a check on ranks, and raises if it failed on any; ``each_check`` says on how many."""
    device, world = request.param
    if device == "cuda" and gpus() < world:
        pytest.skip(f"needs {world} CUDA GPUs; torch sees {gpus()}")

    def outcome(name: str) -> None:
        folder = tmp_path_factory.mktemp(name)
        result = rank_pool.run(device, world, request.module.__name__, name, folder)
        assert result == "passed", result

    return outcome


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No garbage is collected while a CUDA graph is recorded: an older graph's end spoils it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """What others compiled is forgotten before the test, and what the test compiled after it."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_silent_dequantizing() -> Iterator[None]:
    """An op without an FP8 implementation raises."""
    import float8lab

    with float8lab.fallback("error"):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test on the CPU and, marked ``gpu``, on the GPU."""
    import torch

    return torch.device(request.param)
