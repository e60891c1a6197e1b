"""Measure what a call costs the CPU: small layers, autocast regions, kernel launches.

    python -m benchmarks.overhead [--compile] [--part gpt]

This needs a CUDA GPU, which has almost no work here. Wall times in microseconds are those of a
program that calls and does not wait:

- One ``Linear`` 128 to 128 on 32 tokens runs forward, and forward and backward. ``launches`` are
  the kernels, copies and fills that torch's profiler sees in one forward and backward. ``one
  thread`` is both with ``torch.autograd.set_multithreading_enabled(False)``: autograd runs backward
  in a separate thread for each GPU, to whose core all data that Python reads must travel.
- ``autocast`` is entered and left while that many FP8 modules exist that have run before, and left
  after all of them have run, when delayed scaling advances their scales.
- A GPT of 50 million parameters, where FP8 never wins and ``"auto"`` must not lose, trains a step:
  eager, with each layer ``graphed``, and with ``--compile`` compiled and as CUDA graphs.
  ``issue`` is the time in which the CPU puts a step on a GPU that waits for work.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import float8lab
from benchmarks import common, report
from benchmarks.accuracy import convert, linear_reference, make_linear, make_problem
from benchmarks.fsdp import Layer
from benchmarks.models import Candidate, converted, train_step, training_results
from benchmarks.peers import linear_peers
from benchmarks.recipes import RECIPES
from benchmarks.report import Row, Setting, Subject, Target
from float8lab.recipes import Auto, Recipe

__all__ = ["SUBJECT", "count_launches", "main", "rows"]

FLOOR_DB = 20.0
SAME_LOSS = 0.01
"""The largest relative deviation from bfloat16's loss in the first step."""
FORWARD, BOTH = "forward us", "forward + backward us"
ONE_THREAD, ONE_THREAD_MS = "both, one thread us", "one thread ms"
FORWARD_RATIO, BOTH_RATIO = "forward, of bf16 both", "both, of bf16 both"
SAME_MODE = "x bf16 in the same mode"
ISSUE_MS, ISSUE_RATIO = "issue ms", "issue, of bf16 in the same mode"
ENTER_EXIT, EXIT = "enter + exit us", "exit after all ran us"


class GptSize(NamedTuple):
    """The sizes of a small GPT and its batch."""

    D: int = 512
    H: int = 8
    F: int = 1536
    layers: int = 8
    vocabulary: int = 50304
    batch: int = 16
    sequence: int = 1024


SMALL = GptSize()


class Gpt(nn.Module):
    """A GPT that maps tokens to the mean cross-entropy of the next tokens."""

    def __init__(self, size: GptSize) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.D)
        nn.init.normal_(self.tokens.weight, std=0.02)
        layers = (Layer(size.D, size.H, size.H, size.F, nn.Linear) for _ in range(size.layers))
        self.layers = nn.Sequential(*layers)
        self.norm = nn.RMSNorm(size.D)
        self.lm_head = nn.Linear(size.D, size.vocabulary, bias=False)
        self.lm_head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.lm_head(self.norm(self.layers(self.tokens(tokens))))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def microseconds(setting: Setting, fn: Callable[[], object], calls: int = 100) -> float:
    """Return the median wall time in us of one of ``calls`` calls."""
    samples = 5 if setting.device.type == "cuda" else 1
    calls = calls if setting.device.type == "cuda" else 2
    return 1e3 * common.time_wall(fn, warm_up=3, samples=samples, calls=calls).median


def issue_ms(setting: Setting, step: Callable[[], object]) -> float:
    """Return the median ms in which the CPU puts a step on an idle GPU."""
    times = []
    for _ in range(10 if setting.device.type == "cuda" else 1):
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def count_launches(fn: Callable[[], object]) -> int | None:
    """Count kernels, copies and fills that a call launches; None if no profiler sees any."""
    if not torch.cuda.is_available():
        return None
    fn()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the profiler's warnings differ between versions
        return len(common.gpu_events(fn, cpu=True)) or None


# One small linear layer


