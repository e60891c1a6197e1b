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
    """Return a view as ``[B, H, S, D]``, or for thd as ``[1, H, T, D]``."""
    if qkv_format == "thd":
        x = x.unsqueeze(0)
    return x.permute(1, 2, 0, 3) if qkv_format == "sbhd" else x.transpose(1, 2)


def from_heads_first(x: Tensor, qkv_format: str) -> Tensor:
    """Convert ``[B, H, S, D]`` to ``[S, B, H * D]``, ``[B, S, H * D]`` or ``[T, H * D]``."""
    x = x.permute(2, 0, 1, 3) if qkv_format == "sbhd" else x.transpose(1, 2)
    return x.flatten(2).squeeze(0) if qkv_format == "thd" else x.flatten(2)


def padding_from_lengths(lengths: Tensor, size: int) -> Tensor:
    """Return a padding mask, ``[B, size]`` bool, which is True from each length on.

    >>> padding_from_lengths(torch.tensor([1, 3]), 3)
    tensor([[False,  True,  True],
            [False, False, False]])
    """
    return torch.arange(size, device=lengths.device) >= lengths.view(-1, 1)


class Sizes(NamedTuple):
    """The number of sequences of an sbhd or bshd call, and their lengths."""

    B: int
    Sq: int
    """The number of queries of each sequence."""
    Sk: int
    """The number of keys of each sequence."""


def sizes_of(query: Tensor, key: Tensor, qkv_format: str, ranks: int = 1) -> Sizes:
    """Return the sizes of a call on these tensors; for thd, B is 1, and Sq and Sk count all tokens.

    Args:
        query: in ``qkv_format``, with any dimensions after those of sequences and tokens.
        ranks: the number of context-parallel ranks that share the tokens.
    """
    if qkv_format == "thd":
        return Sizes(1, query.shape[0] * ranks, key.shape[0] * ranks)
    batch, tokens = (1, 0) if qkv_format == "sbhd" else (0, 1)
    return Sizes(query.shape[batch], query.shape[tokens] * ranks, key.shape[tokens] * ranks)


class Packed(NamedTuple):
    """The positions of the sequences in a thd tensor."""

    starts: Tensor
    """``[B]``, first token of each sequence."""
    lengths: Tensor
    """``[B]``."""
    longest: int
    cu_seqlens: Tensor | None
    """``[B + 1]``, cumulative lengths, if there are no gaps between sequences."""

    @classmethod
    def of(cls, cu_seqlens: Tensor, padded: Tensor | None, longest: int | None) -> Packed:
        """Convert cumulative lengths; ``padded`` are those that include gaps after sequences."""
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        if longest is None:
            longest = int(lengths.max()) if lengths.numel() else 0
        if padded is None or padded is cu_seqlens:
            return cls(cu_seqlens[:-1], lengths, longest, cu_seqlens)
        return cls(padded[:-1], lengths, longest, None)

    def padding(self) -> Tensor:
        """Return a mask, ``[B, longest]`` bool, which is True after the end of a sequence."""
        return padding_from_lengths(self.lengths, self.longest)

    def places(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return each token's sequence, its position there, and whether it has no sequence."""
        token = torch.arange(tokens, device=self.starts.device)
        stops = self.starts + self.lengths
        sequence = torch.bucketize(token, stops, right=True).clamp(max=stops.shape[0] - 1)
        position = token - self.starts[sequence]
        return sequence, position, (position < 0) | (position >= self.lengths[sequence])

    def shape_of_rows(self, x: Tensor) -> Tensor:
        """Return a tensor with the shape of ``unpack(x)`` but no values."""
        return x.new_empty(1).expand(self.starts.shape[0], x.shape[1], self.longest, x.shape[3])

    def unpack(self, x: Tensor) -> Tensor:
        """Convert ``[1, H, T, D]`` to ``[B, H, longest, D]``, with 0 after a sequence's end."""
        x = x[0].transpose(0, 1)
        positions = torch.arange(self.longest, device=x.device)
        index = (self.starts.view(-1, 1) + positions).clamp(max=max(x.shape[0] - 1, 0))
        if not x.shape[0]:  # indexing needs a row, and the result must keep its autograd graph
            x = F.pad(x, (0, 0, 0, 0, 0, 1))
        # Memory after a sequence's end may hold any values, and 0 * inf is not 0.
        return x[index].masked_fill(self.padding()[:, :, None, None], 0.0).transpose(1, 2)

    def pack(self, x: Tensor, tokens: int) -> Tensor:
        """Convert ``[B, H, longest, D]`` to ``[1, H, tokens, D]``; tokens of no sequence are 0."""
        heads, rows = x.shape[1], x.transpose(1, 2).flatten(2)
        # Values after a sequence's end go to an extra last row, which is cut off.
        index = self.starts.view(-1, 1) + torch.arange(self.longest, device=x.device)
        index = torch.where(self.padding(), tokens, index).view(-1)
        out = rows.new_zeros(tokens + 1, rows.shape[-1])
        out = out.index_copy(0, index.long(), rows.flatten(0, 1))[:tokens]
        return out.unflatten(1, (heads, -1)).unsqueeze(0).transpose(1, 2)
