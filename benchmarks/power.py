"""Measure joules of forward and backward of a Llama-3-8B layer, in bfloat16 and by recipe.

    python -m benchmarks.power [--batch 4] [--sequence 4096] [--seconds 5] [--rounds 3]

This needs a CUDA GPU. The baseline is plain bfloat16 under ``torch.compile``. ``converted`` is the
same layer after ``convert_to_float8``, also compiled, and ``TransformerLayer`` is ours. Candidates
with wrong results get no numbers (see ``benchmarks.layer``). All others take turns: each repeats
its step for a second, until clocks and power are steady, and for ``--seconds`` more. Joules are
those of the board, from NVML's energy counter, which is read when its value changes.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks import common, report
from benchmarks.layer import OURS, PLAIN, add_sizes, make_trial
from benchmarks.models import LLAMA, Candidate, LayerSize, converted, our_layer, plain_layer
from benchmarks.recipes import RECIPES
from benchmarks.report import Column, Row, Setting, Subject

__all__ = ["SUBJECT", "energy_in_turns", "main", "open_counter", "rows"]

Counter = Callable[[], float]
"""Returns the joules that a GPU has used since a fixed moment; the value changes in ticks."""
GROUP = 4
"""The number of steps between two readings of the counter."""
SETTLING = 1.0
"""The seconds in which a candidate's clocks and power become steady."""
LONGEST_TICK = 10.0
"""The seconds after which a counter that has not changed counts as broken."""
JOULES, MILLIJOULES, RATIO = "J a step", "mJ a token", "J / bf16"


def nvml_counter(uuid: str) -> Counter:
    """Return NVML's counter of a GPU's energy; raise OSError if NVML or the counter is missing."""
    library, handle = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        if status := getattr(library, name)(*arguments):
            raise OSError(f"{name} returned {status}")

    def joules() -> float:
        millijoules = ctypes.c_ulonglong()
        call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    call("nvmlInit_v2")
    call("nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(handle))
    joules()
    return joules


def open_counter() -> Counter:
    """Return the energy counter of torch's GPU; exit the program if there is none."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        return nvml_counter(str(device.uuid))
    except OSError as error:
        sys.exit(
            "benchmarks.power needs NVML's energy counter: libnvidia-ml.so.1, which comes with the "
            f"driver, and a GPU of compute capability 7.0 or later; got: {error}."
        )


class Reading(NamedTuple):
    """The time, the counter and the number of steps at a tick, or between two ticks."""

    seconds: float
    joules: float
    steps: int


def _measure(step: Callable[[], object], counter: Counter, seconds: float) -> Reading:
    """Measure steady steps: return the seconds, joules and steps between two ticks."""
    gpu = torch.cuda.is_available()
    began, steps, value = time.perf_counter(), 0, counter()
    first: Reading | None = None
    while True:
        for _ in range(GROUP):
            step()
        if gpu:
            torch.cuda.synchronize()
        steps, now, previous, value = steps + GROUP, time.perf_counter(), value, counter()
        if now - began > SETTLING + seconds + LONGEST_TICK:
            raise RuntimeError(
                f"the energy counter must move within {LONGEST_TICK:g} s; it stands at {value} J. "
                "See whether nvidia-smi reads this GPU's power."
            )
        if value == previous:
            continue
        if first is None:
            first = Reading(now, value, steps) if now - began >= SETTLING else None
        elif now - first.seconds >= seconds:
            return Reading(now - first.seconds, value - first.joules, steps - first.steps)


def energy_in_turns(
    steps: Mapping[str, Callable[[], object]], *, counter: Counter, seconds: float, rounds: int
) -> dict[str, common.Sustained]:
    """Measure ms of a step, once each round, and watts; the candidates take turns."""
    readings_by_name: dict[str, list[Reading]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            readings_by_name[name].append(_measure(step, counter, seconds))
    results = {}
    for name, readings in readings_by_name.items():
        timing = common.Timing(tuple(1e3 * r.seconds / r.steps for r in readings))
        watts = statistics.median(r.joules / r.seconds for r in readings)
        results[name] = common.Sustained(timing, None, watts)
    return results


def candidates(setting: Setting, plain: Any, size: LayerSize) -> Iterator[Candidate]:
    """Iterate over the baseline and, by recipe, the converted plain layer and our layer."""
    same, name = partial(copy.deepcopy, plain), "plain bfloat16, compile"
    yield Candidate(name, same, PLAIN, baseline=True, compiled=True)
    for name in setting.recipes:
        recipe = RECIPES[name]()
        same = partial(converted, plain, recipe, strict=True)
        yield Candidate(f"converted, {name}, compile", same, PLAIN, compiled=True)
        ours = partial(our_layer, plain, size, recipe)
        yield Candidate(f"TransformerLayer, {name}, eager", ours, OURS)


def rows(
    setting: Setting, size: LayerSize, counter: Counter, *, seconds: float = 5.0, rounds: int = 3
) -> Iterator[Row]:
    """Measure all candidates on one size."""
    plain = plain_layer(size, setting.device, setting.seed)
    trial = make_trial(setting, size, plain, lambda recipe: None)
    in_turns = copy.copy(setting)
    in_turns.sustained = partial(energy_in_turns, counter=counter, seconds=seconds, rounds=rounds)
    for row in trial.rows(in_turns, candidates(setting, plain, size)):
        if row.refusal is None:
            joules = row.values["W"] * row.values["sustained ms"] / 1e3
            energy = {JOULES: joules, MILLIJOULES: 1e3 * joules / size.tokens}
            row = replace(row, values=row.values | energy)
        yield row


def _ratio(row: Row, base: Row | None) -> str | None:
    joules = row.values.get(JOULES)
    return f"{joules / base.values[JOULES]:.2f}" if joules and base is not None else None


def _options(parser: argparse.ArgumentParser) -> None:
    add_sizes(parser)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn (default: 5)")
    parser.add_argument("--rounds", type=int, default=3, help="of turns (default: 3)")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    size = LLAMA._replace(batch=options.batch, sequence=options.sequence)
    return rows(setting, size, open_counter(), seconds=options.seconds, rounds=options.rounds)


SUBJECT = Subject(
    "power",
    "Energy of a transformer layer",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dWo", "dWdown"),
        Column("sustained ms", 3),
        Column("x bf16, sustained"),
        Column("W", 0),
        Column(JOULES),
        Column(MILLIJOULES, 3),
        Column(RATIO, cell=_ratio),
    ),
    _rows,
    _options,
    plotted=JOULES,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
