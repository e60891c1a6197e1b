"""Measure the cast of one operand: count on its device, and make a ``Record`` later.

A ``Measurement`` is two float64 vectors on the operand's device, one of sums and one of maxima, so
that measurements add up without the host, and those of a whole step take one transfer. Padding does
not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from float8lab.formats import E4M3, Float8Spec
from float8lab.inspect.watch.records import Record
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import expand_scale
from float8lab.tensor.statistics import Errors, TensorStats

__all__ = ["Measurement", "measure_cast", "measure_stored", "numbers_of", "record_of"]

_SUMS = ("flushed", "nan", "inf", "signal", "noise")  # after 256 counts, one for each code
_MAXIMA = ("amax", "scale_max", "minus_scale_min", "overshoot")
WIDTH = 256 + len(_SUMS) + len(_MAXIMA)


@dataclass
class Measurement:
    """The sums and maxima of one operand of one layer in one step, over all its casts."""

    spec: Float8Spec
    delayed: bool
    stored: bool
    elements: int
    sums: Tensor
    maxima: Tensor

    def add(self, measurement: Measurement) -> None:
        """Add another cast of the same operand."""
        self.elements += measurement.elements
        self.sums += measurement.sums
        self.maxima = torch.maximum(self.maxima, measurement.maxima)


def measure_cast(
    x: Tensor, q: Tensor, scale: Tensor, spec: Float8Spec, *, delayed: bool
) -> Measurement:
    """Measure the cast of ``x``, ``[M, K]`` in high precision.

    ``q`` has no padding; the decode scales broadcast over the blocks of ``spec``, and are
    ``delayed`` if they come from earlier steps.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    size = wide.abs()
    amax = size.masked_fill(~size.isfinite(), 0.0).amax()
    errors = Errors.of(q, scale, spec, wide)
    counts = torch.stack([errors.flushed.sum(), wide.isnan().sum(), wide.isinf().sum()])
    # Norms sum in float64 without a copy in float64.
    norms = torch.stack(
        [torch.linalg.vector_norm(v, dtype=torch.float64) for v in (errors.source, errors.error)]
    )
    # A scale per tensor holds up to this; under another one nothing lies beyond.
    highest = scale.max().double()
    overshoot = amax / (highest * spec.largest())
    sums = torch.cat([_count_codes(q), counts.double(), norms.square()])
    maxima = torch.stack([amax.double(), highest, -scale.min().double(), overshoot])
    return Measurement(spec, delayed, False, q.numel(), sums, maxima)


def measure_stored(x: Float8Tensor, master: Tensor | None) -> Measurement:
    """Measure a tensor that is stored in FP8, against its master if that is known.
    Without a master only FP8 data, amax and scales are measured, since the source of the tensor is
    unknown."""
    if master is not None:
        measurement = measure_cast(master, x.qdata, x.scale, x.spec, delayed=False)
        measurement.stored = True
        return measurement
    nothing = x.qdata.new_zeros(len(_SUMS), dtype=torch.float64)
    size = (x.qdata.float() * expand_scale(x.scale, x.spec.block, x.qdata.shape)).abs()
    amax = size.masked_fill(~size.isfinite(), 0.0).amax()
    maxima = torch.stack([amax, x.scale.max(), -x.scale.min(), torch.zeros_like(amax)]).double()
    sums = torch.cat([_count_codes(x.qdata), nothing])
    return Measurement(x.spec, False, True, x.numel(), sums, maxima)


def _count_codes(q: Tensor) -> Tensor:
    """How many elements have each code, 256 counts in float64: exact up to 2**53."""
    data = q.view(torch.uint8).reshape(-1)
    if not data.is_cuda:
        return torch.bincount(data, minlength=256).double()
    # bincount waits for the GPU, and adds atomically in no fixed order; this does neither.
    edges = torch.arange(257, dtype=torch.int32, device=q.device)
    upper_bounds = torch.searchsorted(data.sort().values.int(), edges)
    return upper_bounds.diff().double()


def numbers_of(measurements: list[Measurement]) -> list[list[float]]:
    """``WIDTH`` numbers for each measurement, by one transfer from each device."""
    numbers: list[list[float]] = [[]] * len(measurements)
    by_device: dict[torch.device, list[int]] = {}
    for i, measurement in enumerate(measurements):
        by_device.setdefault(measurement.sums.device, []).append(i)
    for indices in by_device.values():
        rows = [torch.cat([measurements[i].sums, measurements[i].maxima]) for i in indices]
        for i, row in zip(indices, torch.stack(rows).tolist(), strict=True):
            numbers[i] = row
    return numbers


def record_of(
    measurement: Measurement, numbers: list[float], *, step: int, layer: str, operand: str
) -> Record:
    """The record of one measurement, given its numbers on the host."""
    assert len(numbers) == WIDTH, "as numbers_of gives them"
    counts = tuple(map(round, numbers[:256]))
    sums = dict(zip(_SUMS, numbers[256:], strict=False))
    maxima = dict(zip(_MAXIMA, numbers[-len(_MAXIMA) :], strict=True))
    scale_min, scale_max = -maxima["minus_scale_min"], maxima["scale_max"]
    stats = TensorStats(
        shape=(measurement.elements,),
        dtype=torch.float32,
        spec=measurement.spec,
        amax=maxima["amax"],
        scale_min=scale_min,
        scale_max=scale_max,
        codes=counts,
    )
    exponents = stats.histogram("exponent")
    return Record(
        step=step,
        layer=layer,
        operand=operand,
        amax=maxima["amax"],
        scale_min=scale_min,
        scale_max=scale_max,
        saturated=stats.saturated,
        flushed=sums["flushed"] / measurement.elements,
        subnormal=stats.subnormal,
        nan=stats.count("nan") if measurement.stored else round(sums["nan"]),
        inf=stats.count("inf") if measurement.stored else round(sums["inf"]),
        sqnr=10 * math.log10(sums["signal"] / sums["noise"]) if sums["noise"] else None,
        staleness=math.log2(maxima["overshoot"])
        if measurement.delayed and maxima["overshoot"]
        else None,
        elements=measurement.elements,
        exponents={
            e: n
            for e, n in zip(exponents.values.tolist(), exponents.counts.tolist(), strict=True)
            if n
        },
        stored=measurement.stored,
        fp8_dtype="e4m3" if measurement.spec.fp8_dtype == E4M3 else "e5m2",
    )
