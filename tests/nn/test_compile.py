"""torch.compile: no graph breaks, few compilations, and the numbers of eager mode."""

import collections
import contextlib
import copy
import functools
import re

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import recipes
from float8lab.nn.in_graph import _Handles
from float8lab.recipes import delayed
from float8lab.tensor import differentiation
from tests.nn.models import (
    GPT,
    RECIPES,
    Block,
    CountingBackend,
    each_recipe,
    in_thread,
    same_gradients,
    states,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def tokens(length, seed=0):
    return torch.randint(48, (2, length), generator=torch.Generator().manual_seed(seed))


def train(model, batch):
    model.zero_grad()
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


def convert_and_compile_copy(eager, recipe, **compile_options):
    """A converted model, a copy of it, the compiled copy, and the backend that compiles it."""
    float8lab.convert_to_float8(eager, recipe)
    model = copy.deepcopy(eager)
    backend = CountingBackend()
    return (
        eager,
        model,
        torch.compile(model, fullgraph=True, backend=backend, **compile_options),
        backend,
    )


def feed_forward(_):
    """A few layers of a GPT, which compile fast."""
    layers = [nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)]
    return nn.Sequential(nn.Embedding(48, 32), *layers)


def gpt(checkpointed):
    return GPT(checkpointed=[checkpointed])


def each_model(**quick):
    """``parametrize`` over models and names of recipes.

    The ``quick`` cases run always. Of the rest the GPTs are ``slow``, and the others are left out.
    """
    cases = [(make, name) for make in (feed_forward, gpt) for name in RECIPES]
    marks = [[pytest.mark.slow] * (name not in quick[make.__name__]) for make, name in cases]
    params = [
        pytest.param(*case, marks=mark)
        for case, mark in zip(cases, marks, strict=True)
        if case[0] is gpt or not mark
    ]
    return pytest.mark.parametrize(("make", "name"), params)


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_a_layer_is_one_node_of_the_graph_that_dynamo_makes(name):
    """Dynamo would take several times as long to read the Python of forward and backward."""
    graphs = []

    def backend(module, inputs):
        graphs.append(module.graph)
        return module.forward

    mlp = float8lab.LayerNormMLP(32, 64, device="cpu")
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), mlp, nn.Linear(32, 32))
    float8lab.convert_to_float8(model, RECIPES[name])
    torch.compile(model, backend=backend, fullgraph=True)(torch.randn(8, 32)).sum().backward()
    targets = [node.target for node in graphs[0].nodes if node.op == "call_function"]
    assert targets.count(differentiation._run_in_graph) == 3
    others = [t for t in targets if isinstance(t, torch._ops.OperatorBase)]
    assert others == [torch.ops.float8lab.advance.default] * (name == "delayed")


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_backend_may_run_a_graph_when_it_compiles_it(name):
    ran = []

    def backend(module, inputs):
        ran.extend(module(*inputs))
        return module.forward

    model, x = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), torch.randn(8, 32)
    eager = copy.deepcopy(float8lab.convert_to_float8(model, RECIPES[name]))
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert torch.equal(ran[0], eager(x))
    assert torch.equal(y, eager(x))
    assert states(model) == states(eager)


def test_a_thread_that_runs_a_graph_leaves_the_flag_of_one_that_compiles(monkeypatch):
    """Torch 2.13 sets the flag while a thread compiles, for all threads."""
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with differentiation._compiling():
        torch.compiler._is_compiling_flag = False  # the other thread ends
    assert not torch.compiler._is_compiling_flag


@each_model(gpt=[], feed_forward=["delayed", "block"])
def test_a_model_compiles_once_for_one_length_and_once_more_for_all_others(make, name):
    """The block is recomputed; in the next test it keeps its activations."""
    eager, model, compiled, backend = convert_and_compile_copy(make(True), RECIPES[name])
    # Each batch has 130 tokens or more: a dimension of a single block of scales would compile once
    # more, for size 1.
    for seed, (length, graphs) in enumerate(
        [(70, 1), (70, 1), (65, 2), (96, 2), (128, 2), (129, 2)]
    ):
        batch = tokens(length, seed)
        assert torch.equal(train(compiled, batch), train(eager, batch))
        assert same_gradients(model, eager)
        assert states(model) == states(eager)
        assert backend.graphs == graphs
    compiled.eval()
    compiled(tokens(8))  # evaluation leaves the scaling state unchanged
    assert states(model) == states(eager)
    for trained_model in (model.train(), eager):  # back in eager mode
        train(trained_model, tokens(8, seed=9))
    assert states(model) == states(eager)


