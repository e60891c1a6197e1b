"""Measure the tensors of a checkpoint, which are read box by box.

At most ``BOX`` elements of a tensor are in memory at once, at about thirty bytes each. If a block
is larger than a box, three numbers for each block of the tensor are in memory, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from float8lab.checkpoints.item import Finding, Item, blocks_of_box
from float8lab.checkpoints.source import Box, boxes
from float8lab.formats import E2M1, E4M3, E5M2, Spec, scale_shape
from float8lab.tensor.blocks import by_block
from float8lab.tensor.statistics import TensorStats, code_values

__all__ = ["Measured", "PlainStats", "ScaleStats", "measure"]

DEVIATIONS = 5
"""Standard deviations above the expected number from which a block counts as saturated. Values
beyond the range of a block pile up at its largest code. With the right scale, that code stands for
half the range of the code below. So, unless the density rises, at most a third of the elements with
these two bit patterns is at the largest code. A block is saturated if more than twice as many
elements have the largest code as have the code below, and if their number is at least this many
standard deviations above that third."""
IDLE = 1 / 16
"""A block counts as idle if its largest code is below this share of the format's largest."""


@dataclass(frozen=True)
class PlainStats:
    """Statistics of a tensor that is not quantized; a complex tensor counts by absolute value."""

    numel: int
    amax: float
    """Largest absolute value of the finite elements; 0 if there are none."""
    rms: float
    """Root mean square of the finite elements."""
    zero_count: int
    nan_count: int
    inf_count: int
    negative_count: int


@dataclass(frozen=True)
class ScaleStats:
    """The scales of a quantized weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    count: int
    zero_count: int
    bad_count: int
    """The number of scales that are NaN, infinite or negative."""


@dataclass(frozen=True)
class Measured:
    """The result of ``measure`` for one tensor."""

    stats: TensorStats | None = None
    """Statistics of the FP8 data of a quantized weight; None for any other tensor."""
    scale: ScaleStats | None = None
    plain: PlainStats | None = None
    blocks: int = 0
    saturated_blocks: int = 0
    idle_blocks: int = 0
    findings: tuple[Finding, ...] = ()


Step = Callable[[int], None]
"""A function that is called with the number of bytes that were just read."""


def measure(item: Item, step: Step) -> Measured:
    """Measure a tensor and its scales, reading each box of it once."""
    if item.quantized:
        return _measure_weight(item, step)
    if item.entry.dtype is None:
        step(item.entry.nbytes)
        return Measured()
    return _measure_plain(item, step)


class _Blocks:
    """Counts over the blocks of a tensor; a block is added when all of it has been read."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.top = {E4M3: 0x7E, E5M2: 0x7B, E2M1: 0x07}[spec.fp8_dtype]
        self.sizes = code_values(spec.fp8_dtype).abs()
        self.blocks = self.saturated = self.idle = 0
        self.zero_scales = self.zero_lost = self.bad = 0
        self.amax = 0.0
        self.pow2 = True
        self.low, self.high = math.inf, -math.inf

    def add(self, largest: Tensor, top: Tensor, below: Tensor, scale: Tensor) -> None:
        """Add blocks to the counts; each argument has one element for each block.

        ``largest`` is the code of a block's largest finite magnitude. ``top`` counts the elements
        that have the format's largest code, and ``below`` those that have the code below it.
        """
        self.blocks += largest.numel()
        # Of n elements with the two codes, n / 3 are expected at the top; the variance is 2 n / 9.
        beyond = 2 * top - below > DEVIATIONS * (2.0 * (top + below)).sqrt()
        self.saturated += int((beyond & (top > 2 * below)).sum())
        size = self.sizes[largest.long()]
        # Subnormal scales and scales rounded to powers of two lose range, too, but less than this.
        self.idle += int(((size > 0) & (size < IDLE * self.spec.largest())).sum())
        zero, bad = scale == 0, ~scale.isfinite() | (scale < 0)
        self.zero_scales += int(zero.sum())
        self.zero_lost += int((zero & (size > 0)).sum())
        self.bad += int(bad.sum())
        good = scale[~bad]
        if good.numel():
            self.low = min(self.low, float(good.min()))
            self.high = max(self.high, float(good.max()))
            self.amax = max(self.amax, float((size * scale)[~bad].max()))
            self.pow2 = self.pow2 and bool(((good.view(torch.int32) & 0x7FFFFF) == 0).all())


