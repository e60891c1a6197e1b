"""Change a layer to FP8 and back by changing the class of the same object.

Parameters, hooks, attributes, parametrizations and all references to the layer stay unchanged.
"""

from __future__ import annotations

import copyreg
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils.parametrize import is_parametrized

from float8lab.distributed.fsdp.shards import is_tensor_parallel
from float8lab.nn.convert.other_experts import OtherExperts
from float8lab.nn.convert.other_linear import OtherLinear, known_linear, load_float8_class
from float8lab.nn.convert.plan import CONVERTED, LayerPlan
from float8lab.nn.convert.torch_attention import Float8TorchAttention
from float8lab.nn.convert.walk import recipes_of
from float8lab.nn.convert.wrapped_forward import rebind_forward
from float8lab.nn.layer import describe_fp8
from float8lab.nn.linear import Linear
from float8lab.nn.precision import Precision, place_precisions, precisions
from float8lab.tensor.dtensor import is_dtensor

__all__ = ["class_of", "plain_class", "run_layers_of_encoders", "set_recipes"]

_CLASSES: dict[type, type] = {nn.Linear: Linear, nn.MultiheadAttention: Float8TorchAttention}
"""The FP8 class of each class of linear layers that was converted so far."""


def set_recipes(plans: Sequence[LayerPlan]) -> None:
    """Give layers their recipes and FP8 classes; none if a class refuses to have subclasses."""
    new = [p for p in plans if p.recipe and not isinstance(p.candidate.layer, CONVERTED)]
    classes = [class_of(p.candidate.layer, _float8_class, p.candidate.experts_class) for p in new]
    for plan, cls in zip(new, classes, strict=True):
        _change_class(plan, cls)
    for plan in plans:
        for gemm, precision in precisions(plan.candidate.layer):
            precision.recipe, precision.pinned = plan.recipe, plan.pinned
            precision.name = ".".join(filter(None, (plan.candidate.name, gemm)))


def _change_class(plan: LayerPlan, cls: type) -> None:
    """Change the class of a layer to an FP8 class; the layer has no recipe yet."""
    (name, *_), layer, _, experts, _ = plan.candidate
    object.__setattr__(layer, "__class__", cls)  # the layer's own method may refuse
    rebind_forward(layer)
    if experts is None:
        for gemm in layer.gemm_names if isinstance(layer, OtherLinear) else ("",):
            vars(layer)[f"_fp8{gemm}"] = Precision(key=f"name {name}{gemm}")
    else:
        for gemm in layer.layer_names:
            precision = Precision(key=f"name {name} {gemm}")
            precision.experts = experts.shapes(layer)[0][0]
            vars(layer)[f"_fp8_{gemm}"] = precision
    place_precisions(layer)
    weight = layer._parameters.get("weight") if isinstance(layer, Linear) else None
    if is_dtensor(weight) and is_tensor_parallel(weight, sharded=plan.sharded):
        layer._follow_placements(weight, sharded=plan.sharded)


def _float8_class(original: type, experts: type[OtherExperts] | None = None) -> type:
    """Return the FP8 class of a class of linear layers or experts."""
    if original not in _CLASSES:
        linear = known_linear(original)
        float8: Any = experts or (Linear if linear is nn.Linear else load_float8_class(linear))
        if original is not linear:
            # The new class inherits from the original first, and overrides little but forward.
            namespace: dict[str, object] = {
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__reduce_ex__": functools.partialmethod(_reduce, original, experts),
                "forward": float8.forward,
                "extra_repr": functools.partialmethod(_extra_repr, original),
            }
            if issubclass(original, LazyModuleMixin) and original.cls_to_become is not None:
                namespace["cls_to_become"] = _float8_class(original.cls_to_become)
            if experts is not None:
                namespace["original"] = original
                namespace.update((name, getattr(experts, name)) for name in experts.replaces)
            float8 = type(original.__name__, (original, float8), namespace)
        _CLASSES[original] = float8
    return _CLASSES[original]


def _extra_repr(layer: nn.Module, original: type[nn.Module]) -> str:
    """Return the ``extra_repr`` of the original class, and the recipe after it."""
    return f"{original.extra_repr(layer)}{describe_fp8(layer)}".removeprefix(", ")


def _reduce(
    layer: nn.Module, original: Any, experts: type[OtherExperts] | None, protocol: object
) -> Any:
    """Let copy and pickle rebuild a layer whose class only has the name of the original class."""
    reduced = original.__reduce_ex__(layer, protocol)
    if reduced[:2] != (copyreg.__newobj__, (_CLASSES[original],)):  # type: ignore[attr-defined]
        return reduced  # the original defines its own reduction
    return _new_layer, (original, experts), *reduced[2:]


def _new_layer(original: type, experts: type[OtherExperts] | None = None) -> Any:
    """Make a layer of ``original``'s FP8 class without attributes; pickles name this function."""
    cls: Any = _float8_class(original, experts)
    return cls.__new__(cls)


def plain_class(converted: type) -> type:
    """Return the class that a converted layer had before its conversion."""
    # An unpickled layer may have an FP8 class that is not in the table yet.
    originals = {float8: original for original, float8 in _CLASSES.items()}
    if issubclass(converted, (OtherLinear, OtherExperts)):
        return originals.get(converted, converted.original)
    return originals.get(converted, converted)


def class_of(layer: nn.Module, change: Callable[..., type], *arguments: object) -> type:
    """Return the layer's class after ``change``, which gets the class and ``arguments``."""
    # A parametrized layer has its own class, derived from the real class; a copy of that class is
    # derived from the changed class.
    cls = type(layer)
    if not is_parametrized(layer):
        return change(cls, *arguments)
    namespace = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, (change(cls.__bases__[0], *arguments),), namespace)


_FAST_PATH = "_fast_path_before_float8"


def run_layers_of_encoders(modules: Iterable[nn.Module]) -> None:
    """Make torch's encoders call their layers in evaluation, if some of the layers are in FP8.

    An encoder's fused path, and the nested tensors that it makes for that path, would read the
    weights. Torch takes this path for two activations; the attribute that says so has no other use.
    """
    for module in modules:
        if not isinstance(module, (nn.TransformerEncoder, nn.TransformerEncoderLayer)):
            continue
        is_layer = isinstance(module, nn.TransformerEncoderLayer)
        attribute = "activation_relu_or_gelu" if is_layer else "use_nested_tensor"
        state = vars(module)
        blocks = [m for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer)]
        layers = (m for b in blocks for m in (b.linear1, b.linear2, *b.self_attn.modules()))
        if any(map(recipes_of, layers)):
            state.setdefault(_FAST_PATH, state[attribute])
            state[attribute] = 0
        elif _FAST_PATH in state:
            state[attribute] = state.pop(_FAST_PATH)
