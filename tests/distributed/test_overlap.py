"""Products beside copies between ranks: the bytes of collectives that come before or after them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.distributed import overlap
from float8lab.formats import E4M3, Float8Spec
from float8lab.ops import scaled_mm_op
from float8lab.tensor.blocks import quantize_blocks
from tests.distributed.ranks import Ranks, check_names, ranks_fixture

BLOCKS = {
    "tensor": ((-1, -1), (-1, -1)),
    "row": ((1, -1), (1, -1)),
    "block": ((1, 128), (128, 128)),
    "mx": ((1, 32), (1, 32)),
}
ROWS, N = 256, 48


class FileWindow(overlap.Window):
    """A window of memory-mapped files, for ranks on CPUs."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self.rank, self.size, self.nbytes = ranks.rank, ranks.world, nbytes
        self.half, self._parts = 0, {}
        self.memories = [
            torch.from_file(
                str(ranks.tmp_path / f"{rank}"),
                shared=True, size=self.HALVES * nbytes, dtype=torch.uint8,
            )
            for rank in range(ranks.world)
        ]  # fmt: skip

    def barrier(self) -> None:
        dist.barrier()

    def _part(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        place = self.half * self.nbytes + start
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memories[rank][place : place + nbytes].view(dtype).view(shape)


def on_ranks_that_see_each_other(ranks: Ranks) -> Any:
    """The process group, with a window."""
    if ranks.device.type == "cpu":
        overlap.Window.of_groups[dist.group.WORLD] = FileWindow(ranks, 1 << 20)
    return dist.group.WORLD


def operands(ranks: Ranks, kind: str, K: int, seed: int) -> tuple[list[Any], list[Any]]:
    """``a``, with ``ROWS`` rows of each rank, and ``b``; each with scales and block."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for rows, block in zip((ROWS * ranks.world, N), BLOCKS[kind], strict=True):
        x = torch.randn(rows, K, generator=generator).bfloat16().to(ranks.device)
        q, scale, *_ = quantize_blocks(x, Float8Spec(E4M3, block, "fp32"))
        found.append([q, by_column(scale) if block[0] == 1 else scale, block])
    return found[0], found[1]


def by_column(scale: Tensor) -> Tensor:
    """The scales as casts for products return them."""
    return scale.t().contiguous().t()


def rows_of(a: list[Any], start: int, count: int) -> list[Any]:
    """Of an operand, as a rank has them that has no others."""
    q, scale, block = a
    if block[0] == 1:
        scale = by_column(scale[start : start + count])
    return [q[start : start + count].contiguous(), scale, block]


def how(a: list[Any], b: list[Any]) -> Any:
    return a[2], b[2], False


def check_the_bytes_of_an_all_gather(ranks: Ranks) -> None:
    group = on_ranks_that_see_each_other(ranks)
    for kind in BLOCKS:
        for keep in (False, True):
            a, b = operands(ranks, kind, 256, 0)
            parts = [rows_of(a, ROWS * rank, ROWS) for rank in range(ranks.world)]
            bias = torch.randn(N, device=ranks.device).bfloat16() if keep else None
            extra = torch.full((3, 5), ranks.rank, dtype=torch.uint8, device=ranks.device)
            also = [extra, parts[ranks.rank][0].t().contiguous()] if keep else []
            found = overlap.gather_mm(
                group,
                parts[ranks.rank][:2],
                b[:2],
                how(a, b),
                torch.bfloat16,
                bias,
                keep=keep,
                also=also,
            )
            assert found is not None
            y, whole, gathered = found
            want = [scaled_mm_op(*part, *b, bias, torch.bfloat16, False) for part in parts]
            assert torch.equal(y, torch.cat(want))
            if keep:
                assert torch.equal(whole[0].view(torch.uint8), a[0].view(torch.uint8))
                assert torch.equal(whole[1], a[1])
                assert whole[1].stride() == a[1].stride()
                assert gathered[0][:, 0, 0].tolist() == list(range(ranks.world))
                turned = torch.stack([part[0].t() for part in parts])
                assert torch.equal(gathered[1].view(torch.uint8), turned.view(torch.uint8))


def check_the_sums_of_a_reduce_scatter(ranks: Ranks, *, cut: bool = True) -> None:
    group = on_ranks_that_see_each_other(ranks)
    for kind in BLOCKS:
        all_operands = [operands(ranks, kind, 256, r) for r in range(ranks.world)]
        a, b = all_operands[ranks.rank]
        also = [torch.full((7,), ranks.rank, device=ranks.device)] * cut
        found = overlap.mm_scatter(group, a[:2], b[:2], how(a, b), torch.bfloat16, None, also=also)
        assert found is not None
        sums = []
        for rank, (a, b) in enumerate(all_operands):
            size = ROWS // 2 if cut and rank != ranks.rank else ROWS
            parts = [rows_of(a, ROWS * ranks.rank + i, size) for i in range(0, ROWS, size)]
            products = [scaled_mm_op(*part, *b, None, torch.bfloat16, False) for part in parts]
            sums.append(torch.cat(products))
        assert torch.equal(found[0], torch.stack(sums).sum(0))
        for one in found[1]:
            assert one[:, 0].tolist() == list(range(ranks.world))


def check_rows_that_are_not_cut(ranks: Ranks) -> None:
    small, overlap._SMALL_K = overlap._SMALL_K, 0
    try:
        check_the_sums_of_a_reduce_scatter(ranks, cut=False)
    finally:
        overlap._SMALL_K = small


def check_many_calls_in_turns(ranks: Ranks) -> None:
    """None reads what another has written into its half."""
    group = on_ranks_that_see_each_other(ranks)
    generator = torch.Generator().manual_seed(0)
    a, b = operands(ranks, "row", 64, 0)
    part = rows_of(a, ROWS * ranks.rank, ROWS)
    args, all_args = (part[:2], b[:2], how(a, b)), (a[:2], b[:2], how(a, b))
    gathered = overlap.gather_mm(group, *args, torch.bfloat16, None)
    summed = overlap.mm_scatter(group, *all_args, torch.bfloat16, None)
    assert gathered is not None
    assert summed is not None
    for index in torch.randint(0, 2, (40,), generator=generator).tolist():
        if index:
            again: Any = overlap.gather_mm(group, *args, torch.bfloat16, None)
            assert torch.equal(again[0], gathered[0])
        else:
            again = overlap.mm_scatter(group, *all_args, torch.bfloat16, None)
            assert torch.equal(again[0], summed[0])


def check_a_cuda_graph(ranks: Ranks) -> None:
    """Its products replay between others, any number of times."""
    if ranks.device.type == "cpu":
        return
    a, b = operands(ranks, "tensor", 256, 0)
    part = rows_of(a, ROWS * ranks.rank, ROWS)
    group = dist.group.WORLD

    def products() -> list[Tensor]:
        first = overlap.gather_mm(group, part[:2], b[:2], how(a, b), torch.bfloat16, None)
        second = overlap.mm_scatter(group, a[:2], b[:2], how(a, b), torch.bfloat16, None)
        assert first is not None
        assert second is not None
        return [first[0], second[0]]

    want = products()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = products()
    for eager in (False, True, True, False, False):
        for tensor in found:
            tensor.zero_()
        graph.replay()
        for results in (found, products() if eager else found):
            assert all(torch.equal(*pair) for pair in zip(results, want, strict=True))


outcome = ranks_fixture(__name__, 2)


@pytest.mark.parametrize("name", check_names(sys.modules[__name__]))
def test_on_ranks(name: str, outcome: Callable[[str], None]) -> None:
    outcome(name)
