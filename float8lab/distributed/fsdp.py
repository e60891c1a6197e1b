"""High-precision weights that FSDP2 gathers in FP8.

FSDP2 looks for its all-gather hooks on the local tensor of the sharded parameter, a plain tensor
that it makes itself. It registers that parameter with its module by ``setattr`` if the module's
class defines ``__setattr__``, before it looks; our modules do, and ``hook_shard`` then puts a
``MasterShard`` in the place of the local tensor. The unsharded model therefore has only ordinary
parameters. The sharded model is ordinary, too: every operation on a ``MasterShard``, save the few
by which FSDP2 moves it, gives plain tensors, so optimizers run at full speed and checkpoints hold
tensors that torch alone can load. If the hooks were lost all the same, the weight would be gathered
in high precision and the module would cast it itself. That is also what happens if ``fully_shard``
was called before the conversion, since FSDP2 looks for hooks once, when it shards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from float8lab.ops import cast_many_op
from float8lab.tensor import Float8Tensor
from float8lab.tensor.fsdp import (
    Gathered,
    MasterGather,
    Place,
    reduce_blocks,
    settle,
    unsharded_weight,
)
from float8lab.tensor.views import cut

__all__ = [
    "MasterShard",
    "hook_shard",
    "is_sharded_plain",
    "is_tensor_parallel",
    "requantize_shards_",
    "reshard",
    "sharded_by_fsdp",
    "store_shard",
]


class MasterShard(Tensor):
    """A rank's rows of a high-precision weight, as FSDP2's local tensor: plain but for its hooks.

    Attributes:
        how: how the weight is gathered.
        owner: the sharded parameter.
    """

    how: MasterGather
    owner: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _moved(self, moved: Tensor) -> Tensor:
        shard: MasterShard = torch.Tensor._make_subclass(MasterShard, moved)
        shard.how, shard.owner = self.how, self.owner
        return shard

    # FSDP2 uses these methods to pad a shard anew, to move it to the device and to pin it.

    def new_zeros(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._moved(super().new_zeros(*args, **kwargs))

    def narrow(self, *args: Any, **kwargs: Any) -> Tensor:
        # The last thing FSDP2 does to a shard that it has made anew; the others give copies, too.
        shard = self._moved(super().narrow(*args, **kwargs))
        self.how.shard = weakref.ref(shard)
        return shard

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._moved(super().to(*args, **kwargs))

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._moved(super().cpu(*args, **kwargs))

    def pin_memory(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._moved(super().pin_memory(*args, **kwargs))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], Gathered]:
        """Return the tensor that FSDP2 sends, and metadata for the post-all-gather hook."""
        data, gathered = self.how.gather(self.as_subclass(Tensor), mesh, outer_size)
        return (data,), gathered

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Gathered,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the gathered weight that the module computes with."""
        return unsharded_weight(all_gather_outputs, metadata, param_dtype, out)


def hook_shard(parameter: Any, make: Callable[[], MasterGather | None]) -> bool:
    """Have FSDP2 gather a sharded parameter in FP8, if that is possible.

    Args:
        parameter: a parameter that a module is given; left alone unless it is a DTensor cut into
            rows by FSDP2 (or into rows and copied, by hybrid sharding), in high precision.
        make: returns how to gather it, or None to leave it as it is.

    Returns:
        Whether the parameter is gathered in FP8.
    """
    # These are attributes of a DTensor; importing its class would double our own import time.
    local, placements = (
        getattr(parameter, "_local_tensor", None),
        getattr(parameter, "placements", ()),
    )
    if isinstance(local, MasterShard):
        return True
    if type(local) is not Tensor or parameter.ndim != 2 or not placements:
        return False
    if not placements[-1].is_shard(0) or not _may_be_fsdp_alone(placements):
        return False
    how = make()
    if how is None:
        return False
    shard: MasterShard = torch.Tensor._make_subclass(MasterShard, local)
    shard.how, shard.owner = how, parameter
    how.shard = weakref.ref(shard)
    parameter._local_tensor = shard
    return True


def _may_be_fsdp_alone(placements: Sequence[Any]) -> bool:
    """Whether FSDP2 alone can have made these placements, with or without hybrid sharding."""
    *copied, _ = placements
    return len(copied) <= 1 and all(p.is_replicate() for p in copied)


def sharded_by_fsdp(model: torch.nn.Module) -> set[torch.nn.Module]:
    """The modules below ``model`` whose parameters FSDP2 shards, and gathers before they run.

    FSDP2 gives a module passed to ``fully_shard`` another class, which has ``unshard``, and sets an
    attribute on every module whose parameters it manages.
    """
    given = [module for module in model.modules() if hasattr(module, "unshard")]
    managed = (m for m in model.modules() if getattr(m, "_is_fsdp_managed_module", False))
    return {*managed, *(below for module in given for below in module.modules())}


def is_tensor_parallel(parameter: Any, *, sharded: bool) -> bool:
    """Whether a parameter is a DTensor when its module runs.

    Args:
        parameter: a parameter or None.
        sharded: whether FSDP2 shards the module's parameters, which are DTensors only between runs,
            unless they are cut in another way as well.
    """
    placements = getattr(parameter, "placements", ())
    return bool(placements) and not (sharded and _may_be_fsdp_alone(placements))


def is_sharded_plain(parameter: Any) -> bool:
    """Whether FSDP2 has sharded a parameter and found no hooks; it does not look again."""
    return type(getattr(parameter, "_local_tensor", None)) is Tensor


