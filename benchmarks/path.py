"""How long the way of a call through the package is, and how large the package.

    python -m benchmarks.path

Counts, which need no GPU: the Python functions of this package that a step enters after a warm-up
(comprehensions and generators apart), how many different ones these are, and in how many files;
registered ops; lines. The CPU time of a call grows with the first. What an autocast region does at
its entry and exit is no part of a step here.

On a GPU also times, of a program that calls and does not wait: ``Linear`` of 128 features on 32
tokens, beside bfloat16, also with backward on the caller's core and ``graphed``; a Llama-3-8B
layer, and one so small that the CPU is what takes the time, both ``graphed`` as well.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
    """How long a way through the package is."""

    calls: int
    functions: int
    files: int
    order: tuple[str, ...] = ()
    """``file: function`` in the order in which they are first entered, without those of ops.

    ``CONTRIBUTING.md`` has some of these lists, and a test compares.
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
    """Count the package's functions that are entered on this thread; yields how to ask."""
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
    """Forward and backward of the third of three steps."""
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
    """The length of each way that ``GOALS`` names."""
    x = torch.randn(32, 128)
    for name, make in RECIPES.items():
        layer = float8lab.Linear(128, 128, device="cpu")
        forward, backward = _step(layer, x, make())
        yield f"Linear, {name}, forward", forward
        yield f"Linear, {name}, backward", backward
    converted = nn.Linear(128, 128)
    float8lab.convert_to_float8(converted, RECIPES["delayed"]())
    yield "converted nn.Linear, delayed, forward", _step(converted, x, None)[0]
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
    """Two converted layers on one rank, each gathered on its own: forward, and gathering one."""
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
    """Registered ops, and how many of them are kinds of a cast."""
    found: list[str] = torch._C._dispatch_get_all_op_names()
    names = {name.split("::")[1].split(".")[0] for name in found if name.startswith("float8lab::")}
    return len(names), sum(bool(_CAST.search(name)) for name in names)


def lines() -> tuple[int, int]:
    """Lines of the whole package, and of its core."""
    counted = {path: path.read_text().count("\n") for path in PACKAGE.rglob("*.py")}
    core = [n for path, n in counted.items() if path.relative_to(PACKAGE).parts[0] in CORE]
    return sum(counted.values()), sum(core)


GOALS: dict[str, int] = {
    **{f"Linear, {name}, forward": 30 if name == "delayed" else 35 for name in RECIPES},
    **{f"Linear, {name}, backward": 25 if name == "delayed" else 30 for name in RECIPES},
    "converted nn.Linear, delayed, forward": 35,
    "LayerNormMLP, forward": 70,
    "LayerNormMLP, backward": 90,
    "F.linear of Float8Tensors": 22,
    "FSDP2 of two layers, forward": 100,
    "registered ops": 18,
    "casts among them": 4,
    "lines of the package": 28_500,
    "lines of its core": 17_000,
}
"""At most so many calls, ops or lines."""


def _times() -> Iterator[tuple[str, float]]:
    """CPU times of calls on a GPU."""
    x = torch.randn(32, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def both(module: nn.Module) -> Callable[[], None]:
        return lambda: module(x).sum().backward()

    def us(fn: Callable[[], object]) -> float:
        return 1e3 * common.time_wall(fn, warm_up=10, samples=5, calls=100).median

    plain = nn.Linear(128, 128, device="cuda", dtype=torch.bfloat16)
    yield "bfloat16 Linear, forward, us", us(lambda: plain(x))
    yield "bfloat16 Linear, forward + backward, us", us(both(plain))
    for name, make in RECIPES.items():
        layer = nn.Linear(128, 128, device="cuda", dtype=torch.bfloat16)
        float8lab.convert_to_float8(layer, make())
        for how, enter in (("", nullcontext), (", on one core", float8lab.backward_on_this_core)):
            with enter():
                yield f"Linear, {name}{how}, forward, us", us(partial(layer, x))
                yield f"Linear, {name}{how}, forward + backward, us", us(both(layer))
        float8lab.graphed(layer)
        yield f"Linear, {name}, graphed, forward, us", us(partial(layer, x))
        yield f"Linear, {name}, graphed, forward + backward, us", us(both(layer))
    shapes = ((4096, 14336, 32), (256, 896, 8))
    for name, sizes in itertools.product(("delayed", "current"), shapes):
        block = float8lab.TransformerLayer(
            *sizes, num_gqa_groups=8, bias=False, normalization="RMSNorm",
            activation="swiglu", hidden_dropout=0.0, attention_dropout=0.0,
            params_dtype=torch.bfloat16,
        )  # fmt: skip
        h = torch.randn(128, 1, sizes[0], device="cuda", dtype=torch.bfloat16, requires_grad=True)

        def step(block: nn.Module = block, h: Tensor = h, name: str = name) -> None:
            with float8lab.autocast(recipe=RECIPES[name]()):
                y = block(h)
            y.sum().backward()

        which = f"TransformerLayer of {sizes[0]}, {name}"
        yield f"{which}, time to issue a step, us", us(step)
        float8lab.graphed(block)
        yield f"{which}, graphed, time to issue a step, us", us(step)


def main() -> None:
    """Print a table."""
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
        rows += [[name, f"{value:.0f}", "", "", ""] for name, value in _times()]
    print(common.describe_header(common.header()), end="\n\n")
    print(common.table(["way", "calls", "functions", "files", "goal, calls"], rows))


if __name__ == "__main__":
    main()
