"""The FSDP2 example on two processes."""

import re
from pathlib import Path

import pytest

from tests.distributed.programs import run_program, run_torchrun

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "train_fsdp.py"
STEPS = ["--steps", "1", "--batch", "1"]


def megabytes(line):
    """The megabytes of bfloat16 and of FP8 in a line."""
    return [float(number) for number in re.findall(r"([\d.]+) MB", line)]


def test_two_processes_train_and_gather_less(tmp_path):
    output = run_program(2, PROGRAM, *STEPS, folder=tmp_path)
    lines = {line[:18].strip(): line for line in output.splitlines()}
    assert "2 processes on cpu" in output
    assert "16 of 17 linear layers in FP8" in output
    losses = [float(loss) for loss in re.findall(r"step +0  loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.01)
    bf16, fp8 = megabytes(lines["gathered a step"])
    # 834,304 parameters are gathered in forward and backward, except the root's; 94.8 % take half.
    assert bf16 == pytest.approx(2 * 2 * 0.834, rel=0.1)
    assert 0.5 < fp8 / bf16 < 0.56
    bf16, fp8 = megabytes(lines["saved for backward"])
    assert fp8 < bf16
    assert "time a step" in output


@pytest.mark.multi_gpu
def test_example_trains_on_two_gpus():
    assert "peak of GPU memory" in run_torchrun(
        2, PROGRAM, *STEPS, "--device", "cuda", "--preset", "small"
    )
