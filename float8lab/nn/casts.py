"""The operands of a linear layer: casts that layers share, and weights whose casts are kept."""

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
from float8lab.ops.declare import is_traced
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
    """Return the amaxes of an input and a weight that are both sharded, from a single reduction.

    They are None unless both tensors need such an amax; if only one does, its cast reduces it.
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
    """A layer's input: its cast if that exists already, else its quantization parameters."""

    params: QuantParams | None = None
    quantized: Quantized | None = None
    shared: tuple[Tensor, tuple[Any, ...]] | None = None
    """The input and the key under which other layers may use its cast."""


def input_source(
    x: Matrix, inp: Tensor | None, specs: Orientations, call: Call, amax: Tensor | None = None
) -> InputSource:
    """Return the cast of a layer's input if it exists or is made here, else its parameters.

    Layers with the same input, ``inp``, share its cast: q, k and v, or gate and up. A weak
    reference remembers the last input that was cast, and the cast is kept as long as that input is
    alive. Only results of autograd are shared, identified by their node: nothing tells whether a
    kernel has overwritten another tensor since, as a replayed CUDA graph overwrites its outputs.
    Delayed scaling shares no casts, for every layer has its own scale.
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
    """Return everything that the cast of an input depends on; None if it may not be shared."""
    if (node := inp.grad_fn) is None or (inp.is_cuda and capturing()):
        return None  # nothing is shared while a CUDA graph is recorded: a replay needs all casts
    stream = torch._C._cuda_getCurrentRawStream(inp.device.index) if inp.is_cuda else 0
    key: tuple[Any, ...] = *specs, call.plan.epsilon, call.cast_parallel, call.comm.tokens
    if isinstance(x, Groups):
        offs: Any = x.offs  # the groups must be the same, too
        key = (*key, StorageWeakRef(offs.untyped_storage()), offs.data_ptr(), version_of(offs))
    return (*key, inp._version, node._sequence_nr(), stream)


class _SharedCast(threading.local):
    """The last input of a layer that a thread has cast for training."""

    last: tuple[weakref.ref[Tensor], tuple[Any, ...], Quantized] | None = None
    """The input, the key of its cast, and the cast."""


SHARED_CAST = _SharedCast()
"""The cast that layers with the same input share."""


def remember_input(inp: Tensor, key: tuple[Any, ...], quantized: Quantized) -> None:
    """Keep the cast of a layer's input for other layers with the same input."""
    SHARED_CAST.last = weakref.ref(inp, _forget_input), key, quantized


def _forget_input(inp: weakref.ref[Tensor]) -> None:
    """Forget the cast of a layer's input when that input is freed."""
    if SHARED_CAST.last is not None and SHARED_CAST.last[0] is inp:
        SHARED_CAST.last = None


# These functions notify an observer (``float8lab/inspect/watch``), if ``call.watched``.


def show_cast(
    x: Matrix, operand: Operand, spec: Spec, index: int, call: Call, *,
    only_in_backward: bool = False,
) -> None:  # fmt: skip
    """Show that a matrix was cast to ``operand`` for a layer's GEMMs.

    In backward, a cast of x or w repeats a cast of forward, unless it is ``only_in_backward``.
    """
    if isinstance(x, Groups):
        if spec.per_tensor:  # the operand has a scale for each group: give each row its own
            of_rows = groups_of_rows(operand.data.shape[0], x.offs)
            scale = operand.scale.reshape(-1, 1).expand(x.offs.shape[0], 1)[of_rows]
            operand, spec = Operand(operand.data, scale), replace(spec, block=(1, -1))
        x = x.owned()
    if PROCESS.observer is not None and (index == DY or only_in_backward or not in_backward()):
        PROCESS.observer.saw_cast(x, operand, spec, index, call)


def show_quantized(x: Matrix, specs: Orientations, casts: Quantized, i: int, call: Call) -> None:
    """Show that tensor ``i`` of a layer, an input or a gradient, was cast."""
    if specs.rowwise:
        show_cast(x, casts.rowwise, specs.rowwise, i, call)
    elif specs.columnwise and isinstance(x, Tensor):  # columnwise groups have another layout
        show_cast(x.t(), casts.columnwise, specs.columnwise, i, call)


def _show_weights(weight: Tensor, operand: Operand, spec: Spec, call: Call) -> None:
    """Show all experts' weights as one matrix, unless a block would hold rows of two experts."""
    (E, N, K), (q, scale), (block_rows, block_columns) = weight.shape, operand, spec.block
    if isinstance(weight, Float8Tensor) or (block_rows > 1 and N % block_rows):
        return
    scale = scale.reshape(E, -1, scale.shape[-1])  # a single expert's scale may be [1]
    down = N if block_rows == 1 else scale.shape[1]
    rows = Operand(q[:, :N].reshape(E * N, -1), scale[:, :down].reshape(E * down, -1))
    rows_spec = replace(spec, block=(N if block_rows == -1 else block_rows, block_columns))
    show_cast(weight.detach().reshape(E * N, K), rows, rows_spec, W, call)


