"""Rotary embedding equals complex rotation in float64: every parameter, format and gradient."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from float8lab.distributed.context_parallel import TokenRanks, positions
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.nn import RotaryPositionEmbedding, apply_rotary_pos_emb
from float8lab.nn.attention import rotary
from float8lab.ops import rotate_op
from float8lab.ops.reference.rotary import rotate

S, B, H, D = 6, 2, 3, 8


def complex_rotation(x, positions, *, base=10000.0, rotate=D, interleaved=False, divisor=1.0):
    """Rotates ``[..., D]`` as complex numbers in float64; positions broadcast to ``[..., 1]``."""
    x = x.double()
    n = torch.arange(rotate // 2, dtype=torch.float64)
    angle = positions.double() / divisor * base ** (-2 * n / rotate)
    phase = torch.polar(torch.ones_like(angle), angle)
    rotated_part = x[..., :rotate]
    if interleaved:
        z = torch.complex(rotated_part[..., ::2], rotated_part[..., 1::2]) * phase
        out = torch.stack((z.real, z.imag), -1).flatten(-2)
    else:
        z = (
            torch.complex(rotated_part[..., : rotate // 2], rotated_part[..., rotate // 2 :])
            * phase
        )
        out = torch.cat((z.real, z.imag), -1)
    return torch.cat((out, x[..., rotate:]), -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("with_starts", [False, True], ids=["", "start"])
def test_every_format_and_its_gradient_equal_complex_rotation(
    interleaved, percent, tensor_format, with_starts
):
    rope = RotaryPositionEmbedding(D, percent, interleaved=interleaved, device="cpu")
    starts = torch.tensor([3, 1]) if with_starts else None
    lengths = [4, 2]
    shape = {"sbhd": (S, B, H, D), "bshd": (B, S, H, D), "thd": (S, H, D)}[tensor_format]
    x, dy = torch.randn(shape, requires_grad=True), torch.randn(shape)
    offsets = torch.tensor([0, 0]) if starts is None else starts
    if tensor_format == "thd":
        positions = torch.cat([torch.arange(n) + o for n, o in zip(lengths, offsets, strict=True)])
        positions = positions.view(S, 1, 1)
    else:
        positions = (torch.arange(S)[:, None] + offsets).view(S, B, 1, 1)
        positions = positions if tensor_format == "sbhd" else positions.transpose(0, 1)
    y = apply_rotary_pos_emb(
        x, rope(10), tensor_format, interleaved=interleaved, start_positions=starts,
        cu_seqlens=torch.tensor([0, 4, 6]) if tensor_format == "thd" else None,
    )  # fmt: skip
    x64 = x.detach().double().requires_grad_()
    expected = complex_rotation(x64, positions, rotate=int(D * percent), interleaved=interleaved)
    assert torch.allclose(y.double(), expected, atol=1e-5)
    (dx,), (exact,) = (
        torch.autograd.grad(a, b, dy.to(a.dtype)) for a, b in ((y, x), (expected, x64))
    )
    assert torch.allclose(dx.double(), exact, atol=1e-5)


@pytest.mark.parametrize("starts", [None, torch.tensor([1, 2])], ids=["", "start"])
def test_tokens_after_the_last_sequence_need_no_angles(starts):
    x = torch.randn(20, H, D)
    angles = RotaryPositionEmbedding(D, device="cpu")(4 if starts is None else 6)
    call = {"cu_seqlens": torch.tensor([0, 2, 6]), "start_positions": starts}
    y = apply_rotary_pos_emb(x, angles, "thd", **call)
    assert torch.equal(y[:6], apply_rotary_pos_emb(x[:6], angles, "thd", **call))
    call = {"cu_seqlens": torch.tensor([0]), "start_positions": torch.tensor([]).long()}
    assert apply_rotary_pos_emb(x, angles, "thd", **call).shape == x.shape


def test_base_offset_and_interpolation_take_effect():
    x = torch.randn(S, 1, 1, D)
    positions = torch.arange(S).view(S, 1, 1, 1)
    for base in (10000.0, 500000.0):
        rope = RotaryPositionEmbedding(D, rotary_base=base, device="cpu")
        y = apply_rotary_pos_emb(x, rope(S, offset=5))
        assert torch.allclose(y.double(), complex_rotation(x, positions + 5, base=base), atol=1e-5)
    rope = RotaryPositionEmbedding(D, seq_len_interpolation_factor=4.0, device="cpu")
    y = apply_rotary_pos_emb(x, rope(S))
    assert torch.allclose(y.double(), complex_rotation(x, positions, divisor=4.0), atol=1e-5)
    rope = RotaryPositionEmbedding(
        D, seq_len_interpolation_factor=2.0, pretrained_max_position_embeddings=2, device="cpu"
    )
    # The sequence is longer than 2 * 2, so it is scaled to end where training ended.
    y = apply_rotary_pos_emb(x, rope(S))
    assert torch.allclose(y.double(), complex_rotation(x, positions, divisor=S / 2), atol=1e-5)
    y = apply_rotary_pos_emb(x[:3], rope(3))
    assert torch.allclose(
        y.double(), complex_rotation(x[:3], positions[:3], divisor=2.0), atol=1e-5
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_half_precision_inputs_are_rotated_in_float32(device):
    x = torch.randn(4096, 1, 1, D).bfloat16()
    rope = RotaryPositionEmbedding(D, device=device).bfloat16().to_empty(device="cpu")
    assert list(rope.state_dict()) == []
    y = apply_rotary_pos_emb(x, rope(4096))
    assert y.dtype == torch.bfloat16
    exact = complex_rotation(x, torch.arange(4096).view(-1, 1, 1, 1))
    assert (y.double() - exact).norm() <= 2.0**-8 * exact.norm()


def test_wrong_arguments_are_refused():
    rope = RotaryPositionEmbedding(D, device="cpu")
    x = torch.randn(S, 1, 1, D)
    with pytest.raises(ValueError, match="freqs must have at least 6 positions; got 5"):
        apply_rotary_pos_emb(x, rope(5))
    with pytest.raises(ValueError, match="freqs must have at least 6 positions; got 5"):
        apply_rotary_pos_emb(x[:, 0], rope(5), "thd", cu_seqlens=torch.tensor([0, S]))
    with pytest.raises(ValueError, match="at most the head size 4"):
        apply_rotary_pos_emb(x[..., :4], rope(S))
    with pytest.raises(ValueError, match="cu_seqlens must be given"):
        apply_rotary_pos_emb(x[:, 0], rope(S), "thd")
    cu_seqlens, starts = torch.tensor([0, 2, S]), torch.tensor([0, -1])
    with pytest.raises(ValueError, match=r"cu_seqlens must be .*, 5 at most; got \[0, 2, 6\]"):
        apply_rotary_pos_emb(x[:5, 0], rope(S), "thd", cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match=r"start_positions must be in \[0, 6\], .*; got \[0, -1\]"):
        apply_rotary_pos_emb(x[:, 0], rope(S), "thd", cu_seqlens=cu_seqlens, start_positions=starts)
    with pytest.raises(ValueError, match="cp_rank must be below cp_size 2; got 2"):
        apply_rotary_pos_emb(x, rope(S), fused=True, cp_size=2, cp_rank=2)
    with pytest.raises(ValueError, match="cp_rank must be an integer of at least 0; got -1"):
        apply_rotary_pos_emb(x, rope(S), fused=True, cp_size=2, cp_rank=-1)
    with pytest.raises(ValueError, match=r"freqs must have at least 12 positions; got 6.*all cont"):
        apply_rotary_pos_emb(x, rope(S), cp_size=2, cp_rank=1)
    with pytest.raises(ValueError, match="t must have sequences whose lengths are multiples of 4"):
        apply_rotary_pos_emb(x[:5], rope(12), cp_size=2, cp_rank=1)
    with pytest.raises(ValueError, match=r"dim \* rotary_percent must be even"):
        RotaryPositionEmbedding(6, 0.5, device="cpu")


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_tokens_of_a_context_parallel_rank_get_their_global_positions(tensor_format):
    rope, R = RotaryPositionEmbedding(D, device="cpu"), 3
    dim, starts = int(tensor_format == "bshd"), torch.tensor([0, 12, 12, 30])
    shape = {"sbhd": (30, 2, 1, D), "bshd": (2, 30, 1, D), "thd": (30, 1, D)}[tensor_format]
    call = {"cu_seqlens": starts} if tensor_format == "thd" else {}
    t = torch.randn(shape)
    unsharded = apply_rotary_pos_emb(t, rope(30), tensor_format, **call)
    rank_positions = positions(starts if call else torch.tensor([0, 30]), 10, TokenRanks(R))
    for rank in range(R):
        local_shard = t.index_select(dim, rank_positions[rank])
        rotated_shard = apply_rotary_pos_emb(
            local_shard, rope(30), tensor_format, **call, cp_size=R, cp_rank=rank
        )
        assert torch.equal(rotated_shard, unsharded.index_select(dim, rank_positions[rank]))


LAYOUTS = {
    "contiguous": lambda *shape: torch.randn(shape),
    "packed": lambda *shape: torch.randn(*shape[:2], 3, *shape[2:])[:, :, 1],
    "by-head": lambda a, b, h, d: torch.randn(a, h, b, d).transpose(1, 2),
    "by-column": lambda a, b, h, d: torch.randn(a, b, d, h).mT,
}


@pytest.mark.gpu
@pytest.mark.parametrize("backward", [False, True], ids=["", "backward"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("dtype", HIGH_PRECISION_DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_kernel_has_the_bits_of_the_reference(layout, dtype, interleaved, backward):
    for A, B_, H_, D_, R in ((5, 3, 7, 128, 128), (1, 33, 1, 80, 32), (2, 1, 130, 6, 2)):
        t = LAYOUTS[layout](A, B_, H_, D_).to("cuda", dtype, copy=True)
        for shape in ((A, B_, 1, R), (1, B_, 1, R), (A, 1, 1, R)):
            cos, sin = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda")
            actual = rotate_op(t, cos, sin, interleaved, backward)
            expected = rotate(t, cos, sin, interleaved, backward)
            assert torch.equal(actual, expected)
            assert actual.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotation_on_a_gpu_equals_the_cpu(percent, tensor_format):
    shape = {"sbhd": (S, B, H, D), "bshd": (B, S, H, D), "thd": (S, H, D)}[tensor_format]
    x, dy = torch.randn(shape), torch.randn(shape)
    results = []
    for device in ("cpu", "cuda"):
        leaf = x.to(device).requires_grad_()
        y = apply_rotary_pos_emb(
            leaf, RotaryPositionEmbedding(D, percent, device=device)(10), tensor_format,
            cu_seqlens=torch.tensor([0, 4, 6], device=device) if tensor_format == "thd" else None,
        )  # fmt: skip
        (dx,) = torch.autograd.grad(y, leaf, dy.to(device))
        results.append((y.cpu(), dx.cpu()))
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert torch.allclose(on_cpu, on_gpu, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_the_first_and_second_derivative_equal_those_of_the_reference(interleaved, device):
    """The angles of a pair may differ."""
    shape = (2, 3, 4, 8)
    t, dy = (torch.randn(shape, device=device, requires_grad=True) for _ in range(2))
    cos, sin = torch.randn(2, 1, 1, 6, device=device), torch.randn(2, 1, 1, 6, device=device)
    y = rotary._Rotate.apply(t, cos, sin, interleaved, False)
    plain = rotate(t, cos, sin, interleaved, False)
    assert torch.equal(y, plain)
    derivatives = []
    for out in (y, plain):
        (dt,) = torch.autograd.grad(out, t, dy, create_graph=True)
        (ddy,) = torch.autograd.grad(dt.sum(), dy)
        derivatives.append((dt, ddy))
    for actual, exact in zip(*derivatives, strict=True):
        assert torch.allclose(actual, exact, atol=1e-6)


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_compiled_forward_and_backward_are_one_rotate_op_each(percent, device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setattr(rotary, "_takes_op", lambda t, angles: True)
    angles, graph_targets = RotaryPositionEmbedding(D, percent, device=device)(S), []

    def collect_targets(graph, inputs):
        graph_targets.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    torch._dynamo.reset()
    compiled = torch.compile(
        apply_rotary_pos_emb,
        fullgraph=True,
        backend=aot_autograd(fw_compiler=collect_targets, bw_compiler=collect_targets),
    )
    x, dy = torch.randn(2, S, B, H, D, device=device).unbind()
    results = []
    for function in (compiled, apply_rotary_pos_emb):
        leaf = x.clone().requires_grad_()
        y = function(leaf, angles)
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    assert all(map(torch.equal, *results))
    assert [targets.count("float8lab.rotate.default") for targets in graph_targets] == [1, 1]


def test_rotate_op_passes_opcheck(device):
    t, angles = torch.randn(2, 3, 4, 8, device=device), torch.randn(2, 1, 1, 6, device=device)
    for flags in ((False, False), (True, True)):
        torch.library.opcheck(rotate_op.overload, (t, angles.cos(), angles.sin(), *flags))


def test_trained_angles_get_a_gradient(device):
    angles = torch.randn(6, 1, 1, 8, device=device, requires_grad=True)
    y = apply_rotary_pos_emb(torch.randn(6, 2, 3, 8, device=device), angles)
    assert torch.autograd.grad(y.sum(), angles)[0].abs().sum() > 0
