"""Linear layers whose parameters are DTensors: placements say how ranks share the GEMMs.

``torch.distributed.tensor.parallel.parallelize_module`` converts parameters, inputs and outputs to
DTensors. The placement of the weight says which part of the GEMMs a rank computes: ``Shard(0)`` is
column parallel, ``Shard(1)`` is row parallel, and with ``Replicate`` nothing is sharded. The input
of a column parallel layer is replicated, or a shard of a dimension other than the last, which is
then gathered in FP8. The GEMMs run on local tensors, by ``distributed/comm.py``.

Sums over ranks are left to later ops, as in DTensor. The gradient of a column parallel layer's
input is ``Partial``, so that the gradients of q, k and v are summed once. So is the output of a row
parallel layer, unless the layer must return shards (``output_layout``). Dimensions of the mesh over
which only the weight is replicated are data parallel. Features and tokens are sharded like
``torch.chunk``: the last ranks may have fewer of them, or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from float8lab.arguments import shown
from float8lab.distributed.comm import SharedScales, TensorParallel
from float8lab.distributed.shard_map import ShardMap
from float8lab.formats import Float8Spec
from float8lab.nn.casts import plain
from float8lab.nn.gemm import Saved, backward, forward, output_dtype
from float8lab.nn.main_grad import fused_weights
from float8lab.nn.precision import Call, CallOptions
from float8lab.ops import as_matrix
from float8lab.recipes.recipe import LinearPlan
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import Float8Function, once_differentiable, wanted_gradients
from float8lab.tensor.dtensor import local_of

if TYPE_CHECKING:
    from float8lab.nn.linear import Linear

__all__ = ["WeightPlacement"]


class WeightPlacement:
    """How the ranks of a device mesh share the weight of a linear layer.

    Attributes:
        ndim: the number of dimensions of the mesh.
        axis: the dimension of the mesh over which the weight is sharded; -1 if there is none.
        parallel: how ranks share calls whose tokens are replicated over the axis, with the shards
            of the weight's rows or columns. None where every rank has the unsharded weight.
        parallel_of_token_shards: how ranks share calls whose tokens are sharded over the axis.
    """

    def __init__(
        self, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
    ) -> None:
        """Read the placements of a weight of an unsharded ``shape``."""
        axes = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        self.ndim = len(placements)
        self.axis = axes[0] if axes else -1  # -1 equals no index of a mesh dimension
        self._dim = 0  # the sharded dimension of the weight
        self.parallel: TensorParallel | None = None
        self.parallel_of_token_shards: TensorParallel | None = None
        if not axes:
            return
        placement = placements[self.axis]
        if len(axes) > 1 or not (placement.is_shard(0) or placement.is_shard(1)):
            raise NotImplementedError(
                "weight must be a shard of its rows or columns over one dimension of its mesh, or "
                f"replicated; got placements {tuple(placements)}. Use ColwiseParallel or "
                "RowwiseParallel."
            )
        is_column, group = placement.is_shard(0), mesh.get_group(self.axis)
        mode, self._dim = ("column", 0) if is_column else ("row", 1)
        features = (ShardMap.of(shape[self._dim], group.size(), group.rank()),)
        self.parallel = TensorParallel(group, mode, partial=True, features=features)
        self.parallel_of_token_shards = TensorParallel(
            group, mode, sequence_parallel=True, partial=is_column, features=features
        )

    def __deepcopy__(self, memo: dict[int, object]) -> WeightPlacement:
        return self  # a mesh has no copies

    def share_scales(self, weight: DTensor, old: Tensor | None) -> None:
        """Tell a weight that is stored in FP8 which ranks have the other shards of its blocks.

        Also give the weight its shard of the initial values that the ``old`` weight keeps, if any.

        Raises:
            ValueError: a block of fixed size crosses shards.
        """
        local = local_of(weight)
        if self.parallel is None or not isinstance(local, Float8Tensor):
            return
        local._shared_scales = SharedScales(self.parallel, self._dim)
        local._shared_scales.check("weight", local.shape, local.spec)
        initial_value = getattr(old, "_high_precision_init_val", None)
        if initial_value is not None and initial_value.shape == weight.shape:
            shard = self.parallel.features[0].shard(initial_value, self._dim)
            local._high_precision_init_val = shard.clone()

    def shares_blocks(self, spec: Float8Spec) -> tuple[bool, ProcessGroup | None]:
        """Return whether FSDP2 can gather the shard in FP8, and which group shares blocks of -1."""
        block = spec.block[self._dim]
        if self.parallel is not None and spec.tensor_scale:
            return False, None
        if self.parallel is None or block == 1:
            return True, None
        if block == -1:
            return True, self.parallel.group
        return not self.parallel.features[0].block_crosses_shards(block), None

    def unshard(self, scales: Tensor, spec: Float8Spec) -> Tensor:
        """Return the scales of the unsharded weight's blocks, from the scales of each rank."""
        if (blocks := self._blocks(spec)) is None or self.parallel is None:
            return scales
        return self.parallel.gather(scales, blocks, self._dim)

    def shard(self, scales: Tensor, spec: Float8Spec) -> Tensor:
        """Return the scales of this rank's shard, from the scales of the unsharded weight."""
        blocks = self._blocks(spec)
        return scales if blocks is None else blocks.shard(scales, self._dim)

    def _blocks(self, spec: Float8Spec) -> ShardMap | None:
        """Return the shard map of the weight's blocks; None if all ranks have all blocks."""
        if self.parallel is None or (block := spec.block[self._dim]) == -1:
            return None
        return self.parallel.features[0].blocks(block)

    def run(
        self, layer: Linear, x: Tensor, weight: DTensor, bias: DTensor | None,
        first_microbatch: bool | None,
    ) -> DTensor:  # fmt: skip
        """Run the forward of a ``Linear`` without ``return_bias`` on its arguments.

        Raises:
            ValueError: the input is not a DTensor.
        """
        if not isinstance(x, DTensor):
            raise ValueError(
                f"inp must be a DTensor where the weight is one; got {shown(x)}. Give the layer a "
                "style of parallelize_module, or its caller."
            )
        recipe = layer._fp8.active_recipe()
        plan = None if recipe is None else recipe.linear
        sharing, tokens = _decide_sharing(self, x, weight, plan, layer.output_layout)
        placements = sharing.placements(x)[0]
        if tuple(x.placements) != placements:
            x = x.redistribute(placements=placements)
        options = CallOptions(
            first_microbatch,
            fused_weights(layer, weight),
            tokens,
            self.parallel_of_token_shards if tokens is not None else None,
        )
        call = layer._fp8.begin(x.to_local(), weight, training=layer.training, options=options)
        if call is None:
            return self._run_in_high_precision(layer, x, weight, bias)
        y = _Linear.run(x, weight, bias, call, sharing)
        if call.is_region:
            layer._fp8.end(call)
        return y

    def _run_in_high_precision(
        self, layer: Linear, x: DTensor, weight: DTensor, bias: DTensor | None
    ) -> DTensor:
        axis, last = self.axis, x.ndim - 1
        if x.placements[axis].is_shard() and x.placements[axis] != Shard(last):
            # Older versions of DTensor cannot flatten tokens with a sharded inner dimension.
            gathered = (*x.placements[:axis], Replicate(), *x.placements[axis + 1 :])
            x = x.redistribute(placements=gathered)
        stored = weight.to_local()
        local = plain(stored)
        layer._fp8.calibrate(x.to_local(), local)
        if local is not stored:
            weight = _as_dtensor(local, weight.device_mesh, weight.placements, weight.shape)
        return nn.functional.linear(x, weight, bias)  # type: ignore[return-value]


