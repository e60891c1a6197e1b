"""Weights of FP8 layers that are stored in FP8 and frozen: the base of adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized

from float8lab.nn.convert.other_experts import OtherExperts
from float8lab.nn.convert.other_linear import OtherLinear
from float8lab.nn.convert.plan import LayerPlan
from float8lab.nn.convert.walk import Candidate, ParameterUsers
from float8lab.nn.parameters import stored_for
from float8lab.recipes.recipe import Recipe
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import is_dtensor

__all__ = ["Freezing"]


class Freezing:
    """The weights to store in FP8 and freeze, which ``run`` does.

    Args:
        users: all modules of the model that have each parameter, including other layers.

    Attributes:
        obstacles: lines about layers whose weights stay unchanged.
    """

    def __init__(self, plans: Iterable[LayerPlan], users: ParameterUsers) -> None:
        self.obstacles: list[str] = []
        self._weights: list[tuple[list[tuple[nn.Module, str]], Recipe]] = []
        layers = [(plan.candidate, plan.recipe) for plan in plans if plan.recipe is not None]
        recipes = {id(candidate.layer): recipe for candidate, recipe in layers}
        visited: set[int] = set()
        for candidate, recipe in layers:
            layer = candidate.layer
            if is_parametrized(layer):
                self._leave(candidate, "it is parametrized")
            if candidate.experts_class is not None and not layer._parameters:
                self._leave(candidate, "it is in a module below")
            if (reason := _reason_to_leave(layer)) is not None:
                self._leave(candidate, reason)
                continue
            for name, weight in layer._parameters.items():
                if weight is None or weight.ndim < 2 or "bias" in name or id(weight) in visited:
                    continue
                visited.add(id(weight))
                places = users[id(weight)]
                if (obstacle := _obstacle(weight, places, recipe, recipes)) is None:
                    self._weights.append((places, recipe))
                else:
                    self._leave(candidate, obstacle)

    def _leave(self, candidate: Candidate, reason: str) -> None:
        self.obstacles.append(f"{candidate.name or '(model)'}: weight not stored in FP8: {reason}")

    def run(self) -> None:
        """Store the weights one by one, so that at most one weight has two copies at a time."""
        for places, recipe in self._weights:
            layer, name = places[0]
            weight = getattr(layer, name)
            if not isinstance(weight, Float8Tensor):
                weight = nn.Parameter(_stored(layer, weight, recipe))
                for place in places:
                    setattr(*place, weight)
            weight.requires_grad_(False)


def _reason_to_leave(layer: nn.Module) -> str | None:
    """Return why no weight of a layer can be stored in FP8, or None."""
    if any(isinstance(p, UninitializedParameter) for p in layer.parameters()):
        return "it is not initialised yet"
    if isinstance(layer, (nn.MultiheadAttention, NonDynamicallyQuantizableLinear)):
        return "torch.nn.MultiheadAttention reads it in high precision"
    return "it is no parameter of the layer" if "weight" in vars(layer) else None


def _obstacle(
    weight: Tensor, places: Sequence[tuple[nn.Module, str]], recipe: Recipe,
    recipes: Mapping[int, Recipe],
) -> str | None:  # fmt: skip
    """Return why a weight cannot be stored in a recipe's format, or None.

    ``recipes`` has the recipes of all layers whose weights will be stored, by the layer's id.
    """
    if any(recipes.get(id(module)) != recipe for module, _ in places):
        return "another module has it, too"
    if any(getattr(module, "tp_size", 1) > 1 for module, _ in places):
        return "tensor-parallel ranks share it; build it in fp8_model_init"
    return "it is sharded; convert before sharding" if is_dtensor(weight) else None


def _stored(layer: nn.Module, weight: Tensor, recipe: Recipe) -> Tensor:
    if isinstance(layer, OtherLinear):  # blocks are those of the matrix [out, in]
        return layer.from_matrix(stored_for(layer.matrix(layer), recipe))
    is_transposed = isinstance(layer, OtherExperts) and all(
        parameter.transposed for parameter in layer.weights(layer).values()
    )
    return stored_for(weight.mT, recipe).mT if is_transposed else stored_for(weight, recipe)
