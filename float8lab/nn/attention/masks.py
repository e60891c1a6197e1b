"""Masks, which say what keys a query may see.  B batch, H heads, Sq queries, Sk keys.

Query ``i`` of a sequence has the key position ``i + diagonal``. A sliding window ``(left, right)``
lets it see the keys from ``left`` before that position to ``right`` after it, where -1 means all
keys of that side; a causal mask has ``right = 0``. Padding and arbitrary masks hide further keys.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.arguments import check_choice, check_size, shown
from float8lab.nn.attention.layout import Sizes

__all__ = [
    "MASK_TYPES", "AttentionMask", "MaskArgument", "broadcasts", "canonical_mask_type",
    "check_arbitrary", "check_mask_types", "check_unused_mask", "diagonal_of", "distances",
    "make_mask", "split_padding_mask", "window_of",
]  # fmt: skip

MASK_TYPES = (
    "no_mask", "padding", "causal", "padding_causal", "causal_bottom_right",
    "padding_causal_bottom_right", "arbitrary",
)  # fmt: skip

MaskArgument = Tensor | tuple[Tensor, Tensor] | None
"""The ``attention_mask`` that callers pass: True where a position is masked out."""


def canonical_mask_type(mask_type: str, argument: str = "attn_mask_type") -> str:
    """Return the canonical spelling of a mask type: ``"padding,causal"`` is ``"padding_causal"``.

    >>> canonical_mask_type("causal,padding"), canonical_mask_type("padding_causal")
    ('padding_causal', 'padding_causal')
    """
    spelled = str(mask_type).replace(",", "_").replace("causal_padding", "padding_causal")
    if not isinstance(mask_type, str) or spelled not in MASK_TYPES:
        check_choice(argument, mask_type, MASK_TYPES)
    return spelled


def window_of(
    mask_type: str, window_size: Sequence[int] | None, argument: str = "window_size"
) -> tuple[int, int]:
    """Return the window that a mask type and a ``window_size`` imply; -1 is no limit.

    >>> window_of("causal", None), window_of("causal", (128, 128)), window_of("no_mask", (4, 2))
    ((-1, 0), (128, 0), (4, 2))
    """
    window: object = (-1, -1) if window_size is None else window_size
    if not isinstance(window, (list, tuple)) or len(window) != 2:
        kind = ValueError if isinstance(window, (list, tuple)) else TypeError
        raise kind(
            f"{argument} must be None or two integers, each -1 (no limit) or more; got "
            f"{shown(window)}. Give the number of keys to the left and to the right."
        )
    left, right = window
    if not (type(left) is type(right) is int and left >= -1 and right >= -1):
        left, right = (check_size(f"{argument}[{i}]", window[i], minimum=-1) for i in (0, 1))
    return (left, 0) if "causal" in mask_type else (left, right)


class AttentionMask(NamedTuple):
    """The mask of a call; the first lines of this file define its terms."""

    left: int = -1
    right: int = -1
    diagonal: int | Tensor = 0
    """A number, or ``[B]`` if the positions of queries differ between sequences."""
    q_padding: Tensor | None = None
    """``[B, Sq]`` bool, True where the query is padding: its output is 0."""
    kv_padding: Tensor | None = None
    """``[B, Sk]`` bool, True where the key is padding."""
    arbitrary: Tensor | None = None
    """A bool mask that broadcasts to ``[B, H, Sq, Sk]``, True where masked out."""
    pads_ends: bool = False
    """Whether padding certainly comes only after the tokens of each sequence."""

    @property
    def padded_queries(self) -> Tensor | None:
        """``q_padding`` in a shape that broadcasts to ``[B, H, Sq, D]``."""
        return None if self.q_padding is None else self.q_padding[:, None, :, None]

    @property
    def has_window(self) -> bool:
        """Whether a side is limited, as with a causal mask."""
        return self.left >= 0 or self.right >= 0

    @property
    def lets_all(self) -> bool:
        """Whether every query certainly sees every key."""
        return self.kv_padding is None and self.arbitrary is None and not self.has_window

    @property
    def lets_tokens_be_packed(self) -> bool:
        """Whether the mask stays the same if the tokens without padding are packed."""
        is_shared = self.q_padding is self.kv_padding
        if self.pads_ends:
            return is_shared or isinstance(self.diagonal, Tensor)
        return is_shared and self.left < 0 and self.right == 0

    def leaves_no_query_blind(self, Sq: int, Sk: int) -> bool:
        """Whether every query certainly sees some key, as far as numbers on the host tell."""
        if self.kv_padding is not None or self.arbitrary is not None:
            return False
        if not self.has_window:
            return True
        if isinstance(self.diagonal, Tensor):
            return False
        top, bottom = self.diagonal, self.diagonal + Sq - 1
        return (self.right < 0 or top + self.right >= 0) and (
            self.left < 0 or bottom - self.left <= Sk - 1
        )

    def is_plain_causal(self, Sq: int, Sk: int) -> bool:
        """Whether the mask is a square lower triangle and nothing else."""
        if self.kv_padding is not None or self.arbitrary is not None:
            return False
        # These are branches, since a compiled graph's sizes would make an expression symbolic.
        if isinstance(self.diagonal, Tensor) or Sq != Sk or self.diagonal != 0:
            return False
        return self.left < 0 and self.right == 0

    def allowed(self, Sq: int, Sk: int, device: torch.device) -> Tensor | None:
        """Return True where a key may be seen, to broadcast to ``[B, H, Sq, Sk]``; None for all.

        The result ignores padding of queries, whose output is zeroed instead.
        """
        conditions = []
        if self.has_window:
            distance = distances(self.diagonal, Sq, Sk, device)
            if self.right >= 0:
                conditions.append(distance >= -self.right)
            if self.left >= 0:
                conditions.append(distance <= self.left)
        if self.kv_padding is not None:
            conditions.append(~self.kv_padding[:, None, None, :])
        if self.arbitrary is not None:
            conditions.append(~self.arbitrary)
        return functools.reduce(torch.logical_and, conditions) if conditions else None


NO_MASK = AttentionMask()


def distances(diagonal: int | Tensor, Sq: int, Sk: int, device: torch.device) -> Tensor:
    """Return how far key j is before query i's own position, ``[1 or B, 1, Sq, Sk]``."""
    i = torch.arange(Sq, device=device).view(1, 1, Sq, 1)
    j = torch.arange(Sk, device=device).view(1, 1, 1, Sk)
    diagonals = diagonal.view(-1, 1, 1, 1) if isinstance(diagonal, Tensor) else diagonal
    return i + diagonals - j


