"""FP8 attention on Hopper.  B batch, H heads, G key/value heads, S sequence, D head size.

The forward is one persistent Gluon kernel with a program for each multiprocessor. A program takes
tiles of 128 queries of a head from a common counter until none is left. Two groups of four warps
have 64 queries each; one warp loads queries, keys and values for both groups, and loads those of
the next tile while the groups store a tile. While a group computes the probabilities of a block of
keys, the tensor cores compute its scores of the next block, then multiply the first half of the
probabilities by values, and run the other group's GEMMs. Softmax is online: probabilities are
rounded relative to the largest score so far, not to the row's largest. The only other differences
from the reference are the order of sums and the tensor cores' accumulator (14 bits of each sum of
32 terms).

The second GEMM contracts over the keys, and FP8 operands must be contiguous along a contraction, so
``_transpose_values_kernel`` transposes the values first. It also reorders every 16 keys, so that a
32-bit register has the four probabilities that tensor cores expect there; their sum is the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from float8lab.ops import attention
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels._tma import arrive, async_load, barriers, wait_empty, wait_full
from float8lab.ops.reference import attention as reference
from float8lab.ops.reference import round_up

GROUP = tl.constexpr(64)
"""Queries of a group of four warps: the rows of one tensor core instruction."""
QUERIES = tl.constexpr(128)
"""Queries of a tile, which two groups share; a tile of the backward may have as many keys."""
_SLICE = 64
"""Keys over which a GEMM of probabilities and values contracts."""
ALIGNMENT = tl.constexpr(128)
"""A padded sequence begins at a multiple of this number; zeros follow it up to the next one."""
CHUNK = tl.constexpr(128)
"""How many sequences, or tiles, a kernel looks at in one step."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = map(gl.constexpr, (240, 24))

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
P_BITS = gl.constexpr(8.0)
"""Kernels hold probabilities times 2 ** 8, which is ``1 / P_SCALE``."""
LOWEST = gl.constexpr(-1e30)
"""A number below every score; not -inf, whose difference from a masked score is NaN."""


# Plans: which tiles packed sequences have.

FIELDS = tl.constexpr(8)