@each_model(gpt=[], feed_forward=["mx"])
def test_dynamic_true_compiles_once_for_every_length(make, name):
    """``dynamic=True`` turns every number that a module reads into an input of the graph."""
    eager, model, compiled, backend = convert_and_compile_copy(
        make(False), RECIPES[name], dynamic=True
    )
    counts = []
    for length in (70, 96, 65):
        assert torch.equal(train(compiled, tokens(length)), train(eager, tokens(length)))
        assert same_gradients(model, eager)
        counts.append(backend.graphs)  # torch compiles twice for its own numbers
    assert counts == counts[:1] * 3


@pytest.mark.parametrize(
    ("name", "where"),
    [
        pytest.param(name, "outside", marks=[pytest.mark.slow] * (name not in ("delayed", "block")))
        for name in RECIPES
    ]
    + [("delayed", "inside"), ("mx", "inside")],
)
def test_autocast_inside_or_outside_the_compiled_function_equals_eager(name, where):
    recipe = RECIPES[name]
    layer = float8lab.Linear(32, 48, device="cpu")

    def step(x):
        with float8lab.autocast(recipe=recipe):
            return layer(x)

    with float8lab.autocast(recipe=recipe):  # the first region looks for FP8 modules
        layer(torch.randn(2, 32))
    function = step if where == "inside" else layer
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 32)
    with float8lab.autocast(recipe=recipe, enabled=where == "outside"):
        assert torch.equal(compiled(x), step(x))
    if where == "outside":  # no longer in FP8: the autocast state is guarded
        assert torch.equal(compiled(x), F.linear(x, layer.weight, layer.bias))
        other = RECIPES["rowwise" if recipe is RECIPES["current"] else "current"]
        with float8lab.autocast(recipe=other):  # the recipe is guarded, too
            assert torch.equal(compiled(x), layer(x))
        with float8lab.autocast(recipe=recipe):  # the region covers this thread only
            assert torch.equal(in_thread(lambda: compiled(x)), in_thread(lambda: layer(x)))


@each_recipe
def test_models_train_as_ever_while_another_thread_compiles(recipe):
    model = float8lab.convert_to_float8(GPT(), recipe)
    expected_model = copy.deepcopy(model)
    batches = [tokens(16, seed) for seed in range(3)]
    expected = [train(expected_model, batch) for batch in batches]
    losses = []

    def backend(graph, example_inputs):
        assert torch.compiler.is_compiling() or torch.__version__ < "2.13"
        losses.extend(in_thread(lambda: [train(model, batch) for batch in batches]))
        return graph.forward

    torch.compile(torch.sin, backend=backend)(torch.ones(2))
    assert losses == expected
    assert same_gradients(model, expected_model)
    assert states(model) == states(expected_model)


