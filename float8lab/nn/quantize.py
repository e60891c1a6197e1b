"""The door to the cast ops: a matrix to FP8, rowwise, columnwise or both.  M rows, K columns.

Note: the nouns of this room.

- *matrix*: what is cast. A tensor; a ``Prologue``, a norm or an activation that the cast computes
  and never writes; or ``Groups``, either of them with the offsets of experts' rows. The
  weights of all experts are a tensor ``[E, N, K]``, a *batch*: each of its matrices is cast by
  itself, and blocks and scales are those of each.
- *operand*: FP8 data, padded so that every dimension is a multiple of ``ALIGN``, and decode scales:
  a value is data * decode scale; the cast multiplies by the *encode factor*. The *rowwise* operand
  has the rows of the matrix, the *columnwise* operand those of its transpose.
- *parameters*: what a cast is given of its scales. None: it makes them of the amaxes that it finds.
  An amax: it makes them of that. A scale and its encode factor: it makes none (``QuantParams``).
- *scale source*: where the parameters of a layer's casts come from (``scales.py``).

``ops/reference/grouped.py`` says how groups are laid out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.distributed.comm import TensorParallel
from float8lab.formats import Spec
from float8lab.ops import (
    Groups,
    Prologue,
    amax_op,
    cast_op,
    prologue_shape,
    round_up,
)
from float8lab.ops.declare import planned
from float8lab.ops.operand import Operand, Quantized
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import QuantParams, own_amax

__all__ = ["Matrix", "quantize", "quantize_shard", "replayed_quantize", "value_of"]

Matrix = Tensor | Prologue | Groups
"""A matrix to be cast: written, computed on the way, or of experts' rows."""


def quantize(
    x: Matrix,
    rowwise: Spec | None,
    columnwise: Spec | None,
    params: QuantParams | None = None,
    epsilon: float = 0.0,
    dbias: bool = False,
    align: int = ALIGN,
) -> Quantized:
    """Cast a matrix to FP8, from one read where both orientations have one spec.

    The result depends on the arguments alone; the amax is recorded in the slot of ``params``.

    Args:
        x: what is cast.
        rowwise: the spec of the rows; None where they are not wanted.
        columnwise: the spec of the transpose, in blocks of its own rows; or None.
        params: what is known of the scales. In backward, what requantizes the forward's input bit
            for bit: a scale that was made of an amax does not tell the encode factor exactly, so
            it is that amax.
        epsilon: the least amax that a scale is made of.
        dbias: the column sums, ``x.sum(0)``, are wanted, too.
        align: the sizes of the result are multiples of it.

    Returns:
        The operands; what is not asked for is None.
    """
    spec = rowwise or columnwise
    assert spec is not None, "one of the two"
    if columnwise is not None and spec != columnwise:
        first = quantize(x, rowwise, None, params, epsilon, dbias, align)
        second = quantize(x, None, columnwise, params, epsilon, False, align)
        return first._replace(columnwise=second.columnwise)
    offs = factor = scale = slot = tiles = None
    is_given = False
    inputs: Sequence[Tensor]
    if isinstance(x, Tensor):
        prologue, inputs, dtype = "", (x,), x.dtype
    elif isinstance(x, Prologue):
        prologue, inputs, dtype, factor = x
    else:
        prologue, inputs, dtype, offs, tiles = x
    if params is not None:
        (scale, factor, _), slot, is_given = params
    if not (is_given or spec.shares_matrix_amax):
        factor = None
    rule = "encode" if is_given else spec.scale_rule
    q, q_scale, amax, q_t, q_t_scale, sums = cast_op(
        prologue, inputs, dtype, spec.fp8_dtype, spec.block, rule, epsilon, align,
        rowwise is not None, columnwise is not None, dbias, factor, offs, tiles, slot,
    )  # fmt: skip
    if is_given:
        q_scale = q_t_scale = scale
    elif not spec.per_tensor:
        factor = None
    elif factor is None:
        factor = amax
    return Quantized(
        None if q is None else Operand(q, q_scale),
        None if q_t is None else Operand(q_t, q_t_scale),
        factor, sums,
    )  # fmt: skip


_planned_quantize = planned(quantize)


def replayed_quantize(
    x: Matrix,
    rowwise: Spec | None,
    columnwise: Spec | None,
    params: QuantParams | None,
    epsilon: float,
    dbias: bool,
    align: int,
) -> Quantized:
    """``quantize`` as a list of launches of its own: a collective separates it from the GEMM."""
    on_gpu = (x if isinstance(x, Tensor) else x.inputs[0]).is_cuda
    run = _planned_quantize if on_gpu else quantize
    made: Quantized = run(x, rowwise, columnwise, params, epsilon, dbias, align)
    return made


