"""The forms in which a cast is called: its scales found or given, in one orientation or both.

Each takes the cast first, the op or another implementation of it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import E4M3, scale_shape
from float8lab.ops import Prologue, prologue_shape, round_up

Cast = Callable[..., Any]


def _matrix(x: Tensor | Prologue) -> tuple[str, Sequence[Tensor], torch.dtype]:
    return x[:3] if isinstance(x, Prologue) else ("", [x], x.dtype)


def _sums(total: Tensor | None, x: Tensor | Prologue) -> Tensor:
    like = _matrix(x)[1][0]
    return like.new_empty(0, dtype=torch.float32) if total is None else total


def _last(factor: Tensor, slot: Tensor | None) -> tuple[Tensor | None, ...]:
    """The last arguments of a cast, by position."""
    return (factor,) if slot is None else (factor, None, None, slot)


def amax(find: Cast, x: Tensor | Prologue, block: Sequence[int] = (-1, -1)) -> Tensor:
    """The amax of each block."""
    found: Tensor = find(*_matrix(x), block)
    return found


def quantize(
    cast: Cast, x: Tensor | Prologue, fp8_dtype: torch.dtype, block: Sequence[int], rule: str,
    eps: float, align: int, known_amax: Tensor | None = None, *, transposed: bool = False,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """FP8 data, scales that are found, and amaxes, of one orientation."""
    how = (fp8_dtype, block, rule, eps, align, not transposed, transposed, False, known_amax)
    q, scale, found, q_t, scale_t, _ = cast(*_matrix(x), *how)
    return (q_t, scale_t, found) if transposed else (q, scale, found)


def quantize_pair(
    cast: Cast, x: Tensor | Prologue, fp8_dtype: torch.dtype, block: Sequence[int], rule: str,
    eps: float, align: int, column_sum: bool, known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """FP8 data and scales of both orientations, and the column sums, empty if not wanted."""
    how = (fp8_dtype, block, rule, eps, align, True, True, column_sum, known_amax)
    q, scale, _, q_t, scale_t, total = cast(*_matrix(x), *how)
    return q, scale, q_t, scale_t, _sums(total, x)


GRIDS = [
    ((1, -1), "fp32"), ((1, 128), "pow2"), ((128, 128), "fp32"), ((1, 32), "e8m0"),
    ((1, 96), "fp32"),
]  # fmt: skip
"""Blocks smaller than the whole whose amaxes can be given, and a rule for each."""


def quantize_by_amaxes(
    cast: Cast, x: Tensor | Prologue, block: Sequence[int], rule: str, *, transposed: bool
) -> tuple[Any, Any]:
    """FP8 data and scales of one orientation, by amaxes that exceed those of ``x``."""
    _, inputs, _ = matrix = _matrix(x)
    padded = [round_up(size, 16) for size in prologue_shape(*matrix[:2])]
    shape = scale_shape(tuple(padded[::-1] if transposed else padded), tuple(block))
    count = math.prod(shape)
    known = torch.linspace(1e4, 9e4, count).view(shape).to(inputs[0].device)
    return quantize(cast, x, E4M3, block, rule, 1e-3, 16, known, transposed=transposed)[:2]


def encode(
    cast: Cast, x: Tensor | Prologue, factor: Tensor, slot: Tensor | None, fp8_dtype: torch.dtype,
    block: Sequence[int], align: int, divide: bool = False, *, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """FP8 data of one orientation by factors, or by scales that ``divide``."""
    rule = "decode" if divide else "encode"
    how = (
        fp8_dtype, block, rule, 0.0, align, not transposed, transposed, False, *_last(factor, slot),
    )  # fmt: skip
    q, _, _, q_t, *_ = cast(*_matrix(x), *how)
    data: Tensor = q_t if transposed else q
    return data


def encode_pair(
    cast: Cast, x: Tensor | Prologue, factor: Tensor, slot: Tensor | None, fp8_dtype: torch.dtype,
    align: int, column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FP8 data of both orientations by one factor, and the column sums, empty if not wanted."""
    how = (fp8_dtype, (-1, -1), "encode", 0.0, align, True, True, column_sum, *_last(factor, slot))
    q, _, _, q_t, _, total = cast(*_matrix(x), *how)
    return q, q_t, _sums(total, x)
