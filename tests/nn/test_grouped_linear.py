"""GroupedLinear: each expert as a Linear of its own, in every recipe and mode."""

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


def rows(columns: int, beyond: int = 0) -> Tensor:
    torch.manual_seed(2)
    x = torch.randn(M, columns) * torch.logspace(-1, 1, columns)
    return torch.cat((x, torch.full((beyond, columns), torch.nan)))


def step(layer, x: Tensor, dy: Tensor, recipe=None, splits=SIZES, **arguments):
    """Output, gradient of the input, and of the parameters in turn."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with float8lab.autocast(recipe is not None, recipe=recipe):
        y = layer(x, splits, **arguments)
    y.backward(dy)
    return y.detach(), x.grad, *[p.grad.clone() for p in layer.parameters()]


def truth(layer, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The same in float64, expert by expert."""
    x = x.double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in layer.parameters()]
    weights, biases = parameters[::2], parameters[1::2]
    parts = zip(x[:M].split(SIZES), weights, biases, strict=True)
    y = torch.cat([part @ w.t() + b for part, w, b in parts])
    y.backward(dy[:M].double())
    return [y.detach(), x.grad[:M], *[p.grad for p in parameters]]


def error(got: Tensor, want: Tensor) -> float:
    return float((got.detach().double() - want).norm())


@each_recipe
def test_every_expert_is_as_close_as_a_linear_layer(recipe):
    """To float64; rows that belong to nobody hold NaN, and give zeros."""
    layer = experts()
    x, dy = rows(K, beyond=6), rows(N, beyond=6)
    for _ in range(2):  # then delayed scales are those of the first
        got = step(layer, x, dy, recipe)
    assert not got[0][M:].any()
    assert not got[1][M:].any()
    want = truth(layer, x[:M], dy)
    ends = list(itertools.accumulate(SIZES))
    for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        alone = float8lab.Linear(K, N, device="cpu")
        with torch.no_grad():
            alone.weight.copy_(getattr(layer, f"weight{e}"))
            alone.bias.copy_(getattr(layer, f"bias{e}"))
        own_dy = dy[start:end]
        inp = x[start:end].clone().requires_grad_()
        for _ in range(2):
            alone.zero_grad()
            inp.grad = None
            with float8lab.autocast(recipe=recipe):
                y = alone(inp)
            y.backward(own_dy)
        part = slice(start, end)
        pairs = [
            (got[0][part], y, want[0][part]),
            (got[1][part], inp.grad, want[1][part]),
            (got[2 + 2 * e], alone.weight.grad, want[2 + 2 * e]),
            (got[3 + 2 * e], alone.bias.grad, want[3 + 2 * e]),
        ]
        for mine, others, exact in pairs:
            rounding = torch.finfo(torch.float32).eps * M * float(exact.norm())
            assert error(mine, exact) <= 1.5 * error(others, exact) + rounding


@each_recipe
def test_one_expert_is_a_linear_layer(recipe):
    one, alone = (
        float8lab.GroupedLinear(1, K, N, device="cpu"),
        float8lab.Linear(K, N, device="cpu"),
    )
    with torch.no_grad():
        alone.weight.copy_(one.weight0)
        alone.bias.copy_(one.bias0.normal_())
    dy = rows(N)
    for _ in range(2):  # then delayed scales are those of the first
        results = [step(one, rows(K), dy, recipe, [M])]
        alone.zero_grad()
        x = rows(K).requires_grad_()
        with float8lab.autocast(recipe=recipe):
            y = alone(x)
        y.backward(dy)
        results.append((y.detach(), x.grad, alone.weight.grad, alone.bias.grad))
        torch.testing.assert_close(*results)


