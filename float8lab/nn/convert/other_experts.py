"""Other libraries' modules of stacked experts, and the base of their FP8 classes.  E experts.

The module that knows a library registers the FP8 class of its experts. That class comes after the
library's in the order of methods; only the methods in ``replaces`` are new. The parameters stay as
they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

from torch import nn

from float8lab.nn.expert_mlp import ExpertsBase
from float8lab.nn.fused_function import Layer

__all__ = ["ExpertWeight", "OtherExperts", "experts_class", "register_experts", "routers"]


class ExpertWeight(NamedTuple):
    """A parameter with matrices of all experts, as a layer of theirs takes it."""

    layer: str
    """The layer, of ``ExpertsBase.layer_names``."""
    transposed: bool = False
    """Whether the matrices are ``[in, out]``."""


class OtherExperts(ExpertsBase):
    """Base of the FP8 class of another library's module of stacked experts.

    Attributes:
        original: the library's class, which ``to_high_precision`` gives back.
        replaces: the methods of it that are replaced.
    """

    original: ClassVar[type]
    kinds: ClassVar[list[type[OtherExperts]]] = []
    """The classes that ``register_experts`` has entered."""
    replaces: ClassVar[tuple[str, ...]] = ("forward",)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module is of this kind, converted or not."""
        raise NotImplementedError

    @staticmethod
    def layers(module: Any) -> tuple[Layer, Layer]:
        """The weights and biases of the two layers, ``[E, out, in]`` and ``[E, out]``."""
        raise NotImplementedError

    @classmethod
    def shapes(cls, module: Any) -> list[tuple[int, ...]]:
        """``[E, out, in]`` of the weights."""
        return [tuple(weight.shape) for weight, _ in cls.layers(module)]

    @staticmethod
    def weights(module: nn.Module) -> dict[str, ExpertWeight]:
        """The parameters with the experts' matrices, by their names below the module.

        Rows of several parameters of one layer are cast as those of one matrix.
        """
        raise NotImplementedError

    @staticmethod
    def obstacle(module: nn.Module) -> str | None:
        """Why a module of this kind cannot be converted, or None."""
        return None


def register_experts(*kinds: type[OtherExperts]) -> None:
    """Make ``convert_to_float8`` convert modules that fit one of these classes, asked in order."""
    OtherExperts.kinds.extend(kinds)


def experts_class(module: nn.Module) -> type[OtherExperts] | None:
    """The FP8 class of modules like this one, converted or not; None if it has no experts."""
    return next((kind for kind in OtherExperts.kinds if kind.fits(module)), None)


def _number_of_experts(module: nn.Module) -> int | None:
    """How many experts a module holds, if it does: a list of them, or stacked parameters."""
    if isinstance(module, nn.ModuleList):
        return len(module)
    told = [getattr(module, name, None) for name in ("num_experts", "num_gemms")]
    counts = [count for count in told if isinstance(count, int)]
    return next(iter(counts or (p.shape[0] for p in module.parameters() if p.ndim == 3)), None)


def routers(named_modules: Iterable[tuple[str, nn.Module]]) -> set[nn.Module]:
    """The modules of a model that choose experts, and those below them.

    They are called ``router``, or ``gate`` beside ``experts``, all of which the gate scores, and in
    some models (Zaya's) that none of them is to have the token.
    """
    modules: set[nn.Module] = set()
    for name, module in named_modules:
        if name.rpartition(".")[2] == "router":
            modules.update(module.modules())
        gate, experts = (module._modules.get(key) for key in ("gate", "experts"))
        if gate is None or experts is None:
            continue
        scores = {p.shape[0] for p in gate.parameters() if p.ndim == 2}
        count = _number_of_experts(experts)
        if count is not None and not scores.isdisjoint((count, count + 1)):
            modules.update(gate.modules())
    return modules
