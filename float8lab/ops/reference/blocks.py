"""Blocks of a matrix, their scales, and the rounding of their values to FP8.  M rows, K columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab import formats

__all__ = [
    "ALIGN", "CastResults", "as_matrix", "block_amax", "encode_from_amax", "expand_scale",
    "factors_from_amax", "in_blocks", "quantize", "round_to_fp8", "round_up", "scale_in_tiles",
]  # fmt: skip

ALIGN = 16
"""Every dimension of Hopper's FP8 GEMM must be a multiple of this."""

_EXPONENT_BITS = 0x7F800000


class CastResults(NamedTuple):
    """The results of ``cast``; None stands for a result that is not asked for."""

    q: Tensor | None
    scale: Tensor | None
    amax: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    dbias: Tensor | None


def as_matrix(x: Tensor) -> Tensor:
    """View ``[..., K]`` as ``[M, K]``, also where K is 0, and a scalar as ``[1, 1]``.

    >>> as_matrix(torch.ones(2, 3, 0)).shape
    torch.Size([6, 0])
    """
    if x.ndim == 2:
        return x
    return x.flatten(0, -2) if x.ndim > 2 else x.reshape(1, -1)


def round_up(size: int, align: int) -> int:
    """The smallest multiple of ``align`` that is not below ``size``.

    >>> round_up(17, 16), round_up(0, 16)
    (32, 0)
    """
    return size + -size % align


