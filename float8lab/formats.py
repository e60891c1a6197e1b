"""FP8 number formats and how a tensor is cut into blocks that share a scale.

The scale convention of the whole library, stated once: ``scale`` is the *decode* factor,
``x ~= qdata.float() * scale``. How bytes follow from it depends on where it comes from:

- A scale that the library finds, from amaxes, is ``1 / encode``, and the bytes are
  ``clamp(x * encode, -largest, largest)`` rounded to nearest even. ``encode`` is at most
  ``FLOAT32_MAX``, so the scale is never 0; 0 and values that are not finite never make one.
- A scale that is given, without an encode factor, divides: ``clamp(x / scale, -largest, largest)``
  rounded to nearest even. Scales of 0, subnormals, infinities and NaN do what IEEE division says:
  0 / 0 and inf / inf are NaN, a quotient that overflows is clamped.

Every step is in float32 with IEEE rounding. For powers of two the two rules are one, since both
results are the same exact value, rounded once, wherever ``1 / scale`` is finite. For other scales
they differ in rare bytes, and ``encode`` cannot be computed from ``scale``: ``1 / (1 / encode)`` is
another number for 12 % of all values. So a cast that is made apart from finding its scale is
passed the encode factor, or the amax, from which the rule makes it again.

A *block* is the patch of a tensor that shares one scale, given as one size per dimension, with
``-1`` for the whole dimension: ``(-1, -1)`` per tensor, ``(1, -1)`` per row, ``(1, 128)``,
``(128, 128)``, and ``(1, 32)`` for MX. A block cut off by the edge of the tensor is a block of its
own.

Elements of 4 bits are *packed*, two in a byte, and their blocks have scales of 8 bits
(``Float4Spec``). In NVFP4 a float32 scale of the whole tensor comes on top:
``x = e2m1 * scale * tensor_scale``, both decode factors. ``e2m1 * scale`` is exact in float32, so a
value is rounded once at most. These are formats of weights in checkpoints, and of frozen weights in
memory; no kernel multiplies them yet.

Sources: FP8 formats, arXiv:2209.05433; OCP Microscaling Formats (MX) v1.0 (MXFP4, e2m1, e8m0);
NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from float8lab.arguments import shown

__all__ = [
    "DEQUANTIZED_DTYPES",
    "E2M1",
    "E2M1_VALUES",
    "E4M3",
    "E5M2",
    "E8M0",
    "FLOAT32_MAX",
    "FP8_DTYPES",
    "HIGH_PRECISION_DTYPES",
    "MXFP4",
    "NVFP4",
    "SCALE_RULES",
    "Float4Spec",
    "Float8Spec",
    "GemmSupport",
    "gemm_support",
    "largest",
    "scale_shape",
]

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
"""Powers of two without a sign: the exponent with a bias of 127, and NaN for 255."""
E2M1 = torch.float4_e2m1fn_x2
"""Two elements in a byte, that with the even index in its low half."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the codes 0 to 7; codes 8 to 15 are their negatives. None is infinite or NaN."""
FP8_DTYPES = (E4M3, E5M2)
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that FP8 GEMMs and casts take and give."""
DEQUANTIZED_DTYPES = (*HIGH_PRECISION_DTYPES, torch.float64)
"""Dtypes that a Float8Tensor may stand for. For float64 nothing runs in FP8."""
FLOAT32_MAX = torch.finfo(torch.float32).max

SCALE_RULES = ("fp32", "pow2", "e8m0")
"""How a scale follows from a block's amax.

