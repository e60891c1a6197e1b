"""Programs of docs/launchers.md and docs/transformers.md, started by the commands they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("launchers", "transformers"))
PROGRAMS = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines()
    if "HOST" not in block and "train_" in block
]
MODULES = {"accelerate": "accelerate.commands.accelerate_cli", "torchrun": "torch.distributed.run"}


def losses(command: str, folder: Path) -> list[str]:
    """What rank 0 printed of each step."""
    program, *words = command.replace("examples/", f"{ROOT}/examples/").split()
    module = ["-m", MODULES[program]] if program in MODULES else []
    done = subprocess.run(
        [sys.executable, *module, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    # Gloo's thread may drop the tensor of the last collective only when the interpreter has ended,
    # and asks for its lock: then Python aborts the process, which has done all that it had to do.
    ended = done.returncode == 0 or "terminate called without an active exception" in done.stderr
    assert ended, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("step")]


def commands_of(name: str) -> list[str]:
    return [command for command in COMMANDS if f"{name}.py" in command]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, _ in PROGRAMS])
def test_resumes_on_two_processes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning" if name == "train_lightning" else "accelerate")
    (tmp_path / f"{name}.py").write_text(dict(PROGRAMS)[name])
    start, resume = commands_of(name)
    whole = losses(start, tmp_path)
    assert len(whole) == 6  # of 12 batches: each process had every other one
    assert losses(resume, tmp_path) == whole[3:]


@pytest.mark.parametrize("name", ["train_accelerate", "train_fp8"])
def test_accelerates_program_resumes_on_forks(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the launcher, whose configuration is read as it reads it."""
    config = pytest.importorskip("accelerate.commands.config.config_args")
    program = tmp_path / f"{name}.py"
    program.write_text(dict(PROGRAMS)[program.stem])
    monkeypatch.chdir(tmp_path)
    printed = []
    for number, command in enumerate(commands_of(program.stem)):
        _, launch, _, path, _, *words = command.split()
        assert launch == "launch"
        world = config.load_config_from_file(str(ROOT / path)).num_processes
        folder = tmp_path / f"printed-{number}"
        folder.mkdir()
        lines = run_program(world, program, *words, folder=folder).splitlines()
        printed.append([line for line in lines if line.startswith("step")])
    whole, resumed = printed
    assert len(whole) == 6  # of 12 batches: each process had every other one
    assert resumed == whole[3:]
