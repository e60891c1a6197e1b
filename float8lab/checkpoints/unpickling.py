"""Pickles that are never trusted with code: the names that each kind of them may use.

A pickle names classes and functions, and loading it calls them. Every pickle of a checkpoint is
loaded here, under the ``AllowedNames`` of its kind or by torch's ``weights_only``.
"""

from __future__ import annotations

import io
import pathlib
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

import torch

from float8lab.checkpoints.source import CheckpointError, refusing

__all__ = [
    "DCP_METADATA", "TRANSFORMER_ENGINE_STATE", "Opaque", "load_opaquely", "load_restricted",
    "load_safely",
]  # fmt: skip


class Opaque:
    """A stand-in for an object of any class: it has its values, and none of its code."""

    values: tuple[object, ...] = ()

    def __init__(self, *values: object, **named: object) -> None:
        self.values = values
        self.__dict__.update(named)

    def __setstate__(self, state: object) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"values": (state,)})

    def _ignore(self, *values: object) -> None:
        """Leave out what a pickle puts into its own kind of list or dict."""

    append = extend = add = __setitem__ = _ignore


def _opaque_class(owner: object, name: str) -> type[Opaque]:
    """A stand-in for a class's method that makes an object: the class."""
    return owner if isinstance(owner, type) and issubclass(owner, Opaque) else Opaque


def _load_storage(data: bytes) -> object:
    """The elements of a tensor; torch's own function of this purpose loads any pickle."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


class AllowedNames(NamedTuple):
    """The classes and functions that one kind of pickle may name.

    Every kind may name dtypes, ``torch.Size`` and ``OrderedDict`` as well.
    """

    imported: tuple[str, ...] = ()
    """Qualified names that are imported as they are."""
    replaced: Mapping[str, object] = {}
    """What stands for the names of a pattern: an object, or the name to import in their place."""
    others_are_opaque: bool = False
    """Whether a class derived from ``Opaque`` stands for each name beyond these."""
    contents: str = ""
    """What such a pickle holds, for the message about a name that is refused."""
    advice: str = ""

    def find(self, module: str, name: str) -> object:
        """The object that a name stands for; None if the name is refused."""
        qualified = f"{module}.{name}"
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if qualified in (*self.imported, "torch.Size", "collections.OrderedDict"):
            return resolve_name(qualified)
        for pattern, value in self.replaced.items():
            if fnmatchcase(qualified, pattern):
                return resolve_name(value) if isinstance(value, str) else value
        return type(name, (Opaque,), {"__module__": module}) if self.others_are_opaque else None


_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES_OF_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"

DCP_METADATA = AllowedNames(
    imported=(
        *(f"{_METADATA}.{name}" for name in _CLASSES_OF_METADATA),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.serialization._get_layout",
    ),
    replaced={
        "pathlib*.*Path": pathlib.PurePosixPath,  # of another system, perhaps
        # Megatron's class has one field more.
        "megatron.core.dist_checkpointing.*.MCoreMetadata": f"{_METADATA}.Metadata",
    },
    contents="sizes and places of tensors",
    advice="torch.distributed.checkpoint loads it, if you trust it.",
)
"""``.metadata`` of a directory by ``torch.distributed.checkpoint``."""
TRANSFORMER_ENGINE_STATE = AllowedNames(
    imported=(_REBUILD_TENSOR,),
    replaced={
        "torch.storage._load_from_bytes": _load_storage,
        "transformer_engine.*": Opaque,
        "transformer_engine_torch.*": Opaque,
    },
    contents="tensors and values of TransformerEngine",
    advice="It is refused.",
)
"""The extra state of TransformerEngine's modules."""
_ANY_NAME = AllowedNames(
    imported=(_REBUILD_TENSOR, "torch._utils._rebuild_parameter"),
    replaced={
        "_io.BytesIO": io.BytesIO,
        "_codecs.encode": lambda text, _: text.encode("latin1"),  # bytes, in old pickles
        "builtins.getattr": _opaque_class,
        "__builtin__.getattr": _opaque_class,  # as protocol 2 names it
    },
    others_are_opaque=True,
)
"""Files by ``torch.save`` with objects of other libraries, such as Megatron-LM's."""


def _pickle_module(allowed: AllowedNames, subject: str) -> Any:
    """Make the part of ``pickle`` that torch.load uses, for pickles of no names but the allowed."""

    class RestrictedUnpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> object:
            if (value := allowed.find(module, name)) is None:
                raise CheckpointError(
                    f"{subject} must hold {allowed.contents}; it names {module}.{name}, and "
                    f"loading that can run code. {allowed.advice}"
                )
            return value

    return SimpleNamespace(
        Unpickler=RestrictedUnpickler,
        load=lambda file, **options: RestrictedUnpickler(file, **options).load(),
        __name__="pickle",
    )


def load_restricted(file: IO[bytes], allowed: AllowedNames, subject: str) -> object:
    """Load a pickle, or a file by ``torch.save``, that may use no other names than ``allowed``.

    Raises:
        CheckpointError: it names something else; ``subject`` is how the message calls the file.
    """
    restricted = _pickle_module(allowed, subject)
    is_archive = file.read(2) == b"PK"
    file.seek(0)
    if is_archive:
        return torch.load(file, "cpu", pickle_module=restricted, weights_only=False)
    return restricted.load(file)


@contextmanager
def _loading(subject: object) -> Iterator[None]:
    """Refuse what is no file by ``torch.save``, and sparse tensors with indices out of bounds."""
    problem = f"{subject} must be a file by torch.save; it is not one, or it is damaged"
    # Torch would read such tensors outside of their memory.
    invariants = torch.sparse.check_sparse_tensor_invariants()
    with refusing(problem), invariants, warnings.catch_warnings():
        # Torch 2.15 checks by itself, and warns that it takes time.
        warnings.filterwarnings("ignore", "Validating sparse tensor invariants", UserWarning)
        yield


def load_opaquely(path: Path, *, mmap: bool) -> object:
    """``torch.load`` of tensors, plain data, and ``Opaque``s for objects of any other class.
    Nothing that the file names is imported or called, but for torch's makers of tensors."""
    restricted = _pickle_module(_ANY_NAME, str(path))
    with _loading(path):
        return torch.load(path, "cpu", pickle_module=restricted, weights_only=False, mmap=mmap)


def load_safely(file: Path | IO[bytes], subject: str, *, mmap: bool = False) -> object:
    """``torch.load`` of tensors and plain data."""
    with _loading(subject):
        try:
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            # Of other files than archives this raises an error of its own.
            if unsafe := sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)):
                raise CheckpointError(
                    f"{subject} must hold tensors and plain data; it also names "
                    f"{', '.join(unsafe)}, and loading those can run code. If you trust it, "
                    "torch.load it with weights_only=False, and torch.save its state_dict() alone."
                ) from error
            # The lines before the last one advise to load it without checks.
            raise pickle.UnpicklingError(str(error).splitlines()[-1]) from error
