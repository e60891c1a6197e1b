"""LayerNorm and RMSNorm of Float8Tensors: values, every gradient, and no dequantized copy."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import float8lab
from float8lab.tensor import Float8Tensor, quantize
from float8lab.tensor.dispatch import table
from tests.pairwise import pairwise

aten = torch.ops.aten
BLOCKS = [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (1, 32), (3, 5), (4, -1)]
NAMED_BLOCKS = {str(block): block for block in BLOCKS}
each_block = pytest.mark.parametrize("block", BLOCKS, ids=str)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


pytestmark = pytest.mark.usefixtures("no_silent_dequantizing")


NORMS = {
    "layer": lambda x, shape, w, b: F.layer_norm(x, shape, w, b),
    "layer-no-bias": lambda x, shape, w, b: F.layer_norm(x, shape, w, eps=1e-2),
    "layer-plain": lambda x, shape, w, b: F.layer_norm(x, shape),
    "rms": lambda x, shape, w, b: F.rms_norm(x, shape, w),
    "rms-eps": lambda x, shape, w, b: F.rms_norm(x, shape, w, 1e-2),
    "rms-plain": lambda x, shape, w, b: F.rms_norm(x, shape),
}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS.keys())

SHAPES = {
    "M160-K160": ((160, 160), 1), "2x3x48": ((2, 3, 48), 1), "2x(3x48)": ((2, 3, 48), 2),
    "(48)": ((48,), 1), "M0-K8": ((0, 8), 1), "M5-K0": ((5, 0), 1),
}  # fmt: skip


def check(norm, x, shape, dtype):
    """Compare output and gradients with float64, within the rounding of float32 and the dtype."""
    w, b = (torch.randn(shape, device=x.device).to(dtype).requires_grad_() for _ in range(2))
    y = norm(x, shape, w, b)
    assert type(y) is torch.Tensor
    assert (y.dtype, y.shape) == (dtype, x.shape)
    leaves = [t.detach().double().requires_grad_() for t in (x.detach().dequantize(), w, b)]
    exact = norm(leaves[0], shape, *leaves[1:])
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, w, b), dy, allow_unused=True)
    want = torch.autograd.grad(exact, leaves, dy.double(), allow_unused=True)
    eps = 2 * torch.finfo(dtype).eps + 2.0**-18
    for actual, expected in zip((y, *got), (exact, *want), strict=True):
        if expected is None:
            assert actual is None
            continue
        assert type(actual) is torch.Tensor
        assert actual.dtype == dtype
        assert ((actual - expected).norm() <= eps * expected.norm()).item()


@pytest.mark.parametrize(
    ("block", "size", "dtype", "norm"), pairwise(NAMED_BLOCKS, SHAPES, DTYPES, NORMS)
)
def test_norm_and_every_gradient_are_near_float64(block, size, dtype, norm, device):
    shape, last = size
    x = quantize((torch.randn(shape, device=device) * 3 + 1).to(dtype), block=block)
    check(norm, x.requires_grad_(), shape[len(shape) - last :], dtype)


@each_norm
@each_block
def test_norms_of_views_are_near_float64(block, norm):
    base = quantize(torch.randn(2, 36, 48), block=block)
    for view in (base.transpose(1, 2), base.transpose(0, 1), base[:, 3:30:2, 5:], base[1].t()):
        check(norm, view.detach().requires_grad_(), view.shape[-1:], torch.float32)
    slice_of_base = base[:, 3:30]
    base.mul_(100)  # updates the scales that the view has copied
    check(norm, slice_of_base.detach().requires_grad_(), slice_of_base.shape[-1:], torch.float32)


@each_norm
def test_fp8_parameters_of_a_plain_input_equal_dequantized_ones(norm):
    w, b = (quantize(torch.randn(16)).requires_grad_() for _ in range(2))
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(4, 16, dtype=dtype, requires_grad=True)
        plain = [t.detach().clone().requires_grad_() for t in (x, w.dequantize(), b.dequantize())]
        dy = torch.randn(4, 16, dtype=dtype)
        results = []
        for inp, weight, bias in ((x, w, b), plain):
            if dtype == torch.float64 and weight is not w:
                weight, bias = weight.double(), bias.double()
            y = norm(inp, (16,), weight, bias)
            leaves = (x, w, b) if inp is x else plain
            results.append((y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)))
        for got, want in zip(*results, strict=True):
            assert (got is None) == (want is None)
            if want is not None:
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class _Ops(TorchDispatchMode):
    """Records every op that runs, also those in handlers."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op)
        if any(issubclass(t, Float8Tensor) for t in types):
            with self:
                return Float8Tensor.__torch_dispatch__(op, types, args, kwargs)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@each_block
