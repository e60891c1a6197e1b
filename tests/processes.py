"""A Python of its own, for what must begin with the interpreter."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments: str | Path, **variables: str) -> str:
    """What it prints with these arguments, beside the package, and variables of its environment."""
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
