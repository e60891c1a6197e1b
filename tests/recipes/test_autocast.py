"""autocast, regions and delayed-scaling state: what advances and when, and what never does."""

import concurrent.futures
import copy
import functools
import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import float8lab
from float8lab import recipes
from float8lab.recipes.delayed import RECORDED
from float8lab.recipes.recording import CHECKPOINTS
from float8lab.recipes.region import STATE, Region
from tests.near_ties import by_multiplying, near_ties
from tests.nn.models import gemms_of, in_thread

DELAYED = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max")
CURRENT = recipes.Float8CurrentScaling()


def layer(K=32, N=16):
    return float8lab.Linear(K, N, device="cpu")


def slots_of(module, recipe=DELAYED):
    return module._fp8.slots[recipe, None]


def steps(module, recipe=DELAYED):
    return slots_of(module, recipe).tensors()["steps"].tolist()


def history(module, recipe=DELAYED):
    return slots_of(module, recipe).tensors()["history"]


def scales(module, recipe=DELAYED):
    return slots_of(module, recipe).tensors()["scale"].clone()


def call(module, value, recipe=DELAYED):
    """Run a region with one call, whose inputs all have this value."""
    with float8lab.autocast(recipe=recipe):
        return module(torch.full((2, 32), float(value)))


def encode_pow2(amax, largest=448.0):
    return 2.0 ** torch.floor(torch.log2(torch.tensor(largest) / amax))


def test_state_is_restored_on_exit_and_after_an_exception():
    assert STATE.autocast.enabled is None
    with float8lab.autocast(recipe=CURRENT):
        assert STATE.autocast.enabled is True
        assert STATE.autocast.recipe == CURRENT
        with float8lab.autocast(enabled=False):
            assert STATE.autocast.enabled is False
        assert STATE.autocast.enabled is True
    assert STATE.autocast.enabled is None

    with pytest.raises(KeyError), float8lab.autocast(recipe=CURRENT):
        raise KeyError("x")
    assert STATE.autocast.enabled is None
    assert STATE.region is None


def test_one_instance_can_be_used_in_sequence_but_not_nested():
    region = float8lab.autocast(recipe=CURRENT)
    assert not hasattr(region, "__dict__")
    m = layer()
    for _ in range(2):
        with region:
            m(torch.ones(2, 32))
    with region:
        second = region
        with pytest.raises(RuntimeError, match="must not be entered again while it is active"):
            second.__enter__()
    assert STATE.autocast.enabled is None


def test_decorator_may_recurse():
    m = layer()

    @float8lab.autocast(recipe=CURRENT)
    def run(depth):
        assert STATE.autocast.recipe == CURRENT
        return m(torch.ones(1, 32)) if depth == 0 else run(depth - 1)

    assert run(3).shape == (1, 16)
    assert STATE.autocast.enabled is None


def test_a_decorated_generator_records_what_it_runs_after_its_last_yield(monkeypatch):
    monkeypatch.setattr(float8lab.autocast, "_warns_of_idle_regions", True)
    m = layer()

    @float8lab.autocast(recipe=DELAYED)
    def outputs(*later):
        yield m(torch.ones(2, 32))
        for value in later:
            m(torch.full((2, 32), value))

    assert len([*outputs(8.0)]) == 1
    assert steps(m) == [2, 2, 0]  # a generator enters a region whenever it goes on
    assert history(m)[0, 0] == 8.0
    assert len([*outputs()]) == 1  # without a warning about its last region
    assert steps(m) == [3, 3, 0]
    assert STATE.region is None


@pytest.mark.parametrize(
    "context", [float8lab.autocast, float8lab.fp8_autocast, float8lab.quantized_model_init]
)
def test_async_functions_cannot_be_decorated(context):
    async def returns():
        pass

    async def yields():
        yield

    for function in (returns, yields, functools.partial(returns)):
        with pytest.raises(TypeError, match=rf"^{context.__name__} must decorate .* around code"):
            context()(function)


