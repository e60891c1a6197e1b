"""Handlers that compute on values: exact ones on FP8 bytes, and ones that dequantize by intent.

Questions such as ``isnan`` or ``equal``, and attention that ``attention.py`` leaves to torch, need
the values and give ordinary results. They dequantize inside, without the warning of the fallback.
"""

from __future__ import annotations

from typing import Any

import torch

from float8lab.tensor.dispatch import implements, run_fallback
from float8lab.tensor.float8_tensor import Float8Tensor

__all__ = ["DEQUANTIZE_INSIDE"]

aten = torch.ops.aten

_NAMES = (
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_local_scalar_dense", "allclose", "equal", "isinf", "isnan",
    "eq", "ge", "gt", "le", "lt", "ne",
)  # fmt: skip


def _overloads() -> list[Any]:
    found = []
    for name in _NAMES:
        packet = getattr(aten, name, None)  # not every torch has each
        names = [] if packet is None else packet.overloads()
        found += [getattr(packet, o) for o in names if "out" not in o]
    return found


DEQUANTIZE_INSIDE = frozenset(_overloads())
"""Overloads that dequantize by intent; the table of the documentation tells them apart."""


@implements(*DEQUANTIZE_INSIDE)
def _dequantize_inside(op: Any, *args: Any, **kwargs: Any) -> Any:
    return run_fallback(Float8Tensor, op, args, kwargs, quiet=True)


@implements(aten.is_same_size.default, aten._has_same_storage_numel.default)
def _of_metadata(op: Any, a: Any, b: Any) -> Any:
    return op(*(x.qdata if isinstance(x, Float8Tensor) else x for x in (a, b)))


# The sign of an FP8 number is its highest bit.


@implements(aten.abs.default)
def _abs(op: Any, x: Float8Tensor) -> Float8Tensor:
    q = (x.qdata.view(torch.uint8) & 0x7F).view(x.qdata.dtype)
    return x.replace(qdata=q, scale=x.scale.clone(), amax=x.amax.clone())


@implements(aten.neg.default)
def _neg(op: Any, x: Float8Tensor) -> Float8Tensor:
    q = (x.qdata.view(torch.uint8) ^ 0x80).view(x.qdata.dtype)
    return x.replace(qdata=q, scale=x.scale.clone(), amax=x.amax.clone())
