"""Predict which recipe speeds up a linear layer, from rates measured on a Hopper GPU.

M tokens, N out features, K in features.

A model's calls take CPU time as well. Either the CPU runs ahead of the GPU, or the GPU waits for
the CPU. So a model's layers take the larger of two times: the sum of their GPU times and the sum of
their CPU times. The times are those of ``float8lab/recipes/cost.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from float8lab.arguments import check_choice, check_size
from float8lab.recipes.cost import MODES, Parts, estimate, has_rates
from float8lab.recipes.recipe import ALL, Recipe

__all__ = ["TIE", "Auto", "Prediction", "choose", "explain", "predict"]

TIE = 0.02
"""The relative difference up to which times count as equal, and better numerics are preferred."""


Prediction = Mapping[Recipe | None, Parts]
"""Times of a layer in high precision (None) and for each recipe, best numerics first."""


def predict(
    shapes: Iterable[Sequence[int]], recipes: Iterable[Recipe], *, tokens: int, mode: str
) -> Prediction:
    """Predict times of weights ``(N, K)`` or ``(E, N, K)``, in bfloat16 and for each recipe."""
    prediction = {}
    shapes = tuple(shapes)
    for recipe in (None, *recipes):
        times = [
            estimate(recipe, tokens, N, K, experts=math.prod(experts), mode=mode)
            for *experts, N, K in shapes
        ]
        prediction[recipe] = Parts(*map(sum, zip(*times, strict=True)))
    return prediction


def choose(predictions: Sequence[Prediction]) -> list[Recipe | None]:
    """Return the recipe of each layer of a model, None for high precision.

    Each layer gets the choice with the least GPU time plus a share of CPU time, or one with better
    numerics that takes at most 2 % more. If the layers then take more CPU time than GPU time in
    all, those that save the least GPU time per CPU time go back to high precision, one by one,
    until GPU time dominates or the step would take longer. The share gives the shortest step.

    >>> recipes = (float8lab.recipes.Float8CurrentScaling(),)
    >>> small, large = (
    ...     predict([(size, size)], recipes, tokens=16384, mode="eager") for size in (1024, 8192)
    ... )
    >>> choose([small]), choose([large])
    ([None], [Float8CurrentScaling()])
    """
    steps = [_choose_by(predictions, share) for share in (0.0, 0.25, 1.0, 4.0)]
    return min(steps, key=lambda step: step[0])[1]


def _choose_by(
    predictions: Sequence[Prediction], share: float
) -> tuple[float, list[Recipe | None]]:
    """Return the time of a step, and the recipe of each layer, by this share of CPU times."""
    chosen = [_fastest(prediction, share) for prediction in predictions]
    now = [prediction[recipe] for prediction, recipe in zip(predictions, chosen, strict=True)]
    gpu, cpu = sum(times.gpu for times in now), sum(times.cpu for times in now)
    bf16 = [prediction[None] for prediction in predictions]
    saved = [before.gpu - times.gpu for before, times in zip(bf16, now, strict=True)]
    cost = [times.cpu - before.cpu for before, times in zip(bf16, now, strict=True)]
    worth = [s / c if c else math.inf for s, c in zip(saved, cost, strict=True)]
    in_fp8 = (layer for layer, recipe in enumerate(chosen) if recipe is not None)
    for layer in sorted(in_fp8, key=worth.__getitem__):
        if cpu <= gpu:
            break
        gpu_without, cpu_without = gpu + saved[layer], cpu - cost[layer]
        if max(gpu_without, cpu_without) > (1 + TIE) * cpu:
            break
        gpu, cpu = gpu_without, cpu_without
        chosen[layer] = None
    return max(gpu, cpu), chosen


def _fastest(prediction: Prediction, share: float = 0.0) -> Recipe | None:
    """Return the choice with the least time (None: high precision); the first of a tie."""
    seconds = {recipe: times.gpu + share * times.cpu for recipe, times in prediction.items()}
    limit = (1 + TIE) * min(seconds.values())
    return next(recipe for recipe, time in seconds.items() if time <= limit)


def explain(prediction: Prediction, chosen: Recipe | None) -> str:
    """Say in a few words why a layer got its recipe."""
    bf16 = prediction[None]
    if chosen is not None:
        return f"{chosen!r}: {_show_parts(prediction[chosen])}, bfloat16 {_show(bf16.gpu)}"
    if len(prediction) == 1:
        return "bfloat16: no recipe has FP8 GEMMs on its device"
    if (recipe := _fastest(prediction)) is not None:
        saved, cost = bf16.gpu - prediction[recipe].gpu, prediction[recipe].cpu - bf16.cpu
        return (
            f"bfloat16: {type(recipe).__name__} saves {_show(saved)} GPU, costs {_show(cost)} CPU"
        )
    best = min((r for r in prediction if r is not None), key=lambda r: prediction[r].gpu)
    faster = "faster" if bf16.gpu <= prediction[best].gpu else "as fast"
    return (
        f"bfloat16 is {faster}: {_show(bf16.gpu)}, {type(best).__name__} "
        f"{_show_parts(prediction[best])}"
    )


def _show_parts(times: Parts) -> str:
    return f"{_show(times.gpu)} ({_show(times.quantize)} casts)"


def _show(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


@dataclass(frozen=True, kw_only=True, repr=False)
class Auto:
    """A choice of a recipe for each layer, by predicted time, for ``convert_to_float8``.

    A layer stays in high precision if no recipe is predicted to be faster. Times are those of a
    training step on a Hopper GPU against bfloat16, whatever the model's device and dtype.
    """

    tokens: int = 16384
    """Rows of a layer's input in one call, on one GPU: sequences times positions. For experts, they
    are multiplied by the ``num_experts_per_tok`` of their ``config``, if there is one."""
    mode: str = "eager"
    """How the model will run: ``"eager"``, ``"compile"``, or in a ``"cuda_graph"``, which takes no
    CPU time."""
    candidates: tuple[Recipe, ...] = tuple(r for r in reversed(ALL.values()) if has_rates(r))
    """Recipes to choose from. The first of those within 2 % of the fastest is taken."""

    def __post_init__(self) -> None:
        tokens, candidates = self.tokens, self.candidates
        check_size("tokens", tokens, minimum=1)
        check_choice("mode", self.mode, MODES)
        have_rates = isinstance(candidates, tuple) and all(
            isinstance(recipe, Recipe) and has_rates(recipe) for recipe in candidates
        )
        if not have_rates or not candidates:
            raise ValueError(
                "candidates must be a tuple of recipes, one or more, with scales per tensor, row "
                f"or 1x128 block; got {candidates!r}. Of others no speed is known."
            )

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        shown = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"Auto({', '.join(shown)})"
