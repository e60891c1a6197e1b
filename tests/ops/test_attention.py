"""The FP8 attention ops: errors against dequantized float64 operands, opcheck, special values."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from float8lab import ops
from float8lab.formats import E4M3, E5M2, HIGH_PRECISION_DTYPES
from float8lab.ops.attention import flash_window, has_fp8_backward
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


def exact_attention(q64, k64, v64, settings, ends=(None, None)):
    """Output, probabilities and scores in float64; 0, 0 and -inf for a fully masked query."""
    window, scale = settings
    groups = q64.shape[1] // k64.shape[1]
    scores = q64 @ k64.repeat_interleave(groups, 1).transpose(2, 3) * scale
    scores = scores.masked_fill(
        ~visible_keys(*scores.shape[2:], *window, *ends, scores.device), -torch.inf
    )
    p = scores.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0).softmax(-1)
    p = p.masked_fill(scores == -torch.inf, 0.0)
    return p @ v64.repeat_interleave(groups, 1), p, scores


def visible_keys(Sq, Sk, left, right, diagonal, q_ends, k_ends, device):
    """Whether each query sees each key, sequence by sequence."""
    result = torch.zeros(Sq, Sk, dtype=torch.bool)
    q_ends, k_ends = ([0, n] if e is None else e.tolist() for n, e in ((Sq, q_ends), (Sk, k_ends)))
    for q0, q1, k0, k1 in zip(q_ends, q_ends[1:], k_ends, k_ends[1:], strict=False):
        i = torch.arange(q1 - q0).view(-1, 1) + (k1 - k0) - (q1 - q0) + diagonal
        j = torch.arange(k1 - k0)
        within_right = (j - i <= right) | (right < 0)
        result[q0:q1, k0:k1] = within_right & ((i - j <= left) | (left < 0))
    return result.to(device)


def dequantized(tensors, scales):
    return [x.double() * s.double().view(1) for x, s in zip(tensors, scales, strict=True)]


def check_forward(results, operands, settings, ends=(None, None)):
    """Asserts errors within the rounding of the probabilities: below 1/16 of each, or 2 ** -18.

    The tensor cores keep about 13 bits of a sum. The error of a score is one of the logarithm of
    its probability. The error of a single score exceeds that of the logarithm of all: on an H100 it
    reached 2 ** -11.6 of the sizes of its terms.
    """
    (q64, k64, v64), (out, lse, max_scores) = operands, results
    expected, p, scores = exact_attention(*operands, settings, ends)
    scale = settings[1]
    groups = q64.shape[1] // k64.shape[1]
    term_sizes = q64.abs() @ k64.abs().repeat_interleave(groups, 1).transpose(2, 3) * scale
    score_error = 2.0**-12 * term_sizes.amax(-1) * out.is_cuda
    for got, exact, factor in ((lse, scores.logsumexp(-1), 1), (max_scores, scores.amax(-1), 4)):
        assert ((got.double() - exact).abs() <= factor * score_error + 1e-5)[
            exact > -torch.inf
        ].all()
        assert (got == -torch.inf)[exact == -torch.inf].all()
    rounding = p * (1 / 16 + 2 * score_error.unsqueeze(-1) + 2.0**-9 * out.is_cuda) + 2.0**-18
    bound = rounding @ v64.abs().repeat_interleave(groups, 1)
    last_bit = torch.finfo(out.dtype).eps
    assert ((out - expected).abs() <= bound + expected.abs() * last_bit + 1e-5).all()


# (left, right, diagonal). The diagonal is relative to the last query and key; with Sq - Sk the mask
# is relative to the first.
MASKS = {
    "full": lambda Sq, Sk: (-1, -1, 0),
    "causal": lambda Sq, Sk: (-1, 0, Sq - Sk),
    "bottom-right": lambda Sq, Sk: (-1, 0, 0),
    "window": lambda Sq, Sk: (Sk // 3, 0, 0),
    "window-two-sided": lambda Sq, Sk: (37, 5, Sq - Sk),
    "window-left": lambda Sq, Sk: (Sk // 2, -1, 0),
    "narrow": lambda Sq, Sk: (3, 0, 0),
    "future": lambda Sq, Sk: (-1, 2, -Sk // 3),
}
each_mask = pytest.mark.parametrize("mask", MASKS)


def packed(device, lengths, spare, H=4, G=2, D=8, Dv=6):
    """Operands and offsets of packed sequences, with ``spare`` tokens after the last one."""
    ends = [torch.tensor([0, *side]).cumsum(0).int().to(device) for side in lengths]
    Sq, Sk = (int(end[-1]) + spare for end in ends)
    return make(device, 1, H, G, Sq, Sk, D, Dv), ends


LENGTHS = {
    "equal": ([3, 0, 4], [3, 0, 4]),
    "keys-longer": ([2, 1, 3, 0], [4, 1, 9, 2]),
    "blind": ([5, 2, 2], [3, 0, 7]),
}


def allowed_error(*tensors):
    """The relative error allowed for the kernels' gradients: 24 dB with FP8 GEMMs, else 2**-7."""
    return 10 ** (-24 / 20) if has_fp8_backward(*tensors) else 2.0**-7


