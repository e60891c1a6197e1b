"""Handlers that copy, move or allocate: to, clone, copy_, fill_, empty_like, pin_memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from float8lab.formats import DEQUANTIZED_DTYPES
from float8lab.tensor.dispatch import check_size, implements, overloads
from float8lab.tensor.float8_tensor import Float8Tensor, decoded
from float8lab.tensor.views import cut

__all__: list[str] = []

aten = torch.ops.aten


@implements(aten.clone.default, aten._to_copy.default)
def _to_copy(
    op: OpOverload, x: Float8Tensor, *, dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None, **kwargs: object,
) -> object:  # fmt: skip
    if dtype is not None and dtype not in DEQUANTIZED_DTYPES:
        return NotImplemented
    # The scales keep their strides: GEMMs want the scales of 1xB blocks stored by column.
    q, scale = op(x.qdata, memory_format=memory_format, **kwargs), op(x.scale, **kwargs)
    return x._make(q, scale, op(x.amax, **kwargs), x.spec, dtype or x.dtype)


@implements(aten._pin_memory.default)
def _pin_memory(op: OpOverload, x: Float8Tensor, *args: object, **kwargs: object) -> Float8Tensor:
    return x.map(lambda t: op(t, *args, **kwargs))


@implements(aten.is_pinned.default)
def _is_pinned(op: OpOverload, x: Float8Tensor, *args: object, **kwargs: object) -> bool:
    return all(op(t, *args, **kwargs) for t in (x.qdata, x.scale, x.amax))


@implements(aten.record_stream.default)
def _record_stream(op: OpOverload, x: Float8Tensor, stream: torch.Stream) -> None:
    for t in (x.qdata, x.scale, x.amax):
        op(t, stream)


@implements(aten.copy_.default)
def _copy(op: OpOverload, x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(x, Float8Tensor):
        return op(x, decoded(source), non_blocking)
    if not isinstance(source, Float8Tensor) or (source.spec, source.shape) != (x.spec, x.shape):
        value = decoded(source).to(device=x.device, dtype=x.dtype)
        return x.requantize_(value.expand(x.shape))
    if x._window is None:
        for name in ("qdata", "scale", "amax"):
            op(getattr(x, name), getattr(source, name), non_blocking)
        return x
    value = decoded(source).to(device=x.device, dtype=x.dtype)
    # Where blocks allow, the scales and bytes of the source are kept.
    elements = cut(source, (1,) * x.ndim)
    x._window.write(value, elements.scale, elements.amax)
    x._refresh()
    return x


@implements(
    *overloads("normal_", "uniform_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *overloads("random_", "fill_", "zero_"),
    aten.bernoulli_.float,
)
def _overwrite(op: OpOverload, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    args = tuple(decoded(a) if isinstance(a, Tensor) else a for a in args)
    if not isinstance(x, Float8Tensor):
        return op(x, *args, **kwargs)
    return x.requantize_(op(torch.zeros(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs))


@implements(aten.empty_like.default)
def _empty_like(
    op: OpOverload, x: Float8Tensor, *, dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None, **kwargs: object,
) -> Tensor:  # fmt: skip
    # With a memory format, return an ordinary tensor: torch's own functions and gradients allocate
    # buffers this way. In C++ ``1 - x`` is ``empty_like(x, preserve).fill_(1).sub_(x)``.
    if memory_format is not None or (dtype is not None and dtype not in DEQUANTIZED_DTYPES):
        return _plain_like(op, x, dtype=dtype, memory_format=memory_format, **kwargs)
    kwargs["layout"] = None  # strided, as all Float8Tensors are
    q, scale, amax = (op(t, **kwargs) for t in (x.qdata, x.scale, x.amax))
    scale, amax = torch.ones_like(scale), torch.zeros_like(amax)
    return x._make(q, scale, amax, x.spec, dtype or x.dtype)


@implements(aten.new_empty.default, aten.new_zeros.default)
def _new_empty(
    op: OpOverload, x: Float8Tensor, size: Sequence[int], *, dtype: torch.dtype | None = None,
    **kwargs: object,
) -> object:  # fmt: skip
    if dtype is not None and dtype not in DEQUANTIZED_DTYPES:
        return op(x.qdata, size, dtype=dtype, **kwargs)
    spec = x.spec.expand(len(size))
    scale = aten.new_ones.default(x.scale, spec.scale_shape(tuple(size)), **kwargs)
    amax = torch.zeros_like(scale)
    return x._make(op(x.qdata, size, **kwargs), scale, amax, spec, dtype or x.dtype)


@implements(
    *overloads("zeros_like", "ones_like", "full_like", "new_ones", "new_full", "new_empty_strided"),
    aten.rand_like.default,
    aten.randn_like.default,
    aten.randint_like.default,
    aten.randint_like.low_dtype,
)
def _plain_like(
    op: OpOverload, x: Float8Tensor, *args: object, dtype: torch.dtype | None = None,
    **kwargs: object,
) -> Tensor:  # fmt: skip
    """Return an ordinary tensor: it is mostly an optimizer's state, which would suffer in FP8."""
    return op(x.qdata, *args, dtype=dtype or x.dtype, **kwargs)


@implements(aten.resize_.default)
def _resize(op: OpOverload, x: Float8Tensor, size: Sequence[int], **kwargs: object) -> Float8Tensor:
    check_size(op, x, size)
    return x


@implements(
    *overloads("set_", "resize_as_", "as_strided_", "t_", "transpose_", "swapdims_", "swapaxes_"),
    *overloads("squeeze_", "unsqueeze_"),
)
def _refuse(op: OpOverload, *args: object, **kwargs: object) -> object:
    raise NotImplementedError(
        f"{op} must not change the memory or the geometry of a Float8Tensor in place: its scales "
        "belong to them. Use the op that returns a new tensor."
    )
