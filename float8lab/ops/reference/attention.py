"""FP8 attention in plain PyTorch.  B batch, H heads, G key/value heads, S sequence, D head size.

The specification of the ops in ``attention.py``, their oracle, and their implementation on the CPU
and on a GPU where the kernel does not fit. Scores and softmax are float32. The probabilities are
rounded to e4m3 with the fixed decode scale ``P_SCALE`` (they are at most 1), the sum that
normalizes them is of the unrounded ones.

Backward is in high precision, of the dequantized operands and the unrounded probabilities: to round
the gradients of output and scores, too, would cost accuracy and, on Hopper, gain little time.

Outputs and gradients lie in memory by token, ``[B, S, H, D]``, as the layers around want them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from float8lab.formats import E4M3

__all__ = ["P_SCALE", "by_token", "empty_by_token", "fp8_attention", "fp8_attention_backward"]

P_SCALE = 2.0**-8
"""Decode scale of the softmax probabilities: e4m3 then resolves them down to 2 ** -17."""


def by_token(x: Tensor) -> Tensor:
    """``x``, ``[B, H, S, D]``, in memory as ``[B, S, H, D]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_by_token(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialized ``[B, H, S, D]``, in memory as ``[B, S, H, D]``."""
    B, H, S, D = shape
    return like.new_empty((B, S, H, D), dtype=dtype).transpose(1, 2)


def _repeat(x: Tensor, heads: int) -> Tensor:
    x = x.float()
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads that share a key/value head."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)


def _scores(
    q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, causal: bool, scale: float
) -> Tensor:
    decode = (q_scale * k_scale).view(1) * scale
    scores = q.float() @ _repeat(k, q.shape[1]).transpose(2, 3) * decode
    if causal:
        i = torch.arange(q.shape[2], device=q.device).view(-1, 1)
        scores = scores.masked_fill(torch.arange(k.shape[2], device=q.device) > i, -torch.inf)
    return scores


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    causal: bool, scale: float, out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of FP8 operands.

    Args:
        q: ``[B, H, Sq, D]`` FP8.
        k: ``[B, G, Sk, D]`` FP8, G dividing H.
        v: ``[B, G, Sk, Dv]`` FP8.
        q_scale: one element, as ``k_scale`` and ``v_scale``: decode scales.
        causal: query i sees the keys up to the i-th.

    Returns:
        ``[B, H, Sq, Dv]`` (in memory by token), and the logarithm of each query's sum of
        exponentials, ``[B, H, Sq]`` float32.
    """
    scores = _scores(q, k, q_scale, k_scale, causal, scale)
    if not scores.numel():
        out = empty_by_token(q, (*q.shape[:3], v.shape[3]), out_dtype).zero_()
        return out, scores.new_zeros(scores.shape[:3])
    largest = scores.amax(-1, keepdim=True)
    p = (scores - largest).exp()
    exp_sum = p.sum(-1, keepdim=True)
    p8 = (p / P_SCALE).to(E4M3).float()
    decode = v_scale.view(1) * P_SCALE
    out = (p8 @ _repeat(v, q.shape[1])) * (decode / exp_sum)
    return by_token(out.to(out_dtype)), (largest + exp_sum.log()).squeeze(-1)


def fp8_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor,
    v_scale: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, the rounding of the probabilities taken as the identity.

    They are in the dtype of ``dout``, and in memory by token.

    Args:
        dout: ``[B, H, Sq, Dv]`` high precision.
        out: from the forward, as ``lse``; the other arguments are the forward's own.
    """
    H, G = q.shape[1], k.shape[1]
    p = (_scores(q, k, q_scale, k_scale, causal, scale) - lse.unsqueeze(-1)).exp()
    gradient = dout.float()
    dp = gradient @ _repeat(v, H).transpose(2, 3) * v_scale.view(1)
    dv = _sum_groups(p.transpose(2, 3) @ gradient, G)
    ds = p * (dp - (out.float() * gradient).sum(-1, keepdim=True))
    dq = ds @ _repeat(k, H) * (k_scale.view(1) * scale)
    dk = _sum_groups(ds.transpose(2, 3) @ q.float(), G) * (q_scale.view(1) * scale)
    dq, dk, dv = (by_token(x.to(dout.dtype)) for x in (dq, dk, dv))
    return dq, dk, dv
