"""Float8Tensor: a torch.Tensor that is stored in FP8."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, cast, overload

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensor

from float8lab import arguments
from float8lab.formats import DEQUANTIZED_DTYPES, E4M3, HIGH_PRECISION_DTYPES, Float8Spec
from float8lab.tensor import statistics
from float8lab.tensor.blocks import dequantize_blocks, quantize_blocks
from float8lab.tensor.differentiation import Float8Function, GradientMap
from float8lab.tensor.dispatch import ANY_VIEW, run_fallback, table
from float8lab.tensor.dtensor import is_dtensor
from float8lab.tensor.stored import StoredTensor
from float8lab.tensor.window import Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PLAIN", "Float8Tensor", "decoded", "quantize"]

PLAIN = frozenset(
    (Tensor, torch.nn.Parameter, torch.nn.Buffer, torch._subclasses.FakeTensor, FunctionalTensor)
)
"""Tensor types that may appear in an op beside a Float8Tensor. Any other subclass (such as DTensor)
handles the op first, and calls it a second time on the Float8Tensors inside it."""

View = TypeVar("View", bound=Callable[..., object])


def _check_fields(
    qdata: Tensor, scale: Tensor, amax: Tensor, spec: Float8Spec, dtype: torch.dtype
) -> None:
    """Raise unless these can be the fields of one tensor."""
    arguments.check_instance("spec", spec, Float8Spec, "a Float8Spec")
    arguments.check_dtype("dtype", dtype, DEQUANTIZED_DTYPES, optional=False)
    scales = {"scale": scale, "amax": amax}
    for name, tensor in {"qdata": qdata, **scales}.items():
        arguments.check_tensor(name, tensor)
        stored = torch.float32 if name in scales else spec.fp8_dtype
        if tensor.dtype != stored:
            raise TypeError(
                f"{name} must be of {stored} for {spec.describe()}; got {arguments.shown(tensor)}. "
                "quantize() makes all parts of a tensor."
            )
    if len(spec.block) != qdata.ndim:
        raise ValueError(
            f"spec must have a block of {qdata.ndim} sizes, as qdata has dimensions; got "
            f"{spec.block}. See Float8Spec.expand."
        )
    shape = spec.scale_shape(tuple(qdata.shape))
    advice = f"Give one number for each block of {spec.block}, as quantize() does."
    for name, tensor in scales.items():
        arguments.check_shape(name, tensor, shape, advice)


class Float8Tensor(StoredTensor):
    """A tensor of ``dtype`` stored as FP8 data and scales: ``x ~= qdata.float() * scale``.

    ``dtype``, ``element_size()`` and ``nbytes`` describe the high-precision tensor that it
    represents; it occupies the memory of ``qdata``, ``scale`` and ``amax``. Strides are those of
    ``qdata``. ``data_ptr()`` is the address of a dequantized copy, only for reading. Ops on a
    subclass return tensors of that subclass, made without its ``__init__``.

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
    _fields = ("qdata", "scale", "amax", "spec", "_dtype", "_window", "_readable")
    _format = ("FP8", "float8lab.integrations.export")
    _window: Window | None = None
    _high_precision_init_val: Tensor | None = None
    _shared_scales: Any = None
    """A ``SharedScales`` of ``distributed/`` for a weight shard whose blocks cross ranks."""

    def __new__(
        cls, qdata: Tensor, scale: Tensor, amax: Tensor, spec: Float8Spec, dtype: torch.dtype
    ) -> Float8Tensor:
        """Make a tensor from its fields.

        Raises:
            TypeError: a field has a wrong type or dtype.
            ValueError: a field has a wrong shape.
        """
        _check_fields(qdata, scale, amax, spec, dtype)
        return cls._make(qdata, scale, amax, spec, dtype)

    @classmethod
    def _make(
        cls, qdata: Tensor, scale: Tensor, amax: Tensor, spec: Float8Spec, dtype: torch.dtype
    ) -> Float8Tensor:
        """Make a tensor of this class from matching fields, without calling its constructor."""
        # The constructor of a subclass may take other arguments.
        x: Float8Tensor = torch.Tensor._make_wrapper_subclass(
            cls, qdata.shape, strides=qdata.stride(), storage_offset=qdata.storage_offset(),
            dtype=dtype, device=qdata.device, requires_grad=False,
        )  # fmt: skip
        x.qdata, x.scale, x.amax, x.spec, x._dtype = qdata, scale, amax, spec, dtype
        return x

    def __init__(self, *fields: object, **named_fields: object) -> None:
        """Do nothing: ``__new__`` has set the fields. ``torch.Tensor(x)`` calls this with ``x``."""

    # These properties avoid ``__torch_function__``, which torch calls for its own attributes. Also,
    # torch.export tracks reads of attributes, but reads ``shape`` before it tracks a tensor.
    shape = property(lambda self: self.__dict__["qdata"].shape)
    dtype = property(operator.attrgetter("_dtype"))
    _dtype: torch.dtype

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Float8Spec, torch.dtype, bool]]:
        return ["qdata", "scale", "amax"], (self.spec, self.dtype, self._window is not None)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Float8Spec, torch.dtype, bool],
        outer_size: torch.Size, outer_stride: Sequence[int],
    ) -> Float8Tensor:  # fmt: skip
        spec, dtype, shares_blocks = context
        x = cls._make(inner["qdata"], inner["scale"], inner["amax"], spec, dtype)
        if shares_blocks:
            x._window = Window(base=None)
        return x

    @classmethod
    def __torch_function__(  # torch's stub lacks the defaults
        cls, function: Callable[..., object], types: Sequence[type], args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        if len(types) > 1 and not all(issubclass(t, cls) or _has_default_hook(t) for t in types):
            return NotImplemented  # the other class handles the call
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            # A handler of a composite op returns a fresh tensor; with ``out``, torch splits the op.
            handler = table.composite.get(function) if kwargs.get("out") is None else None
            if handler is not None and not torch._C._are_functorch_transforms_active():
                result = handler(*args, **kwargs)
                if result is not NotImplemented:
                    return result
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub omits the first argument
        cls, op: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        if not all(t in PLAIN or issubclass(t, Float8Tensor) for t in types):
            return NotImplemented
        _refresh_views(args)
        kwargs = kwargs or {}
        if (handler := table.get(op)) is None:
            # Autograd has split composite ops; inference mode and handlers call them without it.
            if (result := op.decompose(*args, **kwargs)) is not NotImplemented:
                return result
            if not op.is_view:
                return run_fallback(Float8Tensor, op, args, kwargs)
            handler = table[ANY_VIEW]
        if torch.is_inference_mode_enabled() and op.is_view and not args[0].is_inference():
            # Torch wants the view of a normal tensor to be a normal tensor in inference mode, too.
            with torch.inference_mode(False), torch.no_grad():
                return handler(op, *args, **kwargs)
        result = handler(op, *args, **kwargs)
        return run_fallback(Float8Tensor, op, args, kwargs) if result is NotImplemented else result

    def replace(self, **changes: object) -> Float8Tensor:
        """Return a tensor of this class with some of qdata, scale, amax, spec, dtype replaced."""
        fields = {name: getattr(self, name) for name in ("qdata", "scale", "amax", "spec", "dtype")}
        return self._make(**{**fields, **changes})

    def map(self, function: Callable[[Tensor], Tensor]) -> Float8Tensor:
        """Return a tensor of this class and spec with ``function`` applied to each inner tensor."""
        qdata, scale, amax = map(function, (self.qdata, self.scale, self.amax))
        return self._make(qdata, scale, amax, self.spec, self.dtype)

    def dequantize(self) -> Tensor:
        """Return the values in the high-precision ``dtype``; gradients pass through unchanged.

        >>> float8lab.quantize(torch.tensor([1.0, -2.0])).dequantize()
        tensor([ 1., -2.])
        """
        return _Dequantize.run(self)

    def requantize_(self, value: Tensor) -> Float8Tensor:
        """Overwrite in place with ``value``, quantized by this tensor's spec with new scales.

        A write through a view leaves the values of elements outside the view unchanged.

        Raises:
            TypeError: ``value`` is not a floating-point tensor.
            ValueError: ``value`` has another shape.
        """
        arguments.check_floating("value", value)
        advice = "Reshape it or quantize() it into a new tensor."
        arguments.check_shape("value", value, self.shape, advice)
        value = value.dequantize() if isinstance(value, Float8Tensor) else value.to(self.dtype)
        if self._window is not None:
            self._window.write(value.detach())
            self._refresh()
            return self
        value, shared = value.detach(), self._shared_scales
        amax = None if shared is None else shared.amaxes(value, self.spec)
        source = quantize_blocks(value, self.spec, known_amax=amax)
        for target, new in zip((self.qdata, self.scale, self.amax), source, strict=True):
            target.copy_(new)
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """Return what ``fp8_model_init(preserve_high_precision_init_val=True)`` kept, or None."""
        return self._high_precision_init_val

    def clear_high_precision_init_val(self) -> None:
        """Free the kept initial values."""
        self._high_precision_init_val = None

    def _decode(self, prior: Tensor | None = None) -> Tensor:
        """Dequantize without autograd, for handlers; a compiled graph computes ``prior`` first."""
        self._refresh()
        return dequantize_blocks(self.qdata, self.scale, self.spec, self.dtype, prior=prior)

    def _refresh(self) -> None:
        """Update the scales of a view that holds a copy of its base's scales."""
        if (window := self._window) is not None and window.copied and window.base is not None:
            view: object = window.base
            for op, args, kwargs in window.steps:
                view = table.get(op, table[ANY_VIEW])(op, view, *args, **kwargs)
            assert isinstance(view, Float8Tensor)
            self.qdata, self.scale, self.amax = view.qdata, view.scale, view.amax

    @property
    def data(self) -> Float8Tensor:
        """This tensor, detached and sharing its memory; assignment takes over other memory."""
        return self.detach()  # type: ignore[return-value]  # torch's stub says Tensor

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, Float8Tensor):
            arguments.check_shape("data", value, self.shape, "Or pass a Float8Tensor.")
            q = quantize_blocks(value.detach().to(self.dtype), self.spec)
            value = Float8Tensor._make(*q, self.spec, self.dtype)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # sizes, strides, dtype
        for name in self._fields:
            setattr(self, name, getattr(value, name))

    def apply_(self, function: Callable[[float], float]) -> Float8Tensor:
        """Replace each value by ``function`` of it. It is slow and runs on the CPU, as in torch."""
        return self.requantize_(self.detach().dequantize().apply_(function))

    def __reduce_ex__(self, protocol: object) -> Any:
        # A view that shares blocks is saved without its base, so it gets its own blocks.
        self._refresh()
        x = self if self._window is None else self.map(torch.clone)
        spec = (self.spec.fp8_dtype, self.spec.block, self.spec.scale_rule)
        data = x.qdata.view(torch.uint8)  # pickle, unlike torch.save, cannot load FP8 tensors
        state = (data, x.scale, x.amax, *spec, self.dtype, self.requires_grad, self._extra())
        return _rebuild, state if type(self) is Float8Tensor else (*state, type(self))

    def __format__(self, format_spec: str) -> str:
        if self.ndim == 0 and not self.is_meta:
            return format(self.item(), format_spec)
        return object.__format__(self, format_spec)

    # Methods that display tensors.

    _views: ClassVar[dict[str, Callable[..., Any]]] = {}
    """Functions that summarize and draw tensors; ``float8lab.inspect``, a layer up, adds them."""

    @overload
    def stats(
        self, original: Tensor | None = None, *, per_block: Literal[False] = False
    ) -> statistics.TensorStats: ...
    @overload
    def stats(self, original: Tensor | None = None, *, per_block: bool) -> Any: ...
    def stats(
        self, original: Tensor | None = None, *, per_block: bool = False
    ) -> statistics.TensorStats | statistics.BlockStats:
        """Return statistics of the tensor: see ``float8lab.inspect.stats``.

        >>> float8lab.quantize(torch.tensor([448.0, 0.0])).stats().zero
        0.5
        """
        return self._views["stats"](self, original, per_block=per_block)

    def compare(self, original: Tensor) -> statistics.Comparison:
        """Measure the error against the original tensor: see ``float8lab.inspect.compare``."""
        return self._views["compare"](self, original)

    def histogram(self, by: str = "code") -> statistics.Histogram:  # type: ignore[override]  # hides torch's
        """Count values by ``"code"`` or ``"exponent"``: see ``float8lab.inspect.histogram``.

        It hides torch's method, which counts values; for that, call
        ``torch.histogram(x.dequantize(), bins)``.
        """
        return self._views["histogram"](self, by)

    def blocks(self) -> Tensor:
        """Return the scales as a matrix: see ``float8lab.inspect.blocks``."""
        return self._views["blocks"](self)

    def plot(self) -> Figure:
        """Draw a matplotlib figure: see ``float8lab.inspect.plot``. Needs the extra ``plot``."""
        return self._views["plot"](self)

    def _repr_html_(self) -> str | None:
        """Return HTML for Jupyter, or None without data, so that Jupyter shows ``repr``."""
        return self._views["html"](self, repr(self)) if self._has_data() else None

    def __rich__(self) -> object:
        """Return the object that ``rich.print`` shows."""
        return self._views["table"](self) if self._has_data() else repr(self)

    @classmethod
    def _add_view(cls, function: View) -> View:
        """Enter a function that displays a tensor, under the function's name."""
        cls._views[function.__name__] = function
        return function

    def _has_data(self) -> bool:
        return arguments.has_data(self.qdata)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # stub
        facts, lines = [f"fp8={self.spec.describe()}"], []
        if self._has_data():
            summary = self.stats()
            facts.append(f"shape={tuple(self.shape)}")
            scales = f"amax={summary.amax:.6g}, scale={summary.scale_min:.6g}"
            if self.scale.numel() > 1:
                scales += f"..{summary.scale_max:.6g} {tuple(self.scale.shape)}"
            body = _values(self.data)
            lines = [scales] * (self.scale.numel() > 0) + [f"health: {statistics.health(summary)}"]
        else:
            body = f"..., size={tuple(self.shape)}"
        facts.append(f"dtype={self.dtype}")
        if self.device.type != "cpu":
            facts.append(f"device='{self.device}'")
        if self.requires_grad:
            facts.append("requires_grad=True")
        separator = ",\n             "
        return f"Float8Tensor({separator.join([body, ', '.join(facts), *lines])})"


