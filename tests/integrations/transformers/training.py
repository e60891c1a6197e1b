"""A Trainer for tests: a small Llama, which learns repeating sequences."""

from pathlib import Path
from typing import Any

import torch
import transformers

from float8lab import recipes
from tests.integrations.transformers.models import build

# Scales that depend on the whole amax history, so that an incomplete checkpoint shows.
DELAYED = recipes.DelayedScaling(
    amax_history_len=8, amax_compute_algo="max", power_of_2_scale=False
)


def tokens() -> list[dict[str, torch.Tensor]]:
    """Sixteen sequences, of which four differ."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 64, (4, 1), generator=generator) + torch.arange(8)
    return [{"input_ids": row % 61 + 3, "labels": row % 61 + 3} for row in rows] * 4


def trainer(
    folder: Path, steps: int, callback: Any, model: Any = None, **argument_changes: Any
) -> Any:
    """Return a Trainer with a new Llama by default, and a checkpoint in the middle."""
    arguments = {
        "output_dir": folder, "max_steps": steps, "save_steps": 4, "logging_steps": 1,
        "per_device_train_batch_size": 4, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "use_cpu": True, "report_to": [], "disable_tqdm": True,
    } | argument_changes  # fmt: skip
    return transformers.Trainer(
        model=build("llama")[0] if model is None else model,
        args=transformers.TrainingArguments(**arguments), train_dataset=tokens(),
        eval_dataset=tokens()[:4], callbacks=[callback],
    )  # fmt: skip


def losses(runner: Any) -> list[float]:
    return [entry["loss"] for entry in runner.state.log_history if "loss" in entry]


def same_state(a: Any, b: Any) -> bool:
    pairs = zip(a.state_dict().items(), b.state_dict().items(), strict=True)
    return all(n == m and torch.equal(p, q) for (n, p), (m, q) in pairs)
