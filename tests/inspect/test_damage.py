"""Planted outliers are found, damages are those of runs made by hand, the model stays as it was."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import inspect, recipes
from tests.inspect.models import Noted, snapshot

CURRENT, ROWWISE, BLOCK = (
    recipes.Float8CurrentScaling(), recipes.Float8RowwiseScaling(), recipes.Float8BlockScaling(),
)  # fmt: skip
each_recipe = pytest.mark.parametrize(
    "recipe",
    [CURRENT, recipes.DelayedScaling(), ROWWISE, BLOCK, recipes.MXFP8BlockScaling()],
    ids=lambda recipe: type(recipe).__name__,
)
each_seed = pytest.mark.parametrize("seed", range(3))
GEMMS = ("fprop", "dgrad", "wgrad")


def stack(depth: int = 5, size: int = 64) -> nn.Sequential:
    layers = [module for _ in range(depth) for module in (nn.Linear(size, size), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def plant(model: nn.Sequential, layer: int, x: torch.Tensor, operand: str = "w") -> None:
    """Make one column of a weight huge, where its input is always 0; or of x, the other way."""
    huge, zero = 1e7, 0.0
    with torch.no_grad():
        if layer:
            model[layer - 2].weight[0] = 0
            model[layer - 2].bias[0] = huge if operand == "x" else zero
        else:
            x[:, 0] = huge if operand == "x" else zero
        model[layer].weight[:, 0] = huge if operand == "w" else zero


def gradients(model: nn.Module, x: torch.Tensor, loss_fn=square) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_fn(model, x), list(model.parameters())))


def error(found: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    """The gradients' error as the documentation defines it."""
    total = sum(
        g.numel() * min(1.0, float((g - r).norm() / r.norm())) ** 2
        for g, r in zip(found, right, strict=True)
    )
    return math.sqrt(total / sum(g.numel() for g in right))


def only(recipe: recipes.Recipe, gemm: str) -> recipes.Recipe:
    return replace(recipe, override_linear_precision=tuple(g != gemm for g in GEMMS))


@each_seed
@each_recipe
@pytest.mark.parametrize("runs", [0, 100])
@pytest.mark.parametrize("operand", ["x", "w"])
def test_a_planted_outlier_ranks_first(operand, recipe, seed, runs):
    torch.manual_seed(seed)
    model, x = stack(), torch.randn(64, 64)
    planted = (0, 4, 8)[seed]
    plant(model, planted, x, operand)
    found = inspect.sensitivity(model, x, square, recipe, runs=runs)
    assert found.rows[0].layer == str(planted)
    assert next(iter(found.by_layer())) == str(planted)
    assert next(iter(found.by_operand())) == (str(planted), operand)
    assert str(planted) in found.overrides()


def test_a_bfloat16_model_on_any_device(device):
    model = stack(3, 128).to(device, torch.bfloat16)
    x = torch.randn(128, 128, device=device, dtype=torch.bfloat16)
    plant(model, 2, x)
    found = inspect.sensitivity(model, x, lambda model, x: model(x).float().square().mean())
    assert found.rows[0].layer == "2"
    assert found.noise < found.rows[0].damage / 10


@each_seed
@pytest.mark.parametrize("recipe", [CURRENT, ROWWISE, BLOCK], ids=lambda r: type(r).__name__)
def test_damage_to_dgrad_alone(recipe, seed):
    torch.manual_seed(seed)
    model, x = stack(), torch.randn(64, 64)
    with torch.no_grad():
        model[4].weight[0] = 0  # one output is 0 for all tokens,
        model[4].bias[0] = 0
    tall = torch.zeros(64)
    tall[0] = 1e14  # and has a huge gradient, which dx does not see
    outputs = []
    model[4].register_forward_hook(lambda layer, args, y: outputs.append(y))

    def loss_fn(model, x):
        outputs.clear()
        return model(x).square().mean() + (outputs[0] * tall).sum()

    found = inspect.sensitivity(model, x, loss_fn, recipe)
    assert (found.rows[0].layer, found.rows[0].gemm) == ("4", "dgrad")
    assert found.rows[0].damage > 4 * found.rows[1].damage
    expected = replace(recipe, override_linear_precision=(False, True, False))
    assert found.overrides() == {"4": expected}
    assert max(found.rows[0].operands, key=found.rows[0].operands.get) == "dy"


