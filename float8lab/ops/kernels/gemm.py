"""``y = a @ b.T`` of FP8 matrices through cuBLASLt.  M rows of a, N rows of b, K contraction.

``may_multiply`` in ``ops/gemm.py`` decides which operands the FP8 tensor cores multiply; all others
are dequantized and multiplied in high precision. ``hopper_gemm.py`` multiplies those blocks that
cuBLASLt lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.nn.functional import scaled_mm as torch_scaled_mm

from float8lab.ops import reference
from float8lab.ops.gemm import is_cublas_gemm, may_multiply
from float8lab.ops.kernels import cublaslt
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.dequantize import dequantize, transpose
from float8lab.ops.kernels.few_rows_gemm import multiply_few_rows
from float8lab.ops.kernels.grouped_gemm import grouped_mm
from float8lab.ops.kernels.hopper_gemm import multiply_tiles
from float8lab.ops.operand import BlockOperand
from float8lab.ops.reference import ALIGN, round_up

_SCALING_TYPE: dict[tuple[int, ...], ScalingType] = {
    (1, 32): ScalingType.BlockWise1x32,
    (1, 128): ScalingType.BlockWise1x128,
    (128, 128): ScalingType.BlockWise128x128,
}


@replayed
def scaled_mm(
    a: Tensor, a_scale: Tensor | None, a_block: Sequence[int], b: Tensor, b_scale: Tensor | None,
    b_block: Sequence[int], bias: Tensor | None, out_dtype: torch.dtype, fast_accum: bool,
    offs: Tensor | None = None, plan: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if offs is not None:
        return grouped_mm(
            a, a_scale, a_block, b, b_scale, b_block, bias, out_dtype, fast_accum, offs, plan
        )
    if a_scale is None or b_scale is None:
        return reference.scaled_mm(a, a_scale, (), b, b_scale, (), bias, out_dtype, fast_accum)
    left, right = BlockOperand(a, a_scale, a_block), BlockOperand(b, b_scale, b_block)
    if a.ndim == 3:
        return _mm_batch(left, right, out_dtype)
    return _mm(left, right, bias, out_dtype, fast_accum, None)


def scaled_mm_into(
    out: Tensor, a: Tensor, a_scale: Tensor, a_block: Sequence[int], b: Tensor, b_scale: Tensor,
    b_block: Sequence[int], bias: Tensor | None, fast_accum: bool,
) -> None:  # fmt: skip
    """Multiply into ``out``; copy there what needs padding or a second pass, or what torch made."""
    left, right = BlockOperand(a, a_scale, a_block), BlockOperand(b, b_scale, b_block)
    y = _mm(left, right, bias, out.dtype, fast_accum, out)
    if y is not out:
        out.copy_(y)


def _mm(
    left: BlockOperand, right: BlockOperand, bias: Tensor | None, out_dtype: torch.dtype,
    fast_accum: bool, into: Tensor | None,
) -> Tensor:  # fmt: skip
    """Multiply two matrices; the result is ``into`` if the GEMM can write there directly."""
    (a, a_scale, a_block), (b, b_scale, b_block) = left, right
    (M, K), N = a.shape, b.shape[0]
    if 0 in (M, N, K):
        out = a.new_zeros((M, N), dtype=out_dtype)
        return out if bias is None else out.add_(bias)
    if not may_multiply(a_block, b_block, a.device, a_dtype=a.dtype, b_dtype=b.dtype):
        return _dequantized(left, right, bias, out_dtype)

    # K and N must be multiples of ALIGN, and M of at least 4 where scales are per block. Callers
    # quantize with this alignment, so these helpers return their inputs.
    by_block = tuple(a_block) in _SCALING_TYPE
    rows, columns = round_up(M, ALIGN) if by_block else M, round_up(N, ALIGN)
    depth = round_up(K, 32 if tuple(a_block) == (1, 32) else ALIGN)
    a, b = _pad(a, rows, depth), _pad(b, columns, depth)
    bias = _pad_bias(bias, columns)
    if into is not None and not (into.shape == (rows, columns) and into.is_contiguous()):
        into = None
    if by_block:
        # The sums over each 128 of K are added in float32, even with ``fast_accum``.
        gemm_dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
        into = into if gemm_dtype == out_dtype else None
        padded = BlockOperand(a, a_scale, a_block), BlockOperand(b, b_scale, b_block)
        out = _multiply_blocks(*padded, gemm_dtype, into)
        out = (out if bias is None else out.add_(bias)).to(out_dtype)
    elif a_scale.numel() == b_scale.numel() == 1:
        # The scale of one matrix of a batch may be unaligned.
        a_scale, b_scale = (x if _aligned(x) else x.clone() for x in (a_scale, b_scale))
        out = _multiply(a, a_scale, b, b_scale, bias, out_dtype, fast_accum, into)
    else:
        a_scale, b_scale = _per_row(a_scale, a_block, rows), _per_row(b_scale, b_block, columns)
        out = _multiply_rows(a, a_scale, b, b_scale, bias, out_dtype, fast_accum, into)
    return out if out.shape == (M, N) else out[:M, :N].contiguous()


def _mm_batch(left: BlockOperand, right: BlockOperand, out_dtype: torch.dtype) -> Tensor:
    """Run one GEMM per matrix: torch._scaled_grouped_mm has only row scales and bfloat16."""
    (a, a_scale, a_block), (b, b_scale, b_block) = left, right
    options = (b_block, None, out_dtype, False)
    results = [
        scaled_mm(_by_row(x), x_scale, a_block, _by_row(y), y_scale, *options)
        for x, x_scale, y, y_scale in zip(a, a_scale, b, b_scale, strict=True)
    ]
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[1]), dtype=out_dtype)
    return torch.stack(results, out=out) if results else out


def _by_row(q: Tensor) -> Tensor:
    """Return the matrix with contiguous rows."""
    if q.t().is_contiguous() and not q.is_contiguous():
        return transpose(q.t(), 1)
    return q.contiguous()


def _dequantized(
    a: BlockOperand, b: BlockOperand, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    left, right = dequantize(*a, dtype), dequantize(*b, dtype).t()
    y = torch.mm(left, right) if bias is None else torch.addmm(bias.to(dtype), left, right)
    return y.to(out_dtype)


def _multiply(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype, fast_accum: bool, into: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Multiply matrices whose scales have one element each, or are [M, 1] and [N, 1]."""
    # cuBLASLt has no epilogue that adds a bias to float32.
    epilogue = None if bias is None or out_dtype == torch.float32 else bias.to(out_dtype)
    kind = ScalingType.TensorWise if b_scale.numel() == 1 else ScalingType.RowWise
    y = a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype) if into is None else into
    if not cublaslt.multiply(
        a, b, a_scale, b_scale, epilogue, y, scalings=(kind, kind), fast_accum=fast_accum
    ):
        b_scale = b_scale if b_scale.numel() == 1 else b_scale.t()
        y = torch._scaled_mm(
            a, b.t(), a_scale, b_scale, bias=epilogue, out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )  # fmt: skip
    return y if bias is None or epilogue is not None else y.add_(bias)


