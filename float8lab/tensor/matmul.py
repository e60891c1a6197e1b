"""Handlers of matrix products: FP8 GEMMs where the scales permit.  B, M, N, K as in ``ops.gemm``,
and E experts.

A GEMM contracts K, so no scale may change along it except blockwise: each operand must be scaled
in whole rows of its [M, K] (or [N, K]) form, or in blocks along K. An ordinary tensor is quantized
to match its partner; a pair that does not fit is dequantized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from float8lab.formats import HIGH_PRECISION_DTYPES, gemm_support, scales_by_column
from float8lab.ops import cast_groups_op, cast_op, grouped_mm_op, scaled_mm_op, transpose_op
from float8lab.tensor.blocks import quantize_blocks, refine_scale
from float8lab.tensor.dispatch import implements, implements_whole, run_fallback
from float8lab.tensor.float8_tensor import PLAIN, Float8Tensor

__all__: list[str] = []

aten = torch.ops.aten

_Block = tuple[int, int]


def _gemm_block(x: Any, turned: bool) -> _Block | None:
    """The block of a matrix, or its transpose, as a GEMM takes it; None of an ordinary tensor.

    Blocks of several whole rows count as single rows.
    """
    if not isinstance(x, Float8Tensor):
        return None
    *_, rows, columns = x.spec.block
    if turned:
        rows, columns = columns, rows
    return (1, -1) if columns == -1 and rows > 1 else (rows, columns)


def _gemm_blocks(a: Any, b: Any, turned: bool) -> tuple[_Block, _Block] | None:
    """The blocks of two operands in [rows, K] form, or None if no FP8 GEMM takes the two.

    An ordinary tensor is to be quantized in blocks that match its partner's. ``turned`` says that
    ``b`` is given as [K, N].
    """
    if a.dtype not in HIGH_PRECISION_DTYPES or a.dtype != b.dtype:
        return None
    block_a, block_b = _gemm_block(a, False), _gemm_block(b, turned)
    partner = block_b if block_a is None else block_a
    assert partner is not None, "one operand at least is a Float8Tensor"
    partner = (1, 128) if partner == (128, 128) else partner
    first, second = block_a or partner, block_b or partner
    return None if gemm_support(first, second) is None else (first, second)


def _rows_by_k(x: Any, block: _Block, partner: Any, turned: bool) -> tuple[Tensor, Tensor, _Block]:
    """An operand in [rows, K] form: contiguous data, scales as GEMMs read them, block."""
    if not isinstance(x, Float8Tensor):
        spec, x = partner.spec, x.t() if turned else x
        q, scale, *_ = cast_op("", (x,), x.dtype, spec.fp8_dtype, block, spec.scale_rule)
        return q, scale, block
    q, scale, rows = x.qdata, x.scale, x.spec.block[turned]
    if turned:
        q, scale = q.t(), scale.t()
    if not q.is_contiguous():
        q = transpose_op(q.t(), 1) if q.t().is_contiguous() else q.contiguous()
    if rows != block[0]:
        scale = refine_scale(scale, q.shape[0], rows, block[0], 0)
    by_column = scales_by_column(block)
    return q, scale.t().contiguous().t() if by_column else scale.contiguous(), block


def _product(a: Any, b: Any, bias: Tensor | None = None, *, turned: bool = False) -> Tensor | None:
    """``a @ b.T + bias`` in FP8, or ``a @ b + bias`` if ``turned``; None if no FP8 GEMM does it."""
    blocks = None if isinstance(bias, Float8Tensor) else _gemm_blocks(a, b, turned)
    if blocks is None:
        return None
    left = _rows_by_k(a, blocks[0], b, False)
    right = _rows_by_k(b, blocks[1], a, turned)
    out: Tensor = scaled_mm_op(*left, *right, bias, a.dtype, False)
    return out


@implements_whole(F.linear, aten.linear.default)
def _linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """The product at once, where torch would split it only for autograd or autocast."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    learns = torch.is_grad_enabled()
    for x in (input, weight) if bias is None else (input, weight, bias):
        if (x._window is not None) if isinstance(x, Float8Tensor) else (type(x) not in PLAIN):
            return NotImplemented
        if (
            x.ndim != 1 + (x is not bias)
            or x.device != input.device
            or (learns and x.requires_grad)
        ):
            return NotImplemented
    if input.shape[1] != weight.shape[1]:
        return NotImplemented  # torch has a message
    out = _product(input, weight, bias)
    return NotImplemented if out is None else out


