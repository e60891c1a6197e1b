"""Time attention of one long sequence on several GPUs, for each way to communicate.

    torchrun --nproc-per-node 2 -m benchmarks.context_parallel [--positions 32768,131072]

A causal ``DotProductAttention`` has 32 query heads and 8 key and value heads, each of 128 features.
Its tokens are sharded over the ranks in the balanced order; FP8 is under current scaling. ``ideal``
is one GPU's time for as much work without communication: the full sequence with ``1 / R`` of the
heads. A result is compared with one GPU's in bfloat16 before it is timed. Times are of consecutive
calls on the slowest rank: the median of rounds in which all candidates take turns.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import float8lab
from benchmarks import common, report
from benchmarks.report import Column, Row, Subject
from float8lab.distributed import shard_sequence
from float8lab.recipes import Float8CurrentScaling

__all__ = ["SUBJECT", "AttentionHeads", "main", "rows"]

FLOORS_DB = {"bf16": 35.0, "current": 24.0}
"""The least SQNR by precision: bfloat16 differs in the order of sums, FP8 in its e4m3 operands."""
FORWARD, BOTH = "forward ms", "forward, backward ms"
COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
ROUNDS = 3


class AttentionHeads(NamedTuple):
    """The numbers of query heads and of key and value heads, and the size of a head."""

    H: int = 32
    G: int = 8
    D: int = 128


HEADS = AttentionHeads()


def _tensors(positions: int, heads: AttentionHeads, device: torch.device) -> list[Tensor]:
    """Make query, key, value and the gradient of the output, which are equal on all ranks."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(n, heads.D) for n in (heads.H, heads.G, heads.G)] + [(heads.H * heads.D,)]
    return [
        torch.randn(positions, 1, *shape, generator=generator, device=device).bfloat16()
        for shape in shapes
    ]


def _module(heads: AttentionHeads, device: torch.device, comm_type: str | None = None) -> Any:
    module = float8lab.DotProductAttention(heads.H, heads.D, num_gqa_groups=heads.G).to(device)
    if comm_type == "a2a+p2p":
        size = dist.get_world_size()
        mesh = init_device_mesh(device.type, (2, size // 2), mesh_dim_names=("p2p", "a2a"))
        groups = [mesh["a2a"].get_group(), mesh["p2p"].get_group()]
        module.set_context_parallel_group(groups, cp_comm_type=comm_type)
    elif comm_type is not None:
        module.set_context_parallel_group(dist.group.WORLD, cp_comm_type=comm_type)
    return module


def _step(module: Any, tensors: list[Tensor], precision: str, *, backward: bool) -> list[Tensor]:
    """Return the output and, with ``backward``, the gradients of query, key and value."""
    *leaves, dout = tensors
    leaves = [x.detach().requires_grad_(backward) for x in leaves]
    recipe = Float8CurrentScaling(fp8_dpa=True)
    with float8lab.autocast(enabled=precision != "bf16", recipe=recipe):
        y = module(*leaves)
    return [y.detach(), *(torch.autograd.grad(y, leaves, dout) if backward else ())]


def rows(
    positions: int, options: argparse.Namespace, device: torch.device, heads: AttentionHeads = HEADS
) -> Iterator[Row]:
    """Measure a row for each way to communicate and precision, and the ideal rows."""
    ranks, tensors = dist.get_world_size(), _tensors(positions, heads, device)
    right = _step(_module(heads, device), tensors, "bf16", backward=True)
    shards = [shard_sequence(x, dist.group.WORLD) for x in (*tensors, *right)]
    local_tensors, right = shards[: len(tensors)], shards[len(tensors) :]
    narrow = AttentionHeads(heads.H // ranks, max(heads.G // ranks, 1), heads.D)
    for precision in options.precision or FLOORS_DB:
        case = f"{ranks} ranks, {positions} positions, {precision}"
        ideal = partial(_step, _module(narrow, device), _tensors(positions, narrow, device))
        steps = {"ideal": ideal}
        decibels: dict[str, dict[str, float]] = {"ideal": {}}
        for name in options.comm_type or COMM_TYPES:
            step = partial(_step, _module(heads, device, name), local_tensors)
            got = step(precision, backward=True)
            worst = torch.tensor(min(map(common.sqnr, got, right)), device=device)
            dist.all_reduce(worst, op=dist.ReduceOp.MIN)
            if worst.item() >= FLOORS_DB[precision]:
                steps[name], decibels[name] = step, {"worst": worst.item()}
            else:
                yield Row(case, name, refusal=f"wrong: {worst.item():.1f} dB")
        for name, values in _times(steps, precision, positions, device).items():
            yield Row(case, name, values=values, sqnr_db=decibels[name], baseline=name == "ideal")


def _times(
    steps: Mapping[str, Callable[..., list[Tensor]]], precision: str, positions: int,
    device: torch.device,
) -> dict[str, dict[str, float]]:  # fmt: skip
    """Measure ms of each candidate's forward, and forward and backward, on the slowest rank."""
    few = device.type != "cuda"
    samples: dict[str, dict[str, list[float]]] = {name: {FORWARD: [], BOTH: []} for name in steps}
    for _ in range(1 if few else ROUNDS):
        for (name, step), title in itertools.product(steps.items(), (FORWARD, BOTH)):
            timed = common.time_slowest(
                partial(step, precision, backward=title == BOTH),
                device,
                warm_up=1,
                samples=1,
                calls=max(1, 2**19 // positions),
            )
            samples[name][title].append(timed)
    return {
        name: {title: statistics.median(timed) for title, timed in by_title.items()}
        for name, by_title in samples.items()
    }


def _relative_to_ideal(title: str, row: Row, base: Row | None) -> str | None:
    if base is None or title not in row.values:
        return None
    return f"{100 * base.values[title] / row.values[title]:.1f} %"


SUBJECT = Subject(
    "context_parallel",
    "Context parallelism",
    __doc__,
    (
        Column("communication", cell=lambda row, base: row.name, always=True),
        Column(FORWARD, 2),
        Column("of ideal", cell=partial(_relative_to_ideal, FORWARD)),
        Column(BOTH, 2),
        Column("of ideal, both", cell=partial(_relative_to_ideal, BOTH)),
        report.decibels("worst result"),
    ),
    lambda setting, options: (),  # it runs by torchrun only: see main
    recipes=("current",),
)


def main(argv: Sequence[str]) -> int:
    """Measure all cases and print markdown tables on rank 0."""
    parser = common.new_parser((__doc__ or "").splitlines()[0])
    parser.add_argument("--positions", default="32768,131072", help="comma-separated")
    parser.add_argument("--precision", action="append", choices=FLOORS_DB)
    parser.add_argument("--comm-type", action="append", choices=COMM_TYPES)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(argv)
    device, sizes = common.start_ranks(options.device), map(int, options.positions.split(","))
    found = itertools.chain.from_iterable(rows(positions, options, device) for positions in sizes)
    complete = report.tell(SUBJECT, found, options, rank=dist.get_rank())
    dist.destroy_process_group()
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