@each_recipe
def test_under_torch_autocast(recipe):
    """The same bytes are multiplied, and rounded to its dtype at the end."""
    layer, x, dy = experts(), rows(K), rows(N)
    want, *_ = step(copy.deepcopy(layer), x, dy, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx, *_ = step(layer, x, dy.bfloat16(), recipe)
    assert y.dtype == torch.bfloat16
    if recipe.linear.fprop:
        assert torch.equal(y, want.bfloat16())
    assert dx.dtype == x.dtype


@pytest.mark.parametrize("recipe", [None, RECIPES["delayed"]], ids=["outside autocast", "delayed"])
def test_float64_is_exact_and_leaves_no_state(recipe):
    layer, x, dy = experts(params_dtype=torch.float64), rows(K), rows(N)
    got = step(layer, x.double(), dy.double(), recipe)
    torch.testing.assert_close(got, truth(layer, x, dy))
    with float8lab.autocast(recipe is not None, recipe=recipe):
        layer(x, SIZES)  # of float32
    assert layer._fp8.slots == {}


@pytest.mark.parametrize("recipe", [None, RECIPES["delayed"], RECIPES["block"]], ids=str)
def test_ways_to_say_the_same(recipe):
    """Splits as a list or a tensor; parameters of each expert or of all; buffers; dimensions."""
    layer, x, dy = experts(), rows(K), rows(N)
    want = step(layer, x, dy, recipe)
    whole = experts(single_grouped_weight=True, single_grouped_bias=True)
    whole.load_state_dict(layer.state_dict())
    out, dgrad = torch.empty(M, N), torch.empty(M, K)
    as_tensor = torch.tensor(SIZES, dtype=torch.int32)
    others = [
        step(copy.deepcopy(layer), x, dy, recipe, as_tensor.long()),
        step(experts(), x, dy, recipe, as_tensor, out=out, dgrad_out=dgrad),
        step(layer, x[None], dy[None], recipe),
    ]
    for got in others:
        for mine, other in zip(got, want, strict=True):
            assert torch.equal(mine.squeeze(0), other)
    y, dx, dw, db = step(whole, x, dy, recipe)
    assert torch.equal(y, want[0])
    assert torch.equal(out, y)
    assert torch.equal(dx, want[1])
    assert torch.equal(dgrad, dx)
    assert torch.equal(dw, torch.stack(want[2::2]))
    assert torch.equal(db, torch.stack(want[3::2]))
    again = experts()
    again.load_state_dict(whole.state_dict())
    assert torch.equal(again.weight3, layer.weight3)


def test_return_bias_leaves_the_bias_out():
    layer = experts(return_bias=True)
    y, biases = layer(rows(K), SIZES)
    added = torch.repeat_interleave(torch.stack(biases), torch.tensor(SIZES), 0)
    layer.return_bias = False
    torch.testing.assert_close(y + added, layer(rows(K), SIZES))


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("recipe", [None, RECIPES["row"]], ids=["high", "row"])
def test_gradients_of_some_experts_leave_the_others_alone(recipe, apart):
    layer, x, dy = experts(), rows(K), rows(N)
    want = step(layer, x, dy, recipe)
    layer.fuse_wgrad_accumulation = True
    weights = layer._expert_parameters()[0]
    for weight in weights:
        weight.data = weight.data.clone() if apart else weight.data
        weight.main_grad = torch.ones_like(weight)
    layer.zero_grad()
    seen = hooked_as_by_megatron(weights, zero_out=True)
    with float8lab.autocast(recipe is not None, recipe=recipe):
        y = layer(x, SIZES)
    y.backward(dy, inputs=[layer.weight4, layer.weight2, layer.bias1])
    for index, weight in enumerate(weights):
        added = want[2 + 2 * index] if index in (2, 4) else 0
        torch.testing.assert_close(weight.main_grad, torch.ones(N, K) + added)
        assert weight.grad_added_to_main_grad == (index in (2, 4))
    assert len(seen) == 2
    torch.testing.assert_close(layer.bias1.grad, want[2 + 2 * 1 + 1])


def test_parameters_are_in_the_order_of_transformer_engine():
    """States of optimizers are known by position."""
    names = [f"{kind}{index}" for index in range(E) for kind in ("weight", "bias")]
    assert [name for name, _ in experts().named_parameters()] == names
    with float8lab.fp8_model_init(True):
        assert [*copy.deepcopy(experts().half()).state_dict()] == names
    assert [*experts(bias=False).state_dict()] == names[::2]
    single = experts(single_grouped_weight=True).state_dict()
    assert [*single] == ["weight", *names[1::2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [None, RECIPES["current"], RECIPES["block"]], ids=str)
def test_some_gradients_go_into_main_grad(recipe, dtype):
    layer, x, dy = experts(params_dtype=dtype), rows(K).to(dtype), rows(N).to(dtype)
    want = step(layer, x, dy, recipe)
    layer.fuse_wgrad_accumulation = True
    layer.weight0.requires_grad_(False).main_grad = torch.ones(N, K)
    layer.weight1.main_grad = torch.ones(N, K)
    for first, added in ((False, 1), (True, 0)):
        layer.zero_grad()
        inp = x.clone().requires_grad_()
        with float8lab.autocast(recipe is not None, recipe=recipe):
            y = layer(inp, SIZES, is_first_microbatch=first)
        y.backward(dy)
        assert torch.equal(y, want[0])
        assert torch.equal(inp.grad, want[1])
        assert torch.equal(layer.weight0.main_grad, torch.ones(N, K))
        torch.testing.assert_close((layer.weight1.main_grad - added).to(dtype), want[4])
        assert layer.weight1.grad is None
        torch.testing.assert_close(layer.weight2.grad, want[6])


@pytest.mark.parametrize(("name", "single"), [("current", False), ("block", True)])
def test_stored_weights_compile_whole(name, single):
    recipe = RECIPES[name]
    with float8lab.fp8_model_init(True, recipe):
        layer = experts(single_grouped_weight=single)
    x, dy, splits = rows(K), rows(N), torch.tensor(SIZES)
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend="aot_eager")
    got, want = (step(one, x, dy, recipe, splits) for one in (compiled, layer))
    torch.testing.assert_close(got, want)  # a weight that is cast again may lose a bit


@pytest.mark.parametrize("single", [False, True], ids=["each", "single"])
@pytest.mark.parametrize("recipe", [RECIPES["current"], RECIPES["block"]], ids=str)
def test_weights_stored_in_fp8(recipe, single):
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
    got, want = step(layer, x, dy, recipe), step(plain, x, dy, recipe)
    torch.testing.assert_close(got, want)  # a weight that is cast again may lose a bit
    y = step(layer, x, dy)[0]
    torch.testing.assert_close(y, step(plain, x, dy)[0])


def test_each_expert_has_delayed_scales():
    recipe, layer, size = RECIPES["delayed"], experts(), 2.0 ** torch.arange(E)
    x, dy = torch.ones(M, K), torch.ones(M, N)
    with torch.no_grad():
        for index, weight in enumerate(layer._expert_parameters()[0]):
            weight.fill_(size[index])
    for tensor in (x, dy):
        tensor.mul_(size.repeat_interleave(torch.tensor(SIZES))[:, None])
    step(layer, x, dy, recipe)
    state = float8lab.nn.ScalingState(layer, recipe).state_dict()
    values = {key.rpartition("/")[2]: value.unflatten(-1, (3, E)) for key, value in state.items()}
    scale, seeded = values["scale"], values["seeded"]
    assert seeded.tolist() == [[False, *[True] * 4], [True] * E, [False, *[True] * 4]]
    assert torch.equal(torch.where(seeded, scale, scale[:, 1:2]).div(scale[:, 1:2])[:, 1:].mul(2),
                       size[1:].expand(3, -1))  # fmt: skip
    fresh = copy.deepcopy(layer)
    step(fresh, 4 * rows(K), rows(N), recipe)
    float8lab.nn.ScalingState(fresh, recipe).load_state_dict(state)
    y, want = (step(one, rows(K), rows(N), recipe)[0] for one in (fresh, layer))
    assert torch.equal(y, want)


def test_an_expert_without_tokens_keeps_its_scale():
    """And has its first one from its own first tokens, in whatever step they come."""
    recipe = recipes.DelayedScaling(amax_history_len=2)
    layer = experts(bias=False)
    alone = [float8lab.Linear(K, N, bias=False, device="cpu") for _ in range(E)]
    with torch.no_grad():
        for index, one in enumerate(alone):
            one.weight.copy_(layer._expert_parameters()[0][index])
    for turn, sizes in enumerate(([5, 0, 7, 0, 2], [0, 3, 0, 0, 9], [4, 0, 3, 0, 1], [1] * E)):
        x = torch.randn(sum(sizes), K) * 10.0 ** torch.randint(-3, 3, (sum(sizes), 1))
        dy = torch.randn(sum(sizes), N) * 10.0 ** torch.randint(-9, 3, (sum(sizes), 1))
        if turn == 2:  # what an interrupted step has seen is forgotten
            with pytest.raises(RuntimeError, match="shape"), float8lab.autocast(recipe=recipe):
                layer(100 * torch.ones(E, K), [1] * E).view(-1, N + 1)
        y, dx, *dw = step(layer, x, dy, recipe, sizes)
        parts = zip(alone, *(t.split(sizes) for t in (x, dy, y, dx)), dw, strict=True)
        for one, inp, grad, mine, my_dx, my_dw in parts:
            if not len(inp):
                assert not my_dw.any()
                continue
            inp = inp.clone().requires_grad_()
            with float8lab.autocast(recipe=recipe):
                want = one(inp)
            want_dx, want_dw = torch.autograd.grad(want, (inp, one.weight), grad)
            assert torch.equal(mine, want)
            assert torch.equal(my_dx, want_dx)
            torch.testing.assert_close(my_dw, want_dw)


def test_scaling_state_of_one_scale_for_all_experts_loads():
    """As it was saved before each expert's rows had a scale: with that one repeated."""
    recipe, layer, x, dy = RECIPES["delayed"], experts(), rows(K), rows(N)
    for _ in range(2):
        step(layer, x, dy, recipe)
    state = float8lab.nn.ScalingState(layer, recipe).state_dict()
    each = [index for index in range(3 * E) if index == 4 or E <= index < 2 * E or index == 14]
    before = {key: value[..., each] for key, value in state.items()}
    assert all(value.shape[-1] == E + 2 for value in before.values())
    loaded = float8lab.nn.ScalingState(experts(), recipe)
    loaded.load_state_dict(before)
    repeated = [4] * E + [*range(E, 2 * E)] + [14] * E
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, state[key][..., repeated])
    slots = layer._fp8.slots[recipe, None]
    pickled = slots.__getstate__()
    pickled["tensors"] = {key: value[..., each] for key, value in pickled["tensors"].items()}
    again = pickle.loads(pickle.dumps(slots))
    again.__setstate__({**pickled, "widths": (1, E, 1)})
    assert again.widths == (E, E, E)
    history, want = again.tensors()["history"], slots.tensors()["history"]
    assert torch.equal(history, want[:, repeated])


