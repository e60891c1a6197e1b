"""Attention of FP8 operands, forward and backward; ``reference/attention.py`` specifies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.ops.declare import capability_of, declare
from float8lab.ops.reference import attention as reference

__all__ = ["LARGEST_HEAD", "fp8_attention_backward_op", "fp8_attention_op", "has_fp8_attention"]

LARGEST_HEAD = 128


def has_fp8_attention(device: torch.device, *heads: int) -> bool:
    """Whether the op does without a GPU's memory for all scores. A CPU answers as Hopper would.

    ``heads`` are head sizes, of queries and keys and of values.
    """
    return capability_of(device)[0] == 9 and all(0 < size <= LARGEST_HEAD for size in heads)


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Scores, and probabilities times values; like torch's formulas without regard to masks."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def _flops_backward(
    dout: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Scores, recomputed, and the gradients of probabilities, values, queries and keys."""
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


def _outputs(of: Any) -> tuple[Tensor, Tensor]:
    out = reference.empty_by_token(of.q, (*of.q.shape[:3], of.v.shape[3]), of.out_dtype)
    return out, of.q.new_empty(of.q.shape[:3], dtype=torch.float32)


def _gradients(of: Any) -> tuple[Tensor, ...]:
    return tuple(reference.empty_by_token(x, x.shape, of.dout.dtype) for x in (of.q, of.k, of.v))


def _whole_sequences(of: Any) -> range:
    """Dimensions along which sequences are attended to on their own: batch, and equal heads."""
    return range(2 if of.q.shape[1] == of.k.shape[1] else 1)


fp8_attention_op = declare(
    reference.fp8_attention,
    cuda="attention:fp8_attention",
    outputs=_outputs,
    flops=_flops,
    sharding=lambda of: [
        ((dim, dim), dict.fromkeys(("q", "k", "v"), dim)) for dim in _whole_sequences(of)
    ],
)
fp8_attention_backward_op = declare(
    reference.fp8_attention_backward,
    cuda="attention:fp8_attention_backward",
    outputs=_gradients,
    flops=_flops_backward,
    sharding=lambda of: [
        ((dim,) * 3, dict.fromkeys(("dout", "q", "k", "v", "out", "lse"), dim))
        for dim in _whole_sequences(of)
    ],
)
