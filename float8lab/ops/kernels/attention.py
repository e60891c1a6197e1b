"""FP8 attention on Hopper.  B batch, H heads, G key/value heads, S sequence, D head size.

Forward is one Gluon kernel. A program has 128 queries of a head; two groups of four warps have 64
each, and one warp loads keys and values for both through a ring of buffers. While a group computes
the probabilities of one tile of keys, its tensor cores multiply the next tile's, and the other
group's whatever is due there. Softmax is online: probabilities are rounded relative to the largest
score so far, not to the row's largest, which is the one difference from the reference besides the
order of sums and the tensor cores' accumulator (14 bits of each sum of 32 products).

The second product contracts over the keys, and FP8 operands must be contiguous along a contraction:
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
    next_power_of_2,
    on_device_of_first,
)
from float8lab.ops.kernels._copy_engine import async_load
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels.quantize import dequantize
from float8lab.ops.reference import attention as plain
from float8lab.ops.reference import round_up

__all__ = ["fp8_attention", "fp8_attention_backward"]

aten = torch.ops.aten

_GROUP = 64
"""Queries of a group of four warps: the rows of one tensor core instruction."""
_QUERIES = 2 * _GROUP
_KEYS = 128
_STAGES = 2
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
    SK, PADDED, DV, G, stride_b, stride_g, stride_s, stride_d,
    TILE_K: tl.constexpr, TILE_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    words = tl.program_id(0) * (TILE_K // 4) + tl.arange(0, TILE_K // 4)
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


def _turn(v: Tensor) -> Tensor:
    """``[B, G, DV, PADDED]`` of the values, keys in the order of ``_turn_kernel``, then zeros."""
    B, G, SK, DV = v.shape
    padded = round_up(SK, _KEYS)
    out = torch.empty((B, G, DV, padded), dtype=v.dtype, device=v.device)
    _turn_kernel[(padded // _KEYS, B * G)](
        v.view(torch.uint8), out.view(torch.int32), SK, padded, DV, G, *v.stride(),
        TILE_K=_KEYS, TILE_D=next_power_of_2(DV),
    )  # fmt: skip
    return out


# Forward.


@gluon.jit
def _load_tiles(arguments, GROUP: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr):
    """What the loading warp does."""
    q_desc, k_desc, v_desc, tiles, bars, where = arguments
    batch, head, kv_head, _, first, blocks = where
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = bars
    for group in gl.static_range(2):
        mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
        at = [batch, head, first + GROUP * group, 0]
        async_load(q_desc, at, q_full.index(group), q_tiles.index(group))
    for block in range(blocks):
        stage = block % STAGES
        phase = (block // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        at = [batch, kv_head, block * KEYS, 0]
        async_load(k_desc, at, k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        at = [batch, kv_head, 0, block * KEYS]
        async_load(v_desc, at, v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _probabilities(s, largest, total, factor, P_LAYOUT: gl.constexpr):
    """Of a tile of scores: rounded, what to scale former sums by, and the new maximum and total."""
    new = gl.maximum(largest, gl.max(s, 1))
    rescale = gl.exp2((largest - new) * factor)
    p = gl.exp2(s * factor - gl.expand_dims(new * factor - P_BITS, 1))
    total = total * rescale + gl.sum(p, 1)
    # In the order of keys that ``_turn_kernel`` has this moves nothing between threads.
    ROWS: gl.constexpr = s.shape[0]
    KEYS: gl.constexpr = s.shape[1]
    p8 = gl.reshape(p.to(gl.float8e4nv), [ROWS, KEYS // 16, 2, 4, 2])
    p8 = gl.reshape(gl.permute(p8, [0, 1, 3, 2, 4]), [ROWS, KEYS])
    return gl.convert_layout(p8, P_LAYOUT, assert_trivial=True), rescale, new, total


@gluon.jit
def _attend(
    arguments, group: gl.constexpr, CAUSAL: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):
    """What a group of four warps does: its queries, all the keys."""
    (
        tiles, bars, where, factor, v_scale, out_ptr, lse_ptr, SQ, SK, DV,
        stride_ob, stride_oh, stride_os,
    ) = arguments  # fmt: skip
    batch, head, _, row_of_lse, first, blocks = where
    q_tiles, k_tiles, v_tiles = tiles
    q_full, k_full, k_empty, v_full, v_empty = bars
    ROWS: gl.constexpr = q_tiles.shape[1]
    WIDTH: gl.constexpr = v_tiles.shape[1]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    rows = first + ROWS * group + gl.arange(0, ROWS, S_ROWS)

    out = gl.zeros([ROWS, WIDTH], gl.float32, O_LAYOUT)
    none = gl.zeros([ROWS, KEYS], gl.float32, S_LAYOUT)
    largest = gl.full([ROWS], -float("inf"), gl.float32, S_ROWS)
    total = gl.zeros([ROWS], gl.float32, S_ROWS)
    q = q_tiles.index(group)
    mbarrier.wait(q_full.index(group), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(q, k_tiles.index(0).permute((1, 0)), none, use_acc=False)
    mbarrier.arrive(k_empty.index(0), count=1)
    for block in range(blocks - 1):
        ahead = (block + 1) % STAGES
        mbarrier.wait(k_full.index(ahead), ((block + 1) // STAGES) & 1)
        next_s = warpgroup_mma(
            q, k_tiles.index(ahead).permute((1, 0)), none, use_acc=False, is_async=True
        )
        p, rescale, largest, total = _probabilities(s, largest, total, factor, P_LAYOUT)
        out = out * gl.expand_dims(gl.convert_layout(rescale, O_ROWS), 1)
        stage = block % STAGES
        mbarrier.wait(v_full.index(stage), (block // STAGES) & 1)
        next_out = warpgroup_mma(p, v_tiles.index(stage).permute((1, 0)), out, is_async=True)
        s = warpgroup_mma_wait(1, (next_s,))
        mbarrier.arrive(k_empty.index(ahead), count=1)
        out = warpgroup_mma_wait(0, (next_out,))
        mbarrier.arrive(v_empty.index(stage), count=1)

    # Only the last tile has keys that are not there or not yet to be seen: tiles are square.
    last = blocks - 1
    keys = last * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, S_LAYOUT))
    seen = gl.expand_dims(keys < SK, 0)
    if CAUSAL:
        seen = seen & (gl.expand_dims(keys, 0) <= gl.expand_dims(rows, 1))
    s = gl.where(seen, s, -float("inf"))
    p, rescale, largest, total = _probabilities(s, largest, total, factor, P_LAYOUT)
    out = out * gl.expand_dims(gl.convert_layout(rescale, O_ROWS), 1)
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    out = warpgroup_mma(p, v_tiles.index(last % STAGES).permute((1, 0)), out)

    decode = v_scale / total  # the total is times 2 ** 8 too
    out = out * gl.expand_dims(gl.convert_layout(decode, O_ROWS), 1)
    out_ptr += batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
    _store(out_ptr, out, first + ROWS * group, SQ, DV, stride_os)
    lse = (largest * factor - P_BITS) * LN_2 + gl.log(total)
    gl.store(lse_ptr + row_of_lse.to(gl.int64) * SQ + rows, lse, mask=rows < SQ)


@gluon.jit
def _store(out_ptr, out, first, SQ, DV, stride_os):
    rows = first + gl.arange(0, out.shape[0], gl.SliceLayout(1, out.type.layout))
    columns = gl.arange(0, out.shape[1], gl.SliceLayout(0, out.type.layout))
    offsets = gl.expand_dims(rows.to(gl.int64) * stride_os, 1) + gl.expand_dims(columns, 0)
    inside = gl.expand_dims(rows < SQ, 1) & gl.expand_dims(columns < DV, 0)
    gl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _attention_kernel(
    q_desc,  # [B, H, SQ, D] fp8
    k_desc,  # [B, G, SK, D] fp8
    v_desc,  # [B, G, DV, SK] fp8, from _turn
    q_scale_ptr,  # [1] fp32
    k_scale_ptr,  # [1] fp32
    v_scale_ptr,  # [1] fp32
    out_ptr,  # [B, H, SQ, DV]
    lse_ptr,  # [B, H, SQ] fp32
    H, G, SQ, SK, DV, stride_ob, stride_oh, stride_os, scale,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    D_TILE: gl.constexpr, DV_TILE: gl.constexpr, QK_LAYOUT: gl.constexpr, V_LAYOUT: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    QUERIES: gl.constexpr = 2 * GROUP
    gl.static_assert(QUERIES == KEYS, "a causal mask cuts the last tile of keys only")
    programs = gl.cdiv(SQ, QUERIES)
    row_of_lse = gl.program_id(0) // programs
    tile = gl.program_id(0) % programs
    blocks = gl.cdiv(SK, KEYS)
    if CAUSAL:
        tile = programs - 1 - tile  # the longest first
        blocks = gl.minimum(blocks, tile + 1)
    batch = row_of_lse // H
    head = row_of_lse % H
    kv_head = head // (H // G)

    tiles = (
        gl.allocate_shared_memory(q_desc.dtype, [2, GROUP, D_TILE], QK_LAYOUT),
        gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, D_TILE], QK_LAYOUT),
        gl.allocate_shared_memory(v_desc.dtype, [STAGES, DV_TILE, KEYS], V_LAYOUT),
    )
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    bars = (q_full, k_full, k_empty, v_full, v_empty)
    for group in gl.static_range(2):
        mbarrier.init(q_full.index(group), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)  # both groups
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()

    factor = gl.load(q_scale_ptr) * gl.load(k_scale_ptr) * gl.cast(scale, gl.float32) * LOG2_E
    where = (batch, head, kv_head, row_of_lse, tile * QUERIES, blocks)
    loads = (q_desc, k_desc, v_desc, tiles, bars, where)
    sums = (
        tiles, bars, where, factor, gl.load(v_scale_ptr), out_ptr, lse_ptr, SQ, SK, DV,
        stride_ob, stride_oh, stride_os,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_attend, (sums, 0, CAUSAL, KEYS, STAGES)),
            (_attend, (sums, 1, CAUSAL, KEYS, STAGES)),
            (_load_tiles, (loads, GROUP, KEYS, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def _has_kernel(q: Tensor, v: Tensor, scale: float, masks: tuple[Tensor | None, ...]) -> bool:
    """Whether Hopper's kernel computes it."""
    if any(mask is not None for mask in masks) or scale <= 0 or not q.numel() or not v.numel():
        return False
    return has_fp8_attention(q.device, q.shape[3], v.shape[3])