def test_a_quiet_expert_beside_a_loud_one_loses_nothing():
    """Under scales per tensor an expert has the bytes that it has alone, whatever the others."""
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


def test_weights_lie_together_wherever_they_move():
    layer = experts().double().float()
    for one in (layer, copy.deepcopy(layer).half().float(), copy.deepcopy(layer)):
        for kind in ("weight", "bias"):
            parts = one._expert_parameters()[kind == "bias"]
            whole, theirs = one._stacked(kind, parts)
            assert whole.data_ptr() == parts[0].data_ptr()
            assert theirs is parts
            assert one._stacked(kind, parts)[0] is whole
    with torch.no_grad():
        whole[2, 0] = 7
    assert parts[2][0] == 7
    layer.weight3 = nn.Parameter(torch.zeros(N, K))
    weights = layer._expert_parameters()[0]
    assert ExpertMemory().stack(weights) is None
    whole, theirs = layer._stacked("weight", weights)
    assert torch.equal(whole, torch.stack(weights))
    assert not theirs


@pytest.mark.parametrize("recipe", [None, RECIPES["row"]], ids=str)
@pytest.mark.parametrize("name", ["weight0", "weight3"])
def test_a_weight_that_is_written_before_backward_is_seen(name, recipe):
    """Also after a move, when parameters in one memory have counters of writes of their own."""
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
def test_a_weight_that_is_computed(single, recipe):
    """By ``torch.nn.utils.parametrize``, as PEFT does for adapters of parameters."""

    class Doubled(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    layer, name = experts(single_grouped_weight=single), "weight" if single else "weight3"
    want, x, dy = copy.deepcopy(layer), rows(K), rows(N)
    with torch.no_grad():
        getattr(want, name).mul_(2)
    parametrize.register_parametrization(layer, name, Doubled())
    got, expected = step(layer, x, dy, recipe), step(want, x, dy, recipe)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])
    original = layer.parametrizations[name].original
    torch.testing.assert_close(original.grad, 2 * getattr(want, name).grad)
    layer.double().float()
    assert torch.equal(step(layer, x, dy, recipe)[0], expected[0])
    with torch.no_grad():
        parametrize.remove_parametrizations(layer, name)
    assert torch.equal(step(layer, x, dy, recipe)[0], expected[0])


