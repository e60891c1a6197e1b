"""convert_to_float8: turn the linear layers of an existing model into FP8 ones, in place.

A layer is converted by changing the class of the very object, ``torch.nn.Linear`` to
``float8lab.Linear``: parameters, hooks, attributes, parametrizations and every reference to the
layer stay as they are. Other libraries' linear layers are converted to classes of their own
(``other_linear.py``).
"""

from __future__ import annotations

import copyreg
import functools
import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from float8lab.arguments import (
    check_callables,
    check_flags,
    check_instance,
    check_module,
    check_names,
)
from float8lab.distributed.expert_parallel import shares_experts
from float8lab.distributed.fsdp.shards import (
    is_sharded_plain,
    is_tensor_parallel,
    may_spread,
    reshard,
    sharded_by_fsdp,
)
from float8lab.formats import HIGH_PRECISION_DTYPES, Float4Spec
from float8lab.nn.attention.dot_product import DotProductAttention
from float8lab.nn.attention.fp8 import asks_for_fp8_attention
from float8lab.nn.casts import recast
from float8lab.nn.expert_mlp import ExpertMLP, ExpertsBase
from float8lab.nn.first_call import FirstCall, remove_hooks, watch_first_call
from float8lab.nn.freezing import Freezing, users_of
from float8lab.nn.fused_module import FusedModule
from float8lab.nn.grouped_linear import GroupedLinear
from float8lab.nn.in_graph import leave_to_python
from float8lab.nn.linear import Linear
from float8lab.nn.other_experts import OtherExperts, experts_class, routers
from float8lab.nn.other_linear import OtherLinear, known_linear, load_float8_class
from float8lab.nn.precision import Precision, place_precisions, precisions, precisions_below
from float8lab.nn.report import (
    candidates,
    conversion_report,
    emulated_gemms,
    forget_conversion,
    has_recipe,
    own_matrices,
    remember_conversion,
    shapes_of,
)
from float8lab.recipes.auto import Auto, Prediction, choose, explain, predict
from float8lab.recipes.cost import Times
from float8lab.recipes.recipe import Float8CurrentScaling, Recipe, check_recipe
from float8lab.recipes.region import STATE, Region, in_backward
from float8lab.tensor import Float4Tensor, Float8Tensor

__all__ = [
    "convert_to_float8",
    "matches",
    "remove_region_hooks",
    "to_high_precision",
    "unambiguous",
]

_LOG = logging.getLogger(__name__)

_Model = TypeVar("_Model", bound=nn.Module)


def matches(name: str, pattern: str) -> bool:
    """Whether a qualified layer name is meant by a pattern.

    A pattern is one or more whole path components, found anywhere in the name; a component may be a
    glob; a glob may also match the whole name.

    >>> matches("blocks.0.attn.qkv", "attn"), matches("blocks.0.attn.qkv", "blocks.0")
    (True, True)
    >>> matches("blocks.0.attn.qkv", "at"), matches("blocks.10.mlp", "blocks.1")
    (False, False)
    >>> matches("blocks.0.attn.qkv", "*.qkv"), matches("blocks.10.mlp", "blocks.1?.mlp")
    (True, True)
    """
    parts, wanted = name.split("."), pattern.split(".")
    found = any(
        all(fnmatchcase(p, w) for p, w in zip(parts[i:], wanted, strict=False))
        for i in range(len(parts) - len(wanted) + 1)
    )
    return found or fnmatchcase(name, pattern)


def unambiguous(
    changed: Mapping[str, Recipe | None], wanted: Mapping[str, Recipe | None]
) -> dict[str, Recipe | None]:
    """``overrides`` that mean these very layers, though a name is a pattern, too.

    Args:
        changed: the overrides to express, by layer.
        wanted: the recipe that each layer of the model is to get, changed or not.

    >>> unambiguous({"0": None}, {"0": None, "1.0": Float8CurrentScaling()})
    {'0': None, '1.0': Float8CurrentScaling()}
    """
    said = dict(changed)
    while True:
        said = dict(sorted(said.items(), key=lambda item: item[0].count(".")))
        for name, choice in wanted.items():
            found = [pattern for pattern in said if matches(name, pattern)]
            if found and found[-1] != name:
                said[name] = choice
                break
        else:
            return said