def check_backward(shared, dout, settings, ends=(None, None)):
    """Compares the gradients with autograd in float64, for the exact and for the op's output."""
    q, k, v, *scales = shared
    forward_results = ops.fp8_attention_op(*shared, *settings, torch.float32, *ends)
    leaves = [x.requires_grad_() for x in dequantized((q, k, v), scales)]
    check_forward(forward_results, [x.detach() for x in leaves], settings, ends)
    expected, _, scores = exact_attention(*leaves, settings, ends)
    saved = [x.detach().float() for x in (expected, scores.logsumexp(-1), scores.amax(-1))]
    lengths = (*ends, *(16 if end is None else int(end.diff().max()) for end in ends))
    grads = ops.fp8_attention_backward_op(dout, *shared, *saved, *settings, *lengths)
    exact = torch.autograd.grad(expected, leaves, dout.double())
    tolerance = allowed_error(q, k, v) if q.is_cuda else 1e-4
    for got, want in zip(grads, exact, strict=True):
        assert (got - want).norm() <= tolerance * want.norm() + 1e-4
    grads_of_output = ops.fp8_attention_backward_op(
        dout, *shared, *forward_results, *settings, *lengths
    )
    assert (grads_of_output[0] - grads[0]).norm() <= 0.1 * grads[
        0
    ].norm()  # gradients for the rounded output


@each_mask
@pytest.mark.parametrize(("Sq", "Sk"), [(5, 7), (7, 5), (6, 6)], ids=str)
def test_forward_and_backward_are_near_float64(Sq, Sk, mask, device):
    (q, k, v), scales, dout = make(device, Sq=Sq, Sk=Sk)
    check_backward((q, k, v, *scales), dout, (MASKS[mask](Sq, Sk), 0.3))


@pytest.mark.parametrize("mask", ["full", "bottom-right", "window"])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_packed_sequences_are_near_float64(lengths, mask, device):
    ((q, k, v), scales, dout), ends = packed(device, LENGTHS[lengths], spare=2)
    check_backward((q, k, v, *scales), dout, (MASKS[mask](6, 6), 0.3), ends)


