"""Real text that every machine with Python has, as bytes: no download, no tokenizer.

The text is Python's own manual (``pydoc_data.topics``) and the docstrings of the standard
library, read from its source files without importing any of them: about two megabytes. For larger
models there are the source files themselves, about eleven megabytes. Both depend on the Python
version, but not on the machine or the run.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Text", "docstrings", "load_text", "manual", "sources", "split"]

SEPARATOR = "\n\n"
CHUNK = 16384
"""Bytes of one contiguous piece of the train/validation split."""
VALIDATION_EVERY = 10
"""One of this many chunks is for validation."""

_SKIPPED_FOLDERS = frozenset(
    (
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    )
)
"""Folders that are no documentation of the library, or that some distributions of Python lack."""
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Text:
    """The two parts of the text, one int64 token per byte, and a digest of the whole."""

    train: Tensor
    validation: Tensor
    digest: str
    """First half of the SHA-256 of the whole text: equal digests mean equal data."""

    def describe(self) -> str:
        """Return one line for people."""
        sizes = f"{len(self.train):,} bytes to train, {len(self.validation):,} to validate"
        return f"{sizes} (sha256 {self.digest[:12]})"


def manual() -> list[str]:
    """The topics of Python's manual in order of name; none if this Python has no manual."""
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        return []
    return [topics[name] for name in sorted(topics)]


def _source_files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if not _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            yield path


def sources(root: Path) -> list[str]:
    """All source files below ``root`` in order of path, except those that are not UTF-8."""
    texts: list[str] = []
    for path in _source_files(root):
        with contextlib.suppress(UnicodeDecodeError):
            texts.append(path.read_text(encoding="utf-8"))
    return texts


def docstrings(root: Path) -> list[str]:
    """Docstrings of all source files below ``root``, in order of path and line.

    Files that are not UTF-8 or do not parse are skipped; nothing is imported or run.
    """
    texts: list[str] = []
    for source in sources(root):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings about the files, which are not ours
                tree = ast.parse(source)
        except SyntaxError:
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
        nodes.sort(key=lambda node: getattr(node, "lineno", 0))
        texts += filter(None, map(ast.get_docstring, nodes))
    return texts


def split(text: bytes, *, chunk: int = CHUNK, every: int = VALIDATION_EVERY) -> tuple[bytes, bytes]:
    """Cut ``text`` into contiguous chunks and give every ``every``-th to validation.

    >>> split(b"aabbccddee", chunk=2, every=3)
    (b'aabbddee', b'cc')
    """
    train, validation = bytearray(), bytearray()
    for start in range(0, len(text), chunk):
        held_out = start // chunk % every == every - 1
        (validation if held_out else train).extend(text[start : start + chunk])
    return bytes(train), bytes(validation)


def _tokens(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def load_text(*, code: bool = False, folders: Sequence[Path] = ()) -> Text:
    """Return the manual and the standard library's docstrings, or all its source code.

    Each text is there once. The source code below further ``folders`` follows.
    """
    library = (sources if code else docstrings)(Path(sysconfig.get_path("stdlib")))
    other_sources = [source for folder in folders for source in sources(folder)]
    text = SEPARATOR.join(dict.fromkeys(manual() + library + other_sources)).encode()
    train, validation = split(text)
    return Text(_tokens(train), _tokens(validation), hashlib.sha256(text).hexdigest()[:32])
