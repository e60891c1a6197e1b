"""``make_graphed_callables``: forward and backward of modules as CUDA graphs.

torch records and replays; this file takes care of FP8's state. A graph holds the casts with their
delayed scales, which it reads where the modules keep them, and records amaxes there. It does not
hold the end of the region: whoever calls the callables advances the scales, as in eager mode.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.arguments import check_flags, check_group, check_instance, check_size
from float8lab.nn.precision import precisions_below
from float8lab.recipes.delayed import DelayedSlots, ScalePack, merge_packs
from float8lab.recipes.recipe import Recipe, check_recipe
from float8lab.recipes.region import PROCESS, STATE, Region, inside
from float8lab.recipes.state import autocast

__all__ = ["make_graphed_callables"]


def make_graphed_callables(  # the signature is the interface that users' code is written for
    modules: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    fp8_enabled: bool | Sequence[bool] | None = None,
    fp8_calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    fp8_weight_caching: bool = False,
    pool: Any = None,
    *,
    enabled: bool | Sequence[bool] | None = None,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    cache_quantized_params: bool = False,
) -> Any:
    """Record the forward and backward of modules as CUDA graphs; calls then replay them.

    Results are those of eager mode, bit for bit. A module replays its graph if it is called as it
    was recorded: same shapes, dtypes and ``training``, gradients enabled, the same recipes in
    force. Any other call, for example in high precision, runs as if there were no graph. Outputs
    are overwritten by the next replay. As with ``torch.cuda.make_graphed_callables``, which does
    the recording, backward must follow each forward before the next one, and callables are recorded
    in the order in which they are going to run.

    Args:
        modules: a module, a function of tensors, or a tuple of such. The ``forward`` of a module is
            replaced.
        sample_args: tuple of tensors, or for a tuple of modules a tuple of these, like the real
            arguments; the values do not matter.
        num_warmup_iters: eager steps before recording, which leave no trace in FP8's state.
        allow_unused_input: some inputs or parameters get no gradient.
        sample_kwargs: dict of tensors, or a tuple of these; as ``sample_args``.
        fp8_enabled: ``enabled``.
        fp8_calibrating: ``calibrating``.
        fp8_recipe: ``recipe``.
        fp8_group: ``amax_reduction_group``.
        fp8_weight_caching: ``cache_quantized_params``.
        pool: memory pool of the graphs, from ``torch.cuda.graph_pool_handle()``.
        enabled: record under ``autocast(enabled=...)``; a tuple has one for each module. None
            records under the recipe in force, such as a converted model's own.
        calibrating: as in ``autocast``.
        recipe: as in ``autocast``; implies ``enabled``.
        amax_reduction_group: as in ``autocast``.
        cache_quantized_params: have callables accept ``is_first_microbatch``. It changes nothing: a
            graph casts its weights in every replay.

    Returns:
        The modules, or for functions new functions, as ``modules`` was given. Each has a method
        ``reset()``, which frees its graphs: it then runs as if there had been none.

    Raises:
        RuntimeError: no CUDA GPU.
    """
    check_size("num_warmup_iters", num_warmup_iters)
    check_flags(
        allow_unused_input=allow_unused_input,
        fp8_calibrating=fp8_calibrating,
        fp8_weight_caching=fp8_weight_caching,
        calibrating=calibrating,
        cache_quantized_params=cache_quantized_params,
    )
    for name, given in (("fp8_enabled", fp8_enabled), ("enabled", enabled)):
        for flag in given if isinstance(given, (list, tuple)) else (given,):
            if flag is not None:
                check_flags(**{name: flag})
    check_recipe("fp8_recipe", fp8_recipe)
    check_recipe("recipe", recipe)
    check_group("fp8_group", fp8_group)
    check_group("amax_reduction_group", amax_reduction_group)
    for function in modules if isinstance(modules, tuple) else (modules,):
        check_instance("modules", function, Callable, "a module, a function or a tuple of them")
    check_instance("sample_args", sample_args, (tuple, list), "a tuple")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "make_graphed_callables must have a CUDA GPU; got none. Call the modules as they are."
        )
    one = not isinstance(modules, tuple)
    callables: tuple[Any, ...] = (modules,) if one else modules
    args = (sample_args,) if one else tuple(sample_args)
    if sample_kwargs is None:
        kwargs: tuple[Mapping[str, Tensor], ...] = ({},) * len(callables)
    else:
        kwargs = (sample_kwargs,) if one else tuple(sample_kwargs)
    recipe = fp8_recipe if recipe is None else recipe
    enabled = fp8_enabled if enabled is None else enabled
    if enabled is None and recipe is not None:
        enabled = True
    each = enabled if isinstance(enabled, Sequence) else (enabled,) * len(callables)
    for name, values in (("sample_args", args), ("sample_kwargs", kwargs), ("enabled", each)):
        if len(values) != len(callables):
            raise ValueError(
                f"{name} must have one entry for each of the {len(callables)} modules; got "
                f"{len(values)}. Pass a tuple of that length."
            )
    group = fp8_group if amax_reduction_group is None else amax_reduction_group
    units = [
        _Unit(
            function, len(arguments), tuple(named),
            _Precision(on, calibrating or fp8_calibrating, recipe, group),
        )
        for function, arguments, named, on in zip(callables, args, kwargs, each, strict=True)
    ]  # fmt: skip
    samples = [(*arguments, *named.values()) for arguments, named in zip(args, kwargs, strict=True)]
    packs = _record(units, samples, num_warmup_iters, allow_unused_input, pool)
    caching = fp8_weight_caching or cache_quantized_params
    results = [
        _install(unit, sample, packs, caching=caching)
        for unit, sample in zip(units, samples, strict=True)
    ]
    return results[0] if one else tuple(results)


class _Precision:
    """The autocast under which a callable was recorded."""

    def __init__(
        self, enabled: bool | None, calibrating: bool, recipe: Recipe | None, group: Any
    ) -> None:
        self.enabled, self.calibrating = enabled, calibrating
        self.recipe, self.group = recipe, group

    def enter(self) -> AbstractContextManager[Any]:
        if self.enabled is None and not self.calibrating:
            return nullcontext()
        return autocast(bool(self.enabled), self.calibrating, self.recipe, self.group)


class _Unit(nn.Module):
    """A callable with positional tensors only, as torch records it."""

    def __init__(
        self, function: Any, positional: int, names: tuple[str, ...], precision: _Precision
    ) -> None:
        super().__init__()
        self.function = function  # a module becomes a submodule, with its parameters
        self.positional, self.names, self.precision = positional, names, precision
        self.training = getattr(function, "training", True)

    def forward(self, *tensors: Tensor) -> Any:
        named = dict(zip(self.names, tensors[self.positional :], strict=True))
        with self.precision.enter():
            return self.function(*tensors[: self.positional], **named)

    def recipes(self) -> tuple[Recipe | None, ...]:
        """The recipe in force at this moment, for each GEMM."""
        return tuple(precision.active_recipe() for precision in precisions_below(self))


def _record(
    units: Sequence[_Unit],
    samples: Sequence[tuple[Tensor, ...]],
    warmup: int,
    allow_unused: bool,
    pool: Any,
) -> dict[ScalePack, None]:
    """Warm up and record, so that each unit's ``forward`` replays; returns the packs in use."""
    before = _save(units)
    if warmup:
        merge_packs(_warm_up(units, samples, warmup, allow_unused))
        _restore(units, before)
        _warm_up(units, samples, 1, allow_unused)  # with the state where it will stay
        _restore(units, before)
    region = Region()
    with inside(region), _without_collection():
        torch.cuda.make_graphed_callables(
            tuple(units),
            tuple(samples),
            num_warmup_iters=0,
            allow_unused_input=allow_unused,
            pool=pool,
        )
    _restore(units, before)
    return region.packs


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python's garbage collector off, since freeing a CUDA graph spoils a recording."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _warm_up(
    units: Sequence[_Unit], samples: Sequence[tuple[Tensor, ...]], count: int, allow_unused: bool
) -> dict[ScalePack, None]:
    """Run forward and backward of all units; returns the packs in use."""
    region = Region()
    torch.cuda.synchronize()
    with inside(region), torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(count):
            for unit, sample in zip(units, samples, strict=True):
                _run_once(unit, sample, allow_unused)
    torch.cuda.synchronize()
    return region.packs