@implements(aten.mm.default)
def _mm(op: Any, a: Any, b: Any) -> Any:
    out = _product(a, b, turned=True)
    return run_fallback(Float8Tensor, op, (a, b), {}) if out is None else out


@implements(aten.mv.default)
def _mv(op: Any, a: Any, v: Any) -> Any:
    out = _product(a, v.unsqueeze(0))
    return run_fallback(Float8Tensor, op, (a, v), {}) if out is None else out.squeeze(1)


@implements(aten.addmm.default)
def _addmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    is_bias = bias.ndim == 1 and beta == 1 and alpha == 1
    out = _product(a, b, bias, turned=True) if is_bias else None
    if out is None:
        kwargs = {"beta": beta, "alpha": alpha}
        return run_fallback(Float8Tensor, op, (bias, a, b), kwargs)
    return out


def _matrices(x: Any, block: _Block, partner: Any, turned: bool) -> tuple[Tensor, Tensor, _Block]:
    """An operand in [B, rows, K] form: data, scales of each matrix, block of a matrix."""
    if not isinstance(x, Float8Tensor):
        each = replace(partner.spec, block=(1, *block))
        q, scale, _ = quantize_blocks(x.mT if turned else x, each)
        return q, scale, block
    scale = refine_scale(x.scale, x.shape[0], x.spec.block[0], 1, 0)
    q, scale, rows = x.qdata, scale, x.spec.block[1 + turned]
    if turned:
        q, scale = q.mT, scale.mT
    return q, refine_scale(scale, q.shape[1], rows, block[0], 1), block


def _batch(a: Any, b: Any) -> Tensor | None:
    """``a @ b``, each product in FP8, or None if they cannot be."""
    blocks = _gemm_blocks(a, b, True)
    if blocks is None:
        return None
    operands = (*_matrices(a, blocks[0], b, False), *_matrices(b, blocks[1], a, True))
    out: Tensor = scaled_mm_op(*operands, None, a.dtype, False)
    return out


@implements(aten.bmm.default)
def _bmm(op: Any, a: Any, b: Any) -> Any:
    out = _batch(a, b)
    return run_fallback(Float8Tensor, op, (a, b), {}) if out is None else out


@implements(aten.baddbmm.default)
def _baddbmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    out = None if isinstance(bias, Float8Tensor) else _batch(a, b)
    if out is None:
        return run_fallback(Float8Tensor, op, (bias, a, b), {"beta": beta, "alpha": alpha})
    return torch.add(alpha * out, bias, alpha=beta) if beta else alpha * out


def _groups(a: Any, b: Any, offs: Tensor) -> Tensor | None:
    """``a @ b[e]`` for the rows of each expert, in FP8, or None if that cannot be."""
    blocks = _gemm_blocks(a, b, True)
    if blocks is None:
        return None
    (high, wide), of_experts = blocks
    block = min(high, 1), wide  # an expert's rows may begin anywhere in a block of several
    right = _matrices(b, of_experts, a, True)
    if isinstance(a, Float8Tensor):
        left = _rows_by_k(a, block, b, False)
    else:
        spec = b.spec
        q, scale, *_ = cast_groups_op(
            "", (a,), a.dtype, offs, spec.fp8_dtype, block, spec.scale_rule
        )
        left = q[:, : a.shape[1]], scale, block
    out: Tensor = grouped_mm_op(*left, *right, None, offs, a.dtype, False)
    return out


if hasattr(aten, "_grouped_mm"):  # not every torch has it

    @implements(aten._grouped_mm.default)
    def _grouped_mm(
        op: Any, a: Any, b: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Any:
        by_rows = (a.ndim, b.ndim) == (2, 3) and offs is not None and bias is None
        # Torch has messages for sizes that do not fit.
        fits = by_rows and (a.shape[1], offs.shape) == (b.shape[1], b.shape[:1])
        out = _groups(a, b, offs) if fits and out_dtype in (None, a.dtype) else None
        if out is None:
            kwargs = {"offs": offs, "bias": bias, "out_dtype": out_dtype}
            return run_fallback(Float8Tensor, op, (a, b), kwargs)
        return out
