"""The FP8 attention ops: against dequantized operands in float64, opcheck, special values."""

import pytest
import torch

from float8lab import ops
from float8lab.formats import E4M3, E5M2, HIGH_PRECISION_DTYPES
from float8lab.ops.reference import attention as reference
from tests.ops import forms


def quantized(shape, fp8_dtype, device):
    q, scale, _ = forms.quantize(
        ops.cast_op,
        torch.randn(shape, device=device).view(-1, shape[-1]),
        fp8_dtype,
        (-1, -1),
        "fp32",
        0.0,
        1,
    )
    return q.view(shape), scale


def make(device, B=2, H=4, G=2, Sq=5, Sk=7, D=8, Dv=6):
    pairs = [quantized(s, E4M3, device) for s in ((B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv))]
    dout = torch.randn((B, H, Sq, Dv), device=device)
    return [p[0] for p in pairs], [p[1] for p in pairs], dout


def exact_attention(q64, k64, v64, settings):
    """Output, probabilities and scores in float64."""
    causal, scale = settings
    groups = q64.shape[1] // k64.shape[1]
    scores = q64 @ k64.repeat_interleave(groups, 1).transpose(2, 3) * scale
    if causal:
        future = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    p = scores.softmax(-1)
    return p @ v64.repeat_interleave(groups, 1), p, scores


def decoded(tensors, scales):
    return [x.double() * s.double().view(1) for x, s in zip(tensors, scales, strict=True)]


def check_forward(out, lse, operands, settings):
    """Within the rounding of the probabilities, less than 1/16 of each or 2 ** -18.

    The tensor cores keep about 13 bits of a sum; what that does to scores, they do to the logarithm
    of the probabilities.
    """
    q64, k64, v64 = operands
    expected, p, scores = exact_attention(*operands, settings)
    scale = settings[1]
    groups = q64.shape[1] // k64.shape[1]
    size = q64.abs() @ k64.abs().repeat_interleave(groups, 1).transpose(2, 3) * scale
    off = 2.0**-12 * size.amax(-1) * out.is_cuda
    assert ((lse.double() - scores.logsumexp(-1)).abs() <= off + 1e-5).all()
    rounding = p * (1 / 16 + 2 * off.unsqueeze(-1) + 2.0**-9 * out.is_cuda) + 2.0**-18
    bound = rounding @ v64.abs().repeat_interleave(groups, 1)
    last_bit = torch.finfo(out.dtype).eps
    assert ((out - expected).abs() <= bound + expected.abs() * last_bit + 1e-5).all()


each_mask = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@each_mask
def test_forward_and_backward_against_float64(causal, device):
    (q, k, v), scales, dout = make(device)
    shared, settings = (q, k, v, *scales), (causal, 0.3)
    out, lse = ops.fp8_attention_op(*shared, *settings, torch.float32)
    leaves = [x.requires_grad_() for x in decoded((q, k, v), scales)]
    check_forward(out, lse, [x.detach() for x in leaves], settings)

    expected, _, scores = exact_attention(*leaves, settings)
    saved = expected.detach().float(), scores.logsumexp(-1).detach().float()
    grads = ops.fp8_attention_backward_op(dout, *shared, *saved, *settings)
    exact = torch.autograd.grad(expected, leaves, dout.double())
    for got, want in zip(grads, exact, strict=True):
        # The kernel's backward rounds to 8 bits.
        assert (got - want).norm() <= (2.0**-7 if got.is_cuda else 1e-4) * want.norm() + 1e-4
    own = ops.fp8_attention_backward_op(dout, *shared, out, lse, *settings)
    assert (own[0] - grads[0]).norm() <= 0.1 * grads[0].norm()  # of the rounded output


@each_mask
def test_opcheck(causal, device):
    (q, k, v), scales, dout = make(device)
    shared, settings = (q, k, v, *scales), (causal, 0.3)
    # Not test_schema: it compares inputs by torch.allclose, which has no FP8 kernel.
    utilities = tuple(u for u in torch.library._OPCHECK_DEFAULT_UTILS if u != "test_schema")
    arguments = (*shared, *settings, torch.bfloat16)
    torch.library.opcheck(ops.fp8_attention_op.overload, arguments, test_utils=utilities)
    out, lse = ops.fp8_attention_op(*arguments)
    arguments = (dout.bfloat16(), *shared, out, lse, *settings)
    torch.library.opcheck(ops.fp8_attention_backward_op.overload, arguments, test_utils=utilities)


# B, H, G, Sq, Sk, D, Dv
SHAPES = {
    "square": (2, 4, 2, 384, 384, 128, 128),
    "short": (1, 2, 2, 200, 333, 64, 64),
    "tall": (1, 2, 1, 333, 200, 128, 128),
    "one-query": (1, 2, 2, 1, 77, 128, 128),
    "one-key": (2, 2, 1, 130, 1, 32, 32),
    "wide-values": (2, 3, 3, 129, 127, 40, 96),
    "odd-heads": (1, 2, 1, 70, 515, 23, 9),
    "long": (1, 1, 1, 8192, 8192, 64, 128),
}
LAYOUTS = {
    "by-head": lambda x: x.contiguous(),
    "by-token": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "packed": lambda x: torch.cat((x, x), 1).transpose(1, 2).contiguous().transpose(1, 2)[
        :, : x.shape[1]
    ],
    "by-column": lambda x: x.mT.contiguous().mT,
}  # fmt: skip


