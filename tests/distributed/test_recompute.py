"""A checkpoint changes no bit of results, FP8 state and random numbers."""

import contextlib
import copy
from functools import partial

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab import recipes
from float8lab.ops import cast_op
from float8lab.recipes.recording import CHECKPOINTS
from float8lab.recipes.region import STATE, in_backward
from float8lab.tensor import operands as operands_module
from tests.nn.models import DELAYED, RECIPES

TORCH_CHECKPOINT = torch.utils.checkpoint.checkpoint
each_mode = pytest.mark.parametrize(
    "use_reentrant", [True, False], ids=["reentrant", "non-reentrant"]
)
each_function = pytest.mark.parametrize(
    "function", [float8lab.checkpoint, TORCH_CHECKPOINT], ids=["float8lab", "torch"]
)


class FeedForward(nn.Module):
    """x + down(dropout(gelu(up(x)))), with arguments of every kind."""

    def __init__(self, width=32, device="cpu"):
        super().__init__()
        self.up = float8lab.Linear(width, 2 * width, device=device)
        self.down = float8lab.Linear(2 * width, width, device=device)
        self.calls = 0

    def forward(self, x, mask=None, scale=1.0, *, extra=None, factor_and_shift=None):
        self.calls += 1
        y = self.down(F.dropout(F.gelu(self.up(x)), 0.25)) * scale
        if mask is not None:
            y = y.masked_fill(mask, 0.0)
        if extra is not None:
            y = y * extra
        if factor_and_shift is not None:
            y = y * factor_and_shift[0] + factor_and_shift[1]["shift"]
        return x + y


def call_directly(function, *args, use_reentrant=None, get_rng_state_tracker=None, **kwargs):
    return function(*args, **kwargs)


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def state_of(module):
    """All delayed-scaling tensors of a module."""
    slots = (s for m in module.modules() if isinstance(m, float8lab.Linear) for s in [m._fp8.slots])
    return [t for s in slots for slot in s.values() for t in slot.tensors().values()]


def assert_same(a, b):
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)
    torch.testing.assert_close(state_of(a), state_of(b), rtol=0, atol=0)


def assert_checkpoint_changes_nothing(
    make_step, make_model=FeedForward, steps=3, function=float8lab.checkpoint
):
    """Run training steps directly and with a checkpoint, and compare everything."""
    plain = make_model()
    checkpointed = copy.deepcopy(plain)
    for seed in range(steps):
        results = []
        for model, run in ((plain, call_directly), (checkpointed, function)):
            torch.manual_seed(seed)
            model.zero_grad()  # a reentrant backward rounds each sum of .grad
            inputs = [leaf(4, 32, seed=10 * seed + i) for i in range(4)]
            loss = make_step(model, run, *inputs)
            loss.backward()
            results.append([loss.detach(), *(x.grad for x in inputs), torch.rand(2)])
        for a, b in zip(*results, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)
        assert_same(plain, checkpointed)


@contextlib.contextmanager
def under_torch_autocast():
    with torch.autocast("cpu", torch.bfloat16), float8lab.autocast(recipe=DELAYED):
        yield


GROUP = torch.distributed.ProcessGroup(0, 1)  # without init_process_group it is only looked up
REGIONS = {
    **{name: partial(float8lab.autocast, recipe=recipe) for name, recipe in RECIPES.items()},
    "amax-reduction-group": partial(float8lab.autocast, recipe=DELAYED, amax_reduction_group=GROUP),
    "torch-autocast": under_torch_autocast,
}


@pytest.mark.parametrize("region", REGIONS.values(), ids=REGIONS)
@each_function
@each_mode
def test_results_and_state_are_unchanged_in_every_region(region, function, use_reentrant):
    def step(model, run, x, *_):
        with region():
            y = run(model, x, use_reentrant=use_reentrant)
        return y.float().square().sum()

    assert_checkpoint_changes_nothing(step, function=function)


@each_mode
@pytest.mark.parametrize("keeps_weight_cast", [False, True], ids=["", "kept-weight-cast"])
def test_several_forwards_before_their_backward_keep_their_own_scales(
    use_reentrant, keeps_weight_cast
):
    def step(model, run, *inputs):
        loss = 0.0
        for i, x in enumerate(inputs):  # each call is a region: the scales advance in between
            first = {"is_first_microbatch": i == 0} if keeps_weight_cast else {}
            with float8lab.autocast(recipe=DELAYED):
                y = run(model, x * 10.0**i, use_reentrant=use_reentrant, **first)
            loss = loss + y.square().sum()
        return loss

    assert_checkpoint_changes_nothing(
        step, partial(float8lab.Linear, 32, 32, device="cpu") if keeps_weight_cast else FeedForward
    )


