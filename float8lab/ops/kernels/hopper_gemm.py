"""``y = a @ b.T`` of FP8 on Hopper's tensor cores: matrices, groups of rows, or groups of K.

M rows of a, N rows of b, K contraction, E groups. A program computes tiles of 128 x 256 of y, one
after the other. With groups, a program looks up the rows of a tile, and their group, in a plan: a
small kernel makes it from the offsets (``grouped_cast.py``), so the host need not know them. One
warp loads 128 of the contraction at a time through a ring of buffers; two groups of four warps
multiply half of the tile each.

- "fast" leaves the sums to the tensor cores, 64 x 256 for each group of warps;
- "precise" adds the sums over each 128 of K in float32, 64 x 128 (a quarter of the tile) at a time;
- "block" and "rows" scale these sums as they add them, while the other group of warps multiplies:
  a has 1x128 blocks, and b has 128x128 ("block") or 1x128 blocks ("rows").

A thread has two rows but 32 columns of a quarter. So the scales are costly to read where each row
of b has one: then the quarters of a group of warps are below each other, and both use the scales
that are read once from shared memory. Otherwise the quarters are side by side.

The last tile of a group stops where the group stops: threads store its rows, and TMA stores all
other tiles. Padding rows are a group without a contraction, so they become zeros.
"""

from __future__ import annotations

from typing import NamedTuple

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

from float8lab.ops.kernels import _tma
from float8lab.ops.kernels._common import ceil_div, multiprocessors
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels._tma import arrive, async_load, async_store, wait_empty, wait_full

_ROWS = 128
_COLUMNS = 256
HALF = gl.constexpr(64)
"""Rows that a group of warps multiplies at a time: those of one tensor core instruction."""
PART = gl.constexpr(128)
"""Columns that a group of warps multiplies at a time; as many as a 128x128 block has."""
STEP = gl.constexpr(128)
"""How much of the contraction is multiplied at a time: a block."""
DENSE = gl.constexpr(0)
"""The operands have no groups."""
GROUPED_ROWS = gl.constexpr(1)
"""Each group of a's rows has a matrix b of its own."""
GROUPED_SUMS = gl.constexpr(2)
"""Each group of the contraction has a result of its own."""
_ADD = gl.constexpr("add.rn.f32 $0, $1, $2;")
_ADD_SCALED = gl.constexpr("fma.rn.f32 $0, $1, $2, $3;")
_ADD_SCALED_TWICE = gl.constexpr(
    "{ .reg .f32 scaled; mul.rn.f32 scaled, $1, $3; fma.rn.f32 $0, scaled, $2, $4; }"
)


class Config(NamedTuple):
    """The settings with which a mode runs."""

    stages: int
    """How many buffers the ring has."""
    band: int = 16
    """How many rows of tiles are multiplied together."""
    registers: tuple[int, int] = (240, 24)
    """Registers of a thread that multiplies, and of a thread that loads."""


CONFIGS = {
    ("fast", 2): Config(stages=3),
    ("precise", 2): Config(stages=4),
    ("precise", 4): Config(stages=3),
    ("block", 2): Config(stages=4),
    ("block", 4): Config(stages=3),
    ("rows", 2): Config(stages=4),
    ("rows", 4): Config(stages=3),
}
"""Keys are mode and bytes of an output element: the output shares the memory of the ring."""


@gluon.jit
def tile_position(tile, tiles_m, tiles_n, BAND: gl.constexpr):
    """Return row and column of a tile: tiles go down ``BAND`` rows, then to the next column."""
    band = tile // (BAND * tiles_n)
    first = band * BAND
    height = gl.minimum(tiles_m - first, BAND)
    inside = tile - band * BAND * tiles_n
    return first + inside % height, inside // height


