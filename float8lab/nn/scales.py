"""Scale sources: where the scales of a layer's casts come from.  M rows, K columns.

A call of a layer has one source, chosen when the call begins, and its forward and backward take
all scales from that source. *Current* scales are computed from the amax that each cast measures;
ranks that have shards of a matrix *share* them. *Delayed* scales were computed from the amaxes of
earlier steps. A compiled *graph* looks its delayed scales up when it runs.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor

from float8lab.distributed.comm import TensorParallel
from float8lab.formats import Spec
from float8lab.nn.in_graph import CallInGraph, cast_in_graph
from float8lab.ops import Groups, Prologue, amax_op, prologue_shape, round_up
from float8lab.ops.cast import is_cast_at_once
from float8lab.ops.operand import Operand, Quantized
from float8lab.ops.reference import ALIGN
from float8lab.recipes.delayed import DelayedSlots, Factors, QuantParams, own_amax
from float8lab.tensor.operands import Matrix, quantize, replayed_quantize, value_of

__all__ = ["DY", "DelayedScales", "GraphScales", "ScaleSource", "W", "X"]

X, W, DY = 0, 1, 2
"""Indices of a linear layer's cast tensors."""

_SHORT_ROWS = 1024
"""Inductor makes reductions of up to this many values "persistent"."""


class ScaleSource:
    """The scales of one call's casts: current scales, unless a subclass gives others."""

    __slots__ = ("_run", "epsilon", "parallel")

    are_given = False
    """Whether casts are given their scales, rather than compute them from the amax."""

    def __init__(self, epsilon: float, parallel: TensorParallel | None) -> None:
        self.epsilon = epsilon
        self.parallel = parallel
        self._run = quantize if parallel is None else replayed_quantize

    def params(self, index: int, x: Matrix) -> QuantParams | None:
        """Return the parameters that tensor ``index`` has before ``x`` is cast, if any."""
        return None

    def requant_params(self, scale: Tensor | None, requant: Tensor | None) -> QuantParams | None:
        """Return the parameters that requantize a matrix to its FP8 data of forward, if saved.

        ``scale`` is the scale of that data, and ``requant`` the field that ``quantize`` returned.
        """
        if scale is None:
            return None
        factors = Factors(scale, requant)  # type: ignore[arg-type]
        return QuantParams(factors, None, "encode" if self.are_given else None)

    def uses_amax(self, index: int) -> bool:
        """Whether a cast of tensor ``index`` first needs the amax of all values."""
        return not self.are_given

    def quantize(
        self, x: Matrix, index: int, rowwise: Spec | None, columnwise: Spec | None = None, *,
        dbias: bool = False, align: int = ALIGN, amax: Tensor | None = None,
    ) -> Quantized:  # fmt: skip
        """Cast tensor ``index`` of the call; the arguments are those of the function ``quantize``.

        ``amax``, ``[1, 1]``, is the amax of the unsharded matrix, if x is a shard and it is known.
        """
        params = self.params(index, x)
        if not self.are_given:
            dim = None if self.parallel is None else self.parallel.sharded_dim(index)
            if self.parallel is not None and dim is not None:
                return _quantize_shard(
                    x, rowwise, columnwise, self.parallel, dim, amax, self.epsilon, dbias, align
                )
            if torch.compiler.is_compiling() and _shares_matrix_amax(rowwise, columnwise):
                params = _amax_params(x, index)
        return self._run(x, rowwise, columnwise, params, self.epsilon, dbias, align)


def _shares_matrix_amax(*specs: Spec | None) -> bool:
    return any(spec is not None and spec.shares_matrix_amax for spec in specs)


