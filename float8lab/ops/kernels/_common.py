"""Functions that kernel files share: scales from amaxes, the saturating cast, masked tiles.

M rows, K columns of the input; ROWS, COLUMNS the same after padding to the alignment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.ops.kernels._launch import is_on_current_device

FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

_PACK = """
    cvt.rn.satfinite.FORMATx2.f32 low, $2, $1;
    cvt.rn.satfinite.FORMATx2.f32 high, $4, $3;"""
PACK_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high;" + _PACK.replace("FORMAT", "e4m3") + "mov.b32 $0, {low, high}; }"
)
# A comparison gives 1.0 where a value is infinite. The high byte of 1.0, 0x3F, has the bits that
# turn the last six bits of the largest number, 0x7B, into those of infinity, 0x7C.
PACK_E5M2 = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 word, infinite, is0, is1, is2, is3; .reg .f32 size;"
    + _PACK.replace("FORMAT", "e5m2")
    + "".join(f"abs.f32 size, ${5 + i}; set.eq.f32.f32 is{i}, size, 0f7F800000;" for i in range(4))
    + """
    prmt.b32 infinite, is0, is1, 0x0073;
    prmt.b32 infinite, infinite, is2, 0x0710;
    prmt.b32 infinite, infinite, is3, 0x7210;
    mov.b32 word, {low, high};
    lop3.b32 $0, word, infinite, 0x3C3C3C3C, 0xB8;
}"""
)
# Hopper compares two bfloat16 at once. Rounding toward zero makes no finite float32 infinite.
PACK_E5M2_SM90 = tl.constexpr(
    "{ .reg .b16 low, high; .reg .b32 word, infinity, infinite, is01, is23;"
    "mov.b32 infinity, 0x7F807F80;"
    + _PACK.replace("FORMAT", "e5m2")
    + "".join(
        f"cvt.rz.bf16x2.f32 is{pair}, ${6 + i}, ${5 + i}; abs.bf16x2 is{pair}, is{pair};"
        f"set.eq.bf16x2.bf16x2 is{pair}, is{pair}, infinity;"
        for i, pair in ((0, "01"), (2, "23"))
    )
    + """
    prmt.b32 infinite, is01, is23, 0x7531;
    mov.b32 word, {low, high};
    lop3.b32 $0, word, infinite, 0x3C3C3C3C, 0xB8;
}"""
)
_NAN_FOR_INFINITY = """{
    .reg .b32 zero;
    mov.b32 zero, 0;
    fma.rn.FORMATx2 $0, $1, zero, $1;
}"""
NAN_FOR_BF16 = tl.constexpr(_NAN_FOR_INFINITY.replace("FORMAT", "bf16"))
NAN_FOR_FP16 = tl.constexpr(_NAN_FOR_INFINITY.replace("FORMAT", "f16"))
WIDEN_BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
WIDEN_FP16 = tl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.f32.f16 $0, low;
    cvt.f32.f16 $1, high;
}""")
_GRID_WORKSPACE = tl.constexpr("""{
    .reg .b32 low, high;
    mov.u32 low, %envreg2;
    mov.u32 high, %envreg1;
    mov.b64 $0, {low, high};
}""")


TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@dataclass(frozen=True)
class Tile:
    """Shape of the tile of one program, and its warps."""

    rows: int
    columns: int
    warps: int

    @functools.cached_property
    def constants(self) -> dict[str, int]:
        """The constants of a kernel launch with this tile."""
        return {"TILE_M": self.rows, "TILE_K": self.columns, "num_warps": self.warps}


TILE = Tile(rows=64, columns=128, warps=4)
"""A thread has at most 64 elements, and so few registers that several programs share a
multiprocessor: one program loads while another stores."""


