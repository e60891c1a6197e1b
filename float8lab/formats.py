"""FP8 number formats and how a tensor is cut into blocks that share a scale.

The scale convention of the whole library: ``scale`` is the *decode* factor,
``x ~= qdata.float() * scale``. How bytes follow from a scale depends on the scale's origin:

- A scale that the library computes from amaxes is ``1 / encode``, and the bytes are
  ``clamp(x * encode, -largest, largest)`` rounded to nearest even. ``encode`` is at most
  ``FLOAT32_MAX``, so the scale is never 0; amaxes that are 0 or not finite are not used.
- A scale that is given without an encode factor divides: ``clamp(x / scale, -largest, largest)``
  rounded to nearest even. Scales of 0, subnormals, infinities and NaN follow IEEE division:
  0 / 0 and inf / inf are NaN, and a quotient that overflows is clamped.

Every step is in float32 with IEEE rounding. For powers of two the two rules agree, since both
results are the same exact value, rounded once, wherever ``1 / scale`` is finite. For other scales
they differ in rare bytes, and ``encode`` cannot be computed from ``scale``: ``1 / (1 / encode)``
differs from ``encode`` for 12 % of all values. So a cast whose scale was computed separately is
given the encode factor, or the amax, from which the rule computes the encode factor.

A *block* is the part of a tensor that shares one scale. It is given as one size per dimension, with
``-1`` for the whole dimension: ``(-1, -1)`` per tensor, ``(1, -1)`` per row, ``(1, 128)``,
``(128, 128)``, and ``(1, 32)`` for MX. A block that is cut by the edge of the tensor still has its
own scale.

A ``Spec`` describes all of this for one tensor, and code that depends on blocks reads it. Its scale
rule names the *levels* of its scales, the innermost first: ``e2m1 e4m3 fp32`` (NVFP4) has elements
in e2m1, e4m3 scales of blocks and one float32 scale of the tensor:
``x = e2m1 * scale * tensor_scale``, all decode factors. ``e2m1 * scale`` is exact in float32.

Elements of 4 bits are *packed*, two in a byte, in checkpoints and in frozen weights
(``Float4Tensor``). No kernel multiplies them yet, so a GEMM operand holds each element in a byte of
e4m3, which has all values of e2m1, with one float32 scale per block, and the GEMM is emulated.

Sources: FP8 formats, arXiv:2209.05433; OCP Microscaling Formats (MX) v1.0 (MXFP4, e2m1, e8m0);
NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from float8lab.arguments import check_choice, check_instance, shown

__all__ = [
    "CASTS", "DEQUANTIZED_DTYPES", "E2M1", "E2M1_RULES", "E2M1_VALUES", "E4M3", "E5M2", "E8M0",
    "FLOAT32_MAX", "FP8_DTYPES", "HIGH_PRECISION_DTYPES", "HOPPER", "MXFP4", "NVFP4", "SCALE_RULES",
    "TENSOR_SCALE_RULES", "Float4Spec", "Float8Spec", "GpuSupport", "Spec", "gemm_support",
    "has_kernels", "largest", "scale_shape", "scales_by_column", "shares_matrix_amax",
]  # fmt: skip

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
"""Powers of two without a sign: the exponent with a bias of 127, and NaN for 255."""
E2M1 = torch.float4_e2m1fn_x2
"""Two elements in a byte; the element with the even index is in the low half."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the bits 0 to 7; the bits 8 to 15 mean their negatives. All are finite."""
FP8_DTYPES = (E4M3, E5M2)
HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that FP8 GEMMs and casts accept and return."""
DEQUANTIZED_DTYPES = (*HIGH_PRECISION_DTYPES, torch.float64)
"""Dtypes that a Float8Tensor may represent. For float64 no op runs in FP8."""
FLOAT32_MAX = torch.finfo(torch.float32).max

SCALE_RULES = (
    "fp32", "pow2", "e8m0",
    "e2m1 e8m0", "e2m1 e8m0 fp32", "e2m1 e4m3", "e2m1 e4m3 fp32",
)  # fmt: skip
"""How a scale follows from a block's amax.