@pytest.mark.parametrize("recipe", [RECIPES["current"], RECIPES["block"]], ids=str)
def test_stored_weights_lie_together(recipe, device):
    """Nothing is copied, wherever they move; a copy is right where one of them lies elsewhere."""
    with float8lab.fp8_model_init(True, recipe):
        layer, other = experts().to(device), experts().to(device)
    loaded = pickle.loads(pickle.dumps(layer))
    loaded.load_state_dict({k: v.clone() for k, v in other.state_dict().items()})
    x, dy = rows(K).to(device), rows(N).to(device)
    for one in (layer, copy.deepcopy(layer).half().float(), copy.deepcopy(layer), loaded):
        parts = one._expert_parameters()[0]
        whole, theirs = one._stacked("weight", parts)
        assert whole.qdata.data_ptr() == parts[0].qdata.data_ptr()
        assert whole.scale.data_ptr() == parts[0].scale.data_ptr()
        assert theirs is parts
        assert one._stacked("weight", parts)[0] is whole
        assert torch.equal(whole.dequantize(), torch.stack([p.dequantize() for p in parts]))
        for how in (recipe, None):
            with Ops() as seen:
                step(one, x, dy, how)
            assert not {"aten.stack.default", "aten.cat.default"} & set(seen.names)
    apart = copy.deepcopy(layer)
    for weight in apart._expert_parameters()[0]:
        weight.data = weight.data.clone()
    whole, theirs = apart._stacked("weight", apart._expert_parameters()[0])
    assert not theirs
    found = []
    for one in (layer, apart):
        optimizer = float8lab.optim.MasterWeights(one.parameters(), torch.optim.SGD, lr=0.1)
        for _ in range(3):
            found.append(step(one, x, dy, recipe))
            optimizer.step()
    for mine, others in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, mine, others))
    assert not torch.equal(found[0][0], found[2][0])


