"""MasterWeights equals a loop with explicit masters, and is an optimizer like any other."""

import contextlib
import copy
import functools
import gc
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions

import float8lab
from float8lab import recipes
from float8lab.optim import MasterWeights
from float8lab.optim.master_weights import write_parameters_
from float8lab.tensor import Float8Tensor, dispatch, quantize
from tests.copies import saved_and_loaded
from tests.near_ties import near_ties
from tests.pairwise import with_slow
from tests.recorder import Ops, launched
from tests.same_bytes import assert_same, assert_same_state

RECIPES = {
    "delayed": recipes.DelayedScaling(), "current": recipes.Float8CurrentScaling(),
    "row": recipes.Float8RowwiseScaling(), "block": recipes.Float8BlockScaling(),
    "mx": recipes.MXFP8BlockScaling(),
}  # fmt: skip
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "foreach": False}),
    "sgd-fused": (torch.optim.SGD, {"lr": 0.1, "fused": True}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-maximize": (torch.optim.SGD, {"lr": 0.1, "maximize": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw-amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "adagrad-foreach": (torch.optim.Adagrad, {"lr": 0.05, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}),
    "rmsprop-foreach": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "foreach": True}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}
each_optimizer = pytest.mark.parametrize(
    ("optimizer_class", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys()
)


def make_model(
    recipe: recipes.Recipe = RECIPES["current"],
    *,
    keep_init_values: bool = True,
    dtype=torch.float32,
) -> nn.Sequential:
    """Weights of 40x56 and 24x40 stored in FP8, with plain biases and a plain norm."""
    with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=keep_init_values):
        return nn.Sequential(
            float8lab.Linear(56, 40, device="cpu", params_dtype=dtype),
            nn.LayerNorm(40, dtype=dtype),
            float8lab.Linear(40, 24, device="cpu", params_dtype=dtype),
        )


@pytest.fixture
def model() -> nn.Sequential:
    return make_model()


@pytest.fixture
def twin(model) -> nn.Sequential:
    return copy.deepcopy(model)


@pytest.fixture
def adamw(model) -> MasterWeights:
    return MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)


@pytest.fixture
def sgd(model) -> MasterWeights:
    return MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)


def give_gradients(parameters, step: int = 0) -> None:
    for i, p in enumerate(parameters):
        noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
        p.grad = noise.to(p.dtype)


def train(model, optimizer, steps, start=0) -> None:
    for step in range(start, start + steps):
        give_gradients(model.parameters(), step)
        optimizer.step()


def fp8_parameters(model: nn.Module) -> list[Float8Tensor]:
    parameters = [p for p in model.parameters() if isinstance(p, Float8Tensor)]
    assert parameters
    return parameters


def assert_same_parameters(a: nn.Module, b: nn.Module) -> None:
    assert_same_state(dict(a.named_parameters()), dict(b.named_parameters()))


class Reference:
    """Explicit masters: a plain optimizer on high-precision copies, which are then quantized."""

    def __init__(self, parameters, optimizer_class, **options) -> None:
        self.parameters = list(parameters)
        self.masters = []
        for p in self.parameters:
            initial_value = (
                p.get_high_precision_init_val() if isinstance(p, Float8Tensor) else p.detach()
            )
            initial_value = p.dequantize() if initial_value is None else initial_value
            master = (
                initial_value.float().to(p.device) if isinstance(p, Float8Tensor) else initial_value
            )
            self.masters.append(master.detach().clone().requires_grad_())
        self.optimizer = optimizer_class(self.masters, **options)

    def step(self) -> None:
        for p, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.to(master.dtype)
        self.optimizer.step()
        for p, master in zip(self.parameters, self.masters, strict=True):
            if isinstance(p, Float8Tensor):
                s = p.spec
                new = quantize(master.detach(), s.fp8_dtype, block=s.block, scale_rule=s.scale_rule)
                for name in ("qdata", "scale", "amax"):
                    getattr(p, name).copy_(getattr(new, name))
            else:
                p.data.copy_(master.detach())


@pytest.mark.parametrize("keep_init_values", [True, False], ids=["init-values", "dequantized"])
@each_optimizer
def test_steps_equal_explicit_masters(optimizer_class, options, keep_init_values):
    model = make_model(RECIPES["block"], keep_init_values=keep_init_values)
    twin = copy.deepcopy(model)
    reference = Reference(twin.parameters(), optimizer_class, **options)
    optimizer = MasterWeights(model.parameters(), optimizer_class, **options)
    for step in range(5):
        train(model, optimizer, 1, start=step)
        train(twin, reference, 1, start=step)
        assert_same_parameters(model, twin)
    for p, master in zip(model.parameters(), reference.masters, strict=True):
        assert torch.equal(optimizer.masters.get(p, p), master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_recipe
def test_training_equals_explicit_masters(recipe, dtype):
    model = make_model(recipe, dtype=dtype)
    twin = copy.deepcopy(model)
    reference = Reference(twin.parameters(), torch.optim.AdamW, lr=0.01)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01)
    x = torch.randn(8, 56, dtype=dtype)
    for _ in range(4):
        for m, o in ((model, optimizer), (twin, reference)):
            m.zero_grad()
            with float8lab.autocast(recipe=recipe):
                loss = m(x).float().square().mean()
            loss.backward()
            o.step()
        assert_same_parameters(model, twin)
    for p in fp8_parameters(model):
        assert p.dtype == dtype
        assert p.spec == recipe.linear.w


