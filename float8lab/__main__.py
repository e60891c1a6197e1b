"""The command line ``float8lab COMMAND -h``: checks, checkpoints, runs and predicted steps."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import torch

from float8lab.commands import checkpoints, completion, runs, scale
from float8lab.commands.terminal import fail, present, program_name
from float8lab.inspect.environment import environment, package_version
from float8lab.inspect.selfcheck import selfcheck

__all__ = ["main"]

_DESCRIPTION = "FP8 on this machine and on many GPUs, in checkpoints and in training runs."


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 means success; 1 that a check failed, a
    checkpoint is suspicious or two checkpoints differ; 2 that a checkpoint cannot be read.

    Raises:
        SystemExit: with status 2 if the arguments are wrong or torch does not see the device.
    """
    parser = argparse.ArgumentParser(prog=program_name(), description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"float8lab {package_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    check = commands.add_parser("selfcheck", help="check every op on this machine")
    check.add_argument("--verbose", action="store_true", help="what each op is compared with")
    env = commands.add_parser("env", help="versions, GPUs, and what is native, and why not")
    for command in (check, env):
        command.add_argument("--json", action="store_true", help="for programs")
        command.add_argument(
            "--device", choices=("cpu", "cuda"), help="by default cuda, or cpu without a GPU"
        )
        command.set_defaults(run=present, all=True)
    check.set_defaults(
        make=lambda options: selfcheck(options.device, options.verbose),
        is_bad=lambda _, report: not report.passed,
    )
    env.set_defaults(make=lambda options: environment(options.device))
    checkpoints.add_commands(commands)
    runs.add_commands(commands)
    scale.add_commands(commands)
    completion.add_commands(commands, parser)
    options = parser.parse_args(arguments)
    if getattr(options, "device", None) == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU; leave --device out or pass cpu")
    return _until_closed(options)


def _until_closed(options: argparse.Namespace) -> int:
    """Run a command and return its exit status: that of a signal if the command was interrupted or
    nothing reads its output, and 2 if its output cannot be written."""
    program = f"{program_name()} {options.command}"
    if sys.stdout is None:
        return fail(program, "standard output must be open; it is closed.")
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape names that the terminal cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:  # an optional package is missing
        return fail(program, error)
    except OSError as error:  # standard output raised it: commands catch errors of checkpoints
        # Buffered output is discarded, since Python would complain about it on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 141
        return fail(program, f"{error.filename or 'standard output'}: {error.strerror}")
    return status


if __name__ == "__main__":
    sys.exit(main())
