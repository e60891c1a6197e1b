"""Cast matrices on the GPU by words of four rows: in both orientations or one, with a scale per
tensor; or in both orientations or transposed, with a scale per row.

M rows, K columns; ROWS, COLUMNS the same after padding to the alignment. ``load_words`` says what a
word is; ROWS must be divisible by 4. Small matrices are cast, amaxes included, in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from float8lab.formats import SCALE_RULES, largest
from float8lab.ops.cast import is_cast_at_once
from float8lab.ops.kernels import _common, scaling
from float8lab.ops.kernels import prologue as prologues
from float8lab.ops.kernels._common import nan_for_infinity, scale_from_amax, widen
from float8lab.ops.kernels._launch import launched
from float8lab.ops.kernels.grouped_cast import _amax_rows_kernel as find_amaxes_of_rows
from float8lab.ops.kernels.prologue import Matrix, load_bits, load_words, tile_of_program
from float8lab.ops.kernels.prologue import _amax_kernel as find_amax
from float8lab.ops.reference import prologue_shape, round_up

_FLAT = _common.Tile(rows=1, columns=4096, warps=8)
_AMAX_OF_FLOAT32 = _common.Tile(rows=64, columns=64, warps=4)
_PROGRAMS_AT_ONCE = 3
"""Programs per multiprocessor that wait for each other. Four would fit: so a quarter of all
multiprocessors may be busy, as with collectives, without a delay of the launch."""
_PARTIALS = _common.next_power_of_2(prologues.AMAX_PROGRAMS)
_AMAX_OF_PROLOGUE, _PROLOGUE_PROGRAMS = _common.Tile(rows=32, columns=128, warps=8), 32 * 132
"""The tile, and the most programs, of the kernel that takes the amax of a prologue's values."""

Options = tuple[torch.dtype, tuple[int, ...], str, float, int]
"""The FP8 format, block, rule, epsilon and alignment."""


def partial_amax(matrix: Matrix) -> Tensor:
    """Return up to ``_PARTIALS`` partial amaxes of a matrix, or the amax of a prologue, [1, 1]."""
    prologue, inputs, dtype = matrix
    shape: Sequence[int] = prologue_shape(prologue, inputs)
    if prologue:
        tile = _AMAX_OF_PROLOGUE
        amax = inputs[0].new_zeros((1, 1), dtype=torch.float32)
        programs = min(_common.grid_of(shape, tile)[0], _PROLOGUE_PROGRAMS)
    else:
        x = inputs[0]
        x = x.t() if x.stride(0) < x.stride(1) else x
        tile = _common.TILE
        if x.is_contiguous():
            x, tile = x.view(1, -1), _FLAT
        inputs, shape = [x], x.shape
        programs = min(_common.grid_of(shape, tile)[0], prologues.AMAX_PROGRAMS)
        amax = x.new_empty(programs, dtype=torch.float32)
    tensors, constants = prologues.arguments_of(prologue, inputs, dtype, tile)
    find_amax[(programs,)](*tensors, amax, *shape, None, PARTIAL=not prologue, **constants)
    return amax


def amax_rows_columns(
    matrix: Matrix, amaxes: Tensor, rows: int, tile: _common.Tile, rowwise: bool, columnwise: bool
) -> None:
    """Raise ``amaxes`` to those of a matrix: bit patterns of its rows, then of its columns."""
    prologue, inputs, _ = matrix
    shape = prologue_shape(prologue, inputs)
    if not prologue:
        tile = prologues.WORDS_OF_MATRIX if inputs[0].element_size() == 2 else _AMAX_OF_FLOAT32
    tensors, constants = prologues.arguments_of(*matrix, tile)
    find_amaxes_of_rows[_common.grid_of(shape, tile)](
        *tensors, None, amaxes, *shape, None, 0, *shape, rows,
        ROWWISE=rowwise, COLUMNWISE=columnwise, **constants,
    )  # fmt: skip


