"""Checks of arguments, for all public functions and constructors.

Each function takes the name that the caller of the public function used, and raises
``"<argument> must <requirement>; got <value>. <what to do>."``: TypeError for a type, ValueError
for a value. Functions that return something return the argument in its plain form.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from os import PathLike
from typing import Literal, TypeVar, overload

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

__all__ = [
    "EXTRAS", "INTEGER_DTYPES", "PARAMETER_DTYPES", "check_callables", "check_choice",
    "check_device", "check_dtype", "check_flags", "check_floating", "check_group", "check_input",
    "check_instance", "check_lengths", "check_module", "check_names", "check_not_async",
    "check_number", "check_path", "check_shape", "check_size", "check_state", "check_tensor",
    "has_data", "has_values", "needs", "printable", "shown",
]  # fmt: skip

PARAMETER_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_T = TypeVar("_T")
_LONGEST = 80  # characters of a value in a message


def shown(value: object) -> str:
    """Format a value for a message: short, on one line; a tensor as its dtype and shape.

    >>> shown("x" * 200)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, torch.nn.Module):
        return f"a module of {type(value).__name__}"
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def printable(text: str) -> str:
    r"""Escape the control characters of text from outside, such as a tensor's name.

    >>> print(printable("w\x1b[31m\n"))
    w\x1b[31m\n
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


EXTRAS = {
    "plot": ("matplotlib",),
    "report": ("plotly",),
    "inspect": ("matplotlib", "plotly", "rich", "safetensors"),
    "examples": ("matplotlib", "plotly", "tqdm"),
    "completion": ("shtab",),
    "lightning": ("lightning",),
    "ray": ("ray",),
    "transformers": ("transformers", "accelerate"),
    "peft": ("transformers", "accelerate", "peft"),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "torchtitan": ("torchtitan",),
}
"""The extras of pyproject.toml, with the packages that each installs."""


@contextmanager
def needs(user: str, package: str, extra: str = "", otherwise: str = "") -> Iterator[None]:
    """Raise an error that says what needs a package, if the block fails to import the package.

    Raises:
        ModuleNotFoundError: it names the ``extra`` that installs the package, if there is one, and
            what else works ``otherwise``.

    >>> with needs("table", "rich", "inspect", "print the tensor"):
    ...     raise ModuleNotFoundError("No module named 'rich'", name="rich")
    Traceback (most recent call last):
    ModuleNotFoundError: table needs the extra "inspect": matplotlib, plotly, rich, safetensors; \
rich is not installed. pip install ".[inspect]" in a checkout of float8lab, or print the tensor.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        needed, install = f"{package}; it", package
        if extra:
            needed = f'the extra "{extra}": {", ".join(EXTRAS[extra])}; {package}'
            install = f'".[{extra}]" in a checkout of float8lab'
        instead = f", or {otherwise}" if otherwise else ""
        raise ModuleNotFoundError(
            f"{user} needs {needed} is not installed. pip install {install}{instead}.",
            name=error.name,
        ) from error


@overload
def check_size(name: str, value: object, *, minimum: int = 0) -> int: ...
@overload
def check_size(
    name: str, value: object, *, minimum: int = 0, optional: Literal[True]
) -> int | None: ...
def check_size(
    name: str, value: object, *, minimum: int = 0, optional: bool = False
) -> int | torch.SymInt | None:
    """Check for an integer of at least ``minimum``; numpy's and symbolic integers pass.

    The result is a Python int, or a symbolic integer, or None if ``optional``.

    >>> check_size("out_features", 0)
    0
    """
    if value is None and optional:
        return None
    if isinstance(value, torch.SymInt):
        return value
    required = f"{'None or ' if optional else ''}an integer of at least {minimum}"
    size: object = value  # index() would make a constant of a size in a graph
    if type(value) is not int:
        try:
            size = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            size = None
    if not isinstance(size, int):
        raise TypeError(f"{name} must be {required}; got {shown(value)}. Pass an int.")
    if size < minimum:
        raise ValueError(f"{name} must be {required}; got {size}. Pass a larger one.")
    return size


def check_number(
    name: str,
    value: _T,
    *,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
    optional: bool = False,
) -> _T:
    """Check for a finite number in a range, and return it as a Python float.

    Numbers of any type pass, such as numpy's and one-element tensors; None passes if ``optional``.

    >>> check_number("eps", 1, minimum=0)
    1.0
    """
    if value is None and optional:
        return value
    limits = {">=": minimum, "<=": maximum, ">": above, "<": below}
    bounds = [f"{sign} {limit:g}" for sign, limit in limits.items() if math.isfinite(limit)]
    required = " ".join(["None or a" if optional else "a", "finite number", " and ".join(bounds)])
    required = required.rstrip()
    single = not isinstance(value, torch.Tensor) or (value.numel() == 1 and not value.is_complex())
    if isinstance(value, bool) or not hasattr(type(value), "__float__") or not single:
        raise TypeError(f"{name} must be {required}; got {shown(value)}. Pass a float.")
    number = float(value)  # type: ignore[arg-type]  # it has __float__
    inside = minimum <= number <= maximum and above < number < below
    if not inside or not math.isfinite(number):
        raise ValueError(f"{name} must be {required}; got {number}. Pass one in that range.")
    return number  # type: ignore[return-value]


