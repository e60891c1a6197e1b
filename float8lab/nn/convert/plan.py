"""Plan a conversion: the recipe that each layer of a model gets, or why it stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from float8lab.distributed.expert_parallel import shares_experts
from float8lab.distributed.fsdp.shards import is_tensor_parallel, may_spread
from float8lab.formats import HIGH_PRECISION_DTYPES, Float4Spec
from float8lab.nn.casts import recast
from float8lab.nn.convert.names import ADAPTERS, matches
from float8lab.nn.convert.other_experts import experts_class
from float8lab.nn.convert.other_linear import OtherLinear, known_linear
from float8lab.nn.convert.report import emulated_gemms, own_matrices, shapes_of
from float8lab.nn.convert.wrapped_forward import forward_is_replaced
from float8lab.nn.expert_mlp import ExpertMLP, ExpertsBase
from float8lab.nn.fused_module import FusedModule
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.linear import Linear
from float8lab.recipes.auto import Auto, Prediction, choose, explain, predict
from float8lab.recipes.cost import Times
from float8lab.recipes.recipe import Recipe, check_recipe
from float8lab.tensor import Float4Tensor

__all__ = [
    "CONVERTED",
    "LayerPlan",
    "Wishes",
    "attention_recipe",
    "checked_choice",
    "choose_recipes",
    "lines_about_recasts",
    "plan_layer",
]

_Choice = Recipe | Auto

CONVERTED = (Linear, OtherLinear, FusedModule, GroupedLinear, ExpertsBase)
"""Modules that have a recipe of their own."""


@dataclass(frozen=True)
class LayerPlan:
    """The recipe that one layer gets, or why it gets none."""

    layer: nn.Module
    name: str
    note: str
    """The report's sentence about the layer."""
    recipe: Recipe | None
    """None leaves the layer as it is, unless it ``stays``."""
    auto: Auto | None = None
    """The choice that is still to give the layer its recipe."""
    pinned: bool = False
    failed: bool = False
    """Whether FP8 was asked for and is not possible."""
    stays: bool = False
    """Whether high precision was asked for."""
    sharded: bool = False
    """Whether FSDP2 shards the layer's parameters."""


def checked_choice(name: str, asked: Any) -> _Choice:
    """Return a recipe, or the ``Auto`` that chooses one; raise for anything else."""
    if isinstance(asked, str) and asked == "auto":
        return Auto()
    if isinstance(asked, (Recipe, Auto)):
        return asked
    if isinstance(asked, Float4Spec):
        check_recipe(name, asked)  # raises, and says why
    got = repr(asked) if isinstance(asked, str) else type(asked).__name__
    raise TypeError(
        f'{name} must be one of float8lab.recipes, or "auto"; got {got}. '
        "Construct one, for example recipes.Float8CurrentScaling()."
    )


class Wishes(NamedTuple):
    """The arguments of ``convert_to_float8`` that choose layers and recipes."""

    base: _Choice
    filter_fn: Callable[[nn.Module, str], bool] | None
    exclude: Sequence[str]
    overrides: Mapping[str, _Choice | None]
    routers: Container[nn.Module]
    """Modules that are converted by their names alone."""

    def about(self, module: nn.Module, name: str) -> tuple[str | None, _Choice | None, bool]:
        """Why a module is left alone, if it is; the recipe wished for; whether by its name."""
        named = [pattern for pattern in self.overrides if matches(name, pattern)]
        excluded = next((pattern for pattern in self.exclude if matches(name, pattern)), None)
        left = None
        if excluded is not None:
            left = f"excluded by {excluded!r}"
        elif self.filter_fn is not None and not self.filter_fn(module, name):
            left = "left out by filter_fn"
        return left, self.overrides[named[-1]] if named else self.base, bool(named)


def plan_layer(layer: nn.Module, name: str, wishes: Wishes, *, sharded: bool) -> LayerPlan:
    """The plan for a layer by what its user wishes and what is possible."""
    left, choice, named = wishes.about(layer, name)

    def plan(note: str, recipe: Recipe | None = None, **how: Any) -> LayerPlan:
        return LayerPlan(layer, name, note, recipe, pinned=named, sharded=sharded, **how)

    if left is not None:
        return plan(left)
    if choice is None:
        return plan("high precision by overrides", stays=True)
    if not named and any(part in ADAPTERS for part in name.split(".")):
        return plan("low rank, in which FP8 saves nothing; name it in overrides to convert")
    obstacle = _obstacle(layer, told=named, sharded=sharded)
    if layer in wishes.routers and not named:
        how = "" if obstacle else "; name it in overrides to convert"
        return plan(f"a router, which stays in high precision{how}")
    if obstacle is not None:
        return plan(obstacle, failed=True)
    if isinstance(choice, Auto):
        return plan("", auto=choice)
    return plan(repr(choice), choice)


