"""LayerNormLinear and LayerNormMLP equal their parts bit for bit, float64 within FP8's error."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import float8lab
from float8lab import recipes
from float8lab.nn import fused_function, gemm
from float8lab.nn.precision import W, X, call_under, precisions
from float8lab.ops import Prologue
from float8lab.tensor import Float8Tensor
from float8lab.tensor.operands import quantize
from tests.near_ties import by_multiplying, near_ties
from tests.nn.composition import RECIPES, Composition, exact, perturb, sqnr, step
from tests.nn.models import gemms_of, saved_bytes
from tests.pairwise import pairs_first

ALL = {"high": None, **RECIPES}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
each_or_none = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)

MODULES: dict[str, Any] = {
    "linear": lambda **kwargs: float8lab.LayerNormLinear(40, 56, **kwargs),
    "linear-rms": lambda **kwargs: float8lab.LayerNormLinear(
        40, 56, normalization="RMSNorm", zero_centered_gamma=True, **kwargs
    ),
    "mlp": lambda **kwargs: float8lab.LayerNormMLP(40, 56, **kwargs),
    "mlp-rms-gated": lambda **kwargs: float8lab.LayerNormMLP(
        40, 56, normalization="RMSNorm", activation="swiglu", bias=False, **kwargs
    ),
    "mlp-checkpoint": lambda **kwargs: float8lab.LayerNormMLP(
        40, 56, activation="geglu", checkpoint=True, **kwargs
    ),
}
each_module = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)


def made(make: Any, device: Any = "cpu", **kwargs: Any) -> Any:
    module = make(device=device, **kwargs)
    perturb(module)
    return module


def same_gradients(
    names: list[str], got: list[torch.Tensor], want: list[torch.Tensor], device: torch.device
) -> None:
    """Equal, but for biases on a GPU, where the order of their sums over tokens may differ."""
    for name, one, other in zip(["x", *names], got, want, strict=True):
        if device.type == "cuda" and name in ("bias", "fc1_bias"):
            atol = 1e-5 * other.abs().max().item() if other.numel() else 0.0
            torch.testing.assert_close(one, other, rtol=1e-5, atol=atol)
        else:
            assert torch.equal(one, other), name


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("make", "recipe", "returned"), pairs_first(MODULES, ALL, {"": False, "norm-returned": True})
)
def test_equals_its_parts_bit_for_bit(make: Any, recipe: Any, returned: bool, device: Any) -> None:
    fused = made(make, device, return_layernorm_output=returned)
    parts = Composition(fused)
    for number in range(3):  # delayed scaling: by its own amaxes, then by the history
        x = torch.randn(3, 7, 40, device=device) * (number + 1)
        size = getattr(fused, "out_features", 40)
        dy = [torch.randn(3, 7, size, device=device), torch.randn(3, 7, 40, device=device)]
        got, gradients = step(fused, x, dy[: 1 + returned], recipe)
        want, wanted = step(parts, x, dy[: 1 + returned], recipe)
        assert same(got, want)
        same_gradients(list(fused.state_dict()), gradients, wanted, device)


OVERRIDES = [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]


@pytest.mark.parametrize("override", OVERRIDES, ids=str)
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@each_module
def test_with_some_gemms_in_high_precision(make: Any, name: str, override: Any) -> None:
    recipe = type(RECIPES[name])(override_linear_precision=override)
    fused = made(make)
    parts = Composition(fused)
    size = getattr(fused, "out_features", 40)
    for _ in range(2):
        x, dy = torch.randn(5, 40), torch.randn(5, size)
        with float8lab.count_gemms() as counts:
            got, gradients = step(fused, x, [dy], recipe)
        want, wanted = step(parts, x, [dy], recipe)
        assert same(got + gradients, want + wanted)
    layers = 1 if size == 56 else 2
    again = getattr(fused, "checkpoint", False)
    assert counts.high_precision == layers * sum(override) + (again and override[0])
    assert counts.fp8 == layers * (3 - sum(override)) + (again and not override[0])


def noise(db: float) -> float:
    return 10 ** (-db / 10)


def lost(recipe: Any) -> float:
    """The dB by which rounding an operand is worse than to e4m3: 1 by MX scales, 12.5 to e2m1."""
    return {"e8m0": 1.0, "e2m1 e4m3 fp32": 12.5}.get(recipe.linear.x.scale_rule, 0.0)


# SQNR against float64. Rounding an operand to e4m3 leaves 31.5 dB, to e5m2 25.5.
# Independent noises add, each GEMM has two operands, and a gated activation's output has the noise
# of both halves. A backward meets one GEMM's noise per layer; 2 dB for how noise is correlated.
def floors(recipe: Any, layers: int, gated: bool) -> tuple[float, float]:
    e4m3 = noise(31.5 - lost(recipe))
    of_dy = noise(25.5) if recipe.linear.dy.fp8_dtype == torch.float8_e5m2 else e4m3
    gemm = 2 * e4m3
    if layers == 1:
        out, back = gemm, of_dy + e4m3
    else:
        out = gemm * (2 if gated else 1) + gemm
        back = 2 * (of_dy + e4m3) + gemm * (2 if gated else 1)
    return tuple(10 * torch.tensor(1 / n).log10().item() - 2.0 for n in (out, back))


@pytest.mark.parametrize(
    ("kind", "normalization", "recipe", "dtype"),
    pairs_first(
        *({name: name for name in names} for names in (
            ("linear", "gelu", "swiglu"), ("LayerNorm", "RMSNorm"),
        )),
        RECIPES, {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    ),
)  # fmt: skip
def test_against_float64(
    kind: str, normalization: str, recipe: Any, dtype: torch.dtype, device: Any
) -> None:
    # The CPU's numbers on every device: margins are of tenths of a dB.
    how = {"normalization": normalization, "params_dtype": dtype, "device": "cpu"}
    if kind == "linear":
        fused = float8lab.LayerNormLinear(128, 128, **how)
    else:
        fused = float8lab.LayerNormMLP(128, 128, activation=kind, **how)
    perturb(fused)
    x, dy = (torch.randn(256, 128, dtype=dtype).to(device) for _ in range(2))
    fused.to(device)
    step(fused, x, [dy], recipe)  # delayed scaling: give the gradients a history
    (y,), gradients = step(fused, x, [dy], recipe)
    y64, gradients64 = exact(fused, x, dy)
    forward, backward = floors(recipe, 1 if kind == "linear" else 2, kind == "swiglu")
    assert y.dtype == dtype
    assert sqnr(y, y64) > forward
    assert gradients[0].dtype == dtype
    for name, got in zip(gradients64, gradients, strict=True):
        assert sqnr(got, gradients64[name]) > backward, name


@pytest.mark.parametrize(
    ("shape", "K"),
    [((1,), 1), ((7,), 17), ((2, 3, 5), 33), ((), 40), ((0,), 16), ((3, 0), 8)],
    ids=["1", "odd", "N-D", "vector", "empty", "empty-N-D"],
)
@each_or_none
def test_any_shape_trains(recipe: Any, shape: tuple[int, ...], K: int, device: Any) -> None:
    for fused in (
        float8lab.LayerNormLinear(K, 5, device=device),
        float8lab.LayerNormMLP(K, 9, activation="swiglu", device=device),
        float8lab.LayerNormMLP(K, 9, normalization="RMSNorm", checkpoint=True, device=device),
    ):
        perturb(fused)
        parts = Composition(fused)
        x = torch.randn(*shape, K, device=device)
        dy = torch.randn(*shape, getattr(fused, "out_features", K), device=device)
        for _ in range(2):
            (y,), gradients = step(fused, x, [dy], recipe)
            (want,), wanted = step(parts, x, [dy], recipe)
            assert y.shape == dy.shape
            assert torch.equal(y, want)
            same_gradients(list(fused.state_dict()), gradients, wanted, device)


@each_or_none
@each_module
def test_under_torch_autocast(make: Any, recipe: Any) -> None:
    fused = made(make, return_layernorm_output=True)
    x = torch.randn(8, 40, requires_grad=True)
    in_fp8 = float8lab.autocast(enabled=recipe is not None, recipe=recipe)
    with torch.autocast("cpu", torch.bfloat16), in_fp8:
        y, normed = fused(x)
    assert y.dtype == normed.dtype == torch.bfloat16
    (y.sum() + normed.sum()).backward()
    assert all(t.grad.dtype == torch.float32 for t in (x, *fused.parameters()))
    y64, _ = exact(fused, x, torch.ones_like(y))
    assert sqnr(y, y64) > (40 if recipe is None else 20 - lost(recipe))


@each_or_none
@each_module
def test_only_what_needs_a_gradient_gets_one(make: Any, recipe: Any) -> None:
    fused = made(make)
    parts = Composition(fused)
    x = torch.randn(6, 40)
    names = list(fused.state_dict())
    for chosen in (["x"], names[:1], *([n] for n in names[1:]), names[-1:] + names[:1]):
        results = []
        for module, own in ((fused, lambda n: n), (parts, parts.names.__getitem__)):
            module.zero_grad()
            leaf = x.clone().requires_grad_("x" in chosen)
            wanted = {own(n) for n in chosen if n != "x"}
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in wanted)
            with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(leaf)
            y = y[0] if isinstance(y, tuple) else y
            y.square().sum().backward()
            parameters = dict(module.named_parameters())
            results.append([leaf.grad, *(parameters[own(n)].grad for n in names)])
        for one, other in zip(*results, strict=True):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other)
    in_fp8 = float8lab.autocast(enabled=recipe is not None, recipe=recipe)
    with float8lab.count_gemms() as counts, torch.no_grad(), in_fp8:
        fused(x)
    assert counts.fp8 + counts.high_precision == len(list(precisions(fused)))


@each_recipe
def test_what_backward_can_compute_again_is_not_saved(recipe: Any) -> None:
    M, K, F = 2048, 64, 96
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    how: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
    small = 4 * 2 * M + 2048  # statistics, and scales of one number
    linear = float8lab.LayerNormLinear(K, F, **how)
    assert saved_bytes(linear, x, recipe) <= 2 * M * K + small
    for activation, size in (("gelu", F), ("swiglu", 2 * F)):
        mlp = float8lab.LayerNormMLP(K, F, activation=activation, **how)
        assert saved_bytes(mlp, x, recipe) <= 2 * M * (K + size) + small
        mlp.fp8_activation_input = True
        scales = 4 * M * -(-size // 128)
        kept = saved_bytes(mlp, x, recipe)
        assert kept <= 2 * M * K + M * size + scales + small
        mlp.checkpoint = True
        assert saved_bytes(mlp, x, recipe) <= 2 * M * K + small


@each_recipe
@each_module
def test_weights_stored_in_fp8(make: Any, recipe: Any) -> None:
    with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        stored = make(device="cpu")
    weights = {n: p for n, p in stored.named_parameters() if isinstance(p, Float8Tensor)}
    assert set(weights) == {
        n for n in stored.state_dict() if n.endswith("weight") and "norm" not in n
    }
    parts = Composition(make(device="cpu"))
    for name, parameter in stored.named_parameters():
        twin = dict(parts.named_parameters())[parts.names[name]]
        with torch.no_grad():
            value = parameter.detach()
            twin.copy_(value.dequantize() if isinstance(value, Float8Tensor) else value)
    for weight in weights.values():
        assert weight.spec == recipe.linear.w
        init = weight.get_high_precision_init_val()
        assert sqnr(weight.dequantize().detach(), init.double()) > 28 - lost(recipe)
    x, dy = torch.randn(6, 40), torch.randn(6, getattr(stored, "out_features", 40))
    # Outside autocast the stored values are used in high precision.
    (y,), gradients = step(stored, x, [dy])
    (want,), wanted = step(parts, x, [dy])
    assert torch.equal(y, want)
    assert same(gradients, wanted)
    (y,), gradients = step(stored, x, [dy], recipe)
    (want,), _ = step(parts, x, [dy], recipe)
    # Rounding the stored values again may move them.
    assert sqnr(y, want.double()) > 20 - lost(recipe)
    assert all(type(g) is torch.Tensor for g in gradients)


@each_module
def test_gemms_are_counted_under_the_modules_name(make: Any) -> None:
    model = nn.Sequential(made(make))
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=RECIPES["current"]):
        model(torch.randn(4, 40, requires_grad=True)).sum().backward()
    gemms = 3 * len(list(precisions(model[0]))) + getattr(model[0], "checkpoint", False)
    assert counts.fp8_by_module == {"0": gemms}
    assert counts.high_precision == 0


@each_module
def test_calibration_records_what_every_gemm_will_cast(make: Any) -> None:
    fused = made(make)
    parts = Composition(fused)
    x, recipe = torch.randn(6, 40), RECIPES["delayed"]
    for module in (fused, parts):
        with float8lab.autocast(enabled=False, calibrating=True, recipe=recipe):
            module(x)
    layers = [m for m in parts.modules() if isinstance(m, float8lab.Linear)]
    for (_, precision), layer in zip(precisions(fused), layers, strict=True):
        mine, theirs = (p.slots[recipe, None].tensors() for p in (precision, layer._fp8))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert mine["steps"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["delayed", "block"])
@each_module
def test_converted_models_give_these_modules_their_recipe(make: Any, name: str) -> None:
    recipe = RECIPES[name]
    model = nn.Sequential(made(make), nn.Linear(getattr(made(make), "out_features", 40), 8))
    twin = copy.deepcopy(model)
    report = float8lab.conversion_report(
        float8lab.convert_to_float8(model, recipe, overrides={"1": None})
    )
    assert [layer.converted for layer in report.layers] == [True, False]
    for _ in range(2):
        x = torch.randn(6, 40)
        with float8lab.count_gemms() as counts:
            y = model(x)
        with float8lab.autocast(recipe=recipe):
            want = twin(x)
        assert torch.equal(y, want)
        assert counts.fp8_by_module["0"] == len(list(precisions(model[0])))
    float8lab.to_high_precision(model)
    assert gemms_of(model, torch.randn(6, 40))[0] == 0
    assert type(model[0]) is type(twin[0])


@each_module
def test_float64_is_computed_in_float64(make: Any) -> None:
    fused = made(make, params_dtype=torch.float64)
    x, dy = torch.randn(4, 40).double(), torch.randn(4, getattr(fused, "out_features", 40))
    (y,), gradients = step(fused, x, [dy.double()], RECIPES["current"])
    y64, gradients64 = exact(fused, x, dy)
    torch.testing.assert_close(y, y64, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, [*gradients64.values()], rtol=1e-11, atol=1e-11)


@each_module
def test_moves_its_scaling_state_to_another_device(make: Any) -> None:
    fused = make(device="meta")
    assert all(p.is_meta for p in fused.parameters())
    fused.to_empty(device="cpu")
    fused.reset_parameters()
    with float8lab.autocast(recipe=RECIPES["delayed"]):
        assert fused(torch.randn(4, 40)).isfinite().all()


def test_recipes_are_all_tested() -> None:
    mine = {type(recipe).__name__ for recipe in RECIPES.values()}
    assert mine == {n for n in recipes.__all__ if n.endswith("Scaling")}


@pytest.mark.parametrize("again", [False, True], ids=["", "checkpoint"])
def test_the_activations_gradient_is_cast_and_its_inputs_are_gone(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StorageWeakRef] = []
    alive: list[list[bool]] = []
    gradient, dgrad = fused_function.Gradient, gemm._dgrad

    def watch(dy: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dy, Prologue):
            made.extend(StorageWeakRef(x.untyped_storage()) for x in dy.inputs)
        return gradient(dy, *args, **kwargs)

    def look(*args: Any, **kwargs: Any) -> Any:
        alive.append([not storage.expired() for storage in made])
        return dgrad(*args, **kwargs)

    monkeypatch.setattr(fused_function, "Gradient", watch)
    monkeypatch.setattr(gemm, "_dgrad", look)
    module = float8lab.LayerNormMLP(32, 48, activation="swiglu", checkpoint=again)
    x = torch.randn(16, 32, requires_grad=True)
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        loss = module(x).square().sum()
    wanted = torch.autograd.grad(loss, x, retain_graph=True)
    assert alive == [[], [not again, False]]  # a retained graph keeps what it saved
    del made[:], alive[:]
    assert torch.equal(*torch.autograd.grad(loss, x), *wanted)
    assert alive == [[], [False, False]]


EXACT = {
    "delayed": recipes.DelayedScaling(power_of_2_scale=False),
    "current": recipes.Float8CurrentScaling(),
    "row": recipes.Float8RowwiseScaling(),
}


@pytest.mark.parametrize("recipe", EXACT.values(), ids=EXACT)
def test_what_is_cast_again_has_the_bytes_of_the_first_cast(recipe: recipes.Recipe) -> None:
    for row in near_ties(4)[:, None]:
        x, weight = row.repeat(16, 1), nn.Parameter(row.repeat(16, 1))
        layer = float8lab.Linear(160, 16, device="cpu")
        layer._fp8.prepare(torch.device("cpu"), recipe)
        slots = next((s for (r, _), s in layer._fp8.slots.items() if r == recipe), None)
        call = call_under(recipe, slots)
        scales, x_spec, w_spec = call.scales, call.plan.x, call.plan.w
        prologue, wanted = Prologue("relu", [x], torch.float32), by_multiplying(x)
        made = scales.quantize(prologue, X, x_spec)
        assert torch.equal(made.rowwise.data.view(torch.uint8), wanted)
        params = scales.requant_params(made.rowwise.scale, made.requant)
        transpose = quantize(prologue, None, x_spec, params, scales.epsilon).columnwise
        if x_spec.per_tensor:
            assert torch.equal(transpose.data.view(torch.uint8), wanted.t())
            assert torch.equal(transpose.scale, made.rowwise.scale)
        made = scales.quantize(weight, W, w_spec)
        params = scales.requant_params(made.rowwise.scale, made.requant)
        requantized = quantize(weight, w_spec, None, params, scales.epsilon).rowwise
        assert torch.equal(made.rowwise.data.view(torch.uint8), wanted)
        assert torch.equal(requantized.data.view(torch.uint8), wanted)
        assert torch.equal(requantized.scale, made.rowwise.scale)
