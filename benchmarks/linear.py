"""Time forward and backward of a linear layer: bfloat16, each recipe and other libraries.

    python -m benchmarks.linear [--compile] [--model llama-8b] [--recipe current ...]

This needs a CUDA GPU. For each layer shape and candidate it measures the SQNR of output and
gradients against float64 (a wrong answer gets no time), GPU time, wall time, and the bytes kept for
backward, in two ways: the tensors that autograd saves, and what the CUDA allocator holds between
forward and backward. Both are measured on M and on M / 2 tokens. "saved" is twice the difference,
the activations' bytes; bytes that do not grow with M (casts of the weight) are ``constant``.
The floor contains the three GEMMs, and the casts of x, w and dy in both orientations.

M tokens, K input features, N output features.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks import common, report
from benchmarks.accuracy import convert, linear_reference, make_linear, make_problem
from benchmarks.floor import Floor, cast_bytes
from benchmarks.models import Candidate, Trial
from benchmarks.peers import linear_peers
from benchmarks.recipes import RECIPES
from benchmarks.report import Column, Row, Setting, Subject, Target
from benchmarks.shapes import MODELS, LinearShape, select
from float8lab.recipes import Recipe

__all__ = ["SUBJECT", "Memory", "candidates", "floor_ms", "main", "rows", "saved_bytes", "storages"]

FLOOR_DB = 20.0
"""An e4m3 operand alone leaves 31.5 dB, an e5m2 one 25.5 dB, one of each 24.5 dB: below this it is
not rounding. A bfloat16 result has 55 dB."""

_FLOOR_TARGETS = {"delayed": 1.01, "current": 1.04, "rowwise": 1.04, "block": 1.04}
_PEERS = {
    "attention out": (1.48, 1.42, 1.24, 1.35, 1.03),
    "up": (1.81, 1.56, 1.47, 1.70, 1.43),
    "down": (1.64, 1.48, 1.34, 1.55, 1.17),
}
"""Speed-ups of other libraries on an H200 over bfloat16 in the same run, on 16384 tokens of
``llama-8b``: TransformerEngine 2.20.2 delayed, current and block; torchao 0.18.0 compiled,
tensorwise and rowwise."""


def targets(shape: LinearShape) -> dict[str, tuple[Target, ...]]:
    """Return targets by candidate: a most multiple of the floor, and faster than other libraries.

    Shapes other than those of ``llama-8b`` have no targets.
    """
    if shape not in MODELS["llama-8b"]:
        return {}
    delayed, current, block, tensorwise, rowwise = _PEERS[shape.name]
    peers = {
        "delayed, eager": delayed,
        "current, eager": current,
        "block, eager": block,
        "rowwise, eager": rowwise,
        "current, compile": tensorwise,
        "rowwise, compile": rowwise,
    }
    bounds = {f"{name}, eager": bound for name, bound in _FLOOR_TARGETS.items()}
    return {
        name: (
            *([Target("x floor", "<=", bounds[name])] if name in bounds else []),
            Target("x bf16", ">=", ratio),
        )
        for name, ratio in peers.items()
    }


def storages(x: Tensor) -> dict[int, int]:
    """Map each storage of a tensor, or of a subclass's inner tensors, to its number of bytes."""
    if not hasattr(x, "__tensor_flatten__"):
        storage = x.untyped_storage()
        return {storage._cdata: storage.nbytes()}
    names, _ = x.__tensor_flatten__()
    return {k: v for name in names for k, v in storages(getattr(x, name)).items()}


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Count bytes of the distinct storages, except parameters, that autograd saves in a forward."""
    parameters = {storage for p in module.parameters() for storage in storages(p)}
    found: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        found.update(storages(saved))
        return saved.detach()  # a node that kept its own output would never be freed

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = module(x.detach().requires_grad_())
    del y
    return sum(size for storage, size in found.items() if storage not in parameters)


def held_bytes(module: nn.Module, x: Tensor) -> int:
    """Count the bytes that the CUDA allocator holds for backward, without the output.

    This function makes the layer's input and drops it after the call, as a model does: the input
    counts if, and only if, the layer keeps it.
    """
    leaf = x.detach().requires_grad_()
    y = module(leaf)
    y.backward(torch.ones_like(y))  # allocates everything that is allocated only once
    del y
    leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    inp = leaf * 1
    y = module(inp)
    del inp
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before - y.untyped_storage().nbytes()


@dataclass(frozen=True)
class Memory:
    """Bytes kept for backward, split by whether they grow with the number of tokens."""

    activations: int
    constant: int

    @classmethod
    def measure(
        cls, count: Callable[[nn.Module, Tensor], int], module: nn.Module, x: Tensor
    ) -> Memory:
        x = x.detach()
        whole, half = count(module, x), count(module, x[: x.shape[0] // 2].clone())
        activations = 2 * (whole - half)
        return cls(activations, whole - activations)


def kept_for_backward(module: nn.Module, x: Tensor) -> dict[str, float]:
    """Measure the values of the columns about memory."""
    saved = Memory.measure(saved_bytes, module, x)
    values = {"saved MB": saved.activations / 1e6, "constant MB": saved.constant / 1e6}
    if x.is_cuda:
        values["held MB"] = Memory.measure(held_bytes, module, x).activations / 1e6
    return values


def floor_ms(floor: Floor, shape: LinearShape, recipe: Recipe | None) -> float | None:
    """Return the floor in ms, from the GEMMs and the casts of three tensors."""
    gemms = floor.gemms_ms([shape], recipe)
    if gemms is None:
        return None
    elements = shape.M * shape.K + shape.N * shape.K + shape.M * shape.N
    return gemms + floor.move_ms(cast_bytes(recipe, elements))


def candidates(setting: Setting, plain: nn.Linear) -> Iterator[Candidate]:
    """Iterate over the baseline, ours by recipe, and the other libraries that are installed."""
    names = {"dW": "weight"}
    yield Candidate("bfloat16, eager", lambda: plain, names, baseline=True)
    for mode in setting.modes:
        for name in setting.recipes:
            recipe = RECIPES[name]()
            yield Candidate(
                f"{name}, {mode}",
                partial(convert, plain, recipe),
                names,
                recipe=recipe,
                compiled=mode == "compile",
                fp8=True,
            )
    yield from linear_peers(plain, setting.modes)


def rows(setting: Setting, shapes: Sequence[LinearShape]) -> Iterator[Row]:
    """Measure all candidates on every shape."""
    for shape in shapes:
        problem = make_problem(
            "gaussian", shape.M, shape.K, shape.N, seed=setting.seed, dtype=torch.bfloat16,
            device=setting.device.type,
        )  # fmt: skip
        right = {name: t.float() for name, t in linear_reference(problem).items()}
        trial = Trial(
            shape.describe(),
            (problem.x, problem.dy),
            common.Gate(right, FLOOR_DB),
            shape.flops(),
            partial(floor_ms, setting.floor, shape),
            extra=kept_for_backward,
        )
        plain = make_linear(problem)
        yield from trial.rows(setting, candidates(setting, plain), targets(shape))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--layer", help="only the layer of this name, such as 'up'")
    parser.add_argument("--tokens", type=int, metavar="M", help="default: the shape's own")


def _rows(setting: Setting, options: argparse.Namespace) -> Iterator[Row]:
    shapes = select(options.model, options.tokens)
    return rows(setting, [s for s in shapes if options.layer in (None, s.name)])


def _relative_to_bf16(title: str) -> Column:
    def cell(row: Row, base: Row | None) -> str | None:
        own, whole = row.values.get(title), base.values.get(title) if base else None
        return f"{own / whole:.2f}" if own is not None and whole else None

    return Column(f"{title.removesuffix(' MB')}, of bf16", cell=cell)


SUBJECT = Subject(
    "linear",
    "Linear layer: forward and backward",
    __doc__,
    (
        report.NAME,
        report.decibels("y", "dX", "dW"),
        *report.TRAINING,
        report.FLOPS,
        report.CEILING,
        Column("saved MB", 1),
        _relative_to_bf16("saved MB"),
        _relative_to_bf16("held MB"),
        Column("constant MB", 1),
        report.TARGET,
    ),
    _rows,
    _options,
    recipes=tuple(RECIPES),
)


main = partial(report.main, SUBJECT)

if __name__ == "__main__":
    report.finish(main())
