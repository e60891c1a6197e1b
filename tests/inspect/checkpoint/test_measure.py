"""Statistics of a checkpoint equal those of whole tensors, and are computed in bounded memory."""

import functools
import json
import math
import os
import struct

import pytest
import torch
from torch.nested._internal.nested_tensor import NestedTensor

import float8lab
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.checkpoints.source import BOX, boxes
from float8lab.formats import E4M3, E5M2
from float8lab.inspect import checkpoint
from float8lab.inspect.checkpoint import difference, measure
from tests.checkpoints.test_opening import dcp_save
from tests.processes import run_python


@pytest.fixture
def row_of_saved(tmp_path):
    """Return the report's row on a tensor after ``torch.save``."""

    def save_and_inspect(value):
        torch.save({"w": value}, tmp_path / "a.pt")
        return checkpoint(tmp_path / "a.pt").rows[0]

    return save_and_inspect


@pytest.fixture(params=[None, 700], ids=["whole tensors", "700 elements at once"])
def box_size(request, monkeypatch):
    """Read tensors whole, or in boxes of at most 700 elements."""
    if request.param is not None:
        for module in (measure, difference):
            monkeypatch.setattr(module, "boxes", functools.partial(boxes, most=request.param))


@pytest.mark.parametrize("most", [1, 7, 60, 10**6])
@pytest.mark.parametrize("align", [(-1, -1, -1), (1, 4, 3), (2, 1, 7)], ids=str)
def test_boxes_cover_each_element_once_in_order(most, align):
    shape = (5, 6, 7)
    order = torch.arange(math.prod(shape)).reshape(shape)
    covering = list(boxes(shape, align, most))
    assert torch.equal(
        torch.cat([order[box].flatten() for box in covering]).sort()[0], order.flatten()
    )
    assert [int(order[box].min()) for box in covering] == sorted(
        int(order[b].min()) for b in covering
    )
    for box in covering:
        assert all(s.start % max(unit, 1) == 0 for s, unit in zip(box, align, strict=True))
        unit_numel = math.prod(max(unit, 1) for unit in align)
        assert order[box].numel() <= max(most, unit_numel)


@pytest.mark.parametrize(("shape", "count"), [((), 1), ((0, 5), 0), ((5, 0), 0), ((3,), 1)])
def test_boxes_of_scalars_and_empty_shapes(shape, count):
    assert len([box for box in boxes(shape, (1,) * len(shape)) if 0 not in shape]) == count


@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize(
    "block", [(-1, -1), (1, -1), (-1, 1), (128, 128), (1, 128), (1, 32), (64, -1)], ids=str
)
def test_statistics_in_boxes_equal_those_of_the_whole_tensor(
    row_of_saved, box_size, block, fp8_dtype
):
    x = float8lab.quantize(torch.randn(300, 200).exp(), fp8_dtype, block=block)
    measured, expected = row_of_saved(x).measured, x.stats()
    assert measured.stats.codes == expected.codes
    assert measured.stats.scale_min == expected.scale_min
    assert measured.stats.scale_max == expected.scale_max
    assert measured.stats.amax == float((x.qdata.float() * scale_of_elements(x)).abs().max())
    assert measured.blocks == x.scale.numel()
    assert measured.saturated_blocks == measured.idle_blocks == 0
    assert measured.findings == ()


def scale_of_elements(x):
    """Return the scale of each element."""
    scale = x.scale
    for dim, size in enumerate(x.spec.block):
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
    return scale.expand(x.shape)


@pytest.mark.parametrize("rule", ["fp32", "pow2", "e8m0"])
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (128, 128), (1, 128), (1, 32)], ids=str)
def test_weights_with_right_scales_are_not_suspicious(tmp_path, rule, block):
    samples = {
        "normal": torch.randn(512, 384),
        "uniform": torch.rand(512, 384) * 2 - 1,
        "laplace": torch.distributions.Laplace(0, 1).sample((512, 384)),
        "cauchy": torch.randn(512, 384) / torch.randn(512, 384),
        "sparse": torch.randn(512, 384) * (torch.rand(512, 384) < 0.1),
    }
    state = {
        name: float8lab.quantize(x.bfloat16(), block=block, scale_rule=rule)
        for name, x in samples.items()
    }
    torch.save(state, tmp_path / "a.pt")
    assert [(row.name, row.why) for row in checkpoint(tmp_path / "a.pt").suspicious] == []


