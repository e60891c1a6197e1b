"""Casts of a linear layer's operands.  M tokens, N out features, K in features.

An operand is FP8 data, padded so that every dimension is a multiple of ``ALIGN``, and its decode
scales. What is cast is a matrix or a ``Source``, a matrix that is computed on the way and never
written.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from float8lab.formats import Float8Spec
from float8lab.nn.in_graph import cast_in_graph
from float8lab.nn.precision import DY, Call, W, X
from float8lab.ops import Source, cast_op, round_up
from float8lab.recipes.delayed import Factors
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import PROCESS, STATE, capturing, in_backward
from float8lab.tensor import Float8Tensor

__all__ = [
    "ALIGN",
    "Operand",
    "cast",
    "cast_again",
    "cast_input",
    "cast_weight",
    "lives_on",
    "plain",
    "recast",
    "show_cast",
    "show_gemm",
    "stored_as",
]

ALIGN = 16
"""Multiple that Hopper's FP8 GEMM wants of every dimension."""

Operand = tuple[Tensor, Tensor]  # FP8 data and decode scales


def cast(
    x: Tensor | Source,
    spec: Float8Spec | None,
    index: int,
    call: Call,
    *,
    transposed: Float8Spec | None = None,
    column_sum: bool = False,
    align: int = ALIGN,
) -> tuple[Any, ...]:
    """x in FP8, in one orientation or both, from one read where both are cast alike.

    Args:
        x: what is cast.
        spec: how x is cast; None where it is not wanted.
        index: which of the layer's tensors it is.
        call: of the layer.
        transposed: how the transpose is cast, in blocks of its own rows; or None.
        column_sum: the sums over the rows of x are wanted, too.
        align: the sizes of the result are multiples of it.

    Returns:
        FP8 data and scales of x; what ``cast_again`` needs beside the scales; FP8 data and scales
        of its transpose; the sums over its rows. What is not asked for is None, or empty.
    """
    plan = call.plan
    if spec is not None and transposed is not None and spec != transposed:
        first = cast(x, spec, index, call, column_sum=column_sum, align=align)
        second = cast(x, None, index, call, transposed=transposed, align=align)
        return *first[:3], *second[3:5], first[5]
    wanted = spec is not None, transposed is not None, column_sum
    spec = spec or transposed
    assert spec is not None, "one of the two"
    if plan.delayed and torch.compiler.is_compiling():
        matrix = x[:3] if isinstance(x, Source) else ("", [x], x.dtype)
        q, scale, encode, q_t, total = cast_in_graph(
            matrix, index, call, spec.fp8_dtype, align, *wanted
        )
        return q, scale, encode, q_t, scale, total
    if isinstance(x, Source):
        prologue, inputs, dtype, amax = x
    else:
        prologue, inputs, dtype, amax = "", (x,), x.dtype, None
    if plan.delayed:
        factors, slot = call.known[index] or call.scale(index, x)
        q, _, _, q_t, _, total = cast_op(
            prologue, inputs, dtype, spec.fp8_dtype, spec.block, "encode", 0.0, align,
            *wanted, factors.encode, slot,
        )  # fmt: skip
        return q, factors.scale, factors.encode, q_t, factors.scale, total
    whole = spec.block == (-1, -1)
    if not whole:
        amax = None
    elif prologue == "" and torch.compiler.is_compiling():
        amax = _amax_in_graph(x, index)  # type: ignore[arg-type]  # no source
    q, scale, found, q_t, scale_t, total = cast_op(
        prologue, inputs, dtype, spec.fp8_dtype, spec.block, spec.scale_rule, float(plan.epsilon),
        align, *wanted, amax,
    )  # fmt: skip
    factor = (found if amax is None else amax) if whole else None
    return q, scale, factor, q_t, scale_t, total


def _amax_in_graph(x: Tensor, index: int) -> Tensor | None:
    """The amax of a matrix in a compiled graph, in plain PyTorch; None where the op finds it.

    A compiler finds it in the loop that computes the matrix; the op has to read the matrix for it.
    By rows, as norms are, or the compiler makes two loops. A weight is computed by nothing. Short
    rows make Inductor hold whole ones in registers: right for a norm, but a costly gradient, such
    as that of rotary embedding, took three times as long on an H200.
    """
    short = index == DY and x.shape[1] <= _SHORT_ROWS
    if index == W or short or not x.numel():
        return None
    return x.abs().amax(1).amax().float().view(1, 1)


