"""Linear layers whose parameters are DTensors: GEMMs spread over ranks as the placements say.

``torch.distributed.tensor.parallel.parallelize_module`` makes parameters DTensors, and has inputs
come and outputs leave as such. The placement of the weight says which part of the GEMMs a rank has:
``Shard(0)`` is column parallel, ``Shard(1)`` row parallel, ``Replicate`` neither. The input of a
column parallel layer is replicated, or a shard of a dimension other than the last, which is then
gathered in FP8. The GEMMs run on local tensors, by ``distributed/tensor_parallel.py``.

Sums over ranks are left to whoever needs them, as DTensor does: the gradient of a column parallel
layer's input is ``Partial``, so that those of q, k and v are summed once, and so is the output of a
row parallel layer, unless the layer was told to give shards (``output_layout``). Dimensions of the
mesh over which the weight is replicated and the input is not are data parallel. Shards of features,
as of tokens, are those of ``torch.chunk``: the last ranks may have fewer, or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from float8lab.arguments import shown
from float8lab.distributed.fsdp.weight import local_of
from float8lab.distributed.tensor_parallel import Rows, SharedScales, TensorParallel
from float8lab.formats import HIGH_PRECISION_DTYPES, Float8Spec
from float8lab.nn.casts import plain
from float8lab.nn.gemm import Saved, backward, forward, output_dtype
from float8lab.nn.main_grad import fused_weight
from float8lab.nn.precision import Call
from float8lab.ops import as_matrix
from float8lab.recipes.recipe import LinearPlan
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import (
    Float8Function,
    once_differentiable,
    wanted_gradients,
)

__all__ = ["Spread"]


class Spread:
    """How the weight of a linear layer is spread over a device mesh.

    Attributes:
        mode: ``"column"``, ``"row"``, or None where every rank has the whole.
        ndim: how many dimensions the mesh has.
        axis: the one that has the weight's shards; -1 if none has.
        features: the size of the weight along the dimension that is cut, on all ranks.
        whole: of calls whose tokens are replicated over the axis.
        shards: of calls whose tokens are shards over the axis.
    """

    def __init__(self, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> None:
        """Read the placements of a weight of a ``shape``, on all ranks.

        Raises:
            NotImplementedError: it is not a shard of rows or columns over one dimension.
        """
        axes = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        self.ndim = len(placements)
        self.axis = axes[0] if axes else -1  # no dimension of any mesh
        self.mode: str | None = None
        self.features = 0
        self.whole: Any = None
        self.shards: Any = None
        if not axes:
            return
        found = placements[self.axis]
        if len(axes) > 1 or not (found.is_shard(0) or found.is_shard(1)):
            raise NotImplementedError(
                "weight must be a shard of its rows or columns over one dimension of its mesh, or "
                f"replicated; got placements {tuple(placements)}. Use ColwiseParallel or "
                "RowwiseParallel."
            )
        self.mode = "column" if found.is_shard(0) else "row"
        self.features = shape[int(self.mode == "row")]
        group = mesh.get_group(self.axis)
        uneven = self.features if self.features % group.size() else 0
        self.whole = TensorParallel(group, self.mode, partial=True, features=uneven)
        self.shards = TensorParallel(
            group, self.mode, sequence_parallel=True, partial=self.mode == "column", features=uneven
        )

    def __deepcopy__(self, memo: Any) -> Spread:
        return self  # a mesh has no copies

    def adopt(self, weight: Any, old: Any) -> None:
        """Have a weight that is stored in FP8 know who has the other parts of its blocks.

        And its part of the initial values that are kept of the ``old`` weight, if they are.

        Raises:
            ValueError: a block that has a size lies on several ranks.
        """
        local = local_of(weight)
        if self.mode is None or not isinstance(local, Float8Tensor):
            return
        dim = int(self.mode == "row")
        local._shared_scales = SharedScales(self.whole, dim)
        local._shared_scales.check("weight", local.shape, local.spec)
        kept = getattr(old, "_high_precision_init_val", None)
        if kept is not None and kept.shape == weight.shape:
            place = self._shares(1).of(self.whole.rank)
            local._high_precision_init_val = kept.narrow(dim, *place).clone()

    def shares(self, spec: Float8Spec, shard: Tensor) -> tuple[bool, Any]:
        """Whether a rank's shard of the weight has whole blocks, or parts of a whole row of them.

        And the process group of those who have the other parts, or None.
        """
        dim = 1 if self.mode == "row" else 0
        size = spec.block[dim]
        if self.mode is None or size == 1:
            return True, None
        if size == -1:
            return True, self.whole.group
        return not self.whole.are_cut(shard.shape[dim], size), None

    def whole_of(self, scales: Tensor, spec: Float8Spec) -> Tensor:
        """The scales of the whole weight's blocks, of those of each rank's shard."""
        dim, blocks = self._blocks(spec)
        return scales if blocks is None else self.whole.gathered(scales, blocks, dim)

    def part_of(self, scales: Tensor, spec: Float8Spec) -> Tensor:
        """The scales of this rank's shard, of those of the whole weight's blocks."""
        dim, blocks = self._blocks(spec)
        return scales if blocks is None else scales.narrow(dim, *blocks.of(self.whole.rank))

    def _blocks(self, spec: Float8Spec) -> tuple[int, Rows | None]:
        """The dimension of the weight that is cut, and its blocks; None if all ranks have all."""
        dim = int(self.mode == "row")
        size = spec.block[dim]
        if self.mode is None or size == -1:
            return dim, None
        return dim, self._shares(size)

    def _shares(self, size: int) -> Rows:
        """The dimension of the weight that is cut, in blocks of ``size``, and each rank's."""
        count = -(-self.features // size)
        return Rows(count, -(-count // self.whole.size), 1)

    def run(self, layer: Any, x: Any, weight: Any, bias: Any, first_microbatch: bool | None) -> Any:
        """The forward of a ``Linear`` without ``return_bias``, whose arguments these are.

        Raises:
            ValueError: the input is no DTensor.
        """
        if not isinstance(x, DTensor):
            raise ValueError(
                f"inp must be a DTensor where the weight is one; got {shown(x)}. Give the layer a "
                "style of parallelize_module, or its caller."
            )
        recipe = layer._fp8.active_recipe()
        plan = None if recipe is None else recipe.linear
        layout = _layout(self, x, weight, plan, layer.output_layout)
        if tuple(x.placements) != layout.x:
            x = x.redistribute(placements=layout.x)
        call = layer._fp8.begin(
            x.to_local(), training=layer.training, first_microbatch=first_microbatch,
            fused_weight=fused_weight(layer, weight) if layer.fuse_wgrad_accumulation else None,
            parallel=self.shards if layout.rows is not None else None, rows=layout.rows,
        )  # fmt: skip
        if call is None or weight.dtype not in HIGH_PRECISION_DTYPES:
            return self._run_in_high_precision(layer, x, weight, bias)
        y = _Linear.run(x, weight, bias, call, layout)
        if call.is_region:
            layer._fp8.end(call)
        return y

    def _run_in_high_precision(self, layer: Any, x: Any, weight: Any, bias: Any) -> Any:
        stored = weight.to_local()
        local = plain(stored)
        layer._fp8.calibrate(x.to_local(), local)
        if local is not stored:
            weight = _made(local, weight.device_mesh, weight.placements, weight.shape)
        return nn.functional.linear(x, weight, bias)


class _Layout(NamedTuple):
    """The placements of one call's tensors, their local shapes, and its rows if they are shards."""

    x: tuple[Any, ...]
    y: tuple[Any, ...]
    dx: tuple[Any, ...]
    dw: tuple[Any, ...]
    db: tuple[Any, ...]
    rows: Rows | None
    shape_of_y: tuple[int, ...]
    shape_of_dx: tuple[int, ...]


def _layout(spread: Spread, x: Any, weight: Any, plan: LinearPlan | None, wanted: Any) -> _Layout:
    """How a call runs. ``wanted``: the placement of a row parallel layer's output, or None."""
    last, axis, mode = x.ndim - 1, spread.axis, spread.mode
    N, K = weight.to_local().shape
    # Outside the axis each rank has tokens of its own, or the same.
    base: list[Any] = [
        p if p.is_shard() and not p.is_shard(last) else Replicate() for p in x.placements
    ]
    data = [Partial() if p.is_shard() else Replicate() for p in base]  # of sums over tokens
    shared = base[axis] if mode == "column" else wanted if mode == "row" else None
    whole = _local_shape(x, base, axis)
    y_shape, rows = [*whole], None
    if shared is not None and shared.is_shard() and not shared.is_shard(last):
        dim = shared.dim % x.ndim
        if not any(i != axis and p.is_shard(dim) for i, p in enumerate(base)):
            rows = _rows(whole, dim, spread.shards.size)
        if rows is not None and plan is not None and rows.outer > 1:
            # A rank knows how one run of rows cuts the blocks of tokens, not several.
            rows = None if any(map(rows.are_cut, _blocks_of_tokens(plan))) else rows
        if rows is not None and mode == "row":
            chunk = -(-whole[dim] // spread.shards.size)
            y_shape[dim] = max(0, min(chunk, whole[dim] - chunk * spread.shards.rank))

    def placed(here: Any, others: Sequence[Any] = base) -> tuple[Any, ...]:
        return tuple(here if i == axis else p for i, p in enumerate(others))

    every, features = Replicate(), Shard(last)
    here: list[Any] = [every] * 5  # of x, y, dx, dw and db
    if mode == "column":
        here = [every if rows is None else shared, features, Partial(), Shard(0), Shard(0)]
    elif rows is not None:
        here = [features, shared, features, Shard(1), Partial()]
    elif mode == "row":
        here = [features, Partial(), features, Shard(1), every]
    x_placed, y_placed, dx_placed = (placed(p) for p in here[:3])
    dw_placed, db_placed = (placed(p, data) for p in here[3:])
    return _Layout(
        x_placed, y_placed, dx_placed, dw_placed, db_placed, rows, (*y_shape[:-1], N),
        (*whole[:-1], K),
    )  # fmt: skip


def _local_shape(x: Any, placements: Sequence[Any], axis: int) -> list[int]:
    """The shape of ``x`` on a rank that has all of it along one dimension of the mesh."""
    shape = list(x.shape)
    for i, placement in enumerate(placements):
        if i != axis and placement.is_shard():
            ranks, index = x.device_mesh.size(i), x.device_mesh.get_local_rank(i)
            chunk = -(-shape[placement.dim] // ranks)
            shape[placement.dim] = max(0, min(chunk, shape[placement.dim] - chunk * index))
    return shape


def _rows(shape: Sequence[int], dim: int, ranks: int) -> Rows:
    lead, outer, inner = shape[dim], math.prod(shape[:dim]), math.prod(shape[dim + 1 : -1])
    chunk = -(-lead // ranks)
    if chunk == lead:  # the first rank has all
        return Rows(lead * outer, lead * outer, inner)
    return Rows(lead, chunk, inner, outer)


def _blocks_of_tokens(plan: LinearPlan) -> set[int]:
    """How many tokens the blocks of a layer's operands have, where that is several but not all."""
    sizes = {gemm.left.block[0] for gemm in (plan.fprop, plan.dgrad) if gemm}
    if plan.wgrad:
        sizes |= {plan.wgrad.left.block[1], plan.wgrad.right.block[1]}
    return sizes - {1, -1}


class _Linear(Float8Function):
    """``LinearFunction`` of DTensors."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, call: Call, layout: _Layout) -> DTensor:
        local, w = x.to_local(), weight.to_local()
        b = None if bias is None else bias.to_local()
        y, saved = forward(
            as_matrix(local), w, b, call,
            needs=ctx.needs_input_grad[:2], dtype=output_dtype(local), inp=x,
        )  # fmt: skip
        ctx.save_for_backward(*saved)
        ctx.call, ctx.layout, ctx.mesh = call, layout, x.device_mesh
        ctx.wholes = x.shape, weight.shape, None if bias is None else bias.shape
        ctx.shape = math.prod(layout.shape_of_dx[:-1]), *w.shape
        ctx.dtypes = x.dtype, w.dtype, None if b is None else b.dtype
        y = y.view(layout.shape_of_y)
        return _made(y, ctx.mesh, layout.y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        call, layout, needs = ctx.call, ctx.layout, wanted_gradients(ctx)[:3]
        # A partial output was summed, so each rank wants all of the gradient.
        wanted = tuple(Replicate() if p.is_partial() else p for p in layout.y)
        if tuple(dy.placements) != wanted:
            dy = dy.redistribute(placements=wanted)
        dx, dw, db = backward(
            as_matrix(dy.to_local()), None, Saved._make(ctx.saved_tensors), call,
            needs=needs, shape=ctx.shape, dtypes=ctx.dtypes,
        )  # fmt: skip
        dx = None if dx is None else dx.reshape(layout.shape_of_dx)
        return *(
            None if local is None else _made(local, ctx.mesh, placements, whole)
            for local, placements, whole in zip(
                (dx, dw, db), (layout.dx, layout.dw, layout.db), ctx.wholes, strict=True
            )
        ), None, None  # fmt: skip


def _made(local: Tensor, mesh: Any, placements: Sequence[Any], shape: Sequence[int]) -> DTensor:
    """A contiguous DTensor of a shape."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape),
        stride=tuple(reversed(strides)),
    )  # fmt: skip
