"""Checkpoints of models whose weights are stored in FP8, sharded or not, in plain tensors.

A ``ModelState`` is ``Stateful``, so ``torch.distributed.checkpoint`` saves and loads it on any
number of ranks, bit for bit, and so does ``torch.save`` on one. Its content can be loaded without
this library: a weight stored in FP8 is saved as its bytes, its scales and its amaxes, and
everything else as in the model's ``state_dict``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from float8lab.arguments import check_module
from float8lab.tensor import Float8Tensor
from float8lab.tensor.fsdp import Place, StoredGather, settle

__all__ = ["ModelState"]

_PARTS = ("qdata", "scale", "amax")


class ModelState:
    """The parameters and buffers of a model as plain tensors.

    A weight ``w`` stored in FP8 becomes ``w.qdata`` (uint8, the model's shape, sharded as the
    weight is), ``w.scale`` and ``w.amax`` (float32, one number for each block of the whole weight,
    the same on all ranks). Both methods are collectives if the model is sharded.

    Args:
        model: any module.

    >>> with float8lab.fp8_model_init():
    ...     layer = float8lab.Linear(16, 16, bias=False, device="cpu")
    >>> sorted(float8lab.distributed.ModelState(layer).state_dict())
    ['weight.amax', 'weight.qdata', 'weight.scale']
    """

    def __init__(self, model: nn.Module) -> None:
        check_module("model", model)
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        """Return the model's state as plain tensors, which share its memory where they can."""
        state: dict[str, Any] = {}
        for name, value in self.model.state_dict().items():
            local = _stored(value)
            if local is None:
                state[name] = value
                continue
            stored = _Stored(self.model, name, value, local)
            parts = stored.whole_scales()
            state[f"{name}.qdata"] = stored.bytes_under(parts[0])
            state[f"{name}.scale"], state[f"{name}.amax"] = parts
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state by ``state_dict``, saved on this or another number of ranks."""
        plain = dict(state)
        for name, value in self.model.state_dict().items():
            local = _stored(value)
            if local is None:
                continue
            qdata, scale, amax = (plain.pop(f"{name}.{part}") for part in _PARTS)
            _Stored(self.model, name, value, local).load(qdata, scale, amax)
            plain[name] = value
        self.model.load_state_dict(plain)


def _stored(value: Any) -> Float8Tensor | None:
    """The FP8 data of a parameter on this rank, if it is stored in FP8."""
    local = getattr(value, "_local_tensor", value)
    return local if isinstance(local, Float8Tensor) else None


class _Stored:
    """One weight that is stored in FP8, whole or as a shard."""

    def __init__(self, model: nn.Module, name: str, value: Any, local: Float8Tensor) -> None:
        if local._window is not None:
            settle(local)
        self.value, self.local = value, local
        self.mesh: Any = None
        shape = tuple(value.shape)
        owner = model.get_submodule(name.rpartition(".")[0])
        spec = getattr(owner, "_stored_specs", {}).get(shape, local.spec)
        self.how = StoredGather(spec)
        if value is not local:
            mesh = value.device_mesh
            self.mesh = mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]
            self.how.place = Place.of(self.mesh, value.shape)

    def whole_scales(self) -> tuple[Tensor, Tensor]:
        """Scales and amaxes of the blocks of the whole weight."""
        local, how = self.local, self.how
        if self.mesh is None:
            return local.scale, local.amax
        shape = how.spec.scale_shape(tuple(self.value.shape))
        whole = torch.zeros((2, *shape), dtype=torch.float32, device=local.device)
        for rows, blocks in how.segments(local.shape[0]):
            part: Any = local[rows]  # a Float8Tensor too
            whole[0, blocks] = how.shard_amax(part, how.spec.block)
            whole[1, blocks] = how.shard_amax(part.replace(scale=part.amax), how.spec.block)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=self.mesh.get_group())
        return whole[0], whole[1]

    def bytes_under(self, scale: Tensor) -> Any:
        """The FP8 data for these scales, as uint8; a shard is cast to them."""
        local = self.local
        if self.mesh is None:
            return local.qdata.view(torch.uint8)
        parts = [
            self.how.cast(local[rows], scale[blocks]).view(torch.uint8)
            for rows, blocks in self.how.segments(local.shape[0])
        ]
        qdata = torch.cat(parts) if parts else local.qdata.view(torch.uint8)
        return type(self.value).from_local(
            qdata,
            self.value.device_mesh,
            self.value.placements,
            run_check=False,
            shape=self.value.shape,
            stride=self.value.stride(),
        )

    def load(self, qdata: Any, scale: Tensor, amax: Tensor) -> None:
        """Take over bytes, scales and amaxes."""
        local = self.local
        with torch.no_grad():
            local.qdata.view(torch.uint8).copy_(getattr(qdata, "_local_tensor", qdata))
            index: Any = slice(None)
            if self.mesh is not None and local.spec.block[0] > 0:
                assert self.how.place is not None, "set for a shard"
                first = torch.arange(local.scale.shape[0]) * local.spec.block[0]
                index = ((first + self.how.place.start) // self.how.spec.block[0]).to(scale.device)
            local.scale.copy_(scale[index])
            local.amax.copy_(amax[index])
