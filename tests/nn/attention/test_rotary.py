"""Rotary embedding: against complex rotation in float64, every parameter, format and gradient."""

import pytest
import torch

from float8lab.nn import RotaryPositionEmbedding, apply_rotary_pos_emb

S, B, H, D = 6, 2, 3, 8


def rotated(x, positions, *, base=10000.0, rotate=D, interleaved=False, divisor=1.0):
    """``[..., D]`` turned as complex numbers in float64; positions broadcast to ``[..., 1]``."""
    x = x.double()
    n = torch.arange(rotate // 2, dtype=torch.float64)
    angle = positions.double() / divisor * base ** (-2 * n / rotate)
    turn = torch.polar(torch.ones_like(angle), angle)
    part = x[..., :rotate]
    if interleaved:
        z = torch.complex(part[..., ::2], part[..., 1::2]) * turn
        out = torch.stack((z.real, z.imag), -1).flatten(-2)
    else:
        z = torch.complex(part[..., : rotate // 2], part[..., rotate // 2 :]) * turn
        out = torch.cat((z.real, z.imag), -1)
    return torch.cat((out, x[..., rotate:]), -1)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("started", [False, True], ids=["", "start"])
def test_formats_and_gradient(interleaved, percent, tensor_format, started):
    rope = RotaryPositionEmbedding(D, percent, interleaved=interleaved)
    starts = torch.tensor([3, 1]) if started else None
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
    expected = rotated(x64, positions, rotate=int(D * percent), interleaved=interleaved)
    assert torch.allclose(y.double(), expected, atol=1e-5)
    (dx,), (exact,) = (
        torch.autograd.grad(a, b, dy.to(a.dtype)) for a, b in ((y, x), (expected, x64))
    )
    assert torch.allclose(dx.double(), exact, atol=1e-5)


def test_base_offset_and_interpolation():
    x = torch.randn(S, 1, 1, D)
    positions = torch.arange(S).view(S, 1, 1, 1)
    for base in (10000.0, 500000.0):
        rope = RotaryPositionEmbedding(D, rotary_base=base)
        y = apply_rotary_pos_emb(x, rope(S, offset=5))
        assert torch.allclose(y.double(), rotated(x, positions + 5, base=base), atol=1e-5)
    rope = RotaryPositionEmbedding(D, seq_len_interpolation_factor=4.0)
    y = apply_rotary_pos_emb(x, rope(S))
    assert torch.allclose(y.double(), rotated(x, positions, divisor=4.0), atol=1e-5)
    rope = RotaryPositionEmbedding(
        D, seq_len_interpolation_factor=2.0, pretrained_max_position_embeddings=2
    )
    y = apply_rotary_pos_emb(x, rope(S))  # longer than 2 * 2: ends where training ended
    assert torch.allclose(y.double(), rotated(x, positions, divisor=S / 2), atol=1e-5)
    y = apply_rotary_pos_emb(x[:3], rope(3))
    assert torch.allclose(y.double(), rotated(x[:3], positions[:3], divisor=2.0), atol=1e-5)


def test_half_precision_turns_in_float32():
    x = torch.randn(4096, 1, 1, D).bfloat16()
    y = apply_rotary_pos_emb(x, RotaryPositionEmbedding(D)(4096))
    assert y.dtype == torch.bfloat16
    exact = rotated(x, torch.arange(4096).view(-1, 1, 1, 1))
    assert (y.double() - exact).norm() <= 2.0**-8 * exact.norm()


def test_no_parameters_and_no_state():
    rope = RotaryPositionEmbedding(D)
    assert list(rope.state_dict()) == []
    assert rope.to(torch.float64)(3).dtype == torch.float32


def test_wrong_arguments_are_refused():
    rope = RotaryPositionEmbedding(D)
    x = torch.randn(S, 1, 1, D)
    with pytest.raises(ValueError, match="freqs must have at least 6 positions; got 5"):
        apply_rotary_pos_emb(x, rope(5))
    with pytest.raises(ValueError, match="at most the head size 4"):
        apply_rotary_pos_emb(x[..., :4], rope(S))
    with pytest.raises(ValueError, match="cu_seqlens must be given"):
        apply_rotary_pos_emb(x[:, 0], rope(S), "thd")
    with pytest.raises(ValueError, match=r"dim \* rotary_percent must be even"):
        RotaryPositionEmbedding(6, 0.5)
