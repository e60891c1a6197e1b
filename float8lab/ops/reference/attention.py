"""FP8 attention in plain PyTorch.  B batch, H heads, G key/value heads, S sequence, D head size.

The specification of the ops in ``attention.py``, their oracle, and for now their implementation on
CPU and CUDA. Scores and softmax are float32. The probabilities are rounded to e4m3 with the fixed
decode scale ``P_SCALE`` (they are at most 1), the sum that normalizes them is of the unrounded
ones. In backward the gradient of the scores stays float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab.formats import E4M3

__all__ = ["P_SCALE", "fp8_attention", "fp8_attention_backward"]

P_SCALE = 2.0**-8
"""Decode scale of the softmax probabilities: e4m3 then resolves them down to 2 ** -17."""


def _round_p(p: Tensor) -> Tensor:
    """Values in [0, 1] as e4m3 holds them under ``P_SCALE``, times ``1 / P_SCALE``.

    In backward rounding can take them above 1, and far above e4m3's largest value torch 2.11 casts
    to NaN.
    """
    return (p.clamp(max=1.0) / P_SCALE).to(E4M3).float()


def _repeat(x: Tensor, heads: int) -> Tensor:
    x = x.float()
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads that share a key/value head."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)


def _scores(
    q: Tensor,
    k: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    bias: Tensor | None,
    allowed: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    decode = (q_scale * k_scale).view(1) * scale
    scores = q.float() @ _repeat(k, q.shape[1]).transpose(2, 3) * decode
    if bias is not None:
        scores = scores + bias
    if causal:
        i = torch.arange(q.shape[2], device=q.device).view(-1, 1)
        future = torch.arange(k.shape[2], device=q.device) > i
        scores = scores.masked_fill(future, -torch.inf)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    bias: Tensor | None,
    allowed: Tensor | None,
    keep: Tensor | None,
    causal: bool,
    scale: float,
    dropout: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Attention of FP8 operands.

    Args:
        q: ``[B, H, Sq, D]`` FP8.
        k: ``[B, G, Sk, D]`` FP8, G dividing H.
        v: ``[B, G, Sk, Dv]`` FP8.
        q_scale: one element, as ``k_scale`` and ``v_scale``: decode scales.
        k_scale: of ``k``.
        v_scale: of ``v``.
        bias: added to the scaled scores, broadcasts to ``[B, H, Sq, Sk]``.
        allowed: bool, broadcasts likewise, True where a key is seen; every query sees one.
        keep: ``[B, H, Sq, Sk]`` bool, probabilities that dropout keeps.
        causal: query i sees the keys up to the i-th.
        scale: of the scores.
        dropout: the kept probabilities are divided by ``1 - dropout``.
        out_dtype: of the output.

    Returns:
        ``[B, H, Sq, Dv]``, and the logarithm of each query's sum of exponentials, ``[B, H, Sq]``
        float32.
    """
    scores = _scores(q, k, q_scale, k_scale, bias, allowed, causal, scale)
    if not scores.numel():
        return q.new_zeros((*q.shape[:3], v.shape[3]), dtype=out_dtype), scores.new_zeros(
            scores.shape[:3]
        )
    largest = scores.amax(-1, keepdim=True)
    p = (scores - largest).exp()
    total = p.sum(-1, keepdim=True)
    p8 = _round_p(p)
    if keep is not None:
        p8 = p8 * keep
    decode = v_scale.view(1) * P_SCALE / (1.0 - dropout)
    out = (p8 @ _repeat(v, q.shape[1])) * (decode / total)
    return out.to(out_dtype).contiguous(), (largest + total.log()).squeeze(-1)


def fp8_attention_backward(
    dout: Tensor,
    dout_scale: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    bias: Tensor | None,
    allowed: Tensor | None,
    keep: Tensor | None,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    scale: float,
    dropout: float,
    out_dtype: torch.dtype,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of ``fp8_attention``.

    Args:
        dout: ``[B, H, Sq, Dv]`` FP8, its decode scale in ``dout_scale``.
        dout_scale: one element.
        q: this and all up to ``keep`` as the forward had them.
        k: likewise.
        v: likewise.
        q_scale: likewise.
        k_scale: likewise.
        v_scale: likewise.
        bias: likewise.
        allowed: likewise.
        keep: likewise.
        lse: from the forward.
        delta: ``[B, H, Sq]`` float32, each query's sum of output times its gradient.
        causal: as in the forward, like ``scale`` and ``dropout``.
        scale: likewise.
        dropout: likewise.
        out_dtype: of the gradients of q, k, v.
        wants_bias: return the gradient of the bias.

    Returns:
        Gradients of q, k, v, and ``[B, H, Sq, Sk]`` float32 of the bias (empty if not wanted).
    """
    H, G = q.shape[1], k.shape[1]
    scores = _scores(q, k, q_scale, k_scale, bias, allowed, causal, scale)
    p = (scores - lse.unsqueeze(-1)).exp()
    dv = _round_p(p) * P_SCALE
    dp = dout.float() @ _repeat(v, H).transpose(2, 3) * (dout_scale * v_scale).view(1)
    if keep is not None:
        kept = keep / (1.0 - dropout)
        dv, dp = dv * kept, dp * kept
    dv = _sum_groups(dv.transpose(2, 3) @ dout.float(), G) * dout_scale.view(1)
    ds = p * (dp - delta.unsqueeze(-1))
    dq = ds @ _repeat(k, H) * (k_scale.view(1) * scale)
    dk = _sum_groups(ds.transpose(2, 3) @ q.float(), G) * (q_scale.view(1) * scale)
    dbias = ds if wants_bias else ds.new_empty(0)
    return dq.to(out_dtype), dk.to(out_dtype), dv.to(out_dtype), dbias