def test_fp8_autocast_is_accepted_and_no_recipe_means_delayed_scaling():
    m, older_arguments = layer(), {"fp8_recipe": DELAYED, "fp8_group": None}
    with float8lab.fp8_autocast(enabled=True, calibrating=False, **older_arguments):
        m(torch.ones(2, 32))
    assert steps(m) == [1, 1, 0]
    call(m, 1, None)
    assert steps(m, recipes.DelayedScaling()) == [1, 1, 0]


def test_innermost_region_and_pinned_recipes_take_precedence():
    x = torch.randn(4, 32)
    plain = layer()
    assert gemms_of(plain, x) == (0, 1)  # outside autocast: high precision
    with float8lab.autocast(enabled=False):
        assert gemms_of(plain, x) == (0, 1)
        with float8lab.autocast(recipe=CURRENT):
            assert gemms_of(plain, x) == (1, 0)
    converted = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    float8lab.convert_to_float8(converted, CURRENT, overrides={"1": None})
    assert gemms_of(converted, x) == (1, 1)
    with float8lab.autocast():  # keeps the recipe of each layer
        assert gemms_of(converted, x) == (1, 1)
    assert not converted[0]._fp8.slots
    # Overrides the recipe of layer 0, not the pinned one of layer 1.
    with float8lab.autocast(recipe=DELAYED):
        assert gemms_of(converted, x) == (1, 1)
    assert (DELAYED, None) in converted[0]._fp8.slots
    with float8lab.autocast(enabled=False):
        assert gemms_of(converted, x) == (0, 2)


def test_region_without_fp8_modules_warns_once_and_names_the_modules(monkeypatch):
    monkeypatch.setattr(float8lab.autocast, "_warns_of_idle_regions", True)
    torch._dynamo.utils.counters.clear()
    m = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
    with (
        pytest.warns(
            UserWarning,
            match=r"it saw m \(Sequential, 2 torch\.nn\.Linear layers not converted\)\. Convert",
        ) as caught,
        float8lab.autocast(),
    ):
        m(torch.ones(1, 4))
    assert caught[0].filename == __file__
    with float8lab.autocast():  # no second warning: filterwarnings = error would raise here
        m(torch.ones(1, 4))


