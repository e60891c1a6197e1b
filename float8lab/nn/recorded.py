"""Record the forward and backward of callables as CUDA graphs, and replay them.

torch records the kernels; this file takes care of FP8's state. A graph holds the casts. It reads
their delayed scales from the modules' tensors and records amaxes there. It does not hold the end
of the region: the caller advances the scales, as in eager mode.

A forward saves its tensors for backward in the graphs' own memory, where the next replay overwrites
them. So a replay stores its autograd node. A recording is not ``is_ready`` until the backward of
that node has run, and a backward whose memory was overwritten raises.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from float8lab.nn.precision import Precision, precisions_below
from float8lab.recipes.delayed import DelayedSlots, ScalePack, merge_packs
from float8lab.recipes.region import STATE, Region, inside
from float8lab.tensor.differentiation import AutogradContext, version_of

__all__ = ["PLAIN", "Recorded", "Trial", "Unit", "record", "replay"]

PLAIN = frozenset(
    {bool, int, float, complex, str, bytes, type(None), torch.Size}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""Types whose values cannot change."""

_Aliases = dict[int, nn.Parameter]
_Result = TypeVar("_Result")


class _Capture(Protocol):
    """Runs a function, and returns a function that replays it, and its result."""

    def __call__(self, run: Callable[[], _Result], /) -> tuple[Callable[[], None], _Result]: ...


_TENSOR = object()  # stands for a tensor among an output's leaves


class Unit(NamedTuple):
    """A callable in the form in which it is recorded."""

    module: nn.Module
    """The module with its parameters and FP8 state; an empty module for a function."""
    run: Callable[[Sequence[Tensor]], object]
    """The forward as a function of tensors alone."""
    sample: Sequence[Tensor]
    """Tensors like the real arguments, which belong to the graphs."""


class Trial(Region):
    """The region of calls that are made to be recorded, which advances no scales."""

    __slots__ = ()


def _no_graph() -> None:
    """Replay nothing, for a warm-up and for a backward without gradients."""


