"""Measure the cast of an operand: sums and extremes on its device first, and a ``Record`` later.

Each cast leaves a few small tensors on its device, and nothing waits for them. When a step is over,
the tensors of all casts are stacked and fetched in one transfer. Padding does not count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from float8lab.formats import E4M3, Float8Spec
from float8lab.inspect.watch.records import Record
from float8lab.ops.declare import called_by_ops
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import expand_scale
from float8lab.tensor.statistics import TensorStats, decibels

__all__ = ["Measurement", "measure_cast", "measure_stored", "numbers_of", "record_of"]

_SUMS = ("nonzero", "finite", "inf", "signal", "noise")
"""Sums over a cast, stored after the 256 counts of its bytes: the numbers of source elements that
are nonzero, finite and nonzero, and infinite; the sums of squares of the source and the error."""


@dataclass
class Measurement:
    """The operand of one layer in one step."""

    spec: Float8Spec
    delayed: bool
    stored: bool
    elements: int
    casts: list[tuple[Tensor, Tensor]]
    """For each cast: the 256 counts with ``_SUMS``, and ``[amax, scale_max, -scale_min]``."""

    def add(self, measurement: Measurement) -> None:
        """Add another cast of the same operand."""
        self.elements += measurement.elements
        self.casts += measurement.casts


def measure_cast(
    x: Tensor, q: Tensor, scale: Tensor, spec: Float8Spec, *, delayed: bool
) -> Measurement:
    """Measure the cast of ``x``, ``[M, K]`` in high precision.

    ``q`` has no padding; ``scale`` has a decode scale for each block of ``spec``. ``delayed`` says
    whether these scales come from earlier steps.
    """
    numbers = _numbers_of_cast(x, q, scale, spec.block)
    return Measurement(spec, delayed, False, q.numel(), [numbers])


def _numbers_by_torch(
    x: Tensor, q: Tensor, scale: Tensor, block: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Compute the numbers of a cast for ``Measurement.casts``, in float64 on its device."""
    size = x.abs()
    inf = (size == math.inf).sum()  # isinf takes one more kernel
    size.nan_to_num_(0.0, 0.0)
    value = q.to(torch.promote_types(x.dtype, torch.float32))
    value *= expand_scale(scale, block, q.shape)
    value.sub_(x).nan_to_num_(0.0, 0.0, 0.0)
    # A norm sums in float64 without a float64 copy; the norm of order 0 counts nonzero elements.
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    sums = [norm(x, 0), norm(size, 0), inf, norm(size).square(), norm(value).square()]
    lowest, highest = scale.aminmax()
    extremes = torch.stack([size.amax().double(), highest.double(), -lowest.double()])
    return torch.cat([_count_bytes(q).double(), torch.stack(sums)]), extremes


_numbers_of_cast = called_by_ops(_numbers_by_torch, cuda="measure:measure_cast")


def measure_stored(x: Float8Tensor, master: Tensor | None) -> Measurement:
    """Measure a tensor stored in FP8 against its master, or against itself without a master."""
    if master is None:
        master = x.qdata.float() * expand_scale(x.scale, x.spec.block, x.qdata.shape)
    measurement = measure_cast(master, x.qdata, x.scale, x.spec, delayed=False)
    measurement.stored = True
    return measurement


def _count_bytes(q: Tensor) -> Tensor:
    """Count how many elements have each byte value, as 256 counts."""
    data = q.view(torch.uint8).reshape(-1)
    if not data.is_cuda:
        return torch.bincount(data, minlength=256)
    edges = torch.arange(257, dtype=torch.int32, device=q.device)  # bincount waits for the GPU
    return torch.searchsorted(data.sort().values.int(), edges).diff()


def numbers_of(measurements: Sequence[Measurement]) -> list[list[list[float]]]:
    """Fetch the numbers of each cast of each measurement, by one transfer from each device."""
    rows: dict[int, list[float]] = {}
    casts = [cast for measurement in measurements for cast in measurement.casts]
    for device in {cast[0].device for cast in casts}:
        chosen = [i for i, cast in enumerate(casts) if cast[0].device == device]
        columns = [torch.stack(column) for column in zip(*(casts[i] for i in chosen), strict=True)]
        rows |= zip(chosen, torch.cat(columns, 1).tolist(), strict=True)
    in_order = iter([rows[i] for i in range(len(casts))])
    return [[next(in_order) for _ in measurement.casts] for measurement in measurements]


def record_of(
    measurement: Measurement, numbers: Sequence[Sequence[float]], *, step: int, layer: str,
    operand: str,
) -> Record:  # fmt: skip
    """Make the record of one measurement from the numbers of its casts on the host."""
    spec = measurement.spec
    totals = numbers[0] if len(numbers) == 1 else [*map(sum, zip(*numbers, strict=True))]
    sums = dict(zip(_SUMS, totals[256:], strict=False))
    nonzero, finite, inf = (round(sums[name]) for name in ("nonzero", "finite", "inf"))
    amaxes, scale_maxima, negated = zip(*(cast[-3:] for cast in numbers), strict=True)
    stats = TensorStats(
        shape=(measurement.elements,), dtype=torch.float32, spec=spec, amax=max(amaxes),
        scale_min=-max(negated), scale_max=max(scale_maxima), codes=tuple(map(int, totals[:256])),
    )  # fmt: skip
    # A per-tensor scale clips values beyond this; with block scales no value is beyond it.
    limits = [scale * spec.largest() for scale in scale_maxima]
    overshoot = max(
        (a / limit for a, limit in zip(amaxes, limits, strict=True) if limit), default=0.0
    )
    signal, noise, stored = sums["signal"], sums["noise"], measurement.stored
    flushed = max(0, stats.count("zero") + nonzero - measurement.elements)
    return Record(
        step=step, layer=layer, operand=operand, amax=stats.amax, scale_min=stats.scale_min,
        scale_max=stats.scale_max, saturated=stats.saturated, subnormal=stats.subnormal,
        flushed=flushed / measurement.elements,
        nan=stats.count("nan") if stored else nonzero - finite - inf,
        inf=stats.count("inf") if stored else inf,
        sqnr=decibels(signal, noise) if signal and noise else None,
        staleness=math.log2(overshoot) if measurement.delayed and overshoot > 0 else None,
        elements=measurement.elements, stored=stored,
        exponents={e: n for e, n in stats.count_exponents().items() if n},
        fp8_dtype="e4m3" if spec.fp8_dtype == E4M3 else "e5m2",
    )  # fmt: skip
