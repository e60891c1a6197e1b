"""Checkpoints by ``torch.distributed.checkpoint``, read without unpickling what can run code.

The tensors are in ``*.distcp`` files, each shard as ``torch.save`` writes it. ``.metadata`` is a
pickle that says where.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode

from float8lab.checkpoints import source
from float8lab.checkpoints.pickles import entries_of
from float8lab.checkpoints.unpickling import DCP_METADATA, load_restricted, load_safely
from float8lab.tensor import Float8Tensor

if TYPE_CHECKING:
    import torch.distributed.checkpoint.utils
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

__all__ = ["open_dcp"]


@dataclass(frozen=True)
class _Shard:
    """A shard of a tensor, and the bytes of a file that ``torch.save`` wrote it to."""

    file: Path
    offset: int
    length: int
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def load(self) -> object:
        # Reading ``.metadata`` has imported this module, which takes long to import.
        view = torch.distributed.checkpoint.utils._create_file_view
        with self.file.open("rb") as file:
            section = cast("IO[bytes]", view(file, self.offset, self.length))
            return load_safely(section, f"{self.file} at byte {self.offset}")

    @functools.cached_property
    def place(self) -> source.Place | None:
        """Where the elements are; None if the shard is no plain tensor of its sizes."""
        with FakeTensorMode():  # torch.load then reads no data, and says where they are
            fake = self.load()
        if not isinstance(fake, FakeTensor) or tuple(fake.shape) != self.sizes:
            return None
        if (offset := fake.untyped_storage()._checkpoint_offset) is None:
            return None
        start = self.offset + offset + int(fake.storage_offset()) * fake.dtype.itemsize
        return source.Place(self.file, start, fake.dtype, tuple(fake.stride()))

    def read(self, dtype: torch.dtype, box: source.Box) -> Tensor:
        if self.place is not None:
            return self.place.read(box).to(dtype)
        value = self.load()
        value = value.dequantize() if isinstance(value, Float8Tensor) else value
        if not isinstance(value, Tensor) or tuple(value.shape) != self.sizes:
            raise source.CheckpointError(
                f"{self.file} must hold a tensor of shape {self.sizes} at byte {self.offset}; "
                f"it holds another {type(value).__name__}. It is damaged."
            )
        return value[box].to(dtype)


def open_dcp(path: Path) -> source.CheckpointSource:
    """The tensors of a directory by ``torch.distributed.checkpoint``, whose files are whole."""
    file = path / ".metadata"
    source.check_file(file)
    problem = f"{file} must be by torch.distributed.checkpoint; it is not, or it is damaged"
    with source.refusing(problem):  # an object of any type may have been pickled
        pickled = io.BytesIO(file.read_bytes())
        metadata = cast("Metadata", load_restricted(pickled, DCP_METADATA, f"{path}: .metadata"))
        entries = _entries(path, metadata)
        files = len({info.relative_path for info in metadata.storage_data.values()})
    if not entries:
        raise source.CheckpointError(f"{path} must hold tensors; .metadata names none.")
    container = f"torch.distributed.checkpoint, {files} file{'s' if files > 1 else ''}"
    return source.CheckpointSource(str(path), container, entries)


def _entries(path: Path, metadata: Metadata) -> list[source.Entry]:
    tensors = {
        name: cast("TensorStorageMetadata", stored)
        for name, stored in metadata.state_dict_metadata.items()
        if hasattr(stored, "chunks")
    }
    shards = _shards(path, metadata, tensors)
    entries: list[source.Entry] = []
    for name, stored in tensors.items():
        if len(shards[name]) != len(stored.chunks):
            raise source.CheckpointError(
                f"{path}/.metadata must place all {len(stored.chunks)} parts of {name}; it places "
                f"{len(shards[name])}."
            )
        shape = _numbers(stored.size)
        _check_shards(path, name, shape, shards[name])
        entries += _entries_of(name, shape, stored.properties.dtype, shards[name])
    return entries


def _shards(
    path: Path, metadata: Metadata, tensors: dict[str, TensorStorageMetadata]
) -> dict[str, list[_Shard]]:
    """The shards of each tensor that ``.metadata`` places in files."""
    sizes = {
        (name, _numbers(chunk.offsets)): _numbers(chunk.sizes)
        for name, stored in tensors.items()
        for chunk in stored.chunks
    }
    shards: dict[str, list[_Shard]] = {name: [] for name in tensors}
    for index, info in metadata.storage_data.items():
        if index.fqn in tensors:
            offset, length = _numbers((info.offset, info.length))
            _check_file(path, index, info)
            starts = tuple(index.offset) if index.offset is not None else ()
            place = path / info.relative_path, offset, length
            shards[index.fqn].append(_Shard(*place, starts, sizes[index.fqn, starts]))
    return shards


def _check_file(path: Path, index: MetadataIndex, info: _StorageInfo) -> None:
    """Raise unless the file of a shard lies beside ``.metadata``, is large enough and plain."""
    if Path(info.relative_path).name != info.relative_path:
        raise source.CheckpointError(
            f"{path}/.metadata must name files beside it; got {info.relative_path!r}."
        )
    file, stop = path / info.relative_path, info.offset + info.length
    if not file.is_file():
        raise source.CheckpointError(f"{file} must exist: .metadata places {index.fqn} there.")
    if stop > (size := file.stat().st_size):
        raise source.CheckpointError(
            f"{file} must have at least {stop} bytes, as .metadata says; it has {size}. It is "
            "truncated: copy the file once more."
        )
    if getattr(info, "transform_descriptors", None):
        raise source.CheckpointError(
            f"{file} must not be compressed; {index.fqn} went through "
            f"{info.transform_descriptors}. Save it without extensions."
        )


def _numbers(values: Iterable[int]) -> tuple[int, ...]:
    """Return sizes or places as a tuple; raise TypeError unless all are whole numbers from 0 on."""
    numbers = tuple(values)
    if not all(type(value) is int and value >= 0 for value in numbers):
        raise TypeError(f"sizes and places must be whole numbers; they are {numbers}")
    return numbers


def _check_shards(path: Path, name: str, shape: tuple[int, ...], shards: list[_Shard]) -> None:
    """Raise unless the shards of a tensor lie in it, and are as many elements as it has."""
    inside = all(
        len(shard.starts) == len(shard.sizes) == len(shape)
        and all(a + n <= size for a, n, size in zip(shard.starts, shard.sizes, shape, strict=True))
        for shard in shards
    )
    if not inside or sum(math.prod(shard.sizes) for shard in shards) != math.prod(shape):
        raise source.CheckpointError(
            f"{path}/.metadata must say of which parts {name} is made; they make up no tensor "
            f"of shape {list(shape)}. It is damaged: copy the file once more."
        )


def _entries_of(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, shards: list[_Shard]
) -> list[source.Entry]:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"the dtype of {name} is {dtype!r}")
    nbytes = math.prod(shape) * dtype.itemsize
    if len(shards) == 1 and shards[0].length < nbytes:
        # Fewer bytes than its dtype takes: not a plain tensor.
        value = shards[0].load()
        if isinstance(value, Float8Tensor):
            return entries_of(name, value, shards[0].file.name)
    pieces = [source.Piece(s.starts, s.sizes, functools.partial(s.read, dtype)) for s in shards]
    file = shards[0].file.name + (" and others" if len(shards) > 1 else "")
    reader = functools.partial(source.read_pieces, pieces, dtype)
    return [source.Entry(name, dtype, source.dtype_name(dtype), shape, nbytes, file, reader)]