class Recorded:
    """A forward and its backward as CUDA graphs, and the tensors that the graphs read and write.

    Attributes:
        exact: whether results are copies, which last, and a retained backward may be repeated.
            Otherwise the next replay overwrites results, and a backward runs once.
        key: the description of the calls for which the graphs do the same as the call would.
        packs: the state of delayed scaling in which the graphs record amaxes.
        slots: the slots that the graphs use, and the packs in which they were.
        with_gradients: whether autograd was on during recording.
        pointers: tensors that the graphs read, and the addresses where they were.
        node: the autograd node of the last forward's backward.
    """

    def __init__(self, unit: Unit, *, exact: bool, allow_unused: bool) -> None:
        self.exact, self.allow_unused = exact, allow_unused
        self.key: tuple[object, ...] = ()
        self.packs: Sequence[ScalePack] = ()
        self.slots: Sequence[tuple[DelayedSlots, ScalePack]] = ()
        self.pointers: Sequence[tuple[Tensor, int]] = ()
        self.inputs = [t.detach() for t in unit.sample]
        self.with_gradients = torch.is_grad_enabled()
        parameters = unit.module.parameters() if self.with_gradients else ()
        self.parameters = [p for p in parameters if p.requires_grad]
        self.backward: Callable[[], None] = _no_graph  # replays the backward
        self.node: weakref.ref[AutogradContext] | None = None
        self._live: list[Tensor] = []  # outputs with their autograd graph, until that is recorded
        self._aliases = {id(p): _alias(p) for p in self.parameters}

    def record_forward(self, unit: Unit, capture: _Capture) -> None:
        """Record the forward."""
        versions = [version_of(t) for t in unit.sample]
        run = partial(self._run_forward, unit, self._aliases)
        self._replay_forward, self.outputs = capture(run)
        self.differentiable = [y.requires_grad for y in self._live]
        if not self.exact:
            return
        if [version_of(t) for t in unit.sample] != versions:
            raise RuntimeError("it writes into its arguments")
        kinds = {type(y) for y in self._leaves if y is not _TENSOR}
        if not (kinds <= PLAIN and {type(y) for y in self._live} <= {Tensor, nn.Parameter}):
            raise RuntimeError("it returns something besides tensors")
        if sum(self.differentiable) > 1:
            raise RuntimeError("several of its outputs have a gradient")

    def _run_forward(self, unit: Unit, aliases: _Aliases) -> list[Tensor]:
        with _autocast(torch.is_autocast_enabled("cuda")), _holding(unit.module, aliases):
            result = unit.run(unit.sample)
        self._returns_tensor = isinstance(result, Tensor)
        leaves, self._spec = tree_flatten(result)
        self._leaves = [_TENSOR if isinstance(y, Tensor) else y for y in leaves]
        self._live = [y for y in leaves if isinstance(y, Tensor)]
        return [y.detach() for y in self._live]

    def record_backward(self, unit: Unit, capture: _Capture) -> None:
        """Record the backward. Of several callables the last one's backward comes first."""
        has_backward = self.parameters or any(t.requires_grad for t in unit.sample)
        if has_backward and any(self.differentiable):
            self.dys = [torch.zeros_like(y) if y.requires_grad else None for y in self._live]
            run = partial(self._run_backward, unit, self._aliases)
            self.backward, (self._gradients, self._joined_gradients) = capture(run)
        self._live, self._aliases = [], {}

    def _run_backward(
        self, unit: Unit, aliases: _Aliases
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Compute each tensor's gradient; those of parameters may be joined into one tensor."""
        outputs = [(y, g) for y, g in zip(self._live, self.dys, strict=True) if g is not None]
        tensors = (*unit.sample, *aliases.values())
        leaves = [t for t in tensors if t.requires_grad]
        with _autocast(False), _holding(unit.module, aliases):  # for recomputations
            inputs = [*leaves, *self.parameters] if self.allow_unused else leaves
            # With ``retain_graph`` the backward does not overwrite the tensors that it reads.
            computed = torch.autograd.grad(
                [y for y, _ in outputs], inputs, [g for _, g in outputs],
                allow_unused=self.allow_unused, retain_graph=self.exact,
            )  # fmt: skip
        if any(g is not None for g in computed[len(leaves) :]):
            raise RuntimeError("it has parameters elsewhere than under their names")
        gradient = iter(computed)
        gradients = [next(gradient) if t.requires_grad else None for t in tensors]
        param_grads = gradients[len(self.inputs) :]
        present = [g for g in param_grads if g is not None]
        dtypes = {g.dtype for g in present}
        if not self.exact or len(dtypes) != 1 or len(present) < len(param_grads):
            return gradients, None
        return gradients[: len(self.inputs)], torch.cat([g.reshape(-1) for g in present])

    def is_ready(self) -> bool:
        """Whether a call may replay it: no backward is pending, and it has the needed gradients."""
        lacks_gradients = torch.is_grad_enabled() and not self.with_gradients
        return not lacks_gradients and (self.node is None or self.node() is None)

    def __call__(self, *tensors: Tensor) -> object:
        """Replay the forward, and the backward later if that was recorded."""
        if self.backward is _no_graph:
            outputs: Sequence[Tensor] = self.replay_forward(tensors)
        else:
            outputs = _Replay.apply(self, *tensors, *self.parameters)
        if self._returns_tensor:
            return outputs[0]
        results = iter(outputs)
        leaves = [next(results) if y is _TENSOR else y for y in self._leaves]
        return tree_unflatten(leaves, self._spec)

    def replay_forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Replay the forward and return its outputs."""
        for static, tensor in zip(self.inputs, tensors, strict=False):  # skips the parameters
            if static.data_ptr() != tensor.data_ptr():
                static.copy_(tensor)
        self._replay_forward()
        return [y.clone() if self.exact else y.detach() for y in self.outputs]

    def replay_backward(
        self, node: AutogradContext, gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Replay the backward and return the gradients of inputs and parameters."""
        if self.node is None or self.node() is not node:
            raise RuntimeError(
                "backward of a recorded CUDA graph must run before the next forward, and again "
                "only where it was retained; got a later one. Pass retain_graph=True to the first "
                "backward of a float8lab.graphed module, or call the module without its graphs."
            )
        if any(t.data_ptr() != pointer for t, pointer in self.pointers):
            raise RuntimeError(
                "parameters of a module with CUDA graphs must stay where they are until the "
                "backward; got one that was moved. Call float8lab.graphed(module, enabled=False) "
                "where parameters come and go, as sharded ones do."
            )
        for static, gradient in zip(self.dys, gradients, strict=True):
            if static is None:
                continue
            if gradient is None:
                static.zero_()
            elif static.data_ptr() != gradient.data_ptr():
                static.copy_(gradient)
        self.backward()
        if not (self.exact and torch._C._autograd._get_current_graph_task_keep_graph()):
            self.node = None
        if not self.exact:
            # Return these tensors, not views of them: autograd would make a fresh view the ``grad``
            # of a parameter, and the next replay would overwrite it. Tensors in use are copied.
            return self._gradients
        copies: list[Tensor | None] = [None if g is None else g.clone() for g in self._gradients]
        if self._joined_gradients is not None:
            copies += _unflatten_dense_tensors(self._joined_gradients.clone(), self.parameters)
        return copies


class _Replay(torch.autograd.Function):
    """The node of a replay."""

    @staticmethod
    def forward(ctx: AutogradContext, recorded: Recorded, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = recorded.replay_forward(tensors)
        ctx.recorded = recorded
        ctx.set_materialize_grads(False)
        if recorded.exact:
            ctx.save_for_backward(*recorded.parameters)  # so that torch refuses changed ones
        if not all(recorded.differentiable):
            pairs = zip(outputs, recorded.differentiable, strict=True)
            ctx.mark_non_differentiable(*[y for y, differentiable in pairs if not differentiable])
        recorded.node = weakref.ref(ctx)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: AutogradContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        recorded = ctx.recorded
        if recorded.exact:
            _ = ctx.saved_tensors  # has torch check that they did not change
        return None, *recorded.replay_backward(ctx, gradients)


def replay(recorded: Recorded, tensors: Sequence[Tensor]) -> object:
    """Replay a call in the enclosing region, or in a region of its own."""
    own_region = Region() if STATE.region is None and recorded.packs else None
    with inside(own_region) if own_region is not None else nullcontext():
        result = recorded(*tensors)
        if (region := STATE.region) is not None:
            region.fp8_calls += 1
            region.packs.update(dict.fromkeys(recorded.packs))
    if own_region is not None:
        own_region.close()
    return result


def record(
    units: Sequence[Unit], warmup: int, *, allow_unused: bool, pool: tuple[int, int] | None = None,
    exact: bool = False,
) -> list[Recorded]:  # fmt: skip
    """Warm up and record callables in the order in which they are going to run.

    This leaves parameters' gradients, buffers, FP8's state and the random state unchanged.

    Args:
        warmup: the number of eager steps before.
        allow_unused: whether some tensors may get no gradient.
        exact: the attribute of ``Recorded``.
    """
    devices = {t.device for unit in units for t in unit.sample if t.is_cuda}
    precisions = [p for unit in units for p in precisions_below(unit.module)]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device.index for device in devices]))
        for device in devices:
            stack.enter_context(torch.cuda.device(device))
        restore = stack.callback(_saved(units, precisions))
        if warmup:
            merge_packs(_warm_up(units, warmup, allow_unused, exact))
            restore()
            # Run once more now that the state is where it will stay.
            _warm_up(units, 1, allow_unused, exact, waits=not exact)
            if exact and any(p.weight_cast for p in precisions):
                raise RuntimeError("it keeps casts of weights over microbatches")
            restore()
        gc.collect()
        if gc.isenabled():  # a CUDA graph that is freed meanwhile would spoil the recording
            gc.disable()
            stack.callback(gc.enable)
        for precision in precisions:
            precision.weight_cast = None
        region = Trial()
        stack.enter_context(inside(region))
        handle = torch.cuda.graph_pool_handle() if pool is None else pool
        capture = partial(_capture, pool=handle, stream=torch.cuda.Stream())
        recordings = _run(units, allow_unused, exact, capture)
    for recorded, unit in zip(recordings, units, strict=True):
        owned = [slots for p in precisions_below(unit.module) for slots in p.slots.values()]
        packs = {slots.pack for slots in owned}
        recorded.packs = [pack for pack in region.packs if pack in packs]
        recorded.slots = [(slots, slots.pack) for slots in owned if slots.pack.is_recorded()]
    return recordings


