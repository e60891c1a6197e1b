"""The recipes that benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from float8lab import recipes

__all__ = ["RECIPES"]

RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    name: partial(replace, recipe)
    for name, recipe in recipes.ALL.items()
    if recipe.linear.x.element_dtype == recipe.linear.x.fp8_dtype
}
"""The FP8 recipes. Recipes of 4 bits are emulated, so their speed has no meaning."""
