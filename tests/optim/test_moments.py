"""Moments in FP8, and bfloat16 parameters that are rounded stochastically."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions

import float8lab
from float8lab import ops
from float8lab.ops.reference.moments import BLOCK, round_stochastically
from float8lab.optim import MasterWeights, moments
from tests.copies import saved_and_loaded
from tests.same_bytes import assert_same_state

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "adamw-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adamw-amsgrad": (torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01}),
}
each_optimizer = pytest.mark.parametrize(
    ("optimizer_class", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS.keys()
)
STORAGES = {
    "fp8": ("float32", {"fp8_moments": True}),
    "rounded": ("bfloat16", {"stochastic_rounding": True}),
    "both": ("bfloat16", {"fp8_moments": True, "stochastic_rounding": True}),
    "stored": ("stored", {"fp8_moments": True}),
    "stored-rounded": (
        "stored",
        {"fp8_moments": True, "stochastic_rounding": True, "master_dtype": torch.bfloat16},
    ),
}
each_storage = pytest.mark.parametrize(("kind", "storage"), STORAGES.values(), ids=STORAGES.keys())


def make_model(kind: str = "float32") -> nn.Module:
    """Weights of 48x200, of 30x48, which is too small for FP8 moments, and of a convolution."""
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 32, 3, bias=False).to(memory_format=torch.channels_last)
    if kind == "stored":
        with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
            layers = [
                float8lab.Linear(200, 48, device="cpu"),
                float8lab.Linear(48, 30, device="cpu"),
            ]
        return nn.Sequential(*layers, conv)
    return nn.Sequential(nn.Linear(200, 48), nn.Linear(48, 30), conv).to(getattr(torch, kind))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for i, p in enumerate(model.parameters()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            p.grad = (noise + 1).to(p.dtype)
        optimizer.step()


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors of a model and its optimizer, by name."""
    state = {
        f"{index}.{name}": x
        for index, entry in optimizer.state_dict()["state"].items()
        for name, x in entry.items()
        if isinstance(x, Tensor)
    }
    return state | {
        name: x.qdata.view(torch.uint8) if isinstance(x, float8lab.Float8Tensor) else x
        for name, x in model.state_dict().items()
    }


def store_and_load(x: Tensor, name: str = "exp_avg", step: int = 1) -> Tensor:
    """Return a moment after it was quantized and dequantized."""
    p, entry = nn.Parameter(torch.empty_like(x)), {name: x}
    moments._quantize_moments(p, entry, step)
    del entry[name]
    moments._dequantize_moments(p, entry)
    return entry[name]


