"""Repeating a function without its Python: its allocations and launches, as recorded.

What a launcher does, or a function that calls several, follows from the shapes, strides, dtypes and
alignments of its tensors and from its other arguments: which outputs and which room to work in it
allocates, and which kernels it launches with which sizes. The second call with the same of all
these is recorded; from then on only the allocations and launches are done, on the tensors of the
call. It is a list of steps, not a CUDA graph: every call gets fresh outputs, on the current stream,
and a CUDA graph can capture it. Memory is allocated when it is first needed and given back when it
has served, as the function itself would have done between its GEMMs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab.ops.declare import tensors_of
from float8lab.ops.kernels import _launch
from float8lab.ops.kernels._launch import current_device, current_stream, has_hooks

_MOST_CALLS = 4096
"""The most that are remembered of a launcher. Shapes are part of a key, so there is no end of keys
where they vary."""

_AGAIN = "seen once"

_new_tensor: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_is_deterministic = torch._C._get_deterministic_algorithms  # then new memory is filled

_aten = torch.ops.aten
_ALLOCATIONS = frozenset(
    {_aten.new_empty.default, _aten.empty.memory_format, _aten.empty_like.default,
     _aten.empty_strided.default, _aten.new_empty_strided.default}
)  # fmt: skip
_ZEROS = _aten.new_zeros.default
_VIEWS: dict[Any, Callable[..., Tensor]] = {
    _aten.view.default: Tensor.view,
    _aten.view.dtype: Tensor.view,
    _aten.t.default: torch.t,
    _aten.alias.default: _aten.alias.default,
    _aten.detach.default: Tensor.detach,
    _aten.slice.Tensor: _aten.slice.Tensor,
    _aten.select.int: torch.select,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten._unsafe_view.default: _aten._unsafe_view.default,
}
_STEPS: dict[Any, Callable[..., Tensor]] = {
    _aten.sum.dim_IntList: torch.sum,
    _aten.cumsum.default: torch.cumsum,
    _aten.mm.default: torch.mm,
    _aten.addmm.default: torch.addmm,
    _aten.clone.default: torch.clone,
    _aten.constant_pad_nd.default: torch.constant_pad_nd,
    _aten._to_copy.default: _aten._to_copy.default,
    _aten._scaled_mm.default: torch._scaled_mm,
    _aten._scaled_mm_v2.default: torch._scaled_mm_v2,
    _aten._grouped_mm.default: torch._grouped_mm,
}
"""Torch's kernels that are repeated between our own, and what calls each in the least time."""
_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    _aten.copy_.default: Tensor.copy_,
    _aten.add_.Tensor: Tensor.add_,
}
_CONSTANTS = frozenset({bool, int, float, str, torch.dtype, type(None)})
"""Types of arguments that a key holds as they are."""
_OF_NO_TENSOR = frozenset({_aten.promote_types.default})


class _Step(NamedTuple):
    """A launch, or a function of torch's."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Constants, and a ``_Number`` in the place of each tensor, also in lists."""
    kwargs: dict[str, Any]
    number: int | None
    """The number of the tensor that it returns, if it makes one."""
    is_launch: bool = False


class _Number(int):
    """The number of a tensor of a call: those that it is given come first."""


