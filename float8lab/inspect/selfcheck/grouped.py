"""Check the casts and GEMMs of MoE layers.  M rows in E groups, N and K features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FP8_DTYPES
from float8lab.inspect.environment import why_gemm_is_emulated
from float8lab.inspect.selfcheck.gemms import GEMM_BOUND, ExactGemm
from float8lab.inspect.selfcheck.grid import format_of, given, name_of, with_infinities
from float8lab.inspect.selfcheck.harness import BF16, FP32, REFERENCE, Cases, checks
from float8lab.ops import reference
from float8lab.ops.operand import BlockOperand
from float8lab.ops.reference import ALIGN, SPAN, round_up
from float8lab.ops.reference.grouped import bounds_of

__all__: list[str] = []

_cast: Any = reference.cast  # Any: it is called with arguments in tuples

_SIZES = {
    "ragged groups": (0, 1, 15, 17, 128, 0, 130),
    "one group": (37,),
    "all rows in the second": (0, 200, 0),
    "no rows": (0, 0),
}
_MANY = tuple(97 * i % 400 for i in range(48))
"""Sizes of groups that, with 60 tiles of padding rows, need more than one wave of a GPU."""
_CASTS: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "per tensor": ((-1, -1), (-1, -1), "fp32"),
    "per row": ((1, -1), (1, -1), "fp32"),
    "blocks": ((1, 128), (128, 128), "pow2"),
    "1x32": ((1, 32), (1, 32), "e8m0"),
}
"""The block of the rows, the block of the weights, and the scale rule."""
_ORIENTATIONS = {"both": (True, True), "rows": (True, False), "transpose": (False, True)}


def _rows(
    cases: Cases, sizes: Sequence[int], columns: int, dtype: torch.dtype, beyond: int = 9
) -> Tensor:
    """Draw rows for all groups, with padding rows of NaN after them."""
    x = cases.matrix((sum(sizes) + beyond, columns), dtype)
    x[sum(sizes) :] = torch.nan
    return x


def _offsets(sizes: Sequence[int], number: int) -> Tensor:
    return torch.tensor(sizes, device="cpu").cumsum(0).to((torch.int32, torch.int64)[number % 2])


def _groups(cases: Cases) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, rows and offsets of each division into groups."""
    for index, (name, sizes) in enumerate(_SIZES.items()):
        dtype = (BF16, FP32)[index % 2]
        x = _rows(cases, sizes, 200 + index, dtype)
        x = with_infinities(x) if index % 2 else x
        yield f"{name} {name_of(dtype)}", x, _offsets(sizes, index)


@checks("casts", REFERENCE, "cast_op", name="cast_groups")
def _check_cast_groups(cases: Cases) -> None:
    for index, (scaling, (block, w_block, rule)) in enumerate(_CASTS.items()):
        fp8_dtype = FP8_DTYPES[index % 2]
        for orientation, flags in _ORIENTATIONS.items():
            kind = f"{scaling} {format_of(fp8_dtype)} {orientation}"
            for name, x, offs in _groups(cases):
                cases.begin(f"{name} {kind}")
                options = (fp8_dtype, block, rule, 0.0, ALIGN, *flags, False, None, offs)
                _compare(cases, *cases.both("cast_op", *given(x), *options), offs)
            for name, w in (
                ("3x40x140", cases.normal(3, 40, 140)),
                ("2x130x48 transposed", cases.normal(2, 48, 130).to(BF16).mT),
            ):
                cases.begin(f"batch {name} {kind}")
                cases.agree("cast_op", *given(w), fp8_dtype, w_block, rule, 0.0, ALIGN, *flags)
    for name, x, offs in _groups(cases):
        _check_factors_and_activation(cases, name, x, offs)


