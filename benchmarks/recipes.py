"""The recipes that benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from float8lab import recipes

__all__ = ["RECIPES"]

RECIPES: dict[str, Callable[[], recipes.Recipe]] = {
    name: partial(replace, recipe) for name, recipe in recipes.ALL.items()
}
