"""Other libraries' modules of stacked experts, and the base of their FP8 classes.  E experts.

The module that supports a library registers the FP8 class of its experts. That class comes after
the library's class in the order of bases; it replaces only the methods in ``replaces``. The
parameters stay unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from torch import nn

from float8lab.nn.expert_mlp import ExpertsBase
from float8lab.nn.fused_function import Layer

__all__ = ["ExpertWeight", "OtherExperts", "experts_class", "register_experts", "routers"]


class ExpertWeight(NamedTuple):
    """How a layer of the experts takes a parameter that holds matrices of all experts."""

    layer: str
    """The layer's name, from ``ExpertsBase.layer_names``."""
    transposed: bool = False
    """Whether the matrices are ``[in, out]``."""


class OtherExperts(ExpertsBase):
    """Base of the FP8 class of another library's module of stacked experts.

    Attributes:
        original: the library's class, which ``to_high_precision`` restores.
        replaces: the methods of that class that are replaced.
    """

    original: ClassVar[type]
    kinds: ClassVar[list[type[OtherExperts]]] = []
    """The classes that ``register_experts`` has added."""
    replaces: ClassVar[tuple[str, ...]] = ("forward",)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is of this kind, converted or not."""
        raise NotImplementedError

    @staticmethod
    def layers(module: Any) -> tuple[Layer, Layer]:
        """Return the weights and biases of the two layers, ``[E, out, in]`` and ``[E, out]``."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, module: Any) -> list[tuple[int, ...]]:
        """Return the shapes of the weights, ``[E, out, in]``."""
        return [tuple(weight.shape) for weight, _ in cls.layers(module)]

    @staticmethod
    def weights(module: nn.Module) -> dict[str, ExpertWeight]:
        """Return the parameters that hold the experts' matrices, by their names in the module.

        The rows of several parameters of the same layer are cast as one matrix.
        """
        raise NotImplementedError

    @staticmethod
    def obstacle(module: nn.Module) -> str | None:
        """Return why a module of this kind cannot be converted, or None."""
        return None


def register_experts(*kinds: type[OtherExperts]) -> None:
    """Make ``convert_to_float8`` convert the modules that fit these classes, tried in order."""
    OtherExperts.kinds.extend(kinds)


def experts_class(module: nn.Module) -> type[OtherExperts] | None:
    """Return the FP8 class for a module, converted or not; None if it is not stacked experts."""
    return next((kind for kind in OtherExperts.kinds if kind.fits(module)), None)


def _number_of_experts(module: nn.Module) -> int | None:
    """Return the number of experts in a list or in stacked parameters; None without experts."""
    if isinstance(module, nn.ModuleList):
        return len(module)
    attributes = [getattr(module, name, None) for name in ("num_experts", "num_gemms")]
    counts = [count for count in attributes if isinstance(count, int)]
    return next(iter(counts or (p.shape[0] for p in module.parameters() if p.ndim == 3)), None)


def routers(names: Mapping[nn.Module, Iterable[str]]) -> set[nn.Module]:
    """Return the modules that choose experts and the modules below them, by a model's names.

    They are called ``router``, or ``gate`` if the parent also has ``experts``. Such a gate has a
    score for each expert, and in some models (Zaya's) also a score for "no expert".
    """
    modules: set[nn.Module] = set()
    for module in names:
        if any(name.rpartition(".")[2] == "router" for name in names[module]):
            modules.update(module.modules())
        gate, experts = (module._modules.get(key) for key in ("gate", "experts"))
        if gate is None or experts is None:
            continue
        scores = {p.shape[0] for p in gate.parameters() if p.ndim == 2}
        count = _number_of_experts(experts)
        if count is not None and not scores.isdisjoint((count, count + 1)):
            modules.update(gate.modules())
    return modules
