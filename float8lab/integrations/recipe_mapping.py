"""Conversion arguments for adapters of trainers, and recipes from configuration files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal, TypeVar

from torch import nn

from float8lab import recipes
from float8lab.arguments import check_flags
from float8lab.nn.convert.conversion import checked_options, convert_to_float8
from float8lab.nn.precision import precisions_below

__all__ = ["ConversionArguments", "RecipeChoice", "recipe_of", "recipes_below"]

RecipeChoice = recipes.Recipe | recipes.Auto | Mapping[str, object] | str | None
"""A recipe as adapters take it: a recipe, or the plain values that ``recipe_of`` takes."""

_T = TypeVar("_T")


@dataclass(eq=False)
class ConversionArguments:
    """Arguments of ``convert_to_float8``, checked at once, for models that are converted later.

    Raises:
        TypeError: an argument has another type.
        ValueError: no recipe has that name.
    """

    recipe: RecipeChoice = None
    _: KW_ONLY
    filter_fn: Callable[[nn.Module, str], bool] | None = None
    exclude: Sequence[str] = ()
    overrides: Mapping[str, RecipeChoice] | None = None
    strict: bool = False
    fp8_all_gather: bool = True

    def __post_init__(self) -> None:
        self.recipe = _choice_of(self.recipe)
        if isinstance(self.overrides, Mapping):
            self.overrides = {name: _choice_of(r) for name, r in self.overrides.items()}
        check_flags(strict=self.strict, fp8_all_gather=self.fp8_all_gather)
        checked_options(self.recipe, self.filter_fn, self.exclude, self.overrides)

    def convert(self, model: nn.Module) -> None:
        """Convert a model in place."""
        convert_to_float8(model, **{f.name: getattr(self, f.name) for f in fields(self) if f.init})


def recipe_of(recipe: RecipeChoice) -> recipes.Recipe | recipes.Auto | Literal["auto"]:
    """Make the recipe for ``convert_to_float8`` from what a framework's plugin was given.

    Args:
        recipe: a recipe, which is returned unchanged; a recipe's name; or a mapping with fields of
            ``DelayedScaling`` or of the recipe whose name is under ``"name"``. ``"fp8_format"`` may
            be a name, and a list may stand for a tuple. None is ``DelayedScaling()``.

    Raises:
        TypeError: ``recipe`` has another type, or names a field that the recipe does not have.
        ValueError: no recipe has that name, or a value is one that the recipe refuses.

    >>> recipe_of({"fp8_format": "E4M3", "amax_history_len": 16})
    DelayedScaling(fp8_format=Format.E4M3, amax_history_len=16)
    >>> recipe_of({"name": "Float8BlockScaling", "override_linear_precision": [False, False, True]})
    Float8BlockScaling(override_linear_precision=(False, False, True))
    """
    if recipe is None:
        return recipes.DelayedScaling()
    if isinstance(recipe, (recipes.Recipe, recipes.Auto)):
        return recipe
    if isinstance(recipe, str):
        if recipe == "auto":
            return "auto"
        recipe = {"name": recipe}
    if not isinstance(recipe, Mapping):
        raise TypeError(
            f'recipe must be one of float8lab.recipes, "auto", a mapping or None; got {recipe!r}. '
            "For example {'name': 'Float8CurrentScaling'}."
        )
    fields: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in recipe.items()
    }
    kinds = {kind.__name__: kind for kind in recipes.Recipe.__subclasses__()}
    kind = _named("name", fields.pop("name", "DelayedScaling"), kinds)
    if isinstance(fields.get("fp8_format"), str):
        formats = recipes.Format.__members__
        fields["fp8_format"] = _named("fp8_format", fields["fp8_format"], formats)
    if unknown := [key for key in fields if key not in kind.__dataclass_fields__]:
        raise TypeError(
            f"recipe must have fields of {kind.__name__}; got {', '.join(map(repr, unknown))}. "
            f"They are {', '.join(kind.__dataclass_fields__)}."
        )
    return kind(**fields)


def _choice_of(recipe: RecipeChoice) -> RecipeChoice:
    return recipe_of(recipe) if isinstance(recipe, (Mapping, str)) else recipe


def recipes_below(model: nn.Module) -> list[recipes.Recipe]:
    """Return the recipes that a model's layers have, and by which they run without autocast."""
    return [p.recipe for p in precisions_below(model) if p.recipe is not None]


def _named(key: str, name: object, choices: Mapping[str, _T]) -> _T:
    if not isinstance(name, str) or name not in choices:
        raise ValueError(
            f"recipe[{key!r}] must be one of {', '.join(choices)}; got {name!r}. Correct the name."
        )
    return choices[name]
