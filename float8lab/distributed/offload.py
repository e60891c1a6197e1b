"""get_cpu_offload_context: keep tensors that autograd saves in host memory until backward.

A *pass* is one forward through the model; the synchronizer closes each of its *layers*. A storage
that autograd saves in an offloaded layer is *stored*: copied to pinned host memory on a side stream
while the layer still runs. When the next layer is closed, the storage is *released*: the computing
stream waits for the copy, and the device memory is freed. When backward asks for the first tensor
of a layer, it starts to *load* the layer before it, on another side stream.

Memory is freed and allocated in the order of the computing stream only, so the peak does not depend
on how far the CPU runs ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from float8lab.arguments import check_flags, check_size
from float8lab.formats import Float8Spec
from float8lab.recipes.region import in_backward
from float8lab.tensor import Float8Tensor
from float8lab.tensor.differentiation import version_of

__all__ = ["WEIGHT_CASTS", "get_cpu_offload_context"]


class _WeightCasts(threading.local):
    """The casts of weights that CPU offload knows of, on one thread."""

    def __init__(self) -> None:
        self.outlive_step: dict[StorageWeakRef, bool] | None = None
        """For each storage, whether a cast outlives the step anyway; None outside offload."""


WEIGHT_CASTS = _WeightCasts()

SMALL = 2**20
"""Size in bytes below which a storage stays: copying it costs more time than its memory saves."""

DEVICES = ("cuda",)
"""Types of device whose memory is offloaded. Tensors on a CPU are in host memory already."""


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int | bool | None = None,
    offload_activations: bool = True,
    offload_weights: bool = True,
    double_buffering: bool = False,
) -> tuple[AbstractContextManager[object], Callable[..., Any]]:
    """Return a context for the forward of layers, and a function to call after each layer.

    Tensors that autograd saves inside the context are copied to pinned host memory while the
    forward runs, and copied back while the backward of the following layer runs. The results are
    bit for bit the same; FP8 data is copied as bytes. Parameters, storages under 1 MiB and tensors
    in host memory stay; tensors that share a storage are copied once.

    The device holds the activations of two offloaded layers at a time: one that is computed, and
    one that is being copied. Counting restarts with the first layer when a backward has begun,
    or when the graph of the forward is gone.

    Args:
        enabled: False returns a context and a function that do nothing.
        num_layers: the number of layers, from the first one, that are offloaded.
        model_layers: the number of layers of the model. It is needed only if several forward passes
            precede their backward, as in pipeline parallelism; without it counting would go on, and
            the second pass would not be offloaded. If it is a bool, it is ``offload_activations``
            and the fourth argument ``offload_weights``, as in Transformer Engine before 1.10.
        offload_activations: offload saved tensors other than casts of weights.
        offload_weights: offload the FP8 casts of weights that forward saves for backward. Casts
            that outlive the step (stored weights, casts kept over microbatches) stay.
        double_buffering: has no effect: a layer is always loaded while the next one is computed.

    Returns:
        The context, and the synchronizer: call it after each layer of the model, offloaded or not.
        It takes no argument, or the layer's output, which it returns.

    Raises:
        ValueError: there is nothing to offload, or a number of layers is below 1, or
            ``model_layers`` is below ``num_layers``.

    >>> context, synchronize = float8lab.get_cpu_offload_context(enabled=True, num_layers=2)
    >>> x = torch.ones(4, 32)
    >>> for layer in [torch.nn.Linear(32, 32) for _ in range(3)]:
    ...     with context:
    ...         x = layer(x)
    ...     x = synchronize(x)
    >>> x.sum().backward()
    """
    check_flags(
        enabled=enabled, offload_activations=offload_activations, offload_weights=offload_weights,
        double_buffering=double_buffering,
    )  # fmt: skip
    if isinstance(model_layers, bool):
        offload_weights = offload_weights and offload_activations  # given by keyword or as fourth
        offload_activations = model_layers
        model_layers = None
    check_size("num_layers", num_layers, minimum=1 if enabled else 0)
    check_size("model_layers", model_layers, minimum=1 if enabled else 0, optional=True)
    if not enabled:
        return nullcontext(), lambda x=None: x
    if not offload_activations and not offload_weights:
        raise ValueError(
            "offload_activations or offload_weights must be True when enabled; got both False. "
            "Pass enabled=False to offload nothing."
        )
    if model_layers is not None and model_layers < num_layers:
        raise ValueError(
            f"model_layers must be at least num_layers {num_layers}; got {model_layers}. It counts "
            "all layers of the model."
        )
    offload = _Offload(num_layers, model_layers, offload_activations, offload_weights)
    return offload, offload.end_layer


_T = TypeVar("_T")
_Bytes = tuple[StorageWeakRef, int]
"""A storage and the version of its bytes."""
_Saved = Callable[[], Tensor]
"""The form in which autograd saves a tensor: a function that returns the tensor in backward."""


class _Moved:
    """The bytes of one storage: on the device, in host memory, or both."""

    __slots__ = ("__weakref__", "arrival", "host", "lanes", "on_device", "seen", "sources", "stale")

    def __init__(self, x: Tensor, lanes: _Lanes) -> None:
        self.seen = True  # the computing stream has waited for the arrival
        self.lanes = lanes
        stored = x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
        self.on_device: Tensor | None = stored
        self.host = lanes.store(stored)
        self.sources: list[tuple[Tensor, int]] = []  # until release: tensors that share the bytes
        self.stale = False
        self.arrival: torch.Event | None = None  # recorded after the load

    def _check_sources(self) -> None:
        self.stale = self.stale or any(x._version != version for x, version in self.sources)

    def release(self) -> None:
        self._check_sources()
        self.sources.clear()
        self.on_device = None

    def load(self) -> Tensor:
        if (on_device := self.on_device) is None:
            on_device, self.arrival = self.lanes.load(self.host)
            self.on_device, self.seen = on_device, False
        return on_device

    def bytes(self) -> Tensor:
        self._check_sources()
        if self.stale:
            _raise_modified()
        on_device = self.load()
        if self.arrival is not None:
            self.lanes.current().wait_event(self.arrival)
            self.seen = True
        return on_device

    def __del__(self) -> None:
        if not self.seen and self.on_device is not None and self.on_device.device.type != "cpu":
            # No stream waited for the copy into this memory, which is about to be freed: the
            # allocator must not reuse the memory before the copy is done.
            self.on_device.record_stream(self.lanes.inward)


class _Lanes:
    """The two side streams of a device, for copies to the host and copies to the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device)
        options = {} if device.type == "cpu" else {"device": device}
        self.outward = self.module.Stream(**options)
        self.inward = self.module.Stream(**options)

    def current(self) -> torch.Stream:
        return self.module.current_stream(self.device)

    def store(self, source: Tensor) -> Tensor:
        host = torch.empty_like(source, device="cpu", pin_memory=self.device.type != "cpu")
        self.outward.wait_stream(self.current())
        with self.module.stream(self.outward):
            host.copy_(source, non_blocking=True)
        return host

    def load(self, host: Tensor) -> tuple[Tensor, torch.Event]:
        # The computing stream owns the memory; its earlier work there must be done first.
        target = torch.empty(host.numel(), dtype=torch.uint8, device=self.device)
        self.inward.wait_stream(self.current())
        with self.module.stream(self.inward):
            target.copy_(host, non_blocking=True)
        return target, self.inward.record_event()


