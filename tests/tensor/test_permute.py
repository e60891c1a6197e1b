"""Permuting plain and FP8 tokens by expert, and back."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import float8lab
from float8lab import ops
from float8lab.formats import E5M2, HIGH_PRECISION_DTYPES
from float8lab.ops.reference import permute
from float8lab.tensor.permute import routed, scatter_rows
from tests.recorder import check_capture
from tests.same_bytes import assert_same_bytes

BLOCKS = [(-1, -1), (1, -1), (1, 128), (1, 32), (128, 128), (-1, 1)]
# Tokens, experts, experts of a token, features.
SHAPES = {
    "T9-E5-K2-H70": (9, 5, 2, 70), "T1-E1-K1-H1": (1, 1, 1, 1),
    "T300-E130-K3-H2100": (300, 130, 3, 2100), "T0-E4-K2-H8": (0, 4, 2, 8),
    "T5-E4-K0-H8": (5, 4, 0, 8), "T6-E3-K3-H0": (6, 3, 3, 0),
}  # fmt: skip

each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
each_block = pytest.mark.parametrize("block", BLOCKS, ids=lambda b: "x".join(map(str, b)))


def routing(T: int, E: int, K: int, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    """The experts of each token, as indices and as a mask; the last one gets none if possible."""
    experts = torch.rand(T, max(E - 1, K)).argsort(1)[:, :K].int().to(device)
    mask = torch.zeros(T, E, dtype=torch.bool, device=device)
    return experts, mask.scatter_(1, experts.long(), True)


def tokens_by_expert(mask: Tensor) -> Tensor:
    """The token of each row, where rows are ordered by expert."""
    return mask.t().nonzero()[:, 1]


@each_shape
def test_rows_are_ordered_by_expert_and_token(shape: tuple[int, ...], device: torch.device) -> None:
    T, E, K, H = shape
    experts, mask = routing(T, E, K, device)
    x, probs = torch.randn(T, H, device=device), torch.rand(T, E, device=device)
    tokens = tokens_by_expert(mask)
    for routing_map, map_type in ((mask, "mask"), (mask.int(), "mask"), (experts, "index")):
        for count in (-1, T * K):
            y, row_map = float8lab.moe_permute(x, routing_map, count, map_type=map_type)
            assert torch.equal(y, x[tokens])
            assert row_map.dtype == torch.int32
            back = float8lab.moe_unpermute(y, row_map, map_type=map_type)
            assert torch.equal(back, sum((x for _ in range(K)), torch.zeros_like(x)))
    row_map, rows, offsets = routed(experts, len(x), E)
    y, _ = scatter_rows(x, row_map, rows)
    assert torch.equal(y, x[tokens])
    assert torch.equal(float8lab.moe_unpermute(y, row_map), back)
    assert torch.equal(offsets, mask.sum(0).cumsum(0))
    y, permuted, _ = float8lab.moe_permute_with_probs(x, probs, mask, T * K)
    assert torch.equal(y, x[tokens])
    assert torch.equal(permuted, probs.t()[mask.t()])


@pytest.mark.parametrize(("dtype", "E"), [(torch.int8, 128), (torch.uint8, 256)], ids=str)
def test_expert_indices_may_have_8_bits(dtype: torch.dtype, E: int, device: torch.device) -> None:
    experts = torch.tensor([[0, E - 1], [E - 1, 3], [2, 0]], device=device)
    if dtype.is_signed:
        experts[0, 0] = experts[2, 1] = -1
    x = torch.randn(3, 8, device=device)
    want, row_map = float8lab.moe_permute(x, experts, map_type="index")
    y, map_of_8_bits = float8lab.moe_permute(x, experts.to(dtype), map_type="index")
    assert torch.equal(map_of_8_bits, row_map)
    assert torch.equal(y, want)
    (map_of_8_bits, _, offsets), (row_map, _, want) = (
        routed(indices, 3, E) for indices in (experts.to(dtype), experts)
    )
    assert torch.equal(map_of_8_bits, row_map)
    assert torch.equal(offsets, want)


def test_rows_beyond_the_output_are_dropped_and_unused_rows_are_zeros(device: torch.device) -> None:
    experts, mask = routing(9, 5, 2, device)
    x, probs = torch.randn(9, 70, device=device), torch.rand(9, 5, device=device)
    tokens = tokens_by_expert(mask)
    for rows in (0, 11, 40):
        filled = min(rows, 18)
        for routing_map, map_type in ((mask, "mask"), (experts, "index")):
            y, row_map = float8lab.moe_permute(x, routing_map, rows, map_type=map_type)
            assert torch.equal(y[:filled], x[tokens[:filled]])
            assert y.shape[0] == rows
            assert not y[filled:].any()
            back = float8lab.moe_unpermute(y, row_map)
            count = torch.bincount(tokens[:filled], minlength=9)
            assert torch.equal(back, x * count[:, None])
        q, permuted, _ = float8lab.moe_permute_with_probs(
            float8lab.quantize(x, block=(1, 32)), probs, mask, rows
        )
        assert not permuted[filled:].any()
        assert bool((q.scale[filled:] == 1).all())
        assert not q.amax[filled:].any()
    # A negative index is no expert.
    experts[3, 1] = -1
    y, row_map = float8lab.moe_permute(x, experts, 18, map_type="index")
    assert not y[17:].any()
    assert torch.equal(float8lab.moe_unpermute(y, row_map)[3], x[3])
    experts[3, 1] = 5  # nor is an index beyond the experts, if their number is known
    routed_map, count, offsets = routed(experts, len(x), 5)
    routed_y, _ = scatter_rows(x, routed_map, count)
    assert torch.equal(routed_y, y)
    assert int(offsets[-1]) == 17


@each_block
def test_fp8_rows_move_with_their_scales(block: tuple[int, int], device: torch.device) -> None:
    _, mask = routing(130, 7, 2, device)
    x = torch.randn(130, 300, device=device) * torch.logspace(-3, 3, 130, device=device)[:, None]
    probs = torch.rand(130, 7, device=device)
    q = float8lab.quantize(x, E5M2, block=block)
    want = q.index_select(0, tokens_by_expert(mask))
    for rows in (q, q.t().contiguous().t() if block == (-1, -1) else q):
        y, _, row_map = float8lab.moe_permute_with_probs(rows, probs, mask, 260)
        assert_same_bytes(y, want)
        back = float8lab.moe_unpermute(y, row_map)  # the sum of two equal numbers is exact
        assert torch.equal(back, 2 * q.dequantize())
        merged = [t.requires_grad_() for t in (y.detach(), y.dequantize().detach())]
        grads = []
        for t in merged:  # FP8 data and its values give equal results
            x_back = float8lab.moe_unpermute(t, row_map, probs)
            grads.append([x_back, *torch.autograd.grad(x_back.square().sum(), t)])
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    y = float8lab.quantize(x[:20], block=block).requires_grad_()
    float8lab.moe_permute(y, mask[:20], 40)[0].dequantize().sum().backward()
    assert torch.equal(y.grad, torch.full_like(x[:20], 2))
    # An FP8 gradient moves unchanged.
    leaf = torch.zeros(260, 300, device=device, requires_grad=True)
    out = float8lab.moe_unpermute(leaf, row_map)
    (grad,) = torch.autograd.grad(out, leaf, q)
    assert torch.equal(grad.dequantize(), want.dequantize())


@pytest.mark.parametrize("align", [1, 4, 16])
def test_padding_gives_each_expert_a_multiple_of_align_rows(
    align: int, device: torch.device
) -> None:
    _, mask = routing(9, 5, 2, device)
    x, probs = torch.randn(9, 70, device=device), torch.rand(9, 5, device=device)
    counts = mask.sum(0)
    for tokens in (x, float8lab.quantize(x, block=(1, 32)), float8lab.quantize(x)):
        y, permuted, row_map, pads, sizes = float8lab.moe_permute_and_pad_with_probs(
            tokens, probs, mask, counts, align
        )
        assert type(y) is type(tokens)
        assert torch.equal(sizes, (counts + align - 1) // align * align)
        assert (pads is None) == torch.equal(sizes, counts)
        plain = x if tokens is x else tokens.dequantize()
        parts = zip(y.split(sizes.tolist()), permuted.split(sizes.tolist()), strict=True)
        for expert, (rows, row_probs) in enumerate(parts):
            is_routed, count = mask[:, expert], int(counts[expert])
            values = rows if tokens is x else rows.dequantize()
            assert torch.equal(values[:count], plain[is_routed])
            assert torch.equal(row_probs[:count], probs[is_routed, expert])
            assert not values[count:].any()
            assert not row_probs[count:].any()
        options = {"restore_shape": x.shape, "pad_offsets": pads}
        assert torch.equal(float8lab.moe_unpermute(y, row_map, **options), 2 * plain)
        (grad,) = torch.autograd.grad(
            float8lab.moe_unpermute(leaf := y.detach().requires_grad_(), row_map, probs, **options),
            leaf,
            torch.ones_like(x),
        )
        assert torch.equal(grad, permuted[:, None].expand_as(grad))
    merged = float8lab.moe_unpermute(y, row_map, probs, **options)
    compact, compact_map = float8lab.moe_permute(tokens, mask)
    assert torch.equal(merged, float8lab.moe_unpermute(compact, compact_map, probs))


def test_gradients_are_those_of_finite_differences() -> None:
    experts, mask = routing(5, 4, 2)
    x, probs = (torch.rand(5, n, dtype=torch.float64, requires_grad=True) for n in (3, 4))
    sizes, order = torch.tensor([2, 0, 3]), torch.tensor([2, 0, 1])

    def by_mask(x: Tensor, probs: Tensor, rows: int) -> Tensor:
        y, permuted, row_map = float8lab.moe_permute_with_probs(x, probs, mask, rows)
        return float8lab.moe_unpermute(y * permuted[:, None], row_map, probs)

    def padded(x: Tensor, probs: Tensor) -> Tensor:
        y, permuted, row_map, pads, _ = float8lab.moe_permute_and_pad_with_probs(
            x, probs, mask, mask.sum(0), 4
        )
        options = {"restore_shape": x.shape, "pad_offsets": pads}
        return float8lab.moe_unpermute(y.sin() * permuted[:, None], row_map, probs, **options)

    def by_index(x: Tensor, probs: Tensor) -> Tensor:
        y, row_map = float8lab.moe_permute(x, experts, map_type="index")
        return float8lab.moe_unpermute(y.sin(), row_map, probs, map_type="index")

    def sorted_chunks(x: Tensor, probs: Tensor) -> Any:
        return float8lab.moe_sort_chunks_by_index_with_probs(x, probs[:, 0], sizes, order)

    for rows in (10, 7, 12):
        assert torch.autograd.gradcheck(by_mask, (x, probs, rows))
    assert torch.autograd.gradcheck(by_index, (x, probs[:, :2].detach().requires_grad_()))
    assert torch.autograd.gradcheck(padded, (x, probs))
    assert torch.autograd.gradcheck(sorted_chunks, (x, probs))
    rows, permuted, _ = float8lab.moe_permute_with_probs(
        float8lab.quantize(x.float()), probs, mask, 10
    )
    (grad,) = torch.autograd.grad(permuted.sum(), probs)  # an unused output has no gradient
    assert torch.equal(grad, mask.double())


def test_chunks_are_sorted_by_index(device: torch.device) -> None:
    x, probs = torch.randn(20, 70, device=device), torch.rand(20, device=device)
    q = float8lab.quantize(x, block=(1, 32))
    for sizes, order in (
        ([3, 0, 7, 10], [2, 3, 1, 0]), ([20], [0]), ([5, 5], [1, 0]), ([], []), ([0, 20], [1, 0]),
    ):  # fmt: skip
        indices = [torch.tensor(n, dtype=torch.int32, device=device) for n in (sizes, order)]
        used = sum(sizes)
        chunks = x[:used].split(sizes) if sizes else ()
        want = torch.cat([*(chunks[i] for i in order), x.new_zeros(20 - used, 70)])
        assert torch.equal(float8lab.moe_sort_chunks_by_index(x, *indices), want)
        y, permuted = float8lab.moe_sort_chunks_by_index_with_probs(q, probs, *indices)
        expected_q = torch.cat([*(q[:used].split(sizes)[i] for i in order)]) if sizes else q[:0]
        assert torch.equal(y.dequantize()[:used], expected_q.dequantize())
        expected_probs = (
            torch.cat([probs[:used, None].split(sizes)[i] for i in order]) if sizes else probs[:0]
        )
        assert torch.equal(permuted[:used], expected_probs.flatten())


def test_one_compiled_graph_serves_any_number_of_tokens(device: torch.device) -> None:
    def layer(x: Tensor, probs: Tensor, mask: Tensor) -> Tensor:
        rows = 2 * x.shape[0]
        y, permuted, row_map = float8lab.moe_permute_with_probs(x, probs, mask, rows)
        return float8lab.moe_unpermute(y.sin() * permuted[:, None], row_map)

    count = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=count, fullgraph=True, dynamic=True)
    for tokens in (9, 10, 33):
        _, mask = routing(tokens, 5, 2, device)
        x = torch.randn(tokens, 70, device=device)
        results = []
        for run in (layer, compiled):
            leaves = [t.clone().requires_grad_() for t in (x, x[:, :5])]
            y = run(*leaves, mask)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
        torch.testing.assert_close(*results, rtol=0, atol=0)
    assert count.frame_count == 1


def test_boolean_index_map_and_padded_rows_without_a_shape_raise() -> None:
    x, mask = torch.ones(4, 8), torch.ones(4, 3, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"^routing_map must "):
        float8lab.moe_permute(x, mask, map_type="index")
    with pytest.raises(ValueError, match=r"^restore_shape must "):
        float8lab.moe_unpermute(*float8lab.moe_permute(x, mask), pad_offsets=mask[0].int())


# On a GPU: the bits of the reference, without waiting.


@pytest.mark.gpu
@each_shape
def test_kernels_give_the_bits_of_the_reference(shape: tuple[int, ...]) -> None:
    T, E, K, H = shape
    dtype = HIGH_PRECISION_DTYPES[(T + K) % 3]
    _, mask = routing(T, E, K)
    x, probs = torch.randn(T, H).to(dtype), torch.rand(T, E)
    scale = torch.rand(T, 3)
    _, row_map = float8lab.moe_permute(x, mask, T * K)
    rows, row_probs = torch.randn(T * K + 5, H).to(dtype), torch.rand(T * K + 5)
    R = T * K + 5
    in_fp8 = (rows.to(E5M2), row_map, dtype, probs, None, torch.rand(17, R).t(), 128)
    calls: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (ops.scatter_rows_op, permute.scatter_rows, (x, row_map, R, probs, None, scale, scale)),
        (ops.scatter_rows_op, permute.scatter_rows, (x, row_map, R, probs, rows)),
        (ops.gather_rows_op, permute.gather_rows, (rows, row_map, dtype, probs, row_probs)),
        (ops.gather_rows_op, permute.gather_rows, (rows.t().contiguous().t(), row_map, dtype)),
        (ops.gather_rows_op, permute.gather_rows, in_fp8),
    ]
    absolute = (x.double().abs(), row_map, R, probs.double(), rows.double().abs())
    bound = H * torch.finfo(torch.float32).eps * permute.scatter_rows(*absolute)[1]
    for op, reference, arguments in calls:
        gpu_arguments = [a.cuda() if isinstance(a, Tensor) else a for a in arguments]
        expected = reference(*arguments)
        for _ in range(3):  # plain, recorded and repeated calls
            for index, (got, want) in enumerate(zip(op(*gpu_arguments), expected, strict=True)):
                if want is None:
                    assert got is None
                elif index == 1 and arguments[-1] is rows:  # sums in another order
                    assert bool(((got.cpu() - want).abs() <= bound).all())
                else:
                    assert torch.equal(got.cpu(), want)


@pytest.mark.gpu
def test_permutation_runs_without_waiting_and_in_a_cuda_graph(uncollected: None) -> None:
    experts, mask = routing(64, 8, 2, "cuda")
    x, probs = torch.randn(64, 256, device="cuda"), torch.rand(64, 8, device="cuda")
    q = float8lab.quantize(x, block=(1, 128))
    sizes, order = torch.tensor([30, 34]).cuda(), torch.tensor([1, 0]).cuda()

    def run() -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y, permuted, row_map = float8lab.moe_permute_with_probs(leaf, probs, mask, 140)
        out = float8lab.moe_unpermute(y * permuted[:, None], row_map, probs)
        out.square().sum().backward()
        z, index_map = float8lab.moe_permute(q, experts, 128, map_type="index")
        z = float8lab.moe_unpermute(z, index_map)
        return [out.detach(), leaf.grad, z, float8lab.moe_sort_chunks_by_index(x, sizes, order)]

    check_capture(run)
