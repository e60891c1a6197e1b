"""GEMMs beside copies between ranks: the bytes of collectives that come before or after them."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import float8lab
from float8lab.distributed import overlap
from float8lab.formats import E4M3, Float8Spec
from float8lab.ops import scaled_mm_op
from float8lab.tensor.blocks import quantize_blocks
from tests.distributed.ranks import RECIPES, Ranks, each_check
from tests.recorder import Ops

BLOCKS = {
    "tensor": ((-1, -1), (-1, -1)), "row": ((1, -1), (1, -1)), "block": ((1, 128), (128, 128)),
    "mx": ((1, 32), (1, 32)),
}  # fmt: skip
ROWS, N = 256, 48


class FileWindow(overlap.Window):
    """A window of memory-mapped files, for ranks on CPUs."""

    def __init__(self, ranks: Ranks, nbytes: int) -> None:
        self.rank, self.size, self.nbytes = ranks.rank, ranks.world, nbytes
        self.half, self._views, self.is_captured, self.handle = 0, {}, False, self
        self.memories = [
            torch.from_file(
                str(ranks.tmp_path / f"{rank}"),
                shared=True, size=self.HALVES * nbytes, dtype=torch.uint8,
            )
            for rank in range(ranks.world)
        ]  # fmt: skip

    def barrier(self) -> None:
        dist.barrier()

    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int
    ) -> Tensor:
        place = offset * dtype.itemsize
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
    """The scales as casts for GEMMs return them."""
    return scale.t().contiguous().t()


def rows_of(a: list[Any], start: int, count: int) -> list[Any]:
    """Of an operand, as a rank has them that has no others."""
    q, scale, block = a
    if block[0] == 1:
        scale = by_column(scale[start : start + count])
    return [q[start : start + count].contiguous(), scale, block]


def gather_mm(group: Any, a: list[Any], b: list[Any], **options: Any) -> list[Tensor]:
    also, bias = options.get("also", []), options.get("bias", [])
    operands, blocks = [*a[:2], *b[:2], *bias], (a[2], b[2])
    name, keep = group.group_name, options.get("keep", True)
    return overlap.gather_mm(operands, *blocks, torch.bfloat16, False, name, also, keep)


def mm_scatter(group: Any, a: list[Any], b: list[Any], **options: Any) -> list[Tensor]:
    operands, blocks, also = [*a[:2], *b[:2]], (a[2], b[2]), options.get("also", [])
    return overlap.mm_scatter(operands, *blocks, torch.bfloat16, False, group.group_name, also)


def check_the_bytes_of_an_all_gather(ranks: Ranks, *, see: bool = True) -> None:
    group = on_ranks_that_see_each_other(ranks) if see else dist.group.WORLD
    for kind in BLOCKS:
        for more in (False, True):
            a, b = operands(ranks, kind, 256, 0)
            parts = [rows_of(a, ROWS * rank, ROWS) for rank in range(ranks.world)]
            bias = [torch.randn(N, device=ranks.device).bfloat16()] * more
            extra = torch.full((3, 5), ranks.rank, dtype=torch.uint8, device=ranks.device)
            also = [extra, parts[ranks.rank][0].t().contiguous()] * more
            y, whole, scale, *gathered = gather_mm(
                group, parts[ranks.rank], b, also=also, bias=bias
            )
            want = [
                scaled_mm_op(*part, *b, bias[0] if more else None, torch.bfloat16, False)
                for part in parts
            ]
            assert torch.equal(y, torch.cat(want))
            assert torch.equal(whole.view(torch.uint8), a[0].view(torch.uint8))
            assert torch.equal(scale, a[1])
            assert scale.stride() == a[1].stride()
            if more:
                assert gathered[0][:, 0, 0].tolist() == list(range(ranks.world))
                turned = torch.stack([part[0].t() for part in parts])
                assert torch.equal(gathered[1].view(torch.uint8), turned.view(torch.uint8))


def check_the_sums_of_a_reduce_scatter(ranks: Ranks, *, cut: bool = True, see: bool = True) -> None:
    group = on_ranks_that_see_each_other(ranks) if see else dist.group.WORLD
    for kind in BLOCKS:
        all_operands = [operands(ranks, kind, 256, r) for r in range(ranks.world)]
        also = [torch.full((7,), ranks.rank, device=ranks.device)] * cut
        total, *gathered = mm_scatter(group, *all_operands[ranks.rank], also=also)
        sums = []
        for rank, (a, b) in enumerate(all_operands):
            size = ROWS // 2 if cut and rank != ranks.rank else ROWS
            parts = [rows_of(a, ROWS * ranks.rank + i, size) for i in range(0, ROWS, size)]
            gemms = [scaled_mm_op(*part, *b, None, torch.bfloat16, False) for part in parts]
            sums.append(torch.cat(gemms))
        assert torch.equal(total, torch.stack(sums).sum(0))
        if cut:
            assert gathered[0][:, 0].tolist() == list(range(ranks.world))


def check_collectives_where_ranks_do_not_see_each_other(ranks: Ranks) -> None:
    overlap.Window.of_groups[dist.group.WORLD] = None
    check_the_bytes_of_an_all_gather(ranks, see=False)
    check_the_sums_of_a_reduce_scatter(ranks, see=False)
    del overlap.Window.of_groups[dist.group.WORLD]


def check_a_compiled_graph(ranks: Ranks) -> None:
    group = on_ranks_that_see_each_other(ranks)
    a, b = operands(ranks, "block", 256, 0)
    mine = rows_of(a, ROWS * ranks.rank, ROWS)

    def gemms() -> list[Tensor]:
        also = [mine[0].view(torch.uint8) + 1]
        gathered = gather_mm(group, mine, b, also=also)
        return [*gathered[:4], mm_scatter(group, [gathered[1], gathered[2], a[2]], b)[0]]

    compiled = torch.compile(gemms, fullgraph=True)
    for one, other in zip(compiled(), gemms(), strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one.float(), other.float())


def check_layers(ranks: Ranks) -> None:
    """Layers whose GEMMs overlap give what others give, and nothing else is gathered."""
    group = on_ranks_that_see_each_other(ranks)
    tokens = 128 * ranks.world  # blocks of one rank
    for recipe, mode in itertools.product(RECIPES, ("column", "row")):
        results = []
        for overlaps in (False, True):
            torch.manual_seed(0)
            layer = float8lab.Linear(
                256, 256, tp_group=group, parallel_mode=mode, sequence_parallel=True,
                device=ranks.device,
            )  # fmt: skip
            layer.overlap = overlaps
            layer.set_tensor_parallel_group(group)
            rows, features = (128, 256) if mode == "column" else (tokens, 256 // ranks.world)
            x = torch.randn(rows, features, device=ranks.device).requires_grad_()
            with Ops() as ops, torch.autograd.set_multithreading_enabled(False):
                with float8lab.autocast(recipe=recipe):
                    y = layer(x)
                y.backward(torch.linspace(-1, 1, y.numel(), device=ranks.device).view_as(y))
            assert ops.names.count("float8lab.gather_mm.default") == overlaps
            assert ops.names.count("float8lab.mm_scatter.default") == overlaps
            gathers = ops.names.count("_c10d_functional.all_gather_into_tensor.default")
            assert (gathers == (mode == "column")) == overlaps  # but sizes
            results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
        torch.testing.assert_close(*results)


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
    mine = rows_of(a, ROWS * ranks.rank, ROWS)
    gathered, summed = gather_mm(group, mine, b), mm_scatter(group, a, b)
    near = overlap.Window.of_groups[group]
    assert near is not None
    for index in torch.randint(0, 2, (40,), generator=generator).tolist():
        if index:
            assert torch.equal(gather_mm(group, mine, b)[0], gathered[0])
        else:
            assert torch.equal(mm_scatter(group, a, b)[0], summed[0])
        near.half = near.half if ranks.device.type == "cuda" else 0  # as behind a graph
        near.is_captured = True


def check_a_cuda_graph(ranks: Ranks) -> None:
    """Its GEMMs replay between others, any number of times."""
    if ranks.device.type == "cpu":
        return
    group = on_ranks_that_see_each_other(ranks)
    a, b = operands(ranks, "tensor", 256, 0)
    mine = rows_of(a, ROWS * ranks.rank, ROWS)

    def gemms() -> list[Tensor]:
        return [gather_mm(group, mine, b)[0], mm_scatter(group, a, b)[0]]

    want = gemms()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gemms()
    for eager in (False, True, True, False, False):
        for tensor in found:
            tensor.zero_()
        graph.replay()
        for results in (found, gemms() if eager else found):
            assert all(torch.equal(*pair) for pair in zip(results, want, strict=True))


test_on_ranks = each_check(__name__, 2)
