"""The three GEMMs of a linear layer in FP8.  M tokens, N out features, K in features.

What is cast, what is saved, what is computed again, fprop, dgrad and wgrad are here and nowhere
else; the autograd functions of all modules are compositions of ``forward`` and ``backward``.
Between the ops travel plain tensors.

With ``ends``, the ends of experts' rows, it is the linear layers of a mixture of experts: each row
is multiplied by its own expert's weight, ``[E, N, K]``.

The input of a GEMM is a matrix, or a ``Source``: a norm or an activation that is computed while it
is cast and never written. Of a matrix the transpose is saved for backward, in FP8. A source is
there in backward, too, and is cast again then, under the forward's scales. The FP8 weight is saved
where its transpose has the same bytes (one scale per tensor or square blocks), unless memory is to
be saved; else the weight itself, which is alive anyway.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from float8lab.distributed.tensor_parallel import noted
from float8lab.nn.casts import (
    By,
    KnownWeight,
    Matrix,
    Operand,
    Specs,
    amaxes_of_shards,
    cast,
    cast_by,
    forget_cast,
    kept_transpose,
    known_input,
    known_weight,
    lives_on,
    note_weight,
    plain,
    show_cast,
    show_gemm,
    show_input,
)
from float8lab.nn.main_grad import accumulate
from float8lab.nn.precision import DY, Call, W
from float8lab.nn.spread_gemm import (
    is_gathered_once,
    on_all_ranks,
    operands_of_wgrad,
    spread_dgrad,
    spread_product,
    spread_wgrad,
)
from float8lab.ops import (
    Ends,
    Groups,
    Source,
    as_matrix,
    grouped_mm_op,
    scaled_mm_op,
    transpose_op,
)
from float8lab.ops.declare import planned
from float8lab.recipes.delayed import Factors
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import STATE
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.differentiation import (
    Float8Function,
    once_differentiable,
    wanted_gradients,
)

__all__ = [
    "PARTS",
    "Gradient",
    "LinearFunction",
    "Saved",
    "backward",
    "forward",
    "forward_again",
    "output_dtype",
]

# One GEMM with its two gradients.

Saved = tuple[Tensor | None, ...]
"""The tensors that backward needs beside the source:

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
    ends: Ends | None = None,
    lean: bool = False,
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
        ends: of the experts' rows; then weight and bias are those of E experts, and
            rows beyond the last end give zeros.
        lean: cast the weight again in backward rather than keep its FP8 data; with a source,
            parameters always are.
    """
    (needs_dx, needs_dw), plan, parallel = needs, call.plan, call.parallel
    source, wgrad = isinstance(x, Source), plan.wgrad if needs_dw else None
    turns = needs_dx and plan.dgrad is not None and plan.dgrad.right == plan.w
    keep_w = plan.w.block[0] == plan.w.block[1] and (turns or (again and plan.fprop is not None))
    keep_x = plan.x.block == (-1, -1) and (wgrad or (again and plan.fprop))  # of a source
    once = parallel is not None and wgrad is not None and is_gathered_once(call)
    value: Matrix = inp if source and inp is not None else x
    value = value if ends is None else Groups.of(x, ends)
    specs: Specs = plan.x if plan.fprop or keep_x else None, None
    if not source:
        specs = plan.fprop and plan.fprop.left, None if once else wgrad and wgrad.right

    # Whatever depends on the state of the module comes before the product, or after it.
    spread = None if parallel is None else call
    amaxes = (None, None) if spread is None else amaxes_of_shards(value, weight, call)
    x_by, x_cast, key = known_input(value, None if source else inp, specs, call, amaxes[0])
    known: Any = known_weight(weight, call, amaxes[1]) if plan.fprop or keep_w else (None,) * 3
    first: Tensor = x.inputs[0] if source else x  # type: ignore[union-attr, assignment]
    plans = first.is_cuda and spread is None and not call.watched
    multiply: Any = _planned_product if plans else _product
    y, *x_now, w8, w_scale, w_factor = multiply(
        value, specs, x_by, x_cast, known, bias, weight.shape[-2], call.recipe, dtype, spread, once
    )  # fmt: skip
    q, scale, factor, q_t, scale_t = x_now
    if key is not None:
        STATE.last_cast = weakref.ref(inp, forget_cast), key, x_now  # type: ignore[arg-type]
    if call.watched:
        show_input(value, specs, x_now, call)
    if w8 is not None and (call.watched or STATE.weights is not None):
        note_weight(weight, (w8, w_scale, w_factor), call)
    if call.watched and (parallel is None or not plan.fprop):
        show_gemm("fprop", call, *(((q, scale), (w8, w_scale)) if plan.fprop else (None, None)))
    if y is None:
        y = _in_high_precision(value, weight, bias, dtype, call)

    saved_x: Saved = (None, None, None)
    if once:
        whole, whole_scale = noted(q)
        saved_x = transpose_op(whole, 1, None), whole_scale, factor
    elif source and keep_x:
        saved_x = (None, scale, factor)
    elif not source and wgrad:
        # As e8m0 where that is exact: one byte each.
        e8m0 = wgrad.right.scale_rule == "e8m0"
        saved_x = (q_t, scale_t.to(torch.float8_e8m0fnu) if e8m0 else scale_t, None)
    elif not source and needs_dw:
        saved_x = (x, None, None)  # type: ignore[assignment]  # a matrix
    saved_w: Saved = (None, None, None)
    if keep_w:
        lean = lean or (source and isinstance(weight, nn.Parameter))
        # Without an amax, nothing tells the bytes of a block that lies on several ranks.
        lean = lean and (spread is None or w_factor is not None)
        lean = lean and (known[0] is not None or not lives_on(w8, weight, call))
        saved_w = (None, w_scale, w_factor) if lean else (w8, w_scale, None)
    in_high = (needs_dx and plan.dgrad is None) or (again and plan.fprop is None)  # in backward
    keep_high = (needs_dx or again) and (saved_w[0] is None or in_high)
    return y, (*saved_x, weight if keep_high else None, *saved_w)


def _product(
    x: Matrix,
    specs: Specs,
    x_by: By,
    x_cast: Any,
    weight: KnownWeight,
    bias: Tensor | None,
    features: int,
    recipe: Recipe,
    dtype: torch.dtype,
    spread: Call | None = None,
    once: bool = False,
) -> tuple[Tensor | None, ...]:
    """``x @ weight.T + bias``, ``[M, features]``, None in high precision; x and weight in FP8.

    Args:
        x: what is multiplied.
        specs: how x, and its transpose, are cast.
        x_by: by what they are cast.
        x_cast: x in FP8, the first five results of ``cast``, where that is known.
        weight: of ``known_weight``; all None if the weight is not wanted in FP8.
        bias: ``[N]`` or None.
        features: N.
        recipe: how to cast.
        dtype: of the product.
        spread: the call, if the layer is spread over ranks.
        once: note what x is on all ranks at its codes, for wgrad.
    """
    plan, (straight, transposed) = recipe.linear, specs
    if x_cast is None:
        wanted = straight or transposed
        x_cast = cast_by(x, straight, transposed, plan, x_by)[:5] if wanted else (None,) * 5
    high, w_by, known = weight
    w_cast: Any = known or (None,) * 3
    if high is not None:
        w_cast = cast_by(high, plan.w, None, plan, w_by)[:3]
    y = None
    if plan.fprop:
        left, right, fast_accum = plan.fprop
        (x8, x_scale, *_), (w8, w_scale, _) = x_cast, w_cast
        if spread is not None:
            shape = (x if isinstance(x, Tensor) else x.inputs[0]).shape[0], features
            both = x_cast[:2], w_cast[:2]
            y, whole = spread_product(*both, plan.fprop, shape, dtype, spread, bias, keep=once)
            if spread.watched:
                show_gemm("fprop", spread, whole, w_cast[:2])
            return y, *x_cast, *w_cast
        if bias is not None and bias.shape[-1] != w8.shape[-2]:
            bias = F.pad(bias, (0, w8.shape[-2] - bias.shape[-1]))
        operands = x8, x_scale, left.block, w8, w_scale, right.block, bias
        if isinstance(x, Groups):
            y = grouped_mm_op(*operands, x.offs, dtype, fast_accum, x.plan)
            shape = y.shape[0], features
        else:
            y = scaled_mm_op(*operands, dtype, fast_accum)
            shape = (x if isinstance(x, Tensor) else x.inputs[0]).shape[0], features
        # A compiled graph always crops: asking whether it must would fix the number of tokens.
        if torch.compiler.is_compiling() or y.shape != shape:
            y = y[: shape[0], : shape[1]]
        y = y.contiguous()
    return y, *x_cast, *w_cast


_planned_product = planned(_product)


def _in_high_precision(
    x: Matrix, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, call: Call
) -> Tensor:
    high, parallel = (x if isinstance(x, Tensor) else x.value()).to(dtype), call.parallel
    if parallel is not None:
        high = parallel.entered(high, call.rows)
        bias = parallel.added(bias)
    added = None if bias is None else bias.to(dtype)
    if isinstance(x, Groups):
        return _multiply_groups(high, plain(weight).to(dtype), x.offs, dtype, added)
    y = F.linear(high, plain(weight).to(dtype), added)
    return y if parallel is None else parallel.left(y, call.rows)


def _multiply_groups(
    a: Tensor, b: Tensor, offs: Tensor | None, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """``grouped_mm`` in high precision."""
    y: Tensor = grouped_mm_op(a, None, (), b, None, (), bias, offs, dtype, False)
    return y


def forward_again(
    x: Source, bias: Tensor | None, saved: Saved, call: Call, features: int
) -> Tensor:
    """In backward, the bytes that ``forward`` gave."""
    parts: Any = saved
    plan, (_, scale, factor, weight, w8, w_scale, w_factor) = call.plan, parts
    if not plan.fprop:
        assert weight is not None, "kept for this"
        if call.watched:
            show_gemm("fprop", call, None, None)
        return _in_high_precision(x, weight, bias, x.dtype, call)
    x_q = cast_by(x, plan.fprop.left, None, plan, (Factors(scale, factor), None))[:5]
    known: KnownWeight = None, None, (w8, w_scale, None)
    if w8 is None:
        assert weight is not None, "kept for this"
        if w_scale is None:
            known = known_weight(weight, call)
        else:
            known = plain(weight), (Factors(w_scale, w_factor), None), None
    y, *_, w8, w_scale, _ = _product(
        x, (None, None), None, x_q, known, bias, features, call.recipe, x.dtype,
        None if call.parallel is None else call,
    )  # fmt: skip
    if call.watched and call.parallel is None:
        show_gemm("fprop", call, x_q[:2], (w8, w_scale))  # type: ignore[arg-type]  # in FP8
    assert y is not None, "in FP8"
    return y


class Gradient:
    """The gradient of a GEMM's output, cast; what has been used can be forgotten."""

    __slots__ = ("high", "q", "q_t", "total", "turns")

    high: Tensor | None
    q: Operand | None
    """For dgrad; None if that runs in high precision."""
    q_t: Operand | None
    """Transposed, for wgrad."""
    total: Tensor | None
    """The sums over the rows, or over each expert's, where they come for free."""
    turns: bool
    """The transpose is made of what dgrad gathers from other ranks."""

    def __init__(
        self,
        dy: Tensor | Source,
        call: Call,
        *,
        needs: tuple[bool, bool, bool],
        ends: Ends | None = None,
    ) -> None:
        """Cast ``dy`` for the gradients of x, weight and bias, as far as each is needed."""
        plan, (needs_dx, needs_dw, needs_db) = call.plan, needs
        dx = plan.dgrad.left if needs_dx and plan.dgrad else None
        dw = plan.wgrad.left if needs_dw and plan.wgrad else None
        total = needs_db and (ends is not None or (dx is not None and dw is not None))
        if isinstance(dy, Source) and not (
            dx and (dw or not needs_dw) and (needs_dw or not needs_db)
        ):
            dy = dy.value()  # something wants it written
        self.high = None if isinstance(dy, Source) else dy
        self.q = self.q_t = self.total = None
        self.turns = False
        if not (dx or dw):
            return
        if call.parallel is not None and call.parallel.scatters and dx == dw:
            self.turns = plan.dy.block == (-1, -1)
            dw = None if self.turns else dw
        x: Matrix = dy if ends is None else Groups.of(dy, ends)
        q, scale, _, q_t, scale_t, sums = cast(x, dx, DY, call, transposed=dw, column_sum=total)
        if dx:
            self.q = q, scale
        if dw:
            self.q_t = q_t, scale_t
        if total:
            self.total = sums
        if call.watched and dx:
            show_cast(x, (q, scale), dx, DY, call)
        elif call.watched and dw and ends is None:
            show_cast(dy.t(), (q_t, scale_t), dw, DY, call)  # type: ignore[union-attr]


