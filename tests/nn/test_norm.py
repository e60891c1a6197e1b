"""LayerNorm and RMSNorm equal torch's, with every gradient, in any shape and dtype."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from tests.nn.models import saved_bytes
from tests.pairwise import pairs_first

NORMS = {"layer": float8lab.LayerNorm, "rms": float8lab.RMSNorm}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
SHAPES = {"1": ((1,), 1), "odd": ((7,), 33), "N-D": ((2, 3, 5), 40), "vector": ((), 17)}
SHAPES |= {"empty": ((0,), 16), "long": ((3,), 9001)}
DTYPES = {str(d): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


def build_norm(norm: Any, size: Any, **kwargs: Any) -> Any:
    module = norm(size, **kwargs)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    return module


def float64_run(module: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    """The output, dx and the gradients of the parameters in float64."""
    p = [v.detach().double().requires_grad_() for v in module.parameters()]
    x = x.detach().double().requires_grad_()
    gamma = p[0] + 1.0 if module.zero_centered_gamma else p[0]
    if isinstance(module, nn.LayerNorm):
        y = F.layer_norm(x, gamma.shape, gamma, p[1], module.eps)
    else:
        y = F.rms_norm(x, gamma.shape, gamma, module.eps)
    y.backward(dy.double())
    return [y.detach(), x.grad, *(v.grad for v in p)]


def run(module: Any, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize(
    ("norm", "size", "zero_centered", "dtype"),
    pairs_first(NORMS, SHAPES, {"": False, "zero-centered": True}, DTYPES),
)
def test_output_and_every_gradient_are_near_float64(
    norm: Any, size: tuple[Any, int], zero_centered: bool, dtype: torch.dtype, device: Any
) -> None:
    shape, K = size
    module = build_norm(
        norm, K, zero_centered_gamma=zero_centered, params_dtype=dtype, device=device
    )
    x = (torch.randn(*shape, K, device=device) * 3 + 1).to(dtype)
    dy = torch.randn(*shape, K, device=device).to(dtype)
    actual, expected = run(module, x, dy), float64_run(module, x, dy)
    # The tolerance covers one rounding to the dtype, and float32 sums of K or M terms before it.
    # The terms of dx may cancel completely, as they do for a single feature, so their size is taken
    # from dy * gamma * rstd.
    eps, x64 = torch.finfo(dtype).eps, x.double()
    center = x64.mean(-1, keepdim=True) if isinstance(module, nn.LayerNorm) else 0.0
    rstd = ((x64 - center).square().mean(-1) + module.eps).rsqrt()
    gamma = module.weight.double() + (1.0 if zero_centered else 0.0)
    dy_size = dy.abs().max() if dy.numel() else torch.zeros(())
    dx_size = dy_size * gamma.abs().max() * rstd.max() if dy.numel() else dy_size
    for i, (tensor, expected_tensor) in enumerate(zip(actual, expected, strict=True)):
        assert tensor.dtype == dtype
        assert tensor.shape == expected_tensor.shape
        if expected_tensor.numel():
            size = max(expected_tensor.abs().max(), dx_size if i == 1 else dy_size)
            arithmetic = (1e-5 if dtype != torch.float64 else 1e-12) * size
            assert bool(
                ((tensor - expected_tensor).abs() <= eps * expected_tensor.abs() + arithmetic).all()
            )


@each_norm
def test_norms_are_torch_modules_and_load_their_state_dicts(norm: Any) -> None:
    plain = (nn.LayerNorm if norm is float8lab.LayerNorm else nn.RMSNorm)(24, eps=1e-5)
    module = norm(24, device="cpu")
    assert isinstance(module, type(plain))
    plain.load_state_dict(build_norm(norm, 24, device="cpu").state_dict(), strict=True)
    module.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(5, 24)
    torch.testing.assert_close(module(x), plain(x), rtol=1e-5, atol=1e-5)
    assert "24" in repr(module)


@each_norm
def test_the_output_has_the_dtype_of_torch_autocast(norm: Any) -> None:
    module = norm(24, device="cpu")
    x = torch.randn(5, 24, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, module(x).bfloat16())
    y.sum().backward()
    assert x.grad.dtype == module.weight.grad.dtype == torch.float32
    wide, data = (
        build_norm(norm, 24, params_dtype=torch.float64, device="cpu"),
        torch.randn(2, 5, 24),
    )
    with torch.autocast("cpu", torch.bfloat16):  # leaves float64 unchanged
        results = run(wide, *data.double())
    assert all(map(torch.equal, results, run(wide, *data.double())))


@each_norm
def test_strided_and_expanded_tensors_give_equal_results(norm: Any) -> None:
    module = build_norm(norm, 24, device="cpu")
    x, dy = torch.randn(6, 20, 24), torch.ones(6, 20, 24)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    first = run(module, x, dy)
    second = run(copy.deepcopy(module), strided, torch.ones(()).expand_as(dy))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_norm
def test_outputs_are_no_views_and_may_be_modified_in_place(norm: Any) -> None:
    x = torch.randn(2, 5, 24, requires_grad=True)
    y = build_norm(norm, 24, device="cpu")(x)
    assert not y._is_view()
    y.add_(1.0).sum().backward()
    assert x.grad is not None


@each_norm
def test_only_the_input_and_statistics_are_saved_for_backward(norm: Any) -> None:
    x = torch.randn(512, 64, requires_grad=True)
    assert saved_bytes(norm(64, device="cpu"), x) <= x.nbytes + 2 * 4 * 512  # with statistics


@each_norm
def test_a_frozen_norm_computes_only_the_gradient_of_the_input(norm: Any) -> None:
    module = build_norm(norm, 24, device="cpu").requires_grad_(False)
    x = torch.randn(5, 24, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None


@pytest.mark.usefixtures("fresh_dynamo")
@each_norm
def test_compiled_norms_equal_eager(norm: Any) -> None:
    eager = build_norm(norm, 24, zero_centered_gamma=True, device="cpu")
    model = copy.deepcopy(eager)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for tokens in (5, 9):
        x, dy = torch.randn(2, tokens, 24), torch.randn(2, tokens, 24)
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = compiled(leaf)
        y.backward(dy)
        actual = [y.detach(), leaf.grad, *(p.grad for p in model.parameters())]
        assert all(torch.equal(a, b) for a, b in zip(actual, run(eager, x, dy), strict=True))


@each_norm
def test_wrong_arguments_are_refused(norm: Any) -> None:
    with pytest.raises(ValueError, match="hidden_size must be given, or normalized_shape"):
        norm(device="cpu")
    with pytest.raises(ValueError, match="hidden_size must be given, or normalized_shape"):
        norm(8, normalized_shape=8, device="cpu")
    with pytest.raises(ValueError, match="params_dtype must be dtype"):
        norm(8, params_dtype=torch.float32, dtype=torch.float16, device="cpu")
    with pytest.raises(ValueError, match="inp must have 8 as its last dimension"):
        norm(8, device="cpu")(torch.ones(2, 7))


def test_convert_norms_converts_in_place_and_names_reasons_for_the_rest(device: Any) -> None:
    class Own(nn.LayerNorm):
        pass

    model = nn.ModuleDict(
        {
            "layer": nn.LayerNorm((3, 5)), "rms": nn.RMSNorm(5, eps=1e-3), "eps": nn.RMSNorm(5),
            "bias": nn.LayerNorm(5, bias=False),
            "weight": nn.LayerNorm(5, elementwise_affine=False), "own": Own(5),
            "ours": float8lab.LayerNorm(5), "replaced": nn.LayerNorm(5),
        }
    ).to(device)  # fmt: skip
    model["replaced"].forward = partial(F.layer_norm, normalized_shape=(5,))
    plain = copy.deepcopy(model)
    assert float8lab.nn.convert_norms(model) == {
        "layer": None, "rms": None, "eps": "eps None means one by the input's dtype",
        "bias": "it has no bias", "weight": "it has no weight", "own": "Own is a class of its own",
        "replaced": "forward was replaced on the layer itself",
    }  # fmt: skip
    assert [type(model[name]) for name in ("layer", "rms")] == list(NORMS.values())
    assert all(type(model[name]) is type(plain[name]) for name in list(plain)[2:])
    model.load_state_dict(plain.state_dict())
    for name in ("layer", "rms"):
        x, dy = torch.randn(2, 2, 3, 5, device=device)
        for actual, expected in zip(run(model[name], x, dy), run(plain[name], x, dy), strict=True):
            assert (actual - expected).norm() <= 1e-6 * expected.norm()
        assert copy.deepcopy(model[name])(x).shape == x.shape
    assert float8lab.nn.convert_norms(model).keys() == {
        "eps", "bias", "weight", "own", "replaced"
    }  # fmt: skip
