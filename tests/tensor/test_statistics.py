"""Counts and errors of FP8 tensors against values computed by hand."""

import math

import pytest
import torch

import float8lab
from float8lab import Float8Tensor, inspect, quantize
from float8lab.formats import E4M3, E5M2, FP8_DTYPES, Float8Spec
from float8lab.inspect import BlockStats, Comparison

each_block = pytest.mark.parametrize(
    "spec",
    [
        ((-1, -1), "fp32"), ((1, -1), "fp32"), ((-1, 1), "fp32"), ((1, 128), "fp32"),
        ((128, 128), "pow2"), ((1, 32), "e8m0"), ((3, 5), "fp32"),
    ],
    ids=str,
)  # fmt: skip


def from_codes(*codes: int, fp8_dtype: torch.dtype = E4M3, scale: float = 1.0) -> Float8Tensor:
    data = torch.tensor(codes, dtype=torch.uint8).view(fp8_dtype)
    scale_tensor = torch.tensor([scale])
    return Float8Tensor(
        data, scale_tensor, scale_tensor * 448, Float8Spec(fp8_dtype, (-1,)), torch.float32
    )


def test_e4m3_values_are_counted_by_kind():
    # 448, -448, 416, 0, -0, 2^-9, -7 * 2^-9 (the largest subnormal), 2^-6 (normal), NaN, -NaN
    result = from_codes(0x7E, 0xFE, 0x7D, 0x00, 0x80, 0x01, 0x87, 0x08, 0x7F, 0xFF).stats()
    assert result.numel == 10
    counts = {"saturated": 2, "zero": 2, "subnormal": 2, "nan": 2, "inf": 0}
    assert {kind: result.count(kind) for kind in counts} == counts
    shares = result.saturated, result.zero, result.subnormal, result.nan, result.inf
    assert shares == (0.2, 0.2, 0.2, 0.2, 0.0)
    assert result.exponents == (-9, 8)


def test_e5m2_values_are_counted_by_kind():
    # 57344, -57344, 0, -0, 2^-16, 3 * 2^-16, 2^-14 (normal), inf, -inf, three NaNs
    codes = (0x7B, 0xFB, 0x00, 0x80, 0x01, 0x83, 0x04, 0x7C, 0xFC, 0x7D, 0x7F, 0xFE)
    result = from_codes(*codes, fp8_dtype=E5M2).stats()
    counts = {"saturated": 2, "zero": 2, "subnormal": 2, "nan": 3, "inf": 2}
    assert {kind: result.count(kind) for kind in counts} == counts
    assert result.exponents == (-16, 15)


@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=str)
def test_every_code_is_counted_by_the_kind_of_its_value(fp8_dtype, device):
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    value = codes.view(fp8_dtype).float()
    info = torch.finfo(fp8_dtype)
    small = (value.abs() < info.smallest_normal) & (value != 0)
    expected = {
        "saturated": value.abs() == info.max, "zero": value == 0, "subnormal": small,
        "nan": value.isnan(), "inf": value.isinf(),
    }  # fmt: skip
    ones = torch.ones(256, device=device)
    x = Float8Tensor(codes.view(fp8_dtype), ones, ones, Float8Spec(fp8_dtype, (1,)), torch.float32)
    result = x.stats(per_block=True)
    assert result.counts.keys() == expected.keys()
    for kind, mask in expected.items():
        assert torch.equal(result.counts[kind], mask.long()), kind
        assert x.stats().count(kind) == mask.sum().item(), kind
    plain = value.isfinite() & (value != 0)
    exponents = value.abs().log2().floor()
    for got in (result.exponent_min, result.exponent_max):
        assert torch.equal(got.isnan(), ~plain)
        assert torch.equal(got[plain], exponents[plain])


def test_amax_and_range_of_scales():
    t = quantize(torch.tensor([[448.0, 1.0], [-896.0, 2.0], [0.0, 0.0]]), block=(1, -1))
    result = t.stats()
    assert (result.shape, result.dtype, result.spec) == ((3, 2), torch.float32, t.spec)
    assert (result.amax, result.scale_min, result.scale_max) == (896.0, 1.0, 2.0)
    assert result.saturated == 2 / 6  # each row's amax, which is exactly the largest
    assert result.exponents == (0, 8)
    assert result.sqnr is result.effective_bits is result.flushed is result.clipped is None


