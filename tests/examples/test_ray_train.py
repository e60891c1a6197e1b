"""The Ray example: a worker is killed, and the run resumes bit for bit."""

import re
from pathlib import Path

import pytest

from tests.processes import ROOT, run_python

pytest.importorskip("ray", reason="needs the extra 'ray'")


def run_example(folder: Path, *args: str) -> str:
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    return run_python(ROOT / "examples" / "ray_train.py", "--storage", folder, *args, **variables)


def assert_resumes(folder: Path, *args: str) -> None:
    output = run_example(folder, *args)
    repeated_steps = [int(step) for step in re.findall(r"step +(\d+) .*again", output)]
    # From the checkpoint after step 2 to the end of the worker before step 5.
    assert repeated_steps == [3, 4]
    assert "4 records of repeated steps, 0 of them with other bytes" in output


@pytest.mark.slow
def test_a_killed_worker_resumes_bit_for_bit(tmp_path: Path) -> None:
    assert_resumes(tmp_path, "--batch", "1")


@pytest.mark.multi_gpu
def test_a_killed_worker_resumes_on_two_gpus(tmp_path: Path) -> None:
    assert_resumes(tmp_path, "--device", "cuda", "--preset", "small")