def arranged(q, layout):
    """The same FP8 values, elsewhere in memory."""
    return LAYOUTS[layout](q.view(torch.uint8)).view(q.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel(shape, causal, fp8_dtype):
    """Forward against float64, backward against the reference of the same output."""
    B, H, G, Sq, Sk, D, Dv = SHAPES[shape]
    sizes = (B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv)
    pairs = [quantized(size, fp8_dtype, "cuda") for size in sizes]
    tensors, scales = [p[0] for p in pairs], [p[1] for p in pairs]
    settings = (causal, D**-0.5)
    first = None
    for layout in LAYOUTS:
        shared = (*(arranged(x, layout) for x in tensors), *scales)
        out, lse = ops.fp8_attention_op(*shared, *settings, torch.bfloat16)
        if first is None:
            first = out, lse
            check_forward(out, lse, decoded(tensors, scales), settings)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
        dout = LAYOUTS[layout](torch.randn_like(out))
        got = ops.fp8_attention_backward_op(dout, *shared, out, lse, *settings)
        want = reference.fp8_attention_backward(dout, *shared, out, lse, *settings)
        for a, b in zip(got, want, strict=True):
            assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
            # Probabilities and the scores' gradient are rounded to 8 bits.
            assert (a.float() - b.float()).norm() <= 2.0**-7 * b.float().norm() + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_kernel_dtypes_and_determinism(dtype):
    pairs = [quantized((2, 2, 256, 64), E4M3, "cuda") for _ in range(3)]
    shared = (*(p[0] for p in pairs), *(p[1] for p in pairs))
    settings = (True, 0.125)
    out, lse = ops.fp8_attention_op(*shared, *settings, dtype)
    check_forward(out, lse, decoded(*zip(*pairs, strict=True)), settings)
    dout = torch.randn_like(out)
    want = reference.fp8_attention_backward(dout, *shared, out, lse, *settings)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [ops.fp8_attention_backward_op(dout, *shared, out, lse, *settings) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, again, b in zip(*runs, want, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, again)
        assert (a.float() - b.float()).norm() <= 2.0**-7 * b.float().norm()


@pytest.mark.gpu
def test_more_heads_than_a_grid_has_rows():
    pairs = [quantized((1100, 60, 2, 16), E4M3, "cuda") for _ in range(3)]
    tensors, scales = zip(*pairs, strict=True)
    settings = (True, 0.25)
    out, lse = ops.fp8_attention_op(*tensors, *scales, *settings, torch.bfloat16)
    check_forward(out, lse, decoded(tensors, scales), settings)


@pytest.mark.gpu
def test_kernel_holds_no_scores():
    S = 65536  # scores of one head: 16 GiB in float32
    pairs = [quantized((1, 1, S, 64), E4M3, "cuda") for _ in range(3)]
    shared = (*(p[0] for p in pairs), *(p[1] for p in pairs))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, lse = ops.fp8_attention_op(*shared, True, 0.125, torch.bfloat16)
    ops.fp8_attention_backward_op(out, *shared, out, lse, True, 0.125)
    assert torch.cuda.max_memory_allocated() - before < 2**28
    assert out.isfinite().all()


def test_small_probabilities_survive(device):
    """2048 equal probabilities of 2 ** -11 are exact."""
    one = torch.ones(1, device=device)
    q, k, v = (
        torch.full((1, 1, size, 4), value, device=device).to(E4M3)
        for size, value in ((1, 0.0), (2048, 0.0), (2048, 1.5))
    )
    out, lse = ops.fp8_attention_op(q, k, v, one, one, one, False, 1.0, torch.float32)
    assert out.tolist() == [[[[1.5] * 4]]]
    assert lse.item() == pytest.approx(11 * torch.tensor(2.0).log().item())
    assert reference.P_SCALE * 448 > 1


def test_nan_and_large_scores(device):
    one = torch.ones(1, device=device)
    q = torch.full((1, 1, 2, 4), 448.0, device=device).to(E4M3)
    k = torch.stack([torch.full((1, 1, 4), s * 448.0, device=device) for s in (1, -1)], 2).to(E4M3)
    v = torch.tensor([1.0, 2.0], device=device).view(1, 1, 2, 1).to(E4M3)
    arguments = (False, 1.0, torch.float32)
    out, _ = ops.fp8_attention_op(q, k, v, one, one, one, *arguments)
    # The other key's weight underflows. Scores this large lose their last bits in the kernel, and
    # the first key's is then next to 1 and rounded.
    assert (out.cpu() - 1).abs().max() <= (1 / 16 if out.is_cuda else 0)
    q = q.float()
    q[0, 0, 0, 0] = torch.nan
    out, _ = ops.fp8_attention_op(q.to(E4M3), k, v, one, one, one, *arguments)
    assert out.isnan().flatten().tolist() == [True, False]
