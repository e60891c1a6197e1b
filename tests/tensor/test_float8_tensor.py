"""Float8Tensor: quantize, dequantize, repr, views, GEMMs, and the fallback."""

import copy
import pickle
import warnings

import expecttest
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab.formats import E4M3, E5M2, Float8Spec
from float8lab.tensor import Float8Tensor, dispatch, quantize
from float8lab.tensor.dispatch import implements
from tests.near_ties import by_multiplying, near_ties
from tests.same_bytes import assert_same_bytes

BLOCKS = {
    "tensor": (-1, -1), "row": (1, -1), "column": (-1, 1), "1x128": (1, 128),
    "128x128": (128, 128), "mx": (1, 32),
}  # fmt: skip
BLOCKS_IN_3D = [(-1, -1, -1), (1, 1, -1), (1, 2, 8), (2, 2, 8)]
"""One block for each way to quantize a batch: as a matrix, one by one, and by arithmetic."""
each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())


def rule(block):
    return "e8m0" if block == (1, 32) else "fp32"


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@each_block
@pytest.mark.parametrize("shape", [(200, 300), (2, 3, 130, 40), (7,), (), (0, 5), (3, 0)], ids=str)
def test_round_trip_is_near_the_original(block, shape, device):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_round_trip(block, shape, dtype, device)


def check_round_trip(block, shape, dtype, device):
    x = torch.randn(shape, device=device).to(dtype)
    t = quantize(x, block=block, scale_rule=rule(block))
    assert (t.shape, t.dtype, t.device) == (x.shape, x.dtype, x.device)
    assert t.qdata.shape == x.shape
    assert t.qdata.dtype == torch.float8_e4m3fn
    assert t.scale.shape == t.amax.shape == t.spec.scale_shape(tuple(shape))
    assert t.scale.dtype == t.amax.dtype == torch.float32
    back = t.dequantize()
    assert type(back) is torch.Tensor
    assert back.dtype == dtype
    if x.numel():
        assert relative_error(back, x) < 0.045


