"""The operands of a linear layer: casts that layers share, weights that are kept."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from float8lab.distributed.offload import WEIGHT_CASTS
from float8lab.formats import Spec
from float8lab.nn.precision import Call
from float8lab.nn.scales import DY, DelayedScales, W, X
from float8lab.ops import Groups, round_up, transpose_op
from float8lab.ops.grouped import groups_of_rows
from float8lab.ops.operand import Operand, Orientations, Quantized
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import QuantParams, own_amax
from float8lab.recipes.recipe import Recipe
from float8lab.recipes.region import PROCESS, capturing, in_backward
from float8lab.tensor import Float4Tensor, Float8Tensor
from float8lab.tensor.differentiation import version_of
from float8lab.tensor.operands import Matrix

__all__ = [
    "SHARED_CAST", "WeightSource", "amaxes_of_shards", "input_source", "joined", "keeps_fp8_data",
    "kept_transpose", "note_weight", "plain", "recast", "remember_input", "show_cast", "show_gemm",
    "show_quantized", "spec_of_experts", "stored_as", "transposed", "weight_source",
]  # fmt: skip


def amaxes_of_shards(x: Matrix, weight: Tensor, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The amaxes of an input and a weight of which all ranks have shards, by one reduction.

    None where there is no such amax, or but one of the two: then its cast reduces it.
    """
    plan, parallel = call.plan, call.comm.parallel
    per_tensor = plan.x.per_tensor and plan.w.per_tensor and plan.fprop is not None
    alone = isinstance(weight, Float8Tensor) or call.first_microbatch is not None
    if parallel is None or not per_tensor or call.scales.are_given or alone:
        return None, None
    if parallel.sharded_dim(X) is None:
        return None, None
    amaxes = parallel.amax(torch.cat([own_amax(x), own_amax(weight)]))
    return amaxes[:1], amaxes[1:]


class InputSource(NamedTuple):
    """A layer's input: its cast, where that is known, else its quantization parameters."""

    params: QuantParams | None = None
    quantized: Quantized | None = None
    shared: tuple[Tensor, tuple[Any, ...]] | None = None
    """The input, and the key under which its cast may serve other layers."""


def input_source(
    x: Matrix, inp: Tensor | None, specs: Orientations, call: Call, amax: Tensor | None = None
) -> InputSource:
    """The cast of a layer's input, where another layer or a graph has made it; or its parameters.

    Layers with the same input, ``inp``, share its cast: q, k and v, or gate and up. The last input
    that was cast is remembered, weakly, and its cast for as long as it lives. Only a
    result of autograd counts, by the node that made it: of other tensors it could not be told
    whether a kernel has overwritten them since, as a replayed CUDA graph does with its outputs.
    Delayed scaling does not share, for every layer has a scale of its own.
    """
    if not any(specs):
        return InputSource()
    if call.in_graph:
        return InputSource(quantized=call.scales.quantize(x, X, *specs, amax=amax))
    shared = None
    if inp is not None and not call.scales.are_given and specs.rowwise is not None:
        key, last = _input_key(x, inp, specs, call), SHARED_CAST.last
        shared = None if key is None else (inp, key)
        if shared and last is not None and last[0]() is inp and last[1] == key:
            return InputSource(quantized=last[2])
    if call.cast_parallel is not None:
        return InputSource(None, call.scales.quantize(x, X, *specs, amax=amax), shared)
    return InputSource(call.scales.params(X, x) if call.scales.are_given else None, None, shared)


def _input_key(x: Matrix, inp: Tensor, specs: Orientations, call: Call) -> tuple[Any, ...] | None:
    """All that the cast of an input depends on; None if no other layer may have it."""
    node = inp.grad_fn
    if node is None or (inp.is_cuda and capturing()):
        return None  # while a CUDA graph is recorded nothing is shared: a replay needs all
    stream = torch._C._cuda_getCurrentRawStream(inp.device.index) if inp.is_cuda else 0
    key: tuple[Any, ...] = *specs, call.plan.epsilon, call.cast_parallel, call.comm.tokens
    if isinstance(x, Groups):
        offs: Any = x.offs  # of the same groups, too
        key = (*key, StorageWeakRef(offs.untyped_storage()), offs.data_ptr(), version_of(offs))
    return (*key, inp._version, node._sequence_nr(), stream)


