"""One cast for several linear layers with the same x: q, k and v, or gate and up.

The last x that a layer has cast for training is remembered, weakly, and what it was cast to for as
long as it lives. Only a result of autograd counts, by the node that made it: of other tensors it
could not be told whether a kernel has overwritten them since, as a replayed CUDA graph does with
its outputs. Delayed scaling does not share, for every layer has a scale of its own.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from float8lab.formats import Float8Spec
from float8lab.nn.operands import Operand, cast, cast_pair, observe_cast
from float8lab.nn.precision import Call, X
from float8lab.recipes.region import STATE, capturing

__all__ = ["cast_input"]


class _Cast(NamedTuple):
    x: weakref.ref[Tensor]
    key: tuple[Float8Spec, float, int, int, int]
    q: Operand
    q_t: Operand


def cast_input(
    x: Tensor, rows: Tensor, call: Call, *, straight: bool, transposed: bool
) -> tuple[Operand | None, Operand | None]:
    """The input of a linear layer in FP8, in the orientations that are asked for.

    Args:
        x: ``[..., K]``, the layer's input.
        rows: the same as a matrix ``[M, K]``.
        call: says how to cast.
        straight: ``[M, K]`` is wanted, for fprop.
        transposed: ``[K, M]`` is wanted, for wgrad.
    """
    q, q_t = _cast_input(x, rows, call, straight=straight, transposed=transposed)
    if q is not None:
        observe_cast(rows, q, call.plan.x, X, call)
    elif q_t is not None:
        observe_cast(rows.t(), q_t, call.plan.x, X, call)
    return q, q_t


def _cast_input(
    x: Tensor, rows: Tensor, call: Call, *, straight: bool, transposed: bool
) -> tuple[Operand | None, Operand | None]:
    spec = call.plan.x
    if straight and transposed:
        if _may_share(x, call):
            return _shared(x, rows, call)
        q, q_t, _ = cast_pair(rows, spec, X, call)
        return q, q_t
    if straight:
        return cast(rows, spec, X, call), None
    return None, cast(rows.t(), spec, X, call) if transposed else None


def _may_share(x: Tensor, call: Call) -> bool:
    if call.plan.delayed or torch.compiler.is_compiling() or x.grad_fn is None:
        return False
    # A CUDA graph must hold all that its replay needs.
    return not (x.is_cuda and capturing())


def _shared(x: Tensor, rows: Tensor, call: Call) -> tuple[Operand, Operand]:
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
    assert x.grad_fn is not None, "asked before"
    node = x.grad_fn._sequence_nr()
    key = (call.plan.x, call.plan.amax_epsilon, x._version, node, stream)
    last = STATE.last_cast
    if last is not None and last.x() is x and last.key == key:
        return last.q, last.q_t
    q, q_t, _ = cast_pair(rows, call.plan.x, X, call)
    STATE.last_cast = _Cast(weakref.ref(x, _forget), key, q, q_t)
    return q, q_t


def _forget(x: weakref.ref[Tensor]) -> None:
    if STATE.last_cast is not None and STATE.last_cast.x is x:
        STATE.last_cast = None
