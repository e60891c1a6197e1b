"""The contents of a key/value cache: keys and values in pages, and the places of sequences.

B sequences, G key/value heads, S positions, P positions of a page, D head size.

A table lists the pages of each row's sequence, in order. A cache that is not paged has a single
page for each row, with all positions of the row.
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
    """The sequences of a call, in order, as ``InferenceParams.pre_step`` has placed them."""

    slots: tuple[int, ...]
    """The row of the cache for each sequence."""
    before: tuple[int, ...]
    """The number of tokens that were in the cache before this call."""
    lengths: tuple[int, ...]
    """The number of tokens of this call."""

    @property
    def totals(self) -> list[int]:
        """The number of each sequence's tokens in the cache after this call."""
        return [b + n for b, n in zip(self.before, self.lengths, strict=True)]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence after this call."""
        return max((0, *self.totals))  # a graph would break at the argument ``default``


class Store:
    """Keys or values of a layer, ``[pages, G, P, D]``; in FP8 with a scale for each vector."""

    def __init__(self, like: Tensor, pages: int, size: int, dtype: torch.dtype | None) -> None:
        shape = (pages, like.shape[1], size, like.shape[3])
        self.dtype = dtype or like.dtype
        self.scale: Tensor | None = None
        with torch.inference_mode(False):  # calls outside inference mode may write these tensors
            self.data = torch.zeros(shape, dtype=self.dtype, device=like.device)
            if self.dtype in FP8_DTYPES:
                self.scale = torch.ones(*shape[:3], 1, dtype=torch.float32, device=like.device)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scale is None else self.scale.nbytes)

    @property
    def _words(self) -> Tensor:
        """The data in a dtype that every device can index."""
        return self.data if self.scale is None else self.data.view(torch.uint8)

    def write(self, places: Places, x: Tensor) -> None:
        """Write the head vectors of a call's tokens, ``[B, G, S, D]``, to their places."""
        ops.write_pages_(x, self.data, self.scale, places.tokens)

    def read(self, pages: slice | Tensor, length: int, dtype: torch.dtype) -> Tensor:
        """Return the first positions of sequences, ``[B, G, length, D]``.

        ``pages`` are ``[B, n]``, or a slice if each sequence has a single page.
        """

        def join(x: Tensor) -> Tensor:
            x = x[pages]
            return (x.transpose(1, 2).flatten(2, 3) if x.ndim == 5 else x)[:, :, :length]

        data = join(self._words)
        if self.scale is None:
            return data.to(dtype)
        flat = data.reshape(-1, data.shape[-1]).view(self.dtype)
        scale = join(self.scale).reshape(-1, 1)
        return ops.value_of_op("dequantize", (flat, scale), dtype, (1, -1)).view(data.shape)

    def copy_pages(self, source: Tensor, target: Tensor) -> None:
        """Copy pages ``source`` to pages ``target``; both may include the same pages."""
        self._words[target] = self._words[source]
        if self.scale is not None:
            self.scale[target] = self.scale[source]


class Places(NamedTuple):
    """The places in the cache of the sequences and tokens of a step.

    A CUDA graph of a step reads these tensors; later steps of the same sizes are copied to them.
    """

    tokens: Tensor
    """``[4, T]`` int64: each token's row and position in the call, its page, its position there."""
    sequences: Tensor
    """``[3, B]`` int32: each sequence's row of the table, tokens before the call, new tokens."""
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
    """False if row i has page i and no other page."""

    @property
    def _pages(self) -> slice | Tensor:
        """The pages of each sequence; a slice, which copies nothing, if the host knows them."""
        slots = self.step.slots
        if slots and not self.is_paged and slots == tuple(range(slots[0], slots[0] + len(slots))):
            return slice(slots[0], slots[-1] + 1)
        used = -(-self.step.longest // self.keys.data.shape[2])
        return self.places.table[self.places.sequences[0].long(), :used].long()

    def read(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values, ``[B, G, S, D]``, padded with 0 to the longest sequence."""
        pages, length = self._pages, self.step.longest
        k, v = (store.read(pages, length, dtype) for store in (self.keys, self.values))
        if min((length, *self.step.totals)) < length:
            # A sequence that has ended may have left any values here, and 0 * inf is not 0.
            padding = padding_from_lengths(self.places.sequences[1:].sum(0), length)
            k, v = (x.masked_fill(padding[:, None, :, None], 0.0) for x in (k, v))
        return k, v

    def attend(self, q: Tensor, window: tuple[int, int], scale: float) -> Tensor:
        """Compute the attention of a call's queries, ``[B, H, S, D]``, directly on the pages."""
        return ops.paged_attention(
            q, self.keys.data, self.values.data, self.keys.scale, self.values.scale,
            self.places.table, self.places.sequences, *window, scale,
        )  # fmt: skip


class Pages:
    """Which pages the rows of a paged cache have, and which pages are free."""

    def __init__(self, rows: int, longest: int, size: int, count: int) -> None:
        """Make ``count`` free pages of ``size`` positions, for rows of up to ``longest``."""
        self.table = torch.zeros(rows, -(-longest // size), dtype=torch.int32, device="cpu")
        self.of_rows: list[list[int]] = [[] for _ in range(rows)]
        self.size, self.count = size, count
        self.free = list(range(count))[::-1]

    def missing(self, name: str, step: Step, finished: Iterable[int] = ()) -> dict[int, int]:
        """Return how many pages each row of a step lacks; raise if too few pages are free.

        The pages of ``finished`` rows count as free. ``name`` is the argument in the message.
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
        """Free the pages of finished rows, and give the rows of ``missing`` their pages."""
        for row in finished:
            self.free += self.of_rows[row]
            self.of_rows[row] = []
        for row, number in missing.items():
            for _ in range(number):
                page = self.free.pop()
                self.table[row, len(self.of_rows[row])] = page
                self.of_rows[row].append(page)
