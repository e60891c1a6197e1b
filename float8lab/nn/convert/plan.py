"""Plan a conversion: the recipe that each layer of a model gets, or why it stays unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter

from float8lab.distributed.comm import TensorParallel, misfit
from float8lab.distributed.expert_parallel import shares_experts
from float8lab.distributed.fsdp import shards
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import FP8_DTYPES, HIGH_PRECISION_DTYPES, Spec
from float8lab.nn.attention.dot_product import DotProductAttention
from float8lab.nn.attention.fp8 import asks_for_fp8_attention
from float8lab.nn.casts import recast
from float8lab.nn.convert.names import ADAPTERS
from float8lab.nn.convert.other_experts import routers
from float8lab.nn.convert.other_linear import OtherLinear
from float8lab.nn.convert.report import emulated_gemms
from float8lab.nn.convert.walk import Candidate, ModelWalk, matrix_shapes, recipes_of
from float8lab.nn.convert.wrapped_forward import wrapped_forward
from float8lab.nn.expert_mlp import ExpertMLP, ExpertsBase
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.layer import GemmModule
from float8lab.nn.linear import Linear
from float8lab.nn.precision import precisions
from float8lab.recipes.auto import Auto, Prediction, choose, explain, predict
from float8lab.recipes.cost import Parts
from float8lab.recipes.recipe import Recipe, check_recipe
from float8lab.tensor import Float4Tensor
from float8lab.tensor.dtensor import is_dtensor

__all__ = [
    "CONVERTED", "ConversionOptions", "ConversionPlan", "LayerPlan", "checked_choice",
    "lines_about_recasts", "plan_conversion",
]  # fmt: skip

_Choice = Recipe | Auto

CONVERTED = (GemmModule, OtherLinear, ExpertsBase, DotProductAttention)
"""Modules that can have their own recipe."""


@dataclass(frozen=True)
class LayerPlan:
    """The recipe that a layer gets, or why it gets none."""

    candidate: Candidate
    note: str
    """The report's sentence about the layer."""
    recipe: Recipe | None
    """The layer's new recipe; None leaves the layer unchanged, unless it ``stays``."""
    auto: Auto | None = None
    """The choice that has yet to give the layer its recipe."""
    pinned: bool = False
    failed: bool = False
    """Whether FP8 was asked for and is not possible."""
    stays: bool = False
    """Whether high precision was asked for."""
    sharded: bool = False
    """Whether FSDP2 shards the layer's parameters."""


class ConversionPlan(NamedTuple):
    """The plans of all layers and attention modules of a model."""

    layers: list[LayerPlan]
    attention: list[LayerPlan]
    """A recipe of GEMMs only has no effect on an attention module."""
    predictions: list[str]
    """Sentences about the times of the recipes that ``Auto`` has chosen."""
    unmatched: tuple[str, ...]
    """Names given in ``exclude`` or ``overrides`` that no layer has."""

    def runs_fp8_attention(self) -> bool:
        """Whether an attention module will run in FP8."""
        recipes = (plan.recipe for plan in self.attention)
        return any(recipe and asks_for_fp8_attention(recipe) for recipe in recipes)


def checked_choice(name: str, choice: Any) -> _Choice:
    """Return a recipe, or the ``Auto`` that chooses a recipe; raise for anything else."""
    if isinstance(choice, str) and choice == "auto":
        return Auto()
    if isinstance(choice, (Recipe, Auto)):
        return choice
    if isinstance(choice, Spec):
        check_recipe(name, choice)  # raises, and says why
    got = repr(choice) if isinstance(choice, str) else type(choice).__name__
    raise TypeError(
        f'{name} must be one of float8lab.recipes, or "auto"; got {got}. '
        "Construct one, for example recipes.Float8CurrentScaling()."
    )


class LayerOptions(NamedTuple):
    """The options of a conversion that apply to one module."""

    exclusion: str | None
    """Why the module is not converted, if it is excluded."""
    choice: _Choice | None
    is_named: bool
    """Whether the choice is an override by the module's name."""


