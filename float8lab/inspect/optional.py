"""Libraries that some functions import when they are called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["needs"]


@contextmanager
def needs(what: str, package: str, install: str, otherwise: str = "") -> Iterator[None]:
    """Say who needs a package and how to get it, if the import of that package in the block fails.

    Args:
        what: the function or file that needs the package, by name.
        package: the import's name.
        install: the requirement to give to pip.
        otherwise: a way that works without it, after "or".

    Raises:
        ModuleNotFoundError: with this message, and the name of the missing module.

    >>> with needs("table", "rich", '"float8lab[inspect]"', "print the tensor"):
    ...     raise ModuleNotFoundError("No module named 'rich'", name="rich")
    Traceback (most recent call last):
    ModuleNotFoundError: table must have rich; it is not installed. pip install \
"float8lab[inspect]", or print the tensor.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        instead = f", or {otherwise}" if otherwise else ""
        raise ModuleNotFoundError(
            f"{what} must have {package}; it is not installed. pip install {install}{instead}.",
            name=error.name,
        ) from error
