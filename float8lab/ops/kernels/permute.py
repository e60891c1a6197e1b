"""Move rows to where a map says, and back, on the GPU.

T tokens, S places that a token may go to, R rows that tokens go to, H features, B blocks of a row.

A program takes one token through its places, one after the other. Few of the S numbers in a token's
row of the map lead to a row, so numbers and places form keys: the smallest key is the next place.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels._common import Tile, by_rows, ceil_div, next_power_of_2
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.reference import permute as reference

_TILE = Tile(rows=1, columns=4096, warps=4)
"""The most of a row that a program holds: columns are bytes, 16 or 32 for each thread."""

_MAP_ELEMENTS = 4096
"""How many numbers a program holds: tokens times experts."""

_LAST = tl.constexpr(2**62)


def _row_tile(H: int, x: Tensor) -> dict[str, int]:
    """Return how much of a row a program holds, and its warps: 16 or more bytes for each thread."""
    columns = min(next_power_of_2(H), _TILE.columns // x.element_size())
    warps = min(_TILE.warps, max(columns * x.element_size() // 512, 1))
    return {"BLOCK_H": columns, "num_warps": warps}


@triton.jit
def _counts_of(
    map_ptr, tile, T, S, stride_t, stride_s,
    INDEX: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Return the tokens of a tile, and how often each expert gets each: [TOKENS, EXPERTS]."""
    tokens = tile.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    experts = tl.arange(0, EXPERTS)[None, :]
    if INDEX:
        counts = tl.zeros((TOKENS, EXPERTS), dtype=tl.int32)
        for place in range(S):
            entry = tokens * stride_t + place * stride_s
            counts += (tl.load(map_ptr + entry, mask=tokens < T, other=-1) == experts).to(tl.int32)
    else:
        inside = (tokens < T) & (experts < S)
        is_routed = tl.load(map_ptr + tokens * stride_t + experts * stride_s, mask=inside, other=0)
        counts = (is_routed != 0).to(tl.int32)
    return tokens, counts


@launched
def _count_kernel(
    map_ptr,  # [T, S] any integer
    counts_ptr,  # [E, tiles] int32
    T, S, E, tiles, stride_t, stride_s,
    INDEX: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    _, counts = _counts_of(map_ptr, tile, T, S, stride_t, stride_s, INDEX, TOKENS, EXPERTS)
    experts = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + experts * tiles + tile, tl.sum(counts, 0), mask=experts < E)


@launched
def _row_map_kernel(
    map_ptr,  # [T, S] any integer
    counts_ptr,  # [E, tiles] int32
    sums_ptr,  # [E, tiles] int32: cumulative sums of the counts
    row_map_ptr,  # [T, S + 1] int32
    offs_ptr,  # [E] int32
    T, S, E, tiles, stride_t, stride_s,
    INDEX: tl.constexpr, TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)[None, :]
    tokens, counts = _counts_of(map_ptr, tile, T, S, stride_t, stride_s, INDEX, TOKENS, EXPERTS)
    pos = experts * tiles + tile
    begin = tl.load(sums_ptr + pos, mask=experts < E) - tl.load(counts_ptr + pos, mask=experts < E)
    offsets = begin + tl.cumsum(counts, 0)  # the rows up to and with each token
    if INDEX:
        offsets -= counts
        for place in range(S):
            entry = tokens * stride_t + place * stride_s
            is_expert = tl.load(map_ptr + entry, mask=tokens < T, other=-1) == experts
            offsets += is_expert.to(tl.int32)
            rows = tl.max(tl.where(is_expert & (experts < E), offsets, 0), 1, keep_dims=True) - 1
            tl.store(row_map_ptr + tokens * (S + 1) + place, rows, mask=tokens < T)
    else:
        rows = tl.where(counts != 0, offsets, 0) - 1
        inside = (tokens < T) & (experts < S)
        tl.store(row_map_ptr + tokens * (S + 1) + experts, rows, mask=inside)
    filled = tl.load(sums_ptr + E * tiles - 1) + tl.zeros((TOKENS, 1), dtype=tl.int32)
    tl.store(row_map_ptr + tokens * (S + 1) + S, filled, mask=tokens < T)
    experts = tl.arange(0, EXPERTS)
    inside = (experts < E) & (tile == 0)
    last = tl.load(sums_ptr + experts * tiles + tiles - 1, mask=inside)
    tl.store(offs_ptr + experts, last, mask=inside)


