"""``find_nan`` locates a NaN planted in any place and reports nothing else."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab import recipes
from float8lab.inspect import find_nan
from tests.inspect.models import snapshot
from tests.nn.models import Checkpointed


class FunctionModule(nn.Module):
    """A module that calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class NonfiniteBackward(torch.autograd.Function):
    """The identity, whose gradient is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return torch.where(torch.arange(dy.shape[-1]) == 0, torch.nan, dy)


def model_around(function=None, *, recipe=None):
    model = nn.Sequential(
        nn.Linear(16, 32),
        nn.Sequential(nn.GELU(), FunctionModule(function or (lambda x: x))),
        nn.Linear(32, 16),
    )
    if recipe is not None:
        float8lab.convert_to_float8(model, recipe)
    return model


def location(report):
    return report.module, report.tensor, report.phase, report.step


@pytest.fixture
def x():
    return torch.randn(8, 16)


each_precision = pytest.mark.parametrize(
    "recipe",
    [None, recipes.Float8CurrentScaling(), recipes.DelayedScaling(), recipes.Float8BlockScaling()],
    ids=["high precision", "current", "delayed", "block"],
)


@each_precision
def test_a_finite_model_has_no_report(recipe, x):
    report = find_nan(model_around(recipe=recipe), x, steps=2)
    assert not report
    assert (report.module, report.step, repr(report)) == (None, 2, "NonFinite(none in 2 steps)")


@each_precision
def test_nan_in_a_weight_is_located(recipe, x):
    model = model_around(recipe=recipe)
    with torch.no_grad():
        model[2].weight[3, 4] = torch.nan
    report = find_nan(model, x)
    assert location(report) == ("2", "parameter weight", "before", 0)
    assert (report.nan, report.inf, report.shape) == (1, 0, (16, 32))
    assert repr(report) == (
        "NonFinite(1 NaN in parameter weight [16, 32] of 2 (Linear), before, step 0)"
    )


@each_precision
def test_inf_in_the_input_is_located(recipe, x):
    x[2, 3] = torch.inf
    report = find_nan(model_around(recipe=recipe), x)
    assert location(report) == ("", "input 0", "forward", 0)
    assert (report.nan, report.inf) == (0, 1)


def test_nan_in_a_buffer_is_located(x):
    model = nn.Sequential(nn.BatchNorm1d(16))
    model[0].running_mean[1] = torch.nan
    assert location(find_nan(model, x))[:2] == ("0", "buffer running_mean")


@each_precision
@pytest.mark.parametrize(
    ("function", "tensor", "phase", "nan"),
    [
        (lambda x: torch.exp(1000 * x), "output 0", "forward", 0),
        # Minus infinity is allowed, as in masks. Here a NaN follows, so its origin is reported.
        (lambda x: torch.log(x.clamp(min=0)), "output 0", "forward", 0),
        (NonfiniteBackward.apply, "gradient of input 0", "backward", 8),
    ],
    ids=["overflow", "minus-infinity", "backward"],
)
def test_nonfinite_result_or_gradient_of_an_op_is_located(recipe, function, tensor, phase, nan, x):
    report = find_nan(model_around(function, recipe=recipe), x)
    assert location(report) == ("1.1", tensor, phase, 0)
    assert (report.nan, report.inf > 0) == (nan, phase == "forward")


def test_nan_in_the_gradient_of_a_parameter_is_located(x):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(16))

        def forward(self, x):
            return x + (self.scale**2).sqrt()  # 0 * inf in backward

    model = nn.Sequential(nn.Linear(16, 16), Scaled())
    assert location(find_nan(model, x)) == ("1", "gradient of scale", "backward", 0)


def test_nonfinite_values_between_submodules_are_located(x):
    class Between(nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.first, self.second, self.between = nn.Linear(16, 16), nn.Linear(16, 16), forward

        def forward(self, x):
            return self.second(self.between(self.first(x)))

    model = nn.Sequential(Between(lambda x: x / torch.zeros(16)))
    expected = ("0", "what it gives 0.second as input 0", "forward", 0)
    assert location(find_nan(model, x)) == expected
    model = nn.Sequential(Between(NonfiniteBackward.apply))
    assert location(find_nan(model, x)) == ("0", "gradient of output 0 of 0.first", "backward", 0)


def test_nonfinite_loss_and_its_gradient_are_located(x):
    model = model_around()
    assert location(find_nan(model, x, loss_fn=lambda y: (y * 0).log().sum())) == (
        "(loss)", "loss", "forward", 0,
    )  # fmt: skip
    report = find_nan(model, x, loss_fn=lambda y: NonfiniteBackward.apply(y).sum())
    assert location(report) == ("(loss)", "gradient of the model's output 0", "backward", 0)


def test_the_location_names_the_output_or_input(x):
    def two_outputs(x):
        return x, {"a": x + 1, "b": torch.sqrt(-x.abs() - 1)}

    assert location(find_nan(nn.Sequential(FunctionModule(two_outputs)), x))[:2] == (
        "0",
        "output [1]['b']",
    )
    bad = torch.full((8, 16), torch.nan)
    report = find_nan(FunctionModule(lambda a, b: a + b), {"a": x, "b": bad})
    assert location(report)[:2] == ("", "input ['b']")
    assert location(find_nan(FunctionModule(lambda a, b: a + b), (x, bad)))[:2] == ("", "input 1")


def test_the_location_names_the_step(x):
    # The weight grows until the loss overflows in the second step.
    model = nn.Linear(16, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e20)
    x = x.abs()
    report = find_nan(model, x, steps=5, optimizer=optimizer, loss_fn=lambda y: y.square().sum())
    assert (report.step, report.phase) == (1, "forward")
    assert report.module == "(loss)"
    # This optimizer itself ruins the weight.
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.inf)
    report = find_nan(model, x, steps=1, optimizer=optimizer)
    assert location(report)[1:] == ("parameter weight", "optimizer", 0)
    assert torch.equal(model.weight, torch.ones(1, 16))


def test_minus_infinity_in_masks_is_not_reported(x):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.softmax = nn.Linear(16, 48), nn.Softmax(-1)
            self.mask = FunctionModule(lambda scores, mask: scores + mask)
            self.register_buffer("causal", torch.full((8, 8), -torch.inf).triu(1))
            self.bad = False

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            y = self.softmax(self.mask(q @ k.t(), self.causal)) @ v
            return torch.log(-y.abs()) if self.bad else y

    model = nn.Sequential(Attention(), nn.Linear(16, 16))
    assert not find_nan(model, x)
    model[0].bad = True
    assert location(find_nan(model, x)) == ("0", "output 0", "forward", 0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    mask = torch.full((8, 8), -torch.inf).triu(1)
    assert not find_nan(encoder, {"src": x[:, None], "src_mask": mask})
    mask[0] = -torch.inf  # a row without a visible key
    attention = nn.MultiheadAttention(16, 2)
    report = find_nan(attention, (x[:, None], x[:, None], x[:, None], None, True, mask))
    assert location(report)[:2] == ("", "output 0")


def test_the_branch_of_a_residual_stream_is_located(x):
    # The gradient of x comes from two branches, of which only one is not finite.
    class Block(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.fc, self.op = nn.Linear(16, 16), FunctionModule(function)

        def forward(self, x):
            return x + self.op(self.fc(x))

    model = nn.Sequential(Block(torch.tanh), Block(NonfiniteBackward.apply), Block(torch.tanh))
    assert location(find_nan(model, x)) == ("1.op", "gradient of input 0", "backward", 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_nonfinite_values_in_checkpointed_modules_are_located(x, reentrant):
    def run(function):
        checkpointed = Checkpointed(model_around(function), reentrant)
        model = nn.Sequential(nn.Linear(16, 16), checkpointed, nn.Linear(16, 16))
        return location(find_nan(model, x))

    assert run(NonfiniteBackward.apply) == ("1.inner.1.1", "gradient of input 0", "backward", 0)
    assert run(lambda x: 1 / (x - x)) == ("1.inner.1.1", "output 0", "forward", 0)
    assert run(torch.tanh)[0] is None


def test_in_place_activations_are_supported(x):
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
    assert not find_nan(model, x.requires_grad_())


@pytest.mark.parametrize(
    ("build", "recipe"),
    [
        (lambda: float8lab.LayerNormLinear(16, 16, device="cpu"), recipes.Float8CurrentScaling()),
        (lambda: float8lab.LayerNormMLP(16, 32, device="cpu"), recipes.DelayedScaling()),
        (lambda: float8lab.TransformerLayer(16, 32, 2, device="cpu"), recipes.DelayedScaling()),
    ],
    ids=["LayerNormLinear", "LayerNormMLP", "TransformerLayer"],
)
def test_nonfinite_values_around_and_in_fused_modules_are_located(build, recipe):
    x = torch.randn(4, 2, 16)
    model = nn.Sequential(build(), FunctionModule(NonfiniteBackward.apply))
    with float8lab.autocast(recipe=recipe):
        assert not find_nan(model[0], x)
        report = find_nan(model, x)
    assert location(report) == ("1", "gradient of input 0", "backward", 0)
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("weight"))
    with torch.no_grad():
        parameter.view(-1)[0] = torch.inf
    owner, _, parameter_name = name.rpartition(".")
    with float8lab.autocast(recipe=recipe):
        assert location(find_nan(model, x)) == (owner, f"parameter {parameter_name}", "before", 0)


def test_nonfinite_gradients_in_a_compiled_model_are_located(x):
    model = torch.compile(model_around(NonfiniteBackward.apply), backend="aot_eager")
    assert location(find_nan(model, x)) == ("1.1", "gradient of input 0", "backward", 0)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_model_and_optimizer_are_left_unchanged(x, bad, stored, warm):
    recipe = recipes.DelayedScaling()
    with float8lab.fp8_model_init(enabled=stored):
        layers = [float8lab.Linear(16, 16, device="cpu") for _ in range(2)]
    function = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.1))
    model = nn.Sequential(layers[0], function, layers[1])
    if bad:
        model.append(FunctionModule(NonfiniteBackward.apply))
    model[1][0].eval()
    if stored:
        optimizer = float8lab.optim.MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if warm:
        with float8lab.autocast(recipe=recipe):
            y = model[:3](x).sum()
        y.backward()
        optimizer.step()
    before = snapshot(model, optimizer)
    with float8lab.autocast(recipe=recipe):
        assert bool(find_nan(model, x, steps=2, optimizer=optimizer)) is bad
    assert snapshot(model, optimizer) == before


def test_invalid_arguments_raise(x):
    with pytest.raises(ValueError, match="steps must be an integer of at least 1; got 0"):
        find_nan(model_around(), x, steps=0)
    with pytest.raises(TypeError, match="loss_fn must be given"):
        find_nan(FunctionModule(lambda x: None), x)


def test_a_loss_in_the_output_is_used(x):
    calls = []
    model = FunctionModule(
        lambda x: {"loss": F.mse_loss(x, x + 1), "logits": calls.append(1) or x / 0}
    )
    assert location(find_nan(model, x))[:2] == ("", "output ['logits']")
    assert calls == [1]
