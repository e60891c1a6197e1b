"""Memory formats of attention: sbhd, bshd, thd, and heads first inside.

S sequence, B batch, H heads, D head size, T tokens of all sequences together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.arguments import check_choice, check_tensor, has_values, shown
from float8lab.nn.attention.masks import padding_from_lengths

__all__ = [
    "QKV_FORMATS",
    "Packed",
    "check_format",
    "check_lengths",
    "from_heads_first",
    "to_heads_first",
]

QKV_FORMATS = ("sbhd", "bshd", "thd")
_LENGTHS = (torch.int32, torch.int64)


def check_format(name: str, qkv_format: str) -> None:
    """Raise unless the format is known."""
    check_choice(name, qkv_format, QKV_FORMATS)


def check_lengths(name: str, cu_seqlens: Any, *, why: str, tokens: int | None = None) -> None:
    """Raise unless ``cu_seqlens`` are cumulative lengths, which ``why`` needs.

    Their values are looked at on a CPU only: they are to lie in ``tokens`` tokens.
    """
    if cu_seqlens is None:
        raise ValueError(
            f"{name} must be given for {why}; got None. Pass the cumulative lengths of the "
            "sequences, [B + 1]."
        )
    check_tensor(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or not cu_seqlens.shape[0] or cu_seqlens.dtype not in _LENGTHS:
        raise ValueError(
            f"{name} must be [B + 1] int32 or int64, cumulative lengths from 0 on; got "
            f"{shown(cu_seqlens)}. Begin with 0, and add up the lengths."
        )
    if has_values(cu_seqlens):
        values = cu_seqlens.tolist()
        most = values[-1] if tokens is None else tokens
        if values != sorted(values) or values[0] < 0 or values[-1] > most:
            limit = "" if tokens is None else f", {tokens} at most"
            raise ValueError(
                f"{name} must be cumulative lengths, none less than the one before{limit}; got "
                f"{shown(values)}. Begin with 0, and add up the lengths."
            )


def to_heads_first(x: Tensor, qkv_format: str) -> Tensor:
    """A view of an sbhd or bshd tensor as ``[B, H, S, D]``."""
    return x.permute(1, 2, 0, 3) if qkv_format == "sbhd" else x.transpose(1, 2)


def from_heads_first(x: Tensor, qkv_format: str) -> Tensor:
    """``[B, H, S, D]`` as ``[S, B, H * D]`` or ``[B, S, H * D]``."""
    x = x.permute(2, 0, 1, 3) if qkv_format == "sbhd" else x.transpose(1, 2)
    return x.flatten(2)


class Packed(NamedTuple):
    """Where the sequences of a thd tensor lie."""

    starts: Tensor
    """``[B]``, first token of each sequence."""
    lengths: Tensor
    """``[B]``."""
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, padded: Tensor | None, longest: int | None) -> Packed:
        """Make it from cumulative lengths; ``padded`` has those of sequences with gaps between."""
        lengths = cu_seqlens[1:] - cu_seqlens[:-1]
        if longest is None:
            longest = int(lengths.max()) if lengths.numel() else 0
        return cls((cu_seqlens if padded is None else padded)[:-1], lengths, longest)

    def padding(self) -> Tensor:
        """``[B, longest]`` bool, True behind the end of a sequence."""
        return padding_from_lengths(self.lengths, self.longest)

    def unpack(self, x: Tensor) -> Tensor:
        """``[T, H, D]`` as ``[B, H, longest, D]``; values behind a sequence's end are arbitrary."""
        positions = torch.arange(self.longest, device=x.device)
        index = (self.starts.view(-1, 1) + positions).clamp(max=max(x.shape[0] - 1, 0))
        if not x.shape[0]:
            return x.new_zeros(index.shape[0], x.shape[1], self.longest, x.shape[2])
        return x[index].transpose(1, 2)

    def pack(self, x: Tensor, tokens: int) -> Tensor:
        """``[B, H, longest, D]`` as ``[tokens, H * D]``; tokens of no sequence are 0."""
        rows = x.transpose(1, 2).flatten(2)
        positions = torch.arange(self.longest, device=x.device)
        # Behind a sequence's end everything goes to one row too many, which is cut off.
        index = self.starts.view(-1, 1) + positions
        index = torch.where(self.padding(), tokens, index).view(-1)
        out = rows.new_zeros(tokens + 1, rows.shape[-1])
        return out.index_copy(0, index.long(), rows.flatten(0, 1))[:tokens]
