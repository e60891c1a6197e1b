"""Record the allocations and launches of a function, and replay them without its Python code.

A launcher, or a function that calls several launchers, allocates outputs and buffers, and launches
kernels with certain sizes. All of this follows from the shapes, strides, dtypes and alignments of
its tensors and from its other arguments. The second call with an equal key of these is recorded;
later calls only replay its allocations and launches, on their own tensors. The record is a list of
steps, not a CUDA graph: every call gets fresh outputs, on the current stream, and a CUDA graph can
capture it. Memory is allocated before its first use and freed after its last use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from float8lab.ops.declare import tensors_of
from float8lab.ops.kernels import _launch
from float8lab.ops.kernels._launch import current_device, current_stream, has_hooks

_MOST_CALLS = 4096
"""The most calls that are remembered of a launcher. Shapes are part of a key, so there is no bound
on the number of keys where shapes vary."""

_SEEN_ONCE = "seen once"

_new_tensor: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_is_deterministic = torch._C._get_deterministic_algorithms  # true: torch fills new memory

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
    _aten.amax.default: torch.amax,
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
"""Kernels of torch that are replayed between ours, with the fastest function to call each."""
_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    _aten.copy_.default: Tensor.copy_,
    _aten.add_.Tensor: Tensor.add_,
}
_CONSTANTS = frozenset({bool, int, float, str, torch.dtype, type(None)})
"""Types of arguments whose values a key holds."""
_WITHOUT_TENSORS = frozenset({_aten.promote_types.default})


class _Step(NamedTuple):
    """One step of a record: a launch, or a call of a torch function."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Constants, and a ``_Number`` for each tensor, also within lists."""
    kwargs: dict[str, Any]
    number: int | None
    """The number of the tensor that this step returns, if any."""
    is_launch: bool = False
    overlaps: bool = False  # this launch may begin while the launch before it runs


class _Number(int):
    """The number of a tensor in a call; the arguments of the call come first."""