def _amax_params(x: Matrix, index: int) -> QuantParams | None:
    """Compute the amax of a matrix in a graph in plain PyTorch; None leaves it to the cast op."""
    # The compiler computes the amax in the loop that computes the matrix; the op would read the
    # matrix once more. The amax goes by rows, as norms do, or the compiler makes two loops. No loop
    # computes a weight. Inductor holds a short row in registers, which suits a norm, but a costly
    # gradient, such as that of rotary embedding, took three times as long on an H200.
    if not isinstance(x, Tensor) or index == W or not x.numel():
        return None
    if index == DY and x.shape[1] <= _SHORT_ROWS:
        return None
    is_true = torch.fx.experimental.symbolic_shapes.statically_known_true  # dynamo imports it
    if is_true(is_cast_at_once(x)):  # the launch of the cast computes the amax, too
        return None
    return QuantParams.of_amax(x.abs().amax(1).amax().float().view(1, 1))


def _quantize_shard(
    x: Matrix, rowwise: Spec | None, columnwise: Spec | None, parallel: TensorParallel, dim: int,
    amax: Tensor | None, epsilon: float, dbias: bool, align: int,
) -> Quantized:  # fmt: skip
    """Cast a shard to the same bytes that a cast of the unsharded matrix would give it.

    A block that spans the sharded dimension has the largest amax of all ranks. No other block
    crosses shards: such tokens are gathered first, and such features run in high precision.

    Args:
        dim: the sharded dimension of ``x``.
        amax: the amax of the unsharded matrix, ``[1, 1]``, if it is known.
    """
    params: QuantParams | None = None
    if _shares_matrix_amax(rowwise, columnwise):
        params = QuantParams.of_amax(parallel.amax(own_amax(x)) if amax is None else amax)
    rows_span = rowwise is not None and rowwise.spans(dim)
    columns_span = columnwise is not None and columnwise.spans(1 - dim)
    if not (rows_span or columns_span):
        return replayed_quantize(x, rowwise, columnwise, params, epsilon, dbias, align)
    by_rows, by_columns = None if rows_span else rowwise, None if columns_span else columnwise
    result = Quantized()
    if by_rows or by_columns:
        result = replayed_quantize(x, by_rows, by_columns, params, epsilon, False, align)
        result = result._replace(requant=None)
    if rowwise is not None and rows_span:
        operand = _quantize_spanning(x, rowwise, parallel, epsilon, align, False)
        result = result._replace(rowwise=operand)
    if columnwise is not None and columns_span:
        operand = _quantize_spanning(x, columnwise, parallel, epsilon, align, True)
        result = result._replace(columnwise=operand)
    if dbias:
        sums = _column_sums_of_groups(x) if isinstance(x, Groups) else value_of(x).float().sum(0)
        result = result._replace(dbias=sums)
    return result


