"""Calls of ops: Dynamo sees them in compiled functions, and the dispatcher only where it must."""

import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import float8lab
from float8lab import ops, recipes
from float8lab.formats import E4M3
from float8lab.ops import declare
from float8lab.tensor import quantize
from tests.recorder import Ops

TRACED: list[bool] = []
"""For every call of an implementation below, whether Dynamo was tracing it."""


def _shift(x: Tensor) -> Tensor:
    TRACED.append(torch.compiler.is_compiling())
    return _add_one(x)


def _add_one(x: Tensor) -> Tensor:
    TRACED.append(torch.compiler.is_compiling())
    return x + 1


def _with_own_code(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A copy of the function with a separate code object, because a mark is on the code object."""
    return types.FunctionType(function.__code__.replace(), function.__globals__)


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    torch._dynamo.reset()
    TRACED.clear()
    with torch.library._scoped_library("float8lab_test", "DEF") as library:
        library.define("shift(Tensor x) -> Tensor")
        yield library
    torch._dynamo.reset()


def _call_in_compiled() -> Tensor:
    """Run the op below a function that Dynamo skips without its callees, so it inspects them."""

    @torch._dynamo.disable(recursive=False)
    def skipped(x: Tensor) -> Tensor:
        return torch.ops.float8lab_test.shift(x)

    @torch.compile(backend="eager")
    def compiled(x: Tensor) -> Tensor:
        return skipped(x) * 2

    return compiled(torch.zeros(3))


def test_dynamo_traces_an_unmarked_implementation(library):
    """Without this the tests below would prove nothing."""
    library.impl("shift", _with_own_code(_shift), "CPU")
    assert _call_in_compiled().eq(2).all()
    assert True in TRACED


def test_dynamo_does_not_trace_a_marked_implementation(library):
    library.impl("shift", declare.untraced(_with_own_code(_shift)), "CPU")
    for _ in range(2):
        assert _call_in_compiled().eq(2).all()
        torch._dynamo.reset()
    assert TRACED == [False] * 4


def test_dynamo_does_not_trace_a_launcher(library, monkeypatch):
    module = types.ModuleType("float8lab.ops.kernels.of_test")
    module.shift = _with_own_code(_shift)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    launch = declare.untraced(lambda *args: declare._gpu_launcher("of_test:shift", _shift)(*args))
    library.impl("shift", launch, "CPU")
    for _ in range(2):
        assert _call_in_compiled().eq(2).all()
    assert TRACED == [False] * 4


def test_dynamo_does_not_trace_if_torchs_private_names_are_missing(library, monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.eval_frame, "_FrameExecStrategy")
    function = _with_own_code(_shift)
    marked = declare.untraced(function)
    assert marked is not function
    library.impl("shift", marked, "CPU")
    assert _call_in_compiled().eq(2).all()
    assert TRACED == [False] * 2


def _x() -> Tensor:
    return torch.randn(32, 48)


def _cast(x: Tensor) -> Tensor:
    return ops.cast_op("", [x], x.dtype, E4M3, (-1, -1), "fp32", 0.0, 16)[0]


@pytest.fixture
def dispatched(monkeypatch) -> list[Any]:
    """The calls of the op ``twice`` that go through the dispatcher."""
    calls: list[Any] = []
    with torch.library._scoped_library("float8lab_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: calls.append(x) or x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("float8lab_test::twice", torch.empty_like, lib=library)
        yield calls


def _twice() -> Callable[[Tensor], Tensor]:
    return declare._call_directly(
        torch.ops.float8lab_test.twice.default, lambda: lambda x: x * 2, lambda x: x * 2
    )


def test_calls_with_plain_tensors_bypass_the_dispatcher(dispatched):
    x = _x()
    assert torch.equal(_twice()(x), x * 2)
    assert torch.equal(_twice()(torch.nn.Parameter(x).detach()), x * 2)
    with torch.no_grad():
        _twice()(torch.nn.Parameter(x))
    assert not dispatched


class TensorSubclass(Tensor):
    """A subclass; ops with it must call its ``__torch_function__``."""


@pytest.mark.parametrize(
    "x",
    [
        lambda: torch.nn.Parameter(_x()),
        lambda: _x().as_subclass(TensorSubclass),
        lambda: torch.randn(4, dtype=torch.cfloat).conj().imag,
    ],
    ids=["requires-grad", "subclass", "negative"],
)
def test_calls_with_other_tensors_go_through_the_dispatcher(x, dispatched):
    x = x()
    got = _twice()(x)
    assert torch.equal(got.detach().as_subclass(Tensor), x.detach().as_subclass(Tensor) * 2)
    assert len(dispatched) == 1


def test_modes_transforms_and_profilers_see_the_op(dispatched):
    x = _x()
    with Ops() as mode:
        _twice()(x)
    assert mode.seen[0] is torch.ops.float8lab_test.twice.default
    with torch.profiler.profile(acc_events=True) as profile:
        _twice()(_x())
    assert any("float8lab_test::twice" in event.key for event in profile.key_averages())
    with torch._subclasses.FakeTensorMode() as fake:
        assert _twice()(fake.from_tensor(_x())).shape == (32, 48)
    assert len(dispatched) == 2
    x = torch.randn(3, 4)
    assert torch.equal(torch.vmap(_twice())(x), x * 2)
    assert len(dispatched) == 2 + 3


def test_the_graph_of_a_compiled_function_contains_the_op():
    graphs = []

    def backend(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    compiled = torch.compile(_cast, backend=backend, fullgraph=True)
    x = _x()
    got = compiled(x)
    assert torch.equal(got.view(torch.uint8), _cast(x).view(torch.uint8))
    assert torch.ops.float8lab.cast.pure in graphs[0]


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 192), torch.nn.GELU(), torch.nn.Linear(192, 32, bias=False)
    )


def _flops(model: Callable[[Tensor], Tensor]) -> int:
    x = torch.randn(48, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("recipe", [recipes.DelayedScaling(), recipes.Float8BlockScaling()])
def test_flops_of_a_converted_model_equal_those_of_the_plain_one(recipe: recipes.Recipe):
    expected, model = _flops(_model()), _model()
    float8lab.convert_to_float8(model, recipe)
    assert _flops(model) == expected == 3 * 2 * 48 * (64 * 192 + 192 * 32)


def test_flops_of_batches_and_attention_equal_torchs_formulas():
    a, b = (quantize(torch.randn(3, 32, 64)) for _ in range(2))
    with FlopCounterMode(display=False) as counter:
        torch.bmm(a, b.transpose(1, 2))
    assert counter.get_total_flops() == 2 * 3 * 32 * 32 * 64

    shapes = (2, 4, 10, 32), (2, 2, 14, 32), (2, 2, 14, 16)
    q, k, v = (quantize(torch.randn(shape)).requires_grad_() for shape in shapes)
    with FlopCounterMode(display=False) as counter:
        F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward()
    repeated = shapes[0], (2, 4, 14, 32), (2, 4, 14, 16)
    assert counter.get_total_flops() == flop_counter.sdpa_flop_count(
        *repeated
    ) + flop_counter.sdpa_backward_flop_count((2, 4, 10, 16), *repeated)


def test_a_flop_counter_imported_later_counts_ops_and_float8lab_imports_no_dynamo():
    code = (
        "import sys, torch, float8lab\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "layer = float8lab.convert_to_float8(torch.nn.Linear(16, 16))\n"
        "meta_path = [type(finder).__module__ for finder in sys.meta_path]\n"
        "assert not any(module.startswith('float8lab') for module in meta_path)\n"
        "assert 'torch.utils.flop_counter' not in sys.modules\n"
        "from torch.utils.flop_counter import FlopCounterMode\n"
        "for _ in range(2):\n"
        "    with FlopCounterMode(display=False) as counter:\n"
        "        layer(torch.ones(16, 16))\n"
        "    assert counter.get_total_flops() == 2 * 16**3\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("recipe", [recipes.DelayedScaling(), recipes.Float8CurrentScaling()])
def test_selective_checkpointing_recomputes_no_listed_op(recipe: recipes.Recipe):
    model = float8lab.convert_to_float8(_model(), recipe)
    flops = _flops(model)

    def selective(x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, float8lab.compute_intensive_ops())
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    assert _flops(selective) == flops
    assert _flops(lambda x: checkpoint(model, x, use_reentrant=False)) > flops


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_torch_autocast_does_not_reach_an_implementation(device):
    """This holds for both devices; autocast is restored, also if the implementation raises."""
    enabled_inside = []

    def implementation(fails: bool) -> None:
        enabled_inside.append(torch.is_autocast_enabled(device))
        if fails:
            raise ValueError("asked for")

    without_autocast = declare._without_autocast(implementation, device)
    without_autocast(False)
    torch.set_autocast_enabled(device, True)
    try:
        without_autocast(False)
        with pytest.raises(ValueError, match="asked for"):
            without_autocast(True)
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)
    assert enabled_inside == [False] * 3


def test_a_compiler_imported_before_float8lab_knows_all_ops():
    """Some ops are declared outside ``float8lab.ops``."""
    code = (
        "import torch._inductor.lowering as lowering\n"
        "import float8lab\n"
        "from float8lab.ops.declare import OPS\n"
        "assert not [op for op in OPS.declared if op not in lowering.lowerings]\n"
        "assert 'float8lab.cast.delayed' in map(str, OPS.declared)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
