"""The GEMMs of a mixture of experts in FP8.  M tokens, E experts, N out features, K in features.

``y = x @ w[e].T`` for the rows of each expert e; the rows of an expert follow those of the expert
before, and ``offs``, ``[E]``, are where they end. What is cast, saved and computed again is what
``gemm.py`` says of one linear layer, and the functions here are composed in the same way; only the
ops are those of groups. An operand of a weight gradient is laid out as ``ops/reference/grouped.py``
says.

A weight has one cast for each expert: under a recipe of one scale per tensor, a scale for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.formats import Float8Spec
from float8lab.nn.casts import Operand, lives_on, note_storage, plain, show_cast, show_gemm
from float8lab.nn.gemm import output_dtype
from float8lab.nn.in_graph import cast_in_graph
from float8lab.nn.precision import DY, Call, W, X
from float8lab.ops import (
    Groups,
    Source,
    amax_op,
    cast_groups_op,
    cast_op,
    grouped_mm_op,
    round_up,
    transpose_op,
)
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import Factors
from float8lab.recipes.recipe import GemmPlan, LinearPlan, Recipe
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import Float8Function, once_differentiable

__all__ = [
    "PARTS",
    "Gradient",
    "GroupedFunction",
    "Saved",
    "backward",
    "forward",
    "in_first_rank",
    "into_buffer",
    "spec_of_experts",
    "stacked",
    "stored_as",
]

Saved = tuple[Tensor | None, ...]
"""What backward needs beside the source, as in ``gemm.py``."""
PARTS = 7
"""How many tensors that is."""

_HIGH_PRECISION = LinearPlan(
    None, None, None, Float8Spec(), Float8Spec(), Float8Spec(), delayed=False, epsilon="0.0"
)


def _plan(call: Call | None) -> LinearPlan:
    return _HIGH_PRECISION if call is None else call.plan


def spec_of_experts(spec: Float8Spec) -> Float8Spec:
    """How the weights of all experts, ``[E, N, K]``, are cast where each is cast as ``spec``."""
    return replace(spec, block=(1, *spec.block))


# Casts.


def _cast(
    x: Tensor | Source,
    offs: Tensor | None,
    spec: Float8Spec | None,
    index: int,
    call: Call,
    *,
    transposed: Float8Spec | None = None,
    column_sum: bool = False,
) -> tuple[Any, ...]:
    """``casts.cast`` of a matrix in groups, or of a batch where ``offs`` is None."""
    if call.parallel is not None and not call.plan.delayed:
        shared = _cast_shard(x, offs, spec, transposed, index, call, column_sum=column_sum)
        if shared is not None:
            return shared
    if spec is not None and transposed is not None and spec != transposed:
        first = _cast(x, offs, spec, index, call, column_sum=column_sum)
        second = _cast(x, offs, None, index, call, transposed=transposed)
        return *first[:3], *second[3:5], first[5]
    wanted = spec is not None, transposed is not None, column_sum
    spec = spec or transposed
    assert spec is not None, "one of the two"
    plan = call.plan
    groups = Groups(*(x[:3] if isinstance(x, Source) else ("", (x,), x.dtype)), offs)
    if plan.delayed and torch.compiler.is_compiling():
        q, scale, encode, q_t, total = cast_in_graph(
            groups[:3], index, call, spec.fp8_dtype, ALIGN, *wanted, offs=offs
        )
    elif plan.delayed:
        factors, slot = call.known[index] or call.scale(index, groups)
        q, _, _, q_t, _, total = cast_groups_op(
            *groups, spec.fp8_dtype, spec.block, "encode", 0.0, *wanted, factors.encode, slot
        )
        scale, encode = factors.scale, factors.encode
    else:
        amax = x.known_amax if isinstance(x, Source) and spec.block == (-1, -1) else None
        parallel = call.parallel if spec.block == (-1, -1) else None
        if parallel is not None and parallel.sharded(index) is not None:
            amax = parallel.largest(groups.amax())
        q, scale, found, q_t, scale_t, total = cast_groups_op(
            *groups, spec.fp8_dtype, spec.block, spec.scale_rule, plan.amax_epsilon, *wanted, amax
        )
        return q, scale, found if amax is None else amax, q_t, scale_t, total
    scale = scale.view(-1, 1, 1) if offs is None else scale
    return q, scale, encode, q_t, scale, total


def _cast_shard(
    x: Tensor | Source,
    offs: Tensor | None,
    spec: Float8Spec | None,
    transposed: Float8Spec | None,
    index: int,
    call: Call,
    *,
    column_sum: bool,
) -> tuple[Any, ...] | None:
    """``_cast`` of a shard of features, with the bytes that it has in the whole.

    None where no row and no part of one lies on several ranks.
    """
    parallel = call.parallel
    assert parallel is not None, "of a layer that is spread"
    dim = parallel.sharded(index)
    if dim is None:
        return None
    cut = parallel.are_cut(0, call.plan.edge)
    ways = (spec, dim, False), (transposed, 1 - dim, True)
    several = [
        how is not None and how.block != (-1, -1) and (-1 in how.block or cut)
        and how.block[axis] != 1
        for how, axis, _ in ways
    ]  # fmt: skip
    if not any(several):
        return None
    total = _sums_of_groups(x, offs) if column_sum and all(several) else None
    results: list[tuple[Any, ...]] = []
    for (how, axis, flip), crosses in zip(ways, several, strict=True):
        if how is None:
            results.append((None, None))
        elif crosses:
            assert isinstance(x, Tensor), "what ranks share is written"
            results.append(_cast_parts(x, offs, how, axis, call, flip=flip))
        else:
            wanted, turned = (None, how) if flip else (how, None)
            found = _cast(x, offs, wanted, index, call, transposed=turned, column_sum=column_sum)
            results.append(found[3:5] if flip else found[:2])
            total = found[5]
    (q, scale), (q_t, scale_t) = results
    return q, scale, None, q_t, scale_t, total


def _cast_parts(
    x: Tensor, offs: Tensor | None, how: Float8Spec, axis: int, call: Call, *, flip: bool
) -> Operand:
    """One orientation of a shard whose rows, or blocks, have parts on several ranks.

    Args:
        x: ``[M, K]`` in groups, or ``[E, N, K]``.
        offs: ends of the groups; None for a batch.
        how: it is cast, or the transpose of each matrix of a batch.
        axis: the dimension of the result along which it is a shard.
        call: of the layer.
        flip: the transpose is wanted.
    """
    parallel, high, size = call.parallel, how.block[0], how.block[axis]
    assert parallel is not None, "of a layer that is spread"
    if offs is not None:  # what belongs to nobody is taken for zeros
        inside = torch.arange(x.shape[0], device=x.device)[:, None] < offs[-1:]
        matrices = torch.where(inside, x, 0.0)[None]
    else:
        matrices = x.mT if flip else x
    E, rows, columns = matrices.shape
    # All below each other, blocks and what the products want of rows included.
    below = round_up(rows, high if offs is not None else max(high, ALIGN))
    matrix = F.pad(matrices, (0, 0, 0, below - rows)).reshape(E * below, columns)
    grid = amax_op("", (matrix,), matrix.dtype, how.block).unflatten(0, (E, below // high))
    grid = grid if axis else grid.mT  # what lies on several ranks last
    length = parallel.pieces[0]
    shared, _ = parallel.shared_amaxes(
        grid.flatten(0, 1), size, 1, parallel.places(length), length * parallel.size
    )
    shared = shared.view_as(grid)
    amaxes = (shared if axis else shared.mT).flatten(0, 1)
    down, across = how.scale_shape((round_up(E * below, ALIGN), round_up(columns, ALIGN)))
    pad = (0, across - amaxes.shape[1], 0, down - amaxes.shape[0])
    q, scale, *_ = cast_op(
        "", (matrix,), matrix.dtype, how.fp8_dtype, how.block, how.scale_rule,
        call.plan.amax_epsilon, ALIGN, True, False, False, F.pad(amaxes, pad), None,
    )  # fmt: skip
    if offs is not None:
        return q[:rows], scale[:rows]
    tall = round_up(rows, ALIGN)
    q = q.view(torch.uint8).view(E, below, -1)[:, :tall].contiguous().view(q.dtype)
    return q, scale.reshape(E, below // high, across)[:, : -(-tall // high)].contiguous()


def _sums_of_groups(x: Tensor | Source, offs: Tensor | None) -> Tensor:
    """The sums over the rows of each group, ``[E, K]``, float32."""
    assert isinstance(x, Tensor), "written"
    assert offs is not None, "of groups"
    group = torch.searchsorted(
        offs, torch.arange(x.shape[0], device=x.device, dtype=offs.dtype), right=True
    )
    total = x.new_zeros((offs.shape[0] + 1, x.shape[1]), dtype=torch.float32)
    return total.index_add_(0, group, x.float())[:-1]


def _cast_again(
    x: Tensor | Source,
    offs: Tensor | None,
    spec: Float8Spec,
    scale: Tensor | None,
    factor: Tensor | None,
    call: Call,
    *,
    transposed: bool = False,
) -> Operand:
    """In backward, what the forward has cast, by what ``_cast`` gave beside it."""
    source = x[:3] if isinstance(x, Source) else ("", (x,), x.dtype)
    delayed = call.plan.delayed
    # Blocks have no amax that is known: through the dispatcher, the op gives an empty tensor.
    known = factor if delayed or spec.block == (-1, -1) else None
    results = cast_groups_op(
        *source, offs, spec.fp8_dtype, spec.block, "encode" if delayed else spec.scale_rule,
        call.plan.amax_epsilon, not transposed, transposed, False, known,
    )  # fmt: skip
    q, own = results[3:5] if transposed else results[:2]
    return q, own if not delayed or scale is None else scale


def stored_as(weight: Tensor, spec: Float8Spec) -> bool:
    """Whether the weights' own bytes are the operand."""
    if not isinstance(weight, Float8Tensor):
        return False
    wanted = spec_of_experts(spec)
    return (weight.spec.block, weight.spec.fp8_dtype) == (wanted.block, wanted.fp8_dtype)