@gluon.jit
def _balanced_tile(pass_index, programs, tiles):
    """Return the tile of a pass; in every other round the programs take tiles in reverse order.

    The largest groups come first, so the same programs would get the longest tile of each round.
    """
    begin = pass_index // programs * programs
    last = gl.minimum(begin + programs, tiles) - 1
    return gl.where(begin // programs % 2 == 0, pass_index, begin + last - pass_index)


@gluon.jit
def _find(tile, schedule, BAND: gl.constexpr, GROUPS: gl.constexpr):
    """Find the operands of a tile, and where it is in y.

    Return its group; row and first step of a; row and column of b; its number of steps; how many
    rows its group has left from this row on (``left``); and its column in y.
    """
    tiles_m, tiles_n, steps, _, programs, E, M, _, b_rows, b_columns, plan_ptr = schedule
    if GROUPS == GROUPED_SUMS:
        tile = _balanced_tile(tile, programs, tiles_m * tiles_n)
    m, n = tile_position(tile, tiles_m, tiles_n, BAND)
    column = n * 2 * PART
    if GROUPS == DENSE:
        group = m * 0
        row = m * 2 * HALF
        first = group
        b_row = column
        b_column = group
        left = M - row
    elif GROUPS == GROUPED_SUMS:
        tiles_of_group = gl.cdiv(M, 2 * HALF)
        rank = m // tiles_of_group
        row = (m - rank * tiles_of_group) * 2 * HALF
        entry_ptr = plan_ptr + 4 * rank
        first = gl.load(entry_ptr)
        steps = gl.load(entry_ptr + 1)
        group = gl.load(entry_ptr + 2)
        b_row = column
        b_column = first * STEP
        left = M - row
    else:
        entry_ptr = plan_ptr + 4 * (E + 1 + m)
        group = gl.load(entry_ptr)
        row = gl.load(entry_ptr + 1)
        left = gl.load(entry_ptr + 2) - row
        steps = gl.where(group < E, steps, 0)
        group = gl.minimum(group, E - 1)
        first = group * 0
        b_row = group * b_rows + column
        b_column = group * b_columns
    return group, row, first, b_row, b_column, steps, left, column


@gluon.jit
def _multiply_quarter(
    a_tile, b_tile, partial, quarter: gl.constexpr, group: gl.constexpr, B_BY_ROW: gl.constexpr
):
    """Multiply a quarter into the registers of ``partial``, whose old values are dropped."""
    a = a_tile.slice(HALF * (quarter if B_BY_ROW else group), HALF)
    b = b_tile.slice(PART * (group if B_BY_ROW else quarter), PART).permute((1, 0))
    return warpgroup_mma(a, b, partial, use_acc=False, is_async=True)


@gluon.jit
def _add_part(sums, partial, a_scale, b_scale, B_BY_ROW: gl.constexpr, SCALED: gl.constexpr = True):
    """Add a scaled quarter; unless ``B_BY_ROW``, ``a_scale`` includes the scale of b."""
    # This assembly is volatile, because LLVM would move its own addition behind the next GEMM. Then
    # the results of both GEMMs would be live at once, and registers would spill.
    if not SCALED:
        sums = gl.inline_asm_elementwise(
            _ADD, "=f,f,f", [partial, sums], dtype=gl.float32, is_pure=False, pack=1
        )
    elif B_BY_ROW:
        a_scale, _ = gl.broadcast(gl.expand_dims(a_scale, 1), partial)
        b_scale, _ = gl.broadcast(gl.expand_dims(b_scale, 0), partial)
        operands = [partial, a_scale, b_scale, sums]
        sums = gl.inline_asm_elementwise(
            _ADD_SCALED_TWICE, "=f,f,f,f,f", operands, dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        scale, _ = gl.broadcast(gl.expand_dims(a_scale, 1), partial)
        sums = gl.inline_asm_elementwise(
            _ADD_SCALED, "=f,f,f,f", [partial, scale, sums], dtype=gl.float32, is_pure=False, pack=1
        )
    return sums


@gluon.jit
def store_rows(sums, y_desc, y_tile, row, column):
    """Store 64 rows through a buffer, which the previous store must have read."""
    tma.store_wait(0)
    y_tile.store(sums.to(y_desc.dtype))
    fence_async_shared()
    async_store(y_desc, [row, column], y_tile)


@gluon.jit
def _load_tiles(arguments, BAND: gl.constexpr, GROUPS: gl.constexpr):
    """Run the warp that loads."""
    a_desc, b_desc, a_tiles, b_tiles, full, empty, schedule = arguments
    tiles_m, tiles_n, _, first_tile, programs, _, _, _, _, _, _ = schedule
    STAGES: gl.constexpr = full.shape[0]
    count = 0
    for tile in range(first_tile, tiles_m * tiles_n, programs):
        _group, row, first, b_row, b_column, steps, _left, _column = _find(
            tile, schedule, BAND, GROUPS
        )
        for step in range(steps):
            stage = count % STAGES
            wait_empty(empty, count)
            bar = full.index(stage)
            mbarrier.expect(bar, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            async_load(a_desc, [row, (first + step) * STEP], bar, a_tiles.index(stage))
            async_load(b_desc, [b_row, b_column + step * STEP], bar, b_tiles.index(stage))
            count += 1


@gluon.jit
def _store(sums, y_desc, y_ptr, y_tile, row, column, left, N, GROUPS: gl.constexpr):
    """Store 64 rows of y, of which ``left`` belong to the group."""
    if GROUPS == DENSE or left >= HALF:
        store_rows(sums, y_desc, y_tile, row, column)  # TMA skips what is outside of y
    elif left > 0:
        rows = gl.arange(0, sums.shape[0], gl.SliceLayout(1, sums.type.layout))
        columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout)) + column
        offsets = (row + rows).to(gl.int64)[:, None] * N + columns[None, :]
        mask = (rows < left)[:, None] & (columns < N)[None, :]
        gl.store(y_ptr + offsets, sums.to(y_desc.dtype), mask=mask)


@gluon.jit
def _scale(sums, scales, group, row, column, M, N):
    """Multiply sums by the scales of their rows and columns, which span the contraction."""
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
    """Add the bias of each column to sums, except in padding rows."""
    _, _, _, _, _, _, _, bias_ptr, _ = scales
    columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout)) + column
    columns = gl.minimum(columns, N - 1)
    bias = gl.load(bias_ptr + (group * N + columns)).to(gl.float32)
    return sums + gl.where(steps > 0, bias, 0.0)[None, :]