def show_gemm(kind: str, call: Call, a: Operand | None = None, b: Operand | None = None) -> None:
    """Show that ``fprop``, ``dgrad`` or ``wgrad`` runs, on operands or in high precision."""
    if PROCESS.observer is not None:
        PROCESS.observer.saw_gemm(kind, call, a, b)


# Weights.


def plain(weight: Tensor, prior: Tensor | None = None) -> Tensor:
    """Return a weight in high precision.

    A compiled backward passes ``prior``, a tensor that it computes. The weight is then dequantized
    after that tensor, so the forward cannot save the result.
    """
    if not isinstance(weight, Float8Tensor):
        return weight.dequantize() if isinstance(weight, Float4Tensor) else weight
    if prior is not None and torch.compiler.is_compiling():
        return weight._decode(prior)
    return weight.dequantize()


def stored_as(weight: Tensor, spec: Spec) -> TypeGuard[Float8Tensor]:
    """Whether the bytes in which a weight is stored are the operand."""
    if not isinstance(weight, Float8Tensor):
        return False
    block = spec.block if len(weight.spec.block) == 2 else (1, *spec.block)  # of experts
    return (weight.spec.block, weight.spec.element_dtype) == (block, spec.element_dtype)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate weights by rows; in FP8 if all are stored so and no block has rows of two."""
    first = weights[0]
    # The format of a tensor that a graph computes is unknown when the graph is traced.
    if isinstance(first, Float8Tensor) and not is_traced():
        rows = first.spec.block[0]
        have_one_spec = all(isinstance(w, Float8Tensor) and w.spec == first.spec for w in weights)
        if have_one_spec and rows > 0 and all(w.shape[0] % rows == 0 for w in weights):
            return torch.cat(list(weights))
    return torch.cat([plain(weight) for weight in weights])


def spec_of_experts(spec: Spec) -> Spec:
    """Return the spec of all experts' weights, ``[E, N, K]``, each of which has ``spec``."""
    return replace(spec, block=(1, *spec.block))


def recast(weight: Tensor, spec: Spec) -> str | None:
    """Describe how a weight that is stored in FP8 must be cast to ``spec``; None if it need not."""
    if not isinstance(weight, Float8Tensor) or stored_as(weight, spec):
        return None
    cast_spec = spec if weight.ndim < 3 else spec_of_experts(spec)
    return f"stored as {weight.spec.describe()} and cast to {cast_spec.describe()}"


def _warn_of_recast(weight: Tensor, call: Call) -> None:
    """Warn once for each module if its weight's stored bytes are not the operand."""
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
    """Return the padded FP8 data of a weight that is stored in the recipe's format."""
    q, scale = weight.qdata, weight.scale
    rows, columns = (round_up(size, ALIGN) for size in q.shape[-2:])
    if q.shape[-2:] != (rows, columns):
        pad = (0, columns - q.shape[-1], 0, rows - q.shape[-2])
        q = F.pad(q.view(torch.uint8), pad).view(q.dtype)
        *_, down, across = weight.spec.scale_shape(q.shape)
        scale = F.pad(scale, (0, across - scale.shape[-1], 0, down - scale.shape[-2]), value=1.0)
    return Operand(q, scale)


class WeightSource(NamedTuple):
    """A weight: its FP8 data if they exist already, else the weight and its parameters."""

    high_precision: Tensor | None = None
    params: QuantParams | None = None
    quantized: Quantized | None = None


def weight_source(weight: Tensor, call: Call, amax: Tensor | None = None) -> WeightSource:
    """Return the weight in FP8, or the weight and the quantization parameters of its cast.

    It is in FP8 if it is stored in FP8, if its cast is kept, or if it is cast here, as in a
    compiled graph. Eager mode casts it in every forward unless the caller says that it did not
    change; a version counter cannot tell, for fused optimizers and ``weight.data`` do not touch it.
    The caller says so by ``is_first_microbatch``: True casts and keeps, False reuses.
    """
    if isinstance(weight, Float8Tensor):
        if stored_as(weight, call.plan.w):
            return WeightSource(quantized=Quantized(_stored(weight)))
        if not call.in_graph:
            _warn_of_recast(weight, call)  # a graph cannot hold warnings
        weight = plain(weight)
    if call.in_graph or (call.cast_parallel is not None and call.first_microbatch is None):
        return WeightSource(quantized=call.scales.quantize(weight, W, call.plan.w, amax=amax))
    if call.first_microbatch is None:
        scales = call.scales
        return WeightSource(weight, scales.params(W, weight) if scales.are_given else None)
    return WeightSource(quantized=Quantized(_kept_weight(weight, call)))


