"""CUDA graphs of training steps equal eager mode bit for bit, and the module stays usable."""

import contextlib
import copy
import dataclasses
import warnings

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import float8lab
from float8lab.nn import graphs
from float8lab.nn.precision import precisions_below
from tests.nn.models import GPT, RECIPES, Checkpointed, each_recipe, same_gradients, states

pytestmark = [
    pytest.mark.usefixtures("uncollected"),
    # torch warns if the gradients of a recorded module are accumulated without its graph.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    # torch warns about the empty graph with which a graph pool begins.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
]


def each_recipe_on_a_gpu(test):
    return pytest.mark.gpu(each_recipe(test))


def batch(step, shape=(32, 64)):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(step)) * (1 + step)
    return x.cuda().bfloat16()


def make_mlp(recipe):
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).cuda().bfloat16()
    float8lab.convert_to_float8(model, recipe)
    return model


def train(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return y.detach().clone()


def assert_equal_training(model, eager, shape=(32, 64), steps=3):
    """Output, gradients and delayed-scaling state are equal in each step."""
    for i in range(steps):
        xs = [batch(i, shape).requires_grad_() for _ in range(2)]
        assert torch.equal(train(model, xs[0]), train(eager, xs[1]))
        assert torch.equal(xs[0].grad, xs[1].grad)
        assert same_gradients(model, eager)
        assert states(model) == states(eager)


def assert_equal_sums(model, eager):
    """Gradients that accumulate over three backwards are equal."""
    for m in (model, eager):
        m.zero_grad()
        for i in range(3):
            m(batch(i).requires_grad_()).square().sum().backward()
    assert same_gradients(model, eager)


def test_make_graphed_callables_needs_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(RuntimeError, match="make_graphed_callables must have a CUDA GPU; got none"):
        float8lab.make_graphed_callables(nn.Linear(4, 4), (torch.ones(2, 4),))


@each_recipe_on_a_gpu
@pytest.mark.parametrize("warmup_steps", [1, 3])
def test_a_recorded_training_step_equals_eager(recipe, warmup_steps):
    eager = make_mlp(recipe)
    for p in eager.parameters():
        p.grad = torch.zeros_like(p)
    model = copy.deepcopy(eager)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (eager, model)]
    x = batch(0)

    def step(m, optimizer, x):
        optimizer.zero_grad(set_to_none=False)
        y = m(x)
        y.square().mean().backward()
        optimizer.step()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(warmup_steps):
            x.copy_(batch(i))
            step(model, optimizers[1], x)
    torch.cuda.current_stream().wait_stream(side)
    for i in range(warmup_steps):
        step(eager, optimizers[0], batch(i))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step(model, optimizers[1], x)
    for i in range(warmup_steps, warmup_steps + 4):
        x.copy_(batch(i))
        graph.replay()
        expected = step(eager, optimizers[0], batch(i))
        assert torch.equal(y, expected)
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
        assert states(model) == states(eager)
    # Eager calls after the replays must not use casts from before them.
    with torch.no_grad():
        model.eval(), eager.eval()
        assert torch.equal(model(x), eager(x))
        x.copy_(batch(9))
        graph.replay()
        model.train(), eager.train()
    step(eager, optimizers[0], batch(9))
    model.eval(), eager.eval()
    assert torch.equal(model(x), eager(x))
    with float8lab.autocast(enabled=False):
        assert torch.equal(model(x), eager(x))


MODULES = {
    "linear": lambda **where: float8lab.Linear(32, 48, **where),
    "norm-linear": lambda **where: float8lab.LayerNormLinear(32, 48, **where),
    "mlp": lambda **where: float8lab.LayerNormMLP(32, 48, **where),
    "transformer": lambda **where: float8lab.TransformerLayer(32, 48, 2, **where),
}


