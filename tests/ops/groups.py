"""Groups of rows for tests: the arguments of casts and GEMMs of groups, and expected results.

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
    "no-rows": [0, 0],
}  # fmt: skip
"""The number of rows of each group."""
CASTS = {
    "tensor": ((-1, -1), (-1, -1), "fp32"), "row": ((1, -1), (1, -1), "fp32"),
    "block": ((1, 128), (128, 128), "pow2"), "mx": ((1, 32), (1, 32), "e8m0"),
}  # fmt: skip
"""The block of the rows, the block of the weights, and the scale rule."""


def cast_arguments(
    prologue: str, inputs: Sequence[Tensor], dtype: torch.dtype, offs: Tensor | None,
    fp8_dtype: torch.dtype, block: tuple[int, int], rule: str, eps: float = 0.0,
    rowwise: bool = True, columnwise: bool = False, dbias: bool = False,
    given_scale: Tensor | None = None, slot: Tensor | None = None, plan: Tensor | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """The positional arguments of a cast of groups, or of a batch without ``offs``."""
    matrix = prologue, inputs, dtype, fp8_dtype, block, rule, eps, ALIGN
    return *matrix, rowwise, columnwise, dbias, given_scale, offs, plan, slot


def cast_groups(cast: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``cast``, the op or its launcher, for groups."""
    return cast(*cast_arguments(*arguments))


def grouped_mm(mm: Callable[..., Any], *arguments: Any) -> Any:
    """Calls ``mm`` with 7 operands (the bias is last), offsets, dtype, fast_accum and a plan."""
    *operands, offs, out_dtype, fast_accum = arguments[:10]
    return mm(*operands, out_dtype, fast_accum, offs, *arguments[10:])


def offsets(sizes: list[int], device: torch.device | str = "cpu", dtype=torch.int32) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(device=device, dtype=dtype)


def rows(sizes: list[int], columns: int, padding: int = 9, dtype=torch.float32) -> Tensor:
    """A matrix with these groups, followed by padding rows of NaN."""
    x = torch.randn(sum(sizes) + padding, columns) * torch.logspace(-2, 2, columns)
    x[sum(sizes) :] = torch.nan
    return x.to(dtype)


def bounds(sizes: list[int]) -> Iterator[tuple[int, int, int, int]]:
    """The index of each group, its start and end, and its start in a transpose."""
    start = transposed_start = 0
    for index, size in enumerate(sizes):
        yield index, start, start + size, transposed_start
        start, transposed_start = start + size, transposed_start + round_up(size, SPAN)


def used_columns(sizes: list[int]) -> int:
    """The number of columns of a transpose up to the end of the last group."""
    return sum(round_up(size, SPAN) for size in sizes)


def cast_separately(
    x: Tensor, block: tuple[int, int], rule: str, *scale_arguments: Tensor
) -> tuple:
    """A group's rows and their transpose, each cast as a separate matrix."""
    rowwise = reference.cast(
        "", [x], x.dtype, E4M3, block, rule, 0.0, 16, True, False, False, *scale_arguments
    )
    columnwise = reference.cast(
        "", [x], x.dtype, E4M3, block, rule, 0.0, 16, False, True, False, *scale_arguments
    )
    return *rowwise[:2], *columnwise[3:5]