``fp32``: the encode factor is ``largest / amax``. ``pow2``: that, rounded down to a power of two.
``e8m0``: the scale is ``amax / largest`` rounded up to a power of two, exponent in [-127, 127].
``e4m3``: the scale is ``amax / largest`` rounded to e4m3. Rules that begin with ``e2m1`` cast
elements to e2m1; a second level, ``fp32``, is an additional scale of the whole tensor.
"""
E2M1_RULES = frozenset({*SCALE_RULES[3:], "e2m1 encode", "e2m1 decode"})
"""Rules of casts to elements of 4 bits."""
TENSOR_SCALE_RULES = frozenset({"e2m1 e8m0 fp32", "e2m1 e4m3 fp32"})
"""Rules with a second level of scales: a float32 scale of the whole tensor."""
_KERNEL_RULES = frozenset({"", "fp32", "pow2", "e8m0", "encode", "decode"})
"""Rules that kernels support; the last two are for casts that are given factors or scales."""

_LARGEST = {E4M3: 448.0, E5M2: 57344.0, E2M1: 6.0}
_NAMES = {E4M3: "e4m3", E5M2: "e5m2", E8M0: "e8m0", E2M1: "e2m1"}
_SCALE_DTYPES = {"e4m3": E4M3, "e8m0": E8M0}


def largest(fp8_dtype: torch.dtype) -> float:
    """Return the largest finite value of an FP8 format, or of ``E2M1``.

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
    """Return the shape of a tensor's scales: the number of blocks along each dimension.

    An empty dimension that one block spans still has one scale.

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


def _wrong_shapes(shape: Any, block: Any) -> ValueError:
    """Return the error for a shape and block that do not match; raise if one is not a tuple."""
    for name, value in (("shape", shape), ("block", block)):
        check_instance(name, value, (tuple, list), "a tuple of sizes")
    return ValueError(
        f"shape and block must be integers, one of each for a dimension; got {shown(shape)} and "
        f"{shown(block)}. A block has positive sizes, or -1 for a whole dimension."
    )


class GpuSupport(NamedTuple):
    """A range of GPUs that have a kernel, by compute capability."""

    since: tuple[int, int]
    before: tuple[int, int] = (99, 0)
    cublas: bool = True
    """Whether a GEMM uses cuBLASLt rather than our own kernel."""

    def includes(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU with this compute capability has the kernel."""
        return self.since <= capability < self.before


CASTS = GpuSupport((8, 9))
"""Kernels that convert to or from FP8. On GPUs for which Triton lacks e4m3, torch converts."""
HOPPER = GpuSupport((9, 0), (10, 0))
_GEMMS: dict[tuple[Any, Any], GpuSupport] = {
    # -1 means one scale along the contraction: one for the whole matrix, or one per row.
    (-1, -1): GpuSupport((8, 9)),
    ((1, 128), (1, 128)): HOPPER,
    ((1, 128), (128, 128)): HOPPER,
    ((128, 128), (1, 128)): HOPPER,
    ((128, 128), (128, 128)): HOPPER._replace(cublas=False),
    ((1, 32), (1, 32)): GpuSupport((10, 0), (11, 0)),  # with scales in e8m0
}
"""GPUs by the blocks of the two operands of a GEMM, each given in rows along the contraction."""


def gemm_support(a_block: Sequence[int], b_block: Sequence[int]) -> GpuSupport | None:
    """Return the GPUs that run ``a @ b.T`` for two blocks; None if no single GEMM takes them.

    >>> gemm_support((1, 128), (128, 128)).since
    (9, 0)
    """
    a, b = a_block[1], b_block[1]
    return _GEMMS.get((a if a == -1 else tuple(a_block), b if b == -1 else tuple(b_block)))


def shares_matrix_amax(block: Sequence[int], rule: str) -> bool:
    """Whether the cast of each element depends on the amax of the whole matrix.

    >>> shares_matrix_amax((-1, -1), "fp32"), shares_matrix_amax((1, 16), "e2m1 e4m3 fp32")
    (True, True)
    """
    return all(size == -1 for size in block[-2:]) or rule in TENSOR_SCALE_RULES


def scales_by_column(block: Sequence[int]) -> bool:
    """Whether the scales of a quantized matrix are stored by column, as for 1xB blocks."""
    # cuBLASLt reads them this way; see "Scaling Factors Layouts" in the cuBLAS documentation.
    return block[0] == 1 and block[1] > 1


@functools.cache
def has_kernels(block: tuple[int, ...], rule: str = "") -> bool:
    """Whether GPU kernels cast, dequantize and multiply such blocks; if not, the reference does.

    >>> has_kernels((1, 64), "pow2"), has_kernels((1, 48)), has_kernels((1, 16), "e2m1 e8m0")
    (True, False, False)
    """
    sizes = all(size == -1 or (size <= 128 and size & (size - 1) == 0) for size in block)
    return sizes and rule in _KERNEL_RULES


