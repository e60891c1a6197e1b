"""Cast matrices to FP8; transpose them.  M rows, K columns, E groups.

All results of a cast that pads, scales included, are as if the input had been padded with zeros
first. A cast of a prologue (``prologue.py``) gives the same bytes as if its values were written and
then cast. Groups, and the matrices of a batch, are cast separately (``grouped.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.formats import TENSOR_SCALE_RULES
from float8lab.ops.reference.blocks import CastResults, block_amax, quantize
from float8lab.ops.reference.grouped import cast_batch, cast_groups
from float8lab.ops.reference.prologue import value_of

__all__ = ["amax_of", "cast", "cast_many_", "has_amax", "transpose"]


def amax_of(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, block: Sequence[int] = (-1, -1)
) -> Tensor:
    """Compute the ``amax`` of a matrix, or of a prologue's values."""
    return block_amax(value_of(prologue, inputs, dtype) if prologue else inputs[0], block)


def cast(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, fp8_dtype: torch.dtype,
    block: Sequence[int], rule: str, eps: float = 0.0, align: int = 1, rowwise: bool = True,
    columnwise: bool = False, dbias: bool = False, given: Tensor | None = None, *,
    offs: Tensor | None = None, plan: Tensor | None = None, slot: Tensor | None = None,
) -> tuple[
    Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None
]:  # fmt: skip
    """Cast a matrix, which may be computed on the way, in one orientation or both.

    Args:
        prologue: how the matrix is computed; ``""`` is the matrix itself.
        inputs: the tensors from which it is computed; a tensor of 3 dimensions is a batch.
        dtype: the dtype to which the values of a prologue are rounded; unused without a prologue.
        fp8_dtype: the dtype of the result.
        block: rows and columns that share a scale. For groups: ``(-1, -1)``, ``(1, -1)``, or
            ``(1, n)``, n being a power of two up to 128; for a batch ``(128, 128)``, too.
        rule: one of ``SCALE_RULES``, which make scales from amaxes; or ``"encode"``, which
            multiplies the values by the ``given`` factors; or ``"decode"``, which divides them by
            the ``given`` scales, for callers without encode factors. Both are a single float32
            operation with IEEE rounding, whose result ``round_to_fp8`` rounds; both are the same
            for powers of two. Elements in e2m1 have ``"e2m1 encode"`` and ``"e2m1 decode"``.
        eps: a smaller amax is raised to this number before it makes a scale.
        align: the result's sizes are multiples of this; it is ``ALIGN`` for groups and batches.
        dbias: whether to sum over the rows of the matrix, or of each group; never of a batch.
        given: factors or scales, a single one or one per block; the transpose uses the same. For a
            rule that makes scales: known amaxes, one per block of the padded result; for both
            orientations only if blocks are square; where scales have a second level, one element is
            the amax of the matrix. For groups and batches: a factor or amax of each, or one for all
            of them.
        offs: offsets at which the groups stop, ``[E]``, int32 or int64, in ascending order.
        plan: the result of ``plan_groups`` for these groups, if known. It changes no result.
        slot: one element, which is raised to the amax of the matrix; or an element for each group,
            or matrix of a batch, which stays as it is if the group or matrix has no row.

    Returns:
        FP8 data and scales of the matrix; an amax; FP8 data and scales of the transpose; and the
        column sums, float32. Results that are not asked for are None, as are scales where factors
        are given. The amax is that of which the scales were made: it is returned for a single
        orientation, if it was not given, and for blocks smaller than the matrix only without a
        prologue. For groups and batches see ``cast_groups`` and ``cast_batch``.
    """
    x = value_of(prologue, inputs, dtype) if prologue else inputs[0]
    options = (fp8_dtype, tuple(block), rule, eps)
    if offs is not None:
        return cast_groups(x, offs, options, rowwise, columnwise, dbias, given, slot)
    if x.ndim == 3:
        return cast_batch(x, options, rowwise, columnwise, given, slot)
    if slot is not None and x.numel():
        slot.copy_(torch.maximum(slot, x.abs().max().float()))
    sums = x.float().sum(0) if dbias else None
    q, scale, amaxes = quantize(x if rowwise else x.t(), *options, align, given)
    if rowwise and columnwise:
        if block[0] != block[1] and scale is not None:
            matrix_amax = given if rule in TENSOR_SCALE_RULES else None
            q_t, scale_t, _ = quantize(x.t(), *options, align, matrix_amax)
        else:
            q_t, scale_t = _transposed(q), None if scale is None else _transposed(scale)
        return CastResults(q, scale, None, q_t, scale_t, sums)
    needs_check = amaxes is not None and (prologue or given is not None)
    if needs_check and not has_amax(prologue, block, given):
        amaxes = None
    if columnwise:
        return CastResults(None, None, amaxes, q, scale, sums)
    return CastResults(q, scale, amaxes, None, None, sums)


def has_amax(prologue: str, block: Sequence[int], given: Tensor | None) -> bool:
    """Whether ``cast`` returns the amaxes that it computes for a single orientation."""
    return given is None and (not prologue or (block[0] == block[1] == -1))


def _transposed(x: Tensor) -> Tensor:
    """Return a contiguous copy, even where the transposed view would be contiguous itself."""
    return x.t().clone(memory_format=torch.contiguous_format)


def cast_many_(
    x: Sequence[Tensor], q: Sequence[Tensor], block: Sequence[int], rule: str, eps: float,
    scale: Sequence[Tensor], amax: Sequence[Tensor], given: Sequence[Tensor],
) -> None:  # fmt: skip
    """Cast each matrix of ``x`` into its existing ``q``.
    The rule ``"encode"`` uses the ``given`` factors. Other rules make scales, and write them and
    their amaxes to the existing ``scale`` and ``amax``."""
    for index, (matrix, data) in enumerate(zip(x, q, strict=True)):
        factor = given[index] if given else None
        results = quantize(matrix, data.dtype, block, rule, eps, given=factor)
        outputs = (data,) if given else (data, scale[index], amax[index])
        for output, result in zip(outputs, results[: len(outputs)], strict=True):
            output.copy_(result)


def transpose(q: Tensor, align: int = 1, event: Tensor | None = None) -> Tensor:
    """Transpose a matrix of one-byte elements; the result is contiguous and zero-padded.

    A batch, ``[E, M, K]``, is transposed like a single matrix that has its matrices below each
    other: column k of all matrices is one row in memory, and nothing is padded. ``event`` is as in
    ``value_of``.
    """
    if q.ndim == 3:
        E, M, K = q.shape
        return transpose(q.reshape(E * M, K)).view(K, E, M).transpose(0, 1)
    raw = q.view(torch.uint8)
    if q.shape[0] % align or q.shape[1] % align:
        raw = F.pad(raw, (0, -q.shape[1] % align, 0, -q.shape[0] % align))
    return _transposed(raw).view(q.dtype)
