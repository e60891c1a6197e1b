"""The tensor classes with FSDP2's all-gather hooks, and the modules that give FSDP2 such tensors.

FSDP2 looks for all-gather hooks on the local tensor of the sharded parameter, which it makes
itself. Before that, if the module's class defines ``__setattr__``, FSDP2 registers the parameter
with the module by ``setattr``; a ``Shardable`` module then makes the local tensor a ``Shard``. All
operations on a shard, except the few by which FSDP2 moves it, return tensors of its former class:
plain tensors for a weight in high precision. So the unsharded model has only ordinary parameters,
optimizers run at full speed, and checkpoints hold tensors that torch alone can load.

If the hooks were lost, a weight in high precision would be gathered in high precision and cast by
the module. The same happens if ``fully_shard`` was called before the conversion, since FSDP2 looks
for hooks only once, when it shards.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor, nn

from float8lab.distributed.fsdp.weight import (
    RowShard,
    ShardedWeight,
    WeightCast,
    cast_rows,
    shard_mesh,
)
from float8lab.formats import Float8Spec
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import is_dtensor, local_of
from float8lab.tensor.views import cut

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    _Tensor = Tensor
else:
    _Tensor = object  # classes of shards derive from a tensor class; this base must not

__all__ = [
    "MasterShard", "Shardable", "StoredShard", "detach_window", "is_column_or_row_shard",
    "is_sharded_plain", "is_tensor_parallel", "reshard", "sharded_by_fsdp",
]  # fmt: skip


def _move(name: str) -> Callable[..., Shard]:
    """Make a method by which FSDP2 pads a shard, moves it to the device or pins it."""

    def move(self: Shard, *args: object, **kwargs: object) -> Shard:
        moved = getattr(super(Shard, self), name)(*args, **kwargs)
        # FSDP2 calls ``narrow`` last when it replaces a shard; other methods may only make copies.
        return _become_shard(moved, self.owner, self.weight, registered=name == "narrow")

    return move


class Shard(_Tensor):
    """Base of both kinds of shards, with FSDP2's hooks and the methods by which it moves shards.

    Attributes:
        weight: the weight that the shard belongs to; shards that FSDP2 derives from it share it.
        owner: the sharded parameter.
    """

    weight: ShardedWeight
    owner: DTensor

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: tuple[int, ...],
        module: nn.Module, mp_policy: object,
    ) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:  # fmt: skip
        """Return the bytes to send, uint8 ``[padded rows, K]``, and the scales and amaxes."""
        shard = self if isinstance(self, Shard) else _first_shard(self, mesh, module)
        if isinstance(shard, Float8Tensor) and shard._window is not None:
            detach_window(shard)
        weight = shard.weight
        weight.prepare(shard, mesh)
        row_shard, chunks = weight.row_shard, []
        is_one_segment = isinstance(shard, Float8Tensor) and len(row_shard.segments) == 1
        for rows, blocks in row_shard.segments:
            segment = shard if is_one_segment else shard[rows]
            qdata = cast_rows(segment, weight.factor[blocks], row_shard.spec)
            chunks.append(qdata.view(torch.uint8))
        if row_shard.padding or not chunks:
            size = (row_shard.padding, *row_shard.shape[1:])
            chunks.append(torch.zeros(size, dtype=torch.uint8, device=shard.device))
        sent = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
        return (sent,), (weight.scale, weight.amax)

    # FSDP2 reads the signature at each all-gather; inspecting it takes some 20 us.
    _signature = inspect.signature(fsdp_pre_all_gather)
    fsdp_pre_all_gather.__signature__ = _signature  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[Tensor, Tensor],
        param_dtype: torch.dtype, *, out: Float8Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:  # fmt: skip
        """Make a Float8Tensor from the gathered bytes, or set the scales of its view ``out``.

        Returns:
            The Float8Tensor, and tensors that FSDP2 may free besides its own buffers (none, since
            those hold the data, and the scales are small); None if ``out`` was given.
        """
        scale, amax = metadata
        if scale.is_cuda:
            # The scales were allocated on FSDP2's copy-in stream, and forward's stream reads them.
            for tensor in metadata:
                tensor.record_stream(torch.cuda.current_stream(scale.device))
        if out is not None:
            local = getattr(out, "_local_tensor", out)  # ``out`` is a DTensor under TP
            local.scale, local.amax = scale, amax  # replaced, since autograd may have saved the old
            return None
        row_shard = self.weight.row_shard
        qdata = outputs[0][: row_shard.shape[0]].view(row_shard.spec.fp8_dtype)
        return Float8Tensor._make(qdata, scale, amax, row_shard.spec, param_dtype), ()

    new_zeros, narrow, to, cpu, pin_memory = map(
        _move, ("new_zeros", "narrow", "to", "cpu", "pin_memory")
    )


class MasterShard(Shard, Tensor):
    """A rank's rows of a weight in high precision."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[object, ...]:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)


