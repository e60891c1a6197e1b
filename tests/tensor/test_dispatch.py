"""The handlers of the dispatch table: values, specs, and writes through views."""

import copy
import functools
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import float8lab
from float8lab.formats import Float8Spec
from float8lab.tensor import Float8Tensor, quantize
from float8lab.tensor.blocks import block_of_view
from tests.copies import saved_and_loaded
from tests.same_bytes import assert_same_bytes
from tests.tensor.dispatch_table import check_spec

BLOCKS = {
    "tensor": (-1, -1), "row": (1, -1), "column": (-1, 1), "1x8": (1, 8), "8x8": (8, 8),
    "mx": (1, 4), "4-rows": (4, -1), "3x5": (3, 5), "1x1": (1, 1),
}  # fmt: skip
each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
aten = torch.ops.aten


pytestmark = pytest.mark.usefixtures("no_silent_dequantizing")


def make(shape, block, seed=0, magnitude=1.0):
    g = torch.Generator().manual_seed(seed)
    x = magnitude * torch.randn(shape, generator=g) * torch.randn(shape, generator=g).exp()
    return quantize(x, block=Float8Spec(block=block).expand(len(shape)).block)


def amax_around(x, block):
    """Return for each element the amax of its block."""
    index = torch.zeros(x.shape, dtype=torch.long)
    for dim, (n, size) in enumerate(zip(x.shape, block, strict=True)):
        numbers = torch.arange(n) // (n if size == -1 else size)
        index = index * n + numbers.view([-1 if d == dim else 1 for d in range(x.ndim)])
    amax = torch.zeros(x.numel()).scatter_reduce(0, index.flatten(), x.flatten().abs(), "amax")
    return amax[index]


def random_view(x, rng):
    """Return a random view op, as a function, that the plain tensor ``x`` allows."""
    ops = [lambda t: t.squeeze(), lambda t: t.detach()]
    if x.ndim < 4:
        position = rng.randrange(x.ndim + 1)
        ops.append(lambda t: t.unsqueeze(position))
    if x.ndim:
        dim, second_dim = rng.randrange(x.ndim), rng.randrange(x.ndim)
        ops += 2 * [lambda t: t.transpose(dim, second_dim)]
        n = x.shape[dim]
        if n > 1:
            start = rng.randrange(n)
            end, step = rng.randrange(start, n + 1), rng.choice([1, 1, 1, 2, 3])
            ops += 4 * [lambda t: aten.slice.Tensor(t, dim, start, end, step)]
            ops += [lambda t: t.select(dim, start), lambda t: t.split(start + 1, dim)[0]]
    if x.ndim >= 2:
        ops.append(lambda t: t.diagonal())
    if x.is_contiguous() and x.numel():
        remaining, sizes = x.numel(), []
        while remaining > 1 and len(sizes) < 3:
            sizes.append(rng.choice([k for k in range(1, remaining + 1) if remaining % k == 0]))
            remaining //= sizes[-1]
        sizes.append(remaining)
        rng.shuffle(sizes)
        ops += 3 * [lambda t: t.view(sizes)]
    return rng.choice(ops)


