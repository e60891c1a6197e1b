"""Settings of every test: seed 0, NaN in unwritten memory, no GPU tests without a GPU."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # functions import these late: with workers, this process does not need them
    import torch

    from tests.distributed.ranks import RankPool

# No test is about the speed of Inductor's loops on a CPU. Precompiled headers, and programs that
# detect vector instructions, take 6 of the 8 s in which Inductor compiles a loop.
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
    is_worker = hasattr(config, "workerinput")  # in a worker of pytest-xdist
    if config.getoption("numprocesses", None) and not is_worker:
        return
    import torch

    gc.set_threshold(20_000, 20, 50)  # a compilation makes many objects that stay

    # Deterministic mode fills torch.empty with NaN, so an output that is not written fails its
    # test. The mode also warns about ops without a deterministic kernel; pyproject.toml ignores
    # those warnings.
    torch.use_deterministic_algorithms(True, warn_only=True)
    if is_worker:  # the workers share the cores, and so do the processes that tests start
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not read files of GPU tests where there is no GPU, unless a file is named."""
    return True if collection_path.name.endswith("_gpu.py") and not gpus() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that need more GPUs than torch sees: skipping thousands takes a while."""

    def required_gpus(item: pytest.Item) -> int:
        if item.get_closest_marker("multi_gpu"):
            return 2
        return 1 if item.get_closest_marker("gpu") else 0

    deselected = [item for item in items if required_gpus(item) > gpus()]
    if len(deselected) < len(items):
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if required_gpus(item) <= gpus()]
        return
    for item in deselected:  # only such tests were asked for: say why they do not run
        skip = pytest.mark.skip(
            reason=f"needs {required_gpus(item)} CUDA GPUs; torch sees {gpus()}"
        )
        item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _freeze() -> None:
    # Objects that exist before a file stay, as tests and modules do. Many tests ask for a full
    # garbage collection, which need not look at these objects.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed records its caller for every possible backend, which takes some 5 ms
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_warning_about_idle_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    # A region without an FP8 module warns once per process. Only tests of the warning turn it on.
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
    """Run a check on ranks, and raise if it fails on any; ``each_check`` sets their number."""
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
    """Collect no garbage while a CUDA graph is recorded: the end of an older graph spoils it."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    """Forget what was compiled before the test, and what the test compiled."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def no_silent_dequantizing() -> Iterator[None]:
    """Raise at an op without an FP8 implementation."""
    import float8lab

    with float8lab.fallback("error"):
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Run the test on the CPU and, marked ``gpu``, on the GPU."""
    import torch

    return torch.device(request.param)
