"""Attention with a paged cache.  B sequences, H heads, G key/value heads, S queries of each.

Attention of a few queries takes the time of reading the cache once, so its keys are split among
programs. A program takes a split of one sequence's keys and one key/value head, with all queries
that share this head, and writes a partial output in float32, the largest score and the sum of
exponentials. A second kernel merges the splits. A third kernel casts keys or values to the cache.

Sizes and positions that change from step to step are read from memory, so that a CUDA graph of one
step serves all later steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels import _common
from float8lab.ops.kernels._common import INTERPRETED
from float8lab.ops.kernels._launch import launched
from float8lab.ops.paged_attention import has_paged_attention
from float8lab.ops.reference import paged_attention as reference
from float8lab.ops.reference.attention import empty_by_token

_MOST_SPLITS = 64
_LEAST_KEYS = 256
"""The fewest keys of a split when a cache is full."""
_PROGRAMS_PER_MULTIPROCESSOR = 8
_KEYS, _KEYS_OF_WIDE_VECTORS = 64, 32
"""Keys of a tile; wide vectors have more than 256 bytes in the dtype of queries."""
_WARPS, _WARPS_IN_FP8, _STAGES = 4, 2, 3
_UNLIMITED = 2**30
"""The positions that a query sees on one side, where a window has no limit there."""
_PAIRS_TO_FLOAT16 = """{ .reg .b32 word; .reg .b16 even, odd;
    prmt.b32 word, $2, 0, 0x3120;
    mov.b32 {even, odd}, word;
    cvt.rn.f16x2.FORMATx2 $0, even;
    cvt.rn.f16x2.FORMATx2 $1, odd; }"""

PAIRS_OF_E4M3 = tl.constexpr(_PAIRS_TO_FLOAT16.replace("FORMAT", "e4m3"))
PAIRS_OF_E5M2 = tl.constexpr(_PAIRS_TO_FLOAT16.replace("FORMAT", "e5m2"))
LOG2_E = tl.constexpr(1.4426950408889634)
F16_RANGE = tl.constexpr(2.0**15)
"""The largest value of a scaled row in float16, whose normal numbers reach 2 ** 29 below it."""


@triton.jit
def _load_vectors(x_ptr, vectors, inside, D: tl.constexpr, TILE: tl.constexpr, FP8: tl.constexpr):
    """Load cached vectors; even and odd elements of FP8 vectors come separately, as float16."""
    # For the second GEMM, the tensor cores need keys, not elements, as neighbours. The instruction
    # that transposes moves two bytes at once, so FP8 elements stay paired until they are widened.
    PER_WORD: tl.constexpr = 1 if FP8 is None else 2
    columns = tl.arange(0, TILE // PER_WORD)
    mask = inside[:, None] & (columns < D // PER_WORD)[None, :]
    x = tl.load(x_ptr + vectors[:, None] * (D // PER_WORD) + columns[None, :], mask=mask, other=0)
    odd = x
    if FP8 is not None and INTERPRETED:
        odd = (x >> 8).to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
        x = x.to(tl.uint8).to(FP8, bitcast=True).to(tl.float16)
    elif FP8 is not None:
        CODE: tl.constexpr = PAIRS_OF_E4M3 if tl.float8e4nv == FP8 else PAIRS_OF_E5M2
        x, odd = tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    return x, odd


@triton.jit
def _scaled_queries(q, factor, FP8: tl.constexpr):
    """Return queries in the form of the cache's tiles, and the factors of their scores."""
    factors = tl.full([q.shape[0]], factor, tl.float32)
    odd = q
    if FP8 is not None:
        # Converting FP8 to bfloat16 takes four times as many instructions as to float16, so queries
        # and probabilities are scaled to the range of float16.
        wide = q.to(tl.float32)
        size = tl.maximum(tl.max(tl.abs(wide), 1), 1e-30)
        wide *= (1.0 / size * F16_RANGE)[:, None]
        q, odd = tl.split(wide.to(tl.float16).reshape(q.shape[0], q.shape[1] // 2, 2))
        factors *= size / F16_RANGE
    return q, odd, factors


@launched
def _attend_kernel(  # noqa: PLR0915
    q_ptr,  # [B, H, S, D]
    k_ptr,  # [pages, G, P, D], FP8 as int16
    v_ptr,  # [pages, G, P, DV]
    k_scale_ptr,  # [pages, G, P] fp32, None without FP8
    v_scale_ptr,
    table_ptr,  # [rows, n] int32
    sequences_ptr,  # [3, B] int32
    out_ptr,  # [B, H, S, SPLITS, DV] fp32
    statistics_ptr,  # [2, B, H, S, SPLITS] fp32: the largest score, the sum of exponentials
    H, G, S, P, QUERIES, SPLITS, table_stride, sequences_stride, stride_qb, stride_qh, stride_qs,
    left, right, scale,
    D: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D_TILE: tl.constexpr, DV_TILE: tl.constexpr,
    TILES_IN_PAGES: tl.constexpr,  # no tile is in two pages
    FP8: tl.constexpr,
):  # fmt: skip
    batch, kv_head, split = tl.program_id(0) // G, tl.program_id(0) % G, tl.program_id(1)
    sequence = tl.load(sequences_ptr + batch)
    cached = tl.load(sequences_ptr + sequences_stride + batch)
    length = cached + tl.load(sequences_ptr + 2 * sequences_stride + batch)

    rows = tl.arange(0, ROWS)
    is_row = rows < (H // G) * S
    head, query = kv_head * (H // G) + rows // S, rows % S
    columns = tl.arange(0, D_TILE)
    q_ptrs = q_ptr + batch.to(tl.int64) * stride_qb + head.to(tl.int64) * stride_qh
    q_ptrs = (q_ptrs + query.to(tl.int64) * stride_qs)[:, None] + columns[None, :]
    q = tl.load(q_ptrs, mask=is_row[:, None] & (columns < D)[None, :], other=0.0)
    q, q_odd, factors = _scaled_queries(q, tl.cast(scale, tl.float32) * LOG2_E, FP8)

    first = tl.maximum(cached - left, 0) // KEYS * KEYS
    tiles = tl.cdiv(tl.cdiv(length - first, KEYS), SPLITS)
    first += split * tiles * KEYS
    end = tl.minimum(first + tiles * KEYS, length)
    # The keys that a query sees; a query after the end of its sequence sees none.
    lowest = cached + query - left
    highest = tl.minimum(cached + query + right + 1, tl.where(cached + query < length, end, 0))

    largest = tl.full([ROWS], -float("inf"), tl.float32)
    exp_sum = tl.zeros([ROWS, KEYS], tl.float32)  # a sum for each key: warps need no barrier
    out = tl.zeros([ROWS, DV_TILE if FP8 is None else DV_TILE // 2], tl.float32)
    out_odd = out
    scale_max = 1e-30  # the largest scale of values so far
    table_ptr += sequence.to(tl.int64) * table_stride
    in_tile = tl.arange(0, KEYS)
    # Keys whose pages are looked up: a single key if a tile is inside a page. The pages of the next
    # tile are loaded while this tile is computed, so that nothing waits for them.
    looked_up = tl.zeros([1], tl.int32) if TILES_IN_PAGES else in_tile
    page = tl.load(table_ptr + (first + looked_up) // P, mask=first + looked_up < end, other=0)
    for tile in range(first, end, KEYS):
        keys = tile + in_tile
        inside = keys < end
        vectors = (page.to(tl.int64) * G + kv_head) * P
        vectors += (tile + looked_up) % P + (in_tile - looked_up)
        next_tile = tile + KEYS + looked_up
        page = tl.load(table_ptr + next_tile // P, mask=next_tile < end, other=0)
        k, k_odd = _load_vectors(k_ptr, vectors, inside, D, D_TILE, FP8)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if FP8 is not None:
            s = tl.dot(q_odd, tl.trans(k_odd), s)
            s *= tl.load(k_scale_ptr + vectors, mask=inside, other=0.0)[None, :]
        s *= factors[:, None]
        seen = (keys[None, :] >= lowest[:, None]) & (keys[None, :] < highest[:, None])
        s = tl.where(seen, s, -float("inf"))
        new_largest = tl.maximum(largest, tl.max(s, 1))
        shift = tl.where(new_largest == -float("inf"), 0.0, new_largest)
        p = tl.exp2(s - shift[:, None])
        rescale = tl.exp2(largest - shift)
        exp_sum = exp_sum * rescale[:, None] + p
        largest = new_largest
        v, v_odd = _load_vectors(v_ptr, vectors, inside, DV, DV_TILE, FP8)
        if FP8 is not None:
            v_scale = tl.load(v_scale_ptr + vectors, mask=inside, other=0.0)
            new_scale_max = tl.maximum(scale_max, tl.max(v_scale, 0))
            p *= (v_scale * (F16_RANGE / new_scale_max))[None, :]
            rescale *= scale_max / new_scale_max
            scale_max = new_scale_max
            out_odd = tl.dot(p.to(v.dtype), v_odd, out_odd * rescale[:, None])
        out = tl.dot(p.to(v.dtype), v, out * rescale[:, None], input_precision="ieee")
    if FP8 is not None:
        out = tl.interleave(out, out_odd) * (scale_max / F16_RANGE)

    row = (tl.program_id(0).to(tl.int64) * (H // G) * S + rows) * SPLITS + split
    tl.store(statistics_ptr + row, largest, mask=is_row)
    tl.store(statistics_ptr + QUERIES * SPLITS + row, tl.sum(exp_sum, 1), mask=is_row)
    columns = tl.arange(0, DV_TILE)
    mask = is_row[:, None] & (columns < DV)[None, :]
    tl.store(out_ptr + row[:, None] * DV + columns[None, :], out, mask=mask)


@launched
def _merge_kernel(
    partial_ptr,  # [B, H, S, SPLITS, DV] fp32
    statistics_ptr,  # [2, B, H, S, SPLITS] fp32
    out_ptr,  # [B, H, S, DV]
    QUERIES, H, S, DV, SPLITS, stride_ob, stride_oh, stride_os,
    SPLITS_TILE: tl.constexpr, DV_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, head, query = row // (H * S), row // S % H, row % S
    splits, columns = tl.arange(0, SPLITS_TILE), tl.arange(0, DV_TILE)
    row = row * SPLITS + splits
    is_split = splits < SPLITS
    largest = tl.load(statistics_ptr + row, mask=is_split, other=-float("inf"))
    exp_sum = tl.load(statistics_ptr + QUERIES * SPLITS + row, mask=is_split, other=0.0)
    row_max = tl.max(largest, 0)
    weight = tl.exp2(largest - tl.where(row_max == -float("inf"), 0.0, row_max))
    mask = is_split[:, None] & (columns < DV)[None, :]
    out = tl.load(partial_ptr + row[:, None] * DV + columns[None, :], mask=mask, other=0.0)
    sums = tl.sum(weight * exp_sum, 0)
    out = tl.sum(out * weight[:, None], 0) / tl.where(sums == 0.0, 1.0, sums)
    out_ptr += batch * stride_ob + head * stride_oh + query * stride_os
    tl.store(out_ptr + columns, out.to(out_ptr.dtype.element_ty), mask=columns < DV)


@_common.on_device_of_first
def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, table: Tensor,
    sequences: Tensor, left: int, right: int, scale: float,
) -> Tensor:  # fmt: skip
    (B, H, S, D), (_, G, P, DV) = q.shape, v.shape
    rows = H // G * S
    fp8 = _common.TRITON_DTYPES[k.dtype] if k.element_size() == 1 else None
    is_in_pairs = fp8 is None or (D % 2 == 0 and DV % 2 == 0)
    if not (has_paged_attention(rows, D, DV) and is_in_pairs) or q.dtype == torch.float64:
        return reference.paged_attention(
            q, k, v, k_scale, v_scale, table, sequences, left, right, scale
        )
    out = empty_by_token(q, (B, H, S, DV), q.dtype)
    if out.numel() == 0:
        return out
    programs = _PROGRAMS_PER_MULTIPROCESSOR * _common.multiprocessors(q.device)
    most_splits = min(_MOST_SPLITS, _common.ceil_div(table.shape[1] * P, _LEAST_KEYS))
    splits = max(1, min(most_splits, _common.ceil_div(programs, B * G)))
    partial = torch.empty((B, H, S, splits, DV), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, B, H, S, splits), dtype=torch.float32, device=q.device)
    if fp8 is not None:
        k, v = k.view(torch.int16), v.view(torch.int16)
    q = _common.by_rows(q)
    d_tile, dv_tile = (max(32, _common.next_power_of_2(size)) for size in (D, DV))
    keys = _KEYS_OF_WIDE_VECTORS if max(d_tile, dv_tile) * q.element_size() > 256 else _KEYS
    _attend_kernel[(B * G, splits)](
        q, k, v, k_scale, v_scale, table, sequences, partial, statistics, H, G, S, P, B * H * S,
        splits, table.stride(0), sequences.stride(0), *q.stride()[:3],
        *(_UNLIMITED if end < 0 else end for end in (left, right)), scale,
        D=D, DV=DV, ROWS=max(16, _common.next_power_of_2(rows)), KEYS=keys, D_TILE=d_tile,
        DV_TILE=dv_tile, TILES_IN_PAGES=P % keys == 0, FP8=fp8, num_stages=_STAGES,
        num_warps=_WARPS if fp8 is None or rows > 16 else _WARPS_IN_FP8,
    )  # fmt: skip
    _merge_kernel[(B * H * S,)](
        partial, statistics, out, B * H * S, H, S, DV, splits, *out.stride()[:3],
        SPLITS_TILE=_common.next_power_of_2(splits), DV_TILE=dv_tile, num_warps=4,
    )  # fmt: skip
    return out


@launched
def _write_kernel(
    x_ptr,  # [B, G, S, D]
    data_ptr,  # [pages, G, P, D]
    scale_ptr,  # [pages, G, P] fp32, None without FP8
    tokens_ptr,  # [4, T] int64: batch and position in x, page and position in the page
    T, G, P, D, stride_b, stride_g, stride_s, stride_d,
    LIMIT: tl.constexpr, HEADS: tl.constexpr, D_TILE: tl.constexpr,
):  # fmt: skip
    tokens_ptr += tl.program_id(0)
    head, columns = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, D_TILE)[None, :]
    inside = (head < G)[:, None] & (columns < D)
    x_ptr += tl.load(tokens_ptr) * stride_b + tl.load(tokens_ptr + T) * stride_s
    x_ptrs = x_ptr + head.to(tl.int64)[:, None] * stride_g + columns * stride_d
    vector = (tl.load(tokens_ptr + 2 * T) * G + head) * P + tl.load(tokens_ptr + 3 * T)
    DTYPE: tl.constexpr = data_ptr.dtype.element_ty
    x = tl.load(x_ptrs, mask=inside, other=0.0)
    if scale_ptr is not None:
        x = x.to(tl.float32)
        amax = tl.max(_common.abs_bits(x), 1).to(tl.float32, bitcast=True)
        scale, encode = _common.scale_from_amax(amax, 0.0, LIMIT, "fp32")
        tl.store(scale_ptr + vector, scale, mask=head < G)
        y = _common.nan_for_infinity(x, DTYPE) * encode[:, None]
        x = _common.saturate(y, y, DTYPE)
    tl.store(data_ptr + vector[:, None] * D + columns, x.to(DTYPE), mask=inside)


@_common.on_device_of_first
def write_pages_(x: Tensor, data: Tensor, scale: Tensor | None, tokens: Tensor) -> None:
    (_, G, P, D), T = data.shape, tokens.shape[1]
    d_tile = _common.next_power_of_2(D)
    heads = max(1, min(_common.next_power_of_2(G), 4096 // d_tile))
    if x.dtype == torch.float64:
        reference.write_pages_(x, data, scale, tokens)
    elif T:
        _write_kernel[(T, _common.ceil_div(G, heads))](
            x, data, scale, tokens, T, G, P, D, *x.stride(),
            LIMIT=torch.finfo(data.dtype).max, HEADS=heads, D_TILE=d_tile, num_warps=4,
        )  # fmt: skip