def _scales_of_rows(
    matrix: Matrix, options: Options, tile: _common.Tile, given: Tensor | None, *, rowwise: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return scales of rows and columns, the encode factors of both, and the columns' amaxes.

    The amaxes are None unless only the columns are cast, of a matrix without a prologue. If the
    amaxes of the columns are ``given``, only the columns are cast.
    """
    first, (fp8_dtype, _, rule, eps, align) = matrix[1][0], options
    rows, columns = (round_up(size, align) for size in prologue_shape(*matrix[:2]))
    amaxes = first.new_zeros(rows + columns, dtype=torch.int32)
    if given is None:
        amax_rows_columns(matrix, amaxes, rows, tile, rowwise, columnwise=True)
    else:
        amaxes[rows:].view(torch.float32).copy_(given.view(-1))
    only_columns = given is None and not rowwise and not matrix[0]
    amax = amaxes[rows:].view(torch.float32).clone().view(-1, 1) if only_columns else None
    scale, scale_t = (first.new_empty((n, 1), dtype=torch.float32) for n in (rows, columns))
    scaling.make_scales(amaxes, scale, scale_t, fp8_dtype, rule, eps)
    return scale, scale_t, amaxes.view(torch.float32), amax


@triton.jit
def _encode_of_tensor(
    given_ptr,  # fp32: [programs] partial amaxes, or [1] the amax; the encode factor without RULE
    scale_ptr, scale_t_ptr, amax_ptr,  # [1] fp32 to be written by RULE; the last may be None
    programs, eps, LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """The encode factor of a tensor; the first program writes the scale and the amax."""
    if PARTIALS == 1:
        amax = tl.load(given_ptr)
    else:
        index = tl.arange(0, PARTIALS)
        partial = tl.load(given_ptr + index, mask=index < programs, other=0.0)
        amax = tl.max(_common.abs_bits(partial), 0).to(tl.float32, bitcast=True)
    encode = amax
    if RULE != "":
        scale, encode = scale_from_amax(amax, tl.cast(eps, tl.float32), LIMIT, RULE)
        if tl.program_id(0) == 0:
            tl.store(scale_ptr, scale)
            tl.store(scale_t_ptr, scale)
            if amax_ptr is not None:
                tl.store(amax_ptr, amax)
    return encode


@triton.jit
def _load_factors(from_ptr, words, columns, ROWS, COLUMNS):
    """Load the encode factor of each column and, in four parts, of each row of a tile."""
    of_columns = tl.load(from_ptr + ROWS + columns, mask=columns < COLUMNS, other=1.0)[None, :]
    of_rows = ()
    for row in tl.static_range(4):
        rows = 4 * words + row
        of_part = tl.load(from_ptr + rows, mask=rows < ROWS, other=1.0)[:, None]
        of_rows += (of_part,)  # type: ignore[assignment]
    return of_columns, of_rows


@triton.jit
def _write_words(
    x0, x1, x2, x3,
    encode_t, encodes,  # factors of the columns and, in four parts, of the rows; or one for all
    words, columns, q_ptr, q_t_ptr, ROWS, COLUMNS,
):  # fmt: skip
    """Write a tile by rows, transposed, or both."""
    dtype: tl.constexpr = (q_ptr if q_t_ptr is None else q_t_ptr).dtype.element_ty
    if q_t_ptr is not None:
        w0, w1 = widen(nan_for_infinity(x0, dtype)), widen(nan_for_infinity(x1, dtype))
        w2, w3 = widen(nan_for_infinity(x2, dtype)), widen(nan_for_infinity(x3, dtype))
        packed = _common.pack_scaled(w0, w1, w2, w3, encode_t, dtype)
    if q_ptr is not None:
        for row in tl.static_range(4):
            rows = 4 * words + row
            x = widen(nan_for_infinity((x0, x1, x2, x3)[row], dtype))
            q = _common.saturate(x * encodes[row], x, dtype)
            _common.store_tile(q_ptr, q, rows, columns, ROWS, COLUMNS)
    if q_t_ptr is not None:
        _common.store_words(q_t_ptr, packed, words, columns, ROWS, COLUMNS, ROWS)


@triton.jit
def _cast_tile(
    inputs, tile_m, tile_k,
    encode, given,  # the encode factor of the matrix, or the arguments that give it
    from_ptr, slot_ptr, q_ptr, q_t_ptr, sum_ptr, M, K, ROWS, COLUMNS,
    LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr, PER_ROW: tl.constexpr,
    AT_ONCE: tl.constexpr, VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Cast a tile and, if asked to, record its amax and store its column sums."""
    columns, halves = load_words(inputs, tile_m * TILE_M, tile_k, M, K, VALUES, TILE_M, TILE_K)
    words = tile_m * (TILE_M // 4) + tl.arange(0, TILE_M // 4)
    if VALUES.function == "" and not (PER_ROW or AT_ONCE):
        encode = _encode_of_tensor(*given, LIMIT, RULE, PARTIALS)
    for half in tl.static_range(2 if VALUES.halves else 1):
        x0, x1, x2, x3 = halves[half]
        if half == 1:
            columns += K // 2
        # The amax is recorded after the stores, which need not wait for it then, or before them
        # where column sums leave too few registers for that.
        if slot_ptr is not None and sum_ptr is not None:
            _common.record_amax(slot_ptr, _common.largest_bits(x0, x1, x2, x3))
        if sum_ptr is not None:
            _common.store_column_sum(sum_ptr, x0, x1, x2, x3, tile_m, columns, K)
        encode_t, encodes = encode, (encode, encode, encode, encode)
        if PER_ROW:
            encode_t, encodes = _load_factors(from_ptr, words, columns, ROWS, COLUMNS)
        _write_words(
            x0, x1, x2, x3, encode_t, encodes, words, columns, q_ptr, q_t_ptr, ROWS, COLUMNS
        )
        if slot_ptr is not None and sum_ptr is None:
            _common.record_amax(slot_ptr, _common.largest_bits(x0, x1, x2, x3))


@triton.jit
def _find_factors(
    inputs, amax_ptr, scale_ptr, scale_t_ptr, result_ptr, tiles, M, K, ROWS, COLUMNS, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr, PER_ROW: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Find the amaxes, with all programs of the launch, and write scales, and amaxes if wanted.
    Return the encode factor; if PER_ROW, those of rows and columns replace the amaxes."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    bits_ptr = amax_ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    encode = 1.0
    if PER_ROW:
        for start in range(program * TILE_M, ROWS + COLUMNS, programs * TILE_M):
            index = start + tl.arange(0, TILE_M)
            tl.store(bits_ptr + index, 0, mask=index < ROWS + COLUMNS)
        _common.wait_for_grid()
    bits = tl.zeros([TILE_M, TILE_K], tl.int32)
    for tile in range(program, tiles, programs):
        _, tile_k, rows, columns = _common.tile_indices(COLUMNS, TILE_M, TILE_K, tile)
        of_tile = load_bits(inputs, rows, columns, tile_k, M, K, VALUES, TILE_K)
        if PER_ROW:
            tl.atomic_max(bits_ptr + rows, tl.max(of_tile, 1), mask=rows < M, sem="relaxed")
            columns_ptr = bits_ptr + ROWS + columns
            tl.atomic_max(columns_ptr, tl.max(of_tile, 0), mask=columns < K, sem="relaxed")
        else:
            bits = tl.maximum(bits, of_tile)
    if PER_ROW:
        _common.wait_for_grid()
        for start in range(program * TILE_M, ROWS + COLUMNS, programs * TILE_M):
            index = start + tl.arange(0, TILE_M)
            if result_ptr is not None:
                mask = (index >= ROWS) & (index < ROWS + COLUMNS)
                amax = tl.load(amax_ptr + index, mask=mask, other=0.0)
                tl.store(result_ptr + index - ROWS, amax, mask=mask)
            scaling.write_scales(
                bits_ptr, scale_ptr, scale_t_ptr, index, ROWS, COLUMNS, eps, LIMIT, RULE
            )
        _common.wait_for_grid()
    else:
        tl.store(bits_ptr + program, tl.max(tl.max(bits, 1), 0))
        _common.wait_for_grid()
        results = (scale_ptr, scale_t_ptr, result_ptr)
        encode = _encode_of_tensor(amax_ptr, *results, programs, eps, LIMIT, RULE, PARTIALS)
    return encode


@launched(do_not_specialize_on_alignment=["slot_ptr"])
def _cast_words_kernel(
    a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk,
    given_ptr,  # fp32: the encode factor [1], or those of rows and columns [ROWS + COLUMNS] if
    # PER_ROW, or the partial amaxes [programs] from which RULE makes scale and encode factor;
    # if AT_ONCE, memory for partial amaxes, or for the amaxes of rows and columns
    slot_ptr,  # None or [1] fp32
    q_ptr,  # None or [ROWS, COLUMNS] fp8
    q_t_ptr,  # None or [COLUMNS, ROWS] fp8
    scale_ptr, scale_t_ptr,  # fp32, to be made by RULE: [1]; or [ROWS] and [COLUMNS] if PER_ROW
    result_ptr,  # None or fp32: the amax [1], or those of the columns [COLUMNS]
    sum_ptr,  # None or [row tiles, K] fp32
    M, K, ROWS, COLUMNS, programs, eps,
    LIMIT: tl.constexpr, RULE: tl.constexpr, PARTIALS: tl.constexpr, PER_ROW: tl.constexpr,
    AT_ONCE: tl.constexpr,
    VALUES: tl.constexpr, TILE_M: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Cast a tile with given factors or amaxes. With AT_ONCE, a cooperative launch finds the amaxes
    of the matrix itself; then its programs wait for each other, and each casts several tiles."""
    inputs = (a_ptr, b_ptr, c_ptr, d_ptr, e_ptr, stride_am, stride_ak, stride_bm, stride_bk)
    given = (given_ptr, scale_ptr, scale_t_ptr, result_ptr, programs, eps)
    outputs = (given_ptr, slot_ptr, q_ptr, q_t_ptr, sum_ptr, M, K, ROWS, COLUMNS)
    encode = 1.0
    if AT_ONCE:
        program, stride = tl.program_id(0), tl.num_programs(0)
        tiles_k = tl.cdiv(COLUMNS, TILE_K)
        tiles = tl.cdiv(ROWS, TILE_M) * tiles_k
        encode = _find_factors(
            inputs, given_ptr, scale_ptr, scale_t_ptr, result_ptr, tiles, M, K, ROWS, COLUMNS, eps,
            LIMIT, RULE, PARTIALS, PER_ROW, VALUES, TILE_M, TILE_K,
        )  # fmt: skip
        # In the opposite order, since the cache still holds the last tiles.
        last = program + (tiles - 1 - program) // stride * stride
        for index in range(program, tiles, stride):
            number = last + program - index
            tile_m, tile_k = (number // tiles_k).to(tl.int64), (number % tiles_k).to(tl.int64)
            _cast_tile(
                inputs, tile_m, tile_k, encode, given, *outputs,
                LIMIT, RULE, PARTIALS, PER_ROW, AT_ONCE, VALUES, TILE_M, TILE_K,
            )  # fmt: skip
    else:
        from_end: tl.constexpr = VALUES.function == "" and RULE != ""
        tile_m, tile_k = tile_of_program(COLUMNS, VALUES, TILE_M, TILE_K, from_end, VALUES.halves)
        if VALUES.function != "" and not PER_ROW:  # fewer registers than after the loads
            encode = _encode_of_tensor(*given, LIMIT, RULE, PARTIALS)
        _cast_tile(
            inputs, tile_m, tile_k, encode, given, *outputs,
            LIMIT, RULE, PARTIALS, PER_ROW, AT_ONCE, VALUES, TILE_M, TILE_K,
        )  # fmt: skip


def cast_words(
    matrix: Matrix, options: Options, given: Tensor | None, slot: Tensor | None, *,
    rowwise: bool, columnwise: bool, column_sum: bool, at_once: bool | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the op's results for a matrix whose padded columns consist of complete words.

    A cast with scales per row must be ``columnwise``. Only tests give ``at_once``."""
    (prologue, inputs, _), (fp8_dtype, block, rule, eps, align) = matrix, options
    first, shape = inputs[0], prologue_shape(prologue, inputs)
    tile, amax = prologues.tile_for(prologue, words=True), None
    rows, columns = (round_up(size, align) for size in shape)
    tensors, constants = prologues.arguments_of(*matrix, tile)
    grid = _common.grid_of((rows, prologues.width_of_tiles(columns, constants)), tile)
    is_per_row = block == (1, -1)
    if at_once is None:
        is_plain = given is None and not prologue and rule in SCALE_RULES
        at_once = is_plain and first.is_cuda and is_cast_at_once(first)
    if rule not in SCALE_RULES:
        assert given is not None, "the rule says so"
        scale = scale_t = None
    elif is_per_row and not at_once:
        scale, scale_t, given, amax = _scales_of_rows(matrix, options, tile, given, rowwise=rowwise)
    else:
        sizes = (rows, columns) if is_per_row else (1, 1)
        scale, scale_t = (first.new_empty((n, 1), dtype=torch.float32) for n in sizes)
        if given is None and rowwise != columnwise:
            amax = torch.empty_like(scale_t)
        if at_once:
            programs = _PROGRAMS_AT_ONCE * _common.multiprocessors(first.device)
            grid = (min(*grid, programs),)
            given = first.new_empty(rows + columns if is_per_row else grid, dtype=torch.float32)
            constants |= {"launch_cooperative_grid": True, "maxnreg": 128}
        elif given is None:
            given = partial_amax(matrix)
    q = first.new_empty((rows, columns), dtype=fp8_dtype) if rowwise else None
    q_t = first.new_empty((columns, rows), dtype=fp8_dtype) if columnwise else None
    sums = _common.empty_column_sums(first, shape, tile) if column_sum else None
    makes_scales = scale is not None and (at_once or not is_per_row)
    written = (scale, scale_t, amax) if makes_scales else (None, None, None)
    _cast_words_kernel[grid](
        *tensors, given, slot, q, q_t, *written, sums, *shape,
        rows, columns, given.numel(), eps,
        LIMIT=largest(fp8_dtype), RULE=rule if makes_scales else "",
        PARTIALS=1 if given.numel() == 1 else _PARTIALS, PER_ROW=is_per_row, AT_ONCE=at_once,
        **constants,
    )  # fmt: skip
    sums = None if sums is None else sums.sum(0)
    return q, scale if rowwise else None, amax, q_t, scale_t if columnwise else None, sums