def test_region_with_fp8_modules_does_not_warn(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(float8lab.autocast, "_warns_of_idle_regions", True)
    call(torch.compile(layer(), fullgraph=True, backend="aot_eager"), 1, CURRENT)
    call(layer(), 1, None)


def test_scales_follow_the_history_of_earlier_regions():
    m = layer()
    for value in (2.0, 8.0, 1.0):
        x = torch.full((4, 32), value, requires_grad=True)
        with float8lab.autocast(recipe=DELAYED):
            y = m(x)
        y.backward(torch.full_like(y, 3.0 * value))
    assert history(m)[:, 0].tolist() == [1.0, 8.0, 2.0, 0.0]
    weight_amax = m.weight.detach().abs().max()
    assert history(m)[0, 1] == weight_amax
    # Gradients advance with the next region, so two of the three have entered.
    assert history(m)[:, 2].tolist() == [24.0, 6.0, 0.0, 0.0]
    expected = 1 / torch.stack(
        [
            encode_pow2(torch.tensor(8.0)),
            encode_pow2(weight_amax),
            encode_pow2(torch.tensor(24.0), 57344.0),
        ]
    )
    assert torch.equal(scales(m), expected)


def test_call_uses_the_scale_of_the_previous_region():
    m = layer()
    call(m, 1.0, recipes.DelayedScaling())
    before = scales(m, recipes.DelayedScaling())[0]
    with float8lab.autocast(recipe=recipes.DelayedScaling()):
        m(torch.full((1, 32), 448.0 * 16))  # saturates at the old scale
        assert scales(m, recipes.DelayedScaling())[0] == before
    assert scales(m, recipes.DelayedScaling())[0] == 16.0


def test_n_calls_in_a_region_advance_once_with_the_largest_amax():
    m, other = layer(), layer()
    with float8lab.autocast(recipe=DELAYED):
        for value in (1.0, 5.0, 2.0):
            m(torch.full((2, 32), value))
            other(torch.ones(2, 32))
    assert steps(m) == [1, 1, 0]
    assert history(m)[:, 0].tolist() == [5.0, 0.0, 0.0, 0.0]
    call(other, 1)
    assert steps(other) == [2, 2, 0]
    assert steps(m) == [1, 1, 0]  # m was not called


def test_all_modules_of_a_region_share_one_update(monkeypatch):
    from float8lab.recipes import delayed

    launches = []
    monkeypatch.setattr(delayed.ops, "update_scales_op", lambda *a: launches.append(a[1].numel()))
    modules = [layer() for _ in range(5)]
    for _ in range(2):
        with float8lab.autocast(recipe=DELAYED):
            for m in modules:
                m(torch.ones(2, 32))
    assert launches == [15, 15]


def test_nested_enabled_regions_advance_at_the_exit_of_the_outermost():
    m = layer()
    with float8lab.autocast(recipe=DELAYED):
        call(m, 1)
        assert steps(m) == [0, 0, 0]
        with float8lab.autocast(enabled=False), float8lab.autocast(recipe=DELAYED):
            m(torch.full((2, 32), 7.0))
        assert steps(m) == [0, 0, 0]
    assert steps(m)[0] == 1
    assert history(m)[0, 0] == 7.0
    with float8lab.autocast(enabled=False):
        call(m, 1)
        assert steps(m)[0] == 2


def test_exception_in_a_region_advances_nothing_and_is_forgotten():
    m = layer()
    with float8lab.autocast(recipe=DELAYED):
        m(torch.full((2, 32), 2.0)).sum().backward()
    before = {k: v.clone() for k, v in slots_of(m).tensors().items() if k != "amax"}

    with pytest.raises(KeyError), float8lab.autocast(recipe=DELAYED):  # noqa: PT012
        m(torch.full((2, 32), 1000.0))
        raise KeyError("x")
    after = slots_of(m).tensors()
    assert all(torch.equal(before[k], after[k]) for k in before)
    call(m, 4.0)
    assert history(m)[:2, 0].tolist() == [4.0, 2.0]  # no 1000
    assert steps(m) == [2, 2, 1]  # the slot of dy advanced


def state(module, recipe=DELAYED):
    """The tensors of a module's slots, and which slots have a scale."""
    slots = slots_of(module, recipe)
    return {name: tensor.tolist() for name, tensor in slots.tensors().items()}, slots.seeded


@pytest.mark.parametrize("calibrating", [False, True], ids=["", "calibrating"])
def test_aborted_first_region_is_forgotten(calibrating):
    m = layer()
    twin = copy.deepcopy(m)
    x = torch.randn(2, 32)
    with pytest.raises(KeyError), float8lab.autocast(not calibrating, calibrating, DELAYED):  # noqa: PT012
        m(x * 1e6)
        raise KeyError("x")
    for module in (m, twin):
        with float8lab.autocast(recipe=DELAYED):
            y = module(x)
            y.square().sum().backward()
    assert state(m) == state(twin)
    assert torch.equal(m.weight.grad, twin.weight.grad)
    assert y.any()


class Failing(torch.autograd.Function):
    """Raises in backward if it is given an exception."""

    @staticmethod
    def forward(ctx, x, exception):
        ctx.exception = exception
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if ctx.exception is not None:
            raise ctx.exception
        return dy, None


def through_checkpoint(use_reentrant, function=checkpoint):
    return lambda module, x: function(module, x, use_reentrant=use_reentrant)


@pytest.mark.parametrize(
    "run",
    [
        lambda module, x: module(x), through_checkpoint(True), through_checkpoint(False),
        through_checkpoint(True, float8lab.checkpoint),
    ],
    ids=["plain", "reentrant", "non-reentrant", "float8lab"],
)  # fmt: skip
def test_aborted_backward_is_forgotten(run):
    originals = torch.nn.ModuleList([layer(), layer()])
    twins = copy.deepcopy(originals)
    # The backward passes of five steps, and the passes of each step that may leave a trace.
    passes = ["abort", "good", "abort good", "good abort", "good"]
    traces = ["", "good", "good", "", "good"]

    def step(modules, backwards):
        module, other = modules
        x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
        with float8lab.autocast(recipe=DELAYED):
            good = run(module, x).square().sum()
            aborted = run(module, Failing.apply(x, KeyError("x"))).square().sum() * 1e12
            other(x)  # a second module in the pack
        for backward in backwards.split():
            module.weight.grad = None
            if backward == "good":
                good.backward()
            else:
                with pytest.raises(KeyError):
                    aborted.backward()

    for passes_of_original, passes_of_twin in zip(passes, traces, strict=True):
        step(originals, passes_of_original)
        step(twins, passes_of_twin)
        assert state(originals[0]) == state(twins[0])
    assert torch.equal(originals[0].weight.grad, twins[0].weight.grad)


def test_recipes_that_differ_in_any_field_share_no_state():
    m = layer()
    other = recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max", margin=1)
    for recipe in (DELAYED, other, DELAYED):
        call(m, 1, recipe)
    assert steps(m, DELAYED)[0] == 2
    assert steps(m, other)[0] == 1
    assert slots_of(m, DELAYED).pack is not slots_of(m, other).pack


def test_eval_changes_no_state():
    m = layer()
    call(m, 1)
    m.eval()
    before = scales(m)
    with float8lab.autocast(recipe=DELAYED):
        m(torch.full((2, 32), 100.0)).sum().backward()
    with float8lab.autocast(recipe=DELAYED):
        pass
    assert steps(m)[0] == 1
    assert torch.equal(scales(m), before)


@pytest.mark.parametrize("training", [True, False])
def test_calibration_keeps_the_history_of_all_batches_and_ends_usable(training):
    m = layer().train(training)
    for value in (3.0, 9.0, 5.0):
        with float8lab.autocast(enabled=False, calibrating=True, recipe=DELAYED):
            x = torch.full((2, 32), value)
            assert torch.equal(m(x), torch.nn.functional.linear(x, m.weight, m.bias))
    assert history(m)[:, 0].tolist() == [5.0, 9.0, 3.0, 0.0]
    m.eval()
    x = torch.full((2, 32), 9.0)
    with float8lab.autocast(recipe=DELAYED):
        y = m(x)
    assert scales(m)[0] == 1 / encode_pow2(torch.tensor(9.0))
    exact = torch.nn.functional.linear(x, m.weight, m.bias)
    assert (y - exact).norm() / exact.norm() < 0.05


def test_calibration_records_amaxes_of_weights_stored_in_fp8():
    with float8lab.fp8_model_init():
        m = layer()
    with (
        float8lab.fallback("error"),
        float8lab.autocast(enabled=False, calibrating=True, recipe=DELAYED),
    ):
        m(torch.full((2, 32), 3.0))
    assert history(m)[0, :2].tolist() == [3.0, m.weight.dequantize().abs().max().item()]


@pytest.mark.parametrize(
    ("field", "value"),
    [("reduce_amax", False), ("interval", 2), ("margin", 3), ("power_of_2_scale", False)],
)
def test_fields_of_delayed_scaling_take_effect(field, value):
    base, changed = recipes.DelayedScaling(), recipes.DelayedScaling(**{field: value})
    x = [torch.full((1, 32), v) for v in (3.0, 50.0)]
    result = {}
    for recipe in (base, changed):
        m = layer()
        for batch in x:
            with float8lab.autocast(recipe=recipe):
                m(batch)
        result[recipe] = scales(m, recipe)[0]
    expected = {
        "reduce_amax": result[base],  # no effect on one process: see the distributed tests
        "interval": 1 / encode_pow2(torch.tensor(3.0)),
        "margin": result[base] * 8,
        "power_of_2_scale": 1 / (torch.tensor(448.0) / 50.0),
    }
    assert result[changed] == expected[field]


def test_amax_history_len_and_algo_take_effect():
    for algo, expected in (("most_recent", 2.0), ("max", 8.0), (lambda h: h[1].double(), 8.0)):
        recipe = recipes.DelayedScaling(amax_history_len=2, amax_compute_algo=algo)
        m = layer()
        for value in (64.0, 8.0, 2.0):
            call(m, value, recipe)
        assert scales(m, recipe)[0] == 1 / encode_pow2(torch.tensor(expected))


def test_scaling_factor_compute_algo_takes_effect():
    calls = []

    def algo(amax, old_scaling_factor, fp8_max, recipe):
        calls.append((amax[0].item(), old_scaling_factor[0].item(), fp8_max.tolist(), recipe))
        return fp8_max / amax / 2

    recipe = recipes.DelayedScaling(scaling_factor_compute_algo=algo)
    m = layer()
    call(m, 7.0, recipe)
    assert calls == [(7.0, 64.0, [448.0, 448.0, 57344.0], recipe)]
    assert scales(m, recipe)[0] == 1 / 32.0
    recipe = recipes.DelayedScaling(
        interval=2, amax_history_len=2, amax_compute_algo="max", scaling_factor_compute_algo=algo
    )
    m = layer()
    for value, amax in ((7.0, 7.0), (28.0, 7.0), (14.0, 28.0), (3.5, 28.0), (1.0, 3.5)):
        call(m, value, recipe)  # every second amax sets the scale, to that of the last two
        assert scales(m, recipe)[0] == amax / 224


@pytest.mark.parametrize("encode", [0.0, -1.0, torch.inf, torch.nan])
def test_unusable_factor_of_scaling_factor_compute_algo_keeps_the_scale(encode):
    factors = [64.0, encode]
    recipe = recipes.DelayedScaling(
        scaling_factor_compute_algo=lambda amax, *_: torch.full_like(amax, factors.pop(0))
    )
    m = layer()
    for _ in range(2):
        call(m, 7.0, recipe)
        assert scales(m, recipe)[0] == 1 / 64


@pytest.mark.parametrize("name", ["amax_compute_algo", "scaling_factor_compute_algo"])
@pytest.mark.parametrize(
    ("result", "error", "complaint"),
    [
        (
            torch.ones(7),
            ValueError,
            r"have shape \(3,\); got \(7,\)\. Return one for each slot",
        ),
        (torch.ones(3, 1), ValueError, r"have shape \(3,\); got \(3, 1\)"),
        (torch.tensor(1.0), ValueError, r"have shape \(3,\); got \(\)"),
        (1.0, TypeError, r"be a torch\.Tensor; got 1\.0"),
    ],
)
def test_algo_must_return_a_value_for_each_slot(name, result, error, complaint):
    values = [torch.ones(3), result]
    recipe = recipes.DelayedScaling(**{name: lambda *arguments: values.pop(0)})
    m = layer()
    call(m, 7.0, recipe)
    before = scales(m, recipe)
    with pytest.raises(error, match=f"the result of {name} must {complaint}"):
        call(m, 28.0, recipe)
    assert torch.equal(scales(m, recipe), before)


@pytest.mark.parametrize("bias", [True, False])
def test_an_input_on_another_device_leaves_the_scales_as_they_are(bias):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=bias))
    float8lab.convert_to_float8(model, DELAYED)
    model(torch.ones(4, 16))
    before = history(model[0]).clone()
    with pytest.raises(ValueError, match=r"inp must be on cpu; got one on meta\. Move it"):
        model(torch.ones(4, 16, device="meta"))
    assert torch.equal(history(model[0]), before)
    assert steps(model[0])[0] == 1