def linear_rows(setting: Setting) -> Iterator[Row]:
    """Measure a layer of 128 features on 32 tokens."""
    case = "Linear 128 -> 128, 32 tokens"
    problem = make_problem(
        "gaussian", 32, 128, 128, seed=setting.seed, dtype=torch.bfloat16,
        device=setting.device.type,
    )  # fmt: skip
    plain = make_linear(problem)
    gate = common.Gate(linear_reference(problem), FLOOR_DB)
    names = {"dW": "weight"}
    candidates = [Candidate("bfloat16", lambda: plain, names, baseline=True)]
    for mode in setting.modes:
        for name in setting.recipes:
            candidates.append(
                Candidate(
                    f"{name}, {mode}", partial(convert, plain, RECIPES[name]()), names,
                    compiled=mode == "compile",
                )
            )  # fmt: skip
    candidates += linear_peers(plain, setting.modes)
    base: float | None = None
    for candidate in candidates:
        measure = partial(measure_linear, setting, case, candidate, problem.x, problem.dy, gate)
        row = setting.attempt(case, candidate.name, partial(measure, base))
        if candidate.baseline:
            base = row.values.get(BOTH)
        yield row


def measure_linear(
    setting: Setting,
    case: str,
    candidate: Candidate,
    x: Tensor,
    dy: Tensor,
    gate: common.Gate,
    base: float | None,
) -> Row:
    """Check a layer, then time it; ``base`` is the baseline's time of forward and backward."""
    module = candidate.make()
    if candidate.compiled:
        module.compile()
    db = gate.measure(training_results(module, x, dy, candidate.parameters))
    if refusal := gate.refusal(db):
        return setting.row(case, candidate.name, sqnr_db=db, refusal=refusal)
    leaf = x.clone().requires_grad_()
    step = partial(train_step, module, leaf, dy)
    values = {
        FORWARD: microseconds(setting, partial(module, leaf)),
        BOTH: microseconds(setting, step),
    }
    with torch.autograd.set_multithreading_enabled(False):
        values[ONE_THREAD] = microseconds(setting, step)
    base = values[BOTH] if candidate.baseline else base
    if base is not None:
        values |= {FORWARD_RATIO: values[FORWARD] / base, BOTH_RATIO: values[BOTH] / base}
    launches = count_launches(step)
    if launches is not None:
        values["launches"] = launches
    targets = [Target(FORWARD_RATIO, "<=", 0.65), Target(BOTH_RATIO, "<=", 2.3)]
    ours = candidate.name.split(",")[0] in RECIPES
    return setting.row(
        case,
        candidate.name,
        sqnr_db=db,
        values=values,
        baseline=candidate.baseline,
        targets=tuple(targets) if ours else (),
    )


# Autocast regions


def autocast_rows(setting: Setting, counts: Sequence[int] = (0, 10, 100)) -> Iterator[Row]:
    """Measure entry and exit of autocast with several numbers of modules."""
    for count in counts:
        case = f"autocast, {count} modules"
        for name in setting.recipes:
            run = partial(measure_autocast, setting, case, name, RECIPES[name](), count)
            yield setting.attempt(case, name, run)