``fp32``: the encode factor is ``largest / amax``. ``pow2``: that, rounded down to a power of two.
``e8m0``: the scale is ``amax / largest`` rounded up to a power of two, exponent in [-127, 127].
"""

_LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
_NAMES = {E4M3: "e4m3", E5M2: "e5m2", E8M0: "e8m0"}


def largest(fp8_dtype: torch.dtype) -> float:
    """Largest finite value of an FP8 format, or of ``E2M1``.

    >>> largest(torch.float8_e4m3fn), largest(torch.float8_e5m2)
    (448.0, 57344.0)
    """
    try:
        return _LARGEST[fp8_dtype]
    except (KeyError, TypeError) as error:
        raise TypeError(
            f"fp8_dtype must be one of {', '.join(map(str, _LARGEST))}; got {shown(fp8_dtype)}. "
            "Choose one."
        ) from error


def scale_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a tensor: the number of blocks along each dimension.

    An empty dimension that one block spans whole still has one scale.

    >>> scale_shape((300, 256), (128, 128)), scale_shape((300, 256), (1, -1))
    ((3, 2), (300, 1))
    """
    try:
        blocks = tuple(
            1 if size == -1 else -(-length // size)
            for length, size in zip(shape, block, strict=True)
        )
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise _wrong_shapes(shape, block) from error
    if any(type(count) is float or (type(count) is int and count < 0) for count in blocks):
        raise _wrong_shapes(shape, block)
    return blocks


def _wrong_shapes(shape: Any, block: Any) -> TypeError | ValueError:
    """The error for a shape and a block that do not belong together."""
    for name, value in (("shape", shape), ("block", block)):
        if not isinstance(value, (tuple, list)):
            return TypeError(
                f"{name} must be a tuple of sizes; got {shown(value)}. Pass one for each dimension."
            )
    return ValueError(
        f"shape and block must be integers, one of each for a dimension; got {shown(shape)} and "
        f"{shown(block)}. A block has positive sizes, or -1 for a whole dimension."
    )


class GemmSupport(NamedTuple):
    """The GPUs whose tensor cores multiply two blocks in FP8, by compute capability."""

    since: tuple[int, int]
    before: tuple[int, int] = (99, 0)
    cublas: bool = True
    """By cuBLASLt, else by a kernel of our own."""


_HOPPER, _NOWHERE = ((9, 0), (10, 0)), ((99, 0), (99, 0))
_GEMMS: dict[tuple[Any, Any], GemmSupport] = {
    # -1 stands for one scale along the contraction: a scale for the whole matrix, or one for a row.
    (-1, -1): GemmSupport((8, 9)),
    ((1, 128), (1, 128)): GemmSupport(*_HOPPER),
    ((1, 128), (128, 128)): GemmSupport(*_HOPPER),
    ((128, 128), (1, 128)): GemmSupport(*_HOPPER),
    ((128, 128), (128, 128)): GemmSupport(*_HOPPER, cublas=False),
    ((1, 32), (1, 32)): GemmSupport(*_NOWHERE),  # dequantized and multiplied in high precision
}
"""Which blocks of two operands, each in its rows along the contraction, one product takes."""


def gemm_support(a_block: Sequence[int], b_block: Sequence[int]) -> GemmSupport | None:
    """How ``a @ b.T`` of two blocks runs; None if one product cannot take the two.

    >>> gemm_support((1, 128), (128, 128)).since
    (9, 0)
    """
    a, b = a_block[1], b_block[1]
    return _GEMMS.get((a if a == -1 else tuple(a_block), b if b == -1 else tuple(b_block)))


def _check_is_tuple(name: str, value: Any) -> None:
    if not isinstance(value, tuple):
        raise TypeError(
            f"{name} must be a tuple of sizes; got {shown(value)}. Pass one for each dimension."
        )


class _Blocks:
    """A block shape and what follows from it, for any format of the elements."""

    block: tuple[int, ...]

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a tensor of ``shape`` (see the function of the same name)."""
        return scale_shape(shape, self.block)

    @property
    def per_tensor(self) -> bool:
        """Whether one scale covers the whole tensor."""
        return all(b == -1 for b in self.block)

    @property
    def granularity(self) -> str:
        """The usual name of the block shape, for people to read."""
        if self.per_tensor:
            return "tensor"
        names: dict[tuple[int, ...], str] = {(1, -1): "row", (-1, 1): "column"}
        return names.get(
            self.block[-2:], "x".join("all" if b == -1 else str(b) for b in self.block)
        )


@dataclass(frozen=True)
class Float8Spec(_Blocks):
    """How a tensor is stored in FP8: number format, block shape, scale rule.

    Hashable and compared by value; a ``Float8Tensor`` carries one, a recipe is made of them.
    """

    fp8_dtype: torch.dtype = E4M3
    block: tuple[int, ...] = (-1, -1)
    """Sizes of a block, one per dimension; -1 is the whole dimension."""
    scale_rule: str = "fp32"
    """One of ``SCALE_RULES``."""

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_dtype, torch.dtype) or self.fp8_dtype not in FP8_DTYPES:
            raise ValueError(
                "fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got "
                f"{shown(self.fp8_dtype)}. Choose one."
            )
        if not isinstance(self.scale_rule, str) or self.scale_rule not in SCALE_RULES:
            raise ValueError(
                f"scale_rule must be one of {SCALE_RULES}; got {shown(self.scale_rule)}. Choose "
                "one."
            )
        _check_is_tuple("block", self.block)
        if not all(isinstance(b, int) and (b > 0 or b == -1) for b in self.block):
            raise ValueError(
                f"block must hold positive sizes, or -1 for a whole dimension; got {self.block}."
            )

    def transpose(self) -> Float8Spec:
        """The spec of the transposed matrix."""
        *leading, rows, columns = self.block
        return replace(self, block=(*leading, columns, rows))

    def expand(self, ndim: int) -> Float8Spec:
        """This matrix spec for a tensor of ``ndim`` dimensions.

        A per-tensor block covers the leading dimensions too; any other treats them as a batch.

        >>> Float8Spec(block=(1, 128)).expand(3).block, Float8Spec().expand(3).block
        ((1, 1, 128), (-1, -1, -1))
        """
        extra = ndim - len(self.block)
        if extra == 0:
            return self
        if extra < 0:
            return replace(self, block=self.block[-ndim:] if ndim else ())
        lead = -1 if all(b == -1 for b in self.block) else 1
        return replace(self, block=(lead,) * extra + self.block)

    @property
    def element_dtype(self) -> torch.dtype:
        """The format of an element, as a ``Float4Spec`` has it, too."""
        return self.fp8_dtype

    @property
    def storage(self) -> str:
        """Format and granularity, such as ``e4m3 128x128``."""
        return f"{_NAMES[self.fp8_dtype]} {self.granularity}"

    def describe(self) -> str:
        """One short phrase, as reprs and reports print it.

        >>> Float8Spec(block=(1, 128)).describe()
        'e4m3 1x128 fp32'
        """
        return f"{self.storage} {self.scale_rule}"

    def largest(self) -> float:
        """Largest finite value of the format."""
        return largest(self.fp8_dtype)


@dataclass(frozen=True)
class Float4Spec(_Blocks):
    """How a tensor is stored in packed 4 bits, e2m1: block shape, and scales of one or two levels.

    Hashable and compared by value. ``NVFP4`` and ``MXFP4`` are the usual ones.

    >>> Float4Spec((1, 1, 16)).scale_shape((8, 64, 128))
    (8, 64, 8)
    """

    block: tuple[int, ...] = (1, 16)
    """One size for each dimension: 1 in all but that along which elements are packed."""
    scale_dtype: torch.dtype = E4M3
    """The format of a block's scale: ``E4M3`` or ``E8M0``."""
    tensor_scale: bool = True
    """Whether a float32 scale of the whole tensor multiplies those of the blocks."""

    def __post_init__(self) -> None:
        _check_is_tuple("block", self.block)
        packed = [size for size in self.block if type(size) is not int or size != 1]
        if not all(type(b) is int and b > 0 for b in self.block) or (
            len(packed) != 1 or packed[0] % 2
        ):
            raise ValueError(
                f"block must have one even size, and 1 in all other dimensions; got {self.block}. "
                "Give (1, 16) for NVFP4, (1, 32) for MXFP4."
            )
        if self.scale_dtype not in (E4M3, E8M0):
            raise ValueError(
                "scale_dtype must be torch.float8_e4m3fn or torch.float8_e8m0fnu; got "
                f"{self.scale_dtype}."
            )
        if not isinstance(self.tensor_scale, bool):
            raise ValueError(f"tensor_scale must be a bool; got {self.tensor_scale!r}.")

    @property
    def element_dtype(self) -> torch.dtype:
        """``E2M1``."""
        return E2M1

    @property
    def packed_dim(self) -> int:
        """The dimension along which two elements share a byte."""
        return next(dim for dim, size in enumerate(self.block) if size != 1)

    def describe(self) -> str:
        """One short phrase, as reports print it.

        >>> NVFP4.describe(), MXFP4.describe()
        ('e2m1 1x16 e4m3 fp32', 'e2m1 1x32 e8m0')
        """
        levels = " fp32" if self.tensor_scale else ""
        return f"e2m1 {self.granularity} {_NAMES[self.scale_dtype]}{levels}"

    def largest(self) -> float:
        """Largest value of the format."""
        return largest(E2M1)


NVFP4 = Float4Spec()
"""Blocks of 16 with scales in e4m3, and a scale of the tensor."""
MXFP4 = Float4Spec((1, 32), E8M0, False)
"""Blocks of 32 with scales that are powers of two."""
