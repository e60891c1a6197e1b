"""Write a file or a directory so that it replaces another one whole, or not at all.

It is written beside its target and then renamed. A crash before that leaves the target as it was,
and beside it a file or directory with the suffix ``.partial``.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["leftovers", "replacing", "write_text"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a free path beside ``path``; the file that the block makes there replaces ``path``.
    If the block raises, that file or directory is removed and ``path`` stays as it was. If ``path``
    is a symbolic link, its target is replaced, and the link stays. A target that is replaced hands
    on its permissions. A device or a pipe cannot be replaced: ``path`` itself is yielded."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    path = Path(os.path.realpath(path))
    token = f"{os.getpid()}-{os.urandom(4).hex()}"
    partial = path.with_name(f".{path.name}.{token}.partial")
    try:
        yield partial
        _sync(partial)
        if path.exists():
            shutil.copymode(path, partial)
        _move(partial, path, path.with_name(f".{path.name}.{token}.old"))
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)  # does nothing to a file
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename == str(partial):
            error.filename = str(path)  # the name that the caller knows
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a file, in place of one that begins alike: a page replaces no checkpoint."""
    path, start = Path(path), text[:5]
    if path.is_file():
        with path.open("rb") as file:
            start_now = file.read(5)
        if start_now not in (b"", start.encode()):
            raise FileExistsError(
                f"path must be free or a file that begins with {start!r}, as this one will; "
                f"{path} is another. Choose another path, or delete that file."
            )
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def leftovers(path: Path) -> list[Path]:
    """Paths that an interrupted write of ``path`` left: partial new ones, whole old ones."""
    path = Path(os.path.realpath(path))
    if not path.parent.is_dir():
        return []
    return [
        entry
        for entry in sorted(path.parent.iterdir())
        if entry.name.startswith(f".{path.name}.") and entry.suffix in (".partial", ".old")
    ]


def _move(new: Path, path: Path, old: Path) -> None:
    """Put ``new`` in the place of ``path``."""
    if path.is_dir() and not new.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not path.is_dir():
        os.replace(new, path)
        _sync(path.parent)
        return
    # No system call that Python has replaces a directory by another. Between these two lines a
    # crash leaves no ``path``, but both whole; ``leftovers`` finds them.
    os.rename(path, old)
    try:
        os.rename(new, path)
    except BaseException:
        os.rename(old, path)
        raise
    _sync(path.parent)
    shutil.rmtree(old)


def _sync(path: Path) -> None:
    if os.name == "nt":
        return  # it cannot open a directory, and renames there are durable in order
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