def test_a_saturated_block_is_suspicious(row_of_saved, box_size):
    x = torch.randn(256, 512)
    scale = x.unflatten(0, (2, 128)).unflatten(2, (4, 128)).abs().amax((1, 3)) / 448
    scale[1, 2] /= 2.5  # as delayed scaling with a history without such values
    row = row_of_saved(float8lab.quantize(x, block=(128, 128), scale=scale))
    assert (row.why, row.severity) == ("1 of 8 blocks saturated", 1)
    assert row.measured.saturated_blocks == 1


@pytest.mark.parametrize("block", [(-1, -1), (1, -1)], ids=["tensor", "row"])
def test_saturated_blocks_read_in_parts_are_counted_once(row_of_saved, box_size, block):
    x = torch.randn(4, 600)
    row = row_of_saved(float8lab.quantize(x, block=block, scale=x.abs().max() / 448 / 3))
    assert row.measured.saturated_blocks == (1 if block == (-1, -1) else 4)


def test_too_large_scales_are_suspicious(row_of_saved, box_size):
    x = torch.randn(256, 256)
    row = row_of_saved(float8lab.quantize(x, block=(128, 128), scale=1.0))
    assert row.why == "all 4 blocks use less than 0.0625 of the range"
    assert row.severity == 1


def quantized_weight(block=(128, 128), shape=(256, 512)):
    return float8lab.quantize(torch.randn(shape), block=block)


def test_fp8_nan_is_suspicious(row_of_saved, box_size):
    x = quantized_weight()
    x.qdata.view(torch.uint8)[3, 5] = 0x7F
    x.qdata.view(torch.uint8)[200, 500] = 0xFF
    row = row_of_saved(x)
    assert (row.why, row.severity) == ("2 of 131072 codes NaN", 2)
    assert math.isfinite(row.measured.stats.amax)


def test_fp8_infinity_is_suspicious(row_of_saved, box_size):
    x = float8lab.quantize(torch.randn(64, 64), E5M2)
    x.qdata.view(torch.uint8)[1, 1] = 0x7C
    row = row_of_saved(x)
    assert (row.why, row.severity) == ("1 of 4096 codes infinite", 2)


def test_zero_scales_are_suspicious(row_of_saved, box_size):
    x = quantized_weight()
    x.scale[1, 3] = 0
    assert (row_of_saved(x).why, row_of_saved(x).severity) == (
        "1 of 8 scales are zero over codes that are not",
        2,
    )
    x.qdata.view(torch.uint8)[128:, 384:] = 0
    assert (row_of_saved(x).why, row_of_saved(x).severity) == ("1 of 8 scales zero, over zeros", 1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (128, 128)], ids=str)
def test_nan_infinite_and_negative_scales_are_suspicious(row_of_saved, box_size, value, block):
    x = quantized_weight(block)
    x.scale[-1, -1] = value
    row = row_of_saved(x)
    count = x.scale.numel()
    assert row.why == f"1 of {count} scales NaN, infinite or negative"
    assert (row.severity, row.measured.scale.bad_count) == (2, 1)


def test_a_tensor_of_zeros_is_suspicious(row_of_saved, box_size):
    row = row_of_saved(float8lab.quantize(torch.zeros(128, 128)))
    assert (row.why, row.severity) == ("all zero", 1)


def test_statistics_of_a_tensor_that_is_not_fp8(row_of_saved, box_size):
    x = torch.randn(50, 70, dtype=torch.bfloat16)
    x[:3] = 0
    plain_stats = row_of_saved(x).measured.plain
    assert plain_stats.numel == 3500
    assert plain_stats.amax == x.abs().max()
    assert plain_stats.zero_count == int((x == 0).sum())
    assert plain_stats.negative_count == int((x < 0).sum())
    assert plain_stats.rms == pytest.approx(float(x.double().square().mean().sqrt()), rel=1e-12)
    x[4, 4], x[5, 5], x[6, 6] = math.nan, -math.inf, math.inf
    row = row_of_saved(x)
    assert row.why == "1 of 3500 elements NaN; 2 of 3500 elements infinite"
    assert row.severity == 2
    assert math.isfinite(row.measured.plain.amax)


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(3.0), torch.empty(0, 4), torch.ones(3, dtype=torch.int64),
        torch.tensor([True, False]), torch.tensor([3 + 4j]), torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.uint16), torch.ones(2).to(torch.float8_e8m0fnu),
        torch.ones(2).to(torch.float8_e4m3fnuz), torch.eye(3).to_sparse(),
        float8lab.quantize(torch.empty(0, 4)), float8lab.quantize(torch.tensor(2.0)),
        torch.empty(2, device="meta"),
        pytest.param(
            torch.nested.nested_tensor([torch.ones(3), torch.ones(2)], layout=torch.jagged),
            marks=pytest.mark.skipif(
                NestedTensor not in torch.serialization.get_safe_globals(),
                reason="torch.load with weights_only refuses nested tensors since torch 2.15",
            ),
        ),
    ],
    ids=lambda x: f"{type(x).__name__}-{x.dtype}-{x.device}-{x.numel()}",
)  # fmt: skip
def test_every_kind_of_tensor_has_a_row(row_of_saved, value):
    row = row_of_saved(value)
    assert row.shape == ((value.numel(),) if value.is_nested else tuple(value.shape))
    json.dumps(row.to_json(), allow_nan=False)


