"""The Megatron-style example: four ranks train as one does, and each resumes the other's files."""

import re
from collections.abc import Callable
from pathlib import Path

import megatron_style
import pytest

from tests.distributed.programs import run_program, run_torchrun

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "megatron_style.py"
STEPS = ["--steps", "2", "--batch", "2", "--micro", "1"]


def losses_in(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", printed)]


def run_on_gpus(count: int, *args: str) -> list[float]:
    return losses_in(run_torchrun(count, PROGRAM, *STEPS, *args))


@pytest.fixture
def run_on_four(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    def run(*args: str) -> list[float]:
        folder = tmp_path_factory.mktemp("printed")
        return losses_in(run_program(4, PROGRAM, *STEPS, *args, folder=folder))

    return run


@pytest.fixture
def run_on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[float]]:
    """Run the example in this process, as the only rank."""
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")

    def run(*args: str) -> list[float]:
        assert megatron_style.main(["--tp", "1", "--pp", "1", *STEPS, *args]) == 0
        return losses_in(capsys.readouterr().out)

    return run


def largest_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_four_ranks_train_and_resume_as_one(
    tmp_path: Path, run_on_four: Callable[..., list[float]], run_on_one: Callable[..., list[float]]
) -> None:
    folder = str(tmp_path / "saved")
    four_rank_losses = run_on_four("--save", folder, "--save-at", "1")
    assert len(four_rank_losses) == 2
    assert run_on_four("--resume", folder, "--recompute") == four_rank_losses[1:]
    one_rank_losses, high_precision_losses = run_on_one(), run_on_one("--recipe", "none")
    fp8_difference = largest_difference(one_rank_losses, high_precision_losses)  # the effect of FP8
    assert 0 < fp8_difference < 0.1 * one_rank_losses[0]
    # The effect of another order of sums.
    assert largest_difference(four_rank_losses, one_rank_losses) < fp8_difference / 4
    # Before any update.
    assert (
        largest_difference(four_rank_losses[1:2], run_on_one("--resume", folder)[:1])
        < fp8_difference / 100
    )


@pytest.mark.multi_gpu
def test_example_trains_on_two_gpus() -> None:
    step_losses = run_on_gpus(2, "--device", "cuda", "--pp", "1")
    assert step_losses[-1] < step_losses[0]
