"""The FP8 attention ops: against dequantized operands in float64, opcheck, special values."""

import pytest
import torch

from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.ops.reference.attention import P_SCALE


def quantized(shape, fp8_dtype, device):
    q, scale, _ = ops.quantize_op(
        torch.randn(shape, device=device).view(-1, shape[-1]), fp8_dtype, (-1, -1), "fp32", 0.0, 1
    )
    return q.view(shape), scale


def make(device, B=2, H=4, G=2, Sq=5, Sk=7, D=8, Dv=6):
    pairs = [quantized(s, E4M3, device) for s in ((B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv))]
    dout = quantized((B, H, Sq, Dv), E5M2, device)
    return [p[0] for p in pairs], [p[1] for p in pairs], dout


MASKS = {
    "none": lambda d: (None, None, None, False, 0.0),
    "causal": lambda d: (None, None, None, True, 0.0),
    "allowed": lambda d: (None, torch.rand(2, 1, 5, 7, device=d) < 0.5, None, False, 0.0),
    "bias": lambda d: (torch.randn(1, 4, 5, 7, device=d), None, None, False, 0.0),
    "dropout": lambda d: (None, None, torch.rand(2, 4, 5, 7, device=d) < 0.7, True, 0.3),
}


def masks(name, device):
    bias, allowed, keep, causal, dropout = MASKS[name](device)
    if allowed is not None:
        allowed[..., 0] = True
    return bias, allowed, keep, causal, dropout


@pytest.mark.parametrize("name", MASKS)
def test_forward_and_backward_against_float64(name, device):
    """Only the probabilities are rounded, by less than 1/16 of each or 2 ** -18."""
    (q, k, v), scales, (dout, dout_scale) = make(device)
    bias, allowed, keep, causal, dropout = masks(name, device)
    shared = (q, k, v, *scales, bias, allowed, keep)
    settings = (causal, 0.3, dropout)
    out, lse = ops.fp8_attention_op(*shared, *settings, torch.float32)

    q64, k64, v64 = (
        (x.double() * s.double().view(1)).requires_grad_()
        for x, s in zip((q, k, v), scales, strict=True)
    )
    dout64 = dout.double() * dout_scale.double().view(1)
    leaves = [q64, k64, v64]
    scores = q64 @ k64.repeat_interleave(2, 1).transpose(2, 3) * 0.3
    if bias is not None:
        leaves.append(bias.double().requires_grad_())
        scores = scores + leaves[-1]
    hidden = torch.zeros(5, 7, dtype=torch.bool, device=device) if allowed is None else ~allowed
    if causal:
        hidden = torch.ones(5, 7, dtype=torch.bool, device=device).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    p = scores.softmax(-1)
    kept = p if keep is None else p * keep / (1 - dropout)
    expected = kept @ v64.repeat_interleave(2, 1)
    assert torch.allclose(lse.double(), scores.logsumexp(-1), atol=1e-5)
    rounding = p / 16 + 2.0**-18
    bound = rounding / (1 - dropout) @ v64.abs().repeat_interleave(2, 1)
    assert ((out - expected).abs() <= bound + 1e-5).all()

    delta = (out.float() * dout.float() * dout_scale.view(1)).sum(-1)
    exact_delta = (expected * dout64).sum(-1).float().detach()
    grads = ops.fp8_attention_backward_op(
        dout, dout_scale, *shared, lse, exact_delta, *settings, torch.float32, bias is not None
    )
    exact = torch.autograd.grad(expected, leaves, dout64)
    assert torch.allclose(grads[0].double(), exact[0], atol=1e-4)
    assert torch.allclose(grads[1].double(), exact[1], atol=1e-4)
    bound = (rounding / (1 - dropout)).transpose(2, 3) @ dout64.abs()
    bound = bound.unflatten(1, (2, 2)).sum(2)
    assert ((grads[2] - exact[2]).abs() <= bound + 1e-4).all()
    if bias is None:
        assert grads[3].numel() == 0
    else:
        assert torch.allclose(grads[3].sum(0, keepdim=True).double(), exact[3], atol=1e-4)
    own = ops.fp8_attention_backward_op(
        dout, dout_scale, *shared, lse, delta, *settings, torch.float32, False
    )
    assert (own[0] - grads[0]).norm() <= 0.1 * grads[0].norm()  # delta of the rounded output


