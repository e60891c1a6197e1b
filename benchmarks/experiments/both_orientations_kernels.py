"""Cast a bfloat16 matrix per tensor, in one or both orientations.  M rows, K columns."""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from float8lab.ops.kernels.cast_hopper import _first, _second, _words

__all__ = ["cast"]


@gluon.jit
def _encoded(pairs, encode):
    """Return the first and second value of every pair, in float32, times the encode factor."""
    return _first(pairs, gl.bfloat16) * encode, _second(pairs, gl.bfloat16) * encode


@gluon.jit
def _cast_kernel(
    x_ptr,  # [M, K] bfloat16
    q_ptr,  # [M, K] fp8
    q_t_ptr,  # [K, M] fp8
    encode_ptr,  # [1] fp32
    M,
    K,
    TILE_M: gl.constexpr,
    TILE_K: gl.constexpr,
    DOWN: gl.constexpr,  # tiles in a column of tiles before the next tiles to the right
    STRAIGHT: gl.constexpr,  # how often the matrix is written
    TRANSPOSED: gl.constexpr,
    READ: gl.constexpr,
    WRITE: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    ACROSS: gl.constexpr = TILE_K // 8  # lanes, of four pairs each
    BY_ROW: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    BY_VALUE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    tiles_m, tiles_k = M // TILE_M, K // TILE_K
    band = gl.program_id(0) // (DOWN * tiles_k)
    down = gl.minimum(tiles_m - band * DOWN, DOWN)
    place = gl.program_id(0) % (DOWN * tiles_k)
    tile_m = (band * DOWN + place % down).to(gl.int64)
    tile_k = (place // down).to(gl.int64)

    rows = gl.arange(0, TILE_M, gl.SliceLayout(1, BY_ROW)).to(gl.int64)
    columns = gl.arange(0, TILE_K // 2, gl.SliceLayout(0, BY_ROW))
    x_ptr = x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    x_ptr += tile_m * TILE_M * (K // 2) + tile_k * (TILE_K // 2)
    offsets = rows[:, None] * (K // 2) + columns[None, :]
    pairs = gl.load(x_ptr + offsets, eviction_policy=READ)
    encode = gl.load(encode_ptr)
    if TRANSPOSED:
        tile = gl.allocate_shared_memory(
            gl.int32, [TILE_M, TILE_K // 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), pairs
        )
    if STRAIGHT > 0:
        q = gl.join(*_encoded(pairs, encode))
        q = gl.reshape(q, [TILE_M, TILE_K]).to(q_ptr.dtype.element_ty)
        q = gl.convert_layout(q, BY_VALUE, assert_trivial=True)
        rows = gl.arange(0, TILE_M, gl.SliceLayout(1, BY_VALUE)).to(gl.int64)
        columns = gl.arange(0, TILE_K, gl.SliceLayout(0, BY_VALUE))
        offsets = tile_m * TILE_M * K + tile_k * TILE_K + rows[:, None] * K + columns[None, :]
        gl.store(q_ptr + offsets, q, cache_modifier=WRITE)
        if STRAIGHT > 1:
            gl.store(q_t_ptr + offsets, q, cache_modifier=WRITE)
    if TRANSPOSED:
        WIDE: gl.constexpr = TILE_K // 64  # warps side by side
        DEEP: gl.constexpr = min(TILE_M // 16, 32)  # lanes, of four words each
        BY_COLUMN: gl.constexpr = gl.BlockedLayout(
            [TILE_M * WIDE // WARPS, 1], [1, 32], [WARPS // WIDE, WIDE], [0, 1]
        )
        OUT: gl.constexpr = gl.BlockedLayout([1, 4], [32 // DEEP, DEEP], [WARPS, 1], [1, 0])
        fp8: gl.constexpr = q_t_ptr.dtype.element_ty
        first, second = _encoded(tile.load(BY_COLUMN), encode)
        words = gl.permute(gl.join(_words(first, fp8), _words(second, fp8)), [1, 2, 0])
        words = gl.reshape(words, [TILE_K, TILE_M // 4])
        words = gl.allocate_shared_memory(
            gl.int32, [TILE_K, TILE_M // 4], gl.SwizzledSharedLayout(4, 2, 8, [1, 0]), words
        ).load(OUT)
        rows = gl.arange(0, TILE_K, gl.SliceLayout(1, OUT)).to(gl.int64)
        columns = gl.arange(0, TILE_M // 4, gl.SliceLayout(0, OUT))
        q_t_ptr = q_t_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
        q_t_ptr += tile_k * TILE_K * (M // 4) + tile_m * (TILE_M // 4)
        gl.store(q_t_ptr + rows[:, None] * (M // 4) + columns[None, :], words, cache_modifier=WRITE)


def cast(
    x: Tensor,
    encode: Tensor,
    q: Tensor,
    q_t: Tensor,
    *,
    straight: int = 1,
    transposed: bool = True,
    tile: tuple[int, int] = (128, 128),
    warps: int = 8,
    down: int = 1,
    read: str = "",
    write: str = "",
) -> None:
    """Write ``x * encode`` to ``q`` and its transpose to ``q_t``.

    Args:
        x: ``[M, K]`` bfloat16, contiguous; M and K multiples of the tile.
        encode: ``[1]`` float32.
        q: ``[M, K]`` FP8, written.
        q_t: ``[K, M]`` FP8, written.
        straight: how often the matrix itself is written; the second time to ``q_t``.
        transposed: whether the transpose is written.
        tile: the rows and columns that a program casts.
        warps: the number of warps of a program.
        down: the number of tiles in a column of tiles before the next tiles to the right.
        read: the eviction policy of loads.
        write: the cache modifier of stores.
    """
    (M, K), (rows, columns) = x.shape, tile
    if M % rows or K % columns:
        raise ValueError(f"tiles of {rows} x {columns} do not divide a matrix of {M} x {K}")
    _cast_kernel[(M // rows * (K // columns),)](
        x, q, q_t, encode, M, K, TILE_M=rows, TILE_K=columns, DOWN=down, STRAIGHT=straight,
        TRANSPOSED=transposed, READ=read, WRITE=write, num_warps=warps,
    )  # fmt: skip
