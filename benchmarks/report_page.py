"""Measure how fast the HTML report of a large run opens in a browser.

    python -m benchmarks.report_page [--layers 200] [--steps 1000] [--runs 5]

This writes the report of a made-up run and opens it ``--runs`` times, each time in a new headless
Chromium. Times are seconds from the request: until the table is drawn, until the page can be used
(cards, table and heat map are drawn), and until all charts are drawn. Use an idle machine; no GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import float8lab
from benchmarks import browser, common

__all__ = ["Opening", "lines", "main", "measure"]

TARGET = 3.0
"""The seconds in which the page should be usable."""


class Opening(NamedTuple):
    """The times of one opening of the page, in seconds."""

    table: float
    usable: float
    complete: float


def measure(path: Path) -> Opening:
    """Open a report in a new browser and time it."""
    with browser.browser() as driver:
        usable, complete = browser.open_report(driver, path)
        table = float(driver.execute_script("return document.body.dataset.table")) / 1000
    return Opening(table, usable, complete)


def lines(timings: Sequence[Opening]) -> list[list[str]]:
    """Format a line for each opening, and a line of the medians."""
    rows = [[str(i), *(f"{seconds:.2f}" for seconds in each)] for i, each in enumerate(timings, 1)]
    medians = [f"{statistics.median(column):.2f}" for column in zip(*timings, strict=True)]
    return [*rows, ["median", *medians]]


def main(argv: Sequence[str] | None = None) -> list[Opening]:
    """Measure all openings and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report_page", description=__doc__)
    parser.add_argument("--layers", type=int, default=200, help="a multiple of 4")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(argv)
    if browser.missing():
        sys.exit(f"benchmarks.report_page {browser.missing()}")
    if options.layers % len(browser.KINDS):
        parser.error(f"--layers must be a multiple of {len(browser.KINDS)}; got {options.layers}")
    with tempfile.TemporaryDirectory() as folder:
        log = browser.sample(blocks=options.layers // len(browser.KINDS), steps=options.steps)
        began = time.perf_counter()
        path = float8lab.inspect.report(log, Path(folder) / "report.html")
        seconds, size = time.perf_counter() - began, path.stat().st_size / 1e6
        timings = [measure(path) for _ in range(options.runs)]
        with browser.browser() as driver:
            version = driver.capabilities["browserVersion"]
    print(f"{options.layers} layers, 3 operands, {options.steps} steps: {size:.1f} MB, written in "
          f"{seconds:.1f} s")  # fmt: skip
    print(f"Chromium {version}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n")
    print(common.table(["run", "table s", "usable s", "all charts s"], lines(timings)))
    usable = statistics.median(opening.usable for opening in timings)
    print(f"\nusable <= {TARGET:g} s: {'met' if usable <= TARGET else 'missed'}")
    return timings


if __name__ == "__main__":
    main()
