"""Checks of the ops of MoE layers.  M rows in E groups, N and K features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FP8_DTYPES
from float8lab.inspect.environment import why_gemm_is_emulated
from float8lab.inspect.selfcheck.gemms import GEMM_BOUND, ExactGemm
from float8lab.inspect.selfcheck.grid import (
    REFERENCE,
    all_to,
    format_of,
    name_of,
    with_infinities,
)
from float8lab.inspect.selfcheck.harness import BF16, FP32, Cases, checks
from float8lab.ops import reference
from float8lab.ops.reference import ALIGN, SPAN, round_up

__all__: list[str] = []

_cast: Any = reference.cast  # called with arguments in tuples

_SIZES = {
    "ragged groups": (0, 1, 15, 17, 128, 0, 130),
    "one group": (37,),
    "all rows in the second": (0, 200, 0),
    "no rows": (0, 0),
}
_MANY = tuple(97 * i % 400 for i in range(48))
"""Rows of groups. With 60 tiles of padding rows they exceed the tiles of one wave of a GPU."""
_CASTS: dict[str, tuple[tuple[int, int], tuple[int, int], str]] = {
    "per tensor": ((-1, -1), (-1, -1), "fp32"),
    "per row": ((1, -1), (1, -1), "fp32"),
    "blocks": ((1, 128), (128, 128), "pow2"),
    "1x32": ((1, 32), (1, 32), "e8m0"),
}
"""Blocks of the rows and of the weights, and the rule."""
_WANTED = {"both": (True, True), "rows": (True, False), "transpose": (False, True)}


def _rows(
    cases: Cases, sizes: tuple[int, ...], columns: int, dtype: torch.dtype, beyond: int = 9
) -> Tensor:
    """Rows in groups, and padding rows of NaN after them."""
    x = cases.matrix((sum(sizes) + beyond, columns), dtype)
    x[sum(sizes) :] = torch.nan
    return x


def _offsets(sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(sizes, device="cpu").cumsum(0).to(dtype)


def _groups(cases: Cases) -> Iterator[tuple[str, tuple[int, ...], Tensor, Tensor]]:
    for index, (name, sizes) in enumerate(_SIZES.items()):
        dtype = (BF16, FP32)[index % 2]
        offs = _offsets(sizes, (torch.int32, torch.int64)[index % 2])
        x = _rows(cases, sizes, 200 + index, dtype)
        yield f"{name} {name_of(dtype)}", sizes, with_infinities(x) if index % 2 else x, offs


@checks("casts", REFERENCE, "cast_op", name="cast_groups")
def _check_cast_groups(cases: Cases) -> None:
    for index, (scaling, (block, w_block, rule)) in enumerate(_CASTS.items()):
        fp8_dtype = FP8_DTYPES[index % 2]
        for orientation, flags in _WANTED.items():
            for name, sizes, x, offs in _groups(cases):
                cases.begin(f"{name} {scaling} {format_of(fp8_dtype)} {orientation}")
                options = (fp8_dtype, block, rule, 0.0, ALIGN, *flags, False, None)
                got = ops.cast_op(
                    "", [x.to(cases.device)], x.dtype, *options, offs.to(cases.device)
                )
                want = _cast("", [x], x.dtype, *options, offs=offs)
                _compare(cases, got, want, sizes)
            for name, w in (
                ("3x40x140", cases.normal(3, 40, 140)),
                ("2x130x48 transposed", cases.normal(2, 48, 130).to(BF16).mT),
            ):
                cases.begin(f"batch {name} {scaling} {format_of(fp8_dtype)} {orientation}")
                of_batch = (fp8_dtype, w_block, rule, 0.0, ALIGN, *flags)
                got = ops.cast_op("", [w.to(cases.device)], w.dtype, *of_batch)
                _compare(cases, got, _cast("", [w], w.dtype, *of_batch))
    _check_what_is_given(cases)


def _check_what_is_given(cases: Cases) -> None:
    """Factors with slots; an activation."""
    for name, sizes, x, offs in _groups(cases):
        cases.begin(f"{name} by factors, with slots")
        slots = [torch.full((len(sizes),), -1.0, device=at) for at in (cases.device, "cpu")]
        factor = 0.3 + torch.arange(len(sizes), device="cpu") / 7
        options = (E5M2, (-1, -1), "encode", 0.0, ALIGN, True, True, False)
        there = factor.to(cases.device), offs.to(cases.device)
        got = ops.cast_op("", [x.to(cases.device)], x.dtype, *options, *there, None, slots[0])
        want = _cast("", [x], x.dtype, *options, factor, offs=offs, slot=slots[1])
        _compare(cases, got, want, sizes)
        cases.same(slots[0], slots[1])
        cases.begin(f"{name} of an activation, as of its written values, with sums")
        h, offsets = x.to(cases.device), offs.to(cases.device)
        h = h[:, : h.shape[1] // 2 * 2]
        value = ops.value_of_op("swiglu", [h], h.dtype)
        in_blocks = (h.dtype, E4M3, (1, 128), "fp32", 0.0, ALIGN, True, True, True, None, offsets)
        *got, sums = ops.cast_op("swiglu", [h], *in_blocks)
        *want, want_sums = ops.cast_op("", [value], *in_blocks)
        _compare(cases, got, [None if t is None else t.cpu() for t in want], sizes)
        exact = value.double().cpu()
        exact_sums = torch.stack([group.sum(0) for group in _split(exact, offs)])
        size = torch.stack([group.abs().sum(0) for group in _split(exact, offs)])
        for sums_of_kernel in (sums, want_sums):  # kernels add up in orders of their own
            cases.within(sums_of_kernel, exact_sums, size * 2.0**-16)


def _split(x: Tensor, offs: Tensor) -> list[Tensor]:
    """The rows of each group."""
    offsets = offs.tolist()
    return [x[start:end] for start, end in zip([0, *offsets[:-1]], offsets, strict=True)]


def _compare(
    cases: Cases,
    got: Sequence[Tensor],
    want: Sequence[Tensor | None],
    sizes: tuple[int, ...] | None = None,
) -> None:
    """All results that are there; of a transpose of groups, what is behind them means nothing."""
    used = None if sizes is None else sum(round_up(size, SPAN) for size in sizes)
    for index, (result, expected) in enumerate(zip(got, want, strict=True)):
        if expected is None or not expected.numel():
            continue
        transpose = want[3] if used is not None and index in (3, 4) else None
        if (
            used is not None
            and transpose is not None
            and expected.ndim == 2
            and expected.shape[1] > 1
        ):
            columns = used * expected.shape[1] // transpose.shape[1]
            result, expected = (x[:, :columns].contiguous() for x in (result, expected))
        cases.same(result, expected)


@checks("gemms", REFERENCE, "plan_groups_op")
def _check_plan_groups(cases: Cases) -> None:
    for index, (name, sizes) in enumerate(_SIZES.items()):
        offs = _offsets(sizes, (torch.int32, torch.int64)[index % 2])
        for more in (0, 9):
            cases.begin(f"{name} and {more} padding rows")
            got = ops.plan_groups_op(offs.to(cases.device), sum(sizes) + more)
            cases.same(got.to(offs.device), reference.plan_groups(offs, sum(sizes) + more))


@checks("gemms", GEMM_BOUND, "scaled_mm_op", name="grouped_mm")
def _check_grouped_mm(cases: Cases) -> None:
    many = {"many groups": _MANY} if cases.device.type == "cuda" else {}
    for scaling, (block, w_block, rule) in _CASTS.items():
        for index, (name, sizes) in enumerate({**_SIZES, **many}.items()):
            if name in many and scaling == "1x32":
                continue  # emulated
            offs = _offsets(sizes, (torch.int32, torch.int64)[index % 2])
            beyond = 60 * SPAN if name in many else 9
            x, dy = (_rows(cases, sizes, columns, FP32, beyond) for columns in (144, 272))
            w = cases.normal(len(sizes), 272, 144)
            both = rule, 0.0, ALIGN, True, True
            operands = {
                "x": _cast("", [x], FP32, E4M3, block, *both, offs=offs),
                "dy": _cast("", [dy], FP32, FP8_DTYPES[index % 2], block, *both, offs=offs),
                "w": _cast("", [w], FP32, E4M3, w_block, *both),
            }
            bias = cases.normal(len(sizes), 272)
            kinds = (BF16, False), (BF16, True), (FP32, False)
            for out_dtype, fast in kinds[:1] if name in many else kinds:
                kind = f"{name} {scaling} {name_of(out_dtype)}{' fast_accum' * fast}"
                formats = {key: operand[0].dtype for key, operand in operands.items()}
                for left, right, blocks, added in (
                    ("x", "w", (block, w_block), None if index % 2 else bias),
                    ("dy", "w'", (block, w_block), None),
                    ("dy'", "x'", (block, block), None),
                ):
                    pair = [formats[key.rstrip("'")] for key in (left, right)]
                    why = why_gemm_is_emulated(*blocks, cases.device, *pair)
                    cases.begin(f"{left} by {right} {kind}", why)
                    how_it_runs = out_dtype, fast, not why
                    _multiply(cases, operands, (left, right), blocks, offs, added, how_it_runs)


def _multiply(
    cases: Cases,
    operands: Mapping[str, tuple[Tensor | None, ...]],
    names: tuple[str, str],
    blocks: tuple[tuple[int, int], tuple[int, int]],
    offs: Tensor,
    bias: Tensor | None,
    options: tuple[torch.dtype, bool, bool],
) -> None:
    """Compare a grouped GEMM by group; ``options``: output dtype, fast sums, native FP8."""
    out_dtype, fast_accum, native = options
    (a, a_scale), (b, b_scale) = (
        operands[name.rstrip("'")][3:5] if name.endswith("'") else operands[name][:2]
        for name in names
    )
    assert a is not None, "cast"
    assert b is not None, "cast"
    (a_d, a_s), (b_d, b_s) = all_to(cases, (a, a_scale)), all_to(cases, (b, b_scale))
    added = None if bias is None else bias.to(cases.device)
    got = ops.scaled_mm_op(
        a_d, a_s, blocks[0], b_d, b_s, blocks[1], added, out_dtype, fast_accum,
        offs.to(cases.device),
    )  # fmt: skip
    start = place = 0
    for index, end in enumerate(offs.tolist()):
        columns = slice(place, place + round_up(end - start, SPAN))
        if b.ndim == 3:
            assert a_scale is not None, "cast"
            group_scale = a_scale[index] if a_scale.ndim == 3 else a_scale[start:end]
            left = reference.dequantize(a[start:end], group_scale, blocks[0], torch.float64)
            right = reference.dequantize(b[index], b_scale[index], blocks[1], torch.float64)  # type: ignore
            output = got[start:end]
        else:
            left, right = (
                reference.dequantize(
                    q[:, columns], _of_group(scale, block, index, columns), block, torch.float64
                )
                for q, scale, block in ((a, a_scale, blocks[0]), (b, b_scale, blocks[1]))
            )
            output = got[index]
        group_bias = None if bias is None else bias[index]
        ExactGemm(left, right).within(cases, output.cpu(), group_bias, out_dtype, native)
        start, place = end, columns.stop
    if b.ndim == 3:
        cases.same(got[start:], torch.zeros_like(got[start:], device="cpu"))


def _of_group(scale: Tensor | None, block: tuple[int, int], index: int, columns: slice) -> Tensor:
    assert scale is not None, "cast"
    if block[1] != -1:
        return scale[:, columns.start // block[1] : columns.stop // block[1]]
    return scale[index] if scale.ndim == 3 else scale