def keeps_fp8_data(weight: Tensor, call: Call) -> bool:
    """Whether a weight's FP8 data are kept for backward even if the layer saves memory.

    They exist anyway if the weight is stored in that format, or if its cast is kept over
    microbatches. The cast of a weight that is stored for another recipe is kept in a graph, and
    where ranks share the scale.
    """
    if not isinstance(weight, Float8Tensor):
        return not call.in_graph and call.first_microbatch is not None
    is_kept = call.in_graph or call.first_microbatch is not None or call.cast_parallel is not None
    return is_kept or stored_as(weight, call.plan.w)


def note_weight(weight: Tensor, quantized: Quantized, call: Call) -> None:
    """Tell an observer and CPU offload about the FP8 data of a weight."""
    q = quantized.rowwise.data
    if call.watched and weight.ndim == 3:
        _show_weights(weight, quantized.rowwise, call.plan.w, call)
    elif call.watched:
        show_cast(weight, quantized.rowwise, call.plan.w, W, call)
    if not call.in_graph and WEIGHT_CASTS.outlive_step is not None:
        storage = StorageWeakRef(q.untyped_storage())
        is_own = isinstance(weight, Float8Tensor) and storage == StorageWeakRef(
            weight.qdata.untyped_storage()
        )
        WEIGHT_CASTS.outlive_step[storage] = is_own or _kept_cast(q, call) is not None


def _kept_weight(weight: Tensor, call: Call) -> Operand:
    """Return the cast of a weight that is kept over microbatches, and make it if it is due."""
    scales, weight_cast = call.scales, call.precision.weight_cast
    reuses = not call.first_microbatch and weight_cast is not None
    if reuses and weight_cast.fits(weight, call.recipe):
        if isinstance(scales, DelayedScales) and weight_cast.params is not None:
            scales.known_params[W] = weight_cast.params
        return weight_cast.operand
    with torch.inference_mode(False), torch.no_grad():  # the next to use it may be training
        data: Operand = scales.quantize(weight, W, call.plan.w).rowwise
    params = scales.known_params[W] if isinstance(scales, DelayedScales) else None
    params = params and params._replace(amax_slot=None)
    # torch.utils.swap_tensors refuses a parameter that has a weak reference.
    ref = (lambda: weight) if isinstance(weight, nn.Parameter) else weakref.ref(weight)
    call.precision.weight_cast = _WeightCast(ref, version_of(weight), call.recipe, data, params, [])
    return data


class _WeightCast(NamedTuple):
    """The cast that is kept from one microbatch to the next."""

    weight: Callable[[], Tensor | None]
    version: int
    recipe: Recipe
    operand: Operand
    params: QuantParams | None
    """The parameters of the cast under delayed scaling."""
    transposes: list[Operand]
    """The transpose of the operand, once a backward of experts has made it."""

    def fits(self, weight: Tensor, recipe: Recipe) -> bool:
        is_same = self.weight() is weight and self.recipe == recipe
        return is_same and self.version == version_of(weight)


def transposed(q: Tensor, scale: Tensor, prior: Tensor | None = None) -> Operand:
    """Return the transpose of FP8 data with one scale, ``[1]``, or with a matrix of scales."""
    has_one = scale.ndim == 1 or scale.shape[-2:] == (1, 1)
    return Operand(transpose_op(q, 1, prior), scale if has_one else scale.mT)


def kept_transpose(q: Tensor, scale: Tensor | None, call: Call) -> Operand | None:
    """Return the transpose of experts' weights, kept with their kept cast; None without that cast.

    With many small experts it takes a tenth of a step's time. A CUDA graph makes its own transpose.
    """
    weight_cast = _kept_cast(q, call)
    if weight_cast is None or scale is None or (q.is_cuda and capturing()):
        return None
    if not weight_cast.transposes:
        with torch.inference_mode(False), torch.no_grad():
            weight_cast.transposes.append(transposed(q, scale))
    return weight_cast.transposes[0]


def _kept_cast(q: Tensor, call: Call) -> _WeightCast | None:
    """Return the cast that is kept over microbatches if ``q`` are its FP8 data, else None."""
    weight_cast: _WeightCast | None = call.precision.weight_cast
    return weight_cast if weight_cast is not None and weight_cast.operand.data is q else None