@gluon.jit
def _multiply_fast(arguments, number: gl.constexpr, BAND: gl.constexpr, GROUPS: gl.constexpr):
    """Run a group of warps that leaves the sums to the tensor cores."""
    a_tiles, b_tiles, y_tiles, _, full, empty, schedule, y_desc, y_ptr, scales = arguments
    tiles_m, tiles_n, _, first_tile, programs, _, M, N, _, _, _ = schedule
    bias_ptr = scales[7]
    STAGES: gl.constexpr = full.shape[0]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PART, 32])
    count = 0
    last = tiles_m * tiles_n - 1
    group, row, _first, _b_row, _b_column, steps, left, column = _find(
        gl.minimum(first_tile, last), schedule, BAND, GROUPS
    )
    for tile in range(first_tile, tiles_m * tiles_n, programs):
        sums = gl.zeros([HALF, 2 * PART], gl.float32, LAYOUT)
        for step in range(steps):
            stage = count % STAGES
            wait_full(full, count)
            a = a_tiles.index(stage).slice(HALF * number, HALF)
            sums = warpgroup_mma(a, b_tiles.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, (sums,))
            arrive(empty, count + STAGES - 1, step > 0)
            count += 1
        sums = warpgroup_mma_wait(0, (sums,))
        arrive(empty, count + STAGES - 1, steps > 0)
        below = HALF * number
        y_tile = y_tiles.index(number)
        y_row = group * M + row if GROUPS == GROUPED_SUMS else row  # results are below each other
        sums = _scale(sums, scales, group, row + below, column, M, N)
        ahead = gl.minimum(tile + programs, last)
        if bias_ptr is not None:
            sums = _add_bias(sums, scales, group, column, steps, N)
        else:  # find the next tile while storing this tile; with a bias, registers would spill
            following = _find(ahead, schedule, BAND, GROUPS)
        _store(sums, y_desc, y_ptr, y_tile, y_row + below, column, left - below, N, GROUPS)
        if bias_ptr is not None:
            following = _find(ahead, schedule, BAND, GROUPS)
        group, row, _first, _b_row, _b_column, steps, left, column = following
    tma.store_wait(0)


