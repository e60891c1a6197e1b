"""Check GEMMs.  M rows, N rows of the other operand, K contraction."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product as pairs

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, FP8_DTYPES, HIGH_PRECISION_DTYPES
from float8lab.inspect.environment import why_gemm_is_emulated
from float8lab.inspect.selfcheck.grid import format_of, granularity, name_of
from float8lab.inspect.selfcheck.harness import BF16, FP32, Cases, checks
from float8lab.ops import reference

__all__ = ["GEMM_BOUND", "ExactGemm"]

_BLOCKS: tuple[tuple[int, int], ...] = ((-1, -1), (1, -1), (1, 128), (128, 128), (1, 32))
_SURE = 7.0
"""Standard deviations, or upper bounds of them, within which an error must be. A larger error has a
probability of 2 exp(-7**2 / 2) = 5e-11, by Hoeffding's inequality. The worst-case bound would have
a factor sqrt(K) in its place."""

GEMM_BOUND = (
    "dequantize and matmul in float64; bound: K float32 additions and, in FP8 or where bfloat16 "
    "emulates it, operands rounded to bfloat16"
)


class ExactGemm:
    """The result ``left @ right.mT`` in float64, and the unit of its error."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.exact = left @ right.mT
        self.size = (left.square() @ right.square().mT).sqrt()
        """The square root of the sum of the squared terms. A sum whose terms have random errors has
        an error of this size, and partial sums of terms with random signs have this size, too."""
        self.K = left.shape[-1]

    def within(
        self, cases: Cases, got: Tensor, bias: Tensor | None, out_dtype: torch.dtype, native: bool
    ) -> None:
        """Compare a result with the exact one plus ``bias``, within the error of a correct kernel.

        A native GEMM may have the error of operands rounded to bfloat16, which is 2**-9 each: its
        terms are exact, but Hopper adds 128 of them with about 13 bits, and then in float32. An
        emulated GEMM with bfloat16 output on a GPU has such operands, and partial sums in bfloat16.
        Other GEMMs have float32 operands, rounded as ``float32_matmul_precision`` allows.
        """
        if got.dtype != out_dtype:
            cases.fail(f"output is {got.dtype}, not {out_dtype}")
        if native:
            operands = 2.0**-8
        elif out_dtype == BF16 and got.is_cuda:
            operands = 2.0**-8 + 2.0**-9
        else:
            bits = {"highest": 24, "high": 11, "medium": 9}[torch.get_float32_matmul_precision()]
            operands = 2 * 2.0**-bits
        additions = _SURE * 2.0**-24 * math.sqrt(max(self.K, 1))
        bound = self.size * (_SURE * (operands + additions))
        # The result is rounded once; with a bias, which is rounded, too, it is rounded three times.
        rounding = torch.finfo(out_dtype).eps / 2
        exact = self.exact
        if bias is not None:
            bound = bound + rounding * (exact.abs() + bias.double().abs())
            exact = exact + bias.double()
        bound = bound * (1 + 2 * rounding) + rounding * exact.abs()
        smallest = torch.finfo(out_dtype).smallest_normal * torch.finfo(out_dtype).eps
        cases.within(got, exact, (bound + smallest).cpu())


def _quantize(x: Tensor, block: tuple[int, int], fp8_dtype: torch.dtype) -> list[Tensor]:
    """Quantize a matrix or batch; return FP8 data, scales and the float64 values of both."""
    if x.ndim == 3:
        matrices = [_quantize(matrix, block, fp8_dtype) for matrix in x]
        return [torch.stack(tensors) for tensors in zip(*matrices, strict=True)]
    rule = "e8m0" if block == (1, 32) else "fp32"  # GPUs take no other scales of 1x32 blocks
    q, scale, _ = reference.quantize(x, fp8_dtype, block, rule, 0.0, 1)
    return [q, scale, reference.dequantize(q, scale, block, torch.float64)]


