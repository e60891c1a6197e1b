"""Checkpoints by ``torch.save``, and state dicts in memory: their tensors, in containers or not."""

from __future__ import annotations

import functools
import mmap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from float8lab.checkpoints import source
from float8lab.checkpoints.safetensors import DTYPES
from float8lab.checkpoints.unpickling import load_opaquely, load_safely
from float8lab.tensor import Float4Tensor, Float8Tensor

__all__ = ["entries_of", "leaves", "load_megatron_file", "open_state_dict", "open_torch_save"]

_DEEPEST = 100
"""Nesting of dicts and lists that is followed."""
_READ = {*DTYPES.values(), torch.complex32, torch.complex128}
"""Dtypes whose elements torch converts; it has others, of packed bits, which it only stores."""


def open_torch_save(path: Path) -> source.CheckpointSource:
    """The tensors of a file by ``torch.save``, whatever dicts and lists they are nested in."""
    content, mapped = _load_mapped(path, functools.partial(load_safely, path, str(path)))
    entries = _entries(leaves(path, content, ""), path.name)
    for twice, count in Counter(entry.name for entry in entries).items():
        if count > 1:
            raise source.CheckpointError(f"{path} must name each tensor once; {twice} comes twice.")
    if not entries:
        raise source.CheckpointError(
            f"{path} must hold tensors; it holds a {type(content).__name__} without any."
        )
    container = "torch.save" if mapped else "torch.save, old format"
    return source.CheckpointSource(str(path), container, entries)


def load_megatron_file(path: Path) -> object:
    """The content of a file by Megatron-LM, with an ``Opaque`` for each object of its classes."""
    return _load_mapped(path, functools.partial(load_opaquely, path))[0]


def _load_mapped(path: Path, load: Callable[..., object]) -> tuple[object, bool]:
    """Call ``load(mmap=...)`` on a file by ``torch.save``; return its result, and if it is mapped.

    The format before torch 1.6 cannot be mapped: it is read whole.
    """
    source.check_file(path)
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"  # as torch tells an archive from the older format
    try:
        return load(mmap=mapped), mapped
    except source.CheckpointError as error:
        if not mapped or "unable to mmap" not in str(error.__cause__):
            raise
        # The file is larger than the memory, which a system reserves in full for torch's private
        # mapping, since that could be written. A shared mapping needs no such reserve.
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            return load(mmap=True), mapped


def open_state_dict(state: Mapping[str, object]) -> source.CheckpointSource:
    """The tensors of a state dict in memory, on any device; other values are left out."""
    entries = _entries(state.items(), "memory")
    if not entries:
        raise source.CheckpointError("the state dict must hold tensors; it holds none.")
    return source.CheckpointSource("state dict", "memory", entries)


def _entries(values: Iterable[tuple[str, object]], file: str) -> list[source.Entry]:
    tensors = ((name or "tensor", value) for name, value in values if isinstance(value, Tensor))
    return [entry for name, value in tensors for entry in entries_of(name, value, file)]


def leaves(path: Path, value: object, name: str, depth: int = 0) -> Iterator[tuple[str, object]]:
    """Everything in containers that is no container, by the names of these joined by dots."""
    if depth > _DEEPEST:
        raise source.CheckpointError(
            f"{path} must hold containers in containers at most {_DEEPEST} deep; {name[:40]}... is "
            "deeper, or holds itself. Save its tensors alone."
        )
    if isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(path, item, f"{name}.{key}" if name else str(key), depth + 1)
    else:
        yield name, value


def entries_of(name: str, value: Tensor, file: str) -> list[source.Entry]:
    """The entry of a loaded or mapped tensor; for a quantized one, those of its inner tensors."""
    if isinstance(value, (Float8Tensor, Float4Tensor)):
        data, *scales = (
            entry
            for field in value.__tensor_flatten__()[0]
            for entry in entries_of(f"{name}.{field}", getattr(value, field), file)
        )
        return [replace(data, spec=value.spec), *scales]
    plain = type(value) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and value.dtype in _READ
    plain = plain and value.layout == torch.strided and not (value.is_nested or value.is_meta)
    shape = (value.numel(),) if value.is_nested else tuple(value.shape)
    kind = source.dtype_name(value.dtype) if plain else f"{type(value).__name__} of {value.dtype}"
    dtype, nbytes = value.dtype if plain else None, value.numel() * value.dtype.itemsize
    reader = functools.partial(_read, value.detach())
    return [source.Entry(name, dtype, kind, shape, nbytes, file, reader)]


def _read(value: Tensor, box: source.Box) -> Tensor:
    elements = value[box]
    return elements.cpu() if elements.is_cuda else elements.clone()  # never a view of the file