@pytest.mark.parametrize("stored", [False, True], ids=["kept", "stored"])
def test_weights_in_fp8_are_not_cast_again(stored):
    """Over microbatches, or stored so: x and dy are cast, and the weights are turned, at most."""
    recipe, x, dy = RECIPES["block"], rows(K), rows(N)
    with float8lab.fp8_model_init(stored, recipe):
        layer = experts(single_grouped_weight=True)
    counts = []
    for first in (True, False, False):
        with Ops() as seen, float8lab.autocast(recipe=recipe):
            layer(x.clone().requires_grad_(), SIZES, is_first_microbatch=first).backward(dy)
        counts.append([seen.names.count(f"float8lab.{op}.default") for op in CAST_OPS])
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
def test_a_single_expert_keeps_its_transpose(recipe):
    layer, x, dy = float8lab.GroupedLinear(1, K, N, device="cpu"), rows(K), rows(N)
    want = step(copy.deepcopy(layer), x, dy, recipe, [M])
    with float8lab.inspect.watch(layer) as seen:
        for first in (True, False):
            got = step(layer, x, dy, recipe, [M], is_first_microbatch=first)
            assert all(map(torch.equal, got, want))
            seen.step()
    weights = [record for record in seen.log.records if record.operand == "w"]
    assert [record.elements for record in weights] == [N * K] * len(weights)