WRITES = {
    "zero_": lambda x, v, v8: x.zero_(), "fill_": lambda x, v, v8: x.fill_(7.0),
    "mul_": lambda x, v, v8: x.mul_(3.0), "copy_": lambda x, v, v8: x.copy_(v),
    "copy_ fp8": lambda x, v, v8: x.copy_(v8 if isinstance(x, Float8Tensor) else v8.dequantize()),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
@each_block
def test_chains_of_views_stay_fp8_and_write_through(block, write):
    rng = random.Random(f"{block}")
    for case in range(25):
        shape = rng.choice([(12, 20), (16, 16), (3, 8, 10), (2, 3, 4, 8), (24,), (17, 9)])
        magnitude = 10.0 ** rng.randrange(-4, 2)
        base = make(shape, block, case, magnitude)
        spec, before = base.spec, base.dequantize()
        plain, is_written = before.clone(), torch.zeros(shape, dtype=torch.bool)
        views = []
        t, p, m = base, plain, is_written
        for _ in range(rng.randrange(1, 5)):
            view = random_view(p, rng)
            views.append(view)
            t, p, m = view(t), view(p), view(m)
            assert isinstance(t, Float8Tensor)
            assert (t.shape, t.stride(), t.dtype) == (p.shape, p.stride(), p.dtype)
            check_spec(t, base, str(case))
            assert torch.equal(t.dequantize(), p)
        if p.numel() == 0:
            continue
        value = torch.randn(p.shape) * 3 * magnitude
        value8 = quantize(value, block=t.spec.block)
        for x in (t, p):
            write(x, value, value8)
        m.fill_(True)
        after = base.dequantize()
        touched = amax_around(is_written.float(), spec.block) > 0
        assert torch.equal(after[~touched], before[~touched])  # other blocks keep every bit
        amax = amax_around(plain, spec.block)
        assert ((after - plain).abs() <= plain.abs() / 15 + amax / 200_000).all()
        assert torch.equal(t.dequantize(), functools.reduce(lambda x, f: f(x), views, after))


def test_view_sees_later_writes_to_its_base():
    base = make((16, 16), (8, 8))
    aligned, partial, cut = base[8:], base[1:3], base[3:13]
    base.mul_(100)
    for view, rows in ((aligned, slice(8, 16)), (partial, slice(1, 3)), (cut, slice(3, 13))):
        assert torch.equal(view.dequantize(), base.dequantize()[rows])
        assert torch.equal(view.t().dequantize(), base.dequantize()[rows].t())


def test_copying_fp8_into_part_of_zeros_keeps_the_bytes_and_the_scale():
    for block in BLOCKS.values():
        x = make((12, 20), block)
        padded = x.new_zeros((16, 20))
        assert isinstance(padded, Float8Tensor)
        padded.narrow(0, 0, 12).copy_(x)
        assert torch.equal(padded[:12].dequantize(), x.dequantize())
        assert torch.equal(padded[:12].qdata.view(torch.uint8), x.qdata.view(torch.uint8))


def test_assignment_by_index_writes_only_the_blocks_of_its_index():
    x = make((16, 16), (8, 8))
    mask = torch.zeros(16, 16, dtype=torch.bool)
    mask[0, 0] = True
    for index in (mask, (0, 0), (torch.tensor([0]), torch.tensor([0]))):
        t = x.clone()
        t[index] = 1000.0
        assert torch.equal(t.dequantize()[8:], x.dequantize()[8:])
        assert torch.equal(t.dequantize()[:, 8:], x.dequantize()[:, 8:])
        assert t.dequantize()[0, 0] == pytest.approx(1000.0)


def test_view_that_lost_its_base_refuses_writes():
    view = make((8, 8), (-1, -1))[2:4]
    names, context = view.__tensor_flatten__()
    inner = {name: getattr(view, name) for name in names}
    lost = Float8Tensor.__tensor_unflatten__(inner, context, view.shape, view.stride())
    assert torch.equal(lost.dequantize(), view.dequantize())
    for t in (lost, lost.t(), lost[0]):
        with pytest.raises(RuntimeError, match="has lost its base"):
            t.mul_(2)
    lost.clone().mul_(2)


def test_expanded_views_refuse_writes_as_torch_does():
    t = make((1, 8), (1, -1)).expand(3, 8)
    with pytest.raises(RuntimeError, match="more than one element"):
        t.mul_(2)


@pytest.mark.parametrize(
    ("old", "new", "block", "expected"),
    [
        ((6, 8), (2, 3, 8), (1, -1), (1, 1, -1)), ((2, 3, 8), (6, 8), (1, 1, 4), (1, 4)),
        ((256, 256), (64, 4, 256), (128, 128), (32, -1, 128)),
        ((64, 4, 256), (256, 256), (32, -1, 128), (128, 128)), ((4, 6), (24,), (1, -1), (6,)),
        ((24,), (4, 6), (6,), (1, -1)), ((4, 8), (4, 2, 4), (1, 4), (1, 1, -1)),
        ((1, 8), (8,), (1, -1), (-1,)),
    ],
)  # fmt: skip
def test_views_that_cut_no_block_have_blocks_in_both_directions(old, new, block, expected):
    assert block_of_view(old, new, block) == (expected, block)


@each_block
def test_as_strided_takes_slices_and_permutations_only(block):
    t = make((12, 20), block)
    p = t.dequantize()
    for args in (
        ((12, 20), (20, 1)), ((20, 12), (1, 20)), ((4, 20), (20, 1), 40), ((5, 7), (20, 1), 45),
        ((7, 5), (1, 20), 45), ((240,), (1,)), ((6, 2, 20), (40, 20, 1)), ((30,), (1,), 15),
        ((12,), (21,)),
    ):  # fmt: skip
        result = t.as_strided(*args)
        assert isinstance(result, Float8Tensor)
        assert torch.equal(result.dequantize(), p.as_strided(*args))
    with pytest.raises(NotImplementedError, match="as_strided must mean slices"):
        t.t().as_strided((3, 3), (5, 2))


UNSUPPORTED = {
    "view-dtype": lambda t: t.view(torch.uint8), "view-fp8": lambda t: t.view(torch.float8_e4m3fn),
    "t_": lambda t: t.t_(), "unsqueeze_": lambda t: t.unsqueeze_(0),
    "set_": lambda t: t.set_(torch.ones(2)), "resize_": lambda t: t.resize_(3),
    "resize_as_": lambda t: t.resize_as_(torch.ones(2)),
}  # fmt: skip


@pytest.mark.parametrize("call", UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_unsupported_methods_raise_with_the_reason(call):
    with pytest.raises(NotImplementedError, match=r"must (not|keep)"):
        call(make((4, 4), (1, -1)))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized:UserWarning")
@pytest.mark.parametrize("shape", [(), (1,), (0,)], ids=str)
def test_result_of_another_size_raises_and_writes_nothing(shape):
    """Torch resizes a plain tensor; some in-place ops do so, too."""
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    x, y = quantize(torch.zeros(shape)), quantize(torch.zeros(3, 4))
    with float8lab.fallback("silent"):
        calls = [lambda: torch.mm(a[0], b[0], out=x), lambda: torch.aminmax(a, dim=0, out=(y, x))]
        if x.numel():
            calls.append(lambda: x.addbmm_(a, b))
        for call in calls:
            with pytest.raises(NotImplementedError, match=r"must keep the size of a Float8Tensor"):
                call()
    assert (x.shape, y.shape) == (shape, (3, 4))
    assert not torch.cat([x.dequantize().view(-1), y.dequantize().view(-1)]).any()


def test_out_argument_of_composite_functions_is_written():
    x = quantize(torch.eye(4) * 2)
    for function in (torch.cholesky_inverse, torch.linalg.pinv):
        out = quantize(torch.zeros(4, 4))
        with float8lab.fallback("silent"):
            function(x, out=out)
        assert torch.equal(out.dequantize(), quantize(function(x.dequantize())).dequantize())
    out = quantize(torch.zeros(4, 4))
    with float8lab.fallback("silent"):
        torch._C._nn.linear(x, x, out=out)
    assert torch.equal(out.dequantize(), torch.eye(4) * 4)


def differentiated_twice(function):
    x = quantize(torch.randn(2, 2, 8, 4)).requires_grad_()
    return torch.autograd.grad(function(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: torch.view_as_complex(x.view(16, 2)), r"another dtype.* Call \.dequantize\(\)"),
        (lambda x: torch.func.grad(lambda t: quantize(t).sum())(x.dequantize()), r"torch\.func .*"),
        (lambda x: torch.vmap(quantize)(x.dequantize()), r"torch\.func .* \.dequantize\(\)"),
        (lambda x: differentiated_twice(lambda t: F.rms_norm(t, (4,))), "differentiated again"),
        (
            lambda x: differentiated_twice(lambda t: F.scaled_dot_product_attention(t, t, t)),
            r"differentiated again.* \.dequantize\(\)",
        ),
    ],
    ids=["view_as_complex", "func.grad", "vmap", "rms_norm twice", "attention twice"],
)
def test_functions_that_fp8_cannot_run_raise_with_an_alternative(call, message):
    with pytest.raises(NotImplementedError, match=message):
        call(quantize(torch.randn(4, 8)))


@pytest.mark.parametrize("block", [(2, 2), (-1, -1)], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cat([x, x], 2), lambda x: torch.stack([x, x], 4), lambda x: x.repeat(2),
        lambda x: torch.cat([x, x[:, :0], x[:3, :0]], 1), lambda x: x[torch.tensor([-5])],
        lambda x: x.index_select(0, torch.tensor([-1])), lambda x: x[torch.ones(3).bool()],
        lambda x: x[0, 0].index_select(0, torch.tensor([0, 0])), lambda x: x[0, 0].squeeze(2),
        lambda x: F.embedding(torch.tensor([-1]), x), lambda x: F.layer_norm(x[0], (8, 1)),
        lambda x: F.layer_norm(x, (8,), torch.ones(2, 4)), lambda x: torch.bmm(x, x.mT),
        lambda x: torch.mv(x[None], x[0]), lambda x: torch.ops.aten.slice(x, 2, 0, 1),
    ],
)  # fmt: skip
def test_calls_that_torch_refuses_raise(call, block):
    x = quantize(torch.randn(4, 8), block=block)
    with float8lab.fallback("silent"):
        for tensor in (x.dequantize(), x):
            with pytest.raises((IndexError, RuntimeError)):
                call(tensor)