@gluon.jit
def _multiply_quarters(  # noqa: PLR0915
    arguments, number: gl.constexpr, BAND: gl.constexpr, GROUPS: gl.constexpr, MODE: gl.constexpr
):
    """Run a group of warps that multiplies a quarter, 64 x 128, at a time."""
    a_tiles, b_tiles, y_tiles, b_scales, full, empty, schedule, y_desc, y_ptr, scales = arguments
    tiles_m, tiles_n, _, first_tile, programs, _, M, N, _, _, _ = schedule
    a_scale_ptr, b_scale_ptr, _, a_step, b_stride, b_row_stride, _, bias_ptr, b_step = scales
    STAGES: gl.constexpr = full.shape[0]
    BLOCK: gl.constexpr = MODE != "precise"
    B_BY_ROW: gl.constexpr = MODE == "rows"
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 32])
    rows = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, PART, gl.BlockedLayout([1], [32], [4], [0]))
    # Where its two quarters are: below each other or side by side.
    row0: gl.constexpr = 0 if B_BY_ROW else HALF * number
    row1: gl.constexpr = HALF if B_BY_ROW else HALF * number
    column0: gl.constexpr = PART * number if B_BY_ROW else 0
    column1: gl.constexpr = PART * number if B_BY_ROW else PART
    partial = gl.zeros([HALF, PART], gl.float32, LAYOUT)
    count = 0
    last = tiles_m * tiles_n - 1
    group, row, first, _b_row, _b_column, steps, left, column = _find(
        gl.minimum(first_tile, last), schedule, BAND, GROUPS
    )
    for tile in range(first_tile, tiles_m * tiles_n, programs):
        if GROUPS == DENSE:  # nothing is read, and the loop carries fewer values
            group, row, first, _b_row, _b_column, steps, left, column = _find(
                tile, schedule, BAND, GROUPS
            )
        sums0 = gl.zeros([HALF, PART], gl.float32, LAYOUT)
        sums1 = gl.zeros([HALF, PART], gl.float32, LAYOUT)
        # A group without steps may begin after all scales: then it reads the scale before.
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
                # The next scales arrive while the tensor cores work; the last loads are unused.
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
            wait_full(full, count)
            a, b = a_tiles.index(stage), b_tiles.index(stage)
            partial = _multiply_quarter(a, b, partial, 0, number, B_BY_ROW)
            if B_BY_ROW:
                b_scales.index(number).store(b_scale)
                b_scale = b_scales.index(number).load(gl.SliceLayout(0, LAYOUT))
            partial = warpgroup_mma_wait(0, (partial,))
            sums0 = _add_part(sums0, partial, scale0, b_scale, B_BY_ROW, BLOCK)
            partial = _multiply_quarter(a, b, partial, 1, number, B_BY_ROW)
            partial = warpgroup_mma_wait(0, (partial,))
            # Always true: Triton 3.6 would drop ``steps``, which tiles carry, were it only a bound.
            arrive(empty, count, step < steps)
            sums1 = _add_part(sums1, partial, scale1, b_scale, B_BY_ROW, BLOCK)
            count += 1
        if GROUPS != DENSE:  # find the next tile while storing this tile
            following = _find(gl.minimum(tile + programs, last), schedule, BAND, GROUPS)
        if not BLOCK:
            sums0 = _scale(sums0, scales, group, row + row0, column + column0, M, N)
            sums1 = _scale(sums1, scales, group, row + row1, column + column1, M, N)
        if bias_ptr is not None:
            sums0 = _add_bias(sums0, scales, group, column + column0, steps, N)
            sums1 = _add_bias(sums1, scales, group, column + column1, steps, N)
        y_tile = y_tiles.index(number)
        # This is computed here, since carrying it along takes too many registers.
        y_row = group * M + row if GROUPS == GROUPED_SUMS else row
        _store(sums0, y_desc, y_ptr, y_tile, y_row + row0, column + column0, left - row0, N, GROUPS)
        _store(sums1, y_desc, y_ptr, y_tile, y_row + row1, column + column1, left - row1, N, GROUPS)
        if GROUPS != DENSE:
            group, row, first, _b_row, _b_column, steps, left, column = following
    tma.store_wait(0)