def _multiply_rows(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype, fast_accum: bool, into: Tensor | None,
) -> Tensor:  # fmt: skip
    """Multiply with scales [M, 1], [N, 1]; every GPU and version supports only bfloat16 output."""
    if (y := multiply_few_rows(a, b, a_scale, b_scale, bias, out_dtype, into)) is not None:
        return y
    if out_dtype == torch.bfloat16:
        return _multiply(a, a_scale, b, b_scale, bias, out_dtype, fast_accum, into)
    unit_scale = a_scale.new_ones(1)
    out = _multiply(a, unit_scale, b, unit_scale, None, torch.float32, fast_accum)
    out.mul_(a_scale).mul_(b_scale.t())
    return (out if bias is None else out.add_(bias)).to(out_dtype)


def _multiply_blocks(
    left: BlockOperand, right: BlockOperand, out_dtype: torch.dtype, into: Tensor | None
) -> Tensor:
    """Multiply blocks to bfloat16 or float32; our kernel does what cuBLASLt lacks."""
    (a, a_scale, a_block), (b, b_scale, b_block) = left, right
    rows, columns = a.shape[0], b.shape[0]
    if tuple(a_block) == (1, 32):
        kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
        in_tiles = reference.scale_in_tiles(a_scale), reference.scale_in_tiles(b_scale)
        return torch_scaled_mm(
            a, b.t(), in_tiles[0], kind, in_tiles[1], kind, order, order, output_dtype=out_dtype
        )
    y = a.new_empty((rows, columns), dtype=out_dtype) if into is None else into
    if not is_cublas_gemm(a_block, b_block, a.dtype, b.dtype):
        b_scale = b_scale if b_block[0] == 128 else _per_block(b_scale, b_block, columns)
        mode = "rows" if b_scale.shape[0] == columns else "block"
        if a_block[0] == 128:  # the kernel reads a scale for each row
            a_scale = a_scale.t().repeat_interleave(128, dim=1)[:, :rows].t()
        else:
            a_scale = _per_block(a_scale, a_block, rows)
        return multiply_tiles(mode, a, a_scale, b, b_scale, None, y)
    scales = _per_block(a_scale, a_block, rows), _per_block(b_scale, b_block, columns)
    kinds = _SCALING_TYPE[tuple(a_block)], _SCALING_TYPE[tuple(b_block)]
    if cublaslt.multiply(a, b, *scales, None, y, scalings=kinds, fast_accum=False):
        return y
    return torch_scaled_mm(
        a, b.t(), scales[0], kinds[0], scales[1], kinds[1], output_dtype=out_dtype
    )


