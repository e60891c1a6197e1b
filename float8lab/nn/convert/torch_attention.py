"""The FP8 class of ``torch.nn.MultiheadAttention``.  N batch, L queries, S keys, E features.

The projections of query, key and value are FP8 GEMMs on rows of the layer's own parameters. The
output projection is a separate converted layer, which the attention calls. The attention between
the projections runs in high precision, by torch's functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from float8lab.nn.convert.other_linear import OtherLinear, register_linear
from float8lab.nn.precision import Call, Precision
from float8lab.recipes.region import STATE

__all__ = ["Float8TorchAttention"]


class Float8TorchAttention(OtherLinear, nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` whose projections run in FP8.

    If query, key and value are the same tensor, a single GEMM with all of ``in_proj_weight``
    projects them; if only key and value are, a GEMM with their rows of it projects both. In high
    precision, and with nested tensors, torch's own forward runs, also its fused path.
    """

    original = nn.MultiheadAttention
    gemm_names = ("", "_key", "_value")
    _fp8_key: Precision
    _fp8_value: Precision
    in_proj_weight: Tensor | None  # type: ignore[assignment]
    in_proj_bias: Tensor | None  # type: ignore[assignment]

    @staticmethod
    def matrix(layer: nn.Module) -> Tensor:
        """Return the packed weight ``[3 E, E]``, or the query's weight, ``[E, E]``."""
        packed: Tensor | None = layer.in_proj_weight  # type: ignore[assignment]
        return layer.q_proj_weight if packed is None else packed  # type: ignore[return-value]

    def forward(  # type: ignore[override]  # the signature is that of torch.nn.MultiheadAttention
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention; torch's documentation of ``MultiheadAttention`` has the arguments."""
        inputs, masks = (query, key, value), (attn_mask, key_padding_mask)
        # Torch's forward runs the calls that FP8 does not take, and raises the errors.
        fits = self._takes(inputs, masks, is_causal)
        call = self._fp8.begin(query, self.matrix(self), training=self.training) if fits else None
        if not fits or (call is None and not STATE.autocast.calibrating):
            return nn.MultiheadAttention.forward(
                self, query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal,
            )  # fmt: skip
        q, k, v = self._heads(self._project(inputs, call))
        # The hint ``is_causal`` replaces the mask if nothing else needs a mask.
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else self._merged_mask(masks, query.dtype, k)
        attended, weights = self._attend((q, k, v), mask, is_causal, need_weights)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        attended = attended.transpose(1, 2)
        if query.dim() == 2:
            attended, weights = attended[0], None if weights is None else weights[0]
        elif not self.batch_first:
            attended = attended.transpose(0, 1)
        return self.out_proj(attended.flatten(-2)), weights

    def _takes(
        self, inputs: Sequence[Tensor], masks: Sequence[Tensor | None], is_causal: bool
    ) -> bool:
        """Whether the arguments fit together and are not nested; the hint needs ``attn_mask``."""
        attn_mask, padding = masks
        dims = inputs[0].dim()
        if dims not in (2, 3) or any(x.is_nested or x.dim() != dims for x in inputs):
            return False
        (N, L, _), (_, S, _), _ = shapes = [tuple(self._batch_first(x).shape) for x in inputs]
        if shapes != [(N, L, self.embed_dim), (N, S, self.kdim), (N, S, self.vdim)]:
            return False
        dtypes = [mask.dtype for mask in masks if mask is not None]
        are_masks = all(dtype.is_floating_point or dtype == torch.bool for dtype in dtypes)
        if not are_masks or (is_causal and attn_mask is None):
            return False
        if padding is not None and padding.shape != (N, S)[3 - dims :]:
            return False
        return attn_mask is None or attn_mask.shape in ((L, S), (N * self.num_heads, L, S))

    def _project(self, inputs: Sequence[Tensor], call: Call | None) -> Sequence[Tensor]:
        """Project query, key and value; ``call`` belongs to the query's GEMM."""
        query, key, value = inputs
        packed, bias, E = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if packed is not None and query is key and key is value:
            return self._gemm(self._fp8, query, packed, bias, call).chunk(3, -1)
        key_call = self._fp8_key.begin(key, self.matrix(self), training=self.training)
        if packed is not None and key is value:
            w_q, w_kv = packed.split([E, 2 * E])
            b_q, b_kv = (None, None) if bias is None else bias.split([E, 2 * E])
            q = self._gemm(self._fp8, query, w_q, b_q, call)
            return q, *self._gemm(self._fp8_key, key, w_kv, b_kv, key_call).chunk(2, -1)
        value_call = self._fp8_value.begin(value, self.matrix(self), training=self.training)
        separate = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        weights = separate if packed is None else packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        precisions = self._fp8, self._fp8_key, self._fp8_value
        return [*map(self._gemm, precisions, inputs, weights, biases, (call, key_call, value_call))]

    def _batch_first(self, x: Tensor) -> Tensor:
        """Return an input as ``[N, L, E]``."""
        if x.dim() == 2:
            return x.unsqueeze(0)
        return x if self.batch_first else x.transpose(0, 1)

    def _heads(self, projected: Sequence[Tensor]) -> list[Tensor]:
        """Return the heads ``[N, H, L, D]`` of query, key and value, with the layer's own keys."""
        q, k, v = map(self._batch_first, projected)
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], 1)
        if self.add_zero_attn:
            k, v = (functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return [x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v)]

    def _merged_mask(
        self, masks: Sequence[Tensor | None], dtype: torch.dtype, k: Tensor
    ) -> Tensor | None:
        """Return the sum of both masks, to be added to the scores of all keys ``k``."""
        # Both become numbers, -inf where they are True. Torch warns if they have two dtypes.
        to_numbers, (attn_mask, padding) = functional._canonical_mask, masks
        mask_dtype = None if attn_mask is None else attn_mask.dtype
        padding = to_numbers(padding, "key_padding_mask", mask_dtype, "attn_mask", dtype)
        mask = to_numbers(attn_mask, "attn_mask", None, "", dtype)
        if mask is not None and mask.dim() == 3:
            mask = mask.unflatten(0, (k.shape[0], self.num_heads))
        if padding is not None:
            padding = padding.view(k.shape[0], 1, 1, padding.shape[-1])
            mask = padding if mask is None else mask + padding
        # The layer's own keys are not masked.
        return None if mask is None else functional.pad(mask, (0, k.shape[2] - mask.shape[-1]))

    def _attend(
        self, heads: Sequence[Tensor], mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the weighted values, ``[N, H, L, D]``, and their weights, ``[N, H, L, S]``."""
        q, k, v = heads
        dropout = self.dropout if self.training else 0.0
        mask = None if mask is None else mask.to(q.dtype)
        if not need_weights:
            return functional.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
        scores = (q * math.sqrt(1.0 / q.shape[-1])) @ k.mT
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = functional.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights


register_linear("torch.nn.modules.activation.MultiheadAttention", lambda: Float8TorchAttention)
