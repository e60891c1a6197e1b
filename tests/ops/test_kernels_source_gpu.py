"""Norms, activations and casts of sources on the GPU.

Three comparisons. A cast of a source has, bit for bit, the bytes of the cast of its values, both
computed on the GPU. The values of norms (given their statistics) and of activations without an
exponential are the reference's, bit for bit. Those with an exponential are the reference's within
the error of ``ex2.approx`` on a rounded argument, 2**-22 and, where the argument is x * log2(e) of
up to 2**7, 2**-17, and of ``rcp.approx``, 2**-23; then one rounding to the dtype may fall the other
way.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FP8_DTYPES
from float8lab.ops import reference
from tests.ops import forms
from tests.ops.test_kernels_gpu import each_dtype, sums_close

pytestmark = pytest.mark.gpu

# Rows and columns of the source. 512: the halves of a gradient are whole tiles; 130: not. Few,
# since each combination of kind, dtype, block and divisibility by 16 is a kernel to compile.
SHAPES = {"M5-K1": (5, 1), "M0-K64": (0, 64), "M63-K130": (63, 130), "M300-K512": (300, 512)}
BLOCKS = {
    "tensor": ((-1, -1), "fp32", 0.0), "tensor-pow2": ((-1, -1), "pow2", 0.1),
    "row": ((1, -1), "fp32", 0.0), "1x128": ((1, 128), "fp32", 0.0), "mx": ((1, 32), "e8m0", 0.0),
    "128x128": ((128, 128), "fp32", 0.0), "fallback-1x96": ((1, 96), "pow2", 0.0),
}  # fmt: skip
KINDS = [
    "layer_norm", "rms_norm", "multiply",
    *reference.ACTIVATIONS,
    *(f"{name}_backward" for name in reference.ACTIVATIONS),
]  # fmt: skip

BF16, FP32 = torch.bfloat16, torch.float32
SOME = [
    *((kind, BF16) for kind in ("layer_norm", "rms_norm", "swiglu", "multiply", "gelu_backward")),
    *(("geglu_backward", dtype) for dtype in (BF16, FP32)),
    ("layer_norm", FP32),
    ("gelu_backward", FP32),
]
"""Every branch of ``load_source``, and both widths of its inputs."""

each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
each_kind = pytest.mark.parametrize("kind", KINDS)
some_kinds = pytest.mark.parametrize(("kind", "dtype"), SOME, ids=str)
each_norm = pytest.mark.parametrize("center", [True, False], ids=["layer", "rms"])


def inputs_of(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """A source of about this shape; gradients of gated activations have an even width."""

    def matrix(columns: int) -> Tensor:
        return (torch.randn(shape[0], columns, device="cuda") * 3).to(dtype)

    rows, columns = shape
    if kind.endswith("_norm"):
        rstd, mean = torch.rand(rows, device="cuda") + 0.5, torch.randn(rows, device="cuda")
        weight, bias = torch.randn(columns, device="cuda"), torch.randn(columns, device="cuda")
        x = matrix(columns)
        return [x, rstd, weight, *([mean, bias] if kind == "layer_norm" else [])]
    if kind == "multiply":
        return [matrix(columns), matrix(columns)[:, :1].expand(-1, columns)]
    name = kind.removesuffix("_backward")
    gated = reference.ACTIVATIONS[name][1]
    if kind == name:
        return [matrix(2 * columns if gated else columns)]
    if gated:
        half = (columns + 1) // 2
        return [matrix(2 * half), matrix(half)]
    return [matrix(columns), matrix(columns)]


def same(got: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.is_cuda
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.contiguous().view(bits).cpu(), want.contiguous().view(bits).cpu())


def all_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        same(one, other)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@each_kind
def test_values(kind: str, dtype: torch.dtype) -> None:
    function = reference.ACTIVATIONS.get(kind.removesuffix("_backward"), ("norm", False))[0]
    for shape in SHAPES.values():
        inputs = inputs_of(kind, shape, dtype)
        on_cpu = [one.cpu() for one in inputs]
        got = ops.value_of_op(kind, inputs, dtype)
        want = reference.value_of(kind, on_cpu, dtype)
        if function in ("norm", "relu", "srelu"):
            same(got, want)
            continue
        size = 1.0
        for one in on_cpu:
            size *= max(one.abs().max().item() if one.numel() else 0.0, 1.0)
        exact = reference.value_of(kind, [one.double() for one in on_cpu], torch.float64)
        bound = exact.abs() * (torch.finfo(dtype).eps + 2.0**-16) + 2.0**-20 * size
        assert bool(((got.cpu().double() - exact).abs() <= bound).all())
        flipped = (got.cpu() != want).sum().item()
        assert flipped <= 0.05 * want.numel() + 2 or dtype == torch.float32


@some_kinds
def test_amax(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES.values():
        inputs = inputs_of(kind, shape, dtype)
        want = forms.amax(ops.amax_op, ops.value_of_op(kind, inputs, dtype))
        same(forms.amax(ops.amax_op, ops.Prologue(kind, inputs, dtype)), want)


@each_block
@some_kinds
def test_quantize(kind: str, block: tuple[Any, ...], dtype: torch.dtype) -> None:
    for number, shape in enumerate(SHAPES.values()):
        inputs = inputs_of(kind, shape, dtype)
        source = ops.Prologue(kind, inputs, dtype)
        value = source.value()
        fp8_dtype, align = FP8_DTYPES[number % 2], 16 if block[0] != (1, -1) else 1
        how = (fp8_dtype, *block, align)
        for transposed in (False, True):
            *got, _ = forms.quantize(ops.cast_op, source, *how, transposed=transposed)
            want = forms.quantize(ops.cast_op, value.t() if transposed else value, *how)
            all_same(got, want[:2])
        *got, sums = forms.quantize_pair(ops.cast_op, source, *how, number % 2 == 0)
        *want, _ = forms.quantize_pair(ops.cast_op, value, *how, False)
        all_same(got, want)
        sums_close(sums, value if number % 2 == 0 else value[:, :0])


@some_kinds
def test_cast(kind: str, dtype: torch.dtype) -> None:
    encode = torch.tensor([27.1], device="cuda")
    for number, shape in enumerate(SHAPES.values()):
        inputs = inputs_of(kind, shape, dtype)
        source = ops.Prologue(kind, inputs, dtype)
        value = source.value()
        slot, wanted = (torch.full((1,), ops.NO_DATA, device="cuda") for _ in range(2))
        fp8_dtype, align = FP8_DTYPES[number % 2], (16, 1)[number % 2]
        for transposed in (False, True):
            how = (fp8_dtype, (-1, -1), align)
            got = forms.encode(ops.cast_op, source, encode, slot, *how, transposed=transposed)
            oriented = value.t() if transposed else value
            same(
                got, forms.encode(ops.cast_op, oriented, encode, wanted, fp8_dtype, (-1, -1), align)
            )
            same(slot, wanted)
        arguments = (encode, None, fp8_dtype, align, True)
        *got, sums = forms.encode_pair(ops.cast_op, source, *arguments)
        all_same(got, forms.encode_pair(ops.cast_op, value, *arguments)[:2])
        sums_close(sums, value)


@some_kinds
def test_inputs_and_values_of_different_widths(kind: str, dtype: torch.dtype) -> None:
    other = FP32 if dtype == BF16 else BF16
    encode = torch.tensor([27.1], device="cuda")
    inputs = inputs_of(kind, (300, 512), other)
    source = ops.Prologue(kind, inputs, dtype)
    value = source.value()
    assert value.dtype == dtype
    got = forms.encode_pair(ops.cast_op, source, encode, None, E4M3, 16, False)[:2]
    all_same(got, forms.encode_pair(ops.cast_op, value, encode, None, E4M3, 16, False)[:2])
    how = (E5M2, (-1, -1), "fp32", 0.0, 16, False)
    got = forms.quantize_pair(ops.cast_op, source, *how)[:4]
    all_same(got, forms.quantize_pair(ops.cast_op, value, *how)[:4])


@some_kinds
def test_strided_inputs_and_a_known_amax(kind: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(kind, (70, 256), dtype)
    strided = [
        torch.cat((one, one), dim=1)[:, : one.shape[1]] if one.ndim == 2 else one for one in inputs
    ]
    by_column = [one.t().contiguous().t() if one.ndim == 2 else one for one in inputs]
    amax = forms.amax(ops.amax_op, ops.Prologue(kind, inputs, dtype))
    how = (E4M3, (-1, -1), "fp32", 0.0, 16)
    *want, found = forms.quantize(
        ops.cast_op, ops.Prologue(kind, inputs, dtype), *how, transposed=True
    )
    same(found, amax)
    for one in (inputs, strided, by_column):
        source = ops.Prologue(kind, one, dtype)
        *got, none = forms.quantize(ops.cast_op, source, *how, amax, transposed=True)
        all_same(got, want)
        assert none is None


FP8_NORM_BLOCKS = [(-1, -1), (1, -1), (1, 128), (128, 128), (1, 32), (-1, 1), (3, 5)]
NORM_SHAPES = [(1, 1), (5, 33), (0, 8), (3, 9001), (1030, 131), (70, 4096), (9, 8192)]


@each_norm
@each_dtype
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm(shape: tuple[int, int], dtype: torch.dtype, center: bool) -> None:
    x = (torch.randn(shape, device="cuda") * 3 + 1).to(dtype)
    weight = torch.randn(shape[1], device="cuda")
    bias = torch.randn(shape[1], device="cuda") if center else None
    arguments = (x, weight, bias, 1e-5, center, dtype)
    y, mean, rstd, none = ops.norm_op(*arguments)
    assert none is None
    check_norm((y, mean, rstd), x, weight, bias)
    none, *stats, amax = ops.norm_op(*arguments, None, (), False, True)
    assert none is None
    all_same(stats[not center :], (mean, rstd)[not center :])
    same(amax, forms.amax(ops.amax_op, y))
    dy = torch.randn(shape[::-1], device="cuda").to(dtype).t()
    grads = ops.norm_backward_op(dy, x, weight, mean, rstd, center, dtype)
    check_norm_backward(grads, dy, x, weight, mean, rstd)


@each_norm
@each_dtype
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("block", FP8_NORM_BLOCKS, ids=str)
def test_fp8_norm(
    block: tuple[int, int], shape: tuple[int, int], dtype: torch.dtype, center: bool
) -> None:
    x = torch.randn(shape, device="cuda") * 3 + 1
    q, scale, _ = forms.quantize(ops.cast_op, x, E4M3, block, "fp32", 0.0, 1)
    weight = torch.randn(shape[1], device="cuda")
    bias = torch.randn(shape[1], device="cuda") if center else None
    *got, _ = ops.norm_op(q, weight, bias, 1e-5, center, dtype, scale, block)
    value = ops.value_of_op("dequantize", (q, scale), dtype, block)
    check_norm(got, value, weight, bias)
    _, mean, rstd = got
    dy = torch.randn(shape[::-1], device="cuda").to(dtype).t()
    grads = ops.norm_backward_op(dy, q, weight, mean, rstd, center, dtype, scale, block)
    check_norm_backward(grads, dy, value, weight, mean, rstd)
    by_column = q.t().contiguous().t()
    *got, _ = ops.norm_op(by_column, weight, bias, 1e-5, center, dtype, scale, block)
    check_norm(got, value, weight, bias)


def check_norm(got: Sequence[Any], x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """The statistics are close to the exact ones; given them, the values are the reference's."""
    y, mean, rstd = got
    center = bias is not None
    wide = x.double()
    want_mean = wide.mean(1) if center else torch.zeros(x.shape[0], device="cuda").double()
    want_rstd = ((wide - want_mean[:, None]).square().mean(1) + 1e-5).rsqrt()
    # Sums of K terms in float32, in any order that is a tree: log2(K) + 1 roundings.
    size = wide.abs().mean(1) * 2.0**-19
    assert not center or bool(((mean - want_mean).abs() <= size).all())
    assert bool(((rstd / want_rstd - 1).abs() <= 2.0**-18).all())
    kind, more = ("layer_norm", [mean, bias]) if center else ("rms_norm", [])
    inputs = [one.cpu() for one in (x, rstd, weight, *more) if one is not None]
    same(y, reference.value_of(kind, inputs, x.dtype))