@dataclass(frozen=True)
class Spec:
    """The storage of a tensor: number format, block shape, and how scales follow from values.

    It is hashable and compared by value. A ``Float8Tensor`` or ``Float4Tensor`` has one, and a
    recipe consists of several. ``Float8Spec`` is another name of this class.
    """

    fp8_dtype: torch.dtype = E4M3
    """The dtype of the data: FP8, or ``E2M1`` where two elements are packed in a byte."""
    block: tuple[int, ...] = (-1, -1)
    """Sizes of a block, one per dimension; -1 means the whole dimension."""
    scale_rule: str = "fp32"
    """One of ``SCALE_RULES``."""

    element_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    """The format of an element, which may have fewer bits than ``fp8_dtype``."""
    is_packed: bool = field(init=False, repr=False, compare=False)
    """Whether two elements share a byte."""
    scale_dtype: torch.dtype = field(init=False, repr=False, compare=False)
    """The storage format of a block's scale. A GEMM operand holds the scale in float32."""
    tensor_scale: bool = field(init=False, repr=False, compare=False)
    """Whether a float32 scale of the whole tensor multiplies the scales of the blocks."""
    per_tensor: bool = field(init=False, repr=False, compare=False)
    """Whether one scale covers the whole tensor."""
    shares_matrix_amax: bool = field(init=False, repr=False, compare=False)
    """Whether the cast of each element depends on the amax of the whole matrix."""
    amax_block: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The block whose amax must be known before any of its elements is cast."""

    def __post_init__(self) -> None:
        if not isinstance(self.fp8_dtype, torch.dtype) or self.fp8_dtype not in (*FP8_DTYPES, E2M1):
            raise ValueError(
                "fp8_dtype must be torch.float8_e4m3fn or torch.float8_e5m2; got "
                f"{shown(self.fp8_dtype)}. Choose one."
            )
        check_choice("scale_rule", self.scale_rule, SCALE_RULES)
        if self.fp8_dtype not in ((E4M3, E2M1) if self.scale_rule in E2M1_RULES else FP8_DTYPES):
            raise ValueError(
                f"scale_rule must be a rule for {self.fp8_dtype}; got {self.scale_rule!r}. "
                "Elements in e2m1 are held in torch.float8_e4m3fn, or packed."
            )
        check_instance("block", self.block, tuple, "a tuple of sizes")
        if self.fp8_dtype == E2M1:
            _check_packed_block(self.block)
        elif not all(isinstance(b, int) and (b > 0 or b == -1) for b in self.block):
            raise ValueError(
                f"block must hold positive sizes, or -1 for a whole dimension; got {self.block}."
            )
        # These values follow from the fields, and are read in every step.
        tensor_scale = self.scale_rule in TENSOR_SCALE_RULES
        matrix, scale_rule = self.block[-2:], self.scale_rule.removeprefix("e2m1 ")
        derived: dict[str, object] = {
            "element_dtype": E2M1 if self.scale_rule in E2M1_RULES else self.fp8_dtype,
            "is_packed": self.fp8_dtype == E2M1,
            "scale_dtype": _SCALE_DTYPES.get(scale_rule.split()[0], torch.float32),
            "tensor_scale": tensor_scale,
            "per_tensor": all(size == -1 for size in self.block),
            "shares_matrix_amax": shares_matrix_amax(self.block, self.scale_rule),
            "amax_block": (*self.block[:-2], *(-1 for _ in matrix)) if tensor_scale else self.block,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Spec.__init__(self, state["fp8_dtype"], state["block"], state["scale_rule"])

    @property
    def packed_dim(self) -> int:
        """The dimension along which two elements share a byte."""
        return next(dim for dim, size in enumerate(self.block) if size != 1)

    @property
    def is_square(self) -> bool:
        """Whether casting a transpose gives the transpose of the cast."""
        return self.block[-1] == self.block[-2]

    @property
    def rows_share_scales(self) -> bool:
        """Whether a block has elements of several rows."""
        return self.block[0] != 1

    def largest(self) -> float:
        """Return the largest finite value of an element."""
        return largest(self.element_dtype)

    def with_one_scale(self) -> Spec:
        """Return the FP8 spec of a matrix that has one scale, as attention casts."""
        rule = "fp32" if self.scale_rule in E2M1_RULES else self.scale_rule
        if rule == self.scale_rule and self.block == (-1, -1):
            return self
        return Spec(self.fp8_dtype, (-1, -1), rule)

    def rule_of(self, given: str) -> str:
        """Return the rule of a cast that is ``given`` factors ("encode") or scales ("decode")."""
        return f"e2m1 {given}" if self.scale_rule in E2M1_RULES else given

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a tensor of ``shape`` (see the function above)."""
        return scale_shape(shape, self.block)

    def spans(self, dim: int) -> bool:
        """Whether a block spans a dimension, but not the whole matrix."""
        return self.block[dim] == -1 and not self.per_tensor

    def transpose(self) -> Spec:
        """Return the spec of the transposed matrix."""
        *leading, rows, columns = self.block
        return replace(self, block=(*leading, columns, rows))

    def expand(self, ndim: int) -> Spec:
        """Extend this matrix spec to a tensor of ``ndim`` dimensions.

        A per-tensor block covers the leading dimensions, too; any other treats them as a batch.

        >>> Spec(block=(1, 128)).expand(3).block, Spec().expand(3).block
        ((1, 1, 128), (-1, -1, -1))
        """
        if (extra := ndim - len(self.block)) == 0:
            return self
        if extra < 0:
            return replace(self, block=self.block[-ndim:] if ndim else ())
        return replace(self, block=(-1 if self.per_tensor else 1,) * extra + self.block)

    # Descriptions for people.

    @property
    def granularity(self) -> str:
        """The usual name of the block shape."""
        if self.per_tensor:
            return "tensor"
        names: dict[tuple[int, ...], str] = {(1, -1): "row", (-1, 1): "column"}
        sizes = "x".join("all" if b == -1 else str(b) for b in self.block)
        return names.get(self.block[-2:], sizes)

    @property
    def storage(self) -> str:
        """Format and granularity, such as ``e4m3 128x128``."""
        return f"{_NAMES[self.element_dtype]} {self.granularity}"

    def describe(self) -> str:
        """Describe the spec in one short phrase, as reprs and reports print it.

        >>> Spec(block=(1, 128)).describe(), NVFP4.describe(), MXFP4.describe()
        ('e4m3 1x128 fp32', 'e2m1 1x16 e4m3 fp32', 'e2m1 1x32 e8m0')
        """
        return f"{self.storage} {self.scale_rule.removeprefix('e2m1 ')}"


