"""Compute ``y = a @ b.T`` of FP8 matrices in Gluon on Hopper.  M rows of a, N rows of b, K columns.

A program computes tiles of 128 rows and ``COLUMNS`` columns of y, one after the other. One warp
loads 128 of K at a time through a ring of buffers; two groups of four warps compute 64 rows each.

Partial sums have few bits in the tensor cores. "precise" adds those of every 128 of K to sums in
float32, "block" first multiplies them by two scales, and "fast" lets the tensor cores sum over all
of K. 64 x 256 sums and as many partial sums need more registers than a thread has, so a group
computes 128 columns at a time: while it adds their partial sums, the other group's GEMMs run.
"""

from __future__ import annotations

from typing import Any

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

from float8lab.ops.kernels._tma import async_load
from float8lab.ops.kernels.hopper_gemm import store_rows, tile_position

__all__ = ["gemm"]

GROUP_ROWS = gl.constexpr(64)
"""The rows of a group of four warps, equal to those of one tensor core instruction."""
PART = gl.constexpr(128)
"""The columns that a group computes at a time; a scale of b covers 128 columns and 128 of K."""
STEP = gl.constexpr(128)
"""The size of K in one step."""

_CONSUMER_REGISTERS = 240
_PRODUCER_REGISTERS = 24


@gluon.jit
def load_tiles(arguments, BAND: gl.constexpr, STAGES: gl.constexpr):
    """Load the tiles of a and b; this is the work of the loading warp."""
    a_desc, b_desc, a_tiles, b_tiles, full, empty, where = arguments
    tiles_m, tiles_n, steps, first, programs = where
    count = 0
    for tile in range(first, tiles_m * tiles_n, programs):
        m, n = tile_position(tile, tiles_m, tiles_n, BAND)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            async_load(a_desc, [m * a_desc.block_shape[0], step * STEP], bar, a_tiles.index(stage))
            async_load(b_desc, [n * b_desc.block_shape[0], step * STEP], bar, b_tiles.index(stage))
            count += 1