def in_blocks(x: Tensor, block: Sequence[int], fill: float = 0.0) -> Tensor:
    """Split each dimension in two: the number of blocks, and the size of a block.

    ``fill`` pads blocks that an edge cuts, and a block that spans a dimension without elements.

    >>> in_blocks(torch.ones(300, 256), (128, -1)).shape
    torch.Size([3, 128, 1, 256])
    """
    sizes = [max(n, 1) if b == -1 else b for n, b in zip(x.shape, block, strict=True)]
    missing = [s - n if b == -1 else -n % s for n, b, s in zip(x.shape, block, sizes, strict=True)]
    if any(missing):
        x = F.pad(x, [pad for right in reversed(missing) for pad in (0, right)], value=fill)
    return x.reshape([k for n, s in zip(x.shape, sizes, strict=True) for k in (n // s, s)])


def block_amax(x: Tensor, block: Sequence[int]) -> Tensor:
    """Largest absolute value of each block, float32; NaN if it has a NaN, 0 if it is empty."""
    if {*block} == {-1} and x.numel():
        return x.abs().amax().float().view((1,) * x.ndim)
    return in_blocks(x, block).abs().amax([*range(1, 2 * x.ndim, 2)]).float()


def encode_from_amax(amax: Tensor, fp8_max: float | Tensor, *, power_of_2: bool) -> Tensor:
    """Compute ``fp8_max / amax``, at most float32's largest; can round down to a power of 2."""
    # torch divides a number by a tensor with two roundings (by a reciprocal): hence full_like.
    if not isinstance(fp8_max, Tensor):
        fp8_max = torch.full_like(amax, fp8_max)
    encode = (fp8_max / amax).clamp(max=formats.FLOAT32_MAX)
    if power_of_2:
        encode = (encode.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    return encode


def factors_from_amax(
    amax: Tensor, fp8_dtype: torch.dtype, rule: str, eps: float = 0.0,
    matrix_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Decode scale and encode factor of each block from its amax, by one of ``SCALE_RULES``.

    Scales in e4m3 (``_factors_in_e4m3``) may depend on the amax of the matrix; if that is not
    given, ``amax`` holds all blocks of a matrix in its last dimensions.

    ``amax`` is first raised to ``eps``; 0, inf and NaN then give 1 and 1, but inf and NaN give NaN
    for 4-bit elements. The scale is 1 over the encode factor, rounded to float32, so the encode
    factor cannot be recovered from the scale: a later cast by the same scale needs the encode
    factor or the amax.

    >>> factors_from_amax(torch.tensor([7.0, 0.0]), torch.float8_e4m3fn, "fp32")
    (tensor([0.0156, 1.0000]), tensor([64.,  1.]))
    """
    raised, is_e2m1 = amax.clamp(min=eps), rule in formats.E2M1_RULES
    if is_e2m1 and "e8m0" not in rule:
        return _factors_in_e4m3(raised, rule, matrix_amax)
    usable = (raised > 0) & (raised < torch.inf)
    limit = formats.E2M1_VALUES[-1] if is_e2m1 else torch.finfo(fp8_dtype).max
    if "e8m0" in rule:
        bits = (raised / torch.full_like(raised, limit)).view(torch.int32)
        scale = (((bits >> 23) + ((bits & 0x7FFFFF) != 0)).clamp(min=1) << 23).view(torch.float32)
        encode = 1.0 / scale
    else:
        encode = encode_from_amax(raised, limit, power_of_2=rule == "pow2")
        scale = 1.0 / encode
    unit = scale.new_ones(())  # fake tensors outside of their mode accept no number
    if is_e2m1:
        unit = torch.where(raised < torch.inf, unit, torch.nan)
    return torch.where(usable, scale, unit), torch.where(usable, encode, unit)


def _factors_in_e4m3(amax: Tensor, rule: str, matrix_amax: Tensor | None) -> tuple[Tensor, Tensor]:
    """Do ``factors_from_amax`` for elements in e2m1 with scales in e4m3.

    A block whose amax is 0 has the scale 0; one that holds a value that is not finite has the scale
    NaN. The scale of a matrix is 1 where no finite amax above 0 makes one.

    >>> amaxes = torch.tensor([[2688.0, 6.0, 0.0, torch.inf]])
    >>> factors_from_amax(amaxes, formats.E4M3, "e2m1 e4m3 fp32")[0]
    tensor([[448.,   1.,   0.,  nan]])

    Source: "Pretraining Large Language Models with NVFP4", arXiv:2509.25149, appendix on
    quantization.
    """
    scale = amax / torch.full_like(amax, formats.largest(formats.E2M1))
    decode = torch.ones_like(scale)
    if rule in formats.TENSOR_SCALE_RULES:
        if matrix_amax is None:
            matrix_amax = amax.amax((-2, -1), keepdim=True) if amax.numel() else amax
        limit = formats.largest(formats.E2M1) * formats.largest(formats.E4M3)
        encode = encode_from_amax(matrix_amax, limit, power_of_2=False)
        encode = torch.where((matrix_amax > 0) & (matrix_amax < torch.inf), encode, 1.0)
        scale, decode = scale * encode, 1.0 / encode
    scale = scale.clamp(max=formats.largest(formats.E4M3)).to(formats.E4M3).float() * decode
    scale = torch.where(amax < torch.inf, scale, torch.nan)
    return scale, (1.0 / scale).clamp(max=formats.FLOAT32_MAX)


def expand_scale(scale: Tensor, block: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Expand scales, one per block, to a tensor that broadcasts against ``shape``.
    If a block has fewer dimensions than the scales, they are the last dimensions."""
    for dim in range(-len(block), 0):
        if block[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, shape[dim])
    return scale


def scale_in_tiles(scale: Tensor) -> Tensor:
    """Return scales of 1x32 blocks, ``[M, K / 32]``, in e8m0 and the order in which SM 10 reads.

    Scales are powers of two. Tiles of 128 rows and 4 columns, filled up with ones, follow each
    other along the rows; in a tile, row ``32 i + j`` is at ``[j, i]`` of ``[32, 4, 4]``.

    Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    tiles = in_blocks(scale, (128, 4), 1.0).unflatten(1, (4, 32)).permute(0, 3, 2, 1, 4)
    return tiles.to(formats.E8M0).view(torch.uint8).flatten().view(formats.E8M0)


def _round_to_packed(value: Tensor) -> Tensor:
    """Round to the nearest values of e2m1, in e4m3; ties go to an even mantissa, NaN to 0.

    >>> _round_to_packed(torch.tensor([0.25, 0.75, 2.5, -5.0, 9.0, torch.nan])).float()
    tensor([ 0.,  1.,  2., -4.,  6.,  0.])
    """
    limit = formats.largest(formats.E2M1)
    value = value.nan_to_num(0.0).clamp(-limit, limit)
    size = value.abs()
    step = torch.where(size < 2.0, 0.5, torch.where(size < 4.0, 1.0, 2.0))
    return ((value / step).round() * step).to(formats.E4M3)


def round_to_fp8(value: Tensor, x: Tensor, fp8_dtype: torch.dtype, rule: str = "") -> Tensor:
    """Round ``value``, ``x`` over its scale, to the nearest FP8 numbers, or e2m1 for its rules.

    A finite ``x`` saturates, also where ``value`` overflows float32. An infinite ``x`` stays
    visible whatever its scale is: as an infinity in e5m2, and in e4m3, which has none, as NaN.

    >>> x = torch.tensor([500.0, -torch.inf])
    >>> round_to_fp8(x, x, torch.float8_e4m3fn).float()
    tensor([448.,  nan])
    """
    if rule in formats.E2M1_RULES:
        return _round_to_packed(value)
    limit = torch.finfo(fp8_dtype).max
    infinity: float | Tensor = torch.nan
    if fp8_dtype == torch.float8_e5m2:  # NaN, if the scale is 0, infinity or NaN
        infinity = torch.where(value.isnan(), torch.inf, value)
    # Clamp first, since releases of torch differ in how they cast a number beyond the limit.
    return torch.where(x.isinf(), infinity, value.clamp(-limit, limit)).to(fp8_dtype)


def quantize(
    x: Tensor, fp8_dtype: torch.dtype, block: Sequence[int], rule: str, eps: float = 0.0,
    align: int = 1, given: Tensor | None = None,
) -> tuple[Tensor, Any, Any]:  # fmt: skip
    """Return FP8 data of a matrix, the scales that are made for its blocks, and their amaxes.

    ``rule`` and ``given`` are those of ``cast``. Where factors or scales are given, the returned
    scales and amaxes are None.
    """
    if x.shape[0] % align or x.shape[1] % align:
        x = F.pad(x, (0, -x.shape[1] % align, 0, -x.shape[0] % align))
    (M, K), matrix_amax = x.shape, None
    if rule in formats.TENSOR_SCALE_RULES and given is not None and given.numel() == 1:
        given, matrix_amax = None, given
    if given is not None and given.numel() == 1:
        x, given = x[None, :, None], given.view(1, 1)  # the matrix is one block
    else:
        x = in_blocks(x, block)
    wide = x.float()
    scale, factor, amaxes = None, given, None
    if rule in formats.SCALE_RULES:
        amaxes = wide.abs().amax((1, 3)) if given is None else given
        if formats.scales_by_column(block):
            amaxes = amaxes.t().contiguous().t()
        scale, factor = factors_from_amax(amaxes, fp8_dtype, rule, eps, matrix_amax)
    assert factor is not None, "given by a rule that finds none"
    factor = factor[:, None, :, None]
    value = wide / factor if rule.endswith("decode") else wide * factor
    q = round_to_fp8(value, x, fp8_dtype, rule).flatten(2).flatten(0, 1)[:M, :K]
    return q.clone(memory_format=torch.contiguous_format), scale, amaxes
