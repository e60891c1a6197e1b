"""Train a GPT in FP8 with Ray Train, lose a worker, and go on bit for bit.

    python examples/ray_train.py                                      # CPU, half a minute
    python examples/ray_train.py --device cuda --preset wide --workers 8 --storage FOLDER

FP8 takes one line, ``float8lab.convert_to_float8``; the rest is FSDP2 and distributed checkpoints
in Ray's TorchTrainer as usual. Every worker writes its shard of a checkpoint, and Ray joins the
shards. Worker 1 kills itself once; Ray then restarts all workers from the last checkpoint. Repeated
steps must give the same bytes of the loss, of every parameter and of every scale. ``--storage`` is
a folder that all machines see.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train_fsdp import RECIPES, SIZES, tokens

import float8lab


class Optimizer:
    """An optimizer's state by parameter names, as shards that any number of ranks can load."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


def digest(*states: dict[str, Any]) -> str:
    """Return a hash of the bytes of this rank."""
    hasher = hashlib.sha256()
    for state in states:
        for key, value in sorted(state.items()):
            local = value.to_local() if isinstance(value, DTensor) else value
            hasher.update(key.encode())
            hasher.update(local.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def train(options: dict[str, Any]) -> None:
    """The function of each worker; starts from the beginning or from the last checkpoint."""
    device, context = get_device(), ray.train.get_context()
    rank, world = context.get_world_rank(), context.get_world_size()
    mesh = init_device_mesh(device.type, (world,))
    torch.manual_seed(0)
    config = SIZES[options["preset"]]
    with device:
        model = GPT(config)
    float8lab.convert_to_float8(model, RECIPES[options["recipe"]], exclude=["lm_head"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaling = float8lab.nn.ScalingState(model)
    progress: dict[str, Any] = {
        "model": model,
        "optimizer": Optimizer(model, optimizer),
        "scaling": scaling,
        "step": 0,
    }

    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            dcp.load(progress, checkpoint_id=folder)
    for step in range(progress["step"], options["steps"]):
        if checkpoint is None and step == options["lost_at"] and rank == 1:
            ray.train.get_all_reported_checkpoints()  # waits until the last checkpoint is stored
            os.kill(os.getpid(), signal.SIGKILL)
        x = tokens(rank, step, options["batch"], config.context).to(device)
        loss = model(x[:, :-1], x[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        state_digest = digest(model.state_dict(), scaling.state_dict())
        record = {"step": step, "loss": mean.item(), "state": state_digest}
        with Path(options["folder"], f"rank-{rank}.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        if (step + 1) % options["every"] == 0:
            progress["step"] = step + 1
            with tempfile.TemporaryDirectory() as folder:
                dcp.save(progress, checkpoint_id=folder)
                ray.train.report(record, checkpoint=Checkpoint.from_directory(folder))


def compare(folder: Path, workers: int) -> tuple[int, int]:
    """Return how many step records are repeated, and how many of these differ; print the loss."""
    repeated = different = 0
    for rank in range(workers):
        records_by_step: dict[int, Any] = {}
        for line in (folder / f"rank-{rank}.jsonl").read_text().splitlines():
            record = json.loads(line)
            before = records_by_step.setdefault(record["step"], record)
            is_repeated = before is not record
            repeated += is_repeated
            different += record != before
            if rank == 0:
                print(
                    f"step {record['step']:4d}  loss {record['loss']:.4f}{'  again' * is_repeated}"
                )
    return repeated, different


def main(argv: Sequence[str]) -> int:
    """Train, and print whether repeated steps gave the same bytes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tiny", choices=list(SIZES))
    parser.add_argument("--recipe", default="delayed", choices=list(RECIPES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=2, help="sequences a worker")
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints")
    parser.add_argument("--lost-at", type=int, default=5, help="step in which worker 1 is lost")
    parser.add_argument("--storage", type=Path, help="a new folder by default")
    options = parser.parse_args(argv)
    if not 0 < options.every < options.lost_at < options.steps:
        parser.error("--every must be less than --lost-at, and that less than --steps")

    folder = options.storage or Path(tempfile.mkdtemp(prefix="float8lab-ray-"))
    folder.mkdir(parents=True, exist_ok=True)
    if not ray.is_initialized() and "RAY_ADDRESS" not in os.environ:
        ray.init(include_dashboard=False, log_to_driver=False)  # a cluster on this machine
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(options), "folder": str(folder), "storage": None},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.device == "cuda"),
        run_config=RunConfig(
            name="float8lab",
            storage_path=str(folder.resolve()),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    repeated, different = compare(folder, options.workers)
    print(f"{result.checkpoint}")
    print(f"{repeated} records of repeated steps, {different} of them with other bytes")
    return int(not repeated or bool(different))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
