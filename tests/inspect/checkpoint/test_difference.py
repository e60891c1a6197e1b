"""Tests of ``diff``, which compares two checkpoints, or a checkpoint and its source."""

import functools
import json
import math

import pytest
import torch

import float8lab
from float8lab.checkpoints.source import boxes
from float8lab.inspect import CheckpointError, diff
from float8lab.inspect.checkpoint import difference


@pytest.fixture(params=[None, 700], ids=["whole tensors", "700 elements at once"])
def box_size(request, monkeypatch):
    """Read tensors whole, or in boxes of at most 700 elements."""
    if request.param is not None:
        monkeypatch.setattr(difference, "boxes", functools.partial(boxes, most=request.param))


@pytest.fixture
def compare_saved(tmp_path):
    """Return the report on two states after ``torch.save``."""

    def save_and_diff(a, b, **options):
        torch.save(a, tmp_path / "a.pt")
        torch.save(b, tmp_path / "b.pt")
        return diff(tmp_path / "a.pt", tmp_path / "b.pt", **options)

    return save_and_diff


@pytest.mark.parametrize(
    "value",
    [
        torch.empty(2, device="meta"), torch.eye(3).to_sparse(),
        torch.zeros(2).byte().view(torch.float4_e2m1fn_x2),
    ],
    ids=["meta", "sparse", "4-bit"],
)  # fmt: skip
def test_tensors_without_elements_to_read_are_not_compared(value):
    report = diff({"w": value}, {"w": value})
    assert report.counts["unread"] == 1
    assert not report.equal
    assert "dB" not in str(report)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (128, 128), (1, 32)], ids=str)
def test_fp8_is_compared_with_its_source_in_either_order(compare_saved, box_size, block):
    x = torch.randn(300, 200, dtype=torch.bfloat16)
    t = float8lab.quantize(x, block=block)
    exact = t.compare(x)
    for a, b in (({"w": t}, {"w": x}), ({"w": x}, {"w": t})):  # the source is the reference
        report = compare_saved(a, b)
        (row,) = report.rows
        assert (row.status, row.changed, row.changed_scales) == ("differs", None, None)
        assert row.sqnr == pytest.approx(exact.sqnr, rel=1e-6)
        assert row.max_error == exact.max_error
        assert report.sqnr == row.sqnr
        assert not report.identical


def test_equal_checkpoints_are_identical(compare_saved, box_size):
    state = {
        "w": float8lab.quantize(torch.randn(300, 200), block=(128, 128)),
        "b": torch.tensor([1.0, math.nan, math.inf]),
        "n": torch.arange(5),
        "empty": torch.empty(0, 3),
    }
    report = compare_saved(state, state)
    assert report.identical
    assert {row.status for row in report.rows} == {"same"}
    assert {row.sqnr for row in report.rows} == {math.inf}
    assert "4 tensors: 4 same" in str(report)
    assert report.tables() == []


def test_changed_fp8_values_and_scales_are_counted(compare_saved, box_size):
    a = float8lab.quantize(torch.randn(256, 256), block=(128, 128))
    b = a.detach().clone()
    b.qdata.view(torch.uint8)[3, :7] ^= 1
    b.scale[1, 0] *= 2
    (row,) = compare_saved({"w": a}, {"w": b}).rows
    assert (row.status, row.changed, row.changed_scales) == ("differs", 7, 1)
    x, y = a.dequantize(), b.dequantize()
    noise = float((x - y).double().square().sum())
    assert row.sqnr == pytest.approx(10 * math.log10(float(x.double().square().sum()) / noise))


def test_equal_values_in_another_format_are_equal(compare_saved, box_size):
    x = torch.randn(256, 256)
    t = float8lab.quantize(x, block=(128, 128))
    values = {"w": t.qdata.float() * t.scale.repeat_interleave(128, 0).repeat_interleave(128, 1)}
    report = compare_saved({"w": t}, values)
    assert [row.status for row in report.rows] == ["equal"]
    assert not report.identical
    # Other scales, and FP8 values that compensate them.
    rescaled = float8lab.quantize(t.dequantize(), block=(128, 128), scale=2 * t.scale)
    (row,) = compare_saved({"w": rescaled}, {"w": t}).rows
    assert row.changed_scales == 4
    # Zeros of opposite sign have different bits and the same value.
    (row,) = compare_saved({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])}).rows
    assert (row.status, row.changed) == ("equal", 1)


def test_elements_finite_on_one_side_only_are_counted(compare_saved, box_size):
    a = {"w": torch.tensor([1.0, math.nan, math.inf, math.inf, 5.0])}
    b = {"w": torch.tensor([1.0, math.nan, -math.inf, math.inf, math.nan])}
    (row,) = compare_saved(a, b).rows
    assert (row.status, row.unlike, row.max_error) == ("differs", 2, 0.0)


