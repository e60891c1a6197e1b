"""``make_graphed_callables`` and ``graphed``: forward and backward of modules as CUDA graphs.

``recorded.py`` records and replays. This file decides which calls a graph may stand for. Such a
call equals the recorded call in everything that the forward may read, and nothing observes it.
Every other call runs as if there were no graphs.
"""

from __future__ import annotations

import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules import module as torch_module
from torch.utils._device import DeviceContext
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from float8lab.arguments import check_flags, check_group, check_instance, check_module, check_size
from float8lab.nn.precision import Precision, precisions_below
from float8lab.nn.recorded import PLAIN, Recorded, Trial, Unit, record, replay
from float8lab.recipes.recipe import Recipe, check_recipe
from float8lab.recipes.recording import CHECKPOINTS
from float8lab.recipes.region import PROCESS, STATE, in_backward, inside, saved_tensors_hooks
from float8lab.recipes.state import autocast
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import is_exporting

__all__ = ["graphed", "make_graphed_callables"]

_Module = TypeVar("_Module", bound=nn.Module)
_Function = Callable[..., object]
_Enter = Callable[[], AbstractContextManager[object]]
_Key = tuple[object, ...]


class _Flat(NamedTuple):
    """How the leaves were passed, if each of them is an argument."""

    positional: int
    names: tuple[str, ...]


def make_graphed_callables(  # the signature is the interface that users' code is written for
    modules: Callable[..., object] | tuple[Callable[..., object], ...],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Mapping[str, object] | Sequence[Mapping[str, object]] | None = None,
    fp8_enabled: bool | Sequence[bool] | None = None,
    fp8_calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: ProcessGroup | None = None,
    fp8_weight_caching: bool = False,
    pool: tuple[int, int] | None = None,
    *,
    enabled: bool | Sequence[bool] | None = None,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: ProcessGroup | None = None,
    cache_quantized_params: bool = False,
) -> Any:
    """Record the forward and backward of modules as CUDA graphs; calls then replay them.

    Results are those of eager mode, bit for bit. A module replays its graph if it is called as it
    was recorded: same shapes, dtypes and ``training``, gradients enabled, the same recipes in
    force, no forward that awaits its backward. Any other call, for example in high precision, runs
    as if there were no graph. The next replay overwrites the outputs. As with
    ``torch.cuda.make_graphed_callables``, callables are recorded in the order in which they will
    run; the backward of each of several forwards must come before the next round.

    Args:
        modules: a module, whose ``forward`` is replaced, a function of tensors, or a tuple of them.
        sample_args: a tuple of tensors like the real arguments, or for a tuple of modules a tuple
            of such tuples; the values do not matter.
        num_warmup_iters: eager steps before recording, which leave FP8's state unchanged.
        allow_unused_input: some inputs or parameters get no gradient.
        sample_kwargs: a dict of tensors, or a tuple of dicts, like ``sample_args``.
        pool: the memory pool of the graphs, from ``torch.cuda.graph_pool_handle()``.
        enabled: record under ``autocast(enabled=...)``; a tuple has a value for each module. None
            records under the recipe in force, such as a converted model's own recipe.
        recipe: as in ``autocast``, and so are ``calibrating`` and ``amax_reduction_group``; implies
            ``enabled``.
        cache_quantized_params: callables accept ``is_first_microbatch``, which has no effect: a
            graph casts its weights in every replay.

    The arguments ``fp8_...`` are older names; ``fp8_group`` is ``amax_reduction_group``, and
    ``fp8_weight_caching`` is ``cache_quantized_params``.

    Returns:
        The modules, and new functions for functions, in the form of ``modules``. Each has a method
        ``reset()``, which frees its graphs; the callable then runs as if there had been none.

    Raises:
        RuntimeError: there is no CUDA GPU.
    """
    check_size("num_warmup_iters", num_warmup_iters)
    check_flags(allow_unused_input=allow_unused_input)
    check_flags(fp8_calibrating=fp8_calibrating, fp8_weight_caching=fp8_weight_caching)
    check_flags(calibrating=calibrating, cache_quantized_params=cache_quantized_params)
    _check_enabled("fp8_enabled", fp8_enabled)
    _check_enabled("enabled", enabled)
    check_recipe("fp8_recipe", fp8_recipe)
    check_recipe("recipe", recipe)
    check_group("fp8_group", fp8_group)
    check_group("amax_reduction_group", amax_reduction_group)
    single = not isinstance(modules, tuple)
    callables = modules if isinstance(modules, tuple) else (modules,)
    for function in callables:
        check_instance("modules", function, Callable, "a module, a function or a tuple of them")
    check_instance("sample_args", sample_args, (tuple, list), "a tuple")
    if not torch.cuda.is_available():
        raise RuntimeError(
            "make_graphed_callables must have a CUDA GPU; got none. Call the modules as they are."
        )
    recipe = fp8_recipe if recipe is None else recipe
    enabled = fp8_enabled if enabled is None else enabled
    if enabled is None and recipe is not None:
        enabled = True
    calibrates = bool(calibrating or fp8_calibrating)
    group = fp8_group if amax_reduction_group is None else amax_reduction_group
    ignored = ("is_first_microbatch",) if fp8_weight_caching or cache_quantized_params else ()
    described = []
    samples = _samples(callables, sample_args, sample_kwargs, enabled, single=single)
    for function, args, kwargs, flag in samples:
        enter: _Enter = nullcontext
        if flag is not None or calibrates:
            enter = partial(autocast, bool(flag), calibrates, recipe, group)
        call = _Graphed(function, 0, ignored)
        described.append((call, *call.describe_sample(tuple(args), kwargs, enter)))
    units = [unit for _, _, unit in described]
    recordings = record(units, num_warmup_iters, allow_unused=allow_unused_input, pool=pool)
    for (call, key, _), recorded in zip(described, recordings, strict=True):
        call.add(recorded, key)
        call.install("forward", "reset")
    results = [c.function if isinstance(c.function, nn.Module) else c for c, *_ in described]
    return results[0] if single else tuple(results)


