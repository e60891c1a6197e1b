"""Attention of FP8 operands, forward and backward; ``reference/attention.py`` specifies them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.ops._register import register
from float8lab.ops.gemm import capability_of
from float8lab.ops.reference import attention as reference

__all__ = ["LARGEST_HEAD", "fp8_attention_backward_op", "fp8_attention_op", "has_fp8_attention"]

LARGEST_HEAD = 128


def has_fp8_attention(device: torch.device, *heads: int) -> bool:
    """Whether the op does without a GPU's memory for all scores. A CPU answers as Hopper would.

    Args:
        device: of the operands.
        heads: head sizes, of queries and keys and of values.
    """
    hopper = device.type != "cuda" or capability_of(device)[0] == 9
    return hopper and all(0 < size <= LARGEST_HEAD for size in heads)


def _fake_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    causal: bool,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    out = reference.empty_by_token(q, (*q.shape[:3], v.shape[3]), out_dtype)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (reference.empty_by_token(x, x.shape, dout.dtype) for x in (q, k, v))
    return dq, dk, dv


def _flops(q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any) -> int:
    """Scores, and probabilities times values; like torch's formulas without regard to masks."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + v[3])


def _flops_backward(
    dout: Any, q: Sequence[int], k: Sequence[int], v: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """Scores again, and the gradients of probabilities, values, queries and keys."""
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * v[3])


_OPERANDS = "Tensor q, Tensor k, Tensor v, Tensor q_scale, Tensor k_scale, Tensor v_scale"

fp8_attention_op = register(
    f"fp8_attention({_OPERANDS}, bool causal, float scale, ScalarType out_dtype)"
    " -> (Tensor, Tensor)",
    cuda="attention:fp8_attention",
    reference=reference.fp8_attention,
    fake=_fake_attention,
    flops=_flops,
)
fp8_attention_backward_op = register(
    f"fp8_attention_backward(Tensor dout, {_OPERANDS}, Tensor out, Tensor lse,"
    " bool causal, float scale) -> (Tensor, Tensor, Tensor)",
    cuda="attention:fp8_attention_backward",
    reference=reference.fp8_attention_backward,
    fake=_fake_attention_backward,
    flops=_flops_backward,
)
