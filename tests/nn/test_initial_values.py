"""Initial values in high precision of weights that are stored in FP8."""

import copy

import pytest
import torch
from torch import nn

import float8lab
from float8lab import Float8Tensor
from tests.nn.test_moves import MODULES

STORED = {name: make for name, make in MODULES.items() if name not in ("layernorm", "rmsnorm")}
each_module = pytest.mark.parametrize("make", STORED.values(), ids=STORED)


def made(make, *, stored=True, device="cpu", **kwargs):
    torch.manual_seed(3)
    with float8lab.fp8_model_init(enabled=stored, preserve_high_precision_init_val=True):
        return make(device=device, **kwargs)


def kept(module):
    stored = {n: p for n, p in module.named_parameters() if isinstance(p, Float8Tensor)}
    assert stored
    return {name: p.get_high_precision_init_val() for name, p in stored.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_module
def test_are_what_the_weights_would_be(make, dtype):
    module, plain = (made(make, stored=stored, params_dtype=dtype) for stored in (True, False))
    for name, value in kept(module).items():
        assert torch.equal(value, plain.get_parameter(name))
        assert (value.dtype, value.device.type, value.requires_grad) == (dtype, "cpu", False)
        parameter, same = module.get_parameter(name), float8lab.quantize(value)
        assert torch.equal(same.qdata.float(), parameter.qdata.float())
        assert torch.equal(same.scale, parameter.scale)


@each_module
def test_survive_moves_and_copies_and_are_in_no_state_dict(make):
    module = made(make)
    values = kept(module)
    assert [*module.state_dict()] == [*made(make, stored=False).state_dict()]
    module._apply(torch.clone)  # as module.to(device) moves parameters
    assert all(value is values[name] for name, value in kept(module).items())
    nn.Sequential(module).bfloat16()
    assert all(value is values[name] for name, value in kept(module).items())
    twin = copy.deepcopy(module)
    for name, value in kept(twin).items():
        assert torch.equal(value, values[name])
    for one in (twin, module):
        assert all(value is values[name] for name, value in kept(module).items())
        for parameter in one.parameters():
            if isinstance(parameter, Float8Tensor):
                parameter.clear_high_precision_init_val()
    module._apply(torch.clone)
    assert set(kept(module).values()) == {None}


@pytest.mark.parametrize(
    "name", ["linear", "linear-split", "norm-linear", "norm-linear-split", "mlp"]
)
def test_of_a_module_made_on_meta(name):
    module = made(MODULES[name], device="meta")
    assert set(kept(module).values()) == {None}
    module.to_empty(device="cpu")
    torch.manual_seed(3)
    module.reset_parameters()
    expected = made(MODULES[name])
    for key, value in kept(module).items():
        assert torch.equal(value, kept(expected)[key])
        assert torch.equal(module.get_parameter(key), expected.get_parameter(key))


@pytest.mark.gpu
@each_module
def test_stay_on_the_cpu_when_the_module_moves(make):
    module = made(make)
    values = kept(module)
    module.cuda()
    assert all(value is values[name] for name, value in kept(module).items())
    assert all(parameter.is_cuda for parameter in module.parameters())
