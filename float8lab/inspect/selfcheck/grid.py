"""Define matrices, layouts and recipes that the checks of casts share, and their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from float8lab.checkpoints.source import dtype_name as name_of
from float8lab.formats import E4M3, FP8_DTYPES, Float8Spec
from float8lab.inspect.selfcheck.harness import BF16, FP16, FP32, Cases
from float8lab.ops import Prologue

__all__ = [
    "LAYOUTS", "NORMS", "RECIPES", "QuantizeOptions", "format_of", "given", "granularity",
    "matrices", "name_of", "quantize_cases", "special", "with_infinities",
]  # fmt: skip

# The grid. Every combination of dtype, format, block and divisibility by 16 is a kernel to compile
# on a GPU, which takes 0.2 s or more. So a check runs only some of them, and the tests run all.

RECIPES: dict[str, tuple[tuple[int, int], str, float]] = {
    "per tensor": ((-1, -1), "fp32", 0.0),
    "per tensor pow2 eps": ((-1, -1), "pow2", 0.1),
    "per row": ((1, -1), "fp32", 0.0),
    "1x128": ((1, 128), "fp32", 0.0),
    "128x128": ((128, 128), "pow2", 0.0),
    "1x32 e8m0": ((1, 32), "e8m0", 0.0),
    "16x64": ((16, 64), "fp32", 0.0),
    "1x96": ((1, 96), "fp32", 0.0),
    "5 rows": ((5, -1), "pow2", 0.0),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "every second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "misaligned": lambda x: torch.cat((x[:, :1], x), dim=1)[:, 1:],
}
_SHAPES = (
    ((272, 1040), BF16, "contiguous", 16),
    ((63, 130), FP32, "transposed", 1),
    ((63, 130), FP16, "every second", 16),
    ((63, 130), BF16, "misaligned", 16),
    ((1, 1), FP32, "contiguous", 1),
    ((0, 64), BF16, "contiguous", 16),
    ((33, 0), FP32, "contiguous", 1),
)
_SPECIAL = {
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "inf": [torch.inf, -torch.inf, 1.0, 500.0],
    "NaN": [torch.nan, -torch.nan, 1.0, 0.0],
    "subnormal": [2.0**-149, -(2.0**-140), 0.0, 2.0**-127],
    "small": [2.0**-120, 2.0**-126, 2.0**-121, -(2.0**-130)],
    "amax whose encode factor overflows": [2.0**-128, 2.0**-129, 2.0**-149, 0.0],
    "amax at the least e8m0": [448 * 2.0**-126, 448 * 2.0**-127, 1e-44, 0.0],
    "largest": [3.4028234663852886e38, -3.4e38, 1e38, 1.0],
    "edge of e4m3": [448.0, 464.0, 463.9, -479.0],
    "edge of e5m2": [57344.0, 61440.0, -61439.0, 65504.0],
    "halfway": [448.0, 1.0625, 1.1875, 17.0],
}
NORMS = ("layer_norm", "rms_norm")


def matrices(
    cases: Cases, variant: int | None = None, *, infinities: bool = False
) -> Iterator[tuple[int, str, Tensor, int]]:
    """Yield number, name, matrix and alignment of each matrix.

    Without a ``variant`` these are all matrices, else the first, one that the variant picks, and
    the empty ones. If ``infinities`` is set, every second matrix has infinities and NaN.
    """
    for number, (shape, dtype, layout, align) in enumerate(_SHAPES):
        if variant is None or number in (0, 1 + variant % 4) or 0 in shape:
            name = f"{shape[0]}x{shape[1]} {name_of(dtype)} {layout} align {align}"
            x = cases.matrix(shape, dtype)
            x = with_infinities(x) if infinities and number % 2 else x
            yield number, name, LAYOUTS[layout](x), align


def with_infinities(x: Tensor) -> Tensor:
    """Copy a matrix, and put infinities and NaN next to each other at several places."""
    x = x.clone()
    for start, value in enumerate((torch.inf, torch.nan, -torch.inf)):
        x.diagonal(start)[:: 37 + start] = value
    return x


def special() -> Iterator[tuple[str, Tensor]]:
    for name, values in _SPECIAL.items():
        yield name, torch.tensor(values, dtype=FP32, device="cpu").repeat(3, 40)


def format_of(fp8_dtype: torch.dtype) -> str:
    return "e4m3" if fp8_dtype == E4M3 else "e5m2"


def granularity(block: Sequence[int]) -> str:
    return Float8Spec(block=tuple(block)).granularity


def given(x: Tensor | Prologue) -> tuple[str, Sequence[Tensor], torch.dtype]:
    """Return the first arguments of a cast of a matrix or a prologue."""
    return x[:3] if isinstance(x, Prologue) else ("", [x], x.dtype)


QuantizeOptions = tuple[torch.dtype, tuple[int, int], str, float, int]
"""FP8 format, block, scale rule, epsilon of the amax, and alignment."""


def quantize_cases(cases: Cases) -> Iterator[tuple[Tensor, QuantizeOptions]]:
    """Begin each case; yield its matrix, and the options to quantize it."""
    for index, (recipe, options) in enumerate(RECIPES.items()):
        for number, name, x, align in matrices(cases, index):
            fp8_dtype = FP8_DTYPES[(index + number) % 2]
            cases.begin(f"{name} {format_of(fp8_dtype)} {recipe}")
            yield x, (fp8_dtype, *options, align)
            if number == 0:
                cases.begin(f"{name} {format_of(fp8_dtype)} {recipe} with infinities")
                yield with_infinities(x), (fp8_dtype, *options, align)
        for name, x in special():
            cases.begin(f"{name} e4m3 {recipe}")
            yield x, (E4M3, *options, 16)
