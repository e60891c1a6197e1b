"""The entry to the cast op: quantize a matrix rowwise, columnwise or both.  M rows, K columns.

Note: the terms used here.

- *matrix*: the value to cast. It is a tensor, a ``Prologue`` (a norm or activation that the cast
  computes and never writes), or ``Groups`` (either of them with the offsets of experts' rows). The
  weights of all experts are a tensor ``[E, N, K]``, a *batch*: each of its matrices is cast
  separately, with its own blocks and scales.
- *operand*: FP8 data, padded so that every dimension is a multiple of ``ALIGN``, and decode scales:
  a value is data * decode scale; the cast multiplies by the *encode factor*. The *rowwise* operand
  has the rows of the matrix, the *columnwise* operand has the rows of its transpose.
- *parameters*: the scales or amaxes that a cast is given (``QuantParams``); with None, the cast
  computes scales from the amaxes of the matrix.

Layers ask a *scale source* for the parameters of their casts (``nn/scales.py``).
``ops/reference/grouped.py`` describes the layout of groups.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from float8lab.formats import SCALE_RULES, Spec
from float8lab.ops import Groups, Prologue, cast_op
from float8lab.ops.declare import planned
from float8lab.ops.operand import Operand, Quantized
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import QuantParams

__all__ = ["Matrix", "quantize", "replayed_quantize", "value_of"]

Matrix = Tensor | Prologue | Groups
"""A matrix to cast: a tensor, a prologue to compute, or the rows of experts."""


def quantize(
    x: Matrix, rowwise: Spec | None, columnwise: Spec | None = None,
    params: QuantParams | None = None, epsilon: float = 0.0, dbias: bool = False,
    align: int = ALIGN, keep_amaxes: bool = False,
) -> Quantized:  # fmt: skip
    """Cast a matrix to FP8, with a single read if both orientations have the same spec.

    The result depends only on the arguments; the amax is recorded in the slot of ``params``.

    Args:
        x: the matrix to cast.
        rowwise: the spec of the rowwise operand; None: do not compute it.
        columnwise: the spec of the columnwise operand, in blocks of its own rows; or None.
        params: the known scales or amaxes. To requantize the forward's input bit for bit, backward
            gives the amax and not the scale, from which the encode factor cannot be restored
            exactly.
        epsilon: smaller amaxes are raised to this value before scales are computed.
        dbias: compute the column sums ``x.sum(0)``, too.
        align: the sizes of the result are multiples of this number.
        keep_amaxes: with one orientation, ``requant`` holds the amaxes of blocks, too.

    Returns:
        The operands; those not asked for are None.
    """
    spec = rowwise or columnwise
    assert spec is not None, "one of the two"
    if rowwise is not None and columnwise is not None and rowwise != columnwise:
        rowwise_cast = quantize(x, rowwise, None, params, epsilon, dbias, align)
        columnwise_cast = quantize(x, None, columnwise, params, epsilon, False, align)
        return rowwise_cast._replace(columnwise=columnwise_cast.columnwise)
    offs = given = scale = slot = plan = rule = None
    inputs: Sequence[Tensor]
    if isinstance(x, Tensor):
        prologue, inputs, dtype = "", (x,), x.dtype
    elif isinstance(x, Prologue):
        prologue, inputs, dtype, given = x
    else:
        prologue, inputs, dtype, offs, plan = x
    if params is not None:
        (scale, given), slot, rule = params
    if rule is None:
        rule = spec.scale_rule
        if not spec.shares_matrix_amax:
            given = None
    q, q_scale, amax, q_t, q_t_scale, column_sums = cast_op(
        prologue, inputs, dtype, spec.fp8_dtype, spec.block, rule, epsilon, align,
        rowwise is not None, columnwise is not None, dbias, given, offs, plan, slot,
    )  # fmt: skip
    if rule not in SCALE_RULES:
        q_scale = q_t_scale = scale
    elif given is None and (spec.per_tensor or keep_amaxes):
        given = amax
    return Quantized(
        None if rowwise is None else Operand(q, q_scale),
        None if columnwise is None else Operand(q_t, q_t_scale),
        given, column_sums if dbias else None,
    )  # fmt: skip


_planned_quantize = planned(quantize)


def replayed_quantize(
    x: Matrix, rowwise: Spec | None, columnwise: Spec | None, params: QuantParams | None,
    epsilon: float, dbias: bool, align: int,
) -> Quantized:  # fmt: skip
    """Run ``quantize`` with its own launch list, where a collective separates it from the GEMM."""
    run = _planned_quantize if (x if isinstance(x, Tensor) else x.inputs[0]).is_cuda else quantize
    return run(x, rowwise, columnwise, params, epsilon, dbias, align)


def value_of(x: Matrix) -> Tensor:
    """Return a matrix in high precision; a prologue is computed."""
    return x if isinstance(x, Tensor) else x.value()
