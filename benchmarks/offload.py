"""Measure peak memory and step time of Llama-3-8B layers with and without CPU offload.

    python -m benchmarks.offload [--layers 8] [--offloaded 1,4,7] [--recipes bf16,tensor]

This needs a CUDA GPU. A step is forward and backward, with gradients allocated before it; the peak
counts bytes beyond those that are resident between steps. The predicted saving is the bytes that a
layer moves, times the layers that are on the host at the peak (see ``predicted``). A candidate gets
no time unless its output and all gradients equal those without offload bit for bit, both with
deterministic algorithms, since attention's backward usually adds in no fixed order. Copied GB/s are
the bytes moved out and in over the step's time: near the host link's rate, the link limits the
time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import float8lab
from benchmarks import common
from benchmarks.fsdp import RECIPES, Layer
from float8lab.distributed import offload

__all__ = ["Result", "main", "predicted"]


@dataclass(frozen=True)
class Result:
    """The measurements of one model."""

    recipe: str
    offloaded: int
    refusal: str | None
    peak: int
    """The most bytes beyond those that are resident between steps."""
    moved: int
    """The bytes that one forward copies to the host."""
    predicted: float
    """The bytes by which offload should lower the peak."""
    step_ms: tuple[float, ...] = ()


def predicted(moved: int, offloaded: int, layers: int) -> float:
    """Predict the bytes that are on the host when the device needs most memory.

    The device needs most when backward begins, with all layers that are not offloaded, or, if that
    is more, in the middle of either pass, with the running layer and the one being copied.

    >>> predicted(moved=400, offloaded=4, layers=8), predicted(moved=700, offloaded=7, layers=8)
    (400.0, 600.0)
    """
    layer = moved / offloaded
    on_device = max(layers - offloaded, min(2, layers))
    return layer * (layers - on_device)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Yield a list of the bytes of each storage that leaves the device inside the block."""
    moved: list[int] = []
    original = offload._Lanes.store

    def store(self: offload._Lanes, source: Tensor) -> Tensor:
        moved.append(source.numel())
        return original(self, source)

    with mock.patch.object(offload._Lanes, "store", store):
        yield moved


@contextmanager
def deterministic() -> Iterator[None]:
    """Make all runs inside the block give equal bits."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def make_model(options: argparse.Namespace, recipe: str) -> nn.Sequential:
    """Make the layers, which are equal for every recipe except for the conversion."""
    torch.manual_seed(options.seed)
    sizes = (options.dim, options.heads, options.groups, options.ffn)
    with torch.device("cuda"):
        model = nn.Sequential(*(Layer(*sizes, nn.Linear) for _ in range(options.layers)))
    model.bfloat16()
    if recipe != "bf16":
        float8lab.convert_to_float8(model, RECIPES[recipe])
    return model


def make_step(model: nn.Sequential, x: Tensor, offloaded: int) -> Callable[[], Tensor]:
    """Return a step that runs one forward and backward and returns the output."""
    pair = float8lab.get_cpu_offload_context(enabled=offloaded > 0, num_layers=max(offloaded, 1))
    context, synchronize = pair

    def step() -> Tensor:
        model.zero_grad(set_to_none=False)
        y = x
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            for layer in model:
                with context:
                    y = layer(y)
                y = synchronize(y)
            y.backward(x.detach())
        return y.detach()

    return step


def measure(options: argparse.Namespace, recipe: str, samples: int = 10) -> list[Result]:
    """Measure all candidates of one recipe; the first candidate has no offload."""
    model = make_model(options, recipe)
    shape = (options.batch, options.sequence, options.dim)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    reference: list[Tensor] = []
    results = []
    for offloaded in [0, *options.offloaded]:
        step = make_step(model, x, offloaded)
        step()  # the first step allocates the gradients
        with deterministic(), counting() as moved:
            y = step()
        answers = [y, *(p.grad for p in model.parameters() if p.grad is not None)]
        reference = reference or [t.cpu() for t in answers]
        equal = all(torch.equal(a.cpu(), b) for a, b in zip(answers, reference, strict=True))
        del y, answers
        torch.cuda.synchronize()
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - resident
        expected = predicted(sum(moved), offloaded, options.layers) if offloaded else 0.0
        times = common.time_wall(step, samples=samples, calls=1).samples if equal else ()
        refusal = None if equal else "wrong: not the numbers without offload"
        results.append(Result(recipe, offloaded, refusal, peak, sum(moved), expected, times))
    return results


def rows(results: Sequence[Result]) -> list[list[str]]:
    """Format the lines of the table; all results are compared with the first."""
    base = results[0]
    lines = []
    for result in results:
        saved = (base.peak - result.peak) / 1e9
        line = [result.recipe, str(result.offloaded), f"{result.peak / 1e9:.2f}"]
        line += [f"{saved:.2f}", f"{result.predicted / 1e9:.2f}"]
        if result.refusal is not None or base.refusal is not None:
            lines.append([*line, result.refusal or "no reference", "-", "-"])
            continue
        timing = common.Timing(result.step_ms)
        ratio = timing.median / common.Timing(base.step_ms).median
        rate = 2 * result.moved / timing.median / 1e6
        lines.append([*line, timing.describe(), f"{ratio:.2f}x", f"{rate:.1f}"])
    return lines


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Measure all candidates and print the table."""
    parser = common.new_parser(__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--recipes", default="bf16,tensor", help=f"of bf16,{','.join(RECIPES)}")
    parser.add_argument("--offloaded", default="1,4,7", help="numbers of offloaded layers")
    common.add_sizes_of_layers(parser, layers=8, batch=1)
    options = parser.parse_args(argv)
    options.offloaded = [int(n) for n in options.offloaded.split(",")]
    common.require_cuda("benchmarks.offload")
    facts = common.header()
    print(common.describe_header(facts))
    print(f"\n{options.layers} layers, {options.batch} x {options.sequence} tokens\n")
    columns = ["recipe", "layers offloaded", "peak GB", "saved GB", "predicted GB"]
    columns += ["ms a step (quartiles)", "vs without", "copied GB/s"]
    everything, lines = [], []
    for recipe in options.recipes.split(","):
        results = measure(options, recipe)
        everything += results
        lines += rows(results)
    print(common.table(columns, lines), flush=True)
    common.append_json(options.json, facts, [asdict(result) for result in everything])
    return everything


if __name__ == "__main__":
    main()
