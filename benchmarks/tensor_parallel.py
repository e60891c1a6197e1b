"""Time forward and backward of a Llama-3-8B layer, tensor and sequence parallel on one host.

    torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel [--seconds 1] [--recipe delayed]

The baseline is the plain layer in bfloat16, sharded by DTensor and compiled. ``TransformerLayer``
is ours with ``tp_group`` and ``sequence_parallel``: alone, with ``keep_gathered``, and with that in
CUDA graphs. ``parallelized`` is the plain layer after ``convert_to_float8`` and
``parallelize_module`` with our styles, compiled. All have the same weights. Their shards of output,
input gradient and two weight gradients, without the residual stream, are compared with the plain
layer on one GPU, and may be at most ``MARGIN`` dB worse than the same recipe on one GPU.
Times are sustained: all candidates take turns, in the same order on all ranks, and a step's time is
the slowest rank's. Bytes gathered are those that a rank sends in the all-gathers of a step.
Communication is exposed while torch's profiler sees nothing else run, even if it only waits.
"""

from __future__ import annotations

import argparse
import copy
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

import float8lab
from benchmarks import common, report
from benchmarks.models import LLAMA, LayerSize, our_layer, plain_layer, train_step
from benchmarks.recipes import RECIPES
from benchmarks.report import Column, Row, Subject, Target
from float8lab.distributed.styles import Float8ColwiseParallel, Float8RowwiseParallel
from float8lab.recipes import Recipe

__all__ = ["SUBJECT", "exposed_ms", "main", "rows"]

BF16_DB = 30.0
"""The least SQNR of bfloat16 whose sums are added in another order."""
MARGIN = 1.0
"""The margin in dB: operands equal one GPU's, but another order of sums may change a rounding."""
COMMUNICATION = re.compile("nccl|memcpy|barrier|signal", re.IGNORECASE)
"""Matches GPU work that only moves data or waits for other ranks. Layers copy nothing else."""
OF_MODULE = "x module"
TARGETS: dict[str, tuple[Target, ...]] = {
    f"TransformerLayer, {name}": (
        Target("sustained ms", "<=", bound),
        Target("gathered x bf16", "<=", 0.5),
        Target("exposed %", "<=", 8.0),
    )
    for recipe, bound in (("delayed", 13.5), ("current", 14.3), ("rowwise", 14.8), ("block", 15.8))
    for name in (recipe, f"{recipe}, gathered once", f"{recipe}, gathered once, graphs")
}
for _name in RECIPES:
    TARGETS[f"parallelized, {_name}, compile"] = (Target(OF_MODULE, "<=", 1.05),)


class Candidate(NamedTuple):
    """A module on this rank, and the accuracy that it must have."""

    name: str
    make: Callable[[], nn.Module]
    by_sequence: bool
    """Whether its tensors are ``[S, B, D]``, else ``[B, S, D]``."""
    weights: tuple[str, str]
    """The module's names of the weights of the attention's and the MLP's output layers."""
    floor: dict[str, float]
    """The least SQNR of each output."""
    baseline: bool = False
    compiled: bool = False
    graphed: Recipe | None = None
    """The recipe under which CUDA graphs are recorded; None records none."""


# Modules


def _plan(column: type = ColwiseParallel, row: type = RowwiseParallel) -> dict[str, Any]:
    """Return styles of the linear layers; norms or our styles gather what column layers read."""
    plan: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate", "up"), column())
    return plan | dict.fromkeys(("o", "down"), row(output_layouts=Shard(1)))


def dtensor_layer(plain: Any, mesh: DeviceMesh) -> nn.Module:
    """Make the plain layer in bfloat16, sharded by ``parallelize_module``."""
    model = copy.deepcopy(plain)
    model.heads //= mesh.size()
    model.groups //= mesh.size()
    for norm in (model.attention_norm, model.mlp_norm):
        parallelize_module(norm, mesh, SequenceParallel())
        parallelize_module(norm, mesh, _gathered())
    parallelize_module(model, mesh, _plan())
    return model


def _gathered() -> PrepareModuleOutput:
    return PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Replicate())