def test_masters_are_rounded_once_to_fp8():
    # 1 + 2^-4 + 2^-10 lies above a tie of e4m3, and bfloat16 would round it to the tie
    p = nn.Parameter(quantize(torch.tensor([[448.0, 1.0]], dtype=torch.bfloat16)))
    optimizer = MasterWeights([p], torch.optim.SGD, lr=1.0)
    p.grad = torch.tensor([[0.0, -(2**-4) - 2**-10]], dtype=torch.bfloat16)
    optimizer.step()
    assert p.qdata.float().tolist() == [[448.0, 1.125]]


def test_fp8_parameters_of_other_dimensions_and_layouts_step():
    shapes = {"0-d": (), "1-d": (7,), "3-d": (2, 5, 6), "empty": (0, 4)}
    params = [nn.Parameter(quantize(torch.randn(s), block=(-1, -1))) for s in shapes.values()]
    params.append(nn.Parameter(quantize(torch.randn(2, 130, 140), block=(128, 128))))
    params.append(nn.Parameter(quantize(torch.randn(2, 3, 140), block=(1, 128))))
    params.append(nn.Parameter(quantize(torch.randn(12, 20), block=(1, -1)).t()))
    params.append(nn.Parameter(quantize(torch.randn(2, 5, 6)).transpose(0, 2)))
    params.append(nn.Parameter(quantize(torch.randn(4, 9), block=(1, 3))))
    before = [p.dequantize().clone() for p in params]
    optimizer = MasterWeights(params, torch.optim.SGD, lr=1.0)
    for p in params:
        p.grad = torch.ones(p.shape)
    optimizer.step()
    for p, old in zip(params, before, strict=True):
        spec = p.spec
        new = quantize(old - 1, spec.fp8_dtype, block=spec.block, scale_rule=spec.scale_rule)
        assert_same(p, new)


def parameters_of_many_kinds(number: int, device: str = "cpu") -> list[nn.Parameter]:
    blocks = ((-1, -1), (1, -1), (1, 128), (128, 128))
    params = [
        nn.Parameter(quantize(torch.randn(48, 64 + 16 * i, device=device), block=block))
        for i in range(number)
        for block in blocks
    ]
    half = [torch.randn(8, device=device, dtype=torch.bfloat16) for _ in range(number)]
    return [*params, *map(nn.Parameter, half)]


def assert_written(params, masters) -> None:
    for p, master in zip(params, masters, strict=True):
        fp8 = isinstance(p, Float8Tensor)
        assert_same(p, quantize(master, block=p.spec.block) if fp8 else master.to(p.dtype))


def test_write_has_as_many_ops_for_many_parameters_as_for_few():
    counts = []
    for number in (2, 9):
        params = parameters_of_many_kinds(number)
        masters = [torch.randn(p.shape) for p in params]
        with Ops() as ops:
            write_parameters_(dict(zip(params, masters, strict=True)))
        assert_written(params, masters)
        counts.append(Counter(ops.names))
    assert counts == [{"float8lab.cast.many_": 4, "aten._foreach_copy_.default": 1}] * 2


def test_step_has_as_many_ops_for_many_parameters_as_for_few():
    counts = []
    for number in (2, 9):
        params = [p for p in parameters_of_many_kinds(number) if isinstance(p, Float8Tensor)]
        optimizer = MasterWeights(params, torch.optim.SGD, lr=0.1, foreach=True)
        for p in params:
            p.grad = torch.ones(p.shape)
        with Ops() as ops:
            optimizer.step()
        assert_written(params, [optimizer.masters[p].detach() for p in params])
        counts.append(Counter(ops.names))
    assert counts[0]["float8lab.cast.many_"] == 4
    assert counts[0] == counts[1]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # warnings of the profiler itself differ between versions
def test_gpu_launches_do_not_grow_with_the_number_of_parameters():
    counts = []
    for number in (2, 20):
        params = parameters_of_many_kinds(number, "cuda")
        masters = [torch.randn(p.shape, device="cuda") for p in params]
        write = functools.partial(write_parameters_, dict(zip(params, masters, strict=True)))
        write()  # compiles, and copies the tables
        counts.append(launched(write))
        assert_written(params, masters)
    few, many = counts
    assert few == many
    # Amaxes and casts of per-tensor parameters, and one cast for each other block.
    assert sum(name.endswith("_kernel") for name in few) == 2 + 3
    assert len(few) <= 2 + 3 + 2 + 1  # zeros, with what a profile may add; one copy in bfloat16


def test_every_buffer_that_a_step_writes_has_a_new_version(device):
    params = [
        nn.Parameter(quantize(torch.randn(32, 48, device=device), block=block))
        for block in ((-1, -1), (1, -1), (1, 128), (1, 16))
    ]
    before = [(p._version, p.qdata._version, p.scale._version, p.amax._version) for p in params]
    write_parameters_({p: torch.randn(32, 48, device=device) for p in params})
    for p, versions in zip(params, before, strict=True):
        after = (p._version, p.qdata._version, p.scale._version, p.amax._version)
        assert all(new > old for new, old in zip(after, versions, strict=True))


def test_parameters_keep_their_identity_and_caches_see_the_change(model, adamw):
    before = [(p, p.qdata, p.qdata.data_ptr(), p._version) for p in fp8_parameters(model)]
    x = torch.randn(4, 56)
    y = model(x)
    y.sum().backward()
    adamw.step()
    for p, (parameter, qdata, address, version) in zip(fp8_parameters(model), before, strict=True):
        assert p is parameter
        assert p.qdata is qdata
        assert p.qdata.data_ptr() == address
        assert p._version > version
    assert not torch.equal(model(x), y)


