"""Fine-tune a Llama with LoRA on a frozen base in bfloat16, and on one stored in FP8; compare.

    python examples/finetune_lora.py                                # CPU, seconds
    python examples/finetune_lora.py --device cuda --preset 8b      # one large GPU

FP8 takes one line, ``float8lab.convert_to_float8(..., freeze_weights=True)``. The adapters are
those of stock PEFT, in float32, under ``torch.autocast`` in bfloat16 as in the Trainer of
Transformers. The model is built from its configuration with random weights, and the text is
Python's manual, so nothing is downloaded. FP8 saves memory everywhere, and time in large layers on
a GPU that has it; on a CPU it is emulated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import torch
from peft import LoraConfig, get_peft_model
from savings import Cost, Meter, savings
from text import docstrings, manual
from train_fsdp import RECIPES
from transformers import LlamaConfig, LlamaForCausalLM

import float8lab
from float8lab.inspect import memory_report

VOCABULARY = 256
"""Tokens are bytes."""
SIZES = {
    "tiny": {
        "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
"""``8b`` has 8 of the 32 layers of a Llama with 8 billion parameters."""
LENGTH = {"tiny": 64, "8b": 2048}
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def batches(options: argparse.Namespace) -> list[torch.Tensor]:
    """Return the same sequences of the text for every run."""
    text = "\n\n".join(manual() or docstrings(Path(sysconfig.get_path("stdlib")))).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(options.device)
    length = LENGTH[options.preset]
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(data) - length, (options.steps, options.batch), generator=generator)
    return [torch.stack([data[i : i + length] for i in row.tolist()]) for row in starts]


def tune(
    options: argparse.Namespace, recipe: float8lab.recipes.Recipe | None
) -> tuple[Cost, float]:
    """Tune once; return the cost of a step and the mean loss of the last quarter."""
    config = LlamaConfig(
        **SIZES[options.preset], vocab_size=VOCABULARY, tie_word_embeddings=False,
        max_position_embeddings=LENGTH[options.preset], use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(options.device):
        model: Any = LlamaForCausalLM(config).to(torch.bfloat16)
    if recipe is not None:
        float8lab.convert_to_float8(model, recipe, exclude=["lm_head"], freeze_weights=True)
        print(float8lab.conversion_report(model).summary)
    lora = LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=TARGETS)
    model = get_peft_model(model, lora)
    adapter_parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapter_parameters, lr=options.lr)
    meter = Meter(options.device)
    losses = []
    data = batches(options)
    for tokens in data:
        with meter:
            with torch.autocast(options.device, torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())

    peak = meter.peak()
    with torch.autocast(options.device, torch.bfloat16):
        memory = memory_report(model, {"input_ids": data[0]}, optimizer=optimizer)
    adapters = sum(layer.weights for layer in memory.layers if ".lora_" in layer.name)
    sizes = {
        "base": memory.sum("weights") + memory.sum("scales") - adapters,
        "adapters": adapters,
        "optimizer": memory.sum("optimizer"),
        "saved for backward": memory.sum("activations"),
    }
    last_quarter = losses[-max(1, len(losses) // 4) :]
    return Cost(meter.cost().seconds, {**sizes, **peak}), statistics.mean(last_quarter)


def main(argv: Sequence[str]) -> int:
    """Tune twice and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tiny", choices=list(SIZES))
    parser.add_argument("--recipe", default="current", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message=".*is deprecated", module="transformers")

    base, base_loss = tune(options, None)
    fp8, fp8_loss = tune(options, RECIPES[options.recipe])
    print(savings(base, fp8, options.device))
    print(f"loss in the last quarter: bf16 {base_loss:.4f}, FP8 {fp8_loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
