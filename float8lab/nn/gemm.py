"""The three GEMMs of a linear layer in FP8.  M tokens, N out features, K in features.

What is cast, what is saved, what is computed again, fprop, dgrad and wgrad are here and nowhere
else; the autograd functions of all modules are compositions of ``forward`` and ``backward``.
Between the ops travel plain tensors.

The input of a GEMM is a matrix, or a ``Source``: a norm or an activation that is computed while it
is cast and never written. Of a matrix the transpose is saved for backward, in FP8. A source is
there in backward, too, and is cast again then, under the forward's scales. The FP8 weight is saved
where its transpose has the same bytes (one scale per tensor or square blocks), else the weight
itself, which is alive anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8lab.nn.casts import (
    Operand,
    cast,
    cast_again,
    cast_input,
    cast_weight,
    lives_on,
    plain,
    show_cast,
    show_gemm,
)
from float8lab.nn.precision import DY, Call, W, X
from float8lab.ops import Source, as_matrix, scaled_mm_op, transpose_op
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = [
    "PARTS",
    "Gradient",
    "LinearFunction",
    "Saved",
    "backward",
    "forward",
    "forward_again",
    "fused_weight",
    "output_dtype",
    "plain_weight",
]

# One GEMM with its two gradients.

Saved = tuple[Tensor | None, ...]
"""What backward needs beside the source:

