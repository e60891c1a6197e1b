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
from tests.nn.composition import RECIPES, Composition, float64_step, perturb, sqnr, step
from tests.nn.models import gemms_of, saved_bytes
from tests.pairwise import pairs_first
from tests.same_bytes import assert_same_state

RECIPES_AND_HIGH = {"high": None, **RECIPES}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
each_recipe_and_high = pytest.mark.parametrize(
    "recipe", RECIPES_AND_HIGH.values(), ids=RECIPES_AND_HIGH
)

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


def build(make: Any, device: Any = "cpu", **kwargs: Any) -> Any:
    module = make(device=device, **kwargs)
    perturb(module)
    return module


def assert_same_gradients(
    names: list[str], actual: list[torch.Tensor], expected: list[torch.Tensor], device: torch.device
) -> None:
    """Asserts equal gradients; on a GPU the order of a bias's sum over tokens may differ."""
    for name, gradient, expected_gradient in zip(["x", *names], actual, expected, strict=True):
        if device.type == "cuda" and name in ("bias", "fc1_bias"):
            atol = 1e-5 * expected_gradient.abs().max().item() if expected_gradient.numel() else 0.0
            torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=atol)
        else:
            assert torch.equal(gradient, expected_gradient), name


def all_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("make", "recipe", "returned"),
    pairs_first(MODULES, RECIPES_AND_HIGH, {"": False, "norm-returned": True}),
)
def test_fused_modules_equal_their_parts_bit_for_bit(
    make: Any, recipe: Any, returned: bool, device: Any
) -> None:
    fused = build(make, device, return_layernorm_output=returned)
    parts = Composition(fused)
    for step_index in range(3):  # delayed scaling: current amaxes first, then the history
        x = torch.randn(3, 7, 40, device=device) * (step_index + 1)
        size = getattr(fused, "out_features", 40)
        dy = [torch.randn(3, 7, size, device=device), torch.randn(3, 7, 40, device=device)]
        actual, gradients = step(fused, x, dy[: 1 + returned], recipe)
        expected, expected_gradients = step(parts, x, dy[: 1 + returned], recipe)
        assert all_equal(actual, expected)
        assert_same_gradients(list(fused.state_dict()), gradients, expected_gradients, device)


OVERRIDES = [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]


@pytest.mark.parametrize("override", OVERRIDES, ids=str)
@pytest.mark.parametrize("name", ["delayed", "current", "block"])
@each_module
def test_fused_modules_with_some_gemms_in_high_precision_equal_their_parts(
    make: Any, name: str, override: Any
) -> None:
    recipe = type(RECIPES[name])(override_linear_precision=override)
    fused = build(make)
    parts = Composition(fused)
    size = getattr(fused, "out_features", 40)
    for _ in range(2):
        x, dy = torch.randn(5, 40), torch.randn(5, size)
        with float8lab.count_gemms() as counts:
            actual, gradients = step(fused, x, [dy], recipe)
        expected, expected_gradients = step(parts, x, [dy], recipe)
        assert all_equal(actual + gradients, expected + expected_gradients)
    layers = 1 if size == 56 else 2
    recomputes = getattr(fused, "checkpoint", False)
    assert counts.high_precision == layers * sum(override) + (recomputes and override[0])
    assert counts.fp8 == layers * (3 - sum(override)) + (recomputes and not override[0])


def noise_power(db: float) -> float:
    return 10 ** (-db / 10)


def sqnr_loss(recipe: Any) -> float:
    """The dB lost against rounding an operand to e4m3: 1 by MX scales, 12.5 by rounding to e2m1."""
    return {"e8m0": 1.0, "e2m1 e4m3 fp32": 12.5}.get(recipe.linear.x.scale_rule, 0.0)


# The lowest SQNR against float64. Rounding an operand to e4m3 leaves 31.5 dB, to e5m2 25.5 dB.
# Independent noises add, each GEMM has two operands, and the output of a gated activation has the
# noise of both halves. Backward adds one GEMM's noise per layer. 2 dB allow for correlated noise.
def sqnr_floors(recipe: Any, layers: int, gated: bool) -> tuple[float, float]:
    e4m3 = noise_power(31.5 - sqnr_loss(recipe))
    dy_noise = noise_power(25.5) if recipe.linear.dy.fp8_dtype == torch.float8_e5m2 else e4m3
    gemm = 2 * e4m3
    if layers == 1:
        output, backward = gemm, dy_noise + e4m3
    else:
        output = gemm * (2 if gated else 1) + gemm
        backward = 2 * (dy_noise + e4m3) + gemm * (2 if gated else 1)
    return tuple(10 * torch.tensor(1 / n).log10().item() - 2.0 for n in (output, backward))