@launched
def _plan_kernel(
    cu_seqlens_q_ptr,  # [B + 1] int32
    cu_seqlens_k_ptr,  # [B + 1] int32
    plan_ptr,  # [1 + tiles, FIELDS] int32: the number of tiles, then an entry for each
    B, SQ,
    LAST_FIRST: tl.constexpr,  # whether a sequence's last queries come before its first
):  # fmt: skip
    # The tokens after the last sequence are treated as a sequence without keys.
    sequence = tl.program_id(0)
    tiles_before = 0
    for chunk in range(0, sequence, CHUNK):
        numbers = chunk + tl.arange(0, CHUNK)
        starts = tl.load(cu_seqlens_q_ptr + numbers, mask=numbers < sequence, other=0)
        stops = tl.load(cu_seqlens_q_ptr + numbers + 1, mask=numbers < sequence, other=0)
        tiles_before += tl.sum((stops - starts + QUERIES - 1) // QUERIES)
    q_start, k_start = tl.load(cu_seqlens_q_ptr + sequence), tl.load(cu_seqlens_k_ptr + sequence)
    exists = sequence < B
    queries = tl.load(cu_seqlens_q_ptr + sequence + 1, mask=exists, other=SQ) - q_start
    keys = tl.load(cu_seqlens_k_ptr + sequence + 1, mask=exists, other=k_start) - k_start
    tiles = (queries + QUERIES - 1) // QUERIES
    if sequence == B:
        tl.store(plan_ptr, tiles_before + tiles)
    for chunk in range(0, tiles, CHUNK):
        tile = chunk + tl.arange(0, CHUNK)
        entry = plan_ptr + (1 + tiles_before + tile) * FIELDS
        first = ((tiles - 1 - tile) if LAST_FIRST else tile) * QUERIES
        q_padded, k_padded = _padded_start(q_start, sequence), _padded_start(k_start, sequence)
        fields = (first, q_start, q_padded, queries, k_start, k_padded, keys)
        for i in tl.static_range(7):
            tl.store(entry + i, fields[i], mask=tile < tiles)


@triton.jit
def _padded_start(start, sequence):
    """Return where a sequence begins if it and all sequences before it are padded."""
    return start // ALIGNMENT * ALIGNMENT + sequence * ALIGNMENT


@triton.jit
def _sequence_at(position, cu_seqlens_ptr, SEQUENCES):
    """Find the sequence at a padded position: its start, its padded start, and its size."""
    sequence = -1
    for chunk in range(0, SEQUENCES, CHUNK):
        numbers = chunk + tl.arange(0, CHUNK)
        starts = tl.load(cu_seqlens_ptr + numbers, mask=numbers < SEQUENCES, other=0)
        has_begun = _padded_start(starts, numbers) <= position
        sequence += tl.sum((has_begun & (numbers < SEQUENCES)).to(tl.int32))
    start = tl.load(cu_seqlens_ptr + sequence)
    size = tl.load(cu_seqlens_ptr + sequence + 1) - start
    return start, _padded_start(start, sequence), size


def _padded_size(S: int, cu_seqlens: Tensor | None) -> tuple[int, int]:
    """Return the number of packed sequences, and their most tokens if each is padded."""
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return sequences, round_up(S, ALIGNMENT.value) + sequences * ALIGNMENT.value


@triton.jit
def _locate(number, sizes, KEYS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Find a tile's heads, its sequence's queries and keys, its first query, and its keys' blocks.

    The heads are the batch, the head of queries, the head of keys, and the row of batch and head.
    Queries, like keys, are three numbers: their start, their start with padding, and their count.
    The blocks are the first; the block after those that LEFT may mask; the first that RIGHT or the
    end may mask; the block after the last; then the first and the last key that query 0 sees. The
    last of ``sizes`` are the least number of blocks, which a mask may hide, the tokens, and how
    many heads look at a tile of the backward.
    """
    _, H, G, SQ, SK, earliest, latest, plan_ptr, least, _, _ = sizes
    if plan_ptr is not None:
        tiles = tl.load(plan_ptr)
        entry = plan_ptr + (1 + number % tiles) * FIELDS
        first = tl.load(entry)
        queries = tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3)
        keys = tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6)
        earliest += keys[2] - queries[2]
        latest += keys[2] - queries[2]
    else:
        tiles = tl.cdiv(SQ, QUERIES)
        tile = number % tiles
        if RIGHT:
            tile = tiles - 1 - tile  # tiles with the most keys come first
        first, queries, keys = tile * QUERIES, (0, 0, SQ), (0, 0, SK)
    row = number // tiles
    head = row % H
    start, stop, seen_by_all = 0, tl.cdiv(keys[2], KEYS), keys[2]
    if RIGHT:
        stop = tl.minimum(stop, tl.cdiv(first + latest + QUERIES, KEYS))
        seen_by_all = tl.minimum(seen_by_all, first + latest + 1)
    stop = tl.maximum(stop, least)
    masked_to = 0
    if LEFT:
        start = tl.minimum(tl.maximum(first + earliest, 0) // KEYS, stop - least)
        masked_to = tl.cdiv(tl.maximum(first + earliest + QUERIES - 1, 0), KEYS)
        masked_to = tl.minimum(masked_to, stop)
    masked_from = tl.maximum(seen_by_all // KEYS, masked_to)
    blocks = start, masked_to, masked_from, stop, earliest, latest
    return (row // H, head, head // (H // G), row), queries, keys, first, blocks


@triton.jit
def _count_tiles(sizes):
    B, H, _, SQ, _, _, _, plan_ptr, _, _, _ = sizes
    tiles = B * tl.cdiv(SQ, QUERIES)
    if plan_ptr is not None:
        tiles = tl.load(plan_ptr)
    return H * tiles


# Transposing the values.


@launched
def _transpose_values_kernel(
    v_ptr,  # [B, G, SK, DV] uint8
    out_ptr,  # [B, G, DV, PADDED / 4] int32: bytes of four keys each
    counter_ptr,  # [1] int32, set to zero
    cu_seqlens_k_ptr,  # None, or [SEQUENCES + 1] int32
    SEQUENCES, SK, PADDED, DV, G, stride_b, stride_g, stride_s, stride_d,
    TILE_K: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    # Begin at the end of v, which is still in the cache if a cast has just written v.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if program == 0:
        tl.store(counter_ptr, 0)
    head = (program // (PADDED // TILE_K)).to(tl.int64)
    tile = program % (PADDED // TILE_K)
    v_ptr += (head // G) * stride_b + (head % G) * stride_g
    out_ptr += head * DV * (PADDED // 4)
    if cu_seqlens_k_ptr is not None:
        k_start, padded, SK = _sequence_at(tile * TILE_K, cu_seqlens_k_ptr, SEQUENCES)
        v_ptr += k_start.to(tl.int64) * stride_s
        out_ptr += padded // 4
        tile -= padded // TILE_K
    words = tile * (TILE_K // 4) + tl.arange(0, TILE_K // 4)
    # Every 16 keys become words of the keys 0 1 8 9, then 2 3 10 11, and so on.
    keys = (words // 4) * 16 + (words % 4) * 2
    columns = tl.arange(0, TILE_D)
    v_ptrs = v_ptr + keys.to(tl.int64)[:, None] * stride_s + columns[None, :] * stride_d
    inside = (columns < DV)[None, :]
    stride_s = tl.cast(stride_s, tl.int64)
    b0 = tl.load(v_ptrs, mask=inside & (keys < SK)[:, None], other=0).to(tl.int32)
    b1 = tl.load(v_ptrs + stride_s, mask=inside & (keys + 1 < SK)[:, None], other=0).to(tl.int32)
    b2 = tl.load(v_ptrs + 8 * stride_s, mask=inside & (keys + 8 < SK)[:, None], other=0)
    b3 = tl.load(v_ptrs + 9 * stride_s, mask=inside & (keys + 9 < SK)[:, None], other=0)
    word = b0 | (b1 << 8) | (b2.to(tl.int32) << 16) | (b3.to(tl.int32) << 24)
    out_ptrs = out_ptr + columns[:, None] * (PADDED // 4) + words[None, :]
    tl.store(out_ptrs, tl.trans(word), mask=(columns < DV)[:, None])


def _transpose_values(v: Tensor, counter: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    """Return the values as ``[B, G, DV, PADDED]``: keys in the order of the kernel, then zeros.

    The kernel also sets ``counter`` to zero.
    """
    B, G, SK, DV = v.shape
    sequences, padded = _padded_size(SK, cu_seqlens_k)
    out = torch.empty((B, G, DV, padded), dtype=v.dtype, device=v.device)
    _transpose_values_kernel[(padded // ALIGNMENT.value * B * G,)](
        v.view(torch.uint8), out.view(torch.int32), counter, cu_seqlens_k, sequences, SK, padded,
        DV, G, *v.stride(), TILE_K=ALIGNMENT, TILE_D=_common.next_power_of_2(DV),
        num_warps=8 if DV > 128 else 4,
    )  # fmt: skip
    return out


# Merging outputs of the same queries for different keys.


@launched
def _merge_kernel(
    out_ptr,  # [B, H, S, D] any float; so is seen_ptr
    lse_ptr,  # [B, H, S] fp32; so is seen_lse_ptr
    seen_ptr, seen_lse_ptr, H, S, D, stride_ob, stride_oh, stride_os, stride_lb, stride_lh,
    stride_sb, stride_sh, stride_ss, stride_nb, stride_nh,
    ROWS: tl.constexpr, D_TILE: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    query, head, columns = row // H, row % H, tl.arange(0, D_TILE)[None, :]
    tile = (query < S)[:, None] & (columns < D)
    lse_ptr += batch * stride_lb + head * stride_lh + query
    seen_lse_ptr += batch * stride_nb + head * stride_nh + query
    out_ptr += (batch * stride_ob + head * stride_oh + query * stride_os)[:, None] + columns
    seen_ptr += (batch * stride_sb + head * stride_sh + query * stride_ss)[:, None] + columns
    lse, seen_lse = tl.load(lse_ptr, mask=query < S), tl.load(seen_lse_ptr, mask=query < S)
    out = tl.load(out_ptr, mask=tile).to(tl.float32)
    seen = tl.load(seen_ptr, mask=tile).to(tl.float32)
    weight = tl.sigmoid(seen_lse - lse)[:, None]
    change = seen - out
    merged = tl.where(weight < 0.5, out + weight * change, seen - change * (1 - weight))
    tl.store(out_ptr, merged.to(out_ptr.dtype.element_ty), mask=tile)
    largest = tl.maximum(lse, seen_lse)
    exp_sum = tl.exp(lse - largest) + tl.exp(seen_lse - largest)
    tl.store(lse_ptr, largest + tl.log(exp_sum), mask=query < S)


@_common.on_device_of_first
def merge_attention_(out: Tensor, lse: Tensor, seen: Tensor, seen_lse: Tensor) -> None:
    (B, H, S, D), rows = out.shape, 32
    _merge_kernel[(_common.ceil_div(S * H, rows), B)](
        out, lse, seen, seen_lse, H, S, D, *out.stride()[:3], *lse.stride()[:2],
        *seen.stride()[:3], *seen_lse.stride()[:2], ROWS=rows, D_TILE=_common.next_power_of_2(D),
        num_warps=4,
    )  # fmt: skip


# Forward.


@gluon.jit
def _load_tiles(arguments, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Run the loading warp: it takes numbers of tiles, tells the groups, and loads for them."""
    q_desc, k_desc, v_desc, tiles, bars, sizes, counter_ptr = arguments
    q_tiles, k_tiles, v_tiles, numbers = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[1]
    SLICE: gl.constexpr = v_tiles.shape[2]
    SLICES: gl.constexpr = KEYS // SLICE
    end = _count_tiles(sizes)
    number = gl.program_id(0)
    pass_index = 0
    count = 0
    while number < end:
        buffer = pass_index % 2
        _tell_number(numbers, number, q_empty, pass_index)
        heads, queries, keys, first, blocks = _locate(number, sizes, KEYS, LEFT, RIGHT)
        batch, head, kv_head, _ = heads
        k_start, v_start, _ = keys
        start, _, _, stop, _, _ = blocks
        mbarrier.expect(q_full.index(buffer), 2 * q_desc.block_type.nbytes)
        for group in gl.static_range(2):
            box = [batch, head, queries[0] + first + GROUP * group, 0]
            async_load(q_desc, box, q_full.index(buffer), q_tiles.index(2 * buffer + group))
        for block in range(start, stop):
            stage = count % STAGES
            key = block * KEYS
            wait_empty(k_empty, count)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            box = [batch, kv_head, k_start + key, 0]
            async_load(k_desc, box, k_full.index(stage), k_tiles.index(stage))
            wait_empty(v_empty, count)
            mbarrier.expect(v_full.index(stage), SLICES * v_desc.block_type.nbytes)
            for index in gl.static_range(SLICES):
                box = [batch, kv_head, 0, v_start + key + index * SLICE]
                async_load(v_desc, box, v_full.index(stage), v_tiles.index(SLICES * stage + index))
            count += 1
        pass_index += 1
        number = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
    # A number after the last tile tells the groups to stop.
    _tell_number(numbers, number, q_empty, pass_index)
    arrive(q_full, pass_index)


@gluon.jit
def _tiles(desc, COUNT: gl.constexpr, BITS: gl.constexpr = 8):
    """Allocate shared memory for COUNT tiles of a descriptor, as FP8 or as float16."""
    ROWS: gl.constexpr = desc.block_type.shape[2]
    COLUMNS: gl.constexpr = desc.block_type.shape[3]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(COLUMNS * BITS // 8, 128), BITS, rank=2)
    dtype: gl.constexpr = desc.dtype if BITS == 8 else gl.float16
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, COLUMNS], LAYOUT)


@gluon.jit
def _tell_number(numbers, number, q_empty, pass_index):
    """Tell the groups a tile's number, once they have released the queries of two passes ago."""
    wait_empty(q_empty, pass_index)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(pass_index % 2).store(gl.full([1], number, gl.int32, ONE))


@gluon.jit
def _next_number(numbers, q_full, pass_index):
    """Wait for the number of a tile from the loading warp."""
    wait_full(q_full, pass_index)
    FOUR_WARPS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(numbers.index(pass_index % 2).load(FOUR_WARPS), 0)


@gluon.jit
def _row_max(x, like):
    # A thread has four chains for each row: while it waits for a chain, its warp has no other work.
    eighths = gl.max(gl.max(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 16, 8]), 2), 1)
    return gl.convert_layout(gl.max(eighths, 1), like.type.layout)


