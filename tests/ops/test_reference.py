"""The reference ops: comparison with values computed by hand, and properties that hold always."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import E4M3, E5M2, FLOAT32_MAX, largest, scale_shape, scales_by_column
from float8lab.ops import NO_DATA, reference
from float8lab.ops.reference.blocks import expand_scale
from tests.near_ties import by_multiplying, near_ties
from tests.ops import forms
from tests.ops.groups import grouped_mm

INF, NAN = math.inf, math.nan
SUBNORMAL = 2.0**-140  # of float32

# (rule, FP8 format, amax, expected scale)
SCALES = [
    # the amax is the largest FP8 value
    ("fp32", E4M3, 448.0, 1.0),
    ("fp32", E5M2, 57344.0, 1.0),
    ("pow2", E4M3, 448.0, 1.0),
    ("e8m0", E4M3, 448.0, 1.0),
    # the amax is one step above it
    ("pow2", E4M3, 448.5, 2.0),
    ("e8m0", E4M3, 448.5, 2.0),
    ("pow2", E4M3, 1.0, 2.0**-8),
    ("e8m0", E4M3, 1.0, 2.0**-8),
    ("e8m0", E5M2, 1.0, 2.0**-15),
    # the amax is no basis for a scale
    ("fp32", E4M3, 0.0, 1.0),
    ("fp32", E4M3, INF, 1.0),
    ("fp32", E4M3, NAN, 1.0),
    ("pow2", E4M3, INF, 1.0),
    ("e8m0", E4M3, NAN, 1.0),
    ("e8m0", E5M2, 0.0, 1.0),
    # 448 / amax overflows, and the largest float32 replaces it
    ("fp32", E4M3, SUBNORMAL, 1.0 / FLOAT32_MAX),
    ("pow2", E4M3, SUBNORMAL, 2.0**-127),
]


@pytest.mark.parametrize(("rule", "fp8_dtype", "amax", "expected"), SCALES)
def test_scale_of_an_amax_follows_its_rule(
    rule: str, fp8_dtype: torch.dtype, amax: float, expected: float
) -> None:
    scale, _ = reference.factors_from_amax(torch.tensor([amax]), fp8_dtype, rule)
    torch.testing.assert_close(scale, torch.tensor([expected]), rtol=0, atol=0)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
def test_encode_factor_is_one_division(fp8_dtype: torch.dtype) -> None:
    amax = torch.rand(4096) * 10
    encode = torch.tensor(largest(fp8_dtype)) / amax
    scale, _ = reference.factors_from_amax(amax, fp8_dtype, "fp32")
    torch.testing.assert_close(scale, torch.tensor(1.0) / encode, rtol=0, atol=0)


def test_casts_multiply_by_computed_factors_and_divide_by_given_scales() -> None:
    x = near_ties(16)
    encode = torch.tensor(448.0) / x.abs().amax(1, keepdim=True)
    scale = torch.tensor(1.0) / encode
    multiplied = by_multiplying(x).view(E4M3)
    divided = (x / scale).clamp(-448, 448).to(E4M3)
    for block in ((1, -1), (1, 256)):
        q, row_scale, _ = reference.quantize(x, E4M3, block, "fp32", 0.0, 1)
        assert torch.equal(row_scale, scale)
        assert torch.equal(q.float(), multiplied.float())
        _, _, q_t, _, _ = forms.quantize_pair(
            reference.cast, x.t(), E4M3, block, "fp32", 0.0, 1, False
        )
        assert torch.equal(q_t.float(), multiplied.float())
        q = forms.encode(reference.cast, x, encode, None, E4M3, block, 1)
        assert torch.equal(q.float(), multiplied.float())
        q = forms.encode(reference.cast, x, scale, None, E4M3, block, 1, divide=True)
        assert torch.equal(q.float(), divided.float())
    for row, expected_row in zip(x[:, None], multiplied, strict=True):
        q, _, amax = reference.quantize(row, E4M3, (-1, -1), "fp32", 0.0, 1)
        assert torch.equal(q[0].float(), expected_row.float())
        q, _, _ = reference.quantize(row[:, 1:], E4M3, (-1, -1), "fp32", 0.0, 1, amax)
        assert torch.equal(q[0].float(), expected_row[1:].float())


def test_division_by_a_given_scale_follows_ieee() -> None:
    x = torch.tensor([[0.0, 1.0, -1.0, INF, NAN]])
    for scale, expected in (
        (0.0, [NAN, 448.0, -448.0, NAN, NAN]), (2.0**-149, [0.0, 448.0, -448.0, NAN, NAN]),
        (INF, [0.0, 0.0, -0.0, NAN, NAN]), (NAN, [NAN] * 5),
    ):  # fmt: skip
        q = forms.encode(
            reference.cast, x, torch.tensor(scale), None, E4M3, (-1, -1), 1, divide=True
        )
        expected = torch.tensor([expected])
        torch.testing.assert_close(q.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rule", ["pow2", "e8m0"])
def test_power_of_2_scales_never_overflow(rule: str) -> None:
    amax = torch.exp2(torch.rand(4096) * 200 - 100)
    scale, _ = reference.factors_from_amax(amax, E4M3, rule)
    assert bool((scale.frexp().mantissa == 0.5).all())
    assert bool((amax / scale <= 448).all())
    assert bool((amax / scale > 224).all())


def test_eps_is_the_lower_bound_of_the_amax() -> None:
    got, _ = reference.factors_from_amax(torch.tensor([0.0, 2.0, NAN]), E4M3, "pow2", eps=1.0)
    torch.testing.assert_close(got, torch.tensor([2.0**-8, 2.0**-7, 1.0]), rtol=0, atol=0)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128), (128, 128), (5, -1)], ids=str)
def test_cast_many_writes_the_results_of_separate_casts(block: tuple[int, int]) -> None:
    xs = [torch.randn(3, 300), torch.randn(0, 4).bfloat16(), torch.randn(130, 1), torch.randn(2, 8)]
    formats = (E4M3, E5M2, E5M2, E4M3)
    want = [
        reference.quantize(x, fp8_dtype, block, "pow2", 0.5, 1)
        for x, fp8_dtype in zip(xs, formats, strict=True)
    ]
    got = [tuple(torch.empty_like(tensor) for tensor in tensors) for tensors in want]
    q, scale, amax = map(list, zip(*got, strict=True))
    reference.cast_many_(xs, q, block, "pow2", 0.5, scale, amax, [])
    for tensors, expected in zip(got, want, strict=True):
        for actual, expected_tensor in zip(tensors, expected, strict=True):
            torch.testing.assert_close(actual, expected_tensor, rtol=0, atol=0)
    encodes = [1 / scale for _, scale, _ in want]  # exact for powers of two
    qs = [torch.empty_like(q) for q, _, _ in want]
    reference.cast_many_(xs, qs, block, "encode", 0.0, [], [], encodes)
    for actual, (expected_tensor, _, _) in zip(qs, want, strict=True):
        torch.testing.assert_close(actual, expected_tensor, rtol=0, atol=0)


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
def test_casts_saturate_finite_values_and_keep_nonfinite_ones_visible(
    fp8_dtype: torch.dtype,
) -> None:
    limit = largest(fp8_dtype)
    x = torch.tensor([[0.0, -0.0, 1.0, limit, -limit, limit * 2, INF, -INF, NAN]])
    infinite = [INF, -INF] if fp8_dtype == E5M2 else [NAN, NAN]
    q = forms.encode(reference.cast, x, torch.tensor(1.0), None, fp8_dtype, (-1, -1), 1)
    expected = torch.tensor([[0.0, -0.0, 1.0, limit, -limit, limit, *infinite, NAN]])
    torch.testing.assert_close(q.float(), expected, rtol=0, atol=0, equal_nan=True)
    assert q.view(torch.uint8)[0, 1] == 0x80
    # Nonfinite values stay visible with any factor; the smallest and the largest overflow float32.
    for factor, divide in ((3e38, False), (1e-45, True), (0.0, False), (NAN, False), (INF, True)):
        q = forms.encode(
            reference.cast, x[:, 2:], torch.tensor(factor), None, fp8_dtype, (-1, -1), 1, divide
        )
        assert q.float().isfinite().tolist() == [[factor == factor] * 4 + [False] * 3]


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize(
    ("block", "rule"),
    [
        ((-1, -1), "fp32"), ((-1, -1), "pow2"), ((1, -1), "fp32"), ((1, 128), "pow2"),
        ((128, 128), "fp32"), ((1, 32), "e8m0"),
    ],
    ids=str,
)  # fmt: skip
def test_an_infinity_stays_visible_in_its_block(
    block: tuple[int, int], rule: str, fp8_dtype: torch.dtype
) -> None:
    """Its block has scale 1, where finite values saturate; other blocks keep their bytes."""
    limit = largest(fp8_dtype)
    infinities = [INF, -INF] if fp8_dtype == E5M2 else [NAN, NAN]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        largest_value = torch.finfo(dtype).max
        x = torch.randn(150, 300).to(dtype)
        finite, scale, _ = reference.quantize(x, fp8_dtype, block, rule)
        x[3, 8:14] = torch.tensor([INF, -INF, NAN, largest_value, -largest_value, 1.5], dtype=dtype)
        q, new_scale, amax = reference.quantize(x, fp8_dtype, block, rule)
        expected = torch.tensor([*infinities, NAN, limit, -limit, 1.5])
        torch.testing.assert_close(q.float()[3, 8:14], expected, rtol=0, atol=0, equal_nan=True)
        is_other_block = torch.ones_like(scale, dtype=torch.bool)
        is_other_block[3 if block[0] == 1 else 0, 0] = False
        assert new_scale[~is_other_block].item() == 1
        assert not amax[~is_other_block].isfinite()
        assert torch.equal(new_scale[is_other_block], scale[is_other_block])
        is_kept = expand_scale(is_other_block, block, x.shape).expand(x.shape)
        assert torch.equal(q.view(torch.uint8)[is_kept], finite.view(torch.uint8)[is_kept])


def test_casts_round_to_nearest_even() -> None:
    x = torch.tensor([[1.0625, 1.1875, 17.0, 19.0, 2.0**-10, 1.5 * 2.0**-9]])
    q = forms.encode(reference.cast, x, torch.tensor(1.0), None, E4M3, (-1, -1), 1)
    assert q.float().tolist() == [[1.0, 1.25, 16.0, 20.0, 0.0, 2.0**-8]]


def test_quantize_with_one_scale_equals_values_by_hand() -> None:
    x = torch.tensor([[1.0, -2.0], [3.5, 0.0]])
    q, scale, amax = reference.quantize(x, E4M3, (-1, -1), "fp32", 0.0, 1)
    assert amax.tolist() == [[3.5]]
    assert scale.tolist() == [[2.0**-7]]
    assert q.float().tolist() == [[128.0, -256.0], [448.0, 0.0]]


def test_partial_blocks_have_their_own_amax() -> None:
    x = torch.ones(3, 5)
    x[2], x[:, 4] = 7.0, 56.0
    _, _, amax = reference.quantize(x, E4M3, (2, 4), "fp32", 0.0, 1)
    assert amax.tolist() == [[1.0, 56.0], [7.0, 56.0]]


BLOCKS = [(-1, -1), (1, -1), (1, 128), (128, 128), (1, 32), (2, 3), (5, -1)]
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: "x".join(map(str, b)))


@each_block
def test_align_equals_padding_the_input_with_zeros(block: tuple[int, int]) -> None:
    x = torch.randn(37, 150)
    padded = torch.zeros(48, 160)
    padded[:37, :150] = x
    got = reference.quantize(x, E4M3, block, "fp32", 0.0, 16)
    want = reference.quantize(padded, E4M3, block, "fp32", 0.0, 1)
    for actual, expected in zip(got, want, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0)
    assert got[1].shape == scale_shape((48, 160), block)


@each_block
def test_a_cast_of_both_orientations_equals_two_casts(block: tuple[int, int]) -> None:
    x = torch.randn(37, 150)
    q, scale, q_t, scale_t, sums = forms.quantize_pair(
        reference.cast, x, E5M2, block, "pow2", 0.0, 16, True
    )
    want = reference.quantize(x, E5M2, block, "pow2", 0.0, 16)
    want_t = reference.quantize(x.t(), E5M2, block, "pow2", 0.0, 16)
    for actual, expected in zip((q, scale, q_t, scale_t), want[:2] + want_t[:2], strict=True):
        torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=0)
        assert actual.is_contiguous() or scales_by_column(block)
    torch.testing.assert_close(sums, x.sum(0))


def test_a_given_amax_determines_the_scale() -> None:
    x, amax = torch.tensor([[1.0, -3.0], [0.5, 200.0]]), torch.tensor([[112.0]])
    q, scale, returned_amax = reference.quantize(x, E4M3, (-1, -1), "fp32", 0.0, 1, amax)
    assert (scale.tolist(), returned_amax.tolist()) == ([[0.25]], [[112.0]])
    assert q.float().tolist() == [[4.0, -12.0], [2.0, 448.0]]
    pair = forms.quantize_pair(reference.cast, x, E4M3, (-1, -1), "fp32", 0.0, 1, False, amax)
    assert pair[2].float().equal(q.float().t())
    assert pair[3].tolist() == [[0.25]]


@each_block
def test_round_trip_error_is_at_most_half_a_step(block: tuple[int, int]) -> None:
    x = torch.randn(40, 160)
    q, scale, amax = reference.quantize(x, E4M3, block, "fp32", 0.0, 1)
    dequantized = reference.dequantize(q, scale, block, torch.float32)
    # The bound is half a step of 3 mantissa bits, or of the subnormals, which is 2**-10 relative to
    # 448 for the block's amax.
    block_amax = reference.dequantize(torch.ones(40, 160), amax, block, torch.float32)
    bound = torch.maximum(x.abs() * 2**-4, block_amax / 448 * 2**-10) * (1 + 2**-20)
    assert bool(((dequantized - x).abs() <= bound).all())


def test_scales_of_1xb_blocks_are_stored_by_column() -> None:
    _, scale, amax = reference.quantize(torch.randn(48, 300), E4M3, (1, 128), "fp32", 0.0, 16)
    assert scale.shape == amax.shape == (48, 3)
    assert scale.stride() == amax.stride() == (1, 48)


@pytest.mark.parametrize("shape", [(0, 48), (33, 0), (0, 0)])
@each_block
def test_empty_tensors_have_scale_1_and_gemms_return_the_bias(
    shape: tuple[int, int], block: tuple[int, int]
) -> None:
    q, scale, amax = reference.quantize(torch.randn(shape), E4M3, block, "fp32", 0.0, 16)
    assert q.numel() == 0
    assert bool((scale == 1).all())
    assert bool((amax == 0).all())
    gemm = reference.scaled_mm(
        q, scale, block, q, scale, block, torch.ones(len(q)), torch.float32, False
    )
    assert gemm.shape == (len(q), len(q))
    assert bool((gemm == 1).all())


def test_an_amax_slot_keeps_the_larger_value() -> None:
    slot = torch.full((1,), NO_DATA)
    for x, expected in ((torch.zeros(2, 2), 0.0), (-torch.ones(2, 2), 1.0), (torch.zeros(2, 2), 1)):
        forms.encode(ops.cast_op, x, torch.tensor(1.0), slot, E4M3, (-1, -1), 16)
        assert slot.item() == expected
    forms.encode(ops.cast_op, torch.ones(0, 2), torch.tensor(1.0), slot, E4M3, (-1, -1), 16)
    assert slot.item() == 1
    forms.encode(ops.cast_op, torch.full((1, 1), NAN), torch.tensor(1.0), slot, E4M3, (-1, -1), 1)
    assert slot.isnan().all()


@pytest.mark.parametrize("align", [1, 16])
def test_transpose_pads_with_zeros(align: int) -> None:
    q = torch.randn(5, 20).to(E4M3)
    got = reference.transpose(q, align)
    assert got.shape == (reference.round_up(20, align), reference.round_up(5, align))
    assert bool((got[:20, :5].float() == q.float().t()).all())
    assert got.float().abs().sum() == q.float().abs().sum()


@pytest.mark.parametrize("blocks", [((1, -1), (-1, -1)), ((1, 128), (128, 128)), ((5, 7), (3, 7))])
def test_scaled_mm_of_a_batch_equals_each_matrix(
    blocks: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    operands: list[Any] = []
    for rows, block in zip((20, 33), blocks, strict=True):
        x = torch.randn(3, rows, 300) * torch.tensor([1.0, 10.0, 0.1]).view(3, 1, 1)
        parts = [reference.quantize(m, E4M3, block, "fp32", 0.0, 1) for m in x]
        operands += [torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]), block]
    a, a_scale, a_block, b, b_scale, b_block = operands
    by_column = b.mT.contiguous().mT
    got = reference.scaled_mm(
        a, a_scale, a_block, by_column, b_scale, b_block, None, torch.bfloat16, False
    )
    assert got.dtype == torch.bfloat16
    for y, *matrices in zip(got, a, a_scale, b, b_scale, strict=True):
        q, scale, v, v_scale = matrices
        want = reference.scaled_mm(
            q, scale, a_block, v, v_scale, b_block, None, torch.float32, False
        )
        torch.testing.assert_close(y.float(), want, rtol=2.0**-8, atol=1e-4)


def test_scaled_mm_equals_values_by_hand() -> None:
    a = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(E4M3)
    b = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]).to(E5M2)
    a_scale, b_scale = torch.tensor([[1.0], [10.0]]), torch.tensor([[1.0], [0.5], [2.0]])
    bias = torch.tensor([0.0, 0.0, 1.0])
    got = reference.scaled_mm(a, a_scale, (1, -1), b, b_scale, (1, -1), bias, torch.float32, False)
    assert got.tolist() == [[1.0, 1.5, 9.0], [30.0, 35.0, 161.0]]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_does_not_reach_the_gemms(device: str) -> None:
    """A GEMM in float16 would overflow for the largest FP8 data: 16 x 448 x 448 is above 65504."""
    a = torch.full((16, 16), 448.0, device=device).to(E4M3)
    unit_scale, offs = torch.ones(1, 1, device=device), torch.tensor([16], device=device)
    for block in ((-1, -1), (1, 16)):
        scale = unit_scale.expand(scale_shape((16, 16), block))
        with torch.autocast(device, torch.float16):
            y = reference.scaled_mm(
                a, scale, block, a, scale, block, None, torch.float32, fast_accum=False
            )
        assert torch.equal(y, torch.full_like(y, 16 * 448.0**2))
    exact = a.float(), None, ()
    with torch.autocast(device, torch.float16):
        rows = grouped_mm(
            reference.scaled_mm, *exact, a.float()[None], None, (), None, offs, torch.float32, False
        )
        sums = grouped_mm(reference.scaled_mm, *exact, *exact, None, offs, torch.float32, False)
    assert torch.equal(rows, y)
    assert torch.equal(sums[0], y)


@pytest.mark.parametrize(
    "blocks",
    [((1, 128), (1, 128)), ((1, 128), (128, 128)), ((1, 32), (1, 32)), ((-1, -1), (1, -1))],
)
def test_scaled_mm_equals_the_gemm_of_dequantized_operands(
    blocks: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    operands, dequantized = [], []
    for rows, block in zip((20, 33), blocks, strict=True):
        q, scale, _ = reference.quantize(torch.randn(rows, 300), E4M3, block, "fp32", 0.0, 1)
        operands += [q, scale, block]
        dequantized.append(reference.dequantize(q, scale, block, torch.float64))
    got = reference.scaled_mm(*operands, None, torch.float32, False)
    left, right = dequantized
    # Every term, every partial sum and every product of scales is rounded once to float32.
    bound = (300 + 4) * 2.0**-24 * (left.abs() @ right.abs().t())
    assert bool(((got - left @ right.t()).abs() <= bound).all())


def update_scales(
    history: Tensor, amax: list[float], steps: int = 0, **options: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = history.shape[1]
    state = (
        history.clone(), torch.tensor(amax), torch.tensor([[5.0], [0.25]]).repeat(1, slots),
        torch.full((slots,), steps, dtype=torch.int32),
    )  # fmt: skip
    settings = {"margin": 0, "interval": 1, "most_recent": False, "power_of_2": True}
    copy = reference.update_scales_(*state, torch.full((slots,), 448.0), **(settings | options))
    factors = state[2]
    assert torch.equal(copy, factors.t().unsqueeze(2).expand(-1, -1, 4))
    assert bool(((factors[0] == 5) == (factors[1] == 0.25)).all())
    changed = factors[:, factors[0] != 5]
    assert torch.equal(changed[0], 1 / changed[1])
    return state[0], state[1], factors[0], state[3]


def test_update_scales_rolls_only_slots_with_data() -> None:
    history = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    history, amax, scale, steps = update_scales(history, [7.0, NO_DATA, INF, NAN])
    assert history.tolist() == [[7.0, 2.0, 3.0, 4.0], [1.0, 6.0, 7.0, 8.0]]
    assert amax.tolist() == [NO_DATA] * 4
    assert steps.tolist() == [1, 0, 0, 0]
    assert scale.tolist() == [2.0**-6, 5.0, 5.0, 5.0]


def test_update_scales_equals_values_by_hand() -> None:
    history = torch.tensor([[0.0], [56.0], [400.0]])
    assert update_scales(history, [7.0])[2].item() == 2.0**-3  # 448 / 56
    assert update_scales(history, [7.0], most_recent=True)[2].item() == 2.0**-6  # 448 / 7
    assert update_scales(history, [7.0], margin=2)[2].item() == 2.0**-1
    assert update_scales(history, [60.0], power_of_2=False)[2].item() == pytest.approx(60 / 448)
    assert update_scales(history * 0, [0.0])[2].item() == 5.0  # only zeros keep the scale
    assert update_scales(history, [7.0], steps=1, interval=2)[2].item() == 5.0  # not due
    assert update_scales(history, [7.0], steps=2, interval=2)[2].item() == 2.0**-3