def _check_factors_and_activation(cases: Cases, name: str, x: Tensor, offs: Tensor) -> None:
    cases.begin(f"{name} by factors, with slots")
    factor = 0.3 + torch.arange(len(offs), device="cpu") / 7
    slot = torch.full((len(offs),), -1.0, device="cpu")
    options = (E5M2, (-1, -1), "encode", 0.0, ALIGN, True, True, False, factor, offs, None, slot)
    _compare(cases, *cases.both("cast_op", *given(x), *options), offs)
    cases.begin(f"{name} of an activation, as of its written values, with sums")
    h, offsets = cases.on_device((x[:, : x.shape[1] // 2 * 2], offs))
    value = ops.value_of_op("swiglu", [h], h.dtype)
    in_blocks = (h.dtype, E4M3, (1, 128), "fp32", 0.0, ALIGN, True, True, True, None, offsets)
    *got, sums = ops.cast_op("swiglu", [h], *in_blocks)
    *want, want_sums = ops.cast_op("", [value], *in_blocks)
    _compare(cases, got, [x if x is None else x.cpu() for x in want], offs)
    groups = [value.double().cpu()[start:end] for start, end, _ in bounds_of(offs)]
    exact = torch.stack([rows.sum(0) for rows in groups])
    size = torch.stack([rows.abs().sum(0) for rows in groups])
    for sums_of_kernel in (sums, want_sums):  # the two kernels sum in different orders
        cases.within(sums_of_kernel, exact, size * 2.0**-16)


def _compare(
    cases: Cases, got: Sequence[Tensor], want: Sequence[Tensor | None], offs: Tensor
) -> None:
    """Compare the results of a cast of groups, but not the transpose behind the last group."""
    used = sum(round_up(end - start, SPAN) for start, end, _ in bounds_of(offs))
    for index, (result, expected) in enumerate(zip(got, want, strict=True)):
        if expected is None or not expected.numel():
            continue
        transpose = want[3] if index in (3, 4) and expected.ndim == 2 else None
        if transpose is not None and expected.shape[1] > 1:
            columns = used * expected.shape[1] // transpose.shape[1]
            result, expected = (x[:, :columns].contiguous() for x in (result, expected))
        cases.same(result, expected)


@checks("gemms", REFERENCE, "plan_groups_op")
def _check_plan_groups(cases: Cases) -> None:
    for index, (name, sizes) in enumerate(_SIZES.items()):
        for more in (0, 9):
            cases.begin(f"{name} and {more} padding rows")
            cases.agree("plan_groups_op", _offsets(sizes, index), sum(sizes) + more)


@checks("gemms", GEMM_BOUND, "scaled_mm_op", name="grouped_mm")
def _check_grouped_mm(cases: Cases) -> None:
    many = {"many groups": _MANY} if cases.device.type == "cuda" else {}
    for scaling, (block, w_block, rule) in _CASTS.items():
        for index, (name, sizes) in enumerate({**_SIZES, **many}.items()):
            if name in many and scaling == "1x32":
                continue  # emulated
            offs = _offsets(sizes, index)
            beyond = 60 * SPAN if name in many else 9
            x, dy = (_rows(cases, sizes, columns, FP32, beyond) for columns in (144, 272))
            operands: dict[str, BlockOperand] = {}
            for key, matrix, fp8_dtype, blocks in (
                ("x", x, E4M3, block),
                ("dy", dy, FP8_DTYPES[index % 2], block),
                ("w", cases.normal(len(sizes), 272, 144), E4M3, w_block),
            ):
                options = (fp8_dtype, blocks, rule, 0.0, ALIGN, True, True)
                groups = None if key == "w" else offs
                q, scale, _, q_t, scale_t, _ = _cast(*given(matrix), *options, offs=groups)
                operands[key] = BlockOperand(q, scale, blocks)
                operands[f"{key}'"] = BlockOperand(q_t, scale_t, blocks)
            bias = None if index % 2 else cases.normal(len(sizes), 272)
            kinds = (BF16, False), (BF16, True), (FP32, False)
            for out_dtype, fast in kinds[:1] if name in many else kinds:
                kind = f"{name} {scaling} {name_of(out_dtype)}{' fast_accum' * fast}"
                pairs = ("x", "w", bias), ("dy", "w'", None), ("dy'", "x'", None)
                for left, right, added in pairs:
                    a, b = operands[left], operands[right]
                    dtypes = a.data.dtype, b.data.dtype
                    why = why_gemm_is_emulated(a.block, b.block, cases.device, *dtypes)
                    cases.begin(f"{left} by {right} {kind}", why)
                    arguments = (*a, *b, added, out_dtype, fast, offs)
                    got = ops.scaled_mm_op(*cases.on_device(arguments))
                    _compare_groups(cases, got, a, b, offs, added, out_dtype, not why)


def _compare_groups(
    cases: Cases, got: Tensor, a: BlockOperand, b: BlockOperand, offs: Tensor, bias: Tensor | None,
    out_dtype: torch.dtype, native: bool,
) -> None:  # fmt: skip
    """Compare a grouped GEMM group by group."""
    end = 0
    for index, (start, end, place) in enumerate(bounds_of(offs)):
        columns = slice(place, place + round_up(end - start, SPAN))
        group, output = (_of_group(a, index, columns), _of_group(b, index, columns)), got[index]
        if b.data.ndim == 3:
            scale = a.scale[index] if a.scale.ndim == 3 else a.scale[start:end]
            rows = a._replace(data=a.data[start:end], scale=scale)
            group = rows, b._replace(data=b.data[index], scale=b.scale[index])
            output = got[start:end]
        left, right = (reference.dequantize(*operand, torch.float64) for operand in group)
        group_bias = None if bias is None else bias[index]
        ExactGemm(left, right).within(cases, output.cpu(), group_bias, out_dtype, native)
    if b.data.ndim == 3:
        cases.same(got[end:], torch.zeros_like(got[end:], device="cpu"))


def _of_group(operand: BlockOperand, index: int, columns: slice) -> BlockOperand:
    """Return a group's columns of a transpose, with their scales."""
    data, scale, block = operand
    if block[1] != -1:
        scale = scale[:, columns.start // block[1] : columns.stop // block[1]]
    elif scale.ndim == 3:
        scale = scale[index]
    return BlockOperand(data[:, columns], scale, block)
