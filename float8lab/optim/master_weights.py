"""Run any torch optimizer on parameters stored in FP8, with high-precision copies of them.

A *stored* parameter holds its values in fewer bits than an update needs: it is a Float8Tensor or,
on request, in bfloat16 or float16. Its *master* is the high-precision tensor that the *inner*
optimizer, an ordinary one, sees instead. A step passes the gradients of stored parameters to their
masters, runs the inner optimizer's step, and writes the masters back. Parameters that are not
stored are given to the inner optimizer directly, as are frozen ones, which then cost nothing.

A DTensor is stored if its local tensor is: its master is a DTensor with the same placements, and
everything here works shard by shard.

Version counters tell whether a stored parameter has been written to since the last step. If other
code wrote to it, such as ``load_state_dict``, its master is made from it once more, unless the
parameter is still exactly the quantized master.
"""

from __future__ import annotations

import warnings
import weakref
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from float8lab.arguments import check_callables, check_dtype, check_flags, check_instance, shown
from float8lab.distributed.comm import shared_amaxes
from float8lab.distributed.fsdp.weight import requantize_shards_, row_shard_of
from float8lab.formats import HIGH_PRECISION_DTYPES
from float8lab.optim.moments import MASTER, ROUNDINGS, Storage, check_state, unnested
from float8lab.tensor import Float8Tensor
from float8lab.tensor.blocks import quantize_blocks, quantize_blocks_, requantize_blocks
from float8lab.tensor.dtensor import local_of, with_local
from float8lab.tensor.float8_tensor import decoded

__all__ = ["MasterWeights"]

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_State = MutableMapping[str, object]
"""The optimizer state of a parameter."""
_Group = dict[str, Any]
"""A parameter group, with its parameters or their indices under ``"params"``."""