def test_scale_decodes_and_determines_the_bytes():
    x = torch.randn(64, 96)
    t = quantize(x)
    assert torch.equal(t.scale, 1 / (torch.tensor(448.0) / x.abs().max()).view(1, 1))
    assert torch.equal(t.amax, x.abs().max().view(1, 1))
    expected = (x * (1 / t.scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(t.qdata.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(t.dequantize(), t.qdata.float() * t.scale)


@pytest.mark.parametrize(
    ("values", "decoded"),
    [
        ([0.0, 0.0], [0.0, 0.0]), ([448.0, -448.0], [448.0, -448.0]),
        ([float("inf"), -1.0], [float("nan"), -1.0]), ([float("-inf"), 1.0], [float("nan"), 1.0]),
        ([3e38, 1.0], [3e38, 0.0]), ([1e-45, 0.0], [0.0, 0.0]),
    ],
    ids=["zero", "largest", "inf", "minus-inf", "large", "subnormal"],
)  # fmt: skip
def test_zero_nonfinite_and_extreme_values_have_defined_results(values, decoded):
    t = quantize(torch.tensor([values]))
    if values[0] not in (1e-45, 3e38):
        assert t.scale.item() == 1.0
    assert torch.isfinite(t.scale).all()
    torch.testing.assert_close(
        t.dequantize(), torch.tensor([decoded]), rtol=2.0**-23, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 128), (3, 5)], ids=str)
@pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_infinity_written_into_a_tensor_stays_nonfinite(fp8_dtype, block):
    inf = float("inf")
    for write, count in (
        (lambda t: t.fill_(-inf), 60),
        (lambda t: t.mul_(inf), 60),
        (lambda t: t.copy_(torch.full((6, 10), inf)), 60),
        (lambda t: t.__setitem__((0, 0), inf), 1),
        (lambda t: torch._foreach_add_([t], inf), 60),
        (lambda t: t.index_copy_(0, torch.tensor([1]), torch.full((1, 10), -inf)), 10),
    ):
        t = quantize(torch.rand(6, 10) + 0.5, fp8_dtype, block=block)
        write(t)
        value = t.dequantize()
        assert (value.isnan() if fp8_dtype == E4M3 else value.isinf()).sum() == count


def test_given_scale_saturates():
    t = quantize(torch.tensor([[1.0, 1000.0, -1000.0]]), scale=0.5)
    assert t.dequantize().tolist() == [[1.0, 224.0, -224.0]]
    per_row = quantize(torch.ones(2, 4), block=(1, -1), scale=torch.tensor([[1.0], [2.0]]))
    assert per_row.scale.tolist() == [[1.0], [2.0]]
    assert torch.equal(per_row.dequantize(), torch.ones(2, 4))
    for block in BLOCKS_IN_3D:
        t = quantize(torch.full((2, 4, 8), -1000.0), block=block, scale=0.5)
        assert torch.equal(t.scale, torch.full_like(t.scale, 0.5))
        assert torch.equal(t.amax, torch.full_like(t.amax, 224.0))
        assert torch.equal(t.dequantize(), torch.full((2, 4, 8), -224.0))


@pytest.mark.parametrize("block", BLOCKS_IN_3D, ids=str)
def test_amax_epsilon_bounds_the_scale_from_below(block):
    t = quantize(torch.full((2, 4, 8), 1e-3), E5M2, block=block, amax_epsilon=57344.0)
    assert t.qdata.dtype == torch.float8_e5m2
    assert torch.equal(t.scale, torch.ones_like(t.scale))
    assert torch.equal(t.amax, torch.full_like(t.amax, 1e-3))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(torch.ones(2, dtype=torch.int32)), TypeError, "got torch.int32"),
        (lambda: quantize([1.0]), TypeError, "got list"),
        (lambda: quantize(torch.ones(2), torch.float16), ValueError, "fp8_dtype must be"),
        (lambda: quantize(torch.ones(2, 2), block=(0, 1)), ValueError, "block must hold positive"),
        (lambda: quantize(torch.ones(2), scale_rule="x"), ValueError, "scale_rule must be one of"),
        (
            lambda: quantize(torch.ones(4, 4), scale=torch.ones(4, 1)), ValueError,
            r"one scale per block, \(1, 1\); got shape \(4, 1\)",
        ),
        *(
            (
                lambda value=value: quantize(torch.ones(2, 2), scale=value),
                ValueError,
                "scale must be .*; got",
            )
            for value in (
                0, -1.0, float("nan"), float("inf"), 1e-46, torch.tensor([[0.0]]),
                torch.tensor(1e-46, dtype=torch.float64),
            )
        ),
        *(
            (lambda eps=eps: quantize(torch.ones(2), amax_epsilon=eps), ValueError, "amax_epsilon")
            for eps in (-1.0, float("nan"), float("inf"))
        ),
        (lambda: quantize(torch.ones(2, 2), block=(1, 2, 3)), ValueError, "block must have 2"),
        (lambda: quantize(torch.ones(2, 2), block=(2,)), ValueError, "block must have 2"),
    ],
)  # fmt: skip
def test_wrong_arguments_of_quantize_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_block_never_reaches_into_the_next_matrix_of_a_batch():
    x = torch.ones(2, 100, 64)
    x[1] = 100.0
    t = quantize(x, block=(128, 128))
    assert t.scale.shape == (2, 1, 1)
    assert torch.equal(t.dequantize(), x)


@each_block
def test_gradients_pass_through_casts(block):
    x = torch.randn(8, 160, requires_grad=True)
    t = quantize(x, block=block)
    assert t.requires_grad
    weight = torch.randn(8, 160)
    (t.dequantize() * weight).sum().backward()
    assert torch.equal(x.grad, weight)


@each_block
def test_unflatten_restores_a_flattened_tensor(block):
    t = quantize(torch.randn(40, 160), block=block)
    names, context = t.__tensor_flatten__()
    assert names == ["qdata", "scale", "amax"]
    hash(context)
    inner = {n: getattr(t, n) for n in names}
    restored = Float8Tensor.__tensor_unflatten__(inner, context, t.shape, t.stride())
    assert restored.spec == t.spec
    assert restored.dtype == t.dtype
    assert torch.equal(restored.dequantize(), t.dequantize())


def test_requantize_replaces_values_and_scales_in_place():
    t = quantize(torch.ones(4, 4))
    qdata = t.qdata
    t.requantize_(torch.full((4, 4), 100.0))
    assert t.qdata is qdata
    assert torch.equal(t.dequantize(), torch.full((4, 4), 100.0))
    with pytest.raises(ValueError, match=r"must have shape \(4, 4\); got \(4, 5\)"):
        t.requantize_(torch.ones(4, 5))