MULTI_STEP_FUNCTIONS = {
    "hinge_embedding_loss": lambda x, v: F.hinge_embedding_loss(x, -torch.ones(8, 8), margin=0.3),
    "lerp": lambda x, v: torch.lerp(v, 2 * v, x), "addcdiv": lambda x, v: torch.addcdiv(v, v, x),
    "vector_norm": lambda x, v: torch.linalg.vector_norm(x, 3.5, dim=1),
    "rrelu": lambda x, v: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x, v: F.gumbel_softmax(x),
    "circular pad": lambda x, v: F.pad(x[None, None], (3, 1, 0, 2), mode="circular"),
    "cholesky_solve": lambda x, v: torch.cholesky_solve(v, x),
    "cholesky_inverse": lambda x, v: torch.cholesky_inverse(x),
    "lstsq": lambda x, v: torch.linalg.lstsq(x, v).solution,
    "pinv": lambda x, v: torch.linalg.pinv(x),
}  # fmt: skip


@pytest.mark.parametrize("function", MULTI_STEP_FUNCTIONS.values(), ids=MULTI_STEP_FUNCTIONS)
@pytest.mark.filterwarnings("ignore:aten.*has no FP8 implementation")
def test_multi_step_functions_are_not_rounded_between_steps(function):
    x, v = quantize(torch.randn(8, 8).tril() + 3 * torch.eye(8)), torch.randn(8, 8)
    results = []
    for t in (x, x.dequantize()):
        t, w = t.detach().requires_grad_(), v.clone().requires_grad_()
        with float8lab.fallback("warn"):
            torch.default_generator.manual_seed(1)
            y = function(t, w)
            dy = torch.arange(y.numel()).view(y.shape) - 7.0
            results.append((y, *torch.autograd.grad(y, (t, w), dy, allow_unused=True)))
    for got, want in zip(*results, strict=True):
        assert type(got) is type(want)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


