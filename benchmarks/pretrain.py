"""Train a Llama of one billion parameters from scratch on one GPU, in bfloat16 or in FP8.

    python -m benchmarks.pretrain --recipe bfloat16 --minutes 30 --out out/bfloat16
    python -m benchmarks.pretrain --recipe current --minutes 30 --out out/current
    python -m benchmarks.pretrain --table out/bfloat16 out/current

This needs a CUDA GPU of 80 GB; ``--tiny`` trains a small model on a CPU. A run continues where the
last run with the same ``--out`` ended. The batch of a step depends only on the seed and the step's
number, so the curve is that of an uninterrupted run. (On a GPU the last digits differ between any
two runs, since the backward of attention adds in no fixed order.) ``--minutes`` and ``--steps``
limit this call. The learning rate follows ``--schedule``, which all compared runs share, and at
whose end a run is complete.

The model is ``examples/llama.py``, its blocks compiled one by one; FP8 is one call of
``convert_to_float8``, which leaves the output layer in bfloat16. Parameters are bfloat16 with
float32 masters, updated by fused AdamW. The text is Python's manual and the source code of Python's
library and of torch, about 57 million bytes, one token a byte.

Files in ``--out``: ``run.json`` has the options, ``log.jsonl`` a line for every ``--log-every``
steps, both small; ``checkpoint.pt`` has 14 GB and is left out by ``--no-checkpoint``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common
from benchmarks.recipes import RECIPES

sys.path.insert(0, str(common.ROOT / "examples"))  # the examples are no package
from llama import PRESETS, Llama
from text import Text, load_text
from train_gpt import Batches, Figure, Training

__all__ = ["Log", "Run", "Setup", "draw", "main", "read_logs", "tabulate", "train"]

BASELINE = "bfloat16"
CHECKPOINT, LOG, OPTIONS = "checkpoint.pt", "log.jsonl", "run.json"
WEIGHT_DECAY, CLIP = 0.1, 1.0
VALIDATION_BATCHES = 8
"""The number of batches, evenly spaced in the held-out text and equal at each validation."""
SMOOTHED = 100
"""The number of last steps over which a table averages the training loss."""
MOST_STEPS = 12
"""The most rows of a table of losses."""
MAY_DIFFER = ("recipe", "seed")
"""The options in which the runs of one table may differ."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The options that determine the curve of a run and stay the same when the run continues."""

    recipe: str
    """``"bfloat16"`` or one of ``RECIPES``."""
    preset: str
    compile: bool
    batch: int
    """The number of sequences in a step."""
    schedule: int
    """The number of steps of the complete run."""
    learning_rate: float
    seed: int
    log_every: int
    validate_every: int
    text: str
    """The SHA-256 of the training text."""

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: a linear rise, then a cosine."""
        training = Training(
            steps=self.schedule, batch_size=self.batch, learning_rate=self.learning_rate,
            validation_windows=VALIDATION_BATCHES * self.batch,
        )  # fmt: skip
        return training.rate(step)

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that happens every ``every`` steps happens after ``step``."""
        return step % every == 0 or step == self.schedule


