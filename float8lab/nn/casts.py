"""Casts of a linear layer's operands.  M tokens, N out features, K in features.

An operand is FP8 data, padded so that every dimension is a multiple of ``ALIGN``, and its decode
scales. What is cast is a matrix or a ``Prologue``, a matrix that is computed on the way and never
written. Of a mixture of experts it is either with the ends of the experts' rows, ``Groups``, or the
weights of all experts, a tensor ``[E, N, K]`` whose matrices are cast each by itself: where blocks
and scales are spoken of, they are each matrix's. ``ops/reference/grouped.py`` says how groups are
laid out.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from float8lab.distributed.offload import WEIGHT_CASTS
from float8lab.formats import Spec
from float8lab.nn.in_graph import cast_in_graph
from float8lab.nn.precision import DY, Call, W, X
from float8lab.ops import (
    Groups,
    Prologue,
    amax_op,
    cast_groups_op,
    cast_op,
    prologue_shape,
    round_up,
    transpose_op,
)
from float8lab.ops.declare import planned
from float8lab.ops.grouped import groups_of_rows
from float8lab.ops.operand import Operand, Orientations, Quantized
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import Factors, QuantParams, own_amax
from float8lab.recipes.recipe import LinearPlan, Recipe
from float8lab.recipes.region import PROCESS, capturing, in_backward
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.differentiation import version_of

__all__ = [
    "InputSource",
    "Matrix",
    "Operand",
    "Orientations",
    "Quantized",
    "WeightSource",
    "amaxes_of_shards",
    "cast",
    "cast_by",
    "input_source",
    "kept_transpose",
    "note_weight",
    "outlives_step",
    "plain",
    "recast",
    "remember_input",
    "share_cast",
    "shared_cast",
    "show_cast",
    "show_gemm",
    "show_input",
    "spec_of_experts",
    "stored_as",
    "value_of",
    "weight_source",
]

Matrix = Tensor | Prologue | Groups
"""A matrix to be cast: written, computed on the way, or of experts' rows."""


def cast(
    x: Matrix,
    spec: Spec | None,
    index: int,
    call: Call,
    *,
    columnwise: Spec | None = None,
    dbias: bool = False,
    align: int = ALIGN,
    amax: Tensor | None = None,
) -> Quantized:
    """x in FP8, in one orientation or both, from one read where both are cast alike.

    Args:
        x: what is cast.
        spec: how x is cast; None where it is not wanted.
        index: which of the layer's tensors it is.
        call: of the layer.
        columnwise: how the transpose is cast, in blocks of its own rows; or None.
        dbias: the sums over the rows of x are wanted, too.
        align: the sizes of the result are multiples of it.
        amax: of the unsharded matrix of which x is a shard, ``[1, 1]``, if it is known.

    Returns:
        The casts; what is not asked for is None, or empty.
    """
    plan = call.plan
    params: QuantParams | None = None
    if call.shards is not None and not plan.delayed:
        dim = call.shards.sharded_dim(index)
        if dim is not None:
            return _cast_shard(x, spec, columnwise, index, call, amax, dbias=dbias, align=align)
    if not torch.compiler.is_compiling():
        if plan.delayed:
            params = call.known[index] or call.scale(index, x)
    elif not plan.delayed:
        shares_amax = _share_matrix_amax(spec, columnwise)
        amax = _amax_in_graph(x, index) if shares_amax and isinstance(x, Tensor) else None
        if amax is not None:
            params = QuantParams(Factors(None, amax), None)  # type: ignore[arg-type]
    elif spec is not None and columnwise is not None and spec != columnwise:
        rowwise = cast(x, spec, index, call, dbias=dbias, align=align)
        transpose = cast(x, None, index, call, columnwise=columnwise, align=align)
        return rowwise._replace(columnwise=transpose.columnwise)
    else:
        matrix = ("", [x], x.dtype) if isinstance(x, Tensor) else x[:3]
        wanted = spec is not None, columnwise is not None, dbias
        fp8_dtype = (spec or columnwise).fp8_dtype  # type: ignore[union-attr]  # one of the two
        q, scale, encode, q_t, total = cast_in_graph(
            matrix, index, call, fp8_dtype, align, *wanted,
            offs=x.offs if isinstance(x, Groups) else None,
        )  # fmt: skip
        if isinstance(x, Groups) or (isinstance(x, Tensor) and x.ndim == 3):
            scale, encode = scale.view(-1, 1, 1), encode.view(-1, 1, 1)
        return Quantized(Operand(q, scale), Operand(q_t, scale), encode, total)
    if call.shards is not None:
        return _cast_alone(x, spec, columnwise, call, params, dbias, align)
    return cast_by(x, spec, columnwise, plan, params, dbias=dbias, align=align)


