"""Train a GPT with Lightning's Trainer, in bfloat16 and in FP8, and compare the two.

    python examples/train_lightning.py                                # CPU, seconds
    python examples/train_lightning.py --device cuda --preset wide    # one large GPU

FP8 takes one argument of the Trainer, ``plugins=[Float8Precision(...)]``. The text is random words:
the loss falls to their entropy. FP8 saves time in large layers on a GPU that has it; on a CPU it is
emulated.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from gpt import GPT, GPTConfig
from savings import Cost, Meter, counted, savings
from torch.utils.data import DataLoader
from train_fsdp import RECIPES, SIZES, tokens

import float8lab
from float8lab.integrations.lightning import Float8Precision


class Module(lightning.LightningModule):
    """The GPT of gpt.py with the methods that Lightning requires."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT(config)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch[:, :-1], batch[:, 1:])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            self.parameters(), lr=1e-3 if self.model.config.dim < 1024 else 1e-4
        )


class Clock(lightning.Callback):
    """Times each step, optimizer included, as a user of the Trainer waits for it."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_batch_start(self, *args: Any) -> None:
        self.meter.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.meter.__exit__()


def train(options: argparse.Namespace, precision: Float8Precision | None) -> tuple[float, Cost]:
    """Train once; return the loss at the end and the cost."""
    config = SIZES[options.preset]
    meter = Meter(options.device)
    with torch.device(options.device):  # otherwise initialising a large model on the CPU takes long
        module = Module(config)
    if precision is not None:  # the plugin alone would convert the output layer, too
        float8lab.convert_to_float8(module, precision.recipe, exclude=["lm_head"])
        float8lab.nn.convert_norms(module)
        print(float8lab.conversion_report(module).summary)
    data = [tokens(0, i, options.batch, config.context) for i in range(options.steps)]
    trainer = lightning.Trainer(
        accelerator=options.device,
        devices=1,
        max_epochs=1,
        callbacks=[Clock(meter)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"precision": "bf16-mixed"} if precision is None else {"plugins": [precision]}),
    )
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]  # a list will do
    cost = meter.cost()  # before anything else runs
    loss = torch.stack(module.losses[-5:]).mean().item()
    inputs, targets = data[0][:, :-1], data[0][:, 1:]
    model = module.model.to(options.device)
    batch = (inputs.to(options.device), targets.to(options.device))
    sizes = counted(model, batch, optimizer=trainer.optimizers[0], autocast=True)
    return loss, Cost(cost.seconds, {**sizes, **cost.sizes})


def main(argv: Sequence[str]) -> int:
    """Train twice and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--preset", default="tiny", choices=list(SIZES))
    parser.add_argument("--recipe", default="current", choices=list(RECIPES))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=4)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="lightning")  # advice about loaders and loggers

    precision = Float8Precision(
        weights_dtype=torch.float32,
        fallback_compute_dtype=torch.bfloat16,
        recipe=RECIPES[options.recipe],
    )
    (loss, bf16), (fp8_loss, fp8) = train(options, None), train(options, precision)
    print(f"loss of the last steps: bf16-mixed {loss:.4f}, FP8 {fp8_loss:.4f}\n")
    print(savings(bf16, fp8, options.device, names=("bf16-mixed", "FP8")))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