def _loadable(x: Tensor) -> Tensor:
    """The same, as the copy engine takes it; more columns of zeros do not change a score."""
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    bias: Tensor | None,
    allowed: Tensor | None,
    keep: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    if not _has_kernel(q, v, scale, (bias, allowed, keep)):
        return plain.fp8_attention(
            q, k, v, q_scale, k_scale, v_scale, bias, allowed, keep, causal, scale, dropout,
            out_dtype,
        )  # fmt: skip
    (B, H, SQ, D), (_, G, SK, DV) = q.shape, v.shape
    d_tile = max(next_power_of_2(D), 32)
    dv_tile = max(next_power_of_2(DV), 16)
    out = plain.empty_by_token(q, (B, H, SQ, DV), out_dtype)
    lse = q.new_empty((B, H, SQ), dtype=torch.float32)
    v_desc = _descriptor(_turn(v), dv_tile, _KEYS)
    q_desc = _descriptor(_loadable(q), _GROUP, d_tile)
    k_desc = _descriptor(_loadable(k), _KEYS, d_tile)
    _attention_kernel[(ceil_div(SQ, _QUERIES) * B * H,)](
        q_desc, k_desc, v_desc, q_scale, k_scale, v_scale, out, lse, H, G, SQ, SK, DV,
        *out.stride()[:3], scale, CAUSAL=causal, GROUP=_GROUP, KEYS=_KEYS, STAGES=_STAGES,
        D_TILE=d_tile, DV_TILE=dv_tile, QK_LAYOUT=_of_rank_2(q_desc), V_LAYOUT=_of_rank_2(v_desc),
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS,
        num_warps=4,
    )  # fmt: skip
    return out, lse


