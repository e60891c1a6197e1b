"""Parameters that are stored in FP8: how they are made, and how they follow their module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from float8lab.distributed.comm import SharedScales
from float8lab.nn.precision import place_precisions
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import STATE
from float8lab.tensor import Float8Tensor, quantize
from float8lab.tensor.blocks import quantize_blocks

__all__ = ["MovedInPlace", "keep_initial_value", "store_in_fp8", "stored_for"]


def stored_for(weight: Tensor, recipe: Recipe, sharing: SharedScales | None = None) -> Float8Tensor:
    """Quantize a weight, or each of a batch, as the forward of a recipe takes it; no gradient.

    ``sharing`` says how ranks share it, if they do.
    """
    spec, epsilon = recipe.linear.w, recipe.linear.amax_epsilon
    block = (1,) * (weight.ndim - 2) + spec.block
    if sharing is not None:
        spec = replace(spec, block=block)
        amax = sharing.amaxes(weight.detach(), spec)
        q = quantize_blocks(weight.detach(), spec, amax_epsilon=epsilon, known_amax=amax)
        return Float8Tensor._make(*q, spec, weight.dtype)
    return quantize(
        weight.detach(), spec.fp8_dtype, block=block, scale_rule=spec.scale_rule,
        amax_epsilon=epsilon,
    )  # fmt: skip


def store_in_fp8(
    module: nn.Module, names: Sequence[str], sharing: SharedScales | None = None
) -> bool:
    """Replace parameters by FP8-stored ones if a ``fp8_model_init`` block is active.

    ``sharing`` says how ranks share them, if they do. Returns whether they are to keep their
    initial values in high precision.
    """
    init = STATE.init
    if init is None:
        return False
    for name in names:
        value = getattr(module, name).detach()
        if sharing is not None:
            sharing.check(name, value.shape, init.recipe.linear.w)
        parameter = nn.Parameter(stored_for(value, init.recipe, sharing))
        parameter._shared_scales = sharing  # type: ignore[attr-defined]  # of a Float8Tensor
        if init.preserve_high_precision_init_val:
            keep_initial_value(parameter, value)
        setattr(module, name, parameter)
    return init.preserve_high_precision_init_val


def keep_initial_value(parameter: Tensor, value: Tensor) -> None:
    """Keep ``value`` for ``get_high_precision_init_val``; nothing yet on the meta device."""
    if isinstance(parameter, Float8Tensor):
        parameter._high_precision_init_val = None if value.is_meta else value.detach().cpu()


class MovedInPlace(nn.Module):
    """A module whose FP8 parameters stay the same objects when it moves.

    They keep their attributes and hooks, and references to them, as ordinary parameters do; torch
    would swap a new tensor in. Parameters that go to the meta device, or come from there, are left
    to torch.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        parameters = self._parameters
        present = [(name, p) for name, p in parameters.items() if p is not None]
        stored = [(name, p) for name, p in present if isinstance(p, Float8Tensor)]
        moved: dict[str, nn.Parameter] = {}
        try:
            with torch.no_grad():
                for name, parameter in stored:
                    value = fn(parameter)
                    if not torch._has_compatible_shallow_copy_type(parameter, value):
                        continue
                    parameters[name] = None  # torch skips it
                    moved[name] = parameter
                    if value is not parameter:
                        parameter.data = value
                    if parameter.grad is not None:
                        parameter.grad.data = fn(parameter.grad)
            module: nn.Module = super()._apply(fn, recurse)
        finally:
            parameters.update(moved)
        place_precisions(self)
        return module