@pytest.mark.parametrize(
    ("kind", "normalization", "recipe", "dtype"),
    pairs_first(
        *({name: name for name in names} for names in (
            ("linear", "gelu", "swiglu"), ("LayerNorm", "RMSNorm"),
        )),
        RECIPES, {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)},
    ),
)  # fmt: skip
def test_errors_against_float64_stay_within_those_of_fp8(
    kind: str, normalization: str, recipe: Any, dtype: torch.dtype, device: Any
) -> None:
    # The CPU draws the numbers for every device, because the margins are tenths of a dB.
    options = {"normalization": normalization, "params_dtype": dtype, "device": "cpu"}
    if kind == "linear":
        fused = float8lab.LayerNormLinear(128, 128, **options)
    else:
        fused = float8lab.LayerNormMLP(128, 128, activation=kind, **options)
    perturb(fused)
    x, dy = (torch.randn(256, 128, dtype=dtype).to(device) for _ in range(2))
    fused.to(device)
    step(fused, x, [dy], recipe)  # delayed scaling: give the gradients a history
    (y,), gradients = step(fused, x, [dy], recipe)
    y64, gradients64 = float64_step(fused, x, dy)
    forward, backward = sqnr_floors(recipe, 1 if kind == "linear" else 2, kind == "swiglu")
    assert y.dtype == dtype
    assert sqnr(y, y64) > forward
    assert gradients[0].dtype == dtype
    for name, gradient in zip(gradients64, gradients, strict=True):
        assert sqnr(gradient, gradients64[name]) > backward, name


@pytest.mark.parametrize(
    ("shape", "K"),
    [((1,), 1), ((7,), 17), ((2, 3, 5), 33), ((), 40), ((0,), 16), ((3, 0), 8)],
    ids=["1", "odd", "N-D", "vector", "empty", "empty-N-D"],
)
@each_recipe_and_high
def test_small_odd_and_empty_shapes_equal_their_parts(
    recipe: Any, shape: tuple[int, ...], K: int, device: Any
) -> None:
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
            (expected,), expected_gradients = step(parts, x, [dy], recipe)
            assert y.shape == dy.shape
            assert torch.equal(y, expected)
            assert_same_gradients(list(fused.state_dict()), gradients, expected_gradients, device)


@each_recipe_and_high
@each_module
def test_torch_autocast_gives_bfloat16_outputs_and_float32_gradients(
    make: Any, recipe: Any
) -> None:
    fused = build(make, return_layernorm_output=True)
    x = torch.randn(8, 40, requires_grad=True)
    in_fp8 = float8lab.autocast(enabled=recipe is not None, recipe=recipe)
    with torch.autocast("cpu", torch.bfloat16), in_fp8:
        y, normed = fused(x)
    assert y.dtype == normed.dtype == torch.bfloat16
    (y.sum() + normed.sum()).backward()
    assert all(t.grad.dtype == torch.float32 for t in (x, *fused.parameters()))
    y64, _ = float64_step(fused, x, torch.ones_like(y))
    assert sqnr(y, y64) > (40 if recipe is None else 20 - sqnr_loss(recipe))


@each_recipe_and_high
@each_module
def test_only_tensors_that_require_a_gradient_get_one(make: Any, recipe: Any) -> None:
    fused = build(make)
    parts = Composition(fused)
    x = torch.randn(6, 40)
    names = list(fused.state_dict())
    for chosen in (["x"], names[:1], *([n] for n in names[1:]), names[-1:] + names[:1]):
        results = []
        for module, module_name in ((fused, lambda n: n), (parts, parts.names.__getitem__)):
            module.zero_grad()
            leaf = x.clone().requires_grad_("x" in chosen)
            trainable = {module_name(n) for n in chosen if n != "x"}
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(name in trainable)
            with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
                y = module(leaf)
            y = y[0] if isinstance(y, tuple) else y
            y.square().sum().backward()
            parameters = dict(module.named_parameters())
            results.append([leaf.grad, *(parameters[module_name(n)].grad for n in names)])
        for gradient, expected in zip(*results, strict=True):
            assert (gradient is None) == (expected is None)
            assert gradient is None or torch.equal(gradient, expected)
    in_fp8 = float8lab.autocast(enabled=recipe is not None, recipe=recipe)
    with float8lab.count_gemms() as counts, torch.no_grad(), in_fp8:
        fused(x)
    assert counts.fp8 + counts.high_precision == len(list(precisions(fused)))