@gluon.jit
def _row_sum(x, like):
    """Sum each row in four chains, like ``_row_max``."""
    halves = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 16, 8])
    return gl.convert_layout(gl.sum(gl.sum(gl.sum(halves, 2), 1), 1), like.type.layout)


@gluon.jit
def _exponents(s, largest, factor):
    """Return the logarithms of a tile's probabilities, the factor of old sums, and the maxima."""
    new = gl.maximum(largest, _row_max(s, largest))
    rescale = gl.exp2((largest - new) * factor)
    return s * factor - gl.expand_dims(new * factor - P_BITS, 1), rescale, new


@gluon.jit
def _visible(s, key, rows, SK, earliest, latest, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Return which keys, from ``key`` on, each query sees, as a tile like ``s``."""
    keys = gl.expand_dims(key + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout)), 0)
    seen = keys < SK
    if RIGHT:
        seen = keys < gl.expand_dims(gl.minimum(rows + latest + 1, SK), 1)
    if LEFT:
        seen = seen & (keys >= gl.expand_dims(rows + earliest, 1))
    return seen


@gluon.jit
def _split_columns(x, SLICES: gl.constexpr):
    """Split the columns of a tile into one slice or two."""
    slices = gl.permute(gl.reshape(x, [x.shape[0], SLICES, x.shape[1] // SLICES]), [0, 2, 1])
    return (x,) if SLICES == 1 else gl.split(slices)


@gluon.jit
def _add_values(x, rescale, exp_sum, out, v_tiles, stage):
    """Start the GEMM of a tile's probabilities and values; update the sum of exponentials."""
    # While the tensor cores multiply one slice, the other slice's exponentials are computed.
    ROWS: gl.constexpr = x.shape[0]
    WIDTH: gl.constexpr = v_tiles.shape[1]
    SLICE: gl.constexpr = v_tiles.shape[2]
    SLICES: gl.constexpr = x.shape[1] // SLICE
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SLICE, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    out = out * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT)), 1)
    exp_sum *= rescale
    slices = _split_columns(x, SLICES)
    for index in gl.static_range(SLICES):
        p = gl.exp2(gl.convert_layout(slices[index], X_LAYOUT, assert_trivial=True))
        exp_sum += _row_sum(p, exp_sum)
        # Thanks to the order of keys in v, this moves nothing between threads.
        p8 = gl.reshape(p.to(gl.float8e4nv), [ROWS, SLICE // 16, 2, 4, 2])
        p8 = gl.reshape(gl.permute(p8, [0, 1, 3, 2, 4]), [ROWS, SLICE])
        p8 = gl.convert_layout(p8, P_LAYOUT, assert_trivial=True)
        v = v_tiles.index(SLICES * stage + index).permute((1, 0))
        out = warpgroup_mma(p8, v, out, is_async=True)
    return out, exp_sum


@gluon.jit
def _step(sums, q, k_tiles, v_tiles, bars, count, factor):
    """Add one block of keys, whose scores are given, and compute the scores of the next block."""
    s, largest, exp_sum, out = sums
    _, _, k_full, k_empty, v_full, v_empty = bars
    STAGES: gl.constexpr = k_tiles.shape[0]
    SLICES: gl.constexpr = s.shape[1] // v_tiles.shape[2]
    stage, ahead = count % STAGES, (count + 1) % STAGES
    x, rescale, largest = _exponents(s, largest, factor)
    wait_full(k_full, count + 1)
    # The new scores overwrite the registers of the old, so that no register has to be moved.
    k = k_tiles.index(ahead).permute((1, 0))
    s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
    # The wait comes this early, because its branch keeps ptxas from moving exponentials
    # ahead of the scores' GEMM.
    wait_full(v_full, count)
    out, exp_sum = _add_values(x, rescale, exp_sum, out, v_tiles, stage)
    s = warpgroup_mma_wait(SLICES, (s,))
    arrive(k_empty, count + 1)
    out = warpgroup_mma_wait(0, (out,))
    arrive(v_empty, count)
    return s, largest, exp_sum, out, count + 1


@gluon.jit
def _attend(  # noqa: PLR0915
    arguments, group: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):
    """Run a group of four warps: its queries of every tile look at all the keys."""
    tiles, bars, sizes, factor, v_scale, out_ptr, lse_ptr, max_ptr, DV = arguments
    q_tiles, k_tiles, v_tiles, numbers = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    STAGES: gl.constexpr = k_tiles.shape[0]
    KEYS: gl.constexpr = k_tiles.shape[1]
    WIDTH: gl.constexpr = v_tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)

    end = _count_tiles(sizes)
    pass_index = 0
    count = 0
    number = _next_number(numbers, q_full, pass_index)
    while number < end:
        heads, queries, keys, first, blocks = _locate(number, sizes, KEYS, LEFT, RIGHT)
        start, masked_to, masked_from, stop, earliest, latest = blocks
        last = stop - 1 - start
        masked_to = gl.minimum(masked_to - start, last) if LEFT else 0
        rows = first + GROUP * group + gl.arange(0, GROUP, S_ROWS)
        mask = rows, keys[2], earliest, latest
        out = gl.zeros([GROUP, WIDTH], gl.float32, O_LAYOUT)
        largest = gl.full([GROUP], LOWEST, gl.float32, S_ROWS)
        exp_sum = gl.zeros([GROUP], gl.float32, S_ROWS)
        q = q_tiles.index(2 * (pass_index % 2) + group)
        wait_full(k_full, count)
        k = k_tiles.index(count % STAGES).permute((1, 0))
        s = gl.zeros([GROUP, KEYS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k, s, use_acc=False)
        arrive(k_empty, count)
        # With a square causal mask, or with none, only the last block has masked keys.
        between = gl.minimum(masked_from - start, last) if RIGHT == 1 else last
        bounds = 0, masked_to, between, last
        for section in gl.static_range(3):
            for block in range(bounds[section], bounds[section + 1]):
                if section != 1:
                    key = (start + block) * KEYS
                    visible = _visible(s, key, *mask, LEFT and section == 0, RIGHT)
                    s = gl.where(visible, s, -float("inf"))
                s, largest, exp_sum, out, count = _step(
                    (s, largest, exp_sum, out), q, k_tiles, v_tiles, bars, count, factor
                )
        arrive(q_empty, pass_index)

        visible = _visible(s, (start + last) * KEYS, *mask, LEFT, RIGHT)
        s = gl.where(visible, s, -float("inf"))
        x, rescale, largest = _exponents(s, largest, factor)
        wait_full(v_full, count)
        out, exp_sum = _add_values(x, rescale, exp_sum, out, v_tiles, count % STAGES)
        out = warpgroup_mma_wait(0, (out,))
        arrive(v_empty, count)
        count += 1
        pass_index += 1

        # The sum, too, is held times 2 ** 8; it is 0 for a query that saw no key.
        decode = gl.where(exp_sum == 0, 0.0, v_scale / exp_sum)
        out = out * gl.expand_dims(gl.convert_layout(decode, gl.SliceLayout(1, O_LAYOUT)), 1)
        _store(out_ptr, out, first + GROUP * group, heads, queries, DV, sizes)
        max_score = largest * factor * LN_2
        lse = max_score - P_BITS * LN_2 + gl.log(exp_sum)
        row_offsets = heads[3].to(gl.int64) * sizes[3] + queries[0] + rows
        gl.store(lse_ptr + row_offsets, lse, mask=rows < queries[2])
        max_score = gl.where(exp_sum == 0, -float("inf"), max_score)
        gl.store(max_ptr + row_offsets, max_score, mask=rows < queries[2])
        number = _next_number(numbers, q_full, pass_index)


@gluon.jit
def _store(out_ptr, out, first, heads, sequence, D, sizes):
    """Store rows of a tile, from row ``first`` of its sequence on, in ``[B, S, H, D]``."""
    # A thread stores eight neighbours. In the tensor cores' layout, a warp would store 16 bytes of
    # each of eight rows. The data go through shared memory, which has 128 columns of each group.
    ROWS: gl.constexpr = out.shape[0]
    SLICES: gl.constexpr = (out.shape[1] + 127) // 128
    COLUMNS: gl.constexpr = out.shape[1] // SLICES
    LANES: gl.constexpr = COLUMNS // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    slices = _split_columns(out.to(out_ptr.dtype.element_ty), SLICES)
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    stride = sizes[1] * D
    start = sequence[0]
    tokens = rows
    token_ptr = sizes[9]
    if token_ptr is not None:
        tokens = gl.load(token_ptr + start + rows, mask=rows < sequence[2], other=0)
        tokens = gl.maximum(tokens, ~tokens)
        start = 0
    out_ptr += (heads[0].to(gl.int64) * sizes[3] + start) * stride + heads[1] * D
    for index in gl.static_range(SLICES):
        columns = index * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        offsets = gl.expand_dims(tokens.to(gl.int64) * stride, 1) + gl.expand_dims(columns, 0)
        inside = gl.expand_dims(rows < sequence[2], 1) & gl.expand_dims(columns < D, 0)
        gl.store(out_ptr + offsets, gl.convert_layout(slices[index], LAYOUT), mask=inside)


# Sizes must not be specialised: with a single key, all masked probabilities are one value to ptxas,
# which then takes half of a word of them from a register that was never written (CUDA 12.8).
@launched(language=gluon, do_not_specialize=["SQ", "SK", "EARLIEST", "LATEST"])
def _attention_kernel(
    q_desc,  # [B, H, SQ, D] fp8, in tiles of [GROUP, WIDTH]
    k_desc,  # [B, G, SK, D] fp8, in tiles of [KEYS, WIDTH]
    v_desc,  # [B, G, DV, SK] fp8, transposed, in tiles of [V_WIDTH, SLICE]
    q_scale_ptr,  # [1] fp32
    k_scale_ptr,  # [1] fp32
    v_scale_ptr,  # [1] fp32
    out_ptr,  # [B, SQ, H, DV]
    lse_ptr,  # [B, H, SQ] fp32
    max_ptr,  # [B, H, SQ] fp32
    counter_ptr,  # [1] int32, zero
    plan_ptr,  # from _plan_kernel; None: a sequence for each of the batch
    token_ptr,  # None, or [SQ] int32: the tokens of packed queries
    B, H, G, SQ, SK,
    EARLIEST,  # the first key that query 0 sees; with a plan, as if SK were SQ
    LATEST,  # the last key that query 0 sees, with a plan like EARLIEST
    DV, scale,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,  # whether EARLIEST is a limit
    RIGHT: gl.constexpr,  # whether LATEST is a limit: 0, 1, or 2 if one block of a tile is masked
):  # fmt: skip
    KEYS: gl.constexpr = k_desc.block_type.shape[2]
    # There are buffers for the queries and numbers of two tiles.
    tiles = (
        _tiles(q_desc, 4),
        _tiles(k_desc, STAGES),
        _tiles(v_desc, KEYS // v_desc.block_type.shape[3] * STAGES),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    # Two groups have to empty a buffer.
    q_full, q_empty = barriers(2, 1), barriers(2, 2)
    k_full, k_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    v_full, v_empty = barriers(STAGES, 1), barriers(STAGES, 2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    fence_async_shared()

    factor = gl.load(q_scale_ptr) * gl.load(k_scale_ptr) * gl.cast(scale, gl.float32) * LOG2_E
    sizes = (B, H, G, SQ, SK, EARLIEST, LATEST, plan_ptr, 1, token_ptr, 1)
    loads = (q_desc, k_desc, v_desc, tiles, bars, sizes, counter_ptr)
    sums = (tiles, bars, sizes, factor, gl.load(v_scale_ptr), out_ptr, lse_ptr, max_ptr, DV)
    gl.warp_specialize(
        [
            (_attend, (sums, 0, LEFT, RIGHT)),
            (_attend, (sums, 1, LEFT, RIGHT)),
            (_load_tiles, (loads, LEFT, RIGHT)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _has_kernel(q: Tensor, v: Tensor, scale: float, cu_seqlens_q: Tensor | None) -> bool:
    """Whether Hopper's kernel computes this attention."""
    no_sequence = cu_seqlens_q is not None and cu_seqlens_q.shape[0] == 1
    if scale <= 0 or not q.numel() or not v.numel() or no_sequence:
        return False
    return attention.has_fp8_attention(q.device, q.shape[3], v.shape[3])


def _width(head: int) -> int:
    """Return the columns of a tile, which has zeros after the columns of a head."""
    return max(_common.next_power_of_2(head), 32)


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe FP8 data for TMA; the columns of zeros that it adds change no score."""
    missing = -x.shape[-1] % 16
    if missing:
        x = torch.nn.functional.pad(x.view(torch.uint8), (0, missing)).view(x.dtype)
    rows_fit = all(stride % 16 == 0 for stride in x.stride()[:-1])
    if x.stride(-1) != 1 or not rows_fit or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    swizzle = {"swizzle_byte_width": min(columns, 128), "element_bitwidth": 8}
    layout = gl.NVMMASharedLayout(**swizzle, rank=4)
    return TensorDescriptor.from_tensor(x, [1, 1, rows, columns], layout)


@replayed
def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    window: Sequence[int], scale: float, out_dtype: torch.dtype,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    token_q: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if not _has_kernel(q, v, scale, cu_seqlens_q):
        return reference.fp8_attention(
            q, k, v, q_scale, k_scale, v_scale, window, scale, out_dtype, cu_seqlens_q,
            cu_seqlens_k, token_q,
        )  # fmt: skip
    (B, H, SQ, D), (_, G, SK, DV) = q.shape, v.shape
    left, right, diagonal = window
    # So many keys are loaded at once, in as many stages as 227 KB of shared memory can hold. With
    # wide values, the output takes half of the registers.
    keys, stages = (64, 4) if DV > 128 else (128, 3)
    stages -= D > 128
    out = reference.empty_by_token(q, (B, H, SQ, DV), out_dtype)
    lse, max_scores = (q.new_empty((B, H, SQ), dtype=torch.float32) for _ in range(2))
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    v_width = max(_common.next_power_of_2(DV), 16)
    v_desc = _descriptor(_transpose_values(v, counter, cu_seqlens_k), v_width, _SLICE)
    q_desc, k_desc = _descriptor(q, GROUP.value, _width(D)), _descriptor(k, keys, _width(D))
    tiles, plan = _plan(cu_seqlens_q, cu_seqlens_k, B, SQ, last_first=True)
    diagonal += SK - SQ if plan is None else 0
    is_square = plan is None and keys == QUERIES.value and diagonal + right == 0
    _attention_kernel[(min(_common.multiprocessors(q.device), tiles * H),)](
        q_desc, k_desc, v_desc, q_scale, k_scale, v_scale, out, lse, max_scores, counter, plan,
        token_q, B, H, G, SQ, SK, diagonal - left, diagonal + right, DV, scale, STAGES=stages,
        LEFT=left >= 0, RIGHT=0 if right < 0 else 1 + is_square,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse, max_scores


def _plan(
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, B: int, SQ: int, *, last_first: bool
) -> tuple[int, Tensor | None]:
    """Return the most tiles of a head, and a plan of those of packed sequences."""
    tiles = _common.ceil_div(SQ, QUERIES.value) * B
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return tiles, None
    sequences = cu_seqlens_q.shape[0] - 1
    tiles += sequences
    plan = cu_seqlens_q.new_empty((1 + tiles, FIELDS.value), dtype=torch.int32)
    _plan_kernel[(sequences + 1,)](
        cu_seqlens_q, cu_seqlens_k, plan, sequences, SQ, LAST_FIRST=last_first
    )
    return tiles, plan
