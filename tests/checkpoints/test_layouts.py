"""Recognition of FP8 weights and their scales: each naming convention, and errors in each."""

import json
import math

import pytest
import torch

import float8lab
from float8lab.formats import E4M3, E5M2
from float8lab.inspect import checkpoint

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")


def fp8_values(*shape, dtype=E4M3):
    """Return FP8 data with all finite values equally often, large and small ones mixed."""
    top = 0x7E if dtype == E4M3 else 0x7B
    body = (torch.arange(1, math.prod(shape) + 1) * 113) % (top + 1)
    return body.to(torch.uint8).reshape(shape).view(dtype)


@pytest.fixture
def rows_of(tmp_path):
    """Return the rows by name of the report on these tensors in a safetensors file."""

    def save_and_inspect(tensors, **config):
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
        if config:
            (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        report = checkpoint(tmp_path)
        return {row.name: row for row in report.rows}

    return save_and_inspect


@pytest.mark.parametrize(
    ("shape", "scales", "block_name"),
    [
        ((300, 200), (3, 2), "128x128"), ((300, 200), (), "tensor"), ((300, 200), (1,), "tensor"),
        ((300, 200), (1, 1), "tensor"), ((300, 200), (300, 1), "row"), ((300, 200), (300,), "row"),
        ((300, 200), (300, 2), "1x128"), ((300, 256), (300, 8), "1x32"),
        ((300, 256), (300, 4), "1x64"), ((256, 96), (4, 2), "64x64"),
        ((4, 256, 384), (4, 2, 3), "1x128x128"), ((4, 256, 384), (4, 256), "row"),
        ((4, 256, 384), (4, 1, 384), "column"), ((4, 256, 384), (4,), "1xallxall"),
        ((4, 256, 384), (4, 1, 1), "1xallxall"), ((8,), (1,), "tensor"), ((), (), "tensor"),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_follow_from_the_shape_of_the_scales(rows_of, shape, scales, block_name):
    row = rows_of({"a.weight": fp8_values(*shape), "a.weight_scale": torch.ones(scales)})[
        "a.weight"
    ]
    assert row.format == f"e4m3 {block_name} " + ("fp32" if math.prod(scales) == 1 else "pow2")
    assert row.measured.scale.shape == scales
    assert row.measured.blocks == math.prod(scales)
    assert not row.findings


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ((5, 3), "scale of shape 5x3 fits no blocks of 300x200"),
        ((200,), "scale of shape 200 fits no blocks of 300x200"),
        ((3, 2, 1), "scale of shape 3x2x1 fits no blocks of 300x200"),
        ((0,), "scale of shape 0 fits no blocks of 300x200"),
    ],
)
def test_scales_that_fit_no_blocks_are_a_finding(rows_of, scales, text):
    row = rows_of({"w.weight": fp8_values(300, 200), "w.weight_scale": torch.ones(scales)})[
        "w.weight"
    ]
    assert (row.why, row.severity, row.format) == (text, 2, "e4m3, unusable scale")


@pytest.mark.parametrize(
    ("names", "convention"),
    [
        (("a.weight", "a.weight_scale_inv"), "DeepSeek"),
        (("a.gate_up_proj", "a.gate_up_proj_scale_inv"), "DeepSeek"),
        (("a.weight", "a.scale"), "DeepSeek, converted"),
        (("a.weight", "a.weight_scale"), "compressed-tensors"),
        (("a.weight", "a.scale_weight"), "scaled FP8"),
        (("a.weight.qdata", "a.weight.scale"), "float8lab"),
    ],
)
def test_the_convention_follows_from_the_names(rows_of, names, convention):
    rows = rows_of({names[0]: fp8_values(256, 256), names[1]: torch.full((2, 2), 0.5)})
    (row,) = rows.values()
    assert row.name == names[0].removesuffix(".qdata")
    assert (row.convention, row.format, row.why) == (convention, "e4m3 128x128 pow2", "")
    assert row.measured.stats.amax == 224.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scales_of_each_float_dtype_are_read(rows_of, dtype):
    scale = torch.tensor([[0.75, 3.0]], dtype=dtype)
    row = rows_of({"a.weight": fp8_values(128, 256), "a.weight_scale_inv": scale})["a.weight"]
    stats = row.measured.stats
    assert (stats.scale_min, stats.scale_max, stats.amax) == (0.75, 3.0, 1344.0)
    assert row.format == "e4m3 128x128 fp32"


@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_e8m0_scales_are_read(rows_of, scale_dtype):
    scale = torch.tensor([[127, 130]], dtype=torch.uint8).view(scale_dtype)  # 1 and 8
    row = rows_of({"a.weight": fp8_values(1, 64), "a.weight_scale": scale})["a.weight"]
    stats = row.measured.stats
    assert (stats.scale_min, stats.scale_max, row.format) == (1.0, 8.0, "e4m3 1x32 e8m0")


def test_scale_of_an_integer_type_is_unusable(rows_of):
    row = rows_of(
        {"a.weight": fp8_values(4, 4), "a.weight_scale": torch.ones(1, dtype=torch.int32)}
    )
    assert row["a.weight"].why == "its scale a.weight_scale is int32"


def test_unusual_blocks_are_a_finding_unless_configured(rows_of):
    tensors = {"a.weight": fp8_values(256, 256), "a.weight_scale_inv": torch.ones(4, 4) / 3}
    assert rows_of(tensors)["a.weight"].why == (
        "scales by 64x64, where blocks of 128x128 are usual or configured"
    )
    assert rows_of(tensors)["a.weight"].severity == 1
    assert rows_of(tensors, quant_method="fp8", weight_block_size=[64, 64])["a.weight"].why == ""


@pytest.mark.parametrize(
    ("weights", "scales", "why"),
    [
        ({"strategy": "tensor"}, (1,), ""),
        ({"strategy": "channel"}, (256, 1), ""),
        ({"strategy": "block", "block_structure": [128, 128]}, (2, 2), ""),
        ({"strategy": "group", "group_size": 32}, (256, 8), ""),
        (
            {"strategy": "channel"}, (1,),
            "scales by tensor, where blocks of row are usual or configured",
        ),
    ],
)  # fmt: skip
def test_scales_are_checked_against_the_compressed_tensors_configuration(
    rows_of, weights, scales, why
):
    rows = rows_of(
        {"a.weight": fp8_values(256, 256), "a.weight_scale": torch.rand(scales) + 1},
        quant_method="compressed-tensors",
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
    )
    assert rows["a.weight"].why == why


@pytest.mark.parametrize("config", [{"weight_block_size": "x"}, {"config_groups": [1]}, {"a": 1}])
def test_a_strange_configuration_is_ignored(rows_of, config):
    tensors = {"a.weight": fp8_values(256, 256), "a.weight_scale_inv": torch.ones(2, 2) / 3}
    assert rows_of(tensors, **config)["a.weight"].format == "e4m3 128x128 fp32"


def test_a_missing_scale_is_a_finding(rows_of):
    row = rows_of({"a.weight": fp8_values(4, 4), "b.weight": torch.ones(2)})["a.weight"]
    assert (row.why, row.format, row.severity) == (
        "no scale in the checkpoint", "e4m3, no scale", 2,
    )  # fmt: skip


def test_scales_without_a_weight_are_a_finding(rows_of):
    rows = rows_of(
        {
            "a.weight_scale_inv": torch.ones(2, 2), "b.weight": torch.ones(4, 4),
            "b.weight_scale": torch.ones(1), "c.input_scale": torch.ones(1),
            "d.weight.scale": torch.ones(1, 1), "d.weight.amax": torch.ones(1, 1),
            "e.scale_weight": torch.ones(()),
        }
    )  # fmt: skip
    findings = {name: row.why for name, row in rows.items() if row.findings}
    assert findings == {
        "a.weight_scale_inv": "a scale, but there is no weight a.weight",
        "b.weight_scale": "a scale, but b.weight is in float32",
        "c.input_scale": "a scale, but there is no tensor c.",
        "d.weight.scale": "a scale, but there is no weight d.weight.qdata",
        "d.weight.amax": "a scale, but there is no weight d.weight.qdata",
        "e.scale_weight": "a scale, but there is no weight e.weight",
    }
    assert all(row.findings[0].kind == "orphaned-scale" for row in rows.values() if row.findings)


def test_scales_of_other_quantizations_are_not_orphans(rows_of):
    rows = rows_of(
        {
            "int8.weight": torch.ones(4, 4, dtype=torch.int8),
            "int8.weight_scale": torch.ones(4, 1),
            "nvfp4.weight_packed": torch.ones(4, 16, dtype=torch.uint8),
            "nvfp4.weight_scale": fp8_values(4, 2),  # in FP8 itself
            "nvfp4.weight_global_scale": torch.ones(1),
            "logit_scale": torch.ones(()),
            "norm.scale": torch.ones(4),
            "fp8.weight": fp8_values(16, 16),
            "fp8.weight_scale": torch.ones(()) / 3,
            "fp8.input_scale": torch.ones(()),
        }
    )
    assert {name: row.why for name, row in rows.items() if row.findings} == {}
    assert [name for name, row in rows.items() if row.fp8] == ["fp8.weight"]


def test_invalid_activation_scales_are_a_finding(rows_of):
    rows = rows_of(
        {
            "a.weight": fp8_values(16, 16), "a.weight_scale": torch.ones(()) / 3,
            "a.input_scale": torch.zeros(1), "a.output_scale": torch.tensor([math.nan]),
        }
    )  # fmt: skip
    assert rows["a.input_scale"].why == "1 of 1 scales not positive"
    assert rows["a.output_scale"].why == "1 of 1 elements NaN"


def test_a_float8_tensor_has_the_format_of_its_spec(tmp_path):
    """The shape of the scales alone would say otherwise: one block covers a short dimension."""
    x = float8lab.quantize(torch.randn(100, 100), E5M2, block=(128, 128), scale_rule="e8m0")
    torch.save({"model": {"w": x}}, tmp_path / "a.pt")
    (row,) = checkpoint(tmp_path / "a.pt").rows
    assert (row.name, row.format) == ("model.w", "e5m2 128x128 e8m0")
    assert row.measured.stats.codes == x.stats().codes
    # The stored amax is of the tensor before quantization; the report's is of the stored values.
    assert row.measured.stats.amax == x.dequantize().abs().max()