def test_errors_are_those_computed_by_hand():
    # Scale 1, so codes are the values: 17 -> 16, 2^-11 -> 0 (flushed), 500 -> 448 (clipped),
    # 460 -> 448 (rounded, not clipped), 0 -> 0 (not flushed), 3 -> 3.
    x = torch.tensor([17.0, 2.0**-11, 500.0, 460.0, 0.0, 3.0])
    t = quantize(x, scale=1.0)
    result = t.compare(x)
    signal = 17.0**2 + 2.0**-22 + 500.0**2 + 460.0**2 + 9.0
    noise = 1.0 + 2.0**-22 + 52.0**2 + 12.0**2
    assert (result.numel, result.clipped_count, result.flushed_count) == (6, 1, 1)
    assert (result.clipped, result.flushed) == (1 / 6, 1 / 6)
    assert result.signal == pytest.approx(signal, rel=1e-14)
    assert result.noise == pytest.approx(noise, rel=1e-14)
    assert result.sqnr == pytest.approx(10 * math.log10(signal / noise), rel=1e-14)
    assert result.effective_bits == pytest.approx((result.sqnr - 1.76) / 6.02)
    assert result.max_error == 52.0
    assert result.mean_error == pytest.approx(-(1.0 + 2.0**-11 + 52.0 + 12.0) / 6, rel=1e-14)
    stats_with_original = t.stats(x)
    assert stats_with_original.comparison == result
    assert (stats_with_original.sqnr, stats_with_original.effective_bits) == (
        result.sqnr,
        result.effective_bits,
    )
    assert (stats_with_original.flushed, stats_with_original.clipped) == (
        result.flushed,
        result.clipped,
    )


@pytest.mark.parametrize(
    ("fp8_dtype", "tie"), [(E4M3, 464.0), (E5M2, 61440.0)], ids=["e4m3", "e5m2"]
)
def test_values_that_would_round_beyond_the_largest_count_as_clipped(fp8_dtype, tie):
    above = math.nextafter(tie, math.inf)
    x = torch.tensor([tie, -tie, tie * (1 + 2**-20), -2 * tie], dtype=torch.float32)
    assert above > tie
    result = quantize(x, fp8_dtype, scale=1.0).compare(x)
    assert result.clipped_count == 2


def test_nonfinite_originals_are_counted_separately():
    x = torch.tensor([math.inf, math.nan, -math.inf, 4.0])
    t = quantize(x, scale=1.0)
    result = t.stats(x)
    assert (result.count("nan"), result.count("saturated")) == (3, 0)
    assert result.comparison is not None
    assert result.comparison.clipped_count == 0
    e5m2_result = quantize(x, E5M2, scale=1.0).stats(x)
    assert [e5m2_result.count(kind) for kind in ("nan", "inf", "saturated")] == [1, 2, 0]
    t.qdata[0] = 448.0  # some libraries cast an infinity so
    assert t.compare(x).clipped_count == 1
    assert (result.comparison.signal, result.comparison.noise) == (16.0, 0.0)
    assert result.sqnr == math.inf


def test_sqnr_is_infinite_without_noise_or_without_signal():
    x = torch.tensor([1.0, 2.0])
    assert quantize(x).compare(x).sqnr == math.inf
    assert Comparison(1, 0, 0, 0.0, 1.0, 1.0, 1.0).sqnr == -math.inf


def test_large_values_do_not_overflow():
    x = torch.tensor([3e38, -1e38, 2e38])
    result = quantize(x, E5M2).compare(x)
    assert result.signal == pytest.approx(sum(v**2 for v in x.tolist()))
    assert 0 < result.noise < result.signal


def test_histograms_count_codes_and_exponents():
    t = from_codes(0x00, 0x7E, 0x7E, 0x38, 0xB8, 0x7F, 0x01)
    by_code = t.histogram()
    assert by_code.counts.shape == by_code.values.shape == (256,)
    used = {c: n for c, n in enumerate(by_code.counts.tolist()) if n}
    assert used == {0x00: 1, 0x7E: 2, 0x38: 1, 0xB8: 1, 0x7F: 1, 0x01: 1}
    assert by_code.values[0x38] == 1.0
    by_exponent = t.histogram("exponent")
    exponents, counts = by_exponent.values.tolist(), by_exponent.counts.tolist()
    assert exponents == list(range(-9, 9))
    exponent_counts = {e: n for e, n in zip(exponents, counts, strict=True) if n}
    assert exponent_counts == {-9: 1, 0: 2, 8: 2}
    assert quantize(torch.ones(3), E5M2).histogram("exponent").values.tolist() == [*range(-16, 16)]