@each_recipe
def test_a_compiled_layer_with_weights_stored_in_fp8_equals_eager(recipe):
    with float8lab.fp8_model_init(recipe=recipe):
        layer = float8lab.Linear(32, 48, device="cpu")
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 32, requires_grad=True)
    with float8lab.autocast(recipe=recipe):
        y, expected = compiled(x), eager(x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(layer.weight.grad, eager.weight.grad)


@pytest.mark.parametrize(
    ("name", "count"),
    [("current", 3), ("rowwise", 0), pytest.param("block", 0, marks=pytest.mark.slow)],
)
def test_current_scaling_leaves_the_amax_of_activations_to_the_compiler(name, count):
    """The compiler computes the amax of inputs, and of gradients with long rows.

    The cast op computes the amax of weights and of all other tensors.
    """
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 1040))
    float8lab.convert_to_float8(model, RECIPES[name])
    scale_args = []

    def collect_scale_args(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.ops.float8lab.cast.pure:
                tensor_args = [a for a in node.args if isinstance(a, torch.fx.Node)]
                # The scale of a weight that backward requantizes is an input of its graph.
                scale_args.extend(a for a in tensor_args if a.op != "placeholder")
        return make_boxed_func(graph)

    compiled = torch.compile(
        model,
        fullgraph=True,
        backend=aot_autograd(fw_compiler=collect_scale_args, bw_compiler=collect_scale_args),
    )
    compiled(torch.randn(4, 32, requires_grad=True)).sum().backward()
    assert len(scale_args) == count
    assert sum("amax" in str(a.all_input_nodes) for a in scale_args) == count
    # An empty batch has no amax.
    x = torch.randn(0, 32, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad.shape == (0, 32)


def saved_nodes(model, x):
    """The outputs of the compiled forward, with the partition that Inductor would choose."""
    saved = []

    def forward(graph, inputs):
        (outputs,) = graph.graph.find_nodes(op="output")
        saved.extend(node for node in outputs.args[0] if node is not None)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table(),  # SiLU computes in float32
    )
    torch.compile(model, fullgraph=True, backend=backend)(x).sum().backward()
    return saved


def mlp(**options):
    return float8lab.LayerNormMLP(64, 192, **options)


def transformer(**options):
    return float8lab.TransformerLayer(
        64, 192, 2, hidden_dropout=0.0, attention_dropout=0.0, **options
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (mlp, "mx"),
        *(pytest.param(transformer, n, marks=pytest.mark.slow) for n in ("rowwise", "mx")),
    ],
)
def test_weights_stored_in_fp8_save_no_more_memory_than_others(make, name):
    """These recipes requantize the weight for dgrad, and they do so in backward."""
    recipe = RECIPES[name]
    size = {}
    for stored in (False, True):
        torch._dynamo.reset()
        with float8lab.fp8_model_init(enabled=stored, recipe=recipe):
            model = make(activation="swiglu", params_dtype=torch.bfloat16, bias=False, device="cpu")
        x = torch.randn(32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
        with float8lab.autocast(recipe=recipe):
            saved = [node.meta["val"] for node in saved_nodes(model, x) if node.op != "placeholder"]
        size[stored] = sum(value.numel() * value.element_size() for value in saved)
    assert size[True] <= size[False]


@each_recipe
def test_no_float32_result_and_no_transposed_weight_is_saved_for_backward(recipe):
    """No float32 result of an op after a layer is saved, and no transposed weight.

    Backward recomputes both.
    """
    model = nn.Sequential(nn.Linear(32, 48), nn.SiLU(), nn.Linear(48, 16)).bfloat16()
    float8lab.convert_to_float8(model, recipe)
    saved = saved_nodes(model, torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True))
    kinds = {(node.meta["val"].shape, node.meta["val"].dtype) for node in saved}
    assert ((64, 48), torch.float32) not in kinds
    assert ((64, 48), torch.bfloat16) in kinds  # SiLU's input
    assert [node for node in saved if "transpose" in str(node.target)] == []


def test_inductor_writes_the_shared_input_of_three_layers_once():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            x = self.norm(x)
            return self.q(x) + self.k(x) * self.v(x)

    model = Three()
    float8lab.convert_to_float8(model, RECIPES["delayed"])
    expected = copy.deepcopy(model)
    compiled, x = torch.compile(model, fullgraph=True), torch.randn(2, 8, 32, requires_grad=True)
    with fresh_cache():
        y, (code, *_) = run_and_get_code(compiled, x)
    # Inductor reorders the arithmetic between the GEMMs, which flips some FP8 roundings.
    assert (y - expected(x)).norm() <= 0.05 * y.norm()
    casts = re.findall(r"cast_delayed_\w+\('', \[(?:reinterpret_tensor\()?(\w+)", code)
    casts = [x for x in casts if not x.startswith("primals")]  # those of weights
    assert len(casts) == 3
    assert len(set(casts)) == 1
    assert code.count("call_site('cast.delayed'") == 6
    assert " = torch.ops.float8lab" not in code


@pytest.mark.slow
@pytest.mark.parametrize("name", ["current", "block"])
def test_a_gpt_compiled_by_inductor_nearly_equals_eager(name):
    eager = GPT()
    float8lab.convert_to_float8(eager, RECIPES[name])
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True)
    loss, expected = train(compiled, tokens(8)), train(eager, tokens(8))
    # Inductor reorders the arithmetic between the GEMMs, which flips some FP8 roundings.
    assert (loss - expected).abs() <= 0.01 * expected
    a, b = model.blocks[0].up.weight.grad, eager.blocks[0].up.weight.grad
    assert (a - b).norm() <= 0.05 * b.norm()


