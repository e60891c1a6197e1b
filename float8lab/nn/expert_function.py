"""The MLPs of all experts as one autograd function.  M rows, E experts, K features, F between.

``y = activation(x @ w1[e].T + b1[e]) @ w2[e].T + b2[e]`` for the rows of each expert e. The
activation is a ``Prologue``: it is computed while fc2's input is cast, and its gradient while fc1's
output gradient is, so that neither is ever written. So are the rows, where tokens are given with
the rows that they go to: they are permuted while they are cast. Saved for backward are fc1's
output, which the derivative needs, and the tokens; or, of rows, their FP8 data, laid out for the
weight gradient.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.nn.gemm import Gradient, backward, forward, output_dtype, unpack
from float8lab.nn.grouped_function import is_memory_of_parameter
from float8lab.nn.precision import Call
from float8lab.ops import Offsets, Prologue, gather_rows_op, scatter_rows_op
from float8lab.tensor.differentiation import (
    Float8Function,
    once_differentiable,
    wanted_gradients,
)

__all__ = ["Layer", "expert_mlp"]

Layer = tuple[Tensor, Tensor | None]
"""Weight ``[E, N, K]``, in any layout, and bias ``[E, N]`` or None."""


def expert_mlp(
    x: Tensor,
    offs: Tensor,
    fc1: Layer,
    fc2: Layer,
    activation: str,
    calls: tuple[Call, Call],
    to: tuple[Tensor, int] | None = None,
) -> Tensor:
    """``activation(x @ w1[e].T + b1[e]) @ w2[e].T + b2[e]`` for the rows of each expert.

    Args:
        x: ``[M, K]``; or tokens, ``[T, K]``, if ``to`` is given.
        offs: ends of the experts' rows, ``[E]``; rows beyond the last give zeros.
        fc1: weight ``[E, F, K]``, or ``[E, 2 F, K]`` if the activation gates, and bias or None.
        fc2: weight ``[E, K, F]`` and bias or None.
        activation: one of ``ACTIVATIONS``.
        calls: how each layer's operands are cast.
        to: the row map of ``moe_permute`` that says to which rows tokens go, and M.

    Returns:
        ``[M, K]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """
    row_map, rows = to or (None, x.shape[0])
    how = _MlpCall(activation, *calls, rows)
    y: Tensor = _ExpertMlp.run(x, *fc1, *fc2, offs, row_map, how)
    return y


def _tokens_of_rows(row_map: Tensor, rows: int) -> Tensor:
    """The token of each row, ``[rows]`` int32; -1 where there is none."""
    tokens = row_map.shape[0]
    numbers = torch.arange(1, tokens + 1, dtype=torch.int32, device=row_map.device)
    # Bytes move as they are, and rows that no token fills are zeros.
    moved = scatter_rows_op(numbers.view(torch.uint8).view(tokens, 4), row_map, rows)[0]
    return moved.view(torch.int32).view(rows) - 1


class _MlpCall(NamedTuple):
    """How one call of the experts runs."""

    activation: str
    fc1: Call
    fc2: Call
    rows: int


class _ExpertMlp(Float8Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        fc1_weight: Tensor,
        fc1_bias: Tensor | None,
        fc2_weight: Tensor,
        fc2_bias: Tensor | None,
        offs: Tensor,
        row_map: Tensor | None,
        how: _MlpCall,
    ) -> Tensor:
        dtype, needs = output_dtype(x), ctx.needs_input_grad
        needs_dh, needs_dw2 = any(needs[:3]), needs[3]
        offsets = Offsets.of(offs, how.rows)
        source: Tensor | Prologue = x
        token: Tensor | None = None
        if row_map is not None:
            token = _tokens_of_rows(row_map, how.rows)
            source = Prologue("permute", [x, token], dtype)
        h, saved1 = forward(
            source, fc1_weight, fc1_bias, how.fc1,
            needs=needs[:2], dtype=dtype, offsets=offsets,
            save_memory=is_memory_of_parameter(fc1_weight),
        )  # fmt: skip
        y, saved2 = forward(
            Prologue(how.activation, [h], dtype), fc2_weight, fc2_bias, how.fc2,
            needs=(needs_dh, needs_dw2), dtype=dtype, offsets=offsets,
            save_memory=is_memory_of_parameter(fc2_weight),
        )  # fmt: skip
        tokens = (None, None) if row_map is None or not needs[1] else (x, token)
        ctx.save_for_backward(
            *offsets, row_map, *tokens, h if needs_dh or needs_dw2 else None, *saved1, *saved2
        )
        ctx.how, ctx.dtype = how, dtype
        ctx.shapes = (how.rows, *fc1_weight.shape[1:]), (how.rows, *fc2_weight.shape[1:])
        ctx.dtypes = (
            (x.dtype, fc1_weight.dtype, None if fc1_bias is None else fc1_bias.dtype),
            (dtype, fc2_weight.dtype, None if fc2_bias is None else fc2_bias.dtype),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        offs, plan, row_map, x, token, h, *rest = ctx.saved_tensors
        offsets = Offsets(offs, plan)
        saved1, saved2 = unpack(rest)
        how, needs = ctx.how, wanted_gradients(ctx)
        wanted = (any(needs[:3]), needs[3], needs[4])
        da, dw2, db2 = backward(
            dy, Prologue(how.activation, [] if h is None else [h], ctx.dtype), saved2, how.fc2,
            needs=wanted, shape=ctx.shapes[1], dtypes=ctx.dtypes[1], offsets=offsets,
        )  # fmt: skip
        if da is None:
            return None, None, None, dw2, db2, None, None, None
        wanted = needs[:3]
        dh = Prologue(f"{how.activation}_backward", [h, da], ctx.dtype)
        gradient = Gradient(dh, how.fc1, needs=wanted, offsets=offsets)
        # The largest tensors of the layer, of which the GEMMs need the cast alone.
        del h, da, dh, saved2, rest
        if not torch.compiler.is_compiling():
            ctx.maybe_clear_saved_tensors()
        source = None
        if row_map is not None:
            source = Prologue("permute", [] if x is None else [x, token], ctx.dtype)
        dx, dw1, db1 = backward(
            gradient, source, saved1, how.fc1,
            needs=wanted, shape=ctx.shapes[0], dtypes=ctx.dtypes[0], offsets=offsets,
        )  # fmt: skip
        if dx is not None and row_map is not None:
            dx = gather_rows_op(dx, row_map, dx.dtype)[0]
        return dx, dw1, db1, dw2, db2, None, None, None
