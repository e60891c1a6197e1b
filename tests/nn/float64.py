"""MultiheadAttention and TransformerLayer in float64, built of torch's functions from parameters.

An operand of a GEMM that the module rounds to FP8 gets noise here, of the size that
``docs/numerics.md`` states for its format. The noise has one draw for a forward operand, which all
its GEMMs share, and one draw for an output's gradient, which both its GEMMs share. Norms, softmax,
activations, residuals and gradients propagate the noise through torch's functions and autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Rounding(NamedTuple):
    """Signal-to-noise ratios in dB after a cast; ``None`` where nothing is cast."""

    forward: float | None = None
    """The ratio for inputs and weights of linear layers."""
    gradient: float | None = None
    """The ratio for the gradients of the outputs of linear layers."""
    attention: bool = False
    """Attention casts queries, keys, values, probabilities and the output's gradient, too."""

    def of_attention(self) -> Rounding:
        return self if self.attention else Rounding()


EXACT = Rounding()


def _round(x: Tensor, sqnr: float | None) -> Tensor:
    """Adds noise to x; the noise takes no part in the gradient."""
    if sqnr is None:
        return x
    return x + (x * torch.randn_like(x) * 10 ** (-sqnr / 20)).detach()


def _round_gradient(y: Tensor, sqnr: float | None) -> Tensor:
    if sqnr is not None and y.requires_grad:
        y.register_hook(lambda dy: _round(dy, sqnr))
    return y


Parameters = dict[str, Tensor]


def _linear(x: Tensor, p: Parameters, names: list[str], rounding: Rounding) -> list[Tensor]:
    """The output of each named linear layer for the same x, which is cast once for all of them."""
    x = _round(x, rounding.forward)
    outputs = []
    for name in names:
        y = F.linear(x, _round(p[f"{name}weight"], rounding.forward))
        bias = p.get(f"{name}bias")
        y = _round_gradient(y, rounding.gradient)
        outputs.append(y if bias is None else y + bias)
    return outputs


def _norm(x: Tensor, p: Parameters, prefix: str) -> Tensor:
    """The norm of x: RMSNorm if the norm has no bias. Without a norm it returns x."""
    weight, bias = p.get(f"{prefix}layer_norm_weight"), p.get(f"{prefix}layer_norm_bias")
    if weight is None:
        return x
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, 1e-5)
    return F.layer_norm(x, weight.shape, weight, bias, 1e-5)


def _core(q: Tensor, k: Tensor, v: Tensor, causal: bool, rounding: Rounding) -> Tensor:
    """Attention of ``[B, S, H, D]``; heads of keys and values are repeated if they are fewer."""
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
    """MultiheadAttention: causal self-attention, or attention to all of ``encoder``."""
    normed = "layernorm_" if any(n.startswith(f"{prefix}layernorm_") for n in p) else ""
    if encoder is None:
        layer_prefix = f"{prefix}{normed}qkv."
        names = [f"{layer_prefix}{name}_" for name in ("query", "key", "value")]
        q, k, v = _linear(_norm(x, p, layer_prefix), p, names, rounding)
    else:
        layer_prefix = f"{prefix}layernorm_query." if normed else f"{prefix}query_layer."
        (q,) = _linear(_norm(x, p, layer_prefix), p, [f"{layer_prefix}query_"], rounding)
        names = [f"{prefix}key_value.{name}_" for name in ("key", "value")]
        k, v = _linear(encoder, p, names, rounding)
    size = q.shape[-1] // heads
    q, k, v = (t.unflatten(-1, (t.shape[-1] // size, size)) for t in (q, k, v))
    context = _core(q, k, v, encoder is None, rounding.of_attention())
    return _linear(context, p, [f"{prefix}proj."], rounding)[0]


def mlp(x: Tensor, p: Parameters, activation: str, rounding: Rounding, prefix: str) -> Tensor:
    """LayerNormMLP with a gelu or swiglu activation."""
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
    """TransformerLayer: an encoder layer, or a decoder layer that attends to ``encoder``."""
    x = x + attention(x, None, p, heads, rounding, "self_attention.")
    if encoder is not None:
        x = x + attention(x, encoder, p, heads, rounding, "inter_attention.")
    return x + mlp(x, p, activation, rounding, "layernorm_mlp.")
