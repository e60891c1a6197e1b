"""Train a GPT sharded over processes by FSDP2, in bfloat16 and in FP8, and compare the two.

    torchrun --nproc-per-node 2 examples/train_fsdp.py                     # CPU, a minute
    torchrun --nproc-per-node 4 examples/train_fsdp.py --device cuda --preset wide

FP8 takes one line, ``float8lab.convert_to_float8``; the rest is FSDP2 as usual. Both runs gather
parameters in bfloat16, except that the FP8 run gathers its converted weights in FP8. The text is
random words: the loss falls to their entropy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from gpt import GPT, PRESETS, GPTConfig
from savings import Cost, Meter, counted, savings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import float8lab
from float8lab import recipes

SIZES = {**PRESETS, "wide": GPTConfig(context=2048, n_layer=8, n_head=32, dim=4096)}
"""Only ``wide`` has layers that are large enough for FP8 to be faster on a GPU."""
RECIPES: dict[str, recipes.Recipe] = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "row": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(),
}


def tokens(rank: int, step: int, batch: int, length: int) -> torch.Tensor:
    """Sequences in which each token follows from the one before, except for some surprises."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.empty(batch, length + 1, dtype=torch.int64)
    x[:, 0] = torch.randint(0, 64, (batch,), generator=generator)
    surprise = torch.rand(batch, length, generator=generator) < 0.1
    random_tokens = torch.randint(0, 64, (batch, length), generator=generator)
    for t in range(length):
        x[:, t + 1] = torch.where(surprise[:, t], random_tokens[:, t], (5 * x[:, t] + 7) % 64)
    return x


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that this rank receives from all-gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d" and "allgather" in func.name():
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def train(
    options: argparse.Namespace, name: str, recipe: recipes.Recipe | None, mesh: DeviceMesh
) -> Cost:
    """Train once; rank 0 prints the loss. Return what a step costs this rank."""
    rank, world = mesh.get_rank(), mesh.size()
    device = (
        torch.device("cuda", torch.cuda.current_device()) if options.cuda else torch.device("cpu")
    )
    meter = Meter(device)
    torch.manual_seed(0)
    config = SIZES[options.preset]
    with device:  # otherwise initialising a large model on the CPU takes long
        model = GPT(config)
    if recipe is not None:
        float8lab.convert_to_float8(model, recipe, exclude=["lm_head"])
        if rank == 0:
            print(float8lab.conversion_report(model).summary, flush=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-3 if config.dim < 1024 else 1e-4, fused=True
    )
    for step in range(options.steps + 1):
        x = tokens(rank, step, options.batch, config.context).to(device)
        # The last step is counted and not timed: the counter inspects every op.
        gathered = GatheredBytes()
        with meter if step < options.steps else gathered:
            logits = model(x[:, :-1]).float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 10 == 0:
            print(f"{name}  step {step:4d}  loss {mean.item() / world:.4f}", flush=True)
    cost = meter.cost({"gathered a step": gathered.bytes})
    sizes = counted(model, x[:, :-1])
    return Cost(cost.seconds, {**sizes, **cost.sizes})


def main(argv: Sequence[str]) -> int:
    """Train twice; rank 0 prints what FP8 saved on it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tiny", choices=list(SIZES))
    parser.add_argument("--recipe", default="current", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4, help="sequences a process")
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error("--steps must be 1 or more")

    options.cuda = options.device == "cuda"
    dist.init_process_group("nccl" if options.cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if options.cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh(options.device, (world,))
    if rank == 0:
        print(f"{world} processes on {options.device}", flush=True)
    bf16 = train(options, "bf16", None, mesh)
    fp8 = train(options, "FP8 ", RECIPES[options.recipe], mesh)
    if rank == 0:
        print(f"\none process of {world}:\n{savings(bf16, fp8, options.device)}", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
