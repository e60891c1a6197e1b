"""CPU offload of activations: peak memory and step time of Llama-3-8B layers, with and without.

    python -m benchmarks.offload [--layers 8] [--offloaded 1,4,7] [--recipes bf16,tensor]

Needs a CUDA GPU. A step is forward and backward, gradients allocated before; the peak is over what
is resident between steps. The predicted saving is the bytes that a layer moves, times the layers
that are away at the peak: all that are offloaded but one, which is loaded for the layer that runs
(see ``predicted``). A candidate gets no time unless its output and all gradients are those without
offload bit for bit, both with deterministic algorithms: attention's backward usually adds in no
fixed order. Copied GB/s are the bytes moved out and in over the step's time: near the host link's
rate it is the link that sets the time.
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
    """What was measured of one model."""

    recipe: str
    offloaded: int
    refusal: str | None
    peak: int
    """Bytes over what is resident between steps."""
    moved: int
    """Bytes that one forward copies to the host."""
    predicted: float
    """Bytes that offload should take off the peak."""
    step_ms: tuple[float, ...] = ()


def predicted(moved: int, offloaded: int, layers: int) -> float:
    """Bytes that are on the host when the device needs most.

    That is when backward begins, with what is not offloaded on the device, or, if more, in the
    middle of either pass, with the layer that runs and the one that is on its way.

    >>> predicted(moved=400, offloaded=4, layers=8), predicted(moved=700, offloaded=7, layers=8)
    (400.0, 600.0)
    """
    layer = moved / offloaded
    on_device = max(layers - offloaded, min(2, layers))
    return layer * (layers - on_device)


@contextmanager
def counting() -> Iterator[list[int]]:
    """Bytes of each storage that leaves the device inside."""
    moved: list[int] = []
    original = offload._Lanes.store

    def store(self: offload._Lanes, source: Tensor) -> Tensor:
        moved.append(source.numel())
        return original(self, source)

    with mock.patch.object(offload._Lanes, "store", store):
        yield moved


@contextmanager
def deterministic() -> Iterator[None]:
    """Equal bits in every run, inside."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def make_model(options: argparse.Namespace, recipe: str) -> nn.Sequential:
    """The layers, the same for every recipe but for conversion."""
    torch.manual_seed(options.seed)
    sizes = (options.dim, options.heads, options.groups, options.ffn)
    with torch.device("cuda"):
        model = nn.Sequential(*(Layer(*sizes, nn.Linear) for _ in range(options.layers)))
    model.bfloat16()
    if recipe != "bf16":
        float8lab.convert_to_float8(model, RECIPES[recipe])
    return model


def make_step(model: nn.Sequential, x: Tensor, offloaded: int) -> Callable[[], Tensor]:
    """One forward and backward; returns the output."""
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
    """All candidates of one recipe; the first is the one without offload."""
    model = make_model(options, recipe)
    shape = (options.batch, options.sequence, options.dim)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    reference: list[Tensor] = []
    results = []
    for offloaded in [0, *options.offloaded]:
        step = make_step(model, x, offloaded)
        step()  # allocates, the first time
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
    """Lines of the table; the first result is what the others are compared with."""
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
    """Measure and print."""
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