@replayed
def row_map_of(routing_map: Tensor, experts: int = 0) -> tuple[Tensor, Tensor]:
    T, S = routing_map.shape
    E = experts or S
    of = SimpleNamespace(routing_map=routing_map, experts=experts)
    row_map, offsets = reference.empty_row_map(of)
    if not routing_map.numel():
        return row_map.zero_(), offsets.zero_()
    block = next_power_of_2(E)
    tile = {"TOKENS": max(_MAP_ELEMENTS // block, 1), "EXPERTS": block, "INDEX": experts > 0}
    tiles = ceil_div(T, tile["TOKENS"])
    if routing_map.dtype == torch.bool:
        routing_map = routing_map.view(torch.uint8)
    counts = row_map.new_empty((E, tiles))
    sizes = (T, S, E, tiles, *routing_map.stride())
    _count_kernel[(tiles,)](routing_map, counts, *sizes, **tile, num_warps=4)
    sums = counts.view(-1).cumsum(0, dtype=torch.int32)
    _row_map_kernel[(tiles,)](
        routing_map, counts, sums, row_map, offsets, *sizes, **tile, num_warps=4
    )  # fmt: skip
    return row_map, offsets


@triton.jit
def _keys(map_ptr, token, S, R, BLOCK_S: tl.constexpr):
    """Return a token's places as keys: place * 2**32 + row, or ``_LAST`` without a row."""
    places = tl.arange(0, BLOCK_S)
    rows = tl.load(map_ptr + token * (S + 1) + places, mask=places < S, other=-1)
    keys = (places.to(tl.int64) << 32) | rows.to(tl.int64)
    return tl.where((rows >= 0) & (rows < R), keys, _LAST)


@launched
def _scatter_kernel(
    x_ptr,  # [T, H], columns contiguous
    map_ptr,  # [T, S + 1] int32
    probs_ptr,  # None or [T, S] any float
    merged_ptr,  # None or [R, H]
    scale_ptr,  # None or [T, B] fp32
    amax_ptr,  # [T, B] fp32
    y_ptr,  # [R, H]
    values_ptr,  # [R]; [T, S] with ``merged_ptr``
    new_scale_ptr,  # [R, B], each column contiguous
    new_amax_ptr,  # [R, B], each column contiguous
    T, S, R, H, B, stride_xt, stride_st, stride_sb, stride_at, stride_ab,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    keys = _keys(map_ptr, token, S, R, BLOCK_S)
    columns, blocks = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_B).to(tl.int64)
    if scale_ptr is not None:
        offsets = token * stride_st + blocks * stride_sb
        scale = tl.load(scale_ptr + offsets, mask=blocks < B)
        amax = tl.load(amax_ptr + token * stride_at + blocks * stride_ab, mask=blocks < B)
    if merged_ptr is not None:
        places = tl.arange(0, BLOCK_S)
        mask = (places < S) & (keys == _LAST)
        tl.store(values_ptr + token * S + places, tl.zeros((BLOCK_S,), tl.float32), mask=mask)

    key = tl.min(keys)
    while key != _LAST:
        keys = tl.where(keys == key, _LAST, keys)
        row, place = key & 0xFFFFFFFF, key >> 32
        if probs_ptr is not None:
            prob = tl.load(probs_ptr + token * S + place)
        if merged_ptr is not None:
            row_sum = tl.zeros((BLOCK_H,), dtype=tl.float32)
        for start in range(0, H, BLOCK_H):
            inside = start + columns < H
            x = tl.load(x_ptr + token * stride_xt + start + columns, mask=inside, other=0)
            if merged_ptr is not None:
                x = x.to(tl.float32)
                merged = tl.load(merged_ptr + row * H + start + columns, mask=inside, other=0)
                row_sum += x * merged.to(tl.float32)
                x *= prob.to(tl.float32)
            tl.store(y_ptr + row * H + start + columns, x.to(y_ptr.dtype.element_ty), mask=inside)
        if merged_ptr is not None:
            dot = tl.sum(row_sum)
            tl.store(values_ptr + token * S + place, dot.to(values_ptr.dtype.element_ty))
        elif probs_ptr is not None:
            tl.store(values_ptr + row, prob)
        if scale_ptr is not None:
            tl.store(new_scale_ptr + blocks * R + row, scale, mask=blocks < B)
            tl.store(new_amax_ptr + blocks * R + row, amax, mask=blocks < B)
        key = tl.min(keys)

    filled = tl.load(map_ptr + token * (S + 1) + S)
    for row in range(filled + token, R, T):
        for start in range(0, H, BLOCK_H):
            zero_row = tl.zeros((BLOCK_H,), dtype=y_ptr.dtype.element_ty)
            tl.store(y_ptr + row * H + start + columns, zero_row, mask=start + columns < H)
        if probs_ptr is not None and merged_ptr is None:
            tl.store(values_ptr + row, 0.0)
        if scale_ptr is not None:
            zeros = tl.zeros((BLOCK_B,), dtype=tl.float32)
            tl.store(new_scale_ptr + blocks * R + row, zeros + 1, mask=blocks < B)
            tl.store(new_amax_ptr + blocks * R + row, zeros, mask=blocks < B)


@replayed
def scatter_rows(
    x: Tensor, row_map: Tensor, rows: int, probs: Tensor | None = None,
    merged: Tensor | None = None, scale: Tensor | None = None, amax: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if x.element_size() > 4:
        return reference.scatter_rows(x, row_map, rows, probs, merged, scale, amax)
    (T, H), S = x.shape, row_map.shape[1] - 1
    outputs = y, row_values, new_scale, new_amax = reference.scatter_outputs(
        SimpleNamespace(x=x, rows=rows, probs=probs, merged=merged, scale=scale)
    )
    if T == 0:
        for out in outputs:
            if out is not None:
                out.fill_(1 if out is new_scale else 0)
        return outputs
    x = by_rows(x)
    B, *strides = [0] * 5
    if scale is not None and amax is not None:
        B, *strides = scale.shape[1], *scale.stride(), *amax.stride()
    _scatter_kernel[(T,)](
        x, row_map.contiguous(), probs if probs is None else probs.contiguous(),
        merged if merged is None else merged.contiguous(), scale, amax,
        y, row_values, new_scale, new_amax, T, S, rows, H, B, x.stride(0), *strides,
        BLOCK_S=next_power_of_2(S), BLOCK_B=next_power_of_2(B), **_row_tile(H, x),
        enable_fp_fusion=False,
    )  # fmt: skip
    return outputs


@launched
def _gather_kernel(
    y_ptr,  # [R, H], columns contiguous
    map_ptr,  # [T, S + 1] int32
    probs_ptr,  # None or [T, S] any float
    values_ptr,  # None or [R]
    scale_ptr,  # None or [R, B] fp32
    x_ptr,  # [T, H]
    place_values_ptr,  # [T, S]
    S, R, H, block, stride_yr, stride_sr, stride_sb,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    keys = _keys(map_ptr, token, S, R, BLOCK_S)
    if values_ptr is not None:
        places, first = tl.arange(0, BLOCK_S), tl.program_id(1) == 0
        values = tl.load(values_ptr + (keys & 0xFFFFFFFF), mask=first & (keys != _LAST), other=0.0)
        tl.store(place_values_ptr + token * S + places, values, mask=first & (places < S))

    columns = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside = columns < H
    row_sum = tl.zeros((BLOCK_H,), dtype=tl.float32)
    key = tl.min(keys)
    row_offset = (key & 0xFFFFFFFF) * stride_yr
    y = tl.load(y_ptr + row_offset + columns, mask=inside & (key != _LAST), other=0.0)
    while key != _LAST:
        keys = tl.where(keys == key, _LAST, keys)
        next_key = tl.min(keys)
        row_offset = (next_key & 0xFFFFFFFF) * stride_yr
        next_y = tl.load(
            y_ptr + row_offset + columns, mask=inside & (next_key != _LAST), other=0.0
        )  # it loads while this row is added
        term = y.to(tl.float32)
        if scale_ptr is not None:
            scales = (key & 0xFFFFFFFF) * stride_sr + columns // block * stride_sb
            term *= tl.load(scale_ptr + scales, mask=inside, other=0.0)
        if probs_ptr is not None:
            term *= tl.load(probs_ptr + token * S + (key >> 32)).to(tl.float32)
        row_sum += term
        key, y = next_key, next_y
    tl.store(x_ptr + token * H + columns, row_sum.to(x_ptr.dtype.element_ty), mask=inside)


@replayed
def gather_rows(
    y: Tensor, row_map: Tensor, dtype: torch.dtype, probs: Tensor | None = None,
    row_values: Tensor | None = None, scale: Tensor | None = None, block: int = 1,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if torch.float64 in (y.dtype, dtype):
        return reference.gather_rows(y, row_map, dtype, probs, row_values, scale, block)
    (R, H), T, S = y.shape, row_map.shape[0], row_map.shape[1] - 1
    x = y.new_empty((T, H), dtype=dtype)
    values = None if row_values is None else row_values.new_empty((T, S))
    if T == 0:
        return x, values
    y = by_rows(y)
    tile = _row_tile(H, x)
    _gather_kernel[(T, max(ceil_div(H, tile["BLOCK_H"]), 1))](
        y, row_map.contiguous(), probs if probs is None else probs.contiguous(),
        row_values if row_values is None else row_values.contiguous(), scale, x, values, S, R, H,
        block, y.stride(0), *((0, 0) if scale is None else scale.stride()),
        BLOCK_S=next_power_of_2(S), **tile, enable_fp_fusion=False,
    )  # fmt: skip
    return x, values
