"""Norms, activations and casts of prologues on the GPU.

There are three comparisons. A cast of a prologue has the bytes of the cast of its values, both
computed on the GPU. The values of norms (given their statistics) and of activations without an
exponential equal the reference bit for bit. Activations with an exponential equal the reference
within the errors of ``ex2.approx`` on a rounded argument and of ``rcp.approx``, 2**-23. The former
is 2**-22, or 2**-17 if the argument is x * log2(e) of up to 2**7. The rounding to the dtype may
then flip.
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
from tests.ops.test_kernels_gpu import assert_sums_close, each_dtype

pytestmark = pytest.mark.gpu

# Rows and columns of the prologue. With 512 columns the halves of a gradient are full tiles, with
# 130 they are not. There are few shapes, because each combination of kind, dtype, block and
# divisibility by 16 compiles a kernel.
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
SOME_KINDS = [
    *((kind, BF16) for kind in ("layer_norm", "rms_norm", "swiglu", "multiply", "gelu_backward")),
    *(("geglu_backward", dtype) for dtype in (BF16, FP32)),
    ("layer_norm", FP32),
    ("gelu_backward", FP32),
]
"""Kinds that run every branch of ``load_source``, with both widths of its inputs."""

each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
each_kind = pytest.mark.parametrize("kind", KINDS)
some_kinds = pytest.mark.parametrize(("kind", "dtype"), SOME_KINDS, ids=str)
each_norm = pytest.mark.parametrize("center", [True, False], ids=["layer", "rms"])


def inputs_of(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Inputs of a prologue of about this shape; gradients of gated activations have even widths."""

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


def assert_same(got: Tensor, want: Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.is_cuda
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.contiguous().view(bits).cpu(), want.contiguous().view(bits).cpu())