@pytest.mark.parametrize("inside", [False, True], ids=["after-region", "in-region"])
def test_backward_on_another_thread_recomputes_with_the_scales_of_the_forward(inside):
    eager, model, compiled, _ = convert_and_compile_copy(
        Block(checkpointed=True), RECIPES["delayed"]
    )

    def step(block, x):
        block.zero_grad()
        with contextlib.ExitStack() as stack:
            stack.enter_context(float8lab.autocast(recipe=RECIPES["delayed"]))
            loss = block(x).square().mean()
            if not inside:
                stack.close()
            in_thread(loss.backward)  # as autograd does on a GPU

    for seed in range(3):
        x = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(seed)) * 4.0**seed
        step(compiled, x)
        step(eager, x)
        assert same_gradients(model, eager)
    assert states(model) == states(eager)


def test_delayed_state_outside_a_region_and_after_two_calls_equals_eager():
    layer = float8lab.nn.Linear(32, 32, device="cpu")
    float8lab.convert_to_float8(layer, RECIPES["delayed"])
    for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
        hooks.clear()
    recipe = recipes.DelayedScaling(amax_history_len=3)

    def call_once(layer, x):
        return layer(x)

    def call_twice(layer, x):
        with float8lab.autocast(recipe=recipe):
            return layer(F.relu(layer(x)))

    for function in (call_once, call_twice):
        eager, compiled_layer = copy.deepcopy(layer), copy.deepcopy(layer)
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for step in range(3):
            x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
            y, expected = compiled(compiled_layer, x), function(eager, x)
            assert torch.equal(y, expected)
            y.square().sum().backward()
            expected.square().sum().backward()
            assert torch.equal(compiled_layer.weight.grad, eager.weight.grad)
            assert states(compiled_layer) == states(eager)


@pytest.mark.parametrize(("in_cuda_graph", "counts"), [(False, {1, 2}), (True, {9, 11})])
def test_casts_share_a_launch_that_copies_factors(monkeypatch, in_cuda_graph, counts):
    """Casts do not share it where torch captures a CUDA graph, which owns its results' memory.

    A recompute, which torch 2.11 leaves out here, uses the factors before the last update.
    """

    class Layers(nn.Sequential):
        def forward(self, x):
            return self[2](checkpoint(self[1], self[0](x), use_reentrant=False))

    eager = Layers(*[nn.Linear(32, 32) for _ in range(3)])
    float8lab.convert_to_float8(eager, RECIPES["delayed"])
    model, original_copy, launches = copy.deepcopy(eager), delayed._aligned_copy, []
    monkeypatch.setattr(delayed, "_aligned_copy", lambda x: launches.append(x) or original_copy(x))
    compiled = torch.compile(model, fullgraph=True)
    with fresh_cache(), torch._inductor.config.patch({"triton.cudagraphs": in_cuda_graph}):
        for step in range(3):
            x = torch.randn(8, 32) * 3.0**step
            expected = train(eager, x)
            launches.clear()
            assert torch.equal(train(compiled, x), expected)
            assert same_gradients(model, eager)
            assert step == 0 or len(launches) in counts  # at first each slot is given a scale
    assert states(model) == states(eager)


