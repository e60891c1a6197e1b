"""Compute the floor of a time: GEMM times and copy bandwidth, measured in the same run.

The floor of a row is the time of its GEMMs alone, on the same operands with the same accumulation,
plus the time to move the necessary bytes at the rate of a large copy. Bytes are counted as if each
elementwise op were fused with the cast that reads it: a tensor is read once for each unavoidable
pass over it, and written once for each orientation that a GEMM needs.

M tokens, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.common import Timing
from benchmarks.shapes import LinearShape
from float8lab import ops
from float8lab.formats import E4M3, Float8Spec
from float8lab.ops.gemm import may_multiply
from float8lab.ops.reference import ALIGN
from float8lab.recipes import Recipe

__all__ = ["BF16", "Floor", "Gemm", "GemmOperands", "cast_bytes", "gemms_of_recipe", "read_passes"]

COPY_BYTES = 2 * 2**30
"""The bytes of the tensor whose copy measures the bandwidth."""
CEILING_SIZE = 8192
"""The rows, columns and contraction of the GEMM whose rate is called the ceiling."""


class Gemm(NamedTuple):
    """The formats and the accumulation of ``a @ b.T``; a and b are bfloat16 without formats."""

    a: Float8Spec | None = None
    b: Float8Spec | None = None
    fast_accum: bool = False

    def operands(self, M: int, N: int, K: int, generator: torch.Generator) -> GemmOperands:
        """Draw normal values and cast them to the formats."""
        a, b = (_normal(rows, K, generator) for rows in (M, N))
        return GemmOperands(a, b, self)


class GemmOperands:
    """The operands of one GEMM: ``a`` [M, K] and ``b`` [N, K]."""

    def __init__(self, a: Tensor, b: Tensor, gemm: Gemm) -> None:
        self.gemm = gemm
        self.a: tuple[Tensor, Tensor | None]
        self.b: tuple[Tensor, Tensor | None]
        if gemm.a is None or gemm.b is None:
            self.a, self.b = (a, None), (b, None)
        else:
            self.a, self.b = _quantize(a, gemm.a), _quantize(b, gemm.b)

    def multiply(self) -> Tensor:
        """Run the GEMM with a bfloat16 result, by the op that the layers call."""
        (a, a_scale), (b, b_scale) = self.a, self.b
        spec_a, spec_b, fast = self.gemm
        if spec_a is None or spec_b is None:
            return a @ b.t()
        out: Tensor = ops.scaled_mm_op(
            a, a_scale, spec_a.block, b, b_scale, spec_b.block, None, torch.bfloat16, fast
        )
        return out

    def exact(self) -> Tensor:
        """Compute the GEMM of the same values in float64."""
        left, right = (
            x.double() if spec is None or scale is None
            else ops.value_of_op("dequantize", (x, scale), torch.float32, spec.block).double()
            for (x, scale), spec in ((self.a, self.gemm.a), (self.b, self.gemm.b))
        )  # fmt: skip
        return left @ right.t()


BF16 = Gemm()
FASTEST = Gemm(Float8Spec(E4M3), Float8Spec(E4M3), True)


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    return torch.randn(rows, columns, generator=generator, device=device).bfloat16()


def _quantize(x: Tensor, spec: Float8Spec) -> tuple[Tensor, Tensor]:
    how = (spec.fp8_dtype, spec.block, spec.scale_rule, 0.0, ALIGN)
    q, scale, *_ = ops.cast_op("", [x], x.dtype, *how)
    return q, scale


def gemms_of_recipe(recipe: Recipe | None) -> dict[str, Gemm] | None:
    """Return a linear layer's three GEMMs; None if the recipe's formats have no FP8 GEMM."""
    if recipe is None:
        return dict.fromkeys(("fprop", "dgrad", "wgrad"), BF16)
    plan = recipe.linear
    if plan.x.scale_rule == "e8m0":
        return None
    return {name: BF16 if gemm is None else Gemm(*gemm) for name, gemm in plan.gemms().items()}


def read_passes(recipe: Recipe) -> int:
    """Return how often a tensor must be read to be cast in both orientations.

    The tensor is read twice if a scale depends on an entire column or the entire tensor and is not
    known before: the second pass uses the scale. A row or 128x128 tile stays on the chip meanwhile.

    >>> from float8lab import recipes
    >>> read_passes(recipes.DelayedScaling()), read_passes(recipes.Float8CurrentScaling())
    (1, 2)
    """
    spans = -1 in recipe.linear.x.block
    return 2 if spans and not recipe.linear.delayed else 1


def cast_bytes(recipe: Recipe | None, elements: int, *, read: float = 2.0) -> float:
    """Count the bytes that casting ``elements`` in both orientations moves; none in bfloat16.

    Args:
        recipe: the recipe that casts; None is bfloat16.
        elements: the number of elements of the tensor.
        read: the bytes that one pass reads for each element.
    """
    return 0.0 if recipe is None else elements * (read * read_passes(recipe) + 2.0)


class Floor:
    """The rates of a device, each of which is measured once, on its first use.

    Args:
        device: the device to measure.
        time: returns the ``Timing`` of a function's work on the device.
        copy_bytes: the size of the copied tensor.
        ceiling_size: the size of the square GEMM.
    """

    def __init__(
        self,
        device: torch.device,
        time: Callable[[Callable[[], object]], Timing],
        *,
        copy_bytes: int = COPY_BYTES,
        ceiling_size: int = CEILING_SIZE,
    ) -> None:
        self.device, self.time = device, time
        self._copy_bytes, self._ceiling_size = copy_bytes, ceiling_size
        self._gemm_ms: dict[tuple[int, int, int, Gemm], float] = {}

    @cached_property
    def copy_rate(self) -> float:
        """Measure the TB/s, read and written, of a large copy on the device."""
        source = torch.zeros(self._copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * self._copy_bytes / self.time(lambda: target.copy_(source)).median / 1e9

    def move_ms(self, amount: float) -> float:
        """Return the ms to move so many bytes, read or written, at the rate of a copy."""
        return amount / self.copy_rate / 1e9

    def gemm_ms(self, M: int, N: int, K: int, gemm: Gemm) -> float:
        """Measure the ms of one GEMM alone, from a cold cache."""
        key = (M, N, K, gemm)
        if key not in self._gemm_ms:
            generator = torch.Generator(self.device).manual_seed(0)
            self._gemm_ms[key] = self.time(gemm.operands(M, N, K, generator).multiply).median
        return self._gemm_ms[key]

    def ceiling(self, *, fp8: bool) -> float:
        """Measure TFLOP/s of a large square GEMM: bfloat16, or fast-accumulating FP8 per tensor."""
        size = self._ceiling_size
        return 2 * size**3 / self.gemm_ms(size, size, size, FASTEST if fp8 else BF16) / 1e9

    def gemms_ms(self, shapes: Sequence[LinearShape], recipe: Recipe | None) -> float | None:
        """Return the ms of the three GEMMs of all layers; None if the recipe has no FP8 GEMMs."""
        gemms = gemms_of_recipe(recipe)
        if gemms is None or not all(map(self._supported, gemms.values())):
            return None
        return sum(
            self.gemm_ms(*sizes, gemms[name])
            for shape in shapes
            for name, sizes in shape.gemms().items()
        )

    def _supported(self, gemm: Gemm) -> bool:
        if gemm.a is None or gemm.b is None:
            return True
        a, b = gemm.a, gemm.b
        return may_multiply(a.block, b.block, self.device, a_dtype=a.fp8_dtype, b_dtype=b.fp8_dtype)

    def describe(self) -> dict[str, str]:
        """Describe both rates for the header of a benchmark."""
        size = self._ceiling_size
        bf16, fp8 = self.ceiling(fp8=False), self.ceiling(fp8=True)
        return {
            "copy": f"{self.copy_rate:.2f} TB/s, read and written",
            "ceiling": f"bfloat16 GEMM {bf16:.0f}, FP8 GEMM {fp8:.0f} TFLOP/s ({size}^3, per "
            "tensor, fast accumulation)",
        }
