"""Handlers of ``mm`` and similar ops: they run FP8 GEMMs where the scales permit.

B, M, N, K as in ``ops.gemm``, and E experts.

A GEMM contracts K, so scales may change along K only in blocks: each operand must be scaled in full
rows of its [M, K] (or [N, K]) form, or in blocks along K. An ordinary tensor is quantized to match
the other operand; a pair that does not fit is dequantized.
"""

from __future__ import annotations

from types import NotImplementedType
from typing import cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F

from float8lab.formats import E8M0, HIGH_PRECISION_DTYPES, gemm_support, scales_by_column
from float8lab.ops import Groups, scaled_mm_op, transpose_op
from float8lab.ops.operand import BlockOperand
from float8lab.tensor.blocks import quantize_blocks, refine_scale, with_block
from float8lab.tensor.dispatch import implements, implements_composite
from float8lab.tensor.float8_tensor import PLAIN, Float8Tensor
from float8lab.tensor.operands import quantize

__all__: list[str] = []

aten = torch.ops.aten

_Block = tuple[int, int]
_Result = Tensor | NotImplementedType
"""The output of an FP8 GEMM, or ``NotImplemented`` if no FP8 GEMM takes the operands."""


def _gemm_block(x: Tensor, transposed: bool) -> _Block | None:
    """Return the block of a matrix, or of its transpose, for a GEMM; None for an ordinary tensor.
    Blocks of several full rows count as single rows."""
    if not isinstance(x, Float8Tensor):
        return None
    *_, rows, columns = x.spec.block
    if transposed:
        rows, columns = columns, rows
    return (1, -1) if columns == -1 and rows > 1 else (rows, columns)


def _gemm_blocks(a: Tensor, b: Tensor, transposed: bool) -> tuple[_Block, _Block] | None:
    """Return the blocks of two operands in [rows, K] form, or None if no FP8 GEMM takes them.
    An ordinary tensor gets a block that matches the other operand's. GPUs take 1x32 blocks only
    with e8m0 scales. ``transposed`` says that ``b`` is given as [K, N]."""
    if a.dtype not in HIGH_PRECISION_DTYPES or a.dtype != b.dtype:
        return None
    block_a, block_b = _gemm_block(a, False), _gemm_block(b, transposed)
    block_a = block_a or _partner_block(block_b)
    block_b = block_b or _partner_block(block_a)
    if block_a is None or block_b is None or gemm_support(block_a, block_b) is None:
        return None
    is_e8m0 = all(x.spec.scale_dtype == E8M0 for x in (a, b) if isinstance(x, Float8Tensor))
    return None if block_a == (1, 32) and not is_e8m0 else (block_a, block_b)


def _partner_block(block: _Block | None) -> _Block | None:
    """Return the block in which to quantize an ordinary tensor for an operand in ``block``."""
    return (1, 128) if block == (128, 128) else block


def _operand(x: Tensor, block: _Block, partner: Tensor, transposed: bool) -> BlockOperand:
    """Make an operand in [rows, K] or [B, rows, K] form; a matrix gets the layout GEMMs read."""
    batch = x.ndim - 2
    if not isinstance(x, Float8Tensor):
        stored = cast("Float8Tensor", partner)  # at least one of the two is a Float8Tensor
        spec = with_block(stored.spec, (*(1,) * batch, *block))
        q, scale, _ = quantize_blocks(x.mT if transposed else x, spec)
        return BlockOperand(q, scale, block)
    q, scale, rows = x.qdata, x.scale, x.spec.block[batch + transposed]
    if batch:
        scale = refine_scale(scale, x.shape[0], x.spec.block[0], 1, 0)
    if transposed:
        q, scale = q.mT, scale.mT
    if rows != block[0]:
        scale = refine_scale(scale, q.shape[batch], rows, block[0], batch)
    if batch:
        return BlockOperand(q, scale, block)
    if not q.is_contiguous():
        q = transpose_op(q.t(), 1) if q.t().is_contiguous() else q.contiguous()
    by_column = scales_by_column(block)
    return BlockOperand(q, scale.t().contiguous().t() if by_column else scale.contiguous(), block)