def test_converted_delayed_model_advances_once_a_call():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
    model.append(model[0])  # called twice
    float8lab.convert_to_float8(model, DELAYED)
    for _ in range(3):
        model(torch.randn(4, 16)).sum().backward()
    assert steps(model[0]) == [3, 3, 2]
    assert steps(model[1]) == [3, 3, 2]
    assert slots_of(model[0]).pack is slots_of(model[1]).pack
    model[1](torch.randn(4, 16))  # alone, the layer is its own region
    assert steps(model[1]) == [4, 4, 3]  # the last gradient counts, too
    model.eval()
    model(torch.randn(4, 16))
    assert steps(model[0])[0] == 3


# Torch calls no hook after a KeyboardInterrupt, so the next call of any model closes the region.
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_exception_in_a_converted_delayed_model_leaves_no_region_open(error):
    class Fails(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(16, 16)
            self.fail = True

        def forward(self, x):
            y = self.inner(x)
            if self.fail:
                raise error("x")
            return y

    for call_next in ("model", "autocast"):
        model = float8lab.convert_to_float8(Fails(), DELAYED)
        with pytest.raises(error):
            model(torch.full((2, 16), 100.0))
        assert error is KeyboardInterrupt or STATE.region is None
        if call_next == "autocast":
            other, x = layer(), torch.ones(4, 32)
            with float8lab.autocast(recipe=DELAYED):
                other(x)
            assert STATE.region is None
            assert CHECKPOINTS.recordings == ()
            assert steps(other)[0] == 1
        model.fail = False
        model(torch.full((2, 16), 2.0))
        assert history(model.inner)[:, 0].tolist() == [2.0, 0.0, 0.0, 0.0]
        assert steps(model.inner)[0] == 1


def test_a_converted_delayed_model_that_calls_itself_is_one_region():
    class Twice(torch.nn.Sequential):
        def forward(self, x, again=True):
            y = self[0](x)
            return self[1](self(y, again=False) if again else y)

    model = float8lab.convert_to_float8(
        Twice(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)), DELAYED
    )
    model(torch.ones(2, 16))
    assert [steps(inner)[0] for inner in model] == [1, 1]
    assert STATE.region is None


