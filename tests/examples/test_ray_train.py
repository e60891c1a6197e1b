"""The Ray example: a killed worker, and a run that goes on bit for bit."""

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python

pytest.importorskip("ray", reason="needs the extra 'ray'")


def run(folder: Path, *args: str) -> str:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    return run_python(ROOT / "examples" / "ray_train.py", "--storage", folder, *args, **quiet)


def check(folder: Path, *args: str) -> None:
    printed = run(folder, *args)
    again = [int(step) for step in re.findall(r"step +(\d+) .*again", printed)]
    assert again == [3, 4]  # from the checkpoint after step 2 to the worker's end before step 5
    assert "4 records of repeated steps, 0 of them with other bytes" in printed


@pytest.mark.slow
def test_a_killed_worker_resumes_bit_for_bit(tmp_path: Path) -> None:
    check(tmp_path, "--batch", "1")


@pytest.mark.multi_gpu
def test_two_gpus(tmp_path: Path) -> None:
    check(tmp_path, "--device", "cuda", "--preset", "small")
