"""Train the same GPT twice, in high precision and in FP8, and compare.

    python examples/train_gpt.py                                 # some minutes on two CPU cores
    python examples/train_gpt.py --device cuda --preset 124m     # GPT-2's size
    python examples/train_gpt.py --architecture llama --layers transformer --fp8-attention

Both runs start from the same weights and see the same batches. The only difference is one call of
``float8lab.convert_to_float8``; with ``--layers transformer`` the blocks of the FP8 run are also
``float8lab.TransformerLayer``. The high-precision run is always plain ``torch.nn``. On CUDA, high
precision means float32 weights under ``torch.autocast`` in bfloat16, the usual way to train there.
On a CPU it means float32, and FP8 is emulated through float32 matmuls: the numbers are FP8's, the
speed is not.

On a CPU the same command gives the same losses. On CUDA the backward of attention sums in no fixed
order, so the last digits differ from run to run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpt import GPT, PRESETS, GPTConfig
from layers import use_transformer_layers
from llama import PRESETS as LLAMA_PRESETS
from llama import Llama, LlamaConfig
from savings import Cost, Meter, counted, savings
from text import Text, load_text
from torch import Tensor, nn

import float8lab
from float8lab import recipes

try:
    from tqdm import tqdm
except ImportError:
    tqdm = None
try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None  # type: ignore[assignment, misc]

RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    "delayed": partial(recipes.DelayedScaling, amax_history_len=16, amax_compute_algo="max"),
    "current": recipes.Float8CurrentScaling,
    "rowwise": recipes.Float8RowwiseScaling,
    "block": recipes.Float8BlockScaling,
    "mx": recipes.MXFP8BlockScaling,
}
EXCLUDED = ("lm_head",)
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises to its peak."""
FINAL_RATE = 0.1
"""Learning rate at the end, as a share of the peak; it falls along a cosine."""
ON_CPU = (
    "On a CPU, FP8 is emulated and takes longer than float32; on a GPU it is what saves time.\n"
    "The bytes are those of bfloat16 autocast on a GPU."
)
WATCHED = 200
"""About how many steps of the FP8 run ``--report`` shows, evenly spread."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a run besides the model's sizes."""

    steps: int
    batch_size: int
    learning_rate: float
    validations: int = 10
    """How often the validation loss is computed, evenly spread; the last follows the last step."""
    code: bool = False
    """Train on the standard library's source code: five times as much as its documentation."""
    validation_windows: int
    """The number of sequences in the validation loss, evenly spread over its text."""
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear rise, then a cosine."""
        warm_up = max(1, round(WARM_UP * self.steps))
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (FINAL_RATE + (1 - FINAL_RATE) * cosine)

    def validates_after(self, step: int) -> bool:
        """Whether ``step`` ends one of the intervals between validations."""
        count = min(self.validations, self.steps)
        return (step + 1) * count // self.steps > step * count // self.steps


TRAINING = {
    "tiny": Training(steps=600, batch_size=16, learning_rate=3e-3, validation_windows=256),
    "small": Training(steps=500, batch_size=32, learning_rate=2e-3, validation_windows=256),
    "124m": Training(
        steps=1500, batch_size=16, learning_rate=6e-4, code=True, validation_windows=256
    ),
}


@dataclass
class Run:
    """The measurements of one training run."""

    name: str
    train_loss: list[float] = field(default_factory=list)
    """One value a step."""
    validation_steps: list[int] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Wall time of the run, validation included."""
    step_ms: float = 0.0
    """Wall time of a training step: the median over the intervals between validations."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each kind of tensor; on CUDA also the peak of memory in training."""