class _Call:
    """The steps of a call as generated code, which names the tensors ``t0``, ``t1`` ...

    It allocates a tensor before the first step that uses the tensor, and frees it after the last. A
    launch gets addresses, which launchers take in less time than tensors; ``p0`` is that of ``t0``.
    """

    def __init__(
        self, allocations: Sequence[tuple[tuple[int, ...], tuple[int, ...], torch.dtype] | None],
        zeros: Sequence[int], steps: Sequence[_Step], outputs: Sequence[int | None], *, given: int,
        build: Callable[[tuple[Any, ...]], object],
    ) -> None:  # fmt: skip
        """Generate the code from a recording.

        Args:
            allocations: size, strides and dtype of each tensor that is no argument of the call, but
                None for a tensor that a step returns.
            zeros: numbers of tensors that are zero at first.
            steps: the steps in their order.
            outputs: numbers of the tensors that are returned; None stands for None.
            given: how many arguments of the call are tensors.
            build: makes the result of a call from its outputs.
        """
        names: dict[str, object] = {
            "build": build, "current_stream": current_stream, "index": current_device(),
            "allocate": _new_tensor, "fills": _is_deterministic if _new_tensor else lambda: True,
            "fill": _empty_strided, "partial": functools.partial, "has_hooks": has_hooks,
            "is_autocast_enabled": torch.is_autocast_enabled,
        }  # fmt: skip
        source: list[str] = []
        exist = {*range(given)}
        described = {step.number for step in steps if type(step.function) is functools.partial}

        def named(value: object, *, launched: bool = False) -> str:
            if type(value) is _Number:
                if not launched or value in described:
                    return f"t{int(value)}"
                return f"p{int(value)}" if value < given else f"t{int(value)}.data_ptr()"
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
                memory = None if number in exist or number is None else allocations[number - given]
                if memory is not None:
                    source.append(f"t{number} = new({memory[0]}, {memory[1]}, {named(memory[2])})")
                    source.extend([f"t{number}.zero_()"] * (number in zeros))
                    exist.add(number)

        used = [dict.fromkeys(_numbers_in(step.args)) for step in steps]
        for i in (i for i, step in enumerate(steps) if step.overlaps):
            before = max(j for j in range(i) if steps[j].is_launch)
            used[i] = used[before] | used[i]  # the launch before must have freed nothing by then
        last = {int(number): i for i, numbers in enumerate(used) for number in numbers}
        lasting = {*range(given), *outputs}
        for i, step in enumerate(steps):
            allocate(used[i])
            args = [named(arg, launched=step.is_launch) for arg in step.args]
            args += [f"**{named(step.kwargs)}"] * bool(step.kwargs)
            target = "" if step.number is None else f"t{step.number} = "
            source.append(f"{target}{named(step.function)}({', '.join(args)})")
            source += [f"del t{n}" for n in used[i] if last[n] == i and n not in lasting]
        allocate(outputs)
        results = "".join(f"{named(None if n is None else _Number(n))}, " for n in outputs)
        source.append(f"return ({results})" if build is tuple else f"return build(({results}))")
        begin = ["new = partial(fill, t0.device) if fills() else allocate"] * any(allocations)
        begin += ["stream = current_stream(index)"] * any(step.is_launch for step in steps)
        self._source, self._names = [*begin, *source], names
        self.may_autocast = any(step.function in _STEPS.values() for step in steps)
        """Whether a step is a function whose dtypes ``torch.autocast`` changes."""
        self.run = self.generate(f"args[{i}]" for i in range(given))
        """Repeats the call for a list of the tensors among its arguments."""

    def generate(
        self, tensors: Iterable[str], check: str = ""
    ) -> Callable[[Sequence[object]], object]:
        """Return a function that repeats the call for tensors that are expressions of ``args``."""
        begin = [f"t{i} = {tensor}; p{i} = t{i}.data_ptr()" for i, tensor in enumerate(tensors)]
        defined: dict[str, Callable[[Sequence[object]], object]] = {}
        lines = ["def run(args):", *begin, *[check] * bool(check), *self._source]
        exec("\n    ".join(lines), self._names, defined)
        return defined["run"]


