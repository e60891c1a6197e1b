"""Measure what FP8 optimizer moments cost in loss, and bytes a parameter by combination.

    python -m benchmarks.moments [--steps 150] [--batch-size 8] [--seeds 3] [--rounded]

It needs a CUDA GPU of 40 GB; ``--tiny`` trains a small model on a CPU in minutes. The model is the
GPT of 124 million parameters of ``examples/train_gpt.py``, with its float32 weights under bfloat16
autocast, its text and its learning rates. For each seed AdamW trains it with float32 moments and
with FP8 moments, from the same weights and on the same batches; ``--rounded`` adds bfloat16 weights
that are rounded stochastically. Gaps are in percent of the loss with float32 moments, positive
where FP8 is worse; training loss is the mean of the last fifth of the steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common
from benchmarks.linear import storages
from float8lab.optim import MasterWeights
from float8lab.optim.moments import MASTER

sys.path.insert(0, str(common.ROOT / "examples"))  # the examples are no package
from gpt import PRESETS
from text import load_text
from train_gpt import TRAINING, Job, Progress, Run, make_optimizer

__all__ = ["bytes_table", "compare", "main", "tabulate"]

BASELINE = "float32 moments"
FP8, ROUNDED = {"fp8_moments": True}, {"stochastic_rounding": True}
WAYS: dict[str, dict[str, Any]] = {
    BASELINE: {},
    "FP8 moments": FP8,
    "FP8 moments, bfloat16 weights": FP8 | ROUNDED,
}
"""The options of ``MasterWeights`` for each way to train, by name."""
HALF: dict[str, Any] = {"master_dtype": torch.bfloat16}
COMBINATIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("float32", "none"): {},
    ("bfloat16", "none"): {},
    ("bfloat16, rounded stochastically", "none"): ROUNDED,
    ("bfloat16", "float32"): {"also_16_bit": True},
    ("FP8", "float32"): {},
    ("FP8", "bfloat16"): HALF,
    ("FP8", "bfloat16, rounded stochastically"): HALF | ROUNDED,
}
"""The options of ``MasterWeights`` by how the weight and its master are stored."""


def bytes_table(size: int = 1024) -> str:
    """Tabulate bytes a parameter by combination, for a ``[size, size]`` weight after a step."""
    rows: list[list[object]] = []
    for (weight, master), options in COMBINATIONS.items():
        for storage in ({}, FP8):
            layer = _layer(weight, size)
            every: dict[str, Any] = options | storage
            optimizer = MasterWeights(layer.parameters(), torch.optim.AdamW, **every)
            layer.weight.grad = torch.ones_like(layer.weight)
            with float8lab.fallback("silent"):
                optimizer.step()
            moments = _moments(optimizer)
            held = [[layer.weight], list(optimizer.masters.values()), moments]
            bytes_each = [_bytes(tensors) / size**2 for tensors in held]
            stored = "FP8" if storage else str(moments[0].dtype).removeprefix("torch.")
            cells = [f"{value:.2f}" for value in (*bytes_each, sum(bytes_each))]
            rows.append([weight, master, stored, *cells])
    columns = ["weight", "master", "moments", "weight B", "master B", "moments B", "sum B"]
    return common.table(columns, rows)


def _layer(weight: str, size: int) -> Any:
    """Make a layer that has one weight and nothing else."""
    if weight == "FP8":
        with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
            return float8lab.Linear(size, size, bias=False, device="cpu")
    return nn.Linear(size, size, bias=False, dtype=getattr(torch, weight.partition(",")[0]))


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [item for state in optimizer.state.values() for item in state.items()]
    return [x for name, x in states if name != MASTER and isinstance(x, Tensor) and x.ndim]


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum({k: v for x in tensors for k, v in storages(x).items()}.values())


def _optimizer(model: nn.Module, job: Job, options: dict[str, Any]) -> MasterWeights:
    """Make AdamW with the groups and options of ``examples/train_gpt.py``."""
    plain = make_optimizer(model, job.training)
    groups = [{name: g[name] for name in ("params", "weight_decay")} for g in plain.param_groups]
    shared = {name: plain.defaults[name] for name in ("lr", "betas", "fused")}
    return MasterWeights(groups, torch.optim.AdamW, **shared, **options)


def compare(job: Job, ways: Sequence[str], seeds: int) -> Iterator[tuple[int, Run, float]]:
    """Train in each way for each seed; yield the seed, the run, and state bytes a parameter."""
    progress = Progress(job.training.steps * len(ways) * seeds)
    for seed in range(seeds):
        seeded = replace(job, training=replace(job.training, seed=seed))
        for name in ways:
            model = seeded.initial_model()
            if "stochastic_rounding" in WAYS[name]:
                model = model.bfloat16()
            optimizer = _optimizer(model, seeded, WAYS[name])
            run = seeded.train(name, model, progress, optimizer=optimizer)
            yield (
                seed,
                run,
                _bytes(_moments(optimizer)) / sum(p.numel() for p in model.parameters()),
            )
    progress.close()


def _training_loss(run: Run) -> float:
    return statistics.fmean(run.train_loss[-max(1, len(run.train_loss) // 5) :])


def _validation_loss(run: Run) -> float:
    return run.validation_loss[-1]


def tabulate(results: Sequence[tuple[int, Run, float]]) -> str:
    """Return a markdown table with a row for each run and the mean gaps of each way."""
    losses: tuple[Callable[[Run], float], ...] = (_training_loss, _validation_loss)
    base = {seed: run for seed, run, _ in results if run.name == BASELINE}
    gaps: dict[str, list[list[float]]] = {}
    rows: list[list[object]] = []
    for seed, run, states in results:
        gap = [100 * (loss(run) / loss(base[seed]) - 1) for loss in losses]
        gaps.setdefault(run.name, []).append(gap)
        cells = [f"{loss(run):.4f} ({each:+.2f} %)" for loss, each in zip(losses, gap, strict=True)]
        rows.append([run.name, seed, *cells, f"{states:.2f}", f"{run.step_ms:.1f}"])
    for name, listed in gaps.items():
        cells = [f"{statistics.fmean(each):+.2f} %" for each in zip(*listed, strict=True)]
        rows.append([name, "mean", *cells, "", ""])
    return common.table(["run", "seed", "training", "validation", "states B", "ms"], rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Train all runs and print both tables."""
    parser = argparse.ArgumentParser(prog="benchmarks.moments", description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="of each run (default: 150)")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a step (default: 8)")
    parser.add_argument("--seeds", type=int, default=3, help="default: 3")
    parser.add_argument("--rounded", action="store_true", help="bfloat16 weights, too")
    parser.add_argument("--tiny", action="store_true", help="a small model, on any device")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    options = parser.parse_args(argv)
    print(f"Bytes a parameter:\n\n{bytes_table()}\n", flush=True)
    if not options.tiny:
        common.require_cuda("benchmarks.moments")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preset = "tiny" if options.tiny else "124m"
    training = replace(
        TRAINING[preset], steps=options.steps, batch_size=options.batch_size, validations=1
    )
    text = load_text(code=training.code)
    job = Job(model=PRESETS[preset], training=training, text=text, device=device)
    for key, value in common.header(options.commit).items():
        print(f"{key}: {value}")
    ways = list(WAYS)[: 3 if options.rounded else 2]
    results = []
    for seed, run, states in compare(job, ways, options.seeds):
        results.append((seed, run, states))
        print(f"{run.name}, seed {seed}: {run.validation_loss[-1]:.4f}", file=sys.stderr)
    print(f"\n{training}\n\n{tabulate(results)}")


if __name__ == "__main__":
    main()
