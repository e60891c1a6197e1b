"""A paged key/value cache, and attention to it; ``reference/paged_attention.py`` specifies both.

They serve generation. They are functions rather than ops, and have no gradients.
"""

from __future__ import annotations

from float8lab.ops.declare import called_by_ops
from float8lab.ops.reference import paged_attention as reference

__all__ = ["has_paged_attention", "paged_attention", "write_pages_"]

_MOST_ROWS, _LARGEST_HEAD = 64, 256


def has_paged_attention(rows: int, *heads: int) -> bool:
    """Whether the kernel takes ``rows``: queries times the heads that share a key/value head.

    ``heads`` are head sizes. The result for a CPU is the same as for a GPU.
    """
    return rows <= _MOST_ROWS and all(size <= _LARGEST_HEAD for size in heads)


paged_attention = called_by_ops(reference.paged_attention, cuda="paged_attention:paged_attention")
write_pages_ = called_by_ops(reference.write_pages_, cuda="paged_attention:write_pages_")
