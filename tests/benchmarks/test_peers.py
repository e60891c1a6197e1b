"""Benchmarks call other libraries; here float8lab, with the same names, stands in for them."""

import types
from functools import partial

import pytest
import torch

import float8lab
from benchmarks import attention, common, layer, linear, mlp, model, norm_linear, peers
from benchmarks.models import LayerSize
from benchmarks.shapes import LinearShape

TINY = LinearShape("tiny", 64, 48, 32)
LAYER = LayerSize(D=64, H=4, G=2, F=96, batch=2, sequence=32)
TE = {f"TE {name}" for name in ("delayed", "current", "block")}


class _Config:
    @staticmethod
    def from_recipe_name(name):
        return {
            "tensorwise": float8lab.recipes.Float8CurrentScaling(),
            "rowwise": float8lab.recipes.Float8RowwiseScaling(),
        }[name]


def _convert(model, *, config):
    float8lab.convert_to_float8(model, config)
    return model


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    modules = {
        "torchao.float8": types.SimpleNamespace(
            Float8LinearConfig=_Config, convert_to_float8_training=_convert
        ),
        "transformer_engine.common.recipe": float8lab.recipes,
        "transformer_engine.pytorch": float8lab,
    }
    monkeypatch.setattr(peers.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(peers, "installed", lambda library: True)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: None)


@pytest.fixture
def setting_without_recipes(setting):
    """The setting without recipes of float8lab."""
    setting.recipes = ()
    return setting


def assert_accepted(rows, expected_names):
    assert {row.name: row.refusal for row in rows if row.refusal is not None} == {}
    assert expected_names <= {row.name for row in rows}
    assert all(row.floor_ms is None for row in rows if row.name in expected_names)


TORCHAO = {"torchao tensorwise, eager", "torchao rowwise, eager"}


def test_linear_has_rows_of_each_library(setting_without_recipes):
    setting_without_recipes.compile = True
    compiled = {name.replace("eager", "compile") for name in TORCHAO}
    assert_accepted(list(linear.rows(setting_without_recipes, [TINY])), TORCHAO | compiled | TE)


def test_norm_linear_has_rows_of_each_library(setting_without_recipes):
    assert_accepted(list(norm_linear.rows(setting_without_recipes, [TINY])), TORCHAO | TE)


def test_mlp_has_rows_of_each_library(setting_without_recipes):
    assert_accepted(
        list(mlp.rows(setting_without_recipes, [mlp.MlpSize(48, 96, 64, "swiglu")])), TORCHAO | TE
    )


def test_layer_has_rows_of_each_library(setting_without_recipes):
    assert_accepted(
        list(layer.rows(setting_without_recipes, LAYER)), TORCHAO | TE | {"TE bfloat16"}
    )


def test_model_has_rows_of_each_library(setting_without_recipes):
    # Enough steps for the loss to decrease by more than FP8's noise.
    setting_without_recipes.wall = lambda fn: common.time_wall(fn, warm_up=1, samples=2, calls=3)
    assert_accepted(list(model.rows(setting_without_recipes, LAYER, layers=2)), TORCHAO | TE)


def test_attention_has_rows_of_transformer_engine(setting_without_recipes):
    size = attention.AttentionSize(1, 24, H=2, D=16)
    assert_accepted(
        list(attention.rows(setting_without_recipes, [size])), {"TE bfloat16", "TE FP8 delayed"}
    )


def test_older_names_of_transformer_engine_work(monkeypatch):
    old_module = types.SimpleNamespace(fp8_autocast=float8lab.fp8_autocast)
    modules = {
        "transformer_engine.pytorch": old_module,
        "transformer_engine.common.recipe": float8lab.recipes,
    }
    monkeypatch.setattr(peers.importlib, "import_module", modules.__getitem__)
    layer = float8lab.Linear(32, 32, device="cpu")
    for recipe, fp8_gemms in (("current", 1), (None, 0)):
        with float8lab.count_gemms() as counts, peers.te_context(recipe)():
            layer(torch.ones(4, 32))
        assert counts.fp8 == fp8_gemms


@pytest.mark.parametrize("library", ["torchao", "transformer_engine"])
def test_a_missing_library_has_no_rows(setting_without_recipes, monkeypatch, library):
    monkeypatch.setattr(peers, "installed", lambda name: name != library)
    names = {row.name for row in linear.rows(setting_without_recipes, [TINY])}
    prefix = {"torchao": "torchao", "transformer_engine": "TE"}[library]
    assert not any(name.startswith(prefix) for name in names)
    assert len(names) > 1


def test_installed_imports_nothing(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(peers.importlib, "import_module", partial(pytest.fail, "imported"))
    assert not peers.installed("a_library_that_nobody_has")
    assert peers.installed("json")