class ConversionOptions(NamedTuple):
    """The arguments of ``convert_to_float8`` that choose layers and recipes."""

    base: _Choice
    filter_fn: Callable[[nn.Module, str], bool] | None
    exclude: Sequence[str]
    overrides: Mapping[str, _Choice | None]

    def for_layer(self, candidate: Candidate) -> LayerOptions:
        """Return the options that apply to a module, after a call of ``filter_fn``."""
        overrides = [*filter(candidate.is_called, self.overrides)]
        reasons = [f"excluded by {p!r}" for p in self.exclude if candidate.is_called(p)]
        layer, filter_fn = candidate.layer, self.filter_fn
        if not (reasons or filter_fn is None or filter_fn(layer, candidate.name)):
            reasons = ["left out by filter_fn"]
        choice = self.overrides[overrides[-1]] if overrides else self.base
        return LayerOptions(next(iter(reasons), None), choice, bool(overrides))


def plan_conversion(walk: ModelWalk, options: ConversionOptions) -> ConversionPlan:
    """Decide what becomes of every candidate and attention module of a model."""
    router_modules = routers(walk.modules)
    sharded = shards.sharded_by_fsdp(walk.modules)
    plans = []
    for candidate in walk.candidates:
        layer = candidate.layer
        flags = {"is_router": layer in router_modules, "sharded": layer in sharded}
        plans.append(_plan_layer(candidate, options.for_layer(candidate), **flags))
    layers, predictions = _choose_recipes(plans)
    attention = [_plan_attention(c, options.for_layer(c)) for c in walk.attention]
    candidates, patterns = walk.candidates + walk.attention, (*options.exclude, *options.overrides)
    unmatched = tuple(p for p in patterns if not any(c.is_called(p) for c in candidates))
    return ConversionPlan(_follow_attention(layers), attention, predictions, unmatched)


def _plan_layer(
    candidate: Candidate, options: LayerOptions, *, is_router: bool, sharded: bool
) -> LayerPlan:
    """Plan a layer by the options of the user and the limits of FP8."""
    choice, is_named = options.choice, options.is_named

    def plan(note: str, recipe: Recipe | None = None, **flags: Any) -> LayerPlan:
        return LayerPlan(candidate, note, recipe, pinned=is_named, sharded=sharded, **flags)

    if options.exclusion is not None:
        return plan(options.exclusion)
    if choice is None:
        return plan("high precision by overrides", stays=True)
    if not is_named and any(component in ADAPTERS for component in candidate.name.split(".")):
        return plan("low rank, in which FP8 saves nothing; name it in overrides to convert")
    obstacle = _obstacle(candidate, is_named=is_named, sharded=sharded)
    if is_router and not is_named:
        advice = "" if obstacle else "; name it in overrides to convert"
        return plan(f"a router, which stays in high precision{advice}")
    if obstacle is not None:
        return plan(obstacle, failed=True)
    if isinstance(choice, Auto):
        if any(isinstance(p, UninitializedParameter) for p in candidate.layer.parameters()):
            return plan("not initialised yet; run one batch first", failed=True)
        return plan("", auto=choice)
    if (cut_blocks := _misfit(candidate.layer, choice, sharded=sharded)) is not None:
        return plan(cut_blocks, failed=True)
    return plan(repr(choice), choice)


def _plan_attention(candidate: Candidate, options: LayerOptions) -> LayerPlan:
    """Plan an attention module, for which ``Auto`` chooses nothing."""
    if options.exclusion is not None:
        return LayerPlan(candidate, options.exclusion, None)
    recipe = options.choice if isinstance(options.choice, Recipe) else None
    return LayerPlan(candidate, "", recipe, pinned=options.is_named)


