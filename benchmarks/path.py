"""Count the package's functions that a call enters, and the package's ops and lines.

    python -m benchmarks.path

Counts need no GPU: the Python functions of this package that a step enters after a warm-up (without
comprehensions and generators), the different functions among them, and their files; registered ops;
lines. The CPU time of a call grows with the first count. The entry and exit of an autocast region
do not count as part of a step.

On a GPU it also times a program that calls and does not wait, in turns with bfloat16: ``Linear`` of
128 features on 32 tokens, also with backward on the caller's core and ``graphed``; and a Llama-3-8B
layer and one so small that the CPU limits the speed, both also ``graphed``.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

import float8lab
from benchmarks import common
from benchmarks.recipes import RECIPES
from float8lab.recipes import Recipe

__all__ = ["GOALS", "Length", "count", "lines", "main", "ops", "walks"]

PACKAGE = Path(float8lab.__file__).parent
_GENERATED = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
_CAST = re.compile("cast|quantize|amax|transpose|value_of")
CORE = {"formats.py", "ops", "recipes", "autocast.py", "scaling", "tensor", "distributed"} | {
    "nn", "optim",
}  # fmt: skip


class Length(NamedTuple):
    """The number of functions of the package that a call enters."""

    calls: int
    functions: int
    files: int
    order: tuple[str, ...] = ()
    """``file: function`` in the order of first entry, without the functions of ops.

    ``CONTRIBUTING.md`` has some of these lists, and a test compares them.
    """


def _length(entered: Sequence[Any]) -> Length:
    files = [code.co_filename.removeprefix(f"{PACKAGE}/") for code in entered]
    names = (
        f"{file}: {code.co_name}"
        for file, code in zip(files, entered, strict=True)
        if not file.startswith(("ops/", "formats.py"))
    )
    return Length(len(entered), len(set(entered)), len(set(files)), tuple(dict.fromkeys(names)))


@contextmanager
def count() -> Iterator[Callable[[], Length]]:
    """Count the package's functions entered on this thread; yield a function that asks."""
    entered: list[Any] = []

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        ours = event == "call" and code.co_filename.startswith(str(PACKAGE))
        generated = code.co_name in _GENERATED or code.co_flags & inspect.CO_GENERATOR
        if ours and not generated:
            entered.append(code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield lambda: _length(entered)
    finally:
        sys.setprofile(before)


def _step(module: nn.Module, x: Tensor, recipe: Recipe | None) -> tuple[Length, Length]:
    """Count forward and backward of the third of three steps."""
    for _ in range(3):
        leaf = x.clone().requires_grad_()
        region = None if recipe is None else float8lab.autocast(recipe=recipe)
        if region is not None:
            region.__enter__()
        with count() as forward:
            y = module(leaf)
        if region is not None:
            region.__exit__(None, None, None)
        with count() as backward:
            y.sum().backward()
    return forward(), backward()


def walks() -> Iterator[tuple[str, Length]]:
    """Count each call that ``GOALS`` names."""
    x = torch.randn(32, 128)
    for name, make in RECIPES.items():
        layer = float8lab.Linear(128, 128, device="cpu")
        forward, backward = _step(layer, x, make())
        yield f"Linear, {name}, forward", forward
        yield f"Linear, {name}, backward", backward
    converted = nn.Linear(128, 128)
    float8lab.convert_to_float8(converted, RECIPES["delayed"]())
    yield "converted nn.Linear, delayed, forward", _step(converted, x, None)[0]
    for _ in range(2):
        model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
        with count() as conversion:
            float8lab.convert_to_float8(model)
    yield "convert_to_float8 of two layers", conversion()
    mlp = float8lab.LayerNormMLP(
        128, 256, activation="swiglu", normalization="RMSNorm", device="cpu"
    )
    forward, backward = _step(mlp, x, RECIPES["delayed"]())
    yield "LayerNormMLP, forward", forward
    yield "LayerNormMLP, backward", backward
    a, b = float8lab.quantize(x), float8lab.quantize(torch.randn(64, 128))
    for _ in range(2):
        with count() as product:
            F.linear(a, b)
    yield "F.linear of Float8Tensors", product()
    forward, gathered = _sharded(x)
    yield "FSDP2 of two layers, forward", forward
    yield "FSDP2, gathering a weight", gathered


def _sharded(x: Tensor) -> tuple[Length, Length]:
    """Count the forward of two converted layers, each in FSDP2 on one rank, and one all-gather."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/r", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            model: Any = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
            float8lab.convert_to_float8(model, RECIPES["current"]())
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            forward, _ = _step(model, x, None)
            with count() as gathered:
                model[0].unshard()
                model[0].reshard()
            return forward, gathered()
        finally:
            dist.destroy_process_group()


def ops() -> tuple[int, int]:
    """Count the registered ops, and those among them that are kinds of a cast."""
    found: list[str] = torch._C._dispatch_get_all_op_names()
    names = {name.split("::")[1].split(".")[0] for name in found if name.startswith("float8lab::")}
    return len(names), sum(bool(_CAST.search(name)) for name in names)


def lines() -> tuple[int, int]:
    """Count the lines of the entire package and of its core."""
    counted = {path: path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    core = [n for path, n in counted.items() if path.relative_to(PACKAGE).parts[0] in CORE]
    return sum(counted.values()), sum(core)


GOALS: dict[str, int] = {
    **{f"Linear, {name}, forward": 30 if name == "delayed" else 35 for name in RECIPES},
    **{f"Linear, {name}, backward": 25 if name == "delayed" else 30 for name in RECIPES},
    "converted nn.Linear, delayed, forward": 35,
    "convert_to_float8 of two layers": 120,
    "LayerNormMLP, forward": 70,
    "LayerNormMLP, backward": 90,
    "F.linear of Float8Tensors": 22,
    "FSDP2 of two layers, forward": 100,
    "registered ops": 18,
    "casts among them": 4,
    "lines of the package": 28_500,
    "lines of its core": 17_000,
}
"""The most calls, ops or lines by name."""
TIME_GOALS = {"forward": 0.8, "forward + backward": 3.2}
"""The most CPU time by name, as a multiple of bfloat16's forward and backward."""


ROUNDS = 5


def _in_turns(calls: dict[str, Callable[[], object]], count: int = 20) -> dict[str, float]:
    """Measure CPU us of each call: medians of rounds in which all calls take turns.

    A shared host is slower in some seconds than in others, for all of them alike. ``count`` calls
    wait for nothing, so together they must not launch more than the GPU's queue holds, 1024.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            for _ in range(3):
                call()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(count):
                call()
            found[name].append(1e6 * (time.perf_counter() - began) / count)
            torch.cuda.synchronize()
    return {name: statistics.median(times) for name, times in found.items()}


def _times() -> Iterator[tuple[str, float, float]]:
    """Measure CPU us of calls on a GPU, also as multiples of bfloat16's forward and backward."""
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def both(module: nn.Module) -> Callable[[], None]:
        return lambda: module(x).sum().backward()

    def linear() -> nn.Linear:
        return nn.Linear(128, 128, device="cuda", dtype=torch.bfloat16)

    plain = linear()
    for name, make in RECIPES.items():
        layer, replayed = linear(), linear()
        for one in (layer, replayed):
            float8lab.convert_to_float8(one, make())
        float8lab.graphed(replayed)
        times = _in_turns(
            {
                "bfloat16, forward": partial(plain, x),
                "bfloat16, forward + backward": both(plain),
                "forward": partial(layer, x),
                "forward + backward": both(layer),
                "graphed, forward": partial(replayed, x),
                "graphed, forward + backward": both(replayed),
            }
        )
        with float8lab.backward_on_this_core():
            one_core = _in_turns(
                {
                    "bfloat16, forward + backward": both(plain),
                    "forward + backward": both(layer),
                }
            )
        times |= {f"on one core, {way}": value for way, value in one_core.items()}
        for way, value in times.items():
            where = "on one core, " * way.startswith("on one core")
            high = times[f"{where}bfloat16, forward + backward"]
            yield f"Linear, {name}: {way}, us", value, value / high
    shapes = ((4096, 14336, 32), (256, 896, 8))
    for name, sizes in itertools.product(("delayed", "current"), shapes):
        yield from _layer_times(name, sizes)


def _layer_times(name: str, sizes: tuple[int, int, int]) -> Iterator[tuple[str, float, float]]:
    """Measure the time to issue a step of a ``TransformerLayer``."""
    block, replayed, plain = (
        float8lab.TransformerLayer(
            *sizes, num_gqa_groups=8, bias=False, normalization="RMSNorm",
            activation="swiglu", hidden_dropout=0.0, attention_dropout=0.0,
            params_dtype=torch.bfloat16,
        )
        for _ in range(3)
    )  # fmt: skip
    float8lab.graphed(replayed)
    h = torch.randn(128, 1, sizes[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(h)
    leaves: dict[nn.Module, list[Tensor]] = {
        layer: [h, *layer.parameters()] for layer in (block, replayed, plain)
    }

    def step(layer: nn.Module, recipe: Recipe | None) -> None:
        with float8lab.autocast(enabled=recipe is not None, recipe=recipe):
            y = layer(h)
        y.backward(dy)
        for tensor in leaves[layer]:  # as an optimizer's zero_grad does
            tensor.grad = None

    times = _in_turns(
        {
            "bfloat16": partial(step, plain, None),
            "eager": partial(step, block, RECIPES[name]()),
            "graphed": partial(step, replayed, RECIPES[name]()),
        },
        count=4,
    )
    for way, value in times.items():
        which = f"TransformerLayer of {sizes[0]}, {name}: {way}, time to issue a step, us"
        yield which, value, value / times["bfloat16"]


def main() -> None:
    """Print the table of all counts and times."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    rows: list[list[object]] = [
        [name, length.calls, length.functions, length.files, GOALS.get(name, "")]
        for name, length in walks()
    ]
    for name, number in zip(("registered ops", "casts among them"), ops(), strict=True):
        rows.append([name, number, "", "", GOALS[name]])
    for name, number in zip(("lines of the package", "lines of its core"), lines(), strict=True):
        rows.append([name, number, "", "", GOALS[name]])
    if torch.cuda.is_available():
        for name, value, ratio in _times():
            goals = (goal for way, goal in TIME_GOALS.items() if name.endswith(f": {way}, us"))
            goal = "".join(f" ({goal})" for goal in goals)
            rows.append([name, f"{value:.0f}", "", "", f"{ratio:.2f} x bfloat16{goal}"])
    print(common.describe_header(common.header()), end="\n\n")
    print(common.table(["way", "calls", "functions", "files", "goal, calls"], rows))


if __name__ == "__main__":
    main()