def _of_rank_2(descriptor: TensorDescriptor) -> gl.NVMMASharedLayout:
    """Of the tile in shared memory, which has no batch and no heads."""
    layout = descriptor.layout
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, layout.element_bitwidth, rank=2)


# Backward.


@on_device_of_first
def fp8_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    bias: Tensor | None,
    allowed: Tensor | None,
    keep: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (SQ, D), (SK, DV) = q.shape[2:], v.shape[2:]
    deterministic = torch.are_deterministic_algorithms_enabled()
    fits = _has_kernel(q, v, scale, (bias, allowed, keep)) and min(SQ, SK) > 1
    fits = fits and D % 8 == DV % 8 == 0 and not (deterministic and (D != DV or SQ != SK))
    if not fits:
        return plain.fp8_attention_backward(
            dout, q, k, v, q_scale, k_scale, v_scale, bias, allowed, keep, out, lse, causal, scale,
            dropout, wants_bias,
        )  # fmt: skip
    dtype = torch.bfloat16 if dout.dtype == torch.float32 else dout.dtype
    operands = [_decoded(x, one, dtype) for x, one in ((q, q_scale), (k, k_scale), (v, v_scale))]
    dout, out, out_dtype = dout.to(dtype), out.to(dtype), dout.dtype
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
    dq, dk, dv = (plain.by_token(x.to(out_dtype)) for x in gradients)
    return dq, dk, dv, lse.new_empty(0)


def _decoded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    B, H, S, D = x.shape
    rows = x.transpose(1, 2).reshape(B * S, H * D)
    return dequantize(rows, scale, (-1, -1), dtype).view(B, S, H, D).transpose(1, 2)