def decoded(x: Tensor) -> Tensor:
    """Dequantize a Float8Tensor without autograd; return any other tensor unchanged."""
    return x._decode() if isinstance(x, Float8Tensor) else x


def _has_default_hook(t: type) -> bool:
    """Whether a class has the default ``__torch_function__``, that of ``Tensor``."""
    hooks = (getattr(c, "__torch_function__", None) for c in (t, Tensor))
    hook, default = (getattr(hook, "__func__", None) for hook in hooks)
    return hook is default


def _refresh_views(args: Sequence[object]) -> None:
    """Update the scales of those views among an op's arguments that hold copies of scales."""
    for arg in args:
        for x in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(x, Float8Tensor) and x._window is not None:
                x._refresh()


def _values(x: Float8Tensor) -> str:
    """Format the values of a Float8Tensor as torch does, without ``tensor(...)`` and suffixes."""
    options = torch._tensor_str.PRINT_OPTS  # set by torch.set_printoptions
    edge, threshold, printed = options.edgeitems, options.threshold, cast(Tensor, x)
    if x.numel() > threshold:  # torch prints only the edges, so only those are dequantized
        threshold = 0
        for dim, size in enumerate(x.shape):
            if size > 2 * edge + 1:  # keep one more than is printed, so that torch prints "..."
                index = torch.arange(size, device=x.device)
                index = torch.cat([index[: edge + 1], index[size - edge :]])
                printed = printed.index_select(dim, index)
    with torch._tensor_str.printoptions(threshold=threshold):
        text = repr(decoded(printed).float().cpu())
    return text[len("tensor(") : -1].replace("\n       ", "\n             ")


