"""Collectives on Float8Tensors: data that moves keeps its values, and sums are of values."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

import float8lab
from float8lab.tensor import Float8Tensor, collectives, quantize
from float8lab.tensor.window import Window
from tests.distributed.ranks import Ranks, each_check, on_ranks
from tests.same_bytes import assert_same_bytes


def _renamed(module: Any, new: str, old: str) -> Callable[..., Any]:
    """Return a function under its name since torch 2.13, where the old name warns, or before."""
    function: Callable[..., Any] = getattr(module, new if hasattr(module, new) else old)
    return function


_all_gather = _renamed(dist, "all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")
_gather_many = _renamed(
    functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
)
_scatter_sum = _renamed(functional, "reduce_scatter_single", "reduce_scatter_tensor")

BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 16), (4, 16), (1, 128), (128, 128), (1, 32))
"""A block of each layout of ``quantize``, which stores the scales of some column by column."""


def tensor_of_rank(rank: int, device: torch.device, block: Any, rows: int = 8) -> Float8Tensor:
    """A tensor of several blocks per row, whose scales differ from those of other ranks."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rows, 160 if block[1] > 16 else 40, generator=generator) * (1 + rank)
    return quantize(values.to(device), block=block, scale_rule=rule_of(block))


def rule_of(block: Any) -> str:
    """The scale rule, which is that of MX for blocks of 1x32."""
    return "e8m0" if block[1] == 32 else "fp32"


def empty(x: Float8Tensor, rows: int | None = None) -> Float8Tensor:
    shape = (x.shape[0] if rows is None else rows, *x.shape[1:])
    zeros = torch.zeros(shape, device=x.device)
    return quantize(zeros, block=x.spec.block, scale_rule=x.spec.scale_rule)


def assert_joined(out: Tensor, shards: list[Float8Tensor]) -> None:
    """Assert the bytes of ``shards`` where ``out`` has their blocks, else those of one cast."""
    values = torch.cat([shard.dequantize() for shard in shards])
    assert isinstance(out, Float8Tensor)
    if out.spec.block[0] == -1 or shards[0].shape[0] % out.spec.block[0]:
        assert_close_to_cast(out, values)
    else:
        assert torch.equal(out.dequantize(), values)


def assert_close_to_cast(out: Float8Tensor, values: Tensor) -> None:
    expected = quantize(values, block=out.spec.block, scale_rule=out.spec.scale_rule)
    assert_same_bytes(out, expected, amax=False)


def check_collectives_of_lists_keep_the_bytes(ranks: Ranks) -> None:
    sizes = {"equal": [8] * ranks.world, "uneven": [5, 0, 3, 8][: ranks.world]}
    for block in BLOCKS:
        for rows in [*sizes.values()][block != BLOCKS[0] :]:  # equal sizes in one layout only
            tensors = [tensor_of_rank(r, ranks.device, block, n) for r, n in enumerate(rows)]
            local, root = tensors[ranks.rank], ranks.world - 1
            at_root = ranks.rank == root

            out = [empty(x) for x in tensors]
            dist.all_gather(out, local)
            for got, x in zip(out, tensors, strict=True):
                assert_same_bytes(got, x)

            out = [empty(x) for x in tensors]
            dist.gather(local, out if at_root else None, dst=root)
            for got, x in zip(out, tensors if at_root else map(empty, tensors), strict=True):
                assert_same_bytes(got, x)

            got = empty(local)
            dist.scatter(got, tensors if at_root else None, src=root)
            assert_same_bytes(got, local)

            sent = [
                tensor_of_rank(10 * ranks.rank + r, ranks.device, block, rows[r])
                for r in range(ranks.world)
            ]
            received = [
                tensor_of_rank(10 * r + ranks.rank, ranks.device, block, rows[ranks.rank])
                for r in range(ranks.world)
            ]
            out = [empty(x) for x in received]
            dist.all_to_all(out, sent)
            for got, x in zip(out, received, strict=True):
                assert_same_bytes(got, x)

            got = local if at_root else empty(tensors[root])
            dist.broadcast(got, root)
            assert_same_bytes(got, tensors[root])


