"""Handlers of ops that move or rearrange FP8 data without computing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.tensor.dispatch import implements, run_fallback
from float8lab.tensor.float8_tensor import Float8Tensor

__all__: list[str] = []

aten = torch.ops.aten


@implements(aten.detach.default, aten.alias.default, aten.clone.default)
def _map_each_tensor(op: Any, x: Float8Tensor, **kwargs: Any) -> Float8Tensor:
    return x.map(lambda t: op(t, **kwargs))


@implements(aten.t.default, aten.transpose.int, aten.permute.default)
def _reorder(op: Any, x: Float8Tensor, *dims: Any) -> Float8Tensor:
    # The order of the dimensions, read off a small tensor that the op is applied to.
    probe = op(torch.empty([i + 2 for i in range(x.ndim)], device="meta"), *dims)
    block = tuple(x.spec.block[size - 2] for size in probe.shape)
    return x.map(lambda t: op(t, *dims)).replace(spec=replace(x.spec, block=block))


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(op: Any, x: Float8Tensor, size: Any) -> Any:
    shape = tuple(op(torch.empty(x.shape, device="meta"), size).shape)
    if x.spec.per_tensor:
        spec = replace(x.spec, block=(-1,) * len(shape))
        ones = (1,) * len(shape)
        return Float8Tensor(op(x.qdata, size), x.scale.view(ones), x.amax.view(ones), spec, x.dtype)
    block = _block_of_view(tuple(x.shape), shape, x.spec.block)
    if block is None:
        return run_fallback(Float8Tensor, op, (x, size), {})
    spec = replace(x.spec, block=block)
    scales = spec.scale_shape(shape)
    return Float8Tensor(
        op(x.qdata, size), x.scale.reshape(scales), x.amax.reshape(scales), spec, x.dtype
    )


def _block_of_view(
    old: tuple[int, ...], new: tuple[int, ...], block: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The block after a view, if it only regroups dimensions in front that blocks do not span."""
    keep = 0  # trailing dimensions left as they are
    while keep < min(len(old), len(new)) and old[-1 - keep] == new[-1 - keep]:
        keep += 1
    front = [b for b, n in zip(block, old, strict=True)][: len(old) - keep]
    if any(b != 1 and n != 1 for b, n in zip(front, old, strict=False)):
        return None
    return (1,) * (len(new) - keep) + block[len(old) - keep :]


@implements(aten._to_copy.default)
def _to_copy(op: Any, x: Float8Tensor, *, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is not None and dtype not in HIGH_PRECISION_DTYPES:
        return run_fallback(Float8Tensor, op, (x,), {"dtype": dtype, **kwargs})
    return x.map(lambda t: op(t, **kwargs)).replace(dtype=dtype or x.dtype)


@implements(aten.copy_.default)
def _copy(op: Any, x: Any, source: Any, non_blocking: bool = False) -> Any:
    if not isinstance(x, Float8Tensor):
        return op(x, source.dequantize(), non_blocking)
    if isinstance(source, Float8Tensor) and source.spec == x.spec and source.shape == x.shape:
        for name in ("qdata", "scale", "amax"):
            op(getattr(x, name), getattr(source, name), non_blocking)
        return x
    plain = source.dequantize() if isinstance(source, Float8Tensor) else source
    return x.requantize_(plain.to(x.device).expand(x.shape))
