"""The Megatron-style example: four ranks train as one does, and go on from each other's files."""

import re
from collections.abc import Callable
from pathlib import Path

import megatron_style
import pytest

from tests.distributed.programs import run_program, run_torchrun

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "examples" / "megatron_style.py"
STEPS = ["--steps", "2", "--batch", "2", "--micro", "1"]


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", printed)]


def on_gpus(count: int, *args: str) -> list[float]:
    return losses(run_torchrun(count, PROGRAM, *STEPS, *args))


@pytest.fixture
def on_four(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[float]]:
    def run(*args: str) -> list[float]:
        folder = tmp_path_factory.mktemp("printed")
        return losses(run_program(4, PROGRAM, *STEPS, *args, folder=folder))

    return run


@pytest.fixture
def on_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[float]]:
    """Run it in this process, the only one."""
    for name, value in {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")

    def run(*args: str) -> list[float]:
        assert megatron_style.main(["--tp", "1", "--pp", "1", *STEPS, *args]) == 0
        return losses(capsys.readouterr().out)

    return run


def far(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_four_ranks_train_as_one(
    tmp_path: Path, on_four: Callable[..., list[float]], on_one: Callable[..., list[float]]
) -> None:
    folder = str(tmp_path / "saved")
    whole = on_four("--save", folder, "--save-at", "1")
    assert len(whole) == 2
    assert on_four("--resume", folder, "--recompute") == whole[1:]
    one, high = on_one(), on_one("--recipe", "none")
    fp8 = far(one, high)  # what FP8 changes
    assert 0 < fp8 < 0.1 * one[0]
    assert far(whole, one) < fp8 / 4  # what another order of sums changes
    assert far(whole[1:2], on_one("--resume", folder)[:1]) < fp8 / 100  # before any update


@pytest.mark.multi_gpu
def test_two_gpus() -> None:
    found = on_gpus(2, "--device", "cuda", "--pp", "1")
    assert found[-1] < found[0]