_Choice = Recipe | Auto

# PEFT's names of the linear layers of low-rank adapters and of the copies of layers that it trains.
# They are names, since the library need not be there, and other libraries use them too.
_ADAPTERS = ("lora_A", "lora_B")
_TRAINED_COPIES = "modules_to_save"

_CONVERTED = (Linear, OtherLinear, FusedModule, GroupedLinear, ExpertsBase)
"""Modules that have a recipe of their own."""


def convert_to_float8(  # each is a keyword that users set on its own
    model: _Model,
    recipe: Recipe | Auto | Literal["auto"] | None = None,
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    exclude: Sequence[str] = (),
    overrides: Mapping[str, Recipe | Auto | Literal["auto"] | None] | None = None,
    strict: bool = False,
    fp8_all_gather: bool = True,
    freeze_weights: bool = False,
) -> _Model:
    """Make the ``torch.nn.Linear`` layers of a model run in FP8, in place, and return the model.

    Hugging Face's ``Conv1D``, which GPT-2 has in their place, is converted, too, and so are the
    stacked experts of Transformers' and torchtitan's models. Routers stay in high precision: layers
    called ``router``, or ``gate`` beside ``experts`` that they score. Modules that multiply by
    parameters of their own in other ways, such as ``torch.nn.LSTM``, are reported and left alone.
    Modules of this library, such as ``Linear`` and ``ExpertMLP``, take the recipe as their own.

    ``conversion_report(model)`` says of each candidate whether it was converted, and why not. Its
    summary is logged: one line at level INFO of the logger ``float8lab.nn.convert``.

    Parameters are shared, not copied: optimizers made before stay valid, tied weights stay tied,
    state_dict keys do not change. A converted layer runs in FP8 by default, under an enclosing
    ``autocast(recipe=...)`` by that recipe, and in high precision under
    ``autocast(enabled=False)``. Converting again changes recipes and converts what is new.

    With a delayed recipe, one call of ``model`` is one step of the scales; call the model itself,
    or use ``autocast`` around what you call.

    Args:
        model: converted in place; may itself be a linear layer.
        recipe: None is ``Float8CurrentScaling()``. ``"auto"``, which is ``recipes.Auto()``, chooses
            for each layer what is predicted to be fastest, high precision included.
        filter_fn: ``filter_fn(layer, name)`` returns False for layers to leave alone. It is asked
            about every candidate of the report, whatever its class.
        exclude: layers to leave alone: whole path components (``"lm_head"``, ``"blocks.0"``) or
            globs (``"*.router"``).
        overrides: recipes of single layers by the same patterns; they win over ``recipe`` and over
            an enclosing autocast; None keeps a layer in high precision. The last match counts. A
            router, or a subclass of ``torch.nn.Linear`` with a forward of its own, is converted
            only if named here.
        strict: raise if anything asked for could not be done; the model is then unchanged.
        fp8_all_gather: if FSDP2 shards the model later, gather the weights in FP8, one byte an
            element, in place of the parameters' dtype. A weight that is shared with a layer in
            high precision, or that a GEMM needs in high precision, is gathered as usual.
        freeze_weights: store the weights of the converted layers in FP8, one byte an element, and
            freeze them: a base for adapters (docs/peft.md), or a model to serve. These are then new
            parameters, so make optimizers after.

    Returns:
        The same model.

    Raises:
        TypeError: ``recipe`` or an override is neither a recipe nor ``"auto"``.
        ValueError: ``strict`` and a layer cannot be converted, a name matches nothing, or the model
            has no linear layer.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Linear(128, 8))
    >>> model = float8lab.convert_to_float8(model, exclude=["1"])
    >>> print(float8lab.conversion_report(model))
    layer  out x in                                    share
    0      128 x 64  FP8      Float8CurrentScaling()  89.0 %
    1      8 x 128   skipped  excluded by '1'         11.0 %
    1 of 2 linear layers in FP8, 89.0 % of 9,352 parameters
    """
    check_module("model", model)
    check_callables(filter_fn=filter_fn)
    check_flags(strict=strict, fp8_all_gather=fp8_all_gather, freeze_weights=freeze_weights)
    exclude = check_names("exclude", exclude)
    check_instance("overrides", overrides, Mapping, "a mapping", optional=True)
    check_names("overrides", overrides or ())
    base = Float8CurrentScaling() if recipe is None else _checked("recipe", recipe)
    choices = {
        pattern: None if asked is None else _checked(f"overrides[{pattern!r}]", asked)
        for pattern, asked in (overrides or {}).items()
    }
    wishes = _Wishes(base, filter_fn, exclude, choices, routers(model))
    sharded = sharded_by_fsdp(model)
    plans, predicted = _choose_recipes(
        [
            _plan_layer(layer, name, wishes, sharded=layer in sharded)
            for name, layer in candidates(model)
        ]
    )
    attention = [
        (module, name, *_attention_recipe(module, name, wishes))
        for name, module in model.named_modules()
        if isinstance(module, DotProductAttention)
    ]
    names = [*(plan.name for plan in plans), *(name for _, name, _, _ in attention)]
    unmatched = tuple(
        pattern
        for pattern in (*exclude, *choices)
        if not any(matches(name, pattern) for name in names)
    )
    undone = [plan for plan in plans if plan.failed]
    reshard(model)
    frozen = [
        (plan.name, plan.layer, plan.recipe)
        for plan in plans
        if plan.recipe is not None and _TRAINED_COPIES not in plan.name.split(".")
    ]
    freezing = Freezing(model, frozen if freeze_weights else ())
    nothing = not plans and not any(asks_for_fp8_attention(r) for _, _, r, _ in attention if r)
    recasts = _recasts(plans) if strict else []
    if strict and (undone or unmatched or freezing.obstacles or nothing or recasts):
        lines = [
            "convert_to_float8(strict=True) must do all that was asked; got",
            *[f"  a {type(model).__name__} without a linear layer"] * nothing,
            *[f"  {plan.name}: {plan.note}" for plan in undone],
            *[f"  no layer is called {name!r}" for name in unmatched],
            *[f"  {obstacle}" for obstacle in freezing.obstacles],
            *recasts,
            "Exclude these layers, correct the names, or pass strict=False.",
        ]
        raise ValueError("\n".join(lines))
    for plan in plans:
        if plan.recipe is not None or plan.stays:
            _set_recipe(plan)
    for module, name, found, pinned in attention:
        precision = module._fp8
        precision.recipe, precision.pinned, precision.name = found, pinned, name
    gathering = _choose_all_gather(model, plans, fp8_all_gather)
    freezing.run()
    if any(plan.recipe is not None and plan.recipe.linear.delayed for plan in plans):
        _make_region_of_calls(model)
    if any(plan.recipe is not None and plan.layer is not model for plan in plans):
        watch_first_call(model)
    for part in model.modules():
        _run_layers_of_encoder(part)
    remember_conversion(
        model,
        unmatched=unmatched,
        notes=(*predicted, *freezing.obstacles, *gathering),
        # A layer that this call leaves alone may run in FP8 by an earlier one, which said how.
        layers=[
            (p.layer, p.note) for p in plans if p.recipe is not None or not has_recipe(p.layer)
        ],
    )
    _LOG.info("%s: %s", type(model).__name__, conversion_report(model).summary)
    return model