class _Pass:
    """The state of one forward through the model."""

    def __init__(self) -> None:
        self.layer = _Layer(self, None)
        self.in_backward = self.moved_any = False
        self.moved: weakref.WeakValueDictionary[_Bytes, _Moved] = weakref.WeakValueDictionary()


class _Layer:
    """The tensors that autograd saved between two calls of the synchronizer."""

    def __init__(self, of: _Pass, previous: _Layer | None) -> None:
        self.of, self.previous = of, previous
        self.index: int = 0 if previous is None else previous.index + 1
        self.moved: weakref.WeakValueDictionary[_Bytes, _Moved] = weakref.WeakValueDictionary()
        self.lanes: dict[_Lanes, torch.Event | None] = {}  # lanes used; event after the last copy
        self.reached = False  # whether backward has asked for a tensor of this layer

    def release(self) -> None:
        for lanes, copied in self.lanes.items():
            if copied is not None:
                lanes.current().wait_event(copied)
        for moved in self.moved.values():
            moved.release()

    def reach(self) -> None:
        """Load the previous layer when backward first asks for a tensor of this layer."""
        if self.reached:
            return
        self.reached = self.of.in_backward = True
        if self.previous is not None:
            for moved in self.previous.moved.values():
                moved.load()


def _unpack_kept(x: Tensor, version: int, layer: _Layer | None) -> Tensor:
    """Return a saved tensor that has stayed on its device."""
    if layer is not None:
        layer.reach()
    if version_of(x) != version:
        _raise_modified()
    return x


