"""Groups of rows for tests: what casts and GEMMs of groups are asked, and the answer.

M rows, K columns, E groups.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import E4M3
from float8lab.ops import reference
from float8lab.ops.reference import ALIGN, SPAN, round_up

SIZES = {
    "ragged": [0, 1, 15, 17, 128, 0, 130], "one": [37], "all-in-the-second": [0, 200, 0],
    "nobody": [0, 0],
}  # fmt: skip
"""Rows of each group."""
CASTS = {
    "tensor": ((-1, -1), (-1, -1), "fp32"), "row": ((1, -1), (1, -1), "fp32"),
    "block": ((1, 128), (128, 128), "pow2"), "mx": ((1, 32), (1, 32), "e8m0"),
}  # fmt: skip
"""Blocks of the rows and of the weights, and the rule."""


def cast_arguments(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, offs: Tensor | None,
    fp8_dtype: torch.dtype, block: tuple[int, int], rule: str, eps: float = 0.0,
    rowwise: bool = True, columnwise: bool = False, dbias: bool = False,
    given: Tensor | None = None, slot: Tensor | None = None, plan: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of a cast of groups, or without ``offs`` of a batch, by position."""
    matrix = prologue, inputs, dtype, fp8_dtype, block, rule, eps, ALIGN
    return *matrix, rowwise, columnwise, dbias, given, offs, plan, slot


def cast_groups(cast: Callable[..., Any], *arguments: Any) -> Any:
    """``cast`` of groups: the op or its launcher."""
    return cast(*cast_arguments(*arguments))


def grouped_mm(mm: Callable[..., Any], *arguments: Any) -> Any:
    """``mm`` of seven that are the operands and the bias, of offsets, a dtype, speed and a plan."""
    *operands, offs, out_dtype, fast_accum = arguments[:10]
    return mm(*operands, out_dtype, fast_accum, offs, *arguments[10:])


def ends(sizes: list[int], device: torch.device | str = "cpu", dtype=torch.int32) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(device=device, dtype=dtype)


def rows(sizes: list[int], columns: int, beyond: int = 9, dtype=torch.float32) -> Tensor:
    """A matrix with these groups and, beyond them, rows of NaN."""
    x = torch.randn(sum(sizes) + beyond, columns) * torch.logspace(-2, 2, columns)
    x[sum(sizes) :] = torch.nan
    return x.to(dtype)


def bounds(sizes: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """Number of each group, its start and end, and its start in a transpose."""
    start = place = 0
    for index, size in enumerate(sizes):
        yield index, start, start + size, place
        start, place = start + size, place + round_up(size, SPAN)


def used_columns(sizes: list[int]) -> int:
    """Columns of a transpose up to the end of the last group."""
    return sum(round_up(size, SPAN) for size in sizes)


def cast_alone(x: Tensor, block: tuple[int, int], rule: str, *given: Tensor) -> tuple:
    """A group's rows, and their transpose, each cast as a matrix of its own."""
    straight = reference.cast(
        "", [x], x.dtype, E4M3, block, rule, 0.0, 16, True, False, False, *given
    )
    turned = reference.cast(
        "", [x], x.dtype, E4M3, block, rule, 0.0, 16, False, True, False, *given
    )
    return *straight[:2], *turned[3:5]
