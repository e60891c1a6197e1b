"""Running a launcher again without its Python: its allocations and launches, as recorded.

What a launcher does follows from the shapes, strides, dtypes and alignments of its tensors and from
its other arguments: which outputs and which room to work in it allocates, and which kernels it
launches with which sizes. The second call with the same of all these is recorded; from then on only
the allocations and launches are done, on the tensors of the call. It is a list of steps, not a CUDA
graph: every call gets fresh outputs, on the current stream, and a CUDA graph can capture it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab.ops.kernels import _launch
from float8lab.ops.kernels._launch import (
    current_device,
    current_stream,
    has_hooks,
    is_on_current_device,
)

__all__ = ["replayed"]

_MOST_CALLS = 4096
"""Of one launcher. Shapes are part of a key, so there is no end of keys where they vary."""

_AGAIN = "seen once"

_new_tensor: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_is_deterministic = torch._C._get_deterministic_algorithms  # then new memory is filled

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {_aten.new_empty.default, _aten.empty.memory_format, _aten.empty_like.default,
     _aten.empty_strided.default, _aten.new_empty_strided.default}
)  # fmt: skip
_ZEROS = _aten.new_zeros.default
_VIEWS = frozenset(
    {_aten.view.default, _aten.view.dtype, _aten.t.default, _aten.alias.default,
     _aten.detach.default}
)  # fmt: skip
_STEPS = frozenset({_aten.sum.dim_IntList})
"""Torch's kernels that are repeated between our own."""
_CONSTANTS = frozenset({bool, int, float, str, tuple, torch.dtype, type(None)})
"""Types of arguments that a key holds as they are."""
_OF_NO_TENSOR = frozenset({_aten.promote_types.default})


class _Launch(NamedTuple):
    run: Callable[..., None]
    x: int
    y: int
    z: int
    handle: Any
    metadata: Any
    tensors: tuple[tuple[int, int], ...]
    """Positions of arguments, and their numbers among the tensors of the call."""
    args: list[Any]
    """All arguments, with nothing where tensors go."""


class _Step(NamedTuple):
    """A torch function."""

    function: Callable[..., Tensor]
    kwargs: dict[str, Any]
    number: int
    """Of what it returns."""
    tensors: tuple[tuple[int, int], ...]
    args: list[Any]


class _Call(NamedTuple):
    """The launches of a call; tensors are numbered: those it is given, then those it allocates."""

    allocations: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None, ...]
    """None for what a step returns."""
    zeros: tuple[int, ...]
    """Which of the tensors are zero at first."""
    steps: tuple[_Launch | _Step, ...]
    outputs: tuple[int | None, ...]
    """Numbers of tensors; None is None."""
    returns_tuple: bool

    def run(self, tensors: list[Any], device: int) -> Any:
        if _new_tensor is None or _is_deterministic():
            where = tensors[0].device
            new = functools.partial(_empty_strided, where)
        else:
            new = _new_tensor
        for allocation in self.allocations:
            tensors.append(allocation and new(*allocation))
        for number in self.zeros:
            tensors[number].zero_()
        stream = current_stream(device)
        for step in self.steps:
            args = step.args.copy()
            for position, number in step.tensors:
                args[position] = tensors[number]
            if isinstance(step, _Step):
                tensors[step.number] = step.function(*args, **step.kwargs)
            else:
                run, x, y, z, handle, metadata, _, _ = step
                run(x, y, z, stream, handle, metadata, None, None, None, *args)
        outputs = [None if i is None else tensors[i] for i in self.outputs]
        return tuple(outputs) if self.returns_tuple else outputs[0]


