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
    """Whether the op does without a GPU's memory for all scores. A CPU answers as Hopper would.

    ``heads`` are head sizes, of queries and keys and of values.
    """
    return capability_of(device)[0] == 9 and all(0 < size <= LARGEST_HEAD for size in heads)


class FlashWindow(NamedTuple):
    """The arguments of flash attention's backward, which aligns the last query and key."""

    queries: int
    """So many from the first on; those behind them see no key."""
    keys: int
    """So many from the first on; no query sees those behind them."""
    left: int
    right: int


def flash_window(Sq: int, Sk: int, window: Sequence[int], *, packed: bool) -> FlashWindow | None:
    """The window of ``reference.fp8_attention`` as flash attention has it; None if it has it not.

    Args:
        Sq: queries, of the longest sequence if they are ``packed``; as Sk, the keys.
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
    # It takes a limit that is as large as the number of keys for none, and none for that number.
    is_exact = queries <= keys + 1 or left == right == -1 or 0 <= right < keys
    return FlashWindow(queries, keys, left, right) if is_exact else None


def is_for_cudnn(Sq: int, Sk: int, window: Sequence[int], *, packed: bool) -> bool:
    """Whether cuDNN's backward has the window: none, or a causal one aligned at the first key."""
    left, right, diagonal = window
    return not packed and left < 0 and (right < 0 or (right == 0 and diagonal == Sq - Sk))


def has_fp8_backward(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether Hopper computes gradients by FP8 GEMMs, not in 16 bits on dequantized operands.

    Where a query sees one key alone, its gradient is the rounding of a difference that is zero. So
    a single query, or key, is left to the reference. ``dtype`` is that of a cast to come.
    """
    is_e4m3 = all((dtype or x.dtype) == E4M3 for x in (q, k, v))
    has_heads = max(q.shape[3], v.shape[3]) <= LARGEST_FP8_BACKWARD_HEAD
    return is_e4m3 and has_heads and min(q.shape[2], k.shape[2]) > 1


def cudnn_heads(D: int, DV: int) -> tuple[int, int]:
    """Head sizes, at least these, that cuDNN's backward has been seen to take on Hopper."""
    if max(D, DV) <= 128:
        return D + -D % 8, DV + -DV % 8
    if D <= 192 and DV <= 128:
        return 192, 128
    size = 192 if max(D, DV) <= 192 else 256
    return size, size


def has_linear_backward(Sq: int, Sk: int, window: Sequence[int], *, packed: bool = False) -> bool:
    """Whether a GPU's backward, too, does without memory for all scores; as in ``flash_window``."""
    of_flash = flash_window(Sq, Sk, window, packed=packed)
    return is_for_cudnn(Sq, Sk, window, packed=packed) or of_flash is not None


def _outputs(of: Any) -> tuple[Tensor, Tensor, Tensor]:
    out = reference.empty_by_token(of.q, (*of.q.shape[:3], of.v.shape[3]), of.out_dtype)
    lse = of.q.new_empty(of.q.shape[:3], dtype=torch.float32)
    return out, lse, torch.empty_like(lse)


def _whole_sequences(of: Any) -> range:
    """Dimensions along which sequences are attended to on their own: batch, and equal heads."""
    first = 0 if of.cu_seqlens_q is None else 1
    return range(first, 2 if of.q.shape[1] == of.k.shape[1] else 1)


fp8_attention_op = declare(
    reference.fp8_attention,
    cuda="attention:fp8_attention",
    outputs=_outputs,
    # Scores, and probabilities times values; like torch's formulas without regard to masks.
    flops=lambda q, k, v, *_, **__: 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3]),
    sharding=lambda of: [
        ((dim,) * 3, dict.fromkeys(("q", "k", "v"), dim)) for dim in _whole_sequences(of)
    ],
)
fp8_attention_backward_op = declare(
    reference.fp8_attention_backward,
    cuda="attention_backward:fp8_attention_backward",
    outputs=lambda of: tuple(
        reference.empty_by_token(x, x.shape, of.dout.dtype) for x in (of.q, of.k, of.v)
    ),
    # Scores, recomputed, and the gradients of probabilities, values, queries and keys.
    flops=lambda _, q, k, v, *__, **___: 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3]),
    sharding=lambda of: [
        ((dim,) * 3, dict.fromkeys(("dout", "q", "k", "v", "out", "lse", "max_scores"), dim))
        for dim in _whole_sequences(of)
    ],
)
merge_attention_ = called_by_ops(reference.merge_attention_, cuda="attention:merge_attention_")