def value_of(x: Matrix) -> Tensor:
    """A matrix in high precision, computed if it is not written."""
    return x if isinstance(x, Tensor) else x.value()


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
        parallel: how ranks share the matrix.
        dim: the sharded dimension of ``x``.
        amax: of the unsharded matrix, ``[1, 1]``, if it is known.
    """
    params: QuantParams | None = None
    if any(spec is not None and spec.shares_matrix_amax for spec in (rowwise, columnwise)):
        params = QuantParams.of_amax(parallel.amax(own_amax(x)) if amax is None else amax)
    context = params, epsilon
    rows_span, columns_span = _spans(rowwise, dim), _spans(columnwise, 1 - dim)
    if not (rows_span or columns_span):
        return replayed_quantize(x, rowwise, columnwise, *context, dbias, align)
    sums = None
    if dbias:
        sums = _sums_of_groups(x) if isinstance(x, Groups) else value_of(x).float().sum(0)
    first = second = None
    if rowwise is not None and rows_span:
        first = _quantize_spanning(x, rowwise, parallel, epsilon, align, False)
    elif rowwise is not None:
        first = replayed_quantize(x, rowwise, None, *context, False, align).rowwise
    if columnwise is not None and columns_span:
        second = _quantize_spanning(x, columnwise, parallel, epsilon, align, True)
    elif columnwise is not None:
        second = replayed_quantize(x, None, columnwise, *context, False, align).columnwise
    return Quantized(first, second, dbias=sums)


def _shape(x: Tensor | Prologue) -> tuple[int, ...]:
    return prologue_shape(*x[:2]) if isinstance(x, Prologue) else tuple(x.shape)


def _spans(spec: Spec | None, dim: int) -> bool:
    """Whether blocks, other than of the whole matrix, span a dimension of the operand."""
    return spec is not None and spec.spans(dim)


def _quantize_spanning(
    x: Matrix,
    spec: Spec,
    parallel: TensorParallel,
    epsilon: float,
    align: int,
    is_columnwise: bool,
) -> Operand:
    """One orientation of a shard whose blocks span the dimension that ranks share.

    Ranks share the features of experts, never their rows, so groups are cast rowwise here, padding
    rows as zeros. The weights of experts are cast below each other, each padded to whole blocks.
    """
    if isinstance(x, Groups):
        matrix = x.owned()
        q, scale = _quantize_spanning(matrix, spec, parallel, epsilon, align, is_columnwise)
        return Operand(q[: len(matrix)], scale[: len(matrix)])
    if isinstance(x, Tensor) and x.ndim == 3:
        each, rows_of_block = x.mT if is_columnwise else x, spec.block[0]
        E, rows, _ = each.shape
        below = F.pad(each, (0, 0, 0, round_up(rows, max(rows_of_block, align)) - rows))
        q, scale = _quantize_spanning(below.flatten(0, 1), spec, parallel, epsilon, align, False)
        rows = round_up(rows, align)
        q = q.view(torch.uint8).unflatten(0, (E, -1))[:, :rows].contiguous().view(q.dtype)
        scales = scale.unflatten(0, (E, -1))[:, : -(-rows // rows_of_block)]
        return Operand(q, scales.contiguous())
    prologue, inputs, dtype = x[:3] if isinstance(x, Prologue) else ("", (x,), x.dtype)
    amaxes = amax_op(prologue, inputs, dtype, spec.block[::-1] if is_columnwise else spec.block)
    amaxes = parallel.amax(amaxes.t() if is_columnwise else amaxes)
    shape = _shape(x)[::-1] if is_columnwise else _shape(x)
    down, across = spec.scale_shape(tuple(round_up(n, align) for n in shape))
    pad = (0, across - amaxes.shape[1], 0, down - amaxes.shape[0])
    q, scale, _, q_t, scale_t, _ = cast_op(
        prologue, inputs, dtype, spec.fp8_dtype, spec.block, spec.scale_rule,
        epsilon, align, not is_columnwise, is_columnwise, False,
        F.pad(amaxes, pad),
    )  # fmt: skip
    return Operand(q_t, scale_t) if is_columnwise else Operand(q, scale)


def _sums_of_groups(x: Groups) -> Tensor:
    """The column sums of each group, ``[E, K]``, float32."""
    (value,), offs = x.inputs, x.offs
    row = torch.arange(value.shape[0], device=value.device, dtype=offs.dtype)
    sums = value.new_zeros((offs.shape[0] + 1, value.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, torch.searchsorted(offs, row, right=True), value.float())[:-1]
