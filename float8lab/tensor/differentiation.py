"""Autograd functions of FP8 ops, and errors for differentiation that they do not support."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch.autograd.function import FunctionCtx
from torch.utils._pytree import tree_map

from float8lab.ops.declare import is_traced

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = [
    "EXPORT", "AutogradContext", "Float8Function", "GradientMap", "is_exporting",
    "once_differentiable", "version_of", "wanted_gradients",
]  # fmt: skip

_INSTEAD = (
    "Compute this part with torch's own layers and tensors: float8lab.to_high_precision(model), "
    "torch.nn's norms, .dequantize()."
)
# The dispatch mode that torch.autograd activates for is_grads_batched.
_VMAP = cast("torch._C.DispatchKey", torch._C._parse_dispatch_key("VmapMode"))

Result = TypeVar("Result")


class AutogradContext(FunctionCtx):
    """The context of an autograd function, to which forward and backward may add attributes."""

    save_for_backward: Callable[..., None]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    next_functions: tuple[tuple[Node | None, int], ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


class _Export(threading.local):
    """The settings of an ``onnx_export`` that runs on a thread."""

    def __init__(self) -> None:
        self.translations: tuple[tuple[type, Callable[..., object]], ...] | None = None
        """Autograd functions and their replacements; None outside an export."""


EXPORT = _Export()


def is_exporting() -> bool:
    """Whether ``onnx_export`` is active on this thread."""
    return EXPORT.translations is not None


@contextmanager
def _compiling() -> Iterator[None]:
    """Have ``torch.compiler.is_compiling`` be true in a trace, as torch 2.11 has only in Dynamo."""
    # All threads share the flag. Where another thread has set it, that thread resets it.
    is_missing = is_traced() and not torch.compiler._is_compiling_flag
    if is_missing:
        torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        if is_missing:
            torch.compiler._is_compiling_flag = False


@_compiling()
def _run_in_graph(index: int, *args: object) -> object:
    """Run a function as a node of Dynamo's graph."""
    args = tree_map(_unpacked, args, is_leaf=lambda arg: hasattr(arg, "unpacked"))
    return Float8Function.functions[index].run(*args)


def _unpacked(arg: object) -> object:
    return getattr(arg, "unpacked", lambda: arg)()


def _allow_in_graph() -> None:
    torch.compiler.allow_in_graph(_run_in_graph)


# The mark of torch.compiler.assume_constant_result: Dynamo calls the function.
_allow_in_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


class Float8Function(torch.autograd.Function):
    """Base of the autograd functions of FP8 ops, which the transforms of torch.func cannot take.

    Inside ``onnx_export``, functions for which ONNX has operators run their translations. In a
    compiled graph a function is one node, which Dynamo does not read. So its arguments must be
    tensors, numbers, names, and tuples of these, which may have a method ``unpacked``.
    """

    functions: ClassVar[list[type[Float8Function]]] = []
    """All functions, by index; the first is ``GradientMap``, which is no node."""
    index: ClassVar[Callable[[], int]]
    """Returns the index of the class; a function, since Dynamo reads no attribute of the class."""

    def __init_subclass__(cls) -> None:
        index = len(Float8Function.functions)
        Float8Function.functions.append(cls)
        cls.index = staticmethod(lambda: index)

    @classmethod
    def run(cls, *args: object) -> Any:  # the result of ``forward``
        """Run the function. Dynamo takes over ``apply``, which therefore cannot be overridden.

        Raises:
            NotImplementedError: a transform of torch.func is active.
        """
        for function, translation in EXPORT.translations or ():
            if function is cls:
                return translation(*args)
        if torch._C._are_functorch_transforms_active():
            raise NotImplementedError(
                "float8lab's functions must run outside the transforms of torch.func (grad, vmap, "
                "jvp, ...); got a call inside one. Use torch.autograd.grad, and a batch for vmap. "
                f"{_INSTEAD}"
            )
        if torch.compiler.is_dynamo_compiling() and (index := cls.index()):
            _allow_in_graph()
            return _run_in_graph(index, *args)
        # A program of torch.export has no backward, so it needs no casts for one.
        if torch.is_grad_enabled() and not torch.compiler._is_exporting_flag:
            return cls.apply(*args)
        # ``apply`` would report that a parameter's gradient is needed, and cause needless casts.
        ctx = AutogradContext()
        ctx.needs_input_grad = (False,) * len(args)
        return cls.forward(ctx, *args)


class GradientMap(Float8Function):
    """A function of one tensor, with a function that maps the output's gradient to the input's.

    Dynamo reads these functions, for a graph cannot hold them as arguments.
    """

    @staticmethod
    def forward(
        ctx: AutogradContext, x: Tensor, forward: Callable[[Tensor], Tensor],
        backward: Callable[[Tensor], Tensor | None],
    ) -> Tensor:  # fmt: skip
        ctx.map_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: AutogradContext, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.map_gradient(gradient), None, None


def once_differentiable(backward: Callable[..., Result]) -> Callable[..., Result]:
    """Make a ``backward`` raise if its result would be differentiated."""
    # Torch's decorator of this name returns a result without a graph, which
    # ``torch.autograd.grad`` may take for a derivative of zero.

    @functools.wraps(backward)
    def wrapper(ctx: AutogradContext, *gradients: object) -> Result:
        if TracingContext.try_get() is not None:  # nothing differentiates its backward
            with torch.no_grad(), _compiling():
                return backward(ctx, *gradients)
        is_batched = torch._C._dispatch_tls_is_dispatch_key_included(_VMAP)
        if torch.is_grad_enabled():
            problem = "differentiated again; got a backward with create_graph=True"
        elif is_batched or torch._C._are_functorch_transforms_active():
            problem = "batched; got is_grads_batched, vectorize or torch.func.vmap"
        else:
            return backward(ctx, *gradients)
        raise NotImplementedError(
            f"gradients of float8lab's functions must not be {problem}. {_INSTEAD}"
        )

    return wrapper


def wanted_gradients(ctx: AutogradContext) -> Any:
    """Return, for each input of a function, whether this backward pass needs its gradient.

    ``needs_input_grad`` covers the gradients that any pass may need. ``torch.autograd.grad`` for
    given tensors, and pipelines that compute weight gradients later, need only some in each pass.
    Both are tuples of bools.
    """
    needs = ctx.needs_input_grad
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    wants: list[bool] = []
    for need in needs:
        if need:
            try:
                need = torch._C._will_engine_execute_node(next(nodes))
            except RuntimeError:  # the node is a leaf whose gradient torch.autograd.grad returns
                need = True
        wants.append(need)
    return tuple(wants)


def version_of(x: Tensor) -> int:
    """Return torch's count of the writes to a tensor; 0 for inference tensors, which have none."""
    return 0 if x.is_inference() else x._version