def _follow_attention(plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Drop the plans of output projections that no converted ``torch.nn.MultiheadAttention`` calls.

    Torch's own forward of that module reads the weight of the output projection.
    """
    note = "its weight is used by torch.nn.MultiheadAttention directly"
    calls = {
        id(plan.candidate.layer.out_proj): plan.recipe is not None
        or (not plan.stays and recipes_of(plan.candidate.layer) != [])
        for plan in plans
        if isinstance(plan.candidate.layer, nn.MultiheadAttention)
    }
    return [
        replace(plan, note=note, recipe=None, stays=True, failed=plan.pinned)
        if plan.recipe is not None
        and isinstance(layer := plan.candidate.layer, NonDynamicallyQuantizableLinear)
        and not calls.get(id(layer), isinstance(layer, Linear))
        else plan
        for plan in plans
    ]


def _choose_recipes(plans: Sequence[LayerPlan]) -> tuple[list[LayerPlan], list[str]]:
    """Choose a recipe or high precision for plans with ``Auto``, and predict their total times."""
    layers = list(plans)
    automatic = [(index, plan.auto) for index, plan in enumerate(plans) if plan.auto is not None]
    if not automatic:
        return layers, []
    predictions = [_predict(plans[index], auto) for index, auto in automatic]
    recipes = choose(predictions)
    times_by_choice: dict[Auto, list[tuple[Parts, Parts]]] = {}
    for (index, auto), times, recipe in zip(automatic, predictions, recipes, strict=True):
        note = explain(times, recipe)
        layers[index] = replace(plans[index], note=note, recipe=recipe, stays=recipe is None)
        times_by_choice.setdefault(auto, []).append((times[recipe], times[None]))
    return layers, [_describe_times(auto, times) for auto, times in times_by_choice.items()]


def _predict(plan: LayerPlan, auto: Auto) -> Prediction:
    layer = plan.candidate.layer
    device = next(layer.parameters()).device
    native = (r for r in auto.candidates if not emulated_gemms(r.linear, device))
    usable = [r for r in native if _misfit(layer, r, sharded=plan.sharded) is None]
    rows = auto.tokens * getattr(getattr(layer, "config", None), "num_experts_per_tok", 1)
    return predict(matrix_shapes(plan.candidate), usable, tokens=rows, mode=auto.mode)


def _describe_times(auto: Auto, times: Sequence[tuple[Parts, Parts]]) -> str:
    sums = (Parts(*map(sum, zip(*listed, strict=True))) for listed in zip(*times, strict=True))
    gpu, cpu, high_gpu, high_cpu = (
        f"{1e3 * seconds:.2f} ms" for times in sums for seconds in (times.gpu, times.cpu)
    )
    return (
        f"predicted on Hopper, {auto.tokens} tokens, {auto.mode}: "
        f"{gpu} GPU, {cpu} CPU; bfloat16 {high_gpu}, {high_cpu}"
    )


def _obstacle(candidate: Candidate, *, is_named: bool, sharded: bool) -> str | None:
    """Return why a layer cannot be converted, or None."""
    layer = candidate.layer
    if (obstacle := _obstacle_of_parameters(candidate, sharded=sharded)) is not None:
        return obstacle
    if names := candidate.matrices:
        listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return f"no linear layer: {type(layer).__name__} multiplies by its {listed} itself"
    if isinstance(layer, CONVERTED):
        return None
    return _obstacle_of_forward(candidate, is_named=is_named) or _obstacle_of_dtypes(candidate)


def _obstacle_of_parameters(candidate: Candidate, *, sharded: bool) -> str | None:
    """Return which parameter FP8 does not take: a DTensor of some kind, 4 bits, or plain FP8."""
    layer = candidate.layer
    is_experts = candidate.experts_class is not None
    for name, parameter in layer.named_parameters() if is_experts else layer._parameters.items():
        if isinstance(parameter, Float4Tensor):
            return f"its {name} is in 4 bits, dequantized and multiplied in high precision"
        if getattr(parameter, "dtype", None) in FP8_DTYPES:  # a Float8Tensor has another dtype
            return f"its {name} is FP8 data of another library; load_fp8 takes it over"
        if is_dtensor(parameter) and (
            obstacle := _obstacle_of_placements(candidate, name, parameter, sharded=sharded)
        ):
            return obstacle
    return None


def _obstacle_of_placements(
    candidate: Candidate, name: str, parameter: Any, *, sharded: bool
) -> str | None:
    """Return why FP8 does not take a parameter that is a DTensor, or None."""
    if not shards.is_tensor_parallel(parameter, sharded=sharded):
        return None
    placements = parameter.placements[-1:] if sharded else parameter.placements
    if candidate.linear_class is nn.Linear:
        if name != "weight" or shards.is_column_or_row_shard(placements):
            return None
        return f"its weight is placed as {placements}; FP8 takes one shard, of rows or columns"
    stacked = isinstance(candidate.layer, (ExpertMLP, GroupedLinear))
    if (stacked or candidate.experts_class is not None) and shares_experts(placements):
        return None
    return (
        f"its {name} is a DTensor; FP8 takes those of torch.nn.Linear, and stacked experts that "
        "are Shard(0)"
    )


def _obstacle_of_forward(candidate: Candidate, *, is_named: bool) -> str | None:
    """Return why the forward of a layer that is not converted yet cannot be replaced, or None."""
    layer, linear_class = candidate.layer, candidate.linear_class
    # Transformers' expert parallelism has its own ways to call the forward of experts.
    is_experts = candidate.experts_class is not None
    if "forward" in vars(layer) and (is_experts or wrapped_forward(layer) is None):
        return "forward was replaced on the layer itself"
    if is_named or linear_class is None or type(layer).forward is linear_class.forward:
        return None
    return f"{type(layer).__name__} has a forward of its own; name it in overrides to convert"


def _obstacle_of_dtypes(candidate: Candidate) -> str | None:
    """Return which weight dtype FP8 does not take, or why experts cannot be converted, or None."""
    layer = candidate.layer
    if candidate.experts_class is not None:
        dtypes = {p.dtype for p in layer.parameters()}.difference(HIGH_PRECISION_DTYPES)
        wrong = f"its weights are {dtypes.pop()}" if dtypes else None
        return wrong or candidate.experts_class.obstacle(layer)
    weight = (layer.out_proj if isinstance(layer, nn.MultiheadAttention) else layer).weight
    dtype = None if weight is None else weight.dtype
    return None if dtype in HIGH_PRECISION_DTYPES else f"its weight is {dtype}"


def _misfit(layer: nn.Module, recipe: Recipe, *, sharded: bool) -> str | None:
    """Return why the blocks of a recipe do not fit tensor-parallel ranks' shards, or None."""
    weight: Any = layer._parameters.get("weight")
    if shards.is_tensor_parallel(weight, sharded=sharded) and weight.ndim == 2:
        mesh, placements = weight.device_mesh, weight.placements
        if sharded and mesh.ndim > 1:
            mesh, placements = mesh[mesh.mesh_dim_names[-1]], placements[-1:]
        features = [
            ShardMap.of(weight.shape[placement.dim], mesh.size(i), mesh.get_local_rank(i))
            for i, placement in enumerate(placements)
            if placement.is_shard()
        ]
        return misfit(features, recipe.linear)
    parallels = (precision.parallel for _, precision in precisions(layer))
    shared = (p.features for p in parallels if isinstance(p, TensorParallel))
    return next(filter(None, (misfit(features, recipe.linear) for features in shared)), None)


def lines_about_recasts(plans: Sequence[LayerPlan]) -> list[str]:
    """Return lines about weights whose stored FP8 format is not that of their layers' recipes."""
    lines = []
    for plan in plans:
        layer, recipe = plan.candidate.layer, plan.recipe
        if recipe is None or not (recipe.linear.fprop or recipe.linear.dgrad):
            continue
        spec = recipe.linear.w.transpose() if isinstance(layer, OtherLinear) else recipe.linear.w
        texts = filter(None, (recast(p, spec) for p in layer.parameters(recurse=False)))
        lines += [f"  {plan.candidate.name or '(model)'}: its weight is {text}" for text in texts]
    return lines
