"""``graphed`` without a GPU: what is recorded, what replays, and that results are eager mode's.

In place of a CUDA graph stands a function that runs again and writes where it wrote first.
"""

import contextlib
import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import float8lab
from float8lab import recipes
from float8lab.nn import graphs, recorded
from float8lab.recipes.region import STATE
from tests.nn.models import Checkpointed

RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
}


class Again:
    """Runs a function again, and has its first results hold the new ones."""

    replays = 0

    def __init__(self, run):
        self.run = run
        self.gradients = torch.is_grad_enabled()
        self.results = run()

    def replay(self):
        Again.replays += 1
        with torch.set_grad_enabled(self.gradients):
            new = self.run()
        for old, value in zip(tree_leaves(self.results), tree_leaves(new), strict=True):
            if old is not None:
                old.copy_(value)


@pytest.fixture
def recorder(monkeypatch):
    """Has tensors on the CPU recorded; counts recordings and replays."""

    def capture(run, pool, stream):
        assert isinstance(STATE.region, recorded.Trial)
        graph = Again(run)
        return graph.replay, graph.results

    def warm_up(units, count, allow_unused, exact, *, waits=True):
        with recorded.inside(recorded.Trial()):
            recorded._run(units, allow_unused, exact, lambda run: (None, run()))
            return STATE.region.packs

    monkeypatch.setattr(recorded, "_capture", capture)
    monkeypatch.setattr(recorded, "_warm_up", warm_up)
    monkeypatch.setattr(graphs, "_stream", lambda x: 0)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    Again.replays = 0
    return Again


def make(recipe=None):
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    if recipe is not None:
        float8lab.convert_to_float8(model, recipe)
    return model


def train(model, x, **kwargs):
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = model(x, **kwargs)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters() if p.grad is not None]]


def equal(got, wanted):
    return len(got) == len(wanted) and all(map(torch.equal, got, wanted))


def state(model):
    return [
        tensor.clone()
        for precision in graphs.precisions_below(model)
        for slots in precision.slots.values()
        for tensor in slots.tensors().values()
    ]


def pair(recipe=None):
    eager = make(recipe)
    model = copy.deepcopy(eager)
    assert float8lab.graphed(model) is model
    return model, eager


def test_without_a_gpu_everything_is_eager():
    model, eager = pair(RECIPES["current"])
    for step in range(4):
        x = torch.randn(8, 32) * (1 + step)
        assert equal(train(model, x), train(eager, x))
    call = vars(model)["forward"]
    assert not call.recorded
    assert not call.seen


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_training_is_that_of_eager_mode(recorder, recipe):
    model, eager = pair(recipe)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]
    for step in range(6):
        x = torch.randn(8, 32) * (1 + step)
        assert equal(train(model, x), train(eager, x))
        for optimizer in optimizers:
            optimizer.step()
        assert equal(list(model.parameters()), list(eager.parameters()))
        assert equal(state(model), state(eager))
    # All steps but the first, and the one in which a converted model is looked at.
    assert recorder.replays == 2 * (5 if recipe is None else 4)


