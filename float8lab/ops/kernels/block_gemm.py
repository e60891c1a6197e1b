"""``y = a @ b.T`` of 1x128 blocks by such or 128x128 blocks, on Hopper's tensor cores.

For what cuBLASLt does not multiply there: e5m2 by e4m3, and anything before CUDA 12.9.

M rows of a, N rows of b, K contraction. A program takes tiles of 128 x 256 of y, one after the
other. A warp loads 128 of K at a time through a ring of buffers; two groups of four warps have half
of the tile each. A group multiplies 64 x 128 at a time, a quarter, which it scales and adds to sums
in float32 while the other group's runs. A thread has two rows but 32 columns of a quarter. So where
each row of b has a scale, reading these is what costs: the quarters of a group are below each other
then, and their scales come from shared memory once for both. Else they are side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from float8lab.ops.kernels._common import ceil_div, multiprocessors, on_device_of_first
from float8lab.ops.kernels._copy_engine import async_load, async_store

__all__ = [
    "HALF",
    "PART",
    "STEP",
    "add_part",
    "descriptor",
    "load_tiles",
    "multiply_blocks",
    "place",
    "product",
    "store_part",
]

_ROWS = 128
_COLUMNS = 256
HALF = gl.constexpr(64)
"""Rows that a group multiplies at a time: those of one tensor core instruction."""
PART = gl.constexpr(128)
"""Columns that a group multiplies at a time; as many as a 128x128 block has."""
STEP = gl.constexpr(128)
"""Of K, at a time: a block."""
_STAGES = 4
_STAGES_OF_FLOAT32 = 3
"""Of the ring, beside an output that takes twice the room."""
_BAND = 16
"""Rows of tiles that are worked on together."""
_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24


@gluon.jit
def place(tile, tiles_m, tiles_n, BAND: gl.constexpr):
    """Row and column of a tile: down ``BAND`` rows of tiles, then the next column of tiles."""
    band = tile // (BAND * tiles_n)
    first = band * BAND
    height = gl.minimum(tiles_m - first, BAND)
    inside = tile - band * BAND * tiles_n
    return first + inside % height, inside // height


@gluon.jit
def load_tiles(arguments, BAND: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp."""
    a_desc, b_desc, a_tiles, b_tiles, full, empty, where = arguments
    tiles_m, tiles_n, steps, first, programs = where
    count = 0
    for tile in range(first, tiles_m * tiles_n, programs):
        m, n = place(tile, tiles_m, tiles_n, BAND)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            async_load(a_desc, [m * a_desc.block_shape[0], step * STEP], bar, a_tiles.index(stage))
            async_load(b_desc, [n * b_desc.block_shape[0], step * STEP], bar, b_tiles.index(stage))
            count += 1


@gluon.jit
def product(
    a_tile, b_tile, part, quarter: gl.constexpr, group: gl.constexpr, B_BY_ROW: gl.constexpr
):
    """To the registers of ``part``, whose values do not count."""
    a = a_tile.slice(HALF * (quarter if B_BY_ROW else group), HALF)
    b = b_tile.slice(PART * (group if B_BY_ROW else quarter), PART).permute((1, 0))
    return warpgroup_mma(a, b, part, use_acc=False, is_async=True)