def _measure_weight(item: Item, step: Step) -> Measured:
    spec, entry = item.spec, item.entry
    assert spec is not None, "a quantized weight has one"
    shape, block = entry.shape, item.block
    blocks = _Blocks(spec)
    count = blocks.sizes.numel()
    counts = torch.zeros(count, dtype=torch.int64, device="cpu")
    cut_blocks: list[Tensor] | None = None
    nbytes = item.nbytes / max(math.prod(shape), 1)
    for box in boxes(shape, block):
        data = item.qdata(box)
        counts += torch.bincount(data.reshape(-1), minlength=count)
        body = data & (count // 2 - 1)
        top = by_block((body == blocks.top).view(torch.uint8), block, _count, 0)
        below = by_block((body == blocks.top - 1).view(torch.uint8), block, _count, 0)
        largest = by_block(body.masked_fill_(body > blocks.top, 0), block, torch.amax, 0)
        if _cuts_blocks(box, block, shape):
            box_blocks = blocks_of_box(box, block)
            if cut_blocks is None:
                dtypes = (torch.uint8, torch.int64, torch.int64)
                cut_blocks = [counts.new_zeros(scale_shape(shape, block), dtype=t) for t in dtypes]
            cut_blocks[0][box_blocks] = torch.maximum(cut_blocks[0][box_blocks], largest)
            cut_blocks[1][box_blocks] += top
            cut_blocks[2][box_blocks] += below
        else:
            blocks.add(largest, top, below, item.factors(box))
        step(round(nbytes * data.numel()))
    if cut_blocks is not None:
        blocks.add(cut_blocks[0], cut_blocks[1], cut_blocks[2], item.factors())
    return _result_of_weight(item, blocks, tuple(counts.tolist()))


def _cuts_blocks(box: Box, block: Sequence[int], shape: Sequence[int]) -> bool:
    return any(
        size == -1 and (s.start, s.stop) != (0, n)
        for s, size, n in zip(box, block, shape, strict=True)
    )


def _result_of_weight(item: Item, blocks: _Blocks, counts: tuple[int, ...]) -> Measured:
    """Make the result for a quantized weight, from its blocks and the count of each byte."""
    spec = blocks.spec
    if spec.scale_rule == "fp32" and blocks.pow2 and item.scale is not None and blocks.blocks > 1:
        spec = replace(spec, scale_rule="pow2")
    has_scales = blocks.low <= blocks.high
    stats = TensorStats(
        shape=item.entry.shape, dtype=spec.element_dtype, spec=spec, amax=blocks.amax,
        scale_min=blocks.low if has_scales else math.nan,
        scale_max=blocks.high if has_scales else math.nan, codes=counts,
    )  # fmt: skip
    scale = None
    if item.scale is not None:
        described = item.scale.name, item.scale.dtype_name, item.scale.shape
        scale = ScaleStats(*described, blocks.blocks, blocks.zero_scales, blocks.bad)
    return Measured(
        stats=stats,
        scale=scale,
        blocks=blocks.blocks,
        saturated_blocks=blocks.saturated,
        idle_blocks=blocks.idle if item.scale is not None else 0,
        findings=tuple(_code_findings(stats, blocks, item.scale is not None)),
    )


def _code_findings(stats: TensorStats, blocks: _Blocks, scaled: bool) -> Iterator[Finding]:
    yield from _nonfinite(stats.count("nan"), stats.count("inf"), stats.numel, "codes")
    over_zeros = 0 if blocks.zero_lost else blocks.zero_scales
    unused = f"blocks use less than {IDLE:.3g} of the range"
    for kind, count, text, wrong in (
        ("bad-scale", blocks.bad, "scales NaN, infinite or negative", True),
        ("zero-scale", blocks.zero_lost, "scales are zero over codes that are not", True),
        ("zero-scale", over_zeros, "scales zero, over zeros", False),
        ("saturated", blocks.saturated, "blocks saturated", False),
        ("unused-range", blocks.idle if scaled else 0, unused, False),
    ):
        if count:
            yield Finding(kind, f"{_some(count, blocks.blocks)} {text}", wrong)
    if stats.numel and stats.count("zero") == stats.numel:
        yield Finding("all-zero", "all zero", wrong=False)


def _nonfinite(nan: int, inf: int, numel: int, noun: str) -> Iterator[Finding]:
    for kind, label, count in (("nan", "NaN", nan), ("inf", "infinite", inf)):
        if count:
            yield Finding(kind, f"{_some(count, numel)} {noun} {label}")


def _measure_plain(item: Item, step: Step) -> Measured:
    entry, scale = item.entry, item.is_scale
    zero = nan = inf = negative = numel = 0
    amax = square = 0.0
    for box in boxes(entry.shape, (1,) * len(entry.shape)):
        chunk = entry.read(box)
        raw = chunk.numel() * chunk.element_size()
        if scale and chunk.dtype == torch.uint8:
            chunk = chunk.view(torch.float8_e8m0fnu)
        if chunk.is_complex():
            chunk = chunk.abs()
        value = chunk if chunk.dtype == torch.float64 else chunk.float()
        numel += value.numel()
        if value.numel():
            negative += int((value < 0).sum())
            zero += value.numel() - int(value.count_nonzero())
            size = value.abs()
            top = float(size.max())
            if not math.isfinite(top):
                nan += int(size.isnan().sum())
                inf += int(size.isinf().sum())
                size = size.masked_fill(~size.isfinite(), 0.0)
                top = float(size.max())
            amax = max(amax, top)
            square += float(torch.linalg.vector_norm(size, dtype=torch.float64)) ** 2
        step(raw)
    finite = numel - nan - inf
    rms = math.sqrt(square / finite) if finite else 0.0
    plain = PlainStats(numel, amax, rms, zero, nan, inf, negative)
    return Measured(plain=plain, findings=tuple(_plain_findings(plain, scale)))


def _plain_findings(plain: PlainStats, scale: bool) -> Iterator[Finding]:
    yield from _nonfinite(plain.nan_count, plain.inf_count, plain.numel, "elements")
    not_positive = plain.zero_count + plain.negative_count
    if scale and not_positive:
        kind = "zero-scale" if plain.zero_count else "bad-scale"
        yield Finding(kind, f"{_some(not_positive, plain.numel)} scales not positive")


def _count(x: Tensor, dim: list[int]) -> Tensor:
    """Sum a uint8 tensor of zeros and ones over these dimensions."""
    if short := [d for d in dim if 1 < x.shape[d] < 256]:
        x = x.sum(short[-1], keepdim=True, dtype=torch.uint8)  # many times faster than wider types
    return x.sum(dim, dtype=torch.int32)


def _some(count: int, numel: int) -> str:
    """Format a count as ``3 of 12`` or, if it is all of several, as ``all 12``."""
    return f"all {numel}" if count == numel and numel > 1 else f"{count} of {numel}"
