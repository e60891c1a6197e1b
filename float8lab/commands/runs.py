"""Define ``float8lab report`` and ``float8lab compare`` for logs of watched training runs."""

from __future__ import annotations

import argparse

from float8lab.commands.terminal import add_output_options
from float8lab.inspect.report import report
from float8lab.inspect.watch.findings import Diagnosis, diagnose
from float8lab.inspect.watch.records import Log
from float8lab.inspect.watch.runs import RunComparison, compare

__all__ = ["add_commands"]

_LOG = "a log that float8lab.inspect.watch(model, jsonl=...) wrote"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add both commands to the subparsers; ``options.run(options)`` returns the exit status."""
    single = commands.add_parser(
        "report",
        help="say whether FP8 is healthy in a training run",
        description="Say whether FP8 is healthy in a watched training run; if not, where, and what "
        "to do.",
        epilog="Exit status: 0; with --strict 1 if something was found; 2 if LOG cannot be read.",
    )
    single.add_argument("log", metavar="LOG", help=_LOG)
    single.add_argument("--strict", action="store_true", help="exit with 1 if something was found")
    single.set_defaults(make=_report, is_bad=lambda o, result: o.strict and not result.is_healthy)
    pair = commands.add_parser(
        "compare",
        help="compare two training runs",
        description="Compare two watched training runs: their losses, and each operand of each "
        "layer.",
        epilog="Exit status: 0; 2 if a log cannot be read.",
    )
    pair.add_argument("a", metavar="A", help=_LOG)
    pair.add_argument("b", metavar="B", help="another one")
    pair.set_defaults(make=_compare)
    for command, page in ((single, "the report page"), (pair, "the report page of B beside A")):
        command.add_argument("--html", metavar="OUT", help=f"also write {page} to OUT")
        add_output_options(command, limit=20)


def _report(options: argparse.Namespace) -> Diagnosis:
    log = Log.from_jsonl(options.log)
    if options.html is not None:
        report(log, options.html)
    return diagnose(log)


def _compare(options: argparse.Namespace) -> RunComparison:
    a, b = (Log.from_jsonl(path) for path in (options.a, options.b))
    names = options.a, options.b
    if options.html is not None:
        report(b, options.html, baseline=a, names=names)
    return compare(a, b, names=names)
