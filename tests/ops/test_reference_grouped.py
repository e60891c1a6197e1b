"""Casts and products of groups: every group as if it were alone, and nobody's rows as zeros."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.ops import Groups, reference
from float8lab.ops.reference import round_up
from tests.ops.groups import CASTS, SIZES, bounds, cast_alone, cast_groups, ends, grouped_mm, rows

each_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def bytes_of(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8)


@each_cast
@each_size
def test_groups_have_the_bytes_of_being_cast_alone(sizes, cast):
    block, _, rule = cast
    x = rows(sizes, 70)
    M, used = x.shape[0], sum(sizes)
    q, scale, amax, q_t, scale_t, total = cast_groups(
        ops.cast_op, "", [x], x.dtype, ends(sizes), E4M3, block, rule, 0.0, True, True, True
    )
    if block == (-1, -1):
        parts = [
            part.abs().max() if len(part) else torch.zeros(()) for part in x.split([*sizes, 9])
        ]
        assert torch.equal(amax.flatten(), torch.stack(parts[:-1]))
        assert (scale[amax == 0] == 1).all()
    assert q.shape == (M, 80)
    assert q_t.shape == (80, reference.padded_rows(M, len(sizes)))
    for index, start, end, place in bounds(sizes):
        width, size = round_up(end - start, 128), end - start
        assert torch.equal(total[index], x[start:end].sum(0))
        if size == 0:
            continue
        own, own_scale, turned, turned_scale = cast_alone(x[start:end], block, rule)
        assert torch.equal(bytes_of(q[start:end]), bytes_of(own[:size]))
        assert torch.equal(bytes_of(q_t[:, place : place + size]), bytes_of(turned[:, :size]))
        assert not bytes_of(q_t[:, place + size : place + width]).any()
        if block == (-1, -1):
            assert torch.equal(scale[index], own_scale)
            assert torch.equal(scale_t[index], turned_scale)
            continue
        assert torch.equal(scale[start:end], own_scale[:size])
        if block[1] == -1:
            assert torch.equal(scale_t[index], turned_scale)
        else:
            first = place // block[1]
            mine = scale_t[:, first : first + turned_scale.shape[1]]
            assert torch.equal(mine, turned_scale)
    assert not bytes_of(q[used:]).any()


@each_cast
def test_each_matrix_of_a_batch_is_cast_alone(cast):
    _, block, rule = cast
    w = torch.randn(3, 40, 200) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1)
    q, scale, amax, q_t, scale_t, _ = cast_groups(
        ops.cast_op, "", [w], w.dtype, None, E4M3, block, rule, 0.0, True, True
    )
    for index, one in enumerate(w):
        wanted = cast_alone(one, block, rule)
        for got, want in zip((q, scale, q_t, scale_t), wanted, strict=True):
            same = bytes_of if got.dtype == E4M3 else lambda t: t
            assert torch.equal(same(got[index]), same(want))
    if block == (-1, -1):
        assert torch.equal(amax, w.abs().amax((1, 2), keepdim=True))


def test_slots_see_the_rows_of_their_group_alone():
    x, offs = rows([3, 0, 5], 20), ends([3, 0, 5])
    how = (E5M2, (-1, -1), "encode", 0.0, True, True, False)
    slot, factors = torch.full((3,), ops.NO_DATA), torch.tensor([1.0, 3.0, 64.0])
    q, *_ = cast_groups(ops.cast_op, "", [x], x.dtype, offs, *how, factors, slot)
    assert slot.tolist() == [x[:3].abs().max(), ops.NO_DATA, x[3:8].abs().max()]
    assert torch.equal(q[3:8, :20].float(), (x[3:8] * 64).to(E5M2).float())
    for whole in (factors[:1], factors[:1].expand(3)):  # one factor serves all groups
        q, *_, q_t, _, _ = cast_groups(ops.cast_op, "", [x], x.dtype, offs, *how, whole)
        assert torch.equal(q[:8, :20].float(), x[:8].to(E5M2).float())
        assert torch.equal(q_t[:20, 128:133].float(), x[3:8].to(E5M2).float().t())
    w = torch.randn(2, 5, 7)
    slots = torch.full((2,), ops.NO_DATA)
    q, *_ = cast_groups(ops.cast_op, "", [w], w.dtype, None, *how, torch.tensor([1.0, 64.0]), slots)
    assert torch.equal(slots, w.abs().amax((1, 2)))
    assert torch.equal(q[1, :5, :7].float(), (w[1] * 64).to(E5M2).float())


def test_a_prologue_is_cast_in_groups():
    h, offs = rows([3, 0, 5], 40), ends([3, 0, 5])
    how = (E4M3, (1, 128), "fp32", 0.0, True, True, True)
    got = cast_groups(ops.cast_op, "swiglu", [h], h.dtype, offs, *how)
    token = torch.tensor([7, 0, 7, 1, -1, 2, 3, 6], dtype=torch.int32)
    permuted = cast_groups(ops.cast_op, "permute", [h, token], h.dtype, offs, *how)
    values = reference.value_of("swiglu", [h], h.dtype), h[token.long()]
    values[1][4] = 0
    for results, value in zip((got, permuted), values, strict=True):
        want = cast_groups(ops.cast_op, "", [value], h.dtype, offs, *how)
        for one, other in zip(results, want, strict=True):
            assert one is other or torch.equal(one.float(), other.float())


@each_cast
@each_size
def test_products_of_groups(sizes, cast):
    """Against float64 products of what the operands stand for, to within float32's rounding."""
    block, w_block, rule = cast
    offs, E = ends(sizes), len(sizes)
    x, dy, w = rows(sizes, 48), rows(sizes, 32), torch.randn(E, 32, 48)
    bias = torch.randn(E, 32)
    x_q, x_s, _, x_t, x_ts, _ = cast_groups(
        ops.cast_op, *Groups("", [x], x.dtype, offs)[:4], E4M3, block, rule, 0.0, True, True
    )
    dy_q, dy_s, _, dy_t, dy_ts, _ = cast_groups(
        ops.cast_op, *Groups("", [dy], x.dtype, offs)[:4], E5M2, block, rule, 0.0, True, True
    )
    w_q, w_s, _, w_t, w_ts, _ = cast_groups(
        ops.cast_op, *Groups("", [w], x.dtype, None)[:4], E4M3, w_block, rule, 0.0, True, True
    )
    y = grouped_mm(ops.scaled_mm_op, x_q, x_s, block, w_q, w_s, w_block, bias, offs, x.dtype, False)
    dx = grouped_mm(
        ops.scaled_mm_op, dy_q, dy_s, block, w_t, w_ts, w_block, None, offs, x.dtype, False
    )
    dw = grouped_mm(
        ops.scaled_mm_op, dy_t, dy_ts, block, x_t, x_ts, block, None, offs, x.dtype, False
    )

    def value(q, scale, block):
        return reference.dequantize(q, scale, block, torch.float64)

    def close(got, left, right, added=0.0):
        bound = (
            torch.finfo(torch.float32).eps
            * (left.shape[1] + 8)
            * (left.abs() @ right.abs().mT + abs(added))
        )
        assert ((got.double() - (left @ right.mT + added)).abs() <= bound).all()

    for index, start, end, place in bounds(sizes):
        own = [s[index] if block == (-1, -1) else s[start:end] for s in (x_s, dy_s)]
        columns = slice(place, place + end - start)
        turned = []
        for q, scale in ((x_t, x_ts), (dy_t, dy_ts)):
            if block[1] == -1:
                scale = scale[index] if scale.ndim == 3 else scale
            else:
                scale = scale[:, place // block[1] :]
            turned.append(value(q[:, columns], scale, block))
        close(
            y[start:end], value(x_q[start:end], own[0], block),
            value(w_q[index], w_s[index], w_block), bias[index].double(),
        )  # fmt: skip
        close(
            dx[start:end], value(dy_q[start:end], own[1], block),
            value(w_t[index], w_ts[index], w_block),
        )  # fmt: skip
        close(dw[index], turned[1], turned[0])
    for zeros in (y, dx):
        assert not zeros[sum(sizes) :].any()
    if block == (-1, -1):  # one scale may serve all groups
        arguments = (block, w_q, w_s, w_block, bias, offs, x.dtype, False)
        for one in (torch.full((1, 1), 0.5), torch.full((1,), 0.5)):
            got = grouped_mm(ops.scaled_mm_op, x_q, one, *arguments)
            assert torch.equal(
                got, grouped_mm(ops.scaled_mm_op, x_q, one.expand(E, 1, 1), *arguments)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_products_in_high_precision(dtype):
    sizes = SIZES["ragged"]
    offs = ends(sizes, dtype=torch.int64)
    x, dy, w = rows(sizes, 20, dtype=dtype), rows(sizes, 8, dtype=dtype), torch.randn(7, 8, 20)
    w = w.to(dtype)
    y = grouped_mm(ops.scaled_mm_op, x, None, (), w, None, (), None, offs, dtype, False)
    dw = grouped_mm(ops.scaled_mm_op, dy.t(), None, (), x.t(), None, (), None, offs, dtype, False)
    for index, start, end, _ in bounds(sizes):
        assert torch.equal(y[start:end], x[start:end] @ w[index].t())
        assert torch.equal(dw[index], dy[start:end].t() @ x[start:end])
    assert not y[sum(sizes) :].any()


def test_flops_count_tokens_and_not_the_room_between_groups():
    offs = ends([100, 28, 300])
    x, w = torch.randn(428, 32), torch.randn(3, 16, 32)
    q, scale, _, q_t, scale_t, _ = cast_groups(
        ops.cast_op, "", [x], x.dtype, offs, E4M3, (1, 128), "fp32", 0.0, True, True
    )
    w_q, w_s, *_ = cast_groups(ops.cast_op, "", [w], w.dtype, None, E4M3, (128, 128), "fp32")
    with FlopCounterMode(display=False) as forward:
        grouped_mm(
            ops.scaled_mm_op, q, scale, (1, 128), w_q, w_s, (128, 128), None, offs, torch.float32,
            False,
        )  # fmt: skip
    with FlopCounterMode(display=False) as contraction:
        grouped_mm(
            ops.scaled_mm_op, q_t, scale_t, (1, 128), q_t, scale_t, (1, 128), None, offs,
            torch.float32, False,
        )  # fmt: skip
    assert forward.get_total_flops() == 2 * 428 * 16 * 32
    assert 0 <= 2 * 428 * 32 * 32 - contraction.get_total_flops() < 2 * 128 * 32 * 32