class _Call:
    """The steps of a call as one function, whose source names the tensors ``t0``, ``t1`` ...

    A tensor is allocated before the first step that uses it, and given back after the last one.
    """

    def __init__(
        self, allocations: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None],
        zeros: Sequence[int], steps: Sequence[_Step], outputs: Sequence[int | None], *, given: int,
        build: Callable[[tuple[Any, ...]], object],
    ) -> None:  # fmt: skip
        """Take over what a recording has found.

        Args:
            allocations: size, strides and dtype of each tensor that is not given; None for one that
                a step returns.
            zeros: numbers of tensors that are zero at first.
            steps: in their order.
            outputs: numbers of tensors; None is None.
            given: the number of tensors that are given.
            build: makes the result of a call of its outputs.
        """
        names: dict[str, object] = {"current_stream": current_stream, "build": build}
        source: list[str] = []
        exist = {*range(given)}

        def named(value: object) -> str:
            if type(value) is _Number:
                return f"t{int(value)}"
            if type(value) is list:
                return f"[{', '.join(map(named, value))}]"
            if value is _launch.STREAM:
                return "stream"
            if value is None or type(value) in (bool, int):
                return repr(value)
            names[name := f"c{len(names)}"] = value
            return name

        def allocate(numbers: Iterable[int | None]) -> None:
            for number in numbers:
                room = None if number in exist or number is None else allocations[number - given]
                if room is not None:
                    source.append(f"t{number} = new({room[0]}, {room[1]}, {named(room[2])})")
                    source.extend([f"t{number}.zero_()"] * (number in zeros))
                    exist.add(number)

        used = [dict.fromkeys(_numbers_in(step.args)) for step in steps]
        last = {int(number): i for i, numbers in enumerate(used) for number in numbers}
        lasting = {*range(given), *outputs}
        for i, step in enumerate(steps):
            allocate(used[i])
            args = [*map(named, step.args), *[f"**{named(step.kwargs)}"] * bool(step.kwargs)]
            target = "" if step.number is None else f"t{step.number} = "
            source.append(f"{target}{named(step.function)}({', '.join(args)})")
            source += [f"del t{n}" for n in used[i] if last[n] == i and n not in lasting]
        allocate(outputs)
        results = "".join(f"{named(None if n is None else _Number(n))}, " for n in outputs)
        source.append(f"return ({results})" if build is tuple else f"return build(({results}))")
        begin = [f"[{''.join(f't{i}, ' for i in range(given))}] = tensors"]
        begin += ["stream = current_stream(device)"] * any(step.is_launch for step in steps)
        exec("\n    ".join(["def run(tensors, device, new):", *begin, *source]), names)
        self._run = cast(Callable[[list[Tensor], int, object], object], names["run"])

    def run(self, tensors: list[Tensor], device: int) -> object:
        if _new_tensor is None or _is_deterministic():
            return self._run(tensors, device, functools.partial(_empty_strided, tensors[0].device))
        return self._run(tensors, device, _new_tensor)


