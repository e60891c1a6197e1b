"""GroupedLinear computes each expert as a separate Linear does, in every recipe and mode."""

import copy
import itertools
import pickle
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrize

import float8lab
from float8lab import recipes
from float8lab.nn import gemm
from float8lab.nn.expert_parameters import ExpertMemory
from float8lab.nn.precision import Precision
from float8lab.ops import Offsets, Prologue
from float8lab.tensor import Float8Tensor
from tests.recorder import Ops, hooked_as_by_megatron, never_waiting
from tests.same_bytes import assert_same_state

SIZES = [0, 1, 15, 17, 40]
E, M, K, N = len(SIZES), sum(SIZES), 72, 40
RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "row": recipes.Float8RowwiseScaling(),
    "row-high-wgrad": recipes.Float8RowwiseScaling(high_precision_wgrad=True),
    "block": recipes.Float8BlockScaling(),
    "mx": recipes.MXFP8BlockScaling(),
    "high-fprop": recipes.Float8BlockScaling(override_linear_precision=(True, False, False)),
    "high-dgrad": recipes.Float8CurrentScaling(override_linear_precision=(False, True, False)),
}
CAST_OPS = "cast", "transpose"
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def experts(**arguments) -> float8lab.GroupedLinear:
    torch.manual_seed(1)
    layer = float8lab.GroupedLinear(E, K, N, device="cpu", **arguments)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.startswith("bias"):
                parameter.normal_()
    return layer


def rows(columns: int, padding: int = 0) -> Tensor:
    torch.manual_seed(2)
    x = torch.randn(M, columns) * torch.logspace(-1, 1, columns)
    return torch.cat((x, torch.full((padding, columns), torch.nan)))


def step(layer, x: Tensor, dy: Tensor, recipe=None, splits=SIZES, **arguments):
    """The output, the gradient of the input, and the gradients of the parameters."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with float8lab.autocast(recipe is not None, recipe=recipe):
        y = layer(x, splits, **arguments)
    y.backward(dy)
    return y.detach(), x.grad, *[p.grad.clone() for p in layer.parameters()]


def float64_step(layer, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and the gradients in float64, computed expert by expert."""
    x = x.double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in layer.parameters()]
    weights, biases = parameters[::2], parameters[1::2]
    parts = zip(x[:M].split(SIZES), weights, biases, strict=True)
    y = torch.cat([part @ w.t() + b for part, w, b in parts])
    y.backward(dy[:M].double())
    return [y.detach(), x.grad[:M], *[p.grad for p in parameters]]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected).norm())


@each_recipe
def test_errors_of_every_expert_are_those_of_a_linear_layer(recipe):
    """The errors are those against float64; padding rows hold NaN, and their results are zeros."""
    layer = experts()
    x, dy = rows(K, padding=6), rows(N, padding=6)
    for _ in range(2):  # the delayed scales of the second step come from the first
        actual = step(layer, x, dy, recipe)
    assert not actual[0][M:].any()
    assert not actual[1][M:].any()
    expected = float64_step(layer, x[:M], dy)
    offsets = list(itertools.accumulate(SIZES))
    for e, (start, end) in enumerate(zip([0, *offsets[:-1]], offsets, strict=True)):
        linear = float8lab.Linear(K, N, device="cpu")
        with torch.no_grad():
            linear.weight.copy_(getattr(layer, f"weight{e}"))
            linear.bias.copy_(getattr(layer, f"bias{e}"))
        expert_dy = dy[start:end]
        inp = x[start:end].clone().requires_grad_()
        for _ in range(2):
            linear.zero_grad()
            inp.grad = None
            with float8lab.autocast(recipe=recipe):
                y = linear(inp)
            y.backward(expert_dy)
        part = slice(start, end)
        pairs = [
            (actual[0][part], y, expected[0][part]),
            (actual[1][part], inp.grad, expected[1][part]),
            (actual[2 + 2 * e], linear.weight.grad, expected[2 + 2 * e]),
            (actual[3 + 2 * e], linear.bias.grad, expected[3 + 2 * e]),
        ]
        for result, linear_result, exact in pairs:
            rounding = torch.finfo(torch.float32).eps * M * float(exact.norm())
            assert error(result, exact) <= 1.5 * error(linear_result, exact) + rounding


@each_recipe
def test_a_single_expert_equals_a_linear_layer(recipe):
    layer, linear = (
        float8lab.GroupedLinear(1, K, N, device="cpu"),
        float8lab.Linear(K, N, device="cpu"),
    )
    with torch.no_grad():
        linear.weight.copy_(layer.weight0)
        linear.bias.copy_(layer.bias0.normal_())
    dy = rows(N)
    for _ in range(2):  # the delayed scales of the second step come from the first
        results = [step(layer, rows(K), dy, recipe, [M])]
        linear.zero_grad()
        x = rows(K).requires_grad_()
        with float8lab.autocast(recipe=recipe):
            y = linear(x)
        y.backward(dy)
        results.append((y.detach(), x.grad, linear.weight.grad, linear.bias.grad))
        torch.testing.assert_close(*results)


