"""Count FP8 data exactly, and measure its error against an original.

The result classes in ``float8lab.tensor.statistics`` say what is counted. Only the elements of the
tensor are counted: neither padding, nor the hidden elements of a block that a view cuts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8lab import arguments
from float8lab.formats import E4M3, Spec, largest
from float8lab.ops import as_matrix
from float8lab.tensor.blocks import by_block, expand_scale
from float8lab.tensor.dtensor import is_dtensor, local_of
from float8lab.tensor.float8_tensor import Float8Tensor
from float8lab.tensor.statistics import BlockStats, Comparison, Histogram, TensorStats, kinds_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["Errors", "blocks", "compare", "histogram", "stats", "stored"]


@overload
def stats(
    x: Tensor, original: Tensor | None = None, *, per_block: Literal[False] = False,
    local: bool = False,
) -> TensorStats: ...  # fmt: skip
@overload
def stats(
    x: Tensor, original: Tensor | None = None, *, per_block: Literal[True], local: bool = False
) -> BlockStats: ...
@overload
def stats(
    x: Tensor, original: Tensor | None = None, *, per_block: bool, local: bool = False
) -> TensorStats | BlockStats: ...
@Float8Tensor._add_view
def stats(
    x: Tensor, original: Tensor | None = None, *, per_block: bool = False, local: bool = False
) -> TensorStats | BlockStats:
    """Compute statistics of an FP8 tensor, over all of it or for each block.

    Args:
        x: a Float8Tensor, or a DTensor whose local tensor is one.
        original: the tensor that was quantized, of the same shape, to measure the error against.
            For a DTensor it is a DTensor of the same placements.
        per_block: return a ``BlockStats``. For a DTensor it needs ``local``, since shards may have
            smaller blocks than the unsharded tensor.
        local: for a DTensor, look at this rank's shard. By default counts and extremes are combined
            over the mesh by collectives, so all ranks of the mesh must call this function.

    Raises:
        TypeError: ``x`` is not stored in FP8, or holds no data (fake, meta).
        ValueError: ``original`` has another shape or other placements; ``per_block`` of a DTensor
            without ``local``; a DTensor with partial sums.

    >>> t = float8lab.quantize(torch.tensor([[448.0, 0.01], [1.0, 2.0]]), block=(1, -1))
    >>> float8lab.inspect.stats(t, per_block=True).saturated.tolist()
    [[0.5], [0.5]]
    """
    arguments.check_flags(per_block=per_block, local=local)
    if per_block and is_dtensor(x) and not local:
        raise ValueError(
            "per_block must come with local=True for a DTensor; got local=False. Blocks are cut "
            "differently on each rank: look at one shard, or x.full_tensor()."
        )
    shard, source = stored(x), _original(x, original)
    with torch.no_grad():
        if per_block:
            return _block_stats(shard, source)
        return _tensor_stats(x, shard, source, local)


@Float8Tensor._add_view
def compare(x: Tensor, original: Tensor, *, local: bool = False) -> Comparison:
    """Measure the error of an FP8 tensor; arguments and exceptions are those of ``stats``.

    >>> x = torch.tensor([1.0, 1.03125])
    >>> float8lab.inspect.compare(float8lab.quantize(x, scale=1.0), x).max_error
    0.03125
    """
    arguments.check_tensor("original", original)
    return cast(Comparison, stats(x, original, local=local).comparison)  # there is an original


@Float8Tensor._add_view
def histogram(x: Tensor, by: str = "code", *, local: bool = False) -> Histogram:
    """Count how often each byte or exponent occurs; see ``stats`` for the arguments and errors.

    Args:
        by: ``"code"`` counts each of the 256 bytes. ``"exponent"`` counts nonzero finite elements
            by ``floor(log2(|code|))``, with a bin for each exponent of the format, also subnormal.

    >>> float8lab.quantize(torch.tensor([448.0, 1.0, 1.5])).histogram("exponent").counts.tolist()
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]
    """
    arguments.check_choice("by", by, ("code", "exponent"))  # before a collective
    return stats(x, local=local).histogram(by)


@Float8Tensor._add_view
def blocks(x: Tensor) -> Tensor:
    """Return the scales as a matrix, ``[blocks of all dimensions but the last, of the last]``.

    The matrix is a copy on the tensor's device. For a DTensor, it holds the scales of this rank's
    shard.

    >>> float8lab.inspect.blocks(float8lab.quantize(torch.ones(4, 2, 256), block=(1, 128))).shape
    torch.Size([8, 2])
    """
    return as_matrix(stored(x).scale.detach()).clone()


def stored(x: Tensor) -> Float8Tensor:
    """Return the Float8Tensor that ``x`` is or has as local tensor, with up-to-date scales."""
    local = local_of(x)
    if not isinstance(local, Float8Tensor):
        is_tensor = isinstance(x, Tensor)
        got = f"{type(local).__name__} of {local.dtype}" if is_tensor else arguments.shown(x)
        advice = "float8lab.quantize() it first."
        if isinstance(x, nn.Module):
            advice = (
                "float8lab.convert_to_float8(model) runs a model's layers in FP8 and "
                "float8lab.conversion_report(model) lists them; pass one tensor, such as "
                "float8lab.quantize(layer.weight)."
            )
        raise TypeError(
            f"x must be a Float8Tensor, or a DTensor whose local tensor is one; got {got}. {advice}"
        )
    if not local._has_data():
        kind = "meta" if local.qdata.is_meta else "fake"
        raise TypeError(
            f"x must hold data; got a {kind} tensor, which has a shape and no numbers. Look at the "
            "tensor that has them, outside of torch.compile, FakeTensorMode and device('meta')."
        )
    local._refresh()
    return local


def _original(x: Any, original: Tensor | None) -> Tensor | None:
    """Return the original as a plain local tensor on the device of ``x``, or None without one."""
    if original is None:
        return None
    arguments.check_tensor("original", original)
    advice = "Pass what was quantized, in the same view."
    arguments.check_shape("original", original, tuple(x.shape), advice)
    if is_dtensor(x) or is_dtensor(original):
        placed = getattr(x, "placements", None), getattr(x, "device_mesh", None)
        expected = getattr(original, "placements", None), getattr(original, "device_mesh", None)
        if placed != expected:
            raise ValueError(
                f"original must have the placements of x, {placed[0]}; got {expected[0]}. "
                "Redistribute it, or compare full_tensor()s."
            )
        original = local_of(original)
    original = original.detach()
    if isinstance(original, Float8Tensor):
        original = original.dequantize()
    return original.to(stored(x).device)


def _tensor_stats(x: Any, shard: Any, source: Tensor | None, local: bool) -> TensorStats:
    scale, amax = shard.scale.detach(), shard.amax.detach()
    # All sums are in one float64 tensor, all maxima in another: exact up to 2**53 elements.
    sums = [torch.bincount(shard.qdata.detach().view(torch.uint8).reshape(-1), minlength=256)]
    extremes = [-scale, scale, amax]
    if source is not None:
        errors = Errors.of(shard.qdata.detach(), scale, shard.spec, source)
        one_block = (-1,) * shard.ndim
        sums += [_sum(x, one_block) for x in (errors.clipped, errors.flushed, errors.finite)]
        sums += [_norm(x, one_block).square() for x in (errors.source, errors.error)]
        sums.append(errors.error.sum(dtype=torch.float64))
        extremes.append(errors.error.abs())
    maxima = torch.stack([_maximum(e) for e in extremes])
    flat = torch.cat([values.reshape(-1).double() for values in sums])
    if is_dtensor(x) and not local:
        _combine_over_mesh(x, flat, maxima)
    numbers = torch.cat([flat, maxima]).tolist()  # the only transfer, besides bincount's
    counts, totals, most = numbers[:256], numbers[256 : len(flat)], numbers[len(flat) :]
    comparison = None
    if totals:
        clipped, flushed, finite, signal, noise, error = totals
        comparison = Comparison(
            numel=round(sum(counts)), clipped_count=round(clipped), flushed_count=round(flushed),
            signal=signal, noise=noise, max_error=max(most[3], 0.0),
            mean_error=error / finite if finite else 0.0,
        )  # fmt: skip
    has_blocks = most[1] != -math.inf
    return TensorStats(
        shape=tuple(shard.shape if local else x.shape), dtype=shard.dtype, spec=shard.spec,
        amax=most[2] if has_blocks else 0.0, scale_min=-most[0] if has_blocks else math.nan,
        scale_max=most[1] if has_blocks else math.nan, codes=tuple(map(round, counts)),
        comparison=comparison,
    )  # fmt: skip


def _combine_over_mesh(x: DTensor, sums: Tensor, maxima: Tensor) -> None:
    """Add up the sums of all shards of a DTensor, and take the largest of the maxima, in place."""
    for dim, placement in enumerate(x.placements):
        if placement.is_partial():
            raise ValueError(
                f"x must be sharded or replicated; got {x.placements}. Redistribute it, or "
                "pass local=True."
            )
        if not placement.is_replicate():
            group = x.device_mesh.get_group(dim)
            dist.all_reduce(sums, group=group)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)


def _block_stats(shard: Any, source: Tensor | None) -> BlockStats:
    block, qdata = shard.spec.block, shard.qdata.detach()
    masks = kinds_of(qdata.view(torch.uint8), shard.spec.fp8_dtype)
    size = qdata.float().abs()
    number = size.isfinite() & (size > 0)
    smallest = by_block(size.masked_fill(~number, math.inf), block, torch.amin, math.inf)
    largest = by_block(size.masked_fill(~number, -math.inf), block, torch.amax, -math.inf)
    is_zero = largest == -math.inf
    first, last = (
        (torch.frexp(v).exponent - 1).float().masked_fill(is_zero, math.nan)
        for v in (smallest, largest)
    )
    sqnr = None
    if source is not None:
        errors = Errors.of(qdata, shard.scale.detach(), shard.spec, source)
        masks |= {"clipped": errors.clipped, "flushed": errors.flushed}
        signal, noise = (_norm(v, block) for v in (errors.source, errors.error))
        sqnr = (20 * (signal.log10() - noise.log10())).masked_fill(noise == 0, math.inf)
    return BlockStats(
        spec=shard.spec, numel=_sum(torch.ones_like(qdata, dtype=torch.bool), block),
        amax=shard.amax.detach().clone(), scale=shard.scale.detach().clone(),
        counts={kind: _sum(mask, block) for kind, mask in masks.items()}, exponent_min=first,
        exponent_max=last, sqnr=sqnr,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Errors:
    """An original and the error against it by element; both are 0 where either is not finite."""

    source: Tensor
    error: Tensor
    finite: Tensor
    clipped: Tensor
    flushed: Tensor

    @staticmethod
    def of(qdata: Tensor, scale: Tensor, spec: Spec, source: Tensor) -> Errors:
        wide = source if source.dtype == torch.float64 else source.float()
        elements, scales = qdata.float(), expand_scale(scale, spec.block, qdata.shape)
        value = elements * scales
        finite = value.isfinite() & wide.isfinite()
        error = (value - wide).masked_fill(~finite, 0.0)
        # Half a step above the largest value: above this, rounding to nearest leaves the range.
        beyond = largest(spec.fp8_dtype) + (16.0 if spec.fp8_dtype == E4M3 else 4096.0)
        return Errors(
            source=wide.masked_fill(~finite, 0.0), error=error, finite=finite,
            clipped=((wide / scales).abs() > beyond) & value.isfinite(),
            flushed=(elements == 0) & (wide != 0),
        )  # fmt: skip


def _maximum(x: Tensor) -> Tensor:
    return x.max().double() if x.numel() else x.new_full((), -math.inf, dtype=torch.float64)


def _sum(mask: Tensor, block: Sequence[int]) -> Tensor:
    return by_block(mask, block, torch.count_nonzero, 0)


def _norm(x: Tensor, block: Sequence[int]) -> Tensor:
    """Compute the 2-norm of each block in float64, without a copy of ``x`` in float64."""
    return by_block(x, block, functools.partial(torch.linalg.vector_norm, dtype=torch.float64), 0.0)