def test_results_of_ops_on_a_subclass_are_of_the_subclass():
    class Named(Float8Tensor):
        def __new__(cls, name, x):
            return Float8Tensor.__new__(cls, x.qdata, x.scale, x.amax, x.spec, x.dtype)

        def __init__(self, name, x):
            super().__init__(x.qdata, x.scale, x.amax, x.spec, x.dtype)
            self.label = name

    p = nn.Parameter(Named("w", quantize(torch.randn(4, 6), block=(1, -1))))
    assert isinstance(p, nn.Parameter)
    names, context = p.__tensor_flatten__()
    inner = {name: getattr(p, name) for name in names}
    results = {
        "slice": p[1:], "view": p.view(2, 12), "to": p.bfloat16(), "clone": p.clone(),
        "pick": p[torch.tensor([1, 2])], "empty": torch.empty_like(p), "new": p.new_zeros(3, 3),
        "deepcopy": copy.deepcopy(p), "neg": -p,
        "unflatten": Named.__tensor_unflatten__(inner, context, p.shape, p.stride()),
    }  # fmt: skip
    assert {name: type(x) for name, x in results.items()} == dict.fromkeys(results, Named)


@pytest.mark.parametrize("make", [torch.Tensor, nn.Parameter, torch.as_tensor])
def test_constructors_of_torch_share_the_memory_of_an_fp8_tensor(make):
    x = quantize(torch.randn(4, 8))
    y = make(x)
    assert type(y) is Float8Tensor
    assert (y.spec, y.dtype) == (x.spec, x.dtype)
    assert y.qdata.data_ptr() == x.qdata.data_ptr()
    assert y.scale.data_ptr() == x.scale.data_ptr()


class ImportableSubclass(Float8Tensor):
    """A subclass that pickle can import."""


def test_subclass_survives_pickle():
    x = quantize(torch.randn(4, 6))
    restored = pickle.loads(
        pickle.dumps(ImportableSubclass._make(x.qdata, x.scale, x.amax, x.spec, x.dtype))
    )
    assert type(restored) is ImportableSubclass
    assert torch.equal(restored.dequantize(), x.dequantize())


@pytest.mark.parametrize("block", [(-1, 1), (128, 128)], ids=str)
def test_view_across_blocks_regroups_or_cuts_them(block):
    t = quantize(torch.randn(256, 256), block=block)
    assert t.view(64, 4, 256).spec.block == {(-1, 1): (-1, -1, 1), (128, 128): (32, -1, 128)}[block]
    odd = quantize(torch.randn(9, 4), block=(3, 4))  # half of its blocks fit neither shape
    for x, size in ((t, (64, 4, 256)), (t, (128, 512)), (odd, (4, 9))):
        assert torch.equal(x.view(size).dequantize(), x.dequantize().view(size))


@each_block
def test_copy_between_float8_and_plain_tensors_quantizes_or_dequantizes(block):
    a, b = torch.randn(256, 256), torch.randn(256, 256)
    t, u = quantize(a, block=block), quantize(b, block=block)
    t.copy_(u)
    assert_same_bytes(t, u)
    t.copy_(a)
    assert torch.equal(t.dequantize(), quantize(a, block=block).dequantize())
    plain = torch.empty(256, 256)
    plain.copy_(u)
    assert torch.equal(plain, u.dequantize())


PAIRS = {
    "tensor-tensor": ((-1, -1), (-1, -1)), "row-row": ((1, -1), (1, -1)),
    "tensor-row": ((-1, -1), (1, -1)), "block": ((1, 128), (128, 128)),
    "1x128-1x128": ((1, 128), (1, 128)), "mx": ((1, 32), (1, 32)),
}  # fmt: skip