def check_collectives_of_one_tensor_keep_the_values(ranks: Ranks) -> None:
    world = ranks.world
    for block in BLOCKS:
        tensors = [tensor_of_rank(r, ranks.device, block) for r in range(world)]
        local = tensors[ranks.rank]
        out = empty(local, 8 * world)
        _all_gather(out, local)
        assert_joined(out, tensors)
        if block[0] != -1 and local.shape[0] % block[0] == 0:
            assert torch.equal(out.scale, torch.cat([x.scale for x in tensors]))

        # Ranks with equal scales keep them.
        shared = tensor_of_rank(0, ranks.device, block)
        _all_gather(out, shared)
        assert torch.equal(out.dequantize(), torch.cat([shared.dequantize()] * world))

        zeros = torch.zeros(world, *local.shape, device=ranks.device)
        stacked = quantize(zeros, block=block, scale_rule=rule_of(block))
        _all_gather(stacked, local)
        if block[0] != -1 and local.shape[0] % block[0] == 0:
            assert torch.equal(stacked.dequantize(), torch.stack([x.dequantize() for x in tensors]))

        out = empty(local)
        dist.all_to_all_single(out, local)
        assert_joined(out, [x.chunk(world)[ranks.rank] for x in tensors])

        # Rank r sends r + p rows to rank p, and so none from rank 0 to itself.
        starts = [sum(ranks.rank + q for q in range(p)) for p in range(world + 1)]
        source = tensor_of_rank(ranks.rank, ranks.device, block, starts[-1])
        splits = [ranks.rank + p for p in range(world)]
        out = empty(source)
        dist.all_to_all_single(out, source, splits, splits)
        pieces = []
        for r in range(world):
            x = tensor_of_rank(r, ranks.device, block, sum(r + p for p in range(world)))
            first = sum(r + p for p in range(ranks.rank))
            pieces.append(x[first : first + r + ranks.rank])
        values = torch.cat([piece.dequantize() for piece in pieces])
        if block[0] == 1 or sum(piece.shape[0] > 0 for piece in pieces) == 1:
            assert torch.equal(out.dequantize(), values)  # no scales of two ranks meet
        elif block[0] == -1:
            assert_close_to_cast(out, values)
        else:
            step = out.scale.max() * 448 / 16
            assert (out.dequantize() - values).abs().max() <= step


def check_broadcast_writes_through_views(ranks: Ranks) -> None:
    source = tensor_of_rank(0, ranks.device, (-1, -1), 4)
    base = tensor_of_rank(1, ranks.device, (-1, -1))
    before = base.dequantize()
    dist.broadcast(source if ranks.rank == 0 else base[2:6], 0)
    if ranks.rank:
        values = before.clone()
        values[2:6] = source.dequantize()
        assert_close_to_cast(base, values)
    columns = tensor_of_rank(1, ranks.device, (1, -1)).t()
    dist.broadcast(tensor_of_rank(0, ranks.device, (1, -1)).t() if ranks.rank == 0 else columns, 0)
    assert_same_bytes(columns, tensor_of_rank(0, ranks.device, (1, -1)).t()) if ranks.rank else None
    scalar = quantize(torch.tensor(1.0 + ranks.rank, device=ranks.device))
    dist.broadcast(scalar, 0)
    assert scalar.item() == 1.0
    parameter = torch.nn.Parameter(tensor_of_rank(ranks.rank, ranks.device, (1, -1)))
    dist.broadcast(parameter.detach(), 0)
    assert_same_bytes(parameter.detach(), tensor_of_rank(0, ranks.device, (1, -1)))


def check_asynchronous_gathers_are_complete_after_waiting(ranks: Ranks) -> None:
    works, results = [], []
    for block in BLOCKS:
        tensors = [tensor_of_rank(r, ranks.device, block) for r in range(ranks.world)]
        out = empty(tensors[0], 8 * ranks.world)
        works.append(_all_gather(out, tensors[ranks.rank], async_op=True))
        results.append((out, tensors))
    for index, (work, (out, tensors)) in enumerate(zip(works, results, strict=True)):
        assert work is not None
        if index % 2:
            work.wait()
            work.wait()
        while not work.is_completed():  # which waits for the result, too
            time.sleep(0.001)
        assert_joined(out, tensors)


