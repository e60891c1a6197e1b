"""``float8lab completion SHELL``: what a shell runs to complete the other commands."""

from __future__ import annotations

import argparse
from functools import partial

from float8lab.arguments import needs
from float8lab.commands.terminal import fail, program_name

__all__ = ["add_commands"]

_FILES = ("PATH", "A", "B", "LOG", "OUT")
"""Names of arguments that are files."""


def add_commands(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> None:
    """Add it to the subparsers of ``parser``; ``options.run(options)`` gives the exit status."""
    command = commands.add_parser(
        "completion",
        help="print what completes commands in bash, zsh or tcsh",
        description="Print a script that completes float8lab's commands, options and files. In "
        'bash: eval "$(float8lab completion bash)"',
        epilog="Exit status: 0; 2 without the extra completion.",
    )
    command.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    command.set_defaults(run=partial(_complete, parser))


def _complete(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        with needs("completion", "shtab", "completion"):
            import shtab
    except ModuleNotFoundError as error:
        return fail(f"{program_name()} completion", error)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                for argument in command._actions:
                    if argument.metavar in _FILES:
                        argument.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.prog = "float8lab"  # also where it was called as python -m float8lab
    print(shtab.complete(parser, options.shell))
    return 0