@pytest.mark.parametrize(("block_x", "block_w"), PAIRS.values(), ids=PAIRS.keys())
def test_matmuls_of_float8_tensors_are_near_float64(block_x, block_w, device):
    x, w, bias = torch.randn(40, 96), torch.randn(50, 96), torch.randn(50)
    x, w, bias = x.to(device), w.to(device), bias.to(device)
    a = quantize(x, block=block_x, scale_rule=rule(block_x))
    b = quantize(w, block=block_w, scale_rule=rule(block_w))
    exact = a.dequantize().double() @ b.dequantize().double().t()
    with warnings.catch_warnings(), float8lab.count_gemms() as counts:
        warnings.simplefilter("error")
        for y in (torch.mm(a, b.t()), a @ b.t(), torch.matmul(a, b.t()), F.linear(a, b)):
            assert type(y) is torch.Tensor
            assert y.dtype == torch.float32
            assert relative_error(y, exact) < 2e-3
        for y in (torch.addmm(bias, a, b.t()), F.linear(a, b, bias)):
            assert relative_error(y, exact + bias.double()) < 2e-3
    assert counts.fp8 + counts.high_precision == 6


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (128, 128), (1, 32)], ids=str)
def test_matmuls_with_plain_tensors_quantize_them(block):
    x, w = torch.randn(3, 40, 96), torch.randn(50, 96)
    t = quantize(w, block=block, scale_rule=rule(block))
    y = F.linear(x, t)
    exact = x.double() @ t.dequantize().double().t()
    assert 1e-4 < relative_error(y, exact) < 0.05  # x was rounded to FP8 too
    z = torch.mm(quantize(x[0]), w.t()) if block == (-1, -1) else F.linear(x[0], t)
    assert relative_error(z, x[0].double() @ w.double().t()) < 0.06


def test_matmuls_with_scales_along_the_contraction_dequantize():
    x, w = torch.randn(40, 96), torch.randn(96, 50)
    t = quantize(w, block=(1, -1))  # one scale per row of w: it varies along K
    with float8lab.fallback("silent"):
        y = torch.mm(x, t)
    assert torch.equal(y, torch.mm(x, t.dequantize()))


def test_gradients_flow_through_matmuls():
    x = torch.randn(16, 32, requires_grad=True)
    w = nn.Parameter(quantize(torch.randn(24, 32)))
    F.linear(quantize(x), w).sum().backward()
    ones = torch.ones(16, 24)
    assert relative_error(x.grad, ones @ w.detach().dequantize()) < 0.05
    assert relative_error(w.grad, ones.t() @ x.detach()) < 0.06


@pytest.fixture
def fresh_warnings(monkeypatch):
    monkeypatch.setattr(dispatch, "_POLICY", dispatch._Policy())


@pytest.mark.usefixtures("fresh_warnings")
def test_other_ops_dequantize_with_one_warning_per_op():
    t = quantize(torch.randn(4, 4))
    with pytest.warns(UserWarning, match=r"aten\.sin\.default has no FP8 implementation"):
        y = t.sin()
    assert torch.equal(y, t.dequantize().sin())
    t.sin()  # no second warning: filterwarnings = error
    with pytest.warns(UserWarning, match=r"aten\.cos\.default"):
        t.cos()


@pytest.mark.usefixtures("fresh_warnings")
def test_fallback_policies_raise_or_are_silent():
    t = quantize(torch.randn(4, 4))
    with float8lab.fallback("error"):
        with pytest.raises(NotImplementedError, match=r"aten\.sin\.default has no FP8"):
            t.sin()
        with float8lab.fallback("silent"):
            t.sin()
        with pytest.raises(NotImplementedError):
            t.sin()
    with pytest.raises(ValueError, match="policy must be one of"):
        float8lab.fallback("never")


@pytest.mark.usefixtures("fresh_warnings")
def test_in_place_ops_requantize():
    t = quantize(torch.randn(4, 4))
    expected = quantize(t.dequantize() * 3)
    with float8lab.fallback("error"):  # in-place ops are no fallback
        result = t.mul_(3)
    assert result is t
    assert isinstance(t, Float8Tensor)
    assert torch.equal(t.dequantize(), expected.dequantize())


@pytest.mark.usefixtures("fresh_warnings")
def test_ops_that_write_return_the_written_tensor():
    with torch.inference_mode(), float8lab.fallback("silent"):
        t, out = quantize(torch.randn(4, 4)), quantize(torch.randn(4, 4))
        assert t.sin_() is t
        assert torch.sin(t, out=out) is out
        assert t.zero_() is t
        assert_same_bytes(t, quantize(torch.zeros(4, 4)))


def test_second_handler_for_an_op_raises():
    with pytest.raises(ValueError, match="must have one handler"):
        implements(torch.ops.aten.mm.default)(lambda *a: None)