class _Dequantize(Float8Function):
    @staticmethod
    def forward(ctx: object, x: Float8Tensor) -> Tensor:
        return x._decode()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def _rebuild(  # noqa: PLR0913  # the state in pickles
    qdata: Tensor, scale: Tensor, amax: Tensor, fp8_dtype: torch.dtype, block: Sequence[int],
    scale_rule: str, dtype: torch.dtype, requires_grad: bool, extra: Mapping[str, object],
    cls: type[Float8Tensor] = Float8Tensor,
) -> Float8Tensor:  # fmt: skip
    """Make a Float8Tensor from the state of ``__reduce_ex__``; pickles name this function."""
    spec = Float8Spec(fp8_dtype, tuple(block), scale_rule)
    x = cls._make(qdata.view(fp8_dtype), scale, amax, spec, dtype)
    x.requires_grad_(requires_grad)
    x.__dict__.update(extra)
    return x


torch.serialization.add_safe_globals([_rebuild])


def quantize(
    x: Tensor,
    fp8_dtype: torch.dtype = E4M3,
    *,
    block: tuple[int, ...] = (-1, -1),
    scale_rule: str = "fp32",
    scale: Tensor | float | None = None,
    amax_epsilon: float = 0.0,
) -> Float8Tensor:
    """Quantize a tensor to FP8. Differentiable: the gradient passes through unchanged.

    Args:
        x: any shape, float32, bfloat16 or float16.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        block: rows and columns of the last two dimensions that share a scale, -1 for all:
            ``(-1, -1)`` per tensor, ``(1, -1)`` per row, ``(1, 128)``, ``(128, 128)``,
            ``(1, 32)``; or one size for every dimension of ``x``.
        scale_rule: ``"fp32"``, ``"pow2"`` or ``"e8m0"`` (see ``formats.SCALE_RULES``).
        scale: decode scale(s) to use instead of scales computed from ``x``: a number, or a tensor
            that broadcasts to one scale per block. Values beyond ``scale * largest`` saturate.
        amax_epsilon: smaller amaxes are raised to this value.

    Returns:
        A Float8Tensor of ``x``'s shape and dtype. A block that is all zero, or holds inf or NaN,
        gets scale 1; inf becomes NaN in e4m3 and stays inf in e5m2, NaN stays NaN.

    Raises:
        TypeError: ``x`` is not a floating-point tensor of a supported dtype.
        NotImplementedError: ``x`` is a DTensor.
        ValueError: a bad format, block, rule, scale or ``amax_epsilon``. Scales on a GPU are not
            checked.

    >>> float8lab.quantize(torch.tensor([[1.0, -448.0]]))
    Float8Tensor([[   1., -448.]],
                 fp8=e4m3 tensor fp32, shape=(1, 2), dtype=torch.float32,
                 amax=448, scale=1,
                 health: 50% saturated, 0% subnormal, 0% zero)
    """
    got = x.dtype if isinstance(x, Tensor) else type(x).__name__
    if got not in HIGH_PRECISION_DTYPES:
        raise TypeError(
            f"x must be a float32, bfloat16 or float16 tensor; got {got}. Convert it first."
        )
    if not torch.compiler.is_compiling():  # in a graph, a float may be a graph input
        if is_dtensor(x):
            raise NotImplementedError(
                "x must be an ordinary tensor; got a DTensor. Quantize x.full_tensor() and pass "
                "the result to distribute_tensor, or quantize x.to_local() on each rank."
            )
        arguments.check_instance("block", block, (tuple, list), "a tuple of sizes")
        arguments.check_number("amax_epsilon", amax_epsilon, minimum=0)
        if scale is not None and not hasattr(scale, "__array__"):
            arguments.check_number("scale", scale, above=0)
    x = x.dequantize() if isinstance(x, Float8Tensor) else x
    spec = Float8Spec(fp8_dtype, tuple(block), scale_rule)
    if len(spec.block) not in (2, x.ndim):
        raise ValueError(
            f"block must have 2 sizes, or one for each of the {x.ndim} dimensions of x; got "
            f"{spec.block}. Pass rows and columns."
        )
    spec = spec.expand(x.ndim)
    if scale is not None:
        scale = _checked_scale(scale, spec.scale_shape(tuple(x.shape))).to(x.device)

    def quantized(x: Tensor) -> Float8Tensor:
        tensors = quantize_blocks(x, spec, scale=scale, amax_epsilon=amax_epsilon)
        return Float8Tensor._make(*tensors, spec, x.dtype)

    return GradientMap.run(x, quantized, lambda grad: grad)


def _checked_scale(scale: Tensor | float, expected: tuple[int, ...]) -> Tensor:
    """Return given scales in float32; raise for wrong values if that needs no wait for a GPU."""
    scale = torch.as_tensor(scale, dtype=torch.float32)
    if torch.broadcast_shapes(scale.shape, expected) != torch.Size(expected):
        raise ValueError(
            f"scale must broadcast to one scale per block, {expected}; got shape "
            f"{tuple(scale.shape)}. Pass a number or a tensor of that shape."
        )
    if not arguments.has_values(scale):
        return scale
    wrong = scale[~((scale > 0) & (scale < torch.inf))]
    if wrong.numel():
        raise ValueError(
            f"scale must be positive and finite in float32; got {wrong[0].item()}. Pass decode "
            "factors, the largest absolute value of each block divided by the format's largest."
        )
    return scale
