"""Time GEMMs overlapped with the copies between GPUs that they need, and with collectives.

    torchrun --nproc-per-node 2 -m benchmarks.overlap [--tokens 16384,4096] [--recipe current]

The GEMMs are those of a Llama-3-8B layer with one shard of the weight on each rank. Some read rows
that are gathered (qkv, gate and up; dgrad of attention out and of down); the rows that all others
write are summed and scattered. Times are of consecutive calls on the slowest rank, the CPU's time
to queue them included. A GEMM is not timed if its result differs from that with collectives; for
two ranks the results must be equal bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import common, report
from benchmarks.models import LLAMA
from benchmarks.recipes import RECIPES
from benchmarks.report import Column, Row, Subject
from float8lab.distributed.overlap import Window, gather_mm, mm_scatter
from float8lab.ops import scaled_mm_op
from float8lab.tensor.blocks import quantize_blocks

__all__ = ["SUBJECT", "main", "rows"]

SAME_DB = 50.0
"""The least SQNR of sums that more than two ranks round in another order."""


def gemms(ranks: int) -> dict[str, tuple[int, int, bool]]:
    """Return N, K, and whether rows are gathered, by name of the GEMM."""
    D, qkv, F = LLAMA.D, LLAMA.D + 2 * LLAMA.D // LLAMA.H * LLAMA.G, LLAMA.F
    return {
        "qkv": (qkv // ranks, D, True),
        "gate and up": (2 * F // ranks, D, True),
        "attention out, dgrad": (D // ranks, D, True),
        "down, dgrad": (F // ranks, D, True),
        "attention out": (D, D // ranks, False),
        "down": (D, F // ranks, False),
        "qkv, dgrad": (D, qkv // ranks, False),
        "gate and up, dgrad": (D, 2 * F // ranks, False),
    }


def _operand(rows: int, K: int, spec: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, K, generator=generator, device=generator.device).bfloat16()
    q, scale, _ = quantize_blocks(x, spec)
    return q, scale.t().contiguous().t() if spec.block[0] == 1 and spec.block[1] > 1 else scale


def _steps(
    M: int, sizes: tuple[int, int, bool], name: str, device: torch.device
) -> dict[str, Callable[[], Tensor]]:
    """Time the GEMM alone, with collectives, and overlapped."""
    (N, K, gathers), plan = sizes, RECIPES[name]().linear
    group: Any = dist.group.WORLD
    left, right, fast = plan.fprop if plan.fprop is not None else (plan.x, plan.w, False)
    generator = torch.Generator(device).manual_seed(0)
    b = _operand(N, K, right, generator)
    if not gathers:
        generator.manual_seed(1 + dist.get_rank())
    a = _operand(M, K, left, generator)
    operands = [*a, *b]
    local_operands = operands
    if gathers:
        rows = M // group.size()
        local_rows = slice(group.rank() * rows, (group.rank() + 1) * rows)
        scale = a[1]
        if left.block[0] == 1:
            scale = scale[local_rows].contiguous()
            scale = scale.t().contiguous().t() if left.block[1] > 1 else scale
        local_operands = [a[0][local_rows].contiguous(), scale, *b]
    blocks, how = (left.block, right.block), (torch.bfloat16, fast, group.group_name)
    op: Any = gather_mm if gathers else mm_scatter

    def alone() -> Tensor:
        y: Tensor = scaled_mm_op(
            *operands[:2], blocks[0], *operands[2:], blocks[1], None, torch.bfloat16, fast
        )
        return y

    def overlapped() -> Tensor:
        y: Tensor = op(local_operands, *blocks, *how, [], *[False] * gathers)[0]
        return y

    def collective() -> Tensor:
        seen = Window.of_groups.get(group)
        Window.of_groups[group] = None  # this disables access to other ranks' memory
        y = overlapped()
        Window.of_groups[group] = seen
        return y

    return {"alone": alone, "overlapped": overlapped, "collective": collective}


def rows(options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Measure a row for each GEMM, case by case."""
    ranks = dist.get_world_size()
    for M in map(int, options.tokens.split(",")):
        for recipe in options.recipe or SUBJECT.recipes:
            case = f"{ranks} ranks, {M} tokens, {recipe}"
            for name, sizes in gemms(ranks).items():
                steps = _steps(M, sizes, recipe, device)
                y, want = steps["overlapped"](), steps["collective"]()
                db = common.sqnr(y, want)
                floor = float("inf") if ranks == 2 else SAME_DB
                worst = torch.tensor(min(db, 1e9) if db >= floor else -1.0, device=device)
                dist.all_reduce(worst, op=dist.ReduceOp.MIN)
                if worst.item() < 0:
                    yield Row(case, name, refusal=f"wrong: {db:.1f} dB")
                    continue
                yield Row(case, name, values={
                    f"{key} ms": common.time_slowest(step, device) for key, step in steps.items()
                })  # fmt: skip


def _speed_up(row: Row, base: Row | None) -> str | None:
    if "overlapped ms" not in row.values:
        return None
    return f"{row.values['collective ms'] / row.values['overlapped ms']:.2f}"


SUBJECT = Subject(
    "overlap",
    "GEMMs beside communication",
    __doc__,
    (
        Column("GEMM", cell=lambda row, base: row.name, always=True),
        Column("alone ms", 3),
        Column("collective ms", 3),
        Column("overlapped ms", 3),
        Column("x collective", cell=_speed_up),
    ),
    lambda setting, options: (),  # it runs by torchrun only: see main
    recipes=("current", "rowwise", "block"),
)


def main(argv: Sequence[str]) -> int:
    """Measure all GEMMs and print markdown tables on rank 0."""
    parser = common.new_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", default="16384,4096", help="comma-separated")
    parser.add_argument("--recipe", action="append", choices=RECIPES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(argv)
    device = common.start_ranks(options.device)
    complete = report.tell(SUBJECT, rows(options, device), options, rank=dist.get_rank())
    dist.destroy_process_group()
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
