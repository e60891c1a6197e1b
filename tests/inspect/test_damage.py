"""``sensitivity`` finds planted outliers, matches manual runs and leaves the model unchanged."""

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
from tests.inspect.models import StatefulModel, snapshot

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


def linear_stack(depth: int = 5, size: int = 64) -> nn.Sequential:
    layers = [module for _ in range(depth) for module in (nn.Linear(size, size), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def plant_outlier(model: nn.Sequential, layer: int, x: torch.Tensor, operand: str = "w") -> None:
    """Make a column of a weight huge and its input 0, or the input huge and the column 0."""
    huge, zero = 1e7, 0.0
    with torch.no_grad():
        if layer:
            model[layer - 2].weight[0] = 0
            model[layer - 2].bias[0] = huge if operand == "x" else zero
        else:
            x[:, 0] = huge if operand == "x" else zero
        model[layer].weight[:, 0] = huge if operand == "w" else zero


def gradients(model: nn.Module, x: torch.Tensor, loss_fn=mean_square) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss_fn(model, x), list(model.parameters())))


def gradient_error(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The error of the gradients as the documentation defines it."""
    total = sum(
        g.numel() * min(1.0, float((g - r).norm() / r.norm())) ** 2
        for g, r in zip(actual, expected, strict=True)
    )
    return math.sqrt(total / sum(g.numel() for g in expected))


def only_gemm(recipe: recipes.Recipe, gemm: str) -> recipes.Recipe:
    return replace(recipe, override_linear_precision=tuple(g != gemm for g in GEMMS))


@each_seed
@each_recipe
@pytest.mark.parametrize("runs", [0, 100])
@pytest.mark.parametrize("operand", ["x", "w"])
def test_the_layer_with_a_planted_outlier_ranks_first(operand, recipe, seed, runs):
    torch.manual_seed(seed)
    model, x = linear_stack(), torch.randn(64, 64)
    planted = (0, 4, 8)[seed]
    plant_outlier(model, planted, x, operand)
    report = inspect.sensitivity(model, x, mean_square, recipe, runs=runs)
    assert report.rows[0].layer == str(planted)
    assert next(iter(report.by_layer())) == str(planted)
    assert next(iter(report.by_operand())) == (str(planted), operand)
    assert str(planted) in report.overrides()


def test_an_outlier_in_a_bfloat16_model_ranks_first_on_any_device(device):
    model = linear_stack(3, 128).to(device, torch.bfloat16)
    x = torch.randn(128, 128, device=device, dtype=torch.bfloat16)
    plant_outlier(model, 2, x)
    report = inspect.sensitivity(model, x, lambda model, x: model(x).float().square().mean())
    assert report.rows[0].layer == "2"
    assert report.noise < report.rows[0].damage / 10


@each_seed
@pytest.mark.parametrize("recipe", [CURRENT, ROWWISE, BLOCK], ids=lambda r: type(r).__name__)
def test_damage_to_dgrad_alone_is_attributed_to_dgrad(recipe, seed):
    torch.manual_seed(seed)
    model, x = linear_stack(), torch.randn(64, 64)
    with torch.no_grad():
        model[4].weight[0] = 0  # one output is 0 for all tokens
        model[4].bias[0] = 0
    factors = torch.zeros(64)
    factors[0] = 1e14  # and its gradient is huge, which dx does not depend on
    outputs = []
    model[4].register_forward_hook(lambda layer, args, y: outputs.append(y))

    def loss_fn(model, x):
        outputs.clear()
        return model(x).square().mean() + (outputs[0] * factors).sum()

    report = inspect.sensitivity(model, x, loss_fn, recipe)
    assert (report.rows[0].layer, report.rows[0].gemm) == ("4", "dgrad")
    assert report.rows[0].damage > 4 * report.rows[1].damage
    expected = replace(recipe, override_linear_precision=(False, True, False))
    assert report.overrides() == {"4": expected}
    assert max(report.rows[0].operands, key=report.rows[0].operands.get) == "dy"


class ScaledToken(nn.Module):
    """A stack in which one token is huge in the input of one layer and scaled back after it."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.layers = linear_stack()
        self.register_buffer("tall", torch.ones(64, 1))
        self.tall[5] = 1e8

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x * self.tall) / self.tall if i == 4 else layer(x)
        return x


@each_seed
def test_damage_to_wgrad_alone_is_attributed_to_wgrad(seed):
    # Scales per token suit fprop. In wgrad each feature has one scale, and contains that token.
    torch.manual_seed(seed)
    model = ScaledToken()
    with torch.no_grad():
        model.layers[4].bias.zero_()
    report = inspect.sensitivity(model, torch.randn(64, 64), mean_square, ROWWISE)
    wgrad_damages = {row.layer: row.damage for row in report.rows if row.gemm == "wgrad"}
    assert max(wgrad_damages, key=wgrad_damages.get) == "layers.4"
    expected = replace(ROWWISE, override_linear_precision=(False, False, True))
    assert report.overrides() == {"layers.4": expected}


