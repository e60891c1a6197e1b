"""Attention of Float8Tensors.  B batch, H heads, G key/value heads, S sequence, D head size.

Queries, keys and values with one scale each run the FP8 attention op, which also rounds the
probabilities to e4m3, and its backward. Masks, dropout, other blocks, heads above ``LARGEST_HEAD``
and GPUs without a kernel dequantize inside the op that torch runs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.ops import fp8_attention_backward_op, fp8_attention_op, has_fp8_attention
from float8lab.tensor.differentiation import AutogradContext, Float8Function, once_differentiable
from float8lab.tensor.dispatch import implements, implements_composite
from float8lab.tensor.float8_tensor import Float8Tensor, decoded

__all__: list[str] = []

aten = torch.ops.aten

_COMPOSITION = 0  # the backend of ``torch.nn.attention.SDPBackend`` that runs separate GEMMs


@implements_composite(
    F.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
    autocast=torch.get_autocast_dtype,
)
def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None,
    enable_gqa: bool = False,
) -> object:  # fmt: skip
    q, k, v = query, key, value
    if attn_mask is None and not dropout_p and _takes(q, k, v, enable_gqa):
        factor = q.shape[3] ** -0.5 if scale is None else scale
        if factor > 0:  # the kernel takes no other factor
            # Torch's causal mask aligns the first query with the first key.
            window = (-1, 0, q.shape[2] - k.shape[2]) if is_causal else (-1, -1, 0)
            return _Attention.run(q, k, v, window, factor)
    arguments = {
        "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa
    }  # fmt: skip
    if aten._fused_sdp_choice(q, k, v, attn_mask, **arguments) != _COMPOSITION:
        return NotImplemented  # torch's kernel runs on dequantized tensors, and saves FP8 ones
    tensors = tree_map_only(Float8Tensor, Float8Tensor.dequantize, (q, k, v, attn_mask))
    return aten.scaled_dot_product_attention(*tensors, **arguments)


def _takes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether the FP8 op takes these operands: ``[B, H, S, D]``, each stored with one scale."""
    stored = [x for x in (q, k, v) if isinstance(x, Float8Tensor) and x.spec.per_tensor]
    kinds = {(x.ndim, x.dtype, x.shape[:1]) for x in stored}
    if len(stored) < 3 or len(kinds) > 1 or q.ndim != 4 or q.dtype not in HIGH_PRECISION_DTYPES:
        return False
    if k.shape[:3] != v.shape[:3] or not q.shape[3] == k.shape[3] > 0:
        return False
    heads, groups = q.shape[1], k.shape[1]
    fits = heads == groups or (enable_gqa and groups > 0 and heads % groups == 0)
    return fits and has_fp8_attention(q.device, q.shape[3], v.shape[3])


class _Attention(Float8Function):
    @staticmethod
    def forward(
        ctx: AutogradContext, q: Float8Tensor, k: Float8Tensor, v: Float8Tensor,
        window: tuple[int, int, int], scale: float,
    ) -> Tensor:  # fmt: skip
        for x in (q, k, v):
            x._refresh()
        outputs = fp8_attention_op(*_operands(q, k, v), window, scale, q.dtype)
        ctx.save_for_backward(q, k, v, *outputs)
        ctx.settings = window, scale
        return outputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *outputs = ctx.saved_tensors
        saved, needs = (*_operands(q, k, v), *outputs), ctx.needs_input_grad[:3]
        gradients = fp8_attention_backward_op(decoded(dout), *saved, *ctx.settings)
        return *[g if need else None for g, need in zip(gradients, needs, strict=True)], None, None


def _operands(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the data and scales of q, k and v as the op takes them."""
    quantized = [x for x in tensors if isinstance(x, Float8Tensor)]
    return (*(x.qdata for x in quantized), *(x.scale.view(1) for x in quantized))


@implements(aten._fused_sdp_choice.default)
def _choice(op: OpOverload, *args: object, **kwargs: object) -> object:
    """Let torch choose its kernel by sizes, strides and dtype, so that no value is decoded."""

    def empty(x: Float8Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    args, kwargs = tree_map_only(Float8Tensor, empty, (args, kwargs))
    return op(*args, **kwargs)