@each_mode
def test_converted_model_whose_scales_advance_with_each_call_is_unchanged(use_reentrant):
    def make_model():
        model = nn.Sequential(nn.Linear(32, 32), nn.GELU())
        float8lab.convert_to_float8(model, recipes.DelayedScaling())
        return model

    def twice(model, x):  # each call outside a region is a region: two scales within one checkpoint
        return model(100.0 * model(x))

    def step(model, run, x, *_):
        return run(twice, model, x, use_reentrant=use_reentrant).square().sum()

    assert_checkpoint_changes_nothing(step, make_model)


@each_function
@each_mode
def test_regions_of_several_precisions_inside_the_function_are_unchanged(function, use_reentrant):
    def mixed(model, x):
        with float8lab.autocast(recipe=DELAYED):
            x = model(x)
        with float8lab.autocast(enabled=False):
            x = model(x)
        with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
            return model(x * 8.0)

    def step(model, run, x, *_):
        return run(mixed, model, x, use_reentrant=use_reentrant).square().sum()

    assert_checkpoint_changes_nothing(step, function=function)


CHECKPOINT_FUNCTIONS = {
    f"{library}{kind}": partial(function, use_reentrant=kind == "reentrant")
    for library, function in (("torch-", TORCH_CHECKPOINT), ("", float8lab.checkpoint))
    for kind in ("reentrant", "non")
}


# From torch's reentrant checkpoint of the second module, if the outer forward has no gradients.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    ("recipe", "outer", "inner"),
    [
        (recipe, outer, inner)
        for recipe in RECIPES
        for outer in ("reentrant", "non", "torch-non")
        for inner in CHECKPOINT_FUNCTIONS
        if recipe == "delayed" or outer == inner == "torch-non"
    ],
)
def test_nested_checkpoints_change_nothing(recipe, outer, inner):
    def step(model, run, x, y, *_):
        inner_checkpoint = call_directly if run is call_directly else CHECKPOINT_FUNCTIONS[inner]

        def block(x):
            return model[2](inner_checkpoint(model[1], inner_checkpoint(model[0], x)))

        loss = 0.0
        for t in (x, 30.0 * y):
            with float8lab.autocast(recipe=RECIPES[recipe]):
                loss = loss + run(block, t).square().sum()
        with float8lab.autocast(enabled=False), torch.no_grad():
            block(x)
        return loss

    assert_checkpoint_changes_nothing(
        step,
        lambda: nn.ModuleList(FeedForward() for _ in range(3)),
        function=CHECKPOINT_FUNCTIONS[outer],
        steps=2,
    )


RECENT = recipes.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
"""The scales of this recipe change with every region."""


@pytest.fixture
def operands(monkeypatch):
    """The forward operands that are cast, each with whether that was in backward; no gradients."""
    casts = []

    def cast(*args):
        results = cast_op(*args)
        traced = torch.compiler.is_compiling()  # an op inside the graph is no call
        if not traced and args[3] == torch.float8_e4m3fn and results[0] is not None:
            casts.append((in_backward(), results[0].clone()))
        return results

    monkeypatch.setattr(operands_module, "cast_op", cast)
    return casts


def repeats_all_operands(operands, run):
    """Run three forwards, then their backwards: whether each recomputed all of its operands.

    None if a backward recomputed no operand.
    """
    outputs, originals = [], []
    for i in range(3):
        operands.clear()
        outputs.append(run(10.0**i * leaf(4, 32, seed=i)))
        originals.append([q for _, q in operands])
    results = []
    for y, qs in zip(outputs, originals, strict=True):
        operands.clear()
        y.square().sum().backward()
        recomputed = [q for is_in_backward, q in operands if is_in_backward]
        all_equal = all(
            any(torch.equal(q, recomputed_q) for recomputed_q in recomputed) for q in qs
        )
        results.append(all_equal if recomputed else None)
    return results


