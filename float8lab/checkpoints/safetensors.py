"""Checkpoints in safetensors files, one or several with an index: read, and written.

Reading needs the library safetensors, which checks a header; writing needs no library. By hand are
files, since safetensors' writer takes all tensors at once and these are made one by one; and how
they are cut, since huggingface_hub, which cuts alike, would part weights from their scales. An
index comes after the files, ``config.json`` last; ``replacing`` then gives the directory its name.

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
from typing import BinaryIO

import torch
from torch import Tensor

from float8lab.arguments import needs
from float8lab.checkpoints import source
from float8lab.checkpoints.replacing import replacing
from float8lab.checkpoints.source import Box, CheckpointError, Entry, Place
from float8lab.formats import Float8Spec

__all__ = [
    "CONFIG", "DTYPES", "INDEX", "SPECS_KEY", "Group", "NewTensor", "check_target",
    "open_safetensors", "write_checkpoint",
]  # fmt: skip

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


def open_safetensors(path: Path, index: Path | None, files: list[Path]) -> source.CheckpointSource:
    """The tensors of these files, or of those that an index (``*.safetensors.index.json``) names.

    Raises:
        CheckpointError: a file is damaged or missing, or lacks a tensor that the index names.
        ModuleNotFoundError: safetensors is not installed.
    """
    placed = {} if index is None else _weight_map(index)
    if index is not None:
        files = sorted({index.parent / name for name in placed.values()})
        for file in files:
            if not file.is_file():
                count = sum(name == file.name for name in placed.values())
                raise CheckpointError(
                    f"{file} must exist: {index.name} says that it holds {count} tensors. "
                    "Download it."
                )
    entries: dict[str, Entry] = {}
    notes = []
    for file in files:
        for entry in _entries(file):
            if index is not None and placed.get(entry.name) != file.name:
                notes.append(f"{index.name} does not name {entry.name}, which is in {file.name}")
            elif entry.name in entries:
                raise CheckpointError(
                    f"{path} must hold each tensor once; {entry.name} is in "
                    f"{entries[entry.name].file} and in {file.name}. Inspect one file at a time."
                )
            entries.setdefault(entry.name, entry)
    _check_placed(entries, placed, index)
    if not entries:
        raise CheckpointError(f"{path} must hold tensors; it holds none.")
    config, remarks = _config(files[0].parent)
    container = f"safetensors, {len(files)} file{'s' if len(files) > 1 else ''}"
    entries_in_order = list(entries.values())
    return source.CheckpointSource(str(path), container, entries_in_order, config, notes + remarks)


def _check_placed(
    entries: Mapping[str, Entry], placed: Mapping[str, str], index: Path | None
) -> None:
    """Raise unless each tensor that the index names is in the file that it names."""
    missing = [name for name in placed if name not in entries or entries[name].file != placed[name]]
    if missing:
        raise CheckpointError(
            f"{placed[missing[0]]} must hold {missing[0]}, which {index} places there"
            f"{f', and {len(missing) - 1} others' if len(missing) > 1 else ''}; it does not. "
            "Repeat the download, or the write."
        )


def _weight_map(index: Path) -> dict[str, str]:
    content = _json(index)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} must have a weight_map of names to files; it has none.")
    for name, file in weight_map.items():
        # A file beside the index, and no other.
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index} must name a file beside it for {name}; got {file!r}.")
    return weight_map


def _json(path: Path) -> object:
    source.check_file(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # such as a number of 5,000 digits
        raise CheckpointError(f"{path} must hold JSON; it does not: {error}.") from error


def _config(folder: Path) -> tuple[dict[str, object], list[str]]:
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
    config = content.get("quantization_config") or content.get("compression_config")
    return (config, []) if isinstance(config, dict) else ({}, [])


def _entries(file: Path) -> list[Entry]:
    with needs(str(file), "safetensors", "inspect"):
        from safetensors import SafetensorError, safe_open

    source.check_file(file)
    with file.open("rb") as opened:  # first, since the library words the usual errors its own way
        try:
            handle = safe_open(file, "np")  # which maps read-only; its tensors are not asked for
            names, metadata = handle.keys(), handle.metadata() or {}
        except SafetensorError as error:
            raise CheckpointError(
                f"{file} must be a whole safetensors file; it is not: {error}. Repeat the "
                "download, or the write."
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
                f"metadata has {spec.block}. Repeat the write."
            )
        read: Callable[[Box], Tensor] = functools.partial(_unknown, f"{file}: {name}", kind)
        label, nbytes = kind, math.prod(shape)
        if dtype is not None:
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            read = Place(file, offset, dtype, strides).read
            label, nbytes = source.dtype_name(dtype), nbytes * dtype.itemsize
        result.append(Entry(name, dtype, label, shape, nbytes, file.name, read, spec))
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
            f"{file} must say how its weights are stored; its metadata is damaged: {error}. "
            "Repeat the write."
        ) from error


def _unknown(name: str, kind: str, box: Box) -> Tensor:
    raise CheckpointError(f"{name} must have a dtype that torch has; it has {kind}.")


@dataclass(frozen=True)
class NewTensor:
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

    tensors: tuple[NewTensor, ...]
    make: Callable[[], Sequence[Tensor]]
    """The values of ``tensors``, on any device."""
    notes: Mapping[str, object] = field(default_factory=dict)
    """Notes by name, for ``SPECS_KEY`` in the metadata of the file."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def check_target(path: Path, *, overwrite: bool) -> None:
    """Raise unless a checkpoint may be written to ``path``."""
    if path.exists() and not path.is_dir():
        raise FileExistsError(
            f"path must be a directory or free; {path} is a file. Choose another."
        )
    content = sorted(path.iterdir()) if path.exists() else []
    if not content:
        return
    if not overwrite:
        raise FileExistsError(
            f"path must be free; {path} holds {source.listed([e.name for e in content], 1)}. "
            "Choose another, or pass overwrite=True to replace a checkpoint."
        )
    strange = [entry.name for entry in content if not entry.is_file() or entry.is_symlink()]
    can_remove = os.access(path, os.W_OK)  # what is there, when the new one has taken its place
    if strange or not can_remove or not any(x.suffix == ".safetensors" for x in content):
        content_now = f"holds {strange[0]}" if strange else "holds no .safetensors file"
        content_now = content_now if can_remove else "is read-only"
        raise FileExistsError(
            f"path must be a checkpoint, plain files with safetensors among them, to be "
            f"overwritten; {path} {content_now}. Choose another."
        )


