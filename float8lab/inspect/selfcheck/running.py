"""Run all checks; for a GPU, run them in several programs at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from float8lab.inspect.environment import why_casts_are_missing
from float8lab.inspect.selfcheck import (
    attention,
    casts,
    experts,
    gemms,
    grouped,
    loss,
    norms,
    prologues,
)
from float8lab.inspect.selfcheck.harness import Cases, Check, Report, Row

__all__ = ["CHECKS", "run_checks", "selfcheck"]

CHECKS = tuple(
    value
    for module in (casts, attention, norms, gemms, grouped, prologues, experts, loss)
    for value in vars(module).values()
    if isinstance(value, Check)
)
"""All checks, in the order of the report."""

_LONG = ("scaled_mm", "cast_many", "cast_of", "quantize_of", "quantize_pair", "scaled_bmm",
         "value_of", "cast")  # fmt: skip
"""The checks with the most kernels to compile."""


def selfcheck(device: torch.device | str | None = None, verbose: bool = False) -> Report:
    """Check every op and GEMM path on this machine, in less than a minute.

    Args:
        device: ``"cpu"`` or a CUDA device; by default the current GPU, or the CPU without one.
        verbose: the printed report has the reference of every op, and all failures.

    Returns:
        A report to ``print``, with ``.passed`` and ``.rows``. A failure is a row, not an exception.
        Ops that the device lacks are ``"unsupported"`` or ``"emulated"`` with a reason, not failed.

    Raises:
        RuntimeError: torch does not see the device.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(
            f"device must be one that torch sees; got {device}, and torch sees no CUDA GPU. "
            "Pass device='cpu', or see `python -m float8lab env`."
        )
    is_cuda, programs = device.type == "cuda", min(_MOST_PROGRAMS, os.cpu_count() or 1)
    shown = f"{device} ({torch.cuda.get_device_name(device)})" if is_cuda else str(device)
    if is_cuda and programs > 1:
        results = _run_in_programs(device, programs)
    else:
        results = run_checks(device, [check.name for check in CHECKS])
    rows = [row for check in CHECKS for row in results[check.name][0]]
    return Report(shown, rows, {name: results[name][1] for name in results}, verbose)


def run_checks(device: torch.device, names: Sequence[str]) -> dict[str, tuple[list[Row], float]]:
    """Run the named checks; return their rows and seconds by name."""
    results = {}
    on_device = torch.cuda.device(device if device.type == "cuda" else -1)  # -1 changes nothing
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with small matrices, waiting threads take up to 10 times as long
    try:
        with on_device, torch.no_grad(), torch.autocast(device.type, enabled=False):
            for check in CHECKS:
                if check.name in names:
                    start = time.perf_counter()
                    rows = _rows_of(check, device)
                    results[check.name] = rows, round(time.perf_counter() - start, 3)
    finally:
        torch.set_num_threads(threads)
    return results


_MOST_PROGRAMS = 8
_CODE = """
import json, sys
paths, device, *names = json.loads(sys.argv[1])
sys.path[:] = paths
import dataclasses, torch
from float8lab.inspect.selfcheck.running import run_checks
for name in names:
    rows, seconds = run_checks(torch.device(device), [name])[name]
    print(json.dumps([name, [dataclasses.asdict(row) for row in rows], seconds]))
"""


def _run_in_programs(device: torch.device, programs: int) -> dict[str, tuple[list[Row], float]]:
    """Run all checks in several programs at once, since nearly all time goes to compilation.

    Threads would not help, since Triton compiles under Python's lock, and a pool of processes would
    rerun the caller's script.
    """
    # The longest checks come first, and are distributed over the programs in turn.
    names = sorted((check.name for check in CHECKS), key=lambda name: name not in _LONG)
    name_lists = [names[i::programs] for i in range(programs)]
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())

    def run(share: Sequence[str]) -> Iterable[tuple[str, tuple[list[Row], float]]]:
        command = [sys.executable, "-c", _CODE, json.dumps([sys.path, str(device), *share])]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        results = {}
        for line in done.stdout.splitlines():
            if line.startswith("["):
                name, rows, seconds = json.loads(line)
                results[name] = [Row(**row) for row in rows], seconds
        last = " ".join(done.stderr.split()[-60:])
        for name in share:
            if name not in results:  # the program died, for example by a signal
                problem = f"the program that ran it ended with status {done.returncode}: {last}"
                check = next(check for check in CHECKS if check.name == name)
                row = Row(check.group, name, check.against, "failed", 0, None, "", [problem])
                results[name] = [row], 0.0
        return results.items()

    with ThreadPoolExecutor(programs) as pool:
        return {name: result for results in pool.map(run, name_lists) for name, result in results}


def _rows_of(check: Check, device: torch.device) -> list[Row]:
    cases, lacking = Cases(device), ""
    try:
        check.run(cases)
    except Exception as error:  # any error is reported, and the other checks still run
        lacking = why_casts_are_missing(device)
        cases.fail(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
    rows = []
    for why, tally in cases.tallies.items():
        status = "failed" if tally.failures else "emulated" if why else "passed"
        if tally.failures and lacking:
            status, why = "unsupported", lacking
        result = status, tally.cases, tally.worst, why, tally.failures
        rows.append(Row(check.group, check.name, check.against, *result))
    return rows
