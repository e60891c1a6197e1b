"""Train a GPT as Megatron-LM does: tensor, sequence and pipeline parallel, in FP8.

    torchrun --nproc-per-node 4 examples/megatron_style.py                 # CPU, a minute
    torchrun --nproc-per-node 1 examples/megatron_style.py --tp 1 --pp 1   # the same losses
    torchrun --nproc-per-node 8 examples/megatron_style.py --tp 4 --device cuda --preset wide

A rank has some of the layers (PP), a shard of the weights of each layer (TP), and a shard of the
tokens between their GEMMs (SP); the remaining ranks share the batch (DP). FP8 operands have the
bytes that one GPU would have cast, so losses differ from one GPU's only by the order of sums.
``--save`` and ``--resume`` name a distributed checkpoint, which any mesh can read. The text is
random words: the loss falls to their entropy.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPTConfig, sinusoids
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from train_fsdp import RECIPES, SIZES, tokens

import float8lab


class Ranks:
    """This rank's place in the mesh, and the groups of ranks that it works with."""

    def __init__(self, device: str, tp: int, pp: int) -> None:
        dp = dist.get_world_size() // (tp * pp)
        mesh = init_device_mesh(device, (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
        self.device = torch.device(device)
        self.pp, self.dp, self.tp = (mesh[name] for name in ("pp", "dp", "tp"))
        self.stage = mesh["dp", "tp"]._flatten("stage")
        """The ranks with the same layers, over which delayed scaling reduces amaxes."""


class Stage(nn.Module):
    """Some layers of a GPT, with the names that they have in the whole GPT.

    S positions, B sequences, D width, V vocabulary, R tensor-parallel ranks. Between layers the
    activations are ``[S / R, B, D]``. Each layer has its own seed, which gives equal weights on
    every mesh.
    """

    def __init__(self, config: GPTConfig, layers: range, ranks: Ranks, recompute: bool) -> None:
        super().__init__()
        parallel: dict[str, Any] = {"tp_group": ranks.tp.get_group(), "sequence_parallel": True}
        self.recompute = recompute
        self.first, self.last = layers.start == 0, layers.stop == config.n_layer
        length, rank = config.context // ranks.tp.size(), ranks.tp.get_local_rank()
        self.local_positions = slice(rank * length, (rank + 1) * length)
        if self.first:
            torch.manual_seed(0)
            self.tokens = nn.Embedding(config.vocab_size, config.dim)
            nn.init.normal_(self.tokens.weight, std=0.02)
            # Its gradient is of this rank's positions only, and must be summed over the
            # tensor-parallel ranks.
            self.tokens.weight.sequence_parallel = True  # type: ignore[attr-defined]
            positions = 0.02 * sinusoids(config.context, config.dim)[self.local_positions, None]
            self.register_buffer("positions", positions, persistent=False)
        self.layers = nn.ModuleDict()
        for layer in layers:
            torch.manual_seed(1 + layer)
            self.layers[str(layer)] = float8lab.TransformerLayer(
                config.dim, 4 * config.dim, config.n_head, hidden_dropout=0.0,
                attention_dropout=0.0, layer_number=layer + 1, set_parallel_mode=True, **parallel,
            )  # fmt: skip
        if self.last:
            torch.manual_seed(1 + config.n_layer)
            self.norm = float8lab.LayerNorm(config.dim, sequence_parallel=True)
            self.lm_head = float8lab.Linear(
                config.dim, config.vocab_size, bias=False, parallel_mode="column", **parallel
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[B, S]`` tokens or ``[S / R, B, D]`` to the latter or logits ``[S, B, V / R]``."""
        if self.first:
            x = self.tokens(x.t()[self.local_positions]) + self.positions
        for layer in self.layers.values():
            x = float8lab.checkpoint(layer, x) if self.recompute else layer(x)
        if self.last:
            with float8lab.autocast(enabled=False):
                x = self.lm_head(self.norm(x))
        return x


class Progress:
    """All state that a run resumes from, as tensors that know which shard they are."""

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer, ranks: Ranks) -> None:
        self.stage, self.optimizer, self.ranks = stage, optimizer, ranks
        for parameter in stage.parameters():  # the state that the first step would create
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros(()), **moments}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.stage.named_parameters():
            state = self.optimizer.state[parameter]
            for key, tensor in {"weight": parameter.detach(), **state}.items():
                if tensor.ndim and getattr(parameter, "tensor_model_parallel", False):
                    dim = Shard(parameter.partition_dim)  # type: ignore[attr-defined]
                    tensor = DTensor.from_local(tensor, self.ranks.tp, [dim], run_check=False)
                yield f"{name}/{key}", tensor

    def state_dict(self) -> dict[str, Tensor]:
        """Views of the parameters and of the optimizer's state."""
        return dict(self._tensors())

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Do nothing more: a distributed checkpoint is read into the views."""


def loss_of(logits: Tensor, targets: Tensor, *, group: Any) -> Tensor:
    """The mean loss of ``[S, B, V / R]`` logits and ``[B, S]`` targets, in float32."""
    loss: Tensor = float8lab.parallel_cross_entropy(
        logits.float(), targets.t().contiguous(), reduce_loss=True, dist_process_group=group
    )
    return loss


def train(options: argparse.Namespace, ranks: Ranks) -> None:
    """Train; the ranks that compute the loss print it once."""
    config, recipe = SIZES[options.preset], RECIPES.get(options.recipe)
    count, index = ranks.pp.size(), ranks.pp.get_local_rank()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32  # of activations
    layer_bounds = [config.n_layer * i // count for i in range(count + 1)]
    with ranks.device:  # otherwise initialising a large model on the CPU takes long
        stage = Stage(
            config, range(layer_bounds[index], layer_bounds[index + 1]), ranks, options.recompute
        )
        shape = config.context // ranks.tp.size(), options.micro, config.dim
        x = torch.zeros(options.micro, config.context, dtype=torch.int64)
        activations = torch.zeros(shape, dtype=dtype, requires_grad=True)
        shape = config.context, options.micro, config.vocab_size // ranks.tp.size()
        logits = torch.zeros(shape, dtype=dtype, requires_grad=True)
    pipeline = PipelineStage(
        stage, index, count, ranks.device, group=ranks.pp.get_group(),
        input_args=x if stage.first else activations,
        output_args=logits if stage.last else activations,
    )  # fmt: skip
    schedule = Schedule1F1B(
        pipeline, options.batch // options.micro,
        loss_fn=partial(loss_of, group=ranks.tp.get_group()),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)
    group = ranks.stage.get_group()
    state: dict[str, Any] = {
        "run": Progress(stage, optimizer, ranks),
        "scaling": float8lab.nn.ScalingState(stage, recipe, group),
        "step": 0,
    }
    if options.resume:
        dcp.load(state, checkpoint_id=options.resume)
    for step in range(state["step"], options.steps):
        text = tokens(ranks.dp.get_local_rank(), step, options.batch, config.context)
        text = text.to(ranks.device)
        losses: list[Tensor] = []
        with (
            torch.autocast(ranks.device.type, dtype, enabled=dtype != torch.float32),
            float8lab.autocast(recipe is not None, recipe=recipe, amax_reduction_group=group),
        ):
            schedule.step(
                *([text[:, :-1].contiguous()] if stage.first else []),
                target=text[:, 1:].contiguous() if stage.last else None,
                losses=losses, return_outputs=False,
            )  # fmt: skip
        float8lab.distributed.reduce_sequence_parallel_gradients(stage, ranks.tp.get_group())
        for gradient in (p.grad for p in stage.parameters() if p.grad is not None):
            dist.all_reduce(gradient, group=ranks.dp.get_group())
            gradient /= ranks.dp.size()
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            mean = torch.stack(losses).mean().detach()
            dist.all_reduce(mean, group=ranks.dp.get_group())
            if ranks.stage.get_local_rank() == 0:
                print(f"step {step:4d}  loss {mean.item() / ranks.dp.size():.7f}", flush=True)
        if options.save and step + 1 == options.save_at:
            dcp.save({**state, "step": step + 1}, checkpoint_id=options.save)


def main(argv: Sequence[str]) -> int:
    """Train on the ranks that torchrun has started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=2, help="pipeline stages")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tiny", choices=list(SIZES))
    parser.add_argument("--recipe", default="delayed", choices=["none", *RECIPES])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a data-parallel rank")
    parser.add_argument("--micro", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--recompute", action="store_true", help="checkpoint each layer")
    parser.add_argument("--save", help="folder of the checkpoint to write")
    parser.add_argument("--save-at", type=int, default=10, help="after how many steps")
    parser.add_argument("--resume", help="folder of the checkpoint to read")
    options = parser.parse_args(argv)
    world = int(os.environ["WORLD_SIZE"])
    if world % (options.tp * options.pp):
        parser.error(f"--tp times --pp must divide the {world} processes")
    if options.batch % options.micro:
        parser.error("--micro must divide --batch")

    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    train(options, Ranks(options.device, options.tp, options.pp))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
