"""The recipes that benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from float8lab import recipes

__all__ = ["RECIPES"]

RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    "delayed": partial(recipes.DelayedScaling, amax_history_len=16, amax_compute_algo="max"),
    "current": recipes.Float8CurrentScaling,
    "rowwise": recipes.Float8RowwiseScaling,
    "block": recipes.Float8BlockScaling,
    "mx": recipes.MXFP8BlockScaling,
}