JOINS = {
    "cat": lambda x, y: torch.cat([x, y]), "cat-1": lambda x, y: torch.cat([x, y], 1),
    "cat-uneven": lambda x, y: torch.cat([x[:5], y, x[3:7]]),
    "cat-empty": lambda x, y: torch.cat([x[:0], y]), "stack": lambda x, y: torch.stack([x, y]),
    "stack-last": lambda x, y: torch.stack([x, y], -1),
    "index": lambda x, y: x[torch.tensor([[3, -1], [0, 3]])],
    "index-column": lambda x, y: x[:, torch.tensor([3, 11])],
    "index-mask": lambda x, y: x[torch.arange(12) % 2 == 0],
    "index_select": lambda x, y: x.index_select(1, torch.tensor([3, 19])),
    "embedding": lambda x, y: F.embedding(torch.tensor([[1, 2, 9]]), x),
    "flip": lambda x, y: x.flip(0, 1), "flip-scalar": lambda x, y: x[0, 0].flip(0),
    "roll": lambda x, y: x.roll((3, 8), (0, 1)), "roll-twice": lambda x, y: x.roll((4, 5), (1, -1)),
    "repeat": lambda x, y: x.repeat(2, 2, 3), "neg": lambda x, y: -x,
    "clone": lambda x, y: x.t().clone(memory_format=torch.contiguous_format),
    "contiguous": lambda x, y: x.t().contiguous(),
    "to": lambda x, y: x.to(torch.float32, copy=True),
}  # fmt: skip


@each_block
def test_new_tensors_keep_every_value_and_share_nothing(block):
    for name, op in JOINS.items():
        x, y = make((12, 20), block), make((12, 20), block, seed=1)
        before = x.dequantize(), y.dequantize()
        result = op(x, y)
        assert isinstance(result, Float8Tensor), name
        check_spec(result, x, name)
        assert torch.equal(result.dequantize(), op(*before)), name
        result.mul_(1000)
        assert torch.equal(x.dequantize(), before[0]), name
        assert torch.equal(y.dequantize(), before[1]), name


def test_tensors_of_other_formats_are_not_joined_in_fp8():
    x = make((4, 4), (1, -1))
    for operand in (quantize(torch.ones(4, 4), torch.float8_e5m2), torch.ones(4, 4), x.bfloat16()):
        with pytest.raises(NotImplementedError, match=r"aten\.cat"):
            torch.cat([x, operand])


