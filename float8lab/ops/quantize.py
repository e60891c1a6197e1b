"""Quantize, dequantize and transpose matrices.  M rows, K columns.

The public functions check their arguments and call the registered op; the ops underneath
(``*_op``) are for callers that have checked already, such as the modules' forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import scale_shape
from float8lab.ops import reference
from float8lab.ops._register import register
from float8lab.ops.reference import round_up

__all__ = [
    "amax_op",
    "cast_many_op",
    "cast_op",
    "cast_pair_op",
    "cast_unrecorded_op",
    "dequantize_after_op",
    "dequantize_op",
    "empty_scale",
    "quantize_many_op",
    "quantize_op",
    "quantize_pair_op",
    "transpose_after_op",
    "transpose_op",
]


def empty_scale(x: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """Room for the scales of a quantized matrix of ``shape``, on the device of ``x``.

    Scales of 1xB blocks are stored column by column, as cuBLASLt reads them; all others by row.
    """
    rows, columns = scale_shape(tuple(shape), tuple(block))
    if reference.scales_by_column(block):
        return x.new_empty((columns, rows), dtype=torch.float32).t()
    return x.new_empty((rows, columns), dtype=torch.float32)


def _fake_amax(x: Tensor, block: Sequence[int]) -> Tensor:
    return x.new_empty(scale_shape(tuple(x.shape), tuple(block)), dtype=torch.float32)


def _fake_quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (round_up(x.shape[0], align), round_up(x.shape[1], align))
    q = x.new_empty(shape, dtype=fp8_dtype)
    scale = empty_scale(x, shape, block)
    return q, scale, torch.empty_like(scale)


def _fake_quantize_many_(
    x: Sequence[Tensor],
    q: Sequence[Tensor],
    scale: Sequence[Tensor],
    amax: Sequence[Tensor],
    block: Sequence[int],
    rule: str,
    eps: float,
) -> None:
    return None


def _fake_quantize_pair(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
    known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    q, scale, _ = _fake_quantize(x, fp8_dtype, block, rule, eps, align)
    q_t, scale_t, _ = _fake_quantize(x.t(), fp8_dtype, block, rule, eps, align)
    return q, scale, q_t, scale_t, _fake_column_sum(x, column_sum)


def _fake_column_sum(x: Tensor, wanted: bool) -> Tensor:
    return x.new_empty(x.shape[1] if wanted else 0, dtype=torch.float32)


def _fake_cast(
    x: Tensor,
    factor: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    align: int,
    divide: bool = False,
) -> Tensor:
    shape = (round_up(x.shape[0], align), round_up(x.shape[1], align))
    return x.new_empty(shape, dtype=fp8_dtype)


def _cast_unrecorded(
    x: Tensor,
    factor: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    align: int,
    divide: bool = False,
) -> Tensor:
    q: Tensor = cast_op(x, factor, None, fp8_dtype, block, align, divide)
    return q


def _fake_cast_unrecorded(
    x: Tensor,
    factor: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    align: int,
    divide: bool = False,
) -> Tensor:
    return _fake_cast(x, factor, None, fp8_dtype, block, align)


def _fake_cast_many_(
    x: Sequence[Tensor], encode: Sequence[Tensor], q: Sequence[Tensor], block: Sequence[int]
) -> None:
    return None


def _fake_cast_pair(
    x: Tensor,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    M, K = round_up(x.shape[0], align), round_up(x.shape[1], align)
    q = x.new_empty((M, K), dtype=fp8_dtype)
    return q, x.new_empty((K, M), dtype=fp8_dtype), _fake_column_sum(x, column_sum)


def _fake_transpose(q: Tensor, align: int) -> Tensor:
    return q.new_empty((round_up(q.shape[1], align), round_up(q.shape[0], align)))


def _fake_dequantize(q: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


amax_op = register(
    "amax(Tensor x, int[] block) -> Tensor",
    cuda="quantize:amax",
    reference=reference.amax,
    fake=_fake_amax,
    any_strides=True,
)
quantize_op = register(
    "quantize(Tensor x, ScalarType fp8_dtype, int[] block, str rule, float eps, int align,"
    " Tensor? known_amax=None) -> (Tensor, Tensor, Tensor)",
    cuda="quantize:quantize",
    reference=reference.quantize,
    fake=_fake_quantize,
    any_strides=True,
)
# These two write to their arguments, and leave the version counters of these to the caller.
quantize_many_op = register(
    "quantize_many_(Tensor[] x, Tensor(a!)[] q, Tensor(b!)[] scale, Tensor(c!)[] amax, int[] block,"
    " str rule, float eps) -> ()",
    cuda="many:quantize_many_",
    reference=reference.quantize_many_,
    fake=_fake_quantize_many_,
)
cast_many_op = register(
    "cast_many_(Tensor[] x, Tensor[] encode, Tensor(a!)[] q, int[] block) -> ()",
    cuda="many:cast_many_",
    reference=reference.cast_many_,
    fake=_fake_cast_many_,
)
quantize_pair_op = register(
    "quantize_pair(Tensor x, ScalarType fp8_dtype, int[] block, str rule, float eps, int align,"
    " bool column_sum, Tensor? known_amax=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cuda="pair:quantize_pair",
    reference=reference.quantize_pair,
    fake=_fake_quantize_pair,
    any_strides=True,
)
cast_op = register(
    "cast(Tensor x, Tensor factor, Tensor(a!)? amax_slot, ScalarType fp8_dtype, int[] block,"
    " int align, bool divide=False) -> Tensor",
    cuda="quantize:cast",
    reference=reference.cast,
    fake=_fake_cast,
    any_strides=True,
)
# For graphs: of an op that may write a tensor it was not given, and that returns one tensor,
# Inductor makes a call that it cannot lower.
cast_unrecorded_op = register(
    "cast_unrecorded(Tensor x, Tensor factor, ScalarType fp8_dtype, int[] block, int align,"
    " bool divide=False) -> Tensor",
    cuda=_cast_unrecorded,
    reference=_cast_unrecorded,
    fake=_fake_cast_unrecorded,
    any_strides=True,
)
cast_pair_op = register(
    "cast_pair(Tensor x, Tensor encode, Tensor(a!)? amax_slot, ScalarType fp8_dtype, int align,"
    " bool column_sum) -> (Tensor, Tensor, Tensor)",
    cuda="pair:cast_pair",
    reference=reference.cast_pair,
    fake=_fake_cast_pair,
    any_strides=True,
)
transpose_op = register(
    "transpose(Tensor q, int align) -> Tensor",
    cuda="pair:transpose",
    reference=reference.transpose,
    fake=_fake_transpose,
)
dequantize_op = register(
    "dequantize(Tensor q, Tensor scale, int[] block, ScalarType dtype) -> Tensor",
    cuda="quantize:dequantize",
    reference=reference.dequantize,
    fake=_fake_dequantize,
)


# For graphs: what backward computes from the forward's tensors alone, the partitioner moves into
# the forward, and keeps until then. ``event`` is a tensor of backward.


def _without_event(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with one more argument at the end, which it does not get."""
    return lambda *arguments: function(*arguments[:-1])


def _register_after(schema: str, op: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """An op that does what ``op`` does, once the last of its arguments is there."""
    run = _without_event(op)
    return register(schema, cuda=run, reference=run, fake=_without_event(fake))


transpose_after_op = _register_after(
    "transpose_after(Tensor q, int align, Tensor event) -> Tensor", transpose_op, _fake_transpose
)
dequantize_after_op = _register_after(
    "dequantize_after(Tensor q, Tensor scale, int[] block, ScalarType dtype, Tensor event)"
    " -> Tensor",
    dequantize_op,
    _fake_dequantize,
)