_SHORT_ROWS = 1024
"""Inductor's reductions of up to so many are "persistent"."""


def cast_again(
    x: Tensor | Source,
    spec: Float8Spec,
    scale: Tensor | None,
    factor: Tensor | None,
    call: Call,
    *,
    transposed: bool = False,
) -> Operand:
    """In backward, what the forward has cast, by what ``cast`` gave beside it.

    A scale that was found does not tell the encode factor exactly. So ``factor`` is the encode
    factor under delayed scaling, else the amax of a matrix that is scaled as a whole; of others the
    cast finds it.
    """
    source = x[:3] if isinstance(x, Source) else ("", (x,), x.dtype)
    rule = "encode" if call.plan.delayed else spec.scale_rule
    results = cast_op(
        *source, spec.fp8_dtype, spec.block, rule, float(call.plan.epsilon), ALIGN,
        not transposed, transposed, False, factor,
    )  # fmt: skip
    q, own = results[3:5] if transposed else results[:2]
    if call.plan.delayed:
        assert scale is not None, "the forward has saved it"
        return q, scale
    return q, own


def cast_input(
    x: Tensor, rows: Tensor, call: Call, spec: Float8Spec | None, transposed: Float8Spec | None
) -> Any:
    """``cast`` of a layer's input, the matrix ``rows``, once for several layers with the same x.

    These are q, k and v, or gate and up. The last x that was cast for training is remembered,
    weakly, and what it was cast to for as long as it lives. Only a result of autograd counts, by
    the node that made it: of other tensors it could not be told whether a kernel has overwritten
    them since, as a replayed CUDA graph does with its outputs. Delayed scaling does not share, for
    every layer has a scale of its own.
    """
    plan, alone = call.plan, spec is None or transposed is None
    node = None if alone or plan.delayed or torch.compiler.is_compiling() else x.grad_fn
    if node is None or (x.is_cuda and capturing()):  # a replay needs all
        return cast(rows, spec, X, call, transposed=transposed)
    stream = torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
    key = (spec, transposed, plan.epsilon, x._version, node._sequence_nr(), stream)
    last = STATE.last_cast
    if last is not None and last[0]() is x and last[1] == key:
        return last[2]
    results = cast(rows, spec, X, call, transposed=transposed)
    STATE.last_cast = weakref.ref(x, _forget), key, results
    return results


def _forget(x: weakref.ref[Tensor]) -> None:
    if STATE.last_cast is not None and STATE.last_cast[0] is x:
        STATE.last_cast = None


# What an observer is shown (``float8lab/inspect/watch``), where ``call.watched``.


def show_cast(
    x: Tensor | Source,
    operand: Operand,
    spec: Float8Spec,
    index: int,
    call: Call,
    *,
    only_in_backward: bool = False,
) -> None:
    """A matrix was cast to ``operand`` for a layer's GEMMs.

    In backward that of x or w is a repetition, by activation checkpointing, unless it is made only
    there.
    """
    if PROCESS.observer is not None and (index == DY or only_in_backward or not in_backward()):
        PROCESS.observer.saw_cast(x, operand, spec, index, call)


def show_gemm(kind: str, call: Call, a: Operand | None, b: Operand | None) -> None:
    """``fprop``, ``dgrad`` or ``wgrad`` runs, of these operands or in high precision."""
    if PROCESS.observer is not None:
        PROCESS.observer.saw_gemm(kind, call, a, b)


# Weights.


def plain(weight: Tensor, event: Tensor | None = None) -> Tensor:
    """A weight in high precision.

    A compiled forward keeps nothing of it for a backward that gives ``event``, a tensor of its own.
    """
    if not isinstance(weight, Float8Tensor):
        return weight
    if event is not None and torch.compiler.is_compiling():
        return weight._decode(event)
    return weight.dequantize()


def stored_as(weight: Tensor, spec: Float8Spec) -> TypeGuard[Float8Tensor]:
    """Whether a weight's own bytes are the operand."""
    if not isinstance(weight, Float8Tensor):
        return False
    return (weight.spec.block, weight.spec.fp8_dtype) == (spec.block, spec.fp8_dtype)