class _Pair:
    """Two operands of a GEMM, quantized on the CPU and copied to the device."""

    def __init__(
        self, cases: Cases, left: Tensor, right: Tensor,
        blocks: tuple[tuple[int, int], tuple[int, int]],
        formats: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    ) -> None:  # fmt: skip
        self.cases, self.blocks = cases, blocks
        self.why = why_gemm_is_emulated(*blocks, cases.device, *formats)
        operands = map(_quantize, (left, right), blocks, formats)
        (*self.left, a), (*self.right, b) = cases.on_device([*operands])
        self.exact = ExactGemm(a, b)
        kinds = zip(map(format_of, formats), map(granularity, blocks), strict=True)
        sizes = "x".join(map(str, (*left.shape[:-1], *right.shape[-2:])))
        self.name = f"{sizes} {' by '.join(map(' '.join, kinds))}"

    def compare(
        self, out_dtype: torch.dtype, case: str = "", bias: Tensor | None = None,
        fast_accum: bool = False, arrange: Callable[[Tensor], Tensor] = lambda q: q,
        into: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Begin a case, compute the GEMM, ``into`` a tensor if there is one, and compare it."""
        more = (name_of(out_dtype), "bias" * (bias is not None), "fast_accum" * fast_accum, case)
        self.cases.begin(" ".join(filter(None, (self.name, *more))), self.why)
        bias = None if bias is None else bias.to(self.cases.device)
        sides = zip((self.left, self.right), self.blocks, strict=True)
        left, right = ((arrange(data), scale, block) for (data, scale), block in sides)
        if into is None:
            got = ops.scaled_mm_op(*left, *right, bias, out_dtype, fast_accum)
        else:
            ops.scaled_mm_into(got := into, *left, *right, bias, fast_accum)
        self.exact.within(self.cases, got, bias, out_dtype, not self.why)


@checks("gemms", GEMM_BOUND, "scaled_mm_op")
def _check_scaled_mm(cases: Cases) -> None:
    for blocks in pairs(_BLOCKS, _BLOCKS):
        for formats in pairs(FP8_DTYPES, FP8_DTYPES):
            pair = _Pair(cases, cases.normal(37, 250), cases.normal(50, 250), blocks, formats)
            for out_dtype in HIGH_PRECISION_DTYPES:
                for bias in (None, cases.normal(50)):
                    pair.compare(out_dtype, bias=bias)
        for fp8_dtype in FP8_DTYPES:
            operands = cases.normal(64, 512), cases.normal(48, 512)
            pair = _Pair(cases, *operands, blocks, (fp8_dtype, E4M3))
            for out_dtype in HIGH_PRECISION_DTYPES:
                pair.compare(out_dtype, fast_accum=True)
        for M, N, K in _GEMM_SHAPES:
            pair = _Pair(cases, cases.normal(M, K), cases.normal(N, K), blocks)
            pair.compare(BF16, bias=cases.normal(N))
            pair.compare(FP32)
        # There are 1001 blocks of many magnitudes; the first, the middle and the last are largest.
        # So a scale that is read from the wrong place shows.
        size = torch.exp2(cases.normal(1001) * 2)
        size[[0, 500, 1000]] = 64.0
        left = cases.normal(3, 1001 * 128) * size.repeat_interleave(128)
        pair = _Pair(cases, left, cases.normal(5, 1001 * 128), blocks)
        for out_dtype in (BF16, FP32):
            pair.compare(out_dtype, "1001 blocks of 128")
        pair = _Pair(cases, cases.normal(33, 272), cases.normal(48, 272), blocks)
        for name, arrange in (("misaligned", _misaligned), ("strided", _strided)):
            pair.compare(BF16, name, arrange=arrange)
        for name, special in _special_rows(cases).items():
            pair = _Pair(cases, special, cases.normal(20, 256), blocks)
            for out_dtype in (BF16, FP32):
                pair.compare(out_dtype, name)


_GEMM_SHAPES = ((1, 1, 1), (1, 64, 16), (0, 32, 64), (32, 0, 64), (5, 6, 0), (130, 33, 1152))


def _misaligned(q: Tensor) -> Tensor:
    """Copy values to an address that is not aligned, one byte after an aligned one."""
    copy = torch.zeros(q.numel() + 1, dtype=torch.uint8, device=q.device)[1:].view(q.shape)
    return copy.copy_(q.view(torch.uint8)).view(q.dtype)


def _strided(q: Tensor) -> Tensor:
    """Copy values to columns of a wider matrix."""
    wide = torch.zeros(q.shape[0], q.shape[1] + 31, dtype=torch.uint8, device=q.device)
    columns = wide[:, 7 : 7 + q.shape[1]]
    return columns.copy_(q.view(torch.uint8)).view(q.dtype)


def _special_rows(cases: Cases) -> dict[str, Tensor]:
    rows = {
        "zeros": torch.zeros(4, 256, dtype=FP32, device="cpu"),
        "tiny": cases.normal(4, 256) * 2.0**-100,
        "all at the largest": cases.normal(4, 256).sign() * 448,
        "NaN in a row": cases.normal(4, 256),
        "an amax of 0 among others": cases.normal(4, 256),
    }
    rows["NaN in a row"][1, 7] = torch.nan
    rows["an amax of 0 among others"][1:3, :128] = 0
    return rows


@checks("gemms", GEMM_BOUND, "scaled_mm_into")
def _check_scaled_mm_into(cases: Cases) -> None:
    for blocks in pairs(_BLOCKS, _BLOCKS):
        for M, N in ((64, 48), (37, 50)):
            pair = _Pair(cases, cases.normal(M, 272), cases.normal(N, 272), blocks)
            for out_dtype in HIGH_PRECISION_DTYPES:
                rows = torch.full((M + 6, N), torch.nan, dtype=out_dtype, device=cases.device)
                pair.compare(out_dtype, "into rows", into=rows[3 : M + 3])


@checks("gemms", GEMM_BOUND, "scaled_mm_op", name="scaled_bmm")
def _check_scaled_bmm(cases: Cases) -> None:
    for blocks in pairs(_BLOCKS, _BLOCKS):
        for B, M, N, K in ((3, 37, 48, 144), (2, 1, 1, 1), (1, 5, 7, 300), (2, 3, 0, 16)):
            pair = _Pair(cases, cases.normal(B, M, K), cases.normal(B, N, K), blocks)
            b, scale = pair.right
            by_column = b.view(torch.uint8).mT.contiguous().mT.view(b.dtype)
            for out_dtype in HIGH_PRECISION_DTYPES:
                for name, pair.right in (("", [b, scale]), ("by column", [by_column, scale])):
                    pair.compare(out_dtype, name)