def _quantize_spanning(
    x: Matrix, spec: Spec, parallel: TensorParallel, epsilon: float, align: int, is_columnwise: bool
) -> Operand:
    """Cast one orientation of a shard whose blocks span the sharded dimension."""
    # Ranks share the features of experts, never their rows. So groups are cast rowwise here, with
    # zeros as padding rows. Experts' weights are padded to full blocks and cast as one matrix.
    if isinstance(x, Groups):
        matrix = x.owned()
        q, scale = _quantize_spanning(matrix, spec, parallel, epsilon, align, is_columnwise)
        return Operand(q[: len(matrix)], scale[: len(matrix)])
    if isinstance(x, Tensor) and x.ndim == 3:
        weights, rows_of_block = x.mT if is_columnwise else x, spec.block[0]
        E, rows, _ = weights.shape
        padded = F.pad(weights, (0, 0, 0, round_up(rows, max(rows_of_block, align)) - rows))
        q, scale = _quantize_spanning(padded.flatten(0, 1), spec, parallel, epsilon, align, False)
        rows = round_up(rows, align)
        q = q.view(torch.uint8).unflatten(0, (E, -1))[:, :rows].contiguous().view(q.dtype)
        return Operand(q, scale.unflatten(0, (E, -1))[:, : -(-rows // rows_of_block)].contiguous())
    prologue, inputs, dtype = x[:3] if isinstance(x, Prologue) else ("", (x,), x.dtype)
    amaxes = amax_op(prologue, inputs, dtype, spec.block[::-1] if is_columnwise else spec.block)
    amaxes = parallel.amax(amaxes.t() if is_columnwise else amaxes)
    shape = tuple(prologue_shape(prologue, inputs))
    shape = shape[::-1] if is_columnwise else shape
    down, across = spec.scale_shape(tuple(round_up(n, align) for n in shape))
    pad = (0, across - amaxes.shape[1], 0, down - amaxes.shape[0])
    params = QuantParams.of_amax(F.pad(amaxes, pad), spec.scale_rule)
    by_rows, by_columns = (None, spec) if is_columnwise else (spec, None)
    result = quantize(x, by_rows, by_columns, params, epsilon, align=align)
    return result.columnwise if is_columnwise else result.rowwise


def _column_sums_of_groups(x: Groups) -> Tensor:
    """Return the column sums of each group, ``[E, K]``, float32."""
    (value,), offs = x.inputs, x.offs
    row = torch.arange(value.shape[0], device=value.device, dtype=offs.dtype)
    sums = value.new_zeros((offs.shape[0] + 1, value.shape[1]), dtype=torch.float32)
    return sums.index_add_(0, torch.searchsorted(offs, row, right=True), value.float())[:-1]


class DelayedScales(ScaleSource):
    """The scales in a module's slots, which come from the amaxes of earlier steps.

    They do not change during a call, except that the first tensor of a slot sets its first scale.
    """

    __slots__ = ("experts", "is_empty_everywhere", "known_params", "record", "slots")

    are_given = True

    def __init__(
        self, epsilon: float, parallel: TensorParallel | None, slots: DelayedSlots, *, record: bool,
        is_empty_everywhere: bool, experts: range | None,
    ) -> None:  # fmt: skip
        """Ask the slots for the scales that they have.

        Args:
            record: whether the amaxes of casts are recorded.
            is_empty_everywhere: whether a call without rows here has none on other ranks, either.
            experts: the experts of the module that this rank has, if not all.
        """
        super().__init__(epsilon, parallel)
        self.slots = slots
        self.record = record
        self.is_empty_everywhere = is_empty_everywhere
        self.experts = experts
        self.known_params = slots.known_params(record=record, experts=experts)

    def params(self, index: int, x: Matrix) -> QuantParams:
        """Return the scale and encode factor of a tensor, and the slot for its amax.

        The parameters of a forward tensor hold for the rest of the call.
        """
        if (params := self.known_params[index]) is not None:
            return params
        params = self.slots.scale_for(
            index, x, record=self.record, is_empty_everywhere=self.is_empty_everywhere,
            experts=self.experts,
        )  # fmt: skip
        if self.slots.forward[index]:
            self.known_params[index] = params
        return params

    def uses_amax(self, index: int) -> bool:
        """Whether ``params`` will compute the tensor's first scale from its values."""
        return self.known_params[index] is None and not self.slots.is_seeded(index)

    def repetition(self) -> DelayedScales:
        """Return the scales of the call's recomputation, which records only gradients' amaxes."""
        if self.record:
            # Watch the backward pass that the recomputation runs in, not one nested in it.
            self.slots.pack.watch_backward()
        scales = copy.copy(self)
        scales.known_params = [p and p._replace(amax_slot=None) for p in self.known_params]
        return scales


class GraphScales(ScaleSource):
    """Delayed scales in a compiled graph, where an op looks them up when the graph runs."""

    __slots__ = ("call",)

    are_given = True

    def __init__(self, epsilon: float, parallel: TensorParallel | None, call: CallInGraph) -> None:
        super().__init__(epsilon, parallel)
        self.call = call

    def quantize(
        self, x: Matrix, index: int, rowwise: Spec | None, columnwise: Spec | None = None, *,
        dbias: bool = False, align: int = ALIGN, amax: Tensor | None = None,
    ) -> Quantized:  # fmt: skip
        if rowwise is not None and columnwise is not None and rowwise != columnwise:
            by_rows = self.quantize(x, index, rowwise, dbias=dbias, align=align)
            by_columns = self.quantize(x, index, None, columnwise, align=align)
            return by_rows._replace(columnwise=by_columns.columnwise)
        return cast_in_graph(x, index, self.call, rowwise, columnwise, dbias, align)
