"""Read FP8 matrices on the GPU: transpose their bytes, dequantize them.  M rows, K columns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl
from torch import Tensor

from float8lab.ops import reference
from float8lab.ops.declare import casts_by_kernel
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import round_up

_BYTES = _common.Tile(rows=64, columns=64, warps=4)


@launched
def _transpose_kernel(
    q_ptr,  # [M, K] one byte
    q_t_ptr,  # [COLUMNS, ROWS] one byte
    M, K, ROWS, COLUMNS, stride_qm, stride_qk,
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    _, _, rows, columns = _common.tile_indices(COLUMNS, TILE_M, TILE_K)
    q = _common.load_tile(q_ptr, rows, columns, M, K, stride_qm, stride_qk)
    _common.store_tile(q_t_ptr, tl.trans(q), columns, rows, COLUMNS, ROWS)


@replayed
def transpose(q: Tensor, align: int = 1, event: Tensor | None = None) -> Tensor:
    if q.ndim == 3:
        E, M, K = q.shape
        return transpose(q.reshape(E * M, K)).view(K, E, M).transpose(0, 1)
    rows, columns = round_up(q.shape[0], align), round_up(q.shape[1], align)
    q_t = q.new_empty((columns, rows))
    if q.numel() == 0:
        return q_t
    _transpose_kernel[_common.grid_of((rows, columns), _BYTES)](
        q.view(torch.uint8), q_t.view(torch.uint8), *q.shape, rows, columns, *q.stride(),
        **_BYTES.constants,
    )  # fmt: skip
    return q_t


@launched
def _dequantize_kernel(
    q_ptr,  # [M, K] fp8
    scale_ptr,  # one per block of BM x BK, or broadcast, fp32
    y_ptr,  # [M, K] any float
    M, K, scale_rows, scale_columns, stride_qm, stride_qk, stride_sm, stride_sk,
    BM: tl.constexpr, BK: tl.constexpr,  # 0 is the whole dimension
    TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile_m, tile_k, rows, columns = _common.tile_indices(K, TILE_M, TILE_K)
    q = _common.load_tile(q_ptr, rows, columns, M, K, stride_qm, stride_qk)
    m = _common.block_index(tile_m * TILE_M, rows, BM, TILE_M)
    k = _common.block_index(tile_k * TILE_K, columns, BK, TILE_K)
    scale = _common.load_tile(scale_ptr, m, k, scale_rows, scale_columns, stride_sm, stride_sk)
    y = (q.to(tl.float32) * scale).to(y_ptr.dtype.element_ty)
    _common.store_tile(y_ptr, y, rows, columns, M, K)


@replayed
def dequantize(q: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    if not casts_by_kernel(q.device):
        return reference.dequantize(q, scale, block, dtype)
    y = q.new_empty(q.shape, dtype=dtype)
    if q.numel() == 0:
        return y
    scale, block = _common.broadcast_scale(scale, block)
    _dequantize_kernel[_common.grid_of(q.shape, _common.TILE)](
        q, scale, y, *q.shape, *scale.shape, *q.stride(), *scale.stride(),
        BM=block[0], BK=block[1], **_common.TILE.constants,
    )  # fmt: skip
    return y
