"""Wrong calls of public functions: one valid call of each, and one argument replaced at a time.

A value is wrong for a parameter if the parameter's annotation excludes its type, or if the table of
calls lists it. Any other value must either work, in the call and in the use of its result, or raise
an error.
"""

import collections.abc
import copy
import functools
import inspect
import os
import random
import re
import types
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from float8lab.inspect import CheckpointError
from float8lab.nn import InferenceParams, ScalingState
from float8lab.tensor import Float8Tensor
from tests.public_calls import CALLS, Call


class Opaque:
    """A value of an unknown type."""

    def __repr__(self) -> str:
        return "Opaque()"


WRONG: tuple[Any, ...] = (
    None, "x", "", b"x", -1, 0, 1, 3, 1.5, -0.5, 1e30, float("nan"), float("inf"), True, [], (), {},
    (1, 2, 3), ["x"], {"x": -1}, Opaque(), torch.int8, torch.float8_e4m3fn, torch.tensor(1.0),
    torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool), torch.tensor([7, 7]),
    torch.ones(3, 2, 32, dtype=torch.int64), torch.ones(3, 2, 32, dtype=torch.complex64),
)  # fmt: skip


def admits(kind: Any, value: Any) -> bool:
    """Whether a parameter with annotation ``kind`` may take ``value``, as far as ``kind`` tells.

    Numbers of numpy and tensors of one element count as numbers, 0 and 1 as bools, and a list as a
    tuple.

    >>> admits(int | None, 1.5), admits(float, 1), admits(tuple[int, int], [1, 2]), admits(Any, "x")
    (False, True, True, True)
    """
    if kind is Any:
        return True
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(admits(member, value) for member in arguments)
    if origin is typing.Literal:
        return value in arguments
    if kind in (None, type(None)):
        return value is None
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    base = origin or kind
    if base is collections.abc.Callable:
        return callable(value)
    if base in (tuple, list, collections.abc.Sequence, collections.abc.Iterable):
        if isinstance(value, str):
            return base is not tuple and arguments == (str,)
        if isinstance(value, bytes) or not isinstance(value, collections.abc.Iterable):
            return False
        return isinstance(value, torch.Tensor) or _admits_each(base, arguments, list(value))
    if base is os.PathLike:
        return isinstance(value, (str, os.PathLike))
    return not isinstance(base, type) or isinstance(value, base)


def _admits_each(base: Any, kinds: tuple[Any, ...], values: list[Any]) -> bool:
    if base is tuple and kinds and kinds[-1] is not Ellipsis:
        return len(kinds) == len(values) and all(map(admits, kinds, values))
    return not kinds or all(admits(kinds[0], value) for value in values)


def _is_number(value: Any) -> bool:
    single = not isinstance(value, torch.Tensor) or value.numel() == 1
    return hasattr(type(value), "__float__") and single and not isinstance(value, bool)


def _is_integer(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_floating_point() and not value.is_complex()
    return hasattr(type(value), "__index__") and not isinstance(value, bool)


_SCALARS: dict[Any, Callable[[Any], bool]] = {
    bool: lambda value: isinstance(value, (int, np.bool_)) and value in (0, 1),
    int: _is_integer,
    float: _is_number,
    torch.device: lambda value: isinstance(value, (str, torch.device)) or _is_integer(value),
}


class Case(NamedTuple):
    """A call with one argument replaced, which must raise if ``must_raise``, or else may work."""

    call: str
    argument: str
    value: Any
    must_raise: bool

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, torch.Tensor):
            value = f"<{value.dtype} {tuple(value.shape)} {value.device}>"
        return " ".join(f"{self.call}({self.argument}={value!r})".split())


def cases(count: int) -> list[Case]:
    """Return that many cases, or all that exist; the same count gives the same cases."""
    all_cases = []
    for name, call in CALLS.items():
        kinds = _annotations(call)
        for parameter in parameters(call):
            kind = kinds.get(parameter, Any)
            all_cases += [Case(name, parameter, value, not admits(kind, value)) for value in WRONG]
            all_cases += [
                Case(name, parameter, value, True) for value in call.wrong.get(parameter, ())
            ]
    return all_cases if count >= len(all_cases) else random.Random(0).sample(all_cases, count)


def parameters(call: Call) -> list[str]:
    """Return the names of the parameters that get wrong values."""
    all_parameters = list(inspect.signature(call.function).parameters.values())
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    bound = all_parameters[1:] if call.owner is not None else all_parameters
    return [p.name for p in bound if p.kind not in kinds and p.name not in call.skip]


def _annotations(call: Call) -> dict[str, Any]:
    function = inspect.unwrap(call.function)
    if isinstance(function, type):
        constructor = "__new__" if "__new__" in vars(function) else "__init__"
        function = getattr(function, constructor)
    return typing.get_type_hints(function)


def _state_of(owner: Any) -> Any:
    """The tensors and plain values of an object, which a call that raises must leave unchanged."""
    if isinstance(owner, Float8Tensor):
        return [owner.qdata.view(torch.uint8).clone(), owner.scale.clone(), owner.amax.clone()]
    if isinstance(owner, nn.Module):
        scaling = ScalingState(owner).state_dict()
        return copy.deepcopy([owner.state_dict(), scaling])
    if isinstance(owner, InferenceParams):
        stores = owner.key_value_memory_dict.values()
        data = [store.data.clone() for pair in stores for store in pair]
        return [owner.step, dict(owner._slots), owner.sequence_len_offset, data]
    for read in ("get_states", "state_dict"):
        if hasattr(owner, read):
            return copy.deepcopy(getattr(owner, read)())
    return None


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return bool(a == b)


def complaint(case: Case, folder: Path) -> str | None:
    """Return what is wrong with the outcome of a case, or None if it is right.

    It is right if the call and its use work, or if the call raises a good error. A good error is a
    TypeError, ValueError or NotImplementedError that begins with the argument's name or mentions
    it, says what it must be, and leaves the state of a method's object unchanged.
    """
    call = CALLS[case.call]
    torch.manual_seed(0)
    arguments = {**call.arguments(folder), case.argument: copy.deepcopy(case.value)}
    function = call.function
    owner = None if call.owner is None else call.owner(folder)
    if owner is not None:
        function = functools.partial(function, owner)
    before = _state_of(owner)
    has_returned = False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(**arguments)
            has_returned = True
            if case.must_raise:
                return f"{case}: accepted"
            call.use(result)
    except Exception as error:  # every error is judged here
        text = str(error)
        if call.refusal in text or isinstance(error, (OSError, CheckpointError)):
            return None  # a file that does not exist, or is of another kind
        phase = "in use: " if has_returned else ""
        names_argument = re.search(rf"\b{case.argument}\b", text) and " must " in text
        has_good_type = isinstance(error, (TypeError, ValueError, NotImplementedError))
        if not (has_good_type and names_argument and not has_returned):
            return f"{case}: {phase}{type(error).__name__}: {text.splitlines()[0] if text else ''}"
        if not _are_equal(before, _state_of(owner)):
            return f"{case}: refused after it had changed the object"
    return None
