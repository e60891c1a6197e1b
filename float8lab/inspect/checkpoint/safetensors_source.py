"""Checkpoints in safetensors files: one, or several with an index. Needs safetensors."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import Float8Spec
from float8lab.inspect.checkpoint.source import (
    Box,
    CheckpointError,
    Entry,
    Place,
    Source,
    check_file,
    dtype_name,
)
from float8lab.inspect.optional import needs

__all__ = ["DTYPES", "SPECS_KEY", "open_safetensors"]

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
    path = folder / "config.json"
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
                read=read,
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
