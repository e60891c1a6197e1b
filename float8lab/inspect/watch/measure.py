"""Measure the cast of one operand: sums and extremes on its device, and a ``Record`` later.

A cast leaves few small tensors on its device, and nothing waits for them: those of a whole step are
stacked when it is over, and take one transfer. Padding does not count.
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
from float8lab.tensor.statistics import TensorStats

__all__ = ["Measurement", "measure_cast", "measure_stored", "numbers_of", "record_of"]

_SUMS = ("nonzero", "finite", "inf", "signal", "noise")
"""Sums over a cast, which follow the 256 counts of its bytes: how many elements of the source are
not zero, finite and not zero, and infinite; squares of the source and of the error."""


@dataclass
class Measurement:
    """The operand of one layer in one step."""

    spec: Float8Spec
    delayed: bool
    stored: bool
    elements: int
    casts: list[tuple[Tensor, Tensor]]
    """Of each cast of the operand the 256 counts and ``_SUMS``; and amax, scale_max, -scale_min."""

    def add(self, measurement: Measurement) -> None:
        """Add another cast of the same operand."""
        self.elements += measurement.elements
        self.casts += measurement.casts


def measure_cast(
    x: Tensor, q: Tensor, scale: Tensor, spec: Float8Spec, *, delayed: bool
) -> Measurement:
    """Measure the cast of ``x``, ``[M, K]`` in high precision.

    ``q`` has no padding; the decode scales broadcast over the blocks of ``spec``, and are
    ``delayed`` if they come from earlier steps.
    """
    numbers = _numbers_of_cast(x, q, scale, spec.block)
    return Measurement(spec, delayed, False, q.numel(), [numbers])


def _numbers_by_torch(
    x: Tensor, q: Tensor, scale: Tensor, block: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The numbers of a cast, as in ``Measurement.casts``: float64, on its device."""
    size = x.abs()
    inf = (size == math.inf).sum()  # isinf takes a kernel more
    size.nan_to_num_(0.0, 0.0)
    value = q.to(torch.promote_types(x.dtype, torch.float32))
    value *= expand_scale(scale, block, q.shape)
    value.sub_(x).nan_to_num_(0.0, 0.0, 0.0)
    # Norms sum in float64 without a copy in float64; that of order 0 counts what is not zero.
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    sums = [norm(x, 0), norm(size, 0), inf, norm(size).square(), norm(value).square()]
    lowest, highest = scale.aminmax()
    extremes = torch.stack([size.amax().double(), highest.double(), -lowest.double()])
    return torch.cat([_count_bytes(q).double(), torch.stack(sums)]), extremes


_numbers_of_cast = called_by_ops(_numbers_by_torch, cuda="measure:measure_cast")


def measure_stored(x: Float8Tensor, master: Tensor | None) -> Measurement:
    """Measure a tensor that is stored in FP8, against its master, or itself if that is unknown."""
    if master is None:
        master = x.qdata.float() * expand_scale(x.scale, x.spec.block, x.qdata.shape)
    measurement = measure_cast(master, x.qdata, x.scale, x.spec, delayed=False)
    measurement.stored = True
    return measurement


def _count_bytes(q: Tensor) -> Tensor:
    """How many elements have each byte: 256 counts."""
    data = q.view(torch.uint8).reshape(-1)
    if not data.is_cuda:
        return torch.bincount(data, minlength=256)
    edges = torch.arange(257, dtype=torch.int32, device=q.device)  # bincount waits for the GPU
    return torch.searchsorted(data.sort().values.int(), edges).diff()


def numbers_of(measurements: Sequence[Measurement]) -> list[list[list[float]]]:
    """The numbers of each cast of each measurement, by one transfer from each device."""
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
    """The record of one measurement, given the numbers of its casts on the host."""
    spec = measurement.spec
    totals = numbers[0] if len(numbers) == 1 else [*map(sum, zip(*numbers, strict=True))]
    sums = dict(zip(_SUMS, totals[256:], strict=False))
    nonzero, finite, inf = (round(sums[name]) for name in ("nonzero", "finite", "inf"))
    amaxes, scale_maxima, negated = zip(*(cast[-3:] for cast in numbers), strict=True)
    stats = TensorStats(
        shape=(measurement.elements,), dtype=torch.float32, spec=spec, amax=max(amaxes),
        scale_min=-max(negated), scale_max=max(scale_maxima), codes=tuple(map(int, totals[:256])),
    )  # fmt: skip
    # A scale per tensor holds up to this; under another one nothing lies beyond.
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
        sqnr=10 * math.log10(signal / noise) if signal and noise else None,
        staleness=math.log2(overshoot) if measurement.delayed and overshoot > 0 else None,
        elements=measurement.elements, stored=stored,
        exponents={e: n for e, n in stats.count_exponents().items() if n},
        fp8_dtype="e4m3" if spec.fp8_dtype == E4M3 else "e5m2",
    )  # fmt: skip
