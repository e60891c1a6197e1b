"""Count a model's memory by layer: weights, masters, scales, saved activations and more."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from float8lab.arguments import check_callables, check_instance, check_module
from float8lab.inspect.text import Grid, Printed, bytes_text
from float8lab.inspect.trial import LossFn, Trial, hooked, on_trial, tensors_in
from float8lab.nn.precision import precisions
from float8lab.optim import MasterWeights
from float8lab.tensor.dtensor import is_dtensor, local_of

__all__ = ["OUTPUT", "LayerMemory", "MemoryReport", "memory_report", "saved_by_layer"]

OUTPUT, OPTIMIZER = "(output)", "(optimizer)"
_CUDA_GRANULE = 512
"""Torch's CUDA allocator rounds sizes up to this (kMinBlockSize, CUDACachingAllocator.cpp)."""


@dataclass(frozen=True)
class LayerMemory:
    """The bytes that one module holds, without those of its children."""

    name: str
    weights: int = 0
    """Parameters; a parameter stored in FP8 counts its FP8 data here."""
    scales: int = 0
    """Scales and amaxes of parameters stored in FP8, delayed-scaling state, cached weight casts."""
    buffers: int = 0
    gradients: int = 0
    """Gradients that exist: ``grad`` and ``main_grad`` of the parameters."""
    masters: int = 0
    """High-precision copies in ``MasterWeights``."""
    optimizer: int = 0
    """The optimizer's state without masters."""
    activations: int = 0
    """Tensors that autograd keeps from forward to backward, FP8 casts of weights included."""

    @property
    def total(self) -> int:
        """The sum of all these bytes."""
        return sum(getattr(self, kind) for kind in KINDS)


KINDS = tuple(field.name for field in fields(LayerMemory) if field.name != "name")