@each_recipe
def test_tensors_that_backward_can_recompute_are_not_saved(recipe: Any) -> None:
    M, K, F = 2048, 64, 96
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}
    small = 4 * 2 * M + 2048  # statistics, and scales that are single numbers
    linear = float8lab.LayerNormLinear(K, F, **options)
    assert saved_bytes(linear, x, recipe) <= 2 * M * K + small
    for activation, size in (("gelu", F), ("swiglu", 2 * F)):
        mlp = float8lab.LayerNormMLP(K, F, activation=activation, **options)
        assert saved_bytes(mlp, x, recipe) <= 2 * M * (K + size) + small
        mlp.fp8_activation_input = True
        scales = 4 * M * -(-size // 128)
        saved = saved_bytes(mlp, x, recipe)
        assert saved <= 2 * M * K + M * size + scales + small
        mlp.checkpoint = True
        assert saved_bytes(mlp, x, recipe) <= 2 * M * K + small


@each_recipe
@each_module
def test_weights_stored_in_fp8_equal_the_parts_with_dequantized_weights(
    make: Any, recipe: Any
) -> None:
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
        assert sqnr(weight.dequantize().detach(), init.double()) > 28 - sqnr_loss(recipe)
    x, dy = torch.randn(6, 40), torch.randn(6, getattr(stored, "out_features", 40))
    # Outside autocast the module dequantizes the stored weights and computes in high precision.
    (y,), gradients = step(stored, x, [dy])
    (expected,), expected_gradients = step(parts, x, [dy])
    assert torch.equal(y, expected)
    assert all_equal(gradients, expected_gradients)
    (y,), gradients = step(stored, x, [dy], recipe)
    (expected,), _ = step(parts, x, [dy], recipe)
    # The composition rounds the stored values a second time, which may change them.
    assert sqnr(y, expected.double()) > 20 - sqnr_loss(recipe)
    assert all(type(g) is torch.Tensor for g in gradients)


@each_module
def test_gemms_are_counted_under_the_modules_name(make: Any) -> None:
    model = nn.Sequential(build(make))
    with float8lab.count_gemms() as counts, float8lab.autocast(recipe=RECIPES["current"]):
        model(torch.randn(4, 40, requires_grad=True)).sum().backward()
    gemms = 3 * len(list(precisions(model[0]))) + getattr(model[0], "checkpoint", False)
    assert counts.fp8_by_module == {"0": gemms}
    assert counts.high_precision == 0


@each_module
def test_calibration_records_the_amaxes_of_every_gemm(make: Any) -> None:
    fused = build(make)
    parts = Composition(fused)
    x, recipe = torch.randn(6, 40), RECIPES["delayed"]
    for module in (fused, parts):
        with float8lab.autocast(enabled=False, calibrating=True, recipe=recipe):
            module(x)
    layers = [m for m in parts.modules() if isinstance(m, float8lab.Linear)]
    for (_, precision), layer in zip(precisions(fused), layers, strict=True):
        fused_state, composed_state = (
            p.slots[recipe, None].tensors() for p in (precision, layer._fp8)
        )
        assert all(torch.equal(fused_state[name], composed_state[name]) for name in fused_state)
        assert fused_state["steps"].tolist() == [1, 1, 0]


@pytest.mark.parametrize("name", ["delayed", "block"])
@each_module
def test_conversion_gives_fused_modules_their_recipe(make: Any, name: str) -> None:
    recipe = RECIPES[name]
    model = nn.Sequential(build(make), nn.Linear(getattr(build(make), "out_features", 40), 8))
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
            expected = twin(x)
        assert torch.equal(y, expected)
        assert counts.fp8_by_module["0"] == len(list(precisions(model[0])))
    model[0](x)  # alone, the module is its own region, which advances the scales
    with float8lab.autocast(recipe=recipe):
        twin[0](x)
    for (_, own), (_, expected) in zip(precisions(model[0]), precisions(twin[0]), strict=True):
        assert own.slots.keys() == expected.slots.keys()
        for key, slots in own.slots.items():
            assert_same_state(slots.tensors(), expected.slots[key].tensors())
    float8lab.to_high_precision(model)
    assert gemms_of(model, torch.randn(6, 40))[0] == 0
    assert type(model[0]) is type(twin[0])


@each_module
def test_float64_modules_compute_in_float64(make: Any) -> None:
    fused = build(make, params_dtype=torch.float64)
    x, dy = torch.randn(4, 40).double(), torch.randn(4, getattr(fused, "out_features", 40))
    (y,), gradients = step(fused, x, [dy.double()], RECIPES["current"])
    y64, gradients64 = float64_step(fused, x, dy)
    torch.testing.assert_close(y, y64, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, [*gradients64.values()], rtol=1e-11, atol=1e-11)


@each_module
def test_scaling_state_moves_to_another_device(make: Any) -> None:
    fused = make(device="meta")
    assert all(p.is_meta for p in fused.parameters())
    fused.to_empty(device="cpu")
    fused.reset_parameters()
    with float8lab.autocast(recipe=RECIPES["delayed"]):
        assert fused(torch.randn(4, 40)).isfinite().all()


def test_every_recipe_class_is_tested() -> None:
    tested = {type(recipe).__name__ for recipe in RECIPES.values()}
    assert tested == {n for n in recipes.__all__ if n.endswith("Scaling")}


@pytest.mark.parametrize("checkpoint", [False, True], ids=["", "checkpoint"])
def test_inputs_of_the_activations_gradient_are_freed_before_dgrad(
    checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prologue_storages: list[StorageWeakRef] = []
    alive: list[list[bool]] = []
    original_gradient, original_dgrad = fused_function.Gradient, gemm._dgrad

    def recording_gradient(dy: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dy, Prologue):
            prologue_storages.extend(StorageWeakRef(x.untyped_storage()) for x in dy.inputs)
        return original_gradient(dy, *args, **kwargs)

    def recording_dgrad(*args: Any, **kwargs: Any) -> Any:
        alive.append([not storage.expired() for storage in prologue_storages])
        return original_dgrad(*args, **kwargs)

    monkeypatch.setattr(fused_function, "Gradient", recording_gradient)
    monkeypatch.setattr(gemm, "_dgrad", recording_dgrad)
    module = float8lab.LayerNormMLP(32, 48, activation="swiglu", checkpoint=checkpoint)
    x = torch.randn(16, 32, requires_grad=True)
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        loss = module(x).square().sum()
    expected = torch.autograd.grad(loss, x, retain_graph=True)
    assert alive == [[], [not checkpoint, False]]  # a retained graph keeps what it saved
    del prologue_storages[:], alive[:]
    assert torch.equal(*torch.autograd.grad(loss, x), *expected)
    assert alive == [[], [False, False]]


PER_OPERAND_RECIPES = {
    "delayed": recipes.DelayedScaling(power_of_2_scale=False),
    "current": recipes.Float8CurrentScaling(),
    "row": recipes.Float8RowwiseScaling(),
}


@pytest.mark.parametrize("recipe", PER_OPERAND_RECIPES.values(), ids=PER_OPERAND_RECIPES)
def test_requantized_operands_have_the_bytes_of_the_first_cast(recipe: recipes.Recipe) -> None:
    for row in near_ties(4)[:, None]:
        x, weight = row.repeat(16, 1), nn.Parameter(row.repeat(16, 1))
        layer = float8lab.Linear(160, 16, device="cpu")
        layer._fp8.prepare(torch.device("cpu"), recipe)
        slots = next((s for (r, _), s in layer._fp8.slots.items() if r == recipe), None)
        call = call_under(recipe, slots)
        scales, x_spec, w_spec = call.scales, call.plan.x, call.plan.w
        prologue, expected = Prologue("relu", [x], torch.float32), by_multiplying(x)
        quantized = scales.quantize(prologue, X, x_spec)
        assert torch.equal(quantized.rowwise.data.view(torch.uint8), expected)
        params = scales.requant_params(quantized.rowwise.scale, quantized.requant)
        transpose = quantize(prologue, None, x_spec, params, scales.epsilon).columnwise
        if x_spec.per_tensor:
            assert torch.equal(transpose.data.view(torch.uint8), expected.t())
            assert torch.equal(transpose.scale, quantized.rowwise.scale)
        quantized = scales.quantize(weight, W, w_spec)
        params = scales.requant_params(quantized.rowwise.scale, quantized.requant)
        requantized = quantize(weight, w_spec, None, params, scales.epsilon).rowwise
        assert torch.equal(quantized.rowwise.data.view(torch.uint8), expected)
        assert torch.equal(requantized.data.view(torch.uint8), expected)
        assert torch.equal(requantized.scale, quantized.rowwise.scale)
