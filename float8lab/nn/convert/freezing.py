"""Weights of FP8 layers that are stored in FP8 and frozen: the base of adapters."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from float8lab.nn.convert.other_experts import OtherExperts, experts_class
from float8lab.nn.convert.other_linear import OtherLinear
from float8lab.nn.linear import stored_for
from float8lab.recipes.recipe import Recipe
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import is_dtensor

__all__ = ["Freezing", "users_of"]


def users_of(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that have a parameter, and its name in each, by the parameter's id."""
    users: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append((module, name))
    return users


class Freezing:
    """Which weights are to be stored in FP8 and frozen; ``run`` does it.

    Args:
        model: the model, in which other modules may use the weights as well.
        layers: FP8 layers, their names and their recipes.

    Attributes:
        obstacles: lines about layers whose weights stay as they are.
    """

    def __init__(
        self, model: nn.Module, layers: Iterable[tuple[str, nn.Module, Recipe]] = ()
    ) -> None:
        self.obstacles: list[str] = []
        self._weights: list[tuple[list[tuple[nn.Module, str]], Recipe]] = []
        layers = list(layers)
        users = users_of(model) if layers else {}
        recipes = {id(layer): recipe for _, layer, recipe in layers}
        done: set[int] = set()
        for name, layer, recipe in layers:
            if is_parametrized(layer):
                self._leave(name, "it is parametrized")
            if experts_class(layer) is not None and not layer._parameters:
                self._leave(name, "it is in a module below")
            for own, weight in layer._parameters.items():
                if weight is None or weight.ndim < 2 or "bias" in own or id(weight) in done:
                    continue
                done.add(id(weight))
                places = users[id(weight)]
                if any(recipes.get(id(module)) != recipe for module, _ in places):
                    self._leave(name, "another module has it, too")
                elif any(getattr(module, "tp_size", 1) > 1 for module, _ in places):
                    self._leave(name, "tensor-parallel ranks share it; build it in fp8_model_init")
                elif is_dtensor(weight):
                    self._leave(name, "it is sharded; convert before sharding")
                else:
                    self._weights.append((places, recipe))

    def _leave(self, name: str, why: str) -> None:
        self.obstacles.append(f"{name or '(model)'}: weight not stored in FP8: {why}")

    def run(self) -> None:
        """Store one weight after the other, so that only one of them is there twice."""
        for places, recipe in self._weights:
            weight = getattr(*places[0])
            if not isinstance(weight, Float8Tensor):
                weight = nn.Parameter(_stored(places[0][0], weight, recipe))
                for place in places:
                    setattr(*place, weight)
            weight.requires_grad_(False)


def _stored(layer: nn.Module, weight: Tensor, recipe: Recipe) -> Tensor:
    if isinstance(layer, OtherLinear):  # blocks are those of [out, in]
        return layer.from_matrix(stored_for(layer.matrix(layer), recipe))
    if isinstance(layer, OtherExperts) and layer.transposed():
        return stored_for(weight.mT, recipe).mT
    return stored_for(weight, recipe)