@each_block
def test_like_functions_return_fp8_or_plain_tensors(block):
    t = make((12, 20), block)
    for result in (torch.empty_like(t), t.new_empty(3, 4), t.new_zeros((2, 3, 4))):
        assert isinstance(result, Float8Tensor)
        check_spec(result, t, "")
    assert not t.new_zeros(3, 4).dequantize().any()
    for plain in (torch.zeros_like(t), torch.ones_like(t), t.new_full((2,), 3.0)):
        assert type(plain) is torch.Tensor
        assert plain.dtype == t.dtype
    assert torch.empty_like(t, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert type(torch.empty_like(t, dtype=torch.int8)) is torch.Tensor
    assert torch.empty_like(t, device="meta").device.type == "meta"


@pytest.mark.gpu
@each_block
def test_values_survive_a_move_to_the_gpu_and_back(block):
    t = make((12, 20), block)
    pinned = t.pin_memory()
    assert pinned.is_pinned()
    gpu_tensor = pinned.to("cuda", non_blocking=True)
    gpu_tensor.record_stream(torch.cuda.current_stream())
    assert gpu_tensor.scale.is_cuda
    assert torch.equal(gpu_tensor.cpu().dequantize(), t.dequantize())


def test_optimizers_have_plain_state():
    p = nn.Parameter(make((8, 8), (1, -1)))
    p.grad = torch.ones(8, 8)
    optimizer = torch.optim.AdamW([p])
    optimizer.step()
    assert all(type(s) is torch.Tensor for s in optimizer.state[p].values())


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (4, -1), (1, 128), (1, 32)], ids=str)
def test_batched_matmuls_are_near_those_of_dequantized_tensors(block):
    spec = Float8Spec(block=block).expand(3)
    rule = "e8m0" if block == (1, 32) else "fp32"
    a = quantize(torch.randn(3, 8, 160), block=spec.block, scale_rule=rule)
    b = quantize(torch.randn(3, 12, 160), block=spec.block, scale_rule=rule)
    expected = a.dequantize() @ b.dequantize().mT
    bias = torch.randn(3, 8, 12)
    for y in (torch.bmm(a, b.mT), a @ b.mT):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-3)
    added = torch.baddbmm(bias, a, b.mT, beta=0.5, alpha=2)
    torch.testing.assert_close(added, bias * 0.5 + expected * 2, rtol=1e-4, atol=1e-3)
    vector = quantize(torch.randn(160), block=spec.block[-1:], scale_rule=rule)
    y = a[0].mv(vector)
    torch.testing.assert_close(y, a[0].dequantize() @ vector.dequantize(), rtol=1e-4, atol=1e-3)


def test_matmuls_of_an_empty_batch_are_empty():
    a, b = quantize(torch.randn(0, 8, 16)), quantize(torch.randn(0, 16, 4))
    assert torch.bmm(a, b).shape == (0, 8, 4)
    assert torch.bmm(a, torch.randn(0, 16, 4)).shape == (0, 8, 4)


GROUPED = [(-1, -1, -1), (1, -1, -1), (1, 1, -1), (1, 128, 128), (1, 1, 32)]


@pytest.mark.parametrize("block", GROUPED, ids=str)
@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "high-precision"])
def test_grouped_matmuls_are_near_those_of_dequantized_tensors(block, quantized):
    """Each expert's rows by its matrix, which is given transposed; rows beyond them are zeros.

    A Float8Tensor has one scale for all experts.
    """
    offs = torch.tensor([10, 10, 40], dtype=torch.int32)
    rule = "e8m0" if block[2] == 32 else "fp32"
    x, w = torch.randn(50, 160), quantize(torch.randn(3, 48, 160), block=block, scale_rule=rule)
    rows = (1, *block[2:]) if block[2] != -1 or block[1] == 1 else (-1, -1)
    quantized_x = quantize(x, block=rows, scale_rule=rule)
    y = torch._grouped_mm(quantized_x if quantized else x, w.mT, offs=offs)
    assert type(y) is torch.Tensor
    assert not y[40:].any()
    if not quantized and rows == (-1, -1):  # the rows of each expert have a scale
        quantized_x = torch.cat(
            [quantize(expert_rows).dequantize() for expert_rows in (x[:10], x[10:40])]
        )
    else:
        quantized_x = quantized_x.dequantize()
    for start, end, expert_weight in ((0, 10, w[0]), (10, 40, w[1:].chunk(2)[1][0])):
        assert isinstance(expert_weight, Float8Tensor)
        expected = quantized_x[start:end] @ expert_weight.dequantize().t()
        torch.testing.assert_close(y[start:end], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("block", [(-1, -1), (1, -1, -1), (1, 1, -1), (2, 4, -1)], ids=str)
def test_gradients_of_batched_matmuls_are_near_those_of_dequantized_tensors(block):
    def matmuls(a, b):
        return torch.bmm(a, b.mT), a @ b.mT

    a, b = (quantize(torch.randn(3, rows, 32), block=block).requires_grad_() for rows in (8, 12))
    plain = [t.detach().dequantize().requires_grad_() for t in (a, b)]
    dy = torch.randn(3, 8, 12)
    with float8lab.fallback("silent"):  # no FP8 GEMM takes scales that change along the contraction
        for y, exact in zip(matmuls(a, b), matmuls(*plain), strict=True):
            torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-3)
            got = torch.autograd.grad(y, (a, b), dy)
            for g, want in zip(got, torch.autograd.grad(exact, plain, dy), strict=True):
                # A gradient's GEMM in FP8 rounds dy to e4m3: by half of 1/16 at most.
                assert (g - want).norm() <= want.norm() / 16


