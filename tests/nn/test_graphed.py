"""``graphed`` without a GPU: which calls are recorded or replayed, and that results equal eager's.

A fake replaces the CUDA graph: it repeats a function and copies the results into the first ones.
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


class FakeGraph:
    """Repeats a function, and copies the new results into the tensors of the first results."""

    replays = 0

    def __init__(self, run):
        self.run = run
        self.gradients = torch.is_grad_enabled()
        self.results = run()

    def replay(self):
        FakeGraph.replays += 1
        with torch.set_grad_enabled(self.gradients):
            new = self.run()
        for old, value in zip(tree_leaves(self.results), tree_leaves(new), strict=True):
            if old is not None:
                old.copy_(value)


@pytest.fixture
def recorder(monkeypatch):
    """Lets ``graphed`` record calls with CPU tensors, and counts the replays."""

    def capture(run, pool, stream):
        assert isinstance(STATE.region, recorded.Trial)
        graph = FakeGraph(run)
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
    FakeGraph.replays = 0
    return FakeGraph


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


def all_equal(actual, expected):
    return len(actual) == len(expected) and all(map(torch.equal, actual, expected))


def state(model):
    return [
        tensor.clone()
        for precision in graphs.precisions_below(model)
        for slots in precision.slots.values()
        for tensor in slots.tensors().values()
    ]


def graphed_and_eager(recipe=None):
    eager = make(recipe)
    model = copy.deepcopy(eager)
    assert float8lab.graphed(model) is model
    return model, eager


def test_every_call_without_a_gpu_runs_eagerly():
    model, eager = graphed_and_eager(RECIPES["current"])
    for step in range(4):
        x = torch.randn(8, 32) * (1 + step)
        assert all_equal(train(model, x), train(eager, x))
    call = vars(model)["forward"]
    assert not call.recorded
    assert not call.seen


@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["none", *RECIPES])
def test_graphed_training_equals_eager(recorder, recipe):
    model, eager = graphed_and_eager(recipe)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, eager)]
    for step in range(6):
        x = torch.randn(8, 32) * (1 + step)
        assert all_equal(train(model, x), train(eager, x))
        for optimizer in optimizers:
            optimizer.step()
        assert all_equal(list(model.parameters()), list(eager.parameters()))
        assert all_equal(state(model), state(eager))
    # Every step replays except the first, and the one in which a converted model is inspected.
    assert recorder.replays == 2 * (5 if recipe is None else 4)


def test_results_of_earlier_calls_are_not_overwritten(recorder):
    model, eager = graphed_and_eager()
    xs = [torch.randn(8, 32, requires_grad=True) for _ in range(5)]
    assert all(map(all_equal, [train(model, x) for x in xs], [train(eager, x) for x in xs]))
    for m in (model, eager):
        m.zero_grad()
        for x in xs:  # gradients accumulate
            m(x).square().sum().backward()
    assert recorder.replays > 8
    assert all_equal([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    gradients = [
        torch.autograd.grad(m(x).sum(), m.parameters()) for m in (model, eager) for x in xs
    ]
    assert all(map(all_equal, gradients[:5], gradients[5:]))


def test_only_the_first_of_several_forwards_before_their_backwards_replays(recorder):
    model, eager = graphed_and_eager(RECIPES["current"])
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
            assert recorder.replays - before == 2  # only the first call replays
    assert all_equal([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])
    # A forward whose result is dropped needs no backward before the next replay.
    model(xs[0])
    before = recorder.replays
    model(xs[0])
    assert recorder.replays == before + 1


def test_a_call_with_retain_graph_equals_eager(recorder):
    model, eager = graphed_and_eager()
    x = torch.randn(8, 32, requires_grad=True)
    for m in (model, eager):
        train(m, x), train(m, x)
        m.zero_grad()
        loss = m(x).square().sum()
        loss.backward(retain_graph=True)
        m(2 * x).square().sum().backward()  # eager: the first backward may be repeated
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    assert all_equal([p.grad for p in model.parameters()], [p.grad for p in eager.parameters()])


def test_a_parameter_that_changes_between_forward_and_backward_raises(recorder):
    model, _ = graphed_and_eager()
    x = torch.randn(8, 32, requires_grad=True)
    train(model, x), train(model, x)
    loss = model(x).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    del loss  # otherwise the next call would run eagerly, to keep the tensors of this backward
    loss = model(x).sum()
    model[0].weight.data = model[0].weight.data.clone()
    with pytest.raises(RuntimeError, match="parameters of a module with CUDA graphs must stay"):
        loss.backward()


def replace_last_layer(model):
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
    "submodule": lambda model: replace_last_layer(model),
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
def test_a_module_that_changes_after_recording_equals_eager(recorder, change):
    model, eager = graphed_and_eager()
    x = torch.randn(8, 32)
    for _ in range(3):
        assert all_equal(train(model, x), train(eager, x))
    for m in (model, eager):
        torch.manual_seed(1)
        change(m)
    for _ in range(4):
        assert all_equal(train(model, x), train(eager, x))


def test_a_module_that_changes_in_every_step_is_no_longer_recorded(recorder):
    model, eager = graphed_and_eager()
    x = torch.randn(8, 32)
    for step in range(30):
        for m in (model, eager):
            m[1].approximate_by = torch.tensor(step)
        assert all_equal(train(model, x), train(eager, x))
    assert vars(model)["forward"].limit == 0


class MixedArguments(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x, factor=1, *, others=(), flag=None, name="a"):
        y = self.inner(x) * factor
        for other in others:
            y = y + other
        return {"y": y, "count": len(others), "name": name, "flag": flag}


def test_calls_with_different_arguments_equal_eager_and_get_separate_graphs(recorder):
    eager = MixedArguments()
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
        actual, expected = call(model), call(eager)
        assert torch.equal(actual.pop("y"), expected.pop("y"))
        assert actual == expected
    assert len(vars(model)["forward"].recorded) == 8
    assert recorder.replays


class Factor:
    """An argument that is no number and cannot be recorded."""

    def __rmul__(self, x):
        return x * 3

    __array_priority__ = 1


def test_the_number_of_graphs_is_limited(recorder):
    model = float8lab.graphed(make(), max_graphs=2)
    for size in (2, 3, 4, 5) * 3:
        model(torch.ones(size, 32))
    assert len(vars(model)["forward"].recorded) == 2


def test_evaluation_replays_and_equals_eager(recorder):
    model, eager = graphed_and_eager(RECIPES["delayed"])
    xs = [torch.randn(8, 32) for _ in range(4)]
    for m in (model, eager):
        train(m, xs[0])
        m.eval()
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        before = recorder.replays
        with context():
            results = [[model(x) for x in xs], [eager(x) for x in xs]]
        assert recorder.replays > before
        assert all_equal(*results)
    assert all_equal(train(model, xs[1]), train(eager, xs[1]))
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
def test_an_observed_call_runs_eagerly(recorder, observer):
    model, eager = graphed_and_eager(RECIPES["current"])
    x = torch.randn(8, 32, requires_grad=True)
    for m in (model, eager):
        train(m, x), train(m, x)
    before = recorder.replays
    results = []
    for m in (model, eager):
        with observer(m):
            results.append(train(m, x))
    assert recorder.replays == before
    assert all_equal(*results)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_checkpointed_graphed_modules_equal_eager(recorder, reentrant, recipe):
    model, eager = graphed_and_eager(recipe)
    x = torch.randn(8, 32)
    for m in (model, eager):
        train(m, x), train(m, x), train(m, x)
    for step in range(3):
        x = torch.randn(8, 32) * (1 + step)
        results = [train(Checkpointed(m, reentrant), x) for m in (model, eager)]
        assert all_equal(*results)
        assert all_equal(state(model), state(eager))


def test_hooked_frozen_and_unused_parameters_behave_as_in_eager_mode(recorder):
    model, eager = graphed_and_eager()
    accumulated = ([], [])
    for m, grads in zip((model, eager), accumulated, strict=True):
        m[0].register_parameter("unused", nn.Parameter(torch.ones(3)))
        m[0].weight.register_hook(lambda g: 2 * g)
        m[0].bias.register_post_accumulate_grad_hook(lambda p, out=grads: out.append(p.grad))
        m[2].requires_grad_(False)
    x = torch.randn(8, 32)
    for _ in range(3):
        assert all_equal(train(model, x), train(eager, x))
    assert recorder.replays
    assert model[0].unused.grad is None
    assert all_equal(*accumulated)
    assert len(accumulated[0]) == 3


def test_torch_func_transforms_of_a_graphed_module_equal_eager(recorder):
    model, eager = graphed_and_eager()
    x = torch.randn(8, 32, requires_grad=True)
    train(model, x), train(model, x)
    for transform, argument in ((torch.func.vmap, x), (torch.func.jacrev, x[0])):
        assert torch.equal(transform(model)(argument), transform(eager)(argument))
    new_parameters = {name: 2 * p.detach() for name, p in model.named_parameters()}
    actual, expected = (torch.func.functional_call(m, new_parameters, (x,)) for m in (model, eager))
    assert torch.equal(actual, expected)


def test_a_compiled_graphed_module_equals_eager_without_replays(recorder):
    model, eager = graphed_and_eager(RECIPES["current"])
    x = torch.randn(8, 32, requires_grad=True)
    train(model, x), train(model, x)
    before = recorder.replays
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), eager(x))
    assert recorder.replays == before
    torch._dynamo.reset()


class Bad(nn.Module):
    def __init__(self, defect):
        super().__init__()
        self.layer, self.defect = nn.Linear(8, 8), defect
        self.elsewhere = [self.layer.weight]

    def forward(self, x):
        if self.defect == "writes":
            x.add_(1)
        if self.defect == "elsewhere":
            return F.linear(x, self.elsewhere[0])
        y = self.layer(x)
        if self.defect == "two":
            return y + y.detach() * 2, y * 2
        return (y, object()) if self.defect == "object" else y


@pytest.mark.parametrize(
    ("defect", "reason"),
    [
        ("writes", "it writes into its arguments"),
        ("two", "several of its outputs have a gradient"),
        ("object", "it returns something besides tensors"),
        ("elsewhere", "it has parameters elsewhere than under their names"),
    ],
)
def test_an_unrecordable_module_warns_with_the_reason_and_runs_eagerly(recorder, defect, reason):
    eager = Bad(defect)
    model = float8lab.graphed(copy.deepcopy(eager))
    x = torch.randn(4, 8)
    model(x.clone())
    with pytest.warns(
        UserWarning, match=f"Bad could not be recorded by float8lab.graphed.*{reason}"
    ):
        model(x.clone())
    xs = x.clone(), x.clone()
    actual, expected = model(xs[0]), eager(xs[1])
    assert all_equal(tree_leaves(actual)[:1], tree_leaves(expected)[:1])
    assert torch.equal(*xs)
    assert not recorder.replays


@pytest.mark.filterwarnings("ignore:Linear could not be.*casts of weights over microbatches")
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_weights_cached_over_microbatches_run_eagerly(recorder, recipe):
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
        assert all(map(all_equal, results[:3], results[3:]))
    assert not recorder.replays


class FirstOutput(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8)  # an LSTM also holds its parameters in a list

    def forward(self, x):
        return self.inner(x)[0]


def test_recording_restores_the_parameters_of_the_module(recorder):
    eager = FirstOutput()
    model = float8lab.graphed(copy.deepcopy(eager))
    parameters = [*model.parameters()]
    for p in parameters:
        p.note = "kept"
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        assert all_equal(train(model, x.clone()), train(eager, x.clone()))
    assert recorder.replays
    for p, other, listed in zip(
        parameters, model.parameters(), model.inner._flat_weights, strict=True
    ):
        assert p is other is listed
        assert p.note == "kept"


def test_recording_leaves_buffers_and_random_state_unchanged(recorder):
    eager = nn.Sequential(nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 32))
    model = float8lab.graphed(copy.deepcopy(eager))
    for step in range(4):
        x = torch.randn(8, 32)
        results = []
        for m in (model, eager):
            torch.manual_seed(step)
            results.append([*train(m, x), torch.rand(3)])
        assert all_equal(*results)
        assert all_equal(list(model.buffers()), list(eager.buffers()))
    assert recorder.replays


def test_graphed_layers_in_autocast_regions_equal_eager(recorder):
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
        assert all_equal(*results)
    assert recorder.replays == 4 * 4


def test_copies_and_pickles_record_separately_and_keep_the_signature(recorder):
    model, eager = graphed_and_eager(RECIPES["current"])
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
            assert all_equal(train(twin, x), train(other, x))
        assert call.recorded
    assert inspect.signature(model.forward) == inspect.signature(eager.forward)
    assert model.state_dict().keys() == eager.state_dict().keys()


def test_enabled_false_restores_the_forward(recorder):
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


def test_nested_graphed_modules_record_once_and_equal_eager(recorder):
    model, eager = graphed_and_eager()
    float8lab.graphed(model[0])
    x = torch.randn(8, 32)
    for _ in range(4):
        assert all_equal(train(model, x), train(eager, x))
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
def test_graphed_modules_of_the_package_equal_eager(recorder, make, recipe):
    eager = make()
    model = float8lab.graphed(copy.deepcopy(eager))
    for step in range(4):
        x = torch.randn(6, 2, 32) * (1 + step)
        with float8lab.autocast(recipe=recipe):
            results = train(model, x)
        with float8lab.autocast(recipe=recipe):
            assert all_equal(results, train(eager, x))
    assert len(vars(model)["forward"].recorded) == 1


def test_graphed_weights_stored_in_fp8_equal_eager_after_a_replacement(recorder):
    recipe = RECIPES["current"]
    with float8lab.fp8_model_init(recipe=recipe):
        eager = nn.Sequential(*[float8lab.Linear(32, 32, device="cpu") for _ in range(2)])
    model = float8lab.graphed(copy.deepcopy(eager))
    for _ in range(4):
        x = torch.randn(8, 32)
        assert all_equal(train(model, x), train(eager, x))
    assert recorder.replays
    for m in (model, eager):
        qdata = m[0].weight.qdata
        m[0].weight.qdata = qdata.view(torch.uint8).bitwise_xor(128).view(qdata.dtype)
    for _ in range(4):
        assert all_equal(train(model, x), train(eager, x))


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


def test_sample_arguments_of_graphed_callables_stay_unchanged(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    eager = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    layers = copy.deepcopy(eager)
    sample = torch.ones(2, 8, requires_grad=True)
    float8lab.make_graphed_callables(tuple(layers), ((sample,), (sample,)))
    for _ in range(3):
        x = torch.randn(2, 8)
        assert all_equal(train(layers, x), train(eager, x))
    assert recorder.replays == 3 * 2 * 2
    assert torch.equal(sample, torch.ones(2, 8))
