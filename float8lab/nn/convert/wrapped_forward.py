"""Layers whose ``forward`` Transformers has wrapped on the layer itself.

Its tensor parallelism (``tp_plan="auto"``) sets ``layer.forward`` to a wrapper that lays out the
input, calls the forward of the layer's class, and lays out the output. The wrapper keeps that bound
forward in a variable of its closure, ``original_forward``. If a layer's class changes, the variable
gets the forward of the new class, and the wrapper stays.
Source: ``TensorParallelLayer.install_forward`` in ``transformers/distributed/tensor_parallel.py``.
"""

from __future__ import annotations

from types import CellType, FunctionType

from torch import nn

__all__ = ["rebind_forward", "wrapped_forward"]


def rebind_forward(layer: nn.Module) -> None:
    """Make wrappers around a layer's forward, if there are any, call its present class."""
    forward = type(layer).forward.__get__(layer)
    if (wrapped := wrapped_forward(layer)) is not None:
        wrapped.cell_contents = forward
    if getattr(vars(layer).get("_old_forward"), "__self__", None) is layer:
        vars(layer)["_old_forward"] = forward  # which Accelerate's hooks call


def wrapped_forward(layer: nn.Module) -> CellType | None:
    """Return the closure variable in which Transformers' wrapper holds this layer's forward."""
    # A copied layer has its original's wrapper, with the original's forward; the result is None.
    wrapper = vars(layer).get("forward")
    if not isinstance(wrapper, FunctionType) or not wrapper.__module__.startswith("transformers."):
        return None
    variables = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    wrapped = variables.get("original_forward")
    bound_to = None if wrapped is None else getattr(wrapped.cell_contents, "__self__", None)
    return wrapped if bound_to is layer else None
