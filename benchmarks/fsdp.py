"""Time FSDP2 training steps of Llama-3-8B decoder layers, sharded over the GPUs of one host.

    torchrun --nproc-per-node 4 -m benchmarks.fsdp
    torchrun --nproc-per-node 4 -m benchmarks.fsdp --variants bf16,gather --modes compile
    torchrun --nproc-per-node 4 -m benchmarks.fsdp --modes eager --one-thread
    torchrun --nproc-per-node 4 -m benchmarks.fsdp --variants bf16,gather --gradients fp32,fp8

Shards are fp32, compute is bf16, the optimizer is fused AdamW, and ``fully_shard`` wraps each layer
and the model. Each variant trains a new model. Its time is the median of ``--steps`` steps on the
slowest rank, its peak memory that of the rank that needs most. Gathered bytes are what a rank sends
in one step's all-gathers; reduced bytes are its inputs of reduce-scatters, or of all-to-alls of FP8
gradients, its own shard included. A variant gets no time if its first loss differs from bf16's by
more than ``SAME``, or if its loss falls by less than ``DESCENT`` times the fall of bf16's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import float8lab
from benchmarks import common, report
from benchmarks.report import Column, Row, Subject
from float8lab.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
)

SAME = 0.01
"""The largest relative deviation from bf16's loss before any update."""
DESCENT = 0.8
"""The fraction of bf16's descent that FP8 must reach: the task is to memorise random targets,
on which Adam's first steps follow the sign of every gradient."""

RECIPES = {
    "tensor": Float8CurrentScaling(),
    "delayed": DelayedScaling(),
    "row": Float8RowwiseScaling(),
    "block": Float8BlockScaling(),
}
VARIANTS = {
    "bf16": "bf16",
    "compute": "FP8 compute",
    "gather": "FP8 compute + FP8 all-gather",
    "stored": "FP8-stored weights, fp32 masters",
}


GRADIENTS = {
    "fp32": "",
    "fp8": ", FP8 gradients",
    "feedback": ", FP8 gradients with error feedback",
}