def cast_by(
    x: Matrix,
    spec: Spec | None,
    columnwise: Spec | None,
    plan: LinearPlan,
    params: QuantParams | None = None,
    *,
    dbias: bool = False,
    align: int = ALIGN,
) -> Quantized:
    """``cast``, which here depends on nothing but the arguments.

    In backward it requantizes what the forward has cast. A scale that a cast has made of an amax
    does not tell the encode factor exactly, and the amax does.
    """
    if spec is not None and columnwise is not None and spec != columnwise:
        rowwise = cast_by(x, spec, None, plan, params, dbias=dbias, align=align)
        transpose = cast_by(x, None, columnwise, plan, params, align=align)
        return rowwise._replace(columnwise=transpose.columnwise)
    how = spec or columnwise
    assert how is not None, "one of the two"
    offs = given = own_scale = slot = tiles = None
    is_batch = isinstance(x, Tensor) and x.ndim == 3
    inputs: Sequence[Tensor]
    if isinstance(x, Tensor):
        prologue, inputs, dtype = "", (x,), x.dtype
    elif isinstance(x, Prologue):
        prologue, inputs, dtype, given = x
    else:
        prologue, inputs, dtype, offs, tiles = x
    if params is not None:
        (own_scale, given, *_), slot = params
    whole = how.block == (-1, -1)
    if not (how.shares_matrix_amax or plan.delayed):
        given = None
    rule = "encode" if plan.delayed else how.scale_rule, float(plan.epsilon)
    rest = spec is not None, columnwise is not None, dbias, given, slot
    if is_batch or offs is not None:
        results = cast_groups_op(
            prologue, inputs, dtype, offs, how.fp8_dtype, how.block, *rule, *rest, tiles
        )
    else:
        results = cast_op(prologue, inputs, dtype, how.fp8_dtype, how.block, *rule, align, *rest)
    q, scale, found, q_t, scale_t, total = results
    if plan.delayed:
        scale = scale_t = own_scale
        factor = given
    else:
        factor = (found if given is None else given) if whole else None
    return Quantized(
        None if q is None else Operand(q, scale),
        None if q_t is None else Operand(q_t, scale_t),
        factor, total,
    )  # fmt: skip


def _cast(
    x: Matrix,
    spec: Spec | None,
    columnwise: Spec | None,
    recipe: Recipe,
    params: QuantParams | None,
    dbias: bool,
    align: int,
) -> Quantized:
    return cast_by(x, spec, columnwise, recipe.linear, params, dbias=dbias, align=align)


_planned_cast = planned(_cast)


def _cast_alone(
    x: Matrix, spec: Spec | None, columnwise: Spec | None, call: Call, *rest: Any
) -> Quantized:
    """``cast_by`` as a plan of its own: a collective separates it from the GEMM."""
    on_gpu = (x if isinstance(x, Tensor) else x.inputs[0]).is_cuda
    made: Quantized = (_planned_cast if on_gpu else _cast)(x, spec, columnwise, call.recipe, *rest)
    return made


