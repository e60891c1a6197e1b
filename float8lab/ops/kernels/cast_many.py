"""Quantize or cast many matrices at once on the GPU, into existing tensors.

M rows, K columns of one matrix. The bytes are those of ``quantize`` and ``cast``. The number of
launches does not depend on the number of matrices: a program takes one tile, looks up in a table
which matrix the tile belongs to, and casts it with the functions of ``cast.py``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import largest
from float8lab.ops.kernels import _common
from float8lab.ops.kernels import cast as casts
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels.prologue import Values

_ALIGNMENT = 16
"""Bytes of the widest access; such accesses need columns that are a multiple of this number."""

# The table has an int64 row per matrix: four pointers, M, K, the row stride of x, both strides of
# scale and amax, and the first tile.
_WIDTH = tl.constexpr(10)
_FIRST_TILE = tl.constexpr(9)


@triton.jit
def _find(table_ptr, matrices, tile):
    """Return the matrix of a tile: the last matrix whose first tile is not after this tile."""
    lower, upper = 0, matrices
    while upper - lower > 1:
        middle = (lower + upper) // 2
        is_at_most_tile = tl.load(table_ptr + middle * _WIDTH + _FIRST_TILE) <= tile
        lower, upper = (
            tl.where(is_at_most_tile, middle, lower),
            tl.where(is_at_most_tile, upper, middle),
        )
    return lower


@triton.jit
def _look_up(row_ptr, X: tl.constexpr, Q: tl.constexpr, ALIGNED: tl.constexpr):
    """Load x, q, scale, amax, M, K and the row stride of x from a row of the table."""
    x_ptr = tl.load(row_ptr).to(tl.pointer_type(X))
    q_ptr = tl.load(row_ptr + 1).to(tl.pointer_type(Q))
    scale_ptr = tl.load(row_ptr + 2).to(tl.pointer_type(tl.float32))
    amax_ptr = tl.load(row_ptr + 3).to(tl.pointer_type(tl.float32))
    M, K = tl.load(row_ptr + 4).to(tl.int32), tl.load(row_ptr + 5).to(tl.int32)
    stride_xm = tl.load(row_ptr + 6)
    if ALIGNED:
        x_ptr, q_ptr = tl.multiple_of(x_ptr, 16), tl.multiple_of(q_ptr, 16)
        K, stride_xm = tl.multiple_of(K, 16), tl.multiple_of(stride_xm, 16)
    return x_ptr, q_ptr, scale_ptr, amax_ptr, M, K, stride_xm


@launched(do_not_specialize=["matrices"])
def _cast_many_kernel(
    table_ptr,  # [matrices, _WIDTH] int64
    slots_ptr,  # [matrices] fp32, where scales are per tensor: the amaxes, zeros at first
    matrices, eps,
    X: tl.constexpr, Q: tl.constexpr,  # dtypes of every x and q
    ALIGNED: tl.constexpr, LIMIT: tl.constexpr,
    RULE: tl.constexpr,  # "" where encode factors are given
    AMAX: tl.constexpr,  # only find the amaxes, which the cast needs
    BM: tl.constexpr, BK: tl.constexpr,  # 0 is the whole dimension
    SINGLE: tl.constexpr,  # a tile holds complete rows of every matrix
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    if RULE != "" and BK == 0 and BM == 0 and not AMAX:
        # From the end: the cache still holds the last tiles that the amax launch has read.
        tile = tl.num_programs(0) - 1 - tile
    matrix = _find(table_ptr, matrices, tile)
    row_ptr = table_ptr + matrix * _WIDTH
    x_ptr, q_ptr, scale_ptr, amax_ptr, M, K, stride_xm = _look_up(row_ptr, X, Q, ALIGNED)
    stride_sm, stride_sk = tl.load(row_ptr + 7), tl.load(row_ptr + 8)
    tile = tile - tl.load(row_ptr + _FIRST_TILE).to(tl.int32)
    if RULE != "" and BK == 0 and BM == 1:
        inputs = (x_ptr, None, None, None, None, stride_xm, 1, 1, 1)
        casts.write_rows(
            inputs, q_ptr, scale_ptr, amax_ptr, tile, M, K, M, K, eps,
            LIMIT, RULE, SINGLE, VALUES, TILE_M, TILE_K,
        )  # fmt: skip
    else:
        tile_m, tile_k, rows, columns = _common.tile_indices(K, TILE_M, TILE_K, tile)
        x = _common.load_tile(x_ptr, rows, columns, M, K, stride_xm, 1)
        if AMAX:
            _common.record_amax(slots_ptr + matrix, _common.abs_bits(x.to(tl.float32)))
        elif RULE == "":
            factor_rows = tl.cdiv(M, BM) if BM else 1
            factor_columns = tl.cdiv(K, BK) if BK else 1
            casts.write_cast(
                x, tile_m, tile_k, rows, columns, scale_ptr, None, q_ptr, M, K, factor_rows,
                factor_columns, stride_sm, stride_sk, BM, BK, False, TILE_M, TILE_K,
            )  # fmt: skip
        elif BM == 0:
            amax = tl.load(slots_ptr + matrix)
            scale, encode = _common.scale_from_amax(amax, tl.cast(eps, tl.float32), LIMIT, RULE)
            if tile == 0:
                tl.store(scale_ptr, scale)
                tl.store(amax_ptr, amax)
            x = _common.nan_for_infinity(x, Q).to(tl.float32)
            _common.store_tile(q_ptr, _common.saturate(x * encode, x, Q), rows, columns, M, K)
        else:
            _common.write_blocks(
                x.to(tl.float32), tile_m, tile_k, rows, columns, q_ptr, scale_ptr, amax_ptr, M, K,
                stride_sm, stride_sk, eps, LIMIT, RULE, BM, BK,
            )  # fmt: skip


_Key = tuple[torch.device, tuple[tuple[int, ...], ...]]

_RECENT: OrderedDict[_Key, Tensor] = OrderedDict()
_OF_GRAPHS: dict[_Key, Tensor] = {}
_MOST_TABLES = 64


def _table_of(key: _Key) -> Tensor | None:
    """Return the table with these rows; None if it is missing while a graph is being captured.

    A captured graph cannot contain the copy from the host, and eager steps should not wait for it:
    the pointers of parameters and their masters stay the same from step to step. So the most
    recently used tables are kept. Their key is their content, so a table that was kept equals a new
    table, whatever tensors it was made for.

    Any stream may read such a table: the copy has finished when the table is first returned, and
    the allocator is told of every stream that reads it. A graph reads its tables at every replay,
    which this code cannot see, so tables of graphs are kept for good (80 bytes a matrix).
    """
    device, rows = key
    in_graph = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if key in _OF_GRAPHS:
        return _OF_GRAPHS[key]
    table = _RECENT.pop(key, None)
    if in_graph:
        if table is not None:
            _OF_GRAPHS[key] = table
        return table
    if table is None:
        table = torch.tensor(rows, dtype=torch.int64).to(device)
    _RECENT[key] = table
    if len(_RECENT) > _MOST_TABLES:
        _RECENT.popitem(last=False)
    if device.type == "cuda":
        table.record_stream(torch.cuda.current_stream(device))
    return table


class _Job(NamedTuple):
    """A matrix and its outputs. If encode factors are given, ``scale`` and ``amax`` hold them."""

    x: Tensor
    q: Tensor
    scale: Tensor
    amax: Tensor

    def has_kernel(self) -> bool:
        x, q, scale, amax = self
        by_rows = x.stride(1) == 1 and q.is_contiguous()
        alike = scale.stride() == amax.stride() and 0 not in scale.stride()
        # ptxas crashes for a matrix of one column, see ``prologue.has_kernel``.
        sizes = x.numel() > 0 and 1 < x.shape[1] < 2**31
        return by_rows and alike and sizes and q.device == x.device

    def is_aligned(self) -> bool:
        x, q = self.x, self.q
        return not (x.data_ptr() | q.data_ptr() | x.shape[1] | x.stride(0)) % _ALIGNMENT


def cast_many_(
    x: Sequence[Tensor], q: Sequence[Tensor], block: Sequence[int], rule: str, eps: float,
    scale: Sequence[Tensor], amax: Sequence[Tensor], given: Sequence[Tensor],
) -> None:  # fmt: skip
    """Do ``reference.cast_many_`` in at most two launches, or six with a scale per tensor.
    Matrices are cast one by one if they are not stored by rows, differ from the first one in dtypes
    or device, are empty, have one column, or if no kernel has such blocks."""
    tensors = zip(x, q, given or scale, given or amax, strict=True)
    jobs, shape = [_Job(*matrix) for matrix in tensors], tuple(block)
    rule = "" if given else rule
    if given or shape in ((-1, -1), (1, -1)) or casts.divides_a_tile(shape):
        jobs = _launch(jobs, shape, rule, eps)
    for matrix, *outputs in jobs:
        options = (rule, eps) if rule else ("encode", 0.0, 1, True, False, False, outputs[1])
        results = casts.cast("", [matrix], matrix.dtype, outputs[0].dtype, shape, *options)
        for output, result in zip(outputs, results, strict=False):
            if result is not None:
                output.copy_(result)


def _launch(jobs: list[_Job], block: tuple[int, ...], rule: str, eps: float) -> list[_Job]:
    """Launch a kernel for all jobs that it can do, and return the remaining jobs."""
    feasible: list[_Job] = []
    remaining: list[_Job] = []
    kinds = [(job.x.dtype, job.q.dtype, job.x.device) for job in jobs]
    for job, kind in zip(jobs, kinds, strict=True):
        (feasible if kind == kinds[0] and job.has_kernel() else remaining).append(job)
    # Launch separately: a single unaligned matrix would keep all matrices from wide accesses.
    for aligned in (True, False):
        alike = [job for job in feasible if job.is_aligned() == aligned]
        if alike and not _launch_alike(alike[0].x, alike, aligned, block, rule, eps):
            remaining += alike
    return remaining


@_common.on_device_of_first
def _launch_alike(
    x: Tensor, jobs: list[_Job], aligned: bool, block: tuple[int, ...], rule: str, eps: float
) -> bool:
    """Cast matrices of one kind, of which ``x`` is the first; False if there is no table."""
    widest = max((job.x for job in jobs), key=lambda x: x.shape[1])
    if rule and block == (1, -1):
        tile = casts.row_tile(widest, widest.shape[1])
        tiles = [_common.ceil_div(job.x.shape[0], tile.rows) for job in jobs]
    else:
        tile = casts.block_tile(block) if rule else _common.TILE
        tiles = [_common.grid_of(job.x.shape, tile)[0] for job in jobs]
    table, slots = _table_of(_key_of(jobs, tiles)), None
    if table is None:
        return False
    constants = {
        "X": _common.TRITON_DTYPES[x.dtype], "Q": _common.TRITON_DTYPES[jobs[0].q.dtype],
        "ALIGNED": aligned, "LIMIT": largest(jobs[0].q.dtype), "RULE": rule,
        "BM": max(block[0], 0), "BK": max(block[1], 0),
        "SINGLE": bool(rule) and block == (1, -1) and widest.shape[1] <= tile.columns,
        "VALUES": Values("", False, False, False, _common.TRITON_DTYPES[x.dtype]),
        "TILE_M": tile.rows, "TILE_K": tile.columns,
        # Narrow accesses need an address and a mask per element, so a thread gets fewer elements.
        "num_warps": tile.warps if aligned else 16,
    }  # fmt: skip
    kernel = _cast_many_kernel[(sum(tiles),)]
    if rule and block == (-1, -1):
        slots = torch.zeros(len(jobs), dtype=torch.float32, device=x.device)
        kernel(table, slots, len(jobs), eps, AMAX=True, **constants)
    kernel(table, slots, len(jobs), eps, AMAX=False, **constants)
    return True


def _key_of(jobs: Sequence[_Job], tiles: Sequence[int]) -> _Key:
    """Return the device of the jobs and the rows of their table."""
    rows, first = [], 0
    for job, count in zip(jobs, tiles, strict=True):
        pointers = (tensor.data_ptr() for tensor in job)
        rows.append((*pointers, *job.x.shape, job.x.stride(0), *job.scale.stride(), first))
        first += count
    return jobs[0].x.device, tuple(rows)