Float8Spec = Spec


def _check_packed_block(block: tuple[int, ...]) -> None:
    packed = [size for size in block if type(size) is not int or size != 1]
    if not all(type(b) is int and b > 0 for b in block) or len(packed) != 1 or packed[0] % 2:
        raise ValueError(
            f"block must have one even size, and 1 in all other dimensions; got {block}. "
            "Give (1, 16) for NVFP4, (1, 32) for MXFP4."
        )


def Float4Spec(
    block: tuple[int, ...] = (1, 16), scale_dtype: torch.dtype = E4M3, tensor_scale: bool = True
) -> Spec:
    """Make a spec of packed 4-bit (e2m1) storage: block shape, and one or two levels of scales.

    ``NVFP4`` and ``MXFP4`` are the usual specs.

    Args:
        block: one size per dimension, which is 1 except where elements are packed.
        scale_dtype: the format of a block's scale: ``E4M3`` or ``E8M0``.
        tensor_scale: whether a float32 scale of the whole tensor multiplies the blocks' scales.

    >>> Float4Spec((1, 1, 16)).scale_shape((8, 64, 128))
    (8, 64, 8)
    """
    if scale_dtype not in (E4M3, E8M0):
        raise ValueError(
            f"scale_dtype must be torch.float8_e4m3fn or torch.float8_e8m0fnu; got {scale_dtype}."
        )
    if not isinstance(tensor_scale, bool):
        raise ValueError(f"tensor_scale must be a bool; got {tensor_scale!r}.")
    return Spec(E2M1, block, f"e2m1 {_NAMES[scale_dtype]}{' fp32' * tensor_scale}")


NVFP4 = Float4Spec()
"""Blocks of 16 with e4m3 scales, and a float32 scale of the tensor."""
MXFP4 = Float4Spec((1, 32), E8M0, False)
"""Blocks of 32 with scales that are powers of two."""