def assert_all_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for actual, expected in zip(got, want, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@each_kind
def test_values_of_prologues_equal_the_reference(kind: str, dtype: torch.dtype) -> None:
    function = reference.ACTIVATIONS.get(kind.removesuffix("_backward"), ("norm", False))[0]
    for shape in SHAPES.values():
        inputs = inputs_of(kind, shape, dtype)
        on_cpu = [tensor.cpu() for tensor in inputs]
        got = ops.value_of_op(kind, inputs, dtype)
        want = reference.value_of(kind, on_cpu, dtype)
        if function in ("norm", "relu", "srelu"):
            assert_same(got, want)
            continue
        magnitude = 1.0
        for tensor in on_cpu:
            magnitude *= max(tensor.abs().max().item() if tensor.numel() else 0.0, 1.0)
        exact = reference.value_of(kind, [tensor.double() for tensor in on_cpu], torch.float64)
        bound = exact.abs() * (torch.finfo(dtype).eps + 2.0**-16) + 2.0**-20 * magnitude
        assert bool(((got.cpu().double() - exact).abs() <= bound).all())
        flipped = (got.cpu() != want).sum().item()
        assert flipped <= 0.05 * want.numel() + 2 or dtype == torch.float32


@some_kinds
def test_the_amax_of_a_prologue_equals_that_of_its_values(kind: str, dtype: torch.dtype) -> None:
    for shape in SHAPES.values():
        inputs = inputs_of(kind, shape, dtype)
        want = forms.amax(ops.amax_op, ops.value_of_op(kind, inputs, dtype))
        assert_same(forms.amax(ops.amax_op, ops.Prologue(kind, inputs, dtype)), want)


@each_block
@some_kinds
def test_quantizing_a_prologue_equals_quantizing_its_values(
    kind: str, block: tuple[Any, ...], dtype: torch.dtype
) -> None:
    for index, shape in enumerate(SHAPES.values()):
        inputs = inputs_of(kind, shape, dtype)
        prologue = ops.Prologue(kind, inputs, dtype)
        value = prologue.value()
        fp8_dtype, align = FP8_DTYPES[index % 2], 16 if block[0] != (1, -1) else 1
        options = (fp8_dtype, *block, align)
        for columnwise in (False, True):
            *got, _ = forms.quantize(ops.cast_op, prologue, *options, columnwise=columnwise)
            want = forms.quantize(ops.cast_op, value.t() if columnwise else value, *options)
            assert_all_same(got, want[:2])
        *got, sums = forms.quantize_pair(ops.cast_op, prologue, *options, index % 2 == 0)
        *want, _ = forms.quantize_pair(ops.cast_op, value, *options, False)
        assert_all_same(got, want)
        assert_sums_close(sums, value if index % 2 == 0 else value[:, :0])


@some_kinds
def test_casting_a_prologue_with_a_given_scale_equals_casting_its_values(
    kind: str, dtype: torch.dtype
) -> None:
    encode = torch.tensor([27.1], device="cuda")
    for index, shape in enumerate(SHAPES.values()):
        inputs = inputs_of(kind, shape, dtype)
        prologue = ops.Prologue(kind, inputs, dtype)
        value = prologue.value()
        slot, expected_slot = (torch.full((1,), ops.NO_DATA, device="cuda") for _ in range(2))
        fp8_dtype, align = FP8_DTYPES[index % 2], (16, 1)[index % 2]
        for columnwise in (False, True):
            options = (fp8_dtype, (-1, -1), align)
            got = forms.encode(ops.cast_op, prologue, encode, slot, *options, columnwise=columnwise)
            oriented = value.t() if columnwise else value
            assert_same(
                got,
                forms.encode(
                    ops.cast_op, oriented, encode, expected_slot, fp8_dtype, (-1, -1), align
                ),
            )
            assert_same(slot, expected_slot)
        arguments = (encode, None, fp8_dtype, align, True)
        *got, sums = forms.encode_pair(ops.cast_op, prologue, *arguments)
        assert_all_same(got, forms.encode_pair(ops.cast_op, value, *arguments)[:2])
        assert_sums_close(sums, value)


@some_kinds
def test_prologues_whose_inputs_and_values_have_different_widths_equal_their_values(
    kind: str, dtype: torch.dtype
) -> None:
    input_dtype = FP32 if dtype == BF16 else BF16
    encode = torch.tensor([27.1], device="cuda")
    inputs = inputs_of(kind, (300, 512), input_dtype)
    prologue = ops.Prologue(kind, inputs, dtype)
    value = prologue.value()
    assert value.dtype == dtype
    got = forms.encode_pair(ops.cast_op, prologue, encode, None, E4M3, 16, False)[:2]
    assert_all_same(got, forms.encode_pair(ops.cast_op, value, encode, None, E4M3, 16, False)[:2])
    options = (E5M2, (-1, -1), "fp32", 0.0, 16, False)
    got = forms.quantize_pair(ops.cast_op, prologue, *options)[:4]
    assert_all_same(got, forms.quantize_pair(ops.cast_op, value, *options)[:4])


@some_kinds
def test_strided_inputs_and_a_given_amax_give_equal_results(kind: str, dtype: torch.dtype) -> None:
    inputs = inputs_of(kind, (70, 256), dtype)
    strided = [
        torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]] if tensor.ndim == 2 else tensor
        for tensor in inputs
    ]
    by_column = [tensor.t().contiguous().t() if tensor.ndim == 2 else tensor for tensor in inputs]
    amax = forms.amax(ops.amax_op, ops.Prologue(kind, inputs, dtype))
    options = (E4M3, (-1, -1), "fp32", 0.0, 16)
    *want, computed_amax = forms.quantize(
        ops.cast_op, ops.Prologue(kind, inputs, dtype), *options, columnwise=True
    )
    assert_same(computed_amax, amax)
    for tensor in (inputs, strided, by_column):
        prologue = ops.Prologue(kind, tensor, dtype)
        *got, no_amax = forms.quantize(ops.cast_op, prologue, *options, amax, columnwise=True)
        assert_all_same(got, want)
        assert no_amax is None


FP8_NORM_BLOCKS = [(-1, -1), (1, -1), (1, 128), (128, 128), (1, 32), (-1, 1), (3, 5)]
NORM_SHAPES = [(1, 1), (5, 33), (0, 8), (3, 9001), (1030, 131), (70, 4096), (9, 8192)]