def check_reductions_are_those_of_the_values(ranks: Ranks) -> None:
    world = ranks.world
    for block in BLOCKS:
        # Integers of few bits, whose sums are exact in any order.
        tensors = [
            quantize(
                torch.randint(-8, 9, (8, 160)).to(ranks.device) * 1.0, block=block,
                scale_rule=rule_of(block), scale=0.5,
            )
            for _ in [torch.manual_seed(7)] + [None] * (world - 1)
        ]  # fmt: skip
        total = torch.stack([x.dequantize() for x in tensors]).sum(0)
        local = tensors[ranks.rank]

        x = local.clone()
        dist.all_reduce(x)
        assert_close_to_cast(x, total)
        x = local.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert_close_to_cast(x, torch.stack([x.dequantize() for x in tensors]).amax(0))

        x = local.clone()
        dist.reduce(x, world - 1)
        if ranks.rank == world - 1:
            assert_close_to_cast(x, total)
        else:
            assert_same_bytes(x, local)

        rows = 8 // world
        local_rows = slice(rows * ranks.rank, rows * (ranks.rank + 1))
        out = empty(local, rows)
        work = _reduce_scatter(out, local, async_op=True)
        work.wait()
        assert_close_to_cast(out, total[local_rows])
        out = empty(local, rows)
        dist.reduce_scatter(out, list(local.clone().split(rows)))
        assert_close_to_cast(out, total[local_rows])


