"""Reinforcement learning whose policy trains in FP8 and whose rollouts load its very bytes.

    python examples/rl_weight_sync.py                                  # one process, a CPU
    torchrun --nproc-per-node 2 examples/rl_weight_sync.py             # FSDP2, a shard for each

The policy starts from a block-FP8 checkpoint, stays stored in FP8, and is trained by
``float8lab.optim.MasterWeights`` to produce even tokens (REINFORCE). After each step all ranks
iterate over ``export_stream`` together: they gather one tensor at a time, and the first rank keeps
it for the sampling model, which the loader of Transformers fills. vLLM takes the same pairs; see
docs/rl_weight_sync.md. The model is built here with random weights, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from float8lab.integrations import export, export_stream, load_fp8
from float8lab.optim import MasterWeights

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def make_policy(folder: Path) -> Any:
    """Return the model of an FP8 checkpoint, ready to train; sharded if there are several ranks."""
    policy: Any = AutoModelForCausalLM.from_pretrained(folder)
    load_fp8(folder, policy)  # the checkpoint's bytes, however Transformers has loaded them here
    policy.requires_grad_(True)
    if dist.is_initialized():
        for layer in policy.model.layers:
            fully_shard(layer)
        fully_shard(policy)
    return policy


def sync(policy: torch.nn.Module, config: Any) -> Any:
    """Return a model for rollouts with the policy's bytes; None on all ranks except the first."""
    is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
    received = {}
    for name, tensor in export_stream(policy, "block-fp8"):  # a collective, so every rank calls it
        if is_first_rank:
            received[name] = tensor.clone()
    if not is_first_rank:
        return None
    copied_config = copy.deepcopy(config)  # Transformers reads the quantization from it
    return LlamaForCausalLM.from_pretrained(None, config=copied_config, state_dict=received)


def rollouts(model: Any, options: argparse.Namespace, step: int) -> torch.Tensor:
    """Return sampled continuations of one-token prompts, on every rank."""
    torch.manual_seed(step)
    shape = options.batch, options.length
    tokens = torch.zeros(shape, dtype=torch.long)
    if model is not None:
        prompts = torch.randint(1, SIZES["vocab_size"], (options.batch, 1))
        length = {"min_new_tokens": shape[1] - 1, "max_new_tokens": shape[1] - 1}
        tokens = model.generate(prompts, do_sample=True, pad_token_id=0, **length)
    if dist.is_initialized():
        dist.broadcast(tokens, 0)
    return tokens


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, and return the increase of the mean reward."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, default in (("steps", 20), ("batch", 32), ("length", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    options = parser.parse_args(arguments)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "checkpoint")
        torch.manual_seed(0)
        export(LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16), folder)
        policy, config = make_policy(folder), AutoConfig.from_pretrained(folder)
    optimizer = MasterWeights(policy.parameters(), torch.optim.AdamW, lr=2e-3)
    means = []
    for step in range(options.steps):
        tokens = rollouts(sync(policy, config), options, step)
        rewards = (tokens[:, 1:] % 2 == 0).float()
        means.append(float(rewards.mean()))
        logits = policy(input_ids=tokens[:, :-1]).logits.float()
        token_logits = logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
        loss = -(token_logits * (rewards - rewards.mean())).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if not dist.is_initialized() or dist.get_rank() == 0:
        stored = len(optimizer.masters)
        print(f"{stored} weights stored in FP8; mean reward {means[0]:.3f}, then {means[-1]:.3f}")
    return means[-1] - means[0]


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
