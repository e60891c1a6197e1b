"""Float4Tensor: exact values, exact gradients, half a byte per element."""

import copy
import ctypes
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from float8lab import Float4Tensor, fallback
from float8lab.formats import E8M0, MXFP4, NVFP4, Float4Spec
from float8lab.tensor import float4_tensor
from float8lab.tensor.float4_tensor import decode_codes, unpack
from tests.copies import saved_and_loaded

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    """Decode a sign, four exponent bits with bias 7 and three mantissa bits; all ones is NaN."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return math.nan
    return sign * 2.0 ** (max(exponent, 1) - 7) * ((exponent > 0) + mantissa / 8)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def packed(*shape, scale_dtype=torch.float8_e4m3fn, dtype=torch.float32, tensor_scale=0.37):
    """A random NVFP4 or MXFP4 tensor."""
    size = 16 if scale_dtype == torch.float8_e4m3fn else 32
    spec = Float4Spec((1,) * (len(shape) - 1) + (size,), scale_dtype, size == 16)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8)
    scale = torch.randint(100, 126, spec.scale_shape(shape), dtype=torch.uint8)
    scale_tensor = torch.full((1,) * len(shape), tensor_scale) if size == 16 else None
    return Float4Tensor(codes, scale.view(scale_dtype), scale_tensor, spec, dtype)


@pytest.mark.parametrize(
    ("define", "dtype", "tensor_scale"),
    [(e4m3, torch.float8_e4m3fn, 0.37), (e4m3, torch.float8_e4m3fn, None), (e8m0, E8M0, None)],
    ids=["nvfp4", "one-level", "mxfp4"],
)
def test_every_code_decodes_exactly_with_every_scale(device, define, dtype, tensor_scale):
    codes = torch.arange(16, dtype=torch.uint8, device=device).expand(256, 16)
    scale = torch.arange(256, dtype=torch.uint8, device=device).view(dtype).unsqueeze(1)
    scale_tensor = None if tensor_scale is None else torch.full((1, 1), tensor_scale, device=device)
    values = decode_codes(codes, (1, 16), scale, scale_tensor).cpu()
    factor = 1.0 if scale_tensor is None else scale_tensor.item()
    for row in range(256):
        # In Python's float64 all products are exact; the only rounding is that to float32.
        exact = [v * define(row) * factor for v in (*E2M1, *(-v for v in E2M1))]
        expected = torch.tensor(exact, dtype=torch.float64).float()
        torch.testing.assert_close(values[row], expected, rtol=0, atol=0, equal_nan=True)
    assert values[100, 8].signbit()  # the code of -0


def test_low_half_of_a_byte_comes_first():
    codes = torch.tensor([[0x21, 0x43], [0x65, 0x87]], dtype=torch.uint8)
    assert unpack(codes).tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("scale_dtype", [torch.float8_e4m3fn, E8M0], ids=["nvfp4", "mxfp4"])
def test_layer_multiplies_by_the_values_and_saves_the_packed_weight(
    device, scale_dtype, shape, bias
):
    weight = packed(32, 64, scale_dtype=scale_dtype, dtype=torch.bfloat16).to(device)
    factory = {"dtype": torch.bfloat16, "device": device}
    layer, plain = (nn.Linear(64, 32, bias, **factory) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    layer.weight = nn.Parameter(weight, requires_grad=False)
    plain.weight = nn.Parameter(weight.dequantize())
    x = torch.randn(shape, **factory, requires_grad=True)
    x2 = x.detach().clone().requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert [type(t) for t in saved] == [Float4Tensor]
    y2 = plain(x2)
    y.backward(grad := torch.randn_like(y))
    y2.backward(grad)
    assert torch.equal(y, y2)
    assert torch.equal(x.grad, x2.grad)
    assert layer.weight.grad is None


def test_compiled_layer_equals_eager_layer():
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(packed(32, 64), requires_grad=False)
    x = torch.randn(5, 64, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    (gradient,) = torch.autograd.grad(compiled(x).sum(), x)
    torch._dynamo.reset()
    assert torch.equal(gradient, *torch.autograd.grad(layer(x).sum(), x))


@pytest.mark.parametrize(
    ("scale_dtype", "limit"), [(torch.float8_e4m3fn, 0.57), (E8M0, 0.54)], ids=["nvfp4", "mxfp4"]
)
def test_bytes_per_element_are_near_half_a_byte(scale_dtype, limit):
    x = packed(4, 64, 512, scale_dtype=scale_dtype)
    inner_tensors = [getattr(x, name) for name in x.__tensor_flatten__()[0]]
    assert sum(inner_tensor.nbytes for inner_tensor in inner_tensors) / x.numel() <= limit


VIEWS = {
    "transposed": lambda x: x.transpose(1, 2),
    "permuted": lambda x: x.permute(2, 0, 1),
    "an-expert": lambda x: x[2],
    "an-expert-by-a-tensor": lambda x: x[torch.tensor(2)].t(),
    "a-row": lambda x: x[:, 3],
    "some-experts": lambda x: x[1:3],
    "every-other-expert": lambda x: x[::2],
    "chosen-experts": lambda x: x[torch.tensor([3, 0, -1])],
    "selected": lambda x: x.mT.index_select(0, torch.tensor([1, 1])),
    "all": lambda x: x.unbind()[3],
    "a-copy": lambda x: x.clone(),
    "moved": lambda x: x.to(torch.bfloat16),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_that_split_no_byte_stay_packed(view):
    x = packed(4, 6, 64)
    x = x.map(lambda t: t)
    x.tensor_scale = torch.rand(4, 1, 1)  # each expert of a stack has a scale of its own
    result = view(x)
    assert isinstance(result, Float4Tensor)
    expected = view(x.dequantize())
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(result.dequantize(), expected)


def test_chunks_are_decoded_one_after_the_other(monkeypatch):
    x = packed(4, 6, 64)
    values = x.dequantize(), x.mT[1].dequantize()
    monkeypatch.setattr(float4_tensor, "_CHUNK_SIZE", 3 * 64)
    assert torch.equal(x.dequantize(), values[0])
    assert torch.equal(x.mT[1].dequantize(), values[1])


def test_other_ops_run_on_the_dequantized_values():
    x = packed(2, 3, 64)
    values = x.dequantize()
    order, chosen = torch.tensor([1, 0]), torch.tensor([False, True])
    for op in (
        lambda t: t + 1, lambda t: t[..., 3], lambda t: t.view(6, 64), torch.isnan,
        lambda t: t[chosen], lambda t: t[order, order], lambda t: t[order[None]], lambda t: t.int(),
    ):  # fmt: skip
        assert type(op(x)) is torch.Tensor
        assert torch.equal(op(x), op(values))
    offs = torch.tensor([1, 5], dtype=torch.int32)
    a = torch.randn(5, 64, requires_grad=True)
    y = F.grouped_mm(a.bfloat16(), x.to(torch.bfloat16).transpose(1, 2), offs=offs)
    assert torch.equal(y, F.grouped_mm(a.bfloat16(), values.bfloat16().transpose(1, 2), offs=offs))
    with torch.inference_mode():
        assert torch.equal(F.linear(a, x[0]), F.linear(a, values[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_conversions_to_lists_and_arrays_copy_the_values(dtype):
    x = packed(4, 64, dtype=dtype)
    values = x.dequantize()
    assert x.tolist() == values.tolist()
    assert np.array_equal(np.asarray(x), values.float().numpy())
    with pytest.raises(TypeError, match=r"in 4 bits cannot .* Call \.dequantize\(\)\.numpy\(\)"):
        x.numpy()
    for share in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises(BufferError, match=r"Export \.dequantize\(\), or \.packed and \.scale"):
            share(x)


def test_writes_raise():
    x = packed(4, 64)
    ones = torch.ones(4, 64)
    for write in (
        lambda: x.add_(1), lambda: x.copy_(ones), lambda: torch.add(ones, 1, out=x),
        lambda: torch._foreach_add_([ones, x], 1),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match="must not write to a Float4Tensor"):
            write()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="frozen weight"):
        nn.init.normal_(x)


def test_copies_and_loaded_files_keep_the_values():
    layer = nn.Linear(64, 32)
    layer.weight = nn.Parameter(packed(32, 64), requires_grad=False)
    values = layer.weight.dequantize()
    state = saved_and_loaded(layer.state_dict(), weights_only=True)
    plain_layer = nn.Linear(64, 32)
    plain_layer.load_state_dict(state)  # a plain weight gets the values
    assert torch.equal(plain_layer.weight.detach(), values)
    copied_layer = copy.deepcopy(layer)
    assert isinstance(copied_layer.weight, nn.Parameter)
    copied_layer.weight.packed.zero_()
    copied_layer.load_state_dict(state)
    for restored_layer in (copied_layer, layer.to(torch.bfloat16).float()):
        assert isinstance(restored_layer.weight, Float4Tensor)
        assert not restored_layer.weight.requires_grad
        assert torch.equal(restored_layer.weight.dequantize(), values)
    assert repr(state["weight"]).startswith("Float4Tensor(fp4=e2m1 1x16 e4m3 fp32, shape=(32, 64)")


@pytest.mark.parametrize("transposed", [False, True])
def test_address_is_that_of_a_copy_which_later_calls_keep(transposed):
    x = packed(4, 64).t() if transposed else packed(4, 64)
    with fallback("silent"):
        address = x.data_ptr()
        assert x.data_ptr() == address
    stored = (ctypes.c_float * x.numel()).from_address(address)
    values = torch.as_strided(torch.tensor(stored), x.shape, x.stride())
    assert torch.equal(values, x.dequantize())


def test_inner_tensors_that_do_not_fit_raise():
    codes = torch.zeros(4, 32, dtype=torch.uint8)
    scale, scale_tensor = torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1)
    for match, arguments in {
        "packed must be uint8 of 2 dimensions": (codes.int(), scale, scale_tensor, NVFP4),
        r"scale must be torch.float8_e4m3fn of shape \(4, 4\)": (
            codes,
            scale[:2],
            scale_tensor,
            NVFP4,
        ),
        r"scale must be torch.float8_e8m0fnu of shape \(4, 2\)": (codes, scale, None, MXFP4),
        "tensor_scale must be a tensor that broadcasts": (codes, scale, None, NVFP4),
        "tensor_scale must be .* got shape \\(2, 1\\)": (codes, scale, torch.ones(2, 1), NVFP4),
    }.items():
        with pytest.raises(ValueError, match=match):
            Float4Tensor(*arguments, torch.bfloat16)
