"""The Triton kernels in Triton's interpreter, on any machine: indices, masks, scales, padding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpreted.py")
ROOT = SCRIPT.parents[2]


@pytest.mark.parametrize("how", [[], pytest.param(["--all"], marks=pytest.mark.slow)], ids=str)
def test_kernels_match_the_reference_in_the_interpreter(how: list[str]) -> None:
    # A process of its own: triton reads the variable when it is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *how],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
