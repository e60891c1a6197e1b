"""Tensors in files, read box by box."""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.arguments import printable
from float8lab.formats import Spec

__all__ = [
    "BOX", "Box", "CheckpointError", "CheckpointSource", "Entry", "Piece", "Place", "boxes",
    "check_file", "dtype_name", "listed", "read_pieces", "refusing", "whole_box",
]  # fmt: skip

BOX = 1 << 20
"""Most elements that are read at once, unless a single block is larger."""

Box = tuple[slice, ...]
"""A slice with start and stop for each dimension."""


class CheckpointError(ValueError):
    """A file is no checkpoint that can be read here, or is damaged; the message is one line."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


@contextmanager
def refusing(problem: str) -> Iterator[None]:
    """Raise any error of the block as a CheckpointError, but an OSError of a file as it is."""
    try:
        yield
    except Exception as error:  # unpickling damaged data may raise any, says pickle's manual
        if isinstance(error, CheckpointError) or getattr(error, "filename", None) is not None:
            raise
        raise CheckpointError(f"{problem}: {type(error).__name__}: {error}.") from error


@dataclass(frozen=True)
class Place:
    """Where the elements of a tensor are in a file.

    The file is read and not mapped: torch maps files as memory that could be written, and a
    system refuses that for a file that is larger than its memory.
    """

    file: Path
    start: int
    """Byte of the first element."""
    dtype: torch.dtype
    strides: tuple[int, ...]

    def read(self, box: Box) -> Tensor:
        """Read a box; only the bytes from its first to its last element are read."""
        sizes = [s.stop - s.start for s in box]
        if 0 in sizes:
            return torch.empty(sizes, dtype=self.dtype, device="cpu")
        first = sum(s.start * stride for s, stride in zip(box, self.strides, strict=True))
        last = sum((s.stop - 1) * stride for s, stride in zip(box, self.strides, strict=True))
        size, start = (last - first + 1) * self.dtype.itemsize, first * self.dtype.itemsize
        with self.file.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            if self.start + start + size > end:  # before so much memory is asked for
                raise CheckpointError(f"{self.file} must not end at {end}. It is truncated.")
            data = bytearray(size)
            file.seek(self.start + start)
            file.readinto(data)
        flat = torch.frombuffer(data, dtype=torch.uint8).view(self.dtype)
        return flat.as_strided(sizes, self.strides)


class Piece(NamedTuple):
    """A part of a tensor that is stored separately."""

    starts: tuple[int, ...]
    """Where it begins in the tensor."""
    sizes: tuple[int, ...]
    read: Callable[[Box], Tensor]
    """Its elements in a box of its own."""


def read_pieces(pieces: Sequence[Piece], dtype: torch.dtype, box: Box) -> Tensor:
    """Read a box of a tensor from its pieces; what no piece holds is 0."""
    sizes = [s.stop - s.start for s in box]
    result = torch.zeros(sizes, dtype=torch.uint8, device="cpu").to(dtype)
    for piece in pieces:
        common = [
            (max(s.start, start), min(s.stop, start + size))
            for s, start, size in zip(box, piece.starts, piece.sizes, strict=True)
        ]
        if all(first < last for first, last in common):
            in_piece, in_box = (
                tuple(slice(a - at, b - at) for (a, b), at in zip(common, origin, strict=True))
                for origin in (piece.starts, [s.start for s in box])
            )
            result[in_box] = piece.read(in_piece)
    return result


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, not yet read."""

    name: str
    dtype: torch.dtype | None
    """None if torch has no such dtype, or if it is no plain strided tensor; ``read`` fails then."""
    dtype_name: str
    shape: tuple[int, ...]
    nbytes: int
    file: str
    """Name of the file that holds it, below the path that was opened."""
    reader: Callable[[Box], Tensor]
    spec: Spec | None = None
    """Format, blocks and scales of quantized data, where the checkpoint itself holds them."""

    def read(self, box: Box | None = None) -> Tensor:
        """The elements of a box, or all of them, on the CPU."""
        return self.reader(whole_box(self.shape) if box is None else box)


@dataclass(frozen=True)
class CheckpointSource:
    """The tensors that a path holds, not yet read."""

    path: str
    container: str
    """The kind of checkpoint in words, such as ``"safetensors, 4 files"``."""
    entries: Sequence[Entry]
    config: Mapping[str, object] = field(default_factory=dict)
    """The ``quantization_config`` of a ``config.json`` beside it."""
    notes: Sequence[str] = ()
    """Oddities that concern no single tensor."""


def check_file(path: Path) -> None:
    """Raise unless ``path`` is a file: a pipe may have no end, and a device may have none."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a directory" if stat.S_ISDIR(mode) else "a pipe, a socket or a device"
        raise CheckpointError(f"{path} must be a file; it is {kind}. Copy what it gives to a file.")


def listed(texts: Iterable[str], most: int, separator: str = ", ") -> str:
    """The first of some texts, for a message, and how many more there are.

    >>> listed(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    shown = list(map(printable, texts))
    more = f" and {len(shown) - most} more" if len(shown) > most else ""
    return separator.join(shown[:most]) + more


def whole_box(shape: Sequence[int]) -> Box:
    """The box of all elements."""
    return tuple(slice(0, size) for size in shape)


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float8_e4m3fn`` -> ``float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def boxes(shape: Sequence[int], align: Sequence[int], most: int = BOX) -> Iterator[Box]:
    """Boxes that cover a tensor, each once, in the order of memory.

    A box starts at a multiple of ``align`` in each dimension, where -1 is as 1, and has ``most``
    elements unless a single block of ``align`` has more.

    >>> [[(s.start, s.stop) for s in box] for box in boxes((5, 8), (2, -1), most=20)]
    [[(0, 2), (0, 8)], [(2, 4), (0, 8)], [(4, 5), (0, 8)]]
    """
    steps = list(shape)
    for dim, unit in enumerate(max(unit, 1) for unit in align):
        if math.prod(steps) <= most:
            break
        fitting = most // math.prod(steps[:dim] + steps[dim + 1 :]) // unit * unit
        steps[dim] = min(max(fitting, unit), steps[dim])
    ranges = [
        [slice(start, min(start + step, size)) for start in range(0, size, max(step, 1))]
        for size, step in zip(shape, steps, strict=True)
    ]
    return itertools.product(*ranges)