@pytest.mark.filterwarnings("ignore:.*is stored as:UserWarning")  # the test causes this warning
@each_recipe
def test_cached_casts_follow_an_update(recipe):
    # The recipe multiplies another format than the stored one, so the weight is cast again.
    with float8lab.fp8_model_init(recipe=recipes.Float8RowwiseScaling()):
        layer = float8lab.Linear(32, 16, device="cpu")
    optimizer = MasterWeights(layer.parameters(), torch.optim.SGD, lr=1.0)
    x = torch.randn(4, 32)
    with float8lab.autocast(recipe=recipe):
        before = layer(x, is_first_microbatch=True)
        before.sum().backward()
        optimizer.step()
        twin = copy.deepcopy(layer)
        after = layer(x, is_first_microbatch=True)
    with float8lab.autocast(recipe=recipe):
        expected = twin(x)
    assert not torch.equal(after, before)
    if not recipe.linear.delayed:  # delayed scales are those of the twin, but one step later
        assert torch.equal(after, expected)


def test_backward_after_a_step_raises(model, sgd):
    with float8lab.autocast(recipe=RECIPES["current"]):
        loss = model(torch.randn(4, 56)).sum()
    loss.backward(retain_graph=True)
    sgd.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_masters_start_from_the_kept_initial_values_and_free_them(model):
    initial_values = [p.get_high_precision_init_val() for p in fp8_parameters(model)]
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    assert len(optimizer.masters) == 2
    for p, value in zip(fp8_parameters(model), initial_values, strict=True):
        assert torch.equal(optimizer.masters[p], value)
        assert p.get_high_precision_init_val() is None


def test_kept_initial_values_are_recognized_under_computed_scales():
    x = near_ties(16)  # dividing by the computed scales would give other bytes
    p = nn.Parameter(quantize(x, block=(1, -1)))
    p._high_precision_init_val = x.clone()
    assert torch.equal(MasterWeights([p], torch.optim.SGD, lr=0.1).masters[p], x)


def test_kept_initial_values_that_were_overwritten_are_not_used(model):
    model.load_state_dict(make_model().state_dict())
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    for p in fp8_parameters(model):
        assert torch.equal(optimizer.masters[p], p.dequantize())
        assert p.get_high_precision_init_val() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_and_their_states_have_the_master_dtype(model, dtype):
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, master_dtype=dtype, lr=0.1)
    train(model, optimizer, 1)
    assert list(optimizer.masters) == fp8_parameters(model)
    for p, master in optimizer.masters.items():
        assert master.dtype == dtype
        assert optimizer.state[p]["exp_avg"].dtype == dtype
        assert_same(p, quantize(master.detach().float()))


def test_16_bit_parameters_get_masters_on_request():
    model = make_model(dtype=torch.bfloat16)
    assert len(MasterWeights(model.parameters(), torch.optim.SGD, lr=2**-12).masters) == 2
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=2**-12, also_16_bit=True)
    assert len(optimizer.masters) == len(list(model.parameters()))
    norm = model[1].weight
    for _ in range(32):
        norm.grad = torch.ones_like(norm)
        optimizer.step()  # each update is below half a unit in the last place of 1
    assert torch.equal(norm.detach(), torch.full_like(norm, 1 - 2**-7).detach())


def test_gradients_are_not_copied_and_not_kept(model):
    gradients = []

    class GradientRecorder(torch.optim.SGD):
        def step(self, closure=None):
            gradients.extend(p.grad for g in self.param_groups for p in g["params"])
            return super().step(closure)

    optimizer = MasterWeights(model.parameters(), GradientRecorder, lr=0.1)
    train(model, optimizer, 1)
    for p, g in zip(model.parameters(), gradients, strict=True):
        assert p.grad is g
    assert all(master.grad is None for master in optimizer.masters.values())


def test_frozen_parameters_have_no_master_until_they_thaw(model):
    first, second = fp8_parameters(model)
    first.requires_grad_(False)
    before = first.clone()
    for optimizer_class in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = MasterWeights(model.parameters(), optimizer_class, lr=0.1)
        assert list(optimizer.masters) == [second]
        model(torch.randn(4, 56)).sum().backward()
        optimizer.step()
        assert_same(first, before)
    first.requires_grad_(True)
    model(torch.randn(4, 56)).sum().backward()
    optimizer.step()
    assert list(optimizer.masters) == [first, second]
    assert not torch.equal(first.qdata.view(torch.uint8), before.qdata.view(torch.uint8))
    second.requires_grad_(False)  # a parameter that is frozen later keeps its master
    optimizer.step()
    assert list(optimizer.masters) == [first, second]


class EagerSGD(torch.optim.SGD):
    """Makes its state in its constructor, as Adagrad does in some versions of torch."""

    def __init__(self, params, **options) -> None:
        super().__init__(params, **options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["made"] = torch.zeros(p.shape, dtype=p.dtype)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["made"] += 1
        return super().step(closure)


def test_thawed_parameter_gets_a_master_under_an_optimizer_with_eager_state():
    p = nn.Parameter(quantize(torch.randn(4, 4).bfloat16()), requires_grad=False)
    optimizer = MasterWeights([p], EagerSGD, lr=0.1)
    p.requires_grad_(True)
    give_gradients([p])
    optimizer.step()
    assert optimizer.state[p]["made"].dtype == torch.float32
    assert len(optimizer.inner.state) == 1


def test_parameters_without_gradients_do_not_move(model, adamw):
    before = copy.deepcopy(model)
    versions = [p._version for p in model.parameters()]
    adamw.step()
    assert_same_parameters(model, before)
    give_gradients([model[0].weight])
    adamw.step()
    assert [p._version for p in model.parameters()][1:] == versions[1:]
    assert model[0].weight._version > versions[0]


def test_parameter_written_by_other_code_becomes_its_master():
    model, source = make_model(), make_model()
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.0)
    model.load_state_dict(source.state_dict())
    train(model, optimizer, 1)
    for p, q in zip(fp8_parameters(model), fp8_parameters(source), strict=True):
        assert torch.equal(optimizer.masters[p], q.dequantize())


