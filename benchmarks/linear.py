"""Forward and backward of one linear layer, eager: bfloat16 against each recipe.

    python -m benchmarks.linear [--model llama-8b] [--recipe current ...]

Needs a CUDA GPU. For each layer shape and candidate: SQNR of output and gradients against float64
(a wrong answer gets no time), GPU time, wall time, the ratio to bfloat16 in the same run, and the
bytes kept for backward. Those are counted twice: the tensors that autograd saves, and what the
CUDA allocator holds between forward and backward. Both are measured on M and on M / 2 tokens, and
"saved" is twice the difference, which is the activations' part; what does not grow with M (casts
of the weight) is listed on its own.

M tokens, K input features, N output features.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import common
from benchmarks.accuracy import (
    RECIPES,
    WARM_UP_STEPS,
    Problem,
    convert,
    linear_reference,
    linear_results,
    make_linear,
    make_problem,
)
from benchmarks.shapes import MODELS, LinearShape, select

__all__ = ["Candidate", "candidates", "main", "saved_bytes"]

BASELINE = "bfloat16"
FLOOR_DB = 20.0
"""An e4m3 operand alone leaves 31.5 dB, an e5m2 one 25.5 dB, one of each 24.5 dB: below this it is
not rounding. A bfloat16 result has 55 dB."""


@dataclass(frozen=True)
class Candidate:
    """A layer and the context its forward runs in."""

    layer: nn.Module
    context: Callable[[], AbstractContextManager[Any]] = nullcontext

    def forward(self, x: Tensor) -> Tensor:
        with self.context():
            y: Tensor = self.layer(x)
        return y


class _InContext(nn.Module):
    """A candidate as a module, for ``linear_results``."""

    def __init__(self, candidate: Candidate) -> None:
        super().__init__()
        self.layer, self.candidate = candidate.layer, candidate

    def forward(self, x: Tensor) -> Tensor:
        return self.candidate.forward(x)


def _torchao(plain: nn.Linear, recipe: str) -> Candidate:
    float8 = importlib.import_module("torchao.float8")
    model = nn.Sequential(_copy(plain))
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    return Candidate(float8.convert_to_float8_training(model, config=config))


def _transformer_engine(plain: nn.Linear, recipe: str) -> Candidate:
    te = importlib.import_module("transformer_engine.pytorch")
    te_recipes = importlib.import_module("transformer_engine.common.recipe")
    layer = te.Linear(
        plain.in_features, plain.out_features, bias=False, params_dtype=plain.weight.dtype
    )
    with torch.no_grad():
        layer.weight.copy_(plain.weight)
    fp8_recipe = getattr(te_recipes, recipe)()
    return Candidate(layer, lambda: te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe))


OTHERS: dict[str, Callable[[nn.Linear], Candidate]] = {
    "torchao tensorwise": lambda plain: _torchao(plain, "tensorwise"),
    "torchao rowwise": lambda plain: _torchao(plain, "rowwise"),
    "TE delayed": lambda plain: _transformer_engine(plain, "DelayedScaling"),
    "TE current": lambda plain: _transformer_engine(plain, "Float8CurrentScaling"),
}
"""Other libraries' layers, measured where they are installed, eager like ours."""


def _copy(layer: nn.Linear) -> nn.Linear:
    N, K = layer.weight.shape
    copied = nn.Linear(K, N, bias=False, device=layer.weight.device, dtype=layer.weight.dtype)
    copied.load_state_dict(layer.state_dict())
    return copied


def candidates(plain: nn.Linear, chosen: Sequence[str]) -> dict[str, Candidate]:
    """The baseline, the chosen recipes, and what other libraries are there."""
    found = {BASELINE: Candidate(plain)}
    found |= {name: Candidate(convert(plain, RECIPES[name]())) for name in chosen}
    for name, make in OTHERS.items():
        try:
            found[name] = make(plain)
        except ImportError:
            continue
    return found


def train_step(candidate: Candidate, x: Tensor, dy: Tensor) -> None:
    """Forward and backward, gradients overwritten rather than accumulated.

    The tensors count as changed since the last step, as they are in training: a cast of the weight
    that is kept as long as the weight is the same must not be kept here.
    """
    changed = [x, *candidate.layer.parameters()]
    for tensor in changed:
        tensor.grad = None
    torch.autograd.graph.increment_version(changed)
    candidate.forward(x).backward(dy)


