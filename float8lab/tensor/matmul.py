"""Handlers of matrix products: FP8 GEMMs where the scales permit.  B, M, N, K as in ``ops.gemm``.

A GEMM contracts K, so no scale may change along it except blockwise: each operand must be scaled
in whole rows of its [M, K] (or [N, K]) form, or in blocks along K. An ordinary tensor is quantized
to match its partner; a pair that does not fit is dequantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from float8lab.formats import HIGH_PRECISION_DTYPES, Float8Spec
from float8lab.ops import cast_op, scaled_mm_op, transpose_op
from float8lab.tensor.blocks import quantize_blocks, refine_scale
from float8lab.tensor.dispatch import implements, run_fallback
from float8lab.tensor.float8_tensor import Float8Tensor

__all__: list[str] = []

aten = torch.ops.aten

# Blocks of two operands in [rows, K] form that one FP8 GEMM takes: scales constant along K, or
# blocks of equal length along it.
_WHOLE = ((-1, -1), (1, -1))
_BLOCKS: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    (1, 128): ((1, 128), (128, 128)),
    (128, 128): ((1, 128),),
    (1, 32): ((1, 32),),
}


def _gemm_block(block: tuple[int, ...]) -> tuple[int, ...]:
    """A matrix's block as a GEMM takes it: blocks of several whole rows count as single rows."""
    *_, rows, columns = block
    return (1, -1) if columns == -1 and rows > 1 else (rows, columns)


def _compatible(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return (a in _WHOLE and b in _WHOLE) or b in _BLOCKS.get(a, ())


def _partner_spec(spec: Float8Spec) -> Float8Spec:
    """How to quantize an ordinary tensor that meets one of ``spec``."""
    block = (1, 128) if spec.block[-2:] == (128, 128) else _gemm_block(spec.block)
    return Float8Spec(spec.fp8_dtype, block, spec.scale_rule)


def _rows_by_k(x: Any, partner: Float8Spec) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """An operand in [rows, K] form: contiguous data, scales as GEMMs read them, block."""
    if not isinstance(x, Float8Tensor):
        spec = _partner_spec(partner)
        q, scale, *_ = cast_op("", (x,), x.dtype, spec.fp8_dtype, spec.block, spec.scale_rule)
        return q, scale, spec.block
    q, scale, block = x.qdata, x.scale, _gemm_block(x.spec.block)
    if not q.is_contiguous():
        q = transpose_op(q.t(), 1) if q.t().is_contiguous() else q.contiguous()
    scale = refine_scale(scale, x.shape[0], x.spec.block[0], block[0], 0)
    by_column = block[0] == 1 and block[1] > 1
    return q, scale.t().contiguous().t() if by_column else scale.contiguous(), block


def _matching_spec(a: Any, b_t: Any, bias: Tensor | None) -> Float8Spec | None:
    """The spec of the first Float8Tensor, or None if the two cannot meet in one FP8 GEMM."""
    specs = [x.spec for x in (a, b_t) if isinstance(x, Float8Tensor)]
    if not specs or isinstance(bias, Float8Tensor):
        return None
    if a.dtype not in HIGH_PRECISION_DTYPES or a.dtype != b_t.dtype:
        return None
    first = _gemm_block(specs[0].block)
    second = _gemm_block(specs[1].block) if len(specs) == 2 else _partner_spec(specs[0]).block
    return specs[0] if _compatible(first, second) else None


def _product(a: Any, b_t: Any, bias: Tensor | None) -> Tensor | None:
    """``a @ b_t.T + bias`` in FP8, or None if the two cannot meet in one FP8 GEMM."""
    spec = _matching_spec(a, b_t, bias)
    if spec is None:
        return None
    qa, scale_a, block_a = _rows_by_k(a, spec)
    qb, scale_b, block_b = _rows_by_k(b_t, spec)
    out: Tensor = scaled_mm_op(
        qa, scale_a, block_a, qb, scale_b, block_b, bias, a.dtype, False
    )  # fmt: skip
    return out


@implements(aten.mm.default)
def _mm(op: Any, a: Any, b: Any) -> Any:
    out = _product(a, b.t(), None)
    return run_fallback(Float8Tensor, op, (a, b), {}) if out is None else out


@implements(aten.mv.default)
def _mv(op: Any, a: Any, v: Any) -> Any:
    out = _product(a, v.unsqueeze(0), None)
    return run_fallback(Float8Tensor, op, (a, v), {}) if out is None else out.squeeze(1)


@implements(aten.addmm.default)
def _addmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    is_bias = bias.ndim == 1 and beta == 1 and alpha == 1
    out = _product(a, b.t(), bias) if is_bias else None
    if out is None:
        kwargs = {"beta": beta, "alpha": alpha}
        return run_fallback(Float8Tensor, op, (bias, a, b), kwargs)
    return out


def _batch_operand(x: Any, partner: Float8Spec) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """An operand in [B, rows, K] form: data, scales of each matrix, block of a matrix."""
    if not isinstance(x, Float8Tensor):
        spec = _partner_spec(partner)
        each = Float8Spec(spec.fp8_dtype, (1, *spec.block), spec.scale_rule)
        q, scale, _ = quantize_blocks(x, each)
        return q, scale, spec.block
    block = _gemm_block(x.spec.block)
    scale = refine_scale(x.scale, x.shape[0], x.spec.block[0], 1, 0)
    return x.qdata, refine_scale(scale, x.shape[1], x.spec.block[1], block[0], 1), block


def _batch(a: Any, b_t: Any) -> Tensor | None:
    """``a @ b_t.mT``, each product in FP8, or None if they cannot be."""
    spec = _matching_spec(a, b_t, None)
    if spec is None:
        return None
    operands = (*_batch_operand(a, spec), *_batch_operand(b_t, spec))
    out: Tensor = scaled_mm_op(*operands, None, a.dtype, False)
    return out


@implements(aten.bmm.default)
def _bmm(op: Any, a: Any, b: Any) -> Any:
    out = _batch(a, b.transpose(1, 2))
    return run_fallback(Float8Tensor, op, (a, b), {}) if out is None else out


@implements(aten.baddbmm.default)
def _baddbmm(op: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    out = None if isinstance(bias, Float8Tensor) else _batch(a, b.transpose(1, 2))
    if out is None:
        return run_fallback(Float8Tensor, op, (bias, a, b), {"beta": beta, "alpha": alpha})
    return torch.add(alpha * out, bias, alpha=beta) if beta else alpha * out