PEAK_MEMORY_PROGRAM = """
import sys, threading, time
import torch, float8lab

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.002)

folder, numel, *kinds = sys.argv[1:]
for kind in kinds:
    float8lab.inspect.checkpoint(f"{folder}/small/{kind}")  # what is loaded and started once
    before = most = anonymous()
    done = False
    thread = threading.Thread(target=watch)
    thread.start()
    report = float8lab.inspect.checkpoint(f"{folder}/large/{kind}")
    done = True
    thread.join()
    assert sum(row.measured.stats.numel for row in report.rows) == int(numel)
    print(most - before)
"""


def sparse_file(path, rows, columns, blocks):
    """Write a safetensors file of zeros that takes no space on the disk."""
    size = rows * columns
    scale = math.prod(blocks) * 4
    header = {
        "a.weight": {"dtype": "F8_E4M3", "shape": [rows, columns], "data_offsets": [0, size]},
        "a.weight_scale_inv": {
            "dtype": "F32", "shape": list(blocks), "data_offsets": [size, size + scale]
        },
    }  # fmt: skip
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size + scale)


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="measures by /proc")
def test_peak_memory_of_inspecting_is_bounded(tmp_path):
    """Counts anonymous memory only; the kernel may drop the pages of a mapped file."""
    pytest.importorskip("safetensors")
    rows, columns = 72 * 256, 4096  # 72 MiB
    kinds = ["blocks.safetensors", "one_scale.safetensors", "saved.pt", "dcp"]
    for name, count in (("small", BOX // columns), ("large", rows)):
        folder = tmp_path / name
        folder.mkdir()
        sparse_file(folder / kinds[0], count, columns, (count // 128, columns // 128))
        sparse_file(folder / kinds[1], count, columns, (1, 1))
        state = {
            "a.weight": torch.zeros(count, columns, dtype=torch.uint8).view(E4M3),
            "a.weight_scale_inv": torch.ones(count // 128, columns // 128),
        }
        torch.save(state, folder / kinds[2])
        dcp_save(state, folder / kinds[3])
    output = run_python("-c", PEAK_MEMORY_PROGRAM, tmp_path, str(rows * columns), *kinds)
    peaks = dict(zip(kinds, map(int, output.split()), strict=True))
    assert all(peak < 64 * 2**20 for peak in peaks.values()), peaks


def test_only_the_requested_slice_of_a_huge_file_is_read(tmp_path):
    """The file has 1 TiB of zeros and takes no space on the disk."""
    pytest.importorskip("safetensors")
    path = tmp_path / "large.safetensors"
    rows = 2**28
    sparse_file(path, rows, 4096, (rows // 128, 32))
    with path.open("r+b") as file:
        file.seek(-4 * rows // 128 * 32 - 1, os.SEEK_END)  # the last FP8 value
        file.write(b"\x38")
    codes, _ = open_checkpoint(path).entries
    values = codes.read((slice(rows - 2, rows), slice(4000, 4096)))
    assert values.float().sum() == values.float()[1, -1] == 1


def test_a_torch_save_file_is_mapped_shared_and_never_written(tmp_path, monkeypatch):
    """A private mapping fails for a file that is larger than the memory; a shared one works."""
    path = tmp_path / "large.pt"
    torch.save({"a": torch.arange(6.0).view(2, 3)}, path)
    content = path.read_bytes()
    original = torch.UntypedStorage.from_file

    def from_file(name, shared, size):
        if not shared:
            raise RuntimeError(f"unable to mmap {size} bytes from file <{name}>")
        return original(name, shared, size)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", from_file)
    (entry,) = open_checkpoint(path).entries
    part = entry.read((slice(0, 2), slice(1, 3)))
    assert part.tolist() == [[1, 2], [4, 5]]
    part.fill_(7)
    assert path.read_bytes() == content
