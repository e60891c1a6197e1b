"""Modules whose weights FSDP2 gathers in FP8, and what can be said about sharded parameters.

FSDP2 looks for its all-gather hooks on the local tensor of the sharded parameter, which it makes
itself. It registers that parameter with its module by ``setattr`` if the module's class defines
``__setattr__``, before it looks; a ``Shardable`` module then makes the local tensor a ``Shard``. The
unsharded model therefore has only ordinary parameters. If the hooks were lost all the same, a
weight in high precision would be gathered so, and the module would cast it itself. That is also
what happens if ``fully_shard`` was called before the conversion, since FSDP2 looks for hooks once,
when it shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from float8lab.distributed.fsdp.layout import Layout, local_of, shard_mesh
from float8lab.distributed.fsdp.shards import Shard, become_shard
from float8lab.distributed.fsdp.weight import ShardedWeight, WeightCast
from float8lab.tensor import Float8Tensor
from float8lab.tensor.views import cut

__all__ = ["Shardable", "is_sharded_plain", "is_tensor_parallel", "reshard", "sharded_by_fsdp"]


class Shardable(nn.Module):
    """A module that has FSDP2 gather its weights in FP8, where they are stored or cast so."""

    def _weight_cast(self, name: str) -> WeightCast | None:
        """How a parameter in high precision is gathered in FP8; None: as it is."""
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        parameters = self.__dict__.get("_parameters")
        old = parameters.get(name) if parameters else None
        if old is None or not isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
            return
        local = getattr(value, "_local_tensor", None)
        if local is None and not hasattr(old, "_local_tensor"):
            super().__setattr__(name, value)
            return
        if local is not None and name.endswith("weight") and not isinstance(local, Shard):
            self._make_shard(name, value, old)
        # FSDP2 exchanges sharded and gathered parameters before and after every forward. Like it,
        # this goes past a method of torch that does much more.
        self._parameters[name] = value

    def _make_shard(self, name: str, parameter: Any, old: Any) -> None:
        """Make the local tensor of a parameter that takes the place of ``old`` a shard.

        FSDP2 pads a shard by copying it into a tensor of the parameter's blocks; for a parameter
        that is stored in FP8, that would quantize it again where the shard's edge cuts a block.
        Such a shard gets smaller blocks, with the scales that their elements had. Initial values
        that the parameter kept are cut in the same way.
        """
        local, before = parameter._local_tensor, local_of(old)
        *_, cut_by = parameter.placements
        if parameter.ndim != 2 or not cut_by.is_shard(0):
            return
        if isinstance(before, Shard):
            _stay_shard(parameter, before.weight)
        elif isinstance(local, Float8Tensor) and isinstance(before, Float8Tensor):
            layout = Layout.of(before.spec, parameter.shape, shard_mesh(parameter))
            _take_rows(local, before, layout)
            become_shard(local, parameter, ShardedWeight(layout))
        elif type(local) is Tensor and _may_be_fsdp_alone(parameter.placements):
            cast = self._weight_cast(name)
            if cast is not None:
                layout = Layout.of(cast.spec, parameter.shape, shard_mesh(parameter))
                become_shard(local, parameter, ShardedWeight(layout, cast))

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with _shards_kept(self):
            super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        with _shards_kept(self):
            return super()._apply(fn, recurse)


@contextmanager
def _shards_kept(module: nn.Module) -> Iterator[None]:
    """Surrounds what may give the sharded parameters of a module other local tensors."""
    shards = {name: local_of(p) for name, p in module._parameters.items()}
    weights = {name: shard.weight for name, shard in shards.items() if isinstance(shard, Shard)}
    try:
        yield
    finally:
        for name, weight in weights.items():
            _stay_shard(module._parameters[name], weight)


def _stay_shard(parameter: Any, weight: ShardedWeight) -> None:
    """Make a new local tensor of a parameter a shard of the same weight."""
    local, stored = local_of(parameter), weight.rule is None
    if local is parameter or isinstance(local, Shard) or isinstance(local, Float8Tensor) != stored:
        return
    weight.version = -1  # unlike any: there may be other values in it
    become_shard(local, parameter, weight)


def _take_rows(local: Float8Tensor, whole: Float8Tensor, layout: Layout) -> None:
    """Give a shard exactly the data and scales that its rows have in the whole weight."""
    first, rows = layout.start, layout.rows
    kept = whole.get_high_precision_init_val()
    size = whole.spec.block[0]
    if size > 1:
        size = math.gcd(rows + layout.padding, size)
        whole = cut(whole.detach(), (size, whole.spec.block[1]))  # type: ignore[arg-type]  # stub
    blocks = layout._replace(spec=whole.spec).block_rows(size, local.device)
    with torch.no_grad():
        local.qdata.copy_(whole.qdata[first : first + rows])
        local.scale, local.amax = whole.scale[blocks].clone(), whole.amax[blocks].clone()
    local.spec, local._window = whole.spec, None
    if kept is not None:
        local._high_precision_init_val = kept[first : first + rows].clone()


def _may_be_fsdp_alone(placements: Sequence[Any]) -> bool:
    """Whether FSDP2 alone can have made these placements, with or without hybrid sharding."""
    *copied, _ = placements
    return len(copied) <= 1 and all(p.is_replicate() for p in copied)


def sharded_by_fsdp(model: nn.Module) -> set[nn.Module]:
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
    return parameter is not local_of(parameter) and type(local_of(parameter)) is Tensor


def reshard(model: nn.Module) -> None:
    """Have the modules that FSDP2 shards hold their sharded parameters, not the gathered ones."""
    for module in model.modules():
        # By name, since importing the class would double the time that importing us takes.
        if any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__):
            module.reshard()  # type: ignore[operator]
