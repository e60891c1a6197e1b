"""Attention of FP8 operands, forward and backward; ``reference/attention.py`` specifies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from float8lab.formats import E4M3
from float8lab.ops.declare import called_by_ops, capability_of, declare
from float8lab.ops.reference import attention as reference

__all__ = [
    "LARGEST_FP8_BACKWARD_HEAD", "LARGEST_HEAD", "FlashWindow", "cudnn_heads", "flash_window",
    "fp8_attention_backward_op", "fp8_attention_op", "has_fp8_attention", "has_fp8_backward",
    "has_linear_backward", "is_for_cudnn", "merge_attention_",
]  # fmt: skip

LARGEST_HEAD = 256
LARGEST_FP8_BACKWARD_HEAD = 128


def has_fp8_attention(device: torch.device, *heads: int) -> bool:
    """Whether the op needs no memory for all scores on a GPU. A CPU answers as Hopper would.

    ``heads`` are the head sizes of queries and keys, and of values.
    """
    return capability_of(device)[0] == 9 and all(0 < size <= LARGEST_HEAD for size in heads)


class FlashWindow(NamedTuple):
    """Arguments of flash attention's backward, which aligns the last query with the last key."""

    queries: int
    """The number of queries from the first one on; later queries see no key."""
    keys: int
    """The number of keys from the first one on; no query sees later keys."""
    left: int
    right: int


def flash_window(Sq: int, Sk: int, window: Sequence[int], *, packed: bool) -> FlashWindow | None:
    """Convert a window of ``fp8_attention`` to one of flash attention; None if it has none such.

    Args:
        Sq: the number of queries, of the longest sequence if ``packed``; likewise Sk of keys.
    """
    left, right, diagonal = window
    queries, keys = Sq, Sk
    if not packed:
        corner = Sk - Sq + diagonal
        queries = Sq if left < 0 else min(Sq, Sk + left - corner)
        keys = Sk if right < 0 else min(Sk, queries + corner + right)
        diagonal = corner - (keys - queries)
    elif diagonal:
        return None
    if min(queries, keys) < 1:
        return None
    left = -1 if left < 0 else left - diagonal
    right = -1 if right < 0 else right + diagonal
    # Flash attention treats a limit of the number of keys as no limit, and no limit as that number.
    is_exact = queries <= keys + 1 or left == right == -1 or 0 <= right < keys
    return FlashWindow(queries, keys, left, right) if is_exact else None


def is_for_cudnn(Sq: int, Sk: int, window: Sequence[int], *, packed: bool) -> bool:
    """Whether cuDNN's backward has this window: no limit, or causal and aligned at key 0."""
    left, right, diagonal = window
    return not packed and left < 0 and (right < 0 or (right == 0 and diagonal == Sq - Sk))


def has_fp8_backward(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether Hopper computes gradients by FP8 GEMMs, not in 16 bits from dequantized operands.

    If a query sees a single key, its gradient is the rounding error of a difference that is zero,
    so the reference computes it for one query or one key. ``dtype`` is that of a later cast.
    """
    is_e4m3 = all((dtype or x.dtype) == E4M3 for x in (q, k, v))
    has_heads = max(q.shape[3], v.shape[3]) <= LARGEST_FP8_BACKWARD_HEAD
    return is_e4m3 and has_heads and min(q.shape[2], k.shape[2]) > 1


def cudnn_heads(D: int, DV: int) -> tuple[int, int]:
    """Return head sizes, no smaller than these, that work in cuDNN's backward on Hopper."""
    if max(D, DV) <= 128:
        return D + -D % 8, DV + -DV % 8
    if D <= 192 and DV <= 128:
        return 192, 128
    size = 192 if max(D, DV) <= 192 else 256
    return size, size


def has_linear_backward(Sq: int, Sk: int, window: Sequence[int], *, packed: bool = False) -> bool:
    """Whether a GPU's backward, too, needs no memory for all scores; see ``flash_window``."""
    flash = flash_window(Sq, Sk, window, packed=packed)
    return is_for_cudnn(Sq, Sk, window, packed=packed) or flash is not None


def _outputs(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = reference.empty_by_token(of.q, (*of.q.shape[:3], of.v.shape[3]), of.out_dtype)
    lse = of.q.new_empty(of.q.shape[:3], dtype=torch.float32)
    return out, lse, torch.empty_like(lse)


def _independent_dims(of: Any) -> range:
    """Return dimensions along which attention is independent: batch, and heads if G is H."""
    first = 0 if of.cu_seqlens_q is None else 1
    return range(first, 2 if of.q.shape[1] == of.k.shape[1] else 1)


fp8_attention_op = declare(
    reference.fp8_attention,
    cuda="attention:fp8_attention",
    outputs=_outputs,
    # FLOPs of scores, and of probabilities times values; like torch's formulas, they ignore masks.
    flops=lambda q, k, v, *_, **__: 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3]),
    sharding=lambda of: [
        ((dim,) * 3, dict.fromkeys(("q", "k", "v"), dim)) for dim in _independent_dims(of)
    ],
)
fp8_attention_backward_op = declare(
    reference.fp8_attention_backward,
    cuda="attention_backward:fp8_attention_backward",
    outputs=lambda of: tuple(
        reference.empty_by_token(x, x.shape, of.dout.dtype) for x in (of.q, of.k, of.v)
    ),
    # FLOPs of recomputed scores, and of gradients of probabilities, values, queries and keys.
    flops=lambda _, q, k, v, *__, **___: 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3]),
    sharding=lambda of: [
        ((dim,) * 3, dict.fromkeys(("dout", "q", "k", "v", "out", "lse", "max_scores"), dim))
        for dim in _independent_dims(of)
    ],
)
merge_attention_ = called_by_ops(reference.merge_attention_, cuda="attention:merge_attention_")
