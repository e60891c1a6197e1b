"""The local tensors of weights that FSDP2 gathers in FP8: it asks them what to send.

Every operation on a shard, save the few by which FSDP2 moves it, gives tensors of the class that
the shard had before: plain ones of a weight in high precision. So optimizers run at full speed, and
checkpoints hold tensors that torch alone can load.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
from torch import Tensor

from float8lab.distributed.fsdp.layout import Layout, local_of, shard_mesh
from float8lab.distributed.fsdp.weight import ShardedWeight, cast_stored
from float8lab.ops import cast_op
from float8lab.tensor import Float8Tensor

__all__ = ["MasterShard", "Shard", "StoredShard", "become_shard", "layout_of", "settle"]


class Shard:
    """What both kinds of shards do for FSDP2.

    Attributes:
        weight: the weight that the shard is a part of; shards that FSDP2 makes of it share it.
        owner: the sharded parameter.
    """

    weight: ShardedWeight
    owner: Any

    def fsdp_pre_all_gather(
        self,
        mesh: Any,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: torch.nn.Module,
        mp_policy: Any,
    ) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
        """Return the bytes that this rank sends, uint8 ``[padded rows, K]``; scales and amaxes."""
        shard: Any = self
        stored = isinstance(shard, Float8Tensor)
        if stored and shard._window is not None:
            settle(shard)
        weight = self.weight
        weight.prepare(shard, mesh)
        layout = weight.layout
        spec, parts = layout.spec, []
        for rows, blocks in layout.runs:
            factor = weight.factor[blocks]
            if stored:
                part = cast_stored(shard if len(layout.runs) == 1 else shard[rows], factor, spec)
            else:
                part = cast_op(shard[rows], factor, None, spec.fp8_dtype, spec.block, 1)
            parts.append(part.view(torch.uint8))
        if layout.padding or not parts:
            size = (layout.padding, layout.shape[1])
            parts.append(torch.zeros(size, dtype=torch.uint8, device=shard.device))
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        return (sent,), (weight.scale, weight.amax)

    # FSDP2 asks for it before each all-gather; finding it takes longer than all that is done here.
    fsdp_pre_all_gather.__signature__ = inspect.signature(fsdp_pre_all_gather)  # type: ignore[attr-defined]

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Tensor, Tensor],
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make a Float8Tensor of the gathered bytes, or renew the scales of ``out``, which views them.

        Returns:
            The Float8Tensor and the tensors that FSDP2 may free besides its own buffers (none:
            those hold the data, and the scales are small); None if ``out`` was given.
        """
        scale, amax = metadata
        if scale.is_cuda:
            # Allocated on FSDP2's copy-in stream, read here on the stream of the forward.
            stream = torch.cuda.current_stream(scale.device)
            scale.record_stream(stream)
            amax.record_stream(stream)
        if out is not None:
            # New tensors: autograd may have saved those of the forward.
            out.scale, out.amax = scale, amax
            return None
        layout = self.weight.layout
        qdata = all_gather_outputs[0][: layout.shape[0]].view(layout.spec.fp8_dtype)
        return Float8Tensor(qdata, scale, amax, layout.spec, param_dtype), ()

    # FSDP2 uses these methods to pad a shard anew, to move it to the device and to pin it.

    def new_zeros(self, *args: Any, **kwargs: Any) -> Any:
        return self._moved(super().new_zeros(*args, **kwargs))  # type: ignore[misc]

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return self._moved(super().to(*args, **kwargs))  # type: ignore[misc]

    def cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self._moved(super().cpu(*args, **kwargs))  # type: ignore[misc]

    def pin_memory(self, *args: Any, **kwargs: Any) -> Any:
        return self._moved(super().pin_memory(*args, **kwargs))  # type: ignore[misc]

    def narrow(self, *args: Any, **kwargs: Any) -> Any:
        # The last thing FSDP2 does to a shard that it has made anew; the others give copies, too.
        shard = self._moved(super().narrow(*args, **kwargs))  # type: ignore[misc]
        self.weight.shard = weakref.ref(shard)
        return shard

    def _moved(self, moved: Any) -> Any:
        moved.__class__ = type(self)
        moved.weight, moved.owner = self.weight, self.owner
        return moved


class MasterShard(Shard, Tensor):  # type: ignore[misc]  # the moves return Any
    """A rank's rows of a weight in high precision."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).__deepcopy__(memo)


class StoredShard(Shard, Float8Tensor):  # type: ignore[misc]
    """A rank's rows of a weight that is stored in FP8."""

    @classmethod
    def _make(cls, *args: Any, **kwargs: Any) -> Float8Tensor:
        return Float8Tensor._make(*args, **kwargs)

    def _extra(self) -> dict[str, Any]:
        return {k: v for k, v in super()._extra().items() if k not in ("weight", "owner")}

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, state = super().__reduce_ex__(protocol)
        return rebuild, state[:-1]  # a Float8Tensor


def become_shard(local: Any, owner: Any, weight: ShardedWeight) -> None:
    """Make the local tensor of the sharded parameter ``owner`` a shard of ``weight``."""
    local.__class__ = StoredShard if isinstance(local, Float8Tensor) else MasterShard
    local.weight, local.owner = weight, owner
    # Weak, as is none of the parameter itself: that would forbid torch.utils.swap_tensors on it.
    weight.shard = weakref.ref(local)


def layout_of(parameter: Any) -> Layout:
    """The layout of a sharded parameter that is stored in FP8."""
    local = parameter._local_tensor
    if isinstance(local, Shard):
        return local.weight.layout
    return Layout.of(local.spec, parameter.shape, shard_mesh(parameter))


def settle(x: Float8Tensor) -> None:
    """Give a view scales of its own; its base is FSDP2's padded copy, which nobody reads."""
    x._refresh()
    x.scale, x.amax = x.scale.clone(), x.amax.clone()
    x._window = None


def _pre_all_gather(
    self: Float8Tensor,
    mesh: Any,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: torch.nn.Module,
    mp_policy: Any,
) -> tuple[tuple[Tensor], tuple[Tensor, Tensor]]:
    """Make a shard at the first all-gather, in a module that has not done so when it was sharded."""
    same = [
        p
        for p in module._parameters.values()
        if type(local_of(p)) is type(self) and p is not local_of(p) and p.shape == outer_size
    ]
    # FSDP2 may have moved the local tensor; of those that it asks in turn, the first is no shard.
    owner = next((p for p in same if local_of(p) is self), same[0])
    shard = local_of(owner)
    become_shard(shard, owner, ShardedWeight(Layout.of(self.spec, outer_size, mesh)))
    here = shard.to(self.device, non_blocking=True)
    return here.fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


Float8Tensor.fsdp_pre_all_gather = _pre_all_gather  # type: ignore[attr-defined]
Float8Tensor.fsdp_post_all_gather = Shard.fsdp_post_all_gather  # type: ignore[attr-defined]
