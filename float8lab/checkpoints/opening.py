"""Open a checkpoint, whose kind its content and its names tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from float8lab.arguments import needs
from float8lab.checkpoints import megatron
from float8lab.checkpoints.dcp import open_dcp
from float8lab.checkpoints.pickles import open_state_dict, open_torch_save
from float8lab.checkpoints.safetensors import open_safetensors
from float8lab.checkpoints.source import CheckpointError, CheckpointSource, check_file

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
_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth")  # of files by torch.save
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LARGEST_HEADER = 100_000_000  # of a safetensors file, as the library has it
_MOST_DIMENSIONS = 64  # of a tensor, as numpy and most ops of torch have it


def open_checkpoint(path: str | Path | Mapping[str, object]) -> CheckpointSource:
    """The tensors of a checkpoint; nothing but names, shapes and places is read.

    Args:
        path: a file, an index (``*.safetensors.index.json``), a directory, the id of a model that
            the local Hugging Face cache has (``"org/name"``), or a state dict.

    Raises:
        CheckpointError: it is none of the kinds that are read, or damaged.
        OSError: it does not exist, or may not be read.
        ModuleNotFoundError: it needs safetensors or, for an id, huggingface_hub.
    """
    source = open_state_dict(path) if isinstance(path, Mapping) else _open_path(path)
    for entry in [entry for entry in source.entries if len(entry.shape) > _MOST_DIMENSIONS][:1]:
        raise CheckpointError(
            f"{source.path} must have tensors of at most {_MOST_DIMENSIONS} dimensions; "
            f"{entry.name} has {len(entry.shape)}. It is damaged."
        )
    return source


def _open_path(path: str | Path) -> CheckpointSource:
    path = _snapshot(str(path)) or Path(path)
    path.stat()  # raises what is wrong with the path itself
    return _directory(path) if path.is_dir() else _file(path)


def _snapshot(name: str) -> Path | None:
    """The directory of the model with this id in the Hugging Face cache; None for a path, of which
    the folder exists or the suffix tells. Nothing is downloaded."""
    if not _HUB_ID.fullmatch(name) or Path(name).parent.exists() or name.endswith(_SUFFIXES):
        return None
    with needs(f"{name}, which is no path here but may be a model's id,", "huggingface_hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} must be a file, a directory, or the id of a model in the Hugging Face cache "
            f"of this machine; it is none. Download it first: hf download {name}"
        ) from error


def _directory(path: Path) -> CheckpointSource:
    names = sorted(entry.name for entry in path.iterdir())
    if ".metadata" in names:
        source = open_dcp(path)
        return megatron.layer_by_layer(source) if megatron.is_megatron(path) else source
    if any(megatron.FOLDER.fullmatch(name) for name in names):
        return megatron.open_megatron(path)
    if megatron.LATEST in names:
        return _directory(megatron.iteration_of(path))
    index = _only_file(path, names, (".safetensors.index.json",), "index")
    files = [path / name for name in names if name.endswith(".safetensors")]
    if index is not None or files:
        return open_safetensors(path, index, files)
    if (file := _only_file(path, names, _SUFFIXES, "file by torch.save")) is not None:
        return _torch_save(file)
    if any(name.endswith(".distcp") for name in names):
        raise CheckpointError(
            f"{path} must have .metadata beside its .distcp files; it has none. The save did not "
            "finish, or the file was not copied."
        )
    raise CheckpointError(f"{path} must hold a checkpoint; it has none. Known: {_READ}.")


def _only_file(path: Path, names: list[str], suffixes: tuple[str, ...], kind: str) -> Path | None:
    """The file with one of these suffixes; None if there is none."""
    fitting = [name for name in names if name.endswith(suffixes)]
    if len(fitting) > 1:
        raise CheckpointError(
            f"{path} must have one {kind}; it has {len(fitting)}, from {fitting[0]} to "
            f"{fitting[-1]}. Name one of them."
        )
    return path / fitting[0] if fitting else None


def _file(path: Path) -> CheckpointSource:
    if path.name.endswith(".index.json"):
        return open_safetensors(path, path, [])
    if path.name == ".metadata" or path.suffix == ".distcp":
        return open_dcp(path.parent)
    check_file(path)
    with path.open("rb") as file:
        start = file.read(32)
    if not start:
        raise CheckpointError(f"{path} must hold a checkpoint; it is empty.")
    for magic, kind in _OTHERS.items():
        if start.startswith(magic):
            raise CheckpointError(f"{path} must be a checkpoint; it is {kind}. Known: {_READ}.")
    header = int.from_bytes(start[:8], "little")
    # A torch.save file is a zip archive, perhaps an empty one, or a pickle of protocol 2.
    pickled = start.startswith((b"PK\x03\x04", b"PK\x05\x06", b"\x80\x02"))
    if path.suffix == ".safetensors" or (
        start[8:9] == b"{" and header < _LARGEST_HEADER and not pickled
    ):
        return open_safetensors(path, None, [path])
    if pickled or path.suffix in _SUFFIXES:
        return _torch_save(path)
    raise CheckpointError(f"{path} must be a checkpoint; it is none. Known: {_READ}.")


def _torch_save(path: Path) -> CheckpointSource:
    is_of_rank = megatron.FOLDER.fullmatch(path.parent.name)
    return megatron.open_rank(path) if is_of_rank else open_torch_save(path)