@pytest.mark.parametrize("outer", CHECKPOINT_FUNCTIONS)
@pytest.mark.parametrize("inner", [None, *CHECKPOINT_FUNCTIONS])
@pytest.mark.parametrize("regions", ["around", "inside"])
def test_recomputed_operands_have_the_bytes_of_their_forward(operands, outer, inner, regions):
    """The scales may advance between a forward and its backward, or within the function."""
    first, second = FeedForward(), FeedForward()
    region = partial(float8lab.autocast, recipe=RECENT)

    def apply_layers(x):
        return second(first(x))

    def apply_layers_twice(x):
        with region():
            x = apply_layers(x)
        with region():
            return apply_layers(100.0 * x)

    function = apply_layers_twice if regions == "inside" else apply_layers

    def run(x):
        with region() if regions == "around" else contextlib.nullcontext():
            if inner is None:
                return CHECKPOINT_FUNCTIONS[outer](function, x)
            return CHECKPOINT_FUNCTIONS[outer](
                lambda x: CHECKPOINT_FUNCTIONS[inner](function, x), x
            )

    for seed in range(2):  # afterwards every slot has a scale
        apply_layers_twice(leaf(4, 32, seed=seed))
    assert repeats_all_operands(operands, run) == [True] * 3


@pytest.mark.usefixtures("fresh_dynamo")
@each_mode
def test_compiled_recomputations_have_the_scales_of_the_last_forward(operands, use_reentrant):
    model = nn.Sequential(*(float8lab.Linear(32, 32, device="cpu") for _ in range(2)))
    for seed in range(2):
        with float8lab.autocast(recipe=RECENT):
            model(leaf(4, 32, seed=seed))

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def run(x):
        with float8lab.autocast(recipe=RECENT):
            return float8lab.checkpoint(model, x, use_reentrant=use_reentrant)

    repeats = repeats_all_operands(operands, run)
    assert repeats in ([False, False, True], [None] * 3)  # torch 2.11 saves the operands


@each_mode
def test_keywords_none_numbers_and_containers_reach_the_function(use_reentrant):
    mask = torch.arange(32) % 5 == 0

    def step(model, run, x, extra, first, shift):
        factor_and_shift = (first, {"shift": shift})
        with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
            y = run(
                model,
                x,
                mask,
                0.5,
                extra=extra,
                factor_and_shift=factor_and_shift,
                use_reentrant=use_reentrant,
            )
            y = run(model, y, None, extra=None, use_reentrant=use_reentrant)
        return y.square().sum()

    assert_checkpoint_changes_nothing(step)


@each_mode
def test_containers_without_gradients_are_not_copied(use_reentrant):
    def note(x, notes, *, more):
        notes.append(x.detach())
        more["seen"] = True
        return x * 2

    notes, more, x = [], {}, leaf(3)
    y = float8lab.checkpoint(note, x, notes, more=more, use_reentrant=use_reentrant)
    assert len(notes) == 1
    assert more["seen"]
    y.sum().backward()
    assert x.grad.tolist() == [2, 2, 2]


@each_mode
def test_keywords_with_names_of_torchs_options_reach_the_function(use_reentrant):
    def function(x, *, debug, preserve_rng_state):
        return x * debug * preserve_rng_state

    x = leaf(3)
    names = {"debug": 2.0, "preserve_rng_state": 3.0}
    float8lab.checkpoint(function, x, use_reentrant=use_reentrant, **names).sum().backward()
    assert x.grad.tolist() == [6, 6, 6]


@each_mode
def test_several_outputs_and_inputs_without_gradient_change_nothing(use_reentrant):
    def pair(model, x, y):
        return model(x), y.detach() * 2, model(y)

    def step(model, run, x, y, *_):
        with float8lab.autocast(recipe=DELAYED):
            a, b, c = run(pair, model, x, y.detach(), use_reentrant=use_reentrant)
        return (a * b + c).square().sum()

    assert_checkpoint_changes_nothing(step)


@each_mode
def test_returned_bias_stays_a_leaf(use_reentrant):
    layer = float8lab.Linear(32, 16, return_bias=True, device="cpu")
    x = torch.randn(4, 32, requires_grad=True)
    for _ in range(2):
        with float8lab.autocast(recipe=DELAYED):
            y, bias = float8lab.checkpoint(layer, x, use_reentrant=use_reentrant)
        (y + bias).sum().backward()
    assert layer.bias.is_leaf
    assert layer.bias.grad.tolist() == [8] * 16


@each_function
@each_mode
@pytest.mark.parametrize("enabled", [True, False])
def test_backward_inside_another_autocast_has_the_recipe_of_its_forward(
    enabled, function, use_reentrant
):
    model = FeedForward()
    checkpointed = copy.deepcopy(model)
    results = []
    for m, run in ((model, call_directly), (checkpointed, function)):
        torch.manual_seed(0)
        x = leaf(4, 32)
        with float8lab.autocast(recipe=DELAYED):
            y = run(m, x, use_reentrant=use_reentrant)
        with float8lab.autocast(enabled, recipe=recipes.Float8BlockScaling()):
            y.sum().backward()
            results.append((y, x.grad))
            assert STATE.autocast.recipe == recipes.Float8BlockScaling()  # unchanged
            assert STATE.autocast.enabled == enabled
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert_same(model, checkpointed)
    assert CHECKPOINTS.replay is None
    assert CHECKPOINTS.recordings == ()