def check_coalesced_calls_have_the_results_of_single_ones(ranks: Ranks) -> None:
    tensors = [tensor_of_rank(r, ranks.device, (1, -1)) for r in range(ranks.world)]
    outs = [empty(tensors[0], 8 * ranks.world) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as works:
        for out in outs:
            _all_gather(out, tensors[ranks.rank])
    works.wait()
    for out in outs:
        assert_joined(out, tensors)
    total = torch.stack([x.dequantize() for x in tensors]).double().sum(0)
    sums = [tensors[ranks.rank].clone() for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager():
        for x in sums:
            dist.all_reduce(x)
    for x in sums:
        assert (x.dequantize() - total).abs().max() <= x.amax.max() / 16


def check_point_to_point_calls_keep_the_bytes(ranks: Ranks) -> None:
    next_rank, previous_rank = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    for block in BLOCKS:
        local, expected = (
            tensor_of_rank(r, ranks.device, block) for r in (ranks.rank, previous_rank)
        )
        got = empty(local)
        works = [dist.isend(local, next_rank), dist.irecv(got, previous_rank)]
        for work in works:
            work.wait()
        assert_same_bytes(got, expected)

        got = empty(local)
        pairs = [
            dist.P2POp(dist.isend, local, next_rank),
            dist.P2POp(dist.irecv, got, previous_rank),
        ]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        assert_same_bytes(got, expected)
    if ranks.device.type == "cpu":  # NCCL always needs a source
        if ranks.rank:
            dist.send(tensor_of_rank(ranks.rank, ranks.device, (1, 16)), 0)
        else:
            sources = []
            for _ in range(ranks.world - 1):
                got = quantize(torch.zeros(8, 40), block=(1, 16))
                sources.append(dist.recv(got))
                assert_same_bytes(got, tensor_of_rank(sources[-1], ranks.device, (1, 16)))
            assert sorted(sources) == list(range(1, ranks.world))


def check_scattered_views_have_the_latest_scales(ranks: Ranks) -> None:
    base = tensor_of_rank(0, ranks.device, (4, 16), 4 * ranks.world + 4)
    views = [base[4 * r + 2 : 4 * r + 6] for r in range(ranks.world)]  # their blocks are halves
    base.mul_(1000.0)
    got = empty(views[0])
    dist.scatter(got, views if ranks.rank == 0 else None, 0)
    assert torch.equal(got.dequantize(), base.dequantize()[4 * ranks.rank + 2 :][:4])


def check_views_receive_from_one_rank(ranks: Ranks) -> None:
    """The views are stored in another way than the data, or share a block with other elements."""
    for block in BLOCKS:
        base, sent = tensor_of_rank(1, ranks.device, block), tensor_of_rank(0, ranks.device, block)
        rows, columns = base[2:6], tensor_of_rank(1, ranks.device, block).t()
        before = base.dequantize()
        if ranks.rank == 0:
            dist.send(sent[2:6], 1)
            dist.send(sent.t(), 1)
        elif ranks.rank == 1:
            dist.recv(rows, 0)
            before[2:6] = sent[2:6].dequantize()
            assert (base.dequantize() - before).abs().max() <= 16 * base.scale.max()
            dist.recv(columns, 0)
            assert_same_bytes(columns, sent.t())


def view_without_base(x: Float8Tensor) -> Tensor:
    """Return a view without its base, as a compiled function returns it."""
    view = x[1:3]
    view._window = Window(base=None)
    return view


def check_receivers_raise_before_they_receive(ranks: Ranks) -> None:
    """The next message of the pair still arrives."""
    x = tensor_of_rank(ranks.rank, ranks.device, (1, 128))
    if ranks.rank == 1:
        for tensor, got in (
            (
                view_without_base(tensor_of_rank(1, ranks.device, (-1, -1))),
                "that has lost its base",
            ),
            (
                tensor_of_rank(1, ranks.device, (1, 128), 1).expand(8, 160),
                "whose elements share memory",
            ),
        ):
            with pytest.raises(ValueError, match=f"tensor must be one that .* got a view {got}"):
                dist.irecv(tensor, 0)
        coalescing, raises = (
            dist.distributed_c10d._coalescing_manager(),
            pytest.raises(ValueError, match="to be received in a batch of coalesced calls"),
        )
        with coalescing, raises:
            dist.irecv(tensor_of_rank(1, ranks.device, (1, 128)).t(), 0)
        if ranks.device.type == "cpu":
            with pytest.raises(ValueError, match="src must be a rank for an empty tensor"):
                dist.recv(x[:0])
        dist.recv(x, 0)
        assert_same_bytes(x, tensor_of_rank(0, ranks.device, (1, 128)))
    elif ranks.rank == 0:
        dist.send(x, 1)


def check_functional_collectives_keep_or_sum_the_values(ranks: Ranks) -> None:
    group = dist.group.WORLD
    for block in BLOCKS:
        tensors = [tensor_of_rank(r, ranks.device, block) for r in range(ranks.world)]
        local = tensors[ranks.rank].clone()
        assert_same_bytes(functional.wait_tensor(functional.broadcast(local, 1, group)), tensors[1])
        written = local.clone()
        torch.ops._c10d_functional.broadcast_(written, 1, group.group_name)
        assert_same_bytes(written, tensors[1])
        exchanged = functional.all_to_all_single(local, None, None, group)
        parts = [x.dequantize().chunk(ranks.world)[ranks.rank] for x in tensors]
        assert torch.equal(functional.wait_tensor(exchanged).dequantize(), torch.cat(parts))
        gathered = _gather_many([local, local], group)
        for tensor in gathered:
            values = functional.wait_tensor(tensor).dequantize()
            assert torch.equal(values, torch.cat([x.dequantize() for x in tensors]))
        with float8lab.fallback("silent"):
            total = functional.wait_tensor(functional.all_reduce(local, "sum", group))
            parts = functional.wait_tensor(_scatter_sum(local, "sum", 0, group))
        expected = torch.stack([x.dequantize() for x in tensors]).sum(0)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(parts, expected.chunk(ranks.world)[ranks.rank])
        torch.ops._c10d_functional.all_reduce_(local, "max", group.group_name)
        assert_close_to_cast(local, torch.stack([x.dequantize() for x in tensors]).amax(0))


def check_errors_are_raised_on_all_ranks(ranks: Ranks) -> None:
    world, last = ranks.world, ranks.world - 1
    is_last = ranks.rank == last
    block = (1, -1) if is_last else (-1, -1)
    local = tensor_of_rank(ranks.rank, ranks.device, block)
    outputs = [empty(local) for _ in range(world)]
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(local, 0),
        "all_gather": lambda: dist.all_gather(outputs, local),
        "all_gather_into_tensor": lambda: _all_gather(empty(local, 8 * world), local),
        "gather": lambda: dist.gather(local, outputs if ranks.rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(local, outputs if ranks.rank == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all(outputs, [local] * world),
        "all_to_all_single": lambda: dist.all_to_all_single(empty(local), local),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="must be the one expected there"):
            call()
    rows = 9 if is_last else 8
    uneven = tensor_of_rank(ranks.rank, ranks.device, (-1, -1), rows)
    for call in (lambda: dist.all_reduce(uneven), lambda: dist.reduce(uneven, 0)):
        with pytest.raises(ValueError, match="must be the one expected there"):
            call()
    # An error that only one rank sees is raised on all ranks, too.
    out = (
        torch.empty(8 * world, 40, device=ranks.device) if is_last else empty(outputs[0], 8 * world)
    )
    with pytest.raises(ValueError, match="not quantized expected"):
        _all_gather(out, quantize(torch.ones(8, 40, device=ranks.device)))
    out = empty(quantize(torch.ones(8, 40, device=ranks.device)), 8 * world + is_last)
    with pytest.raises(ValueError, match="rows of the output"):
        _all_gather(out, quantize(torch.ones(8, 40, device=ranks.device)))
    # No rank sends to a rank that cannot write what it receives.
    local = tensor_of_rank(ranks.rank, ranks.device, (-1, -1), 2)
    receiver: Any = (
        view_without_base(tensor_of_rank(0, ranks.device, (-1, -1))) if is_last else empty(local)
    )
    receivers = [empty(local) for _ in range(last)] + [receiver]
    full = tensor_of_rank(0, ranks.device, (-1, -1), 2 * world)
    calls = {
        "broadcast": lambda: dist.broadcast(receiver, 0),
        "all_gather": lambda: dist.all_gather(receivers, local),
        "gather": lambda: dist.gather(local, receivers if is_last else None, last),
        "scatter": lambda: dist.scatter(receiver, [local] * world if ranks.rank == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all(receivers, [local] * world),
        "all_reduce": lambda: dist.all_reduce(receiver),
        "reduce": lambda: dist.reduce(receiver, last),
        "reduce_scatter": lambda: dist.reduce_scatter(receiver, [local] * world),
        "reduce_scatter_tensor": lambda: _reduce_scatter(receiver, full),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="no tensor, for a view that has lost its base"):
            call()
    overlapping: Any = empty(local, 1).expand(2 * world, 40) if is_last else empty(local, 2 * world)
    for call in (
        lambda: _all_gather(overlapping, local),
        lambda: dist.all_to_all_single(overlapping, full),
    ):
        with pytest.raises(ValueError, match="no tensor, for a view whose elements share memory"):
            call()
    # Nothing was sent, so the group is as usable as before.
    x = tensor_of_rank(ranks.rank, ranks.device, (1, -1))
    dist.broadcast(x, 0)
    assert_same_bytes(x, tensor_of_rank(0, ranks.device, (1, -1)))


@on_ranks(2)
def check_distribute_tensor_takes_the_values_of_the_first_rank(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    for block in (*BLOCKS, (128, 128)):
        for shape in ((64, 48), (130, 48), (2, 9), (3, 130)):
            torch.manual_seed(ranks.rank)  # the values of the first rank count
            rank_tensor = quantize(torch.randn(shape, device=ranks.device), block=block)
            torch.manual_seed(0)
            expected = quantize(torch.randn(shape, device=ranks.device), block=block)
            for dim in (0, 1):
                sharded = distribute_tensor(rank_tensor.clone(), mesh, [Shard(dim)])
                shards = list(expected.dequantize().chunk(ranks.world, dim))
                local = sharded.to_local()
                assert isinstance(local, Float8Tensor)
                if ranks.rank < len(shards) and block == (-1, -1):
                    assert torch.equal(local.dequantize(), shards[ranks.rank])
                locals_ = ranks.gather(local.dequantize().cpu())
                full = sharded.full_tensor().dequantize()
                assert torch.equal(full.cpu(), torch.cat(locals_, dim))
                # Blocks that are cut by an edge between ranks are quantized once more.
                assert (full - expected.dequantize()).abs().max() <= 16 * expected.scale.max()
            copied = distribute_tensor(rank_tensor.clone(), mesh, [Replicate()])
            assert_same_bytes(copied.to_local(), expected)


def check_fake_backend_runs_without_other_ranks(ranks: Ranks) -> None:
    """Torch's fake backend, for dry runs, has no other ranks to agree with."""
    group = dist.new_group(backend="fake")
    out = quantize(torch.zeros(2, 8, device=ranks.device))
    dist.scatter(out, [out.clone()] * ranks.world if ranks.rank == 0 else None, 0, group)
    dist.broadcast(out, 0, group)
    assert out.shape == (2, 8)


def test_a_handle_may_hold_no_work(monkeypatch):
    """As NCCL's handles do, unless the caller asked for one that it can wait for."""
    monkeypatch.setattr(collectives.dist.Work, "unbox", lambda handle: None)
    ended = []
    work = collectives._Work([object(), None], lambda: ended.append(True))
    assert work.wait()
    assert ended == [True]


test_on_ranks = each_check(__name__, 2, 4, cpu=4)