class Tall(nn.Module):
    """A stack in which one token is huge as it enters one layer, and of usual size after it."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.layers = stack()
        self.register_buffer("tall", torch.ones(64, 1))
        self.tall[5] = 1e8

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x * self.tall) / self.tall if i == 4 else layer(x)
        return x


@each_seed
def test_damage_to_wgrad_alone(seed):
    # A scale for each token serves fprop; in wgrad each feature, with that token in it, has one.
    torch.manual_seed(seed)
    model = Tall()
    with torch.no_grad():
        model.layers[4].bias.zero_()
    found = inspect.sensitivity(model, torch.randn(64, 64), square, ROWWISE)
    of_wgrad = {row.layer: row.damage for row in found.rows if row.gemm == "wgrad"}
    assert max(of_wgrad, key=of_wgrad.get) == "layers.4"
    expected = replace(ROWWISE, override_linear_precision=(False, False, True))
    assert found.overrides() == {"layers.4": expected}


@each_recipe
def test_damages_are_those_of_runs_by_hand(recipe):
    model, x = stack(3), torch.randn(48, 64)
    right, loss = gradients(model, x), square(model, x).item()
    found = inspect.sensitivity(model, x, square, recipe)
    assert len(found.rows) == 8  # the first layer computes no dx
    for row in found.rows:
        again = copy.deepcopy(model)
        float8lab.convert_to_float8(
            again, only(recipe, row.gemm), filter_fn=lambda _, name, row=row: name == row.layer
        )
        assert row.gradient == pytest.approx(error(gradients(again, x), right), rel=1e-4), row
        change = abs(square(again, x).item() - loss) / loss
        assert row.loss == pytest.approx(change, abs=1e-7), row
        assert row.damage == math.hypot(row.loss, row.gradient)
        assert row.measured == (row.gemm != "wgrad")  # whose estimate is exact


def test_fused_modules_are_measured():
    model = nn.Sequential(
        nn.Linear(32, 32), float8lab.LayerNormMLP(32, 64, device="cpu"), nn.Linear(32, 32)
    )
    x = torch.randn(16, 32)
    right = gradients(model, x)
    found = inspect.sensitivity(model, x, square)
    rows = {row.gemm: row for row in found.rows if row.layer == "1"}
    assert rows.keys() == set(GEMMS)
    for gemm, row in rows.items():
        again = copy.deepcopy(model)
        float8lab.convert_to_float8(again, only(CURRENT, gemm), exclude=["0", "2"])
        assert row.measured
        assert row.gradient == pytest.approx(error(gradients(again, x), right), rel=1e-4)


@each_seed
def test_overrides_reduce_the_error(seed):
    torch.manual_seed(seed)
    model, x = stack(), torch.randn(64, 64)
    plant(model, 4, x)
    right = gradients(model, x)
    found = inspect.sensitivity(model, x, square)
    errors = []
    for overrides in ({}, found.overrides(), found.overrides(0.0)):
        again = float8lab.convert_to_float8(copy.deepcopy(model), overrides=overrides)
        errors.append(error(gradients(again, x), right))
    assert errors[0] > 2 * errors[1] > 0 == errors[2]


def test_a_finer_recipe_is_preferred_to_high_precision():
    model, x = stack(), torch.randn(64, 64)
    with torch.no_grad():
        model[4].weight[0] = 1e7  # a scale for each row saves the others
        model[4].bias[0] = 0
        model[6].weight[:, 0] = 0
    found = inspect.sensitivity(model, x, square, [CURRENT, ROWWISE])
    # That of dgrad runs along the other dimension: there each row has an outlier.
    expected = replace(ROWWISE, override_linear_precision=(False, True, False))
    assert found.overrides()["4"] == expected
    high = inspect.sensitivity(model, x, square).overrides()["4"].override_linear_precision
    assert high == (True, True, False)


def test_names_that_are_patterns_of_others():
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    x = torch.randn(32, 16)
    plant(model, 0, x)
    overrides = inspect.sensitivity(model, x, square).overrides()
    report = float8lab.conversion_report(float8lab.convert_to_float8(model, overrides=overrides))
    notes = {layer.name: layer.note for layer in report.layers}
    assert notes["0"] != repr(CURRENT)
    assert notes["1.0"] == notes["1.1"] == repr(CURRENT)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_the_model_is_left_as_it_was(converted, training, fails, device):
    model = Noted(fails=fails).to(device)
    x = torch.randn(16, 32, device=device)
    if converted:
        delayed = recipes.DelayedScaling(amax_history_len=4)
        float8lab.convert_to_float8(model, delayed, overrides={"second": CURRENT})
    if not fails:
        square(model, x).backward()
    model.train(training)
    before = snapshot(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), float8lab.autocast(recipe=recipes.DelayedScaling()):
            if fails:
                with pytest.raises(RuntimeError, match="on purpose"):
                    inspect.sensitivity(model, x, square, [CURRENT, recipes.DelayedScaling()])
            else:
                inspect.sensitivity(model, x, square, [CURRENT, recipes.DelayedScaling()])
    assert snapshot(model) == before


def test_dropout_and_batch_statistics_are_the_same_in_every_run():
    assert inspect.sensitivity(Noted(), torch.randn(16, 32), square).noise == 0.0


def test_random_streams_of_a_tracker_are_put_back():
    tracker = float8lab.CudaRNGStatesTracker(device="cpu")
    tracker.add("model-parallel-rng", 7)

    class Dropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.get_rng_state_tracker = lambda: tracker

        def forward(self, x):
            with self.get_rng_state_tracker().fork():
                return nn.functional.dropout(self.linear(x), 0.5)

    before = tracker.get_states()["model-parallel-rng"]
    assert inspect.sensitivity(Dropout(), torch.randn(16, 32), square).noise == 0.0
    assert torch.equal(tracker.get_states()["model-parallel-rng"], before)


def test_gradients_that_hooks_and_optimizers_wait_for():
    model, x = stack(2), torch.randn(8, 64)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: pytest.fail("accumulated"))
    inspect.sensitivity(model, x, square)
    assert all(p.grad is None for p in model.parameters())


def test_a_step_in_progress_goes_on():
    model, x = stack(2), torch.randn(8, 64)
    float8lab.convert_to_float8(model, recipes.DelayedScaling())
    other = copy.deepcopy(model)
    loss = square(model, x)
    inspect.sensitivity(model, x, square)
    loss.backward()
    square(other, x).backward()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_cost_is_what_the_documentation_says():
    model, x = stack(3), torch.randn(8, 64).requires_grad_()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for runs, passes in ((0, 2), (4, 6), (100, 8)):
        calls.clear()
        found = inspect.sensitivity(model, x, square, runs=runs)
        assert found.passes == len(calls) == passes


def test_checkpointed_frozen_tied_and_stored_weights():
    with float8lab.fp8_model_init():
        stored = float8lab.Linear(32, 32, device="cpu")
    model = nn.Sequential(nn.Linear(32, 32), stored, nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight.requires_grad_(False)
    model[3].weight = model[2].weight
    x = torch.randn(16, 32)

    def loss_fn(model, x):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    found = inspect.sensitivity(model, x, loss_fn)
    gemms = {(row.layer, row.gemm) for row in found.rows}
    assert gemms == {
        (str(layer), gemm)
        for layer, wanted in enumerate([("fprop",), GEMMS, GEMMS, GEMMS])
        for gemm in wanted
    }
    assert all(0 <= row.damage < 1 for row in found.rows)


def test_a_layer_without_features_does_no_damage():
    empty = float8lab.Linear(64, 0, device="cpu")
    found = inspect.sensitivity(
        nn.ModuleList([nn.Linear(64, 8), empty]), torch.randn(16, 64),
        lambda model, x: model[0](x).square().mean() + model[1](x).sum(),
    )  # fmt: skip
    assert {row.damage for row in found.rows if row.layer == "1"} == {0.0}


def test_what_it_refuses():
    model, x = stack(1), torch.randn(8, 64)
    with pytest.raises(ValueError, match="must return one number that requires a gradient"):
        inspect.sensitivity(model, x, lambda model, x: model(x))
    with pytest.raises(ValueError, match="must return a finite loss"):
        inspect.sensitivity(model, x * math.inf, square)
    with pytest.raises(TypeError, match=r"recipes must be None or a recipe or a list of them; got"):
        inspect.sensitivity(model, x, square, "auto")
    with pytest.raises(ValueError, match="recipe must be one that was tried"):
        inspect.sensitivity(model, x, square).by_layer(BLOCK)


def test_report_as_text_and_json():
    operands = {"x": 0.025, "w": 1.0}
    rows = (
        inspect.Damage("up", "fprop", CURRENT, 0.5, 0.3, 0.4, True, 1.0, operands),
        inspect.Damage("up", "wgrad", CURRENT, 0.02, 0.0, 0.02, False, 0.05, {"dy": 0.04}),
        inspect.Damage("", "dgrad", CURRENT, 1e-7, 0.0, 1e-7, True),
    )
    found = inspect.Sensitivity(rows, ("", "up"), (), (CURRENT,), 2.5, 0.0, 4)
    assert_expected_inline(
        str(found),
        """\
loss 2.5 in high precision, noise 0 %; 4 forward and backward passes
FP8 by Float8CurrentScaling()

GEMMs, the worst first
  layer    GEMM    damage  loss  gradient  result       of operands  found by
  up       fprop     50 %  30 %      40 %   100 %  x 2.5 %, w 100 %       run
  up       wgrad      2 %   0 %       2 %     5 %            dy 4 %  estimate
  (model)  dgrad  1e-05 %   0 %   1e-05 %       -                 -       run""",
    )
    data = json.loads(found.to_json())
    assert [row["layer"] for row in data["rows"]] == ["up", "up", ""]
    assert data["rows"][0]["operands"] == operands