class _Sharing(NamedTuple):
    """How ranks share the tensors of a call; a graph can hold it, since it has no placements."""

    axis: int
    """The dimension of the mesh over which the weight is sharded."""
    mode: str | None
    token_dim: int | None
    """The dimension in which x, or a row parallel layer's y, is a shard of tokens on the axis."""
    y_shape: tuple[int, ...]
    dx_shape: tuple[int, ...]

    def placements(self, x: DTensor) -> list[tuple[Placement, ...]]:
        """Return the placements of x, y, dx, dw and db, given an x that is placed elsewhere.

        Over other dimensions than the axis, ranks have either their own tokens or the same tokens.
        """
        features, replicated, tokens = Shard(x.ndim - 1), Replicate(), None
        base: list[Placement] = [
            p if p.is_shard() and not p.is_shard(features.dim) else replicated for p in x.placements
        ]
        data = [Partial() if p.is_shard() else replicated for p in base]  # for sums over tokens
        if self.token_dim is not None:
            tokens = Shard(self.token_dim)
        on_axis: list[Placement] = [replicated] * 5
        if self.mode == "column":
            on_axis = [tokens or replicated, features, Partial(), Shard(0), Shard(0)]
        elif self.mode == "row":
            y, db = (Partial(), replicated) if tokens is None else (tokens, Partial())
            on_axis = [features, y, features, Shard(1), db]
        around: list[Sequence[Placement]] = [base, base, base, data, data]
        return [
            tuple(p if i == self.axis else placement for i, placement in enumerate(base_placements))
            for p, base_placements in zip(on_axis, around, strict=True)
        ]