@each_block
@pytest.mark.parametrize("fp8_dtype", FP8_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(130, 70), (1, 1), (7, 300)], ids=str)
def test_statistics_of_a_block_are_those_of_its_values(spec, fp8_dtype, shape, device):
    block, rule = spec
    x = torch.randn(shape, device=device) * torch.logspace(-6, 2, shape[1], device=device)
    t = quantize(x, fp8_dtype, block=block, scale_rule=rule)
    result, tensor_stats = t.stats(x, per_block=True), t.stats(x)
    assert isinstance(result, BlockStats)
    assert torch.equal(result.scale, t.scale)
    assert torch.equal(result.amax, t.amax)
    rows, columns = (n if b == -1 else b for n, b in zip(shape, block, strict=True))
    for i in range(0, shape[0], rows)[:3]:
        for j in range(0, shape[1], columns):
            index = i // rows, j // columns
            block_slices = slice(i, i + rows), slice(j, j + columns)
            value, codes = x[block_slices].double(), t.qdata[block_slices].double()
            error = codes.float() * t.scale[index] - x[block_slices]
            is_largest = codes.abs() == torch.finfo(fp8_dtype).max
            assert result.numel[index] == codes.numel()
            assert result.counts["saturated"][index] == is_largest.sum()
            assert result.saturated[index] == is_largest.sum().item() / is_largest.numel()
            assert result.counts["flushed"][index] == ((codes == 0) & (value != 0)).sum()
            # On the CPU, since a GPU's log2 may fall short of a whole number.
            exponents = codes[codes != 0].abs().cpu().log2().floor()
            assert result.exponent_min[index] == exponents.min()
            assert result.exponent_max[index] == exponents.max()
            sqnr = 10 * (value.square().sum() / error.double().square().sum()).log10()
            assert torch.allclose(result.sqnr[index], sqnr, rtol=1e-12)
    for kind in ("saturated", "zero", "subnormal", "nan", "inf"):
        assert result.counts[kind].sum().item() == tensor_stats.count(kind)
    assert result.counts["flushed"].sum().item() == tensor_stats.comparison.flushed_count
    assert result.counts["clipped"].sum().item() == tensor_stats.comparison.clipped_count
    assert result.numel.sum().item() == tensor_stats.numel == x.numel()


def test_block_statistics_are_those_computed_by_hand():
    x = torch.tensor([[448.0, 0.0, 1.0], [0.0, 0.0, 0.0], [math.nan, 2.0, -448.0]])
    result = quantize(x, block=(1, 2), scale=1.0).stats(x, per_block=True)
    assert result.numel.tolist() == [[2, 1]] * 3
    assert result.saturated.tolist() == [[0.5, 0], [0, 0], [0, 1]]
    assert result.zero.tolist() == [[0.5, 0], [1, 1], [0, 0]]
    assert result.nan.tolist() == [[0, 0], [0, 0], [0.5, 0]]
    assert result.inf.sum() == result.flushed.sum() == result.clipped.sum() == 0
    nan = math.nan
    expected = torch.tensor([[8.0, 0.0], [nan, nan], [1.0, 8.0]])
    for got in (result.exponent_min, result.exponent_max):
        assert torch.equal(got.nan_to_num(-99), expected.nan_to_num(-99))
    assert (result.sqnr == math.inf).all()
    assert (result.effective_bits == math.inf).all()


def test_flushed_share_without_an_original_raises():
    result = quantize(torch.ones(2, 2)).stats(per_block=True)
    assert result.sqnr is result.effective_bits is None
    with pytest.raises(ValueError, match="need an original"):
        _ = result.flushed


def test_blocks_returns_scales_as_a_matrix():
    x = torch.randn(2, 3, 256)
    t = quantize(x, block=(1, 128))
    assert torch.equal(t.blocks(), t.scale.reshape(6, 2))
    assert quantize(x).blocks().shape == (1, 1)
    assert quantize(torch.tensor(3.0)).blocks().shape == (1, 1)
    assert quantize(torch.ones(0, 256), block=(1, 128)).blocks().shape == (0, 2)
    t.blocks().zero_()  # a copy
    assert t.scale.min() > 0


