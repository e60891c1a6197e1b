"""Collectives on Float8Tensors: data that moves keeps its values, sums are taken of them."""

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
from float8lab.tensor import Float8Tensor, quantize
from float8lab.tensor.window import Window
from tests.distributed.ranks import Ranks, each_check, on_ranks
from tests.same_bytes import assert_same_bytes


def _renamed(module: Any, new: str, old: str) -> Callable[..., Any]:
    """A function under its name since torch 2.13, where the old one warns, or the old one."""
    function: Callable[..., Any] = getattr(module, new if hasattr(module, new) else old)
    return function


_all_gather = _renamed(dist, "all_gather_single", "all_gather_into_tensor")
_reduce_scatter = _renamed(dist, "reduce_scatter_single", "reduce_scatter_tensor")
_gather_many = _renamed(
    functional, "all_gather_single_coalesced", "all_gather_into_tensor_coalesced"
)
_scatter_sum = _renamed(functional, "reduce_scatter_single", "reduce_scatter_tensor")

BLOCKS = ((-1, -1), (1, -1), (-1, 1), (1, 16), (4, 16), (1, 128), (128, 128), (1, 32))
"""Those of each layout that ``quantize`` makes; it stores the scales of some column by column."""


def of_rank(rank: int, device: torch.device, block: Any, rows: int = 8) -> Float8Tensor:
    """A tensor whose scales are those of no other rank, of several blocks a row."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(rows, 160 if block[1] > 16 else 40, generator=generator) * (1 + rank)
    return quantize(values.to(device), block=block, scale_rule=rule_of(block))


def rule_of(block: Any) -> str:
    """MX for blocks of 1x32."""
    return "e8m0" if block[1] == 32 else "fp32"


def empty(x: Float8Tensor, rows: int | None = None) -> Float8Tensor:
    shape = (x.shape[0] if rows is None else rows, *x.shape[1:])
    zeros = torch.zeros(shape, device=x.device)
    return quantize(zeros, block=x.spec.block, scale_rule=x.spec.scale_rule)


def assert_joined(out: Tensor, parts: list[Float8Tensor]) -> None:
    """``out`` has the bytes of ``parts`` where its blocks are theirs, else one cast more."""
    values = torch.cat([part.dequantize() for part in parts])
    assert isinstance(out, Float8Tensor)
    if out.spec.block[0] == -1 or parts[0].shape[0] % out.spec.block[0]:
        assert_close_to_cast(out, values)
    else:
        assert torch.equal(out.dequantize(), values)


def assert_close_to_cast(out: Float8Tensor, values: Tensor) -> None:
    expected = quantize(values, block=out.spec.block, scale_rule=out.spec.scale_rule)
    assert_same_bytes(out, expected, amax=False)


def check_lists(ranks: Ranks) -> None:
    sizes = {"equal": [8] * ranks.world, "uneven": [5, 0, 3, 8][: ranks.world]}
    for block in BLOCKS:
        for rows in [*sizes.values()][block != BLOCKS[0] :]:  # equal ones in one layout
            all_ = [of_rank(r, ranks.device, block, n) for r, n in enumerate(rows)]
            mine, root = all_[ranks.rank], ranks.world - 1
            at_root = ranks.rank == root

            out = [empty(x) for x in all_]
            dist.all_gather(out, mine)
            for got, x in zip(out, all_, strict=True):
                assert_same_bytes(got, x)

            out = [empty(x) for x in all_]
            dist.gather(mine, out if at_root else None, dst=root)
            for got, x in zip(out, all_ if at_root else map(empty, all_), strict=True):
                assert_same_bytes(got, x)

            got = empty(mine)
            dist.scatter(got, all_ if at_root else None, src=root)
            assert_same_bytes(got, mine)

            mine_to = [
                of_rank(10 * ranks.rank + r, ranks.device, block, rows[r])
                for r in range(ranks.world)
            ]
            to_me = [
                of_rank(10 * r + ranks.rank, ranks.device, block, rows[ranks.rank])
                for r in range(ranks.world)
            ]
            out = [empty(x) for x in to_me]
            dist.all_to_all(out, mine_to)
            for got, x in zip(out, to_me, strict=True):
                assert_same_bytes(got, x)

            got = mine if at_root else empty(all_[root])
            dist.broadcast(got, root)
            assert_same_bytes(got, all_[root])


def check_one_tensor(ranks: Ranks) -> None:
    world = ranks.world
    for block in BLOCKS:
        all_ = [of_rank(r, ranks.device, block) for r in range(world)]
        mine = all_[ranks.rank]
        out = empty(mine, 8 * world)
        _all_gather(out, mine)
        assert_joined(out, all_)
        if block[0] != -1 and mine.shape[0] % block[0] == 0:
            assert torch.equal(out.scale, torch.cat([x.scale for x in all_]))

        # Ranks that share a scale keep it.
        same = of_rank(0, ranks.device, block)
        _all_gather(out, same)
        assert torch.equal(out.dequantize(), torch.cat([same.dequantize()] * world))

        zeros = torch.zeros(world, *mine.shape, device=ranks.device)
        stacked = quantize(zeros, block=block, scale_rule=rule_of(block))
        _all_gather(stacked, mine)
        if block[0] != -1 and mine.shape[0] % block[0] == 0:
            assert torch.equal(stacked.dequantize(), torch.stack([x.dequantize() for x in all_]))

        out = empty(mine)
        dist.all_to_all_single(out, mine)
        assert_joined(out, [x.chunk(world)[ranks.rank] for x in all_])

        # Rank r sends r + p rows to rank p, and so none from rank 0 to itself.
        starts = [sum(ranks.rank + q for q in range(p)) for p in range(world + 1)]
        source = of_rank(ranks.rank, ranks.device, block, starts[-1])
        splits = [ranks.rank + p for p in range(world)]
        out = empty(source)
        dist.all_to_all_single(out, source, splits, splits)
        pieces = []
        for r in range(world):
            x = of_rank(r, ranks.device, block, sum(r + p for p in range(world)))
            first = sum(r + p for p in range(ranks.rank))
            pieces.append(x[first : first + r + ranks.rank])
        values = torch.cat([piece.dequantize() for piece in pieces])
        if block[0] == 1 or sum(piece.shape[0] > 0 for piece in pieces) == 1:
            assert torch.equal(out.dequantize(), values)  # no scales of two ranks to bring together
        elif block[0] == -1:
            assert_close_to_cast(out, values)
        else:
            step = out.scale.max() * 448 / 16
            assert (out.dequantize() - values).abs().max() <= step


def check_views_receive(ranks: Ranks) -> None:
    source = of_rank(0, ranks.device, (-1, -1), 4)
    base = of_rank(1, ranks.device, (-1, -1))
    before = base.dequantize()
    dist.broadcast(source if ranks.rank == 0 else base[2:6], 0)
    if ranks.rank:
        values = before.clone()
        values[2:6] = source.dequantize()
        assert_close_to_cast(base, values)
    columns = of_rank(1, ranks.device, (1, -1)).t()
    dist.broadcast(of_rank(0, ranks.device, (1, -1)).t() if ranks.rank == 0 else columns, 0)
    assert_same_bytes(columns, of_rank(0, ranks.device, (1, -1)).t()) if ranks.rank else None
    scalar = quantize(torch.tensor(1.0 + ranks.rank, device=ranks.device))
    dist.broadcast(scalar, 0)
    assert scalar.item() == 1.0
    parameter = torch.nn.Parameter(of_rank(ranks.rank, ranks.device, (1, -1)))
    dist.broadcast(parameter.detach(), 0)
    assert_same_bytes(parameter.detach(), of_rank(0, ranks.device, (1, -1)))


def check_asynchronous(ranks: Ranks) -> None:
    works, results = [], []
    for block in BLOCKS:
        all_ = [of_rank(r, ranks.device, block) for r in range(ranks.world)]
        out = empty(all_[0], 8 * ranks.world)
        works.append(_all_gather(out, all_[ranks.rank], async_op=True))
        results.append((out, all_))
    for work, (out, all_) in zip(works, results, strict=True):
        assert work is not None
        work.wait()
        work.wait()
        assert work.is_completed()
        assert_joined(out, all_)


def check_sums(ranks: Ranks) -> None:
    world = ranks.world
    for block in BLOCKS:
        # Whole numbers of few bits, whose sums are exact in any order.
        all_ = [
            quantize(
                torch.randint(-8, 9, (8, 160)).to(ranks.device) * 1.0, block=block,
                scale_rule=rule_of(block), scale=0.5,
            )
            for _ in [torch.manual_seed(7)] + [None] * (world - 1)
        ]  # fmt: skip
        total = torch.stack([x.dequantize() for x in all_]).sum(0)
        mine = all_[ranks.rank]

        x = mine.clone()
        dist.all_reduce(x)
        assert_close_to_cast(x, total)
        x = mine.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        assert_close_to_cast(x, torch.stack([x.dequantize() for x in all_]).amax(0))

        x = mine.clone()
        dist.reduce(x, world - 1)
        if ranks.rank == world - 1:
            assert_close_to_cast(x, total)
        else:
            assert_same_bytes(x, mine)

        rows = 8 // world
        part = slice(rows * ranks.rank, rows * (ranks.rank + 1))
        out = empty(mine, rows)
        work = _reduce_scatter(out, mine, async_op=True)
        work.wait()
        assert_close_to_cast(out, total[part])
        out = empty(mine, rows)
        dist.reduce_scatter(out, list(mine.clone().split(rows)))
        assert_close_to_cast(out, total[part])


def check_coalesced(ranks: Ranks) -> None:
    all_ = [of_rank(r, ranks.device, (1, -1)) for r in range(ranks.world)]
    outs = [empty(all_[0], 8 * ranks.world) for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as works:
        for out in outs:
            _all_gather(out, all_[ranks.rank])
    works.wait()
    for out in outs:
        assert_joined(out, all_)
    total = torch.stack([x.dequantize() for x in all_]).double().sum(0)
    sums = [all_[ranks.rank].clone() for _ in range(2)]
    with dist.distributed_c10d._coalescing_manager():
        for x in sums:
            dist.all_reduce(x)
    for x in sums:
        assert (x.dequantize() - total).abs().max() <= x.amax.max() / 16


def check_point_to_point(ranks: Ranks) -> None:
    after, before = (ranks.rank + 1) % ranks.world, (ranks.rank - 1) % ranks.world
    for block in BLOCKS:
        mine, expected = (of_rank(r, ranks.device, block) for r in (ranks.rank, before))
        got = empty(mine)
        works = [dist.isend(mine, after), dist.irecv(got, before)]
        for work in works:
            work.wait()
        assert_same_bytes(got, expected)

        got = empty(mine)
        pairs = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        assert_same_bytes(got, expected)
    if ranks.device.type == "cpu":  # NCCL always wants a source
        if ranks.rank:
            dist.send(of_rank(ranks.rank, ranks.device, (1, 16)), 0)
        else:
            for _ in range(ranks.world - 1):
                got = empty(mine)
                got = quantize(torch.zeros(8, 40), block=(1, 16))
                assert_same_bytes(got, got)
                source = dist.recv(got)
                assert_same_bytes(got, of_rank(source, ranks.device, (1, 16)))


def check_views_receive_from_one_rank(ranks: Ranks) -> None:
    """They are stored in another way than what is sent, or share a block with other elements."""
    for block in BLOCKS:
        base, sent = of_rank(1, ranks.device, block), of_rank(0, ranks.device, block)
        rows, columns = base[2:6], of_rank(1, ranks.device, block).t()
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


def without_base(x: Float8Tensor) -> Tensor:
    """A view as a compiled function returns it."""
    view = x[1:3]
    view._window = Window(base=None)
    return view


def check_receivers_refuse_before_they_receive(ranks: Ranks) -> None:
    """The next message of the pair arrives."""
    x = of_rank(ranks.rank, ranks.device, (1, 128))
    if ranks.rank == 1:
        for tensor, got in (
            (without_base(of_rank(1, ranks.device, (-1, -1))), "that has lost its base"),
            (of_rank(1, ranks.device, (1, 128), 1).expand(8, 160), "whose elements share memory"),
        ):
            with pytest.raises(ValueError, match=f"tensor must be one that .* got a view {got}"):
                dist.irecv(tensor, 0)
        coalescing, refused = (
            dist.distributed_c10d._coalescing_manager(),
            pytest.raises(ValueError, match="to be received in a batch of coalesced calls"),
        )
        with coalescing, refused:
            dist.irecv(of_rank(1, ranks.device, (1, 128)).t(), 0)
        if ranks.device.type == "cpu":
            with pytest.raises(ValueError, match="src must be a rank for an empty tensor"):
                dist.recv(x[:0])
        dist.recv(x, 0)
        assert_same_bytes(x, of_rank(0, ranks.device, (1, 128)))
    elif ranks.rank == 0:
        dist.send(x, 1)


def check_functional(ranks: Ranks) -> None:
    group = dist.group.WORLD
    for block in BLOCKS:
        all_ = [of_rank(r, ranks.device, block) for r in range(ranks.world)]
        mine = all_[ranks.rank].clone()
        assert_same_bytes(functional.wait_tensor(functional.broadcast(mine, 1, group)), all_[1])
        exchanged = functional.all_to_all_single(mine, None, None, group)
        parts = [x.dequantize().chunk(ranks.world)[ranks.rank] for x in all_]
        assert torch.equal(functional.wait_tensor(exchanged).dequantize(), torch.cat(parts))
        gathered = _gather_many([mine, mine], group)
        for one in gathered:
            values = functional.wait_tensor(one).dequantize()
            assert torch.equal(values, torch.cat([x.dequantize() for x in all_]))
        with float8lab.fallback("silent"):
            total = functional.wait_tensor(functional.all_reduce(mine, "sum", group))
            parts = functional.wait_tensor(_scatter_sum(mine, "sum", 0, group))
        expected = torch.stack([x.dequantize() for x in all_]).sum(0)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(parts, expected.chunk(ranks.world)[ranks.rank])
        torch.ops._c10d_functional.all_reduce_(mine, "max", group.group_name)
        assert_close_to_cast(mine, torch.stack([x.dequantize() for x in all_]).amax(0))


def check_errors_are_everybodys(ranks: Ranks) -> None:
    world, last = ranks.world, ranks.world - 1
    odd = ranks.rank == last
    block = (1, -1) if odd else (-1, -1)
    mine = of_rank(ranks.rank, ranks.device, block)
    like = [empty(mine) for _ in range(world)]
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(mine, 0),
        "all_gather": lambda: dist.all_gather(like, mine),
        "all_gather_into_tensor": lambda: _all_gather(empty(mine, 8 * world), mine),
        "gather": lambda: dist.gather(mine, like if ranks.rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(mine, like if ranks.rank == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all(like, [mine] * world),
        "all_to_all_single": lambda: dist.all_to_all_single(empty(mine), mine),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="must be the one expected there"):
            call()
    rows = 9 if odd else 8
    other = of_rank(ranks.rank, ranks.device, (-1, -1), rows)
    for call in (lambda: dist.all_reduce(other), lambda: dist.reduce(other, 0)):
        with pytest.raises(ValueError, match="must be the one expected there"):
            call()
    # What only one rank sees is everybody's, too.
    out = torch.empty(8 * world, 40, device=ranks.device) if odd else empty(like[0], 8 * world)
    with pytest.raises(ValueError, match="not quantized expected"):
        _all_gather(out, quantize(torch.ones(8, 40, device=ranks.device)))
    out = empty(quantize(torch.ones(8, 40, device=ranks.device)), 8 * world + odd)
    with pytest.raises(ValueError, match="rows of the output"):
        _all_gather(out, quantize(torch.ones(8, 40, device=ranks.device)))
    # No rank sends to one that cannot write what it gets.
    mine = of_rank(ranks.rank, ranks.device, (-1, -1), 2)
    into: Any = without_base(of_rank(0, ranks.device, (-1, -1))) if odd else empty(mine)
    parts = [empty(mine) for _ in range(last)] + [into]
    whole = of_rank(0, ranks.device, (-1, -1), 2 * world)
    calls = {
        "broadcast": lambda: dist.broadcast(into, 0),
        "all_gather": lambda: dist.all_gather(parts, mine),
        "gather": lambda: dist.gather(mine, parts if odd else None, last),
        "scatter": lambda: dist.scatter(into, [mine] * world if ranks.rank == 0 else None, 0),
        "all_to_all": lambda: dist.all_to_all(parts, [mine] * world),
        "all_reduce": lambda: dist.all_reduce(into),
        "reduce": lambda: dist.reduce(into, last),
        "reduce_scatter": lambda: dist.reduce_scatter(into, [mine] * world),
        "reduce_scatter_tensor": lambda: _reduce_scatter(into, whole),
    }
    for call in calls.values():
        with pytest.raises(ValueError, match="no tensor, for a view that has lost its base"):
            call()
    wide: Any = empty(mine, 1).expand(2 * world, 40) if odd else empty(mine, 2 * world)
    for call in (lambda: _all_gather(wide, mine), lambda: dist.all_to_all_single(wide, whole)):
        with pytest.raises(ValueError, match="no tensor, for a view whose elements share memory"):
            call()
    # Nothing was sent: the group is as good as before.
    x = of_rank(ranks.rank, ranks.device, (1, -1))
    dist.broadcast(x, 0)
    assert_same_bytes(x, of_rank(0, ranks.device, (1, -1)))


@on_ranks(2)
def check_distribute_tensor(ranks: Ranks) -> None:
    mesh = ranks.mesh()
    for block in (*BLOCKS, (128, 128)):
        for shape in ((64, 48), (130, 48), (2, 9), (3, 130)):
            torch.manual_seed(ranks.rank)  # the first rank's values are everybody's
            mine = quantize(torch.randn(shape, device=ranks.device), block=block)
            torch.manual_seed(0)
            whole = quantize(torch.randn(shape, device=ranks.device), block=block)
            for dim in (0, 1):
                sharded = distribute_tensor(mine.clone(), mesh, [Shard(dim)])
                parts = list(whole.dequantize().chunk(ranks.world, dim))
                local = sharded.to_local()
                assert isinstance(local, Float8Tensor)
                if ranks.rank < len(parts) and block == (-1, -1):
                    assert torch.equal(local.dequantize(), parts[ranks.rank])
                locals_ = ranks.gather(local.dequantize().cpu())
                full = sharded.full_tensor().dequantize()
                assert torch.equal(full.cpu(), torch.cat(locals_, dim))
                # Blocks that an edge between ranks has cut are quantized once more.
                assert (full - whole.dequantize()).abs().max() <= 16 * whole.scale.max()
            copied = distribute_tensor(mine.clone(), mesh, [Replicate()])
            assert_same_bytes(copied.to_local(), whole)


def check_a_process_that_plays_one_of_many(ranks: Ranks) -> None:
    """Torch's fake backend, of dry runs, has no other ranks to agree with."""
    group = dist.new_group(backend="fake")
    out = quantize(torch.zeros(2, 8, device=ranks.device))
    dist.scatter(out, [out.clone()] * ranks.world if ranks.rank == 0 else None, 0, group)
    dist.broadcast(out, 0, group)
    assert out.shape == (2, 8)


test_ranks = each_check(__name__, 2, 4, cpu=4)
