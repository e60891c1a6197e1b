"""Make each call of a converted model a region of delayed scaling."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch
from torch import nn

from float8lab.nn.convert.first_call import CallHooks
from float8lab.nn.convert.walk import recipes_of
from float8lab.nn.precision import named_precisions
from float8lab.ops.declare import is_traced
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import STATE, Region, in_backward

__all__ = ["CallRegion", "make_region_of_calls"]


class CallRegion(CallHooks):
    """Makes each call of a model a delayed-scaling region, unless it is inside a region already.

    The hooks are traced with a traced call, but run in Python if only ``forward`` is traced.
    """

    def __init__(self, recipes: tuple[Recipe, ...]) -> None:
        self._prepared = False
        self.recipes = recipes  # the delayed recipes of the model's layers

    def _prepare(self, model: nn.Module) -> None:
        default = next((p.device for p in model.parameters()), torch.device("cpu"))
        for _, layer, precision in named_precisions(model):
            if precision.recipe in self.recipes:
                precision.prepare(next((p.device for p in layer.parameters()), default))

    def before(self, model: nn.Module, args: object) -> None:
        outer = STATE.autocast
        if not model.training or outer.enabled is False or in_backward():
            return
        opens = (region := STATE.region and STATE.enclosing_region()) is None
        if region is None:
            region = STATE.region = Region(silent=False)
            region.opener = self
            if not torch.compiler.is_compiling():
                region.frame = sys._getframe(1)
        elif region.opener is self:
            region.depth += 1
        if not ((torch.compiler.is_compiling() and is_traced()) or self._prepared):
            self._prepared = True
            self._prepare(model)
            # Inside an enclosing region, other ranks may not call this model at all.
            region.has_new_modules = opens
        for recipe in self.recipes:
            region.expect(recipe, outer.group, calibrating=outer.calibrating)

    def finished(self, model: nn.Module, args: object, output: object) -> None:
        if (region := STATE.region) is not None and region.opener is self:
            region.finished = True

    def after(self, model: nn.Module, args: object, output: object) -> None:
        if (region := STATE.region) is None or region.opener is not self:
            return
        if region.depth:
            region.depth, region.finished = region.depth - 1, False
            return
        STATE.region = region.frame = None
        (region.close if region.finished else region.discard)()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return CallRegion, (self.recipes,)


def make_region_of_calls(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Make each call of a model a region of delayed scaling, by hooks that the model keeps.

    ``modules`` are all modules of the model.
    """
    recipes = tuple(dict.fromkeys(r for m in modules for r in recipes_of(m) if r.linear.delayed))
    for hook in model._forward_pre_hooks.values():
        if isinstance(owner := getattr(hook, "__self__", None), CallRegion):
            owner.recipes, owner._prepared = recipes, False  # layers may have changed
            return
    CallRegion(recipes).register(model, prepend=True)
