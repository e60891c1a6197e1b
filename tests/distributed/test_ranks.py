"""The pool of ranks reports a check that fails, and runs the next check on new ranks."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.ranks import RankPool, Ranks

CHECKS: list[str] = []
"""The folders of the checks that this rank has run."""


def check_that_passes(ranks: Ranks) -> None:
    CHECKS.append(ranks.tmp_path.name)
    if ranks.rank == 0:
        ranks.tmp_path.joinpath("checks").write_text(" ".join(CHECKS))


def check_that_fails(ranks: Ranks) -> None:
    assert ranks.rank != 1, "of the second"
    dist.barrier()  # where the first rank waits


def check_that_kills(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def check_that_hangs(ranks: Ranks) -> None:
    if ranks.rank == 1:
        time.sleep(60)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Runs a check in a folder of a given name."""
    pool = RankPool()

    def run(name: str, folder: str, module: str = __name__, patience: float = 60) -> str:
        (tmp_path / folder).mkdir()
        pool.patience = patience
        return pool.run("cpu", 2, module, name, tmp_path / folder)

    yield run
    pool.close()


@pytest.mark.parametrize(
    ("failing", "patience", "reason"),
    [
        ("check_that_fails", 60, "AssertionError: of the second"),
        ("check_that_kills", 60, "rank 1 ended with exit status -9"),
        ("check_that_hangs", 0.5, "rank 1 has not ended"),
    ],
    ids=["fails", "kills", "hangs"],
)
def test_new_ranks_come_after_a_failure(
    failing: str, patience: float, reason: str, run: Callable[..., str], tmp_path: Path
) -> None:
    assert [run("check_that_passes", name) for name in "ab"] == ["passed"] * 2
    assert reason in run(failing, "failing", patience=patience)
    assert run("check_that_passes", "c") == "passed"
    assert tmp_path.joinpath("b", "checks").read_text() == "a b"
    assert tmp_path.joinpath("c", "checks").read_text() == "c"


def test_another_file_gets_new_ranks(run: Callable[..., str], tmp_path: Path) -> None:
    assert run("check_that_passes", "a") == "passed"
    assert "has no attribute 'check_that_passes'" in run("check_that_passes", "b", "tests.recorder")
    assert run("check_that_passes", "c") == "passed"
    assert tmp_path.joinpath("c", "checks").read_text() == "c"