def test_calls_of_a_converted_delayed_model_on_two_threads_leave_no_region_open():
    in_first, in_second = threading.Event(), threading.Event()

    class Waits(torch.nn.Sequential):
        def forward(self, x, event=None, other=None):
            y = super().forward(x)
            if event is not None:
                event.set()
                assert other.wait(30)
            return y

    model = float8lab.convert_to_float8(Waits(torch.nn.Linear(16, 16)), DELAYED)
    x = torch.ones(2, 16)
    model(x)

    def second():
        assert in_first.wait(30)
        model(x, in_second, in_second)
        return STATE.region

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        region = executor.submit(second)
        model(x, in_first, in_second)
        assert region.result() is None
    assert STATE.region is None


def test_region_takes_in_the_amaxes_of_a_cuda_graph_replayed_inside_it():
    recipe = recipes.DelayedScaling(amax_history_len=3)
    layer = float8lab.Linear(16, 16, device="cpu")
    with float8lab.autocast(recipe=recipe):
        layer(torch.randn(4, 16))
    slots = layer._fp8.slots[recipe, None]
    RECORDED.packs.add(slots.pack)  # as casts do when a compiled graph is captured
    state = slots.tensors()
    state["amax"][:2] = torch.tensor([448.0, 224.0])  # as a replay does, without Python
    with float8lab.autocast(recipe=recipe):
        layer.eval()(torch.randn(4, 16))
    assert state["history"][0, :2].tolist() == [448.0, 224.0]
    assert state["scale"][:2].tolist() == [1.0, 0.5]
    assert state["steps"].tolist() == [2, 2, 0]
    with float8lab.autocast(recipe=recipe):  # no new amaxes, so nothing to take in
        layer(torch.randn(4, 16))
    assert state["steps"].tolist() == [2, 2, 0]


