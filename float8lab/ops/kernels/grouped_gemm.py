"""The products of a mixture of experts on Hopper's tensor cores.  E groups, or experts.

``y = a @ b.T`` where each group of a's rows has its own b, ``[M, N]``, or where each group of the
contraction gives a product of its own, ``[E, N, K]``. A program takes tiles of 128 x 256 of y, one
after the other; which rows, of which group, a tile has is looked up in a plan that a small kernel
makes of the ends of the groups, so the host knows none of it. As in ``block_gemm.py``, a warp loads
128 of the contraction at a time through a ring of buffers, and two groups of four warps have half
of the tile each.

- "fast" leaves the sums to the tensor cores, 64 x 256 a group;
- "precise" adds the products of every 128 to sums in float32, 64 x 128 at a time;
- blocks of 1x128 by 128x128 or 1x128 are scaled where they are added.

The last tile of a group ends where the group ends: such rows are stored by themselves, all others
by the copy engine. Rows that belong to nobody are a group without a contraction, so they are zeros.
Operands in other formats, and other GPUs, take bfloat16 by torch._grouped_mm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl
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

from float8lab.ops import reference
from float8lab.ops.gemm import capability_of
from float8lab.ops.kernels._common import (
    ceil_div,
    multiprocessors,
)
from float8lab.ops.kernels._copy_engine import async_load
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._replay import replayed
from float8lab.ops.kernels.block_gemm import (
    HALF,
    PART,
    STEP,
    add_part,
    descriptor,
    place,
    product,
    store_part,
)
from float8lab.ops.kernels.dequantize import dequantize
from float8lab.ops.kernels.grouped_cast import plan_groups
from float8lab.ops.reference import ALIGN, SPAN, padded_rows

__all__ = ["grouped_mm"]

_ROWS = 128
_COLUMNS = 256


class Config(NamedTuple):
    """How a mode runs."""

    stages: int
    """Of the ring of buffers."""
    band: int = 16
    """Rows of tiles that are worked on together."""
    registers: tuple[int, int] = (240, 24)
    """Of a thread that multiplies, and of one that loads."""


CONFIGS = {
    ("fast", 2): Config(stages=3),
    ("precise", 2): Config(stages=4),
    ("precise", 4): Config(stages=3),
    ("block", 2): Config(stages=4),
    ("block", 4): Config(stages=3),
    ("rows", 2): Config(stages=4),
    ("rows", 4): Config(stages=3),
}
"""By mode, and bytes of an element of the output, which shares the memory of the ring."""


@gluon.jit
def _find(tile, where, plan_ptr, BAND: gl.constexpr, CONTRACTS: gl.constexpr):
    """Where a tile's operands and its part of y are.

    Returns its group; row and first step of a; row and column of b; its steps; its row in y, how
    many rows of the group are left there, and its column.
    """
    tiles_m, tiles_n, steps, _, _, E, M, _, b_rows, b_columns = where
    m, n = place(tile, tiles_m, tiles_n, BAND)
    column = n * 2 * PART
    if CONTRACTS:
        down = gl.cdiv(M, 2 * HALF)
        group = m // down
        row = (m - group * down) * 2 * HALF
        first = gl.load(plan_ptr + 4 * group)
        steps = gl.load(plan_ptr + 4 * group + 1)
        b_row = column
        b_column = first * STEP
        y_row = group * M + row
        left = M - row
    else:
        at = plan_ptr + 4 * (E + 1 + m)
        group = gl.load(at)
        row = gl.load(at + 1)
        left = gl.load(at + 2) - row
        steps = gl.where(group < E, steps, 0)
        group = gl.minimum(group, E - 1)
        first = group * 0
        b_row = group * b_rows + column
        b_column = group * b_columns
        y_row = row
    return group, row, first, b_row, b_column, steps, y_row, left, column


# The roles.


@gluon.jit
def _load_tiles(arguments, BAND: gl.constexpr, STAGES: gl.constexpr, CONTRACTS: gl.constexpr):
    """The loading warp."""
    a_desc, b_desc, a_tiles, b_tiles, full, empty, where, plan_ptr = arguments
    tiles_m, tiles_n, _, first_tile, programs, _, _, _, _, _ = where
    count = 0
    for tile in range(first_tile, tiles_m * tiles_n, programs):
        _group, row, first, b_row, b_column, steps, _y_row, _left, _column = _find(
            tile, where, plan_ptr, BAND, CONTRACTS
        )
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            async_load(a_desc, [row, (first + step) * STEP], bar, a_tiles.index(stage))
            async_load(b_desc, [b_row, b_column + step * STEP], bar, b_tiles.index(stage))
            count += 1


@gluon.jit
def _store(sums, y_desc, y_ptr, y_tile, row, column, left, N):
    """64 rows of y, of which ``left`` are the group's."""
    if left >= HALF:
        store_part(sums, y_desc, y_tile, row, column)
    elif left > 0:
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout)) + column
        offsets = (row + rows).to(gl.int64)[:, None] * N + columns[None, :]
        mask = (rows < left)[:, None] & (columns < N)[None, :]
        gl.store(y_ptr + offsets, sums.to(y_desc.dtype), mask=mask)


