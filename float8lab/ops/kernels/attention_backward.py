"""Backward of FP8 attention on Hopper.  B batch, H heads, G key/value heads, S sequence, D head.

Heads of up to 128 in e4m3 have kernels in this file, for all windows and packed sequences. The
kernels keep no scores in memory and add without atomics, so gradients are reproducible in every
bit. ``_prepare_kernel`` casts the output's gradient to e4m3 with a scale for each query, also
transposed, and computes the term that the softmax's gradient subtracts. A tile of ``_keys_kernel``
has 128 keys and looks at the queries that see them; a tile of ``_queries_kernel`` has 128 queries
and looks at the keys that they see. The forward's ``_locate`` serves both: if queries and keys are
exchanged, keys see queries. In functions of both kernels, tiles have rows and blocks have columns.
Both kernels recompute the scores, and the gradients of the probabilities, by FP8 GEMMs. A single
kernel would save two GEMMs, but would add 64 KB of the queries' gradients in memory for every 128 x
128 scores, in a random order.

The gradients of the values are an FP8 GEMM of weights. A weight is a probability times its query's
scale, relative to the largest weight of all queries that see a tile of keys: relative to 1, weights
of long sequences would be too small for e4m3. The forward's largest scores give these weights. The
gradients of the scores are rounded to float16, in whose range ``DS_SCALE`` keeps them, and
multiplied by keys and queries in float16, which represents FP8 data exactly: a group of four warps
converts each block in shared memory. Persistent programs, two groups of consumers and a loading
warp are as in ``attention.py``.

Operands that these kernels do not support are dequantized, and cuDNN (or flash attention, if torch
has to be deterministic) computes in 16 bits. Both ways use the forward's output and log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from float8lab.formats import E4M3
from float8lab.ops import attention
from float8lab.ops.kernels import _common
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels._tma import arrive, async_load, barriers, wait_empty, wait_full
from float8lab.ops.kernels.attention import (
    LOG2_E,
    P_BITS,
    _count_tiles,
    _descriptor,
    _has_kernel,
    _locate,
    _next_number,
    _padded_size,
    _plan,
    _sequence_at,
    _store,
    _tell_number,
    _tiles,
    _visible,
    _width,
)
from float8lab.ops.kernels.dequantize import dequantize
from float8lab.ops.reference import attention as reference
from float8lab.ops.reference import round_up

aten = torch.ops.aten

ROWS = gl.constexpr(64)
"""Rows of a group's half of a tile, and of the blocks that the group looks at."""
DS_SCALE = gl.constexpr(2.0**-18)
"""Gradients of scores are multiplied by it: 2 ** 8 * 2 * 128 * 448 * 448 stays below 65504."""
DECODE = gl.constexpr(2.0**10)
"""``1 / (DS_SCALE * 2 ** P_BITS)``."""
CONSUMER_REGISTERS, CONVERTER_REGISTERS, LOADER_REGISTERS = map(gl.constexpr, (224, 40, 24))
SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""The layout of scores in registers."""


@launched
def _prepare_kernel(
    dout_ptr,  # [B, H, S, DV]
    out_ptr,  # [B, H, S, DV]
    token_ptr,  # None, or [S] int32: the token of dout and out that each packed row has
    lse_ptr,  # [B, H, S] fp32
    max_ptr,  # [B, H, S] fp32
    v_scale_ptr,  # [1] fp32
    d_ptr,  # [B, H, PADDED, WIDTH] fp8
    transposed_ptr,  # [B, H, WIDTH, PADDED / 4] int32: bytes of four queries each
    rows_ptr,  # [3, B * H, PADDED] fp32: see _prepare
    weights_ptr,  # [B * H, PADDED / ROWS] fp32: see _prepare
    counters_ptr,  # [2] int32, set to zero
    cu_seqlens_ptr,  # None, or [SEQUENCES + 1] int32
    SEQUENCES, H, S, PADDED, DV, stride_db, stride_dh, stride_ds, stride_ob, stride_oh, stride_os,
    WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles = PADDED // ROWS
    head = (program // tiles).to(tl.int64)
    rows = program % tiles * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    if program < 2:
        tl.store(counters_ptr + program, 0)
    queries, end = rows, S
    if cu_seqlens_ptr is not None:
        position = program % tiles * ROWS
        start, padded_start, size = _sequence_at(position, cu_seqlens_ptr, SEQUENCES)
        queries, end = rows - padded_start + start, start + size
    inside = queries < end
    exists = inside[:, None] & (columns < DV)[None, :]
    head_offset = (head // H) * stride_db + (head % H) * stride_dh
    tokens = queries
    if token_ptr is not None:
        tokens = tl.load(token_ptr + queries, mask=inside, other=0)
    offsets = tokens.to(tl.int64)[:, None] * stride_ds + columns[None, :]
    dout = tl.load(dout_ptr + head_offset + offsets, mask=exists, other=0).to(tl.float32)
    head_offset = (head // H) * stride_ob + (head % H) * stride_oh
    offsets = tokens.to(tl.int64)[:, None] * stride_os + columns[None, :]
    out = tl.load(out_ptr + head_offset + offsets, mask=exists, other=0).to(tl.float32)
    # A smaller scale would have no reciprocal in float32.
    scale = tl.maximum(tl.max(tl.abs(dout), 1) / 448.0, 2.0**-100)
    d_ptrs = d_ptr + (head * PADDED + rows)[:, None] * WIDTH + columns[None, :]
    tl.store(d_ptrs, (dout * (1.0 / scale)[:, None]).to(tl.float8e4nv))
    # The FP8 data are read back: ptxas of CUDA 12.8 loses converted values that are used twice.
    tl.debug_barrier()
    d = tl.load(d_ptrs)
    delta = tl.sum(d.to(tl.float32) * out, 1) * (DS_SCALE / tl.load(v_scale_ptr))
    lse = tl.load(lse_ptr + head * S + queries, mask=inside, other=-float("inf"))
    # A query that sees no key has no probabilities, and neither has a row after the last query.
    lse = tl.where(lse == -float("inf"), 2e30, lse * LOG2_E - tl.log2(scale))
    max_score = tl.load(max_ptr + head * S + queries, mask=inside, other=-float("inf"))
    tl.store(weights_ptr + program, tl.max(max_score * LOG2_E - lse, 0))
    plane = (tl.num_programs(0) // tiles).to(tl.int64) * PADDED
    row_ptrs = rows_ptr + head * PADDED + rows
    tl.store(row_ptrs, lse)
    tl.store(row_ptrs + plane, delta)
    tl.store(row_ptrs + 2 * plane, scale)
    # Row 16 a + 8 b + 2 c + e is byte 2 b + e of word 4 a + c, as in _transpose_values_kernel.
    x = tl.reshape(d.to(tl.uint8, bitcast=True), [ROWS // 16, 2, 4, 2, WIDTH])
    even, odd = tl.split(tl.reshape(tl.permute(x, [0, 2, 4, 1, 3]), [ROWS // 4, WIDTH, 2, 2]))
    b0, b2 = tl.split(even)
    b1, b3 = tl.split(odd)
    word = b0.to(tl.int32) | (b1.to(tl.int32) << 8)
    word |= (b2.to(tl.int32) << 16) | (b3.to(tl.int32) << 24)
    words = program % tiles * (ROWS // 4) + tl.arange(0, ROWS // 4)
    head_ptr = transposed_ptr + head * WIDTH * (PADDED // 4)
    tl.store(head_ptr + columns[:, None] * (PADDED // 4) + words[None, :], tl.trans(word))


def _prepare(
    dout: Tensor, out: Tensor, token: Tensor | None, lse: Tensor, max_scores: Tensor,
    v_scale: Tensor, cu_seqlens: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Cast the output's gradient for both kernels, padded to complete tiles of each sequence.

    Returns:
        The FP8 data; the data transposed, with queries in the order of the forward's keys; three
        float32 numbers of each query, ``[3, B * H, PADDED]``; log2 of the largest weight (a
        probability times its query's scale) of each block of queries, ``[B * H, PADDED / ROWS]``;
        and two counters that are zero. The numbers of a query are log2 of its sum of exponentials
        minus log2 of its scale; the term that softmax subtracts from the gradient of a probability
        (divided by the scales of query and values, times DS_SCALE); and its scale.
    """
    B, H, S, DV = dout.shape
    (sequences, padded), width = _padded_size(S, cu_seqlens), _width(DV)
    d = torch.empty((B, H, padded, width), dtype=E4M3, device=dout.device)
    transposed = torch.empty((B, H, width, padded), dtype=E4M3, device=dout.device)
    rows = lse.new_empty((3, B * H, padded))
    weights = lse.new_empty((B * H, padded // ROWS.value))
    counters = torch.empty(2, dtype=torch.int32, device=dout.device)
    _prepare_kernel[(padded // ROWS.value * B * H,)](
        dout, out, token, lse, max_scores, v_scale, d, transposed.view(torch.int32), rows, weights,
        counters, cu_seqlens, sequences, H, S, padded, DV, *dout.stride()[:3], *out.stride()[:3],
        WIDTH=width, num_warps=4,
    )  # fmt: skip
    return d, transposed, rows, weights, counters


@gluon.jit
def _load_tiles(arguments, FOR_KEYS: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Run the loading warp: it takes numbers of tiles, tells the groups, and loads for them."""
    fixed, streamed, numbers, bars, sizes, counter_ptr = arguments
    a_desc, b_desc, a_tiles, b_tiles = fixed
    fixed_full, fixed_empty, full, empty, _half_full = bars
    STAGES: gl.constexpr = full.shape[0]
    heads_per_tile = sizes[10]
    end = _count_tiles(sizes)
    number = gl.program_id(0)
    pass_index = 0
    count = 0
    while number < end:
        _tell_number(numbers, number, fixed_empty, pass_index)
        heads, rows, columns, first, blocks = _locate(number, sizes, ROWS, LEFT, RIGHT)
        batch, head, column_head, _ = heads
        start, padded_start, _ = columns
        buffer = pass_index % 2
        bar = fixed_full.index(buffer)
        mbarrier.expect(bar, 4 * a_desc.block_type.nbytes)
        for group in gl.static_range(2):
            row = first + ROWS * group
            box = [batch, head, rows[0] + row, 0]
            async_load(a_desc, box, bar, a_tiles.index(2 * buffer + group))
            if not FOR_KEYS:
                box = [batch, head, rows[1] + row, 0]  # the gradients are padded
            async_load(b_desc, box, bar, b_tiles.index(2 * buffer + group))
        for index in range(heads_per_tile):
            x_head = column_head * heads_per_tile + index
            for block in range(blocks[0], blocks[3]):
                stage = count % STAGES
                wait_empty(empty, count)
                bar = full.index(stage)
                box = [batch, x_head, start + block * ROWS, 0]
                if FOR_KEYS:
                    x_desc, y_desc, t_desc, r_desc, x_tiles, y_tiles, t_tiles, r_tiles = streamed
                    rows_bytes: gl.constexpr = 2 * r_desc.block_type.nbytes
                    mbarrier.expect(bar, 3 * x_desc.block_type.nbytes + rows_bytes)
                    row = padded_start + block * ROWS
                    async_load(t_desc, [batch, x_head, 0, row], bar, t_tiles.index(stage))
                    x_row = batch * sizes[1] * heads_per_tile + x_head
                    for plane in gl.static_range(2):
                        row_box = [plane, x_row, row]
                        async_load(r_desc, row_box, bar, r_tiles.index(2 * stage + plane))
                    async_load(y_desc, [batch, x_head, row, 0], bar, y_tiles.index(stage))
                else:
                    x_desc, y_desc, x_tiles, y_tiles = streamed
                    mbarrier.expect(bar, 2 * x_desc.block_type.nbytes)
                    async_load(y_desc, box, bar, y_tiles.index(stage))
                async_load(x_desc, box, bar, x_tiles.index(stage))
                count += 1
        pass_index += 1
        number = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
    # A number after the last tile tells the groups to stop.
    _tell_number(numbers, number, fixed_empty, pass_index)
    arrive(fixed_full, pass_index)


@gluon.jit
def _convert_tiles(
    x_tiles, half_tiles, numbers, bars, sizes, LEFT: gl.constexpr, RIGHT: gl.constexpr
):
    """Run a group of four warps that converts blocks of FP8 data to float16."""
    STAGES: gl.constexpr = x_tiles.shape[0]
    LANES: gl.constexpr = x_tiles.shape[2] // 16
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 16], [32 // LANES, LANES], [4, 1], [1, 0])
    fixed_full, full, half_full = bars[0], bars[2], bars[4]
    heads_per_tile = sizes[10]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, BY_ROW))
    end = _count_tiles(sizes)
    pass_index = 0
    count = 0
    number = _next_number(numbers, fixed_full, pass_index)
    while number < end:
        _heads, _rows, columns, _first, blocks = _locate(number, sizes, ROWS, LEFT, RIGHT)
        for _head in range(heads_per_tile):
            for block in range(blocks[0], blocks[3]):
                stage = count % STAGES
                wait_full(full, count)
                x = x_tiles.index(stage).load(BY_ROW).to(gl.float16)
                if sizes[7] is not None:
                    # Data after a sequence may be NaN, which even a probability of 0 does not hide.
                    inside = gl.expand_dims(block * ROWS + rows < columns[2], 1)
                    x = gl.where(inside, x, 0.0)
                half_tiles.index(stage).store(x)
                fence_async_shared()
                arrive(half_full, count)
                count += 1
        pass_index += 1
        number = _next_number(numbers, fixed_full, pass_index)


@gluon.jit
def _all_barriers(STAGES: gl.constexpr):
    """Make barriers of tiles, blocks and float16 blocks; two groups have to empty a buffer."""
    fixed_full, fixed_empty = barriers(2, 1), barriers(2, 2)
    full, empty, half_full = barriers(STAGES, 1), barriers(STAGES, 2), barriers(STAGES, 1)
    fence_async_shared()
    return fixed_full, fixed_empty, full, empty, half_full


# Gradients of keys and values.


@gluon.jit
def _add_queries(
    dk, dv, k, v, streamed, bars, count, factor, offset, query, mask,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add a block of queries to the sums; scores are transposed, so that each row is a key."""
    q_tiles, d_tiles, t_tiles, r_tiles, half_tiles = streamed
    _, _, full, empty, half_full = bars
    stage = count % full.shape[0]
    wait_full(full, count)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
    q, d = q_tiles.index(stage).permute((1, 0)), d_tiles.index(stage).permute((1, 0))
    s = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, d, zeros, use_acc=False, is_async=True)
    lse = r_tiles.index(2 * stage).load(SCORES) + offset
    s = warpgroup_mma_wait(1, (s,))
    x = s * factor - lse
    if MASKED:
        x = gl.where(_visible(s, query, *mask, LEFT, RIGHT), x, -float("inf"))
    p = gl.exp2(x)
    # Thanks to the order of queries from _prepare_kernel, this moves nothing between threads.
    p8 = gl.reshape(p.to(gl.float8e4nv), [ROWS, ROWS // 16, 2, 4, 2])
    p8 = gl.reshape(gl.permute(p8, [0, 1, 3, 2, 4]), [ROWS, ROWS])
    p8 = gl.convert_layout(p8, gl.DotOperandLayout(0, dv.type.layout, 4), assert_trivial=True)
    dv = warpgroup_mma(p8, t_tiles.index(stage).permute((1, 0)), dv, is_async=True)
    delta = r_tiles.index(2 * stage + 1).load(SCORES)
    dp = warpgroup_mma_wait(1, (dp,))
    ds = (p * (dp * DS_SCALE - delta)).to(gl.float16)
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, dk.type.layout, 2), assert_trivial=True)
    wait_full(half_full, count)
    dk = warpgroup_mma(ds, half_tiles.index(stage), dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, (dk, dv))
    arrive(empty, count)
    return dk, dv, count + 1


@launched
def _largest_kernel(
    weights_ptr,  # [B * H, BLOCKS] fp32: log2 of the largest weight of each block of queries
    largest_ptr,  # [B * G, TILES] fp32: the largest for the queries that see a tile of keys
    plan_ptr,  # from _plan_kernel for tiles of keys; None: a sequence for each of the batch
    B, G, HEADS, SK, SQ, EARLIEST, LATEST, BLOCKS,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    sizes = B, G, G, SK, SQ, EARLIEST, LATEST, plan_ptr, 0, None, HEADS
    if number < _count_tiles(sizes):
        heads, _, queries, _, blocks = _locate(number, sizes, ROWS, LEFT, RIGHT)
        lanes = tl.arange(0, WIDTH)
        largest = tl.full([WIDTH], -float("inf"), tl.float32)
        for head in range(HEADS):
            head_ptr = weights_ptr + (heads[3] * HEADS + head).to(tl.int64) * BLOCKS
            head_ptr += queries[1] // ROWS
            for first in range(blocks[0], blocks[3], WIDTH):
                seen = first + lanes < blocks[3]
                weight = tl.load(head_ptr + first + lanes, mask=seen, other=-float("inf"))
                largest = tl.maximum(largest, weight)
        # Rounding up gives a power of two, by which results are multiplied exactly.
        tl.store(largest_ptr + number, tl.ceil(tl.max(largest, 0)))


@gluon.jit
def _attend_queries(arguments, group: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Run a group of four warps: its keys of every tile look at all the queries."""
    k_tiles, v_tiles, streamed, numbers, bars, sizes, factors, largest_ptr, outs = arguments
    fixed_full, fixed_empty, _full, _empty, _half_full = bars
    factor, k_factor = factors
    dk_ptr, dv_ptr, D, DV = outs
    WIDTH: gl.constexpr = k_tiles.shape[2]
    V_WIDTH: gl.constexpr = v_tiles.shape[2]
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V_WIDTH, 32])
    heads_per_tile = sizes[10]
    end = _count_tiles(sizes)
    pass_index = 0
    count = 0
    number = _next_number(numbers, fixed_full, pass_index)
    while number < end:
        heads, keys, queries, first, blocks = _locate(number, sizes, ROWS, LEFT, RIGHT)
        start, masked_to, masked_from, stop, earliest, latest = blocks
        buffer = pass_index % 2
        k, v = k_tiles.index(2 * buffer + group), v_tiles.index(2 * buffer + group)
        first += ROWS * group
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        mask = rows, queries[2], earliest, latest
        largest = gl.load(largest_ptr + number)
        offset = largest - P_BITS
        dk = gl.zeros([ROWS, WIDTH], gl.float32, DK_LAYOUT)
        dv = gl.zeros([ROWS, V_WIDTH], gl.float32, DV_LAYOUT)
        # After the last query there are zeros, unless there are queries of the next sequence.
        MASKS_END: gl.constexpr = RIGHT or sizes[7] is not None
        between = gl.minimum(masked_from, stop) if MASKS_END else stop
        bounds = start, masked_to, between, stop
        for _head in range(heads_per_tile):
            for section in gl.static_range(3):
                for block in range(bounds[section], bounds[section + 1]):
                    dk, dv, count = _add_queries(
                        dk, dv, k, v, streamed, bars, count, factor, offset, block * ROWS, mask,
                        LEFT, RIGHT, section != 1,
                    )  # fmt: skip
        arrive(fixed_empty, pass_index)
        pass_index += 1
        _store(dv_ptr, dv * gl.exp2(offset), first, heads, keys, DV, sizes)
        dk *= gl.exp2(largest) * k_factor
        _store(dk_ptr, dk, first, heads, keys, D, sizes)
        number = _next_number(numbers, fixed_full, pass_index)


@launched(language=gluon, do_not_specialize=["B", "HEADS", "G", "SQ", "SK", "EARLIEST", "LATEST"])
def _keys_kernel(
    k_desc,  # [B, G, SK, D] fp8, in tiles of [ROWS, WIDTH], as q_desc
    v_desc,  # [B, G, SK, DV] fp8, in tiles of [ROWS, V_WIDTH], as d_desc
    t_desc,  # [B, H, V_WIDTH, PADDED] fp8, from _prepare, in tiles of [V_WIDTH, ROWS]
    r_desc,  # [3, B * H, PADDED] fp32, from _prepare, in tiles of [1, ROWS]
    q_desc,  # [B, H, SQ, D] fp8
    d_desc,  # [B, H, PADDED, V_WIDTH] fp8, from _prepare
    q_scale_ptr, k_scale_ptr, v_scale_ptr,  # [1] fp32
    largest_ptr,  # [B * G, tiles] fp32, from _largest_kernel
    dk_ptr,  # [B, SK, G, D]
    dv_ptr,  # [B, SK, G, DV]
    counter_ptr,  # [1] int32, zero
    token_ptr,  # None, or [SK] int32: the tokens of packed keys
    plan_ptr,  # as in _largest_kernel, like the next arguments
    B, G, HEADS, SK, SQ, EARLIEST, LATEST, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
    DV: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()  # the queries' kernel takes each multiprocessor that gets free
    k_tiles, v_tiles = _tiles(k_desc, 4), _tiles(v_desc, 4)
    q_tiles, d_tiles = _tiles(q_desc, STAGES), _tiles(d_desc, STAGES)
    t_tiles, half_tiles = _tiles(t_desc, STAGES), _tiles(q_desc, STAGES, 16)
    R_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=2)
    r_tiles = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 1, ROWS], R_LAYOUT)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = _all_barriers(STAGES)
    scale = gl.load(q_scale_ptr) * gl.cast(scale, gl.float32)
    factors = scale * gl.load(k_scale_ptr) * LOG2_E, scale * gl.load(v_scale_ptr) * DECODE
    sizes = B, G, G, SK, SQ, EARLIEST, LATEST, plan_ptr, 0, token_ptr, HEADS
    blocks = q_tiles, d_tiles, t_tiles, r_tiles, half_tiles
    outs = dk_ptr, dv_ptr, D, DV
    sums = k_tiles, v_tiles, blocks, numbers, bars, sizes, factors, largest_ptr, outs
    fixed = k_desc, v_desc, k_tiles, v_tiles
    streamed = q_desc, d_desc, t_desc, r_desc, q_tiles, d_tiles, t_tiles, r_tiles
    loads = fixed, streamed, numbers, bars, sizes, counter_ptr
    gl.warp_specialize(
        [
            (_attend_queries, (sums, 0, LEFT, RIGHT)),
            (_attend_queries, (sums, 1, LEFT, RIGHT)),
            (_convert_tiles, (q_tiles, half_tiles, numbers, bars, sizes, LEFT, RIGHT)),
            (_load_tiles, (loads, True, LEFT, RIGHT)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONVERTER_REGISTERS, LOADER_REGISTERS],
    )


# Gradients of queries.


@gluon.jit
def _multiply_scores(s, dp, q, d, streamed, full, count, exists):
    """Start the GEMMs of a block's scores and of the probabilities' gradients."""
    k_tiles, v_tiles, _ = streamed
    stage = count % full.shape[0]
    wait_full(full, count, exists)
    k, v = k_tiles.index(stage).permute((1, 0)), v_tiles.index(stage).permute((1, 0))
    s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
    dp = warpgroup_mma(d, v, dp, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _add_keys(
    s, dp, dq, q, d, streamed, bars, count, factor, lse, delta, key, mask, has_next,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add a block of keys, whose scores are given, and compute the scores of the next block."""
    _, _, full, empty, half_full = bars
    stage = count % full.shape[0]
    x = s * factor - gl.expand_dims(lse, 1)
    y = dp * DS_SCALE - gl.expand_dims(delta, 1)
    if MASKED:
        visible = _visible(s, key, *mask, LEFT, RIGHT)
        x, y = gl.where(visible, x, -float("inf")), gl.where(visible, y, 0.0)
    # The new scores overwrite the registers of the old. After the last block they have no meaning.
    s, dp = _multiply_scores(s, dp, q, d, streamed, full, count + 1, has_next)
    ds = (gl.exp2(x) * y).to(gl.float16)
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, dq.type.layout, 2), assert_trivial=True)
    wait_full(half_full, count)
    dq = warpgroup_mma(ds, streamed[2].index(stage), dq, is_async=True)
    s, dp, dq = warpgroup_mma_wait(0, (s, dp, dq))
    arrive(empty, count)
    return s, dp, dq, count + 1


@gluon.jit
def _attend_keys(arguments, group: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Run a group of four warps: its queries of every tile look at all the keys."""
    q_tiles, d_tiles, streamed, numbers, bars, sizes, factors, rows_ptr, outs = arguments
    fixed_full, fixed_empty, full, _empty, _half_full = bars
    factor, q_factor = factors
    dq_ptr, D, PADDED = outs
    WIDTH: gl.constexpr = q_tiles.shape[2]
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    end = _count_tiles(sizes)
    plane = gl.cast(sizes[0] * sizes[1], gl.int64) * PADDED
    pass_index = 0
    count = 0
    number = _next_number(numbers, fixed_full, pass_index)
    while number < end:
        heads, queries, keys, first, blocks = _locate(number, sizes, ROWS, LEFT, RIGHT)
        start, masked_to, masked_from, stop, earliest, latest = blocks
        buffer = pass_index % 2
        q, d = q_tiles.index(2 * buffer + group), d_tiles.index(2 * buffer + group)
        first += ROWS * group
        rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, SCORES))
        mask = rows, keys[2], earliest, latest
        row_ptrs = rows_ptr + heads[3].to(gl.int64) * PADDED + queries[1] + rows
        delta, row_scale = gl.load(row_ptrs + plane), gl.load(row_ptrs + 2 * plane)
        lse = gl.load(row_ptrs) + gl.log2(row_scale) - P_BITS
        dq = gl.zeros([ROWS, WIDTH], gl.float32, DQ_LAYOUT)
        zeros = gl.zeros([ROWS, ROWS], gl.float32, SCORES)
        s, dp = _multiply_scores(zeros, zeros, q, d, streamed, full, count, True)
        s, dp = warpgroup_mma_wait(0, (s, dp))
        bounds = start, masked_to, gl.maximum(gl.minimum(masked_from, stop - 1), masked_to), stop
        for section in gl.static_range(3):
            for block in range(bounds[section], bounds[section + 1]):
                s, dp, dq, count = _add_keys(
                    s, dp, dq, q, d, streamed, bars, count, factor, lse, delta, block * ROWS, mask,
                    section == 1 or block < stop - 1, LEFT, RIGHT, section != 1,
                )  # fmt: skip
        arrive(fixed_empty, pass_index)
        pass_index += 1
        decode = gl.convert_layout(row_scale * q_factor, gl.SliceLayout(1, DQ_LAYOUT))
        dq = dq * gl.expand_dims(decode, 1)
        _store(dq_ptr, dq, first, heads, queries, D, sizes)
        number = _next_number(numbers, fixed_full, pass_index)


@launched(language=gluon, do_not_specialize=["B", "H", "G", "SQ", "SK", "EARLIEST", "LATEST"])
def _queries_kernel(
    q_desc,  # [B, H, SQ, D] fp8, in tiles of [ROWS, WIDTH], as k_desc
    d_desc,  # [B, H, PADDED, V_WIDTH] fp8, from _prepare, in tiles of [ROWS, V_WIDTH], as v_desc
    k_desc,  # [B, G, SK, D] fp8
    v_desc,  # [B, G, SK, DV] fp8
    q_scale_ptr, k_scale_ptr, v_scale_ptr,  # [1] fp32
    rows_ptr,  # [3, B * H, PADDED] fp32, from _prepare
    dq_ptr,  # [B, SQ, H, D]
    counter_ptr,  # [1] int32, zero
    plan_ptr,  # as in _attention_kernel, like the next arguments
    token_ptr,
    B, H, G, SQ, SK, EARLIEST, LATEST, PADDED, scale,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    q_tiles, d_tiles = _tiles(q_desc, 4), _tiles(d_desc, 4)
    k_tiles, v_tiles = _tiles(k_desc, STAGES), _tiles(v_desc, STAGES)
    half_tiles = _tiles(k_desc, STAGES, 16)
    numbers = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = _all_barriers(STAGES)
    scale = gl.load(k_scale_ptr) * gl.cast(scale, gl.float32)
    factors = scale * gl.load(q_scale_ptr) * LOG2_E, scale * gl.load(v_scale_ptr) * DECODE
    sizes = B, H, G, SQ, SK, EARLIEST, LATEST, plan_ptr, 1, token_ptr, 1
    blocks = k_tiles, v_tiles, half_tiles
    outs = dq_ptr, D, PADDED
    sums = q_tiles, d_tiles, blocks, numbers, bars, sizes, factors, rows_ptr, outs
    fixed = q_desc, d_desc, q_tiles, d_tiles
    streamed = k_desc, v_desc, k_tiles, v_tiles
    loads = fixed, streamed, numbers, bars, sizes, counter_ptr
    gl.warp_specialize(
        [
            (_attend_keys, (sums, 0, LEFT, RIGHT)),
            (_attend_keys, (sums, 1, LEFT, RIGHT)),
            (_convert_tiles, (k_tiles, half_tiles, numbers, bars, sizes, LEFT, RIGHT)),
            (_load_tiles, (loads, False, LEFT, RIGHT)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CONVERTER_REGISTERS, LOADER_REGISTERS],
    )
    gdc_wait()  # a kernel after this one may read what the keys' kernel wrote


def _fp8_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor,
    v_scale: Tensor, out: Tensor, lse: Tensor, max_scores: Tensor, window: Sequence[int],
    scale: float, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    token_q: Tensor | None, token_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v by the kernels above."""
    (B, H, SQ, D), (_, G, SK, DV) = q.shape, v.shape
    left, right, diagonal = window
    dout, out = map(_common.by_rows, (dout, out))
    d, transposed, rows, weights, counters = _prepare(
        dout, out, token_q, lse.contiguous(), max_scores.contiguous(), v_scale, cu_seqlens_q
    )
    dq, dk, dv = (reference.empty_by_token(x, x.shape, dout.dtype) for x in (q, k, v))
    tiles, plan = _plan(cu_seqlens_q, cu_seqlens_k, B, SQ, last_first=True)
    key_tiles, key_plan = _plan(cu_seqlens_k, cu_seqlens_q, B, SK, last_first=False)
    diagonal += SK - SQ if plan is None else 0
    q_desc, k_desc, v_desc, d_desc = (
        _descriptor(x, ROWS.value, _width(x.shape[3])) for x in (q, k, v, d)
    )
    t_desc = _descriptor(transposed, transposed.shape[2], ROWS.value)
    r_layout = gl.NVMMASharedLayout(0, 32, rank=3)
    r_desc = TensorDescriptor.from_tensor(rows, [1, 1, ROWS.value], r_layout)
    settings = {"num_warps": 4, "enable_fp_fusion": True}
    multiprocessors = _common.multiprocessors(q.device)
    # A key is seen by the queries from ``right`` before it to ``left`` after it.
    key_sizes = B, G, H // G, SK, SQ, -diagonal - right, left - diagonal
    sides = {"LEFT": right >= 0, "RIGHT": left >= 0}
    largest = weights.new_empty(key_tiles * G)
    _largest_kernel[(key_tiles * G,)](
        weights, largest, key_plan, *key_sizes, weights.shape[1], WIDTH=1024, num_warps=4, **sides
    )
    _keys_kernel[(min(multiprocessors, key_tiles * G),)](
        k_desc, v_desc, t_desc, r_desc, q_desc, d_desc, q_scale, k_scale, v_scale, largest, dk, dv,
        counters, token_k, key_plan, *key_sizes, scale, STAGES=3, D=D, DV=DV, **sides, **settings,
    )  # fmt: skip
    _queries_kernel[(min(multiprocessors, tiles * H),)](
        q_desc, d_desc, k_desc, v_desc, q_scale, k_scale, v_scale, rows, dq, counters[1:], plan,
        token_q, B, H, G, SQ, SK, diagonal - left, diagonal + right, rows.shape[2], scale,
        LEFT=left >= 0, RIGHT=right >= 0, STAGES=4, D=D, launch_pdl=True, **settings,
    )  # fmt: skip
    return dq, dk, dv


@replayed
def fp8_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor,
    v_scale: Tensor, out: Tensor, lse: Tensor, max_scores: Tensor, window: Sequence[int],
    scale: float, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int = 0, max_seqlen_k: int = 0, token_q: Tensor | None = None,
    token_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (SQ, D), (SK, DV) = q.shape[2:], v.shape[2:]
    packed = cu_seqlens_q is not None
    sizes = (max_seqlen_q, max_seqlen_k) if packed else (SQ, SK)
    uses_cudnn = not torch.are_deterministic_algorithms_enabled()
    uses_cudnn = uses_cudnn and attention.is_for_cudnn(*sizes, window, packed=packed)
    flash_window = attention.flash_window(*sizes, window, packed=packed)
    fits = _has_kernel(q, v, scale, cu_seqlens_q) and (packed or min(SQ, SK) > 1)
    if fits and attention.has_fp8_backward(q, k, v):
        return _fp8_backward(
            dout, q, k, v, q_scale, k_scale, v_scale, out, lse, max_scores, window, scale,
            cu_seqlens_q, cu_seqlens_k, token_q, token_k,
        )  # fmt: skip
    if not fits or not (uses_cudnn or flash_window is not None):
        return reference.fp8_attention_backward(
            dout, q, k, v, q_scale, k_scale, v_scale, out, lse, max_scores, window, scale,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, token_q=token_q, token_k=token_k,
        )  # fmt: skip
    dtype = torch.bfloat16 if dout.dtype == torch.float32 else dout.dtype
    operands = [_decoded(x, s, dtype) for x, s in ((q, q_scale), (k, k_scale), (v, v_scale))]
    dout, out = reference.pack_tokens(dout, token_q), reference.pack_tokens(out, token_q)
    tensors = [dout.to(dtype), *operands, out.to(dtype)]
    # Padding with zeros changes no score. Flash attention needs all heads of the same size.
    width, v_width = attention.cudnn_heads(D, DV) if uses_cudnn else [round_up(max(D, DV), 8)] * 2
    widths = (v_width, width, width, v_width, v_width)
    tensors = [_padded(x, size, 3) for x, size in zip(tensors, widths, strict=True)]
    if uses_cudnn or flash_window is None:
        gradients = _cudnn_backward(tensors, lse, window[1] == 0, scale)
    else:
        gradients = _flash_backward(tensors, lse, flash_window, scale, cu_seqlens_q, cu_seqlens_k)
    dq, dk, dv = (
        reference.by_token(x[..., :size].to(dout.dtype))
        for x, size in zip(gradients, (D, D, DV), strict=True)
    )
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        for x, cu_seqlens in ((dq, cu_seqlens_q), (dk, cu_seqlens_k), (dv, cu_seqlens_k)):
            token = torch.arange(x.shape[2], device=x.device)
            x.masked_fill_((token >= cu_seqlens[-1]).view(-1, 1), 0.0)  # no sequence has them
    dq, dk, dv = map(reference.unpack_tokens, (dq, dk, dv), (token_q, token_k, token_k))
    return dq, dk, dv


def _padded(x: Tensor, size: int, dim: int) -> Tensor:
    """Pad ``x`` with zeros up to ``size`` in a dimension."""
    missing = size - x.shape[dim]
    return torch.nn.functional.pad(x, (0, 0) * (3 - dim) + (0, missing)) if missing else x


def _cudnn_backward(
    tensors: Sequence[Tensor], lse: Tensor, causal: bool, scale: float
) -> Sequence[Tensor]:
    """Compute dq, dk and dv by cuDNN from the output's gradient, q, k, v and the output."""
    dout, q, k, v, out = tensors
    # PyTorch 2.11 caches cuDNN's plans by the strides of q, k and v alone: a later call, with other
    # strides of the output and its gradient, gave wrong results.
    dout, out = reference.by_token(dout), reference.by_token(out)
    seed = lse.new_zeros(2, dtype=torch.int64)  # there is no dropout
    gradients: Sequence[Tensor] = aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse.unsqueeze(-1), seed[0], seed[1], None, None, None, q.shape[2],
        k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return gradients


def _flash_backward(
    tensors: Sequence[Tensor], lse: Tensor, window: attention.FlashWindow, scale: float,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
) -> Sequence[Tensor]:  # fmt: skip
    """Compute dq, dk and dv by flash attention, for a window or packed sequences."""
    SQ, SK = lse.shape[2], tensors[2].shape[2]
    sizes = window.queries, window.keys
    dout, q, k, v, out = (x.transpose(1, 2) for x in tensors)
    if cu_seqlens_q is None:
        dout, q, out = (x[:, : window.queries] for x in (dout, q, out))
        k, v = k[:, : window.keys], v[:, : window.keys]
        lse = lse[:, :, : window.queries].contiguous()
    else:
        dout, q, k, v, out, lse = (x[0] for x in (dout, q, k, v, out, lse))
    seed = lse.new_zeros(2, dtype=torch.int64).view(torch.uint64)  # there is no dropout
    gradients = aten._flash_attention_backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *sizes, 0.0, False, seed, seed[0],
        scale=scale, window_size_left=window.left, window_size_right=window.right,
    )  # fmt: skip
    dq, dk, dv = (x.view(-1, *x.shape[-3:]).transpose(1, 2) for x in gradients)
    return _padded(dq, SQ, 2), _padded(dk, SK, 2), _padded(dv, SK, 2)


def _decoded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    B, H, S, D = x.shape
    rows = x.transpose(1, 2).reshape(B * S, H * D)
    return dequantize(rows, scale, (-1, -1), dtype).view(B, S, H, D).transpose(1, 2)
