"""The cast of a shard, with the bytes that the cast of the unsharded matrix gives it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.distributed.comm import TensorParallel
from float8lab.formats import Spec
from float8lab.ops import Groups, Prologue, amax_op, prologue_shape, round_up
from float8lab.ops.operand import Operand, Quantized
from float8lab.recipes.delayed import QuantParams, own_amax
from float8lab.tensor.operands import Matrix, quantize, replayed_quantize, value_of

__all__ = ["quantize_shard"]


def quantize_shard(
    x: Matrix,
    rowwise: Spec | None,
    columnwise: Spec | None,
    parallel: TensorParallel,
    dim: int,
    amax: Tensor | None,
    epsilon: float,
    dbias: bool,
    align: int,
) -> Quantized:
    """``quantize`` of a shard, with the bytes that the cast of the unsharded matrix gives it.

    The amax of a block that spans the sharded dimension is the largest over ranks. No other block
    crosses shards: such tokens are gathered before, and such features run in high precision.

    Args:
        dim: the sharded dimension of ``x``.
        amax: of the unsharded matrix, ``[1, 1]``, if it is known.
    """
    params: QuantParams | None = None
    if any(spec is not None and spec.shares_matrix_amax for spec in (rowwise, columnwise)):
        params = QuantParams.of_amax(parallel.amax(own_amax(x)) if amax is None else amax)
    context = params, epsilon
    rows_span = rowwise is not None and rowwise.spans(dim)
    columns_span = columnwise is not None and columnwise.spans(1 - dim)
    if not (rows_span or columns_span):
        return replayed_quantize(x, rowwise, columnwise, *context, dbias, align)
    column_sums = None
    if dbias:
        column_sums = (
            _column_sums_of_groups(x) if isinstance(x, Groups) else value_of(x).float().sum(0)
        )
    by_rows = by_columns = None
    if rowwise is not None and rows_span:
        by_rows = _quantize_spanning(x, rowwise, parallel, epsilon, align, False)
    elif rowwise is not None:
        by_rows = replayed_quantize(x, rowwise, None, *context, False, align).rowwise
    if columnwise is not None and columns_span:
        by_columns = _quantize_spanning(x, columnwise, parallel, epsilon, align, True)
    elif columnwise is not None:
        by_columns = replayed_quantize(x, None, columnwise, *context, False, align).columnwise
    return Quantized(by_rows, by_columns, dbias=column_sums)


def _quantize_spanning(
    x: Matrix, spec: Spec, parallel: TensorParallel, epsilon: float, align: int, is_columnwise: bool
) -> Operand:
    """One orientation of a shard whose blocks span the dimension that ranks share."""
    # Ranks share the features of experts, never their rows, so groups are cast rowwise here,
    # padding rows as zeros. The weights of experts are cast below each other, each padded to whole
    # blocks.
    if isinstance(x, Groups):
        matrix = x.owned()
        q, scale = _quantize_spanning(matrix, spec, parallel, epsilon, align, is_columnwise)
        return Operand(q[: len(matrix)], scale[: len(matrix)])
    if isinstance(x, Tensor) and x.ndim == 3:
        weights, rows_of_block = x.mT if is_columnwise else x, spec.block[0]
        E, rows, _ = weights.shape
        below = F.pad(weights, (0, 0, 0, round_up(rows, max(rows_of_block, align)) - rows))
        q, scale = _quantize_spanning(below.flatten(0, 1), spec, parallel, epsilon, align, False)
        rows = round_up(rows, align)
        q = q.view(torch.uint8).unflatten(0, (E, -1))[:, :rows].contiguous().view(q.dtype)
        scales = scale.unflatten(0, (E, -1))[:, : -(-rows // rows_of_block)]
        return Operand(q, scales.contiguous())
    prologue, inputs, dtype = x[:3] if isinstance(x, Prologue) else ("", (x,), x.dtype)
    amaxes = amax_op(prologue, inputs, dtype, spec.block[::-1] if is_columnwise else spec.block)
    amaxes = parallel.amax(amaxes.t() if is_columnwise else amaxes)
    shape = tuple(prologue_shape(prologue, inputs))
    shape = shape[::-1] if is_columnwise else shape
    down, across = spec.scale_shape(tuple(round_up(n, align) for n in shape))
    pad = (0, across - amaxes.shape[1], 0, down - amaxes.shape[0])
    params = QuantParams.of_amax(F.pad(amaxes, pad), spec.scale_rule)
    by_rows, by_columns = (None, spec) if is_columnwise else (spec, None)
    made = quantize(x, by_rows, by_columns, params, epsilon, align=align)
    return made.columnwise if is_columnwise else made.rowwise


def _column_sums_of_groups(x: Groups) -> Tensor:
    """The column sums of each group, ``[E, K]``, float32."""
    (value,), offs = x.inputs, x.offs
    row = torch.arange(value.shape[0], device=value.device, dtype=offs.dtype)
    sums = value.new_zeros((offs.shape[0] + 1, value.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, torch.searchsorted(offs, row, right=True), value.float())[:-1]
