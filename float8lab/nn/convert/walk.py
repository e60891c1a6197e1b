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
from float8lab.nn.convert.names import matches
from float8lab.nn.convert.other_experts import OtherExperts, experts_class
from float8lab.nn.convert.other_linear import known_linear, load_float8_class
from float8lab.nn.layer import GemmModule
from float8lab.nn.precision import precisions
from float8lab.recipes.recipe import Recipe

__all__ = [
    "UNSEEN", "Candidate", "ModelWalk", "ParameterUsers", "is_unseen", "matrix_shapes",
    "recipes_of", "users_of", "walk_model",
]  # fmt: skip

ParameterUsers = dict[int, list[tuple[nn.Module, str]]]
"""The modules that have a parameter, and its name in each, by the parameter's id."""


class Candidate(NamedTuple):
    """A module that multiplies by a matrix of parameters, and its kind."""

    names: tuple[str, ...]
    """Its names in the model: several if several modules contain it."""
    layer: Any
    linear_class: Any = None
    """The class of linear layers, of torch or registered, from which the module derives."""
    experts_class: type[OtherExperts] | None = None
    """The FP8 class for stacked experts of this kind."""
    matrices: tuple[str, ...] = ()
    """The names of the matrices of a module of unknown kind, which seems to multiply by them."""

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]

    def is_called(self, pattern: str) -> bool:
        """Whether one of its names matches a pattern."""
        return any(matches(name, pattern) for name in self.names)


class ModelWalk(NamedTuple):
    """The modules of a model, and those of them that matter for a conversion."""

    modules: dict[nn.Module, tuple[str, ...]]
    """All modules in the model's order, with their names."""
    candidates: list[Candidate]
    attention: list[Candidate]


def walk_model(model: nn.Module) -> ModelWalk:
    """Visit each module of a model once, and find out once what each class is."""
    modules: dict[nn.Module, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules[module] = (*modules.get(module, ()), name)
    linear_class = {cls: known_linear(cls) for cls in set(map(type, modules))}
    named = [Candidate(names, m, linear_class[type(m)]) for m, names in modules.items()]
    attention = [c for c in named if isinstance(c.layer, DotProductAttention)]
    return ModelWalk(modules, [*filter(None, map(_as_candidate, named))], attention)


_NO_MATRICES = nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.RMSNorm, ParametrizationList
"""Modules without GEMMs whose parameters may have the shape of a linear layer's weight."""


def _as_candidate(named: Candidate) -> Candidate | None:
    """Return a candidate of the right kind for a module whose ``linear_class`` is set, or None."""
    module = named.layer
    if named.linear_class is not None or isinstance(module, GemmModule):
        return named
    if (experts := experts_class(module)) is not None:
        return named._replace(experts_class=experts)
    if isinstance(module, _ConvNd):  # a kernel of a single position is a matrix
        is_matrix = set(module.kernel_size) == {1} and module.groups == 1
        return named._replace(matrices=("weight",)) if is_matrix else None
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
    return named._replace(matrices=matrices)


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


def recipes_of(layer: nn.Module) -> list[Recipe]:
    """Return a layer's own recipes, with which its GEMMs run in FP8."""
    return [p.recipe for _, p in precisions(layer) if p.recipe is not None]


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
