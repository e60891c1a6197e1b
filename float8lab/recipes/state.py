"""Context managers ``autocast`` and ``fp8_model_init``, each available under two names.

They set ``region.STATE``, the settings of a thread, on entry and restore it on exit.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.utils._contextlib import context_decorator

from float8lab.arguments import check_flags, check_group, check_not_async
from float8lab.ops.declare import untraced
from float8lab.recipes.recipe import Float8CurrentScaling, Recipe, check_recipe
from float8lab.recipes.region import STATE, Autocast, ModelInit, Region, current_backward

__all__ = ["autocast", "fp8_autocast", "fp8_model_init", "quantized_model_init"]

_F = TypeVar("_F", bound=Callable[..., Any])


class autocast:
    """Run float8lab modules in FP8 inside the ``with`` block; also usable as a decorator.

    Wrap the forward pass; backward then needs no wrapping. Modules of a converted model use
    ``recipe`` in place of their own, except those whose recipe was set by ``overrides``. Regions
    nest; the innermost applies. Delayed-scaling state advances when the outermost enabled region
    ends without an exception. As with ``torch.autocast``, a region is in force on the thread that
    entered it: enter one in each thread that calls the model.

    Args:
        enabled: False disables FP8 inside, for every module.
        calibrating: record amaxes without quantizing, so that scales are ready later; matters only
            when ``enabled`` is False and the recipe is a delayed one.
        recipe: with None, modules of a converted model use their own recipe and all others
            ``DelayedScaling()``.
        amax_reduction_group: process group over which delayed scaling reduces amaxes; None is the
            default group, if torch.distributed is initialised.

    Raises:
        TypeError: ``recipe`` is not a recipe, or ``amax_reduction_group`` not a process group.
        RuntimeError: an instance is entered while it is already active.

    >>> layer = float8lab.Linear(32, 32, device="cpu")
    >>> with float8lab.autocast(recipe=float8lab.recipes.Float8CurrentScaling()):
    ...     y = layer(torch.ones(4, 32))
    """

    __slots__ = ("_calibrating", "_enabled", "_group", "_outer", "_recipe", "_region")

    _names: ClassVar[tuple[str, str]] = ("recipe", "amax_reduction_group")
    """The parameter names of the recipe and the group, for error messages."""
    _warns_of_idle_regions: ClassVar[bool] = True
    """Whether to warn about a region without an FP8 module; only the first one is warned about."""

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: ProcessGroup | None = None,
    ) -> None:
        if type(enabled) is not bool or type(calibrating) is not bool:
            check_flags(enabled=enabled, calibrating=calibrating)
        if recipe is not None:
            check_recipe(self._names[0], recipe)
        if amax_reduction_group is not None:
            check_group(self._names[1], amax_reduction_group)
        self._enabled = bool(enabled)
        self._calibrating = bool(calibrating)
        self._recipe = recipe
        self._group = amax_reduction_group
        self._outer: Autocast | None = None
        self._region: Region | None = None

    def __enter__(self) -> autocast:
        if self._outer is not None:
            raise RuntimeError(
                "autocast must not be entered again while it is active; got the same instance "
                "nested in itself. Create a second autocast(...) for the inner block."
            )
        region = STATE.region and STATE.enclosing_region()
        if self._enabled or self._calibrating:
            if region is None:
                region = self._region = Region()
            region.expect(self._recipe, self._group, calibrating=self._calibrating)
        # Nothing below may raise, since only __exit__ undoes what __enter__ sets.
        self._outer, STATE.region = STATE.autocast, region
        STATE.autocast = Autocast(
            self._enabled, self._recipe, self._calibrating, self._group, current_backward()
        )
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        region, outer = self._region, self._outer
        if outer is not None:
            STATE.autocast = outer
        self._outer = self._region = None
        if region is None:
            return
        STATE.region = None
        if exc_type not in (None, StopIteration):  # the latter says that a generator is exhausted
            region.discard()
            return
        region.close()
        ran = region.fp8_calls or region.silent or torch.compiler.is_compiling()
        if self._enabled and not (ran or exc_type) and autocast._warns_of_idle_regions:
            _warn_about_idle_region(sys._getframe(1))

    def __call__(self, function: _F) -> _F:
        check_not_async(type(self).__name__, function)
        settings = self._enabled, self._calibrating, self._recipe, self._group
        return context_decorator(lambda: autocast(*settings), function)


class fp8_autocast(autocast):
    """``autocast`` under its older name and parameter names.

    Args:
        fp8_recipe: ``recipe`` of ``autocast``.
        fp8_group: ``amax_reduction_group`` of ``autocast``.
    """

    __slots__ = ()
    _names = ("fp8_recipe", "fp8_group")

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(enabled, calibrating, fp8_recipe, fp8_group)


def _warn_about_idle_region(frame: FrameType) -> None:
    """Warn that no FP8 module ran in a region, and name the modules of the calling function."""
    autocast._warns_of_idle_regions = False
    compiled = sys.modules.get("torch._dynamo.utils")
    if compiled and compiled.counters["stats"]["unique_graphs"]:
        return  # calls inside a compiled graph are not seen from here
    seen = [
        f"{name} ({type(value).__name__}, {sum(type(m) is nn.Linear for m in value.modules())} "
        "torch.nn.Linear layers not converted)"
        for name, value in frame.f_locals.items()
        if isinstance(value, nn.Module)
    ]
    warnings.warn(
        "No FP8 module ran inside autocast(enabled=True); it saw "
        f"{', '.join(seen) or 'no module in the function that entered it'}. Convert the model with "
        "float8lab.convert_to_float8(model) or build it from float8lab modules.",
        stacklevel=3,
    )


class quantized_model_init:
    """Create modules inside the block with weights in FP8 only, one byte per parameter.

    Use it for inference, for frozen base weights (LoRA), and for training with an optimizer that
    holds high-precision master weights. It is also usable as a decorator.

    Args:
        enabled: False restores ordinary weights inside an enabled block.
        recipe: gives the format and the block shape of weights; None is ``Float8CurrentScaling()``.
        preserve_high_precision_init_val: keep the initial values on the CPU for master weights;
            ``parameter.get_high_precision_init_val()`` returns them and
            ``parameter.clear_high_precision_init_val()`` frees them.
    """

    __slots__ = ("_enabled", "_outer", "_preserve", "_recipe")

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | None = None,
        preserve_high_precision_init_val: bool = False,
    ) -> None:
        check_recipe("recipe", recipe)
        check_flags(
            enabled=enabled, preserve_high_precision_init_val=preserve_high_precision_init_val
        )
        self._enabled = bool(enabled)
        self._recipe = recipe
        self._preserve = bool(preserve_high_precision_init_val)
        self._outer: list[ModelInit | None] = []

    def __enter__(self) -> quantized_model_init:
        self._outer.append(STATE.init)
        recipe = self._recipe if self._recipe is not None else Float8CurrentScaling()
        STATE.init = ModelInit(recipe, self._preserve) if self._enabled else None
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        STATE.init = self._outer.pop()

    def __call__(self, function: _F) -> _F:
        check_not_async(type(self).__name__, function)
        settings = self._enabled, self._recipe, self._preserve
        return context_decorator(lambda: quantized_model_init(*settings), function)


fp8_model_init = quantized_model_init
"""The older name of ``quantized_model_init``."""

# Torch 2.13 would compile these alone after a graph break in a region, and not leave the region.
untraced(autocast.__enter__)
untraced(autocast.__exit__)