@gluon.jit
def _scale(sums, scales, group, row, column, M, N):
    """The sums of a part times the scales of its rows and columns, which span the contraction."""
    a_scale_ptr, b_scale_ptr, a_stride, _, b_stride, b_row_stride, a_row_stride, _, _ = scales
    rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout)) + row
    columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout)) + column
    rows = gl.minimum(rows, M - 1)
    columns = gl.minimum(columns, N - 1)
    a_scale = gl.load(a_scale_ptr + (group * a_stride + rows * a_row_stride))
    b_scale = gl.load(b_scale_ptr + (group * b_stride + columns * b_row_stride))
    return sums * a_scale[:, None] * b_scale[None, :]


@gluon.jit
def _add_bias(sums, scales, group, column, steps, N):
    """The sums of a part plus the biases of its columns; not in rows that belong to nobody."""
    _, _, _, _, _, _, _, bias_ptr, _ = scales
    columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout)) + column
    columns = gl.minimum(columns, N - 1)
    bias = gl.load(bias_ptr + (group * N + columns)).to(gl.float32)
    return sums + gl.where(steps > 0, bias, 0.0)[None, :]


@gluon.jit
def _multiply_fast(
    arguments, number: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    CONTRACTS: gl.constexpr, BIAS: gl.constexpr,
):  # fmt: skip
    """A group of warps, where the tensor cores sum."""
    a_tiles, b_tiles, y_tiles, _, full, empty, where, plan_ptr, y_desc, y_ptr, scales = arguments
    tiles_m, tiles_n, _, first_tile, programs, _, M, N, _, _ = where
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PART, 32])
    count = 0
    last = tiles_m * tiles_n - 1
    group, row, _first, _b_row, _b_column, steps, y_row, left, column = _find(
        gl.minimum(first_tile, last), where, plan_ptr, BAND, CONTRACTS
    )
    for tile in range(first_tile, tiles_m * tiles_n, programs):
        sums = gl.zeros([HALF, 2 * PART], gl.float32, LAYOUT)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            a = a_tiles.index(stage).slice(HALF * number, HALF)
            b = b_tiles.index(stage).permute((1, 0))
            sums = warpgroup_mma(a, b, sums, is_async=True)
            sums = warpgroup_mma_wait(1, (sums,))
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=step > 0)
            count += 1
        sums = warpgroup_mma_wait(0, (sums,))
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), count=1, pred=steps > 0)
        below = HALF * number
        sums = _scale(sums, scales, group, row + below, column, M, N)
        ahead = gl.minimum(tile + programs, last)
        if BIAS:
            sums = _add_bias(sums, scales, group, column, steps, N)
        else:  # the next tile's place arrives while this one is stored; with a bias it would spill
            following = _find(ahead, where, plan_ptr, BAND, CONTRACTS)
        _store(sums, y_desc, y_ptr, y_tiles.index(number), y_row + below, column, left - below, N)
        if BIAS:
            following = _find(ahead, where, plan_ptr, BAND, CONTRACTS)
        group, row, _first, _b_row, _b_column, steps, y_row, left, column = following
    tma.store_wait(0)


