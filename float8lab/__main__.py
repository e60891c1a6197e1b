"""``python -m float8lab selfcheck`` and ``python -m float8lab env``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence

import torch

from float8lab.inspect.environment import environment
from float8lab.inspect.selfcheck import selfcheck

__all__ = ["main"]

_COLOURS = {
    "passed": 32,
    "native": 32,
    "emulated": 33,
    "partly native": 33,
    "unsupported": 33,
    "missing": 33,
    "failed": 31,
    "FAILED": 31,
}
_WORDS = re.compile(rf"\b({'|'.join(_COLOURS)})\b(?!:)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, or 1 where a check failed.

    Raises:
        SystemExit: with status 2, the arguments are not understood or torch sees no such device.
    """
    parser = argparse.ArgumentParser(prog="python -m float8lab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("selfcheck", help="check every op on this machine")
    check.add_argument("--verbose", action="store_true", help="what each op is compared with")
    env = commands.add_parser("env", help="versions, GPUs, and what is native, and why not")
    for command in (check, env):
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument(
            "--device", choices=("cpu", "cuda"), help="by default cuda, or cpu without a GPU"
        )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU; leave --device out or pass cpu")
    if options.command == "env":
        found = environment(options.device)
        _print(json.dumps(found.to_json(), indent=2) if options.json else str(found), options.json)
        return 0
    report = selfcheck(options.device, options.verbose)
    _print(json.dumps(report.to_json(), indent=2) if options.json else str(report), options.json)
    return 0 if report.passed else 1


def _print(text: str, plain: bool) -> None:
    if not plain and sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        text = _WORDS.sub(lambda word: f"\033[{_COLOURS[word[0]]}m{word[0]}\033[0m", text)
    print(text)


if __name__ == "__main__":
    sys.exit(main())
