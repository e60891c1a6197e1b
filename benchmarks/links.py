"""Measure the rate at which a GPU sends to others in all-gather and reduce-scatter, by size.

    torchrun --nproc-per-node 2 -m benchmarks.links [--device cpu] [--megabytes 1,16,64,256,1024]

Use torchrun's options for several machines. GB/s are the bytes that each rank sends in a second,
``(n - 1) / n`` of the unsharded tensor; the time is the slowest rank's. Pass the rate of the
largest tensors to ``python -m float8lab scale``: as ``--nvlink`` if all ranks are on one machine,
and as ``--network``, divided by the ranks of a machine, if they are on several.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the ops
from torch import Tensor

from benchmarks import common

__all__ = ["main", "measure"]

functional = torch.ops._c10d_functional


def _time(step: Callable[[], object], device: torch.device) -> float:
    """Measure the milliseconds of a call among consecutive calls."""
    if device.type == "cuda":
        return common.time_wall(step, warm_up=3, samples=5, calls=10).median
    return common.time_wall(step, warm_up=1, samples=1, calls=1).median


def measure(size: int, device: torch.device) -> dict[str, float]:
    """Measure ms of each collective on a bfloat16 tensor of ``size`` bytes."""
    ranks, group = dist.get_world_size(), dist.distributed_c10d._get_default_group().group_name
    shard = torch.zeros(-(-size // 2 // ranks), dtype=torch.bfloat16, device=device)
    full_tensor = torch.zeros(ranks * shard.numel(), dtype=torch.bfloat16, device=device)
    found = {}
    steps: dict[str, Callable[[], object]] = {
        "all-gather": lambda: functional.wait_tensor(
            functional.all_gather_into_tensor(shard, ranks, group)
        ),
        "reduce-scatter": lambda: functional.wait_tensor(
            functional.reduce_scatter_tensor(full_tensor, "sum", ranks, group)
        ),
    }
    for name, step in steps.items():
        dist.barrier()
        slowest: Tensor = torch.tensor(_time(step, device), device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found[name] = slowest.item()
    return found


def main(argv: Sequence[str]) -> int:
    """Measure all sizes and print a markdown table on rank 0."""
    parser = common.new_parser(__doc__.splitlines()[0])
    parser.add_argument("--megabytes", default="1,16,64,256,1024", help="comma-separated")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(argv)
    device = common.start_ranks(options.device)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows = []
    for megabytes in map(int, options.megabytes.split(",")):
        for name, ms in measure(megabytes * 10**6, device).items():
            sent = megabytes * (ranks - 1) / ranks
            rows.append([name, megabytes, f"{ms:.3f}", f"{sent / ms:.1f}"])
    if rank == 0:
        facts = common.header(options.commit)
        print(common.describe_header(facts), flush=True)
        print(f"\n{ranks} ranks\n\n{common.table(['collective', 'MB', 'ms', 'GB/s'], rows)}")
        common.append_json(options.json, facts, rows)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