# Helpers that give a tensor the form that cuBLASLt wants, or return it if it has this form.


def _pad(q: Tensor, rows: int, columns: int) -> Tensor:
    """Return ``q`` as a contiguous, aligned matrix, padded with zeros to [rows, columns]."""
    # Torch tells row-major from column-major by strides, which are arbitrary for a single row.
    if q.shape == (rows, columns) and q.stride() == (columns, 1) and _aligned(q):
        return q
    padded = torch.zeros((rows, columns), dtype=torch.uint8, device=q.device)
    padded[: q.shape[0], : q.shape[1]] = q.view(torch.uint8)
    return padded.view(q.dtype)


def _pad_bias(bias: Tensor | None, columns: int) -> Tensor | None:
    if bias is None or (bias.shape[0] == columns and bias.stride(0) == 1 and _aligned(bias)):
        return bias
    return torch.nn.functional.pad(bias, (0, columns - bias.shape[0]))


def _per_row(scale: Tensor, block: Sequence[int], rows: int) -> Tensor:
    """Return contiguous scales [rows, 1] for blocks that span K."""
    if scale.shape == (rows, 1) and scale.is_contiguous() and _aligned(scale):
        return scale
    if scale.numel() == 1:
        return scale.view(1, 1).repeat(rows, 1)
    if block[0] > 1:
        scale = scale.repeat_interleave(block[0], dim=0)[:rows]
    return torch.nn.functional.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0)


def _per_block(scale: Tensor, block: Sequence[int], rows: int) -> Tensor:
    """Return scales with contiguous columns: [rows, K / 128] for 1x128 blocks.

    For 128x128 blocks, return [K / 128, rows / 128] with K / 128 padded to a multiple of 4.
    Source: cuBLAS documentation, "Scaling Factors Layouts".
    """
    if block[0] == 1:
        if scale.stride() == (1, rows) and scale.shape[0] == rows and _aligned(scale):
            return scale
        padded = scale.new_ones((scale.shape[1], rows))
        padded[:, : scale.shape[0]] = scale.t()
        return padded.t()
    columns = round_up(scale.shape[1], 4)
    if scale.stride() == (columns, 1) and _aligned(scale):
        return scale.t()
    padded = scale.new_zeros((scale.shape[0], columns))
    padded[:, : scale.shape[1]] = scale
    return padded.t()


def _aligned(x: Tensor) -> bool:
    return x.data_ptr() % ALIGN == 0
