"""Layers whose ``forward`` Transformers has wrapped on the layer itself.

Its tensor parallelism (``tp_plan="auto"``) sets ``layer.forward`` to a function that lays out the
input, calls the forward of the layer's class, and lays out the output. It keeps that forward, bound
to the layer, in a variable of its closure, ``original_forward``. A layer whose class changes gets
the forward of the new class there; the wrapper stays.
Source: ``TensorParallelLayer.install_forward`` in ``transformers/distributed/tensor_parallel.py``.
"""

from __future__ import annotations

from types import CellType, FunctionType

from torch import nn

__all__ = ["rebind_forward", "wrapped_forward"]


def rebind_forward(layer: nn.Module) -> None:
    """Have the wrapper around a layer's forward, if there is one, call that of its class now."""
    if (wrapped := wrapped_forward(layer)) is not None:
        wrapped.cell_contents = type(layer).forward.__get__(layer)


def wrapped_forward(layer: nn.Module) -> CellType | None:
    """The variable of Transformers' wrapper that holds the forward of this very layer's class."""
    # A copy of a layer has the wrapper of its original, and so the original's forward: None.
    wrapper = vars(layer).get("forward")
    if not isinstance(wrapper, FunctionType) or not wrapper.__module__.startswith("transformers."):
        return None
    variables = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    wrapped = variables.get("original_forward")
    bound_to = None if wrapped is None else getattr(wrapped.cell_contents, "__self__", None)
    return wrapped if bound_to is layer else None