def test_parameter_swapped_out_and_back_keeps_its_master(model):
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.0)
    masters = [m.detach().clone() for m in optimizer.masters.values()]
    saved = copy.deepcopy(model.state_dict())
    model.load_state_dict(make_model().state_dict())
    model.load_state_dict(saved)
    train(model, optimizer, 1)
    torch.testing.assert_close([*optimizer.masters.values()], masters, rtol=0, atol=0)


@pytest.mark.parametrize("copy_function", [None, copy.deepcopy, saved_and_loaded])
def test_edited_master_reaches_the_parameter(copy_function, model):
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.0)
    with torch.no_grad():
        optimizer.masters[model[0].weight].clamp_(-0.01, 0.01)
    if copy_function is not None:
        model, optimizer = copy_function((model, optimizer))
    p = model[0].weight
    optimizer.step()
    assert p.dequantize().abs().max() <= 0.0101
    assert_same(p, quantize(optimizer.masters[p].detach()))


def test_replaced_parameters_get_masters_of_their_own():
    # Frameworks do so when they shard a model after its optimizer was made.
    model, replacement = make_model(), make_model()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.param_groups[0]["params"] = list(replacement.parameters())
    before = copy.deepcopy(model)
    give_gradients(replacement.parameters())
    optimizer.step()
    assert_same_parameters(model, before)
    assert set(optimizer.masters) == set(fp8_parameters(replacement))


def test_parameters_can_be_replaced_by_another_number_of_them(model, sgd):
    sgd.param_groups[0]["params"] = [model[2].weight]
    before = copy.deepcopy(model)
    train(model, sgd, 1)
    assert list(sgd.masters) == [model[2].weight]
    assert_same(model[0].weight, before[0].weight)
    sgd.param_groups[0]["params"] = list(model.parameters())
    sgd.step()
    assert set(sgd.masters) == set(fp8_parameters(model))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Adagrad])
def test_parameter_that_leaves_the_meta_device_gets_a_master_on_its_device(optimizer_class):
    with float8lab.fp8_model_init():
        layer = float8lab.Linear(8, 4, bias=False, device="meta")
    p = layer.weight
    optimizer = MasterWeights([p], optimizer_class, lr=0.1)
    torch.utils.swap_tensors(p, nn.Parameter(quantize(torch.randn(4, 8))))
    give_gradients([p])
    optimizer.step()
    assert p.device == optimizer.masters[p].device == torch.device("cpu")
    assert_same(p, quantize(optimizer.masters[p].detach()))


def test_16_bit_parameters_can_be_swapped():
    model = make_model(dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, also_16_bit=True)
    for p in model.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone()))
    train(model, optimizer, 1)
    assert len(optimizer.masters) == len(list(model.parameters()))


def test_compiled_step_equals_eager_step(model, twin, adamw):
    compiled = MasterWeights(twin.parameters(), torch.optim.AdamW, lr=0.1)
    step = torch.compile(lambda: compiled.step(), backend="eager")
    for _ in range(2):
        for module, take_step in ((model, adamw.step), (twin, step)):
            give_gradients(module.parameters())
            take_step()
    assert_same_parameters(twin, model)


def test_without_fp8_parameters_steps_and_states_are_those_of_the_plain_optimizer():
    model = nn.Linear(8, 4)
    twin = copy.deepcopy(model)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.1)
    assert optimizer.masters == {}
    assert optimizer.defaults == plain.defaults
    train(model, optimizer, 3)
    train(twin, plain, 3)
    assert_same_parameters(model, twin)
    state, plain_state = optimizer.state_dict(), plain.state_dict()
    assert state["param_groups"] == plain_state["param_groups"]
    assert state["state"].keys() == plain_state["state"].keys()
    assert state["state"][0].keys() == plain_state["state"][0].keys()