def check_flags(**flags: object) -> None:
    """Check for bools, each given under its name; 0 and 1 and numpy's bools pass.

    >>> check_flags(bias=True, return_bias=0)
    """
    for name, value in flags.items():
        is_flag = isinstance(value, int) or type(value).__name__ in ("bool", "bool_")
        if not is_flag or value not in (0, 1):
            raise TypeError(f"{name} must be True or False; got {shown(value)}. Pass a bool.")


def check_choice(name: str, value: object, choices: Iterable[str | None]) -> None:
    """Check for one of several strings; None passes if it is among ``choices``."""
    allowed = tuple(choices)
    if not (value is None or isinstance(value, str)) or value not in allowed:
        kind = ValueError if isinstance(value, str) else TypeError
        first = ", ".join(map(repr, allowed[:-1]))
        listed = f"{'one of ' if len(allowed) > 2 else ''}{first} or {allowed[-1]!r}"
        raise kind(f"{name} must be {listed}; got {shown(value)}. Choose one.")


def check_instance(
    name: str, value: object, kinds: object, noun: str, *, optional: bool = False
) -> None:
    """Check for an instance of ``kinds``, as ``isinstance`` takes them; ``noun`` names them."""
    if not (isinstance(value, kinds) or (value is None and optional)):  # type: ignore[arg-type]
        raise TypeError(
            f"{name} must be {'None or ' if optional else ''}{noun}; got {shown(value)}. Pass an "
            "object of that type."
        )


def check_tensor(name: str, value: object, *, optional: bool = False) -> None:
    """Check for a tensor."""
    check_instance(name, value, torch.Tensor, "a torch.Tensor", optional=optional)


def has_values(x: torch.Tensor) -> bool:
    """Whether the values of ``x`` can be read at no cost: on a CPU, and without tracing."""
    is_traced = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return x.device.type == "cpu" and not is_traced and has_data(x)


def has_data(x: torch.Tensor) -> bool:
    """Whether a tensor has values: it is neither fake nor on the meta device."""
    return not (x.is_meta or isinstance(x, (FakeTensor, FunctionalTensor)))


def check_floating(
    name: str, x: torch.Tensor, advice: str = "Convert it first, for example with .float()."
) -> None:
    """Check for a tensor of one of ``PARAMETER_DTYPES``."""
    check_tensor(name, x)
    if x.dtype not in PARAMETER_DTYPES:
        raise TypeError(f"{name} must be a floating-point tensor; got {shown(x)}. {advice}")


def check_input(
    name: str, x: torch.Tensor, sizes: tuple[int, ...], argument: str, *, ndim: int | None = None
) -> None:
    """Check for a floating-point tensor with the last sizes that its module was built for.

    ``argument`` is the constructor's argument that gave the sizes; ``ndim`` None allows any.
    """
    check_floating(name, x)
    if x.shape[x.ndim - len(sizes) :] != sizes or x.ndim < len(sizes):
        last = sizes[0] if len(sizes) == 1 else sizes
        raise ValueError(
            f"{name} must have {last} as its last dimension{'s' * (len(sizes) > 1)} ({argument}); "
            f"got shape {tuple(x.shape)}. Reshape it, or build the module with that {argument}."
        )
    if ndim is not None:
        check_shape(name, x, (None,) * ndim)


def check_shape(
    name: str, x: torch.Tensor, sizes: Sequence[int | None], advice: str = "Reshape it."
) -> None:
    """Check for a tensor of these sizes, one for each dimension; None allows any size."""
    check_tensor(name, x)
    pairs = zip(x.shape, sizes, strict=False)
    if x.ndim != len(sizes) or any(n is not None and n != size for size, n in pairs):
        shape = str(tuple(sizes)).replace("None", "any")
        raise ValueError(f"{name} must have shape {shape}; got {tuple(x.shape)}. {advice}")


def check_module(name: str, value: object) -> None:
    """Check for a module."""
    check_instance(name, value, torch.nn.Module, "a torch.nn.Module")


def check_callables(arguments: tuple[str, ...] | None = None, /, **functions: object) -> None:
    """Check for functions or other callables, each given under its name; None passes, too.
    They must accept ``arguments`` by position, unless ``arguments`` is None."""
    for name, value in functions.items():
        if value is None:
            continue
        if not callable(value):
            raise TypeError(
                f"{name} must be None or callable; got {shown(value)}. Pass the function itself, "
                "not its result."
            )
        if arguments is not None and not _takes(value, arguments):
            raise TypeError(
                f"{name} must be callable as {name}({', '.join(arguments)}); got {shown(value)}, "
                f"which takes {inspect.signature(value)}. Change its parameters."
            )


