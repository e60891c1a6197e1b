"""count_gemms counts the GEMMs that reach the dispatcher, under the module that calls them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import recipes


def test_modules_that_were_not_converted_are_counted_too():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    float8lab.convert_to_float8(model, exclude=["1"])
    with float8lab.count_gemms() as counts:
        model(torch.randn(4, 8)).sum().backward()
    assert counts.fp8_by_module == {"0": 2}  # the input needs no gradient
    assert counts.high_precision_by_module == {"1": 3}
    assert (counts.fp8, counts.high_precision) == (2, 3)


def test_gemms_outside_modules_are_counted_without_a_name():
    with float8lab.count_gemms() as counts:
        torch.randn(4, 8) @ torch.randn(8, 4)
        torch.bmm(torch.randn(2, 4, 8), torch.randn(2, 8, 4))
    assert counts.high_precision_by_module == {"": 2}
    assert "(outside any module)" in str(counts)


def test_grouped_gemms_are_counted_as_high_precision():
    x = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    experts = torch.randn(2, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    offsets = torch.tensor([16, 32], dtype=torch.int32)
    with float8lab.count_gemms() as counts:
        torch._grouped_mm(x, experts, offs=offsets).square().sum().backward()
        F.grouped_mm(x, experts, offs=offsets)
    assert (counts.fp8, counts.high_precision) == (0, 4)


def test_scaled_gemms_of_torch_are_counted_as_fp8():
    """The grouped GEMM has no CPU kernel; the count includes the attempt, which then fails."""
    x = torch.randn(32, 16).to(torch.float8_e4m3fn)
    unit_scale = torch.ones(())
    with float8lab.count_gemms() as counts:
        torch._scaled_mm(x, x.t(), unit_scale, unit_scale, out_dtype=torch.bfloat16)
        with pytest.raises((NotImplementedError, RuntimeError, ValueError)):
            torch._scaled_grouped_mm(x, x.view(2, 16, 16).mT, unit_scale, unit_scale)
    assert (counts.fp8, counts.high_precision) == (2, 0)


def test_gemms_of_float8_tensors_are_counted_by_the_precision_they_run_in():
    x = float8lab.quantize(torch.randn(16, 16)).requires_grad_()
    column = float8lab.quantize(torch.randn(16, 16), block=(-1, 1))
    with float8lab.count_gemms() as counts:
        y = F.linear(x, x) @ x
        torch.bmm(x.view(2, 8, 16), x.view(2, 16, 8))
    assert (counts.fp8, counts.high_precision) == (3, 0)
    with float8lab.count_gemms() as counts, float8lab.fallback("silent"):
        y.sum().backward()  # the gradient of the last x has no FP8 operand
        column @ column
    assert (counts.fp8, counts.high_precision) == (3, 2)


def test_gemms_of_a_recompute_are_counted():
    model = float8lab.convert_to_float8(nn.Sequential(nn.Linear(8, 8)))
    x = torch.randn(4, 8, requires_grad=True)
    with float8lab.count_gemms() as counts:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert counts.fp8 == 4


def test_formats_without_an_fp8_gemm_count_as_high_precision():
    layer = float8lab.convert_to_float8(nn.Linear(8, 8), recipes.MXFP8BlockScaling())
    with float8lab.count_gemms() as counts:
        layer(torch.randn(4, 8))
    assert (counts.fp8, counts.high_precision) == (0, 1)


def test_nothing_is_counted_outside_the_block():
    layer = float8lab.convert_to_float8(nn.Linear(8, 8))
    with float8lab.count_gemms() as counts:
        pass
    layer(torch.randn(4, 8))
    assert counts.fp8 == 0
