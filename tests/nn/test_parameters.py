"""Each parameter of each constructor has its documented effect; parameters.py lists them."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import float8lab
from float8lab import recipes
from tests.nn.composition import float64_step, perturb, sqnr, step
from tests.nn.parameters import PARAMETERS, REQUIRED

CASES = [(module, name) for module, names in PARAMETERS.items() for name in names]
FUSED = ("LayerNormLinear", "LayerNormMLP")


def make(module: str, **kwargs: Any) -> Any:
    """A small module on the CPU; ``kwargs`` override its sizes and device."""
    sizes: dict[str, Any] = {}
    if module == "LayerNormLinear":
        sizes = {"in_features": 16, "out_features": 24}
    elif module == "LayerNormMLP":
        sizes = {"hidden_size": 16, "ffn_hidden_size": 24}
    elif "normalized_shape" not in kwargs:
        sizes = {"hidden_size": 16}
    return getattr(float8lab, module)(**{**sizes, "device": "cpu", **kwargs})


def gemm_weights(layer: Any) -> list[Tensor]:
    return [p for n, p in layer.named_parameters() if n.endswith("weight") and "norm" not in n]


def gamma_of(layer: Any) -> Tensor:
    gamma: Tensor = layer.layer_norm_weight if hasattr(layer, "layer_norm_weight") else layer.weight
    return gamma


def same_function(a: Any, b: Any) -> bool:
    """Whether two modules with the same parameters compute equal outputs and gradients."""
    perturb(a)
    b.load_state_dict(a.state_dict())
    x = torch.randn(4, 16)
    results = [step(m, x, [torch.ones_like(m(x))]) for m in (a, b)]
    return all(
        torch.equal(p, q)
        for tensors, other_tensors in zip(*results, strict=True)
        for p, q in zip(tensors, other_tensors, strict=True)
    )


EFFECTS: dict[str, Callable[[str], None]] = {}
"""The check of each parameter, by its name; a check takes the name of a module."""


def effect(function: Callable[[str], None]) -> Callable[[str], None]:
    EFFECTS[function.__name__] = function
    return function


@effect
def hidden_size(module: str) -> None:
    layer = make(module, hidden_size=8)
    assert gamma_of(layer).shape == (8,)
    assert layer(torch.ones(3, 8)).shape == (3, 8)
    if module not in FUSED:
        assert make(module, hidden_size=(2, 4))(torch.ones(3, 2, 4)).shape == (3, 2, 4)


@effect
def normalized_shape(module: str) -> None:
    named = make(module, normalized_shape=[2, 8])
    x = torch.randn(3, 2, 8)
    flat = make(module, hidden_size=16)
    torch.testing.assert_close(named(x), flat(x.flatten(1)).view_as(x), rtol=0, atol=0)


@effect
def in_features(module: str) -> None:
    assert gamma_of(make(module, in_features=8)).shape == (8,)
    with pytest.raises(ValueError, match=r"8 as its last dimension \(in_features\)"):
        make(module, in_features=8)(torch.ones(2, 9))


@effect
def out_features(module: str) -> None:
    assert make(module, out_features=5)(torch.ones(2, 16)).shape == (2, 5)


@effect
def ffn_hidden_size(module: str) -> None:
    layer = make(module, ffn_hidden_size=20)
    assert (layer.fc1_weight.shape, layer.fc2_weight.shape) == ((20, 16), (16, 20))
    assert make(module, ffn_hidden_size=20, activation="glu").fc1_weight.shape == (40, 16)


@effect
def eps(module: str) -> None:
    x = torch.full((1, 16), 1e-3) * torch.arange(16)
    assert not torch.equal(make(module, eps=1.0)(x), make(module)(x))
    if module in FUSED:
        layer = make(module, eps=0.5)
        dy = torch.ones_like(layer(x))
        torch.testing.assert_close(
            layer(x).double(), float64_step(layer, x, dy)[0], rtol=1e-4, atol=1e-5
        )


@effect
def sequence_parallel(module: str) -> None:
    for value in (True, False):
        layer = make(module, sequence_parallel=value)
        assert gamma_of(layer).sequence_parallel is value
        marked = [getattr(w, "sequence_parallel", None) for w in gemm_weights(layer)]
        assert marked == ([None] * len(marked) if module in FUSED else [value])
    assert same_function(make(module, sequence_parallel=True), make(module))


@effect
def params_dtype(module: str) -> None:
    layer = make(module, params_dtype=torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in make(module).parameters()} == {torch.get_default_dtype()}


@effect
def dtype(module: str) -> None:
    assert gamma_of(make(module, dtype=torch.float16)).dtype == torch.float16


@effect
def zero_centered_gamma(module: str) -> None:
    centered, plain = make(module, zero_centered_gamma=True), make(module)
    assert torch.equal(gamma_of(centered), torch.zeros(16))
    assert torch.equal(gamma_of(plain), torch.ones(16))
    state = {n: v for n, v in plain.state_dict().items() if v is not gamma_of(plain)}
    centered.load_state_dict({**state, **{n: v - 1 for n, v in state.items() if v.eq(1).all()}})
    x = torch.randn(3, 16)
    torch.testing.assert_close(centered(x), plain(x), rtol=0, atol=0)


@effect
def device(module: str) -> None:
    assert gamma_of(make(module, device="meta")).is_meta
    with torch.device("meta"):
        assert all(p.is_meta for p in make(module, device=None).parameters())


@effect
def bias(module: str) -> None:
    layer = make(module, bias=False)
    names = [n for n in layer.state_dict() if n.endswith("bias")]
    assert names == ["layer_norm_bias"]
    with_bias = make(module)
    nn.init.ones_(with_bias.bias if module == "LayerNormLinear" else with_bias.fc2_bias)
    layer.load_state_dict(with_bias.state_dict(), strict=False)
    x = torch.randn(3, 16)
    torch.testing.assert_close(with_bias(x), layer(x) + 1)


@effect
def normalization(module: str) -> None:
    assert make(module, normalization="RMSNorm").layer_norm_bias is None
    assert make(module).layer_norm_bias is not None
    x = torch.randn(3, 16) + 5
    for kind in ("LayerNorm", "RMSNorm"):
        layer = make(module, normalization=kind)
        expected, _ = float64_step(layer, x, torch.ones_like(layer(x)))
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="normalization must be 'LayerNorm' or 'RMSNorm'; got"):
        make(module, normalization="BatchNorm")


@effect
def init_method(module: str) -> None:
    first, *rest = gemm_weights(make(module, init_method=nn.init.ones_))
    assert torch.equal(first, torch.ones_like(first))
    assert all(not torch.equal(w, torch.ones_like(w)) for w in rest)
    assert gemm_weights(make(module))[0].std().item() == pytest.approx(0.023, rel=0.2)


@effect
def output_layer_init_method(module: str) -> None:
    first, second = gemm_weights(make(module, output_layer_init_method=nn.init.ones_))
    assert torch.equal(second, torch.ones_like(second))
    assert not torch.equal(first, torch.ones_like(first))
    assert gemm_weights(make(module))[1].std().item() == pytest.approx(0.023, rel=0.2)


@effect
def get_rng_state_tracker(module: str) -> None:
    tracker = float8lab.CudaRNGStatesTracker(device="cpu")
    tracker.add("model-parallel-rng", 5)
    before = torch.get_rng_state()
    weights = gemm_weights(make(module, get_rng_state_tracker=lambda: tracker))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert all(map(torch.equal, weights, gemm_weights(make(module))))
    with pytest.raises(TypeError, match=r"^get_rng_state_tracker must be"):
        make(module, get_rng_state_tracker=tracker)


@effect
def rng_tracker_name(module: str) -> None:
    tracker = float8lab.CudaRNGStatesTracker(device="cpu")
    tracker.add("experts", 5)
    tracker_options = {"get_rng_state_tracker": lambda: tracker, "rng_tracker_name": "experts"}
    weights = gemm_weights(
        copy.deepcopy(make(module, init_method=nn.init.uniform_, **tracker_options))
    )
    torch.manual_seed(5)
    assert torch.equal(weights[0], gemm_weights(make(module, init_method=nn.init.uniform_))[0])
    assert same_function(make(module, rng_tracker_name="experts"), make(module))
    with pytest.raises(TypeError, match=r"^rng_tracker_name must be"):
        make(module, rng_tracker_name=1)


@effect
def return_layernorm_output(module: str) -> None:
    layer, plain = make(module, return_layernorm_output=True), make(module)
    perturb(layer)
    plain.load_state_dict(layer.state_dict())
    norm = float8lab.LayerNorm(16, device="cpu")
    norm.load_state_dict({"weight": layer.layer_norm_weight, "bias": layer.layer_norm_bias})
    x = torch.randn(3, 16)
    for recipe in (None, recipes.Float8CurrentScaling()):
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            y, normed = layer(x)
            assert torch.equal(y, plain(x))
        assert torch.equal(normed, norm(x))


@effect
def return_layernorm_output_gathered(module: str) -> None:
    both = {"return_layernorm_output": True, "return_layernorm_output_gathered": True}
    assert len(make(module, **both)(torch.ones(2, 16))) == 2  # with one rank it is gathered already
    gathered_only = make(module, return_layernorm_output_gathered=True)
    assert isinstance(gathered_only(torch.ones(2, 16)), Tensor)  # ignored, as documented


@effect
def tp_group(module: str) -> None:
    assert same_function(make(module, tp_group=None), make(module))
    make(module).set_tensor_parallel_group(None)


@effect
def tp_size(module: str) -> None:
    column = {"parallel_mode": "column"} if module == "LayerNormLinear" else {}
    mode = column or {"set_parallel_mode": True}
    sharded, unsharded = make(module, tp_size=2, **mode), make(module)
    name = "weight" if column else "fc1_weight"
    assert 2 * len(getattr(sharded, name)) == len(getattr(unsharded, name))
    with pytest.raises(RuntimeError, match="tp_group must be set before the first call"):
        sharded(torch.ones(2, 16))
    with pytest.raises(ValueError, match="must be a multiple of the 5 tensor-parallel ranks"):
        make(module, tp_size=5, **mode)
    assert same_function(make(module, tp_size=1), unsharded)


@effect
def parallel_mode(module: str) -> None:
    with pytest.raises(ValueError, match="parallel_mode must be one of None"):
        make(module, parallel_mode="diagonal")
    assert make(module, parallel_mode="column", tp_size=2).weight.shape == (12, 16)
    assert make(module, parallel_mode="row", tp_size=2).weight.shape == (24, 8)
    assert same_function(make(module, parallel_mode="column"), make(module))


@effect
def set_parallel_mode(module: str) -> None:
    layer = make(module, set_parallel_mode=True)
    assert layer.set_parallel_mode
    assert same_function(layer, make(module))


@effect
def fuse_wgrad_accumulation(module: str) -> None:
    for enabled in (True, False):
        layer = make(module, fuse_wgrad_accumulation=enabled)
        for weight in gemm_weights(layer):
            weight.main_grad = torch.zeros_like(weight)
        with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
            layer(torch.randn(4, 16)).square().sum().backward()
        for weight in gemm_weights(layer):
            assert (weight.grad is None) is enabled
            assert bool(weight.main_grad.any()) is enabled


@effect
def return_bias(module: str) -> None:
    layer, plain = make(module, return_bias=True), make(module)
    perturb(layer)
    plain.load_state_dict(layer.state_dict())
    bias_parameter = layer.bias if module == "LayerNormLinear" else layer.fc2_bias
    x = torch.randn(3, 16)
    for recipe in (None, recipes.Float8CurrentScaling()):
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            y, returned_bias = layer(x)
            assert returned_bias is bias_parameter
            torch.testing.assert_close(y + returned_bias, plain(x))
    both = make(module, return_bias=True, return_layernorm_output=True)
    y, returned_bias, normed = both(x)
    assert returned_bias.shape == y.shape[-1:]
    assert normed.shape == x.shape
    assert make(module, return_bias=True, bias=False)(x)[1] is None


@effect
def parameters_split(module: str) -> None:
    torch.manual_seed(1)
    split = make(module, parameters_split=("query_", "key", "value"))
    names = [f"{n}_{kind}" for n in ("query", "key", "value") for kind in ("weight", "bias")]
    assert list(split.state_dict())[2:] == names
    torch.manual_seed(1)
    unsplit = make(module)
    x, dy = torch.randn(4, 16), torch.randn(4, 24)
    for recipe in (None, recipes.Float8CurrentScaling()):
        (y,), (dx, _, _, *parts) = step(split, x, [dy], recipe)
        (expected,), (expected_dx, _, _, dw, db) = step(unsplit, x, [dy], recipe)
        assert torch.equal(y, expected)
        assert torch.equal(dx, expected_dx)
        assert torch.equal(torch.cat(parts[::2]), dw)
        assert torch.equal(torch.cat(parts[1::2]), db)
    sizes = make(module, parameters_split={"q": 16, "kv": 8})
    assert (sizes.q_weight.shape, sizes.kv_bias.shape) == ((16, 16), (8,))
    with pytest.raises(ValueError, match="must add up to out_features 24"):
        make(module, parameters_split={"q": 16})


@effect
def activation(module: str) -> None:
    with pytest.raises(ValueError, match=r"activation must be one of 'gelu', .*; got 'tanh'"):
        make(module, activation="tanh")
    x, dy = torch.randn(5, 16), torch.randn(5, 16)
    for name in float8lab.ops.ACTIVATIONS:
        layer = make(module, activation=name)
        perturb(layer)
        (y,), gradients = step(layer, x, [dy])
        expected, expected_gradients = float64_step(layer, x, dy)
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
        for actual, expected_gradient in zip(gradients, expected_gradients.values(), strict=True):
            torch.testing.assert_close(actual.double(), expected_gradient, rtol=1e-3, atol=1e-4)


@effect
def seq_length(module: str) -> None:
    assert same_function(make(module, seq_length=128), make(module))


@effect
def micro_batch_size(module: str) -> None:
    assert same_function(make(module, micro_batch_size=4), make(module))


@effect
def checkpoint(module: str) -> None:
    assert same_function(make(module, checkpoint=True), make(module))
    x = torch.randn(4, 16, requires_grad=True)
    for recipe in (None, recipes.Float8CurrentScaling()):
        gemms = []
        for value in (False, True):
            layer = make(module, checkpoint=value)
            with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
                y = layer(x)
            with float8lab.count_gemms() as counts:
                y.sum().backward()
            gemms.append(counts.fp8 + counts.high_precision)
        assert gemms == [4, 5]  # the recompute of fc1


@effect
def fp8_activation_input(module: str) -> None:
    for recipe in (recipes.Float8CurrentScaling(), recipes.Float8BlockScaling()):
        for name in ("gelu", "swiglu"):
            sizes = {"hidden_size": 64, "ffn_hidden_size": 128, "activation": name}
            plain = make(module, **sizes)
            saves_fp8 = make(module, fp8_activation_input=True, **sizes)
            perturb(plain)
            saves_fp8.load_state_dict(plain.state_dict())
            x, dy = torch.randn(256, 64), torch.randn(256, 64)
            (y,), gradients = step(saves_fp8, x, [dy], recipe)
            (expected,), plain_gradients = step(plain, x, [dy], recipe)
            assert torch.equal(y, expected)
            _, exact_gradients = float64_step(plain, x, dy)
            # fp8_activation_input adds e4m3 roundings of 31.5 dB to the noise without it: of one of
            # two factors for gelu, of both for swiglu. A quarter allows for correlated noise.
            added_noise = (1 if name == "gelu" else 2) * 10 ** (-31.5 / 10)
            rounded = [
                not torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True)
            ]
            assert rounded == [True] * 6 + [False]  # only fc2's bias is unaffected
            for gradient, plain_gradient, exact_gradient in zip(
                gradients, plain_gradients, exact_gradients.values(), strict=True
            ):
                noise, plain_noise = (
                    10 ** (-sqnr(tensor, exact_gradient) / 10)
                    for tensor in (gradient, plain_gradient)
                )
                assert noise <= 1.25 * (plain_noise + added_noise)
    modules = [make(module, fp8_activation_input=value) for value in (True, False)]
    assert same_function(*modules)  # in high precision nothing is rounded


@pytest.mark.parametrize("module", PARAMETERS)
def test_constructors_have_exactly_the_listed_parameters_and_defaults(module: str) -> None:
    signature = inspect.signature(getattr(float8lab, module))
    defaults = {
        name: REQUIRED if p.default is inspect.Parameter.empty else p.default
        for name, p in signature.parameters.items()
        if p.kind is not inspect.Parameter.VAR_KEYWORD  # ``ub_*``
    }
    assert defaults == PARAMETERS[module]


@pytest.mark.parametrize(("module", "name"), CASES, ids=[f"{m}-{n}" for m, n in CASES])
def test_each_constructor_parameter_has_its_documented_effect(module: str, name: str) -> None:
    EFFECTS[name](module)