class Progress:
    """One progress bar for both runs, or a line for each validation if tqdm is missing."""

    def __init__(self, total: int) -> None:
        update_seconds = 0.1 if sys.stderr.isatty() else 10.0  # seconds; few lines for a log file
        self.bar = tqdm(total=total, unit="step", mininterval=update_seconds) if tqdm else None

    def begin(self, name: str) -> None:
        if self.bar is not None:
            self.bar.set_description(name, refresh=False)

    def advance(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def validated(self, run: Run) -> None:
        step, loss = run.validation_steps[-1], run.validation_loss[-1]
        if self.bar is None:
            print(f"{run.name}: step {step}, validation loss {loss:.4f}", flush=True)
        else:
            self.bar.set_postfix_str(f"validation loss {loss:.4f}", refresh=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


@dataclass(frozen=True)
class Batches:
    """Sequences of a text as inputs and targets; targets are one token ahead."""

    text: Tensor
    context: int

    def at(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequences that begin at ``starts``, ``[B, context]`` each."""
        offsets = torch.arange(self.context + 1, device=self.text.device)
        window = self.text[starts[:, None] + offsets]
        return window[:, :-1], window[:, 1:]

    def random(self, training: Training) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one batch per step; the same for the same seed, on any device."""
        generator = torch.Generator().manual_seed(training.seed)
        size = (training.steps, training.batch_size)
        starts = torch.randint(len(self.text) - self.context, size, generator=generator)
        yield from map(self.at, starts.to(self.text.device))

    def spread(self, windows: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``windows`` sequences evenly spread over the text, in batches."""
        last = len(self.text) - self.context - 1
        starts = torch.linspace(0, last, windows, dtype=torch.float64).long()
        yield from map(self.at, starts.to(self.text.device).split(batch_size))


def high_precision(device: torch.device) -> AbstractContextManager[Any]:
    """The usual mixed precision of a device: bfloat16 autocast on CUDA, none on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    with high_precision(batch[0].device):
        loss: Tensor = model(*batch)
    return loss


@torch.no_grad()
def validate(model: nn.Module, batches: Batches, training: Training) -> float:
    """Mean loss over the validation windows, the same ones each time."""
    model.eval()
    windows = batches.spread(training.validation_windows, training.batch_size)
    total = torch.zeros((), dtype=torch.float64, device=batches.text.device)
    for batch in windows:
        total += loss_of(model, batch).double() * len(batch[0])
    model.train()
    return (total / training.validation_windows).item()


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=(0.9, 0.95), fused=True)


def train_step(
    model: nn.Module,
    batch: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    rate: float,
    clip: float,
) -> Tensor:
    """Run one step; return the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = loss_of(model, batch)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@dataclass(frozen=True, kw_only=True)
class Job:
    """One comparison: the model's sizes, the training, the text and where it runs."""

    model: GPTConfig | LlamaConfig
    training: Training
    text: Text
    device: torch.device
    fused: bool = False
    """Whether the blocks of the FP8 run are ``TransformerLayer``."""

    def initial_model(self) -> GPT | Llama:
        """Return the model with the same weights each time, on any device."""
        torch.manual_seed(self.training.seed)
        model = GPT(self.model) if isinstance(self.model, GPTConfig) else Llama(self.model)
        return model.to(self.device)

    def batches(self, text: Tensor) -> Batches:
        return Batches(text.to(self.device), self.model.context)

    def train(
        self,
        name: str,
        model: nn.Module,
        progress: Progress,
        watcher: Any = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> Run:
        """Train ``model`` in place, by default with AdamW; a watcher gets the loss of each step."""
        run, training = Run(name), self.training
        held_out = self.batches(self.text.validation)
        optimizer = optimizer or make_optimizer(model, training)
        losses: list[Tensor] = []
        meter = Meter(self.device)
        interval_ms: list[float] = []
        progress.begin(name)
        start = interval_start = time.perf_counter()
        for step, batch in enumerate(self.batches(self.text.train).random(training)):
            rate = training.rate(step)
            losses.append(train_step(model, batch, optimizer, rate, training.clip))
            progress.advance()
            if watcher is not None:
                watcher.step(loss=losses[-1].item())
            if not training.validates_after(step):
                continue
            run.train_loss += torch.stack(losses).tolist()  # waits for the device
            interval_ms.append(1e3 * (time.perf_counter() - interval_start) / len(losses))
            losses.clear()
            run.validation_steps.append(step + 1)
            run.validation_loss.append(validate(model, held_out, training))
            progress.validated(run)
            interval_start = time.perf_counter()
        run.seconds = time.perf_counter() - start
        run.step_ms = statistics.median(interval_ms)
        run.sizes = meter.peak()
        return run

    def count_bytes(self, model: nn.Module) -> dict[str, int]:
        """Bytes that a step holds under bfloat16 autocast, on any device; without the optimizer."""
        batch = next(self.batches(self.text.train).random(self.training))
        return counted(model, batch, autocast=True)

    def count_gemms(self, model: nn.Module) -> Any:
        """Count the GEMMs of one training step."""
        batch = next(self.batches(self.text.train).random(self.training))
        with float8lab.count_gemms() as gemms:
            loss_of(model, batch).backward()
        model.zero_grad()
        return gemms


def gap_percent(run: Run, baseline: Run) -> float:
    """By how much a run's final validation loss is above the baseline's, in percent."""
    return 100 * (run.validation_loss[-1] / baseline.validation_loss[-1] - 1)


def draw(baseline: Run, fp8: Run, path: Path) -> None:
    """Draw a PNG of the losses of both runs and of the validation gap between them."""
    figure = Figure(figsize=(8, 6.5), layout="constrained")
    losses, gaps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for run, colour, style in ((baseline, "tab:gray", "-"), (fp8, "tab:red", "--")):
        steps = range(1, len(run.train_loss) + 1)
        losses.plot(steps, run.train_loss, color=colour, alpha=0.35, linewidth=0.8)
        label = f"{run.name}: {run.validation_loss[-1]:.4f}"
        losses.plot(run.validation_steps, run.validation_loss, style, color=colour, marker=".",
                    label=label)  # fmt: skip
    losses.set_ylabel("loss (nats per byte)")
    losses.legend(title="validation (training in the background)")
    losses_of_both = zip(fp8.validation_loss, baseline.validation_loss, strict=True)
    gaps.axhline(0, color="tab:gray", linewidth=0.8)
    gaps.plot(fp8.validation_steps, [100 * (a / b - 1) for a, b in losses_of_both], "r.-")
    gaps.set_ylabel("validation gap (%)")
    gaps.set_xlabel("step")
    figure.savefig(path, dpi=120)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"


def describe_runs(runs: Sequence[Run]) -> str:
    """Return a table of the runs' results."""
    lines = [f"{'run':<16}{'validation loss':>16}{'ms per step':>13}{'seconds':>10}"]
    for run in runs:
        loss = f"{run.validation_loss[-1]:.4f}"
        lines.append(f"{run.name:<16}{loss:>16}{run.step_ms:>13.1f}{run.seconds:>10.1f}")
    return "\n".join(lines)


def describe_savings(runs: Sequence[Run], device: torch.device) -> str:
    """Return a table of the time and the bytes that FP8 saved in a step."""
    baseline, fp8 = (Cost(run.step_ms / 1e3, run.sizes) for run in runs)
    names = ("bf16" if device.type == "cuda" else "high precision", "FP8")
    return savings(baseline, fp8, device, names=names, on_cpu=ON_CPU)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0] if __doc__ else None,
        epilog="High precision is bfloat16 autocast over float32 weights on CUDA, float32 on CPU.",
    )
    add = parser.add_argument
    add("--recipe", choices=RECIPES, default="current", help="FP8 recipe (default: current)")
    add("--fp8-attention", action="store_true",
        help="attention in FP8 too (fp8_dpa); needs --layers transformer")  # fmt: skip
    add("--architecture", choices=("gpt", "llama"), default="gpt", help="default: gpt")
    add("--layers", choices=("plain", "transformer"), default="plain",
        help="blocks of the FP8 run: torch.nn converted (default) or TransformerLayer")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: cuda when there is one")
    add("--preset", choices=PRESETS, help="model and training; default: tiny on cpu, 124m on cuda")
    add("--steps", type=int, help="training steps of each run; default: the preset's")
    add("--batch-size", type=int, help="sequences a step; default: the preset's")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    add("--exclude", action="append", metavar="NAME",
        help="a module to leave in high precision: whole parts of its name, or a glob; may be"
        " repeated. Default: lm_head, whose logits are customarily left alone; 'none' converts"
        " every linear layer")  # fmt: skip
    add("--out", type=Path, default=Path("out"), metavar="DIR",
        help="folder of train_gpt.png (default: out)")  # fmt: skip
    add("--report", type=Path, metavar="FILE",
        help="also watch the FP8 run and write one HTML page of what its layers lost, step by step;"
        " watching makes the run slower")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="also write all numbers there")
    args = parser.parse_args(argv)
    for name in ("steps", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    if args.fp8_attention and args.layers == "plain":
        parser.error("--fp8-attention needs --layers transformer; plain attention is torch's")
    if args.report and importlib.util.find_spec("plotly") is None:
        parser.error("--report needs plotly, of the extra report, which is not installed")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA GPU, and torch sees none here; use --device cpu")
    return args


def make_job(args: argparse.Namespace) -> Job:
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    preset = args.preset or ("124m" if device.type == "cuda" else "tiny")
    options_given = {"steps": args.steps, "batch_size": args.batch_size, "seed": args.seed}
    training = Training(
        **asdict(TRAINING[preset]) | {k: v for k, v in options_given.items() if v is not None}
    )
    text = load_text(code=training.code)
    model = (PRESETS if args.architecture == "gpt" else LLAMA_PRESETS)[preset]
    fused = args.layers == "transformer"
    return Job(model=model, training=training, text=text, device=device, fused=fused)


def excluded(args: argparse.Namespace) -> tuple[str, ...]:
    names = EXCLUDED if args.exclude is None else args.exclude
    return tuple(name for name in names if name != "none")


def compare(
    job: Job, recipe: recipes.Recipe, exclude: tuple[str, ...], *, watched: bool = False
) -> tuple[list[Run], Any, Any, Any]:
    """Return both runs, the conversion report, GEMM counts of an FP8 step, the FP8 run's log."""
    progress = Progress(2 * job.training.steps)
    model = job.initial_model()
    baseline = job.train("high precision", model, progress)
    baseline.sizes = job.count_bytes(model) | baseline.sizes
    model = job.initial_model()
    if job.fused:
        use_transformer_layers(model)
    float8lab.convert_to_float8(model, recipe, exclude=exclude)
    watch: AbstractContextManager[Any] = nullcontext()
    if watched:
        every = max(1, job.training.steps // WATCHED)
        watch = float8lab.inspect.watch(model, every=every)
    with watch as watcher:
        fp8 = job.train("FP8", model, progress, watcher)
    progress.close()
    log = watcher.log if watched else None
    fp8.sizes = job.count_bytes(model) | fp8.sizes
    report = float8lab.conversion_report(model)
    return [baseline, fp8], report, job.count_gemms(model), log


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the comparison, print it and write its files; return what ``--json`` writes."""
    start = time.perf_counter()
    args = parse(argv)
    job = make_job(args)
    recipe = replace(RECIPES[args.recipe](), fp8_dpa=args.fp8_attention)
    print(f"{device_name(job.device)}, torch {torch.__version__}, {recipe}")
    print(f"{job.model}\n{job.training}\n{job.text.describe()}", flush=True)

    watched = args.report is not None
    runs, report, gemms, log = compare(job, recipe, excluded(args), watched=watched)
    gap = gap_percent(runs[1], runs[0])
    print(f"\n{report}\n\nGEMMs of one training step:\n{gemms}\n\n{describe_runs(runs)}")
    print(f"gap {gap:+.3f} % ({args.recipe}; positive: FP8 is worse)")
    print(f"\n{describe_savings(runs, job.device)}")
    print(f"The comparison took {time.perf_counter() - start:.0f} s.\n")

    args.out.mkdir(parents=True, exist_ok=True)
    png = args.out / "train_gpt.png"
    if Figure is None:
        print("no curves drawn: that needs matplotlib (pip install matplotlib)")
    else:
        draw(runs[0], runs[1], png)
        print(f"curves: {png}")
    if watched:
        print(f"report: {float8lab.inspect.report(log, args.report)}")
    results = {
        "device": device_name(job.device),
        "torch": torch.__version__,
        "recipe": {"name": args.recipe, "value": repr(recipe)},
        "exclude": excluded(args),
        "architecture": args.architecture,
        "layers": args.layers,
        "model": asdict(job.model),
        "training": asdict(job.training),
        "text": job.text.digest,
        "runs": [asdict(run) for run in runs],
        "gap_percent": gap,
        "gemms": {"fp8": gemms.fp8, "high_precision": gemms.high_precision},
        "report": str(report),
    }
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    return results


if __name__ == "__main__":
    main()