@each_recipe
def test_torch_autocast_only_rounds_the_output(recipe):
    """The GEMMs have the same operands as without torch's autocast; only the result is rounded."""
    layer, x, dy = experts(), rows(K), rows(N)
    expected, *_ = step(copy.deepcopy(layer), x, dy, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, *_ = step(layer, x, dy.bfloat16(), recipe)
    assert y.dtype == torch.bfloat16
    if recipe.linear.fprop:
        assert torch.equal(y, expected.bfloat16())
    assert dx.dtype == x.dtype


@pytest.mark.parametrize("recipe", [None, RECIPES["delayed"]], ids=["outside autocast", "delayed"])
def test_float64_is_exact_and_leaves_no_state(recipe):
    layer, x, dy = experts(params_dtype=torch.float64), rows(K), rows(N)
    actual = step(layer, x.double(), dy.double(), recipe)
    torch.testing.assert_close(actual, float64_step(layer, x, dy))
    with float8lab.autocast(recipe is not None, recipe=recipe):
        layer(x, SIZES)  # of float32
    assert layer._fp8.slots == {}


def test_calibration_records_the_amaxes_of_every_expert():
    x, states = rows(K), []
    for enabled in (True, False):
        layer = experts()
        with float8lab.autocast(enabled, calibrating=not enabled, recipe=RECIPES["delayed"]):
            layer(x, SIZES)
        (slots,) = layer._fp8.slots.values()
        states.append(slots.tensors())
    assert states[1]["steps"].any()
    assert_same_state(states[1], states[0])


def test_a_converted_layer_that_is_called_alone_advances_its_scales():
    layer = experts()
    float8lab.convert_to_float8(nn.Sequential(layer), RECIPES["delayed"])
    for _ in range(2):
        layer(rows(K), SIZES)
    (slots,) = layer._fp8.slots.values()
    assert slots.tensors()["steps"].max() == 2


@pytest.mark.parametrize("recipe", [None, RECIPES["delayed"], RECIPES["block"]], ids=str)
def test_equivalent_forms_of_splits_parameters_and_input_give_equal_results(recipe):
    """Splits may be a list or a tensor, parameters single or per expert, x three-dimensional."""
    layer, x, dy = experts(), rows(K), rows(N)
    expected = step(layer, x, dy, recipe)
    single = experts(single_grouped_weight=True, single_grouped_bias=True)
    single.load_state_dict(layer.state_dict())
    out, dgrad = torch.empty(M, N), torch.empty(M, K)
    as_tensor = torch.tensor(SIZES, dtype=torch.int32)
    results = [
        step(copy.deepcopy(layer), x, dy, recipe, as_tensor.long()),
        step(experts(), x, dy, recipe, as_tensor, out=out, dgrad_out=dgrad),
        step(layer, x[None], dy[None], recipe),
        step(experts(), x, dy, recipe, dgrad_out=torch.empty(M, K)),
    ]
    for actual in results:
        for tensor, expected_tensor in zip(actual, expected, strict=True):
            assert torch.equal(tensor.squeeze(0), expected_tensor)
    y, dx, dw, db = step(single, x, dy, recipe)
    assert torch.equal(y, expected[0])
    assert torch.equal(out, y)
    assert torch.equal(dx, expected[1])
    assert torch.equal(dgrad, dx)
    assert torch.equal(dw, torch.stack(expected[2::2]))
    assert torch.equal(db, torch.stack(expected[3::2]))
    loaded = experts()
    loaded.load_state_dict(single.state_dict())
    assert torch.equal(loaded.weight3, layer.weight3)


def test_return_bias_returns_the_biases_without_adding_them():
    layer = experts(return_bias=True)
    y, biases = layer(rows(K), SIZES)
    added_bias = torch.repeat_interleave(torch.stack(biases), torch.tensor(SIZES), 0)
    layer.return_bias = False
    torch.testing.assert_close(y + added_bias, layer(rows(K), SIZES))


@pytest.mark.parametrize("separate", [False, True], ids=["one-buffer", "separate-buffers"])
@pytest.mark.parametrize("recipe", [None, RECIPES["row"]], ids=["high", "row"])
def test_backward_for_some_experts_leaves_main_grad_of_the_others_unchanged(recipe, separate):
    layer, x, dy = experts(), rows(K), rows(N)
    expected = step(layer, x, dy, recipe)
    layer.fuse_wgrad_accumulation = True
    weights = layer._expert_parameters()[0]
    for weight in weights:
        weight.data = weight.data.clone() if separate else weight.data
        weight.main_grad = torch.ones_like(weight)
    layer.zero_grad()
    hook_calls = hooked_as_by_megatron(weights, zero_out=True)
    with float8lab.autocast(recipe is not None, recipe=recipe):
        y = layer(x, SIZES)
    y.backward(dy, inputs=[layer.weight4, layer.weight2, layer.bias1])
    for index, weight in enumerate(weights):
        gradient = expected[2 + 2 * index] if index in (2, 4) else 0
        torch.testing.assert_close(weight.main_grad, torch.ones(N, K) + gradient)
        assert weight.grad_added_to_main_grad == (index in (2, 4))
    assert len(hook_calls) == 2
    torch.testing.assert_close(layer.bias1.grad, expected[2 + 2 * 1 + 1])


def test_parameters_are_in_the_order_of_transformer_engine():
    """The states of optimizers refer to parameters by position."""
    names = [f"{kind}{index}" for index in range(E) for kind in ("weight", "bias")]
    assert [name for name, _ in experts().named_parameters()] == names
    with float8lab.fp8_model_init(True):
        assert [*copy.deepcopy(experts().half()).state_dict()] == names
    assert [*experts(bias=False).state_dict()] == names[::2]
    single = experts(single_grouped_weight=True).state_dict()
    assert [*single] == ["weight", *names[1::2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [None, RECIPES["current"], RECIPES["block"]], ids=str)
def test_only_experts_with_a_main_grad_accumulate_into_it(recipe, dtype):
    layer, x, dy = experts(params_dtype=dtype), rows(K).to(dtype), rows(N).to(dtype)
    expected = step(layer, x, dy, recipe)
    layer.fuse_wgrad_accumulation = True
    layer.weight0.requires_grad_(False).main_grad = torch.ones(N, K)
    layer.weight1.main_grad = torch.ones(N, K)
    for first, added in ((False, 1), (True, 0)):
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with float8lab.autocast(recipe is not None, recipe=recipe):
            y = layer(inp, SIZES, is_first_microbatch=first)
        y.backward(dy)
        assert torch.equal(y, expected[0])
        assert torch.equal(inp.grad, expected[1])
        assert torch.equal(layer.weight0.main_grad, torch.ones(N, K))
        torch.testing.assert_close((layer.weight1.main_grad - added).to(dtype), expected[4])
        assert layer.weight1.grad is None
        torch.testing.assert_close(layer.weight2.grad, expected[6])


@pytest.mark.parametrize(("name", "single"), [("current", False), ("block", True)])
def test_weights_stored_in_fp8_compile_without_graph_breaks(name, single):
    recipe = RECIPES[name]
    with float8lab.fp8_model_init(True, recipe):
        layer = experts(single_grouped_weight=single)
    x, dy, splits = rows(K), rows(N), torch.tensor(SIZES)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    actual, expected = (step(module, x, dy, recipe, splits) for module in (compiled, layer))
    torch.testing.assert_close(actual, expected)  # requantizing a weight may lose a bit


@pytest.mark.parametrize("single", [False, True], ids=["each", "single"])
@pytest.mark.parametrize("recipe", [RECIPES["current"], RECIPES["block"]], ids=str)
def test_weights_stored_in_fp8_equal_their_dequantized_values(recipe, single):
    arguments = {"single_grouped_weight": single}
    with float8lab.fp8_model_init(True, recipe):
        layer = experts(**arguments)
    weights = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    assert all(isinstance(w, Float8Tensor) for w in weights)
    assert sum(w.qdata.nbytes for w in weights) == E * N * K
    plain = experts(**arguments)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            value = parameter.dequantize() if isinstance(parameter, Float8Tensor) else parameter
            plain.get_parameter(name).copy_(value)
    x, dy = rows(K), rows(N)
    actual, expected = step(layer, x, dy, recipe), step(plain, x, dy, recipe)
    torch.testing.assert_close(actual, expected)  # requantizing a weight may lose a bit
    y = step(layer, x, dy)[0]
    torch.testing.assert_close(y, step(plain, x, dy)[0])


def test_each_expert_has_separate_delayed_scales():
    recipe, layer, magnitudes = RECIPES["delayed"], experts(), 2.0 ** torch.arange(E)
    x, dy = torch.ones(M, K), torch.ones(M, N)
    with torch.no_grad():
        for index, weight in enumerate(layer._expert_parameters()[0]):
            weight.fill_(magnitudes[index])
    for tensor in (x, dy):
        tensor.mul_(magnitudes.repeat_interleave(torch.tensor(SIZES))[:, None])
    step(layer, x, dy, recipe)
    state = float8lab.nn.ScalingState(layer, recipe).state_dict()
    values = {key.rpartition("/")[2]: value.unflatten(-1, (3, E)) for key, value in state.items()}
    scale, seeded = values["scale"], values["seeded"]
    assert seeded.tolist() == [[False, *[True] * 4], [True] * E, [False, *[True] * 4]]
    assert torch.equal(torch.where(seeded, scale, scale[:, 1:2]).div(scale[:, 1:2])[:, 1:].mul(2),
                       magnitudes[1:].expand(3, -1))  # fmt: skip
    fresh = copy.deepcopy(layer)
    step(fresh, 4 * rows(K), rows(N), recipe)
    float8lab.nn.ScalingState(fresh, recipe).load_state_dict(state)
    y, expected = (step(module, rows(K), rows(N), recipe)[0] for module in (fresh, layer))
    assert torch.equal(y, expected)


def test_an_expert_without_tokens_keeps_its_scale():
    """An expert's first tokens set its first scale, in whatever step they come."""
    recipe = recipes.DelayedScaling(amax_history_len=2)
    layer = experts(bias=False)
    linears = [float8lab.Linear(K, N, bias=False, device="cpu") for _ in range(E)]
    with torch.no_grad():
        for index, linear in enumerate(linears):
            linear.weight.copy_(layer._expert_parameters()[0][index])
    for step_index, sizes in enumerate(
        ([5, 0, 7, 0, 2], [0, 3, 0, 0, 9], [4, 0, 3, 0, 1], [1] * E)
    ):
        x = torch.randn(sum(sizes), K) * 10.0 ** torch.randint(-3, 3, (sum(sizes), 1))
        dy = torch.randn(sum(sizes), N) * 10.0 ** torch.randint(-9, 3, (sum(sizes), 1))
        if step_index == 2:  # the amaxes of an interrupted step are dropped
            with pytest.raises(RuntimeError, match="shape"), float8lab.autocast(recipe=recipe):
                layer(100 * torch.ones(E, K), [1] * E).view(-1, N + 1)
        y, dx, *dw = step(layer, x, dy, recipe, sizes)
        parts = zip(linears, *(t.split(sizes) for t in (x, dy, y, dx)), dw, strict=True)
        for linear, inp, grad, expert_y, expert_dx, expert_dw in parts:
            if not len(inp):
                assert not expert_dw.any()
                continue
            inp = inp.clone().requires_grad_()
            with float8lab.autocast(recipe=recipe):
                expected = linear(inp)
            expected_dx, expected_dw = torch.autograd.grad(expected, (inp, linear.weight), grad)
            assert torch.equal(expert_y, expected)
            assert torch.equal(expert_dx, expected_dx)
            torch.testing.assert_close(expert_dw, expected_dw)


def test_an_older_scaling_state_with_one_scale_for_all_experts_loads():
    """Older states have one scale for the rows of all experts; it is repeated for each expert."""
    recipe, layer, x, dy = RECIPES["delayed"], experts(), rows(K), rows(N)
    for _ in range(2):
        step(layer, x, dy, recipe)
    state = float8lab.nn.ScalingState(layer, recipe).state_dict()
    kept_scales = [
        index for index in range(3 * E) if index == 4 or E <= index < 2 * E or index == 14
    ]
    older_state = {key: value[..., kept_scales] for key, value in state.items()}
    assert all(value.shape[-1] == E + 2 for value in older_state.values())
    loaded = float8lab.nn.ScalingState(experts(), recipe)
    loaded.load_state_dict(older_state)
    repeated = [4] * E + [*range(E, 2 * E)] + [14] * E
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, state[key][..., repeated])
    slots = layer._fp8.slots[recipe, None]
    pickled = slots.__getstate__()
    pickled["tensors"] = {key: value[..., kept_scales] for key, value in pickled["tensors"].items()}
    unpickled = pickle.loads(pickle.dumps(slots))
    unpickled.__setstate__({**pickled, "widths": (1, E, 1)})
    assert unpickled.widths == (E, E, E)
    history, expected = unpickled.tensors()["history"], slots.tensors()["history"]
    assert torch.equal(history, expected[:, repeated])


def test_large_values_of_one_expert_do_not_change_the_others():
    """Under per-tensor scales the values of other experts do not change an expert's results."""
    torch.manual_seed(5)
    x, dy = torch.randn(48, K), torch.randn(48, N)
    for recipe in (RECIPES["current"], RECIPES["delayed"]):
        results = []
        for loud in (1.0, 1e4):
            layer, factor = experts(), torch.ones(48, 1)
            factor[:16] = loud
            for _ in range(2):
                y, dx, *gradients = step(layer, x * factor, dy / factor, recipe, [16, 0, 32, 0, 0])
            results.append((y[16:], dx[16:], gradients[4]))
        torch.testing.assert_close(*results, rtol=0, atol=0)


def test_weights_stay_in_one_buffer_after_moves_and_copies():
    layer = experts().double().float()
    for module in (layer, copy.deepcopy(layer).half().float(), copy.deepcopy(layer)):
        for kind in ("weight", "bias"):
            parts = module._expert_parameters()[kind == "bias"]
            stacked, stacked_parts = module._stacked(kind, parts)
            assert stacked.data_ptr() == parts[0].data_ptr()
            assert stacked_parts is parts
            assert module._stacked(kind, parts)[0] is stacked
    with torch.no_grad():
        stacked[2, 0] = 7
    assert parts[2][0] == 7
    layer.weight3 = nn.Parameter(torch.zeros(N, K))
    weights = layer._expert_parameters()[0]
    assert ExpertMemory().stack(weights) is None
    stacked, stacked_parts = layer._stacked("weight", weights)
    assert torch.equal(stacked, torch.stack(weights))
    assert not stacked_parts


@pytest.mark.parametrize("recipe", [None, RECIPES["row"]], ids=str)
@pytest.mark.parametrize("name", ["weight0", "weight3"])
def test_a_weight_written_between_forward_and_backward_raises(name, recipe):
    """It is seen also after a move, when the parameters share memory but not version counters."""
    for layer in (experts(), experts().double().float(), copy.deepcopy(experts())):
        x = rows(K).requires_grad_()
        with float8lab.autocast(recipe is not None, recipe=recipe):
            y = layer(x, SIZES)
        with torch.no_grad():
            getattr(layer, name).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        layer(x, SIZES).sum().backward()


@pytest.mark.parametrize("single", [False, True], ids=["each", "single"])
@pytest.mark.parametrize("recipe", [None, RECIPES["block"]], ids=str)
def test_a_parametrized_weight_equals_its_computed_value(single, recipe):
    """``torch.nn.utils.parametrize`` computes the weight, as for PEFT's adapters of parameters."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer, name = experts(single_grouped_weight=single), "weight" if single else "weight3"
    doubled, x, dy = copy.deepcopy(layer), rows(K), rows(N)
    with torch.no_grad():
        getattr(doubled, name).mul_(2)
    parametrize.register_parametrization(layer, name, Doubled())
    actual, expected = step(layer, x, dy, recipe), step(doubled, x, dy, recipe)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])
    original = layer.parametrizations[name].original
    torch.testing.assert_close(original.grad, 2 * getattr(doubled, name).grad)
    layer.double().float()
    assert torch.equal(step(layer, x, dy, recipe)[0], expected[0])
    with torch.no_grad():
        parametrize.remove_parametrizations(layer, name)
    assert torch.equal(step(layer, x, dy, recipe)[0], expected[0])


@pytest.mark.parametrize("recipe", [RECIPES["current"], RECIPES["block"]], ids=str)
def test_weights_stored_in_fp8_stay_in_one_buffer_and_are_not_copied(recipe, device):
    """No step copies the weights, wherever they move. Weights in separate memory are stacked."""
    with float8lab.fp8_model_init(True, recipe):
        layer, other = experts().to(device), experts().to(device)
    loaded = pickle.loads(pickle.dumps(layer))
    loaded.load_state_dict({k: v.clone() for k, v in other.state_dict().items()})
    x, dy = rows(K).to(device), rows(N).to(device)
    for module in (layer, copy.deepcopy(layer).half().float(), copy.deepcopy(layer), loaded):
        parts = module._expert_parameters()[0]
        stacked, stacked_parts = module._stacked("weight", parts)
        assert stacked.qdata.data_ptr() == parts[0].qdata.data_ptr()
        assert stacked.scale.data_ptr() == parts[0].scale.data_ptr()
        assert stacked_parts is parts
        assert module._stacked("weight", parts)[0] is stacked
        assert torch.equal(stacked.dequantize(), torch.stack([p.dequantize() for p in parts]))
        for step_recipe in (recipe, None):
            with Ops() as ops:
                step(module, x, dy, step_recipe)
            assert not {"aten.stack.default", "aten.cat.default"} & set(ops.names)
    separate = copy.deepcopy(layer)
    for weight in separate._expert_parameters()[0]:
        weight.data = weight.data.clone()
    stacked, stacked_parts = separate._stacked("weight", separate._expert_parameters()[0])
    assert not stacked_parts
    results = []
    for module in (layer, separate):
        optimizer = float8lab.optim.MasterWeights(module.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(3):
            results.append(step(module, x, dy, recipe))
            optimizer.step()
    for result, separate_result in zip(results[:3], results[3:], strict=True):
        assert all(map(torch.equal, result, separate_result))
    assert not torch.equal(results[0][0], results[2][0])


@pytest.mark.parametrize("stored", [False, True], ids=["kept", "stored"])
def test_weights_already_in_fp8_are_not_cast_a_second_time(stored):
    """With a cast kept over microbatches, or with stored FP8 weights, only x and dy are cast.

    The weights are transposed at most.
    """
    recipe, x, dy = RECIPES["block"], rows(K), rows(N)
    with float8lab.fp8_model_init(stored, recipe):
        layer = experts(single_grouped_weight=True)
    counts = []
    for first in (True, False, False):
        with Ops() as ops, float8lab.autocast(recipe=recipe):
            layer(x.clone().requires_grad_(), SIZES, is_first_microbatch=first).backward(dy)
        counts.append([ops.names.count(f"float8lab.{op}.default") for op in CAST_OPS])
    assert counts == ([[2, 1]] * 3 if stored else [[3, 1], [2, 0], [2, 0]])


@each_recipe
@pytest.mark.parametrize("without_data", [lambda: torch.device("meta"), FakeTensorMode])
def test_shapes_are_right_without_data(recipe, without_data):
    with without_data():
        layer, x = float8lab.GroupedLinear(E, K, N), torch.empty(M, K)
        for _ in range(2):
            y, dx, *_ = step(layer, x, torch.empty(M, N), recipe)
            assert (y.shape, dx.shape) == ((M, N), (M, K))


@each_recipe
def test_a_kept_weight_cast_of_a_single_expert_includes_its_transpose(recipe):
    layer, x, dy = float8lab.GroupedLinear(1, K, N, device="cpu"), rows(K), rows(N)
    expected = step(copy.deepcopy(layer), x, dy, recipe, [M])
    with float8lab.inspect.watch(layer) as watch:
        for first in (True, False):
            actual = step(layer, x, dy, recipe, [M], is_first_microbatch=first)
            assert all(map(torch.equal, actual, expected))
            watch.step()
    weights = [record for record in watch.log.records if record.operand == "w"]
    assert [record.elements for record in weights] == [N * K] * len(weights)


@pytest.mark.parametrize("single", [False, True], ids=["each", "single"])
@pytest.mark.parametrize("recipe", [RECIPES["delayed"], RECIPES["block"]], ids=str)
def test_a_kept_weight_cast_is_repeated_only_after_a_write(single, recipe):
    """The cast is kept, and repeated if a weight was written in between."""
    layer, x = experts(single_grouped_weight=single), rows(K)

    def run(first: bool) -> Tensor:
        with torch.no_grad(), float8lab.autocast(recipe=recipe):
            return layer(x, SIZES, is_first_microbatch=first)

    y = run(True)
    first_cast = layer._fp8.weight_cast
    assert torch.equal(run(False), y)
    assert layer._fp8.weight_cast is first_cast
    with torch.no_grad():
        layer._expert_parameters()[0][-1][-1].zero_()
    assert not torch.equal(run(False), y)
    second_cast = layer._fp8.weight_cast
    assert second_cast is not first_cast
    run(False)
    assert layer._fp8.weight_cast is second_cast


@each_recipe
def test_a_prologue_gives_the_same_bytes_as_its_stored_values(recipe):
    """Casting an activation inside the cast gives the bytes of casting its stored values."""
    torch.manual_seed(3)
    h, dy, w = torch.randn(M + 5, 2 * K), torch.randn(M + 5, N), torch.randn(E, N, K)
    h[M:], dy[M:] = torch.nan, torch.nan
    offsets, needs = Offsets.of(torch.tensor(SIZES).cumsum(0), M + 5), (True, True, False)
    prologue = Prologue("swiglu", [h], h.dtype)
    results = []
    for x in (prologue, prologue.value()):
        precision = Precision()
        precision.experts = E
        with float8lab.autocast(recipe=recipe):
            call = precision.begin(h, w, training=True)
        y, saved = gemm.forward(x, w, None, call, needs=needs[:2], dtype=h.dtype, offsets=offsets)
        grads = gemm.backward(
            dy, x if x is prologue else None, saved, call,
            needs=needs, shape=(M + 5, N, K), dtypes=(h.dtype, w.dtype, None), offsets=offsets,
        )  # fmt: skip
        results.append((y, *grads[:2]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_number_of_python_calls_is_independent_of_the_number_of_experts(name):
    """A step calls the package's functions equally often for 4 and 32 experts."""

    def build(kind: str, experts: int):
        with float8lab.fp8_model_init(kind == "stored", RECIPES[name]):
            if kind == "mlp":
                return float8lab.ExpertMLP(experts, 32, 32, device="cpu")
            single = kind == "single"
            return float8lab.GroupedLinear(
                experts, 32, 32, device="cpu",
                single_grouped_weight=single, single_grouped_bias=single,
            )  # fmt: skip

    def count_call(counter: Counter, frame, event: str, _) -> None:
        file = frame.f_code.co_filename
        skipped = "ops/reference", "formats.py"  # the reference calls these for each expert
        if event == "call" and "float8lab" in file and not any(name in file for name in skipped):
            counter[file, frame.f_code.co_name] += 1

    for kind in ("each", "stored", "single", "mlp"):
        calls: list[Counter] = []
        for num_experts in (4, 32):
            module = build(kind, num_experts)
            run = module.run_rows if kind == "mlp" else module
            sizes = torch.ones(num_experts, dtype=torch.int32)
            for _ in range(3):
                x = torch.randn(num_experts, 32, requires_grad=True)
                counter = Counter()
                sys.setprofile(partial(count_call, counter))
                try:
                    with float8lab.autocast(recipe=RECIPES[name]):
                        run(x, sizes).sum().backward()
                finally:
                    sys.setprofile(None)
            calls.append(counter)
        assert calls[0] == calls[1]
        assert calls[0].total() > 30


def test_count_gemms_and_watch_see_the_gemms_and_casts():
    model = nn.Sequential()
    model.experts = experts(single_grouped_weight=True)
    x, dy = rows(K, padding=6), rows(N, padding=6)
    for recipe, in_fp8 in ((RECIPES["block"], 3), (RECIPES["mx"], 0), (RECIPES["high-dgrad"], 2)):
        with float8lab.count_gemms() as counts:
            step(model.experts, x, dy, recipe)
        assert (counts.fp8, counts.fp8 + counts.high_precision) == (in_fp8, 3)
    with float8lab.inspect.watch(model) as watch:
        step(model.experts, x, dy, RECIPES["current"])
        watch.step()
    records = {record.operand: record for record in watch.log.records}
    assert set(records) == {"x", "w", "dy"}
    assert all(record.nan == 0 and record.sqnr > 20 for record in records.values())


@pytest.mark.parametrize(
    ("splits", "kind", "message"),
    [
        ([1, 2], ValueError, "m_splits must be 5 numbers"),
        ([1, 2, 3, -1, 2], ValueError, "m_splits must be 5 numbers .num_gemms., none negative"),
        ([80, 0, 0, 0, 0], ValueError, "of at most 73 rows"),
        ([0.5] * 5, TypeError, "m_splits must be integers"),
        (torch.ones(5), TypeError, "m_splits must be integers"),
        (torch.ones(4, dtype=torch.int32), ValueError, "m_splits must be 5 numbers"),
        (torch.tensor([80, 0, 0, 0, 0]), ValueError, "of at most 73 rows; got .80, 0, 0, 0, 0."),
        (torch.tensor([1, 2, 3, -1, 2]), ValueError, "none negative"),
        (3, TypeError, "m_splits must be integers"),
    ],
)
def test_invalid_splits_are_refused(splits, kind, message):
    layer, x = experts(), rows(K)
    with pytest.raises(kind, match=message):
        layer(x, splits)


@pytest.mark.parametrize("align", [None, 1, 16])
def test_padded_rows_give_the_same_results(align):
    x = torch.randn(M + 2, K, dtype=torch.bfloat16, requires_grad=True)
    layer = float8lab.GroupedLinear(E, K, N, params_dtype=torch.bfloat16, device="cpu")
    rows, counts = float8lab.Fp8Padding(E, align)(x, torch.tensor(SIZES))
    assert not any(count % (align or 32) for count in counts)
    starts = itertools.accumulate(counts, initial=0)
    for start, count, part in zip(starts, SIZES, x[:M].split(SIZES), strict=False):
        assert rows[start : start + count].equal(part)
        assert not rows[start + count : start + counts[SIZES.index(count)]].any()
    assert rows[sum(counts) :].equal(x[M:])
    with float8lab.autocast(recipe=RECIPES["current"]):
        y = float8lab.Fp8Unpadding(E, align)(layer(rows, counts), SIZES)
        expected = layer(x, SIZES)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    found, dx = (torch.autograd.grad(out, x, dy)[0] for out in (y, expected))
    torch.testing.assert_close(found, dx)


def test_padding_refuses_rows_that_do_not_fit():
    with pytest.raises(ValueError, match="align_size must be an integer of at least 1"):
        float8lab.Fp8Padding(2, 0)
    with pytest.raises(ValueError, match=r"m_splits must be 2 numbers \(num_gemms\)"):
        float8lab.Fp8Padding(2)(torch.ones(3, 4), [3, 1])
    with pytest.raises(TypeError, match="m_splits must be integers"):
        float8lab.Fp8Padding(2)(torch.ones(3, 4), [1.5, 1.5])
    with pytest.raises(ValueError, match="inp must"):
        float8lab.Fp8Unpadding(2)(torch.ones(4), [3, 1])
    with pytest.raises(ValueError, match=r"with padding.* of at most 4 rows; got \[32, 32\]"):
        float8lab.Fp8Unpadding(2)(torch.ones(4, 4), [3, 1])


def test_a_state_dict_that_does_not_fit_is_refused_with_the_names_of_its_keys():
    single = experts(single_grouped_weight=True)
    before = copy.deepcopy(single.state_dict())
    state = experts().state_dict()
    for value in (torch.zeros(3, 3), None):
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"weight0", "weight1"'):
            single.load_state_dict({**state, "weight1": value})
        assert all(torch.equal(p, before[name]) for name, p in single.named_parameters())


def test_an_out_buffer_of_another_shape_is_refused():
    layer, x = experts(), rows(K)
    with pytest.raises(ValueError, match="out must be a floating-point tensor of shape"):
        layer(x, SIZES, out=torch.empty(3, 3))


LARGE = [0, 1, 15, 130, 256, 0, 3]


@pytest.fixture
def large() -> tuple:
    """A bfloat16 GPU layer, its input and output gradient with NaN padding rows, and the splits."""
    torch.manual_seed(4)
    layer = float8lab.GroupedLinear(
        len(LARGE), 256, 384, params_dtype=torch.bfloat16, device="cuda", single_grouped_weight=True
    )
    x, dy = (torch.randn(sum(LARGE) + 50, n, device="cuda").bfloat16() for n in (256, 384))
    x[sum(LARGE) :], dy[sum(LARGE) :] = torch.nan, torch.nan
    return layer, x, dy, torch.tensor(LARGE, device="cuda", dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["high", *RECIPES])
def test_a_gpu_is_as_accurate_as_the_cpu_and_never_synchronizes(recipe, large):
    layer, x, dy, splits = large
    cpu_layer = copy.deepcopy(layer).cpu()
    for _ in range(3):  # the steps compile kernels, record launches and repeat them
        cpu_results = step(cpu_layer, x.cpu(), dy.cpu(), recipe, splits.cpu())
        results = step(layer, x, dy, recipe, splits)
    with never_waiting():
        repeated_results = step(layer, x, dy, recipe, splits)
    exact = step(copy.deepcopy(layer).double().cpu(), x.cpu().double(), dy.cpu().double(),
                 None, splits.cpu())  # fmt: skip
    for result, repeated, cpu_result, exact_result in zip(
        results, repeated_results, cpu_results, exact, strict=True
    ):
        if recipe is None or not recipe.linear.delayed:
            assert torch.equal(result, repeated)
        rounding = torch.finfo(torch.bfloat16).eps * float(exact_result.norm())
        assert error(result.cpu(), exact_result) <= 1.2 * error(cpu_result, exact_result) + rounding
    assert not results[0][sum(LARGE) :].any()
    assert not results[1][sum(LARGE) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["current", "row", "block"])
def test_a_cuda_graph_replays_with_groups_of_any_size(name, large):
    layer, x, _, splits = large
    recipe = RECIPES[name]

    def run() -> Tensor:
        with torch.no_grad(), float8lab.autocast(recipe=recipe):
            return layer(x, splits)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for sizes in (LARGE, [300, 0, 0, 0, 0, 5, 100], [0] * 7, [58, 58, 58, 58, 58, 57, 58]):
        splits.copy_(torch.tensor(sizes))
        graph.replay()
        assert torch.equal(y, run())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [list, torch.tensor], ids=["list", "tensor"])
@pytest.mark.parametrize("recipe", [None, RECIPES["current"], RECIPES["block"]], ids=str)
def test_a_cuda_graph_keeps_the_host_sizes_of_its_capture(recipe, kind, large):
    """Replays use the sizes of the capture, even if the memory that held them changes."""
    layer, x, dy, splits = large
    sizes = kind(LARGE)
    x.requires_grad_()

    def run(sizes) -> tuple[Tensor, ...]:
        with float8lab.autocast(recipe is not None, recipe=recipe):
            y = layer(x, sizes)
        # The output is detached: an autograd graph that outlives its capture would tie later graphs
        # to its stream.
        return y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph_results = run(sizes)
    for index in range(len(sizes)):
        sizes[index] = 0
    del sizes
    for _ in range(2):
        with torch.no_grad():
            x[: sum(LARGE)].normal_()
        graph.replay()
        torch.testing.assert_close(graph_results, run(splits), rtol=0, atol=0)
