"""Compare this version's time with an older version's, in turns in one process.

    python -m benchmarks.versions --base FOLDER [--case experts] [--seconds 1] [--rounds 4]

This needs a CUDA GPU. ``FOLDER`` holds the package of the older version, as made by
``git archive COMMIT float8lab | tar -x -C FOLDER``. That package is imported under another name
beside this version. Each case first checks that the results of both versions are close. Then both
take turns, as in training, and the ratio of each round is printed: below 1, this version is faster.
``issue`` is the CPU time to put a step on the GPU's queue. ``kernels`` is the GPU's time in all
kernels of a step, which shows differences that the host's noise hides.

M tokens, N out features, K in features, E experts.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import float8lab
from benchmarks import common
from benchmarks.experts import MODELS
from benchmarks.fsdp import Layer
from benchmarks.recipes import RECIPES
from float8lab.formats import E4M3, E5M2

Step = Callable[[], tuple[Tensor, ...]]
__all__ = ["CASES", "compare", "import_version", "main"]

OLD = "float8lab_base"
FLOOR_DB = 15.0
"""The least SQNR between two versions, whose steps in FP8 may have different scales."""


def import_version(folder: Path, place: Path) -> ModuleType:
    """Import an older version's package, copied to ``place``, with its own namespace of ops."""
    shutil.copytree(folder / "float8lab", place / OLD)
    for path in (place / OLD).rglob("*.py"):
        path.write_text(re.sub(r"\bfloat8lab\b", OLD, path.read_text()))
    sys.path.insert(0, str(place))
    return importlib.import_module(OLD)


def _recipe(package: ModuleType, name: str) -> object:
    """Make the recipe of this name from the classes of a package."""
    here = RECIPES[name]()
    given = {field.name: getattr(here, field.name) for field in fields(here)}
    given = {name: value for name, value in given.items() if not isinstance(value, enum.Enum)}
    kind = getattr(package.recipes, type(here).__name__)
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in given.items() if name in known})


def _random(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)


def _training_step(
    package: ModuleType, recipe: str, module: nn.Module, x: Tensor, features: int, *inputs: Tensor
) -> Step:
    """Return a step of a module's forward and backward on ``x`` and further inputs.

    Modules of all versions get the same weights.
    """
    parameters = list(module.parameters())
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            drawn = _random(*parameter.shape, seed=100 + index)
            parameter.copy_(drawn * parameter.shape[-1] ** -0.5)
    x.requires_grad_()
    dy, made = _random(*x.shape[:-1], features, seed=1), _recipe(package, recipe)

    def step() -> tuple[Tensor, ...]:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with package.autocast(enabled=True, recipe=made):
            y = module(x, *inputs)
        y.backward(dy)
        assert x.grad is not None
        return y.detach(), x.grad, *(p.grad for p in parameters if p.grad is not None)

    return step


NEW = {"device": "cuda", "params_dtype": torch.bfloat16}
"""The arguments of every module."""


def _linear(recipe: str, m: int, k: int, n: int, package: ModuleType) -> Step:
    module = package.nn.Linear(k, n, bias=False, **NEW)
    return _training_step(package, recipe, module, _random(m, k), n)


def _layer(recipe: str, package: ModuleType) -> Step:
    module = package.nn.TransformerLayer(
        4096, 14336, 32, num_gqa_groups=8, normalization="RMSNorm", activation="swiglu",
        bias=False, hidden_dropout=0.0, attention_dropout=0.0, attn_input_format="bshd", **NEW,
    )  # fmt: skip
    return _training_step(package, recipe, module, _random(2, 4096, 4096), 4096)


def _small_stack(recipe: str, package: ModuleType) -> Step:
    new = partial(
        package.nn.TransformerLayer, 512, 2048, 8, hidden_dropout=0.0, attention_dropout=0.0,
        attn_input_format="bshd", **NEW,
    )  # fmt: skip
    module = nn.Sequential(*(new() for _ in range(8)))
    return _training_step(package, recipe, module, _random(16, 1024, 512), 512)


def _compiled_stack(recipe: str, package: ModuleType) -> Step:
    module = nn.Sequential(*(Layer(512, 8, 8, 1536, nn.Linear) for _ in range(8)))
    package.convert_to_float8(module.to("cuda", torch.bfloat16), _recipe(package, recipe))
    module.compile()
    return _training_step(package, recipe, module, _random(16, 1024, 512), 512)