@pytest.mark.parametrize("delayed", [False, True], ids=["current", "delayed"])
@pytest.mark.parametrize("make", ["linear", "mlp", "transformer"])
def test_default_dtype_changes_no_result(make, delayed):
    """Frameworks that train in bfloat16 set it as the default while a model runs."""
    recipe = recipes.DelayedScaling(fp8_dpa=True) if delayed else recipes.Float8CurrentScaling()

    def run(default):
        torch.manual_seed(0)
        kwargs = {"device": "cpu", "params_dtype": torch.bfloat16}
        module = {
            "linear": lambda: float8lab.Linear(32, 24, **kwargs),
            "mlp": lambda: float8lab.LayerNormMLP(32, 64, **kwargs),
            "transformer": lambda: float8lab.TransformerLayer(
                32, 64, 4, attn_input_format="bshd", drop_path_rate=0.1, attention_dropout=0.0,
                **kwargs,
            ),
        }[make]()  # fmt: skip
        x = torch.randn(2, 12, 32, dtype=torch.bfloat16, requires_grad=True)
        outputs = []
        torch.set_default_dtype(default)
        for _ in range(3):
            with float8lab.autocast(recipe=recipe):
                y = module(x)
            y.sum().backward()
            outputs.append(y)
        return [*outputs, x.grad, *(p.grad for p in module.parameters())]

    try:
        pairs = zip(run(torch.float32), run(torch.bfloat16), strict=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(torch.equal(a, b) for a, b in pairs)


FP8_ATTENTION = recipes.DelayedScaling(fp8_dpa=True)
ROWWISE = recipes.Float8RowwiseScaling()


def converted_model():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    float8lab.convert_to_float8(model, DELAYED)
    return model


class Attention(torch.nn.Module):
    """FP8 attention, with parameters to train before it."""

    def __init__(self):
        super().__init__()
        self.project = layer(32, 32)
        self.attend = float8lab.DotProductAttention(
            2, 16, qkv_format="bshd", attn_mask_type="no_mask", attention_dropout=0.0
        )

    def forward(self, x):
        qkv = self.project(x).view(2, -1, 2, 16)
        with float8lab.autocast(recipe=FP8_ATTENTION):
            return self.attend(qkv, qkv, qkv)


class Microbatches(torch.nn.Module):
    """A layer that keeps the cast of its weight."""

    def __init__(self):
        super().__init__()
        self.layer = layer(32, 32)
        self.casts = 0

    def forward(self, x):
        self.casts += 1
        with float8lab.autocast(recipe=DELAYED):
            return self.layer(x, is_first_microbatch=self.casts == 1)


class InAutocast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer(32, 32)

    def forward(self, x):
        with float8lab.autocast(
            recipe=DELAYED, enabled=self.training, calibrating=not self.training
        ):
            return self.layer(x)


class StoredExperts(torch.nn.Module):
    """Experts whose FP8 weights are one tensor, which the module remembers."""

    def __init__(self):
        super().__init__()
        self.project = layer(32, 32)
        with float8lab.fp8_model_init(recipe=ROWWISE):
            self.experts = float8lab.GroupedLinear(2, 32, 32, device="cpu")

    def forward(self, x):
        with float8lab.autocast(recipe=ROWWISE):
            return self.experts(self.project(x), [3, 5])


@pytest.mark.parametrize(
    "make", [converted_model, InAutocast, Microbatches, Attention, StoredExperts]
)
def test_training_continues_on_the_state_after_calls_in_inference_mode(make):
    model = make()

    def run(model, mode):
        """Return the results of training with calls in ``mode`` before, between and after steps."""
        results = []
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
        for training in (False, True):
            for step in range(2):
                with mode():
                    results.append(model.train(training)(x * 3.0**step).clone())
                y = model.train()(x * 2.0**step)
                y.square().sum().backward()
                results += [y, *(p.grad.clone() for p in model.parameters())]
            with mode():
                for module in (m for m in model.modules() if hasattr(m, "_fp8")):
                    module._fp8 = copy.deepcopy(module._fp8)
        return [*results, *float8lab.nn.ScalingState(model).state_dict().values()]

    expected = run(copy.deepcopy(model), torch.no_grad)
    got = run(model, torch.inference_mode)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_region_applies_on_its_own_thread_only():
    m, x = layer(), torch.randn(4, 32)
    with float8lab.autocast(recipe=CURRENT):
        assert in_thread(lambda: gemms_of(m, x)) == (0, 1)
        assert gemms_of(m, x) == (1, 0)

        def nested():
            with float8lab.autocast(enabled=False):
                return gemms_of(m, x)

        assert in_thread(nested) == (0, 1)
        assert gemms_of(m, x) == (1, 0)


def test_exits_interleaved_with_those_of_another_thread_leave_nothing_active():
    entered, left = threading.Event(), threading.Event()

    def run_region():
        with float8lab.autocast(recipe=CURRENT):
            entered.set()
            left.wait()
        return STATE.autocast.enabled, STATE.region

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        with float8lab.autocast(recipe=CURRENT):
            result = executor.submit(run_region)
            entered.wait()
        left.set()
        assert result.result() == (None, None)
    assert (STATE.autocast.enabled, STATE.region) == (None, None)


def test_models_trained_on_two_threads_at_once_have_the_losses_of_separate_training():
    barrier = threading.Barrier(2)

    def train(seed, wait):
        generator = torch.Generator().manual_seed(seed)
        a, b = layer(32, 32), layer()
        for p in (*a.parameters(), *b.parameters()):
            torch.nn.init.normal_(p, generator=generator)
        optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1)
        losses = []
        for step in range(4):
            x = torch.randn(4, 32, generator=generator) * 3.0**step
            with float8lab.autocast(recipe=DELAYED):
                wait()  # both threads are inside
                hidden = checkpoint(a, x.requires_grad_(), use_reentrant=step % 2 == 0)
                wait()
                loss = b(hidden).square().mean()
            wait()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, steps(a), scales(a).tolist(), scales(b).tolist()

    one_after_another = [train(seed, lambda: None) for seed in (1, 2)]
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        together = executor.map(lambda seed: train(seed, barrier.wait), (1, 2))
    assert list(together) == one_after_another