def recast(weight: Tensor, spec: Float8Spec) -> str | None:
    """From what to what a weight that is stored in FP8 is cast; None if it is not cast."""
    if not isinstance(weight, Float8Tensor) or stored_as(weight, spec):
        return None
    return f"stored as {weight.spec.describe()} and cast to {spec.describe()}"


def _warn_of_recast(weight: Tensor, call: Call) -> None:
    """Say once a module that its weight's bytes are not the operand."""
    precision, found = call.precision, recast(weight, call.plan.w)
    if found is None or precision is None or precision.warned_of_recast:
        return
    precision.warned_of_recast = True
    warnings.warn(
        f"{precision.name or 'A layer'}: its weight {tuple(weight.shape)} is {found} in every "
        f"forward, for {call.recipe}: it is rounded twice. Store it for that recipe, or run it "
        "under the one that it was stored for.",
        UserWarning,
        stacklevel=2,
    )


def _stored(weight: Float8Tensor, spec: Float8Spec) -> Operand:
    """The FP8 data of a weight that is stored as ``spec`` wants it, padded."""
    q, scale = weight.qdata, weight.scale
    rows, columns = (round_up(size, ALIGN) for size in q.shape)
    if q.shape != (rows, columns):
        pad = (0, columns - q.shape[1], 0, rows - q.shape[0])
        q = F.pad(q.view(torch.uint8), pad).view(q.dtype)
        high, wide = spec.scale_shape(q.shape)
        scale = F.pad(scale, (0, wide - scale.shape[1], 0, high - scale.shape[0]), value=1.0)
    return q, scale


def cast_weight(weight: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weight in FP8: stored so, kept, or cast now; and what ``cast_again`` needs if so.

    It is cast in every forward unless the caller says that it did not change. Nothing about a
    tensor tells that reliably: fused optimizers and ``weight.data`` leave the version counter
    alone. ``is_first_microbatch`` does: True casts and keeps, False reuses. CPU offload hears of
    what lives on.
    """
    spec, factor = call.plan.w, None
    stored = isinstance(weight, Float8Tensor)
    if stored and stored_as(weight, spec):
        q, scale = _stored(weight, spec)
    else:
        high = weight
        if stored:
            if not torch.compiler.is_compiling():
                _warn_of_recast(weight, call)  # a graph holds no warnings
            high = plain(weight)
        alone = call.first_microbatch is None or call.precision is None
        if alone or torch.compiler.is_compiling():
            q, scale, factor, *_ = cast(high, spec, W, call)
        else:
            q, scale = _kept_weight(high, call)
    if call.watched:
        show_cast(weight, (q, scale), spec, W, call)
    if not torch.compiler.is_compiling() and STATE.weights is not None:
        key = StorageWeakRef(q.untyped_storage())
        STATE.weights[key] = lives_on(q, weight, call)
    return q, scale, factor


def _kept_weight(weight: Tensor, call: Call) -> Operand:
    """The cast of a weight that is kept over microbatches."""
    precision, kept = call.precision, call.precision.weight_cast  # type: ignore[union-attr]
    if not call.first_microbatch and kept is not None and kept.fits(weight, call.recipe):
        if kept.factors is not None:
            call.known[W] = kept.factors, None
        return kept.q, kept.scale
    with torch.inference_mode(False), torch.no_grad():  # training may use it next
        q, scale, *_ = cast(weight, call.plan.w, W, call)
    known = call.known[W]
    precision.weight_cast = _WeightCast(  # type: ignore[union-attr]
        weakref.ref(weight), _version(weight), call.recipe, q, scale, known and known[0]
    )
    return q, scale


class _WeightCast(NamedTuple):
    """The cast that is kept from one microbatch to the next."""

    weight: weakref.ref[Tensor]
    version: int
    recipe: Recipe
    q: Tensor
    scale: Tensor
    factors: Factors | None
    """Under delayed scaling."""

    def fits(self, weight: Tensor, recipe: Recipe) -> bool:
        same = self.weight() is weight and self.recipe == recipe
        return same and self.version == _version(weight)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def lives_on(q: Tensor, weight: Tensor, call: Call) -> bool:
    """Whether the FP8 data of a weight is kept in any case, saved for backward or not."""
    kept = None if call.precision is None else call.precision.weight_cast
    return isinstance(weight, Float8Tensor) or (kept is not None and kept.q is q)
