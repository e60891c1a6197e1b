"""The end of a module's ``repr``: its own recipe, and weights that are stored in FP8."""

from __future__ import annotations

from torch import nn

from float8lab.nn.precision import precisions
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import local_of

__all__ = ["describe_fp8"]


def describe_fp8(module: nn.Module) -> str:
    """Return the end of a module's ``extra_repr``; empty if the module only follows autocast.

    >>> from float8lab.recipes import Float8BlockScaling
    >>> layer = float8lab.convert_to_float8(torch.nn.Linear(8, 8), Float8BlockScaling())
    >>> describe_fp8(layer)
    ', recipe=Float8BlockScaling()'
    """
    facts = []
    # All GEMMs of a module have one recipe. A pinned None, of overrides, is high precision.
    precision = next((precision for _, precision in precisions(module)), None)
    if precision is not None and (precision.recipe is not None or precision.pinned):
        facts.append(f"recipe={precision.recipe!r}")
    weights = {
        name: local_of(parameter)
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.ndim > 1
    }
    stored = {name: w.spec.storage for name, w in weights.items() if isinstance(w, Float8Tensor)}
    if len(stored) == len(weights) and len(set(stored.values())) == 1:
        stored = {"weight": next(iter(stored.values()))}
    facts += [f"{name}={storage}" for name, storage in stored.items()]
    return "".join(f", {fact}" for fact in facts)
