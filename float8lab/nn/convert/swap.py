"""Changing a layer into an FP8 one, and back, by the class of the very object.

Parameters, hooks, attributes, parametrizations and every reference to the layer stay as they are.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from float8lab.distributed.fsdp.shards import is_tensor_parallel
from float8lab.nn.convert.other_experts import OtherExperts, experts_class
from float8lab.nn.convert.other_linear import OtherLinear, known_linear, load_float8_class
from float8lab.nn.convert.plan import CONVERTED, LayerPlan
from float8lab.nn.convert.report import has_recipe
from float8lab.nn.convert.wrapped_forward import rebind_forward
from float8lab.nn.describe import describe_fp8
from float8lab.nn.linear import Linear
from float8lab.nn.precision import Precision, place_precisions, precisions

__all__ = ["class_of", "plain_class", "run_layers_of_encoder", "set_recipe"]

_CLASSES: dict[type, type] = {nn.Linear: Linear}
"""The FP8 class of each class of linear layer met so far."""


def set_recipe(plan: LayerPlan) -> None:
    """Give a layer the recipe of its plan; one that is not FP8 yet changes its class."""
    layer: Any = plan.layer  # its class changes below
    if plan.recipe is not None and not isinstance(layer, CONVERTED):
        kind, key = experts_class(layer), f"name {plan.name}"
        layer.__class__ = class_of(layer, functools.partial(_float8_class, kind=kind))
        rebind_forward(layer)
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
                "extra_repr": functools.partialmethod(_extra_repr, original),
            }
            if kind is not None:
                namespace["original"] = original
                namespace.update((name, getattr(kind, name)) for name in kind.replaces)
            float8 = type(original.__name__, (original, float8), namespace)
        _CLASSES[original] = float8
    return _CLASSES[original]


def _extra_repr(layer: nn.Module, original: Any) -> str:
    """What the original class says of a layer, and its recipe."""
    return f"{original.extra_repr(layer)}{describe_fp8(layer)}".removeprefix(", ")


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


def plain_class(converted: type) -> type:
    """The class that a converted layer had before."""
    # A layer that was unpickled may have an FP8 class that nothing has asked for yet.
    originals = {float8: original for original, float8 in _CLASSES.items()}
    other = issubclass(converted, (OtherLinear, OtherExperts))
    library: Any = converted
    default: type = library.original if other else converted
    return originals.get(converted, default)


def class_of(layer: nn.Module, change: Callable[[type], type]) -> type:
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


def run_layers_of_encoder(module: nn.Module) -> None:
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
