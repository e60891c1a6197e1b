"""Modules, recipes and shapes drawn at random: 0, 1, odd, strided, any leading dimensions.

``--cases N`` draws N cases; the default is few, for CI.
"""

import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import float8lab
from float8lab import recipes
from float8lab.nn.activation_function import activate

SIZES = (0, 1, 2, 3, 7, 16, 17, 31, 32, 48, 127, 128, 130)
LEADING = ((), (0,), (1,), (3,), (17,), (33,), (2, 3), (2, 0, 3), (1, 1, 5), (2, 1, 3, 2))
STRIDES = ("contiguous", "transposed", "expanded", "sliced")
RECIPES = (
    None,
    recipes.DelayedScaling(),
    recipes.DelayedScaling(amax_history_len=4, amax_compute_algo="max", power_of_2_scale=False),
    recipes.Float8CurrentScaling(),
    recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
    recipes.Float8CurrentScaling(override_linear_precision=(False, True, True)),
    recipes.Float8CurrentScaling(override_linear_precision=(True, False, False)),
    recipes.Float8RowwiseScaling(high_precision_wgrad=True),
    recipes.Float8RowwiseScaling(power_of_2_scale=True),
    recipes.Float8BlockScaling(),
    recipes.MXFP8BlockScaling(),
)
MODULES = ("Linear", "converted", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP")
LIBRARY_MODULES = ("Conv1D",)
"""Modules of libraries that take seconds to import."""


class Case(NamedTuple):
    module: str
    recipe: int
    leading: tuple[int, ...]
    K: int
    N: int
    strides: str
    dtype: torch.dtype
    bias: bool
    variant: int
    stored: bool

    def __str__(self) -> str:
        return repr(self)


def _draw(numbers: random.Random, modules: tuple[str, ...]) -> Case:
    pick = numbers.choice
    return Case(
        module=pick(modules), recipe=numbers.randrange(len(RECIPES)), leading=pick(LEADING),
        K=pick(SIZES), N=pick(SIZES), strides=pick(STRIDES),
        dtype=pick((torch.float32, torch.bfloat16)), bias=numbers.random() < 0.7,
        variant=numbers.randrange(12), stored=numbers.random() < 0.2,
    )  # fmt: skip


def _input(case: Case) -> Tensor:
    shape = (*case.leading, case.K)
    if case.strides == "transposed" and len(shape) > 1:
        x = torch.randn(shape[::-1], dtype=case.dtype).permute(*reversed(range(len(shape))))
    elif case.strides == "expanded" and len(shape) > 1:
        x = torch.randn(shape[1:], dtype=case.dtype).expand(shape)
    elif case.strides == "sliced":
        x = torch.randn((*shape[:-1], 2 * case.K + 1), dtype=case.dtype)[..., 1::2]
    else:
        x = torch.randn(shape, dtype=case.dtype)
    return x.detach().requires_grad_()


def _module(case: Case) -> nn.Module:
    options: Any = {"device": "cpu", "params_dtype": case.dtype}
    norm = ("LayerNorm", "RMSNorm")[case.variant % 2]
    if case.module == "Linear":
        return float8lab.Linear(case.K, case.N, case.bias, **options)
    if case.module in ("LayerNorm", "RMSNorm"):
        return getattr(float8lab, case.module)(case.K, **options)
    if case.module == "LayerNormLinear":
        return float8lab.LayerNormLinear(
            case.K, case.N, bias=case.bias, normalization=norm, **options
        )
    if case.module == "LayerNormMLP":
        return float8lab.LayerNormMLP(
            case.K, case.N, bias=case.bias, normalization=norm,
            activation=("gelu", "relu", "srelu", "swiglu", "geglu", "glu")[case.variant // 2],
            checkpoint=case.variant == 3, fp8_activation_input=case.variant == 7, **options,
        )  # fmt: skip
    if case.module == "Conv1D":
        module = pytest.importorskip("transformers.pytorch_utils").Conv1D(case.N, case.K)
        model = nn.Sequential(module.to(case.dtype))
    else:
        model = nn.Sequential(nn.Linear(case.K, case.N, case.bias, dtype=case.dtype))
    float8lab.convert_to_float8(model)
    return model[0]


def _compose_from_parts(module: Any, x: Tensor) -> Tensor:
    """Return a fused module's output from modules of its parts."""
    norm_class = getattr(float8lab, module.normalization)
    norm = norm_class(x.shape[-1], device="cpu", params_dtype=x.dtype)
    norm.weight = module.layer_norm_weight
    if module.layer_norm_bias is not None:
        norm.bias = module.layer_norm_bias

    def linear(y: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        layer = float8lab.Linear(weight.shape[1], weight.shape[0], device="cpu")
        layer.weight, layer.bias = weight, bias
        return layer(y)

    if isinstance(module, float8lab.LayerNormLinear):
        return linear(norm(x), module.weight, module.bias)
    hidden = linear(norm(x), module.fc1_weight, module.fc1_bias)
    return linear(activate(hidden, module.activation), module.fc2_weight, module.fc2_bias)


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _check_gemm(actual: Tensor, exact: Tensor, a: Tensor, b: Tensor, K: int) -> None:
    """Each of K products has the rounding errors of both operands: e5m2's, then bfloat16's."""
    assert actual.shape == exact.shape
    relative_error = (1 + 2**-3) ** 2 - 1 + 2**-7
    bound = relative_error * max(K, 1) * _largest(a) * _largest(b)
    error = (actual.double() - exact).abs()
    assert not (error > bound).any(), f"{error.max()} > {bound}"


def _check(case: Case) -> None:
    recipe = RECIPES[case.recipe]
    module, x = _module(case), _input(case)
    if case.module == "converted" and recipe is not None and case.stored and case.K and case.N:
        module.weight = nn.Parameter(float8lab.quantize(module.weight.detach()))
    with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
        y = module(x)
    out = case.K if case.module in ("LayerNorm", "RMSNorm", "LayerNormMLP") else case.N
    assert y.shape == (*case.leading, out)
    assert y.dtype == case.dtype
    assert y.isfinite().all()
    dy = torch.randn(y.shape, dtype=y.dtype)
    y.backward(dy)
    for tensor in (x, *module.parameters()):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert tensor.grad.isfinite().all()
    if case.module in ("LayerNorm", "RMSNorm"):
        if case.K:
            plain = nn.LayerNorm if case.module == "LayerNorm" else nn.RMSNorm
            expected = plain(case.K, eps=module.eps, dtype=torch.float64)(x.detach().double())
            torch.testing.assert_close(y, expected.to(y.dtype))
    elif case.module in ("LayerNormLinear", "LayerNormMLP"):
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            assert torch.equal(y, _compose_from_parts(module, x))
    else:
        _check_linear(module, x, y, dy)


def _check_linear(module: Any, x: Tensor, y: Tensor, dy: Tensor) -> None:
    weight = module.weight.detach()
    weight = (weight.dequantize() if hasattr(weight, "qdata") else weight).double()
    transposed = "Conv1D" in type(module).__name__  # its weight is [in, out]
    w = weight.t() if transposed else weight
    M, (N, K) = torch.Size(x.shape[:-1]).numel(), w.shape
    x2, dy2 = x.detach().double().reshape(M, K), dy.double().reshape(M, N)
    bias = 0 if module.bias is None else module.bias.detach().double()
    bias_rounding = _largest(module.bias.detach()) * 2**-7 if module.bias is not None else 0.0
    actual = y.detach().double().reshape(M, N)
    error = (actual - (x2 @ w.t() + bias)).abs().clamp(min=bias_rounding) - bias_rounding
    _check_gemm(error, torch.zeros_like(error), x2, w, K)
    _check_gemm(x.grad.reshape(M, K), dy2 @ w, dy2, w, N)
    dw = dy2.t() @ x2
    _check_gemm(module.weight.grad, dw.t() if transposed else dw, dy2, x2, M)
    if module.bias is not None:
        _check_gemm(module.bias.grad, dy2.sum(0), dy2, torch.ones(1), M)


# torch.nn.Linear gives the first warning when it is made; the second is of cases with a norm only.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
@pytest.mark.filterwarnings("ignore:No FP8 module ran inside autocast:UserWarning")
@pytest.mark.filterwarnings("ignore:.* is stored as .* and cast to:UserWarning")
def test_modules_take_any_shape(request: pytest.FixtureRequest) -> None:
    count = request.config.getoption("--cases")
    numbers = random.Random(0)
    for _ in range(count or 100):
        case = _draw(numbers, MODULES if count is None else (*MODULES, *LIBRARY_MODULES))
        torch.manual_seed(0)
        try:
            _check(case)
        except pytest.skip.Exception:
            continue
        except Exception as error:
            raise AssertionError(str(case)) from error