@pytest.mark.parametrize("single", [False, True], ids=["each", "single"])
@pytest.mark.parametrize("recipe", [RECIPES["delayed"], RECIPES["block"]], ids=str)
def test_a_kept_cast_is_that_of_these_weights(single, recipe):
    """The cast is made once, and again where weights were written in between."""
    layer, x = experts(single_grouped_weight=single), rows(K)

    def run(first: bool) -> Tensor:
        with torch.no_grad(), float8lab.autocast(recipe=recipe):
            return layer(x, SIZES, is_first_microbatch=first)

    y = run(True)
    kept = layer._fp8.weight_cast
    assert torch.equal(run(False), y)
    assert layer._fp8.weight_cast is kept
    with torch.no_grad():
        layer._expert_parameters()[0][-1][-1].zero_()
    assert not torch.equal(run(False), y)
    changed = layer._fp8.weight_cast
    assert changed is not kept
    run(False)
    assert layer._fp8.weight_cast is changed


@each_recipe
def test_a_source_is_cast_as_its_values(recipe):
    """An activation that is never written gives the bytes of one that was."""
    torch.manual_seed(3)
    h, dy, w = torch.randn(M + 5, 2 * K), torch.randn(M + 5, N), torch.randn(E, N, K)
    h[M:], dy[M:] = torch.nan, torch.nan
    ends, needs = Offsets.of(torch.tensor(SIZES).cumsum(0), M + 5), (True, True, False)
    source = Prologue("swiglu", [h], h.dtype)
    results = []
    for x in (source, source.value()):
        precision = Precision()
        precision.experts = E
        with float8lab.autocast(recipe=recipe):
            call = precision.begin(h, w, training=True)
        y, saved = gemm.forward(x, w, None, call, needs=needs[:2], dtype=h.dtype, offsets=ends)
        grads = gemm.backward(
            dy, x if x is source else None, saved, call,
            needs=needs, shape=(M + 5, N, K), dtypes=(h.dtype, w.dtype, None), offsets=ends,
        )  # fmt: skip
        results.append((y, *grads[:2]))
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_calls_do_not_grow_with_the_experts(name):
    """Functions of the package in a step, however the parameters lie."""

    def made(kind: str, experts: int):
        with float8lab.fp8_model_init(kind == "stored", RECIPES[name]):
            if kind == "mlp":
                return float8lab.ExpertMLP(experts, 32, 32, device="cpu")
            single = kind == "single"
            return float8lab.GroupedLinear(
                experts, 32, 32, device="cpu",
                single_grouped_weight=single, single_grouped_bias=single,
            )  # fmt: skip

    def note(counted: Counter, frame, event: str, _) -> None:
        file = frame.f_code.co_filename
        skipped = "ops/reference", "formats.py"  # whose rules the reference asks for each expert
        if event == "call" and "float8lab" in file and not any(name in file for name in skipped):
            counted[file, frame.f_code.co_name] += 1

    for kind in ("each", "stored", "single", "mlp"):
        calls: list[Counter] = []
        for number in (4, 32):
            module = made(kind, number)
            run = module.run_rows if kind == "mlp" else module
            sizes = torch.ones(number, dtype=torch.int32)
            for _ in range(3):
                x = torch.randn(number, 32, requires_grad=True)
                counted = Counter()
                sys.setprofile(partial(note, counted))
                try:
                    with float8lab.autocast(recipe=RECIPES[name]):
                        run(x, sizes).sum().backward()
                finally:
                    sys.setprofile(None)
            calls.append(counted)
        assert calls[0] == calls[1]
        assert calls[0].total() > 30


