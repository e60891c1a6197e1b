"""A paged key/value cache, and attention of a few new queries to it, in plain PyTorch.

B sequences, H heads, G key/value heads, S queries of each, P positions of a page, D head size.

This file is the specification of ``ops/paged_attention.py``, its oracle, and its code on CPUs. A
sequence's keys are in the pages that its row of the table names, in order. Keys and values in FP8
have a scale for each vector of D elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

from float8lab.ops.reference.attention import by_token
from float8lab.ops.reference.blocks import quantize

__all__ = ["paged_attention", "write_pages_"]


def paged_attention(
    q: Tensor, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, table: Tensor,
    sequences: Tensor, left: int, right: int, scale: float,
) -> Tensor:  # fmt: skip
    """Compute attention to a cache that already holds the keys and values of these queries.

    Query i of a sequence stands at position ``before + i`` and sees the keys from ``left``
    positions before it to ``right`` after it. A query that sees no key, or is after the end of its
    sequence, has output 0.

    Args:
        q: ``[B, H, S, D]`` high precision, G dividing H.
        k: ``[pages, G, P, D]`` high precision or FP8.
        v: ``[pages, G, P, Dv]`` of the dtype of k.
        k_scale: ``[pages, G, P, 1]`` float32 decode scales, None in high precision.
        v_scale: the same for v.
        table: ``[rows, n]`` int32, the pages of each row's sequence.
        sequences: ``[3, B]`` int32: each sequence's row, the positions before these queries, and
            how many of the S queries it has.
        left: -1 means no limit, as for ``right``.

    Returns:
        ``[B, H, S, Dv]`` in the dtype of q, stored by token.
    """
    S = q.shape[2]
    rows, before, lengths = sequences.long()
    pages = table.long()[rows]
    keys, values = (_gathered(x, s, pages) for x, s in ((k, k_scale), (v, v_scale)))
    j = torch.arange(keys.shape[2], device=q.device)
    i = torch.arange(S, device=q.device)
    positions = before[:, None] + i
    is_cached = j < (before + lengths)[:, None]
    distance = positions[:, :, None] - j
    seen = is_cached[:, None, :] & (i < lengths[:, None])[:, :, None]
    if left >= 0:
        seen = seen & (distance <= left)
    if right >= 0:
        seen = seen & (-distance <= right)
    # Values that no sequence has written may be NaN, and 0 * NaN is not 0.
    values = values.masked_fill(~is_cached[:, None, :, None], 0.0)
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bghsd,bgjd->bghsj", grouped, keys) * scale
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    p = (scores - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)).exp()
    exp_sum = p.sum(-1, keepdim=True)
    out = torch.einsum("bghsj,bgjd->bghsd", p, values) / exp_sum.masked_fill(exp_sum == 0, 1.0)
    return by_token(out.flatten(1, 2).to(q.dtype))


def _gathered(x: Tensor, scale: Tensor | None, pages: Tensor) -> Tensor:
    """Gather the vectors of each sequence, ``[B, G, n * P, D]`` float32."""
    bytes_or_values = x if scale is None else x.view(torch.uint8)  # not every device indexes FP8
    vectors = bytes_or_values[pages].view(x.dtype).float()
    if scale is not None:
        vectors = vectors * scale[pages]
    return vectors.transpose(1, 2).flatten(2, 3)


def write_pages_(x: Tensor, data: Tensor, scale: Tensor | None, tokens: Tensor) -> None:
    """Write the vectors of a call's tokens to their pages, in place.

    Args:
        x: ``[B, G, S, D]`` high precision.
        data: ``[pages, G, P, D]``, to whose dtype the vectors are cast.
        scale: ``[pages, G, P, 1]`` float32, for the decode scales of FP8; else None.
        tokens: ``[4, T]`` int64: each token's batch and position in ``x``, its page, and its
            position in the page.
    """
    row, token, page, position = tokens
    x = x[row, :, token]  # indices on both sides of a slice: their dimension comes first
    if scale is None:
        data[page, :, position] = x.to(data.dtype)
        return
    q, q_scale, _ = quantize(x.reshape(-1, x.shape[-1]), data.dtype, (1, -1), "fp32")
    data.view(torch.uint8)[page, :, position] = q.view(torch.uint8).view(x.shape)
    scale[page, :, position] = q_scale.view(*x.shape[:-1], 1)