def test_model_init_decorator_may_run_on_several_threads():
    entered, left = threading.Event(), threading.Event()

    @float8lab.quantized_model_init()
    def build(first):
        if first:
            entered.set()
            left.wait()
        return type(layer().weight.data)

    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        result = executor.submit(build, True)
        entered.wait()
        with float8lab.quantized_model_init(enabled=False):
            assert build(False) is float8lab.Float8Tensor
            left.set()
            assert result.result() is float8lab.Float8Tensor
            assert type(layer().weight.data) is torch.Tensor


def test_enter_that_raises_leaves_nothing_active(monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(Region, "expect", fail)
    region = float8lab.autocast()
    for _ in range(2):
        with pytest.raises(MemoryError):
            region.__enter__()
        assert (STATE.autocast.enabled, STATE.region) == (None, None)
    monkeypatch.undo()
    m = layer()
    with region:
        m(torch.ones(2, 32))
    assert steps(m, recipes.DelayedScaling())[0] == 1


@pytest.mark.parametrize("scale_origin", ["seeded", "advanced", "loaded"])
def test_delayed_casts_multiply_by_the_encode_factor(scale_origin):
    recipe = recipes.DelayedScaling(power_of_2_scale=False)
    for x in near_ties(4)[:, None]:
        model = float8lab.convert_to_float8(layer(K=160), recipe)
        with torch.no_grad():
            model(x)
            if scale_origin != "seeded":
                model(x)
            if scale_origin == "loaded":
                state = float8lab.nn.ScalingState(model).state_dict()
                model = float8lab.convert_to_float8(layer(K=160), recipe)
                float8lab.nn.ScalingState(model).load_state_dict(state)
        slots = slots_of(model, recipe)
        factors = slots.scale_for(0, x, record=False).factors
        cast_arguments = (torch.float8_e4m3fn, (-1, -1), "encode")
        q, _, _ = float8lab.ops.reference.quantize(x, *cast_arguments, given=factors.encode)
        assert torch.equal(q.view(torch.uint8), by_multiplying(x))
        assert torch.equal(factors.scale, 1 / factors.encode)


def test_delayed_scale_that_is_loaded_alone_has_its_reciprocal():
    model = layer()
    with float8lab.autocast(recipe=DELAYED):
        model(torch.randn(4, 32))
    slots_of(model).load({"scale": torch.tensor([0.1, 0.3, 1.0])})
    tensors = slots_of(model).tensors()
    assert torch.equal(tensors["encode"], 1 / tensors["scale"])
