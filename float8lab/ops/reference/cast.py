"""Cast matrices to FP8; transpose them.  M rows, K columns, E groups.

Casts can pad: both dimensions of the result are rounded up to a multiple of ``align``, and
everything, scales included, is as if the input had been padded with zeros first.

What is cast is a matrix, or the values of a prologue (``prologue.py``) rounded to ``dtype`` as if
they had been written: a fused cast has the bytes of the cast of the composition. Its rows may be in
groups, and a batch of matrices may be cast, each of its own (``grouped.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.formats import TENSOR_SCALE_RULES
from float8lab.ops.reference.blocks import CastResults, amax, quantize
from float8lab.ops.reference.grouped import cast_batch, cast_groups
from float8lab.ops.reference.prologue import value_of

__all__ = ["amax_of", "cast", "cast_many_", "has_amax", "transpose"]


def amax_of(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, block: Sequence[int] = (-1, -1)
) -> Tensor:
    """``amax`` of a matrix that a prologue may compute."""
    return amax(value_of(prologue, inputs, dtype) if prologue else inputs[0], block)


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
        inputs: from which tensors; one of 3 dimensions is a batch.
        dtype: the values of a prologue are rounded to it; of no meaning for the matrix itself.
        fp8_dtype: of the result.
        block: rows and columns that share a scale. Of groups ``(-1, -1)``, or a row or a part of it
            of up to 128 columns, a power of two; of a batch ``(128, 128)``, too.
        rule: one of ``SCALE_RULES``, by which scales are made of amaxes. Or ``"encode"``: the
            values are multiplied by the factors ``given``; or ``"decode"``: they are divided by the
            scales ``given``, by callers that know no encode factors. Both are one float32
            operation with IEEE rounding, whose result is what ``round_to_fp8`` rounds. For powers
            of two the two are the same. For elements in e2m1, ``"e2m1 encode"`` and
            ``"e2m1 decode"``.
        eps: the least amax that a scale is made of.
        align: the result's sizes are multiples of it; ``ALIGN`` for groups and batches.
        dbias: the sums over its rows, or over the rows of each group, are wanted; not of a batch.
        given: factors or scales, one or one per block; for both orientations, the same transposed.
            Where scales are made: the amaxes that they are made of, one per block of the padded
            result, if they are known. In both orientations, only if blocks are square. Where scales
            have a second level, one element is the amax of the matrix. Of groups and batches: the
            factor or the amax of each, or one for all of them.
        offs: offsets of the groups, ``[E]``, int32 or int64, none below the one before.
        plan: the result of ``plan_groups`` for these groups, if it exists. It changes nothing.
        slot: one element, which becomes the larger of its content and the matrix's amax; one for
            each group or matrix of a batch, unless it has no row.

    Returns:
        FP8 data and scales of the matrix; an amax; FP8 data and scales of the transpose; and the
        column sums, float32. What is not wanted is None, as are scales where factors are given. The
        amax comes with one orientation, unless it was given: it is what the scales were made of;
        that of blocks smaller than the matrix comes only where there is no prologue. For groups and
        batches see ``cast_groups`` and ``cast_batch``.
    """
    x = value_of(prologue, inputs, dtype) if prologue else inputs[0]
    if offs is not None:
        groups = (fp8_dtype, tuple(block), rule, eps)
        return cast_groups(x, offs, groups, rowwise, columnwise, dbias, given, slot)
    if x.ndim == 3:
        return cast_batch(x, (fp8_dtype, tuple(block), rule, eps), rowwise, columnwise, given, slot)
    if slot is not None and x.numel():
        slot.copy_(torch.maximum(slot, x.abs().max().float()))
    sums = x.float().sum(0) if dbias else None
    options = (fp8_dtype, block, rule, eps, align)
    q, scale, amaxes = quantize(x if rowwise else x.t(), *options, given)
    if rowwise and columnwise:
        if block[0] != block[1] and scale is not None:
            matrix_amax = given if rule in TENSOR_SCALE_RULES else None
            q_t, scale_t, _ = quantize(x.t(), *options, matrix_amax)
        else:
            q_t, scale_t = _transposed(q), None if scale is None else _transposed(scale)
        return CastResults(q, scale, None, q_t, scale_t, sums)
    asks = amaxes is not None and (prologue or given is not None)
    if asks and not has_amax(prologue, block, given):
        amaxes = None
    if columnwise:
        return CastResults(None, None, amaxes, q, scale, sums)
    return CastResults(q, scale, amaxes, None, None, sums)


def has_amax(prologue: str, block: Sequence[int], given: Tensor | None) -> bool:
    """Whether ``cast`` returns the amaxes that it finds for one orientation."""
    return given is None and (not prologue or (block[0] == block[1] == -1))


def _transposed(x: Tensor) -> Tensor:
    """A contiguous copy, also where a transposed view would be contiguous itself."""
    return x.t().clone(memory_format=torch.contiguous_format)


def cast_many_(
    x: Sequence[Tensor], q: Sequence[Tensor], block: Sequence[int], rule: str, eps: float,
    scale: Sequence[Tensor], amax: Sequence[Tensor], given: Sequence[Tensor],
) -> None:  # fmt: skip
    """``cast`` of each matrix ``x`` into the ``q`` that is there for it.
    With ``"encode"`` for a rule by its ``given`` factors. Else scales are found, and go with their
    amaxes into the ``scale`` and ``amax`` that are there."""
    for index, (matrix, data) in enumerate(zip(x, q, strict=True)):
        factor = given[index] if given else None
        results = quantize(matrix, data.dtype, block, rule, eps, given=factor)
        outputs = (data,) if given else (data, scale[index], amax[index])
        for output, result in zip(outputs, results[: len(outputs)], strict=True):
            output.copy_(result)


def transpose(q: Tensor, align: int = 1, event: Tensor | None = None) -> Tensor:
    """The transposed matrix of one-byte elements, contiguous and zero-padded.

    The matrices of a batch, ``[E, M, K]``, are transposed as one that has them below each other:
    column k of all of them is one row in memory, and none is padded. ``event`` is as in
    ``value_of``.
    """
    if q.ndim == 3:
        E, M, K = q.shape
        return transpose(q.reshape(E * M, K)).view(K, E, M).transpose(0, 1)
    raw = q.view(torch.uint8)
    if q.shape[0] % align or q.shape[1] % align:
        raw = F.pad(raw, (0, -q.shape[1] % align, 0, -q.shape[0] % align))
    return _transposed(raw).view(q.dtype)