def test_norms_read_and_save_fp8_data(block, name):
    x = quantize(torch.randn(64, 160), block=block).requires_grad_()
    saved = []
    with (
        _Ops() as mode,
        torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t),
    ):
        getattr(F, name)(x, (160,)).sum().backward()
    fp8 = torch.ops.float8lab
    assert fp8.norm.default in mode.ops
    assert fp8.norm_backward.default in mode.ops
    assert fp8.value_of.default not in mode.ops
    large = [t for t in saved if t.numel() == x.numel()]
    assert [type(t) for t in large] == [Float8Tensor]


def test_rms_norm_of_different_dtypes_gives_each_gradient_its_dtype():
    x = quantize(torch.randn(4, 16).bfloat16(), block=(1, -1)).requires_grad_()
    w = torch.randn(16, requires_grad=True)
    y = F.rms_norm(x, (16,), w)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (torch.bfloat16, torch.float32)


def test_autocast_gives_the_dtypes_of_torch():
    x = torch.randn(4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        for norm in (F.rms_norm, F.layer_norm):
            assert norm(quantize(x), (16,)).dtype == norm(x, (16,)).dtype


def test_wrong_shapes_raise_the_errors_of_torch():
    x = quantize(torch.randn(4, 16))
    with pytest.raises(RuntimeError, match="expected input with shape"):
        F.rms_norm(x, (15,))
    with pytest.raises(RuntimeError, match="same shape as normalized_shape"):
        F.rms_norm(x, (16,), torch.ones(15))


def test_handlers_of_torchs_fused_gpu_ops_equal_rms_norm():
    x, w = quantize(torch.randn(4, 16), block=(1, 8)), torch.randn(16)
    plain = x.dequantize().requires_grad_()
    exact = F.rms_norm(plain, (16,), w, 1e-3)
    y, rstd = table[aten._fused_rms_norm.default](None, x, [16], w, 1e-3)
    torch.testing.assert_close(y, exact.detach(), rtol=1e-5, atol=1e-5)
    assert rstd.shape == (4, 1)
    dy = torch.randn(4, 16)
    backward = table[aten._fused_rms_norm_backward.default]
    dx, dw = backward(None, dy, x, [16], rstd, w, [True, False])
    assert dw is None
    (want,) = torch.autograd.grad(exact, plain, dy)
    torch.testing.assert_close(dx, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gradients", [False, True], ids=["", "grad"])
def test_compiled_norms_equal_eager_ones(gradients, device):
    def function(x, w):
        return nn.functional.rms_norm(x, (16,), w) * 2, F.layer_norm(x, (16,), w)

    x = quantize(torch.randn(8, 16, device=device), block=(1, 8)).requires_grad_(gradients)
    w = torch.randn(16, device=device, requires_grad=gradients)
    expected = function(x, w)
    actual = torch.compile(function, backend="aot_eager", fullgraph=True)(x, w)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    if gradients:
        got, want = (
            torch.autograd.grad(a.sum() + b.square().sum(), (x, w)) for a, b in (actual, expected)
        )
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_functorch_transforms_equal_those_of_dequantized_tensors():
    t, w = quantize(torch.randn(4, 8)), quantize(torch.randn(8))

    def loss(x, w):
        return F.rms_norm(x, (8,), w).square().sum()

    with float8lab.fallback("silent"):
        got = torch.func.grad(loss)(t, w)
        want = torch.func.grad(loss)(t.dequantize(), w.dequantize())
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        rows = torch.vmap(lambda x: F.rms_norm(x, (8,), w))(t)
    torch.testing.assert_close(rows, F.rms_norm(t, (8,), w), rtol=1e-5, atol=1e-5)
