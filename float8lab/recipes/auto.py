"""Predict which recipe pays for a linear layer, from rates measured on a Hopper GPU.

M tokens, N out features, K in features.

A training step of a layer is three GEMMs of ``2 M N K`` operations and, in FP8, a cast of x, w and
dy in both orientations. Its calls take CPU time too, whatever its size. The CPU may be layers ahead
of the GPU, or the GPU may wait for it, so a model's layers take the sum of their GPU times or the
sum of their CPU times, whichever is more.

Sources: benchmarks/RESULTS.md at commit 8b34738, one H200. GEMM rates: floors of "Linear layer",
less the bytes of the casts at the rate of a copy, median of the three shapes. Casts: the straight
line through the two sizes of "Quantize". CPU: "CPU overhead", a layer alone; in models it is about
half of that, which leaves room for what else a model calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from float8lab.arguments import check_choice, check_size
from float8lab.recipes.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Recipe,
)

__all__ = [
    "MODES",
    "TIE",
    "Auto",
    "Parts",
    "Prediction",
    "Times",
    "choose",
    "estimate",
    "estimate_parts",
    "explain",
    "predict",
]

MODES = ("eager", "compile", "cuda_graph")
"""How a model's calls reach the GPU."""
TIE = 0.02
"""Times that differ by no more count as equal: then the better numerics are preferred."""


@dataclass(frozen=True)
class _Rates:
    """Rates and times, in seconds, of layers whose tensors have scales of one kind."""

    gemm: float
    """Operations a second."""
    cast: float
    """GPU time for each element in both orientations; 0 in high precision."""
    cast_start: float
    """GPU time for each tensor, whatever its size."""
    eager: float
    """CPU time of forward and backward."""
    compiled: float
    """The same in a compiled graph: the ops alone, 170 us in forward and as much in backward."""

    def cpu(self, mode: str) -> float:
        """CPU time of forward and backward; a CUDA graph needs none."""
        return {"eager": self.eager, "compile": self.compiled, "cuda_graph": 0.0}[mode]


_COPY = 4.27e12
"""Bytes a second, read and written."""
_GEMM_START = 3.8e-6
"""GPU time of a kernel that has next to nothing to do: that of a cast with a given scale."""
_BFLOAT16 = _Rates(gemm=763e12, cast=0.0, cast_start=0.0, eager=93e-6, compiled=42e-6)
_FP8: dict[tuple[tuple[int, ...], bool], _Rates] = {
    ((-1, -1), True): _Rates(1451e12, 1.03e-12, 3.8e-6, 1316e-6, 340e-6),
    ((-1, -1), False): _Rates(1451e12, 1.49e-12, 9.0e-6, 1163e-6, 340e-6),
    ((1, -1), False): _Rates(1409e12, 1.69e-12, 10.4e-6, 1300e-6, 340e-6),
    ((1, 128), False): _Rates(1137e12, 1.28e-12, 9.4e-6, 1319e-6, 340e-6),
}
"""Rates by the block of x that has one scale, and by whether scales are delayed."""


class Times(NamedTuple):
    """Seconds that a training step takes, forward and backward."""

    gpu: float
    cpu: float


class Parts(NamedTuple):
    """Seconds of a training step, the GPU's by what it does."""

    quantize: float
    gemm: float
    cpu: float

    @property
    def gpu(self) -> float:
        """All of the GPU's."""
        return self.quantize + self.gemm


Prediction = Mapping[Recipe | None, Times]
"""Times of one layer in high precision (None) and by recipe, best numerics first."""


def _rates(recipe: Recipe | None) -> _Rates | None:
    if recipe is None:
        return _BFLOAT16
    return _FP8.get((recipe.linear.x.block, recipe.linear.delayed))


def estimate(recipe: Recipe | None, M: int, N: int, K: int, *, mode: str = "eager") -> Times:
    """Predict the time of a linear layer's training step on a Hopper GPU.

    Args:
        recipe: None is bfloat16.
        M: tokens, rows of one call.
        N: out features.
        K: in features.
        mode: one of ``MODES``.

    Raises:
        ValueError: the recipe's kind of scales was not measured, since Hopper has no GEMM for it.

    >>> bf16, fp8 = (estimate(r, 16384, 4096, 14336).gpu for r in (None, DelayedScaling()))
    >>> print(f"{1e3 * bf16:.1f} ms, {1e3 * fp8:.1f} ms")
    7.6 ms, 4.4 ms
    """
    parts = estimate_parts(recipe, M, N, K, mode=mode)
    return Times(parts.gpu, parts.cpu)


def estimate_parts(recipe: Recipe | None, M: int, N: int, K: int, *, mode: str = "eager") -> Parts:
    """``estimate`` with the casts and the GEMMs apart.

    >>> estimate_parts(None, 16384, 4096, 4096).quantize
    0.0
    """
    rates = _rates(recipe)
    if rates is None:
        raise ValueError(
            f"recipe must have scales per tensor, row or 1x128 block; got {recipe!r}. "
            "Of others no speed is known."
        )
    plan = recipe.linear if recipe is not None else None
    in_fp8 = (plan.fprop, plan.dgrad, plan.wgrad) if plan is not None else (False, False, False)
    outputs = (M * N, M * K, N * K)  # of fprop, dgrad, wgrad; the other two are its operands
    elements = sum(outputs)
    gemms = 0.0
    for output, fp8 in zip(outputs, in_fp8, strict=True):
        moved = 2 * output + (1 if fp8 else 2) * (elements - output)
        rate = rates.gemm if fp8 else _BFLOAT16.gemm
        gemms += _GEMM_START + max(2 * M * N * K / rate, moved / _COPY)
    return Parts(3 * rates.cast_start + elements * rates.cast, gemms, rates.cpu(mode))


