"""``y = a @ b.T`` in FP8 of a few rows, with a scale a row.  M rows of a, N of b, K contraction.

Such a GEMM takes as long as reading b. For row scales cuBLASLt only has tiles of 128 x 128, and
these are too few to read at the memory's rate: 32 for 4096 rows of b.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from float8lab.ops.declare import capability_of
from float8lab.ops.kernels._launch import launched

_MOST_ROWS = 32
"""With more rows, Triton uses Hopper's instructions whose sums of FP8 data are less precise."""
_COLUMNS = 32


@launched
def _few_rows_kernel(
    a_ptr,  # [M, K] fp8
    b_ptr,  # [N, K] fp8
    a_scale_ptr,  # [M] fp32
    b_scale_ptr,  # [N] fp32
    bias_ptr,  # None or [N]
    out_ptr,  # [M, N]
    M, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    rows, depth = tl.arange(0, TILE_M), tl.arange(0, TILE_K)
    columns = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    inside = rows < M
    a_ptrs = a_ptr + rows[:, None] * K + depth[None, :]
    b_ptrs = b_ptr + columns.to(tl.int64)[None, :] * K + depth[:, None]
    y = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, K, TILE_K):
        a = tl.load(a_ptrs + start, mask=inside[:, None], other=0.0)
        y = tl.dot(a, tl.load(b_ptrs + start), y)
    y *= tl.load(a_scale_ptr + rows, mask=inside, other=0.0)[:, None]
    y *= tl.load(b_scale_ptr + columns)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns).to(tl.float32)[None, :]
    offsets = rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out_ptr + offsets, y.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def multiply_few_rows(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype, into: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """Compute ``a @ b.T + bias`` for aligned, contiguous rows; None: cuBLASLt has to do it.

    Args:
        a_scale: contiguous ``[M, 1]``; ``b_scale`` is ``[N, 1]``.
    """
    (M, K), N = a.shape, b.shape[0]
    fits = M <= _MOST_ROWS and N % _COLUMNS == K % 256 == 0 and a.dtype == b.dtype
    if not fits or capability_of(a.device)[0] != 9:  # it was only tried on Hopper
        return None
    out = a.new_empty((M, N), dtype=out_dtype) if into is None else into
    # Where a multiprocessor has several programs, each program needs fewer loads in flight.
    depth, stages = (256, 6) if N <= 8192 else (128, 4)
    _few_rows_kernel[(N // _COLUMNS,)](
        a, b, a_scale, b_scale, bias, out, M, N, K, TILE_M=16 if M <= 16 else 32,
        TILE_N=_COLUMNS, TILE_K=depth, enable_fp_fusion=False, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out