def check_norm_backward(
    got: Sequence[Any], dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor
) -> None:
    """The gradients are close to the exact ones of these statistics."""
    (dx, dweight, dbias), shape, dtype, center = got, x.shape, x.dtype, mean is not None
    wide = [None if one is None else one.double() for one in (dy, x, weight, mean, rstd)]
    want: Any = reference.norm_backward(*wide, center, torch.float64)
    assert (dx.dtype, dweight.dtype) == (dtype, torch.float32)
    xhat = (wide[1] - (wide[3][:, None] if center else 0)) * wide[4][:, None]
    terms = (wide[0] * wide[2]).abs() * wide[4][:, None]  # of dx, which may cancel
    along = (terms.mean(1, keepdim=True) if terms.numel() else terms) * (1 + xhat.abs()) ** 2
    bound = want[0].abs() * torch.finfo(dtype).eps + (terms + along) * 2.0**-16
    assert bool(((dx - want[0]).abs() <= bound).all())
    rows = max(shape[0], 1) * 2.0**-24
    assert bool(((dweight - want[1]).abs() <= (wide[0] * xhat).abs().sum(0) * 8 * rows).all())
    if center:
        assert bool(((dbias - want[2]).abs() <= wide[0].abs().sum(0) * 2 * rows).all())


def test_special_values() -> None:
    values = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3e38, -3e38, 88.0, -88.0]
    h = torch.tensor(values, device="cuda").repeat(3, 4)
    for name, (_, gated) in reference.ACTIVATIONS.items():
        dy = torch.ones(3, 20 if gated else 40, device="cuda")
        for kind, inputs in ((name, [h]), (f"{name}_backward", [h, dy])):
            got = ops.value_of_op(kind, inputs, torch.float32).cpu()
            want = reference.value_of(kind, [one.cpu() for one in inputs], torch.float32)
            torch.testing.assert_close(got, want, rtol=2.0**-16, atol=1e-30, equal_nan=True)
            source = ops.Prologue(kind, inputs, torch.float32)
            q, scale, _ = forms.quantize(ops.cast_op, source, E5M2, (1, -1), "fp32", 0.0, 16)
            value = source.value()
            wanted_q, wanted_scale, _ = forms.quantize(
                ops.cast_op, value, E5M2, (1, -1), "fp32", 0.0, 16
            )
            same(scale, wanted_scale)
            nan = wanted_q.float().isnan()
            assert torch.equal(q.float().isnan(), nan)
            assert torch.equal(q.float()[~nan], wanted_q.float()[~nan])
