"""Optimizer states that are stored in fewer bits between steps, and bfloat16 parameters.

A *moment* is a floating-point state with the shape of its parameter, such as ``exp_avg``. Between
steps ``exp_avg.bits`` and ``exp_avg.scale`` represent it: bytes, and scales of blocks of 128 values
along the last dimension. A step dequantizes the moments of a *chunk* of parameters at a time. A
byte holds the square root as an integer, and the sign; for a moment of squares, which has no sign,
it holds the fourth root. So the spacing of values grows with their root: 2 % at half the largest.

Rounding is stochastic: a moving average changes by 0.1 % in a step, while a byte resolves 1 to 4 %,
so rounding to nearest would keep it constant. The random bits are a hash of the value, the step's
number and the position in the block, so shards, replicas and resumed runs round alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import accumulate, groupby
from typing import cast

import torch
from torch import Tensor

from float8lab.arguments import shown
from float8lab.ops.declare import called_by_ops
from float8lab.ops.reference import moments as reference
from float8lab.ops.reference.moments import BLOCK, round_stochastically
from float8lab.tensor.dtensor import is_dtensor, local_of, with_local

__all__ = ["MASTER", "ROUNDINGS", "Storage", "check_state", "unnested"]

MASTER = "master"
"""The key of a master in the ``state`` of a state_dict."""
ROUNDINGS = "roundings"
"""The key, in a parameter group, of the number of steps that rounded stochastically."""
QDATA, SCALE = ".bits", ".scale"
"""Suffixes of the names of a quantized moment's uint8 tensors."""
SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum"})
"""Moments of squares in torch's optimizers. Moments with other names are stored with a sign."""
FEWEST, CHUNK = 4096, 2**24
"""The least size of a parameter with FP8 moments, and the size of a chunk if it can be cut."""

quantize_moment_ = called_by_ops(reference.quantize_moment_, cuda="moments:quantize_moment_")
dequantize_moment = called_by_ops(reference.dequantize_moment, cuda="moments:dequantize_moment")

_Moments = dict[str, Tensor]
"""The state of a parameter in an optimizer; only its tensors are considered."""


@dataclass(frozen=True)
class Storage:
    """How moments and bfloat16 parameters are stored between the steps of an optimizer."""

    fp8_moments: bool
    stochastic_rounding: bool

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded stochastically."""
        return self.fp8_moments or self.stochastic_rounding

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer needs a closure, as LBFGS does."""
        closure = signature(optimizer.step).parameters.get("closure")
        if self.rounds and closure is not None and closure.default is closure.empty:
            raise ValueError(
                "optimizer_class must step without a closure if fp8_moments or stochastic_rounding "
                f"is True; got {type(optimizer).__name__}. Leave both out."
            )

    def step(self, optimizer: torch.optim.Optimizer) -> float | None:
        """Run an optimizer's step, on a few parameters at a time if anything is rounded.

        Each chunk sees the options that groups had before the step, since some optimizers count in
        them. If the optimizer raises, the stored moments of the chunk are unchanged.
        """
        if not self.rounds:
            return optimizer.step()
        groups = optimizer.param_groups
        number = 1 + max(int(group.get(ROUNDINGS, 0)) for group in groups)
        saved_groups = [{**group, ROUNDINGS: number} for group in groups]
        try:
            for chunk in _chunks([p for group in saved_groups for p in group["params"]]):
                copies = {p: self._copy(p) for p in chunk}
                for group, options in zip(groups, saved_groups, strict=True):
                    params = [copies[p] for p in options["params"] if p in copies]
                    group.clear()
                    group.update(options, params=params)
                self._step_chunk(optimizer, copies, number)
        finally:
            for group, options in zip(groups, saved_groups, strict=True):
                group["params"] = options["params"]
        return None

    def _step_chunk(
        self, optimizer: torch.optim.Optimizer, copies: Mapping[Tensor, Tensor], number: int
    ) -> None:
        state: dict[Tensor, _Moments] = optimizer.state
        try:
            for p in [p for p in copies if p in state]:
                entry = state[copies[p]] = state.pop(p)
                if copies[p] is not p:  # the constructor of Adagrad makes states in bfloat16
                    tensors = [(name, x) for name, x in entry.items() if torch.is_tensor(x)]
                    entry.update({name: x.float() for name, x in tensors if x.dtype == p.dtype})
                _dequantize_moments(copies[p], entry)
            optimizer.step()
            for p, copy in copies.items():
                if copy in state and self._quantizes(p):
                    _quantize_moments(copy, state[copy], number)
                if copy is not p:
                    p.copy_(with_local(p, round_stochastically(local_of(copy), 16, number)))
        finally:
            for p in [p for p, copy in copies.items() if copy in state]:
                state[p] = state.pop(copies[p])
                for name in _quantized(state[p]):
                    state[p].pop(name, None)

    def _copy(self, p: Tensor) -> Tensor:
        """Return the parameter for the optimizer: a float32 copy if it is to be rounded."""
        if p.grad is None or not self._rounds(p):
            return p
        copy = p.detach().float().requires_grad_()
        copy.grad = p.grad.float()
        return copy

    def _rounds(self, p: Tensor) -> bool:
        return self.stochastic_rounding and p.dtype == torch.bfloat16

    def _quantizes(self, p: Tensor) -> bool:
        """Whether a parameter's moments are quantized; no shard may end inside a block."""
        if not self.fp8_moments or p.ndim < 2 or p.numel() < FEWEST:
            return False
        placements = zip(p.placements, p.device_mesh.shape, strict=True) if is_dtensor(p) else ()
        cuts = [n for shard, n in placements if getattr(shard, "dim", None) == p.ndim - 1]
        return math.prod(cuts) == 1 or p.shape[-1] % (math.prod(cuts) * BLOCK) == 0

    def load(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, object],
        parameters: Mapping[int, Tensor],
    ) -> None:  # fmt: skip
        """Load a state without its masters into an optimizer, for parameters by their indices.

        The optimizer's own method would cast quantized moments, float32 states of bfloat16
        parameters and numbers (NAdam's ``mu_product``). The next step quantizes other moments.
        """
        state = dict(cast("dict[int, _Moments]", state_dict["state"]))
        exact: dict[Tensor, _Moments] = {}
        for index, p in parameters.items():
            entry = {k: x for k, x in state.pop(index, {}).items() if k != MASTER}
            exact[p] = self._states_to_keep(p, entry)
            # Torch gets numbers, too, since some optimizers look for them in a loaded state.
            if entry := {k: x for k, x in entry.items() if k not in exact[p] or not x.ndim}:
                state[index] = entry
        optimizer.load_state_dict({**state_dict, "state": state})
        for p, tensors in exact.items():
            for name, x in tensors.items():
                dtype = torch.float32 if x.is_floating_point() else x.dtype
                optimizer.state[p][name] = x.to(p.device, dtype, copy=True)
            if tensors and not self._quantizes(p):
                _dequantize_moments(p, optimizer.state[p])
                for name in _quantized(tensors):
                    del optimizer.state[p][name + QDATA], optimizer.state[p][name + SCALE]

    def _states_to_keep(self, p: Tensor, entry: _Moments) -> _Moments:
        """Return the tensors of a saved state that must keep their dtype."""
        suffixes = ("",) if self._rounds(p) else (QDATA, SCALE)
        tensors = [(k, x) for k, x in entry.items() if torch.is_tensor(x) and k != "step"]
        return {k: x for k, x in tensors if k.endswith(suffixes) or not x.ndim}