def _run_once(unit: _Unit, sample: tuple[Tensor, ...], allow_unused: bool) -> None:
    outputs = torch.utils._pytree.tree_leaves(unit(*sample))
    outputs = [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]
    inputs = [t for t in (*sample, *unit.parameters()) if t.requires_grad]
    if outputs and inputs:
        gradients = [torch.zeros_like(y) for y in outputs]
        torch.autograd.grad(outputs, inputs, gradients, allow_unused=allow_unused)


_Saved = dict[DelayedSlots, dict[str, Tensor]]


def _slots(units: Sequence[_Unit]) -> Iterator[DelayedSlots]:
    for unit in units:
        for precision in precisions_below(unit):
            yield from precision.slots.values()


def _save(units: Sequence[_Unit]) -> _Saved:
    return {
        slots: {name: tensor.clone() for name, tensor in slots.tensors().items()}
        for slots in _slots(units)
    }


def _restore(units: Sequence[_Unit], before: _Saved) -> None:
    """Put FP8's state back to what it was, in place, and clear state that is new."""
    for slots in _slots(units):
        if slots in before:
            slots.load(before[slots])
        else:
            slots.clear()
    for unit in units:
        for precision in precisions_below(unit):
            precision.weight_cast = None


def _install(
    unit: _Unit, sample: tuple[Tensor, ...], packs: dict[ScalePack, None], *, caching: bool
) -> Any:
    """Make the callable replay its graph where that gives what a call would give."""
    function = unit.function
    plain = function.forward if isinstance(function, nn.Module) else function
    expected = [(t.shape, t.dtype, t.device, t.requires_grad) for t in sample]
    mode = unit.training
    with unit.precision.enter():
        recipes = unit.recipes()
    mine = {slots.pack for slots in _slots([unit])}
    recorded = [pack for pack in packs if pack in mine]

    def fits(args: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        if "forward" not in vars(unit):  # reset
            return False
        if len(args) != unit.positional or set(named) != set(unit.names):
            return False
        if PROCESS.observer is not None:  # it sees what Python does
            return False
        if getattr(function, "training", True) != mode or (mode and not torch.is_grad_enabled()):
            return False
        tensors = (*args, *(named[name] for name in unit.names))
        if not all(isinstance(t, Tensor) for t in tensors):
            return False
        given = [(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]
        return given == expected and unit.recipes() == recipes

    def call(*args: Any, **kwargs: Any) -> Any:
        ignored = ("is_first_microbatch",) if caching else ()
        named = {name: value for name, value in kwargs.items() if name not in ignored}
        if not fits(args, named):
            return plain(*args, **kwargs)
        return _replay(unit.forward, (*args, *(named[name] for name in unit.names)), recorded)

    before = dict(vars(function)) if isinstance(function, nn.Module) else {}

    def reset() -> None:
        """Free the graphs. A backward that has yet to come keeps those of its forward till then."""
        vars(unit).pop("forward", None)
        if isinstance(function, nn.Module):
            for name in ("forward", "reset"):
                vars(function).pop(name, None)
                if name in before:
                    vars(function)[name] = before[name]
        gc.collect()  # torch's functions that replay are in cycles

    result: Any = call
    if isinstance(function, nn.Module):
        result, function.forward = function, call
    result.reset = reset
    return result


def _replay(
    graphed: Callable[..., Any], tensors: Sequence[Tensor], packs: Sequence[ScalePack]
) -> Any:
    region = STATE.autocast.region
    own = Region() if region is None and packs else None
    with inside(own) if own is not None else nullcontext():
        result = graphed(*tensors)
        region = STATE.autocast.region
        if region is not None:
            region.fp8_calls += 1
            region.packs.update(dict.fromkeys(packs))
    if own is not None:
        own.close()
    return result