def float8_layer(plain: Any, recipe: Recipe, mesh: DeviceMesh) -> nn.Module:
    """Make the plain layer, converted and sharded by our styles, which gather in FP8."""
    model = copy.deepcopy(plain)
    float8lab.convert_to_float8(model, recipe, strict=True)
    model.heads //= mesh.size()
    model.groups //= mesh.size()
    for norm in (model.attention_norm, model.mlp_norm):
        parallelize_module(norm, mesh, SequenceParallel())
    parallelize_module(model, mesh, _plan(Float8ColwiseParallel, Float8RowwiseParallel))
    return model


def module_layer(
    plain: Any, size: LayerSize, recipe: Recipe | None, group: Any, *, keep_gathered: bool = False
) -> nn.Module:
    """Make this rank's ``TransformerLayer``."""
    made = our_layer(
        plain, size, recipe,
        tp_group=group, tp_size=dist.get_world_size(group), sequence_parallel=True,
        set_parallel_mode=True, attn_input_format="sbhd",
    )  # fmt: skip
    layer: Any = made.module
    layer.set_tensor_parallel_group(group, keep_gathered=keep_gathered)
    return made


# Reference results


def _results(
    module: nn.Module, x: Tensor, dy: Tensor, weights: Sequence[str], steps: int
) -> dict[str, Tensor]:
    """Return output and gradients of the last equal step, without the residual stream."""
    x = x.detach().clone().requires_grad_()
    found = dict(module.named_parameters())
    for _ in range(steps):
        x.grad = None
        module.zero_grad()
        y = module(x)
        y.backward(dy)
    assert x.grad is not None, "required"
    grads = [found[_own_name(found, name)].grad for name in weights]
    local = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
    module.zero_grad()
    return {"y": y.detach() - x.detach(), "dX": x.grad - dy, "dWo": local[0], "dWdown": local[1]}


def _own_name(names: Iterable[str], wanted: str) -> str:
    return next(name for name in names if name.endswith(wanted))