class TestRepr(expecttest.TestCase):
    def test_repr(self):
        x = torch.tensor([[1.0, -2.0, 448.0], [0.5, 0.0, 3.0]])
        shown = [
            quantize(x),
            quantize(x.bfloat16(), torch.float8_e5m2, block=(1, -1), scale_rule="pow2"),
            quantize(x).requires_grad_(),
            quantize(torch.tensor(2.0)),
            quantize(torch.ones(0, 3)),
            quantize(torch.empty(2, 3, device="meta")),
            quantize(torch.zeros(2000, 2000), block=(128, 128)),
        ]
        self.assertExpectedInline(
            "\n".join(map(repr, shown)),
            """\
Float8Tensor([[  1.0000,  -2.0000, 448.0000],
              [  0.5000,   0.0000,   3.0000]],
             fp8=e4m3 tensor fp32, shape=(2, 3), dtype=torch.float32,
             amax=448, scale=1,
             health: 16.7% saturated, 0% subnormal, 16.7% zero)
Float8Tensor([[  1.0000,  -2.0000, 448.0000],
              [  0.5000,   0.0000,   3.0000]],
             fp8=e5m2 row pow2, shape=(2, 3), dtype=torch.bfloat16,
             amax=448, scale=6.10352e-05..0.0078125 (2, 1),
             health: 16.7% saturated, 0% subnormal, 16.7% zero)
Float8Tensor([[  1.0000,  -2.0000, 448.0000],
              [  0.5000,   0.0000,   3.0000]],
             fp8=e4m3 tensor fp32, shape=(2, 3), dtype=torch.float32, requires_grad=True,
             amax=448, scale=1,
             health: 16.7% saturated, 0% subnormal, 16.7% zero)
Float8Tensor(2.,
             fp8=e4m3 tensor fp32, shape=(), dtype=torch.float32,
             amax=2, scale=0.00446429,
             health: 100% saturated, 0% subnormal, 0% zero)
Float8Tensor([], size=(0, 3),
             fp8=e4m3 tensor fp32, shape=(0, 3), dtype=torch.float32,
             amax=0, scale=1,
             health: empty)
Float8Tensor(..., size=(2, 3),
             fp8=e4m3 tensor fp32, dtype=torch.float32, device='meta')
Float8Tensor([[0., 0., 0.,  ..., 0., 0., 0.],
              [0., 0., 0.,  ..., 0., 0., 0.],
              [0., 0., 0.,  ..., 0., 0., 0.],
              ...,
              [0., 0., 0.,  ..., 0., 0., 0.],
              [0., 0., 0.,  ..., 0., 0., 0.],
              [0., 0., 0.,  ..., 0., 0., 0.]],
             fp8=e4m3 128x128 fp32, shape=(2000, 2000), dtype=torch.float32,
             amax=0, scale=1..1 (16, 16),
             health: 0% saturated, 0% subnormal, 100% zero)""",
        )


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((1001,), (-1,)), ((6, 400), (1, 128)), ((7, 7, 7, 7), (-1, -1)), ((300, 5), (128, 128)),
        ((2, 130, 8), (1, 32)), ((8, 1, 260), (3, 1, 32)), ((200, 200), (-1, 1)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"edgeitems": 2, "threshold": 10}], ids=str)
def test_repr_prints_the_numbers_that_torch_prints(shape, block, dtype, options, device):
    t = quantize(torch.randn(shape, dtype=dtype, device=device), block=block)
    for x in (t, t.transpose(0, -1), t[1:]):
        with torch._tensor_str.printoptions(**options):
            shown, torch_repr = repr(x), repr(x.dequantize().float().cpu())
        numbers = torch_repr[len("tensor(") : torch_repr.rindex("]")].replace(
            "\n       ", "\n" + 13 * " "
        )
        assert shown.startswith(f"Float8Tensor({numbers}]")


def test_specs_compare_and_hash_by_value():
    assert Float8Spec() == Float8Spec(torch.float8_e4m3fn, (-1, -1), "fp32")
    assert len({Float8Spec(), Float8Spec(), Float8Spec(block=(1, -1))}) == 2
    assert Float8Spec(block=(1, 128)).transpose().block == (128, 1)


@pytest.mark.parametrize("block", [(1, -1), (1, 160)], ids=str)
def test_computed_scale_multiplies_and_a_given_one_divides(block):
    x = near_ties(8).flip(1)  # zeros first
    expected = by_multiplying(x)
    t = quantize(x, block=block)
    assert torch.equal(t.qdata.view(torch.uint8), expected)
    given = quantize(x, block=block, scale=t.scale)
    divided = (x / t.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(given.qdata.float(), divided.float())
    for columns in (0, 16):  # whole blocks, and a view with a part of each block
        written = quantize(torch.zeros(8, 160), block=block)
        written[:, columns:].copy_(x[:, columns:])
        assert torch.equal(written.qdata.view(torch.uint8), expected)