def test_what_a_call_gave_is_not_overwritten(recorder):
    model, eager = pair()
    xs = [torch.randn(8, 32, requires_grad=True) for _ in range(5)]
    assert all(map(equal, [train(model, x) for x in xs], [train(eager, x) for x in xs]))
    for m in (model, eager):
        m.zero_grad()
        for x in xs:  # gradients accumulate
            m(x).square().sum().backward()
    assert recorder.replays > 8
    assert equal([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    given = [torch.autograd.grad(m(x).sum(), m.parameters()) for m in (model, eager) for x in xs]
    assert all(map(equal, given[:5], given[5:]))


def test_two_calls_before_their_backwards(recorder):
    model, eager = pair(RECIPES["current"])
    for m in (model, eager):
        train(m, torch.ones(8, 32)), train(m, torch.ones(8, 32))
        m.zero_grad()
    xs = [torch.randn(8, 32, requires_grad=True) for _ in range(3)]
    for m in (model, eager):
        before = recorder.replays
        losses = [m(x).square().sum() for x in xs]
        for loss in losses:
            loss.backward()
        if m is model:
            assert recorder.replays - before == 2  # the first call's alone
    assert equal([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    # A forward whose result is dropped has no backward to wait for.
    model(xs[0])
    before = recorder.replays
    model(xs[0])
    assert recorder.replays == before + 1


def test_a_retained_graph(recorder):
    model, eager = pair()
    x = torch.randn(8, 32, requires_grad=True)
    for m in (model, eager):
        train(m, x), train(m, x)
        m.zero_grad()
        loss = m(x).square().sum()
        loss.backward(retain_graph=True)
        m(2 * x).square().sum().backward()  # eager, for the first may be asked again
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    assert equal([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_a_parameter_changed_between_forward_and_backward(recorder):
    model, _ = pair()
    x = torch.randn(8, 32, requires_grad=True)
    train(model, x), train(model, x)
    loss = model(x).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss  # or the next call would run eagerly, not to overwrite what it needs
    loss = model(x).sum()
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="parameters of a module with CUDA graphs must stay"):
        loss.backward()


def halved(model):
    model[2] = nn.Linear(48, 32)
    torch.nn.init.constant_(model[2].weight, 0.5)


CHANGES = {
    "weight": lambda model: setattr(model[0], "weight", nn.Parameter(torch.full((48, 32), 0.1))),
    "data": lambda model: setattr(model[0].weight, "data", torch.full((48, 32), 0.1)),
    "assigned": lambda model: model.load_state_dict(
        {name: 2 * t for name, t in model.state_dict().items()}, assign=True
    ),
    "loaded": lambda model: model.load_state_dict(
        {name: 2 * t for name, t in model.state_dict().items()}
    ),
    "dtype": lambda model: model.double().float(),
    "frozen": lambda model: model[0].weight.requires_grad_(False),
    "submodule": lambda model: halved(model),
    "added": lambda model: model.append(nn.Tanh()),
    "converted": lambda model: float8lab.convert_to_float8(model, RECIPES["current"]),
    "hook": lambda model: model[0].register_forward_hook(lambda *given: given[2] + 1),
    "backward-hook": lambda model: model[1].register_full_backward_hook(
        lambda *given: (given[1][0] * 2,)
    ),
    "forward": lambda model: setattr(model[1], "forward", torch.sin),
    "eval": lambda model: model.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_that_changes(recorder, change):
    model, eager = pair()
    x = torch.randn(8, 32)
    for _ in range(3):
        assert equal(train(model, x), train(eager, x))
    for m in (model, eager):
        torch.manual_seed(1)
        change(m)
    for _ in range(4):
        assert equal(train(model, x), train(eager, x))


def test_parts_that_always_change_are_given_up(recorder):
    model, eager = pair()
    x = torch.randn(8, 32)
    for step in range(30):
        for m in (model, eager):
            m[1].approximate_by = torch.tensor(step)
        assert equal(train(model, x), train(eager, x))
    assert vars(model)["forward"].limit == 0


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, factor=1, *, others=(), flag=None, name="a"):
        y = self.inner(x) * factor
        for other in others:
            y = y + other
        return {"y": y, "count": len(others), "name": name, "flag": flag}


def test_arguments_and_outputs(recorder):
    eager = Mixed()
    model = float8lab.graphed(copy.deepcopy(eager), max_graphs=8)
    a, b = torch.randn(4, 8), torch.randn(4, 8)
    calls = [
        lambda m: m(a), lambda m: m(b), lambda m: m(a, 2), lambda m: m(a, 2.0),
        lambda m: m(a, factor=2), lambda m: m(a, others=(b,)),
        lambda m: m(a, others=(a,), name="b"), lambda m: m(a, others=[b, a], flag=True),
        lambda m: m(a.t().contiguous().t()), lambda m: m(a[:2]),
        lambda m: m(a, object.__new__(Factor)),
    ]  # fmt: skip
    for call in calls * 4:
        got, wanted = call(model), call(eager)
        assert torch.equal(got.pop("y"), wanted.pop("y"))
        assert got == wanted
    assert len(vars(model)["forward"].recorded) == 8
    assert recorder.replays


class Factor:
    """No number, and not to be recorded."""

    def __rmul__(self, x):
        return x * 3

    __array_priority__ = 1


def test_the_number_of_graphs_is_limited(recorder):
    model = float8lab.graphed(make(), max_graphs=2)
    for size in (2, 3, 4, 5) * 3:
        model(torch.ones(size, 32))
    assert len(vars(model)["forward"].recorded) == 2


def test_evaluation(recorder):
    model, eager = pair(RECIPES["delayed"])
    xs = [torch.randn(8, 32) for _ in range(4)]
    for m in (model, eager):
        train(m, xs[0])
        m.eval()
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        before = recorder.replays
        with context():
            got = [[model(x) for x in xs], [eager(x) for x in xs]]
        assert recorder.replays > before
        assert equal(*got)
    assert equal(train(model, xs[1]), train(eager, xs[1]))
    model.train(), eager.train()
    before = recorder.replays
    with torch.no_grad():  # as a reentrant checkpoint runs its forward
        for x in xs:
            assert torch.equal(model(x), eager(x))
    assert recorder.replays == before


OBSERVERS = {
    "counted": lambda model: float8lab.count_gemms(),
    "saved": lambda model: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    "anomaly": lambda model: torch.autograd.detect_anomaly(check_nan=False),
    "calibrating": lambda model: float8lab.autocast(False, True, RECIPES["delayed"]),
    "offload": lambda model: float8lab.get_cpu_offload_context(True, 1, model_layers=2)[0],
    "watched": float8lab.inspect.watch,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
def test_whoever_looks_sees_an_eager_call(recorder, observer):
    model, eager = pair(RECIPES["current"])
    x = torch.randn(8, 32, requires_grad=True)
    for m in (model, eager):
        train(m, x), train(m, x)
    before = recorder.replays
    results = []
    for m in (model, eager):
        with observer(m):
            results.append(train(m, x))
    assert recorder.replays == before
    assert equal(*results)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_checkpoints(recorder, reentrant, recipe):
    model, eager = pair(recipe)
    x = torch.randn(8, 32)
    for m in (model, eager):
        train(m, x), train(m, x), train(m, x)
    for step in range(3):
        x = torch.randn(8, 32) * (1 + step)
        got = [train(Checkpointed(m, reentrant), x) for m in (model, eager)]
        assert equal(*got)
        assert equal(state(model), state(eager))


def test_parameters_with_hooks_frozen_and_unused_ones(recorder):
    model, eager = pair()
    seen = ([], [])
    for m, grads in zip((model, eager), seen, strict=True):
        m[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
        m[0].weight.register_hook(lambda g: 2 * g)
        m[0].bias.register_post_accumulate_grad_hook(lambda p, to=grads: to.append(p.grad))
        m[2].requires_grad_(False)
    x = torch.randn(8, 32)
    for _ in range(3):
        assert equal(train(model, x), train(eager, x))
    assert recorder.replays
    assert model[0].unused.grad is None
    assert equal(*seen)
    assert len(seen[0]) == 3


def test_torch_func(recorder):
    model, eager = pair()
    x = torch.randn(8, 32, requires_grad=True)
    train(model, x), train(model, x)
    for transform, given in ((torch.func.vmap, x), (torch.func.jacrev, x[0])):
        assert torch.equal(transform(model)(given), transform(eager)(given))
    other = {name: 2 * p.detach() for name, p in model.named_parameters()}
    got, wanted = (torch.func.functional_call(m, other, (x,)) for m in (model, eager))
    assert torch.equal(got, wanted)


def test_torch_compile(recorder):
    model, eager = pair(RECIPES["current"])
    x = torch.randn(8, 32, requires_grad=True)
    train(model, x), train(model, x)
    before = recorder.replays
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), eager(x))
    assert recorder.replays == before
    torch._dynamo.reset()


class Bad(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how
        self.elsewhere = [self.layer.weight]

    def forward(self, x):
        if self.how == "writes":
            x.add_(1)
        if self.how == "elsewhere":
            return F.linear(x, self.elsewhere[0])
        y = self.layer(x)
        if self.how == "two":
            return y + y.detach() * 2, y * 2
        return (y, object()) if self.how == "object" else y


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("writes", "it writes into its arguments"),
        ("two", "several of its outputs have a gradient"),
        ("object", "it returns something besides tensors"),
        ("elsewhere", "it has parameters elsewhere than under their names"),
    ],
)
def test_what_cannot_be_recorded_says_why_and_runs_eagerly(recorder, how, reason):
    eager = Bad(how)
    model = float8lab.graphed(copy.deepcopy(eager))
    x = torch.randn(4, 8)
    model(x.clone())
    with pytest.warns(
        UserWarning, match=f"Bad could not be recorded by float8lab.graphed.*{reason}"
    ):
        model(x.clone())
    xs = x.clone(), x.clone()
    got, wanted = model(xs[0]), eager(xs[1])
    assert equal(tree_leaves(got)[:1], tree_leaves(wanted)[:1])
    assert torch.equal(*xs)
    assert not recorder.replays


@pytest.mark.filterwarnings("ignore:Linear could not be.*casts of weights over microbatches")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_weights_that_are_cast_once_for_several_calls(recorder, recipe):
    eager = float8lab.Linear(32, 32, device="cpu")
    model = float8lab.graphed(copy.deepcopy(eager))
    for step in range(4):
        x = torch.randn(8, 32) * (1 + step)
        results = []
        for layer in (model, eager):
            with torch.no_grad():
                layer.weight.mul_(1.3)
            for first in (True, False, False):
                with float8lab.autocast(recipe=recipe):
                    results.append(train(layer, x, is_first_microbatch=first))
        assert all(map(equal, results[:3], results[3:]))
    assert not recorder.replays


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8)  # which also has its parameters in a list

    def forward(self, x):
        return self.inner(x)[0]


def test_parameters_are_put_back(recorder):
    eager = First()
    model = float8lab.graphed(copy.deepcopy(eager))
    parameters = [*model.parameters()]
    for p in parameters:
        p.note = "kept"
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        assert equal(train(model, x.clone()), train(eager, x.clone()))
    assert recorder.replays
    for p, other, listed in zip(
        parameters, model.parameters(), model.inner._flat_weights, strict=True
    ):
        assert p is other is listed
        assert p.note == "kept"


def test_recording_leaves_no_trace(recorder):
    eager = nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 32))
    model = float8lab.graphed(copy.deepcopy(eager))
    for step in range(4):
        x = torch.randn(8, 32)
        results = []
        for m in (model, eager):
            torch.manual_seed(step)
            results.append([*train(m, x), torch.rand(3)])
        assert equal(*results)
        assert equal(list(model.buffers()), list(eager.buffers()))
    assert recorder.replays


def test_autocast_regions(recorder):
    recipe = RECIPES["delayed"]
    eager = nn.ModuleList(float8lab.Linear(32, 32, device="cpu") for _ in range(2))
    model = copy.deepcopy(eager)
    for layer in model:
        float8lab.graphed(layer)
    for step in range(6):
        x = torch.randn(8, 32)
        results = []
        for layers in (model, eager):
            layers.zero_grad()
            with float8lab.autocast(enabled=step != 4, recipe=recipe):
                y = x
                for layer in layers:
                    y = layer(y)
            y.square().sum().backward()
            results.append([y, *[p.grad for p in layers.parameters()], *state(layers)])
        assert equal(*results)
    assert recorder.replays == 4 * 4


def test_copies_pickles_and_signatures(recorder):
    model, eager = pair(RECIPES["current"])
    x = torch.randn(8, 32)
    train(model, x), train(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        call = vars(twin)["forward"]
        assert call.function is twin
        assert not call.recorded
        with torch.no_grad():
            twin[0].weight.mul_(2)
        other = copy.deepcopy(eager)
        with torch.no_grad():
            other[0].weight.mul_(2)
        for _ in range(3):
            assert equal(train(twin, x), train(other, x))
        assert call.recorded
    assert inspect.signature(model.forward) == inspect.signature(eager.forward)
    assert model.state_dict().keys() == eager.state_dict().keys()


def test_enabled_false_gives_the_forward_back(recorder):
    layer = nn.Linear(8, 8)
    before = dict(vars(layer))
    for _ in range(2):
        float8lab.graphed(layer)
    x = torch.ones(2, 8)
    for _ in range(3):
        layer(x)
    assert recorder.replays
    before_replays = recorder.replays
    assert float8lab.graphed(layer, enabled=False) is layer
    assert vars(layer) == before
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    float8lab.graphed(layer, enabled=False)
    layer.forward = lambda x: -x
    float8lab.graphed(layer)
    assert torch.equal(layer(x), -x)
    float8lab.graphed(layer, enabled=False)
    assert torch.equal(layer(x), -x)
    assert recorder.replays == before_replays


def test_a_graphed_module_in_a_graphed_module(recorder):
    model, eager = pair()
    float8lab.graphed(model[0])
    x = torch.randn(8, 32)
    for _ in range(4):
        assert equal(train(model, x), train(eager, x))
    assert len(vars(model)["forward"].recorded) == 1


MODULES = {
    "norm-linear": lambda: float8lab.LayerNormLinear(32, 48, device="cpu"),
    "mlp": lambda: float8lab.LayerNormMLP(32, 48, device="cpu"),
    "mlp-checkpoint": lambda: float8lab.LayerNormMLP(32, 48, checkpoint=True, device="cpu"),
    "transformer": lambda: float8lab.TransformerLayer(
        32, 48, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu"
    ),
}


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules(recorder, make, recipe):
    eager = make()
    model = float8lab.graphed(copy.deepcopy(eager))
    for step in range(4):
        x = torch.randn(6, 2, 32) * (1 + step)
        with float8lab.autocast(recipe=recipe):
            results = train(model, x)
        with float8lab.autocast(recipe=recipe):
            assert equal(results, train(eager, x))
    assert len(vars(model)["forward"].recorded) == 1


def test_weights_stored_in_fp8(recorder):
    recipe = RECIPES["current"]
    with float8lab.fp8_model_init(recipe=recipe):
        eager = nn.Sequential(*[float8lab.Linear(32, 32, device="cpu") for _ in range(2)])
    model = float8lab.graphed(copy.deepcopy(eager))
    for _ in range(4):
        x = torch.randn(8, 32)
        assert equal(train(model, x), train(eager, x))
    assert recorder.replays
    for m in (model, eager):
        qdata = m[0].weight.qdata
        m[0].weight.qdata = qdata.view(torch.uint8).bitwise_xor(128).view(qdata.dtype)
    for _ in range(4):
        assert equal(train(model, x), train(eager, x))


def test_callables_recorded_without_gradients_run_eagerly_with_them(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    layer = nn.Linear(8, 8).eval()
    x = torch.ones(2, 8)
    with torch.no_grad():
        float8lab.make_graphed_callables(layer, (x,))
        layer(x)
    before = recorder.replays
    assert before
    assert layer(x).requires_grad
    assert recorder.replays == before
    layer.reset()
    assert "forward" not in vars(layer)


def test_samples_of_callables_are_left_alone(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    eager = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers = copy.deepcopy(eager)
    sample = torch.ones(2, 8, requires_grad=True)
    float8lab.make_graphed_callables(tuple(layers), ((sample,), (sample,)))
    for _ in range(3):
        x = torch.randn(2, 8)
        assert equal(train(layers, x), train(eager, x))
    assert recorder.replays == 3 * 2 * 2
    assert torch.equal(sample, torch.ones(2, 8))