@each_recipe
def test_damages_match_runs_with_one_gemm_in_fp8(recipe):
    model, x = linear_stack(3), torch.randn(48, 64)
    reference, loss = gradients(model, x), mean_square(model, x).item()
    report = inspect.sensitivity(model, x, mean_square, recipe)
    assert len(report.rows) == 8  # the first layer computes no dx
    for row in report.rows:
        fp8_model = copy.deepcopy(model)
        float8lab.convert_to_float8(
            fp8_model,
            only_gemm(recipe, row.gemm),
            filter_fn=lambda _, name, row=row: name == row.layer,
        )
        assert row.gradient == pytest.approx(
            gradient_error(gradients(fp8_model, x), reference), rel=1e-4
        ), row
        change = abs(mean_square(fp8_model, x).item() - loss) / loss
        assert row.loss == pytest.approx(change, abs=1e-7), row
        assert row.damage == math.hypot(row.loss, row.gradient)
        assert row.measured == (row.gemm != "wgrad")  # the estimate of wgrad is exact


def test_fused_modules_are_measured():
    model = nn.Sequential(
        nn.Linear(32, 32), float8lab.LayerNormMLP(32, 64, device="cpu"), nn.Linear(32, 32)
    )
    x = torch.randn(16, 32)
    reference = gradients(model, x)
    report = inspect.sensitivity(model, x, mean_square)
    rows = {row.gemm: row for row in report.rows if row.layer == "1"}
    assert rows.keys() == set(GEMMS)
    for gemm, row in rows.items():
        fp8_model = copy.deepcopy(model)
        float8lab.convert_to_float8(fp8_model, only_gemm(CURRENT, gemm), exclude=["0", "2"])
        assert row.measured
        assert row.gradient == pytest.approx(
            gradient_error(gradients(fp8_model, x), reference), rel=1e-4
        )


@each_seed
def test_overrides_reduce_the_error(seed):
    torch.manual_seed(seed)
    model, x = linear_stack(), torch.randn(64, 64)
    plant_outlier(model, 4, x)
    reference = gradients(model, x)
    report = inspect.sensitivity(model, x, mean_square)
    errors = []
    for overrides in ({}, report.overrides(), report.overrides(0.0)):
        fp8_model = float8lab.convert_to_float8(copy.deepcopy(model), overrides=overrides)
        errors.append(gradient_error(gradients(fp8_model, x), reference))
    assert errors[0] > 2 * errors[1] > 0 == errors[2]


def test_a_finer_recipe_is_preferred_to_high_precision():
    model, x = linear_stack(), torch.randn(64, 64)
    with torch.no_grad():
        model[4].weight[0] = 1e7  # with a scale for each row the other rows keep their precision
        model[4].bias[0] = 0
        model[6].weight[:, 0] = 0
    report = inspect.sensitivity(model, x, mean_square, [CURRENT, ROWWISE])
    # The scales of dgrad run along the other dimension, where each row has an outlier.
    expected = replace(ROWWISE, override_linear_precision=(False, True, False))
    assert report.overrides()["4"] == expected
    precision = (
        inspect.sensitivity(model, x, mean_square).overrides()["4"].override_linear_precision
    )
    assert precision == (True, True, False)


def test_overrides_match_only_the_named_layer():
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    x = torch.randn(32, 16)
    plant_outlier(model, 0, x)
    overrides = inspect.sensitivity(model, x, mean_square).overrides()
    report = float8lab.conversion_report(float8lab.convert_to_float8(model, overrides=overrides))
    notes = {layer.name: layer.note for layer in report.layers}
    assert notes["0"] != repr(CURRENT)
    assert notes["1.0"] == notes["1.1"] == repr(CURRENT)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("converted", [False, True])
def test_the_model_is_left_unchanged(converted, training, fails, device):
    model = StatefulModel(fails=fails).to(device)
    x = torch.randn(16, 32, device=device)
    if converted:
        delayed = recipes.DelayedScaling(amax_history_len=4)
        float8lab.convert_to_float8(model, delayed, overrides={"second": CURRENT})
    if not fails:
        mean_square(model, x).backward()
    model.train(training)
    before = snapshot(model)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), float8lab.autocast(recipe=recipes.DelayedScaling()):
            if fails:
                with pytest.raises(RuntimeError, match="on purpose"):
                    inspect.sensitivity(model, x, mean_square, [CURRENT, recipes.DelayedScaling()])
            else:
                inspect.sensitivity(model, x, mean_square, [CURRENT, recipes.DelayedScaling()])
    assert snapshot(model) == before