- the matrix's transpose in FP8, or the matrix where wgrad runs in high precision;
- the scale of that, or of a source, and by what a source is cast again;
- the weight;
- its FP8 data, unless they are cast again; their scale, and by what they are cast again.
"""
PARTS = 7
"""How many tensors that is."""


def forward(
    x: Tensor | Source,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    *,
    needs: tuple[bool, bool],
    dtype: torch.dtype,
    inp: Tensor | None = None,
    again: bool = False,
) -> tuple[Tensor, Saved]:
    """``x @ weight.T + bias``, ``[M, N]``, and what its backward needs.

    Args:
        x: ``[M, K]``.
        weight: ``[N, K]``, ordinary or a Float8Tensor.
        bias: ``[N]`` or None.
        call: how to cast.
        needs: whether the gradient of x, and of the weight, is needed.
        dtype: of the result.
        inp: with a matrix, the layer's input that it is; with a source, its values if they are
            written anyway.
        again: of a source: save what ``forward_again`` needs, too.
    """
    plan, source = call.plan, isinstance(x, Source)
    needs_dx, needs_dw = needs
    wgrad = plan.wgrad if needs_dw else None
    uses = [plan.dgrad] * needs_dx + [plan.fprop] * again  # of the weight, in backward
    square = plan.w.block[0] == plan.w.block[1]
    keep_w = square and any(use is not None and use.right == plan.w for use in uses)
    saved_x: Saved = (None, None, None)
    x_q: Operand | None = None
    w_q: Any = None
    if source:
        value = x if inp is None else inp
        keep = plan.x.block == (-1, -1) and (wgrad or (again and plan.fprop))
        if plan.fprop or keep:
            q, scale, factor, *_ = cast(value, plan.x, X, call)
            x_q = q, scale
            if call.watched:
                show_cast(value, x_q, plan.x, X, call)
            saved_x = (None, scale, factor) if keep else saved_x
    else:
        value = x
        if plan.fprop or wgrad:
            assert isinstance(x, Tensor), "no source"
            assert inp is not None, "given with a matrix"
            straight, transposed = plan.fprop and plan.fprop.left, wgrad and wgrad.right
            q, scale, _, q_t, scale_t, _ = cast_input(inp, x, call, straight, transposed)
            x_q = q, scale
            if call.watched and straight:
                show_cast(x, x_q, straight, X, call)
            elif call.watched and transposed:
                show_cast(x.t(), (q_t, scale_t), transposed, X, call)
        if wgrad:
            # As e8m0 where that is exact: one byte each.
            e8m0 = wgrad.right.scale_rule == "e8m0"
            saved_x = (q_t, scale_t.to(torch.float8_e8m0fnu) if e8m0 else scale_t, None)
        elif needs_dw:
            saved_x = (x, None, None)  # type: ignore[assignment]  # a matrix
    if plan.fprop or keep_w:
        w_q = cast_weight(weight, call)

    y = _fprop(value, x_q, weight, w_q, bias, call, weight.shape[0], dtype)
    saved_w: Saved = (None, None, None)
    if keep_w:
        w8, scale, factor = w_q
        # With a source, a parameter is rather cast again than that its FP8 data are kept.
        lean = source and isinstance(weight, nn.Parameter) and not lives_on(w8, weight, call)
        saved_w = (None, scale, factor) if lean else (w8, scale, None)
    keep_high = len(uses) > 0 and (saved_w[0] is None or not all(uses))
    return y, (*saved_x, weight if keep_high else None, *saved_w)


def forward_again(
    x: Source, bias: Tensor | None, saved: Saved, call: Call, features: int
) -> Tensor:
    """In backward, the bytes that ``forward`` gave."""
    plan, (_, scale, factor, weight, *_) = call.plan, saved
    x_q = w_q = None
    if plan.fprop:
        x_q = cast_again(x, plan.fprop.left, scale, factor, call)
        w_q = _saved_weight(saved, call)
        if w_q is None:
            assert weight is not None, "kept for this"
            w_q = cast_weight(weight, call)[:2]
    high = saved[4] if weight is None else weight
    assert high is not None, "one of the two"
    return _fprop(x, x_q, high, w_q, bias, call, features, x.dtype)


def _saved_weight(saved: Saved, call: Call) -> Operand | None:
    """The FP8 weight of the forward, if it was saved or can be cast again."""
    *_, weight, w_q, scale, factor = saved
    if scale is None:
        return None
    if w_q is not None:
        return w_q, scale
    assert weight is not None, "kept for this"
    high = plain(weight) if isinstance(weight, Float8Tensor) else weight
    return cast_again(high, call.plan.w, scale, factor, call)


def _fprop(
    x: Tensor | Source,
    x_q: Operand | None,
    weight: Tensor,
    w_q: Any,
    bias: Tensor | None,
    call: Call,
    features: int,
    dtype: torch.dtype,
) -> Tensor:
    """``x @ weight.T + bias``, ``[M, features]`` in ``dtype``, from the operands if in FP8."""
    plan = call.plan
    if not plan.fprop:
        if call.watched:
            show_gemm("fprop", call, None, None)
        high = x.value() if isinstance(x, Source) else x
        added = None if bias is None else bias.to(dtype)
        return F.linear(high.to(dtype), plain(weight).to(dtype), added)
    assert x_q is not None, "cast for this"
    w, w_scale, *_ = w_q
    if call.watched:
        show_gemm("fprop", call, x_q, (w, w_scale))
    if bias is not None and bias.shape[0] != w.shape[0]:
        bias = F.pad(bias, (0, w.shape[0] - bias.shape[0]))
    left, right, fast_accum = plan.fprop
    y: Tensor = scaled_mm_op(*x_q, left.block, w, w_scale, right.block, bias, dtype, fast_accum)
    rows = (x.inputs[0] if isinstance(x, Source) else x).shape[0]
    # A compiled graph always crops: asking whether it must would fix the number of tokens.
    if torch.compiler.is_compiling() or y.shape != (rows, features):
        y = y[:rows, :features]
    return y.contiguous()


class Gradient:
    """The gradient of a GEMM's output, cast; what has been used can be forgotten."""

    __slots__ = ("high", "q", "q_t", "total")

    high: Tensor | None
    q: Operand | None
    """For dgrad; None if that runs in high precision."""
    q_t: Operand | None
    """Transposed, for wgrad."""
    total: Tensor | None
    """The sums over the rows, where they come for free."""

    def __init__(self, dy: Tensor | Source, call: Call, *, needs: tuple[bool, bool, bool]) -> None:
        """Cast ``dy`` for the gradients of x, weight and bias, as far as each is needed."""
        plan, (needs_dx, needs_dw, needs_db) = call.plan, needs
        dx = plan.dgrad.left if needs_dx and plan.dgrad else None
        dw = plan.wgrad.left if needs_dw and plan.wgrad else None
        if isinstance(dy, Source) and not (
            dx and (dw or not needs_dw) and (needs_dw or not needs_db)
        ):
            dy = dy.value()  # something wants it written
        self.high = None if isinstance(dy, Source) else dy
        self.q = self.q_t = self.total = None
        if not (dx or dw):
            return
        total = needs_db and dx is not None and dw is not None
        q, scale, _, q_t, scale_t, sums = cast(dy, dx, DY, call, transposed=dw, column_sum=total)
        if dx:
            self.q = q, scale
        if dw:
            self.q_t = q_t, scale_t
        if total:
            self.total = sums
        if call.watched and dx:
            show_cast(dy, (q, scale), dx, DY, call)
        elif call.watched and dw:
            show_cast(dy.t(), (q_t, scale_t), dw, DY, call)  # type: ignore[union-attr]