@pytest.mark.parametrize("name", MASKS)
def test_opcheck(name, device):
    (q, k, v), scales, (dout, dout_scale) = make(device)
    bias, allowed, keep, causal, dropout = masks(name, device)
    shared = (q, k, v, *scales, bias, allowed, keep)
    settings = (causal, 0.3, dropout, torch.bfloat16)
    # Not test_schema: it compares inputs by torch.allclose, which has no FP8 kernel.
    utilities = tuple(u for u in torch.library._OPCHECK_DEFAULT_UTILS if u != "test_schema")
    torch.library.opcheck(ops.fp8_attention_op, (*shared, *settings), test_utils=utilities)
    # The forward's own, else probabilities are infinite and a NaN never equals a NaN.
    _, lse = ops.fp8_attention_op(*shared, *settings)
    delta = torch.zeros_like(lse)
    for wants_bias in (False, True):
        arguments = (dout, dout_scale, *shared, lse, delta, *settings, wants_bias)
        torch.library.opcheck(ops.fp8_attention_backward_op, arguments, test_utils=utilities)


def test_small_probabilities_survive():
    """2048 equal probabilities of 2 ** -11 are exact."""
    one = torch.ones(1)
    q, k = torch.zeros(1, 1, 1, 4).to(E4M3), torch.zeros(1, 1, 2048, 4).to(E4M3)
    v = torch.full((1, 1, 2048, 4), 1.5).to(E4M3)
    out, lse = ops.fp8_attention_op(
        q, k, v, one, one, one, None, None, None, False, 1.0, 0.0, torch.float32
    )
    assert torch.equal(out, torch.full((1, 1, 1, 4), 1.5))
    assert lse.item() == pytest.approx(11 * torch.tensor(2.0).log().item())
    assert P_SCALE * 448 > 1


def test_probabilities_that_rounding_takes_above_1():
    """Backward recomputes them from large scores and their rounded sum: they are then 1."""
    one = torch.ones(1)
    q, k, v = (torch.full((1, 1, 1, 4), 1.5).to(E4M3) for _ in range(3))
    operands = (q.to(E5M2), one, q, k, v, one, one, one, None, None, None)
    delta = torch.zeros(1, 1, 1)
    lse = torch.full((1, 1, 1), 9.0)  # of a score of 9
    results = [
        ops.fp8_attention_backward_op(
            *operands, lse - off, delta, False, 1.0, 0.0, torch.float32, False
        )
        for off in (0.0, 1.0)
    ]
    assert torch.equal(results[1][2], results[0][2])
    assert results[0][2].tolist() == [[[[1.5] * 4]]]


def test_nan_and_large_scores():
    one = torch.ones(1)
    q = torch.full((1, 1, 2, 4), 448.0).to(E4M3)
    k = torch.stack([torch.full((1, 1, 4), 448.0), torch.full((1, 1, 4), -448.0)], 2).to(E4M3)
    v = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).to(E4M3)
    arguments = (None, None, None, False, 1.0, 0.0, torch.float32)
    out, _ = ops.fp8_attention_op(q, k, v, one, one, one, *arguments)
    assert torch.equal(out, torch.ones(1, 1, 2, 1))  # the other key's weight underflows
    q = q.float()
    q[0, 0, 0, 0] = torch.nan
    out, _ = ops.fp8_attention_op(q.to(E4M3), k, v, one, one, one, *arguments)
    assert out.isnan().flatten().tolist() == [True, False]