@dataclass(frozen=True)
class _LayerPlan:
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


def _checked(name: str, asked: Any) -> _Choice:
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


class _Wishes(NamedTuple):
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


def _plan_layer(layer: nn.Module, name: str, wishes: _Wishes, *, sharded: bool) -> _LayerPlan:
    left, choice, named = wishes.about(layer, name)

    def plan(note: str, recipe: Recipe | None = None, **how: Any) -> _LayerPlan:
        return _LayerPlan(layer, name, note, recipe, pinned=named, sharded=sharded, **how)

    if left is not None:
        return plan(left)
    if choice is None:
        return plan("high precision by overrides", stays=True)
    if not named and any(part in _ADAPTERS for part in name.split(".")):
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


def _choose_recipes(plans: Sequence[_LayerPlan]) -> tuple[list[_LayerPlan], list[str]]:
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


def _attention_recipe(module: nn.Module, name: str, wishes: _Wishes) -> tuple[Recipe | None, bool]:
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
    if isinstance(layer, _CONVERTED):
        return None
    if "forward" in vars(layer):
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


def _set_recipe(plan: _LayerPlan) -> None:
    layer: Any = plan.layer  # its class changes below
    if plan.recipe is not None and not isinstance(layer, _CONVERTED):
        kind, key = experts_class(layer), f"name {plan.name}"
        layer.__class__ = _class_of(layer, functools.partial(_float8_class, kind=kind))
        if kind is None:
            layer._fp8 = Precision(key=key)
        else:
            layer._set_up_precisions(kind.shapes(layer)[0][0], key)
        place_precisions(layer)
        weight = layer._parameters.get("weight") if isinstance(layer, Linear) else None
        if is_tensor_parallel(weight, sharded=plan.sharded):
            layer._follow_placements(weight, sharded=plan.sharded)
    for part, precision in precisions(layer):
        precision.recipe, precision.pinned = plan.recipe, plan.pinned
        precision.name = ".".join(filter(None, (plan.name, part)))


