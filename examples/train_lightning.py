"""Train a GPT with Lightning's Trainer, in bfloat16 and in FP8, and compare the two.

    python examples/train_lightning.py                                # CPU, seconds
    python examples/train_lightning.py --device cuda --preset wide    # one large GPU

FP8 takes one argument of the Trainer, ``plugins=[Float8Precision(...)]``. The text is random words:
the loss falls to what can be known about them. FP8 saves time in large layers on a GPU that has it;
on a CPU it is emulated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any

import lightning
import torch
from gpt import GPT, PRESETS, GPTConfig
from torch.utils.data import DataLoader
from train_fsdp import RECIPES, tokens

import float8lab
from float8lab.integrations.lightning import Float8Precision

SIZES = {**PRESETS, "wide": GPTConfig(context=2048, n_layer=8, n_head=32, dim=4096)}
"""What a GPU is good for is ``wide``: layers large enough for FP8 to pay."""


class Module(lightning.LightningModule):
    """The GPT of gpt.py and what Lightning asks of a model."""

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
    """Seconds of each step, optimizer included, as a user of the Trainer waits for them."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = self._now()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(self._now() - self._start)


def train(options: argparse.Namespace, precision: Float8Precision | None) -> dict[str, float]:
    """Train once; the loss at the end, the median step and, on a GPU, the peak of memory."""
    cuda = options.device == "cuda"
    config = SIZES[options.preset]
    module, clock = Module(config), Clock()
    if precision is not None:  # the plugin alone would convert the output layer, too
        report = float8lab.convert_to_float8(module, precision.recipe, exclude=["lm_head"])
        float8lab.nn.convert_norms(module)
        print(str(report).splitlines()[-1])
    data = [tokens(0, i, options.batch, config.context) for i in range(options.steps)]
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    trainer = lightning.Trainer(
        accelerator=options.device,
        devices=1,
        max_epochs=1,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"precision": "bf16-mixed"} if precision is None else {"plugins": [precision]}),
    )
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]  # a list will do
    result = {
        "loss": torch.stack(module.losses[-5:]).mean().item(),
        "ms a step": 1e3 * statistics.median(clock.seconds[len(clock.seconds) // 4 :]),
    }
    if cuda:
        result["GiB at peak"] = torch.cuda.max_memory_allocated() / 2**30
    return result


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
    runs = {"bf16-mixed": train(options, None), "FP8": train(options, precision)}
    print(f"{'':12}" + "".join(f"{name:>14}" for name in runs["FP8"]))
    for name, run in runs.items():
        print(f"{name:12}" + "".join(f"{value:14.4g}" for value in run.values()))
    base, fp8 = runs.values()
    shares = [f"{100 * (1 - fp8[what] / base[what]):.0f} % of {what}" for what in list(base)[1:]]
    print("FP8 saved " + ", ".join(shares))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
