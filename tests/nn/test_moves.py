"""Modules that move between devices and dtypes: FP8 parameters, delayed state, the meta device."""

import copy
import weakref

import pytest
import torch
from torch import nn

import float8lab
from float8lab import Float8Tensor, recipes

SPLIT = {"q": 8, "kv": 24}
MODULES = {
    "linear": lambda **k: float8lab.Linear(16, 32, **k),
    "linear-split": lambda **k: float8lab.Linear(16, 32, parameters_split=SPLIT, **k),
    "layernorm": lambda **k: float8lab.LayerNorm(16, **k),
    "rmsnorm": lambda **k: float8lab.RMSNorm(16, zero_centered_gamma=True, **k),
    "norm-linear": lambda **k: float8lab.LayerNormLinear(16, 32, **k),
    "norm-linear-split": lambda **k: float8lab.LayerNormLinear(16, 32, parameters_split=SPLIT, **k),
    "mlp": lambda **k: float8lab.LayerNormMLP(16, 32, **k),
    "attention": lambda **k: float8lab.MultiheadAttention(
        16, 2, attention_dropout=0.0, input_layernorm=True, **k
    ),
    "transformer": lambda **k: float8lab.TransformerLayer(16, 32, 2, output_layernorm=True, **k),
}
each_with_fp8_parameters = pytest.mark.parametrize("name", ["linear", "norm-linear", "mlp"])


def build(name, *, fp8=True, device="cpu"):
    torch.manual_seed(3)
    with float8lab.fp8_model_init(enabled=fp8):
        return MODULES[name](device=device)


def fp8_parameters(module):
    parameters = {n: p for n, p in module.named_parameters() if isinstance(p, Float8Tensor)}
    assert parameters
    return parameters


def fp8_bytes(module):
    """The bytes of a module's FP8 parameters, by name."""
    return {
        name: [t.contiguous().view(torch.uint8).tolist() for t in (p.qdata, p.scale, p.amax)]
        for name, p in fp8_parameters(module).items()
    }


MOVES = {
    "nothing": lambda m: m.to("cpu"), "copies": lambda m: m._apply(torch.clone),
    "bfloat16": lambda m: m.bfloat16(), "double": lambda m: m.double(),
}  # fmt: skip
GPU = pytest.param(lambda m: m.cuda(), marks=pytest.mark.gpu, id="cuda")


@pytest.mark.parametrize("move", [*(pytest.param(f, id=n) for n, f in MOVES.items()), GPU])
@each_with_fp8_parameters
def test_fp8_parameters_keep_identity_attributes_and_hooks(name, move):
    module, hook_calls = build(name), []
    before, order = fp8_parameters(module), [n for n, _ in module.named_parameters()]
    for key, p in before.items():
        p.main_grad = p.marker = object()
        p.register_hook(lambda g, key=key: hook_calls.append((key, g.dtype)))
        p.register_post_accumulate_grad_hook(
            lambda p, key=key: hook_calls.append((key, p.grad.dtype))
        )
    references = [weakref.ref(p) for p in before.values()]
    x = torch.randn(4, 16)
    module(x).sum().backward()
    hook_calls.clear()
    move(nn.Sequential(module))
    after = fp8_parameters(module)
    assert [n for n, _ in module.named_parameters()] == order
    for key, p in after.items():
        assert p is before[key]
        assert p.main_grad is p.marker
        assert (p.grad.dtype, p.grad.device) == (p.dtype, p.device) == (p.dtype, p.qdata.device)
    assert all(ref() is not None for ref in references)
    first_parameter = next(iter(after.values()))
    module(x.to(first_parameter)).sum().backward()
    assert sorted(hook_calls, key=str) == sorted(
        2 * [(k, p.dtype) for k, p in after.items()], key=str
    )


def test_tied_weights_frozen_in_fp8_keep_identity_and_attributes():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[1].weight = model[0].weight
    float8lab.convert_to_float8(model, freeze_weights=True)
    weight = model[0].weight
    weight.marker = 1
    model.bfloat16()
    assert model[0].weight is model[1].weight is weight
    assert (weight.dtype, weight.marker) == (torch.bfloat16, 1)