@pytest.mark.parametrize(
    ("shape", "block"),
    [((0,), (-1,)), ((0, 3), (-1, -1)), ((0, 256), (1, 128)), ((4, 0), (1, -1)), ((), ())],
    ids=str,
)
def test_statistics_of_empty_tensors_and_scalars(shape, block):
    x = torch.full(shape, 2.0)
    t = quantize(x, block=block)
    result, block_stats = t.stats(x), t.stats(x, per_block=True)
    assert result.numel == x.numel()
    assert result.saturated == result.count("saturated") == x.numel()  # 1 of 1, or 0
    assert result.exponents == ((8, 8) if x.numel() else None)
    assert result.sqnr == math.inf
    assert (
        block_stats.numel.shape
        == block_stats.saturated.shape
        == block_stats.sqnr.shape
        == t.scale.shape
    )
    assert block_stats.numel.sum() == x.numel()
    assert result.amax == (2.0 if x.numel() else 0.0)
    assert math.isnan(result.scale_min) == (t.scale.numel() == 0)
    assert t.histogram().counts.sum() == x.numel()
    assert repr(t)
    assert t._repr_html_()
    assert str(result)


def test_views_count_only_their_own_values(device):
    x = torch.zeros(4, 256, device=device)
    x[0, 0], x[3, 200] = 448.0, 896.0
    t = quantize(x, block=(128, 128))
    for view, original in [
        (t[:, 10:], x[:, 10:]), (t[1:3], x[1:3]), (t.t(), x.t()), (t[:, ::3], x[:, ::3]),
    ]:  # fmt: skip
        result, block_stats = view.stats(original), view.stats(original, per_block=True)
        assert result.numel == original.numel() == block_stats.numel.sum().item()
        assert result.count("saturated") == (original != 0).sum().item()
        assert block_stats.counts["saturated"].sum().item() == result.count("saturated")
        assert result.sqnr == math.inf


def test_statistics_of_a_view_follow_writes_to_its_base():
    t = quantize(torch.ones(128, 256), block=(128, 128))
    view = t[3:7, 100:]  # cuts a block, so it has scales of its own
    assert view._window.copied
    before = view.stats()
    t.mul_(4)
    assert view.stats().scale_max == 4 * before.scale_max


def test_statistics_of_parameters_and_of_tensors_with_gradients(device):
    with float8lab.fp8_model_init(recipe=float8lab.recipes.MXFP8BlockScaling()):
        weight = float8lab.Linear(64, 32, device=device).weight
    assert weight.requires_grad
    result = weight.stats(weight.detach().dequantize())
    assert (result.numel, result.sqnr) == (64 * 32, math.inf)
    t = quantize(torch.ones(2, 2, device=device).requires_grad_())
    assert not t.blocks().requires_grad
    assert t.compare(t).noise == 0  # an original in FP8


def test_statistics_change_nothing():
    t = quantize(torch.randn(6, 40), block=(1, 32))
    before = [x.clone() for x in (t.qdata.view(torch.uint8), t.scale, t.amax)]
    versions = [x._version for x in (t.qdata, t.scale, t.amax)]
    x = t.dequantize()
    t.stats(x), t.stats(x, per_block=True), t.histogram(), t.compare(x), t.blocks()
    assert versions == [x._version for x in (t.qdata, t.scale, t.amax)]
    torch.testing.assert_close(before, (t.qdata.view(torch.uint8), t.scale, t.amax), rtol=0, atol=0)


@pytest.mark.parametrize("method", ["stats", "histogram", "blocks", "plot"])
def test_statistics_of_fake_and_meta_tensors_raise(method):
    if method == "plot":
        pytest.importorskip("matplotlib")
    meta = quantize(torch.empty(2, 3, device="meta"))
    with pytest.raises(TypeError, match="got a meta tensor"):
        getattr(meta, method)()
    with torch._subclasses.FakeTensorMode():
        fake = quantize(torch.empty(2, 3))
        with pytest.raises(TypeError, match="got a fake tensor"):
            getattr(fake, method)()
        assert "size=(2, 3)" in repr(fake)
    assert meta._repr_html_() is fake._repr_html_() is None


def test_wrong_arguments_raise():
    t = quantize(torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"x must be a Float8Tensor.*got Tensor of torch\.float32"):
        inspect.stats(torch.ones(2))
    advice = (
        r"got a module of Linear\. float8lab\.convert_to_float8\(model\) runs .*quantize\(layer"
    )
    with pytest.raises(TypeError, match=advice):
        inspect.summary(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"original must have shape \(2, 2\); got \(4,\)"):
        t.stats(torch.ones(4))
    with pytest.raises(TypeError, match=r"original must be a torch\.Tensor; got 1\.0"):
        t.compare(1.0)
    with pytest.raises(ValueError, match="by must be 'code' or 'exponent'; got 'value'"):
        t.histogram("value")
