"""The timers, the header, the table and the test of correctness that all benchmarks share.

A benchmark times only candidates that have passed a ``Gate``: for a candidate with a wrong answer
the error is printed in place of a time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from float8lab.inspect.timing import sleep_rate

__all__ = [
    "Gate",
    "Sustained",
    "Timing",
    "add_sizes_of_layers",
    "append_json",
    "forbid_eager_fallback",
    "gpu_events",
    "header",
    "new_parser",
    "require_cuda",
    "sqnr",
    "start_ranks",
    "table",
    "time_device",
    "time_slowest",
    "time_sustained",
    "time_wall",
]

ROOT = Path(__file__).resolve().parent.parent
FLUSH_BYTES = 512 * 2**20
"""The bytes written before each sample to flush the cache: several times the size of any L2."""
SAMPLES_PER_BACKLOG = 4
"""Few enough that all launches fit in the driver's queue: a full queue would block the CPU."""

BUSY_CYCLES = 2_000_000_000
"""About one second of work during which clocks are read, since an idle GPU lowers its clocks."""


@dataclass(frozen=True)
class Timing:
    """Samples of one duration, in milliseconds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the first and the third quartile."""
        if len(self.samples) < 2:
            return self.median, self.median
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third

    def describe(self) -> str:
        """Format the median and the quartiles.

        >>> Timing((1.0, 2.0, 3.0)).describe()
        '2.000 (1.500-2.500)'
        """
        first, third = self.quartiles
        return f"{self.median:.3f} ({first:.3f}-{third:.3f})"


def _enqueue_seconds(fn: Callable[[], object], repeats: int = 3) -> float:
    """Return the longest CPU time of a few calls that put their work on the GPU's queue."""
    worst = 0.0
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        fn()
        worst = max(worst, time.perf_counter() - began)
    torch.cuda.synchronize()
    return worst


def time_device(fn: Callable[[], object], *, warm_up: int = 10, samples: int = 40) -> Timing:
    """Measure the GPU time of ``fn`` between CUDA events, from a cold L2 cache.

    The GPU first gets a backlog that is long enough for the CPU to queue the timed work behind it,
    so the result does not contain launch time on the CPU. ``fn`` must not wait for the GPU.
    """
    for _ in range(warm_up):
        fn()
    scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    backlog = int(sleep_rate() * 2 * SAMPLES_PER_BACKLOG * (_enqueue_seconds(fn) + 1e-4))
    timed: list[float] = []
    while len(timed) < samples:
        events = [
            tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(SAMPLES_PER_BACKLOG)
        ]
        torch.cuda._sleep(backlog)
        for start, end in events:
            scratch.zero_()
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize()
        timed += [start.elapsed_time(end) for start, end in events]
    return Timing(tuple(timed[:samples]))


def gpu_events(step: Callable[[], object], steps: int = 1, *, cpu: bool = False) -> list[Any]:
    """Return torch's profiler events of the kernels, copies and fills of consecutive steps.

    With ``cpu`` the profiler also follows the CPU, which takes time.
    """
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[*[kinds.CPU] * cpu, kinds.CUDA]) as profile:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [
        event
        for event in profile.events()
        if event.device_type == on_gpu and not getattr(event, "is_user_annotation", False)
    ]


def time_wall(
    fn: Callable[[], object], *, warm_up: int = 3, samples: int = 10, calls: int = 10
) -> Timing:
    """Measure the host time of one of ``calls`` calls in a row, launches included.

    This works without a GPU. Where it exceeds ``time_device``, the CPU limits the speed.
    """

    def wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    for _ in range(warm_up):
        fn()
    timed = []
    for _ in range(samples):
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            fn()
        wait()
        timed.append(1e3 * (time.perf_counter() - began) / calls)
    return Timing(tuple(timed))


