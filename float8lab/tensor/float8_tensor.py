"""Float8Tensor: a torch.Tensor that is stored in FP8."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from float8lab.formats import E4M3, HIGH_PRECISION_DTYPES, Float8Spec
from float8lab.ops import cast_op, dequantize_op, quantize_op
from float8lab.tensor.dispatch import run_fallback, table

__all__ = ["Float8Tensor", "quantize"]


class Float8Tensor(Tensor):
    """A tensor of ``dtype`` stored as FP8 data and scales: ``x ~= qdata.float() * scale``.

    Attributes:
        qdata: the FP8 data, same shape as the tensor.
        scale: float32 decode scale of each block; one size per dimension, 1 where a block spans it.
        amax: largest absolute value of each block before quantization; same shape as ``scale``.
        spec: FP8 format, block shape (one size per dimension) and scale rule.
    """

    qdata: Tensor
    scale: Tensor
    amax: Tensor  # type: ignore[assignment]  # hides the method; torch.amax(x) reduces
    spec: Float8Spec

    @staticmethod
    def __new__(
        cls, qdata: Tensor, scale: Tensor, amax: Tensor, spec: Float8Spec, dtype: torch.dtype
    ) -> Float8Tensor:
        wrapper: Float8Tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            qdata.shape,
            strides=qdata.stride(),
            storage_offset=qdata.storage_offset(),
            dtype=dtype,
            device=qdata.device,
            requires_grad=False,
        )
        return wrapper

    def __init__(
        self, qdata: Tensor, scale: Tensor, amax: Tensor, spec: Float8Spec, dtype: torch.dtype
    ) -> None:
        self.qdata = qdata
        self.scale = scale
        self.amax = amax
        self.spec = spec

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Float8Spec, torch.dtype]]:
        return ["qdata", "scale", "amax"], (self.spec, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor],
        context: tuple[Float8Spec, torch.dtype],
        outer_size: Any,
        outer_stride: Any,
    ) -> Float8Tensor:
        return Float8Tensor(inner["qdata"], inner["scale"], inner["amax"], *context)

    # Ops need no __torch_function__: everything is handled below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub omits the first argument
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not all(issubclass(t, (Float8Tensor, Tensor)) for t in types):
            return NotImplemented
        handler = table.get(op)
        if handler is None:
            return run_fallback(Float8Tensor, op, args, kwargs or {})
        return handler(op, *args, **(kwargs or {}))

    def replace(self, **changes: Any) -> Float8Tensor:
        """A Float8Tensor with some of qdata, scale, amax, spec, dtype replaced."""
        fields = {name: getattr(self, name) for name in ("qdata", "scale", "amax", "spec", "dtype")}
        return Float8Tensor(**{**fields, **changes})

    def map(self, function: Any) -> Float8Tensor:
        """A Float8Tensor of the same spec with ``function`` applied to each of its tensors."""
        return self.replace(
            qdata=function(self.qdata), scale=function(self.scale), amax=function(self.amax)
        )

    def dequantize(self) -> Tensor:
        """The tensor in its high-precision ``dtype``; differentiable, the gradient passes through.

        >>> float8lab.quantize(torch.tensor([1.0, -2.0])).dequantize()
        tensor([ 1., -2.])
        """
        result: Tensor = _Dequantize.apply(self)
        return result

    def requantize_(self, value: Tensor) -> Float8Tensor:
        """Overwrite in place with ``value``, quantized by this tensor's spec with new scales.

        Raises:
            ValueError: ``value`` has another shape.
        """
        if value.shape != self.shape:
            raise ValueError(
                f"value must have shape {tuple(self.shape)}; got {tuple(value.shape)}. "
                "Reshape it or quantize() it into a new tensor."
            )
        source = _quantized(value.to(self.dtype), self.spec, scale=None, amax_epsilon=0.0)
        self.qdata.copy_(source.qdata)
        self.scale.copy_(source.scale)
        self.amax.copy_(source.amax)
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """Initial values kept by ``fp8_model_init(preserve_high_precision_init_val=True)``."""
        value: Tensor | None = getattr(self, "_high_precision_init_val", None)
        return value

    def clear_high_precision_init_val(self) -> None:
        """Free the kept initial values."""
        self._high_precision_init_val = None

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # stub
        facts = [f"fp8={self.spec.describe()}", f"dtype={self.dtype}"]
        with torch.no_grad():
            if self.qdata.is_meta or _is_fake(self.qdata):
                body = f"..., size={tuple(self.shape)}"
            else:
                if self.scale.numel() == 1:
                    facts.append(f"scale={self.scale.item():.6g}")
                elif self.scale.numel():
                    low, high = self.scale.min().item(), self.scale.max().item()
                    facts.append(f"scale={low:.6g}..{high:.6g} {tuple(self.scale.shape)}")
                body = _values(self.dequantize())
        if self.device.type != "cpu":
            facts.append(f"device='{self.device}'")
        if self.requires_grad:
            facts.append("requires_grad=True")
        return f"Float8Tensor({body},\n             {', '.join(facts)})"


def _values(x: Tensor) -> str:
    """The numbers as torch prints them, without the ``tensor(...)`` and its suffixes."""
    text = repr(x.detach().float().cpu())
    body = text[len("tensor(") : -1]
    return body.replace("\n       ", "\n             ")


def _is_fake(x: Tensor) -> bool:
    return isinstance(x, torch._subclasses.FakeTensor)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Float8Tensor) -> Tensor:
        if x.ndim == 2:
            return dequantize_op(x.qdata, x.scale, x.spec.block, x.dtype)
        if x.spec.per_tensor or x.qdata.numel() == 0:
            return (x.qdata.float() * x.scale).to(x.dtype)
        scale = x.scale
        for dim, size in enumerate(x.spec.block):
            if size > 1:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, x.shape[dim])
        return (x.qdata.float() * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, spec: Float8Spec, scale: Tensor | None, amax_epsilon: float
    ) -> Float8Tensor:
        return _quantized(x, spec, scale=scale, amax_epsilon=amax_epsilon)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


def _quantized(
    x: Tensor, spec: Float8Spec, *, scale: Tensor | None, amax_epsilon: float
) -> Float8Tensor:
    """Quantize a tensor of any number of dimensions; ``spec`` has one block size for each."""
    shape, scales = tuple(x.shape), spec.scale_shape(tuple(x.shape))
    block: tuple[int, ...] = spec.block[-2:]
    if x.ndim < 2:
        block = (-1, -1) if spec.per_tensor else (1, *spec.block)
    if x.ndim > 2 and not spec.per_tensor and block[0] != 1 and x.shape[0]:
        # A block must not reach from one matrix of the batch into the next.
        matrix_spec = Float8Spec(spec.fp8_dtype, spec.block[1:], spec.scale_rule)
        given = [None] * x.shape[0] if scale is None else scale.expand(scales).unbind()
        parts = [
            _quantized(m, matrix_spec, scale=s, amax_epsilon=amax_epsilon)
            for m, s in zip(x.unbind(), given, strict=True)
        ]
        qdata, scale, amax = (
            torch.stack([getattr(p, name) for p in parts]) for name in ("qdata", "scale", "amax")
        )
        return Float8Tensor(qdata, scale, amax, spec, x.dtype)
    matrix = x.reshape(math.prod(shape[:-1]), shape[-1]) if x.ndim else x.reshape(1, 1)
    if scale is None:
        qdata, scale, amax = quantize_op(
            matrix, spec.fp8_dtype, block, spec.scale_rule, amax_epsilon, 1
        )
    else:
        scale = scale.to(device=x.device, dtype=torch.float32).expand(scales)
        flat = scale.reshape(math.prod(scales[:-1]), scales[-1] if scales else 1)
        qdata = cast_op(matrix, flat, None, spec.fp8_dtype, block, 1)
        amax = scale * spec.largest()
    return Float8Tensor(
        qdata.reshape(shape), scale.reshape(scales), amax.reshape(scales), spec, x.dtype
    )


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype = E4M3,
    *,
    block: tuple[int, ...] = (-1, -1),
    scale_rule: str = "fp32",
    scale: Tensor | float | None = None,
    amax_epsilon: float = 0.0,
) -> Float8Tensor:
    """Quantize a tensor to FP8. Differentiable: the gradient passes straight through.

    Args:
        x: any shape, float32, bfloat16 or float16.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block: rows and columns of the last two dimensions that share a scale, -1 for all:
            ``(-1, -1)`` per tensor, ``(1, -1)`` per row, ``(1, 128)``, ``(128, 128)``,
            ``(1, 32)``; or one size for every dimension of ``x``.
        scale_rule: ``"fp32"``, ``"pow2"`` or ``"e8m0"`` (see ``formats.SCALE_RULES``).
        scale: decode scale(s) to use instead of ones computed from ``x``: a number, or a tensor
            that broadcasts to one scale per block. Values beyond ``scale * largest`` saturate.
        amax_epsilon: amaxes are raised to at least this.

    Returns:
        A Float8Tensor of ``x``'s shape and dtype. A block that is all zero, or holds inf or NaN,
        gets scale 1; inf saturates to the largest finite value, NaN stays NaN.

    Raises:
        TypeError: ``x`` is not a floating-point tensor of a supported dtype.
        ValueError: a bad format, block, rule or scale.

    >>> float8lab.quantize(torch.tensor([[1.0, -448.0]]))
    Float8Tensor([[   1., -448.]],
                 fp8=e4m3 tensor fp32, dtype=torch.float32, scale=1)
    """
    if not isinstance(x, Tensor) or x.dtype not in HIGH_PRECISION_DTYPES:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"x must be a float32, bfloat16 or float16 tensor; got {got}. Convert it first."
        )
    if isinstance(x, Float8Tensor):
        x = x.dequantize()
    spec = Float8Spec(fp8_dtype, tuple(block), scale_rule).expand(x.ndim)
    if scale is not None:
        scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
        expected = spec.scale_shape(tuple(x.shape))
        if torch.broadcast_shapes(scale.shape, expected) != torch.Size(expected):
            raise ValueError(
                f"scale must broadcast to one scale per block, {expected}; got shape "
                f"{tuple(scale.shape)}. Pass a number or a tensor of that shape."
            )
    result: Float8Tensor = _Quantize.apply(x, spec, scale, amax_epsilon)
    return result