class LibraryCheckpoint(torch.autograd.Function):
    """A checkpoint of another library; nothing tells its forward from other calls."""

    @staticmethod
    def forward(node, x, function, *parameters):
        node.x, node.function = x, function
        return function(x)

    @staticmethod
    def backward(node, dy):
        x = node.x.detach().requires_grad_()
        with torch.enable_grad():
            node.function(x).backward(dy)
        return x.grad, None, None, None


def test_recomputation_without_its_original_records_the_gradients_amax():
    layer = float8lab.Linear(32, 32, device="cpu")

    def run(x, recipe=DELAYED):
        with float8lab.autocast(recipe=recipe):
            return layer(x)

    x = leaf(4, 32)
    y = LibraryCheckpoint.apply(x, run, *layer.parameters())
    run(x, recipes.Float8CurrentScaling())  # the layer's last call
    y.backward(torch.full_like(y, 3.0))
    (slots,) = layer._fp8.slots.values()
    assert slots.tensors()["amax"][2] == 3.0


@each_mode
def test_checkpoint_of_stored_weights_changes_nothing(use_reentrant):
    def make_model():
        with float8lab.fp8_model_init():
            return FeedForward()

    def step(model, run, x, *_):
        with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
            return run(model, x, use_reentrant=use_reentrant).square().sum()

    assert_checkpoint_changes_nothing(step, make_model)


def test_checkpoint_recomputes_and_saves_memory():
    saved_sizes = []
    model = FeedForward()
    x = leaf(64, 32)
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved_sizes.append(t.numel()) or t, lambda t: t
        ),
        float8lab.autocast(recipe=DELAYED),
    ):
        model(x)
        direct_size = sum(saved_sizes)
        saved_sizes.clear()
        y = float8lab.checkpoint(model, x)
    assert model.calls == 2
    assert sum(saved_sizes) == x.numel() < direct_size / 4
    y.sum().backward()
    assert model.calls == 3


@each_mode
def test_second_backward_through_a_retained_graph_changes_nothing(use_reentrant):
    def step(model, run, x, *_):
        with float8lab.autocast(recipe=DELAYED):
            loss = run(model, x, use_reentrant=use_reentrant).square().sum()
        loss.backward(retain_graph=True)
        return loss

    assert_checkpoint_changes_nothing(step, steps=2)


def test_reading_saved_tensors_outside_backward_leaves_the_state():
    model = FeedForward()
    x = leaf(4, 32)
    with float8lab.autocast(recipe=DELAYED):
        y = float8lab.checkpoint(lambda x: model(x).exp(), x, use_reentrant=False)
    before = [t.clone() for t in state_of(model)]
    assert torch.equal(y.grad_fn._saved_result, y)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True))


@pytest.mark.parametrize("fails_in", ["forward", "recomputation"])
@each_mode
def test_exception_leaves_the_state_as_it_was(fails_in, use_reentrant):
    model = FeedForward()
    fail = fails_in == "forward"

    def run(x):
        y = model(x)
        if fail:
            raise ArithmeticError
        return y.exp()

    x = leaf(4, 32)
    with contextlib.suppress(ArithmeticError), float8lab.autocast(recipe=DELAYED):
        y = float8lab.checkpoint(run, x, use_reentrant=use_reentrant)
    if fails_in == "recomputation":
        fail = True
        with pytest.raises(ArithmeticError):
            y.sum().backward()
    assert CHECKPOINTS.replay is None
    assert CHECKPOINTS.recordings == ()
    assert STATE.autocast.enabled is None


def test_function_that_runs_other_modules_in_recomputation_raises():
    layer = float8lab.Linear(32, 32, device="cpu")
    times = iter([1, 2])

    def run(x):
        for _ in range(next(times)):
            x = layer(x)
        return x

    with float8lab.autocast(recipe=DELAYED):
        y = float8lab.checkpoint(run, leaf(4, 32))
    with pytest.raises(RuntimeError, match="same modules"):
        y.sum().backward()