def backward(
    dy: Gradient,
    x: Source | None,
    saved: Saved,
    call: Call,
    *,
    needs: tuple[bool, bool, bool],
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, ``[M, K]``, of the weight, ``[N, K]``, and of the bias, ``[N]``.

    That of the weight is None if it went into the weight's ``main_grad``.

    Args:
        dy: gradient of the output; of no use afterwards.
        x: what was multiplied, if it was a source.
        saved: from ``forward``.
        call: how to cast.
        needs: which gradients are needed.
        shape: M, N, K.
        dtypes: of the gradients.
    """
    M, N, K = shape
    dx = dw = db = None
    if needs[0]:
        dx = _dgrad(dy, saved, call, (M, K), dtypes[0])
    dy.q = None  # its room may serve for dw
    if needs[1]:
        dw = _wgrad(dy, x, saved, call, (N, K), dtypes[1])
    if needs[2]:
        total = dy.total
        if total is None:
            assert dy.high is not None, "written"
            total = dy.high.sum(0, dtype=torch.float32)
        db = total.to(dtypes[2])
    return dx, dw, db


def _dgrad(
    dy: Gradient, saved: Saved, call: Call, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """``dy @ weight``."""
    plan, weight, watched = call.plan, saved[3], call.watched
    if dy.q is None:
        assert dy.high is not None, "kept for this"
        assert weight is not None, "kept for this"
        if watched:
            show_gemm("dgrad", call, None, None)
        return (dy.high @ plain(weight, dy.high).to(dy.high.dtype)).to(dtype)
    assert plan.dgrad is not None, "cast for it"
    left, right, fast_accum = plan.dgrad
    w_q = _saved_weight(saved, call)
    if w_q is None:
        assert weight is not None, "kept for this"
        high = plain(weight, dy.q[1])
        w_t = cast(high, None, W, call, transposed=right)[3:5]
        if watched and not plan.fprop:  # else the forward has cast it
            show_cast(high.t(), w_t, right, W, call, only_in_backward=True)
    else:
        # Square blocks: same bytes. A delayed scale is of shape [1], which t() leaves alone.
        event = dy.q[1] if torch.compiler.is_compiling() else None
        w_t = transpose_op(w_q[0], 1, event), w_q[1].t()
    if watched:
        show_gemm("dgrad", call, dy.q, w_t)
    dx = scaled_mm_op(*dy.q, left.block, *w_t, right.block, None, dtype, fast_accum)
    if torch.compiler.is_compiling() or dx.shape != shape:
        dx = dx[: shape[0], : shape[1]]
    return dx


def _wgrad(
    dy: Gradient,
    x: Source | None,
    saved: Saved,
    call: Call,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """``dy.T @ x``; None if it went into the weight's ``main_grad``."""
    plan, fused, (kept, scale, factor, *_) = call.plan, call.fused_weight, saved
    dtype = dtype if fused is None else fused.main_grad.dtype
    if dy.q_t is None:
        high = kept if x is None else x.value()
        assert dy.high is not None, "kept for this"
        assert high is not None, "kept for this"
        if call.watched:
            show_gemm("wgrad", call, None, None)
        dw = (dy.high.t() @ high.to(dy.high.dtype)).to(dtype)
    else:
        assert plan.wgrad is not None, "cast for it"
        left, right, fast_accum = plan.wgrad
        if x is None:
            assert kept is not None, "kept for this"
            assert scale is not None, "kept for this"
            x_t = kept, scale.float()
        else:
            x_t = cast_again(x, right, scale, factor, call, transposed=True)
        if call.watched:
            show_gemm("wgrad", call, dy.q_t, x_t)
        dw = scaled_mm_op(*dy.q_t, left.block, *x_t, right.block, None, dtype, fast_accum)
        if torch.compiler.is_compiling() or dw.shape != shape:
            dw = dw[: shape[0], : shape[1]]
    if fused is None:
        return dw
    _accumulate(fused, dw, overwrite=call.first_microbatch is True)
    return None


def _accumulate(weight: Any, dw: Tensor, *, overwrite: bool) -> None:
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
        _accumulate(ctx.weight, dw, overwrite=ctx.overwrite)
        return None, None, None


# A linear layer, the plainest composition.


def output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of torch.autocast if that is active, else of ``x``."""
    # torch.autocast does not know the meta device.
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


class LinearFunction(Float8Function):
    """``x @ weight.T + bias`` with FP8 GEMMs, forward and backward: ``run`` it.

    Args:
        x: ``[..., K]``.
        weight: ``[N, K]``, ordinary or a Float8Tensor.
        bias: ``[N]`` or None.
        call: how to cast, from ``Precision.begin``.

    Returns:
        ``[..., N]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        rows = x if x.ndim == 2 else as_matrix(x)
        N, K = weight.shape
        y, saved = forward(
            rows, weight, bias, call,
            needs=ctx.needs_input_grad[:2], dtype=output_dtype(x), inp=x,
        )  # fmt: skip
        ctx.save_for_backward(*saved)
        ctx.call = call
        ctx.shapes = x.shape, (rows.shape[0], N, K)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # Not a view: FSDP2 hooks the output, and an in-place op on a view would lose the hook.
        out: Tensor = torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], N))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (x_shape, shape) = ctx.needs_input_grad[:3], ctx.shapes
        gradient = Gradient(dy.reshape(shape[:2]), ctx.call, needs=needs)
        dx, dw, db = backward(
            gradient, None, ctx.saved_tensors, ctx.call,
            needs=needs, shape=shape, dtypes=ctx.dtypes,
        )  # fmt: skip
        return None if dx is None else dx.reshape(x_shape), dw, db, None
