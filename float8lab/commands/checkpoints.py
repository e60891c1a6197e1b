"""Define the commands ``python -m float8lab inspect`` and ``python -m float8lab diff``."""

from __future__ import annotations

import argparse

from float8lab.checkpoints.replacing import write_text
from float8lab.commands.terminal import add_output_options, progress_bar
from float8lab.inspect.checkpoint.difference import CheckpointDiff, diff
from float8lab.inspect.checkpoint.page import page
from float8lab.inspect.checkpoint.report import CheckpointReport, checkpoint

__all__ = ["add_commands"]

_KINDS = (
    "a safetensors file, its index or a directory of them; a file by torch.save; a directory by "
    "torch.distributed.checkpoint, or one of Megatron-LM, whose ranks' parts are joined. Nothing "
    "in it is run, and it may be larger than memory"
)
_LAYER = (
    "only tensors or modules of this name, as 'model.layers.0' or '*.mlp.*'; may be given "
    "repeatedly"
)
_INSPECT = f"""\
What a checkpoint holds, the suspicious tensors first: NaN, zero scales, missing and orphaned
scales, saturated blocks. PATH is {_KINDS}."""
_DIFF = f"""\
Compare two checkpoints tensor by tensor, the worst first; weights in FP8 or 4 bits are taken with
their scales, so that one may be the bfloat16 source of the other. A and B are each {_KINDS}."""


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to the subparsers; ``options.run(options)`` returns the exit status."""
    look = commands.add_parser(
        "inspect",
        help="what a checkpoint holds, suspicious tensors first",
        description=_INSPECT,
        epilog="Exit status: 0; with --strict 1 if a tensor is suspicious; 2 if PATH cannot be "
        "read, or for wrong arguments.",
    )
    look.add_argument("path", metavar="PATH", help="file or directory")
    look.add_argument("--html", metavar="OUT", help="also write one self-contained page to OUT")
    look.add_argument("--strict", action="store_true", help="exit with 1 if one is suspicious")
    look.set_defaults(make=_inspect, is_bad=lambda o, report: o.strict and report.suspicious)
    compare = commands.add_parser(
        "diff",
        help="compare two checkpoints, or one and its source",
        description=_DIFF,
        epilog="Exit status: 0 if all tensors have equal values, in the same format or in another; "
        "1 if not; 2 if one cannot be read, or for wrong arguments.",
    )
    compare.add_argument("a", metavar="A", help="file or directory")
    compare.add_argument("b", metavar="B", help="file or directory")
    compare.set_defaults(make=_diff, is_bad=lambda _, difference: not difference.equal)
    for command in (look, compare):
        command.add_argument("--layer", metavar="GLOB", action="append", default=[], help=_LAYER)
        add_output_options(command, limit=20)


def _inspect(options: argparse.Namespace) -> CheckpointReport:
    with progress_bar("reading") as progress:
        report = checkpoint(options.path, layer=options.layer, progress=progress)
    if options.html is not None:
        write_text(options.html, page(report))
    return report


def _diff(options: argparse.Namespace) -> CheckpointDiff:
    with progress_bar("comparing") as progress:
        return diff(options.a, options.b, layer=options.layer, progress=progress)