class Layer(nn.Module):
    """A Llama decoder layer.  B sequences, T positions, D width, H heads, G key-value heads."""

    def __init__(self, D: int, H: int, G: int, F_: int, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.heads, self.groups, self.head_dim = H, G, D // H
        self.attention_norm, self.mlp_norm = nn.RMSNorm(D), nn.RMSNorm(D)
        self.q = linear(D, D, bias=False)
        self.k = linear(D, G * self.head_dim, bias=False)
        self.v = linear(D, G * self.head_dim, bias=False)
        self.o = linear(D, D, bias=False)
        self.gate = linear(D, F_, bias=False)
        self.up = linear(D, F_, bias=False)
        self.down = linear(F_, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q = self.q(h)
        B, T, D = q.shape  # tensor parallel ranks have a shard of x, or of D
        q = _rotate(q.view(B, T, self.heads, self.head_dim)).transpose(1, 2)
        k = _rotate(self.k(h).view(B, T, self.groups, self.head_dim)).transpose(1, 2)
        v = self.v(h).view(B, T, self.groups, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(B, T, D))
        h = self.mlp_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return out


def _rotate(x: Tensor) -> Tensor:
    """Apply rotary position embedding to [B, T, heads, head dim]."""
    T, d = x.shape[1], x.shape[3]
    frequency = 500000.0 ** (-torch.arange(0, d, 2, device=x.device, dtype=torch.float32) / d)
    angle = torch.outer(torch.arange(T, device=x.device, dtype=torch.float32), frequency)
    cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class _Bytes(TorchDispatchMode):
    """Count the bytes that this rank gives to all-gathers and to reductions of gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "allgather" in func.name():
            self.gathered += args[1].nbytes
        elif func.namespace == "c10d" and "reduce_scatter" in func.name():
            self.reduced += args[1].nbytes
        elif func.namespace == "_c10d_functional" and "all_to_all" in func.name():
            self.reduced += args[0].nbytes
        return func(*args, **(kwargs or {}))


@dataclass
class Result:
    """The measurements of one variant."""

    milliseconds: float
    gigabytes: float
    gathered: int
    reduced: int
    first_loss: float
    loss: float


def make(
    variant: str, gradients: str, mode: str, options: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Make a sharded model, equal for every variant except for rounding, and its optimizer."""
    recipe = RECIPES[options.recipe]
    torch.manual_seed(0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    sizes = (options.dim, options.heads, options.groups, options.ffn)
    with torch.device(device):
        if variant == "stored":
            with float8lab.fp8_model_init(recipe=recipe, preserve_high_precision_init_val=True):
                linear = partial(float8lab.Linear, init_method=_init, device=device)
                layers = [Layer(*sizes, linear) for _ in range(options.layers)]
        else:
            layers = [Layer(*sizes, _plain_linear) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    if variant != "bf16":
        float8lab.convert_to_float8(model, recipe, fp8_all_gather=variant == "gather")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if mode == "compile":
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if gradients != "fp32":
        float8lab.distributed.fp8_reduce_scatter(model, error_feedback=gradients == "feedback")
    adamw: dict[str, Any] = {"lr": 1e-4, "fused": True}
    if variant == "stored":
        return model, float8lab.optim.MasterWeights(model.parameters(), torch.optim.AdamW, **adamw)
    return model, torch.optim.AdamW(model.parameters(), **adamw)


def run(
    variant: str, gradients: str, mode: str, options: argparse.Namespace, device: torch.device
) -> Result:
    """Train a new model for some steps and measure it."""
    model, optimizer = make(variant, gradients, mode, options, device)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(1, options.sequence, options.dim, device=device)
    target = torch.randn_like(x)

    def step() -> Tensor:
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first_loss = step()
    for _ in range(options.warmup - 1):
        step()
    sent = _Bytes()
    with sent:
        step()
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(options.steps):
        if not cuda:
            began = time.perf_counter()
            loss = step()
            times.append(1e3 * (time.perf_counter() - began))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    memory = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    slowest = torch.tensor(
        [statistics.median(times), memory, first_loss.item(), loss.item()],
        device=device,
    )
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    milliseconds, memory, first, last = slowest.tolist()
    return Result(milliseconds, memory, sent.gathered, sent.reduced, first, last)


def _init(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.02)


def _plain_linear(*args: Any, **kwargs: Any) -> nn.Linear:
    layer = nn.Linear(*args, **kwargs)
    with torch.no_grad():
        _init(layer.weight)
    return layer


def make_row(
    case: str, variant: str, gradients: str, result: Result, base: Result, tokens: int
) -> Row:
    """Format the row of a variant, which has no numbers if the loss is wrong."""
    name = VARIANTS[variant] + GRADIENTS[gradients]
    loss = f"loss {result.first_loss:.4f} > {result.loss:.4f}"
    same = abs(result.first_loss - base.first_loss) <= SAME * base.first_loss
    fell = result.first_loss - result.loss >= DESCENT * (base.first_loss - base.loss)
    if not (same and fell):
        return Row(case, name, refusal=f"wrong: {loss}")
    return Row(
        case,
        name,
        ms=(result.milliseconds,),
        baseline=variant == "bf16" and gradients == "fp32",
        values={
            "tokens/s a GPU": tokens / result.milliseconds * 1e3,
            "peak GB": result.gigabytes,
            "gathered MB": result.gathered / 1e6,
            "reduced MB": result.reduced / 1e6,
            "first loss": result.first_loss,
            "last loss": result.loss,
        },
    )


SUBJECT = Subject(
    "fsdp",
    "FSDP2",
    __doc__,
    (
        report.NAME,
        Column("ms a step", cell=lambda row, base: f"{row.median:.1f}" if row.median else None),
        Column("tokens/s a GPU", 0),
        report.SPEED_UP,
        Column("peak GB", 1),
        Column("gathered MB", 1),
        Column("reduced MB", 1),
        Column("first loss", 4),
        Column("last loss", 4),
    ),
    lambda setting, options: (),  # it runs by torchrun only: see main
)


def main(argv: Sequence[str]) -> int:
    """Run the variants and print a markdown table on rank 0."""
    parser = common.new_parser(__doc__.splitlines()[0])
    parser.add_argument("--variants", default=",".join(VARIANTS), help="comma-separated")
    parser.add_argument(
        "--gradients", default="fp32", help=f"how they are sent: {', '.join(GRADIENTS)}, or several"
    )
    parser.add_argument("--modes", default="compile,eager", help="comma-separated")
    parser.add_argument("--recipe", default="tensor", choices=list(RECIPES))
    common.add_sizes_of_layers(parser, layers=8, warmup=4, steps=10)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--one-thread", action="store_true", help="run backward in the thread that calls it"
    )
    options = parser.parse_args(argv)
    device = common.start_ranks(options.device)
    rank, world = dist.get_rank(), dist.get_world_size()
    facts: dict[str, str] = {}
    if rank == 0:
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        facts = {"time": now, **common.header(options.commit)}
        print(report.describe(facts), flush=True)
    for mode in options.modes.split(","):
        case = f"{world} ranks, {options.layers} layers, sequence {options.sequence}, {mode}"
        case += ", one thread" if options.one_thread else ""
        rows, base = [], None
        kinds = itertools.product(options.variants.split(","), options.gradients.split(","))
        for variant, gradients in kinds:
            with torch.autograd.set_multithreading_enabled(not options.one_thread):
                result = run(variant, gradients, mode, options, device)
            base = base or result
            report.free()
            rows.append(make_row(case, variant, gradients, result, base, options.sequence))
            if rank == 0:
                common.append_json(options.json, facts, [asdict(rows[-1])])
        if rank == 0:
            print(f"\n{case}\n\n{report.tabulate(SUBJECT.columns, rows)}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