class MasterWeights(torch.optim.Optimizer):
    """An optimizer that keeps high-precision master weights for parameters stored in FP8.

    It is a ``torch.optim.Optimizer``: learning-rate schedulers, ``torch.amp.GradScaler``,
    ``clip_grad_norm_`` and ``state_dict`` work as with ``optimizer_class`` itself, and its
    ``param_groups`` hold the model's own parameters. Without FP8 parameters it acts like
    ``optimizer_class``.

    Numerics: a master starts as the initial value that ``fp8_model_init`` kept, which is freed, or
    as the dequantized parameter. After each step the parameter is the master, quantized with new
    scales in the parameter's own format and granularity.

    Memory: one master for each FP8 parameter that requires a gradient or gets one. During ``step``,
    all gradients with another dtype than ``master_dtype`` are cast.

    Args:
        params: parameters, ``(name, parameter)`` pairs, or dicts with options.
        optimizer_class: called as ``optimizer_class(params, **optimizer_kwargs)``.
        master_dtype: float32, bfloat16 or float16.
        also_16_bit: give bfloat16 and float16 parameters masters, too.
        fp8_moments: store states with the shape of a large matrix in FP8 between steps.
        stochastic_rounding: update bfloat16 masters, and bfloat16 parameters without a master, in
            float32 and round them stochastically.

    Attributes:
        inner: the optimizer that updates the masters.
        masters: the master of each parameter that has one.

    Raises:
        TypeError: ``optimizer_class`` does not make a torch optimizer, or a bad ``master_dtype``.
        ValueError: the optimizer needs a closure, but rounding was requested.

    >>> with float8lab.fp8_model_init(preserve_high_precision_init_val=True):
    ...     model = float8lab.Linear(64, 32, device="cpu")
    >>> optimizer = float8lab.optim.MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    >>> model(torch.ones(2, 64)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.masters[model.weight].dtype, type(model.weight).__name__
    (torch.float32, 'Float8Tensor')
    """

    inner: torch.optim.Optimizer | None = None  # until __init__ has made it from the groups
    masters: dict[Tensor, Tensor]
    _has_stepped = False

    def __init__(
        self,
        params: Iterable[object],
        optimizer_class: Callable[..., torch.optim.Optimizer],
        *,
        master_dtype: torch.dtype = torch.float32,
        also_16_bit: bool = False,
        fp8_moments: bool = False,
        stochastic_rounding: bool = False,
        **optimizer_kwargs: object,
    ) -> None:
        check_instance(
            "optimizer_class", optimizer_class, Callable, "a class such as torch.optim.AdamW"
        )
        check_flags(also_16_bit=also_16_bit, fp8_moments=fp8_moments)
        check_flags(stochastic_rounding=stochastic_rounding)
        dtypes = HIGH_PRECISION_DTYPES[: 2 if stochastic_rounding else 3]
        check_dtype("master_dtype", master_dtype, dtypes, optional=False)
        self.masters = {}
        self._storage = Storage(bool(fp8_moments), bool(stochastic_rounding))
        self._master_dtype, self._also_16_bit = master_dtype, also_16_bit
        self._make_inner = partial(optimizer_class, **optimizer_kwargs)
        self._written: dict[Tensor, _Written] = {}
        defaults = {ROUNDINGS: 0} if self._storage.rounds else {}
        super().__init__(params, defaults)  # type: ignore[arg-type]  # it checks their types
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            self._make_master(p)
        groups = [
            {**group, "params": [self.masters.get(p, p) for p in group["params"]]}
            for group in self.param_groups
        ]
        self.inner = self._make_inner(groups)
        if not isinstance(self.inner, torch.optim.Optimizer):
            raise TypeError(
                "optimizer_class must make a torch.optim.Optimizer; got "
                f"{type(self.inner).__name__}. Derive it from that class."
            )
        self._storage.check(self.inner)
        self.defaults = {**defaults, **self.inner.defaults}
        _copy_options(self.inner.param_groups, self.param_groups)

    def add_param_group(self, param_group: _Group) -> None:
        """Add parameters with separate options, as ``torch.optim.Optimizer`` does.

        Raises:
            TypeError: ``param_group`` is not a dict, or its ``"params"`` are not tensors.
        """
        check_instance("param_group", param_group, dict, "a dict")
        params = param_group.get("params")
        if not isinstance(params, Iterable) or isinstance(params, (str, bytes)):
            raise TypeError(
                "param_group must have parameters under 'params'; got "
                f"{shown(params)}. Pass a dict such as {{'params': [weight]}}."
            )
        super().add_param_group(param_group)
        if self.inner is not None:
            self._synchronize()

    @torch._disable_dynamo  # Dynamo cannot trace the handling of parameters stored in FP8
    @torch.no_grad()
    def step(  # type: ignore[override]  # torch has two overloads
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Update the masters with the gradients of the parameters, then write the parameters.

        Args:
            closure: reevaluates the model and returns the loss; it sees parameters that match their
                masters, however often the inner optimizer calls it. With ``fp8_moments`` or
                ``stochastic_rounding`` it is called once, before the update.
        """
        check_callables((), closure=closure)
        inner = self._synchronize()
        if closure is None:
            self._pass_gradients()
            result = self._storage.step(inner)
        elif self._storage.rounds:
            result = self._evaluate(closure)
            self._storage.step(inner)
        else:
            result = inner.step(partial(self._evaluate, closure))
        self._write_parameters()
        _copy_options(inner.param_groups, self.param_groups)
        self._has_stepped = True
        return result

    @property
    def state(self) -> defaultdict[Tensor, _State]:
        """The inner optimizer's state of each parameter, with its master as in ``state_dict``.

        It is empty before the first step, as in any torch optimizer:
        ``torch.distributed.checkpoint`` loads flattened states by the names present after a step.
        """
        state: defaultdict[Tensor, _State] = defaultdict(dict)
        inner_state = {} if self.inner is None else self.inner.state
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            master = self.masters.get(p)
            if master is not None and (inner_state or self._has_stepped):
                state[p] = ChainMap(inner_state.get(master, {}), {MASTER: master.detach()})
            elif p in inner_state:
                state[p] = inner_state[p]
        return state

    @state.setter
    def state(self, value: Mapping[Tensor, _State]) -> None:
        if self.inner is not None:
            self.inner.state, self._has_stepped = defaultdict(dict), bool(value)
            for p, entry in value.items():
                inner_entry = {name: x for name, x in entry.items() if name != MASTER}
                self.inner.state[self.masters.get(p, p)] = inner_entry

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state_dict with each master in its parameter's state."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        packed = self._synchronize().state_dict()
        for index, p in _by_index(packed["param_groups"], self.param_groups):
            if p in self.masters:
                # This is a new dict, since the inner optimizer's state must not hold the master.
                entry = packed["state"].get(index, {})
                packed["state"][index] = {**entry, MASTER: self.masters[p].detach()}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, packed)
            packed = packed if changed is None else changed
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` of this class, or of ``optimizer_class`` itself, returned.

        A parameter without a saved master keeps its current master if the parameter is the
        quantized form of it; otherwise its master becomes the dequantized parameter.

        Raises:
            TypeError: ``state_dict`` is not the state of an optimizer.
            ValueError: groups, masters or quantized moments have another shape.
        """
        keys = {"state", "param_groups"}
        if not isinstance(state_dict, Mapping) or not keys <= state_dict.keys():
            raise TypeError(
                "state_dict must be a dict with 'state' and 'param_groups'; got "
                f"{shown(state_dict)}. Pass what state_dict() of an optimizer returned."
            )
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = state_dict["param_groups"], self.param_groups
        saved_sizes, sizes = ([len(group["params"]) for group in listed] for listed in groups)
        if saved_sizes != sizes:
            raise ValueError(
                f"state_dict must have groups of {sizes} parameters; got {saved_sizes}. Load the "
                "state of an optimizer of the same model, made with the same groups."
            )
        items = state_dict["state"].items()
        entries = {index: unnested(entry) for index, entry in items if isinstance(entry, dict)}
        state_dict["state"] = {**state_dict["state"], **entries}
        # A flattened checkpoint has {} for missing entries.
        saved = {i: entry[MASTER] for i, entry in entries.items() if entry.get(MASTER, {}) != {}}
        by_index = dict(_by_index(*groups))
        for index, p in by_index.items():
            check_state(index, p, state_dict["state"].get(index, {}))
        inner = self._synchronize(needed={by_index[i] for i in saved if i in by_index})
        inner_params = {index: self.masters.get(p, p) for index, p in by_index.items()}
        self._storage.load(inner, state_dict, inner_params)
        _copy_options(inner.param_groups, self.param_groups)
        self._load_masters([(by_index.get(index), master) for index, master in saved.items()])
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _load_masters(self, saved: Sequence[tuple[Tensor | None, Tensor]]) -> None:
        """Copy saved masters in; warn of masters whose parameters have none here."""
        loaded = {p: master for p, master in saved if p is not None and p in self.masters}
        for p, master in loaded.items():
            self.masters[p].copy_(master)
        write_parameters_({p: self.masters[p] for p in loaded if _is_stale(p, self.masters[p])})
        self._written |= {p: _Written(p, self.masters[p]) for p in loaded}
        if unused := len(saved) - len(loaded):
            warnings.warn(
                f"The state_dict holds master weights of {unused} parameters that are not stored "
                "in FP8 here; they were not loaded. Copy them into the parameters to keep their "
                "precision.",
                stacklevel=4,
            )

    def __getstate__(self) -> dict[str, object]:
        public = ("defaults", "param_groups", "inner", "masters")
        private = ("_master_dtype", "_also_16_bit", "_storage", "_make_inner", "_has_stepped")
        values: dict[str, object] = {name: getattr(self, name) for name in (*public, *private)}
        # The versions in _written hold for these tensors only. A copy learns which parameters equal
        # their masters, and which of these masters were edited since.
        values["_written"] = {
            p: written.master_version != self.masters[p]._version
            for p, written in self._written.items()
            if p in self.masters and written.is_current(p)
        }
        return values

    def __setstate__(self, state: dict[str, object]) -> None:
        is_edited = cast("dict[Tensor, bool]", state.pop("_written", {}))
        super().__setstate__(state)
        self._written = {p: _Written(p, self.masters[p]) for p in is_edited}
        for p, edited in is_edited.items():
            if edited:
                self._written[p].master_version = -1

    def __repr__(self) -> str:
        return super().__repr__().replace(" (", f" of {type(self.inner).__name__} (", 1)

    def _make_master(self, p: Tensor, *, needed: bool = False) -> bool:
        """Give a stored parameter a master if it is ``needed``, now or later; return if it is."""
        local = local_of(p)
        is_shorter = local.dtype != self._master_dtype and local.dtype in HIGH_PRECISION_DTYPES[1:]
        is_stored = isinstance(local, Float8Tensor) or (self._also_16_bit and is_shorter)
        due = is_stored and (needed or p.requires_grad or p.grad is not None)
        if due and p not in self.masters:
            self.masters[p] = _new_master(p, self._master_dtype)
            self._written[p] = _Written(p, self.masters[p])
        return due

    @torch.no_grad()
    def _synchronize(self, needed: set[Tensor] | None = None) -> torch.optim.Optimizer:
        """Update masters and the inner optimizer's groups to match the parameters.

        Between two steps, user code may have changed options, added or removed groups, replaced or
        unfrozen parameters of a group, or written to a parameter.
        """
        if (inner := self.inner) is None:
            raise RuntimeError("MasterWeights must be constructed before it is used.")
        inner.param_groups += [{"params": []} for _ in self.param_groups[len(inner.param_groups) :]]
        del inner.param_groups[len(self.param_groups) :]
        _copy_options(self.param_groups, inner.param_groups)
        self._match_groups(inner, needed or set())
        self._written = {p: w for p, w in self._written.items() if p in self.masters}
        for p, master in self.masters.items():
            if p not in self._written or not self._written[p].is_current(p):
                local, local_master = local_of(p), local_of(master)
                if local_master.device != local.device:
                    moved = torch.empty_like(local_master, device=local.device)
                    local_master.data = moved.copy_(local_master)
                if not _describes(local_master, local):  # the parameter is not its quantized form
                    local_master.copy_(decoded(local))
                self._written[p] = _Written(p, master)
        return inner

    def _match_groups(self, inner: torch.optim.Optimizer, needed: set[Tensor]) -> None:
        """Put the masters of the groups' current parameters into the inner optimizer's groups.
        Masters and states of parameters that are in no group any more are dropped."""
        # A parameter that was moved from or to the meta device gets a new master.
        old_masters = {p: m for p, m in self.masters.items() if m.is_meta == p.is_meta}
        self.masters.clear()
        for group, inner_group in zip(self.param_groups, inner.param_groups, strict=True):
            for p in group["params"]:
                if p in old_masters:
                    self.masters[p] = old_masters[p]
                elif self._make_master(p, needed=p in needed):
                    # Some optimizers make the state of a parameter in their constructor.
                    fresh = self._make_inner([{**inner_group, "params": [self.masters[p]]}])
                    inner.state.update(fresh.state)
            # The list is changed in place, as LBFGS keeps a reference to it.
            inner_group["params"][:] = [self.masters.get(p, p) for p in group["params"]]
        members = {p for group in inner.param_groups for p in group["params"]}
        for p in [key for key in inner.state if isinstance(key, Tensor) and key not in members]:
            del inner.state[p]

    def _pass_gradients(self) -> None:
        for p, master in self.masters.items():
            if (gradient := p.grad) is not None:
                gradient = with_local(gradient, decoded(local_of(gradient))).to(master.dtype)
            master.grad = gradient

    def _write_parameters(self) -> None:
        """Write back the masters that had a gradient in the step or were changed otherwise."""
        due = {
            p: master
            for p, master in self.masters.items()
            if master.grad is not None or self._written[p].master_version != master._version
        }
        write_parameters_(due)
        for p, master in due.items():
            master.grad = None  # freed, since the parameter has its own gradient
            self._written[p] = _Written(p, master)

    def _evaluate(self, closure: Callable[[], float]) -> float:
        self._write_parameters()
        with torch.enable_grad():
            loss = closure()
        # The inner optimizer may have enabled gradients for the closure.
        with torch.no_grad():
            self._pass_gradients()
        return loss


def _is_stale(p: Tensor, master: Tensor) -> bool:
    """Whether an FP8 parameter may differ from its loaded master's quantized form. High-precision
    files change the scales of a parameter; shards come from files with their bytes."""
    if p.is_meta or not isinstance(p, Float8Tensor) or p._shared_scales is not None:
        return False
    return not torch.equal(p.dequantize().to(master.dtype), master)


@torch.no_grad()
def write_parameters_(masters: Mapping[Tensor, Tensor]) -> None:
    """Overwrite stored parameters with their ``masters``, quantized with new scales.

    A step writes parameters only here. One op quantizes all those with the same format and master
    dtype, on a GPU in at most two passes that write their memory directly. Shards of a block get
    the scale of the unsharded block.
    """
    shards: list[tuple[Tensor, Tensor]] = []
    quantized: list[tuple[Float8Tensor, Tensor]] = []
    sharing: list[tuple[Float8Tensor, Tensor]] = []
    rounded: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for p, master in masters.items():
        local, value = local_of(p), local_of(master)
        if _shares_blocks(p):
            shards.append((p, value))
        elif isinstance(local, Float8Tensor) and local._shared_scales is not None:
            sharing.append((local, value))
        elif isinstance(local, Float8Tensor):
            quantized.append((local, value))
        else:
            rounded[local.dtype, local.device].append((local, value))
    requantize_shards_([p for p, _ in shards], [value for _, value in shards])
    quantize_blocks_([(value, x.spec, (x.qdata, x.scale, x.amax)) for x, value in quantized])
    amaxes = shared_amaxes([(local._shared_scales, value, local.spec) for local, value in sharing])
    for (local, value), amax in zip(sharing, amaxes, strict=True):
        new = quantize_blocks(value, local.spec, known_amax=amax)
        torch._foreach_copy_([local.scale, local.amax], list(new[1:]))
        local.qdata.copy_(new[0])
    for pairs in rounded.values():
        torch._foreach_copy_([local for local, _ in pairs], [value for _, value in pairs])
    # The inner tensors were written, but not the version counters of the tensors that hold them.
    holders = [t for p in masters for t in (p, local_of(p)) if t is not _buffer(p)]
    torch.autograd.graph.increment_version(list(dict.fromkeys(holders)))


class _Written:
    """The version counters at which a parameter and its master were last equal."""

    def __init__(self, p: Tensor, master: Tensor) -> None:
        buffer = _buffer(p)
        # No reference if the parameter is the buffer: torch.utils.swap_tensors forbids weak ones.
        self._buffer = None if buffer is p else weakref.ref(buffer)
        self._versions = _versions(p)
        self.master_version = master._version

    def is_current(self, p: Tensor) -> bool:
        """Whether the parameter has not been written to since then."""
        has_buffer = self._buffer is None or self._buffer() is _buffer(p)
        return has_buffer and self._versions == _versions(p)


def _buffer(p: Tensor) -> Tensor:
    """Return the tensor that holds a parameter's data."""
    local = local_of(p)
    return local.qdata if isinstance(local, Float8Tensor) else local


def _versions(p: Tensor) -> tuple[object, ...]:
    """Return a parameter's device, and the versions of the tensors that it consists of."""
    return p.device, *(tensor._version for tensor in (p, local_of(p), _buffer(p)))


def _shares_blocks(p: Tensor) -> bool:
    """Whether other ranks may hold parts of this shard's blocks, as when FSDP2 cuts a weight."""
    local = local_of(p)
    if local is p or p.ndim != 2 or not isinstance(local, Float8Tensor):
        return False
    row_shard = row_shard_of(p) if hasattr(local, "weight") else None
    if row_shard is not None:  # FSDP2 gathers it; tensor parallelism may shard it, too
        return row_shard.spec.amax_block[0] != 1 or row_shard.group is not None
    *replicas, last = cast("DTensor", p).placements
    by_rows = bool(last.is_shard(0)) and all(r.is_replicate() for r in replicas)
    return by_rows and row_shard_of(p).spec.amax_block[0] != 1


@torch.no_grad()
def _new_master(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Make the master of a stored parameter from the most precise initial value available."""
    local = local_of(p)
    value = decoded(local)
    if isinstance(local, Float8Tensor):
        initial = local.get_high_precision_init_val()
        if initial is not None:
            initial = initial.to(local.device)
            # A checkpoint may have been loaded since the initialization.
            if _describes(initial, local):
                value = initial
                if dtype.itemsize < 4 and not (_shares_blocks(p) or local._shared_scales):
                    # The parameter must be the rounded master, quantized, as after a step.
                    stored = local.qdata, local.scale, local.amax
                    quantize_blocks_([(value.to(dtype), local.spec, stored)])
            local.clear_high_precision_init_val()
    return with_local(p, value.to(dtype, copy=True).contiguous()).detach().requires_grad_()


def _describes(value: Tensor, local: Tensor) -> bool:
    """Whether a stored tensor is exactly ``value`` quantized with the tensor's scales."""
    if value.shape != local.shape or value.is_meta or local.is_meta:
        return False
    if not isinstance(local, Float8Tensor):
        return torch.equal(value.to(local.dtype).view(torch.int16), local.view(torch.int16))
    expected = requantize_blocks(value, local.spec, local.scale, local.amax)
    return torch.equal(expected.view(torch.uint8), local.qdata.view(torch.uint8))


def _copy_options(source: Sequence[_Group], destination: Sequence[_Group]) -> None:
    """Copy options of parameter groups to other groups, which keep their parameters."""
    for options, group in zip(source, destination, strict=True):
        params = group["params"]
        group.clear()
        group.update({**options, "params": params})


def _by_index(packed: Sequence[_Group], groups: Sequence[_Group]) -> list[tuple[int, Tensor]]:
    """Pair the parameters of groups with their indices in the groups of a state_dict."""
    members = (chain.from_iterable(g["params"] for g in listed) for listed in (packed, groups))
    return list(zip(*members, strict=False))  # load_state_dict checks the sizes