def test_attributes_are_those_of_the_inner_optimizer(model, adamw):
    plain = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.1)
    assert isinstance(adamw, torch.optim.Optimizer)
    assert adamw.defaults == plain.defaults
    assert adamw.param_groups[0].keys() == plain.param_groups[0].keys()
    assert [id(p) for p in adamw.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    assert repr(adamw) == repr(plain).replace("AdamW", "MasterWeights of AdamW", 1)
    assert not adamw.state
    train(model, adamw, 1)
    p = model[0].weight
    state, master = adamw.inner.state[adamw.masters[p]], adamw.masters[p]
    assert_same_state(adamw.state[p], {**state, "master": master.detach()})
    adamw.state[p]["step"] = torch.tensor(7.0)
    assert state["step"] == 7
    adamw.state = adamw.state
    assert_same_state(adamw.inner.state[master], state)
    adamw.state = {}
    assert not adamw.state
    assert not adamw.inner.state


def test_param_groups_have_options_of_their_own(model, twin):
    groups = [
        {"params": [model[0].weight], "lr": 0.5},
        {"params": []},
        {"params": [p for p in model.parameters() if p is not model[0].weight]},
    ]
    optimizer = MasterWeights(groups, torch.optim.SGD, lr=0.1, momentum=0.9)
    assert [g["lr"] for g in optimizer.param_groups] == [0.5, 0.1, 0.1]
    reference = Reference(twin.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    first, *rest = reference.optimizer.param_groups[0]["params"]
    reference.optimizer = torch.optim.SGD(
        [{"params": [first], "lr": 0.5}, {"params": rest}], lr=0.1, momentum=0.9
    )
    train(model, optimizer, 3)
    train(twin, reference, 3)
    assert_same_parameters(model, twin)


def test_names_of_named_parameters_are_kept(model):
    optimizer = MasterWeights(model.named_parameters(), torch.optim.SGD, lr=0.1)
    names = [name for name, _ in model.named_parameters()]
    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == names
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["param_names"] == names


def test_added_param_group_gets_masters_and_options(model):
    optimizer = MasterWeights([model[0].weight], torch.optim.AdamW, lr=0.1)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.add_param_group({"params": model[2].weight, "lr": 0.3})
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.3]
    assert optimizer.param_groups[1]["betas"] == (0.9, 0.999)
    assert set(optimizer.masters) == set(fp8_parameters(model))
    before = copy.deepcopy(model)
    train(model, optimizer, 1)
    for p, q in zip(fp8_parameters(model), fp8_parameters(before), strict=True):
        assert not torch.equal(p.qdata.float(), q.qdata.float())
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": model[2].weight})


def test_groups_may_be_removed_and_added_again(model, twin):
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    reference = MasterWeights(twin.parameters(), torch.optim.AdamW, lr=0.1)
    train(model, optimizer, 2)
    train(twin, reference, 2)
    group = optimizer.param_groups[0]
    optimizer.param_groups.clear()
    optimizer.add_param_group(group)
    train(model, optimizer, 1)
    train(twin, reference, 1)
    assert_same_parameters(model, twin)  # masters and moments were kept
    extra = torch.nn.Parameter(torch.ones(2))
    optimizer.param_groups.insert(0, {**group, "params": [extra]})  # no call tells the optimizer
    extra.grad = torch.ones(2)
    train(model, optimizer, 1)
    train(twin, reference, 1)
    assert_same_parameters(model, twin)
    assert bool((extra < 1).all())
    del optimizer.param_groups[0]
    assert optimizer.state_dict()["state"].keys() == reference.state_dict()["state"].keys()


def test_short_masters_of_weights_without_gradients_resume_bit_for_bit():
    """The first step does not reach every weight, such as those of experts without tokens."""

    def build():
        torch.manual_seed(0)
        with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
            layers = (float8lab.Linear(32, 32, bias=False, device="cpu") for _ in range(2))
            built = torch.nn.ModuleList(layers)
        kwargs = {"lr": 1e-3, "master_dtype": torch.bfloat16}
        return built, MasterWeights(built.parameters(), torch.optim.SGD, **kwargs)

    model, optimizer = build()
    model[0].weight.grad = torch.ones(32, 32)
    optimizer.step()
    for optimizer_first in (True, False):
        resumed, resumed_optimizer = build()
        loads = [
            lambda model=resumed, saved=model: model.load_state_dict(saved.state_dict()),
            lambda to=resumed_optimizer: to.load_state_dict(optimizer.state_dict()),
        ]
        for load in reversed(loads) if optimizer_first else loads:
            load()
        resumed_optimizer.state_dict()  # matches masters and parameters, as a step does
        assert_same_parameters(resumed, model)
        for p, q in zip(resumed.parameters(), model.parameters(), strict=True):
            assert torch.equal(resumed_optimizer.masters[p], optimizer.masters[q])


SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "one-cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
}


@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedulers_change_the_learning_rate_as_without_masters(model, twin, adamw, schedule):
    reference = Reference(twin.parameters(), torch.optim.AdamW, lr=0.1)
    scheduler, reference_scheduler = schedule(adamw), schedule(reference.optimizer)
    for step in range(6):
        train(model, adamw, 1, start=step)
        train(twin, reference, 1, start=step)
        scheduler.step()
        reference_scheduler.step()
        assert scheduler.get_last_lr() == reference_scheduler.get_last_lr()
    assert_same_parameters(model, twin)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_removes_or_zeroes_gradients(model, sgd, set_to_none):
    train(model, sgd, 1)
    sgd.zero_grad(set_to_none=set_to_none)
    for p in model.parameters():
        assert (p.grad is None) == set_to_none
        assert set_to_none or not p.grad.any()


def test_step_hooks_run_once(model, sgd):
    calls = []
    sgd.register_step_pre_hook(lambda *_: calls.append("pre"))
    sgd.register_step_post_hook(lambda *_: calls.append("post"))
    sgd.step()
    assert calls == ["pre", "post"]


