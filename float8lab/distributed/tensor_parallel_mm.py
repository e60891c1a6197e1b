"""Products of FP8 operands that tensor-parallel ranks share, beside what they send each other.

A left operand is gathered where each rank has some of its rows; a product is summed over ranks
where each has a part of the contraction. Where it pays, ``overlap.py`` does both at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.distributed.overlap import gather_mm, mm_scatter
from float8lab.distributed.tensor_parallel import Rows, TensorParallel, joined, note, noted
from float8lab.ops import scaled_mm_op
from float8lab.ops.declare import planned
from float8lab.ops.operand import Operand
from float8lab.ops.reference import scales_by_column

__all__ = ["Product", "Shards", "multiply", "spread_mm"]


class Product(NamedTuple):
    """How two FP8 operands are multiplied, and what the result is like."""

    a_block: Sequence[int]
    b_block: Sequence[int]
    fast_accum: bool
    shape: tuple[int, int]
    """The shape of this rank's product, before it is summed."""
    dtype: torch.dtype
    keep: bool = False
    """Whether the left operand is wanted, as multiplied."""


class Shards:
    """An operand of wgrad, ``[features, tokens]``, of which each rank has some tokens.

    It is gathered beside a product where one runs that has time for it, else on demand.
    """

    __slots__ = ("block", "operand", "parallel", "rows", "whole")

    def __init__(
        self, parallel: TensorParallel, rows: Rows, operand: Operand, block: Sequence[int]
    ) -> None:
        """Take this rank's part."""
        self.parallel, self.rows, self.operand, self.block = parallel, rows, operand, block
        self.whole: Operand | None = noted(operand[0])

    def gathered(self) -> Operand:
        """The operand of all tokens."""
        if self.whole is None:
            (q, scale), rows = self.operand, self.rows
            self.whole = Operand(*self.parallel.gathered_operand(q, scale, self.block, rows, 1))
            note(q, self.whole)
        return self.whole

    def leave(self) -> list[Tensor]:
        """Shards to be gathered: FP8 data, and scales unless all ranks have those of all."""
        q, scale = self.operand
        size = self.block[1]
        cut = size == -1 or self.rows.are_cut(size)
        return [q.contiguous(), *[scale.t().contiguous()] * (not cut)]

    def arrive(self, data: Tensor, scales: Tensor | None) -> None:
        """Take ``[R, *shape]`` of that."""
        raw, scale = joined(data, 1), self.operand[1]
        if scales is not None and scales.numel():
            scale = scales.flatten(0, 1).t()
            scale = scale if scales_by_column(self.block) else scale.contiguous()
        self.whole = Operand(raw, scale)
        note(self.operand[0], self.whole)


def spread_mm(
    parallel: TensorParallel,
    rows: Rows | None,
    operands: tuple[Operand, Operand],
    product: Product,
    bias: Tensor | None = None,
    *,
    backward: bool = False,
    beside: Shards | None = None,
    whole: Operand | None = None,
) -> tuple[Tensor, Operand]:
    """A layer's fprop, ``x @ weight.T + bias``, or its dgrad, and the left operand as multiplied.

    Args:
        parallel: how the layer is spread.
        rows: of the layer's tokens, under sequence parallelism.
        operands: x or dy, as this rank has it, and the weight, or its transpose.
        product: of these.
        bias: of as many features as the weight has rows.
        backward: whether this is dgrad.
        beside: what else may be gathered meanwhile.
        whole: what was gathered of the left operand before, if anything was.
    """
    if whole is not None:
        return multiply((whole, operands[1]), product, bias), whole
    if parallel.scatters if backward else parallel.gathers:
        assert rows is not None, "under sequence parallelism"
        return _gathered_mm(parallel, rows, operands, product, bias, beside)
    if (parallel.mode == "column") == backward:
        return _mm_reduced(parallel, rows, operands, product, bias, beside), operands[0]
    return multiply(operands, product, bias), operands[0]


def _gathered_mm(
    parallel: TensorParallel,
    rows: Rows,
    operands: tuple[Operand, Operand],
    product: Product,
    bias: Tensor | None,
    beside: Shards | None,
) -> tuple[Tensor, Operand]:
    """``whole @ b.T + bias`` of an operand ``a`` that is a shard of the whole's rows; the whole."""
    a, b = operands
    if parallel.overlaps(rows, a[0], b[0], product.a_block, arrives=True):
        args = _overlapping(parallel, operands, product, bias, beside)
        y, q, scale, *gathered = gather_mm(*args, product.keep)
        if beside is not None:
            beside.arrive(*gathered)
        return _cropped(y, product.shape), Operand(q, scale) if product.keep else a
    whole = Operand(*parallel.gathered_operand(*a, product.a_block, rows, 0))
    return multiply((whole, b), product, bias), whole


def _mm_reduced(
    parallel: TensorParallel,
    rows: Rows | None,
    operands: tuple[Operand, Operand],
    product: Product,
    bias: Tensor | None,
    beside: Shards | None,
) -> Tensor:
    """The sum over ranks of ``a @ b.T + bias``; of that this rank's ``rows``, or all."""
    a, b = operands
    scatters = rows is not None and not parallel.partial
    if scatters and parallel.overlaps(rows, a[0], b[0], product.a_block, arrives=False):
        assert rows is not None, "under sequence parallelism"
        args = _overlapping(parallel, operands, product, bias, beside)
        y, *gathered = mm_scatter(*args)
        if beside is not None:
            beside.arrive(*gathered)
        return _cropped(y, (rows.of(parallel.rank)[1], product.shape[1]))
    y = multiply(operands, product, bias)
    if parallel.partial:
        return y
    return parallel.summed(y) if rows is None else parallel.scattered(y, rows)


def _overlapping(
    parallel: TensorParallel,
    operands: tuple[Operand, Operand],
    product: Product,
    bias: Tensor | None,
    beside: Shards | None,
) -> tuple[Any, ...]:
    """The arguments of an op that overlaps."""
    a, b = operands
    listed = [*a, *b, *([] if bias is None else [bias])]
    blocks, also = product[:2], [] if beside is None else beside.leave()
    return listed, *blocks, product.dtype, product.fast_accum, parallel.name, also


def multiply(
    operands: tuple[Operand, Operand], product: Product, bias: Tensor | None = None
) -> Tensor:
    """``a @ b.T + bias`` of operands that are here; on a GPU a plan, between what is sent."""
    found: Tensor = (_planned_mm if operands[0][0].is_cuda else _mm)(operands, product, bias)
    return found


def _mm(operands: tuple[Operand, Operand], product: Product, bias: Tensor | None) -> Tensor:
    (a, b), (a_block, b_block, fast_accum, shape, dtype, _) = operands, product
    return _cropped(scaled_mm_op(*a, a_block, *b, b_block, bias, dtype, fast_accum), shape)


_planned_mm = planned(_mm)


def _cropped(y: Tensor, shape: tuple[int, int]) -> Tensor:
    if torch.compiler.is_compiling() or y.shape != shape:
        y = y[: shape[0], : shape[1]]
    return y.contiguous()
