"""Handlers that compute on values: exactly on FP8 bytes, or after dequantizing on purpose.

Questions such as ``isnan`` or ``equal``, ``abs``, and attention that ``attention.py`` does not
take need the values and return ordinary results. Their handlers dequantize without the warning of
the fallback.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from float8lab.tensor import dispatch
from float8lab.tensor.float8_tensor import Float8Tensor

__all__ = ["DEQUANTIZE_INSIDE"]

aten = torch.ops.aten

DEQUANTIZE_INSIDE = dispatch.overloads(
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "_local_scalar_dense", "abs", "allclose", "equal", "isinf", "isnan",
    "eq", "ge", "gt", "le", "lt", "ne",
)  # fmt: skip
"""Overloads of this torch that dequantize on purpose; a table in the documentation names them."""


@dispatch.implements(*DEQUANTIZE_INSIDE)
def _dequantize_inside(op: OpOverload, *args: object, **kwargs: object) -> object:
    return dispatch.run_fallback(Float8Tensor, op, args, kwargs, quiet=True)


@dispatch.implements(aten.is_same_size.default, aten._has_same_storage_numel.default)
def _compare_metadata(op: OpOverload, a: Tensor, b: Tensor) -> bool:
    return op(*(x.qdata if isinstance(x, Float8Tensor) else x for x in (a, b)))


# The gradients of these ops multiply by the argument, or write copies of it piece by piece. Neither
# should happen in FP8, so autograd sees the ops with dequantized arguments.
_DEQUANTIZED_COMPOSITES: dict[str, tuple[Callable[..., object], ...]] = {
    "_pad_circular.default": (F.pad,),
    "cholesky_inverse.default": (torch.cholesky_inverse, Tensor.cholesky_inverse),
    "cholesky_solve.default": (torch.cholesky_solve, Tensor.cholesky_solve),
    "linalg_lstsq.default": (torch.linalg.lstsq,),
    "linalg_pinv.atol_rtol_tensor": (torch.linalg.pinv, torch.pinverse, Tensor.pinverse),
}


def _dequantize_composite(overload: OpOverload, function: Callable[..., object]) -> None:
    @dispatch.implements_composite(function)
    def run(*args: object, **kwargs: object) -> object:
        if function is F.pad and "circular" not in (*args[2:], kwargs.get("mode")):
            return NotImplemented
        dispatch.announce(overload)
        args, kwargs = tree_map_only(Float8Tensor, Float8Tensor.dequantize, (args, kwargs))
        return function(*args, **kwargs)


for _name, _functions in _DEQUANTIZED_COMPOSITES.items():
    _overload = operator.attrgetter(_name)(aten)
    for _function in (*_functions, _overload):
        _dequantize_composite(_overload, _function)

# ``torch.tensor([x])`` calls this where torch has switched off the dispatch to tensor subclasses.
dispatch.implements_composite(Tensor.__float__)(lambda x: x._decode().item())


@dispatch.implements(aten.neg.default)
def _neg(op: OpOverload, x: Float8Tensor) -> Float8Tensor:
    # The sign of an FP8 number is its highest bit.
    q = (x.qdata.view(torch.uint8) ^ 0x80).view(x.qdata.dtype)
    return x.replace(qdata=q, scale=x.scale.clone(), amax=x.amax.clone())