@each_norm
@each_dtype
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm_and_its_gradients_are_near_the_exact_ones(
    shape: tuple[int, int], dtype: torch.dtype, center: bool
) -> None:
    x = (torch.randn(shape, device="cuda") * 3 + 1).to(dtype)
    weight = torch.randn(shape[1], device="cuda")
    bias = torch.randn(shape[1], device="cuda") if center else None
    arguments = (x, weight, bias, 1e-5, center, dtype)
    y, mean, rstd, no_output = ops.norm_op(*arguments)
    assert no_output is None
    check_norm((y, mean, rstd), x, weight, bias)
    no_output, *stats, amax = ops.norm_op(*arguments, None, (), False, True)
    assert no_output is None
    assert_all_same(stats[not center :], (mean, rstd)[not center :])
    assert_same(amax, forms.amax(ops.amax_op, y))
    dy = torch.randn(shape[::-1], device="cuda").to(dtype).t()
    grads = ops.norm_backward_op(dy, x, weight, mean, rstd, center, dtype)
    check_norm_backward(grads, dy, x, weight, mean, rstd)


@each_norm
@each_dtype
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("block", FP8_NORM_BLOCKS, ids=str)
def test_norm_of_fp8_data_equals_that_of_its_values(
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
    """Asserts statistics close to the exact ones, and the reference's values for them."""
    y, mean, rstd = got
    center = bias is not None
    x64 = x.double()
    want_mean = x64.mean(1) if center else torch.zeros(x.shape[0], device="cuda").double()
    want_rstd = ((x64 - want_mean[:, None]).square().mean(1) + 1e-5).rsqrt()
    # A sum of K terms in float32 in the order of a tree has log2(K) + 1 roundings.
    size = x64.abs().mean(1) * 2.0**-19
    assert not center or bool(((mean - want_mean).abs() <= size).all())
    assert bool(((rstd / want_rstd - 1).abs() <= 2.0**-18).all())
    kind, statistics_and_bias = ("layer_norm", [mean, bias]) if center else ("rms_norm", [])
    inputs = [
        tensor.cpu() for tensor in (x, rstd, weight, *statistics_and_bias) if tensor is not None
    ]
    assert_same(y, reference.value_of(kind, inputs, x.dtype))


def check_norm_backward(
    got: Sequence[Any], dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor | None, rstd: Tensor
) -> None:
    """Asserts gradients close to the exact ones for these statistics."""
    (dx, dweight, dbias), shape, dtype, center = got, x.shape, x.dtype, mean is not None
    exact = [None if tensor is None else tensor.double() for tensor in (dy, x, weight, mean, rstd)]
    want: Any = reference.norm_backward(*exact, center, torch.float64)
    assert (dx.dtype, dweight.dtype) == (dtype, torch.float32)
    xhat = (exact[1] - (exact[3][:, None] if center else 0)) * exact[4][:, None]
    terms = (exact[0] * exact[2]).abs() * exact[4][:, None]  # terms of dx, which may cancel
    mean_terms = (terms.mean(1, keepdim=True) if terms.numel() else terms) * (1 + xhat.abs()) ** 2
    bound = want[0].abs() * torch.finfo(dtype).eps + (terms + mean_terms) * 2.0**-16
    assert bool(((dx - want[0]).abs() <= bound).all())
    rows = max(shape[0], 1) * 2.0**-24
    assert bool(((dweight - want[1]).abs() <= (exact[0] * xhat).abs().sum(0) * 8 * rows).all())
    if center:
        assert bool(((dbias - want[2]).abs() <= exact[0].abs().sum(0) * 2 * rows).all())


def test_special_values_of_activations_equal_the_reference() -> None:
    values = [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3e38, -3e38, 88.0, -88.0]
    h = torch.tensor(values, device="cuda").repeat(3, 4)
    for name, (_, gated) in reference.ACTIVATIONS.items():
        dy = torch.ones(3, 20 if gated else 40, device="cuda")
        for kind, inputs in ((name, [h]), (f"{name}_backward", [h, dy])):
            got = ops.value_of_op(kind, inputs, torch.float32).cpu()
            want = reference.value_of(kind, [tensor.cpu() for tensor in inputs], torch.float32)
            torch.testing.assert_close(got, want, rtol=2.0**-16, atol=1e-30, equal_nan=True)
            prologue = ops.Prologue(kind, inputs, torch.float32)
            q, scale, _ = forms.quantize(ops.cast_op, prologue, E5M2, (1, -1), "fp32", 0.0, 16)
            value = prologue.value()
            expected_q, expected_scale, _ = forms.quantize(
                ops.cast_op, value, E5M2, (1, -1), "fp32", 0.0, 16
            )
            assert_same(scale, expected_scale)
            nan = expected_q.float().isnan()
            assert torch.equal(q.float().isnan(), nan)
            assert torch.equal(q.float()[~nan], expected_q.float()[~nan])
