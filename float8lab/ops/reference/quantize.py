"""Quantize, cast, dequantize and transpose matrices.  M rows, K columns.

Ops that quantize can pad: both dimensions of the result are rounded up to a multiple of ``align``,
and everything, scales included, is as if the input had been padded with zeros first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from float8lab.formats import FLOAT32_MAX, largest, scale_shape

__all__ = [
    "amax",
    "cast",
    "cast_many_",
    "cast_pair",
    "dequantize",
    "encode_from_amax",
    "expand_scale",
    "factors_from_amax",
    "quantize",
    "quantize_many_",
    "quantize_pair",
    "round_up",
    "scale_from_amax",
    "scales_by_column",
    "sum_of_rows",
    "transpose",
]

_EXPONENT_BITS = 0x7F800000


def as_matrix(x: Tensor) -> Tensor:
    """``[..., K]`` as ``[M, K]``, K = 0 included.

    >>> as_matrix(torch.ones(2, 3, 0)).shape
    torch.Size([6, 0])
    """
    K = x.shape[-1]
    return x.reshape(-1, K) if K else x.reshape(math.prod(x.shape[:-1]), K)


def round_up(size: int, align: int) -> int:
    """The smallest multiple of ``align`` that is not below ``size``.

    >>> round_up(17, 16), round_up(0, 16)
    (32, 0)
    """
    return -(-size // align) * align


def _pad(x: Tensor, rows: int, columns: int) -> Tensor:
    if x.shape == (rows, columns):
        return x
    padded = x.new_zeros((rows, columns))
    padded[: x.shape[0], : x.shape[1]] = x
    return padded


def _align(x: Tensor, align: int) -> Tensor:
    return _pad(x, round_up(x.shape[0], align), round_up(x.shape[1], align))


def scales_by_column(block: Sequence[int]) -> bool:
    """Whether the scales of a quantized matrix are stored column by column: those of 1xB blocks.

    cuBLASLt reads them so; see "Scaling Factors Layouts" in the cuBLAS documentation.
    """
    return block[0] == 1 and block[1] > 1


def amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Largest absolute value of each block, float32; NaN if the block holds one, 0 if empty."""
    M, K = x.shape
    rows, columns = (M if block[0] == -1 else block[0]), (K if block[1] == -1 else block[1])
    shape = scale_shape((M, K), tuple(block))
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    blocks = _pad(x.abs(), shape[0] * rows, shape[1] * columns)
    blocks = blocks.view(shape[0], rows, shape[1], columns)
    return blocks.amax(dim=(1, 3)).float()