def _shard(results: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """Return a rank's shards: of the sequence, and of the input features of the weights."""
    dims = {"y": 1, "dX": 1, "dWo": 1, "dWdown": 1}
    return {name: t.chunk(ranks, dims[name])[rank] for name, t in results.items()}


PLAIN = ("o.weight", "down.weight")
OURS = ("self_attention.proj.weight", "layernorm_mlp.fc2_weight")


# Counters


class _GatheredBytes(TorchDispatchMode):
    """Count bytes that this rank sends in all-gathers, with one copy for each other rank."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.total, self.others = 0, ranks - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if func.namespace == "_c10d_functional" and "all_gather" in name:
            sent = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.total += self.others * sum(t.nbytes for t in sent)
        elif name in ("float8lab::gather_mm", "float8lab::mm_scatter"):
            operands, (rows, _), also = args[0], args[1], args[6]
            of_a = (1 if rows == -1 else 2) * name.endswith("gather_mm")
            self.total += self.others * sum(t.nbytes for t in (*operands[:of_a], *also))
        return func(*args, **(kwargs or {}))


def gathered_bytes(step: Callable[[], object], ranks: int) -> int:
    """Count the bytes that this rank sends in the all-gathers of a step."""
    counting = _GatheredBytes(ranks)
    with counting, torch.autograd.set_multithreading_enabled(False):  # counts backward, too
        step()
    return counting.total


def exposed_ms(work: Iterable[tuple[float, float, bool]]) -> float:
    """Return for how long communication runs and nothing else.

    Args:
        work: the begin and end of each event on a GPU, and whether the event is communication.

    >>> exposed_ms([(0, 4, False), (3, 6, True), (7, 8, False), (7, 9, True)])
    3.0
    """
    moments = []
    for begin, end, moves in work:
        moments += [(begin, 1, moves), (end, -1, moves)]
    exposed, last, running = 0.0, 0.0, {True: 0, False: 0}
    for now, change, moves in sorted(moments):
        if running[True] and not running[False]:
            exposed += now - last
        running[moves] += change
        last = now
    return exposed


def exposed_percent(step: Callable[[], object], steps: int = 4) -> float:
    """Return the percentage of the time of consecutive steps that is exposed communication."""
    step()
    torch.cuda.synchronize()
    dist.barrier()
    work = [
        (event.time_range.start, event.time_range.end, bool(COMMUNICATION.search(event.name)))
        for event in common.gpu_events(step, steps)
    ]
    span = max(end for _, end, _ in work) - min(begin for begin, _, _ in work)
    return 100 * exposed_ms(work) / span


def _queued_ms(step: Callable[[], object]) -> float:
    """Return the least ms that the CPU needs to queue a step, of a few measurements."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - began))
    return min(found)


# Rows


def candidates(
    size: LayerSize, recipes: Sequence[str], mesh: DeviceMesh, plain: Any, data: Any
) -> Iterator[Candidate]:
    """Iterate over the baselines, and ours by recipe."""
    group, (x, dy, right) = mesh.get_group(), data
    rank, ranks = mesh.get_local_rank(), mesh.size()
    high = dict.fromkeys(right, BF16_DB)
    by_dtensor = partial(dtensor_layer, plain, mesh)
    yield Candidate("DTensor, bfloat16, eager", by_dtensor, False, PLAIN, high)
    yield Candidate(
        "DTensor, bfloat16, compile", by_dtensor, False, PLAIN, high, baseline=True, compiled=True
    )
    ours = partial(module_layer, plain, size, group=group)
    yield Candidate("TransformerLayer, bfloat16", partial(ours, None), True, OURS, high)
    for name in recipes:
        recipe = RECIPES[name]()
        alone = our_layer(plain, size, recipe)
        found = _shard(_results(alone, x, dy, OURS, steps=3), rank, ranks)
        del alone
        floor = {key: common.sqnr(found[key], right[key]) - MARGIN for key in right}
        title = f"TransformerLayer, {name}"
        yield Candidate(title, partial(ours, recipe), True, OURS, floor)
        once = partial(ours, recipe, keep_gathered=True)
        title += ", gathered once"
        yield Candidate(title, once, True, OURS, floor)
        yield Candidate(f"{title}, graphs", once, True, OURS, floor, graphed=recipe)
        make = partial(float8_layer, plain, recipe, mesh)
        title = f"parallelized, {name}, compile"
        yield Candidate(title, make, False, PLAIN, floor, compiled=True)


def _largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the maximum over ranks; NaN counts as infinite."""
    found = torch.tensor(values, device=device, dtype=torch.float64).nan_to_num_(nan=math.inf)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    listed: list[float] = found.tolist()
    return listed


def _agree(go: bool, device: torch.device) -> bool:
    """Return rank 0's decision on all ranks."""
    decision = torch.tensor([int(go)], device=device)
    dist.broadcast(decision, 0)
    return bool(decision.item())


def rows(size: LayerSize, options: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Measure all candidates."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh(device.type, (ranks,))
    plain = plain_layer(size, device, options.seed)
    x, dy = size.input(device, torch.Generator(device).manual_seed(options.seed))
    right = _shard(_results(plain, x, dy, PLAIN, steps=1), rank, ranks)
    case = f"{ranks} ranks, {size.describe()}, sequence parallel"
    case += ", one thread" if options.one_thread else ""
    steps: dict[str, Callable[[], object]] = {}
    found: list[Row] = []
    made = candidates(size, options.recipe or SUBJECT.recipes, mesh, plain, (x, dy, right))
    wanted = re.compile(options.only)
    for candidate in made:
        if not (candidate.baseline or wanted.search(candidate.name)):
            continue
        part, grad = (t.detach().chunk(ranks, 1)[rank] for t in (x, dy))
        if candidate.by_sequence:
            part, grad = part.transpose(0, 1), grad.transpose(0, 1)
        part, grad = part.contiguous(), grad.contiguous()
        try:
            row = _row(case, candidate, part, grad, right, steps, options)
        except Exception as error:  # one candidate's failure must not cost the others' numbers
            if isinstance(error, dist.DistError):
                raise
            first = (str(error).strip().splitlines() or [""])[0][:160]
            row = Row(case, candidate.name, refusal=f"failed: {type(error).__name__}: {first}")
        found.append(row)
        if rank == 0:
            print(f"tensor_parallel | {row.name}: {row.refusal or row.values}", file=sys.stderr)
    agree = partial(_agree, device=device)
    times = common.time_sustained(
        steps, seconds=options.seconds, rounds=options.rounds, agree=agree
    )
    yield from _with_times(found, times, device)


def _row(
    case: str,
    candidate: Candidate,
    x: Tensor,
    dy: Tensor,
    right: dict[str, Tensor],
    steps: dict[str, Callable[[], object]],
    options: argparse.Namespace,
) -> Row:
    """Measure a row without times, which are measured when all candidates are ready."""
    module, device = candidate.make(), x.device
    ranks = dist.get_world_size()
    leaf = x.detach().clone().requires_grad_()
    step = partial(train_step, module, leaf, dy)
    gathered = gathered_bytes(step, ranks)
    if candidate.compiled and not options.eager:
        module.compile()
    if candidate.graphed is not None and device.type == "cuda":
        _record(module, leaf, candidate.graphed)
    results = _results(module, x, dy, candidate.weights, steps=3)
    if candidate.by_sequence:
        results |= {name: results[name].transpose(0, 1) for name in ("y", "dX")}
    db = {name: common.sqnr(results[name], right[name]) for name in right}
    short = _largest([candidate.floor[name] - db[name] for name in right], device)
    db = {
        name: -least
        for name, least in zip(db, _largest([-v for v in db.values()], device), strict=True)
    }
    if max(short) > 0:
        wrong = [f"{n} {db[n]:.1f} dB" for n, by in zip(right, short, strict=True) if by > 0]
        refusal = f"wrong: {', '.join(wrong)}, farther off than on one GPU"
        return Row(case, candidate.name, sqnr_db=db, refusal=refusal)
    values = {"gathered MB": gathered / 1e6}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        values["peak GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9
        values["exposed %"] = exposed_percent(step)
        values["CPU ms"] = _queued_ms(step)
        values = dict(zip(values, _largest(list(values.values()), device), strict=True))
    steps[candidate.name] = step
    return Row(
        case, candidate.name, sqnr_db=db, baseline=candidate.baseline, values=values,
        targets=TARGETS.get(candidate.name, ()),
    )  # fmt: skip


def _record(module: Any, x: Tensor, recipe: Recipe) -> None:
    """Record the layer inside the autocast in which it will be called."""
    float8lab.make_graphed_callables(
        module.module, (x,), sample_kwargs=module.arguments, recipe=recipe
    )


def _with_times(
    rows: Sequence[Row], times: dict[str, common.Sustained], device: torch.device
) -> Iterator[Row]:
    """Add to rows the slowest rank's times and the values relative to other rows."""
    slowest = {name: tuple(_largest(one.timing.samples, device)) for name, one in times.items()}
    base = next((row.values["gathered MB"] for row in rows if row.baseline and row.values), None)
    for row in rows:
        if row.refusal is not None:
            yield row
            continue
        one, ms = times[row.name], slowest[row.name]
        values = {"sustained ms": common.Timing(ms).median, "MHz": one.mhz, "W": one.watts}
        if base:
            values["gathered x bf16"] = row.values["gathered MB"] / base
        module = f"TransformerLayer, {row.name.split(', ')[1]}"
        if row.name.startswith("parallelized") and module in slowest:
            values[OF_MODULE] = values["sustained ms"] / common.Timing(slowest[module]).median  # type: ignore[operator]
        known = {name: value for name, value in values.items() if value is not None}
        yield replace(row, ms=ms, values={**row.values, **known})


SUBJECT = Subject(
    "tensor_parallel",
    "Tensor parallel",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dWo", "dWdown"),
        *report.SUSTAINED,
        Column("gathered MB", 1),
        Column("gathered x bf16"),
        Column("exposed %", 1),
        Column("CPU ms", 1),
        Column("peak GB"),
        Column(OF_MODULE, 3),
        report.TARGET,
    ),
    lambda setting, options: (),  # it runs by torchrun only: see main
)


def main(argv: Sequence[str]) -> int:
    """Run the candidates and print a markdown table on rank 0."""
    parser = common.new_parser((__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--recipe", action="append", choices=RECIPES, help="default: all with GEMMs"
    )
    parser.add_argument("--only", default="", help="names of candidates, a regular expression")
    common.add_sizes_of_layers(parser, batch=LLAMA.batch, sequence=LLAMA.sequence)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a candidate's turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument(
        "--one-thread", action="store_true", help="run backward in the thread that calls it"
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(argv)
    device = common.start_ranks(options.device)
    size = LayerSize(
        options.dim, options.heads, options.groups, options.ffn, options.batch, options.sequence
    )
    with torch.autograd.set_multithreading_enabled(not options.one_thread):
        found = rows(size, options, device)
        complete = report.tell(SUBJECT, found, options, rank=dist.get_rank())
    report.free()  # NCCL waits for graphs that hold its collectives
    dist.destroy_process_group()
    return int(not complete)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
