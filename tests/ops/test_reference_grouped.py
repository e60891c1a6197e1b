"""Casts and GEMMs of groups: each group equals a separate call, and padding rows give zeros."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from float8lab import ops
from float8lab.formats import E4M3, E5M2
from float8lab.ops import Groups, reference
from float8lab.ops.reference import round_up
from tests.ops.groups import (
    CASTS,
    SIZES,
    bounds,
    cast_groups,
    cast_separately,
    grouped_mm,
    offsets,
    rows,
)

each_cast = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
each_size = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)


def bytes_of(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.uint8)


@each_cast
@each_size
def test_groups_have_the_bytes_of_separate_casts(sizes, cast):
    block, _, rule = cast
    x = rows(sizes, 70)
    M, used = x.shape[0], sum(sizes)
    q, scale, amax, q_t, scale_t, sums = cast_groups(
        ops.cast_op, "", [x], x.dtype, offsets(sizes), E4M3, block, rule, 0.0, True, True, True
    )
    if block == (-1, -1):
        parts = [
            part.abs().max() if len(part) else torch.zeros(()) for part in x.split([*sizes, 9])
        ]
        assert torch.equal(amax.flatten(), torch.stack(parts[:-1]))
        assert (scale[amax == 0] == 1).all()
    assert q.shape == (M, 80)
    assert q_t.shape == (80, reference.padded_rows(M, len(sizes)))
    for index, start, end, transposed_start in bounds(sizes):
        padded_size, size = round_up(end - start, 128), end - start
        assert torch.equal(sums[index], x[start:end].sum(0))
        if size == 0:
            continue
        group_q, group_scale, group_q_t, group_scale_t = cast_separately(x[start:end], block, rule)
        assert torch.equal(bytes_of(q[start:end]), bytes_of(group_q[:size]))
        assert torch.equal(
            bytes_of(q_t[:, transposed_start : transposed_start + size]),
            bytes_of(group_q_t[:, :size]),
        )
        assert not bytes_of(q_t[:, transposed_start + size : transposed_start + padded_size]).any()
        if block == (-1, -1):
            assert torch.equal(scale[index], group_scale)
            assert torch.equal(scale_t[index], group_scale_t)
            continue
        assert torch.equal(scale[start:end], group_scale[:size])
        if block[1] == -1:
            assert torch.equal(scale_t[index], group_scale_t)
        else:
            first = transposed_start // block[1]
            scale_t_slice = scale_t[:, first : first + group_scale_t.shape[1]]
            assert torch.equal(scale_t_slice, group_scale_t)
    assert not bytes_of(q[used:]).any()


@each_cast
def test_each_matrix_of_a_batch_has_the_bytes_of_a_separate_cast(cast):
    _, block, rule = cast
    w = torch.randn(3, 40, 200) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1)
    q, scale, amax, q_t, scale_t, _ = cast_groups(
        ops.cast_op, "", [w], w.dtype, None, E4M3, block, rule, 0.0, True, True
    )
    for index, matrix in enumerate(w):
        expected = cast_separately(matrix, block, rule)
        for got, want in zip((q, scale, q_t, scale_t), expected, strict=True):
            comparable = bytes_of if got.dtype == E4M3 else lambda t: t
            assert torch.equal(comparable(got[index]), comparable(want))
    if block == (-1, -1):
        assert torch.equal(amax, w.abs().amax((1, 2), keepdim=True))


def test_each_group_has_its_own_amax_slot_and_factor():
    x, offs = rows([3, 0, 5], 20), offsets([3, 0, 5])
    options = (E5M2, (-1, -1), "encode", 0.0, True, True, False)
    slot, factors = torch.full((3,), ops.NO_DATA), torch.tensor([1.0, 3.0, 64.0])
    q, *_ = cast_groups(ops.cast_op, "", [x], x.dtype, offs, *options, factors, slot)
    assert slot.tolist() == [x[:3].abs().max(), ops.NO_DATA, x[3:8].abs().max()]
    assert torch.equal(q[3:8, :20].float(), (x[3:8] * 64).to(E5M2).float())
    for shared_factor in (factors[:1], factors[:1].expand(3)):  # all groups share one factor
        q, *_, q_t, _, _ = cast_groups(ops.cast_op, "", [x], x.dtype, offs, *options, shared_factor)
        assert torch.equal(q[:8, :20].float(), x[:8].to(E5M2).float())
        assert torch.equal(q_t[:20, 128:133].float(), x[3:8].to(E5M2).float().t())
    w = torch.randn(2, 5, 7)
    slots = torch.full((2,), ops.NO_DATA)
    q, *_ = cast_groups(
        ops.cast_op, "", [w], w.dtype, None, *options, torch.tensor([1.0, 64.0]), slots
    )
    assert torch.equal(slots, w.abs().amax((1, 2)))
    assert torch.equal(q[1, :5, :7].float(), (w[1] * 64).to(E5M2).float())


def test_prologues_cast_in_groups_equal_their_values():
    h, offs = rows([3, 0, 5], 40), offsets([3, 0, 5])
    options = (E4M3, (1, 128), "fp32", 0.0, True, True, True)
    got = cast_groups(ops.cast_op, "swiglu", [h], h.dtype, offs, *options)
    token = torch.tensor([7, 0, 7, 1, -1, 2, 3, 6], dtype=torch.int32)
    permuted = cast_groups(ops.cast_op, "permute", [h, token], h.dtype, offs, *options)
    values = reference.value_of("swiglu", [h], h.dtype), h[token.long()]
    values[1][4] = 0
    for results, value in zip((got, permuted), values, strict=True):
        want = cast_groups(ops.cast_op, "", [value], h.dtype, offs, *options)
        for actual, expected in zip(results, want, strict=True):
            assert actual is expected or torch.equal(actual.float(), expected.float())


@each_cast
@each_size
def test_gemms_of_groups_equal_float64_gemms(sizes, cast):
    """GEMMs equal float64 GEMMs of the dequantized operands within the rounding of float32."""
    block, w_block, rule = cast
    offs, E = offsets(sizes), len(sizes)
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

    def close(got, left, right, bias_value=0.0):
        bound = (
            torch.finfo(torch.float32).eps
            * (left.shape[1] + 8)
            * (left.abs() @ right.abs().mT + abs(bias_value))
        )
        assert ((got.double() - (left @ right.mT + bias_value)).abs() <= bound).all()

    for index, start, end, transposed_start in bounds(sizes):
        scales = [s[index] if block == (-1, -1) else s[start:end] for s in (x_s, dy_s)]
        columns = slice(transposed_start, transposed_start + end - start)
        columnwise = []
        for q, scale in ((x_t, x_ts), (dy_t, dy_ts)):
            if block[1] == -1:
                scale = scale[index] if scale.ndim == 3 else scale
            else:
                scale = scale[:, transposed_start // block[1] :]
            columnwise.append(value(q[:, columns], scale, block))
        close(
            y[start:end], value(x_q[start:end], scales[0], block),
            value(w_q[index], w_s[index], w_block), bias[index].double(),
        )  # fmt: skip
        close(
            dx[start:end], value(dy_q[start:end], scales[1], block),
            value(w_t[index], w_ts[index], w_block),
        )  # fmt: skip
        close(dw[index], columnwise[1], columnwise[0])
    for zeros in (y, dx):
        assert not zeros[sum(sizes) :].any()
    if block == (-1, -1):  # all groups may share one scale
        arguments = (block, w_q, w_s, w_block, bias, offs, x.dtype, False)
        for shared_scale in (torch.full((1, 1), 0.5), torch.full((1,), 0.5)):
            got = grouped_mm(ops.scaled_mm_op, x_q, shared_scale, *arguments)
            assert torch.equal(
                got, grouped_mm(ops.scaled_mm_op, x_q, shared_scale.expand(E, 1, 1), *arguments)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gemms_of_groups_in_high_precision_equal_torch(dtype):
    sizes = SIZES["ragged"]
    offs = offsets(sizes, dtype=torch.int64)
    x, dy, w = rows(sizes, 20, dtype=dtype), rows(sizes, 8, dtype=dtype), torch.randn(7, 8, 20)
    w = w.to(dtype)
    y = grouped_mm(ops.scaled_mm_op, x, None, (), w, None, (), None, offs, dtype, False)
    dw = grouped_mm(ops.scaled_mm_op, dy.t(), None, (), x.t(), None, (), None, offs, dtype, False)
    for index, start, end, _ in bounds(sizes):
        assert torch.equal(y[start:end], x[start:end] @ w[index].t())
        assert torch.equal(dw[index], dy[start:end].t() @ x[start:end])
    assert not y[sum(sizes) :].any()


def test_flops_of_groups_count_tokens_without_padding():
    offs = offsets([100, 28, 300])
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
