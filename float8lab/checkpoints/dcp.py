"""Checkpoints by ``torch.distributed.checkpoint``, read without unpickling what can run code.

The tensors lie in ``*.distcp`` files, each shard as ``torch.save`` writes it. ``.metadata`` is a
pickle that says where; only that module's own classes, dtypes, sizes and paths are loaded from it.
"""

from __future__ import annotations

import functools
import importlib
import io
import math
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from float8lab.checkpoints.pickles import entries_of, limited_unpickler, load_safely
from float8lab.checkpoints.source import (
    Box,
    CheckpointError,
    Entry,
    Place,
    Source,
    check_file,
    dtype_name,
    refusing,
)
from float8lab.tensor import Float8Tensor

__all__ = ["open_dcp"]

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
}


class _Shard(NamedTuple):
    """A part of a tensor, and the bytes of a file that ``torch.save`` wrote it to."""

    file: Path
    offset: int
    length: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


def open_dcp(path: Path) -> Source:
    """The tensors of a directory by ``torch.distributed.checkpoint``.

    Raises:
        CheckpointError: ``.metadata`` is damaged or names other classes, or a file is missing,
            truncated or compressed.
    """
    metadata = _metadata(path / ".metadata")
    # The metadata is what was pickled, of any type.
    problem = f"{path / '.metadata'} must be by torch.distributed.checkpoint; its content is not"
    with refusing(problem, (AttributeError, KeyError, TypeError)):
        found = _entries(path, metadata)
    if not found:
        raise CheckpointError(f"{path} must hold tensors; .metadata names none.")
    files = len({info.relative_path for info in metadata.storage_data.values()})
    container = f"torch.distributed.checkpoint, {files} file{'s' if files > 1 else ''}"
    return Source(str(path), container, found)


def _allowed(module: str, name: str) -> Any:
    if module.startswith("pathlib") and name.endswith("Path"):
        return pathlib.PurePosixPath  # of another system, perhaps
    if module.startswith("megatron.core.dist_checkpointing.") and name == "MCoreMetadata":
        module, name = "torch.distributed.checkpoint.metadata", "Metadata"  # with a field more
    if name not in _ALLOWED.get(module, ()):
        return None
    return getattr(importlib.import_module(module), name)


def _metadata(path: Path) -> Any:
    check_file(path)
    content = io.BytesIO(path.read_bytes())

    def refusal(named: str) -> str:
        return (
            f"{path.parent}: .metadata must hold sizes and places of tensors; it names {named}, "
            "and loading that can run code. torch.distributed.checkpoint loads it, if you trust it."
        )

    problem = f"{path} must be by torch.distributed.checkpoint; it is not, or it is damaged"
    with refusing(problem):
        return limited_unpickler(_allowed, refusal)(content).load()


def _entries(path: Path, metadata: Any) -> list[Entry]:
    shards: dict[str, list[_Shard]] = {}
    sizes: dict[str, int] = {}
    tensors = {
        name: stored
        for name, stored in metadata.state_dict_metadata.items()
        if hasattr(stored, "chunks")
    }
    shapes = {name: _numbers(stored.size) for name, stored in tensors.items()}
    lengths = {
        (name, _numbers(chunk.offsets)): _numbers(chunk.sizes)
        for name, stored in tensors.items()
        for chunk in stored.chunks
    }
    for index, info in metadata.storage_data.items():
        if index.fqn not in tensors:
            continue
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(
                f"{path}/.metadata must name files beside it; got {info.relative_path!r}."
            )
        offset, length = _numbers((info.offset, info.length))
        file = path / info.relative_path
        if info.relative_path not in sizes:
            if not file.is_file():
                raise CheckpointError(f"{file} must exist: .metadata places {index.fqn} there.")
            sizes[info.relative_path] = file.stat().st_size
        if offset + length > sizes[info.relative_path]:
            raise CheckpointError(
                f"{file} must have at least {offset + length} bytes, as .metadata says; "
                f"it has {sizes[info.relative_path]}. It is truncated: copy it again."
            )
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(
                f"{file} must not be compressed; {index.fqn} went through "
                f"{info.transform_descriptors}. Save it without extensions."
            )
        starts = tuple(index.offset) if index.offset is not None else ()
        shard = _Shard(file, offset, length, starts, lengths[index.fqn, starts])
        shards.setdefault(index.fqn, []).append(shard)
    result = []
    for name, stored in tensors.items():
        if len(shards.get(name, ())) != len(stored.chunks):
            raise CheckpointError(
                f"{path}/.metadata must place all {len(stored.chunks)} parts of {name}; it places "
                f"{len(shards.get(name, ()))}."
            )
        _check_parts(path, name, shapes[name], shards[name])
        result += _of(name, shapes[name], stored.properties.dtype, shards[name])
    return result


