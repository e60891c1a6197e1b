"""Walk over the modules of a model to find the modules with GEMMs, and their kinds.

A *candidate* is a module that multiplies by a matrix of parameters: a linear layer, stacked
experts, a module of this library, or a module with a forward that FP8 cannot replace. The walk
determines the kind of a candidate once; all later steps read it from the candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import ParametrizationList

from float8lab.nn.attention.dot_product import DotProductAttention
from float8lab.nn.convert.other_experts import OtherExperts, experts_class
from float8lab.nn.convert.other_linear import known_linear, load_float8_class
from float8lab.nn.layer import GemmModule
from float8lab.nn.precision import precisions

__all__ = [
    "UNSEEN", "Candidate", "ModelWalk", "ParameterUsers", "has_recipe", "is_unseen",
    "matrix_shapes", "users_of", "walk_model",
]  # fmt: skip

ParameterUsers = dict[int, list[tuple[nn.Module, str]]]
"""The modules that have a parameter, and its name in each, by the parameter's id."""


class Candidate(NamedTuple):
    """A module that multiplies by a matrix of parameters, and its kind."""

    name: str
    layer: Any
    linear_class: Any = None
    """The class of linear layers, of torch or registered, from which the module derives."""
    experts_class: type[OtherExperts] | None = None
    """The FP8 class for stacked experts of this kind."""
    matrices: tuple[str, ...] = ()
    """The names of the matrices of a module of unknown kind, which seems to multiply by them."""


class ModelWalk(NamedTuple):
    """The modules of a model, and those of them that matter for a conversion."""

    named_modules: list[tuple[str, nn.Module]]
    candidates: list[Candidate]
    attention: list[tuple[str, DotProductAttention]]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules without their names."""
        return [module for _, module in self.named_modules]


def walk_model(model: nn.Module) -> ModelWalk:
    """Visit each module of a model once, and find out once what each class is."""
    named_modules = list(model.named_modules())
    linear_class = {cls: known_linear(cls) for cls in {type(m) for _, m in named_modules}}
    candidates = (_as_candidate(name, m, linear_class[type(m)]) for name, m in named_modules)
    attention = [(name, m) for name, m in named_modules if isinstance(m, DotProductAttention)]
    return ModelWalk(named_modules, [*filter(None, candidates)], attention)


_NO_MATRICES = nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList
"""Modules without GEMMs whose parameters may have the shape of a linear layer's weight."""


def _as_candidate(name: str, module: nn.Module, linear_class: type | None) -> Candidate | None:
    """Return a module as a candidate, or None; ``linear_class`` is that of its own class."""
    has_no_plain_class = isinstance(module, GemmModule) and not isinstance(module, nn.Linear)
    if linear_class is not None or has_no_plain_class:
        return Candidate(name, module, linear_class)
    if (experts := experts_class(module)) is not None:
        return Candidate(name, module, experts_class=experts)
    if isinstance(module, _ConvNd):  # a kernel of a single position is a matrix
        is_matrix = set(module.kernel_size) == {1} and module.groups == 1
        return Candidate(name, module, matrices=("weight",)) if is_matrix else None
    # Stacked experts have three dimensions. A router's parameter with two dimensions has "weight"
    # in its name, unlike a table of positions.
    matrices = tuple(
        key
        for key, parameter in module._parameters.items()
        if parameter is not None
        and not isinstance(parameter, UninitializedParameter)
        and (parameter.ndim == 3 or (parameter.ndim == 2 and "weight" in key))
        and min(parameter.shape) > 1
    )
    if not matrices or isinstance(module, _NO_MATRICES):
        return None
    return Candidate(name, module, matrices=matrices)


def matrix_shapes(candidate: Candidate) -> list[tuple[int, ...]]:
    """Return the shapes of a candidate's matrices; the number of experts comes first."""
    layer = candidate.layer
    if candidate.matrices:
        if isinstance(layer, _ConvNd):
            return [(layer.out_channels, layer.in_channels)]
        return [tuple(layer.get_parameter(name).shape) for name in candidate.matrices]
    if candidate.experts_class is not None:
        return candidate.experts_class.shapes(layer)
    if isinstance(layer, GemmModule) and candidate.linear_class is None:
        return [gemm.shape for gemm in layer.gemms]
    if isinstance(layer, nn.MultiheadAttention) and layer.in_proj_weight is None:
        weights = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
        return [tuple(weight.shape) for weight in weights]
    if candidate.linear_class is None or candidate.linear_class is nn.Linear:
        return [(layer.out_features, layer.in_features)]
    return [tuple(load_float8_class(candidate.linear_class).matrix(layer).shape)]


def has_recipe(layer: nn.Module) -> bool:
    """Whether a layer has its own recipe to run in FP8."""
    return any(precision.recipe is not None for _, precision in precisions(layer))


UNSEEN = "_float8_unseen"
"""The attribute of a converted layer that did not run when the model was called."""


def is_unseen(layer: nn.Module) -> bool:
    """Whether a converted layer did not run when the model was called, and has not run since."""
    return UNSEEN in vars(layer) and all(p._last_call is None for _, p in precisions(layer))


def users_of(modules: Iterable[nn.Module]) -> ParameterUsers:
    """Return which of the modules have each parameter."""
    users: ParameterUsers = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, name))
    return users
