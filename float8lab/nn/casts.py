"""Casts of a linear layer's operands.  M tokens, N out features, K in features.

An operand is FP8 data, padded so that every dimension is a multiple of ``ALIGN``, and its decode
scales. What is cast is a matrix or a ``Source``, a matrix that is computed on the way and never
written. Of a mixture of experts it is either with the ends of the experts' rows, ``Groups``, or the
weights of all experts, a tensor ``[E, N, K]`` whose matrices are cast each by itself: where blocks
and scales are spoken of, they are each matrix's. ``ops/reference/grouped.py`` says how groups are
laid out.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from float8lab.distributed.tensor_parallel import Rows
from float8lab.distributed.tensor_parallel_mm import Operand
from float8lab.formats import Float8Spec
from float8lab.nn.in_graph import cast_in_graph
from float8lab.nn.precision import DY, Call, W, X
from float8lab.ops import (
    Groups,
    Source,
    amax_op,
    cast_groups_op,
    cast_op,
    prologue_shape,
    round_up,
    scale_from_amax,
    transpose_op,
)
from float8lab.ops.declare import planned
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import Factors, Known, own_amax
from float8lab.recipes.recipe import LinearPlan, Recipe
from float8lab.recipes.region import PROCESS, STATE, capturing, in_backward
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.differentiation import version_of

__all__ = [
    "By",
    "KnownWeight",
    "Matrix",
    "Operand",
    "Specs",
    "WeightOperand",
    "amaxes_of_shards",
    "cast",
    "cast_by",
    "forget_cast",
    "kept_transpose",
    "known_input",
    "known_weight",
    "lives_on",
    "note_weight",
    "plain",
    "recast",
    "show_cast",
    "show_gemm",
    "show_input",
    "spec_of_experts",
    "stored_as",
]

Matrix = Tensor | Source | Groups
"""A matrix to be cast: written, computed on the way, or of experts' rows."""


By = Known | None
"""How a tensor is cast, as far as that is known before: its factors, and the slot for its amax.

Where the scale is found by the cast, its amax stands in the place of the encode factor.
"""
Specs = tuple[Float8Spec | None, Float8Spec | None]
"""How a tensor is cast, and its transpose; None where that is not wanted."""