@gluon.jit
def _multiply_parts(  # noqa: PLR0915
    arguments, number: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    CONTRACTS: gl.constexpr, BIAS: gl.constexpr, BLOCK: gl.constexpr, B_BY_ROW: gl.constexpr,
):  # fmt: skip
    """A group of warps, 64 x 128 at a time: with BLOCK, ``block_gemm``'s of each expert."""
    (
        a_tiles, b_tiles, y_tiles, b_scales, full, empty, where, plan_ptr, y_desc, y_ptr, scales,
    ) = arguments  # fmt: skip
    tiles_m, tiles_n, _, first_tile, programs, _, M, N, _, _ = where
    a_scale_ptr, b_scale_ptr, _, a_step, b_stride, b_row_stride, _, _, b_step = scales
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, PART, gl.BlockedLayout([1], [32], [4], [0]))
    # Of its two quarters, which are below each other or side by side.
    row0: gl.constexpr = 0 if B_BY_ROW else HALF * number
    row1: gl.constexpr = HALF if B_BY_ROW else HALF * number
    column0: gl.constexpr = PART * number if B_BY_ROW else 0
    column1: gl.constexpr = PART * number if B_BY_ROW else PART
    part = gl.zeros([HALF, PART], gl.float32, LAYOUT)
    count = 0
    last = tiles_m * tiles_n - 1
    group, row, first, _b_row, _b_column, steps, y_row, left, column = _find(
        gl.minimum(first_tile, last), where, plan_ptr, BAND, CONTRACTS
    )
    for tile in range(first_tile, tiles_m * tiles_n, programs):
        sums0 = gl.zeros([HALF, PART], gl.float32, LAYOUT)
        sums1 = gl.zeros([HALF, PART], gl.float32, LAYOUT)
        # The last of a group without steps may be beyond all scales: it reads the one before.
        begin = gl.maximum(gl.minimum(first, first + steps - 1), 0)
        if BLOCK:
            a_scales = a_scale_ptr + begin * a_step
            b_scales_ptr = b_scale_ptr + (group * b_stride + begin * b_step)
            a0 = gl.minimum(row + row0 + rows, M - 1)
            next_a0 = gl.load(a_scales + a0)
            if B_BY_ROW:
                a1 = gl.minimum(row + row1 + rows, M - 1)
                next_a1 = gl.load(a_scales + a1)
                b0 = gl.minimum(column + column0 + columns, N - 1) * b_row_stride
            else:
                edge = (N - 1) // PART
                b0 = gl.minimum(column // PART, edge) * b_row_stride
                b1 = gl.minimum(column // PART + 1, edge) * b_row_stride
                next_b1 = gl.load(b_scales_ptr + b1)
            next_b0 = gl.load(b_scales_ptr + b0)
        for step in range(steps):
            stage = count % STAGES
            scale0 = 0.0
            scale1 = 0.0
            b_scale = 0.0
            if BLOCK:
                # The next step's arrive while the tensor cores work; after the last nobody looks.
                ahead = gl.minimum(step + 1, steps - 1)
                b_scale = next_b0
                if B_BY_ROW:
                    scale0 = next_a0
                    scale1 = next_a1
                    next_a1 = gl.load(a_scales + (ahead * a_step + a1))
                else:
                    scale0 = next_a0 * next_b0
                    scale1 = next_a0 * next_b1
                    next_b1 = gl.load(b_scales_ptr + (ahead * b_step + b1))
                next_a0 = gl.load(a_scales + (ahead * a_step + a0))
                next_b0 = gl.load(b_scales_ptr + (ahead * b_step + b0))
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            part = product(a_tiles.index(stage), b_tiles.index(stage), part, 0, number, B_BY_ROW)
            if B_BY_ROW:
                b_scales.index(number).store(b_scale)
                b_scale = b_scales.index(number).load(gl.SliceLayout(0, LAYOUT))
            part = warpgroup_mma_wait(0, (part,))
            sums0 = add_part(sums0, part, scale0, b_scale, B_BY_ROW, BLOCK)
            part = product(a_tiles.index(stage), b_tiles.index(stage), part, 1, number, B_BY_ROW)
            part = warpgroup_mma_wait(0, (part,))
            mbarrier.arrive(empty.index(stage), count=1)
            sums1 = add_part(sums1, part, scale1, b_scale, B_BY_ROW, BLOCK)
            count += 1
        # The next tile's place arrives while this one is stored.
        following = _find(gl.minimum(tile + programs, last), where, plan_ptr, BAND, CONTRACTS)
        if not BLOCK:
            sums0 = _scale(sums0, scales, group, row + row0, column + column0, M, N)
            sums1 = _scale(sums1, scales, group, row + row1, column + column1, M, N)
        if BIAS:
            sums0 = _add_bias(sums0, scales, group, column + column0, steps, N)
            sums1 = _add_bias(sums1, scales, group, column + column1, steps, N)
        y_tile = y_tiles.index(number)
        _store(sums0, y_desc, y_ptr, y_tile, y_row + row0, column + column0, left - row0, N)
        _store(sums1, y_desc, y_ptr, y_tile, y_row + row1, column + column1, left - row1, N)
        group, row, first, _b_row, _b_column, steps, y_row, left, column = following
    tma.store_wait(0)


@launched(language=gluon)
def _multiply_groups_kernel(
    a_desc,  # [M, K] fp8, in tiles of [128, 128]; or [M, L] where the contraction is in groups
    b_desc,  # [E N, K], or [N, E K], fp8, in tiles of [256, 128]; or [N, L]
    y_desc,  # [M, N], or [E M, N], in tiles of [64, 128] or, where fast, [64, 256]
    y_ptr,
    a_scale_ptr,  # fp32: by group and row; with BLOCK [M, ceil K / 128] with stride (1, a_step)
    b_scale_ptr,  # fp32: by group and row, and with BLOCK by step
    bias_ptr,  # [E, N], if BIAS
    plan_ptr,  # [E + 1 + tiles, 4] int32
    M, N, K, E, b_rows, b_columns,
    a_stride, a_row_stride, a_step, b_stride, b_row_stride, b_step,
    MODE: gl.constexpr, CONTRACTS: gl.constexpr, BIAS: gl.constexpr, BAND: gl.constexpr,
    STAGES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = a_desc.block_shape[0]
    COLUMNS: gl.constexpr = b_desc.block_shape[0]
    WIDTH: gl.constexpr = y_desc.block_shape[1]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, ROWS, STEP], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLUMNS, STEP], b_desc.layout)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [2, HALF, WIDTH], y_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    b_scales = gl.allocate_shared_memory(gl.float32, [2, PART], flat)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)  # both groups of warps
    fence_async_shared()

    tiles_n = gl.cdiv(N, COLUMNS)
    if CONTRACTS:  # noqa: SIM108
        tiles_m = E * gl.cdiv(M, ROWS)
    else:
        tiles_m = gl.load(plan_ptr + 4 * E)
    steps = gl.cdiv(K, STEP)
    first, programs = gl.program_id(0), gl.num_programs(0)
    where = (tiles_m, tiles_n, steps, first, programs, E, M, N, b_rows, b_columns)
    scales = (
        a_scale_ptr, b_scale_ptr, a_stride, a_step, b_stride, b_row_stride, a_row_stride,
        bias_ptr, b_step,
    )  # fmt: skip
    loads = (a_desc, b_desc, a_tiles, b_tiles, full, empty, where, plan_ptr)
    sums = (
        a_tiles, b_tiles, y_tiles, b_scales, full, empty, where, plan_ptr, y_desc, y_ptr, scales,
    )  # fmt: skip
    REGISTERS: gl.constexpr = [CONSUMER_REGISTERS, PRODUCER_REGISTERS]
    if MODE == "fast":
        gl.warp_specialize(
            [
                (_multiply_fast, (sums, 0, BAND, STAGES, CONTRACTS, BIAS)),
                (_multiply_fast, (sums, 1, BAND, STAGES, CONTRACTS, BIAS)),
                (_load_tiles, (loads, BAND, STAGES, CONTRACTS)),
            ],
            [4, 1],
            REGISTERS,
        )
    else:
        BLOCK: gl.constexpr = MODE != "precise"
        BY_ROW: gl.constexpr = MODE == "rows"
        gl.warp_specialize(
            [
                (_multiply_parts, (sums, 0, BAND, STAGES, CONTRACTS, BIAS, BLOCK, BY_ROW)),
                (_multiply_parts, (sums, 1, BAND, STAGES, CONTRACTS, BIAS, BLOCK, BY_ROW)),
                (_load_tiles, (loads, BAND, STAGES, CONTRACTS)),
            ],
            [4, 1],
            REGISTERS,
        )