def measure_autocast(setting: Setting, case: str, name: str, recipe: Recipe, count: int) -> Row:
    """Time an empty region, and the exit of one in which all modules ran."""
    modules = [
        float8lab.Linear(128, 128, bias=False, params_dtype=torch.bfloat16, device=setting.device)
        for _ in range(count)
    ]
    x = torch.randn(32, 128, device=setting.device, dtype=torch.bfloat16)
    cuda = setting.device.type == "cuda"

    def region() -> None:
        with float8lab.autocast(recipe=recipe):
            pass

    def run() -> float:
        context: Any = float8lab.autocast(recipe=recipe)
        context.__enter__()
        for module in modules:
            module(x)
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        context.__exit__(None, None, None)
        return 1e6 * (time.perf_counter() - began)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # regions without an FP8 module warn
        exits = [run() for _ in range(10 if cuda else 2)]
        values = {ENTER_EXIT: microseconds(setting, region, calls=1000)}
    if count:
        values[EXIT] = sorted(exits[1:])[len(exits[1:]) // 2]
    return setting.row(case, name, values=values, targets=(Target(ENTER_EXIT, "<=", 3.0),))


# A small model


def gpt_rows(setting: Setting, size: GptSize = SMALL, warm_up: int = 2) -> Iterator[Row]:
    """Measure forward and backward of a small GPT."""
    torch.manual_seed(setting.seed)
    plain = Gpt(size).to(setting.device, torch.bfloat16)
    millions = sum(p.numel() for p in plain.parameters()) / 1e6
    case = f"GPT of {millions:.0f}M parameters, {size.batch} x {size.sequence} tokens"
    tokens = torch.randint(size.vocabulary, (size.batch, size.sequence), device=setting.device)
    targets = tokens.roll(-1, dims=1)
    with torch.no_grad():
        right = float(plain(tokens, targets))
    modes = "eager", "graphed", *(("compile", "CUDA graphs") if setting.compile else ())
    names: list[tuple[str, Recipe | Auto | None, str]]
    names = [("bfloat16", None, mode) for mode in modes]
    for mode in modes:
        names += [(name, RECIPES[name](), mode) for name in setting.recipes]
        if mode in setting.modes:
            names.append(("auto", Auto(tokens=size.batch * size.sequence, mode=mode), mode))
    plain_ms: dict[str, tuple[float, float]] = {}  # a step of bfloat16, and to issue one, by mode

    def measure(name: str, recipe: Recipe | Auto | None, mode: str) -> Row:
        model: Any = copy.deepcopy(plain)
        if recipe is not None:
            model = converted(plain, recipe, exclude=["lm_head"])
        if mode == "compile":
            model.compile()
        elif mode == "CUDA graphs":
            model.compile(mode="reduce-overhead")
        elif mode == "graphed":
            for layer in model.layers:
                float8lab.graphed(layer)

        def step() -> Tensor:
            model.zero_grad()
            torch.compiler.cudagraph_mark_step_begin()
            torch.autograd.graph.increment_version(list(model.parameters()))
            loss: Tensor = model(tokens, targets)
            loss.backward()
            return loss.detach()

        for _ in range(warm_up):
            step()
        loss = float(step())
        label = f"{name}, {mode}"
        if not abs(loss - right) <= SAME_LOSS * right:
            return setting.row(case, label, refusal=f"wrong: loss {loss:.4f}, not {right:.4f}")
        timing = setting.wall(step)
        with torch.autograd.set_multithreading_enabled(False):
            values = {ONE_THREAD_MS: setting.wall(step).median}
        values[ISSUE_MS] = issue_ms(setting, step)
        if recipe is None:
            plain_ms[mode] = timing.median, values[ISSUE_MS]
        if mode in plain_ms:
            plain_step, plain_issue = plain_ms[mode]
            values[SAME_MODE] = plain_step / timing.median
            values[ISSUE_RATIO] = values[ISSUE_MS] / plain_issue
        auto = isinstance(recipe, Auto)
        return setting.row(
            case,
            label,
            ms=timing.samples,
            baseline=recipe is None and mode == "eager",
            values=values,
            targets=(Target(SAME_MODE, ">=", 0.97),) if auto else (),
        )

    for name, recipe, mode in names:
        label = f"{name}, {mode}"
        if recipe is None or setting.measures(label):
            yield setting.attempt(case, label, partial(measure, name, recipe, mode))


PARTS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "linear": linear_rows,
    "autocast": autocast_rows,
    "gpt": gpt_rows,
}


def rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    """Measure layer, regions and model, or those of them that were asked for."""
    for part in options.part or PARTS:
        yield from PARTS[part](setting)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all")


SUBJECT = Subject(
    "overhead",
    "CPU overhead",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dW"),
        report.Column("wall ms (quartiles)", cell=report.TIME.cell),
        report.SPEED_UP,
        report.Column(ONE_THREAD_MS, 2),
        report.Column(SAME_MODE),
        report.Column(ISSUE_MS, 1),
        report.Column(ISSUE_RATIO),
        report.Column(FORWARD, 1),
        report.Column(BOTH, 1),
        report.Column(ONE_THREAD, 1),
        report.Column(FORWARD_RATIO),
        report.Column(BOTH_RATIO),
        report.Column("launches", 0),
        report.Column(ENTER_EXIT, 1),
        report.Column(EXIT, 1),
        report.TARGET,
    ),
    rows,
    _options,
    plotted=BOTH,
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