class _SharedCast(threading.local):
    """The last input of a layer that was cast for training on a thread."""

    last: tuple[weakref.ref[Tensor], tuple[Any, ...], Quantized] | None = None
    """The input, the key of its cast, and the cast."""


SHARED_CAST = _SharedCast()
"""The cast that layers with the same input share."""


def remember_input(inp: Tensor, key: tuple[Any, ...], quantized: Quantized) -> None:
    """Keep the cast of a layer's input for other layers that have the same."""
    SHARED_CAST.last = weakref.ref(inp, _forget_input), key, quantized


def _forget_input(inp: weakref.ref[Tensor]) -> None:
    """Forget the cast that was remembered of a layer's input, which is gone."""
    if SHARED_CAST.last is not None and SHARED_CAST.last[0] is inp:
        SHARED_CAST.last = None


# What an observer is shown (``float8lab/inspect/watch``), where ``call.watched``.


def show_cast(
    x: Matrix, made: Operand, spec: Spec, index: int, call: Call, *, only_in_backward: bool = False
) -> None:
    """A matrix was cast to ``made`` for a layer's GEMMs.

    In backward that of x or w is a repetition, by activation checkpointing, unless it is made only
    there.
    """
    if isinstance(x, Groups):
        made, spec = _by_row(x, made, spec)
        x = x.owned()
    if PROCESS.observer is not None and (index == DY or only_in_backward or not in_backward()):
        PROCESS.observer.saw_cast(x, made, spec, index, call)


def _by_row(x: Groups, operand: Operand, spec: Spec) -> tuple[Operand, Spec]:
    """The operand with a scale for each row, where it has one for each group."""
    if not spec.per_tensor:
        return operand, spec
    of_rows = groups_of_rows(operand.data.shape[0], x.offs)
    scale = operand.scale.reshape(-1, 1).expand(x.offs.shape[0], 1)[of_rows]
    return Operand(operand.data, scale), replace(spec, block=(1, -1))


def show_quantized(x: Matrix, specs: Orientations, made: Quantized, index: int, call: Call) -> None:
    """A layer's input, or its gradient, was cast."""
    if specs.rowwise:
        show_cast(x, made.rowwise, specs.rowwise, index, call)
    elif specs.columnwise and isinstance(x, Tensor):  # groups are laid out in another way
        show_cast(x.t(), made.columnwise, specs.columnwise, index, call)


def _show_weights(weight: Tensor, operand: Operand, spec: Spec, call: Call) -> None:
    """The weights of all experts below each other, unless a block would have rows of two."""
    (E, N, K), (q, scale), (block_rows, block_columns) = weight.shape, operand, spec.block
    if isinstance(weight, Float8Tensor) or (block_rows > 1 and N % block_rows):
        return
    scale = scale.reshape(E, -1, scale.shape[-1])  # that of a single expert may be [1]
    down = N if block_rows == 1 else scale.shape[1]
    rows = Operand(q[:, :N].reshape(E * N, -1), scale[:, :down].reshape(E * down, -1))
    below = replace(spec, block=(N if block_rows == -1 else block_rows, block_columns))
    show_cast(weight.detach().reshape(E * N, K), rows, below, W, call)


def show_gemm(kind: str, call: Call, a: Operand | None = None, b: Operand | None = None) -> None:
    """``fprop``, ``dgrad`` or ``wgrad`` runs, of these operands or in high precision."""
    if PROCESS.observer is not None:
        PROCESS.observer.saw_gemm(kind, call, a, b)


# Weights.