def _fp8_mm(
    a: Tensor, b: Tensor, bias: Tensor | None = None, *, transposed: bool = False, ndim: int = 2
) -> _Result:
    """Compute ``a @ b.T + bias`` in FP8, or ``a @ b + bias`` if transposed, for ``ndim`` axes."""
    blocks = None if isinstance(bias, Float8Tensor) else _gemm_blocks(a, b, transposed)
    if blocks is None or not a.ndim == b.ndim == ndim:  # torch raises for wrong dimensions
        return NotImplemented
    left, right = _operand(a, blocks[0], b, False), _operand(b, blocks[1], a, transposed)
    return scaled_mm_op(*left, *right, bias, a.dtype, False)


@implements_composite(F.linear, aten.linear.default)
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
    """Run the GEMM without splitting the op, which torch does only for autograd or autocast."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled(input.device.type):
        return NotImplemented
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if not all(_needs_no_autograd(x) and x.device == input.device for x in tensors):
        return NotImplemented
    if [x.ndim for x in tensors] != [2, 2, 1][: len(tensors)] or input.shape[1] != weight.shape[1]:
        return NotImplemented  # torch raises for these sizes
    return _fp8_mm(input, weight, bias)


def _needs_no_autograd(x: Tensor) -> bool:
    """Whether x needs no gradient and is neither a view that shares blocks nor a subclass."""
    if (x._window is not None) if isinstance(x, Float8Tensor) else (type(x) not in PLAIN):
        return False
    return not (torch.is_grad_enabled() and x.requires_grad)


@implements(aten.mm.default, aten.bmm.default)
def _mm(op: OpOverload, a: Tensor, b: Tensor) -> _Result:
    return _fp8_mm(a, b, transposed=True, ndim=3 if op is aten.bmm.default else 2)


@implements(aten.mv.default)
def _mv(op: OpOverload, a: Tensor, v: Tensor) -> _Result:
    out = _fp8_mm(a, v.unsqueeze(0))
    return out.squeeze(1) if isinstance(out, Tensor) else out


@implements(aten.addmm.default)
def _addmm(
    op: OpOverload, bias: Tensor, a: Tensor, b: Tensor, *, beta: complex = 1, alpha: complex = 1
) -> _Result:
    is_bias = bias.ndim == 1 and beta == 1 and alpha == 1
    return _fp8_mm(a, b, bias, transposed=True) if is_bias else NotImplemented


@implements(aten.baddbmm.default)
def _baddbmm(
    op: OpOverload, bias: Tensor, a: Tensor, b: Tensor, *, beta: complex = 1, alpha: complex = 1
) -> _Result:
    is_plain = not isinstance(bias, Float8Tensor)
    out = _fp8_mm(a, b, transposed=True, ndim=3) if is_plain else NotImplemented
    if not isinstance(out, Tensor):
        return out
    scaled = torch.mul(out, alpha)
    return torch.add(scaled, bias, alpha=beta) if beta else scaled


@implements(aten._grouped_mm.default)
def _grouped_mm(
    op: OpOverload, a: Tensor, b: Tensor, offs: Tensor | None = None,
    bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
) -> _Result:  # fmt: skip
    by_rows = (a.ndim, b.ndim) == (2, 3) and bias is None and out_dtype in (None, a.dtype)
    if offs is None or not by_rows or (a.shape[1], offs.shape) != (b.shape[1], b.shape[:1]):
        return NotImplemented  # torch raises for sizes that do not fit
    if (blocks := _gemm_blocks(a, b, True)) is None:
        return NotImplemented
    (rows, columns), weight_block = blocks
    block = min(rows, 1), columns  # an expert's rows may begin inside a block of several rows
    right = _operand(b, weight_block, a, True)
    if isinstance(a, Float8Tensor):
        left = _operand(a, block, b, False)
    else:
        spec = with_block(cast("Float8Tensor", b).spec, block)
        q, scale = quantize(Groups("", (a,), a.dtype, offs), spec).rowwise
        left = BlockOperand(q[:, : a.shape[1]], scale, block)
    return scaled_mm_op(*left, *right, None, a.dtype, False, offs)
