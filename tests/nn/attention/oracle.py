"""Attention in float64, written out from the definition: the oracle of the tests."""

import torch


def visible_window(left, right, diagonal):
    """Query i stands at key i + diagonal and sees ``left`` back and ``right`` ahead, -1: all."""

    def visible(b, h, i, j):
        own = i + (diagonal[b] if isinstance(diagonal, list) else diagonal)
        return (left < 0 or j >= own - left) and (right < 0 or j <= own + right)

    return visible


def visible_pairs(lengths, left, right, diagonals):
    """As ``visible_window``, of sequences with these numbers of queries and keys."""
    inside = visible_window(left, right, diagonals)

    def visible(b, h, i, j):
        return i < lengths[b][0] and j < lengths[b][1] and inside(b, h, i, j)

    return visible


def attend(
    q, k, v, visible=lambda b, h, i, j: True, *, bias=None, scale=None, softcap=0.0, sinks=None,
    kept=None, maxima=None,
):  # fmt: skip
    """``softmax(q @ k.T * scale + bias) @ v`` of ``[B, S, H, D]``; 0 where nothing is visible.

    ``sinks`` are ``[H]``, ``kept`` factors of the probabilities ``[B, H, Sq, Sk]``; the largest
    scores of head h go to ``maxima[h]``.
    """
    B, Sq, H, D = q.shape
    Sk, G = k.shape[1:3]
    scale = D**-0.5 if scale is None else scale
    rows = []
    for b in range(B):
        for i in range(Sq):
            heads = []
            for h in range(H):
                g = h // (H // G)
                seen = [j for j in range(Sk) if visible(b, h, i, j)]
                if not seen:
                    heads.append(v.new_zeros(v.shape[-1]))
                    continue
                scores = k[b, seen, g] @ q[b, i, h] * scale
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                if bias is not None:
                    scores = scores + bias[b, h, i, seen]
                if maxima is not None:
                    maxima[h].append(scores.max().item())
                sum_of_others = 0.0 if sinks is None else (sinks[h] - scores.max()).exp()
                p = (scores - scores.max()).exp()
                p = p / (p.sum() + sum_of_others)
                heads.append((p if kept is None else p * kept[b, h, i, seen]) @ v[b, seen, g])
            rows.append(torch.cat(heads))
    used = 0 * (q.sum() + k.sum() + v.sum())  # a gradient, also where nothing is computed
    out = torch.stack(rows).view(B, Sq, -1) if rows else q.new_zeros(B, Sq, H * v.shape[-1])
    return out + used


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def gradients(y, inputs, dy):
    return torch.autograd.grad(y, inputs, dy.to(y.dtype), allow_unused=True)


def assert_close(actual, expected, dtype):
    """Within the rounding of a few dozen operations in ``dtype``."""
    bound = 32 * torch.finfo(dtype).eps
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        error = (a.double() - e.double()).abs().max().item() if a.numel() else 0.0
        assert error <= bound * max(1.0, e.abs().max().item() if e.numel() else 0.0), error