def test_each_cast_in_a_graph_gets_a_separate_copy_of_its_factors():
    """A compiler may reuse the memory of an op's result once the graph has read the result."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    float8lab.convert_to_float8(model, RECIPES["delayed"])
    model(torch.randn(8, 32)).sum().backward()
    pack = next(iter(model[0]._fp8.slots.values())).pack
    copy_factors = functools.partial(pack.copy_factors, previous=False, shares_launch=True)
    rows = [copy_factors(slot, slot) for slot in (*range(12), *range(12), 0)]
    storages = [row.untyped_storage().data_ptr() for row in rows]
    assert len({*storages[:12]}) == len({*storages[12:24]}) == 1
    assert len({row.data_ptr() for row in rows}) == len(rows)
    rows[0].fill_(0.0)
    assert rows[1]._version == 0
    assert all(torch.equal(rows[i][0, ::4], pack.factors[:, i % 12]) for i in range(1, 25))
    model(torch.randn(8, 32) * 100.0)
    assert torch.equal(copy_factors(0, 0)[0, ::4], pack.factors[:, 0])


def test_layers_compiled_one_by_one_share_a_graph():
    layers = [nn.Linear(32, 32) for _ in range(12)]
    model = nn.Sequential(*layers)
    float8lab.convert_to_float8(model, RECIPES["delayed"])
    eager = copy.deepcopy(model)
    backend = CountingBackend()
    for layer in model:
        layer.compile(fullgraph=True, backend=backend)
    for step in range(2):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            assert torch.equal(model(x), eager(x))
    assert backend.graphs <= 2  # more would be one for each layer
    assert states(model) == states(eager)


def test_ops_of_compiled_graphs_pass_opcheck(monkeypatch):
    layer = nn.Linear(32, 48)
    float8lab.convert_to_float8(layer, RECIPES["delayed"])
    layer(torch.randn(8, 32)).sum().backward()  # now every slot has a scale
    precision, ops = layer._fp8, torch.ops.float8lab
    # opcheck copies the arguments. A copy of the handle has another address, so every address must
    # find the layer.
    monkeypatch.setattr(_Handles, "owners", collections.defaultdict(lambda: precision))
    clock = torch.zeros(1, dtype=torch.uint8)
    x = torch.randn(20, 32)
    module = (precision.handle, RECIPES["delayed"].number, "", 0, False, 1)
    gelu = ("gelu", [x], torch.float32, *module)
    matrix = ("", [x], torch.bfloat16, *module)
    for source in (matrix, gelu):
        cast_args = (*source, torch.float8_e4m3fn, 16)
        for outputs in ((True, False, False), (False, True, False), (True, True, True)):
            torch.library.opcheck(ops.cast.delayed, (*cast_args, *outputs, None, None, 0))
    torch.library.opcheck(ops.come_after.default, (clock, x))
    torch.library.opcheck(ops.advance.default, (clock, []))


def test_a_layer_with_weights_stored_in_fp8_exports_to_onnx_ops():
    """The graph has the ops of ONNX, which exist in torch only while it exports."""
    with float8lab.fp8_model_init():
        layer = float8lab.Linear(64, 96, device="cpu").eval()
    recipe = recipes.Float8CurrentScaling()
    with float8lab.onnx_export(enabled=True), float8lab.autocast(recipe=recipe):
        program = torch.export.export(layer, (torch.randn(3, 64),), strict=False)
    assert str(program.graph).count("DequantizeLinear") == 2


@pytest.mark.parametrize("strict", [True, False])
def test_named_dimensions_of_an_exported_program_take_every_size(strict):
    layer = nn.Sequential(float8lab.Linear(64, 96, device="cpu"), nn.GELU())
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", max=64)
    for shape, dims in (((4, 64), {0: batch}), ((4, 6, 64), {0: batch, 1: length})):
        with torch.no_grad(), float8lab.autocast(recipe=RECIPES["current"]):
            x = torch.randn(shape)
            program = torch.export.export(layer, (x,), dynamic_shapes=(dims,), strict=strict)
            other = torch.randn(1, *(17,) * (len(shape) - 2), 64)
            assert torch.equal(program.module()(other), layer(other))


@pytest.mark.parametrize("recipe", ["current", "block", "mx"])
def test_an_exported_program_takes_every_batch_though_its_weights_need_gradients(recipe):
    """Casts for a backward, which no program has, would fix the number of their blocks."""
    layer = nn.Sequential(float8lab.LayerNormMLP(64, 96, device="cpu"), nn.GELU())
    with float8lab.autocast(recipe=RECIPES[recipe]):
        dims = ({0: torch.export.Dim("batch")},)
        program = torch.export.export(layer, (torch.randn(4, 64),), dynamic_shapes=dims)
        other = torch.randn(300, 64)
        assert torch.equal(program.module()(other), layer(other))


def test_a_region_with_a_graph_break_is_left_at_its_end():
    layer = float8lab.Linear(32, 32, device="cpu")

    @torch.compile(backend="eager")
    def run(x):
        with float8lab.autocast(recipe=RECIPES["current"]):
            y = layer(x)
            torch._dynamo.graph_break()
            return layer(y)

    run(torch.randn(4, 32))
    with float8lab.count_gemms() as counts:
        layer(torch.randn(4, 32))
    assert counts.fp8 == 0


def test_export_drops_checkpointing_and_refuses_delayed_scaling():
    mlp, x = float8lab.LayerNormMLP(32, 32, checkpoint=True, device="cpu"), torch.randn(3, 32)
    assert torch.equal(torch.export.export(mlp, (x,)).module()(x), mlp(x))
    with (
        float8lab.autocast(recipe=RECIPES["delayed"]),
        pytest.raises(NotImplementedError, match=r"^recipe must not be a delayed one inside torch"),
    ):
        torch.export.export(mlp, (x,), strict=False)
