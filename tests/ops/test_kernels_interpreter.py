"""The Triton kernels in Triton's interpreter, on any machine: indices, masks, scales, padding."""

from pathlib import Path

import pytest

from tests.processes import run_python

pytest.importorskip("triton")

SCRIPT = Path(__file__).with_name("interpreted.py")


@pytest.mark.parametrize("how", [[], pytest.param(["--all"], marks=pytest.mark.slow)], ids=str)
def test_kernels_match_the_reference_in_the_interpreter(how: list[str]) -> None:
    # A process of its own: triton reads the variable when it is imported.
    run_python("-W", "ignore", SCRIPT, *how, TRITON_INTERPRET="1")
