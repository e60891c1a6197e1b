"""safetensors files in a directory that appears whole or not at all.

A file is written tensor by tensor, so memory holds one weight at a time. An index comes after the
files, ``config.json`` last; then the directory takes the target's place (``replacing``).

Source: the safetensors format, https://github.com/huggingface/safetensors (Format).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from float8lab.inspect.checkpoint.safetensors_source import DTYPES
from float8lab.inspect.replacing import replacing

__all__ = ["CONFIG", "INDEX", "Group", "Part", "check_target", "write_checkpoint"]

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Part:
    """One tensor of a file, before it is made."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it takes in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Group:
    """Tensors that are made together and lie in one file, such as a weight and its scales."""

    parts: tuple[Part, ...]
    make: Callable[[], Sequence[Tensor]]
    """The tensors of ``parts``, on any device."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Notes by name, for the metadata of the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.nbytes for part in self.parts)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise unless a checkpoint may be written to ``path``."""
    if not path.exists():
        return
    if not path.is_dir():
        raise FileExistsError(
            f"path must be a directory or free; {path} is a file. Choose another."
        )
    content = sorted(path.iterdir())
    if not content:
        return
    if not overwrite:
        raise FileExistsError(
            f"path must be free; {path} holds {content[0].name}"
            f"{f' and {len(content) - 1} more' if len(content) > 1 else ''}. Choose another, or "
            "pass overwrite=True to replace a checkpoint."
        )
    strange = [entry.name for entry in content if not entry.is_file() or entry.is_symlink()]
    if strange or not any(entry.suffix == ".safetensors" for entry in content):
        what = f"holds {strange[0]}" if strange else "holds no .safetensors file"
        raise FileExistsError(
            f"path must be a checkpoint, plain files with safetensors among them, to be "
            f"overwritten; {path} {what}. Choose another."
        )


def write_checkpoint(
    path: Path,
    groups: Sequence[Group],
    config: Mapping[str, Any],
    *,
    key: str,
    max_shard_size: int,
) -> list[str]:
    """Write a checkpoint directory and return the names of its safetensors files.

    If a checkpoint is replaced, its files that are no weights (a tokenizer, say) are kept.

    Args:
        path: checked by ``check_target``.
        groups: all tensors.
        config: becomes ``config.json``.
        key: name of the groups' notes in the metadata of a file.
        max_shard_size: most bytes of a file, unless one group is larger.
    """
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.mkdir()
        files = _write_files(partial, groups, config, key, max_shard_size)
        kept = path.iterdir() if path.is_dir() else ()
        for entry in kept:
            if entry.suffix != ".safetensors" and entry.name not in (INDEX, CONFIG):
                shutil.copy2(entry, partial / entry.name)
    return files


def _write_files(
    folder: Path,
    groups: Sequence[Group],
    config: Mapping[str, Any],
    key: str,
    max_shard_size: int,
) -> list[str]:
    shards = _shards(groups, max_shard_size)
    files = [_file_name(number, len(shards)) for number in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        with (folder / file).open("wb") as opened:
            _write_tensors(opened, shard, key)
            _sync(opened)
    if len(shards) > 1:
        where = {
            part.name: file
            for file, shard in zip(files, shards, strict=True)
            for group in shard
            for part in group.parts
        }
        size = sum(group.nbytes for group in groups)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
    _write_json(folder / CONFIG, config)
    return files


def _shards(groups: Sequence[Group], most: int) -> list[list[Group]]:
    shards: list[list[Group]] = [[]]
    filled = 0
    for group in groups:
        if shards[-1] and filled + group.nbytes > most:
            shards.append([])
            filled = 0
        shards[-1].append(group)
        filled += group.nbytes
    return shards


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_tensors(file: BinaryIO, groups: Sequence[Group], key: str) -> None:
    parts = [part for group in groups for part in group.parts]
    # Wide elements first: then all are aligned, which readers that map the file want.
    header: dict[str, Any] = {}
    end = 0
    for part in sorted(parts, key=lambda part: -part.dtype.itemsize):
        header[part.name] = {
            "dtype": _NAMES[part.dtype],
            "shape": list(part.shape),
            "data_offsets": [end, end + part.nbytes],
        }
        end += part.nbytes
    notes = {name: note for group in groups for name, note in group.notes.items()}
    metadata = {"format": "pt"} | ({key: json.dumps(notes)} if notes else {})
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    _write(file, len(text).to_bytes(8, "little") + text)
    start = file.tell()
    for group in groups:
        for part, tensor in zip(group.parts, group.make(), strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (part.dtype, part.shape), part
            file.seek(start + header[part.name]["data_offsets"][0])
            _write_tensor(file, tensor)


def _write_tensor(file: BinaryIO, tensor: Tensor) -> None:
    tensor = tensor.detach().cpu().contiguous()
    size = tensor.numel() * tensor.element_size()
    if size:
        _write(file, memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())))


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        _write(file, (json.dumps(content, indent=2) + "\n").encode())
        _sync(file)


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