def cast(
    x: Matrix,
    spec: Float8Spec | None,
    index: int,
    call: Call,
    *,
    transposed: Float8Spec | None = None,
    column_sum: bool = False,
    align: int = ALIGN,
    amax: Tensor | None = None,
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
        amax: of the whole of which x is a shard, ``[1, 1]``, if it is known.

    Returns:
        FP8 data and scales of x; by what it is cast again, beside the scales; FP8 data and scales
        of its transpose; the sums over its rows. What is not asked for is None, or empty.
    """
    plan = call.plan
    by: By = None
    if call.shards is not None and not plan.delayed:
        dim = call.shards.sharded(index)
        if dim is not None:
            return _cast_shard(
                x, spec, transposed, index, call, amax, column_sum=column_sum, align=align
            )
    if not torch.compiler.is_compiling():
        if plan.delayed:
            by = call.known[index] or call.scale(index, x)
    elif not plan.delayed:
        per_tensor = (-1, -1) in (spec and spec.block, transposed and transposed.block)
        amax = _amax_in_graph(x, index) if per_tensor and isinstance(x, Tensor) else None
        by = None if amax is None else (Factors(None, amax), None)  # type: ignore[arg-type]
    elif spec is not None and transposed is not None and spec != transposed:
        first = cast(x, spec, index, call, column_sum=column_sum, align=align)
        second = cast(x, None, index, call, transposed=transposed, align=align)
        return *first[:3], *second[3:5], first[5]
    else:
        matrix = ("", [x], x.dtype) if isinstance(x, Tensor) else x[:3]
        wanted = spec is not None, transposed is not None, column_sum
        fp8_dtype = (spec or transposed).fp8_dtype  # type: ignore[union-attr]  # one of the two
        q, scale, encode, q_t, total = cast_in_graph(
            matrix, index, call, fp8_dtype, align, *wanted,
            offs=x.offs if isinstance(x, Groups) else None,
        )  # fmt: skip
        if isinstance(x, Tensor) and x.ndim == 3:
            scale, encode = scale.view(-1, 1, 1), encode.view(-1, 1, 1)
        return q, scale, encode, q_t, scale, total
    if call.shards is not None:
        return _cast_apart(x, spec, transposed, call, by, column_sum, align)
    return cast_by(x, spec, transposed, plan, by, column_sum=column_sum, align=align)


def cast_by(
    x: Matrix,
    spec: Float8Spec | None,
    transposed: Float8Spec | None,
    plan: LinearPlan,
    by: By = None,
    *,
    column_sum: bool = False,
    align: int = ALIGN,
) -> tuple[Any, ...]:
    """``cast``, which here depends on nothing but the arguments.

    In backward it gives again what the forward has cast, by what ``cast`` gave beside it. A scale
    that was found does not tell the encode factor exactly, and an amax does.
    """
    if spec is not None and transposed is not None and spec != transposed:
        first = cast_by(x, spec, None, plan, by, column_sum=column_sum, align=align)
        second = cast_by(x, None, transposed, plan, by, align=align)
        return *first[:3], *second[3:5], first[5]
    how = spec or transposed
    assert how is not None, "one of the two"
    offs = given = own_scale = slot = tiles = None
    is_batch = isinstance(x, Tensor) and x.ndim == 3
    inputs: Sequence[Tensor]
    if isinstance(x, Tensor):
        prologue, inputs, dtype = "", (x,), x.dtype
    elif isinstance(x, Source):
        prologue, inputs, dtype, given = x
    else:
        prologue, inputs, dtype, offs, tiles = x
    if by is not None:
        (own_scale, given, *_), slot = by
    whole = how.block == (-1, -1)
    if not (whole or plan.delayed):
        given = None
    rule = "encode" if plan.delayed else how.scale_rule, float(plan.epsilon)
    rest = spec is not None, transposed is not None, column_sum, given, slot
    if is_batch or offs is not None:
        results = cast_groups_op(
            prologue, inputs, dtype, offs, how.fp8_dtype, how.block, *rule, *rest, tiles
        )
    else:
        results = cast_op(prologue, inputs, dtype, how.fp8_dtype, how.block, *rule, align, *rest)
    q, scale, found, q_t, scale_t, total = results
    if plan.delayed:
        return q, own_scale, given, q_t, own_scale, total
    factor = (found if given is None else given) if whole else None
    return q, scale, factor, q_t, scale_t, total


def _cast(
    x: Matrix,
    spec: Float8Spec | None,
    transposed: Float8Spec | None,
    recipe: Recipe,
    by: By,
    column_sum: bool,
    align: int,
) -> tuple[Any, ...]:
    return cast_by(x, spec, transposed, recipe.linear, by, column_sum=column_sum, align=align)


_planned_cast = planned(_cast)


def _cast_apart(
    x: Matrix, spec: Float8Spec | None, transposed: Float8Spec | None, call: Call, *rest: Any
) -> tuple[Any, ...]:
    """``cast_by`` as a plan of its own, where what is sent to other ranks parts it from others."""
    on_gpu = (x if isinstance(x, Tensor) else x.inputs[0]).is_cuda
    found: tuple[Any, ...] = (_planned_cast if on_gpu else _cast)(
        x, spec, transposed, call.recipe, *rest
    )
    return found


def _cast_shard(
    x: Matrix,
    spec: Float8Spec | None,
    transposed: Float8Spec | None,
    index: int,
    call: Call,
    amax: Tensor | None,
    *,
    column_sum: bool,
    align: int,
) -> tuple[Any, ...]:
    """``cast`` of a shard, with the bytes that the cast of the whole gives it.

    Blocks that lie on several ranks get their amaxes from all. Features that begin or end inside
    blocks are spaced (``TensorParallel.spaced``); those of experts already are. Tokens that do are
    not padded, and the scales beside them are those of all tokens.
    """
    plan, parallel = call.plan, call.shards
    assert parallel is not None, "of a layer that is spread"
    dim = parallel.sharded(index)
    assert dim is not None, "of a shard"
    by: By = None
    if (-1, -1) in (spec and spec.block, transposed and transposed.block):
        amax = parallel.largest(own_amax(x)) if amax is None else amax
        by = Factors(None, amax), None  # type: ignore[arg-type]
    rows = call.rows if index != W and dim == 0 else None  # where tokens are shared out
    of_experts = isinstance(x, Groups) or (isinstance(x, Tensor) and x.ndim == 3)
    length = parallel.pieces[0] if of_experts else _shape(x)[dim]  # type: ignore[arg-type]
    spaced, total = rows is None and parallel.are_cut(length, plan.edge), None
    if spaced and not of_experts:
        x = _value(x)
        total, column_sum = x.float().sum(0) if column_sum else None, False
        x = parallel.spaced(x, dim, plan.edge)
    ways = (spec, dim), (transposed, 1 - dim)  # of both orientations, with the shard's dimension
    if not any(how and _lies_on_several(how.block, axis, rows, spaced) for how, axis in ways):
        *found, sums = _cast_apart(x, spec, transposed, call, by, column_sum, align)
        return *found, sums if total is None else total
    if column_sum:
        total = _sums_of_groups(x) if isinstance(x, Groups) else _value(x).float().sum(0)
    results: list[tuple[Any, ...]] = []
    for (how, axis), flip in zip(ways, (False, True), strict=True):
        if how is None:
            results.append((None, None, None))
        elif not _lies_on_several(how.block, axis, rows, spaced):
            two = (None, how) if flip else (how, None)
            one = _cast_apart(x, *two, call, by, False, align)
            results.append((*(one[3:5] if flip else one[:2]), one[2]))
        else:
            cast_parts: Any = _cast_parts_of_experts if of_experts else _cast_parts
            parts = cast_parts(x, how, axis, length, rows, align, call, flip=flip)
            results.append((*parts, None))
    (q, scale, factor), (q_t, scale_t, _) = results
    return q, scale, factor, q_t, scale_t, total


def _value(x: Matrix) -> Tensor:
    return x if isinstance(x, Tensor) else x.value()


def amaxes_of_shards(x: Matrix, weight: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes of an input and a weight of which all ranks have shards, by one reduction.

    None where there is no such amax, or but one of the two: then its cast reduces it.
    """
    plan, parallel = call.plan, call.parallel
    assert parallel is not None, "of a layer that is spread"
    per_tensor = plan.x.block == plan.w.block == (-1, -1) and not plan.delayed and plan.fprop
    alone = isinstance(weight, Float8Tensor) or call.first_microbatch is not None
    assert not isinstance(x, Groups), "of experts, which are not spread"
    if not per_tensor or alone or parallel.sharded(X) is None:
        return None, None
    amaxes = parallel.largest(torch.cat([own_amax(x), own_amax(weight)]))
    return amaxes[:1], amaxes[1:]


def _shape(x: Tensor | Source) -> tuple[int, ...]:
    return prologue_shape(*x[:2]) if isinstance(x, Source) else tuple(x.shape)


def _lies_on_several(block: Sequence[int], axis: int, rows: Rows | None, spaced: bool) -> bool:
    """Whether blocks of a shard, smaller than the whole, have parts on other ranks."""
    size = block[axis]
    if block == (-1, -1) or size == 1:
        return False
    return size == -1 or spaced if rows is None else rows.are_cut(size)


def _cast_parts(
    x: Tensor | Source,
    how: Float8Spec,
    axis: int,
    length: int,
    rows: Rows | None,
    align: int,
    call: Call,
    *,
    flip: bool,
    matrices: int = 1,
) -> Operand:
    """One orientation of a shard whose blocks have parts on several ranks.

    Args:
        x: the shard.
        how: it is cast, or its transpose.
        axis: the dimension of the result along which it is a shard.
        length: how much of the whole it is, before it was spaced.
        rows: of the whole, if the dimension is that of tokens.
        align: the sizes of the result are multiples of it.
        call: of the layer.
        flip: the transpose is wanted.
        matrices: how many of whole blocks lie below each other, and are shards each.
    """
    parallel, size = call.shards, how.block[axis]
    assert parallel is not None, "of a layer that is spread"
    places, total = parallel.places(length), parallel.whole_size(length)
    if rows is not None:
        places, total = [rows.of(parallel.rank)], rows.total
    start, count = places[0]
    tokens = rows is not None and size > 0
    before = start % size if tokens else 0
    if before:
        x = F.pad(_value(x), (0, 0, before, 0))
    prologue, inputs, dtype = x[:3] if isinstance(x, Source) else ("", (x,), x.dtype)
    block = how.block[::-1] if flip else how.block
    grid = amax_op(prologue, inputs, dtype, block)
    grid = grid.t() if flip else grid
    amaxes, everywhere = parallel.shared_amaxes(
        grid.unflatten(0, (matrices, -1)), size, axis + 1, places, total
    )
    amaxes = amaxes.flatten(0, 1)
    shape = _shape(x)[::-1] if flip else _shape(x)
    down, across = how.scale_shape(tuple(round_up(n, align) for n in shape))
    pad = (0, across - amaxes.shape[1], 0, down - amaxes.shape[0])
    q, scale, _, q_t, scale_t, _ = cast_op(
        prologue, inputs, dtype, how.fp8_dtype, how.block, how.scale_rule,
        float(call.plan.epsilon), align, not flip, flip, False, F.pad(amaxes, pad), None,
    )  # fmt: skip
    q, scale = (q_t, scale_t) if flip else (q, scale)
    if tokens:
        everywhere = everywhere.flatten(0, 1)
        q = q.narrow(axis, before, count)
        missing = down - everywhere.shape[0], across - everywhere.shape[1]
        pad = (0, 0, 0, missing[0]) if axis else (0, missing[1], 0, 0)
        rule = how.fp8_dtype, how.scale_rule, call.plan.amax_epsilon
        scale = scale_from_amax(F.pad(everywhere, pad), *rule)
    return q, scale


def _cast_parts_of_experts(
    x: Groups | Tensor,
    how: Float8Spec,
    axis: int,
    length: int,
    rows: None,
    align: int,
    call: Call,
    *,
    flip: bool,
) -> Operand:
    """``_cast_parts`` of the rows of experts, or of each of their weights, or its transpose."""
    if isinstance(x, Groups):  # rows of nobody are taken for zeros
        matrix = x.owned()
        q, scale = _cast_parts(matrix, how, axis, length, rows, align, call, flip=flip)
        return q[: len(matrix)], scale[: len(matrix)]
    each, high = x.mT if flip else x, how.block[0]
    E, tall, _ = each.shape
    below = F.pad(each, (0, 0, 0, round_up(tall, max(high, align)) - tall))
    q, scale = _cast_parts(
        below.flatten(0, 1), how, axis, length, rows, align, call, flip=False, matrices=E
    )
    tall = round_up(tall, align)
    q = q.view(torch.uint8).unflatten(0, (E, -1))[:, :tall].contiguous().view(q.dtype)
    return q, scale.unflatten(0, (E, -1))[:, : -(-tall // high)].contiguous()


def _sums_of_groups(x: Groups) -> Tensor:
    """The sums over the rows of each group, ``[E, K]``, float32."""
    (value,), offs = x.inputs, x.offs
    assert offs is not None, "of groups"
    row = torch.arange(value.shape[0], device=value.device, dtype=offs.dtype)
    total = value.new_zeros((offs.shape[0] + 1, value.shape[1]), dtype=torch.float32)
    return total.index_add_(0, torch.searchsorted(offs, row, right=True), value.float())[:-1]


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


def known_input(
    x: Matrix, inp: Tensor | None, specs: Specs, call: Call, amax: Tensor | None = None
) -> tuple[By, Any, Any]:
    """By what a layer's input is cast; its cast, where another layer or a graph has made it.

    The last result is None, or the key under which this cast may serve other layers with the same
    input, ``inp``: q, k and v, or gate and up. The last input that was cast for training is
    remembered, weakly, and what it was cast to for as long as it lives. Only a result of autograd
    counts, by the node that made it: of other tensors it could not be told whether a kernel has
    overwritten them since, as a replayed CUDA graph does with its outputs. Delayed scaling does not
    share, for every layer has a scale of its own.
    """
    spec, transposed = specs
    if spec is None and transposed is None:
        return None, None, None
    if torch.compiler.is_compiling():
        return None, cast(x, spec, X, call, transposed=transposed, amax=amax)[:5], None
    alone = transposed is None or spec is None or call.plan.delayed
    key: tuple[Any, ...] | None = None
    node = None if alone or inp is None else inp.grad_fn
    if inp is not None and node is not None and not (inp.is_cuda and capturing()):
        # While a CUDA graph is recorded nothing is shared: a replay needs all.
        stream = torch._C._cuda_getCurrentRawStream(inp.device.index) if inp.is_cuda else 0
        how: tuple[Any, ...] = spec, transposed, call.plan.epsilon, call.shards, call.rows
        if isinstance(x, Groups):
            offs: Any = x.offs  # of the same groups, too
            ends = StorageWeakRef(offs.untyped_storage())
            how = (*how, ends, offs.data_ptr(), version_of(offs))
        key = (*how, inp._version, node._sequence_nr(), stream)
        last = STATE.last_cast
        if last is not None and last[0]() is inp and last[1] == key:
            return None, last[2], None
    if call.shards is not None:
        return None, cast(x, spec, X, call, transposed=transposed, amax=amax)[:5], key
    by = call.known[X] or call.scale(X, x) if call.plan.delayed else None
    return by, None, key


def forget_cast(x: weakref.ref[Tensor]) -> None:
    """Forget the cast that was remembered of a layer's input, which is gone."""
    if STATE.last_cast is not None and STATE.last_cast[0] is x:
        STATE.last_cast = None


# What an observer is shown (``float8lab/inspect/watch``), where ``call.watched``.


def show_cast(
    x: Matrix,
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
    if isinstance(x, Groups):
        x = x.owned()
    if call.parallel is not None and not isinstance(x, Float8Tensor):
        padded = tuple(round_up(size, ALIGN) for size in _shape(x))
        if operand[0].shape != padded:
            return  # a shard whose blocks lie on several ranks has more beside it
    if PROCESS.observer is not None and (index == DY or only_in_backward or not in_backward()):
        PROCESS.observer.saw_cast(x, operand, spec, index, call)


def show_input(x: Matrix, specs: Specs, operands: Sequence[Any], call: Call) -> None:
    """A layer's input was cast as ``specs`` say, to the first results of ``cast``."""
    straight, transposed = specs
    q, scale, _, q_t, scale_t = operands
    if straight:
        show_cast(x, (q, scale), straight, X, call)
    elif transposed and not isinstance(x, Groups):  # these are laid out in another way
        show_cast(x.t(), (q_t, scale_t), transposed, X, call)  # type: ignore[union-attr]


def _show_weights(weight: Tensor, operand: Operand, spec: Float8Spec, call: Call) -> None:
    """The weights of all experts below each other, unless a block would have rows of two."""
    (E, N, K), (q, scale), (high, wide) = weight.shape, operand, spec.block
    if isinstance(weight, Float8Tensor) or (high > 1 and N % high):
        return
    down = N if high == 1 else scale.shape[1]
    rows = q[:, :N].reshape(E * N, -1), scale[:, :down].reshape(E * down, -1)
    below = replace(spec, block=(N if high == -1 else high, wide))
    show_cast(weight.detach().reshape(E * N, K), rows, below, W, call)


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
        return weight.dequantize() if isinstance(weight, Float4Tensor) else weight
    if event is not None and torch.compiler.is_compiling():
        return weight._decode(event)
    return weight.dequantize()


def stored_as(weight: Tensor, spec: Float8Spec) -> TypeGuard[Float8Tensor]:
    """Whether a weight's own bytes are the operand."""
    if not isinstance(weight, Float8Tensor):
        return False
    block = spec.block if len(weight.spec.block) == 2 else (1, *spec.block)  # of experts
    return (weight.spec.block, weight.spec.fp8_dtype) == (block, spec.fp8_dtype)


def spec_of_experts(spec: Float8Spec) -> Float8Spec:
    """How the weights of all experts, ``[E, N, K]``, are stored where each is cast as ``spec``."""
    return replace(spec, block=(1, *spec.block))


def recast(weight: Tensor, spec: Float8Spec) -> str | None:
    """From what to what a weight that is stored in FP8 is cast; None if it is not cast."""
    if not isinstance(weight, Float8Tensor) or stored_as(weight, spec):
        return None
    wanted = spec if weight.ndim < 3 else spec_of_experts(spec)
    return f"stored as {weight.spec.describe()} and cast to {wanted.describe()}"


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


def _stored(weight: Float8Tensor) -> Operand:
    """The FP8 data of a weight that is stored as the recipe wants it, padded."""
    q, scale = weight.qdata, weight.scale
    rows, columns = (round_up(size, ALIGN) for size in q.shape[-2:])
    if q.shape[-2:] != (rows, columns):
        pad = (0, columns - q.shape[-1], 0, rows - q.shape[-2])
        q = F.pad(q.view(torch.uint8), pad).view(q.dtype)
        *_, high, wide = weight.spec.scale_shape(q.shape)
        scale = F.pad(scale, (0, wide - scale.shape[-1], 0, high - scale.shape[-2]), value=1.0)
    return q, scale


WeightOperand = tuple[Tensor, Tensor, Tensor | None]
"""FP8 data, scales, and by what they are cast again beside these."""
KnownWeight = tuple[Tensor | None, By, WeightOperand | None]
"""A weight in high precision, and by what it is cast; or the weight in FP8."""


def known_weight(weight: Tensor, call: Call, amax: Tensor | None = None) -> KnownWeight:
    """The weight that is to be cast, and by what; else the weight in FP8.

    That is a weight that is stored so, or kept, or cast by a compiled graph. In eager mode it is
    cast in every forward unless the caller says that it did not change. Nothing about a tensor
    tells that reliably: fused optimizers and ``weight.data`` leave the version counter alone.
    ``is_first_microbatch`` does: True casts and keeps, False reuses.
    """
    graph, spread = torch.compiler.is_compiling(), call.shards is not None
    if isinstance(weight, Float8Tensor):
        if stored_as(weight, call.plan.w):
            return None, None, (*_stored(weight), None)
        if not graph:
            _warn_of_recast(weight, call)  # a graph holds no warnings
        weight = plain(weight)
    if graph or (spread and call.first_microbatch is None):
        found: Any = cast(weight, call.plan.w, W, call, amax=amax)
        return None, None, found[:3]
    if call.first_microbatch is None or call.precision is None:
        by = call.known[W] or call.scale(W, weight) if call.plan.delayed else None
        return weight, by, None
    return None, None, (*_kept_weight(weight, call), None)


def note_weight(weight: Tensor, operand: Any, call: Call) -> None:
    """Tell an observer, and CPU offload, of the FP8 data of a weight."""
    q = operand[0]
    if call.watched and weight.ndim == 3:
        _show_weights(weight, operand[:2], call.plan.w, call)
    elif call.watched:
        show_cast(weight, operand[:2], call.plan.w, W, call)
    if not torch.compiler.is_compiling() and STATE.weights is not None:
        key = StorageWeakRef(q.untyped_storage())
        STATE.weights[key] = lives_on(q, weight, call)


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
        weakref.ref(weight), version_of(weight), call.recipe, q, scale, known and known[0], []
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
    turned: list[Operand]
    """Its transpose, once a backward of experts has made it."""

    def fits(self, weight: Tensor, recipe: Recipe) -> bool:
        same = self.weight() is weight and self.recipe == recipe
        return same and self.version == version_of(weight)


def kept_transpose(q: Tensor, scale: Tensor, call: Call) -> Operand | None:
    """The transpose of a kept cast of experts' weights, kept with it; None of another cast.

    Of many small experts it takes a tenth of the time of a step. A CUDA graph makes its own.
    """
    kept = None if call.precision is None else call.precision.weight_cast
    if kept is None or kept.q is not q or (q.is_cuda and capturing()):
        return None
    if not kept.turned:
        with torch.inference_mode(False), torch.no_grad():
            kept.turned.append((transpose_op(q, 1, None), scale.mT))
    found: Operand = kept.turned[0]
    return found


def lives_on(q: Tensor, weight: Tensor, call: Call) -> bool:
    """Whether the FP8 data of a weight is kept in any case, saved for backward or not."""
    kept = None if call.precision is None else call.precision.weight_cast
    return isinstance(weight, Float8Tensor) or (kept is not None and kept.q is q)