def test_other_shapes_and_missing_tensors_are_reported(compare_saved):
    a = {"w": torch.ones(3, 4), "only.a": torch.ones(2), "same": torch.ones(2)}
    b = {"w": torch.ones(4, 3), "only.b": torch.ones(2), "same": torch.ones(2)}
    report = compare_saved(a, b)
    statuses = {row.name: row.status for row in report.rows}
    assert statuses == {"w": "shape", "only.a": "only in A", "only.b": "only in B", "same": "same"}
    assert report.rows[0].name == "w"
    assert report.counts["shape"] == 1
    text = str(report)
    assert "4 tensors: 1 shape, 1 only in A, 1 only in B, 1 same" in text
    assert "3x4 -> 4x3" in text


def test_rows_are_sorted_from_the_largest_error(compare_saved):
    x = torch.randn(1000)
    a = {"small": x, "none": x, "large": x, "nan": x}
    b = {"small": x * 1.001, "none": x, "large": x * 1.1, "nan": x.clone()}
    b["nan"][3] = math.nan
    report = compare_saved(a, b)
    assert [row.name for row in report.rows] == ["nan", "large", "small", "none"]
    assert report.rows[1].sqnr == pytest.approx(20, abs=1e-3)
    assert report.rows[2].sqnr == pytest.approx(60, abs=1e-2)


def test_rows_are_sorted_by_element_noise_despite_outliers(compare_saved, box_size):
    plain = torch.randn(256, 256)
    outlier = plain.clone()
    outlier[3, 5] = 30_000.0
    clipped = float8lab.quantize(plain, scale=float8lab.quantize(plain).scale / 1.5)
    a = {"plain": plain, "outlier": outlier, "clipped": plain, "zeros": torch.zeros(9)}
    b = {name: float8lab.quantize(value) for name, value in a.items()} | {"clipped": clipped}
    rows = {row.name: row for row in compare_saved(a, b).rows}
    assert list(rows) == ["outlier", "clipped", "plain", "zeros"]
    assert rows["outlier"].sqnr > 60 > 33 > rows["plain"].sqnr > rows["clipped"].sqnr
    x, y = a["outlier"].double(), b["outlier"].qdata.double() * b["outlier"].scale.double()
    noise = float(((x - y) / x).square().clamp(max=1).sum())
    assert rows["outlier"].element_noise == pytest.approx(noise, rel=1e-5)
    assert rows["zeros"].element_sqnr == math.inf


def test_tensors_with_other_blocks_are_compared_by_value(compare_saved, box_size):
    x = torch.randn(96, 300)
    a, b = (float8lab.quantize(x, block=block) for block in ((1, 128), (32, -1)))
    (row,) = compare_saved({"w": a}, {"w": b}).rows
    assert row.changed_scales is None
    assert row.changed == int((a.qdata.view(torch.uint8) != b.qdata.view(torch.uint8)).sum())
    assert row.max_error == float((a.dequantize() - b.dequantize()).abs().max())


def test_a_prefix_of_all_names_on_one_side_is_ignored(compare_saved):
    state = {"layers.0.weight": torch.ones(2), "layers.1.weight": torch.ones(2)}
    prefixed = {f"model.{name}": value for name, value in state.items()}
    for a, b, side in ((state, prefixed, "B"), (prefixed, state, "A")):
        report = compare_saved(a, b)
        assert report.identical
        assert report.notes == (f"names of {side} are compared without model.",)
    assert compare_saved({"x": torch.ones(1)}, {"y": torch.ones(1)}).notes == ()


def test_layer_selects_tensors_by_name(compare_saved):
    state = {f"layers.{i}.weight": torch.ones(2) for i in range(12)}
    assert len(compare_saved(state, state, layer="layers.1").rows) == 1
    assert len(compare_saved(state, state, layer="layers.1*").rows) == 3
    with pytest.raises(CheckpointError, match="layer must match a tensor"):
        compare_saved(state, state, layer="layer")


def test_report_as_json_and_progress_calls(compare_saved):
    progress_calls = []
    x = {"w": torch.randn(4, 4), "b": torch.ones(1), "c": torch.ones(2)}
    y = {"w": float8lab.quantize(x["w"]), "b": torch.zeros(1)}
    report = compare_saved(x, y, progress=lambda *progress: progress_calls.append(progress))
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["identical"] is False
    assert {row["name"] for row in content["rows"]} == {"w", "b", "c"}
    assert progress_calls[-1][0] == progress_calls[-1][1]
    assert "3 tensors: 2 differs" in report.summary()