class StoredShard(Shard, Float8Tensor):
    """A rank's rows of a weight that is stored in FP8."""

    _make = Float8Tensor._make  # the result of an op on a shard is not a shard

    def _extra(self) -> dict[str, object]:
        return {k: v for k, v in super()._extra().items() if k not in ("weight", "owner")}

    def __reduce_ex__(self, protocol: object) -> Any:
        rebuild, state = super().__reduce_ex__(protocol)
        return rebuild, state[:-1]  # omit the class, so that a Float8Tensor is rebuilt


def _become_shard(
    local: Tensor, owner: DTensor, weight: ShardedWeight, *, registered: bool = True
) -> Shard:
    """Make a tensor a shard of ``weight``; if registered with FSDP2, it is the current shard."""
    local.__class__ = StoredShard if isinstance(local, Float8Tensor) else MasterShard
    shard = cast(Shard, local)
    shard.weight, shard.owner = weight, owner
    if registered:
        # The reference is to the shard: one to the parameter would break torch.utils.swap_tensors.
        weight.shard = weakref.ref(shard)
    return shard


def detach_window(x: Float8Tensor) -> None:
    """Copy a view's scales; its base is FSDP2's padded copy of the weight, which nothing reads."""
    x._refresh()
    x.scale, x.amax = x.scale.clone(), x.amax.clone()
    x._window = None


def _first_shard(local: Float8Tensor, mesh: DeviceMesh, module: nn.Module) -> Shard:
    """Make a Float8Tensor a shard at its first all-gather, in a module that is not ``Shardable``.

    With CPU offload, ``local`` is a copy of a parameter's local tensor. FSDP2 processes parameters
    in order, so the owner is the first parameter that is not a shard yet.
    """
    parameters = [p for p in module._parameters.values() if is_dtensor(p)]
    sharded = [p for p in parameters if type(local_of(p)) is type(local)]
    owner = next((p for p in sharded if local_of(p) is local), sharded[0])
    *outer, cut_by = owner.placements
    if _may_be_fsdp_alone(outer) and cut_by.is_shard() and not cut_by.is_shard(0):
        raise NotImplementedError(
            f"shard_placement_fn must shard FP8 weights along dim 0; got {cut_by}. Leave it out."
        )
    weight = ShardedWeight(RowShard.of(local.spec, owner.shape, mesh))
    return _become_shard(local_of(owner), owner, weight).to(local.device, non_blocking=True)


Float8Tensor.fsdp_pre_all_gather = Shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
Float8Tensor.fsdp_post_all_gather = Shard.fsdp_post_all_gather  # type: ignore[attr-defined]


class Shardable(nn.Module):
    """A module whose weights FSDP2 gathers in FP8 if they are stored in FP8 or cast to it."""

    _placement: Any = None  # the WeightPlacement of a weight that tensor parallelism has sharded

    def _weight_cast(self, name: str) -> WeightCast | None:
        """Return the cast for gathering a high-precision parameter in FP8; None: do not cast."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        parameters = self.__dict__.get("_parameters", {})
        old = parameters.get(name)
        parameter = old is not None and isinstance(value, nn.Parameter)
        tp_dims = 0 if self._placement is None else self._placement.ndim
        # This is ``is_dtensor`` inlined: FSDP2 calls this twice for each forward of a layer. Both
        # are False for a parameter that only tensor parallelism has sharded.
        sharded = parameter and hasattr(value, "_local_tensor") and value.device_mesh.ndim > tp_dims
        gathers = parameter and hasattr(old, "_local_tensor") and old.device_mesh.ndim > tp_dims
        if not (sharded or gathers):
            super().__setattr__(name, value)
            return
        if sharded and "weight" in name and not isinstance(value._local_tensor, Shard):
            self._make_shard(name, value, old, tp_dims)
        # FSDP2 swaps sharded and gathered parameters before and after every forward. Like FSDP2,
        # this bypasses torch's method, which does much more.
        parameters[name] = value

    def _make_shard(self, name: str, parameter: DTensor, old: Tensor, tp_dims: int) -> None:
        """Make the local tensor of a parameter that replaces ``old`` a shard.

        ``tp_dims``: the number of mesh dimensions of tensor parallelism.
        """
        local, old_local = local_of(parameter), local_of(old)
        *outer, cut_by = parameter.placements[: parameter.device_mesh.ndim - tp_dims]
        may_be = parameter.ndim in (2, 3) or isinstance(old_local, Shard)
        if not may_be or getattr(cut_by, "dim", None) != 0:
            return
        if isinstance(old_local, Shard):
            _stay_shard(parameter, old_local.weight)
        elif isinstance(local, Float8Tensor) and isinstance(old_local, Float8Tensor):
            row_shard = self._row_shard(old_local.spec, parameter, old_local.shape, tp_dims)
            if row_shard is not None:
                _take_rows(local, old_local, row_shard)
                _become_shard(local, parameter, ShardedWeight(row_shard))
        elif type(local) is Tensor and _may_be_fsdp_alone(outer):
            cast = self._weight_cast(name)
            row_shard = cast and self._row_shard(cast.spec, parameter, old_local.shape, tp_dims)
            if row_shard is not None:
                _become_shard(local, parameter, ShardedWeight(row_shard, cast))

    def _row_shard(
        self, spec: Float8Spec, parameter: DTensor, shape: Sequence[int], tp_dims: int
    ) -> RowShard | None:
        """Return the row shard of a parameter ``shape`` on a rank; None: FP8 cannot be gathered."""
        placed = self._placement
        shares, group = (True, None) if placed is None else placed.shares_blocks(spec)
        return RowShard.of(spec, shape, shard_mesh(parameter, tp_dims), group) if shares else None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with _keep_shards(self):
            super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with _keep_shards(self):
            return super()._apply(fn, recurse)


@contextmanager
def _keep_shards(module: nn.Module) -> Iterator[None]:
    """Keep local tensors shards while a module's sharded parameters may get new local tensors."""
    shards = {n: local_of(p) for n, p in module._parameters.items() if p is not None}
    weights = {name: shard.weight for name, shard in shards.items() if isinstance(shard, Shard)}
    try:
        yield
    finally:
        for name, weight in weights.items():
            _stay_shard(module._parameters[name], weight)