def _recasts(plans: Sequence[_LayerPlan]) -> list[str]:
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


def _choose_all_gather(model: nn.Module, plans: Sequence[_LayerPlan], wanted: bool) -> list[str]:
    """Let FSDP2 gather a weight in FP8 if all that use it, one or several layers, agree.

    Returns:
        A sentence about weights for which that is too late, if there are such.
    """
    users = users_of(model)
    recipes = {id(plan.layer): plan.recipe for plan in plans if plan.recipe is not None}
    late = 0
    for plan in plans:
        layer: Any = plan.layer
        if plan.recipe is not None and isinstance(layer, (Linear, GroupedLinear)):
            weight = layer._parameters.get("weight")
            others = users.get(id(weight), [])
            agree = all(recipes.get(id(other)) == plan.recipe for other, _ in others)
            too_late = is_sharded_plain(weight)
            layer._fp8.fp8_all_gather = wanted and agree and not too_late
            late += wanted and too_late
    if not late:
        return []
    return [
        f"{late} weights were sharded before they were converted, and are gathered in high "
        "precision; convert before fully_shard to gather them in FP8"
    ]


_CLASSES: dict[type, type] = {nn.Linear: Linear}
"""The FP8 class of each class of linear layer met so far."""


def _float8_class(original: type, kind: type[OtherExperts] | None = None) -> type:
    """The FP8 class of a class of linear layers, or of experts of a kind."""
    if original not in _CLASSES:
        known = known_linear(original)
        float8: Any = kind or (Linear if known is nn.Linear else load_float8_class(known))
        if original is not known:
            # Everything but forward is the original's; the FP8 class comes after it.
            namespace: dict[str, Any] = {
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__reduce_ex__": functools.partialmethod(_reduce, original, kind),
                "forward": float8.forward,
            }
            if kind is not None:
                namespace["original"] = original
                namespace.update((name, getattr(kind, name)) for name in kind.replaces)
            float8 = type(original.__name__, (original, float8), namespace)
        _CLASSES[original] = float8
    return _CLASSES[original]