@pytest.mark.gpu
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_module_handles_for_graphs_follow_the_device_of_the_parameters(make):
    def devices(module):
        return {precision.handle.device.type for precision in precisions_below(module)}

    module = make(device="cuda")
    assert devices(module) == {"cuda"}
    assert devices(module.cpu()) == {"cpu"}
    assert devices(module.cuda()) == {"cuda"}
    assert devices(copy.deepcopy(module)) == {"cuda"}
    assert devices(make(device="meta").to_empty(device="cuda")) == {"cuda"}
    model = float8lab.convert_to_float8(nn.Sequential(nn.Linear(32, 48)).cuda(), RECIPES["delayed"])
    assert devices(model) == {"cuda"}


@pytest.mark.usefixtures("fresh_dynamo")
@each_recipe_on_a_gpu
@pytest.mark.parametrize("moved", [False, True], ids=["converted-there", "moved"])
def test_reduce_overhead_equals_eager(recipe, moved):
    eager = GPT(width=64, checkpointed=(False, False))
    if not moved:
        eager.cuda()
    float8lab.convert_to_float8(eager, recipe)
    if moved:
        eager.cuda()
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    plain = torch.compile(eager, fullgraph=True)
    histories = []
    # The models run one after the other, because the end of a region also advances the state that
    # recorded graphs have replayed since.
    for m, call in ((model, compiled), (eager, plain)):
        histories.append([])
        for step in range(6):
            tokens = torch.randint(48, (2, 64), generator=torch.Generator().manual_seed(step))
            torch.compiler.cudagraph_mark_step_begin()
            m.zero_grad()
            loss = call(tokens.cuda()).square().mean()
            loss.backward()
            gradients = [p.grad.clone() for p in m.parameters()]
            histories[-1].append((loss.item(), gradients, states(m)))
    # With and without graphs the kernels are the same. Eager mode would have other kernels between
    # the GEMMs.
    for actual, expected in zip(*histories, strict=True):
        assert actual[0] == expected[0]
        assert all(map(torch.equal, actual[1], expected[1]))
        assert actual[2] == expected[2]
    skipped = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert skipped == 0


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.gpu
@pytest.mark.parametrize("earlier", [(), ("eager",), ("eager", "compiled")], ids=str)
def test_delayed_scaling_state_is_not_in_the_memory_of_a_cuda_graph(earlier):
    """torch reuses that memory for the next graph, and raises if anything but outputs stays."""
    model = make_mlp(RECIPES["delayed"])
    calls = {
        "eager": model,
        "compiled": torch.compile(model),
        "graph": torch.compile(model, mode="reduce-overhead"),
    }
    for name in (*earlier, "graph"):
        for number in range(4):
            model.zero_grad(set_to_none=True)
            torch.compiler.cudagraph_mark_step_begin()
            calls[name](batch(number)).float().square().mean().backward()
    packs = [slots.pack for p in precisions_below(model) for slots in p.slots.values()]
    assert packs
    assert all(pack.is_recorded() and pack._copy is None for pack in packs)
    graph_memory = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["segment_pool_id"] != (0, 0)
    ]
    assert graph_memory
    for pack in packs:
        for tensor in (pack.history, pack.amax, pack.factors, pack.previous, pack.steps):
            assert not any(tensor.data_ptr() in memory for memory in graph_memory)


@each_recipe_on_a_gpu
@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
def test_graphed_callables_equal_eager(recipe, used):
    eager = make_mlp(recipe)
    if used:
        train(eager, batch(7))
    model = copy.deepcopy(eager)
    before = states(model)
    same = float8lab.make_graphed_callables(model, (batch(0).requires_grad_(),))
    assert same is model
    assert states(model) == before
    assert_equal_training(model, eager, steps=4)
    assert_equal_sums(model, eager)
    # A call for which the graph was not recorded runs without it.
    assert torch.equal(train(model, batch(5, (7, 64))), train(eager, batch(5, (7, 64))))
    with float8lab.autocast(enabled=False):
        assert torch.equal(model(batch(6)), eager(batch(6)))
    with torch.no_grad():
        assert torch.equal(model(batch(6)), eager(batch(6)))
    model.eval(), eager.eval()
    assert torch.equal(model(batch(6)), eager(batch(6)))