@pytest.mark.parametrize("D", [8, 136], ids=["fp8-backward", "wide"])
def test_packed_tokens_keep_their_original_positions(D, device):
    """Outputs and gradients are at the positions of the tokens, bit for bit."""
    (operands, scales, dout), ends = packed(device, LENGTHS["keys-longer"], 3, D=D, Dv=D)
    shared, settings, tokens = (*operands, *scales), ((-1, 0, 0), 0.3), []
    for x, end in zip(operands, ends, strict=False):
        token = torch.randperm(x.shape[2], device=device).int()
        row = torch.arange(len(token), device=device)
        tokens.append(torch.where(row < end[-1], token, ~token))
    order = [torch.maximum(token, ~token) for token in tokens]
    out, *statistics = ops.fp8_attention_op(*shared, *settings, torch.bfloat16, *ends)
    reordered_out, *reordered_statistics = ops.fp8_attention_op(
        *shared, *settings, torch.bfloat16, *ends, tokens[0]
    )
    assert torch.equal(reordered_out[:, :, order[0]], out)
    assert all(map(torch.equal, reordered_statistics, statistics))
    dout = dout.bfloat16()
    grads = ops.fp8_attention_backward_op(
        dout, *shared, out, *reordered_statistics, *settings, *ends, 4, 9
    )
    dout = torch.empty_like(dout).index_copy_(2, order[0].long(), dout)
    results = ops.fp8_attention_backward_op(
        dout, *shared, reordered_out, *reordered_statistics, *settings, *ends, 4, 9, *tokens
    )
    for x, expected, index in zip(results, grads, (order[0], order[1], order[1]), strict=True):
        assert torch.equal(x[:, :, index], expected)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_attention_ops_pass_opcheck(is_packed, device):
    ((q, k, v), scales, dout), ends = packed(device, LENGTHS["equal"], spare=1)
    ends = ends if is_packed else [None, None]
    shared, settings = (q, k, v, *scales), ((2, 0, 0), 0.3)
    # test_schema compares inputs with torch.allclose, which has no FP8 kernel.
    utilities = tuple(u for u in torch.library._OPCHECK_DEFAULT_UTILS if u != "test_schema")
    arguments = (*shared, *settings, torch.bfloat16, *ends)
    torch.library.opcheck(ops.fp8_attention_op.overload, arguments, test_utils=utilities)
    forward_results = ops.fp8_attention_op(*arguments)
    arguments = (dout.bfloat16(), *shared, *forward_results, *settings, *ends, 4, 4)
    torch.library.opcheck(ops.fp8_attention_backward_op.overload, arguments, test_utils=utilities)


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(("Sq", "Sk"), [(5, 9), (9, 5), (6, 6), (1, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("diagonal", [-3, 0, 2])
def test_flash_window_describes_the_same_mask(diagonal, Sq, Sk, is_packed):
    """The window is read as flash attention does, which ignores some limits."""
    for left in range(-1, 12):
        for right in range(-1, 12):
            window = flash_window(Sq, Sk, (left, right, diagonal), packed=is_packed)
            if window is None:
                continue
            limits = [x if 0 <= x < window.keys else -1 for x in window[2:]]
            if (limits[0] < 0) != (limits[1] < 0):
                limits = [window.keys if x < 0 else x for x in limits]
            q_end, k_end = torch.tensor([[0, window.queries], [0, window.keys]])
            flash_mask = visible_keys(Sq, Sk, *limits, 0, q_end, k_end, "cpu")
            assert torch.equal(
                flash_mask, visible_keys(Sq, Sk, left, right, diagonal, None, None, "cpu")
            )


def test_has_linear_backward_knows_the_masks_of_the_kernels():
    assert ops.has_linear_backward(500, 200, (-1, 0, 300))  # cuDNN's
    assert ops.has_linear_backward(500, 200, (-1, 0, 0))
    assert ops.has_linear_backward(200, 500, (64, 64, -300))
    assert ops.has_linear_backward(200, 200, (-1, 0, 0), packed=True)
    assert not ops.has_linear_backward(200, 200, (-1, 0, -5), packed=True)
    assert not ops.has_linear_backward(200, 20, (64, -1, 0))


def test_has_fp8_backward_knows_the_operands_of_the_kernel():
    q, k, wide_keys = (torch.zeros(1, 2, *size).to(E4M3) for size in ((5, 128), (7, 128), (7, 192)))
    assert has_fp8_backward(q, k, k[..., :9])
    assert not has_fp8_backward(q, k, wide_keys)
    assert not has_fp8_backward(q.to(E5M2), k, k)
    assert not has_fp8_backward(q[:, :, :1], k, k)
    assert not has_fp8_backward(q, k[:, :, :1], k[:, :, :1])


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


def in_layout(q, layout):
    """The same FP8 values in another memory layout."""
    return LAYOUTS[layout](q.view(torch.uint8)).view(q.dtype)


def significant_strides(x):
    """The strides that locate elements: those of dimensions larger than one."""
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def check_kernel(sizes, fp8_dtype, settings, ends=(None, None), layouts=LAYOUTS):
    """Compares the forward with float64, and the backward with the reference for that output."""
    pairs = [quantized(size, fp8_dtype, "cuda") for size in sizes]
    tensors, scales = [p[0] for p in pairs], [p[1] for p in pairs]
    lengths = (*ends, *(0 if end is None else int(end.diff().max()) for end in ends))
    tolerance = allowed_error(*tensors)
    first_results = None
    for layout in layouts:
        shared = (*(in_layout(x, layout) for x in tensors), *scales)
        forward_results = ops.fp8_attention_op(*shared, *settings, torch.bfloat16, *ends)
        if first_results is None:
            first_results = forward_results
            check_forward(forward_results, dequantized(tensors, scales), settings, ends)
        assert all(map(torch.equal, forward_results, first_results))
        dout = LAYOUTS[layout](torch.randn_like(forward_results[0]))
        want = reference.fp8_attention_backward(
            dout, *shared, *forward_results, *settings, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1]
        )
        for deterministic in (True, False):  # flash attention's kernel, and cuDNN's if it fits
            torch.use_deterministic_algorithms(deterministic, warn_only=True)
            got = ops.fp8_attention_backward_op(
                dout, *shared, *forward_results, *settings, *lengths
            )
            torch.use_deterministic_algorithms(True, warn_only=True)
            for a, b in zip(got, want, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert significant_strides(a) == significant_strides(b)
                assert (a.float() - b.float()).norm() <= tolerance * b.float().norm() + 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_near_float64_for_every_shape_and_layout(shape, mask, fp8_dtype):
    B, H, G, Sq, Sk, D, Dv = SHAPES[shape]
    sizes = (B, H, Sq, D), (B, G, Sk, D), (B, G, Sk, Dv)
    check_kernel(sizes, fp8_dtype, (MASKS[mask](Sq, Sk), D**-0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", [(64, 64), (128, 128), (192, 128), (80, 200), (256, 256)])
def test_kernel_is_near_float64_for_every_mask_and_head_size(heads, mask):
    D, Dv = heads
    for Sq, Sk in ((384, 384), (200, 717), (717, 200), (1, 300), (130, 129)):
        sizes = (2, 4, Sq, D), (2, 2, Sk, D), (2, 2, Sk, Dv)
        check_kernel(sizes, E4M3, (MASKS[mask](Sq, Sk), D**-0.5), layouts=["by-token"])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", ["full", "bottom-right", "window"])
@pytest.mark.parametrize("heads", [(64, 64), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize(
    "lengths",
    [
        ([384, 1, 0, 200, 129], [384, 1, 0, 200, 129]),
        ([5, 130, 300, 0], [40, 700, 513, 17]),
        ([300, 128, 7], [130, 0, 7]),
        ([3] * 300, [4] * 300),
    ],
    ids=["equal", "keys-longer", "blind", "many"],
)
def test_kernel_of_packed_sequences_is_near_float64(lengths, heads, mask):
    D, Dv = heads
    ends = [torch.tensor([0, *side]).cumsum(0).int().cuda() for side in lengths]
    Sq, Sk = (int(end[-1]) + 70 for end in ends)
    sizes = (1, 4, Sq, D), (1, 2, Sk, D), (1, 2, Sk, Dv)
    check_kernel(sizes, E4M3, (MASKS[mask](150, 150), D**-0.5), ends, ["by-token"])


@pytest.mark.gpu
def test_packed_sequences_do_not_affect_each_other():
    """NaN in other sequences, and in tokens of no sequence, does not spread."""
    ends = torch.tensor([0, 100, 333, 500], dtype=torch.int32, device="cuda")
    pairs = [quantized((1, 2, 600, 128), E4M3, "cuda") for _ in range(3)]
    tensors, scales = [p[0] for p in pairs], [p[1] for p in pairs]
    dout = torch.randn(1, 2, 600, 128, device="cuda", dtype=torch.bfloat16)
    settings = (-1, 0, 0), 0.1

    def run():
        forward = ops.fp8_attention_op(*tensors, *scales, *settings, torch.bfloat16, ends, ends)
        backward = ops.fp8_attention_backward_op(
            dout, *tensors, *scales, *forward, *settings, ends, ends, 233, 233
        )
        return forward[0], *backward

    results, _, third_results = run(), run(), run()  # the third repeats the recorded second
    assert all(map(torch.equal, results, third_results))
    for x in (*tensors, dout):
        x[:, :, :100] = x[:, :, 333:] = torch.nan
    for x, with_nan in zip(results, run(), strict=True):
        assert torch.equal(with_nan[:, :, 100:333], x[:, :, 100:333])
        assert with_nan[:, :, :100].isnan().all()
        assert not with_nan[:, :, 500:].any()


@pytest.mark.gpu
@pytest.mark.parametrize(("left", "right"), [(-1, -1), (-1, 0), (200, 0), (70, 30), (90, -1)])
def test_packed_sequences_have_the_bytes_of_separate_ones(left, right):
    """Results are equal bit for bit, also with a window that hides nothing."""
    lengths = [(300, 420), (2, 2), (129, 64), (1000, 1000), (64, 700)]
    ends = [
        torch.tensor([0, *side], device="cuda").cumsum(0).int()
        for side in zip(*lengths, strict=True)
    ]
    pairs = [quantized((1, H, int(end[-1]), 128), E4M3, "cuda")
             for H, end in ((4, ends[0]), (2, ends[1]), (2, ends[1]))]  # fmt: skip
    tensors, scales = [p[0] for p in pairs], [p[1] for p in pairs]
    dout = torch.randn(1, 4, int(ends[0][-1]), 128, device="cuda", dtype=torch.bfloat16)

    def run(dout, tensors, window, *packed):
        forward = ops.fp8_attention_op(*tensors, *scales, window, 0.1, dout.dtype, *packed[:2])
        arguments = (dout, *tensors, *scales, *forward, window, 0.1, *packed)
        return forward[0], *ops.fp8_attention_backward_op(*arguments)

    packed_results = run(dout, tensors, (left, right, 0), *ends, 1000, 1000)
    spans = [[slice(*pair) for pair in itertools.pairwise(end.tolist())] for end in ends]
    for q_rows, k_rows in zip(*spans, strict=True):
        operands = [
            x[:, :, rows] for x, rows in zip(tensors, (q_rows, k_rows, k_rows), strict=True)
        ]
        separate = run(dout[:, :, q_rows], operands, (left, right, 0))
        for x, y, rows in zip(
            packed_results, separate, (q_rows, q_rows, k_rows, k_rows), strict=True
        ):
            assert torch.equal(x[:, :, rows], y)
        wide_window = [2000 if limit < 0 else limit for limit in (left, right)]
        assert all(map(torch.equal, separate, run(dout[:, :, q_rows], operands, (*wide_window, 0))))


@pytest.mark.gpu
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
def test_kernel_is_deterministic_in_every_dtype(dtype, D):
    pairs = [quantized((2, 2, 256, D), E4M3, "cuda") for _ in range(3)]
    shared = (*(p[0] for p in pairs), *(p[1] for p in pairs))
    settings = ((-1, 0, 0), 0.125)
    forward_results = ops.fp8_attention_op(*shared, *settings, dtype)
    check_forward(forward_results, dequantized(*zip(*pairs, strict=True)), settings)
    arguments = (torch.randn_like(forward_results[0]), *shared, *forward_results, *settings)
    want = reference.fp8_attention_backward(*arguments)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [ops.fp8_attention_backward_op(*arguments) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for a, repeated, b in zip(*runs, want, strict=True):
        assert a.dtype == dtype
        assert torch.equal(a, repeated)
        assert (a.float() - b.float()).norm() <= allowed_error(*shared[:3]) * b.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("S", [16384, 131072])
def test_fp8_backward_is_precise_for_long_sequences(S, causal):
    """Probabilities of 1 / S are as precise as in short sequences, also for the last keys."""
    tensors = [torch.randn(1, 2, S, 128, device="cuda").mul(64).to(E4M3) for _ in range(3)]
    scale = torch.tensor(2.0**-6, device="cuda")
    settings = ((-1, 0 if causal else -1, 0), 128**-0.5)
    forward_results = ops.fp8_attention_op(*tensors, scale, scale, scale, *settings, torch.bfloat16)
    dout = torch.randn_like(forward_results[0]) * torch.rand(S, 1, device="cuda")
    got = ops.fp8_attention_backward_op(
        dout, *tensors, scale, scale, scale, *forward_results, *settings
    )
    exact = [(x.bfloat16() * scale).requires_grad_() for x in tensors]
    F.scaled_dot_product_attention(*exact, is_causal=causal).backward(dout)
    for gradient, x in zip(got, exact, strict=True):
        for rows in (slice(S // 2), slice(S // 2, S)):
            error = (gradient[:, :, rows] - x.grad[:, :, rows]).float().norm()
            assert error <= 10 ** (-24 / 20) * x.grad[:, :, rows].float().norm()


@pytest.mark.gpu
def test_fp8_backward_propagates_nonfinite_values():
    """Infinities and NaN of a query reach its gradient and those of the keys that it sees."""
    pairs = [quantized((1, 2, 200, 128), E4M3, "cuda") for _ in range(3)]
    shared = (*(p[0] for p in pairs), *(p[1] for p in pairs))
    settings = ((-1, 0, 0), 0.1)
    forward_results = ops.fp8_attention_op(*shared, *settings, torch.bfloat16)
    for value in (torch.inf, torch.nan):
        dout = torch.randn_like(forward_results[0])
        dout[0, 1, 130, 5] = value
        dout[0, 0] = 0.0
        dq, dk, dv = ops.fp8_attention_backward_op(dout, *shared, *forward_results, *settings)
        for x, rows in ((dq, slice(130, 131)), (dk, slice(131)), (dv, slice(131))):
            assert not x[:, 0].any()
            assert not x[0, 1, rows].isfinite().all(-1).any()


@pytest.mark.gpu
def test_kernel_takes_more_heads_than_a_grid_has_rows():
    pairs = [quantized((1100, 60, 2, 16), E4M3, "cuda") for _ in range(3)]
    tensors, scales = zip(*pairs, strict=True)
    settings = ((-1, 0, 0), 0.25)
    forward_results = ops.fp8_attention_op(*tensors, *scales, *settings, torch.bfloat16)
    check_forward(forward_results, dequantized(tensors, scales), settings)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [(-1, 0, 0), (1024, 0, 0)], ids=["causal", "window"])
def test_kernel_stores_no_matrix_of_scores(mask):
    S, settings = 65536, (mask, 0.125)  # scores of one head: 16 GiB in float32
    pairs = [quantized((1, 1, S, 64), E4M3, "cuda") for _ in range(3)]
    shared = (*(p[0] for p in pairs), *(p[1] for p in pairs))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, *statistics = ops.fp8_attention_op(*shared, *settings, torch.bfloat16)
    ops.fp8_attention_backward_op(out, *shared, out, *statistics, *settings)
    assert torch.cuda.max_memory_allocated() - before < 2**28
    assert out.isfinite().all()


def test_small_probabilities_survive(device):
    """2048 equal probabilities of 2 ** -11 are exact."""
    scale = torch.ones(1, device=device)
    q, k, v = (
        torch.full((1, 1, size, 4), value, device=device).to(E4M3)
        for size, value in ((1, 0.0), (2048, 0.0), (2048, 1.5))
    )
    out, lse, max_scores = ops.fp8_attention_op(
        q, k, v, scale, scale, scale, (-1, -1, 0), 1.0, torch.float32
    )
    assert (out.tolist(), max_scores.tolist()) == ([[[[1.5] * 4]]], [[[0.0]]])
    assert lse.item() == pytest.approx(11 * torch.tensor(2.0).log().item())
    assert reference.P_SCALE * 448 > 1


def test_nan_stays_in_its_query_and_large_scores_saturate(device):
    scale = torch.ones(1, device=device)
    q = torch.full((1, 1, 2, 4), 448.0, device=device).to(E4M3)
    k = torch.stack([torch.full((1, 1, 4), s * 448.0, device=device) for s in (1, -1)], 2).to(E4M3)
    v = torch.tensor([1.0, 2.0], device=device).view(1, 1, 2, 1).to(E4M3)
    arguments = ((-1, -1, 0), 1.0, torch.float32)
    out, *_ = ops.fp8_attention_op(q, k, v, scale, scale, scale, *arguments)
    # The weight of the other key underflows. Scores this large lose their last bits in the kernel,
    # so the weight of the first key is not exactly 1, and is rounded.
    assert (out.cpu() - 1).abs().max() <= (1 / 16 if out.is_cuda else 0)
    q = q.float()
    q[0, 0, 0, 0] = torch.nan
    out, *_ = ops.fp8_attention_op(q.to(E4M3), k, v, scale, scale, scale, *arguments)
    assert out.isnan().flatten().tolist() == [True, False]
