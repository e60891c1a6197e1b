"""Autograd functions of FP8 ops, and the errors for kinds of differentiation that they lack."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

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
# The mode of torch.autograd's is_grads_batched.
_VMAP = cast("torch._C.DispatchKey", torch._C._parse_dispatch_key("VmapMode"))

Result = TypeVar("Result")


class AutogradContext(FunctionCtx):
    """The context of a function's forward and backward, which adds attributes of its own."""

    save_for_backward: Callable[..., None]
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    next_functions: tuple[tuple[Node | None, int], ...]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: object) -> None: ...


class _Export(threading.local):
    """The export by ``onnx_export`` that is in force on a thread."""

    def __init__(self) -> None:
        self.translations: tuple[tuple[type, Callable[..., object]], ...] | None = None
        """Autograd functions, and what runs in place of each; None outside an export."""


EXPORT = _Export()


def is_exporting() -> bool:
    """Whether ``onnx_export`` is active on this thread."""
    return EXPORT.translations is not None


class Float8Function(torch.autograd.Function):
    """Base of the autograd functions of FP8 ops, which torch.func's transforms cannot take.

    Inside ``onnx_export`` those that ONNX has operators for run as it says.
    """

    @classmethod
    def run(cls, *args: object) -> Any:  # what its forward returns
        """Run the function: ``apply``, which Dynamo takes over and therefore cannot be overridden.

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
        if torch.is_grad_enabled():
            return cls.apply(*args)
        # Torch would say of a parameter that its gradient is needed, for which forwards make casts.
        ctx = AutogradContext()
        ctx.needs_input_grad = (False,) * len(args)
        return cls.forward(ctx, *args)


class GradientMap(Float8Function):
    """A function of one tensor, and the one that makes the input's gradient of the output's."""

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
    """Make a ``backward`` raise where its result is to be differentiated."""
    # torch's decorator of this name gives a result without a graph, which ``torch.autograd.grad``
    # may take for a derivative of zero.

    @functools.wraps(backward)
    def wrapper(ctx: AutogradContext, *gradients: object) -> Result:
        if torch.compiler.is_compiling():  # a compiled backward is not differentiated
            with torch.no_grad():
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
    """For each input of a function, whether this pass of its backward wants the gradient.

    ``needs_input_grad`` says which gradients any pass may want. ``torch.autograd.grad`` of some
    tensors, and pipelines that compute the gradients of weights later, want some in each pass.
    Both are tuples of bools.
    """
    needs = ctx.needs_input_grad
    if torch.compiler.is_compiling():  # nothing runs now
        return needs
    nodes = iter([node for node, _ in ctx.next_functions if node is not None])
    wants: list[bool] = []
    for need in needs:
        if need:
            try:
                need = torch._C._will_engine_execute_node(next(nodes))
            except RuntimeError:  # a leaf that torch.autograd.grad was asked for
                need = True
        wants.append(need)
    return tuple(wants)


def version_of(x: Tensor) -> int:
    """Torch's count of the writes to a tensor; inference tensors have none."""
    return 0 if x.is_inference() else x._version