@each_mode
def test_random_streams_repeat_in_recomputation(use_reentrant):
    trackers = {}

    def dropout(model, get, x):
        with get().fork():
            x = F.dropout(x, 0.5)
        return F.dropout(model(x), 0.5)

    def step(model, run, x, *_):
        tracker = trackers.setdefault(run, float8lab.CudaRNGStatesTracker("cpu"))
        if not tracker.get_states():
            tracker.add("model-parallel-rng", 5)
        with float8lab.autocast(recipe=DELAYED):
            y = run(
                dropout, model, lambda: tracker, x,
                get_rng_state_tracker=lambda: tracker, use_reentrant=use_reentrant,
            )  # fmt: skip
        with tracker.fork():  # another draw before backward
            y = y * torch.rand(())
        return y.square().sum()

    assert_checkpoint_changes_nothing(step)
    states = [t.get_states()["model-parallel-rng"] for t in trackers.values()]
    assert torch.equal(*states)


class MegatronTracker(float8lab.CudaRNGStatesTracker):
    """A tracker that, like Megatron's, keeps the dict of ``set_states`` and writes into it."""

    def __init__(self):
        super().__init__("cpu")
        self.add("model-parallel-rng", 5)
        self.states = super().get_states()

    def get_states(self):
        return dict(self.states)

    def set_states(self, states):
        self.states = states

    @contextlib.contextmanager
    def fork(self, name="model-parallel-rng"):
        super().set_states(self.states)
        try:
            with super().fork(name):
                yield
        finally:
            self.states |= super().get_states()


@each_mode
def test_every_backward_through_a_retained_graph_repeats_a_trackers_numbers(use_reentrant):
    tracker = MegatronTracker()

    def dropout(x):
        with tracker.fork():
            return F.dropout(x, 0.5)

    x = torch.ones(64, requires_grad=True)
    y = float8lab.checkpoint(
        dropout, x, get_rng_state_tracker=lambda: tracker, use_reentrant=use_reentrant
    )
    for _ in range(3):
        x.grad = None
        y.sum().backward(retain_graph=True)
        assert torch.equal(x.grad, y)


def test_distribute_saved_activations_runs_on_one_rank():
    x = leaf(4, 32)
    float8lab.checkpoint(FeedForward(), x, distribute_saved_activations=True).sum().backward()
    assert x.grad is not None


def assert_equal_steps(eager, model, run_eager, run_compiled, recipe):
    torch._dynamo.reset()
    x, x2 = leaf(4, 32), leaf(4, 32)
    with float8lab.autocast(recipe=recipe):
        y, y2 = run_eager(x), run_compiled(x2)
    assert torch.equal(y, y2)
    y.square().sum().backward()
    y2.square().sum().backward()
    assert torch.equal(x.grad, x2.grad)
    assert_same(eager, model)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "use_reentrant"),
    [("current", True), ("rowwise", False), ("block", True), ("mx", False)],
)
def test_checkpoint_compiles_without_graph_breaks(name, use_reentrant):
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = float8lab.Linear(32, 64, device="cpu")
            self.down = float8lab.Linear(64, 32, device="cpu")

        def forward(self, x, *, scale=1.0):
            return self.down(F.gelu(self.up(x))) * scale

    eager = Plain()
    model = copy.deepcopy(eager)

    def step(model, x):
        return float8lab.checkpoint(model, x, scale=0.5, use_reentrant=use_reentrant)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert_equal_steps(eager, model, partial(step, eager), partial(compiled, model), RECIPES[name])


@each_mode
def test_compiled_module_recomputes_in_the_precision_of_its_forward(use_reentrant):
    eager = float8lab.Linear(32, 32, device="cpu")
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    checkpointed_run = partial(float8lab.checkpoint, compiled, use_reentrant=use_reentrant)
    assert_equal_steps(eager, model, eager, checkpointed_run, recipes.Float8CurrentScaling())


@pytest.mark.gpu
@each_mode
def test_random_streams_and_fp8_results_repeat_on_a_gpu(use_reentrant):
    results = []
    model = FeedForward(64, device="cuda")
    for m, run in ((model, call_directly), (copy.deepcopy(model), float8lab.checkpoint)):
        tracker = float8lab.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 5)

        def function(x, m=m, tracker=tracker):
            with tracker.fork():
                x = F.dropout(x, 0.5)
            return m(x)

        torch.manual_seed(0)
        x = leaf(32, 64).detach().cuda().requires_grad_()
        with float8lab.autocast(recipe=DELAYED):
            y = run(
                function, x, get_rng_state_tracker=lambda t=tracker: t, use_reentrant=use_reentrant
            )
        torch.rand(3, device="cuda")
        y.square().sum().backward()
        results.append((y.detach(), x.grad, *(p.grad for p in m.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