def _chunks(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group parameters into chunks, at least one."""
    ends_at = accumulate(local_of(p).numel() for p in parameters)
    chunks = groupby(zip(ends_at, parameters, strict=True), lambda pair: pair[0] // CHUNK)
    return [[p for _, p in pairs] for _, pairs in chunks] or [[]]


def _quantized(entry: _Moments) -> list[str]:
    """Return the names of the moments that a state holds in quantized form."""
    return [name.removesuffix(QDATA) for name in entry if name.endswith(QDATA)]


def _scale_shape(shape: torch.Size) -> torch.Size:
    """Return the shape of the scales of a moment or of its shard."""
    return torch.Size((*shape[:-1], *(-(-size // BLOCK) for size in shape[-1:])))


def unnested(entry: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of a parameter with both tensors of a quantized moment beside the others.

    Torch nests them in a dict if it unflattens a checkpoint for an optimizer that has, or makes at
    once, a moment without FP8: it does not find the moment's own name in the checkpoint.
    """
    values: dict[str, Tensor] = {}
    for name, value in entry.items():
        nested: dict[str, Tensor] = {}
        if isinstance(value, dict):
            nested = {f"{name}.{key}": tensor for key, tensor in value.items()}
        values |= nested if nested.keys() == {name + QDATA, name + SCALE} else {name: value}
    return values


def check_state(index: int, p: Tensor, entry: _Moments) -> None:
    """Raise unless the master and quantized moments in a parameter's state fit the parameter."""
    shapes = {MASTER: p.shape} if entry.get(MASTER, {}) != {} else {}
    for name in _quantized(entry):
        shapes |= {name + QDATA: p.shape, name + SCALE: _scale_shape(p.shape)}
    for key, shape in shapes.items():
        x, is_free = entry.get(key), key == MASTER
        if not isinstance(x, Tensor) or x.shape != shape or not (is_free or x.dtype == torch.uint8):
            raise ValueError(
                f"state_dict must have {key} of parameter {index} in shape {tuple(shape)}"
                f"{', uint8' * (not is_free)}; got {shown(x)}. Load that of the same model."
            )


def _quantize_moments(p: Tensor, entry: _Moments, step: int) -> None:
    """Add the quantized form of each moment to the state of a parameter."""
    for name, moment in list(entry.items()):
        has_same_shape = torch.is_tensor(moment) and moment.shape == p.shape
        if not has_same_shape or not moment.is_floating_point():
            continue
        values = local_of(moment)
        for end, shape_of in ((QDATA, torch.Size), (SCALE, _scale_shape)):
            if name + end not in entry:
                stored = values.new_empty(shape_of(values.shape), dtype=torch.uint8)
                entry[name + end] = with_local(p, stored, shape_of(p.shape))
        tensors = (values, local_of(entry[name + QDATA]), local_of(entry[name + SCALE]))
        rows = max(1, CHUNK // max(1, values.shape[-1]))
        for x, data, scale in zip(*(t.flatten(0, -2).split(rows) for t in tensors), strict=True):
            quantize_moment_(x.float(), data, scale, step, name in SQUARES)


def _dequantize_moments(p: Tensor, entry: _Moments) -> None:
    """Add the values of quantized moments, in the parameter's dtype, to a parameter's state."""
    for name in _quantized(entry):
        data, scale = local_of(entry[name + QDATA]), local_of(entry[name + SCALE])
        values, like = dequantize_moment(data, scale, name in SQUARES), local_of(p)
        if like.dtype != values.dtype or not like.is_contiguous():
            # Fused optimizers require the memory format of the parameter.
            values = torch.empty_like(like).copy_(values)
        entry[name] = with_local(p, values)
