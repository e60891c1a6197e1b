"""FP8 operands of the three GEMMs of a linear layer.  M tokens, N out features, K in features.

What the autograd functions of all modules share. An operand is FP8 data, padded so that every
dimension is a multiple of ``ALIGN``, and its decode scales. What is cast is a matrix or a
``Source``, a matrix that is computed on the way and never written.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from float8lab.formats import Float8Spec
from float8lab.nn.in_graph import cast_in_graph, cast_pair_in_graph
from float8lab.nn.precision import DY, Call, W
from float8lab.ops import (
    Source,
    cast_of_op,
    cast_of_unrecorded_op,
    cast_op,
    cast_pair_of_op,
    cast_pair_op,
    cast_unrecorded_op,
    quantize_of_op,
    quantize_op,
    quantize_pair_of_op,
    quantize_pair_op,
    round_up,
    scaled_mm_op,
    transpose_after_op,
    transpose_op,
)
from float8lab.recipes.delayed import Factors
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import PROCESS, STATE, in_backward
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import Float8Function

__all__ = [
    "ALIGN",
    "Operand",
    "accumulate",
    "cast",
    "cast_again",
    "cast_gradient",
    "cast_pair",
    "cast_repeatable",
    "cast_weight",
    "cast_weight_again",
    "cast_weight_repeatable",
    "compress",
    "crop",
    "dgrad",
    "fprop",
    "gemm",
    "lives_on",
    "observe_cast",
    "plain",
    "recast",
    "same_when_transposed",
    "stored_as",
    "wgrad",
]

ALIGN = 16
"""Multiple that Hopper's FP8 GEMM wants of every dimension."""

Operand = tuple[Tensor, Tensor]  # FP8 data and decode scales

Repeatable = tuple[Operand, Tensor | None]
"""An operand and what is needed, beside its scale, to cast to the same bytes again.

A scale that was found does not tell the encode factor exactly. So under delayed scaling that is the
encode factor, else the amax of a matrix that is scaled as a whole; of others the cast finds it.
"""


# What an observer is shown (``float8lab/inspect/watch``). A compiled graph has no trace of it.


