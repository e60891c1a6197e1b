"""Pickles, never trusted with code, and the checkpoints by ``torch.save`` that are made of them."""

from __future__ import annotations

import functools
import io
import mmap
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from float8lab.checkpoints.source import (
    Box,
    CheckpointError,
    Entry,
    Source,
    check_file,
    dtype_name,
    refusing,
)
from float8lab.tensor import Float4Tensor, Float8Tensor

__all__ = [
    "Opaque",
    "entries_of",
    "leaves",
    "limited_unpickler",
    "load_limited",
    "load_opaquely",
    "load_safely",
    "open_state_dict",
    "open_torch_save",
]

_DEEPEST = 100
"""Nesting of dicts and lists that is followed."""


def limited_unpickler(
    allowed: Callable[[str, str], Any], refusal: Callable[[str], str]
) -> type[pickle.Unpickler]:
    """An unpickler of dtypes, sizes, ordered dicts, and a few other classes and functions.

    Args:
        allowed: returns what a pickle means by a module and a name, or None if it may not name it.
        refusal: returns the message about a name that it may not name.
    """

    class Limited(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            value = getattr(torch, name, None) if module == "torch" else None
            if isinstance(value, torch.dtype) or value is torch.Size:
                return value
            if (module, name) == ("collections", "OrderedDict"):
                return OrderedDict
            found = allowed(module, name)
            if found is None:
                raise CheckpointError(refusal(f"{module}.{name}"))
            return found

    return Limited


def load_limited(file: Any, limited: type[pickle.Unpickler], **options: Any) -> Any:
    """``torch.load`` by a ``limited_unpickler``."""
    # A stand-in for the pickle module, which torch.load takes.
    module: Any = SimpleNamespace(
        Unpickler=limited,
        load=lambda file, **options: limited(file, **options).load(),
        __name__="pickle",
    )
    return torch.load(file, "cpu", pickle_module=module, weights_only=False, **options)


def open_torch_save(path: Path) -> Source:
    """The tensors of a file by ``torch.save``, whatever dicts and lists they are nested in.

    Raises:
        CheckpointError: the file is damaged, or holds more than tensors and plain data.
    """
    mapped, content = _mapped(path, functools.partial(load_safely, path, str(path)))
    entries = _entries(leaves(path, content, ""), path.name)
    names = [entry.name for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"{path} must name each tensor once; {twice} comes twice.")
    if not entries:
        raise CheckpointError(
            f"{path} must hold tensors; it holds a {type(content).__name__} without any."
        )
    return Source(str(path), "torch.save" + ("" if mapped else ", old format"), entries)


def _mapped(path: Path, load: Callable[..., Any]) -> tuple[bool, Any]:
    """Whether a file by ``torch.save`` can be mapped, and what ``load(mmap=...)`` makes of it."""
    check_file(path)
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"  # as torch tells an archive from the older format
    try:
        # The format before torch 1.6 cannot be mapped: it is read whole.
        return mapped, load(mmap=mapped)
    except CheckpointError as error:
        if not mapped or "unable to mmap" not in str(error.__cause__):
            raise
        # The file is larger than the memory, which a system reserves in full for torch's private
        # mapping, since that could be written. A shared mapping needs no such reserve.
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            return mapped, load(mmap=True)


def open_state_dict(state: Mapping[str, Any]) -> Source:
    """The tensors of a state dict in memory, on any device; other values are left out."""
    entries = _entries(state.items(), "memory")
    if not entries:
        raise CheckpointError("the state dict must hold tensors; it holds none.")
    return Source("state dict", "memory", entries)


def _entries(values: Iterable[tuple[str, Any]], file: str) -> list[Entry]:
    tensors = ((name or "tensor", value) for name, value in values if isinstance(value, Tensor))
    return [entry for name, value in tensors for entry in entries_of(name, value, file)]


def load_safely(file: Any, name: str, **options: Any) -> Any:
    """``torch.load`` of tensors and plain data.

    Raises:
        CheckpointError: the file is damaged, or needs classes whose loading can run code.
    """
    try:
        # A sparse tensor with indices outside of its shape would be read outside of its memory.
        with torch.sparse.check_sparse_tensor_invariants(), warnings.catch_warnings():
            # Torch 2.15 checks by itself, and warns that it takes time.
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            return torch.load(file, map_location="cpu", weights_only=True, **options)
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        needed = _unsafe(file)
        if not needed:
            raise CheckpointError(
                f"{name} must be a file by torch.save; it is not one, or it is damaged: "
                f"{str(error).splitlines()[-1]}"
            ) from error
        raise CheckpointError(
            f"{name} must hold tensors and plain data; it also names {', '.join(needed)}, and "
            "loading those can run code. If you trust it, torch.load it with weights_only=False, "
            "and torch.save its state_dict() alone."
        ) from error
    except Exception as error:  # unpickling damaged data raises any of them, says pickle's manual
        raise CheckpointError(
            f"{name} must be a file by torch.save; it is not one, or it is damaged: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
        ) from error


class Opaque:
    """A stand-in for an object of any class: it has its values, and none of its code."""

    values: tuple[Any, ...] = ()

    def __init__(self, *values: Any, **named: Any) -> None:
        self.values = values
        self.__dict__.update(named)

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"values": (state,)})

    def _ignore(self, *values: Any) -> None:
        """Leave out what a pickle puts into its own kind of list or dict."""

    append = extend = add = __setitem__ = _ignore