# The launchers.


def mode_of(
    a: Tensor, a_block: tuple[int, ...], b: Tensor, b_block: tuple[int, ...],
    out_dtype: torch.dtype, fast_accum: bool,
) -> str | None:  # fmt: skip
    """Which of the kernel's modes multiplies the operands; None if none does."""
    if not (9, 0) <= capability_of(a.device) < (10, 0):
        return None
    if a.dtype == b.dtype == torch.float8_e5m2 or a.shape[-1] % ALIGN or b.shape[-2] % ALIGN:
        return None
    if any(x.data_ptr() % 16 for x in (a, b)) or out_dtype == torch.float64:
        return None
    if a_block[1] == b_block[1] == -1:
        # The output of 64 x 256 in float32 would leave no room for operands.
        return "fast" if fast_accum and out_dtype.itemsize == 2 else "precise"
    if a_block == (1, 128) and b_block in ((128, 128), (1, 128)):
        by_row = b_block == (1, 128)
        return "rows" if by_row else ("block" if b.ndim == 3 else None)
    return None


@replayed
def grouped_mm(
    a: Tensor,
    a_scale: Tensor | None,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor | None,
    b_block: Sequence[int],
    bias: Tensor | None,
    offs: Tensor,
    out_dtype: torch.dtype,
    fast_accum: bool,
    plan: Tensor | None = None,
) -> Tensor:
    if 0 in a.shape or 0 in b.shape or not offs.shape[0] or a_scale is None or b_scale is None:
        return _in_high_precision(a, b, bias, offs, out_dtype)
    mode = mode_of(a, tuple(a_block), b, tuple(b_block), out_dtype, fast_accum)
    if mode is None:
        return _dequantized(
            a, a_scale, tuple(a_block), b, b_scale, tuple(b_block), bias, offs, out_dtype
        )
    return multiply_groups(mode, a, a_scale, b, b_scale, bias, offs, out_dtype, plan)