class Run:
    """A model in training, with everything that a checkpoint file holds.

    Attributes:
        step: the number of steps taken, which is also the position in the data.
        seconds: the seconds spent in training, compilation and validation included.
        pending: ``[n]`` float32, the losses of steps that the log does not have yet.
    """

    def __init__(self, setup: Setup, text: Text, device: torch.device) -> None:
        self.setup, self.device = setup, device
        context = PRESETS[setup.preset].context
        self.tokens_a_step = setup.batch * context
        self.step, self.seconds = 0, 0.0
        self.pending = torch.empty(0, device=device)
        self.training = Batches(text.train.to(device), context)
        self.held_out = Batches(text.validation.to(device), context)
        torch.manual_seed(setup.seed)
        with device:
            self.model = Llama(PRESETS[setup.preset]).bfloat16()
        if setup.recipe != BASELINE:
            recipe = RECIPES[setup.recipe]()
            float8lab.convert_to_float8(self.model, recipe, exclude=("lm_head",), strict=True)
        if setup.compile:
            for block in self.model.blocks:
                block.compile()
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = float8lab.optim.MasterWeights(
            groups, torch.optim.AdamW, also_16_bit=True, betas=(0.9, 0.95), fused=True
        )

    def train_step(self) -> Tensor:
        """Train for one step; return the loss before the update, on the device."""
        generator = torch.Generator().manual_seed((self.setup.seed << 32) + self.step)
        last = len(self.training.text) - self.training.context
        starts = torch.randint(last, (self.setup.batch,), generator=generator)
        for group in self.optimizer.param_groups:
            group["lr"] = self.setup.rate(self.step)
        loss: Tensor = self.model(*self.training.at(starts.to(self.device)))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def validate(self) -> float:
        """Return the mean held-out loss; ``eval`` leaves the state of delayed scaling unchanged."""
        self.model.eval()
        windows = self.held_out.spread(VALIDATION_BATCHES * self.setup.batch, self.setup.batch)
        losses = [self.model(*batch).double() for batch in windows]
        self.model.train()
        return torch.stack(losses).mean().item()

    def save(self, path: Path) -> None:
        """Write the checkpoint file; a run that is killed while writing keeps the older file."""
        state = {
            "step": self.step,
            "tokens": self.step * self.tokens_a_step,
            "seconds": self.seconds,
            "pending": self.pending,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaling": float8lab.nn.ScalingState(self.model).state_dict(),
        }
        torch.save(state, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)

    def load(self, path: Path) -> None:
        """Continue from a checkpoint file of the same ``Setup``."""
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        self.step, self.seconds = state["step"], state["seconds"]
        self.pending = state["pending"].to(self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        float8lab.nn.ScalingState(self.model).load_state_dict(state["scaling"])


def open_folder(folder: Path, setup: Setup) -> Path | None:
    """Make a run's folder, or check that its run can continue; return its checkpoint file."""
    options, log, checkpoint = (folder / name for name in (OPTIONS, LOG, CHECKPOINT))
    for name, value in json.loads(options.read_text()).items() if options.exists() else ():
        if value != getattr(setup, name):
            sys.exit(
                f"--out must hold a run of the same options; {name} is {value!r} in {folder} and "
                f"{getattr(setup, name)!r} here. Choose another folder."
            )
    if checkpoint.exists():
        return checkpoint
    if log.exists():
        sys.exit(
            f"--out must hold a checkpoint file for its run to go on; {folder} has only a log. "
            "Choose another folder, or delete this one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    options.write_text(json.dumps(asdict(setup), indent=1) + "\n")
    return None


def forget_lines_after(step: int, log: Path) -> None:
    """Drop the lines that a killed run logged after its last checkpoint file."""
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    log.with_suffix(".tmp").write_text("".join(x for x in lines if json.loads(x)["step"] <= step))
    os.replace(log.with_suffix(".tmp"), log)


def train(
    run: Run,
    folder: Path,
    facts: dict[str, str],
    *,
    minutes: float = math.inf,
    steps: int | None = None,
    checkpoint_minutes: float | None = None,
) -> None:
    """Train for some minutes or steps, at most to the end of the schedule, and log.

    Args:
        run: the run to continue from its present step.
        folder: the folder of the log and the checkpoint file.
        facts: the device and the commit, which are written in each line.
        minutes: the most minutes of this call, compilation and validation included.
        steps: the most steps of this call.
        checkpoint_minutes: minutes between checkpoint files, the last at the end; None writes none.
    """
    setup, cuda = run.setup, run.device.type == "cuda"
    earlier, began = run.seconds, time.perf_counter()
    interval_began = saved = began
    interval_steps, is_warm = 0, False  # the first interval of a call compiles
    end = setup.schedule if steps is None else min(setup.schedule, run.step + steps)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    while run.step < end and time.perf_counter() - began < 60 * minutes:
        run.pending = torch.cat((run.pending, run.train_step()[None]))
        interval_steps += 1
        if not setup.is_due(run.step, setup.log_every):
            continue
        loss = run.pending.double().mean().item()  # waits for the GPU
        now = time.perf_counter()
        line = {
            "step": run.step, "tokens": run.step * run.tokens_a_step, "loss": loss,
            "seconds": earlier + now - began, "is_warm": is_warm,
            "tokens_per_second": interval_steps * run.tokens_a_step / (now - interval_began),
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if cuda else None, **facts,
        }  # fmt: skip
        if setup.is_due(run.step, setup.validate_every):
            line["validation_loss"] = run.validate()
        with (folder / LOG).open("a") as log:
            log.write(json.dumps(line) + "\n")
        print(f"step {run.step}, loss {loss:.4f}", file=sys.stderr)
        run.pending, run.seconds = run.pending[:0], earlier + time.perf_counter() - began
        if checkpoint_minutes is not None and now - saved > 60 * checkpoint_minutes:
            run.save(folder / CHECKPOINT)
            saved = time.perf_counter()
        interval_began, interval_steps, is_warm = time.perf_counter(), 0, True
    run.seconds = earlier + time.perf_counter() - began
    if checkpoint_minutes is not None:
        run.save(folder / CHECKPOINT)


# Tables and curves


@dataclass(frozen=True)
class Log:
    """The contents of a run's folder: its options, and the lines of its log by step."""

    name: str
    setup: dict[str, Any]
    lines: dict[int, dict[str, Any]]

    @property
    def rate(self) -> float:
        """Return median tokens/s of intervals without compilation; NaN if a loss is not finite."""
        rates = [line["tokens_per_second"] for line in self.lines.values() if line["is_warm"]]
        is_finite = all(math.isfinite(line["loss"]) for line in self.lines.values())
        return statistics.median(rates) if rates and is_finite else math.nan

    def training(self, step: int) -> float:
        """Return the mean loss of the last ``SMOOTHED`` steps."""
        steps = [at for at in self.lines if step - SMOOTHED < at <= step]
        return statistics.fmean(self.lines[at]["loss"] for at in steps)

    def validation(self, step: int) -> float:
        """Return the loss on held-out text after a step; NaN if it was not measured."""
        return float(self.lines[step].get("validation_loss", math.nan))


def read_logs(folders: Sequence[Path]) -> list[Log]:
    """Read the logs of runs that may be compared, the baseline first."""
    logs = []
    for folder in folders:
        lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
        setup = json.loads((folder / OPTIONS).read_text())
        logs.append(Log(folder.name, setup, {line["step"]: line for line in lines}))
        for name, value in setup.items():
            if name not in MAY_DIFFER and value != logs[0].setup[name]:
                sys.exit(
                    f"--table must name runs of equal options but {' and '.join(MAY_DIFFER)}; "
                    f"{name} is {value!r} in {folder} and {logs[0].setup[name]!r} in {folders[0]}. "
                    "Repeat one of them."
                )
    return sorted(logs, key=lambda log: log.setup["recipe"] != BASELINE)


def shown_steps(logs: Sequence[Log]) -> list[int]:
    """Return evenly spaced steps that all runs have logged, and validated if there are any."""
    steps = sorted(set.intersection(*(set(log.lines) for log in logs)))
    if not steps:
        sys.exit("--table must name runs with a logged step in common; these have none. Train on.")
    valid = [step for step in steps if not any(math.isnan(log.validation(step)) for log in logs)]
    steps = valid or steps
    count = min(MOST_STEPS, len(steps))
    return [steps[round((i + 1) * len(steps) / count) - 1] for i in range(count)]


def tabulate(logs: Sequence[Log]) -> str:
    """Tabulate the runs, then their losses at equal steps with the gap to the first run."""
    base, steps = logs[0], shown_steps(logs)

    def compared(log: Log, loss: Callable[[Log, int], float], step: int) -> str:
        gap = 100 * (loss(log, step) / loss(base, step) - 1)
        return f"{loss(log, step):.4f}" + ("" if log is base else f" ({gap:+.2f} %)")

    rows = []
    for log in logs:
        last = log.lines[max(log.lines)]
        # Times of two kinds of GPU cannot be compared.
        is_comparable = last["device"] == base.lines[steps[0]]["device"]
        rows.append(
            [
                log.name, log.setup["recipe"], last["step"], f"{last['tokens'] / 1e6:.1f}",
                f"{last['seconds'] / 60:.1f}", f"{log.rate:,.0f}",
                f"{log.rate / base.rate:.2f}" if is_comparable else "-",
                f"{max(line['peak_gb'] or math.nan for line in log.lines.values()):.1f}",
                last["device"], last["commit"],
            ]
        )  # fmt: skip
    columns = ["run", "recipe", "steps", "million tokens", "minutes", "tokens/s"]
    columns += [f"x {base.name}", "peak GB", "device", "commit"]
    tables = [common.table(columns, rows)]
    for name, loss in (("training", Log.training), ("validation", Log.validation)):
        cells = [[step, *(compared(log, loss, step) for log in logs)] for step in steps]
        table = common.table(["step", *(log.name for log in logs)], cells)
        tables.append(f"{name} loss, nats a byte (gap to {base.name})\n\n{table}")
    return "\n\n".join(tables)


def draw(logs: Sequence[Log], path: Path) -> None:
    """Draw the losses of all runs, and the gap of the training loss to the first run."""
    figure, base = Figure(figsize=(9, 7), layout="constrained"), logs[0]
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for log in logs:
        steps = list(log.lines)
        (line,) = losses.plot(steps, [log.training(s) for s in steps], label=log.name)
        losses.plot(steps, [log.validation(s) for s in steps], ".", color=line.get_color())
        steps = [step for step in steps if step in base.lines]
        gaps.plot(steps, [100 * (log.training(s) / base.training(s) - 1) for s in steps])
    losses.set(ylabel="loss, nats a byte (dots: validation)", yscale="log")
    losses.legend()
    gaps.set(ylabel=f"% above {base.name}", xlabel="step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--recipe", choices=[BASELINE, *RECIPES], default=BASELINE)
    add("--out", type=Path, metavar="FOLDER", help="of the run, which goes on if it is there")
    add("--minutes", type=float, default=math.inf, help="of this call, compilation included")
    add("--steps", type=int, help="of this call; default: to the end of the schedule")
    add("--schedule", type=int, default=2000, help="steps of the whole run (default: 2000)")
    add("--batch", type=int, default=8, help="sequences a step (default: 8, of 2048 tokens)")
    add("--learning-rate", type=float, default=3e-4, help="its peak (default: 3e-4)")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--validate-every", type=int, default=100, metavar="STEPS")
    add("--checkpoint-minutes", type=float, default=10.0, help="between two checkpoint files")
    add("--no-checkpoint", action="store_true", help="write logs only; the run cannot go on later")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="the blocks")
    add("--tiny", action="store_true", help="a small model, on a CPU if there is no GPU")
    add("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    add("--commit", help="what is measured, where git cannot tell")
    add("--table", type=Path, nargs="+", metavar="FOLDER", help="compare runs; train none")
    add("--plot", type=Path, default=Path("out/pretrain.png"), metavar="FILE")
    options = parser.parse_args(argv)
    if options.table is None and options.out is None:
        parser.error("--out must name the folder of the run, or --table those to compare")
    if options.validate_every % options.log_every:
        parser.error(
            f"--validate-every must be a multiple of --log-every, {options.log_every}; "
            f"got {options.validate_every}"
        )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Train a run, or compare several."""
    options = parse(argv)
    if options.table is not None:
        logs = read_logs(options.table)
        print(tabulate(logs))
        if Figure is None:
            print("\nno curves drawn: that needs matplotlib (pip install matplotlib)")
        else:
            draw(logs, options.plot)
            print(f"\ncurves: {options.plot}")
        return
    if not (options.tiny or torch.cuda.is_available()):
        sys.exit(
            "benchmarks.pretrain needs a CUDA GPU of 80 GB (compute capability 9.0 for its FP8 "
            "GEMMs), and torch sees none here. --tiny trains a small model on a CPU."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    text = load_text(code=True, folders=[] if options.tiny else [Path(torch.__file__).parent])
    names = ("recipe", "compile", "batch", "schedule", "learning_rate", "seed")
    setup = Setup(
        **{name: getattr(options, name) for name in (*names, "log_every", "validate_every")},
        preset="tiny" if options.tiny else "1b",
        text=text.digest,
    )
    checkpoint = open_folder(options.out, setup)
    header = common.header(options.commit)
    print(common.describe_header(header), flush=True)
    run = Run(setup, text, device)
    parameters = sum(p.numel() for p in run.model.parameters())
    print(f"{parameters:,} parameters; {text.describe()}", flush=True)
    if checkpoint is not None:
        run.load(checkpoint)
        forget_lines_after(run.step, options.out / LOG)
    machine = header.get("GPU") or header["CPU"]
    train(
        run, options.out,
        {"device": machine, "torch": header["torch"], "commit": header["commit"]},
        minutes=options.minutes, steps=options.steps,
        checkpoint_minutes=None if options.no_checkpoint else options.checkpoint_minutes,
    )  # fmt: skip
    state = "complete" if run.step == setup.schedule else f"at step {run.step}"
    print(f"{setup.recipe} is {state} of {setup.schedule}: {options.out / LOG}")


if __name__ == "__main__":
    main()
