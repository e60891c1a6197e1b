"""A separate Python process, for tests of what happens when the interpreter starts."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments: str | Path, **variables: str) -> str:
    """Run Python in the repository with these environment variables, and return what it prints."""
    run = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | variables,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