def write_checkpoint(
    path: Path, groups: Sequence[Group], config: Mapping[str, object], *, max_shard_size: int
) -> list[str]:
    """Write a checkpoint directory and return the names of its safetensors files.
    A file has at most ``max_shard_size`` bytes, unless one group is larger. If a checkpoint is
    replaced, its files that are no weights (a tokenizer, say) are kept."""
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as partial:
        partial.mkdir()
        files = _write_files(partial, groups, config, max_shard_size)
        for entry in path.iterdir() if path.is_dir() else ():
            if entry.suffix != ".safetensors" and entry.name not in (INDEX, CONFIG):
                shutil.copy2(entry, partial / entry.name)
    return files


def _write_files(
    folder: Path, groups: Sequence[Group], config: Mapping[str, object], max_shard_size: int
) -> list[str]:
    shards = _shards(groups, max_shard_size)
    files: list[str] = []
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        several = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        files.append(f"model{several}.safetensors")
        with (folder / files[-1]).open("wb") as opened:
            _write_tensors(opened, shard)
            _sync(opened)
        weight_map |= {tensor.name: files[-1] for group in shard for tensor in group.tensors}
    if len(shards) > 1:
        size = sum(group.nbytes for group in groups)
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
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
    tensors = [tensor for group in groups for tensor in group.tensors]
    # Wide elements first: then all are aligned, which readers that map the file want.
    header: dict[str, object] = {}
    starts: dict[str, int] = {}
    stop = 0
    for tensor in sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize):
        starts[tensor.name], stop = stop, stop + tensor.nbytes
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[tensor.name], stop],
        }
    notes = {name: note for group in groups for name, note in group.notes.items()}
    metadata = {"format": "pt"} | ({SPECS_KEY: json.dumps(notes)} if notes else {})
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % 8)
    _write(file, len(text).to_bytes(8, "little") + text)
    start = file.tell()
    for group in groups:
        for tensor, value in zip(group.tensors, group.make(), strict=True):
            assert (value.dtype, tuple(value.shape)) == (tensor.dtype, tensor.shape), tensor
            file.seek(start + starts[tensor.name])
            value = value.detach().cpu().contiguous()
            if size := tensor.nbytes:
                _write(file, memoryview((ctypes.c_char * size).from_address(value.data_ptr())))


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    with path.open("wb") as file:
        _write(file, (json.dumps(content, indent=2) + "\n").encode())
        _sync(file)


def _write(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
