"""convert_to_float8: convert the linear layers of an existing model to FP8, in place.

A layer is converted by changing the class of the same object, from ``torch.nn.Linear`` to
``float8lab.Linear`` (``swap.py``). Each kind of linear layer of another library has its own FP8
class (``other_linear.py``).
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from torch import nn

from float8lab import arguments
from float8lab.distributed.fsdp.shards import is_sharded_plain, reshard
from float8lab.nn.convert.call_region import make_region_of_calls
from float8lab.nn.convert.first_call import FirstCall, remove_hooks
from float8lab.nn.convert.freezing import Freezing
from float8lab.nn.convert.names import TRAINED_COPIES
from float8lab.nn.convert.other_experts import OtherExperts
from float8lab.nn.convert.other_linear import OtherLinear
from float8lab.nn.convert.plan import (
    CONVERTED,
    ConversionOptions,
    ConversionPlan,
    LayerPlan,
    checked_choice,
    lines_about_recasts,
    plan_conversion,
)
from float8lab.nn.convert.report import forget_conversion, remember_conversion, report_of_walk
from float8lab.nn.convert.swap import class_of, plain_class, run_layers_of_encoders, set_recipes
from float8lab.nn.convert.walk import ModelWalk, ParameterUsers, recipes_of, users_of, walk_model
from float8lab.nn.convert.wrapped_forward import rebind_forward
from float8lab.nn.layer import GemmModule
from float8lab.nn.linear import Linear
from float8lab.nn.precision import Precision, precisions
from float8lab.recipes.auto import Auto
from float8lab.recipes.recipe import Float8CurrentScaling, Recipe
from float8lab.tensor import Float8Tensor

__all__ = ["checked_options", "convert_to_float8", "to_high_precision"]

_LOG = logging.getLogger("float8lab.nn.convert")
_DEFAULT_RECIPE = Float8CurrentScaling()
_Model = TypeVar("_Model", bound=nn.Module)


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

    Hugging Face's ``Conv1D``, which GPT-2 has instead, is converted as well, and so are the stacked
    experts of Transformers' and torchtitan's models. Routers stay in high precision: layers called
    ``router``, or ``gate`` if the parent has ``experts`` that they score. The projections of
    ``torch.nn.MultiheadAttention`` are converted, and a ``LazyLinear`` once it materialises.
    Modules such as ``torch.nn.LSTM``, with other kinds of weights, are reported but not converted.
    Modules of this library, such as ``Linear`` and ``ExpertMLP``, take the recipe as their own.

    ``conversion_report(model)`` says for each candidate whether it was converted, or why not. Its
    summary is logged: a line at level INFO of the logger ``float8lab.nn.convert``. A call that
    converts nothing warns, with the commonest reason.

    Parameters are shared, not copied: existing optimizers stay valid, tied weights stay tied,
    state_dict keys do not change. A converted layer runs in FP8 by default, under an enclosing
    ``autocast(recipe=...)`` by that recipe, and in high precision under
    ``autocast(enabled=False)``. A repeated call changes recipes and converts new layers.

    With a delayed recipe, each call of ``model`` is a step of the scales; call the model itself, or
    use ``autocast`` around your calls.

    Args:
        model: the model, which may itself be a linear layer.
        recipe: None is ``Float8CurrentScaling()``. ``"auto"``, which is ``recipes.Auto()``, chooses
            for each layer the recipe with the fastest prediction, or high precision.
        filter_fn: ``filter_fn(layer, name)`` returns False for layers not to convert. It is called
            for every candidate of the report, of any class.
        exclude: layers not to convert: full path components (``"lm_head"``, ``"blocks.0"``) or
            globs (``"*.router"``), of any name that the layer has in the model.
        overrides: recipes of single layers by the same patterns; they win over ``recipe`` and over
            an enclosing autocast; None keeps a layer in high precision. The last match counts. A
            router, or a subclass of ``torch.nn.Linear`` with its own forward, which it then loses,
            is converted only if it is named in ``overrides``.
        strict: raise, and leave the model unchanged, if any request could not be met.
        fp8_all_gather: if FSDP2 shards the model later, gather the weights in FP8, one byte an
            element, instead of the parameters' dtype. A weight that is shared with a layer in
            high precision, or that a GEMM needs in high precision, is gathered as usual.
        freeze_weights: store the weights of the converted layers in FP8, one byte an element, and
            freeze them: a base for adapters (docs/peft.md), or a model to serve. The weights become
            new parameters, so make optimizers afterwards.

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
    arguments.check_module("model", model)
    arguments.check_flags(
        strict=strict, fp8_all_gather=fp8_all_gather, freeze_weights=freeze_weights
    )
    options = checked_options(recipe, filter_fn, exclude, overrides)
    walk = walk_model(model)
    plan = plan_conversion(walk, options)
    reshard(walk.modules)
    users = users_of(walk.modules)
    layers = [p for p in plan.layers if p.recipe is not None]
    # PEFT trains its copies of layers, so their weights must not be frozen.
    frozen = [p for p in layers if TRAINED_COPIES not in p.candidate.name.split(".")]
    freezing = Freezing(frozen if freeze_weights else [], users)
    if strict:
        _require_all(model, plan, freezing)
    set_recipes([p for p in plan.layers if p.recipe is not None or p.stays] + plan.attention)
    late = _choose_all_gather(layers, users, fp8_all_gather)
    freezing.run()
    _register_hooks(model, walk, layers)
    run_layers_of_encoders(walk.modules)
    notes = (*plan.predictions, *freezing.obstacles, *late)
    # A layer that this call does not convert may run in FP8 by an earlier call, and have its note.
    notes_of_layers = [
        (p.candidate.layer, p.note)
        for p in plan.layers
        if p.recipe is not None or not recipes_of(p.candidate.layer)
    ]
    remember_conversion(model, walk, plan.unmatched, notes, notes_of_layers)
    if not layers and not plan.runs_fp8_attention():
        _warn_of_nothing(model, plan)
    if _LOG.isEnabledFor(logging.INFO):
        _LOG.info("%s: %s", type(model).__name__, report_of_walk(model, walk).summary)
    return model


def checked_options(recipe: Any, filter_fn: Any, exclude: Any, overrides: Any) -> ConversionOptions:
    """Check and return the arguments that choose layers and recipes."""
    arguments.check_callables(("module", "name"), filter_fn=filter_fn)
    exclude = arguments.check_names("exclude", exclude)
    arguments.check_instance("overrides", overrides, Mapping, "a mapping", optional=True)
    arguments.check_names("overrides", overrides or ())
    base = _DEFAULT_RECIPE if recipe is None else checked_choice("recipe", recipe)
    choices = {
        pattern: None if choice is None else checked_choice(f"overrides[{pattern!r}]", choice)
        for pattern, choice in (overrides or {}).items()
    }
    return ConversionOptions(base, filter_fn, exclude, choices)


def _require_all(model: nn.Module, plan: ConversionPlan, freezing: Freezing) -> None:
    empty = not plan.layers and not plan.runs_fp8_attention()
    lines = [
        *[f"  a {type(model).__name__} without a linear layer"] * empty,
        *[f"  {p.candidate.name}: {p.note}" for p in plan.layers if p.failed],
        *[f"  no layer is called {name!r}" for name in plan.unmatched],
        *[f"  {obstacle}" for obstacle in freezing.obstacles],
        *lines_about_recasts(plan.layers),
    ]
    if lines:
        listed = "\n".join(lines)
        raise ValueError(
            f"convert_to_float8(strict=True) must do all that was asked; got\n{listed}\n"
            "Exclude these layers, correct the names, or pass strict=False."
        )


def _choose_all_gather(
    layers: Sequence[LayerPlan], users: ParameterUsers, fp8_all_gather: bool
) -> list[str]:
    """Let FSDP2 gather a weight in FP8 if all layers that use the weight agree.
    Return a list with a sentence about weights for which it is too late, if there are any."""
    recipes = {id(plan.candidate.layer): plan.recipe for plan in layers}
    late = 0
    for plan in layers:
        layer = plan.candidate.layer
        if not isinstance(layer, GemmModule) or not layer.gathers_fp8:
            continue
        for gemm in layer.gemms:
            weight = layer._parameters.get(gemm.weights[0])
            precision = getattr(layer, gemm.state)
            modules = users.get(id(weight), [])
            agree = all(recipes.get(id(module)) == plan.recipe for module, _ in modules)
            too_late = plan.sharded and is_sharded_plain(weight)
            precision.fp8_all_gather = fp8_all_gather and agree and not too_late
            late += fp8_all_gather and too_late
    note = (
        f"{late} weights were sharded before they were converted, and are gathered in high "
        "precision; convert before fully_shard to gather them in FP8"
    )
    return [note] if late else []


def _register_hooks(model: nn.Module, walk: ModelWalk, layers: Sequence[LayerPlan]) -> None:
    if any(plan.recipe is not None and plan.recipe.linear.delayed for plan in layers):
        make_region_of_calls(model, walk.modules)
    if any(plan.candidate.layer is not model for plan in layers):
        remove_hooks(model, FirstCall)  # the hooks of an earlier conversion
        FirstCall().register(model)


def _warn_of_nothing(model: nn.Module, plan: ConversionPlan) -> None:
    text = f"convert_to_float8 found no linear layer in a {type(model).__name__}."
    if plan.layers:
        note, count = Counter(layer.note for layer in plan.layers).most_common(1)[0]
        text = (
            f"convert_to_float8 converted none of the {len(plan.layers)} linear layers of a "
            f"{type(model).__name__}; the commonest reason, of {count}: {note}. "
            "conversion_report(model) has the reason of each."
        )
    warnings.warn(text, UserWarning, stacklevel=3)


def to_high_precision(model: _Model) -> _Model:
    """Undo ``convert_to_float8`` in place, dequantize weights stored in FP8, and return the model.

    Any ``float8lab.Linear`` becomes a ``torch.nn.Linear``. Modules that torch does not have, such
    as ``LayerNormMLP``, lose their recipe: they run in high precision outside ``autocast``.

    Raises:
        NotImplementedError: a layer has ``return_bias``, ``parameters_split`` or several
            tensor-parallel ranks, which torch.nn.Linear cannot express.

    >>> model = float8lab.convert_to_float8(torch.nn.Linear(8, 8))
    >>> type(float8lab.to_high_precision(model))
    <class 'torch.nn.modules.linear.Linear'>
    """
    arguments.check_module("model", model)
    modules = list(model.modules())
    layers = [m for m in modules if isinstance(m, (Linear, OtherLinear, OtherExperts))]
    if any(any((m.return_bias, m._split, m.tp_size > 1)) for m in layers if isinstance(m, Linear)):
        raise NotImplementedError(
            "to_high_precision must find layers that torch.nn.Linear can express; got one with "
            "return_bias or parameters_split, or of several tensor-parallel ranks. Run it "
            "under autocast(enabled=False) instead."
        )
    users = users_of(modules)
    for module in modules:
        if isinstance(module, CONVERTED):
            _dequantize_parameters(module, users)
            for _, precision in precisions(module):
                precision.recipe, precision.pinned = None, False
    for layer in layers:
        object.__setattr__(layer, "__class__", class_of(layer, plain_class))
        rebind_forward(layer)
        for name in [name for name, value in vars(layer).items() if isinstance(value, Precision)]:
            delattr(layer, name)
        vars(layer).pop("_placement", None)
    for module in modules:
        remove_hooks(module)
    run_layers_of_encoders(modules)
    forget_conversion(model)
    return model


def _dequantize_parameters(module: nn.Module, users: ParameterUsers) -> None:
    for parameter in list(module._parameters.values()):
        if isinstance(parameter, Float8Tensor):
            plain = nn.Parameter(parameter.detach().dequantize(), parameter.requires_grad)
            for place in users[id(parameter)]:  # tied weights stay tied
                setattr(*place, plain)
