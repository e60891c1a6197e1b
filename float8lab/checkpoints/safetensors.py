"""Checkpoints in safetensors files, one or several with an index: read, and written.

Reading needs the library safetensors, which checks a header; writing does not. A file is written
tensor by tensor, so memory holds one weight at a time, which the library's own writer cannot do. An
index comes after the files, ``config.json`` last; then the directory takes the target's place
(``replacing``).

Source: the safetensors format, https://github.com/huggingface/safetensors (Format).
"""

from __future__ import annotations

import ctypes
import functools
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

from float8lab.arguments import needs
from float8lab.checkpoints.replacing import replacing
from float8lab.checkpoints.source import (
    Box,
    CheckpointError,
    Entry,
    Place,
    Source,
    check_file,
    dtype_name,
)
from float8lab.formats import Float8Spec

__all__ = [
    "CONFIG",
    "DTYPES",
    "INDEX",
    "SPECS_KEY",
    "Group",
    "Part",
    "check_target",
    "open_safetensors",
    "write_checkpoint",
]

SPECS_KEY = "float8lab"
"""Key in a file's metadata of the format, block and scale rule of each weight ``X.qdata``, as
JSON."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"


def open_safetensors(path: Path, index: Path | None, files: list[Path]) -> Source:
    """The tensors of these files.

    Args:
        path: the path that the user named.
        index: ``*.safetensors.index.json``, which says what is in which file; ``files`` is then
            ignored.
        files: to read.

    Raises:
        CheckpointError: a file is damaged or missing, or lacks a tensor that the index names.
        ModuleNotFoundError: safetensors is not installed.
    """
    where = _weight_map(index) if index is not None else {}
    if index is not None:
        files = sorted({index.parent / name for name in where.values()})
    entries: dict[str, Entry] = {}
    notes = []
    for file in files:
        if index is not None and not file.is_file():
            count = sum(name == file.name for name in where.values())
            raise CheckpointError(
                f"{file} must exist: {index.name} says that it holds {count} tensors. Download it."
            )
        for entry in _entries(file):
            if index is not None and where.get(entry.name) != file.name:
                notes.append(f"{index.name} does not name {entry.name}, which is in {file.name}")
            elif entry.name in entries:
                raise CheckpointError(
                    f"{path} must hold each tensor once; {entry.name} is in "
                    f"{entries[entry.name].file} and in {file.name}. Inspect one file at a time."
                )
            entries.setdefault(entry.name, entry)
    missing = [name for name in where if name not in entries or entries[name].file != where[name]]
    if missing:
        raise CheckpointError(
            f"{where[missing[0]]} must hold {missing[0]}, which {index} places there"
            f"{f', and {len(missing) - 1} others' if len(missing) > 1 else ''}; it does not. "
            "Download or write the checkpoint again."
        )
    if not entries:
        raise CheckpointError(f"{path} must hold tensors; it holds none.")
    config, remarks = _config(files[0].parent)
    return Source(
        path=str(path),
        container=f"safetensors, {len(files)} file{'s' if len(files) > 1 else ''}",
        entries=list(entries.values()),
        config=config,
        notes=notes + remarks,
    )


def _weight_map(index: Path) -> dict[str, str]:
    content = _json(index)
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise CheckpointError(f"{index} must have a weight_map of names to files; it has none.")
    for name, file in found.items():
        # A file beside the index, and no other.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} must name a file beside it for {name}; got {file!r}.")
    return found


def _json(path: Path) -> Any:
    check_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # such as a number of 5,000 digits
        raise CheckpointError(f"{path} must hold JSON; it does not: {error}.") from error


def _config(folder: Path) -> tuple[dict[str, Any], list[str]]:
    path = folder / CONFIG
    if not path.is_file():
        return {}, []
    try:
        content = _json(path)
    except (CheckpointError, OSError) as error:
        return {}, [f"config.json is ignored: {error}"]
    if not isinstance(content, dict):
        return {}, ["config.json is ignored: it holds no object"]
    # The second name is that of early compressed-tensors.
    found = content.get("quantization_config") or content.get("compression_config")
    return (found, []) if isinstance(found, dict) else ({}, [])


def _entries(file: Path) -> list[Entry]:
    with needs(str(file), "safetensors", '"float8lab[inspect]"'):
        from safetensors import SafetensorError, safe_open

    check_file(file)
    with file.open("rb") as opened:  # first, since the library words the usual errors its own way
        try:
            handle = safe_open(file, "np")  # which maps read-only; its tensors are not asked for
            names, metadata = handle.keys(), handle.metadata() or {}
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} must be a whole safetensors file; it is not: {error}. Download or write "
                "it again."
            ) from error
        # The header, which the library has found to be right but does not show.
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    specs = _specs(file, metadata)
    result = []
    for name in names:
        kind, shape = header[name]["dtype"], tuple(header[name]["shape"])
        dtype = DTYPES.get(kind)
        offset = 8 + size + header[name]["data_offsets"][0]
        spec = specs.get(name.removesuffix(".qdata"))
        if spec is not None and len(spec.block) != len(shape):
            raise CheckpointError(
                f"{file} must have one block size for each dimension of {name}, {shape}; its "
                f"metadata has {spec.block}. Write it again."
            )
        if dtype is None:
            read: Callable[[Box], Tensor] = functools.partial(_unknown, f"{file}: {name}", kind)
        else:
            read = Place(file, offset, dtype, _strides(shape)).read
        result.append(
            Entry(
                name=name,
                dtype=dtype,
                dtype_name=kind if dtype is None else dtype_name(dtype),
                shape=shape,
                nbytes=math.prod(shape) * (1 if dtype is None else dtype.itemsize),
                file=file.name,
                reader=read,
                spec=spec,
            )
        )
    return result


def _specs(file: Path, metadata: Mapping[str, str]) -> dict[str, Float8Spec]:
    """How the weights of a file by ``float8lab.integrations.export`` are stored in FP8."""
    if SPECS_KEY not in metadata:
        return {}
    try:
        return {
            name: Float8Spec(getattr(torch, dtype), tuple(block), rule)
            for name, (dtype, block, rule) in json.loads(metadata[SPECS_KEY]).items()
        }
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file} must say how its weights are stored; its metadata is damaged: {error}. Write "
            "it again."
        ) from error


def _unknown(name: str, kind: str, box: Box) -> Tensor:
    raise CheckpointError(f"{name} must have a dtype that torch has; it has {kind}.")


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of this shape, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


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
    """Notes by name, for ``SPECS_KEY`` in the metadata of the file."""

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
    max_shard_size: int,
) -> list[str]:
    """Write a checkpoint directory and return the names of its safetensors files.

    If a checkpoint is replaced, its files that are no weights (a tokenizer, say) are kept.

    Args:
        path: checked by ``check_target``.
        groups: all tensors.
        config: becomes ``config.json``.
        max_shard_size: most bytes of a file, unless one group is larger.
    """
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.mkdir()
        files = _write_files(partial, groups, config, max_shard_size)
        kept = path.iterdir() if path.is_dir() else ()
        for entry in kept:
            if entry.suffix != ".safetensors" and entry.name not in (INDEX, CONFIG):
                shutil.copy2(entry, partial / entry.name)
    return files


def _write_files(
    folder: Path, groups: Sequence[Group], config: Mapping[str, Any], max_shard_size: int
) -> list[str]:
    shards = _shards(groups, max_shard_size)
    files: list[str] = []
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        files.append(f"model{several}.safetensors")
        with (folder / files[-1]).open("wb") as opened:
            _write_tensors(opened, shard)
            _sync(opened)
        where |= {part.name: files[-1] for group in shard for part in group.parts}
    if len(shards) > 1:
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


def _write_tensors(file: BinaryIO, groups: Sequence[Group]) -> None:
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
    metadata = {"format": "pt"} | ({SPECS_KEY: json.dumps(notes)} if notes else {})
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