def _numbers(values: Any) -> tuple[int, ...]:
    """Return sizes or places as a tuple; raise TypeError unless all are whole numbers from 0 on."""
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise TypeError(f"sizes and places must be whole numbers; they are {found}")
    return found


def _check_parts(path: Path, name: str, shape: tuple[int, ...], shards: list[_Shard]) -> None:
    """Raise unless the parts of a tensor lie in it, and are as many elements as it has."""
    inside = all(
        len(shard.starts) == len(shard.sizes) == len(shape)
        and all(a + n <= size for a, n, size in zip(shard.starts, shard.sizes, shape, strict=True))
        for shard in shards
    )
    if not inside or sum(math.prod(shard.sizes) for shard in shards) != math.prod(shape):
        raise CheckpointError(
            f"{path}/.metadata must say of which parts {name} is made; they make up no tensor "
            f"of shape {list(shape)}. It is damaged: copy it again."
        )


def _of(name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: list[_Shard]) -> list[Entry]:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype of {name} is {dtype!r}")
    nbytes = math.prod(shape) * dtype.itemsize
    if len(shards) == 1 and shards[0].length < nbytes:
        # Fewer bytes than its dtype takes: not a plain tensor.
        value = _load(shards[0])
        if isinstance(value, Float8Tensor):
            return entries_of(name, value, shards[0].file.name)
    file = shards[0].file.name
    return [
        Entry(
            name=name,
            dtype=dtype,
            dtype_name=dtype_name(dtype),
            shape=shape,
            nbytes=nbytes,
            file=file if len(shards) == 1 else f"{file} and others",
            reader=functools.partial(_read, dtype, tuple(shards), functools.cache(_place)),
        )
    ]


def _read(
    dtype: torch.dtype,
    shards: tuple[_Shard, ...],
    place_of: Callable[[_Shard], Place | None],
    box: Box,
) -> Tensor:
    result = torch.zeros([s.stop - s.start for s in box], dtype=torch.uint8).to(dtype)
    for shard in shards:
        here, there = [], []  # the common part, in the shard and in the box
        for s, start, size in zip(box, shard.starts, shard.sizes, strict=True):
            low, high = max(s.start, start), min(s.stop, start + size)
            here.append(slice(low - start, high - start))
            there.append(slice(low - s.start, high - s.start))
        if all(s.start < s.stop for s in here):
            result[tuple(there)] = _read_shard(shard, place_of(shard), dtype, tuple(here))
    return result


def _place(shard: _Shard) -> Place | None:
    """Where a shard's elements are; None if it is no plain tensor of its sizes."""
    with FakeTensorMode():  # torch.load then reads no data, and says where they lie
        fake = _load(shard)
    if type(fake).__name__ != "FakeTensor" or tuple(fake.shape) != shard.sizes:
        return None
    start = fake.untyped_storage()._checkpoint_offset
    start += shard.offset + fake.storage_offset() * fake.dtype.itemsize
    return Place(shard.file, start, fake.dtype, tuple(fake.stride()))


def _read_shard(shard: _Shard, place: Place | None, dtype: torch.dtype, box: Box) -> Tensor:
    if place is not None:
        return place.read(box).to(dtype)
    value = _load(shard)
    value = value.dequantize() if isinstance(value, Float8Tensor) else value
    if not isinstance(value, Tensor) or tuple(value.shape) != shard.sizes:
        raise CheckpointError(
            f"{shard.file} must hold a tensor of shape {shard.sizes} at byte {shard.offset}; "
            f"it holds another {type(value).__name__}. It is damaged."
        )
    return value[box].to(dtype)


def _load(shard: _Shard) -> Any:
    with shard.file.open("rb") as file:
        part: Any = io.BufferedReader(_Part(file, shard.offset, shard.length))
        return load_safely(part, f"{shard.file} at byte {shard.offset}")


class _Part(io.RawIOBase):
    """A range of a file's bytes, read as if it were a file."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._at)
        count: int = self._file.readinto(buffer[: max(0, self._length - self._at)])
        self._at += count
        return count
