"""Run all subjects, each in its own process, and rewrite RESULTS.md when each one ends.

    python -m benchmarks
    python -m benchmarks --only gemm,linear --compile --plot /tmp/plots
    python -m benchmarks --from DIR

``--json`` keeps the numbers, one file a subject; ``--from`` rewrites RESULTS.md from such files and
measures nothing. Only the text between a subject's two comments in RESULTS.md is replaced: the text
written by hand around them stays. A subject that fails, or measures nothing, leaves its section
unchanged. The exit status is 1 if a subject failed or refused a row.

``fsdp``, ``tensor_parallel``, ``overlap`` and ``context_parallel`` are run by torchrun on all GPUs,
if there are two or more.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import common, report
from benchmarks.report import Subject

__all__ = ["SUBJECTS", "command", "main", "rewrite"]

SUBJECTS = (
    "gemm",
    "quantize",
    "permute",
    "linear",
    "grouped",
    "experts",
    "norm_linear",
    "mlp",
    "attention",
    "decode",
    "layer",
    "model",
    "overhead",
    "memory",
    "power",
    "accuracy",
    "advise",
    "fsdp",
    "tensor_parallel",
    "overlap",
    "context_parallel",
)
BY_RANKS = ("fsdp", "tensor_parallel", "overlap", "context_parallel")
"""The subjects that torchrun starts."""
RESULTS = common.ROOT / "benchmarks" / "RESULTS.md"


def subject(name: str) -> Subject:
    """Return the ``SUBJECT`` of a benchmark's module."""
    found: Subject = importlib.import_module(f"benchmarks.{name}").SUBJECT
    return found


def command(name: str, options: argparse.Namespace, json: Path, gpus: int) -> list[str]:
    """Return the command line that runs one subject."""
    words = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(json)]
    words += ["--seed", str(options.seed)]
    if options.commit:
        words += ["--commit", options.commit]
    if name in BY_RANKS:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
        return [words[0], *launcher, *words[1:]]
    if name != "accuracy":
        words += ["--compile"] * options.compile
        words += ["--samples", str(options.samples)]
        words += ["--plot", str(options.plot)] if options.plot else []
    return words


def rewrite(results: Path, name: str, json: Path) -> bool:
    """Put a subject's numbers into its section of RESULTS.md; return False if it has none."""
    if not json.exists():
        return False
    facts, rows = report.read_json(json)
    found = subject(name)
    text = (results if results.exists() else RESULTS).read_text()
    body = report.render(found, facts, rows)
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(report.replace_section(text, name, found.title, body))
    return True


def run(names: Sequence[str], options: argparse.Namespace, folder: Path) -> list[str]:
    """Measure the named subjects; return those that failed or refused a row."""
    gpus = torch.cuda.device_count()
    failed = []
    for name in names:
        json = folder / f"{name}.json"
        json.unlink(missing_ok=True)
        print(f"\n## {name}\n", flush=True)
        words = command(name, options, json, gpus)
        if subprocess.run(words, cwd=common.ROOT, check=False).returncode:
            failed.append(name)
        rewrite(options.results, name, json)
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subjects that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", help=f"of {','.join(SUBJECTS)}")
    parser.add_argument("--compile", action="store_true", help="compiled candidates, too")
    parser.add_argument("--samples", type=int, default=12, help="of each time (default: 12)")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    parser.add_argument("--json", type=Path, metavar="DIR", help="keep the numbers there")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="save plots there (matplotlib)")
    parser.add_argument("--from", type=Path, metavar="DIR", dest="source", help="measure nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    options = parser.parse_args(argv)
    for name in ("json", "plot", "results"):  # subjects run in another directory
        if (path := getattr(options, name)) is not None:
            setattr(options, name, path.resolve())
    names = options.only.split(",") if options.only else list(SUBJECTS)
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"--only must hold names of {', '.join(SUBJECTS)}; got {', '.join(unknown)}")
    if options.source is not None:
        for name in names:
            rewrite(options.results, name, options.source / f"{name}.json")
        return 0
    if torch.cuda.device_count() < 2 and not options.only:
        names = [name for name in names if name not in BY_RANKS]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.json or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        failed = run(names, options, folder)
    if failed:
        print(f"\nfailed, or refused a row: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