def _cast_shard(
    x: Matrix,
    spec: Spec | None,
    columnwise: Spec | None,
    index: int,
    call: Call,
    amax: Tensor | None,
    *,
    dbias: bool,
    align: int,
) -> Quantized:
    """``cast`` of a shard, with the bytes that the cast of the unsharded matrix gives it.

    The amax of a block that spans the sharded dimension is the largest over ranks. No other block
    crosses shards: such tokens are gathered before, and such features run in high precision.
    """
    parallel = call.shards
    assert parallel is not None, "of a sharded layer"
    dim = parallel.sharded_dim(index)
    assert dim is not None, "of a shard"
    params: QuantParams | None = None
    if _share_matrix_amax(spec, columnwise):
        amax = parallel.amax(own_amax(x)) if amax is None else amax
        params = QuantParams(Factors(None, amax), None)  # type: ignore[arg-type]
    rowwise_spans, columnwise_spans = _spans(spec, dim), _spans(columnwise, 1 - dim)
    if not (rowwise_spans or columnwise_spans):
        return _cast_alone(x, spec, columnwise, call, params, dbias, align)
    sums = None
    if dbias:
        sums = _sums_of_groups(x) if isinstance(x, Groups) else value_of(x).float().sum(0)
    made = Quantized(dbias=sums)
    if spec is not None and rowwise_spans:
        made = made._replace(rowwise=_cast_spanning(x, spec, call, align, is_columnwise=False))
    elif spec is not None:
        made = _cast_alone(x, spec, None, call, params, False, align)._replace(dbias=sums)
    if columnwise is not None:
        if columnwise_spans:
            operand = _cast_spanning(x, columnwise, call, align, is_columnwise=True)
        else:
            operand = _cast_alone(x, None, columnwise, call, params, False, align).columnwise
        made = made._replace(columnwise=operand)
    return made


def value_of(x: Matrix) -> Tensor:
    """A matrix in high precision, computed if it is not written."""
    return x if isinstance(x, Tensor) else x.value()


