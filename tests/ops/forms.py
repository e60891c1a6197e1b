"""The forms of a call of a cast: computed or given scales, one orientation or both.

Each function takes the cast as its first argument: the op or another implementation of it.
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


def _column_sums(column_sums: Tensor | None, x: Tensor | Prologue) -> Tensor:
    template = _matrix(x)[1][0]
    return template.new_empty(0, dtype=torch.float32) if column_sums is None else column_sums


def _scale_args(factor: Tensor, slot: Tensor | None) -> tuple[Tensor | None, ...]:
    """The last positional arguments of a cast."""
    return (factor,) if slot is None else (factor, None, None, slot)


def amax(amax_of: Cast, x: Tensor | Prologue, block: Sequence[int] = (-1, -1)) -> Tensor:
    """The amax of each block."""
    result: Tensor = amax_of(*_matrix(x), block)
    return result


def quantize(
    cast: Cast, x: Tensor | Prologue, fp8_dtype: torch.dtype, block: Sequence[int], rule: str,
    eps: float, align: int, known_amax: Tensor | None = None, *, columnwise: bool = False,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """FP8 data, computed scales, and amaxes, of one orientation."""
    options = (fp8_dtype, block, rule, eps, align, not columnwise, columnwise, False, known_amax)
    q, scale, amaxes, q_t, scale_t, _ = cast(*_matrix(x), *options)
    return (q_t, scale_t, amaxes) if columnwise else (q, scale, amaxes)


def quantize_pair(
    cast: Cast, x: Tensor | Prologue, fp8_dtype: torch.dtype, block: Sequence[int], rule: str,
    eps: float, align: int, column_sum: bool, known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """FP8 data and scales of both orientations, and the column sums (empty if not asked for)."""
    options = (fp8_dtype, block, rule, eps, align, True, True, column_sum, known_amax)
    q, scale, _, q_t, scale_t, sums = cast(*_matrix(x), *options)
    return q, scale, q_t, scale_t, _column_sums(sums, x)


GRIDS = [
    ((1, -1), "fp32"), ((1, 128), "pow2"), ((128, 128), "fp32"), ((1, 32), "e8m0"),
    ((1, 96), "fp32"),
]  # fmt: skip
"""Blocks smaller than the tensor whose amaxes can be given, with a rule for each."""


def quantize_by_amaxes(
    cast: Cast, x: Tensor | Prologue, block: Sequence[int], rule: str, *, columnwise: bool
) -> tuple[Any, Any]:
    """FP8 data and scales of one orientation for given amaxes, which exceed those of ``x``."""
    _, inputs, _ = matrix = _matrix(x)
    padded = [round_up(size, 16) for size in prologue_shape(*matrix[:2])]
    shape = scale_shape(tuple(padded[::-1] if columnwise else padded), tuple(block))
    count = math.prod(shape)
    amaxes = torch.linspace(1e4, 9e4, count).view(shape).to(inputs[0].device)
    return quantize(cast, x, E4M3, block, rule, 1e-3, 16, amaxes, columnwise=columnwise)[:2]


def encode(
    cast: Cast, x: Tensor | Prologue, factor: Tensor, slot: Tensor | None, fp8_dtype: torch.dtype,
    block: Sequence[int], align: int, divide: bool = False, *, columnwise: bool = False,
) -> Tensor:  # fmt: skip
    """FP8 data of one orientation for given encode factors, or scales that ``divide``."""
    rule = "decode" if divide else "encode"
    options = (
        fp8_dtype, block, rule, 0.0, align, not columnwise, columnwise, False,
        *_scale_args(factor, slot),
    )  # fmt: skip
    q, _, _, q_t, *_ = cast(*_matrix(x), *options)
    data: Tensor = q_t if columnwise else q
    return data


def encode_pair(
    cast: Cast, x: Tensor | Prologue, factor: Tensor, slot: Tensor | None, fp8_dtype: torch.dtype,
    align: int, column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """FP8 data of both orientations for one factor, and the column sums, which may be empty."""
    options = (
        fp8_dtype, (-1, -1), "encode", 0.0, align, True, True, column_sum,
        *_scale_args(factor, slot),
    )  # fmt: skip
    q, _, _, q_t, _, sums = cast(*_matrix(x), *options)
    return q, q_t, _column_sums(sums, x)