def plain(weight: Tensor, prior: Tensor | None = None) -> Tensor:
    """A weight in high precision.

    A compiled backward gives ``prior``, a tensor that it computes: it dequantizes the weight after
    that, and the forward saves nothing of it.
    """
    if not isinstance(weight, Float8Tensor):
        return weight.dequantize() if isinstance(weight, Float4Tensor) else weight
    if prior is not None and torch.compiler.is_compiling():
        return weight._decode(prior)
    return weight.dequantize()


def stored_as(weight: Tensor, spec: Spec) -> TypeGuard[Float8Tensor]:
    """Whether a weight's own bytes are the operand."""
    if not isinstance(weight, Float8Tensor):
        return False
    block = spec.block if len(weight.spec.block) == 2 else (1, *spec.block)  # of experts
    return (weight.spec.block, weight.spec.element_dtype) == (block, spec.element_dtype)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Weights below each other; stored in FP8 if they are and no block of rows has two of them."""
    first = weights[0]
    # In a graph the format of a tensor that the graph computes is not known.
    if isinstance(first, Float8Tensor) and not torch.compiler.is_compiling():
        rows = first.spec.block[0]
        alike = all(isinstance(w, Float8Tensor) and w.spec == first.spec for w in weights)
        if alike and rows > 0 and all(w.shape[0] % rows == 0 for w in weights):
            return torch.cat(list(weights))
    return torch.cat([plain(weight) for weight in weights])


def spec_of_experts(spec: Spec) -> Spec:
    """How the weights of all experts, ``[E, N, K]``, are stored where each is cast as ``spec``."""
    return replace(spec, block=(1, *spec.block))


def recast(weight: Tensor, spec: Spec) -> str | None:
    """From what to what a weight that is stored in FP8 is cast; None if it is not cast."""
    if not isinstance(weight, Float8Tensor) or stored_as(weight, spec):
        return None
    cast_spec = spec if weight.ndim < 3 else spec_of_experts(spec)
    return f"stored as {weight.spec.describe()} and cast to {cast_spec.describe()}"


def _warn_of_recast(weight: Tensor, call: Call) -> None:
    """Say once a module that its weight's bytes are not the operand."""
    precision, change = call.precision, recast(weight, call.plan.w)
    if change is None or precision.warned_of_recast:
        return
    precision.warned_of_recast = True
    warnings.warn(
        f"{precision.name or 'A layer'}: its weight {tuple(weight.shape)} is {change} in every "
        f"forward, for {call.recipe}: it is rounded twice. Store it for that recipe, or run it "
        "under the one that it was stored for.",
        stacklevel=2,
    )


def _stored(weight: Float8Tensor) -> Operand:
    """The FP8 data of a weight that is stored as the recipe wants it, padded."""
    q, scale = weight.qdata, weight.scale
    rows, columns = (round_up(size, ALIGN) for size in q.shape[-2:])
    if q.shape[-2:] != (rows, columns):
        pad = (0, columns - q.shape[-1], 0, rows - q.shape[-2])
        q = F.pad(q.view(torch.uint8), pad).view(q.dtype)
        *_, down, across = weight.spec.scale_shape(q.shape)
        scale = F.pad(scale, (0, across - scale.shape[-1], 0, down - scale.shape[-2]), value=1.0)
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
    if isinstance(weight, Float8Tensor):
        if stored_as(weight, call.plan.w):
            return WeightSource(quantized=Quantized(_stored(weight)))
        if not call.in_graph:
            _warn_of_recast(weight, call)  # a graph holds no warnings
        weight = plain(weight)
    if call.in_graph or (call.cast_parallel is not None and call.first_microbatch is None):
        return WeightSource(quantized=call.scales.quantize(weight, W, call.plan.w, amax=amax))
    if call.first_microbatch is None:
        scales = call.scales
        return WeightSource(weight, scales.params(W, weight) if scales.are_given else None)
    return WeightSource(quantized=Quantized(_kept_weight(weight, call)))