def choose_recipes(plans: Sequence[LayerPlan]) -> tuple[list[LayerPlan], list[str]]:
    """Give plans that ask for it a recipe or high precision, and predict their times in all."""
    done = list(plans)
    asking = [(index, plan.auto) for index, plan in enumerate(plans) if plan.auto is not None]
    predictions = [_predict(plans[index].layer, auto) for index, auto in asking]
    totals: dict[Auto, list[tuple[Times, Times]]] = {}
    for (index, auto), times, recipe in zip(asking, predictions, choose(predictions), strict=True):
        note = explain(times, recipe)
        done[index] = replace(plans[index], note=note, recipe=recipe, stays=recipe is None)
        totals.setdefault(auto, []).append((times[recipe], times[None]))
    return done, [_describe_total(auto, times) for auto, times in totals.items()]


def _predict(layer: nn.Module, auto: Auto) -> Prediction:
    device = next(layer.parameters()).device
    usable = [recipe for recipe in auto.candidates if not emulated_gemms(recipe.linear, device)]
    shapes = [shape[-2:] for shape in shapes_of(layer)]  # experts: one's sizes, all rows
    return predict(shapes, usable, tokens=auto.tokens, mode=auto.mode)


def _describe_total(auto: Auto, times: Sequence[tuple[Times, Times]]) -> str:
    gpu, cpu, high_gpu, high_cpu = (
        f"{1e3 * sum(seconds):.2f} ms"
        for seconds in zip(*((*chosen, *high) for chosen, high in times), strict=True)
    )
    return (
        f"predicted on Hopper, {auto.tokens} tokens, {auto.mode}: "
        f"{gpu} GPU, {cpu} CPU; bfloat16 {high_gpu}, {high_cpu}"
    )


def attention_recipe(module: nn.Module, name: str, wishes: Wishes) -> tuple[Recipe | None, bool]:
    """The recipe of an attention module, and whether it is pinned; nothing chooses for it."""
    left, choice, named = wishes.about(module, name)
    if left is not None:
        return None, False
    return (choice if isinstance(choice, Recipe) else None), named


def _obstacle(layer: Any, *, told: bool, sharded: bool) -> str | None:
    """Why a layer cannot be converted, or None."""
    kind = experts_class(layer)
    named = layer._parameters.items() if kind is None else layer.named_parameters()
    for name, parameter in named:
        if is_tensor_parallel(parameter, sharded=sharded):
            placements = parameter.placements[-1:] if sharded else parameter.placements
            if known_linear(type(layer)) is not nn.Linear:
                stacked = kind is not None or isinstance(layer, (ExpertMLP, GroupedLinear))
                if stacked and shares_experts(placements):
                    continue
                return (
                    f"its {name} is a DTensor; FP8 takes those of torch.nn.Linear, and stacked "
                    "experts that are Shard(0)"
                )
            if name == "weight" and not may_spread(placements):
                return (
                    f"its weight is placed as {placements}; FP8 takes one shard, of rows or columns"
                )
        if isinstance(parameter, Float4Tensor):
            return f"its {name} is in 4 bits, dequantized and multiplied in high precision"
    if isinstance(layer, nn.MultiheadAttention):
        return "torch.nn.MultiheadAttention multiplies in a fused function"
    if names := own_matrices(layer):
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"no linear layer: {type(layer).__name__} multiplies by its {listed} itself"
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "its weight is used by torch.nn.MultiheadAttention directly"
    if any(isinstance(p, UninitializedParameter) for p in layer.parameters()):
        return "not initialised yet; run one batch first"
    if isinstance(layer, CONVERTED):
        return None
    if forward_is_replaced(layer):
        return "forward was replaced on the layer itself"
    if kind is not None:
        dtypes = {p.dtype for p in layer.parameters()}.difference(HIGH_PRECISION_DTYPES)
        return f"its weights are {dtypes.pop()}" if dtypes else kind.obstacle(layer)
    if type(layer).forward is not known_linear(type(layer)).forward and not told:
        return f"{type(layer).__name__} has a forward of its own; name it in overrides to convert"
    dtype = layer.weight.dtype
    if dtype not in HIGH_PRECISION_DTYPES:
        return f"its weight is {dtype}"
    return None


def lines_about_recasts(plans: Sequence[LayerPlan]) -> list[str]:
    """Lines about weights that are stored in FP8, but not as their layers' recipes want them."""
    lines = []
    for layer, name, recipe in ((plan.layer, plan.name, plan.recipe) for plan in plans):
        if recipe is None or not (recipe.linear.fprop or recipe.linear.dgrad):
            continue
        spec = recipe.linear.w
        spec = spec.transpose() if isinstance(layer, OtherLinear) else spec
        found = [recast(p, spec) for p in layer._parameters.values() if p is not None]
        lines += [f"  {name or '(model)'}: its weight is {text}" for text in found if text]
    return lines