def test_its_gemms_and_casts_are_seen():
    model = nn.Sequential()
    model.experts = experts(single_grouped_weight=True)
    x, dy = rows(K, beyond=6), rows(N, beyond=6)
    for recipe, in_fp8 in ((RECIPES["block"], 3), (RECIPES["mx"], 0), (RECIPES["high-dgrad"], 2)):
        with float8lab.count_gemms() as counts:
            step(model.experts, x, dy, recipe)
        assert (counts.fp8, counts.fp8 + counts.high_precision) == (in_fp8, 3)
    with float8lab.inspect.watch(model) as watch:
        step(model.experts, x, dy, RECIPES["current"])
        watch.step()
    seen = {record.operand: record for record in watch.log.records}
    assert set(seen) == {"x", "w", "dy"}
    assert all(record.nan == 0 and record.sqnr > 20 for record in seen.values())


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
def test_splits_that_are_none(splits, kind, message):
    layer, x = experts(), rows(K)
    with pytest.raises(kind, match=message):
        layer(x, splits)


def test_checkpoints_that_do_not_fit_are_named():
    single = experts(single_grouped_weight=True)
    before = copy.deepcopy(single.state_dict())
    state = experts().state_dict()
    for value in (torch.zeros(3, 3), None):
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"weight0", "weight1"'):
            single.load_state_dict({**state, "weight1": value})
        assert all(torch.equal(p, before[name]) for name, p in single.named_parameters())


def test_buffers_of_another_shape():
    layer, x = experts(), rows(K)
    with pytest.raises(ValueError, match="out must be a floating-point tensor of shape"):
        layer(x, SIZES, out=torch.empty(3, 3))


LARGE = [0, 1, 15, 130, 256, 0, 3]


@pytest.fixture
def large() -> tuple:
    """A layer in bfloat16 on a GPU, its input and gradient with rows of NaN, the splits."""
    torch.manual_seed(4)
    layer = float8lab.GroupedLinear(
        len(LARGE), 256, 384, params_dtype=torch.bfloat16, device="cuda", single_grouped_weight=True
    )
    x, dy = (torch.randn(sum(LARGE) + 50, n, device="cuda").bfloat16() for n in (256, 384))
    x[sum(LARGE) :], dy[sum(LARGE) :] = torch.nan, torch.nan
    return layer, x, dy, torch.tensor(LARGE, device="cuda", dtype=torch.int32)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES.values()], ids=["high", *RECIPES])
def test_a_gpu_gives_the_same_and_never_waits(recipe, large):
    layer, x, dy, splits = large
    here = copy.deepcopy(layer).cpu()
    for _ in range(3):  # kernels are compiled, launches recorded and repeated
        want = step(here, x.cpu(), dy.cpu(), recipe, splits.cpu())
        got = step(layer, x, dy, recipe, splits)
    with never_waiting():
        again = step(layer, x, dy, recipe, splits)
    exact = step(copy.deepcopy(layer).double().cpu(), x.cpu().double(), dy.cpu().double(),
                 None, splits.cpu())  # fmt: skip
    for mine, repeated, others, truth in zip(got, again, want, exact, strict=True):
        if recipe is None or not recipe.linear.delayed:
            assert torch.equal(mine, repeated)
        rounding = torch.finfo(torch.bfloat16).eps * float(truth.norm())
        assert error(mine.cpu(), truth) <= 1.2 * error(others, truth) + rounding
    assert not got[0][sum(LARGE) :].any()
    assert not got[1][sum(LARGE) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["current", "row", "block"])
def test_a_cuda_graph_takes_groups_of_any_size(name, large):
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
def test_a_cuda_graph_keeps_sizes_of_the_host(recipe, kind, large):
    """Its replays have those of the capture, whatever becomes of the memory that held them."""
    layer, x, dy, splits = large
    sizes = kind(LARGE)
    x.requires_grad_()

    def run(sizes) -> tuple[Tensor, ...]:
        with float8lab.autocast(recipe is not None, recipe=recipe):
            y = layer(x, sizes)
        # Detached: a graph of autograd that outlives its capture ties later ones to its stream.
        return y.detach(), *torch.autograd.grad(y, (x, layer.weight), dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run(sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(sizes)
    for index in range(len(sizes)):
        sizes[index] = 0
    del sizes
    for _ in range(2):
        with torch.no_grad():
            x[: sum(LARGE)].normal_()
        graph.replay()
        torch.testing.assert_close(got, run(splits), rtol=0, atol=0)