@pytest.mark.gpu
@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("shape", [(1000, 768), (3, 200), (70, 30), (5, 1), (0, 4)])
def test_kernels_store_the_bytes_of_the_reference(shape, is_square):
    x = torch.randn(shape, device="cuda").mul_(torch.logspace(-30, 30, shape[1], device="cuda"))
    x = x.abs() if is_square else x
    specials = [0.0, -0.0, 1e-30, 1e-38, 2.0**-140, 3e38, -3e38, torch.inf, torch.nan]
    for row, value in zip(x[:9], specials, strict=False):
        row[: shape[1] // 2] = value
    results = []
    for implementation in (moments, ops.reference.moments):
        data = torch.empty(shape, dtype=torch.uint8, device="cuda")
        scale = data.new_empty(shape[0], -(-shape[1] // BLOCK))
        implementation.quantize_moment_(x, data, scale, 7, is_square)
        values = implementation.dequantize_moment(data, scale, is_square)
        data[values.isnan()] = 0  # a NaN may have either sign
        results.append((data, scale, values))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dropped", [16, 20])
def test_stochastic_rounding_is_to_either_neighbor_and_right_on_average(dropped):
    x = torch.randn(64, 64)
    rounded = torch.stack([round_stochastically(x, dropped, step) for step in range(500)])
    low = (x.view(torch.int32) & -(1 << dropped)).view(torch.float32)
    high = ((x.view(torch.int32) & -(1 << dropped)) + (1 << dropped)).view(torch.float32)
    assert ((rounded == low) | (rounded == high)).all()
    expected_share = (x - low) / (high - low)
    error = ((rounded == high).float().mean(0) - expected_share) / (
        expected_share * (1 - expected_share) / 500
    ).sqrt()
    assert abs(error.mean()) < 0.08  # of 4096 values, each of variance 1
    assert 0.9 < error.std() < 1.1
    deviation = (rounded == high).float() - expected_share
    assert abs((deviation[1:] * deviation[:-1]).mean()) < 0.001  # steps are independent


def test_stochastic_rounding_keeps_representable_and_nonfinite_values():
    x = torch.tensor([0.0, -0.0, 1.5, -448.0, torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(x, 20, 3).view(torch.int32), x.view(torch.int32))
    # The NaN of CUDA has all bits set, and a carry would turn it into a number.
    nan = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert round_stochastically(nan, 20, 3).isnan().all()


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(
    "shape", [(64, 128), (50, 200), (5, 7, 150), (4096, 1), (2048, 3)], ids=str
)
def test_stored_moment_is_close_and_does_not_change_when_it_is_stored_again(name, shape):
    x = torch.randn(shape) * torch.randn(shape).exp()
    x = x.square() if name == "exp_avg_sq" else x
    loaded = store_and_load(x, name)
    assert torch.equal(store_and_load(loaded, name, step=2), loaded)
    # The roots of two neighbors differ by 1, and the largest of 128 roots is at least half of 127.
    power, largest = (4, 255) if name == "exp_avg_sq" else (2, 127)
    scale = torch.stack([b.abs().amax(-1) for b in x.split(BLOCK, -1)], -1)
    root = (x.abs() / scale.repeat_interleave(BLOCK, -1)[..., : shape[-1]]) ** (1 / power)
    low, high = ((root + sign * 2 / largest).clamp(min=0) ** power for sign in (-1, 1))
    share = loaded.abs() / scale.repeat_interleave(BLOCK, -1)[..., : shape[-1]]
    assert ((low <= share) & (share <= high)).all()
    assert torch.equal(loaded.sign(), x.sign())
    mean = torch.stack([store_and_load(x, name, step) for step in range(50)]).mean(0)
    is_large = root > 0.1
    assert ((mean - x) / x)[is_large].abs().mean() < 0.01
    assert ((loaded - x) / x)[is_large].abs().mean() > 0.005


def test_stored_moment_keeps_its_sign_and_only_zero_becomes_zero():
    x = torch.randn(32, 128)
    x[:, 1:100] *= 1e-12
    x[0, :3] = 0.0
    for name in ("exp_avg", "of_no_known_name"):
        assert torch.equal(store_and_load(x, name).sign(), x.sign())
    squares = x.square()
    assert torch.equal(store_and_load(squares, "exp_avg_sq").sign(), squares.sign())
    assert store_and_load(-squares, "exp_avg_sq").isnan().all()
    squares[:, 1:100] = squares.amax(1, keepdim=True) * 1e-5
    error = store_and_load(squares, "exp_avg_sq") / squares - 1
    assert error[:, 1:100].abs().max() < 0.6


def test_nonfinite_moments_become_nan():
    x = torch.ones(32, 128)
    x[0, 0], x[1, 1] = torch.nan, torch.inf
    loaded = store_and_load(x, "exp_avg_sq")
    assert loaded[0, 0].isnan()
    assert loaded[1, 1].isnan()  # the format has no infinity
    assert torch.equal(loaded[2:], x[2:])


def test_slow_average_moves_as_in_float32():
    p = nn.Parameter(torch.zeros(32, 128))
    optimizer = MasterWeights([p], torch.optim.AdamW, fp8_moments=True, betas=(0.9, 0.999))
    for step in range(400):
        p.grad = torch.randn(32, 128) if step < 200 else torch.full((32, 128), 1e-3)
        optimizer.step()
        if step == 199:
            before = moments_of(optimizer, p)["exp_avg_sq"].mean()
    after = moments_of(optimizer, p)["exp_avg_sq"].mean()
    assert after / before == pytest.approx(0.999**200, rel=0.03)  # rounding to nearest would give 1


def moments_of(optimizer: MasterWeights, p: nn.Parameter) -> dict[str, Tensor]:
    """Return the moments of a parameter, dequantized."""
    entry = dict(optimizer.state[p])
    moments._dequantize_moments(p, entry)
    return entry


@each_optimizer
def test_steps_follow_those_of_the_plain_optimizer(optimizer_class, options):
    model, twin = make_model(), make_model()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = MasterWeights(model.parameters(), optimizer_class, fp8_moments=True, **options)
    train(model, optimizer, range(12))
    train(twin, optimizer_class(twin.parameters(), **options), range(12))
    for p, q, old in zip(model.parameters(), twin.parameters(), start, strict=True):
        update_norm = (q - old).norm()
        assert (p - q).norm() < (0.12 if p.numel() >= moments.FEWEST else 1e-6) * update_norm
    first, small = model[0].weight, model[1].weight
    names = [name for name in optimizer.state[first] if name.endswith(".bits")]
    assert names
    assert not any(".bits" in name for name in optimizer.state[small])
    for name in names:
        assert optimizer.state[first][name].dtype == torch.uint8
        assert name.removesuffix(".bits") not in optimizer.state[first]


def test_moments_have_one_byte_per_element_and_scales():
    p = nn.Parameter(torch.zeros(256, 512))
    optimizer = MasterWeights([p], torch.optim.AdamW, fp8_moments=True)
    p.grad = torch.ones(256, 512)
    optimizer.step()
    state_bytes = sum(x.untyped_storage().nbytes() for x in optimizer.state[p].values())
    assert state_bytes == 2 * p.numel() * (1 + 1 / 128) + 4  # and the step counter


@each_storage
def test_chunk_size_changes_no_result(kind, storage, monkeypatch):
    states = []
    for chunk in (2**24, 100, 10_000):
        monkeypatch.setattr(moments, "CHUNK", chunk)
        model = make_model(kind)
        groups = [{"params": list(model[0].parameters()), "lr": 0.02}, {"params": []}]
        groups.append({"params": [*model[1].parameters(), *model[2].parameters()]})
        optimizer = MasterWeights(groups, torch.optim.AdamW, lr=0.01, **storage)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for step in range(3):
            train(model, optimizer, range(step, step + 1))
            scheduler.step()
        assert [len(g["params"]) for g in optimizer.inner.param_groups] == [2, 0, 3]
        assert [g["lr"] for g in optimizer.param_groups] == [0.0025, 0.00125, 0.00125]
        states.append(tensors_of(model, optimizer))
    for state in states[1:]:
        assert_same_state(state, states[0])


class StepCounter(torch.optim.SGD):
    """Counts its steps in the options of its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_counters_in_param_groups_count_steps_not_chunks(monkeypatch):
    monkeypatch.setattr(moments, "CHUNK", 1)
    model = make_model()
    optimizer = MasterWeights(model.parameters(), StepCounter, fp8_moments=True, lr=0.1)
    train(model, optimizer, range(3))
    assert optimizer.param_groups[0]["count"] == 3
    assert optimizer.param_groups[0]["roundings"] == 3


def test_parameter_without_a_gradient_and_its_moments_do_not_change():
    model = make_model()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, fp8_moments=True, lr=0.1)
    train(model, optimizer, range(2))
    before = {name: x.clone() for name, x in moments_of(optimizer, model[0].weight).items()}
    model[0].weight.grad, version = None, model[0].weight._version
    optimizer.step()
    after = moments_of(optimizer, model[0].weight)
    assert torch.equal(after["exp_avg"], before["exp_avg"])
    assert torch.equal(after["exp_avg_sq"], before["exp_avg_sq"])
    assert model[0].weight._version == version


def test_failing_step_leaves_the_moments_as_they_were(monkeypatch):
    class Failing(torch.optim.AdamW):
        fails = False

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise RuntimeError("lost")

    model = make_model("bfloat16")
    optimizer = MasterWeights(
        model.parameters(), Failing, fp8_moments=True, stochastic_rounding=True
    )
    train(model, optimizer, range(2))
    before = copy.deepcopy(tensors_of(model, optimizer))
    monkeypatch.setattr(Failing, "fails", True)
    with pytest.raises(RuntimeError, match="lost"):
        train(model, optimizer, range(2, 3))
    after = tensors_of(model, optimizer)
    large = [name for name in before if name.endswith(("bits", "scale", "weight"))]
    assert_same_state({name: after[name] for name in large}, {name: before[name] for name in large})
    assert optimizer.inner.param_groups[0]["params"] == list(model.parameters())
    assert after.keys() == before.keys()


def test_closures_and_gradient_scaling_give_the_same_step():
    model, twin = make_model(), make_model()
    optimizers = [
        MasterWeights(m.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, fp8_moments=True)
        for m in (model, twin)
    ]
    x = torch.randn(4, 200)
    calls = []

    def closure() -> Tensor:
        optimizers[0].zero_grad()
        loss = model[0](x).square().mean()
        loss.backward()
        calls.append(loss)
        return loss

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        loss = optimizers[0].step(closure)
        assert loss is calls[-1]
        optimizers[1].zero_grad()
        scaler.scale(twin[0](x).square().mean()).backward()
        scaler.step(optimizers[1])
        scaler.update()
    assert len(calls) == 2
    assert_same_state(tensors_of(model, optimizers[0]), tensors_of(twin, optimizers[1]))
    for storage in ({"fp8_moments": True}, {"stochastic_rounding": True}):
        with pytest.raises(ValueError, match=r"optimizer_class must step without a closure.*LBFGS"):
            MasterWeights(model.parameters(), torch.optim.LBFGS, **storage)
    with pytest.raises(TypeError, match=r"master_dtype must be one of .*float32.*; got .*float16"):
        MasterWeights(
            model.parameters(), torch.optim.SGD, stochastic_rounding=True, master_dtype=torch.half
        )


def test_bfloat16_parameters_take_updates_that_are_smaller_than_their_spacing():
    p, q = (nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16)) for _ in range(2))
    rounded = MasterWeights([p], torch.optim.SGD, lr=2**-12, stochastic_rounding=True)
    nearest = MasterWeights([q], torch.optim.SGD, lr=2**-12)
    for _ in range(64):
        p.grad = q.grad = 1 + torch.randn(64, 64, dtype=torch.bfloat16)
        rounded.step()
        nearest.step()
    assert p.dtype == torch.bfloat16
    assert 1 - p.detach().float().mean() == pytest.approx(2**-6, rel=0.05)
    assert 1 - q.detach().float().mean() < 2**-9


def test_states_of_rounded_parameters_are_those_of_float32():
    model = make_model("bfloat16")
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, stochastic_rounding=True)
    train(model, optimizer, range(2))
    assert all(optimizer.state[p]["exp_avg"].dtype == torch.float32 for p in model.parameters())
    masters = MasterWeights(
        make_model("stored").parameters(), torch.optim.AdamW,
        master_dtype=torch.bfloat16, stochastic_rounding=True,
    )  # fmt: skip
    assert {master.dtype for master in masters.masters.values()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "Adagrad"])
@each_storage
def test_resumed_run_has_the_bits_of_an_uninterrupted_one(kind, storage, name):
    model, optimizer_class = make_model(kind), getattr(torch.optim, name)
    optimizer = MasterWeights(model.parameters(), optimizer_class, **storage)
    train(model, optimizer, range(3))
    saved = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(twin, twin_optimizer, range(3, 6))
    resumed = make_model(kind)
    resumed_optimizer = MasterWeights(resumed.parameters(), optimizer_class, **storage)
    resumed.load_state_dict(saved["model"])
    resumed_optimizer.load_state_dict(saved["optimizer"])
    train(resumed, resumed_optimizer, range(3, 6))
    for pair in ((resumed, resumed_optimizer), (twin, twin_optimizer)):
        assert_same_state(tensors_of(*pair), tensors_of(model, optimizer))


def test_states_load_with_and_without_fp8_moments():
    model, twin = make_model(), make_model()
    plain = torch.optim.AdamW(model.parameters())
    quantized = MasterWeights(twin.parameters(), torch.optim.AdamW, fp8_moments=True)
    train(model, plain, range(3))
    quantized.load_state_dict(plain.state_dict())
    p, q = model[0].weight, twin[0].weight
    train(model, plain, range(3, 4))
    train(twin, quantized, range(3, 4))
    moments_of_q = moments_of(quantized, q)
    assert set(quantized.state[q]) == moments_of_q.keys() - {"exp_avg", "exp_avg_sq"}
    loaded = MasterWeights(model.parameters(), torch.optim.AdamW)
    loaded.load_state_dict(quantized.state_dict())
    assert set(loaded.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    for name in ("exp_avg", "exp_avg_sq"):
        x = moments_of_q[name]
        assert torch.equal(loaded.state[p][name], x)
        assert (x - plain.state[p][name]).norm() < 0.1 * x.norm()
    train(model, loaded, range(4, 5))


def test_flattened_states_load_without_fp8_moments_and_are_refused_with_them():
    dsd, options = checkpoint.state_dict, StateDictOptions(flatten_optimizer_state_dict=True)
    model, twin = make_model(), make_model()
    quantized = MasterWeights(model.parameters(), torch.optim.AdamW, fp8_moments=True)
    train(model, quantized, range(2))
    saved = dsd.get_optimizer_state_dict(model, quantized, options=options)
    plain = MasterWeights(twin.parameters(), torch.optim.AdamW)
    dsd.set_optimizer_state_dict(twin, plain, copy.deepcopy(saved), options=options)
    expected = moments_of(quantized, model[0].weight)
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(plain.state[twin[0].weight][name], expected[name])
    saved = dsd.get_optimizer_state_dict(twin, plain, options=options)
    saved |= {f"param_groups.{name}.roundings": 0 for name, _ in twin.named_parameters()}
    with pytest.raises(ValueError, match=r"must have exp_avg\.bits of parameter .*; got {}"):
        dsd.set_optimizer_state_dict(model, quantized, saved, options=options)


def test_flattened_states_that_an_optimizer_makes_at_once_stay_quantized():
    dsd, options = checkpoint.state_dict, StateDictOptions(flatten_optimizer_state_dict=True)
    model, twin = make_model(), make_model()
    optimizer = MasterWeights(model.parameters(), torch.optim.Adagrad, fp8_moments=True)
    train(model, optimizer, range(2))
    saved = copy.deepcopy(dsd.get_optimizer_state_dict(model, optimizer, options=options))
    loaded = MasterWeights(twin.parameters(), torch.optim.Adagrad, fp8_moments=True)
    dsd.set_optimizer_state_dict(twin, loaded, saved, options=options)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same_state(dict(loaded.state[q]), dict(optimizer.state[p]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("exp_avg.bits", torch.zeros(3, 3, dtype=torch.uint8)),
        ("exp_avg.scale", torch.zeros(48, 1, dtype=torch.uint8)),
        ("exp_avg.bits", torch.zeros(48, 200)),
        ("exp_avg.scale", None),
    ],
)
def test_quantized_moments_of_another_model_raise(name, value):
    model = make_model()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, fp8_moments=True)
    train(model, optimizer, range(1))
    wrong = copy.deepcopy(optimizer.state_dict())
    wrong["state"][0][name] = value
    before = copy.deepcopy(tensors_of(model, optimizer))
    with pytest.raises(
        ValueError, match=rf"must have {name} of parameter 0 in shape .*, uint8; got"
    ):
        optimizer.load_state_dict(wrong)
    assert_same_state(tensors_of(model, optimizer), before)


@each_storage
def test_training_ends_where_float32_ends(kind, storage):
    def losses(kind: str, **options) -> Tensor:
        torch.manual_seed(1)
        model = make_model(kind)[:2]
        target = torch.randn(200, 30) / 14
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=3e-3, **options)
        values = []
        for _ in range(150):
            x = torch.randn(64, 200)
            dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
            y = x @ target + torch.randn(64, 30)
            loss = (model(x.to(dtype)).float() - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            values.append(loss.detach())
        return torch.stack(values)

    reference = losses("stored" if kind == "stored" else "float32")
    stored_losses = losses(kind, **storage)
    assert reference[-50:].mean() < 0.7 * reference[0]
    assert stored_losses[-50:].mean() < 1.01 * reference[-50:].mean()
