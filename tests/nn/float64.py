"""MultiheadAttention and TransformerLayer of torch's own functions in float64, from parameters.

Every operand of a matrix product may be rounded to FP8, and then it gets noise of the size that
``docs/numerics.md`` states for its format. Noise goes where a rounding does: one draw for all the
products of a forward operand, one for both products of an output's gradient. What it does further
on, in norms, softmax, activations, residuals and gradients, is torch's and autograd's work.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Rounding(NamedTuple):
    """Signal-to-noise ratios, in dB, that casts leave; none for what is not cast."""

    forward: float | None = None
    """Of inputs and weights of linear layers."""
    gradient: float | None = None
    """Of the gradients of their outputs."""
    attention: bool = False
    """Queries, keys, values, probabilities and the output's gradient are cast likewise."""

    def of_attention(self) -> Rounding:
        return self if self.attention else Rounding()


EXACT = Rounding()


def _round(x: Tensor, sqnr: float | None) -> Tensor:
    """x with noise, which gradients pass by."""
    if sqnr is None:
        return x
    return x + (x * torch.randn_like(x) * 10 ** (-sqnr / 20)).detach()


def _round_gradient(y: Tensor, sqnr: float | None) -> Tensor:
    if sqnr is not None and y.requires_grad:
        y.register_hook(lambda dy: _round(dy, sqnr))
    return y


Parameters = dict[str, Tensor]


def _linear(x: Tensor, p: Parameters, names: list[str], rounding: Rounding) -> list[Tensor]:
    """What each of these layers makes of x, which is cast once for all of them."""
    x = _round(x, rounding.forward)
    outputs = []
    for name in names:
        y = F.linear(x, _round(p[f"{name}weight"], rounding.forward))
        bias = p.get(f"{name}bias")
        y = _round_gradient(y, rounding.gradient)
        outputs.append(y if bias is None else y + bias)
    return outputs


def _norm(x: Tensor, p: Parameters, prefix: str) -> Tensor:
    """Its input where there is no norm, RMSNorm where the norm has no bias."""
    weight, bias = p.get(f"{prefix}layer_norm_weight"), p.get(f"{prefix}layer_norm_bias")
    if weight is None:
        return x
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, 1e-5)
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _core(q: Tensor, k: Tensor, v: Tensor, causal: bool, rounding: Rounding) -> Tensor:
    """Attention of ``[B, S, H, D]``; fewer heads of keys and values are repeated."""
    q, k, v = (_round(t, rounding.forward).transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    y = _round(scores.softmax(-1), rounding.forward) @ v
    return _round_gradient(y, rounding.gradient).transpose(1, 2).flatten(2)


def attention(
    x: Tensor, encoder: Tensor | None, p: Parameters, heads: int, rounding: Rounding = EXACT,
    prefix: str = "",
) -> Tensor:  # fmt: skip
    """MultiheadAttention: causal to itself, or to all of ``encoder``."""
    normed = "layernorm_" if any(n.startswith(f"{prefix}layernorm_") for n in p) else ""
    if encoder is None:
        where = f"{prefix}{normed}qkv."
        names = [f"{where}{name}_" for name in ("query", "key", "value")]
        q, k, v = _linear(_norm(x, p, where), p, names, rounding)
    else:
        where = f"{prefix}layernorm_query." if normed else f"{prefix}query_layer."
        (q,) = _linear(_norm(x, p, where), p, [f"{where}query_"], rounding)
        names = [f"{prefix}key_value.{name}_" for name in ("key", "value")]
        k, v = _linear(encoder, p, names, rounding)
    size = q.shape[-1] // heads
    q, k, v = (t.unflatten(-1, (t.shape[-1] // size, size)) for t in (q, k, v))
    context = _core(q, k, v, encoder is None, rounding.of_attention())
    return _linear(context, p, [f"{prefix}proj."], rounding)[0]


def mlp(x: Tensor, p: Parameters, activation: str, rounding: Rounding, prefix: str) -> Tensor:
    """LayerNormMLP, gelu or swiglu."""
    (h,) = _linear(_norm(x, p, prefix), p, [f"{prefix}fc1_"], rounding)
    if activation == "swiglu":
        gate, up = h.chunk(2, -1)
        h = F.silu(gate) * up
    else:
        h = F.gelu(h, approximate="tanh")
    return _linear(h, p, [f"{prefix}fc2_"], rounding)[0]


def layer(
    x: Tensor, encoder: Tensor | None, p: Parameters, heads: int, activation: str,
    rounding: Rounding = EXACT,
) -> Tensor:  # fmt: skip
    """TransformerLayer: an encoder, or a decoder that sees ``encoder``."""
    x = x + attention(x, None, p, heads, rounding, "self_attention.")
    if encoder is not None:
        x = x + attention(x, encoder, p, heads, rounding, "inter_attention.")
    return x + mlp(x, p, activation, rounding, "layernorm_mlp.")