def multiply_groups(
    mode: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    offs: Tensor, out_dtype: torch.dtype, plan: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:  # fmt: skip
    """The product of operands that have a mode; ``config`` in place of the one in the table."""
    contracts, E, (M, K), N = b.ndim == 2, offs.shape[0], a.shape, b.shape[-2]
    config = config or CONFIGS[mode, out_dtype.itemsize]
    a = a if a.is_contiguous() else a.contiguous()
    b_rows = b_columns = 0
    if not contracts:
        turned = b.transpose(0, 1)
        if turned.is_contiguous() and K % STEP.value == 0 and not b.is_contiguous():
            b, b_columns = turned.reshape(N, E * K), K
        else:
            b, b_rows = b.reshape(E * N, K), N
    elif not b.is_contiguous():
        b = b.contiguous()
    if mode in ("block", "rows") and a_scale.shape[0] > 1 and a_scale.stride(0) != 1:
        a_scale = a_scale.t().contiguous().t()
    plan = plan_groups(offs, 0 if contracts else M) if plan is None else plan
    y = a.new_empty((E, M, N) if contracts else (M, N), dtype=out_dtype)
    a_stride, a_row, a_step, b_stride, b_row, b_step = _strides(a_scale, b_scale)
    down = E * ceil_div(M, _ROWS) if contracts else padded_rows(M, E) // SPAN
    programs = min(multiprocessors(a.device), down * ceil_div(N, _COLUMNS))
    _multiply_groups_kernel[(programs,)](
        descriptor(a, _ROWS, 128), descriptor(b, _COLUMNS, 128),
        descriptor(y.view(-1, N), 64, 256 if mode == "fast" else 128), y,
        a_scale, b_scale, bias, plan, M, N, K, E, b_rows, b_columns,
        a_stride, a_row, a_step, b_stride, b_row, b_step,
        MODE=mode, CONTRACTS=contracts, BIAS=bias is not None, BAND=config.band,
        STAGES=config.stages, CONSUMER_REGISTERS=config.registers[0],
        PRODUCER_REGISTERS=config.registers[1], num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def _strides(a: Tensor, b: Tensor) -> tuple[int, int, int, int, int, int]:
    """Strides of the scales of a, then of b: from group to group, row to row, step to step."""

    def of(scale: Tensor) -> tuple[int, int, int]:
        if scale.ndim < 3:
            by_row = scale.stride(0) if scale.ndim == 2 and scale.shape[0] > 1 else 0
            by_step = scale.stride(1) if scale.ndim == 2 and scale.shape[1] > 1 else 0
            return 0, by_row, by_step
        sizes = zip(scale.shape, scale.stride(), strict=True)
        return tuple(stride if size > 1 else 0 for size, stride in sizes)  # type: ignore

    return *of(a), *of(b)


def _in_high_precision(
    a: Tensor, b: Tensor, bias: Tensor | None, offs: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """Operands without scales, or nothing to multiply."""
    E, M, N = offs.shape[0], a.shape[0], b.shape[-2]
    if bias is None and 0 in (E, M, N, a.shape[1]):
        return a.new_zeros((M, N) if b.ndim == 3 else (E, M, N), dtype=out_dtype)
    known = a.dtype == out_dtype == torch.bfloat16 and capability_of(a.device) >= (9, 0)
    if not known or not all(x.numel() and _has_torch_strides(x) for x in (a, b)):
        high = (a.to(out_dtype), None, (), b.to(out_dtype), None, ())
        return reference.grouped_mm(*high, bias, offs, out_dtype, False)
    y = torch._grouped_mm(a, b.mT, offs=offs.to(torch.int32), out_dtype=out_dtype)
    if bias is not None:
        rows = torch.arange(a.shape[0], device=a.device, dtype=offs.dtype)
        y += bias[torch.searchsorted(offs, rows, right=True).clamp_(max=offs.shape[0] - 1)]
    return clear_nobodys(y, offs)


_CLEAR = 1024
"""Elements that a program clears at a time."""


def clear_nobodys(y: Tensor, offs: Tensor) -> Tensor:
    """``y`` with zeros where torch leaves what it finds: what no group has given."""
    matrix = y if y.ndim == 2 else y.view(y.shape[0], -1)
    _clear_kernel[(matrix.shape[0], min(ceil_div(matrix.shape[1], _CLEAR), 64))](
        offs, matrix, matrix.shape[1], offs.shape[0], ROWS=y.ndim == 2, SIZE=_CLEAR
    )
    return y


@launched
def _clear_kernel(
    offs_ptr,  # [E]
    y_ptr,  # [M, N], or [E, N K]
    N, E,
    ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Zeros in the rows beyond the last end, or in the products of groups without rows."""
    row = tl.program_id(0)
    if ROWS:
        beyond = row >= tl.load(offs_ptr + E - 1)
    else:
        start = tl.load(offs_ptr + row - 1, mask=row > 0, other=0)
        beyond = tl.load(offs_ptr + row) <= start
    if beyond:
        y_ptr += row.to(tl.int64) * N
        for first in range(tl.program_id(1) * SIZE, N, tl.num_programs(1) * SIZE):
            columns = first + tl.arange(0, SIZE)
            zeros = tl.zeros([SIZE], y_ptr.dtype.element_ty)
            tl.store(y_ptr + columns, zeros, mask=columns < N)


def _has_torch_strides(x: Tensor) -> bool:
    """Whether torch._grouped_mm takes the operand: one dense dimension, others by 16 bytes."""
    strides = sorted(x.stride()[-2:])
    aligned = all(stride % 8 == 0 for stride in (*strides[1:], *x.stride()[:-2]))
    return strides[0] == 1 and aligned and x.data_ptr() % 16 == 0


def _dequantized(
    a: Tensor, a_scale: Tensor, a_block: tuple[int, ...], b: Tensor, b_scale: Tensor,
    b_block: tuple[int, ...], bias: Tensor | None, offs: Tensor, out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """In bfloat16 where that is wanted, else in float32 by the reference, which waits."""
    if out_dtype != torch.bfloat16 or (b.ndim == 2 and -1 in (a_block[1], b_block[1])):
        return reference.grouped_mm(
            a, a_scale, a_block, b, b_scale, b_block, bias, offs, out_dtype, False
        )
    left = dequantize(a, a_scale, a_block, out_dtype)
    if b.ndim == 3:
        E, N, K = b.shape
        scale = b_scale.reshape(-1, b_scale.shape[-1])
        if b_block[0] == -1:
            scale, b_block = scale.repeat_interleave(N, 0), (1, b_block[1])
        elif b_block[0] > 1:
            scale = b_scale.repeat_interleave(b_block[0], 1)[:, :N].reshape(E * N, -1)
            b_block = (1, b_block[1])
        right = dequantize(b.reshape(E * N, K), scale, b_block, out_dtype).view(E, N, K)
        return _in_high_precision(left, right, bias, offs, out_dtype)
    right = dequantize(b, b_scale, b_block, out_dtype)
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    ends = ((sizes + (SPAN - 1)) // SPAN * SPAN).cumsum(0).to(offs.dtype)
    return _in_high_precision(left, right, None, ends, out_dtype)
