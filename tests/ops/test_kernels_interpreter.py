"""The Triton kernels in Triton's interpreter, without a GPU: indices, masks, scales, padding."""

from pathlib import Path

import pytest

from tests.processes import run_python

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpreted.py")


@pytest.mark.parametrize("options", [[], pytest.param(["--all"], marks=pytest.mark.slow)], ids=str)
def test_kernels_match_the_reference_in_the_interpreter(options: list[str]) -> None:
    # triton reads the variable when it is imported, so the script needs a new process.
    run_python("-W", "ignore", SCRIPT, *options, TRITON_INTERPRET="1")