def predict(
    shapes: Iterable[Sequence[int]], recipes: Iterable[Recipe], *, tokens: int, mode: str
) -> Prediction:
    """Predict times of a module with weights of shapes ``(N, K)``, in bfloat16 and by recipe."""
    shapes = tuple(shapes)
    prediction = {}
    for recipe in (None, *recipes):
        times = [estimate(recipe, tokens, N, K, mode=mode) for N, K in shapes]
        prediction[recipe] = Times(sum(t.gpu for t in times), sum(t.cpu for t in times))
    return prediction


def choose(predictions: Sequence[Prediction]) -> list[Recipe | None]:
    """The recipe of each layer of a model, None for high precision.

    Each layer gets the choice with the least GPU time, or one with better numerics that takes 2 %
    more at most. If all their CPU time together is more than their GPU time, the layers that save
    the least GPU time for the CPU time they cost go back to high precision, until it is not, or
    until the step would take longer for it.

    >>> recipes = (Float8CurrentScaling(),)
    >>> small, large = (
    ...     predict([(size, size)], recipes, tokens=16384, mode="eager") for size in (1024, 8192)
    ... )
    >>> choose([small]), choose([large])
    ([None], [Float8CurrentScaling()])
    """
    chosen = [_fastest(prediction) for prediction in predictions]
    now = [prediction[recipe] for prediction, recipe in zip(predictions, chosen, strict=True)]
    gpu, cpu = sum(times.gpu for times in now), sum(times.cpu for times in now)

    def saved_and_cost(layer: int) -> tuple[float, float]:
        high = predictions[layer][None]
        return high.gpu - now[layer].gpu, now[layer].cpu - high.cpu

    def worth(layer: int) -> float:
        saved, cost = saved_and_cost(layer)
        return saved / cost if cost else float("inf")

    for layer in sorted((i for i, recipe in enumerate(chosen) if recipe is not None), key=worth):
        if cpu <= gpu:
            break
        saved, cost = saved_and_cost(layer)
        if max(gpu + saved, cpu - cost) > (1 + TIE) * cpu:
            break
        gpu, cpu = gpu + saved, cpu - cost
        chosen[layer] = None
    return chosen


def _fastest(prediction: Prediction) -> Recipe | None:
    """The choice with the least GPU time; of those that tie the first, None for high precision."""
    limit = (1 + TIE) * min(times.gpu for times in prediction.values())
    return next(recipe for recipe, times in prediction.items() if times.gpu <= limit)


def explain(prediction: Prediction, chosen: Recipe | None) -> str:
    """Why a layer got its recipe, in a few words."""
    high = prediction[None]
    if chosen is not None:
        return f"{chosen!r}: {_show(prediction[chosen].gpu)}, bfloat16 {_show(high.gpu)}"
    if len(prediction) == 1:
        return "bfloat16: no recipe has FP8 GEMMs on its device"
    recipe = _fastest(prediction)
    if recipe is not None:
        saved, cost = high.gpu - prediction[recipe].gpu, prediction[recipe].cpu - high.cpu
        return (
            f"bfloat16: {type(recipe).__name__} saves {_show(saved)} GPU, costs {_show(cost)} CPU"
        )
    best = min((r for r in prediction if r is not None), key=lambda r: prediction[r].gpu)
    faster = "faster" if high.gpu <= prediction[best].gpu else "as fast"
    return (
        f"bfloat16 is {faster}: {_show(high.gpu)}, {type(best).__name__} "
        f"{_show(prediction[best].gpu)}"
    )


def _show(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


@dataclass(frozen=True, kw_only=True, repr=False)
class Auto:
    """A choice of a recipe for each layer, by predicted time, for ``convert_to_float8``.

    A layer for which none is predicted to be faster stays in high precision. Times are those of a
    training step on a Hopper GPU against bfloat16, whatever the model's device and dtype.
    """

    tokens: int = 16384
    """Rows of a layer's input in one call, on one GPU: sequences times positions."""
    mode: str = "eager"
    """How the model will run: ``"eager"``, ``"compile"``, or in a ``"cuda_graph"``, which takes no
    CPU time."""
    candidates: tuple[Recipe, ...] = (
        Float8BlockScaling(),
        Float8RowwiseScaling(),
        Float8CurrentScaling(),
        DelayedScaling(amax_history_len=16, amax_compute_algo="max"),
    )
    """Recipes to choose from. Of those within 2 % of the fastest the first is taken."""

    def __post_init__(self) -> None:
        tokens, candidates = self.tokens, self.candidates
        check_size("tokens", tokens, minimum=1)
        check_choice("mode", self.mode, MODES)
        known = isinstance(candidates, tuple) and all(
            isinstance(recipe, Recipe) and _rates(recipe) is not None for recipe in candidates
        )
        if not known:
            raise ValueError(
                "candidates must be a tuple of recipes with scales per tensor, row or 1x128 "
                f"block; got {candidates!r}. Of others no speed is known."
            )

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        shown = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"Auto({', '.join(shown)})"