def _reduce(layer: nn.Module, original: Any, kind: Any, protocol: Any) -> Any:
    """Have copy and pickle rebuild a layer whose class has the original's name, but is not it."""
    reduced = original.__reduce_ex__(layer, protocol)
    if reduced[:2] != (copyreg.__newobj__, (_CLASSES[original],)):  # type: ignore[attr-defined]
        return reduced  # the original has a way of its own
    return _new_layer, (original, kind), *reduced[2:]


def _new_layer(original: type, kind: type[OtherExperts] | None = None) -> Any:
    """A layer of the FP8 class of ``original`` without attributes; pickle names the function."""
    cls: Any = _float8_class(original, kind)
    return cls.__new__(cls)


def _plain_class(converted: type) -> type:
    # A layer that was unpickled may have an FP8 class that nothing has asked for yet.
    originals = {float8: original for original, float8 in _CLASSES.items()}
    other = issubclass(converted, (OtherLinear, OtherExperts))
    library: Any = converted
    default: type = library.original if other else converted
    return originals.get(converted, default)


def _class_of(layer: nn.Module, change: Callable[[type], type]) -> type:
    """The layer's class after ``change``.

    A parametrized layer has a class of its own on top of the real one; a copy of it goes on top of
    the changed class.
    """
    cls = type(layer)
    if not is_parametrized(layer):
        return change(cls)
    namespace = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (change(cls.__bases__[0]),), namespace)


_FAST_PATH = "_fast_path_before_float8"


def _run_layers_of_encoder(module: nn.Module) -> None:
    """Have torch's encoder call the linear layers of its parts in evaluation, if they are in FP8.

    Its fused path, and the nested tensors that it makes for that path, would read their weights.
    Torch takes it for two activations only, which an attribute says that nothing else reads.
    """
    mine: Any = vars(module)
    if isinstance(module, nn.TransformerEncoder):
        attribute = "use_nested_tensor"
    elif isinstance(module, nn.TransformerEncoderLayer):
        attribute = "activation_relu_or_gelu"
    else:
        return
    parts = [part for part in module.modules() if isinstance(part, nn.TransformerEncoderLayer)]
    if any(has_recipe(layer) for part in parts for layer in (part.linear1, part.linear2)):
        mine.setdefault(_FAST_PATH, mine[attribute])
        mine[attribute] = 0
    elif _FAST_PATH in mine:
        mine[attribute] = mine.pop(_FAST_PATH)


@torch._disable_dynamo
def _end(region: Region, *, finished: bool) -> None:
    if finished:
        region.close()
    else:
        region.discard()


class _CallRegion:
    """Makes each call of a model one delayed-scaling region, unless it is inside one already.

    Where the call is traced into a graph, so are these hooks. Where only the model's ``forward``
    is, they run in Python.
    """

    def __init__(self, recipes: tuple[Recipe, ...]) -> None:
        self._open: Region | None = None
        self._outer: Any = None  # the settings around the open region
        self._finished = False
        self._prepared = False
        self.recipes = recipes  # delayed ones of the model's layers

    def reset(self, recipes: tuple[Recipe, ...]) -> None:
        """Replace the recipes, for other layers."""
        self.recipes, self._prepared = recipes, False

    @torch._disable_dynamo
    def _prepare(self, model: nn.Module) -> None:
        home = next((p.device for p in model.parameters()), torch.device("cpu"))
        for layer in model.modules():
            for _, precision in precisions(layer):
                if precision.recipe in self.recipes:
                    precision.prepare(next((p.device for p in layer.parameters()), home))

    def before(self, model: nn.Module, args: Any) -> None:
        outer = STATE.autocast
        if not model.training or outer.enabled is False or in_backward():
            return
        region = outer.region
        if self._open is None and region is None:
            region = self._open = Region(silent=False)
            self._outer, self._finished = outer, False
            STATE.autocast = outer.inside(region)
        assert region is not None, "opened above or before"
        if not torch.compiler.is_compiling() and not self._prepared:
            self._prepared = True
            self._prepare(model)
            # In an enclosing region other ranks may not call this model at all.
            region.first = self._open is not None
        for recipe in self.recipes:
            region.expect(recipe, outer.group, calibrating=outer.calibrating)

    def finished(self, model: nn.Module, args: Any, output: Any) -> None:
        self._finished = True

    def after(self, model: nn.Module, args: Any, output: Any) -> None:
        region = self._open
        if region is None or STATE.autocast.region is not region:
            return
        STATE.autocast, self._open = self._outer, None
        if torch.compiler.is_compiling():
            region.close()
        else:
            _end(region, finished=self._finished)

    def __deepcopy__(self, memo: dict[int, Any]) -> _CallRegion:
        return memo.setdefault(id(self), _CallRegion(self.recipes))

    def __reduce__(self) -> Any:
        return _CallRegion, (self.recipes,)


