"""The contents of a key/value cache: keys and values in pages, and where sequences lie in them.

B sequences, G key/value heads, S positions, P positions of a page, D head size.

A table names the pages of each row's sequence, in order. A cache that is not paged has one page for
each row, of all its positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab import ops
from float8lab.formats import FP8_DTYPES
from float8lab.nn.attention.layout import padding_from_lengths

__all__ = ["Cached", "Pages", "Places", "Step", "Store"]


class Step(NamedTuple):
    """The sequences of one call, in its order, as ``InferenceParams.pre_step`` placed them."""

    slots: tuple[int, ...]
    """Rows of the cache."""
    before: tuple[int, ...]
    """Tokens already in the cache."""
    lengths: tuple[int, ...]
    """Tokens of this call."""

    @property
    def totals(self) -> list[int]:
        """Tokens in the cache after this call."""
        return [b + n for b, n in zip(self.before, self.lengths, strict=True)]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after this call."""
        return max((0, *self.totals))  # no default: a graph would break there


class Store:
    """Keys or values of one layer, ``[pages, G, P, D]``; in FP8 one scale for each vector."""

    def __init__(self, like: Tensor, pages: int, size: int, dtype: torch.dtype | None) -> None:
        shape = (pages, like.shape[1], size, like.shape[3])
        self.dtype = dtype or like.dtype
        self.scale: Tensor | None = None
        with torch.inference_mode(False):  # a call outside inference mode may write it, too
            self.data = torch.zeros(shape, dtype=self.dtype, device=like.device)
            if self.dtype in FP8_DTYPES:
                self.scale = torch.ones(*shape[:3], 1, dtype=torch.float32, device=like.device)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def _words(self) -> Tensor:
        """The data as a dtype that every device reads and writes by index."""
        return self.data if self.scale is None else self.data.view(torch.uint8)

    def write(self, places: Places, x: Tensor) -> None:
        """Put the head vectors of a call's tokens, of ``[B, G, S, D]``, where they belong."""
        ops.write_pages_(x, self.data, self.scale, places.tokens)

    def read(self, pages: slice | Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """The first positions of sequences, ``[B, G, length, D]``.

        ``pages`` are ``[B, n]``, or a slice where each has one.
        """

        def joined(x: Tensor) -> Tensor:
            x = x[pages]
            return (x.transpose(1, 2).flatten(2, 3) if x.ndim == 5 else x)[:, :, :length]

        data = joined(self._words)
        if self.scale is None:
            return data.to(dtype)
        flat = data.reshape(-1, data.shape[-1]).view(self.dtype)
        scale = joined(self.scale).reshape(-1, 1)
        out: Tensor = ops.value_of_op("dequantize", (flat, scale), dtype, (1, -1))
        return out.view(data.shape)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Let pages hold what others held; some may be both."""
        self._words[target] = self._words[source]
        if self.scale is not None:
            self.scale[target] = self.scale[source]


class Places(NamedTuple):
    """Where the sequences of a step, and its tokens, lie.

    A CUDA graph of a step reads these tensors, into which later steps of its sizes are copied.
    """

    tokens: Tensor
    """``[4, T]`` int64: each token's row and position in the call, its page, its position there."""
    sequences: Tensor
    """``[3, B]`` int32: each sequence's row of the table, tokens before the call, and in it."""
    table: Tensor
    """``[max B, n]`` int32, pages by row."""

    def copy_(self, other: Places) -> None:
        for x, y in zip(self, other, strict=True):
            x.copy_(y, non_blocking=True)


class Cached(NamedTuple):
    """The contents of a layer's cache for the sequences of a call."""

    keys: Store
    values: Store
    places: Places
    step: Step
    is_paged: bool
    """False if row i has page i, and no other."""

    @property
    def _pages(self) -> slice | Tensor:
        """The pages of each sequence; as a slice where that is known here: it copies nothing."""
        slots = self.step.slots
        if slots and not self.is_paged and slots == tuple(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[-1] + 1)
        used = -(-self.step.longest // self.keys.data.shape[2])
        return self.places.table[self.places.sequences[0].long(), :used].long()

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values, ``[B, G, S, D]``, as long as the longest sequence; 0 behind others."""
        pages, length = self._pages, self.step.longest
        k, v = (store.read(pages, length, dtype) for store in (self.keys, self.values))
        if min((length, *self.step.totals)) < length:
            # A sequence that has ended may have left anything there, and 0 * inf is not 0.
            behind = padding_from_lengths(self.places.sequences[1:].sum(0), length)
            k, v = (x.masked_fill(behind[:, None, :, None], 0.0) for x in (k, v))
        return k, v

    def attend(self, q: Tensor, window: tuple[int, int], scale: float) -> Tensor:
        """Attention of the call's queries, ``[B, H, S, D]``, to the pages as they are."""
        stores = self.keys, self.values
        out: Tensor = ops.paged_attention(
            q, *(store.data for store in stores), *(store.scale for store in stores),
            self.places.table, self.places.sequences, *window, scale,
        )  # fmt: skip
        return out


class Pages:
    """Which pages the rows of a paged cache have, and which are free."""

    def __init__(self, rows: int, longest: int, size: int, count: int) -> None:
        """Make as many pages of ``size`` positions as rows of up to ``longest`` may share."""
        self.table = torch.zeros(rows, -(-longest // size), dtype=torch.int32, device="cpu")
        self.of_rows: list[list[int]] = [[] for _ in range(rows)]
        self.size, self.count = size, count
        self.free = list(range(count))[::-1]

    def missing(self, name: str, step: Step, finished: Iterable[int] = ()) -> dict[int, int]:
        """How many pages each row of a step lacks; raise, for an argument, if there are fewer.

        The pages of ``finished`` rows are as good as free.
        """
        held = [0 if row in finished else len(pages) for row, pages in enumerate(self.of_rows)]
        lacks = {
            row: max(0, -(-length // self.size) - held[row])
            for row, length in zip(step.slots, step.totals, strict=True)
        }
        if sum(lacks.values()) > len(self.free) + sum(map(len, self.of_rows)) - sum(held):
            raise ValueError(
                f"{name} must fit into {self.count} pages of {self.size} positions "
                f"(total_num_pages, page_size), of all rows; got sequences of {step.totals}. "
                "Finish others first, or make a larger cache."
            )
        return lacks

    def take(self, missing: dict[int, int], finished: Iterable[int] = ()) -> None:
        """Free the pages of rows that are finished, and give others what they lack."""
        for row in finished:
            self.free += self.of_rows[row]
            self.of_rows[row] = []
        for row, number in missing.items():
            for _ in range(number):
                page = self.free.pop()
                self.table[row, len(self.of_rows[row])] = page
                self.of_rows[row].append(page)