def observe_cast(
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
    if torch.compiler.is_compiling() or PROCESS.observer is None:
        return
    if index == DY or only_in_backward or not in_backward():
        PROCESS.observer.saw_cast(x, operand, spec, index, call)


def _observe_gemm(kind: str, call: Call, a: Operand | None, b: Operand | None) -> None:
    """``fprop``, ``dgrad`` or ``wgrad`` ran, of these operands or in high precision."""
    if not torch.compiler.is_compiling() and PROCESS.observer is not None:
        PROCESS.observer.saw_gemm(kind, call, a, b)


# Casts.


def cast(x: Tensor | Source, spec: Float8Spec, index: int, call: Call) -> Operand:
    """One orientation of x in FP8."""
    return cast_repeatable(x, spec, index, call)[0]


def cast_repeatable(x: Tensor | Source, spec: Float8Spec, index: int, call: Call) -> Repeatable:
    """``cast``, and what ``cast_again`` or ``cast_weight_again`` needs."""
    plan = call.plan
    if plan.delayed and torch.compiler.is_compiling():
        q, scale, encode = cast_in_graph(x, index, call, spec.fp8_dtype, ALIGN)
        return (q, scale), encode
    how = (spec.fp8_dtype, spec.block, spec.scale_rule, plan.amax_epsilon, ALIGN)
    if isinstance(x, Source):
        source = (x.kind, x.inputs, x.dtype, False)
        if plan.delayed:
            factors, slot = call.scale(index, _looked_at(x, index, call))
            q = cast_of_op(*source, factors.encode, slot, spec.fp8_dtype, ALIGN)
            return (q, factors.scale), factors.encode
        known = x.known_amax if spec.per_tensor else None
        q, scale, amax = quantize_of_op(*source, known, *how)
        amax = amax if known is None else known
    elif plan.delayed:
        factors, slot = call.scale(index, x)
        q = cast_op(x, factors.encode, slot, spec.fp8_dtype, spec.block, ALIGN)
        return (q, factors.scale), factors.encode
    else:
        known = _amax_in_graph(x, spec, index) if torch.compiler.is_compiling() else None
        q, scale, amax = quantize_op(x, *how, known)
    return (q, scale), amax if spec.per_tensor else None


def cast_pair(
    x: Tensor | Source, spec: Float8Spec, index: int, call: Call, *, column_sum: bool = False
) -> tuple[Operand, Operand, Tensor]:
    """x and x transposed in FP8 from one read of x, and its column sums if asked."""
    plan = call.plan
    if plan.delayed and torch.compiler.is_compiling():
        q, q_t, scale, total = cast_pair_in_graph(x, index, call, spec.fp8_dtype, ALIGN, column_sum)
        return (q, scale), (q_t, scale), total
    how = (spec.fp8_dtype, spec.block, spec.scale_rule, plan.amax_epsilon, ALIGN, column_sum)
    if isinstance(x, Source):
        source = (x.kind, x.inputs, x.dtype)
        if plan.delayed:
            factors, slot = call.scale(index, _looked_at(x, index, call))
            given = (factors.encode, slot, spec.fp8_dtype, ALIGN, column_sum)
            q, q_t, total = cast_pair_of_op(*source, *given)
            return (q, factors.scale), (q_t, factors.scale), total
        q, scale, q_t, scale_t, total = quantize_pair_of_op(*source, *how)
        return (q, scale), (q_t, scale_t), total
    if plan.delayed:
        factors, slot = call.scale(index, x)
        given = (factors.encode, slot, spec.fp8_dtype, ALIGN, column_sum)
        q, q_t, total = cast_pair_op(x, *given)
        return (q, factors.scale), (q_t, factors.scale), total
    amax = _amax_in_graph(x, spec, index) if torch.compiler.is_compiling() else None
    q, scale, q_t, scale_t, total = quantize_pair_op(x, *how, amax)
    return (q, scale), (q_t, scale_t), total


def _amax_in_graph(x: Tensor, spec: Float8Spec, index: int) -> Tensor | None:
    """The amax of a matrix in a compiled graph, in plain PyTorch; None where the op finds it.

    A compiler finds it in the loop that computes the matrix; the op has to read the matrix for it.
    By rows, as norms are, or the compiler makes two loops. A weight is computed by nothing. Short
    rows make Inductor hold whole ones in registers: right for a norm, but a costly gradient, such
    as that of rotary embedding, took three times as long on an H200.
    """
    short = index == DY and x.shape[1] <= _SHORT_ROWS
    if not spec.per_tensor or index == W or short or not x.numel():
        return None
    return x.abs().amax(1).amax().float().view(1, 1)


_SHORT_ROWS = 1024
"""Inductor's reductions of up to so many are "persistent"."""


def _looked_at(x: Source, index: int, call: Call) -> Tensor:
    """What ``Call.scale`` may see of a source: as empty as it is, and of its amax if it asks."""
    first = x.inputs[0]
    return x.amax() if first.numel() and call.asks_for_values(index) else first


def cast_again(
    x: Source,
    spec: Float8Spec,
    scale: Tensor | None,
    factor: Tensor | None,
    call: Call,
    *,
    transposed: bool,
) -> Operand:
    """In backward, what the forward has cast, by what ``cast_repeatable`` gave beside it."""
    source, epsilon = (x.kind, x.inputs, x.dtype, transposed), call.plan.amax_epsilon
    if call.plan.delayed:
        assert scale is not None, "the forward has saved it"
        return cast_of_unrecorded_op(*source, factor, spec.fp8_dtype, ALIGN), scale
    q, own, _ = quantize_of_op(
        *source, factor, spec.fp8_dtype, spec.block, spec.scale_rule, epsilon, ALIGN
    )
    return q, own


def same_when_transposed(spec: Float8Spec) -> bool:
    """Whether the transpose of a matrix has the matrix's bytes and scales, transposed."""
    return spec.block[0] == spec.block[1]


def compress(scale: Tensor, spec: Float8Spec) -> Tensor:
    """Scales as they are saved for backward: one byte each where that is exact."""
    return scale.to(torch.float8_e8m0fnu) if spec.scale_rule == "e8m0" else scale


# Weights.


def plain(weight: Tensor) -> Tensor:
    """A weight in high precision."""
    return weight.dequantize() if isinstance(weight, Float8Tensor) else weight


def _plain_in_backward(weight: Tensor, event: Tensor) -> Tensor:
    """``plain``, of which a compiled forward keeps nothing for backward, whose is ``event``."""
    if not torch.compiler.is_compiling() or not isinstance(weight, Float8Tensor):
        return plain(weight)
    return weight._decode(event)


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


def _stored(weight: Tensor, spec: Float8Spec) -> Operand | None:
    """The FP8 data of a weight that is stored as ``spec`` wants it."""
    if not stored_as(weight, spec):
        return None
    q = weight.qdata
    rows, columns = (round_up(size, ALIGN) for size in q.shape)
    if q.shape != (rows, columns):
        pad = (0, columns - q.shape[1], 0, rows - q.shape[0])
        q = torch.nn.functional.pad(q.view(torch.uint8), pad).view(q.dtype)
        missing = [
            n - h for n, h in zip(spec.scale_shape(q.shape), weight.scale.shape, strict=True)
        ]
        pad = (0, missing[1], 0, missing[0])
        return q, torch.nn.functional.pad(weight.scale, pad, value=1.0)
    return q, weight.scale


def cast_weight(weight: Tensor, call: Call) -> Operand:
    """The weight in FP8: stored so, kept, or cast now; CPU offload hears which."""
    return cast_weight_repeatable(weight, call)[0]


def cast_weight_repeatable(weight: Tensor, call: Call) -> Repeatable:
    """``cast_weight``, and what ``cast_weight_again`` needs if it was cast now."""
    operand, factor = _find_or_cast_weight(weight, call)
    observe_cast(weight, operand, call.plan.w, W, call)
    if not torch.compiler.is_compiling() and STATE.weights is not None:
        key = StorageWeakRef(operand[0].untyped_storage())
        STATE.weights[key] = lives_on(operand, weight, call)
    return operand, factor


def lives_on(operand: Operand, weight: Tensor, call: Call) -> bool:
    """Whether the FP8 data of a weight is kept in any case, saved for backward or not."""
    kept = None if call.precision is None else call.precision.weight_cast
    return isinstance(weight, Float8Tensor) or (kept is not None and kept.q is operand[0])


def cast_weight_again(weight: Tensor, scale: Tensor, factor: Tensor | None, call: Call) -> Operand:
    """In backward, what the forward has cast, by what ``cast_weight_repeatable`` gave beside it."""
    spec, plan = call.plan.w, call.plan
    if plan.delayed:
        q = cast_unrecorded_op(plain(weight), factor, spec.fp8_dtype, spec.block, ALIGN)
        return q, scale
    how = (spec.fp8_dtype, spec.block, spec.scale_rule, plan.amax_epsilon, ALIGN)
    q, own, _ = quantize_op(plain(weight), *how, factor)
    return q, own


def _find_or_cast_weight(weight: Tensor, call: Call) -> Repeatable:
    """The weight in FP8, cast in every forward unless the caller says that it did not change.

    Nothing about a tensor tells that reliably: fused optimizers and ``weight.data`` leave the
    version counter alone. ``is_first_microbatch`` does: True casts and keeps, False reuses.
    """
    spec, precision, first = call.plan.w, call.precision, call.first_microbatch
    stored = _stored(weight, spec)
    if stored is not None:
        return stored, None
    if isinstance(weight, Float8Tensor) and not torch.compiler.is_compiling():
        _warn_of_recast(weight, call)  # a graph holds no warnings
    weight = plain(weight)
    if first is None or precision is None or torch.compiler.is_compiling():
        return cast_repeatable(weight, spec, W, call)
    kept = precision.weight_cast
    if not first and kept is not None and kept.fits(weight, call.recipe):
        if kept.factors is not None:
            call.used[W] = kept.factors
        return (kept.q, kept.scale), None
    with torch.inference_mode(False), torch.no_grad():  # training may use it next
        q, scale = cast(weight, spec, W, call)
    precision.weight_cast = _WeightCast(
        weakref.ref(weight), _version(weight), call.recipe, q, scale, call.used.get(W)
    )
    return (q, scale), None


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


def _transposed_weight(kept: Tensor | Operand, call: Call, dy_q: Operand) -> Operand:
    """The weight's transpose in FP8, for dgrad by ``dy_q``, from the weight or from its cast."""
    if isinstance(kept, Tensor):
        w_t = _plain_in_backward(kept, dy_q[1]).t()
        operand = cast(w_t, call.plan.w, W, call)
        if not call.plan.fprop:  # else the forward has cast it
            observe_cast(w_t, operand, call.plan.w, W, call, only_in_backward=True)
        return operand
    # Square blocks: same bytes. A delayed scale is of shape [1], which t() leaves alone.
    if torch.compiler.is_compiling():
        return transpose_after_op(kept[0], 1, dy_q[1]), kept[1].t()
    return transpose_op(kept[0], 1), kept[1].t()


# GEMMs.


def gemm(
    a: Operand,
    a_spec: Float8Spec,
    b: Operand,
    b_spec: Float8Spec,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """``a @ b.T + bias``, padded."""
    out: Tensor = scaled_mm_op(*a, a_spec.block, *b, b_spec.block, bias, dtype, fast_accum)
    return out


def crop(x: Tensor, rows: int, columns: int) -> Tensor:
    """The part of a padded matrix that is not padding."""
    # A compiled graph always slices: asking whether it must would fix the number of tokens.
    if not torch.compiler.is_compiling() and x.shape == (rows, columns):
        return x
    return x[:rows, :columns]


def _pad_columns_of_bias(bias: Tensor | None, width: int) -> Tensor | None:
    if bias is None or bias.shape[0] == width:
        return bias
    return torch.nn.functional.pad(bias, (0, width - bias.shape[0]))


def fprop(
    x: Tensor | Source,
    x_q: Operand | None,
    weight: Tensor,
    w_q: Operand | None,
    bias: Tensor | None,
    call: Call,
    *,
    features: int,
    dtype: torch.dtype,
) -> Tensor:
    """``x @ weight.T + bias``, ``[M, features]`` in ``dtype``.

    In high precision, from ``x`` and ``weight``, if an operand is None.
    """
    plan = call.plan
    _observe_gemm("fprop", call, x_q, w_q)
    if x_q is None or w_q is None:
        high = x.value() if isinstance(x, Source) else x
        added = None if bias is None else bias.to(dtype)
        return torch.nn.functional.linear(high.to(dtype), plain(weight).to(dtype), added)
    rows = (x.inputs[0] if isinstance(x, Source) else x).shape[0]
    padded = _pad_columns_of_bias(bias, w_q[0].shape[0])
    y = gemm(x_q, plan.x, w_q, plan.w, padded, dtype, plan.fast_accum[0])
    return crop(y, rows, features).contiguous()


def cast_gradient(
    dy: Tensor | Source, call: Call, *, dx: bool, dw: bool, column_sum: bool
) -> tuple[Operand | None, Operand | None, Tensor | None]:
    """dy for dgrad, dy transposed for wgrad, where they run in FP8, and its column sums.

    The sums are None where they do not come for free.
    """
    spec = call.plan.dy
    fp8_dx, fp8_dw = dx and call.plan.dgrad, dw and call.plan.wgrad
    if fp8_dx and fp8_dw:
        dy_q, dy_t, total = cast_pair(dy, spec, DY, call, column_sum=column_sum)
        observe_cast(dy, dy_q, spec, DY, call)
        return dy_q, dy_t, total if column_sum else None
    if fp8_dx:
        dy_q = cast(dy, spec, DY, call)
        observe_cast(dy, dy_q, spec, DY, call)
        return dy_q, None, None
    if fp8_dw:
        value = (dy.value() if isinstance(dy, Source) else dy).t()
        dy_t = cast(value, spec, DY, call)
        observe_cast(value, dy_t, spec, DY, call)
        return None, dy_t, None
    return None, None, None


def dgrad(
    dy: Tensor | None,
    dy_q: Operand | None,
    kept: Tensor | Operand,
    call: Call,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """``dy @ weight``, of ``shape`` ``[M, K]`` in ``dtype``; from ``dy`` if ``dy_q`` is None.

    ``kept`` is the weight, or its cast if dgrad runs in FP8 and the transpose has the same bytes.
    """
    plan = call.plan
    if dy_q is None:
        _observe_gemm("dgrad", call, None, None)
        assert dy is not None, "one of the two"
        assert isinstance(kept, Tensor), "in high precision"
        return (dy @ _plain_in_backward(kept, dy).to(dy.dtype)).to(dtype)
    w_t = _transposed_weight(kept, call, dy_q)
    _observe_gemm("dgrad", call, dy_q, w_t)
    dx = gemm(dy_q, plan.dy, w_t, plan.w, None, dtype, plan.fast_accum[1])
    return crop(dx, *shape)


def wgrad(
    dy: Tensor | None,
    dy_t: Operand | None,
    x: Tensor | None,
    x_t: Operand | None,
    call: Call,
    *,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """``dy.T @ x``, of ``shape`` ``[N, K]``; None if it went into the weight's ``main_grad``.

    From ``dy`` and ``x`` if ``dy_t`` and ``x_t`` are None.
    """
    plan, fused = call.plan, call.fused_weight
    _observe_gemm("wgrad", call, dy_t, x_t)
    dtype = dtype if fused is None else fused.main_grad.dtype
    if dy_t is not None and x_t is not None:
        dw = gemm(dy_t, plan.dy, x_t, plan.x, None, dtype, plan.fast_accum[2])
        dw = crop(dw, *shape)
    else:
        assert dy is not None, "one of the two"
        assert x is not None, "one of the two"
        dw = (dy.t() @ x.to(dy.dtype)).to(dtype)
    if fused is None:
        return dw
    accumulate(fused, dw, overwrite=call.first_microbatch is True)
    return None


def accumulate(weight: Any, dw: Tensor, *, overwrite: bool) -> None:
    """Add (or, in a first microbatch, write) the gradient into ``weight.main_grad``."""
    if overwrite:
        weight.main_grad.copy_(dw)
    else:
        weight.main_grad.add_(dw)
    weight.grad_added_to_main_grad = True  # the mark that Megatron's optimizers look for


def fused_weight(module: Any, weight: Tensor) -> Tensor | None:
    """The weight, if the module's argument and its ``main_grad`` ask for gradients there."""
    return weight if module.fuse_wgrad_accumulation and hasattr(weight, "main_grad") else None


def plain_weight(module: Any, weight: Tensor, first_microbatch: bool | None) -> Tensor:
    """``plain(weight)``, whose gradient goes into ``main_grad`` if the module asks for that."""
    fused = fused_weight(module, weight)
    if fused is None or not (fused.requires_grad and torch.is_grad_enabled()):
        return plain(weight)
    found: Tensor = _IntoMainGrad.run(plain(weight), fused, first_microbatch is True)
    return found


class _IntoMainGrad(Float8Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, overwrite: bool) -> Tensor:
        ctx.weight, ctx.overwrite = weight, overwrite
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, dw: Tensor) -> tuple[None, None, None]:
        accumulate(ctx.weight, dw, overwrite=ctx.overwrite)
        return None, None, None
