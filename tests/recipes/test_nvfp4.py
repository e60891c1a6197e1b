"""NVFP4: the published format, and layers that train in it."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float8lab
from float8lab import ops
from float8lab.formats import E2M1_VALUES, E4M3, NVFP4, Spec
from float8lab.recipes import NVFP4BlockScaling

RULE = "e2m1 e4m3 fp32"
RECIPES = [NVFP4BlockScaling(), NVFP4BlockScaling(disable_2d_quantization=True)]
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=["16x16", "1x16"])


def nearest(value: float) -> float:
    """The nearest value of e2m1; of two nearest values, the one with an even code."""
    magnitude = min(abs(value), 6.0)
    distances = [abs(magnitude - representable) for representable in E2M1_VALUES]
    codes = [code for code, distance in enumerate(distances) if distance == min(distances)]
    code = next((code for code in codes if code % 2 == 0), codes[0])
    return math.copysign(E2M1_VALUES[code], value)


def quantize_as_published(x: Tensor, rows: int = 1) -> tuple[Tensor, Tensor]:
    """The elements and decode scales of a finite matrix, block by block as in the paper."""
    encode = torch.tensor(6.0 * 448.0) / x.abs().max()
    decode = 1.0 / encode
    values = torch.empty_like(x)
    scales = torch.empty(-(-x.shape[0] // rows), -(-x.shape[1] // 16))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = slice(i * rows, (i + 1) * rows), slice(j * 16, (j + 1) * 16)
            scale = x[block].abs().max() / torch.tensor(6.0) * encode
            scales[i, j] = scale.clamp(max=448.0).to(E4M3).float() * decode
            factor = (1.0 / scales[i, j]).clamp(max=torch.finfo(torch.float32).max)
            elements = [nearest(float(value)) for value in (x[block] * factor).flatten()]
            values[block] = torch.tensor(elements).view_as(x[block])
    return values, scales


@pytest.mark.parametrize("rows", [1, 16])
def test_casts_have_the_published_format(rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(37, 50) * torch.randn(37, 1).exp()
    x[3, 16:32], x[20] = 0.0, x[20] * 1e-7  # a block of zeros, and blocks below the least scale
    q, scale, *_ = ops.cast_op("", (x,), x.dtype, E4M3, (rows, 16), RULE)
    values, scales = quantize_as_published(x, rows)
    assert torch.equal(q.float(), values)
    assert torch.equal(scale, scales)
    assert set(q.float().abs().unique().tolist()) == set(E2M1_VALUES)


def test_both_orientations_and_a_shard_with_the_amax_of_its_matrix_have_the_published_format() -> (
    None
):
    x = torch.randn(32, 48)
    q, scale, _, q_t, scale_t, _ = ops.cast_op(
        "", (x,), x.dtype, E4M3, (1, 16), RULE, 0.0, 1, True, True
    )
    for (got, factor), matrix in (((q, scale), x), ((q_t, scale_t), x.t())):
        values, scales = quantize_as_published(matrix.contiguous())
        assert torch.equal(got.float(), values)
        assert torch.equal(factor, scales)
    amax = x.abs().max().view(1, 1)
    shard = ops.cast_op(
        "", (x[:8],), x.dtype, E4M3, (1, 16), RULE, 0.0, 1, True, False, False, amax
    )
    assert torch.equal(shard[0].float(), q[:8].float())
    assert torch.equal(shard[1], scale[:8])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_value_makes_its_block_nan(value: float) -> None:
    x = torch.randn(4, 64)
    x[1, 20] = value
    y = float8lab.quantize(x, E4M3, block=(1, 16), scale_rule=RULE).dequantize()
    expected = torch.zeros(4, 64, dtype=torch.bool)
    expected[1, 16:32] = True
    assert torch.equal(y.isnan(), expected)
    assert torch.isfinite(y[~expected]).all()


def test_groups_are_cast_like_separate_matrices() -> None:
    x, offs = torch.randn(50, 32), torch.tensor([20, 20, 47])
    q, scale, _, q_t, scale_t, _ = ops.cast_op(
        "", (x,), x.dtype, E4M3, (1, 16), RULE, 0.0, 16, True, True, False, None, offs
    )
    for start, end, first_column in ((0, 20, 0), (20, 47, 128)):
        values, scales = quantize_as_published(x[start:end])
        assert torch.equal(q[start:end].float(), values)
        assert torch.equal(scale[start:end], scales)
        values, scales = quantize_as_published(x[start:end].t().contiguous())
        assert torch.equal(q_t[:, first_column : first_column + end - start].float(), values)
        assert torch.equal(
            scale_t[:, first_column // 16 : first_column // 16 + scales.shape[1]], scales
        )


def test_specs_of_packed_and_unpacked_elements_agree() -> None:
    unpacked = Spec(E4M3, (1, 16), RULE)
    assert (unpacked.element_dtype, unpacked.scale_dtype) == (
        NVFP4.element_dtype,
        NVFP4.scale_dtype,
    )
    assert (unpacked.largest(), unpacked.describe()) == (6.0, NVFP4.describe())
    assert unpacked.shares_matrix_amax
    assert (unpacked.is_packed, NVFP4.is_packed) == (False, True)
    with pytest.raises(ValueError, match=r"scale_rule must be a rule for torch\.float8_e5m2"):
        Spec(torch.float8_e5m2, (1, 16), RULE)


class Experts(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        first = torch.arange(len(rows)) < len(rows) // 3
        if isinstance(self.layer, float8lab.ExpertMLP):
            routing = torch.stack([first, ~first], 1)
            return self.layer(rows, routing.float(), routing.int())  # type: ignore[no-any-return]
        return self.layer(rows, [int(first.sum()), int((~first).sum())])  # type: ignore[no-any-return]


def modules() -> dict[str, Any]:
    return {
        "Linear": lambda: float8lab.Linear(32, 32),
        "LayerNormLinear": lambda: float8lab.LayerNormLinear(32, 32),
        "LayerNormMLP": lambda: float8lab.LayerNormMLP(32, 48),
        "GroupedLinear": lambda: Experts(float8lab.GroupedLinear(2, 32, 32)),
        "ExpertMLP": lambda: Experts(float8lab.ExpertMLP(2, 32, 48)),
        "TransformerLayer": lambda: float8lab.TransformerLayer(32, 48, 2),
    }


def losses(module: nn.Module, recipe: NVFP4BlockScaling | None, steps: int = 12) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, 32, generator=generator)
    target = torch.randn(6, 4, 32, generator=generator)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    values = []
    for _ in range(steps):
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            loss = (module(x).reshape(target.shape) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


@each_recipe
@pytest.mark.parametrize("name", modules())
def test_modules_train_in_nvfp4(name: str, recipe: NVFP4BlockScaling) -> None:
    module = modules()[name]()
    high_precision = losses(copy.deepcopy(module), None)
    nvfp4 = losses(module, recipe)
    assert nvfp4 != high_precision
    assert nvfp4[-1] < nvfp4[0] - 0.6 * (high_precision[0] - high_precision[-1])


@each_recipe
def test_converted_model_trains_and_is_restored(recipe: NVFP4BlockScaling, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    model = float8lab.convert_to_float8(model, recipe)
    values = losses(model, recipe)
    assert values[-1] < values[0]
    torch.save(model.state_dict(), tmp_path / "model.pt")
    restored = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    restored = float8lab.convert_to_float8(restored, recipe)
    restored.load_state_dict(torch.load(tmp_path / "model.pt"))
    x = torch.randn(8, 32)
    assert torch.equal(restored(x), model(x))


@each_recipe
def test_weights_stored_in_the_format_are_restored(
    recipe: NVFP4BlockScaling, tmp_path: Path
) -> None:
    with float8lab.fp8_model_init(recipe=recipe):
        layer = float8lab.Linear(32, 48)
    assert layer.weight.spec == recipe.linear.w
    x = torch.randn(8, 32)
    with float8lab.autocast(recipe=recipe):
        y = layer(x)
        torch.save(layer.state_dict(), tmp_path / "layer.pt")
        restored = float8lab.Linear(32, 48)
        restored.load_state_dict(dict(torch.load(tmp_path / "layer.pt")))
        restored_y = restored(x)
    if recipe == RECIPES[0]:  # square blocks of dequantized values have the same scales
        assert torch.allclose(restored_y, y, atol=1e-5)


def test_compiled_layer_equals_eager_layer_without_graph_breaks() -> None:
    layer, x = float8lab.LayerNormLinear(32, 32), torch.randn(8, 32)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    with float8lab.autocast(recipe=NVFP4BlockScaling()):
        assert torch.equal(compiled(x), layer(x))
