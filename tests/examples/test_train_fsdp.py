"""The FSDP2 example on two processes."""

import re
from pathlib import Path

import pytest

from tests.distributed.programs import run_program, run_torchrun

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "train_fsdp.py"
STEPS = ["--steps", "1", "--batch", "1"]


def megabytes(line):
    """Of bf16, of FP8."""
    return [float(number) for number in re.findall(r"([\d.]+) MB", line)]


def test_two_processes_train_and_gather_less(tmp_path):
    printed = run_program(2, PROGRAM, *STEPS, folder=tmp_path)
    lines = {line[:18].strip(): line for line in printed.splitlines()}
    assert "2 processes on cpu" in printed
    assert "16 of 17 linear layers in FP8" in printed
    losses = [float(loss) for loss in re.findall(r"step +0  loss ([\d.]+)", printed)]
    assert len(losses) == 2
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.01)
    bf16, fp8 = megabytes(lines["gathered a step"])
    # Of 834,304 parameters, gathered forward and backward but for the root's, 94.8 % halve.
    assert bf16 == pytest.approx(2 * 2 * 0.834, rel=0.1)
    assert 0.5 < fp8 / bf16 < 0.56
    bf16, fp8 = megabytes(lines["saved for backward"])
    assert fp8 < bf16
    assert "time a step" in printed


@pytest.mark.multi_gpu
def test_two_gpus():
    assert "peak of GPU memory" in run_torchrun(
        2, PROGRAM, *STEPS, "--device", "cuda", "--preset", "small"
    )