@gluon.jit
def add_part(sums, part, a_scale, b_scale, B_BY_ROW: gl.constexpr, SCALED: gl.constexpr = True):
    """``b_scale``, of each column, only if ``B_BY_ROW``; else ``a_scale`` is times b's."""
    # As volatile assembly, because LLVM moves its own behind the next product, whose results would
    # then be there at the same time, and spill.
    if not SCALED:
        sums = gl.inline_asm_elementwise(
            "add.rn.f32 $0, $1, $2;",
            "=f,f,f",
            [part, sums],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    elif B_BY_ROW:
        a_scale, _ = gl.broadcast(gl.expand_dims(a_scale, 1), part)
        b_scale, _ = gl.broadcast(gl.expand_dims(b_scale, 0), part)
        sums = gl.inline_asm_elementwise(
            """{
                .reg .f32 scaled;
                mul.rn.f32 scaled, $1, $3;
                fma.rn.f32 $0, scaled, $2, $4;
            }""",
            "=f,f,f,f,f",
            [part, a_scale, b_scale, sums],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    else:
        scale, _ = gl.broadcast(gl.expand_dims(a_scale, 1), part)
        sums = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;",
            "=f,f,f,f",
            [part, scale, sums],
            dtype=gl.float32,
            is_pure=False,
            pack=1,
        )
    return sums


@gluon.jit
def store_part(sums, y_desc, y_tile, row, column):
    """64 rows; the store before it has to have read the buffer."""
    tma.store_wait(0)
    y_tile.store(sums.to(y_desc.dtype))
    fence_async_shared()
    async_store(y_desc, [row, column], y_tile)


@gluon.jit
def _multiply(  # noqa: PLR0915
    arguments, group: gl.constexpr, B_BY_ROW: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr
):
    """A group of warps."""
    (
        a_tiles, b_tiles, y_tiles, scales, full, empty, where, y_desc, a_scale_ptr, b_scale_ptr,
        M, N, a_stride, b_stride, b_row_stride,
    ) = arguments  # fmt: skip
    tiles_m, tiles_n, steps, first, programs = where
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, PART, gl.BlockedLayout([1], [32], [4], [0]))
    # Of its two quarters, which are below each other or side by side.
    row0: gl.constexpr = 0 if B_BY_ROW else HALF * group
    row1: gl.constexpr = HALF if B_BY_ROW else HALF * group
    column0: gl.constexpr = PART * group if B_BY_ROW else 0
    column1: gl.constexpr = PART * group if B_BY_ROW else PART
    part = gl.zeros([HALF, PART], gl.float32, LAYOUT)
    count = 0
    for tile in range(first, tiles_m * tiles_n, programs):
        m, n = place(tile, tiles_m, tiles_n, BAND)
        m *= 2 * HALF
        n *= 2 * PART
        sums0 = gl.zeros([HALF, PART], gl.float32, LAYOUT)
        sums1 = gl.zeros([HALF, PART], gl.float32, LAYOUT)
        # Beyond the edges there are zeros, whatever they are multiplied by.
        a0 = gl.minimum(m + row0 + rows, M - 1)
        next_a0 = gl.load(a_scale_ptr + a0)
        if B_BY_ROW:
            a1 = gl.minimum(m + row1 + rows, M - 1)
            next_a1 = gl.load(a_scale_ptr + a1)
            b0 = gl.minimum(n + column0 + columns, N - 1)
        else:
            last = (N - 1) // PART
            b0 = gl.minimum(n // PART, last) * b_row_stride
            b1 = gl.minimum(n // PART + 1, last) * b_row_stride
            next_b1 = gl.load(b_scale_ptr + b1)
        next_b0 = gl.load(b_scale_ptr + b0)
        for step in range(steps):
            stage = count % STAGES
            # The next step's arrive while the tensor cores work; after the last nobody looks.
            ahead = gl.minimum(step + 1, steps - 1)
            b_scale = next_b0
            if B_BY_ROW:
                scale0 = next_a0
                scale1 = next_a1
                next_a1 = gl.load(a_scale_ptr + (ahead * a_stride + a1))
            else:
                scale0 = next_a0 * next_b0
                scale1 = next_a0 * next_b1
                next_b1 = gl.load(b_scale_ptr + (ahead * b_stride + b1))
            next_a0 = gl.load(a_scale_ptr + (ahead * a_stride + a0))
            next_b0 = gl.load(b_scale_ptr + (ahead * b_stride + b0))
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            part = product(a_tiles.index(stage), b_tiles.index(stage), part, 0, group, B_BY_ROW)
            if B_BY_ROW:
                scales.index(group).store(b_scale)
                b_scale = scales.index(group).load(gl.SliceLayout(0, LAYOUT))
            part = warpgroup_mma_wait(0, (part,))
            sums0 = add_part(sums0, part, scale0, b_scale, B_BY_ROW)
            part = product(a_tiles.index(stage), b_tiles.index(stage), part, 1, group, B_BY_ROW)
            part = warpgroup_mma_wait(0, (part,))
            mbarrier.arrive(empty.index(stage), count=1)
            sums1 = add_part(sums1, part, scale1, b_scale, B_BY_ROW)
            count += 1
        store_part(sums0, y_desc, y_tiles.index(group), m + row0, n + column0)
        store_part(sums1, y_desc, y_tiles.index(group), m + row1, n + column1)
    tma.store_wait(0)


@gluon.jit
def _multiply_blocks_kernel(
    a_desc,  # [M, K] fp8, in tiles of [128, 128]
    b_desc,  # [N, K] fp8, in tiles of [256, 128]
    y_desc,  # [M, N], in tiles of [64, 128]
    a_scale_ptr,  # [M, ceil K / 128] with stride (1, a_stride), fp32
    b_scale_ptr,  # the same of N; unless B_BY_ROW, [ceil N / 128, ceil K / 128] of any strides
    M, N, K, a_stride, b_stride, b_row_stride,
    B_BY_ROW: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = a_desc.block_shape[0]
    COLUMNS: gl.constexpr = b_desc.block_shape[0]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, ROWS, STEP], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLUMNS, STEP], b_desc.layout)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [2, HALF, PART], y_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    scales = gl.allocate_shared_memory(gl.float32, [2, PART], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups
    fence_async_shared()

    tiles_m, tiles_n = gl.cdiv(M, ROWS), gl.cdiv(N, COLUMNS)
    where = (tiles_m, tiles_n, gl.cdiv(K, STEP), gl.program_id(0), gl.num_programs(0))
    loads = (a_desc, b_desc, a_tiles, b_tiles, full, empty, where)
    sums = (
        a_tiles, b_tiles, y_tiles, scales, full, empty, where, y_desc, a_scale_ptr, b_scale_ptr,
        M, N, a_stride, b_stride, b_row_stride,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_multiply, (sums, 0, B_BY_ROW, BAND, STAGES)),
            (_multiply, (sums, 1, B_BY_ROW, BAND, STAGES)),
            (load_tiles, (loads, BAND, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2
    )
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


@on_device_of_first
def multiply_blocks(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    out_dtype: torch.dtype,
    into: Tensor | None = None,
) -> Tensor:
    """``[M, N]`` of contiguous, aligned ``[M, K]`` and ``[N, K]``, N and K divisible by 16.

    Scales are ``[M, ceil K / 128]`` and ``[N, ceil K / 128]`` with neighbours in a column, or those
    of b ``[ceil N / 128, ceil K / 128]``. ``into`` is where to write, if not to a fresh tensor.
    """
    (M, K), N = a.shape, b.shape[0]
    y = a.new_empty((M, N), dtype=out_dtype) if into is None else into
    programs = min(multiprocessors(a.device), ceil_div(M, _ROWS) * ceil_div(N, _COLUMNS))
    _multiply_blocks_kernel[(programs,)](
        descriptor(a, _ROWS, 128), descriptor(b, _COLUMNS, 128), descriptor(y, 64, 128),
        a_scale, b_scale, M, N, K, a_scale.stride(1), b_scale.stride(1), b_scale.stride(0),
        B_BY_ROW=b_scale.shape[0] == N, BAND=_BAND,
        STAGES=_STAGES_OF_FLOAT32 if out_dtype == torch.float32 else _STAGES,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS, PRODUCER_REGISTERS=_PRODUCER_REGISTERS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return y