def keeps_fp8_data(weight: Tensor, call: Call) -> bool:
    """Whether a weight's FP8 data are kept for backward even if memory is to be saved.

    They exist in any case where the weight is stored so, and where its cast is kept over
    microbatches. Those of a weight that is stored for another recipe are kept in a graph, and where
    ranks share their scales.
    """
    graph = torch.compiler.is_compiling()
    is_kept = not graph and call.first_microbatch is not None
    if not isinstance(weight, Float8Tensor):
        return is_kept
    return is_kept or graph or call.cast_parallel is not None or stored_as(weight, call.plan.w)


def note_weight(weight: Tensor, quantized: Quantized, call: Call) -> None:
    """Tell an observer, and CPU offload, of the FP8 data of a weight."""
    q = quantized.rowwise.data
    if call.watched and weight.ndim == 3:
        _show_weights(weight, quantized.rowwise, call.plan.w, call)
    elif call.watched:
        show_cast(weight, quantized.rowwise, call.plan.w, W, call)
    if not torch.compiler.is_compiling() and WEIGHT_CASTS.outlive_step is not None:
        storage = StorageWeakRef(q.untyped_storage())
        is_own = isinstance(weight, Float8Tensor) and storage == StorageWeakRef(
            weight.qdata.untyped_storage()
        )
        WEIGHT_CASTS.outlive_step[storage] = is_own or _kept_cast(q, call) is not None


def _kept_weight(weight: Tensor, call: Call) -> Operand:
    """The cast of a weight that is kept over microbatches."""
    scales, weight_cast = call.scales, call.precision.weight_cast
    reuses = not call.first_microbatch and weight_cast is not None
    if reuses and weight_cast.fits(weight, call.recipe):
        if isinstance(scales, DelayedScales) and weight_cast.params is not None:
            scales.known_params[W] = weight_cast.params
        return weight_cast.operand
    with torch.inference_mode(False), torch.no_grad():  # training may use it next
        made: Operand = scales.quantize(weight, W, call.plan.w).rowwise
    params = scales.known_params[W] if isinstance(scales, DelayedScales) else None
    params = params and params._replace(amax_slot=None)
    # A weak reference would have torch.utils.swap_tensors refuse the parameter.
    ref = (lambda: weight) if isinstance(weight, nn.Parameter) else weakref.ref(weight)
    call.precision.weight_cast = _WeightCast(ref, version_of(weight), call.recipe, made, params, [])
    return made


class _WeightCast(NamedTuple):
    """The cast that is kept from one microbatch to the next."""

    weight: Callable[[], Tensor | None]
    version: int
    recipe: Recipe
    operand: Operand
    params: QuantParams | None
    """Its scale under delayed scaling."""
    transposes: list[Operand]
    """Its transpose, once a backward of experts has made it."""

    def fits(self, weight: Tensor, recipe: Recipe) -> bool:
        is_same = self.weight() is weight and self.recipe == recipe
        return is_same and self.version == version_of(weight)


def transposed(q: Tensor, scale: Tensor, prior: Tensor | None = None) -> Operand:
    """The transpose of FP8 data with one scale, ``[1]``, or a matrix of scales."""
    has_one = scale.ndim == 1 or scale.shape[-2:] == (1, 1)
    return Operand(transpose_op(q, 1, prior), scale if has_one else scale.mT)


def kept_transpose(q: Tensor, scale: Tensor | None, call: Call) -> Operand | None:
    """The transpose of a kept cast of experts' weights, kept with it; None of another cast.

    Of many small experts it takes a tenth of the time of a step. A CUDA graph makes its own.
    """
    weight_cast = _kept_cast(q, call)
    if weight_cast is None or scale is None or (q.is_cuda and capturing()):
        return None
    if not weight_cast.transposes:
        with torch.inference_mode(False), torch.no_grad():
            weight_cast.transposes.append(transposed(q, scale))
    return weight_cast.transposes[0]


def _kept_cast(q: Tensor, call: Call) -> _WeightCast | None:
    """The cast that is kept from one microbatch to the next, if ``q`` are its FP8 data."""
    weight_cast: _WeightCast | None = call.precision.weight_cast
    return weight_cast if weight_cast is not None and weight_cast.operand.data is q else None