def test_dropout_and_batch_norm_add_no_noise():
    assert inspect.sensitivity(StatefulModel(), torch.randn(16, 32), mean_square).noise == 0.0


def test_random_states_of_a_tracker_are_restored():
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
    assert inspect.sensitivity(Dropout(), torch.randn(16, 32), mean_square).noise == 0.0
    assert torch.equal(tracker.get_states()["model-parallel-rng"], before)


def test_no_gradient_is_accumulated():
    model, x = linear_stack(2), torch.randn(8, 64)
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: pytest.fail("accumulated"))
    inspect.sensitivity(model, x, mean_square)
    assert all(p.grad is None for p in model.parameters())


def test_a_forward_before_the_call_can_still_run_backward():
    model, x = linear_stack(2), torch.randn(8, 64)
    float8lab.convert_to_float8(model, recipes.DelayedScaling())
    reference_model = copy.deepcopy(model)
    loss = mean_square(model, x)
    inspect.sensitivity(model, x, mean_square)
    loss.backward()
    mean_square(reference_model, x).backward()
    for p, q in zip(model.parameters(), reference_model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_number_of_passes_is_as_documented():
    model, x = linear_stack(3), torch.randn(8, 64).requires_grad_()
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for runs, passes in ((0, 2), (4, 6), (100, 8)):
        calls.clear()
        report = inspect.sensitivity(model, x, mean_square, runs=runs)
        assert report.passes == len(calls) == passes


def test_checkpointed_frozen_tied_and_fp8_weights_have_the_expected_gemms():
    with float8lab.fp8_model_init():
        stored = float8lab.Linear(32, 32, device="cpu")
    model = nn.Sequential(nn.Linear(32, 32), stored, nn.Linear(32, 32), nn.Linear(32, 32))
    model[0].weight.requires_grad_(False)
    model[3].weight = model[2].weight
    x = torch.randn(16, 32)

    def loss_fn(model, x):
        return checkpoint(model, x, use_reentrant=False).square().mean()

    report = inspect.sensitivity(model, x, loss_fn)
    gemms = {(row.layer, row.gemm) for row in report.rows}
    assert gemms == {
        (str(layer), gemm)
        for layer, gemms_of_layer in enumerate([("fprop",), GEMMS, GEMMS, GEMMS])
        for gemm in gemms_of_layer
    }
    assert all(0 <= row.damage < 1 for row in report.rows)


def test_a_layer_without_features_does_no_damage():
    empty = float8lab.Linear(64, 0, device="cpu")
    report = inspect.sensitivity(
        nn.ModuleList([nn.Linear(64, 8), empty]), torch.randn(16, 64),
        lambda model, x: model[0](x).square().mean() + model[1](x).sum(),
    )  # fmt: skip
    assert {row.damage for row in report.rows if row.layer == "1"} == {0.0}


def test_invalid_arguments_raise():
    model, x = linear_stack(1), torch.randn(8, 64)
    with pytest.raises(ValueError, match="must return one number that requires a gradient"):
        inspect.sensitivity(model, x, lambda model, x: model(x))
    with pytest.raises(ValueError, match="must return a finite loss"):
        inspect.sensitivity(model, x * math.inf, mean_square)
    with pytest.raises(TypeError, match=r"recipes must be None or a recipe or a list of them; got"):
        inspect.sensitivity(model, x, mean_square, "auto")
    with pytest.raises(ValueError, match="recipe must be one that was tried"):
        inspect.sensitivity(model, x, mean_square).by_layer(BLOCK)


def test_report_as_text_and_json():
    operands = {"x": 0.025, "w": 1.0}
    rows = (
        inspect.Damage("up", "fprop", CURRENT, 0.5, 0.3, 0.4, True, 1.0, operands),
        inspect.Damage("up", "wgrad", CURRENT, 0.02, 0.0, 0.02, False, 0.05, {"dy": 0.04}),
        inspect.Damage("", "dgrad", CURRENT, 1e-7, 0.0, 1e-7, True),
    )
    report = inspect.Sensitivity(rows, ("", "up"), (), (CURRENT,), 2.5, 0.0, 4)
    assert_expected_inline(
        str(report),
        """\
loss 2.5 in high precision, noise 0 %; 4 forward and backward passes
FP8 by Float8CurrentScaling()

GEMMs, the worst first
  layer    GEMM    damage  loss  gradient  result       of operands  found by
  up       fprop     50 %  30 %      40 %   100 %  x 2.5 %, w 100 %       run
  up       wgrad      2 %   0 %       2 %     5 %            dy 4 %  estimate
  (model)  dgrad  1e-05 %   0 %   1e-05 %       -                 -       run""",
    )
    data = json.loads(report.to_json())
    assert [row["layer"] for row in data["rows"]] == ["up", "up", ""]
    assert data["rows"][0]["operands"] == operands