def _check_enabled(name: str, enabled: object) -> None:
    for flag in enabled if isinstance(enabled, (list, tuple)) else (enabled,):
        if flag is not None:
            check_flags(**{name: flag})


def _samples(
    callables: tuple[_Function, ...], sample_args: Sequence[Any], sample_kwargs: Any,
    enabled: bool | Sequence[bool] | None, *, single: bool,
) -> Iterable[tuple[_Function, Sequence[Any], Mapping[str, object], bool | None]]:  # fmt: skip
    """Return each callable with its arguments, and whether FP8 is on for it."""
    args = (sample_args,) if single else tuple(sample_args)
    kwargs: tuple[Mapping[str, object], ...] = ({},) * len(callables)
    if sample_kwargs is not None:
        kwargs = (sample_kwargs,) if single else tuple(sample_kwargs)
    flags = enabled if isinstance(enabled, Sequence) else (enabled,) * len(callables)
    for name, values in (("sample_args", args), ("sample_kwargs", kwargs), ("enabled", flags)):
        if len(values) != len(callables):
            raise ValueError(
                f"{name} must have one entry for each of the {len(callables)} modules; got "
                f"{len(values)}. Pass a tuple of that length."
            )
    return zip(callables, args, kwargs, flags, strict=True)


def graphed(module: _Module, *, max_graphs: int = 4, enabled: bool = True) -> _Module:
    """Have a module record CUDA graphs of its calls and replay them, where the CPU is too slow.

    Call it on each layer of a model of many small layers, whose kernels take less time than their
    launches. Results are those of eager mode, bit for bit. The second of two calls that match is
    recorded, forward and backward, and replayed from then on. Calls match if their tensors have the
    same shapes, strides, dtypes, device and ``requires_grad``, if their other arguments are equal,
    and if the modes are the same: ``training``, gradients, autocasts, recipes, stream.

    Any other call runs eagerly, and so does a call that a graph cannot hold: tensors on a CPU;
    arguments other than tensors, numbers, strings and the like, alone or in tuples, lists and
    dicts; a call that would overwrite an earlier call whose backward is pending; training without
    gradients; activation checkpoints, saved-tensor hooks, ``torch.compile``, ``torch.func``, an
    outer CUDA graph, a dispatch mode, ``inspect.watch``; hooks on modules inside; several outputs
    with gradients; parameters of tensor subclasses except ``Float8Tensor``, FSDP2's parameters,
    ``fuse_wgrad_accumulation``, ``get_rng_state_tracker``, tensor-parallel ranks. A forward runs
    eagerly after a warning if it waits for the GPU, if it casts weights once for several
    microbatches, or if recording fails. Parameters, buffers and submodules may be replaced, which
    drops the graphs recorded before.

    Other things that a forward reads, such as attributes and Python's random numbers, are read when
    it is recorded. After changing such a thing, repeat ``graphed``, which drops all graphs.

    Args:
        module: only its ``forward`` is replaced; a copy of the module records its own graphs.
        max_graphs: record at most this many kinds of calls.
        enabled: False restores the forward and frees the graphs.

    It returns the same module.

    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU())
    >>> for layer in model:
    ...     layer = float8lab.graphed(layer)
    >>> model(torch.ones(2, 16)).shape  # on a CPU, eagerly
    torch.Size([2, 16])
    """
    check_module("module", module)
    check_size("max_graphs", max_graphs, minimum=1)
    check_flags(enabled=enabled)
    present = vars(module).get("forward")
    if isinstance(present, _Graphed):
        present.reset()
    if enabled:
        _Graphed(module, max_graphs).install("forward")
    return module


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Structure:
    """The facts that graphs of a module rely on: its submodules, tensors and FP8 state."""

    def __init__(self, function: _Function) -> None:
        module = _module(function)
        self.modules = list(module.modules())
        self.parameters = list(module.parameters())
        self.precisions = list(precisions_below(module))
        self.classes = [(m, m.__class__) for m in self.modules]
        names = ("_modules", "_parameters", "_buffers")
        tables = [vars(m).get(name) for m in self.modules for name in names]
        self.tables = [table for table in tables if isinstance(table, dict)]  # torch.jit has others
        self.sizes = [len(table) for table in self.tables]
        # Each entry is a table, a name in it, and the value of that name.
        self.entries = [(t, name, value) for t in self.tables for name, value in t.items()]
        self.hooks = [getattr(torch_module, f"_global{name}") for name in _HOOKS]
        for m in self.modules:
            attributes = vars(m)
            state = [v for v in attributes.items() if isinstance(v[1], (Tensor, Precision))]
            self.entries += [(attributes, name, value) for name, value in state]
            if m is not module:
                self.entries.append((attributes, "forward", attributes.get("forward")))
                self.hooks += [attributes.get(name) for name in _HOOKS]
        self.entries += [(vars(p), "slots", p.slots) for p in self.precisions]
        tensors = {id(value): value for _, _, value in self.entries if isinstance(value, Tensor)}
        for stored in [t for t in tensors.values() if isinstance(t, Float8Tensor)]:
            inner = {name: getattr(stored, name) for name in ("qdata", "scale", "amax")}
            self.entries += [(vars(stored), name, t) for name, t in inner.items()]
            del tensors[id(stored)]
            tensors.update((id(t), t) for t in inner.values())
        self.tensors = list(tensors.values())
        plain = [t for t in self.tensors if _is_plain(t)]
        self.pointers = [(t, t.data_ptr()) for t in plain]
        self.fit = len(plain) == len(self.tensors) and not any(
            vars(m).get("fuse_wgrad_accumulation")
            or vars(m).get("get_rng_state_tracker")
            or any(precision.parallel is not None for precision in self.precisions)
            or hasattr(m, "_get_fsdp_state")
            or isinstance(m, torch.jit.ScriptModule)
            for m in self.modules
        )

    def hold(self) -> bool:
        """Whether the module still consists of the same objects in the same memory."""
        for table, name, value in self.entries:
            if table.get(name) is not value:
                return False
        for module, kind in self.classes:
            if module.__class__ is not kind:
                return False
        for tensor, pointer in self.pointers:
            if tensor.data_ptr() != pointer:
                return False
        return [len(table) for table in self.tables] == self.sizes

    def modes(self) -> list[object]:
        """Return the settings that are in force for the module."""
        return [
            *[m.training for m in self.modules],
            *[p.requires_grad for p in self.parameters],
            *[p.active_recipe() for p in self.precisions],
        ]


