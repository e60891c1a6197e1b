"""Attention of Float8Tensors.  B batch, H heads, G key/value heads, S sequence, D head size.

Queries, keys and values with one scale each run the FP8 attention op, which rounds the
probabilities to e4m3 too; backward is in high precision. Masks, dropout, other blocks, heads above
``LARGEST_HEAD`` and a GPU for which there is no kernel dequantize inside what torch runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.ops import fp8_attention_backward_op, fp8_attention_op, has_fp8_attention
from float8lab.tensor.differentiation import Float8Function, once_differentiable
from float8lab.tensor.dispatch import implements, implements_whole
from float8lab.tensor.float8_tensor import Float8Tensor

__all__: list[str] = []

aten = torch.ops.aten

_COMPOSITION = 0  # of ``torch.nn.attention.SDPBackend``: products and a softmax, one by one


@implements_whole(
    F.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
    autocast=torch.get_autocast_dtype,
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    q, k, v = query, key, value
    if attn_mask is None and not dropout_p and _fit(q, k, v, enable_gqa):
        factor = q.shape[3] ** -0.5 if scale is None else scale
        if factor > 0:  # what the kernel takes
            return _Attention.run(q, k, v, is_causal, factor)
    how = (dropout_p, is_causal)
    more = {"scale": scale, "enable_gqa": enable_gqa}
    if aten._fused_sdp_choice(q, k, v, attn_mask, *how, **more) != _COMPOSITION:
        return NotImplemented  # torch's kernel, of the dequantized, with FP8 saved for backward
    tensors = tree_map_only(Float8Tensor, Float8Tensor.dequantize, (q, k, v, attn_mask))
    return aten.scaled_dot_product_attention(*tensors, *how, **more)


def _fit(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> bool:
    """Whether the FP8 op takes these operands."""
    for x in (q, k, v):
        if not isinstance(x, Float8Tensor) or not x.spec.per_tensor or x.ndim != 4:
            return False
        if x.dtype != q.dtype or x.shape[0] != q.shape[0]:
            return False
    if q.dtype not in HIGH_PRECISION_DTYPES:
        return False
    if not has_fp8_attention(q.device, q.shape[3], v.shape[3]):
        return False
    heads, groups = q.shape[1], k.shape[1]
    grouped = enable_gqa and groups and heads % groups == 0
    sizes_match = k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3] > 0
    return bool(sizes_match and (heads == groups or grouped))


class _Attention(Float8Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool, scale: float) -> Tensor:
        for x in (q, k, v):
            x._refresh()
        settings = (causal, scale)
        out, lse = fp8_attention_op(*_operands(q, k, v), *settings, q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Any) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if isinstance(dout, Float8Tensor):
            dout = dout._decode()
        gradients = fp8_attention_backward_op(dout, *_operands(q, k, v), out, lse, *ctx.settings)
        needs = ctx.needs_input_grad[:3]
        dq, dk, dv = (g if need else None for g, need in zip(gradients, needs, strict=True))
        return dq, dk, dv, None, None


def _operands(q: Any, k: Any, v: Any) -> tuple[Tensor, ...]:
    """Data and scales of q, k and v as the op takes them."""
    return (*(x.qdata for x in (q, k, v)), *(x.scale.view(1) for x in (q, k, v)))


@implements(aten._fused_sdp_choice.default)
def _choice(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Let torch choose its kernel by sizes, strides and dtype, so that no value is decoded."""

    def empty(x: Float8Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)

    args, kwargs = tree_map_only(Float8Tensor, empty, (args, kwargs))
    return op(*args, **kwargs)
