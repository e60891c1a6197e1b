"""Attention of Float8Tensors: the FP8 op where it fits, else torch's on dequantized tensors."""

import pytest
import torch
from torch.nn import functional as F

import float8lab
from float8lab.tensor import Float8Tensor, quantize
from tests.recorder import Ops

aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("no_silent_dequantizing")


def make(shape, *, dtype=torch.float32, block=(-1, -1), device="cpu"):
    return quantize(torch.randn(shape, device=device).to(dtype), block=block).requires_grad_()


def operands(Sq=40, Sk=56, *, H=4, G=4, D=32, **options):
    sizes = (2, H, Sq, D), (2, G, Sk, D), (2, G, Sk, 16)
    return [make(s, **options) for s in sizes]


def run_and_detect_fp8(function):
    """Return the result, and whether the FP8 op computed it."""
    with Ops() as ops:
        result = function()
    return result, torch.ops.float8lab.fp8_attention.default in ops.seen


CASES = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "causal-short": ({"Sq": 56, "Sk": 40}, {"is_causal": True}),
    "scale": ({}, {"scale": 0.5}),
    "wide": ({"D": 136}, {"is_causal": True}),
    "gqa": ({"G": 2}, {"enable_gqa": True}),
    "mqa-causal": ({"G": 1}, {"enable_gqa": True, "is_causal": True}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_fp8_attention_and_its_gradients_are_near_float64(case, dtype, device):
    shapes, keywords = CASES[case]
    qkv = operands(dtype=dtype, device=device, **shapes)
    exact_qkv = [t.detach().dequantize().double().requires_grad_() for t in qkv]
    y, used_fp8 = run_and_detect_fp8(lambda: F.scaled_dot_product_attention(*qkv, **keywords))
    assert used_fp8
    exact = F.scaled_dot_product_attention(*exact_qkv, **keywords)
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    # Each probability is off by 1/16 at most, or by 2 ** -18, and so is its mean of values.
    v = exact_qkv[2].detach().abs()
    mean = F.scaled_dot_product_attention(*exact_qkv[:2], v, **keywords)
    assert ((y - exact).abs() <= mean / 16 + v.sum() * 2.0**-18 + y.abs() * 2.0**-7).all()
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, qkv, dy)
    want = torch.autograd.grad(exact, exact_qkv, dy.double())
    for g, w in zip(got, want, strict=True):
        # Backward is in high precision, except for the contribution of the rounded output.
        assert (g.dtype, g.shape) == (dtype, w.shape)
        assert (g - w).norm() <= w.norm() / 16


def test_attention_equals_the_fp8_op():
    q, k, v = operands()
    scales = [t.scale.view(1) for t in (q, k, v)]
    out, *_ = torch.ops.float8lab.fp8_attention(
        q.qdata, k.qdata, v.qdata, *scales, (-1, 0, 40 - 56), 0.3, torch.float32
    )
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3), out)


def test_gpu_without_a_kernel_runs_torchs_attention(monkeypatch):
    monkeypatch.setattr(float8lab.tensor.attention, "has_fp8_attention", lambda *arguments: False)
    qkv = operands()
    y, used_fp8 = run_and_detect_fp8(lambda: F.scaled_dot_product_attention(*qkv))
    assert not used_fp8
    assert torch.equal(y, F.scaled_dot_product_attention(*(t.dequantize() for t in qkv)))


def test_only_required_gradients_are_computed():
    q, k, v = operands()
    k = k.detach()
    y = F.scaled_dot_product_attention(q, k, v)
    dq, dv = torch.autograd.grad(y.sum(), (q, v))
    assert (dq.shape, dv.shape) == (q.shape, v.shape)
    assert not F.scaled_dot_product_attention(q.detach(), k, v.detach()).requires_grad


MASK = torch.ones(40, 56, dtype=torch.bool).tril()
UNSUPPORTED = {
    "mask": ({}, {"attn_mask": MASK}),
    "bias": ({}, {"attn_mask": torch.randn(40, 56)}),
    "bias-grad": ({}, {"attn_mask": torch.randn(40, 56, requires_grad=True)}),
    "dropout": ({}, {"dropout_p": 1.0}),
    "wide": ({"D": 264}, {}),
    "negative": ({}, {"scale": -0.1}),
    "row": ({"block": (1, -1)}, {}),
    "1x8-causal": ({"block": (1, 8)}, {"is_causal": True}),
    "column": ({"block": (-1, 1)}, {}),
    "head": ({"block": (1, 1, -1, -1)}, {"is_causal": True}),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_attention_equals_that_of_dequantized_tensors(case):
    options, keywords = UNSUPPORTED[case]
    qkv = operands(**options)
    plain = [t.detach().dequantize().requires_grad_() for t in qkv]
    y, used_fp8 = run_and_detect_fp8(lambda: F.scaled_dot_product_attention(*qkv, **keywords))
    assert not used_fp8
    expected = F.scaled_dot_product_attention(*plain, **keywords)
    assert torch.equal(y, expected)
    got = torch.autograd.grad(y.square().sum(), qkv)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), plain))


def test_plain_operands_and_other_dimensions_dequantize():
    q, k, v = operands()
    plain = [t.dequantize() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*plain)
    assert torch.equal(F.scaled_dot_product_attention(q, plain[1], plain[2]), expected)
    assert torch.equal(F.scaled_dot_product_attention(plain[0], k, v), expected)
    expected = F.scaled_dot_product_attention(*(t[0] for t in plain))
    assert torch.equal(F.scaled_dot_product_attention(q[0], k[0], v[0]), expected)
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(q, k[:, :3], v[:, :3])


def test_torchs_choice_of_a_backend_decodes_nothing(monkeypatch):
    q, k, v = operands()
    expected = torch._fused_sdp_choice(*(t.detach().dequantize() for t in (q, k, v)))
    monkeypatch.setattr(Float8Tensor, "_decode", None)
    assert torch._fused_sdp_choice(q, k, v) == expected


def test_attention_of_views_and_empty_sequences():
    base = make((2, 20, 8, 32)).detach()
    view = base[:, 3:18, 1:5].transpose(1, 2)
    base.mul_(100)
    y, used_fp8 = run_and_detect_fp8(lambda: F.scaled_dot_product_attention(view, view, view))
    assert used_fp8
    plain = view.dequantize()
    expected = F.scaled_dot_product_attention(plain, plain, plain)
    assert (y - expected).norm() <= expected.norm() / 16
    empty = make((2, 4, 0, 32))
    y = F.scaled_dot_product_attention(empty, empty, empty)
    y.sum().backward()
    assert y.shape == empty.grad.shape == (2, 4, 0, 32)


def test_autocast_decides_the_output_dtype():
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        y, used_fp8 = run_and_detect_fp8(lambda: F.scaled_dot_product_attention(q, k, v))
    assert used_fp8
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("gradients", [False, True], ids=["", "grad"])
def test_compiled_attention_equals_eager_attention(gradients, device):
    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    qkv = [t.detach().requires_grad_(gradients) for t in operands(device=device)]
    expected = function(*qkv)
    actual = torch.compile(function, backend="aot_eager", fullgraph=True)(*qkv)
    assert torch.equal(actual, expected)
    if gradients:
        got, want = (torch.autograd.grad(y.square().sum(), qkv) for y in (actual, expected))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