def test_concatenated_per_tensor_weights_still_multiply_in_fp8():
    w = torch.cat([make((8, 32), (-1, -1)), make((8, 32), (-1, -1), seed=1)])
    x = make((4, 32), (-1, -1), seed=2)
    assert isinstance(w, Float8Tensor)
    assert w.spec.block == (8, -1)  # each keeps its scale
    with float8lab.count_gemms() as counts:
        y = F.linear(x, w)
    assert (counts.fp8, counts.high_precision) == (1, 0)
    torch.testing.assert_close(y, x.dequantize() @ w.dequantize().t(), rtol=1e-4, atol=1e-3)


INFERENCE = {
    "linear": lambda t: F.linear(t, t),
    "linear of views": lambda t: F.linear(t.view(2, 8, 16), t, torch.ones(16)),
    "matmul": lambda t: t @ t.mT, "layer_norm": lambda t: F.layer_norm(t, (16,)),
    "rms_norm": lambda t: F.rms_norm(t, (16,)),
    "attention": lambda t: F.scaled_dot_product_attention(*[t.view(1, 2, 8, 16)] * 3),
    "view": lambda t: t.t().reshape(4, 64)[1:3].detach(),
    "chunk": lambda t: torch.cat(t.chunk(3)[:2]),
}  # fmt: skip


@pytest.mark.parametrize("call", INFERENCE.values(), ids=INFERENCE.keys())
def test_inference_mode_changes_no_result(call):
    """Torch does not split composite ops in inference mode."""
    t = make((16, 16), (-1, -1))
    expected = call(t)
    with torch.inference_mode():
        result, parameter_result = call(t), call(nn.Parameter(t, requires_grad=False))
        result_of_new_tensor = call(make((16, 16), (-1, -1)))
    for y in (result, parameter_result, result_of_new_tensor):
        assert type(y) is type(expected)
        y, e = (x.dequantize() if isinstance(x, Float8Tensor) else x for x in (y, expected))
        assert torch.equal(y, e)


def test_view_made_in_inference_mode_writes_through():
    t = make((16, 16), (8, 8))
    with torch.inference_mode():
        t[3:5].zero_()
    assert not t.dequantize()[3:5].any()
    assert t.dequantize()[5:].any()


class _Outer(torch.Tensor):
    """Wraps another tensor, as DTensor does."""

    called_ops = []  # noqa: RUF012  # the record of the test

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        args = [a.inner if isinstance(a, _Outer) else a for a in args]
        cls.called_ops.append(op)
        return op(*args, **(kwargs or {}))


def test_wrapper_subclass_dispatches_before_float8tensor():
    t = make((4, 4), (1, -1))
    for args in ((t, _Outer(t)), (_Outer(t), t)):
        _Outer.called_ops.clear()
        assert torch.eq(*args).all()
        assert _Outer.called_ops == [aten.eq.Tensor]


class _Tagged(torch.Tensor):
    """A subclass without methods of its own."""