class _Graphed:
    """A callable that replays a graph if the replay gives the same result as the call.

    Args:
        limit: record at most this many kinds of calls. With 0, ``make_graphed_callables`` records,
            and its graphs are for calls with any strides, with or without gradients, on any stream.
        ignored: keyword arguments that have no effect.
        replaced: attributes of the module that this object replaced.
    """

    def __init__(
        self, function: _Function, limit: int, ignored: Sequence[str] = (),
        replaced: Mapping[str, _Function] | None = None,
    ) -> None:  # fmt: skip
        self.function, self.limit, self.ignored = function, limit, ignored
        self.replaced = replaced or {}
        self.recorded: list[Recorded] = []
        self.refused: list[_Key] = []  # the keys of calls that cannot be recorded
        self.seen: deque[_Key] = deque(maxlen=16)  # the keys of recent calls without a recording
        self.structure: _Structure | None = None
        self.changes = 0

    def __reduce__(self) -> tuple[type[_Graphed], tuple[object, ...]]:
        """Copy the object, with a copied module, without its graphs."""
        return _Graphed, (self.function, self.limit, self.ignored, self.replaced)

    @property
    def __wrapped__(self) -> _Function:
        """The callable without graphs, which ``inspect.signature`` looks for."""
        if not isinstance(self.function, nn.Module):
            return self.function
        return self.replaced.get("forward") or partial(type(self.function).forward, self.function)

    def install(self, *names: str) -> None:
        """Replace the module's attributes ``names``, so that the module calls this object."""
        if isinstance(self.function, nn.Module):
            attributes = vars(self.function)
            self.replaced = {name: attributes[name] for name in names if name in attributes}
            for name in names:
                attributes[name] = self if name == "forward" else getattr(self, name)

    def reset(self) -> None:
        """Free the graphs. A pending backward keeps its graphs alive until it has run."""
        self.limit = 0
        self.recorded.clear()
        self.structure = None
        if isinstance(self.function, nn.Module):
            attributes = vars(self.function)
            for name in ("forward", "reset"):
                if attributes.get(name) in (self, self.reset):
                    del attributes[name]
                    attributes.update({name: self.replaced[name]} if name in self.replaced else {})
        gc.collect()

    def __call__(self, *args: object, **kwargs: object) -> object:
        replayed = None if torch.compiler.is_compiling() else self._find(args, kwargs)
        if replayed is not None:
            return replay(*replayed)
        return self.__wrapped__(*args, **kwargs)

    def _find(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> tuple[Recorded, list[Tensor]] | None:
        """Return a graph that does the same as the call, and its tensors; None without a graph."""
        if not (self.recorded or self.limit) or _is_observed():
            return None
        self._renew_structure()
        structure = self.structure
        if structure is None or not structure.fit or any(structure.hooks):
            return None
        if self.ignored:
            kwargs = {name: value for name, value in kwargs.items() if name not in self.ignored}
        leaves, spec = _leaves(args, kwargs)
        if (described := self.describe(leaves, spec, structure)) is None:
            return None
        key, tensors = described
        if (recorded := self._recorded_for(key)) is not None:
            return (recorded, tensors) if recorded.is_ready() else None
        if not self._is_due(key, tensors, structure):
            return None
        return self._record(key, leaves, spec, tensors)

    def _renew_structure(self) -> None:
        """Forget the graphs of a module that has changed, and read its structure if one is due."""
        if self.structure is not None and not self.structure.hold():
            self.structure = None
            self.recorded.clear()
            self.refused.clear()
            self.seen.clear()
            self.changes += 1
            if self.changes > 8:  # a module that changes all the time gets no more graphs
                self.limit = 0
        if self.structure is None and self.limit:
            self.structure = _Structure(self.function)

    def _recorded_for(self, key: _Key) -> Recorded | None:
        """Return the recording for calls with this key, unless its scales have moved since."""
        recorded = next((recorded for recorded in self.recorded if recorded.key == key), None)
        if recorded is None or all(slots.pack is pack for slots, pack in recorded.slots):
            return recorded
        self.recorded.remove(recorded)
        return None

    def _is_due(self, key: _Key, tensors: list[Tensor], structure: _Structure) -> bool:
        """Whether to record a call: the second call with its key, if all tensors are on one GPU."""
        if len(self.recorded) + len(self.refused) >= self.limit or key in self.refused:
            return False
        if key not in self.seen:
            self.seen.append(key)
            return False
        return len({t.device for t in (*tensors, *structure.tensors)}) == 1

    def describe(
        self, leaves: Sequence[object], spec: TreeSpec | _Flat, structure: _Structure
    ) -> tuple[_Key, list[Tensor]] | None:
        """Return a call's key and its tensors; None if a graph cannot hold such a call."""
        exact, gradients = self.limit > 0, torch.is_grad_enabled()
        if not gradients and getattr(self.function, "training", True):
            return None  # the call may come from a reentrant checkpoint
        if exact and STATE.autocast.calibrating:
            return None
        tensors: list[Tensor] = []
        key: list[object] = [
            spec, STATE.autocast.group, STATE.autocast.calibrating,
            torch.is_autocast_enabled("cuda"), structure.modes(),
        ]  # fmt: skip
        for leaf in leaves:
            kind = type(leaf)
            if kind in PLAIN:
                key += (kind, leaf)
            elif not _is_plain(leaf):
                return None
            elif (index := _index_of(leaf, tensors)) is not None:
                key.append(index)
            else:
                tensors.append(leaf)
                key += (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
                if exact:
                    key.append(leaf.stride())
        if (stream := _stream(tensors[0]) if tensors else None) is None:
            return None
        if exact:
            key += (
                gradients, torch.is_inference_mode_enabled(),
                torch.are_deterministic_algorithms_enabled(), torch.get_autocast_dtype("cuda"),
                stream,
            )  # fmt: skip
        return tuple(key), tensors

    def describe_sample(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], enter: _Enter
    ) -> tuple[_Key, Unit]:
        """Return the key of calls like the call with sample arguments, and that call's unit."""
        leaves, spec = _leaves(args, kwargs)
        with inside(Trial()), enter():
            described = self.describe(leaves, spec, _Structure(self.function))
        # Without a description, as for training without gradients, no call matches this call.
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key, tensors = described or ((object(),), tensors)
        return key, self.unit(leaves, spec, tensors, enter)

    def unit(
        self, leaves: Sequence[object], spec: TreeSpec | _Flat, tensors: Sequence[Tensor],
        enter: _Enter,
    ) -> Unit:  # fmt: skip
        """Return the call as a function of its tensors."""
        indices = [_index_of(leaf, tensors) for leaf in leaves]
        constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        forward = self.__wrapped__

        def run(inputs: Sequence[Tensor]) -> object:
            pairs = zip(indices, constants, strict=True)
            values = [value if index is None else inputs[index] for index, value in pairs]
            if isinstance(spec, _Flat):
                args, named = values[: spec.positional], values[spec.positional :]
                kwargs = dict(zip(spec.names, named, strict=True))
            else:
                args, kwargs = tree_unflatten(values, spec)
            with enter():
                return forward(*args, **kwargs)

        return Unit(_module(self.function), run, [_static(t) for t in tensors])

    def _record(
        self, key: _Key, leaves: Sequence[object], spec: TreeSpec | _Flat, tensors: list[Tensor]
    ) -> tuple[Recorded, list[Tensor]] | None:
        """Record such a call; if that fails, warn why and return None."""
        try:
            unit = self.unit(leaves, spec, tensors, nullcontext)
            (recorded,) = record([unit], 1, allow_unused=True, exact=True)
        except RuntimeError as error:
            self.refused.append(key)
            reason = str(error).partition("\n")[0]
            warnings.warn(
                f"{type(self.function).__name__} could not be recorded by float8lab.graphed, and "
                f"runs eagerly: {reason}. Leave it out, or call graphed on modules inside it.",
                stacklevel=2,
            )
            return None
        self.add(recorded, key)
        return recorded, tensors

    def add(self, recorded: Recorded, key: _Key) -> None:
        """Replay a recording from now on, for calls with this key."""
        if self.limit == 0 or (structure := self.structure) is None:
            structure = self.structure = _Structure(self.function)  # as the warm-up left it
            structure.fit, structure.hooks = True, []
        recorded.key, recorded.pointers = key, structure.pointers
        self.recorded.append(recorded)


def _is_observed() -> bool:
    """Whether something observes the Python code of a call, which a replay does not run."""
    modes = torch._C._len_torch_function_stack()
    if modes == 1 and isinstance(torch._C._get_function_stack_at(0), DeviceContext):
        modes = 0  # it is the mode of torch.set_default_device
    return (
        modes > 0
        or PROCESS.observer is not None
        or is_exporting()
        or bool(CHECKPOINTS.recordings)
        or isinstance(STATE.region, Trial)
        or in_backward()
        or saved_tensors_hooks(True) is not None
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or torch.is_anomaly_enabled()
    )


def _stream(x: Tensor) -> int | None:
    """Return the stream of a call on ``x``; None on a CPU, and while a graph is captured."""
    if not x.is_cuda or torch.cuda.is_current_stream_capturing():
        return None
    return torch._C._cuda_getCurrentRawStream(x.device.index)


def _module(function: _Function) -> nn.Module:
    return function if isinstance(function, nn.Module) else nn.Module()


def _is_plain(x: object) -> TypeGuard[Tensor]:
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided  # type: ignore[attr-defined]


def _index_of(x: object, tensors: Sequence[Tensor]) -> int | None:
    return next((index for index, tensor in enumerate(tensors) if tensor is x), None)


def _static(x: Tensor) -> Tensor:
    """Copy ``x`` to a tensor with the same layout, which graphs read."""
    static = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    static.copy_(x.detach())
    return static.requires_grad_(x.requires_grad and torch.is_grad_enabled())


def _leaves(
    args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[Sequence[object], TreeSpec | _Flat]:
    """Return the arguments without their containers, and the structure of the containers."""
    leaves = [*args, *kwargs.values()]
    for leaf in leaves:
        if isinstance(leaf, (tuple, list, dict)) and type(leaf) not in PLAIN:
            return tree_flatten((args, dict(kwargs)))
    return leaves, _Flat(len(args), tuple(kwargs))