def encode_from_amax(amax: Tensor, fp8_max: float | Tensor, *, power_of_2: bool) -> Tensor:
    """``fp8_max / amax``, at most the largest float32; on request rounded down to a power of 2."""
    # A number divided by a tensor is reciprocal() times the number, two roundings: hence full_like.
    if not isinstance(fp8_max, Tensor):
        fp8_max = torch.full_like(amax, fp8_max)
    encode = (fp8_max / amax).clamp(max=FLOAT32_MAX)
    if power_of_2:
        encode = (encode.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return encode


def factors_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Decode scale and encode factor of each block from its amax, by one of ``SCALE_RULES``.

    ``amax`` is first raised to ``eps``; 0, inf and NaN then give 1 and 1. The scale is 1 over the
    encode factor, rounded to float32, from which the encode factor cannot be found again: a cast
    that is made apart from finding its scale needs the encode factor, or the amax.

    >>> factors_from_amax(torch.tensor([7.0, 0.0]), torch.float8_e4m3fn, "fp32")
    (tensor([0.0156, 1.0000]), tensor([64.,  1.]))
    """
    raised = amax.clamp(min=eps)
    usable = (raised > 0) & (raised < torch.inf)
    if rule == "e8m0":
        bits = (raised / torch.full_like(raised, largest(fp8_dtype))).view(torch.int32)
        exponent = ((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(min=1)
        scale = (exponent << 23).view(torch.float32)
        encode = 1.0 / scale
    else:
        encode = encode_from_amax(raised, largest(fp8_dtype), power_of_2=rule == "pow2")
        scale = 1.0 / encode
    return torch.where(usable, scale, 1.0), torch.where(usable, encode, 1.0)


def scale_from_amax(amax: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float = 0.0) -> Tensor:
    """The decode scales of ``factors_from_amax``.

    >>> scale_from_amax(torch.tensor([448.0, 3.0, 0.0, torch.inf]), torch.float8_e4m3fn, "pow2")
    tensor([1.0000, 0.0078, 1.0000, 1.0000])
    """
    return factors_from_amax(amax, fp8_dtype, rule, eps)[0]


def expand_scale(scale: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Scales, one per block, as a matrix, or a batch, that broadcasts against one of ``shape``."""
    if block[0] > 1:
        scale = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    if block[1] > 1:
        scale = scale.repeat_interleave(block[1], dim=-1)[..., : shape[-1]]
    return scale


def _encode(
    x: Tensor, factor: Tensor, fp8_dtype: torch.dtype, block: Sequence[int], divide: bool = False
) -> Tensor:
    factor = expand_scale(factor, block, x.shape)
    limit = largest(fp8_dtype)
    value = x.float() / factor if divide else x.float() * factor
    return value.clamp(-limit, limit).to(fp8_dtype)


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Current scaling: FP8 data, scales and amaxes of each block of ``x``.

    ``known_amax``, [1, 1] float32, is that of ``x``, if it is known and the block is the whole.
    """
    x = _align(x, align)
    block_amax = amax(x, block) if known_amax is None else known_amax.clone()
    if scales_by_column(block):
        block_amax = block_amax.t().contiguous().t()
    scale, encode = factors_from_amax(block_amax, fp8_dtype, rule, eps)
    return _encode(x, encode, fp8_dtype, block).contiguous(), scale, block_amax


def quantize_many_(
    x: Sequence[Tensor],
    q: Sequence[Tensor],
    scale: Sequence[Tensor],
    amax: Sequence[Tensor],
    block: Sequence[int],
    rule: str,
    eps: float,
) -> None:
    """``quantize`` of each ``x`` into the ``q``, ``scale`` and ``amax`` that are there for it."""
    for one, *outputs in zip(x, q, scale, amax, strict=True):
        results = quantize(one, outputs[0].dtype, block, rule, eps, 1)
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)


def quantize_pair(
    x: Tensor,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    rule: str,
    eps: float,
    align: int,
    column_sum: bool,
    known_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``quantize`` of ``x`` and of its transpose: q, scale, q_t, scale_t and the column sums."""
    q, scale, _ = quantize(x, fp8_dtype, block, rule, eps, align, known_amax)
    if block[0] == block[1]:
        q_t, scale_t = _transposed(q), _transposed(scale)
    else:
        q_t, scale_t, _ = quantize(x.t(), fp8_dtype, block, rule, eps, align)
    return q, scale, q_t, scale_t, sum_of_rows(x, column_sum)


def _transposed(x: Tensor) -> Tensor:
    """A contiguous copy, also where a transposed view would be contiguous itself."""
    return x.t().clone(memory_format=torch.contiguous_format)


def sum_of_rows(x: Tensor, wanted: bool) -> Tensor:
    """Sums over the rows, float32; empty if not wanted."""
    return x.float().sum(0) if wanted else x.new_empty(0, dtype=torch.float32)


def cast(
    x: Tensor,
    factor: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    block: Sequence[int],
    align: int,
    divide: bool = False,
) -> Tensor:
    """FP8 data of ``x`` times the encode ``factor`` of each block.

    With ``divide``, ``factor`` is the decode scale, given by somebody who knows no encode factor,
    and ``x`` is divided by it. Both are one float32 operation with IEEE rounding, so what it does
    with 0, subnormals, infinities and NaN is what IEEE says, before the result is clamped. For
    powers of two the two ways are the same.

    With ``amax_slot`` (one element) the amax of ``x`` is also recorded there: the slot becomes the
    larger of its content and the amax.
    """
    if amax_slot is not None and x.numel():
        amax_slot.copy_(torch.maximum(amax_slot, x.abs().max().float()))
    factor = factor.view(1, 1) if factor.numel() == 1 else factor
    return _encode(_align(x, align), factor, fp8_dtype, block, divide).contiguous()


def cast_many_(
    x: Sequence[Tensor], encode: Sequence[Tensor], q: Sequence[Tensor], block: Sequence[int]
) -> None:
    """``cast`` of each ``x`` by its ``encode`` factors into the ``q`` that is there for it."""
    for one, factor, output in zip(x, encode, q, strict=True):
        output.copy_(cast(one, factor, None, output.dtype, block, 1))


def cast_pair(
    x: Tensor,
    encode: Tensor,
    amax_slot: Tensor | None,
    fp8_dtype: torch.dtype,
    align: int,
    column_sum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Per-tensor ``cast`` of ``x``, the same bytes transposed, and the column sums."""
    q = cast(x, encode, amax_slot, fp8_dtype, (-1, -1), align)
    return q, _transposed(q), sum_of_rows(x, column_sum)


def transpose(q: Tensor, align: int) -> Tensor:
    """The transposed matrix of one-byte elements, contiguous and zero-padded."""
    return _transposed(_align(q.view(torch.uint8), align)).view(q.dtype)


def dequantize(q: Tensor, scale: Tensor, block: Sequence[int], dtype: torch.dtype) -> Tensor:
    """``q * scale``, multiplied in float32 and rounded once to ``dtype``."""
    return (q.float() * expand_scale(scale, block, q.shape)).to(dtype).contiguous()