def _decide_sharing(
    placement: WeightPlacement, x: DTensor, weight: DTensor, plan: LinearPlan | None,
    output: Placement | None,
) -> tuple[_Sharing, ShardMap | None]:  # fmt: skip
    """Decide how ranks share a call, and return the shard map of its tokens if they are sharded.

    ``output`` is the placement that a row parallel layer returns, or None.
    """
    axis, parallel = placement.axis, placement.parallel
    mode = None if parallel is None else parallel.mode
    N, K = weight.to_local().shape
    shared = x.placements[axis] if mode == "column" else output if mode == "row" else None
    unsharded = _local_shape(x, axis)
    y_shape, tokens, dim = [*unsharded], None, None
    if parallel is not None and shared is not None and shared.is_shard():
        dim = cast("Shard", shared).dim % x.ndim
        is_free = not any(i != axis and p.is_shard(dim) for i, p in enumerate(x.placements))
        if is_free and dim != x.ndim - 1:
            tokens = _tokens(unsharded, dim, parallel, plan)
        if tokens is not None and mode == "row":
            y_shape[dim] = tokens.length
    shapes = (*y_shape[:-1], N), (*unsharded[:-1], K)
    return _Sharing(axis, mode, None if tokens is None else dim, *shapes), tokens


def _local_shape(x: DTensor, axis: int) -> list[int]:
    """Return the shape of ``x`` on a rank that has all of ``x`` along the mesh's ``axis``."""
    shape = list(x.shape)
    for i, placement in enumerate(x.placements):
        if i != axis and placement.is_shard() and not placement.is_shard(x.ndim - 1):
            ranks, rank = x.device_mesh.size(i), x.device_mesh.get_local_rank(i)
            dim = cast("Shard", placement).dim
            shape[dim] = ShardMap.of(shape[dim], ranks, rank).length
    return shape


def _tokens(
    shape: Sequence[int], dim: int, parallel: TensorParallel, plan: LinearPlan | None
) -> ShardMap | None:
    """Return the shard map of tokens; None if blocks cross shards, and DTensor must gather x."""
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 : -1])
    tokens = ShardMap.of(shape[dim], parallel.size, parallel.rank, inner=inner, outer=outer)
    crosses = plan is not None and any(map(tokens.block_crosses_shards, plan.token_blocks))
    return None if crosses else tokens


class _Linear(Float8Function):
    """``LinearFunction`` for DTensors."""

    @staticmethod
    def forward(
        ctx: Any, x: DTensor, weight: DTensor, bias: DTensor | None, call: Call, sharing: _Sharing
    ) -> DTensor:
        local, w = x.to_local(), weight.to_local()
        b = None if bias is None else bias.to_local()
        y, saved = forward(
            as_matrix(local), w, b, call,
            needs=ctx.needs_input_grad[:2], dtype=output_dtype(local), inp=x,
        )  # fmt: skip
        ctx.save_for_backward(*saved)
        ctx.call, ctx.dx_shape, ctx.mesh = call, sharing.dx_shape, x.device_mesh
        _, ctx.y_placements, *ctx.placements = sharing.placements(x)
        ctx.unsharded = x.shape, weight.shape, None if bias is None else bias.shape
        ctx.shape = math.prod(sharing.dx_shape[:-1]), *w.shape
        ctx.dtypes = x.dtype, w.dtype, None if b is None else b.dtype
        y = y.view(sharing.y_shape)
        return _as_dtensor(y, ctx.mesh, ctx.y_placements, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: DTensor) -> tuple[DTensor | None, ...]:
        needs = wanted_gradients(ctx)[:3]
        # A partial output was summed, so each rank needs the full gradient.
        complete = tuple(Replicate() if p.is_partial() else p for p in ctx.y_placements)
        if tuple(dy.placements) != complete:
            dy = dy.redistribute(placements=complete)
        dx, dw, db = backward(
            as_matrix(dy.to_local()), None, Saved._make(ctx.saved_tensors), ctx.call,
            needs=needs, shape=ctx.shape, dtypes=ctx.dtypes,
        )  # fmt: skip
        dx = None if dx is None else dx.reshape(ctx.dx_shape)
        return *(
            None if local is None else _as_dtensor(local, ctx.mesh, placements, shape)
            for local, placements, shape in zip(
                (dx, dw, db), ctx.placements, ctx.unsharded, strict=True
            )
        ), None, None  # fmt: skip


def _as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]
) -> DTensor:
    """Make a contiguous DTensor of a shape from a local tensor."""
    size = torch.Size(shape)
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)