def _attribute(owner: Any, name: str) -> Any:
    """A stand-in for a class's method that makes an object: the class."""
    return owner if isinstance(owner, type) and issubclass(owner, Opaque) else Opaque


def _bytes(text: str, encoding: str) -> bytes:
    """Bytes, which old pickles have as text."""
    return text.encode("latin1")


_REBUILT = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("_io", "BytesIO"): io.BytesIO,
    ("_codecs", "encode"): _bytes,
    ("builtins", "getattr"): _attribute,
    ("__builtin__", "getattr"): _attribute,  # as protocol 2 names it
}


def _opaque(module: str, name: str) -> Any:
    return _REBUILT.get((module, name)) or type(name, (Opaque,), {"__module__": module})


def load_opaquely(path: Path) -> Any:
    """``torch.load`` of tensors, plain data, and ``Opaque``s for objects of any other class.

    Tensors are mapped where the file can be. Nothing that the file names is imported or called.

    Raises:
        CheckpointError: the file is damaged.
    """
    limited = limited_unpickler(_opaque, str)

    def load(**options: Any) -> Any:
        with (
            refusing(f"{path} must be a file by torch.save; it is not one, or it is damaged"),
            torch.sparse.check_sparse_tensor_invariants(),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
            return load_limited(path, limited, **options)

    return _mapped(path, load)[1]


def _unsafe(file: Any) -> list[str]:
    """The classes and functions that weights_only does not load; empty if there are none."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
    except Exception:  # as above; or it is no archive
        return []


def leaves(path: Path, value: Any, name: str, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Everything in containers that is no container, by the names of these joined by dots."""
    if depth > _DEEPEST:
        raise CheckpointError(
            f"{path} must hold containers in containers at most {_DEEPEST} deep; {name[:40]}... is "
            "deeper, or holds itself. Save its tensors alone."
        )
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, (list, tuple)):
        parts = enumerate(value)
    else:
        yield name, value
        return
    for key, part in parts:
        yield from leaves(path, part, f"{name}.{key}" if name else str(key), depth + 1)


def entries_of(name: str, value: Any, file: str) -> list[Entry]:
    """Return the entry of a loaded or mapped tensor; for a quantized one, those of its parts."""
    if isinstance(value, (Float8Tensor, Float4Tensor)):
        names = value.__tensor_flatten__()[0]
        parts = [e for p in names for e in entries_of(f"{name}.{p}", getattr(value, p), file)]
        return [replace(parts[0], spec=value.spec), *parts[1:]]
    plain = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer)
    plain = plain and value.layout == torch.strided and not value.is_quantized
    kind = dtype_name(value.dtype) if plain else f"{type(value).__name__} of {value.dtype}"
    return [
        Entry(
            name=name,
            dtype=value.dtype if plain else None,
            dtype_name=kind,
            shape=tuple(value.shape),
            nbytes=value.numel() * value.dtype.itemsize,
            file=file,
            reader=functools.partial(_read, value.detach()),
        )
    ]


def _read(value: Tensor, box: Box) -> Tensor:
    part = value[box]
    return part.cpu() if part.is_cuda else part.clone()  # never what the file is mapped to