def time_slowest(
    step: Callable[[], object], device: torch.device, *, warm_up: int = 3, samples: int = 5,
    calls: int = 10,
) -> float:  # fmt: skip
    """Return the median of ``time_wall`` on the slowest rank; on a CPU, time a single call."""
    few = device.type != "cuda"
    dist.barrier()
    timing = time_wall(
        step, warm_up=1 if few else warm_up, samples=1 if few else samples,
        calls=1 if few else calls,
    )  # fmt: skip
    slowest = torch.tensor(timing.median, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


@dataclass(frozen=True)
class Sustained:
    """The time of a step in training, when a GPU at its power limit has lower clocks."""

    timing: Timing
    """The time of a step, with one sample for each round."""
    mhz: float | None
    """The clock of the multiprocessors during the steps; None if nvidia-smi does not tell."""
    watts: float | None


def time_sustained(
    steps: Mapping[str, Callable[[], object]],
    *,
    seconds: float = 1.0,
    rounds: int = 3,
    agree: Callable[[bool], bool] = bool,
) -> dict[str, Sustained]:
    """Measure a step of each candidate, repeated for ``seconds``; the candidates take turns.

    A GPU that is already hot is a few percent slower for later candidates, so all take turns.
    Ranks that communicate in a step must take equally many steps: ``agree`` replaces each rank's
    decision whether to continue by the decision of one rank.
    """
    found: dict[str, list[tuple[float, tuple[float, float] | None]]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(_run_for(step, seconds, agree))
    results = {}
    for name, samples in found.items():
        read = [state for _, state in samples if state is not None]
        mhz, watts = (statistics.mean(v) for v in zip(*read, strict=True)) if read else (None, None)
        results[name] = Sustained(Timing(tuple(ms for ms, _ in samples)), mhz, watts)
    return results


def _run_for(
    step: Callable[[], object], seconds: float, agree: Callable[[bool], bool]
) -> tuple[float, tuple[float, float] | None]:
    """Repeat a step for so long; return its ms, and clock and watts of the second half."""
    gpu = torch.cuda.is_available()
    wait = torch.cuda.synchronize if gpu else lambda: None
    for _ in range(2):
        step()
    wait()
    calls, reading = 0, None
    began = now = time.perf_counter()
    while agree(now - began < seconds):
        for _ in range(4):
            step()
        calls += 4
        if reading is None and gpu and now - began > seconds / 2:
            reading = _start_reading()
        wait()
        now = time.perf_counter()
    return 1e3 * (now - began) / calls, None if reading is None else _read(reading)


def _start_reading() -> subprocess.Popen[str] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    query = ("--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", f"--id=GPU-{gpu}")
    return subprocess.Popen(
        ["nvidia-smi", *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def _read(reading: subprocess.Popen[str]) -> tuple[float, float] | None:
    answer = reading.communicate()[0].strip().split(",")
    try:
        mhz, watts = map(float, answer)
    except ValueError:
        return None
    return mhz, watts


def sqnr(result: Tensor, reference: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in dB, in float64; higher is closer.

    The ratio is NaN if ``result`` is not finite or the shapes differ, and inf if both are equal.

    >>> round(sqnr(torch.tensor([1.01]), torch.tensor([1.0])), 1)
    40.0
    """
    if result.shape != reference.shape:
        return float("nan")
    signal = reference.double()
    noise = result.to(signal.device).double() - signal
    if not bool(noise.isfinite().all()):
        return float("nan")
    if not bool(noise.any()):
        return float("inf")
    return float(10 * torch.log10(signal.square().sum() / noise.square().sum()))


@dataclass(frozen=True)
class Gate:
    """The right answers by name, and the least SQNR in dB that a candidate's answers need."""

    reference: Mapping[str, Tensor]
    floor_db: float

    def measure(self, results: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the SQNR of each output; a missing output has NaN."""
        return {
            name: sqnr(results[name], right) if name in results else float("nan")
            for name, right in self.reference.items()
        }

    def refusal(self, measured: Mapping[str, float]) -> str | None:
        """Return why a candidate with this SQNR may not be timed; None if it may be."""
        wrong = [f"{name} {db:.1f} dB" for name, db in measured.items() if not db >= self.floor_db]
        return f"wrong: {', '.join(wrong)}, below {self.floor_db:g} dB" if wrong else None

    def admits(self, results: Mapping[str, Tensor]) -> bool:
        """Whether every output is present and close enough."""
        return self.refusal(self.measure(results)) is None


def _run(*command: str) -> str | None:
    """Return the output of a command; None if the command is absent or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str:
    commit = _run("git", "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return "unknown"
    return f"{commit}, with local changes" if _run("git", "status", "--porcelain") else commit


def _gpu() -> dict[str, str]:
    """Describe the GPU that torch uses, with its state read under load; nothing is set."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {"GPU": f"{device.name}, {device.multi_processor_count} SMs"}
    fields = "clocks.sm,clocks.max.sm,clocks.mem,power.limit,driver_version"
    query = ("--query-gpu=" + fields, "--format=csv,noheader", f"--id=GPU-{device.uuid}")
    torch.cuda._sleep(BUSY_CYCLES)
    answer = _run("nvidia-smi", *query)
    torch.cuda.synchronize()
    if answer is None or answer.count(",") != fields.count(","):
        return facts | {"clocks": "not readable", "driver": "not readable"}
    sm, sm_max, memory, power, driver = (value.strip() for value in answer.split(","))
    clocks = f"SM {sm} as read under load (maximum {sm_max}), memory {memory}, power limit {power}"
    return facts | {"clocks": clocks, "driver": driver}


def _versions() -> dict[str, str]:
    """Return the versions of triton and of other FP8 libraries that are installed."""
    found = {"triton": "not installed"}
    for name in ("triton", "torchao", "transformer_engine"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _command() -> str:
    """Return the command line without the options of output files and of the commit."""
    words = ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}"]
    options = iter(sys.argv[1:])
    for word in options:
        if word in ("--json", "--plot", "--commit"):
            next(options, None)
        else:
            words.append(word)
    return shlex.join(words)


def header(commit: str | None = None) -> dict[str, str]:
    """Collect the facts that a reader needs to repeat the measurement.

    Args:
        commit: the commit that is measured, where git cannot tell.
    """
    cuda = torch.cuda.is_available()
    machine = _gpu() if cuda else {"CPU": f"{torch.get_num_threads()} threads, no GPU"}
    return machine | {
        "torch": torch.__version__,
        **_versions(),
        "commit": commit or _commit(),
        "command": _command(),
    }


def describe_header(facts: Mapping[str, str]) -> str:
    """Format the header as a markdown list."""
    return "\n".join(f"- {name}: {value}" for name, value in facts.items())


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a markdown table: the first column is left-aligned, all others right-aligned.

    >>> print(table(["op", "ms"], [["cast", 1.5]]))
    | op   |  ms |
    | :--- | --: |
    | cast | 1.5 |
    """
    cells = [[str(cell) for cell in row] for row in (columns, *rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    rule = [f":{'-' * (widths[0] - 1)}", *(f"{'-' * (width - 1)}:" for width in widths[1:])]
    lines = (
        " | ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in (cells[0], rule, *cells[1:])
    )
    return "\n".join(f"| {line} |" for line in lines)


def append_json(path: Path | None, facts: Mapping[str, str], rows: Sequence[object]) -> None:
    """Append one line of rows to a JSON history; the lines of one run have equal headers."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), **facts}
    with path.open("a") as history:
        history.write(json.dumps({"header": record, "rows": rows}) + "\n")


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append each row, as a line")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (default: 0)")
    return parser


def add_sizes_of_layers(parser: argparse.ArgumentParser, **others: int) -> None:
    """Add options for sizes of decoder layers, with Llama 8B's as defaults, and for ``others``."""
    usual = {"dim": 4096, "heads": 32, "groups": 8, "ffn": 14336, "sequence": 8192}
    for name, default in (usual | others).items():
        parser.add_argument(f"--{name}", type=int, default=default)


def start_ranks(kind: str) -> torch.device:
    """Create the process group of torchrun's ranks; return this rank's device of that type."""
    if kind == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(0))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def forbid_eager_fallback() -> None:
    """Make torch compile every candidate or raise; at its limit it would run eager code instead."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def require_cuda(program: str) -> None:
    """Exit the program with a message if there is no GPU to time."""
    if not torch.cuda.is_available():
        sys.exit(
            f"{program} measures a CUDA GPU (compute capability 9.0 for its FP8 GEMMs), and torch"
            " sees none here. On a CPU, python -m benchmarks.accuracy measures the accuracy."
        )
