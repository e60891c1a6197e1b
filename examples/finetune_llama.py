"""Fine-tune a Llama with Transformers' Trainer, in bfloat16 and in FP8, and compare the two.

    python examples/finetune_llama.py                                   # CPU, seconds
    python examples/finetune_llama.py --device cuda --preset 1b         # one large GPU
    python examples/finetune_llama.py --device cuda --model FOLDER --output OUT
    accelerate launch --config_file examples/accelerate/fsdp2.yaml examples/finetune_llama.py \\
        --device cuda --preset 1b                                       # two large GPUs

FP8 takes one argument of the Trainer, ``callbacks=[Float8Callback(...)]``. The text is Python's own
manual. ``--model`` names the model, a folder or a name on the hub, with its tokenizer. Without it
the model has random weights in a preset's shape, and tokens are bytes. FP8 saves time in large
layers on a GPU that has it; on a CPU it is emulated, exactly but slowly.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from savings import Cost, Meter, counted, savings
from text import docstrings, manual
from train_fsdp import RECIPES

from float8lab.integrations.transformers import Float8Callback

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 48, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "8b-4-layers": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
"""Shapes of Llama 3.2 1B and of four layers of Llama 3 8B, with a vocabulary of bytes."""


class Clock(transformers.TrainerCallback):
    """Times each step, optimizer included, as a user of the Trainer waits for it."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.meter.__enter__()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.meter.__exit__()


def model_and_tokens(options: argparse.Namespace) -> tuple[Any, list[int]]:
    """Return the model to train, with float32 weights, and the tokens to train on."""
    text = "\n\n".join(manual() or docstrings(Path(sysconfig.get_path("stdlib"))))
    length = options.context * options.batch * options.steps
    transformers.set_seed(0)
    if options.model is None:
        config = transformers.LlamaConfig(
            vocab_size=256, max_position_embeddings=options.context, tie_word_embeddings=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, **PRESETS[options.preset],
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config), list(text.encode()[:length])
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    return model, tokenizer(text[: 8 * length])["input_ids"][:length]


def train(options: argparse.Namespace, fp8: Float8Callback | None) -> tuple[float, Cost]:
    """Train once; return the loss at the end and the cost."""
    meter = Meter(options.device)
    model, tokens = model_and_tokens(options)
    rows = torch.tensor(tokens).split(options.context)
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                bf16=True,  # autocast, also for everything that is not in FP8
                use_cpu=options.device == "cpu",
                max_steps=options.steps,
                per_device_train_batch_size=options.batch,
                learning_rate=options.lr,
                lr_scheduler_type="constant",
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=data,
            callbacks=[Clock(meter), *([] if fp8 is None else [fp8])],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    cost = meter.cost()  # before anything else runs
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    batch = torch.stack(rows[: options.batch]).to(model.device)
    optimizer: Any = trainer.optimizer
    sizes = counted(
        model, {"input_ids": batch, "labels": batch}, optimizer=optimizer.optimizer, autocast=True
    )
    if fp8 is not None and options.output is not None:
        trainer.save_model(options.output)  # a checkpoint of the plain model
    return statistics.mean(losses[-5:]), Cost(cost.seconds, {**sizes, **cost.sizes})


def main(argv: Sequence[str]) -> int:
    """Train twice and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tiny", choices=list(PRESETS))
    parser.add_argument("--model", help="a folder with a model and its tokenizer, or a name")
    parser.add_argument("--output", help="folder for the model that was trained in FP8")
    parser.add_argument("--recipe", default="current", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, help="sequences; 2, or 4 on a GPU")
    parser.add_argument("--context", type=int, help="tokens of a sequence; 32, or 2048 on a GPU")
    parser.add_argument("--lr", type=float, help="1e-2 for the tiny preset, else 1e-4")
    options = parser.parse_args(argv)
    tiny = options.preset == "tiny" and options.model is None
    options.batch = options.batch or (4 if options.device == "cuda" else 2)
    options.context = options.context or (2048 if options.device == "cuda" else 32)
    options.lr = options.lr or (1e-2 if tiny else 1e-4)

    loss, bf16 = train(options, None)
    callback = Float8Callback(RECIPES[options.recipe], exclude=["lm_head"])
    fp8_loss, fp8 = train(options, callback)
    if PartialState().is_main_process:
        print(f"loss of the last steps: bf16 {loss:.4f}, FP8 {fp8_loss:.4f}\n")
        print(savings(bf16, fp8, options.device))
    PartialState().destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