@each_with_fp8_parameters
def test_double_and_back_to_float_restores_the_fp8_bytes(name):
    module = build(name)
    before, x = fp8_bytes(module), torch.randn(4, 16, dtype=torch.float64)
    high_precision = build(name, fp8=False).double()
    module.double()
    for key, p in module.named_parameters():
        assert p.dtype == torch.float64
        value = p.detach()
        if isinstance(p, Float8Tensor):
            value = value.dequantize()
            assert torch.equal(value, p.qdata.double() * p.scale.double())
        high_precision.get_parameter(key).data.copy_(value)
    with float8lab.fallback("error"), float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        results = [module(x), high_precision(x)]
    assert torch.equal(*results)
    assert results[0].dtype == torch.float64
    for y in results:
        y.square().sum().backward()
    for key, p in module.named_parameters():
        assert torch.equal(p.grad, high_precision.get_parameter(key).grad)
    assert fp8_bytes(copy.deepcopy(module).float()) == fp8_bytes(module) == before
    assert {p.dtype for p in copy.deepcopy(module).float().parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["linear", "mlp", "attention"])
def test_delayed_state_starts_fresh_after_the_meta_device(name):
    recipe = recipes.DelayedScaling(fp8_dpa=True)
    module, fresh = build(name, fp8=False), build(name, fp8=False)
    x = torch.randn(4, 2, 16)
    with float8lab.autocast(recipe=recipe):
        module(x)
    values = {n: p.detach().clone() for n, p in module.state_dict().items()}
    module.to("meta").to_empty(device="cpu")
    module.load_state_dict(values)
    for scale in (1, 30):  # the second step's scales come from the first step
        with float8lab.autocast(recipe=recipe):
            assert torch.equal(module(scale * x), fresh(scale * x))


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "stored"])
@pytest.mark.parametrize("name", MODULES)
def test_reset_parameters_materializes_a_module_on_meta(name, fp8):
    module = build(name, fp8=fp8, device="meta")
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters()
    expected = build(name, fp8=fp8, device=None)
    torch.manual_seed(3)
    module.reset_parameters()
    for (key, p), expected_parameter in zip(
        module.named_parameters(), expected.parameters(), strict=True
    ):
        assert p.device == expected_parameter.device, key
        assert type(p) is type(expected_parameter)
        assert (p.dtype, p.requires_grad) == (
            expected_parameter.dtype,
            expected_parameter.requires_grad,
        )
        p, expected_parameter = (
            t.detach().dequantize() if t.dtype.is_floating_point else t
            for t in (p, expected_parameter)
        )
        assert torch.equal(p, expected_parameter)
    with torch.device("meta"):
        on_meta = MODULES[name]()
        on_meta.reset_parameters()
    assert all(p.is_meta for p in on_meta.parameters())


def test_reset_parameters_materializes_only_parameters_on_meta():
    with torch.device("meta"):
        layer = nn.Linear(16, 16)
    float8lab.convert_to_float8(layer)
    layer.reset_parameters()
    assert layer.weight.device == float8lab.nn.parameters.default_device()
    layer = float8lab.Linear(16, 16, device="cpu")
    layer.bias = nn.Parameter(torch.empty(16, device="meta"))
    layer.marker = weight = layer.weight
    layer.reset_parameters()
    assert layer.weight is weight
    assert weight.device.type == "cpu"


def test_torch_can_swap_the_parameters_of_a_module_with_a_kept_cast():
    layer = float8lab.Linear(16, 32, device="cpu")
    with float8lab.autocast(recipe=recipes.Float8CurrentScaling()):
        layer(torch.ones(2, 16), is_first_microbatch=True).sum().backward()
    layer.zero_grad()
    weight = layer.weight
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(layer.state_dict())
        layer.bfloat16()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert layer.weight is weight
    assert weight.dtype == torch.bfloat16
