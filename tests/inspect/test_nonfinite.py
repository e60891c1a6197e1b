"""find_nan: a planted NaN in each place is found, and nothing else is."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab import recipes
from float8lab.inspect import find_nan
from tests.inspect.models import snapshot
from tests.nn.models import Checkpointed


class Op(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


class OnlyBackward(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return torch.where(torch.arange(dy.shape[-1]) == 0, torch.nan, dy)


def make(middle=None, *, recipe=None):
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Sequential(nn.GELU(), Op(middle or (lambda x: x))), nn.Linear(32, 16)
    )
    if recipe is not None:
        float8lab.convert_to_float8(model, recipe)
    return model


def place(found):
    return found.module, found.tensor, found.phase, found.step


@pytest.fixture
def x():
    return torch.randn(8, 16)


each_precision = pytest.mark.parametrize(
    "recipe",
    [None, recipes.Float8CurrentScaling(), recipes.DelayedScaling(), recipes.Float8BlockScaling()],
    ids=["high", "current", "delayed", "block"],
)


@each_precision
def test_nothing_is_found_where_all_is_finite(recipe, x):
    found = find_nan(make(recipe=recipe), x, steps=2)
    assert not found
    assert (found.module, found.step, repr(found)) == (None, 2, "NonFinite(none in 2 steps)")


@each_precision
def test_in_a_weight(recipe, x):
    model = make(recipe=recipe)
    with torch.no_grad():
        model[2].weight[3, 4] = torch.nan
    found = find_nan(model, x)
    assert place(found) == ("2", "parameter weight", "before", 0)
    assert (found.nan, found.inf, found.shape) == (1, 0, (16, 32))
    assert repr(found) == (
        "NonFinite(1 NaN in parameter weight [16, 32] of 2 (Linear), before, step 0)"
    )


@each_precision
def test_in_the_input(recipe, x):
    x[2, 3] = torch.inf
    found = find_nan(make(recipe=recipe), x)
    assert place(found) == ("", "input 0", "forward", 0)
    assert (found.nan, found.inf) == (0, 1)


def test_in_a_buffer(x):
    model = nn.Sequential(nn.BatchNorm1d(16))
    model[0].running_mean[1] = torch.nan
    assert place(find_nan(model, x))[:2] == ("0", "buffer running_mean")


@each_precision
@pytest.mark.parametrize(
    ("function", "tensor", "phase", "nan"),
    [
        (lambda x: torch.exp(1000 * x), "output 0", "forward", 0),
        # As masks are; but here a NaN follows, and so it is what to name.
        (lambda x: torch.log(x.clamp(min=0)), "output 0", "forward", 0),
        (OnlyBackward.apply, "gradient of input 0", "backward", 8),
    ],
    ids=["overflow", "minus-infinity", "backward"],
)
def test_in_an_op(recipe, function, tensor, phase, nan, x):
    found = find_nan(make(function, recipe=recipe), x)
    assert place(found) == ("1.1", tensor, phase, 0)
    assert (found.nan, found.inf > 0) == (nan, phase == "forward")


def test_in_the_gradient_of_a_parameter(x):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(16))

        def forward(self, x):
            return x + (self.scale**2).sqrt()  # 0 * inf in backward

    model = nn.Sequential(nn.Linear(16, 16), Scaled())
    assert place(find_nan(model, x)) == ("1", "gradient of scale", "backward", 0)


def test_in_the_code_between_children(x):
    class Between(nn.Module):
        def __init__(self, forward):
            super().__init__()
            self.first, self.second, self.between = nn.Linear(16, 16), nn.Linear(16, 16), forward

        def forward(self, x):
            return self.second(self.between(self.first(x)))

    model = nn.Sequential(Between(lambda x: x / torch.zeros(16)))
    expected = ("0", "what it gives 0.second as input 0", "forward", 0)
    assert place(find_nan(model, x)) == expected
    model = nn.Sequential(Between(OnlyBackward.apply))
    assert place(find_nan(model, x)) == ("0", "gradient of output 0 of 0.first", "backward", 0)


def test_in_the_loss(x):
    model = make()
    assert place(find_nan(model, x, loss_fn=lambda y: (y * 0).log().sum())) == (
        "(loss)", "loss", "forward", 0,
    )  # fmt: skip
    found = find_nan(model, x, loss_fn=lambda y: OnlyBackward.apply(y).sum())
    assert place(found) == ("(loss)", "gradient of the model's output 0", "backward", 0)


def test_which_output_and_which_input(x):
    def two(x):
        return x, {"a": x + 1, "b": torch.sqrt(-x.abs() - 1)}

    assert place(find_nan(nn.Sequential(Op(two)), x))[:2] == ("0", "output [1]['b']")
    bad = torch.full((8, 16), torch.nan)
    found = find_nan(Op(lambda a, b: a + b), {"a": x, "b": bad})
    assert place(found)[:2] == ("", "input ['b']")
    assert place(find_nan(Op(lambda a, b: a + b), (x, bad)))[:2] == ("", "input 1")


def test_in_which_step(x):
    # The weight grows until the output overflows in the third step.
    model = nn.Linear(16, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e20)
    x = x.abs()
    found = find_nan(model, x, steps=5, optimizer=optimizer, loss_fn=lambda y: y.square().sum())
    assert (found.step, found.phase) == (1, "forward")
    assert found.module == "(loss)"
    # Another that the optimizer itself ruins.
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.inf)
    found = find_nan(model, x, steps=1, optimizer=optimizer)
    assert place(found)[1:] == ("parameter weight", "optimizer", 0)
    assert torch.equal(model.weight, torch.ones(1, 16))


def test_masks_are_no_find(x):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.softmax = nn.Linear(16, 48), nn.Softmax(-1)
            self.mask = Op(lambda scores, mask: scores + mask)
            self.register_buffer("causal", torch.full((8, 8), -torch.inf).triu(1))
            self.bad = False

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            y = self.softmax(self.mask(q @ k.t(), self.causal)) @ v
            return torch.log(-y.abs()) if self.bad else y

    model = nn.Sequential(Attention(), nn.Linear(16, 16))
    assert not find_nan(model, x)
    model[0].bad = True
    assert place(find_nan(model, x)) == ("0", "output 0", "forward", 0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0)
    mask = torch.full((8, 8), -torch.inf).triu(1)
    assert not find_nan(encoder, {"src": x[:, None], "src_mask": mask})
    mask[0] = -torch.inf  # a row that sees nothing
    attention = nn.MultiheadAttention(16, 2)
    found = find_nan(attention, (x[:, None], x[:, None], x[:, None], None, True, mask))
    assert place(found)[:2] == ("", "output 0")


def test_a_residual_stream(x):
    # The gradient of x comes from two users; only one of them is to blame.
    class Block(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.fc, self.op = nn.Linear(16, 16), Op(function)

        def forward(self, x):
            return x + self.op(self.fc(x))

    model = nn.Sequential(Block(torch.tanh), Block(OnlyBackward.apply), Block(torch.tanh))
    assert place(find_nan(model, x)) == ("1.op", "gradient of input 0", "backward", 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_activation_checkpointing(x, reentrant):
    def run(function):
        again = Checkpointed(make(function), reentrant)
        model = nn.Sequential(nn.Linear(16, 16), again, nn.Linear(16, 16))
        return place(find_nan(model, x))

    assert run(OnlyBackward.apply) == ("1.inner.1.1", "gradient of input 0", "backward", 0)
    assert run(lambda x: 1 / (x - x)) == ("1.inner.1.1", "output 0", "forward", 0)
    assert run(torch.tanh)[0] is None


def test_activations_in_place(x):
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
def test_fused_modules(build, recipe):
    x = torch.randn(4, 2, 16)
    model = nn.Sequential(build(), Op(OnlyBackward.apply))
    with float8lab.autocast(recipe=recipe):
        assert not find_nan(model[0], x)
        found = find_nan(model, x)
    assert place(found) == ("1", "gradient of input 0", "backward", 0)
    name, parameter = next((n, p) for n, p in model.named_parameters() if n.endswith("weight"))
    with torch.no_grad():
        parameter.view(-1)[0] = torch.inf
    owner, _, own = name.rpartition(".")
    with float8lab.autocast(recipe=recipe):
        assert place(find_nan(model, x)) == (owner, f"parameter {own}", "before", 0)


def test_compiled_models(x):
    model = torch.compile(make(OnlyBackward.apply), backend="aot_eager")
    assert place(find_nan(model, x)) == ("1.1", "gradient of input 0", "backward", 0)


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_everything_is_as_before(x, bad, stored, warm):
    recipe = recipes.DelayedScaling()
    with float8lab.fp8_model_init(enabled=stored):
        layers = [float8lab.Linear(16, 16, device="cpu") for _ in range(2)]
    middle = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout(0.1))
    model = nn.Sequential(layers[0], middle, layers[1])
    if bad:
        model.append(Op(OnlyBackward.apply))
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


def test_what_it_refuses(x):
    with pytest.raises(ValueError, match="steps must be an integer of at least 1; got 0"):
        find_nan(make(), x, steps=0)
    with pytest.raises(TypeError, match="loss_fn must be given"):
        find_nan(Op(lambda x: None), x)


def test_the_loss_of_an_output_that_has_one(x):
    seen = []
    model = Op(lambda x: {"loss": F.mse_loss(x, x + 1), "logits": seen.append(1) or x / 0})
    assert place(find_nan(model, x))[:2] == ("", "output ['logits']")
    assert seen == [1]