def _unpack_moved(
    moved: _Moved, layer: _Layer, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...],
    offset: int | torch.SymInt,
) -> Tensor:  # fmt: skip
    """Return a saved tensor whose storage was offloaded."""
    layer.reach()
    data = moved.bytes()
    elements = data[: data.numel() // dtype.itemsize * dtype.itemsize]
    return elements.view(dtype).as_strided(size, stride, offset)


def _unpack_float8(inner: Sequence[_Saved], spec: Float8Spec, dtype: torch.dtype) -> Tensor:
    """Return a saved Float8Tensor, whose inner tensors were each kept or offloaded."""
    qdata, scale, amax = (unpack() for unpack in inner)
    return Float8Tensor._make(qdata, scale, amax, spec, dtype)


def _raise_modified() -> None:
    # Autograd checks this itself, except for tensors that went through hooks.
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        "operation after it was saved under a CPU offload context. Change a copy of it instead."
    )


class _Offload(AbstractContextManager["_Offload"]):
    """The context, whose hooks offload the tensors that autograd saves."""

    def __init__(
        self, num_layers: int, model_layers: int | None, activations: bool, weights: bool
    ) -> None:
        self._num_layers, self._model_layers = num_layers, model_layers
        # Whether to offload, by whether a saved tensor is a cast of a weight.
        self._offloads = {False: activations, True: weights}
        self._lanes: dict[torch.device, _Lanes] = {}
        self._pass = _Pass()
        self._ended: _Layer | None = None  # a layer that has ended and is not released
        self._entered: list[tuple[saved_tensors_hooks, dict[StorageWeakRef, bool] | None]] = []
        self._weights: dict[StorageWeakRef, bool] = {}  # ``WEIGHT_CASTS.outlive_step`` inside

    def __enter__(self) -> _Offload:
        hooks = saved_tensors_hooks(self._pack, lambda unpack: unpack())
        hooks.__enter__()
        self._entered.append((hooks, WEIGHT_CASTS.outlive_step))
        WEIGHT_CASTS.outlive_step = self._weights
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        hooks, WEIGHT_CASTS.outlive_step = self._entered.pop()
        self._weights.clear()
        hooks.__exit__(exc_type, exc, traceback)

    def end_layer(self, x: _T | None = None) -> _T | None:
        """End a layer of the model and return its output; this is the synchronizer."""
        if not torch.is_grad_enabled() or in_backward():
            return x
        layer = self._layer()
        for lanes in layer.lanes:
            layer.lanes[lanes] = lanes.outward.record_event()
        if self._ended is not None and not self._ended.of.in_backward:
            self._ended.release()
        self._ended = layer
        layer.of.layer = _Layer(layer.of, layer)
        if layer.index + 1 == self._model_layers:
            self._pass = _Pass()
        return x

    def _layer(self) -> _Layer:
        past = self._pass
        if past.in_backward or (past.moved_any and not past.moved):  # all moved tensors are gone
            self._pass = _Pass()
        return self._pass.layer

    def _pack(self, x: Tensor) -> _Saved:
        if in_backward():  # a recomputation, whose tensors are needed at once
            return partial(_unpack_kept, x, version_of(x), None)
        layer = self._layer()
        is_offloaded = layer.index < self._num_layers and not isinstance(x, nn.Parameter)
        if is_offloaded and isinstance(x, Float8Tensor) and x._window is None:
            inner = [self._pack(t) for t in (x.qdata, x.scale, x.amax)]
            return partial(_unpack_float8, inner, x.spec, x.dtype)
        if not (is_offloaded and self._moves(x)):
            return partial(_unpack_kept, x, version_of(x), layer)
        storage, version = StorageWeakRef(x.untyped_storage()), version_of(x)
        if (moved := layer.of.moved.get((storage, version))) is None:
            if (lanes := self._lanes.get(x.device)) is None:
                lanes = self._lanes[x.device] = _Lanes(x.device)
            moved = layer.of.moved[storage, version] = _Moved(x, lanes)
            layer.lanes[lanes], layer.of.moved_any = None, True
        if moved.on_device is not None:
            moved.sources.append((x.detach(), version))  # detached: its graph may refer to this
        layer.moved[storage, version] = moved
        view = x.shape, x.stride(), x.storage_offset()
        return partial(_unpack_moved, moved, layer, x.dtype, *view)

    def _moves(self, x: Tensor) -> bool:
        if type(x) is not Tensor or x.device.type not in DEVICES or x.layout != torch.strided:
            return False
        storage, is_of_parameter = x.untyped_storage(), isinstance(x._base, nn.Parameter)
        if is_of_parameter or x.is_conj() or x.is_neg() or storage.nbytes() < SMALL:
            return False
        outlives_step = self._weights.get(StorageWeakRef(storage))
        return not outlives_step and self._offloads[outlives_step is not None]
