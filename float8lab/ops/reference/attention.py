"""FP8 attention in plain PyTorch.  B batch, H heads, G key/value heads, S sequence, D head size.

This file is the specification of the ops in ``attention.py``, their oracle, and their code on CPUs
and on GPUs without a kernel. Scores and softmax are float32. The probabilities are rounded to e4m3
with the fixed decode scale ``P_SCALE`` (they are at most 1); the sum that normalizes them is of the
unrounded probabilities.

The backward is in high precision, from dequantized operands and unrounded probabilities. For heads
of up to 128, Hopper's kernels also round the probabilities and the output's gradient (which has a
scale for each query) to e4m3, and the scores' gradient to float16: within 24 dB of this reference.

Outputs and gradients are stored by token, ``[B, S, H, D]``, as the surrounding layers want them.
If tokens were packed, outputs and their gradients have the tokens in their places before packing:
``token_q`` and ``token_k`` have the number of the token in each packed row, followed by the bitwise
complements of the numbers of all other tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from float8lab.formats import E4M3

__all__ = [
    "P_SCALE", "by_token", "empty_by_token", "fp8_attention", "fp8_attention_backward",
    "merge_attention_", "pack_tokens", "unpack_tokens",
]  # fmt: skip

P_SCALE = 2.0**-8
"""Decode scale of the softmax probabilities: e4m3 then resolves them down to 2 ** -17."""


def by_token(x: Tensor) -> Tensor:
    """Return ``x``, ``[B, H, S, D]``, stored as ``[B, S, H, D]``."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def empty_by_token(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate ``[B, H, S, D]``, stored as ``[B, S, H, D]``."""
    B, H, S, D = shape
    return like.new_empty((B, S, H, D), dtype=dtype).transpose(1, 2)


def pack_tokens(x: Tensor, token: Tensor | None) -> Tensor:
    """Return ``x``, ``[1, H, T, D]``, in the order of packed tokens, if tokens are packed."""
    if token is None:
        return x
    return x.transpose(1, 2).index_select(1, torch.maximum(token, ~token)).transpose(1, 2)


def unpack_tokens(x: Tensor, token: Tensor | None) -> Tensor:
    """Undo ``pack_tokens``."""
    if token is None:
        return x
    order = torch.maximum(token, ~token).long()
    tokens = x.transpose(1, 2)
    return torch.empty_like(tokens).index_copy_(1, order, tokens).transpose(1, 2)


def _repeat(x: Tensor, heads: int) -> Tensor:
    x = x.float()
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum over the query heads that share a key/value head."""
    return x if x.shape[1] == groups else x.unflatten(1, (groups, -1)).sum(2)


def _visible(q: Tensor, k: Tensor, window: Sequence[int | torch.SymInt]) -> Tensor | None:
    """Return which keys each query sees, ``[Sq, Sk]`` bool; None for all keys."""
    left, right, diagonal = map(int, window)
    if left < 0 and right < 0:
        return None
    Sq, Sk = q.shape[2], k.shape[2]
    position = torch.arange(Sq, device=q.device).view(-1, 1) + Sk - Sq + diagonal
    distance = torch.arange(Sk, device=q.device) - position
    seen = distance <= right if right >= 0 else torch.ones_like(distance, dtype=torch.bool)
    return seen & (distance >= -left) if left >= 0 else seen


def _sequences(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the queries and the keys of each packed sequence."""
    spans = (itertools.pairwise(cu.tolist()) for cu in (cu_seqlens_q, cu_seqlens_k))
    for queries, keys in zip(*spans, strict=True):
        yield slice(*queries), slice(*keys)


def _scores(
    q: Tensor, k: Tensor, q_scale: Tensor, k_scale: Tensor, scale: float, seen: Tensor | None
) -> Tensor:
    decode = (q_scale * k_scale).view(1) * scale
    scores = q.float() @ _repeat(k, q.shape[1]).transpose(2, 3) * decode
    return scores if seen is None else scores.masked_fill(~seen, -torch.inf)


def fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor, v_scale: Tensor,
    window: Sequence[int | torch.SymInt], scale: float, out_dtype: torch.dtype,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    token_q: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute attention of FP8 operands.

    With the window ``(left, right, diagonal)``, query i stands at key ``i + Sk - Sq + diagonal``.
    It sees the keys from ``left`` before this key to ``right`` after it; -1 means no limit. If
    ``diagonal`` is 0, the last query stands at the last key. A causal mask is ``(-1, 0, 0)``; with
    the diagonal ``Sq - Sk`` it is aligned at the first query and key.

    Args:
        q: ``[B, H, Sq, D]`` FP8.
        k: ``[B, G, Sk, D]`` FP8, G dividing H.
        v: ``[B, G, Sk, Dv]`` FP8.
        q_scale: a decode scale of one element, like ``k_scale`` and ``v_scale``.
        window: see above.
        cu_seqlens_q: cumulative lengths of packed sequences of queries, ``[sequences + 1]`` int32
            from 0 on; B is 1 then. A sequence only sees its own keys, and Sq, Sk and the positions
            above are those in the sequence. Tokens after the last sequence belong to none.
        cu_seqlens_k: the same for keys and values; both or neither are None.
        token_q: ``[Sq]`` int32, the tokens of queries that were packed; None if none were.

    Returns:
        The output ``[B, H, Sq, Dv]``, stored by token; the logarithm of each query's sum of
        exponentials and its largest score, ``[B, H, Sq]`` float32. They are 0, -inf and -inf for a
        query that sees no key.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        results = _blind(q, v, out_dtype)
        for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
            operands = q[:, :, queries], k[:, :, keys], v[:, :, keys], q_scale, k_scale, v_scale
            outputs = fp8_attention(*operands, window, scale, out_dtype)
            for x, output in zip(results, outputs, strict=True):
                x[:, :, queries] = output
        return unpack_tokens(results[0], token_q), *results[1:]
    scores = _scores(q, k, q_scale, k_scale, scale, _visible(q, k, window))
    if not scores.numel():
        return _blind(q, v, out_dtype)
    max_scores = scores.amax(-1)
    largest = _finite(max_scores).unsqueeze(-1)
    p = (scores - largest).exp()
    exp_sum = p.sum(-1, keepdim=True)
    p8 = (p / P_SCALE).to(E4M3).float()
    decode = v_scale.view(1) * P_SCALE / exp_sum
    out = (p8 @ _repeat(v, q.shape[1])) * decode.masked_fill(exp_sum == 0, 0.0)
    return by_token(out.to(out_dtype)), (largest + exp_sum.log()).squeeze(-1), max_scores


def _blind(q: Tensor, v: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of queries that see no key."""
    out = empty_by_token(q, (*q.shape[:3], v.shape[3]), out_dtype).zero_()
    lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
    return out, lse, lse.clone()


def _finite(x: Tensor) -> Tensor:
    """Return largest scores, or logarithms of sums, with 0 where there is no score."""
    return x.masked_fill(x == -torch.inf, 0.0)


def fp8_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, q_scale: Tensor, k_scale: Tensor,
    v_scale: Tensor, out: Tensor, lse: Tensor, max_scores: Tensor,
    window: Sequence[int | torch.SymInt], scale: float, *,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | torch.SymInt = 0, max_seqlen_k: int | torch.SymInt = 0,
    token_q: Tensor | None = None, token_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute gradients of q, k and v, as if rounding the probabilities were the identity.

    The gradients have the dtype of ``dout``, and are stored by token.

    Args:
        dout: ``[B, H, Sq, Dv]`` high precision.
        out: from the forward, like ``lse`` and ``max_scores``, by which Hopper's kernel scales its
            probabilities. If several calls split the keys, ``out`` and ``lse`` are of all keys, and
            ``max_scores`` is of the keys of this call. Other arguments are those of the forward.
        max_seqlen_q: the most queries of a sequence, or more, where ``cu_seqlens_q`` is given.
        max_seqlen_k: the same for keys.
        token_k: ``[Sk]`` int32, like ``token_q`` of the forward.
    """
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        dout, out = pack_tokens(dout, token_q), pack_tokens(out, token_q)
        grads = [empty_by_token(x, x.shape, dout.dtype).zero_() for x in (q, k, v)]
        scales = q_scale, k_scale, v_scale
        for queries, keys in _sequences(cu_seqlens_q, cu_seqlens_k):
            gradients = fp8_attention_backward(
                dout[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys], *scales,
                out[:, :, queries], lse[:, :, queries], max_scores[:, :, queries], window, scale,
            )  # fmt: skip
            for x, rows, gradient in zip(grads, (queries, keys, keys), gradients, strict=True):
                x[:, :, rows] = gradient
        dq, dk, dv = map(unpack_tokens, grads, (token_q, token_k, token_k))
        return dq, dk, dv
    H, G = q.shape[1], k.shape[1]
    scores = _scores(q, k, q_scale, k_scale, scale, _visible(q, k, window))
    p = (scores - _finite(lse).unsqueeze(-1)).exp()
    gradient = dout.float()
    dp = gradient @ _repeat(v, H).transpose(2, 3) * v_scale.view(1)
    dv = _sum_groups(p.transpose(2, 3) @ gradient, G)
    ds = p * (dp - (out.float() * gradient).sum(-1, keepdim=True))
    dq = ds @ _repeat(k, H) * (k_scale.view(1) * scale)
    dk = _sum_groups(ds.transpose(2, 3) @ q.float(), G) * (q_scale.view(1) * scale)
    dq, dk, dv = (by_token(x.to(dout.dtype)) for x in (dq, dk, dv))
    return dq, dk, dv


def merge_attention_(out: Tensor, lse: Tensor, seen: Tensor, seen_lse: Tensor) -> None:
    """Merge the output ``seen`` of queries for other keys into ``out``, in place.

    Outputs ``[B, H, S, D]`` are given with the logarithms of sums of exponentials, ``[B, H, S]``.
    """
    weight = torch.sigmoid(seen_lse - lse).unsqueeze(-1)
    out.copy_(torch.lerp(out.to(lse.dtype), seen.to(lse.dtype), weight))
    lse.copy_(torch.logaddexp(lse, seen_lse))
