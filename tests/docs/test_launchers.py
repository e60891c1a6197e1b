"""The programs of docs/launchers.md, started by the commands that the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launchers.md").read_text()
PROGRAMS = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines()
    if "HOST" not in block
]
MODULES = {
    "accelerate": "accelerate.commands.accelerate_cli",
    "torchrun": "torch.distributed.run",
}


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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "train_accelerate"))
        for name, _ in PROGRAMS
    ],
)
def test_resumes_on_two_processes(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name.removeprefix("train_"))
    (tmp_path / f"{name}.py").write_text(dict(PROGRAMS)[name])
    start, resume = (command for command in COMMANDS if f"{name}.py" in command)
    whole = losses(start, tmp_path)
    assert len(whole) == 6  # of 12 batches: each process had every other one
    assert losses(resume, tmp_path) == whole[3:]