class _Asking(torch.Tensor):
    """A subclass with a ``__torch_function__`` of its own."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return "mine"


def test_subclasses_beside_a_float8tensor_keep_their_torch_function():
    t, x = make((4, 16), (1, -1)), torch.randn(3, 16)
    expected = F.linear(x, t)
    assert torch.equal(F.linear(x.as_subclass(_Tagged), t).as_subclass(torch.Tensor), expected)
    for args in ((x.as_subclass(_Asking), t), (t, x.as_subclass(_Asking))):
        assert F.linear(*args) == "mine"


@pytest.mark.parametrize("group_ends", [[4, 12], [4, 4, 4, 12]], ids=["fewer", "more"])
def test_fewer_or_more_groups_than_experts_raise(group_ends):
    x, w = torch.randn(12, 32), quantize(torch.randn(3, 64, 32), block=(1, -1, -1))
    offs = torch.tensor(group_ends, dtype=torch.int32)
    with float8lab.fallback("silent"), pytest.raises(RuntimeError, match="batch sizes have to"):
        torch._grouped_mm(x, w.mT, offs=offs)


def test_groups_may_begin_anywhere_in_blocks_of_rows():
    """A 128x128 block of tokens has rows of several experts, and an expert has rows in two."""
    offs = torch.tensor([1, 5, 200], dtype=torch.int32)
    x = quantize(torch.randn(200, 256) * torch.logspace(-1, 1, 200)[:, None], block=(128, 128))
    w = quantize(torch.randn(3, 48, 256), block=(1, 128, 128))
    with float8lab.fallback("error"):
        results = [torch._grouped_mm(x, y, offs=offs) for y in (w.mT, torch.randn(3, 256, 48))]
    x, w, starts = x.dequantize().double(), w.dequantize().double(), (0, *offs)
    want = torch.cat([x[a:b] @ e.t() for a, b, e in zip(starts, offs, w, strict=False)])
    errors = (results[0] - want).norm(dim=1)
    assert bool((errors <= 1e-5 * want.norm(dim=1)).all())
    assert results[1].isfinite().all()


@pytest.mark.parametrize("block", GROUPED, ids=str)
def test_torch_autocast_does_not_change_how_a_batch_is_quantized(block):
    w = torch.randn(3, 48, 160)
    with torch.autocast("cpu", torch.bfloat16):
        t = quantize(w, block=block)
    assert torch.equal(t.qdata.view(torch.uint8), quantize(w, block=block).qdata.view(torch.uint8))


def test_linear_in_one_op_equals_the_linear_that_torch_splits():
    x, w, b = make((8, 16), (1, -1)), make((4, 16), (-1, -1), 1), torch.randn(4)
    for bias in (None, b):
        fused = F.linear(x, w, bias)
        decomposed = F.linear(x.detach().requires_grad_(), w, bias)
        assert decomposed.requires_grad
        assert torch.equal(fused, decomposed)
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, w, bias).dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        F.linear(x, w[:, :8])


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (4, 4)], ids=str)
def test_compiled_handlers_equal_eager_ones(block):
    def function(t, x):
        t[2:7].mul_(2)
        rows = torch.cat([t[1:5], t.view(2, 8, 16)[0]])
        return t.t(), t[3:6], rows, F.linear(x, t), t.to(torch.bfloat16)

    x = torch.randn(4, 16)
    eager_t, t = make((16, 16), block), make((16, 16), block)
    with float8lab.fallback("silent"):
        expected = function(eager_t, x)
        actual = torch.compile(function, backend="aot_eager", fullgraph=True)(t, x)
    for a, e in zip((t, *actual), (eager_t, *expected), strict=True):
        assert type(a) is type(e)
        a, e = (y.dequantize() if isinstance(y, Float8Tensor) else y for y in (a, e))
        torch.testing.assert_close(a, e)


def test_vmap_and_grad_equal_those_of_dequantized_tensors():
    t = make((4, 8), (1, -1))
    with float8lab.fallback("silent"):
        assert torch.equal(torch.vmap(torch.sin)(t), t.dequantize().sin())
        assert torch.equal(torch.func.grad(lambda x: (x * x).sum())(t), 2 * t.dequantize())


@each_block
def test_pickle_save_and_deepcopy_keep_bytes_and_attributes(block):
    p = nn.Parameter(make((12, 20), block).to(torch.bfloat16))
    p.note = "kept"
    loaded = saved_and_loaded({"p": p, "tied": p}, weights_only=True)
    assert loaded["p"] is loaded["tied"]
    for copied in (loaded["p"], pickle.loads(pickle.dumps(p)), copy.deepcopy(p), copy.copy(p)):
        assert isinstance(copied, nn.Parameter)
        assert (copied.note, copied.requires_grad) == ("kept", True)
        assert_same_bytes(copied, p)


def test_deep_copy_is_another_tensor_with_its_own_gradient():
    p = nn.Parameter(make((4, 4), (-1, -1)))
    p.grad = torch.ones(4, 4)
    q = copy.deepcopy(p)
    q.data.zero_()
    q.grad.zero_()
    assert p.dequantize().any()
    assert p.grad.all()
    with pytest.raises(RuntimeError, match=r"leaf tensor; .* Call \.detach\(\) first"):
        copy.deepcopy(p.t())


def test_copied_view_owns_its_blocks():
    view = make((8, 8), (-1, -1))[2:4]
    for copied in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view)):
        assert torch.equal(copied.dequantize(), view.dequantize())
        copied.fill_(100.0)
        assert view.dequantize().abs().max() < 50


def test_conversions_to_numbers_lists_and_arrays():
    t = quantize(torch.tensor([[1.0, -448.0], [2.0, 4.0]]), block=(1, -1))
    assert t.tolist() == [[1.0, -448.0], [2.0, 4.0]]
    assert t[0, 0].item() == float(t[0, 0]) == 1.0
    assert f"{t[1, 1]:.2f}" == "4.00"
    assert torch.equal(torch.tensor([t[0, 0], t[1, 1], 0.5]), torch.tensor([1.0, 4.0, 0.5]))
    assert len(t) == 2
    assert [row.tolist() for row in t] == t.tolist()
    assert bool(t[0, 0])
    assert np.array_equal(np.asarray(t), t.dequantize().numpy())
    assert np.asarray(t.to(torch.bfloat16)).dtype == np.float32
    assert np.array_equal(t.numpy(force=True), np.asarray(t))
    with pytest.raises(TypeError, match=r"Call \.dequantize\(\)\.numpy\(\)"):
        t.numpy()
    with pytest.raises(BufferError, match=r"Export \.dequantize"):
        t.__dlpack__()
    t.apply_(lambda v: v + 1)
    assert t[0, 0].item() == pytest.approx(2.0, rel=0.07)


def test_hashes_comparisons_and_sizes():
    t = quantize(torch.tensor([[1.0, float("nan")]]))
    assert hash(t) == id(t)
    assert {t: 1}[t] == 1
    assert t.isnan().tolist() == [[False, True]]
    assert t.isinf().tolist() == [[False, False]]
    assert torch.equal(t[:, :1], torch.ones(1, 1))
    assert torch.allclose(t[:, :1], torch.ones(1, 1))
    assert (t[0, 0] == 1.0).item()
    assert (t.element_size(), t.nbytes) == (4, 8)
    assert torch.equal(t.new_tensor([1, 2]), torch.tensor([1.0, 2.0]))
    assert t.new([1.0]).tolist() == [1.0]


def test_share_memory_shares_data_and_scale():
    t = make((4, 4), (1, -1))
    assert not t.is_shared()
    assert t.share_memory_() is t
    assert t.is_shared()
    assert t.scale.is_shared()


def test_data_is_shared_and_can_be_replaced():
    p = nn.Parameter(make((4, 8), (1, -1)))
    p.data.zero_()
    assert not p.detach().dequantize().any()
    p.data = make((4, 8), (-1, -1))
    assert p.spec.per_tensor
    assert p.requires_grad
    p.data = torch.ones(4, 8)
    assert torch.equal(p.detach().dequantize(), torch.ones(4, 8))
    with pytest.raises(ValueError, match="data must have shape"):
        p.data = torch.ones(3)


def test_modules_load_and_move_fp8_parameters():
    layer, plain = nn.Linear(8, 4), nn.Linear(8, 4)
    layer.weight = nn.Parameter(quantize(layer.weight.detach(), block=(1, -1)))
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, layer.weight.dequantize())
    layer.load_state_dict({k: torch.ones_like(v) for k, v in layer.state_dict().items()})
    assert isinstance(layer.weight, Float8Tensor)
    assert torch.equal(layer.weight.dequantize(), torch.ones(4, 8))
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    layer.to("meta")
    layer.to_empty(device="cpu")
    nn.init.ones_(layer.weight)
    assert torch.equal(layer.weight.dequantize(), torch.ones(4, 8).bfloat16())


def test_gradients_are_ordinary_and_hooks_run():
    p = nn.Parameter(make((4, 8), (1, -1)))
    p.register_hook(lambda grad: grad * 2)
    p.dequantize().sum().backward()
    assert type(p.grad) is torch.Tensor
    assert torch.equal(p.grad, torch.full((4, 8), 2.0))
    nn.utils.clip_grad_norm_([p], 1.0)
    vector = nn.utils.parameters_to_vector([p, p])
    assert isinstance(vector, Float8Tensor)
    assert torch.equal(vector.dequantize(), p.dequantize().view(-1).repeat(2))


def test_attention_of_block_scaled_tensors_dequantizes_inside():
    q, k, v = (make((2, 2, 8, 16), (1, 8), seed=s) for s in range(3))
    plain = [t.dequantize() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*plain, is_causal=True)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)
    expected = F.scaled_dot_product_attention(*plain, dropout_p=1.0)
    assert torch.equal(F.scaled_dot_product_attention(q, k, v, dropout_p=1.0), expected)