def _empty_strided(
    device: torch.device, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class _Recording(TorchDispatchMode):
    """Records a call of a launcher; a call of an op outside the tables above has no record."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        # Arguments, then allocated tensors and descriptors; all are kept alive, so ids differ.
        self.tensors: list[Any] = tensors
        self.kept: list[Any] = []
        self.views: dict[int, tuple[Any, Any, Any]] = {}  # by id, until a step needs the view
        self.given = len(tensors)
        self.number = {id(tensor): i for i, tensor in enumerate(tensors)}
        self.zeros: list[int] = []
        self.steps: list[_Step] = []
        self.fits = len(self.number) == len(tensors)  # a later call could have two tensors there

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
        elif func not in _WITHOUT_TENSORS:
            self.fits = False
        return out

    def _take(
        self, function: Any, args: Any, kwargs: dict[str, Any], out: Any, *,
        keeps_views: bool = True,
    ) -> int:  # fmt: skip
        """Add a step that returns ``out``, and return its number; None marks an in-place step."""
        self.fits &= not _has_tensor(kwargs.values())
        args = self._numbered(args, keeps_views=keeps_views)
        number = None
        if out is not None:
            number = self.number[id(out)] = len(self.tensors)
            self.tensors.append(out)
        self.steps.append(_Step(function, args, kwargs, number))
        return -1 if number is None else number

    def _number(self, tensor: Tensor, *, keeps_view: bool) -> int:
        """Return the number of a tensor; -1 if it is no argument and the call did not make it.

        A kernel sees only pointers, so the base can replace a view. Torch functions need the view.
        """
        number = self.number.get(id(tensor), -1)
        if id(tensor) not in self.views:
            return number
        if not keeps_view and tensor.data_ptr() == self.tensors[number].data_ptr():
            return number
        func, args, kwargs = self.views.pop(id(tensor))
        return self._take(_VIEWS[func], args, kwargs, tensor)

    def launch(
        self, run: Callable[..., None] | None, args: tuple[object, ...], overlaps: bool = False
    ) -> None:
        """Add a launch by ``run``; None stands for a launch that cannot be replayed."""
        if run is None:
            self.fits = False
            return
        args = self._numbered(args, keeps_views=False)
        self.steps.append(_Step(run, args, {}, None, is_launch=True, overlaps=overlaps))

    def _numbered(self, args: Sequence[Any], *, keeps_views: bool = True) -> tuple[Any, ...]:
        """Return arguments in which a number replaces each tensor."""
        numbered: list[Any] = []
        for arg in args:
            if isinstance(arg, Tensor):
                arg = _Number(self._number(arg, keeps_view=keeps_views))
                self.fits &= arg != -1  # else neither an argument nor allocated by the call
            elif hasattr(arg, "block_shape"):  # a TMA descriptor, which a step makes from its base
                make = functools.partial(_described_as, _described_as(arg, None))
                arg = _Number(self._take(make, (arg.base,), {}, arg, keeps_views=False))
            elif isinstance(arg, list) and _has_tensor(arg):
                arg = [*self._numbered(arg, keeps_views=keeps_views)]
            numbered.append(arg)
        return tuple(numbered)

    def call(self, result: Any) -> _Call | None:
        """Return the record of a call that returned ``result``; None if it cannot be replayed."""
        results, build = _leaves_of(result)
        outputs = {id(output): output for output in results if output is not None}
        seen = {n for step in self.steps if not step.is_launch for n in _numbers_in(step.args)}
        returned = {step.number for step in self.steps}
        numbers: dict[int, int] = {}  # by id of the output
        for key, output in outputs.items():
            number = self.number.get(key, -1)
            base = self.tensors[number]
            # A view of a complete allocation may be allocated with the shape of the view.
            is_whole = output.nbytes == base.nbytes and output.data_ptr() == base.data_ptr()
            keeps_view = number in seen or number in returned or not is_whole
            numbers[key] = self._number(output, keeps_view=keeps_view)
        by_number = {number: outputs[key] for key, number in numbers.items()}
        are_distinct = len(by_number) == len(outputs)
        if not self.fits or not self.steps or not are_distinct or -1 in by_number:
            return None
        tensors = [by_number.get(number, tensor) for number, tensor in enumerate(self.tensors)]
        if any(tensors[i] is not self.tensors[i] for i in range(self.given)):
            return None
        returned = {step.number for step in self.steps}
        allocations = tuple(
            None
            if i in returned
            else (tuple(tensors[i].shape), tensors[i].stride(), tensors[i].dtype)
            for i in range(self.given, len(tensors))
        )
        returns = tuple(numbers.get(id(output)) for output in results)  # None stays None
        return _Call(allocations, self.zeros, self.steps, returns, given=self.given, build=build)


def _leaves_of(result: Any) -> tuple[tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]:
    """Return the leaves of a result in order, and a function that builds such a result of leaves.

    A result is a tensor, None, or a tuple of results; a NamedTuple is rebuilt as its own type.
    """
    if type(result) is tuple and not any(isinstance(element, tuple) for element in result):
        return result, tuple
    leaves: list[object] = []
    kinds: list[type] = []
    # One expression builds nested results in a third of the time that a function for each takes.
    source = f"lambda leaves: {_expression(result, leaves, kinds)}"
    return tuple(leaves), eval(source, {"new": tuple.__new__, "kinds": kinds})


def _expression(element: object, leaves: list[object], kinds: list[type]) -> str:
    """Return the source that builds this result from ``leaves``; add its own tensors to them.

    This is no nested function: the closure of one would hold the tensors in a reference cycle.
    """
    if not isinstance(element, tuple):
        leaves.append(element)
        return f"leaves[{len(leaves) - 1}]"
    kinds.append(type(element))
    kind = len(kinds) - 1
    fields = "".join(f"{_expression(field, leaves, kinds)}, " for field in element)
    return f"new(kinds[{kind}], ({fields}))"


def _numbers_in(args: Iterable[Any]) -> Iterator[_Number]:
    """Yield the numbers of tensors among the arguments of a step, and in their lists."""
    for arg in args:
        yield from (n for n in (arg if type(arg) is list else [arg]) if type(n) is _Number)


def _described_as(descriptor: Any, base: Tensor | None) -> Any:
    """Copy a TMA descriptor for another tensor, without the checks of a new one."""
    copy = object.__new__(type(descriptor))
    copy.__dict__.update(descriptor.__dict__)
    copy.base = base
    return copy


def _has_tensor(args: Iterable[Any]) -> bool:
    return any(isinstance(arg, Tensor) for arg in args)


def replayed(launcher: Callable[..., Any]) -> Callable[..., Any]:
    """Record and replay the calls of a launcher, on the GPU of its first tensor.

    All its kernels must be ``launched`` ones, and what it does must depend on its arguments alone.
    A launcher that does more than allocate and launch runs without a replay.
    """
    calls: dict[Any, Any] = {}

    @functools.wraps(launcher)
    def call(*args: Any) -> Any:
        located = _key_of(args)
        if located is None:
            x = next(tensors_of(args))
            if _launch.is_on_current_device(x):
                return launcher(*args)
            with torch.cuda.device(x.device):  # Triton launches on the current GPU
                return call(*args)
        key, tensors = located
        memo = calls.get(key)
        if type(memo) is _Call and not has_hooks():
            return memo.run(tensors)
        if memo is not _SEEN_ONCE:
            if key not in calls:
                if len(calls) >= _MOST_CALLS:
                    calls.clear()
                calls[key] = _SEEN_ONCE
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
    """Return a function that replays a recorded call for arguments with other tensors.

    Return None if the call was not recorded. The function returns NotImplemented where it cannot
    replay: under hooks, for tensors with another alignment, and under autocast if it would matter.
    """
    located = _key_of(args)
    memo = None if located is None else getattr(launcher, "calls", {}).get(located[0])
    if located is None or type(memo) is not _Call:
        return None
    pending: list[tuple[object, str]] = [(arg, f"args[{i}]") for i, arg in enumerate(args)]
    for arg, expression in pending:  # in the order of ``_key_of``
        if isinstance(arg, (tuple, list)):
            pending += [(element, f"{expression}[{i}]") for i, element in enumerate(arg)]
    expressions = [expression for arg, expression in pending if isinstance(arg, Tensor)]
    offsets = [tensor.data_ptr() & 15 for tensor in located[1]]
    differences = " | ".join(f"p{i} ^ {offset}" for i, offset in enumerate(offsets))
    refuses = f"({differences.replace(' ^ 0', '')}) & 15 or has_hooks()"
    refuses += ' or is_autocast_enabled("cuda")' * memo.may_autocast
    return memo.generate(expressions, f"if {refuses}: return NotImplemented")


def _key_of(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Return the key of a call with these arguments on the current device, and its tensors.

    Return None if the call must not be recorded: for tensors on other devices, an empty tensor, or
    within another recording.
    """
    if not _launch.ENABLED or getattr(_launch.RECORDING, "launch", None) is not None:
        return None
    device = -1
    key: list[Any] = []
    tensors: list[Tensor] = []
    append = key.append
    pending = [*args]
    for arg in pending:  # the list grows by the elements of tuples and lists
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
            pending += arg
        elif isinstance(arg, Tensor):  # a subclass may do more than a tensor
            return None
        else:
            append(arg)
    if device < 0 or device != current_device():
        return None
    append(device)
    return tuple(key), tensors