def test_reset_restores_the_original_callables(monkeypatch):
    replays = []

    class Replayed(graphs.Recorded):
        def __call__(self, x):
            replays.append(x)
            return x

    def record(units, *_, **__):
        return [Replayed(unit, exact=False, allow_unused=False) for unit in units]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(graphs, "record", record)
    monkeypatch.setattr(graphs, "_stream", lambda x: 0)
    layer, x = float8lab.Linear(16, 16, device="cpu"), torch.ones(2, 16)
    before = dict(vars(layer))
    callables = (layer, torch.sin)
    graphed_callables = float8lab.make_graphed_callables(callables, ((x,), (x,)))
    assert graphed_callables[0] is layer
    originals = (type(layer).forward.__get__(layer), torch.sin)
    for function, original in zip(graphed_callables, originals, strict=True):
        assert function(x) is replays.pop()
        function.reset()
        assert torch.equal(function(x), original(x))
        assert not replays
    assert vars(layer) == before


@pytest.mark.gpu
def test_reset_frees_the_graphs():
    recipe = RECIPES["current"]
    eager, model = make_mlp(recipe), make_mlp(recipe)
    model.load_state_dict(eager.state_dict())
    float8lab.make_graphed_callables(model, (batch(0).requires_grad_(),))
    train(model, batch(1))
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    model.reset()
    assert torch.cuda.memory_allocated() < held
    assert "forward" not in vars(model)
    for step in range(2):
        assert torch.equal(train(model, batch(step)), train(eager, batch(step)))
        assert same_gradients(model, eager)


@each_recipe_on_a_gpu
def test_graphed_modules_with_weight_caching_in_an_autocast_equal_eager(recipe):
    def make():
        torch.manual_seed(0)
        return [float8lab.Linear(64, 64, device="cuda", params_dtype=torch.bfloat16) for _ in "ab"]

    eager, model = make(), make()
    x = batch(0).requires_grad_()
    graphed = float8lab.make_graphed_callables(
        tuple(model), ((x,), (x,)), fp8_enabled=True, fp8_recipe=recipe, fp8_weight_caching=True
    )
    for i in range(3):
        outputs = []
        for layers, kwargs in ((graphed, {"is_first_microbatch": True}), (eager, {})):
            x = batch(i).requires_grad_()
            with float8lab.fp8_autocast(enabled=True, fp8_recipe=recipe):
                for layer in layers:
                    layer.zero_grad()
                    x = layer(x, **kwargs)
            x.square().sum().backward()
            outputs.append(x.detach().clone())
        assert torch.equal(*outputs)
        for a, b in zip(graphed, eager, strict=True):
            assert torch.equal(a.weight.grad, b.weight.grad)
            assert states(a) == states(b)
    x = batch(4)
    assert torch.equal(graphed[0](x), eager[0](x))  # in bfloat16, without autocast


@each_recipe_on_a_gpu
def test_graphed_weights_stored_in_fp8_with_keyword_arguments_equal_eager(recipe):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            with float8lab.fp8_model_init(recipe=recipe):
                self.layer = float8lab.Linear(64, 64, device="cuda", params_dtype=torch.bfloat16)

        def forward(self, x, *, factor):
            return self.layer(x) * factor

    model = float8lab.convert_to_float8(Scaled(), recipe)
    eager = copy.deepcopy(model)
    factor = torch.full((1,), 2.0, device="cuda", dtype=torch.bfloat16)
    float8lab.make_graphed_callables(model, (batch(0),), sample_kwargs={"factor": factor})
    for i in range(3):
        ys = []
        for m in (model, eager):
            m.zero_grad()
            y = m(batch(i), factor=factor * i)
            y.sum().backward()
            ys.append(y.detach().clone())
        assert torch.equal(*ys)
        assert same_gradients(model, eager)
        assert states(model) == states(eager)


@pytest.mark.gpu
def test_graphed_callables_refuse_too_few_sample_args():
    layer = nn.Linear(16, 16).cuda()
    x = torch.ones(2, 16, device="cuda")
    with pytest.raises(ValueError, match="sample_args must have one entry for each of the 2"):
        float8lab.make_graphed_callables((layer, layer), ((x,),))