def test_gradient_scaler_skips_steps_with_infinite_gradients(model, twin):
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    reference = Reference(twin.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x = torch.randn(4, 56)
    for is_infinite in (False, True, False):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        if is_infinite:
            model[0].weight.grad[0, 0] = torch.inf
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if is_infinite:
            assert_same_parameters(model, before)
            continue
        twin.zero_grad()
        (twin(x).square().mean() * 1024.0).backward()
        for p in twin.parameters():
            p.grad.div_(1024.0)
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        reference.step()
        assert_same_parameters(model, twin)
    assert scaler.get_scale() == 512.0


def test_closure_is_called_with_gradients_enabled(model, twin):
    x = torch.randn(4, 56)
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1)
    reference = Reference(twin.parameters(), torch.optim.SGD, lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    expected = twin(x).square().mean()
    expected.backward()
    reference.step()
    assert torch.equal(optimizer.step(closure), expected)
    assert_same_parameters(model, twin)


def test_lbfgs_sees_parameters_that_follow_its_masters():
    with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
        model = float8lab.Linear(16, 4, device="cpu")
    optimizer = MasterWeights(
        model.parameters(), torch.optim.LBFGS, lr=1.0, max_iter=8, line_search_fn="strong_wolfe"
    )
    x, target = torch.randn(64, 16), torch.randn(64, 4)
    losses = []

    def closure() -> Tensor:
        p = model.weight
        assert_same(p, quantize(optimizer.masters[p].detach()))
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    optimizer.step(closure)
    assert len(losses) > 4
    inputs = torch.cat((x, torch.ones(64, 1)), 1)
    exact = inputs @ torch.linalg.lstsq(inputs, target).solution
    best = (exact - target).square().mean().item()
    assert best < closure().item() < 1.05 * best < losses[0]


@each_optimizer
def test_state_dict_round_trip_is_exact(model, optimizer_class, options):
    optimizer = MasterWeights(model.parameters(), optimizer_class, **options)
    train(model, optimizer, 3)
    saved = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, 3, start=3)
    for order in (("model", "optimizer"), ("optimizer", "model")):
        resumed = make_model()
        resumed_optimizer = MasterWeights(resumed.parameters(), optimizer_class, **options)
        state = copy.deepcopy(saved)  # an optimizer takes it over
        for name in order:
            {"model": resumed, "optimizer": resumed_optimizer}[name].load_state_dict(state[name])
        train(resumed, resumed_optimizer, 3, start=3)
        assert_same_parameters(resumed, model)
        for p, q in zip(fp8_parameters(resumed), fp8_parameters(model), strict=True):
            assert torch.equal(resumed_optimizer.masters[p], optimizer.masters[q])


def test_masters_restore_weights_after_loading_a_high_precision_state(model, adamw):
    train(model, adamw, 3)
    saved = copy.deepcopy(adamw.state_dict())
    resumed = make_model()
    state = model.state_dict()
    values = {n: v.dequantize() if isinstance(v, Float8Tensor) else v for n, v in state.items()}
    resumed.load_state_dict({name: value.bfloat16() for name, value in values.items()})
    scales = zip(fp8_parameters(resumed), fp8_parameters(model), strict=True)
    assert any(not torch.equal(p.scale, q.scale) for p, q in scales)
    MasterWeights(resumed.parameters(), torch.optim.AdamW).load_state_dict(saved)
    for p, q in zip(fp8_parameters(resumed), fp8_parameters(model), strict=True):
        assert_same(p, q)


def test_state_dict_is_that_of_the_plain_optimizer_and_masters(model, adamw):
    before = adamw.state_dict()["state"]
    assert {k: list(v) for k, v in before.items()} == {0: ["master"], 4: ["master"]}
    train(model, adamw, 1)
    saved = adamw.state_dict()
    assert set(saved["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "master"}
    assert set(saved["state"][1]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "master" not in adamw.inner.state[adamw.masters[model[0].weight]]
    assert not saved["state"][0]["master"].requires_grad
    torch.optim.AdamW(float8lab.to_high_precision(model).parameters()).load_state_dict(saved)


@pytest.mark.parametrize(
    ("optimizer_class", "flatten"),
    [(torch.optim.AdamW, False), (torch.optim.AdamW, True), (torch.optim.SGD, True)],
    ids=["AdamW-nested", "AdamW-flattened", "SGD-flattened"],
)
def test_states_of_distributed_checkpoints_hold_masters(model, optimizer_class, flatten):
    optimizer = MasterWeights(model.parameters(), optimizer_class, lr=0.1)
    train(model, optimizer, 2)
    dsd, options = checkpoint.state_dict, StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=options))
    resumed = make_model()
    resumed_optimizer = MasterWeights(resumed.parameters(), optimizer_class, lr=0.1)
    resumed.load_state_dict(model.state_dict())
    dsd.set_optimizer_state_dict(resumed, resumed_optimizer, saved, options=options)
    _, copied = copy.deepcopy((model, optimizer))
    assert [*map(set, copied.state.values())] == [*map(set, optimizer.state.values())]
    expected = optimizer.state_dict()["state"]
    for index, entry in resumed_optimizer.state_dict()["state"].items():
        assert_same_state(entry, expected[index])


def test_flattened_state_without_masters_loads(model, adamw):
    dsd, options = checkpoint.state_dict, StateDictOptions(flatten_optimizer_state_dict=True)
    high_precision_model = float8lab.to_high_precision(copy.deepcopy(model))
    plain = torch.optim.AdamW(high_precision_model.parameters(), lr=0.1)
    give_gradients(high_precision_model.parameters())
    plain.step()
    saved = dsd.get_optimizer_state_dict(high_precision_model, plain, options=options)
    masters = [master.detach().clone() for master in adamw.masters.values()]
    dsd.set_optimizer_state_dict(model, adamw, saved, options=options)
    assert_same_state(
        dict(adamw.state[model[0].bias]), dict(plain.state[high_precision_model[0].bias])
    )
    for master, before in zip(adamw.masters.values(), masters, strict=True):
        assert torch.equal(master, before)


def test_state_of_a_plain_optimizer_loads(model):
    high_precision_model = float8lab.to_high_precision(copy.deepcopy(model))
    plain = torch.optim.AdamW(high_precision_model.parameters(), lr=0.3)
    train(high_precision_model, plain, 2)
    saved = plain.state_dict()

    # With its weights: the masters are the values that FP8 keeps of them.
    model.load_state_dict(high_precision_model.state_dict())
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.3
    for i, p in enumerate(model.parameters()):
        for key, value in saved["state"][i].items():
            assert torch.equal(optimizer.state[p][key], value)
        if p in optimizer.masters:
            assert torch.equal(optimizer.masters[p], p.dequantize())
    # Without its weights: the masters still fit the model, and stay.
    model = make_model()
    initial_values = [p.get_high_precision_init_val() for p in fp8_parameters(model)]
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.1)
    optimizer.load_state_dict(saved)
    assert all(
        torch.equal(m, k) for m, k in zip(optimizer.masters.values(), initial_values, strict=True)
    )