def _empty_strided(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class _Recording(TorchDispatchMode):
    """Follows one call of a launcher. It cannot be repeated if it does anything else."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        # Those given, then those allocated, and descriptors; all kept, so that ids differ.
        self.tensors: list[Any] = tensors
        self.kept: list[Any] = []
        self.views: dict[int, tuple[Any, Any, Any]] = {}  # by id, until a step needs them as such
        self.given = len(tensors)
        self.number = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.zeros: list[int] = []
        self.steps: list[_Step] = []
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
            self.views[id(out)] = func, args, kwargs or {}
            self.kept.append((out, args))
        elif func in _STEPS:
            self._take(_STEPS[func], args, kwargs or {}, out)
        elif func in _IN_PLACE:
            self._take(_IN_PLACE[func], args, kwargs or {}, None)
        elif func not in _OF_NO_TENSOR:
            self.fits = False
        return out

    def _take(self, function: Any, args: Any, kwargs: dict[str, Any], out: Tensor | None) -> int:
        """A step that returns ``out``, and its number; None stands for the first argument."""
        self.fits &= not _has_tensor(kwargs.values())
        args = self._numbered(args)
        number = None
        if out is not None:
            number = self.number[id(out)] = len(self.tensors)
            self.tensors.append(out)
        self.steps.append(_Step(function, args, kwargs, number))
        return -1 if number is None else number

    def _number(self, tensor: Tensor, *, as_it_is: bool) -> int:
        """The number of a tensor; -1 if it was neither given nor is made by the call.

        A kernel knows pointers alone. Torch's functions see a view ``as_it_is``.
        """
        number = self.number.get(id(tensor), -1)
        if id(tensor) not in self.views:
            return number
        if not as_it_is and tensor.data_ptr() == self.tensors[number].data_ptr():
            return number
        func, args, kwargs = self.views.pop(id(tensor))
        return self._take(_VIEWS[func], args, kwargs, tensor)

    def _describe(self, descriptor: Any) -> int:
        """A step that makes a descriptor for TMA, and its number."""
        base = _Number(self._number(descriptor.base, as_it_is=False))
        self.fits &= base != -1
        made = functools.partial(_described_as, _described_as(descriptor, None))
        self.steps.append(_Step(made, (base,), {}, len(self.tensors)))
        self.tensors.append(descriptor)
        return len(self.tensors) - 1

    def launch(self, run: Callable[..., None] | None, args: tuple[object, ...]) -> None:
        """A launch by ``run``, whose kernel reads and writes tensors; None: it is not repeated."""
        if run is None:
            self.fits = False
            return
        args = self._numbered(args, as_they_are=False)
        self.steps.append(_Step(run, args, {}, None, is_launch=True))

    def _numbered(self, args: Sequence[Any], *, as_they_are: bool = True) -> tuple[Any, ...]:
        """Arguments, with its number in the place of each tensor."""
        numbered: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                arg = _Number(self._number(arg, as_it_is=as_they_are))
                if arg == -1:  # not one that it is given, nor one that it allocates
                    self.fits = False
            elif hasattr(arg, "block_shape"):
                arg = _Number(self._describe(arg))
            elif isinstance(arg, list) and _has_tensor(arg):
                arg = [*self._numbered(arg, as_they_are=as_they_are)]
            numbered.append(arg)
        return tuple(numbered)

    def call(self, result: Any) -> _Call | None:
        """The record of a call that gave ``result``; None if it cannot be repeated."""
        results, build = _leaves_of(result)
        outputs = [output for output in results if output is not None]
        seen = {n for step in self.steps if not step.is_launch for n in _numbers_in(step.args)}
        returned = {step.number for step in self.steps if step.number is not None}
        numbers = []
        for output in outputs:
            number = self.number.get(id(output), -1)
            base = self.tensors[number]
            # A view over all of what was allocated may be allocated as it is.
            is_whole = output.nbytes == base.nbytes and output.data_ptr() == base.data_ptr()
            as_it_is = number in seen or number in returned or not is_whole
            numbers.append(self._number(output, as_it_is=as_it_is))
        are_distinct = len(set(numbers)) == len({id(output) for output in outputs})
        if not self.fits or not self.steps or not are_distinct or -1 in numbers:
            return None
        tensors = [*self.tensors]
        for number, out in zip(numbers, outputs, strict=True):
            if number < self.given and out is not tensors[number]:
                return None
            tensors[number] = out
        returned = {step.number for step in self.steps if step.number is not None}
        allocations = tuple(
            None
            if i in returned
            else (tuple(tensors[i].shape), tensors[i].stride(), tensors[i].dtype)
            for i in range(self.given, len(tensors))
        )
        left = iter(numbers)
        returns = tuple(None if output is None else next(left) for output in results)
        return _Call(allocations, self.zeros, self.steps, returns, given=self.given, build=build)


def _leaves_of(result: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """The tensors, and None, of a result in their order, and what makes such a result of others.

    A result is a tensor, None, or a tuple of results; a NamedTuple is rebuilt as its own type.
    """
    if type(result) is tuple and not any(isinstance(element, tuple) for element in result):
        return result, tuple
    leaves: list[object] = []
    kinds: list[type] = []
    # One expression: nested results take a third of the time that a function for each would.
    source = f"lambda leaves: {_expression(result, leaves, kinds)}"
    return tuple(leaves), eval(source, {"new": tuple.__new__, "kinds": kinds})


def _expression(element: object, leaves: list[object], kinds: list[type]) -> str:
    """The source that makes this result of ``leaves``, to which its own are added.

    It is no function inside of another, whose closure would hold the tensors in a reference cycle.
    """
    if not isinstance(element, tuple):
        leaves.append(element)
        return f"leaves[{len(leaves) - 1}]"
    kinds.append(type(element))
    kind = len(kinds) - 1
    fields = "".join(f"{_expression(field, leaves, kinds)}, " for field in element)
    return f"new(kinds[{kind}], ({fields}))"


def _numbers_in(args: Iterable[Any]) -> Iterator[_Number]:
    """The numbers of tensors among the arguments of a step, and in lists there."""
    for arg in args:
        yield from (n for n in (arg if type(arg) is list else [arg]) if type(n) is _Number)


def _described_as(descriptor: Any, base: Tensor | None) -> Any:
    """The same descriptor of another tensor, without another check."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__)
    copy.base = base
    return copy


def _has_tensor(args: Iterable[Any]) -> bool:
    return any(isinstance(arg, Tensor) for arg in args)


def replayed(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Have a launcher recorded, and run on the GPU of its first tensor.

    All kernels that it launches must be ``launched`` ones, and what it does must depend on nothing
    but its arguments; where it does more than allocate and launch, it runs as it is.
    """
    calls: dict[Any, Any] = {}

    @functools.wraps(launcher)
    def call(*args: Any) -> Any:
        located = _key_of(args)
        if located is None:
            return _on_device(launcher, call, args)
        device, key, tensors = located
        memo = calls.get(key)
        if type(memo) is _Call and not has_hooks():
            return memo.run(tensors, device)
        if memo is not _AGAIN:
            if key not in calls:
                if len(calls) >= _MOST_CALLS:
                    calls.clear()
                calls[key] = _AGAIN
            return launcher(*args)
        with _Recording(tensors) as recording:
            result = launcher(*args)
        calls[key] = recording.call(result)
        return result

    call.calls = calls  # type: ignore[attr-defined]
    return call


def repeated(
    launcher: Any, args: tuple[object, ...]
) -> Callable[[tuple[object, ...]], object] | None:
    """The repetition of a recorded call for arguments that differ in their tensors alone.

    None if it was not recorded. The repetition returns NotImplemented where it does not serve:
    under hooks, and for tensors that are aligned otherwise.
    """
    located = _key_of(args)
    memo = None if located is None else getattr(launcher, "calls", {}).get(located[1])
    if located is None or type(memo) is not _Call:
        return None
    device, run = located[0], memo.run
    left: list[tuple[object, str]] = [(arg, f"args[{i}]") for i, arg in enumerate(args)]
    for arg, place in left:  # in the order of ``_key_of``
        if isinstance(arg, (tuple, list)):
            left += [(element, f"{place}[{i}]") for i, element in enumerate(arg)]
    places = [place for arg, place in left if isinstance(arg, Tensor)]
    pick = eval(f"lambda args: [{', '.join(places)}]")
    offsets = [tensor.data_ptr() & 15 for tensor in located[2]]
    differences = " | ".join(
        f"{place}.data_ptr()" + f" ^ {offset}" * (offset != 0)
        for place, offset in zip(places, offsets, strict=True)
    )
    is_other = eval(f"lambda args: ({differences}) & 15")

    def repeat(args: tuple[object, ...]) -> object:
        return NotImplemented if is_other(args) or has_hooks() else run(pick(args), device)

    return repeat


def _on_device(
    launcher: Callable[..., Any], repeat: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """Launch on the GPU of the first tensor: Triton launches on the current one."""
    x = next(tensors_of(args))
    if _launch.is_on_current_device(x):
        return launcher(*args)
    with torch.cuda.device(x.device):
        return repeat(*args)


def _key_of(args: tuple[Any, ...]) -> tuple[int, tuple[Any, ...], list[Tensor]] | None:
    """The current device, what a call with these arguments depends on, and its tensors.

    None where it must not be recorded: another device, an empty tensor, within a recording.
    """
    if not _launch.ENABLED or getattr(_launch.RECORDING, "launch", None) is not None:
        return None
    device = -1
    key: list[Any] = []
    tensors: list[Tensor] = []
    append = key.append
    left = [*args]
    for arg in left:  # it grows by the elements of tuples and lists
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            address, device_index = arg.data_ptr(), arg.get_device()
            if not tensors:
                device = device_index
            if not address or device_index != device:
                return None
            tensors.append(arg)
            append((arg.shape, arg.stride(), arg.dtype, address & 15))
        elif kind in _CONSTANTS:
            append(arg)
        elif isinstance(arg, (tuple, list)):
            append(len(arg))
            left += arg
        elif isinstance(arg, Tensor):  # of a class that may do more
            return None
        else:
            append(arg)
    if device < 0 or device != current_device():
        return None
    append(device)
    return device, tuple(key), tensors
