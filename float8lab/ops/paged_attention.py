"""Attention to a paged key/value cache; ``reference/paged_attention.py`` specifies the op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from float8lab.ops.declare import declare
from float8lab.ops.reference import attention
from float8lab.ops.reference import paged_attention as reference

__all__ = ["has_paged_attention", "paged_attention_op"]

_MOST_ROWS, _LARGEST_HEAD = 64, 256


def has_paged_attention(rows: int, *heads: int) -> bool:
    """Whether the kernel takes so many queries, times the heads that share a key/value head.

    ``heads`` are head sizes. A CPU answers as a GPU would.
    """
    return rows <= _MOST_ROWS and all(size <= _LARGEST_HEAD for size in heads)


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Scores, and probabilities times values, of caches whose sequences fill their pages."""
    (B, H, S, D), table = q, args[2]
    return 2 * B * H * S * table[1] * k[2] * (D + v[3])


paged_attention_op = declare(
    reference.paged_attention,
    cuda="paged_attention:paged_attention",
    outputs=lambda of: attention.empty_by_token(of.q, (*of.q.shape[:3], of.v.shape[3]), of.q.dtype),
    flops=_flops,
)