def split_padding_mask(
    attention_mask: MaskArgument, attention_type: str, sizes: Sizes, name: str = "attention_mask"
) -> tuple[Tensor, Tensor]:
    """Return the padding masks ``[B, Sq]`` and ``[B, Sk]`` of an ``attention_mask``, or raise."""
    B, Sq, Sk = sizes
    if isinstance(attention_mask, Tensor) and attention_type == "self":
        masks = (attention_mask, attention_mask)
    elif isinstance(attention_mask, tuple):
        masks = attention_mask
    else:
        expected = "one bool tensor [B, 1, 1, Sq]" if attention_type == "self" else (
            "a pair of bool tensors [B, 1, 1, Sq] and [B, 1, 1, Sk]"
        )  # fmt: skip
        raise ValueError(
            f"{name} must be {expected} for attention_type={attention_type!r} and a padding "
            f"mask; got {shown(attention_mask)}. Pass it, or cu_seqlens_q and cu_seqlens_kv."
        )
    for mask, size, side in zip(masks, (Sq, Sk), ("queries", "keys"), strict=True):
        if mask.dtype != torch.bool:
            raise TypeError(
                f"{name} must be bool, True where masked out; got {mask.dtype}. "
                "Convert it with .bool()."
            )
        if not _is_padding_mask(mask, B, size):
            raise ValueError(
                f"{name} must be [B, 1, 1, {size}] for the {side} of B = {B}; got shape "
                f"{tuple(mask.shape)}. For attention over another sequence pass a pair of masks."
            )
    queries = masks[0].reshape(masks[0].shape[0], Sq)
    is_shared = masks[0] is masks[1]
    return queries, queries if is_shared else masks[1].reshape(masks[1].shape[0], Sk)


