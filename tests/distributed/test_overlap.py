"""GEMMs that overlap copies between ranks give the bytes of separate collectives."""

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


def group_with_window(ranks: Ranks) -> Any:
    """The process group, with a window of the memory of all ranks."""
    if ranks.device.type == "cpu":
        overlap.Window.of_groups[dist.group.WORLD] = FileWindow(ranks, 1 << 20)
    return dist.group.WORLD


def operands(ranks: Ranks, kind: str, K: int, seed: int) -> tuple[list[Any], list[Any]]:
    """``a``, which has ``ROWS`` rows of each rank, and ``b``; each as data, scales and block."""
    generator = torch.Generator().manual_seed(seed)
    quantized = []
    for rows, block in zip((ROWS * ranks.world, N), BLOCKS[kind], strict=True):
        x = torch.randn(rows, K, generator=generator).bfloat16().to(ranks.device)
        q, scale, *_ = quantize_blocks(x, Float8Spec(E4M3, block, "fp32"))
        quantized.append([q, column_major(scale) if block[0] == 1 else scale, block])
    return quantized[0], quantized[1]


def column_major(scale: Tensor) -> Tensor:
    """The scales in the layout that casts for GEMMs return."""
    return scale.t().contiguous().t()


def rows_of(a: list[Any], start: int, count: int) -> list[Any]:
    """Rows of an operand, as a rank has them that has no other rows."""
    q, scale, block = a
    if block[0] == 1:
        scale = column_major(scale[start : start + count])
    return [q[start : start + count].contiguous(), scale, block]


def gather_mm(group: Any, a: list[Any], b: list[Any], **options: Any) -> list[Tensor]:
    also, bias = options.get("also", []), options.get("bias", [])
    operands, blocks = [*a[:2], *b[:2], *bias], (a[2], b[2])
    name, keep = group.group_name, options.get("keep", True)
    return overlap.gather_mm(operands, *blocks, torch.bfloat16, False, name, also, keep)


def mm_scatter(group: Any, a: list[Any], b: list[Any], **options: Any) -> list[Tensor]:
    operands, blocks, also = [*a[:2], *b[:2]], (a[2], b[2]), options.get("also", [])
    return overlap.mm_scatter(operands, *blocks, torch.bfloat16, False, group.group_name, also)


def check_gather_mm_has_the_bytes_of_an_all_gather(
    ranks: Ranks, *, has_window: bool = True
) -> None:
    group = group_with_window(ranks) if has_window else dist.group.WORLD
    for kind in BLOCKS:
        for has_extras in (False, True):
            a, b = operands(ranks, kind, 256, 0)
            shards = [rows_of(a, ROWS * rank, ROWS) for rank in range(ranks.world)]
            bias = [torch.randn(N, device=ranks.device).bfloat16()] * has_extras
            extra = torch.full((3, 5), ranks.rank, dtype=torch.uint8, device=ranks.device)
            also = [extra, shards[ranks.rank][0].t().contiguous()] * has_extras
            y, full_data, scale, *gathered = gather_mm(
                group, shards[ranks.rank], b, also=also, bias=bias
            )
            want = [
                scaled_mm_op(*shard, *b, bias[0] if has_extras else None, torch.bfloat16, False)
                for shard in shards
            ]
            assert torch.equal(y, torch.cat(want))
            assert torch.equal(full_data.view(torch.uint8), a[0].view(torch.uint8))
            assert torch.equal(scale, a[1])
            assert scale.stride() == a[1].stride()
            if has_extras:
                assert gathered[0][:, 0, 0].tolist() == list(range(ranks.world))
                transposed = torch.stack([shard[0].t() for shard in shards])
                assert torch.equal(gathered[1].view(torch.uint8), transposed.view(torch.uint8))


