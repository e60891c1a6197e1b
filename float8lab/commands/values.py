"""Values of the options of commands."""

from __future__ import annotations

import argparse

__all__ = ["count"]


def count(text: str) -> int:
    """A whole number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is none, which a command prints as a wrong option.

    >>> count("3")
    3
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on; got {text!r}")
    return int(text)