def _run(
    units: Sequence[Unit], allow_unused: bool, exact: bool, capture: _Capture
) -> list[Recorded]:
    """Run the forwards, then the backwards, of all units, each by ``capture``."""
    recordings = [Recorded(unit, exact=exact, allow_unused=allow_unused) for unit in units]
    for recorded, unit in zip(recordings, units, strict=True):
        recorded.record_forward(unit, capture)
    for recorded, unit in zip(reversed(recordings), reversed(units), strict=True):
        recorded.record_backward(unit, capture)
    return recordings


def _capture(
    run: Callable[[], _Result], pool: tuple[int, int], stream: torch.cuda.Stream
) -> tuple[Callable[[], None], _Result]:
    """Record a function's work on the GPU; return a function that replays it, and its result."""
    graph = torch.cuda.CUDAGraph()
    # With "thread_local", other threads, such as a data loader's, may call CUDA meanwhile. The
    # current stream is re-entered, so that it is current even after a capture that failed.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"),  # type: ignore[arg-type]
    ):
        result = run()
    return graph.replay, result


def _autocast(enabled: bool) -> AbstractContextManager[object]:
    """Enter ``torch.autocast`` with its present dtype but no cache of casts, or disable it."""
    if not torch.is_autocast_enabled("cuda"):
        return nullcontext()
    dtype = torch.get_autocast_dtype("cuda")
    return torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=False)