def _empty_strided(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class _Recording(TorchDispatchMode):
    """Follows one call of a launcher. It cannot be repeated if it does anything else."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self.tensors = tensors  # those given, then those allocated; all kept, so that ids differ
        self.kept: list[Tensor] = []
        self.given = len(tensors)
        self.number = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.zeros: list[int] = []
        self.steps: list[_Launch | _Step] = []
        self.fits = len(self.number) == len(tensors)  # one tensor as two arguments could be two

    def __enter__(self) -> Any:
        _launch.RECORDING.launch = self.launch
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _launch.RECORDING.launch = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS or func is _ZEROS:
            if func is _ZEROS:
                self.zeros.append(len(self.tensors))
            self.number[id(out)] = len(self.tensors)
            self.tensors.append(out)
        elif func in _VIEWS and id(args[0]) in self.number:
            self.number[id(out)] = self.number[id(args[0])]
            self.kept.append(out)
        elif func in _STEPS:
            number = self.number[id(out)] = len(self.tensors)
            self.tensors.append(out)
            self.steps.append(_Step(func, kwargs or {}, number, *self._separate(args)))
        elif func not in _OF_NO_TENSOR:
            self.fits = False
        return out

    def launch(self, grid: tuple[int, ...], args: tuple[Any, ...], known: Any) -> None:
        """A launch of the kernel that is ``known``, with run-time arguments ``args``."""
        if known is None:
            self.fits = False
            return
        run, handle, metadata, values, _ = known
        tensors, rest = self._separate(args)
        x, y, z = (*grid, 1, 1)[:3]
        self.steps.append(_Launch(run, x, y, z, handle, metadata, tensors, [*rest, *values]))

    def _separate(self, args: tuple[Any, ...]) -> tuple[tuple[tuple[int, int], ...], list[Any]]:
        """Positions and numbers of the tensors among arguments, and the arguments without them."""
        at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        numbers = [self.number.get(id(args[i]), -1) for i in at]
        if -1 in numbers:  # not one that it is given, nor one that it allocates
            self.fits = False
        rest = [None if isinstance(arg, Tensor) else arg for arg in args]
        return tuple(zip(at, numbers, strict=True)), rest

    def call(self, result: Any) -> _Call | None:
        """The record of a call that gave ``result``; None if it cannot be repeated."""
        results = result if isinstance(result, tuple) else (result,)
        outputs = [one for one in results if one is not None]
        numbers = [self.number.get(id(tensor), -1) for tensor in outputs]
        fresh = len(set(numbers)) == len(numbers) and all(i >= self.given for i in numbers)
        launches = [step for step in self.steps if type(step) is _Launch]
        if not self.fits or not launches or not fresh:
            return None
        # An output may be a view of what was allocated, over all of it.
        tensors = [*self.tensors]
        for number, out in zip(numbers, outputs, strict=True):
            whole = tensors[number]
            if out.nbytes != whole.nbytes or out.data_ptr() != whole.data_ptr():
                return None
            tensors[number] = out
        returned = {step.number for step in self.steps if isinstance(step, _Step)}
        if any(tensors[number] is not self.tensors[number] for number in returned):
            return None
        allocations = tuple(
            None
            if i in returned
            else (tuple(tensors[i].shape), tensors[i].stride(), tensors[i].dtype)
            for i in range(self.given, len(tensors))
        )
        left = iter(numbers)
        returns = tuple(None if one is None else next(left) for one in results)
        how = (allocations, tuple(self.zeros), tuple(self.steps), returns)
        return _Call(*how, isinstance(result, tuple))


def replayed(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Have a launcher recorded, and run on the GPU of its first tensor.

    All kernels that it launches must be ``launched`` ones, and what it does must depend on nothing
    but its arguments; where it does more than allocate and launch, it runs as it is.
    """
    calls: dict[Any, Any] = {}

    @functools.wraps(launcher)
    def call(*args: Any) -> Any:
        found = _key_of(args)
        if found is None:
            return _on_device(launcher, call, args)
        device, key, tensors = found
        known = calls.get(key)
        if type(known) is _Call and not has_hooks():
            return known.run(tensors, device)
        if known is not _AGAIN:
            if key not in calls:
                if len(calls) >= _MOST_CALLS:
                    calls.clear()
                calls[key] = _AGAIN
            return launcher(*args)
        with _Recording(tensors) as recording:
            result = launcher(*args)
        calls[key] = recording.call(result)
        return result

    return call


def _on_device(
    launcher: Callable[..., Any], again: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Launch on the GPU of the first tensor: Triton launches on the current one."""
    x = args[0]
    if type(x) is str:
        x = args[1][0]
    if is_on_current_device(x):
        return launcher(*args)
    with torch.cuda.device(x.device):
        return again(*args)


def _key_of(args: tuple[Any, ...]) -> tuple[int, tuple[Any, ...], list[Tensor]] | None:
    """The current device, what a call with these arguments depends on, and its tensors.

    None where it must not be recorded: another device, an empty tensor, within a recording.
    """
    if not _launch.ENABLED or getattr(_launch.RECORDING, "launch", None) is not None:
        return None
    if type(args[0]) is str:  # a prologue, and its inputs
        args = (args[0], *args[1], *args[2:])
    key: list[Any] = []
    tensors: list[Tensor] = []
    devices = set()
    for arg in args:
        kind = type(arg)
        if kind in _CONSTANTS:
            key.append(arg)
        elif kind is Tensor or kind is Parameter:
            address = arg.data_ptr()
            if not address:
                return None
            devices.add(arg.get_device())
            tensors.append(arg)
            key += (arg.shape, arg.stride(), arg.dtype, address & 15)
        elif isinstance(arg, Tensor):  # of a class that may do more
            return None
        else:
            key.append(tuple(arg) if kind is list else arg)
    device = devices.pop()
    if devices or device < 0 or device != current_device():
        return None
    key.append(device)
    return device, tuple(key), tensors
