"""Attention of a few queries to a paged cache.  B sequences, H heads, G key/value heads, S queries.

The time is that of reading the cache once, so its keys are split among programs: each takes a part
of one sequence's keys and one key/value head, with all queries that share that head, and writes a
partial output in float32 with the largest score and the sum of exponentials. A second kernel merges
the parts. Sizes that change from step to step are read from memory, so that a CUDA graph of a step
serves all later ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.paged_attention import has_paged_attention
from float8lab.ops.reference import paged_attention as plain
from float8lab.ops.reference.attention import empty_by_token

_MOST_PARTS = 64
_LEAST_KEYS = 256
"""Keys of a part, at least, when a cache is full."""
_PROGRAMS_PER_MULTIPROCESSOR = 8
_KEYS, _KEYS_IN_FP8, _KEYS_OF_WIDE_VECTORS = 64, 128, 32
"""Keys of a tile; vectors are wide beyond 256 bytes in the dtype of queries."""
_WARPS, _STAGES = 4, 3
_FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}

LOG2_E = tl.constexpr(1.4426950408889634)
F16_RANGE = tl.constexpr(2.0**15)
"""What the largest value of a row becomes in float16, whose normal numbers end 2 ** 29 below."""


@triton.jit
def _load_vectors(
    x_ptr, scale_ptr, first, vectors, inside, D, FP8: tl.constexpr, TILE: tl.constexpr
):
    """Cached vectors from ``first`` on, FP8 ones as float16, and their scales: 1 without FP8."""
    columns = tl.arange(0, TILE)
    mask = inside[:, None] & (columns < D)[None, :]
    x = tl.load(x_ptr + first * D + vectors[:, None] * D + columns[None, :], mask=mask, other=0)
    scale = tl.full(vectors.shape, 1.0, tl.float32)
    if FP8 is not None:
        x = x.to(FP8, bitcast=True).to(tl.float16)
        scale = tl.load(scale_ptr + first + vectors, mask=inside, other=0.0)
    return x, scale


@triton.jit
def _scaled_queries(q, factor, FP8: tl.constexpr):
    """Queries in the dtype of the cache's tiles, and what to multiply their scores by."""
    factors = tl.full([q.shape[0]], factor, tl.float32)
    if FP8 is not None:
        # To bfloat16 FP8 takes four times as many instructions as to float16, for whose range
        # queries and probabilities are scaled.
        wide = q.to(tl.float32)
        size = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
        q = (wide * (1.0 / size * F16_RANGE)[:, None]).to(tl.float16)
        factors *= size / F16_RANGE
    return q, factors