# A model's hooks are no callees of its forward, which is what torch.compile(model) traces.
for _hook in (_CallRegion.before, _CallRegion.finished, _CallRegion.after):
    leave_to_python(_hook)


def _make_region_of_calls(model: nn.Module) -> None:
    found = [precision.recipe for precision in precisions_below(model)]
    recipes = tuple(dict.fromkeys(r for r in found if r is not None and r.linear.delayed))
    hooks = model._forward_pre_hooks.values()
    for hook in hooks:
        if isinstance(owner := getattr(hook, "__self__", None), _CallRegion):
            owner.reset(recipes)
            return
    region = _CallRegion(recipes)
    model.register_forward_pre_hook(region.before, prepend=True)
    # Two hooks, since one that is always called cannot tell an exception from a None result.
    model.register_forward_hook(region.finished)
    model.register_forward_hook(region.after, always_call=True)


def to_high_precision(model: _Model) -> _Model:
    """Undo ``convert_to_float8``, in place; FP8-stored weights are dequantized.

    A ``float8lab.Linear`` built as one becomes a ``torch.nn.Linear``. Modules that torch has not,
    such as ``LayerNormMLP``, lose their recipe: they run in high precision outside ``autocast``.

    Returns:
        The same model.

    Raises:
        NotImplementedError: a layer with ``return_bias`` or ``parameters_split``, or of several
            tensor-parallel ranks, which torch.nn.Linear cannot express.

    >>> model = float8lab.convert_to_float8(torch.nn.Linear(8, 8))
    >>> type(float8lab.to_high_precision(model))
    <class 'torch.nn.modules.linear.Linear'>
    """
    check_module("model", model)
    layers = [m for m in model.modules() if isinstance(m, (Linear, OtherLinear, OtherExperts))]
    for layer in layers:
        if isinstance(layer, Linear) and (
            layer.return_bias or layer._split is not None or layer.tp_size > 1
        ):
            raise NotImplementedError(
                "to_high_precision must find layers that torch.nn.Linear can express; got one with "
                "return_bias or parameters_split, or of several tensor-parallel ranks. Run it "
                "under autocast(enabled=False) instead."
            )
    for module in model.modules():
        if isinstance(module, _CONVERTED):
            _dequantize_parameters(module)
        if isinstance(module, (FusedModule, GroupedLinear, ExpertMLP, DotProductAttention)):
            for _, precision in precisions(module):
                precision.recipe, precision.pinned = None, False
    for layer in layers:
        layer.__class__ = _class_of(layer, _plain_class)
        for name in [name for name, value in vars(layer).items() if isinstance(value, Precision)]:
            delattr(layer, name)
        vars(layer).pop("_spread", None)
    for module in model.modules():
        remove_hooks(module, (_CallRegion, FirstCall))
        _run_layers_of_encoder(module)
    forget_conversion(model)
    return model


def _dequantize_parameters(module: nn.Module) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, Float8Tensor):
            plain = nn.Parameter(parameter.detach().dequantize(), parameter.requires_grad)
            setattr(module, name, plain)


def remove_region_hooks(module: nn.Module) -> None:
    """Keep calls of a module from being regions of delayed scaling any more."""
    remove_hooks(module, _CallRegion)