def _stored(weight: Float8Tensor) -> Operand:
    """The FP8 data of weights that are stored as the recipe wants them, padded."""
    q, scale = weight.qdata, weight.scale
    rows, columns = (round_up(size, ALIGN) for size in q.shape[1:])
    if q.shape[1:] != (rows, columns):
        pad = (0, columns - q.shape[2], 0, rows - q.shape[1])
        q = F.pad(q.view(torch.uint8), pad).view(q.dtype)
        *_, high, wide = weight.spec.scale_shape(tuple(q.shape))
        scale = F.pad(scale, (0, wide - scale.shape[2], 0, high - scale.shape[1]), value=1.0)
    return q, scale


class _Kept(NamedTuple):
    """The cast of weights that is kept from one microbatch to the next."""

    recipe: Recipe
    q: Tensor
    scale: Tensor
    factors: Factors | None
    """Under delayed scaling."""


def _cast_weight(weight: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
    """The weights in FP8: stored so, kept, or cast now; and what ``_cast_again`` needs if so."""
    spec, factor = call.plan.w, None
    if isinstance(weight, Float8Tensor) and stored_as(weight, spec):
        q, scale = _stored(weight)
    elif call.first_microbatch is None or call.precision is None or torch.compiler.is_compiling():
        q, scale, factor, *_ = _cast(plain(weight), None, spec, W, call)
    else:
        q, scale = _kept_weight(weight, call)
    if call.watched:
        _show_weights(weight, (q, scale), spec, call)
    note_storage(q, weight, call)
    return q, scale, factor


def _kept_weight(weight: Tensor, call: Call) -> Operand:
    """The cast of weights that is kept over microbatches."""
    precision = call.precision
    assert precision is not None, "asked for"
    kept, spec = precision.weight_cast, call.plan.w
    if not call.first_microbatch and kept is not None and kept.recipe == call.recipe:
        if kept.factors is not None:
            call.known[W] = kept.factors, None
        return kept.q, kept.scale
    with torch.inference_mode(False), torch.no_grad():  # training may use it next
        q, scale, *_ = _cast(plain(weight), None, spec, W, call)
    known = call.known[W]
    precision.weight_cast = _Kept(call.recipe, q, scale, known and known[0])
    return q, scale


# What an observer is shown, where ``call.watched``: matrices, as of any linear layer.


def _show_rows(
    x: Tensor | Source, offs: Tensor, operand: Operand, spec: Float8Spec, index: int, call: Call
) -> None:
    """The rows of all experts; those that belong to nobody are zeros."""
    value = x.value() if isinstance(x, Source) else x
    inside = torch.arange(value.shape[0], device=value.device)[:, None] < offs[-1:]
    show_cast(torch.where(inside, value, 0.0), operand, spec, index, call)


def _show_weights(weight: Tensor, operand: Operand, spec: Float8Spec, call: Call) -> None:
    """The weights of all experts below each other, unless a block would have rows of two."""
    (E, N, K), (q, scale) = weight.shape, operand
    if isinstance(weight, Float8Tensor) or (spec.block[0] > 1 and N % spec.block[0]):
        return
    high = (N if spec.block[0] == -1 else spec.block[0], spec.block[1])
    down = scale.shape[1] if spec.block[0] != 1 else N
    rows = q[:, :N].reshape(E * N, -1), scale[:, :down].reshape(E * down, -1)
    show_cast(weight.detach().reshape(E * N, K), rows, replace(spec, block=high), W, call)


# The three GEMMs.


def _multiply(
    a: Operand, b: Operand, gemm: GemmPlan, offs: Tensor, dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    left, right, fast_accum = gemm
    y: Tensor = grouped_mm_op(*a, left.block, *b, right.block, bias, offs, dtype, fast_accum)
    return y


def _multiply_plain(
    a: Tensor, b: Tensor, offs: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """In high precision."""
    y: Tensor = grouped_mm_op(a, None, (), b, None, (), bias, offs, dtype, False)
    return y


def _crop(y: Tensor, *sizes: int) -> Tensor:
    """Without the padding of the last two dimensions."""
    # A compiled graph always crops: asking whether it must would fix the number of tokens.
    if torch.compiler.is_compiling() or y.shape[-2:] != sizes:
        y = y[..., : sizes[0], : sizes[1]]
    return y


def forward(
    x: Tensor | Source,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    call: Call | None,
    *,
    needs: tuple[bool, bool],
    dtype: torch.dtype,
) -> tuple[Tensor, Saved]:
    """``x @ weight[e].T + bias[e]`` for the rows of each expert, and what its backward needs.

    Args:
        x: ``[M, K]``.
        weight: ``[E, N, K]``, ordinary or a Float8Tensor.
        bias: ``[E, N]`` or None.
        offs: ends of the experts' rows, ``[E]``.
        call: how to cast; None is high precision.
        needs: whether the gradient of x, and of the weight, is needed.
        dtype: of the result.
    """
    plan, source = _plan(call), isinstance(x, Source)
    needs_dx, needs_dw = needs
    wgrad = plan.wgrad if needs_dw else None
    square = plan.w.block[0] == plan.w.block[1]
    keep_w = square and needs_dx and plan.dgrad is not None and plan.dgrad.right == plan.w
    saved_x: Saved = (None, None, None)
    x_q: Operand | None = None
    w_q: Any = None
    if plan.fprop or wgrad:
        assert call is not None, "it has a plan"
        straight = plan.fprop and plan.fprop.left
        if source:
            keep = wgrad is not None and plan.x.block == (-1, -1)
            if straight or keep:
                q, scale, factor, *_ = _cast(x, offs, plan.x, X, call)
                x_q, saved_x = (q, scale), (None, scale, factor) if keep else saved_x
                if call.watched:
                    _show_rows(x, offs, x_q, plan.x, X, call)
        else:
            q, scale, _, q_t, scale_t, _ = _cast(
                x, offs, straight, X, call, transposed=wgrad and wgrad.right
            )
            x_q = q, scale
            if call.watched and straight:
                _show_rows(x, offs, x_q, straight, X, call)
            if wgrad:
                # As e8m0 where that is exact: one byte each.
                e8m0 = wgrad.right.scale_rule == "e8m0"
                saved_x = (q_t, scale_t.to(torch.float8_e8m0fnu) if e8m0 else scale_t, None)
    if needs_dw and not wgrad and not source:
        saved_x = (x, None, None)  # type: ignore[assignment]  # no source
    if plan.fprop or keep_w:
        assert call is not None, "it has a plan"
        w_q = _cast_weight(weight, call)

    y = _fprop(x, x_q, weight, w_q, bias, offs, call, dtype)
    saved_w: Saved = (None, None, None)
    if keep_w:
        assert call is not None, "it has a plan"
        w8, scale, factor = w_q
        # With a source, a parameter is rather cast again than that its FP8 data are kept.
        lean = isinstance(x, Source) and x.prologue != "permute" and not lives_on(w8, weight, call)
        saved_w = (None, scale, factor) if lean else (w8, scale, None)
    keep_high = needs_dx and saved_w[0] is None
    return y, (*saved_x, weight if keep_high else None, *saved_w)


def _fprop(
    x: Tensor | Source,
    x_q: Operand | None,
    weight: Tensor,
    w_q: Any,
    bias: Tensor | None,
    offs: Tensor,
    call: Call | None,
    dtype: torch.dtype,
) -> Tensor:
    """``x @ weight[e].T + bias[e]``, from the operands if in FP8."""
    fprop, N = _plan(call).fprop, weight.shape[1]
    if call is not None and call.watched:
        show_gemm("fprop", call, *(x_q, w_q[:2]) if fprop else (None, None))
    if fprop is None:
        high = (x.value() if isinstance(x, Source) else x).to(dtype)
        added = None if bias is None else bias.to(dtype)
        return _multiply_plain(high, plain(weight).to(dtype), offs, dtype, added)
    assert x_q is not None, "cast for this"
    if bias is not None and N % ALIGN:
        bias = F.pad(bias, (0, -N % ALIGN))
    y = _multiply(x_q, w_q[:2], fprop, offs, dtype, bias)
    return _crop(y, y.shape[0], N).contiguous()


class Gradient:
    """The gradient of the output, cast; what has been used can be forgotten."""

    __slots__ = ("high", "q", "q_t", "total")

    high: Tensor | None
    q: Operand | None
    """For dgrad; None if that runs in high precision."""
    q_t: Operand | None
    """Transposed, for wgrad."""
    total: Tensor | None
    """The sums over the rows of each expert, ``[E, N]``."""

    def __init__(
        self,
        dy: Tensor | Source,
        offs: Tensor,
        call: Call | None,
        *,
        needs: tuple[bool, bool, bool],
    ) -> None:
        """Cast ``dy`` for the gradients of x, weight and bias, as far as each is needed."""
        plan, (needs_dx, needs_dw, needs_db) = _plan(call), needs
        dx = plan.dgrad.left if needs_dx and plan.dgrad else None
        dw = plan.wgrad.left if needs_dw and plan.wgrad else None
        self.q = self.q_t = self.total = None
        high_dx, high_dw = needs_dx and dx is None, needs_dw and dw is None
        if isinstance(dy, Source) and (high_dx or high_dw or not (dx or dw)):
            dy = dy.value()  # something wants it written
        self.high = None if isinstance(dy, Source) else dy
        if dx or dw:
            assert call is not None, "it has a plan"
            q, scale, _, q_t, scale_t, total = _cast(
                dy, offs, dx, DY, call, transposed=dw, column_sum=needs_db
            )
            self.q = (q, scale) if dx else None
            self.q_t = (q_t, scale_t) if dw else None
            self.total = total if needs_db else None
            if call.watched and dx:
                _show_rows(dy, offs, (q, scale), dx, DY, call)
        elif needs_db:
            assert self.high is not None, "written"
            # The op that contracts over groups sums over them, too; of 8 columns, 16 bytes, in
            # rows of their own, which torch takes whatever the number of tokens.
            ones = self.high.new_ones((self.high.shape[0], 8)).t()
            dtype = self.high.dtype
            self.total = _multiply_plain(self.high.t(), ones, offs, dtype)[..., 0]


def backward(
    dy: Gradient,
    x: Source | None,
    saved: Sequence[Tensor | None],
    offs: Tensor,
    call: Call | None,
    *,
    needs: tuple[bool, bool, bool],
    shape: tuple[int, int, int],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, ``[M, K]``, of the weight, ``[E, N, K]``, and of the bias, ``[E, N]``.

    That of the weight is None if it went into the weight's ``main_grad``.

    Args:
        dy: gradient of the output; of no use afterwards.
        x: what was multiplied, if it was a source.
        saved: from ``forward``.
        offs: ends of the experts' rows.
        call: how to cast.
        needs: which gradients are needed.
        shape: M, N, K.
        dtypes: of the gradients.
    """
    M, N, K = shape
    dx = dw = db = None
    if needs[0]:
        dx = _dgrad(dy, saved, offs, call, (M, K), dtypes[0])
    dy.q = None  # its room may serve for dw
    if needs[1]:
        dw = _wgrad(dy, x, saved, offs, call, (N, K), dtypes[1])
    if needs[2]:
        assert dy.total is not None, "summed for this"
        db = dy.total.to(dtypes[2])
    return dx, dw, db


def _dgrad(
    dy: Gradient,
    saved: Sequence[Tensor | None],
    offs: Tensor,
    call: Call | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """``dy @ weight[e]`` for the rows of each expert."""
    *_, weight, w_q, scale, factor = saved
    if call is not None and call.watched:
        show_gemm("dgrad", call, dy.q, dy.q)
    if dy.q is None:
        assert dy.high is not None, "kept for this"
        assert weight is not None, "kept for this"
        high = plain(weight, dy.high).to(dy.high.dtype)
        return _multiply_plain(dy.high, high.mT, offs, dtype)
    assert call is not None, "it has a plan"
    assert call.plan.dgrad is not None, "cast for it"
    right = call.plan.dgrad.right
    if scale is None:  # not square blocks
        assert weight is not None, "kept for this"
        high = plain(weight, dy.q[1])
        w_t = _cast(high, None, None, W, call, transposed=right)[3:5]
    else:
        if w_q is None:
            assert weight is not None, "kept for this"
            high = plain(weight)
            w_q, scale = _cast_again(high, None, right, scale, factor, call)
        # Square blocks: same bytes. All matrices are turned as one.
        E, rows, columns = w_q.shape
        event = dy.q[1] if torch.compiler.is_compiling() else None
        turned = transpose_op(w_q.reshape(E * rows, columns), 1, event)
        w_t = turned.view(columns, E, rows).transpose(0, 1), scale.mT
    return _crop(_multiply(dy.q, w_t, call.plan.dgrad, offs, dtype), *shape)


def _wgrad(
    dy: Gradient,
    x: Source | None,
    saved: Sequence[Tensor | None],
    offs: Tensor,
    call: Call | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor | None:
    """``dy.T @ x`` of the rows of each expert; None if it went into ``main_grad``."""
    kept, scale, factor, *_ = saved
    fused = None if call is None else call.fused_weight
    dtype = dtype if fused is None else fused[0].main_grad.dtype
    if call is not None and call.watched:
        show_gemm("wgrad", call, dy.q_t, dy.q_t)
    if dy.q_t is None:
        high = kept if x is None else x.value()
        assert dy.high is not None, "kept for this"
        assert high is not None, "kept for this"
        dw = _multiply_plain(dy.high.t(), high.to(dy.high.dtype).t(), offs, dtype)
    else:
        assert call is not None, "it has a plan"
        assert call.plan.wgrad is not None, "cast for it"
        if x is None:
            assert kept is not None, "kept for this"
            assert scale is not None, "kept for this"
            x_t = kept, scale.float()
        else:
            right = call.plan.wgrad.right
            x_t = _cast_again(x, offs, right, scale, factor, call, transposed=True)
        dw = _crop(_multiply(dy.q_t, x_t, call.plan.wgrad, offs, dtype), *shape)
    if fused is None:
        return dw
    _accumulate(fused, dw, overwrite=call is not None and call.first_microbatch is True)
    return None


def _accumulate(weights: Sequence[Any], dw: Tensor, *, overwrite: bool) -> None:
    """Add the gradient to ``main_grad`` of one parameter for all experts, or of each one's."""
    parts = [dw] if len(weights) == 1 else list(dw.unbind())
    into = [weight.main_grad.view_as(part) for weight, part in zip(weights, parts, strict=True)]
    if overwrite:
        torch._foreach_copy_(into, parts)
    else:
        torch._foreach_add_(into, parts)
    for weight in weights:
        weight.grad_added_to_main_grad = True  # the mark that Megatron's optimizers look for


# The layer, the plainest composition.


class GroupedFunction(Float8Function):
    """``x @ weight[e].T + bias[e]`` for the rows of each expert: ``run`` it.

    Args:
        x: ``[M, K]``.
        weight: ``[E, N, K]``, ordinary or a Float8Tensor.
        bias: ``[E, N]`` or None.
        offs: ends of the experts' rows, ``[E]``, int32 or int64; rows beyond the last give zeros.
        call: how to cast, from ``Precision.begin``; None is high precision.

    Returns:
        ``[M, N]`` in the dtype of torch.autocast if that is active, else of ``x``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        call: Call | None,
    ) -> Tensor:
        y, saved = forward(
            x, weight, bias, offs, call, needs=ctx.needs_input_grad[:2], dtype=output_dtype(x)
        )
        ctx.save_for_backward(offs, *saved)
        ctx.call = call
        ctx.shape = x.shape[0], *weight.shape[1:]
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        needs, (offs, *saved) = ctx.needs_input_grad[:3], ctx.saved_tensors
        gradient = Gradient(dy, offs, ctx.call, needs=needs)
        grads = backward(
            gradient, None, saved, offs, ctx.call,
            needs=needs, shape=ctx.shape, dtypes=ctx.dtypes,
        )  # fmt: skip
        return *grads, None, None


def stacked(weights: Sequence[Tensor]) -> Tensor:
    """Parameters of one shape as one tensor, without a copy where they follow in memory."""
    first = weights[0]
    if torch.compiler.is_compiling() or isinstance(first, Float8Tensor):
        return torch.stack(list(weights))
    found: Tensor = _Stacked.run(*weights)
    return found


class _Stacked(Float8Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        first = weights[0]
        size = first.numel() * first.element_size()
        at = [weight.data_ptr() for weight in weights]
        storage = first.untyped_storage().data_ptr()
        if size and all(
            address == at[0] + index * size
            and weight.is_contiguous()
            and weight.untyped_storage().data_ptr() == storage
            for index, (address, weight) in enumerate(zip(at, weights, strict=True))
        ):
            shape = (len(weights), *first.shape)
            return first.detach().as_strided(shape, (first.numel(), *first.stride()))
        return torch.stack(weights)

    @staticmethod
    def backward(ctx: Any, dw: Tensor | None) -> Any:
        return (None,) * len(ctx.needs_input_grad) if dw is None else dw.unbind()


def into_buffer(x: Tensor, buffer: Tensor) -> Tensor:
    """``x``, whose gradient is written to a buffer, and given as that."""
    found: Tensor = _IntoBuffer.run(x, buffer)
    return found


class _IntoBuffer(Float8Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor) -> Tensor:
        ctx.buffer = buffer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.buffer.copy_(dx), None


def in_first_rank(bias: Tensor, rank: int) -> Tensor:
    """A bias as it is in a rank's part of a sum: in the first one's alone. All get its gradient."""
    found: Tensor = _InFirstRank.run(bias, rank)
    return found


class _InFirstRank(Float8Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, rank: int) -> Tensor:
        return torch.zeros_like(bias) if rank else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, db: Tensor) -> tuple[Tensor, None]:
        return db, None
