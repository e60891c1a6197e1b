"""Checkpoints of models whose weights are stored in FP8, sharded or not, as plain tensors.

A ``ModelState`` is ``Stateful``: ``torch.distributed.checkpoint`` saves and loads it on any number
of ranks, bit for bit, and ``torch.save`` does so on one rank. Its content can be loaded without
this library: a weight stored in FP8 is saved as its bytes, its scales and its amaxes, and
everything else as in the model's ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from float8lab.arguments import check_instance, check_module, shown
from float8lab.distributed.fsdp.shards import detach_window
from float8lab.distributed.fsdp.weight import cast_rows, reduced_amaxes, row_shard_of, shard_mesh
from float8lab.formats import Float8Spec
from float8lab.tensor import Float8Tensor
from float8lab.tensor.dtensor import is_dtensor, local_of, with_local

__all__ = ["ModelState", "StoredWeight"]

_FIELDS = ("qdata", "scale", "amax")


class ModelState:
    """The parameters and buffers of a model as plain tensors.

    A weight ``w`` stored in FP8 becomes ``w.qdata`` (uint8, with the weight's shape and sharding),
    ``w.scale`` and ``w.amax`` (float32, one number for each block of the unsharded weight, the same
    on all ranks). Both methods are collectives if the model is sharded.

    >>> with float8lab.fp8_model_init():
    ...     layer = float8lab.Linear(16, 16, bias=False, device="cpu")
    >>> sorted(float8lab.distributed.ModelState(layer).state_dict())
    ['weight.amax', 'weight.qdata', 'weight.scale']
    """

    def __init__(self, model: nn.Module) -> None:
        check_module("model", model)
        self.model = model

    def state_dict(self) -> dict[str, object]:
        """Return the model's state as plain tensors, which share its memory if possible."""
        state: dict[str, object] = {}
        for name, value in self.model.state_dict().items():
            if not isinstance(local_of(value), Float8Tensor):
                state[name] = value
                continue
            fields = StoredWeight(self.model, name, value).fields()
            state |= {f"{name}.{field}": x for field, x in zip(_FIELDS, fields, strict=True)}
        return state

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Load a state that ``state_dict`` returned, on this or another number of ranks.

        Raises:
            TypeError: ``state`` is not a state dict.
            ValueError: the state belongs to another model; nothing is loaded.
        """
        check_instance("state", state, Mapping, "a state dict")
        plain = dict(state)
        stored = []
        for name, value in self.model.state_dict().items():
            if isinstance(local_of(value), Float8Tensor):
                saved = [plain.pop(f"{name}.{field}", None) for field in _FIELDS]
                weight = StoredWeight(self.model, name, value)
                stored.append((weight, weight.checked(name, saved)))
                plain[name] = value
        self._check_keys(plain)
        for weight, fields in stored:
            weight.load(*fields)
        self.model.load_state_dict(plain)

    def _check_keys(self, plain: dict[str, object]) -> None:
        """Raise unless all other entries than FP8 weights have the model's names and shapes."""
        present = self.model.state_dict()
        wrong = [name for name in present if name not in plain]
        for name, value in plain.items():
            old = present.get(name)
            if name not in present or (
                isinstance(old, Tensor)
                and (not isinstance(value, Tensor) or value.shape != old.shape)
            ):
                wrong.append(name)
        if wrong:
            raise ValueError(
                "state must be that of this model; got one where "
                f"{', '.join(shown(name) for name in wrong[:3])} is missing, extra or of another "
                "shape. Pass what state_dict() of the same model returned."
            )


class StoredWeight:
    """A weight that is stored in FP8, unsharded or as a shard."""

    def __init__(self, model: nn.Module, name: str, value: Tensor) -> None:
        self.value, self.local = value, cast(Float8Tensor, local_of(value))
        if self.local._window is not None:
            detach_window(self.local)
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = getattr(module, leaf, value)  # a state_dict holds aliases of parameters
        self.placement = getattr(module, "_placement", None)  # of tensor parallelism, or None
        ndim, self.mesh = 0 if self.placement is None else self.placement.ndim, None
        if is_dtensor(value) and value.device_mesh.ndim > ndim:
            self.mesh, self.row_shard = shard_mesh(value, ndim), row_shard_of(parameter)

    @property
    def spec(self) -> Float8Spec:
        """The spec of the unsharded weight."""
        return self.local.spec if self.mesh is None else self.row_shard.spec

    def fields(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sharded bytes, uint8, and the scales and amaxes of the unsharded weight."""
        local = self.local
        scale, amax, qdata = local.scale, local.amax, local.qdata.view(torch.uint8)
        if self.mesh is not None:
            shards = [local, local.replace(scale=local.amax)]
            _, (scale, amax) = reduced_amaxes([self.row_shard] * 2, shards, local.device, self.mesh)
            segments = [  # requantized with the scales of the unsharded weight
                cast_rows(local[rows], scale[blocks], self.row_shard.spec).view(torch.uint8)
                for rows, blocks in self.row_shard.segments
            ]
            qdata = torch.cat(segments) if segments else qdata
        if self.placement is not None:
            scale, amax = (self.placement.unshard(x, local.spec) for x in (scale, amax))
        return with_local(self.value, qdata), scale, amax

    def unsharded(self) -> Float8Tensor:
        """Return the unsharded weight with the bytes that the ranks multiply; a collective."""
        qdata, scale, amax = self.fields()
        qdata = qdata.full_tensor() if is_dtensor(qdata) else qdata
        spec = self.spec
        return Float8Tensor(qdata.view(spec.fp8_dtype), scale, amax, spec, self.value.dtype)

    def checked(self, name: str, saved: Sequence[object]) -> list[Tensor]:
        """Check that a state has the bytes, scales and amaxes of the weight, and return them."""
        scales = self.spec.scale_shape(tuple(self.value.shape))
        shapes = (tuple(self.value.shape), scales, scales)
        fields = []
        for field, value, shape in zip(_FIELDS, saved, shapes, strict=True):
            # Blocks cut by tensor parallelism count once per rank that has a part of them.
            cut = self.placement is not None and field != "qdata"
            if not isinstance(value, Tensor) or (tuple(value.shape) != shape and not cut):
                raise ValueError(
                    f"state must have {name}.{field} of shape {shape}, of a weight that is stored "
                    f"in FP8; got {shown(value)}. Pass what state_dict() of the same model "
                    "returned."
                )
            fields.append(value)
        return fields

    def load(self, qdata: Tensor, scale: Tensor, amax: Tensor) -> None:
        """Copy bytes, scales and amaxes into the weight."""
        local = self.local
        if self.placement is not None:
            scale, amax = (self.placement.shard(x, local.spec) for x in (scale, amax))
        blocks: slice | Tensor = slice(None)
        if self.mesh is not None:
            blocks = self.row_shard.block_rows(local.spec.block[0], scale.device)
        with torch.no_grad():
            local.qdata.view(torch.uint8).copy_(local_of(qdata))
            local.scale.copy_(scale[blocks])
            local.amax.copy_(amax[blocks])
