"""Compute a layer's input in backward from tensors that the op that produced it saves anyway.

In eager mode autograd's node of that op holds its saved tensors, such as the two factors of a
multiplication. They are alive in backward whether or not a layer saves them as well.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from float8lab.ops import Prologue
from float8lab.ops.operand import Operand
from float8lab.recipes.region import saved_tensors_hooks

if TYPE_CHECKING:
    from torch.autograd.graph import Node

__all__ = ["Origin", "Recast", "origin_of"]

_VIEWS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))


class Recast:
    """The cast in backward of an input that several layers share; the last layer frees it."""

    def __init__(self) -> None:
        self.layers = 0  # the number of layers that share the input
        self._waiting = 0  # the number of layers that have yet to take the cast
        self._key: object = None
        self._operand: Operand | None = None

    def operand(self, key: object, cast: Callable[[], Operand]) -> Operand:
        """Return the result of ``cast``, which depends on ``key`` only; the first layer calls."""
        if self._operand is None or self._key != key:
            self._key, self._operand = key, cast()
        operand = self._operand
        self._waiting = (self._waiting or self.layers) - 1
        if not self._waiting:
            self._operand = None
        return operand


class _Last(threading.local):
    """The last input of a thread that had an origin, and its cast."""

    input: Callable[[], Tensor | None] = staticmethod(lambda: None)
    cast: Callable[[], Recast | None] = staticmethod(lambda: None)


_LAST = _Last()


class Origin(NamedTuple):
    """A function that recomputes a matrix bit for bit, and its inputs, alive in backward."""

    make: Callable[..., Tensor | Prologue]
    tensors: tuple[Tensor, ...]

    def recast(self, x: Tensor) -> Recast:
        """Return the cast of x in backward, which consecutive layers with the input x share."""
        if (cast := _LAST.cast() if _LAST.input() is x else None) is None:
            cast = Recast()
            _LAST.input, _LAST.cast = weakref.ref(x), weakref.ref(cast)
        cast.layers += 1
        return cast


def origin_of(x: Tensor) -> Origin | None:
    """Return the origin of an input ``[..., K]``, which gives rows ``[M, K]``, or None.

    With saved-tensor hooks it is None: they may move a tensor, once for each node that saves it.
    """
    if x.grad_fn is None or saved_tensors_hooks(True) is not None:
        return None
    try:
        node = _behind_views(x.grad_fn, {*_VIEWS, "TransposeBackward0"})
        # Some ops save their output, such as attention and ReLU.
        output = getattr(node, "_saved_output", getattr(node, "_saved_result", None))
        memory = x.untyped_storage().data_ptr()
        if output is not None and output.untyped_storage().data_ptr() == memory:
            return Origin(partial(torch.reshape, shape=(-1, x.shape[-1])), (x,))
        # If the version is above 0, an in-place op has changed the values since.
        return None if x._version else _origin_by(_behind_views(x.grad_fn, _VIEWS), x)
    except RuntimeError:  # the node has freed its saved tensors, or one of them was changed
        return None


def _behind_views(node: Node | None, views: frozenset[str] | set[str]) -> Node | None:
    """Return the node whose output the views show; None if it is a custom autograd function."""
    while node is not None and node.name() in views:
        node = node.next_functions[0][0]
    return None if isinstance(node, BackwardCFunction) else node


def _origin_by(node: Node | None, x: Tensor) -> Origin | None:
    """Return the origin of x, the output of a node, if the node saved inputs of the same dtype."""
    rows = (-1, x.shape[-1])
    make: Callable[..., Tensor | Prologue]
    names: tuple[str, ...]
    match node and node.name():
        case "MulBackward0":
            make, names = partial(_multiply, rows=rows), ("self", "other")
        case "FusedRmsNormBackward0":
            make, names = _rms_norm, ("input", "weight", "result1")
        case "GeluBackward0":
            approximate = getattr(node, "_saved_approximate", "none")
            make, names = partial(_gelu, approximate=approximate, rows=rows), ("self",)
        case _:
            return None
    saved = [getattr(node, f"_saved_{name}", None) for name in names]
    tensors = tuple(tensor for tensor in saved if isinstance(tensor, Tensor))
    if len(tensors) < len(names) or any(tensor.dtype != x.dtype for tensor in tensors[:2]):
        return None
    if make is _rms_norm and tensors[1].shape != x.shape[-1:]:
        return None
    if any(isinstance(tensor, nn.Parameter) and tensor.ndim > 1 for tensor in tensors):
        return None
    # Save copies: FSDP2 frees parameters after forward, and gathers them by groups in backward.
    copies = [t.detach().clone() if isinstance(t, nn.Parameter) else t for t in tensors]
    return Origin(make, tuple(copies))


def _multiply(a: Tensor, b: Tensor, *, rows: tuple[int, int]) -> Prologue:
    factors = [factor.reshape(rows) for factor in torch.broadcast_tensors(a, b)]
    return Prologue("multiply", factors, a.dtype)


def _rms_norm(x: Tensor, weight: Tensor, rstd: Tensor) -> Prologue:
    return Prologue("rms_norm", (x.reshape(-1, x.shape[-1]), rstd.reshape(-1), weight), x.dtype)


def _gelu(x: Tensor, *, approximate: str, rows: tuple[int, int]) -> Tensor:
    return F.gelu(x, approximate=approximate).reshape(rows)
