"""The references of norms and activations equal torch's in float64, with every gradient."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.ops import Prologue, reference
from tests.ops import forms

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "srelu": lambda x: F.relu(x).square(),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "geglu": lambda x: F.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "reglu": lambda x: F.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "sreglu": lambda x: F.relu(x.chunk(2, -1)[0]).square() * x.chunk(2, -1)[1],
    "qgeglu": lambda x: ACTIVATIONS["qgelu"](x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "glu": lambda x: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "clamped_swiglu_interleaved": lambda x: (
        ACTIVATIONS["qgelu"](x[..., ::2].clamp(max=7)) * (x[..., 1::2].clamp(-7, 7) + 1)
    ),
}
"""Each activation, composed of torch's functions."""

SHAPES = {"M5-K33": (5, 33), "M1-K1": (1, 1), "M0-K8": (0, 8), "M64-K300": (64, 300)}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_activation = pytest.mark.parametrize("name", ACTIVATIONS)


def test_every_activation_is_tested() -> None:
    assert set(ACTIVATIONS) == set(reference.ACTIVATIONS)


@each_activation
def test_activations_and_their_gradients_equal_torch_in_float64(name: str) -> None:
    h = (torch.randn(7, 30, dtype=torch.float64) * 4).requires_grad_()
    want = ACTIVATIONS[name](h)
    dy = torch.randn_like(want)
    (dh,) = torch.autograd.grad(want, h, dy)
    h = h.detach()
    got = reference.value_of(name, [h], torch.float64)
    torch.testing.assert_close(got, want.detach(), rtol=1e-13, atol=1e-13)
    got = reference.value_of(f"{name}_backward", [h, dy], torch.float64)
    torch.testing.assert_close(got, dh, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@each_activation
def test_activations_are_rounded_once(name: str, dtype: torch.dtype) -> None:
    h = (torch.randn(9, 64) * 3).to(dtype)
    exact = ACTIVATIONS[name](h.double())
    got = reference.value_of(name, [h], dtype)
    # The bound is half a unit in the last place, and a few units of float32 before the rounding:
    # gelu cancels to -3 * eps32.
    bound = exact.abs() * (torch.finfo(dtype).eps / 2 + 2.0**-20) + 2.0**-24
    assert got.dtype == dtype
    assert bool(((got - exact).abs() <= bound).all())


@each_activation
def test_activations_of_special_values_equal_torch(name: str) -> None:
    h = torch.tensor([[torch.nan, torch.inf, 0.0, -0.0, 1e-40, 100.0, -100.0, 1.0]])
    got = reference.value_of(name, [h], torch.float32)
    want = ACTIVATIONS[name](h)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("center", [True, False], ids=["layer", "rms"])
@each_shape
def test_norms_and_their_gradients_equal_torch_in_float64(
    shape: tuple[int, int], center: bool
) -> None:
    x = (torch.randn(shape, dtype=torch.float64) * 3 + 1).requires_grad_()
    weight = torch.randn(shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.randn(shape[1], dtype=torch.float64, requires_grad=True) if center else None
    if center:
        want = F.layer_norm(x, shape[1:], weight, bias, 1e-3)
    else:
        want = F.rms_norm(x, shape[1:], weight, 1e-3)
    dy = torch.randn_like(want)
    inputs = [x, weight, *([] if bias is None else [bias])]
    gradients = torch.autograd.grad(want, inputs, dy)
    x, weight = x.detach(), weight.detach()
    bias = None if bias is None else bias.detach()
    got, mean, rstd, _ = reference.norm(x, weight, bias, 1e-3, center, torch.float64)
    torch.testing.assert_close(got, want.detach(), rtol=1e-12, atol=1e-12)
    assert (mean is not None) == center
    returned = reference.norm_backward(dy, x, weight, mean, rstd, center, torch.float64)
    for actual, expected in zip(returned, gradients, strict=False):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11)


def test_statistics_are_float32_for_every_input_dtype() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    x[0, 0] = 256.0
    _, mean, rstd, _ = reference.norm(x, torch.ones(4096), torch.zeros(4096), 0.0, True, x.dtype)
    exact = x.double()
    assert mean.dtype == rstd.dtype == torch.float32
    torch.testing.assert_close(mean.double(), exact.mean(1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rstd.double(), exact.var(1, correction=0).rsqrt(), rtol=1e-6, atol=0)


def test_a_norm_of_a_constant_row_is_the_bias() -> None:
    x, bias = torch.full((2, 8), 3.0), torch.arange(8.0)
    y, *_ = reference.norm(x, torch.ones(8), bias, 1e-5, True, torch.float32)
    torch.testing.assert_close(y, bias.expand(2, 8), rtol=0, atol=0)


PROLOGUE_KINDS = [
    "layer_norm", "rms_norm", "multiply", "gelu", "swiglu", "gelu_backward", "swiglu_backward",
]  # fmt: skip


def prologue_inputs(kind: str) -> list[Tensor]:
    x = torch.randn(20, 70).bfloat16()
    vectors = [torch.rand(20) + 0.5, torch.randn(70), torch.randn(20), torch.randn(70)]
    return {
        "layer_norm": [x, *vectors], "rms_norm": [x, *vectors[:2]], "multiply": [x, x.flip(0)],
        "gelu_backward": [x, x.flip(0)], "swiglu_backward": [x, x[:, 3:38]],
    }.get(kind, [x])  # fmt: skip


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128), (1, 32)])
@pytest.mark.parametrize("kind", PROLOGUE_KINDS)
def test_a_cast_of_a_prologue_has_the_bytes_of_the_cast_of_its_values(
    kind: str, block: tuple[int, int]
) -> None:
    prologue = Prologue(kind, prologue_inputs(kind), torch.bfloat16)
    value = reference.value_of(*prologue[:3])
    for columnwise in (False, True):
        oriented = value.t() if columnwise else value
        want = reference.quantize(oriented, E4M3, block, "fp32", 0.0, 16)
        options = (E4M3, block, "fp32", 0.0, 16)
        got = forms.quantize(reference.cast, prologue, *options, columnwise=columnwise)
        for actual, expected in zip(got[:2], want[:2], strict=True):
            assert torch.equal(actual.float(), expected.float())
        slot, expected_slot = torch.zeros(1), torch.zeros(1)
        encode = torch.tensor([50.0])
        options = (encode, slot, E5M2, (-1, -1), 16)
        actual = forms.encode(ops.cast_op, prologue, *options, columnwise=columnwise)
        expected = forms.encode(ops.cast_op, oriented, encode, expected_slot, E5M2, (-1, -1), 16)
        assert torch.equal(actual.float(), expected.float())
        assert torch.equal(slot, expected_slot)
        assert slot.item() == value.abs().max().item()


def test_a_given_amax_replaces_the_computed_one_for_a_prologue() -> None:
    gelu = Prologue("gelu", prologue_inputs("gelu"), torch.bfloat16)
    amax = forms.amax(reference.amax_of, gelu)
    options = (E4M3, (-1, -1), "pow2", 0.0, 16)
    q, scale, computed_amax = forms.quantize(reference.cast, gelu, *options)
    q2, scale2, no_amax = forms.quantize(reference.cast, gelu, *options, amax)
    assert torch.equal(q.float(), q2.float())
    assert torch.equal(scale, scale2)
    assert torch.equal(computed_amax, amax)
    assert no_amax is None
    _, doubled_scale, _ = forms.quantize(reference.cast, gelu, *options, amax * 2)
    assert torch.equal(doubled_scale, scale * 2)
