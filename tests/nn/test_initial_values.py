"""High-precision initial values of weights that are stored in FP8."""

import copy

import pytest
import torch
from torch import nn

import float8lab
from float8lab import Float8Tensor, recipes
from float8lab.distributed.comm import NoGroup, SharedScales
from float8lab.nn.parameters import stored_for
from tests.nn.test_moves import MODULES

STORED = {name: make for name, make in MODULES.items() if name not in ("layernorm", "rmsnorm")}
each_module = pytest.mark.parametrize("make", STORED.values(), ids=STORED)


def build(make, *, stored=True, device="cpu", **kwargs):
    torch.manual_seed(3)
    with float8lab.fp8_model_init(enabled=stored, preserve_high_precision_init_val=True):
        return make(device=device, **kwargs)


def initial_values(module):
    stored = {n: p for n, p in module.named_parameters() if isinstance(p, Float8Tensor)}
    assert stored
    return {name: p.get_high_precision_init_val() for name, p in stored.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_module
def test_initial_values_equal_the_weights_of_a_high_precision_module(make, dtype):
    module, plain = (build(make, stored=stored, params_dtype=dtype) for stored in (True, False))
    for name, value in initial_values(module).items():
        assert torch.equal(value, plain.get_parameter(name))
        assert (value.dtype, value.device.type, value.requires_grad) == (dtype, "cpu", False)
        parameter, requantized = module.get_parameter(name), float8lab.quantize(value)
        assert torch.equal(requantized.qdata.float(), parameter.qdata.float())
        assert torch.equal(requantized.scale, parameter.scale)


@each_module
def test_initial_values_survive_moves_and_copies_and_are_in_no_state_dict(make):
    module = build(make)
    values = initial_values(module)
    assert [*module.state_dict()] == [*build(make, stored=False).state_dict()]
    module._apply(torch.clone)  # as module.to(device) moves parameters
    assert all(value is values[name] for name, value in initial_values(module).items())
    nn.Sequential(module).bfloat16()
    assert all(value is values[name] for name, value in initial_values(module).items())
    twin = copy.deepcopy(module)
    for name, value in initial_values(twin).items():
        assert torch.equal(value, values[name])
    for owner in (twin, module):
        assert all(value is values[name] for name, value in initial_values(module).items())
        for parameter in owner.parameters():
            if isinstance(parameter, Float8Tensor):
                parameter.clear_high_precision_init_val()
    module._apply(torch.clone)
    assert set(initial_values(module).values()) == {None}


@pytest.mark.parametrize(
    "name", ["linear", "linear-split", "norm-linear", "norm-linear-split", "mlp"]
)
def test_initial_values_of_a_meta_module_come_with_reset_parameters(name):
    module = build(MODULES[name], device="meta")
    assert set(initial_values(module).values()) == {None}
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    expected = build(MODULES[name])
    for key, value in initial_values(module).items():
        assert torch.equal(value, initial_values(expected)[key])
        assert torch.equal(module.get_parameter(key), expected.get_parameter(key))


@pytest.mark.parametrize("sharing", [None, SharedScales(NoGroup(2), 0)], ids=["alone", "shared"])
def test_weights_in_float64_are_not_stored_in_fp8(sharing):
    weight = torch.ones(32, 32, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"weight must be one of torch.float32.*got torch.float64"):
        stored_for(weight, recipes.Float8CurrentScaling(), sharing)


@pytest.mark.gpu
@each_module
def test_initial_values_stay_on_the_cpu_when_the_module_moves(make):
    module = build(make)
    values = initial_values(module)
    module.cuda()
    assert all(value is values[name] for name, value in initial_values(module).items())
    assert all(parameter.is_cuda for parameter in module.parameters())
