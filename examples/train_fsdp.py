"""Train a GPT in FP8, sharded over processes by FSDP2, with weights gathered in FP8.

    torchrun --nproc-per-node 2 examples/train_fsdp.py                     # CPU, under a minute
    torchrun --nproc-per-node 4 examples/train_fsdp.py --device cuda --preset 124m

FP8 takes one line, ``float8lab.convert_to_float8``; the rest is FSDP2 as always. The text is random
words: the loss falls to what can be known about them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from gpt import GPT, PRESETS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import float8lab
from float8lab import recipes

RECIPES = {
    "current": recipes.Float8CurrentScaling(),
    "delayed": recipes.DelayedScaling(),
    "row": recipes.Float8RowwiseScaling(),
    "block": recipes.Float8BlockScaling(),
}


def tokens(rank: int, step: int, batch: int, length: int) -> torch.Tensor:
    """Sequences in which each token follows from the one before, with some surprises."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.empty(batch, length + 1, dtype=torch.int64)
    x[:, 0] = torch.randint(0, 64, (batch,), generator=generator)
    surprise = torch.rand(batch, length, generator=generator) < 0.1
    other = torch.randint(0, 64, (batch, length), generator=generator)
    for t in range(length):
        x[:, t + 1] = torch.where(surprise[:, t], other[:, t], (5 * x[:, t] + 7) % 64)
    return x


def main(argv: Sequence[str]) -> int:
    """Train and print the loss on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--recipe", default="current", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences a process")
    options = parser.parse_args(argv)

    cuda = options.device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    config = PRESETS[options.preset]
    model = GPT(config).to(device)
    report = float8lab.convert_to_float8(model, RECIPES[options.recipe], exclude=["lm_head"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None)
    mesh = init_device_mesh(options.device, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    if rank == 0:
        print(f"{world} processes on {options.device}, {str(report).splitlines()[-1]}", flush=True)
    start = time.perf_counter()
    for step in range(options.steps + 1):
        x = tokens(rank, step, options.batch, config.context).to(device)
        logits = model(x[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 10 == 0:
            print(f"step {step:4d}  loss {mean.item() / world:.4f}", flush=True)
    if rank == 0:
        print(f"{(time.perf_counter() - start) / (options.steps + 1):.3f} s a step", flush=True)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