def check_mm_scatter_has_the_sums_of_a_reduce_scatter(
    ranks: Ranks, *, cuts_rows: bool = True, has_window: bool = True
) -> None:
    group = group_with_window(ranks) if has_window else dist.group.WORLD
    for kind in BLOCKS:
        all_operands = [operands(ranks, kind, 256, r) for r in range(ranks.world)]
        also = [torch.full((7,), ranks.rank, device=ranks.device)] * cuts_rows
        total, *gathered = mm_scatter(group, *all_operands[ranks.rank], also=also)
        sums = []
        for rank, (a, b) in enumerate(all_operands):
            size = ROWS // 2 if cuts_rows and rank != ranks.rank else ROWS
            chunks = [rows_of(a, ROWS * ranks.rank + i, size) for i in range(0, ROWS, size)]
            gemms = [scaled_mm_op(*chunk, *b, None, torch.bfloat16, False) for chunk in chunks]
            sums.append(torch.cat(gemms))
        assert torch.equal(total, torch.stack(sums).sum(0))
        if cuts_rows:
            assert gathered[0][:, 0].tolist() == list(range(ranks.world))


def check_gemms_with_collectives_where_ranks_have_no_window(ranks: Ranks) -> None:
    overlap.Window.of_groups[dist.group.WORLD] = None
    check_gather_mm_has_the_bytes_of_an_all_gather(ranks, has_window=False)
    check_mm_scatter_has_the_sums_of_a_reduce_scatter(ranks, has_window=False)
    del overlap.Window.of_groups[dist.group.WORLD]


def check_compiled_gemms_equal_eager_ones(ranks: Ranks) -> None:
    group = group_with_window(ranks)
    a, b = operands(ranks, "block", 256, 0)
    local_rows = rows_of(a, ROWS * ranks.rank, ROWS)

    def gemms() -> list[Tensor]:
        also = [local_rows[0].view(torch.uint8) + 1]
        gathered = gather_mm(group, local_rows, b, also=also)
        return [*gathered[:4], mm_scatter(group, [gathered[1], gathered[2], a[2]], b)[0]]

    compiled = torch.compile(gemms, fullgraph=True)
    for compiled_result, eager_result in zip(compiled(), gemms(), strict=True):
        assert compiled_result.stride() == eager_result.stride()
        assert torch.equal(compiled_result.float(), eager_result.float())


def check_layers_that_overlap_equal_layers_that_do_not(ranks: Ranks) -> None:
    """Layers whose GEMMs overlap have the results of other layers, and gather nothing but sizes."""
    group = group_with_window(ranks)
    tokens = 128 * ranks.world  # a block of rows on each rank
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
            assert (gathers == (mode == "column")) == overlaps  # only sizes are gathered
            results.append([y, x.grad, layer.weight.grad, layer.bias.grad])
        torch.testing.assert_close(*results)


def check_mm_scatter_without_cut_rows(ranks: Ranks) -> None:
    small, overlap._SMALL_K = overlap._SMALL_K, 0
    try:
        check_mm_scatter_has_the_sums_of_a_reduce_scatter(ranks, cuts_rows=False)
    finally:
        overlap._SMALL_K = small


def check_calls_in_random_order_have_equal_results(ranks: Ranks) -> None:
    """No call reads what another call has written into its half of the window."""
    group = group_with_window(ranks)
    generator = torch.Generator().manual_seed(0)
    a, b = operands(ranks, "row", 64, 0)
    local_rows = rows_of(a, ROWS * ranks.rank, ROWS)
    gathered, summed = gather_mm(group, local_rows, b), mm_scatter(group, a, b)
    window = overlap.Window.of_groups[group]
    assert window is not None
    for index in torch.randint(0, 2, (40,), generator=generator).tolist():
        if index:
            assert torch.equal(gather_mm(group, local_rows, b)[0], gathered[0])
        else:
            assert torch.equal(mm_scatter(group, a, b)[0], summed[0])
        window.half = window.half if ranks.device.type == "cuda" else 0  # as after a captured graph
        window.is_captured = True


def check_captured_gemms_replay_between_eager_ones(ranks: Ranks) -> None:
    """The GEMMs of a graph replay between eager ones, any number of times."""
    if ranks.device.type == "cpu":
        return
    group = group_with_window(ranks)
    a, b = operands(ranks, "tensor", 256, 0)
    local_rows = rows_of(a, ROWS * ranks.rank, ROWS)

    def gemms() -> list[Tensor]:
        return [gather_mm(group, local_rows, b)[0], mm_scatter(group, a, b)[0]]

    want = gemms()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gemms()
    for eager in (False, True, True, False, False):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        for results in (captured, gemms() if eager else captured):
            assert all(torch.equal(*pair) for pair in zip(results, want, strict=True))


test_on_ranks = each_check(__name__, 2)