@dataclass(frozen=True, repr=False)
class MemoryReport(Printed):
    """The result of ``memory_report``; ``print`` it for a table.

    Attributes:
        layers: modules that hold memory, in the model's order. Memory that several modules share
            counts for the first of them.
        by_device: bytes by device, such as ``"cuda:0"``.
        ran: whether activations were counted, by running the model on a batch.
    """

    layers: tuple[LayerMemory, ...]
    by_device: dict[str, int]
    ran: bool

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(layer.total for layer in self.layers)

    def sum(self, kind: str) -> int:
        """Sum the bytes of one kind, such as ``"weights"``, over all layers.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; got {kind!r}. Choose one.")
        return sum(getattr(layer, kind) for layer in self.layers)

    def to_json(self) -> str:
        """Return the report as JSON text, with sizes in bytes."""
        layers = [asdict(layer) for layer in self.layers]
        result = {"layers": layers, "totals": {kind: self.sum(kind) for kind in KINDS}}
        return json.dumps({**result, "by_device": self.by_device, "ran": self.ran})

    def summary(self) -> str:
        """Return the bytes on each device as text."""
        sizes = [f"{bytes_text(size)} on {device}" for device, size in self.by_device.items()]
        text = ", ".join(sizes) or "nothing"
        return text if self.ran else f"{text}; without activations: pass an example batch"

    def tables(self, limit: int | None = None) -> list[Grid]:
        """Return a table with a row for each layer."""
        kinds = [kind for kind in KINDS if self.sum(kind)]
        rows = [
            (layer.name or "(model)", *(bytes_text(getattr(layer, k)) for k in (*kinds, "total")))
            for layer in self.layers
        ]
        sums = ("total", *(bytes_text(self.sum(kind)) for kind in kinds), bytes_text(self.total))
        return [Grid("By layer", ("layer", *kinds, "total"), [*rows, sums], left=1).first(limit)]


def storages(x: Any) -> Iterator[tuple[str, torch.UntypedStorage]]:
    """Yield the storages of a tensor, or of a subclass's inner tensors with their names.

    For a DTensor, yield the storages of this rank's shard.
    """
    if is_dtensor(x):
        yield from storages(local_of(x))
    elif hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            for inner, storage in storages(getattr(x, name)):
                yield inner or name, storage
    else:
        yield "", x.untyped_storage()


class _Counted:
    """The storages that were counted so far, and the bytes that they take on each device."""

    def __init__(self) -> None:
        self._seen: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is reused
        self.by_device: defaultdict[str, int] = defaultdict(int)

    def bytes_of(self, storage: torch.UntypedStorage) -> int:
        """Count a storage: return its bytes the first time, and 0 from then on."""
        if storage._cdata in self._seen:
            return 0
        self._seen[storage._cdata] = storage
        size = storage.nbytes()
        if storage.device.type == "cuda":
            size = -(-size // _CUDA_GRANULE) * _CUDA_GRANULE
        self.by_device[str(storage.device)] += size
        return size

    def add(self, x: Tensor | None) -> int:
        """Count a tensor: return those of its bytes that were not counted before."""
        return 0 if x is None else sum(self.bytes_of(storage) for _, storage in storages(x))


def memory_report(
    model: nn.Module,
    batch: object = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: LossFn | None = None,
) -> MemoryReport:
    """Count the memory of a model by layer, from the storages that its tensors have.

    Tied weights, and activations that several layers save, count once. A sharded parameter counts
    with this rank's shard only. A CUDA storage counts as the multiple of 512 bytes that the
    allocator takes for it. The model is left as it was.

    Args:
        model: any module; on the meta device the report has the sizes that it would have.
        batch: an example: a tensor, or a tuple or dict of arguments. Activations are the tensors
            that autograd keeps of one forward pass on it, under the recipes (and inside the
            autocast) that apply to the model at this call. Without a batch none are counted. The
            batch itself does not count.
        optimizer: its state counts, and so do the masters of a ``MasterWeights``.
        loss_fn: ``loss_fn(model, batch)`` returns the loss; by default ``model`` alone is called.

    Raises:
        ValueError: ``loss_fn`` returns no loss.

    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU())
    >>> print(memory_report(model, torch.ones(1000, 64)))
    1.1 MB on cpu
    <BLANKLINE>
    By layer
      layer  weights  activations    total
      0      66.6 kB            -  66.6 kB
      1            -       1.0 MB   1.0 MB
      total  66.6 kB       1.0 MB   1.1 MB
    """
    check_module("model", model)
    noun = "a torch.optim.Optimizer"
    check_instance("optimizer", optimizer, torch.optim.Optimizer, noun, optional=True)
    check_callables(("model", "batch"), loss_fn=loss_fn)
    counted = _Counted()
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)  # in the model's order
    owners: dict[int, str] = {}
    for name, module in model.named_modules():
        row = sizes[name]
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), name)
            for field, storage in storages(parameter):
                kind = "scales" if field in ("scale", "amax") else "weights"
                row[kind] += counted.bytes_of(storage)
            row["gradients"] += counted.add(parameter.grad)
            row["gradients"] += counted.add(getattr(parameter, "main_grad", None))
        row["buffers"] += sum(map(counted.add, module._buffers.values()))
        row["scales"] += sum(_scaling_state(module, counted))
    for parameter, kind, tensor in _tensors_of_optimizer(optimizer):
        sizes[owners.get(id(parameter), OPTIMIZER)][kind] += counted.add(tensor)
    if batch is not None:
        before = counted.by_device.copy()
        for tensor in tensors_in(batch):
            counted.add(tensor)
        counted.by_device = before
        with on_trial(model, batch, loss_fn) as trial:
            run = trial.forward if loss_fn is None else trial.loss
            for name, size in _saved(model, run, counted).items():
                sizes[name]["activations"] += size
    layers = tuple(LayerMemory(name, **row) for name, row in sizes.items() if any(row.values()))
    return MemoryReport(layers, dict(counted.by_device), batch is not None)


def _scaling_state(module: nn.Module, counted: _Counted) -> Iterator[int]:
    for _, precision in precisions(module):
        for slots in precision.slots.values():
            # Columns of tensors that all modules share; scale and encode are rows of its factors.
            columns = slots.tensors()
            del columns["scale"], columns["encode"]
            for column in columns.values():
                counted.by_device[str(column.device)] += column.nbytes
                yield column.nbytes
        if (cached_cast := precision.weight_cast) is not None:
            operands = (cached_cast.operand, *cached_cast.transposes)
            yield sum(map(counted.add, itertools.chain(*operands)))


def _tensors_of_optimizer(
    optimizer: torch.optim.Optimizer | None,
) -> Iterator[tuple[Tensor, str, Tensor]]:
    """Yield a parameter, a kind of memory, and a tensor that the optimizer keeps for it."""
    if isinstance(optimizer, MasterWeights):
        for parameter, master in optimizer.masters.items():
            yield parameter, "masters", master
    for parameter, state in () if optimizer is None else optimizer.state.items():
        for tensor in tensors_in(state):
            yield parameter, "optimizer", tensor


def saved_by_layer(trial: Trial) -> dict[str, int]:
    """Return the bytes that autograd keeps of a forward by module, but no parameters or buffers."""
    counted = _Counted()
    for tensor in (*trial.model.parameters(), *trial.model.buffers()):
        counted.add(tensor)
    return _saved(trial.model, trial.forward, counted)


def _saved(model: nn.Module, run: Callable[[], object], counted: _Counted) -> dict[str, int]:
    running = [""]  # names of the modules that run, the innermost last
    saved_storages: list[tuple[str, torch.UntypedStorage]] = []

    def note(saved: Tensor) -> Tensor:
        saved_storages.extend((running[-1], storage) for _, storage in storages(saved))
        return saved.detach()  # a node that saved its own output would never be freed

    def enter(name: str, *_: object) -> None:
        running.append(name)

    def leave(*_: object) -> None:
        running.pop()

    def attach() -> Iterator[RemovableHandle]:
        for name, module in model.named_modules():
            yield module.register_forward_pre_hook(partial(enter, name), prepend=True)
            yield module.register_forward_hook(leave, always_call=True)

    with hooked(attach()), torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
        output = run()
    # Count now: parameters that FSDP2 gathered while their module ran are empty by now.
    sizes: defaultdict[str, int] = defaultdict(int)
    for name, storage in saved_storages:
        sizes[name] += counted.bytes_of(storage)
    sizes[OUTPUT] = sum(counted.add(tensor) for tensor in tensors_in(output))
    return dict(sizes)
