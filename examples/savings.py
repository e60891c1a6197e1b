"""What FP8 saved in time and memory against bfloat16, for the other examples to print.

A ``Meter`` times steps, and on CUDA reads the peak of memory; ``counted`` counts bytes on any
device; ``savings`` compares two runs in a table. On a CPU FP8 is emulated: stored tensors have
FP8's sizes, but computations take longer than without FP8.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from float8lab.inspect import memory_report
from float8lab.inspect.text import bytes_text
from float8lab.tables import aligned

__all__ = ["Cost", "Meter", "counted", "savings"]

EMULATED = (
    "On a CPU, FP8 is emulated and bfloat16 often slow: the sizes are a GPU's, the times are not."
)


@dataclass(frozen=True)
class Cost:
    """The time and memory of a run."""

    seconds: float
    """The time of one step, or of another unit of work, which ``savings`` names by ``unit``."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each kind of tensor, in the order of printing."""


class Meter:
    """Seconds of each step, and on CUDA the peak of memory since the meter was made.

    >>> meter = Meter(torch.device("cpu"))
    >>> for _ in range(4):
    ...     with meter:
    ...         _ = torch.ones(8) + 1
    >>> len(meter.seconds), meter.cost({"weights": 64}).sizes
    (4, {'weights': 64})
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.seconds: list[float] = []
        if self.device.type == "cuda":
            gc.collect()  # frees what earlier runs left
            torch.cuda.init()  # a job may create its meter before its first tensor
            torch.cuda.reset_peak_memory_stats(self.device)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def __enter__(self) -> Meter:
        self._began = self._now()
        return self

    def __exit__(self, *exception_info: object) -> None:
        self.seconds.append(self._now() - self._began)

    def cost(self, sizes: Mapping[str, int] | None = None) -> Cost:
        """The median step after the first quarter, which warms up; ``sizes``, and the peak."""
        timed = self.seconds[len(self.seconds) // 4 :]
        return Cost(statistics.median(timed), {**(sizes or {}), **self.peak()})

    def peak(self) -> dict[str, int]:
        """The bytes under the name with which they are printed; empty on a CPU."""
        if self.device.type != "cuda":
            return {}
        return {"peak of GPU memory": torch.cuda.max_memory_allocated(self.device)}


def counted(
    model: nn.Module,
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    autocast: bool = False,
) -> dict[str, int]:
    """Count the bytes that training holds, from the tensors themselves; the same on any device.

    Args:
        model: in the state in which it trains; it is left unchanged.
        batch: the input of the model: a tensor, or a tuple or dict of arguments.
        optimizer: its state counts too.
        autocast: run under ``torch.autocast`` in bfloat16, as in training on a GPU.
    """
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=autocast):
        report = memory_report(model, batch, optimizer=optimizer)
    sizes = {"weights": report.sum("weights") + report.sum("scales")}
    if optimizer is not None:
        sizes["optimizer"] = report.sum("optimizer") + report.sum("masters")
    return {**sizes, "saved for backward": report.sum("activations")}


def _duration(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _ratio_and_saving(base: float, fp8: float) -> tuple[str, str]:
    return (f"{fp8 / base:.2f}", f"{100 * (1 - fp8 / base):.0f} %") if base else ("-", "-")


def savings(
    base: Cost,
    fp8: Cost,
    device: torch.device | str,
    *,
    names: tuple[str, str] = ("bf16", "FP8"),
    unit: str = "step",
    on_cpu: str = EMULATED,
) -> str:
    """A table of two runs and of what the second saves; on a CPU it saves bytes, but no time.

    Args:
        base: the run in high precision.
        fp8: the run in FP8; it has the same sizes.
        device: where both ran.
        names: the names of the runs.
        unit: the unit of work that the seconds are for.
        on_cpu: the remark below the table of a CPU.

    >>> print(savings(Cost(0.2, {"weights": 2000}), Cost(0.15, {"weights": 1040}), "cuda"))
                     bf16       FP8  FP8 / bf16  saved
    time a step  200.0 ms  150.0 ms        0.75   25 %
    weights        2.0 kB    1.0 kB        0.52   48 %
    """
    if list(base.sizes) != list(fp8.sizes):
        raise ValueError(f"fp8 must have the sizes {list(base.sizes)}; got {list(fp8.sizes)}.")
    rows: list[tuple[str, ...]] = [("", *names, f"{names[1]} / {names[0]}", "saved")]
    times = (base.seconds, fp8.seconds)
    is_cpu = torch.device(device).type == "cpu"
    ratio = ("-", "-") if is_cpu else _ratio_and_saving(*times)
    rows.append((f"time a {unit}", *map(_duration, times), *ratio))
    for name, base_size in base.sizes.items():
        sizes = (base_size, fp8.sizes[name])
        rows.append((name, *map(bytes_text, sizes), *_ratio_and_saving(*sizes)))
    lines = aligned(rows)
    if is_cpu:
        lines.append(on_cpu)
    return "\n".join(lines)