def test_loading_a_state_that_does_not_fit_raises_or_warns(model, adamw):
    train(model, adamw, 1)
    saved = adamw.state_dict()
    fewer = MasterWeights(list(model.parameters())[:-1], torch.optim.AdamW, lr=0.1)
    with pytest.raises(
        ValueError, match=r"state_dict must have groups of \[5\] parameters; got \[6\]"
    ):
        fewer.load_state_dict(saved)
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["master"] = torch.zeros(3, 3)
    with pytest.raises(
        ValueError, match=r"must have master of .* in shape \(40, 56\); got .*\(3, 3\)"
    ):
        adamw.load_state_dict(wrong)
    high_precision_model = float8lab.to_high_precision(make_model())
    plain = MasterWeights(high_precision_model.parameters(), torch.optim.AdamW, lr=0.1)
    with pytest.warns(UserWarning, match="master weights of 2 parameters that are not stored"):
        plain.load_state_dict(saved)
    assert "master" not in plain.state[high_precision_model[0].weight]


def test_state_dict_hooks_run(model, sgd):
    calls = []
    sgd.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    sgd.register_state_dict_post_hook(lambda o, s: {**s, "extra": 1})
    sgd.register_load_state_dict_pre_hook(lambda o, s: {k: v for k, v in s.items() if k != "extra"})
    sgd.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    saved = sgd.state_dict()
    assert saved["extra"] == 1
    sgd.load_state_dict(saved)
    assert calls == ["pre", "loaded"]


@pytest.mark.parametrize("copy_function", [copy.deepcopy, saved_and_loaded])
def test_copies_of_model_and_optimizer_train_separately(model, adamw, copy_function):
    train(model, adamw, 2)
    twin, twin_optimizer = copy_function((model, adamw))
    frozen = copy.deepcopy(twin)
    assert set(twin_optimizer.masters) == set(fp8_parameters(twin))
    train(model, adamw, 2, start=2)
    assert_same_parameters(twin, frozen)
    train(twin, twin_optimizer, 2, start=2)
    assert_same_parameters(twin, model)
    for p, q in zip(fp8_parameters(twin), fp8_parameters(model), strict=True):
        assert torch.equal(twin_optimizer.masters[p], adamw.masters[q])


def test_16_bit_parameter_that_is_partly_nan_keeps_its_master():
    model = nn.Linear(8, 4, dtype=torch.bfloat16)
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.1, also_16_bit=True)
    give_gradients(model.parameters())
    model.weight.grad[0, 0] = torch.nan
    optimizer.step()
    before = optimizer.masters[model.weight].detach().clone()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert_same(optimizer.state_dict()["state"][0]["master"], before)


def test_moving_average_of_an_fp8_stored_model_is_that_of_its_values(model):
    optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(
        float8lab.to_high_precision(copy.deepcopy(model)),
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9),
    )
    expected = None
    for step in range(20):
        train(model, optimizer, 1, start=step)
        with float8lab.fallback("silent"):
            average.update_parameters(model)
        value = model[0].weight.dequantize().detach()
        expected = value if expected is None else torch.lerp(expected, value, 1 - 0.9)
    assert type(average.module[0]) is nn.Linear
    torch.testing.assert_close(average.module[0].weight.detach(), expected)


def test_averaged_model_may_be_stored_in_fp8(model):
    average = torch.optim.swa_utils.AveragedModel(model)
    with float8lab.fallback("silent"):
        average.update_parameters(model)
    assert_same_parameters(average.module, model)
    assert isinstance(average.module[0].weight, Float8Tensor)


STEPS, ADAMW = 120, {"lr": 2e-3, "weight_decay": 0.0}


def make_student(recipe: recipes.Recipe | None) -> nn.Module:
    """Return equal weights at each call, stored in FP8 by ``recipe`` if there is one."""
    torch.manual_seed(0)
    with float8lab.fp8_model_init(
        recipe is not None, recipe, preserve_high_precision_init_val=recipe is not None
    ):
        return nn.Sequential(
            float8lab.Linear(32, 128, device="cpu", init_method=nn.init.kaiming_uniform_),
            nn.Tanh(),
            float8lab.Linear(128, 16, device="cpu"),
        )