def graphed_and_eager(make, **options):
    """A graphed module and an equal one without graphs."""
    eager = make()
    model = copy.deepcopy(eager)
    assert float8lab.graphed(model, **options) is model
    return model, eager


def recordings(model):
    return vars(model)["forward"].recorded


def step(model, x, region=contextlib.nullcontext):
    """Runs a training step; later steps must not overwrite the output and gradients it returns."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with region():
        y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in model.parameters()]]


def assert_equal_steps(model, eager, xs, region=contextlib.nullcontext, *, optimizers=()):
    """Train both models on ``xs``, and compare the results of all steps after the last one."""
    history = []
    for x in xs:
        history.append((step(model, x, region), step(eager, x, region)))
        assert states(model) == states(eager)
        if optimizers:  # these may overwrite the gradients of the step
            history[-1] = [[t.clone() for t in results] for results in history[-1]]
        for optimizer in optimizers:
            optimizer.step()
        assert all(map(torch.equal, model.parameters(), eager.parameters()))
    for actual, expected in history:
        assert all(map(torch.equal, actual, expected))


@each_recipe_on_a_gpu
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_graphed_training_equals_eager(recipe, fused):
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    adamw_options = {"lr": 1e-2, "fused": True} if fused else {"lr": 1e-2}
    optimizers = [torch.optim.AdamW(m.parameters(), **adamw_options) for m in (model, eager)]
    assert_equal_steps(model, eager, [batch(i) for i in range(7)], optimizers=optimizers)
    assert len(recordings(model)) == 1


@each_recipe_on_a_gpu
def test_graphed_results_are_not_overwritten_and_gradients_accumulate(recipe):
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    assert_equal_steps(model, eager, [batch(i) for i in range(5)])
    assert_equal_sums(model, eager)
    assert len(recordings(model)) == 1


@each_recipe_on_a_gpu
def test_each_shape_of_graphed_calls_gets_a_recording(recipe):
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    shapes = [(32, 64), (48, 64)] * 4 + [(3, 16, 64)] * 3
    assert_equal_steps(model, eager, [batch(i, shape) for i, shape in enumerate(shapes)])
    assert len(recordings(model)) == 3


@each_recipe_on_a_gpu
def test_several_graphed_forwards_before_their_backwards_equal_eager(recipe):
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    assert_equal_steps(model, eager, [batch(i) for i in range(4)])
    for order in (1, -1):
        results = []
        for m in (model, eager):
            m.zero_grad()
            losses = [m(batch(i).requires_grad_()).square().sum() for i in range(3)]
            for loss in losses[::order]:
                loss.backward()
            results.append([*losses, *[p.grad for p in m.parameters()]])
            del losses, loss
        assert all(map(torch.equal, *results))
        assert states(model) == states(eager)


@each_recipe_on_a_gpu
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_graphed_layer_equals_eager(recipe, reentrant):
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    checkpointed = [Checkpointed(m, reentrant) for m in (model, eager)]
    assert_equal_steps(*checkpointed, [batch(i) for i in range(3)])
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])


@each_recipe_on_a_gpu
def test_graphed_evaluation_equals_eager(recipe):
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    model.eval(), eager.eval()
    for context in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with context():
            actual = [model(batch(i)) for i in range(4)]
            expected = [eager(batch(i)) for i in range(4)]
        assert all(map(torch.equal, actual, expected))
    assert len(recordings(model)) == 4
    model.train(), eager.train()
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    with torch.no_grad():
        assert torch.equal(model(batch(1)), eager(batch(1)))


@each_recipe_on_a_gpu
def test_a_graphed_layer_with_gradient_nodes_held_elsewhere_equals_eager(recipe):
    """``DistributedDataParallel`` holds such nodes. The layer is called twice in a forward, too."""
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
    assert_equal_steps(model, eager, [batch(0)])
    twice = [nn.Sequential(m, nn.Tanh(), m) for m in (model, eager)]
    for i in range(4):
        results = [step(m, batch(i)) for m in twice]
        assert all(map(torch.equal, *results))
        assert states(model) == states(eager)
    assert nodes
    assert len(recordings(model)) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["weight", "data", "assigned", "loaded", "moved", "converted"])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_graphed_modules_equal_eager_after_their_parameters_are_replaced(change, recipe):
    model, eager = graphed_and_eager(lambda: make_mlp(RECIPES[recipe]))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    for m in (model, eager):
        other = {name: 2 * t for name, t in m.state_dict().items()}
        if change == "weight":
            m[0].weight = nn.Parameter(other["0.weight"])
        elif change == "data":
            m[0].weight.data = other["0.weight"]
        elif change == "moved":
            m.cpu()
            m.cuda()
        elif change == "converted":
            float8lab.convert_to_float8(m, RECIPES["block"])
        else:
            m.load_state_dict(other, assign=change == "assigned")
    assert_equal_steps(model, eager, [batch(i) for i in range(4)])
    # Graphs are kept for each recipe, so those of the former recipe stay.
    assert len(recordings(model)) == 1 + (change == "converted")


@each_recipe_on_a_gpu
def test_a_graphed_call_with_retain_graph_equals_eager(recipe):
    model, eager = graphed_and_eager(lambda: make_mlp(recipe))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    for m in (model, eager):
        m.zero_grad()
        loss = m(batch(3).requires_grad_()).square().sum()
        loss.backward(retain_graph=True)
        m(batch(4).requires_grad_()).square().sum().backward()
        loss.backward()
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
    assert same_gradients(model, eager)


@each_recipe_on_a_gpu
@pytest.mark.parametrize("inside", [False, True], ids=["each-layer", "whole"])
def test_graphed_layers_in_an_autocast_equal_eager(recipe, inside):
    def make():
        torch.manual_seed(0)
        options = {"device": "cuda", "params_dtype": torch.bfloat16}
        return nn.Sequential(
            float8lab.Linear(64, 64, **options), float8lab.Linear(64, 64, **options)
        )

    eager, model = make(), make()
    for layer in [model] if inside else model:
        float8lab.graphed(layer)

    def region():
        return float8lab.autocast(recipe=recipe)

    assert_equal_steps(model, eager, [batch(i) for i in range(5)], region)
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])  # in bfloat16
    assert_equal_steps(model, eager, [batch(i) for i in range(3)], region)


@pytest.mark.gpu
def test_graphed_layers_in_a_torch_autocast_equal_eager():
    def make():
        return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)).cuda()

    model, eager = graphed_and_eager(make)

    def region():
        return torch.autocast("cuda", torch.bfloat16)

    xs = [batch(i).float() for i in range(5)]
    assert_equal_steps(model, eager, xs, region)
    assert_equal_steps(model, eager, xs)
    assert len(recordings(model)) == 2


FUSED = {
    "norm-linear": lambda **options: float8lab.LayerNormLinear(64, 96, **options),
    "mlp": lambda **options: float8lab.LayerNormMLP(64, 96, activation="swiglu", **options),
    "mlp-checkpoint": lambda **options: float8lab.LayerNormMLP(
        64, 96, activation="swiglu", checkpoint=True, **options
    ),
    "attention": lambda **options: float8lab.MultiheadAttention(
        64, 4, num_gqa_groups=2, input_layernorm=True, attention_dropout=0.0, **options
    ),
    "transformer": lambda **options: float8lab.TransformerLayer(
        64, 96, 4, num_gqa_groups=2, normalization="RMSNorm", activation="swiglu",
        hidden_dropout=0.0, attention_dropout=0.0, **options
    ),
}  # fmt: skip


@each_recipe_on_a_gpu
@pytest.mark.parametrize(
    ("name", "fp8_dpa"), [*((name, False) for name in FUSED), ("transformer", True)]
)
def test_graphed_modules_equal_eager(recipe, name, fp8_dpa):
    """Both ``graphed`` and ``make_graphed_callables`` record the module."""
    if fp8_dpa:
        recipe = dataclasses.replace(recipe, fp8_dpa=True)
    module, shape = FUSED[name](device="cuda", params_dtype=torch.bfloat16), (24, 4, 64)
    for submodule in module.modules():
        if isinstance(submodule, float8lab.DotProductAttention):
            submodule.backends = ("reference",)  # the order of sums may vary in other backends
    float8lab.convert_to_float8(module, recipe)
    model, eager = graphed_and_eager(lambda: copy.deepcopy(module))
    assert_equal_steps(model, eager, [batch(i, shape) for i in range(5)])
    assert len(recordings(model)) == 1
    eager = copy.deepcopy(module)
    float8lab.make_graphed_callables(module, (batch(0, shape).requires_grad_(),))
    assert_equal_training(module, eager, shape)


@each_recipe_on_a_gpu
def test_a_graphed_stack_equals_eager(recipe):
    eager = float8lab.convert_to_float8(GPT(width=64, checkpointed=(False, False)).cuda(), recipe)
    model = copy.deepcopy(eager)
    for block in model.blocks:
        for layer in (block.norm1, block.qkv, block.proj, block.norm2, block.up, block.down):
            float8lab.graphed(layer)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, eager)]
    for i in range(6):
        tokens = torch.randint(48, (2, 64), generator=torch.Generator().manual_seed(i)).cuda()
        losses = []
        for m, optimizer in zip((model, eager), optimizers, strict=True):
            m.zero_grad()
            with sdpa_kernel(SDPBackend.MATH):  # this backend sums in a fixed order
                losses.append(m(tokens).square().mean())
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)
        assert states(model) == states(eager)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert all(recordings(block.up) for block in model.blocks)


@pytest.mark.gpu
def test_graphed_dropout_and_buffers_equal_eager():
    def make():
        layers = nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 64)
        return nn.Sequential(*layers).cuda()

    model, eager = graphed_and_eager(make)
    for i in range(5):
        results = []
        for m in (model, eager):
            torch.manual_seed(i)
            results.append([*step(m, batch(i).float()), torch.rand(4, device="cuda"), *m.buffers()])
        assert all(map(torch.equal, *results))
    assert len(recordings(model)) == 1


@pytest.mark.gpu
def test_a_module_that_synchronizes_with_the_gpu_is_not_recorded():
    class Waits(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.max().item()

    model, eager = graphed_and_eager(lambda: Waits(64, 64).cuda().bfloat16())
    step(model, batch(0))
    with pytest.warns(UserWarning, match="Waits could not be recorded by float8lab.graphed.*waits"):
        step(model, batch(1))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    assert torch.rand(4, device="cuda").isfinite().all()


@pytest.mark.gpu
def test_a_graphed_module_in_an_outer_graph_on_another_stream_or_on_the_cpu_equals_eager():
    model, eager = graphed_and_eager(lambda: make_mlp(RECIPES["current"]))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    model.eval(), eager.eval()
    x, expected = batch(5), None
    with torch.no_grad():
        expected = eager(x)
        for _ in range(3):
            model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        graph.replay()
        assert torch.equal(y, expected)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                assert torch.equal(model(x), expected)
        torch.cuda.current_stream().wait_stream(side)
        model.cpu(), eager.cpu()
        for _ in range(3):
            assert torch.equal(model(x.cpu()), eager(x.cpu()))


@pytest.mark.gpu
def test_graphed_enabled_false_frees_the_memory_of_the_graphs():
    model, _ = graphed_and_eager(lambda: make_mlp(RECIPES["current"]))
    for i in range(3):
        step(model, batch(i))
    model.zero_grad()
    held = torch.cuda.memory_allocated()
    float8lab.graphed(model, enabled=False)
    assert "forward" not in vars(model)
    assert torch.cuda.memory_allocated() < held


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.gpu
def test_a_graphed_module_equals_eager_under_compile_and_after_it():
    model, eager = graphed_and_eager(lambda: make_mlp(RECIPES["current"]))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(compiled(batch(1)), eager(batch(1)))
    assert_equal_steps(model, eager, [batch(i) for i in range(3)])