def reshard(model: torch.nn.Module) -> None:
    """Have the modules that FSDP2 shards hold their sharded parameters, not the gathered ones."""
    for module in model.modules():
        # By name, since importing the class would double the time that importing us takes.
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]


def store_shard(module: torch.nn.Module, name: str, parameter: Any) -> None:
    """Make FSDP2's shard of a parameter that is stored in FP8 exactly a part of the parameter.

    FSDP2 pads a shard by copying it into a tensor of the parameter's blocks; that would quantize
    it again where the shard's edge cuts a block. Such a shard gets smaller blocks, with the scales
    that their elements had. Initial values that the parameter kept are cut in the same way.

    Args:
        module: the module, which still has the whole parameter under ``name``.
        name: the parameter's name in the module.
        parameter: the sharded parameter that takes its place.
    """
    local, whole = getattr(parameter, "_local_tensor", None), module._parameters.get(name)
    if not isinstance(local, Float8Tensor) or local.qdata.is_meta:
        return
    if getattr(parameter, "_is_exact", False):
        # Registered again, as after every forward. FSDP2's streams may be reading it by now.
        return
    if not isinstance(whole, Float8Tensor) or whole.ndim != 2:
        if local._window is not None:
            settle(local)
        return
    *_, cut_by = parameter.placements
    if not cut_by.is_shard(0):
        return
    mesh = parameter.device_mesh
    rank, size = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
    chunk = -(-whole.shape[0] // size)
    block = whole.spec.block[0]
    kept = whole.get_high_precision_init_val()
    vars(module).setdefault("_stored_specs", {})[tuple(whole.shape)] = whole.spec
    if block > 1 and chunk % block:
        block = math.gcd(chunk, block)
        whole = cut(whole.detach(), (block, whole.spec.block[1]))
    first, count = rank * chunk, local.shape[0]
    with torch.no_grad():
        local.qdata.copy_(whole.qdata[first : first + count])
        rows = slice(None) if block == -1 else slice(first // block, -(-(first + count) // block))
        local.scale, local.amax = whole.scale[rows].clone(), whole.amax[rows].clone()
    local.spec, local._window = whole.spec, None
    parameter._is_exact = True
    if kept is not None:
        local._high_precision_init_val = kept[first : first + count].clone()


class _Rewrite(MasterGather):
    """A value that a shard which is stored in FP8 shall hold."""

    def __init__(self, parameter: Any, value: Tensor) -> None:
        local = parameter._local_tensor
        how = getattr(local, "_gather", None)
        super().__init__(local.spec if how is None else how.spec)
        self.local: Float8Tensor = local
        self.value = value
        mesh = parameter.device_mesh
        self.mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
        self.place = Place.of(self.mesh, parameter.shape)

    def current_shard(self) -> Tensor:
        return self.value

    def current_version(self) -> Any:
        return None

    def block_rows(self) -> slice | Tensor:
        """The block row of the weight in which each of the shard's begins."""
        assert self.place is not None, "set above"
        scale, size, start = self.local.scale, self.local.spec.block[0], self.place.start
        whole = self.spec.block[0]
        if size == -1:
            return slice(0, 1)
        if size == whole and start % size == 0:
            return slice(start // size, start // size + scale.shape[0])
        return (torch.arange(scale.shape[0], device=scale.device) * size + start) // whole


def requantize_shards_(parameters: Sequence[Any], values: Sequence[Tensor]) -> None:
    """Overwrite sharded parameters stored in FP8 as one process would overwrite the whole ones.

    Blocks that several ranks hold parts of, such as the one block of a weight scaled as a whole,
    get the scale of the whole block: a collective, one all-reduce for each mesh.

    Args:
        parameters: DTensors of Float8Tensors, matrices sharded by rows as FSDP2 does; the same
            ones, in the same order, on all ranks.
        values: high-precision tensors, one for each parameter, of its local shape.
    """
    meshes: dict[Any, list[_Rewrite]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        rewrite = _Rewrite(parameter, value)
        meshes.setdefault(rewrite.mesh, []).append(rewrite)
    with torch.no_grad():
        for mesh, rewrites in meshes.items():
            reduce_blocks(list(rewrites), rewrites[0].value.device, mesh)
            _write(rewrites)


def _write(rewrites: Sequence[_Rewrite]) -> None:
    """Cast by the scales of the whole weights, one op for each kind of shard, and write them."""
    encodes: list[Tensor] = []
    factors: list[Tensor] = []
    written: list[Tensor] = []
    groups: dict[Any, list[tuple[Tensor, Tensor, Tensor]]] = {}
    for rewrite in rewrites:
        assert rewrite.scale is not None, "reduced before"
        assert rewrite.factor is not None, "reduced before"
        assert rewrite.amax is not None, "reduced before"
        local, value, rows = rewrite.local, rewrite.value, rewrite.block_rows()
        encodes.append(rewrite.factor[rows])
        factors += [rewrite.scale[rows], rewrite.amax[rows]]
        written += [local.scale, local.amax]
        kind = (value.dtype, local.qdata.dtype, local.spec.block)
        groups.setdefault(kind, []).append((value, local.scale, local.qdata))
    # The encode factors go where the scales will be, since the op keeps its table of addresses for
    # memory that stays.
    torch._foreach_copy_(written[::2], encodes)
    for (*_, block), group in groups.items():
        values, scales, data = (list(tensors) for tensors in zip(*group, strict=True))
        # Each block of the shard lies in one block of the weight, and has its factor by now.
        cast_many_op(values, data, block, "encode", 0.0, [], [], scales)
        torch.autograd.graph.increment_version(data)
    torch._foreach_copy_(written, factors)