def backward(
    dy: Tensor | Gradient,
    x: Source | None,
    saved: Saved,
    call: Call,
    *,
    needs: tuple[bool, bool, bool],
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
    ends: Ends | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, ``[M, K]``, of the weight, ``[N, K]``, and of the bias, ``[N]``.

    That of the weight is what ``accumulate`` gives if it went into the weight's ``main_grad``.

    Args:
        dy: gradient of the output. A caller that has no use for it any more casts it before, as a
            ``Gradient``, which is of no use afterwards.
        x: what was multiplied, if it was a source.
        saved: from ``forward``.
        call: how to cast.
        needs: which gradients are needed.
        shape: M, N, K.
        dtypes: of the gradients.
        ends: of experts' rows, if they are in groups.
    """
    fused, plan = call.fused_weight, call.plan
    parts: Any = saved
    kept, x_scale, x_factor, weight, w8, w_scale, w_factor = parts
    graph, spread = torch.compiler.is_compiling(), None if call.parallel is None else call
    if isinstance(dy, Tensor) and (graph or call.watched or call.shards is not None):
        dy = Gradient(dy, call, needs=needs, ends=ends)
    cast_dy = None if isinstance(dy, Tensor) else dy
    for_dx = for_dw = for_wgrad = None
    if spread is not None and needs[1] and plan.wgrad:  # before dgrad, beside which it travels
        for_wgrad = operands_of_wgrad(dy, x, kept, Factors(x_scale, x_factor), call)
    if needs[0]:
        by: By = None if w_scale is None else (Factors(w_scale, w_factor), None)
        w_t, high = None, None if w8 is not None and plan.dgrad else weight
        shared = spread is not None or (by is None and call.shards is not None)
        if plan.dgrad and (graph or shared):
            event = cast_dy.q[1] if cast_dy is not None and cast_dy.q else None
            high, by, w_t = _weight_transposed(high, w8, by, call, event=event)
        elif ends is not None and w8 is not None and call.first_microbatch is not None:
            w_t = kept_transpose(w8, w_scale, call)
        elif isinstance(high, (Float8Tensor, Float4Tensor)):
            high = plain(high, dy if isinstance(dy, Tensor) else dy.high)
        for_dx = high, w8, by, w_t, w_scale is not None, dtypes[0]
    if needs[1]:
        main = fused[0] if isinstance(fused, tuple) else fused
        dtype = dtypes[1] if main is None else main.main_grad.dtype
        for_dw = x, kept, Factors(x_scale, x_factor), dtype
    db_dtype = dtypes[2] if needs[2] else None
    if isinstance(dy, Tensor):
        by_dy: By = None
        if plan.delayed and ((needs[0] and plan.dgrad) or (needs[1] and plan.wgrad)):
            matrix = dy if ends is None else Groups.of(dy, ends)
            by_dy = call.known[DY] or call.scale(DY, matrix)
        multiply: Any = _planned_gradients if dy.is_cuda else _gradients
        dx, dw, db = multiply(
            dy, None, by_dy, for_dx, for_dw, db_dtype, shape, call.recipe, None, ends
        )
    else:
        some, others = (for_dx, for_dw, db_dtype), (for_wgrad, shape, ends)
        dx, dw, db = _gradients_in_turn(dy, *some, call, *others)
    if fused is not None and dw is not None:
        dw = accumulate(fused, dw, overwrite=call.first_microbatch is True)
    return dx, dw, db


def _gradients_in_turn(
    dy: Gradient,
    for_dx: Any,
    for_dw: Any,
    db_dtype: torch.dtype | None,
    call: Call,
    for_wgrad: Any,
    shape: tuple[int, int, int],
    ends: Ends | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``_gradients`` of what is cast already, which is forgotten as soon as it has served.

    ``for_wgrad`` are the operands of a layer that is spread over ranks.
    """
    (M, N, K), dx, dw, db = shape, None, None, None
    rest = shape, call.recipe, call if call.watched else None, ends
    spread = None if call.parallel is None else call
    on_gpu = (dy.q or dy.q_t or (dy.high,))[0].is_cuda  # type: ignore[union-attr]  # one of them
    multiply: Any = _planned_gradients if on_gpu and not (spread or call.watched) else _gradients
    if for_dx is not None and spread is not None:
        high, _, _, w_t, known, dtype = for_dx
        dx = spread_dgrad(dy, high, w_t, known, call, (M, K), dtype, for_wgrad)
    elif for_dx is not None:
        dx, *_ = multiply(dy.high, (dy.q, None, None), None, for_dx, None, None, *rest)
    dy.q = None  # its room may serve for dw
    if for_dw is not None and spread is not None:
        x, kept, _, dtype = for_dw
        dw, for_dw = spread_wgrad(dy, x, kept, for_wgrad, call, (N, K), dtype), None
    if for_dw is not None or db_dtype is not None:
        cast_dy = None, dy.q_t, dy.total
        _, found, db = multiply(dy.high, cast_dy, None, None, for_dw, db_dtype, *rest)
        dw = found if dw is None else dw
    return dx, dw, db


def _gradients(
    dy: Tensor | None,
    cast_dy: tuple[Operand | None, Operand | None, Tensor | None] | None,
    by: By,
    for_dx: Any,
    for_dw: Any,
    db_dtype: torch.dtype | None,
    shape: tuple[int, int, int],
    recipe: Recipe,
    watching: Call | None,
    ends: Ends | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, ``[M, K]``, of the weight, ``[N, K]``, and of the bias; None if not wanted.

    Args:
        dy: the gradient in high precision, if it is written.
        cast_dy: it in FP8, its transpose and its sums, as far as it has been cast before.
        by: by what it is cast, else.
        for_dx: the other operand of dgrad, see ``_dgrad``, and the dtype of the result.
        for_dw: the other operand of wgrad, see ``_wgrad``, and the dtype of the result.
        db_dtype: of the gradient of the bias.
        shape: M, N, K.
        recipe: how to cast.
        watching: the call, if somebody watches it.
        ends: of experts' rows, if they are in groups.
    """
    (M, N, K), plan = shape, recipe.linear
    dx = dw = db = None
    known: Any = cast_dy or (None, None, None)
    q, q_t, total = known
    if cast_dy is None:
        assert dy is not None, "to be cast"
        straight = plan.dgrad.left if for_dx is not None and plan.dgrad else None
        transposed = plan.wgrad.left if for_dw is not None and plan.wgrad else None
        if straight or transposed:
            matrix = dy if ends is None else Groups.of(dy, ends)
            free = ends is not None or (straight is not None and transposed is not None)
            q, scale, _, q_t, scale_t, sums = cast_by(
                matrix, straight, transposed, plan, by, column_sum=free and db_dtype is not None
            )
            q, q_t, total = (q, scale), (q_t, scale_t), sums if free else None
    if for_dx is not None:
        left: Any = q if plan.dgrad else dy
        dx = _dgrad(left, recipe, (M, K), watching, ends, *for_dx)
    q = left = known = None  # their room may serve for dw
    if for_dw is not None:
        left = q_t if plan.wgrad else dy
        dw = _wgrad(left, recipe, (N, K), watching, ends, *for_dw)
    if db_dtype is not None and total is None:
        assert dy is not None, "written"
        if ends is None:
            total = dy.sum(0, dtype=torch.float32)
        else:
            # The op that contracts over groups sums over them, too; of 8 columns, 16 bytes, in
            # rows of their own, which torch takes whatever the number of tokens.
            ones = dy.new_ones((M, 8)).t()
            total = _multiply_groups(dy.t(), ones, ends.offs, dy.dtype)[..., 0]
    if db_dtype is not None and total is not None:
        db = total.to(db_dtype)
    return dx, dw, db


_planned_gradients = planned(_gradients)


def _weight_transposed(
    weight: Tensor | None, w8: Tensor | None, by: By, call: Call, *, event: Tensor | None
) -> tuple[Tensor | None, By, Any]:
    """The weight in high precision and by what its transpose is cast, or that.

    In a graph, and of a layer that is spread over ranks. A compiled forward keeps nothing of the
    transpose for a backward that gives ``event``, a tensor of its own.
    """
    assert call.plan.dgrad is not None, "in FP8"
    if w8 is not None:
        assert by is not None, "saved by the forward"
        scale = by[0].scale
        return None, by, (transpose_op(w8, 1, event), scale if scale.ndim == 1 else scale.mT)
    assert weight is not None, "kept for this"
    high = plain(weight, event)
    if by is None:
        return None, None, cast(high, None, W, call, transposed=call.plan.dgrad.right)[3:5]
    if call.parallel is None:
        return high, by, None
    w8, scale, *_ = cast_by(high, call.plan.w, None, call.plan, by)
    return None, by, (transpose_op(w8, 1, event), scale.t())


def _dgrad(
    dy: Tensor | Operand,
    recipe: Recipe,
    shape: tuple[int, int],
    watching: Call | None,
    ends: Ends | None,
    weight: Tensor | None,
    w8: Tensor | None,
    by: By,
    w_t: Any,
    turns: bool,
    dtype: torch.dtype,
) -> Tensor:
    """``dy @ weight``, of the FP8 weight, its transpose, or the weight in high precision.

    ``turns``: the transpose has the bytes of the forward's FP8 weight, which ``by`` makes again.
    """
    plan = recipe.linear
    if isinstance(dy, Tensor):
        assert weight is not None, "kept for this"
        if watching is not None:
            show_gemm("dgrad", watching, None, None)
        if ends is not None:
            return _multiply_groups(dy, weight.to(dy.dtype).mT, ends.offs, dtype)
        return (dy @ weight.to(dy.dtype)).to(dtype)
    assert plan.dgrad is not None, "cast for it"
    left, right, fast_accum = plan.dgrad
    if w_t is None and w8 is not None:
        assert by is not None, "saved by the forward"
        scale = by[0].scale
        alone = scale.ndim == 1 or scale.shape[-2:] == (1, 1)
        w_t = transpose_op(w8, 1, None), scale if alone else scale.mT
    elif w_t is None:
        assert weight is not None, "kept for this"
        w_t = cast_by(weight, None, right, plan, by)[3:5]
    if watching is not None:
        if not turns and not plan.fprop and ends is None:  # else the forward has cast it
            assert weight is not None, "cast just now"
            show_cast(weight.t(), w_t, right, W, watching, only_in_backward=True)
        show_gemm("dgrad", watching, dy, w_t)
    operands = *dy, left.block, *w_t, right.block, None
    if ends is None:
        dx = scaled_mm_op(*operands, dtype, fast_accum)
    else:
        dx = grouped_mm_op(*operands, ends.offs, dtype, fast_accum, ends.plan)
    if torch.compiler.is_compiling() or dx.shape != shape:
        dx = dx[: shape[0], : shape[1]]
    return dx


def _wgrad(
    dy: Tensor | Operand,
    recipe: Recipe,
    shape: tuple[int, int],
    watching: Call | None,
    ends: Ends | None,
    x: Source | None,
    kept: Tensor | None,
    factors: Factors,
    dtype: torch.dtype,
) -> Tensor:
    """``dy.T @ x``, of dy in high precision or of its transpose in FP8.

    ``kept`` is x transposed in FP8, or x in high precision; without it x is the source.
    """
    plan = recipe.linear
    if isinstance(dy, Tensor):
        high = kept if x is None else x.value()
        assert high is not None, "kept for this"
        if watching is not None:
            show_gemm("wgrad", watching, None, None)
        if ends is not None:
            return _multiply_groups(dy.t(), high.to(dy.dtype).t(), ends.offs, dtype)
        return (dy.t() @ high.to(dy.dtype)).to(dtype)
    assert plan.wgrad is not None, "cast for it"
    left, right, fast_accum = plan.wgrad
    if x is None:
        assert kept is not None, "kept for this"
        x_t = kept, factors.scale.float()
    else:
        source = x if ends is None else Groups.of(x, ends)
        x_t = cast_by(source, None, right, plan, (factors, None))[3:5]
    if watching is not None:
        show_gemm("wgrad", watching, dy, x_t)
    operands = *dy, left.block, *x_t, right.block, None
    if ends is None:
        dw = scaled_mm_op(*operands, dtype, fast_accum)
    else:
        dw = grouped_mm_op(*operands, ends.offs, dtype, fast_accum, ends.plan)
    if torch.compiler.is_compiling() or dw.shape[-2:] != shape:
        dw = dw[..., : shape[0], : shape[1]]
    return dw


# A linear layer, the plainest composition.


def output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of torch.autocast if that is active, else of ``x``; float64 stays so, as there."""
    # torch.autocast does not know the meta device.
    active = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    if active and x.dtype != torch.float64:
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
        ctx.shapes, shape = (x.shape, (rows.shape[0], N, K)), (*x.shape[:-1], N)
        if call.rows is not None:
            M, shape = on_all_ranks(x, N, call)
            ctx.shapes = x.shape, (M, N, K)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        # Not a view: FSDP2 hooks the output, and an in-place op on a view would lose the hook.
        if not torch.compiler.is_compiling() and y.shape == shape and not y._is_view():
            return y
        out: Tensor = torch.ops.aten._unsafe_view.default(y, shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (x_shape, shape) = wanted_gradients(ctx)[:3], ctx.shapes
        if dy.ndim != 2:
            dy = dy.reshape(shape[:2]) if ctx.call.rows is None else as_matrix(dy)
        dx, dw, db = backward(
            dy, None, ctx.saved_tensors, ctx.call,
            needs=needs, shape=shape, dtypes=ctx.dtypes,
        )  # fmt: skip
        if dx is not None and len(x_shape) != 2:
            dx = dx.reshape(x_shape)
        return dx, dw, db, None
