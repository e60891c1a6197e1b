"""Weights in packed 4 bits: each layout is recognized, decoded and compared."""

import math

import pytest
import torch

import float8lab
from float8lab.checkpoints.layouts import recognize
from float8lab.checkpoints.opening import open_checkpoint
from float8lab.formats import E8M0
from float8lab.inspect import checkpoint, diff

safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'inspect'")

E4M3 = torch.float8_e4m3fn
VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = torch.cat([VALUES, -VALUES])
TENSOR_SCALE = 0.375


def pack_nibbles(values):
    """Pack two FP4 values into a byte, the first in the low half."""
    return values[..., 0::2] | values[..., 1::2] << 4


class Nvfp4:
    """An NVFP4 weight, and its values computed from the definition of the format."""

    size = 16

    def __init__(self, *shape):
        self.codes = (torch.arange(math.prod(shape)) * 7 % 16).to(torch.uint8).reshape(shape)
        groups = (*shape[:-1], shape[-1] // self.size)
        self.scale = self.scales(torch.arange(math.prod(groups)).reshape(groups))
        element_scale = self.scale.float().repeat_interleave(self.size, -1)
        self.values = VALUES[self.codes.long()] * element_scale * self.tensor_scale
        self.bytes = pack_nibbles(self.codes)

    tensor_scale = TENSOR_SCALE

    def scales(self, index):
        return (index * 3 % 0x68 + 8).to(torch.uint8).view(E4M3)

    def modelopt(self, name):
        return {
            f"{name}.weight": self.bytes,
            f"{name}.weight_scale": self.scale,
            f"{name}.weight_scale_2": torch.tensor(TENSOR_SCALE),
            f"{name}.input_scale": torch.tensor(0.25),
        }

    def compressed(self, name):
        return {
            f"{name}.weight_packed": self.bytes,
            f"{name}.weight_scale": self.scale,
            f"{name}.weight_global_scale": torch.tensor([1 / TENSOR_SCALE]),
            f"{name}.input_global_scale": torch.tensor([4.0]),
        }


class Mxfp4(Nvfp4):
    size, tensor_scale = 32, 1.0

    def scales(self, index):
        return (index * 5 % 20 + 115).to(torch.uint8).view(E8M0)

    def modelopt(self, name):
        return {f"{name}.weight": self.bytes, f"{name}.weight_scale": self.scale.view(torch.uint8)}

    def compressed(self, name):
        scale = self.scale.view(torch.uint8)
        return {f"{name}.weight_packed": self.bytes, f"{name}.weight_scale": scale}

    def gpt_oss(self, name, separator="_"):
        groups = self.bytes.unflatten(-1, (-1, 16))
        return {
            f"{name}{separator}blocks": groups,
            f"{name}{separator}scales": self.scale.view(torch.uint8),
        }

    def deepseek(self, name):
        return {f"{name}.weight": self.bytes.view(torch.int8), f"{name}.scale": self.scale}

    def transformers(self, name):
        return {f"{name}": self.bytes.view(torch.int8), f"{name}_scale_inv": self.scale}


LAYOUTS = {
    "modelopt-nvfp4": (Nvfp4(48, 64).modelopt("a"), "a.weight", "ModelOpt", "e2m1 1x16 e4m3 fp32"),
    "compressed-nvfp4": (
        Nvfp4(48, 64).compressed("a"), "a.weight", "compressed-tensors", "e2m1 1x16 e4m3 fp32"
    ),
    "modelopt-mxfp4": (Mxfp4(48, 64).modelopt("a"), "a.weight", "ModelOpt", "e2m1 1x32 e8m0"),
    "compressed-mxfp4": (
        Mxfp4(48, 64).compressed("a"), "a.weight", "compressed-tensors", "e2m1 1x32 e8m0"
    ),
    "gpt-oss": (
        Mxfp4(3, 48, 64).gpt_oss("experts.down_proj"),
        "experts.down_proj", "GPT-OSS", "e2m1 1x32x1 e8m0",
    ),
    "gpt-oss-original": (
        Mxfp4(3, 48, 64).gpt_oss("mlp1_weight", "."),
        "mlp1_weight", "GPT-OSS, original", "e2m1 1x1x32 e8m0",
    ),
    "deepseek-v4": (
        Mxfp4(48, 64).deepseek("experts.7.w1"),
        "experts.7.w1.weight", "DeepSeek, converted", "e2m1 1x32 e8m0",
    ),
    "transformers": (
        Mxfp4(3, 48, 64).transformers("experts.gate_up_proj"),
        "experts.gate_up_proj", "DeepSeek", "e2m1 1x1x32 e8m0",
    ),
}  # fmt: skip


def values_of(name):
    """The values that the model sees of a layout in the table."""
    kind = Nvfp4 if "nvfp4" in name else Mxfp4
    tensors = LAYOUTS[name][0]
    stacked = any(t.ndim > 2 for t in tensors.values())
    values = kind(*((3, 48, 64) if stacked else (48, 64))).values
    return values.mT if name == "gpt-oss" else values


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_layout_is_found_and_decoded_exactly(tmp_path, name):
    tensors, weight, convention, format_text = LAYOUTS[name]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    report = checkpoint(tmp_path)
    row = next(row for row in report.rows if row.name == weight)
    assert (row.convention, row.format, row.fp8, row.fp4) == (convention, format_text, False, True)
    assert row.format_name == ("nvfp4" if "nvfp4" in name else "mxfp4")
    assert (row.findings, report.suspicious) == ((), ())
    expected = values_of(name)
    assert row.shape == tuple(expected.shape)
    assert row.measured.stats.amax == expected.abs().max()
    stats = row.measured.stats
    assert stats.numel == expected.numel() == sum(stats.codes)
    assert stats.count("saturated") == expected.numel() // 8  # bit patterns 7 and 15
    stored = {n: t for n, t in tensors.items() if "input" not in n}
    assert row.nbytes == sum(t.nbytes for t in stored.values())
    assert "1 in 4 bits" in str(report)
    (item,) = (item for item in recognize(open_checkpoint(tmp_path)) if item.name == weight)
    assert torch.equal(item.values(), expected)
    in_bfloat16 = {weight: expected.to(torch.bfloat16)}
    assert torch.equal(in_bfloat16[weight].float(), expected), "bfloat16 holds these values"
    difference = diff(stored, in_bfloat16)
    assert [(row.name, row.status) for row in difference.rows] == [(weight, "equal")]
    assert (difference.equal, difference.identical) == (True, False)
    assert "all values are equal; some are stored in another format" in str(difference)
    assert diff(tensors, tensors).identical


def test_diff_finds_equal_values_in_different_layouts():
    weight = Nvfp4(48, 64)
    a, b = weight.modelopt("a"), weight.compressed("a")
    del a["a.input_scale"], b["a.input_global_scale"]
    assert diff(a, b).identical  # the same data and scales under other names
    # The scales of the blocks compensate another scale of the tensor.
    c = dict(a, **{"a.weight_scale": (weight.scale.float() * 2).to(E4M3)})
    c["a.weight_scale_2"] = a["a.weight_scale_2"] / 2
    assert [row.status for row in diff(a, c).rows] == ["equal"]
    packed = Mxfp4(3, 48, 64)
    for same_values in (
        {"w": packed.values},
        packed.gpt_oss("w", "."),
        {"w": packed.values.bfloat16()},
    ):
        assert diff(packed.transformers("w"), same_values).equal
    transposed = {"w": packed.values.mT.contiguous()}
    assert [row.status for row in diff(packed.gpt_oss("w"), transposed).rows] == ["equal"]
    fp8 = float8lab.quantize(packed.values.flatten(0, 1), block=(1, 32), scale_rule="e8m0")
    flattened = Mxfp4(3, 48, 64)
    flattened = {
        "w": flattened.bytes.flatten(0, 1),
        "w_scale": flattened.scale.view(torch.uint8).flatten(0, 1),
    }
    assert [row.status for row in diff(flattened, {"w": fp8}).rows] == ["equal"]


def test_changed_fp4_values_and_scales_are_counted():
    a, b = Nvfp4(48, 64).modelopt("a"), Nvfp4(48, 64).modelopt("a")
    b["a.weight"][3, :5] ^= 0x21  # both FP4 values of five bytes
    b["a.weight_scale"].view(torch.uint8)[0, 0] ^= 1
    row = next(row for row in diff(a, b).rows if row.name == "a.weight")
    assert (row.status, row.changed, row.changed_scales) == ("differs", 10, 1)
    b = Nvfp4(48, 64).modelopt("a")
    b["a.weight_scale_2"] *= 1.5
    row = next(row for row in diff(a, b).rows if row.name == "a.weight")
    assert (row.status, row.changed, row.changed_scales) == ("differs", 0, 0)


@pytest.mark.parametrize("kind", [Nvfp4, Mxfp4])
def test_nan_scales_give_nan_blocks(kind):
    tensors = kind(48, 64).modelopt("a")
    tensors["a.weight_scale"].view(torch.uint8)[5, 1] = 0x7F if kind is Nvfp4 else 0xFF
    (item,) = (i for i in recognize(open_checkpoint(tensors)) if i.name == "a.weight")
    values = item.values()
    size = kind.size
    assert values[5, size : 2 * size].isnan().all()
    assert values.isnan().sum() == size


DAMAGE = {
    "scale-shape": ({"a.weight_scale": torch.ones(48, 3).to(E4M3)}, "scale of shape 48x3 fits no"),
    "no-whole": ({"a.weight_global_scale": None}, "no scale of the tensor, a.weight_global_scale"),
    "bad-whole": ({"a.weight_global_scale": torch.ones(2)}, "its scale a.weight_global_scale is"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_wrong_or_missing_scales_are_a_finding(tmp_path, name):
    change, text = DAMAGE[name]
    tensors = Nvfp4(48, 64).compressed("a") | change
    tensors = {name: value for name, value in tensors.items() if value is not None}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    row = checkpoint(tmp_path).rows[0]
    assert (row.name, row.severity, row.fp4) == ("a.weight", 2, True)
    assert text in row.why


def test_tensors_of_8_bit_integers_are_not_packed_fp4():
    state = {
        "a.weight": torch.ones(8, 32, dtype=torch.int8),
        "a.weight_scale": torch.ones(8, 1),
        "b.weight": torch.ones(8, 32, dtype=torch.uint8),
        "b.weight_scale": torch.ones(8, 1, dtype=torch.uint8),  # not one scale for each 32 elements
        "c.scale": torch.ones(8, dtype=torch.uint8),
        "c.bias": torch.ones(8, dtype=torch.int8),
        "d_blocks": torch.ones(4, 16, dtype=torch.uint8),
        "d_scales": torch.ones(4, dtype=torch.uint8),
    }
    assert not any(item.quantized for item in recognize(open_checkpoint(state)))
    # Scales in e4m3 belong to 4-bit weights. Scales in a kernel's own order do not fit the blocks.
    state = {"a.weight": Nvfp4(48, 64).bytes, "a.weight_scale": torch.ones(128, 4).to(E4M3)}
    (item,) = recognize(open_checkpoint(state))
    assert item.findings[0].text == "scale of shape 128x4 fits no blocks of bytes 48x32"
    state = {"w_blocks": torch.ones(2, 4, 3, 16).byte(), "w_scales": torch.ones(()).byte()}
    (item,) = recognize(open_checkpoint(state))
    assert (item.entry.shape, item.describe()) == ((2, 96, 4), "e2m1, unusable scale")