def amaxes_of_shards(x: Matrix, weight: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes of an input and a weight of which all ranks have shards, by one reduction.

    None where there is no such amax, or but one of the two: then its cast reduces it.
    """
    plan, parallel = call.plan, call.comm.parallel
    assert parallel is not None, "of a sharded layer"
    per_tensor = plan.x.per_tensor and plan.w.per_tensor and not plan.delayed and plan.fprop
    alone = isinstance(weight, Float8Tensor) or call.first_microbatch is not None
    if not per_tensor or alone or parallel.sharded_dim(X) is None:
        return None, None
    amaxes = parallel.amax(torch.cat([own_amax(x), own_amax(weight)]))
    return amaxes[:1], amaxes[1:]


def _shape(x: Tensor | Prologue) -> tuple[int, ...]:
    return prologue_shape(*x[:2]) if isinstance(x, Prologue) else tuple(x.shape)


def _spans(spec: Spec | None, dim: int) -> bool:
    """Whether blocks, other than of the whole matrix, span a dimension of the operand."""
    return spec is not None and spec.spans(dim)


def _share_matrix_amax(*specs: Spec | None) -> bool:
    return any(spec is not None and spec.shares_matrix_amax for spec in specs)


def _cast_spanning(
    x: Matrix, spec: Spec, call: Call, align: int, *, is_columnwise: bool
) -> Operand:
    """One orientation of a shard whose blocks span the dimension that ranks share.

    Rows of experts that are padding are taken for zeros. The weights of experts are cast below
    each other, each padded to whole blocks.
    """
    if isinstance(x, Groups):
        matrix = x.owned()
        q, scale = _cast_spanning(matrix, spec, call, align, is_columnwise=is_columnwise)
        return Operand(q[: len(matrix)], scale[: len(matrix)])
    if isinstance(x, Tensor) and x.ndim == 3:
        each, rows_of_block = x.mT if is_columnwise else x, spec.block[0]
        E, rows, _ = each.shape
        below = F.pad(each, (0, 0, 0, round_up(rows, max(rows_of_block, align)) - rows))
        q, scale = _cast_spanning(below.flatten(0, 1), spec, call, align, is_columnwise=False)
        rows = round_up(rows, align)
        q = q.view(torch.uint8).unflatten(0, (E, -1))[:, :rows].contiguous().view(q.dtype)
        scales = scale.unflatten(0, (E, -1))[:, : -(-rows // rows_of_block)]
        return Operand(q, scales.contiguous())
    assert call.shards is not None, "of a sharded layer"
    prologue, inputs, dtype = x[:3] if isinstance(x, Prologue) else ("", (x,), x.dtype)
    amaxes = amax_op(prologue, inputs, dtype, spec.block[::-1] if is_columnwise else spec.block)
    amaxes = call.shards.amax(amaxes.t() if is_columnwise else amaxes)
    shape = _shape(x)[::-1] if is_columnwise else _shape(x)
    down, across = spec.scale_shape(tuple(round_up(n, align) for n in shape))
    pad = (0, across - amaxes.shape[1], 0, down - amaxes.shape[0])
    q, scale, _, q_t, scale_t, _ = cast_op(
        prologue, inputs, dtype, spec.fp8_dtype, spec.block, spec.scale_rule,
        float(call.plan.epsilon), align, not is_columnwise, is_columnwise, False,
        F.pad(amaxes, pad), None,
    )  # fmt: skip
    return Operand(q_t, scale_t) if is_columnwise else Operand(q, scale)


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


class InputSource(NamedTuple):
    """A layer's input: its cast, where that is known, else its quantization parameters."""

    params: QuantParams | None = None
    quantized: Quantized | None = None
    key: tuple[Any, ...] | None = None
    """The key under which the cast may serve other layers with the same input."""


def input_source(
    x: Matrix,
    inp: Tensor | None,
    specs: Orientations,
    call: Call,
    amax: Tensor | None = None,
) -> InputSource:
    """The cast of a layer's input, where another layer or a graph has made it; or its parameters.

    Layers with the same input, ``inp``, share its cast: q, k and v, or gate and up. The last input
    that was cast for training is remembered, weakly, and its cast for as long as it lives. Only a
    result of autograd counts, by the node that made it: of other tensors it could not be told
    whether a kernel has overwritten them since, as a replayed CUDA graph does with its outputs.
    Delayed scaling does not share, for every layer has a scale of its own.
    """
    if not any(specs):
        return InputSource()
    if torch.compiler.is_compiling():
        return InputSource(quantized=_input_cast(x, specs, call, amax))
    key = _input_key(x, inp, specs, call)
    last = _SHARED.last
    if key is not None and last is not None and last[0]() is inp and last[1] == key:
        return InputSource(quantized=last[2])
    if call.shards is not None:
        return InputSource(quantized=_input_cast(x, specs, call, amax), key=key)
    params = call.known[X] or call.scale(X, x) if call.plan.delayed else None
    return InputSource(params, key=key)


def _input_cast(x: Matrix, specs: Orientations, call: Call, amax: Tensor | None) -> Quantized:
    return cast(x, specs.rowwise, X, call, columnwise=specs.columnwise, amax=amax)


def _input_key(
    x: Matrix, inp: Tensor | None, specs: Orientations, call: Call
) -> tuple[Any, ...] | None:
    """All that the cast of an input depends on; None if no other layer may have it."""
    if inp is None or call.plan.delayed or not all(specs):
        return None
    node = inp.grad_fn
    if node is None or (inp.is_cuda and capturing()):
        return None  # while a CUDA graph is recorded nothing is shared: a replay needs all
    stream = torch._C._cuda_getCurrentRawStream(inp.device.index) if inp.is_cuda else 0
    key: tuple[Any, ...] = *specs, call.plan.epsilon, call.shards, call.comm.tokens
    if isinstance(x, Groups):
        offs: Any = x.offs  # of the same groups, too
        offs_storage = StorageWeakRef(offs.untyped_storage())
        key = (*key, offs_storage, offs.data_ptr(), version_of(offs))
    return (*key, inp._version, node._sequence_nr(), stream)


class _SharedCast(threading.local):
    """The last input of a layer that was cast for training on a thread."""

    def __init__(self) -> None:
        self.last: tuple[weakref.ref[Tensor], tuple[Any, ...], Quantized] | None = None
        """The input, the key of its cast, and the cast."""


_SHARED = _SharedCast()


def shared_cast() -> Any:
    """The cast that layers with the same input share; None if there is none."""
    return _SHARED.last


def share_cast(cast: Any) -> None:
    """Put a ``shared_cast`` back, or forget it, with None."""
    _SHARED.last = cast


def remember_input(inp: Tensor | None, key: tuple[Any, ...], quantized: Quantized) -> None:
    """Keep the cast of a layer's input for other layers that have the same."""
    assert inp is not None, "it has a key"
    _SHARED.last = weakref.ref(inp, _forget_input), key, quantized


def _forget_input(inp: weakref.ref[Tensor]) -> None:
    """Forget the cast that was remembered of a layer's input, which is gone."""
    if _SHARED.last is not None and _SHARED.last[0] is inp:
        _SHARED.last = None


# What an observer is shown (``float8lab/inspect/watch``), where ``call.watched``.


def show_cast(
    x: Matrix,
    operand: Operand,
    spec: Spec,
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
        operand, spec = _by_row(x, operand, spec)
        x = x.owned()
    if PROCESS.observer is not None and (index == DY or only_in_backward or not in_backward()):
        PROCESS.observer.saw_cast(x, operand, spec, index, call)


def _by_row(x: Groups, operand: Operand, spec: Spec) -> tuple[Operand, Spec]:
    """The operand with a scale for each row, where it has one for each group."""
    if not spec.per_tensor:
        return operand, spec
    assert x.offs is not None, "not a batch"
    of_rows = groups_of_rows(operand.data.shape[0], x.offs)
    scale = operand.scale.reshape(-1, 1).expand(x.offs.shape[0], 1)[of_rows]
    return Operand(operand.data, scale), replace(spec, block=(1, -1))


def show_input(x: Matrix, specs: Orientations, quantized: Quantized, call: Call) -> None:
    """A layer's input was cast."""
    if specs.rowwise:
        show_cast(x, quantized.rowwise, specs.rowwise, X, call)
    elif specs.columnwise and isinstance(x, Tensor):  # groups are laid out in another way
        show_cast(x.t(), quantized.columnwise, specs.columnwise, X, call)


def _show_weights(weight: Tensor, operand: Operand, spec: Spec, call: Call) -> None:
    """The weights of all experts below each other, unless a block would have rows of two."""
    (E, N, K), (q, scale), (high, wide) = weight.shape, operand, spec.block
    if isinstance(weight, Float8Tensor) or (high > 1 and N % high):
        return
    down = N if high == 1 else scale.shape[1]
    rows = Operand(q[:, :N].reshape(E * N, -1), scale[:, :down].reshape(E * down, -1))
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


def stored_as(weight: Tensor, spec: Spec) -> TypeGuard[Float8Tensor]:
    """Whether a weight's own bytes are the operand."""
    if not isinstance(weight, Float8Tensor):
        return False
    block = spec.block if len(weight.spec.block) == 2 else (1, *spec.block)  # of experts
    return (weight.spec.block, weight.spec.element_dtype) == (block, spec.element_dtype)


def spec_of_experts(spec: Spec) -> Spec:
    """How the weights of all experts, ``[E, N, K]``, are stored where each is cast as ``spec``."""
    return replace(spec, block=(1, *spec.block))


def recast(weight: Tensor, spec: Spec) -> str | None:
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
    return Operand(q, scale)


class WeightSource(NamedTuple):
    """A weight: its FP8 data, where these are known, else the weight and its parameters."""

    high_precision: Tensor | None = None
    params: QuantParams | None = None
    quantized: Quantized | None = None


def weight_source(weight: Tensor, call: Call, amax: Tensor | None = None) -> WeightSource:
    """The weight that is to be cast, and its quantization parameters; else the weight in FP8.

    That is a weight that is stored so, or kept, or cast by a compiled graph. In eager mode it is
    cast in every forward unless the caller says that it did not change. Nothing about a tensor
    tells that reliably: fused optimizers and ``weight.data`` leave the version counter alone.
    ``is_first_microbatch`` does: True casts and keeps, False reuses.
    """
    graph, is_sharded = torch.compiler.is_compiling(), call.shards is not None
    if isinstance(weight, Float8Tensor):
        if stored_as(weight, call.plan.w):
            return WeightSource(quantized=Quantized(_stored(weight)))
        if not graph:
            _warn_of_recast(weight, call)  # a graph holds no warnings
        weight = plain(weight)
    if graph or (is_sharded and call.first_microbatch is None):
        return WeightSource(quantized=cast(weight, call.plan.w, W, call, amax=amax))
    if call.first_microbatch is None or call.precision is None:
        params = call.known[W] or call.scale(W, weight) if call.plan.delayed else None
        return WeightSource(weight, params)
    return WeightSource(quantized=Quantized(_kept_weight(weight, call)))


def outlives_step(weight: Tensor, call: Call) -> bool:
    """Whether the FP8 data of a weight is kept in any case, saved for backward or not.

    It is where the weight is stored in FP8, and where it is kept from one microbatch to the next.
    """
    graph = torch.compiler.is_compiling()
    is_kept = not graph and call.first_microbatch is not None and call.precision is not None
    if not isinstance(weight, Float8Tensor):
        return is_kept
    return is_kept or graph or call.shards is not None or stored_as(weight, call.plan.w)


def note_weight(weight: Tensor, quantized: Quantized, call: Call) -> None:
    """Tell an observer, and CPU offload, of the FP8 data of a weight."""
    q = quantized.rowwise.data
    if call.watched and weight.ndim == 3:
        _show_weights(weight, quantized.rowwise, call.plan.w, call)
    elif call.watched:
        show_cast(weight, quantized.rowwise, call.plan.w, W, call)
    if not torch.compiler.is_compiling() and WEIGHT_CASTS.outlive_step is not None:
        key = StorageWeakRef(q.untyped_storage())
        is_kept = isinstance(weight, Float8Tensor) or _kept_cast(q, call) is not None
        WEIGHT_CASTS.outlive_step[key] = is_kept


def _kept_weight(weight: Tensor, call: Call) -> Operand:
    """The cast of a weight that is kept over microbatches."""
    precision, kept = call.precision, call.precision.weight_cast  # type: ignore[union-attr]
    if not call.first_microbatch and kept is not None and kept.fits(weight, call.recipe):
        if kept.factors is not None:
            call.known[W] = QuantParams(kept.factors, None)
        return kept.operand
    with torch.inference_mode(False), torch.no_grad():  # training may use it next
        operand: Operand = cast(weight, call.plan.w, W, call).rowwise
    params = call.known[W]
    precision.weight_cast = _WeightCast(  # type: ignore[union-attr]
        weakref.ref(weight), version_of(weight), call.recipe, operand,
        None if params is None else params.factors, [],
    )  # fmt: skip
    return operand


class _WeightCast(NamedTuple):
    """The cast that is kept from one microbatch to the next."""

    weight: weakref.ref[Tensor]
    version: int
    recipe: Recipe
    operand: Operand
    factors: Factors | None
    """Under delayed scaling."""
    transposes: list[Operand]
    """Its transpose, once a backward of experts has made it."""

    def fits(self, weight: Tensor, recipe: Recipe) -> bool:
        same = self.weight() is weight and self.recipe == recipe
        return same and self.version == version_of(weight)


def kept_transpose(q: Tensor, scale: Tensor | None, call: Call) -> Operand | None:
    """The transpose of a kept cast of experts' weights, kept with it; None of another cast.

    Of many small experts it takes a tenth of the time of a step. A CUDA graph makes its own.
    """
    kept = _kept_cast(q, call)
    if kept is None or scale is None or (q.is_cuda and capturing()):
        return None
    if not kept.transposes:
        with torch.inference_mode(False), torch.no_grad():
            kept.transposes.append(Operand(transpose_op(q, 1, None), scale.mT))
    return kept.transposes[0]


def _kept_cast(q: Tensor, call: Call) -> _WeightCast | None:
    """The cast that is kept from one microbatch to the next, if ``q`` are its FP8 data."""
    kept: _WeightCast | None = None if call.precision is None else call.precision.weight_cast
    return kept if kept is not None and kept.operand.data is q else None
