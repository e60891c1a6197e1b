"""``float8lab completion SHELL`` prints what a shell runs to complete the other commands."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from itertools import chain

from float8lab.arguments import needs

__all__ = ["add_commands"]

_FILES = ("PATH", "A", "B", "LOG", "OUT")  # the metavars of arguments that are files


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> None:
    """Add the command to the subparsers; ``options.run(options)`` returns the exit status."""
    command = commands.add_parser(
        "completion",
        help="print what completes commands in bash, zsh or tcsh",
        description='Complete commands, options and files: eval "$(float8lab completion bash)"',
        epilog="Exit status: 0; 2 without the extra completion.",
    )
    command.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    command.set_defaults(run=lambda options: _complete(parser, commands.choices, options.shell))


def _complete(
    parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser], shell: str
) -> int:
    with needs("completion", "shtab", "completion"):
        import shtab
    for argument in chain.from_iterable(command._actions for command in commands.values()):
        if argument.metavar in _FILES:
            vars(argument)["complete"] = shtab.FILE
    parser.prog = "float8lab"  # even if the program was called as python -m float8lab
    print(shtab.complete(parser, shell))
    return 0