# triton.cdiv and triton.next_power_of_2 also run in kernels, which makes them slow outside of one.
def ceil_div(size: int, tile: int) -> int:
    """How many tiles it takes to hold ``size``."""
    return -(-size // tile)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU: a persistent kernel has a program for each."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def next_power_of_2(size: int) -> int:
    """The smallest power of two that is not below ``size``."""
    return 1 << max(size - 1, 0).bit_length()


def by_rows(x: Tensor) -> Tensor:
    """Return a tensor, copied unless the elements of a row are contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def grid_of(shape: Sequence[int], tile: Tile) -> tuple[int]:
    return (ceil_div(shape[0], tile.rows) * ceil_div(shape[1], tile.columns),)


def empty_column_sums(x: Tensor, shape: Sequence[int], tile: Tile) -> Tensor:
    """Allocate partial column sums on the device of ``x``: a row for each row of tiles."""
    return x.new_empty((ceil_div(shape[0], tile.rows), shape[1]), dtype=torch.float32)


def on_device_of_first(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Run a launcher on the GPU of its first argument."""

    @functools.wraps(launcher)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_on_current_device(x):
            return launcher(x, *args, **kwargs)
        with torch.cuda.device(x.device):
            return launcher(x, *args, **kwargs)

    return call


def broadcast_scale(scale: Tensor, block: Sequence[int]) -> tuple[Tensor, tuple[int, int]]:
    """Return a matrix of scales and its block sizes, 0 where a scale serves a whole dimension."""
    if scale.numel() == 1:
        return scale.view(1, 1), (0, 0)
    rows, columns = (0 if n == 1 or b == -1 else b for n, b in zip(scale.shape, block, strict=True))
    return scale, (rows, columns)


@triton.jit
def tile_indices(COLUMNS, TILE_M: tl.constexpr, TILE_K: tl.constexpr, tile=None):
    """Return row and column (in tiles) of this program's or a given tile; its rows and columns."""
    tiles_k = tl.cdiv(COLUMNS, TILE_K)
    if tile is None:
        tile = tl.program_id(0)
    tile_m, tile_k = (tile // tiles_k).to(tl.int64), (tile % tiles_k).to(tl.int64)
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    return tile_m, tile_k, rows, tile_k * TILE_K + tl.arange(0, TILE_K)


@triton.jit
def abs_bits(x):
    """Bit pattern of abs(x) for float32 x: ordered as the values are, and NaN above inf."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def pow2_reciprocal(x):
    """1 / x of a power of two from 2**-126 to 2**127, exactly, without a division."""
    bits = 0x7F000000 - x.to(tl.int32, bitcast=True)
    return tl.where(bits == 0, 0x00400000, bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_from_amax(amax, eps, LIMIT: tl.constexpr, RULE: tl.constexpr):
    """Decode scales and encode factors, as ``reference.factors_from_amax`` makes them."""
    # Divisions are costly, since every thread of a tile repeats those of its rows and columns.
    # Powers of two need none: LIMIT is 1.75 * 2**LOG2, so the exponent of LIMIT / amax is the
    # exponent of LIMIT minus that of amax, and one less where the mantissa of amax is above 1.75.
    # Rounding the quotient would not change its exponent.
    raised = tl.where(amax < eps, eps, amax)  # NaN survives, as in torch.clamp
    usable = (raised > 0) & (raised < float("inf"))
    if RULE == "fp32":
        encode = tl.div_rn(LIMIT, raised)
        encode = tl.where(encode > FLOAT32_MAX, FLOAT32_MAX, encode)
        scale = tl.div_rn(1.0, encode)
    else:
        tl.static_assert(LIMIT == 448.0 or LIMIT == 57344.0)
        LOG2: tl.constexpr = 8 if LIMIT == 448.0 else 15
        bits = raised.to(tl.int32, bitcast=True)
        exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        if RULE == "e8m0":
            scale = (tl.maximum(exponent - LOG2, 1) << 23).to(tl.float32, bitcast=True)
            encode = pow2_reciprocal(scale)
        else:
            encode = (tl.minimum(254 + LOG2 - exponent, 254) << 23).to(tl.float32, bitcast=True)
            scale = pow2_reciprocal(encode)
    return tl.where(usable, scale, 1.0), tl.where(usable, encode, 1.0)


@triton.jit
def nan_for_infinity(x, dtype: tl.constexpr):
    """Prepare a tile for a cast to ``dtype``: e4m3 has no infinity, so NaN takes its place."""
    # x * 0 + x is x (a zero keeps its sign) where x is finite, and NaN elsewhere. It takes a single
    # instruction, even for two 2-byte values. The compiler repeats it for every call, since it is
    # not declared pure; ``widen`` does the same.
    if dtype == tl.float8e4nv:
        if INTERPRETED:
            wide = x.to(tl.float32)
            x = (wide * 0.0 + wide).to(x.dtype)
        elif x.dtype == tl.float32:
            x = tl.fma(x, tl.zeros_like(x), x)
        else:
            CODE: tl.constexpr = NAN_FOR_BF16 if x.dtype == tl.bfloat16 else NAN_FOR_FP16
            x = tl.inline_asm_elementwise(CODE, "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    return x


@triton.jit
def saturate(y, x, dtype: tl.constexpr):
    """Cast float32 ``y``, which is ``x`` times an encode factor, as ``round_to_fp8`` does.

    ``x`` is float32 from ``nan_for_infinity``. Where the encode factor was made from the amax of
    the same values, scaling makes no finite value infinite: callers then pass ``y`` for
    ``x``, too, which saves registers. The instruction itself clamps: cvt to e4m3x2 and e5m2x2
    exists only with .satfinite, and NaN stays NaN (PTX ISA, "cvt"). Clamping first would cost four
    instructions an element, and a NaN-propagating minimum and maximum make the compiler miscompile
    transposed one-byte stores (https://github.com/triton-lang/triton/issues/11111).
    """
    if dtype == tl.float8e4nv:
        q = y.to(dtype)
    elif INTERPRETED:
        q = y.to(dtype)
        byte = (q.to(tl.uint8, bitcast=True) & 0x80) | 0x7C
        infinite = abs_bits(x) == 0x7F800000
        q = tl.where(infinite, byte, q.to(tl.uint8, bitcast=True)).to(dtype, bitcast=True)
    else:
        HOPPER: tl.constexpr = tl.target_info.cuda_capability_geq(9, 0)
        CODE: tl.constexpr = PACK_E5M2_SM90 if HOPPER else PACK_E5M2
        q = tl.inline_asm_elementwise(
            CODE, "=r,f,f,f,f,f,f,f,f", [y, x], dtype=tl.uint8, is_pure=True, pack=4
        ).to(dtype, bitcast=True)
    return q


@triton.jit
def pack(y0, y1, y2, y3, x0, x1, x2, x3, dtype: tl.constexpr):
    """``saturate`` four values into the bytes of an int32, the first value in the lowest byte."""
    if INTERPRETED:
        word = saturate(y0, x0, dtype).to(tl.uint8, bitcast=True).to(tl.int32)
        word |= saturate(y1, x1, dtype).to(tl.uint8, bitcast=True).to(tl.int32) << 8
        word |= saturate(y2, x2, dtype).to(tl.uint8, bitcast=True).to(tl.int32) << 16
        word |= saturate(y3, x3, dtype).to(tl.uint8, bitcast=True).to(tl.int32) << 24
    elif dtype == tl.float8e4nv:
        # This takes three instructions; and Triton 3.6 miscompiles the code above where the same
        # values are also cast for another use.
        word = tl.inline_asm_elementwise(
            PACK_E4M3, "=r,f,f,f,f", [y0, y1, y2, y3], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        HOPPER: tl.constexpr = tl.target_info.cuda_capability_geq(9, 0)
        CODE: tl.constexpr = PACK_E5M2_SM90 if HOPPER else PACK_E5M2
        values = [y0, y1, y2, y3, x0, x1, x2, x3]
        word = tl.inline_asm_elementwise(
            CODE, "=r,f,f,f,f,f,f,f,f", values, dtype=tl.int32, is_pure=True, pack=1
        )
    return word


@triton.jit
def widen(x):
    """Convert to float32. Every call repeats this, so registers hold 2-byte values in between."""
    if x.dtype == tl.float32 or INTERPRETED:
        wide = x.to(tl.float32)
    else:
        CODE: tl.constexpr = WIDEN_BF16 if x.dtype == tl.bfloat16 else WIDEN_FP16
        wide = tl.inline_asm_elementwise(
            CODE, "=r,=r,r", [x], dtype=tl.float32, is_pure=False, pack=2
        )
    return wide


@triton.jit
def largest_bits(x0, x1, x2, x3):
    """Return the largest bit pattern of each word of a tile: a word has four values."""
    upper = tl.maximum(abs_bits(widen(x0)), abs_bits(widen(x1)))
    return tl.maximum(upper, tl.maximum(abs_bits(widen(x2)), abs_bits(widen(x3))))


@triton.jit
def pack_scaled(x0, x1, x2, x3, encode, dtype: tl.constexpr):
    """Scale four neighbours in a column, float32 as ``saturate`` wants it, and pack them."""
    return pack(x0 * encode, x1 * encode, x2 * encode, x3 * encode, x0, x1, x2, x3, dtype)


@triton.jit
def load_tile(x_ptr, rows, columns, M, K, stride_m, stride_k):
    """Tile at int64 ``rows`` and ``columns``; 0 outside [M, K]."""
    mask = (rows < M)[:, None] & (columns < K)[None, :]
    offsets = rows[:, None] * stride_m + columns[None, :] * stride_k
    return tl.load(x_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS):
    """Store a tile of a contiguous [ROWS, COLUMNS] matrix."""
    mask = (rows < ROWS)[:, None] & (columns < COLUMNS)[None, :]
    tl.store(q_ptr + rows[:, None] * COLUMNS + columns[None, :], q, mask=mask)


@triton.jit
def store_words(q_ptr, packed, words, columns, ROWS, COLUMNS, limit):
    """Store words of four rows, below ``limit``, into the contiguous [COLUMNS, ROWS] transpose."""
    # Indices and mask count words. Rows divided or multiplied by 4 would hide from the compiler
    # that words are neighbours, and it would store one word at a time.
    mask = (columns < COLUMNS)[:, None] & (words < limit // 4)[None, :]
    pointer = q_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    offsets = columns[:, None] * (ROWS // 4) + words[None, :]
    tl.store(pointer + offsets, tl.trans(packed), mask=mask)


@triton.jit
def store_column_sum(sum_ptr, x0, x1, x2, x3, tile_m, columns, K):
    """Store column sums of a tile of words in row ``tile_m`` of contiguous [row tiles, K]."""
    x = (widen(x0) + widen(x1)) + (widen(x2) + widen(x3))
    tl.store(sum_ptr + tile_m * K + columns, tl.sum(x, 0), mask=columns < K)


@triton.jit
def wait_for_grid():
    """Wait for all programs of a cooperative launch; what they stored before is visible then.

    The driver gives each cooperative launch a workspace, and its address in two registers. The
    second word of the workspace counts arrivals. The first program adds so much that the highest
    bit flips when all have arrived; so the word never has to be cleared.
    Source: the header ``cooperative_groups/details/driver_abi.h`` of CUDA.
    """
    if not INTERPRETED:  # the interpreter runs one program after another
        program, programs = tl.program_id(0), tl.num_programs(0)
        workspace = tl.inline_asm_elementwise(
            _GRID_WORKSPACE, "=l,r", [program], dtype=tl.int64, is_pure=True, pack=1
        )
        arrivals_ptr = (workspace + 4).to(tl.pointer_type(tl.int32))
        tl.debug_barrier()  # all threads of this program have stored
        step = tl.where(program == 0, 0x7FFFFFFF - programs + 2, 1)
        before = tl.atomic_add(arrivals_ptr, step, sem="release")
        now = before
        while (now ^ before) >= 0:
            now = tl.atomic_add(arrivals_ptr, 0, sem="acquire")
        tl.debug_barrier()


@triton.jit
def record_amax(slot_ptr, bits, slot_bits=None):
    """Raise a float32 slot to the largest bits of a tile; a caller may know ``slot_bits``."""
    # The slot only grows, so a stale value of it costs at most a needless atomic. NO_DATA is
    # negative as an integer, too, and the bit pattern of NaN is above that of every amax.
    slot = slot_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    largest_bits = tl.max(tl.max(bits, 1), 0)
    if slot_bits is None:
        slot_bits = tl.load(slot)
    tl.atomic_max(slot, largest_bits, mask=largest_bits > slot_bits, sem="relaxed")


@triton.jit
def block_amax(bits, BM: tl.constexpr, BK: tl.constexpr):
    """Largest bit pattern of each BM x BK block of a tile, as float32 [tile / BM, tile / BK]."""
    TILE_M: tl.constexpr = bits.shape[0]
    TILE_K: tl.constexpr = bits.shape[1]
    blocks = tl.reshape(bits, [TILE_M // BM, BM, TILE_K // BK, BK])
    return tl.max(tl.max(blocks, 3), 1).to(tl.float32, bitcast=True)


@triton.jit
def write_blocks(
    x,  # float32 [TILE_M, TILE_K]
    tile_m, tile_k, rows, columns,  # where BM is 1, rows need not be neighbours
    q_ptr,  # [ROWS, COLUMNS] fp8
    scale_ptr,  # [ceil ROWS / BM, ceil COLUMNS / BK] fp32
    amax_ptr,  # None, or with shape and strides of scale
    ROWS, COLUMNS, stride_sm, stride_sk, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Quantize the blocks of a tile."""
    TILE_M: tl.constexpr = x.shape[0]
    TILE_K: tl.constexpr = x.shape[1]
    amaxes = block_amax(abs_bits(x), BM, BK)
    scale, encode = scale_from_amax(amaxes, tl.cast(eps, tl.float32), LIMIT, RULE)
    x = nan_for_infinity(x, q_ptr.dtype.element_ty)
    blocks = tl.reshape(x, [TILE_M // BM, BM, TILE_K // BK, BK])
    y = tl.reshape(blocks * encode[:, None, :, None], [TILE_M, TILE_K])
    q = saturate(y, y, q_ptr.dtype.element_ty)
    store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    m = rows if BM == 1 else tile_m * (TILE_M // BM) + tl.arange(0, TILE_M // BM)
    k = tile_k * (TILE_K // BK) + tl.arange(0, TILE_K // BK)
    offsets = m[:, None] * stride_sm + k[None, :] * stride_sk
    mask = (m * BM < ROWS)[:, None] & (k * BK < COLUMNS)[None, :]
    tl.store(scale_ptr + offsets, scale, mask=mask)
    if amax_ptr is not None:
        tl.store(amax_ptr + offsets, amaxes, mask=mask)


@triton.jit
def block_index(start, indices, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Return the block of each index of a tile, or one block if a tile is always within one.
    SIZE 0 stands for a block that spans the whole dimension."""
    if SIZE == 0:
        index = tl.zeros([1], tl.int64)
    elif SIZE % TILE == 0:
        index = tl.zeros([1], tl.int64) + start // SIZE
    else:
        index = indices // SIZE
    return index
