"""Memory formats of attention: sbhd, bshd, thd, and heads first inside.

S sequence, B batch, H heads, D head size, T tokens of all sequences together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "QKV_FORMATS", "Packed", "Sizes", "from_heads_first", "padding_from_lengths",
    "sizes_of", "to_heads_first",
]  # fmt: skip

QKV_FORMATS = ("sbhd", "bshd", "thd")


def to_heads_first(x: Tensor, qkv_format: str) -> Tensor:
    """A view as ``[B, H, S, D]``; of thd, ``[1, H, T, D]``."""
    if qkv_format == "thd":
        x = x.unsqueeze(0)
    return x.permute(1, 2, 0, 3) if qkv_format == "sbhd" else x.transpose(1, 2)


def from_heads_first(x: Tensor, qkv_format: str) -> Tensor:
    """``[B, H, S, D]`` as ``[S, B, H * D]`` or ``[B, S, H * D]``; for thd as ``[T, H * D]``."""
    x = x.permute(2, 0, 1, 3) if qkv_format == "sbhd" else x.transpose(1, 2)
    return x.flatten(2).squeeze(0) if qkv_format == "thd" else x.flatten(2)


def padding_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """``[B, size]`` bool, True from each length on.

    >>> padding_from_lengths(torch.tensor([1, 3]), 3)
    tensor([[False,  True,  True],
            [False, False, False]])
    """
    return torch.arange(size, device=lengths.device) >= lengths.view(-1, 1)


class Sizes(NamedTuple):
    """How many sequences a call of sbhd or bshd has, and how long they are."""

    B: int
    Sq: int
    """Queries of each."""
    Sk: int
    """Keys of each."""


def sizes_of(query: Tensor, key: Tensor, qkv_format: str, ranks: int = 1) -> Sizes:
    """The sizes of a call on these tensors; of thd, B is 1 and the others count all tokens.

    Args:
        query: in ``qkv_format``, with any dimensions behind those of sequences and tokens.
        ranks: how many context-parallel ranks share the tokens.
    """
    if qkv_format == "thd":
        return Sizes(1, query.shape[0] * ranks, key.shape[0] * ranks)
    batch, tokens = (1, 0) if qkv_format == "sbhd" else (0, 1)
    return Sizes(query.shape[batch], query.shape[tokens] * ranks, key.shape[tokens] * ranks)


class Packed(NamedTuple):
    """Where the sequences of a thd tensor lie."""

    starts: Tensor
    """``[B]``, first token of each sequence."""
    lengths: Tensor
    """``[B]``."""
    longest: int
    cu_seqlens: Tensor | None
    """``[B + 1]``, cumulative lengths, if each sequence starts behind the one before it."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, padded: Tensor | None, longest: int | None) -> Packed:
        """Make it from cumulative lengths; ``padded`` has those of sequences with gaps between."""
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        if longest is None:
            longest = int(lengths.max()) if lengths.numel() else 0
        if padded is None or padded is cu_seqlens:
            return cls(cu_seqlens[:-1], lengths, longest, cu_seqlens)
        return cls(padded[:-1], lengths, longest, None)

    def padding(self) -> Tensor:
        """``[B, longest]`` bool, True behind the end of a sequence."""
        return padding_from_lengths(self.lengths, self.longest)

    def places(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Each token's sequence, its position there, and whether it is of none, ``[tokens]``."""
        token = torch.arange(tokens, device=self.starts.device)
        stops = self.starts + self.lengths
        sequence = torch.bucketize(token, stops, right=True).clamp(max=stops.shape[0] - 1)
        position = token - self.starts[sequence]
        return sequence, position, (position < 0) | (position >= self.lengths[sequence])

    def shape_of_rows(self, x: Tensor) -> Tensor:
        """A tensor of the shape of ``unpack(x)``, for questions that need no values."""
        return x.new_empty(1).expand(self.starts.shape[0], x.shape[1], self.longest, x.shape[3])

    def unpack(self, x: Tensor) -> Tensor:
        """``[1, H, T, D]`` as ``[B, H, longest, D]``, 0 behind a sequence's end."""
        x = x[0].transpose(0, 1)
        positions = torch.arange(self.longest, device=x.device)
        index = (self.starts.view(-1, 1) + positions).clamp(max=max(x.shape[0] - 1, 0))
        if not x.shape[0]:  # a row for the indices; a result without a graph has no backward
            x = F.pad(x, (0, 0, 0, 0, 0, 1))
        # There may be anything, and 0 * inf is not 0.
        return x[index].masked_fill(self.padding()[:, :, None, None], 0.0).transpose(1, 2)

    def pack(self, x: Tensor, tokens: int) -> Tensor:
        """``[B, H, longest, D]`` as ``[1, H, tokens, D]``; tokens of no sequence are 0."""
        heads, rows = x.shape[1], x.transpose(1, 2).flatten(2)
        # Behind a sequence's end everything goes to one row too many, which is cut off.
        index = self.starts.view(-1, 1) + torch.arange(self.longest, device=x.device)
        index = torch.where(self.padding(), tokens, index).view(-1)
        out = rows.new_zeros(tokens + 1, rows.shape[-1])
        out = out.index_copy(0, index.long(), rows.flatten(0, 1))[:tokens]
        return out.unflatten(1, (heads, -1)).unsqueeze(0).transpose(1, 2)