def _warm_up(
    units: Sequence[Unit], count: int, allow_unused: bool, exact: bool, *, waits: bool = True
) -> dict[ScalePack, None]:
    """Run the units without recording them, and return the packs in use.

    Unless ``waits``, raise if they wait for the GPU, which would break a recording, and torch.
    """
    region = Trial()
    torch.cuda.synchronize()
    quick = nullcontext() if waits else _refuse_to_wait()
    try:
        with inside(region), torch.cuda.stream(torch.cuda.Stream()), quick:
            for _ in range(count):
                _run(units, allow_unused, exact, lambda run: (_no_graph, run()))
    finally:
        torch.cuda.synchronize()  # before the caller restores state
    return region.packs


@contextmanager
def _refuse_to_wait() -> Iterator[None]:
    """Raise if code inside the context waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if any("synchronizing CUDA operation" in str(warning.message) for warning in caught):
        raise RuntimeError("it waits for the GPU")


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Return another parameter with the same memory."""
    # Autograd's node of a parameter belongs to the stream where it was made, and is reused as long
    # as something holds it, such as a pending backward or ``DistributedDataParallel``. A recording
    # cannot wait for another stream, so it needs new nodes.
    alias = nn.Parameter(parameter.detach())
    alias.__dict__ = parameter.__dict__
    return alias


@contextmanager
def _holding(module: nn.Module, aliases: _Aliases) -> Iterator[None]:
    """Replace modules' parameters by their aliases, which are listed by the parameter's id."""
    replaced = [
        (m, name, parameter)
        for m in module.modules()
        for name, parameter in m._parameters.items()
        if id(parameter) in aliases
    ]
    for m, name, parameter in replaced:
        setattr(m, name, aliases[id(parameter)])
    try:
        yield
    finally:
        for m, name, parameter in replaced:
            setattr(m, name, parameter)


def _saved(units: Sequence[Unit], precisions: Sequence[Precision]) -> Callable[[], None]:
    """Return a function that restores the present state in place and clears newer state."""
    buffers = [(b, b.detach().clone()) for unit in units for b in unit.module.buffers()]
    attributes = [(p, dict(vars(p))) for p in precisions]
    states = {
        slots: {name: tensor.clone() for name, tensor in slots.tensors().items()}
        for p in precisions
        for slots in p.slots.values()
    }

    @torch.no_grad()
    def restore() -> None:
        for slots in [slots for p in precisions for slots in p.slots.values()]:
            if slots in states:
                slots.load(states[slots])
            else:
                slots.clear()
        for buffer, value in buffers:
            buffer.copy_(value)
        for precision, before in attributes:
            vars(precision).update(before)

    return restore
