"""Attention computed row by row from its definition: the oracle of the tests, for float64."""

import torch


def visible_window(left, right, diagonal):
    """Query i is at key i + diagonal; it sees ``left`` keys before it and ``right`` after it.

    -1 means all keys of that side.
    """

    def visible(b, h, i, j):
        position = i + (diagonal[b] if isinstance(diagonal, list) else diagonal)
        return (left < 0 or j >= position - left) and (right < 0 or j <= position + right)

    return visible


def visible_pairs(lengths, left, right, diagonals):
    """Like ``visible_window``, for sequences with these numbers of queries and keys."""
    in_window = visible_window(left, right, diagonals)

    def visible(b, h, i, j):
        return i < lengths[b][0] and j < lengths[b][1] and in_window(b, h, i, j)

    return visible


def attend(
    q, k, v, visible=lambda b, h, i, j: True, *, bias=None, scale=None, softcap=0.0, sinks=None,
    dropout_factors=None, maxima=None,
):  # fmt: skip
    """``softmax(q @ k.T * scale + bias) @ v`` of ``[B, S, H, D]``; 0 for a fully masked query.

    ``sinks`` are ``[H]``. ``dropout_factors`` ``[B, H, Sq, Sk]`` multiply the probabilities. The
    largest score of each query of head h is appended to ``maxima[h]``.
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
                visible_keys = [j for j in range(Sk) if visible(b, h, i, j)]
                if not visible_keys:
                    heads.append(v.new_zeros(v.shape[-1]))
                    continue
                scores = k[b, visible_keys, g] @ q[b, i, h] * scale
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                if bias is not None:
                    scores = scores + bias[b, h, i, visible_keys]
                if maxima is not None:
                    maxima[h].append(scores.max().item())
                sink_term = 0.0 if sinks is None else (sinks[h] - scores.max()).exp()
                p = (scores - scores.max()).exp()
                p = p / (p.sum() + sink_term)
                heads.append(
                    (p if dropout_factors is None else p * dropout_factors[b, h, i, visible_keys])
                    @ v[b, visible_keys, g]
                )
            rows.append(torch.cat(heads))
    zero = 0 * (q.sum() + k.sum() + v.sum())  # gives every input a gradient, even without queries
    out = torch.stack(rows).view(B, Sq, -1) if rows else q.new_zeros(B, Sq, H * v.shape[-1])
    return out + zero


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def gradients(y, inputs, dy):
    return torch.autograd.grad(y, inputs, dy.to(y.dtype), allow_unused=True)


def assert_close(actual, expected, dtype):
    """Asserts errors within the rounding of a few dozen operations in ``dtype``."""
    bound = 32 * torch.finfo(dtype).eps
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        error = (a.double() - e.double()).abs().max().item() if a.numel() else 0.0
        assert error <= bound * max(1.0, e.abs().max().item() if e.numel() else 0.0), error