@launched
def _attend_kernel(  # noqa: PLR0915
    q_ptr,  # [B, H, S, D]
    k_ptr,  # [pages, G, P, D]
    v_ptr,  # [pages, G, P, DV]
    k_scale_ptr,  # [pages, G, P] fp32, or any pointer
    v_scale_ptr,
    table_ptr,  # [rows, n] int32
    sequences_ptr,  # [3, B] int32
    out_ptr,  # [B, G, ROWS, PARTS, DV] fp32
    statistics_ptr,  # [2, B, G, ROWS, PARTS] fp32: the largest score, the sum of exponentials
    B, H, G, S, P, D, DV, PARTS, table_stride, sequences_stride, stride_qb, stride_qh, stride_qs,
    left, right, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, D_TILE: tl.constexpr, DV_TILE: tl.constexpr,
    WHOLE_TILES: tl.constexpr,  # none is in two pages
    FP8: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    batch, kv_head, part = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    sequence = tl.load(sequences_ptr + batch)
    before = tl.load(sequences_ptr + sequences_stride + batch)
    count = tl.load(sequences_ptr + 2 * sequences_stride + batch)
    length = before + count

    rows = tl.arange(0, ROWS)
    head, query = kv_head * (H // G) + rows // S, rows % S
    is_query = (rows < (H // G) * S) & (query < count)
    columns = tl.arange(0, D_TILE)
    q_ptrs = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_ptrs = (q_ptrs + query.to(tl.int64) * stride_qs)[:, None] + columns[None, :]
    q = tl.load(q_ptrs, mask=is_query[:, None] & (columns < D)[None, :], other=0.0)
    q, factors = _scaled_queries(q, tl.cast(scale, tl.float32) * LOG2_E, FP8)

    first = 0
    if left >= 0:
        first = tl.maximum(before - left, 0) // KEYS * KEYS
    tiles = tl.cdiv(tl.cdiv(length - first, KEYS), PARTS)
    first += part * tiles * KEYS
    end = tl.minimum(first + tiles * KEYS, length)

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    exp_sum = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DV_TILE], tl.float32)
    table_ptr += sequence.to(tl.int64) * table_stride
    for tile in range(first, end, KEYS):
        keys = tile + tl.arange(0, KEYS)
        inside = keys < end
        if WHOLE_TILES:
            page = tl.load(table_ptr + tile // P).to(tl.int64)
            start = (page * G + kv_head) * P + tile % P
            vectors = tl.arange(0, KEYS)
        else:
            page = tl.load(table_ptr + keys // P, mask=inside, other=0).to(tl.int64)
            start = kv_head.to(tl.int64) * P
            vectors = page * G * P + keys % P
        k, k_scale = _load_vectors(k_ptr, k_scale_ptr, start, vectors, inside, D, FP8, D_TILE)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s = s * factors[:, None] * k_scale[None, :]
        distance = (before + query)[:, None] - keys[None, :]
        seen = inside[None, :] & is_query[:, None]
        seen = seen & ((left < 0) | (distance <= left)) & ((right < 0) | (-distance <= right))
        s = tl.where(seen, s, -float("inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        shift = tl.where(new == -float("inf"), 0.0, new)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(largest - shift)
        exp_sum = exp_sum * rescale + tl.sum(p, 1)
        v, v_scale = _load_vectors(v_ptr, v_scale_ptr, start, vectors, inside, DV, FP8, DV_TILE)
        out = out * rescale[:, None]
        if FP8 is None:
            out += tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        else:
            top = tl.maximum(tl.max(v_scale, 0), 1e-30)
            p = (p * (v_scale * (1.0 / top * F16_RANGE))[None, :]).to(tl.float16)
            out += tl.dot(p, v) * (top / F16_RANGE)
        largest = new

    row = (tl.program_id(0).to(tl.int64) * ROWS + rows) * PARTS + part
    tl.store(statistics_ptr + row, largest)
    tl.store(statistics_ptr + B * G * ROWS * PARTS + row, exp_sum)
    columns = tl.arange(0, DV_TILE)
    tl.store(out_ptr + row[:, None] * DV + columns[None, :], out, mask=(columns < DV)[None, :])


@launched
def _merge_kernel(
    part_ptr,  # [B, G, ROWS, PARTS, DV] fp32
    statistics_ptr,  # [2, B, G, ROWS, PARTS] fp32
    out_ptr,  # [B, H, S, DV]
    B, H, G, S, DV, PARTS, stride_ob, stride_oh, stride_os,
    ROWS: tl.constexpr, PARTS_TILE: tl.constexpr, DV_TILE: tl.constexpr,
):  # fmt: skip
    batch, head, query = (
        tl.program_id(0) // (H * S), tl.program_id(0) // S % H, tl.program_id(0) % S,
    )  # fmt: skip
    group = batch.to(tl.int64) * G + head // (H // G)
    parts, columns = tl.arange(0, PARTS_TILE), tl.arange(0, DV_TILE)
    row = (group * ROWS + head % (H // G) * S + query) * PARTS + parts
    is_part = parts < PARTS
    largest = tl.load(statistics_ptr + row, mask=is_part, other=-float("inf"))
    exp_sum = tl.load(statistics_ptr + B * G * ROWS * PARTS + row, mask=is_part, other=0.0)
    top = tl.max(largest, 0)
    weight = tl.exp2(largest - tl.where(top == -float("inf"), 0.0, top))
    mask = is_part[:, None] & (columns < DV)[None, :]
    out = tl.load(part_ptr + row[:, None] * DV + columns[None, :], mask=mask, other=0.0)
    sums = tl.sum(weight * exp_sum, 0)
    out = tl.sum(out * weight[:, None], 0) / tl.where(sums == 0.0, 1.0, sums)
    out_ptr += batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + query * stride_os
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DV)


@_common.on_device_of_first
def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, table: Tensor,
    sequences: Tensor, left: int, right: int, scale: float,
) -> Tensor:  # fmt: skip
    (B, H, S, D), (_, G, P, DV) = q.shape, v.shape
    rows = H // G * S
    if not has_paged_attention(rows, D, DV) or q.dtype == torch.float64:
        return plain.paged_attention(
            q, k, v, k_scale, v_scale, table, sequences, left, right, scale
        )
    out = empty_by_token(q, (B, H, S, DV), q.dtype)
    if out.numel() == 0:
        return out
    rows = max(16, _common.next_power_of_2(rows))
    wanted = _common.ceil_div(
        _PROGRAMS_PER_MULTIPROCESSOR * _common.multiprocessors(q.device), B * G
    )
    parts = max(1, min(wanted, _common.ceil_div(table.shape[1] * P, _LEAST_KEYS), _MOST_PARTS))
    partial = torch.empty((B, G, rows, parts, DV), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, B, G, rows, parts), dtype=torch.float32, device=q.device)
    fp8 = _FP8.get(k.dtype)
    if k_scale is None or v_scale is None:
        k_scale = v_scale = statistics
    else:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    if q.stride(3) != 1:
        q = q.contiguous()
    d_tile, dv_tile = (max(16, _common.next_power_of_2(size)) for size in (D, DV))
    keys = _KEYS if fp8 is None else _KEYS_IN_FP8
    keys = _KEYS_OF_WIDE_VECTORS if max(d_tile, dv_tile) * q.element_size() > 256 else keys
    _attend_kernel[(B * G, parts)](
        q, k, v, k_scale, v_scale, table, sequences, partial, statistics, B, H, G, S, P, D, DV,
        parts, table.stride(0), sequences.stride(0), *q.stride()[:3], left, right, scale,
        ROWS=rows, KEYS=keys, D_TILE=d_tile, DV_TILE=dv_tile, WHOLE_TILES=P % keys == 0, FP8=fp8,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=_WARPS,
        num_stages=_STAGES,
    )  # fmt: skip
    _merge_kernel[(B * H * S,)](
        partial, statistics, out, B, H, G, S, DV, parts, *out.stride()[:3],
        ROWS=rows, PARTS_TILE=_common.next_power_of_2(parts), DV_TILE=dv_tile, num_warps=4,
    )  # fmt: skip
    return out