def _takes(function: Callable[..., object], arguments: tuple[str, ...]) -> bool:
    """Whether a function accepts these arguments by position, as far as its signature tells."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    with suppress(TypeError):
        signature.bind(*arguments)
        return True
    return False


def check_not_async(user: str, function: object) -> None:
    """Check that a function runs when it is called, as the decorator ``user`` needs."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{user} must decorate a function that runs when it is called; got the async "
            f"{shown(function)}. Write `with {user}(...):` in it, around code without await."
        )


def check_dtype(
    name: str,
    value: object,
    choices: Sequence[torch.dtype] = PARAMETER_DTYPES,
    *,
    optional: bool = True,
) -> None:
    """Check for a dtype among ``choices``, by default the dtypes that parameters may have."""
    if not (value in choices if isinstance(value, torch.dtype) else value is None and optional):
        listed = ", ".join(map(str, choices))
        raise TypeError(
            f"{name} must be {'None or ' if optional else ''}one of {listed}; got "
            f"{shown(value)}. Choose one."
        )


def check_device(name: str, value: object) -> torch.device | None:
    """Check for a device or None, and return it as a ``torch.device`` or None."""
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, (str, int)) and not isinstance(value, bool):
        with suppress(RuntimeError):
            return torch.device(value)
    kind = ValueError if isinstance(value, (str, int)) else TypeError
    raise kind(
        f"{name} must be None or a device, such as 'cuda:0'; got {shown(value)}. Pass a "
        "torch.device or its name."
    )


def check_group(name: str, value: object) -> None:
    """Check for a process group of torch.distributed, or None."""
    is_group = value is None
    if not is_group and torch.distributed.is_available():
        outside = torch.distributed.GroupMember.NON_GROUP_MEMBER  # this process is not in the group
        is_group = isinstance(value, torch.distributed.ProcessGroup) or value is outside
    if not is_group:
        raise TypeError(
            f"{name} must be None or a torch.distributed process group; got {shown(value)}. Make "
            "one by torch.distributed.new_group(ranks)."
        )


def check_path(name: str, value: object, *, optional: bool = False) -> None:
    """Check for a path: a string or a ``pathlib.Path``."""
    check_instance(name, value, (str, PathLike), "a path", optional=optional)
    if isinstance(value, (str, PathLike)) and not os.fspath(value):
        raise ValueError(f"{name} must be a path; got an empty one. Name a file or folder.")


def check_state(name: str, value: object) -> None:
    """Check for a state dict, which maps names to tensors."""
    check_instance(name, value, Mapping, "a state dict")
    for key, entry in value.items():  # type: ignore[attr-defined]
        if not isinstance(key, str) or not isinstance(entry, torch.Tensor):
            raise TypeError(
                f"{name} must be a state dict, of tensors by name; got {shown(entry)} for "
                f"{shown(key)}. Pass what state_dict() returned."
            )


def check_names(name: str, value: object) -> tuple[str, ...]:
    """Check for a string or a sequence of strings; return a tuple."""
    names: tuple[object, ...] = (value,)
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes, torch.Tensor)):
        names = tuple(value)
    if not all(isinstance(n, str) for n in names):
        raise TypeError(
            f"{name} must be a string or a sequence of strings; got {shown(value)}. Pass a list."
        )
    return names  # type: ignore[return-value]


def check_lengths(
    name: str, cu_seqlens: torch.Tensor | None, *, why: str, tokens: int | None = None
) -> torch.Tensor:
    """Check for cumulative lengths, which ``why`` needs, and return them.
    Only on a CPU the values are checked: they must be within ``tokens`` tokens."""
    if cu_seqlens is None:
        raise ValueError(
            f"{name} must be given for {why}; got None. Pass the cumulative lengths of the "
            "sequences, [B + 1]."
        )
    check_tensor(name, cu_seqlens)
    integers = cu_seqlens.dtype in (torch.int32, torch.int64)
    if cu_seqlens.ndim != 1 or not cu_seqlens.shape[0] or not integers:
        raise ValueError(
            f"{name} must be [B + 1] int32 or int64, cumulative lengths from 0 on; got "
            f"{shown(cu_seqlens)}. Begin with 0, and add up the lengths."
        )
    if has_values(cu_seqlens):
        values = cu_seqlens.tolist()
        most = values[-1] if tokens is None else tokens
        if values != sorted(values) or values[0] != 0 or values[-1] > most:
            limit = "" if tokens is None else f", {tokens} at most"
            raise ValueError(
                f"{name} must be cumulative lengths from 0 on, none less than the one before"
                f"{limit}; got {shown(values)}. Begin with 0, and add up the lengths."
            )
    return cu_seqlens