def _stay_shard(parameter: Tensor | None, weight: ShardedWeight) -> None:
    """Make a parameter's new local tensor a shard of the same weight."""
    if not is_dtensor(parameter) or isinstance(local := local_of(parameter), Shard):
        return
    if isinstance(local, Float8Tensor) != (weight.rule is None):
        return
    weight.version = -1  # differs from all versions, since the values may have changed
    _become_shard(local, parameter, weight)


def _take_rows(local: Float8Tensor, unsharded: Float8Tensor, row_shard: RowShard) -> None:
    """Copy the exact data, scales and initial values of a shard's rows from the unsharded weight.

    FSDP2 has copied the data into a tensor with the weight's blocks, which requantized it if the
    shard's edge cuts a block. Such a shard gets smaller blocks.
    """
    start, size = row_shard.rows.start, unsharded.spec.block[0]
    rows = slice(start, start + row_shard.rows.length)
    initial = unsharded.get_high_precision_init_val()
    if size > 1:
        size = math.gcd(row_shard.rows.chunk, size)
        unsharded = cut(unsharded.data, (size, unsharded.spec.block[1]))
    blocks = row_shard._replace(spec=unsharded.spec).block_rows(size, local.device)
    with torch.no_grad():
        local.qdata.copy_(unsharded.qdata[rows])
        local.scale, local.amax = unsharded.scale[blocks].clone(), unsharded.amax[blocks].clone()
    local.spec, local._window = unsharded.spec, None
    if initial is not None:
        local._high_precision_init_val = initial[rows].clone()


def _may_be_fsdp_alone(outer: Sequence[Placement]) -> bool:
    """Whether FSDP2 alone may have made placements that begin with ``outer`` and end sharded."""
    return len(outer) <= 1 and all(p.is_replicate() for p in outer)


def sharded_by_fsdp(modules: Collection[nn.Module]) -> set[nn.Module]:
    """Return the modules whose parameters FSDP2 shards, and gathers before they run.

    FSDP2 gives a module passed to ``fully_shard`` another class, which has ``unshard``, and sets an
    attribute on every module whose parameters it manages.
    """
    roots = [module for module in modules if hasattr(module, "unshard")]
    managed = (m for m in modules if getattr(m, "_is_fsdp_managed_module", False))
    return {*managed, *(below for module in roots for below in module.modules())}


def is_tensor_parallel(parameter: Tensor | None, *, sharded: bool) -> bool:
    """Whether a parameter is a DTensor when its module runs.

    Args:
        sharded: whether FSDP2 shards the module's parameters; these are DTensors only between
            runs, unless they are sharded in another way as well.
    """
    placements = getattr(parameter, "placements", ())
    return bool(placements) and not (sharded and _may_be_fsdp_alone(placements[:-1]))


def is_column_or_row_shard(placements: Sequence[Placement]) -> bool:
    """Whether a weight with these placements is a shard of columns or rows, or replicated."""
    cuts = [placement for placement in placements if not placement.is_replicate()]
    return not cuts or (len(cuts) == 1 and (cuts[0].is_shard(0) or cuts[0].is_shard(1)))


def is_sharded_plain(parameter: Tensor | None) -> bool:
    """Whether FSDP2 has sharded a parameter without hooks, for which it looks only once."""
    return is_dtensor(parameter) and type(local_of(parameter)) is Tensor


def reshard(modules: Iterable[nn.Module]) -> None:
    """Make the modules that FSDP2 shards hold their sharded parameters, not the gathered ones."""
    for module in modules:
        if hasattr(module, "unshard") and hasattr(module, "reshard"):
            module.reshard()  # type: ignore[operator]
