"""How other libraries are called, with this one in their place: the names are the same."""

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
def bare(setting):
    """No recipes of our own."""
    setting.recipes = ()
    return setting


def check(rows, wanted):
    assert {row.name: row.refusal for row in rows if row.refusal is not None} == {}
    assert wanted <= {row.name for row in rows}
    assert all(row.floor_ms is None for row in rows if row.name in wanted)


TORCHAO = {"torchao tensorwise, eager", "torchao rowwise, eager"}


def test_linear(bare):
    bare.compile = True
    compiled = {name.replace("eager", "compile") for name in TORCHAO}
    check(list(linear.rows(bare, [TINY])), TORCHAO | compiled | TE)


def test_norm_linear(bare):
    check(list(norm_linear.rows(bare, [TINY])), TORCHAO | TE)


def test_mlp(bare):
    check(list(mlp.rows(bare, [mlp.MlpSize(48, 96, 64, "swiglu")])), TORCHAO | TE)


def test_layer(bare):
    check(list(layer.rows(bare, LAYER)), TORCHAO | TE | {"TE bfloat16"})


def test_model(bare):
    # Enough steps for the loss to fall by more than FP8's noise.
    bare.wall = lambda fn: common.time_wall(fn, warm_up=1, samples=2, calls=3)
    check(list(model.rows(bare, LAYER, layers=2)), TORCHAO | TE)


def test_attention(bare):
    size = attention.AttentionSize(1, 24, H=2, D=16)
    check(list(attention.rows(bare, [size])), {"TE bfloat16", "TE FP8 delayed"})


def test_older_names(monkeypatch):
    old = types.SimpleNamespace(fp8_autocast=float8lab.fp8_autocast)
    modules = {
        "transformer_engine.pytorch": old,
        "transformer_engine.common.recipe": float8lab.recipes,
    }
    monkeypatch.setattr(peers.importlib, "import_module", modules.__getitem__)
    layer = float8lab.Linear(32, 32, device="cpu")
    for recipe, fp8 in (("current", 1), (None, 0)):
        with float8lab.count_gemms() as counts, peers.te_context(recipe)():
            layer(torch.ones(4, 32))
        assert counts.fp8 == fp8


@pytest.mark.parametrize("library", ["torchao", "transformer_engine"])
def test_a_library_that_is_not_there_has_no_rows(bare, monkeypatch, library):
    monkeypatch.setattr(peers, "installed", lambda name: name != library)
    names = {row.name for row in linear.rows(bare, [TINY])}
    prefix = {"torchao": "torchao", "transformer_engine": "TE"}[library]
    assert not any(name.startswith(prefix) for name in names)
    assert len(names) > 1


def test_nothing_is_imported_to_find_out(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(peers.importlib, "import_module", partial(pytest.fail, "imported"))
    assert not peers.installed("a_library_that_nobody_has")
    assert peers.installed("json")
