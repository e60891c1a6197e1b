"""Open a checkpoint, whose kind is found from its content and its names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from float8lab.checkpoints.dcp import open_dcp
from float8lab.checkpoints.megatron import (
    FOLDER,
    LATEST,
    is_megatron,
    iteration_of,
    layer_by_layer,
    open_megatron,
    open_rank,
)
from float8lab.checkpoints.pickles import open_state_dict, open_torch_save
from float8lab.checkpoints.safetensors import open_safetensors
from float8lab.checkpoints.source import CheckpointError, Source, check_file

__all__ = ["open_checkpoint"]

_READ = (
    "safetensors files, files by torch.save, and directories by torch.distributed.checkpoint or "
    "Megatron-LM"
)
_OTHERS = {
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUM": "a numpy array",
    b"\x1f\x8b": "compressed by gzip",
    b"(\xb5/\xfd": "compressed by zstd",
    b"version https://git-lfs": "a Git LFS pointer: fetch the file with git lfs pull",
}
_LARGEST_HEADER = 100_000_000  # of a safetensors file, as the library has it
_MOST_DIMENSIONS = 64  # of a tensor, as numpy and most ops of torch have it


def open_checkpoint(path: str | Path | Mapping[str, Any]) -> Source:
    """The tensors of a checkpoint; nothing but names, shapes and places is read.

    Args:
        path: a file, an index (``*.safetensors.index.json``), a directory, or a state dict.

    Raises:
        CheckpointError: it is none of the kinds that are read, or damaged.
        OSError: it does not exist, or may not be read.
        ModuleNotFoundError: it needs safetensors, which is not installed.
    """
    source = open_state_dict(path) if isinstance(path, Mapping) else _path(path)
    for entry in source.entries:
        if len(entry.shape) > _MOST_DIMENSIONS:
            raise CheckpointError(
                f"{source.path} must have tensors of at most {_MOST_DIMENSIONS} dimensions; "
                f"{entry.name} has {len(entry.shape)}. It is damaged."
            )
    return source


def _path(path: str | Path) -> Source:
    if path == "":  # which pathlib takes for the current directory
        raise CheckpointError("path must name a file or a directory; got ''.")
    path = Path(path)
    path.stat()  # raises what is wrong with the path itself
    return _directory(path) if path.is_dir() else _file(path)


def _directory(path: Path) -> Source:
    names = sorted(entry.name for entry in path.iterdir())
    if ".metadata" in names:
        source = open_dcp(path)
        return layer_by_layer(source) if is_megatron(path) else source
    if any(FOLDER.fullmatch(name) for name in names):
        return open_megatron(path)
    if LATEST in names:
        return _directory(iteration_of(path))
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} must have one index; it has {', '.join(indices)}. Name one of them."
        )
    if indices:
        return open_safetensors(path, path / indices[0], [])
    files = [path / name for name in names if name.endswith(".safetensors")]
    if files:
        return open_safetensors(path, None, files)
    files = [path / name for name in names if name.endswith((".bin", ".ckpt", ".pt", ".pth"))]
    if len(files) == 1:
        return _torch_save(files[0])
    if files:
        raise CheckpointError(
            f"{path} must hold one file by torch.save; it holds {len(files)}, from {files[0].name} "
            f"to {files[-1].name}. Name one of them."
        )
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"{path} must have .metadata beside its .distcp files; it has none. The save did not "
            "finish, or the file was not copied."
        )
    raise CheckpointError(f"{path} must hold a checkpoint; it has none. Known: {_READ}.")


def _file(path: Path) -> Source:
    if path.name.endswith(".index.json"):
        return open_safetensors(path, path, [])
    if path.name == ".metadata" or path.suffix == ".distcp":
        return open_dcp(path.parent)
    check_file(path)
    with path.open("rb") as file:
        start = file.read(32)
    if not start:
        raise CheckpointError(f"{path} must hold a checkpoint; it is empty.")
    for magic, what in _OTHERS.items():
        if start.startswith(magic):
            raise CheckpointError(f"{path} must be a checkpoint; it is {what}. Known: {_READ}.")
    header = int.from_bytes(start[:8], "little")
    # A torch.save file is a zip archive, perhaps an empty one, or a pickle of protocol 2.
    pickled = start.startswith((b"PK\x03\x04", b"PK\x05\x06", b"\x80\x02"))
    if path.suffix == ".safetensors" or (
        start[8:9] == b"{" and header < _LARGEST_HEADER and not pickled
    ):
        return open_safetensors(path, None, [path])
    if pickled or path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return _torch_save(path)
    raise CheckpointError(f"{path} must be a checkpoint; it is none. Known: {_READ}.")


def _torch_save(path: Path) -> Source:
    return open_rank(path) if FOLDER.fullmatch(path.parent.name) else open_torch_save(path)