def saved_bytes(candidate: Candidate, x: Tensor) -> int:
    """Bytes of the distinct storages that autograd saves in one forward, parameters apart."""
    parameters = {p.untyped_storage().data_ptr() for p in candidate.layer.parameters()}
    storages: dict[int, int] = {}

    def note(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        y = candidate.forward(x.detach().requires_grad_())
    del y
    return sum(storages.values())


def held_bytes(candidate: Candidate, x: Tensor) -> int:
    """Bytes that the CUDA allocator holds after forward for backward, the output apart.

    The layer's input is made here and dropped after the call, as in a model: it counts if, and only
    if, the layer keeps it.
    """
    leaf = x.detach().requires_grad_()
    y = candidate.forward(leaf)
    y.backward(torch.ones_like(y))  # whatever is made once is there now
    del y
    leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    inp = leaf * 1
    y = candidate.forward(inp)
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
        cls, count: Callable[[Candidate, Tensor], int], candidate: Candidate, x: Tensor
    ) -> Memory:
        x = x.detach()
        whole, half = count(candidate, x), count(candidate, x[: x.shape[0] // 2].clone())
        activations = 2 * (whole - half)
        return cls(activations, whole - activations)


@dataclass(frozen=True)
class Result:
    """What was measured of one candidate on one shape."""

    shape: str
    candidate: str
    sqnr_db: dict[str, float]
    refusal: str | None
    """Why there are no times; None if there are."""
    device_ms: tuple[float, ...] = ()
    wall_ms: tuple[float, ...] = ()
    saved: Memory | None = None
    held: Memory | None = None


def measure(
    name: str, candidate: Candidate, problem: Problem, gate: common.Gate, shape: str
) -> Result:
    """Check a candidate, then time it."""
    results = linear_results(_InContext(candidate), problem, steps=WARM_UP_STEPS + 1)
    db = gate.measure(results)
    del results
    if refusal := gate.refusal(db):
        return Result(shape, name, db, refusal)
    x = problem.x.clone().requires_grad_()

    def step() -> None:
        train_step(candidate, x, problem.dy)

    return Result(
        shape,
        name,
        db,
        None,
        device_ms=common.time_device(step).samples,
        wall_ms=common.time_wall(step).samples,
        saved=Memory.measure(saved_bytes, candidate, x),
        held=Memory.measure(held_bytes, candidate, x),
    )


def measure_shape(shape: LinearShape, chosen: Sequence[str], seed: int) -> list[Result]:
    """All candidates on one shape, the baseline first."""
    problem = make_problem(
        "gaussian", shape.M, shape.K, shape.N, seed=seed, dtype=torch.bfloat16, device="cuda"
    )
    right = {name: t.float() for name, t in linear_reference(problem).items()}
    gate = common.Gate(right, FLOOR_DB)
    results = []
    for name, candidate in candidates(make_linear(problem), chosen).items():
        results.append(measure(name, candidate, problem, gate, shape.describe()))
    return results


COLUMNS = (
    "layer",
    "y / dX / dW (dB)",
    "GPU ms (quartiles)",
    "wall ms",
    "TFLOP/s",
    "x bf16",
    "saved MB",
    "of bf16",
    "held MB",
    "of bf16",
    "constant MB",
)


def format_row(result: Result, baseline: Result, flops: int) -> list[str]:
    """One line of the table; a refused candidate gets its reason and no time."""
    db = " / ".join(f"{value:.1f}" for value in result.sqnr_db.values())
    if result.refusal or result.saved is None or result.held is None:
        return [result.candidate, db, result.refusal or "", *["-"] * (len(COLUMNS) - 3)]
    device, wall = common.Timing(result.device_ms), common.Timing(result.wall_ms)

    def ratio(value: float, base: float) -> str:
        return f"{value / base:.2f}" if base else "-"

    speed = base_saved = base_held = 0.0
    if baseline.saved and baseline.held:
        speed = common.Timing(baseline.device_ms).median
        base_saved, base_held = baseline.saved.activations, baseline.held.activations
    return [
        result.candidate,
        db,
        device.describe(),
        f"{wall.median:.3f}",
        f"{flops / device.median / 1e9:.0f}",
        f"{speed / device.median:.2f}" if speed else "-",
        f"{result.saved.activations / 1e6:.1f}",
        ratio(result.saved.activations, base_saved),
        f"{result.held.activations / 1e6:.1f}",
        ratio(result.held.activations, base_held),
        f"{result.saved.constant / 1e6:.1f}",
    ]


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Measure and print."""
    parser = common.new_parser(__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--layer", help="only the layer of this name, such as 'up'")
    parser.add_argument("--tokens", type=int, metavar="M", help="default: the shape's own")
    parser.add_argument("--recipe", action="append", choices=RECIPES, help="default: all")
    args = parser.parse_args(argv)
    common.require_cuda("benchmarks.linear")
    facts = common.header()
    print(common.describe_header(facts))
    everything = []
    for shape in select(args.model, args.tokens):
        if args.layer not in (None, shape.name):
            continue
        results = measure_shape(shape, args.recipe or list(RECIPES), args.seed)
        rows = [format_row(result, results[0], shape.flops()) for result in results]
        print(f"\n{args.model}, {shape.describe()}\n\n{common.table(COLUMNS, rows)}", flush=True)
        everything += results
    common.append_json(args.json, facts, [asdict(result) for result in everything])
    return everything


if __name__ == "__main__":
    main()
