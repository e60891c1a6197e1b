"""FP8 attention on Hopper.  B batch, H heads, G key/value heads, S sequence, D head size.

Forward is one persistent Gluon kernel: a program for each multiprocessor, which takes tiles of 128
queries of a head from a common counter until there are none left. Two groups of four warps have 64
queries each; one warp loads queries, keys and values for both, of the next tile too while the last
one is being stored. While a group computes the probabilities of one tile of keys, its tensor cores
multiply the next tile's scores, then the first half of the probabilities by their values, and the
other group's whatever is due there. Softmax is online: probabilities are rounded relative to the
largest score so far, not to the row's largest, which is the one difference from the reference
besides the order of sums and the tensor cores' accumulator (14 bits of each sum of 32 terms).

The second GEMM contracts over the keys, and FP8 operands must be contiguous along a contraction:
``_turn_kernel`` transposes the values first. It also orders the keys of every 16 such that the four
probabilities of a thread that become one 32-bit register are those which the tensor cores expect
there; the sum over the keys does not mind.

Backward is cuDNN's (or flash attention's, where PyTorch is asked to be deterministic) in 16 bits,
on the dequantized operands, from the forward's output and log-sum-exp.
"""

from __future__ import annotations

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

from float8lab.ops.attention import has_fp8_attention
from float8lab.ops.kernels._common import (
    ceil_div,
    multiprocessors,
    next_power_of_2,
    on_device_of_first,
)
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._tma import async_load
from float8lab.ops.kernels.dequantize import dequantize
from float8lab.ops.reference import attention as plain
from float8lab.ops.reference import round_up

aten = torch.ops.aten

_GROUP = 64
"""Queries of a group of four warps: the rows of one tensor core instruction."""
_QUERIES = 2 * _GROUP
_KEYS = 128
_STAGES = 3
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
P_BITS = gl.constexpr(8.0)
"""Probabilities are held times 2 ** 8, which is ``1 / P_SCALE``."""


# Values, transposed.