def fit(model, optimizer, recipe) -> list[float]:
    """Losses of a regression on a fixed random teacher."""
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(16, 32, generator=generator)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(64, 32, generator=generator)
        optimizer.zero_grad()
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            loss = (model(x) - (x @ teacher.t()).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean_of_last_losses(losses: list[float]) -> float:
    return sum(losses[-10:]) / 10


@pytest.fixture(scope="module")
def high_precision_losses() -> list[float]:
    model = make_student(None)
    return fit(model, torch.optim.AdamW(model.parameters(), **ADAMW), None)


@with_slow({"delayed", "mx"}, *RECIPES)
def test_loss_follows_high_precision_with_masters_and_stalls_without(name, high_precision_losses):
    recipe = RECIPES[name]
    reference = mean_of_last_losses(high_precision_losses)
    model = make_student(recipe)
    losses = fit(model, MasterWeights(model.parameters(), torch.optim.AdamW, **ADAMW), recipe)
    stalling = make_student(recipe)
    with float8lab.fallback("silent"):
        stalled = fit(stalling, torch.optim.AdamW(stalling.parameters(), **ADAMW), recipe)
    assert reference < 0.4 * high_precision_losses[0]
    assert mean_of_last_losses(losses) < 1.02 * reference  # measured: up to 1.003
    assert mean_of_last_losses(stalled) > 1.2 * reference  # measured: 1.3 to 1.7


def live_bytes() -> dict[tuple[int, int], int]:
    """Bytes of every distinct storage that a live tensor holds, by address and size."""
    gc.collect()
    storages = {}
    for x in gc.get_objects():
        if type(x) in (Tensor, nn.Parameter):  # no wrappers, and no fakes left by a compilation
            # A sparse tensor has no storage, and that of a compilation's tensor has no address.
            with contextlib.suppress(RuntimeError):
                storage = x.untyped_storage()
                storages[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
    return storages


def test_memory_is_one_byte_per_parameter_element_and_the_masters():
    N, K = 1024, 512
    before = live_bytes()
    with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
        layer = float8lab.Linear(K, N, bias=False, device="cpu", params_dtype=torch.bfloat16)
    optimizer = MasterWeights(layer.parameters(), torch.optim.AdamW, lr=0.1)
    for _ in range(2):
        with float8lab.autocast(recipe=RECIPES["current"]):
            layer(torch.randn(4, K, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    total = sum(size for key, size in live_bytes().items() if key not in before)
    weights, master, moments = N * K, 4 * N * K, 2 * 4 * N * K
    assert weights + master + moments <= total < weights + master + moments + 4096
    del optimizer
    total = sum(size for key, size in live_bytes().items() if key not in before)
    assert weights <= total < weights + 4096


@pytest.mark.gpu
def test_gpu_memory_is_one_byte_per_parameter_element_and_the_masters():
    N, K = 4096, 4096
    # After this, cuBLAS has its workspaces, one for each thread that multiplies.
    small = float8lab.Linear(64, 64, bias=False, device="cuda", params_dtype=torch.bfloat16)
    with float8lab.autocast(recipe=RECIPES["current"]):
        small(torch.randn(16, 64, dtype=torch.bfloat16, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
        layer = float8lab.Linear(K, N, bias=False, device="cuda", params_dtype=torch.bfloat16)
    optimizer = MasterWeights(layer.parameters(), torch.optim.AdamW, lr=0.1)
    x = torch.randn(16, K, dtype=torch.bfloat16, device="cuda")
    for _ in range(2):
        with float8lab.autocast(recipe=RECIPES["current"]):
            layer(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    slack = 40 << 20  # x, scales, and a workspace of cuBLAS, which the allocator counts
    grown = torch.cuda.memory_allocated() - before
    assert 13 * N * K <= grown < 13 * N * K + slack


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"capturable": True}, {"fused": True}], ids=str)
def test_gpu_optimizers_equal_explicit_masters(options):
    model = make_model().to("cuda")
    twin = copy.deepcopy(model)
    reference = Reference(twin.parameters(), torch.optim.AdamW, lr=0.01, **options)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01, **options)
    for _ in range(3):
        for m, o in ((model, optimizer), (twin, reference)):
            m.zero_grad()
            m(torch.ones(4, 56, device="cuda")).square().mean().backward()
            o.step()
        assert_same_parameters(model, twin)


@pytest.mark.gpu
def test_masters_move_with_the_model(model):
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=0.01)
    masters = [m.detach().clone() for m in optimizer.masters.values()]
    model.to("cuda")
    optimizer.step()
    for master, before in zip(optimizer.masters.values(), masters, strict=True):
        assert master.device.type == "cuda"
        assert torch.equal(master.cpu(), before)


def test_wrong_arguments_raise():
    p = nn.Parameter(quantize(torch.ones(2, 2)))
    with pytest.raises(ValueError, match="empty parameter list"):
        MasterWeights([], torch.optim.SGD)
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        MasterWeights(p, torch.optim.SGD)
    with pytest.raises(TypeError, match=r"optimizer_class must be a class such as .*; got SGD"):
        MasterWeights([p], torch.optim.SGD([torch.ones(1, requires_grad=True)]))
    with pytest.raises(TypeError, match=r"must make a torch.optim.Optimizer; got dict"):
        MasterWeights([p], lambda params: {})
    with pytest.raises(TypeError, match=r"master_dtype must be .* got torch.float64"):
        MasterWeights([p], torch.optim.SGD, master_dtype=torch.float64)
    with pytest.raises(TypeError, match="unexpected keyword argument 'moment'"):
        MasterWeights([p], torch.optim.SGD, moment=0.9)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        MasterWeights([p], torch.optim.SGD, lr=-1)
    with pytest.raises(ValueError, match="more than one parameter group"):
        MasterWeights([{"params": [p]}, {"params": [p]}], torch.optim.SGD)


@pytest.mark.parametrize(
    "optimizer", [torch.optim.SGD, torch.optim.AdamW], ids=lambda o: o.__name__
)
def test_plain_optimizer_of_fp8_parameters_warns_once(optimizer, monkeypatch):
    monkeypatch.setattr(dispatch, "_POLICY", dispatch._Policy())
    with float8lab.fp8_model_init():
        layer = float8lab.Linear(16, 16, device="cpu")
    plain = optimizer(layer.parameters(), lr=0.1)
    layer(torch.ones(2, 16)).sum().backward()
    with pytest.warns(UserWarning, match="Train with float8lab.optim.MasterWeights"):
        plain.step()
    plain.step()  # no second warning