def _is_padding_mask(mask: Tensor, B: int, size: int) -> bool:
    """Whether a mask has the shape ``[B, 1, 1, size]``, or a common row for all sequences."""
    fits = mask.ndim > 1 and mask.shape[-1] == size and mask.numel() == mask.shape[0] * size
    # These are comparisons, for Dynamo does not evaluate ``in`` on symbolic sizes.
    return fits and (mask.shape[0] == 1 or mask.shape[0] == B)


def check_arbitrary(name: str, mask: MaskArgument, scores: Sequence[int]) -> Tensor:
    """Return an ``arbitrary`` mask with the four dimensions of ``scores``, or raise."""
    is_mask = isinstance(mask, Tensor) and mask.dtype == torch.bool
    if not isinstance(mask, Tensor) or not is_mask or not broadcasts(mask.shape, scores):
        raise ValueError(
            f"{name} must be a bool tensor for the mask type 'arbitrary', True where masked out; "
            f"got {shown(mask)}. Pass one that broadcasts to [B, H, Sq, Sk], {list(scores)}."
        )
    return mask.view((1,) * (4 - mask.ndim) + mask.shape)


def broadcasts(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``to``.

    >>> broadcasts((2, 1), (4, 2, 3)), broadcasts((2,), (4, 2, 3))
    (True, False)
    """
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size == 1 or size == target for size, target in pairs)


def check_mask_types(name: str, mask: MaskArgument) -> None:
    """Raise unless a mask is None, a tensor or a pair of tensors."""
    pair = mask if isinstance(mask, tuple) else (mask, mask)
    if mask is None or (len(pair) == 2 and all(isinstance(tensor, Tensor) for tensor in pair)):
        return
    raise TypeError(
        f"{name} must be None, a bool tensor, or a pair of them; got {shown(mask)}. Pass True "
        "where a position is masked out."
    )


def check_unused_mask(
    name: str, mask: Tensor | tuple[Tensor, Tensor], heads: int, sizes: Sizes
) -> None:
    """Raise if a mask that its mask type ignores has a shape that no mask type takes."""
    B, Sq, Sk = sizes
    if isinstance(mask, tuple):
        fits = _is_padding_mask(mask[0], B, Sq) and _is_padding_mask(mask[1], B, Sk)
    else:
        fits = _is_padding_mask(mask, B, Sq) or _is_padding_mask(mask, B, Sk)
        fits = fits or broadcasts(mask.shape, (B, heads, Sq, Sk))
    if not fits:
        shapes = [tuple(tensor.shape) for tensor in (mask if isinstance(mask, tuple) else [mask])]
        raise ValueError(
            f"{name} must broadcast to [B, H, Sq, Sk], {[B, heads, Sq, Sk]}, or be a padding mask "
            f"[B, 1, 1, S]; got {' and '.join(map(str, shapes))}. Leave it out: this mask type "
            "takes none."
        )


def make_mask(
    mask_type: str, window: tuple[int, int], Sq: int, Sk: int, *,
    padding: tuple[Tensor, Tensor] | None = None, arbitrary: Tensor | None = None,
    diagonal: int | Tensor | None = None, pads_ends: bool = False,
) -> AttentionMask:  # fmt: skip
    """Make the mask of a call.

    Args:
        window: the result of ``window_of``.
        padding: ``[B, Sq]`` and ``[B, Sk]``, True where padding.
        diagonal: the key position of query 0. None follows the mask type: 0 for ``causal`` and
            ``padding_causal`` (top-left corner); else the last query is at the last key
            (bottom-right corner), not counting padding.
        pads_ends: whether ``padding`` comes from lengths.
    """
    if diagonal is None:
        if mask_type in ("causal", "padding_causal"):
            diagonal = 0
        elif padding is not None and window != (-1, -1):
            diagonal = diagonal_of(padding)
        else:
            diagonal = Sk - Sq
    left, right = window
    if isinstance(diagonal, int):
        # Remove a limit that no query reaches.
        left = -1 if left >= Sq - 1 + diagonal else left
        right = -1 if right >= Sk - 1 - diagonal else right
    q_padding, kv_padding = padding if padding is not None else (None, None)
    return AttentionMask(left, right, diagonal, q_padding, kv_padding, arbitrary, pads_ends)


def diagonal_of(padding: tuple[Tensor, Tensor]) -> Tensor:
    """Return the key position of query 0, ``[B]``, such that the last query is at the last key."""
    return (~padding[1]).sum(1) - (~padding[0]).sum(1)