def _grouped(recipe: str, jagged: bool, package: ModuleType) -> Step:
    e, m, k, n = 8, 32768, 7168, 2048
    module = package.nn.GroupedLinear(e, k, n, bias=False, **NEW)
    sizes = [m // e] * e
    if jagged:
        sizes = [m // e + (97 * (i - e // 2) if i else 0) for i in range(e)]
        sizes[0] += m - sum(sizes)
    m_splits = torch.tensor(sizes, device="cuda")
    return _training_step(package, recipe, module, _random(m, k), n, m_splits)


def _experts(recipe: str, model: str, package: ModuleType) -> Step:
    shape = MODELS[model]
    module = package.ExpertMLP(shape.E, shape.H, shape.F, **NEW)
    best = _random(shape.T, shape.E, seed=2).float().topk(shape.K)
    weights = best.values.softmax(-1).to(torch.bfloat16)
    x = _random(shape.T, shape.H)
    return _training_step(package, recipe, module, x, shape.H, weights, best.indices)


def _cast(
    block: tuple[int, int], dtype: torch.dtype, columnwise: bool, package: ModuleType
) -> Step:
    x = _random(16384, 8192)
    rule, alignment = ("e8m0", 32) if block == (1, 32) else ("fp32", package.ops.reference.ALIGN)
    arguments = ("", [x], x.dtype, dtype, block, rule, 0.0, alignment, True, columnwise)

    def step() -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = package.ops.cast_op(*arguments)
        return results

    return step


BLOCKS = {"tensor": (-1, -1), "row": (1, -1), "1x128": (1, 128), "128x128": (128, 128)}
CASES: dict[str, Callable[[ModuleType], Step]] = {
    **{
        f"cast {kind} {name}{' both' if columnwise else ''}": partial(
            _cast, block, dtype, columnwise
        )
        for kind, dtype in (("e4m3", E4M3), ("e5m2", E5M2))
        for name, block in {**BLOCKS, "MX 1x32": (1, 32)}.items()
        for columnwise in (False, True)
    },
    **{
        f"Linear {features}, {recipe}": partial(_linear, recipe, tokens, features, features)
        for tokens, features in ((8192, 4096), (32, 128))
        for recipe in ("delayed", "current", "block")
    },
    **{f"Llama layer, {recipe}": partial(_layer, recipe) for recipe in ("delayed", "current")},
    **{
        f"small stack, {recipe}": partial(_small_stack, recipe) for recipe in ("delayed", "current")
    },
    **{
        f"compiled stack, {recipe}": partial(_compiled_stack, recipe)
        for recipe in ("delayed", "current", "rowwise", "block")
    },
    **{
        f"grouped{' jagged' if jagged else ''}, {recipe}": partial(_grouped, recipe, jagged)
        for recipe in ("delayed", "current", "block")
        for jagged in (False, True)
    },
    **{
        f"experts {model}, {recipe}": partial(_experts, recipe, model)
        for model in MODELS
        for recipe in ("delayed", "current", "block")
    },
}
"""Functions by name that take a package and return a step, which returns its results."""


def _issue_ms(steps: Mapping[str, Step]) -> dict[str, float]:
    """Measure the median CPU ms to queue a step of each version; the versions take turns."""
    samples: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(40):
        for key, step in steps.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            samples[key].append(1e3 * (time.perf_counter() - began))
    torch.cuda.synchronize()
    return {key: statistics.median(times) for key, times in samples.items()}


def _kernels_ms(steps: Mapping[str, Step], turns: int = 3, count: int = 6) -> dict[str, float]:
    """Measure the median GPU ms in the kernels of a step of each version, in turns.

    For each launch we take the median of ``count`` steps, so that a disturbed step has no effect.
    """
    samples: dict[str, list[float]] = {key: [] for key in steps}
    for _ in range(turns):
        for key, step in steps.items():
            step()
            torch.cuda.synchronize()
            samples[key].append(ms_of_one_step(common.gpu_events(step, count), count))
    return {key: statistics.median(times) for key, times in samples.items()}


def ms_of_one_step(events: Iterable[Any], count: int) -> float:
    """Return the kernel time of one of ``count`` equal steps; the mean if the steps differ."""
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    kernels.sort(key=lambda event: event.time_range.start)
    times = [1e-3 * event.time_range.elapsed_us() for event in kernels]
    launches, rest = divmod(len(times), count)
    if rest:
        return sum(times) / count
    return sum(statistics.median(times[i::launches]) for i in range(launches))


def _sqnr_each(results: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the lowest SQNR of any result."""
    pairs = [(a, b) for a, b in zip(results, others, strict=True) if a is not None]
    return min(common.sqnr(a.float(), b.float()) for a, b in pairs if a.numel())


def compare(
    name: str, old: ModuleType, *, seconds: float, rounds: int, floor_db: float = FLOOR_DB
) -> str:
    """Return a line with the ratio of this version's time to the older version's."""
    steps = {"new": CASES[name](float8lab), "old": CASES[name](old)}
    close = _sqnr_each(steps["new"](), steps["old"]())
    if not close >= floor_db:
        return f"{name:32} wrong: {close:.1f} dB from the older version"
    timed = common.time_sustained(steps, seconds=seconds, rounds=rounds)
    ratios = [
        a / b for a, b in zip(timed["new"].timing.samples, timed["old"].timing.samples, strict=True)
    ]
    issue, kernels = _issue_ms(steps), _kernels_ms(steps)
    return (
        f"{name:32} {timed['new'].timing.median:8.3f} ms {timed['old'].timing.median:8.3f} ms  "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})  "
        f"issue {issue['new']:.3f} / {issue['old']:.3f} ms  "
        f"kernels {kernels['new']:.3f} / {kernels['old']:.3f} ms  {close:.0f} dB"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the chosen cases and print a line for each."""
    parser = argparse.ArgumentParser(prog="benchmarks.versions", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the older package")
    parser.add_argument("--case", action="append", help="part of a case's name; default: all")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(argv)
    common.require_cuda("benchmarks.versions")
    common.forbid_eager_fallback()
    for key, value in common.header().items():
        print(f"{key}: {value}")
    print(f"{'case':32} {'this':>11} {'older':>11}  this / older (least-most)")
    with tempfile.TemporaryDirectory() as place:
        old = import_version(options.base, Path(place))
        for name in CASES:
            if options.case is not None and not any(part in name for part in options.case):
                continue
            try:
                line = compare(name, old, seconds=options.seconds, rounds=options.rounds)
            except RuntimeError as error:  # the GPU lacks memory or a kernel
                line = f"{name:32} failed: {error!r}"
            print(line, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