@launched
def _turn_kernel(
    v_ptr,  # [B, G, SK, DV] uint8
    out_ptr,  # [B, G, DV, PADDED / 4] int32: bytes of four keys each
    counter_ptr,  # [1] int32, set to zero
    SK, PADDED, DV, G, stride_b, stride_g, stride_s, stride_d,
    TILE_K: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    # The end first: a cast that has just written it has left it in the cache.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if program == 0:
        tl.store(counter_ptr, 0)
    head = (program // (PADDED // TILE_K)).to(tl.int64)
    tile = program % (PADDED // TILE_K)
    words = tile * (TILE_K // 4) + tl.arange(0, TILE_K // 4)
    # Of every 16 keys, the words of keys 0 1 8 9, then 2 3 10 11, and so on.
    keys = (words // 4) * 16 + (words % 4) * 2
    columns = tl.arange(0, TILE_D)
    v_ptr += (head // G) * stride_b + (head % G) * stride_g
    v_ptrs = v_ptr + keys.to(tl.int64)[:, None] * stride_s + columns[None, :] * stride_d
    inside = (columns < DV)[None, :]
    stride_s = tl.cast(stride_s, tl.int64)
    b0 = tl.load(v_ptrs, mask=inside & (keys < SK)[:, None], other=0).to(tl.int32)
    b1 = tl.load(v_ptrs + stride_s, mask=inside & (keys + 1 < SK)[:, None], other=0).to(tl.int32)
    b2 = tl.load(v_ptrs + 8 * stride_s, mask=inside & (keys + 8 < SK)[:, None], other=0)
    b3 = tl.load(v_ptrs + 9 * stride_s, mask=inside & (keys + 9 < SK)[:, None], other=0)
    word = b0 | (b1 << 8) | (b2.to(tl.int32) << 16) | (b3.to(tl.int32) << 24)
    out_ptrs = out_ptr + (head * DV + columns[:, None]) * (PADDED // 4) + words[None, :]
    tl.store(out_ptrs, tl.trans(word), mask=(columns < DV)[:, None])


def _turn(v: Tensor, counter: Tensor) -> Tensor:
    """``[B, G, DV, PADDED]`` of the values, keys in the order of ``_turn_kernel``, then zeros.

    ``counter`` is zero afterwards.
    """
    B, G, SK, DV = v.shape
    padded = round_up(SK, _KEYS)
    out = torch.empty((B, G, DV, padded), dtype=v.dtype, device=v.device)
    _turn_kernel[(padded // _KEYS * B * G,)](
        v.view(torch.uint8), out.view(torch.int32), counter, SK, padded, DV, G, *v.stride(),
        TILE_K=_KEYS, TILE_D=next_power_of_2(DV),
    )  # fmt: skip
    return out


# Forward.


@gluon.jit
def _place(number, sizes, CAUSAL: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr):
    """A tile's batch, head, key/value head, row of lse, first query, tiles of keys to see."""
    _, H, G, SQ, SK = sizes
    tiles = gl.cdiv(SQ, QUERIES)
    row_of_lse = number // tiles
    tile = number % tiles
    blocks = gl.cdiv(SK, KEYS)
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest first
        blocks = gl.minimum(blocks, tile + 1)
    head = row_of_lse % H
    return row_of_lse // H, head, head // (H // G), row_of_lse, tile * QUERIES, blocks


@gluon.jit
def _tiles_in_all(sizes, QUERIES: gl.constexpr):
    B, H, _, SQ, _ = sizes
    return B * H * gl.cdiv(SQ, QUERIES)


@gluon.jit
def _load_tiles(
    arguments, CAUSAL: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):
    """The loading warp: take numbers of tiles, tell the groups, load what they need."""
    q_desc, k_desc, v_desc, tiles, bars, sizes, counter_ptr = arguments
    q_tiles, k_tiles, v_tiles, numbers = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    end = _tiles_in_all(sizes, 2 * GROUP)
    number = gl.program_id(0)
    pass_index = 0
    count = 0
    while number < end:
        side = pass_index % 2
        _tell_number(numbers, number, q_empty, pass_index)
        batch, head, kv_head, _, first, blocks = _place(number, sizes, CAUSAL, 2 * GROUP, KEYS)
        mbarrier.expect(q_full.index(side), 2 * q_desc.block_type.nbytes)
        for group in gl.static_range(2):
            at = [batch, head, first + GROUP * group, 0]
            async_load(q_desc, at, q_full.index(side), q_tiles.index(2 * side + group))
        for block in range(blocks):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            at = [batch, kv_head, block * KEYS, 0]
            async_load(k_desc, at, k_full.index(stage), k_tiles.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), 2 * v_desc.block_type.nbytes)
            for half in gl.static_range(2):
                at = [batch, kv_head, 0, block * KEYS + half * (KEYS // 2)]
                async_load(v_desc, at, v_full.index(stage), v_tiles.index(2 * stage + half))
            count += 1
        pass_index += 1
        number = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
    # A number that is no tile's: the end.
    _tell_number(numbers, number, q_empty, pass_index)
    mbarrier.arrive(q_full.index(pass_index % 2), count=1)


@gluon.jit
def _tell_number(numbers, number, q_empty, pass_index):
    """The groups, as soon as both have done with the queries of the turn before the last."""
    side = pass_index % 2
    mbarrier.wait(q_empty.index(side), ((pass_index // 2) & 1) ^ 1)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    numbers.index(side).store(gl.full([1], number, gl.int32, ONE))


@gluon.jit
def _next_number(numbers, q_full, pass_index):
    """The number that the loading warp has told."""
    side = pass_index % 2
    mbarrier.wait(q_full.index(side), (pass_index // 2) & 1)
    return gl.max(numbers.index(side).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _row_max(x, like):
    """In four chains a thread and row, since a warp has no other work while it waits for one."""
    halves = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 16, 8])
    return gl.convert_layout(gl.max(gl.max(gl.max(halves, 2), 1), 1), like.type.layout)


@gluon.jit
def _row_sum(x, like):
    """In four chains as well."""
    halves = gl.reshape(x, [x.shape[0], 2, x.shape[1] // 16, 8])
    return gl.convert_layout(gl.sum(gl.sum(gl.sum(halves, 2), 1), 1), like.type.layout)


@gluon.jit
def _exponents(s, largest, factor):
    """A tile of scores: its probabilities' logarithms, what to scale former sums by, maxima."""
    new = gl.maximum(largest, _row_max(s, largest))
    rescale = gl.exp2((largest - new) * factor)
    return s * factor - gl.expand_dims(new * factor - P_BITS, 1), rescale, new


@gluon.jit
def _add_values(x, rescale, exp_sum, out, v_tiles, stage):
    """The GEMM of a tile's probabilities and values, in flight, and the new total."""
    # While the tensor cores multiply one half, the other half's exponentials are computed.
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    WIDTH: gl.constexpr = v_tiles.shape[1]
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    X_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    out = out * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, O_LAYOUT)), 1)
    exp_sum *= rescale
    halves = gl.split(gl.permute(gl.reshape(x, [ROWS, 2, HALF]), [0, 2, 1]))
    for half in gl.static_range(2):
        p = gl.exp2(gl.convert_layout(halves[half], X_LAYOUT, assert_trivial=True))
        exp_sum += _row_sum(p, exp_sum)
        # In the order of keys that ``_turn_kernel`` has this moves nothing between threads.
        p8 = gl.reshape(p.to(gl.float8e4nv), [ROWS, HALF // 16, 2, 4, 2])
        p8 = gl.reshape(gl.permute(p8, [0, 1, 3, 2, 4]), [ROWS, HALF])
        p8 = gl.convert_layout(p8, P_LAYOUT, assert_trivial=True)
        out = warpgroup_mma(p8, v_tiles.index(2 * stage + half).permute((1, 0)), out, is_async=True)
    return out, exp_sum


@gluon.jit
def _attend(  # noqa: PLR0915
    arguments, group: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):
    """A group of four warps: its queries of every tile, all the keys."""
    (
        tiles, bars, sizes, factor, v_scale, out_ptr, lse_ptr, DV, stride_ob, stride_oh, stride_os,
    ) = arguments  # fmt: skip
    q_tiles, k_tiles, v_tiles, numbers = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    _, _, _, SQ, SK = sizes
    ROWS: gl.constexpr = q_tiles.shape[1]
    WIDTH: gl.constexpr = v_tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)

    end = _tiles_in_all(sizes, 2 * ROWS)
    pass_index = 0
    count = 0
    number = _next_number(numbers, q_full, pass_index)
    while number < end:
        batch, head, _, row_of_lse, first, blocks = _place(number, sizes, CAUSAL, 2 * ROWS, KEYS)
        out = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
        largest = gl.full([ROWS], -float("inf"), gl.float32, S_ROWS)
        exp_sum = gl.zeros([ROWS], gl.float32, S_ROWS)
        q = q_tiles.index(2 * (pass_index % 2) + group)
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        s = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
        s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), s, use_acc=False)
        mbarrier.arrive(k_empty.index(stage), count=1)
        for _block in range(blocks - 1):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            count += 1
            ahead = count % STAGES
            x, rescale, largest = _exponents(s, largest, factor)
            mbarrier.wait(k_full.index(ahead), (count // STAGES) & 1)
            # Into the registers of the scores that are done with: none have to be moved.
            k = k_tiles.index(ahead).permute((1, 0))
            s = warpgroup_mma(q, k, s, use_acc=False, is_async=True)
            # As early as this, because the branch in a wait keeps ptxas from moving exponentials
            # ahead of the scores' GEMM.
            mbarrier.wait(v_full.index(stage), phase)
            out, exp_sum = _add_values(x, rescale, exp_sum, out, v_tiles, stage)
            s = warpgroup_mma_wait(2, (s,))
            mbarrier.arrive(k_empty.index(ahead), count=1)
            out = warpgroup_mma_wait(0, (out,))
            mbarrier.arrive(v_empty.index(stage), count=1)
        mbarrier.arrive(q_empty.index(pass_index % 2), count=1)

        # Only the last tile has keys that are not there or not yet to be seen: tiles are square.
        rows = first + ROWS * group + gl.arange(0, ROWS, S_ROWS)
        keys = (blocks - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
        seen = gl.expand_dims(keys < SK, 0)
        if CAUSAL:
            seen = seen & (gl.expand_dims(keys, 0) <= gl.expand_dims(rows, 1))
        x, rescale, largest = _exponents(gl.where(seen, s, -float("inf")), largest, factor)
        stage = count % STAGES
        mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
        out, exp_sum = _add_values(x, rescale, exp_sum, out, v_tiles, stage)
        out = warpgroup_mma_wait(0, (out,))
        mbarrier.arrive(v_empty.index(stage), count=1)
        count += 1
        pass_index += 1

        decode = v_scale / exp_sum  # the total is times 2 ** 8 too
        out = out * gl.expand_dims(gl.convert_layout(decode, gl.SliceLayout(1, O_LAYOUT)), 1)
        of_head = out_ptr + batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
        _store(of_head, out, first + ROWS * group, SQ, DV, stride_os)
        lse = (largest * factor - P_BITS) * LN_2 + gl.log(exp_sum)
        gl.store(lse_ptr + row_of_lse.to(gl.int64) * SQ + rows, lse, mask=rows < SQ)
        number = _next_number(numbers, q_full, pass_index)


@gluon.jit
def _store(out_ptr, out, first, SQ, DV, stride_os):
    # Eight neighbours to a thread: of the tensor cores' layout a warp stores eight rows at a time,
    # 16 bytes of each.
    LANES: gl.constexpr = out.shape[1] // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), LAYOUT)
    rows = first + gl.arange(0, out.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, out.shape[1], gl.SliceLayout(0, LAYOUT))
    offsets = gl.expand_dims(rows.to(gl.int64) * stride_os, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(rows < SQ, 1) & gl.expand_dims(columns < DV, 0)
    gl.store(out_ptr + offsets, out, mask=inside)


# Sizes are no constants: of a single key, all masked probabilities would be one value to ptxas,
# which then takes half of a word of them from a register that was never written (CUDA 12.8).
@gluon.jit(do_not_specialize=["SQ", "SK"])
def _attention_kernel(
    q_desc,  # [B, H, SQ, D] fp8, in tiles of [GROUP, D_TILE]
    k_desc,  # [B, G, SK, D] fp8, in tiles of [KEYS, D_TILE]
    v_desc,  # [B, G, DV, SK] fp8, from _turn, in tiles of [DV_TILE, KEYS / 2]
    q_scale_ptr,  # [1] fp32
    k_scale_ptr,  # [1] fp32
    v_scale_ptr,  # [1] fp32
    out_ptr,  # [B, H, SQ, DV]
    lse_ptr,  # [B, H, SQ] fp32
    counter_ptr,  # [1] int32, zero
    B, H, G, SQ, SK, DV, stride_ob, stride_oh, stride_os, scale,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    D_TILE: gl.constexpr, DV_TILE: gl.constexpr, QK_LAYOUT: gl.constexpr, V_LAYOUT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    gl.static_assert(2 * GROUP == KEYS, "a causal mask cuts the last tile of keys only")
    # Queries and numbers of two tiles.
    tiles = (
        gl.allocate_shared_memory(q_desc.dtype, [4, GROUP, D_TILE], QK_LAYOUT),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, D_TILE], QK_LAYOUT),
        gl.allocate_shared_memory(v_desc.dtype, [2 * STAGES, DV_TILE, KEYS // 2], V_LAYOUT),
        gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
    )
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    for side in gl.static_range(2):
        mbarrier.init(q_full.index(side), count=1)
        mbarrier.init(q_empty.index(side), count=2)  # both groups
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    factor = gl.load(q_scale_ptr) * gl.load(k_scale_ptr) * gl.cast(scale, gl.float32) * LOG2_E
    sizes = (B, H, G, SQ, SK)
    loads = (q_desc, k_desc, v_desc, tiles, bars, sizes, counter_ptr)
    sums = (
        tiles, bars, sizes, factor, gl.load(v_scale_ptr), out_ptr, lse_ptr, DV, stride_ob,
        stride_oh, stride_os,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (sums, 0, CAUSAL, KEYS, STAGES)),
            (_attend, (sums, 1, CAUSAL, KEYS, STAGES)),
            (_load_tiles, (loads, CAUSAL, GROUP, KEYS, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _has_kernel(q: Tensor, v: Tensor, scale: float) -> bool:
    """Whether Hopper's kernel computes it."""
    if scale <= 0 or not q.numel() or not v.numel():
        return False
    return has_fp8_attention(q.device, q.shape[3], v.shape[3])


def _loadable(x: Tensor) -> Tensor:
    """The same, as TMA takes it; more columns of zeros do not change a score."""
    columns = round_up(x.shape[-1], 16)
    if x.shape[-1] != columns:
        x = torch.nn.functional.pad(x.view(torch.uint8), (0, columns - x.shape[-1])).view(x.dtype)
    rows_fit = all(stride % 16 == 0 for stride in x.stride()[:-1])
    if x.stride(-1) != 1 or not rows_fit or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    swizzle = {"swizzle_byte_width": min(columns, 128), "element_bitwidth": 8}
    layout = gl.NVMMASharedLayout(**swizzle, rank=4)
    return TensorDescriptor.from_tensor(x, [1, 1, rows, columns], layout)


@on_device_of_first
def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    causal: bool, scale: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not _has_kernel(q, v, scale):
        return plain.fp8_attention(q, k, v, q_scale, k_scale, v_scale, causal, scale, out_dtype)
    (B, H, SQ, D), (_, G, SK, DV) = q.shape, v.shape
    d_tile = max(next_power_of_2(D), 32)
    dv_tile = max(next_power_of_2(DV), 16)
    out = plain.empty_by_token(q, (B, H, SQ, DV), out_dtype)
    lse = q.new_empty((B, H, SQ), dtype=torch.float32)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    v_desc = _descriptor(_turn(v, counter), dv_tile, _KEYS // 2)
    q_desc = _descriptor(_loadable(q), _GROUP, d_tile)
    k_desc = _descriptor(_loadable(k), _KEYS, d_tile)
    programs = min(multiprocessors(q.device), ceil_div(SQ, _QUERIES) * B * H)
    _attention_kernel[(programs,)](
        q_desc, k_desc, v_desc, q_scale, k_scale, v_scale, out, lse, counter, B, H, G, SQ, SK, DV,
        *out.stride()[:3], scale, CAUSAL=causal, GROUP=_GROUP, KEYS=_KEYS, STAGES=_STAGES,
        D_TILE=d_tile, DV_TILE=dv_tile, QK_LAYOUT=_of_rank_2(q_desc), V_LAYOUT=_of_rank_2(v_desc),
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out, lse


def _of_rank_2(descriptor: TensorDescriptor) -> gl.NVMMASharedLayout:
    """The layout of the tile in shared memory, which has no batch and no heads."""
    layout = descriptor.layout
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


# Backward.


@on_device_of_first
def fp8_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor,
    v_scale: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    (SQ, D), (SK, DV) = q.shape[2:], v.shape[2:]
    deterministic = torch.are_deterministic_algorithms_enabled()
    fits = _has_kernel(q, v, scale) and min(SQ, SK) > 1
    fits = fits and not (deterministic and (D != DV or SQ != SK))
    if not fits:
        return plain.fp8_attention_backward(
            dout, q, k, v, q_scale, k_scale, v_scale, out, lse, causal, scale
        )
    dtype = torch.bfloat16 if dout.dtype == torch.float32 else dout.dtype
    operands = [_decoded(x, one, dtype) for x, one in ((q, q_scale), (k, k_scale), (v, v_scale))]
    dout, out, out_dtype = dout.to(dtype), out.to(dtype), dout.dtype
    if D % 8 or DV % 8:  # cuDNN wants heads of multiples of 8: zeros change no score
        dout, out, *operands = (
            torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) for x in (dout, out, *operands)
        )
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    seed = lse.new_zeros(2, dtype=torch.int64)  # of the dropout that there is not
    if deterministic:
        gradients = aten._scaled_dot_product_flash_attention_backward(
            dout, *operands, out, lse, None, None, SQ, SK, 0.0, causal, seed.view(torch.uint64),
            seed.view(torch.uint64)[0], scale=scale,
        )  # fmt: skip
    else:
        gradients = aten._scaled_dot_product_cudnn_attention_backward(
            dout, *operands, out, lse.unsqueeze(-1), seed[0], seed[1], None, None, None, SQ, SK,
            0.0, causal, scale=scale,
        )  # fmt: skip
    dq, dk, dv = (
        plain.by_token(x[..., :size].to(out_dtype))
        for x, size in zip(gradients, (D, D, DV), strict=False)
    )
    return dq, dk, dv


def _decoded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    B, H, S, D = x.shape
    rows = x.transpose(1, 2).reshape(B * S, H * D)
    return dequantize(rows, scale, (-1, -1), dtype).view(B, S, H, D).transpose(1, 2)