@launched(language=gluon)
def _multiply_tiles_kernel(
    a_desc,  # [M, K] fp8, in tiles of [128, 128]; or [M, L] where the contraction is in groups
    b_desc,  # [E N, K], or [N, E K], fp8, in tiles of [256, 128]; or [N, L]
    y_desc,  # [M, N], or [E M, N], in tiles of [64, 128] or, where fast, [64, 256]
    y_ptr,
    a_scale_ptr,  # fp32: by group and row; with BLOCK [M, ceil K / 128] with stride (1, a_step)
    b_scale_ptr,  # fp32: by group and row, and with BLOCK by step
    bias_ptr,  # None or [E, N]
    plan_ptr,  # [E + 1 + tiles, 4] int32, see grouped_cast.py; None if DENSE
    M, N, K, E, b_rows, b_columns,
    a_stride, a_row_stride, a_step, b_stride, b_row_stride, b_step,
    MODE: gl.constexpr, GROUPS: gl.constexpr, BAND: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = a_desc.block_shape[0]
    COLUMNS: gl.constexpr = b_desc.block_shape[0]
    WIDTH: gl.constexpr = y_desc.block_shape[1]
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [STAGES, ROWS, STEP], a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLUMNS, STEP], b_desc.layout)
    y_tiles = gl.allocate_shared_memory(y_desc.dtype, [2, HALF, WIDTH], y_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    b_scales = gl.allocate_shared_memory(gl.float32, [2, PART], flat)
    full, empty = _tma.barriers(STAGES, 1), _tma.barriers(STAGES, 2)  # two groups empty it
    fence_async_shared()

    tiles_n = gl.cdiv(N, COLUMNS)
    if GROUPS == GROUPED_ROWS:  # noqa: SIM108
        tiles_m = gl.load(plan_ptr + 4 * E)
    else:
        tiles_m = E * gl.cdiv(M, ROWS)
    steps = gl.cdiv(K, STEP)
    first, programs = gl.program_id(0), gl.num_programs(0)
    schedule = (tiles_m, tiles_n, steps, first, programs, E, M, N, b_rows, b_columns, plan_ptr)
    scales = (
        a_scale_ptr, b_scale_ptr, a_stride, a_step, b_stride, b_row_stride, a_row_stride,
        bias_ptr, b_step,
    )  # fmt: skip
    loads = (a_desc, b_desc, a_tiles, b_tiles, full, empty, schedule)
    sums = (a_tiles, b_tiles, y_tiles, b_scales, full, empty, schedule, y_desc, y_ptr, scales)
    REGISTERS: gl.constexpr = [CONSUMER_REGISTERS, PRODUCER_REGISTERS]
    if MODE == "fast":
        gl.warp_specialize([
            (_multiply_fast, (sums, 0, BAND, GROUPS)),
            (_multiply_fast, (sums, 1, BAND, GROUPS)),
            (_load_tiles, (loads, BAND, GROUPS)),
        ], [4, 1], REGISTERS)  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply_quarters, (sums, 0, BAND, GROUPS, MODE)),
            (_multiply_quarters, (sums, 1, BAND, GROUPS, MODE)),
            (_load_tiles, (loads, BAND, GROUPS)),
        ], [4, 1], REGISTERS)  # fmt: skip


def _descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=8 * x.element_size(), rank=2
    )
    return TensorDescriptor.from_tensor(x, [rows, columns], layout)


def multiply_tiles(
    mode: str, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None,
    y: Tensor, *, groups: int = 0, plan: Tensor | None = None, E: int = 1,
    b_offset: tuple[int, int] = (0, 0), config: Config | None = None,
) -> Tensor:  # fmt: skip
    """Launch the kernel, which writes ``y``.

    Args:
        mode: one of those above.
        a: ``[M, K]``, contiguous and aligned.
        a_scale: ``[groups, rows, steps]``, or without the first of these; so is ``b_scale``.
        b: ``[N, K]``, of all groups below each other or side by side; contiguous and aligned.
        bias: ``[E, N]``.
        groups: ``DENSE``, ``GROUPED_ROWS`` or ``GROUPED_SUMS``.
        b_offset: rows, and columns, from one group's matrix to the next group's.
        config: replaces the config in the table.
    """
    config = config or CONFIGS[mode, y.element_size()]
    (M, K), N = a.shape, y.shape[-1]
    tiles_m = E * ceil_div(M, _ROWS)
    if plan is not None and groups == GROUPED_ROWS.value:
        tiles_m = plan.shape[0] - E - 1
    programs = min(multiprocessors(a.device), tiles_m * ceil_div(N, _COLUMNS))
    _multiply_tiles_kernel[(programs,)](
        _descriptor(a, _ROWS, 128), _descriptor(b, _COLUMNS, 128),
        _descriptor(y.view(-1, N), 64, 256 if mode == "fast" else 128), y,
        a_scale, b_scale, bias, plan, M, N, K, E, *b_offset,
        *_strides(a_scale), *_strides(b_scale),
        MODE=mode, GROUPS=groups, BAND=config.band, STAGES=config.stages,
        CONSUMER_REGISTERS=config.registers[0], PRODUCER_REGISTERS=config.registers[1],
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return y


def _strides(scale: Tensor) -> tuple[int, int, int]:
    """Return the strides of groups, rows and steps; 0 for a dimension of size 1."""
    sizes = zip(scale.shape, scale.stride(), strict=True)
    strides = (stride if size > 1 else 0 for size, stride in sizes)
    return (*[0] * (3 - scale.ndim), *strides)  # type: ignore[return-value]