@gluon.jit
def _multiply_fast(arguments, group: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr):
    """Compute a group's rows where the tensor cores sum over all of K."""
    a_tiles, b_tiles, y_tiles, full, empty, _, where, y_desc, scale, _, _, _ = arguments
    tiles_m, tiles_n, steps, first, programs = where
    COLUMNS: gl.constexpr = b_tiles.shape[1]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    count = 0
    for tile in range(first, tiles_m * tiles_n, programs):
        m, n = tile_position(tile, tiles_m, tiles_n, BAND)
        sums = gl.zeros([GROUP_ROWS, COLUMNS], gl.float32, LAYOUT)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            a = a_tiles.index(stage).slice(GROUP_ROWS * group, GROUP_ROWS)
            b = b_tiles.index(stage).permute((1, 0))
            sums = warpgroup_mma(a, b, sums, is_async=True)
            sums = warpgroup_mma_wait(1, (sums,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        sums = warpgroup_mma_wait(0, (sums,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1)
        row = m * 2 * GROUP_ROWS + group * GROUP_ROWS
        sums = sums * scale
        store_rows(sums, y_desc, y_tiles.index(group), row, n * COLUMNS)
    tma.store_wait(0)


@gluon.jit
def _partial(a, b_tile, part: gl.constexpr):
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    none = gl.zeros([GROUP_ROWS, PART], gl.float32, LAYOUT)
    b = b_tile.slice(PART * part, PART).permute((1, 0))
    return warpgroup_mma(a, b, none, use_acc=False, is_async=True)


@gluon.jit
def _add(sums, part, scale, BLOCK: gl.constexpr):
    if BLOCK:
        # We use volatile assembly, because LLVM moves its own code behind the next instructions of
        # the tensor cores: then the partial sums of both halves need registers at once, and spill.
        scale, _ = gl.broadcast(gl.expand_dims(scale, 1), part)
        sums = gl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [part, scale, sums],
            dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        sums += part
    return sums


@gluon.jit
def _issue(a, b, part, again, turns, group: gl.constexpr, phase: gl.constexpr, TURNS: gl.constexpr):
    """Issue ``a @ b`` when it is this group's turn. The turn passes when all of it is issued
    or, with ``TURNS`` 2, half done, so that the groups' instructions are not mixed."""
    if TURNS:
        mbarrier.wait(turns.index(group), phase)
    if TURNS == 2:
        HALF: gl.constexpr = STEP // 2
        part = warpgroup_mma(a[0], b.slice(0, HALF, 0), part, use_acc=again, is_async=True)
        part = warpgroup_mma(a[1], b.slice(HALF, HALF, 0), part, is_async=True)
        part = warpgroup_mma_wait(1, (part,))
        mbarrier.arrive(turns.index(1 - group), count=1)
    else:
        part = warpgroup_mma(a[0], b, part, use_acc=again, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - group), count=1)
    return part


@gluon.jit
def _rows_of(a_tile, group: gl.constexpr, TURNS: gl.constexpr, HELD: gl.constexpr):
    """Return the group's rows of a in the form that ``_issue`` takes."""
    a = a_tile.slice(GROUP_ROWS * group, GROUP_ROWS)
    if TURNS == 2:  # noqa: SIM108
        a = (a.slice(0, STEP // 2, 1), a.slice(STEP // 2, STEP // 2, 1))
    else:
        a = (a, a)
    if HELD:  # registers hold the rows, which are read once for both halves
        PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
        LAYOUT: gl.constexpr = gl.DotOperandLayout(0, PRODUCT, 4)
        a = (a[0].load(LAYOUT), a[1].load(LAYOUT))
    return a


@gluon.jit
def _multiply_parts(  # noqa: PLR0915
    arguments, group: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    BLOCK: gl.constexpr, TIED: gl.constexpr, TURNS: gl.constexpr, HELD: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Compute a group's rows of 256 columns in two halves, one after the other."""
    (
        a_tiles,
        b_tiles,
        y_tiles,
        full,
        empty,
        turns,
        where,
        y_desc,
        scale,
        a_scale_ptr,
        b_scale_ptr,
        M,
    ) = arguments
    tiles_m, tiles_n, steps, first, programs = where
    gl.static_assert(b_tiles.shape[1] == 2 * PART)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT)) + GROUP_ROWS * group
    part = gl.zeros([GROUP_ROWS, PART], gl.float32, LAYOUT)
    # This is never true, but the compiler does not know it: both halves share the same registers.
    again = steps < 0 if TIED else False
    if EARLY:
        mbarrier.wait(full.index(0), 0)
        if HELD:
            a = _rows_of(a_tiles.index(0), group, TURNS, HELD)
    count = 0
    for tile in range(first, tiles_m * tiles_n, programs):
        m, n = tile_position(tile, tiles_m, tiles_n, BAND)
        left = gl.zeros([GROUP_ROWS, PART], gl.float32, LAYOUT)
        right = gl.zeros([GROUP_ROWS, PART], gl.float32, LAYOUT)
        if BLOCK:
            a_scale = gl.load(a_scale_ptr + m * 2 * GROUP_ROWS + rows)
            b_left = gl.load(b_scale_ptr + n * 2 * steps)
            b_right = gl.load(b_scale_ptr + (n * 2 + 1) * steps)
        for step in range(steps):
            stage = count % STAGES
            left_scale = 0.0
            right_scale = 0.0
            if BLOCK:
                left_scale = a_scale * b_left
                right_scale = a_scale * b_right
                # The next step's scales arrive while the tensor cores work; the last are not used.
                ahead = gl.minimum(step + 1, steps - 1)
                a_scale = gl.load(a_scale_ptr + (ahead * M + m * 2 * GROUP_ROWS) + rows)
                b_left = gl.load(b_scale_ptr + (n * 2 * steps + ahead))
                b_right = gl.load(b_scale_ptr + ((n * 2 + 1) * steps + ahead))
            if not EARLY:
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            if not EARLY or not HELD:
                a = _rows_of(a_tiles.index(stage), group, TURNS, HELD)
            b = b_tiles.index(stage).slice(0, PART).permute((1, 0))
            part = _issue(a, b, part, again, turns, group, 0, TURNS)
            part = warpgroup_mma_wait(0, (part,))
            left = _add(left, part, left_scale, BLOCK)
            b = b_tiles.index(stage).slice(PART, PART).permute((1, 0))
            part = _issue(a, b, part, again, turns, group, 1, TURNS)
            count += 1
            if EARLY:  # wait for the operands of the next step or of the next tile
                more = (step + 1 < steps) | (tile + programs < tiles_m * tiles_n)
                mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1, pred=more)
                if HELD:
                    a = _rows_of(a_tiles.index(count % STAGES), group, TURNS, HELD)
            part = warpgroup_mma_wait(0, (part,))
            mbarrier.arrive(empty.index(stage), count=1)
            right = _add(right, part, right_scale, BLOCK)
        if not BLOCK:
            left *= scale
            right *= scale
        row = m * 2 * GROUP_ROWS + group * GROUP_ROWS
        store_rows(left, y_desc, y_tiles.index(group), row, n * 2 * PART)
        store_rows(right, y_desc, y_tiles.index(group), row, n * 2 * PART + PART)
    tma.store_wait(0)


@gluon.jit
def _multiply_two(
    arguments, group: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr, BLOCK: gl.constexpr
):
    """Compute a group's rows of 128 columns; one step runs while the step before is added."""
    a_tiles, b_tiles, y_tiles, full, empty, _, where, y_desc, scale, a_scale_ptr, b_scale_ptr, M = (
        arguments
    )
    tiles_m, tiles_n, steps, first, programs = where
    gl.static_assert(b_tiles.shape[1] == PART)
    gl.static_assert(STAGES % 2 == 0)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, LAYOUT)) + GROUP_ROWS * group
    count = 0
    for tile in range(first, tiles_m * tiles_n, programs):
        m, n = tile_position(tile, tiles_m, tiles_n, BAND)
        sums = gl.zeros([GROUP_ROWS, PART], gl.float32, LAYOUT)
        a_scale_ptrs = a_scale_ptr + m * 2 * GROUP_ROWS + rows
        b_ptr = b_scale_ptr + n * steps
        for _pair in range(0, steps, 2):
            stage = count % STAGES
            even_scale = 0.0
            odd_scale = 0.0
            if BLOCK:  # the scales arrive while the tensor cores work
                even_scale = gl.load(a_scale_ptrs) * gl.load(b_ptr)
                odd_scale = gl.load(a_scale_ptrs + M) * gl.load(b_ptr + 1)
                a_scale_ptrs += 2 * M
                b_ptr += 2
            phase = (count // STAGES) & 1
            mbarrier.wait(full.index(stage), phase)
            a = a_tiles.index(stage).slice(GROUP_ROWS * group, GROUP_ROWS)
            even = _partial(a, b_tiles.index(stage), 0)
            mbarrier.wait(full.index(stage + 1), phase)
            a = a_tiles.index(stage + 1).slice(GROUP_ROWS * group, GROUP_ROWS)
            odd = _partial(a, b_tiles.index(stage + 1), 0)
            part = warpgroup_mma_wait(1, (even,))
            mbarrier.arrive(empty.index(stage), count=1)
            sums = _add(sums, part, even_scale, BLOCK)
            part = warpgroup_mma_wait(0, (odd,))
            mbarrier.arrive(empty.index(stage + 1), count=1)
            sums = _add(sums, part, odd_scale, BLOCK)
            count += 2
        if not BLOCK:
            sums *= scale
        row = m * 2 * GROUP_ROWS + group * GROUP_ROWS
        store_rows(sums, y_desc, y_tiles.index(group), row, n * PART)
    tma.store_wait(0)


@gluon.jit
def _gemm_kernel(
    a_desc,  # [M, K] fp8, in tiles of [128, 128]
    b_desc,  # [N, K] fp8, in tiles of [COLUMNS, 128]
    y_desc,  # [M, N], in tiles of a group
    a_scale_ptr,  # [1], or [M, K / 128] with stride (1, M), fp32
    b_scale_ptr,  # [1], or [N / 128, K / 128], fp32
    M, N, K,
    MODE: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr, TIED: gl.constexpr,
    TURNS: gl.constexpr, HELD: gl.constexpr, EARLY: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = a_desc.block_shape[0]
    COLUMNS: gl.constexpr = b_desc.block_shape[0]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, ROWS, STEP], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLUMNS, STEP], b_desc.layout)
    y_tiles = gl.allocate_shared_memory(
        y_desc.dtype, [2, y_desc.block_shape[0], y_desc.block_shape[1]], y_desc.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups
    for group in gl.static_range(2):
        mbarrier.init(turns.index(group), count=1)
    mbarrier.arrive(turns.index(0), count=1)
    fence_async_shared()

    where = (M // ROWS, N // COLUMNS, K // STEP, gl.program_id(0), gl.num_programs(0))
    loads = (a_desc, b_desc, a_tiles, b_tiles, full, empty, where)
    scale = gl.load(a_scale_ptr) * gl.load(b_scale_ptr)
    sums = (
        a_tiles, b_tiles, y_tiles, full, empty, turns, where, y_desc, scale, a_scale_ptr,
        b_scale_ptr, M,
    )  # fmt: skip
    REGISTERS: gl.constexpr = [CONSUMER_REGISTERS, PRODUCER_REGISTERS]
    if MODE == "fast":
        gl.warp_specialize(
            [
                (_multiply_fast, (sums, 0, BAND, STAGES)),
                (_multiply_fast, (sums, 1, BAND, STAGES)),
                (load_tiles, (loads, BAND, STAGES)),
            ],
            [4, 1],
            REGISTERS,
        )
    elif COLUMNS == PART:
        gl.warp_specialize(
            [
                (_multiply_two, (sums, 0, BAND, STAGES, MODE == "block")),
                (_multiply_two, (sums, 1, BAND, STAGES, MODE == "block")),
                (load_tiles, (loads, BAND, STAGES)),
            ],
            [4, 1],
            REGISTERS,
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply_parts,
                    (sums, 0, BAND, STAGES, MODE == "block", TIED, TURNS, HELD, EARLY),
                ),
                (
                    _multiply_parts,
                    (sums, 1, BAND, STAGES, MODE == "block", TIED, TURNS, HELD, EARLY),
                ),
                (load_tiles, (loads, BAND, STAGES)),
            ],
            [4, 1],
            REGISTERS,
        )


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2
    )
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    mode: str,
    columns: int = 256,
    stages: int = 4,
    band: int = 16,
    tied: int = 0,
    turns: int = 0,
    held: int = 0,
    early: int = 0,
    programs: int = 132,
) -> Any:
    """Compute ``a @ b.T``, ``[M, N]`` in bfloat16.

    Args:
        a: ``[M, K]``, FP8, contiguous.
        a_scale: the decode scale ``[1]``; for "block" ``[M, K / 128]`` with stride ``(1, M)``.
        b: ``[N, K]``, FP8, contiguous.
        b_scale: the decode scale ``[1]``; for "block" ``[N / 128, K / 128]``.
        mode: "fast", "precise" or "block".
        columns: the columns of a tile.
        stages: the number of buffers in the ring.
        band: the number of rows of tiles that are computed together.
        tied: use the same registers for both halves of 256 columns.
        turns: let the groups issue instructions in turns.
        held: read rows of a into registers once instead of in every instruction.
        early: wait for the next step's operands while the instructions of a step run.
        programs: the most programs; each computes every ``programs``-th tile.

    Returns:
        The result, and the compiled kernel.
    """
    (M, K), N = a.shape, b.shape[0]
    assert b.shape[1] == K
    assert M % 128 == N % columns == K % 256 == 0, (a.shape, b.shape)
    assert a.is_contiguous()
    assert b.is_contiguous()
    if mode == "block":
        assert a_scale.shape == (M, K // 128)
        assert a_scale.stride() == (1, M)
        assert b_scale.shape == (N // 128, K // 128)
        assert b_scale.is_contiguous()
    else:
        assert a_scale.numel() == b_scale.numel() == 1
    y = torch.empty((M, N), dtype=torch.bfloat16, device=a.device)
    compiled = _gemm_kernel[(min(programs, M // 128 * (N // columns)),)](
        _descriptor(a, 128, 128), _descriptor(b, columns, 128),
        _descriptor(y, 64, columns if mode == "fast" else 128),
        a_scale, b_scale, M, N, K,
        MODE=mode, BAND=band, STAGES=stages, TIED=tied, TURNS=turns, HELD=held, EARLY=early,
        CONSUMER_REGISTERS=_CONSUMER_REGISTERS,
        PRODUCER_REGISTERS=_PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip
    return y, compiled
